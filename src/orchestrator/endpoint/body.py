"""Reads a request's body: JSON of a depth and with texts that everything behind it can work with."""

import json
import math
from typing import Any

from cairn.orchestrator.endpoint.asked import UnanswerableRequest

DEEPEST = 100
"""Lists and objects in each other: templates, schemas and JSON are walked by functions that recurse."""


def read_body(content: bytes) -> Any:
    """The decoded body.

    Raises:
        Refused: it is no JSON, too deep, or has a number or text that JSON can't carry on.
    """
    try:
        body = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UnanswerableRequest(f"the body is not JSON: {error}") from None
    check_values(body)
    return body


def check_values(body: Any) -> None:
    """Check a decoded body without calling itself.

    Raises:
        Refused: it is too deep, has a number that is not finite, or a text with half of a surrogate pair.
    """
    left: list[tuple[Any, str, int]] = [(body, "", 0)]
    while left:
        value, where, depth = left.pop()
        if isinstance(value, str):
            _check_text(value, where)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise UnanswerableRequest(
                    f"{where or 'the body'} is a number that is not finite", param=where or None
                )
        elif isinstance(value, dict | list):
            if depth == DEEPEST:
                raise _too_deep()
            if isinstance(value, dict):
                for name in value:
                    _check_text(name, f"a name in {where or 'the body'}")
                left += [
                    (one, f"{where}.{name}" if where else name, depth + 1) for name, one in value.items()
                ]
            else:
                left += [(one, f"{where}[{number}]", depth + 1) for number, one in enumerate(value)]


def _check_text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{where or 'the body'} has half of a surrogate pair at character {error.start}"
        hint = "it is no text; send whole characters, or leave it out"
        raise UnanswerableRequest(
            f"{what} (\\u{ord(text[error.start]):04x}): {hint}", param=where or None
        ) from None


def _too_deep() -> UnanswerableRequest:
    return UnanswerableRequest(
        f"the body has more than {DEEPEST} lists and objects in each other; send a flatter one"
    )
