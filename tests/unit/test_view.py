"""The snapshot of a run directory: whole, torn, missing and growing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cairn.run.directory import RunDirectory
from cairn.run.files import DamagedFile, write_json
from cairn.run.history import Account, WorkClock
from cairn.run.messages import Attempt
from cairn.run.view import RunView

ATTEMPT = Attempt("5eed", 2, "rl", 3, None, "branch_1")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.heartbeats.mkdir(parents=True)
    run.begin(ATTEMPT)
    return run


def beat(run: RunDirectory, role: str, pid: int, doing: str) -> None:
    content = {"pid": pid, "beats": 1, "marks": 1, "doing": doing, "waiting": False, "since": time.time()}
    write_json(run.heartbeat(role), content)


def test_everything_that_a_run_directory_says(run: RunDirectory):
    write_json(run.config, {"max_steps": 20, "ckpt": {"dir": str(run.path / "elsewhere")}})
    run.set_role("trainer", "running", pid=10)
    run.set_role("orchestrator", "waiting", pid=11)
    beat(run, "trainer", 10, "step 5")
    beat(run, "trainer_rank0", 7, "of the attempt before")
    beat(run, "orchestrator", 9, "of the process before")
    beat(run, "trainer_rank1", 8, "finishing after step 3")
    run.history.begin_attempt(1, None)
    beat(run, "trainer_rank0", 12, "reading batch 5")
    run.history.restart("orchestrator", step=4, reason="died", how="is started again")
    run.history.recompute(2, 800)
    for step in (4, 5):
        run.metrics.append({"step": step, "loss": 1.0 / step})
    run.batches.mkdir()
    for name in ("step_10.safetensors", "step_9.safetensors", "step_x.safetensors", ".step_11.safetensors"):
        (run.batches / name).touch()
    run.request_stop("SIGTERM")

    shot = RunView(run.path).snapshot()
    assert shot.attempt == ATTEMPT
    assert (shot.step, shot.max_steps, shot.checkpoints) == (5, 20, run.path / "elsewhere")
    assert [row["step"] for row in shot.metrics] == [4, 5]
    assert [event["event"] for event in shot.history] == ["attempt", "restart", "recompute"]
    assert (dict(shot.costs.restarts), shot.costs.recomputed_steps) == ({"orchestrator": 1}, 2)
    assert shot.batches == [9, 10]
    assert shot.stop_requested == "SIGTERM"
    doing = {name: (role.state, role.doing) for name, role in shot.roles.items()}
    assert doing == {
        "orchestrator": ("waiting", None),
        "trainer": ("running", "step 5"),
        "trainer_rank0": (None, "reading batch 5"),
    }


def test_a_view_follows_a_run_that_grows_and_goes_back(run: RunDirectory):
    view = RunView(run.path)
    assert view.snapshot().step == 3  # where the attempt began
    for step in range(4, 9):
        run.metrics.append({"step": step})
        assert view.snapshot().step == step
    before = view.snapshot()
    with open(run.metrics.path, "a") as file:
        file.write('{"step": 9, "lo')
    assert view.snapshot().step == 8
    run.metrics.keep_through(5)
    assert [row["step"] for row in view.metrics()] == [4, 5]
    run.metrics.append({"step": 6, "again": True})
    assert view.snapshot().metrics[-1] == {"step": 6, "again": True}
    assert before.step == 8  # a snapshot stays as it was
    run.metrics.path.unlink()
    assert list(view.metrics()) == []


def test_a_folder_without_a_run_is_empty(tmp_path: Path):
    for path in (tmp_path, tmp_path / "not there"):
        shot = RunView(path).snapshot()
        assert (shot.state, shot.step, shot.max_steps, shot.attempt) == ("empty", 0, None, None)
        assert not any(map(len, (shot.roles, shot.metrics, shot.history, shot.batches)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"step": "x"}\n'])
def test_damaged_files_are_left_out(run: RunDirectory, content: bytes):
    for path in (run.config, run.roles, run.heartbeat("trainer"), run.path / "stop.json"):
        path.write_bytes(content)
    for log in (run.metrics, run.history):
        log.path.write_bytes(content + b"\n")
    run.metrics.append({"step": 1})
    shot = RunView(run.path).snapshot()
    assert (shot.attempt, shot.max_steps, shot.stop_requested) == (None, None, None)
    assert list(shot.metrics) == [{"step": 1}]
    assert not shot.roles


def test_a_file_that_can_not_be_read_at_all_is_named(run: RunDirectory):
    run.metrics.path.mkdir()
    with pytest.raises(DamagedFile, match=r"metrics\.jsonl: can't be read"):
        RunView(run.path).snapshot()


def test_the_state_of_a_run(run: RunDirectory):
    """By its launcher's lock while that lives, then by how the trainer ended."""
    code = (
        "import sys, time; from cairn.run.directory import RunDirectory; "
        f"run = RunDirectory({str(run.path)!r}); print(run.lock(), flush=True); time.sleep(600)"
    )
    view = RunView(run.path)
    run.set_role("trainer", "running")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"True\n"
        assert view.snapshot().state == "running"
        run.request_stop("SIGINT")
        assert view.snapshot().state == "stopping"
        launcher.kill()
    assert view.snapshot().state == "killed"
    for state in ("done", "stopped", "failed"):
        run.set_role("trainer", state)
        assert view.snapshot().state == state


def test_looking_does_not_keep_a_launcher_out(run: RunDirectory):
    """Whoever looks holds the lock for an instant, for which a launcher waits."""
    fd = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    code = (
        "import sys; from cairn.run.view import RunView; "
        f"view = RunView({str(run.path)!r}); print('looking', flush=True)\n"
        "while True: view.run.is_locked()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as viewer:
        viewer.stdout.readline()
        for _ in range(50):
            launcher = RunDirectory(run.path)
            assert launcher.lock()
            launcher.unlock()
        viewer.kill()
    assert run.lock()
    assert not RunDirectory(run.path).lock()


def test_what_a_run_cost_stops_growing_when_it_ends(run: RunDirectory):
    """A run that ended long ago was not at work since."""
    began = time.time() - 1000
    lines = [{"time": began, "event": "attempt", "number": 1, "idle": 0.0}]
    run.history.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.metrics.append({"step": 1, "run/useful_seconds": 50.0})
    for path in (run.metrics.path, run.roles):
        os.utime(path, (began + 100, began + 100))
    costs = RunView(run.path).costs()
    assert costs.wall_seconds == pytest.approx(100, abs=0.1)
    assert costs.goodput == pytest.approx(0.5, abs=0.01)


def test_the_clock_of_a_run_stands_still_between_attempts(run: RunDirectory):
    """What was before the first attempt that is known does not count, and a clock set back turns nothing."""
    times = [(1000.0, 500.0), (1100.0, 60.0), (1090.0, 0.0), (1200.0, 30.0)]
    lines = [
        {"time": time, "event": "attempt", "number": number, "idle": idle}
        for number, (time, idle) in enumerate(times, start=1)
    ]
    clock = WorkClock(lines)
    assert (clock.later, clock.idle, clock.at(1205.0)) == ([40.0, 40.0, 110.0], 90.0, 115.0)
    assert [clock.moment(wall) for wall in (0.0, 40.0, 41.5, 110.0, 112.0)] == [
        *(1000.0, 1040.0, 1101.5, 1170.0, 1202.0)
    ]
    run.history.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Account(run.history.path, None).costs(1205.0).wall_seconds == 115.0
    assert (WorkClock().at(7.0), WorkClock().moment(7.0)) == (0.0, 7.0)


def test_lines_without_a_row_are_numbered(run: RunDirectory):
    """For the audit, which says which line of the file is wrong; one that is still being written is not."""
    run.metrics.path.write_bytes(b'{"step": 1}\n\n{"loss": 1}\n\xff\n{"step": 2}\n{"ste')
    assert run.metrics.numbered() == [
        (1, '{"step": 1}', {"step": 1}),
        (2, "", None),
        (3, '{"loss": 1}', None),
        (4, "�", None),
        (5, '{"step": 2}', {"step": 2}),
    ]
    run.metrics.path.write_bytes(b"")
    assert run.metrics.numbered() == []


def test_the_state_of_a_copy_without_roles_is_what_its_history_says(run: RunDirectory):
    """Or unknown: nobody can tell from a copy whether the run goes on elsewhere."""
    view = RunView(run.path)
    run.history.path.unlink(missing_ok=True)
    run.metrics.append({"step": 1})
    run.roles.unlink()
    assert (view.snapshot().state, view.command()) == ("unknown", None)
    run.history.begin_attempt(1, None, ["rl", "--ckpt"])
    assert (view.snapshot().state, view.snapshot().command, view.command()) == ("unknown", "rl", "rl")
    for state in ("done", "stopped", "failed", "killed", "odd"):
        run.history.ended(1, state, step=1, reason="")
        assert view.snapshot().state == (state if state != "odd" else "unknown")
    run.history.begin_attempt(2, None, ["rl", "--ckpt"])
    assert view.snapshot().state == "unknown"
