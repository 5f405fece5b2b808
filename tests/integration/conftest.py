"""Tiny models, and one long-lived inference server that the tests share."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
import tiny

from cairn.config.inference import InferenceConfig
from cairn.inference.server import Server
from cairn.run import connections


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(tied=True, seed=0)`: the directory of a tiny model; equal arguments give the same one."""
    made: dict[tuple[bool, int], Path] = {}

    def model(*, tied: bool = True, seed: int = 0) -> Path:
        if (tied, seed) not in made:
            name = f"{'tied' if tied else 'untied'}-{seed}"
            made[tied, seed] = tiny.write_example(tmp_path_factory.mktemp(name), seed, tied=tied)
        return made[tied, seed]

    return model


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Finds a TCP port of loopback on which nothing listens."""
    return connections.free_port


@pytest.fixture(scope="session")
def inference_server(
    tiny_model: Callable[..., Path], free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a tied tiny model. Tests leave it with any weights: push what you need first."""
    config = InferenceConfig(port=free_port(), kv_cache_memory="64M")
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with contextlib.ExitStack() as started:
        with runs.forking_servers():
            server = started.enter_context(Server(config, str(tiny_model(tied=True, seed=0)), log))
        server.wait_ready()
        yield server
