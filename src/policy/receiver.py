"""The server's half of the transfer from memory to memory; see `network.py` for the protocol."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.policy.checksums import merged
from cairn.policy.errors import Gone, NotThere
from cairn.policy.network import ANSWER, PATIENCE, join_pair, messages
from cairn.run.files import read_json, write_json
from cairn.run.messages import WEIGHT_SOURCE

# The file in a policy's folder that says from which trainer ranks to get its tensors.


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


# torch.distributed exports neither stores nor what process groups can do.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false


class WeightReceiver:
    """Receives policies from the memory of trainers, into the host's memory.

    Args:
        patience: timeout of each message.
    """

    def __init__(self, patience: timedelta = PATIENCE):
        self._patience = patience
        self._pairs: dict[tuple[Any, ...], _Pair] = {}
        self.sent: dict[str, int] = {}
        """The checksums of the tensors as the ranks sent them; complete once all tensors are received."""

    def receive(
        self, source: Source, groups: list[list[str]], seconds: float = math.inf
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Agree with the ranks of `source`; the iterator then receives the tensors, one of `groups` at a
        time, within `seconds` from now.

        Raises:
            Gone, NotThere: nothing was sent. RuntimeError while iterating: the transfer broke off.
        """
        until = time.monotonic() + seconds
        names = [name for group in groups for name in group]
        answers: list[str] = []
        rank: Rank | None = None
        try:
            known, self._pairs = self._pairs, {}
            for rank in source.ranks:
                key = (rank.host, rank.port, *names)
                self._pairs[key] = known.get(key) or _Pair(rank, names, self._patience)
            pairs = list(self._pairs.values())
            try:
                for pair in pairs:
                    rank = pair.rank
                    answers.append(pair.ask(source.step))
            finally:  # a rank that said yes doesn't update its weights before this
                for pair in pairs[: len(answers)]:
                    pair.go(answers == ["yes"] * len(pairs))
        except (RuntimeError, OSError) as error:
            self.forget()
            at = f" at {rank.host}:{rank.port}" if rank else ""
            raise NotThere(
                f"the trainer does not answer{at}: {_first_line(error)}. If it runs, this server can't reach "
                "that address: --trainer.weight-host names one that it reaches"
            ) from None
        if "gone" in answers:
            raise Gone(f"the trainer already has a newer policy than that of step {source.step}")
        if "early" in answers:
            raise NotThere(f"the trainer has not recomputed step {source.step} yet")
        return self._tensors(source, groups, pairs, until)

    def _tensors(
        self, source: Source, groups: list[list[str]], pairs: list["_Pair"], until: float
    ) -> Iterator[dict[str, torch.Tensor]]:
        try:
            for names in groups:
                tensors = {
                    name: torch.empty(source.shapes[name], dtype=DTYPES_IN_SETTINGS[source.dtypes[name]])
                    for name in names
                }
                for name, tensor in tensors.items():
                    for rank, pair in zip(source.ranks, pairs, strict=True):
                        pair.receive(tensor.view(-1), rank.ranges.get(name, []))
                    if time.monotonic() > until:
                        raise RuntimeError("it takes too long")
                yield tensors
            self.sent = merged(pair.sums() for pair in pairs)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Close all connections; the next request opens new ones."""
        self._pairs.clear()


class _Pair:
    """A server's connection to one trainer rank."""

    def __init__(self, rank: Rank, names: list[str], patience: timedelta):
        self.rank = rank
        self._patience = patience
        self._store = dist.TCPStore(rank.host, rank.port, timeout=min(ANSWER, patience))
        self._pair = self._store.add("pairs", 1)
        self._request = 0
        self._store.set(f"{self._pair}/hello", json.dumps(names))
        self._group = join_pair(self._store, self._pair, 1, rank.host, patience)

    def ask(self, step: int) -> str:
        """Ask for the policy after `step` steps; returns the rank's answer."""
        self._request += 1
        self._store.set(f"{self._pair}/ask/{self._request}", str(step))
        return self._store.get(f"{self._pair}/answer/{self._request}").decode()

    def go(self, yes: bool) -> None:
        """Tell the rank whether to send the tensors."""
        self._store.set(f"{self._pair}/go/{self._request}", "yes" if yes else "no")

    def receive(self, flat: torch.Tensor, ranges: list[tuple[int, int]]) -> None:
        """Get the values of `ranges` of a flat tensor, in place."""
        if not ranges:
            return
        places = [flat[first : first + count] for first, count in ranges]
        together = places[0] if len(places) == 1 else flat.new_empty(sum(map(len, places)))
        for message in messages(together):
            self._group.recv([message], 0, 0).wait(self._patience)
        if len(places) > 1:
            for place, values in zip(places, together.split([len(place) for place in places]), strict=True):
                place.copy_(values)

    def sums(self) -> dict[str, int]:
        """The rank's contributions to the checksums of the tensors that it has sent."""
        return json.loads(self._store.get(f"{self._pair}/sums/{self._request}"))


def _first_line(error: Exception) -> str:
    """An error's message, without the stack that torch puts below it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
