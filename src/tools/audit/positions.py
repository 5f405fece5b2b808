"""SFT: the position in the data is the number of records taken since the data set was first used."""

import itertools

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
