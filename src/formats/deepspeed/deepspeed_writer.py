"""Writes universal checkpoints of DeepSpeed: a folder for each parameter, and the state of the engine."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.base import Content, WriteOptions
from cairn.formats.common.adamw import MOMENTS, rate_of
from cairn.formats.common.match_layout import Outgoing, outgoing_weights, refuse
from cairn.formats.deepspeed.deepspeed_files import LATEST, UNIVERSAL
from cairn.formats.deepspeed.deepspeed_state import MASTER, OPTIMIZER_STATE
from cairn.formats.huggingface.hf_trainer_writer import write_progress
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.formats.torch_file.torch_writer import save

VERSION = "0.19.8"
"""The version of DeepSpeed whose files these are; its loader asks for one."""
MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The engine's state, under the names that ZeRO 1 and 2, and ZeRO 3, look for."""
GROUPS = 64
"""Groups of parameters that are described: the loader leaves those out that come after the last one here."""
TRAINER_GROUPS = 2
"""Groups of parameters that Trainer makes: with weight decay, and without."""


def write(content: Content, folder: Path, options: WriteOptions) -> None:
    """Write `latest_universal` and the folder that it names, beside config.json and tokenizer.

    Trainer resumes from it as from its own `checkpoint-N`; its files are there, too.

    Raises:
        CheckpointError: there is no state of AdamW, or something in it has no counterpart.
        OSError: a file can't be written.
    """
    state = content.tensors.get(OPTIMIZER)
    if content.model is None or content.step is None or not state:
        raise CheckpointError(
            "the step holds weights only: export it with --format hf, which programs begin from"
        )
    weights, tied = outgoing_weights(content)
    _check(weights, state, content.model)
    copy_companions(content, folder, None)
    tag = f"global_step{content.step}"
    inner = folder / tag
    (inner / UNIVERSAL).mkdir(parents=True)
    step = _step(state, weights)
    for name, weight in weights.items():
        own = inner / UNIVERSAL / name
        own.mkdir()
        moments = {kind: Outgoing(state[f"{name}.{kind}"]) for kind in MOMENTS}
        for kind, tensor in {MASTER: weight, **moments}.items():
            save(own / f"{kind}.pt", {"param": tensor}, options.on_bytes)
        torch.save(step, own / "step.pt")
    shapes = {name: torch.Size(weight.shape) for name, weight in weights.items()}
    torch.save(_optimizer_state(content, step), inner / UNIVERSAL / OPTIMIZER_STATE)
    for name in MODEL_STATES:
        torch.save(_model_state(content, content.step, shapes, tied), inner / name)
    (folder / LATEST[1]).write_text(tag)
    write_progress(content, folder, TRAINER_GROUPS, rate_of(content.settings, content.step + 1))


def _check(weights: Mapping[str, Outgoing], state: Mapping[str, TensorSource], where: Path) -> None:
    """Check that there are masters in full precision, and the state of AdamW for each.

    Raises:
        CheckpointError: there are others.
    """
    halves = [name for name, weight in weights.items() if weight.dtype != torch.float32]
    refuse(halves, where, "DeepSpeed's checkpoints hold float32 (say --dtype float32), and these are not")
    fixed = [name for name in weights if f"{name}.{MOMENTS[0]}" not in state]
    refuse(fixed, where, "DeepSpeed restores what its optimiser trains, and these are buffers or not trained")
    wanted = {f"{name}.{kind}" for name in weights for kind in (*MOMENTS, "step")}
    refuse(sorted(wanted ^ state.keys()), where, "the optimiser's state is not AdamW's of every weight")


def _step(state: Mapping[str, TensorSource], weights: Collection[str]) -> torch.Tensor:
    """The step of AdamW, float32 of shape []."""
    steps = {name: torch.empty(1, dtype=torch.float32) for name in weights}
    for name, value in steps.items():
        state[f"{name}.step"].fill(0, value)
    if len({value.item() for value in steps.values()}) > 1:
        raise CheckpointError("AdamW is at different steps for some weights; DeepSpeed has one step for all")
    return next(iter(steps.values())).reshape(())


def _optimizer_state(content: Content, step: torch.Tensor) -> dict[str, Any]:
    """What the parameters have in common, as loaders of ZeRO 1 and 2, and of ZeRO 3, look for it.

    Weight decay is left out: it is that of the program's groups, which ZeRO 3 would take from the first one.
    """
    settings = content.settings
    if missing := [key for key in ("lr", "betas", "eps") if settings.get(f"optimizer.{key}") is None]:
        raise CheckpointError(f"the step does not say its optimizer.{missing[0]}")
    group = {
        "lr": rate_of(settings, (content.step or 0) + 1),
        "initial_lr": float(settings["optimizer.lr"]),
        "betas": tuple(float(beta) for beta in settings["optimizer.betas"]),
        "eps": float(settings["optimizer.eps"]),
    }
    groups = [{**group, "params": [0]} for _ in range(GROUPS)]
    return {
        "ds_version": VERSION,
        "zero_stage": 0,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
    }


def _model_state(
    content: Content, step: int, shapes: Mapping[str, torch.Size], tied: Mapping[str, str]
) -> dict[str, Any]:
    """The state of the engine; it restores the model's values from the folders of the parameters."""
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [dict(shapes)],
        "frozen_param_shapes": None,
        "shared_params": dict(tied),
        "frozen_param_fragments": None,
        "lr_scheduler": _schedule(step),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": content.samples or 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _schedule(step: int) -> dict[str, Any]:
    """How far a schedule is, as DeepSpeed's own ones and torch's LambdaLR keep it."""
    return {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}
