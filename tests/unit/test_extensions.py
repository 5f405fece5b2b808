"""Classes that a configuration names: Cairn's own, or `module:Class`."""

import ast
import gc
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cairn
from cairn.config.sinks import SinksConfig
from cairn.config.trainer import SFTConfig
from cairn.run.errors import UsageError
from cairn.run.extensions import BadExtension, code_of, load, make, syntax_tree
from cairn.run.recipe import code_in


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


# Plug-ins


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(package, group, names...)`: a package with such plug-ins, and one that fails, on the path."""

    def install(package: str, group: str, *names: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        points = "".join(f"{name} = {package}_plug_ins:Own\n" for name in names)
        write_all(
            folder,
            {
                f"{package}_plug_ins.py": "class Own:\n    pass\n",
                f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
                f"{info.name}/entry_points.txt": f"[{group}]\n{points}broken = {package}_broken:Own\n",
                f"{package}_broken.py": "1 / 0\n",
            },
        )
        monkeypatch.syspath_prepend(folder)

    yield install
    for name in [name for name in sys.modules if name.endswith(("_plug_ins", "_broken"))]:
        del sys.modules[name]


def test_a_plug_in_is_found_by_its_name_and_imported_when_it_is_used(install: Install):
    install("mine", "cairn.losses", "gentle", "firm")
    config = SFTConfig.model_validate({"loss": {"type": "gentle"}})
    assert config.loss.type == "gentle"
    assert code_of("gentle", "cairn.losses") == code_of("mine_plug_ins:Own")
    assert code_of("gentle", "cairn.losses") is not None
    assert code_of("gentle", "cairn.environments") is None
    assert code_in({"loss.type": "gentle"}) == {"loss.code": code_of("mine_plug_ins:Own")}
    assert not [name for name in sys.modules if name.startswith("mine_")], "only metadata is read"
    found = load("gentle", BUILT_IN, "loss.type", group="cairn.losses")
    assert (found.__module__, found.__name__) == ("mine_plug_ins", "Own")
    assert "mine_broken" not in sys.modules, "the other plug-ins of the package are not imported"
    with pytest.raises(
        BadExtension, match=r"'broken' \(mine_broken:Own of the package mine\): ZeroDivisionError"
    ):
        load("broken", BUILT_IN, "loss.type", group="cairn.losses")


def test_an_unknown_name_is_answered_with_all_that_there_are(install: Install):
    install("mine", "cairn.losses", "gentle")
    with pytest.raises(
        BadExtension, match=r"not one of plain, broken, gentle, nor module:Class; did you mean gentle"
    ):
        load("gentel", BUILT_IN, "loss.type", group="cairn.losses")
    with pytest.raises(
        ValueError, match=r"likelihood, broken, gentle, nor module:Class; did you mean gentle"
    ):
        SFTConfig.model_validate({"loss": {"type": "gentel"}})


def test_a_name_that_stands_for_two_things_is_refused(install: Install):
    """With both places: neither a built-in class nor one of two packages is taken in silence."""
    install("mine", "cairn.losses", "plain", "gentle")
    with pytest.raises(BadExtension, match=r"for Cairn's own and for mine_plug_ins:Own of the package mine"):
        load("plain", BUILT_IN, "loss.type", group="cairn.losses")
    assert load("plain", BUILT_IN, "environment.name", group="cairn.environments") is Plain
    install("yours", "cairn.losses", "gentle")
    with pytest.raises(
        BadExtension, match=r"yours_plug_ins:Own of the package yours and for mine_plug_ins:Own"
    ):
        load("gentle", BUILT_IN, "loss.type", group="cairn.losses")
    assert (
        load("mine_plug_ins:Own", BUILT_IN, "loss.type", group="cairn.losses").__module__ == "mine_plug_ins"
    )


def test_a_sink_of_cairns_own_is_no_plug_in():
    with pytest.raises(
        ValueError, match=r"'csv' is a sink of Cairn's own: it is switched on as \[sinks.csv\]"
    ):
        SinksConfig.model_validate({"own": [{"name": "csv"}]})


class Parses:
    """Garbage whose destructor parses, as the logging of a traceback does."""

    made = 0

    def __init__(self):
        self.cycle = self

    def __del__(self):
        ast.parse("one.two + three")
        Parses.made += 1


def test_the_collector_of_garbage_may_parse_while_a_tree_is_made():
    source, frequency = Path(__file__).read_text(), gc.get_threshold()
    gc.collect()
    before = Parses.made
    gc.set_threshold(20)
    try:
        for _ in range(5):
            Parses()
            assert ast.dump(syntax_tree(source)) == ast.dump(syntax_tree(source))
        assert gc.isenabled()
    finally:
        gc.set_threshold(*frequency)
    gc.collect()
    assert Parses.made == before + 5


def test_only_one_function_makes_trees():
    sources = Path(cairn.__file__).parent.rglob("*.py")
    assert {file.name for file in sources if "ast.parse(" in file.read_text()} == {"extensions.py"}
