# pyright: reportUnknownMemberType=false
"""How many GPUs a running Ray cluster has, asked before a run in it begins.

As a program (`python -m cairn.launch.ray.gpus SETTINGS PARENT`) it joins the cluster, waits for nodes that
the run needs, and prints what is missing and then the answer, a line of JSON each: the launcher of a run is
not the place for Ray's threads and signal handlers.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from cairn.config.trainer import SFTConfig, TrainerBase
from cairn.launch.ray.environment import RAY_SETTINGS
from cairn.run.errors import CairnError, UsageError
from cairn.run.exits import RoleFailed
from cairn.run.machine import Gpu, Machine
from cairn.run.processes import die_with

GRACE_SECONDS = 60.0
"""What the program has beside `ray.start_timeout`, to import Ray and to leave the cluster."""


def cluster_of(config: TrainerBase, *, waits: bool = True) -> Machine:
    """The cluster at `ray.address` as one machine; how much memory its GPUs and nodes have is not known.

    Args:
        waits: wait for nodes until there is room for the ranks, with a line for what is missing; and leave
            out the GPUs if the settings do.

    Raises:
        RoleFailed: no cluster answers there, or it is too small for the ranks.
        UsageError: it wants a token that is not here.
    """
    asked = config.model_dump_json(include={"ray", *(("workers", "gpus") if waits else ())})
    address = config.ray.address
    answer: dict[str, Any] = {
        "failed": f"--ray.address {address}: the Ray cluster does not say what GPUs it has"
    }
    command = [sys.executable, "-m", __name__, asked, str(os.getpid())]
    for line in _lines_of(command, 2 * config.ray.start_timeout + GRACE_SECONDS):
        with contextlib.suppress(ValueError):  # Ray may print something, too
            said = json.loads(line)
            if isinstance(said, dict) and "waiting" in said:
                print(said["waiting"], flush=True)
            elif isinstance(said, dict):
                answer = said
    if "refused" in answer:
        raise UsageError(answer["refused"])
    if "failed" in answer:
        raise RoleFailed(answer["failed"])
    return Machine(tuple(Gpu(i, f"ray-{i}", "in the Ray cluster", 0) for i in range(answer["gpus"])))


def _lines_of(command: list[str], seconds: float) -> Iterator[str]:
    """What a program prints, line by line; it is killed after so many seconds."""
    environment = {**RAY_SETTINGS, **os.environ}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        yield from process.stdout
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _ask(config: TrainerBase, *, waits: bool) -> dict[str, Any]:
    from cairn.launch.ray.cluster import end_ray, resources, start_ray, wait_for_room

    def tell(missing: str) -> None:
        print(json.dumps({"waiting": missing}), flush=True)

    try:
        start_ray(config)
        each = wait_for_room(config, tell, on_gpus=False if config.gpus == "0" else None) if waits else 1
        gpus = int(resources().get("GPU", 0)) if each else 0
        end_ray(config)
    except UsageError as error:
        return {"refused": str(error)}
    except CairnError as error:
        return {"failed": str(error)}
    return {"gpus": gpus}


if __name__ == "__main__":
    die_with(int(sys.argv[2]))
    asked = SFTConfig.model_validate_json(sys.argv[1])
    print(json.dumps(_ask(asked, waits="workers" in asked.model_fields_set)), flush=True)
