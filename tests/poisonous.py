"""An environment some of whose problems harm the process that rewards their answers, each in its own way."""

import ctypes
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

HALF = "caf\ud83d"
"""Text with half a surrogate pair."""


class Poisonous:
    """Text to reverse; the reward is how many letters are right. `POISON` says what other problems do.

    Args:
        log: file that gets a line for each call of `reward`.
    """

    def __init__(self, log: str):
        self.log = Path(log)

    def __len__(self) -> int:
        return 2 * len(POISON)

    def messages(self, problem: int) -> list[dict[str, Any]]:
        if problem == SURROGATE_MESSAGE:
            return [{"role": "user", "content": HALF}]
        return [{"role": "user", "content": "abcdefgh"[problem % 5 :]}]

    def reward(self, problem: int, answer: str) -> Any:
        with open(self.log, "a") as file:
            file.write(f"{problem}\n")
        if problem < len(POISON):
            return POISON[problem](answer)
        return len(set(answer) & set("abcdefgh")) + len(answer) / 100


def crashes(_: str) -> float:
    ctypes.string_at(0)
    return 0.0


def holds_the_gil(_: str) -> float:
    ctypes.PyDLL(None).sleep(600)  # unlike CDLL, it keeps the GIL during a call
    return 0.0


def sleeps() -> None:
    time.sleep(600)


def ends_a_child(answer: str) -> float:
    child = multiprocessing.get_context("fork").Process(target=sleeps)
    child.start()
    child.terminate()
    child.join()
    return len(answer) / 100


def raises_half_a_pair(_: str) -> float:
    raise ValueError(HALF)


def abstains(answer: str) -> float | None:
    return None if len(answer) % 2 else len(answer) / 100


def leaves(_: str) -> float:
    sys.exit(0)


def leaves_at_once(_: str) -> float:
    os._exit(0)


def has_odd_parts(answer: str) -> dict[str, float]:
    return {HALF: len(answer) / 100}


POISON = [
    crashes,
    holds_the_gil,
    ends_a_child,
    raises_half_a_pair,
    abstains,
    leaves,
    leaves_at_once,
    has_odd_parts,
]
SURROGATE_MESSAGE = len(POISON)
"""The problem whose messages no tokenizer takes."""
