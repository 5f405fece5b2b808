"""Tensors whose values have not been read yet: the one interface to them, and a cache of one storage."""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
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


# Storages that have to be in memory as a whole for a part of their tensor, such as one saved transposed.


@dataclass
class _Held:
    owner: object
    storage: "torch.Tensor"
    left: int


class _LastOne:
    """The storage that was read last: pieces of a tensor are asked for one after the other."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: _Held | None = None


_last = _LastOne()


@contextmanager
def whole_storage(
    owner: object, read: "Callable[[], torch.Tensor]", *, taken: int, of: int
) -> "Generator[torch.Tensor]":
    """The storage of a tensor, for one thread at a time; read unless it was the last one.

    One storage is in memory at a time, whoever asks.

    Args:
        owner: whose storage it is, by identity.
        read: reads it, and checks it.
        taken, of: how many values are taken from it now, and how many there are to take: once all are, the
            storage is given up.
    """
    with _last.lock:
        held = _last.held
        if held is None or held.owner is not owner:
            held = _last.held = None  # so that its memory is free for the next one
            held = _last.held = _Held(owner, read(), of)
        held.left -= taken
        if held.left <= 0:
            _last.held = None
        yield held.storage
