# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""From the command line to a checked configuration.

Any mistake in it is a `UsageError`: one clear message and exit code 2, before anything is started or written.
"""

import copy
import functools
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from cairn.config import hints
from cairn.config.arguments import Arguments, Layer, take_apart
from cairn.config.branches import check_names, layers_of, with_branch
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS as RUN_KINDS
from cairn.config.orchestrator import EvaluateConfig, OrchestratorConfig
from cairn.config.settings import BaseConfig, Setting, settings_of
from cairn.config.shared import CommandConfig
from cairn.run.errors import UsageError, one_of
from cairn.run.object_store import shown

Config = TypeVar("Config", bound=BaseConfig)

COMMANDS: dict[str, type[CommandConfig]] = {
    **{kind.command: kind.config for kind in RUN_KINDS.values()},
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "eval": EvaluateConfig,
}
"""The configuration class of each command."""

BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}


def load(cls: type[Config], argv: list[str]) -> Config:
    """The configuration that `argv` asks for: `@ file.toml`, overridden by flags.

    Prints and exits with 0 on `--help`.

    Raises:
        UsageError: unknown key or flag, missing file, invalid or contradictory value.
    """
    root = settings_of(cls)
    if "--help" in argv or "-h" in argv:
        from cairn.config.help import render

        print(render(_name_of(cls), root, hidden_settings(root)), end="", flush=True)
        sys.exit(0)
    config = resolve(cls, take_apart(argv, root))
    if isinstance(config, CommandConfig) and config.machine and not config.dry_run:
        raise UsageError(
            f"--machine {config.machine}: it plans for another machine, so it goes with --dry-run"
        )
    return config


def resolve(cls: type[Config], arguments: Arguments) -> Config:
    """Merge files and flags into a checked configuration.

    Raises:
        UsageError: unknown key or flag, invalid or contradictory value.
    """
    root = settings_of(cls)
    _check_shared_values(arguments, root)
    values, sources = arguments.merged(root)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        layers = [*arguments.layers, *arguments.over]
        raise UsageError(_readable(error, cls, values, sources, layers)) from None


def load_branches(cls: type[Config], argv: list[str], files: Sequence[str]) -> dict[str, Config]:
    """The configuration of each branch by its name: what `argv` asks for, with the branch's file over it.

    Raises:
        UsageError: as `load`, or a file has a setting that no branch may have for itself.
    """
    return resolve_branches(cls, take_apart(argv, settings_of(cls)), layers_of(files))


def resolve_branches(
    cls: type[Config], arguments: Arguments, branches: Mapping[str, Layer]
) -> dict[str, Config]:
    """As `load_branches`, of a command line that is taken apart, and of settings that need be in no file."""
    check_names(branches)
    root = settings_of(cls)
    return {
        name: resolve(cls, with_branch(copy.deepcopy(arguments), root, branch))
        for name, branch in branches.items()
    }


def require(config: BaseConfig, *names: str) -> None:
    """Refuse a configuration that lacks a required setting; of settings written a|b, one is enough.

    Raises:
        UsageError: the message names all that are missing.
    """
    root = settings_of(type(config))
    missing = []
    for name in names:
        paths = [tuple(alternative.split(".")) for alternative in name.split("|")]
        if not any(functools.reduce(getattr, path, cast("Any", config)) for path in paths):
            missing.append(root.find(paths[0]))
    if missing:
        command = _name_of(type(config))
        what = "".join(f"\n  {setting.flag}  {setting.doc}" for setting in missing)
        raise UsageError(
            f"{command} needs {' and '.join(setting.flag for setting in missing)}, as a flag or in a file "
            f"({command} @ file.toml); {command} --help lists all settings{what}"
        )


def _name_of(cls: type[BaseConfig]) -> str:
    own: str = getattr(cls, "command", cls.__name__)
    return next((name for name, known in COMMANDS.items() if known is cls), own)


# Settings that the roles of a run share.


def _shared_keys(root: Setting) -> dict[str, tuple[str, ...]]:
    return getattr(root.models[0], "shared", {})


def _is_shared(root: Setting, path: tuple[str, ...]) -> bool:
    return len(path) > 1 and path[1] in _shared_keys(root).get(path[0], ())


def hidden_settings(root: Setting) -> set[tuple[str, ...]]:
    """The settings that --help and hints leave out, because they are refused there or of no use."""
    unlisted = {
        leaf.path
        for leaf in root.leaves()
        if any(_is_unlisted(root.find(leaf.path[: n + 1])) for n in range(len(leaf.path)))
    }
    return shared_settings(root) | unlisted


def _is_unlisted(setting: Setting | None) -> bool:
    """Whether its class leaves the setting, or the section, out of --help and hints."""
    owner = setting.owner if setting else None
    if owner is None or setting is None:
        return False
    return setting.is_positional or setting.path[-1] in getattr(owner, "unlisted", ())


def shared_settings(root: Setting) -> set[tuple[str, ...]]:
    """The roles' settings that are set once for the whole run."""
    return {leaf.path for leaf in root.leaves() if _is_shared(root, leaf.path)}


def _check_shared_values(arguments: Arguments, root: Setting) -> None:
    """Refuse two files that disagree on a shared value, and a shared value that is given to one role only."""
    for path, value in arguments.flags:
        if _is_shared(root, path):
            if root.find(path) is None:
                raise UsageError(
                    f"{_flag(path)}: {hints.unknown_setting(path, root, hidden_settings(root), value)}"
                )
            raise UsageError(f"{_flag(path)}: all roles share this value; give it once, as {_flag(path[1:])}")
    overridden = {".".join(path) for path, _ in arguments.flags}
    first: dict[str, tuple[Any, str]] = {}
    for source, values in _shared_values_in_files(arguments.layers, root):
        for key, value in values.items():
            if key in overridden:
                continue
            if key in first and first[key][0] != value:
                raise UsageError(
                    f"{key}: {first[key][1]} says {shown(first[key][0])}, {source} says {shown(value)}; "
                    f"make them agree, or give --{key.replace('_', '-')}"
                )
            first.setdefault(key, (value, source))


def _shared_values_in_files(layers: list[Layer], root: Setting) -> list[tuple[str, dict[str, Any]]]:
    keys = _shared_keys(root)
    found = []
    for layer in layers:
        if layer.section:
            sections = {layer.section[0]: layer.content} if len(layer.section) == 1 else {}
        else:
            sections = {None: layer.content, **{role: layer.content.get(role) for role in keys}}
        for role, content in sections.items():
            if not isinstance(content, dict):
                continue
            shared = keys.get(role, ()) if role else {key for of_role in keys.values() for key in of_role}
            where = layer.file if layer.section or role is None else f"{layer.file} [{role}]"
            found.append((where, _leaves({key: content[key] for key in content if key in shared})))
    return found


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            leaves.update(_leaves(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


# Messages about invalid values.


def _readable(
    error: ValidationError,
    cls: type[BaseConfig],
    values: dict[str, Any],
    sources: dict[tuple[str, ...], str],
    layers: list[Layer],
) -> str:
    """One line for each mistake; a file that belongs to another command or role is reported once."""
    root = settings_of(cls)

    def source(path: tuple[str, ...]) -> str | None:
        """The file that a value came from; a shared value may be in a role's section of the file."""
        places = [path, *((role, *path) for role in _shared_keys(root))]
        return next((sources[place[:end]] for end in range(len(path) + 1, 0, -1) for place in places
                     if place[:end] in sources), None)  # fmt: skip

    found = []
    for problem in error.errors():
        path = _path_of(_as_given(problem["loc"], values, root), values)
        path = path[1:] if _is_shared(root, path) else path
        if problem["type"] == "value_error" and root.find(path) is None and root.find(path[:-1]):
            path = path[:-1]  # of a section, with the type that it has
        if problem["type"] == "extra_forbidden" and isinstance(problem["input"], dict):
            below = _leaves(problem["input"])
            found += [
                ((*path, *keys.split(".")), {**problem, "input": value}) for keys, value in below.items()
            ]
        else:
            found.append((path, problem))
    unknown = Counter(source(path) for path, problem in found if problem["type"] == "extra_forbidden")
    strangers = {layer.file: _stranger(layer, cls) for layer in layers if unknown[layer.file]}
    lines = [text for text in dict.fromkeys(strangers.values()) if text]
    for path, problem in found:
        file = source(path)
        if file and strangers.get(file):
            continue
        setting = root.find(path)
        where = setting.flag if setting and setting.is_positional else _flag(path)
        where += f" (in {file})" if file else ""
        lines.append(f"{where}: {_plain(path, problem, root)}" if path else _plain(path, problem, root))
    return "\n".join(dict.fromkeys(lines))


def _as_given(loc: tuple[int | str, ...], values: Any, root: Setting) -> tuple[int | str, ...]:
    """The place of an error in what was given: a value that roles share was given in one place of several."""
    shared = _shared_keys(root)
    role, key = (*loc, "", "")[:2]
    below = loc[1:] if key in shared.get(str(role), ()) else loc
    key = next(iter(below), "")
    for place in (below, *((role, *below) for role, keys in shared.items() if key in keys)):
        section = values if place is below else values.get(place[0])
        if isinstance(section, dict) and key in section:
            return place
    return loc


def _path_of(loc: tuple[int | str, ...], values: Any) -> tuple[str, ...]:
    """The keys of the value that an error is about, without pydantic's markers for unions and list items."""
    path = []
    for i, part in enumerate(loc):
        if not isinstance(part, str):
            break
        last = i == len(loc) - 1
        if isinstance(values, dict) and (part in values or last):
            path.append(part)
            values = values.get(part)
    return tuple(path)


def _flag(path: Collection[str]) -> str:
    return f"--{'.'.join(path).replace('_', '-')}"


def _stranger(layer: Layer, cls: type[BaseConfig]) -> str | None:
    """The message if a file's settings are those of another command or role."""
    own = settings_of(cls).find(layer.section)
    if own is None or _fits(layer.content, own):
        return None
    fitting = [name for name, other in COMMANDS.items() if _fits(layer.content, settings_of(other))]
    fitting = [name for name in fitting if name != "eval" or "orchestrator" not in fitting]  # it takes both
    kind = f"{layer.file} holds settings of {' or '.join(fitting)}"
    role = next((name for name in fitting if name in settings_of(cls).children), None)
    if role:
        return f"{kind}: give it as --{role} @{layer.file}"
    return f"{kind}, not of {_name_of(cls)}" if fitting else None


def _fits(content: dict[str, Any], section: Setting) -> bool:
    """Whether all keys of a file, at every level, are known in a section."""
    for key, value in content.items():
        child = section.children.get(key)
        if child is None:
            return False
        if child.kind == "section" and isinstance(value, dict) and not _fits(value, child):
            return False
    return True


def _plain(path: tuple[str, ...], problem: Any, root: Setting) -> str:
    """The message about one invalid value."""
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx") or {}
    setting = root.find(path)
    number = next((i for i, part in enumerate(problem["loc"]) if isinstance(part, int)), None)
    if kind == "extra_forbidden" and setting and number is not None:
        return hints.unknown_in_table(setting, problem["loc"][number:], root, hidden_settings(root))
    if kind == "extra_forbidden" and setting:
        return hints.of_another_type(setting, root, problem["loc"][-2])
    if kind == "extra_forbidden":
        return hints.unknown_setting(path, root, hidden_settings(root), given)
    if setting and path and number is not None and (table := hints.table_of(setting)):
        return _in_table(problem, problem["loc"][number:], settings_of(table))
    if kind == "missing" and setting and setting.is_positional:
        return "it must be given; --help says what it is"
    if kind == "value_error":
        return str(context["error"])
    if kind in BOUNDS:
        words, key = BOUNDS[kind]
        return f"it is {given}, but must be {words} {context[key]:g}"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{given!r} is not one of {', '.join(choices)}{one_of(given, choices)}"
    if kind == "string_pattern_mismatch" and setting:
        return f"{given!r} is not what it may be: {setting.doc}"
    if setting and setting.kind == "section":
        first = next(iter(setting.children.values())).flag
        return f"{given!r} is one value, but this is a section; did you mean {first}?"
    if setting and setting.kind == "list" and kind in ("missing", "too_long", "too_short"):
        count = len(getattr(setting.annotation, "__args__", ()))
        return f"it takes {count} values"
    expected, _, how = kind.partition("_")
    if expected in KINDS and how in ("parsing", "type", "from_float", "unicode"):
        return f"{given!r} is not {KINDS[expected]}"
    if kind == "dict_type":
        return f"{given!r} is not a table"
    if kind in ("list_type", "tuple_type"):
        return f"{given!r} is not a list"
    return problem["msg"]


def _in_table(problem: Any, place: tuple[int | str, ...], table: Setting) -> str:
    """The message about a value in one of a list of tables.

    Args:
        place: the number of the table, counted from 0, and the keys in it, with pydantic's markers.
        table: the settings that it may have.
    """
    keys: tuple[str, ...] = ()
    for part in place[1:]:
        if isinstance(part, str) and table.find((*keys, part)):
            keys = (*keys, part)
    where, setting = f"table {int(place[0]) + 1}", table.find(keys)
    if not keys or setting is None:
        whole = problem["type"] == "model_type"
        return f"{where}: " + (f"{problem['input']!r} is no table" if whole else _plain((), problem, table))
    name = ".".join(keys)
    if problem["type"] == "missing":
        return f"{where} lacks {name}: {setting.doc}"
    if setting.kind == "section" and problem["type"] == "model_type":
        return f"{where}, {name}: {problem['input']!r} is one value, but this is a table"
    return f"{where}, {name}: {_plain(keys, {**problem, 'loc': keys}, table)}"
