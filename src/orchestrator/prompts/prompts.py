"""The prompts that are issued but not in a batch yet."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cairn.config.environment import PoolsConfig
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup

# The difficulty filter (`orchestrator.pools`): problems whose mean reward is too high or too low are skipped
# for some epochs.


EASY, HARD = "easy", "hard"
NAMES = (EASY, HARD)


class DifficultyFilter:
    """Skips the problems that lie in a pool, for `rest` epochs of their environment."""

    def __init__(self, ledger: Ledger, configs: Sequence[PoolsConfig]):
        """`configs`: of each environment, in order."""
        self.ledger = ledger
        self.configs = configs

    def skips(self, group: AnswerGroup) -> bool:
        """Whether a prompt is not to be issued, because its problem was too easy or too hard of late.

        Outcomes of batches later than the policy that it would be issued under are not looked at.
        """
        config = self.configs[group.environment]
        if not config.remembered:
            return False
        what = group.environment, group.problem, group.policy_step
        recent = self.ledger.recent_outcomes(*what, config.remembered)
        if recent is None or pool_of(recent.mean, config) is None:
            return False
        return self.ledger.run.order.epoch(group.place) - recent.epoch <= config.rest

    def sizes(self, environment: int, step: int) -> dict[str, int]:
        """How many problems of an environment are in which pool after `step` steps; none if it has no pools.

        Problems stay in their pool until they have been asked again.
        """
        config = self.configs[environment]
        if not config.remembered:
            return {}
        means = self.ledger.mean_outcomes(environment, step, config.remembered)
        pools = [pool_of(mean, config) for mean in means]
        return {name: pools.count(name) for name in NAMES}


def pool_of(mean: float, config: PoolsConfig) -> str | None:
    """The pool of a problem with this mean reward; None if it is in neither."""
    if config.easy is not None and mean >= config.easy:
        return EASY
    return HARD if config.hard is not None and mean <= config.hard else None


logger = logging.getLogger(__name__)

MOST_SKIPPED = 1024
"""For one prompt, at most as many are skipped by the difficulty filter; and no more than an epoch of all
environments."""


@dataclass(frozen=True)
class Next:
    """What is issued next under a policy: `group`, an empty one; the filter skips `skipped` for it."""

    policy_step: int
    group: AnswerGroup
    skipped: list[AnswerGroup]


class Prompts:
    """The prompts that are being answered or ready for a batch, and the place of the next new one."""

    def __init__(self, ledger: Ledger, filtering: DifficultyFilter | None = None):
        """Begin with the prompts that wait in the ledger. Without `filtering`, no problem is skipped."""
        self.ledger = ledger
        self.filter = filtering or DifficultyFilter(ledger, [PoolsConfig()] * len(ledger.run.order.portions))
        waiting = ledger.waiting()
        self.ready = {group.place: group for group in waiting if group.rollouts and group.usable}
        """Groups that can be learned from, with all answers rewarded or failed, by place."""
        self.partial = [group for group in waiting if group.place not in self.ready]
        """Groups that were being answered when an earlier process ended, and those that had failed then."""
        self.failed: list[AnswerGroup] = []
        """Groups, in a row of their environment's, too many of whose answers failed to learn from any."""
        self.answering: dict[int, tuple[asyncio.Task[AnswerGroup], AnswerGroup]] = {}
        """Groups that are being answered, by place."""
        self._again, self._following = ledger.never_issued()
        self._next: Next | None = None
        self._warned: int | None = None
        """The policy under which too many problems in a row were last found to be skipped."""

    def __len__(self) -> int:
        return len(self.ready) + len(self.partial) + len(self.answering)

    def issue(self, policy_step: int, step: int = 1) -> AnswerGroup:
        """Issue the next prompt: an empty group, recorded in the ledger with those passed over for it.

        Args:
            policy_step: the policy that is served.
            step: the next batch.
        """
        found = self.next(policy_step)
        self._next = None
        self.ledger.issue(found.group, found.skipped, step)
        taken = 1 + len(found.skipped)
        self._following += max(0, taken - len(self._again))
        self._again = self._again[taken:]
        return found.group

    def next(self, policy_step: int) -> Next:
        """What `issue` issues under the same policy, if it is called next."""
        if self._next is None or self._next.policy_step != policy_step:
            self._next = self._find_next(policy_step)
        return self._next

    def _find_next(self, policy_step: int) -> Next:
        skipped: list[AnswerGroup] = []
        most = min(MOST_SKIPPED, self.ledger.run.problems)
        groups = self._next_groups(policy_step)
        while self.filter.skips(group := next(groups)):
            if len(skipped) == most:
                self._warn(policy_step, most)
                break
            skipped.append(group)
        return Next(policy_step, group, skipped)

    def _next_groups(self, policy_step: int) -> Iterator[AnswerGroup]:
        """Empty groups for the next prompts: those that were dropped, then new ones."""
        for place in itertools.chain(self._again, itertools.count(self._following)):
            found = self.ledger.run.order.at(place)
            yield AnswerGroup(place, found.problem, policy_step, [], [], found.environment)

    def _warn(self, policy_step: int, most: int) -> None:
        """Log that too many problems in a row are skipped, once for each policy."""
        if self._warned != policy_step:
            logger.warning(
                "the problems of %d prompts in a row rest (orchestrator.pools), so the next one is asked "
                "although it rests: these environments have hardly anything left to teach with these "
                "thresholds. Add problems, or change pools.easy and pools.hard",
                most,
            )
        self._warned = policy_step

    def collect(self) -> None:
        """Move complete groups to `ready` or `failed`; raises the error if completing one is impossible."""
        for place, (task, _) in list(self.answering.items()):
            if task.done():
                del self.answering[place]
                group = task.result()
                if group.usable:
                    self.ready[place] = group
                else:
                    self.failed.append(group)

    def give_up(self, step: int) -> list[AnswerGroup]:
        """Give up groups in `failed`, which no batch will have; returns them. `step`: the next batch.

        These are the groups of environments of which other groups can be learned from. Elsewhere the
        environment has failed rather than its problems; they wait in the ledger until a process finds it
        mended.
        """
        working = {group.environment for group in self.ready.values()}
        given_up = [group for group in self.failed if group.environment in working]
        for group in given_up:
            self.ledger.fail(group, group.failure or "", step)
        self.failed = [group for group in self.failed if group.environment not in working]
        return given_up

    def leave_out(self, place: int, reason: str, step: int) -> AnswerGroup:
        """Give up a group that is ready; no batch will have it. `step`: the next batch. Returns the group."""
        group = self.ready.pop(place)
        self.ledger.fail(group, reason, step, fate="redrawn")
        return group

    @property
    def waiting(self) -> list[AnswerGroup]:
        """The groups that are issued and may be in a batch yet, but for those that have failed."""
        return [*self.ready.values(), *self.partial, *(group for _, group in self.answering.values())]

    def older_than(self, step: int) -> list[AnswerGroup]:
        """The groups that have a token from a policy before `step`."""
        return [group for group in self.waiting if group.oldest_step < step]

    def drop(self, place: int) -> None:
        """Forget the answers to the prompt at `place`, so that it is issued again."""
        self.ready.pop(place, None)
        self.partial = [group for group in self.partial if group.place != place]
        task, _ = self.answering.pop(place, (None, None))
        if task:
            task.cancel()
        self._again = sorted([*self._again, place])
        self._next = None
