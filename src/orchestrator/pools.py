"""Difficulty pools: problems that are too easy or too hard at the moment rest for some epochs.

Where rewards are 0 and 1, the mean reward of a problem's answers is its pass rate. Whether a problem rests is
a function of the ledger's outcomes up to the policy that it would be issued under, so a resumed run decides
the same. A place whose problem rests gets a row in the ledger's table `failed`, and is never issued.
"""

from collections.abc import Sequence

from cairn.config.pools import PoolsConfig
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup

EASY, HARD = "easy", "hard"
NAMES = (EASY, HARD)


class Pools:
    """Which problems of the run's environments rest."""

    def __init__(self, ledger: Ledger, configs: Sequence[PoolsConfig]):
        """`configs`: of each environment, in order."""
        self.ledger = ledger
        self.configs = configs

    def rests(self, group: AnswerGroup) -> bool:
        """Whether a prompt is not to be issued, because its problem rests.

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
