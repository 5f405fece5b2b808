"""The server's half of the transfer from memory to memory; see `network.py` for the protocol."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS, as_memory
from cairn.policy.checksums import merged
from cairn.policy.delta import apply
from cairn.policy.errors import Gone, NotThere
from cairn.policy.network import ANSWER, DELTA, PATIENCE, SAME, WHOLE, limit_waits
from cairn.run.connections import connect, fill, receive, send
from cairn.run.files import read_json, write_json
from cairn.run.messages import WEIGHT_SOURCE

# The file in a policy's folder that says from which trainer ranks to get its tensors.


@dataclass(frozen=True)
class Rank:
    """A rank's address, and its share of each tensor.

    ranges: by tensor name, (first value, number of values) of each range, in row-major order. All values are
    sent in this order. token: what both sides of a connection to it have to know.
    """

    host: str
    port: int
    ranges: dict[str, list[tuple[int, int]]]
    token: str = field(repr=False)


@dataclass(frozen=True)
class Source:
    """A policy in the memory of trainer ranks: the tensors that they send, `bytes` bytes in all.

    shapes, dtypes: by tensor name, as the tensors are sent; data types have torch's names. deltas: whether
    the ranks send deltas to a server that has an earlier policy.
    """

    step: int
    bytes: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    ranks: list[Rank]
    deltas: bool = False

    @property
    def layout(self) -> "Layout":
        """The shape and data type of each tensor."""
        return {
            name: (torch.Size(shape), DTYPES_IN_SETTINGS[self.dtypes[name]])
            for name, shape in self.shapes.items()
        }

    def write(self, folder: Path) -> None:
        """Write the file that `read_source` reads, and no other user, since it has the ranks' tokens."""
        write_json(folder / WEIGHT_SOURCE, asdict(self), private=True)


def read_source(folder: Path) -> Source | None:
    """The source of the policy in `folder`; None if the folder holds the tensors itself.

    Raises:
        ValueError: the file's content is inconsistent.
        DamagedFile: the file is not valid JSON.
    """
    content = read_json(folder / WEIGHT_SOURCE)
    return None if content is None else TypeAdapter(Source).validate_python(content)


Layout = Mapping[str, tuple[torch.Size, torch.dtype]]
"""The shape and data type of each tensor of a policy."""


APPLIERS = min(4, os.cpu_count() or 1)
"""Threads that apply deltas while the next ones come."""


class Room:
    """Where tensors are put as they come, in the host's memory; this one keeps nothing of them.

    digest: of the policy that the places hold, of which a delta can make another one; empty: of none.
    """

    digest: str = ""

    def __init__(self) -> None:
        self._layout: Layout = {}

    @property
    def layout(self) -> Layout:
        """Of the tensors that there are places for."""
        return self._layout

    def begin(self, layout: Layout) -> None:
        """Tensors of this layout are about to come."""
        self._layout = layout

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor's place. It holds the tensor of the policy `digest`, if there is one, or any values."""
        return torch.empty(shape, dtype=dtype)


class WeightReceiver:
    """Receives policies from the memory of trainers, into the host's memory.

    Args:
        patience: limit of each wait for values.
    """

    def __init__(self, patience: timedelta = PATIENCE):
        self._patience = patience
        self._pairs: dict[tuple[Any, ...], _Pair] = {}
        self.sent: dict[str, int] = {}
        """The checksums of the tensors as the ranks have them; complete once all tensors are received."""
        self.nbytes = 0
        """That have come of the tensors that were received last."""

    def receive(
        self, source: Source, groups: list[list[str]], seconds: float = math.inf, room: Room | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Agree with the ranks of `source`; the iterator then receives the tensors, one of `groups` at a
        time, within `seconds` from now.

        Args:
            room: where they are put; of what it holds, the ranks may send only what has changed.

        Raises:
            Gone, NotThere: nothing was sent. RuntimeError while iterating: the transfer broke off. Damaged
            while iterating: a delta is none of these tensors.
        """
        room = room or Room()
        base = room.digest if source.deltas else ""
        self.nbytes = 0
        until = time.monotonic() + seconds
        names = [name for group in groups for name in group]
        answers: list[str] = []
        rank: Rank | None = None
        known, self._pairs = self._pairs, {}
        keys = [(rank.host, rank.port, rank.token, *names) for rank in source.ranks]
        _close(pair for key, pair in known.items() if key not in keys)
        try:
            for key, rank in zip(keys, source.ranks, strict=True):
                self._pairs[key] = known.pop(key, None) or _Pair(rank, names, self._patience)
            pairs = list(self._pairs.values())
            try:
                for pair in pairs:
                    rank = pair.rank
                    answers.append(pair.ask(source.step, base))
            finally:  # a rank that said yes doesn't update its weights before this
                sends = len(answers) == len(pairs) and {WHOLE, DELTA, SAME}.issuperset(answers)
                for pair in pairs[: len(answers)]:
                    pair.go(sends)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            _close(known.values())
            self.forget()
            at = f" at {rank.host}:{rank.port}" if rank else ""
            raise NotThere(
                f"the trainer does not answer{at}: {error or type(error).__name__}. If it runs, this server "
                "can't reach that address: --trainer.weight-host names one that it reaches"
            ) from None
        if "gone" in answers:
            raise Gone(f"the trainer already has a newer policy than that of step {source.step}")
        if "early" in answers:
            raise NotThere(f"the trainer has not recomputed step {source.step} yet")
        return self._tensors(source, groups, pairs, until, room)

    def _tensors(
        self, source: Source, groups: list[list[str]], pairs: list["_Pair"], until: float, room: Room
    ) -> Iterator[dict[str, torch.Tensor]]:
        layout = source.layout
        try:
            with ThreadPoolExecutor(APPLIERS) as appliers:
                for names in groups:
                    tensors = {name: room.place(name, *layout[name]) for name in names}
                    applied: list[Future[None]] = []
                    for name, tensor in tensors.items():
                        flat = tensor.view(-1)
                        for rank, pair in zip(source.ranks, pairs, strict=True):
                            if (blocks := pair.delta_of(name)) is None:
                                self.nbytes += pair.receive(flat, rank.ranges.get(name, []))
                            elif blocks:
                                self.nbytes += len(blocks)
                                applied.append(appliers.submit(apply, blocks, flat, name))
                        if time.monotonic() > until:
                            raise RuntimeError("it takes too long")
                    for each in applied:
                        each.result()
                    yield tensors
            self.sent = merged(pair.sums() for pair in pairs)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Close all connections; the next request opens new ones."""
        _close(self._pairs.values())
        self._pairs.clear()


class _Pair:
    """A server's connection to one trainer rank."""

    def __init__(self, rank: Rank, names: list[str], patience: timedelta):
        self.rank = rank
        self._names = names
        self._patience = patience
        self._answer = ""
        self._sizes: dict[str, int] | None = None
        self._link = connect((rank.host, rank.port), rank.token, min(ANSWER, patience).total_seconds())
        send(self._link, {"names": names})

    def ask(self, step: int, base: str = "") -> str:
        """Ask for the policy after `step` steps, having the one with the digest `base`, if any; returns the
        rank's answer."""
        self._sizes = None
        limit_waits(self._link, min(ANSWER, self._patience))
        send(self._link, {"step": step, "base": base})
        self._answer = receive(self._link)["answer"]
        return self._answer

    def go(self, yes: bool) -> None:
        """Tell the rank whether to send the tensors."""
        send(self._link, {"go": yes})
        limit_waits(self._link, self._patience)

    def delta_of(self, name: str) -> memoryview | None:
        """What the rank's values of a tensor have changed by; None: it sends the values, to be received."""
        if self._answer == WHOLE:
            return None
        if self._answer == SAME:
            return memoryview(b"")
        with _as_broken_off():
            if self._sizes is None:
                self._sizes = dict(zip(self._names, receive(self._link)["sizes"], strict=True))
            blocks = memoryview(bytearray(self._sizes[name]))
            fill(self._link, blocks)
        return blocks

    def receive(self, flat: torch.Tensor, ranges: list[tuple[int, int]]) -> int:
        """Get the values of `ranges` of a flat tensor, in place; returns how many bytes have come."""
        if not ranges:
            return 0
        places = [flat[first : first + count] for first, count in ranges]
        together = places[0] if len(places) == 1 else flat.new_empty(sum(map(len, places)))
        with _as_broken_off():
            fill(self._link, as_memory(together))
        if len(places) > 1:
            for place, values in zip(places, together.split([len(place) for place in places]), strict=True):
                place.copy_(values)
        return together.nbytes

    def sums(self) -> dict[str, int]:
        """The rank's contributions to the checksums of the tensors that it has sent."""
        with _as_broken_off():
            return receive(self._link)["sums"]

    def close(self) -> None:
        """End the connection."""
        self._link.close()


def _close(pairs: Iterable[_Pair]) -> None:
    for pair in pairs:
        pair.close()


@contextlib.contextmanager
def _as_broken_off() -> Iterator[None]:
    """For what gets the next bytes of a transfer."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(f"the transfer broke off: {error or type(error).__name__}") from None
