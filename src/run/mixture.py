"""Which of several sources each place of a run's order is from, drawn by weight."""

import bisect
import itertools
import random
from collections.abc import Sequence

import numpy as np

from cairn.run.seeds import derive

BLOCK = 1024
"""Places that are drawn together. Another number would change the order of all runs."""


class Mixture:
    """Draws the source of each place from the run's seed and the place alone."""

    def __init__(self, seed: int, purpose: str, weights: Sequence[float]):
        """Draw nothing yet.

        Args:
            purpose: what the places are of, for `cairn.run.seeds.derive`.
            weights: each source's share of the places, in relation to the other weights.
        """
        self.seed = seed
        self.purpose = purpose
        self._ends = list(itertools.accumulate(weights))
        self._blocks: list[np.ndarray] = []
        """The source of each place, by block."""
        self._before: list[np.ndarray] = [np.zeros(len(self._ends), np.int64)]
        """How many places before each block are of each source."""

    def at(self, place: int) -> int:
        """The number of the source at `place`."""
        if len(self._ends) == 1:
            return 0
        block, offset = divmod(place, BLOCK)
        return int(self._block(block)[offset])

    def before(self, place: int, source: int) -> int:
        """How many places before `place` are of this source."""
        if len(self._ends) == 1:
            return place
        block, offset = divmod(place, BLOCK)
        drawn = self._block(block)
        return int(self._before[block][source]) + int(np.count_nonzero(drawn[:offset] == source))

    def _block(self, number: int) -> np.ndarray:
        """The sources of the places of a block, int16 [BLOCK]."""
        while len(self._blocks) <= number:
            draw = random.Random(derive(self.seed, self.purpose, len(self._blocks)))
            drawn = np.array(
                [bisect.bisect_right(self._ends, draw.random() * self._ends[-1]) for _ in range(BLOCK)],
                np.int16,
            )
            drawn = np.minimum(drawn, len(self._ends) - 1)  # a product may be rounded up to the last end
            self._blocks.append(drawn)
            self._before.append(self._before[-1] + np.bincount(drawn, minlength=len(self._ends)))
        return self._blocks[number]
