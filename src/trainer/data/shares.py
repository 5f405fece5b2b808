"""Records are made into samples by all ranks together: each makes a share, and gets the samples of all."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors.numpy import load, save

from cairn.run.batches import Sample, columns_of


class Gathering(Protocol):
    """What goes between the ranks; all of them call `gather`, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank gives in this round, by rank."""
        ...


class SingleRank:
    """The exchange of one rank."""

    rank = 0
    world_size = 1

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class EncodedRecords(NamedTuple):
    """samples: of each record; none of one that is left out. refused: by its number, why it is left out."""

    samples: list[list[Sample]]
    refused: Mapping[int, str]


class RecordShares:
    """Divides records among the ranks, each of which makes every so many-th.

    Which samples a record becomes depends on nothing but the record, so that they are the same on any number
    of ranks.
    """

    def __init__(self, exchange: Gathering | None = None):
        """Args:
        exchange: None for a process that makes all itself.
        """
        self._exchange = exchange or SingleRank()

    def make(self, numbers: Sequence[int], make: Callable[[Sequence[int]], EncodedRecords]) -> EncodedRecords:
        """What `make` makes of the records of these numbers, which are the same on every rank; all call it.

        If a share can't be made, every rank makes everything itself: then all of them say what is wrong, in
        the words of one rank that is alone.

        Raises:
            RuntimeError: the ranks have got different records.
        """
        ranks = self._exchange.world_size
        if ranks == 1:
            return make(numbers)
        own = numbers[self._exchange.rank :: ranks]
        made = EncodedRecords([], {})
        failed = False
        try:
            made = make(own) if own else made
        except Exception:
            failed = True
        mine = _Share(own, made, failed).written()
        everything = [_Share.read(said) for said in self._exchange.gather(mine)]
        if any(share.numbers != numbers[rank::ranks] for rank, share in enumerate(everything)):
            raise RuntimeError("the ranks make samples of different records: their data or settings differ")
        if any(share.failed for share in everything):
            return make(numbers)
        samples: list[list[Sample]] = [[] for _ in numbers]
        refused: dict[int, str] = {}
        for rank, share in enumerate(everything):
            samples[rank::ranks] = share.made.samples
            refused |= share.made.refused
        return EncodedRecords(samples, refused)


class _Share(NamedTuple):
    """What a rank tells the others: the numbers of its records, what it has made, or that it has failed."""

    numbers: Sequence[int]
    made: EncodedRecords
    failed: bool

    def written(self) -> bytes:
        """As a safetensors file: the samples end to end, and how many there are of each record."""
        samples = [sample for own in self.made.samples for sample in own]
        about = {
            "numbers": list(self.numbers),
            "counts": list(map(len, self.made.samples)),
            "refused": list(self.made.refused.items()),
            "failed": self.failed,
        }
        tensors: dict[str, np.ndarray] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
        if samples:
            tensors["lengths"] = np.array([len(sample.token_ids) for sample in samples], np.int64)
            tensors["token_ids"] = np.concatenate([sample.token_ids for sample in samples])
            tensors["loss_mask"] = np.concatenate([sample.loss_mask for sample in samples])
            for name in columns_of(samples):
                tensors[f"column {name}"] = np.concatenate([sample.columns[name] for sample in samples])
        return save(tensors)

    @classmethod
    def read(cls, said: bytes) -> "_Share":
        """What `written` has written."""
        tensors = load(said)
        about: dict[str, Any] = json.loads(tensors.pop("about").tobytes())
        samples = _samples(tensors)
        made = EncodedRecords(
            [[next(samples) for _ in range(n)] for n in about["counts"]], dict(about["refused"])
        )
        return cls(about["numbers"], made, about["failed"])


def _samples(tensors: Mapping[str, np.ndarray]) -> Iterator[Sample]:
    """The samples of a share, as views of its tensors."""
    if not tensors:
        return
    ends = np.cumsum(tensors["lengths"]).tolist()
    token_ids, loss_mask = tensors["token_ids"], tensors["loss_mask"]
    columns = {name[7:]: values for name, values in tensors.items() if name.startswith("column ")}
    for start, end in zip([0, *ends], ends, strict=False):
        own = {name: values[start:end] for name, values in columns.items()}
        yield Sample(token_ids[start:end], loss_mask[start:end], own)
