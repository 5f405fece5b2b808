"""Receipts: a process's list of the files that it wrote for a step, kept until the step is committed.

A receipt is the file `.<name>.part.json` in the step's folder. It names its author (a start of the trainer,
or an attempt of the run) and the author's contributions to the checksums of each file.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NotRequired, TypedDict

from cairn.checkpoint.checksums import FileChecksum
from cairn.run.files import read_note


class _Written(TypedDict):
    """One file: its size, the number of bytes that the process wrote, and their (chunk, CRC) pairs."""

    size: int
    nbytes: int
    crcs: list[tuple[int, str]]


class Receipt(TypedDict):
    """The content of a receipt file."""

    attempt: str
    files: dict[str, _Written]
    contents: NotRequired[dict[str, _Written]]
    """Of files that were packed: what was packed of them."""


def make_receipt(
    attempt: str,
    files: Mapping[str, FileChecksum],
    contents: Mapping[str, FileChecksum] = MappingProxyType({}),
) -> Receipt:
    """The receipt of `attempt` for the checksums that it computed while writing.

    Args:
        contents: those of files that it packed.
    """
    receipt: Receipt = {"attempt": attempt, "files": _entries(files)}
    if contents:
        receipt["contents"] = _entries(contents)
    return receipt


def _entries(files: Mapping[str, FileChecksum]) -> dict[str, _Written]:
    return {
        name: {
            "size": file.size,
            "nbytes": file.nbytes,
            "crcs": [(chunk, f"{crc:016x}") for chunk, crc in file.crcs.items()],
        }
        for name, file in files.items()
    }


def read_receipt(content: dict[str, Any], kind: str = "files") -> dict[str, FileChecksum]:
    """The checksums in a receipt: of `files`, or of packed files' `contents`."""
    return {
        name: FileChecksum(entry["size"], {k: int(v, 16) for k, v in entry["crcs"]}, entry["nbytes"])
        for name, entry in content.get(kind, {}).items()
    }


def note_of(attempt: str, path: Path) -> dict[str, Any] | None:
    """The content of a receipt or another note in a step's folder, if there is one of this attempt."""
    content = read_note(path, dict[str, Any])
    return content if content and content.get("attempt") == attempt else None
