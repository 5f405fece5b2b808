# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The Ray cluster of the trainer's ranks: joins or starts it, and waits until it is large enough."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import ray
from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._private.state import state as ray_state
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # compiled
from ray.exceptions import AuthenticationError, RpcError

from cairn.config.trainer import TrainerBase
from cairn.launch.ray import local as local_ray
from cairn.run.errors import UsageError
from cairn.run.exits import RayFailed, RoleFailed
from cairn.run.machine import gpu_names, this_machine
from cairn.run.signals import stop_signals_blocked
from cairn.run.waiting import Patience

SPIN_COUNT = 5000
"""GOMP_SPINCOUNT: an idle OpenMP thread spins for about 60 microseconds instead of milliseconds."""


def cluster_ranks(config: TrainerBase) -> int:
    """The number of ranks in the cluster: `workers`, or as many as there are GPUs; on CPUs one."""
    return config.workers or int(resources().get("GPU", 0)) or 1


def computes_on_gpus(config: TrainerBase) -> bool:
    """Whether the ranks compute on GPUs, as the launcher has settled their settings for.

    It has written `gpus` 0 where a given cluster has none, and which ones they are on this machine.
    """
    return config.gpus != "0" if config.ray.address else bool(gpu_names(config.gpus or "0"))


def start_ray(config: TrainerBase) -> None:
    """Join the cluster at `ray.address`, or start one on this machine.

    Raises:
        RoleFailed: no cluster answers at `ray.address`.
        UsageError: the cluster there is joined with a token that this user does not have.
        RayFailed: the local cluster does not start.
    """
    if config.ray.address:
        try:
            _check_address(config.ray.address, config.ray.start_timeout)
            join_with_token(config.ray.address)
            ray.init(config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, OSError, ValueError, RpcError) as error:
            raise RoleFailed(f"no Ray cluster at --ray.address {config.ray.address}: {error}") from None
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if config.beside_servers and "OMP_WAIT_POLICY" not in os.environ:
        # Ranks and servers share the cores; a spinning thread would block a core.
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    with stop_signals_blocked():  # inherited by Ray's processes, and by workers until they train
        gpus = len(gpu_names(config.gpus or "0") or ())
        _start_local(config.ranks, gpus, config.ray.start_timeout)


def _start_local(cpus: int, gpus: int, seconds: float) -> None:
    """Start a cluster with `cpus` CPUs and the first `gpus` visible GPUs; it ends with this process.

    Raises:
        RayFailed: it did not start. A busy machine is a common cause, so a restart may well succeed.
    """
    try:
        local_ray.start(cpus, gpus, seconds)
    except Exception as error:  # Ray raises plain exceptions
        message = " ".join(str(error).split())
        raise RayFailed(f"Ray did not start on this machine: {message}") from error


def end_ray(config: TrainerBase) -> None:
    """Leave the cluster. A local one ends with this process, which must exit right after.

    Its processes ignore stop signals, so shutting them down in order would take a second each.
    """
    if config.ray.address:
        ray.shutdown()


def _check_address(address: str, seconds: float) -> None:
    """Check within `seconds` that something listens at the address; Ray itself would wait for minutes.

    Raises:
        OSError: nothing listens there.
    """
    host, _, port = address.rpartition("//")[2].partition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=seconds).close()


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
    reported = ""
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
        if missing != reported:
            tell(
                f"{missing}: waiting for nodes, for up to {config.ray.start_timeout:g} s (ray.start_timeout)"
            )
            reported = missing
        time.sleep(POLL_SECONDS)
    if hidden:
        remedy = "start its nodes with `ray start --num-gpus`, or train on CPUs with gpus 0"
    else:
        remedy = f"add nodes, raise ray.start_timeout{f', or lower workers to {room}' if room else ''}"
    raise RoleFailed(f"{missing}: {remedy}")


TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def join_with_token(address: str) -> None:
    """See that the cluster at `address` lets this process in, with this user's token if it asks for one.

    A cluster that asks for none gets none: its processes would not send it back, and Ray would refuse them.

    Raises:
        UsageError: it wants a token, and there is none here, or another one; the message names where tokens
            come from.
        OSError: there is no cluster (`auto`).
    """
    if address.startswith("ray://"):
        return
    control_server = canonicalize_bootstrap_address_or_die(address)
    if _lets_in(control_server):
        return
    mode = os.environ.get(AUTH_MODE_ENV_VAR)
    found = mode is None and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if found and _lets_in(control_server):
        return
    if mode not in (None, "token"):
        problem = f"{AUTH_MODE_ENV_VAR}={mode} forbids to send one: unset it"
    elif found or mode == "token":
        problem = f"it is not the one in {_source()}"
    else:
        problem = "there is none here"
    raise UsageError(
        f"--ray.address {address}: this Ray cluster is joined with a token, and {problem}. "
        "`ray get-auth-token` prints it on the cluster's head node; it belongs into ~/.ray/auth_token on "
        f"every node, or into a file that {TOKEN_PATH} names, or into {TOKEN}"
    )


def _lets_in(control_server: str) -> bool:
    try:
        return bool(GcsClient(address=control_server).cluster_id)
    except AuthenticationError:
        return False


def _source() -> str:
    """Where Ray takes the token from."""
    if os.environ.get(TOKEN):
        return TOKEN
    return os.environ.get(TOKEN_PATH) or str(Path.home() / ".ray" / "auth_token")
