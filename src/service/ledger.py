"""The service's ledger: every call of every client, before it is answered, and what came of it.

A call is durable before the client is told its id, and its answer before the client gets it. So a client that
asks again gets the same answer, and nothing is done twice, whoever died in between.
"""

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cairn.service.schema import SAMPLE, WAITING, LedgerFile, ModelRecord, SavedWeights, ServiceCall
from cairn.service.wire import CallRefused


class ServiceLedger(LedgerFile):
    """The ledger of a service; all threads of one process may use it."""

    # Sessions and models

    def add_session(self, session: str, tenant: str, about: dict[str, Any]) -> None:
        """Record a session of a tenant."""
        with self._writing() as database:
            row = (session, tenant, json.dumps(about), time.time())
            database.execute("INSERT INTO sessions (id, tenant, about, created) VALUES (?, ?, ?, ?)", row)

    def session(self, session: str, tenant: str) -> dict[str, Any]:
        """What the client has said of a session.

        Raises:
            CallRefused: the tenant has none with this id (404), or it is finished (410).
        """
        rows = self._rows("SELECT about, finished FROM sessions WHERE id = ? AND tenant = ?", session, tenant)
        if not rows:
            raise CallRefused(f"session_id: there is no session {session!r}", 404)
        if rows[0][1]:
            raise CallRefused(f"session_id: session {session!r} is finished; create another one", 410)
        return json.loads(rows[0][0])

    def sessions(self, tenant: str) -> list[str]:
        """The ids of a tenant's sessions, the newest first."""
        return [
            row[0]
            for row in self._rows("SELECT id FROM sessions WHERE tenant = ? ORDER BY created DESC", tenant)
        ]

    def present_sessions(self) -> list[str]:
        """The ids of all sessions that are neither finished nor away."""
        return [row[0] for row in self._rows("SELECT id FROM sessions WHERE NOT finished AND NOT away")]

    def session_of(self, owner: str) -> str:
        """The session of a model or sampler; empty if it has none."""
        rows = self._rows(
            "SELECT session FROM models WHERE id = ?1 UNION SELECT session FROM samplers WHERE id = ?1", owner
        )
        return rows[0][0] if rows else ""

    def leave_session(self, session: str) -> list[str] | None:
        """Record that a session's client is away; returns its models, or None if a call of it still waits."""
        with self._writing() as database:
            own = "SELECT id FROM models WHERE session = ?1"
            waiting = (
                f"SELECT 1 FROM calls WHERE state = 'waiting' AND owner IN "
                f"({own} UNION SELECT id FROM samplers WHERE session = ?1)"
            )
            if database.execute(waiting, (session,)).fetchone():
                return None
            database.execute("UPDATE sessions SET away = 1 WHERE id = ?", (session,))
            return [row[0] for row in database.execute(f"{own} AND NOT gone", (session,))]

    def return_session(self, session: str) -> None:
        """Record that a session's client is back."""
        with self._writing() as database:
            database.execute("UPDATE sessions SET away = 0 WHERE id = ?", (session,))

    def finish_session(self, session: str, tenant: str) -> list[str]:
        """Record that a session is finished; returns its models, which are gone with it."""
        self.session(session, tenant)
        with self._writing() as database:
            database.execute("UPDATE sessions SET finished = 1 WHERE id = ?", (session,))
            rows = database.execute(
                "SELECT id FROM models WHERE session = ? AND NOT gone", (session,)
            ).fetchall()
            database.execute("UPDATE models SET gone = 1 WHERE session = ?", (session,))
        return [row[0] for row in rows]

    def model(self, model: str, tenant: str | None = None) -> ModelRecord:
        """A model; with `tenant`, one of this tenant.

        Raises:
            CallRefused: there is none (404).
        """
        found = self.models("id = ?", model)
        if not found or tenant not in (None, found[0].tenant):
            raise CallRefused(f"model_id: there is no model {model!r}", 404)
        return found[0]

    def models(self, where: str, *values: object) -> list[ModelRecord]:
        """Those for which a condition of SQL holds, the newest first."""
        rows = self._rows(
            "SELECT id, tenant, session, lora, metadata, created, gone FROM models "
            f"WHERE {where} ORDER BY created DESC, id",
            *values,
        )
        return [
            ModelRecord(id, tenant, session, json.loads(lora), json.loads(metadata), created, bool(gone))
            for id, tenant, session, lora, metadata, created, gone in rows
        ]

    def forget_model(self, model: str) -> None:
        """Record that a model is unloaded."""
        with self._writing() as database:
            database.execute("UPDATE models SET gone = 1 WHERE id = ?", (model,))

    # Calls

    def add(
        self, call: ServiceCall, *, most: int, model: ModelRecord | None = None, models: int = 0
    ) -> ServiceCall:
        """Record a call, and with its first one the model itself; durable on return.

        Args:
            most: calls of a tenant that may wait.
            models: those that a tenant may have, if `model` is given.

        Returns:
            The call as it is in the ledger: if the client has sent it before, with what came of it.

        Raises:
            CallRefused: its number was another call's (400), or does not follow the last one's, since an
                earlier call is still on its way (409), or it is one too many (429).
        """
        with self._writing() as database:
            before = self._call(database, "owner = ? AND seq = ?", call.owner, call.seq)
            if before is not None:
                if before.digest != call.digest:
                    raise CallRefused(
                        f"seq_id {call.seq} of {call.owner} was another call: each has a number of its own"
                    )
                return before
            if call.kind != SAMPLE:
                self._check_turn(database, call)
            waiting = "SELECT count(*) FROM calls WHERE state = 'waiting' AND tenant = ?"
            if database.execute(waiting, (call.tenant,)).fetchone()[0] >= most:
                raise CallRefused(
                    f"{most} calls wait already, which is the tenant's quota (calls); send it again later",
                    429,
                )
            if model is not None:
                there = (
                    "SELECT count(*) FROM models WHERE tenant = ? AND NOT gone "
                    "AND session NOT IN (SELECT id FROM sessions WHERE away)"
                )
                if database.execute(there, (call.tenant,)).fetchone()[0] >= models:
                    raise CallRefused(
                        f"{models} models are there already, which is the tenant's quota (models); unload one"
                    )
                row = (
                    model.id,
                    model.tenant,
                    model.session,
                    json.dumps(model.lora),
                    json.dumps(model.metadata),
                )
                database.execute(
                    "INSERT INTO models (id, tenant, session, lora, metadata, created) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    (*row, model.created),
                )
            database.execute(
                "INSERT INTO calls (id, owner, seq, tenant, kind, digest, body, state, arrived) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    call.id,
                    call.owner,
                    call.seq,
                    call.tenant,
                    call.kind,
                    call.digest,
                    call.body,
                    WAITING,
                    time.time(),
                ),
            )
        return call

    @staticmethod
    def _check_turn(database: sqlite3.Connection, call: ServiceCall) -> None:
        last = database.execute("SELECT max(seq) FROM calls WHERE owner = ?", (call.owner,)).fetchone()[0]
        expected = 0 if last is None else last + 1
        if call.seq != expected:
            raise CallRefused(
                f"seq_id {call.seq} of {call.owner} came before {expected}, and calls of a model are taken "
                "in their order; send it again once that one is answered",
                409,
            )

    def next_seq(self, owner: str) -> int:
        """The number that follows an owner's last call."""
        return self._rows("SELECT coalesce(max(seq), -1) + 1 FROM calls WHERE owner = ?", owner)[0][0]

    def call(self, id: str, tenant: str) -> ServiceCall:
        """A call of a tenant.

        Raises:
            CallRefused: there is none with this id (404), or its answer was kept for long enough (410).
        """
        with self._lock:
            found = self._call(self._database, "id = ? AND tenant = ?", id, tenant)
        if found is None:
            raise CallRefused(f"request_id: there is no request {id!r}", 404)
        if found.state != WAITING and found.answer is None:
            raise CallRefused(f"request_id: the answer to {id!r} was kept for answer_hours, and is gone", 410)
        return found

    @staticmethod
    def _call(database: sqlite3.Connection, where: str, *values: object) -> ServiceCall | None:
        row = database.execute(
            f"SELECT id, owner, seq, tenant, kind, digest, body, state, answer FROM calls WHERE {where}",
            values,
        ).fetchone()
        return row and ServiceCall(*row)

    def calls(self, where: str, *values: object) -> list[ServiceCall]:
        """The calls for which a condition of SQL holds, as they arrived."""
        rows = self._rows(
            "SELECT id, owner, seq, tenant, kind, digest, body, state, answer FROM calls "
            f"WHERE {where} ORDER BY rowid",
            *values,
        )
        return [ServiceCall(*row) for row in rows]

    def finish(
        self,
        call: ServiceCall,
        state: str,
        answer: bytes,
        *,
        saved: SavedWeights | None = None,
        sampler: tuple[str, str, str] | None = None,
    ) -> None:
        """Record what came of a call; durable on return.

        Args:
            saved: the checkpoint that it has saved; one of the same path is no longer there.
            sampler: what it has opened: id, session and the path of its weights.
        """
        with self._writing() as database:
            body = None if call.kind == SAMPLE else call.body  # samples are not drawn again
            database.execute(
                "UPDATE calls SET state = ?, answer = ?, body = ? WHERE id = ?",
                (state, answer, body, call.id),
            )
            if saved is not None:
                row = tuple({**vars(saved), "metadata": json.dumps(saved.metadata)}.values())
                database.execute(
                    f"INSERT OR REPLACE INTO checkpoints VALUES ({', '.join('?' * len(row))})", row
                )
            if sampler is not None:
                self._add_sampler(database, sampler[0], call.tenant, sampler[1], sampler[2])

    def forget(self, owner: str, through: int, hours: float) -> None:
        """Drop the bodies of a model's finished calls up to a number, and answers that are old enough."""
        with self._writing() as database:
            database.execute(
                "UPDATE calls SET body = NULL WHERE owner = ? AND seq <= ? AND state != 'waiting'",
                (owner, through),
            )
            database.execute(
                "UPDATE calls SET answer = NULL WHERE state != 'waiting' AND body IS NULL AND arrived < ?",
                (time.time() - 3600 * hours,),
            )

    # Samplers and checkpoints

    def add_sampler(self, id: str, tenant: str, session: str, path: str | None) -> None:
        """Record a sampling session; one that is there stays as it is."""
        with self._writing() as database:
            self._add_sampler(database, id, tenant, session, path)

    @staticmethod
    def _add_sampler(
        database: sqlite3.Connection, id: str, tenant: str, session: str, path: str | None
    ) -> None:
        database.execute(
            "INSERT OR IGNORE INTO samplers (id, tenant, session, path) VALUES (?, ?, ?, ?)",
            (id, tenant, session, path),
        )

    def sampler(self, id: str, tenant: str) -> str | None:
        """The path of the weights from which a sampling session samples; None: the base.

        Raises:
            CallRefused: the tenant has none with this id (404).
        """
        rows = self._rows("SELECT path FROM samplers WHERE id = ? AND tenant = ?", id, tenant)
        if not rows:
            raise CallRefused(f"sampling_session_id: there is no sampling session {id!r}", 404)
        return rows[0][0]

    def join_sampler(self, id: str, tenant: str) -> int:
        """A number for a further client of a sampling session, from 1."""
        self.sampler(id, tenant)
        with self._writing() as database:
            database.execute("UPDATE samplers SET clients = clients + 1 WHERE id = ?", (id,))
            return database.execute("SELECT clients FROM samplers WHERE id = ?", (id,)).fetchone()[0]

    def samplers(self, session: str) -> list[str]:
        """The ids of a session's sampling sessions."""
        return [
            row[0] for row in self._rows("SELECT id FROM samplers WHERE session = ? ORDER BY rowid", session)
        ]

    def checkpoint(self, path: str, tenant: str) -> SavedWeights:
        """A checkpoint of a tenant that has not expired.

        Raises:
            CallRefused: there is none (404).
        """
        found = self.checkpoints("path = ? AND tenant = ?", path, tenant)
        if not found or (found[0].expires is not None and found[0].expires < time.time()):
            raise CallRefused(f"path: there is no checkpoint {path!r}", 404)
        return found[0]

    def checkpoints(self, where: str, *values: object) -> list[SavedWeights]:
        """Those for which a condition of SQL holds, the newest first."""
        rows = self._rows(f"SELECT * FROM checkpoints WHERE {where} ORDER BY created DESC, path", *values)
        names = [one.name for one in fields(SavedWeights)]
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [SavedWeights(**{**one, "metadata": json.loads(one["metadata"])}) for one in found]

    def remove_checkpoint(self, path: str) -> None:
        """Record that a checkpoint is deleted."""
        with self._writing() as database:
            database.execute("DELETE FROM checkpoints WHERE path = ?", (path,))

    def stored(self, tenant: str) -> int:
        """Bytes of all that a tenant has saved."""
        return self._rows("SELECT coalesce(sum(bytes), 0) FROM checkpoints WHERE tenant = ?", tenant)[0][0]

    def folders_in_use(self, model: str) -> Sequence[str]:
        """The folders of a model's checkpoints."""
        return [row[0] for row in self._rows("SELECT folder FROM checkpoints WHERE model = ?", model)]
