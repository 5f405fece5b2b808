"""What a run says at its end and its start: what can be done next, and where the learning rate ends."""

import errno
import os
import re
import sys
import threading
from pathlib import Path

import pytest

import cairn
from cairn.api.training import in_python
from cairn.checkpoint.saving.saver import _what_to_do
from cairn.config.cli import COMMANDS
from cairn.config.kinds import KINDS
from cairn.config.optimizer import SchedulerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch import main
from cairn.launch.exit_report import after_failure, what_next
from cairn.launch.plan.settings import with_steps
from cairn.run import output
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError


@pytest.mark.parametrize("command", sorted(KINDS))
@pytest.mark.parametrize("saved", [True, False])
def test_what_can_be_done_next(command: str, saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands that exist, with paths that a shell takes from here."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "my runs" / "one")
    said = what_next(run, command, run.checkpoints / "step_20" if saved else None)
    for one in said.split(", "):
        assert hasattr(main, one.split()[0]) or one.startswith("scripts/plot_run.py ")
        assert "'my runs/one" in one
    assert after_failure(run) == "watch 'my runs/one', diagnose 'my runs/one', dash 'my runs/one'"
    assert {"diagnose", "dash"} <= {one.split()[0] for one in said.split(", ")}
    assert ("rollouts" in said) == (command in ("rl", "trainer"))
    assert ("inference --model.name 'my runs/one/checkpoints/step_20'" in said) == (
        saved and command != "reward"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"type": "constant"}, None),
        (
            {"type": "cosine"},
            "falls to 0 of its peak at step 40, the last one (scheduler.steps is another end",
        ),
        ({"type": "cosine", "steps": 30}, "at step 30, and steps 31 to 40 go on and learn nothing; raise"),
        ({"type": "linear", "steps": 30, "min_lr_ratio": 0.1}, "steps 31 to 40 go on with this rate"),
        ({"type": "linear", "steps": 60}, None),
    ],
)
def test_the_end_of_the_schedule_is_said_at_the_start(settings: dict, said: str | None):
    config = SFTConfig(max_steps=40, scheduler=SchedulerConfig(**settings))
    lines: list[str] = []
    with_steps(KINDS["sft"], config, lines.append)
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]


def test_rl_names_its_own_flag():
    config = COMMANDS["rl"].model_validate({"trainer": {"scheduler": {"type": "linear"}}, "max_steps": 9})
    lines: list[str] = []
    with_steps(KINDS["rl"], config, lines.append)
    assert re.match(r"trainer\.scheduler\.type = linear: .* at step 9", lines[0])


def test_a_full_disk_is_met_with_what_to_do():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "step_12")
    assert "free space, and repeat the command with --ckpt.resume auto" in _what_to_do(full)
    assert _what_to_do(OSError(errno.EACCES, os.strerror(errno.EACCES), "step_12")) == ""


@pytest.mark.parametrize(
    ("message", "python"),
    [
        ("give --ckpt.resume-step 40", 'give ckpt={"resume_step": 40}'),
        (
            "--lerning-rate: no; did you mean --optimizer.lr?",
            'lerning_rate: no; did you mean optimizer={"lr": ...}?',
        ),
        ("accept it with --ckpt.accept-changes lr", 'accept it with ckpt={"accept_changes": ...} lr'),
        ("--trainer.optimizer.lr 1e-4 is", 'trainer={"optimizer": {"lr": 1e-4}} is'),
        ("repeat with --ckpt.resume auto", 'repeat with ckpt={"resume": "auto"}'),
        ("--max-steps 60 steps", "max_steps=60 steps"),
        ("--help lists all settings", "`sft --help` lists all settings"),
        ("a -- b, x--y, --- and /a--b/c", "a -- b, x--y, --- and /a--b/c"),
    ],
)
def test_errors_of_the_api_speak_python(message: str, python: str):
    assert in_python(message, "sft") == python


def test_an_unknown_setting_of_the_api_is_named_as_in_python():
    with pytest.raises(UsageError) as refused:
        cairn.sft({"model": {"name": "x"}}, lerning_rate=1)
    assert str(refused.value).startswith("lerning_rate: there is no such setting; did you mean optimizer={")


def test_a_slow_command_says_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output, "SOON", 0.0)
    said = threading.Event()
    monkeypatch.setattr("builtins.print", lambda *words, **_: (sys.stderr.write(f"{words}"), said.set()))
    with output.saying("reading the model"):
        assert said.wait(60)
    assert "reading the model ..." in capsys.readouterr().err
    monkeypatch.setattr(output, "SOON", 3600.0)
    with output.saying("never"):
        pass
    assert "never" not in capsys.readouterr().err
