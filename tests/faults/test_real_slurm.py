"""A real Slurm on this machine, of a few processes: a job is submitted, told of its end, and queued again.

So is one whose node dies, or that is preempted.

Debian's packages are slurmctld, slurmd, slurm-client and munge; they need not be configured, and none of
their services need run. Only root can start jobs like this.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from runs import CONFIGS, Shell, rows, steps

from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory

SEARCHED = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd is started by root"),
    pytest.mark.timeout(600),
]

CONF = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
{plugins}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
MpiDefault=none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{notice}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=2000
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
GRACE_SECONDS = 60
"""That a job has which is preempted: fewer than signal_seconds, which are 120."""
LONG = ("--max-steps", 1_000_000, "--ckpt.interval", 10, "--ckpt.keep-last", 2)
"""Such a run ends when it is told to."""


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes.

    environment: what its commands need. nodes: the processes of slurmd, by the name of the node.
    """

    environment: dict[str, str]
    nodes: dict[str, subprocess.Popen]

    def __call__(self, *command: str) -> str:
        found = shutil.which(command[0], path=SEARCHED)
        assert found
        whole = {**os.environ, **self.environment}
        done = subprocess.run([found, *command[1:]], env=whole, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        return dict(re.findall(r"(\w+)=(\S+)", self("scontrol", "show", "job", number)))

    def start_again(self, number: str) -> None:
        """Have a job that is queued again start now; it would wait for two minutes."""
        wait_until(lambda: self.job(number)["JobState"] == "PENDING")
        self("scontrol", "update", f"JobId={number}", "StartTime=now")


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def notice_before_preemption() -> str:
    """The line of slurm.conf by which the batch script gets its signal; it has another name since 23.02."""
    ctld = shutil.which("slurmctld", path=SEARCHED)
    assert ctld
    said = subprocess.run([ctld, "-V"], capture_output=True, text=True, check=True).stdout
    old = int(said.split()[-1].partition(".")[0]) < 23
    return "SlurmctldParameters=preempt_send_user_signal" if old else "PreemptParameters=send_user_signal"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    for name in ("state", "spool_n1", "spool_n2"):
        (folder / name).mkdir(parents=True)
    for path in (tmp_path, folder):
        path.chmod(0o755)  # else munged refuses its socket
    (folder / "key").write_bytes(secrets.token_bytes(128))
    (folder / "key").chmod(0o600)
    (folder / "cgroup.conf").touch()
    slurmd = Path(shutil.which("slurmd", path=SEARCHED) or "")
    found = slurmd.parents[1] / "lib" / "x86_64-linux-gnu" / "slurm-wlm"  # installed elsewhere than in /usr
    plugins = f"PluginDir={found}" if found.is_dir() else ""
    conf = folder / "slurm.conf"
    host, ports = socket.gethostname().partition(".")[0], [free_port() for _ in range(3)]
    words = {"host": host, "ports": ports, "folder": folder, "plugins": plugins, "grace": GRACE_SECONDS}
    conf.write_text(CONF.format(notice=notice_before_preemption(), **words))
    environment = {"SLURM_CONF": str(conf), "PATH": SEARCHED}
    munged = ["--force", "-F", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    stepd = shutil.which("slurmstepd", path=f"{slurmd.parent}:{SEARCHED}")
    commands = [
        ["munged", *munged],
        ["slurmctld", "-D", "-i", "-f", str(conf)],
        *(
            ["slurmd", "-D", "-N", node, "-f", str(conf), *(["-d", stepd] if stepd else [])]
            for node in ("n1", "n2")
        ),
    ]
    nodes: dict[str, subprocess.Popen] = {}
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(folder / f"{command[0]}.out", "ab"))
            program = shutil.which(command[0], path=SEARCHED)
            assert program
            process = subprocess.Popen(
                [program, *command[1:]],
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if command[0] == "slurmd":
                nodes[command[3]] = process
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, 20)
        made = Slurm(environment, nodes)
        wait_until(lambda: made("sinfo", "-h", "-p", "main", "-o", "%T %D") == "idle 2", 60)
        yield made
        with contextlib.suppress(AssertionError):
            made("scancel", "--user=root")
            wait_until(lambda: not made("squeue", "-h"), 30)


@dataclass(frozen=True)
class Job:
    """A job that trains in the run directory `run`."""

    slurm: Slurm
    run: Path
    number: str

    @property
    def log(self) -> str:
        return (self.run / "slurm" / f"job_{self.number}.log").read_text()

    def reaches(self, step: int) -> None:
        """Wait until it has trained so many steps."""

        def at_work() -> bool:
            assert self.slurm.job(self.number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), self.log
            there = (self.run / "metrics.jsonl").exists()
            return bool(there and (found := rows(self.run)) and found[-1]["step"] >= step)

        wait_until(at_work)

    def ends(self) -> dict[str, str]:
        """Wait until it has ended for good; what Slurm says of it."""
        going = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.slurm.job(self.number)["JobState"] not in going)
        return self.slurm.job(self.number)

    def goes_on_after(self, step: int) -> None:
        """Check that it has started a second time, and went on from the saved `step` or a later one."""
        self.slurm.start_again(self.number)
        # Until it has, metrics.jsonl holds what the first attempt did after its newest step.
        wait_until(lambda: (attempt := RunDirectory(self.run).attempt()) is not None and attempt.number == 2)
        self.reaches(step + 20)
        self.slurm("scancel", "--batch", "--signal=INT", self.number)
        job = self.ends()
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "75:0", "1"), self.log
        found = [row["step"] for row in rows(self.run)]
        assert found == list(range(1, found[-1] + 1))
        attempt = RunDirectory(self.run).attempt()
        assert attempt
        assert attempt.number == 2
        assert attempt.start_step >= step


def submitted(shell: Shell, slurm: Slurm, run: Path, *settings: object) -> Job:
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--seq-len", 32, "--data.batch-size", 8)
    with shell.start(*command, *settings, "--output-dir", run, environment=slurm.environment) as submission:
        done = submission.finish()
    assert done.code == 0, done.output
    (number,) = re.findall(r"Submitted batch job (\d+)", done.output)
    return Job(slurm, run, number)


def test_a_job_is_queued_again_until_it_is_complete(shell: Shell, slurm: Slurm, tmp_path: Path):
    """What Slurm does itself: it sends the notice, takes the job back, and starts it a second time."""
    run = tmp_path / "run"
    last = 400  # it must not be there before the signal has come through Slurm
    settings = ("--max-steps", last, "--ckpt.keep-last", 2, "--slurm.time", 10)
    job = submitted(shell, slurm, run, *settings)
    job.reaches(3)
    slurm("scancel", "--batch", "--signal=TERM", job.number)  # as Slurm does before the end of the time limit
    wait_until(lambda: slurm.job(job.number)["JobState"] == "PENDING")
    assert "sft ended with exit code 75" in job.log
    newest = steps(run)[-1]
    assert 3 <= newest < last
    slurm.start_again(job.number)
    ended = job.ends()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), job.log
    assert [row["step"] for row in rows(run)] == list(range(1, last + 1))
    assert "s are left" in job.log


def test_a_job_whose_node_dies_goes_on_on_another(shell: Shell, slurm: Slurm, tmp_path: Path):
    """Nobody tells it, and nothing of it is left: it goes on from its newest checkpoint."""
    job = submitted(shell, slurm, tmp_path / "run", *LONG, "--slurm.time", 10)
    job.reaches(30)
    node = slurm.job(job.number)["BatchHost"]
    slurm.nodes[node].kill()
    for process in [*psutil.process_iter()]:
        with contextlib.suppress(psutil.Error):
            if of_job(process, job.number, slurm):
                process.kill()
    newest = steps(job.run)[-1]
    slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=gone")
    job.goes_on_after(newest)
    assert slurm.job(job.number)["BatchHost"] != node


def of_job(process: psutil.Process, number: str, slurm: Slurm) -> bool:
    """Whether a process belongs to a job of this Slurm's: its script, what that runs, and slurmstepd."""
    environment = process.environ()
    ours = environment.get("SLURM_CONF") == slurm.environment["SLURM_CONF"]
    return ours and (environment.get("SLURM_JOB_ID") == number or process.name() == "slurmstepd")


def test_a_job_that_is_preempted_knows_its_grace_time(shell: Shell, slurm: Slurm, tmp_path: Path):
    """It saves within that, waits until the other one is done, and goes on."""
    job = submitted(shell, slurm, tmp_path / "run", *LONG, "--slurm.time", 10)
    job.reaches(15)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.log")
    said = slurm("sbatch", *urgent, "--wrap=true")
    wait_until(lambda: slurm.job(job.number)["JobState"] == "PENDING")
    assert "sft ended with exit code 75" in job.log
    (seconds,) = re.findall(r"Slurm ends this job in (\d+) s", job.log)
    assert int(seconds) <= GRACE_SECONDS
    (left,) = re.findall(r"(\d+) s are left", job.log)
    assert int(left) < GRACE_SECONDS
    newest = steps(job.run)[-1]
    number = said.split()[-1]
    wait_until(lambda: slurm.job(number)["JobState"] == "COMPLETED")
    job.goes_on_after(newest)
