"""What a run shows: progress at any width, what is being waited for, and what restarts have cost."""

import io
import os
import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from rich.console import Console

from cairn.launch import display as module
from cairn.launch.display import StepDisplay
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt

ROW = {"loss": -0.01234, "lr": 0.0004, "time/step": 0.42, "time/wait": 0.0, "reward/mean": 0.7231}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.heartbeats.mkdir()
    write_json(run.config, {"max_steps": 150})
    run.begin(Attempt("5eed", 1, "rl", 0, None, "branch_1"))
    run.history.begin_attempt(1, None)
    return run


@pytest.fixture
def locked(run: RunDirectory) -> Generator[RunDirectory]:
    """A run that a launcher is at work on."""
    lock(run)
    yield run
    run.unlock()


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def shown(display: StepDisplay) -> str:
    """The live view, as it stands."""
    display.console.file.truncate(0)
    display.console.file.seek(0)
    display.console.print(display._panel())
    return display.console.file.getvalue()


def beat(run: RunDirectory, role: str, doing: str, *, ago: float = 0.0) -> None:
    """A heartbeat of a role's process that has been doing something for so many seconds."""
    since = time.time() - ago
    run.set_role(role, "running")
    content = {"pid": os.getpid(), "beats": 1, "marks": 1, "doing": doing, "waiting": False, "since": since}
    write_json(run.heartbeat(role), content)


def later(display: StepDisplay, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Update as if so many seconds had passed since the newest step."""
    now = display._moved_at + seconds
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: now)
        display.update()


def test_80_columns_show_the_time_left_and_the_curves_that_matter(locked: RunDirectory):
    """Of RL the reward, and not the loss, which has no meaning of its own."""
    display = StepDisplay(locked, 0, 150, console(terminal=True))
    for step in range(1, 11):
        locked.metrics.append({"step": step, **ROW, "reward/mean": step / 10})
        display.update()
    text = shown(display)
    assert re.search(r"rl\s+running", text)
    assert "step 10 of 150  59 s left  0.42 s/step" in text
    assert re.search(r"reward +1 +▁▂▃▃▄▅▆▆▇█", text)
    assert "loss" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_while_a_run_starts_each_role_says_what_it_is_doing(locked: RunDirectory):
    """The trainer's rank 0 speaks for it once it is there; what an earlier process has left does not."""
    dead = {"pid": 1, "beats": 1, "marks": 1, "doing": "serving requests", "waiting": False, "since": 1.0}
    write_json(locked.heartbeat("orchestrator"), dead)
    display = StepDisplay(locked, 0, 150, console(terminal=True))
    beat(locked, "trainer", "starting Ray")
    assert re.search(r"trainer +starting Ray", shown(display))
    assert "serving" not in shown(display)
    beat(locked, "inference", "starting the inference server", ago=5)
    beat(locked, "trainer_rank0", "importing torch")
    lines = [line.split(maxsplit=1) for line in shown(display).splitlines()]
    assert ["trainer", "importing torch"] in [[word.strip() for word in line] for line in lines]
    assert ["inference", "starting the inference server (5 s)"] in [
        [w.strip() for w in line] for line in lines
    ]


def test_a_run_that_stands_still_says_so(locked: RunDirectory):
    """Only after a while; the next step takes it back."""
    display = StepDisplay(locked, 0, 150, console(terminal=True))
    locked.metrics.append({"step": 1, **ROW})
    assert "no step" not in shown(display)
    ago = time.time() - 25
    os.utime(locked.metrics.path, (ago, ago))
    write_json(locked.history.path, {"event": "attempt", "time": ago, "number": 1, "idle": 0.0})
    display = StepDisplay(locked, 0, 150, console(terminal=True))
    beat(locked, "trainer_rank0", "waiting for batch 2")
    beat(locked, "trainer", "watching ranks")
    assert "no step for 25 s" in shown(display)
    assert re.search(r"trainer +waiting for batch 2", shown(display))
    locked.metrics.append({"step": 2, **ROW})
    assert "no step" not in shown(display)


def test_without_a_terminal_there_are_lines(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """One every ten seconds while the run starts, then one for a step now and then, and the last step's."""
    display = StepDisplay(run, 0, 4, console(terminal=False))
    beat(run, "trainer", "starting Ray")
    with display:
        for seconds in (1, 2, 12, 13):
            later(display, monkeypatch, seconds)
        for step in range(1, 5):
            run.metrics.append({"step": step, **ROW})
            display.update()
    lines = display.console.file.getvalue().splitlines()
    assert lines[0] == "starting for 12 s: trainer: starting Ray"
    assert lines[-1].startswith("step 4/4  reward 0.7231")
    assert len(lines) <= 3


def test_a_run_without_restarts_has_no_account(run: RunDirectory):
    """A low goodput after a short run would only say that starting takes time."""
    run.history.begin_attempt(1, None)
    display = StepDisplay(run, 0, 4, console(terminal=False))
    run.metrics.append({"step": 1, **ROW, "run/useful_seconds": 1.0})
    assert display.account() is None
    run.history.restart("trainer", step=1, reason="died", how="is started again")
    run.history.recompute(3, 1200)
    assert display.account().startswith("1 restart, 3 steps recomputed, goodput ")


FLAT = {"groups": 8, "groups/unlearned": 8, "groups/all_worst": 8, "groups/all_best": 0}


@pytest.mark.parametrize("terminal", [True, False])
def test_what_keeps_a_run_from_learning_is_said_once_at_once_and_at_the_end(
    run: RunDirectory, terminal: bool
):
    display = StepDisplay(run, 0, 9, console(terminal=terminal, width=300))
    with display:
        for step in range(1, 7):
            run.metrics.append({"step": step, **ROW, **FLAT})
            display.update()
    said = display.console.file.getvalue()
    assert said.count("note: ") == 1
    assert "note: 16 of 16 prompts taught nothing in steps 1 to 2 (all answers alike: 16 all wrong)" in said
    (outcome,) = display.outcome()
    assert "48 of 48 prompts taught nothing in steps 1 to 6" in str(outcome)


def test_an_attempt_repeats_a_note_only_if_settings_changed(run: RunDirectory):
    """The turns of a branch are attempts, too."""

    def said(*steps: int, of: str) -> int:
        display = StepDisplay(run, steps[0] - 1, 9, console(terminal=False, width=300))
        with display:
            for step in steps:
                run.metrics.append({"step": step, **ROW, **FLAT})
                display.update()
        (outcome,) = display.outcome()
        assert f"taught nothing in steps {of} (" in str(outcome)
        return display.console.file.getvalue().count("note: ")

    assert said(1, 2, 3, of="1 to 3") == 1
    assert said(4, 5, of="1 to 5") == 0
    run.history.change({"step": 5, "name": "orchestrator.sampling.max_tokens"})
    assert said(6, 7, of="6 to 7") == 1


def test_messages_are_not_cut_at_the_edge(locked: RunDirectory):
    """The reason of failing rollouts stands at the end of its line."""
    display = StepDisplay(locked, 0, 9, console(terminal=True))
    beat(locked, "orchestrator", f"serving requests; {'rollouts are tried again ' * 6}; KeyError: 'anser'")
    text = shown(display)
    assert "KeyError: 'anser'" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_signals_line_waits_for_the_bar(run: RunDirectory, capfd: pytest.CaptureFixture[str]):
    """Written by the handler itself, it was torn by the bar; after the bar it is written at once."""
    display = StepDisplay(run, 0, 9, console(terminal=True))
    with display:
        display.say("SIGINT: stopping at the next step boundary")
        assert capfd.readouterr().out == ""
        display.update()
    assert display.console.file.getvalue().count("SIGINT: stopping at the next step boundary") == 1
    display.say("SIGTERM: too late")
    assert capfd.readouterr().out == "SIGTERM: too late\n"


def test_seconds_a_step_are_with_the_wait(locked: RunDirectory):
    row = {**ROW, "time/step": 0.72, "time/wait": 18.0}
    display = StepDisplay(locked, 0, 9, console(terminal=True, width=120))
    plain = StepDisplay(locked, 0, 9, console(terminal=False))
    locked.metrics.append({"step": 1, **row})
    plain.update(final=True)
    assert "18.72 s/step, 96% of it waiting" in shown(display)
    assert "18.72 s/step, 18.00 of it waiting" in plain.console.file.getvalue()


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_each_command_shows_what_matters_for_it(run: RunDirectory, command: str):
    run.begin(Attempt("5eed", 1, command, 0, None, "branch_1"))
    row = {
        "step": 1,
        "loss": 0.61,
        "rewards/accuracies": 0.75,
        "rewards/margins": 0.2,
        "validation/held/loss": 2.5,
    }
    display = StepDisplay(run, 0, 9, console(terminal=False))
    run.metrics.append(row)
    display.update(final=True)
    line = display.console.file.getvalue()
    assert "loss 0.61" in line
    assert "validation held 2.5" in line
    assert ("accuracy 0.75  margin 0.2" in line) == (command == "dpo")
