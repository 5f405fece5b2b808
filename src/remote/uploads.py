"""Which steps of a run have to be uploaded, and the uploads themselves.

What lies in the object store is noted in a local file as well: retention, which runs while training goes
on, must not wait for a network.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.retention import delete_unkept, reasons_to_keep
from cairn.checkpoint.step_jobs import StepJob
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import SavedStep
from cairn.config.ckpt import CkptConfig
from cairn.remote.client.upload_body import OnBytes, Sent
from cairn.remote.prefix_lease import Taken
from cairn.remote.run_files import RunFiles
from cairn.remote.step_store import FORGOTTEN, AnotherStep, RemoteStore
from cairn.run.files import read_note, write_json
from cairn.run.history import History
from cairn.run.messages import Attempt
from cairn.run.object_store import Refused, RemoteError

# Steps that attempts commit although another one has claimed the prefix: their requests arrived late.


class Overtaken:
    """Finds such steps for the attempt that has claimed the prefix, and uncommits them.

    Args:
        attempt: None if no attempt is under way; then no step is found.
    """

    def __init__(self, remote: RemoteStore, attempt: Attempt | None):
        self._remote = remote
        self._attempt = attempt
        self._known = set[int]()
        """Steps whose manifests were read, and that stay."""

    def find(self) -> list[int]:
        """The steps after the one that the attempt started from, and that another attempt has made."""
        attempt, found = self._attempt, list[int]()
        if attempt is None:
            return found
        for step in self._remote.steps():
            if step <= attempt.start_step or step in self._known:
                continue
            with contextlib.suppress(CheckpointError):
                manifest = self._remote.manifest(step)
                if manifest.run_id == attempt.run_id and manifest.attempt != attempt.number:
                    found.append(step)
                    continue
            self._known.add(step)
        return found

    def set_aside(self, steps: Collection[int]) -> None:
        """Uncommit steps, whether found here or met while committing one of the same number."""
        name = f"of_overtaken_attempts_{secrets.token_hex(4)}"
        self._remote.set_aside(steps, name)
        logger.warning(
            "the remote checkpoints %s, which an older attempt had committed, are set aside: %s/abandoned/%s",
            ", ".join(map(str, steps)),
            self._remote,
            name,
        )


logger = logging.getLogger(__name__)

NOTES = ".remote"
"""Name of the folder beside the steps for notes about uploads."""
ORIGIN = "origin.json"
"""Name of the note that says where the run was forked from."""


@dataclass(frozen=True)
class _Origin:
    """Where the run was forked from: the URL of a step."""

    url: str


def note_origin(store: CheckpointStore, url: str) -> None:
    """Note the URL of the step that a run begins with, so that its first upload copies what that has."""
    folder = store.root / NOTES
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ORIGIN, asdict(_Origin(url)))


TRIES = 3
"""How often a step is sent whose number attempts that were overtaken commit meanwhile."""


@dataclass(frozen=True)
class Uploaded:
    """What is known of the remote steps: the content of a local file.

    uploading: the step that is being uploaded. given_up: why nothing more is uploaded, if so. dropped: the
    steps that the rules of remote steps have deleted there since the uploader has begun.
    """

    steps: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    uploading: int | None = None
    given_up: str | None = None


class RunUploads(StepJob):
    """Which of a run's local steps have to be uploaded.

    Args:
        last: the run's last step, which is uploaded in any case.
        stopped: whether the run ends here for now; then the newest step is uploaded in any case.
    """

    done = "uploaded"
    all_together = 30.0

    def __init__(
        self, store: CheckpointStore, ckpt: CkptConfig, last: int, stopped: Callable[[], bool] = lambda: False
    ):
        super().__init__(store, ckpt.remote_max_waiting)
        self.ckpt = ckpt
        self.last = last
        self.stopped = stopped
        self.notes = store.root / NOTES
        self._file = self.notes / "uploaded.json"

    def read(self) -> Uploaded:
        return read_note(self._file, Uploaded) or Uploaded()

    def write(self, uploaded: Uploaded) -> None:
        self.notes.mkdir(parents=True, exist_ok=True)
        write_json(self._file, asdict(uploaded))

    def origin(self) -> str | None:
        """The URL of the step that the run was forked from, if that is noted."""
        found = read_note(self.notes / ORIGIN, _Origin)
        return found.url if found else None

    def due(self, steps: Iterable[int]) -> list[int]:
        steps, interval = sorted(steps), self.ckpt.remote_interval
        final = {self.last, *(steps[-1:] if interval and self.stopped() else [])}
        return [n for n in steps if interval is None or n % interval == 0 or n in final]

    def sent_file(self, step: int) -> Path:
        """Where it is noted what was sent of a step that is not complete yet."""
        return self.notes / f"step_{step}.sent"

    def give_up(self, reason: str) -> None:
        self.write(replace(self.read(), given_up=reason))

    def missing(self) -> list[int]:
        # A step that the rules of remote steps would not keep is left here.
        noted = self.read()
        due = self.due(self.store.steps())
        kept = self._kept({*due, *noted.steps})
        return [step for step in due if step in kept and step not in (*noted.steps, *noted.dropped)]

    def _kept(self, steps: set[int]) -> set[int]:
        """Those of these steps that the rules of remote steps keep; metrics are known of local steps only."""
        rules = self.ckpt.remote_rules()
        if rules.keep_last is None and rules.keep_best is None:
            return steps
        try:
            pinned, ratings = self.store.pins(), self.store.ratings()
        except CheckpointError:  # retention deletes nothing either
            return steps
        found: list[SavedStep] = []
        for step in steps:
            metrics: Mapping[str, Any] = {}
            if rules.keep_best is not None:
                with contextlib.suppress(CheckpointError):
                    metrics = ratings.metrics(self.store.manifest(step))
            found.append(SavedStep(step, metrics, ratings))
        return {step for step, reasons in reasons_to_keep(found, rules, pinned).items() if reasons}

    def waiting(self) -> list[int]:
        return self.missing() if self.read().given_up is None else []

    def newest_done(self) -> int:
        return max(self.read().steps, default=0)

    def by_worth(self, waiting: Collection[int]) -> list[int]:
        # The step that is being uploaded, then the newest: they are worth most.
        uploading = self.read().uploading
        return sorted(waiting, key=lambda step: (step != uploading, -step))

    def why_missed(self, spared: int, others: int) -> str:
        more = f", nor are {others} steps before it" if others else ""
        return (
            f"uploads are slower than saves, and --ckpt.remote-max-waiting is {self.max_waiting}, so "
            f"retention deletes it{more}"
        )

    def note_missed(self, history: History, step: int, reason: str) -> None:
        history.not_uploaded(step, reason)


class Uploader:
    """Uploads a run's steps, the newest first, and deletes the remote steps that the rules do not keep.

    Args:
        owner: names the attempt that has claimed the remote prefix.
        attempt: that attempt; None if no attempt is under way.
        run_files: small files of the run that a machine with an empty disk needs, such as its metrics. One
            that was there once must be there whenever a step is committed.
        settings: a small file for whoever looks at the run, which an attempt writes once; uploaded at its
            beginning.
        limit: slows sending down, called with the number of bytes before they are sent.
    """

    def __init__(
        self,
        uploads: RunUploads,
        remote: RemoteStore,
        owner: str,
        *,
        attempt: Attempt | None = None,
        run_files: Collection[Path] = (),
        settings: Path | None = None,
        limit: OnBytes = lambda count: None,
    ):
        self.uploads = uploads
        self.remote = remote
        self.owner = owner
        self._overtaken = Overtaken(remote, attempt)
        self.run_files = run_files
        self.settings = settings
        self.limit = limit
        self._run_files = RunFiles(remote.objects)
        self._seen = set[Path]()
        """Those of the run files that have been there."""

    def begin(self) -> None:
        """Compare the notes with what the object store has, and delete there what is of no use.

        That is what the rules of remote steps do not keep, and parts and objects of steps that nobody will go
        on with.

        Raises:
            Taken: another attempt has taken the prefix over.
            RemoteError: the object store refuses or fails.
        """
        self.remote.check_owner(self.owner)
        if self.settings is not None and self.settings.exists():
            self._run_files.put([self.settings], lambda: self.remote.check_owner(self.owner))
        self.uploads.write(Uploaded(tuple(self.remote.steps())))
        self._delete_unkept()
        waiting = self.uploads.missing()
        now = datetime.now(UTC)

        def forgotten(step: int, begun: datetime) -> bool:
            return step not in waiting and now - begun > FORGOTTEN

        self._abort(forgotten)
        try:
            self._remove_leftovers(forgotten)
        except RemoteError as error:
            logger.warning("objects of unfinished uploads may be left: %s", error)

    def gone(self) -> list[int]:
        """The steps that were uploaded and that somebody has deleted since; those that are here wait again.

        Raises:
            RemoteError: the object store refuses or fails.
        """
        there, noted = set(self.remote.steps()), self.uploads.read()
        found = [step for step in noted.steps if step not in there]
        if found:
            left = tuple(step for step in noted.steps if step in there)
            self.uploads.write(replace(noted, steps=left))
        return found

    def end(self) -> None:
        """Forget what is left of this run's attempts, once its last step is there.

        That is parts and objects of all steps that do not exist, and steps of attempts that were overtaken.

        Nothing is done if another attempt has taken the prefix over, or if the object store fails.
        """
        try:
            self.remote.check_owner(self.owner)
            self._set_overtaken_aside()
            self._abort(lambda step, begun: True)
            self._remove_leftovers(lambda step, begun: True)
        except (RemoteError, Taken) as error:
            logger.warning(
                "parts and objects of earlier uploads, or steps of other attempts, may be left: %s", error
            )

    def _remove_leftovers(self, useless: Callable[[int, datetime], bool]) -> None:
        """Delete what is left of steps that don't exist, if step and time of the newest object say so."""
        for left in self.remote.leftovers():
            if useless(left.step, left.newest):
                logger.warning("removing what is left of step %d in %s", left.step, self.remote)
                self.remote.check_owner(self.owner)
                self.remote.objects.delete(left.names)

    def _abort(self, useless: Callable[[int, datetime], bool]) -> None:
        """Abort the unfinished uploads whose step and time of beginning say so, or whose step is there."""
        there = self.uploads.read().steps
        for step, unfinished in self.remote.unfinished():
            if step in there or useless(step, unfinished.begun):
                try:
                    self.remote.objects.abort(unfinished)
                except Refused as error:
                    logger.warning("parts of unfinished uploads are left: %s", error)
                    return

    def next_step(
        self, skipped: Collection[int] = (), ends: Callable[[int], bool] = lambda step: True
    ) -> int | None:
        """The step to upload next, which is none of `skipped`; None if none waits.

        It is the newest whose upload ends in time, as `ends` says; if none does, the newest.
        """
        self._look_at_run_files()
        waiting = [step for step in self.uploads.waiting() if step not in skipped]
        return max(filter(ends, waiting), default=max(waiting, default=None))

    def upload(self, step: int, on_bytes: OnBytes = lambda count: None) -> None:
        """Upload a step, then delete what the rules do not keep.

        Steps that were committed by attempts which this one has overtaken are uncommitted first: such an
        attempt read `run.json` before this one claimed the prefix, and what it sent arrived afterwards.

        Raises:
            Taken: another attempt has taken the prefix over.
            RemoteError: the object store refuses or fails.
            Damaged: a local file is not what the manifest says.
            CheckpointError: the step was deleted meanwhile.
            FileNotFoundError: a file of the step or of the run was deleted meanwhile.
        """
        self._look_at_run_files()
        store = self.uploads.store
        self.uploads.write(replace(self.uploads.read(), uploading=step))
        try:
            manifest = store.manifest(step)

            def guard() -> None:  # else an attempt that was overtaken could spoil steps of the newer one
                self.remote.check_owner(self.owner)

            def check() -> None:
                # One that is gone: the run directory is being deleted.
                self._run_files.put(self._seen, guard)

            self._set_overtaken_aside()
            sent = Sent(self.uploads.sent_file(step), manifest)
            for tried in range(TRIES):
                try:
                    self.remote.put(
                        store.folder(step),
                        manifest,
                        sent,
                        pace=self.limit,
                        on_bytes=on_bytes,
                        guard=guard,
                        check=check,
                    )
                    break
                except AnotherStep as error:
                    if error.found.run_id != manifest.run_id or tried == TRIES - 1:
                        raise
                    self._set_overtaken_aside([step])
                    sent.remove()  # the other attempt may have replaced any of the objects
                    sent = Sent(sent.path, manifest)
        except BaseException:
            self.uploads.write(replace(self.uploads.read(), uploading=None))
            raise
        sent.remove()
        noted = self.uploads.read()
        self.uploads.write(replace(noted, steps=(*noted.steps, step), uploading=None))
        try:
            guard()
            self._set_overtaken_aside()  # it would count as one of the newest
        except RemoteError as error:
            logger.warning("no remote checkpoint is deleted: %s", error)
            return
        self._delete_unkept()

    def _set_overtaken_aside(self, steps: Collection[int] | None = None) -> None:
        """Uncommit steps of overtaken attempts; those here of the same numbers wait to be uploaded again.

        Args:
            steps: which; None for all that are found.
        """
        if not (steps := self._overtaken.find() if steps is None else steps):
            return
        self.remote.check_owner(self.owner)
        self._overtaken.set_aside(steps)
        noted = self.uploads.read()
        left = tuple(step for step in noted.steps if step not in steps)
        self.uploads.write(replace(noted, steps=left))

    def _look_at_run_files(self) -> None:
        self._seen.update(path for path in self.run_files if path.exists())

    def _delete_unkept(self) -> None:
        """Delete remote steps by their own rules; pinned steps stay here as on the local disk.

        What fails is logged: the step before it is there all the same. The next call tries it again.
        """
        rules = self.uploads.ckpt.remote_rules()
        if rules.keep_last is None and rules.keep_best is None:
            return
        try:
            pinned, ratings = self.uploads.store.pins(), self.uploads.store.ratings()
            deleted = delete_unkept(self.remote, rules, pinned, ratings)
        except (CheckpointError, RemoteError) as error:
            logger.warning("no remote checkpoint is deleted: %s", error)
            return
        found = self.uploads.read()
        left = tuple(step for step in found.steps if step not in deleted)
        self.uploads.write(replace(found, steps=left, dropped=(*found.dropped, *deleted)))


class Limit:
    """Slows threads down to so many bytes a second, all of them together.

    Args:
        rate: None for no limit.
    """

    def __init__(self, rate: int | None, now: Callable[[], float] = time.monotonic):
        self.rate = rate
        self._now = now
        self._free_at = now()
        self._booking = threading.Lock()

    def __call__(self, count: int) -> None:
        """Return when `count` more bytes may go."""
        if self.rate is None:
            return
        with self._booking:
            self._free_at = free_at = max(self._free_at, self._now()) + count / self.rate
        time.sleep(max(0.0, free_at - self._now()))
