"""What a run shows: progress at any width, what is being waited for, and what restarts have cost."""

import io
import os
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from cairn.launch import display as module
from cairn.launch.display import StepDisplay
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json

ROW = {"loss": -0.01234, "lr": 0.0004, "time/step": 0.42, "time/wait": 0.0, "reward/mean": 0.7231}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.heartbeats.mkdir()
    return run


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def shown(display: StepDisplay) -> str:
    """The bar and the line below it, as they stand."""
    display.console.file.truncate(0)
    for renderable in display._bar.get_renderables():
        display.console.print(renderable)
    return display.console.file.getvalue()


def beat(run: RunDirectory, role: str, doing: str, *, ago: float = 0.0) -> None:
    """A heartbeat of a process that has been doing something for so many seconds; below 0: none yet."""
    since = time.time() - ago
    content = {"pid": os.getpid(), "beats": 1, "marks": 1, "doing": doing, "waiting": False, "since": since}
    write_json(run.heartbeat(role), content)


def later(display: StepDisplay, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Update as if so many seconds had passed since the newest step."""
    now = display._moved_at + seconds
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "monotonic", lambda: now)
        display.update()


def test_80_columns_show_the_time_left_and_the_reward_before_the_loss(run: RunDirectory):
    display = StepDisplay(run, 0, 150, console(terminal=True))
    for step in range(1, 11):
        run.metrics.append({"step": step, **ROW})
        display.update()
    text = shown(display)
    assert "training" in text
    assert "10/150" in text
    assert re.search(r"\d:\d\d:\d\d [\d:-]+ left", text)
    assert "reward 0.7231  loss -0.01234  lr 0.0004  0.42 s/step" in text
    assert max(map(len, text.splitlines())) <= 80
    run.metrics.append({"step": 11, **ROW, "rollouts/failed": 0, "rollouts/retried": 12})
    display.update()
    assert "0.42 s/step  retried 12" in shown(display)


def test_while_a_run_starts_each_role_says_what_it_is_doing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    """The trainer's rank 0 speaks for it once it is there; what an earlier attempt has left does not."""
    beat(run, "orchestrator", "serving requests", ago=100)
    display = StepDisplay(run, 0, 150, console(terminal=True))
    later(display, monkeypatch, 1.5)
    assert "roles are being started" in shown(display)
    beat(run, "trainer", "starting Ray", ago=-600)
    later(display, monkeypatch, 3)
    assert "trainer: starting Ray" in shown(display)
    assert "orchestrator" not in shown(display)
    beat(run, "inference", "starting the inference server", ago=-600)
    beat(run, "trainer_rank0", "importing torch", ago=-600)
    later(display, monkeypatch, 5)
    assert shown(display).splitlines()[1:] == [
        "  inference: starting the inference server",
        "  trainer: importing torch",
    ]


def test_a_run_that_stands_still_says_what_is_being_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    """Only after a while; the next step's values take its place."""
    display = StepDisplay(run, 0, 150, console(terminal=True))
    run.metrics.append({"step": 1, **ROW})
    display.update()
    beat(run, "trainer_rank0", "waiting for batch 2", ago=-600)
    later(display, monkeypatch, 5)
    assert "s/step" in shown(display)
    later(display, monkeypatch, 25)
    assert "  no step for 25 s\n  trainer: waiting for batch 2" in shown(display)
    run.metrics.append({"step": 2, **ROW})
    display.update()
    assert "s/step" in shown(display)


def test_without_a_terminal_there_are_lines(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """One every ten seconds while the run starts, then one for a step now and then, and the last step's."""
    display = StepDisplay(run, 0, 4, console(terminal=False))
    beat(run, "trainer", "starting Ray", ago=-600)
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
    run.history.recompute(3)
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


def test_messages_are_not_cut_at_the_edge(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """The reason of failing rollouts stands at the end of its line."""
    display = StepDisplay(run, 0, 9, console(terminal=True))
    beat(
        run,
        "orchestrator",
        f"serving requests; {'rollouts are tried again ' * 6}; KeyError: 'anser'",
        ago=-600,
    )
    later(display, monkeypatch, 3)
    text = shown(display)
    assert "KeyError: 'anser'" in text
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


def test_seconds_a_step_are_with_the_wait(run: RunDirectory):
    display = StepDisplay(run, 0, 9, console(terminal=True))
    run.metrics.append({"step": 1, **ROW, "time/step": 0.72, "time/wait": 18.0})
    display.update()
    assert "18.72 s/step, 18.00 of it waiting" in shown(display)
