"""The commands `ckpt list` and `ckpt prune`: the steps of a run, and what keeps each of them."""

import argparse
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cairn.checkpoint.eval_metrics import Ratings, ratings_in
from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, check_files, load_manifest
from cairn.checkpoint.retention import (
    OF_SPIKES,
    WAITING,
    Spare,
    add_spared,
    pins,
    prune,
    read_steps,
    reasons_to_keep,
    set_pin,
)
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.formats.transfer.export_folder import run_exports
from cairn.remote.uploads import RunUploads
from cairn.run.errors import CairnError, UsageError
from cairn.run.jsonlines import as_object
from cairn.tools import ckpt_remote
from cairn.tools.ckpt_output import print_json, print_list, print_prune, say
from cairn.tools.ckpt_paths import STORE_HELP, attempt_id, run_config, store_in
from cairn.tools.ckpt_remote import place


def add_list(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt list`."""
    command.add_argument("path", type=place, help=STORE_HELP)
    command.add_argument("--metric", help="show this metric as well, such as eval/NAME/reward")


def list_steps(arguments: argparse.Namespace) -> int:
    """Run `ckpt list`."""
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
        add_spared(kept, _spares(path, store, rules))
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


def add_prune(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt prune`."""
    command.add_argument(
        "path", type=place, help="an output folder, its checkpoints folder, or the URL of a run"
    )
    command.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    command.add_argument(
        "--pin",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="first pin these steps, to keep them for ever",
    )
    command.add_argument(
        "--unpin", type=int, nargs="+", default=[], metavar="N", help="first remove the pins of these steps"
    )
    command.add_argument(
        "--abandoned",
        action="store_true",
        help="also delete steps that were set aside when the run went back",
    )
    for name in ("last", "every", "best"):
        command.add_argument(f"--keep-{name}", type=int, metavar="N", help="as in [ckpt]; default: the run's")
    command.add_argument("--metric", help="as in [ckpt]; default: the run's")
    command.add_argument("--mode", choices=["min", "max"], help="as in [ckpt]; default: the run's")


def prune_steps(arguments: argparse.Namespace) -> int:
    """Run `ckpt prune`."""
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
    for name in ("pin", "unpin"):
        if getattr(arguments, name):
            raise UsageError(
                f"--{name}: is for a run directory, and {arguments.path} is a URL; a run's pins go there "
                "with the next step that it uploads"
            )
    rules = _rules_by(arguments, CkptConfig())
    if rules.keep_last is None and rules.keep_best is None and not arguments.abandoned:
        raise UsageError(
            f"{arguments.path}: the run's rules are not there, so give --keep-last or --keep-best; without "
            "either, all steps are kept"
        )
    return ckpt_remote.prune(arguments.path, rules, abandoned=arguments.abandoned, dry_run=arguments.dry_run)


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
            spares=_spares(arguments.path, store, rules),
            abandoned=arguments.abandoned,
            dry_run=arguments.dry_run,
        )


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


def _spares(path: Path, store: CheckpointStore, rules: CkptConfig) -> dict[str, Spare]:
    """Which steps that no rule keeps the run around the checkpoints still needs, by the reason.

    They wait to be exported or uploaded, or are what a spike in the next step goes back to.
    """
    if rules.export is None and rules.remote is None and not rules.interval:
        return {}
    config = run_config(path)
    last, spares = config.get("max_steps", 0), list[Spare]()
    if rules.export is not None and rules.export.folder is not None:
        made = run_exports(rules.export, last=last, attempt=attempt_id(path))
        spares.append(lambda unkept: made.hold(store, unkept).kept)
    if rules.remote is not None:
        uploads = RunUploads(store, rules, last)
        spares.append(lambda unkept: uploads.hold(unkept).kept)
    found: dict[str, Spare] = {WAITING: lambda unkept: {step for spare in spares for step in spare(unkept)}}
    spike = as_object(as_object(config.get("trainer") or config).get("spike"))
    if spike.get("on_spike") == "rewind" and rules.interval:
        from cairn.run.rewinds import spared_for_rewinds  # imports more than --help has time for

        found[OF_SPIKES] = lambda unkept: spared_for_rewinds(unkept, store.latest() or 0, rules.interval or 0)
    return found


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
