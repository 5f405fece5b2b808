"""Reinforcement learning: batches come from the orchestrator, and each step's policy goes to the servers."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Batch
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.trained_tokens import Array, TrainedTokens, digest_of
from cairn.trainer.frozen.model import TeacherModels, sums_in
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import OLD_LOGPROBS, LossInputs, make_loss
from cairn.trainer.models.trained import Trained
from cairn.trainer.models.value_model import make_critic
from cairn.trainer.packing import MicroBatch, RankBatch
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.tokens import add_logprobs
from cairn.trainer.state import Context
from cairn.trainer.step.critic import NAME as CRITIC
from cairn.trainer.step.critic import REWARDS, CriticLearner
from cairn.trainer.tasks.orchestrator_link import make_link
from cairn.trainer.tasks.task import Decision, Earlier, Task

logger = logging.getLogger(__name__)


class RL(Task):
    """No batch is asked for ahead: answers to a policy can't be there before the policy is published."""

    def __init__(self, config: TrainerConfig, context: Context):
        """Publish the policy that training starts from; all ranks call it."""
        run, state = context.run, context.state
        self.loss = make_loss(config.loss, config.kl_in_loss)
        self.updates = config.updates_per_batch
        self.mini_batches = config.mini_batches or self.updates
        self._critic = CriticLearner(config, state) if config.critic else None
        self.learners = [self._critic] if self._critic else []
        self._warmup_steps = config.critic.warmup_steps if config.critic else 0
        self._scorer = state.scorer
        self._group = state.group
        if config.router_replay:
            self._scorer.replay = RouterReplay(state.policy.module)
        self._teachers = TeacherModels(config, state.group, state.scorer, sums_in(context.recipe))
        self._tokens = TokenRecorder(config, run, state.group, state.progress.step)
        self._link = make_link(config, context)
        self.parts = self._link.parts

    @classmethod
    def models(
        cls, config: TrainerConfig, folder: Path, group: RankGroup, resume_from: Path | None
    ) -> dict[str, Trained]:
        return {CRITIC: make_critic(folder, config, group, resume_from)} if config.critic else {}

    def next_batch(self, step: int) -> Batch | None:
        """Wait for the orchestrator; None, on all ranks, if one of them is asked to stop meanwhile.

        Raises:
            DeadlinePassed: it did not ship the batch in time.
        """
        batch = self._link.next_batch(step)
        return None if self._group.any_of(batch is None)[0] else batch

    def prepare(self, batch: RankBatch) -> Mapping[str, float]:
        """Add the policy's own logprobs, if the loss asks for them and an update will change them, then what
        other models say of the tokens, and then advantages, if they come from a critic."""
        self._tokens.begin(batch)
        if self._scorer.replay:
            self._scorer.replay.check(batch.micros)
        if self.loss.needs_old and self.updates > 1:
            add_logprobs(batch, OLD_LOGPROBS, self._scorer, self._group.device)
        found = dict(self._teachers.score(batch))
        if self._critic:
            return found | dict(self._critic.prepare(batch))
        if any(REWARDS in micro.columns for micro in batch.micros):
            raise UsageError(
                "the orchestrator ships rewards (advantage.type = 'gae'), and this trainer has no critic to "
                "make advantages of them: give it one (--critic), or the orchestrator another advantage.type"
            )
        return found

    def seen(self, inputs: LossInputs) -> None:
        self._tokens.see(inputs)

    def trains_policy(self, step: int) -> bool:
        """After the critic's warm-up."""
        return step > self._warmup_steps

    def earlier(self, step: int) -> Earlier:
        """What a process that this one replaces has announced of `step`."""
        return self._link.earlier(step)

    def before_update(self) -> None:
        self._link.before_update()

    def after_step(self, step: int, decision: Decision) -> None:
        self._tokens.write(step)
        self._link.after_step(step, decision)

    def committed(self, step: int) -> None:
        self._link.committed(step)

    def end(self, step: int, *, save: bool) -> None:
        self._link.end(step, save=save)

    def close(self) -> None:
        self._link.close()


class TokenRecorder:
    """Keeps what this rank's loss was given of each learned token, under `trainer.keep_tokens_gb`."""

    def __init__(self, config: TrainerConfig, run: RunDirectory, group: RankGroup, step: int):
        """Nothing is kept of steps after `step`: they are taken again."""
        self._kept = TrainedTokens(run.tokens)
        self._gigabytes = config.keep_tokens_gb
        self._group = group
        self._micros: list[MicroBatch] = []
        self._found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._warned = False
        if group.rank == 0:
            self._kept.forget_after(step)

    def begin(self, batch: RankBatch) -> None:
        """The next step trains on this batch."""
        keeps = self._gigabytes and self._group.layout.reports
        self._micros, self._found = batch.micros if keeps else [], []

    def see(self, inputs: LossInputs) -> None:
        """Note a micro-batch when it is trained on first: updates go through them all before any again."""
        if len(self._found) < len(self._micros):
            entropies = inputs.all_entropies
            self._found.append((inputs.logprobs.detach(), None if entropies is None else entropies.detach()))

    def write(self, step: int) -> None:
        """Write what was noted of `step`; training goes on if the disk does not take it."""
        found, self._found = self._found, []
        if not found:
            return
        parts = [trained_tokens(micro, *values) for micro, values in zip(self._micros, found, strict=False)]
        try:
            data = self._group.layout.data
            self._kept.write(step, data.rank, data.size, parts, self._gigabytes)
        except OSError as error:
            if not self._warned:
                logger.warning("what was computed of tokens is not kept in %s: %s", self._kept.folder, error)
            self._warned = True


def trained_tokens(
    micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor | None
) -> dict[str, Array]:
    """What is kept of a micro-batch on the CPU, as a part of a file of `run/trained_tokens.py`.

    Args:
        logprobs: of its tokens 1 to T - 1, float32 [R, T - 1], on any device; `entropies` likewise.
    """
    learned, bounds = micro.learned.numpy(), micro.bounds.numpy()
    ids, sampled = micro.input_ids.numpy().ravel(), micro.columns["logprobs"].numpy().ravel()
    shifted = learned - learned // micro.input_ids.shape[1] - 1  # without the first token of each row
    starts = bounds[np.searchsorted(bounds, learned, "right") - 1]
    firsts = np.flatnonzero(np.diff(starts, prepend=-1))
    prompts = [digest_of(ids[starts[first] : learned[first]]) for first in firsts]
    values = {"logprobs": logprobs} | ({} if entropies is None else {"entropies": entropies})
    return {
        "lengths": np.diff(firsts, append=len(learned)).astype(np.int32),
        "prompts": np.array(prompts, np.uint64),
        "token_ids": ids[learned].astype(np.int32),
        "sampler_logprobs": sampled[learned],
        **{name: one.float().cpu().numpy().ravel()[shifted] for name, one in values.items()},
    }
