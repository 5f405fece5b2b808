"""A disk that lacks what the object store has of its run: rows of metrics, events, evaluations, pins.

It may be empty; it may be behind, since another attempt has gone on elsewhere; or it is that of the newest
attempt, restored from a copy of some minutes ago. That files are there says nothing, nor does the attempt's
number: what is in them is compared.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from cairn.checkpoint import eval_metrics
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.remote import Objects
from cairn.remote.run_files import Copies, RunFiles
from cairn.run.directory import JOURNALS, RunDirectory
from cairn.run.files import make_folders, parse_json, write_atomic, write_json
from cairn.run.jsonlines import JsonLines, Row
from cairn.run.messages import Attempt
from cairn.run.metrics import lost, ranges_of

Line = tuple[bytes, Row]
"""A line, and the object in it."""


def small_files(run: RunDirectory) -> list[Path]:
    """What a machine with an empty disk needs of a run beside its steps, and uploads therefore have.

    Ratings are written from evals.jsonl, so that without it those of earlier steps would be lost.
    """
    logs = [run.metrics.path, run.history.path, run.evals.path]
    return [*logs, run.checkpoints / PINS, run.checkpoints / eval_metrics.RATINGS]


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


def say_missing(run: RunDirectory, last: int, earlier: Attempt | None) -> None:
    """Say what the run's files lack of the steps up to `last`, if anything; a fork begins with a later one.

    Args:
        earlier: the attempt before.
    """
    rows = [row for row in run.metrics.rows() if row["step"] <= last]
    there = {row["step"] for row in rows}
    if missing := set(range(min(there, default=1), last + 1)).difference(there):
        _say(f"{run.metrics.path.name} has no row of steps {ranges_of(missing)}")
    for name, steps in lost(rows, run.evals.rows()).items():
        _say(f"{run.evals.path.name} lacks {name!r} of steps {ranges_of(steps)}")
    if earlier and run.history.newest_attempt() < earlier.number:
        newest = run.history.newest_attempt()
        _say(f"{run.history.path.name} ends in attempt {newest} of {earlier.number}, so events are missing")


def _say(what: str) -> None:
    print(f"warning: {what}: no copy was found, and ckpt audit will say so, too", flush=True)
