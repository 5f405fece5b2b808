"""GGUF files: weights, tokenizer and chat template in one file, as llama.cpp reads it."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.source import listed
from cairn.formats.base import Content, Verification, WriteOptions, folder_of_model
from cairn.formats.gguf.gguf_file import GgufFile, read_gguf
from cairn.formats.gguf.gguf_model import (
    MODEL_TYPES,
    ROPE_FACTORS,
    config_of,
    differences,
    hub_tensors,
    rope_factors,
)
from cairn.formats.gguf.gguf_tokenizer import write_tokenizer
from cairn.model.untrusted_config import load_config
from cairn.run.output import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILE = "model.gguf"
SUFFIX = ".gguf"


class Gguf:
    """One file of the architectures in MODEL_TYPES: F32, F16, BF16, and the quantisations that gguf knows.

    Configuration and tokenizer are those beside the file or in `model`, or are made of the metadata. Of the
    quantisations, Q8_0 is written; norms and biases are float32, as programs expect.
    """

    stems = (MODEL,)

    def detect(self, source: Path) -> bool:
        if source.is_dir():
            return not (source / "config.json").exists() and len(list(source.glob(f"*{SUFFIX}"))) == 1
        return source.suffix == SUFFIX

    def read(self, source: Path, model: Path | None = None) -> Content:
        file = read_gguf(_file_in(source))
        config = config_of(file.values, file.tensors.keys())

        def write_companions(folder: Path) -> None:
            _check_factors(file, config)
            config.dtype = _dtype(file)
            config.save_pretrained(folder)
            write_tokenizer(file.values, folder)

        if folder := folder_of_model(model, file.path.parent):
            _check_config(file, folder)
        return Content({MODEL: hub_tensors(file, config)}, model=folder, write_companions=write_companions)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.gguf.gguf_writer import write  # imports torch and gguf

        write(content, folder / FILE, options)
        return lambda stage: self._verify(content, folder, options, stage)

    def _verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """Compare every weight, read back by the hub's name, with the step's.

        What is quantised may differ by a rounding, and Gemma's norms, which are stored plus one, by that of
        the sum; the others are equal bit for bit.
        """
        from cairn.formats.gguf.gguf_writer import check

        back = self.read(folder, content.model).tensors[MODEL]
        weights = content.tensors[MODEL]
        progress = stage("comparing", sum(source.spec.nbytes for source in weights.values()))
        if back.keys() != weights.keys():
            raise Damaged(
                f"{folder}: reading back found other tensors: {listed(back.keys() ^ weights.keys())}"
            )
        for name, source in weights.items():
            check(name, back[name], source, options, progress)
        kept = "equal within the rounding of Q8_0" if options.quantize else "equal"
        return f"{len(weights)} weights read back and {kept}"


def _check_config(file: GgufFile, folder: Path) -> None:
    """Check that the folder's config.json describes the model in the file."""
    given = load_config(folder).get_text_config()
    arch = file.values["general.architecture"]
    if given.model_type != MODEL_TYPES[arch]:
        raise CheckpointError(
            f"{file.path}: holds a {arch}, and {folder / 'config.json'} describes a {given.model_type}"
        )
    _check_factors(file, given)
    parameters = given.to_dict()["rope_parameters"]
    again = config_of(file.values, file.tensors.keys(), factors=parameters)
    if differing := differences(given, again):
        raise CheckpointError(
            f"{file.path}: says otherwise than {folder / 'config.json'}, where {'; '.join(differing)}"
        )


def _check_factors(file: GgufFile, config: "PreTrainedConfig") -> None:
    """Check that what divides rotary frequencies is what config.json describes."""
    import torch

    found = file.tensors.get(ROPE_FACTORS)
    parameters = config.to_dict()["rope_parameters"]
    described = parameters.get("rope_type") == "llama3"
    if found is None and not described:
        return
    if found is None or not described or "factor" not in parameters:
        raise CheckpointError(
            f"{file.path}: {'holds' if found else 'lacks'} the factors of scaled rotary frequencies "
            f"({ROPE_FACTORS}); give the folder with the model's config.json with --model FOLDER"
        )
    values = torch.empty(math.prod(found.spec.shape))
    found.fill(0, values)
    expected = rope_factors(parameters, config.head_dim)  # pyright: ignore # LlamaConfig has it
    if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} is not what config.json's rope_parameters describe"
        )


def _dtype(file: GgufFile) -> str:
    """torch's name of the data type of the matrices in a file; quantised ones become float32."""
    kinds = {source.spec.dtype for source in file.tensors.values() if len(source.spec.shape) > 1}
    return {"F16": "float16", "BF16": "bfloat16"}.get("+".join(sorted(kinds)), "float32")


def _file_in(source: Path) -> Path:
    """The file that is meant."""
    if not source.is_dir():
        return source
    found = sorted(source.glob(f"*{SUFFIX}"))
    if len(found) != 1:
        raise FileNotFoundError(2, f"holds {len(found)} files *{SUFFIX}; name one", str(source))
    return found[0]
