"""The `ckpt` commands that prove what a run has computed: `replay`, `prove` and `bisect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import Field, model_validator

from cairn.config.shared import GivenRollout, LocalRun, Place, RolloutKey, ToolCommand
from cairn.run.errors import UsageError
from cairn.run.output import Stage, progress_bars
from cairn.tools.ckpt_output import print_json, say

if TYPE_CHECKING:
    from cairn.tools.replay.answers import RolloutReplayed
    from cairn.tools.replay.recorded import RecordedRun
    from cairn.tools.replay.replay import Replayed


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
    bound: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest relative difference that counts as rounding (default: none where bits must be the same); of an
    answer, the largest mean difference of its logprobs."""
    work_dir: Path | None = None
    """Folder for the time (default: beside the run, so that the checkpoint is not copied)."""
    server: str | None = None
    """Address of a server that runs, to ask for answers again (default: one that is started)."""
    take_server: bool = False
    """Take the server although a run may use it: it is given other weights."""


class ReplaySteps(OfSteps):
    """Take steps again, or ask for an answer again, and compare, to the bit; exit code 1 if they differ."""

    command = "ckpt replay"
    positional = ("run",)
    run: Place
    """An output folder, or its URL in an object store; the run may be going on."""
    step: int | None = Field(default=None, ge=0)
    """Take the step after this one again, from the nearest checkpoint (default: those before the newest)."""
    through: int | None = Field(default=None, ge=1)
    """Go on through this step; if it has a checkpoint, weights and moments are compared, too."""
    rollout: GivenRollout | None = None
    """Ask for this answer of an RL run again, STEP/PLACE/SAMPLE as `rollouts` shows it; takes no step."""

    @model_validator(mode="after")
    def _steps_or_an_answer(self) -> Self:
        of_steps = [name for name in ("step", "through", "workers") if getattr(self, name) is not None]
        if self.rollout is not None and of_steps:
            raise ValueError(f"--rollout and --{of_steps[0]} exclude each other: give one of them")
        if self.rollout is None and self.server is not None:
            raise ValueError("--server: it is asked for answers, and steps need none; give --rollout as well")
        return self

    def execute(self) -> int:
        from cairn.tools.replay.recorded import recorded_run  # imports numpy, which would slow down --help

        if self.rollout is not None and isinstance(self.run, str):
            raise UsageError(
                f"--rollout {self.rollout}: {self.run} is a URL, where no rollouts are kept; give the run's "
                "folder"
            )
        with progress_bars() as stage, recorded_run(self.run, stage) as run:
            found = (
                self._steps(run, stage) if self.rollout is None else self._answer(run, self.rollout, stage)
            )
        self.show(found)
        return 0 if found.ok else 1

    def _steps(self, run: "RecordedRun", stage: Stage) -> "Replayed":
        from cairn.tools.replay.replay import replay

        return replay(
            run,
            run.stretch(self.step, self.through),
            workers=self.workers,
            bound=self.bound,
            work_dir=self.work_dir,
            stage=stage,
        )

    def _answer(self, run: "RecordedRun", rollout: RolloutKey, stage: Stage) -> "RolloutReplayed":
        from cairn.tools.replay.asking import RolloutReplay

        (found,) = RolloutReplay(run, [rollout]).see_through(
            server=self.server,
            take=self.take_server,
            bound=self.bound,
            work_dir=self.work_dir,
            stage=stage,
        )
        return found


class Prove(OfSteps):
    """Replay steps and answers drawn at random, and write proof.json and .md; exit code 1 if some differ."""

    command = "ckpt prove"
    positional = ("run",)
    run: LocalRun
    """An output folder; the run may be going on."""
    sample: int = Field(default=5, ge=0)
    """How many stretches between neighbouring checkpoints to draw."""
    rollouts: int = Field(default=0, ge=0)
    """How many answers of an RL run to draw, and to ask for again at one server."""
    seed: int = 0
    """Seed of the draw."""

    @model_validator(mode="after")
    def _something_is_drawn(self) -> Self:
        if not self.sample and not self.rollouts:
            raise ValueError("--sample 0: leaves nothing to prove; give --rollouts as well")
        return self

    def execute(self) -> int:
        from cairn.tools.replay.recorded import recorded_run  # imports numpy, which would slow down --help
        from cairn.tools.replay.replay import PROOF, prove

        with progress_bars() as stage, recorded_run(self.run, stage) as run:
            proof = prove(
                run,
                self.sample,
                self.seed,
                rollouts=self.rollouts,
                server=self.server,
                take_server=self.take_server,
                workers=self.workers,
                bound=self.bound,
                work_dir=self.work_dir,
                stage=stage,
            )
        proof.write(self.run)
        self.show(proof)
        if not self.as_json:
            say(f"written to {self.run / PROOF}")
        return 0 if proof.ok else 1


class Bisect(Comparing):
    """Find where two runs part, and what can explain it; exit code 1 if they do."""

    command = "ckpt bisect"
    positional = ("a", "b")
    a: Place
    """An output folder, or its URL in an object store."""
    b: Place
    """Another."""

    def execute(self) -> int:
        from cairn.tools.replay.parting import bisect  # imports pyarrow, which would slow down --help
        from cairn.tools.replay.recorded import recorded_run

        with progress_bars() as stage, recorded_run(self.a, stage) as a, recorded_run(self.b, stage) as b:
            found = bisect(a, b, stage)
        self.show(found)
        return 0 if found.step is None else 1
