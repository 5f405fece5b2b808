"""SFT: the position in the data is the number of samples trained on."""

import itertools
from typing import Any

from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.store import CheckpointStore
from cairn.launch.audit.report import Epoch, Report, Row
from cairn.launch.audit.steps import read_state


def check_records(
    store: CheckpointStore,
    manifests: dict[int, Manifest],
    rows: list[Row],
    config: dict[str, Any],
    report: Report,
) -> None:
    """Each step takes up the data where the step before left it, so no record is left out or comes twice."""
    states = [(step, state) for step in sorted(manifests) if (state := read_state(store, step, report))]
    records = next((state["data"]["records"] for _, state in states if state.get("data")), None)
    before = None if report.first_step != 1 else {"step": 0, "total_samples": 0, "total_tokens": 0}
    for row in rows:
        if before is not None and row["step"] == before["step"] + 1:
            of_step = next((state for step, state in states if step >= row["step"]), None)
            recipe = of_step["config"] if of_step else config
            _check_position(row, before, recipe["data"]["batch_size"], report)
        if records and row.get("epoch") != row["total_samples"] / records:
            samples = f"{row['total_samples']} samples of {records}"
            what = f"step {row['step']}: {samples} are {row.get('epoch')} epochs"
            report.broken("position", what, row)
        before = row
    if not rows:
        return
    total, counted = rows[-1]["total_samples"], 0
    for number in itertools.count():
        count = total - counted if records is None else min(records, total - counted)
        report.epochs.append(Epoch(number, records, issued=count, trained=count))
        counted += count
        if counted >= total:
            return


def _check_position(row: Row, before: Row, batch_size: int, report: Report) -> None:
    grown = row["total_samples"] - before["total_samples"]
    if grown != batch_size:
        what = f"step {row['step']}: total_samples grew by {grown}, and a batch has {batch_size}"
        report.broken("position", what, before, row)
    if row["total_tokens"] <= before["total_tokens"]:
        report.broken("position", f"step {row['step']}: total_tokens did not grow", before, row)
