"""The run directory: what lies where, who is at work in it, and what it was asked."""

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cairn.run.batches import BadBatch, RLBatch, batch_files, batch_path, open_batch, read_batch, read_origin
from cairn.run.file_system import flock, open_lock
from cairn.run.files import DamagedFile, entries, read_json, read_note, set_aside, write_json
from cairn.run.heartbeat import Beat
from cairn.run.history import History, RewindLog
from cairn.run.jsonlines import as_object
from cairn.run.locked_folder import LockedFolder
from cairn.run.messages import Attempt, Deadline, PolicyVersions, RoleEntry, StopRequest
from cairn.run.metrics import MetricsLog
from cairn.run.waiting import Rates

if TYPE_CHECKING:
    from pydantic import BaseModel

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound="BaseModel")

ROLLOUTS_NAME = re.compile(r"step_([0-9]+)\.parquet")
EVALUATION_NAME = re.compile(r".*_step_([0-9]+)\.sqlite(?:-[a-z]+)?")

JOURNALS = ("-wal", "-shm", "-journal")
"""Ends of the names of SQLite's journals, which belong to the file that is named like them without it."""
RESERVE_SECONDS = 2.0
"""Seconds before a deadline that are left for ending processes, and for a scheduler's commands after them."""
NO_RUN = "is not a run directory: it has no roles.json, metrics.jsonl or history.jsonl"
"""What is said of a folder of which `RunDirectory.exists` is false."""


@dataclass(frozen=True)
class _Roles(Attempt):
    """The content of roles.json: the attempt, and who is at work on it."""

    roles: dict[str, RoleEntry] = field(default_factory=dict)

    @property
    def attempt(self) -> Attempt:
        return Attempt(**{name: getattr(self, name) for name in Attempt.__dataclass_fields__})


def checkpoints_by(config: Mapping[str, Any] | None, run: Path) -> Path:
    """The folder of the checkpoints of the run at `run`, by the content of its config.json, if it has any."""
    folder = as_object(as_object(config).get("ckpt")).get("dir")
    return RunDirectory(run, folder if isinstance(folder, str) else None).checkpoints


class RunDirectory(LockedFolder):
    """Everything that a run owns (docs/reference/run-directory.md), and nobody else writes to.

    Any of its files may be damaged when a run starts: a power cut leaves files empty, disks lose sectors.
    Those that are read here are read with that in mind; `mend` makes room for what has to be written.
    """

    def __init__(self, path: str | Path, checkpoints: str | Path | None = None):
        super().__init__(Path(path).absolute())
        self.checkpoints = Path(checkpoints).absolute() if checkpoints else self.path / "checkpoints"
        self.config = self.path / "config.json"
        self.recipe = self.path / "recipe.json"
        self.metrics = MetricsLog(self.path / "metrics.jsonl")
        self.evals = MetricsLog(self.path / "evals.jsonl")
        self.evaluations = self.path / "evals"
        self.history = History(self.path / "history.jsonl")
        self.logs = self.path / "logs"
        self.heartbeats = self.path / "heartbeats"
        self.spans = self.path / "spans"
        self.roles = self.path / "roles.json"
        self.batches = self.path / "batches"
        self.trained = self.path / "trained"
        """Batches that a checkpoint has made needless, as far as they are kept."""
        self.rollouts = self.path / "rollouts"
        self.tokens = self.path / "tokens"
        self.ledger = self.path / "ledger.sqlite"
        self.remade = self.path / "remade.json"
        """What batches were that are made again, written by the orchestrator while there are any."""
        self.memory = self.path / "memory"
        self.weights = self.path / "weights"
        self.versions = PolicyVersions(self.weights)
        self.servers = self.path / "servers.json"
        self.sessions = self.path / "sessions.json"
        """Which server has which answers in the making, written by the orchestrator."""
        self.rates = Rates(self.path / "rates")
        self.rewinds = RewindLog(self.path / "rewinds.json")
        self._stop = self.path / "stop.json"
        self._deadline = self.path / "deadline.json"
        self._warned = False
        self._known: Attempt | None = None
        """The newest attempt that was read or begun here, in case that roles.json is damaged meanwhile."""

    def exists(self) -> bool:
        """Whether there is a run here. A config.json alone is no sign of one: every model's folder has it."""
        return any(path.is_file() for path in (self.roles, self.metrics.path, self.history.path))

    def mend(self) -> None:
        """Move what can't be read or written, as a file or folder of the run, aside: `NAME.damaged-N`.

        Whatever was damaged is kept, and reported here once. To be called while nobody is at work here.

        Raises:
            OSError: something can't be moved.
        """
        files = [self.roles, self.config, self.recipe, self.metrics.path, self.evals.path, self.history.path]
        files += [self._stop, self._deadline, self.rewinds.path, *entries(self.heartbeats, ".json")]
        folders = [
            self.logs,
            self.heartbeats,
            self.spans,
            self.batches,
            self.trained,
            self.rollouts,
            self.tokens,
            self.memory,
            self.weights,
            self.rates.folder,
        ]
        wrong = [path for path in files if os.path.lexists(path) and not path.is_file()]
        wrong += [path for path in folders if os.path.lexists(path) and not path.is_dir()]
        for path in wrong:
            logger.warning("%s is no %s; it is now %s", path, _kind(path in files), set_aside(path).name)
        objects = [(path, dict) for path in (self.config, self.recipe, self.rewinds.path)]
        for path, shape in [(self.roles, _Roles), *objects]:
            with self._aside_if_damaged(path):
                read_json(path, shape)
        for _, path in batch_files(self.batches):
            # One of another version is refused by whoever needs it; a link to nothing is replaced.
            with self._aside_if_damaged(path), contextlib.suppress(BadBatch, FileNotFoundError):
                read_batch(path)
        self.history.drop()

    @staticmethod
    @contextlib.contextmanager
    def _aside_if_damaged(path: Path) -> Generator[None]:
        try:
            yield
        except DamagedFile as error:
            logger.warning("%s; it is now %s", error, set_aside(path).name)

    def read_config(self, shape: type[Config], *, of_any_version: bool = False) -> Config:
        """The configuration of the current attempt, which is of the pydantic model `shape`.

        Args:
            of_any_version: whether settings that this version of Cairn does not have are left out.

        Raises:
            DamagedFile: it can't be read.
        """
        try:
            content = self.config.read_bytes()
            return shape.model_validate_json(content, extra="ignore" if of_any_version else None)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise DamagedFile(
                f"{self.config}: can't be read: {reason}; start the run again with --ckpt.resume auto"
            ) from None

    # The attempt, written by whoever launches the run and read by its roles.

    def begin(self, attempt: Attempt) -> None:
        """Make `attempt` the current one, with no role running yet."""
        self.forget_stop()
        self._known = attempt
        write_json(self.roles, {**asdict(attempt), "roles": {}}, durable=True)
        self.note_begun()

    def attempt(self) -> Attempt | None:
        """The current or latest attempt; None if there never was one, or if what says so is damaged."""
        content = self._read_roles()
        return content.attempt if content else None

    def _read_roles(self) -> _Roles | None:
        content = read_note(self.roles, _Roles)
        if content:
            self._known = content.attempt
        return content

    def evaluated(self, name: str) -> Path:
        """Where the answers of an evaluation are kept: a file a step, as in `rollouts`."""
        return self.evaluations / name / "rollouts"

    def calls(self, role: str) -> Path:
        """Where a role notes its calls of user code (`run/noted_calls.py`)."""
        return self.heartbeats / f"{role}.calls"

    def heartbeat(self, role: str) -> Path:
        """Where the process that has `role` writes its heartbeat."""
        return self.heartbeats / f"{role}.json"

    def spans_of(self, role: str) -> Path:
        """Where the process that has `role` records what it did when (`run/spans.py`)."""
        return self.spans / f"{role}.jsonl"

    def beats(self) -> dict[str, Beat]:
        """The newest heartbeat of each process that ever wrote one here, by the name of its role."""
        notes = {path.stem: read_note(path, Beat) for path in entries(self.heartbeats, ".json")}
        return {role: beat for role, beat in sorted(notes.items()) if beat is not None}

    def last_active(self) -> float | None:
        """When anybody was last seen at work here, in seconds since 1970."""
        files = [*self.heartbeats.glob("*.json"), self.metrics.path, self.roles]
        return max((path.stat().st_mtime for path in files if path.exists()), default=None)

    def set_role(self, role: str, state: str, pid: int | None = None, host: str | None = None) -> None:
        """Record in roles.json that `role` is now in `state`: running, waiting, done, stopped or failed.

        `pid` and `host` are this process's own unless given. A run goes on if it can't be written.
        """
        if self.has_moved():
            return
        try:
            self._set_role(role, state, pid or os.getpid(), host or socket.gethostname())
        except OSError as error:
            if not self._warned:
                logger.warning("%s is not up to date from now on: %s", self.roles, error.strerror)
            self._warned = True

    def _set_role(self, role: str, state: str, pid: int, host: str) -> None:
        path = self.path / ".roles.lock"
        fd = open_lock(path)
        try:
            flock(fd, fcntl.LOCK_EX, path)  # roles that were started one by one write it themselves
            content = self._read_roles()
            attempt = content.attempt if content else self._known
            if attempt is None:
                logger.warning("%s is damaged, so it does not say that %s is %s", self.roles, role, state)
                return
            roles = dict(content.roles) if content else {}
            roles[role] = RoleEntry(role, pid, host, attempt.number, state)
            entries = {name: asdict(entry) for name, entry in roles.items()}
            write_json(self.roles, {**asdict(attempt), "roles": entries}, durable=True)
        finally:
            os.close(fd)

    def end_roles(self, state: str, *prefixes: str) -> None:
        """Set those that roles.json says are running or waiting to `state`: the names that begin so."""
        content = self._read_roles()
        for name, entry in (content.roles if content else {}).items():
            if name.startswith(prefixes) and entry.state in ("running", "waiting"):
                self.set_role(name, state, entry.pid, entry.host)

    def current_roles(self) -> dict[str, RoleEntry] | None:
        """What roles.json says of each role, by name; None if it is damaged."""
        content = self._read_roles()
        return content.roles if content else None

    def live_attempt(self) -> Attempt | None:
        """The current attempt, if its launcher is alive and its trainer runs."""
        if not self.has_begun():
            return None
        content = self._read_roles()
        trainer = content.roles.get("trainer") if content else None
        return content.attempt if content and trainer and trainer.state == "running" else None

    def set_batches_aside(self, folder: Path, attempt: Attempt) -> None:
        """Move batches, rollouts and a ledger that `attempt` does not go on with into `folder`."""
        earlier = self.attempt()
        # If there is no saying, the ledger itself says whose it is to whoever opens it.
        same = earlier is None or (earlier.run_id, earlier.branch) == (attempt.run_id, attempt.branch)
        ledger = [Path(f"{self.ledger}{suffix}") for suffix in ("", *JOURNALS)]
        doomed = [] if same else [*ledger, self.remade]
        if self.batch(attempt, attempt.start_step + 1) is None:
            doomed += [self.batches, *self._rollouts_after(attempt.start_step)]
        doomed += [path for step, path in batch_files(self.trained) if step > attempt.start_step]
        for path in doomed:
            if path.exists():
                aside = folder / path.relative_to(self.path)
                aside.parent.mkdir(parents=True, exist_ok=True)
                path.rename(aside)

    def _rollouts_after(self, step: int) -> list[Path]:
        found = {path: ROLLOUTS_NAME.fullmatch(path.name) for path in entries(self.rollouts, ".parquet")}
        return [path for path, match in found.items() if match and int(match[1]) > step]

    def forget_evaluations(self, attempt: Attempt, step: int) -> int:
        """Forget results and answers of the policies after `step` of this branch, which will be others now.

        Returns how many results there were.
        """
        branch = {"run_id": attempt.run_id, "branch": attempt.branch}
        dropped = self.evals.drop(lambda row: row["step"] <= step or not branch.items() <= row.items())
        for path in entries(self.evaluations, ""):
            if (match := EVALUATION_NAME.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()
        for path in self.evaluations.glob("*/rollouts/*.parquet"):
            if (match := ROLLOUTS_NAME.fullmatch(path.name)) and int(match[1]) > step:
                path.unlink()
        return dropped

    def batch(self, attempt: Attempt, step: int) -> RLBatch | None:
        """The batch of optimiser step `step`, if it was shipped by this branch of this run.

        Raises:
            BadBatch: it was, by a version of Cairn that wrote too little about it.
            DamagedFile: its file is damaged.
        """
        return self._batch(attempt, step, read_batch)

    def open_batch(self, attempt: Attempt, step: int) -> RLBatch | None:
        """As `batch`, but samples are read, and compared with what was written, when they are asked for."""
        return self._batch(attempt, step, open_batch)

    def _batch(self, attempt: Attempt, step: int, read: Callable[[Path], RLBatch]) -> RLBatch | None:
        path = batch_path(self.batches, step)
        try:
            belongs = read_origin(path) == (attempt.run_id, attempt.branch)
            return read(path) if belongs else None
        except FileNotFoundError:
            return None

    def forget_batches(self, step: int, *, keep_bytes: float = 0) -> None:
        """Remove the batches through `step`, which a committed checkpoint has made needless.

        Args:
            keep_bytes: so much of them, the newest, is moved to `trained` instead. One that can't be moved is
                removed.
        """
        for number, path in batch_files(self.batches):
            if number > step:
                continue
            with contextlib.suppress(OSError):
                if keep_bytes:
                    self.trained.mkdir(exist_ok=True)
                    path.rename(batch_path(self.trained, number))
            path.unlink(missing_ok=True)
        total = 0
        for _, path in reversed(batch_files(self.trained) if keep_bytes else []):
            total += path.stat().st_size
            if total > keep_bytes:
                path.unlink()

    def batch_steps(self) -> list[int]:
        """The steps that have a batch's file in transit, oldest first; of whichever branch."""
        return [step for step, _ in batch_files(self.batches)]

    # Asking a run to stop: any role may, the trainer heeds it at the next step boundary.

    def request_stop(self, reason: str, seconds: float | None = None) -> None:
        """Ask the run to save and stop at the next step boundary.

        Args:
            seconds: the time until the run must have ended; only its launcher says so. Of several deadlines
                the earliest counts.
        """
        if seconds is not None:
            self._end_by(time.time() + seconds)
        write_json(self._stop, StopRequest(reason).to_json())

    def _end_by(self, deadline: float) -> None:
        earlier = read_note(self._deadline, Deadline)
        deadline = min(deadline, earlier.time) if earlier else deadline
        write_json(self._deadline, Deadline(deadline).to_json())

    def end_with(self, other: "RunDirectory") -> None:
        """Heed the deadline of another folder, too, if it has one: that of all branches of a run."""
        if content := read_note(other._deadline, Deadline):
            self._end_by(content.time)

    def forget_stop(self) -> None:
        """Forget what an earlier attempt was asked, and its deadline."""
        self._stop.unlink(missing_ok=True)
        self._deadline.unlink(missing_ok=True)

    def stop_requested(self) -> str | None:
        """The reason for which somebody asked the run to stop, if so."""
        content = read_note(self._stop, StopRequest)
        return content.reason if content else None

    def has_stopped(self) -> bool:
        """Whether the trainer has ended because the run was asked to stop: no step is saved any more."""
        trainer = (self.current_roles() or {}).get("trainer")
        ended = trainer is not None and trainer.state not in ("running", "waiting")
        return ended and self.stop_requested() is not None

    def seconds_left(self) -> float | None:
        """Seconds until the run must have ended, with a reserve for its end; None without a deadline."""
        content = read_note(self._deadline, Deadline)
        return content.time - RESERVE_SECONDS - time.time() if content else None


def _kind(file: bool) -> str:
    return "file" if file else "folder"
