"""RL: checks prompts that no batch has: which problem they were, and whether one that rests had reason to."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cairn.config.environment import PoolsConfig
from cairn.orchestrator.ledger import RESTS, LedgerContent
from cairn.orchestrator.prompts.prompts import pool_of
from cairn.run.messages import Attempt
from cairn.tools.audit.recipes import Recipe
from cairn.tools.audit.report import Report, Row

RENUMBER = ("environment", "environments", "samples_per_prompt", "seed")
"""Changes after which places hold other problems, and no outcome is known."""


def check_given_up(
    ledger: LedgerContent,
    recipes: Sequence[Recipe],
    config: Mapping[str, Any],
    attempt: Attempt,
    report: Report,
) -> None:
    """Check the prompts that were given up or passed over: the right problem, and resting for a reason.

    Which problems rest is a setting that a resumed run may change. So what contradicts the current one is a
    violation in a run that was never resumed, and otherwise a note.

    Args:
        config: of the run.
    """
    noted = [change for recipe in recipes for change in recipe.changes]
    since = max([0, *(one["step"] for one in noted if one["name"].split(".")[0] in RENUMBER)])
    rows = [row for row in ledger.failed if row["step"] > since]
    for row in rows:
        wanted = ledger.order.at(row["place"])
        if (row["environment"], row["problem"]) != (wanted.environment, wanted.problem):
            what = f"prompt {row['place']} was given up as problem {row['problem']}"
            report.broken("order", f"{what}, the run's order says {wanted.problem}", row)
    resting = [row for row in rows if row["reason"] == RESTS]
    if not resting:
        return
    asked = _asked(ledger, rows, since)
    pools = _pools(config, len(ledger.portions))
    is_first = attempt.number == 1 and attempt.resume_from is None
    doubtful: list[int] = []
    for row in resting:
        evidence = _Evidence(ledger, row, asked[row["environment"], row["problem"]])
        what = f"prompt {row['place']} was passed over because problem {row['problem']} rested"
        if not evidence.until(row["step"] - 1):
            report.broken("resting", f"{what}, which had not been asked before", row)
        elif pools and not evidence.allows(pools[row["environment"]]):
            if is_first:
                report.broken("resting", f"{what}, which orchestrator.pools does not say of it", row)
            else:
                doubtful.append(row["place"])
    if doubtful:
        report.notes.append(
            f"{len(doubtful)} prompts, such as {doubtful[0]}, were passed over because their problems "
            "rested, which they would not with the current orchestrator.pools: either that was another one "
            "before the run was resumed, or the ledger was altered"
        )


class _Asked(NamedTuple):
    """A place at which a problem was asked, and the batch that it is in, or that left it out."""

    place: int
    step: int


def _asked(
    ledger: LedgerContent, given_up: Sequence[Row], since: int
) -> Mapping[tuple[int, int], list[_Asked]]:
    """Where each problem was asked after step `since`, by environment and problem; the newest place first."""

    def places() -> Iterator[_Asked]:
        for batch in ledger.batches.values():
            if batch.step > since:
                for first, last in batch.places:
                    yield from (_Asked(place, batch.step) for place in range(first, last + 1))
        yield from (_Asked(row["place"], row["step"]) for row in given_up if row["reason"] != RESTS)

    found: defaultdict[tuple[int, int], list[_Asked]] = defaultdict(list)
    for one in sorted(places(), reverse=True):
        at = ledger.order.at(one.place)
        found[at.environment, at.problem].append(one)
    return found


@dataclass(frozen=True)
class _Evidence:
    """What is known of a problem that rested. `asked`: where it was asked, the newest place first."""

    ledger: LedgerContent
    row: Row
    asked: Sequence[_Asked]

    def until(self, step: int) -> list[_Asked]:
        """Where it was asked in batches up to `step`."""
        return [one for one in self.asked if one.step <= step]

    def allows(self, config: PoolsConfig) -> bool:
        """Whether it may have rested under one of the policies that its prompt could be issued under.

        Outcomes that no later decision needs are gone from the ledger; they are taken to have been such.
        """
        newest, lag = self.row["step"] - 1, self.ledger.run["max_off_policy_steps"]
        return any(self._rests(config, step) for step in range(max(newest - lag, 0), newest + 1))

    def _rests(self, config: PoolsConfig, step: int) -> bool:
        asked = self.until(step)[: config.remembered]
        if not config.remembered or len(asked) < config.remembered:
            return False
        order = self.ledger.order
        if order.epoch(self.row["place"]) - order.epoch(asked[0].place) > config.rest:
            return False
        means = [self.ledger.outcomes.get(one.place) for one in asked]
        known = [mean for mean in means if mean is not None]
        return len(known) < len(means) or pool_of(statistics.fmean(known), config) is not None


def _pools(config: Mapping[str, Any], environments: int) -> list[PoolsConfig] | None:
    """The pools of each environment as the run's configuration has them; None if it does not say."""
    own = config.get("orchestrator", config)
    if "pools" not in own:
        return None
    several = own.get("environments") or [{}] * environments
    return [PoolsConfig.model_validate(one.get("pools") or own["pools"]) for one in several]
