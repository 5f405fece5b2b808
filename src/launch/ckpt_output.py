"""What the `ckpt` commands print."""

import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cairn.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from cairn.launch.audit import Report


def print_json(value: Any) -> None:
    """Data for programs."""
    print(json.dumps(value, indent=2))


def print_list(rows: list[dict[str, Any]]) -> None:
    """`ckpt list`."""
    table = Table("step", "branch", "age", "size", "metrics", "kept by", "state")
    for row in rows:
        if "step" not in row:
            table.add_row(Path(row["folder"]).name.removeprefix("step_"), *[""] * 5, row["state"])
            continue
        metrics = "  ".join(
            f"{k} {row['metrics'][k]:.4g}" for k in ("loss", "reward/mean") if k in row["metrics"]
        )
        kept_by = ", ".join(row["kept_by"])
        size = f"{row['bytes'] / 1e6:,.1f} MB"
        table.add_row(
            str(row["step"]), row["branch"], _age(row["created"]), size, metrics, kept_by, row["state"]
        )
    Console().print(table)


def _age(created: str) -> str:
    try:
        seconds = (
            datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)
        ).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def print_manifest(manifest: Manifest) -> None:
    """`ckpt show`."""
    console = Console()
    for key, value in manifest.model_dump(exclude={"files"}).items():
        console.print(f"[bold]{key}[/bold]: {value}", highlight=False)
    table = Table("file", "bytes")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size:,}")
    console.print(table)


def print_diff(report: dict[str, Any], *, top: int) -> None:
    """`ckpt diff`; `top`: how many tensors."""
    console = Console()
    for section in ("config", "versions", "metrics"):
        table = Table(section, report["a"]["folder"], report["b"]["folder"])
        for key, (before, after) in report[section].items():
            table.add_row(key, str(before), str(after))
        console.print(table if report[section] else f"{section}: the same")
    for name in ("only_in_a", "only_in_b", "other_shape"):
        if report[name]:
            console.print(f"{name}: {', '.join(report[name])}")
    changed = [row for row in report["tensors"] if row["max_change"]]
    console.print(f"{len(changed)} of {len(report['tensors'])} tensors differ")
    table = Table("tensor", "largest change", "relative change")
    for row in sorted(changed, key=lambda row: -row["relative_change"])[:top]:
        table.add_row(row["name"], f"{row['max_change']:.3g}", f"{row['relative_change']:.3g}")
    if changed:
        console.print(table)


def print_prune(report: dict[str, Any]) -> None:
    """`ckpt prune`."""
    for problem in report["damaged"]:
        print(f"damaged, and not counted as newest: {problem}")
    verb = "would delete" if report["dry_run"] else "deleted"
    for folder in [*report["deleted"], *report["debris"], *report["abandoned"]]:
        print(f"{verb} {folder}")
    print(f"{len(report['kept'])} steps kept")


def print_audit(report: "Report") -> None:
    """`ckpt audit`."""
    console = Console()
    if report.last_step is not None:
        console.print(f"{report.run}: {report.command}, steps {report.first_step} to {report.last_step}")
    if report.checkpoints:
        console.print(f"checkpoints: {', '.join(map(str, report.checkpoints))}", highlight=False)
    what = "records" if report.command == "sft" else "prompts"
    table = Table("epoch", what, "issued", "trained", "waiting", "dropped tries", "repeated", "missing")
    for epoch in report.epochs:
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(epoch.dropped.items())) or "0"
        numbers = (epoch.issued, epoch.trained, epoch.waiting)
        size = "" if epoch.problems is None else str(epoch.problems)
        lost = (str(epoch.repeated), str(epoch.missing))
        table.add_row(str(epoch.epoch), size, *map(str, numbers), dropped, *lost)
    if report.epochs:
        console.print(table)
    if report.staleness is not None:
        console.print(f"staleness: at most {report.staleness} steps, {report.max_off_policy_steps} allowed")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.ok:
        console.print("no violation")
        return
    violations = Table("violation", "what", "rows")
    for violation in report.violations:
        rows = "\n".join(json.dumps(row) for row in violation.rows)
        violations.add_row(violation.kind, escape(violation.what), escape(rows))
    console.print(violations)
    console.print(f"{len(report.violations)} violations")
