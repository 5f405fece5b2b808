"""Makes a Hugging Face directory of another program's weights, to start a run from or to serve."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.stream_writer import write_sources
from cairn.checkpoint.tensors.verified_copy import check_noted, noted
from cairn.formats import FORMATS, Stage, no_progress
from cairn.formats.common.match_layout import weights_of
from cairn.formats.transfer.export_step import appearing
from cairn.formats.transfer.import_step import companions_of, fitted
from cairn.model.described import damage_in, note_sums
from cairn.run.errors import UsageError
from cairn.run.file_system import flock, open_lock
from cairn.run.files import make_folders, naming, sync

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
