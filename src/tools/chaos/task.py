"""What is run again and again, its server, what came of a run, and what is seen of it while it goes on."""

import asyncio
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore, verify
from cairn.inference.client import TOKEN_VARIABLE, InferenceClient
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError
from cairn.run.view import RunView
from cairn.tools.chaos.plan import Disaster, Setting
from cairn.tools.chaos.processes import Family
from cairn.tools.chaos.proxy import Proxy

DEADLINE = 600.0
"""Seconds that a run or a server's start may take before it counts as hanging."""


class Server:
    """The long-lived server that the harness starts for its runs, and the user who starts it again."""

    def __init__(self, folder: Path, command: list[str], url: str, token: str):
        self.url = url
        self.log = folder / "server.log"
        self.command = command
        self.family = Family({TOKEN_VARIABLE: token})
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, if it is not there; returns at once. It ends with the thread that calls this."""
        if self._process is None or self._process.poll() is not None:
            self._process = self.family.start(self.log, self.command)
        return self._process

    def start(self) -> None:
        """Start it, if it is not there; returns when it is healthy.

        Raises:
            CairnError: it does not start.
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
        """SIGKILL, all its processes."""
        self.family.kill()
        if self._process:
            self._process.wait()


@dataclass
class Task:
    """A configuration to run again and again.

    proxy: between the run and its server, if that is not the run's own. server: that, if it is the harness's.
    """

    command: list[str]
    setting: Setting
    token: str = ""
    proxy: Proxy | None = None
    server: Server | None = None
    calm: "Result | None" = None
    """How it went undisturbed."""


@dataclass
class Result:
    """What came of a run."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    """Checksums of the last step's weights and optimiser state, by file."""
    seconds: float = 0.0
    """From the first step to the last."""
    struck: list[Disaster] = field(default_factory=list)
    missed: list[Disaster] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    """Steps that had to be done again, for each time that the run fell back."""


class Watch:
    """Follows a run's steps and checkpoints, and notes what must never be seen."""

    def __init__(self, run: RunDirectory, result: Result):
        self.view = RunView(run.path)
        self.store = CheckpointStore(run.checkpoints)
        self.result = result
        self.step = 0
        self.seen_at: dict[int, float] = {}
        """When each step stood in metrics.jsonl first."""
        self.latest = 0
        self.damaged: set[int] = set()
        """Checkpoints that the harness itself has damaged, as long as they are there."""
        self.fell_back = False
        """Whether the run had to go on from an older checkpoint than the newest."""

    def look(self) -> None:
        """To be called as often as can be."""
        rows = self.view.metrics()
        step = rows[-1]["step"] if rows else 0
        if step < self.step:
            self.result.recomputed.append(self.step - step)
            if step < self.latest and self.latest not in self.damaged:
                what = f"went back from step {self.step} to {step}, although step {self.latest} was saved"
                self.result.violations.append(what)
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
            if self.store.latest() == step:  # and was not deleted in favour of a newer one meanwhile
                self.result.violations.append(f"latest is not valid: {error}")
