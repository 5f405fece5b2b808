"""The file by which a trainer names itself as the place where a policy's tensors are."""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from cairn.run.files import read_json, write_json
from cairn.run.versions import WEIGHT_SOURCE


@dataclass(frozen=True)
class Rank:
    """Where a rank is asked, and what it sends of each tensor.

    ranges: by the tensor's name, of its values in row-major order: the first of some values that follow each
    other, and how many they are. The values of all ranges come in one message, in this order.
    """

    host: str
    port: int
    ranges: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Source:
    """A policy of `bytes` bytes in the memory of the trainer's ranks, on devices of the type `device`."""

    step: int
    device: str
    bytes: int
    shapes: dict[str, list[int]]
    ranks: list[Rank]

    def write(self, folder: Path) -> None:
        """Put it where `read_source` finds it."""
        write_json(folder / WEIGHT_SOURCE, asdict(self))


def read_source(folder: Path) -> Source | None:
    """What `folder` says of where its tensors are; None if it has them itself.

    Raises:
        ValueError: it makes no sense.
        DamagedFile: it is no JSON.
    """
    content = read_json(folder / WEIGHT_SOURCE)
    return None if content is None else TypeAdapter(Source).validate_python(content)
