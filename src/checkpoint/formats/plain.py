"""Weights in one file of `torch.save`: a state dict, alone or as the entry `model` or `state_dict`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.formats.content import Content
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step import MODEL

SUFFIXES = (".pt", ".pth", ".bin")
ENTRIES = ("model", "state_dict")


class PlainFile:
    """A file of weights; config.json and tokenizer lie beside it, or are given."""

    def detect(self, source: Path) -> bool:
        """Whether `source` is a file with a name that torch's files have."""
        return source.is_file() and source.suffix in SUFFIXES

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The weights.

        Raises:
            FileNotFoundError: there is no such file.
            Damaged: it is invalid, holds no state dict, or would execute code.
        """
        import torch

        from cairn.checkpoint.formats.pickled import held, load_pickled

        found = load_pickled(source)
        left_out: tuple[str, ...] = ()
        for entry in ENTRIES:
            if isinstance(found, Mapping) and isinstance(cast(Any, found).get(entry), Mapping):
                beside = sorted(str(key) for key in cast("Mapping[Any, Any]", found) if key != entry)
                left_out = tuple(f"{key}: only the weights in {entry!r} are taken over" for key in beside)
                found = cast("Mapping[str, Any]", found)[entry]
                break
        if not isinstance(found, Mapping) or not found:
            raise Damaged(f"{source}: holds no state dict")
        weights = cast("Mapping[Any, Any]", found)
        if wrong := [str(key) for key, value in weights.items() if not isinstance(value, torch.Tensor)]:
            raise Damaged(f"{source}: holds no state dict: {wrong[0]} is no tensor")
        tensors = {str(name): held(str(name), tensor, source) for name, tensor in weights.items()}
        folder = source.parent if (source.parent / "config.json").is_file() else None
        return Content({MODEL: tensors}, model=model or folder, left_out=left_out)
