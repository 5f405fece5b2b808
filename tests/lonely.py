"""Environments for processes of their own: they import the standard library only."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace


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


class Tooled(Words):
    """It has tools."""

    tools = (len,)


class Demanding:
    """It can't be made."""

    def __init__(self):
        raise OSError("no sandbox is left")


class Late:
    """It is never made."""

    def __init__(self):
        threading.Event().wait()
