"""Writes the checkpoint-N folder that transformers' Trainer resumes from."""

# torch and transformers are typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerControl, TrainerState

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import OPTIMIZER
from cairn.checkpoint.tensors.source import TensorSource
from cairn.checkpoint.tensors.stream_writer import write_sources
from cairn.formats.base import Content, WriteOptions
from cairn.formats.common.adamw import MOMENTS, rate_of
from cairn.formats.common.adamw import STATE as ADAMW
from cairn.formats.common.match_layout import Outgoing, outgoing_weights, refuse
from cairn.formats.huggingface.hf_trainer_groups import (
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    STATE,
    decaying_otherwise,
    groups_of,
)
from cairn.formats.huggingface.huggingface import copy_companions
from cairn.formats.torch_file import torch_writer


def write(content: Content, folder: Path, options: WriteOptions) -> None:
    """Write weights, AdamW's state, the schedule's position and the step; see `HuggingFaceTrainer.write`.

    Weights have transformers' own names: Trainer puts what it reads into the model under the very names in
    the file, and would leave a mixture's experts out, with no more than a warning, that have the hub's.
    """
    if content.model is None or content.step is None or OPTIMIZER not in content.tensors:
        raise CheckpointError(
            "the step holds weights only or an adapter, and Trainer's checkpoint needs the state of AdamW; "
            "export its weights with --format hf"
        )
    if content.optimizer not in (None, "AdamW"):
        raise CheckpointError(f"the step has the state of {content.optimizer}, and Trainer's would be AdamW")
    decaying, others = groups_of(content.model)
    state = content.tensors[OPTIMIZER]
    names = [*decaying, *others]
    lacking = [f"{name}.{kind}" for name in names for kind in sorted(ADAMW) if f"{name}.{kind}" not in state]
    refuse(lacking, content.model.parent, "the optimiser's state lacks these, which Trainer needs")
    groups, rate = _groups(content, decaying, others)
    copy_companions(content, folder, options.dtype)
    weights, _ = outgoing_weights(content)
    write_sources(
        folder,
        {name: tensor.source for name, tensor in weights.items()},
        "model",
        max_file_bytes=options.max_file_bytes,
        on_bytes=options.on_bytes,
    )
    torch_writer.save(
        folder / OPTIMIZER_FILE,
        {"state": {n: _of_one(name, state) for n, name in enumerate(names)}, "param_groups": groups},
        options.on_bytes,
    )
    write_progress(content, folder, len(groups), rate)


def write_progress(content: Content, folder: Path, groups: int, rate: float) -> None:
    """Write the schedule's position, and the step, as Trainer has them beside any optimiser's state.

    Args:
        content: with a step, and `optimizer.lr` among its settings.
        groups: number of the optimiser's groups. rate: the learning rate of the next step.
    """
    step = content.step or 0
    torch_writer.save(
        folder / SCHEDULER_FILE,
        {
            "base_lrs": [float(content.settings["optimizer.lr"])] * groups,
            "last_epoch": step,
            "_step_count": step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [rate] * groups,
            "lr_lambdas": [{} for _ in range(groups)],
        },
    )
    batch = content.settings.get("data.batch_size")
    progress = TrainerState(
        global_step=step,
        num_input_tokens_seen=content.tokens or 0,
        train_batch_size=batch if isinstance(batch, int) else 1,
        stateful_callbacks=[TrainerControl()],  # pyright: ignore[reportArgumentType] # as Trainer does
    )
    progress.save_to_json(str(folder / STATE))


def _of_one(name: str, state: Mapping[str, TensorSource]) -> dict[str, Outgoing]:
    return {kind: Outgoing(state[f"{name}.{kind}"]) for kind in ("step", *MOMENTS)}


def _groups(
    content: Content, decaying: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]
) -> tuple[list[dict[str, Any]], float]:
    """AdamW's groups as Trainer has them, and the rate of the next step."""
    settings, where = content.settings, content.model
    needed = [f"optimizer.{name}" for name in ("lr", "betas", "eps", "weight_decay")]
    if missing := [name for name in needed if settings.get(name) is None]:
        raise CheckpointError(f"{where}: the step does not say its {', '.join(missing)}, which Trainer needs")
    decay = float(settings["optimizer.weight_decay"])
    if decay:
        what = (
            f"with optimizer.weight_decay = {decay}, Cairn decays matrices, and Trainer all but biases and "
            "norms; they differ in these weights"
        )
        refuse(decaying_otherwise(decaying, others), content.model or Path(), what)
    peak = float(settings["optimizer.lr"])
    rate = rate_of(settings, (content.step or 0) + 1)
    common = {
        "lr": rate,
        "betas": tuple(float(beta) for beta in settings["optimizer.betas"]),
        "eps": float(settings["optimizer.eps"]),
        **{"amsgrad": False, "maximize": False, "foreach": None, "capturable": False},
        **{"differentiable": False, "fused": True, "decoupled_weight_decay": True, "initial_lr": peak},
    }
    numbers = list(range(len(decaying) + len(others)))
    return [
        {"weight_decay": decay, **common, "params": numbers[: len(decaying)]},
        {"weight_decay": 0.0, **common, "params": numbers[len(decaying) :]},
    ], rate
