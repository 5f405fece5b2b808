"""A job of Slurm's as it is submitted: stopped before its time limit, queued again, complete in the end."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import draws
import pytest
from runs import CONFIGS, Shell, assert_same_bits, rows, step_folder, tensors, untimed, whole_rows

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
[ "$1 $2 $3" = "show job {job}" ] && echo "JobId={job} JobName=cairn JobState=RUNNING Reason=None"
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
        (folder / name).write_text(text.format(folder=tmp_path, job=JOB))
        (folder / name).chmod(0o755)
    yield {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "node[1-2]"}
    shutil.rmtree(f"/tmp/ray_{JOB}", ignore_errors=True)  # a node's own logs of Ray, which jobs leave there


@draws.in_turn("a job of Slurm", 0, 2)
def test_a_job_is_stopped_and_queued_again(shell: Shell, slurm: dict[str, str], tmp_path: Path):
    """Its steps and weights are those of an undisturbed run."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    command = ("sft", "@", f"{CONFIGS}/sft.toml", *SETTINGS)
    with shell.start(*command, "--output-dir", run, "--slurm", environment=slurm) as submission:
        done = submission.finish()
    assert done.code == 0, done.output
    assert f"Submitted batch job {JOB}" in done.output
    script = (tmp_path / "submitted").read_text().strip()

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
    with shell.start(*command, "--output-dir", run, *nodes, "--slurm", environment=slurm) as submission:
        done = submission.finish()
    assert done.code == 0, done.output
    script = (tmp_path / "submitted").read_text().strip()
    with shell.start("/bin/bash", script, environment=slurm) as job:
        ended = job.finish()
        assert ended.code == 0, ended.output
        whole_rows(run, 3)
        job.assert_nothing_survives()
    assert not list((run / "slurm").glob("ray_token_*"))
