"""`ckpt` commands on steps in an object store: what they say of a URL, and how they read one."""

import argparse
import contextlib
import tempfile
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.eval_metrics import RATINGS, Ratings
from cairn.checkpoint.manifest import (
    FILE_NAME,
    CheckpointError,
    Damaged,
    Manifest,
    load_manifest,
    split_step,
)
from cairn.checkpoint.retention import PINS, SavedStep, read_steps, reasons_to_keep
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.remote import Objects, RemoteStore
from cairn.remote.catalog import LISTED_METRICS
from cairn.remote.client.upload_journal import Sent
from cairn.remote.orphans import FORGOTTEN, Leftovers, forget, leftovers, set_aside
from cairn.remote.run_files import newest
from cairn.remote.step_store import COMMITTED
from cairn.run.addresses import SCHEMES, is_url
from cairn.run.errors import UsageError
from cairn.run.files import naming, parse_json
from cairn.run.progress import Stage, progress_bars
from cairn.tools.ckpt_output import say


def place(text: str) -> Path | str:
    """An argument that is a path or the URL of an object store, which a path would change.

    Raises:
        argparse.ArgumentTypeError: it is another URL.
    """
    if is_url(text):
        return text
    if "://" in text:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise argparse.ArgumentTypeError(
            f"{text.partition('://')[0]}:// is no object store; known are {known}"
        )
    return Path(text)


def local_target(text: str) -> Path:
    """An argument that is a folder to be made, and can't be a URL.

    Raises:
        argparse.ArgumentTypeError: it is one.
    """
    why = "and this is made in a local folder: give one, and upload it afterwards (ckpt copy uploads steps)"
    return _local(text, why)


def local_run(text: str) -> Path:
    """An argument that is a run directory, which can't be a URL.

    Raises:
        argparse.ArgumentTypeError: it is one.
    """
    return _local(text, "where only checkpoints are kept; give the run's local folder")


def _local(text: str, why: str) -> Path:
    """The folder, unless the text is a URL; `why` says what is wrong with one here."""
    if isinstance(found := place(text), str):
        raise argparse.ArgumentTypeError(f"{text} is a URL, {why}")
    return found


def name_of(text: Path | str, step: Path) -> str:
    """What a message calls the step in the folder `step`, if `text` is what the user gave."""
    if isinstance(text, Path):
        return str(step)
    return f"{split(text)[0]}/{step.name}"


def split(url: str, *, new: bool = False) -> tuple[RemoteStore, int | None]:
    """The remote store that a URL leads into, and the step if it ends with the name of one.

    Args:
        new: whether the folder of a file URL may be missing, and is then made.

    Raises:
        UsageError: the URL can't be used.
    """
    place = urlsplit(url)
    if not new and place.scheme == "file" and not Path(unquote(place.path)).exists():
        raise UsageError(f"{url}: there is no such folder")
    prefix, step = split_step(url) or (url, None)
    return RemoteStore(Objects(prefix)), step


def one_step(url: str) -> tuple[RemoteStore, int]:
    """The store and the step of a URL.

    Raises:
        UsageError: it does not end with the name of a step.
    """
    remote, step = split(url)
    if step is None:
        found = remote.steps()
        example = f"{remote}/step_{found[-1]}" if found else "s3://bucket/prefix/step_20"
        raise UsageError(f"{url}: give one step, such as {example}")
    return remote, step


def rows(url: str, metric: str | None = None) -> list[dict[str, Any]]:
    """The rows of `ckpt list`; those of other metrics than the catalog's take a request for each step."""
    remote, step = split(url)
    summaries = [row for row in remote.summaries() if step in (None, row["step"])]
    if metric is not None and metric not in LISTED_METRICS:
        found = {one.step: one.metrics for one in read_steps(remote, _ratings(remote))}
        summaries = [{**row, "metrics": found.get(row["step"], row["metrics"])} for row in summaries]
    if step is not None and not summaries:
        raise CheckpointError(f"{remote}: there is no step {step}")
    return [
        {
            "folder": f"{remote}/step_{row['step']}",
            "state": "complete" if row["parts"] != ["model"] else "complete, weights only",
            "kept_by": [],
            **row,
        }
        for row in summaries
    ]


def manifest(url: str) -> Manifest:
    """The manifest of a remote step, for `ckpt show`."""
    remote, step = one_step(url)
    return remote.manifest(step)


def verify(url: str) -> list[dict[str, Any]]:
    """The results of `ckpt verify`: every byte is read."""
    remote, step = split(url)
    results: list[dict[str, Any]] = []
    with progress_bars() as stage:
        for number in remote.steps() if step is None else [step]:
            problem = None
            try:
                nbytes = remote.manifest(number).nbytes
                remote.verify(number, on_bytes=stage(f"step {number}", nbytes))
            except CheckpointError as error:
                problem = str(error)
            folder = f"{remote}/step_{number}"
            results.append({"folder": folder, "ok": problem is None, "problem": problem})
    return results


def prune(url: str, rules: CkptConfig, *, abandoned: bool = False, dry_run: bool) -> dict[str, Any]:
    """Delete the remote steps that no rule keeps; returns the content of `ckpt prune --json`.

    The newest step whose objects are all there always stays, and so do steps that were pinned when the run
    last uploaded one. What is left of other steps is deleted if nothing was sent of them for a day, so that
    one that is being uploaded is left alone.

    Args:
        abandoned: whether to delete steps that were set aside, too.

    Raises:
        UsageError: the URL is of a single step.
        CheckpointError: the run's pins can't be read.
    """
    remote, step = split(url)
    if step is not None:
        raise UsageError(f"{url}: is a single step; give the URL of the run, {remote}")
    kept = reasons_to_keep(_with_metrics(remote, rules), rules, _pins(remote))
    damaged: list[str] = []
    for number in sorted(kept, reverse=True):
        try:
            remote.check_sizes(remote.manifest(number))
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        kept[number] = kept[number] or ["newest good"]
        break
    else:
        kept = {number: reasons or ["none is good"] for number, reasons in kept.items()}
    deleted = [number for number, reasons in kept.items() if not reasons]
    aside, debris = set_aside(remote) if abandoned else [], _debris(remote)
    if not dry_run:
        for number in deleted:
            remote.delete(number)
        for one in aside:
            forget(remote, one)
        for left in debris:
            remote.objects.delete(left.names)
    return {
        "deleted": [f"{remote}/step_{number}" for number in deleted],
        "debris": [f"{remote}/step_{left.step}" for left in debris],
        "abandoned": [
            f"{remote}/{folder}" for folder in sorted({str(Path(one.note).parent) for one in aside})
        ],
        "kept": {str(number): reasons for number, reasons in kept.items() if reasons},
        "damaged": damaged,
        "failed": [],
        "dry_run": dry_run,
    }


def _debris(remote: RemoteStore) -> list[Leftovers]:
    """What is left of steps that nobody is uploading: nothing was sent of them for a day."""
    since = datetime.now(UTC) - FORGOTTEN
    busy = {step for step, unfinished in remote.unfinished() if unfinished.begun > since}
    return [left for left in leftovers(remote) if left.newest < since and left.step not in busy]


def _with_metrics(remote: RemoteStore, rules: CkptConfig) -> list[SavedStep]:
    """The remote steps, with metrics if a rule needs them."""
    if rules.keep_best is None:
        return [SavedStep(number, {}) for number in remote.steps()]
    if rules.metric in LISTED_METRICS:
        return [SavedStep(row["step"], row["metrics"]) for row in remote.summaries()]
    return read_steps(remote, _ratings(remote))


def _ratings(remote: RemoteStore) -> Ratings:
    """The results of evaluations when the run last uploaded a step."""
    text = newest(remote.objects, RATINGS)
    try:
        return Ratings(parse_json(text, dict[str, dict[str, float]]) if text is not None else {})
    except ValueError:
        raise CheckpointError(f"{remote}/run/{RATINGS}: is damaged; repair or remove it") from None


def _pins(remote: RemoteStore) -> set[int]:
    """The steps that were pinned when the run last uploaded one."""
    text = newest(remote.objects, PINS)
    try:
        return set(parse_json(text, list[int])) if text is not None else set()
    except ValueError:
        raise CheckpointError(
            f"{remote}/run/{PINS}: is damaged; it must be a list of steps: repair or remove it"
        ) from None


def upload(folder: Path, url: str, stage: Stage) -> str:
    """Copy a local step below a URL, for `ckpt copy`; returns the URL of the copy.

    Raises:
        UsageError: the URL is of a step, or has steps of another run.
        CheckpointError: the step is damaged, or the URL has another step of this number.
    """
    remote, step = split(url, new=True)
    if step is not None:
        raise UsageError(f"{url}: is the URL of a step; give that of a run, {remote}")
    manifest = load_manifest(folder)
    others = {row["run_id"] for row in remote.summaries()}
    others |= {owner} if (owner := remote.owner()) else set()
    if others - {manifest.run_id}:
        raise UsageError(
            f"{url}: holds the run {', '.join(sorted(others))}, and {folder} is of run {manifest.run_id}; "
            "give another prefix"
        )
    remote.claim_for_run(manifest.run_id)  # before a step is there, so that no other run takes it for its own
    with tempfile.TemporaryDirectory(prefix="cairn-") as notes:
        sent = Sent(Path(notes) / "sent", manifest)
        remote.put(folder, manifest, sent, on_bytes=stage(f"uploading step {manifest.step}", manifest.nbytes))
    return f"{remote}/step_{manifest.step}"


def receive(url: str, dest: Path, stage: Stage) -> Path:
    """Copy a remote step, or the newest good one of a run, into a local folder; returns the copy's folder.

    Raises:
        UsageError: `dest` is not a folder, or is another run's.
        CheckpointError: there is no good step, or `dest` has one of this number.
    """
    from cairn.checkpoint.fork import receiving, store_of_copies  # imports numpy, which --help does without

    remote, step = split(url)
    store = store_of_copies(dest)
    known = remote.steps() if step is None else [step]
    if not known:
        raise CheckpointError(f"{url}: has no checkpoint")
    with receiving(store, remote.manifest(known[-1]).run_id, url):
        return download(url, store, stage)


def download(url: str, store: CheckpointStore, stage: Stage) -> Path:
    """Download a step, or the newest good one of a run, into a local store; returns its folder.

    Raises:
        CheckpointError: there is none, or the step is damaged, or the store has one of this number.
    """
    remote, step = split(url)
    if step is not None:
        return _fetch(remote, step, store, stage)
    steps = remote.steps()
    for number in reversed(steps):
        try:
            return _fetch(remote, number, store, stage)
        except Damaged as error:
            say(f"passed over: {error}")
    raise CheckpointError(f"{url}: has no {'good ' if steps else ''}checkpoint")


def _fetch(remote: RemoteStore, step: int, store: CheckpointStore, stage: Stage) -> Path:
    done = stage(f"downloading step {step}", remote.manifest(step).nbytes)
    return remote.fetch(step, store, on_bytes=done)


@contextlib.contextmanager
def local(text: Path | str, *, newest: bool = False, near: Path | None = None) -> Generator[Path]:
    """A local folder with a step, for commands that read all of it; a remote one is downloaded for the time.

    Args:
        newest: whether the URL of a run means its newest good step.
        near: what is made of the step; it is downloaded onto the same disk.

    Raises:
        UsageError: a URL does not end with the name of a step.
        CheckpointError: there is no such step, or it is damaged.
    """
    if isinstance(text, Path):
        yield text
        return
    if not newest:
        one_step(text)
    with _room(near) as folder, progress_bars() as stage:
        yield download(text, CheckpointStore(folder), stage)


@contextlib.contextmanager
def foreign(text: Path | str, near: Path | None) -> Generator[Path]:
    """A local copy of another program's checkpoint, which has no checksums: what arrives is checked by size.

    Args:
        near: what is made of it; it is downloaded onto the same disk.

    Raises:
        UsageError: there is nothing at the URL, or it is a checkpoint of Cairn.
    """
    if isinstance(text, Path):
        yield text
        return
    if urlsplit(text).scheme == "file":
        yield Path(unquote(urlsplit(text).path))
        return
    objects, alone = Objects(text), False
    names = [(name, size) for name, size in objects.list() if not name.endswith("/")]
    parent, _, last = text.rstrip("/").rpartition("/")
    if not names and not parent.endswith("/"):  # perhaps a single object, and no bucket
        objects, alone = Objects(parent), True
        size = objects.size(last)
        names = [] if size is None else [(last, size)]
    if not names:
        raise UsageError(f"{text}: there is no such object, and none below it")
    if any(name in (FILE_NAME, f"{COMMITTED}/{Path(name).name}") for name, _ in names):
        raise UsageError(f"{text}: is a checkpoint of Cairn; ckpt fork makes a new run of it")
    with _room(near) as folder, progress_bars() as stage:
        target = folder / last
        done = stage(f"downloading {text}", sum(size for _, size in names))
        for name, size in names:
            path = target if alone else target / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise UsageError(f"{objects.url}/{name}: has a name that no file can have")
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), open(path, "wb") as file:
                for first in range(0, size, CHUNK_BYTES):
                    done(file.write(objects.read(name, first, min(CHUNK_BYTES, size - first))))
        yield target


@contextlib.contextmanager
def side(text: Path | str) -> Generator[Path]:
    """A local folder with a side of `ckpt diff`: a step, or another program's checkpoint.

    Raises:
        UsageError: it is the URL of a run, or there is nothing there.
    """
    is_step = isinstance(text, str) and split(text)[1] is not None
    is_run = isinstance(text, str) and not is_step and split(text)[0].steps()
    with local(text) if is_step or is_run else foreign(text, None) as folder:
        yield folder


@contextlib.contextmanager
def _room(near: Path | None) -> Generator[Path]:
    """A folder for the time, on the disk of what is made there if that is known."""
    parents = [] if near is None else near.absolute().parents
    place = next((parent for parent in parents if parent.is_dir()), None)
    with tempfile.TemporaryDirectory(prefix=".cairn-", dir=place) as folder:
        yield Path(folder)
