"""Reads files of `torch.save`. No code in them is executed: only tensors and plain values are allowed."""

import json
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import MALFORMED, PLAIN_NAME, TensorSpec
from cairn.checkpoint.tensors.reader import DTYPE_NAMES
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import value_of
from cairn.formats.common.adamw import whole_steps
from cairn.formats.torch_file.torch_stream import SavedTensor, read_file

# torch is typed in part.
# pyright: reportUnknownMemberType=false


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that lies in memory; a `TensorSource`."""

    tensor: torch.Tensor
    spec: TensorSpec

    def fill(self, first: int, into: torch.Tensor) -> None:
        into.copy_(self.tensor.detach().reshape(-1)[first : first + len(into)])


def held(name: str, tensor: torch.Tensor, path: Path) -> HeldTensor:
    """A tensor in memory as a `TensorSource`.

    Raises:
        Damaged: it is not a dense tensor of a type that safetensors has.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES or tensor.is_quantized:
        raise Damaged(f"{path}: {name} is not a dense tensor of a type that can be stored ({tensor.dtype})")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise Damaged(f"{path}: {name} claims {tensor.nbytes} bytes, and the file holds fewer of it")
    return HeldTensor(tensor, TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))


def held_step(name: str, steps: float) -> HeldTensor:
    """The number of steps of a weight, as torch's AdamW keeps it."""
    return HeldTensor(torch.tensor(steps, dtype=torch.float32), TensorSpec(f"{name}.step", "F32", ()))


def steps_in(value: object, where: object) -> int:
    """A number of steps, which programs keep as a number or as a tensor of one value.

    Raises:
        Damaged: it is neither, or no whole number.
    """
    if isinstance(value, SavedTensor) and value.shape in ((), (1,)):
        value = value_of(SavedTensor.of("the optimiser's step", value))
    return whole_steps(value, where)


def source_of(name: str, value: object, path: Path) -> TensorSource:
    """A tensor that `load_pickled` has found, as a source.

    Raises:
        Damaged: it is no tensor, or of a type that can't be stored.
    """
    if isinstance(value, torch.Tensor):
        return held(name, value, path)
    return SavedTensor.of(name, value)


def is_tensor(value: object) -> bool:
    """Whether a value that `load_pickled` has found is a tensor."""
    return isinstance(value, (torch.Tensor, SavedTensor))


def load_pickled(path: Path) -> Any:
    """The content of a file of `torch.save`; the values of its tensors stay in the file until they are read.

    Files from before torch 1.6 are read into memory at once.

    Returns:
        Plain values, lists, tuples and dictionaries, with what `source_of` takes for each tensor.

    Raises:
        FileNotFoundError: there is no such file.
        Damaged: the file is invalid, or would execute code; the message names what is not allowed.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    if zipfile.is_zipfile(path):
        return read_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), str(error))
        raise Damaged(
            f"{path}: holds more than tensors and plain values, and is not loaded: {reason}"
        ) from None
    except OSError:
        raise
    except Exception as error:  # torch's machine raises whatever a wrong instruction runs into
        raise Damaged(f"{path}: not a file of torch.save: {(str(error).splitlines() or [''])[0]}") from None


# Weights of older Hugging Face directories: pytorch_model.bin, or several such files and an index.


SINGLE = "pytorch_model.bin"
INDEX = f"{SINGLE}.index.json"


def has_bin_files(folder: Path) -> bool:
    """Whether a folder has such weights."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def read_bin_files(folder: Path) -> dict[str, TensorSource]:
    """The weights, by their names in the files; they are read later. No code in the files is executed.

    Raises:
        FileNotFoundError: there are none.
        Damaged: a file is invalid, would execute code, or lacks what the index says.
    """
    single = folder / SINGLE
    if single.is_file():
        return dict(state_dict_in(load_pickled(single), single))
    index = folder / INDEX
    try:
        places: dict[Any, Any] = dict(json.loads(index.read_text())["weight_map"])
    except FileNotFoundError:
        raise FileNotFoundError(2, f"holds neither {SINGLE} nor {INDEX}", str(folder)) from None
    except (*MALFORMED, OSError) as error:
        raise Damaged(f"{index}: not an index of files: {error}") from None
    if outside := [n for n in places.values() if type(n) is not str or not PLAIN_NAME.fullmatch(n)]:
        raise Damaged(f"{index}: names a file outside its folder: {outside[0]!r}")
    found: dict[str, TensorSource] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise Damaged(f"{index}: names {name}, which does not exist")
        found |= state_dict_in(load_pickled(folder / name), folder / name)
    if absent := sorted(places.keys() - found.keys()):
        raise Damaged(f"{index}: names {absent[0]}, which is in none of its files")
    return found


def state_dict_in(value: object, path: Path) -> Mapping[str, TensorSource]:
    """The tensors of a state dict, by name.

    Args:
        value: what `load_pickled` has found in the file `path`.

    Raises:
        Damaged: it is no state dict.
    """
    if not isinstance(value, Mapping) or not value:
        raise Damaged(f"{path}: holds no state dict")
    weights = cast("Mapping[Any, Any]", value)
    if wrong := [str(key) for key, tensor in weights.items() if not is_tensor(tensor)]:
        raise Damaged(f"{path}: holds no state dict: {wrong[0]} is no tensor")
    return {str(name): source_of(str(name), tensor, path) for name, tensor in weights.items()}
