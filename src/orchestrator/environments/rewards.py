"""What an environment may return as a reward: a number, or named parts that add up to one."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from cairn.run.output import writable

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
