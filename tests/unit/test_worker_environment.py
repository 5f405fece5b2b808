"""What workers in a running Ray cluster are told of the environment of a command."""

import sys
from pathlib import Path

import pytest

from cairn.config.trainer import RayConfig, SFTConfig
from cairn.launch.ray.environment import (
    NAMES,
    NODES_OWN,
    PREFIXES,
    adopt,
    environment_for_workers,
    extend_segments,
)

HANDED_OVER = {
    "HF_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "NCCL_SOCKET_IFNAME": "ib0",
    "GLOO_SOCKET_IFNAME": "ib0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "https_proxy": "http://proxy:3128",
    "HF_ENDPOINT": "https://mirror",
}
KEPT = {
    "CUDA_VISIBLE_DEVICES": "3",
    "CUDA_HOME": "/opt/cuda",
    "PATH": "/bin",
    "HOME": "/home/me",
    "LD_LIBRARY_PATH": "/lib",
    "RAY_AUTH_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "SLURM_JOB_ID": "7",
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SFTConfig:
    """The configuration of a run in a running cluster, and its command's environment."""
    monkeypatch.setattr("os.environ", {**HANDED_OVER, **KEPT})
    monkeypatch.chdir(tmp_path)
    return SFTConfig(ray=RayConfig(address="head:6379"))


def test_what_is_handed_over_and_what_belongs_to_a_node(elsewhere: SFTConfig):
    assert environment_for_workers(elsewhere) == HANDED_OVER


def test_the_page_names_all_of_them():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "ray.md").read_text()
    handed_over = [f"`{name}*`" for name in PREFIXES] + [f"`{name}`" for name in (*NAMES, *NODES_OWN)]
    assert [name for name in handed_over if name not in page] == []


def test_a_cluster_of_our_own_has_inherited_everything(elsewhere: SFTConfig):
    assert environment_for_workers(SFTConfig()) == {}


def test_paths_do_not_depend_on_the_current_folder(
    elsewhere: SFTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HOME", "cache")
    monkeypatch.setenv("PYTHONPATH", f"lib:{tmp_path / 'other'}:")
    environment = environment_for_workers(elsewhere)
    assert environment["HF_HOME"] == str(tmp_path / "cache")
    assert environment["PYTHONPATH"] == f"{tmp_path / 'lib'}:{tmp_path / 'other'}:{tmp_path}"
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == HANDED_OVER["PYTORCH_CUDA_ALLOC_CONF"]


def test_a_worker_takes_over_modules_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python has read PYTHONPATH long before a worker is told of it."""
    (tmp_path / "found_by_the_worker.py").write_text("here = True")
    monkeypatch.setattr(sys, "path", list(dict.fromkeys(sys.path)))  # tests add folders, some twice
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": "3"})
    adopt({"PYTHONPATH": f"{tmp_path}:{sys.path[-1]}", "NCCL_DEBUG": "WARN"})
    import os

    import found_by_the_worker

    assert found_by_the_worker.here
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert sys.path.count(sys.path[-1]) == 1


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_a_setting_of_the_allocator_stays(name: str | None, monkeypatch: pytest.MonkeyPatch):
    given = {name: "max_split_size_mb:128"} if name else {}
    monkeypatch.setattr("os.environ", found := dict(given))
    extend_segments()
    assert found == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
