"""`ckpt list`, `ckpt show` and `ckpt verify`: look at checkpoints, with or without a run around them."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.store import CheckpointStore, load_manifest, verify
from cairn.config.cli import UsageError


def run() -> int:
    """The command; returns the exit code, which is 1 if `verify` found damage."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Look at checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what, does in (
        ("list", "a run, its checkpoints folder, or one step_N", "list the steps"),
        ("show", "a step_N folder", "print what a checkpoint says of itself"),
        ("verify", "a run, its checkpoints folder, or one step_N", "check every file against its checksums"),
    ):
        command = commands.add_parser(name, help=does, description=does.capitalize() + ".")
        command.add_argument("path", type=Path, help=what)
        command.add_argument("--json", action="store_true", help="print data for programs")
    arguments = parser.parse_args(sys.argv[1:])
    return {"list": _list, "show": _show, "verify": _verify}[arguments.command](
        arguments.path, arguments.json
    )


def _folders(path: Path) -> list[Path]:
    """The committed steps that `path` means."""
    if (path / "manifest.json").exists():
        return [path]
    for root in (path / "checkpoints", path):
        store = CheckpointStore(root)
        if folders := [store.folder(step) for step in store.steps()]:
            return folders
    raise UsageError(f"{path}: there is no checkpoint here")


def _list(path: Path, as_json: bool) -> int:
    rows = []
    for folder in _folders(path):
        try:
            rows.append({"folder": str(folder), "state": "ok", **_summary(load_manifest(folder))})
        except CheckpointError as error:
            rows.append({"folder": str(folder), "state": str(error)})
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("step", "saved (UTC)", "MB", "ranks", "metrics", "run", "state")
    for row in rows:
        if "step" not in row:
            table.add_row(Path(row["folder"]).name, *[""] * 5, row["state"])
            continue
        metrics = "  ".join(
            f"{key} {row['metrics'][key]:.4g}" for key in ("loss", "reward/mean") if key in row["metrics"]
        )
        created = row["created"].removesuffix("+00:00").replace("T", " ")
        megabytes = f"{row['bytes'] / 1e6:.1f}"
        table.add_row(
            str(row["step"]), created, megabytes, str(row["world_size"]), metrics, row["run_id"], row["state"]
        )
    Console().print(table)
    return 0


def _summary(manifest: Manifest) -> dict:
    fields = {"step", "created", "run_id", "attempt", "parent", "world_size", "metrics", "parts"}
    summary = manifest.model_dump(include=fields)
    return {**summary, "bytes": sum(entry.size for entry in manifest.files.values())}


def _show(path: Path, as_json: bool) -> int:
    if len(folders := _folders(path)) != 1 or folders[0] != path:
        raise UsageError(f"{path}: show takes one step_N folder, such as {folders[-1]}")
    manifest = load_manifest(path)
    if as_json:
        print(manifest.model_dump_json(indent=2))
        return 0
    console = Console()
    for key, value in manifest.model_dump(exclude={"files"}).items():
        console.print(f"{key}: {value}", highlight=False)
    table = Table("file", "bytes")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size:,}")
    console.print(table)
    return 0


def _verify(path: Path, as_json: bool) -> int:
    results = []
    for folder in _folders(path):
        try:
            verify(folder)
            results.append({"folder": str(folder), "ok": True, "problem": None})
        except CheckpointError as error:
            results.append({"folder": str(folder), "ok": False, "problem": str(error)})
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            print(f"{result['folder']}: {'ok' if result['ok'] else 'DAMAGED: ' + result['problem']}")
    return 0 if all(result["ok"] for result in results) else 1
