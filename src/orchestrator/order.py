"""The order of a run's prompts: which problem of which environment is at each place.

The environment of a place is drawn by weight from the run's seed and the place alone. Each environment walks
through its own problems: the n-th place that is its own has its n-th problem, in an order that is drawn anew
for each of its epochs. So nothing but a place's number is needed to know its problem.
"""

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cairn.run.seeds import derive, permutation

BLOCK = 1024
"""Places whose environments are drawn together. Another number would change the order of all runs."""


@dataclass(frozen=True)
class Portion:
    """What the order knows of an environment.

    problems: their number, an epoch of this environment. weight: its share of the prompts, in relation to the
    other weights. samples_per_prompt: answers to each of its prompts.
    """

    label: str
    problems: int
    weight: float
    samples_per_prompt: int


@dataclass(frozen=True)
class Position:
    """What is at a place: the number of the environment, which of its epochs it is in, and the problem."""

    environment: int
    epoch: int
    problem: int


class Order:
    """The order of the prompts of a run with this seed and these environments."""

    def __init__(self, seed: int, portions: Sequence[Portion]):
        self.seed = seed
        self.portions = tuple(portions)
        self._ends = list(itertools.accumulate(portion.weight for portion in self.portions))
        self._blocks: list[np.ndarray] = []
        """The environment of each place, by block."""
        self._before: list[np.ndarray] = [np.zeros(len(self.portions), np.int64)]
        """How many places before each block are of each environment."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        """The problems of the epochs that were asked for last, by environment and epoch."""

    def environment(self, place: int) -> int:
        """The number of the environment at `place`."""
        block, offset = divmod(place, BLOCK)
        return int(self._block(block)[offset])

    def at(self, place: int) -> Position:
        """What is at `place`."""
        block, offset = divmod(place, BLOCK)
        environment = int(self._block(block)[offset])
        own = self._own_before(place, environment)
        epoch, index = divmod(own, self.portions[environment].problems)
        return Position(environment, epoch, self._order(environment, epoch)[index])

    def epoch(self, place: int) -> int:
        """The epoch of its environment that `place` lies in."""
        environment = self.environment(place)
        return self._own_before(place, environment) // self.portions[environment].problems

    def epochs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """How many of the places `first` to `last` lie in which epoch: (environment, epoch, count)."""
        for environment, portion in enumerate(self.portions):
            own, end = self._own_before(first, environment), self._own_before(last + 1, environment)
            while own < end:
                epoch = own // portion.problems
                until = min(end, (epoch + 1) * portion.problems)
                yield environment, epoch, until - own
                own = until

    def _own_before(self, place: int, environment: int) -> int:
        """How many places before `place` are of this environment."""
        block, offset = divmod(place, BLOCK)
        drawn = self._block(block)
        return int(self._before[block][environment]) + int(np.count_nonzero(drawn[:offset] == environment))

    def _block(self, number: int) -> np.ndarray:
        """The environments of the places of a block, int16 [BLOCK]."""
        while len(self._blocks) <= number:
            draw = random.Random(derive(self.seed, "environment of prompt", len(self._blocks)))
            drawn = np.array(
                [bisect.bisect_right(self._ends, draw.random() * self._ends[-1]) for _ in range(BLOCK)],
                np.int16,
            )
            drawn = np.minimum(drawn, len(self.portions) - 1)  # a product may be rounded up to the last end
            self._blocks.append(drawn)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self.portions)))
        return self._blocks[number]

    def _order(self, environment: int, epoch: int) -> list[int]:
        """The problems of an epoch, in order."""
        key = environment, epoch
        if key not in self._orders:
            portion = self.portions[environment]
            whose = (portion.label,) if len(self.portions) > 1 else ()
            self._orders[key] = permutation(portion.problems, self.seed, "prompt order", *whose, epoch)
            while len(self._orders) > 2 * len(self.portions):
                del self._orders[next(iter(self._orders))]
        return self._orders[key]
