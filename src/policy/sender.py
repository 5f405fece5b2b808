# torch.distributed exports neither stores nor what process groups can do.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""The trainer's half of the transfer from memory to memory; see `network.py` for the protocol."""

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from cairn.checkpoint.shares import Share, Stored, share_of
from cairn.policy.checksums import as_numbers, share_contribution
from cairn.policy.network import ANSWER, PATIENCE, PairGroup, join_pair
from cairn.policy.rendezvous import host_store
from cairn.policy.source import Rank, Source

logger = logging.getLogger(__name__)

MEET_SECONDS = 0.05
"""Seconds between two checks for newly connected servers."""
FOREVER = timedelta(days=365)
"""Timeout of the wait for a server's next request. `close` ends it by storing END under the awaited key."""
END = "end"
END_SECONDS = 1.0
"""Seconds that `close` waits for each thread."""


class WeightSender:
    """Sends this rank's share of the current policy to any server that asks.

    Args:
        tensors: by Hugging Face name; changed in place, but only between `withdraw` and `offer`.
        rank: this rank's number.
        host: the address at which servers reach this rank.
        device: device of the tensors.
    """

    def __init__(self, tensors: Mapping[str, Stored], *, rank: int, host: str, device: torch.device):
        self._shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._shares: dict[str, Share] = {}
        for name, tensor in tensors.items():
            share = share_of(name, tensor, rank)
            if share.owned and share.ranges:
                self._shares[name] = share
        self._device = device
        self._store: dist.TCPStore | None = host_store(host)
        ranges = {name: list(share.ranges) for name, share in self._shares.items()}
        self.here = Rank(host, self._store.port, ranges)
        self._state = threading.Condition()
        self._newest = -1
        self._offered: int | None = None
        """The step of the policy that the tensors hold; None while the optimiser changes them.

        Servers that ask meanwhile are told `gone` instead of waiting: a waiting reader would block the
        update.
        """
        self._readers = 0
        self._changed: torch.cuda.Event | None = None
        self._ended = False
        self._awaited: set[str] = set()
        self._threads = [threading.Thread(target=self._meet, daemon=True)]
        self._threads[0].start()

    def source(self, step: int, ranks: list[Rank]) -> Source:
        """The source of the policy after `step` steps, which all of `ranks` offer."""
        return Source(step, self._device.type, self._bytes, self._shapes, ranks)

    def offer(self, step: int) -> None:
        """Offer the tensors as the policy after `step` steps; they must not change until `withdraw`."""
        if self._device.type == "cuda":
            self._changed = torch.cuda.Event()
            self._changed.record()
        with self._state:
            self._newest = self._offered = step

    def withdraw(self) -> None:
        """Stop offering; returns when transfers in progress are finished or given up."""
        with self._state:
            self._offered = None
            self._state.wait_for(lambda: not self._readers)

    def close(self) -> None:
        """Stop answering servers, and end the threads."""
        if self._store is None:
            return
        self.withdraw()
        with self._state:
            self._ended = True
        for key in list(self._awaited):
            self._store.set(key, END)
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._store = None  # closes the store, so that a server that asks fails at once

    def _meet(self) -> None:
        """Start a thread for each server that connects."""
        store = self._client()
        while not self._ended:
            for pair in range(len(self._threads), store.add("pairs", 0) + 1):
                self._threads.append(threading.Thread(target=self._attend, args=(pair,), daemon=True))
                self._threads[-1].start()
            time.sleep(MEET_SECONDS)

    def _attend(self, pair: int) -> None:
        """Answer one server's requests until one fails."""
        try:
            store = self._client()
            hello = json.loads(store.get(f"{pair}/hello"))
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            group = join_pair(store, pair, 0, self.here.host, self._device)
            for request in itertools.count(1):
                asked = self._next(store, f"{pair}/ask/{request}")
                if asked == END:
                    return
                with self._reading(int(asked)) as answer:
                    store.set(f"{pair}/answer/{request}", answer)
                    store.wait([f"{pair}/go/{request}"], 2 * ANSWER)
                    if store.get(f"{pair}/go/{request}") == b"yes":
                        sums = self._send(group, hello["names"], getattr(torch, hello["dtype"]))
                        store.set(f"{pair}/sums/{request}", json.dumps(sums))
        except RuntimeError as error:  # a living server connects again
            logger.warning("closing the connection to a server: %s", error)

    def _next(self, store: dist.TCPStore, key: str) -> str:
        """The server's next request, under `key`; END if `close` was called."""
        with self._state:
            self._awaited.add(key)
            if self._ended:
                return END
        store.wait([key], FOREVER)
        self._awaited.discard(key)
        return store.get(key).decode()

    @contextlib.contextmanager
    def _reading(self, asked: int) -> Iterator[str]:
        """The answer to a request for policy `asked`; after a yes, the policy can't change in the context."""
        with self._state:
            past = "yes" if asked == self._offered else "gone"
            answer = past if asked <= self._newest else "early"
            self._readers += answer == "yes"
        try:
            yield answer
        finally:
            with self._state:
                self._readers -= answer == "yes"
                self._state.notify_all()

    @torch.no_grad()
    def _send(self, group: PairGroup, names: list[str], dtype: torch.dtype) -> dict[str, int]:
        """Send this rank's share of each tensor, as `dtype`; returns their checksums."""
        sums: dict[str, torch.Tensor] = {}
        stream = contextlib.nullcontext()
        if self._changed is not None:
            stream = torch.cuda.stream(torch.cuda.Stream(self._device))
        with stream:
            if self._changed is not None:
                torch.cuda.current_stream().wait_event(self._changed)
            for name in names:
                if share := self._shares.get(name):
                    values = share.local.reshape(-1).to(dtype)
                    group.send([values], 1, 0).wait()
                    sums[name] = share_contribution(share, values)
            if self._changed is not None:
                torch.cuda.current_stream().synchronize()
            return as_numbers(sums)

    def _client(self) -> dist.TCPStore:
        """A connection for the calling thread: on a shared one, a waiting thread would block the others."""
        return dist.TCPStore(self.here.host, self.here.port, timeout=PATIENCE)
