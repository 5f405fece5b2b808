"""Several inference servers behind one client; they may come, go, die and be restarted in mid-run."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cairn.inference.client import InferenceClient, StaleServer
from cairn.inference.pool.member import Member, Weights, tensor_bytes
from cairn.inference.pool.membership import Counts, Membership, PoolSettings, ServerList
from cairn.inference.pool.sessions import Sessions
from cairn.policy.errors import ServerDisagrees, ServerUnavailable, WeightsAltered
from cairn.policy.generation import Generation, SamplingParams
from cairn.run import spans
from cairn.run.messages import WEIGHT_SOURCE, Probe

logger = logging.getLogger(__name__)

STALE_ATTEMPTS = 5
"""Answers from wrong weights after which a request fails."""


class ServerPool:
    """Gives the current policy to every server, and requests to the one that has least to do.

    Enter it as a context manager, or `close` it: it watches over its servers in the background.

    Args:
        urls: The servers to start with.
        servers_file: A file that a user may write at any time: a JSON list of URLs, or `{"urls": [...]}`. As
            long as it is there it says which servers there are; those that are not in it any more finish what
            they have.
        sessions_file: Where it is kept which server has which answers in the making, for a later process.
        token: The token of all servers; default: each server's own, looked up when it is first needed.
    """

    def __init__(
        self,
        urls: Iterable[str],
        settings: PoolSettings | None = None,
        *,
        servers_file: str | Path | None = None,
        sessions_file: str | Path | None = None,
        token: str | None = None,
    ):
        settings = settings or PoolSettings()
        self._retry_for = settings.retry_for
        self._keep_cache = settings.keep_cache
        self._counts = Counts()
        self._sessions = Sessions(sessions_file)
        self._membership = Membership(
            ServerList(urls, servers_file),
            self._counts,
            lambda url: InferenceClient(url, token, timeout=settings.timeout, retry_for=0),
            settings,
            self._sessions.save,
        )

    async def __aenter__(self) -> "ServerPool":
        self._membership.begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def urls(self) -> list[str]:
        """The servers that belong to the pool now, healthy or not."""
        return list(self._membership.members)

    @property
    def max_model_len(self) -> int | None:
        """Tokens that a prompt and its answer may have together on each server; None if none has said."""
        known = (member.max_model_len for member in self._membership.members.values())
        return min((limit for limit in known if limit is not None), default=None)

    async def wait_ready(self, deadline: float) -> None:
        """Wait until one server is healthy, at most `deadline` seconds; those that are not are logged.

        Raises:
            ServerUnavailable: none is by then.
        """
        self._membership.begin()
        members = self._membership.members
        if not await self._membership.until(lambda: any(m.ready for m in members.values()), deadline):
            raise ServerUnavailable(
                f"no inference server is healthy after {deadline:g} s (--orchestrator.server-timeout allows "
                f"more); {self._membership.problems()}"
            )
        if missing := [url for url, member in members.items() if not member.ready]:
            logger.warning("going on without these servers, which may join later: %s", ", ".join(missing))

    async def close(self) -> None:
        """Cancel the requests in flight and close all connections."""
        await self._membership.close()

    async def serve(
        self, folder: str | Path, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        """Give the weights in `folder` to all servers, as `version`, and to every one that joins from now on.

        Servers that sleep are woken for it. Requests in flight go on under the new weights, or to their end
        under the adapter that they have named. Returns when all
        healthy servers have confirmed the version; one that takes much longer than the others gets no
        requests for this version until it has. A server that gives the `probe` other logprobs than the
        trainer gets no requests either, and is given the weights again. Answers under the version are held
        back until their server has scored the probe; with `probe_follows` that begins when `prove` is called.

        Raises:
            WeightsRefused: a server refused the weights. (One that does so when it joins is only reported.)
            WeightsGone: the trainer that `folder` names has newer ones, which are to be served instead.
            Unauthorized: a server's token is missing or wrong.
            ServerDisagrees: all servers score the probe otherwise, or (WeightsAltered) hold other weights,
                again and again.
            ServerUnavailable: no server has them after `retry_for` seconds.
        """
        self._membership.begin()
        started = time.monotonic()
        size, in_memory = tensor_bytes(Path(folder)), (Path(folder) / WEIGHT_SOURCE).exists()
        self._membership.resting = False
        self._membership.weights = Weights(str(folder), version, size, probe, probe_follows, in_memory)
        members = [member for member in self._membership.members.values() if member.ready]
        for member in self._membership.members.values():
            member.refusal = None
        await self._membership.push_to_all(members, started)

        def refusals(members: Iterable[Member]) -> list[Exception]:
            return [member.refusal for member in members if member.refusal]

        for refusal in refusals(members):
            raise refusal
        try:
            await self._until_served(lambda: bool(refusals(self._membership.members.values())))
        except ServerUnavailable:
            for refusal in refusals(self._membership.members.values()):
                raise refusal from None
            raise
        finally:
            seconds = time.monotonic() - started
            self._counts.push_seconds += seconds
            now = time.time()
            spans.add("weights", "pushing weights", now - seconds, now)

    async def prove(self, probe: Probe) -> None:
        """Have all servers score the probe of the weights that they were given with `probe_follows`.

        Raises:
            ServerDisagrees: all come to something else than the trainer, also when given the weights again.
            ServerUnavailable: no server has proven itself after `retry_for` seconds.
        """
        weights = self._membership.weights
        assert weights is not None
        weights.probe, weights.probe_follows = probe, False
        given = [member for member in self._membership.members.values() if member.weights is weights]
        await asyncio.gather(*(self._membership.prove_or_lose(member, weights) for member in given))
        await self._until_served()

    async def sleep(self) -> None:
        """Put all servers to sleep until the next `serve`, also those that join meanwhile.

        Returns when every server has confirmed it; one that is being restarted is waited for.

        Raises:
            ServerUnavailable: one does not sleep after `retry_for` seconds.
        """
        self._membership.begin()
        self._membership.resting = True
        members = self._membership.members
        await self._membership.rest([member for member in members.values() if member.ready])
        if not await self._membership.until(
            lambda: bool(members) and all(member.ready and member.asleep for member in members.values()),
            self._retry_for,
        ):
            raise ServerUnavailable(
                f"an inference server does not sleep after {self._retry_for:g} s "
                f"(--orchestrator.request-timeout allows more); {self._membership.problems()}"
            )

    async def _until_served(self, or_until: Callable[[], bool] = lambda: False) -> None:
        """Wait for one server that has the current weights, and has proven it if it can.

        Raises:
            ServerDisagrees, ServerUnavailable: see `serve`.
        """
        weights, members = self._membership.weights, self._membership.members
        assert weights is not None, "there is nothing to serve yet"

        def served() -> bool:
            return any(member.weights is weights for member in members.values())

        def disagree() -> bool:
            return bool(members) and all(member.is_given_up_on(weights) for member in members.values())

        await self._membership.until(lambda: served() or disagree() or or_until(), self._retry_for)
        if served():
            return
        if disagree():
            errors = [member.disagreement for member in members.values()]
            kind = WeightsAltered if all(isinstance(e, WeightsAltered) for e in errors) else ServerDisagrees
            raise kind("; ".join(map(str, errors)))
        raise ServerUnavailable(
            f"no inference server has taken weights {weights.version} within {self._retry_for:g} s "
            f"(--orchestrator.request-timeout allows more); {self._membership.problems()}"
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Collection[str],
        began: str | None = None,
        sessions: Sequence[int] = (),
    ) -> list[Generation]:
        """Sample `params.n` continuations of `prompt_ids`, each token from one of `versions`.

        The request is sent again, to another server if there is one, when a server dies, hangs, fails, or
        answers from other weights; with a seed the answer is the same. Requests with the same `affinity` go
        to the same server, which has their prompt in its cache, unless it has more to do than another one:
        see `Sessions`.

        Args:
            sessions: the numbers of the answers, of those with this `affinity`, that are asked for.
            began: the version that the first sampled tokens in `prompt_ids` come from, if there are any. With
                `keep_cache`, the answer goes on from the keys and values that are there of it.

        Raises:
            ServerUnavailable: no server has answered `retry_for` seconds after the first failure.
            StaleServer: a server goes on answering from other weights.
            ValueError: the request is a bad one.
        """
        end, stale = math.inf, 0
        self._counts.requests += 1
        while True:
            self._membership.begin()
            member = await self._pick(affinity, sessions, versions, end)
            pushes = member.pushes
            try:
                generations = await self._ask(member, prompt_ids, params, began)
            except ServerUnavailable as error:
                self._membership.lose(member, str(error))
                end = min(end, time.monotonic() + self._retry_for)
                if time.monotonic() > end:
                    raise
            else:
                wrong = {span.version for g in generations for span in g.weight_versions} - set(versions)
                if not wrong:
                    if params.n == 1:  # of several, vLLM tells what the last one found
                        self._counts.prompt_tokens += len(prompt_ids)
                        self._counts.cached_tokens += generations[0].cached_tokens
                    return generations
                member.answered_from(wrong, versions)
                if member.pushes == pushes:  # else it has been given the right ones meanwhile
                    member.weights = None
                    self._membership.lose(
                        member, f"answered from weights {min(wrong)!r} instead of {sorted(versions)}"
                    )
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
        is the time in which no request was in flight at all, `time/generate` the rest. A server that has
        disagreed with the trainer is named, in `servers/disagreed/HOST:PORT`, with how often.
        `servers/foreign_weights` is how often one was found with weights of another run;
        `servers/start_differed` counts parameters into which a server's start had loaded other values than
        its first update from the same files.
        """
        return {
            "servers/healthy": sum(member.ready for member in self._membership.members.values()),
            "servers/quarantined": sum(
                member.is_quarantined(self._membership.weights)
                for member in self._membership.members.values()
            ),
            **self._disagreements(),
            **self._rare_counts(),
            "servers/moved_sessions": self._sessions.take_moved(),
            **self._counts.take(),
        }

    def _disagreements(self) -> dict[str, float]:
        """How often each server that did so has disagreed with the trainer since the last call."""
        found: dict[str, float] = {}
        for member in self._membership.members.values():
            if member.disagreements:
                found[f"servers/disagreed/{urlsplit(member.url).netloc}"] = member.disagreements
                member.disagreements = 0
        return found

    def _rare_counts(self) -> dict[str, float]:
        """How often a server was found with weights of another run since the last call, and how many
        parameters its start had loaded otherwise; nothing if none."""
        found = {"servers/foreign_weights": 0, "servers/start_differed": 0}
        for member in self._membership.members.values():
            found["servers/foreign_weights"] += member.foreign
            found["servers/start_differed"] += member.start_differed
            member.foreign = member.start_differed = 0
        return {name: count for name, count in found.items() if count}

    # Requests

    async def _pick(
        self, affinity: int, sessions: Sequence[int], versions: Collection[str], end: float
    ) -> Member:
        """Choose the server that a request goes to; waits for one, until `end`.

        Raises:
            ServerUnavailable: there is none by then, or within `retry_for` seconds.
        """
        end = min(end, time.monotonic() + self._retry_for)

        def usable() -> list[Member]:
            members = self._membership.members.values()
            return [m for m in members if m.ready and not m.asleep and m.version in versions]

        if not await self._membership.until(lambda: bool(usable()), end - time.monotonic()):
            raise ServerUnavailable(
                f"no inference server with weights {sorted(versions)} within {self._retry_for:g} s "
                f"(--orchestrator.request-timeout allows more); {self._membership.problems()}"
            )
        return self._sessions.choose(usable(), affinity, sessions)

    async def _ask(
        self, member: Member, prompt_ids: Sequence[int], params: SamplingParams, began: str | None
    ) -> list[Generation]:
        """Ask one server once.

        Raises:
            ServerUnavailable: it failed, or cut the answer short because it is stopping.
        """
        # The salt keeps prompts from what earlier weights have left in the prefix cache, apart from answers
        # that go on from it: they find there what their earlier pieces have left.
        salt = began if began is not None and self._keep_cache else member.version
        request = asyncio.create_task(member.generate(prompt_ids, params, salt))
        member.requests.add(request)
        member.sequences += params.n
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
            member.sequences -= params.n
            self._counts.end()
        if any(generation.finish_reason == "abort" for generation in generations):
            raise ServerUnavailable(f"{member.url} aborted a request: it is stopping")
        member.backoff.reset()
        return generations
