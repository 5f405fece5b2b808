"""A real run, as a user starts it: killed in a commit, resumed, preempted, resumed, finished."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import draws
import families
import pytest
from runs import (
    CONFIGS,
    Finished,
    Shell,
    assert_same_bits,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)

pytestmark = pytest.mark.timeout(900)

END = 90


@dataclass(frozen=True)
class Story:
    """What happened to two runs of END steps: an undisturbed one, and one that went through it all."""

    straight: Path
    run: Path
    killed: Finished
    steps_then: list[int]
    left_then: list[str]
    verified_then: list[dict]
    preempted: Finished
    stopped_at: int
    resumed: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The undisturbed run goes on beside the other one."""
    folder = tmp_path_factory.mktemp("killed")
    shell, faulty = Shell(folder), Shell(tmp_path_factory.mktemp("faulty"))
    faulty.environment |= {"CAIRN_FAULT": "commit.before_manifest:kill@2"}
    straight, run = folder / "straight", folder / "run"
    short = ("--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 8, "--ckpt.interval", 3)
    model = families.make(draws.family(__name__), folder / "model")
    sft = ("sft", "@", f"{CONFIGS}/sft.toml", "--model.name", model, *short)
    to_the_end = ("--max-steps", END)
    with shell.start(*sft, *to_the_end, "--output-dir", straight) as beside:
        killed = faulty.run(*sft, *to_the_end, "--output-dir", run, "--max-restarts", 0)
        steps_then = steps(run)
        left_then = sorted(os.listdir(run / "checkpoints"))
        verified_then = json.loads(shell.succeed("ckpt", "verify", run, "--json"))
        resume = (*sft, "--output-dir", run, "--ckpt.resume", "auto")
        with shell.start(*resume, "--max-steps", 100_000) as command:
            # The killed one may have come as far, but then its rows are gone before the next attempt begins.
            command.wait_until(lambda: read(run / "roles.json")["number"] == 2 and len(rows(run)) >= 8)
            (worker,) = command.workers()
            os.kill(worker, draws.stop_signal("killed_run"))
            preempted = command.finish()
            command.assert_nothing_survives()
        stopped_at = len(rows(run))
        resumed = shell.succeed(*resume, *to_the_end)
        assert beside.finish().code == 0, beside.output
    return Story(straight, run, killed, steps_then, left_then, verified_then, preempted, stopped_at, resumed)


def test_a_kill_in_a_commit_is_a_failure_that_costs_no_step(story: Story):
    """The exit code says so; the step before is whole, the one in question does not exist."""
    assert story.killed.code not in (0, 75), story.killed.output
    assert story.steps_then == [3]
    assert story.left_then == ["step_3", "step_6"]
    assert [entry["ok"] for entry in story.verified_then] == [True]


def test_a_stop_signal_to_a_worker_saves_at_the_next_step_boundary(story: Story):
    """The launcher's exit code is 75, and the step that was done last exists."""
    assert story.preempted.code == 75, story.preempted.output
    assert f"stopped at step {story.stopped_at}" in story.preempted.output
    assert "--ckpt.resume auto" in story.preempted.output
    assert 8 <= story.stopped_at < END
    assert story.stopped_at in steps(story.run)


def test_the_run_ends_as_if_nothing_had_happened(story: Story):
    """The same metrics for every step, and the same weights and optimiser state, bit for bit."""
    assert untimed(whole_rows(story.run, END)) == untimed(whole_rows(story.straight, END))
    assert_same_bits(tensors(step_folder(story.run, END)), tensors(step_folder(story.straight, END)))
    manifests = [read(step_folder(story.run, step) / "manifest.json") for step in steps(story.run)]
    assert [manifest["parent"] and manifest["parent"]["step"] for manifest in manifests] == [
        None,
        *steps(story.run)[:-1],
    ]
    assert {manifest["run_id"] for manifest in manifests} == {manifests[0]["run_id"]}
    assert manifests[-1]["attempt"] == 3


def test_no_debris_is_left(story: Story):
    """Whatever the accident left has gone."""
    names = {f"step_{step}" for step in {*range(3, END + 1, 3), story.stopped_at}}
    assert set(os.listdir(story.run / "checkpoints")) == names
