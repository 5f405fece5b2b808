"""The manifest: what a checkpoint holds, and whether it is still all there."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

FILE_NAME = "manifest.json"
CHUNK_BYTES = 16 << 20


class CheckpointError(Exception):
    """A checkpoint can't be used; the message names it and says why."""


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, short or changed."""


class FileEntry(BaseModel):
    """One file: its size in bytes and the XXH3-64 checksum of each chunk of CHUNK_BYTES, as hex."""

    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = Field(ge=0)
    xxh3: list[str]


class Origin(BaseModel):
    """A step of some run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run_id: str
    step: int = Field(ge=0)


class Manifest(BaseModel):
    """The content of manifest.json. A step exists if and only if this file does."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    step: int = Field(ge=1)
    run_id: str
    attempt: int
    parent: Origin | None
    created: str
    """When it was committed, in UTC, ISO 8601."""
    parts: list[str]
    world_size: int = Field(ge=1)
    dtypes: dict[str, str]
    metrics: dict[str, Any]
    versions: dict[str, str]
    config_digest: str
    chunk_bytes: int = Field(CHUNK_BYTES, ge=4096)
    files: dict[str, FileEntry]

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
                raise ValueError(f"{name!r} is not a plain path inside the checkpoint")
        return files

    def to_json(self) -> bytes:
        """As it stands in the file."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def parse(text: bytes | str, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors.

    Raises:
        Damaged: it is no JSON, repeats a key, misses a field, or names a path outside the checkpoint.
        CheckpointError: another version of Cairn wrote it in another format.
    """
    try:
        content = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: not a manifest: {error}") from None
    if isinstance(content, dict) and isinstance(content.get("format"), int) and content["format"] != 1:
        raise CheckpointError(
            f"{where}: format {content['format']}, and this version of Cairn reads format 1; use a newer one"
        )
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "manifest"
        raise Damaged(f"{where}: {place}: {first['msg']}") from None


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key stands in it twice")
    return content


def describe(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    """Sizes and checksums of the files `names` (relative to `folder`), read in parallel."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(lambda name: _describe_file(folder / name), names), strict=True))


def _describe_file(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, xxh3=list(_chunk_checksums(path, CHUNK_BYTES)))


def _chunk_checksums(path: Path, chunk_bytes: int) -> Iterator[str]:
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(chunk_bytes):
            yield xxhash.xxh3_64_hexdigest(chunk)


def check_files(folder: Path, manifest: Manifest, part: str = "") -> None:
    """Compare every file that the manifest lists (below `part`, if given) with its size and checksums.

    Raises:
        Damaged: naming the first file that is missing, short, long or changed, and where in it.
    """
    names = [name for name in manifest.files if name.startswith(part)]
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda name: _check_file(folder / name, manifest.files[name], manifest), names):
            pass


def _check_file(path: Path, entry: FileEntry, manifest: Manifest) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise Damaged(f"{path}: has {size} bytes, should have {entry.size}")
        checksums = list(_chunk_checksums(path, manifest.chunk_bytes))
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if len(checksums) != len(entry.xxh3):
        raise Damaged(f"{path}: the manifest has {len(entry.xxh3)} checksums for {len(checksums)} chunks")
    for i, (found, expected) in enumerate(zip(checksums, entry.xxh3, strict=True)):
        if found != expected:
            start = i * manifest.chunk_bytes
            raise Damaged(
                f"{path}: changed between bytes {start} and {min(size, start + manifest.chunk_bytes)}"
            )
