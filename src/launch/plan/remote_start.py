"""The object store behind a run's local checkpoints, as the launcher sees it before any role runs.

A run resumes from the nearest good step: the local one if it is whole, else the remote one. Of that, the
ranks read their own ranges in the object store, where that is possible (`_Nearest._streams`); else it is
downloaded into the local store first. A machine with an empty disk goes on in the same way.
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint import eval_metrics
from cairn.checkpoint.manifest import CheckpointError, Manifest, check_files, split_step
from cairn.checkpoint.step_folder import step_of
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.config.kinds import RunConfig
from cairn.launch.jobs.upload import small_files
from cairn.launch.start import newest_attempt, verified_before_loading
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.remote.client.objects import probe
from cairn.remote.header_download import bring_beginnings
from cairn.remote.run_files import Copies, RunFiles
from cairn.remote.uploads import note_origin
from cairn.run.directory import JOURNALS, RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, parse_json, write_atomic, write_json
from cairn.run.jsonlines import JsonLines, Row
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.run.metrics import ranges_of
from cairn.run.object_store import NoCredentials, TransientError, is_url
from cairn.run.output import progress_bars

FETCHED = "fetched"
"""Name of the folder in the run directory for a remote step of another run that this run starts from."""


def is_remote(config: RunConfig) -> bool:
    """Whether what a run starts from may be in an object store."""
    ckpt = config.ckpt
    return ckpt is not None and bool(ckpt.remote or (ckpt.resume and is_url(ckpt.resume)))


def with_remote(config: RunConfig, needs: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """Bring what is needed here of the step to resume from, if it is in an object store only.

    Args:
        needs: the parts that the checkpoint must have, as for `choose_start`.

    Returns:
        The configuration, in which a URL to resume from is replaced by a local folder; and the folder of the
        step whose tensors the ranks read in the object store, if they do.

    Raises:
        UsageError: the object store can't be used like this.
        RemoteError: it fails in a way that may pass.
    """
    ckpt = config.ckpt
    if ckpt is None or not is_remote(config):
        return config, None
    run, away = config.run_directory(), None
    make_folders(run.path)
    lock(run)
    try:
        if ckpt.remote:
            with _looking_for("--ckpt.remote", ckpt.remote):
                away = _Nearest(config, needs).bring()
        if ckpt.resume and is_url(ckpt.resume):
            fetched = {"resume": str(_fetched(run, ckpt.resume))}
            if ckpt.remote:
                note_origin(CheckpointStore(run.checkpoints), ckpt.resume)
            return config.sharing(ckpt=ckpt.model_copy(update=fetched)), away
        return config, away
    finally:
        run.unlock()  # `begin` takes the lock again


def replaced(config: RunConfig, damaged: Path) -> bool:
    """Replace a step that turned out to be damaged when ranks read it by the remote one, read in full.

    If there is none, or it is damaged, too, the newest good one before it is brought here, unless the user
    has named the step. False if it is not the same step that is now in the local store.

    Raises:
        UsageError: the object store refuses.
        RemoteError: it fails in a way that may pass.
    """
    ckpt = config.ckpt
    if ckpt is None or ckpt.remote is None:
        return False
    with _looking_for("--ckpt.remote", ckpt.remote):
        return _Nearest(config).replace(damaged)


class _Nearest:
    """Looks for the nearest good step, and brings it here if it is a remote one.

    Args:
        needs: the parts that the checkpoint must have; None: ranks shall not read it in the object store.
    """

    def __init__(self, config: RunConfig, needs: Sequence[str] | None = None):
        ckpt = config.ckpt
        assert ckpt is not None
        assert ckpt.remote is not None
        self.config = config
        self.ckpt = ckpt
        self.needs = needs
        self.run: RunDirectory = config.run_directory()
        self.remote = RemoteStore(Objects(ckpt.remote))
        self.store = CheckpointStore(self.run.checkpoints)
        self.behind: int | None = None
        """The newest attempt on this disk, if a newer one has begun elsewhere since."""

    def bring(self) -> Path | None:
        """Bring the step to resume from here, unless a local one will do.

        Returns:
            The folder of the step whose tensors the ranks read in the object store, if they do.
        """
        probe(self.remote.objects, secrets.token_hex(4))
        shutil.rmtree(self.store.away, ignore_errors=True)
        owner = self.remote.owner()
        if owner is None:
            return None
        if not self.ckpt.resumes:
            raise UsageError(
                f"--ckpt.remote {self.remote}: belongs to run {owner} already; go on with it with "
                "--ckpt.resume auto, or give another prefix"
            )
        own = self._own_run()
        if own not in (None, owner):
            raise UsageError(
                f"--ckpt.remote {self.remote}: belongs to run {owner}, but {self.run.path} is run {own}; "
                "give another prefix"
            )
        noted = self.remote.newest_attempt()
        here = newest_attempt(self.run, self.store)
        if own is not None and isinstance(number := noted.get("number"), int) and number > here:
            self.behind = here
        if own is None or (self.behind is not None and not self.store.steps()):
            self._take_up(owner, noted)
        away = self._bring_newest()
        # Also if the local step is the newest: the disk may be an older copy of itself but for its steps.
        bring_rows(self.run, self.store, self.remote.objects)
        return away

    def _bring_newest(self, without: Collection[int] = ()) -> Path | None:
        local, remote = self.store.steps(), self.remote.steps()
        newest = max([*local, *remote], default=None)
        candidates = [self.ckpt.resume_step]
        if self.ckpt.resume_step is None:
            candidates = sorted({*local, *remote}.difference(without), reverse=True)
        for step in candidates:
            if step is None or self._is_good(step, is_newest=step == newest):
                return None
            if step not in remote:
                continue
            try:
                manifest = self.remote.manifest(step)
                if step == newest and self._streams(manifest):
                    return self._stream(manifest)
                self._fetch(manifest)
                return None
            except CheckpointError as error:
                print(f"passing over a remote checkpoint: {error}", flush=True)
        return None

    def _take_up(self, run_id: str, noted: Mapping[str, Any]) -> None:
        """Note the run's newest attempt here, so that this one goes on with its id and branch.

        A machine may be lost before its first step is uploaded.
        """
        number, branch, command = (noted.get(name) for name in ("number", "branch", "command"))
        if isinstance(number, int) and isinstance(branch, str) and isinstance(command, str):
            self.run.begin(Attempt(run_id, number, command, start_step=0, resume_from=None, branch=branch))

    def replace(self, damaged: Path) -> bool:
        """Download a step in place of the one in the folder `damaged`, or else the newest good one before it.

        Returns:
            Whether it is the same step.
        """
        shutil.rmtree(self.store.away, ignore_errors=True)
        if damaged.parent not in (self.store.root, self.store.away):
            return False
        step = step_of(damaged)
        if step in self.remote.steps():
            try:
                self._fetch(self.remote.manifest(step))
                return True
            except CheckpointError as error:
                print(f"passing over a remote checkpoint: {error}", flush=True)
        if self.ckpt.resume not in ("auto", "latest"):
            return False
        later = [number for number in {*self.store.steps(), *self.remote.steps()} if number >= step]
        self._bring_newest(without=later)
        return False

    def _streams(self, manifest: Manifest) -> bool:
        """Whether ranks read their ranges of a step in the object store.

        The step is downloaded whole instead where others read it, too, or where damage must be known before
        anything is touched, as in `choose_start`. Packed files have no ranges.
        """
        if self.needs is None or manifest.contents or self.ckpt.export:
            return False
        return not verified_before_loading(self.config, self.needs, manifest.step)

    def _stream(self, manifest: Manifest) -> Path:
        """Bring all of a step that is not left to the ranks; returns its folder."""
        print(f"resuming from step {manifest.step} in {self.remote}", flush=True)
        self._set_aside(manifest.step)

        def whole(name: str) -> bool:  # servers load the weights
            return "orchestrator" in (self.needs or ()) and name.startswith("model/")

        folder = bring_beginnings(self.remote, manifest, self.store.away, whole=whole)
        self._catch_up()
        return folder

    def _is_good(self, step: int, *, is_newest: bool) -> bool:
        """Whether the local step is whole, as far as `choose_start` checks it before ranks load it."""
        folder = self.store.folder(step)
        if not self.store.exists(step):
            return False
        try:
            manifest, content = self.store.manifest(step), self.ckpt.verify != "off"
            tensors = verified_before_loading(self.config, self.needs or (), step, is_newest=is_newest)
            check_files(folder, manifest, content=content, tensors=tensors)
        except CheckpointError:
            return False
        return True

    def _set_aside(self, step: int) -> None:
        """Move a local step that is damaged to where no reader looks."""
        if self.store.exists(step):
            folder = self.store.folder(step)
            aside = self.store.abandoned / f"damaged_{secrets.token_hex(4)}"
            make_folders(aside)
            folder.rename(aside / folder.name)
            print(f"the damaged local step {step} is now in {aside}", flush=True)

    def _fetch(self, manifest: Manifest) -> None:
        """Download a step in place of the local one, if there is one.

        Raises:
            CheckpointError: it is damaged there, too.
        """
        step = manifest.step
        print(f"downloading step {step} from {self.remote}", flush=True)
        self._set_aside(step)
        with progress_bars() as stage:
            self.remote.fetch(step, self.store, on_bytes=stage(f"step {step}", manifest.nbytes))
        self._catch_up()

    def _catch_up(self) -> None:
        """Replace the run's small files by those of the remote step, if this disk was overtaken."""
        if self.behind is not None:
            catch_up(self.run, self.store, self.remote.objects, self.behind)
            self.behind = None

    def _own_run(self) -> str | None:
        """The id of the run in the local directory; None if there is none."""
        if attempt := self.run.attempt():
            return attempt.run_id
        for step in reversed(self.store.steps()):
            with contextlib.suppress(CheckpointError):
                return self.store.manifest(step).run_id
        return None


def _fetched(run: RunDirectory, url: str) -> Path:
    """A local copy of the remote step with this URL, for a run that starts from it.

    Raises:
        UsageError: the URL does not end with the name of a step, or there is no such step.
    """
    found = split_step(url)
    if found is None:
        raise UsageError(f"--ckpt.resume {url}: must end with the name of a step, such as /step_20")
    prefix, step = found
    store = CheckpointStore(run.path / FETCHED)
    remote = RemoteStore(Objects(prefix))
    with _looking_for("--ckpt.resume", url):
        wanted = remote.manifest(step)
        if store.exists(wanted.step) and store.manifest(wanted.step) == wanted:
            return store.folder(wanted.step)
        shutil.rmtree(store.root, ignore_errors=True)
        print(f"downloading {url}", flush=True)
        with progress_bars() as stage:
            return remote.fetch(wanted.step, store, on_bytes=stage(f"step_{step}", wanted.nbytes))


@contextlib.contextmanager
def _looking_for(flag: str, url: str) -> Iterator[None]:
    """Name the flag in errors of the object store.

    Raises:
        UsageError: the store refuses, there are no credentials, or a step is damaged or missing.
        RemoteError: it fails in a way that may pass.
    """
    try:
        yield
    except TransientError as error:
        if isinstance(error, NoCredentials):
            raise UsageError(f"{flag} {url}: {error}") from None
        raise RemoteError(f"{flag} {url}: {error}; if this passes, run the same command again") from None
    except (CheckpointError, RemoteError) as error:
        raise UsageError(f"{flag} {url}: {error}") from None


Line = tuple[bytes, Row]
"""A line, and the object in it."""


def bring_rows(run: RunDirectory, store: CheckpointStore, objects: Objects) -> None:
    """Add what the object store has of the run's small files, and this disk has not; it is said what.

    A line that both have stays as it is here. If rows or events were missing, the disk is that of an earlier
    time, and pins are united: they say what a person wants. Copies in the object store that are torn are
    said, and whole lines are taken from them, too.
    """
    run.mend()
    files, lacked = RunFiles(objects), list[str]()
    logs: list[tuple[JsonLines, Callable[[Line], Hashable], Callable[[Line], float]]] = [
        (run.metrics, lambda line: line[1]["step"], lambda line: line[1]["step"]),
        (run.history, lambda line: line[0], lambda line: float(line[1].get("time", 0))),
        (run.evals, _evaluation, lambda line: line[1]["step"]),
    ]
    was_there = any(log.path.exists() for log, _, _ in logs)
    for log, key, order in logs:
        if log.path.exists() and files.is_in(log.path.name, log.path.read_bytes()):
            continue
        log.drop()  # damaged lines go aside
        added = _unite_lines(log, _copies(files, log.path.name), key, order)
        if added and was_there:
            lacked.append(f"{log.path.name} {_in_words(added)}")
    for name in (PINS, eval_metrics.RATINGS):
        path = store.root / name
        found = _copies(files, name).all if lacked or not path.exists() else []
        if found and not path.exists():
            make_folders(path.parent)
            write_atomic(path, found[0], durable=True)
        elif found and name == PINS:
            _unite_pins(store, found[0])
        elif lacked and path.exists():
            eval_metrics.note(store.root, eval_metrics.ratings_of(run.evals.rows()))
    if lacked:
        print(f"this disk lacked what {objects.url}/run has: {'; '.join(lacked)} were taken over", flush=True)


def _copies(files: RunFiles, name: str) -> Copies:
    found = files.copies(name)
    for problem in found.problems:
        print(f"{problem}; what can be read of it is used beside the copy before it", flush=True)
    return found


def _unite_lines(
    log: JsonLines, copies: Copies, key: Callable[[Line], Hashable], order: Callable[[Line], float]
) -> list[Row]:
    """Add the lines that only the copies have, in their order; returns what they hold.

    Lines that are here stay in their order, so that only what is added is moved to its place.
    """
    lines = log.lines()
    known = {key(line) for line in lines}
    added: list[Line] = []
    for content in copies.all:
        for line in log.lines(content):
            if key(line) not in known:
                known.add(key(line))
                added.append(line)
    if added:
        make_folders(log.path.parent)
        whole = sorted([*lines, *added], key=order)
        write_atomic(log.path, b"".join(line + b"\n" for line, _ in whole), durable=True)
    return [row for _, row in added]


def _evaluation(line: Line) -> Hashable:
    """What identifies a line of evals.jsonl: which policy was evaluated, and by what."""
    return json.dumps([line[1].get(name) for name in ("run_id", "branch", "name", "step")])


def _in_words(added: Sequence[Row]) -> str:
    """Lines that were missing, for people."""
    if any("step" not in row or "event" in row for row in added):
        return f"{len(added)} events"
    return f"of steps {ranges_of(row['step'] for row in added)}"


def catch_up(run: RunDirectory, store: CheckpointStore, objects: Objects, attempt: int) -> None:
    """Replace what this disk has of the run by what belongs to a remote step, and keep it aside.

    That is for a disk whose newest attempt, `attempt`, was overtaken by one that has gone on elsewhere:
    batches and the ledger are of steps that have been made again, so they go. Pins are united. A file that
    the object store lacks stays.
    """
    aside = store.abandoned / f"overtaken_attempt_{attempt}_{secrets.token_hex(4)}"
    moved: list[str] = []

    def move(path: Path) -> None:
        if path.exists():
            make_folders(aside)
            path.rename(aside / path.name)
            moved.append(path.name)

    files = RunFiles(objects)
    for path in small_files(run):
        found = files.copies(path.name)
        if not found.all:
            continue
        if path.name == PINS:
            _unite_pins(store, found.all[0])
            continue
        move(path)  # whoever is killed here gets it at the next start, since it is missing
        make_folders(path.parent)
        write_atomic(path, found.all[0], durable=True)
    for path in (run.batches, *(Path(f"{run.ledger}{end}") for end in ("", *JOURNALS))):
        move(path)
    if moved:
        print(
            f"the run has gone on elsewhere since attempt {attempt} here: {', '.join(moved)} of that attempt "
            f"are now in {aside}",
            flush=True,
        )


def _unite_pins(store: CheckpointStore, there: bytes) -> None:
    """Add pins that were uploaded to those here; ones that can't be read are left to whoever needs them."""
    with contextlib.suppress(CheckpointError, ValueError):
        here = store.pins()
        wanted = here | set(parse_json(there, list[int]))
        if wanted != here:
            make_folders(store.root)
            write_json(store.root / PINS, sorted(wanted), durable=True)
