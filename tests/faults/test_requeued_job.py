"""A job of Slurm's as it is submitted: stopped before its time limit, queued again, complete in the end."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, Shell, assert_same_bits, rows, step_folder, steps, tensors, untimed, whole_rows

from cairn.run.branches import Branches
from cairn.run.connections import LOWEST_PORT, free_port
from cairn.run.directory import RunDirectory

pytestmark = pytest.mark.timeout(900)

LAST = 100
SETTINGS = ("--seq-len", 32, "--data.batch-size", 8, "--max-steps", LAST, "--ckpt.interval", 25)
JOB = str(free_port() - LOWEST_PORT)
"""Its number also decides at which port its Ray listens, on more than one node."""
SBATCH = """#!/bin/bash
echo "$1" > "{folder}/submitted"
echo "Submitted batch job {job}"
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show job {job}" ] && echo "JobId={job} JobName=cairn JobState=RUNNING EndTime={end}"
[ "$1 $2" = "requeue {job}" ] && touch "{folder}/requeued"
[ "$1 $2" = "show hostnames" ] && echo 127.0.0.1 && echo 127.0.0.1
exit 0
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment with stand-ins for Slurm's commands; the test is the scheduler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(text.format(folder=tmp_path, job=JOB, end=int(time.time()) + 3600))
        (folder / name).chmod(0o755)
    yield {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "node[1-2]"}
    shutil.rmtree(f"/tmp/ray_{JOB}", ignore_errors=True)  # a node's own logs of Ray, which jobs leave there


def submitted(shell: Shell, slurm: dict[str, str], folder: Path, *command: object) -> str:
    """Submit a command as a job; returns the job's script. `folder` is that of the stand-ins."""
    with shell.start(*command, "--slurm", environment=slurm) as submission:
        done = submission.finish()
    assert done.code == 0, done.output
    assert f"Submitted batch job {JOB}" in done.output
    return (folder / "submitted").read_text().strip()


@draws.in_turn("a job of Slurm", 0, 2)
def test_a_job_is_stopped_and_queued_again(shell: Shell, slurm: dict[str, str], tmp_path: Path):
    """Its steps and weights are those of an undisturbed run."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    command = ("sft", "@", f"{CONFIGS}/sft.toml", *SETTINGS)
    script = submitted(shell, slurm, tmp_path, *command, "--output-dir", run)

    with shell.start("/bin/bash", script, environment=slurm) as first:
        first.wait_until(lambda: len(rows(run)) >= 3)
        (worker,) = first.workers()
        os.kill(worker, signal.SIGSTOP)  # or it may be done before the script has told the run
        os.kill(first.process.pid, signal.SIGTERM)
        first.wait_until(RunDirectory(run).stop_requested)
        os.kill(worker, signal.SIGCONT)
        stopped = first.finish()
    assert stopped.code == 75, stopped.output
    assert (tmp_path / "requeued").exists(), stopped.output
    assert 3 <= len(rows(run)) < LAST
    (tmp_path / "requeued").unlink()

    with shell.start("/bin/bash", script, environment=slurm) as second:
        ended = second.finish()
    assert ended.code == 0, ended.output
    assert not (tmp_path / "requeued").exists()

    with shell.start("/bin/bash", script, environment=slurm) as third:
        assert third.finish().code == 0  # nothing was left to do
    shell.succeed(*command, "--output-dir", straight)
    assert untimed(whole_rows(run, LAST)) == untimed(whole_rows(straight, LAST))
    assert_same_bits(tensors(step_folder(run, LAST)), tensors(step_folder(straight, LAST)))


@draws.in_turn("a job of Slurm", 1, 2)
@pytest.mark.skipif(shutil.which("ip") is None, reason="a node finds its own address by ip of iproute2")
def test_a_job_on_two_nodes_has_a_ray_cluster_of_its_own(shell: Shell, slurm: dict[str, str], tmp_path: Path):
    """Both nodes are this machine, and Ray is real; it ends with the job."""
    run = tmp_path / "run"
    nodes = ("--slurm.nodes", 2, "--slurm.cpus-per-task", 1, "--slurm.interface", "lo", "--workers", 2)
    command = ("sft", "@", f"{CONFIGS}/sft.toml", *SETTINGS, "--max-steps", 3)
    script = submitted(shell, slurm, tmp_path, *command, "--output-dir", run, *nodes)
    with shell.start("/bin/bash", script, environment=slurm) as job:
        ended = job.finish()
        assert ended.code == 0, ended.output
        whole_rows(run, 3)
        job.assert_nothing_survives()
    assert not list((run / "slurm").glob("ray_token_*"))


@pytest.mark.soak
def test_branches_of_a_job_go_on_in_the_next_one(shell: Shell, slurm: dict[str, str], tmp_path: Path):
    """The branch that is at work saves its step, and knows the end of the job; the files are read no more."""
    command = ("rl", "@", f"{CONFIGS}/rl.toml", "--orchestrator.prompts-per-step", 4, "--max-steps", 6)
    command += ("--ckpt.interval", 6, "--branches.turn-steps", 6, "--output-dir", tmp_path / "all")
    command += ("--inference.port", free_port())
    for name, rate in (("low", 1e-4), ("high", 1e-3)):
        (file := tmp_path / f"{name}.toml").write_text(f"[trainer.optimizer]\nlr = {rate}\n")
        command += ("--branch", file)
    script = submitted(shell, slurm, tmp_path, *command)
    for file in tmp_path.glob("*.toml"):
        file.write_text("not read again")
    branches = Branches(tmp_path / "all")
    low, high = branches.run("low"), branches.run("high")

    with shell.start("/bin/bash", script, environment=slurm) as first:
        first.wait_until(lambda: len(rows(low)) >= 1)
        os.kill(first.process.pid, signal.SIGTERM)
        stopped = first.finish()
        first.assert_nothing_survives()
    assert stopped.code == 75, stopped.output
    assert (tmp_path / "requeued").exists(), stopped.output
    left = RunDirectory(low).seconds_left()
    assert left is not None
    assert 0 < left < 3600
    assert steps(low)[-1] == len(rows(low)) < 6

    with shell.start("/bin/bash", script, environment=slurm) as second:
        ended = second.finish()
        second.assert_nothing_survives()
    assert ended.code == 0, ended.output
    for run in (low, high):
        assert len(whole_rows(run, 6)) == 6
        assert "no violation" in shell.succeed("ckpt", "audit", run)
    assert RunDirectory(branches.path).seconds_left() is None, "the next job has another end"
