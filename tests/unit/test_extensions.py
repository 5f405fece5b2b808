"""Classes that a configuration names: Cairn's own, or `module:Class`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.run.errors import UsageError
from cairn.run.extensions import BadExtension, load, make


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
