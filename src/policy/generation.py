"""What a server is asked for, and what it samples from a policy.

Imports neither torch nor vllm, so that any process can use it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How a server continues a prompt.

    max_tokens: longest continuation. n: how many of them. temperature: what logits are divided by. top_p:
    probability of the most likely tokens that are sampled from. seed: continuation i draws from `seed + i`;
    None draws at random. stop_token_ids: tokens that end a continuation.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class VersionSpan:
    """Generated tokens `[start, end)` were sampled from weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    """One sampled continuation of a prompt.

    `logprobs[i]` is the natural-log probability with which `token_ids[i]` was sampled: after temperature and
    top-p. The spans of `weight_versions` are in order and cover every token. `finish_reason` is `"stop"` (end
    token, which is in `token_ids`), `"length"`, or `"abort"` (cut short by a server that is stopping).
    """

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[VersionSpan]
    finish_reason: str
