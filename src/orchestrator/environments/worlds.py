"""Environments that are worlds: a world is started, and each answer of the model is a step in it.

What a step led to is in the ledger before the model is asked again. After a crash the recorded steps are
answered from there. Only when a step is to be taken that is not recorded is there a world again: a fresh one,
started from the same seed, in which the recorded answers are given again and must lead to what is recorded,
or the environment's own, restored from the snapshot that was recorded with the newest step.
"""

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments.calls import (
    MAX_TURNS,
    Calls,
    Raised,
    failed,
    shortened,
    wrong_with_methods,
    wrong_with_turns,
)
from cairn.orchestrator.environments.program import Model, Programs
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Reward, Rewards, to_json
from cairn.orchestrator.environments.single_turn import wrong_with_conversation
from cairn.orchestrator.environments.times import CallTimes
from cairn.run.output import writable

logger = logging.getLogger(__name__)

Observation = str | Sequence[Mapping[str, Any]]
"""What the model reads: text, which becomes a user's message, or messages."""


class WorldEnvironment(Protocol):
    """A set of problems, each solved step by step in a world.

    Problem i must be the same in every process and every run. All methods may be coroutines. Those of one
    world are called one after the other; with several `orchestrator.reward_threads`, from changing threads.

    Optional: `max_turns`, the maximum number of steps of a rollout. `messages(problem)`, the conversation
    that the first observation is appended to, such as a system prompt. `close(world)`. `identity`, text that
    must change whenever the problems, the worlds or the rewards do.

    Optional too, and for worlds that do not do the same again when they are given the same answers:
    `snapshot(world)`, called after `start` and each step, which returns JSON or bytes, at most
    `LARGEST_SNAPSHOT` bytes, and `restore(problem, seed, snapshot)`, which returns the world.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def start(self, problem: int, seed: int) -> tuple[Any, Observation] | Awaitable[tuple[Any, Observation]]:
        """A fresh world of a problem, and its first observation.

        Args:
            seed: of the rollout, below 2**48; the same whenever the rollout is started again.
        """
        ...

    def step(
        self, world: Any, answer: str
    ) -> tuple[Observation | None, Reward, bool] | Awaitable[tuple[Observation | None, Reward, bool]]:
        """Act in the world.

        Args:
            answer: text of the model's answer, without its reasoning if a `reasoning_parser` is set.

        Returns:
            The next observation (anything if the rollout is done), the reward of this step, and whether the
            rollout is done. The rewards of all steps are added up, part by part.
        """
        ...


class WorldPrograms(Programs):
    """Runs the loop of answers and steps for an environment with `start` and `step`."""

    def __init__(self, environment: Any, config: OrchestratorConfig):
        super().__init__(environment, config)
        self.max_turns: int = getattr(environment, "max_turns", MAX_TURNS)

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        methods = {"start": ("problem", "seed"), "step": ("world", "answer")}
        optional = {
            "messages": ("problem",),
            "close": ("world",),
            "snapshot": ("world",),
            "restore": ("problem", "seed", "snapshot"),
        }
        methods |= {name: arguments for name, arguments in optional.items() if _method(environment, name)}
        if ("snapshot" in methods) != ("restore" in methods):
            return "it has one of snapshot(world) and restore(problem, seed, snapshot) without the other"
        return wrong_with_methods(environment, methods) or wrong_with_turns(environment)

    async def shown(self, problem: int) -> Any:
        """The conversation that the first observation is appended to, if there is one."""
        if (asks := _method(self.environment, "messages")) is None:
            return None
        found = await self.calls.call(asks, f"messages({problem})", problem)
        if found and (wrong := wrong_with_conversation(found)):
            raise EnvironmentFailed(
                f"environment {self.name!r}: messages({problem}) must return a list of messages, and {wrong}"
            )
        return found

    def start(self, problem: int, model: Model) -> Awaitable[Any]:
        return self.calls.on_own_loop(functools.partial(self.rollout, problem, model))

    async def rollout(self, problem: int, model: Model) -> Rewards:
        """Let the model answer, and take a step for each answer, until it is done or at `max_turns`."""
        world = _World(self.environment, self.calls, self.times, problem, model)
        try:
            return await self._steps(world, problem, model)
        finally:
            await world.end()

    async def _steps(self, world: "_World", problem: int, model: Model) -> Rewards:
        messages: list[Any] = []
        if asks := _method(self.environment, "messages"):
            messages = await model.once("messages", functools.partial(asks, problem))
            if messages and (wrong := wrong_with_conversation(messages)):
                raise EnvironmentFailed(f"messages({problem}) must return a list of messages, and {wrong}")
        messages += await world.start()
        parts: dict[str, float] = {}
        weights: dict[str, float] = {}
        for _ in range(self.max_turns):
            reply = await model.generate(messages)
            if not reply.token_ids:  # there was no room for an answer
                break
            found = await world.step(reply.message["content"] or "")
            for name, part in found["reward"]["parts"].items():
                weight = found["reward"]["weights"].get(name, 1.0)
                if weights.setdefault(name, weight) != weight:
                    raise EnvironmentFailed(
                        f"step must give part {name!r} of the reward the same weight each time, and has "
                        f"given it {weights[name]} and {weight}"
                    )
                parts[name] = parts.get(name, 0.0) + part
            if found["done"]:
                break
            messages += [reply.message, *found["observation"]]
        return Rewards(parts, weights)


class _World:
    """The world of one rollout; there is none before the first step that is not recorded."""

    def __init__(self, environment: Any, calls: Calls, times: CallTimes, problem: int, model: Model):
        self._environment = environment
        self._calls = calls
        self._times = times
        self._problem = problem
        self._model = model
        self._past: list[tuple[str, str, Any]] = []
        """Name, answer and outcome of the start and the steps so far, while there is no world."""
        self._steps = 0
        self._made = False
        self._world: Any = None
        self._job: Future[Any] | None = None
        """The last call that a thread was given."""

    async def start(self) -> list[Any]:
        """The first observation, as messages."""
        return (await self._next("start", ""))["observation"]

    async def step(self, answer: str) -> dict[str, Any]:
        """What an answer leads to: `done`, `reward` as parts and weights, and `observation` as messages."""
        self._steps += 1
        return await self._next(f"step {self._steps}", answer)

    async def end(self) -> None:
        """Close the world, if there is one, once nothing runs in it any more."""
        if self._job is None or self._job.done():
            await self._close()
            return
        self._calls.afterwards(self._close_after(self._job))

    async def _close_after(self, job: Future[Any]) -> None:
        ended = asyncio.wrap_future(job)
        await asyncio.wait({ended})
        _ = ended.cancelled() or ended.exception()  # else asyncio would log that nobody has asked for it
        await self._close()

    async def _close(self) -> None:
        close = _method(self._environment, "close")
        if close and self._made:
            self._made = False
            try:
                await self._call("close", close, _unchanged, self._world)
            except EnvironmentFailed as error:
                logger.warning("%s: a world of problem %d: %s", self._calls.whose, self._problem, error)

    async def _next(self, name: str, answer: str) -> Any:
        """The outcome of a step, from the ledger or the world."""
        save = self._save if _method(self._environment, "snapshot") else None
        found = await self._model.once(name, functools.partial(self._act, name, answer), snapshot=save)
        if not self._made:
            self._past.append((name, answer, found))
        return found

    async def _act(self, name: str, answer: str) -> Any:
        """Take a step that is not recorded."""
        if self._past and not self._made:
            await self._bring_back()
            self._past.clear()
        return await self._take(name, answer)

    async def _bring_back(self) -> None:
        """Make the world as it was after the last recorded step.

        Raises:
            EnvironmentFailed: a step leads to something else than what is recorded of it.
        """
        restore, done = _method(self._environment, "restore"), 0
        if restore and (kept := await self._model.snapshot()):
            done = 1 + [name for name, _, _ in self._past].index(kept.after)
            again = functools.partial(
                self._call, "restore", restore, self._restored, self._problem, self._model.seed, kept.value
            )
            await self._model.each_time(again)
        for name, answer, recorded in self._past[done:]:
            found = await self._model.each_time(functools.partial(self._take, name, answer))
            found = json.loads(json.dumps(found))
            for part, before in recorded.items():
                if found[part] != before:
                    raise EnvironmentFailed(
                        f"{name}, taken again after a restart, leads to something else than before: "
                        f"{part} was {shortened(before)}, and is {shortened(found[part])}. A world must do "
                        "the same if it is started from the same seed and given the same answers; if it "
                        "can't, give the environment snapshot(world) and restore(problem, seed, snapshot)"
                    )

    async def _take(self, name: str, answer: str) -> Any:
        """Start the world, or act in it."""
        if name == "start":
            return await self._call(
                name, self._environment.start, self._started, self._problem, self._model.seed
            )
        return await self._call(name, self._environment.step, _stepped, self._world, answer)

    async def _save(self) -> Any:
        return await self._call("snapshot", self._environment.snapshot, _unchanged, self._world)

    def _started(self, found: Any) -> dict[str, Any]:
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise EnvironmentFailed(
                f"it must return a pair (world, observation), and has returned {shortened(found)}"
            )
        self._restored(found[0])
        return {"observation": _observed(found[1])}

    def _restored(self, world: Any) -> None:
        self._world, self._made = world, True

    async def _call(
        self, name: str, method: Callable[..., Any], read: Callable[[Any], Any], *arguments: object
    ) -> Any:
        """What `read` makes of a method's result; both are called on a thread if the method is a function.

        Raises:
            EnvironmentFailed: the method raised, or returned something else than it should.
        """

        def call() -> Any:
            begins()
            go_on()
            found = method(*arguments)
            return found if inspect.isawaitable(found) else read(found)

        try:
            with self._times.call() as begins:
                if inspect.iscoroutinefunction(method):
                    begins()
                    return read(await method(*arguments))
                go_on = self._model.pause()
                self._job = self._calls.submit(call)
                found = await asyncio.wrap_future(self._job)
                return read(await found) if inspect.isawaitable(found) else found
        except Exception as caught:
            error = caught.error if isinstance(caught, Raised) else caught
            if isinstance(error, EnvironmentFailed):
                raise error.of(name) from error
            raise failed(name, error) from error


def _method(environment: Any, name: str) -> Callable[..., Any] | None:
    """An optional method."""
    return getattr(environment, name, None)


def _unchanged(found: Any) -> Any:
    return found


def _stepped(found: Any) -> dict[str, Any]:
    """What a step returned, as JSON."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise EnvironmentFailed(
            f"it must return (observation, reward, done), and has returned {shortened(found)}"
        )
    observation, reward, done = found
    if callable(item := getattr(done, "item", None)):  # numpy, torch
        done = item()
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"done must be True or False, and is {shortened(done)}")
    parts = to_json(reward, "step")
    if isinstance(parts, str):
        raise EnvironmentFailed(f"it must return a finite reward, but {parts}: {shortened(reward)}")
    return {"done": done, "reward": parts, "observation": [] if done else _observed(observation)}


def _observed(observation: Any) -> list[Any]:
    """An observation, as messages."""
    if isinstance(observation, str):
        return [{"role": "user", "content": writable(observation)}]
    if wrong := wrong_with_conversation(observation):
        raise EnvironmentFailed(f"an observation must be text or a list of messages, and it {wrong}")
    return [dict(message) for message in observation]
