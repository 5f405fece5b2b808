"""Workers of a local Ray cluster that import before the cluster is there.

Imports of Ray, torch and transformers are most of a rank's start. So the trainer's driver first of all starts
as many processes as it will have ranks, and imports Ray, and starts the cluster, while they import
(`start_waiting`). They end with the driver, as children of its session. Then they wait at a socket (`wait`)
for what the raylet starts as a worker (`worker_process.py`): that hands over its arguments, its environment
and its files (`hand_over`) and ends, and the process that waited is the worker. If none waits, as for a rank
that is started again, what the raylet has started is the worker itself.

Every process is executed, and none is a fork of one that has imported torch.
"""

import array
import contextlib
import importlib
import json
import os
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.launch.ray.environment import share_cores
from cairn.run.output import importing
from cairn.run.processes import die_with

if TYPE_CHECKING:
    from cairn.config.trainer import TrainerBase  # which takes longer to import than all that is done here

PROGRAM, WAIT = "cairn.launch.ray.worker_process", "wait"
ADDRESS = "CAIRN_WAITING_WORKERS"
"""Variable with the socket's name in Linux's abstract namespace, for what the raylet starts."""
MODULES = ("cairn.trainer.loop", "jsonschema", "requests", "yaml", "psutil", "google.protobuf.json_format")
"""What a worker imports to become a rank: all that training needs, and what Ray needs. Ray itself reads
variables when it is imported, and the raylet sets some for each worker."""
FAMILIES = "transformers.conversion_mapping"
"""Its table of the names of weights in all families is made when it is first needed, which takes a while."""
STREAMS = (0, 1, 2)
OOM = Path("/proc/self/oom_score_adj")
"""How soon the kernel kills a process for its memory: a raylet has workers go before itself."""


def waiting_ranks(config: "TrainerBase", *, on_gpus: bool) -> int:
    """How many processes may wait: one for each rank of a cluster of Cairn's own, on CPUs.

    On GPUs none does: Ray tells a worker which GPUs it has, before anything may have asked CUDA for them.

    Args:
        on_gpus: whether the ranks compute on GPUs unless the settings forbid it.
    """
    return 0 if config.ray.address or (on_gpus and config.gpus != "0") else config.ranks


def has_own_gpus(config: "TrainerBase") -> bool:
    """Whether the ranks of settled settings have GPUs of this machine."""
    from cairn.config.shared import names_in

    return bool(names_in(config.gpus or "0"))


_waiting: list["subprocess.Popen[bytes]"] = []
"""What this process, the trainer's driver, has started."""


def start_waiting(count: int, model: str, *, beside_servers: bool) -> None:
    """Start processes that import what ranks need, and wait for this process's raylet; once is enough.

    Args:
        count: how many.
        model: the policy's folder, or another name of it; of a folder, the model's code is imported, too.
        beside_servers: see `share_cores`.
    """
    if _waiting or not count:
        return
    share_cores(beside_servers=beside_servers)
    address = f"cairn-{os.getpid()}-{secrets.token_hex(8)}"
    # As Ray says it to a worker with one CPU; OpenMP reads it when torch is imported.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen(count)
        own = str(listener.fileno())
        for _ in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, WAIT, own, str(os.getpid()), model],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what goes wrong here goes wrong, and is said, in a worker
                env=environment,
                pass_fds=[listener.fileno()],
            )
            _waiting.append(process)
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()  # else zombies stay
    # Only who waits has the socket open now: when none is left, the raylet's workers are refused at once.
    os.environ[ADDRESS] = address


def end_waiting() -> None:
    """Kill the processes that wait: they are of no use."""
    os.environ.pop(ADDRESS, None)
    while _waiting:
        _waiting.pop().kill()


def wait(listener: int, driver: int, model: str) -> list[str]:
    """In a process that waits: import, and take over what a worker of the raylet's hands over.

    Args:
        listener: descriptor of the socket. driver: the process to die with.

    Returns:
        The worker's arguments.
    """
    die_with(driver)
    with importing():
        for module in MODULES:
            importlib.import_module(module)
        _import_model(Path(model))
    own = socket.socket(fileno=listener)
    while True:
        connection, _ = own.accept()
        if _is_ours(connection):
            break
        connection.close()
    own.close()  # the next one goes to another process
    with connection:
        request, files = _receive(connection)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        with contextlib.suppress(OSError):  # to be killed later than other processes takes privileges
            OOM.write_text(request["oom"])
        for stream, file in zip(STREAMS, files, strict=True):
            os.dup2(file, stream)
            os.close(file)
        connection.sendall(b"+")
    return request["arguments"]


def hand_over(arguments: Sequence[str]) -> bool:
    """In a worker of the raylet's: have a process that waits be it; False if none does.

    One that still imports is waited for.
    """
    address = os.environ.pop(ADDRESS, None)
    if address is None:
        return False
    request = {
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "oom": OOM.read_text(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"\0{address}")
            if not _is_ours(connection):
                return False
            _send(connection, request, STREAMS)
            return connection.recv(1) == b"+"
        except OSError:
            return False


def _import_model(folder: Path) -> None:
    """Import transformers' code for a model; whatever is wrong with its folder is found out elsewhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, ImportError):
        name = json.loads((folder / "config.json").read_text()).get("model_type", "")
        importlib.import_module(FAMILIES).get_checkpoint_conversion_mapping(name)
        if re.fullmatch("[a-z0-9_]+", name):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user's is at the other end: anybody may connect to an abstract socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _send(connection: socket.socket, request: dict[str, Any], files: Sequence[int]) -> None:
    message = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([struct.pack("I", len(message))], rights)
    connection.sendall(message)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, files, _, _ = socket.recv_fds(connection, struct.calcsize("I"), len(STREAMS))
    left, pieces = struct.unpack("I", head)[0], list[bytes]()
    while left:
        pieces.append(connection.recv(left))
        if not pieces[-1]:
            raise EOFError("the raylet's worker has ended in the middle of its request")
        left -= len(pieces[-1])
    return json.loads(b"".join(pieces)), files
