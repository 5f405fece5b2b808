"""Classes that a configuration names: Cairn's own, plug-ins of installed packages, and `module:Class`.

Environments, advantages and losses are found this way. `module` is imported like any other, so that it has to
be installed or on the path of Python modules; the folder that a command is run in is there with PYTHONPATH=.
A package offers plug-ins as entry points of a `Group`. Only its metadata is read until a plug-in is used.
"""

import ast
import functools
import gc
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from cairn.run.errors import CairnError, UsageError, one_of

T = TypeVar("T")
Group = Literal["cairn.environments", "cairn.advantages", "cairn.losses", "cairn.optimizers", "cairn.sinks"]
"""The groups of entry points in which packages offer plug-ins."""


class BadExtension(UsageError):
    """A configured class can't be found or made; the message names the setting, its value and the remedy."""


def load(
    name: str,
    built_in: Mapping[str, Callable[..., T]],
    setting: str,
    what: str = "Class",
    group: Group | None = None,
) -> Callable[..., T]:
    """What the configuration calls `name`: a key of `built_in`, a plug-in of `group`, or `module:Class`.

    Args:
        setting: the dotted name of the setting that holds `name`, as messages show it, such as
            orchestrator.environment.name.
        what: what stands behind the colon, in messages: Class, or function.
        group: where installed packages offer plug-ins of this kind; None: nowhere.

    Raises:
        BadExtension: there is none of that name, or there are several, or it can't be imported.
    """
    about = f"{setting} = {name!r}"
    try:
        plug_in = _plug_in(name, built_in, group)
        if plug_in is None and name in built_in:
            return built_in[name]
    except ValueError as error:
        raise BadExtension(f"{about}: {error}") from None
    if wrong := unknown(name, built_in, group, what):
        raise BadExtension(f"{about}: {wrong}")
    if plug_in is not None:
        about += f" ({_place(plug_in)})"
    module, _, attribute = (f"{plug_in.module}:{plug_in.attr}" if plug_in else name).partition(":")
    try:
        found: Callable[..., T] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or module
        hint = ""
        if plug_in is None and (module == missing or module.startswith(f"{missing}.")):
            hint = "; to import it from the current folder, set PYTHONPATH=. for the command"
        raise BadExtension(f"{about}: {error}{hint}") from error
    except Exception as error:  # the user's own code
        what = str(error) if isinstance(error, ImportError | AttributeError) else repr(error)
        raise BadExtension(f"{about}: {what}") from error
    if not callable(found):
        raise BadExtension(f"{about}: it is no {what.lower()}, but of type {type(found).__name__}")
    return found


def make(cls: Callable[..., T], arguments: Mapping[str, Any], setting: str) -> T:
    """An object of a class that `load` returned.

    Args:
        arguments: the keyword arguments that the configuration has for its constructor.
        setting: the dotted name of the setting that holds them, as messages show it.

    Raises:
        BadExtension: the class does not take them, or fails.
    """
    try:
        return cls(**arguments)
    except Exception as error:  # the user's own code
        what = str(error) if isinstance(error, TypeError | ValueError | CairnError) else repr(error)
        raise BadExtension(f"{setting} = {dict(arguments)}: {what}") from error


# Plug-ins: names that installed packages have given to their classes


def unknown(
    name: str, built_in: Iterable[str], group: Group | None = None, what: str = "Class"
) -> str | None:
    """Why a name stands for no class, with the names that do; None if it may. Imports nothing."""
    known = [*built_in, *sorted({plug_in.name for plug_in in _plug_ins(group)})]
    if name in known or all(name.partition(":")):
        return None
    listed = f"not one of {', '.join(known)}, nor" if known else "not"
    return f"{listed} module:{what}{one_of(name, known)}"


def _plug_ins(group: Group | None) -> Iterable[EntryPoint]:
    return _entry_points(tuple(sys.path)).select(group=group) if group else ()


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Any:
    """All entry points of the packages on a path of Python modules, which is that of this process."""
    return entry_points()


def _plug_in(name: str, built_in: Iterable[str], group: Group | None) -> EntryPoint | None:
    """The plug-in of that name, if there is one.

    Raises:
        ValueError: the name stands for something else, too.
    """
    found = [plug_in for plug_in in _plug_ins(group) if plug_in.name == name]
    places = [*(["Cairn's own"] if name in built_in else []), *map(_place, found)]
    if found and len(places) > 1:
        raise ValueError(
            f"the name stands for {' and for '.join(places)}: give the one that you mean as module:Class, or "
            "uninstall the other package; nothing is chosen for you"
        )
    return found[0] if found else None


def _place(plug_in: EntryPoint) -> str:
    return f"{plug_in.value} of the package {plug_in.dist.name if plug_in.dist else 'without a name'}"


# What tells an edited class from what it was


def code_of(name: str, group: Group | None = None) -> str | None:
    """A digest of the code of `module:Class`, or of the plug-in of that name: of its module's file, and of
    those beside it that it imports.

    These are modules below the folder that holds the module, or its outermost package; of what is installed,
    only modules of the same package. Nothing is imported for that but the packages that the module lies in.

    Returns:
        The digest; None for a built-in name, and for a module without a file.
    """
    if plug_in := next((one for one in _plug_ins(group) if one.name == name), None):
        name = f"{plug_in.module}:{plug_in.attr}"
    module, colon, _ = name.partition(":")
    file = _file_of(module) if colon else None
    if file is None:
        return None
    is_package = file.name == "__init__.py"
    root = file.parents[module.count(".") + is_package]
    installed = any(part in ("site-packages", "dist-packages") for part in root.parts)
    found: dict[str, bytes] = {}
    waiting = {module: file}
    while waiting:
        one, path = waiting.popitem()
        found[one] = path.read_bytes()
        for imported in _imports(found[one], one, is_package=path.name == "__init__.py"):
            beside = _module_file(root, imported)
            if installed and imported.partition(".")[0] != module.partition(".")[0]:
                continue
            if beside and imported not in found:
                waiting[imported] = beside
    digest = hashlib.blake2b(digest_size=16)
    for one in sorted(found):
        digest.update(f"{one} {len(found[one])} ".encode() + found[one])
    return digest.hexdigest()


def _file_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    path = Path(spec.origin).absolute() if spec and spec.origin and spec.has_location else None
    return path if path and path.is_file() else None


def _module_file(root: Path, module: str) -> Path | None:
    """The file of a module below a folder of modules, if it has one there."""
    path = root.joinpath(*module.split("."))
    candidates = path.with_name(f"{path.name}.py"), path / "__init__.py"
    return next((file for file in candidates if file.is_file()), None)


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """The modules that a module's source imports, wherever in it; some names may be no modules."""
    try:
        tree = syntax_tree(source)
    except (SyntaxError, ValueError):  # a compiled module
        return
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from _with_parents(base)
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


def syntax_tree(source: str | bytes) -> ast.Module:
    """What `ast.parse` returns, whatever the garbage collector finds meanwhile.

    CPython before 3.11.8 counts the depth of trees in one counter per interpreter (its issue 106905): if the
    collector runs a destructor in the middle of one tree that parses another, as the logging of a failed
    task's traceback does, the first tree ends in a SystemError.

    Raises:
        SyntaxError, ValueError: as `ast.parse`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


def _with_parents(module: str) -> Iterator[str]:
    """A module's name, and those of the packages that it lies in."""
    parts = [part for part in module.split(".") if part]
    yield from (".".join(parts[: n + 1]) for n in range(len(parts)))
