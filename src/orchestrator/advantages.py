"""How much better an answer is than the other answers to its prompt: what the trainer learns by.

An advantage is a class whose objects take the `AnswerGroup` of a prompt, all of its answers rewarded, and
return for each answer one number, or one for each of its tokens. `advantage.type` is a key of `BUILT_IN`, or
`module:Class`; `advantage.args` are the arguments of its constructor.
"""

import inspect
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cairn.config.orchestrator import AdvantageConfig
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.run.batches import Sample
from cairn.run.errors import CairnError
from cairn.run.extensions import BadExtension, load, make

SPREAD = 1e-6
"""Rewards that differ by no more than this share of the largest one are equal: float32 is no more exact."""
LARGEST = 1e37
"""Advantages are float32, which ends soon after."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""One number for each answer; or for each answer one for each of its tokens."""


class AdvantageFailed(CairnError):
    """An advantage raised, or returned what is none; the message says for which problem, and what."""


class Advantage(Protocol):
    """Compares the answers to one prompt. It is called on the event loop, so it may compute, but not wait.

    The same group must always get the same values: a batch that is made again has to be what it was.
    """

    def __call__(self, group: AnswerGroup, /) -> Values:
        """The advantage of each answer, or of each token of each answer, in the order of `group.rollouts`."""
        ...


class Grpo:
    """GRPO (arXiv:2402.03300, section 4.1.2): rewards relative to their group's mean.

    With `normalize` they are divided by the group's standard deviation; without, they are those of Dr. GRPO
    (arXiv:2503.20783). A group whose rewards are all the same, but for rounding, teaches nothing: its
    advantages are exactly 0.
    """

    def __init__(self, normalize: bool = True):
        if not isinstance(normalize, bool):
            raise ValueError(f"normalize is true or false, not {normalize!r}")
        self.normalize = normalize

    def __call__(self, group: AnswerGroup) -> list[float]:
        rewards = group.rewards
        if not have_spread(rewards):
            return [0.0] * len(rewards)
        mean = statistics.fmean(rewards)
        scale = statistics.stdev(rewards) if self.normalize else 1.0
        return [(reward - mean) / scale for reward in rewards]


BUILT_IN: dict[str, Callable[..., Advantage]] = {"grpo": Grpo}


def have_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return max(rewards) - min(rewards) > SPREAD * max(map(abs, rewards))


def make_advantage(config: AdvantageConfig) -> Advantage:
    """The built-in advantage of that name, or `module:Class`, with the configured arguments.

    Raises:
        BadExtension: there is none, it refuses its arguments, or it can't be called with a group.
    """
    setting = "orchestrator.advantage.type"
    advantage = make(load(config.type, BUILT_IN, setting), config.args, "orchestrator.advantage.args")
    try:
        inspect.signature(advantage).bind("group")
    except TypeError as error:
        raise BadExtension(
            f"{setting} = {config.type!r}: its objects can't be called with a group of answers, as "
            f"__call__(group): {error}"
        ) from None
    except ValueError:
        pass  # it has no signature to look at
    return advantage


def to_samples(group: AnswerGroup, advantage: Advantage) -> list[Sample]:
    """What the trainer learns from: prompt and answer tokens as the server saw and sampled them.

    Raises:
        AdvantageFailed: the advantage gives no finite number for an answer, or for a token.
    """
    return [
        Sample.of_answer(group.prompt_ids, rollout.token_ids, logprobs=rollout.logprobs, advantages=value)
        for rollout, value in zip(group.rollouts, _values(group, advantage), strict=True)
    ]


def _values(group: AnswerGroup, advantage: Advantage) -> list[float | list[float]]:
    """What the advantage says of each answer, checked."""
    about = f"the advantage {type(advantage).__name__}, for problem {group.problem},"
    try:
        found = list(advantage(group))
    except Exception as error:  # the user's own code
        raise AdvantageFailed(f"{about} raised {type(error).__name__}: {error}") from error
    if len(found) != len(group.rollouts):
        raise AdvantageFailed(f"{about} returned {len(found)} values for {len(group.rollouts)} answers")
    values: list[float | list[float]] = []
    for i, (value, rollout) in enumerate(zip(found, group.rollouts, strict=True)):
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            wrong = f"{about} returned {value!r} for answer {i}: no number, nor a list"
            raise AdvantageFailed(wrong) from None
        if array.shape not in ((), (len(rollout.token_ids),)):
            raise AdvantageFailed(
                f"{about} returned values of shape {array.shape} for answer {i}, which has "
                f"{len(rollout.token_ids)} tokens: one number is wanted, or one for each token"
            )
        if not all(math.isfinite(one) and abs(one) <= LARGEST for one in array.flat):
            raise AdvantageFailed(f"{about} returned {value!r} for answer {i}: not finite")
        values.append(array.tolist())
    return values
