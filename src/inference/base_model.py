"""Whether two folders hold the same model, without reading all of it.

Copies of a model are on a server's disk and on the trainer's, and neither sees the other's. What is compared
here, when a run starts, are samples: they tell a model from every other one, also from one that was trained
further, but not from one that differs in a few values. The checksums of the whole files, which the server
compares when it is given its first policy, do that.
"""

from pathlib import Path

from cairn.checkpoint.checksums import crc64

SAMPLES = 256
"""Pieces of each file that are read."""
SAMPLE_BYTES = 4096


def samples_of(folder: Path) -> dict[str, str]:
    """Of each tensor file in a model's folder, its size and the checksum of pieces at even distances."""
    return {file.name: _sampled(file) for file in sorted(folder.glob("*.safetensors")) if file.is_file()}


def differing_files(folder: Path, samples: dict[str, str] | None) -> list[str]:
    """The tensor files of the model in `folder` that another model does not have, or not with these values.

    Args:
        samples: the other model's; None: nobody knows them, and no file differs.
    """
    if samples is None:
        return []
    return [name for name, sample in samples_of(folder).items() if samples.get(name) != sample]


def _sampled(file: Path) -> str:
    size, crc = file.stat().st_size, 0
    with file.open("rb") as opened:
        for piece in range(SAMPLES):
            opened.seek(size * piece // SAMPLES)
            crc = crc64(opened.read(SAMPLE_BYTES), crc)
    return f"{size}:{crc:016x}"
