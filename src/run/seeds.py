"""Every random draw of a run comes from here."""

import hashlib


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
