"""Makes the first step of a new run, or a Hugging Face directory, from a checkpoint of another program."""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.fork import check_empty, fresh_store
from cairn.checkpoint.manifest import CheckpointError, Manifest, new_manifest
from cairn.checkpoint.step_folder import (
    CRITIC,
    CRITIC_OPTIMIZER,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    StepFolder,
    TrainerRecord,
)
from cairn.checkpoint.store import write_files
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.stream_writer import write_sources
from cairn.checkpoint.tensors.verified_copy import check_noted, noted
from cairn.formats import FORMATS, Content, Stage, no_progress, read_foreign
from cairn.formats.common.match_layout import state_of, weights_of
from cairn.formats.common.value_head import critic_of
from cairn.formats.transfer.agreement import agree
from cairn.formats.transfer.export_step import appearing
from cairn.model.described import (
    FILE_NAME,
    about_model,
    as_file,
    companion_files,
    damage_in,
    note_sums,
    with_both_forms,
    with_tokenizer_of,
)
from cairn.model.hub_layout import Layout
from cairn.model.untrusted_config import check_link, check_plain
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, naming, sync


def import_checkpoint(
    source: Path,
    output_dir: Path,
    name: str,
    *,
    model: Path | None = None,
    step: int | None = None,
    check: bool = True,
    weights_only: bool = False,
    stage: Stage = no_progress,
) -> tuple[Path, Manifest, Content]:
    """Write what `source` holds, in the format `name`, as the first step of a new run in `output_dir`.

    A process that is killed leaves a folder without a manifest, which is no step.

    Args:
        model: a folder with config.json and tokenizer; default: the one that belongs to the source.
        step: the number of the step; default: the source's, or 1 where it has none.
        check: read the step back and compare it with what was read of the source, bit for bit, before it
            counts.
        weights_only: don't take over the optimiser's state.

    Returns:
        The step's folder, its manifest, and the content of the source.

    Raises:
        UsageError: `output_dir` belongs to another run, or no configuration was found.
        CheckpointError: a tensor is missing, or has no place in the model; the message lists all of them.
        Damaged: the source is invalid, holds what is not allowed in it, or is not what was read back.
        OSError: a file can't be read or written; the error names it.
    """
    content = read_foreign(source, name, model)
    if content.state_refused and not weights_only:
        raise CheckpointError(
            f"{source}: the optimiser's state can't be taken over: {content.state_refused}. "
            "--weights-only takes the weights alone"
        )
    with companions_of(content, source) as companions:
        content, layout, files = fitted(content, companions, source)
    number = content.step if step is None else step
    number = 1 if number is None else number
    if number < 1:
        raise UsageError(f"{source}: is of step {number}, before any update; use it with --model.name")
    tensors = {MODEL: noted(weights_of(content.tensors[MODEL], layout, source))}
    parts = ["model"]
    state = None if weights_only else content.tensors.get(OPTIMIZER)
    if state:
        tensors[OPTIMIZER] = noted(state_of(state, layout, source))
        parts = ["trainer"]
        record = TrainerRecord(
            progress={
                "step": number,
                "total_tokens": content.tokens or 0,
                "total_samples": content.samples or 0,
            },
            optimizer=content.optimizer,
            recipe={"settings": dict(content.settings)},
        )
        files[TRAINER_STATE] = record.to_json()
    if content.critic is not None:
        of_critic, about_critic = critic_of(content, content.critic, source)
        if not state:
            of_critic.pop(CRITIC_OPTIMIZER, None)
        tensors |= {stem: noted(named) for stem, named in of_critic.items()}
        files[f"{CRITIC.rpartition('/')[0]}/config.json"] = about_critic
    about: dict[str, Any] = {
        "run_id": secrets.token_hex(4),
        "attempt": 0,
        "branch": "branch_1",
        "parent": None,
        "parts": parts,
        "world_size": 1,
        "dtypes": {
            stem: "+".join(sorted({tensor.spec.dtype for tensor in named.values()}))
            for stem, named in tensors.items()
        },
        "metrics": {},
        "versions": {"cairn": importlib.metadata.version("cairn")},
        "config_digest": "",
    }

    def fill(folder: Path) -> Manifest:
        written: dict[str, FileChecksum] = {}
        for stem, named in tensors.items():
            where, _, short = stem.rpartition("/")
            make_folders(folder / where)
            progress = stage(f"writing {stem}", sum(tensor.spec.nbytes for tensor in named.values()))
            sums = write_sources(folder / where, named, short, on_bytes=_faulty(progress))
            written |= {f"{where}/{file}": checksum for file, checksum in sums.items()}
        fault_point("import.before_compare")
        if check:
            for stem, named in tensors.items():
                progress = stage(f"comparing {stem}", sum(tensor.spec.nbytes for tensor in named.values()))
                check_noted(StepFolder(folder).tensors(stem), named, folder, on_bytes=progress)
        return new_manifest(number, written | write_files(folder, files, read_back=check), about)

    store = fresh_store(output_dir)
    make_folders(store.root)
    with store.alone():
        check_empty(store, output_dir)
        folder = store.make(number, fill, read_back=check)
    return folder, store.manifest(number), content


def _faulty(progress: Callable[[int], None]) -> Callable[[int], None]:
    """The same progress, with a fault point after each piece."""

    def on_bytes(count: int) -> None:
        progress(count)
        fault_point("import.write")

    return on_bytes


@contextlib.contextmanager
def companions_of(content: Content, source: Path, setting: str = "--model FOLDER") -> Generator[Path]:
    """The folder with config.json and tokenizer: the source's, or one that lasts as long as the context.

    Args:
        setting: what gives another folder, for the message.

    Raises:
        UsageError: there is none.
    """
    if content.model is not None and (content.model / "config.json").is_file():
        yield content.model
    elif content.write_companions is not None:
        with tempfile.TemporaryDirectory() as folder:
            content.write_companions(Path(folder))
            yield Path(folder)
    else:
        raise UsageError(
            f"{source}: has no config.json beside it; give the folder of its model with {setting}"
        )


def fitted(content: Content, companions: Path, source: Path) -> tuple[Content, Layout, dict[str, bytes]]:
    """The content of a source and its config.json, brought to agree, with the layout of the model.

    Args:
        companions: the folder with config.json and tokenizer.

    Returns:
        The content, the layout, and the files beside the weights by their paths in a step.

    Raises:
        CheckpointError: see `agree`.
        Damaged: a file is invalid, or a link to another folder.
    """
    check_plain(companions)
    files = companion_files(companions)
    if content.tokenizer is not None:
        files = with_tokenizer_of(files, content.tokenizer)
    for path in files.values():
        check_link(path)
    found = agree(content.tensors, companions, source, content.changes)
    content = replace(content, tensors=found.tensors, said=(*content.said, *found.said))
    beside = {name: path.read_bytes() for name, path in files.items()}
    about = with_both_forms(found.about)
    if about != about_model(companions):
        beside[FILE_NAME] = as_file(about)
    return content, found.layout, {f"model/{name}": data for name, data in beside.items()}


# A Hugging Face directory of the weights, to start a run from or to serve.


TOKENIZERS = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"}
"""Files of which a folder with a tokenizer has at least one."""
SETTING = "--model.config FOLDER"


def place_in(cache: Path, source: Path, name: str, model: Path | None) -> Path:
    """Where in `cache` the weights of `source`, in the format `name`, lie once they are converted.

    A source whose files have changed has another place, and so has one with another `model`.

    Args:
        model: the folder with config.json and tokenizer that was given, if one was.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8)
    for origin in (source, *([model] if model else [])):
        digest.update(os.fsencode(origin.absolute()))
        for path in _files(origin):
            status = path.stat()
            digest.update(os.fsencode(path))
            digest.update(f" {status.st_size} {status.st_mtime_ns}".encode())
    return cache / f"{source.absolute().name}-{digest.hexdigest()}"


def convert(
    source: Path,
    out: Path,
    name: str,
    *,
    model: Path | None = None,
    stage: Stage = no_progress,
    say: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Write the weights that `source` holds, in the format `name`, to the Hugging Face directory `out`.

    Data types stay as they are. The result is read back and compared with what was read of the source, bit
    for bit, and its checksums are noted beside it. If `out` exists as it was written, or another process
    makes it meanwhile, it is left as it is; one that is damaged, or without checksums, is made again.

    Args:
        model: a folder with config.json and tokenizer; default: the one that belongs to the source.
        say: told what was chosen or corrected, one sentence each.

    Raises:
        UsageError: there is no config.json, or no tokenizer.
        FileNotFoundError: a file that the format needs is missing.
        CheckpointError: a tensor is missing, or has no place in the model; the message lists all of them.
        Damaged: the source is invalid, or holds what is not allowed in it.
        OSError: a file can't be read or written; the error names it.
    """
    make_folders(out.parent)
    lock = out.parent / ".lock"
    fd = open_lock(lock)
    try:
        flock(fd, fcntl.LOCK_EX, lock)
        if out.exists() and damage_in(out):
            shutil.rmtree(out)
        if not out.exists():
            _convert(source, out, name, model, stage, say)
            note_sums(out)
    finally:
        os.close(fd)


def _convert(
    source: Path, out: Path, name: str, model: Path | None, stage: Stage, say: Callable[[str], None]
) -> None:
    content = FORMATS[name].read(source, model)
    with companions_of(content, source, SETTING) as companions:
        content, layout, files = fitted(content, companions, source)
    for sentence in content.said:
        say(sentence)
    beside = {path.removeprefix("model/"): data for path, data in files.items()}
    if not TOKENIZERS.intersection(beside):
        raise UsageError(f"{source}: has no tokenizer beside it; give the folder of its model with {SETTING}")
    weights = noted(weights_of(content.tensors[MODEL], layout, source))
    nbytes = sum(tensor.spec.nbytes for tensor in weights.values())
    with appearing(out) as folder:
        for file, data in beside.items():
            make_folders((folder / file).parent)
            with naming(folder / file):
                (folder / file).write_bytes(data)
        write_sources(folder, weights, "model", on_bytes=stage("writing weights", nbytes))
        for path in (*folder.rglob("*"), folder):
            sync(path)
        progress = stage("comparing weights", nbytes)
        check_noted(find_tensors(folder, "model"), weights, folder, on_bytes=progress)


def _files(path: Path) -> Iterator[Path]:
    """A file itself, or all files in a folder."""
    if path.is_file():
        yield path
        return
    yield from sorted(file for file in path.rglob("*") if file.is_file())
