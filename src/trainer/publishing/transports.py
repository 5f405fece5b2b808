"""How the weights of a policy get from the trainer to the servers: in files, or from memory to memory."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cairn.checkpoint.step_folder import OF_ADAPTERS
from cairn.checkpoint.tensors.host_staging import Outlet, copies_from
from cairn.checkpoint.tensors.sharded_files import OutgoingTensors, Stored
from cairn.policy.checksums import RunningSums, merged
from cairn.policy.network import address_towards
from cairn.policy.receiver import Source
from cairn.policy.sender import WeightSender
from cairn.run.errors import UsageError
from cairn.run.messages import DELTA, WEIGHT_SOURCE
from cairn.trainer.group import RankGroup


@dataclass(frozen=True)
class Written:
    """What ranks have written of a version.

    sums: the checksums of its tensors, or what ranks contribute to them; none if servers are not checked.
    nbytes: of changes, if it is these that were written.
    """

    sums: Mapping[str, int] = field(default_factory=dict[str, int])
    nbytes: int = 0

    @classmethod
    def by_all(cls, ranks: Sequence["Written"]) -> "Written":
        """What all ranks have written together."""
        return cls(merged(written.sums for written in ranks), sum(written.nbytes for written in ranks))


class Filling(ABC):
    """What goes into a version's folder. Rank 0 calls `begin`, then each rank `write`, and once all have
    written each rank `finish`, on any thread.
    """

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """Write what rank 0 alone writes; what is in `folder` may be older."""

    def write(self, folder: Path, check: Callable[[], object]) -> Written:
        """Write this rank's part. The weights may change once it returns.

        `check` is called again and again; what it raises ends the writing.
        """
        return Written()

    def finish(self, folder: Path, written: Written) -> None:  # noqa: B027
        """All ranks together have written this, and rank 0 the checksums; the folder is announced next."""


@dataclass(frozen=True)
class Served:
    """What servers get.

    tensors: by the hub's name, as they are now; all ranks call it, on the thread that trains, and what it
    has returned before stands for the new values, too. dtypes: the data types that they are published in, by
    name; others are published as they are. beside: files beside the tensors.
    checked: whether servers are checked by checksums. saved: whether a checkpoint's model/ holds the tensors.
    stem: of the files.
    """

    tensors: Callable[[], Mapping[str, Stored]]
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, torch.dtype])
    beside: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    checked: bool = True
    saved: bool = True
    stem: str = "model"

    @property
    def rounds(self) -> bool:
        """Whether any value is published as another one than the trainer's."""
        return any(self.dtypes.get(name, t.dtype) != t.dtype for name, t in self.tensors().items())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on all ranks together."""
        found = self.tensors().items()
        return sum(t.numel() * self.dtypes.get(name, t.dtype).itemsize for name, t in found)


class Transport(ABC):
    """One way in which servers get the weights. All ranks call every method, in the same order.

    served: what servers get.

    Args:
        host: an address of this machine that servers reach, or one that is on their network; None: the
            address at which the ranks meet.
    """

    served: Served

    @abstractmethod
    def __init__(self, group: RankGroup, served: Served, *, host: str | None = None): ...

    def offer(self, step: int) -> None:  # noqa: B027
        """The weights have seen `step` steps, and stay so until `withdraw`."""

    def offer_again(self, step: int, folder: Path) -> None:  # noqa: B027
        """As `offer`, of a version whose `folder` an earlier process may have filled."""

    def withdraw(self) -> None:  # noqa: B027
        """The optimiser is about to change the weights; returns once no server reads them any more."""

    @abstractmethod
    def take(self, step: int, *, last: bool) -> Filling:
        """What is to be written into a version's folder: the weights as they are now, or where to get them.

        The weights must not change before all of it is written.

        Args:
            last: whether `step` is the run's last one, whose version must outlive this process.
        """

    def close(self) -> None:  # noqa: B027
        """Servers get nothing from this process any more."""


class FileTransport(Transport):
    """Servers read safetensors files in the version's folder."""

    def __init__(self, group: RankGroup, served: Served, *, host: str | None = None):
        self.group = group
        self.served = served
        self.outlet = Outlet(copies_from(tensor.device for tensor in served.tensors().values()))

    def take(self, step: int, *, last: bool) -> Filling:
        return FileFilling(self.outgoing(), self.served)

    def outgoing(self) -> OutgoingTensors:
        """The tensors as they are now; all ranks call it, on the thread that trains."""
        served = self.served
        return OutgoingTensors(
            served.tensors(), served.stem, self.outlet, rank=self.group.rank, dtypes=served.dtypes
        )

    def close(self) -> None:
        """Free the memory through which weights leave a GPU."""
        self.outlet.close()


class FileFilling(Filling):
    """Tensors in files, and those files that make the folder a model's."""

    def __init__(self, outgoing: OutgoingTensors, served: Served):
        self.outgoing = outgoing
        self.stem = served.stem
        self.beside = served.beside
        self.checked = served.checked

    def begin(self, folder: Path) -> None:
        others = [path for path in folder.glob("*.safetensors*") if not path.name.startswith(self.stem)]
        for path in (
            folder / WEIGHT_SOURCE,
            folder / DELTA,
            *(folder / name for name in OF_ADAPTERS),
            *others,
        ):
            path.unlink(missing_ok=True)
        for name, content in self.beside.items():
            (folder / name).write_bytes(content)
        self.outgoing.create(folder)

    def write(self, folder: Path, check: Callable[[], object]) -> Written:
        """Write the values; the checksums are computed from the values in memory."""
        sums = RunningSums()
        if self.checked:
            self.outgoing.write(folder, sums.add, check)
        else:
            self.outgoing.write(folder, check=check)
        return Written(sums.numbers())


class NetworkTransport(Transport):
    """Servers ask the ranks, whose addresses are in the version's folder; the last version is in files."""

    def __init__(self, group: RankGroup, served: Served, *, host: str | None = None):
        """Listen.

        Raises:
            UsageError: there is no way from this machine towards `host`.
        """
        self.group = group
        self.served = served
        self._tensors = served.tensors()
        self._files = FileTransport(group, replace(served, tensors=lambda: self._tensors))
        self.sender = WeightSender(
            self._tensors, rank=group.rank, host=_address(group, host), dtypes=served.dtypes
        )
        self._ranks = group.gather_objects(self.sender.here)

    def offer(self, step: int) -> None:
        """Answer servers that ask for the weights of `step`."""
        self._tensors = self.served.tensors()  # those that are computed for servers change now
        self.sender.offer(step)

    def offer_again(self, step: int, folder: Path) -> None:
        """Answer servers, and have `folder` name this process instead of an earlier one."""
        self.offer(step)
        self.group.barrier()
        if self.group.rank == 0 and (folder / WEIGHT_SOURCE).exists():
            with contextlib.suppress(FileNotFoundError):  # nobody needs it any more
                self._source(step).write(folder)

    def withdraw(self) -> None:
        """Wait for servers that are reading the weights from memory."""
        self.sender.withdraw()

    def take(self, step: int, *, last: bool) -> Filling:
        """The ranks' addresses, or for the last version the weights."""
        return self._files.take(step, last=last) if last else self._sending(step)

    def _sending(self, step: int) -> Filling:
        """What is written of a version that the ranks send."""
        return SourceFilling(self._source(step))

    def _source(self, step: int) -> Source:
        return self.sender.source(step, self._ranks)

    def close(self) -> None:
        self.sender.close()
        self._files.close()


class SourceFilling(Filling):
    """Where servers get the tensors."""

    def __init__(self, source: Source):
        self.source = source

    def begin(self, folder: Path) -> None:
        self.source.write(folder)


def _address(group: RankGroup, host: str | None) -> str:
    """This rank's address, for servers."""
    if host is None:
        return group.address
    try:
        return address_towards(host)
    except OSError as error:
        raise UsageError(f"--trainer.weight-host {host}: no way there from this machine: {error}") from None
