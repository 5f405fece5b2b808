# pyright: reportUnknownMemberType=false
"""A Ray cluster on this machine only, made of the two processes that place and watch workers.

`ray.init()` would start five more Python processes: a dashboard, a log monitor, an autoscaler, a metrics
reporter and an agent for runtime environments. Cairn uses none of them, and they take 3.6 s of CPU time, most
of it while the first worker is starting. So this module starts Ray's control server (GCS) and its raylet
directly. Their command lines are those of the Ray version that pyproject.toml pins.
"""

import functools
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import ray
from ray._common.usage.usage_lib import put_cluster_metadata
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # compiled

from cairn.launch.ray.environment import make_private_folder
from cairn.run.processes import die_with
from cairn.run.waiting import Patience

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20
POLL_SECONDS = 0.01
NO_PORT = 1
"""Port of an agent that does not listen. At 0, the raylet would wait for the agent to report its port."""
SETTINGS = {"RAY_enable_metrics_collection": "0"}
"""Environment variables for Ray's processes, in addition to `environment.RAY_SETTINGS`."""


class StartFailed(Exception):
    """A Ray process exited while starting, or did not start in time."""


def start(cpus: int, gpus: int, seconds: float) -> None:
    """Start a cluster with `cpus` CPUs and `gpus` GPUs within `seconds`, and connect this process to it.

    Its GPUs are the first that CUDA_VISIBLE_DEVICES names. Without that variable Ray would count all GPUs of
    the machine, so the number is always given.

    Its processes die with the calling thread. Its files and sockets are in a folder that only this user can
    enter, and its token is in this process's environment (`RoleProcess`).

    Raises:
        StartFailed: a process exited, or did not start in time.
        Exception: connecting failed; Ray raises plain exceptions for that.
    """
    session = _Session(make_private_folder(), seconds)
    address = f"{LOOPBACK}:{session.start_control_server()}"
    gcs = GcsClient(address=address)
    session.start_raylet(address, gcs.cluster_id.hex(), cpus, gpus)
    gcs.internal_kv_put(b"session_name", session.name.encode(), False, b"session")
    put_cluster_metadata(gcs, ray_init_cluster=True)
    session.wait_for(lambda: gcs.get_all_node_info(timeout=seconds), "its raylet did not register")
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address=LOOPBACK)


class _Session:
    """The folder of one cluster, and its processes."""

    def __init__(self, folder: Path, seconds: float):
        self.seconds = seconds
        self.temporary = folder / "r"
        self.name = f"session_{os.getpid()}"
        self.folder = self.temporary / self.name
        self.logs = self.folder / "logs"
        self.sockets = self.folder / "sockets"
        self.resources = self.folder / "runtime_resources"
        for path in (self.logs, self.sockets, self.resources):
            path.mkdir(parents=True)
        self.node = secrets.token_hex(28)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_control_server(self) -> int:
        """Start the control server, and wait until it listens; returns its port."""
        self._run(
            "gcs_server",
            **{"config_list": "e30=", "gcs_server_port": 0, "metrics-agent-port": -1},
            **{"node-ip-address": LOOPBACK, "session-name": self.name},
            **{"session-dir": self.folder, "log_dir": self.logs, "node-id": self.node},
        )
        port = self.folder / f"gcs_server_port_{self.node}"
        return int(
            self.wait_for(lambda: port.exists() and port.read_text(), "its control server did not start")
        )

    def start_raylet(self, address: str, cluster: str, cpus: int, gpus: int) -> None:
        """Start the raylet, which prestarts one worker process for each CPU."""
        found = ResourceAndLabelSpec(num_cpus=cpus, num_gpus=gpus, object_store_memory=OBJECT_STORE_BYTES)
        resources = found.resolve(is_head=True, node_ip_address=LOOPBACK).to_resource_dict()
        store, raylet = self.sockets / "plasma_store", self.sockets / "raylet"
        everybody = {"node-ip-address": LOOPBACK, "gcs-address": address, "session-name": self.name}
        worker = _command(
            [sys.executable, "-m", "cairn.launch.ray.worker_process"],
            **{"node-manager-port": "RAY_NODE_MANAGER_PORT_PLACEHOLDER", "redis-address": "None"},
            **{"object-store-name": store, "raylet-name": raylet, "temp-dir": self.temporary, "webui": ""},
            **{"metrics-agent-port": -1, "runtime-env-agent-port": 0, "cluster-id": cluster},
            **everybody,
        )
        agent = [sys.executable, "-I", "-S", str(Path(__file__).with_name("agent.py"))]
        shared = Path("/dev/shm")
        in_memory = shared.is_dir() and shutil.disk_usage(shared).free > OBJECT_STORE_BYTES
        everybody["node_ip_address"] = everybody.pop("node-ip-address")
        self._run(
            "raylet",
            "--head",
            **{"raylet_socket_name": raylet, "store_socket_name": store, "node_id": self.node},
            **{"object_manager_port": 0, "node_manager_port": 0, "min_worker_port": 0, "max_worker_port": 0},
            **{"maximum_startup_concurrency": max(1, min(os.cpu_count() or 1, cpus))},
            **{"num_prestart_python_workers": cpus, "object_store_memory": OBJECT_STORE_BYTES},
            static_resource_list=",".join(f"{name},{count}" for name, count in resources.items()),
            python_worker_command=subprocess.list2cmdline([*worker, "RAY_WORKER_DYNAMIC_OPTION_PLACEHOLDER"]),
            dashboard_agent_command=subprocess.list2cmdline(agent),
            runtime_env_agent_command=subprocess.list2cmdline(agent),
            **{"metrics-agent-port": NO_PORT, "metrics_export_port": NO_PORT},
            **{"runtime_env_agent_port": NO_PORT, "dashboard_agent_listen_port": NO_PORT},
            **{"temp_dir": self.temporary, "session_dir": self.folder, "log_dir": self.logs},
            **{"resource_dir": self.resources, "fallback_directory": self.folder, "cluster-id": cluster},
            plasma_directory=shared if in_memory else self.folder,
            **everybody,
        )

    def wait_for(self, check: Callable[[], T], problem: str) -> T:
        """Poll `check` until it returns something true, and return that.

        Raises:
            StartFailed: a process exited, or time ran out.
        """
        patience = Patience(self.seconds)
        while not (found := check()):
            for name, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise StartFailed(f"{name} exited with {code}: {self._error(name)}")
            if patience.over:
                raise StartFailed(f"{problem} within {self.seconds:g} s (ray.start_timeout allows more)")
            time.sleep(POLL_SECONDS)
        return found

    def _error(self, name: str) -> str:
        """The first line of a process's error output."""
        path = self.logs / f"{name}.err"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return next((line for line in lines if line.strip()), "it printed no reason")

    def _run(self, name: str, *switches: str, **flags: object) -> None:
        """Start one of Ray's programs with these arguments."""
        folder = Path(ray.__file__).parent / "core" / "src" / "ray"
        program = folder / ("gcs" if name == "gcs_server" else name) / name
        flags |= {f"{stream}_filepath": self.logs / f"{name}.{stream[3:]}" for stream in ("stdout", "stderr")}
        self._processes[name] = subprocess.Popen(
            [*_command([str(program)], **flags), *switches],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **SETTINGS},
            preexec_fn=functools.partial(die_with, os.getpid()),
        )


def _command(program: list[str], **flags: object) -> list[str]:
    return [*program, *(f"--{name}={value}" for name, value in flags.items())]
