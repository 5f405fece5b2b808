"""What is computed of a chunk of logits in one pass, forward and backward: logprobs, or entropies as well.

The passes are plain PyTorch code that torch.compile fuses, so that no package of kernels has to keep up with
PyTorch's and vLLM's versions. Where it can't compile, each operation runs on its own.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

TRIAL_ROWS = 64
"""Rows of logits on which compiled passes are tried."""


@dataclass(frozen=True)
class Passes:
    """What is computed from a chunk of logits [L, V], of any data type.

    score: from logits, wanted tokens (int64 [L]) and temperature, the logarithms of the normalisers, the
    logprobs of the wanted tokens and, if there are any, further values of each row; float32 [L] each.
    differentiate: from logits, log normalisers, wanted tokens, the further values, the gradients of logprobs
    and further values, temperature and a data type, the gradient of the logits in that type.
    Either may change the logits in place, unless they are kept.
    keeps_logits: whether the logits of a single chunk are kept for the backward pass, as on a GPU, where the
    product costs more than memory.
    """

    score: Callable[..., tuple[torch.Tensor, ...]]
    differentiate: Callable[..., torch.Tensor]
    keeps_logits: bool = True


def _score(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    logits = logits.float().div_(temperature)
    normalisers = logits.logsumexp(-1)
    return normalisers, logits.gather(-1, wanted[:, None])[:, 0] - normalisers


def _differentiate(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    wanted: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    of_logits = logits.float().div_(temperature)
    of_logits.sub_(normalisers[:, None]).exp_().neg_()
    of_logits[torch.arange(len(wanted), device=wanted.device), wanted] += 1
    return of_logits.mul_((scale / temperature)[:, None]).to(dtype)


IN_PLACE = Passes(_score, _differentiate, keeps_logits=False)
"""Operation by operation, without a second chunk in memory."""


def _score_purely(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    logits = logits.float() / temperature
    normalisers = logits.logsumexp(-1)
    return normalisers, logits.gather(-1, wanted[:, None])[:, 0] - normalisers


def _differentiate_purely(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    wanted: torch.Tensor,
    scale: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    probabilities = (logits.float() / temperature - normalisers[:, None]).exp()
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted[:, None]
    return ((is_wanted.float() - probabilities) * (scale / temperature)[:, None]).to(dtype)


PURE = Passes(_score_purely, _differentiate_purely)
"""What is compiled: no operation changes its arguments, so that all can be fused."""


# With entropies. For logits z / T, log normaliser n and probabilities p, the entropy is H = n - sum(p z / T),
# and its gradient with regard to z is -p (log p + H) / T.


LEAST_LOGIT = -1e30
"""What a logit of minus infinity counts as: 0 times infinity is no number."""


def _score_with_entropies(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    logits = (logits.float() / temperature).clamp(min=LEAST_LOGIT)
    normalisers = logits.logsumexp(-1)
    logprobs = logits.gather(-1, wanted[:, None])[:, 0] - normalisers
    mean = ((logits - normalisers[:, None]).exp() * logits).sum(-1)
    return normalisers, logprobs, normalisers - mean


def _differentiate_with_entropies(
    logits: torch.Tensor,
    normalisers: torch.Tensor,
    wanted: torch.Tensor,
    entropies: torch.Tensor,
    of_logprobs: torch.Tensor,
    of_entropies: torch.Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    logprobs = (logits.float() / temperature).clamp(min=LEAST_LOGIT) - normalisers[:, None]
    is_wanted = torch.arange(logits.shape[-1], device=logits.device) == wanted[:, None]
    of_all = of_logprobs[:, None] + of_entropies[:, None] * (logprobs + entropies[:, None])
    gradient = is_wanted.float() * of_logprobs[:, None] - logprobs.exp() * of_all
    return (gradient / temperature).to(dtype)


WITH_ENTROPIES = Passes(_score_with_entropies, _differentiate_with_entropies, keeps_logits=False)
"""Also the entropies (nats) of the distributions; no operation changes its arguments."""


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors with equally many rows, compiled once for any number of them.

    Inductor measures no kernels, since the choice among them could differ from one process to the next and
    with it the bits of a resumed run.
    """
    fused = torch.compile(function, options={"deterministic": True})

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)  # pyright: ignore[reportPrivateUsage] (documented)
        return fused(*arguments)

    return call


def compiled(pure: Passes = PURE) -> Passes:
    """Passes that change no argument, each compiled to as few kernels as torch.compile makes of it."""
    return Passes(_compiled(pure.score), _compiled(pure.differentiate))


def tried(
    passes: Passes,
    device: torch.device,
    vocabulary: int,
    plain: Passes = IN_PLACE,
    what: str = "the head's passes",
) -> Passes:
    """`passes` if they can be compiled and compute what `plain` does, else `plain`, with a warning.

    Args:
        what: they are, for the warning.
    """
    draw = torch.Generator(device).manual_seed(0)
    logits = torch.randn(TRIAL_ROWS, vocabulary, device=device, generator=draw)
    wanted = torch.arange(TRIAL_ROWS, device=device) % vocabulary

    def compute(one: Passes) -> list[torch.Tensor]:
        normalisers, *values = one.score(logits.clone(), wanted, 0.7)
        columns = (normalisers, wanted, *values[1:], *values)  # the values as their own gradients
        return [normalisers, *values, one.differentiate(logits.clone(), *columns, 0.7, torch.float32)]

    try:
        for found, expected in zip(compute(passes), compute(plain), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    except Exception as error:  # a compiler may fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("%s are not fused, which is slower: %s", what, reason[:300])
        return plain
    return passes
