"""A real Slurm on this machine, of a few processes: a job is submitted, told of its end, and queued again.

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

import pytest
from runs import CONFIGS, Shell, free_port, rows, steps

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
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=2000
PartitionName=main Nodes=n1 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A cluster of one node; `environment` is what its commands need."""

    environment: dict[str, str]

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


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "slurm"
    for name in ("state", "spool_n1"):
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
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    conf.write_text(CONF.format(host=host, ports=ports, folder=folder, plugins=plugins))
    environment = {"SLURM_CONF": str(conf), "PATH": SEARCHED}
    munged = ["--force", "-F", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    stepd = shutil.which("slurmstepd", path=f"{slurmd.parent}:{SEARCHED}")
    commands = [
        ["munged", *munged],
        ["slurmctld", "-D", "-i", "-f", str(conf)],
        ["slurmd", "-D", "-N", "n1", "-f", str(conf), *(["-d", stepd] if stepd else [])],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            log = stack.enter_context(open(folder / f"{command[0]}.out", "wb"))
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
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, 20)
        made = Slurm(environment)
        wait_until(lambda: "idle" in made("sinfo", "-h", "-o", "%T"), 60)
        yield made
        with contextlib.suppress(AssertionError):
            made("scancel", "--user=root")
            wait_until(lambda: not made("squeue", "-h"), 30)


def test_a_job_is_queued_again_until_it_is_complete(shell: Shell, slurm: Slurm, tmp_path: Path):
    """What Slurm does itself: it sends the notice, takes the job back, and starts it a second time."""
    run = tmp_path / "run"
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--seq-len", 32, "--data.batch-size", 8)
    settings = ("--max-steps", 40, "--ckpt.keep-last", 2, "--slurm.time", 10, "--output-dir", run)
    with shell.start(*command, *settings, environment=slurm.environment) as submission:
        submitted = submission.finish()
    assert submitted.code == 0, submitted.output
    (number,) = re.findall(r"Submitted batch job (\d+)", submitted.output)
    log = run / "slurm" / f"job_{number}.log"

    def at_work() -> bool:
        assert slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), log.read_text()
        return len(rows(run)) >= 3 if (run / "metrics.jsonl").exists() else False

    wait_until(at_work)
    slurm("scancel", "--batch", "--signal=TERM", number)  # as Slurm does before the end of the time limit
    wait_until(lambda: slurm.job(number)["JobState"] == "PENDING")
    assert "sft ended with exit code 75" in log.read_text()
    newest = steps(run)[-1]
    assert 3 <= newest < 40
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now")  # it would wait for two minutes
    wait_until(lambda: slurm.job(number)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING"))
    job = slurm.job(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), log.read_text()
    assert [row["step"] for row in rows(run)] == list(range(1, 41))
    assert "s are left" in log.read_text()
