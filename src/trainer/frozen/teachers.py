"""What other models say of a batch's tokens: logprobs under a reference and a teacher, and rewards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cairn.config.teachers import (
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    WithTeachers,
    is_served,
)
from cairn.config.trainer import TrainerConfig
from cairn.run.errors import UsageError
from cairn.trainer.frozen.model import Frozen
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import OLD_LOGPROBS
from cairn.trainer.losses.loss import ESTIMATORS
from cairn.trainer.packing import MicroBatch, RankBatch
from cairn.trainer.scoring.tokens import Scorer, add_logprobs
from cairn.trainer.step.critic import TOKEN_REWARDS


class TeacherModels:
    """The models that score each batch before its first update.

    Rewards of tokens are computed from the policy's logprobs at the begin of the step, without gradient:
    -kl.coef * (the estimate of its divergence from the reference), and distill.coef * log(teacher / policy).
    """

    def __init__(
        self,
        config: TrainerConfig,
        group: RankGroup,
        policy: Scorer,
        sums: Mapping[str, Mapping[str, str]],
    ):
        """Load the models that are no servers; all ranks call it, once the policy's weights are loaded.

        Args:
            sums: of the weights in folders, by folder; see `cairn.model.described`.
        """
        self._group = group
        self._policy = policy
        self._kl = config.kl if config.kl and config.kl.place == "reward" else None
        self._distill = config.distill
        self._sources = config.teachers
        copies: dict[str, Frozen] = {}
        for column, source in self._sources.items():
            if not is_served(source) and source not in copies:
                whose = WithTeachers.sources_of[column]
                copies[source] = Frozen(
                    Path(source), config, group, whose=whose, policy=policy, sums=sums.get(source)
                )
        self._copies = copies

    @property
    def gives_rewards(self) -> bool:
        """Whether it changes what tokens are rewarded with."""
        return self._kl is not None or self._distill is not None

    def score(self, batch: RankBatch) -> Mapping[str, float]:
        """Add the columns of all models, and the rewards of tokens to the advantages; all ranks call it.

        The rewards are also a column, `token_rewards`, for whoever computes advantages from rewards.

        Returns:
            Metrics of the step.

        Raises:
            UsageError: the orchestrator has not asked a served model.
        """
        scored: dict[str, str] = {}
        for column, source in self._sources.items():
            if is_served(source):
                self._must_have(batch, column, source)
            elif source in scored:
                for micro in batch.micros:
                    micro.columns[column] = micro.columns[scored[source]]
            else:
                self._copies[source].add_logprobs(batch, column)
                scored[source] = column
        if not self.gives_rewards:
            return {}
        if not all(OLD_LOGPROBS in micro.columns for micro in batch.micros):
            add_logprobs(batch, OLD_LOGPROBS, self._policy, self._group.device)
        metrics = [self._reward(micro) for micro in batch.micros]
        return self._means(metrics, max(batch.counts.learned, 1))

    def _must_have(self, batch: RankBatch, column: str, source: str) -> None:
        if not all(column in micro.columns for micro in batch.micros):
            raise UsageError(
                f"{WithTeachers.sources_of[column]} = {source}: the orchestrator's batches lack its logprobs "
                f"(column {column!r}); start the orchestrator after the trainer, in the same --output-dir"
            )

    def _reward(self, micro: MicroBatch) -> dict[str, torch.Tensor]:
        """Reward the tokens of a micro-batch; returns the sums of its metrics, float64 scalars."""
        columns = micro.columns
        old = columns[OLD_LOGPROBS]
        mask = micro.loss_mask.to(old.device)
        rewards = torch.zeros_like(old)
        sums: dict[str, torch.Tensor] = {}
        if self._kl:
            assert self._kl.coef is not None, "the configuration has checked it"
            apart = torch.where(mask, old - columns[REFERENCE_LOGPROBS].to(old.device), 0.0)
            estimate = ESTIMATORS[self._kl.estimator](apart)
            rewards -= self._kl.coef * estimate
            sums["kl/reference"] = estimate.double().sum()
        if self._distill:
            gap = torch.where(mask, columns[TEACHER_LOGPROBS].to(old.device) - old, 0.0)
            rewards += self._distill.coef * gap
            sums["kl/teacher"] = -gap.double().sum()
            sums["teacher/logprob_gap"] = gap.abs().double().sum()
        columns[TOKEN_REWARDS] = rewards
        if "advantages" in columns:
            columns["advantages"] = columns["advantages"].to(old.device) + rewards
        return sums

    def _means(self, sums: list[dict[str, torch.Tensor]], tokens: int) -> dict[str, float]:
        """Over all learned tokens, summed in the order of micro-batches whatever rank they are on."""
        rows = torch.stack([torch.stack(list(row.values())) for row in sums])
        table = self._group.gather_rows(rows).transpose(0, 1).flatten(0, 1)  # [micro-batch, metric]
        totals = table.cumsum(0)[-1] / tokens
        return dict(zip(sums[0], totals.tolist(), strict=True))


def sums_in(recipe: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    """What the trainer's recipe says of the weights in folders: sums of their files, by folder."""
    models: Mapping[str, Any] = recipe.get("models", {})
    return {model["folder"]: model["files"] for model in models.values()}
