"""The `ckpt` command: inspects and manages checkpoints, with or without a run around them."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.formats.transfer.diff import compare
from cairn.remote.uploads import note_origin
from cairn.run.errors import UsageError
from cairn.run.output import progress_bars
from cairn.tools.ckpt_formats import add_average, add_export, add_import, average, export_step, import_step
from cairn.tools.ckpt_output import print_audit, print_diff, print_json, print_manifest, say
from cairn.tools.ckpt_places import (
    STORE_HELP,
    flags_to_resume,
    local,
    local_run,
    name_of,
    new_run,
    place,
    refuse_empty,
    run_config,
    side,
    step_at,
    step_folder,
    tier_at,
)
from cairn.tools.ckpt_steps import add_copy, add_list, add_prune, copy, list_steps, prune_steps


def run() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ckpt", description="Inspect and manage the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, does: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(action=action)
        return command

    add_list(add("list", "list the steps of a run", list_steps))
    add("show", "print a checkpoint's manifest", _show).add_argument(
        "step", type=place, help="a step_N folder, or its URL"
    )
    add("verify", "check every byte; exit code 1 on damage", _verify).add_argument(
        "path", type=place, help=STORE_HELP
    )
    diff = add("diff", "compare two checkpoints", _diff)
    diff.add_argument("a", type=place, help="a step_N folder, its URL, or another program's checkpoint")
    diff.add_argument("b", type=place, help="another")
    diff.add_argument(
        "--top", type=int, default=10, help="number of tensors to print (default: 10; with --json: all)"
    )
    add_prune(add("prune", "delete steps that no retention rule keeps, and unfinished saves", prune_steps))
    branch = add("fork", "copy a checkpoint into a new run's output folder", _fork)
    branch.add_argument("step", type=place, help="a step_N folder, or its URL")
    branch.add_argument(
        "output_dir", type=place, help="output folder of the new run, without checkpoints, or the URL for it"
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
    proof.add_argument(
        "--data", action="store_true", help="SFT: also compare batches with the data, by content"
    )
    arguments = parser.parse_args(sys.argv[1:])
    return arguments.action(arguments)


# Commands


def _show(arguments: argparse.Namespace) -> int:
    tier, step = step_at(arguments.step)
    manifest = tier.manifest(step)
    if arguments.json:
        print_json(manifest.model_dump())
        return 0
    print_manifest(manifest)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    tier, only = tier_at(arguments.path)
    steps = tier.steps() if only is None else [only]
    refuse_empty(tier, steps)
    results: list[dict[str, Any]] = []
    with progress_bars() as stage:
        for step in steps:
            name, problem = tier.name_of(step), None
            try:
                done = stage(name.rpartition("/")[2], tier.manifest(step).nbytes)
                tier.verify(step, on_bytes=done)
            except CheckpointError as error:
                problem = str(error)
            results.append({"folder": name, "ok": problem is None, "problem": problem})
    if arguments.json:
        print_json(results)
    else:
        for result in results:
            say(f"{result['folder']}: {'ok' if result['ok'] else 'DAMAGED: ' + result['problem']}")
    return 0 if all(result["ok"] for result in results) else 1


def _diff(arguments: argparse.Namespace) -> int:
    with side(arguments.a) as a, side(arguments.b) as b, progress_bars() as stage:
        report = compare(a, b, stage)
    for of_side, given in (("a", arguments.a), ("b", arguments.b)):
        report[of_side]["folder"] = str(given)
    if arguments.json:
        print_json(report)
        return 0
    print_diff(report, top=arguments.top)
    return 0


def _fork(arguments: argparse.Namespace) -> int:
    from cairn.checkpoint.fork import fork  # imports numpy, which would slow down --help

    target = arguments.output_dir
    if arguments.link and isinstance(target, str):
        raise UsageError(f"--link: {target} is a URL, where no hard links can be; leave out --link")
    with local(arguments.step, near=target) as found, new_run(target) as run:
        step = step_folder(found)
        made, forked = fork(step, run, link=arguments.link)
        if url := arguments.step if isinstance(arguments.step, str) else _uploaded(step):
            note_origin(CheckpointStore(made.parent), url)
    folder = name_of(target, made)
    if arguments.json:
        parent = forked.parent.model_dump() if forked.parent else None
        print_json({"folder": folder, "run_id": forked.run_id, "parent": parent})
    else:
        say(f"{folder} is step {forked.step} of the new run {forked.run_id}; resume it with")
        say(f"  {flags_to_resume(target)}")
    return 0


def _uploaded(step: Path) -> str | None:
    """Where the step was uploaded to, if its run has an object store."""
    url = (run_config(step.parent).get("ckpt") or {}).get("remote")
    return f"{url}/{step.name}" if isinstance(url, str) else None


def _audit(arguments: argparse.Namespace) -> int:
    from cairn.tools.audit import audit  # imports numpy, which would slow down --help

    report = audit(arguments.run, data=arguments.data)
    if arguments.json:
        print_json(report.to_json())
    else:
        print_audit(report)
    return 0 if report.ok else 1
