"""The formats of checkpoints that Cairn reads and writes. A new one is a module and an entry here."""

from pathlib import Path

from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content, Format, Stage, Verification, WritableFormat, WriteOptions
from cairn.formats.dcp.dcp import Dcp, PrimeRl, Torchtitan
from cairn.formats.deepspeed.deepspeed import DeepSpeed
from cairn.formats.gguf.gguf import Gguf
from cairn.formats.huggingface.accelerate import Accelerate
from cairn.formats.huggingface.hf_trainer import HuggingFaceTrainer
from cairn.formats.huggingface.huggingface import HuggingFace
from cairn.formats.huggingface.peft import Peft
from cairn.formats.megatron.megatron import Megatron
from cairn.formats.onnx import Onnx
from cairn.formats.plain_file import PlainFile
from cairn.formats.tensorflow import TensorFlow
from cairn.formats.verl import Verl
from cairn.model.untrusted_config import check_plain
from cairn.run.output import no_progress

__all__ = [
    "EXPORTERS",
    "FORMATS",
    "QUANTIZATIONS",
    "Content",
    "Format",
    "Stage",
    "TensorSource",
    "Verification",
    "WritableFormat",
    "WriteOptions",
    "format_of",
    "no_progress",
    "read_foreign",
]

FORMATS: dict[str, Format] = {
    "megatron": Megatron(),
    "torchtitan": Torchtitan(),
    "prime-rl": PrimeRl(),
    "dcp": Dcp(),
    "deepspeed": DeepSpeed(),
    "verl": Verl(),
    "gguf": Gguf(),
    "tf": TensorFlow(),
    "peft": Peft(),
    "hf-trainer": HuggingFaceTrainer(),
    "accelerate": Accelerate(),
    "pt": PlainFile(),
    "hf": HuggingFace(),
}
"""The formats that are read. Of two that a folder has, the first is meant: list the special before `hf`."""
EXPORTERS: dict[str, WritableFormat] = {
    "dcp": Dcp(),
    "deepspeed": DeepSpeed(),
    "gguf": Gguf(),
    "hf": HuggingFace(),
    "hf-trainer": HuggingFaceTrainer(),
    "megatron": Megatron(),
    "onnx": Onnx(),
    "peft": Peft(),
    "prime-rl": PrimeRl(),
    "pt": PlainFile(),
    "tf": TensorFlow(),
    "torchtitan": Torchtitan(),
}
"""The formats that are written."""
QUANTIZATIONS: dict[str, tuple[str, ...]] = {"gguf": ("q8_0",)}
"""What `WriteOptions.quantize` may be, by format; the others have none."""


def format_of(source: Path) -> str | None:
    """The name of a file's or folder's format; None if it has none of these formats."""
    return next((name for name, known in FORMATS.items() if known.detect(source)), None)


def read_foreign(source: Path, name: str, model: Path | None = None) -> Content:
    """What a checkpoint of another program holds, in the format `name`; see `Format.read`.

    Raises:
        Damaged: something in it is a pipe, a device or a socket.
    """
    check_plain(source)
    return FORMATS[name].read(source, model)
