"""Tensors on their way into a file of another format, by the names that the model has in memory."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass

import torch
from transformers import AutoConfig, PreTrainedConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.sharded_files import dtype_of, read_tensor
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content
from cairn.formats.common.match_layout import in_memory
from cairn.model.hub_layout import hub_layout


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A tensor that is read when it is written; the same object in several places is written once."""

    source: TensorSource

    @property
    def dtype(self) -> torch.dtype:
        """The data type, in which it is written."""
        return dtype_of(self.source)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.source.spec.shape

    @property
    def blank(self) -> torch.Tensor:
        """A tensor of this shape and data type without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            Damaged: the source is invalid.
        """
        return read_tensor(self.source)


def state_dict_of(content: Content) -> dict[str, Outgoing]:
    """A step's weights as `model.state_dict()` has them; those that are tied are the same object.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    weights, tied = weights_of(content)
    return weights | {name: weights[of] for name, of in tied.items()}


def weights_of(content: Content) -> tuple[dict[str, Outgoing], dict[str, str]]:
    """A step's weights by transformers' names, and the names that are tied to others, with these.

    Raises:
        CheckpointError: there is no config.json, or the weights do not fit it.
    """
    if content.model is None:
        raise CheckpointError("there is no config.json, which tells the names of the tensors in memory")
    config: PreTrainedConfig = AutoConfig.from_pretrained(content.model)
    layout = hub_layout(config)
    weights = in_memory(content.tensors[MODEL], layout, content.model)
    return {name: Outgoing(source) for name, source in weights.items()}, layout.tied_in_memory
