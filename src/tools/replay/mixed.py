"""Logprobs of tokens that were sampled from keys and values which earlier policies had left.

No server has these any more. So transformers computes the logprobs, on CPUs: one policy after the other adds
keys and values to a cache, as it has added them to the server's.

While a request goes on, the server keeps all keys and values when it gets other weights. The next request of
an answer, or of a conversation, finds the whole blocks of its prefix that are still in the server's cache.
How many it has found is not recorded. So what may have been found is tried, and what agrees best is taken.
"""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from cairn.inference.pool.member import tensor_bytes
from cairn.model.adapters import is_adapter, with_adapter_merged
from cairn.model.untrusted_config import load_config, making_model
from cairn.run.errors import CairnError
from cairn.run.machine import available_memory
from cairn.run.messages import PolicyName
from cairn.tools.replay.policies import whole_model
from cairn.tools.replay.sampled import SampledSpan

BLOCKS = (128, 16)
"""Tokens of a block of vLLM's cache, on CPUs and on GPUs."""
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The kinds of layers, in transformers' words, that have keys and values."""
PIECE = 512
"""Tokens of a forward pass: it has the logits of all of them."""


class NotComputable(CairnError):
    """Tokens can't be compared, for the reason that the message gives."""


@dataclass
class _Branch:
    """What is known of the keys and values of one branch of a rollout.

    waiting: its spans, in order, up to the last one that is asked for. tokens: to which the cache belongs.
    """

    waiting: list[SampledSpan]
    tokens: list[int] = field(default_factory=list[int])
    cache: DynamicCache = field(default_factory=DynamicCache)


def mixed_logprobs(
    rollouts: Sequence[Sequence[SampledSpan]],
    weights: Mapping[PolicyName, Path],
    *,
    temperature: float,
    base: str | None,
    dtype: str,
) -> dict[int, list[float]]:
    """The logprobs, float32, of the tokens of mixed spans, by the span's `id`.

    Those are left out that follow on a policy whose weights are not there, or on a later one than their own.

    Args:
        rollouts: the spans of each, in the order in which they were sampled.
        weights: the folders of policies, in the order of their steps.
        temperature: of the sampling.
        base: where the run says that the base of its adapters is.
        dtype: of the computation.

    Raises:
        NotComputable: the host has too little memory for a policy, or models of its kind have no keys.
    """
    branches = [branch for spans in rollouts for branch in _branches(spans)]
    found: dict[int, list[float]] = {}
    for policy, folder in weights.items():
        next_ones = [branch for branch in branches if branch.waiting and branch.waiting[0].policy == policy]
        if not next_ones:
            continue
        model = _opened(folder, base, dtype)
        for branch in next_ones:
            while branch.waiting and branch.waiting[0].policy == policy:
                span = branch.waiting.pop(0)
                logprobs = _go_on(model, branch, span, temperature)
                if span.mixed:
                    found[id(span)] = logprobs
        del model  # before the next one is opened: there may be memory for one only
    return found


def _branches(spans: Sequence[SampledSpan]) -> Iterator[_Branch]:
    """The branches of a rollout that have mixed spans."""
    for number in dict.fromkeys(span.branch for span in spans):
        of_branch = [span for span in spans if span.branch == number]
        last = max((at for at, span in enumerate(of_branch) if span.mixed), default=-1)
        if last >= 0:
            yield _Branch(of_branch[: last + 1])


def _opened(folder: Path, base: str | None, dtype: str) -> Any:
    """A policy's model.

    Raises:
        NotComputable: the host has too little memory for it, or it keeps a state instead of keys and values.
        Damaged: its config.json describes no model that transformers can make.
    """
    disable_progress_bar()
    whole = whole_model(folder, base)
    config = load_config(whole)
    with making_model(config), torch.device("meta"):  # only the model's class says whether it keeps a state
        has_state: bool = AutoModelForCausalLM.from_config(config)._is_stateful
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    if has_state or not ATTENTION.issuperset(kinds):
        raise NotComputable("they come from a state that an earlier policy has left")
    wanted, there = tensor_bytes(whole), available_memory()
    if wanted > there:
        raise NotComputable(
            "they come from keys and values that an earlier policy has left, and computing these takes "
            f"{wanted / 1e9:.1f} GB of host memory for a policy, of which {there / 1e9:.1f} are available"
        )
    model = AutoModelForCausalLM.from_pretrained(
        whole, dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    if is_adapter(folder):
        model = with_adapter_merged(model, folder)
    return model.eval()


@torch.no_grad()
def _go_on(model: Any, branch: _Branch, span: SampledSpan, temperature: float) -> list[float]:
    """The logprobs of a span's tokens; the cache becomes that of its end.

    Its last token but one is the last that the server has computed keys and values of.
    """
    fed = [*span.context, *span.token_ids[:-1]]
    last = len(span.context) - 1  # the token that gives the first one's logits
    pairs = zip(branch.tokens, fed[:last], strict=False)
    common = next((at for at, (was, now) in enumerate(pairs) if was != now), min(len(branch.tokens), last))
    kept = [common] if not span.begins else sorted({0, *(common // size * size for size in BLOCKS)})
    best = math.inf
    logprobs, cache = list[float](), branch.cache
    for count in kept:
        tried = DynamicCache()
        if count:
            tried = copy.deepcopy(branch.cache) if span.begins else branch.cache
            if more := tried.get_seq_length() - count:
                tried.crop(-more)
        found = _forward(model, tried, fed, count, span, temperature)
        apart = math.fsum(abs(was - now) for was, now in zip(span.logprobs, found, strict=True))
        if not logprobs or apart < best:
            best, logprobs, cache = apart, found, tried
    branch.tokens, branch.cache = fed, cache
    return logprobs


def _forward(
    model: Any, cache: DynamicCache, fed: Sequence[int], kept: int, span: SampledSpan, temperature: float
) -> list[float]:
    """The logprobs of a span's tokens, whose first `kept` keys and values are in the cache already."""
    last = len(span.context) - 1
    ends = [*range(kept + PIECE, last, PIECE), *range(last, len(fed), PIECE), len(fed)]
    found: list[float] = []
    begin = kept
    for end in (end for end in ends if end > kept):
        wanted = end - begin if begin >= last else 1  # of a model's passes, logits are what takes memory
        logits = model(
            input_ids=torch.tensor([fed[begin:end]]),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=wanted,
        ).logits[0]
        if begin >= last:
            targets = torch.tensor(span.token_ids[begin - last : end - last])
            scores = torch.log_softmax(logits.float() / temperature, dim=-1)
            found += scores[torch.arange(len(targets)), targets].tolist()
        begin = end
    return found
