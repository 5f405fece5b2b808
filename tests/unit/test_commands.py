"""The command `cairn`, which has all the others, and the page of what stays as it is."""

import functools
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from typing import get_args

import pytest
from runs import REPOSITORY
from test_packaging import PROJECT

import cairn
from cairn.checkpoint.manifest import Manifest
from cairn.config.cli import COMMANDS
from cairn.config.settings import settings_of
from cairn.launch import main
from cairn.run.exits import EXIT_STOPPED, EXIT_USAGE
from cairn.run.extensions import Group

PAGE = (REPOSITORY / "docs" / "stability.md").read_text()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cairn", *arguments])
    return main.main()


def test_all_commands_are_listed_with_what_they_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Those installed under their own names, and those whose names would hide other programs."""
    assert run(monkeypatch, "--help") == run(monkeypatch) == 0
    shown = dict(re.findall(r"^  (\w+) +(\w.+)$", capsys.readouterr().out, re.M))
    assert shown.keys() == main.EACH.keys()
    scripts = {name for name in PROJECT["project"]["scripts"] if name != "cairn"}
    assert main.EACH.keys() - {"new", "env", "chat", "chaos", "service", "branches"} == scripts
    assert shown["sft"] == "supervised fine-tuning"


def test_help_is_answered_without_anything_heavy():
    """By `python -m cairn`, which is the same command."""
    code = (
        "import sys; from cairn.launch.main import main; sys.argv = ['cairn']; main(); "
        "print('heavy:', *({'torch', 'ray', 'vllm', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy:\n")
    module = subprocess.run([sys.executable, "-m", "cairn", "--version"], capture_output=True, text=True)
    assert module.stdout == f"cairn {cairn.__version__}\n"


def test_a_command_gets_its_arguments_as_without_cairn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The name in argv is the command's own: a run notes it as the command that goes on."""
    seen: list[list[str]] = []
    monkeypatch.setitem(main.EACH, "sft", lambda: seen.append(sys.argv) or 7)
    assert run(monkeypatch, "sft", "@", "x.toml", "--ckpt") == 7
    assert seen == [["sft", "@", "x.toml", "--ckpt"]]
    assert run(monkeypatch, "dpo", "--max-stes", "3") == EXIT_USAGE
    assert "did you mean --max-steps?" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "rollout") == EXIT_USAGE
    assert capsys.readouterr().err == (
        "error: cairn rollout: there is no such command; did you mean rollouts?; cairn --help lists them\n"
    )


# docs/stability.md


def listed(heading: str) -> list[str]:
    """The first column of the table under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [
        name for row in re.findall(r"^\| (`[^|]+) \|", section, re.M) for name in re.findall("`([^`]+)`", row)
    ]


def test_the_stable_commands_are_there():
    names = listed("Commands")
    assert names == [f"cairn {name}" for name in main.EACH if name not in ("trainer", "orchestrator")]
    codes = dict(re.findall(r"^- `(\d+)`: (.+?)[.;]", PAGE, re.M))
    assert codes.keys() == {"0", "1", str(EXIT_USAGE), str(EXIT_STOPPED)}


def test_the_stable_settings_are_there():
    names = listed("Settings")
    assert len(names) > 30
    for name in names:
        command, _, path = name.partition(" ")
        assert settings_of(COMMANDS[command]).find(tuple(path.split("."))) is not None, name


def test_the_stable_names_of_python_are_there_and_what_they_take():
    """A removed name or argument fails here: then the page, the version and the changelog change."""
    names = listed("Python")
    assert {f"cairn.{name}" for name in cairn.__all__} <= {name.partition("(")[0] for name in names}
    for name in names:
        path, _, arguments = name.partition("(")
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            try:
                module = importlib.import_module(".".join(parts[:count]))
                break
            except ModuleNotFoundError:
                continue
        found = functools.reduce(getattr, parts[count:], module)
        if arguments:
            wanted = [one.strip(" *)") for one in arguments.split(",")]
            there = list(inspect.signature(found).parameters)
            assert [one for one in wanted if one and one not in there] == [], name


def test_the_stable_formats_and_groups_are_there():
    first, second = get_args(Manifest.model_fields["format"].annotation)
    assert f"writes format {first}, and format {second} if the optimiser's state is compressed" in " ".join(
        PAGE.split()
    )
    assert listed("Plug-ins") == list(get_args(Group))
