"""Reads PyTorch distributed checkpoints (DCP): names, AdamW's state and progress, by the program's keys."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from transformers import AutoConfig

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.checkpoint.tensors.stream_writer import pieces_of, value_of
from cairn.formats.base import Content, folder_of_model
from cairn.formats.common.adamw import SETTINGS, STATE, settings_of, whole_steps
from cairn.formats.common.tensor_views import TensorSection
from cairn.formats.dcp.dcp_programs import PROGRAMS, Program
from cairn.formats.dcp.dcp_tensors import DcpIndex, DcpSource, DcpTensor, read_metadata
from cairn.formats.dcp.dcp_titan import cut, fused_parts, head_norm, in_rotary_order
from cairn.formats.torch_file.torch_stream import Stream, read_value
from cairn.model.architectures import sizes_of

MODEL_FOLDERS = ("hf_meta", "")
"""Where a folder may hold config.json and the tokenizer; the first is Telescope's."""
MAX_EXPERTS = 1 << 16
"""Experts of a layer."""
BESIDE = {
    "dataloader": "dataloader/ has the position in the data; Cairn begins with its own data set",
    "train_dataloader.pt": "train_dataloader.pt has the position in the data; Cairn begins with its own",
    "orchestrator": "orchestrator/ is a pickle of the program's own classes",
    **{
        name: f"{name}/ has a model of values: critics are read from verl and SkyRL"
        for name in ("value", "critic")
    },
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
        weights = dict(self._weights())
        state = dict(self._state())
        groups = dict(self._groups())
        steps = {
            whole_steps(value_of(entry), self.source)
            for name, entry in state.items()
            if name.endswith(".step")
        }
        said = self._progress(self.program.step)
        left_out = [*self._passed(), *self._expert_biases()]
        if steps and said is not None and said != max(steps):
            left_out.append(
                f"{self.program.step} is {said}; Cairn counts the optimiser's steps: {max(steps)}"
            )
        strange = [name for name in state if name.rpartition(".")[0] not in weights]
        state = {} if strange else state
        model = self._config_folder
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
            state_refused=f"it is of weights that are not there: {listed(strange)}" if strange else None,
        )

    def _in_hub_order(
        self, tensors: Mapping[str, TensorSource], model: Path | None
    ) -> dict[str, TensorSource]:
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
            self._refuse_without_heads()
        config = AutoConfig.from_pretrained(model)  # pyright: ignore # typed in part
        return in_rotary_order(tensors, config, to_hub=True)  # pyright: ignore # typed in part

    def _refuse_without_heads(self) -> NoReturn:
        raise CheckpointError(
            f"{self.source}: is torchtitan's checkpoint of a Llama: the rows of its queries and keys are "
            "in another order than the hub's, which depends on a head's size; give the folder with the "
            "model's config.json with --model FOLDER"
        )

    @cached_property
    def _config_folder(self) -> Path | None:
        """The folder with config.json, if there is one."""
        return folder_of_model(self.model, *(self.source / place for place in MODEL_FOLDERS))

    def _weights(self) -> Iterator[tuple[str, TensorSource]]:
        for key, tensor in self.index.tensors.items():
            if self.program.is_weight(key):
                yield from self._named(key.removeprefix(self.program.weights), tensor)

    def _named(self, name: str, tensor: DcpTensor, kind: str = "") -> Iterator[tuple[str, TensorSource]]:
        """A weight, or a kind of its state, by the hub's name; one of all experts is cut into each one's.

        The step of such a tensor is that of its first expert, and stands for all.
        """
        after = kind and f".{kind}"
        if not self.program.has_all_experts(name):
            own = self.program.named(name) + after
            yield own, DcpSource.of(own, tensor)
            return
        whole = DcpSource.of(name + after, tensor)
        if kind == "step":
            yield self.program.named(name, 0) + after, whole
            return
        if len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MAX_EXPERTS:
            raise Damaged(f"{self.source}: {name}{after} has shape {list(tensor.shape)}, not that of experts")
        shape = tensor.shape[1:]
        for expert in range(tensor.shape[0]):
            own = self.program.named(name, expert) + after
            spec = TensorSpec(own, whole.spec.dtype, shape)
            yield own, TensorSection(whole, expert * math.prod(shape), spec)

    def _expert_biases(self) -> Iterator[str]:
        """What is said of torchtitan's biases of experts, which must be zero."""
        biases = [key for key in self.index.tensors if self.program.is_expert_bias(key)]
        if skewed := [key for key in biases if _has_values(DcpSource.of(key, self.index.tensors[key]))]:
            raise CheckpointError(
                f"{self.source}: torchtitan balanced the experts with these biases, which Qwen3-MoE of "
                "transformers and vLLM has not, and without which it would choose other experts (torchtitan "
                f"trains without them where load_balance_coeff is None): {listed(skewed)}"
            )
        if biases:
            yield "expert_bias_E: the biases that balance experts, which are all zero"

    def _state(self) -> Iterator[tuple[str, TensorSource]]:
        before, strange = (
            self.program.state,
            [k for k in self.index.values if k.startswith(self.program.state)],
        )
        for key, tensor in self.index.tensors.items():
            if not key.startswith(before):
                continue
            owner, _, what = key.removeprefix(before).rpartition(".")
            if what not in STATE:
                strange.append(key)
                continue
            yield from self._fused(owner, tensor, what) or self._named(owner, tensor, what)
        if strange:
            raise CheckpointError(
                f"{self.source}: the optimiser's state has values that AdamW's has not: {listed(strange)}"
            )

    def _fused(self, owner: str, tensor: DcpTensor, kind: str) -> list[tuple[str, TensorSource]]:
        """A kind of the state of torchtitan's one weight of queries, keys and values, by the hub's names.

        Empty if `owner` is another weight, or does not fit the weights that are there.

        Raises:
            CheckpointError: nothing tells the size of a head.
        """
        names = fused_parts(owner) if self.program.titan else ()
        if not names:
            return []
        whole = DcpSource.of(f"{owner}.{kind}", tensor)
        parts: Mapping[str, TensorSource] | None = dict.fromkeys(names, whole)
        if kind != "step":
            parts = cut(whole, names, self.index.tensors, self._head(owner))
        return [(f"{self.program.named(name)}.{kind}", part) for name, part in (parts or {}).items()]

    def _head(self, fused: str) -> int:
        """The number of rows of a head of queries."""
        norm = self.index.tensors.get(head_norm(fused))
        if norm is not None:
            return math.prod(norm.shape)
        if self._config_folder is None:
            self._refuse_without_heads()
        return sizes_of(AutoConfig.from_pretrained(self._config_folder)).head  # pyright: ignore # in part

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
        if not isinstance(value, (int, float)) or not 0 <= value < 1 << 63 or value != int(value):
            raise Damaged(f"{self.source}: {key} is {value!r}, which is not a whole number")
        return int(value)

    def _value(self, key: str) -> Any:
        """A number or other plain value."""
        if key in self.index.tensors:
            return value_of(DcpSource.of(key, self.index.tensors[key]))
        return read_value(self.index.values[key])


def _merge(indexes: Iterable[DcpIndex]) -> DcpIndex:
    """What several folders hold together."""
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
    """The program whose keys these are."""
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


def _has_values(source: TensorSource) -> bool:
    """Whether any value of a tensor is other than zero."""
    return any(bool(piece.any()) for piece in pieces_of(source))
