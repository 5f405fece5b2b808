"""The trainer's half of the transfer from memory to memory; see `network.py` for the protocol."""

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

import torch

from cairn.checkpoint.tensors.host_staging import HostCopies, Outlet, copies_from
from cairn.checkpoint.tensors.placement import Share, Stored, made_together, share_of
from cairn.checkpoint.tensors.reader import as_memory
from cairn.policy.checksums import as_numbers, share_contribution
from cairn.policy.delta import RankDelta
from cairn.policy.network import (
    ANSWER,
    DELTA,
    MESSAGE_BYTES,
    PATIENCE,
    SAME,
    WHOLE,
    limit_waits,
    messages,
)
from cairn.policy.receiver import Rank, Source
from cairn.run.connections import Listener, receive, send

logger = logging.getLogger(__name__)

END_SECONDS = 1.0
"""Seconds that `close` waits for each thread."""
WITHDRAW_SECONDS = 300.0
"""Seconds that an update waits for transfers in progress, however well they go on."""


class WeightSender:
    """Sends this rank's share of the current policy to any server that asks.

    Args:
        tensors: by Hugging Face name; changed in place, but only between `withdraw` and `offer`.
        rank: this rank's number.
        host: the address at which servers reach this rank.
        dtypes: what tensors are sent as, by name; others are sent as they are.
        token: what servers have to know; default: a new one.
        patience: limit of each wait for a server.
        copies: makes what copies values from given devices.
    """

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        *,
        rank: int,
        host: str,
        dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
        token: str = "",
        patience: timedelta = PATIENCE,
        copies: Callable[[Iterable[torch.device]], HostCopies] = copies_from,
    ):
        self._dtypes = {name: dtypes.get(name, tensor.dtype) for name, tensor in tensors.items()}
        self._shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        self._bytes = sum(tensor.numel() * self._dtypes[name].itemsize for name, tensor in tensors.items())
        self._patience = patience
        self._devices = {tensor.device for tensor in tensors.values()}
        self._make_copies = copies
        self._shares: dict[str, Share] = {}
        for name, tensor in tensors.items():
            share = share_of(name, made_together(tensor), rank).owned()
            if share.ranges:
                self._shares[name] = share
        self._state = threading.Condition()
        self._newest = -1
        self._delta: OfferedDelta | None = None
        self._offered: int | None = None
        """The step of the policy that the tensors hold; None while the optimiser changes them.

        Servers that ask meanwhile are told `gone` instead of waiting: a waiting reader would block the
        update.
        """
        self._readers: set[_Reading] = set()
        token = token or secrets.token_hex(32)
        self._listener = Listener(host, token, self._attend)
        ranges = {name: list(share.ranges) for name, share in self._shares.items()}
        self.here = Rank(host, self._listener.port, ranges, token)

    @property
    def shares(self) -> dict[str, tuple[Share, torch.dtype]]:
        """This rank's share of each tensor of which it has any, and what it is sent as."""
        return {name: (share, self._dtypes[name]) for name, share in self._shares.items()}

    def source(self, step: int, ranks: list[Rank], *, deltas: bool = False) -> Source:
        """The source of the policy after `step` steps, which all of `ranks` offer.

        Args:
            deltas: whether they also offer deltas.
        """
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()}
        return Source(step, self._bytes, self._shapes, dtypes, ranks, deltas)

    def offer_delta(self, delta: "OfferedDelta") -> None:
        """From now on send this to servers that ask for its policy and have the one that it is relative to.

        It replaces an earlier one. Its policy need not be offered any more: nothing of it is in the tensors.
        """
        with self._state:
            self._delta = delta

    def offer(self, step: int) -> None:
        """Offer the tensors as the policy after `step` steps; they must not change until `withdraw`.

        Waits for the work that is queued on a GPU: whatever is sent from now on is that policy.
        """
        if any(device.type == "cuda" for device in self._devices):
            torch.cuda.current_stream().synchronize()
        with self._state:
            self._newest = self._offered = step

    def withdraw(self, seconds: float = WITHDRAW_SECONDS) -> None:
        """Stop offering; returns when transfers in progress are finished or given up.

        After `seconds` they are given up here: what they send from then on is never confirmed with checksums,
        so no server takes it for the policy.
        """
        with self._state:
            self._offered = None
            if not self._state.wait_for(lambda: not self._readers, seconds):
                logger.warning("giving up %d transfers after %g s", len(self._readers), seconds)
                for reading in self._readers:
                    reading.is_over = True
                self._readers.clear()

    def close(self) -> None:
        """Stop answering servers, and end the threads: a server that asks fails at once."""
        self.withdraw()
        self._listener.close(END_SECONDS)

    def _attend(self, link: socket.socket) -> None:
        """Answer a server's requests until one fails."""
        try:
            limit_waits(link, self._patience)
            names: list[str] = receive(link)["names"]
            outlet = Outlet(self._make_copies(self._devices), MESSAGE_BYTES)
            with contextlib.closing(outlet), outlet.running():
                while True:
                    limit_waits(link, None)
                    try:
                        asked = receive(link)
                    except ConnectionError:  # the server has ended, or `close` was called
                        return
                    limit_waits(link, 2 * ANSWER)
                    with self._reading(asked["step"], asked["base"]) as reading:
                        send(link, {"answer": reading.answer})
                        if receive(link)["go"]:
                            limit_waits(link, self._patience)
                            send(link, {"sums": self._send(link, names, reading, outlet)})
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # a living server connects again
            logger.warning("closing the connection to a server: %s", str(error).partition("\n")[0])

    @contextlib.contextmanager
    def _reading(self, asked: int, base: str) -> Iterator["_Reading"]:
        """A request for policy `asked` of a server that has the policy with the digest `base`, if any.

        After WHOLE, the policy stays as it is until `withdraw` gives up.
        """
        with self._state:
            past = WHOLE if asked == self._offered else "gone"
            reading = _Reading(past if asked <= self._newest else "early")
            if (delta := self._delta) is not None and delta.step == asked and (how := delta.answer_to(base)):
                reading = _Reading(how, delta)
            if reading.answer == WHOLE:
                self._readers.add(reading)
        try:
            yield reading
        finally:
            with self._state:
                self._readers.discard(reading)
                self._state.notify_all()

    @torch.no_grad()
    def _send(
        self, link: socket.socket, names: list[str], reading: "_Reading", outlet: Outlet
    ) -> dict[str, int]:
        """Send what was answered of these tensors; returns their checksums, as the server is told them."""
        if (delta := reading.delta) is None:
            return self._sent(names, self._send_shares(link, names, reading, outlet))
        if reading.answer == DELTA:
            blocks = [delta.rank.blocks.get(name, b"") for name in names]
            send(link, {"sizes": list(map(len, blocks))})
            for changes in blocks:
                for first in range(0, len(changes), MESSAGE_BYTES):
                    link.sendall(memoryview(changes)[first : first + MESSAGE_BYTES])
        return {name: delta.rank.sums[name] for name in names if name in delta.rank.sums}

    def _send_shares(
        self, link: socket.socket, names: list[str], reading: "_Reading", outlet: Outlet
    ) -> dict[str, int]:
        """Send this rank's share of each tensor; returns what it contributes to their checksums."""
        sums: dict[str, torch.Tensor] = {}
        shares = self._shares
        if reading.is_over:
            raise RuntimeError("the policy is not sent any more")
        for name in names:
            if share := shares.get(name):
                values = share.flat().to(self._dtypes[name])
                for message in messages(values):
                    link.sendall(as_memory(outlet.bring(message)))
                    if reading.is_over:
                        raise RuntimeError("it took too long, and the policy changes now")
                sums[name] = share_contribution(share, values)
        return as_numbers(sums)

    def _sent(self, names: list[str], contributions: dict[str, int]) -> dict[str, int]:
        """What a server that has got these tensors is told of their checksums: what this rank contributes."""
        return contributions


@dataclass(frozen=True)
class OfferedDelta:
    """What this rank sends in place of its share of the policy of `step`, whose digest is `digest`.

    base: digest of the policy that it is relative to; empty: there is none, and the policy itself is all that
    a server may have.
    """

    step: int
    base: str
    digest: str
    rank: RankDelta

    def answer_to(self, has: str) -> str | None:
        """What a server is answered that has the policy of digest `has`; None: this is of no use to it."""
        if not has:
            return None
        return SAME if has == self.digest else DELTA if has == self.base else None


@dataclass(eq=False)
class _Reading:
    """A server's request: the `answer` that it gets, what it is sent in place of the tensors, if anything,
    and whether `withdraw` has given the transfer up."""

    answer: str
    delta: OfferedDelta | None = None
    is_over: bool = False
