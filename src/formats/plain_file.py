"""Weights in a file of `torch.save`: a state dict, alone or as `model`, `state_dict` or `module`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.formats.base import Content, Verification, WriteOptions, folder_of_model
from cairn.formats.huggingface.huggingface import copy_companions

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
ENTRIES = ("model", "state_dict", "module")
FILE = "model.pt"
"""The file in a folder that Cairn wrote."""


class PlainFile:
    """A file of weights; config.json and tokenizer lie beside it, or are given.

    What is written is what `model.state_dict()` of transformers is: tied weights stand under each of their
    names, and share values.
    """

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        if source.is_dir():
            return (source / FILE).is_file() and not any(source.glob("*.safetensors*"))
        return source.is_file() and source.suffix in SUFFIXES

    def read(self, source: Path, model: Path | None = None) -> Content:
        from cairn.formats.torch_file.pickled import (
            load_pickled,
            state_dict_in,  # imports torch
        )

        source = source / FILE if source.is_dir() else source
        try:
            found: Any = load_pickled(source)
        except Damaged as error:
            if source.suffix != ".ckpt":
                raise
            raise Damaged(
                f"{error}. If it is Lightning's: torch.save(torch.load(FILE, weights_only=False)"
                "['state_dict'], 'weights.pt') in a program that trusts the file writes what is read here"
            ) from None
        left_out: tuple[str, ...] = ()
        for entry in ENTRIES:
            if isinstance(found, Mapping) and isinstance(cast(Any, found).get(entry), Mapping):
                beside = sorted(str(key) for key in cast("Mapping[Any, Any]", found) if key != entry)
                left_out = tuple(f"{key}: only the weights in {entry!r} are taken over" for key in beside)
                found = cast("Mapping[str, Any]", found)[entry]
                break
        tensors = state_dict_in(cast("object", found), source)
        return Content({MODEL: tensors}, model=folder_of_model(model, source.parent), left_out=left_out)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.common.match_layout import state_dict_of
        from cairn.formats.torch_file import torch_writer  # imports torch

        copy_companions(content, folder, options.dtype)
        from cairn.formats.common.verified_reads import KeptValues  # imports torch

        kept = KeptValues(content, options.dtype)
        torch_writer.save(folder / FILE, state_dict_of(kept.content), options.on_bytes)
        return kept.read_back(self, folder)
