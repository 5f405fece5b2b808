"""JSON whose numbers keep the text that they were written with, and texts that show them so.

Python writes a float in one way alone: 1.10 becomes 1.1, 1E5 becomes 100000.0, 1e400 becomes Infinity. A
model that learns tool calls learns these texts, so a number that Python would write otherwise keeps its own.
"""

# Values of JSON have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cairn.run.errors import CairnError

NESTED_AT_MOST = 128
"""Lists and objects within each other. What walks through a record must not run out of Python's stack."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NEEDS_TEXT = "-0"
"""The only integer of JSON that Python writes otherwise."""


class NumberChanged(CairnError):
    """What shows a number does not show it as it is written, since it computes with it."""


class FloatAsWritten(float):
    """A float that Python would write otherwise than it was written.

    text: as it was written. One beyond the range of floats, such as 1e400, is infinite.
    """

    text: str

    def __new__(cls, text: str) -> "FloatAsWritten":
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # pyright: ignore[reportIncompatibleMethodOverride] # for copies
        return (self.text,)


class IntAsWritten(int):
    """An int that Python would write otherwise than it was written, such as -0; text: as it was written."""

    text: str

    def __new__(cls, text: str) -> "IntAsWritten":
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # pyright: ignore[reportIncompatibleMethodOverride] # for copies
        return (self.text,)


def float_as_written(text: str) -> float:
    """The number of a text; a `FloatAsWritten` if Python would write it otherwise."""
    value = float(text)
    return value if float.__repr__(value) == text else FloatAsWritten(text)


def int_as_written(text: str) -> int:
    """The number of a text; an `IntAsWritten` if Python would write it otherwise."""
    value = int(text)
    return value if int.__repr__(value) == text else IntAsWritten(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"the key {twice!r} is there twice in one object")
    return found


def _decoder(**hooks: Any) -> json.JSONDecoder:
    return json.JSONDecoder(parse_float=float_as_written, parse_constant=float_as_written, **hooks)


_STRICT = _decoder(object_pairs_hook=_unique)
_STRICT_ZERO = _decoder(object_pairs_hook=_unique, parse_int=int_as_written)
_CHECKED = _decoder()
_CHECKED_ZERO = _decoder(parse_int=int_as_written)
"""Those that find -0 call Python for each integer, which takes longer."""


def parse(text: str) -> Any:
    """The value of a JSON text: numbers as they are written, keys in their order.

    NaN, Infinity and -Infinity are numbers here, though JSON has none of them.

    Raises:
        ValueError: it is no JSON, or has what can't be kept: a key twice in one object, half of a surrogate
            pair, an integer of more digits than Python reads, more than `NESTED_AT_MOST` levels.
    """
    try:
        value = (_STRICT_ZERO if _NEEDS_TEXT in text else _STRICT).decode(text)
    except RecursionError:
        _refuse_depth()
    check(text, value)
    return value


def parse_at(text: str, start: int) -> tuple[Any, int]:
    """As `parse` does, the value that begins at a place of a text, and the place behind it."""
    try:
        value, end = (_STRICT_ZERO if _NEEDS_TEXT in text else _STRICT).raw_decode(text, start)
    except RecursionError:
        _refuse_depth()
    check(text[start:end], value)
    return value, end


def parse_again(text: str) -> Any:
    """What `parse` gives for a text that it has found no fault with, in less time."""
    return (_CHECKED_ZERO if _NEEDS_TEXT in text else _CHECKED).decode(text)


def check(text: str, value: Any) -> None:
    """Check that the value of a text has no half of a surrogate pair, and is not too deep.

    Raises:
        ValueError: it is otherwise.
    """
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half of a surrogate pair, and no character") from None
    if text.count("[") + text.count("{") > NESTED_AT_MOST and _depth(value) > NESTED_AT_MOST:
        _refuse_depth()


def _refuse_depth() -> NoReturn:
    raise ValueError(f"it is nested too deeply: more than {NESTED_AT_MOST} lists and objects in each other")


def _depth(value: Any) -> int:
    """How many lists and objects are in each other at most, up to one more than may be."""
    depth, level = 0, [value]
    while depth <= NESTED_AT_MOST and (level := [one for one in level if isinstance(one, dict | list)]):
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


# Texts that show numbers as they are written


def has_written_numbers(value: Any) -> bool:
    """Whether a number within lists and objects would be shown otherwise than it is written."""
    if isinstance(value, dict):
        return any(has_written_numbers(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(has_written_numbers(one) for one in value)
    return isinstance(value, FloatAsWritten | IntAsWritten)


def show_as_written(show: Callable[[Any], Sequence[str]], value: Any) -> list[str]:
    """The texts that `show` makes of a value, with the numbers within it as they are written.

    If there are any that Python would write otherwise, `show` is called twice: with the value, and with
    numbers of the same types in their places whose texts are found again. What is shown must be the same
    but for these texts.

    Args:
        show: a function of the value alone, such as a chat template's.
        value: lists, tuples and dicts within each other.

    Raises:
        NumberChanged: `show` shows other things for other numbers, as one that rounds them does.
    """
    if not has_written_numbers(value):
        return list(show(value))
    plain = list(show(value))
    stand_ins = _StandIns(plain)
    shown = list(show(stand_ins.replace(value)))
    if len(shown) != len(plain):
        raise NumberChanged(stand_ins.problem())
    return [stand_ins.put_back(one, other) for one, other in zip(shown, plain, strict=True)]


def dumps(value: Any, **arguments: Any) -> str:
    """`json.dumps`, with numbers as they are written."""
    return show_as_written(lambda one: [json.dumps(one, **arguments)], value)[0]


class _StandIns:
    """Numbers whose texts appear nowhere else, in the places of those that Python would write otherwise."""

    def __init__(self, texts: Sequence[str]):
        """As many as are needed, whose texts are in none of `texts`."""
        self._texts = texts
        self._by_text: dict[str, FloatAsWritten | IntAsWritten] = {}
        self._drawn = 0

    def replace(self, value: Any) -> Any:
        """The value with such numbers."""
        if isinstance(value, dict):
            return {key: self.replace(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.replace(one) for one in value]
        if isinstance(value, tuple):
            return tuple(self.replace(one) for one in value)
        if not isinstance(value, FloatAsWritten | IntAsWritten):
            return value
        number = self._next(isinstance(value, FloatAsWritten))
        self._by_text[repr(number)] = value
        return number

    def put_back(self, shown: str, plain: str) -> str:
        """A text with the numbers as they are written; `plain` is what it would be without them."""
        pattern = re.compile("|".join(map(re.escape, self._by_text)))
        expected = ""
        end = place = 0
        for found in pattern.finditer(shown):
            between = shown[end : found.start()]
            value = self._by_text[found[0]]
            place += len(between)
            # json and Python have different names for what is not finite
            names = [name for name in _names(value) if plain.startswith(name, place)]
            expected += between + (names[0] if names else "?")
            place += len(names[0]) if names else 0
            end = found.end()
        if expected + shown[end:] != plain:
            raise NumberChanged(self.problem())
        return pattern.sub(lambda found: self._by_text[found[0]].text, shown)

    def problem(self) -> str:
        """Why the texts can't be put back."""
        texts = ", ".join(dict.fromkeys(one.text for one in self._by_text.values()))
        return (
            f"it has the numbers {texts}, and what shows them computes with their values, so that they can't "
            "be shown as they are written; write them as Python does, such as 1.1 for 1.10"
        )

    def _next(self, is_float: bool) -> float | int:
        while True:
            self._drawn += 1
            drawn = hashlib.blake2b(str(self._drawn).encode(), digest_size=8).digest()
            digits = 10**15 + int.from_bytes(drawn, "big") % (9 * 10**15)
            number = float(f"{digits}e-230") if is_float else digits * 10**15 + self._drawn
            text = repr(number)
            if text not in self._by_text and not any(text in one for one in self._texts):
                return number


def _names(value: FloatAsWritten | IntAsWritten) -> list[str]:
    """How Python and its JSON write a number."""
    if isinstance(value, IntAsWritten):
        return [int.__repr__(value)]
    return [json.dumps(float(value)), float.__repr__(value)]
