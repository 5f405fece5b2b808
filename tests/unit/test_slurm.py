"""Jobs of Slurm's: their scripts run, with stand-ins for the commands of Slurm, Ray and Cairn."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import draws
import psutil
import pytest
from runs import DEADLINE

from cairn.config.cli import COMMANDS, load, load_branches
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.rl import RLConfig
from cairn.launch.plan.gpu_assignment import placed
from cairn.launch.slurm.job import Job as Written
from cairn.launch.slurm.job import JobBranches, job_of, submit
from cairn.run.connections import LOWEST_PORT, free_port
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.machine import Gpu, Machine

NOTE = """#!{python}
import json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
said = {{"argv": sys.argv[1:], "env": dict(os.environ)}}
with open("{folder}/" + name + ".jsonl", "a") as file:
    file.write(json.dumps(said) + "\\n")
"""
BEHAVIOURS = {
    "scontrol": 'if sys.argv[1] == "show": print("\\n".join(os.environ["NODES"].split())\n'
    '    if sys.argv[2] == "hostnames" else "JobId=7 JobState=" + os.environ["STATE"] + \n'
    '    " Reason=None\\n   StartTime=5 EndTime=" + os.environ["END"] + " Deadline=N/A")',
    "srun": 'first = next(i for i, a in enumerate(sys.argv[1:], 1) if not a.startswith("--"))\n'
    "os.execvp(sys.argv[first], sys.argv[first:])",
    "ray": "import socket\n"
    'if "--head" in sys.argv:\n'
    "    port = next(int(a.partition('=')[2]) for a in sys.argv if a.startswith('--port='))\n"
    "    listening = socket.create_server(('127.0.0.1', port))\n"
    "    time.sleep(600)",
    "ip": 'print("1: lo    inet 127.0.0.1/8 scope host lo")',
    "python": "if 'servers_of_node' in sys.argv[2]:\n    sys.exit(print(4, 2))\n"
    "calls = os.path.join(os.path.dirname(sys.argv[0]), '../../ray.jsonl')\n"
    "while len(open(calls).readlines()) < min(2, int(sys.argv[-2])): time.sleep(0.02)",
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
time.sleep(600)
"""
WAITS_FOR_SERVERS = """
servers = "{folder}/inference.jsonl"
while not os.path.exists(servers) or len(open(servers).readlines()) < 4:
    time.sleep(0.02)
"""
"""Else the job could end, and with it what starts them, before they are there."""


EIGHT = ("--slurm.gpus-per-node", "8")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def written(command: str, *flags: str) -> Written:
    """The job of a command with these flags."""
    argv = ["--model.name", "owner/name", *flags, "--slurm"]
    config = load(KINDS[command].config, argv)
    assert config.slurm is not None
    branches = None
    if isinstance(config, RLConfig) and config.branch:
        branches = JobBranches.of(config, load_branches(RLConfig, argv, config.branch), config.slurm)
    return job_of(command, config, config.slurm, branches)


@dataclass
class Job:
    """A job of Slurm's on three nodes, of which there is only this machine."""

    folder: Path
    environment: dict[str, str]
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(self, command: str, *flags: str, **environment: str) -> subprocess.Popen:
        """Write the job of a command, and run its script."""
        job = written(command, "--output-dir", str(self.folder / "run"), *flags)
        job.folder.mkdir(parents=True)
        for name, content in job.contents.items():
            (job.folder / name).parent.mkdir(exist_ok=True)
            (job.folder / name).write_text(content)
        process = subprocess.Popen(
            ["bash", str(job.script)],
            env={**self.environment, **environment},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # bash can't trap a signal that it was started to ignore, as in the background of a shell.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.processes.append(process)
        return process

    def finish(self, process: subprocess.Popen, **calls: int) -> str:
        """Its output, once the script has ended and commands were called so often; the rest is killed."""
        process.wait(DEADLINE)
        wait_until(lambda: all(len(self.calls(name)) >= count for name, count in calls.items()))
        self.kill()
        return process.communicate()[0]

    def calls(self, name: str) -> list[dict]:
        """How a command was called: its flags and its environment."""
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def still_run(self) -> bool:
        """Whether any process of the job is alive."""
        groups = {process.pid for process in self.processes}
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(one.pid) in groups and one.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def kill(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    port = free_port()
    prefix = tmp_path / "installed"
    (prefix / "bin").mkdir(parents=True)
    for name, behaviour in BEHAVIOURS.items():
        file = prefix / "bin" / name
        file.write_text(NOTE.format(python=sys.executable, folder=tmp_path) + behaviour)
        file.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    environment = {
        "PATH": os.environ["PATH"],
        "NODES": "localhost node2 node3",
        "STATE": "RUNNING",
        "END": "Unknown",
        "SLURM_JOB_ID": str(port - LOWEST_PORT),
        "SLURM_JOB_NODELIST": "node[1-3]",
    }
    job = Job(tmp_path, environment)
    yield job
    job.kill()


def asked(script: str) -> dict[str, str]:
    """What a script asks Slurm for."""
    lines = re.findall(r"^#SBATCH --(.*)$", script, re.M)
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    "flags",
    [
        ("sft",),
        ("sft", "--slurm.nodes", "2", "--slurm.gpus-per-node", "8", "--slurm.runner", "uv run"),
        ("rl", "--slurm.nodes", "3", "--slurm.gpus-per-node", "8", "--slurm.setup", "module load cuda"),
    ],
    ids=lambda flags: "_".join(flags[:3]),
)
def test_scripts_are_bash(flags: tuple[str, ...], tmp_path: Path):
    job = written(flags[0], "--output-dir", str(tmp_path), *flags[1:])
    for name in sorted({"job.sbatch", "node.sh", "server.sh"} & set(job.contents)):
        script = tmp_path / name
        script.write_text(job.contents[name])
        subprocess.run(["bash", "-n", script], check=True)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, "-e", "SC1091", script], check=True)


def test_a_job_is_called_as_its_run(tmp_path: Path):
    """So that `squeue` tells jobs apart."""
    job = written("sft", "--output-dir", str(tmp_path / "my run"))
    assert asked(job.contents["job.sbatch"])["job-name"] == "'my run'"


def test_what_is_asked_for(tmp_path: Path):
    (tmp_path / "my.toml").write_text(
        '[slurm]\npartition = "gpu"\naccount = "us"\nqos = "high"\ntime = "1-12:00"\ngpus_per_node = 4\n'
        'cpus_per_task = 32\nmem = "500G"\njob_name = "my job"\nsignal_seconds = 600\nrequeue = false\n'
        'setup = ["module load cuda/12"]\nextra = ["--exclusive", "#SBATCH --constraint=h100"]\n'
        'runner = "uv run"\n'
    )
    job = written("sft", "@", str(tmp_path / "my.toml"), "--output-dir", str(tmp_path / "100% mine"))
    script = job.contents["job.sbatch"]
    assert asked(script) == {
        "job-name": "'my job'",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "32",
        "mem": "500G",
        "time": "1-12:00",
        "partition": "gpu",
        "account": "us",
        "qos": "high",
        "signal": "B:TERM@600",
        "open-mode": "append",
        "output": f"'{tmp_path}/100%% mine/slurm/job_%j.log'",
        "no-requeue": "",
        "exclusive": "",
        "constraint": "h100",
    }
    lines = script.splitlines()
    assert lines.index("module load cuda/12") < lines.index("requeue=no")
    assert "export RUNNER='uv run'" in lines
    assert not any(line.startswith("export PATH") for line in lines)
    assert 'start_ray "' not in script


@pytest.mark.parametrize(
    ("extra", "cpus"),
    [
        ([], "32"),
        (["constraint=h100"], "32"),
        (["--exclusive"], None),
        (["cpus-per-gpu=12"], None),
        (["-c 3"], None),
    ],
    ids=str,
)
def test_nodes_with_gpus_get_more_than_one_cpu(extra: list[str], cpus: str | None):
    job = written("sft", "--slurm.gpus-per-node", "4", "--slurm.extra", json.dumps(extra))
    assert asked(job.contents["job.sbatch"]).get("cpus-per-task") == cpus
    assert f"export CPUS={cpus or chr(39) * 2}" in job.contents["job.sbatch"].splitlines()
    assert "cpus-per-task" not in asked(written("sft").contents["job.sbatch"]), "a node without GPUs"


ADAPTERS = ("--trainer.lora.rank", "4", "--trainer.lora.serve", "unmerged")


@pytest.mark.parametrize(
    ("command", "more"), [("sft", ()), ("rl", ()), ("rl", ("--colocate",)), ("rl", ADAPTERS)]
)
def test_the_jobs_settings_are_those_of_the_command(command: str, more: tuple[str, ...], tmp_path: Path):
    """Read back with the flags of the script, they are what was given, resuming and without the job.

    A default that the command leaves to be decided where the run starts is left to the job as well. The run
    also knows how much time Slurm leaves it after the notice.
    """
    flags = ["--output-dir", str(tmp_path), "--max-steps", "7", "--ckpt.keep", "2", *more]
    job = written(command, *flags, "--slurm.signal-seconds", "90")
    file = tmp_path / "settings.json"
    file.write_text(job.contents[f"{command}.json"])
    kind = KINDS[command].config
    found = load(kind, ["@", str(file), "--ckpt.resume", "auto"])
    given = ["--model.name", "owner/name", *flags, "--ckpt.resume", "auto", "--preemption.seconds", "90"]
    wanted = load(kind, given)
    assert found == wanted
    assert found.slurm is None
    assert found.model_dump(exclude_unset=True) == wanted.model_dump(exclude_unset=True)
    machine = Machine((Gpu(0, "GPU-0", "one", 80 << 30),))
    assert placed(KINDS[command], found, machine) == placed(KINDS[command], wanted, machine)


@pytest.fixture
def branched(tmp_path: Path) -> list[str]:
    """Flags of a run with two branches."""
    files = {"low.toml": "[trainer.optimizer]\nlr = 1e-4\n[trainer.lora]\nrank = 4\n"}
    files["high.yaml"] = "trainer: {optimizer: {lr: 0.1}, lora: {rank: 16}}\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flags = ["--output-dir", str(tmp_path / "run"), "--ckpt", "--trainer.lora.serve", "unmerged"]
    return flags + [word for name in files for word in ("--branch", str(tmp_path / name))]


def test_the_branches_of_a_job_are_those_of_the_command(branched: list[str], tmp_path: Path):
    """Whatever becomes of their files; servers on nodes of their own have room for those of a time."""
    branched += ["--branches.at-once", "2", "--trainer.workers", "1"]
    job = written("rl", *branched, "--slurm.nodes", "2")
    given = load(RLConfig, ["--model.name", "owner/name", *branched])
    wanted = load_branches(RLConfig, ["--model.name", "owner/name", *branched], given.branch)
    for file in given.branch:
        Path(file).write_text("what is not read")
    for name, content in job.contents.items():
        (job.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (job.folder / name).write_text(content)
    argv = ["@", str(job.folder / "rl.json")]
    found = load_branches(RLConfig, argv, load(RLConfig, argv).branch)
    assert list(found) == ["low", "high"]
    for name, one in found.items():
        assert one.branches == wanted[name].branches == given.branches
        assert one == wanted[name].sharing(preemption=one.preemption)
    server = load(InferenceConfig, ["@", str(job.folder / "inference.json")])
    assert server.max_lora_rank == 16
    assert server.max_loras == 2 * max(one.inference.max_loras for one in found.values())


def test_branches_that_are_no_job(branched: list[str]):
    branched += ["--branches.at-once", "2", *EIGHT]
    with pytest.raises(UsageError, match="each branch would take all GPUs, and low does not say"):
        written("rl", *branched, "--slurm.nodes", "3")
    written("rl", *branched)  # on one node it is as without Slurm


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("sft", ["--ckpt.resume-step", "5"], "--ckpt.resume-step 5: a job resumes with --ckpt.resume auto"),
        ("rl", ["--ckpt.resume", "latest"], "--ckpt.resume latest: a job resumes with --ckpt.resume auto"),
        ("sft", ["--slurm.nodes", "2"], "--slurm.nodes 2 needs --slurm.gpus-per-node"),
        ("rl", [*EIGHT, "--slurm.nodes", "2", "--slurm.server-nodes", "2"], "leaves none for the trainer"),
        (
            "rl",
            [*EIGHT, "--slurm.nodes", "3", "--trainer.workers", "24"],
            "trainer, which needs 3; raise the",
        ),
        (
            "rl",
            [*EIGHT, "--slurm.nodes", "2", "--orchestrator.inference-url", "http://127.0.0.1:8000"],
            "--orchestrator.inference-url http://127.0.0.1:8000: this address means the job's first node",
        ),
        ("sft", ["--slurm.nodes", "2", "--workers", "2", "--ray.address", "h:1"], "a Ray cluster of its own"),
        (
            "rl",
            [
                "--slurm.nodes=2",
                "--slurm.gpus-per-node=4",
                "--inference.servers=3",
                "--inference.tensor-parallel=2",
            ],
            "--inference.servers 3 with --inference.tensor-parallel 2: the servers of a node need 6 GPUs",
        ),
        (
            "rl",
            ["--slurm.nodes", "2", "--slurm.gpus-per-node", "4", "--inference.tensor-parallel", "8"],
            "--inference.tensor-parallel 8: the servers of a node need 8 GPUs, and --slurm.gpus",
        ),
        ("sft", ["--slurm.time", "soon"], "'soon' is no time limit"),
        ("sft", ["--slurm.partition", "a\nrm -rf"], "must be one line"),
    ],
)
def test_what_is_no_job(command: str, flags: list[str], message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        written(command, *flags)


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The job is written, and the message says how to go on."""
    monkeypatch.setenv("PATH", str(tmp_path))
    job = written("sft", "--output-dir", str(tmp_path / "run"))
    with pytest.raises(UsageError, match=re.escape(f"`sbatch {job.script}`")):
        submit(job)
    assert job.script.read_text() == job.contents["job.sbatch"]


@pytest.mark.parametrize("code", [0, 1])
def test_sbatch_gets_the_script(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sbatch = tmp_path / "sbatch"
    said = 'echo "Submitted batch job $(basename "$1")"' if code == 0 else "echo 'no such partition' >&2"
    sbatch.write_text(f"#!/bin/bash\n{said}\nexit {code}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = written("sft", "--output-dir", str(tmp_path / "run"))
    if code == 0:
        submit(job)
        assert (
            f"Submitted batch job job.sbatch; its script and logs are in {job.folder}"
            in capsys.readouterr().out
        )
    else:
        with pytest.raises(CairnError, match="exit code 1: no such partition"):
            submit(job)


def check_flags(command: str, argv: list[str]) -> dict:
    """Read the flags as the command itself would; returns the configuration."""
    return load(COMMANDS[command], argv).model_dump()


def check_ray_flags(calls: list[dict]) -> None:
    ray = Path(sys.executable).with_name("ray")
    told = subprocess.run([ray, "start", "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"--[a-z-]+", told))
    for call in calls:
        assert call["argv"][0] == "start"
        assert {flag.partition("=")[0] for flag in call["argv"][1:]} <= known


NODES = ("--slurm.nodes", "3")
N = "--inference.servers"
OF_TWO = ("--inference.tensor-parallel", "2")
SIZE = "cairn.launch.slurm.servers_of_node"
UUIDS = ",".join(f"GPU-{number}" for number in range(8))


@draws.seldom
def test_sft_runs_on_all_nodes(job: Job):
    flags = (*NODES, "--slurm.gpus-per-node", "4", "--slurm.interface", "lo", "--slurm.cpus-per-task", "9")
    process = job.start("sft", *flags, "--max-steps", "7")
    output = job.finish(process, ray=2)
    assert process.returncode == 0, output
    (call,) = job.calls("sft")
    config = check_flags("sft", call["argv"])
    assert config["workers"] == 12
    assert config["ckpt"]["resume"] == "auto"
    assert config["max_steps"] == 7
    head, rest = sorted(job.calls("ray"), key=lambda one: "--head" not in one["argv"])
    check_ray_flags([head, rest])
    assert f"--address={config['ray']['address']}" in rest["argv"]
    assert f"--port={config['ray']['address'].partition(':')[2]}" in head["argv"]
    flags = {"--num-gpus=4", "--num-cpus=9", "--node-ip-address=127.0.0.1", "--block"}
    assert flags <= set(head["argv"]) & set(rest["argv"])
    (wait,) = job.calls("python")
    assert wait["argv"] == ["-m", "cairn.launch.slurm.wait_for_nodes", config["ray"]["address"], "3", "600"]
    steps = [one["argv"] for one in job.calls("srun")]
    assert {"--nodelist=localhost", "--nodelist=node2,node3"} <= {flag for step in steps for flag in step}
    assert "--ntasks=2" in next(step for step in steps if "--nodelist=node2,node3" in step)
    assert all("--cpus-per-task=9" in step for step in steps)
    for one in (call, head, rest):
        assert one["env"]["NCCL_SOCKET_IFNAME"] == one["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert one["env"]["RAY_AUTH_MODE"] == "token"
    assert len({one["env"]["RAY_AUTH_TOKEN_PATH"] for one in (call, head, rest)}) == 1
    assert not Path(call["env"]["RAY_AUTH_TOKEN_PATH"]).exists()


def test_the_job_ends_its_ray(job: Job):
    """Not only Slurm does, which kills what is left of a job."""
    process = job.start("sft", *NODES, "--slurm.gpus-per-node", "4")
    process.wait(DEADLINE)
    wait_until(lambda: not job.still_run())
    assert job.calls("ray")


@draws.seldom
def test_rl_has_servers_on_nodes_of_their_own(job: Job):
    flags = (*NODES, "--slurm.gpus-per-node", "8")
    file = job.folder / "installed" / "bin" / "rl"
    file.write_text(file.read_text() + WAITS_FOR_SERVERS.format(folder=job.folder))
    process = job.start("rl", *flags, "--inference.max-model-len", "99", CUDA_VISIBLE_DEVICES=UUIDS)
    output = job.finish(process, inference=4)
    assert process.returncode == 0, output
    (call,) = job.calls("rl")
    config = check_flags("rl", call["argv"])
    urls = [f"http://node{node}:{port}" for node in (2, 3) for port in (8000, 8001)]
    assert config["orchestrator"]["inference_url"] == urls
    assert config["trainer"]["workers"] == 8
    assert config["trainer"]["ray"]["address"].startswith("localhost:")
    decided = next(one["argv"] for one in job.calls("python") if "servers_of_node" in one["argv"][1])
    assert decided == ["-m", SIZE, str(job.folder / "run" / "slurm" / "rl.json"), "8", "3", "0"]
    assert importlib.util.find_spec(SIZE)
    servers = job.calls("inference")
    assert len(servers) == 4
    first, second = UUIDS[: len(UUIDS) // 2], UUIDS[len(UUIDS) // 2 + 1 :]
    for server in servers:
        served = check_flags("inference", server["argv"])
        assert (served["max_model_len"], served["tensor_parallel"], served["host"]) == (99, 4, "0.0.0.0")
        assert server["env"]["CUDA_VISIBLE_DEVICES"] == {8000: first, 8001: second}[served["port"]]
        assert served["model"]["name"] == config["model"]["name"] == "owner/name"
        assert server["env"]["CAIRN_INFERENCE_TOKEN"] == call["env"]["CAIRN_INFERENCE_TOKEN"]
    assert len(call["env"]["CAIRN_INFERENCE_TOKEN"]) == 64
    check_ray_flags(job.calls("ray"))


ONE, TWO = ("--slurm.server-nodes", "1"), ("--slurm.nodes", "2")
WORKERS = "--trainer.workers"


@pytest.mark.parametrize(
    ("flags", "decided", "servers"),
    [
        ((*EIGHT, *OF_TWO, *ONE), "2 1", "$((GPUS / size))"),
        ((*EIGHT, *OF_TWO, N, "3", *TWO), "2 1", "3"),  # of two nodes one serves
        ((*EIGHT, "--inference.vllm-args=-pp=2", *ONE), "2 1", "$((GPUS / size))"),
        ((*EIGHT, *OF_TWO, WORKERS, "8"), "2 2", "$((GPUS / size))"),  # what the ranks leave
        ((*EIGHT, *OF_TWO, WORKERS, "12"), "2 1", "$((GPUS / size))"),
        ((*EIGHT, *OF_TWO), "8 3 0", "$((GPUS / size))"),
        ((*EIGHT, N, "2", *ONE), "8 3 1", "2"),
        ((WORKERS, "2"), "1 1", "1"),
        ((WORKERS, "2", N, "2"), "1 1", "2"),
    ],
)
def test_nodes_that_serve_and_their_servers(
    flags: tuple[str, ...], decided: str, servers: str, tmp_path: Path
):
    """As many as are given, or left by the ranks, or as the first node decides; of a size that is given, or
    that the memory of its GPUs asks for."""
    lines = written("rl", "--output-dir", str(tmp_path), *NODES, *flags).contents["job.sbatch"].splitlines()
    (how,) = [line for line in lines if line.startswith("decided=")]
    (of_servers,) = [line for line in lines if line.startswith("servers=")]
    assert of_servers == f"servers={servers} # on each node"
    if len(decided.split()) == 2:
        assert how == f'decided="{decided}"'
    else:
        assert how.startswith(f"decided=$($RUNNER python -m {SIZE} ")
        assert how.endswith(f"slurm/rl.json {decided})")


@pytest.mark.parametrize(
    ("number", "state", "flags", "requeued"),
    [
        (signal.SIGTERM, "RUNNING", (), True),
        (signal.SIGTERM, "COMPLETING", (), False),  # as after scancel
        (signal.SIGTERM, "RUNNING", ("--no-slurm.requeue",), False),
        (signal.SIGINT, "RUNNING", (), False),
    ],
)
def test_notice_of_the_end_saves_and_queues_again(
    job: Job, number: signal.Signals, state: str, flags: tuple[str, ...], requeued: bool
):
    """Slurm tells the script only; what it runs gets the signal that Cairn heeds."""
    file = job.folder / "installed" / "bin" / "sft"
    file.write_text(file.read_text() + WAITS.format(folder=job.folder))
    process = job.start("sft", *flags, STATE=state)
    wait_until((job.folder / "started").exists)
    os.kill(process.pid, number)
    wait_until((job.folder / "stopped").exists)
    output = job.finish(process)
    assert process.returncode == 75, output
    assert "sft ended with exit code 75" in output
    requeues = [one["argv"] for one in job.calls("scontrol") if one["argv"][0] == "requeue"]
    assert requeues == ([["requeue", job.environment["SLURM_JOB_ID"]]] if requeued else [])


def test_a_failure_is_the_jobs(job: Job):
    file = job.folder / "installed" / "bin" / "sft"
    file.write_text(file.read_text() + "\nos.kill(os.getpid(), 9)\n")
    process = job.start("sft")
    assert "sft ended with exit code 137" in job.finish(process)
    assert process.returncode == 137
    assert [one for one in job.calls("scontrol") if one["argv"][0] == "requeue"] == []


@pytest.mark.parametrize(("end", "most"), [(30, 30), (3600, 90), (None, 90)])
def test_the_run_is_told_when_slurm_ends_its_job(job: Job, end: int | None, most: float):
    """That is earlier than signal_seconds if the job is preempted. The run knows when it gets its signal."""
    file = job.folder / "installed" / "bin" / "sft"
    file.write_text(file.read_text() + WAITS.format(folder=job.folder))
    process = job.start("sft", END=str(int(time.time()) + end) if end else "Unknown")
    wait_until((job.folder / "started").exists)
    os.kill(process.pid, signal.SIGTERM)
    wait_until((job.folder / "stopped").exists)
    output = job.finish(process)
    assert ("Slurm ends this job in" in output) == bool(end), output
    run = RunDirectory(job.folder / "run")
    assert (run.seconds_left() is not None) == bool(end)
    run.request_stop("SIGTERM", 90)  # as the launcher does that gets it
    left = run.seconds_left()
    assert left is not None
    assert left <= most
    asked = [one["env"].get("SLURM_TIME_FORMAT") for one in job.calls("scontrol") if one["argv"][0] == "show"]
    assert asked[0] == "%s"
