# torch.distributed exports no stores.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
"""How threads of all ranks meet beside the collectives of the threads that train."""

import time
from collections.abc import Callable

import torch.distributed as dist

POLL_SECONDS = 0.002


class Meeting:
    """Threads of all ranks, one a rank, that tell each other something in rounds.

    They use a store rather than a process group: operations of another thread would get in between the
    collectives of the training, of which NCCL allows one at a time, and a wait for a store can be given up.

    Args:
        store: of this meeting alone, with a connection of its own.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store | None):
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._round = 0

    def gather(self, mine: str, check: Callable[[], object]) -> list[str]:
        """What every rank says in this round, by rank; returns once all have.

        `check` is called again and again meanwhile; what it raises ends the waiting.
        """
        if self._store is None:
            return [mine]
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], mine)
        while not self._store.check(keys):
            check()
            time.sleep(POLL_SECONDS)
        said = [value.decode() for value in self._store.multi_get(keys)]
        if self._round > 2:  # all have read the round before the last, since they have come to the last
            self._store.delete_key(f"{self._round - 2}/{self._rank}")
        return said
