"""A Ray cluster that is there before a run, as an administrator has started it: all nodes on this machine."""

import os
import secrets
import shutil
import sys
from pathlib import Path

from runs import Command

from cairn.run.connections import free_port


class RayNodes:
    """Ray nodes that want a token; the first one is the head.

    Args:
        folder: where their output goes.
    """

    def __init__(self, folder: Path):
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.token = secrets.token_hex(32)
        self.temporary = Path("/tmp") / f"cairn-test-{os.getpid()}"
        """Where Ray logs; paths of its sockets must be short."""
        self.nodes: list[Command] = []

    @property
    def environment(self) -> dict[str, str]:
        """What whoever joins has to have."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def start(self, *begin: str, cpus: int = 1, wait: bool = True, **environment: str) -> Command:
        """Start one more.

        Args:
            begin: what the command begins with, which then runs the rest in its own place.
            wait: until it has started.
            environment: further variables.
        """
        place = [f"--address={self.address}"]
        if not self.nodes:
            head, _, port = self.address.partition(":")
            place = ["--head", f"--port={port}", f"--node-ip-address={head}", "--include-dashboard=false"]
            place += [f"--temp-dir={self.temporary}"]
        flags = [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        ray = str(Path(sys.executable).with_name("ray"))
        node = Command(
            self.folder / f"node{len(self.nodes)}.log",
            {**os.environ, **self.environment, **environment},
            *(*begin, ray, "start", *place, *flags),
        )
        self.nodes.append(node)
        if wait:
            node.wait_until(lambda: "Ray runtime started" in node.output, 120)
        return node

    def close(self) -> None:
        """End all, and remove their files."""
        for node in reversed(self.nodes):
            node.__exit__()
        shutil.rmtree(self.temporary, ignore_errors=True)
