"""The output of the `ckpt` commands.

Text from a checkpoint is printed literally: it is not interpreted as markup, and control characters are
escaped.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cairn.checkpoint.manifest import Manifest, age_of
from cairn.run.changes import short_identity
from cairn.run.metrics import number
from cairn.run.output import duration, printable
from cairn.run.tables import print_table

if TYPE_CHECKING:
    from cairn.tools.audit import Report


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line."""
    print(printable(text), file=file or sys.stdout)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def print_list(rows: list[dict[str, Any]], metric: str | None = None) -> None:
    """Print the result of `ckpt list`, with this metric among others."""
    values = {"loss": "loss", "reward": "reward/mean"} | ({metric: metric} if metric else {})
    shown = [label for label, key in values.items() if any(key in row.get("metrics", {}) for row in rows)]
    cells, problems = [], []
    for row in rows:
        name, state = Path(row["folder"]).name, row["state"]
        if state.startswith("damaged: "):
            problems.append(f"{name} is {state}")
            state = "damaged"
        if "step" not in row:
            cells.append([name.removeprefix("step_"), "", "", "", *("" for _ in shown), "", state])
            continue
        metrics = [number(row["metrics"], values[label]) for label in shown]
        metrics = ["" if value is None else f"{value:.4g}" for value in metrics]
        size, kept_by = f"{row['bytes'] / 1e6:,.1f} MB", ", ".join(row["kept_by"])
        age = age_of(row["created"])
        since = "?" if age is None else duration(age)
        cells.append([row["step"], row["branch"], since, size, *metrics, kept_by, state])
    print_table(["step", "branch", "age", "size", *shown, "kept by", "state"], cells)
    for problem in problems:
        say(problem)


def print_manifest(manifest: Manifest) -> None:
    """Print the result of `ckpt show`."""
    fields = manifest.model_dump(exclude={"files", "contents"})
    if manifest.parent:
        fields["parent"] = f"step {manifest.parent.step} of run {manifest.parent.run_id}"
    print_table(["", ""], ((key, _value(value)) for key, value in fields.items()), header=False)
    say("")
    print_table(["file", "bytes"], ((name, f"{entry.size:,}") for name, entry in manifest.files.items()))
    if manifest.contents:
        say("")
        unpacked = ((name, f"{entry.size:,}") for name, entry in manifest.contents.items())
        print_table(["packed file", "bytes unpacked"], unpacked)


def _value(value: Any) -> str:
    """A value of a manifest or configuration as readable text."""
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_value(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_diff(report: dict[str, Any], *, top: int) -> None:
    """Print the result of `ckpt diff`; `top`: number of tensors."""
    for side in ("a", "b"):
        about = report[side]
        of = f" of run {about['run_id']}, {about['branch']}" if "run_id" in about else f", {about['format']}"
        step = "no step" if about["step"] is None else f"step {about['step']}"
        say(f"{side}: {about['folder']}, {step}{of}")
    for section in ("config", "versions", "metrics"):
        say("")
        if report[section]:
            rows = ((key, _value(a), _value(b)) for key, (a, b) in report[section].items())
            print_table([section, "a", "b"], rows)
        else:
            say(f"{section}: the same")
    say("")
    _print_changes("weights", report, top)
    say("")
    if report["optimizer"]:
        _print_changes("the optimiser's state", report["optimizer"], top)
    else:
        say("the optimiser's state: not in both")
    for name, what in (("critic", "the critic's weights"), ("critic_optimizer", "its optimiser's state")):
        if report[name]:
            say("")
            _print_changes(what, report[name], top)


def _print_changes(what: str, report: dict[str, Any], top: int) -> None:
    for name in ("only_in_a", "only_in_b", "other_shape", "other_dtype"):
        if found := report[name]:
            more = f" and {len(found) - top} more" if len(found) > top else ""
            say(f"{name}: {', '.join(found[:top])}{more}")
    changed = [row for row in report["tensors"] if row["changed"]]
    say(f"{what}: {len(changed)} of {len(report['tensors'])} tensors differ")
    if unequal := sum(row["not_finite"] for row in changed):
        say(f"{unequal} values are infinite or no numbers on one side; the changes below are without them")
    changed = sorted(changed, key=lambda row: -row["relative_change"])[:top]
    if changed:
        rows = (
            (
                row["name"],
                f"{row['max_change']:.3g}",
                f"{row['relative_change']:.3g}",
                f"{row['changed']:,} of {row['values']:,}",
            )
            for row in changed
        )
        print_table(["tensor", "largest change", "relative change", "values that differ"], rows)


def print_prune(report: dict[str, Any]) -> None:
    """Print the result of `ckpt prune`."""
    for problem in report["damaged"]:
        say(f"damaged, so not counted as newest: {problem}")
    verb = "would delete" if report["dry_run"] else "deleted"
    for folder in [*report["deleted"], *report["debris"], *report["abandoned"]]:
        say(f"{verb} {folder}")
    for failure in report["failed"]:
        say(f"could not delete {failure}")
    say(f"{len(report['kept'])} steps kept")


def print_audit(report: "Report") -> None:
    """Print the result of `ckpt audit`."""
    if report.last_step is not None:
        say(f"{report.run}: {report.command}, steps {report.first_step} to {report.last_step}")
    if report.checkpoints:
        say(f"checkpoints: {', '.join(map(str, report.checkpoints))}")
    rows = []
    several = any(epoch.environment is not None for epoch in report.epochs)
    pools = any(epoch.resting for epoch in report.epochs)
    for epoch in report.epochs:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(epoch.dropped.items())) or "0"
        size = "" if epoch.problems is None else epoch.problems
        numbers = (epoch.issued, epoch.trained, epoch.waiting, dropped, epoch.failed)
        numbers = (*numbers, *([epoch.resting] if pools else []), epoch.repeated, epoch.missing)
        rows.append((*([epoch.environment or ""] if several else []), epoch.epoch, size, *numbers))
    if rows:
        columns = [
            *(["environment"] if several else []),
            "epoch",
            report.epochs_of,
            "issued",
            "trained",
            "waiting",
            "dropped tries",
            "given up",
            *(["resting"] if pools else []),
            "repeated",
            "missing",
        ]
        print_table(columns, rows)
    for segment in report.trained_on:
        inputs = ", ".join(f"{key} {short_identity(value)}" for key, value in segment.inputs.items())
        if inputs:
            say(f"steps {segment.first_step} to {segment.last_step}: {inputs}")
    if report.staleness is not None:
        say(f"staleness: at most {report.staleness} steps, {report.max_off_policy_steps} allowed")
    for change in report.changes:
        say(f"changed after step {change['step']}: {change['name']}")
    for note in report.notes:
        say(f"note: {note}")
    for what in report.proved if report.ok else ():
        say(f"proved: {what}")
    for what in report.unproved:
        say(f"not proved: {what}")
    if report.ok:
        say("no violation")
        return
    found = ((v.kind, v.what, "\n".join(json.dumps(row) for row in v.rows)) for v in report.violations)
    print_table(["violation", "what", "rows"], found)
    say(f"{len(report.violations)} violations")
