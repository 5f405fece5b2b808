"""Rewards for answers to GSM8K: whether they end with `#### NUMBER`, and whether the number is right."""

import re
from collections.abc import Sequence
from typing import Any

NUMBER = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")


def last_number(text: str) -> str | None:
    """The number after the last ####, without commas and zeros after a point; None if there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    number = found[-1].replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right_number(completions: Sequence[Any], number: Sequence[str], **_: Any) -> list[float]:
    """1 for the right number, else 0."""
    return [float(last_number(_text(one)) == right) for one, right in zip(completions, number, strict=True)]


def has_number(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for an answer that ends as it was asked to, else 0."""
    return [float(last_number(_text(one)) is not None) for one in completions]
