"""Client of the inference server: push weights, generate from token ids.

Imports neither torch nor vllm, so that any process can use it.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec
from httpx_aiohttp import HttpxAiohttpClient

from cairn.inference.answers import read_answer
from cairn.policy.errors import (
    RequestRefused,
    ServerAsleep,
    ServerUnavailable,
    WeightsAltered,
    WeightsGone,
    WeightsRefused,
)
from cairn.policy.generation import (
    DIRECT,
    Generation,
    PromptScore,
    Relay,
    Route,
    SamplingParams,
    ServedAdapter,
)
from cairn.run.errors import CairnError
from cairn.run.object_store import is_url
from cairn.run.waiting import Backoff

TOKEN_VARIABLE = "CAIRN_INFERENCE_TOKEN"
EPOCH_VARIABLE = "CAIRN_INFERENCE_EPOCH"
"""The id that a server reports as its epoch, so that the process that started it recognises it."""
BUSY = (409, 429, 503)
"""Status codes after which a request is sent again; 409: another update of the weights is open."""


TIMED_TOKENS = 512
"""For so many tokens that an answer may have, the client's timeout is waited once."""
ASLEEP = "the server is asleep"
"""How the reason begins that a sleeping server gives for its refusals, all with code 503."""


NEVER_GIVEN = "default"
"""The version of the weights that a server was started with."""
NOT_LOADED = {422: WeightsRefused, 412: WeightsAltered, 410: WeightsGone, 501: WeightsRefused}
"""How a server answers a push that has failed, and what is raised."""


class StaleServer(CairnError):
    """A server samples from other weights than it was given, however often it is given them."""


class Unauthorized(CairnError):
    """The server's token is missing or wrong."""


@dataclass(frozen=True)
class ServerStatus:
    """What a server reports; `weight_version` is NEVER_GIVEN until a push, `epoch` is new with each start."""

    weight_version: str
    epoch: str
    model: str
    paused: bool
    max_num_seqs: int
    vllm_version: str
    max_model_len: int | None = None
    """Tokens that a prompt and its answer may have together; None: a server of an earlier version."""
    dtype: str = "bfloat16"
    """Of the weights and the computation."""
    gpus: list[str] | None = None
    """UUIDs of the GPUs that it uses; None: a server of an earlier version."""
    updating: dict[str, Any] | None = None
    """The `version` of an update that is under way, and for how many `seconds`."""
    asleep: bool = False
    """Whether it has freed its GPU memory, and refuses to generate until it is woken."""
    adapter: str | None = None
    """The name that a request has to give to be answered from `weight_version`; None: it needs none."""
    max_lora_rank: int | None = None
    """Largest rank of the adapters that it computes beside its model; None: it merges them."""
    max_loras: int | None = None
    """Of how many adapters one batch may hold requests; None: it merges them, or is of an earlier version."""
    relay: dict[str, Any] | None = None
    """After an update: the `host` and `port` at which it hands the policy on to other servers."""
    relayed: bool = False
    """After an update: whether another server has handed the policy on to it."""
    came: int | None = None
    """After an update: bytes of the policy that it has read or received; None: it does not know."""
    start_differs: list[str] | None = None
    """After a server's first update, from the very files that it was started with: the parameters into which
    its start had loaded other values; None: after other updates, and from other files."""
    experts: bool = False
    """Whether it tells the experts that its model chooses for each token (`inference.return_experts`)."""
    path: str | None = None
    """The folder or URL that `weight_version` came from; None: it has had no push, or does not know."""

    base: dict[str, str] | None = None
    """Samples of the model that it computes them beside (`inference.base_model`); None: likewise."""

    @property
    def origin(self) -> str | None:
        """The folder or URL from which it can be given its weights again; None: there is none, or it does not
        know."""
        as_started = self.weight_version == NEVER_GIVEN and self.max_lora_rank is None
        return self.model if as_started else self.path

    @property
    def lacks_for_replay(self) -> str | None:
        """Why a run with `trainer.router_replay` can't learn from its answers; None if it can."""
        if self.experts:
            return None
        return (
            "it does not tell the experts that it chooses, which trainer.router_replay needs: start it with "
            "--return-experts, or set router_replay to false"
        )

    @property
    def hands_on(self) -> Relay | None:
        """Where it hands on the policy that it was just given."""
        return Relay(**self.relay) if self.relay else None

    @property
    def served_adapter(self) -> ServedAdapter | None:
        """The adapter that requests have to name; None: they get the server's weights."""
        return ServedAdapter(self.weight_version, self.adapter) if self.adapter else None


def token_file(url: str) -> Path:
    """Where a server at `url` leaves its token for the clients of the same user and machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("localhost", "0.0.0.0", "::", "::1"):
        host = "127.0.0.1"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "cairn" / "servers" / f"{host.replace(':', '-')}_{parts.port or 80}.json"


def token_for(url: str) -> str:
    """The token of the server at `url`: from the environment, else from the file that the server left.

    Raises:
        Unauthorized: there is neither.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    try:
        return json.loads(token_file(url).read_text())["token"]
    except (OSError, ValueError, KeyError):
        raise Unauthorized(
            f"no token for the inference server at {url}: start the server and its clients with the same "
            f"{TOKEN_VARIABLE} (not needed for a server of the same user on the same machine)"
        ) from None


class InferenceClient:
    """Asynchronous client of one inference server.

    Args:
        url: Such as `http://127.0.0.1:8000`.
        token: The server's token; default: `token_for(url)`, looked up when it is first needed.
        timeout: Longest wait for one answer, in seconds; for tokens, as many for each `TIMED_TOKENS` of them.
        timeout_setting: What a user sets to wait longer, for the message.
        retry_for: How long an unreachable server is retried before `ServerUnavailable`, in seconds.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 600.0,
        retry_for: float = 30.0,
        timeout_setting: str = "--orchestrator.request-timeout",
    ):
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.timeout_setting = timeout_setting
        self.retry_for = retry_for
        self._given_token = token
        self._token = token
        # httpx over aiohttp's connections takes half as much of the processor as over its own.
        self._http = HttpxAiohttpClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=5.0),  # the rest is bounded as a whole, per call
            limits=httpx.Limits(max_connections=0),  # none: the caller bounds concurrency; the server queues
            # A proxy from the environment must not come between two processes of one run.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> bool:
        """Whether the server answers and its engine is alive; asks once."""
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def wait_ready(self, deadline: float) -> None:
        """Wait until the server is healthy, at most `deadline` seconds.

        Raises:
            ServerUnavailable: it is not by then.
        """
        end = time.monotonic() + deadline
        while not await self.health():
            if time.monotonic() > end:
                raise ServerUnavailable(self._not_running(f"not healthy after {deadline:g} s"))
            await asyncio.sleep(0.2)

    async def status(self) -> ServerStatus:
        """Weight version, epoch and state of the server.

        Raises:
            ServerUnavailable: the server does not answer.
        """
        return self._status(await self._ask("GET", "/cairn/status"))

    def _status(self, answer: dict[str, Any]) -> ServerStatus:
        with self._expecting("a status", answer):
            return ServerStatus(**answer)

    async def update_weights(
        self,
        path: str | Path,
        version: str,
        *,
        keep_cache: bool = False,
        route: Route = DIRECT,
        kept: int | None = None,
    ) -> ServerStatus:
        """Load the weights in directory `path` (as the server sees it, or a URL) and call them `version`.

        Requests in flight go on under the new weights: after having recomputed the keys and values of all
        their tokens, or with `keep_cache` from those that the old weights have made. Returns when the server
        reports `version`. Pushing the version that the server already has loads it again.

        Args:
            route: how weights come that the directory says are in a trainer's memory (default: from there).
            kept: how many adapters requests may name from now on, on a server that computes them unmerged
                (default: this one and the one before, since a request may be on its way).

        Raises:
            WeightsRefused: the files are bad; the server keeps its weights and version.
            WeightsGone: the directory names a trainer, which has a newer version by now.
            WeightsAltered: what came, or what the server holds now, is not what the trainer published.
            ServerUnavailable: the server does not answer, or failed half-way (then push again or restart it).
            Unauthorized: the token is missing or wrong.
        """
        body: dict[str, Any] = {
            "path": str(path) if is_url(str(path)) else os.path.abspath(path),
            "version": version,
            "keep_cache": keep_cache,
        }
        if route != DIRECT:
            body["route"] = asdict(route)
        if kept is not None:
            body["kept"] = kept
        status = self._status(await self._ask("POST", "/cairn/update_weights", _json(body), protected=True))
        if status.weight_version != version:
            raise ServerUnavailable(
                f"{self.url} reports weights {status.weight_version!r} after a push of {version!r}"
            )
        return status

    async def sleep(self) -> ServerStatus:
        """Have the server free its GPU memory; it keeps its weights and their version, and answers `status`.

        Returns when it sleeps. A server that sleeps goes on sleeping.

        Raises:
            ServerUnavailable: the server does not answer, or can't sleep.
            Unauthorized: the token is missing or wrong.
        """
        return self._status(await self._ask("POST", "/cairn/sleep", protected=True))

    async def wake(self) -> ServerStatus:
        """Have a sleeping server go on, from the weights that it had; one that is awake stays so.

        Raises:
            ServerUnavailable: the server does not answer, or can't wake up.
            Unauthorized: the token is missing or wrong.
        """
        return self._status(await self._ask("POST", "/cairn/wake", protected=True))

    async def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight that the server computes with, by vLLM's name for it.

        Raises:
            ServerUnavailable: the server does not answer.
            Unauthorized: the token is missing or wrong.
        """
        answer = await self._ask("POST", "/weight_checker", _json({"action": "checksum"}), protected=True)
        with self._expecting("checksums", answer):
            return answer["checksums"]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        adapter: ServedAdapter | None = None,
    ) -> list[Generation]:
        """Sample `params.n` continuations of `prompt_ids`; they come back in order.

        Keep the seeds of different prompts at least `n` apart. On the CPU, with one thread, the same seed
        gives the same tokens whatever else the server is busy with; on GPUs rounding depends on that. Only
        requests with the same `cache_salt` share the keys and values of a common prefix.

        With an `adapter`, which the server said it has, all tokens come from that, whatever it is given
        meanwhile.

        Raises:
            ServerUnavailable: the server does not answer, or does not have the adapter any more.
            RequestRefused: the server refused the request, as with a prompt that is too long.
        """
        sampling = {
            **asdict(params),
            "logprobs": 0,  # of the sampled token only
            "detokenize": bool(params.stop),
        }
        start: int | None = sampling.pop("experts_from")
        if start is not None:
            sampling["routed_experts_prompt_start"] = start
        if params.stop:
            sampling |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
        else:
            del sampling["stop"]
        # While the server works, only the text of the request is held.
        request = {"token_ids": [*prompt_ids], "sampling_params": sampling, "cache_salt": cache_salt}
        content = await self._tokens(request, adapter, max(1.0, params.max_tokens / TIMED_TOKENS))
        with self._expecting(f"{params.n} choices", content):
            answer = read_answer(content, adapter, params.n)
            return [
                choice.generation(adapter, answer.cached_tokens, choice.experts(start, len(prompt_ids)))
                for choice in answer.choices
            ]

    async def score(
        self, token_ids: list[int], version: str, *, adapter: ServedAdapter | None = None
    ) -> list[float]:
        """The logprobs that `scores` gives."""
        return [one.logprob for one in await self.scores(token_ids, version, adapter=adapter)]

    async def scores(
        self, token_ids: list[int], version: str, *, top: int = 0, adapter: ServedAdapter | None = None
    ) -> list[PromptScore]:
        """Of all tokens but the first, computed anew from weights `version`, or from an adapter.

        Args:
            top: so many of the most likely tokens at each place are wanted as well.

        Raises:
            ServerUnavailable: the server does not answer, or has other weights.
            RequestRefused: the server refused the request.
        """
        # For these no cache is read.
        sampling = {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
        body = {"token_ids": token_ids, "sampling_params": sampling, "cache_salt": f"probe of {version}"}
        content = await self._tokens(body, adapter, 1.0)
        with self._expecting("prompt logprobs", content):
            answer = read_answer(content, adapter, 1)
            scores = answer.scores(token_ids, top)
            spans = answer.choices[0].spans(adapter)
        if any(span.version != version for span in spans):
            raise ServerUnavailable(f"{self.url} scored with weights {spans}, not {version!r}")
        return scores

    async def _tokens(self, request: dict[str, Any], adapter: ServedAdapter | None, times: float) -> bytes:
        """The answer to a request for tokens, from an adapter if there is one, in so many times `timeout`."""
        named = request if adapter is None else request | {"model": adapter.name}
        return await self._request("POST", "/inference/v1/generate", _json(named), times=times)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, protected: bool = False
    ) -> dict[str, Any]:
        """One call whose answer is a JSON object."""
        content = await self._request(method, path, body, protected)
        with self._expecting("JSON", content):
            return json.loads(content)

    async def _request(
        self, method: str, path: str, body: bytes | None = None, protected: bool = False, times: float = 1.0
    ) -> bytes:
        """The answer to one call, retried while the server is unreachable. All calls are safe to repeat."""
        end, timeout = time.monotonic() + self.retry_for, times * self.timeout
        backoff = Backoff()
        while True:
            backoff.grow()
            try:
                async with asyncio.timeout(timeout):
                    response = await self._send(method, path, body, protected)
                if response.status_code not in BUSY or time.monotonic() + backoff.seconds > end:
                    return self._answer(response)
            except TimeoutError:
                raise ServerUnavailable(
                    f"{self.url}{path}: no answer within {timeout:g} s ({self.timeout_setting} allows more)"
                ) from None
            except httpx.TransportError as error:
                if time.monotonic() + backoff.seconds > end:
                    raise ServerUnavailable(self._not_running(str(error) or type(error).__name__)) from error
            except httpx.HTTPError as error:
                raise ServerUnavailable(f"{self.url}{path}: {error!r}") from error
            await asyncio.sleep(backoff.seconds)

    async def _send(self, method: str, path: str, body: bytes | None, protected: bool) -> httpx.Response:
        """Ask once; with a token that was looked up and is refused, once more with a new one."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if not protected:
            return await self._http.request(method, path, content=body, headers=headers)
        known = self._token is not None and self._given_token is None
        while True:
            self._token = self._token or token_for(self.url)
            headers["Authorization"] = f"Bearer {self._token}"
            response = await self._http.request(method, path, content=body, headers=headers)
            if response.status_code != 401 or not known:
                return response
            self._token, known = None, False  # the server may have been restarted with another

    def _answer(self, response: httpx.Response) -> bytes:
        if response.status_code == 200:
            return response.content
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:500]
        if response.status_code == 401:
            self._token = self._given_token
            raise Unauthorized(f"{self.url}: {message}")
        if response.status_code in NOT_LOADED and response.url.path == "/cairn/update_weights":
            raise NOT_LOADED[response.status_code](message)
        if response.status_code == 404 and response.url.path.startswith("/cairn/"):
            message = f"not a server that `inference` started: {message}"
            raise ServerUnavailable(f"{response.url} answered 404: {message}")
        if response.status_code == 404 and response.url.path == "/inference/v1/generate":
            raise ServerUnavailable(f"{response.url} answered 404: {message}")
        if response.status_code == 503 and message.startswith(ASLEEP):
            raise ServerAsleep(f"{response.url}: {message}")
        bad_request = response.status_code < 500 and response.status_code not in BUSY
        kind = RequestRefused if bad_request else ServerUnavailable
        raise kind(f"{response.url} answered {response.status_code}: {message}")

    @contextlib.contextmanager
    def _expecting(self, what: str, answer: Any) -> Iterator[None]:
        """An answer that can't be read as `what` is the server's failure."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            shown = answer[:200].decode(errors="replace") if isinstance(answer, bytes) else str(answer)[:200]
            raise ServerUnavailable(
                f"{self.url} answered with something else than {what} ({error!r}): {shown}"
            ) from error

    def _not_running(self, problem: str) -> str:
        return (
            f"no inference server at {self.url} ({problem}); start one with: uv run inference @ infer.toml "
            "(--host and --port set its address)"
        )


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)
