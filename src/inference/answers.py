"""What a server's answers to requests for tokens hold, and which policy each token comes from.

Of each token vLLM sends about 140 bytes, of which 8 are used. So answers are read as these types, and what
they do not name is skipped.
"""

import base64
import io
from collections.abc import Sequence

import msgspec
import numpy as np

from cairn.policy.generation import Generation, PromptScore, RoutedExperts, ServedAdapter, VersionSpan


class TokenLogprob(msgspec.Struct, gc=False):
    """The natural logarithm of a token's probability. rank: its place among all tokens, from 1."""

    logprob: float
    rank: int | None = None


class Logprobs(msgspec.Struct):
    """Those of the sampled tokens."""

    content: list[TokenLogprob] | None = None


class Continuation(msgspec.Struct):
    """One continuation of the prompt."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    stop_reason: int | str | None = None
    routed_experts: str | None = None

    def spans(self, adapter: ServedAdapter | None) -> list[VersionSpan]:
        """Which policies the tokens come from.

        Of an adapter's, vLLM tells the version of the weights beside it.
        """
        if adapter is not None:
            return [VersionSpan(adapter.version, 0, len(self.token_ids))] if self.token_ids else []
        return self.weight_versions or []

    def experts(self, start: int | None, prompt: int) -> RoutedExperts | None:
        """The experts of the tokens from number `start` on, of which the first `prompt` are the prompt's.

        Raises:
            ValueError: they are not those of these tokens.
        """
        if start is None or self.routed_experts is None or not self.token_ids:
            return None
        rows = np.load(io.BytesIO(base64.b64decode(self.routed_experts)), allow_pickle=False)
        wanted = prompt + len(self.token_ids) - 1 - start
        if rows.ndim != 3 or len(rows) != wanted or rows.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"{rows.dtype} {list(rows.shape)} as the experts of {wanted} tokens")
        return RoutedExperts(start, rows)

    def generation(
        self, adapter: ServedAdapter | None, cached: int = 0, experts: RoutedExperts | None = None
    ) -> Generation:
        """The continuation.

        Raises:
            ValueError: it is not whole: a token lacks its logprob or its version.
        """
        content = (self.logprobs and self.logprobs.content) or []
        if len(content) != len(self.token_ids):
            raise ValueError(f"{len(content)} logprobs of {len(self.token_ids)} tokens")
        spans, covered = self.spans(adapter), 0
        for span in spans:
            if span.start != covered:
                raise ValueError(f"no weight version of token {covered}")
            covered = span.end
        if covered != len(self.token_ids):
            raise ValueError(f"weight versions of {covered} tokens out of {len(self.token_ids)}")
        logprobs = [token.logprob for token in content]
        stop = self.stop_reason if isinstance(self.stop_reason, str) else None
        return Generation(self.token_ids, logprobs, spans, self.finish_reason, stop, cached, experts)


class PromptTokens(msgspec.Struct):
    """cached_tokens: of the prompt, whose keys and values were there."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What a request has cost."""

    prompt_tokens_details: PromptTokens | None = None


class ServerAnswer(msgspec.Struct):
    """An answer to a request. prompt_logprobs: by token, None for the first one; if they were asked for.
    usage: without details, if the server is of an earlier version."""

    choices: list[Continuation]
    model: str | None = None
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    usage: Usage | None = None

    def scores(self, token_ids: Sequence[int], top: int) -> list[PromptScore]:
        """Of all tokens of the prompt but the first, with so many of the most likely ones at each place.

        Raises:
            ValueError: they are not there for every token.
            KeyError: one is missing.
        """
        scores: list[PromptScore] = []
        for token, found in zip(token_ids[1:], (self.prompt_logprobs or [])[1:], strict=True):
            at = found or {}
            likely = [(int(id), one.logprob) for id, one in at.items() if one.rank and one.rank <= top]
            likely.sort(key=lambda pair: (-pair[1], pair[0]))
            scores.append(PromptScore(at[str(token)].logprob, likely[:top]))
        return scores

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values the server had; 0 if it does not say."""
        details = self.usage and self.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0


_DECODER = msgspec.json.Decoder(ServerAnswer)


def read_answer(content: bytes, adapter: ServedAdapter | None, choices: int) -> ServerAnswer:
    """An answer with so many choices, which are put in order.

    Args:
        adapter: what the request has named.

    Raises:
        ValueError: it is none, has another number of choices, or comes from something else than the adapter.
    """
    try:
        answer = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if adapter is not None and answer.model != adapter.name:
        raise ValueError(f"an answer from {answer.model} instead of {adapter.name}")
    if len(answer.choices) != choices:
        raise ValueError(f"{len(answer.choices)} choices")
    answer.choices.sort(key=lambda choice: choice.index)
    return answer
