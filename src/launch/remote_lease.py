"""How an attempt takes the remote prefix of its run, before anything of the run is touched."""

import secrets

from cairn.config.kinds import RunConfig
from cairn.remote import Objects, RemoteStore
from cairn.run.attempt import Attempt


def reserve_number(config: RunConfig, run_id: str, token: str, least: int) -> int:
    """The number of the attempt that begins: at least `least`, and no other attempt's, on whichever machine.

    Raises:
        UsageError: the remote prefix belongs to another run.
        RemoteError: the object store refuses or fails.
    """
    remote = _remote(config)
    return remote.reserve(run_id, token, least) if remote else least


def claim(config: RunConfig, attempt: Attempt, step: int) -> None:
    """Take the remote prefix for this attempt, so that no other run, and no older attempt, writes there.

    Only then are the steps after `step` uncommitted, which is the run's own step that the attempt starts
    from: they are the run's own, of a way that it has left, or of an attempt that has lost the prefix.

    Raises:
        UsageError: it belongs to another run, or to a newer attempt.
        RemoteError: the object store refuses or fails.
    """
    if remote := _remote(config):
        noted = {"number": attempt.number, "branch": attempt.branch, "command": attempt.command}
        remote.claim(attempt.run_id, attempt.owner, noted)
        name = f"after_step_{step}_{secrets.token_hex(4)}"
        if left := remote.set_aside_after(step, name):
            steps = ", ".join(map(str, left))
            print(f"the remote checkpoints {steps} are set aside: {remote}/abandoned/{name}", flush=True)


def _remote(config: RunConfig) -> RemoteStore | None:
    """The run's remote store, if it has one."""
    if config.ckpt is None or config.ckpt.remote is None:
        return None
    return RemoteStore(Objects(config.ckpt.remote))
