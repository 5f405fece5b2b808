"""Writes weights as megatron-core's `torch_dist` does, one tensor of one layer in memory at a time."""

# torch's planner and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import io
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from transformers import AutoConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content, WriteOptions
from cairn.formats.common.match_layout import Outgoing
from cairn.formats.common.tensor_views import Joined, ValueRange
from cairn.formats.dcp.dcp_writer import ReadingPlanner
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.formats.megatron.megatron_names import (
    ABOUT,
    FORMAT,
    IN_LAYERS,
    LATEST,
    MODEL_TYPES,
    OUTSIDE,
    OWN_NORM,
    RELEASE,
    key_of,
    row_values,
    rows_of,
)
from cairn.formats.megatron.megatron_reading import FILE
from cairn.model.architectures import ModelTensor, Role, Sizes, architecture_of, sizes_of
from cairn.run.files import write_atomic

EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "input_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.experts.experts.linear_fc1",
    "mlp.experts.experts.linear_fc2",
)
"""Modules in layers for which a model may look for a state beside its weights, which is empty without FP8."""


def write(content: Content, folder: Path, options: WriteOptions) -> None:
    """Write the weights into `release/` below `folder`, with the files that make Megatron-LM find them.

    Raises:
        CheckpointError: the architecture or a tensor has no counterpart, or layers differ.
        OSError: a file can't be written.
    """
    copy_companions(content, folder, options.dtype)
    config = AutoConfig.from_pretrained(folder)
    architecture, sizes = architecture_of(config, MODEL_TYPES), sizes_of(config)
    weights = content.tensors[MODEL]
    parts = {part: weights[name] for name, part in architecture.parts(weights, content.model).items()}
    pieces = list(_pieces(parts, sizes))
    if unused := parts.keys() - {part for piece in pieces for part in piece.parts}:
        names = listed(parts[part].spec.name for part in unused)
        raise CheckpointError(f"these tensors have no counterpart in Megatron's model: {names}")
    place = folder / RELEASE
    place.mkdir()
    writer = FileSystemWriter(place, single_file_per_rank=True, thread_count=1)
    planner = _Planner(pieces, sizes, options.on_bytes)
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks is meant
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    common = io.BytesIO()
    layout = {"singleton_local_shards": False, "non_homogeneous_layers": False}
    number = {} if content.step is None else {"iteration": content.step}
    torch.save({**number, "checkpoint_version": 3.0, "content_metadata": layout}, common)
    write_atomic(place / FILE, common.getvalue())
    about = {"sharded_backend": FORMAT, "sharded_backend_version": 1}
    write_atomic(
        place / ABOUT, json.dumps({**about, "common_backend": "torch", "common_backend_version": 1}).encode()
    )
    write_atomic(folder / LATEST, RELEASE.encode())


@dataclass(frozen=True)
class _Piece:
    """A tensor of one layer, or of one expert in it, or outside of layers.

    key, index: Megatron's tensor, and the piece's position in the first dimensions of it. stack: the lengths
    of these dimensions. parts: of the model, whose values it holds.
    """

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]
    tensor: Outgoing
    parts: tuple[ModelTensor, ...]


def _pieces(parts: Mapping[ModelTensor, TensorSource], sizes: Sizes) -> Iterator[_Piece]:
    """All pieces of a model, in the order in which they are written."""
    kinds = {(part.role, part.kind) for part in parts}
    for module, roles in {**OUTSIDE, **IN_LAYERS}.items():
        stack = (sizes.layers,) if module in IN_LAYERS else ()
        stack += (sizes.experts,) if roles[0].startswith("expert.") else ()
        names = (module, *OWN_NORM.get(module, ())) if sizes.experts else (module,)
        for kind in ("weight", "bias"):
            if (roles[0], kind) not in kinds:
                continue
            for index in itertools.product(*map(range, stack)):
                mine = tuple(ModelTensor(role, kind, *index) for role in roles)
                if lacking := [f"{part.role}.{kind}" for part in mine if part not in parts]:
                    where = f" of layer {index[0]}" if index else ""
                    raise CheckpointError(
                        f"{listed(lacking)}{where} is missing; Megatron has one tensor for all layers"
                    )
                if len({parts[part].spec.dtype for part in mine}) > 1:
                    of = listed(parts[part].spec.name for part in mine)
                    raise CheckpointError(f"{of} have several data types, and are one tensor for Megatron")
                tensor = Outgoing(_joined([parts[part] for part in mine], roles, sizes))
                yield from (_Piece(key_of(name, kind), index, stack, tensor, mine) for name in names)


def _joined(sources: list[TensorSource], roles: tuple[Role, ...], sizes: Sizes) -> Joined:
    """Megatron's tensor of the tensors of several roles."""
    by_role = dict(zip(roles, sources, strict=True))
    done = dict.fromkeys(roles, 0)
    shape = (sum(source.spec.shape[0] for source in sources), *sources[0].spec.shape[1:])
    inner = row_values(shape)
    runs: list[ValueRange] = []
    try:
        for rows in rows_of(roles, shape[0], sizes):
            runs.append(ValueRange(by_role[rows.role], done[rows.role] * inner, rows.count * inner))
            done[rows.role] += rows.count
    except ValueError as error:
        raise CheckpointError(f"{sources[0].spec.name} and its like {error}") from None
    return Joined(tuple(runs), TensorSpec(sources[0].spec.name, sources[0].spec.dtype, shape))


class _Planner(ReadingPlanner):
    """Plans to write the pieces of stacked tensors, and reads each when its turn comes."""

    def __init__(self, pieces: list[_Piece], sizes: Sizes, on_bytes: Callable[[int], None]):
        super().__init__(flatten_state_dict=False)
        self._pieces = {MetadataIndex(piece.key, _offset(piece)): piece for piece in pieces}
        self._states = list(_extra_states(sizes))
        self._on_bytes = on_bytes

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._states]
        for index, piece in self._pieces.items():
            shape = piece.tensor.source.spec.shape
            chunk = ChunkStorageMetadata(_offset(piece), torch.Size((1,) * len(piece.stack) + shape))
            whole = torch.Size(piece.stack + shape)
            about = TensorWriteData(chunk, TensorProperties(dtype=piece.tensor.dtype), whole)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        piece = self._pieces.get(write_item.index)
        if piece is None:
            state = io.BytesIO()
            torch.save([None], state)
            return state
        values = self.read(piece.tensor)
        self._on_bytes(values.nbytes)
        return values.view((1,) * len(piece.stack) + values.shape)


def _offset(piece: _Piece) -> torch.Size:
    """Where a piece begins in its tensor."""
    return torch.Size(piece.index + (0,) * len(piece.tensor.source.spec.shape))


def _extra_states(sizes: Sizes) -> Iterator[str]:
    """The keys of states beside weights."""
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for module in EXTRA_STATE:
        stack = (sizes.layers, sizes.experts) if ".experts." in module else (sizes.layers,)
        for index in itertools.product(*map(range, stack)):
            place, lengths = (".".join(map(str, numbers)) for numbers in (index, stack))
            yield f"decoder.layers.{module}._extra_state/shard_{place}_{lengths}"
