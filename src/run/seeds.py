"""Every random draw of a run comes from here, also which of several sources a record is from."""

import bisect
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np

LARGEST_DRAWN = 1 << 24
"""Most numbers whose order is drawn as a whole; a number of more has its place computed when it is asked for.
Another value would change the order of runs with that many problems."""
ROUNDS = 8
"""Rounds of the Feistel network."""


def derive(seed: int, *purpose: str | int) -> int:
    """A 48-bit seed for one purpose, independent of the seeds of all other purposes.

    `purpose` names what is drawn and for what, such as ("dropout", step, micro_batch): never a rank, a time
    or an order of arrival, so that a resumed run and one on another number of ranks draw the same.
    48 bits leave room for vLLM, which adds the sample's index, within what every sampler accepts.
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def answer_seed(seed: int, place: int, policy_step: int, chunk: int, within: int = 0) -> int:
    """The seed of a request for the answers to a prompt; answer i adds i.

    Args:
        place: of the prompt in the run's order.
        policy_step: the policy that was served when the prompt was issued.
        chunk: number of the answer's piece that is asked for, from its token `within` on.
    """
    which = [chunk, within] if within else [chunk] if chunk else []
    return derive(seed, "sample", place, policy_step, *which)


def turn_seed(
    seed: int, place: int, policy_step: int, sample: int, call: int, chunk: int, within: int = 0
) -> int:
    """The seed of a request for an answer to a program.

    Args:
        sample: number of the rollout among those to the prompt.
        call: number of the answer among the calls that the program has made.
        place, policy_step, chunk, within: as in `answer_seed`.
    """
    which = [chunk, within] if within else [chunk]
    return derive(seed, "sample", place, policy_step, sample, call, *which)


def permutation(n: int, seed: int, *purpose: str | int) -> "list[int]":
    """The numbers 0 to n - 1 in a seeded order."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(derive(seed, *purpose))).permutation(n).tolist()


def permuted(n: int, seed: int, *purpose: str | int) -> Callable[[int], int]:
    """The seeded order of 0 to n - 1, by the place; up to `LARGEST_DRAWN`, that of `permutation`.

    Of more numbers, each is computed at its place, without memory: a Feistel network over the seed permutes
    the smallest range of 4^k numbers that has all n, and is applied again as long as it leads beyond n.
    """
    if n <= LARGEST_DRAWN:
        import numpy as np

        drawn = np.random.Generator(np.random.PCG64(derive(seed, *purpose))).permutation(n)
        order = drawn.astype(np.int32 if n <= 1 << 31 else np.int64)
        return lambda place: int(order[place])
    half = ((n - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    key = derive(seed, "permutation", n, *purpose).to_bytes(6, "big")

    def mixed(number: int, value: int) -> int:
        text = number.to_bytes(1, "big") + value.to_bytes(16, "big")
        return int.from_bytes(hashlib.blake2b(text, key=key, digest_size=16).digest(), "big") & mask

    def at(place: int) -> int:
        if not 0 <= place < n:
            raise IndexError(f"place {place} of {n}")
        while True:
            left, right = place >> half, place & mask
            for number in range(ROUNDS):
                left, right = right, left ^ mixed(number, right)
            place = left << half | right
            if place < n:
                return place

    return at


# Which of several sources each place of a run's order is from, drawn by weight.


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
