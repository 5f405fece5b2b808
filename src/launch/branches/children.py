"""The child processes of `rl --branch`: the turns of branches, and the servers, which are started again."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from cairn.config.inference import InferenceConfig
from cairn.config.shared import SupervisionConfig
from cairn.launch.supervise.slot import LOOK_SECONDS, RestartRule
from cairn.run.branches import Branches
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import END_SERVER, EXIT_USAGE
from cairn.run.files import make_folders, write_atomic
from cairn.run.heartbeat import Watch
from cairn.run.processes import kill_descent, log_end

PROGRAM = (sys.executable, "-m", "cairn.launch.branches.process")
END_SECONDS = 20
"""How long a server has to end."""
READY = "inference ready at "


class BranchTurn:
    """A process that takes a branch's steps up to one. Its lines are printed, behind the branch's name."""

    def __init__(self, branches: Branches, name: str, step: int, say: Callable[[str], None]):
        self.name = name
        self.step = step
        settings = str(branches.settings(name))
        self._process = subprocess.Popen(
            [*PROGRAM, "turn", settings, str(step), str(os.getpid())],
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


class BranchServer:
    """A server that all branches ask. One that dies is started again, with pauses as a role of a run."""

    def __init__(
        self, name: str, config: InferenceConfig, branches: Branches, supervision: SupervisionConfig
    ):
        self.name = name
        self._supervision = supervision
        self._heartbeat = branches.logs / f"{name}.heartbeat.json"
        self.url = f"http://{config.host}:{config.port}"
        self.log = branches.logs / f"{name}.log"
        self._settings = branches.settings(name)
        self._vllm_log = branches.logs / f"{name}_vllm.log"
        self._rule = RestartRule(supervision.max_restarts)
        self._restart_at: float | None = None
        make_folders(self.log.parent)
        make_folders(self._settings.parent)
        content = config.model_dump_json(indent=2, exclude={"servers"})
        write_atomic(self._settings, content.encode(), durable=True)
        self._start()

    def _start(self) -> None:
        self._restart_at = None
        self._before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*PROGRAM, "server", str(self._settings), str(self._vllm_log), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        silence, lengthy = self._supervision.heartbeat_timeout, self._supervision.hang_timeout
        about = {"silence": silence, "standstill": silence, "lengthy": lengthy}
        self._watch = Watch(self._heartbeat, self.pid, setting="--heartbeat-timeout", **about)
        self._look_at = 0.0

    @property
    def pid(self) -> int:
        """Of the process that holds the server."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said so since it was started last."""
        with self.log.open("rb") as log:
            log.seek(self._before)
            return READY.encode() in log.read()

    def look_after(self, step: Callable[[], int]) -> None:
        """Start it again if it has died, or hangs; call it often. `step` gives the newest of any branch.

        Raises:
            UsageError: it can't serve with these settings.
            CairnError: it died too often.
        """
        if self._restart_at is not None:
            if time.monotonic() >= self._restart_at:
                self._start()
            return
        if (how := self._fate()) is None:
            return
        problem = f"the {self.name} server {how}; the end of {self.log}:\n{log_end(self.log)}"
        if self._process.returncode == EXIT_USAGE:
            raise UsageError(problem)
        wait = self._rule.wait_after_death(step())
        if wait is None:
            raise CairnError(problem)
        self._restart_at = time.monotonic() + wait

    def _fate(self) -> str | None:
        """How its process has died, or hung, and was killed; None if it lives."""
        if (code := self._process.poll()) is not None:
            return f"died (exit code {code})"
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        if (hang := self._watch.problem()) is None:
            return None
        kill_descent(self.pid)
        self._process.wait()
        return f"hung ({hang})"

    def begin_to_stop(self) -> None:
        """Have it end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(END_SERVER)

    def stop(self) -> None:
        """Wait for its end, and kill it if that takes long."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_descent(self._process.pid)
            self._process.wait()


class BranchServers:
    """The servers of `rl --branch`; as a context manager, none outlives it."""

    def __init__(
        self, branches: Branches, configs: Mapping[str, InferenceConfig], supervision: SupervisionConfig
    ):
        self._branches, self._configs, self._supervision = branches, configs, supervision
        self._each: list[BranchServer] = []

    def __enter__(self) -> "BranchServers":
        try:
            for name, config in self._configs.items():
                self._each.append(BranchServer(name, config, self._branches, self._supervision))
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
        """See `BranchServer.look_after`."""
        for server in self._each:
            server.look_after(step)

    @property
    def are_ready(self) -> bool:
        """Whether all are."""
        return all(server.is_ready for server in self._each)
