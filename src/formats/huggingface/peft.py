"""PEFT's folders of low-rank adapters: read as the whole model, written as the adapter."""

import shutil
from dataclasses import replace
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import ADAPTER, ADAPTER_CONFIG, MODEL
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.huggingface.huggingface import weights_in
from cairn.model.adapters import base_folder, is_adapter, merged_weights
from cairn.model.described import companion_files
from cairn.model.peft_settings import adapter_settings
from cairn.run.conversations import GENERATION_CONFIG
from cairn.run.recipe import tokenizer_files


class Peft:
    """A folder with `adapter_config.json` and `adapter_model.safetensors`; a LoRA step's `model/` is one."""

    stems = (ADAPTER,)

    def detect(self, source: Path) -> bool:
        return is_adapter(source)

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The base's weights with the adapter added, in float32.

        Args:
            model: the base model's folder; default: the one that the adapter names.

        Raises:
            CheckpointError: the base is not there or is another model, or the adapter can't be merged.
        """
        from cairn.formats.transfer.agreement import base_for  # imports transformers

        adapter_settings(source)  # before anything large is read
        base = base_folder(source, model)
        fit = base_for(source, weights_in(base), base)
        weights = merged_weights(source, fit.weights, fit.layout)
        left_out = ()
        if (source / "optimizer.pt").exists():
            left_out = ("the state of the adapter's optimiser: an import holds the merged weights",)
        own = [path.name for path in tokenizer_files(source)]
        said = [f"the adapter's own go before the base's: {', '.join(own)}"] if own else []
        return Content(
            tensors={MODEL: weights},
            model=base,
            tokenizer=source if own or (source / GENERATION_CONFIG).is_file() else None,
            changes=fit.changes,
            left_out=left_out,
            said=(*fit.said, *said),
        )

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.checkpoint.tensors.stream_writer import write_sources  # imports torch

        if ADAPTER not in content.tensors or content.model is None:
            raise CheckpointError(
                f"{content.model}: was trained without [lora], so there is no adapter; --format hf "
                "writes the whole model"
            )
        if options.dtype is not None:
            raise CheckpointError("an adapter is written in float32, as it is trained; leave --dtype out")
        for name, path in companion_files(content.model).items():
            if name != "config.json":
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
        from cairn.formats.common.verified_reads import KeptValues  # imports torch

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
        return (source / ADAPTER_CONFIG).is_file()

    def read(self, source: Path, model: Path | None = None) -> Content:
        return Content(tensors={ADAPTER: find_tensors(source, "adapter_model")}, model=model)
