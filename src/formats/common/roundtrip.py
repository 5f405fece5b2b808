"""Writes formats that keep every value, and reads back what was written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content, Format, Stage, Verification


class KeptValues:
    """A step whose values a format keeps bit for bit, in the data type asked for.

    content: the step's, converted. What is read of it is noted, so that the step is read once.
    """

    def __init__(self, content: Content, dtype: str | None):
        """Take the weights over as `dtype`, which is safetensors' name; None leaves each as it is."""
        from cairn.checkpoint.tensors.verified_copy import noted  # imports torch
        from cairn.formats.base import written_dtypes

        dtypes = written_dtypes(content, dtype)
        self._noted = {stem: noted(named, dtypes) for stem, named in content.tensors.items()}
        self.content = replace(content, tensors=self._noted)

    def read_back(self, reader: Format, folder: Path) -> Verification:
        """What reads everything that `reader` finds in `folder`, and compares it with what was taken over."""
        return lambda stage: self._compare(reader, folder, stage)

    def _compare(self, reader: Format, folder: Path, stage: Stage) -> str:
        from cairn.checkpoint.tensors.verified_copy import check_noted  # imports torch

        back = reader.read(folder, self.content.model)
        for stem, named in self._noted.items():
            if stem not in back.tensors and any(source.was_read for source in named.values()):
                raise Damaged(f"{folder}: reading back found nothing of {stem}")
        for stem, named in back.tensors.items():
            found = self._as_in_step(named, stem, folder)
            progress = stage(f"comparing {stem}", sum(source.spec.nbytes for source in found.values()))
            check_noted(found, self._noted[stem], folder, on_bytes=progress)
        if back.step not in (None, self.content.step or 0):  # programs say 0 of weights that have no step
            raise Damaged(
                f"{folder}: says step {back.step}, but the checkpoint is of step {self.content.step}"
            )
        return "read back and equal"

    def _as_in_step(
        self, named: Mapping[str, TensorSource], stem: str, folder: Path
    ) -> Mapping[str, TensorSource]:
        """What was read back, by the names that a step uses.

        Raises:
            CheckpointError: something is missing, or does not fit the model.
        """
        model = self.content.model
        if named.keys() >= self._noted[stem].keys() or model is None:
            return named
        from transformers import AutoConfig

        from cairn.formats.common.match_layout import state_of, weights_of
        from cairn.model.hub_layout import hub_layout

        layout = hub_layout(AutoConfig.from_pretrained(model))  # pyright: ignore # typed in part
        return (weights_of if stem == MODEL else state_of)(named, layout, folder)
