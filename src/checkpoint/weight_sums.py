"""Names the weights in a Hugging Face directory, so that it is noticed if they change."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from cairn.checkpoint.checksums import READ_BYTES, crc64


def weight_files(folder: Path) -> list[Path]:
    """The files that determine what a model computes: its weights and its configuration."""
    return sorted([*folder.glob("*.safetensors"), folder / "config.json"])


def sums_of(files: Iterable[Path]) -> dict[str, str]:
    """Size and checksum (CRC-64/NVME) of each file, by its name.

    Raises:
        OSError: a file can't be read.
    """
    return {path.name: _sum_of(path) for path in files}


def _sum_of(path: Path) -> str:
    size = crc = 0
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            size, crc = size + len(data), crc64(data, crc)
    return f"{size} {crc:016x}"


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of files that differ, or are in one of both only."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
