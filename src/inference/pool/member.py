"""One server of a pool: its state, the weights that it was given, and whether it has proven them."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cairn.inference.client import InferenceClient, ServerStatus
from cairn.policy.errors import ServerDisagrees, WeightsAltered
from cairn.policy.generation import DIRECT, Generation, Relay, Route, SamplingParams, ServedAdapter
from cairn.policy.receiver import read_source
from cairn.run.files import read_note, safetensors_bytes
from cairn.run.messages import STORED, PolicyName, Probe, StoredVersion
from cairn.run.waiting import Backoff

logger = logging.getLogger(__name__)

PROOFS = 3
"""Pushes of the same weights to a server that disagrees; then it is left alone until there are new ones."""


@dataclass(eq=False)
class Weights:
    """A policy version that servers are given.

    folder: where its tensors are, or the address of the trainer that sends them, or the URL where an object
    store has them. size: bytes of its tensors.
    in_memory: whether the trainer sends them from its memory.
    probe: tokens and the trainer's logprobs, which a server has to reproduce before its answers count.
    probe_follows: the probe is still to come, and no answer counts until then.
    """

    folder: str
    version: str
    size: int
    probe: Probe | None = None
    probe_follows: bool = False
    in_memory: bool = False


class Member:
    """One server of the pool. `ready`: it is healthy and has the current weights."""

    def __init__(self, url: str, client: InferenceClient):
        self.url = url
        self.client = client
        self.ready = False
        self.problem = f"{url}: not asked yet"
        self.refusal: Exception | None = None
        """Why it does not take the current weights, if pushing them again would not help; one of REFUSALS."""
        self.version: str | None = None
        """The version that it last confirmed."""
        self.adapter: ServedAdapter | None = None
        """What requests have to name to be answered from that version; None: nothing."""
        self.weights: Weights | None = None
        """The weights that this pool gave it last since it was started; None: it may have any."""
        self.relay: Relay | None = None
        """Where it hands them on to other servers."""
        self.relayed = False
        """Whether another server has handed them on to it."""
        self.came = 0
        """Bytes that it has read or received of them."""
        self.pushes = 0
        self.disproofs = 0
        """How often it has disagreed with the trainer about `disputed`, since it agreed or was restarted."""
        self.disputed: Weights | None = None
        self.disagreement: ServerDisagrees | None = None
        """The latest one."""
        self.disagreements = 0
        """Count since the pool's metrics were last taken."""
        self.foreign = 0
        """The same of how often it was found with weights of another run."""
        self.start_differed = 0
        """The same of the parameters that its first update has shown to have been loaded otherwise before."""
        self.abandoned = ""
        """Why its requests were given up."""
        self._proving: str | None = None
        self._proof: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it has proven to serve the version `_proving`."""
        self.epoch: str | None = None
        self.capacity = 1
        self.max_model_len: int | None = None
        self.dtype = ""
        self.sequences = 0
        self.requests: set[asyncio.Task[list[Generation]]] = set()
        self.asleep = False
        """Whether it sleeps, as it said last."""
        self.silent_since: float | None = None
        self.backoff = Backoff()
        """Before the next look at it while it is not ready."""
        self.pushing = asyncio.Lock()
        self.wake = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    @property
    def load(self) -> float:
        """Sequences in flight, as a share of those that it runs at once; above 1 they queue."""
        return self.sequences / self.capacity

    def is_quarantined(self, weights: Weights | None) -> bool:
        """Whether it gets no requests since it disagrees about these weights."""
        return self.disputed is weights and self.disproofs > 0

    def is_given_up_on(self, weights: Weights | None) -> bool:
        """Whether it is not given these weights again."""
        return self.disputed is weights and self.disproofs >= PROOFS

    def note(self, status: ServerStatus) -> None:
        """Record its status."""
        if (status.epoch, status.weight_version) != (self.epoch, self.version):
            self.foreign += status.epoch == self.epoch and _of_other_runs(status.weight_version, self.version)
            if status.epoch != self.epoch:
                self.disproofs = 0
            self.epoch, self.version, self.weights = status.epoch, status.weight_version, None
        self.adapter = status.served_adapter
        self.silent_since = None
        self.asleep = status.asleep
        self.capacity = max(1, status.max_num_seqs)
        self.max_model_len, self.dtype = status.max_model_len, status.dtype

    async def give(self, weights: Weights, *, keep_cache: bool, route: Route = DIRECT) -> None:
        """Put weights into the server, and have it prove that it computes from them.

        Args:
            route: how they get there, and on, if the trainer has them in its memory.

        Raises:
            ServerDisagrees: it does not. What it was asked for is given up.
            WeightsRefused, WeightsGone, Unauthorized, ServerUnavailable: as `update_weights` of the client.
        """
        if self.disagreement is not None and self.is_given_up_on(weights):
            raise self.disagreement
        self._settle(False)  # what waits for an earlier proof is asked again
        self._proving, self._proof = weights.version, asyncio.get_running_loop().create_future()
        try:
            # Read each time: a trainer that was restarted has put the version elsewhere.
            stored = read_note(Path(weights.folder) / STORED, StoredVersion)
            where = weights.folder if stored is None else stored.url
            status = await self.client.update_weights(
                where, weights.version, keep_cache=keep_cache, route=route
            )
            self.epoch, self.version, self.weights = status.epoch, status.weight_version, None
            self.adapter = status.served_adapter
            self.relay, self.relayed = status.hands_on, status.relayed
            self.came = weights.size if status.came is None else status.came
            self._note_start(status.start_differs)
            self.pushes += 1
            if weights.probe is not None:
                await self.prove(weights)
        except WeightsAltered as error:
            self._settle(False)
            named = WeightsAltered(f"{self.url}: {error}")
            self._note_disagreement(weights, named)
            raise named from error
        except BaseException:
            self._settle(False)
            raise
        if not weights.probe_follows:
            self._settle(True)
        self.weights = weights

    def _note_start(self, parameters: list[str] | None) -> None:
        """Report the parameters that an update has shown to have been loaded otherwise at the server's start.

        All answers of a run come from updates, so the run goes on.
        """
        if parameters:
            self.start_differed += len(parameters)
            logger.warning(
                "%s had loaded other values into %d parameters at its start than from the same files now: %s",
                self.url,
                len(parameters),
                ", ".join(parameters),
            )

    async def fall_asleep(self) -> None:
        """Have it free its GPU memory; answers in flight wait in it.

        Raises:
            ServerUnavailable: it does not answer, or can't.
        """
        self.asleep = True  # from now on it may
        self.note(await self.client.sleep())
        logger.info("%s is asleep with weights %s", self.url, self.version)

    async def wake_up(self) -> None:
        """Have it go on from the weights that it has, if it sleeps.

        Raises:
            ServerUnavailable: it does not answer, or can't.
        """
        if self.asleep:
            self.note(await self.client.wake())
            logger.info("%s is awake", self.url)

    async def prove(self, weights: Weights) -> None:
        """Have the server score the probe of the weights that it was given.

        Raises:
            ServerDisagrees: it comes to something else than the trainer. What it was asked for is given up.
            ServerUnavailable: it does not answer.
        """
        probe = weights.probe
        assert probe is not None
        agrees = False
        try:
            tokens = probe.token_ids[: self.max_model_len and max(self.max_model_len - 1, 2)]
            found = await self.client.score(tokens, weights.version, adapter=self.adapter)
            difference = probe.difference(found, self.dtype)
            agrees = difference is None
            if difference is not None:
                error = ServerDisagrees(
                    f"{self.url} was given the weights {weights.version}, but the logprobs that it gives "
                    f"{len(tokens)} tokens differ from the trainer's {difference}"
                )
                self._note_disagreement(weights, error)
                raise error
            self.disproofs = 0
            logger.info("%s has proven version %s", self.url, weights.version)
        finally:
            self._settle(agrees)

    def _note_disagreement(self, weights: Weights, error: ServerDisagrees) -> None:
        """Count a disagreement about these weights, and cancel the server's requests."""
        again = self.disproofs if self.disputed is weights else 0
        self.disputed, self.disproofs, self.weights = weights, again + 1, None
        self.disagreement, self.abandoned = error, str(error)
        self.disagreements += 1
        for request in self.requests:
            request.cancel()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, salt: str | None
    ) -> list[Generation]:
        """Sample `params.n` continuations, in as many requests as the server needs to take them all.

        It takes no request for more than it samples at a time. Their seeds are those of a single request.

        Raises:
            ServerUnavailable: it does not answer.
            RequestRefused: it refused a request.
        """
        adapter, found = self.adapter, list[Generation]()
        while (first := len(found)) < params.n:
            seed = None if params.seed is None else params.seed + first
            part = replace(params, n=min(self.capacity, params.n - first), seed=seed)
            found += await self.client.generate(prompt_ids, part, cache_salt=salt, adapter=adapter)
        return found

    async def has_proven(self, generations: list[Generation]) -> bool:
        """Whether the weights that they come from were proven; waits while that is not decided."""
        if any(span.version == self._proving for answer in generations for span in answer.weight_versions):
            return await asyncio.shield(self._proof)
        return True

    def answered_from(self, wrong: Iterable[str], versions: Iterable[str]) -> None:
        """Note that answers came from `wrong` weights; `versions` are the run's own."""
        own = next(iter(versions), None)
        self.foreign += any(_of_other_runs(version, own) for version in wrong)

    def _settle(self, agrees: bool) -> None:
        if not self._proof.done():
            self._proof.set_result(agrees)


def _of_other_runs(one: str | None, other: str | None) -> bool:
    """Whether two versions are policies of different runs; a server without any has neither's."""
    try:
        return PolicyName.parse(one or "").run_id != PolicyName.parse(other or "").run_id
    except ValueError:
        return False


def tensor_bytes(folder: Path) -> int:
    """Bytes of the tensors that a directory holds or tells of; 0 if only the servers can see it."""
    if source := read_source(folder):
        return source.bytes
    return safetensors_bytes(folder)
