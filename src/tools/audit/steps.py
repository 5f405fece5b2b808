"""Metrics and checkpoints: each step once, and each checkpoint goes on from the one before it."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.step import StepFolder, TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.run.attempt import Attempt
from cairn.run.files import DamagedFile
from cairn.run.metrics import MetricsLog
from cairn.tools.audit.report import Report, Row

# Metrics


def read_metrics(metrics: MetricsLog, report: Report) -> list[Row]:
    """The rows as they stand in the file; only the last line may have been cut short."""
    rows: list[Row] = []
    for number, line, row in metrics.numbered():
        try:
            counts = {key: int((row or {})[key]) for key in ("step", "total_samples", "total_tokens")}
            rows.append({**(row or {}), **counts})
        except (ValueError, KeyError, TypeError, OverflowError):
            report.broken("metrics", f"line {number} of metrics.jsonl is no row of a step", line)
    return rows


def check_steps(
    rows: list[Row],
    manifests: dict[int, Manifest],
    attempt: Attempt,
    store: CheckpointStore,
    report: Report,
) -> None:
    """Every step once, in order, from the run's start to at least its newest checkpoint."""
    report.checkpoints = sorted(manifests)
    numbers = [row["step"] for row in rows]
    for before, after in itertools.pairwise(numbers):
        if after <= before:
            report.broken("metrics", f"step {after} stands after step {before} in metrics.jsonl", after)
        elif after > before + 1:
            missing = list(range(before + 1, after))
            report.broken("metrics", f"metrics.jsonl misses steps {before + 1} to {after - 1}", *missing)
    if numbers:
        report.first_step, report.last_step = numbers[0], max(numbers)
        if numbers[0] != 1 and not _starts_after(numbers[0] - 1, manifests, attempt, store):
            report.broken("metrics", f"metrics.jsonl begins with step {numbers[0]}", numbers[0])
    newest = max(manifests, default=0)
    if newest > max(numbers, default=0) and not _starts_after(newest, manifests, attempt, store):
        report.broken("metrics", f"step {newest} is a checkpoint and not in metrics.jsonl", newest)


def _starts_after(
    step: int, manifests: dict[int, Manifest], attempt: Attempt, store: CheckpointStore
) -> bool:
    """Whether the run is a fork of another from its step `step`."""
    if attempt.start_step == step and attempt.resume_from:
        resumed = Path(attempt.resume_from).parent
        if resumed != store.root:
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
            if store.exists(step):  # and was not deleted just now
                report.broken("manifest", str(error), step)
    return manifests


def read_state(store: CheckpointStore, step: int, report: Report) -> TrainerRecord | None:
    """The trainer's state of a step; None if it has none (weights only), or was deleted just now."""
    try:
        return StepFolder(store.folder(step)).trainer_state()
    except DamagedFile as error:
        report.broken("progress", f"step {step}: trainer/state.json is damaged: {error}", step)
        return None


def check_lineage(
    manifests: dict[int, Manifest], config: Mapping[str, Any], attempt: Attempt, report: Report
) -> None:
    """Each checkpoint goes on from the one before it, the first from nothing or from another run."""
    deletes = any((config.get("ckpt") or {}).get(rule) for rule in ("keep_last", "keep_best"))
    before = None
    for step, manifest in sorted(manifests.items()):
        parent = manifest.parent
        row = {"step": step, "run_id": manifest.run_id, "parent": parent and parent.model_dump()}
        if manifest.run_id != attempt.run_id:
            report.broken("lineage", f"step {step} is of run {manifest.run_id}, not {attempt.run_id}", row)
        elif parent is None or parent.run_id != manifest.run_id:
            if before is not None:
                report.broken("lineage", f"step {step} does not go on from step {before}", row)
        elif parent.step >= step or (before is not None and parent.step < before):
            report.broken("lineage", f"step {step} goes on from step {parent.step}, not from {before}", row)
        elif parent.step not in manifests and not deletes:
            gone = f"step {step} goes on from step {parent.step}, which is gone"
            report.notes.append(f"{gone}, and no rule of the run deletes it")
        before = step


def check_manifests(
    store: CheckpointStore, manifests: dict[int, Manifest], rows: list[Row], report: Report
) -> None:
    """What a checkpoint says of its step is what metrics.jsonl says, and what its state says."""
    by_step = {row["step"]: row for row in rows}
    for step, manifest in manifests.items():
        row = by_step.get(step)
        if row is None:
            continue  # of a fork's start; others were found before
        different = {
            key: [value, row.get(key)]
            for key, value in manifest.metrics.items()
            if json.dumps(value) != json.dumps(row.get(key))  # NaN is NaN
        }
        if different:
            report.broken("manifest", f"step {step}: manifest and metrics.jsonl differ", different)
        if (state := read_state(store, step, report)) is None:
            continue
        wrong = {key: [value, row.get(key)] for key, value in state.progress.items() if value != row.get(key)}
        if wrong:
            report.broken("progress", f"step {step}: trainer/state.json and metrics.jsonl differ", wrong)
