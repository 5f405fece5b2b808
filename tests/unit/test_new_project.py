"""`cairn new`: the project that it writes works, and what it refuses."""

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import REPOSITORY

from cairn.launch.main import main
from cairn.tools.new import requirement

NAME = "my_words"
Cairn = Callable[..., int]


@pytest.fixture
def cairn(monkeypatch: pytest.MonkeyPatch) -> Cairn:
    """`cairn("new", "x")`: the command of that name, in this process; returns the exit code."""

    def cairn(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["cairn", *map(str, arguments)])
        return main()

    return cairn


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cairn: Cairn
) -> Iterator[Path]:
    """A new project in the working folder, installed as `uv sync` would: a package with an entry point."""
    folder = tmp_path / "work" / NAME
    assert cairn("new", folder) == 0
    said = capsys.readouterr().out
    assert f"cd {folder}" in said
    assert f"cairn env try {NAME}" in said
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / f"{NAME}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
            for group, named in points.items()
        )
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_new_project_runs_as_its_readme_says(
    project: Path, cairn: Cairn, capsys: pytest.CaptureFixture[str]
):
    """Its test, its data, its environment under its name, and the plans of both runs."""
    readme = (project / "README.md").read_text()
    programs = {
        "pytest": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        f"python -m {NAME}.demonstrations": ["-m", f"{NAME}.demonstrations"],
    }
    for line, arguments in programs.items():
        assert f"\n{line}\n" in readme
        done = subprocess.run([sys.executable, *arguments], cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"\ncairn env try {NAME} --answer abc\n" in readme
    assert cairn("env", "try", NAME, "--answer", "abc", "ggijuv", "--json") == 0
    tried = json.loads(capsys.readouterr().out)
    assert tried["messages"] == [{"role": "user", "content": "gjiuvg"}]
    assert [one["reward"] for one in tried["answers"]] == [0.0, 1.0]
    for command in ("sft", "rl"):
        assert f"\ncairn {command} @ {command}.toml" in readme
        assert cairn(command, "@", f"{command}.toml", "--dry-run") == 0
        assert f"outputs/{command}" in capsys.readouterr().out
    assert not (project / "outputs").exists()


def test_what_the_new_project_consists_of(project: Path):
    """No placeholder is left, and the model is that of the example."""
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert {"README.md", "pyproject.toml", ".gitignore", "rl.toml", "model/config.json"} <= files
    assert {f"{NAME}/environment.py", f"{NAME}/__init__.py", "tests/test_environment.py"} <= files
    assert not [name for name in files if name.endswith(".in")]
    texts = {name: (project / name).read_text() for name in files}
    assert [name for name, text in texts.items() if "my_task" in text or "{cairn}" in text] == []
    ours = REPOSITORY / "configs" / "reverse_text" / "model"
    for path in ours.iterdir():
        assert texts[f"model/{path.name}"] == path.read_text()
    about = tomllib.loads(texts["pyproject.toml"])
    (torch,) = (one for one in importlib.metadata.requires("cairn") or [] if one.startswith("torch=="))
    assert about["tool"]["uv"]["override-dependencies"] == [torch]
    assert about["project"]["dependencies"][0].startswith(("cairn[cpu]", "cairn[gpu]"))
    checks = ["check", "--isolated", "--select", "E,F,I,B,UP", "--line-length", "110", project]
    done = subprocess.run([sys.executable, "-m", "ruff", *map(str, checks)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Task", "'My-Task' can't be the name of a Python package"),
        ("class", "'class' can't be the name of a Python package"),
        ("json", "'json' is the name of another module"),
        ("torch", "a module 'torch' is installed"),
        ("calculator", "Cairn has an environment 'calculator' of its own"),
        ("taken", "is there already"),
        ("", "can't be the name"),
    ],
)
def test_names_that_no_project_can_have_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cairn: Cairn,
    name: str,
    message: str,
):
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cairn("new", name) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (None, "cairn[cpu]==0.1.0"),
        ({"url": "file:///src/cairn", "dir_info": {"editable": True}}, "cairn[cpu] @ file:///src/cairn"),
        (
            {"url": "https://example.org/c.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}},
            "cairn[cpu] @ git+https://example.org/c.git@0a1b",
        ),
    ],
)
def test_a_project_depends_on_the_cairn_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: dict[str, object] | None, wanted: str
):
    info = tmp_path / "cairn-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cairn\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert requirement("cpu") == wanted
