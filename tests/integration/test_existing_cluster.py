"""A trainer in a Ray cluster that somebody else has started: from another folder, with a token."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import draws
import pytest
from ray_nodes import RayNodes
from runs import CONFIGS, REPOSITORY, Finished, Shell, rows

pytestmark = pytest.mark.timeout(600)

IN_FOLDER = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')
"""Begins a command that is to run in the folder that follows."""
OWN_LOSS = '''
import os

from cairn.trainer.losses.likelihood import Likelihood


class Telling(Likelihood):
    """Says where it is, and whether what it was told is there."""

    def __init__(self):
        told = {name: name in os.environ for name in ("HF_TOKEN", "NCCL_DEBUG", "MY_OWN")}
        print("loss made in", os.getcwd(), told, os.environ.get("HF_HOME"), flush=True)
'''


@pytest.fixture(scope="module")
def cluster(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """A head node with two CPUs, started elsewhere."""
    nodes = RayNodes(tmp_path_factory.mktemp("elsewhere"))
    try:
        nodes.start(*IN_FOLDER, str(nodes.folder), cpus=2, PYTHONPATH="").family()
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder in which there is no token, unless somebody puts one there."""
    (tmp_path / ".ray").mkdir()
    return tmp_path


def sft(shell: Shell, address: str, environment: dict[str, str], *arguments: object) -> Finished:
    """The example, in the cluster at `address`; its data and its model are relative paths."""
    flags = ("--ray.address", address, *arguments)
    with shell.start("sft", "@", f"{CONFIGS}/sft.toml", *flags, environment=environment) as command:
        return command.finish()


def test_paths_and_environment_reach_the_workers(shell: Shell, cluster: RayNodes, home: Path):
    """The data, the model and the user's own loss are named by relative paths, the token is a file."""
    (home / ".ray" / "auth_token").write_text(cluster.token)
    (home / "own_loss.py").write_text(OWN_LOSS)
    secret = secrets.token_hex(16)
    environment = {
        "HOME": str(home),
        "PYTHONPATH": os.path.relpath(home, REPOSITORY),
        "HF_TOKEN": secret,
        "HF_HOME": os.path.relpath(home / "hf", REPOSITORY),
        "NCCL_DEBUG": "WARN",
        "MY_OWN": "stays here",
    }
    run = home / "run"
    arguments = (
        "--loss.type",
        "own_loss:Telling",
        "--max-steps",
        2,
        "--output-dir",
        os.path.relpath(run, REPOSITORY),
    )
    done = sft(shell, cluster.address, environment, *arguments)
    assert done.code == 0, done.output
    assert [row["step"] for row in rows(run)] == [1, 2]
    (said,) = {
        line for line in (run / "logs" / "trainer.log").read_text().splitlines() if "loss made" in line
    }
    told = {"HF_TOKEN": True, "NCCL_DEBUG": True, "MY_OWN": False}
    assert said == f"loss made in {cluster.folder} {told} {home / 'hf'}"
    files = [path for folder in (run, cluster.temporary) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "there is none here"),
        ({"RAY_AUTH_TOKEN": "0" * 64}, "it is not the one in RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled forbids to send one"),
    ],
)
def test_a_cluster_that_does_not_let_us_in(
    shell: Shell, cluster: RayNodes, home: Path, settings: dict[str, str], message: str
):
    """Said at once, with what to do, and not as a network that does not answer."""
    done = sft(shell, cluster.address, {"HOME": str(home), **settings}, "--output-dir", home / "run")
    assert done.code == 2
    assert message in done.output
    assert "~/.ray/auth_token" in done.output
    assert cluster.token not in done.output


@draws.in_turn("too few nodes", 0, 2)
def test_a_cluster_that_is_too_small(shell: Shell, cluster: RayNodes, home: Path):
    """Said once nodes have had the time to join, and nothing is touched; it may be tried again."""
    (home / ".ray" / "auth_token").write_text(cluster.token)
    flags = ("--workers", 3, "--output-dir", home / "run", "--ray.start-timeout", 5)
    done = sft(shell, cluster.address, {"HOME": str(home)}, *flags)
    assert done.code == 1, done.output
    missing = f"the Ray cluster at {cluster.address} has 2 CPUs and 0 GPUs, and workers 3 take a CPU each: "
    assert f"{missing}waiting for nodes, for up to 5 s" in done.output
    assert f"{missing}add nodes, raise ray.start_timeout, or lower workers to 2" in done.output
    assert not (home / "run").exists()


@pytest.mark.parametrize(("count", "code"), [(1, 0), (2, 1)])
def test_a_batch_job_waits_for_its_nodes(cluster: RayNodes, count: int, code: int):
    """As a job of Slurm's does."""
    module = "cairn.launch.slurm.wait_for_nodes"
    environment = {**os.environ, **cluster.environment}
    arguments = [sys.executable, "-m", module, cluster.address, str(count), "1"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("1 of 2 nodes have joined" in done.stderr) == (code == 1)


@draws.in_turn("too few nodes", 1, 2)
def test_a_node_that_joins_while_the_run_waits(shell: Shell, cluster: RayNodes, home: Path):
    """As a pod does whose image takes minutes to fetch."""
    (home / ".ray" / "auth_token").write_text(cluster.token)
    flags = ("--workers", 3, "--max-steps", 1, "--output-dir", home / "run", "--ray.address", cluster.address)
    run = shell.start("sft", "@", f"{CONFIGS}/sft.toml", *flags, environment={"HOME": str(home)})
    with run as command:
        command.wait_until(lambda: "waiting for nodes" in command.output, 120)
        with cluster.start(wait=False) as node:
            done = command.finish()
            node.family()
    assert done.code == 0, done.output
    assert [row["step"] for row in rows(home / "run")] == [1]
