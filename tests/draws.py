"""Draws what runs are made of from tables, so that tests don't all use one model family and one signal.

A draw depends only on the name that is given for it, so a test always gets the same one. Only what `seed` and
`cases` give differs from commit to commit.
"""

import functools
import json
import os
import random
import subprocess
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cairn.run.signals import STOP_SIGNALS

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

FAMILIES = ("llama", "qwen2", "mistral", "gemma", "phi3", "olmo2", "granite", "gpt_neox", "starcoder2")
"""Families in families.py that are dense and train in packed rows of any length."""

TEXTS = {"problems": 4096, "min_length": 3, "max_length": 8, "seed": 1}
"""What the example configuration has."""
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "built in": {"name": "reverse_text", "args": TEXTS},
    "own": {"name": "environment_kinds:Letters", "args": {"problems": 4096, "length": 5}},
    "slow": {"name": "environment_kinds:Slow", "args": {"seconds": 0.02, **TEXTS}},
    "concurrent": {"name": "environment_kinds:Concurrent", "args": {"seconds": 0.01, **TEXTS}},
    "instructed": {"name": "environment_kinds:Instructed", "args": TEXTS},
}
"""The section `environment` of each kind."""
THREADS = {"slow": 8}
"""How many rewards may be computed at once, where that is not one."""


def drawn(table: Sequence[T], name: str) -> T:
    """The entry of `table` that belongs to `name`, such as a test module's."""
    return table[zlib.crc32(name.encode()) % len(table)]


@functools.cache
def commit() -> str:
    """The commit that is checked out, or CAIRN_TESTS_COMMIT; empty outside of a clone."""
    command = ["git", "rev-parse", "HEAD"]
    with_git = functools.partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    try:
        return os.environ.get("CAIRN_TESTS_COMMIT") or with_git(command).stdout.strip()
    except FileNotFoundError:
        return ""


def seed(name: str) -> int:
    """A number that the commit and `name` decide."""
    return zlib.crc32(f"{commit()} {name}".encode())


def cases(table: Sequence[object], name: str, number: int, always: Sequence[object] = ()) -> list[Any]:
    """All cases of a test as its parameters: some run in each commit, the others only with `-m soak`.

    Args:
        table: values of one parameter, or a tuple for several.
        number: how many of those not in `always` run in a commit, which its hash and `name` decide.
        always: cases that run in each commit.
    """
    free = [case for case in table if case not in always]
    drawn_now = [*always, *random.Random(seed(name)).sample(free, number)]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in drawn_now else pytest.mark.soak,
        )
        for case in table
    ]


def has_turn(promise: str, number: int, of: int) -> bool:
    """Whether a commit has the way `number` of the `of` ways in which a promise is proved."""
    return seed(promise) % of == number


def in_turn(promise: str, number: int, of: int) -> Callable[[Test], Test]:
    """A decorator for each of `of` tests that prove a promise in different ways: a commit has one of them.

    Which one its hash decides; all run with `-m soak`.
    """
    return (lambda test: test) if has_turn(promise, number, of) else pytest.mark.soak


def seldom(test: Test) -> Test:
    """A decorator for a unit test that takes seconds of processor time: every second commit has it.

    All run with `-m soak`, and `scripts/test` has none of them.
    """
    return pytest.mark.slow(in_turn(test.__qualname__, 0, 2)(test))


def asked(
    request: pytest.FixtureRequest, test: Callable[..., None], *parameters: str
) -> list[tuple[Any, ...]]:
    """The values of a test's parameters with which it is to run, for fixtures that make no more than that."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    of_test = [item for item in items if item.function is test]
    return [tuple(item.callspec.params[name] for name in parameters) for item in of_test]


def family(name: str) -> str:
    """A model family."""
    return drawn(FAMILIES, name)


def stop_signal(name: str) -> int:
    """One of the signals that ask a run to stop."""
    return drawn(STOP_SIGNALS, name)


def environment(name: str) -> tuple[str, ...]:
    """The flags of `rl` for an environment of some kind."""
    return environment_flags(drawn(list(ENVIRONMENTS), name))


def environment_flags(kind: str) -> tuple[str, ...]:
    """Those for the environment of a kind."""
    section = ENVIRONMENTS[kind]
    return (
        *("--orchestrator.environment.name", section["name"]),
        *("--orchestrator.environment.args", json.dumps(section["args"])),
        *("--orchestrator.reward-threads", str(THREADS.get(kind, 1))),
    )
