"""Which servers should be in a pool, which are, whether they are healthy, and that they have the current
weights."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cairn.inference.client import InferenceClient, Unauthorized
from cairn.inference.pool.member import Member, Weights
from cairn.inference.pool.spreading import Spreading
from cairn.policy.errors import ServerLacks, ServerUnavailable, WeightsGone, WeightsRefused
from cairn.policy.generation import DIRECT, Route
from cairn.run import spans

logger = logging.getLogger(__name__)

LOOK_TIMEOUT = 10.0
"""Seconds to wait for a server's status."""
STRAGGLERS = 1.0
"""Seconds that slower servers get at least to load new weights once the first one has them."""
REFUSALS = (WeightsRefused, WeightsGone, Unauthorized)


# Which servers a pool should have: a list of URLs that a user may change at any time.


class ServerList:
    """Which servers there should be: those of the file while it is there, else the configured ones."""

    def __init__(self, urls: Iterable[str], file: str | Path | None):
        self._configured = [url.rstrip("/") for url in urls]
        self._file = Path(file) if file else None
        self._listed: list[str] | None = None
        self._seen: str | None = None
        self._reported: str | None = None

    def read(self) -> list[str]:
        """The servers' URLs; a file that makes no sense is reported once, and the list stays as it was."""
        if self._file is None:
            return self._configured
        try:
            text = self._file.read_text()
            if text != self._seen:
                self._listed, self._reported = parse_urls(text), None
                self._seen = text
        except FileNotFoundError:
            self._listed = self._seen = self._reported = None
        except (OSError, ValueError, RecursionError) as error:
            if str(error) != self._reported:
                logger.error("%s is ignored: %s", self._file, error)
            self._reported = str(error)
        return self._listed or self._configured


def parse_urls(text: str) -> list[str]:
    """The servers that the content of a servers file names.

    Raises:
        ValueError: it is neither a JSON list of URLs nor `{"urls": [...]}`, or names none.
    """
    content = json.loads(text)
    urls = content.get("urls") if isinstance(content, dict) else content
    if not isinstance(urls, list) or not urls:
        raise ValueError('it has to hold a JSON list of URLs, or {"urls": [...]}, with one at least')
    for url in urls:
        if not _is_url(url):
            raise ValueError(f"{url!r} is not a URL; write it like http://127.0.0.1:8000")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def _is_url(value: Any) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (ValueError, TypeError, AttributeError):
        return False


@dataclass(frozen=True)
class PoolSettings:
    """Durations are in seconds."""

    timeout: float = 600.0
    """Longest wait for one answer of one server; see `InferenceClient`."""
    retry_for: float = 600.0
    """How long after its first failure a request goes on to be tried, and how long `serve` waits for any
    server."""
    look_every: float = 1.0
    """Between two looks at a healthy server, and at the servers file."""
    hangs_after: float = 30.0
    """Without a sign of life, until a server's requests go to another one, if there is any."""
    keep_cache: bool = False
    """Whether answers in flight go on from the keys and values that earlier weights have made; otherwise a
    server recomputes them with every update, as it would a prompt of that length."""
    needs_experts: bool = False
    """Whether only servers may join that tell the experts of tokens."""
    fan_out: int = 4
    """How many servers get a policy from the trainer's memory, and how many others each of them hands it on
    to; 0: all get it from the trainer."""


# Which servers belong to a pool, and what they have.


class Counts:
    """What a pool did since it was last asked."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._busy_since = 0.0
        self._marked = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self.requests = 0
        self.retries = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.push_bytes = 0
        self.relayed_bytes = 0
        self.push_seconds = 0.0
        self._idle = self._busy = 0.0

    def begin(self) -> None:
        """A request has been sent."""
        self._mark()
        if not self._in_flight:
            self._busy_since = time.time()
        self._in_flight += 1

    def end(self) -> None:
        """A request has been answered or given up."""
        self._mark()
        self._in_flight -= 1
        if not self._in_flight:
            spans.add("servers", "generating", self._busy_since)

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        self._mark()
        counts = {
            "servers/requests": self.requests,
            "servers/retries": self.retries,
            "time/generate": self._busy,
            "time/server_idle": self._idle,
            "weights/bytes": self.push_bytes,
            "weights/relayed_bytes": self.relayed_bytes,
            "time/push": self.push_seconds,
        }
        if self.prompt_tokens:
            counts["servers/cache_hits"] = self.cached_tokens / self.prompt_tokens
        self._clear()
        return counts

    def _mark(self) -> None:
        """Count the time since the last mark."""
        now = time.monotonic()
        if self._in_flight:
            self._busy += now - self._marked
        else:
            self._idle += now - self._marked
        self._marked = now


class Membership:
    """Watches over servers in the background, from `begin` to `close`.

    Args:
        servers: Which servers there should be; read again and again.
        counts: Told of the weights that servers are given.
        connect: Makes the client of a server from its URL.
        settings: Of the pool.
        save: Keeps for a later process what there is to keep; called every `look_every` seconds with
            `at_once=False`, and at the end.
    """

    def __init__(
        self,
        servers: ServerList,
        counts: Counts,
        connect: Callable[[str], InferenceClient],
        settings: PoolSettings,
        save: Callable[..., Awaitable[None]],
    ):
        self.members: dict[str, Member] = {}
        """The servers that belong to the pool now, healthy or not, by URL."""
        self.weights: Weights | None = None
        """What every server is to have."""
        self.resting = False
        """Whether every server is to sleep; otherwise those that are given weights are woken."""
        self._servers = servers
        self._counts = counts
        self._connect = connect
        self._settings = settings
        self._save = save
        self._leaving: list[Member] = []
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._pushes: set[asyncio.Task[None]] = set()
        self._closed = False

    def begin(self) -> None:
        """Watch over the servers from now on, if that has not begun.

        Raises:
            ServerUnavailable: the pool was closed.
        """
        if self._closed:
            raise ServerUnavailable("this pool of servers is closed")
        if self._watcher is None:
            self._meet()
            self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Cancel the requests in flight and close all connections."""
        members = [*self.members.values(), *self._leaving]
        tasks = [self._watcher, *self._pushes, *(member.keeper for member in members)]
        tasks = [task for task in tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members:
            for request in member.requests:
                request.cancel()
            await member.client.close()
        self.members.clear()
        self._leaving.clear()
        self._closed = True
        await self._save()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._settings.look_every)
            self._meet()
            await self._save(at_once=False)
            for member in [member for member in self._leaving if not member.requests]:
                self._leaving.remove(member)
                await member.client.close()

    def _meet(self) -> None:
        """Add the servers that are new in the list, and release those that have left it."""
        urls = self._servers.read()
        for url in [url for url in self.members if url not in urls]:
            member = self.members.pop(url)
            if member.keeper is not None:
                member.keeper.cancel()
            member.ready = False
            self._leaving.append(member)
            logger.info("%s leaves after %d requests", url, len(member.requests))
        for url in [url for url in urls if url not in self.members]:
            member = self.members[url] = Member(url, self._connect(url))
            member.keeper = asyncio.create_task(self._keep(member))

    async def _keep(self, member: Member) -> None:
        """Watch over a server for as long as it belongs to the pool."""
        while True:
            if member.ready:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.look_every):
                        await member.wake.wait()
            else:
                await asyncio.sleep(member.backoff.seconds)
                member.backoff.grow()
            member.wake.clear()
            if not member.ready:
                await self._try_attach(member)
            elif not await member.client.health():
                self.lose(member, "does not answer")

    async def _try_attach(self, member: Member) -> None:
        try:
            await self._attach(member)
        except Exception as error:  # whatever is wrong with one server, the others go on
            if str(error) not in member.problem and not isinstance(error, ServerUnavailable):
                logger.error("%s can't join: %s", member.url, error)
            member.problem = f"{member.url}: {error}"
            member.refusal = error if isinstance(error, REFUSALS) else None
            self._notify()
        if not member.ready:
            self._give_up_on(member)

    async def _attach(self, member: Member) -> None:
        """Make a server that answers ready, with the current weights in it."""
        try:
            async with asyncio.timeout(LOOK_TIMEOUT):
                status = await member.client.status()
        except TimeoutError:
            raise ServerUnavailable(f"{member.url} has not answered for {LOOK_TIMEOUT:g} s") from None
        if self._settings.needs_experts and (lacks := status.lacks_for_replay):
            raise ServerLacks(lacks)
        member.note(status)
        resting = None
        while resting is not self.resting:  # which may change meanwhile
            resting = self.resting
            await (self._rest(member) if resting else self._push(member))
        member.ready = True
        logger.info("%s is ready with weights %s", member.url, member.version)
        self._notify()

    def lose(self, member: Member, problem: str) -> None:
        """Send a server no requests until it has answered again and has the current weights."""
        if member.ready:
            logger.warning("%s: %s", member.url, problem)
        member.ready, member.problem = False, f"{member.url}: {problem}"
        member.silent_since = member.silent_since or time.monotonic()
        member.wake.set()

    def _give_up_on(self, member: Member) -> None:
        """Cancel the requests of a server that hangs, so that another one answers them."""
        silent = member.silent_since and time.monotonic() - member.silent_since
        if (
            silent
            and silent > self._settings.hangs_after
            and any(other.ready for other in self.members.values())
        ):
            member.abandoned = f"{member.url} hangs: no sign of life for {self._settings.hangs_after:g} s"
            for request in member.requests:
                request.cancel()

    def problems(self) -> str:
        """What is wrong with each server."""
        return "; ".join(member.problem for member in self.members.values())

    # Sleep

    async def rest(self, members: list[Member]) -> None:
        """Put `members` to sleep at once; those that fail are put to sleep when they answer again."""

        async def rest_or_lose(member: Member) -> None:
            try:
                await self._rest(member)
            except (ServerUnavailable, Unauthorized, ValueError) as error:
                self.lose(member, str(error))

        await asyncio.gather(*map(rest_or_lose, members))

    async def _rest(self, member: Member) -> None:
        async with member.pushing:
            if self.resting:
                await member.fall_asleep()
                self._notify()

    # Weights

    async def push_to_all(self, members: list[Member], started: float) -> None:
        """Give the current weights to `members`, at once or as a tree; waits for all but stragglers."""
        weights = self.weights
        assert weights is not None
        fan_out = self._settings.fan_out if weights.in_memory else 0
        spreading = Spreading([member.url for member in members], fan_out)
        pushes = {
            asyncio.create_task(self._push_in_turn(member, weights, spreading, place))
            for place, member in enumerate(members)
        }
        self._pushes |= pushes
        for push in pushes:
            push.add_done_callback(self._pushes.discard)
        pending = pushes
        while pending and not any(member.weights is self.weights for member in members):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            each = max(STRAGGLERS, time.monotonic() - started)
            await asyncio.wait(pending, timeout=each * max(1, 2 * spreading.levels - 1))

    async def _push_in_turn(self, member: Member, weights: Weights, spreading: Spreading, place: int) -> None:
        """Give weights to a server once they are where it gets them from, unless there are newer ones."""
        try:
            route = await spreading.route(place)
            if self.weights is weights:
                await self._push_or_lose(member, route)
        finally:
            spreading.done(place, member.relay if member.weights is weights else None)

    async def _push_or_lose(self, member: Member, route: Route) -> None:
        try:
            await self._push(member, route)
        except REFUSALS as error:
            member.refusal = error
        except (ServerUnavailable, ValueError) as error:
            self.lose(member, str(error))

    async def prove_or_lose(self, member: Member, weights: Weights) -> None:
        """Have a server that has these weights score their probe."""
        try:
            async with member.pushing:
                if member.weights is weights:
                    await member.prove(weights)
        except (ServerUnavailable, ValueError) as error:
            member.weights = None
            self.lose(member, str(error))
            self._notify()

    async def _push(self, member: Member, route: Route = DIRECT) -> None:
        """Put the current weights into a server that does not have them, the first ones by `route`."""
        async with member.pushing:
            if self.weights is not None and not self.resting:
                await member.wake_up()
            while (weights := self.weights) is not None and member.weights is not weights:
                # Keys and values that another run's weights made are never kept.
                keep_cache = self._settings.keep_cache and member.weights is not None
                await member.give(weights, keep_cache=keep_cache, route=route)
                route = DIRECT
                self._counts.push_bytes += member.came
                self._counts.relayed_bytes += member.came * member.relayed
                self._notify()

    # Waiting

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition()` holds; whether it does after at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                while not condition():
                    await self._changed.wait()
        return condition()
