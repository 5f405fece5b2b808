"""Weights of older Hugging Face directories: pytorch_model.bin, or several such files and an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.tensors.layout import MALFORMED, PLAIN_NAME
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.torch_file.pickled import is_tensor, load_pickled, source_of

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
