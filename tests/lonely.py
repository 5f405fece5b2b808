"""Environments for processes of their own: they import the standard library only."""

import ast
import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal


class Words:
    """One question, one answer; what it does with an answer is the answer.

    Args:
        log: a file to which each call appends how many calls are running.
    """

    def __init__(self, problems=3, log=None):
        self.problems, self.log = problems, log
        self.running = 0
        self.lock = threading.Lock()

    def __len__(self):
        return self.problems

    def messages(self, problem):
        print('{"type": "result", "number": 0, "result": "printed"}', flush=True)
        os.system("echo printed too")
        return [{"role": "user", "content": f"word {problem} in {os.getpid()}"}]

    def reward(self, problem, answer):
        if answer == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if answer == "hang":
            threading.Event().wait()
        if answer == "raise":
            raise KeyError("no such word")
        if answer == "exit":
            sys.exit(3)
        if answer == "nothing":
            return None
        if answer == "count":
            with self.lock:
                self.running += 1
                with open(self.log, "a") as file:
                    file.write(f"{self.running}\n")
            time.sleep(0.01)
            with self.lock:
                self.running -= 1
        if answer == "parts":
            return SimpleNamespace(parts={"good": 1, "long": 3.0}, weights={"long": 0.5})
        return len(answer)


class Ranking(Words):
    """Compares answers: by length, without the empty ones."""

    reward = None

    def rewards(self, problem, answers):
        if answers[0] in ("few", "number"):
            return [1.0] if answers[0] == "few" else 7
        order = sorted(map(len, answers))
        return [
            SimpleNamespace(
                parts={"rank": order.index(len(one)) / (len(order) - 1), "length": len(one)},
                weights={"length": 0},
            )
            if one
            else None
            for one in answers
        ]


class Parent(Words):
    """It has started a process, in a session of its own."""

    def __init__(self):
        super().__init__()
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
        self.child = subprocess.Popen(sleep, start_new_session=True)

    def messages(self, problem):
        return [{"role": "user", "content": f"{self.child.pid} {os.getpid()}"}]


class Waiting(Words):
    """Its rewards are coroutines, which all wait for each other."""

    def __init__(self, together):
        super().__init__()
        self.barrier = asyncio.Barrier(together)

    async def reward(self, problem, answer):
        await self.barrier.wait()
        return 1.0


class Strolls:
    """Asks where to go and goes there; its process is killed before each step is taken for the first time.

    Args:
        folder: has a file for each step that a process died at, and `visits`, a line for each step taken.

    Rollouts go one by one: who is killed at its step does not kill another's that is not recorded yet.
    """

    identity = "strolls-1"

    def __init__(self, folder, turns=3, mortal=True):
        self.folder, self.turns, self.mortal = Path(folder), turns, mortal
        self.alone = asyncio.Lock()

    def __len__(self):
        return 3

    def visit(self, seed, turn, place):
        died = self.folder / f"died-{seed}-{turn}"
        if self.mortal and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / "visits").open("a") as file:
            file.write(f"{seed} {turn}\n")
        return {"seen": place[::-1], "letters": (1, len(place))}

    async def rollout(self, problem, model):
        async with self.alone:
            return await self.stroll(problem, model)

    async def stroll(self, problem, model):
        messages = [{"role": "user", "content": f"{problem}"}]
        for turn in range(self.turns):
            reply = await model.generate(messages)
            assert reply.prompt_tokens > 0
            found = await model.once("visit", lambda: self.visit(model.seed, turn, reply.text))  # noqa: B023
            assert found["letters"] == [1, len(reply.text)]
            try:
                await model.once("refused", self.refuse)
            except ZeroDivisionError as error:
                found["seen"] += str(error)[:3]
            messages += [reply.message, {"role": "user", "content": found["seen"]}]
        together = [model.once(f"look {i}", self.look(i)) for i in range(4)]
        assert await asyncio.gather(*together) == [0, 1, 2, 3]
        return SimpleNamespace(parts={"early": reply.text < "m", "turns": self.turns}, weights={"turns": 0.0})

    def refuse(self):
        raise ZeroDivisionError("no way")

    def look(self, number):
        async def look():
            await asyncio.sleep(0.01 * (4 - number))
            return number

        return look


class Mortal:
    """Its process is killed before each thing is done for the first time; another process does it.

    Args:
        folder: has a file for each thing that a process died at, and `done`, a line for each that was done.
    """

    def __init__(self, folder, mortal=True):
        self.folder, self.mortal = Path(folder), mortal

    def __len__(self):
        return 3

    def note(self, what):
        died = self.folder / f"died-{what}"
        if self.mortal and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.folder / "done").open("a") as file:
            file.write(f"{what}\n")


class Tooled(Mortal):
    """It has tools."""

    identity = "tooled-1"
    max_turns = 5

    def __init__(self, folder, mortal=True):
        super().__init__(folder, mortal)
        self.tools = [self.add, self.half]

    def messages(self, problem):
        return [{"role": "user", "content": f"problem {problem}"}]

    def add(self, a: int, b: "int | None" = 5) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: Another.
        """
        self.note(f"add {a} {b}")
        return a + b

    async def half(self, of: float, how: Literal["down", "up"] = "down", more: list[str] = ()) -> dict:
        """Divide by two.

        Args:
            of: A number.
            how: To round.
            more: Nothing.
        """
        if of % 2:
            raise ValueError(f"{of} is odd")
        self.note(f"half {of} {how} {more}")
        return {"half": of / 2}

    def reward(self, problem, answer, messages):
        self.note(f"reward {answer}")
        parts = {"right": answer == "it is 4", "turns": len(messages)}
        return SimpleNamespace(parts=parts, weights={"turns": 0})


class Walk(Mortal):
    """A world: going there is noted. Started again, it is the same, and given the same answers again."""

    identity = "walk-1"
    max_turns = 4

    def messages(self, problem):
        return [{"role": "system", "content": "go"}]

    def start(self, problem, seed):
        return {"seed": seed, "places": []}, f"{problem}"

    async def step(self, world, answer):
        world["places"].append(answer)
        if answer == "raise":
            raise ZeroDivisionError("no way")
        self.note(f"{world['seed']} {len(world['places'])}")
        seen = "".join(place[:1] for place in world["places"])[-3:]
        return f"{seen}{len(world['places'])}", {"early": 0.125 * (answer < "m")}, False

    def close(self, world):
        with (self.folder / "closed").open("a") as file:
            file.write(f"{world['seed']}\n")


class KeptWalk(Walk):
    """It is restored from what it was."""

    def snapshot(self, world):
        return repr(world).encode()

    def restore(self, problem, seed, snapshot):
        return ast.literal_eval(snapshot.decode())


class Kept(Strolls):
    """A program that keeps its world in snapshots."""

    async def stroll(self, problem, model):
        messages, world = [{"role": "user", "content": f"{problem}"}], []
        for turn in range(self.turns):
            reply = await model.generate(messages)
            kept = await model.snapshot()
            world = list(kept.value) if kept else world
            assert await model.each_time(lambda: 7) == 7
            go = functools.partial(self.go, model.seed, world, turn, reply.text)
            where = await model.once(f"go {turn}", go, snapshot=functools.partial(list, world))
            messages += [reply.message, {"role": "user", "content": f"{where}"}]
        kept = await model.snapshot()
        return {"places": len(kept.value), "named": kept.after == f"go {turn}"}

    def go(self, seed, world, turn, place):
        self.visit(seed, turn, place)
        world.append(place)
        return len(world)


class Untold:
    """A tool without type hints."""

    def __init__(self):
        self.tools = [self.look]

    def __len__(self):
        return 1

    def messages(self, problem):
        return [{"role": "user", "content": "look"}]

    def reward(self, problem, answer):
        return 1.0

    def look(self, where):
        """Look."""


class Demanding:
    """It can't be made."""

    def __init__(self):
        raise OSError("no sandbox is left")


class Late:
    """It is never made."""

    def __init__(self):
        threading.Event().wait()
