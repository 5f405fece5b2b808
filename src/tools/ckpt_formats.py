"""The commands `ckpt export` and `ckpt import`: checkpoints in the formats of other programs."""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.formats import EXPORTERS, FORMATS, QUANTIZATIONS, WriteOptions, format_of
from cairn.formats.base import WEIGHT_DTYPES
from cairn.formats.transfer.export_folder import Exports, InTheWay, refuse_options
from cairn.run.errors import UsageError
from cairn.run.machine import bytes_of
from cairn.run.progress import progress_bars
from cairn.tools.ckpt_output import print_json, say
from cairn.tools.ckpt_paths import store_in
from cairn.tools.ckpt_remote import foreign, local, local_target, name_of, place


def add_export(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt export`."""
    command.add_argument(
        "step",
        type=place,
        help="a step_N folder, or an output folder (its newest good step), or the URL of one",
    )
    command.add_argument(
        "out", type=local_target, help="the folder to make; it appears when all of it is written"
    )
    command.add_argument(
        "--all",
        action="store_true",
        help="export all steps of an output folder or a folder of checkpoints, each to OUT/step_N; skips "
        "what is there already, so a command that was killed is repeated",
    )
    command.add_argument(
        "--format", choices=sorted(EXPORTERS), default="hf", help="the format to write (default: hf)"
    )
    command.add_argument(
        "--dtype", choices=sorted(WEIGHT_DTYPES), help="data type of the weights (default: as they are)"
    )
    add_shards(command)
    command.add_argument(
        "--quantize",
        choices=sorted({name for names in QUANTIZATIONS.values() for name in names}),
        help="quantisation of the weights, in formats that have one (default: none)",
    )
    command.add_argument(
        "--no-verify", action="store_true", help="don't read the result back to compare it with the step"
    )
    command.add_argument(
        "--logits",
        choices=("auto", "always", "never"),
        default="auto",
        help="open the result in the program that it is for (transformers, PEFT), where that is installed, "
        "and compare logits of a few tokens with the step's; auto: models of up to 2 GiB in float32",
    )


def add_shards(command: argparse.ArgumentParser) -> None:
    """Add the argument for the largest size of a file."""
    command.add_argument(
        "--shard-size",
        type=_bytes_of,
        default=MAX_FILE_BYTES,
        metavar="SIZE",
        help="largest size of a file of weights, such as 2G (default: 5G)",
    )


def export_step(arguments: argparse.Namespace) -> int:
    """Run `ckpt export`."""
    from cairn.formats.transfer.export_step import (  # imports torch, which --help has no time for
        export,
        left_out_of,
    )

    options = WriteOptions(WEIGHT_DTYPES.get(arguments.dtype), arguments.shard_size, arguments.quantize)
    if arguments.all:
        return _export_all(arguments, Exports(arguments.out, arguments.format, options))
    out = arguments.out
    with local(arguments.step, newest=True, near=out) as place, progress_bars() as stage:
        step = step_in(place)
        found = export(
            step,
            out,
            arguments.format,
            options,
            check=not arguments.no_verify,
            logits=arguments.logits,
            stage=stage,
        )
        not_exported = left_out_of(step, arguments.format)
    name = name_of(arguments.step, step)
    if arguments.json:
        print_json(
            {
                "step": name,
                "folder": str(out),
                "format": arguments.format,
                "check": found,
                "left_out": not_exported,
            }
        )
    else:
        say(f"{out} holds {name} as {arguments.format} ({found})")
        for line in not_exported:
            say(f"left out: {line}")
    return 0


def _export_all(arguments: argparse.Namespace, exports: Exports) -> int:
    """Run `ckpt export --all`; the exit code is 1 if a step could not be exported.

    Raises:
        UsageError: there are no steps, or something else is where one belongs; nothing was written.
    """
    from cairn.formats.transfer.export_step import export_into, left_out_of

    if isinstance(arguments.step, str):
        raise UsageError(f"{arguments.step}: --all takes a local folder; export steps of a URL one by one")
    if (arguments.step / FILE_NAME).exists():
        raise UsageError(f"{arguments.step}: is a single step; --all takes an output folder, or checkpoints")
    refuse_options(exports.name, exports.options)
    store = store_in(arguments.step)
    steps = store.steps()
    for step in steps:
        try:
            exports.is_done(store.folder(step))
        except InTheWay as error:
            raise UsageError(str(error)) from None
        except CheckpointError:  # it is reported when its turn comes
            pass
    results: list[dict[str, Any]] = []

    def report(step: int, *, found: str | None = None, problem: str | None = None) -> None:
        out = exports.folder_of(step)
        left_out = left_out_of(store.folder(step), arguments.format) if found else []
        row = {"step": step, "folder": str(out), "check": found, "problem": problem, "left_out": left_out}
        results.append(row)
        if not arguments.json:
            say(f"{store.folder(step)}: NOT EXPORTED: {problem}" if problem else f"{out}: {found}")
            for line in left_out:
                say(f"left out: {line}")

    with progress_bars() as bars:
        for step in steps:

            def stage(name: str, total: int, step: int = step) -> Callable[[int], None]:
                return bars(f"step {step}: {name}", total)

            try:
                with exports.alone():
                    if exports.is_done(store.folder(step)):
                        report(step, found="was there already")
                        continue
                    check = not arguments.no_verify
                    how = {"check": check, "logits": arguments.logits}
                    report(step, found=export_into(exports, store.folder(step), **how, stage=stage))
            except (CheckpointError, OSError) as error:
                report(step, problem=str(error))
    if arguments.json:
        print_json(results)
    return 1 if any(result["problem"] for result in results) else 0


def add_import(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckpt import`."""
    command.add_argument(
        "source", type=place, help="a checkpoint of another program: a folder or a file, or its URL"
    )
    command.add_argument(
        "output_dir", type=local_target, help="output folder of the new run, without checkpoints"
    )
    command.add_argument(
        "--format", choices=sorted(FORMATS), help="the source's format (default: by the names of its files)"
    )
    command.add_argument(
        "--model", type=place, help="folder with config.json and tokenizer (default: those beside the source)"
    )
    command.add_argument(
        "--no-verify", action="store_true", help="don't read the step back to compare it with the source"
    )
    command.add_argument(
        "--weights-only", action="store_true", help="don't take over the state of the source's optimiser"
    )


def import_step(arguments: argparse.Namespace) -> int:
    """Run `ckpt import`."""
    output_dir = arguments.output_dir
    with contextlib.ExitStack() as downloaded:
        source = downloaded.enter_context(foreign(arguments.source, output_dir))
        model = arguments.model and downloaded.enter_context(foreign(arguments.model, output_dir))
        return _import_from(source, model, arguments)


def _import_from(source: Path, model: Path | None, arguments: argparse.Namespace) -> int:
    from cairn.formats.transfer.import_step import (
        import_checkpoint,  # imports torch, which --help has no time for
    )

    output_dir = arguments.output_dir
    if not source.exists():
        raise UsageError(f"{source}: there is no such file or folder")
    if (source / FILE_NAME).exists():
        raise UsageError(f"{source}: is a checkpoint of Cairn; ckpt fork makes a new run of it")
    name = arguments.format or format_of(source)
    if name is None:
        raise UsageError(f"{source}: has none of the formats {', '.join(FORMATS)}")
    if not arguments.json:
        say(f"{source} has the format {name}{'' if arguments.format else ', by its files'}")
    with progress_bars() as stage:
        try:
            folder, manifest, content = import_checkpoint(
                source,
                output_dir,
                name,
                model=model,
                weights_only=arguments.weights_only,
                check=not arguments.no_verify,
                stage=stage,
            )
        except FileNotFoundError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
    weights_only = manifest.parts == ["model"]
    if arguments.json:
        print_json(
            {
                "folder": str(folder),
                "format": name,
                "step": manifest.step,
                "run_id": manifest.run_id,
                "weights_only": weights_only,
                "critic": content.critic is not None,
                "settings": dict(content.settings),
                "said": list(content.said),
                "left_out": list(content.left_out),
            }
        )
        return 0
    for line in content.said:
        say(line)
    for line in content.left_out:
        say(f"left out: {line}")
    for key, value in content.settings.items():
        say(f"the source's {key}: {value}")
    if weights_only:
        say(f"{folder} holds weights only; start a run from them with")
        say(f"  --model.name {folder}")
        if content.critic is not None:
            say(f"  --trainer.critic.model {folder}  # its critic, for one that the run shall have")
    else:
        say(f"{folder} is step {manifest.step} of the new run {manifest.run_id}; resume it with")
        say(f"  --output-dir {output_dir} --ckpt.resume latest")
        if content.critic is not None:
            say("  --trainer.critic --orchestrator.advantage.type gae  # it has a critic, which goes on, too")
    return 0


def step_in(path: Path) -> Path:
    """The step in `path`, or the newest good one of a run.

    Raises:
        UsageError: there is none.
    """
    if (path / FILE_NAME).exists():
        return path
    for root in (path / "checkpoints", path):
        folder, passed_over = CheckpointStore(root).newest_good(content=False)
        for problem in passed_over:
            say(f"passed over: {problem}")
        if folder is not None:
            return folder
    raise UsageError(f"{path}: is no checkpoint, and there are none in it")


def _bytes_of(text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
