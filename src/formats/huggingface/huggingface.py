"""Hugging Face directories: config.json, a tokenizer, and files of weights with the hub's names (`hub`)."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import MODEL, OF_ADAPTERS
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.model.described import about_model, as_file, companion_files, with_both_forms, with_dtype

# Writes the model card of an exported model: a README.md with the header that the Hugging Face hub reads.


FILE_NAME = "README.md"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
METHODS = {
    "sft": "supervised fine-tuning (SFT)",
    "dpo": "learning from preferences (DPO and its relatives)",
    "reward": "training a reward model",
    "reinforcement-learning": "reinforcement learning (RL)",
}
"""What made the weights: the hub's tag, and in words."""


def model_card(content: Content, dtype: str | None, library: str = "transformers") -> str:
    """The card: base model, how the weights were made, and the settings, as far as the step says.

    Args:
        dtype: torch's name of the data type that was asked for; None: as in training.
        library: that opens the folder, by its name on the hub.
    """
    origin = content.origin
    base, method = origin.get("base"), origin.get("method")
    header = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if base and HUB_NAME.fullmatch(base):
        header.append(f"base_model: {base}")
    if data := [name for name in origin.get("data", "").split(", ") if HUB_NAME.fullmatch(name)]:
        header += ["datasets:", *(f"- {name}" for name in data)]
    header += ["tags:", "- cairn", *([f"- {method}"] if method else [])]
    step = f"step {content.step}" if content.step else "a step"
    lines = [f"The weights of {step} of a run of Cairn {origin.get('version', '')}".rstrip() + ".", ""]
    known = {
        "Base model": base,
        "Made by": METHODS.get(method or ""),
        "Data": origin.get("data"),
        "Samples trained on": content.samples,
        "Tokens trained on": content.tokens,
        "Optimiser": content.optimizer,
        "Data type": dtype,
        "Run": origin.get("run"),
        "Saved": origin.get("saved"),
    }
    lines += [f"- {name}: {value}" for name, value in known.items() if value]
    if content.settings:
        settings = [f"{name} = {json.dumps(value)}" for name, value in sorted(content.settings.items())]
        lines += ["", "## Settings of the run", "", "```", *settings, "```"]
    if content.inputs:
        lines += ["", "## What it was trained on", "", "Numbers and digests, by which Cairn knows it:", ""]
        lines += ["```json", json.dumps(content.inputs, indent=2, sort_keys=True), "```"]
    return "\n".join(["---", *header, "---", "", "# " + (base or "Model").rpartition("/")[2], "", *lines, ""])


class HuggingFace:
    """A folder of weights only; the `model/` of a step is one, too."""

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        return (source / "config.json").exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        return Content(tensors={MODEL: weights_in(source)}, model=model or source)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.checkpoint.tensors.stream_writer import write_sources  # imports torch

        copy_companions(content, folder, options.dtype)
        card = model_card(content, options.dtype and _torch_name(options.dtype))
        (folder / FILE_NAME).write_text(card)
        from cairn.formats.common.verified_reads import KeptValues  # imports torch

        kept = KeptValues(content, options.dtype)
        write_sources(
            folder,
            kept.content.tensors[MODEL],
            "model",
            max_file_bytes=options.max_file_bytes,
            on_bytes=options.on_bytes,
        )
        return kept.read_back(self, folder)


def weights_in(folder: Path) -> Mapping[str, TensorSource]:
    """The weights, by their names in the folder: as transformers, from safetensors files if there are any.

    Raises:
        FileNotFoundError: the folder has no weights.
        Damaged: an index or a file is invalid, or would execute code.
    """
    try:
        return find_tensors(folder, "model")
    except FileNotFoundError:
        from cairn.formats.torch_file.pickled import has_bin_files, read_bin_files  # imports torch

        if not has_bin_files(folder):
            raise
        return read_bin_files(folder)


def copy_companions(content: Content, folder: Path, dtype: str | None) -> None:
    """Copy configuration, tokenizer and chat template into `folder`.

    Args:
        dtype: safetensors' name of the data type that config.json is to name; None: it stays as it is.

    Raises:
        CheckpointError: there is no config.json.
    """
    if content.model is None or not (content.model / "config.json").is_file():
        raise CheckpointError(f"{content.model}: has no config.json, which the new folder needs")
    for name, path in companion_files(content.model).items():
        if name not in OF_ADAPTERS:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
    about = with_both_forms(about_model(content.model))
    if dtype is not None:
        from cairn.checkpoint.tensors.reader import DTYPES

        about = with_dtype(about, DTYPES[dtype])
    if about != about_model(content.model):
        (folder / "config.json").write_bytes(as_file(about))


def _torch_name(dtype: str) -> str:
    from cairn.checkpoint.tensors.reader import DTYPES

    return str(DTYPES[dtype]).removeprefix("torch.")
