"""Policies from the trainer's memory straight into the servers': NCCL between GPUs, else gloo.

Every trainer rank hosts a store at which any server may ask, at any time, for the policy that the rank has.
It sends its shards of it while training goes on: weights change in the optimiser's step only, and the rank
waits there until nobody reads them any more. So nothing is copied or written down for servers, and one that
joins late gets the policy as well.

A server and a rank are a group of two. They agree over the store, with these keys after the pair's number:
`hello` (in which order and data type the server wants the tensors), then for each policy i `ask/i` (its
step), `answer/i` (`yes`, `gone` or `early`) and `go/i` (`yes` once all ranks said yes, else `no`). Then come
the tensors.
"""

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Union

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from cairn.checkpoint.tensors import Stored, local_part
from cairn.run.directory import WEIGHT_SOURCE
from cairn.run.files import read_json, write_json
from cairn.run.rendezvous import address_towards, host_store

logger = logging.getLogger(__name__)

PATIENCE = timedelta(seconds=60)
"""How long the two wait for each other when they are at it; then each gives the other up."""
ANSWER = timedelta(seconds=10)
"""How long a server, in which everything stands still meanwhile, waits for a rank's answer."""
MEET_SECONDS = 0.05
"""How often a rank looks for servers that it does not know."""
FOREVER = timedelta(days=365)
"""How long a rank waits for a server's next request, or for its own end, of which END in its place tells."""
Group = Union["dist.ProcessGroupGloo", "dist.ProcessGroupNCCL"]
END = "end"
END_SECONDS = 1.0
"""How long each thread has for its end."""


class Unchanged(RuntimeError):
    """Why a process of a server has not loaded weights; those that it had are as they were.

    The message begins with the `mark` of its kind: vLLM hands errors from process to process as text.
    """

    mark: ClassVar[str]

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Unfit(RuntimeError):
    """The server can't be given other weights; it may have some of them now."""

    mark = "server unfit for updates: "

    def __init__(self, reason: str):
        super().__init__(self.mark + reason)


class Gone(Unchanged):
    """The trainer has a newer policy by now."""

    mark = "weights gone: "


class NotThere(Unchanged):
    """The trainer does not have that policy yet, or does not answer."""

    mark = "weights not there: "


@dataclass(frozen=True)
class Rank:
    """Where a rank is asked, and what it has of each flat tensor: the first item and the number of items."""

    host: str
    port: int
    parts: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Source:
    """A policy of `bytes` bytes in the memory of the trainer's ranks, on devices of the type `device`."""

    step: int
    device: str
    bytes: int
    shapes: dict[str, list[int]]
    ranks: list[Rank]

    def write(self, folder: Path) -> None:
        """Put it where `read_source` finds it."""
        write_json(folder / WEIGHT_SOURCE, asdict(self))


def read_source(folder: Path) -> Source | None:
    """What `folder` says of where its tensors are; None if it has them itself.

    Raises:
        ValueError: it makes no sense.
        DamagedFile: it is no JSON.
    """
    content = read_json(folder / WEIGHT_SOURCE)
    return None if content is None else TypeAdapter(Source).validate_python(content)


# The trainer's side


class WeightSender:
    """Sends this rank's part of the current policy to whichever server asks.

    Args:
        tensors: by Hugging Face name; they are changed in place, between `withdraw` and `offer` only.
        rank: this rank's number.
        host: its address, at which the servers reach it.
        device: where the tensors are.
    """

    def __init__(self, tensors: Mapping[str, Stored], *, rank: int, host: str, device: torch.device):
        self._shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        self._bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._values: dict[str, torch.Tensor] = {}
        parts: dict[str, tuple[int, int]] = {}
        for name, tensor in tensors.items():
            if (part := local_part(tensor, rank)) is not None:
                values, first_byte = part
                self._values[name] = values.view(-1)
                parts[name] = (first_byte // values.element_size(), values.numel())
        self._device = device
        self._store: dist.TCPStore | None = host_store(host)
        self.here = Rank(host, self._store.port, parts)
        self._state = threading.Condition()
        self._newest = -1
        self._offered: int | None = None
        """None while it is made into the next; a server that waited for that could keep it from coming."""
        self._readers = 0
        self._changed: torch.cuda.Event | None = None
        self._ended = False
        self._awaited: set[str] = set()
        self._threads = [threading.Thread(target=self._meet, daemon=True)]
        self._threads[0].start()

    def source(self, step: int, ranks: list[Rank]) -> Source:
        """The policy after `step` steps, which all of `ranks` offer."""
        return Source(step, self._device.type, self._bytes, self._shapes, ranks)

    def offer(self, step: int) -> None:
        """The tensors are the policy after `step` steps, and stay so until `withdraw`."""
        if self._device.type == "cuda":
            self._changed = torch.cuda.Event()
            self._changed.record()
        with self._state:
            self._newest = self._offered = step

    def withdraw(self) -> None:
        """Send nothing from now on; returns when what was begun has been sent, or given up."""
        with self._state:
            self._offered = None
            self._state.wait_for(lambda: not self._readers)

    def close(self) -> None:
        """End; whoever asks from now on is not answered."""
        if self._store is None:
            return
        self.withdraw()
        with self._state:
            self._ended = True
        for key in list(self._awaited):
            self._store.set(key, END)
        for thread in self._threads:
            thread.join(END_SECONDS)
        self._store = None  # whoever asks now notices at once

    def _meet(self) -> None:
        """Have a thread for each server that comes."""
        store = self._client()
        while not self._ended:
            for pair in range(len(self._threads), store.add("pairs", 0) + 1):
                self._threads.append(threading.Thread(target=self._attend, args=(pair,), daemon=True))
                self._threads[-1].start()
            time.sleep(MEET_SECONDS)

    def _attend(self, pair: int) -> None:
        """Answer one server's requests, until one fails."""
        try:
            store = self._client()
            hello = json.loads(store.get(f"{pair}/hello"))
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            group = _group(store, pair, 0, self.here.host, self._device)
            for request in itertools.count(1):
                asked = self._next(store, f"{pair}/ask/{request}")
                if asked == END:
                    return
                with self._reading(int(asked)) as answer:
                    store.set(f"{pair}/answer/{request}", answer)
                    store.wait([f"{pair}/go/{request}"], 2 * ANSWER)
                    if store.get(f"{pair}/go/{request}") == b"yes":
                        self._send(group, hello["names"], getattr(torch, hello["dtype"]))
        except RuntimeError as error:  # the server asks anew, if it lives
            logger.warning("a server is sent no more weights: %s", error)

    def _next(self, store: dist.TCPStore, key: str) -> str:
        """What a server asks for next, under `key`; END if this sender ends instead."""
        with self._state:
            self._awaited.add(key)
            if self._ended:
                return END
        store.wait([key], FOREVER)
        self._awaited.discard(key)
        return store.get(key).decode()

    @contextlib.contextmanager
    def _reading(self, asked: int) -> Iterator[str]:
        """The answer to who asks for the policy after `asked` steps; after a yes it stays as it is inside."""
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
    def _send(self, group: Group, names: list[str], dtype: torch.dtype) -> None:
        stream = contextlib.nullcontext()
        if self._changed is not None:
            stream = torch.cuda.stream(torch.cuda.Stream(self._device))
        with stream:
            if self._changed is not None:
                torch.cuda.current_stream().wait_event(self._changed)
            for name in names:
                if name in self._values and self._values[name].numel():
                    group.send([self._values[name].to(dtype)], 1, 0).wait()
            if self._changed is not None:
                torch.cuda.current_stream().synchronize()

    def _client(self) -> dist.TCPStore:
        """A connection of the calling thread's own: on a shared one, one's waiting blocks the others."""
        return dist.TCPStore(self.here.host, self.here.port, timeout=PATIENCE)


# The server's side


class WeightReceiver:
    """Gets policies from trainers' memory.

    Args:
        device: where the tensors are wanted.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pairs: dict[tuple[Any, ...], _Pair] = {}

    def receive(
        self, source: Source, groups: list[list[str]], dtype: torch.dtype
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Agree with the ranks of `source`; then iterating gets the tensors, one of `groups` at a time.

        Raises:
            Gone, NotThere: nothing has been sent. While iterating: RuntimeError.
        """
        names = [name for group in groups for name in group]
        answers: list[str] = []
        try:
            known, self._pairs = self._pairs, {}
            for rank in source.ranks:
                key = (rank.host, rank.port, dtype, *names)
                self._pairs[key] = known.get(key) or _Pair(rank, names, dtype, self._device)
            pairs = list(self._pairs.values())
            try:
                for pair in pairs:
                    answers.append(pair.ask(source.step))
            finally:  # whoever said yes keeps its weights as they are until it is told
                for pair in pairs[: len(answers)]:
                    pair.go(answers == ["yes"] * len(pairs))
        except (RuntimeError, OSError) as error:
            self.forget()
            raise NotThere(f"the trainer does not answer: {error}") from None
        if "gone" in answers:
            raise Gone(f"the trainer has a newer policy than that of step {source.step}")
        if "early" in answers:
            raise NotThere(f"the trainer has not come to step {source.step} again")
        return self._tensors(source, groups, dtype, pairs)

    def _tensors(
        self, source: Source, groups: list[list[str]], dtype: torch.dtype, pairs: list["_Pair"]
    ) -> Iterator[dict[str, torch.Tensor]]:
        try:
            for names in groups:
                tensors = {
                    name: torch.empty(source.shapes[name], dtype=dtype, device=self._device) for name in names
                }
                for name, tensor in tensors.items():
                    for rank, pair in zip(source.ranks, pairs, strict=True):
                        first, count = rank.parts.get(name, (0, 0))
                        if count:
                            pair.group.recv([tensor.view(-1)[first : first + count]], 0, 0).wait()
                yield tensors
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Give up all connections; the next request makes new ones."""
        self._pairs.clear()


class _Pair:
    """A server's connection to one rank."""

    def __init__(self, rank: Rank, names: list[str], dtype: torch.dtype, device: torch.device):
        self._store = dist.TCPStore(rank.host, rank.port, timeout=ANSWER)
        self._pair = self._store.add("pairs", 1)
        self._request = 0
        hello = {"names": names, "dtype": str(dtype).removeprefix("torch.")}
        self._store.set(f"{self._pair}/hello", json.dumps(hello))
        self.group = _group(self._store, self._pair, 1, rank.host, device)

    def ask(self, step: int) -> str:
        """Ask for the policy after `step` steps; returns the answer."""
        self._request += 1
        self._store.set(f"{self._pair}/ask/{self._request}", str(step))
        return self._store.get(f"{self._pair}/answer/{self._request}").decode()

    def go(self, yes: bool) -> None:
        """Have the tensors sent, or not."""
        self._store.set(f"{self._pair}/go/{self._request}", "yes" if yes else "no")


def _group(store: dist.Store, pair: int, rank: int, host: str, device: torch.device) -> Group:
    """The group of a rank, which is 0 in it, and a server; `host` is the rank's address."""
    prefixed = dist.PrefixStore(f"{pair}/group", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(prefixed, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(prefixed, rank, 2, options)
