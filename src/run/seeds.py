"""Every random draw of a run comes from here."""

import hashlib
from collections.abc import Callable

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
