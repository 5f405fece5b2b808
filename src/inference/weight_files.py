"""Read and check the tensors of a model directory."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cairn.inference.expected import Layout
from cairn.inference.transfer import Unchanged

FLOATS = ("F64", "F32", "F16", "BF16")
WORKERS = min(4, os.cpu_count() or 1)
"""Threads that check and load weights; nothing is generated meanwhile."""


class Refused(Unchanged):
    """The weights are unusable."""

    mark = "weights refused: "


def read_weights(
    path: str, layout_of: Callable[[Iterable[str]], Layout], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Read and check all tensors of a model directory.

    Args:
        path: The directory, with model.safetensors or shards and their index.
        layout_of: The layout that tensors of some names should have. Its tied tensors (mostly
            `lm_head.weight`) may be absent; otherwise they must equal those that they are tied to.
        dtype: Type that the server computes with.

    Returns:
        Tensor by name, on the CPU, mapped from the file; tied ones are left out.

    Raises:
        Refused: something is missing, unexpected, damaged, of another shape, not floating-point, or not
            finite in `dtype`.
    """
    with contextlib.ExitStack() as stack:
        where: dict[str, tuple[Path, Any]] = {}
        for file in _files(path):
            with _refusing(file):
                opened = stack.enter_context(safe_open(file, "pt"))
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name in where:
                        raise Refused(f"{file}: tensor {name} is in another file as well")
                    where[name] = file, opened
        layout = layout_of(where)
        weights = {}
        for name, (file, opened) in where.items():
            if name not in layout.shapes:
                raise Refused(f"{file}: unexpected tensor {name}")
            with _refusing(file):
                header = opened.get_slice(name)
                shape, kind = header.get_shape(), header.get_dtype()
                if shape != layout.shapes[name]:
                    raise Refused(f"{file}: tensor {name} has shape {shape}, not {layout.shapes[name]}")
                if kind not in FLOATS:
                    raise Refused(f"{file}: tensor {name} has type {kind}, not a floating-point one")
                weights[name] = opened.get_tensor(name)
    tied = layout.tied
    if missing := sorted(layout.shapes.keys() - weights.keys() - tied.keys()):
        raise Refused(f"{path}: tensor {missing[0]} is missing" + _and_more(missing))
    for name in tied.keys() & weights.keys():
        if not torch.equal(weights.pop(name), weights[tied[name]]):
            raise Refused(f"{path}: tensor {name} differs from {tied[name]}, which the model ties it to")
    with ThreadPoolExecutor(WORKERS) as workers:
        finite = workers.map(lambda tensor: is_finite(tensor, dtype), weights.values())
        for name, good in zip(weights, finite, strict=True):
            if not good:
                raise Refused(f"{path}: tensor {name} holds NaN or infinity (as {dtype})")
    return weights


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise Refused(f"{file}: not a whole safetensors file: {error}") from None


def is_finite(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are, in `dtype`. Their extremes are 30 times as fast as all of them; NaN is both."""
    return tensor.numel() == 0 or all(bound.to(dtype).isfinite().item() for bound in tensor.aminmax())


def identities(path: str) -> list[tuple[str, int, int]]:
    """What tells whether a directory's tensor files are still the same: name, inode, last change."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(path).glob("*.safetensors"))]
    except OSError:
        return []
    return [(name, status.st_ino, status.st_mtime_ns) for name, status in found]


def _files(path: str) -> list[Path]:
    """The safetensors files of a model directory; a single file goes before an index, as in transformers."""
    directory = Path(path)
    if not directory.is_dir():
        raise Refused(f"{path}: not a directory")
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise Refused(f"{path}: holds neither {single.name} nor {index.name}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Refused(f"{index}: not an index of safetensors files: {error!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise Refused(f"{index}: names a file outside its directory: {outside[0]}")
    return [directory / name for name in names]


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
