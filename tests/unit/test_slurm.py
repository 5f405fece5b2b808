"""The example for Slurm: its scripts run, with stand-ins for the commands of Slurm, Ray and Cairn."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cairn.config.cli import COMMANDS, load

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "configs" / "slurm").iterdir())
NOTE = """#!{python}
import json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
said = {{"argv": sys.argv[1:], "env": dict(os.environ)}}
with open("{folder}/" + name + ".jsonl", "a") as file:
    file.write(json.dumps(said) + "\\n")
"""
BEHAVIOURS = {
    "scontrol": 'if sys.argv[1] == "show": print("\\n".join(os.environ["NODES"].split()))',
    "srun": 'first = next(i for i, a in enumerate(sys.argv[1:], 1) if not a.startswith("--"))\n'
    "os.execvp(sys.argv[first], sys.argv[first:])",
    "ray": "import socket\n"
    'if "--head" in sys.argv:\n'
    "    port = next(int(a.partition('=')[2]) for a in sys.argv if a.startswith('--port='))\n"
    "    listening = socket.create_server(('127.0.0.1', port))\n"
    "    time.sleep(60)",
    "ip": 'print("1: lo    inet 127.0.0.1/8 scope host lo")',
    "python": "",
    "inference": "",
    "sft": "",
    "rl": "",
}
WAITS = """
def stop(*_):
    with open("{folder}/stopped", "w"): pass
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
with open("{folder}/started", "w"): pass
time.sleep(60)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@dataclass
class Job:
    """A job of Slurm's on three nodes, of which there is only this machine."""

    folder: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            ["bash", str(ROOT / "configs" / "slurm" / script), *arguments],
            env={**self.environment, **environment},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen, **calls: int) -> str:
        """Its output, once the script has ended and commands were called so often; the rest is killed."""
        process.wait(60)
        wait_until(lambda: all(len(self.calls(name)) >= count for name, count in calls.items()))
        self.kill()
        return process.communicate()[0]

    def calls(self, name: str) -> list[dict]:
        """How a command was called: its flags and its environment."""
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def kill(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "activate").write_text(f'PATH="{bin_folder}:$PATH"\n')
    for name, behaviour in BEHAVIOURS.items():
        file = bin_folder / name
        file.write_text(NOTE.format(python=sys.executable, folder=tmp_path) + behaviour)
        file.chmod(0o755)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    environment = {
        "PATH": os.environ["PATH"],
        "NODES": "localhost node2 node3",
        "SLURM_JOB_ID": str(port - 20000 if 20000 <= port < 40000 else port % 20000),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-3]",
    }
    job = Job(tmp_path, environment)
    yield job
    job.kill()


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.suffix != ".py"], ids=lambda path: path.name
)
def test_scripts_are_bash(script: Path):
    subprocess.run(["bash", "-n", script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, "-x", script], check=True, cwd=ROOT)


def check_flags(command: str, argv: list[str], folder: Path) -> dict:
    """Read the flags as the command itself would; returns the configuration."""
    (folder / "my.toml").write_text("")
    argv = [str(folder / "my.toml") if word == "my.toml" else word for word in argv]
    return load(COMMANDS[command], argv).model_dump()


def check_ray_flags(calls: list[dict]) -> None:
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z-]+", told))
    for call in calls:
        assert call["argv"][0] == "start"
        assert {flag.partition("=")[0] for flag in call["argv"][1:]} <= known


def test_sft_runs_on_all_nodes(job: Job):
    process = job.start("sft.sbatch", "my.toml", "--max-steps", "7", GPUS="4", IFACE="lo")
    output = job.finish(process, ray=2)
    assert process.returncode == 0, output
    (call,) = job.calls("sft")
    config = check_flags("sft", call["argv"], job.folder)
    assert config["workers"] == 12
    assert config["ckpt"]["resume"] == "auto"
    assert config["max_steps"] == 7
    head, rest = sorted(job.calls("ray"), key=lambda one: "--head" not in one["argv"])
    check_ray_flags([head, rest])
    assert f"--address={config['ray']['address']}" in rest["argv"]
    assert f"--port={config['ray']['address'].partition(':')[2]}" in head["argv"]
    assert {"--num-gpus=4", "--node-ip-address=127.0.0.1", "--block"} <= set(head["argv"]) & set(rest["argv"])
    (wait,) = job.calls("python")
    assert wait["argv"] == ["configs/slurm/wait_for_nodes.py", config["ray"]["address"], "3"]
    steps = [one["argv"] for one in job.calls("srun")]
    assert {"--nodelist=localhost", "--nodelist=node2,node3"} <= {flag for step in steps for flag in step}
    assert "--ntasks=2" in next(step for step in steps if "--nodelist=node2,node3" in step)
    for one in (call, head, rest):
        assert one["env"]["NCCL_SOCKET_IFNAME"] == one["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert one["env"]["RAY_AUTH_MODE"] == "token"
    assert len({one["env"]["RAY_AUTH_TOKEN_PATH"] for one in (call, head, rest)}) == 1
    assert not Path(call["env"]["RAY_AUTH_TOKEN_PATH"]).exists()


def test_rl_has_servers_on_nodes_of_their_own(job: Job):
    process = job.start(
        "rl.sbatch", "my.toml", MODEL="owner/name", SERVERS="2", INFERENCE="--max-model-len 99"
    )
    output = job.finish(process, inference=2)
    assert process.returncode == 0, output
    (call,) = job.calls("rl")
    config = check_flags("rl", call["argv"], job.folder)
    assert config["orchestrator"]["inference_url"] == ["http://node2:8000", "http://node3:8000"]
    assert config["trainer"]["workers"] == 8
    assert config["trainer"]["ray"]["address"].startswith("localhost:")
    assert config["model"]["name"] == "owner/name"
    servers = job.calls("inference")
    assert len(servers) == 2
    for server in servers:
        served = check_flags("inference", server["argv"], job.folder)
        assert (served["max_model_len"], served["tensor_parallel"], served["host"]) == (99, 8, "0.0.0.0")
        assert server["env"]["CAIRN_INFERENCE_TOKEN"] == call["env"]["CAIRN_INFERENCE_TOKEN"]
    assert len(call["env"]["CAIRN_INFERENCE_TOKEN"]) == 64
    check_ray_flags(job.calls("ray"))


def test_rl_needs_a_node_for_the_trainer(job: Job):
    process = job.start("rl.sbatch", "my.toml", MODEL="m", SERVERS="3")
    assert "none is left for the trainer" in job.finish(process)
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("number", "code", "requeued"),
    [(signal.SIGUSR1, 0, True), (signal.SIGTERM, 75, False)],
)
def test_notice_of_the_end_saves_and_queues_again(
    job: Job, number: signal.Signals, code: int, requeued: bool
):
    """Slurm tells the script only; what it runs gets the signal that Cairn heeds."""
    file = job.folder / ".venv" / "bin" / "sft"
    file.write_text(file.read_text() + WAITS.format(folder=job.folder))
    process = job.start("sft.sbatch", "my.toml")
    wait_until((job.folder / "started").exists)
    os.kill(process.pid, number)
    wait_until((job.folder / "stopped").exists)
    output = job.finish(process)
    assert process.returncode == code, output
    assert "sft ended with exit code 75" in output
    requeues = [one["argv"] for one in job.calls("scontrol") if one["argv"][0] == "requeue"]
    assert requeues == ([["requeue", job.environment["SLURM_JOB_ID"]]] if requeued else [])


def test_a_failure_is_the_jobs(job: Job):
    file = job.folder / ".venv" / "bin" / "sft"
    file.write_text(file.read_text() + "\nos.kill(os.getpid(), 9)\n")
    process = job.start("sft.sbatch", "my.toml")
    assert "sft ended with exit code 137" in job.finish(process)
    assert process.returncode == 137
    assert [one for one in job.calls("scontrol") if one["argv"][0] == "requeue"] == []
