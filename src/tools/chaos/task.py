"""Tasks, their server, the results of runs, and what is observed while they run."""

import asyncio
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.inference.client import TOKEN_VARIABLE, InferenceClient
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError
from cairn.run.view import RunView
from cairn.tools.chaos.plan import ChaosSettings, Disaster
from cairn.tools.chaos.processes import Family
from cairn.tools.chaos.proxy import Proxy

DEADLINE = 600.0
"""Seconds after which a run without a new step or disaster, or the start of a server, counts as hung."""


class SharedServer:
    """The long-lived server that the harness starts for its runs, and restarts as a user would."""

    def __init__(self, folder: Path, command: list[str], url: str, token: str):
        self.url = url
        self.log = folder / "server.log"
        self.command = command
        self.family = Family({TOKEN_VARIABLE: token})
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the server unless it is running; returns at once. It dies with the calling thread."""
        if self._process is None or self._process.poll() is not None:
            self._process = self.family.start(self.log, self.command)
        return self._process

    def start(self) -> None:
        """Start the server unless it is running; returns when it is healthy.

        Raises:
            CairnError: the server does not start.
        """
        process = self.launch()
        end = time.monotonic() + DEADLINE
        while not asyncio.run(self._healthy()):
            if process.poll() is not None or time.monotonic() > end:
                raise CairnError(f"the inference server does not start; see {self.log}")
            time.sleep(0.2)

    async def _healthy(self) -> bool:
        async with InferenceClient(self.url) as client:
            return await client.health()

    def kill(self) -> None:
        """Kill all its processes with SIGKILL."""
        self.family.kill()
        if self._process:
            self._process.wait()


@dataclass
class ChaosTask:
    """A command to run repeatedly.

    proxy: between run and server, unless the run starts its own server. server: the harness's, if it is used.
    branches: names of the command's branches, if it has some.
    remote: if `setting.remote`, the URL below which each run has its remote steps; None: the folder of the
    run directory.
    """

    command: list[str]
    setting: ChaosSettings
    token: str = ""
    proxy: Proxy | None = None
    server: SharedServer | None = None
    remote: str | None = None
    branches: tuple[str, ...] = ()
    calm: "Result | None" = None
    """The result of the undisturbed run."""


@dataclass
class Result:
    """The result of a run."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    """The results of validations."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """Checksums of the last step's weights and optimiser state, by file."""
    seconds: float = 0.0
    """Seconds from the first step to the last."""
    struck: list[Disaster] = field(default_factory=list)
    missed: list[Disaster] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    """Number of recomputed steps, for each time that the run fell back."""
    proved: int = 0
    """Number of steps that were taken again and gave the same bits."""
    lost: list[int] = field(default_factory=list)
    """Number of steps after the newest remote one, for each machine that was lost."""
    branches: dict[str, "Result"] = field(default_factory=dict[str, "Result"])
    """That of each branch, by its name."""
    choices: list[Any] = field(default_factory=list[Any])
    """Which branches were kept."""


class RunWatch:
    """Follows a run's steps and checkpoints, and records what must never happen."""

    def __init__(self, run: RunDirectory, result: Result):
        self.view = RunView(run.path)
        self.store = CheckpointStore(run.checkpoints)
        self.result = result
        self.step = 0
        self.seen_at: dict[int, float] = {}
        """The time at which each step first appeared in metrics.jsonl."""
        self.latest = 0
        self.damaged: set[int] = set()
        """Existing checkpoints that the harness itself has damaged."""
        self.fell_back = False
        """Whether the run had to resume from an older checkpoint than the newest."""
        self.remote_step = 0
        """The newest remote step when the machine before this one was lost."""
        self.arriving = False
        """Whether rows from the object store may still be cut to the step that the run goes on from."""

    def move(self, run: RunDirectory, remote_step: int) -> None:
        """Follow the run to another machine, where it must go on from `remote_step`, or a later step."""
        self.result.lost.append(max(self.step - remote_step, 0))
        self.view, self.store = RunView(run.path), CheckpointStore(run.checkpoints)
        self.step = self.latest = 0
        self.damaged = set()
        self.remote_step = remote_step
        self.arriving = True

    def look(self) -> None:
        """Check once; call it as often as possible."""
        rows = self.view.metrics()
        step = rows[-1]["step"] if rows else 0
        if step < self.step and self.arriving and step == self.remote_step:
            self.arriving = False  # these steps count as lost
        elif step < self.step:
            self.result.recomputed.append(self.step - step)
            if step < self.latest and self.latest not in self.damaged:
                what = f"went back from step {self.step} to {step}, although step {self.latest} was saved"
                self.result.violations.append(what)
        if rows and step < self.remote_step:
            what = (
                f"went on after step {step} elsewhere, although the remote store had step {self.remote_step}"
            )
            self.result.violations.append(what)
            self.remote_step = 0  # said once
        for number in range(1, step + 1):
            self.seen_at.setdefault(number, time.monotonic())
        self.step = step
        latest = self.store.latest() or 0
        if latest < self.latest and self.latest not in self.damaged:
            self.result.violations.append(f"latest went back from step {self.latest} to {latest}")
        if latest and latest not in self.damaged:
            self._check(latest, content=latest != self.latest)
        self.latest = latest
        self.damaged = {step for step in self.damaged if self.store.exists(step)}

    def _check(self, step: int, *, content: bool) -> None:
        try:
            verify(self.store.folder(step), content=content)
        except CheckpointError as error:
            if self.store.latest() == step:  # not replaced by a newer one in the meantime
                self.result.violations.append(f"latest is not valid: {error}")
