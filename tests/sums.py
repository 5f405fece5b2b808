"""The task of recipes/calculator as users bring it. It needs the standard library only.

Each notes what it does in files of a folder, a line each: `started` the environments' processes and agents,
`judged` the conversations of the tries to reward an agent, `restored` the number of steps in the
snapshots from which worlds are made again.
"""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PROBLEMS = [f"{17 + 5 * i}{'+-*'[i % 3]}{11 + 3 * i}" for i in range(24)]


def value(expression: str) -> int:
    """What an expression such as `37*58` is.

    Raises:
        ValueError: it is none.
    """
    for sign, operator in OPERATORS.items():
        left, found, right = expression.partition(sign)
        if found and left.isdigit() and right.isdigit() and len(expression) < 12:
            return operator(int(left), int(right))
    raise ValueError("expression must be two numbers with +, - or * between them")


def share(wanted: str, answer: str) -> float:
    """The share of characters that are right."""
    return sum(a == b for a, b in zip(wanted, answer, strict=False)) / max(len(wanted), len(answer))


def note(folder: str, what: str, line: str) -> None:
    """Append a line to a file."""
    with open(Path(folder) / what, "a") as file:
        file.write(f"{line}\n")


class Problems:
    """Some expressions."""

    identity = "sums-1"
    max_turns = 3

    def __init__(self, folder):
        note(folder, "started", f"{type(self).__name__} {os.getpid()}")

    def __len__(self):
        return len(PROBLEMS)


class Tools(Problems):
    """A tool computes them."""

    def __init__(self, folder):
        super().__init__(folder)
        self.tools = [self.calculate]

    def messages(self, problem):
        return [{"role": "user", "content": PROBLEMS[problem]}]

    def calculate(self, expression: str) -> int:
        """Compute an expression.

        Args:
            expression: Two numbers with +, - or * between them.
        """
        return value(expression)

    def reward(self, problem, answer):
        return share(str(value(PROBLEMS[problem])), answer)


class Worlds(Problems):
    """Each answer is a step, and the next expression depends on it; a snapshot keeps where it is.

    The first process that comes to a world's second step is killed there.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.folder = folder

    def start(self, problem, seed):
        return {"problem": problem, "answers": []}, PROBLEMS[problem]

    def step(self, world, answer):
        if world["answers"] and not (killed := Path(self.folder) / "killed").exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        asked = self.asked(world)
        world["answers"].append(answer)
        parts = SimpleNamespace(
            parts={"right": share(str(value(asked)), answer), "steps": 1}, weights={"steps": 0}
        )
        return self.asked(world), parts, len(world["answers"]) == 3

    def asked(self, world):
        return PROBLEMS[(world["problem"] + len("".join(world["answers"]))) % len(PROBLEMS)]

    def snapshot(self, world):
        return world

    def restore(self, problem, seed, snapshot):
        note(self.folder, "restored", str(len(snapshot["answers"])))
        return snapshot


class Sum:
    """An object for each rollout, as TRL's `environment_factory` makes them."""

    def reset(self, prompt, expression, folder):
        self.computed = 0

    def calculate(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: Two numbers with +, - or * between them.
        """
        self.computed += 1
        return str(value(expression))

    def get_reward(self):
        return min(self.computed, 1)


def last_answer(completions, expression, **rest):
    """The share of characters that are right in the last answer, as TRL's reward functions are called."""
    return [
        share(str(value(question)), messages[-1]["content"] or "")
        for question, messages in zip(expression, completions, strict=True)
    ]


def judge(problem, messages):
    """An agent's reward, which fails for each conversation that it has not seen before."""
    what, judged = json.dumps(messages), Path(problem["folder"]) / "judged"
    known = judged.exists() and what in judged.read_text().splitlines()
    note(problem["folder"], "judged", what)
    if not known:
        raise OSError("the judge is away")
    return {"right": share(str(value(problem["prompt"])), messages[-1]["content"] or "")}
