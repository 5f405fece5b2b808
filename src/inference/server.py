"""Start, watch and stop vLLM's server as a child process.

Imports neither torch nor vllm: they live in the child.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cairn.config.inference import InferenceConfig
from cairn.inference.client import EPOCH_VARIABLE, TOKEN_VARIABLE, token_file
from cairn.inference.vllm_command import command, copies_folder, serves_on_gpus
from cairn.run import heartbeat
from cairn.run.errors import UsageError
from cairn.run.object_store import is_loopback
from cairn.run.output import outlive_terminal
from cairn.run.processes import keeper_command
from cairn.run.signals import STOP_SIGNALS, on_stop_signals, stop_signals_blocked
from cairn.run.waiting import Patience

# Why a vLLM server ended, from its log.


MODEL_REFUSED = "this model can't be served: "
"""How Cairn's plugin begins what it has against a model."""
OF_THE_MODEL = (
    "ValueError",
    "ValidationError",
    "NotImplementedError",
    "KeyError",
    "AttributeError",
    "TypeError",
)
"""Exceptions of vLLM's that a model, or a setting, raises at every start."""
RAISED = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception)): (\S.*)")
"""Where a traceback names its exception."""
ARGUMENT = re.compile(r"\berror: ((?:unrecognized|argument|ambiguous|the following).*)")
"""What argparse says of a command line."""
CONSEQUENCES = ("Engine core initialization failed", "EngineCore", "cancelled", "Engine process failed")
"""In what follows from another exception."""


@dataclass(frozen=True)
class LogReason:
    """A line of the log, and whether another start would end with the same one."""

    text: str
    is_final: bool


def reason(log: str) -> LogReason | None:
    """The root cause that the log of a server that died names, if it names one."""
    if MODEL_REFUSED in log:
        return LogReason(MODEL_REFUSED + log.partition(MODEL_REFUSED)[2].splitlines()[0].strip(), True)
    if argument := ARGUMENT.search(log):
        return LogReason(argument[1].strip(), True)
    lines = log.splitlines()
    found: list[LogReason] = []
    for number, line in enumerate(lines):
        raised = RAISED.search(line)
        if not raised or any(word in raised[2] for word in CONSEQUENCES) or "WARNING" in line:
            continue
        kind, text = raised[1], raised[2].strip()
        if kind == "ValidationError":  # pydantic's own text follows, and then where to read about it
            text = next(iter(lines[number + 1 : number + 2]), text)
            text = re.sub(r"^.*?\.py:\d+\] ", "", text).strip()
            text = re.sub(r"^Value error, | \[type=.*$", "", text)
        found.append(LogReason(f"{kind}: {text}", kind in OF_THE_MODEL))
    return found[0] if found else None


class ServerProgress:
    """Notes a server's progress in the heartbeat of this process."""

    def __init__(self) -> None:
        self._update: tuple[str, float] | None = None

    def note(self, status: dict[str, Any] | None) -> None:
        """Take the server's answer; None: it has not answered.

        A server that answers serves. During an update of its weights its engine says nothing for as long as
        the weights are large, so only the beginning of the update counts as progress.
        """
        if status is None:
            return
        before, update = self._update, status.get("updating")
        self._update = update and (update["version"], update["seconds"])
        if self._update is None:
            heartbeat.doing("serving")
        elif before is None or before[0] != self._update[0] or before[1] > self._update[1]:
            heartbeat.doing(f"taking the weights {self._update[0]}", lengthy=True)


GRACE = 5.0
"""Seconds that a server has to stop by itself before it is killed."""
LAST_WORDS_SECONDS = 2.0
"""Seconds in which a server that is dying writes the cause to its log."""
ANSWER_SECONDS = 10.0
"""Seconds that a busy server may take to answer a status request."""


FIRST_ANSWER_SECONDS = 120.0
"""Seconds for the first request, during which kernels are compiled."""


class AddressUnusable(RuntimeError):
    """The server can't listen where it was told to."""


class ServerFailed(RuntimeError):
    """The server died, or did not become healthy in time; the message ends with the tail of its log."""


class ModelUnservable(ServerFailed):
    """vLLM can't serve this model with these settings, however often it is started."""


class Server:
    """One vLLM server as a child process; nothing of it outlives this process, however this one ends.

    `url`, `token` and `log` (vLLM's output) are known from the start. Use as a context manager, or call
    `start`, `wait_ready` and, always, `stop`.

    Args:
        config: Address and options of the server.
        model: A Hugging Face directory or hub name.
        log: File for vLLM's output, written over; default: beside the token file.
        deaf: Whether its processes ignore stop signals; `stop` then kills them.
    """

    def __init__(self, config: InferenceConfig, model: str, log: Path | None = None, *, deaf: bool = False):
        self.config = config
        self.deaf = deaf
        self.model = model
        self.url = config.url
        self._token_file = token_file(self.url)
        self.log = log or self._token_file.with_suffix(".log")
        self.token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
        self._epoch = ""
        self._process: subprocess.Popen[bytes] | None = None
        # A server that listens on all addresses is asked on loopback.
        local_url = self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        # Made once, since that takes 20 ms; a connection for each call, since servers close idle ones.
        self._http = httpx.Client(
            base_url=local_url, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process; returns at once.

        Raises:
            AddressUnusable: the port is taken, or the host is not one of this machine.
        """
        self._check_address()
        argv, env = command(self.config, self.model)
        self._epoch = uuid.uuid4().hex
        self._token_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        deafness = stop_signals_blocked() if self.deaf else contextlib.nullcontext()
        with self.log.open("wb") as log, deafness:
            self._process = subprocess.Popen(
                keeper_command(0, argv, on_term="pass"),
                stdin=subprocess.PIPE,  # held open for as long as this process lives
                stdout=log,
                stderr=log,
                env={**os.environ, **env, TOKEN_VARIABLE: self.token, EPOCH_VARIABLE: self._epoch},
                start_new_session=True,
            )
        self._publish_token()

    def wait_ready(self) -> None:
        """Wait until this server, and not another one at its address, is healthy.

        Raises:
            AddressUnusable: another server has taken the address meanwhile.
            ModelUnservable: the model, or a setting, is the reason for its death.
            ServerFailed: it died, or `config.startup_timeout` seconds were not enough.
        """
        config = self.config.settled(gpu_servers=serves_on_gpus())
        assert config.startup_timeout is not None, "it is settled"
        patience = Patience(config.startup_timeout)
        while self.status(timeout=2.0) is None:
            if not self.alive:
                raise self._death()
            if patience.over:
                raise ServerFailed(
                    f"the inference server is not ready after {config.startup_timeout:g} s (startup_timeout "
                    "allows more: --startup-timeout of `inference`, else --inference.startup-timeout; large "
                    f"models and busy machines take longer); {self._log_tail()}"
                )
            time.sleep(0.1)
        self._generate_once()

    def _generate_once(self) -> None:
        """Ask for two tokens: vLLM dies only at the first request of what its kernels don't support."""
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "detokenize": False}}
        try:
            answer = self._http.post("/inference/v1/generate", json=body, timeout=FIRST_ANSWER_SECONDS)
            if answer.status_code < 500:
                return
        except httpx.HTTPError:
            pass
        assert self._process is not None, "it was started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.kill()
        self._process.wait()
        raise self._death()

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may still be loading."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise `ServerFailed` if the server, once ready, has died without having been stopped."""
        # When its engine dies, vLLM exits with code 0, or hangs without listening if requests were in flight.
        if not self.alive or not self._listening():
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(LAST_WORDS_SECONDS)
            raise ServerFailed(f"the inference server died; {self._log_tail()}")

    def status(self, timeout: float = ANSWER_SECONDS) -> dict[str, Any] | None:
        """What it says of itself; None if it is not answering within seconds, or is another server.

        The answer comes from its engine, not only its HTTP front end, unless its weights are being updated.
        Only the process that `start` has started knows the epoch that it was given.
        """
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            answer = self._call("GET", "/cairn/status", timeout=timeout)
            if answer.status_code == 200 and answer.json()["epoch"] == self._epoch:
                return answer.json()
        return None

    def _death(self) -> Exception:
        """The exception for a server that died before it was ready."""
        why = reason(self.log.read_text(errors="replace"))
        if self._listening():  # not ours, which is dead
            return AddressUnusable(
                f"another server answers at {self.url}; choose another address with --port or --host"
            )
        if why is None:
            return ServerFailed(f"the inference server died while starting; {self._log_tail()}")
        if why.is_final:
            return ModelUnservable(
                f"vLLM can't serve {self.model} with these settings: {why.text} (the whole log: {self.log})"
            )
        return ServerFailed(f"the inference server died while starting: {why.text}; {self._log_tail()}")

    def stop(self) -> None:
        """Stop the server with all its processes within about `GRACE` seconds; aborts requests in flight."""
        if self._process is None:
            return
        if self.alive and not self.deaf:
            # With requests in flight vLLM may hang on SIGTERM.
            with contextlib.suppress(httpx.HTTPError):
                headers = {"Authorization": f"Bearer {self.token}"}
                self._http.post("/pause?mode=abort", headers=headers, timeout=2.0)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        self.kill()
        self._process.wait()
        # A server that was killed has left its copies of policies behind.
        shutil.rmtree(copies_folder(self._epoch), ignore_errors=True)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self._token_file.read_text())["token"] == self.token:
                self._token_file.unlink()

    def kill(self) -> None:
        """Kill all the server's processes at once."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _check_address(self) -> None:
        host, port = self.config.host, self.config.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            raise AddressUnusable(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host"
            ) from None

    def _publish_token(self) -> None:
        if os.environ.get(TOKEN_VARIABLE):
            return  # whoever set it gives it to the clients as well
        partial = self._token_file.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"url": self.url, "token": self.token, "pid": os.getpid()}, file)
        partial.replace(self._token_file)

    def _listening(self) -> bool:
        try:
            return self._call("GET", "/health").status_code != 503
        except httpx.ConnectError:
            return False
        except httpx.HTTPError:
            return True  # busy

    def _call(self, method: str, path: str, timeout: float = 2.0) -> httpx.Response:
        return self._http.request(method, path, timeout=timeout)

    def _log_tail(self, lines: int = 20) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"the end of {self.log}:", *("    " + line for line in tail)])


def run(
    config: InferenceConfig, model: str, log: Path | None = None, *, end_signal: signal.Signals | None = None
) -> int:
    """Run a server in the foreground until a signal stops it; to be called from the main thread.

    SIGINT, SIGTERM or SIGHUP stops it cleanly, a second request at once; or `end_signal` alone does, for a
    server that others depend on. vLLM's output goes to `log` (see `Server`).

    Returns:
        The exit code: 0 stopped as requested; 1 the server died or was not ready in time.

    Raises:
        UsageError: the address can't be used, or the model can't be served.
    """
    console = Console(stderr=True, soft_wrap=True)
    server = Server(config, model, log, deaf=end_signal is not None)
    ending = False

    def interrupt(_name: str) -> None:
        if ending:
            server.kill()  # it only hurries
        else:
            raise KeyboardInterrupt

    outlive_terminal()
    signals = contextlib.ExitStack()
    signals.enter_context(
        on_stop_signals(interrupt, server.kill, [end_signal] if end_signal else STOP_SIGNALS)
    )
    try:
        if not is_loopback(config.host):
            console.print(
                f"warning: anyone on the network who reaches {config.host} port {config.port} can generate "
                "(loading weights needs the token)",
                markup=False,
            )
        began = time.monotonic()
        server.start()
        print(f"starting the inference server; its log: {server.log}", flush=True)
        heartbeat.doing("starting the inference server", waiting=True)  # for startup_timeout at most
        columns = SpinnerColumn(), TextColumn("loading vLLM and the model"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task("", total=None)
            server.wait_ready()
        seconds = time.monotonic() - began
        print(f"inference ready at {server.url} (model {model}, {seconds:.1f} s)", flush=True)
        progress = ServerProgress()
        while True:
            time.sleep(1)
            server.check()
            progress.note(server.status())
    except KeyboardInterrupt:
        print("stopping the inference server", flush=True)
        return 0
    except (AddressUnusable, ModelUnservable) as error:
        raise UsageError(str(error)) from error
    except ServerFailed as error:
        console.print(str(error), markup=False)
        return 1
    finally:
        ending = True
        server.stop()
        signals.close()
