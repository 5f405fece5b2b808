"""Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equations 11 and 16).

The tokens that are learned are the steps of an episode, which ends with the last of them. What stands between
them, such as a tool's answer, is part of the state that the next token is sampled in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cairn.trainer.group import RankGroup


def estimate(
    rewards: np.ndarray, values: np.ndarray, starts: np.ndarray, *, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Advantages of tokens, float64 [L]; with `values` added, they are the returns.

    Args:
        rewards: float64 [L], for each token of several episodes, one after the other.
        values: float64 [L], of the state that each token was sampled in. That of an episode's end is 0.
        starts: bool [L], which tokens begin an episode.
    """
    if not len(rewards):
        return np.zeros(0)
    first = np.flatnonzero(starts)
    lengths = np.diff(first, append=len(rewards))
    episode = np.repeat(np.arange(len(first)), lengths)
    within = np.arange(len(rewards)) - first[episode]
    shape = len(first), int(lengths.max()) + 1  # the last column stays 0: behind the end nothing comes
    of_rewards, of_values = np.zeros(shape), np.zeros(shape)
    of_rewards[episode, within] = rewards
    of_values[episode, within] = values
    surprises = of_rewards[:, :-1] + gamma * of_values[:, 1:] - of_values[:, :-1]
    advantages = np.zeros(shape)
    for token in reversed(range(shape[1] - 1)):
        advantages[:, token] = surprises[:, token] + gamma * gae_lambda * advantages[:, token + 1]
    return advantages[episode, within]


@dataclass(frozen=True)
class Moments:
    """Mean and variance (divided by n - 1) over the learned tokens of a step's batch, on all ranks."""

    mean: float
    variance: float

    @property
    def deviation(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.variance)


def moments(quantities: Mapping[str, Sequence[np.ndarray]], group: RankGroup) -> dict[str, Moments]:
    """The moments of several quantities; all ranks call it, and get the same bits.

    The sums of micro-batches are added in their order, whatever ranks they ran on.

    Args:
        quantities: by name, float64 [L] for each of this rank's micro-batches.
    """
    counts = [[float(len(one)) for one in micros] for micros in quantities.values()]
    sums = [[math.fsum(one) for one in micros] for micros in quantities.values()]
    *totals, count = _totals([*sums, counts[0]], group)
    means = [total / max(count, 1.0) for total in totals]
    squares = [
        [math.fsum((one - mean) ** 2) for one in micros]
        for micros, mean in zip(quantities.values(), means, strict=True)
    ]
    found = zip(quantities, means, _totals(squares, group), strict=True)
    return {name: Moments(mean, square / max(count - 1, 1.0)) for name, mean, square in found}


def _totals(sums: Sequence[Sequence[float]], group: RankGroup) -> list[float]:
    """Of each quantity, the sum over the micro-batches of all ranks, whose sums are given."""
    rows = torch.tensor(sums, dtype=torch.float64).T.contiguous()  # [micro-batch, quantity]
    table = group.gather_rows(rows).transpose(0, 1).flatten(0, 1)
    return [math.fsum(column) for column in table.T.tolist()]
