"""The checkpoint-N folders of transformers' Trainer (and TRL): weights, AdamW's state, and step."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.formats.content import Content, Source
from cairn.checkpoint.layout import find_tensors
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step import MODEL, OPTIMIZER
from cairn.run.files import read_json

STATE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.pt"
KINDS = {"step", "exp_avg", "exp_avg_sq"}
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""What Trainer finds in the names of weights without weight decay (`Trainer.get_decay_parameter_names`)."""
LEFT_OUT = {
    "scheduler.pt": "Cairn's learning rate depends on the step alone: give it the same schedule",
    "rng_state": "Cairn seeds every draw anew, from the run's seed and the step",
    "training_args.bin": "it is a pickle of classes, which is never loaded",
    "scaler.pt": "Cairn needs no loss scaling",
}


@dataclass(frozen=True)
class TrainerState:
    """What is read of trainer_state.json."""

    global_step: int
    num_input_tokens_seen: int = 0


class HuggingFaceTrainer:
    """Trainer's folder on one process, or of data-parallel ones; not that of FSDP or DeepSpeed."""

    def detect(self, source: Path) -> bool:
        """Whether `source` is a folder with a trainer_state.json."""
        return (source / STATE).exists()

    def read(self, source: Path, model: Path | None = None) -> Content:
        """Weights, AdamW's state by name, the step, and the settings that the optimiser's groups have.

        Raises:
            FileNotFoundError: a file is missing.
            Damaged: a file is invalid, or would execute code.
            CheckpointError: the optimiser is not AdamW, or its state does not fit the model.
        """
        progress = read_json(source / STATE, TrainerState)
        if progress is None:
            raise FileNotFoundError(2, "no such file", str(source / STATE))
        state, settings = _read_optimizer(source)
        left_out = [
            f"{path.name}: {why}"
            for path in sorted(source.iterdir())
            for name, why in LEFT_OUT.items()
            if path.name.startswith(name)
        ]
        return Content(
            {MODEL: find_tensors(source, "model"), OPTIMIZER: state},
            model=model or source,
            step=progress.global_step,
            tokens=progress.num_input_tokens_seen or None,
            optimizer="AdamW",
            settings=settings,
            left_out=(*left_out, "the position in the data: Cairn begins the data anew, in its own order"),
        )


def _read_optimizer(source: Path) -> tuple[dict[str, Source], dict[str, Any]]:
    """AdamW's state by transformers' names, and the settings in its groups."""
    from cairn.checkpoint.formats.pickled import held, load_pickled

    path = source / OPTIMIZER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{source}: has no {OPTIMIZER_FILE}; its weights alone are imported with --format hf"
        )
    content = load_pickled(path)
    try:
        groups, states = content["param_groups"], content["state"]
        numbers = [number for group in groups for number in group["params"]]
        settings = _settings(groups)
        kinds = {kind for state in states.values() for kind in state}
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path}: holds no state of an optimiser ({error!r})") from None
    if kinds != KINDS:
        raise CheckpointError(f"{path}: has {', '.join(sorted(map(str, kinds)))}, not the state of AdamW")
    order = _order(source, [len(group["params"]) for group in groups])
    if len(order) != len(numbers) or set(numbers) != set(states):
        raise CheckpointError(
            f"{path}: has the state of {len(states)} of {len(numbers)} weights, and the model in config.json "
            f"has {len(order)}; all weights must have been trained"
        )
    tensors: dict[str, Source] = {}
    for number, (name, shape) in zip(numbers, order.items(), strict=True):
        for kind, value in sorted(states[number].items()):
            tensor = held(f"{name}.{kind}", value, path)
            if kind != "step" and tensor.spec.shape != shape:
                raise CheckpointError(
                    f"{path}: the state of weight {number} has shape {list(tensor.spec.shape)}, and {name}, "
                    f"which should be that, has {list(shape)}"
                )
            tensors[f"{name}.{kind}"] = tensor
    return tensors, settings


def _order(source: Path, sizes: list[int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name, in the order of Trainer's optimiser: with weight decay first."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.trainer_pt_utils import get_parameter_names

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    model.tie_weights()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    decay = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    ordered = [name for name in shapes if name in decay] + [name for name in shapes if name not in decay]
    if len(sizes) != 2 or sizes[0] != sum(name in decay for name in shapes):
        raise CheckpointError(
            f"{source / OPTIMIZER_FILE}: has groups of {sizes} weights; Trainer makes one with weight decay, "
            f"here of {sum(name in decay for name in shapes)}, and one without, of the rest"
        )
    return {name: shapes[name] for name in ordered}


def _settings(groups: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that groups of AdamW have; the rate is that at the schedule's top."""
    first = groups[0]
    return {
        "optimizer.lr": float(first.get("initial_lr", first["lr"])),
        "optimizer.betas": [float(beta) for beta in first["betas"]],
        "optimizer.eps": float(first["eps"]),
        "optimizer.weight_decay": float(first["weight_decay"]),
    }
