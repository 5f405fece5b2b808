"""The tensors of GGUF files and those of the hub, made of each other."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.common.tensor_views import Joined, RotaryRows, TensorSection
from cairn.formats.gguf.gguf_file import GgufFile
from cairn.formats.gguf.gguf_model import GGUF_NAMES, MODEL_TYPES, ROPE_FACTORS
from cairn.model.architectures import ARCHITECTURES, NORMS, ModelTensor, architecture_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Shifted:
    """A tensor plus a number, as float32; a `TensorSource`."""

    source: TensorSource
    by: float

    @property
    def spec(self) -> TensorSpec:
        """The source's, of float32."""
        return TensorSpec(self.source.spec.name, "F32", self.source.spec.shape)

    def fill(self, first: int, into: "torch.Tensor") -> None:
        import torch

        from cairn.checkpoint.tensors.sharded_files import dtype_of

        values = torch.empty(len(into), dtype=dtype_of(self.source))
        self.source.fill(first, values)
        torch.add(values.float(), self.by, out=into)


def hub_tensors(file: GgufFile, config: "PreTrainedConfig") -> dict[str, TensorSource]:
    """The weights of a file by the hub's names; queries, keys and norms as the hub has them.

    Raises:
        Damaged: the experts of a layer are not as many as the metadata says.
        CheckpointError: tensors have no counterpart.
    """
    architecture = architecture_of(config, MODEL_TYPES.values())
    found = {name: source for name, source in file.tensors.items() if name != ROPE_FACTORS}
    tensors: dict[str, TensorSource] = {}
    strange: list[str] = []
    for name, part in GGUF_NAMES.parts(found, file.path).items():
        source = found[name]
        if part.role.startswith("expert."):
            shape = source.spec.shape[1:]
            if len(source.spec.shape) != 3 or source.spec.shape[0] != config.num_experts:  # pyright: ignore
                raise Damaged(f"{file.path}: {name} {list(source.spec.shape)} holds other experts")
            parts = {
                ModelTensor(part.role, part.kind, part.layer, n): TensorSection(
                    source, n * math.prod(shape), TensorSpec(name, source.spec.dtype, shape)
                )
                for n in range(source.spec.shape[0])
            }
        else:
            parts = {part: converted(part, source, config, to_hub=True)}
        for each, tensor in parts.items():
            hub_name = architecture.name(each)
            if hub_name is None:
                strange.append(name)
            else:
                tensors[hub_name] = tensor
    if strange:
        raise CheckpointError(f"{file.path}: {config.model_type} has no such tensors: {listed(set(strange))}")
    return tensors


def converted(
    part: ModelTensor, source: TensorSource, config: "PreTrainedConfig", *, to_hub: bool
) -> TensorSource:
    """A tensor's values as GGUF has them, or with `to_hub` as the hub has them.

    Raises:
        CheckpointError: the rows of queries or keys are not as many as heads.
    """
    rotary = {"attention.query": config.num_attention_heads, "attention.key": config.num_key_value_heads}
    if config.model_type == "llama" and part.role in rotary:
        heads: int = rotary[part.role]
        if not source.spec.shape or source.spec.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{source.spec.name} {list(source.spec.shape)} can't be that of {heads} heads"
            )
        return RotaryRows(source, heads, to_hub)
    if ARCHITECTURES[config.model_type].zero_centered_norms and part.role in NORMS:
        return Shifted(source, -1.0 if to_hub else 1.0)
    return source


def gguf_tensors(
    weights: Mapping[str, TensorSource], config: "PreTrainedConfig", where: Path
) -> dict[str, TensorSource]:
    """The inverse of `hub_tensors`.

    Raises:
        CheckpointError: weights have no counterpart, or an expert is missing.
    """
    architecture = architecture_of(config, MODEL_TYPES.values())
    tensors: dict[str, TensorSource] = {}
    experts: dict[str, dict[int, TensorSource]] = {}
    for name, part in architecture.parts(weights, where).items():
        gguf_name = GGUF_NAMES.name(part)
        assert gguf_name is not None, part  # it has a name for every role
        if part.expert is not None:
            experts.setdefault(gguf_name, {})[part.expert] = weights[name]
            tensors[gguf_name] = weights[name]  # keeps its place in the order
        else:
            tensors[gguf_name] = converted(part, weights[name], config, to_hub=False)
    for name, by_number in experts.items():
        if sorted(by_number) != list(range(config.num_experts)):  # pyright: ignore # Qwen3MoeConfig has it
            raise CheckpointError(f"{where}: experts are missing of {name}")
        inner = by_number[0].spec.shape
        ordered = [by_number[number] for number in sorted(by_number)]
        tensors[name] = Joined.of(name, ordered, (len(ordered), *inner))
    return tensors
