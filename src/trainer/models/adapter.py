"""A low-rank adapter (`lora`) as what is trained, saved and served."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from cairn.checkpoint.checksums import FileChecksum, merge_checksums
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.saving.unchanged_files import Carried
from cairn.checkpoint.step_folder import ADAPTER, ADAPTER_CONFIG, BASE, BASE_RECORD
from cairn.checkpoint.tensors.placement import Made, Stored, at_places, local_values
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import TrainerBase
from cairn.model.adapters import PREFIX, Base, base_of_adapter, held_base, is_adapter
from cairn.model.described import companion_files
from cairn.model.hub_layout import layout_of, tensors_in_memory
from cairn.run.errors import UsageError
from cairn.run.recipe import base_of
from cairn.run.seeds import derive
from cairn.trainer.backends.tensor import tensor_axis
from cairn.trainer.group import RankGroup
from cairn.trainer.models.lora import NAME, is_adapters, modules_in, peft_config, plain
from cairn.trainer.models.model import build_model, places_in
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer

_OF_EXPERT = re.compile(r"experts\.\d+\.")


class Adapter(Trained):
    """A model whose weights stay as they are, and the adapter in it, which is trained.

    Checkpoints hold the adapter, under the names that PEFT gives its parts, and name the base with its
    checksums. Servers get the weights of the base with the adapter added.
    """

    saves_served = False

    def __init__(
        self, module: PreTrainedModel, optimizer: torch.optim.Optimizer, config: TrainerBase, group: RankGroup
    ):
        """Take a model that `adapt` has prepared; neither its weights nor the adapter's are loaded."""
        super().__init__(module, optimizer, weights_stem=ADAPTER)
        assert config.lora
        self.config = config.lora
        self.seed = config.seed
        self.group = group
        self._base: Base | None = None
        self._found_in: Path | None = None
        self._gathered: dict[str, torch.Tensor] = {}
        """The first matrix of each layer's adapter, whole, since servers last got the policy."""

    @property
    def base(self) -> Base:
        """The model that the adapter is of, once it is read."""
        assert self._base
        return self._base

    def begin(self, folder: Path) -> None:
        """Read the base, and give the adapter its first values, the same on any number of ranks."""
        self.read_base(folder)
        self.draw()

    def draw(self) -> None:
        """Give the adapter its first values: random ones, by the run's seed, and zeros."""
        for name, parameter in self.module.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])  # as nn.Linear's weights, and so in PEFT
                draw = torch.Generator().manual_seed(derive(self.seed, "lora", plain(name)))
                _set(parameter, torch.empty(parameter.shape).uniform_(-bound, bound, generator=draw))
            elif ".lora_B." in name:
                with torch.no_grad():
                    local_values(parameter).zero_()

    def read_base(self, folder: Path, adapter: Path | None = None) -> None:
        """Read the weights of the base in `folder`; all ranks call it.

        Args:
            adapter: the folder of the adapter that goes on; its record must be of this base.

        Raises:
            CheckpointError: it is another base.
        """
        tensors = {plain(name): tensor for name, tensor in self._of_base().items()}
        seen = read_tensors(
            folder, at_places(tensors, places_in(self.module, folder)), "model", rank=self.group.rank
        )
        ours = {path.relative_to(folder).as_posix(): checksum for path, checksum in seen.items()}
        merged: dict[str, FileChecksum] = {}
        for others in self.group.gather_objects(ours):
            merge_checksums(merged, others)
        found = Base.of(base_of(folder), folder, merged)
        saved = base_of_adapter(adapter) if adapter else None
        if adapter and saved:
            saved.check_same(found, adapter)
            of_step = folder == held_base(adapter)
            found = replace(found, name=saved.name, folder=saved.folder if of_step else found.folder)
        self._found_in = folder
        self._base = replace(found, lora=self.config.shape)

    def share_base(self, other: "Adapter") -> None:
        """Take the base of another adapter, whose weights this model computes with."""
        self._found_in = other._found_in
        self._base = replace(other.base, lora=self.config.shape)

    @property
    def layers(self) -> list[str]:
        """The names of the layers that have an adapter."""
        return sorted(name for name, _ in self._layers())

    def loaded(self, folder: Path) -> Mapping[str, Stored]:
        return self.saved()

    def saved(self) -> Mapping[str, Stored]:
        """The adapter, and the modules that are trained in full, by PEFT's names."""
        own = self.trained()
        tensors = tensors_in_memory(self.module)
        return {PREFIX + name.replace(f".{NAME}.", "."): tensors[name] for name in own}

    def carried(self) -> Mapping[str, Carried]:
        """The files of the base, if checkpoints are to hold it."""
        if not self.config.save_base:
            return {}
        assert self._found_in
        weights = {name: Carried(self._found_in / name, entry) for name, entry in self.base.files.items()}
        indexes = {path.name: path for path in sorted(self._found_in.glob("*.safetensors.index.json"))}
        beside = companion_files(self._found_in) | indexes
        others = {name: Carried.of(path) for name, path in beside.items()}
        return {f"{BASE}/{name}": file for name, file in {**others, **weights}.items()}

    def constant(self) -> Collection[str]:
        return ()

    def beside(self) -> Mapping[str, bytes]:
        """PEFT's configuration of the adapter, and the record of its base."""
        kept = modules_in(self.module, self.config)
        peft = peft_config(self.config, self.module, self.layers, kept)
        on_hub = "/" in self.base.name
        peft.base_model_name_or_path = self.base.name if on_hub else self.base.folder
        peft.inference_mode = True
        about = {key: _as_json(value) for key, value in peft.to_dict().items()}
        text = json.dumps(about, indent=2, sort_keys=True) + "\n"
        return {ADAPTER_CONFIG: text.encode(), BASE_RECORD: self.base.to_json()}

    def as_begun(self, folder: Path) -> contextlib.AbstractContextManager[None] | None:
        """That of the base, if all that is trained is the adapter."""
        is_base = self._found_in is not None and folder.absolute() == self._found_in.absolute()
        return self._without_adapter() if is_base and not self.config.modules_to_save else None

    @contextlib.contextmanager
    def _without_adapter(self) -> Iterator[None]:
        # PEFT's own switch, `enable_adapters`, would also change what is trained.
        layers = [layer for _, layer in self._layers()]
        try:
            for layer in layers:
                layer._disable_adapters = True
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """See that each layer with an adapter is called; an adapter of another one would never be trained.

        Such are layers whose weights the model reads itself. Experts may have got no token.

        Raises:
            UsageError: one is not.
        """
        layers = dict(self._layers())
        called: set[str] = set()

        def note(name: str) -> Callable[..., None]:
            return lambda *_: called.add(name)

        hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if idle := [name for name in layers if name not in called and not _OF_EXPERT.search(name)]:
            others = sorted({_end(name) for name in layers} - {_end(name) for name in idle})
            raise UsageError(
                f"lora.targets = {','.join(self.config.targets)}: {type(self.module).__name__} uses the "
                f"weights of {idle[0]} without calling the layer, so an adapter of it would have no effect. "
                f"Others can be adapted: lora.targets = {','.join(others)}"
            )

    def served(self) -> Mapping[str, Stored]:
        """The base's weights with the adapter added, each when it leaves; all ranks call it together."""
        merged: dict[str, torch.Tensor | Made] = {plain(n): tensor for n, tensor in self._of_base().items()}
        with torch.no_grad():
            for name, layer in self._layers():
                a = layer.lora_A[NAME].weight
                self._gathered[name] = a.full_tensor() if isinstance(a, DTensor) else a
                weight = layer.base_layer.weight
                merged[f"{name}.weight"] = Made(weight, torch.float32, partial(self._merge, name, layer))
        return at_places(merged, layout_of(self.module).places)

    @torch.no_grad()
    def _merge(self, name: str, layer: Any) -> torch.Tensor:
        """This rank's part of a layer's weight with its adapter added: float32."""
        weight, first = local_values(layer.base_layer.weight).float(), self._gathered[name]
        if weight.shape[1] != first.shape[1]:  # of rows, these columns
            axis = tensor_axis(self.module)
            first = first.chunk(axis.size, 1)[axis.rank]
        return torch.addmm(weight, local_values(layer.lora_B[NAME].weight), first, alpha=layer.scaling[NAME])

    def _of_base(self) -> dict[str, torch.Tensor]:
        return {n: tensor for n, tensor in tensors_in_memory(self.module).items() if not is_adapters(n)}

    def _layers(self) -> Iterable[tuple[str, Any]]:
        """The layers that have an adapter, by name."""
        from peft.tuners.lora import LoraLayer

        return ((name, m) for name, m in self.module.named_modules() if isinstance(m, LoraLayer))


class SentAdapter(Adapter):
    """An adapter that servers get as checkpoints hold it; they add it to the base themselves."""

    saves_served = True
    served_stem = "adapter_model"

    def served(self) -> Mapping[str, Stored]:
        return self.saved()

    def served_as(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """As it is: servers round once, when it is merged."""
        return {}

    def served_with(self, dtype: torch.dtype) -> Mapping[str, bytes]:
        return self.beside()


def adapter_beside(other: Adapter, folder: Path, config: TrainerBase, group: RankGroup) -> Adapter:
    """A further adapter of the base that `other` has in memory; its own values are not loaded.

    Args:
        folder: of the base.

    Raises:
        UsageError: the base is sharded.
    """
    module = build_model(folder, config, group, beside=other.module)
    adapter = Adapter(module, make_optimizer(module.named_parameters(), config.optimizer), config, group)
    adapter.share_base(other)
    return adapter


def make_adapter(folder: Path, config: TrainerBase, group: RankGroup) -> Adapter:
    """The policy of a run with `[lora]`; `folder` is the base, or the adapter that the run goes on with.

    Raises:
        CheckpointError: the adapter's base is not there, or is another model.
    """
    module = build_model(folder, config, group)
    kind = SentAdapter if config.sends_adapter else Adapter
    policy = kind(module, make_optimizer(module.named_parameters(), config.optimizer), config, group)
    if is_adapter(folder):
        assert config.lora
        base = base_of_adapter(folder)
        if base is None:
            raise CheckpointError(f"{folder}: has no {BASE_RECORD}, so the adapter's base is unknown")
        # A run whose steps do not hold the base needs it where they will say that it is.
        elsewhere = config.lora.base or (None if config.lora.save_base else base.folder)
        policy.read_base(base.find(folder, elsewhere), folder)
    return policy


def make_policy(folder: Path, config: TrainerBase, group: RankGroup) -> Trained:
    """The policy that the Hugging Face directory `folder` describes, its weights not yet loaded."""
    if config.lora:
        return make_adapter(folder, config, group)
    return POLICIES[group.backend](build_model(folder, config, group), config)


def _whole(module: PreTrainedModel, config: TrainerBase) -> Trained:
    return Trained(module, make_optimizer(module.named_parameters(), config.optimizer))


def _megatron(module: PreTrainedModel, config: TrainerBase) -> Trained:
    from cairn.trainer.models.megatron_policy import MegatronPolicy  # needs megatron-core

    return MegatronPolicy(module, config)


POLICIES: dict[str, Callable[[PreTrainedModel, TrainerBase], Trained]] = {
    "fsdp2": _whole,
    "megatron": _megatron,
}
"""What makes a policy of what a backend has laid out, by the backend's name."""


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _as_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set | frozenset) else value


def _set(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter, or this rank's shard of it, its part of `values`."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            values = distribute_tensor(
                values.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
            )
        local_values(parameter).copy_(local_values(values))
