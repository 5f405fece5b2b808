"""Read and check the tensors of a model directory: which it has to hold, and whether it does."""

import collections
import contextlib
import functools
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import tensor_files
from cairn.checkpoint.tensors.placement import Place
from cairn.model.hub_layout import hub_layout
from cairn.policy.checksums import WORD, contribution, read_checksums, words, wrapped
from cairn.policy.errors import Altered, Unchanged
from cairn.run.files import DamagedFile

FLOATS = ("F64", "F32", "F16", "BF16")
WORKERS = min(4, os.cpu_count() or 1)
"""Threads that check and load weights; nothing is generated meanwhile."""
PIECE = 1 << 17
"""Values that stay in the processor's cache from one look to the next."""


# The tensors that a model's folder or trainer has to hold, in the hub's layout and in transformers' own.
# Transformers holds some tensors differently from the hub's files, such as all experts of a layer as one.
# vLLM is always given the hub's layout.


@dataclass(frozen=True)
class ExpectedLayout:
    """The shape of every tensor, and the tensor that each tied one is tied to."""

    shapes: dict[str, list[int]]
    tied: dict[str, str]


class ExpectedTensors:
    """What has to be there for the model of `config`; nothing of it is in memory.

    Raises:
        LayoutUnknown: transformers does not tell how the hub's tensors are made of its own.
    """

    def __init__(self, config: PreTrainedConfig):
        self.layout = hub_layout(config)
        """Where the tensors of files are in transformers' model."""
        self._parts: dict[str, list[tuple[str, Place]]] = collections.defaultdict(list)
        for name, place in self.layout.places.items():
            self._parts[place.name].append((name, place))

    @functools.cached_property
    def own(self) -> ExpectedLayout:
        """As transformers' model holds them, and a trainer that sends them from its memory."""
        return _with_tied(self.layout.shapes, self.layout.tied_in_memory)

    @functools.cached_property
    def hub(self) -> ExpectedLayout:
        """As in the files of the hub."""
        shapes = {name: place.shape for name, place in self.layout.places.items()}
        return _with_tied(shapes, self.layout.tied)

    def layout_of(self, names: Iterable[str]) -> ExpectedLayout:
        """The layout that tensors of these `names` are in, or are most like."""
        found = set(names)
        return min(self.hub, self.own, key=lambda layout: len(layout.shapes.keys() ^ found))

    def to_hub(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same values as tensors of the hub's layout, from those of transformers'; they share memory."""
        return {
            name: tensor.reshape(-1)[place.first :][: torch.Size(place.shape).numel()].view(place.shape)
            for own, tensor in weights.items()
            for name, place in self._parts[own]
        }


def _with_tied(shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]) -> ExpectedLayout:
    """A layout that also has the tied tensors, of which some folders hold copies."""
    all_shapes = {**shapes, **{name: shapes[of] for name, of in tied.items()}}
    return ExpectedLayout({name: list(shape) for name, shape in all_shapes.items()}, dict(tied))


# Reading and checking the files.


class UnusableWeights(Unchanged):
    """The weights are unusable."""

    mark = "weights refused: "


@dataclass(frozen=True)
class Arrived:
    """Tensors as they came, by name, and their checksums."""

    weights: dict[str, torch.Tensor]
    sums: dict[str, int]


def read_weights(
    path: str, layout_of: Callable[[Iterable[str]], ExpectedLayout], dtype: torch.dtype
) -> Arrived:
    """Read and check all tensors of a model directory.

    Args:
        path: The directory, with model.safetensors or shards and their index.
        layout_of: The layout that tensors of some names should have. Its tied tensors (mostly
            `lm_head.weight`) may be absent; otherwise they must equal those that they are tied to.
        dtype: Type that the server computes with.

    Returns:
        The tensors on the CPU, mapped from the file; tied ones are left out.

    Raises:
        Altered: they are not those whose checksums the trainer has left beside them.
        Refused: something is missing, unexpected, damaged without such checksums, of another shape, not
            floating-point, or not finite in `dtype`.
    """
    try:
        published = read_checksums(Path(path))
    except DamagedFile as error:
        raise Altered(f"{path}: its checksums can't be read: {error}") from None
    damaged = UnusableWeights if published is None else Altered
    with contextlib.ExitStack() as stack:
        where: dict[str, tuple[Path, Any]] = {}
        for file in _files(path):
            with _refusing(file, damaged):
                opened = stack.enter_context(safe_open(file, "pt"))
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name in where:
                        raise UnusableWeights(f"{file}: tensor {name} is in another file as well")
                    where[name] = file, opened
        layout = layout_of(where)
        weights = {}
        for name, (file, opened) in where.items():
            if name not in layout.shapes:
                raise UnusableWeights(f"{file}: unexpected tensor {name}")
            with _refusing(file, damaged):
                header = opened.get_slice(name)
                shape, kind = header.get_shape(), header.get_dtype()
                if shape != layout.shapes[name]:
                    raise UnusableWeights(
                        f"{file}: tensor {name} has shape {shape}, not {layout.shapes[name]}"
                    )
                if kind not in FLOATS:
                    raise UnusableWeights(f"{file}: tensor {name} has type {kind}, not a floating-point one")
                weights[name] = opened.get_tensor(name)
    tied = layout.tied
    if missing := sorted(layout.shapes.keys() - weights.keys() - tied.keys()):
        raise UnusableWeights(f"{path}: tensor {missing[0]} is missing" + _and_more(missing))
    for name in tied.keys() & weights.keys():
        if not torch.equal(weights.pop(name), weights[tied[name]]):
            raise UnusableWeights(
                f"{path}: tensor {name} differs from {tied[name]}, which the model ties it to"
            )
    with ThreadPoolExecutor(WORKERS) as workers:
        found = workers.map(lambda tensor: look_at(tensor, dtype), weights.values())
        looks = dict(zip(weights, found, strict=True))
    sums = {name: look.checksum for name, look in looks.items()}
    for name, checksum in (published or {}).items():
        if sums.get(name) != checksum:
            raise Altered(f"{path}: tensor {name} is not the one that the trainer wrote (other checksum)")
    for name, look in looks.items():
        if not look.is_finite:
            raise UnusableWeights(f"{path}: tensor {name} holds NaN or infinity (as {dtype})")
    return Arrived(weights, sums)


@contextlib.contextmanager
def _refusing(file: Path, damaged: type[Unchanged]) -> Iterator[None]:
    """Raise `damaged` for a file that is."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise damaged(f"{file}: not a whole safetensors file: {error}") from None


@dataclass(frozen=True)
class Look:
    """What one pass through a tensor tells: its checksum, and whether its values are finite in some type."""

    checksum: int
    is_finite: bool


def look_at(tensor: torch.Tensor, dtype: torch.dtype) -> Look:
    """Go through a tensor once, in pieces that stay in the processor's cache from one question to the other.

    A sum is finite only if all values are, and takes a quarter of the time of the extremes; these are looked
    for where values are to be rounded to another type, or a sum may just be too large. Values that are not
    finite would take ten times as long to find as extremes, among which they are; NaN is both.
    """
    if not tensor.numel():
        return Look(0, True)
    values = tensor.reshape(-1)
    body, rest = words(values)
    count = PIECE if values.device.type == "cpu" else values.numel()
    totals: list[torch.Tensor] = []
    sums = [contribution(rest)]
    for piece, its_words in itertools.zip_longest(
        values.split(count), body.split(count * values.element_size() // WORD)
    ):
        totals += piece.aminmax() if tensor.dtype != dtype else [piece.sum()]
        if its_words is not None:
            sums.append(its_words.sum())
    is_finite = _all_finite(totals, dtype)
    if not is_finite and tensor.dtype == dtype:
        extremes = [bound for piece in values.split(count) for bound in piece.aminmax()]
        is_finite = _all_finite(extremes, dtype)
    return Look(wrapped(torch.stack(sums).tolist()), is_finite)


def _all_finite(values: list[torch.Tensor], dtype: torch.dtype) -> bool:
    return bool(torch.stack(values).to(dtype).isfinite().all().item())


def identities(path: str) -> list[tuple[str, int, int]]:
    """What tells whether a directory's tensor files are still the same: name, inode, last change."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(path).glob("*.safetensors"))]
    except OSError:
        return []
    return [(name, status.st_ino, status.st_mtime_ns) for name, status in found]


def check_folder(path: str) -> None:
    """Raise Refused unless `path` can be a folder, and is one."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableWeights(f"{path[:300]!r} is not a directory: {reason}") from None
    if not is_folder:
        raise UnusableWeights(f"{path!r} is not a directory")


def _files(path: str) -> list[Path]:
    try:
        return tensor_files(Path(path), "model")
    except Damaged as error:
        raise UnusableWeights(str(error)) from None
    except OSError as error:
        raise UnusableWeights(f"{path}: {error.strerror}") from None


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
