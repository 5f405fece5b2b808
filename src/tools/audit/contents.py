"""SFT: whether each step was trained on the records at its place in the data: its batch is made again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.run.errors import CairnError
from cairn.tools.audit.recipes import Recipe
from cairn.tools.audit.report import Report, Row

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
