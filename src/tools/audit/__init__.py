"""`ckpt audit`: proves what a run has trained on, from its manifests, metrics and ledger.

It reads the run as everybody does, with two exceptions: lines of metrics.jsonl by number, damaged ones
included, and the rows of the ledger as SQLite has them. Other readers pass over what is damaged there, which
is what an audit has to find.

A live run writes ledger, then metrics, then manifest. The audit reads them in the opposite order, so that a
concurrent write can only add rows to a file that is read later.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import kind_of
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt
from cairn.run.view import RunView
from cairn.tools.audit.ledger import (
    add_unnoted,
    check_learned,
    check_ledger,
    check_snapshots,
    read_whole_ledger,
)
from cairn.tools.audit.recipes import check_recipes, read_recipes
from cairn.tools.audit.records import check_contents, check_records
from cairn.tools.audit.report import Report
from cairn.tools.audit.resting import check_given_up
from cairn.tools.audit.steps import (
    check_chain,
    check_lineage,
    check_manifests,
    check_steps,
    note_equal_batches,
    note_lost_evaluations,
    note_rewinds,
    note_skipped,
    read_manifests,
    read_metrics,
    recorded_rewinds,
)

__all__ = ["Report", "audit"]


def audit(path: Path, *, data: bool = False) -> Report:
    """Check every promise that a run directory's files can prove; nothing is written.

    Args:
        data: also make the batches of SFT again, and compare them with what was trained on.

    Raises:
        UsageError: it is not a run directory, or its kind of run is unknown to this version.
        CheckpointError: the run's ledger is missing or damaged, and no checkpoint has a copy.
    """
    view = RunView(path)
    run, attempt, config = view.run, view.attempt(), view.config()
    store = CheckpointStore(view.checkpoints())
    lost = None
    if attempt is None and config is not None:
        attempt = _by_checkpoints(store, config)
        lost = f"{run.roles} is {'damaged' if run.roles.exists() else 'lost'}"
    if attempt is None and run.roles.exists():
        raise CheckpointError(f"{run.roles}: is damaged, and no checkpoint says which run this is")
    if attempt is None or config is None:
        raise UsageError(f"{path}: is not a run directory: it lacks roles.json or config.json")
    kind = kind_of(attempt.command)
    report = Report(str(path), attempt.command)
    if lost:
        report.notes.append(f"{lost}: the newest checkpoint says which run this is")
    manifests = read_manifests(store, report)
    rows = read_metrics(view, report)
    check_steps(rows, manifests, attempt, store, report)
    check_chain(rows, manifests, report)
    note_lost_evaluations(rows, view, report)
    note_skipped(rows, report)
    note_rewinds(rows, recorded_rewinds(run, attempt, store, report), report)
    check_lineage(manifests, config, attempt, report)
    check_manifests(store, manifests, rows, report)
    recipes = read_recipes(store, manifests, config, view, report)
    check_recipes(recipes, manifests, report)
    if kind.epochs_of == "records":
        check_records(recipes, rows, report)
        note_equal_batches(rows, report)
        report.proved.append("each step continued in the data where the one before ended, by their counts")
        if data:
            check_contents(rows, recipes, config, store, report)
        else:
            report.unproved.append(
                "that the records at these places are those of the data: batch/digest names what each step "
                "was trained on, and is not compared with the data (--data does)"
            )
    else:
        report.proved.append(
            "each prompt of the ledger is in one batch, and each step had its own, by digest"
        )
        report.unproved.append("answers in batches whose files are gone: the ledger has their digests alone")
        ledger = read_whole_ledger(run, store, manifests, report)
        add_unnoted(ledger, run, attempt)
        check_ledger(ledger, rows, manifests, attempt, report)
        check_given_up(ledger, recipes, config, attempt, report)
        check_learned(view, attempt, ledger, report)
        check_snapshots(store, manifests, ledger, report)
    report.unproved.append("tensors: ckpt verify reads them")
    return report


def _by_checkpoints(store: CheckpointStore, config: Mapping[str, Any]) -> Attempt | None:
    """The attempt as the newest checkpoint has it, for a run whose roles.json is lost; None without one."""
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointError):
            found = store.manifest(step)
            command = "rl" if "orchestrator" in found.parts or "trainer" in config else "sft"
            return Attempt(found.run_id, found.attempt, command, 0, None, found.branch)
    return None
