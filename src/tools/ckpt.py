"""The `ckpt` command: inspects and manages checkpoints, with or without a run around them."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cairn.checkpoint.diff import compare
from cairn.checkpoint.exports import run_exports
from cairn.checkpoint.formats import format_of
from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, check_files, load_manifest
from cairn.checkpoint.ratings import Ratings, ratings_in
from cairn.checkpoint.remote.uploads import RunUploads
from cairn.checkpoint.retention import (
    WAITING,
    Spare,
    pins,
    prune,
    read_steps,
    reasons_to_keep,
    set_pin,
    spare_none,
)
from cairn.checkpoint.steps import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.run.errors import CairnError, UsageError
from cairn.run.progress import progress_bars
from cairn.tools import ckpt_remote
from cairn.tools.ckpt_formats import add_export, add_import, export_step, import_step
from cairn.tools.ckpt_output import (
    print_audit,
    print_diff,
    print_json,
    print_list,
    print_manifest,
    print_prune,
    say,
)
from cairn.tools.ckpt_paths import attempt_id, run_config, store_in
from cairn.tools.ckpt_remote import local_run, local_target, place
from cairn.tools.ckpt_steps import add_average, add_copy, average, copy


def run() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Inspect and manage the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, does: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(action=action)
        return command

    store_help = "an output folder, its checkpoints folder, or a step_N folder"
    store_help += ", or the URL of one in an object store"
    steps = add("list", "list the steps of a run", _list)
    steps.add_argument("path", type=place, help=store_help)
    steps.add_argument("--metric", help="show this metric as well, such as eval/NAME/reward")
    add("show", "print a checkpoint's manifest", _show).add_argument(
        "step", type=place, help="a step_N folder, or its URL"
    )
    add("verify", "check every byte; exit code 1 on damage", _verify).add_argument(
        "path", type=place, help=store_help
    )
    diff = add("diff", "compare two checkpoints", _diff)
    diff.add_argument("a", type=place, help="a step_N folder, its URL, or another program's checkpoint")
    diff.add_argument("b", type=place, help="another")
    diff.add_argument(
        "--top", type=int, default=10, help="number of tensors to print (default: 10; with --json: all)"
    )
    trim = add("prune", "delete steps that no retention rule keeps, and unfinished saves", _prune)
    trim.add_argument(
        "path", type=place, help="an output folder, its checkpoints folder, or the URL of a run"
    )
    trim.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    trim.add_argument(
        "--pin",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="first pin these steps, to keep them for ever",
    )
    trim.add_argument(
        "--unpin", type=int, nargs="+", default=[], metavar="N", help="first remove the pins of these steps"
    )
    trim.add_argument(
        "--abandoned",
        action="store_true",
        help="also delete steps that were set aside when the run went back",
    )
    for name in ("last", "every", "best"):
        trim.add_argument(f"--keep-{name}", type=int, metavar="N", help="as in [ckpt]; default: the run's")
    trim.add_argument("--metric", help="as in [ckpt]; default: the run's")
    trim.add_argument("--mode", choices=["min", "max"], help="as in [ckpt]; default: the run's")
    branch = add("fork", "copy a checkpoint into a new run's output folder", _fork)
    branch.add_argument("step", type=place, help="a step_N folder, or its URL")
    branch.add_argument(
        "output_dir", type=local_target, help="output folder of the new run, without checkpoints"
    )
    branch.add_argument(
        "--link",
        action="store_true",
        help="share the tensor files with the checkpoint by hard links: no copy, but damage is shared, too",
    )
    add_copy(add("copy", "copy a whole checkpoint, as it is, into another folder's checkpoints", copy))
    add_average(add("average", "average the weights of checkpoints, as a Hugging Face directory", average))
    add_import(add("import", "make a new run of another program's checkpoint", import_step))
    add_export(add("export", "write a checkpoint in the format of another program", export_step))
    proof = add("audit", "check that a run trained on everything exactly once; exit code 1 if not", _audit)
    proof.add_argument("run", type=local_run, help="an output folder; the run may be going on")
    arguments = parser.parse_args(sys.argv[1:])
    return arguments.action(arguments)


# Interpretation of paths


def _rules(path: Path) -> CkptConfig:
    """The run's retention rules; no rules if there is no run around the checkpoints.

    Raises:
        CheckpointError: the rules can't be read.
    """
    fields = run_config(path).get("ckpt") or {}
    try:
        return CkptConfig(**{key: value for key, value in fields.items() if key in CkptConfig.model_fields})
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path}: config.json has no valid section ckpt (the retention rules); repair or remove it"
        ) from None


def _waiting(path: Path, store: CheckpointStore, rules: CkptConfig) -> Spare:
    """Which steps that no rule keeps wait to be exported or uploaded by the run around the checkpoints."""
    if rules.export is None and rules.remote is None:
        return spare_none
    last, spares = run_config(path).get("max_steps", 0), list[Spare]()
    if rules.export is not None and rules.export.folder is not None:
        made = run_exports(rules.export, last=last, attempt=attempt_id(path))
        spares.append(lambda unkept: made.hold(store, unkept).kept)
    if rules.remote is not None:
        uploads = RunUploads(store, rules, last)
        spares.append(lambda unkept: uploads.hold(unkept).kept)
    return lambda unkept: {step for spare in spares for step in spare(unkept)}


def _ratings(store: CheckpointStore, rules: CkptConfig) -> Ratings:
    """The results of evaluations of the steps.

    Raises:
        CheckpointError: they can't be read.
        UsageError: the rules go by an evaluation's metric of which there are none.
    """
    ratings = ratings_in(store.root)
    if (
        rules.keep_best
        and rules.rated_by
        and rules.metric not in ratings.names
        and rules.metric_interval is None
    ):
        known = ", ".join(name for name in ratings.names if not name.endswith("_ci95")) or "none"
        raise UsageError(f"--metric {rules.metric}: no step has it; metrics of evaluations here: {known}")
    return ratings


def _rules_and_pins(path: Path, store: CheckpointStore) -> tuple[CkptConfig, set[int]]:
    """Retention rules and pins, as far as they can be read; enough for a listing."""
    rules, pinned = CkptConfig(), set()
    try:
        rules = _rules(path)
        pinned = pins(store)
    except CairnError as error:
        say(f"warning: the retention rules or pins can't be read: {error}", file=sys.stderr)
    return rules, pinned


def _step(path: Path) -> Path:
    """The folder of a single step.

    Raises:
        UsageError: `path` is not a step, or holds several.
    """
    if not (path / FILE_NAME).exists():
        for root in (path / "checkpoints", path):
            if (latest := CheckpointStore(root).latest()) is not None:
                raise UsageError(f"{path}: give one step, such as {CheckpointStore(root).folder(latest)}")
        try:
            load_manifest(path)  # raises an error that says what is wrong
        except CheckpointError as error:
            raise UsageError(str(error)) from None
    return path


def _side(path: Path) -> Path:
    """A step, or the checkpoint of another program.

    Raises:
        UsageError: it is neither, or holds several steps.
    """
    return path if format_of(path) else _step(path)


# Commands


def _list(arguments: argparse.Namespace) -> int:
    path = arguments.path
    if isinstance(path, str):
        rows = ckpt_remote.rows(path, arguments.metric)
    elif (path / FILE_NAME).exists():
        rows = [_row(path, [])]
    else:
        store = store_in(path)
        rules, pinned = _rules_and_pins(path, store)
        ratings = _ratings(store, rules)
        kept = reasons_to_keep(read_steps(store, ratings), rules, pinned)
        for step in _waiting(path, store, rules)([step for step, reasons in kept.items() if not reasons]):
            kept[step] = [WAITING]
        rows = [_row(store.folder(step), reasons, ratings) for step, reasons in kept.items()]
        rows += [{"folder": str(folder), "state": "partial"} for folder in store.debris()]
        rows += [
            {**_row(folder, []), "state": f"abandoned ({folder.parent.name})"}
            for folder in sorted(store.abandoned.glob("*/step_*"))
        ]
        rows += [
            {"folder": str(link), "state": f"not a step: link to {link.readlink()}"} for link in store.links()
        ]
    known = sorted({name for row in rows for name in row.get("metrics", {})})
    if arguments.metric and arguments.metric not in known:
        raise UsageError(
            f"--metric {arguments.metric}: no step has it; there are {', '.join(known) or 'none'}"
        )
    if arguments.json:
        print_json(rows)
        return 0
    print_list(rows, arguments.metric)
    return 0


def _row(folder: Path, reasons: list[str], ratings: Ratings | None = None) -> dict[str, Any]:
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
    return {
        "folder": str(folder),
        "state": state,
        "kept_by": reasons,
        "bytes": manifest.nbytes,
        **manifest.model_dump(include=fields),
        "metrics": ratings.metrics(manifest) if ratings else manifest.metrics,
    }


def _show(arguments: argparse.Namespace) -> int:
    remote = isinstance(arguments.step, str)
    manifest = ckpt_remote.manifest(arguments.step) if remote else load_manifest(_step(arguments.step))
    if arguments.json:
        print_json(manifest.model_dump())
        return 0
    print_manifest(manifest)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    path = arguments.path
    results = ckpt_remote.verify(path) if isinstance(path, str) else _verified(path)
    if arguments.json:
        print_json(results)
    else:
        for result in results:
            say(f"{result['folder']}: {'ok' if result['ok'] else 'DAMAGED: ' + result['problem']}")
    return 0 if all(result["ok"] for result in results) else 1


def _verified(path: Path) -> list[dict[str, Any]]:
    """The results for the local steps at `path`."""
    if (path / FILE_NAME).exists():
        folders = [path]
    else:
        store = store_in(path)
        folders = [store.folder(step) for step in store.steps()]
    results: list[dict[str, Any]] = []
    with progress_bars() as stage:
        for folder in folders:
            problem = None
            try:
                verify(folder, on_bytes=stage(folder.name, load_manifest(folder).nbytes))
            except CheckpointError as error:
                problem = str(error)
            results.append({"folder": str(folder), "ok": problem is None, "problem": problem})
    return results


def _diff(arguments: argparse.Namespace) -> int:
    with ckpt_remote.side(arguments.a) as a, ckpt_remote.side(arguments.b) as b, progress_bars() as stage:
        report = compare(_side(a), _side(b), stage)
    for side, text in (("a", arguments.a), ("b", arguments.b)):
        report[side]["folder"] = str(text)
    if arguments.json:
        print_json(report)
        return 0
    print_diff(report, top=arguments.top)
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    remote = isinstance(arguments.path, str)
    report = _pruned_remote(arguments) if remote else _pruned(arguments)
    if arguments.json:
        print_json(report)
    else:
        print_prune(report)
    return 1 if report["failed"] else 0


def _pruned_remote(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prune the steps below a URL, by the rules in the arguments alone; returns the report.

    Raises:
        UsageError: an argument makes sense for local steps only, or there is no rule.
    """
    for name in ("pin", "unpin", "abandoned"):
        if getattr(arguments, name):
            raise UsageError(
                f"--{name}: is for a run directory, and {arguments.path} is a URL; a run's pins go there "
                "with the next step that it uploads, and steps that it set aside make room for new ones"
            )
    rules = _rules_by(arguments, CkptConfig())
    if rules.keep_last is None and rules.keep_best is None:
        raise UsageError(
            f"{arguments.path}: the run's rules are not there, so give --keep-last or --keep-best; without "
            "either, all steps are kept"
        )
    return ckpt_remote.prune(arguments.path, rules, dry_run=arguments.dry_run)


def _rules_by(arguments: argparse.Namespace, rules: CkptConfig) -> CkptConfig:
    """These rules, with what the arguments say in place of theirs.

    Raises:
        UsageError: they contradict each other.
    """
    given = {
        key: value
        for key in ("keep_last", "keep_every", "keep_best", "metric", "mode")
        if (value := getattr(arguments, key)) is not None
    }
    if given.get("metric") not in (None, rules.metric):
        given["metric_interval"] = None
    try:
        return CkptConfig(**{**rules.model_dump(), **given})
    except ValidationError as error:
        raise UsageError(str(error.errors()[0]["msg"])) from None


def _pruned(arguments: argparse.Namespace) -> dict[str, Any]:
    """Prune local steps; returns the report."""
    store = store_in(arguments.path)
    for step in [*arguments.pin, *arguments.unpin]:
        if step not in store.steps():
            raise UsageError(f"--pin/--unpin {step}: no such step in {store.root}")
    if not arguments.dry_run:
        for step in arguments.pin:
            set_pin(store, step, True)
        for step in arguments.unpin:
            set_pin(store, step, False)
    rules = _rules_by(arguments, _rules(arguments.path))
    _ratings(store, rules)
    pinned = (pins(store) | set(arguments.pin)) - set(arguments.unpin)
    with store.alone():
        return prune(
            store,
            rules,
            pinned,
            spare=_waiting(arguments.path, store, rules),
            abandoned=arguments.abandoned,
            dry_run=arguments.dry_run,
        )


def _fork(arguments: argparse.Namespace) -> int:
    from cairn.checkpoint.fork import fork  # imports numpy, which would slow down --help

    with ckpt_remote.local(arguments.step, near=arguments.output_dir) as step:
        folder, forked = fork(_step(step), arguments.output_dir, link=arguments.link)
    if arguments.json:
        parent = forked.parent.model_dump() if forked.parent else None
        print_json({"folder": str(folder), "run_id": forked.run_id, "parent": parent})
    else:
        say(f"{folder} is step {forked.step} of the new run {forked.run_id}; resume it with")
        say(f"  --output-dir {arguments.output_dir} --ckpt.resume latest")
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from cairn.tools.audit import audit  # imports numpy, which would slow down --help

    report = audit(arguments.run)
    if arguments.json:
        print_json(report.to_json())
    else:
        print_audit(report)
    return 0 if report.ok else 1
