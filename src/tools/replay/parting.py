"""`ckpt bisect`: where two runs part, by their metrics, checkpoints and rollouts, and what can explain it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.changes import Change, in_words
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.output import Stage, no_progress
from cairn.tools.replay.comparison import (
    UPDATED_OTHERWISE,
    RowDifference,
    TensorDifference,
    cause_of,
    compare_rows,
    compare_steps,
)
from cairn.tools.replay.recorded import RecordedRun

INPUTS = ("data", "environment", "tokenizer", "model")
"""The entries of a recipe that say what a run is trained on, and with what."""
BATCH_OF = ("data", "tokenizer", "environment", "sampling", "seq_len", "seed", "template")
"""What the settings begin with by which a batch is made."""
RATE_OF = ("optimizer", "scheduler", "max_steps")
"""Likewise the learning rate."""


@dataclass
class Parting:
    """Where two runs part.

    step: the first step that is known to differ; None: they agree in all that both have. same_through: the
    newest step that is known to be the same. role, what: who has done something else, and what that was.
    rows: the columns that differ at the step. checkpoint: the first that differs, with its tensors.
    differences: of the recipes, in words. explaining: those that can be the reason.
    """

    step: int | None
    same_through: int
    role: str = ""
    what: str = ""
    rows: list[RowDifference] = field(default_factory=list)
    checkpoint: int | None = None
    tensors: list[TensorDifference] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    explaining: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)

    def lines(self, top: int) -> list[str]:
        """For people; at most `top` differences of a kind."""
        if self.step is None:
            said = [f"the runs are the same through step {self.same_through}, as far as both go"]
        else:
            said = [f"the runs part at step {self.step} ({self.role}): {self.what}"]
            said += [f"  the same through step {self.same_through}"] if self.same_through else []
            said += [
                f"  {row.column} of step {row.step}: {row.was!r} and {row.now!r}" for row in self.rows[:top]
            ]
            if self.checkpoint is not None:
                said.append(f"  step_{self.checkpoint}: {len(self.tensors)} tensors differ")
                said += [f"    {tensor}" for tensor in self.tensors[:top]]
        for name, found in (("can explain it", self.explaining), ("differs, too", self._others())):
            said += [f"  {name}: {one}" for one in found]
        if self.step is not None and not self.differences:
            said.append(
                "  no setting, input, version or number of ranks differs: what is left is code that is not "
                "compared, or a machine that computed something else (ckpt replay says which run it was)"
            )
        return said

    def _others(self) -> list[str]:
        return [one for one in self.differences if one not in self.explaining]


def bisect(a: RecordedRun, b: RecordedRun, stage: Stage = no_progress) -> Parting:
    """Find the first step in which two runs differ; nothing is computed again.

    Raises:
        UsageError: they have no step in common.
        CheckpointError: the checkpoint to compare is damaged.
    """
    common = sorted(a.rows.keys() & b.rows.keys())
    saved = [step for step in a.saved if step in b.saved]
    if not common and not saved:
        raise UsageError(f"{a.given} and {b.given} have no step in common")
    rows = compare_rows(a.rows, b.rows, common)
    first_row = rows[0].step if rows else None
    differing = (step for step in saved if not _same_checkpoint(a, b, step))
    checkpoint = next(differing, None)
    known = [step for step in (first_row, checkpoint) if step is not None]
    step = min(known, default=None)
    same = [one for one in common if first_row is None or one < first_row]
    # Rows that agree say nothing of weights that a checkpoint shows to differ.
    same_steps = [one for one in saved if checkpoint is None or one < checkpoint]
    if step is None:
        unlike = _differences(a, b, max(saved, default=0))
        return Parting(None, max([*same, *same_steps]), differences=[*unlike.values()])
    at = [row for row in rows if row.step == first_row] if first_row == step else []
    role, what, beginnings = _who(a, b, step, at)
    found = Parting(step, max((one for one in [*same, *same_steps] if one < step), default=0), role, what, at)
    if checkpoint is not None:
        found.checkpoint = checkpoint
        folders = [run.checkpoints.folder(checkpoint) for run in (a, b)]
        _, found.tensors = compare_steps(*folders, stage=stage)
        found.tensors.sort(key=lambda tensor: -tensor.distance)
    unlike = _differences(a, b, checkpoint or max(saved, default=0))
    found.differences = [*unlike.values()]
    found.explaining = [words for name, words in unlike.items() if name.startswith(beginnings)]
    return found


def _same_checkpoint(a: RecordedRun, b: RecordedRun, step: int) -> bool:
    one, other = (run.checkpoints.manifest(step).tensor_files for run in (a, b))
    return one == other


def _who(
    a: RecordedRun, b: RecordedRun, step: int, rows: list[RowDifference]
) -> tuple[str, str, tuple[str, ...]]:
    """The role that has done something else, what that is, and how settings begin that can explain it."""
    cause = cause_of(rows)
    if cause is None:
        return "trainer", UPDATED_OTHERWISE, ("",)
    if cause.kind == "batch" and a.trains_on_batches and b.trains_on_batches:
        return _of_batch(a, b, step)
    return "trainer", cause.words, {"batch": BATCH_OF, "rate": RATE_OF}.get(cause.kind, ("",))


def _of_batch(a: RecordedRun, b: RecordedRun, step: int) -> tuple[str, str, tuple[str, ...]]:
    """Of which part of an RL batch the difference is, by the rollouts that both runs have kept."""
    try:
        one, other = (
            KeptRollouts(run.run.rollouts)
            .table(step, ["step", "place", "sample", "prompt", "text", "reward"])
            .sort_by([("place", "ascending"), ("sample", "ascending")])
            for run in (a, b)
        )
    except DamagedFile:
        return "orchestrator", "it was trained on another batch", ("",)
    if not one.num_rows or not other.num_rows:
        return "orchestrator", "it was trained on another batch, whose rollouts are not kept", ("",)

    def same(*columns: str) -> bool:
        return all(one[name].combine_chunks().equals(other[name].combine_chunks()) for name in columns)

    if one.num_rows != other.num_rows or not same("place", "sample", "prompt"):
        return "orchestrator", "it asked other prompts", ("orchestrator", "environment", "data", "seed")
    if not same("text"):
        texts = (table["text"].to_pylist() for table in (one, other))
        differing = sum(a != b for a, b in zip(*texts, strict=True))
        what = f"{differing} of {one.num_rows} answers to the same prompts differ"
        return "inference server", what, ("sampling", "inference", "orchestrator", "seed", "vllm")
    if not same("reward"):
        return "environment", "the same answers got other rewards", ("environment", "overlong")
    return "orchestrator", "it made another batch of the same answers and rewards", ("advantage",)


def _differences(a: RecordedRun, b: RecordedRun, step: int) -> dict[str, str]:
    """What differs between the recipes of two runs at a checkpoint that both have: by name, in words."""
    changes: list[Change] = []
    recipes = [list(_recipes(run, step)) for run in (a, b)]
    for one, other in zip(*recipes, strict=True):
        changes += _changes(one.get("settings") or {}, other.get("settings") or {})
        inputs = [key for key in INPUTS if one.get(key) and other.get(key)]
        changes += _changes(*({key: part[key] for key in inputs} for part in (one, other)))
    found = {change.name: _in_words(change) for change in changes}
    if step:
        manifests = [run.checkpoints.manifest(step) for run in (a, b)]
        made = [{**manifest.versions, "ranks": manifest.world_size} for manifest in manifests]
        found |= {one.name: f"{one.name}: {one.was} -> {one.now}" for one in _changes(*made)}
    return found


def _recipes(run: RecordedRun, step: int) -> Iterable[Mapping[str, Any]]:
    """The recipe's part of each role, at a checkpoint or, without one, of the newest attempt."""
    if not step:
        whole = run.recipe()
        return [whole.get(part) or {} for part in ("trainer", "orchestrator")]
    states = run.checkpoints.trainer_state(step), run.checkpoints.orchestrator_state(step)
    return [(state and state.recipe) or {} for state in states]


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    names = sorted(was.keys() | now.keys())
    return [Change(name, was.get(name), now.get(name)) for name in names if was.get(name) != now.get(name)]


def _in_words(change: Change) -> str:
    if change.was is None or change.now is None:  # one of the two has no such setting
        return f"--{change.name.replace('_', '-')}: {json.dumps(change.was)} -> {json.dumps(change.now)}"
    return in_words(change)
