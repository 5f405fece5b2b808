"""`ckpt replay --rollout`: a server is given a run's policies again, and asked for recorded answers."""

import contextlib
import itertools
import random
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path

from cairn.config.shared import RolloutKey
from cairn.inference.client import InferenceClient, ServerStatus
from cairn.inference.server import AddressUnusable, ServerFailed
from cairn.inference.servers import REPLAYED, GivenServers, OwnServer, Servers, port_for_server
from cairn.inference.vllm_command import serves_on_gpus
from cairn.model.adapters import is_adapter
from cairn.orchestrator.rollout_log import KeptRollouts, installed_vllm
from cairn.policy.errors import ServerUnavailable, WeightsGone
from cairn.policy.generation import SamplingParams, ServedAdapter
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import RoleFailed
from cairn.run.files import DamagedFile
from cairn.run.messages import PolicyName
from cairn.run.output import Stage, no_progress, printable
from cairn.run.seeds import derive
from cairn.run.waiting import run_async
from cairn.tools.ckpt_places import room_in
from cairn.tools.replay.answers import MIXED, NOT_AT_ONE, RolloutReplayed, SpanReplayed
from cairn.tools.replay.policies import KeptPolicies, whole_model
from cairn.tools.replay.recorded import RecordedRun
from cairn.tools.replay.sampled import SampledSpan, SamplingThen, recorded_rollout, spans_of
from cairn.tools.rollouts import kept_rollouts

OWN = "a server of its own"
MORE_TIME = "a server that does less"
"""What allows a request more time."""
GIVEN_THEN = "the servers: the run was given some, whose settings it has not recorded"
"""Why bits may differ."""


class RolloutReplay:
    """Recorded answers of one run that are to be asked for again, and what is needed for that."""

    def __init__(self, run: RecordedRun, keys: Sequence[RolloutKey]):
        """Look what is recorded of them; nothing is started.

        Raises:
            UsageError: the run has no such rollouts, or nothing of one can be compared, or the weights of a
                policy are gone.
            DamagedFile: the rollouts of a step can't be read.
        """
        self.run = run
        self.policies = KeptPolicies(run)
        self._kept = kept_rollouts(run.run.path)
        self.then = {key: SamplingThen.of(run, key.step) for key in keys}
        self.spans: dict[RolloutKey, list[SampledSpan]] = {}
        for key in keys:
            self.spans[key] = found = spans_of(recorded_rollout(self._kept, key), self.then[key])
            if not found:
                raise UsageError(f"--rollout {key}: no token was sampled for it")
            self.policies.refuse_lost(self._needed(key), f"--rollout {key}")

    def _needed(self, key: RolloutKey) -> set[PolicyName]:
        """The policies that must be there: those under which a server can compare something of a rollout."""
        return {span.policy for span in self.spans[key] if not span.mixed}

    def _useful(self, key: RolloutKey) -> set[PolicyName]:
        """Those, and of the others of a rollout those that are there."""
        others = {span.policy for span in self.spans[key]} - self._needed(key)
        return self._needed(key) | {one for one in others if self.policies.is_there(one)}

    def see_through(
        self,
        *,
        server: str | None = None,
        take: bool = False,
        bound: float | None = None,
        work_dir: Path | None = None,
        stage: Stage = no_progress,
    ) -> list[RolloutReplayed]:
        """Ask for all of them again, at one server that is given each policy once.

        Args:
            server: the address of one that runs; None: one is started.
            take: whether the given server is taken though a run may use it. It gets its weights back.
            bound: the mean difference of logprobs that counts as rounding; None: nothing does where bits must
                be the same, and what rounding makes in the data types elsewhere.
            work_dir: where folders are made for the time; None: beside the run directory.

        Raises:
            UsageError: the server can't be used, or weights can't be made again.
            ServerUnavailable: no server answers there.
            RoleFailed: the server does not start, or dies.
        """
        useful = set[PolicyName]().union(*map(self._useful, self.spans))
        parent = self.run.beside if work_dir is None else work_dir
        with room_in(parent) as room, self.policies.weights(useful, work_dir, stage) as weights:
            with self._serving(server, take, room, weights) as (url, status):
                try:
                    found = run_async(self._ask_all(url, status, weights, bound))
                finally:
                    if status is not None:
                        run_async(_put_back(url, status))
            self._compute_mixed(found, weights)
            return found

    def _compute_mixed(self, found: Sequence[RolloutReplayed], weights: Mapping[PolicyName, Path]) -> None:
        """Compare what no server can: tokens that go on from keys and values of an earlier policy."""
        mixed = [one for one in found if any(span.span.mixed for span in one.spans)]
        if not mixed:
            return
        from cairn.tools.replay.mixed import NotComputable, mixed_logprobs  # imports torch and transformers

        then, why, logprobs = next(iter(self.then.values())), MIXED, dict[int, list[float]]()
        dtypes = next(span.dtypes for one in mixed for span in one.spans if span.dtypes)
        try:
            logprobs = mixed_logprobs(
                [[span.span for span in one.spans] for one in mixed],
                weights,
                temperature=then.temperature,
                base=then.base,
                dtype=dtypes[0],
            )
        except NotComputable as error:
            why = str(error)
        for span in (span for one in mixed for span in one.spans if span.span.mixed):
            span.dtypes = dtypes
            span.logprobs = logprobs.get(id(span.span), [])
            span.by_transformers = bool(span.logprobs)
            span.not_compared = "" if span.logprobs else why

    @contextlib.contextmanager
    def _serving(
        self, server: str | None, take: bool, room: Path, weights: Mapping[PolicyName, Path]
    ) -> Generator[tuple[str, ServerStatus | None]]:
        """The address of a server that computes the run's model, and what it has said if it was given."""
        then = next(iter(self.then.values()))
        servers: Servers
        given = None
        if server is None:
            port = port_for_server(then.server.host)  # the run may be using its own
            config = then.server.model_copy(update={"port": port, "gpus": None, "colocated": False})
            servers = OwnServer(config, room, lambda model: None, _tell)
        else:
            ended = set[str | None]() if self.run.run.is_locked() else {one.run_id for one in weights}
            servers = given = GivenServers([server], ended, "--server", take=take)
        try:
            with servers.serving(whole_model(next(iter(weights.values())), then.base)) as (url,):
                yield url, given and given.statuses[url]
        except AddressUnusable as error:
            raise UsageError(str(error)) from None
        except ServerFailed as error:
            raise RoleFailed(str(error)) from None
        finally:
            servers.close()

    async def _ask_all(
        self,
        url: str,
        status: ServerStatus | None,
        weights: Mapping[PolicyName, Path],
        bound: float | None,
    ) -> list[RolloutReplayed]:
        found = {
            key: RolloutReplayed(key, OWN if status is None else url, [], changes=self.changes(key))
            for key in self.spans
        }
        asked: dict[int, SpanReplayed] = {}  # by the span's id
        async with InferenceClient(url, timeout_setting=MORE_TIME, retry_for=0) as client:
            for policy, folder in weights.items():
                asking = _Asking(client, policy, folder)
                altered = await asking.give(status)
                for key, spans in self.spans.items():
                    mine = [span for span in spans if span.policy == policy and not span.mixed]
                    if mine:
                        found[key].altered += altered
                    for span in mine:
                        exact = bound is None and self._exact(key, span, folder, given=status is not None)
                        asked[id(span)] = await asking.ask(span, self.then[key].temperature, exact, bound)
        for key, spans in self.spans.items():
            found[key].spans = [
                asked.get(id(span)) or SpanReplayed(span, False, (), bound, not_compared=MIXED)
                for span in spans
            ]
        return list(found.values())

    def _exact(self, key: RolloutKey, span: SampledSpan, folder: Path, *, given: bool) -> bool:
        """Whether a span must be the same to the bit.

        On CPUs with one thread the bits of an answer's first piece do not depend on what else a server does.
        What follows on it was computed from keys and values that were made token by token.
        """
        then = self.then[key]
        trainer = self.run.trainer()
        published = trainer.get("publish_dtype", "auto") in ("auto", then.server.dtype)
        merged = is_adapter(folder) and (trainer.get("lora") or {}).get("serve") == "merged"
        alike = then.own and not given and not serves_on_gpus() and then.server.threads == 1
        return alike and published and not merged and span.first and span.seed is not None

    def changes(self, key: RolloutKey) -> list[str]:
        """What is other than at the time of a rollout's step, in words."""
        step = next((one for one in self.run.saved if one >= key.step), None)
        changed = self.run.checkpoints.manifest(step).changed_versions() if step is not None else {}
        changes = [f"{name} {was} -> {here}" for name, (was, here) in changed.items()]
        if not self.then[key].own:
            return [*changes, GIVEN_THEN]
        origin, here = self._kept.origin(key.step), installed_vllm()
        if origin is not None and origin.vllm not in ("", here):
            changes.append(f"vllm {origin.vllm} -> {here}")
        return changes


class _Asking:
    """Asks a server that has been given one policy."""

    def __init__(self, client: InferenceClient, policy: PolicyName, folder: Path):
        self._client = client
        self._policy = policy
        self._folder = folder
        self._version = str(PolicyName(f"{REPLAYED}{policy.run_id}", policy.branch, policy.step))
        self._adapter: ServedAdapter | None = None
        self._dtype = ""
        self._longest: int | None = None
        self._requests = itertools.count()

    async def give(self, before: ServerStatus | None) -> list[str]:
        """Give it the policy. Returns the parameters that it held with other values, if it said that it had
        this policy.

        Args:
            before: what a given server said before anything was asked of it.

        Raises:
            WeightsRefused, WeightsAltered, ServerUnavailable, Unauthorized: as `update_weights`.
        """
        held = None
        if before is not None and before.weight_version == str(self._policy) and before.adapter is None:
            held = await self._client.weight_checksums()
        status = await self._client.update_weights(self._folder, self._version)
        self._adapter, self._dtype = status.served_adapter, status.dtype
        self._longest = status.max_model_len
        if held is None:
            return []
        now = await self._client.weight_checksums()
        return sorted(name for name in held.keys() | now.keys() if held.get(name) != now.get(name))

    async def ask(
        self, span: SampledSpan, temperature: float, exact: bool, bound: float | None
    ) -> SpanReplayed:
        """Draw a span's tokens again with its seed; and where that can't be, or gives others, have the server
        say the logprobs of the recorded ones.

        Raises:
            ServerUnavailable: the server does not answer, or has been given other weights by somebody else.
            RequestRefused: it refuses the request.
        """
        replayed = SpanReplayed(span, exact, (self._dtype,), bound)
        if span.seed is not None:
            params = SamplingParams(len(span.token_ids), temperature=temperature, seed=span.seed)
            salt = f"replay {next(self._requests)}"  # nothing is taken from the cache
            (found,) = await self._client.generate(
                span.context, params, cache_salt=salt, adapter=self._adapter
            )
            if any(one.version != self._version for one in found.weight_versions):
                raise ServerUnavailable(f"{self._client.url}: somebody else gives it weights")
            replayed.drawn, replayed.logprobs = found.token_ids, found.logprobs
            if (parted := replayed.parted) is None:
                return replayed
            replayed.logprobs = found.logprobs[: parted - span.start]
        if temperature != 1:
            replayed.not_compared = "" if replayed.logprobs else NOT_AT_ONE
            return replayed
        tokens = span.context + span.token_ids
        if self._longest is not None:
            tokens = tokens[: self._longest - 1]  # a server asks for room for one token more
        if len(tokens) > len(span.context):
            scores = await self._client.score(tokens, self._version, adapter=self._adapter)
            replayed.logprobs, replayed.given = scores[len(span.context) - 1 :], True
        return replayed


async def _put_back(url: str, before: ServerStatus) -> None:
    """Give a server the weights again that it had; if that can't be, say so."""
    had, origin = before.weight_version, before.origin
    try:
        async with InferenceClient(url, timeout_setting=MORE_TIME, retry_for=0) as client:
            if (await client.status()).weight_version == had:
                return
            if origin is None:
                raise WeightsGone("nobody knows where they came from")
            await client.update_weights(origin, had)
    except CairnError as error:
        _tell(f"note: {url} keeps the policy that it was given last, in the place of {had}: {error}")


def drawn_rollouts(run: RecordedRun, count: int, seed: int) -> list[RolloutKey]:
    """So many of a run's rollouts, drawn at random from those of which all that can be compared was sampled
    by policies that are checkpoints; fewer if there are fewer.

    Raises:
        UsageError: there are none.
    """
    kept, policies = kept_rollouts(run.run.path), KeptPolicies(run)
    there = set(policies.steps())
    candidates = [key for step in kept.steps() for key in _of_policies(kept, step, there)]
    random.Random(derive(seed, "rollouts of proof")).shuffle(candidates)

    def whole(key: RolloutKey) -> bool:
        spans = spans_of(recorded_rollout(kept, key), SamplingThen.of(run, key.step))
        needed = {span.policy for span in spans if not span.mixed}
        return bool(needed) and all(policies.find(policy) is not None for policy in needed)

    found = sorted(itertools.islice(filter(whole, candidates), count))
    if not found:
        raise UsageError(
            f"--rollouts {count}: {run.given} has no rollout whose policy is a checkpoint "
            f"(there are those of step {', '.join(map(str, sorted(there))) or 'none'})"
        )
    return found


def _of_policies(kept: KeptRollouts, step: int, there: set[int]) -> Iterable[RolloutKey]:
    """The keys of a step's rollouts that were begun under one of these policies."""
    try:
        rows = kept.read(step, ["step", "place", "sample", "policy_step"])
    except DamagedFile:
        return
    for row in rows:
        if row["policy_step"] in there:
            yield RolloutKey(row["step"], row["place"], row["sample"])


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
