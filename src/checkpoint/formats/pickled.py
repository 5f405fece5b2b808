"""Reads files of `torch.save`. No code in them is executed: only tensors and plain values are allowed."""

# torch is typed in part.
# pyright: reportUnknownMemberType=false

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.dtypes import DTYPE_NAMES
from cairn.checkpoint.layout import MALFORMED, TensorSpec
from cairn.checkpoint.manifest import Damaged


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that lies in memory or in a mapped file; a `Source`."""

    tensor: torch.Tensor
    spec: TensorSpec

    def fill(self, first: int, into: torch.Tensor) -> None:
        """See `Source.fill`."""
        into.copy_(self.tensor.detach().reshape(-1)[first : first + len(into)])


def held(name: str, tensor: torch.Tensor, path: Path) -> HeldTensor:
    """A tensor of a file as a `Source`.

    Raises:
        Damaged: it is not a dense tensor of a type that safetensors has.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.is_quantized:
        raise Damaged(f"{path}: {name} is not a dense tensor of a type that can be stored ({tensor.dtype})")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise Damaged(f"{path}: {name} claims {tensor.nbytes} bytes, and the file holds fewer of it")
    return HeldTensor(tensor, TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))


def load_pickled(path: Path) -> Any:
    """The content of a file of `torch.save`; the values of its tensors stay in the file until they are read.

    Files from before torch 1.6 are read into memory at once.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: the file is invalid, or would execute code; the message names what is not allowed.
    """
    is_zip = zipfile.is_zipfile(path)
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    try:
        if is_zip:
            _check_sizes(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), str(error))
        raise Damaged(
            f"{path}: holds more than tensors and plain values, and is not loaded: {reason}"
        ) from None
    except (*MALFORMED, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise Damaged(f"{path}: not a file of torch.save: {(str(error).splitlines() or [''])[0]}") from None


def _check_sizes(path: Path) -> None:
    """Check that nothing in an archive is larger than it is in the file: torch compresses nothing.

    Raises:
        Damaged: something is.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
                raise Damaged(
                    f"{path}: {entry.filename!r} would be {entry.file_size} bytes, but the file has {size}"
                )
