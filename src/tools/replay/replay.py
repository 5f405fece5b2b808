"""`ckpt replay` and `ckpt prove`: steps are taken again, and what comes out is compared."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, installed_version
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import UsageError
from cairn.run.files import write_atomic
from cairn.run.machine import this_machine
from cairn.run.output import Stage, no_progress
from cairn.run.recipe import now
from cairn.run.seeds import derive
from cairn.tools.replay.again import taken_again
from cairn.tools.replay.answers import RolloutReplayed
from cairn.tools.replay.asking import RolloutReplay, drawn_rollouts
from cairn.tools.replay.comparison import (
    UPDATED_OTHERWISE,
    Comparison,
    Verdict,
    cause_of,
    compare_rows,
    compare_steps,
    first_of,
)
from cairn.tools.replay.recorded import RecordedRun, StepRange

BOUND = 0.05
"""The largest relative difference that is put down to rounding, where bits may differ: of a loss, of a norm,
and of a tensor in proportion to what the steps have changed in it."""
PROOF = "proof.json"
"""What `ckpt prove` writes into the run directory, and PROOF with .md for people."""


@dataclass
class Replayed:
    """What came of taking some steps again.

    exact: whether bits must be the same. changes: what differs between then and now and may explain others,
    in words.
    """

    stretch: StepRange
    ranks: int
    exact: bool
    bound: float
    changes: list[str]
    comparison: Comparison
    saved: bool
    """Whether the run has a checkpoint of the last step, so that tensors were compared."""

    @property
    def verdict(self) -> Verdict:
        """Whether the two passes agree, and how far."""
        return self.comparison.verdict(self.bound)

    @property
    def ok(self) -> bool:
        """Whether they agree as far as they must."""
        return self.verdict == "same" or (self.verdict == "close" and not self.exact)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = self.comparison
        return {
            "start": self.stretch.start,
            "last": self.stretch.last,
            "ranks": self.ranks,
            "exact": self.exact,
            "bound": self.bound,
            "ok": self.ok,
            "verdict": self.verdict,
            "largest": found.largest,
            "changes": self.changes,
            "tensors": found.tensors,
            "problem": found.problem,
            "rows": [asdict(row) for row in found.rows],
            "differing": [asdict(tensor) for tensor in found.differing],
        }

    def lines(self, top: int) -> list[str]:
        """For people; at most `top` differences of a kind."""
        found = self.comparison
        start = f"step {self.stretch.start}" if self.stretch.start else "the model that the run began with"
        said = [f"{self.stretch} again, from {start}, on {self.ranks} rank{'s' * (self.ranks > 1)}:"]
        count = len(self.stretch.steps)
        if not found.rows:
            said.append(f"  {count} row{'s' * (count > 1)} of metrics: the same to the last digit")
        said += first_of(found.rows, top, "more")
        if found.problem:
            said.append(f"  {found.problem}")
        elif not self.saved:
            said.append(f"  weights and moments: not compared, as step {self.stretch.last} has no checkpoint")
        elif not found.differing:
            said.append(f"  {found.tensors} tensors of weights and moments: the same to the bit")
        said += first_of(found.differing, top, f"more of {found.tensors} tensors")
        said += [f"  other than then: {change}" for change in self.changes]
        return [*said, f"  {self.in_words()}"]

    def in_words(self) -> str:
        """What follows."""
        match self.verdict, self.exact:
            case "same", _:
                what = "this" if self.saved else "these metrics"
                return f"proved: the run has computed {what}"
            case "close", False:
                return (
                    f"within {self.bound:g} of what the steps have changed (at most "
                    f"{self.comparison.largest:.2g}); bits may differ here"
                )
            case _:
                cause = self.cause()
                return f"NOT what the run has computed{f': {cause}' if cause else ''}"

    def cause(self) -> str:
        """What the differences say of where they come from; empty if nothing."""
        found = self.comparison
        if found.problem:
            return ""
        flipped = [
            tensor for tensor in found.differing if tensor.changed == 1 and len(tensor.first[0].bits) == 1
        ]
        if not found.rows and len(found.differing) == len(flipped) == 1:
            return f"a single bit of {flipped[0].name} was flipped after the last step's gradients"
        cause = cause_of(found.rows)
        return UPDATED_OTHERWISE if cause is None else cause.words


def replay(
    run: RecordedRun,
    stretch: StepRange,
    *,
    workers: int | None = None,
    bound: float | None = None,
    work_dir: Path | None = None,
    stage: Stage = no_progress,
) -> Replayed:
    """Take steps of a run again, and compare.

    Args:
        workers: ranks; None: as many as took the steps.
        bound: the largest relative difference that counts as rounding; None: none on CPUs with as many ranks
            as then and with `deterministic` settings, and `BOUND` otherwise.

    Raises:
        UsageError: the run has not kept what is needed.
        ReplayFailed: the steps could not be taken again.
    """
    then = run.world_size(stretch)
    ranks = workers or then
    settings = run.settings(stretch) | {"workers": ranks}
    gpus = this_machine().has_gpus and not settings.get("deterministic")
    exact = bound is None and ranks == then and not gpus
    changes = [] if ranks == then else [f"{then} ranks -> {ranks}"]
    saved = stretch.last in run.checkpoints.steps()
    if saved or stretch.start:
        made_by = run.checkpoints.manifest(stretch.last if saved else stretch.start)
        changes += [f"{name} {was} -> {here}" for name, (was, here) in made_by.changed_versions().items()]
    with taken_again(run, stretch, settings, work_dir) as again:
        rows = {row["step"]: row for row in again.metrics()}
        comparison = Comparison(compare_rows(run.rows, rows, stretch.steps))
        if saved:
            start = run.checkpoints.folder(stretch.start) if stretch.start else None
            taken = CheckpointStore(again.checkpoints()).folder(stretch.last)
            try:
                comparison.tensors, comparison.differing = compare_steps(
                    run.checkpoints.folder(stretch.last), taken, start, stage
                )
            except CheckpointError as error:
                comparison.problem = f"the run's checkpoint is damaged: {error}"
    return Replayed(stretch, ranks, exact, BOUND if bound is None else bound, changes, comparison, saved)


@dataclass
class Proof:
    """Steps drawn at random, each of which was taken again, and answers, each of which was asked for again.

    drawn: the stretches that could have been drawn. seed: of the draws.
    """

    run: str
    run_id: str
    seed: int
    drawn: int
    made: str
    versions: Mapping[str, str]
    replayed: list[Replayed] = field(default_factory=list)
    answers: list[RolloutReplayed] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all agree as far as they must."""
        return all(one.ok for one in (*self.replayed, *self.answers))

    def to_json(self) -> dict[str, Any]:
        """The content of proof.json."""
        about = {key: getattr(self, key) for key in ("run", "run_id", "seed", "drawn", "made", "versions")}
        found = {"replayed": self.replayed, "rollouts": self.answers}
        return {**about, "ok": self.ok, **{name: [one.to_json() for one in of] for name, of in found.items()}}

    def lines(self, top: int) -> list[str]:
        """For people."""
        said = [line for one in (*self.replayed, *self.answers) for line in one.lines(top)]
        if self.replayed:
            steps = sum(len(one.stretch.steps) for one in self.replayed)
            good, exact = _counts(self.replayed)
            said.append(
                f"{good} of {len(self.replayed)} stretches ({steps} steps), drawn from {self.drawn} with "
                f"seed {self.seed}, are what the run has computed; {exact} of them to the bit"
            )
        if self.answers:
            good, exact = _counts(self.answers)
            said.append(
                f"{good} of {len(self.answers)} answers, drawn with seed {self.seed}, are what the run's "
                f"policies have sampled; {exact} of them to the bit"
            )
        return said

    def write(self, folder: Path) -> None:
        """Write it for programs and for people, beside what `ckpt audit` reads."""
        write_atomic(folder / PROOF, (json.dumps(self.to_json(), indent=2) + "\n").encode())
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        page = [f"# Proof of run {self.run_id}", "", f"{self.made}, by `ckpt prove`, with {packages}.", ""]
        page += [line if line.startswith("  ") else f"\n{line}\n" for line in self.lines(5)]
        write_atomic((folder / PROOF).with_suffix(".md"), ("\n".join(page) + "\n").encode())


def _counts(found: Sequence[Replayed | RolloutReplayed]) -> tuple[int, int]:
    """How many agree as far as they must, and how many to the bit."""
    return sum(one.ok for one in found), sum(one.verdict == "same" for one in found)


def provable(run: RecordedRun) -> list[StepRange]:
    """The stretches between neighbouring checkpoints that can be taken again, oldest first.

    Raises:
        UsageError: there are none; the message says why of the newest.
    """
    saved, why = run.saved, ""
    found: list[StepRange] = []
    for start, last in zip([0, *saved], saved, strict=False):
        try:
            stretch = run.stretch(start, last)
            if run.trains_on_batches:
                run.batches(stretch)
            found.append(stretch)
        except UsageError as error:
            why = f": {error}"
    if not found:
        raise UsageError(f"{run.given}: has no checkpoints between which steps could be taken again{why}")
    return found


def prove(
    run: RecordedRun,
    sample: int,
    seed: int,
    *,
    rollouts: int = 0,
    server: str | None = None,
    take_server: bool = False,
    workers: int | None = None,
    bound: float | None = None,
    work_dir: Path | None = None,
    stage: Stage = no_progress,
) -> Proof:
    """Take again the steps between checkpoints that are drawn at random, and ask for such answers again.

    Args:
        sample, rollouts: how many to draw.
        server, take_server: as of `RolloutReplay.see_through`.

    Raises:
        UsageError: the run has not kept what is needed.
        ReplayFailed: the steps could not be taken again.
    """
    stretches = provable(run) if sample else []
    keys = drawn_rollouts(run, rollouts, seed) if rollouts else []
    draw = random.Random(derive(seed, "proof"))
    chosen: Sequence[StepRange] = sorted(
        draw.sample(stretches, min(sample, len(stretches))), key=lambda stretch: stretch.last
    )
    made_by = run.checkpoints.manifest(chosen[-1].last if chosen else run.saved[-1])
    versions = {name: installed_version(name) or "" for name in made_by.versions}
    proof = Proof(str(run.given), made_by.run_id, seed, len(stretches), now(), versions)
    for stretch in chosen:
        replayed = replay(run, stretch, workers=workers, bound=bound, work_dir=work_dir, stage=stage)
        proof.replayed.append(replayed)
    if keys:
        asked = RolloutReplay(run, keys)
        proof.answers = asked.see_through(
            server=server, take=take_server, bound=bound, work_dir=work_dir, stage=stage
        )
    return proof
