"""What a server samples from a policy.

Imports neither torch nor vllm, so that any process can use it.
"""

from dataclasses import dataclass


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
