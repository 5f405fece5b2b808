"""Hints for unknown settings: what the user may have meant.

`other_names.py` lists names from other frameworks. A hint never names a setting that the command
does not have.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from cairn.config.other_names import BATCH_SIZES, MISSING, NOTES, RENAMED
from cairn.config.settings import Setting
from cairn.run.errors import one_of

FILES = (".toml", ".json", ".yaml", ".yml")
"""Suffixes of configuration files."""

MOST = 3
"""Settings that one hint names."""
NAME_OF_SETTING = re.compile(r"\{(\??)([\w.]+)\}")

Known = Mapping[tuple[str, ...], Setting]


def unknown_setting(path: tuple[str, ...], root: Setting, hidden: set[tuple[str, ...]], value: object) -> str:
    """The message about an unknown setting.

    Args:
        path: its keys.
        hidden: settings that must not be suggested.
        value: the value that was given for it.
    """
    known = {leaf.path: leaf for leaf in root.leaves() if leaf.path not in hidden}
    said = "there is no such setting"
    if path[-1] in ("config", "config_file", "cfg") and len(path) == 1:
        return (
            f"{said}; a configuration file is given as `@ {value if isinstance(value, str) else 'file.toml'}`"
        )
    hint = (
        _renamed(path, known, whole=True)
        or _misspelt(path, known, most=1)
        or _renamed(path, known)
        or _elsewhere(path, known)
        or _missing(path, known)
        or _misspelt_elsewhere(path, known)
        or _misspelt(path, known)
    )
    if hint:
        return f"{said}; {hint}"
    section = root.find(path[:-1])
    if section and section.kind == "section" and len(path) > 1:
        names = [leaf.path[-1].replace("_", "-") for leaf in known.values() if leaf.path[:-1] == section.path]
        below = [one.path for one in section.children.values() if one.kind == "section" and one.optional]
        names += [keys[-1] for keys in below if any(leaf[: len(keys)] == keys for leaf in known)]
        if names:
            return f"{said}; [{section.name}] has {', '.join(names)}"
    return f"{said}; --help lists all settings"


def of_another_type(setting: Setting, root: Setting, now: object) -> str:
    """The message about a setting that exists only if its section has another type than `now`."""
    section = root.find(setting.path[:-1])
    key = setting.path[-1]
    owners = [
        choice
        for model in (section.models if section else ())
        if key in model.model_fields
        for choice in get_args(model.model_fields["type"].annotation) or ("module:Class",)
    ]
    return f"it is a setting of type {' and '.join(owners)}, and type is {now}"


def table_of(tables: Setting) -> Any:
    """The class of a list's tables; None if its values are no tables."""
    return next((one for one in get_args(tables.annotation) if hasattr(one, "model_fields")), None)


def unknown_in_table(
    tables: Setting, place: tuple[int | str, ...], root: Setting, hidden: set[tuple[str, ...]]
) -> str:
    """The message about an unknown setting in one of a list of tables, such as [[data.sets]].

    Args:
        tables: the list.
        place: the number of the table, counted from 0, and the keys in it.
        hidden: settings that must not be suggested.
    """
    keys = tuple(str(key) for key in place[1:] if isinstance(key, str))
    number = int(place[0]) + 1
    said = f"table {number} has {'.'.join(keys)!r}, and there is no such setting in a [[{tables.name}]] table"
    known = {leaf.path: leaf for leaf in root.leaves() if leaf.path not in hidden}
    model = table_of(tables)
    unlisted: frozenset[str] = getattr(model, "unlisted", frozenset())
    fields = [name for name in getattr(model, "model_fields", ()) if name not in unlisted]
    if len(keys) == 1 and (close := one_of(keys[0], fields)):
        return f"{said}{close}"
    found = _ending_in(keys, known, tables.path[:1])
    if found and len(found) <= 2:
        return f"{said}; did you mean {_either(found)}?"
    return f"{said}; it has {', '.join(fields)}" if fields else said


def flag_without_dashes(word: str, follows: str, root: Setting) -> str:
    """The message about a flag with one dash, such as `-max-steps`."""
    path = tuple(word.lstrip("-").partition("=")[0].replace("-", "_").split("."))
    if root.find(path):
        return f"{word}: did you mean -{word}? Flags begin with two dashes"
    if path[0] in ("c", "config") and not follows.startswith("-"):
        return f"{word}: a configuration file is given as `@ {follows}`"
    return f"{word}: flags begin with two dashes; --help lists them"


def stray_argument(word: str, last: tuple[str, ...], root: Setting) -> str:
    """The message about a word that belongs to no flag."""
    if word.endswith(FILES) or Path(word).is_file():
        return f"{word}: a configuration file is given as `@ {word}`"
    if root.find(tuple(word.partition("=")[0].replace("-", "_").split("."))):
        return f"{word}: did you mean --{word}?"
    after = root.find(last) if last else None
    if after:
        takes = {"section": "no value", "flag": "no value but true or false"}.get(after.kind, "one value")
        return f"unexpected argument {word!r}: {after.flag} takes {takes}"
    return f"unexpected argument {word!r}; --help lists what can be given"


def _renamed(path: tuple[str, ...], known: Known, *, whole: bool = False) -> str | None:
    """whole: only if all keys are a name used elsewhere, not the last ones alone."""
    for start in range(1 if whole else len(path)):
        name = ".".join(path[start:])
        if name in BATCH_SIZES:
            return _batch_size(known)
        if name in RENAMED:
            names = (tuple(there.split(".")) for there in RENAMED[name].split("|"))
            if found := next(filter(None, (_ending_in(there, known, path[:start]) for there in names)), None):
                note = f" ({NOTES[name]})" if name in NOTES else ""
                return f"did you mean {_either(found)}?{note}"
    return None


def _missing(path: tuple[str, ...], known: Known) -> str | None:
    """What there is instead of a setting of other trainers."""
    for start in range(len(path)):
        for text in MISSING.get(".".join(path[start:]), ()):
            if (filled := _with_flags(text, known)) is not None:
                return filled
    return None


def _with_flags(text: str, known: Known) -> str | None:
    """The text with the flags of the settings that it names; None if the command lacks one."""
    flags: dict[str, str] = {}
    for match in NAME_OF_SETTING.finditer(text):
        mark, name = match[1], match[2]
        keys = tuple(key for key in name.split(".") if key)
        section = name.endswith(".")
        found = [
            leaf for path, leaf in known.items() if (path[:-1] if section else path)[-len(keys) :] == keys
        ]
        if not found:
            return None
        flag = found[0].flag.rpartition(".")[0] if section else _either(found)
        flags[f"{{{mark}{name}}}"] = "" if mark else flag
    for name, flag in flags.items():
        text = text.replace(name, flag)
    return text


def _batch_size(known: Known) -> str | None:
    if found := _ending_in(("data", "batch_size"), known, ()):
        return f"did you mean {_either(found)}? (records in one optimiser step, over all ranks)"
    if found := _ending_in(("prompts_per_step",), known, ()):
        return f"did you mean {_either(found)}? (each with as many answers as samples-per-prompt says)"
    return None


def _elsewhere(path: tuple[str, ...], known: Known) -> str | None:
    """The same name in another section, or the same setting at another depth."""
    for start in range(len(path)):
        found = _ending_in(path[start:], known, path[:start])
        if found and len(found) <= 2:
            return f"did you mean {_either(found)}?"
    return None


def _misspelt(path: tuple[str, ...], known: Known, most: int = 3) -> str | None:
    """The settings whose names differ least, by at most `most` letters."""
    found: dict[int, list[Setting]] = {}
    for keys, leaf in known.items():
        if (wrong := _differs(path, keys, most)) is not None:
            found.setdefault(wrong, []).append(leaf)
    if not found and len(path) == 1 and most > 1:
        for keys, leaf in known.items():
            if (wrong := _differs(path, keys[-1:], most)) is not None:
                found.setdefault(wrong, []).append(leaf)
    if not found:
        return None
    if len(closest := found[min(found)]) > MOST:
        return None
    return f"did you mean {_either(closest)}?"


def _misspelt_elsewhere(path: tuple[str, ...], known: Known) -> str | None:
    """The hint for the name of another trainer that differs least, if no setting here differs less."""
    here = min((d for keys in known if (d := _differs(path, keys)) is not None), default=None)
    close: dict[int, list[str]] = {}
    for name in [*RENAMED, *MISSING, *BATCH_SIZES]:
        wrong = _differs(path, tuple(name.split(".")))
        if wrong is not None and (here is None or wrong < here):
            close.setdefault(wrong, []).append(name)
    for name in close[min(close)] if close else ():
        keys = tuple(name.split("."))
        if said := _renamed(keys, known, whole=True) or _missing(keys, known):
            return said if said.startswith("did you mean") else f"{name.replace('_', '-')}: {said}"
    return None


def _differs(path: Sequence[str], keys: Sequence[str], most: int = 3) -> int | None:
    """By how many letters two names differ; None if by more than a typing error would explain."""
    if len(path) == len(keys):
        wrong = 0
        for one, other in zip(path, keys, strict=True):
            if (letters := _distance(one, other)) > _typos(other):
                break
            wrong += letters
        else:
            if wrong <= most:
                return wrong
    return 1 if _is_one_off(".".join(path), ".".join(keys)) else None  # a dot too many, or too few


def _typos(key: str) -> int:
    """How many letters of a key may be wrong."""
    return 1 if len(key) < 6 else 2 if len(key) < 11 else 3


def _is_one_off(one: str, other: str) -> bool:
    """Whether a letter was inserted, deleted, replaced, or exchanged with the next one."""
    if abs(len(one) - len(other)) > 1 or one == other:
        return False
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    rest, others = one[at:], other[at:]
    swapped = rest[:2] == others[1::-1] and len(others) > 1 and rest[2:] == others[2:]
    return rest[1:] == others[1:] or rest[1:] == others or rest == others[1:] or swapped


@functools.cache  # the same few sections and names are compared again and again
def _distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace, or exchange with the next one, to make one text of the other."""
    if abs(len(one) - len(other)) > 3:
        return 4
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, before, row = before, row, [i]
        for j, b in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and b == one[i - 2]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _ending_in(end: tuple[str, ...], known: Known, near: tuple[str, ...]) -> list[Setting]:
    """The settings whose last keys are these; only those below the named section, if there are any."""
    found = [leaf for path, leaf in known.items() if path[-len(end) :] == end]
    below = [leaf for leaf in found if near and leaf.path[0] == near[0]]
    return below or found


def _either(found: list[Setting]) -> str:
    return " or ".join(leaf.flag for leaf in found[:MOST])
