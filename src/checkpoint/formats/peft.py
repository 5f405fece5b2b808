"""PEFT's folders of low-rank adapters: read as the whole model, written as the adapter."""

import shutil
from dataclasses import replace
from pathlib import Path

from cairn.checkpoint.formats.adapters import base_folder, is_adapter, merged_weights
from cairn.checkpoint.formats.content import Content, Verification, WriteOptions
from cairn.checkpoint.formats.huggingface import COMPANIONS, weights_in
from cairn.checkpoint.formats.reading_back import KeptValues
from cairn.checkpoint.layout import find_tensors
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step import ADAPTER, ADAPTER_CONFIG, MODEL


class Peft:
    """A folder with `adapter_config.json` and `adapter_model.safetensors`; a LoRA step's `model/` is one."""

    stems = (ADAPTER,)

    def detect(self, source: Path) -> bool:
        """Whether `source` is a folder with an adapter."""
        return is_adapter(source)

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The base's weights with the adapter added, in float32.

        Args:
            model: the base model's folder; default: the one that the adapter names.

        Raises:
            CheckpointError: the base is not there or is another model, or the adapter can't be merged.
        """
        from cairn.checkpoint.formats.foreign import load_config  # imports transformers, as the next one does
        from cairn.checkpoint.formats.hub import hub_layout

        base = base_folder(source, model)
        weights = merged_weights(source, weights_in(base), hub_layout(load_config(base)))
        left_out = ()
        if (source / "optimizer.pt").exists():
            left_out = ("the state of the adapter's optimiser: an import holds the merged weights",)
        return Content(tensors={MODEL: weights}, model=base, left_out=left_out)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        """Write the adapter, its configuration, and copies of the tokenizer's files.

        Raises:
            CheckpointError: `content` is a whole model.
            OSError: a file can't be written.
        """
        from cairn.checkpoint.streaming import write_sources  # imports torch

        if ADAPTER not in content.tensors or content.model is None:
            raise CheckpointError(
                f"{content.model}: was trained without [lora], so there is no adapter; --format hf "
                "writes the whole model"
            )
        if options.dtype is not None:
            raise CheckpointError("an adapter is written in float32, as it is trained; leave --dtype out")
        for path in sorted(content.model.iterdir()):
            if path.name == "config.json" or ".safetensors" in path.name:
                continue
            if path.is_file() and path.suffix in COMPANIONS:
                shutil.copyfile(path, folder / path.name)
        kept = KeptValues(replace(content, tensors={ADAPTER: content.tensors[ADAPTER]}), None)
        write_sources(
            folder,
            kept.content.tensors[ADAPTER],
            "adapter_model",
            max_file_bytes=1 << 50,  # PEFT reads one file
            on_bytes=options.on_bytes,
        )
        return kept.read_back(_Alone(), folder)


class _Alone:
    """Reads an adapter as it is."""

    def detect(self, source: Path) -> bool:
        """See `Format.detect`."""
        return (source / ADAPTER_CONFIG).is_file()

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The adapter's tensors."""
        return Content(tensors={ADAPTER: find_tensors(source, "adapter_model")}, model=model)
