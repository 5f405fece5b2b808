"""What a run has to say at its end of answers that failed, and of prompts that were given up for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.protocol import kind_of, unscored
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.diagnosis.rule import percent
from cairn.run.directory import RunDirectory
from cairn.run.exits import RoleFailed
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import Row
from cairn.run.metrics import number

SHOWN = 8
"""Reasons that are named; the most frequent."""
READ = 256
"""Steps with failures whose rollouts are read, the newest."""
COLUMNS = ("step", "place", "sample", "problem", "environment", "failed")


@dataclass
class Reason:
    """Failures of one kind in one environment."""

    kind: str
    answers: int = 0
    problems: set[int] = field(default_factory=set[int])

    def __str__(self) -> str:
        return f"{self.kind}: {_count(self.answers, 'answer')}, {_count(len(self.problems), 'problem')}"


@dataclass(frozen=True)
class Failures:
    """What failed in a run.

    given_up, prompts: prompts that were given up because answers failed, and all, with these. answers: that
    failed, of prompts that were trained on. unscored: prompts that were left out because the environment has
    nothing to say of their answers. reasons: the most frequent first, of the answers in kept rollouts.
    """

    given_up: int
    prompts: int
    answers: int
    unscored: int
    reasons: Sequence[Reason]

    @property
    def share(self) -> float:
        """Of the prompts that were given up."""
        return self.given_up / self.prompts if self.prompts else 0.0

    def lines(self, place: str) -> list[str]:
        """For the end of a run; `place` is its directory, as a command names it."""
        said: list[str] = []
        if self.given_up:
            said.append(
                f"{self.given_up} of {self.prompts} prompts ({percent(self.share)}) were given up: their "
                "answers failed"
            )
        if self.answers:
            said.append(f"{_count(self.answers, 'failed answer')} left out of other prompts")
        said += [f"  {reason}" for reason in self.reasons[:SHOWN]]
        if more := self.reasons[SHOWN:]:
            said.append(
                f"  and {_count(sum(one.answers for one in more), 'answer')} for {len(more)} more reasons"
            )
        if self.unscored:
            said.append(
                f"{_count(self.unscored, 'prompt')} left out: the environment returned no reward (None)"
            )
        if said:
            said.append(f"`rollouts {place} --failed` lists them")
        return said


def failures_of(run: RunDirectory, rows: Sequence[Row], prompts_per_step: int) -> Failures:
    """What failed in the steps of `rows`, which are all of a run.

    Args:
        prompts_per_step: of steps whose rows do not say how many prompts they have, as those of earlier
            versions.
    """

    def total(name: str) -> int:
        return round(sum(number(row, name) or 0 for row in rows))

    given_up = total("groups/failed") - total("groups/unscored")
    trained = sum(
        number(row, "groups") or prompts_per_step for row in rows if number(row, "reward/mean") is not None
    )
    failing = [row["step"] for row in rows if number(row, "groups/failed") or number(row, "rollouts/failed")]
    return Failures(
        given_up,
        given_up + round(trained),
        total("rollouts/failed") - total("rollouts/unscored"),
        total("groups/unscored"),
        _reasons(KeptRollouts(run.rollouts), failing[-READ:]),
    )


def _reasons(kept: KeptRollouts, steps: Sequence[int]) -> list[Reason]:
    found: dict[tuple[str, str], Reason] = {}
    labels = set[str]()
    for step in steps:
        try:
            rows = kept.read(step, COLUMNS)
        except DamagedFile:
            continue
        for row in rows:
            label, failed = row["environment"] or "", row["failed"]
            labels.add(label)
            if failed is not None and not unscored(failed):
                reason = found.setdefault((label, kind := kind_of(failed)), Reason(kind))
                reason.answers += 1
                reason.problems.add(row["problem"])
    return sorted(found.values(), key=lambda one: (-one.answers, one.kind))


def tell(run: RunDirectory, rows: Sequence[Row], config: OrchestratorConfig, place: str) -> Failures:
    """Print what failed, if anything did; returns that."""
    failures = failures_of(run, rows, config.prompts_per_step)
    for line in failures.lines(place):
        print(line, flush=True)
    return failures


def refuse_too_many(failures: Failures, config: OrchestratorConfig) -> None:
    """Check that few enough prompts were given up for the run to count as done.

    Raises:
        RoleFailed: more than `max_failed_share` of them were.
    """
    if failures.share > config.max_failed_share:
        raise RoleFailed(
            f"the run is complete, but {percent(failures.share)} of its prompts were "
            f"given up, more than orchestrator.max_failed_share ({config.max_failed_share:g}): mend the "
            "environment, or allow more"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
