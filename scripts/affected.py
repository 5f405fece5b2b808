"""Which test files a change can affect: `scripts/test --affected [BASE]`. Needs only the standard library.

A file depends on what it imports, and on what its strings name: modules ("cairn.trainer.loop",
"module:Class", `python -m` and monkeypatch paths), files and folders of the repository and, in tests and
scripts that start processes, commands of pyproject.toml. A test also depends on what defines its fixtures and
on the commands that these run. Rather too many files than one too few: a name counts wherever it stands.
"""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path, PurePosixPath

WHOLE = (
    "pyproject.toml",
    "requirements.lock",
    "tests/conftest.py",
    "tests/groups.py",
    "src/__init__.py",
    ".ci/",
)
"""A change of these, given by their beginnings, affects all tests."""
MODULE = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\.?")
CLASS = re.compile(r"\b([A-Za-z_]\w*):[A-Za-z_]\w*")
STARTS_PROCESSES = re.compile(r"\b[Ss]hell\b|subprocess|Popen")
MESSAGES = ("docs/", "scripts/", "tests/", "benchmarks/")
"""What the package's strings name only to tell users of it."""
READS_FOLDERS = re.compile(r"\.(?:rglob|glob|walk|iterdir|walk_packages)\(|git ls-files|ls-files")
"""A test that looks for files by itself may depend on any, if it also names the repository or the package."""
ROOTS = re.compile(r"\bREPOSITORY\b|\bcairn\.__(?:file|path)__|\.parents\[\d\]|\bSOURCES\b|\bROOT\b")


def choose(root: Path, base: str = "") -> list[str]:
    """The test files of a clone that the difference from `base` can affect.

    base: a commit; default: main, or on main itself the commit before the last one.

    Raises:
        ValueError: there is no such commit.
    """
    if not base:
        on_main = (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or "").strip() == "main"
        base = "HEAD~1" if on_main else "main"
    return Repository.of(root).affected_by(changed_files(root, base))


def changed_files(root: Path, base: str) -> list[str]:
    """Files that differ between the merge base with `base` and the working tree; renamed ones by both names.

    Raises:
        ValueError: `base` is no commit.
    """
    found = _git(root, "merge-base", base, "HEAD")
    if found is None:
        raise ValueError(f"--affected {base}: no commit of this name")
    differing = _git(root, "diff", "--name-only", "--no-renames", found.strip()) or ""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return sorted({*differing.splitlines(), *untracked.splitlines()})


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def _is_test(file: str) -> bool:
    return file.startswith("tests/") and PurePosixPath(file).match("test_*.py")


class Repository:
    """The files below `root` that `files` names, and what depends on what."""

    def __init__(self, root: Path, files: Iterable[str]):
        self.root = root
        self.files = sorted(set(files))
        self._there = frozenset(self.files)
        self._modules: dict[str, str] = {}
        self._by_name: dict[str, list[str]] = {}
        for file in self.files:
            path = PurePosixPath(file)
            self._by_name.setdefault(path.name, []).append(file)
            if path.suffix != ".py":
                continue
            parts = path.with_suffix("").parts
            if parts[0] == "src":
                parts = ("cairn", *parts[1:])
                self._modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
            else:  # tests, scripts and benchmarks import each other by the names of the files
                self._modules.setdefault(parts[-1], file)
        self._folders = {str(parent) for file in self.files for parent in PurePosixPath(file).parents}

    @classmethod
    def of(cls, root: Path) -> "Repository":
        """A clone, with what git does not ignore."""
        listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard") or ""
        return cls(root, (file for file in listed.splitlines() if (root / file).is_file()))

    @cached_property
    def tests(self) -> list[str]:
        """All test files."""
        return [file for file in self.files if _is_test(file)]

    def affected_by(self, changed: Iterable[str]) -> list[str]:
        """The test files that a change of these files can affect."""
        changed = set(changed)
        if any(file.startswith(WHOLE) for file in changed):
            return self.tests
        known = Repository(self.root, {*self.files, *changed})  # what names a deleted file is affected
        users: dict[str, set[str]] = {}
        for file in known.files:
            for used in known.dependencies(file):
                users.setdefault(used, set()).add(file)
        found, new = set(changed), list(changed)
        while new:
            more = users.get(new.pop(), set()) - found
            found |= more
            new += more
        return [file for file in self.tests if file in found or known.looks_for_files(file)]

    def looks_for_files(self, test: str) -> bool:
        """Whether a test goes through folders of the repository."""
        text = self._text(test)
        return bool(READS_FOLDERS.search(text) and ROOTS.search(text))

    def dependencies(self, file: str) -> set[str]:
        """The files that one depends on, without what these depend on."""
        tree = self._tree(file)
        if tree is None:
            return set()
        is_test = _is_test(file)
        found: set[str] = set()
        prose: set[int] = set()  # docstrings, which come after the expressions that they are
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr):
                prose.add(id(node.value))
            elif isinstance(node, ast.Import):
                found.update(*(self._module(alias.name) for alias in node.names))
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update(*(self._module(f"{node.module}.{alias.name}") for alias in node.names))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) in prose:
                    continue
                found |= self._named(node.value, file)
            elif is_test and isinstance(node, ast.arg):
                found |= self._fixtures.get(node.arg, set())
        if is_test or not file.startswith(("tests/", "src/")):
            found |= self._run_by(tree) if STARTS_PROCESSES.search(self._text(file)) else set()
        for folder in PurePosixPath(file).parents:
            found |= {f"{folder}/conftest.py"} & self._there
        return found - {file}

    @cached_property
    def _fixtures(self) -> dict[str, set[str]]:
        """Which files of the tests that are no tests themselves define each fixture."""
        found: dict[str, set[str]] = {}
        asks: dict[str, set[str]] = {}
        for file in self.files:
            if file.startswith("tests/") and not _is_test(file) and (tree := self._tree(file)):
                for node in ast.walk(tree):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                        "fixture" in ast.unparse(decorator) for decorator in node.decorator_list
                    ):
                        found.setdefault(node.name, set()).update({file}, self._run_by(node))
                        asks.setdefault(node.name, set()).update(one.arg for one in node.args.args)
        for _ in asks:  # no chain of fixtures is longer
            for name, others in asks.items():
                found[name].update(*(found.get(other, set()) for other in others))
        return found

    @cached_property
    def _commands(self) -> dict[str, str]:
        """The module of each of our commands."""
        path = self.root / "pyproject.toml"
        scripts = tomllib.loads(path.read_text())["project"]["scripts"] if path.exists() else {}
        return {name: target.partition(":")[0] for name, target in scripts.items()}

    def _run_by(self, tree: ast.AST) -> set[str]:
        """The modules of the commands that are named in a piece of code."""
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        return {
            file
            for command in words & self._commands.keys()
            for file in self._module(self._commands[command])
        }

    def _module(self, name: str) -> set[str]:
        """The files of a module, or of the one that something of this name is in, and of its packages."""
        parts = name.split(".")
        names = {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & self._modules.keys()
        # The package itself is only the door to its rooms, which it opens when it is asked for one.
        return {self._modules[name] for name in names - {"cairn"}}

    def _named(self, text: str, file: str) -> set[str]:
        """The files that a string in `file` names."""
        found: set[str] = set()
        for match in MODULE.finditer(text) if "cairn." in text else ():
            word = match[0].rstrip(".")
            if word.startswith("cairn."):
                found |= self._module(word)
                if match[0].endswith("."):  # the beginning of a name: any module of the package
                    found |= {file for name, file in self._modules.items() if name.startswith(match[0])}
        for name in CLASS.findall(text):
            found |= {self._modules[name]} if self._modules.get(name, "").startswith("tests/") else set()
        for word in re.split(r"[\s'\"`=,;()<>@]+", text):
            path = word.removeprefix("./").rstrip("/.")
            if "/" in path and path in self._folders:
                found |= {file for file in self.files if file.startswith(f"{path}/")}
            elif (
                (name := PurePosixPath(path).name) in self._by_name and "." in name and path != "__init__.py"
            ):
                found |= {file for file in self._by_name[name] if file.endswith(path)}
            elif path in self._there:
                found.add(path)
        return {other for other in found if not (file.startswith("src/") and other.startswith(MESSAGES))}

    def _text(self, file: str) -> str:
        try:
            return (self.root / file).read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def _tree(self, file: str) -> ast.Module | None:
        """None of what is not Python."""
        text = self._text(file)
        if not file.endswith(".py") and not text.startswith("#!/usr/bin/env python"):
            return None
        try:
            return ast.parse(text)
        except SyntaxError:
            return None
