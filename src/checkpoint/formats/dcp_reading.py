"""Reads PyTorch distributed checkpoints (DCP): names, AdamW's state and progress, by the program's keys."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from cairn.checkpoint.dtypes import DTYPES
from cairn.checkpoint.formats.adamw import MOMENTS, SETTINGS, settings_of
from cairn.checkpoint.formats.content import Content, Source, listed
from cairn.checkpoint.formats.dcp_metadata import DcpIndex, DcpTensor, read_metadata
from cairn.checkpoint.formats.dcp_programs import PROGRAMS, Program
from cairn.checkpoint.formats.dcp_rotary import in_rotary_order
from cairn.checkpoint.formats.dcp_tensors import DcpSource
from cairn.checkpoint.formats.torch_stream import Stream, read_value
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step import MODEL, OPTIMIZER

MODEL_FOLDERS = ("hf_meta", "")
"""Where a folder may hold config.json and the tokenizer; the first is Telescope's."""
BESIDE = {
    "dataloader": "dataloader/ has the position in the data; Cairn begins with its own data set",
    "train_dataloader.pt": "train_dataloader.pt has the position in the data; Cairn begins with its own",
    "orchestrator": "orchestrator/ is a pickle of the program's own classes",
}
"""Files beside the checkpoint that are not read."""


def read(source: Path, folders: Iterable[Path], model: Path | None = None) -> Content:
    """The content of a checkpoint that is in these folders together; see `Dcp.read`."""
    index = _merge(read_metadata(folder) for folder in folders)
    program = _program(source, index.tensors.keys() | index.values.keys())
    return _Reading(source, index, program, model).content()


@dataclass(frozen=True)
class _Reading:
    """A folder that is being read."""

    source: Path
    index: DcpIndex
    program: Program
    model: Path | None

    def content(self) -> Content:
        """All of it."""
        weights = {
            name: DcpSource.of(name, tensor)
            for key, tensor in self.index.tensors.items()
            if (name := self.program.weight(key)) is not None
        }
        state = dict(self._state(weights))
        groups = dict(self._groups())
        steps = {int(_number(entry)) for name, entry in state.items() if name.endswith(".step")}
        said = self._progress(self.program.step)
        left_out = [*self._passed()]
        if steps and said is not None and said != max(steps):
            left_out.append(
                f"{self.program.step} is {said}; Cairn counts the optimiser's steps: {max(steps)}"
            )
        if state and not all(name.rpartition(".")[0] in weights for name in state):
            strange = [name for name in state if name.rpartition(".")[0] not in weights]
            raise CheckpointError(f"{self.source}: optimiser state without weights: {listed(strange)}")
        beside = (self.source / place for place in MODEL_FOLDERS)
        model = self.model or next((f for f in beside if (f / "config.json").exists()), None)
        weights = self._in_hub_order(weights, model)
        if state:
            state = self._in_hub_order(state, model)
        return Content(
            tensors={MODEL: weights, **({OPTIMIZER: state} if state else {})},
            model=model,
            step=max(steps) if steps else said,
            tokens=self._progress(self.program.tokens),
            samples=self._progress(self.program.samples),
            optimizer="AdamW" if state else None,
            settings=settings_of(groups.values(), self.source),
            left_out=tuple(left_out),
        )

    def _in_hub_order(self, tensors: Mapping[str, Source], model: Path | None) -> dict[str, Source]:
        """Weights or AdamW's state, with the rows of queries and keys in the hub's order.

        torchtitan keeps a Llama's in the order of Meta's.

        Raises:
            CheckpointError: nothing tells the size of a head, or the model is not of a known type.
        """
        if not self.program.titan:
            return dict(tensors)
        if model is None:
            if any(".q_norm.weight" in name for name in tensors):
                return dict(tensors)
            raise CheckpointError(
                f"{self.source}: is torchtitan's checkpoint of a Llama: the rows of its queries and keys are "
                "in another order than the hub's, which depends on a head's size; give the folder with the "
                "model's config.json with --model FOLDER"
            )
        config = AutoConfig.from_pretrained(model)  # pyright: ignore # typed in part
        return in_rotary_order(tensors, config, to_hub=True)  # pyright: ignore # typed in part

    def _state(self, weights: Mapping[str, Source]) -> Iterator[tuple[str, DcpSource]]:
        """AdamW's state.

        Raises:
            CheckpointError: it is another optimiser's, or numbered instead of named.
        """
        before, strange = (
            self.program.state,
            [k for k in self.index.values if k.startswith(self.program.state)],
        )
        for key, tensor in self.index.tensors.items():
            if not key.startswith(before):
                continue
            owner, _, what = key.removeprefix(before).rpartition(".")
            if what not in MOMENTS:
                strange.append(key)
                continue
            name = f"{self.program.named(owner)}.{what}"
            yield name, DcpSource.of(name, tensor)
        if strange:
            raise CheckpointError(
                f"{self.source}: the optimiser's state has values that AdamW's has not: {listed(strange)}"
            )

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The settings of each group of parameters."""
        found: dict[str, dict[str, Any]] = {}
        for key in self.index.tensors.keys() | self.index.values.keys():
            group, _, what = key.removeprefix(self.program.groups).rpartition(".")
            if key.startswith(self.program.groups) and what in SETTINGS:
                found.setdefault(group, {})[what] = self._value(key)
        yield from found.items()

    def _passed(self) -> Iterator[str]:
        """What is not taken over, one sentence each."""
        keys = self.index.tensors.keys() | self.index.values.keys()
        taken = {self.program.step, self.program.tokens, self.program.samples}
        for before, what in self.program.passed:
            if any(key.startswith(before) and key not in taken for key in keys):
                yield f"{before.rstrip('.')}: {what}"
        yield from (said for name, said in BESIDE.items() if (self.source / name).exists())

    def _progress(self, key: str) -> int | None:
        if key not in self.index.tensors and key not in self.index.values:
            return None
        value = self._value(key)
        if not isinstance(value, (int, float)) or value < 0 or value != int(value):
            raise Damaged(f"{self.source}: {key} is {value!r}, which is not a whole number")
        return int(value)

    def _value(self, key: str) -> Any:
        """A number or other plain value."""
        if key in self.index.tensors:
            return _number(DcpSource.of(key, self.index.tensors[key]))
        return read_value(self.index.values[key])


def _merge(indexes: Iterable[DcpIndex]) -> DcpIndex:
    """What several folders hold together.

    Raises:
        Damaged: two hold the same key.
    """
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, Stream] = {}
    for index in indexes:
        twice = (tensors.keys() | values.keys()) & (index.tensors.keys() | index.values.keys())
        if twice:
            raise Damaged(f"two folders hold {listed(twice)}")
        tensors.update(index.tensors)
        values.update(index.values)
    return DcpIndex(tensors, values)


def _program(source: Path, keys: Iterable[str]) -> Program:
    """The program whose keys these are.

    Raises:
        CheckpointError: there is none.
    """
    keys = list(keys)
    strange = {program.name: program.strange(keys) for program in PROGRAMS if program.has_weights(keys)}
    for program in PROGRAMS:
        if strange.get(program.name) == []:
            return program
    if not strange:
        raise CheckpointError(f"{source}: no key is a weight of a program that Cairn knows: {listed(keys)}")
    name = min(strange, key=lambda known: len(strange[known]))
    raise CheckpointError(
        f"{source}: looks like a checkpoint of {name}, but these keys have no counterpart in Cairn: "
        f"{listed(strange[name])}"
    )


def _number(source: DcpSource) -> float | int:
    """The value of a tensor of one value.

    Raises:
        Damaged: it has more.
    """
    if source.spec.shape not in ((), (1,)):
        raise Damaged(f"{source.spec.name} has shape {list(source.spec.shape)} instead of one value")
    value = torch.empty(1, dtype=DTYPES[source.spec.dtype])
    source.fill(0, value)
    return value.item()
