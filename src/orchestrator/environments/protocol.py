"""The environment protocol, and its errors."""

import math
import numbers
import re
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from cairn.run.errors import CairnError
from cairn.run.output import quoted, writable

# Why there is no reward: reasons in words, what they have in common, and whether another try may help.


UNSCORED = "unscored: "
"""How the reason of an answer begins whose reward is None."""
ANSWER = "; the answer was "
"""What stands between a reason and the answer that it is about."""
SHOWN_KIND = 160
"""Characters of a reason's kind."""
NEVER_PASS = (NameError, ImportError, SyntaxError, NotImplementedError)
"""Exceptions of code that is wrong. Another try raises them again. A KeyError or a TypeError is none of them:
code raises these as well when a judge that is overloaded answers with something else than it should."""
ONLY_MAIN_THREAD = ("signal only works in main thread", "threaded environment")
"""What libraries say that set a time limit by a signal (SIGALRM), as Math-Verify does."""
MAIN_THREAD_HINT = (
    "; signals work in a process's main thread only: set orchestrator.reward_threads = 0, which calls the "
    'environment there, or let it run in a process of its own (name = "process")'
)


def unscored(reason: str | None) -> bool:
    """Whether an answer has no reward because the environment had nothing to say of it (None)."""
    return reason is not None and reason.startswith(UNSCORED)


def kind_of(reason: str) -> str:
    """What failures of one kind share: the reason's first line without the answer and without numbers."""
    line = reason.partition(ANSWER)[0].partition("\n")[0]
    return re.sub(r"\d+", "N", line)[:SHOWN_KIND]


def passes(error: BaseException) -> bool:
    """Whether another try of the call that raised `error` may succeed."""
    known = getattr(error, "passing", True)
    return bool(known) and not isinstance(error, NEVER_PASS) and not _does_not_fit(error) and not hint(error)


def _does_not_fit(error: BaseException) -> bool:
    """Whether a function can't be called with what it is given: nothing of its code has run."""
    if not isinstance(error, TypeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parent == Path(__file__).parent


def hint(error: BaseException) -> str:
    """What to do about an exception that many people meet; empty if there is nothing to say."""
    text = str(error) if isinstance(error, ValueError | RuntimeError) else ""
    return MAIN_THREAD_HINT if any(known in text for known in ONLY_MAIN_THREAD) else ""


def place_of(error: BaseException) -> str:
    """Where an exception was raised, for telling reasons apart: file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"


# What an environment may return as a reward: a number, or named parts that add up to one.


LARGEST_REWARD = 1e37
"""Largest absolute reward: advantages are stored as float32, whose maximum is 3.4e38."""
TOOL_COUNTS = ("tool_calls", "tool_errors")
"""Parts of weight 0 that count what a rollout did: metrics of `rollout/`."""
MALFORMED_CALLS = "malformed_calls"
"""Another one, of every program whose model has tools."""
COUNTED = frozenset({*TOOL_COUNTS, MALFORMED_CALLS})
"""The names that no reward may have."""


@dataclass(frozen=True)
class Rewards:
    """A reward in parts. The reward is the sum of the parts, each multiplied by its weight.

    parts: a finite number for each name; None where a part does not apply to the answer. weights: by name; a
    part without a weight counts once, and a part with weight 0 is only recorded.
    """

    parts: Mapping[str, float | None]
    weights: Mapping[str, float] = field(default_factory=dict[str, float])


def to_reward(value: Any) -> float | None:
    """`value` as a finite float; None if it is not one finite number.

    Accepted are Python numbers, and scalars and one-element arrays or tensors of numpy and torch.
    """
    if callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    if not isinstance(value, numbers.Real):
        return None
    try:
        reward = float(value)
    except OverflowError:
        return None
    return reward if math.isfinite(reward) and abs(reward) <= LARGEST_REWARD else None


def to_json(value: Any, unnamed: str) -> dict[str, dict[str, float]] | str:
    """The parts and the weights of a reward, as JSON; a number is the part `unnamed`.

    Returns:
        If it is no reward, why, in words.
    """
    found = in_parts(value)
    if isinstance(found, str):
        return found
    total, parts = found
    weights = value.weights if isinstance(value, Rewards) else {}
    return {
        "parts": parts or {unnamed: total},
        "weights": {writable(str(name)): float(weight) for name, weight in weights.items()},
    }


def says_nothing(value: Any) -> bool:
    """Whether a reward is None, or has parts that all are: the answer is unscored."""
    parts = value.parts if isinstance(value, Rewards) else value
    if isinstance(parts, Mapping):
        return bool(parts) and all(part is None for part in cast("Mapping[str, Any]", parts).values())
    return value is None


def in_parts(value: Any) -> tuple[float, dict[str, float]] | str:
    """The reward and its parts by name: of `Rewards`, of a mapping of names to numbers, or of one number.

    A part that is None does not apply to the answer: the reward has no such part.

    Returns:
        If it is none of these, why, in words.
    """
    if isinstance(value, Mapping):
        value = Rewards(cast("Mapping[str, float]", value))
    if not isinstance(value, Rewards):
        reward = to_reward(value)
        return "it is not one finite number" if reward is None else (reward, {})
    if not value.parts:
        return "it has no parts"
    if unknown := value.weights.keys() - value.parts.keys():
        return f"it has a weight for {min(unknown)!r}, which is no part of it"
    parts: dict[str, float] = {}
    total = 0.0
    for name, part in value.parts.items():
        if part is None:
            continue
        found, weight = to_reward(part), to_reward(value.weights.get(name, 1.0))
        if found is None or weight is None:
            return f"its part {name!r} or the weight of that part is not one finite number"
        parts[writable(str(name))] = found
        total += weight * found
    if not parts:
        return "all of its parts are None"
    return (total, parts) if to_reward(total) is not None else "its parts add up to no finite number"


class BadEnvironment(CairnError):
    """The environment can't be made; the message names it and the cause."""


class EnvironmentFailed(CairnError):
    """An environment raised, timed out, or returned an invalid conversation or reward.

    The message names the environment, the problem, the cause and, for a reward, the answer. What it quotes is
    text from outside, so it is made writable and is cut if it is long.

    Args:
        passing: whether another try may succeed.
    """

    def __init__(self, message: str, *, passing: bool = True):
        super().__init__(quoted(message))
        self.passing = passing

    def of(self, whose: str) -> "EnvironmentFailed":
        """The same failure, where it is known whose it is."""
        return EnvironmentFailed(f"{whose}: {self}", passing=self.passing)


class Unscored(EnvironmentFailed):
    """The environment has nothing to say of an answer: its reward is None. That is no failure."""

    def __init__(self, message: str):
        super().__init__(UNSCORED + message, passing=False)
        self._message = message

    def of(self, whose: str) -> EnvironmentFailed:
        return Unscored(f"{whose}: {self._message}")


Reward = float | Mapping[str, float] | Rewards
"""What an environment says of an answer."""


class Environment(Protocol):
    """A fixed set of problems; the model gives one answer to each problem's conversation.

    Problem i must be the same in every process and every run. `messages` and `reward` may be coroutines. Both
    are called from a separate thread, one call at a time unless `orchestrator.reward_threads` allows more.
    The optional attribute `identity` is text that must change whenever the problems or rewards do.
    """

    def __len__(self) -> int:
        """Number of problems: the length of an epoch."""
        ...

    def messages(self, problem: int) -> Sequence[Mapping[str, Any]] | Awaitable[Sequence[Mapping[str, Any]]]:
        """The conversation that asks problem number `problem`."""
        ...

    def reward(self, problem: int, answer: str) -> Reward | Awaitable[Reward]:
        """How good `answer` is, for example from 0 to 1: one finite number (Python, numpy or torch), or
        several by name, as a mapping that adds up to the reward or as `Rewards` with weights."""
        ...
