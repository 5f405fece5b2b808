"""PPO's critic (Schulman et al. 2017, arXiv:1707.06347): what it predicts, and what it learns.

Advantages are estimated by generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438,
equations 11 and 16). The tokens that are learned are the steps of an episode, which ends with the last of
them. What stands between them, such as a tool's answer, is part of the state that the next token is sampled
in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cairn.config.rl_trainer import TrainerConfig
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import ALONE
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import LossSums
from cairn.trainer.models.value_model import Critic, Valuer
from cairn.trainer.packing import BatchCounts, MicroBatch, RankBatch
from cairn.trainer.scoring.self_check import VocabularyRows
from cairn.trainer.state import TrainerState
from cairn.trainer.step.train_step import Learner

NAME = "critic"
"""Names the model among a run's models, and its metrics."""
REWARDS = "rewards"
"""The column of rewards that the orchestrator ships."""
TOKEN_REWARDS = "token_rewards"
"""A column of rewards that the trainer has found itself, such as a penalty on KL; they are added."""
VALUES, RETURNS = "values", "returns"
"""The columns of what the critic predicted at the begin of the step, and of what it learns to predict."""
EPSILON = 1e-8
"""Added to the variance by which advantages are scaled."""


class CriticLearner(Learner):
    """Learns returns: the sum of advantages and values, both as they were at the begin of the step.

    With `clip`, a token's loss is the larger one of two: of its value, and of its value if that had changed
    by no more than `clip` since the begin of the step.
    """

    name, loss_name = NAME, "the critic's loss"

    def __init__(self, config: TrainerConfig, state: TrainerState):
        """Check the model; all ranks call it.

        Raises:
            UsageError: it can't be trained rightly.
        """
        assert config.critic is not None
        model = state.models[NAME]
        assert isinstance(model, Critic)
        self.model = model
        self.optimizer, self.scheduler = config.critic.optimizer, config.critic.scheduler
        self._config, self._group = config.critic, state.group
        about = f"critic.model = {config.critic.model}"
        self._vocabulary = VocabularyRows(
            model.values.config, state.scorer.model.config, state.group, about=about
        )
        self._valuer = Valuer(model.values)
        self._valuer.prove(config, state.group, state.scorer.rows)
        if self._valuer.rows is ALONE:
            state.scorer.rows = ALONE  # both are trained on the same rows, and these suit every model

    def normaliser(self, counts: BatchCounts) -> float:
        return max(counts.learned, 1)

    def outputs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Values of the learned tokens, [L]."""
        return self._valuer.values(micro)

    def sums(self, micro: MicroBatch, outputs: torch.Tensor) -> LossSums:
        """Half the squared error of each learned token's value, clipped."""
        values = outputs
        before, returns = (micro.columns[name].flatten()[micro.learned] for name in (VALUES, RETURNS))
        losses = (values - returns).square()
        if self._config.clip:
            clipped = before + (values - before).clamp(-self._config.clip, self._config.clip)
            of_clipped = (clipped - returns).square()
            is_clipped = of_clipped > losses
            losses = torch.maximum(losses, of_clipped)
        else:
            is_clipped = torch.zeros_like(losses, dtype=torch.bool)
        return LossSums(0.5 * losses.sum(), {"clipped": is_clipped.detach().sum().float()})

    def prepare(self, batch: RankBatch) -> Mapping[str, float]:
        """Add the columns of values, returns and advantages; all ranks call it. Returns metrics.

        Raises:
            UsageError: the batch has no rewards, or a token that the critic has no row for.
        """
        self._vocabulary.check(batch)
        micros = batch.micros
        values = self._values(micros)
        rewards = [self._rewards(micro) for micro in micros]
        how = {"gamma": self._config.gamma, "gae_lambda": self._config.gae_lambda}
        advantages = [
            estimate(reward, value, _starts(micro), **how)
            for reward, value, micro in zip(rewards, values, micros, strict=True)
        ]
        returns = [value + advantage for value, advantage in zip(values, advantages, strict=True)]
        of = moments({VALUES: values, RETURNS: returns, "advantages": advantages}, self._group)
        for micro, value, target, advantage in zip(micros, values, returns, advantages, strict=True):
            if self._config.whiten:
                advantage = (advantage - of["advantages"].mean) / (of["advantages"].variance + EPSILON) ** 0.5
            _set(micro, VALUES, value)
            _set(micro, RETURNS, target)
            _set(micro, "advantages", advantage)
        # An advantage is what is left of a return once its value is taken off.
        unexplained = of["advantages"].variance / of[RETURNS].variance if of[RETURNS].variance else 1.0
        return {
            "values/mean": of[VALUES].mean,
            "returns/mean": of[RETURNS].mean,
            "advantage/mean": of["advantages"].mean,
            "advantage/std": of["advantages"].deviation,
            f"{NAME}/explained_variance": 1.0 - unexplained,
        }

    @torch.no_grad()
    def _values(self, micros: list[MicroBatch]) -> list[np.ndarray]:
        """Values of the learned tokens under the present weights, float64 [L] for each micro-batch.

        The model computes without dropout, and changes no random state.
        """
        model = self.model.module
        was_training = model.training
        try:
            model.eval()
            found = [self._valuer.values(micro.to(self._group.device)) for micro in micros]
        finally:
            model.train(was_training)
            reshard(model)
        together = torch.cat(found).double().cpu().numpy()
        return np.split(together, np.cumsum([len(one) for one in found])[:-1])

    def _rewards(self, micro: MicroBatch) -> np.ndarray:
        """Of the learned tokens, float64 [L]."""
        if REWARDS not in micro.columns:
            raise UsageError(
                "trainer.critic needs batches with rewards, and the orchestrator ships advantages: give it "
                "advantage.type = 'gae', or leave out the trainer's critic"
            )
        total = micro.columns[REWARDS].double()
        if TOKEN_REWARDS in micro.columns:
            total = total + micro.columns[TOKEN_REWARDS].cpu().double()
        return total.flatten()[micro.learned].numpy()


def _starts(micro: MicroBatch) -> np.ndarray:
    """Which learned tokens are the first ones of their samples: bool [L]."""
    sample = np.searchsorted(micro.bounds.numpy(), micro.learned.numpy(), side="right")
    return np.diff(sample, prepend=-1) > 0


def _set(micro: MicroBatch, name: str, values: np.ndarray) -> None:
    """Add a column of the learned tokens' values, [L]; it is 0 elsewhere."""
    column = torch.zeros(micro.input_ids.numel(), dtype=torch.float32)
    column[micro.learned] = torch.from_numpy(values).float()
    micro.columns[name] = column.view_as(micro.input_ids)


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
    table = group.gather_micros(rows)
    return [math.fsum(column) for column in table.T.tolist()]
