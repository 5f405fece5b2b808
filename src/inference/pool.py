"""Several inference servers behind one client; they may come, go, die and be restarted in mid-run."""

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from cairn.inference.client import (
    Generation,
    InferenceClient,
    ServerDisagrees,
    ServerUnavailable,
    StaleServer,
    Unauthorized,
    WeightsGone,
    WeightsRefused,
)
from cairn.inference.counts import Counts
from cairn.inference.members import Member, Weights, tensor_bytes
from cairn.inference.server_list import ServerList
from cairn.run.probe import Probe

logger = logging.getLogger(__name__)

SLOWEST_LOOK = 2.0
"""Most seconds between two looks at a server that is gone."""
LOOK_TIMEOUT = 10.0
"""Seconds that a server has for saying how it is."""
STRAGGLERS = 1.0
"""Least seconds that slower servers get for new weights once the first one has them."""
STALE_ATTEMPTS = 5
"""How often a request is answered from wrong weights before that is an error."""
REFUSALS = (WeightsRefused, WeightsGone, Unauthorized)
HOMES = 10_000
"""Most affinities that are remembered."""


class ServerPool:
    """Gives the current policy to every server, and requests to the one that has least to do.

    Enter it as a context manager, or `close` it: it watches over its servers in the background.

    Args:
        urls: The servers to start with.
        servers_file: A file that a user may write at any time: a JSON list of URLs, or `{"urls": [...]}`. As
            long as it is there it says which servers there are; those that are not in it any more finish what
            they have.
        timeout: Longest wait for one answer of one server, in seconds.
        retry_for: How long after its first failure a request goes on to be tried, and how long `serve` waits
            for any server, in seconds.
        token: The token of all servers; default: each server's own, looked up when it is first needed.
        look_every: Seconds between two looks at a healthy server, and at the file.
        hangs_after: Seconds without a sign of life after which a server's requests go to another one, if
            there is any.
        keep_cache: Whether answers in flight go on from the keys and values that earlier weights have made;
            otherwise a server recomputes them with every update, as it would a prompt of that length.
    """

    def __init__(
        self,
        urls: Iterable[str],
        *,
        servers_file: str | Path | None = None,
        timeout: float = 600.0,
        retry_for: float = 600.0,
        token: str | None = None,
        look_every: float = 1.0,
        hangs_after: float = 30.0,
        keep_cache: bool = False,
    ):
        self._timeout = timeout
        self._retry_for = retry_for
        self._look_every = look_every
        self._hangs_after = hangs_after
        self._keep_cache = keep_cache
        self._token = token
        self._list = ServerList(urls, servers_file)
        self._members: dict[str, Member] = {}
        self._leaving: list[Member] = []
        self._homes: OrderedDict[int, str] = OrderedDict()
        self._weights: Weights | None = None
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._pushes: set[asyncio.Task[None]] = set()
        self._counts = Counts()
        self._closed = False

    async def __aenter__(self) -> "ServerPool":
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def urls(self) -> list[str]:
        """The servers that belong to the pool now, healthy or not."""
        return list(self._members)

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a prompt and its answer may have together on each server; None if none has said."""
        known = (member.max_model_len for member in self._members.values())
        return min((limit for limit in known if limit is not None), default=None)

    async def wait_ready(self, deadline: float) -> None:
        """Wait until one server is healthy, at most `deadline` seconds; tells which are not.

        Raises:
            ServerUnavailable: none is by then.
        """
        self._begin()
        if not await self._until(lambda: any(member.ready for member in self._members.values()), deadline):
            raise ServerUnavailable(
                f"no inference server is healthy after {deadline:g} s (--orchestrator.server-timeout allows "
                f"more); {self._problems()}"
            )
        if missing := [url for url, member in self._members.items() if not member.ready]:
            logger.warning("going on without these servers, which may join later: %s", ", ".join(missing))

    async def close(self) -> None:
        """Give up what is in flight and close all connections."""
        members = [*self._members.values(), *self._leaving]
        tasks = [self._watcher, *self._pushes, *(member.keeper for member in members)]
        tasks = [task for task in tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members:
            for request in member.requests:
                request.cancel()
            await member.client.close()
        self._members.clear()
        self._leaving.clear()
        self._closed = True

    async def serve(
        self, folder: str | Path, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Give the weights in `folder` to all servers, as `version`, and to every one that joins from now on.

        Requests in flight go on under the new weights. Returns when all healthy servers have confirmed the
        version; one that takes much longer than the others gets no requests for this version until it has.
        A server that scores the `probe` otherwise gets none either, and is given the weights again; answers
        that come from them are kept back until it has proven itself. With `probe_follows` they wait until
        `prove` was told the probe.

        Raises:
            WeightsRefused: a server refused the weights. (One that does so when it joins is only reported.)
            WeightsGone: the trainer that `folder` names has newer ones, which are to be served instead.
            Unauthorized: a server's token is missing or wrong.
            ServerDisagrees: all servers score the probe otherwise, again and again.
            ServerUnavailable: no server has them after `retry_for` seconds.
        """
        self._begin()
        started = time.monotonic()
        size = tensor_bytes(Path(folder))
        self._weights = Weights(str(folder), version, size, probe, probe_follows)
        members = [member for member in self._members.values() if member.ready]
        for member in self._members.values():
            member.refusal = None
        await self._push_to_all(members, started)

        def refusals(members: Iterable[Member]) -> list[Exception]:
            return [member.refusal for member in members if member.refusal]

        for refusal in refusals(members):
            raise refusal
        try:
            await self._until_served(lambda: bool(refusals(self._members.values())))
        except ServerUnavailable:
            for refusal in refusals(self._members.values()):
                raise refusal from None
            raise
        finally:
            self._counts.push_seconds += time.monotonic() - started

    async def prove(self, probe: Probe) -> None:
        """Have all servers score the probe of the weights that they were given with `probe_follows`.

        Raises:
            ServerDisagrees: all come to something else than the trainer, also when given the weights again.
            ServerUnavailable: no server has proven itself after `retry_for` seconds.
        """
        weights = self._weights
        assert weights is not None
        weights.probe, weights.probe_follows = probe, False
        given = [member for member in self._members.values() if member.weights is weights]
        await asyncio.gather(*(self._prove_or_lose(member, weights) for member in given))
        await self._until_served()

    async def _until_served(self, or_until: Callable[[], bool] = lambda: False) -> None:
        """Wait for one server that has the current weights, and has proven it if it can.

        Raises:
            ServerDisagrees, ServerUnavailable: see `serve`.
        """
        weights, members = self._weights, self._members

        def served() -> bool:
            return any(member.weights is weights for member in members.values())

        def disagree() -> bool:
            return bool(members) and all(member.is_given_up_on(weights) for member in members.values())

        await self._until(lambda: served() or disagree() or or_until(), self._retry_for)
        if served():
            return
        if disagree():
            raise ServerDisagrees("; ".join(member.abandoned for member in members.values()))
        raise ServerUnavailable(
            f"no inference server has taken weights {weights.version} within {self._retry_for:g} s "
            f"(--orchestrator.request-timeout allows more); {self._problems()}"
        )

    async def generate(
        self, prompt_ids: list[int], *, affinity: int, versions: Collection[str], n: int = 1, **sampling: Any
    ) -> list[Generation]:
        """Sample `n` continuations of `prompt_ids`, each token from one of `versions`.

        Asked again, of another server where there is one, if a server dies, hangs, fails, or answers from
        other weights; so give a seed. Requests with the same `affinity` go to the same server, which has
        their prompt in its cache, unless it has more to do than another one. `sampling` is as for
        `InferenceClient.generate`.

        Raises:
            ServerUnavailable: no server has answered `retry_for` seconds after the first failure.
            StaleServer: a server goes on answering from other weights.
            ValueError: the request is a bad one.
        """
        end, stale = math.inf, 0
        self._counts.requests += 1
        while True:
            self._begin()
            member = await self._pick(affinity, versions, end)
            pushes = member.pushes
            try:
                generations = await self._ask(member, prompt_ids, n, sampling)
            except ServerUnavailable as error:
                self._lose(member, str(error))
                end = min(end, time.monotonic() + self._retry_for)
                if time.monotonic() > end:
                    raise
            else:
                wrong = {span.version for g in generations for span in g.weight_versions} - set(versions)
                if not wrong:
                    return generations
                if member.pushes == pushes:  # else it has been given the right ones meanwhile
                    member.weights = None
                    self._lose(member, f"answered from weights {min(wrong)!r} instead of {sorted(versions)}")
                stale += 1
                if stale == STALE_ATTEMPTS:
                    raise StaleServer(
                        f"{member.problem}, though it was given the right ones again and again: does another "
                        "run push weights to the same server?"
                    )
            self._counts.retries += 1

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call: requests, retries, weight updates, and where the time went.

        `weights/bytes` is summed over servers, `time/push` is the time that `serve` took. `time/server_idle`
        is the time in which no request was in flight at all, `time/generate` the rest.
        """
        return {
            "servers/healthy": sum(member.ready for member in self._members.values()),
            "servers/quarantined": sum(
                member.is_quarantined(self._weights) for member in self._members.values()
            ),
            **self._counts.take(),
        }

    # Members

    def _begin(self) -> None:
        if self._closed:
            raise ServerUnavailable("this pool of servers is closed")
        if self._watcher is None:
            self._meet()
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_every)
            self._meet()
            for member in [member for member in self._leaving if not member.requests]:
                self._leaving.remove(member)
                await member.client.close()

    def _meet(self) -> None:
        """Take in the servers that are new in the list, and let go those that are not in it any more."""
        urls = self._list.read()
        for url in [url for url in self._members if url not in urls]:
            member = self._members.pop(url)
            member.keeper.cancel()
            member.ready = False
            self._leaving.append(member)
            logger.info("%s leaves after %d requests", url, len(member.requests))
        for url in [url for url in urls if url not in self._members]:
            client = InferenceClient(url, self._token, timeout=self._timeout, retry_for=0)
            member = self._members[url] = Member(url, client)
            member.keeper = asyncio.create_task(self._keep(member))

    async def _keep(self, member: Member) -> None:
        """Watch over a server for as long as it belongs to the pool."""
        while True:
            if member.ready:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_every):
                        await member.wake.wait()
            else:
                await asyncio.sleep(member.delay)
                member.delay = min(2 * member.delay + 0.05, SLOWEST_LOOK)
            member.wake.clear()
            if not member.ready:
                await self._try_attach(member)
            elif not await member.client.health():
                self._lose(member, "does not answer")

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
        member.note(status)
        await self._push(member)
        member.ready = True
        logger.info("%s is ready with weights %s", member.url, member.version)
        self._notify()

    def _lose(self, member: Member, problem: str) -> None:
        """Give a server no more requests until it was looked at and has the current weights."""
        if member.ready:
            logger.warning("%s: %s", member.url, problem)
        member.ready, member.problem = False, f"{member.url}: {problem}"
        member.silent_since = member.silent_since or time.monotonic()
        member.wake.set()

    def _give_up_on(self, member: Member) -> None:
        """Have others answer what a server that hangs was asked for."""
        silent = member.silent_since and time.monotonic() - member.silent_since
        if silent and silent > self._hangs_after and any(other.ready for other in self._members.values()):
            member.abandoned = f"{member.url} hangs: no sign of life for {self._hangs_after:g} s"
            for request in member.requests:
                request.cancel()

    def _problems(self) -> str:
        return "; ".join(member.problem for member in self._members.values())

    # Weights

    async def _push_to_all(self, members: list[Member], started: float) -> None:
        """Give the current weights to `members` at once; waits for all but stragglers."""
        pushes = {asyncio.create_task(self._push_or_lose(member)) for member in members}
        self._pushes |= pushes
        for push in pushes:
            push.add_done_callback(self._pushes.discard)
        pending = pushes
        while pending and not any(member.weights is self._weights for member in members):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=max(STRAGGLERS, time.monotonic() - started))

    async def _push_or_lose(self, member: Member) -> None:
        try:
            await self._push(member)
        except REFUSALS as error:
            member.refusal = error
        except (ServerUnavailable, ValueError) as error:
            self._lose(member, str(error))

    async def _prove_or_lose(self, member: Member, weights: Weights) -> None:
        try:
            async with member.pushing:
                if member.weights is weights:
                    await member.prove(weights)
        except (ServerUnavailable, ValueError) as error:
            member.weights = None
            self._lose(member, str(error))
            self._notify()

    async def _push(self, member: Member) -> None:
        """Put the current weights into a server that does not have them."""
        async with member.pushing:
            while (weights := self._weights) is not None and member.weights is not weights:
                # What weights of somebody else have left there goes in any case.
                keep_cache = self._keep_cache and member.weights is not None
                await member.give(weights, keep_cache=keep_cache)
                self._counts.push_bytes += weights.size
                self._notify()

    # Requests

    async def _pick(self, affinity: int, versions: Collection[str], end: float) -> Member:
        """The server that a request goes to; waits for one, until `end`.

        Raises:
            ServerUnavailable: there is none by then, or within `retry_for` seconds.
        """
        end = min(end, time.monotonic() + self._retry_for)

        def usable() -> list[Member]:
            return [m for m in self._members.values() if m.ready and m.version in versions]

        if not await self._until(lambda: bool(usable()), end - time.monotonic()):
            raise ServerUnavailable(
                f"no inference server with weights {sorted(versions)} within {self._retry_for:g} s "
                f"(--orchestrator.request-timeout allows more); {self._problems()}"
            )
        least = min(usable(), key=lambda member: member.load)
        home = next((member for member in usable() if member.url == self._homes.get(affinity)), least)
        chosen = least if home.load >= 1 and least.load < home.load else home
        self._homes[affinity] = chosen.url
        self._homes.move_to_end(affinity)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return chosen

    async def _ask(
        self, member: Member, prompt_ids: list[int], n: int, sampling: dict[str, Any]
    ) -> list[Generation]:
        """Ask one server once.

        Raises:
            ServerUnavailable: it failed, or cut the answer short because it is stopping.
        """
        # The salt keeps prompts from what earlier weights have left in the prefix cache.
        request = asyncio.create_task(
            member.client.generate(prompt_ids, n=n, cache_salt=member.version, **sampling)
        )
        member.requests.add(request)
        member.sequences += n
        self._counts.begin()
        try:
            await asyncio.wait({request})
            if request.cancelled():
                raise ServerUnavailable(member.abandoned)
            generations = request.result()
            if not await member.has_proven(generations):
                raise ServerUnavailable(f"{member.url} has not proven the weights that it answered from")
        finally:
            request.cancel()
            member.requests.discard(request)
            member.sequences -= n
            self._counts.end()
        if any(generation.finish_reason == "abort" for generation in generations):
            raise ServerUnavailable(f"{member.url} aborted a request: it is stopping")
        member.delay = 0.0
        return generations

    # Waiting

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Any, seconds: float) -> bool:
        """Wait until `condition()` holds; whether it does after at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                while not condition():
                    await self._changed.wait()
        return condition()
