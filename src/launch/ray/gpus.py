# pyright: reportUnknownMemberType=false
"""How many GPUs a running Ray cluster has, asked before a run in it begins.

As a program (`python -m cairn.launch.ray.gpus RAY_SETTINGS`) it joins the cluster and prints the answer: the
launcher of a run is not the place for Ray's threads and signal handlers.
"""

import json
import os
import subprocess
import sys
from typing import Any

from cairn.config.trainer import RayConfig, SFTConfig
from cairn.launch.exits import RoleFailed
from cairn.launch.places.role_process import RAY_SETTINGS
from cairn.run.errors import CairnError, UsageError
from cairn.run.machine import Gpu, Machine


def cluster_of(config: RayConfig) -> Machine:
    """The cluster at `ray.address` as one machine; how much memory its GPUs and nodes have is not known.

    Raises:
        RoleFailed: no cluster answers there.
        UsageError: it wants a token that is not here.
    """
    command = [sys.executable, "-m", __name__, config.model_dump_json()]
    environment = {**RAY_SETTINGS, **os.environ}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=config.start_timeout,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        answer = {"failed": f"--ray.address {config.address}: the Ray cluster does not say what GPUs it has"}
    if "refused" in answer:
        raise UsageError(answer["refused"])
    if "failed" in answer:
        raise RoleFailed(answer["failed"])
    return Machine(tuple(Gpu(i, f"ray-{i}", "in the Ray cluster", 0) for i in range(answer["gpus"])))


def _ask(config: RayConfig) -> dict[str, Any]:
    import ray

    from cairn.launch.ray.cluster import end_ray, start_ray

    joining = SFTConfig(ray=config)
    try:
        start_ray(joining)
        gpus = int(ray.cluster_resources().get("GPU", 0))
        end_ray(joining)
    except UsageError as error:
        return {"refused": str(error)}
    except CairnError as error:
        return {"failed": str(error)}
    return {"gpus": gpus}


if __name__ == "__main__":
    answer = _ask(RayConfig.model_validate_json(sys.argv[1]))
    print(json.dumps(answer), flush=True)
