"""torchtitan's optimiser state of queries, keys and values that are one weight (`fuse_qkv`).

Its files hold the weights apart, and the optimiser's state of the one weight. For each head of keys, that has
the rows of the heads of queries which share it, of the key and of the value. AdamW's moments belong to single
values of the weight, so they are cut as it is.
"""

import math
import re
from collections.abc import Mapping

from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.common.tensor_views import Joined, ValueRange
from cairn.formats.dcp.dcp_metadata import DcpTensor

_FUSED = re.compile(r"(layers\.(?:0|[1-9][0-9]{0,5})\.attention\.)qkv_linear\.wqkv\.weight")
_PARTS = ("wq", "wk", "wv")


def fused_parts(name: str) -> tuple[str, ...]:
    """torchtitan's names of the weights of which `name` is one; none if it is no such weight."""
    found = _FUSED.fullmatch(name)
    return tuple(f"{found[1]}qkv_linear.{part}.weight" for part in _PARTS) if found else ()


def head_norm(name: str) -> str:
    """The weight beside a fused one that is as long as a head, in models that have it."""
    found = _FUSED.fullmatch(name)
    return f"{found[1]}q_norm.weight" if found else ""


def cut(
    source: TensorSource, names: tuple[str, ...], weights: Mapping[str, DcpTensor], head: int
) -> dict[str, TensorSource] | None:
    """A moment of the weights `names`, from that of the one weight; None if the shapes are others.

    Args:
        weights: those in the checkpoint, by torchtitan's names.
        head: number of rows of a head.
    """
    if not all(name in weights and len(weights[name].shape) == 2 for name in names):
        return None
    (queries, width), (keys, _), (values, _) = (weights[name].shape for name in names)
    whole = (queries + keys + values, width)
    if source.spec.shape != whole or keys != values or keys % head or queries % keys:
        return None
    per_key = queries // keys
    rows = per_key + 2
    places = ((0, per_key), (per_key, 1), (per_key + 1, 1))
    each = head * width
    parts: dict[str, TensorSource] = {}
    for name, (first, count) in zip(names, places, strict=True):
        runs = tuple(
            ValueRange(source, (group * rows + first) * each, count * each) for group in range(keys // head)
        )
        spec = TensorSpec(name, source.spec.dtype, weights[name].shape)
        assert sum(run.count for run in runs) == math.prod(spec.shape)
        parts[name] = Joined(runs, spec)
    return parts
