"""Reads a policy from its folder: checked files, or the tensors in a trainer's memory.

Runs in vLLM's API process, which prepares updates, and in its workers if they have to do without.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.formats import FORMATS, TensorSource
from cairn.formats.common.match_layout import weights_of
from cairn.inference.plugin.vllm_internals import layerwise_groups
from cairn.inference.plugin.weight_files import (
    WORKERS,
    ExpectedTensors,
    UnusableWeights,
    check_folder,
    identities,
    look_at,
    read_weights,
)
from cairn.model.adapters import Base, base_of_adapter, is_adapter, merged_weights
from cairn.model.hub_layout import Layout
from cairn.policy.checksums import checksum, read_checksums
from cairn.policy.delta_files import DeltaChain, DeltaFiles, chain_to
from cairn.policy.errors import Altered, NotHeld, Unchanged
from cairn.policy.generation import DIRECT, Route
from cairn.policy.receiver import Room, Source, WeightReceiver, read_source
from cairn.policy.relay import handed_on
from cairn.run.files import DamagedFile, safetensors_bytes

logger = init_logger("vllm.cairn")

Tensors = dict[str, torch.Tensor]


# A policy that comes as a low-rank adapter: the server adds it to the base, which it has on disk. So a
# version is a few megabytes, whatever the size of the model. The server computes from merged weights.


class Merging:
    """Merges adapters into their base, whose files are compared with their checksums once.

    Args:
        model: the folder that the server was started with; the base is looked for there first, since the
            trainer's folder may be on another machine.
    """

    def __init__(self, model: str):
        self._model = model
        self._compared: tuple[Base, Path, list[tuple[str, int, int]]] | None = None

    def sources(self, folder: Path, layout: Layout) -> dict[str, TensorSource]:
        """The merged weights of the adapter in `folder`, by the hub's names; nothing of the base is read yet.

        Raises:
            Altered: the adapter is not the one that the trainer wrote.
            Refused: the base is not here, or the adapter does not fit it.
        """
        published = read_checksums(folder) or {}
        stored = find_tensors(folder, "adapter_model")
        for name, expected in published.items():
            if name not in stored or checksum(read_tensor(stored[name])) != expected:
                raise Altered(
                    f"{folder}: tensor {name} is not the one that the trainer wrote (other checksum)"
                )
        try:
            base = self._base(folder)
            merged = merged_weights(folder, FORMATS["hf"].read(base).tensors[MODEL], layout)
            return weights_of(merged, layout, folder)
        except CheckpointError as error:
            raise UnusableWeights(str(error)) from None

    def _base(self, folder: Path) -> Path:
        record = base_of_adapter(folder)
        if record is None:
            raise CheckpointError(f"{folder}: does not say which base its adapter is of")
        if self._compared is not None:
            known, found, files = self._compared
            if known == record and identities(str(found)) == files:
                return found
        try:
            return self._compare(record, folder, record.find(folder, self._model))
        except CheckpointError:  # the server may have been started with any model of these shapes
            return self._compare(record, folder, record.find(folder))

    def _compare(self, record: Base, folder: Path, found: Path) -> Path:
        files = identities(str(found))
        record.check_files(found, folder)
        self._compared = record, found, files
        return found


def in_groups(sources: dict[str, TensorSource], groups: list[list[str]]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors, a group at a time."""
    for names in groups:
        yield {name: read_tensor(sources[name]) for name in names}


# Reading any kind of policy.


class NotFinite(RuntimeError):
    """A value that the trainer has sent is NaN or infinite."""


@dataclass(frozen=True)
class PolicyTensors:
    """A policy's tensors, in the layout of the folder or trainer.

    parts: the tensors, in one part or layer by layer. sums: their checksums, complete for each part that was
    taken. count: number of values. nbytes: bytes that are read of files, or have come so far.
    """

    parts: Iterable[Tensors]
    sums: Mapping[str, int]
    count: int
    nbytes: Callable[[], int]


class PolicyReader:
    """Reads policies for one model.

    Args:
        config: vLLM's, of the model.
    """

    def __init__(self, config: ModelConfig):
        self._config = config

    def source(self, path: str) -> Source | None:
        """Which trainer has the tensors; None if the folder holds them.

        Raises:
            Refused: the folder does not say.
        """
        check_folder(path)
        try:
            return read_source(Path(path))
        except (DamagedFile, ValueError, OSError, RecursionError) as error:
            raise UnusableWeights(f"{path}: does not say where its tensors are: {error}") from None

    def chain(self, path: str, has: str = "") -> DeltaChain | None:
        """What the policy of a folder with a delta is made of, for who has the one with the digest `has`.

        None if the folder holds no delta.

        Raises:
            Altered: a link is missing or damaged.
        """
        check_folder(path)
        try:
            return chain_to(Path(path), has)
        except Damaged as error:
            raise Altered(str(error)) from None

    def open(self, path: str, route: Route = DIRECT, room: Room | None = None) -> PolicyTensors:
        """The tensors of a folder, checked, or those that its trainer is about to send.

        Those of a folder with an adapter are made of it and the base, a layer at a time; those of a folder
        with a delta of it and the policy that `room` holds, or whole one at the chain's beginning.

        Args:
            route: whose `parent` sends them in the trainer's place, if there is one.
            room: where what is sent, or made by deltas, is put. Its digest is empty from then on.

        Raises:
            Refused: a file or tensor is unusable, or the trainer has other tensors than this model.
            Altered: the files are not those that the trainer wrote.
            Gone, NotThere: the trainer does not send them.
            NotHeld: while iterating: what came is not what the trainer has sent.
            NotFinite: while iterating: a value is NaN or infinite.
            RuntimeError: while iterating: the trainer broke off.
        """
        room = room or Room()
        try:
            if (source := self.source(path)) is not None:
                sums: dict[str, int] = {}
                count = sum(map(math.prod, source.shapes.values()))
                parts, nbytes = self._from_memory(source, sums, route, room)
                return PolicyTensors(parts, sums, count, nbytes)
            if (chain := self.chain(path, room.digest)) is not None:
                return self._by_deltas(Path(path), chain, room)
            if is_adapter(Path(path)):
                return self._merged(path)
            arrived = read_weights(path, self._expected.layout_of, self._config.dtype)
        except Unchanged:
            raise
        except Damaged as error:  # of a delta, which only the trainer writes
            raise Altered(str(error)) from None
        except Exception as error:  # nothing has been touched, whatever it was
            logger.exception("cannot read %s", path)
            raise UnusableWeights(f"{path}: {error!r}") from None
        count = sum(tensor.numel() for tensor in arrived.weights.values())
        size = sum(tensor.nbytes for tensor in arrived.weights.values())
        return PolicyTensors([arrived.weights], arrived.sums, count, lambda: size)

    def _from_memory(
        self, source: Source, sums: dict[str, int], route: Route, room: Room
    ) -> tuple[Iterator[Tensors], Callable[[], int]]:
        """The trainer's tensors, a layer at a time, and how many bytes have come; their checksums go into
        `sums`."""
        layout = self._expected.layout_of(source.shapes)
        shapes, tied = layout.shapes, layout.tied
        for name in shapes.keys() ^ source.shapes.keys():
            if name not in tied:
                raise UnusableWeights(f"tensor {name} is {'missing' if name in shapes else 'unexpected'}")
        for name, shape in source.shapes.items():
            if shape != shapes[name]:
                raise UnusableWeights(f"tensor {name} has shape {shape}, not {shapes[name]}")
        names = [name for name in source.shapes if name not in tied]
        receiver, seconds = self._receiver, math.inf
        if route.parent is not None:  # the connection to the trainer is kept for the next policy
            receiver, seconds = WeightReceiver(timedelta(seconds=route.seconds)), route.seconds
            source = handed_on(source, route.parent)
        room.begin({name: source.layout[name] for name in names})
        parts = receiver.receive(source, layerwise_groups(names), seconds, room)
        room.digest = ""

        def checked() -> Iterator[Tensors]:
            with _as_not_held():
                for weights in parts:
                    for name, tensor in weights.items():
                        sums[name] = self._checked(tensor, f"the trainer's tensor {name}")
                    yield weights
            for name, sent in receiver.sent.items():
                if sums[name] != sent:
                    raise NotHeld(f"checksum of {name} as it came from the trainer")
            if route.parent is not None:
                receiver.forget()

        return checked(), lambda: receiver.nbytes

    def _by_deltas(self, path: Path, chain: DeltaChain, room: Room) -> PolicyTensors:
        """The tensors that the deltas of `chain` make, a layer at a time."""
        base: Tensors = {}
        if chain.whole is not None:
            base = read_weights(str(chain.whole), self._expected.layout_of, self._config.dtype).weights
            room.begin({name: (tensor.shape, tensor.dtype) for name, tensor in base.items()})
        published, layout, sums = read_checksums(path) or {}, room.layout, dict[str, int]()
        if published.keys() != {name for name, (shape, _) in layout.items() if shape.numel()}:
            raise Altered(f"{path}: has other tensors than the policy that its delta is relative to")
        deltas = [DeltaFiles(link) for link in chain.links]
        room.digest = ""

        def made(name: str) -> torch.Tensor:
            tensor = room.place(name, *layout[name])
            if chain.whole is not None:
                tensor.copy_(base[name])
            for delta in deltas:
                delta.apply(name, tensor)
            sums[name] = self._checked(tensor, f"{path}: tensor {name}", published.get(name, 0))
            return tensor

        def parts() -> Iterator[Tensors]:
            with ThreadPoolExecutor(WORKERS) as workers, _as_not_held():
                for names in layerwise_groups(list(layout)):
                    yield dict(zip(names, workers.map(made, names), strict=True))

        count = sum(shape.numel() for shape, _ in layout.values())
        return PolicyTensors(parts(), sums, count, lambda: chain.nbytes)

    def _merged(self, path: str) -> PolicyTensors:
        """The weights of the base with the folder's adapter."""
        sources = self._merging.sources(Path(path), self._expected.layout)
        sums: dict[str, int] = {}

        def checked() -> Iterator[Tensors]:
            for weights in in_groups(sources, layerwise_groups(list(sources))):
                for name, tensor in weights.items():
                    sums[name] = self._checked(tensor, f"the merged tensor {name}")
                yield weights

        count = sum(math.prod(source.spec.shape) for source in sources.values())
        return PolicyTensors(checked(), sums, count, lambda: safetensors_bytes(Path(path)))

    def _checked(self, tensor: torch.Tensor, what: str, published: int | None = None) -> int:
        """The checksum of a tensor.

        Args:
            what: the tensor is, in errors.
            published: the checksum that it has to have, 0 without values; None: any.

        Raises:
            NotHeld: it has another one.
            NotFinite: it holds NaN or infinity.
        """
        look = look_at(tensor, self._config.dtype)
        if published not in (None, look.checksum):
            raise NotHeld(f"{what} is not the one that the trainer published")
        if not look.is_finite:
            raise NotFinite(f"{what} holds NaN or infinity")
        return look.checksum

    @functools.cached_property
    def _merging(self) -> Merging:
        return Merging(self._config.model)

    @functools.cached_property
    def _receiver(self) -> WeightReceiver:
        return WeightReceiver()

    def in_hub_layout(self, weights: Tensors) -> Tensors:
        """The tensors of whole layers as vLLM takes them; they share memory."""
        return {name: tensor for _, tensors in self.by_origin(weights) for name, tensor in tensors.items()}

    def by_origin(self, weights: Tensors) -> Iterator[tuple[str, Tensors]]:
        """The name of each tensor of whole layers, and what it is in the hub's layout."""
        is_hub = weights.keys() <= self._expected.hub.shapes.keys()
        for name, tensor in weights.items():
            yield name, {name: tensor} if is_hub else self._expected.to_hub({name: tensor})

    @functools.cached_property
    def _expected(self) -> ExpectedTensors:
        config = self._config.hf_config
        if self._config.word_embeddings_untied_by_checkpoint:  # until it had compared them
            config = copy.deepcopy(config)
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
        return ExpectedTensors(config)


@contextlib.contextmanager
def _as_not_held() -> Iterator[None]:
    """For what applies deltas: one that is none makes other tensors than were published."""
    try:
        yield
    except Damaged as error:
        raise NotHeld(str(error)) from None
