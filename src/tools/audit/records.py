"""SFT: whether each step was trained on the records at its place in the data, by their number and by content.

The position in the data is the number of records taken since the data set was first used.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import CairnError
from cairn.tools.audit.recipes import Recipe
from cairn.tools.audit.report import Epoch, Report, Row


def check_records(recipes: list[Recipe], rows: list[Row], report: Report) -> None:
    """Check that each step continues where the previous one ended: no record is skipped or repeated."""
    before = None if report.first_step != 1 else {"step": 0, "total_samples": 0, "total_tokens": 0}
    ends: dict[int, tuple[int | None, int]] = {}
    for row in rows:
        recipe = next(recipe for recipe in recipes if recipe.step is None or recipe.step >= row["step"])
        if before is not None and row["step"] == before["step"] + 1:
            _check_position(row, before, recipe.settings.get("data.batch_size"), report)
        records, begins_at = recipe.data.get("records"), recipe.data.get("begins_at", 0)
        place = _taken(row) - begins_at
        if records and row.get("epoch") != place / records:
            what = f"step {row['step']}: {place} records of {records} are {row.get('epoch')} epochs"
            report.broken("position", what, row)
        ends[begins_at] = records, _taken(row)
        before = row
    for begins_at, (records, end) in sorted(ends.items()):
        _count_epochs(records, end - begins_at, report)


def _taken(row: Row) -> int:
    """Records taken up to a step; earlier versions made one sample of each, and counted only these."""
    return row.get("total_records", row["total_samples"])


def _count_epochs(records: int | None, total: int, report: Report) -> None:
    """Add the epochs of one data set; `total` of its records were taken."""
    counted = 0
    for number in itertools.count(len(report.epochs)):
        count = total - counted if records is None else min(records, total - counted)
        report.epochs.append(Epoch(number, records, issued=count, trained=count))
        counted += count
        if counted >= total:
            return


def _check_position(row: Row, before: Row, batch_size: int | None, report: Report) -> None:
    grown = _taken(row) - _taken(before)
    dropped = int(row.get("dropped_records", 0))
    if batch_size is not None and grown != batch_size + dropped:
        kind = "total_records" if "total_records" in row else "total_samples"
        what = f"step {row['step']}: {kind} grew by {grown}, but a batch has {batch_size}"
        more = f", and {dropped} were dropped" if dropped else ""
        report.broken("position", what + more, before, row)
    if row["total_tokens"] <= before["total_tokens"]:
        report.broken("position", f"step {row['step']}: total_tokens did not grow", before, row)


# By content: the batch of each step is made again.


OF_BATCHES = ("data", "seq_len", "seed")
"""Settings and inputs by which batches are made, beside the tokenizer."""


def check_contents(
    rows: Sequence[Row],
    recipes: Sequence[Recipe],
    config: Mapping[str, Any],
    store: CheckpointStore,
    report: Report,
) -> None:
    """Make the batch of every step again, and compare its digest with the row's; all data are tokenised.

    That is possible for SFT from a run's first step on, as long as data, tokenizer and the settings that make
    batches were the same; what can't be compared is said in the report.
    """
    problem = _why_not(rows, recipes, store, report)
    if problem is None:
        try:
            model = StepFolder(store.folder(max(store.steps()))).model
            problem = _compare(rows, recipes, config, model, report)
        except (CairnError, OSError, ValueError) as error:
            problem = str(error)
    if problem:
        report.unproved.append(f"that the records are those of the data: {problem}")


def _why_not(
    rows: Sequence[Row], recipes: Sequence[Recipe], store: CheckpointStore, report: Report
) -> str | None:
    if report.command != "sft":
        return f"batches of {report.command} are not made again"
    if not rows or rows[0]["step"] != 1:
        return "metrics.jsonl does not begin with step 1"
    if not store.steps():
        return "no checkpoint has the tokenizer"
    changed = [change["name"] for change in report.changes if change["name"].split(".")[0] in OF_BATCHES]
    if changed or len(report.trained_on) != 1:
        return f"it was changed on the way ({', '.join(changed) or 'other inputs'})"
    if any("batch/digest" not in row for row in rows):
        return "rows of an earlier version have no batch/digest"
    return None if recipes else "there is no recipe"


def _compare(
    rows: Sequence[Row], recipes: Sequence[Recipe], config: Mapping[str, Any], model: Path, report: Report
) -> str | None:
    """Make the batches; returns why that is not possible, if so."""
    from transformers import AutoTokenizer  # late, as it takes seconds

    from cairn.config.trainer import SFTConfig
    from cairn.run.data_sets import same_records
    from cairn.run.recipe import template_arguments
    from cairn.trainer.data.batches import SFTData
    from cairn.trainer.data.opening import identity_of_records

    settings = SFTConfig.model_validate(config)
    if not same_records(identity_of_records(settings) or {}, recipes[-1].data):
        return f"{settings.data.names} holds other records by now"
    state = StepFolder(model.parent).trainer_state()
    arguments = template_arguments((state and state.recipe) or {})
    data = SFTData(
        settings.data,
        AutoTokenizer.from_pretrained(model),
        settings.seed,
        0,
        row_length=settings.seq_len,
        template_arguments=arguments,
    )
    by_step = {row["step"]: row for row in rows}
    for step in range(1, max(by_step) + 1):
        digest, row = data.next_batch(step).digest(), by_step.get(step)
        if row is not None and row["batch/digest"] != digest:
            what = f"step {step} was not trained on the records that the data have at its place"
            report.broken("position", what, {"batch/digest": row["batch/digest"], "of the data": digest})
            return None
    report.proved.append("each step was trained on the records that the data have at its place, by content")
    return None
