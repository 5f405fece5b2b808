"""AdamW's state and settings, as torch's optimiser and programs that use it store them."""

from collections.abc import Iterable, Mapping
from typing import Any

from cairn.checkpoint.manifest import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""The state of one weight."""
SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
"""What is read of a group of weights."""


def settings_of(groups: Iterable[Mapping[str, Any]], where: object) -> dict[str, Any]:
    """The settings of the run: those of the group with the largest weight decay.

    The learning rate is that at the schedule's top, where a schedule has written it down.

    Args:
        where: names the source in the error.

    Raises:
        CheckpointError: the optimiser is Adam with L2 regularisation.
    """
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
