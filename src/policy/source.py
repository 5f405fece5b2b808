"""The file in a policy's folder that says from which trainer ranks to get its tensors."""

from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from cairn.run.files import read_json, write_json
from cairn.run.versions import WEIGHT_SOURCE


@dataclass(frozen=True)
class Rank:
    """A rank's address, and its share of each tensor.

    ranges: by tensor name, (first value, number of values) of each range, in row-major order. All
    values are sent in one message, in this order.
    """

    host: str
    port: int
    ranges: dict[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Source:
    """A policy in the memory of trainer ranks: the tensors that they send, `bytes` bytes in all.

    shapes, dtypes: by tensor name, as the tensors are sent; data types have torch's names.
    """

    step: int
    bytes: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    ranks: list[Rank]

    def write(self, folder: Path) -> None:
        """Write the file that `read_source` reads."""
        write_json(folder / WEIGHT_SOURCE, asdict(self))


def read_source(folder: Path) -> Source | None:
    """The source of the policy in `folder`; None if the folder holds the tensors itself.

    Raises:
        ValueError: the file's content is inconsistent.
        DamagedFile: the file is not valid JSON.
    """
    content = read_json(folder / WEIGHT_SOURCE)
    return None if content is None else TypeAdapter(Source).validate_python(content)
