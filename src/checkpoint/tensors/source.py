"""The one interface to tensors whose values have not been read yet."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from cairn.checkpoint.tensors.layout import TensorSpec

if TYPE_CHECKING:
    import torch

LISTED = 10
"""Names in an error; the rest are counted."""


def listed(names: Iterable[str]) -> str:
    """Names for an error, sorted; not more than LISTED."""
    names = sorted(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class TensorSource(Protocol):
    """A whole tensor whose values stay where they are until they are read, in pieces of any size.

    Several threads may read at a time.
    """

    @property
    def spec(self) -> TensorSpec:
        """The tensor's name in its files, data type and shape."""
        ...

    def fill(self, first: int, into: "torch.Tensor") -> None:
        """Read consecutive values into `into`.

        Args:
            first: the first value to read, in the row-major order of the whole tensor.
            into: one-dimensional, contiguous, on the CPU, and of the data type that `spec` names.

        Raises:
            Damaged: the file ends too early or is invalid.
        """
        ...
