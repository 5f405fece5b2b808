"""Client of any vLLM server as a model that scores given tokens; `inference` need not have started it."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urldefrag

import httpx
from httpx_aiohttp import HttpxAiohttpClient

from cairn.config.teachers import WithTeachers, is_served
from cairn.inference.client import BUSY
from cairn.policy.errors import ServerUnavailable
from cairn.run.errors import UsageError
from cairn.run.waiting import Backoff

KEY_VARIABLE = "CAIRN_TEACHER_KEY"
"""The environment variable with the API key of such servers."""
ABOVE_0 = 1e-3
"""A logprob that is larger is none, rounding included."""


class PromptScores:
    """Logprobs of given tokens under the model of a vLLM server, at temperature 1.

    Args:
        url: Such as `http://127.0.0.1:8000`; where the server has several models, with the name of one behind
            a `#`.
        setting: What names the server in the settings, for messages.
        timeout: How long a request is tried for, in seconds, from the first try to its answer.
        timeout_setting: What a user sets to try for longer.
    """

    def __init__(self, url: str, *, setting: str, timeout: float, timeout_setting: str):
        self.url, self._model = urldefrag(url.rstrip("/"))
        self._about = f"{setting} = {url}"
        self._timeout, self._timeout_setting = timeout, timeout_setting
        key = os.environ.get(KEY_VARIABLE)
        self._http = HttpxAiohttpClient(
            base_url=self.url.rstrip("/"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def check(self, text: str, token_ids: Sequence[int]) -> None:
        """See that the server has one model to ask, whose tokens of `text` are `token_ids`.

        Raises:
            UsageError: it has not.
            ServerUnavailable: the server does not answer in time.
        """
        models = [model["id"] for model in (await self._ask("GET", "/v1/models"))["data"]]
        if not self._model and len(models) == 1:
            self._model = models[0]
        if self._model not in models:
            raise UsageError(
                f"{self._about}: the server has the models {', '.join(models)}; name one of them behind the "
                f"address, as {self.url}#{models[0] if models else 'NAME'}"
            )
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        theirs = (await self._ask("POST", "/tokenize", body))["tokens"]
        if theirs != [*token_ids]:
            raise UsageError(
                f"{self._about}: {self._model} has another vocabulary than the policy: {text[:20]!r}... is "
                f"{theirs[:8]}... there, and {[*token_ids][:8]}... here. Logprobs of one model's tokens "
                "under another need the same tokens: take a model of the same family"
            )

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of all tokens but the first.

        Raises:
            UsageError: the server refuses the request, as for tokens that are too many, or gives no logprobs.
            ServerUnavailable: the server does not answer in time.
        """
        body = {
            "model": self._model,
            "prompt": [*token_ids],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,  # of the tokens themselves only
        }
        answer = await self._ask("POST", "/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"][1:]
            logprobs = [
                float(at[str(token)]["logprob"]) for token, at in zip(token_ids[1:], found, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self._about}: the server gives no logprobs of a prompt's tokens ({type(error).__name__}: "
                f"{error}), as vLLM does (prompt_logprobs)"
            ) from None
        if not all(logprob <= ABOVE_0 for logprob in logprobs):
            raise UsageError(
                f"{self._about}: {max(logprobs):g} is no logprob; start the server without "
                "--logprobs-mode, or with raw_logprobs"
            )
        return logprobs

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One call, retried while the server is unreachable or busy. All calls are safe to repeat."""
        end = time.monotonic() + self._timeout
        backoff = Backoff()
        while True:
            backoff.grow()
            problem = "no answer"
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    response = await self._http.request(method, path, json=body)
                if response.status_code == 200:
                    return response.json()
                problem = f"{response.status_code}: {_message(response)}"
                if response.status_code < 500 and response.status_code not in BUSY:
                    raise UsageError(f"{self._about}{path}: the server refuses this ({problem})")
            except TimeoutError:
                pass
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() + backoff.seconds >= end:
                raise ServerUnavailable(
                    f"{self._about}{path}: {problem}, for {self._timeout:g} s ("
                    f"{self._timeout_setting} allows more)"
                )
            await asyncio.sleep(backoff.seconds)


@contextlib.asynccontextmanager
async def scores_of(teachers: Mapping[str, str], timeout: float) -> AsyncIterator[dict[str, PromptScores]]:
    """The servers among the models that score batches, by the column that each fills in.

    Args:
        teachers: all such models; `OrchestratorConfig.teachers`.
        timeout: in seconds, of each request.
    """
    scores = {
        column: PromptScores(
            source,
            setting=WithTeachers.sources_of[column],
            timeout=timeout,
            timeout_setting="--orchestrator.request-timeout",
        )
        for column, source in teachers.items()
        if is_served(source)
    }
    try:
        yield scores
    finally:
        for one in scores.values():
            await one.close()


def _message(response: httpx.Response) -> str:
    try:
        content = response.json()
        return content["error"]["message"] if "error" in content else content["message"]
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
