"""Classes that a configuration names: Cairn's own, or `module:Class`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.run.errors import UsageError
from cairn.run.extensions import BadExtension, code_of, load, make


class Plain:
    """What the configuration may call `plain`."""

    def __init__(self, size: int = 1):
        if size < 0:
            raise ValueError("size must not be negative")
        self.size = size


BUILT_IN = {"plain": Plain}
NO_CLASS = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of Python modules, with modules in it that fail in various ways."""
    (tmp_path / "extension_that_fails.py").write_text("1 / 0\n")
    (tmp_path / "extension_that_lacks.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("extension_that_fails", "extension_that_lacks"):
        sys.modules.pop(name, None)


def test_a_name_or_a_class_of_your_own():
    assert load("plain", BUILT_IN, "thing.type") is Plain
    assert load(f"{__name__}:Plain", BUILT_IN, "thing.type") is Plain
    assert make(Plain, {"size": 4}, "thing.args").size == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plane", "thing.type = 'plane': not one of plain, nor module:Class"),
        (":Plain", "thing.type = ':Plain': not one of plain, nor module:Class"),
        ("module:", "thing.type = 'module:': not one of plain, nor module:Class"),
        ("no_such_module:Own", "No module named 'no_such_module'; to import it from the current folder, set"),
        (f"{__name__}:Other", f"module '{__name__}' has no attribute 'Other'"),
        (f"{__name__}:NO_CLASS", "it is no class, but of type int"),
        ("extension_that_fails:Own", "ZeroDivisionError('division by zero')"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_can_not_be_found_is_named_with_its_setting(name: str, message: str):
    with pytest.raises(BadExtension, match=re.escape(message)) as raised:
        load(name, BUILT_IN, "thing.type")
    assert str(raised.value).startswith(f"thing.type = {name!r}: ")
    assert isinstance(raised.value, UsageError)


@pytest.mark.usefixtures("folder")
def test_the_path_is_not_blamed_for_what_a_module_imports():
    with pytest.raises(BadExtension, match=r"No module named 'no_such_library'$"):
        load("extension_that_lacks:Own", BUILT_IN, "thing.type")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": -1}, "thing.args = {'size': -1}: size must not be negative"),
        ({"colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
def test_arguments_that_are_refused_are_named(arguments: dict, message: str):
    with pytest.raises(BadExtension, match=re.escape(message)):
        make(Plain, arguments, "thing.args")


def write_all(folder: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


SOURCES = {
    "own_code/__init__.py": "",
    "own_code/rewards.py": "import json\nfrom . import shared\nfrom own_code.deep.one import two\n",
    "own_code/shared.py": "def f():\n    from . import late\n",
    "own_code/late.py": "import own_code.rewards\n",
    "own_code/deep/__init__.py": "",
    "own_code/deep/one.py": "import own_code_beside\ntwo = 2\n",
    "own_code/other.py": "",
    "own_code_beside.py": "broken =",
    "own_code_elsewhere.py": "",
}


@pytest.mark.parametrize(
    ("edited", "counts"),
    [(name, "other" not in name and "elsewhere" not in name) for name in SOURCES],
)
@pytest.mark.usefixtures("folder")
def test_a_digest_of_code_follows_all_that_the_module_imports_from_beside_it(
    tmp_path: Path, edited: str, counts: bool
):
    """However it is imported; nothing of it is run."""
    write_all(tmp_path, SOURCES)
    before = code_of("own_code.rewards:Own")
    assert before is not None
    assert before == code_of("own_code.rewards:Another")
    (tmp_path / edited).write_text(SOURCES[edited] + "# edited\n")
    assert (code_of("own_code.rewards:Own") != before) == counts
    assert "own_code.rewards" not in sys.modules
    sys.modules.pop("own_code", None)


def test_of_what_is_installed_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not what lies beside it, which is every other package."""
    folder = tmp_path / "site-packages"
    write_all(folder, SOURCES)
    monkeypatch.syspath_prepend(folder)
    before = code_of("own_code.rewards:Own")
    (folder / "own_code_beside.py").write_text("edited = 1")
    assert code_of("own_code.rewards:Own") == before
    (folder / "own_code" / "late.py").write_text("edited = 1")
    assert code_of("own_code.rewards:Own") != before
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize("name", ["plain", "", "no_such_module:Own", "no_such.module:Own", "builtins:dict"])
def test_what_has_no_file_has_no_digest_of_code(name: str):
    assert code_of(name) is None
