"""The `ckpt` commands that prove what a run has computed: `replay`, `prove` and `bisect`."""

from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from cairn.config.shared import LocalRun, ToolCommand
from cairn.run.output import progress_bars
from cairn.tools.ckpt_output import print_json, say


class Differences(Protocol):
    """What a command has found."""

    def to_json(self) -> dict[str, Any]: ...

    def lines(self, top: int) -> list[str]: ...


class Comparing(ToolCommand):
    """A command that prints differences."""

    top: int = Field(default=10, ge=1)
    """Differences of each kind to print (with --json: all)."""

    def show(self, found: Differences) -> None:
        """Print what was found."""
        if self.as_json:
            print_json(found.to_json())
        else:
            for line in found.lines(self.top):
                say(line)


class OfSteps(Comparing):
    """What `replay` and `prove` share."""

    workers: int | None = Field(default=None, ge=1)
    """Ranks to take the steps with (default: as many as took them; with others, bits may differ)."""
    bound: float | None = Field(default=None, gt=0)
    """Largest relative difference that counts as rounding (default: none where bits must be the same)."""
    work_dir: Path | None = None
    """Folder for the time (default: beside the run, so that the checkpoint is not copied)."""


class ReplaySteps(OfSteps):
    """Take steps again and compare them, to the bit; exit code 1 if they differ."""

    command = "ckpt replay"
    positional = ("run",)
    run: LocalRun
    """An output folder; the run may be going on."""
    step: int | None = Field(default=None, ge=0)
    """Take the step after this one again, from the nearest checkpoint (default: those before the newest)."""
    through: int | None = Field(default=None, ge=1)
    """Go on through this step; if it has a checkpoint, weights and moments are compared, too."""

    def execute(self) -> int:
        from cairn.tools.replay.recorded import RecordedRun  # imports numpy, which would slow down --help
        from cairn.tools.replay.replay import replay

        run = RecordedRun(self.run)
        stretch = run.stretch(self.step, self.through)
        with progress_bars() as stage:
            found = replay(
                run,
                stretch,
                workers=self.workers,
                bound=self.bound,
                work_dir=self.work_dir,
                stage=stage,
            )
        self.show(found)
        return 0 if found.ok else 1


class Prove(OfSteps):
    """Replay steps drawn at random, and write proof.json and proof.md; exit code 1 if some differ."""

    command = "ckpt prove"
    positional = ("run",)
    run: LocalRun
    """An output folder; the run may be going on."""
    sample: int = Field(default=5, ge=1)
    """How many stretches between neighbouring checkpoints to draw."""
    seed: int = 0
    """Seed of the draw."""

    def execute(self) -> int:
        from cairn.tools.replay.recorded import RecordedRun  # imports numpy, which would slow down --help
        from cairn.tools.replay.replay import PROOF, prove

        run = RecordedRun(self.run)
        with progress_bars() as stage:
            proof = prove(
                run,
                self.sample,
                self.seed,
                workers=self.workers,
                bound=self.bound,
                work_dir=self.work_dir,
                stage=stage,
            )
        proof.write(run.path)
        self.show(proof)
        if not self.as_json:
            say(f"written to {run.path / PROOF}")
        return 0 if proof.ok else 1


class Bisect(Comparing):
    """Find where two runs part, and what can explain it; exit code 1 if they do."""

    command = "ckpt bisect"
    positional = ("a", "b")
    a: LocalRun
    """An output folder."""
    b: LocalRun
    """Another."""

    def execute(self) -> int:
        from cairn.tools.replay.parting import bisect  # imports pyarrow, which would slow down --help
        from cairn.tools.replay.recorded import RecordedRun

        with progress_bars() as stage:
            found = bisect(RecordedRun(self.a), RecordedRun(self.b), stage)
        self.show(found)
        return 0 if found.step is None else 1
