"""The manifest: lists the content of a checkpoint, so that it can be verified."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, chunk_crc
from cairn.run.errors import CairnError

FILE_NAME = "manifest.json"
WRITERS_NOTE = re.compile(r"\.begun\.json|\.\w+\.part\.json|\..+\.tmp")
"""Names of files that belong to a save in progress; a crash may leave them in a step's folder."""
MAX_BYTES = 64 << 20  # enough for 40 TB of files
STEP_NAME = re.compile(r"step_([1-9][0-9]{0,15})")


class CheckpointError(CairnError):
    """A checkpoint can't be used; the message names it and the reason."""


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, has another size, or was changed."""


class FileEntry(BaseModel):
    """One file: its size in bytes, and the CRC-64/NVME of each chunk of `chunk_bytes`, as 16 hex digits."""

    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = Field(ge=0, le=1 << 50)
    crc64nvme: list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]]

    @classmethod
    def of(cls, size: int, crcs: list[int]) -> "FileEntry":
        """The entry of a file of `size` bytes whose chunks have these CRCs."""
        return cls(size=size, crc64nvme=[f"{crc:016x}" for crc in crcs])

    @classmethod
    def read(cls, path: Path) -> "FileEntry":
        """The entry of a file as it is now, which is read.

        Raises:
            OSError: it can't be read.
        """
        checksum = FileChecksum.read(path)
        return cls.of(checksum.size, checksum.chunks())


class Origin(BaseModel):
    """A step of some run, as the origin of another."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run_id: str
    step: int = Field(ge=0)


class Manifest(BaseModel):
    """The content of manifest.json. A step exists if and only if this file exists."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1, 2] = 1
    """2: some tensor files are packed (`checkpoint.packed`), which readers of 1 don't know."""
    step: int = Field(ge=1)
    run_id: str
    attempt: int
    branch: str
    """Changes whenever the run goes back to an earlier step and continues from there."""
    parent: Origin | None
    created: str
    """Time of the commit: UTC, ISO 8601."""
    parts: list[str]
    """The roles whose state it contains: trainer, orchestrator, or only the model."""
    world_size: int = Field(ge=1)
    dtypes: dict[str, str]
    metrics: dict[str, Any]
    versions: dict[str, str]
    config_digest: str
    chunk_bytes: Literal[16777216] = 16777216
    """Always CHUNK_BYTES."""
    files: dict[str, FileEntry]
    """The files that are stored."""
    contents: dict[str, FileEntry] = Field(default_factory=dict[str, FileEntry], exclude_if=lambda v: not v)
    """The files that are packed, as they are once unpacked; only in format 2."""

    @field_validator("files", "contents")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            path = PurePosixPath(name)
            plain = not path.is_absolute() and ".." not in path.parts and str(path) == name
            if not plain or name in (".", FILE_NAME) or "\\" in name or "\0" in name:
                raise ValueError(f"{name!r} is not a plain path inside the checkpoint")
        return files

    @field_validator("contents")
    @classmethod
    def _whole_entries(cls, contents: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name, entry in contents.items():
            if not name.endswith(".safetensors") or len(entry.crc64nvme) != -(-entry.size // CHUNK_BYTES):
                raise ValueError(f"{name!r} is not a tensor file with a checksum for each chunk")
        return contents

    @model_validator(mode="after")
    def _format_of_contents(self) -> "Manifest":
        if (self.format == 2) != bool(self.contents):
            raise ValueError(f"format {self.format} {'without' if self.format == 2 else 'with'} contents")
        if twice := sorted(self.contents.keys() & self.files.keys()):
            raise ValueError(f"{twice[0]!r} is there both packed and as it is")
        return self

    @property
    def nbytes(self) -> int:
        """The total size of all files as they are stored, in bytes."""
        return sum(entry.size for entry in self.files.values())

    @property
    def tensor_files(self) -> dict[str, FileEntry]:
        """The files of tensors as they are once unpacked: the same for any number of ranks."""
        files = {**self.files, **self.contents}
        return {name: entry for name, entry in files.items() if name.endswith(".safetensors")}

    def changed_versions(self) -> dict[str, tuple[str, str | None]]:
        """The packages whose version is another one here: that of the checkpoint, and the installed one."""
        both = {name: (version, installed_version(name)) for name, version in self.versions.items()}
        return {name: (was, now) for name, (was, now) in both.items() if was != now}

    def to_json(self) -> bytes:
        """The bytes of manifest.json."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def installed_version(package: str) -> str | None:
    """The version of a package, or of `python`; None if it is not installed."""
    try:
        return platform.python_version() if package == "python" else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse(text: bytes | str, where: str) -> Manifest:
    """Parse a manifest; `where` names it in errors.

    Raises:
        Damaged: it is not valid JSON, repeats a key, lacks a field, or names a path outside the checkpoint.
        CheckpointError: another version of Cairn wrote it, in another format.
    """
    try:
        content = json.loads(text, object_pairs_hook=refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: not a manifest: {error}") from None
    number = cast("dict[str, Any]", content).get("format") if isinstance(content, dict) else None
    if type(number) is not int:
        raise Damaged(f"{where}: not a manifest: its format is missing")
    if number not in (1, 2):
        raise CheckpointError(
            f"{where}: format {number}, but this version of Cairn reads formats 1 and 2; use a newer one"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "manifest"
        raise Damaged(f"{where}: {place}: {first['msg']}") from None


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for json.loads that allows each key only once.

    Raises:
        ValueError: a key is repeated.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("it contains a key twice")
    return content


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a step_N folder.

    Raises:
        CheckpointError: the folder is not a checkpoint, its save was never completed, or it can't be read.
    """
    path = folder / FILE_NAME
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        what = "it has no manifest.json" if folder.is_dir() else "there is no such folder"
        if folder.is_dir() and STEP_NAME.fullmatch(folder.name):
            what = "its save was never completed"
        raise CheckpointError(f"{folder} is not a checkpoint: {what}") from None
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise Damaged(f"{path}: not a manifest: it is larger than {MAX_BYTES} bytes")
    manifest = parse(text, str(path))
    match = STEP_NAME.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        raise Damaged(f"{path}: belongs to step {manifest.step}")
    return manifest


def split_step(url: str) -> tuple[str, int] | None:
    """What comes before the name of the step that ends a URL, and the step's number; None: no step does."""
    prefix, _, name = url.rstrip("/").rpartition("/")
    match = STEP_NAME.fullmatch(name)
    return (prefix, int(match[1])) if match else None


def holds_tensors(name: str) -> bool:
    """Whether the file is one of those that `tensors.load_step` verifies while loading."""
    return name.endswith(".safetensors") or holds_blocks(name)


def holds_blocks(name: str) -> bool:
    """Whether the file is one of those in which packed files are stored (`checkpoint.packed`)."""
    return bool(re.fullmatch(r"(?:.*/)?packed-(0|[1-9][0-9]*)\.bin", name))


def check_files(
    folder: Path,
    manifest: Manifest,
    *,
    content: bool = True,
    tensors: bool = True,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> None:
    """Verify the files of a step against its manifest: sizes, no unknown files and, in parallel, checksums.

    Args:
        content: False checks names and sizes only.
        tensors: False leaves the content of tensor files to whoever loads them.
        on_bytes: called with the number of bytes checked since the last call, for a progress bar.

    Raises:
        Damaged: a file is missing, short, long, changed or unknown; the message names file and position.
    """
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(folder).as_posix() for path in paths}
    notes = {name for name in found if WRITERS_NOTE.fullmatch(name)}
    if unknown := sorted(found - manifest.files.keys() - notes - {FILE_NAME}):
        raise Damaged(f"{folder / unknown[0]}: does not belong to the checkpoint")
    for name, entry in manifest.files.items():  # cheap, so first
        check_size(folder / name, entry)
    if content:
        wanted = {name: e for name, e in manifest.files.items() if tensors or not holds_tensors(name)}
        check_content(folder, wanted, on_bytes=on_bytes)


def check_content(
    folder: Path, files: Mapping[str, FileEntry], *, on_bytes: Callable[[int], None] = lambda n: None
) -> None:
    """Read these files of a step in parallel, and compare them with their checksums.

    Raises:
        Damaged: a file can't be read or was changed; the message names file and position.
    """

    def check(place: tuple[str, int]) -> int:
        name, chunk = place
        try:
            crc = chunk_crc(folder / name, chunk)
        except OSError as error:
            raise Damaged(f"{folder / name}: {error.strerror}") from None
        check_crc(folder / name, files[name], chunk, crc)
        return min(CHUNK_BYTES, files[name].size - chunk * CHUNK_BYTES)

    places = [(name, chunk) for name, entry in files.items() for chunk in range(len(entry.crc64nvme))]
    with ThreadPoolExecutor(4) as pool:
        for count in pool.map(check, places):
            on_bytes(count)


IN_MEMORY = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
"""Where a link leads in the place of a tensor file of a step that is in the memory of another process."""


def check_size(path: Path, entry: FileEntry) -> None:
    """Check a file's size, and that the manifest has as many checksums as this size requires.

    Raises:
        Damaged: they differ, or the file is missing.
    """
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and IN_MEMORY.fullmatch(os.readlink(path)):
            status = path.stat()
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(f"{path}: is not a file")
    size = status.st_size
    if size != entry.size:
        raise Damaged(f"{path}: has {size} bytes, but should have {entry.size}")
    if len(entry.crc64nvme) != -(-size // CHUNK_BYTES):
        raise Damaged(f"{path}: the manifest has {len(entry.crc64nvme)} checksums for {size} bytes")


def check_crc(path: Path, entry: FileEntry, chunk: int, crc: int) -> None:
    """Compare the CRC of a chunk that was read with the manifest's.

    Raises:
        Damaged: they differ; the message names file and position.
    """
    if f"{crc:016x}" != entry.crc64nvme[chunk]:
        start, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, entry.size)
        raise Damaged(f"{path}: changed between bytes {start} and {end}")


def new_manifest(
    step: int,
    checksums: Mapping[str, FileChecksum],
    about: Mapping[str, Any],
    packed: Mapping[str, FileChecksum] = MappingProxyType({}),
) -> Manifest:
    """The manifest of a step that is being made.

    Args:
        checksums: of all files, by name in the step. packed: of what is in those that are packed.
        about: the manifest's fields other than step, files and created.
    """
    return Manifest(
        format=2 if packed else 1,
        step=step,
        files=_file_entries(checksums),
        contents=_file_entries(packed),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about,
    )


def _file_entries(checksums: Mapping[str, FileChecksum]) -> dict[str, FileEntry]:
    return {name: FileEntry.of(c.size, c.chunks()) for name, c in sorted(checksums.items())}


def age_of(created: str) -> float | None:
    """Seconds since the time at which a step was created; 0 if the clock was set back, None if it is none."""
    try:
        then = datetime.datetime.fromisoformat(created)
        return max(time.time() - then.timestamp(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
