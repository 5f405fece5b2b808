"""Requests to a server, and its answers.

Imports neither torch nor vllm, so that any process can use it.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SamplingParams:
    """How a server continues a prompt.

    max_tokens: maximum length. n: number of continuations. temperature: divisor of the logits. top_p: sample
    from the most likely tokens with this total probability. seed: continuation i uses `seed + i`; None is
    random. stop_token_ids: tokens that end a continuation. stop: texts that end it with the token that
    completes one; the server does not see one that began in the prompt. experts_from: number of the prompt's
    first token whose experts are asked for, and those of all later ones; None: of no token.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    experts_from: int | None = None


@dataclass(frozen=True)
class ServedAdapter:
    """A policy that a server computes as an adapter beside its model.

    version: of the policy. name: what requests give as their `model` to be answered from it, to the end; it
    is another one each time that the server is given the policy.
    """

    version: str
    name: str


@dataclass(frozen=True)
class VersionSpan:
    """Generated tokens `[start, end)` were sampled from weights `version`."""

    version: str
    start: int
    end: int


def expert_bytes(experts: int) -> int:
    """Bytes of an expert's number in `RoutedExperts`, if a layer has so many."""
    return 1 if experts <= 256 else 2


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts that a server's mixture of experts chose for tokens in a row.

    start: number of tokens before them, from the beginning of the prompt. rows: uint8 or uint16 [tokens,
    layers, experts of a token], counted from 0 in each layer; any numbers for layers without experts.
    """

    start: int
    rows: npt.NDArray[np.uint8 | np.uint16]


@dataclass(frozen=True)
class Generation:
    """One sampled continuation of a prompt.

    `logprobs[i]` is the natural logarithm of the probability with which `token_ids[i]` was sampled, after
    temperature and top-p. `weight_versions` are consecutive spans that cover every token. `finish_reason` is
    `"stop"` (an end token or the last token of a stop string, included in `token_ids`), `"length"`, or
    `"abort"` (the server is stopping). `stop` is the stop string that the server says has ended it, if one.
    `cached_tokens`: of the prompt, whose keys and values the server had. `experts`: of the tokens that they
    were asked for, but for the last one, which has gone through no layer; None: the server tells none.
    """

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[VersionSpan]
    finish_reason: str
    stop: str | None = None
    cached_tokens: int = field(default=0, compare=False)
    experts: RoutedExperts | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class PromptScore:
    """What a model says of a token of a prompt, after those before it: natural logarithms of probabilities.

    logprob: of the token. top: the most likely tokens at its place with theirs, the most likely first.
    """

    logprob: float
    top: list[tuple[int, float]]


# How a policy that is in the trainer's memory gets to servers; see `relay.py`.


@dataclass(frozen=True)
class Relay:
    """Where a server hands on a policy to others."""

    host: str
    port: int


@dataclass(frozen=True)
class Route:
    """How a policy gets to one server, and on from there.

    parent: the server that hands it on to this one; None: it comes from the trainer. seconds: that this may
    take; then it comes from the trainer after all. children: number of the servers that this one hands it
    on to. host: where they reach this server.
    """

    parent: Relay | None = None
    seconds: float = 0.0
    children: int = 0
    host: str = ""


DIRECT = Route()
"""From the trainer, and not on to others."""
