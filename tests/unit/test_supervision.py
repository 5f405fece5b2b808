"""Signs of life, the rule for restarts, and what they are said to have cost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from runs import CONFIGS, DEADLINE, REPOSITORY, environment_of

from cairn.checkpoint.saving.arena import SaveFailed
from cairn.config.trainer import SFTConfig
from cairn.launch import commands, main
from cairn.launch.exit_report import conclude_early
from cairn.launch.supervise.slot import RoleProcess
from cairn.launch.supervisor import hopeless
from cairn.run import heartbeat
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_LOST, PolicyAltered, RoleFailed
from cairn.run.files import read_note, write_json
from cairn.run.heartbeat import INTERVAL, Beat, Watch
from cairn.run.history import Account, History
from cairn.run.messages import Attempt
from cairn.run.supervised import RestartRule
from cairn.trainer.checkpoints import OtherWriters

# Starting


@pytest.mark.parametrize("local", [True, False])
def test_ray_leaves_a_role_where_it_was_started(tmp_path: Path, local: bool):
    """Under `uv run` its workers would run in a copy of the folder, and write there, if nobody says no.

    It reads that when it is imported, so it has to be in the environment of every role from its start. So has
    what keeps a cluster that is for this machine alone off the network.
    """
    role = RoleProcess("trainer", tmp_path, tmp_path / "log", local_ray=local)
    try:
        settings = environment_of(role.pid)
    finally:
        role.kill()
    assert b"RAY_ENABLE_UV_RUN_RUNTIME_ENV=0" in settings
    assert (b"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in settings) == local


# Signs of life

LIVES = """
import json, sys, threading, time
from pathlib import Path
from cairn.inference.server import ServerProgress
from cairn.run import heartbeat
from cairn.run.waiting import wait_for
signs = ServerProgress()
heartbeat.start(Path(sys.argv[1]))
heartbeat.doing("step 7")
print("ready", flush=True)
for line in sys.stdin:
    if line == "wait\\n":
        wait_for(lambda: None, seconds=600, whom="batch 8", setting="--x")
    if line == "wait aside\\n":
        threading.Thread(target=wait_for, args=(lambda: None,), daemon=True,
                         kwargs=dict(seconds=600, whom="a part", setting="--x")).start()
    if line[0] == "{":
        signs.note(json.loads(line))
        continue
    heartbeat.doing("step 7")
"""


class Child:
    """A process with a heartbeat, and who watches it."""

    def __init__(self, path: Path):
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIVES, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"
        self.until(lambda beat: beat.doing == "step 7")

    def until(self, condition: Callable[[Beat], bool]) -> None:
        """Wait until its file says so."""
        while not ((beat := read_note(self.path, Beat)) and condition(beat)):
            time.sleep(0.05)

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def watch(self, *, silence: float, standstill: float) -> Watch:
        return Watch(self.path, self.process.pid, silence=silence, standstill=standstill)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """In step 7."""
    child = Child(tmp_path / "heartbeats" / "trainer.json")
    yield child
    child.process.kill()
    child.process.wait()


def look(watch: Watch, seconds: float = DEADLINE) -> str | None:
    """The first problem that is seen within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if problem := watch.problem():
            return problem
        time.sleep(0.05)
    return None


@pytest.mark.slow
def test_a_stopped_process_is_told_from_a_slow_one(child: Child):
    """One that works on the same thing gives signs of life; one that is stopped does not."""
    watch = child.watch(silence=2 * INTERVAL, standstill=600)
    for _ in range(4):
        beats = read_note(child.path, Beat).beats
        child.until(lambda beat, last=beats: beat.beats != last)
        watch._looked -= INTERVAL  # as much passes at least, whenever the next look is
        assert watch.problem() is None
    child.process.send_signal(signal.SIGSTOP)
    problem = look(watch)
    assert problem == "no sign of life for 2 s (last: step 7); --heartbeat-timeout allows more"


@pytest.mark.slow
def test_a_process_that_does_not_come_on_hangs(child: Child):
    """Unless it waits for somebody, which has a deadline of its own; another thread's wait is none of its."""
    assert look(child.watch(silence=600, standstill=1)) == (
        "no progress for 1 s (step 7); --hang-timeout allows more"
    )
    child.tell("wait aside")
    assert "(step 7)" in look(child.watch(silence=600, standstill=1))
    child.tell("wait")
    child.until(lambda beat: beat.waiting)
    assert look(child.watch(silence=600, standstill=1), 2.5) is None


@pytest.mark.slow
def test_a_server_that_takes_weights_is_given_more_time(child: Child):
    """But only so much: further answers about the same update are no progress."""

    def says(**status: object) -> None:
        child.tell(json.dumps(status))

    def taking(seconds: float, version: str = "run:7") -> None:
        says(updating={"version": version, "seconds": seconds})

    def watch() -> Watch:
        return Watch(child.path, child.process.pid, silence=600, standstill=1, setting="--limit", lengthy=8)

    says()
    child.until(lambda beat: beat.doing == "serving")
    assert look(watch()) == "no progress for 1 s (serving); --limit allows more"
    taking(0.1)
    child.until(lambda beat: beat.lengthy)
    watching = watch()
    assert look(watching, 2) is None
    taking(2.1)
    assert look(watching) == ("no progress for 8 s (taking the weights run:7); --hang-timeout allows more")
    for begins in ((0.1, "run:8"), (0.05, "run:8")):
        marks = read_note(child.path, Beat).marks
        taking(*begins)
        child.until(lambda beat, last=marks: beat.marks != last)


def test_a_process_that_never_gives_a_sign(tmp_path: Path, child: Child):
    """What another process has left in the file is not taken for its own."""
    watch = Watch(child.path, os.getpid(), silence=0.5, standstill=600)
    assert "no sign of life for 0.5 s (last: starting)" in look(watch)
    assert "no sign of life" in look(Watch(tmp_path / "none.json", 1, silence=0.2, standstill=600))


def test_a_watcher_that_was_held_up_does_not_blame_the_watched(child: Child):
    """As on a machine that was suspended."""
    watch = child.watch(silence=600, standstill=600)
    watch.problem()
    watch.limits["still"] = 2.5
    watch._looked -= 3600
    assert watch.problem() is None


# Restarts


def test_restarts_are_put_off_and_end():
    """At once, then later and later; a step that is merely done again is no progress."""
    rule = RestartRule(3)
    assert [rule.wait_after_death(step) for step in (10, 10, 9, 10)] == [0.0, 4.0, 8.0, None]
    rule = RestartRule(3)
    assert [rule.wait_after_death(step) for step in (10, 10, 11, 11, 12)] == [0.0, 4.0, 0.0, 4.0, 0.0]
    assert RestartRule(0).wait_after_death(5) is None
    rule = RestartRule(10)
    assert [rule.wait_after_death(1) for _ in range(11)][-2:] == [30.0, None]


# What it cost


def test_goodput_counts_kept_steps_over_the_time_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the time in which nobody was at work counts, nor steps that are done again count twice."""
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    history = History(tmp_path / "history.jsonl")
    history.begin_attempt(1, None)
    account = Account(history.path, None)
    clock[0] = 1010.0
    assert account.after_step(wait=1.0, step=4.0) == {
        **{"run/restarts": 0, "run/recomputed_steps": 0, "run/recomputed_tokens": 0},
        **{"run/useful_seconds": 5.0, "run/wall_seconds": 10.0, "run/goodput": 0.5},
    }
    kept = account.metrics()
    clock[0] = 1012.0
    account.after_step(wait=0.0, step=2.0)  # which is lost
    history.restart("trainer", step=2, reason="died", how="is started again")
    history.recompute(1, 400)
    account = Account(history.path, kept)
    clock[0] = 1020.0
    metrics = account.after_step(wait=10.0, step=2.0)  # the restart fell into the wait, which then is no use
    assert metrics["run/useful_seconds"] == 7.0
    assert (metrics["run/restarts"], metrics["run/restarts/trainer"]) == (1, 1)
    assert (metrics["run/recomputed_steps"], metrics["run/recomputed_tokens"]) == (1, 400)
    clock[0] = 9000.0
    history.begin_attempt(2, last_active=1030.0)
    clock[0] = 9010.0
    assert Account(history.path, metrics).metrics()["run/wall_seconds"] == 40.0


def test_a_clock_that_is_set_back_costs_no_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither while the run goes on nor between two attempts; there is no negative time."""
    clock = [5000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    history = History(tmp_path / "history.jsonl")
    history.begin_attempt(1, None)
    account = Account(history.path, None)
    clock[0] = 1000.0
    metrics = account.after_step(wait=0.0, step=4.0)
    assert (metrics["run/wall_seconds"], metrics["run/goodput"]) == (4.0, 1.0)
    history.begin_attempt(2, last_active=5010.0)
    assert Account(history.path, metrics).metrics()["run/wall_seconds"] == 4.0
    assert [event["idle"] for event in history.rows()] == [0.0, 0.0]


def test_without_a_history_goodput_is_whole(tmp_path: Path):
    assert Account(tmp_path / "history.jsonl", None).metrics()["run/goodput"] == 1.0


# Stopping


def stopping_run(
    tmp_path: Path, rank: str | None, *, unsaved: bool, waiting: bool, pid: int = 7
) -> RunDirectory:
    """A run whose rank 0 is in state `rank` and says the rest in its signs of life."""
    run = RunDirectory(tmp_path)
    run.begin(Attempt("id", 1, "rl", 0, None, "branch_1"))
    run.heartbeats.mkdir()
    if rank:
        run.set_role("trainer_rank0", rank, pid=7)
        beat = Beat(pid, 1, 1, "step 3, micro-batch 0", waiting, time.time(), unsaved)
        write_json(run.heartbeat("trainer_rank0"), asdict(beat))
    return run


@dataclass
class Role:
    """As the supervisor knows it."""

    lost: str | None = None
    ended: bool = False
    exit_code: int | None = None


NOTHING = "no step was in progress"


@pytest.mark.parametrize(
    ("rank", "beat", "roles", "expected"),
    [
        (None, {}, {}, NOTHING),  # Ray starts
        ("running", {}, {}, NOTHING),  # the model is loaded
        ("running", {"waiting": True}, {}, NOTHING),  # no batch has come yet
        ("running", {"unsaved": True, "pid": 6}, {}, NOTHING),  # said by the one that died
        ("failed", {"unsaved": True}, {}, "a rank of the trainer died"),  # nothing is restarted any more
        ("running", {"unsaved": True}, {}, None),
        ("running", {"unsaved": True, "waiting": True}, {}, None),  # the next batch is being generated
        ("running", {"unsaved": True}, {"orchestrator": Role(lost="orchestrator died")}, None),
        (
            "running",
            {"unsaved": True, "waiting": True},
            {"orchestrator": Role(lost="orchestrator died")},
            "orchestrator died",
        ),
        ("running", {"unsaved": True, "waiting": True}, {"inference": Role(lost="it died")}, "it died"),
        ("running", {"unsaved": True}, {"trainer": Role(lost="trainer died", ended=True)}, "trainer died"),
        ("stopped", {"unsaved": True}, {}, None),  # the driver is about to end
        ("done", {"unsaved": True}, {"trainer": Role(ended=True, exit_code=0)}, None),
        ("stopped", {"unsaved": True}, {"trainer": Role(ended=True, exit_code=75)}, None),
        ("failed", {}, {"trainer": Role(ended=True, exit_code=EXIT_LOST)}, "a rank of the trainer died"),
    ],
)
def test_what_a_run_that_was_asked_to_stop_waits_for(
    tmp_path: Path, rank: str | None, beat: dict, roles: dict[str, Role], expected: str | None
):
    """For a trainer that holds results which are not saved, as long as somebody can still save them."""
    run = stopping_run(tmp_path, rank, **{"unsaved": False, "waiting": False, **beat})
    assert hopeless(run, {"trainer": Role(), "orchestrator": Role(), **roles}) == expected


@pytest.mark.parametrize(
    ("state", "stopping", "part", "said"),
    [
        ("failed", True, "orchestrator", ["waiting for the part of orchestrator"]),
        ("failed", False, "orchestrator", []),  # it is started again
        ("running", True, "orchestrator", []),
        ("failed", True, "trainer0", []),  # its own part
    ],
)
def test_a_rank_says_that_it_waits_for_a_role_that_will_not_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, stopping: bool, part: str, said: list[str]
):
    """Which ends the run, instead of the wait for that role's part of the last save."""
    run = stopping_run(tmp_path, "running", unsaved=True, waiting=False)
    run.set_role("orchestrator", state, pid=8)
    if stopping:
        run.request_stop("SIGTERM")
    found: list[str] = []
    monkeypatch.setattr(heartbeat, "doing", lambda what, *, waiting: found.append(what) if waiting else None)
    writers = OtherWriters(run, 1)
    writers.check(part)
    assert found == said
    writers = OtherWriters(run, 2)
    run.set_role("trainer_rank1", "failed", pid=9)
    with pytest.raises(SaveFailed, match="trainer_rank1 has died"):
        writers.check(part)


def test_how_a_run_that_was_cut_short_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It says what is saved or lost, and how to continue; without checkpoints a finished step is lost."""
    run = stopping_run(tmp_path, None, unsaved=False, waiting=False)
    config = SFTConfig(ckpt={})
    attempt = run.attempt()
    run.request_stop("SIGTERM")
    why = ". The reason of the stop: SIGTERM"

    def ends(step: int) -> str:
        assert conclude_early(run, attempt, step, config, "a rank died") == 75
        return capsys.readouterr().out

    assert ends(0) == "stopped before step 1: nothing is lost. The same command starts again" + why + "\n"
    assert "step 7 could not be saved (a rank died): --ckpt.resume auto resumes from the start" in ends(7)
    folder = run.checkpoints / "step_5"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    assert ends(5) == f"stopped at step 5, saved in {folder}; --ckpt.resume auto resumes{why}\n"
    assert "step 7 could not be saved (a rank died): --ckpt.resume auto resumes from step 5" in ends(7)
    attempt = replace(attempt, start_step=5)
    assert ends(5).startswith(
        f"stopped before step 6: nothing is lost. Step 5, saved in {folder}, is the newest."
    )
    config = SFTConfig()
    with pytest.raises(
        RoleFailed, match="stopped at step 7, which is lost; with --ckpt it would have been saved"
    ):
        ends(7)


def test_a_damaged_roles_file_ends_no_run_that_could_save(tmp_path: Path):
    run = stopping_run(tmp_path, "running", unsaved=True, waiting=False)
    run.roles.write_text("{")
    assert hopeless(run, {"trainer": Role()}) is None


# Damage on the way to servers


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "attempts"), [(("--ckpt",), [1, 2, 3]), ((), [1])])
def test_a_policy_that_is_damaged_again_at_the_same_step_ends_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    attempts: list[int],
):
    """As long as there is progress, another attempt begins; without checkpoints none does."""
    begun: list[int] = []

    def run_roles(run: RunDirectory, plan: object, attempt: Attempt) -> int:
        begun.append(attempt.number)
        if attempt.number < 3:
            run.metrics.append({"step": attempt.number})
        raise PolicyAltered("the policy is not as the trainer wrote it")

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(commands, "run_roles", run_roles)
    argv = ["sft", "@", f"{CONFIGS}/sft.toml", "--output-dir", str(tmp_path / "run"), *flags]
    monkeypatch.setattr("sys.argv", argv)
    assert main.sft() == 1
    assert begun == attempts
    printed = capsys.readouterr()
    told = "the policy is not as the trainer wrote it; going on from the newest checkpoint"
    assert printed.out.count(told) == len(attempts) - 1
    assert "error: the policy is not as the trainer wrote it\n" in printed.err
