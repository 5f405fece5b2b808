"""The learning rate with which another program goes on."""

from collections.abc import Mapping
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.scheduler import SchedulerConfig


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
