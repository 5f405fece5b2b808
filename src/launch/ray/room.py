# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Room for a run's ranks in its Ray cluster: how much there is, and waiting for nodes that join it later."""

import math
import time
from collections.abc import Callable, Mapping

import ray
from ray._private.state import state as ray_state

from cairn.config.trainer import TrainerBase
from cairn.run.exits import RoleFailed
from cairn.run.machine import this_machine
from cairn.run.waiting import Patience

POLL_SECONDS = 0.5


def resources() -> Mapping[str, float]:
    """What the cluster has, or can grow to if it starts nodes by itself."""
    there = ray.cluster_resources()
    most = ray_state.get_max_resources_from_cluster_config() or {}
    return {name: max(there.get(name, 0), most.get(name, 0)) for name in {*there, *most}}


def wait_for_room(config: TrainerBase, tell: Callable[[str], None], *, on_gpus: bool | None) -> int:
    """Wait until the cluster has a CPU for each rank and, if they compute on GPUs, a GPU.

    A given cluster has `ray.start_timeout` for nodes that are still starting, or take the place of lost ones.

    Args:
        tell: called with what is missing, whenever that changes.
        on_gpus: whether the ranks compute on GPUs; None: if the cluster has any. It must have some if this
            machine has.

    Returns:
        The GPUs of each rank, 1 or 0.

    Raises:
        RoleFailed: there is not enough room in time. That may pass, so it is no bad usage.
    """
    given = config.ray.address
    patience = Patience(config.ray.start_timeout if given else 0)
    told = ""
    while True:
        there = resources()
        cpus, gpus = there.get("CPU", 0), there.get("GPU", 0)
        undecided = on_gpus is None and not gpus
        each = int(bool(gpus) if on_gpus is None else on_gpus)
        room = int(min(cpus, gpus if each else math.inf))
        hidden = bool(given) and undecided and this_machine().has_gpus
        if room >= config.ranks and not hidden:
            return each
        where = f"the Ray cluster{f' at {given}' if given else ''} has {cpus:g} CPUs and {gpus:g} GPUs"
        if hidden:
            missing = f"{where}, though this machine has GPUs"
        else:
            missing = f"{where}, and workers {config.ranks} take a CPU{' and a GPU' if each else ''} each"
        if patience.over:
            break
        if missing != told:
            tell(
                f"{missing}: waiting for nodes, for up to {config.ray.start_timeout:g} s (ray.start_timeout)"
            )
            told = missing
        time.sleep(POLL_SECONDS)
    if hidden:
        remedy = "start its nodes with `ray start --num-gpus`, or train on CPUs with gpus 0"
    else:
        remedy = f"add nodes, raise ray.start_timeout{f', or lower workers to {room}' if room else ''}"
    raise RoleFailed(f"{missing}: {remedy}")
