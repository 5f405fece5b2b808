"""Rewarded answers and their advantages as samples to train on."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cairn.orchestrator.advantages.advantage import Advantage, AdvantageFailed, column_of
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.policy.generation import RoutedExperts
from cairn.run.batches import COLUMNS, EXPERTS, UNKNOWN_EXPERT, Piece, Sample

LARGEST = 1e37
"""Largest absolute advantage: batches store float32, whose maximum is 3.4e38."""

Checked = list[float | list[float]]
"""The advantages of a group's answers: a number, or one for each token."""


def batch_samples(
    groups: Sequence[AnswerGroup], advantage: Advantage, masks: Callable[[Rollout], bool] = lambda _: False
) -> list[list[Sample]]:
    """The training samples of each group of one environment in a batch; see `to_samples`.

    Raises:
        AdvantageFailed: the advantage raises, or gives no finite number for an answer or a token.
    """
    values: list[Checked] = [_values(group, advantage) for group in groups]
    if callable(over_batch := getattr(advantage, "over_batch", None)):
        values = _over_batch(over_batch, type(advantage).__name__, groups, values)
    column = column_of(advantage)
    return [_samples(group, column, of, masks) for group, of in zip(groups, values, strict=True)]


def to_samples(
    group: AnswerGroup, advantage: Advantage, masks: Callable[[Rollout], bool] = lambda _: False
) -> list[Sample]:
    """Training samples of one group: each answer's tokens and logprobs as sampled, with its prompt and its
    advantage, or what the trainer computes that from (`Advantage.column`).

    An answer that is a program has one sample for each branch of its conversation in which a token was
    sampled, with the turns of that branch one after the other.

    Args:
        masks: whether nothing is learned from an answer; its samples then have no token to learn.

    Raises:
        AdvantageFailed: the advantage raises, or gives no finite number for an answer or a token.
    """
    return batch_samples([group], advantage, masks)[0]


def _samples(
    group: AnswerGroup, column: str, values: Checked, masks: Callable[[Rollout], bool]
) -> list[Sample]:
    samples: list[Sample] = []
    for rollout, value in zip(group.rollouts, values, strict=True):
        if rollout.turns:
            made = _of_branches(rollout, column, value)
        else:
            answer = {"logprobs": rollout.logprobs, column: value}
            made = [Sample.of_answer(group.prompt_ids, rollout.token_ids, **answer)]
            add_experts(made[0], rollout.experts)
        samples += [one.unlearned() for one in made] if masks(rollout) else made
    return samples


def _of_branches(rollout: Rollout, column: str, value: float | list[float]) -> list[Sample]:
    """The samples of a program, one for each branch in the order in which these began."""
    pieces: dict[int, list[Piece]] = {}
    experts: dict[int, list[RoutedExperts]] = {}
    before = 0
    for turn in rollout.turns:
        end = before + len(turn.token_ids)
        values = value[before:end] if isinstance(value, list) else value
        branch = pieces.setdefault(turn.branch, [])
        branch.append(Piece(turn.prompt_ids))
        branch.append(Piece(turn.token_ids, {"logprobs": turn.logprobs, column: values}))
        experts.setdefault(turn.branch, []).extend(turn.experts)
        before = end
    samples = [Sample.of_pieces(branch) for branch in pieces.values()]
    for sample, of_branch in zip(samples, experts.values(), strict=True):
        add_experts(sample, of_branch)
    # Behind the last sampled token is at most a question for which the context had no room.
    ends = [int(np.max(np.flatnonzero(sample.loss_mask), initial=-1)) + 1 for sample in samples]
    return [sample.cut(end) for sample, end in zip(samples, ends, strict=True) if end]


def add_experts(sample: Sample, found: Sequence[RoutedExperts]) -> None:
    """Add what servers have told of the experts of a sample's tokens as a column, if they have.

    Unknown are those of its last token, and of tokens that went through a server that does not tell.
    """
    if not found:
        return
    length = len(sample.token_ids)
    column = np.full((length, *found[0].rows.shape[1:]), UNKNOWN_EXPERT, COLUMNS[EXPERTS].dtype)
    for one in found:
        count = max(min(len(one.rows), length - one.start), 0)
        column[one.start : one.start + count] = one.rows[:count]
    sample.columns[EXPERTS] = column


def complete_experts(samples: Sequence[Sample]) -> float:
    """Give all samples of a batch the column with experts, if one has it: unknown in the others.

    Returns:
        The share of the batch's tokens whose experts are known.
    """
    known = total = 0
    shape = next((one.columns[EXPERTS].shape[1:] for one in samples if EXPERTS in one.columns), None)
    for sample in samples:
        total += len(sample.token_ids)
        if shape is not None:
            nothing = np.full((len(sample.token_ids), *shape), UNKNOWN_EXPERT, COLUMNS[EXPERTS].dtype)
            column = sample.columns.setdefault(EXPERTS, nothing)
            known += int((column[:, 0, 0] != UNKNOWN_EXPERT).sum())
    return known / max(total, 1)


def _values(group: AnswerGroup, advantage: Advantage) -> Checked:
    """The advantage of each answer, checked."""
    about = f"the advantage {type(advantage).__name__}, for problem {group.problem},"
    try:
        found = list(advantage(group))
    except Exception as error:  # the user's own code
        raise AdvantageFailed(f"{about} raised {type(error).__name__}: {error}") from error
    return _checked(found, group, about)


def _over_batch(
    over_batch: Callable[..., Any],
    name: str,
    groups: Sequence[AnswerGroup],
    values: Sequence[Checked],
) -> list[Checked]:
    """The advantages of all groups after the call for the whole batch, checked."""
    try:
        found = list(over_batch(groups, values))
    except Exception as error:  # the user's own code
        raise AdvantageFailed(
            f"over_batch of the advantage {name} raised {type(error).__name__}: {error}"
        ) from error
    if len(found) != len(groups):
        raise AdvantageFailed(
            f"over_batch of the advantage {name} returned values of {len(found)} groups, and was called with "
            f"{len(groups)}"
        )
    return [
        _checked(list(of_group), group, f"over_batch of the advantage {name}, for problem {group.problem},")
        for group, of_group in zip(groups, found, strict=True)
    ]


def _checked(found: list[Any], group: AnswerGroup, about: str) -> Checked:
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
