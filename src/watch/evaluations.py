"""Evaluations over a run, and what changed between two of its policies: which problems are right now, and
which are no more.

Results come from evals.jsonl. Flips come from the answers, which the run keeps for each evaluation in
`evals/NAME/rollouts/step_N.parquet`, as `eval` does in its own folder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.orchestrator.rollout_log import KeptRollouts, Row, question
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import entries
from cairn.run.jsonlines import as_object

COLUMNS = ("step", "place", "sample", "problem", "prompt", "text", "reward")
RIGHT = 0.5
"""A problem is right if so large a part of its answers is, or a larger one."""


@dataclass(frozen=True)
class EvaluationResults:
    """The results of one evaluation or validation, oldest first: rows of evals.jsonl.

    steps: those whose answers are kept, oldest first.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    steps: Sequence[int] = ()


@dataclass(frozen=True)
class Flip:
    """A problem that one policy has right and the other has not.

    before, after: the share of its answers that are right. texts_before, texts_after: the first answer.
    """

    problem: int
    place: int
    question: str
    before: float
    after: float
    text_before: str
    text_after: str


@dataclass(frozen=True)
class Flips:
    """What has changed from the policy of one step to that of another in one evaluation.

    gained: wrong before, right after. lost: the reverse. both, neither: problems that are right, or wrong,
    with both. unmatched: problems without a rewarded answer of one of the two. chance: how probable so uneven
    a split of the flips, or a more uneven one, is if each went either way with equal chance.
    """

    name: str
    before: int
    after: int
    right_from: float
    gained: Sequence[Flip]
    lost: Sequence[Flip]
    both: int
    neither: int
    unmatched: int
    chance: float


def answers_of(run: RunDirectory, name: str) -> KeptRollouts:
    """The kept answers of an evaluation of a run."""
    return KeptRollouts(run.evaluated(name))


def evaluations_of(run: RunDirectory, rows: Sequence[Row]) -> list[EvaluationResults]:
    """The results of each evaluation and validation; of a policy and evaluation the newest row counts.

    Args:
        rows: of evals.jsonl.
    """
    newest: dict[str, dict[tuple[Any, ...], Row]] = {}
    for row in rows:
        policy = (row["step"], str(row.get("branch")))
        newest.setdefault(str(row.get("name")), {})[policy] = row
    return [
        EvaluationResults(name, sorted(found.values(), key=lambda row: row["step"]), _steps(run, name))
        for name, found in sorted(newest.items())
    ]


def _steps(run: RunDirectory, name: str) -> list[int]:
    if name not in {path.name for path in entries(run.evaluations, "")}:  # it may be any text
        return []
    return answers_of(run, name).steps()


def flips_of(
    run: RunDirectory, config: Mapping[str, Any] | None, name: str, before: int, after: int
) -> Flips:
    """What has changed in an evaluation from the policy of step `before` to that of `after`.

    Args:
        config: the run's, which says from which reward on an answer is right; 1.0 if it is lost.

    Raises:
        UsageError: the answers of one of them are not kept.
        DamagedFile: a file of answers can't be read.
    """
    there = _steps(run, name)
    for step in (before, after):
        if step not in there:
            kept = f"those of {', '.join(map(str, there))} are" if there else "none are"
            raise UsageError(f"the answers of step {step} in evaluation {name!r} are not kept; {kept}")
    right_from = _right_from(config or {}, name)
    old, new = (_problems(answers_of(run, name).read(step, COLUMNS), right_from) for step in (before, after))
    common = sorted(old.keys() & new.keys())
    found = [
        Flip(
            problem=problem,
            place=new[problem].first["place"],
            question=question(new[problem].first["prompt"] or ""),
            before=old[problem].right,
            after=new[problem].right,
            text_before=old[problem].first["text"] or "",
            text_after=new[problem].first["text"] or "",
        )
        for problem in common
    ]
    gained = [one for one in found if one.before < RIGHT <= one.after]
    lost = [one for one in found if one.after < RIGHT <= one.before]
    return Flips(
        name=name,
        before=before,
        after=after,
        right_from=right_from,
        gained=gained,
        lost=lost,
        both=sum(one.before >= RIGHT and one.after >= RIGHT for one in found),
        neither=sum(one.before < RIGHT and one.after < RIGHT for one in found),
        unmatched=len(old.keys() | new.keys()) - len(common),
        chance=sign_test(len(gained), len(lost)),
    )


def sign_test(gained: int, lost: int) -> float:
    """The exact two-sided sign test: McNemar's test of paired answers, without its normal approximation."""
    flips, fewer = gained + lost, min(gained, lost)
    tail = sum(math.comb(flips, k) for k in range(fewer + 1)) / 2**flips
    return min(2 * tail, 1.0)


@dataclass(frozen=True)
class _Answered:
    """A problem's answers: the share of the rewarded ones that is right, and the first answer."""

    right: float
    first: Row


def _problems(rows: Sequence[Row], right_from: float) -> dict[int, _Answered]:
    rewarded: dict[int, list[Row]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewarded.setdefault(row["problem"], []).append(row)
    return {
        problem: _Answered(sum(row["reward"] >= right_from for row in own) / len(own), own[0])
        for problem, own in rewarded.items()
    }


def _right_from(config: Mapping[str, Any], name: str) -> float:
    own = as_object(config.get("orchestrator")) or config
    for one in map(as_object, own.get("eval") or []):
        if one.get("name") == name and isinstance(one.get("right_from"), int | float):
            return float(one["right_from"])
    return 1.0
