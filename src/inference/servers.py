"""Servers for one policy after the other: one that a command starts, or running ones that it is given."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Protocol

from cairn.config.inference import InferenceConfig
from cairn.inference.client import InferenceClient, ServerStatus
from cairn.inference.server import Server
from cairn.run.connections import free_port
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_STOPPED
from cairn.run.messages import PolicyName
from cairn.run.recipe import model_of
from cairn.run.waiting import run_async

SERVED = "eval-"
"""What the names begin with under which servers get policies from `eval`."""
REPLAYED = "replay-"
"""The same of `ckpt replay`."""
ANSWER_SECONDS = 30.0
"""Seconds that a given server has to answer a status request."""
LOOK_SECONDS = 1.0
"""Between two looks at a server of its own."""


class Servers(Protocol):
    """Servers for one policy after the other."""

    def serving(self, model: Path) -> contextlib.AbstractContextManager[Sequence[str]]:
        """The addresses of servers that run, and compute what the model's config.json says.

        Args:
            model: Hugging Face directory.

        Raises:
            UsageError: a server that runs computes something else.
            ServerUnavailable: a given server does not answer.
            AddressUnusable, ServerFailed: a server can't be started; see `Server.wait_ready`.
        """
        ...

    async def watch(self) -> None:
        """Until cancelled, look whether the servers live.

        Raises:
            ServerFailed: one has died, and `serving` will start it again.
        """
        ...

    def kill_and_exit(self) -> None:
        """End this process, and all that it has started, at once: whatever was answered is recorded."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class OwnServer:
    """A server that is started for the first policy, and again for one that has another architecture."""

    def __init__(
        self,
        config: InferenceConfig,
        folder: Path,
        check: Callable[[Path], None],
        tell: Callable[[str], None],
    ):
        """Choose its port.

        Args:
            folder: for its log.
            check: is called with a model's folder before a server is started for it.
        """
        if "port" not in config.model_fields_set:
            config = config.model_copy(update={"port": port_for_server(config.host)})
        self._config = config
        self._check = check
        self._log = folder / "vllm.log"
        self._tell = tell
        self._server: Server | None = None
        self._computes = ""

    @contextlib.contextmanager
    def serving(self, model: Path) -> Generator[Sequence[str]]:
        computes = model_of(model)
        if self._server is not None and (computes != self._computes or not self._server.alive):
            self.close()
        if self._server is None:
            self._check(model)
            self._tell(f"starting an inference server; its log: {self._log}")
            self._server = server = Server(self._config, str(model), self._log)
            try:
                server.start()
                server.wait_ready()
            except BaseException:
                self.close()
                raise
            self._computes = computes
        try:
            yield [self._server.url]
        except BaseException:
            self.close()
            raise

    async def watch(self) -> None:
        assert self._server is not None, "it is serving"
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self._server.check)

    def kill_and_exit(self) -> None:
        if self._server is not None:
            self._server.kill()
        os._exit(EXIT_STOPPED)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop()


class GivenServers:
    """Servers that run, and go on running with the last policy that they were given."""

    def __init__(self, urls: Sequence[str], ended: Collection[str | None], setting: str, *, take: bool):
        """See that no run uses them.

        Args:
            ended: ids of runs at which nobody is at work.
            setting: what names a server on the command line.
            take: whether they are taken, whoever uses them.

        Raises:
            UsageError: a run does, or may.
            ServerUnavailable: one does not answer.
        """
        self._urls, self._setting = urls, setting
        self.statuses = {url: run_async(_status(url)) for url in urls}
        """What each of them has said of itself."""
        for url, status in self.statuses.items():
            if not take:
                refuse_in_use(url, status, ended, setting)

    @contextlib.contextmanager
    def serving(self, model: Path) -> Generator[Sequence[str]]:
        for url, status in self.statuses.items():
            served = Path(status.model)
            if not (served / "config.json").is_file():
                raise UsageError(
                    f"{self._setting} {url}: it was started with the model {status.model}, whose config.json "
                    "can't be read here, so there is no telling whether it computes what other weights need; "
                    f"start it with a folder that this machine sees, too, or leave {self._setting} out"
                )
            if model_of(served) != model_of(model):
                raise UsageError(
                    f"{self._setting} {url}: it was started with {status.model}, and {model} has another "
                    f"architecture (their config.json differ); leave {self._setting} out, or start a server "
                    "with that model"
                )
        yield self._urls

    async def watch(self) -> None:
        """Nothing: requests wait for a server that is started again."""
        await asyncio.Event().wait()

    def kill_and_exit(self) -> None:
        os._exit(EXIT_STOPPED)

    def close(self) -> None:
        """Nothing: the servers are somebody else's."""


async def _status(url: str) -> ServerStatus:
    async with InferenceClient(url, timeout=ANSWER_SECONDS, retry_for=0) as client:
        return await client.status()


def refuse_in_use(url: str, status: ServerStatus, ended: Collection[str | None], setting: str) -> None:
    """Refuse a server that a run uses, or may use: it would get other weights in the middle of it.

    Args:
        ended: ids of runs at which nobody is at work.
        setting: what names the server on the command line.

    Raises:
        UsageError: its weights are the policy of another run, an update is under way, or it sleeps.
    """
    with contextlib.suppress(ValueError):
        policy = PolicyName.parse(status.weight_version)
        if not policy.run_id.startswith((SERVED, REPLAYED)) and policy.run_id not in ended:
            raise UsageError(
                f"{setting} {url}: it serves step {policy.step} of run {policy.run_id}, which may be "
                "going on, and would get other weights in the middle of it: give another server, or none, or "
                "--take-server if that run is over"
            )
    if status.updating is not None or status.asleep:
        what = "is asleep" if status.asleep else "is being given weights"
        raise UsageError(f"{setting} {url}: it {what}, so somebody uses it; --take-server takes it anyway")


def port_for_server(host: str) -> int:
    """A port of the host for a server that is started next.

    Raises:
        UsageError: the host is not one of this machine.
    """
    try:
        return free_port(host)
    except OSError as error:
        raise UsageError(f"--inference.host {host}: can't listen there: {error.strerror}") from None
