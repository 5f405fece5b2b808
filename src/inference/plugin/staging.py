"""Prepares a policy in host memory while the server generates; its workers then only have to copy it.

The API process does this once for all workers of the machine: it reads, checks and casts, so that nothing of
it has to be done while generation is paused, and nothing can be wrong any more by then. Workers map tensors
that are used as they are from the policy's files, which costs no memory but the page cache. Large matrices of
another data type are cast into memory that the processes share (a memfd), and so is what a trainer sends:
one copy a machine in the server's data type, freed after the update. If that is more than half of the memory
that is available, the workers do it themselves, while generation is paused.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger

from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.inference.plugin.policy_source import NotFinite, PolicyReader, PolicyTensors, Tensors
from cairn.inference.plugin.shared_memory import ALIGNMENT, HeldPolicy, SharedMemory
from cairn.inference.plugin.weight_files import WORKERS, UnusableWeights, identities
from cairn.inference.vllm_command import make_copies_folder
from cairn.model.adapters import is_adapter
from cairn.policy.delta import digest_of
from cairn.policy.errors import Altered, NotHeld, NotThere, Unchanged
from cairn.policy.generation import DIRECT, Relay, Route
from cairn.policy.receiver import Source
from cairn.policy.relay import PolicyRelay
from cairn.policy.stored import PolicyDownloads
from cairn.run.errors import UsageError
from cairn.run.machine import available_memory
from cairn.run.object_store import RemoteError, is_url

logger = init_logger("vllm.cairn")

LARGE = 1 << 22
"""Values of a tensor that is cast beforehand. vLLM computes with some small ones, such as the weights of
routers, in a wider type than the model's; so they are left to its loaders as they come."""

Located = tuple[int, int, str, list[int]]
"""A tensor's file, by number, its offset there in bytes, its data type and shape."""


@dataclass(frozen=True)
class Plan:
    """Where in files, or in shared memory, a prepared policy's tensors are, in the hub's layout.

    files: paths. sums: checksums of the tensors that have the published words. folder: what `identities` said
    of the policy's folder.
    """

    files: list[str]
    tensors: dict[str, Located]
    sums: dict[str, int]
    folder: list[list[str | int]]

    def weights(self) -> Tensors:
        """The tensors, mapped.

        Raises:
            OSError, RuntimeError: a file is not there any more.
        """
        mapped = [torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8) for path in self.files]
        found: Tensors = {}
        for name, (file, offset, kind, shape) in self.tensors.items():
            dtype = DTYPES_IN_SETTINGS[kind]
            size = torch.Size(shape)
            words = mapped[file][offset : offset + size.numel() * dtype.itemsize]
            found[name] = (words.clone() if offset % dtype.itemsize else words).view(dtype).view(size)
        return found


class Staged:
    """A policy's folder, and what was prepared of it. Use it as a context manager, which frees the memory.

    Without a plan, the workers have to read the folder themselves. came: bytes that were read or received, if
    that is known. relay: where this server hands the policy on, if it does. relayed: whether another server
    has handed it on to this one.
    """

    def __init__(
        self,
        path: str,
        plan: Plan | None = None,
        memory: SharedMemory | None = None,
        came: int | None = None,
    ):
        self._path = path
        self.came = came
        self._plan = plan
        self._memory = memory
        self.relay: Relay | None = None
        self.relayed = False

    @property
    def is_prepared(self) -> bool:
        """Whether the workers only have to map tensors."""
        return self._plan is not None

    @property
    def update_info(self) -> dict[str, Any]:
        """What vLLM hands to the transfer engine of each worker."""
        return {"path": self._path, "plan": self._plan and asdict(self._plan)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self._memory.close()


class Staging:
    """Prepares the policies of one model.

    Args:
        config: vLLM's, of the model.
        folder: where to put policies that are downloaded; made when it is needed (see `copies_folder`).
        available: tells how many bytes of memory are available.
        large: values of a tensor that is cast beforehand.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        available: Callable[[], int] = available_memory,
        large: int = LARGE,
    ):
        self._reader = PolicyReader(config)
        self._dtype = config.dtype
        self._casts = config.head_dtype == config.dtype  # else one of the large matrices has a wider type
        self._available = available
        self._large = large
        self._relay = PolicyRelay()
        self._held = HeldPolicy()
        self._downloads = PolicyDownloads(partial(make_copies_folder, folder))

    def prepare(self, path: str, route: Route = DIRECT) -> Staged:
        """Read or receive the policy of a folder, or one that is downloaded, and check it.

        Args:
            path: the folder, or a URL.
            route: how a policy in the trainer's memory comes here. If its `parent` does not send it whole, as
                it was and in time, the trainer does.

        Raises:
            Refused, Altered, Gone, NotThere: it can't be had; see `PolicyReader.open`.
        """
        if is_url(path):
            return self._downloaded(path)
        self._relay.end()
        source = self._reader.source(path)
        if source is not None and source.deltas:
            return self._kept(path, source.bytes, route, source)
        if (chain := self._reader.chain(path, self._held.digest)) is not None:
            return self._kept(path, chain.nbytes if chain.whole else 0, DIRECT)
        self._held.end()
        if source is None and is_adapter(Path(path)):
            policy = self._reader.open(path)
            size = policy.count * self._dtype.itemsize
            return self._as_it_comes(path, policy, 2 * size) if self._fits(size) else Staged(path)
        if source is None:
            folder = [list(file) for file in identities(path)]
            return self._from_files(path, self._reader.open(path), folder)
        values = sum(map(math.prod, source.shapes.values()))
        size = max(source.bytes, values * self._dtype.itemsize)
        if not self._fits(size):
            return Staged(path)
        if route.parent is not None:
            try:
                return self._received(path, source, size, route)
            except (RuntimeError, OSError) as error:
                logger.warning("another server does not hand on %s, so the trainer is asked: %s", path, error)
        return self._received(path, source, size, replace(route, parent=None))

    def _downloaded(self, url: str) -> Staged:
        """A version in an object store: what has changed since the policy that is here, or else all of it."""
        nbytes, has = 0, self._held.digest
        while True:
            try:
                found = self._downloads.fetch(url, has)
                nbytes += found.nbytes
                staged = self.prepare(str(found.folder))
                staged.came = nbytes
                return staged
            except Altered as error:
                self._held.digest = ""
                self._downloads.clear()
                if not has:
                    raise
                logger.warning("%s is of no use here, so all of it is asked for: %s", url, error)
                has = ""
            except (RemoteError, UsageError) as error:
                raise UnusableWeights(str(error)) from None
            except OSError as error:  # such as a full disk, which other servers need not have
                raise NotThere(f"{url} can't be downloaded: {error}") from None

    def _received(self, path: str, source: Source, size: int, route: Route) -> Staged:
        """What the trainer has in its memory, or another server in its place; handed on from here."""
        policy, came = self._reader.open(path, route), Tensors()
        staged = self._as_it_comes(path, policy, 2 * size, came)
        staged.relayed = route.parent is not None
        if policy.sums.keys() == came.keys():  # as they came, word by word, and not in pieces
            staged.relay = self._relay.offer(source, came, policy.sums, route)
        return staged

    def _kept(self, path: str, size: int, route: Route, source: Source | None = None) -> Staged:
        """A policy that may come as deltas, into the places of the one before.

        What is there may be wrong, or of no use any more; then the policy comes whole.

        Args:
            size: bytes of host memory that it may take.
        """
        held = self._held
        if not self._fits(max(size - held.nbytes, 0)):
            held.end()
            return Staged(path)
        direct = replace(route, parent=None)
        if held.digest:
            try:
                return self._from_held(path, self._reader.open(path, room=held), source, direct)
            except (Altered, UnusableWeights) as error:
                logger.warning(
                    "the delta of %s is of no use here, so all of it is asked for: %s", path, error
                )
                held.digest = ""
        elif source is not None and route.parent is not None:
            try:
                return self._from_held(path, self._reader.open(path, route, held), source, route)
            except (RuntimeError, OSError) as error:
                logger.warning("another server does not hand on %s, so the trainer is asked: %s", path, error)
        return self._from_held(path, self._reader.open(path, room=held), source, direct)

    def _from_held(self, path: str, policy: PolicyTensors, source: Source | None, route: Route) -> Staged:
        """What workers map once all tensors of the policy are in their places; handed on from here, if a
        trainer sends them."""
        held = self._held
        with _as_unchanged():
            for _ in policy.parts:
                pass
        sums = policy.sums  # the trainer has none of tensors without values
        held.digest = digest_of({name: sums[name] for name, values in held.tensors.items() if values.numel()})
        complete = PolicyTensors([held.tensors], policy.sums, policy.count, policy.nbytes)
        where = {name: (held.path, offset) for name, offset in held.offsets.items()}
        staged = self._mapped(path, complete, where, [])
        staged.relayed = route.parent is not None
        if source is not None:
            staged.relay = self._relay.offer(source, held.tensors, policy.sums, route)
        return staged

    def _fits(self, size: int) -> bool:
        return size <= self._available() // 2

    def _from_files(self, path: str, policy: PolicyTensors, folder: list[list[str | int]]) -> Staged:
        try:
            stored = find_tensors(Path(path), "model")
        except (OSError, RuntimeError) as error:
            raise UnusableWeights(f"{path}: {error}") from None
        where = {name: (str(tensor.path), tensor.offset) for name, tensor in stored.items()}
        return self._mapped(path, policy, where, folder)

    def _mapped(
        self,
        path: str,
        policy: PolicyTensors,
        where: Mapping[str, tuple[str, int]],
        folder: list[list[str | int]],
    ) -> Staged:
        """Tensors that are in files, or in memory with a path; large ones of another data type are cast.

        Args:
            where: the path and offset of each tensor.
            folder: see `Plan`.
        """
        files = {file: number for number, file in enumerate(sorted({file for file, _ in where.values()}))}
        tensors: dict[str, Located] = {}
        wide: Tensors = {}
        for origin, name, tensor, skipped in self._pieces(policy):
            file, offset = where[origin]
            tensors[name] = files[file], offset + skipped, _name(tensor.dtype), list(tensor.shape)
            if self._staged_as(tensor) != tensor.dtype:
                wide[name] = tensor
        sums = dict(policy.sums)
        size = sum(tensor.numel() for tensor in wide.values()) * self._dtype.itemsize
        if not wide or not self._fits(size):
            return Staged(path, Plan(list(files), tensors, sums, folder), came=policy.nbytes())
        memory = SharedMemory(size + ALIGNMENT * len(wide))
        places = {name: memory.place(tensor.shape, self._dtype) for name, tensor in wide.items()}
        with ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(lambda name: places[name][1].copy_(wide[name]), wide))
        for name, (offset, place) in places.items():
            tensors[name] = len(files), offset, _name(self._dtype), list(place.shape)
            sums.pop(name, None)
        plan = Plan([*files, memory.path], tensors, sums, folder)
        return Staged(path, plan, memory, policy.nbytes())

    def _pieces(self, policy: PolicyTensors) -> Iterator[tuple[str, str, torch.Tensor, int]]:
        """Each tensor in the hub's layout: what it is part of, its name, it, and the bytes in front of it."""
        for part in policy.parts:
            for origin, tensors in self._reader.by_origin(part):
                for name, tensor in tensors.items():
                    yield origin, name, tensor, tensor.data_ptr() - part[origin].data_ptr()

    def _staged_as(self, tensor: torch.Tensor) -> torch.dtype:
        """The data type that the workers get a tensor in."""
        return self._dtype if self._casts and tensor.numel() >= self._large else tensor.dtype

    def _as_it_comes(
        self, path: str, policy: PolicyTensors, size: int, came: Tensors | None = None
    ) -> Staged:
        """Take tensors into memory one after the other; `came` gets those that are there as they came."""
        memory = SharedMemory(size + (ALIGNMENT << 20))  # what is not used takes no memory
        tensors: dict[str, Located] = {}
        changed: set[str] = set()
        try:
            with _as_unchanged():
                for origin, name, tensor, _ in self._pieces(policy):
                    offset, place = memory.place(tensor.shape, self._staged_as(tensor))
                    place.copy_(tensor)
                    tensors[name] = 0, offset, _name(place.dtype), list(place.shape)
                    if place.dtype != tensor.dtype:
                        changed.add(name)
                    elif came is not None and origin == name:
                        came[name] = place
        except BaseException:
            memory.close()
            raise
        sums = {name: value for name, value in policy.sums.items() if name not in changed}
        return Staged(path, Plan([memory.path], tensors, sums, []), memory, policy.nbytes())


@contextlib.contextmanager
def _as_unchanged() -> Iterator[None]:
    """For what takes tensors as they come: nothing of the model has been changed if they come wrong."""
    try:
        yield
    except NotFinite as error:
        raise UnusableWeights(str(error)) from None
    except NotHeld as error:
        raise Altered(str(error).removeprefix(NotHeld.mark)) from None
    except Unchanged:
        raise
    except RuntimeError as error:
        raise NotThere(f"the trainer broke off: {error}") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
