"""How the weights of a policy get from the trainer to the servers: in files, or from memory to memory."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.checkpoint.tensors import Stored, write_tensors
from cairn.policy.checksums import checksums, merged, write_checksums
from cairn.policy.rendezvous import address_towards
from cairn.policy.sender import WeightSender
from cairn.run.errors import UsageError
from cairn.run.versions import WEIGHT_SOURCE
from cairn.trainer.group import RankGroup


class Transport(ABC):
    """One way in which servers get the weights. All ranks call every method, in the same order.

    Args:
        served: the tensors that servers get, as they are now.
        checked: whether servers are checked by the checksums of what is sent.
        host: an address of this machine that servers reach, or one that is on their network; None: the
            address at which the ranks meet.
    """

    @abstractmethod
    def __init__(
        self,
        group: RankGroup,
        served: Callable[[], Mapping[str, Stored]],
        *,
        checked: bool,
        host: str | None = None,
    ): ...

    def offer(self, step: int) -> None:  # noqa: B027
        """The weights are those of `step`, and stay so until `withdraw`."""

    def offer_again(self, step: int, folder: Path) -> None:  # noqa: B027
        """As `offer`, of a version whose `folder` an earlier process may have filled."""

    def withdraw(self) -> None:  # noqa: B027
        """The optimiser is about to change the weights; returns once no server reads them any more."""

    @abstractmethod
    def fill(self, folder: Path, step: int, *, last: bool) -> None:
        """Write into a version's `folder` the weights, or where to get them; what is there may be older.

        Args:
            last: whether `step` is the run's last one, whose version must outlive this process.
        """

    def close(self) -> None:  # noqa: B027
        """Servers get nothing from this process any more."""


class FileTransport(Transport):
    """Servers read safetensors files in the version's folder."""

    def __init__(
        self,
        group: RankGroup,
        served: Callable[[], Mapping[str, Stored]],
        *,
        checked: bool,
        host: str | None = None,
    ):
        self.group = group
        self._served = served
        self._checked = checked

    def fill(self, folder: Path, step: int, *, last: bool) -> None:
        """Write the weights, and their checksums as they are in memory if servers are checked by them."""
        (folder / WEIGHT_SOURCE).unlink(missing_ok=True)
        group, tensors = self.group, self._served()
        with ThreadPoolExecutor(1) as beside:
            sums = beside.submit(checksums, tensors, group.rank) if self._checked else None
            write_tensors(folder, tensors, "model", rank=group.rank, barrier=group.barrier)
        if sums is not None:
            mine = sums.result()
            parts = group.gather_objects(mine) if group.world_size > 1 else [mine]
            if group.rank == 0:
                write_checksums(folder, merged(parts))


class NetworkTransport(Transport):
    """Servers ask the ranks, whose addresses are in the version's folder; the last version is in files."""

    def __init__(
        self,
        group: RankGroup,
        served: Callable[[], Mapping[str, Stored]],
        *,
        checked: bool,
        host: str | None = None,
    ):
        """Listen.

        Raises:
            UsageError: there is no way from this machine towards `host`.
        """
        self.group = group
        self._files = FileTransport(group, served, checked=checked)
        self._sender = WeightSender(served(), rank=group.rank, host=_address(group, host))
        self._ranks = group.gather_objects(self._sender.here)

    def offer(self, step: int) -> None:
        """Answer servers that ask for the weights of `step`."""
        self._sender.offer(step)

    def offer_again(self, step: int, folder: Path) -> None:
        """Answer servers, and have `folder` name this process instead of an earlier one."""
        self._sender.offer(step)
        self.group.barrier()
        if self.group.rank == 0 and (folder / WEIGHT_SOURCE).exists():
            with contextlib.suppress(FileNotFoundError):  # nobody needs it any more
                self._sender.source(step, self._ranks).write(folder)

    def withdraw(self) -> None:
        """Wait for servers that are reading the weights from memory."""
        self._sender.withdraw()

    def fill(self, folder: Path, step: int, *, last: bool) -> None:
        """Write the ranks' addresses, or for the last version the weights."""
        if last:
            self._files.fill(folder, step, last=last)
        elif self.group.rank == 0:
            self._sender.source(step, self._ranks).write(folder)

    def close(self) -> None:
        """Stop answering servers."""
        self._sender.close()


def _address(group: RankGroup, host: str | None) -> str:
    """This rank's address that servers are told."""
    if host is None:
        return group.address
    try:
        return address_towards(host)
    except OSError as error:
        raise UsageError(f"--trainer.weight-host {host}: no way there from this machine: {error}") from None


TRANSPORTS: dict[str, type[Transport]] = {"files": FileTransport, "network": NetworkTransport}
"""By the name that the setting `weight_transport` has for each."""
