"""Tensors on their way into a file of another format, by the names that the model has in memory."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, PreTrainedConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import pieces_of
from cairn.formats.base import Content, written_dtypes
from cairn.formats.common.match_layout import in_memory
from cairn.model.hub_layout import hub_layout


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A tensor that is read when it is written. dtype: as which it is written."""

    source: TensorSource
    dtype: torch.dtype

    @classmethod
    def of(cls, source: TensorSource) -> "Outgoing":
        """A tensor that is written as it is."""
        return cls(source, dtype_of(source))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.source.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its values as they are written."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def blank(self) -> torch.Tensor:
        """A tensor of this shape and data type without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            Damaged: the source is invalid.
        """
        whole = torch.empty(self.shape, dtype=self.dtype)
        flat, first = whole.view(-1), 0
        for piece in pieces_of(self.source):
            flat[first : first + len(piece)] = piece
            first += len(piece)
        return whole


def state_dict_of(content: Content, dtype: str | None) -> dict[str, Outgoing]:
    """A step's weights as `model.state_dict()` has them; those that are tied are the same object.

    The arguments and errors are those of `weights_of`.
    """
    weights, tied = weights_of(content, dtype)
    return weights | {name: weights[of] for name, of in tied.items()}


def weights_of(content: Content, dtype: str | None) -> tuple[dict[str, Outgoing], dict[str, str]]:
    """A step's weights by transformers' names, and the names that are tied to others, with these.

    Args:
        dtype: safetensors' name of the data type that is asked for; None converts nothing.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    if content.model is None:
        raise CheckpointError("there is no config.json, which tells the names of the tensors in memory")
    config: PreTrainedConfig = AutoConfig.from_pretrained(content.model)
    layout = hub_layout(config)
    weights = in_memory(content.tensors[MODEL], layout, content.model)
    dtypes = written_dtypes(replace(content, tensors={MODEL: weights}), dtype)
    found = {name: Outgoing(source, dtypes.get(name, dtype_of(source))) for name, source in weights.items()}
    return found, layout.tied_in_memory
