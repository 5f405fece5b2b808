"""Tells somebody that a run has ended or failed, that a role was restarted, or that something is wrong.

A notice is a JSON object, posted to a URL (`Webhook`) or given to a command (`NotifyCommand`).
"""

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cairn.config.sinks import FROM_ENVIRONMENT, NotifyCommandConfig, WebhookConfig, problem_of_url
from cairn.run.errors import CairnError, UsageError
from cairn.run.jsonlines import Row
from cairn.run.output import quoted
from cairn.watch.sinks.sink import LeftOut, Sink, SinkRun

LATER = (408, 425, 429)
"""Answers of 400 to 499 after which the same notice may be taken later."""
SHOWN = 300
"""Characters of what a command says that are quoted."""


class NotTold(CairnError):
    """A notice has not arrived."""


def notice(event: Row, run: SinkRun) -> dict[str, Any] | None:
    """What is told of an event of history.jsonl; None if nothing is.

    event: ended, failed, restarted or diagnosed. text: a sentence for people. The other fields say the same
    for programs.
    """
    about: dict[str, Any] = {}
    match event["event"]:
        case "ended":
            state, reason = event["state"], event["reason"]
            kind = "ended" if state in ("done", "stopped") else "failed"
            text = f"{state} at step {event['step']}" + (f": {reason}" if reason else "")
            about = {"state": state, "step": event["step"], "reason": reason}
        case "restart":
            kind, text = "restarted", f"{event['role']} {event['reason']} and {event['how']}"
            about = {name: event[name] for name in ("role", "step", "reason", "how")}
        case "diagnosed":
            kind, text = "diagnosed", f"{event['what']}. {event['advice']}"
            about = {name: event[name] for name in ("rule", "level", "step", "what", "advice")}
        case _:
            return None
    return {
        "event": kind,
        "text": f"{run.name}: {text}",
        "run": str(run.path),
        "run_id": run.run_id,
        "command": run.command,
        "host": run.host,
        "time": event.get("time"),
        **about,
    }


class _Notifier(Sink):
    """Sends notices of the wanted kinds, each until it has arrived."""

    def __init__(self, config: WebhookConfig | NotifyCommandConfig):
        self._events = config.events
        self._timeout = config.timeout

    def begin(self, run: SinkRun, after: int) -> None:
        self._run = run

    def event(self, event: Row) -> None:
        found = notice(event, self._run)
        if found is not None and found["event"] in self._events:
            self.send(found)

    def send(self, found: dict[str, Any]) -> None:
        """Send one notice.

        Raises:
            NotTold: it has not arrived, and is sent again.
            LeftOut: it has not arrived, and is not sent again.
        """
        raise NotImplementedError


class Webhook(_Notifier):
    """Posts notices to a URL. Nothing that is logged or told names more of it than its host."""

    def __init__(self, config: WebhookConfig):
        super().__init__(config)
        self.config = config

    def problems(self, run: Path) -> Iterator[str]:
        """Nothing that may change: whether somebody answers there is found out by the first notice.

        Raises:
            UsageError: there is no URL.
        """
        self._url()
        yield from ()

    def _url(self) -> str:
        given = self.config.url
        if not given:
            raise UsageError(
                "--sinks.webhook.url: give the URL that notices are posted to, or env:NAME for that in the "
                "environment variable NAME"
            )
        if not given.startswith(FROM_ENVIRONMENT):
            return given
        url = os.environ.get(given.removeprefix(FROM_ENVIRONMENT), "")
        if problem := "it is not set" if not url else problem_of_url(url):
            raise UsageError(f"--sinks.webhook.url {given}: the environment variable: {problem}")
        return url

    def send(self, found: dict[str, Any]) -> None:
        parts = urlsplit(self._url())
        assert parts.hostname, "the URL was checked"
        where = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self._timeout)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Content-Type": "application/json", "User-Agent": "cairn"}
        try:
            with _closed_after(connection, self._timeout):
                connection.request("POST", target, json.dumps(found).encode(), headers)
                status = connection.getresponse().status
        except TimeoutError:
            raise NotTold(f"{where} has not answered within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            raise NotTold(f"{where} can't be told: {reason}") from None
        finally:
            connection.close()
        if 400 <= status < 500 and status not in LATER:
            # Nor will it take the same the next time, and others wait behind it.
            raise LeftOut(f"{where} does not take a notice (HTTP {status})")
        if status >= 300:
            raise NotTold(f"{where} answers HTTP {status}")


@contextlib.contextmanager
def _closed_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Within it the connection is cut after so many seconds: its own timeout is for each piece alone.

    Raises:
        TimeoutError: it was.
    """
    cut = threading.Event()

    def close() -> None:
        cut.set()
        with contextlib.suppress(AttributeError, OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, close)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if cut.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()


class NotifyCommand(_Notifier):
    """Gives notices to a shell command, on its standard input."""

    def __init__(self, config: NotifyCommandConfig):
        super().__init__(config)
        self.config = config

    def problems(self, run: Path) -> Iterator[str]:
        """A program that is not there.

        Raises:
            UsageError: there is no command, or the shell does not understand it.
        """
        command = self.config.run
        if not command.strip():
            raise UsageError(
                '--sinks.command.run: give the command that gets notices, such as "jq -r .text >> notices"'
            )
        checked = subprocess.run(
            ["/bin/sh", "-n", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if checked.returncode:
            said = quoted(checked.stderr.decode(errors="replace").strip(), SHOWN)
            raise UsageError(f"--sinks.command.run {command!r}: the shell does not understand it: {said}")
        with contextlib.suppress(ValueError):  # what a shell reads otherwise
            first = next(iter(shlex.split(command)), "")
            if first.replace("-", "").replace("_", "").isalnum() and not _is_there(first):
                yield f"--sinks.command.run {command!r}: there is no program {first!r}"

    def send(self, found: dict[str, Any]) -> None:
        process = subprocess.Popen(
            ["/bin/sh", "-c", self.config.run],
            stdin=subprocess.PIPE,
            stdout=2,  # both into logs/sinks.log
            stderr=2,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(BrokenPipeError):  # it need not read
                process.communicate(json.dumps(found).encode() + b"\n", timeout=self._timeout)
            code = process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise LeftOut(f"{self.config.run!r} has not ended within {self._timeout:g} s") from None
        if code:  # it is not run again: it may have done a part of its work
            raise LeftOut(f"{self.config.run!r} ended with exit code {code}; see logs/sinks.log")


def _is_there(program: str) -> bool:
    if shutil.which(program):
        return True
    known = subprocess.run(
        ["/bin/sh", "-c", 'command -v -- "$1"', "sh", program], capture_output=True, check=False
    )
    return known.returncode == 0
