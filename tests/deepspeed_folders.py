"""Writes folders as DeepSpeed's engine does, without it; tests/integration has the real ones.

Its classes are pickled by name only, so classes of this module stand for them.
"""

import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cairn.trainer.models.trained import Trained


class LossScaler:
    """Has no state that matters."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class ZeroStageEnum(IntEnum):
    """The stage."""

    optimizer_states = 1
    gradients = 2
    weights = 3


@dataclass
class fragment_address:
    """Where a parameter is in a flat tensor."""

    numel: int
    start: int


PLACES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def named_as_deepspeeds() -> Iterator[None]:
    """While it lasts, the classes above are pickled under DeepSpeed's names."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, place in PLACES.items():
            parts = place.split(".")
            for count in range(1, len(parts) + 1):
                name = ".".join(parts[:count])
                patch.setitem(sys.modules, name, ModuleType(name))
            setattr(sys.modules[place], kind.__name__, kind)
            patch.setattr(kind, "__module__", place)
        yield


@dataclass
class Folder:
    """What the engine of each rank holds: by file, what `torch.save` is given."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def optim(self, rank: int = 0) -> dict[str, Any]:
        """The optimiser's state of a rank."""
        return next(f for n, f in self.files.items() if f"_rank_{rank}_" in n and "optim" in n)[
            "optimizer_state_dict"
        ]

    def model(self) -> dict[str, Any]:
        """The model's state of the first rank."""
        return next(file for name, file in self.files.items() if "model" in name)

    def write(self, folder: Path, tag: str = "global_step2") -> Path:
        """Write them, and `latest` beside them; returns the folder with `latest`."""
        (folder / tag).mkdir(parents=True, exist_ok=True)
        with named_as_deepspeeds():
            for name, content in self.files.items():
                torch.save(content, folder / tag / name)
        (folder / "latest").write_text(tag)
        return folder


def groups_of(trained: Trained) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """The parameters that each group of the optimiser trains, by name."""
    names = {id(parameter): name for name, parameter in trained.module.named_parameters()}
    return [
        [(names[id(parameter)], parameter) for parameter in group["params"]]
        for group in trained.optimizer.param_groups
    ]


def flats(trained: Trained, kind: str, group: list[tuple[str, torch.nn.Parameter]]) -> list[torch.Tensor]:
    """The values of a group's parameters, each flat: `fp32`, or a moment."""
    state = trained.optimizer.state
    return [(p.detach() if kind == "fp32" else state[p][kind]).reshape(-1).clone() for _, p in group]


def zero_folder(trained: Trained, stage: int, ranks: int, aligned: int = 1) -> Folder:
    """What ZeRO saves after two steps.

    Args:
        aligned: parameters of ZeRO 1 and 2 begin at multiples of this.
    """
    groups = groups_of(trained)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    state: dict[str, Any] = {
        "buffer_names": [name for name, _ in trained.module.named_buffers()],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, p.shape) for name, p in group) for group in groups],
        "frozen_param_shapes": OrderedDict() if stage > 1 else None,
        "shared_params": dict(trained.module.all_tied_weights_keys),
        "frozen_param_fragments": OrderedDict() if stage > 1 else None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 2,
        "global_samples": 4,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": "0.19.8",
    }
    whole = trained.module.state_dict()
    folder = Folder()
    make = zero_3 if stage == 3 else zero_12
    for rank in range(ranks):
        held = make(trained, groups, rank, ranks, aligned)
        held |= {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
        held["zero_stage"] = ZeroStageEnum(stage)
        content = {"optimizer_state_dict": held, "ds_config": config, "ds_version": "0.19.8"}
        folder.files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = content
        if stage == 3:
            blank = OrderedDict((name, torch.empty(0)) for name in whole)
            content = {"module": blank, **copy.deepcopy(state)}
            folder.files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = content
    if stage < 3:
        folder.files["mp_rank_00_model_states.pt"] = {"module": whole, **state}
    return folder


def settings_of(trained: Trained, count: int) -> list[dict[str, Any]]:
    """The optimiser's groups as its `state_dict` has them, each of one flat tensor."""
    found = [{k: v for k, v in g.items() if k != "params"} for g in trained.optimizer.param_groups]
    return [{**own, "params": [number]} for number, own in enumerate(found[:count])]


def zero_12(trained: Trained, groups: list[Any], rank: int, ranks: int, aligned: int) -> dict[str, Any]:
    """A rank's state in ZeRO 1 and 2: an equal part of all parameters, one after the other."""
    masters, paddings, between, mappings = [], [], [], []
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, group in enumerate(groups):
        ends = [parameter.numel() for _, parameter in group]
        gaps = [-n % aligned for n in ends[:-1]] + [0]
        total = sum(ends) + sum(gaps)
        part = -(-total // (2 * ranks)) * 2
        cut = slice(rank * part, (rank + 1) * part)
        parts: dict[str, torch.Tensor] = {}
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            pieces = zip(flats(trained, kind, group), gaps, strict=True)
            flat = torch.cat([torch.nn.functional.pad(piece, (0, gap)) for piece, gap in pieces])
            parts[kind] = torch.nn.functional.pad(flat, (0, ranks * part - total))[cut].clone()
        padding = min(max((rank + 1) * part - total, 0), part)
        masters.append(parts.pop("fp32")[: part - padding].clone())
        paddings.append(padding)
        between.append(gaps)
        state[number] = {"step": torch.tensor(2.0), **parts}
        mapping = OrderedDict()
        begin = 0
        for (name, parameter), gap in zip(group, gaps, strict=True):
            low, high = max(begin, cut.start), min(begin + parameter.numel(), cut.stop)
            if low < high:
                mapping[name] = fragment_address(high - low, low - cut.start)
            begin += parameter.numel() + gap
        mappings.append(mapping)
    return {
        "clip_grad": 1.0,
        "base_optimizer_state": {"state": state, "param_groups": settings_of(trained, len(groups))},
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings,
        "param_alignment_paddings": between,
        "partition_count": [ranks] * len(groups),
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }


def zero_3(trained: Trained, groups: list[Any], rank: int, ranks: int, aligned: int) -> dict[str, Any]:
    """A rank's state in ZeRO 3: an equal part of each parameter, padded, one after the other."""
    masters: list[torch.Tensor] = []
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, group in enumerate(groups):
        parts: dict[str, torch.Tensor] = {}
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            own = []
            for flat in flats(trained, kind, group):
                part = math.ceil(flat.numel() / ranks)
                own.append(
                    torch.nn.functional.pad(flat, (0, ranks * part - flat.numel()))[rank * part :][:part]
                )
            parts[kind] = torch.cat(own)
        masters.append(torch.nn.Parameter(parts.pop("fp32")))
        state[number] = {"step": torch.tensor(2.0), **parts}
    settings = settings_of(trained, len(groups))
    return {
        "partition_count": ranks,
        "optimizer_state_dict": {"state": state, "param_groups": settings},
        "fp32_flat_groups": masters,
    }


def truth(trained: Trained) -> Mapping[str, torch.Tensor]:
    """Weights and moments by name."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in trained.module.named_parameters():
        found[name] = parameter.detach()
        for kind, value in trained.optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = value
    return found
