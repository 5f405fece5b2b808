"""Names the weights in a Hugging Face directory, so that it is noticed if they change."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from cairn.checkpoint.checksums import READ_BYTES, crc64
from cairn.run.files import DamagedFile, read_json, write_json


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


def note_sums(folder: Path) -> None:
    """Note the sums of all files in a folder that is kept for later, beside it and durably.

    Raises:
        OSError: a file can't be read, or the note not be written.
    """
    write_json(_noted(folder), sums_of(_files(folder)), durable=True)


def damage_in(folder: Path) -> str | None:
    """What is wrong with a folder whose sums were noted; None if it is as it was written."""
    try:
        noted = read_json(_noted(folder), dict[str, str])
        if noted is None:
            return "no checksums of it were kept"
        names = changed(noted, sums_of(_files(folder)))
    except (DamagedFile, OSError) as error:
        return str(error)
    return f"{names[0]} is not what was written" if names else None


def _noted(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.sums.json")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of files that differ, or are in one of both only."""
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
