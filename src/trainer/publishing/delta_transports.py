"""The transports again, with deltas: servers get only what a policy differs in from the one before.

The first policy of a process travels whole. In files so does one from time to time, with which a server can
begin that does not have the policy before; over the network such a server is sent the policy itself.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.checkpoint.tensors.host_staging import Outlet, copies_from
from cairn.checkpoint.tensors.sharded_files import OutgoingTensors
from cairn.policy.checksums import RunningSums
from cairn.policy.delta import LastPublished, RankDelta, digest_of
from cairn.policy.delta_files import write_rank
from cairn.policy.receiver import Source
from cairn.policy.sender import OfferedDelta, WeightSender
from cairn.run.messages import DeltaNote, write_delta_note
from cairn.trainer.group import RankGroup
from cairn.trainer.publishing.transports import (
    FileFilling,
    FileTransport,
    Filling,
    NetworkTransport,
    Served,
    SourceFilling,
    Written,
)

logger = logging.getLogger(__name__)

WHOLE_EVERY = 20
"""Versions in files of which one is whole: a server that joins applies fewer deltas than that."""
WORTHWHILE = 0.9
"""Of a rank's share of the policy: a larger delta is not offered over the network."""


# Files


@dataclass
class NewestInFiles:
    """The newest version in files, which the next delta is relative to.

    last: what it holds of this rank. folder: its name. links: the deltas since the whole version before it,
    which have `nbytes` bytes.
    """

    last: LastPublished
    folder: str = ""
    links: int = 0
    nbytes: int = 0

    def follow(self, folder: str, written: Written, *, links: int, nbytes: int) -> None:
        """All ranks have written the version of this folder."""
        self.folder, self.links, self.nbytes = folder, links, nbytes
        self.last.digest = digest_of(written.sums)


class DeltaFileTransport(FileTransport):
    """Servers read what has changed since the version before, from files in the version's folder.

    A version is whole if it is the process's first or the run's last one, or if the deltas since the last
    whole one are WHOLE_EVERY - 1, or have as many bytes as a whole one.
    """

    def __init__(self, group: RankGroup, served: Served, *, host: str | None = None):
        super().__init__(group, replace(served, checked=True))
        self._newest = NewestInFiles(LastPublished())
        self._nbytes = served.nbytes

    def take(self, step: int, *, last: bool) -> Filling:
        outgoing, newest = self.outgoing(), self._newest
        begun = newest.last.digest and newest.links + 1 < WHOLE_EVERY and newest.nbytes < self._nbytes
        if last or not begun:
            return _WholeFiles(outgoing, self.served, f"v{step}", newest)
        return _DeltaFiles(outgoing, self.outlet, self.group, f"v{step}", newest)


class _WholeFiles(FileFilling):
    """A whole version, with which servers can begin."""

    def __init__(self, outgoing: OutgoingTensors, served: Served, name: str, newest: NewestInFiles):
        super().__init__(outgoing, served)
        self._name = name
        self._newest = newest

    def write(self, folder: Path, check: Callable[[], object]) -> Written:
        """As in the base class; the values are also kept."""
        sums, last = RunningSums(), self._newest.last
        last.digest = ""

        def saw(name: str, values: torch.Tensor, first_byte: int) -> None:
            sums.add(name, values, first_byte)
            last.keep(name, values, first_byte // values.element_size())

        self.outgoing.write(folder, saw, check)
        return Written(sums.numbers())

    def finish(self, folder: Path, written: Written) -> None:
        self._newest.follow(self._name, written, links=0, nbytes=0)


class _DeltaFiles(Filling):
    """What has changed since the newest version."""

    def __init__(
        self, outgoing: OutgoingTensors, outlet: Outlet, group: RankGroup, name: str, newest: NewestInFiles
    ):
        self._outgoing = outgoing
        self._outlet = outlet
        self._group = group
        self._name = name
        self._newest = newest
        self._note = DeltaNote(newest.folder, newest.last.digest, "", group.world_size)

    def begin(self, folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()

    def write(self, folder: Path, check: Callable[[], object]) -> Written:
        """Write this rank's changes; the checksums are computed from the values in memory."""
        self._newest.last.digest = ""
        delta = self._newest.last.advance(self._outgoing.shares, self._outlet, check)
        write_rank(folder, self._group.rank, delta)
        return Written(delta.sums, delta.nbytes)

    def finish(self, folder: Path, written: Written) -> None:
        """Say what the delta is relative to."""
        newest = self._newest
        newest.follow(self._name, written, links=newest.links + 1, nbytes=newest.nbytes + written.nbytes)
        if self._group.rank == 0:
            write_delta_note(folder, replace(self._note, digest=newest.last.digest))


# From memory to memory


class DeltaNetworkTransport(NetworkTransport):
    """Servers ask the ranks, which send what has changed to those that have the policy before."""

    def __init__(self, group: RankGroup, served: Served, *, host: str | None = None):
        super().__init__(group, served, host=host)
        self._outlet = Outlet(copies_from(tensor.device for tensor in served.tensors().values()))
        self._last = LastPublished()

    def _sending(self, step: int) -> Filling:
        self._outlet.follow()
        return _SentDelta(self._source(step), self.sender, self._outlet, self._last)

    def _source(self, step: int) -> Source:
        return replace(super()._source(step), deltas=True)

    def close(self) -> None:
        super().close()
        self._outlet.close()


class _SentDelta(SourceFilling):
    """Where servers get the tensors, and what has changed in them, in this rank's memory."""

    def __init__(self, source: Source, sender: WeightSender, outlet: Outlet, last: LastPublished):
        super().__init__(source)
        self._sender = sender
        self._outlet = outlet
        self._last = last
        self._base = ""
        self._delta: RankDelta | None = None

    def write(self, folder: Path, check: Callable[[], object]) -> Written:
        """Find what has changed; the checksums are computed from the values in memory."""
        last = self._last
        self._base, last.digest = last.digest, ""
        self._delta = last.advance(self._sender.shares, self._outlet, check)
        return Written(self._delta.sums, self._delta.nbytes)

    def finish(self, folder: Path, written: Written) -> None:
        """Offer the delta; until then servers are sent the tensors themselves."""
        last, delta = self._last, self._delta
        assert delta is not None
        last.digest = digest_of(written.sums)
        if delta.nbytes > WORTHWHILE * last.nbytes:
            of = (self.source.step, delta.nbytes, last.nbytes)
            logger.info("the delta of step %d is not offered: it has %d bytes, and the policy %d", *of)
            self._base, delta = "", RankDelta({}, delta.sums)
        self._sender.offer_delta(OfferedDelta(self.source.step, self._base, last.digest, delta))
