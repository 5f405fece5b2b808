"""Metrics and checkpoints: every step occurs once, and each checkpoint continues from the previous one."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.step_folder import StepFolder, TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.run.directory import RunDirectory
from cairn.run.files import DamagedFile
from cairn.run.history import Rewind
from cairn.run.messages import Attempt
from cairn.run.metrics import CHAIN, CHAINED, chained, lost, ranges_of
from cairn.run.view import RunView
from cairn.tools.audit.report import Report, Row

# Metrics


def read_metrics(view: RunView, report: Report) -> list[Row]:
    """The rows of metrics.jsonl; only its last line may be incomplete."""
    rows: list[Row] = []
    for number, line, row in view.run.metrics.numbered():
        try:
            counts = {key: int((row or {})[key]) for key in ("step", "total_samples", "total_tokens")}
            rows.append({**(row or {}), **counts})
        except (ValueError, KeyError, TypeError, OverflowError):
            report.broken("metrics", f"line {number} of metrics.jsonl is not a row of a step", line)
    return rows


def note_skipped(rows: list[Row], report: Report) -> None:
    """Note the updates that the guard against spikes left out."""
    skipped = {
        row["step"]: number
        for row in rows
        if (number := row.get("skipped_updates")) and row.get("rewound_to") is None
    }
    if skipped:
        steps = [str(step) for step in skipped]
        more = f" and {len(steps) - 10} more" if len(steps) > 10 else ""
        report.notes.append(
            f"{sum(skipped.values())} updates were skipped as spikes (spike.on_spike), in steps "
            f"{', '.join(steps[:10])}{more}: their samples changed no weights"
        )


def note_rewinds(rows: list[Row], rewinds: Sequence[Rewind], report: Report) -> None:
    """Note which batches changed no weights because a spike led back to a checkpoint, and why.

    Args:
        rewinds: what the run and its checkpoints have on record.
    """
    reasons = {(one.step, one.to): one.reason for one in rewinds}
    for row in rows:
        if (to := row.get("rewound_to")) is not None:
            step = row["step"]
            reason = reasons.get((step, to), "the reason is in no file of the run")
            which = f"batches of steps {to + 1} to {step}" if step > to + 1 else f"batch of step {step}"
            report.notes.append(
                f"step {step} went back to the weights of step {to} (spike.on_spike): {reason}; the {which} "
                "changed no weights"
            )


def recorded_rewinds(
    run: RunDirectory, attempt: Attempt, store: CheckpointStore, report: Report
) -> list[Rewind]:
    """What the run's file and its newest checkpoint say of rewinds."""
    newest = store.latest()
    saved = read_state(store, newest, report) if newest else None
    return [Rewind(**one) for one in (saved and saved.rewinds) or []] + run.rewinds.of(attempt)


def check_steps(
    rows: list[Row], manifests: dict[int, Manifest], attempt: Attempt, store: CheckpointStore, report: Report
) -> None:
    """Check that every step occurs once and in order, from the start at least to the newest checkpoint."""
    report.checkpoints = sorted(manifests)
    numbers = [row["step"] for row in rows]
    for before, after in itertools.pairwise(numbers):
        if after <= before:
            report.broken("metrics", f"step {after} comes after step {before} in metrics.jsonl", after)
        elif after > before + 1:
            missing = list(range(before + 1, after))
            report.broken("metrics", f"metrics.jsonl lacks steps {before + 1} to {after - 1}", *missing)
    if numbers:
        report.first_step, report.last_step = numbers[0], max(numbers)
        if numbers[0] != 1 and not _starts_after(numbers[0] - 1, manifests, attempt, store):
            report.broken("metrics", f"metrics.jsonl begins with step {numbers[0]}", numbers[0])
    newest = max(manifests, default=0)
    if newest > max(numbers, default=0) and not _starts_after(newest, manifests, attempt, store):
        report.broken("metrics", f"step {newest} has a checkpoint but no row in metrics.jsonl", newest)


def check_chain(rows: list[Row], manifests: Mapping[int, Manifest], report: Report) -> None:
    """Check that each row is the one that was written, by its digest, which is also in checkpoints."""
    before: Row | None = None
    chained_rows = 0
    for row in rows:
        follows = before is not None and before["step"] == row["step"] - 1
        if (found := row.get(CHAIN)) is not None:
            chained_rows += 1
            # A disk that had lost the rows before began anew, and they may have been found since.
            if found not in (chained(row, before if follows else None), chained(row, None)):
                what = f"the row of step {row['step']}, or the one before it, is not as it was written"
                report.broken("metrics", f"{what}: its {CHAIN} is of other values", row)
        before = row
    columns = ", ".join(CHAINED)
    if rows and chained_rows == len(rows):
        saved = [step for step, manifest in manifests.items() if CHAIN in manifest.metrics]
        anchored = f", up to step {max(saved)} also by its checkpoint" if saved else ""
        report.proved.append(f"rows of metrics.jsonl hang together by {CHAIN} (of {columns}){anchored}")
    elif rows:
        report.unproved.append(
            f"{len(rows) - chained_rows} of {len(rows)} rows of metrics.jsonl have no {CHAIN}: an earlier "
            "version wrote them, and values of steps without a checkpoint may have been altered"
        )
    if rows:
        report.unproved.append("other columns of metrics.jsonl, but where a checkpoint has them")


def note_equal_batches(rows: list[Row], report: Report) -> None:
    """Note steps of one epoch that were trained on equal batches: records that repeat, or altered rows."""
    seen: dict[tuple[int, str], int] = {}
    for row in rows:
        digest, epoch = row.get("batch/digest"), row.get("epoch")
        if not isinstance(digest, str) or not isinstance(epoch, int | float):
            continue
        first = seen.setdefault((math.ceil(epoch), digest), row["step"])
        if first != row["step"]:
            report.notes.append(
                f"steps {first} and {row['step']} of one epoch have the same batch/digest: either records "
                "repeat in the data, or a row was altered"
            )


def note_lost_evaluations(rows: list[Row], view: RunView, report: Report) -> None:
    """Note results that rows have, and evals.jsonl lacks."""
    try:
        found = lost(rows, view.evals())
    except DamagedFile as error:
        report.notes.append(str(error))
        return
    for name, steps in found.items():
        report.notes.append(
            f"evals.jsonl lacks results of {name!r} after steps {ranges_of(steps)}, which metrics.jsonl has"
        )


def _starts_after(
    step: int, manifests: dict[int, Manifest], attempt: Attempt, store: CheckpointStore
) -> bool:
    """Whether the run is a fork that started from step `step` of another run."""
    if attempt.start_step == step and attempt.resume_from:
        resumed = Path(attempt.resume_from).parent
        if resumed not in (store.root, store.away):
            return True
    parents = [manifest.parent for manifest in manifests.values() if manifest.parent]
    run_ids = {manifest.run_id for manifest in manifests.values()}
    return any(parent.step == step and parent.run_id not in run_ids for parent in parents)


# Checkpoints


def read_manifests(store: CheckpointStore, report: Report) -> dict[int, Manifest]:
    manifests = {}
    for step in store.steps():
        try:
            manifests[step] = store.manifest(step)
        except CheckpointError as error:
            if store.exists(step):  # not deleted in the meantime
                report.broken("manifest", str(error), step)
    return manifests


def read_state(store: CheckpointStore, step: int, report: Report) -> TrainerRecord | None:
    """The trainer's state of a step; None if there is none (weights only), or the step was just deleted."""
    try:
        return StepFolder(store.folder(step)).trainer_state()
    except DamagedFile as error:
        report.broken("progress", f"step {step}: trainer/state.json is damaged: {error}", step)
        return None


def check_lineage(
    manifests: dict[int, Manifest], config: Mapping[str, Any], attempt: Attempt, report: Report
) -> None:
    """Check that each checkpoint continues from the previous one; the first, from nothing or another run."""
    deletes = any((config.get("ckpt") or {}).get(rule) for rule in ("keep_last", "keep_best"))
    before = None
    for step, manifest in sorted(manifests.items()):
        parent = manifest.parent
        row = {"step": step, "run_id": manifest.run_id, "parent": parent and parent.model_dump()}
        if manifest.run_id != attempt.run_id:
            report.broken("lineage", f"step {step} is of run {manifest.run_id}, not {attempt.run_id}", row)
        elif parent is None or parent.run_id != manifest.run_id:
            if before is not None:
                report.broken("lineage", f"step {step} does not continue from step {before}", row)
        elif parent.step >= step or (before is not None and parent.step < before):
            report.broken("lineage", f"step {step} continues from step {parent.step}, not from {before}", row)
        elif parent.step not in manifests and not deletes:
            gone = f"step {step} continues from step {parent.step}, which does not exist"
            report.notes.append(f"{gone}, although no retention rule deletes it")
        before = step


def check_manifests(
    store: CheckpointStore, manifests: dict[int, Manifest], rows: list[Row], report: Report
) -> None:
    """Check that a checkpoint's manifest and state agree with metrics.jsonl."""
    by_step = {row["step"]: row for row in rows}
    for step, manifest in manifests.items():
        row = by_step.get(step)
        if row is None:
            continue  # a fork's start; other cases were reported before
        different = {
            key: [value, row.get(key)]
            for key, value in manifest.metrics.items()
            if json.dumps(value) != json.dumps(row.get(key))  # as text, NaN equals NaN
        }
        if different:
            report.broken("manifest", f"step {step}: manifest and metrics.jsonl differ", different)
        if (state := read_state(store, step, report)) is None:
            continue
        wrong = {key: [value, row.get(key)] for key, value in state.progress.items() if value != row.get(key)}
        if wrong:
            report.broken("progress", f"step {step}: trainer/state.json and metrics.jsonl differ", wrong)
