"""Which weights are converted when another data type is asked for."""

from dataclasses import replace
from typing import TYPE_CHECKING

from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.formats.base import Content

if TYPE_CHECKING:
    import torch


def written_bytes(spec: TensorSpec, dtype: str | None) -> int:
    """Bytes of a weight in a file in which floating-point weights are of `dtype`; None converts nothing.

    For progress bars: the few buffers that keep their type count as if they did not.
    """
    floats = spec.dtype.startswith(("F", "BF"))
    return replace(spec, dtype=dtype).nbytes if dtype and floats else spec.nbytes


def written_dtypes(content: Content, dtype: str | None) -> "dict[str, torch.dtype]":
    """The data types of the weights that are converted, by name: buffers and whole numbers stay as they are.

    Args:
        content: that of a step, whose weights have the hub's names.
        dtype: safetensors' name of the data type that is asked for; None converts nothing.
    """
    if dtype is None or content.model is None:
        return {}
    from transformers import AutoConfig

    from cairn.checkpoint.tensors.dtypes import DTYPES
    from cairn.checkpoint.tensors.sharded_files import dtype_of
    from cairn.model.hub_layout import hub_layout

    weights = content.tensors[MODEL]
    layout = hub_layout(AutoConfig.from_pretrained(content.model))  # pyright: ignore # typed in part
    return {
        name: DTYPES[dtype]
        for name, place in layout.find(weights.keys()).items()
        if name in weights and dtype_of(weights[name]).is_floating_point and place.name not in layout.buffers
    }
