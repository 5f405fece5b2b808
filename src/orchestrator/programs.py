"""Rollouts that are programs: runs them, records what they are answered, and replays it after a restart.

A program that was interrupted is started from the top. Its calls are numbered in the order in which they
begin; a call whose number is in the ledger is answered from there, at once. If it asks something else than
is recorded, the rest of the record is deleted, and the program goes on live: the rollout has diverged.
"""

import asyncio
import time

from cairn.orchestrator.answers import AnswerParser, PlainText, VllmParser
from cairn.orchestrator.completing import Completer
from cairn.orchestrator.environments import Programs
from cairn.orchestrator.program_model import ProgramModel
from cairn.orchestrator.program_run import ProgramRun
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.faults import fault_point
from cairn.run.noted_calls import UserCall
from cairn.run.seeds import derive


class ProgramRunner(Completer[Programs]):
    """Completes groups whose rollouts are programs."""

    parser: AnswerParser
    """Reads the model's answers; there once `complete` was called."""
    _made_parser: asyncio.Task[AnswerParser] | None = None

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """Run the group's programs to their ends.

        Raises:
            UsageError: vLLM has no such parser, or a program has tools and there is no parser of calls.
            Exception: the servers' client gives up.
        """
        if self._made_parser is None:
            self._made_parser = asyncio.create_task(self._make_parser())
        self.parser = await asyncio.shield(self._made_parser)
        if not group.rollouts:
            purpose = "rollout", group.place, group.policy_step
            seeds = [derive(self.config.seed, *purpose, i) for i in range(self.config.samples_per_prompt)]
            group.rollouts = [Rollout(seed, begun=time.monotonic()) for seed in seeds]
            self.ledger.record(group.place, dict(enumerate(group.rollouts)))
        await asyncio.gather(*(self._finish(group, i) for i in range(len(group.rollouts))))
        fault_point("orchestrator.finished_group")
        return group

    async def _make_parser(self) -> AnswerParser:
        """What reads the answers; vLLM is imported in a thread, which takes several seconds."""
        tool_calls, reasoning = self.config.tool_parser, self.config.reasoning_parser
        if tool_calls is None and reasoning is None:
            return PlainText(self.chat)
        return await asyncio.to_thread(VllmParser, self.chat, tool_calls, reasoning)

    async def _finish(self, group: AnswerGroup, sample: int) -> None:
        """Run a program until it is rewarded, or has failed too often."""
        rollout = group.rollouts[sample]
        if rollout.reward is not None:
            return

        async def attempt() -> None:
            await self.pacing.turn()  # as it reads what is recorded
            run = ProgramRun(self, self.parser, group, sample)
            await run.to_its_end(ProgramModel(run))

        try:
            about = f"environment {self.environment.name!r}: a rollout of problem {group.problem}"
            call = UserCall(f"{about}, {rollout.seed}", about, about)
            rollout.failed = await self.retrying.failure(attempt, call)
        finally:
            await self.environment.over(group.problem, rollout.seed)
        if rollout.failed is not None:
            rollout.turns = self.ledger.turns(group.place, sample)  # kept rollouts show them
            self.ledger.finish(group.place, sample, rollout, None)
