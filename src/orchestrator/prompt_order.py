"""The order of a run's prompts: which problem of which environment is at each place.

The environment of a place is drawn by weight from the run's seed and the place alone. Each environment walks
through its own problems: the n-th place that is its own has its n-th problem, in an order that is drawn anew
for each of its epochs. So nothing but a place's number is needed to know its problem.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cairn.run.seeds import Mixture, permuted


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
        weights = [portion.weight for portion in self.portions]
        self._mixture = Mixture(seed, "environment of prompt", weights)
        self._orders: dict[tuple[int, int], Callable[[int], int]] = {}
        """The problems of the epochs that were asked for last, by environment and epoch."""

    def environment(self, place: int) -> int:
        """The number of the environment at `place`."""
        return self._mixture.at(place)

    def at(self, place: int) -> Position:
        """What is at `place`."""
        environment = self._mixture.at(place)
        own = self._mixture.before(place, environment)
        epoch, index = divmod(own, self.portions[environment].problems)
        return Position(environment, epoch, self._order(environment, epoch)(index))

    def epoch(self, place: int) -> int:
        """The epoch of its environment that `place` lies in."""
        environment = self.environment(place)
        return self._mixture.before(place, environment) // self.portions[environment].problems

    def epochs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """How many of the places `first` to `last` lie in which epoch: (environment, epoch, count)."""
        for environment, portion in enumerate(self.portions):
            own, end = self._mixture.before(first, environment), self._mixture.before(last + 1, environment)
            while own < end:
                epoch = own // portion.problems
                until = min(end, (epoch + 1) * portion.problems)
                yield environment, epoch, until - own
                own = until

    def _order(self, environment: int, epoch: int) -> Callable[[int], int]:
        """The problem at each place of an epoch."""
        key = environment, epoch
        if key not in self._orders:
            portion = self.portions[environment]
            whose = (portion.label,) if len(self.portions) > 1 else ()
            self._orders[key] = permuted(portion.problems, self.seed, "prompt order", *whose, epoch)
            while len(self._orders) > 2 * len(self.portions):
                del self._orders[next(iter(self._orders))]
        return self._orders[key]
