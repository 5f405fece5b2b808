"""`scripts/test --affected` leaves out no test that a change can break."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPOSITORY

sys.path.append(str(REPOSITORY / "scripts"))
affected = importlib.import_module("affected")

FILES = {
    "pyproject.toml": '[project]\nscripts = { train = "cairn.launch.main:train" }\n',
    "configs/small.toml": "steps = 1\n",
    "docs/page.md": "text\n",
    "src/__init__.py": "",
    "src/launch/__init__.py": "",
    "src/launch/main.py": "def train():\n    from cairn.trainer import loop\nROLE = 'cairn.launch.role'\n",
    "src/launch/role.py": '"""See docs/page.md."""\nSEE = "read docs/page.md"\n',
    "src/trainer/__init__.py": 'def make(name):\n    return f"cairn.trainer.losses.{name}"\n',
    "src/trainer/loop.py": "",
    "src/trainer/losses/__init__.py": "",
    "src/trainer/losses/square.py": "",
    "src/alone.py": "",
    "tests/conftest.py": "",
    "tests/helper.py": "import pytest\n@pytest.fixture\ndef trained(shell):\n    shell.run('train')\n",
    "tests/fixtures.py": "import pytest\n@pytest.fixture\ndef more(trained):\n    pass\n",
    "tests/wrong.py": "class Wrong: ...\n",
    "tests/unit/test_import.py": "def test_it():\n    from cairn.trainer.loop import x\n",
    "tests/unit/test_string.py": 'def test_it(patch):\n    patch.setattr("cairn.trainer.loop.x", 1)\n',
    "tests/unit/test_command.py": "def test_it(shell):\n    shell.run('train')\n",
    "tests/unit/test_fixture.py": "def test_it(more):\n    pass\n",
    "tests/unit/test_config.py": 'CONFIGS = "configs"\ndef test_it():\n    open(f"{CONFIGS}/small.toml")\n',
    "tests/unit/test_page.py": 'def test_it(root):\n    (root / "docs" / "page.md").read_text()\n',
    "tests/unit/test_class.py": 'NAME = "wrong:Wrong"\n',
    "tests/unit/test_scan.py": "import cairn\ndef test_it():\n    Path(cairn.__file__).parent.rglob('*')\n",
    "tests/unit/test_nothing.py": '"""Not of cairn.trainer.loop."""\ndef test_it():\n    pass\n',
}
NEEDS_COMMAND = ["command", "fixture"]
CASES = {
    "src/trainer/loop.py": [*NEEDS_COMMAND, "import", "string"],
    "src/launch/role.py": NEEDS_COMMAND,
    "src/trainer/losses/square.py": [*NEEDS_COMMAND, "import", "string"],
    "src/alone.py": [],
    "src/gone.py": ["gone"],
    "configs/small.toml": ["config"],
    "docs/page.md": ["page"],
    "tests/helper.py": ["fixture"],
    "tests/fixtures.py": ["fixture"],
    "tests/wrong.py": ["class"],
    "tests/unit/test_page.py": ["page"],
    "tests/unit/test_nothing.py": ["nothing"],
}


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository on a branch of its own."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "all")
    git(tmp_path, "checkout", "-b", "work")
    return tmp_path


def names(found: list[str]) -> list[str]:
    return sorted(Path(file).stem.removeprefix("test_") for file in found)


@pytest.mark.parametrize(("changed", "wanted"), CASES.items(), ids=list(CASES))
def test_what_a_change_affects(clone: Path, changed: str, wanted: list[str]):
    """And a test that looks through the package for files is always among it."""
    if changed == "src/gone.py":
        (clone / "tests/unit/test_gone.py").write_text("from cairn.gone import x\n")
    assert names(affected.Repository.of(clone).affected_by([changed])) == sorted([*wanted, "scan"])


def test_some_files_affect_all_tests(clone: Path):
    found = affected.Repository.of(clone)
    assert found.affected_by(["tests/conftest.py"]) == found.tests
    assert len(found.tests) == 9


def test_what_differs_from_the_base(clone: Path):
    """What is committed on the branch, what is not, what is new, and both names of what is renamed."""
    (clone / "src/alone.py").write_text("x = 1\n")
    git(clone, "mv", "docs/page.md", "docs/other.md")
    git(clone, "commit", "-am", "some")
    (clone / "configs/small.toml").write_text("steps = 2\n")
    (clone / "src/new.py").write_text("")
    git(clone, "checkout", "main")
    git(clone, "checkout", "work")
    changed = ["configs/small.toml", "docs/other.md", "docs/page.md", "src/alone.py", "src/new.py"]
    assert affected.changed_files(clone, "main") == changed
    assert names(affected.choose(clone)) == ["config", "page", "scan"]
    with pytest.raises(ValueError, match="--affected nowhere: no commit of this name"):
        affected.choose(clone, "nowhere")


@pytest.mark.slow
def test_a_change_of_one_test_here_affects_few():
    found = affected.Repository.of(REPOSITORY)
    (test,) = (file for file in found.tests if file.endswith("/test_gguf.py"))
    chosen = found.affected_by([test])
    assert test in chosen
    assert len(chosen) < len(found.tests) / 4
