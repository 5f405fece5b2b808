"""The rooms of the house: which may import which, read from the sources without importing anything."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from runs import REPOSITORY

import cairn
from cairn.run.directory import RunDirectory
from cairn.run.extensions import syntax_tree

SOURCES = Path(cairn.__file__).parent
FLOORS = (
    ("api",),
    ("launch",),
    ("evaluate", "service", "tools", "watch"),
    ("trainer", "orchestrator", "inference"),
    ("endpoint", "formats", "policy", "remote"),
    ("model",),
    ("checkpoint",),
    ("config",),
    ("run",),
)
"""From the top; a room imports from floors below its own."""
NOT_IN_CONFIG = {"torch", "ray", "vllm", "transformers", "datasets", "numpy"}
"""What would keep `--help` from answering at once."""


SHORT, LONG = 80, 500
"""Lines of a file: a chapter has no fewer and no more."""
PLUG_INS = (
    "trainer/losses/",
    "trainer/optimizers/",
    "orchestrator/advantages/",
    "orchestrator/environments/calculator.py",
    "orchestrator/environments/reverse_text.py",
    "formats/deepspeed/deepspeed.py",
    "formats/onnx.py",
    "formats/plain_file.py",
    "formats/verl.py",
    "watch/sinks/",
)
"""Folders of one idea a file, and files of one: a format, or an environment."""
ENTRIES = {
    "__main__.py",
    "run/memory_owner.py",
    "inference/plugin/adapter_modules.py",
    "launch/branches/process.py",
    "launch/ray/agent.py",
    "launch/ray/worker_process.py",
    "launch/slurm/servers_of_node.py",
    "launch/slurm/wait_for_nodes.py",
    "service/helper_process.py",
    "tools/branches.py",
}
"""Programs and commands, and what another program names by its path."""
DOORS = ("cairn", "cairn.__main__")
MOST_SHORT = 6
"""To do: how many other files are shorter than a chapter. It may only fall."""


def modules(root: Path = SOURCES) -> dict[str, Path]:
    """The package's files, by the name of the module."""
    names = {file: file.relative_to(root).with_suffix("").parts for file in root.rglob("*.py")}
    return {
        ".".join(("cairn", *(parts[:-1] if parts[-1] == "__init__" else parts))): file
        for file, parts in names.items()
    }


@functools.cache
def tree(file: Path) -> ast.Module:
    """A file of the package, parsed. Tests must not change it."""
    return syntax_tree(file.read_text())


@functools.cache
def nodes(file: Path, types: bool) -> list[ast.Import | ast.ImportFrom]:
    """Its imports, also inside functions; without `types`, not those that only type checkers do."""
    found: list[ast.Import | ast.ImportFrom] = []
    left: list[ast.AST] = [tree(file)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and not types and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.expr):  # no expression has statements in it
            left += ast.iter_child_nodes(node)
    return found


def imports(file: Path, known: set[str], *, types: bool = True) -> set[str]:
    """Every module that a file imports, also inside functions; of the package's own, those that it names.

    types: also those that only type checkers import.
    """
    found: set[str] = set()
    for node in nodes(file, types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{file}: relative imports have no room"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in known else str(node.module))
    return found


def graph(root: Path = SOURCES, *, types: bool = True) -> dict[str, set[str]]:
    """What each module imports of the package; without its doors: itself, and `python -m cairn`."""
    files = modules(root)
    return {
        name: {module for module in imports(file, set(files), types=types) if module.startswith("cairn.")}
        for name, file in files.items()
        if name not in DOORS
    }


def room(module: str) -> str:
    """The folder that a module lies in."""
    return module.split(".")[1]


def upward(arrows: dict[str, set[str]]) -> list[str]:
    """The imports that lead up, or to another room of the same floor."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    return [
        f"{module} imports {other}"
        for module, others in sorted(arrows.items())
        for other in sorted(others)
        if (here := room(module)) != (there := room(other))
        if floor[there] <= floor[here]
    ]


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, if any do."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def mutual(arrows: dict[str, set[str]]) -> list[str]:
    """Folders of one room, and files of it, that import each other; with the room, sorted."""
    pairs: set[tuple[str, str, str]] = set()
    for module, others in arrows.items():
        for other in others:
            here, there = module.split("."), other.split(".")
            same = next((i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)
            if same > 1:
                pairs.add((".".join(here[1:same]), here[same], there[same]))
    return sorted(f"{room}: {a} and {b}" for room, a, b in pairs if a < b and (room, b, a) in pairs)


LOOKERS = ("api", "evaluate", "formats", "tools", "watch")
"""Rooms that look at runs from outside: they read a run's files through `run/view.py`."""
OWN_READERS = {
    "cairn.evaluate.results": "it writes a folder of its own, which is no run's",
    "cairn.tools.audit.steps": "it judges lines that other readers pass over",
    "cairn.tools.chaos.plan": "it names files to damage",
    "cairn.tools.chaos.run": "it starts a run in the directory",
}
LOGS = {"metrics", "evals", "history"}
READS = {"rows", "lines", "numbered", "current", "new_rows"}


def files_of_a_run() -> set[str]:
    """Names of a run's files that no other folder has, as models' folders have a config.json."""
    places = vars(RunDirectory("run")).values()
    names = {Path(str(getattr(one, "path", one))).name for one in places}
    return {name for name in names if Path(name).suffix in (".jsonl", ".json", ".sqlite")} - {"config.json"}


def read_past_the_view(source: str, files: set[str]) -> set[str]:
    """What of a run a source reads by itself: the expressions."""
    found: set[str] = set()
    for node in ast.walk(syntax_tree(source)):
        if isinstance(node, ast.Constant) and node.value in files:
            found.add(repr(node.value))
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), [ast.unparse(one) for one in node.args]
        if called in ("RunDirectory", "MetricsLog", "History"):
            found.add(called)
        if called.partition("_")[0] in ("read", "parse", "open") and any(
            re.search(r"\brun\.(config|recipe|roles|metrics|evals|history)\b", one) for one in given
        ):
            found.add(ast.unparse(node))
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in READS
            and ast.unparse(node.func.value).rpartition(".")[2] in LOGS
        ):
            found.add(ast.unparse(node))
    return found


def test_who_looks_at_runs_reads_them_through_the_view():
    files = files_of_a_run()
    assert {"metrics.jsonl", "evals.jsonl", "history.jsonl", "roles.json", "ledger.sqlite"} <= files
    found = {
        name: read
        for name, file in modules().items()
        if name != "cairn" and room(name) in LOOKERS
        if (read := read_past_the_view(file.read_text(), files))
    }
    assert {name: read for name, read in found.items() if name not in OWN_READERS} == {}
    assert found.keys() == OWN_READERS.keys(), "no exception that nobody needs"


@pytest.mark.parametrize(
    "source",
    [
        "rows = RunDirectory(path).path",
        "(path / 'metrics.jsonl').read_text()",
        "view.run.history.rows()",
        "def f(run):\n    return read_json(run.recipe, dict)",
    ],
)
def test_a_reader_beside_the_view_is_found(source: str):
    assert read_past_the_view(source, files_of_a_run())


def test_every_room_has_a_floor():
    rooms = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    assert rooms == {name for floor in FLOORS for name in floor}


@pytest.mark.slow
def test_imports_go_down():
    assert upward(graph()) == []


@pytest.mark.slow
def test_the_floors_of_launch_are_as_it_says():
    """A part imports from floors below its own."""
    text = (SOURCES / "launch/__init__.py").read_text().partition(":\n\n    ")[2].rstrip('"\n')
    floors = [[part.strip().rstrip("/") for part in line.split(",")] for line in text.splitlines()]
    floor = {part: number for number, parts in enumerate(floors) for part in parts}
    arrows = {
        (module.split(".")[2], other.split(".")[2])
        for module, others in graph().items()
        for other in others
        if room(module) == room(other) == "launch" and module.count(".") > 1
    }
    assert (
        sorted((here, there) for here, there in arrows if here != there and floor[there] <= floor[here]) == []
    )


@pytest.mark.slow
def test_rooms_take_only_the_version_from_the_package_itself():
    taken = {
        alias.name
        for file in modules().values()
        for node in nodes(file, types=True)
        if isinstance(node, ast.ImportFrom) and node.module == "cairn"
        for alias in node.names
    }
    assert taken == {"__version__"}


def test_no_imports_go_in_a_circle():
    assert circle(graph(types=False)) == []


def test_parts_of_a_room_do_not_import_each_other():
    """Neither folders of a room, nor a folder and a file beside it, nor two files, on whatever floor."""
    assert mutual(graph()) == []


def test_no_file_is_longer_than_a_chapter():
    assert [name for name, file in modules().items() if len(file.read_text().splitlines()) > LONG] == []


def test_few_files_are_shorter_than_a_chapter():
    names = {file.relative_to(SOURCES).as_posix(): file for file in modules().values()}
    short = [
        name
        for name, file in names.items()
        if file.name != "__init__.py" and not name.startswith(PLUG_INS) and name not in ENTRIES
        if len(file.read_text().splitlines()) < SHORT
    ]
    assert len(short) <= MOST_SHORT, sorted(short)
    assert names.keys() >= ENTRIES


def test_a_class_name_stands_for_one_thing():
    found = [
        node.name
        for file in modules().values()
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [name for name in found if found.count(name) > 1] == []


def test_config_imports_nothing_heavy():
    files = modules()
    heavy = {
        f"{name} imports {module}"
        for name, file in files.items()
        if name.startswith("cairn.config")
        for module in imports(file, set(files))
        if module.partition(".")[0] in NOT_IN_CONFIG
    }
    assert heavy == set()


@pytest.mark.parametrize(
    ("sources", "wrong"),
    [
        ({"run/a.py": "def f():\n    from cairn.config import b\n"}, "cairn.run.a imports cairn.config.b"),
        ({"trainer/a.py": "import cairn.inference.b"}, "cairn.trainer.a imports cairn.inference.b"),
        ({"tools/a.py": "from cairn.launch.b import c"}, "cairn.tools.a imports cairn.launch.b"),
    ],
)
def test_an_import_that_leads_up_is_found(tmp_path: Path, sources: dict[str, str], wrong: str):
    for name, text in {"config/b.py": "", "inference/b.py": "", "launch/b.py": "", **sources}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert upward(graph(tmp_path)) == [wrong]


def test_a_circle_is_found(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a.py").write_text("from cairn.run import b")
    (tmp_path / "run/b.py").write_text("def f():\n    from cairn.run.a import c")
    assert set(circle(graph(tmp_path))) == {"cairn.run.a", "cairn.run.b"}


def test_parts_that_import_each_other_are_found(tmp_path: Path):
    (tmp_path / "run/deep/one").mkdir(parents=True)
    (tmp_path / "run/deep/two").mkdir()
    (tmp_path / "run/deep/one/a.py").write_text("from cairn.run.deep.two.b import c")
    (tmp_path / "run/deep/two/b.py").write_text("")
    (tmp_path / "run/deep/two/d.py").write_text("def f():\n    import cairn.run.deep.one.a")
    assert mutual(graph(tmp_path)) == ["run.deep: one and two"]


def names_of(file: Path) -> set[str]:
    """What a module has, but for what it computes: definitions, constants and imports."""
    found: set[str] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return found


def missing(program: Path, known: dict[str, Path]) -> list[str]:
    """What a file imports from the package that is not there."""
    wrong: list[str] = []
    for node in ast.walk(tree(program)):
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").partition(".")[0] == "cairn":
            wrong += [
                f"{program.name} imports {alias.name} from {module}"
                for alias in node.names
                if f"{module}.{alias.name}" not in known
                and (module not in known or alias.name not in names_of(known[module]))
            ]
    return wrong


def test_scripts_and_benchmarks_import_what_is_there():
    """Also those that only a GPU or a soak test runs, and nobody checks the types of."""
    programs = [*(REPOSITORY / "scripts").glob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    assert len(programs) > 20
    known = modules()
    assert [line for program in programs for line in missing(program, known)] == []
    assert missing(Path(__file__), known) == []


def test_an_import_of_what_has_moved_is_found(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("from cairn.trainer.group import RankGroup, device_for\nfrom cairn.nowhere import x\n")
    assert missing(program, modules()) == [
        "program.py imports device_for from cairn.trainer.group",
        "program.py imports x from cairn.nowhere",
    ]


def test_test_files_have_names_of_their_own():
    """Pytest collects nothing at all where two files in different folders have the same name."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len({*names}), sorted(name for name in names if names.count(name) > 1)
