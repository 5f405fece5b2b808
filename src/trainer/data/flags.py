"""Flags of messages, as programs for training write them: which turns are learned, whatever their role."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

FLAGS = {
    "train": True,
    "weight": True,
    "loss": True,
    "loss_mask": True,
    "trainable": True,
    "training": True,
    "masked": False,
}
"""By name, whether a turn is learned whose flag is true. A flag is true or false, or 1 or 0."""


def flag_of(message: Mapping[str, Any]) -> bool | None:
    """Whether the flags of a message say that its turn is learned; None if it has none."""
    for name, means in FLAGS.items():
        if (value := message.get(name)) is not None:
            return bool(value) is means
    return None


def problem_of_flags(message: Mapping[str, Any]) -> str | None:
    """What is wrong with the flags of a message; None if nothing is."""
    said: dict[bool, str] = {}
    for name, means in FLAGS.items():
        value = message.get(name)
        if value is None:
            continue
        if not _is_flag(value):
            how = "0 or 1" if name == "weight" else "true or false"
            return f"has {name} = {value!r}, which must be {how}: a turn is learned, or it is not"
        said[bool(value) is means] = f"{name} = {value!r}"
    return f"has {said[True]} and {said[False]}, which contradict each other" if len(said) == 2 else None


def flags_beside(record: Mapping[str, Any], count: int) -> list[bool | None]:
    """What the flags beside the messages say of each of them; None where none says anything."""
    flags: list[bool | None] = [None] * count
    for name, means in FLAGS.items():
        if isinstance(values := record.get(name), list):
            flags = [bool(value) is means for value in cast("list[Any]", values)]
    return flags


def problem_of_flags_beside(record: Mapping[str, Any], messages: Sequence[Any] | None) -> str | None:
    """What is wrong with flags beside the messages; None if nothing is.

    Args:
        messages: None if the record has texts.
    """
    for name, means in FLAGS.items():
        value = record.get(name)
        if isinstance(value, list):
            flags = cast("list[Any]", value)
            if messages is None:
                return f"it has {name} beside texts, of which the whole completion is learned; give messages"
            if len(flags) != len(messages):
                return f"its {name} has {len(flags)} values, and there are {len(messages)} messages"
            wrong = [one for one in flags if not _is_flag(one)]
            if wrong:
                return (
                    f"its {name} has the value {wrong[0]!r}, which must be 0 or 1: a turn is learned, or not"
                )
        elif _is_flag(value) and bool(value) is not means:
            return (
                f"its {name} = {value!r} says that nothing of it is learned; leave the record out, or remove "
                "the field"
            )
        elif name == "weight" and isinstance(value, int | float) and not _is_flag(value):
            return f"its weight is {value}, and records have no weights of their own here: remove the field"
    return None


def _is_flag(value: Any) -> bool:
    return isinstance(value, int | float) and value in (0, 1)
