"""The child processes of `rl --branch`: the turns of branches, and the servers that all share."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from cairn.config.inference import InferenceConfig
from cairn.config.shared import SupervisionConfig
from cairn.inference.supervised import SupervisedServer
from cairn.run.branches import Branches
from cairn.run.processes import kill_descent
from cairn.run.supervised import RestartRule

PROGRAM = (sys.executable, "-m", "cairn.launch.branches.process")


class BranchTurn:
    """A process that takes a branch's steps up to one. Its lines are printed, behind the branch's name.

    urls: where the servers are.
    """

    def __init__(
        self, branches: Branches, name: str, step: int, urls: Sequence[str], say: Callable[[str], None]
    ):
        self.name = name
        self.step = step
        settings = str(branches.settings(name))
        self._process = subprocess.Popen(
            [*PROGRAM, settings, str(step), str(os.getpid()), *urls],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._print, args=[self._process.stdout, say], daemon=True)
        self._reader.start()

    def _print(self, output: IO[bytes], say: Callable[[str], None]) -> None:
        for line in output:
            with contextlib.suppress(OSError):  # whoever reads the command's output is gone
                say(f"{self.name} | {line.decode(errors='replace').rstrip()}")

    @property
    def exit_code(self) -> int | None:
        """The exit code, once all that it has printed is read; None while it lives."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1.0)  # a process of the branch that is still ending may hold the other end
        return code

    def ask_to_stop(self) -> None:
        """Have the branch save and stop, as a signal to its launcher does; a second one ends it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and all that it has started."""
        if self._process.poll() is None:
            kill_descent(self.pid)
        self._process.wait()


class BranchServers:
    """The servers of `rl --branch`; as a context manager, none outlives it."""

    def __init__(
        self, branches: Branches, configs: Mapping[str, InferenceConfig], supervision: SupervisionConfig
    ):
        self._branches, self._configs, self._supervision = branches, configs, supervision
        self._each: list[SupervisedServer] = []

    def __enter__(self) -> "BranchServers":
        supervision, logs = self._supervision, self._branches.logs
        try:
            for name, config in self._configs.items():
                rule = RestartRule(supervision.max_restarts)
                self._each.append(SupervisedServer(name, config, logs, supervision, rule))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._each:
            server.begin_to_stop()
        for server in self._each:
            server.stop()

    def look_after(self, step: Callable[[], int]) -> None:
        """See `SupervisedServer.look_after`; `step` gives the newest of any branch."""
        for server in self._each:
            server.look_after(step)

    @property
    def are_ready(self) -> bool:
        """Whether all are."""
        return all(server.is_ready for server in self._each)
