"""Receipts: a process' list of the files that it wrote for a step, kept until the step is committed.

A receipt is the file `.<name>.part.json` in the step's folder. It says who wrote (a start of the trainer, or
an attempt of the run) and what that contributes to each file's checksums.
"""

from typing import Any, TypedDict

from cairn.checkpoint.checksums import FileChecksum


class _Written(TypedDict):
    """One file: its size, the bytes of it that the process wrote, and (chunk, CRC) pairs of those."""

    size: int
    nbytes: int
    crcs: list[tuple[int, str]]


class Receipt(TypedDict):
    """The content of the file."""

    attempt: str
    files: dict[str, _Written]


def make_receipt(attempt: str, files: dict[str, FileChecksum]) -> Receipt:
    """The receipt of `attempt` for what it saw of each file while writing it."""
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
