"""What a program asks, on its own event loop: recorded calls are answered there, the others by its run."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cairn.config.environment import checked_stop
from cairn.orchestrator.completion.program_run import ProgramRun
from cairn.orchestrator.environments import Reply, Snapshot
from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.program import LARGEST_SNAPSHOT, on_loop
from cairn.orchestrator.rollouts import Call
from cairn.run.output import writable


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
        self._loop.call_soon_threadsafe(self._run.go_on)
        return found

    async def skip_to(self, name: str) -> Any:
        found = await on_loop(self._loop, self._run.skip_to(writable(name)))
        return found and json.loads(found.result)

    def pause(self) -> Callable[[], None]:
        self._loop.call_soon_threadsafe(self._run.stand_still)

        def go_on() -> None:
            self._loop.call_soon_threadsafe(self._run.move_on)

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
