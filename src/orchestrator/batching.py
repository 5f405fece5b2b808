"""Making batches: issues prompts to the servers and ships complete groups of answers to the trainer."""

import asyncio
import logging

from cairn.orchestrator.advantages import Advantage, to_samples
from cairn.orchestrator.ledger import to_ranges
from cairn.orchestrator.metrics import batch_metrics
from cairn.orchestrator.prompts import Prompts
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.sampling import Sampler
from cairn.orchestrator.sharing import Sharing
from cairn.orchestrator.state import OrchestratorState
from cairn.run.batches import Batch, RLBatch, Sampling, batch_path, write_batch
from cairn.run.faults import fault_point
from cairn.run.messages import BatchHeader, PolicyName, ShippedBatch

logger = logging.getLogger(__name__)


class BatchMaker:
    """Keeps the servers busy, and ships a batch as soon as enough groups are complete."""

    def __init__(self, state: OrchestratorState, sampler: Sampler, advantage: Advantage, sharing: Sharing):
        """Take over the ledger's waiting prompts; answers sampled at another temperature are dropped."""
        self.state = state
        self.sampler = sampler
        self.advantage = advantage
        self.sharing = sharing
        temperature = state.config.sampling.temperature
        self._dropped = state.ledger.sample_at(temperature, state.shipped.newest.step + 1)
        if self._dropped:
            logger.warning(
                "%d prompts are sampled again: their answers come from another temperature", self._dropped
            )
        self.prompts = Prompts(state.ledger)

    async def run(self) -> None:
        """Make batches until cancelled.

        Raises:
            EnvironmentFailed, PromptRefused: a problem has no usable prompt, or an answer gets no reward.
            AdvantageFailed: the advantage fails on a group.
            Exception: the servers' client gives up.
        """
        while True:
            self.state.policy.changed.clear()
            self.prompts.collect()
            while (groups := self._next_batch()) is not None:
                await self._ship(self.state.shipped.newest.step + 1, groups)
            await self.sharing.hand_over()
            self._issue()
            await self.state.policy.changed.wait()

    def _issue(self) -> None:
        """Issue as many prompts as can still be used before their answers become too old."""
        config, policy, prompts = self.state.config, self.state.policy, self.prompts
        served = policy.step
        if served is None:
            return
        horizon = min(served + 1 + config.max_off_policy_steps, config.max_steps)
        wanted = (horizon - self.state.shipped.newest.step) * config.prompts_per_step
        assert config.max_in_flight is not None, "the configuration is settled"
        at_once = max(1, config.max_in_flight // config.samples_per_prompt)
        while len(prompts.answering) < at_once:
            # After a restart the trainer has yet to recompute the newest policies that partial groups come
            # from.
            group = next((group for group in prompts.partial if group.policy_step <= served), None)
            if group is not None:
                prompts.partial.remove(group)
            elif len(prompts) < wanted:
                group = self.sampler.begin(prompts.next_place(), served)
            else:
                return
            task = asyncio.create_task(self.sampler.complete(group))
            task.add_done_callback(lambda _: policy.changed.set())
            prompts.answering[group.place] = task, group

    def _next_batch(self) -> list[AnswerGroup] | None:
        """The oldest ready groups, if there are enough for a batch; drops groups that are too old."""
        config = self.state.config
        step, size = self.state.shipped.newest.step + 1, config.prompts_per_step
        for group in self.prompts.older_than(step - 1 - config.max_off_policy_steps):
            self.state.ledger.drop(group.place, "stale", step)
            self.prompts.drop(group.place)
            self._dropped += 1
        if len(self.prompts.ready) < size:
            return None
        by_age = sorted(self.prompts.ready.values(), key=lambda group: (group.oldest_step, group.place))
        chosen = by_age[:size]
        for group in chosen:
            del self.prompts.ready[group.place]
        return sorted(chosen, key=lambda group: group.place)

    async def _ship(self, step: int, groups: list[AnswerGroup]) -> None:
        """Write the batch file of `step`, then record the batch in the ledger."""
        state = self.state
        batch = self._batch(step, groups)
        fault_point("orchestrator.before_ship")
        await state.disk.do(write_batch, batch_path(state.run.batches, step), batch)
        fault_point("orchestrator.shipped")
        state.ledger.ship(batch.header.ledger, {group.place: group.problem for group in groups})
        state.shipped.add(batch.header.ledger)
        self._dropped = 0
        logger.info("batch %d: reward %.3f", step, batch.metrics["reward/mean"])

    def _batch(self, step: int, groups: list[AnswerGroup]) -> RLBatch:
        """The batch of `step`: samples, header and metrics."""
        attempt = self.state.attempt
        samples = [sample for group in groups for sample in to_samples(group, self.advantage)]
        sampling = Sampling(self.state.config.sampling.temperature)
        row = ShippedBatch(
            step=step,
            places=to_ranges(group.place for group in groups),
            samples=len(samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            digest=Batch(samples, sampling=sampling).digest(),
            oldest_step=min(group.oldest_step for group in groups),
        )
        progress = self.state.shipped.newest.after(row)
        versions = {version for group in groups for version in group.versions}
        return RLBatch(
            samples,
            {
                **batch_metrics(groups, step),
                "groups/dropped": self._dropped,
                "epoch": progress.total_problems / self.state.environment.problems,
                "total_problems": progress.total_problems,
                **self.state.servers.take_metrics(),
            },
            sampling=sampling,
            header=BatchHeader(
                run_id=attempt.run_id,
                branch=attempt.branch,
                attempt=attempt.id,
                step=step,
                version=max(versions, key=lambda version: PolicyName.parse(version).step),
                problems=[group.problem for group in groups],
                ledger=row,
            ),
        )
