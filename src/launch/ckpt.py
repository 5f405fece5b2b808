"""`ckpt`: look at checkpoints and look after them, with or without a run around them."""

import argparse
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cairn.checkpoint.diff import compare
from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, Manifest, Origin, check_files, load_manifest
from cairn.checkpoint.retention import pins, read_steps, reasons_to_keep, set_pin
from cairn.checkpoint.store import CheckpointStore, verify
from cairn.config.ckpt import CkptConfig
from cairn.launch.ckpt_output import (
    print_audit,
    print_diff,
    print_json,
    print_list,
    print_manifest,
    print_prune,
)
from cairn.run.errors import UsageError
from cairn.run.files import read_json, sync, write_atomic


def run() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Look at checkpoints and look after them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, does: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        command.add_argument("--json", action="store_true", help="print data for programs")
        command.set_defaults(action=action)
        return command

    store_help = "a run, its checkpoints folder, or one step_N"
    add("list", "list the steps of a run", _list).add_argument("path", type=Path, help=store_help)
    add("show", "print what a checkpoint says of itself", _show).add_argument(
        "step", type=Path, help="a step_N"
    )
    add("verify", "check every byte; exit code 1 on damage", _verify).add_argument(
        "path", type=Path, help=store_help
    )
    diff = add("diff", "compare two checkpoints", _diff)
    diff.add_argument("a", type=Path, help="a step_N")
    diff.add_argument("b", type=Path, help="another")
    diff.add_argument(
        "--top", type=int, default=10, help="how many tensors to print (default: 10; --json: all)"
    )
    prune = add("prune", "delete the steps that no rule keeps, and the debris of broken saves", _prune)
    prune.add_argument("path", type=Path, help="a run or its checkpoints folder")
    prune.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    prune.add_argument(
        "--pin", type=int, nargs="+", default=[], metavar="N", help="keep these steps for ever"
    )
    prune.add_argument("--unpin", type=int, nargs="+", default=[], metavar="N", help="take the pin away")
    prune.add_argument("--abandoned", action="store_true", help="also delete the branches that rewinds left")
    for name in ("last", "every", "best"):
        prune.add_argument(f"--keep-{name}", type=int, metavar="N", help="as in [ckpt]; default: the run's")
    prune.add_argument("--metric", help="as in [ckpt]; default: the run's")
    prune.add_argument("--mode", choices=["min", "max"], help="as in [ckpt]; default: the run's")
    fork = add("fork", "start another run's folder from a checkpoint", _fork)
    fork.add_argument("step", type=Path, help="a step_N")
    fork.add_argument("output_dir", type=Path, help="the new run's folder, which has no checkpoints yet")
    proof = add("audit", "prove what a run was trained on; exit code 1 on a violation", _audit)
    proof.add_argument("run", type=Path, help="a run's folder; the run may be at work")
    arguments = parser.parse_args(sys.argv[1:])
    return arguments.action(arguments)


# What a path means


def _store(path: Path) -> CheckpointStore:
    """The store of a run directory or a checkpoints folder."""
    for root in (path / "checkpoints", path):
        store = CheckpointStore(root)
        if store.steps() or store.debris():
            return store
    config = _run_config(path)
    elsewhere = (config.get("ckpt") or {}).get("dir")
    if elsewhere and (store := CheckpointStore(elsewhere)).steps():
        return store
    raise UsageError(f"{path}: there is no checkpoint here")


def _run_config(path: Path) -> dict[str, Any]:
    """config.json of the run that `path` is or lies in, if there is one."""
    for folder in (path, path.absolute().parent):
        if (folder / "config.json").exists() and (content := read_json(folder / "config.json")):
            return content
    return {}


def _rules(path: Path) -> CkptConfig:
    """The run's retention rules; without a run around the checkpoints, none."""
    fields = _run_config(path).get("ckpt") or {}
    return CkptConfig(**{key: value for key, value in fields.items() if key in CkptConfig.model_fields})


def _step(path: Path) -> Path:
    """The folder of one step.

    Raises:
        CheckpointError: it is none.
        UsageError: it holds several.
    """
    if not (path / FILE_NAME).exists():
        for root in (path / "checkpoints", path):
            if (latest := CheckpointStore(root).latest()) is not None:
                raise UsageError(f"{path}: give one step, such as {CheckpointStore(root).folder(latest)}")
        load_manifest(path)  # says what is wrong
    return path


# Commands


def _list(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if (path / FILE_NAME).exists():
        rows = [_row(path, [])]
    else:
        store = _store(path)
        kept = reasons_to_keep(read_steps(store), _rules(path), pins(store))
        rows = [_row(store.folder(step), reasons) for step, reasons in kept.items()]
        rows += [{"folder": str(folder), "state": "partial"} for folder in store.debris()]
        rows += [
            {**_row(folder, []), "state": f"abandoned ({folder.parent.name})"}
            for folder in sorted(store.root.glob("abandoned/*/step_*"))
        ]
    if arguments.json:
        print_json(rows)
        return 0
    print_list(rows)
    return 0


def _row(folder: Path, reasons: list[str]) -> dict[str, Any]:
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "state": f"damaged: {error}"}
    state = "complete" if manifest.parts != ["model"] else "complete, weights only"
    try:
        check_files(folder, manifest, content=False)
    except CheckpointError as error:
        state = f"damaged: {error}"
    fields = {"step", "branch", "created", "run_id", "attempt", "parent", "world_size", "metrics", "parts"}
    size = sum(entry.size for entry in manifest.files.values())
    return {
        "folder": str(folder),
        "state": state,
        "kept_by": reasons,
        "bytes": size,
        **manifest.model_dump(include=fields),
    }


def _show(arguments: argparse.Namespace) -> int:
    manifest = load_manifest(_step(arguments.step))
    if arguments.json:
        print(manifest.model_dump_json(indent=2))
        return 0
    print_manifest(manifest)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if (path / FILE_NAME).exists():
        folders = [path]
    else:
        store = _store(path)
        folders = [store.folder(step) for step in store.steps()]
    results = []
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for folder in folders:
            task = progress.add_task(folder.name, total=None)
            problem = None
            try:
                size = sum(entry.size for entry in load_manifest(folder).files.values())
                progress.update(task, total=size)
                verify(folder, on_bytes=lambda count, task=task: progress.advance(task, count))
            except CheckpointError as error:
                problem = str(error)
            results.append({"folder": str(folder), "ok": problem is None, "problem": problem})
    if arguments.json:
        print_json(results)
    else:
        for result in results:
            print(f"{result['folder']}: {'ok' if result['ok'] else 'DAMAGED: ' + result['problem']}")
    return 0 if all(result["ok"] for result in results) else 1


def _diff(arguments: argparse.Namespace) -> int:
    a, b = _step(arguments.a), _step(arguments.b)
    report = compare(a, b)
    if arguments.json:
        print_json(report)
        return 0
    print_diff(report, top=arguments.top)
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    store = _store(arguments.path)
    for step in [*arguments.pin, *arguments.unpin]:
        if step not in store.steps():
            raise UsageError(f"--pin/--unpin {step}: no such step in {store.root}")
    if not arguments.dry_run:
        for step in arguments.pin:
            set_pin(store, step, True)
        for step in arguments.unpin:
            set_pin(store, step, False)
    given = {
        key: value
        for key in ("keep_last", "keep_every", "keep_best", "metric", "mode")
        if (value := getattr(arguments, key)) is not None
    }
    try:
        rules = CkptConfig(**{**_rules(arguments.path).model_dump(), **given})
    except ValueError as error:
        raise UsageError(str(error.errors()[0]["msg"])) from None
    good, damaged = store.newest_good()
    pinned = (pins(store) | set(arguments.pin)) - set(arguments.unpin)
    kept = reasons_to_keep(read_steps(store), rules, pinned)
    for step in [int(good.name.removeprefix("step_"))] if good else kept:
        kept[step] = kept[step] or ["newest good" if good else "none is good"]
    doomed = [store.folder(step) for step, reasons in kept.items() if not reasons]
    newest = store.latest() or 0  # what is newer may be a save that is under way just now
    debris = [folder for folder in store.debris() if int(folder.name.removeprefix("step_")) < newest]
    abandoned = sorted(store.root.glob("abandoned/*")) if arguments.abandoned else []
    if not arguments.dry_run:
        for folder in doomed:
            store.delete(int(folder.name.removeprefix("step_")))
        for folder in [*debris, *abandoned]:
            shutil.rmtree(folder)
    report = {
        "deleted": [str(folder) for folder in doomed],
        "debris": [str(folder) for folder in debris],
        "abandoned": [str(folder) for folder in abandoned],
        "kept": {str(step): reasons for step, reasons in kept.items() if reasons},
        "damaged": damaged,
        "dry_run": arguments.dry_run,
    }
    if arguments.json:
        print_json(report)
        return 0
    print_prune(report)
    return 0


def _fork(arguments: argparse.Namespace) -> int:
    source = _step(arguments.step)
    manifest = verify(source)
    target = CheckpointStore(arguments.output_dir / "checkpoints")
    if target.steps():
        raise UsageError(f"{arguments.output_dir}: has checkpoints already; give a new folder")
    folder = target.folder(manifest.step)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(FILE_NAME))
    forked = _as_fork(manifest)
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)
    write_atomic(folder / FILE_NAME, forked.to_json(), durable=True)
    verify(folder)
    if arguments.json:
        print_json({"folder": str(folder), "run_id": forked.run_id, "parent": forked.parent.model_dump()})
    else:
        print(f"{folder} is step {forked.step} of the new run {forked.run_id}; go on with")
        print(f"  --output-dir {arguments.output_dir} --ckpt.resume latest")
    return 0


def _as_fork(manifest: Manifest) -> Manifest:
    parent = Origin(run_id=manifest.run_id, step=manifest.step)
    new = {"run_id": secrets.token_hex(4), "attempt": 0, "branch": "branch_1", "parent": parent}
    return manifest.model_copy(update=new)


def _audit(arguments: argparse.Namespace) -> int:
    from cairn.launch.audit import audit  # imports numpy, which --help has no time for

    report = audit(arguments.run)
    if arguments.json:
        print_json(report.to_json())
    else:
        print_audit(report)
    return 0 if report.ok else 1
