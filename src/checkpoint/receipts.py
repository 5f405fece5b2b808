"""Receipts: a process's list of the files that it wrote for a step, kept until the step is committed.

A receipt is the file `.<name>.part.json` in the step's folder. It names its author (a start of the trainer,
or an attempt of the run) and the author's contributions to the checksums of each file.
"""

from typing import Any, TypedDict

from cairn.checkpoint.checksums import FileChecksum


class _Written(TypedDict):
    """One file: its size, the number of bytes that the process wrote, and their (chunk, CRC) pairs."""

    size: int
    nbytes: int
    crcs: list[tuple[int, str]]


class Receipt(TypedDict):
    """The content of a receipt file."""

    attempt: str
    files: dict[str, _Written]


def make_receipt(attempt: str, files: dict[str, FileChecksum]) -> Receipt:
    """The receipt of `attempt` for the checksums that it computed while writing."""
    entries: dict[str, _Written] = {
        name: {
            "size": file.size,
            "nbytes": file.nbytes,
            "crcs": [(chunk, f"{crc:016x}") for chunk, crc in file.crcs.items()],
        }
        for name, file in files.items()
    }
    return {"attempt": attempt, "files": entries}


def read_receipt(content: dict[str, Any]) -> dict[str, FileChecksum]:
    """The checksums in a receipt."""
    return {
        name: FileChecksum(entry["size"], {k: int(v, 16) for k, v in entry["crcs"]}, entry["nbytes"])
        for name, entry in content["files"].items()
    }
