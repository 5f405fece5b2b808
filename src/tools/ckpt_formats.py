"""The commands `ckpt export`, `ckpt import` and `ckpt average`: exchange with other programs."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES
from cairn.checkpoint.tiers import Tier
from cairn.config.settings import Size
from cairn.config.shared import Place, ToolCommand
from cairn.formats import EXPORTERS, FORMATS, QUANTIZATIONS, WriteOptions, format_of
from cairn.formats.base import WEIGHT_DTYPES
from cairn.formats.transfer.export_folder import Exports, InTheWay, refuse_options
from cairn.run.errors import UsageError
from cairn.run.files import make_folders, write_atomic
from cairn.run.machine import bytes_of
from cairn.run.output import progress_bars
from cairn.tools.ckpt_output import print_json, say
from cairn.tools.ckpt_places import (
    flags_to_resume,
    foreign,
    local,
    name_of,
    new_folder,
    new_run,
    run_at,
    step_in,
    temporary_folder,
)

Dtype = Literal["float32", "bfloat16", "float16"]
if TYPE_CHECKING:
    ExportFormat = str
    ImportFormat = str
    Quantization = str
else:  # choices, which --help lists
    ExportFormat = Literal[tuple(sorted(EXPORTERS))]
    ImportFormat = Literal[tuple(sorted(FORMATS))]
    Quantization = Literal[tuple(sorted({name for names in QUANTIZATIONS.values() for name in names}))]


class _WriteArguments(ToolCommand):
    """What commands take that write weights."""

    shard_size: Size | None = None
    """Largest size of a file of weights, such as 2G (default: 5G)."""
    verify: bool = True
    """Read the result back and compare it with what it was made of; --no-verify does not."""

    @property
    def max_file_bytes(self) -> int:
        """The same in bytes."""
        return bytes_of(self.shard_size) if self.shard_size else MAX_FILE_BYTES


class Export(_WriteArguments):
    """Write a checkpoint in the format of another program."""

    command = "ckpt export"
    positional = ("step", "out")
    step: Place
    """A step_N folder, or an output folder (its newest good step), or the URL of one."""
    out: Place
    """The folder to make, which appears when all of it is written, or the URL of a new prefix."""
    all: bool = False
    """Export all steps of an output folder or a folder of checkpoints, each to OUT/step_N; skips what is
    there already, so a command that was killed is repeated."""
    format: ExportFormat = "hf"
    """The format to write."""
    dtype: Dtype | None = None
    """Data type of the weights (default: as they are)."""
    quantize: Quantization | None = None
    """Quantisation of the weights, in formats that have one (default: none)."""
    logits: Literal["auto", "always", "never"] = "auto"
    """Open the result in the program that it is for (transformers, PEFT), where that is installed, and
    compare logits of a few tokens with the step's; auto: models of up to 2 GiB in float32."""

    def execute(self) -> int:
        from cairn.formats.transfer.export_step import (  # imports torch, which --help has no time for
            export,
            left_out_of,
        )

        options = WriteOptions(WEIGHT_DTYPES.get(self.dtype or ""), self.max_file_bytes, self.quantize)
        if self.all:
            return _export_all(self, options)
        out = self.out
        with local(self.step, newest=True, near=out) as found_at, new_folder(out) as folder:
            step = step_in(found_at)
            with progress_bars() as stage:
                found = export(
                    step,
                    folder,
                    self.format,
                    options,
                    check=self.verify,
                    logits=self.logits,
                    stage=stage,
                )
            not_exported = left_out_of(step, self.format)
        name = name_of(self.step, step)
        if self.as_json:
            print_json(
                {
                    "step": name,
                    "folder": str(out),
                    "format": self.format,
                    "check": found,
                    "left_out": not_exported,
                }
            )
        else:
            say(f"{out} holds {name} as {self.format} ({found})")
            for line in not_exported:
                say(f"left out: {line}")
        return 0


def _export_all(arguments: Export, options: WriteOptions) -> int:
    """Run `ckpt export --all`; the exit code is 1 if a step could not be exported.

    Raises:
        UsageError: there are no steps, or something else is where one belongs; nothing was written.
    """
    if isinstance(arguments.out, str):
        raise UsageError(f"{arguments.out}: --all writes to a local folder; export steps to a URL one by one")
    if isinstance(arguments.step, Path) and (arguments.step / FILE_NAME).exists():
        raise UsageError(f"{arguments.step}: is a single step; --all takes an output folder, or checkpoints")
    exports = Exports(arguments.out, arguments.format, options)
    refuse_options(exports.name, exports.options)
    tier = run_at(arguments.step)
    with temporary_folder(arguments.out) as room:
        return _export_steps(arguments, exports, tier, room)


def _export_steps(arguments: Export, exports: Exports, tier: Tier, room: Path) -> int:
    """Export all steps of a tier, one after the other.

    Args:
        room: a temporary folder.
    """
    from cairn.formats.transfer.export_step import export_into, left_out_of

    def known(step: int) -> Path:
        """A folder with what is known of a step without reading all of it: at least its manifest."""
        if isinstance(tier, CheckpointStore):
            return tier.folder(step)
        folder = room / f"step_{step}"
        make_folders(folder)
        write_atomic(folder / FILE_NAME, tier.manifest(step).to_json())
        return folder

    steps = tier.steps()
    for step in steps:
        try:
            exports.is_done(known(step))
        except InTheWay as error:
            raise UsageError(str(error)) from None
        except CheckpointError:  # it is reported when its turn comes
            pass
    results: list[dict[str, Any]] = []

    def report(
        step: int, left_out: Sequence[str] = (), *, found: str | None = None, problem: str | None = None
    ) -> None:
        out = exports.folder_of(step)
        row = {"step": step, "folder": str(out), "check": found, "problem": problem}
        results.append({**row, "left_out": list(left_out)})
        if not arguments.as_json:
            say(f"{tier.name_of(step)}: NOT EXPORTED: {problem}" if problem else f"{out}: {found}")
            for line in left_out:
                say(f"left out: {line}")

    for step in steps:
        try:
            with exports.alone():
                if exports.is_done(known(step)):
                    local_step = known(step) if isinstance(tier, CheckpointStore) else None
                    left_out = left_out_of(local_step, exports.name) if local_step else []
                    report(step, left_out, found="was there already")
                    continue
                given = known(step) if isinstance(tier, CheckpointStore) else tier.name_of(step)
                with local(given, near=exports.folder_of(step)) as folder, progress_bars() as bars:
                    found = export_into(
                        exports,
                        folder,
                        check=arguments.verify,
                        logits=arguments.logits,
                        stage=lambda name, total: bars(f"step {step}: {name}", total),  # noqa: B023
                    )
                    report(step, left_out_of(folder, exports.name), found=found)
        except (CheckpointError, OSError) as error:
            report(step, problem=str(error))
    if arguments.as_json:
        print_json(results)
    return 1 if any(result["problem"] for result in results) else 0


class Import(ToolCommand):
    """Make a new run of another program's checkpoint."""

    command = "ckpt import"
    positional = ("source", "output_dir")
    source: Place
    """A checkpoint of another program: a folder or a file, or its URL."""
    output_dir: Place
    """Output folder of the new run, without checkpoints, or the URL for it."""
    format: ImportFormat | None = None
    """The source's format (default: by the names of its files)."""
    model: Place | None = None
    """Folder with config.json and tokenizer (default: those beside the source)."""
    verify: bool = True
    """Read the step back and compare it with the source; --no-verify does not."""
    weights_only: bool = False
    """Don't take over the state of the source's optimiser."""

    def execute(self) -> int:
        output_dir = self.output_dir
        with contextlib.ExitStack() as downloaded:
            source = downloaded.enter_context(foreign(self.source, output_dir))
            model = downloaded.enter_context(foreign(self.model, output_dir)) if self.model else None
            return _import_from(source, model, self)


def _import_from(source: Path, model: Path | None, arguments: Import) -> int:
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
    if not arguments.as_json:
        say(f"{source} has the format {name}{'' if arguments.format else ', by its files'}")
    with new_run(output_dir) as run:
        try:
            with progress_bars() as stage:
                made, manifest, content = import_checkpoint(
                    source,
                    run,
                    name,
                    model=model,
                    weights_only=arguments.weights_only,
                    check=arguments.verify,
                    stage=stage,
                )
        except FileNotFoundError as error:
            raise UsageError(f"{error.filename}: {error.strerror}") from None
    folder = name_of(output_dir, made)
    weights_only = manifest.parts == ["model"]
    if arguments.as_json:
        print_json(
            {
                "folder": folder,
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
        of_url = isinstance(output_dir, str)
        say(f"{folder} holds weights only; start a run from{' a local copy of' * of_url} them with")
        say(f"  --model.name {'COPY/checkpoints/' + made.name if of_url else folder}")
        if content.critic is not None:
            say(f"  --trainer.critic.model {folder}  # its critic, for one that the run shall have")
    else:
        say(f"{folder} is step {manifest.step} of the new run {manifest.run_id}; resume it with")
        say(f"  {flags_to_resume(output_dir)}")
        if content.critic is not None:
            say("  --trainer.critic --orchestrator.advantage.type gae  # it has a critic, which goes on, too")
    return 0


class AverageSteps(_WriteArguments):
    """Average the weights of checkpoints, as a Hugging Face directory."""

    command = "ckpt average"
    positional = ("steps", "out")
    exclusive = ("weights", "ema")
    steps: list[Place]
    """step_N folders or their URLs, two or more."""
    out: Place
    """The folder to make, which appears when all of it is written, or the URL of a new prefix."""
    weights: list[float] | None = None
    """The weight of each step, such as 1,2,1 (default: all the same); they are divided by their sum."""
    ema: float | None = Field(default=None, ge=0, lt=1)
    """Exponential moving average over the steps in the order given, with this decay, such as 0.9."""
    dtype: Dtype | None = None
    """Data type of the weights (default: as in the last step)."""

    @field_validator("weights")
    @classmethod
    def _add_up(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and not (all(0 <= one < float("inf") for one in value) and sum(value)):
            raise ValueError(f"{value} is no list of weights; give one such as 1,2,1")
        return value

    def execute(self) -> int:
        with contextlib.ExitStack() as downloaded:
            places = [
                downloaded.enter_context(local(place, newest=True, near=self.out)) for place in self.steps
            ]
            return _average([step_in(place) for place in places], self)


def _average(steps: list[Path], arguments: AverageSteps) -> int:
    from cairn.formats.transfer.average import average_steps, ema_weights  # imports torch

    out = arguments.out
    weights = arguments.weights or [1.0] * len(steps)
    if arguments.ema is not None:
        weights = ema_weights(len(steps), arguments.ema)
    options = WriteOptions(WEIGHT_DTYPES.get(arguments.dtype or ""), arguments.max_file_bytes)
    with new_folder(out) as folder, progress_bars() as stage:
        found = average_steps(steps, weights, folder, options, check=arguments.verify, stage=stage)
    shares = [weight / sum(weights) for weight in weights]
    names = [name_of(given, step) for given, step in zip(arguments.steps, steps, strict=True)]
    if arguments.as_json:
        content = {"steps": names, "weights": shares, "folder": str(out)}
        print_json({**content, "check": found})
        return 0
    for name, share in zip(names, shares, strict=True):
        say(f"{share:8.4f}  {name}")
    say(
        f"{out} is a Hugging Face directory with their average ({found}): weights only, no optimiser's state;"
    )
    of_url = "a local copy" if isinstance(out, str) else out
    say(f"a new run begins from them with --model.name {of_url}")
    return 0
