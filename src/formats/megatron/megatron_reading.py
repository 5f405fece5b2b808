"""Reads checkpoints of megatron-core: weights by the hub's names, AdamW's state, and the iteration."""

# torch, transformers and what a pickle holds are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL, OPTIMIZER
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.checkpoint.tensors.verified_copy import check_noted, noted
from cairn.formats.base import Content, folder_of_model
from cairn.formats.common.adamw import MOMENTS, settings_of
from cairn.formats.common.tensor_views import Joined, ValueRange
from cairn.formats.dcp.dcp_reading import MODEL_FOLDERS
from cairn.formats.dcp.dcp_tensors import ChecksummedTensor, DcpIndex, DcpTensor, read_metadata, unstacked
from cairn.formats.megatron.megatron_names import (
    MODEL_TYPES,
    PADDED,
    Key,
    RoleRows,
    parse,
    row_values,
    rows_of,
)
from cairn.formats.torch_file.pickled import held_step, steps_in
from cairn.formats.torch_file.safe_pickle import PickledObject
from cairn.formats.torch_file.torch_stream import Stream, read_stream
from cairn.model.architectures import Architecture, ModelTensor, Sizes, architecture_of, sizes_of
from cairn.model.untrusted_config import load_config
from cairn.run.errors import UsageError

# What a checkpoint holds beside tensors: iteration, groups of the optimiser, and arguments.


FILE = "common.pt"
"""The file of megatron-core before 0.19."""
KEY = "common_state/shard_0_1"
"""The key of later versions in the checkpoint."""
_INERT = frozenset(
    {
        *{("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals")},
        *{("pathlib", "PosixPath"), ("pathlib", "Path"), ("torch", "device")},
        *{("builtins", "set"), ("builtins", "bytearray"), ("builtins", "complex"), ("_codecs", "encode")},
    }
)
_INERT_MODULE = "megatron."


class _Inert(PickledObject):
    """Stands for an object of a class that the file names; holds what the file says of it."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def set(self, state: object) -> None:
        """Take the fields; they are not copied, since an object has hundreds of them."""
        if isinstance(state, dict):
            self.fields = state


class _Names(dict[tuple[str, str], Any]):
    """What stands for the classes that a file may name: for each of Megatron's, a class that does nothing."""

    def __contains__(self, key: object) -> bool:
        return key in _INERT or (isinstance(key, tuple) and str(key[0]).startswith(_INERT_MODULE))

    def __missing__(self, key: tuple[str, str]) -> Any:
        if key not in self:
            raise KeyError(key)
        return self.setdefault(key, type("Inert", (_Inert,), {}))


@dataclass(frozen=True)
class Common:
    """What is read of it.

    arguments: those of Megatron-LM's command line; empty in files of other programs. groups: the settings of
    the optimiser's groups of weights. steps: how often the optimiser has made a step, one for each optimiser.
    """

    iteration: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    groups: tuple[Mapping[str, Any], ...] = ()
    steps: frozenset[int] = frozenset()


def read_common(folder: Path, index: DcpIndex) -> Common:
    """What the folder holds; no code in it is executed.

    Raises:
        Refused: it names a class that neither Megatron nor Python has for plain values, or is too large.
        Damaged: it is not what Megatron writes.
    """
    path = folder / FILE
    if path.is_file():
        stream, where = Stream(path, 0, path.stat().st_size), str(path)
    elif KEY in index.values:
        stream = index.values[KEY]
        where = f"{stream.path}: {KEY}"
    else:
        return Common()
    content = read_stream(stream, _Names())
    if path != stream.path and isinstance(content, list) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise Damaged(f"{where}: holds a {type(content).__name__}, not what Megatron writes")
    iteration = content.get("iteration")
    if iteration is not None and (type(iteration) is not int or iteration < 0):
        raise Damaged(f"{where}: the iteration is {iteration!r}, which is no whole number")
    found = tuple(_optimizers(content.get("optimizer")))
    arguments = content.get("args")
    try:
        groups = tuple(group for one in found for group in one["param_groups"] if isinstance(group, dict))
        steps = {
            steps_in(one["state"]["common_step"], where)
            for one in found
            if "common_step" in one.get("state", ())
        }
        steps |= {steps_in(group["step"], where) for group in groups if "step" in group}
    except TypeError as error:
        raise Damaged(f"{where}: not the state of an optimiser: {error}") from None
    return Common(
        iteration, arguments.fields if isinstance(arguments, _Inert) else {}, groups, frozenset(steps)
    )


def check_arguments(common: Common, expected: Mapping[str, object], where: Path) -> None:
    """Compare Megatron-LM's arguments with what the model in config.json has, as far as they are stored.

    Raises:
        CheckpointError: some differ; the message lists them.
    """
    wrong = [
        f"{name} is {common.arguments[name]!r} and should be {value!r}"
        for name, value in expected.items()
        if common.arguments.get(name) is not None and common.arguments[name] != value
    ]
    if wrong:
        raise CheckpointError(f"{where}: is another model than config.json describes: {'; '.join(wrong)}")


def _optimizers(value: object) -> Iterator[dict[str, Any]]:
    """The states of torch's optimisers, in the one of Megatron or in the list of those that are chained."""
    if isinstance(value, dict) and "param_groups" in value:
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _optimizers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _optimizers(inner)


# The checkpoint.


MASTERS = ("param", "fp32_param")
"""The optimiser's own copies of weights in float32, as the distributed optimiser and others call them."""
_STATE = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.state\.(?P<kind>[a-z0-9_]+)\.(?P<key>.+)")
_OTHER_STATE = re.compile(r"(?:chained_[0-9]+\.)?optimizer\.")
_PASSED = {
    "rng_state": "the state of random generators; Cairn draws by seed and step",
    "rerun_state_machine_state": "what Megatron keeps to run a step again",
}
"""Objects that are not taken over, by the beginning of their keys."""


def read(source: Path, folder: Path, model: Path | None) -> Content:
    """The content of the checkpoint in `folder`; see `Megatron.read`."""
    companions = folder_of_model(model, *(source / place for place in MODEL_FOLDERS), folder)
    if companions is None or not (companions / "config.json").is_file():
        raise UsageError(
            f"{source}: has no config.json and tokenizer beside it, which Megatron does not write; give the "
            "folder of its model with --model FOLDER"
        )
    config: PreTrainedConfig = load_config(companions)
    index = read_metadata(folder)
    common = read_common(folder, index)
    check_arguments(common, _expected(config), folder)
    return _Reading(folder, index, common, architecture_of(config, MODEL_TYPES), sizes_of(config)).content(
        companions
    )


@dataclass(frozen=True)
class _Reading:
    """A folder that is being read. strange: the keys that were found to have no counterpart."""

    folder: Path
    index: DcpIndex
    common: Common
    architecture: Architecture
    sizes: Sizes
    strange: list[str] = field(default_factory=list[str])

    def content(self, companions: Path) -> Content:
        weights: dict[str, TensorSource] = {}
        states: dict[str, dict[str, TensorSource]] = {}
        refused = self._refused()
        left_out = tuple(self._passed())
        for key, tensor in self.index.tensors.items():
            if _OTHER_STATE.match(key):
                if refused is None and (match := _STATE.fullmatch(key)):
                    states.setdefault(match["kind"], {}).update(self._parts(match["key"], tensor))
            else:
                parts = dict(self._parts(key, tensor))
                if twice := {name: parts[name] for name in parts if name in weights}:
                    check_noted(twice, noted({name: weights[name] for name in twice}), self.folder)
                weights |= parts
        if self.strange:
            raise CheckpointError(
                f"{self.folder}: these keys have no counterpart in a model of type "
                f"{self.architecture.model_type!r}: {listed(self.strange)}"
            )
        self._check_tied(weights)
        for kind in MASTERS:
            weights |= states.pop(kind, {})
        step = self._step()
        state = {f"{name}.{kind}": source for kind, named in states.items() for name, source in named.items()}
        if state:
            state |= {f"{name}.step": held_step(name, float(step or 0)) for name in states[MOMENTS[0]]}
        samples = self.common.arguments.get("consumed_train_samples")
        if step is not None and self.common.iteration not in (None, step):
            left_out = (
                *left_out,
                f"iteration: is {self.common.iteration}; Cairn counts the optimiser's steps: {step}",
            )
        return Content(
            tensors={MODEL: weights, **({OPTIMIZER: state} if state else {})},
            model=companions,
            step=self.common.iteration if step is None else step,
            samples=samples if type(samples) is int else None,
            optimizer="AdamW" if state else None,
            settings=self._settings() if state else {},
            left_out=left_out,
            state_refused=refused,
        )

    def _refused(self) -> str | None:
        """Why the optimiser's state can't be taken over; None if it can, or there is none."""
        keys = [k for k in (*self.index.tensors, *self.index.values) if _OTHER_STATE.match(k)]
        found = {key: _STATE.fullmatch(key) for key in keys}
        if any(match is None for match in found.values()):
            return (
                "it is stored as the distributed optimiser's buckets, which depend on the parallelism; load "
                "the checkpoint with Megatron, and save it with --dist-ckpt-optim-fully-reshardable"
            )
        kinds = {match["kind"] for match in found.values() if match}
        if kinds and (kinds - {*MASTERS, *MOMENTS} or not kinds >= {*MOMENTS}):
            return f"it has {', '.join(sorted(kinds))}, and AdamW's has {' and '.join(MOMENTS)}"
        for key, match in found.items():
            weight = self.index.tensors.get(match["key"]) if match else None
            if weight is not None and weight.shape != self.index.tensors[key].shape:
                shape = list(self.index.tensors[key].shape)
                return (
                    f"{key} has shape {shape}, and the weight {list(weight.shape)}: older versions flatten it"
                )
        if len(self.common.steps) > 1:
            return f"its parts are at different steps: {', '.join(map(str, sorted(self.common.steps)))}"
        if kinds and self._step() is None:
            return "the number of its steps is not stored"
        return None

    def _passed(self) -> Iterator[str]:
        """What is not taken over, one sentence each; other objects are added to `strange`."""
        said: set[str] = set()
        for key in self.index.values:
            if "._extra_state/" in key or key == KEY or _OTHER_STATE.match(key):
                continue
            name = next((before for before in _PASSED if key.startswith(f"{before}/")), None)
            if name is None:
                self.strange.append(key)
            elif name not in said:
                said.add(name)
                yield f"{name}: {_PASSED[name]}"

    def _parts(self, name: str, tensor: DcpTensor) -> Iterator[tuple[str, TensorSource]]:
        """The hub's tensors in one of Megatron's, by name; a key that has none is added to `strange`."""
        key = parse(name)
        if key is None:
            self.strange.append(name)
            return
        lengths = tuple(
            {"layer": self.sizes.layers, "expert": self.sizes.experts}[what] for what in key.stacked
        )
        if tensor.shape[: len(lengths)] != lengths or len(tensor.shape) <= len(lengths):
            wanted = " and ".join(f"{n} {what}s" for n, what in zip(lengths, key.stacked, strict=True))
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(tensor.shape)}, not {wanted or 'rows'}"
            )
        for index, source in unstacked(name, tensor, len(lengths)).items():
            where = dict(zip(key.stacked, index, strict=True))
            layer, expert = where.get("layer", key.layer), where.get("expert", key.expert)
            try:
                cut = _cut(source, key, self.sizes)
            except ValueError as error:
                raise CheckpointError(f"{self.folder}: {name} {error}, as config.json says") from None
            for number, role in enumerate(key.roles):
                hub = self.architecture.name(ModelTensor(role, key.kind, layer, expert))
                if hub is None:
                    self.strange.append(name)
                    return
                part = cut[number]
                yield hub, Joined(part.runs, TensorSpec(hub, part.spec.dtype, part.spec.shape))

    def _check_tied(self, weights: Mapping[str, TensorSource]) -> None:
        """Check that a model whose embedding is its head has no other head."""
        head = self.architecture.name(ModelTensor("head"))
        if self.sizes.tied and head in weights:
            raise CheckpointError(
                f"{self.folder}: has an output layer of its own, and config.json says that the embedding is "
                "the head (tie_word_embeddings)"
            )

    def _step(self) -> int | None:
        """How many steps the optimiser has made; the iteration where it does not say."""
        if len(self.common.steps) == 1:
            return int(next(iter(self.common.steps)))
        return self.common.iteration

    def _settings(self) -> dict[str, Any]:
        groups = (
            {**g, "initial_lr": g.get("max_lr") or g.get("initial_lr", g.get("lr"))}
            for g in self.common.groups
        )
        return settings_of(groups, self.folder)


def _cut(source: TensorSource, key: Key, sizes: Sizes) -> list[Joined]:
    """The tensors of a key's roles in a tensor of one layer, in the order of the roles.

    Raises:
        ValueError: its rows do not fit the model.
    """
    spec = source.spec
    rows = list(rows_of(key.roles, spec.shape[0], sizes))
    if key.roles[0] in PADDED and sizes.vocabulary < spec.shape[0]:
        rows = [RoleRows(key.roles[0], 0, sizes.vocabulary)]
    if len(rows) != len(key.roles) or sum(r.count for r in rows) != spec.shape[0]:
        source = ChecksummedTensor(source)  # it is read out of order, or not to its end
    inner = row_values(spec.shape)
    found: list[Joined] = []
    for role in key.roles:
        mine = [r for r in rows if r.role == role]
        shape = (sum(r.count for r in mine), *spec.shape[1:])
        runs = tuple(ValueRange(source, r.first * inner, r.count * inner) for r in mine)
        found.append(Joined(runs, TensorSpec(spec.name, spec.dtype, shape)))
    return found


def _expected(config: PreTrainedConfig) -> dict[str, object]:
    """The arguments with which Megatron-LM makes this model."""
    sizes = sizes_of(config)
    about: dict[str, Any] = config.to_dict()
    rope: dict[str, Any] = about.get("rope_parameters") or {}
    expected: dict[str, object] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "kv_channels": sizes.head,
        "norm_epsilon": about.get("rms_norm_eps"),
        "rotary_base": rope.get("rope_theta"),
        "rotary_percent": 1.0,
        "use_rope_scaling": rope.get("rope_type") == "llama3",
        "rotary_interleaved": False,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "apply_layernorm_1p": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": not sizes.tied,
        "num_experts": sizes.experts or None,
    }
    if sizes.kv_heads != sizes.heads:
        expected |= {"num_query_groups": sizes.kv_heads, "group_query_attention": True}
    return {name: value for name, value in expected.items() if value is not None}
