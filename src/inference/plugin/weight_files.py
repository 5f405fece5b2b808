"""Read and check the tensors of a model directory."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cairn.checkpoint.layout import tensor_files
from cairn.checkpoint.manifest import Damaged
from cairn.inference.plugin.expected import Layout
from cairn.policy.refusals import Unchanged

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


def check_folder(path: str) -> None:
    """Raise Refused unless `path` can be a folder, and is one."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(f"{path[:300]!r} is not a directory: {reason}") from None
    if not is_folder:
        raise Refused(f"{path!r} is not a directory")


def _files(path: str) -> list[Path]:
    try:
        return tensor_files(Path(path), "model")
    except Damaged as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None


def _and_more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
