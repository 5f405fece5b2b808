"""A server in a process of its own, which is started again when it dies or hangs; and that process's program.

`python -m cairn.inference.supervised LOG HEARTBEAT PARENT` serves by the settings that it reads from its
standard input, and writes vLLM's output to LOG. It dies with PARENT.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cairn.config.inference import InferenceConfig
from cairn.config.shared import SupervisionConfig
from cairn.run import heartbeat
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import END_SERVER, EXIT_USAGE, answer
from cairn.run.machine import use_gpus
from cairn.run.processes import die_with, kill_descent, log_end
from cairn.run.supervised import RestartRule, Supervised, SupervisedProcess

PROGRAM = (sys.executable, "-m", "cairn.inference.supervised")
END_SECONDS = 20
"""How long a server has to end."""
READY = b"inference ready at "


class SupervisedServer(Supervised[SupervisedProcess]):
    """A server that lives as long as its owner wants it to; constructing it starts it.

    `url` is known from the start.

    Args:
        name: for messages, and for the files in `folder`: NAME.log, NAME_vllm.log, NAME.heartbeat.json.
        config: its settings, with a model that is resolved.
        supervision: how long it may be silent.
        rule: when it is started again, and when no more; its steps are the owner's.
    """

    def __init__(
        self,
        name: str,
        config: InferenceConfig,
        folder: Path,
        supervision: SupervisionConfig,
        rule: RestartRule,
    ):
        super().__init__(name, folder / f"{name}.log", folder / f"{name}.heartbeat.json", rule)
        self.url = config.url
        self._settings = config.model_dump_json(exclude={"servers"}).encode()
        self._vllm_log = folder / f"{name}_vllm.log"
        self._supervision = supervision
        self._begin()

    def _start(self) -> SupervisedProcess:
        self._before = self.log.stat().st_size if self.log.exists() else 0
        argv = [*PROGRAM, str(self._vllm_log), str(self._heartbeat), str(os.getpid())]
        process = SupervisedProcess(argv, self.log, stdin=subprocess.PIPE)
        process.send(self._settings)
        process.close_input()
        silence, lengthy = self._supervision.heartbeat_timeout, self._supervision.hang_timeout
        self.watch_server(process.pid, silence=silence, lengthy=lengthy)
        return process

    @property
    def is_ready(self) -> bool:
        """Whether it has said so since it was started last."""
        if self._restart_at is not None:
            return False
        with self.log.open("rb") as log:
            log.seek(self._before)
            return READY in log.read()

    def look_after(self, step: Callable[[], int]) -> None:
        """Start it again if it has died, or hangs; call it often. `step` gives the owner's newest step.

        Raises:
            UsageError: it can't serve with these settings, as its first start shows.
            CairnError: it died too often.
        """
        if (how := self._look()) is None:
            return
        self._kill()
        problem = f"the {self.name} server {how}; the end of {self.log}:\n{log_end(self.log)}"
        if self.exit_code == EXIT_USAGE and not self._restarted:
            raise UsageError(problem)
        if not self._plan_restart(step()):
            raise CairnError(problem)

    def begin_to_stop(self) -> None:
        """Have it end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.signal(END_SERVER)

    def stop(self) -> None:
        """Wait for its end, and kill it if that takes long."""
        if not self._process.wait(END_SECONDS):
            self._kill()

    def _kill(self) -> None:
        """Kill it with all that it has started, which has sessions of its own."""
        if self.exit_code is None:
            kill_descent(self.pid)
        self._process.kill()


def main(log: str, beats: str, parent: str) -> int:
    """Serve until the parent ends it; returns the exit code of `inference`."""
    from cairn.inference.server import run

    die_with(int(parent))
    config = InferenceConfig.model_validate_json(sys.stdin.buffer.read())
    heartbeat.start(Path(beats))
    use_gpus(config.gpus)
    return run(config, config.model.name, Path(log), end_signal=END_SERVER)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(answer(lambda: main(*arguments)))
