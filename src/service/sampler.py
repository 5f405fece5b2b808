"""Samples for clients: a vLLM server that computes the adapters of saved weights beside the base.

The server keeps some adapters at a time. An adapter that a request needs, and that the server does not have,
is given to it first; so it does not matter which adapters a server had when it was started again.
"""

import asyncio
import logging
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cairn.config.service import ServiceConfig
from cairn.config.shared import SupervisionConfig
from cairn.inference.client import InferenceClient, ServerStatus
from cairn.inference.supervised import SupervisedServer
from cairn.policy.errors import RequestRefused, ServerUnavailable, WeightsAltered, WeightsRefused
from cairn.policy.generation import PromptScore, SamplingParams, ServedAdapter
from cairn.run.errors import CairnError, UsageError
from cairn.run.seeds import derive
from cairn.run.supervised import LOOK_SECONDS, RestartRule
from cairn.service.wire import CallRefused, prompt_of, sampled, taken

logger = logging.getLogger(__name__)

TRIES = 5
"""Times that a request is sent: adapters of other clients may take the place of its own in between."""
OF_BASE = "base"
"""The version of the adapter of zeros, by which servers compute what the base does."""
MOST_SAMPLES = 512
NOT_THERE = {
    "topk_sample_logprobs": "a sample's logprobs are of its own tokens, after temperature and top-p",
    "target_prompt_logprobs": "the server scores a prompt's own tokens, and its most likely ones "
    "(topk_prompt_logprobs)",
    "prompt_alt_tokens_k": "the server draws no tokens at places of a prompt",
    "record_stability_info": "it is for the loss stable_reinforce, which this service does not have",
}
"""Fields of a request that must be off, and why."""
READY_SECONDS = 0.2
"""Between two looks at whether a server is ready."""


@dataclass(frozen=True)
class SampleAsked:
    """A request for samples, checked.

    seed: None if the client leaves it open. likely: how many of the most likely tokens at each place of the
    prompt are wanted. scored: how many of the prompt's last tokens have logprobs; None: all but the first.
    """

    prompt: list[int]
    count: int
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop_tokens: tuple[int, ...]
    stop_texts: tuple[str, ...]
    prompt_logprobs: bool
    likely: int = 0
    scored: int | None = None

    @classmethod
    def of(cls, body: dict[str, Any]) -> "SampleAsked":
        """Of a request's fields.

        Raises:
            CallRefused: something is missing, out of bounds, or not to be had here.
        """
        how = taken(body, "sampling_params", dict)
        for name, why in NOT_THERE.items():
            if body.get(name) not in (0, None, False):
                raise CallRefused(f"{name} = {str(body[name])[:40]}: {why}; leave it out")
        if how.get("top_k", -1) not in (-1, 0, None):
            raise CallRefused(
                f"sampling_params: top_k = {how['top_k']!r}: this service samples from all tokens or by top_p"
            )
        stop = how.get("stop")
        stops = [stop] if isinstance(stop, str) else stop
        if stops == []:
            raise CallRefused(
                "sampling_params: stop = []: samples end with the model's end token; leave stop out"
            )
        texts = tuple(one for one in stops or () if isinstance(one, str))
        tokens = tuple(one for one in stops or () if isinstance(one, int))
        count = body.get("num_samples", 1)
        if not isinstance(count, int) or not 1 <= count <= MOST_SAMPLES:
            raise CallRefused(f"num_samples = {count!r} is not a number from 1 to {MOST_SAMPLES}")
        most, seed = how.get("max_tokens"), how.get("seed")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise CallRefused(f"sampling_params: max_tokens = {most!r} is not a number of tokens")
        prompt = prompt_of(taken(body, "prompt", dict))
        likely, scored = body.get("topk_prompt_logprobs") or 0, body.get("prompt_logprobs_last_n")
        if isinstance(likely, bool) or not isinstance(likely, int) or likely < 0:
            raise CallRefused(f"topk_prompt_logprobs = {likely!r} is not a number of tokens")
        if scored is not None and not (
            body.get("prompt_logprobs") and isinstance(scored, int) and 1 <= scored < len(prompt)
        ):
            raise CallRefused(
                f"prompt_logprobs_last_n = {scored!r}: it goes with prompt_logprobs, and takes a number from "
                f"1 to below the {len(prompt)} of the prompt's tokens"
            )
        return cls(
            prompt,
            count,
            most,
            _number(how, "temperature", 1.0),
            _number(how, "top_p", 1.0),
            seed if isinstance(seed, int) else None,
            tokens,
            texts,
            bool(body.get("prompt_logprobs")),
            likely,
            scored,
        )

    def ending_with(self, tokens: tuple[int, ...]) -> "SampleAsked":
        """The same, with tokens that end a sample."""
        return replace(self, stop_tokens=tokens)


def _number(how: dict[str, Any], name: str, default: float) -> float:
    value = how.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CallRefused(f"sampling_params: {name} = {value!r} is not a number from 0")
    return float(value)


class SampleServer:
    """A server, and the adapters that it has. For one event loop."""

    def __init__(self, config: ServiceConfig, model: Path, plain: Path):
        """Take a model's folder, and that of an adapter of zeros. Starts nothing."""
        self._config, self._plain = config, plain
        given = config.model.model_copy(update={"name": str(model)})
        settings = {"model": given, "max_lora_rank": config.max_rank}
        self._settings = config.inference.model_copy(update=settings)
        self._own: SupervisedServer | None = None
        self._tending: asyncio.Task[None] | None = None
        self._answered = 0
        self._client = InferenceClient(
            config.inference_url or self._settings.url,
            timeout_setting="sampling_params.max_tokens",
            retry_for=60.0,
        )
        self._giving = asyncio.Lock()
        self._status: ServerStatus | None = None
        self._has: dict[str, ServedAdapter] = {}

    async def start(self) -> None:
        """Start the server, if it is the service's own, and wait until it is ready.

        Raises:
            UsageError: it can't be started.
        """
        if self._config.sampling != "own":
            return
        logs, supervision = Path(self._config.output_dir) / "logs", SupervisionConfig()
        rule = RestartRule(max_restarts=0)  # one that does not start at all is not tried again
        self._own = SupervisedServer("inference", self._settings, logs, supervision, rule)
        try:
            while not self._own.is_ready:
                self._own.look_after(lambda: 0)
                await asyncio.sleep(READY_SECONDS)
        except CairnError as error:
            raise UsageError(
                f"sampling = 'own' (--inference.NAME sets NAME of its server): {error}"
            ) from None
        rule.max_restarts = sys.maxsize  # once it has served, training should not end with it
        self._tending = asyncio.create_task(self._tend(self._own))

    async def _tend(self, own: SupervisedServer) -> None:
        """Have the server started again when it has died, or hangs."""
        while True:
            before = own.pid
            own.look_after(lambda: self._answered)
            if own.pid != before:
                logger.warning("the inference server is started again; see %s", own.log)
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """End the server, if it is the service's own."""
        await self._client.close()
        if self._tending is not None:
            self._tending.cancel()
            await asyncio.wait([self._tending])
        if self._own is not None:
            self._own.begin_to_stop()
            await asyncio.to_thread(self._own.stop)

    async def sample(self, asked: SampleAsked, weights: Path | None, version: str, id: str) -> bytes:
        """The answer to a request.

        Args:
            weights: the folder of a step that clients sample from; None: the base.
            version: names these weights.
            id: of the request, from which the seed is drawn if the client gives none.

        Raises:
            CallRefused: the server can't do what is asked.
            ServerUnavailable: it does not answer.
        """
        seed = derive(self._config.seed, "service_sample", id) if asked.seed is None else asked.seed
        for again in range(TRIES):
            try:
                adapter = await self._adapter(
                    version, weights / "model" if weights else self._plain / "model"
                )
                answer = await self._ask(asked, adapter, seed)
                self._answered += 1
                return answer
            except RequestRefused as error:
                raise CallRefused(f"the server refuses the request: {error}") from None
            except (WeightsRefused, WeightsAltered) as error:
                raise CallRefused(f"the server refuses the weights: {error}") from None
            except ServerUnavailable as error:
                self._has.pop(version, None)
                if again + 1 == TRIES:
                    raise
                logger.info("request %s is sent again: %s", id, error)
                await self._wait_ready()
        raise AssertionError("the last try returns or raises")

    async def _ask(self, asked: SampleAsked, adapter: ServedAdapter, seed: int) -> bytes:
        assert self._status is not None, "it has said which adapters it has"
        room = (self._status.max_model_len or len(asked.prompt) + 1) - len(asked.prompt)
        if room < 1:
            raise CallRefused(
                f"prompt: its {len(asked.prompt)} tokens leave no room: the model takes "
                f"{self._status.max_model_len}"
            )
        how = SamplingParams(
            max_tokens=min(asked.max_tokens or room, room),
            n=asked.count,
            temperature=asked.temperature,
            top_p=asked.top_p or 1.0,
            seed=seed,
            stop_token_ids=asked.stop_tokens,
            stop=asked.stop_texts,
        )
        scores: list[PromptScore | None] = []
        if asked.prompt_logprobs or asked.likely:
            tokens, top = asked.prompt, asked.likely
            found = await self._client.scores(tokens, adapter.version, top=top, adapter=adapter)
            first = len(tokens) - (asked.scored or len(found))
            scores = [None] * first + found[first - 1 :]
        answers = await self._client.generate(asked.prompt, how, adapter=adapter)
        if any(one.finish_reason not in ("stop", "length") for one in answers):
            raise ServerUnavailable(f"{self._client.url} is stopping")
        return sampled(
            [(one.token_ids, one.logprobs, one.finish_reason) for one in answers],
            [one and one.logprob for one in scores] if asked.prompt_logprobs else None,
            [one.top if one else [] for one in scores] if asked.likely else None,
        )

    async def _adapter(self, version: str, folder: Path) -> ServedAdapter:
        """The adapter, which the server is given if it does not have it."""
        async with self._giving:
            if version in self._has:
                return self._has[version]
            if self._status is None:
                self._status = await self._client.status()
                if not self._status.max_loras:
                    raise CallRefused(
                        f"inference_url {self._client.url}: the server computes no adapters; start it with "
                        f"--max-lora-rank {self._config.max_rank}"
                    )
            kept = max(2, self._status.max_loras or 2)
            status = await self._client.update_weights(folder, version, kept=kept)
            if status.epoch != self._status.epoch:
                self._has.clear()
            self._status, adapter = status, status.served_adapter
            if adapter is None:
                raise CallRefused(
                    f"inference_url {self._client.url}: the server has merged the adapter into its model"
                )
            self._has[version] = adapter
            for old in list(self._has)[:-kept]:
                del self._has[old]
            return adapter

    async def _wait_ready(self) -> None:
        """Wait until the service's own server is ready; and a moment, for a given one."""
        while self._own is not None and not self._own.is_ready:
            await asyncio.sleep(READY_SECONDS)
        await asyncio.sleep(READY_SECONDS)
