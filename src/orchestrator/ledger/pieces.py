"""What was sampled, piece by piece: the tables `pieces`, to which rows are only added, and `experts`.

What a request has sampled is one row, so recording it takes as long at the end of an answer as at its
beginning.
"""

import json
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cairn.orchestrator.rollouts import Sampled
from cairn.policy.generation import RoutedExperts

ANSWER = -1
"""The column `number` of an answer that is no program."""
SCHEMA = """
CREATE TABLE pieces (                   -- what was sampled, in pieces; no row is ever changed
    place INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- of the turn; -1: of an answer that is no program
    start INTEGER NOT NULL,             -- number of tokens before it
    token_ids BLOB NOT NULL,            -- int32, little-endian
    logprobs BLOB NOT NULL,             -- float32, little-endian
    versions TEXT NOT NULL,             -- [[policy version, start, end], ...], counted from the piece's start
    PRIMARY KEY (place, sample, number, start)
);
"""
INSERT = "INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?, ?)"
FORGET = "DELETE FROM pieces WHERE place = ? AND sample = ? AND number = ?"

Key = tuple[int, int, int]
"""The columns `place`, `sample` and `number`."""


@dataclass
class SampledTokens:
    """What the pieces of an answer or a turn hold together; see `Rollout`."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])


def add(database: sqlite3.Connection, key: Key, sampled: Sampled) -> None:
    """Add the tokens that are not recorded yet, in the transaction that is open.

    Of what was cut since it was recorded, or has no row yet, all is written anew.
    """
    start, end = sampled.recorded, len(sampled.token_ids)
    if start is None or start > end:
        database.execute(FORGET, key)
        start = 0
    if start == end:
        return
    spans = [(name, a - start, b - start) for name, a, b in sampled.versions if a >= start]
    blobs = to_blob(sampled.token_ids[start:], "<i4"), to_blob(sampled.logprobs[start:], "<f4")
    database.execute(INSERT, (*key, start, *blobs, json.dumps(spans)))


def read(database: sqlite3.Connection, condition: str, *values: Any) -> dict[Key, SampledTokens]:
    """What the pieces that fulfil an SQL condition hold."""
    rows = database.execute(
        "SELECT place, sample, number, token_ids, logprobs, versions FROM pieces "
        f"WHERE {condition} ORDER BY place, sample, number, start",
        values,
    )
    found: dict[Key, SampledTokens] = {}
    for *key, token_ids, logprobs, versions in rows:
        tokens = found.setdefault((key[0], key[1], key[2]), SampledTokens())
        tokens.versions += spans_of(versions, len(tokens.token_ids))
        tokens.token_ids += ints(token_ids)
        tokens.logprobs += array("f", np.frombuffer(logprobs, "<f4").astype("f").tobytes())
    return found


def spans_of(versions: str, before: int = 0) -> list[tuple[str, int, int]]:
    """The column `versions` of a piece that has so many tokens before it."""
    return [(version, before + start, before + end) for version, start, end in json.loads(versions)]


def ints(blob: bytes) -> "array[int]":
    """A column of int32, little-endian."""
    return array("i", np.frombuffer(blob, "<i4").astype("i").tobytes())


def to_blob(values: "Sequence[float] | np.ndarray", kind: str) -> bytes:
    """A column of numbers of this NumPy type."""
    return np.asarray(values, kind).tobytes()


# The experts that servers chose for tokens, which only runs that replay them record.


EXPERTS = """
CREATE TABLE IF NOT EXISTS experts (    -- that a server chose for the tokens of one request
    place INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL,            -- as in pieces
    start INTEGER NOT NULL,             -- number of tokens before these, from the beginning of the context
    layers INTEGER NOT NULL,
    chosen INTEGER NOT NULL,            -- experts of a token in each layer
    bytes INTEGER NOT NULL,             -- of one expert's number
    experts BLOB NOT NULL,              -- uint8 or uint16, little-endian: [tokens, layers, chosen]
    PRIMARY KEY (place, sample, number, start)
)
"""
INSERT_EXPERTS = "INSERT OR REPLACE INTO experts VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
FORGET_EXPERTS = "DELETE FROM experts WHERE place = ? AND sample = ? AND number = ?"
SELECT_EXPERTS = """
SELECT place, sample, number, start, layers, chosen, bytes, experts FROM experts WHERE place = ?
ORDER BY sample, number, start
"""


def add_experts(database: sqlite3.Connection, key: Key, sampled: Sampled) -> None:
    """Add those that are not recorded yet, in the transaction that is open; a new answer has no others."""
    if sampled.recorded is None:
        database.execute(FORGET_EXPERTS, key)
    for one in sampled.experts:
        size = one.rows.dtype.itemsize
        row = (*key, one.start, *one.rows.shape[1:], size, to_blob(one.rows, f"<u{size}"))
        database.execute(INSERT_EXPERTS, row)


def read_experts(database: sqlite3.Connection, place: int) -> dict[Key, list[RoutedExperts]]:
    """What is known of the answers to a prompt, and of their turns, in the order of tokens."""
    found: dict[Key, list[RoutedExperts]] = {}
    for *key, start, layers, chosen, size, content in database.execute(SELECT_EXPERTS, (place,)):
        rows = np.frombuffer(content, f"<u{size}").reshape(-1, layers, chosen)
        found.setdefault((key[0], key[1], key[2]), []).append(RoutedExperts(start, rows))
    return found


# Sizes, for checks that read no tokens


@dataclass
class SampledSize:
    """How much the pieces of an answer or a turn hold."""

    tokens: int = 0
    logprobs: int = 0
    versions: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])


def sizes(database: sqlite3.Connection) -> dict[Key, SampledSize]:
    """Those of all answers and turns; tokens and logprobs are not read."""
    found: dict[Key, SampledSize] = {}
    for *key, tokens, logprobs, versions in database.execute(
        "SELECT place, sample, number, length(token_ids) / 4, length(logprobs) / 4, versions FROM pieces "
        "ORDER BY place, sample, number, start"
    ):
        size = found.setdefault((key[0], key[1], key[2]), SampledSize())
        size.versions += spans_of(versions, size.tokens)
        size.tokens += tokens
        size.logprobs += logprobs
    return found
