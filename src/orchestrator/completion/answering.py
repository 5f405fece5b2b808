"""How the answers to a prompt come about: what completes a group, by the kind of its environment."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.answers import AnswerParser, PlainText, VllmParser
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completion import Completer, Retrying
from cairn.orchestrator.completion.program_model import ProgramModel
from cairn.orchestrator.completion.program_run import ProgramRun
from cairn.orchestrator.completion.sampling import GroupSampler, Sampler
from cairn.orchestrator.environments import (
    AskedElsewhere,
    AskedEnvironment,
    GroupRewarded,
    Programs,
    SingleTurn,
)
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.orchestrator.servers import GeneratingServers
from cairn.run.faults import fault_point
from cairn.run.noted_calls import UserCall
from cairn.run.seeds import derive

# Rollouts that are programs: runs them, records what they are answered, and replays it after a restart.


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


class Answering(Protocol):
    """Completes the answers to prompts."""

    retrying: Retrying
    """What tries an environment's calls again."""

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        """Have the answers of the group that are missing or partial generated and rewarded.

        All that is generated or rewarded is in the ledger before anything is built on it, so that a group
        that was interrupted is completed without doing any of it again.
        """
        ...


class ByEnvironment:
    """Completes each group by what its environment needs. `answering` is in the order of the environments."""

    def __init__(self, answering: Sequence[Answering]):
        self._answering = answering
        self.retrying = [one.retrying for one in answering]
        """Of each environment."""

    async def complete(self, group: AnswerGroup) -> AnswerGroup:
        return await self._answering[group.environment].complete(group)


ANSWERING: dict[type[AskedEnvironment], Callable[..., Answering]] = {
    SingleTurn: Sampler,
    AskedElsewhere: Sampler,
    GroupRewarded: GroupSampler,
    Programs: ProgramRunner,
}
"""What completes the groups of an environment, by how it is asked; a kind without a row is as its base is."""


def make_answering(
    config: OrchestratorConfig,
    environment: AskedEnvironment,
    chat: ChatFormat,
    servers: GeneratingServers,
    ledger: Ledger,
    versions: Collection[str],
) -> Answering:
    """What completes the groups of this environment.

    Args:
        versions: the policy versions that tokens may come from; the caller may change the set at any time.
    """
    kind = next(base for base in type(environment).__mro__ if base in ANSWERING)
    return ANSWERING[kind](config, environment, chat, servers, ledger, versions)
