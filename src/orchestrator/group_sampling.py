"""Sampling for environments that compare the answers to a problem: one call rewards a whole group."""

from cairn.orchestrator.environments.group_rewards import GroupRewarded
from cairn.orchestrator.failures import UNSCORED
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.orchestrator.sampling import Sampler


class GroupSampler(Sampler[GroupRewarded]):
    """Has the servers answer the run's prompts, and the environment reward all answers to a prompt at once.

    The rewards of a group are in the ledger all together or not at all: after a crash in between, the one
    call is made again, with the same answers in the same order.
    """

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """As in `Sampler`; the answers that could be sampled are compared with each other."""
        group = await super().complete(group)
        await self._reward_group(group)
        return group

    async def _reward(self, group: AnswerGroup, numbers: list[int]) -> None:
        """Nothing: an answer alone has no reward."""

    async def _reward_group(self, group: AnswerGroup) -> None:
        """Reward all whole answers of the group, unless all of them are; record that."""
        whole = {i: one for i, one in enumerate(group.rollouts) if one.finish_reason is not None}
        if not whole or all(one.reward is not None for one in whole.values()):
            return
        for rollout in whole.values():
            rollout.text = self._shown(rollout)

        async def attempt() -> None:
            texts = [rollout.text for rollout in whole.values()]
            found = await self.environment.rewards(group.problem, texts)
            for rollout, reward in zip(whole.values(), found, strict=True):
                rollout.reward, rollout.parts = reward or (None, {})

        call = self._call("rewards", group, group.rollouts[0].seed)
        failed = await self.retrying.failure(attempt, call)
        for i, rollout in whole.items():
            if failed is not None:
                rollout.reward, rollout.parts, rollout.failed = None, {}, failed
            elif rollout.reward is None:
                about = f"environment {self.environment.name!r}: rewards of problem {group.problem}"
                rollout.failed = f"{UNSCORED}{about} has None for answer {i}, and so nothing to say of it"
            else:
                rollout.failed = None
            rollout.note_seconds()
        self.ledger.record(group.place, whole)
