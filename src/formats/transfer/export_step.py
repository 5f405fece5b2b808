"""Writes a step in a foreign format, into a folder that appears only when all of it is there."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from cairn.checkpoint.manifest import CheckpointError, Damaged, load_manifest
from cairn.checkpoint.step_folder import (
    ADAPTER,
    CRITIC,
    MODEL,
    OPTIMIZER,
    OrchestratorRecord,
    StepFolder,
    TrainerRecord,
)
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats import EXPORTERS, FORMATS, Content, Stage, Verification, WriteOptions, no_progress
from cairn.formats.base import written_bytes
from cairn.formats.common.verified_reads import CheckedStep
from cairn.formats.transfer.export_folder import RECORD, UNFINISHED, Exports, refuse_options
from cairn.model.adapters import is_adapter
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.files import make_folders, sync, write_atomic
from cairn.run.jsonlines import as_object
from cairn.run.recipe import inputs_of
from cairn.run.view import RunView

NOTHING: Mapping[str, bytes] = MappingProxyType({})


def content_of_step(folder: Path) -> Content:
    """The content of a step of Cairn, as formats write it.

    A step that holds an adapter is given as the whole model, merged, and the adapter; the state of the
    adapter's optimiser, which no format has a place for, is left out.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged; or the base of its adapter is not
            there, or is another model.
    """
    step = StepFolder(folder)
    tensors: dict[str, Mapping[str, TensorSource]]
    if is_adapter(step.model):
        tensors = {MODEL: FORMATS["peft"].read(step.model).tensors[MODEL], ADAPTER: step.tensors(ADAPTER)}
    else:
        tensors = {MODEL: step.tensors(MODEL), OPTIMIZER: step.tensors(OPTIMIZER)}
    if not tensors[MODEL]:
        raise Damaged(f"{step.model}: holds no weights")
    return replace(about_step(folder), tensors={stem: named for stem, named in tensors.items() if named})


def about_step(folder: Path) -> Content:
    """What a step says of itself, without its tensors.

    Raises:
        CheckpointError: the folder is not a checkpoint, or is damaged.
    """
    step = StepFolder(folder)
    record = step.trainer_state()
    if record is None:
        return Content({}, model=step.model)
    asked = step.orchestrator_state() or OrchestratorRecord()
    return Content(
        {},
        model=step.model,
        step=record.progress.get("step"),
        tokens=record.progress.get("total_tokens"),
        samples=record.records if record.progress else None,
        optimizer=record.optimizer,
        settings=(record.recipe or {}).get("settings", {}),
        origin=_origin(folder, record),
        inputs=inputs_of(record.recipe or {}, asked.recipe or {}),
    )


def _origin(folder: Path, record: TrainerRecord) -> dict[str, str]:
    """Where a step's weights come from; see `Content.origin`."""
    manifest = load_manifest(folder)
    recipe: Mapping[str, Any] = record.recipe or {}
    trained = {"method": recipe.get("method") or ("sft" if "data" in recipe else "")}
    if "orchestrator" in manifest.parts:
        trained["method"] = "reinforcement-learning"
    known = {
        "data": ", ".join(_data(folder)),
        **{"run": manifest.run_id, "saved": manifest.created, "version": manifest.versions.get("cairn", "")},
        **{"base": recipe.get("base", ""), **trained},
    }
    return {name: value for name, value in known.items() if value}


def _data(folder: Path) -> list[str]:
    """What the run of the step in `folder` learns from, by its config.json; of a path, the last part.

    Data sets, or environments; nothing if the step does not lie in its run's directory.
    """
    config = RunView(folder.parent.parent).known_config() or {}
    orchestrator = as_object(config.get("orchestrator"))
    several: Any = orchestrator.get("environments") or as_object(config.get("data")).get("sets")
    one: list[Any] = [config.get("data"), orchestrator.get("environment")]
    found = cast("list[Any]", several) if several and isinstance(several, list) else one
    names = [as_object(one).get("name") for one in found]
    return [Path(x).name if Path(x).is_absolute() else x for x in names if isinstance(x, str) and x]


def export(
    step: Path,
    out: Path,
    name: str,
    options: WriteOptions,
    *,
    check: bool = True,
    logits: str = "auto",
    stage: Stage = no_progress,
    beside: Mapping[str, bytes] = NOTHING,
) -> str:
    """Write the step in the folder `step` to the new folder `out`, in the format `name`.

    Every byte that is taken over is verified. A process that is killed leaves `out` with UNFINISHED at the
    end of its name, which the next call removes.

    Args:
        check: read the result back and compare it with what was read of the step; see `Exporter.write`.
        logits: whether the result is opened in another program, too, to compare logits; see
            `transfer.opened`. Without `check` it is not.
        beside: further files in `out`, by name.

    Returns:
        What the check found, as the command prints it.

    Raises:
        UsageError: `out` exists, or can't be made; the format has no such quantisation.
        CheckpointError: the step is damaged, or has no counterpart in this format.
        OSError: a file can't be written; the error names it.
    """
    refuse_options(name, options)
    content = content_of_step(step)
    read = CheckedStep(step)
    watched = {stem: read.watch(named) for stem, named in content.tensors.items()}
    with appearing(out) as folder:
        written = replace(content, tensors=watched)
        verify = write_content(written, folder, name, options, stage)
        read.check(stage)
        found = verify(stage) if check else "not read back"
        if check and logits != "never":
            from cairn.formats.transfer.opened import compare_logits  # imports transformers

            opened = compare_logits(name, folder, content, options, stage, logits)
            found += f"; {opened}" if opened else ""
        for file, data in beside.items():
            write_atomic(folder / file, data, durable=True)
    return found


def left_out_of(step: Path, name: str) -> list[str]:
    """What a step holds and the format `name` has no place for, one sentence each."""
    folder, stems = StepFolder(step), EXPORTERS[name].stems
    left_out: list[str] = []
    if folder.tensors(CRITIC):
        left_out.append(f"the critic ({folder.critic}); another run begins with it by trainer.critic.model")
    if is_adapter(folder.model) and OPTIMIZER in stems:
        left_out.append("the state of the adapter's optimiser: the weights are the merged model's")
    return left_out


def write_content(
    content: Content, folder: Path, name: str, options: WriteOptions, stage: Stage
) -> Verification:
    """Write `content` into the empty folder `folder`, in the format `name`, and make all of it durable.

    Returns:
        What reads it back from the disk.

    Raises:
        CheckpointError: a source is damaged, or has no counterpart in this format.
        OSError: a file can't be written; the error names it.
    """
    stems = EXPORTERS[name].stems
    if OPTIMIZER in stems and content.optimizer not in (None, "AdamW"):
        raise CheckpointError(
            f"the step has the state of {content.optimizer}, and what {name} stores is AdamW's: export the "
            "weights alone, with --format hf"
        )
    nbytes = sum(
        written_bytes(source.spec, options.dtype if stem == MODEL else None)
        for stem in stems
        for source in content.tensors.get(stem, {}).values()
    )
    progress = stage(f"writing {name}", nbytes)
    left, several = nbytes, threading.Lock()

    def on_bytes(count: int) -> None:
        nonlocal left
        with several:
            count = min(count, left)
            left -= count
        progress(count)
        fault_point("export.write")

    verify = EXPORTERS[name].write(content, folder, replace(options, on_bytes=on_bytes))
    progress(left)  # a format may write fewer bytes: a quantisation, or an embedding once that is tied
    fault_point("export.before_fsync")
    for path in (*folder.rglob("*"), folder):
        sync(path, forget=path.is_file())
    return verify


@contextlib.contextmanager
def appearing(out: Path) -> Generator[Path]:
    """A new folder to fill, which gets the name `out` at the end; an error removes it.

    A process that is killed leaves `out` with UNFINISHED at the end of its name, which the next call removes.

    Raises:
        UsageError: `out` exists, or can't be made.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out}: exists already; give a new folder")
    unfinished = out.absolute().with_name(out.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        make_folders(unfinished)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{out}: can't be made: {error.filename} is not a folder") from None
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    fault_point("export.before_rename")
    unfinished.rename(out)
    sync(out.absolute().parent)


def export_into(
    exports: Exports, step: Path, *, check: bool = True, logits: str = "auto", stage: Stage = no_progress
) -> str:
    """Write the step in the folder `step` to its place in `exports`, with the record of what it is made from.

    See `export` for arguments, result and errors. Call it while `exports.alone`.
    """
    record = exports.record_of(step)
    return export(
        step,
        exports.folder_of(record.step),
        exports.name,
        exports.options,
        check=check,
        logits=logits,
        stage=stage,
        beside={RECORD: (json.dumps(asdict(record), indent=2) + "\n").encode()},
    )
