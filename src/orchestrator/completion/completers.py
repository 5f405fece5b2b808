"""What completes the answers to a prompt, by the kind of its environment; and rollouts that are programs."""

import asyncio
import inspect
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cairn.config.environment import checked_stop
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.completion.answers import AnswerParser, PlainText, VllmParser
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completion import Completer
from cairn.orchestrator.completion.program_run import ProgramRun
from cairn.orchestrator.completion.sampling import GroupSampler, Sampler
from cairn.orchestrator.environments import (
    AskedEnvironment,
    GroupRewarded,
    Programs,
    Reply,
    SingleTurn,
    Snapshot,
)
from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.program import LARGEST_SNAPSHOT, on_loop
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.rollouts import AnswerGroup, Call, Rollout
from cairn.orchestrator.servers import GeneratingServers
from cairn.run.faults import fault_point
from cairn.run.noted_calls import UserCall
from cairn.run.output import writable
from cairn.run.seeds import derive


class ProgramModel:
    """The `Model` of a run, for the program, which is on another event loop."""

    def __init__(self, run: ProgramRun):
        self.seed = run.rollout.seed
        self._run = run
        self._loop = asyncio.get_running_loop()

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        if isinstance(messages, str | Mapping):
            raise TypeError(
                'messages must be a list of messages such as [{"role": "user", "content": "..."}], and is '
                f"{shortened(messages)}"
            )
        strings = checked_stop(stop)
        number = self._run.begin()
        work = self._run.generate(number, list(messages), tools, max_tokens, tuple(stop_token_ids), strings)
        return await on_loop(self._loop, work)

    async def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        return await on_loop(self._loop, self._run.count_tokens(list(messages), tools))

    async def once(
        self, name: str, call: Callable[[], Any], *, snapshot: Callable[[], Any] | None = None
    ) -> Any:
        name = writable(name)
        number = self._run.begin()
        if known := self._run.known_call(number, name):
            return json.loads(known.result)
        result = _json(await self._result(call, number), f"the result of {name!r}")
        state = None if snapshot is None else _snapshot(await self._result(snapshot), name)
        await on_loop(self._loop, self._run.record(Call(number, name, result), state))
        return json.loads(result)

    async def each_time(self, call: Callable[[], Any]) -> Any:
        found = await self._result(call)
        self._loop.call_soon_threadsafe(self._run.deadline.restart)
        return found

    async def skip_to(self, name: str) -> Any:
        found = await on_loop(self._loop, self._run.skip_to(writable(name)))
        return found and json.loads(found.result)

    def pause(self) -> Callable[[], None]:
        self._loop.call_soon_threadsafe(self._run.deadline.pause)

        def go_on() -> None:
            self._loop.call_soon_threadsafe(self._run.deadline.unpause)

        return go_on

    async def snapshot(self) -> Snapshot | None:
        return await on_loop(self._loop, self._run.newest_snapshot())

    async def _result(self, call: Callable[[], Any], number: int | None = None) -> Any:
        if inspect.iscoroutinefunction(call):
            return await call()
        return await on_loop(self._loop, self._run.in_thread(call, number))


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be JSON: {error}") from error


def _snapshot(value: Any, name: str) -> str | bytes:
    """A snapshot, as the ledger keeps it."""
    what = f"the snapshot after {name!r}"
    content = bytes(value) if isinstance(value, bytes | bytearray) else _json(value, what)
    if len(content) > LARGEST_SNAPSHOT:
        raise ValueError(f"{what} has {len(content)} bytes, and may have {LARGEST_SNAPSHOT}")
    return content


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


COMPLETERS: dict[type[AskedEnvironment], type[Completer[Any]]] = {
    SingleTurn: Sampler,
    GroupRewarded: GroupSampler,
    Programs: ProgramRunner,
}
"""What completes the groups of an environment, by how it is asked; a kind without a row is as its base is."""


def make_completer(
    config: OrchestratorConfig,
    environment: AskedEnvironment,
    chat: ChatFormat,
    servers: GeneratingServers,
    ledger: Ledger,
    versions: Collection[str],
) -> Completer[Any]:
    """What completes the groups of this environment.

    Args:
        versions: the policy versions that tokens may come from; the caller may change the set at any time.
    """
    kind = next(base for base in type(environment).__mro__ if base in COMPLETERS)
    return COMPLETERS[kind](config, environment, chat, servers, ledger, versions)
