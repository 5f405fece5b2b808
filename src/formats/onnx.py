"""ONNX files: the model's graph with its weights, as torch's exporter makes it, for inference elsewhere."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path

from cairn.checkpoint.step_folder import MODEL
from cairn.formats.base import Content, Verification, WriteOptions
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.run.output import Stage

FILE = "model.onnx"


class Onnx:
    """The logits of token numbers [batch, seq] and a mask of the same shape; a folder with the tokenizer.

    Above a size of `onnx_writer.EXTERNAL_BYTES`, the weights are in a file beside FILE. The model is held in
    memory.
    """

    stems = (MODEL,)

    def write(self, content: Content, folder: Path, options: WriteOptions) -> Verification:
        from cairn.formats.onnx_writer import write  # imports torch

        write(content, folder / FILE, options)
        copy_companions(content, folder, options.dtype)
        return lambda stage: self._verify(content, folder, options, stage)

    def _verify(self, content: Content, folder: Path, options: WriteOptions, stage: Stage) -> str:
        """Compare the logits that onnxruntime computes with those of transformers.

        Raises:
            Damaged: they differ by more than rounding does.
            CheckpointError: onnxruntime can't run the file.
        """
        from cairn.formats.onnx_writer import largest_difference

        found = largest_difference(content, folder / FILE, stage)
        return f"onnxruntime computes the same logits; they differ by {found:.1e} of the largest at most"
