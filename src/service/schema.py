"""The file of the service's ledger: its tables, their rows as others see them, and how it is opened.

It is one SQLite file in the service's folder, written by one process.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.run.errors import UsageError
from cairn.run.file_system import journal_mode
from cairn.run.files import make_folders

FORMAT = 2
OLDER = {1: "ALTER TABLE sessions ADD COLUMN away INTEGER NOT NULL DEFAULT 0"}
"""What makes the next format of an older one."""
WAITING, DONE, FAILED = "waiting", "done", "failed"
SAMPLE = "sample"
"""The kind of the calls that servers execute; the others change or save a model."""
CREATE, LOAD, PASS, FORWARD, STEP, SAVE, SAVE_SAMPLER, UNLOAD = (
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "unload_model",
)
"""The kinds of calls of a model."""
SCHEMA = """
CREATE TABLE service (format INTEGER NOT NULL, base TEXT NOT NULL);
CREATE TABLE sessions (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, about TEXT NOT NULL, created REAL NOT NULL,
    finished INTEGER NOT NULL DEFAULT 0, away INTEGER NOT NULL DEFAULT 0);
CREATE TABLE models (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, lora TEXT NOT NULL,
    metadata TEXT NOT NULL, created REAL NOT NULL, gone INTEGER NOT NULL DEFAULT 0);
CREATE TABLE calls (id TEXT PRIMARY KEY, owner TEXT NOT NULL, seq INTEGER NOT NULL, tenant TEXT NOT NULL,
    kind TEXT NOT NULL, digest BLOB NOT NULL, body BLOB, state TEXT NOT NULL, answer BLOB,
    arrived REAL NOT NULL, UNIQUE (owner, seq));
CREATE INDEX unfinished ON calls (state) WHERE state = 'waiting';
CREATE TABLE samplers (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, path TEXT,
    clients INTEGER NOT NULL DEFAULT 0);
CREATE TABLE checkpoints (path TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL,
    kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL, bytes INTEGER NOT NULL, call TEXT NOT NULL,
    created REAL NOT NULL, expires REAL, metadata TEXT NOT NULL);
"""
"""`sessions.away`: its client has given no sign of life for so long that its models count no more.
`calls.owner` is the model or sampler whose calls `seq` counts. `calls.body` is what has to be known to
execute the call, until no saved state needs it; `calls.answer` goes after some hours."""


@dataclass(frozen=True)
class ServiceCall:
    """A call, as the ledger has it. answer: what the client gets; of a failed one the reason, as text."""

    id: str
    owner: str
    seq: int
    tenant: str
    kind: str
    digest: bytes
    body: bytes | None
    state: str = WAITING
    answer: bytes | None = None


@dataclass(frozen=True)
class ModelRecord:
    """A model. lora: `rank`, `seed`, `train_attn`, `train_mlp`, as its adapter was made; gone: whether it was
    unloaded, or its session is finished."""

    id: str
    tenant: str
    session: str
    lora: dict[str, Any]
    metadata: dict[str, Any]
    created: float
    gone: bool


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint that a client has saved under a name. path: as clients call it; folder: of the step,
    within the service's folder; call: the one that saved it; created, expires: in seconds of Unix time."""

    path: str
    tenant: str
    model: str
    kind: str
    name: str
    folder: str
    bytes: int
    call: str
    created: float
    expires: float | None
    metadata: dict[str, Any]


class LedgerFile:
    """The open file; all threads of one process may use it."""

    def __init__(self, path: Path, base: str):
        """Open it, or begin it.

        Args:
            base: names the base model, by the checksums of its files.

        Raises:
            UsageError: it is of another base or of another version of Cairn.
        """
        make_folders(path.parent)
        self._lock = threading.RLock()
        self._database = database = sqlite3.connect(path, check_same_thread=False)
        database.execute(f"PRAGMA journal_mode = {journal_mode(path)}")
        database.execute("PRAGMA synchronous = FULL")  # what a client was told survives a power cut
        with database:
            database.execute("BEGIN IMMEDIATE")  # all tables or none
            if not database.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in SCHEMA.split(";"):
                    database.execute(statement)
                database.execute("INSERT INTO service VALUES (?, ?)", (FORMAT, base))
            of, found = database.execute("SELECT format, base FROM service").fetchone()
            while of in OLDER:
                database.execute(OLDER[of])
                of += 1
                database.execute("UPDATE service SET format = ?", (of,))
        if of != FORMAT:
            raise UsageError(
                f"{path}: its format is {of}, and this version reads {FORMAT}; take another --output-dir"
            )
        if found != base:
            raise UsageError(
                f"{path}: the service in this folder has adapters of another base model than --model.name; "
                "give that model, or another --output-dir"
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    @contextlib.contextmanager
    def _writing(self) -> Generator[sqlite3.Connection]:
        """One transaction, durable when the context ends without an error."""
        with self._lock, self._database as database:
            database.execute("BEGIN IMMEDIATE") if not database.in_transaction else None
            yield database

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()
