"""A multi-turn task with tools for tests, and servers that are played; both are deterministic."""

import asyncio
import functools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.policy.generation import Generation, SamplingParams, VersionSpan
from cairn.run.messages import Probe


class Errands:
    """Asks the model where to go, `turns` times, and goes there. The reward is how often it said so early.

    Args:
        log: a file to which each visit appends a line: it must not be made twice.
        forgets_at: the turn at which the conversation begins anew, as with a summary of what was.

    Rollouts go one by one: who is killed while it records one's visit does not kill another's on its way.
    """

    identity = "errands-1"

    def __init__(self, turns: int = 20, problems: int = 3, log: str | None = None, forgets_at: int = -1):
        self.turns, self.problems, self.log, self.forgets_at = turns, problems, log, forgets_at
        self.alone = asyncio.Lock()
        self.power: Callable[[], bool] = lambda: True

    def __len__(self) -> int:
        return self.problems

    def visit(self, seed: int, turn: int, place: str) -> dict[str, Any]:
        """The tool."""
        if not self.power():
            raise EOFError("a process that is dead calls no tools")
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{seed} {turn} {os.getpid()}\n")
        return {"seen": f"{place[::-1]}{turn % 10}", "letters": (1, len(place))}

    async def rollout(self, problem: int, model: Any) -> dict[str, float]:
        """Ask, visit, tell."""
        if self.log is None:
            return await self.run(problem, model)
        async with self.alone:
            return await self.run(problem, model)

    async def run(self, problem: int, model: Any) -> dict[str, float]:
        """A rollout."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{problem}"}]
        early = 0
        for turn in range(self.turns):
            if turn == self.forgets_at:
                messages = [{"role": "user", "content": f"{problem} again"}]
            reply = await model.generate(messages)
            place = reply.text
            visit = functools.partial(self.visit, model.seed, turn, place)
            found = await model.once("visit", visit)
            assert found["letters"] == [1, len(place)]  # JSON, also where it was not read from the ledger
            early += place < "m"
            messages += [reply.message, {"role": "user", "content": found["seen"]}]
        return {"early": early / self.turns, "letters": 0.001 * len(reply.text)}


class Trip:
    """The same way as a world, of which the log tells what was done in it, in whichever process.

    A world that was started twice is not the same: only its snapshot is.
    """

    identity = "trip-1"

    def __init__(self, log: str, turns: int = 20, problems: int = 3):
        self.log, self.max_turns, self.problems = log, turns, problems

    def __len__(self) -> int:
        return self.problems

    def note(self, seed: int, what: str | int) -> None:
        """Append a line to the log."""
        with open(self.log, "a") as file:
            file.write(f"{seed} {what} {os.getpid()}\n")

    def start(self, problem: int, seed: int) -> tuple[dict[str, Any], str]:
        """A world that knows who has started it."""
        self.note(seed, "start")
        return {"seed": seed, "owner": os.getpid(), "places": []}, f"{problem}"

    def step(self, world: dict[str, Any], answer: str) -> tuple[str, dict[str, float], bool]:
        """Go there."""
        world["places"].append(answer)
        self.note(world["seed"], len(world["places"]))
        seen = "".join(place[:1] for place in world["places"])[-3:]
        return f"{seen}{len(world['places']) % 10}", {"early": 0.125 * (answer < "m")}, False

    def snapshot(self, world: dict[str, Any]) -> dict[str, Any]:
        """All of it."""
        return world

    def restore(self, problem: int, seed: int, snapshot: dict[str, Any]) -> dict[str, Any]:
        """As another process has left it."""
        assert (snapshot["seed"], snapshot["owner"] == os.getpid()) == (seed, False)
        self.note(seed, "restore")
        return snapshot


def judged(problem: dict[str, Any], messages: list[dict[str, Any]]) -> float:
    """The reward of an agent's rollout, which must not be asked for twice; a log tells of it."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    with Path(problem["log"]).with_name("rewards").open("a") as file:
        file.write(f"{''.join(said)}\n")
    return sum(text < "m" for text in said) / 8


@dataclass
class Servers:
    """Tokens depend on the request's seed and the context alone, as with vLLM."""

    version: str = ""
    max_model_len: int | None = None
    longest: int = 5
    pause: Callable[[], float] = lambda: 0.0
    log: Path | None = None
    """Where each request's seed is written, from whichever process."""
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    """Seed and context of each request that was answered; a process that ends cuts off those in flight."""
    began: list[str | None] = field(default_factory=list)
    """The policy that each of these is said to go on from."""
    keep: bool = True

    async def serve(self, folder: str, version: str, **_: object) -> None:
        self.version = version

    async def prove(self, probe: Probe) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Collection[str],
        began: str | None = None,
        sessions: Sequence[int] = (),
    ) -> list[Generation]:
        assert params.n == 1
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{params.seed}\n")
        await asyncio.sleep(self.pause())
        if self.keep:
            self.asked.append((params.seed or 0, list(prompt_ids)))
            self.began.append(began)
        # Whether an answer goes on depends on all of it, so that pieces add up to what one request had given.
        draw = (params.seed or 0) + sum(prompt_ids)
        length = 1 + draw % self.longest
        count = min(length, params.max_tokens)
        tokens = [6 + (draw + 7 * i) % 26 for i in range(count)]
        end = "length"
        if count == length:
            tokens[-1], end = params.stop_token_ids[0], "stop"
        logprobs = [-(1 + token) / 64 for token in tokens]  # exact in float32
        return [Generation(tokens, logprobs, [VersionSpan(self.version, 0, count)], end)]

    def take_metrics(self) -> dict[str, float]:
        return {}
