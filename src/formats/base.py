"""What a format of checkpoints must offer, and what it finds in a file or folder."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cairn.checkpoint.tensors.layout import MAX_FILE_BYTES, TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.run.errors import UsageError
from cairn.run.output import Stage


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint; the values of its tensors have not been read.

    tensors: by stem and name. Weights have the stem `checkpoint.step.MODEL`. Their names are the hub's, those
    of transformers' modules, or older ones that transformers renames (`hub.Layout.find` knows all of them).
    The optimiser's state has the stem `checkpoint.step.OPTIMIZER` and names such as `<weight>.exp_avg`, for
    weights with any of these names; a step is float32 of shape [], as in torch. A critic has the stems CRITIC
    and CRITIC_OPTIMIZER; its head is called as in `valued`.
    model: the folder with config.json, tokenizer, chat template and generation_config.json, if there is one.
    tokenizer: the folder of which tokenizer, chat templates and generation_config.json go before those in
    `model`, if there is one. changes: entries of config.json that are others than `model` says.
    critic: the folder with the critic's config.json, if there is a critic.
    step, tokens, samples: what was trained so far, as far as that is known.
    optimizer: name of the optimiser's class, such as AdamW; None if there is no state.
    settings: what the checkpoint says of the settings of the run, by the names that Cairn's have, such as
    `optimizer.lr`.
    origin: where the weights come from, for a model card, as far as it is known: `base` (the model that
    training began with), `method` (sft or reinforcement-learning), `data` (data sets or environments), `run`,
    `saved` (when), Cairn's `version`.
    inputs: what a run has trained on, with digests: its `data` or `environment`, and its `tokenizer`, as far
    as it is known.
    left_out: what the source holds beside that and Cairn does not take over, one sentence each.
    said: what was chosen or corrected, one sentence each.
    write_companions: writes config.json and tokenizer into a folder, for sources without such files that say
    the same in another way.
    state_refused: why the state of the source's optimiser can't be taken over; None if it is in `tensors`, or
    if there is none.
    """

    tensors: Mapping[str, Mapping[str, TensorSource]]
    model: Path | None = None
    tokenizer: Path | None = None
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    critic: Path | None = None
    step: int | None = None
    tokens: int | None = None
    samples: int | None = None
    optimizer: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: Mapping[str, str] = field(default_factory=dict[str, str])
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left_out: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    write_companions: Callable[[Path], None] | None = None
    state_refused: str | None = None


class Format(Protocol):
    """A way to store a model, or the whole state of a run, in a file or folder."""

    def detect(self, source: Path) -> bool:
        """Whether `source` has this format, judged by the names of its files."""
        ...

    def read(self, source: Path, model: Path | None = None) -> Content:
        """The content; tensor values are not read, and no code in it is executed.

        Args:
            model: a folder with config.json and tokenizer, for sources that lack them or whose own are not to
                be used.

        Raises:
            FileNotFoundError: a file that the format needs is missing.
            Damaged: a file is invalid, or holds what is not allowed in it.
            CheckpointError: it can't be taken over; the message lists what has no counterpart.
        """
        ...


WEIGHT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The data types that weights are exported as: safetensors' names by torch's."""


@dataclass(frozen=True)
class WriteOptions:
    """How to write a foreign checkpoint.

    dtype: safetensors' name of the data type of floating-point weights; None leaves each as it is. The
    optimiser's state always keeps its own.
    max_file_bytes: more bytes of weights are split into several files, where the format can do that.
    quantize: name of the quantisation of matrices, one of those that `QUANTIZATIONS` lists for the format.
    on_bytes: called with the number of bytes written since the last call, for a progress bar.
    """

    dtype: str | None = None
    max_file_bytes: int = MAX_FILE_BYTES
    quantize: str | None = None
    on_bytes: Callable[[int], None] = lambda count: None


Verification = Callable[[Stage], str]
"""Reads what was written, shows its progress, and returns what it found, as the command prints it.

It raises Damaged if that is not what was to be written.
"""


class WritableFormat(Protocol):
    """A format that Cairn also writes."""

    @property
    def stems(self) -> tuple[str, ...]:
        """The stems of tensors that are written, as in `Content.tensors`; a step may have more."""
        ...

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        """Write `content`, which is that of a step of Cairn, into the empty folder `folder`.

        The caller moves the folder to where it belongs once everything in it is durable. Weights have the
        hub's names, and the optimiser's state has those of transformers' modules.

        Returns:
            What reads it back once it is durable; `KeptValues` has it for formats that keep every value.

        Raises:
            CheckpointError: something in `content` has no counterpart in this format; the message lists it.
            OSError: a file can't be written; the error names it.
        """
        ...


def written_bytes(spec: TensorSpec, dtype: str | None) -> int:
    """Bytes of a weight in a file in which floating-point weights are of `dtype`; None converts nothing.

    For progress bars: the few buffers that keep their type count as if they did not.
    """
    floats = spec.dtype.startswith(("F", "BF"))
    return replace(spec, dtype=dtype).nbytes if dtype and floats else spec.nbytes


def folder_of_model(given: Path | None, *beside: Path) -> Path | None:
    """The folder with config.json: the one that is given, else the first of those beside a source."""
    return given or next((folder for folder in beside if (folder / "config.json").is_file()), None)


# Packages that only some formats need, in dependency groups of their own.


def needed(module: str, group: str) -> Any:
    """Import a module of an optional package.

    Args:
        group: the dependency group that has the package.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise UsageError(
            f"this format needs the package {error.name}, which is not installed; install it with: "
            f"uv sync --group {group}"
        ) from None
