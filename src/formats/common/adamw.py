"""AdamW's state and settings, as torch's optimiser and programs that use it store them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.config.optimizer import SchedulerConfig

# Values from a pickle have no types until they are checked.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false


MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = (*MOMENTS, "step")
"""The state of one weight."""
SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
"""What is read of a group of weights."""
MAX_STEPS = 1 << 24
"""Steps of an optimiser, which counts them in float32."""


def settings_of(groups: Iterable[Mapping[str, Any]], where: object) -> dict[str, Any]:
    """The settings of the run: those of the group with the largest weight decay.

    The learning rate is that at the schedule's top, where a schedule has written it down.

    Args:
        where: names the source in the error.

    Raises:
        CheckpointError: the optimiser is Adam with L2 regularisation.
        Damaged: a setting is no number, or none that AdamW takes.
    """
    groups = list(groups)
    for known in groups:
        _check(known, where)
    group = max(groups, key=lambda found: found.get("weight_decay") or 0.0, default=None)
    if group is None:
        return {}
    if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
        raise CheckpointError(f"{where}: the optimiser is Adam with L2 decay; Cairn has AdamW only")
    settings = {
        "optimizer.lr": group.get("initial_lr", group.get("lr")),
        "optimizer.betas": group.get("betas"),
        "optimizer.eps": group.get("eps"),
        "optimizer.weight_decay": group.get("weight_decay"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _check(group: Mapping[str, Any], where: object) -> None:
    """Check the numbers in a group of weights."""
    for name in ("lr", "initial_lr", "eps", "weight_decay"):
        if (value := group.get(name)) is not None and not (_is_number(value) and value >= 0):
            raise Damaged(f"{where}: the optimiser's {name} is {value!r}")
    betas = group.get("betas")
    if betas is not None and not (
        isinstance(betas, (list, tuple))
        and len(betas) == 2
        and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)
    ):
        raise Damaged(f"{where}: the optimiser's betas are {betas!r}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # pyright: ignore[reportArgumentType]


def whole_steps(value: object, where: object) -> int:
    """A number of steps, which programs keep as a number of any type.

    Raises:
        Damaged: it is none, or beyond MAX_STEPS.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < MAX_STEPS or value != int(value):
        raise Damaged(f"{where}: the optimiser's step is {value!r}, which is no whole number")
    return int(value)


# The learning rate with which another program goes on.


def rate_of(settings: Mapping[str, Any], step: int) -> float:
    """The learning rate of a step; that of a constant schedule, if the run does not say which it had.

    Args:
        settings: those of the run, with `optimizer.lr`.

    Raises:
        CheckpointError: they don't say where the schedule ends.
    """
    names = ("type", "warmup_steps", "min_lr_ratio")
    known = {name: settings[f"scheduler.{name}"] for name in names if f"scheduler.{name}" in settings}
    schedule = SchedulerConfig(**known)
    end = settings.get("scheduler.steps")
    if end is None and schedule.type != "constant":
        raise CheckpointError(f"the step does not say where its {schedule.type} schedule ends")
    return schedule.rate(step, float(settings["optimizer.lr"]), int(end or 0))
