"""Faults on demand, to see what a crash at the worst moment leaves behind.

`CAIRN_FAULT=save.before_fsync:kill` kills the process that reaches the point of that name; `:ENOSPC`, `:EIO`
and `:EACCES` make the call fail there as the disk would. `save.write:kill@3` strikes the third time that a
process reaches the point, `save.write:kill@3#1` only rank 1 of the trainer, or its writer. Faults are
separated by commas. A restarted role inherits the setting. With
CAIRN_FAULT_ONCE=DIR a process fires a fault only if it can delete the file DIR/FAULT, such as
DIR/save.write:kill@3, so that each fault fires once across all processes.
"""

import errno
import os
import re
import signal

POINTS = {
    "trainer.batch_read": "each rank of an RL trainer, when it has read a step's batch",
    "trainer.rewind": "each rank, when a return to a checkpoint is on record, before that is read",
    "reference.written": "trainer rank 0, when a file of a reference's logprobs is durable",
    "publish.begin": "each rank, before a policy version is written",
    "publish.before_announce": "trainer rank 0, when a policy version is written and nobody knows of it yet",
    "publish.announced": "trainer rank 0, right after a policy version was announced",
    "policy.stored_files": "trainer rank 0, when an object store has a version's files, but not their list",
    "orchestrator.finished_group": "orchestrator, when the last answer to a prompt is in the ledger",
    "orchestrator.turn": "orchestrator, when an answer to a program, or a piece of it, is in the ledger",
    "orchestrator.call": "orchestrator, when what the world answered to a program is in the ledger",
    "orchestrator.before_ship": "orchestrator, before a batch's file is written",
    "orchestrator.kept_rollouts": "orchestrator, when a batch's rollouts are written, before the batch",
    "orchestrator.shipped": "orchestrator, when a batch's file is written and the ledger does not say so yet",
    "orchestrator.before_push": "orchestrator, before a policy version goes to the servers",
    "save.begin": "trainer rank 0, before the step's folder is made",
    "save.copy": "each rank, while it copies its state",
    "save.write": "each rank's writer, before each block",
    "save.before_fsync": "each rank's writer, when all is written",
    "save.before_part": "each rank's writer, when all is durable",
    "memory.begin": "each rank, when the older step in memory is no longer whole",
    "memory.copied": "each rank, when its state is in memory and nothing says so yet",
    "memory.sealed": "each rank, when its part of a step in memory is whole",
    "peer.sending": "the first rank of each of several nodes, before its node's part goes to another one",
    "peer.sent": "the first rank of each of several nodes, when its node's part is on another one, too",
    "orchestrator.before_part": "orchestrator, before its files are written",
    "commit.before_manifest": "trainer rank 0, when all parts have arrived",
    "commit.manifest_written": "trainer rank 0, when the manifest is durable under its temporary name",
    "commit.done": "trainer rank 0, right after the manifest was renamed into place",
    "branches.before_record": "`rl --branch`, before it is recorded which branches go on, or that one ends",
    "branches.recorded": "`rl --branch`, when that is recorded, and before anything follows from it",
    "service.received": "`service`, when a call is in the ledger, and the client does not know yet",
    "service.share": "a worker of `service`, when it has got a share of a pass, and has not computed it",
    "service.executed": "`service`, when a call is executed, and the ledger does not know yet",
    "service.saved": "`service`, when a client's checkpoint is committed, and the ledger does not know yet",
    "service.answered": "`service`, when the answer to a call is in the ledger, before the state is saved",
    "export.write": "`ckpt export` and `ckpt average`, after each piece that a format reports as written",
    "export.before_fsync": "`ckpt export` and `ckpt average`, when all is written and not yet durable",
    "export.before_rename": "`ckpt export` and `ckpt average`, when all is durable and has not its name yet",
    "import.write": "`ckpt import`, after each piece",
    "import.before_compare": "`ckpt import`, when all tensors are durable",
    "adopt.file": "`ckpt copy` and `ckpt fork`, before each file",
    "retention.before_delete": "trainer rank 0, before a step is deleted",
    "retention.manifest_deleted": "trainer rank 0, when the manifest of a step to delete is gone",
    "remote.sent_part": "the uploader, when the object store has a part of a large file",
    "remote.sent_file": "the uploader, when the object store has a file of a step",
    "remote.before_manifest": "the uploader, when the object store has all files of a step",
    "remote.before_commit": "the uploader, when only the object is missing that commits a step",
    "remote.done": "the uploader, right after a step was committed in the object store",
    "remote.uncommitted": "the uploader, when a step to delete no longer exists in the object store",
}

ON_EACH_RANK = (
    *("trainer.batch_read", "trainer.rewind", "publish.begin"),
    *("save.copy", "save.write", "save.before_fsync", "save.before_part"),
    *("memory.begin", "memory.copied", "memory.sealed"),
)
"""Points that every rank of the trainer reaches, or its writer."""

_reached: dict[str, int] = {}


def fault_point(name: str) -> None:
    """Fail here if `CAIRN_FAULT` says so.

    Raises:
        OSError: with the errno that was asked for.
    """
    wanted = os.environ.get("CAIRN_FAULT")
    if not wanted:
        return
    assert name in POINTS, name
    _reached[name] = _reached.get(name, 0) + 1
    for fault in wanted.split(","):
        point, action, count, rank = parts_of(fault)
        elsewhere = rank is not None and os.environ.get("RANK") != str(rank)
        if point != name or _reached[name] != count or elsewhere or not _may_strike(fault):
            continue
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        number = getattr(errno, action)
        raise OSError(number, f"{os.strerror(number)} (CAIRN_FAULT={fault})")


def parts_of(fault: str) -> tuple[str, str, int, int | None]:
    """Point, action, on which pass, and which rank of the trainer, or None: of `POINT:ACTION@PASS#RANK`.

    Raises:
        ValueError: it is no fault.
    """
    found = re.fullmatch(r"([\w.]+):(\w+)(?:@([1-9]\d*))?(?:#(\d+))?", fault)
    point, action, count, rank = found.groups() if found else ("", "", None, None)
    if point not in POINTS or (action != "kill" and not hasattr(errno, action)):
        expected = f"expected POINT:ACTION with a point of {', '.join(POINTS)}"
        raise ValueError(f"CAIRN_FAULT={fault}: {expected}")
    if rank is not None and point not in ON_EACH_RANK:
        raise ValueError(f"CAIRN_FAULT={fault}: #{rank} is for points that each rank of the trainer reaches")
    return point, action, int(count or 1), None if rank is None else int(rank)


def _may_strike(fault: str) -> bool:
    """Whether this process may fire the fault: with CAIRN_FAULT_ONCE, if no other process has."""
    folder = os.environ.get("CAIRN_FAULT_ONCE")
    if folder:
        try:
            os.unlink(os.path.join(folder, fault))
        except FileNotFoundError:
            return False
    return True
