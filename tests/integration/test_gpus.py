"""Commands on machines whose GPUs do not suffice, or can't be used: what users are told, and how soon."""

import json
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draws
import pytest
import torch
from runs import CONFIGS, REPOSITORY, Shell

from cairn.launch.supervise.slot import LOCAL_RAY_SETTINGS, RAY_SETTINGS
from cairn.run.machine import Gpu, Machine

pytestmark = pytest.mark.timeout(600)

NVML = '''
"""A driver that tells of two GPUs, which are not there."""

class NVMLError(Exception):
    pass

class _Memory:
    total = 80 << 30
    free = 80 << 30
    used = 0

def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlSystemGetDriverVersion(): return "550.54.14"
def nvmlDeviceGetCount(): return COUNT
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): raise NVMLError(uuid)
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetName(handle): return "NVIDIA H100"
def nvmlDeviceGetMemoryInfo(handle): return _Memory
def nvmlDeviceGetPciInfo(handle): raise NVMLError(handle)
'''
FULL_LOSS = '''
import os

import torch

from cairn.trainer.losses.likelihood import Likelihood


class Full(Likelihood):
    """Finds the memory of the last rank's GPU full."""

    def __call__(self, inputs):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(inputs)
'''


def with_gpus(folder: Path, count: int) -> dict[str, str]:
    """The environment of a command that finds `count` GPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pynvml.py").write_text(NVML.replace("COUNT", str(count)))
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("gpus", "command", "message"),
    [
        (2, ("sft", "--workers", 3), "--workers 3: each worker needs a GPU of its own, and this machine has"),
        (2, ("sft", "--gpus", "0,5"), "--gpus 0,5: there is no GPU 5; this machine has GPUs 0, 1"),
        (2, ("rl", "--trainer.gpus", "0,1", "--inference.gpus", "1,"), "vLLM's CPU build|both name GPU 1"),
        (0, ("sft", "--gpus", 1), "--gpus 1: this machine has no GPU"),
    ],
    ids=["workers", "no such GPU", "twice", "none"],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    shell: Shell, tmp_path: Path, gpus: int, command: tuple, message: str
):
    name, *flags = command
    files = ("@", f"{CONFIGS}/sft.toml") if name == "sft" else ("@", f"{CONFIGS}/rl.toml")
    run = tmp_path / "run"
    with shell.start(
        name, *files, *flags, "--output-dir", run, environment=with_gpus(tmp_path / "fake", gpus)
    ) as started:
        done = started.finish()
    assert done.code == 2, done.output
    assert any(words in done.output for words in message.split("|")), done.output
    assert not run.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU can be used")
@draws.in_turn("a GPU that is of no use", 0, 2)
def test_a_gpu_that_cuda_can_not_use_does_not_train_on_the_cpu(shell: Shell, tmp_path: Path):
    """The driver is there, but too old, or the GPU is broken: the run ends at once, with torch's reason."""
    run = tmp_path / "run"
    environment = with_gpus(tmp_path / "fake", 2)
    with shell.start(
        *("sft", "@", f"{CONFIGS}/sft.toml", "--gpus", "1", "--output-dir", run), environment=environment
    ) as command:
        done = command.finish()
    assert done.code == 2, done.output
    if torch.version.cuda:
        assert "GPU 0 trains" in done.output
        assert "can't be used: " in done.output
        assert f"is built for CUDA {torch.version.cuda}, which needs" in done.output
        assert "the driver here is 550.54.14" in done.output
    else:
        assert "is built without CUDA" in done.output
    assert not (run / "metrics.jsonl").exists()


@draws.in_turn("a GPU that is of no use", 1, 2)
def test_a_full_gpu_ends_the_run_at_once(shell: Shell, tmp_path: Path):
    """Nothing is restarted, and the message is of the rank that found it full, not of its neighbour."""
    (tmp_path / "full_loss.py").write_text(FULL_LOSS)
    run = tmp_path / "run"
    flags = ("--loss.type", "full_loss:Full", "--workers", 2, "--seq-len", 512, "--output-dir", run)
    with shell.start(
        "sft", "@", f"{CONFIGS}/sft.toml", *flags, environment={"PYTHONPATH": str(tmp_path)}
    ) as command:
        done = command.finish()
    assert done.code == 1, done.output
    assert "trainer rank 1: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." in done.output
    assert "lower seq_len (now 512), turn on activation_checkpointing, share rows among" in done.output
    assert "or shard the model over more workers (now 2)" in done.output
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [event for event in events if event["event"] == "restart"] == []


def test_a_server_tells_the_gpus_that_it_uses(monkeypatch: pytest.MonkeyPatch):
    """The first that it sees, one for each of its workers, so that a run on its machine leaves them to it."""
    from cairn.inference.plugin import routes

    there = Machine(tuple(Gpu(i, f"GPU-{i}", "H100", 80 << 30) for i in range(4)))
    monkeypatch.setattr(routes, "this_machine", lambda: there)
    device, parallel = SimpleNamespace(device_type="cuda"), SimpleNamespace(world_size_across_dp=2)
    config: Any = SimpleNamespace(device_config=device, parallel_config=parallel)
    assert routes.gpus_of(config) == ["GPU-0", "GPU-1"]
    device.device_type = "cpu"
    assert routes.gpus_of(config) == []


GRANTS = """
import json, os, sys
from pathlib import Path
import ray
from cairn.config.trainer import SFTConfig
from cairn.run.machine import use_gpus
from cairn.launch.ray.worker import RankProcess
from cairn.launch.ray.placement import ClusterPlacement
from cairn.launch.ray.cluster import start_ray
from cairn.launch.ray.worker import _index_of

os.environ.pop("CUDA_VISIBLE_DEVICES", None)
config = SFTConfig(gpus="5,7", workers=2)
use_gpus(config.gpus)
start_ray(config)
placement = ClusterPlacement(config)
ranks = [placement.start(number, Path(sys.argv[1]) / f"{number}.log") for number in range(2)]
gpus = [rank.wait_started(120).gpu for rank in ranks]

@ray.remote(num_cpus=0)
def spare():
    return [os.environ["CUDA_VISIBLE_DEVICES"], _index_of("5"), _index_of("7")]

found = {"gpus": sorted(gpus), "spare": ray.get(spare.remote()), "all": ray.cluster_resources()["GPU"]}
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)
"""


def test_the_local_cluster_has_exactly_the_trainers_gpus(shell: Shell, tmp_path: Path):
    """Ray takes their number on trust, so this needs none; a spare sees all of them, by number."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**RAY_SETTINGS, **LOCAL_RAY_SETTINGS, **token}
    with shell.start("python", "-c", GRANTS, tmp_path, environment=environment) as command:
        done = command.finish()
    assert done.code == 0, done.output
    assert '{"gpus": ["5", "7"], "spare": ["5,7", 0, 1], "all": 2.0}' in done.output


@draws.in_turn("the trial of a machine", 0, 2)
def test_the_trial_of_a_machine_runs_without_gpus(tmp_path: Path):
    """Its part for one GPU: the stages, but what a GPU alone can tell. The second time it is not run."""
    command = [sys.executable, "scripts/gpu_all.py", "--tiny", "--parts", "trial", "--out", tmp_path]
    first, second = (
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    claims = [line for line in first.stdout.splitlines() if line.startswith("pass: ")]
    assert "pass: tiny: resume/the bits are the same is True, expected True" in claims
    assert f"{tmp_path}/trial.json is there" in second.stdout
    found = json.loads((tmp_path / "trial.json").read_text())["result"]["results"]
    assert found["tiny: step/one row/tokens/s"] > 0
    assert found["tiny: resume/the step is as it was saved"] is True
    assert found["tiny: resume/the bits are the same"] is True
    assert found["tiny: save/durable_s"] > found["tiny: save/stall_s"] > 0
    assert found["tiny: save/next policy written, s"] > found["tiny: save/next policy taken, s"] > 0
