"""The run directory: what lies where, who is running, and the small messages between roles."""

import contextlib
import fcntl
import os
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cairn.run.batches import Batch, batch_path, read_batch, read_info
from cairn.run.files import read_json, write_json
from cairn.run.history import History
from cairn.run.metrics import MetricsLog

WEIGHT_SOURCE = "source.json"
"""In a policy version's folder, in place of its tensors: where servers get them."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, first or resumed; every message between roles carries its id."""

    run_id: str
    number: int
    command: str
    """The command that started it: sft, rl or trainer."""
    start_step: int
    """Optimiser steps that were done before this attempt."""
    resume_from: str | None
    """The step_N folder that every role goes on from; None starts fresh."""
    branch: str
    """The branch of the run that its checkpoints belong to."""

    @property
    def id(self) -> str:
        """Names the attempt in messages."""
        return f"{self.run_id}:{self.number}"

    def version(self, step: int) -> str:
        """The name under which a server knows the policy after `step` optimiser steps."""
        return f"{self.run_id}:{self.branch}:{step}"


def policy_step(version: str) -> int:
    """How many optimiser steps made the policy that `Attempt.version` named so."""
    return int(version.rpartition(":")[2])


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    stopped: str | None
    """Why it stopped before its last step, if it did."""
    saved: bool
    """Whether the last step's checkpoint exists."""


class RunDirectory:
    """Everything that a run owns (docs/training.md, "The run directory")."""

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None):
        self.path = Path(path).absolute()
        self.checkpoints = Path(checkpoints).absolute() if checkpoints else self.path / "checkpoints"
        self.config = self.path / "config.json"
        self.metrics = MetricsLog(self.path / "metrics.jsonl")
        self.history = History(self.path / "history.jsonl")
        self.logs = self.path / "logs"
        self.heartbeats = self.path / "heartbeats"
        self.roles = self.path / "roles.json"
        self.batches = self.path / "batches"
        self.ledger = self.path / "ledger.sqlite"
        self.weights = self.path / "weights"
        self.servers = self.path / "servers.json"
        self._stop = self.path / "stop.json"
        self._lock: int | None = None

    # The attempt, written by whoever launches the run and read by its roles.

    def begin(self, attempt: Attempt) -> None:
        """Make `attempt` the current one, with no role running yet."""
        self._stop.unlink(missing_ok=True)
        write_json(self.roles, {**asdict(attempt), "roles": {}})

    def attempt(self) -> Attempt | None:
        """The current or latest attempt, if there ever was one."""
        content = read_json(self.roles)
        if content is None:
            return None
        return Attempt(**{key: content[key] for key in Attempt.__dataclass_fields__})

    def heartbeat(self, role: str) -> Path:
        """Where the process that has `role` gives its signs of life."""
        return self.heartbeats / f"{role}.json"

    def last_sign(self) -> float | None:
        """When anybody was last seen at work here, in seconds since 1970."""
        signs = [*self.heartbeats.glob("*.json"), self.metrics.path, self.roles]
        return max((path.stat().st_mtime for path in signs if path.exists()), default=None)

    def set_role(self, role: str, state: str, pid: int | None = None, host: str | None = None) -> None:
        """Record in roles.json that `role` is now in `state`: running, waiting, done, stopped or failed.

        `pid` and `host` are this process's own unless given.
        """
        folder = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # roles that were started one by one write it themselves
            content = read_json(self.roles)
            content["roles"][role] = {
                "role": role,
                "pid": pid or os.getpid(),
                "host": host or socket.gethostname(),
                "attempt": content["number"],
                "state": state,
            }
            write_json(self.roles, content)
        finally:
            os.close(folder)

    def end_roles(self, state: str, *prefixes: str) -> None:
        """Set those that roles.json says are running or waiting to `state`: the names that begin so."""
        for name, entry in (read_json(self.roles) or {}).get("roles", {}).items():
            if name.startswith(prefixes) and entry["state"] in ("running", "waiting"):
                self.set_role(name, state, entry["pid"], entry["host"])

    def lock(self) -> bool:
        """Keep other launchers out while this process lives; False if one is at work already."""
        if self._lock is not None:
            return True
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # closes with the process
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._lock = fd
        return True

    def live_attempt(self) -> Attempt | None:
        """The current attempt, if its launcher is alive and its trainer runs."""
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            roles = (read_json(self.roles) or {}).get("roles", {})
            return self.attempt() if roles.get("trainer", {}).get("state") == "running" else None
        finally:
            os.close(fd)

    def clear_weights(self) -> None:
        """Remove the policy versions of an earlier attempt, which nobody waits for any more."""
        shutil.rmtree(self.weights, ignore_errors=True)

    def set_batches_aside(self, folder: Path, attempt: Attempt) -> None:
        """Move into `folder` the batches that `attempt` does not go on with, and another branch's ledger."""
        earlier = self.attempt()
        same = earlier and (earlier.run_id, earlier.branch) == (attempt.run_id, attempt.branch)
        ledger = [Path(f"{self.ledger}{suffix}") for suffix in ("", "-wal", "-shm")]
        doomed = [] if same else ledger
        if self.batch(attempt, attempt.start_step + 1) is None:
            doomed.append(self.batches)
        for path in doomed:
            if path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                path.rename(folder / path.name)

    def batch(self, attempt: Attempt, step: int) -> Batch | None:
        """The batch of optimiser step `step`, if it was shipped by this branch of this run.

        Raises:
            BadBatch: it was, by a version of Cairn that wrote too little about it.
        """
        path = batch_path(self.batches, step)
        try:
            info = read_info(path)
            belongs = (info.get("run_id"), info.get("branch")) == (attempt.run_id, attempt.branch)
            return read_batch(path) if belongs else None
        except FileNotFoundError:
            return None

    def forget_batches(self, step: int) -> None:
        """Remove the batches through `step`, which a committed checkpoint has made needless."""
        for path in self.batches.glob("step_*.safetensors"):
            if int(path.stem.removeprefix("step_")) <= step:
                path.unlink()

    # Asking a run to stop: any role may, the trainer heeds it at the next step boundary.

    def request_stop(self, reason: str) -> None:
        """Ask the run to save and stop at the next step boundary."""
        write_json(self._stop, {"reason": reason})

    def stop_requested(self) -> str | None:
        """The reason for which somebody asked the run to stop, if so."""
        content = read_json(self._stop)
        return content["reason"] if content else None

    # Policy versions, published by the trainer and picked up by the orchestrator.

    def announce_version(self, attempt: Attempt, step: int, *, save: bool, last: bool) -> None:
        """Say that the policy after `step` steps lies in `weights/v<step>`.

        `save`: step `step` is a checkpoint, so every role saves its part. `last`: the run ends here.
        """
        message = {"attempt": attempt.id, "version": step, "save": save, "last": last}
        write_json(self.version_folder(step).with_suffix(".json"), message)

    def announced_version(self, attempt: Attempt, step: int) -> dict[str, Any] | None:
        """The announcement of version `step` by this attempt, if it is there yet."""
        message = read_json(self.version_folder(step).with_suffix(".json"))
        return message if message and message["attempt"] == attempt.id else None

    def announced_versions(self, attempt: Attempt) -> list[int]:
        """The versions that this attempt has announced and not yet removed, oldest first."""
        steps = [int(path.stem.removeprefix("v")) for path in self.weights.glob("v*.json")]
        return sorted(step for step in steps if self.announced_version(attempt, step))

    def forget_versions(self, step: int) -> None:
        """Remove the policy versions before `step`, which no server will be given any more.

        One of their folders becomes `spare_weights`, for the trainer to write a new version into: memory that
        the page cache has already is several times as fast to write as new memory.
        """
        for path in self.weights.glob("v*.json"):
            if int(path.stem.removeprefix("v")) < step:
                with contextlib.suppress(OSError):  # there is one already, or nothing to keep
                    os.rename(path.with_suffix(""), self.spare_weights)
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)

    @property
    def spare_weights(self) -> Path:
        """A version's folder that nobody needs any more, if it is there."""
        return self.weights / ".spare"

    def version_folder(self, step: int) -> Path:
        """The Hugging Face directory of the policy after `step` steps, while it is in transit."""
        return self.weights / f"v{step}"
