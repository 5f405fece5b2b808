"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) in folders of models.

Such a folder has the files that PEFT writes, `adapter_config.json` and `adapter_model.safetensors`, and in a
step of Cairn the record of the base model: its folder, and the checksums of its files.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum, chunk_crc
from cairn.checkpoint.manifest import CheckpointError, Damaged, FileEntry, check_content
from cairn.checkpoint.step_folder import ADAPTER_CONFIG, BASE_RECORD, StepFolder
from cairn.checkpoint.tensors.layout import TensorSpec, find_tensors
from cairn.checkpoint.tensors.remote_ranges import away_files
from cairn.checkpoint.tensors.source import TensorSource, listed, whole_storage
from cairn.model.described import unwrapped
from cairn.model.peft_settings import adapter_settings, scaling, start_of_base
from cairn.run.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from cairn.model.hub_layout import Layout

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's modules."""
BLOCK_ROWS = 256
"""Rows of a merged weight that are computed at a time."""


@dataclass(frozen=True)
class Base:
    """The base model of an adapter: its name, its folder, and its files of weights with their checksums.

    lora: the settings of the run that decide the adapter's shape and scale.
    """

    name: str
    folder: str
    files: dict[str, FileEntry]
    lora: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, name: str, folder: Path, seen: Mapping[str, FileChecksum]) -> "Base":
        """The base in `folder`; `seen` are the checksums of what was read of its files, by name.

        Files of which not everything was read are read once more.
        """
        files: dict[str, FileEntry] = {}
        for file, checksum in sorted(seen.items()):
            whole = checksum.nbytes == checksum.size
            chunks = range(-(-checksum.size // CHUNK_BYTES))
            crcs = checksum.chunks() if whole else [chunk_crc(folder / file, chunk) for chunk in chunks]
            files[file] = FileEntry.of(checksum.size, crcs)
        return cls(name, str(folder.absolute()), files)

    def to_json(self) -> bytes:
        """The bytes of the file BASE_RECORD."""
        files = {name: entry.model_dump() for name, entry in self.files.items()}
        return (json.dumps({**asdict(self), "files": files}, indent=2) + "\n").encode()

    def check_same(self, found: "Base", whose: Path) -> None:
        """Check that `found` has the same weights.

        Args:
            whose: the adapter's folder, for the message.

        Raises:
            CheckpointError: it does not.
        """
        names = sorted(self.files.keys() | found.files.keys())
        other = [name for name in names if self.files.get(name) != found.files.get(name)]
        if other:
            raise CheckpointError(self._not_the_base(Path(found.folder), whose, other))

    def check_files(self, folder: Path, whose: Path) -> None:
        """Read the files of the base in `folder`, and compare them with their checksums.

        Raises:
            CheckpointError: they are another model's.
        """
        try:
            check_content(folder, self.files)
        except Damaged as error:
            raise CheckpointError(f"{self._not_the_base(folder, whose, list(self.files))}: {error}") from None

    def find(self, whose: Path, elsewhere: str | None = None) -> Path:
        """The base's folder: `elsewhere` if that is given, else that in the adapter's step if there is one.

        Names and sizes of its files are checked.

        Args:
            whose: the adapter's folder, for the message.

        Raises:
            CheckpointError: it is not there, or holds other files.
        """
        folder = Path(elsewhere or held_base(whose) or self.folder)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{whose} is an adapter of {self.name}, which is no longer in {folder}; put it back, or say "
                "where it is with --lora.base FOLDER (ckpt: --model FOLDER)"
            )
        away = away_files(folder)
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file()}
        sizes |= {name: file.size for name, file in away.items()}
        other = [name for name, entry in self.files.items() if sizes.get(name) != entry.size]
        if other:
            raise CheckpointError(self._not_the_base(folder, whose, other))
        return folder

    def _not_the_base(self, folder: Path, whose: Path, files: list[str]) -> str:
        return (
            f"{folder} is not the base of the adapter in {whose}: that is {self.name}, and was in "
            f"{self.folder} with other contents of {listed(files)}"
        )


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of a model instead of the model."""
    return (folder / ADAPTER_CONFIG).is_file()


def held_base(folder: Path) -> Path | None:
    """The base that lies in the same step as the adapter in `folder`; None if there is none."""
    step = StepFolder.holding(folder)
    return StepFolder(step).base if step and StepFolder(step).base.is_dir() else None


def base_of_adapter(folder: Path) -> Base | None:
    """The record of an adapter's base; None in a folder of another program.

    Raises:
        DamagedFile: the file is not such a record.
    """
    return read_json(folder / BASE_RECORD, Base)


def base_folder(folder: Path, elsewhere: Path | None = None) -> Path:
    """Where the base of the adapter in `folder` is; its content is compared with its record, if there is one.

    Args:
        elsewhere: where it is said to be; default: where the adapter says.

    Raises:
        CheckpointError: it is not there, or is another model.
    """
    base = base_of_adapter(folder)
    if base is not None:
        found = base.find(folder, str(elsewhere) if elsewhere else None)
        base.check_files(found, folder)
        return found
    if elsewhere is not None:
        return elsewhere
    name = (read_json(folder / ADAPTER_CONFIG, dict[str, Any]) or {}).get("base_model_name_or_path")
    if isinstance(name, str) and (Path(name) / "config.json").is_file():
        return Path(name)
    raise CheckpointError(
        f"{folder}: is an adapter of {name}, which is not a folder here; say where the base model is "
        "(ckpt: --model FOLDER; runs: --model.config FOLDER)"
    )


def adapter_parts(folder: Path) -> dict[str, TensorSource]:
    """The tensors of the adapter in `folder`, by the names of modules in memory.

    Raises:
        FileNotFoundError: a file is missing.
        Damaged: a file is invalid.
    """
    stored = find_tensors(folder, "adapter_model")
    bare = {unwrapped(name, leading=False): tensor for name, tensor in stored.items()}
    return {unwrapped(name.removeprefix(PREFIX), leading=False): tensor for name, tensor in bare.items()}


def with_adapter_merged(base: "PreTrainedModel", folder: Path) -> "PreTrainedModel":
    """The base model with the adapter in `folder` added to its weights, by PEFT; it has changed `base`."""
    from peft import PeftModel

    with_adapter: Any = PeftModel.from_pretrained(base, str(folder))  # pyright: ignore[reportUnknownMemberType]
    return with_adapter.merge_and_unload()


def merged_weights(
    folder: Path, base: Mapping[str, TensorSource], layout: "Layout"
) -> dict[str, TensorSource]:
    """The weights of the base with the adapter in `folder` added, in float32, by the names in `base`.

    Args:
        base: the base's weights by any names that transformers knows. Modules that the adapter holds
            whole may have other shapes there.
        layout: that of the merged model.

    Raises:
        CheckpointError: the adapter has a part that can't be merged, or does not fit the model.
        Damaged: a file is invalid.
        FileNotFoundError: a file is missing.
    """
    from cairn.model.hub_layout import is_copy  # imports torch

    about = adapter_settings(folder)
    start = start_of_base(about)
    parts = adapter_parts(folder)
    pairs: dict[str, Pair] = {}
    whole: dict[str, TensorSource] = {}
    for name, tensor in parts.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            other = parts.get(f"{module}.lora_B.weight")
            if other is None:
                raise Damaged(f"{folder}: has {name} and no lora_B")
            shapes = tensor.spec.shape, other.spec.shape
            if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1] or not shapes[0][0]:
                raise Damaged(f"{folder}: {module} has matrices of shapes {shapes[0]} and {shapes[1]}")
            pairs[f"{module}.weight"] = Pair(tensor, other, scaling(about, shapes[0][0], folder))
        elif not name.endswith(".lora_B.weight"):
            whole[name] = tensor
    for name in [name for name in whole if is_copy(name, whole, layout)]:
        del whole[name]
    places = {name: place for name, place in layout.find(base.keys()).items() if name in base}
    names = {place.name for place in places.values()}
    if strange := sorted((pairs.keys() | whole.keys()) - names):
        raise CheckpointError(
            f"{folder}: the adapter has parts for which the base has no weights: {listed(strange)}"
        )
    merged: dict[str, TensorSource] = {}
    for name, source in base.items():
        place = places.get(name)
        if place is None:
            continue
        kind = "F32" if source.spec.dtype in FLOATS else source.spec.dtype
        spec = TensorSpec(name, kind, source.spec.shape)
        if place.name in whole:
            if whole[place.name].spec.shape != layout.shapes[place.name]:
                raise CheckpointError(
                    f"{folder}: {place.name} has the shape {list(whole[place.name].spec.shape)}, and that of "
                    f"the base {list(layout.shapes[place.name])}; PEFT's merge_and_unload may merge it"
                )
            merged[name] = Merged(whole[place.name], TensorSpec(name, kind, place.shape), place.first)
        elif place.name in pairs:
            pair = pairs[place.name]
            if pair.shape != layout.shapes[place.name]:
                raise CheckpointError(
                    f"{folder}: the adapter of {place.name} has another shape than the base's"
                )
            if start is None:
                begun = source
            elif source.spec.shape == pair.shape:
                begun = Residual(source, start, pair.a.spec.shape[0], pair.scaling)
            else:
                raise CheckpointError(
                    f"{folder}: {place.name} began with {start}, which is computed of the whole weight, and "
                    "the base's files hold it in parts; merge the adapter in PEFT (merge_and_unload)"
                )
            merged[name] = Merged(begun, spec, 0, pair, place.first)
        else:
            merged[name] = Merged(source, spec)
    return merged


FLOATS = frozenset({"F16", "BF16", "F32"})


@dataclass(frozen=True)
class Pair:
    """What an adapter adds to a weight: scaling B A, with A [rank, inputs] and B [outputs, rank]."""

    a: TensorSource
    b: TensorSource
    scaling: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.b.spec.shape[0], self.a.spec.shape[1])

    def values(self, first: int, count: int) -> "torch.Tensor":
        """Consecutive values of it, in float32.

        Rows are computed in fixed blocks, so that each value is the same whatever part is asked for.
        """
        import torch

        rank, columns = self.a.spec.shape
        begin = first // columns // BLOCK_ROWS * BLOCK_ROWS
        end = -(-(first + count) // columns)
        blocks: list[torch.Tensor] = []
        for row in range(begin, end, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, self.b.spec.shape[0] - row)
            b = _float32(self.b, row * rank, rows * rank).view(rows, rank)
            blocks.append((b @ self._a * self.scaling).view(-1))
        return torch.cat(blocks)[first - begin * columns :][:count]

    @cached_property
    def _a(self) -> "torch.Tensor":
        return _float32(self.a, 0, math.prod(self.a.spec.shape)).view(self.a.spec.shape)


@dataclass(frozen=True)
class Merged:
    """A weight of the base as float32, with what an adapter adds to it, if any; a `TensorSource`.

    skipped: values of `source` before the first one of this tensor. added_from: the same of `added`.
    """

    source: TensorSource
    spec: TensorSpec
    skipped: int = 0
    added: Pair | None = None
    added_from: int = 0

    def fill(self, first: int, into: "torch.Tensor") -> None:
        if self.source.spec.dtype == self.spec.dtype:
            self.source.fill(self.skipped + first, into)
        else:
            into.copy_(_float32(self.source, self.skipped + first, len(into)))
        if self.added is not None:
            into.add_(self.added.values(self.added_from + first, len(into)))


@dataclass(frozen=True, eq=False)
class Residual:
    """A weight of the base less the first product of an adapter that began as PiSSA or OLoRA.

    A `TensorSource`. PEFT computes the product of the base's weight when it makes the adapter, and again
    whenever it loads it. The whole weight is in memory until all of it is read. Values are rounded to the
    base's data type, as in PEFT.
    """

    source: TensorSource
    start: str
    rank: int
    scaling: float

    @property
    def spec(self) -> TensorSpec:
        return self.source.spec

    def fill(self, first: int, into: "torch.Tensor") -> None:
        of = math.prod(self.spec.shape)
        with whole_storage(self, self._computed, taken=len(into), of=of) as values:
            into.copy_(values[first : first + len(into)])

    def _computed(self) -> "torch.Tensor":
        import torch

        from cairn.checkpoint.tensors.sharded_files import dtype_of

        linalg: Any = torch.linalg  # is typed in part, as is all that comes of it
        weight: Any = _float32(self.source, 0, math.prod(self.spec.shape)).view(self.spec.shape)
        if self.start == "pissa":
            left, values, right = linalg.svd(weight, full_matrices=False)
            root = (values[: self.rank] / self.scaling).sqrt().diag()
            a, b = root @ right[: self.rank], left[:, : self.rank] @ root
        else:
            q, r = linalg.qr(weight)
            a, b = r[: self.rank], q[:, : self.rank]
        return (weight - self.scaling * b @ a).to(dtype_of(self.source)).view(-1)


def _float32(source: TensorSource, first: int, count: int) -> "torch.Tensor":
    import torch

    from cairn.checkpoint.tensors.sharded_files import dtype_of

    values = torch.empty(count, dtype=dtype_of(source))
    source.fill(first, values)
    return values.float()
