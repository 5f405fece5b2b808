"""How a policy in the trainer's memory spreads over the servers of a pool, as a tree.

The first servers of the pool get it from the trainer, and each server hands it on to as many others once it
has it. So the trainer sends it as often as the tree's fan-out says, whatever the number of servers, and it
takes as many transfers, one after the other, as the tree has levels times its fan-out. Who is whose parent
follows from the order of the pool alone. A server whose parent fails, or takes more than twice as long as the
quickest one of its level, gets the policy from the trainer.
"""

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from cairn.policy.generation import Relay, Route

LEAST_SECONDS = 1.0
"""How much longer than the quickest one of its level a server may take in any case."""
SLOWER = 3.0
"""How many times longer than its parent's update a server's transfer from it may take."""
LEAST_TRANSFER = 10.0
"""Seconds that it may take in any case."""


class Spreading:
    """One policy on its way to servers.

    Args:
        urls: of the servers, in the order of the pool.
        fan_out: how many of them get it from the trainer, and how many others each hands it on to; 0: all get
            it from the trainer.
    """

    def __init__(self, urls: Sequence[str], fan_out: int):
        self._hosts = [urlsplit(url).hostname or "" for url in urls]
        self._fan_out = fan_out or len(urls)
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._begun: list[asyncio.Future[float]] = [loop.create_future() for _ in urls]
        self._handed: list[asyncio.Future[tuple[Relay, float] | None]] = [loop.create_future() for _ in urls]
        self._quickest: list[asyncio.Future[float]] = [loop.create_future() for _ in range(self.levels)]

    @property
    def levels(self) -> int:
        """The length of the longest way from the trainer to a server."""
        return self.level(len(self._hosts) - 1) + 1 if self._hosts else 0

    def level(self, place: int) -> int:
        """How many servers hand the policy on before the one at `place` has it."""
        parent = self.parent(place)
        return 0 if parent is None else self.level(parent) + 1

    def parent(self, place: int) -> int | None:
        """The place of the server that hands the policy on to this one; None: the trainer sends it."""
        return place // self._fan_out - 1 if place >= self._fan_out else None

    def children(self, place: int) -> range:
        """The places of the servers that this one hands the policy on to."""
        first, count = (place + 1) * self._fan_out, len(self._hosts)
        return range(min(first, count), min(first + self._fan_out, count))

    async def route(self, place: int) -> Route:
        """How the policy gets to the server at `place`; waits until its parent has it, fails or is late."""
        parent, relay, seconds = self.parent(place), None, 0.0
        if parent is not None and (handed := await self._in_time(parent)) is not None:
            relay, seconds = handed
            if not self._reaches(parent, place):
                relay = None
        children = sum(self._reaches(place, child) for child in self.children(place))
        self._begun[place].set_result(self._loop.time())
        limit = max(LEAST_TRANSFER, SLOWER * seconds) if relay else 0.0
        return Route(relay, limit, children, self._hosts[place] if children else "")

    def done(self, place: int, relay: Relay | None) -> None:
        """The server at `place` has the policy and hands it on at `relay`, or it has not got it (None)."""
        if self._handed[place].done():
            return
        begun = self._begun[place]
        seconds = self._loop.time() - begun.result() if begun.done() else 0.0
        self._handed[place].set_result(relay and (relay, seconds))
        if relay and not (quickest := self._quickest[self.level(place)]).done():
            quickest.set_result(seconds)

    async def _in_time(self, parent: int) -> tuple[Relay, float] | None:
        """Where a server hands the policy on, and how long it took to get it; None: it fails or is late."""
        handed, begun = self._handed[parent], self._begun[parent]
        quickest = self._quickest[self.level(parent)]
        for event in (begun, quickest):
            await asyncio.wait({handed, event}, return_when=asyncio.FIRST_COMPLETED)
        if not handed.done():
            allowed = quickest.result() + max(LEAST_SECONDS, quickest.result())
            await asyncio.wait({handed}, timeout=begun.result() + allowed - self._loop.time())
        return handed.result() if handed.done() else None

    def _reaches(self, parent: int, child: int) -> bool:
        """Whether the address by which the pool knows a server is one by which another one can reach it."""
        return not _is_loopback(self._hosts[parent]) or _is_loopback(self._hosts[child])


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
