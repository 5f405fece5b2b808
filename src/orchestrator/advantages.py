"""Advantages: how much better each answer is than the other answers to its prompt.

The policy loss weights every token with its advantage. An advantage is a class; its objects are called with
an `AnswerGroup` (all answers to one prompt, rewarded) and return one number for each answer, or one for each
token of each answer. `advantage.type` is a key of `BUILT_IN` or `module:Class`; `advantage.args` go to its
constructor.

A class may say two things in attributes, for which `Advantage` has the defaults: `column`, what its numbers
are in a batch, and `compares`, whether answers with equal rewards teach nothing.
"""

import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from cairn.config.orchestrator import AdvantageConfig
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.batches import Piece, Sample
from cairn.run.errors import CairnError
from cairn.run.extensions import BadExtension, load, make

SPREAD = 1e-6
"""Rewards that differ by at most this fraction of the largest one count as equal (float32 rounding)."""
LARGEST = 1e37
"""Largest absolute advantage: batches store float32, whose maximum is 3.4e38."""

Values = Sequence[float] | Sequence[Sequence[float]]
"""One number for each answer, or for each answer a list with one number for each of its tokens."""


class AdvantageFailed(CairnError):
    """An advantage raised an error or returned unusable values; the message names the problem and values."""


class Advantage(Protocol):
    """Compares the answers to one prompt. It is called on the event loop, so it may compute but must not
    block.

    It must be deterministic: a batch that is rebuilt after a crash must equal the first one.
    """

    column: str = "advantages"
    """The column of batches (`cairn.run.batches.COLUMNS`) that holds its numbers; with `rewards`, the trainer
    computes advantages from them, and needs a critic."""
    compares: bool = True
    """Whether it compares the answers to a prompt, so that nothing is learned where all rewards are equal."""

    def __call__(self, group: AnswerGroup, /) -> Values:
        """The advantage of each answer, or of each token of each answer, in the order of `group.rollouts`."""
        ...


class Grpo:
    """GRPO (arXiv:2402.03300, section 4.1.2): rewards relative to their group's mean.

    `normalize` divides the centred rewards by the group's standard deviation; without it, this is Dr. GRPO
    (arXiv:2503.20783). If the rewards of a group are equal up to rounding, its advantages are exactly 0.
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


class Gae:
    """Rewards as they are: the trainer computes advantages from them and from its critic's values.

    The last token that was sampled gets the answer's reward; in a program, that of each branch, as each is a
    sequence of its own.
    """

    column = "rewards"
    compares = False

    def __call__(self, group: AnswerGroup) -> list[list[float]]:
        return [
            self._at_ends(rollout, reward)
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ]

    @staticmethod
    def _at_ends(rollout: Rollout, reward: float) -> list[float]:
        """The reward at the last token of each branch, and 0 at the others."""
        values = [0.0] * len(rollout.token_ids)
        lengths = [len(turn.token_ids) for turn in rollout.turns]
        turns = zip(rollout.turns, lengths, itertools.accumulate(lengths), strict=True)
        ends = {turn.branch: end for turn, length, end in turns if length}
        for end in ends.values() if rollout.turns else [len(values)]:
            if end:
                values[end - 1] = reward
        return values


BUILT_IN: dict[str, Callable[..., Any]] = {"grpo": Grpo, "gae": Gae}


def column_of(advantage: Advantage) -> str:
    """`Advantage.column`, which a class need not say."""
    return getattr(advantage, "column", Advantage.column)


def compares(advantage: Advantage) -> bool:
    """`Advantage.compares`, which a class need not say."""
    return getattr(advantage, "compares", Advantage.compares)


def have_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ by more than rounding."""
    return max(rewards) - min(rewards) > SPREAD * max(map(abs, rewards))


def make_advantage(config: AdvantageConfig) -> Advantage:
    """The built-in advantage of that name, or `module:Class`, made with the configured arguments.

    Raises:
        BadExtension: it does not exist, its constructor fails, or it can't be called with a group.
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
        pass  # inspect knows no signature of it
    return advantage


def to_samples(
    group: AnswerGroup, advantage: Advantage, masks: Callable[[Rollout], bool] = lambda _: False
) -> list[Sample]:
    """Training samples: each answer's tokens and logprobs as sampled, with its prompt and its advantage, or
    what the trainer computes that from (`Advantage.column`).

    An answer that is a program has one sample for each branch of its conversation in which a token was
    sampled, with the turns of that branch one after the other.

    Args:
        masks: whether nothing is learned from an answer; its samples then have no token to learn.

    Raises:
        AdvantageFailed: the advantage raises, or gives no finite number for an answer or a token.
    """
    samples: list[Sample] = []
    column = column_of(advantage)
    for rollout, value in zip(group.rollouts, _values(group, advantage), strict=True):
        if rollout.turns:
            made = _of_branches(rollout, column, value)
        else:
            answer = {"logprobs": rollout.logprobs, column: value}
            made = [Sample.of_answer(group.prompt_ids, rollout.token_ids, **answer)]
        samples += [one.unlearned() for one in made] if masks(rollout) else made
    return samples


def _of_branches(rollout: Rollout, column: str, value: float | list[float]) -> list[Sample]:
    """The samples of a program, one for each branch in the order in which these began."""
    pieces: dict[int, list[Piece]] = {}
    before = 0
    for turn in rollout.turns:
        end = before + len(turn.token_ids)
        values = value[before:end] if isinstance(value, list) else value
        branch = pieces.setdefault(turn.branch, [])
        branch.append(Piece(turn.prompt_ids))
        branch.append(Piece(turn.token_ids, {"logprobs": turn.logprobs, column: values}))
        before = end
    samples = [Sample.of_pieces(branch) for branch in pieces.values()]
    # Behind the last sampled token is at most a question for which the context had no room.
    ends = [int(np.max(np.flatnonzero(sample.loss_mask), initial=-1)) + 1 for sample in samples]
    return [sample.cut(end) for sample, end in zip(samples, ends, strict=True) if end]


def _values(group: AnswerGroup, advantage: Advantage) -> list[float | list[float]]:
    """The advantage of each answer, checked."""
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
            wrong = f"{about} returned {value!r} for answer {i}: expected a number or a list of numbers"
            raise AdvantageFailed(wrong) from None
        if array.shape not in ((), (len(rollout.token_ids),)):
            raise AdvantageFailed(
                f"{about} returned values of shape {array.shape} for answer {i}, which has "
                f"{len(rollout.token_ids)} tokens; return one number, or one for each token"
            )
        if not all(math.isfinite(one) and abs(one) <= LARGEST for one in array.flat):
            raise AdvantageFailed(f"{about} returned {value!r} for answer {i}, which is not finite")
        values.append(array.tolist())
    return values
