# Unchecked values have no static types.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Parses a command line: configuration files, then flags that override them.

sft @ file.toml [@ another.toml] --optimizer.lr 1e-4 --ckpt --no-data.shuffle
rl --trainer @train.toml --orchestrator @orch.toml --max-steps 20
ckpt export outputs/run folder --dtype bfloat16
"""

import json
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.config.hints import FILES, flag_without_dashes, stray_argument
from cairn.config.settings import Setting
from cairn.run.errors import UsageError
from cairn.run.object_store import holds_credentials

TRUE, FALSE = ("true", "True", "1"), ("false", "False", "0")
NUMBER = re.compile(r"-?[\d.]")


@dataclass
class Layer:
    """A configuration file and the section that it was given for; () means the whole configuration."""

    file: str
    section: tuple[str, ...]
    content: dict[str, Any]


@dataclass
class Arguments:
    """The content of a command line."""

    layers: list[Layer] = field(default_factory=list)
    """The files, those for the whole configuration first."""
    flags: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    """Keys and value of each flag, in order; values are not yet checked."""
    over: list[Layer] = field(default_factory=list[Layer])
    """Files that override the flags, too."""

    def values(self, path: tuple[str, ...]) -> list[Any]:
        """What the newest flag of a list has said so far."""
        return next((value for known, value in reversed(self.flags) if known == path), [])

    def merged(self, root: Setting) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
        """All values in one tree: later files override earlier ones, flags these, and files of `over` all.

        Also returns the file that each value came from, by its keys; values from flags are not in it.
        """
        tree: dict[str, Any] = {}
        sources: dict[tuple[str, ...], str] = {}
        for layer in self.layers:
            section = root.find(layer.section) or root
            target = tree
            for key in layer.section:
                if not isinstance(target.get(key), dict):
                    target[key] = {}
                target = target[key]
            _lay(target, layer.content, section, layer.file, sources)
        # A flag that chooses another type drops values of files, but not those of other flags.
        for path, value in sorted(self.flags, key=lambda flag: not _chooses(root, flag[0])):
            _assign(tree, root, path, value)
            for known in [known for known in sources if known[: len(path)] == path]:
                del sources[known]
        for layer in self.over:
            _lay(tree, layer.content, root, layer.file, sources)
        return tree, sources


def take_apart(argv: list[str], root: Setting) -> Arguments:
    """Parse a command line for the configuration `root`.

    Raises:
        UsageError: a word can't be parsed, or a file can't be read. Unknown settings are found later, when
            values are checked.
    """
    found = Arguments()
    words = _Words(argv)
    of_sections: list[Layer] = []
    without_flag: list[str] = []
    while words:
        word = words.take()
        if word.startswith("@"):
            file = _file(words, word, "@")
            found.layers.append(Layer(file, (), read_file(file)))
            continue
        if root.positional and not word.startswith("-"):
            without_flag.append(word)
            continue
        if not word.startswith("--") or word == "--":
            last = found.flags[-1][0] if found.flags else ()
            raise UsageError(
                flag_without_dashes(word, words.peek(), root)
                if word.startswith("-")
                else stray_argument(word, last, root)
            )
        name, equals, text = word[2:].partition("=")
        if equals:
            words.give_back(text)
        path = tuple(part.replace("-", "_") for part in name.split("."))
        setting = root.find(path)
        if setting and setting.is_positional:
            raise UsageError(f"--{name}: {setting.flag} is given without a flag; --help shows its place")
        if not equals and words.peek().startswith("@") and (setting is None or _takes_file(setting)):
            if setting is None:
                raise UsageError(f"--{name}: there is no such section")
            file = _file(words, words.take(), word)
            of_sections.append(Layer(file, setting.path, read_file(file)))
            continue
        negated = _negated(path, root) if setting is None else None
        if negated is not None:
            found.flags.append((negated.path, False if negated.kind == "flag" else None))
            if equals:
                raise UsageError(f"--{name} takes no value")
            continue
        flag = (
            _value_of(setting, name, words, forced=bool(equals))
            if setting
            else _unknown(path, name, words, root, forced=bool(equals))
        )
        earlier = found.values(path) if setting and setting.is_repeated else []
        found.flags.append((flag[0], [*earlier, *flag[1]] if earlier else flag[1]))
    found.layers += of_sections
    found.flags += _by_place(without_flag, root)
    return found


def _by_place(words: list[str], root: Setting) -> list[tuple[tuple[str, ...], Any]]:
    """The settings that are given without a flag, and their values; what is missing is found later.

    Raises:
        UsageError: there are too many words.
    """
    found: list[tuple[tuple[str, ...], Any]] = []
    needed = sum(not setting.optional for setting in root.positional)
    for setting in root.positional:
        needed -= not setting.optional
        is_list = setting.kind == "list"
        count = max(len(words) - needed, 0) if is_list else 1
        if words[:count]:
            found.append((setting.path, words[:count] if is_list else words[0]))
        words = words[count:]
    if words:
        raise UsageError(f"unexpected argument {words[0]!r}; --help lists what can be given")
    return found


def read_file(name: str) -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        UsageError: it does not exist, has an unknown suffix, or is malformed.
    """
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{name}: configuration file not found") from None
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from None
    try:
        match path.suffix:
            case ".toml":
                content = tomllib.loads(text)
            case ".json":
                content = json.loads(text)
            case ".yaml" | ".yml":
                import yaml

                content = yaml.safe_load(text)
            case _:
                raise UsageError(f"{name}: the name of a configuration file must end in {', '.join(FILES)}")
    except UsageError:
        raise
    except Exception as error:  # each parser has its own exceptions
        raise UsageError(f"{name} is not valid {path.suffix[1:].upper()}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{name} contains a {type(content).__name__}, not settings and their values")
    return content


class _Words:
    """The words of a command line that are not parsed yet."""

    def __init__(self, argv: list[str]):
        self._left = list(reversed(argv))

    def __bool__(self) -> bool:
        return bool(self._left)

    def peek(self) -> str:
        """The next word; -- at the end."""
        return self._left[-1] if self._left else "--"

    def take(self) -> str:
        return self._left.pop()

    def give_back(self, word: str) -> None:
        self._left.append(word)

    def values(self) -> list[str]:
        """Takes all words up to the next flag or file."""
        taken = []
        while self and not self.peek().startswith(("--", "@")):
            taken.append(self.take())
        return taken


def _file(words: _Words, at: str, after: str) -> str:
    if len(at) > 1:
        return at[1:]
    if not words or words.peek().startswith("--"):
        raise UsageError(f"{after} must be followed by a configuration file")
    return words.take()


def _takes_file(setting: Setting) -> bool:
    return setting.kind in ("section", "table")


def _negated(path: tuple[str, ...], root: Setting) -> Setting | None:
    """The setting that --no-ckpt, --no-data.shuffle or --data.no-shuffle turns off."""
    for i, key in enumerate(path):
        if key.startswith("no_"):
            setting = root.find((*path[:i], key.removeprefix("no_"), *path[i + 1 :]))
            if setting and (setting.kind == "flag" or (setting.kind == "section" and setting.optional)):
                return setting
    return None


def _value_of(setting: Setting, name: str, words: _Words, *, forced: bool) -> tuple[tuple[str, ...], Any]:
    """A known setting and the value that follows it; `forced`: after `=`, so the next word is a value."""
    follows = words.peek()
    has_value = forced or not follows.startswith(("--", "@"))
    if setting.kind == "section":
        return setting.path, _section_value(setting, name, words.take() if has_value else None)
    if setting.kind == "flag":
        if forced or follows in TRUE + FALSE:
            text = words.take()
            return setting.path, text in TRUE if text in TRUE + FALSE else text
        return setting.path, True
    if setting.kind == "list":
        given = [words.take()] if forced else words.values()
        return setting.path, _list(given, setting, name)
    if not has_value:
        raise UsageError(f"--{name} needs a value")
    text = words.take()
    return setting.path, _json(text, name) if setting.kind == "table" else text


def _section_value(setting: Setting, name: str, text: str | None) -> Any:
    """The value of a section's own flag: --ckpt turns it on, --ckpt None off."""
    if text is not None and text.startswith("{"):
        return _json(text, name)
    if setting.optional and text == "None":
        return None
    if setting.optional and text is None:
        return {}
    if not setting.optional and any(child.kind == "section" for child in setting.children.values()):
        raise UsageError(f"--{name} takes a configuration file: --{name} @{text or 'file.toml'}")
    first = next(iter(setting.children.values())).flag
    if text is None:
        raise UsageError(f"--{name} is a section; give one of its settings, such as {first}")
    if setting.optional and text in TRUE + FALSE:
        how = f"--{name} alone turns it on" if text in TRUE else f"--no-{name} turns it off"
        raise UsageError(f"--{name} takes no {text!r}: {how}")
    meant = first if holds_credentials(text) else f"{first} {text}"
    raise UsageError(f"--{name} takes no value; did you mean {meant}?")


def _list(given: list[str], setting: Setting, name: str) -> Any:
    if len(given) == 1 and given[0].startswith("["):
        return _json(given[0], name)
    if len(given) == 1 and str not in getattr(setting.annotation, "__args__", (str,)):
        return [part for part in given[0].split(",") if part]
    return given


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"--{name}: {text!r} is not valid JSON: {error}") from None


def _unknown(
    path: tuple[str, ...], name: str, words: _Words, root: Setting, *, forced: bool
) -> tuple[tuple[str, ...], Any]:
    """A key of a table, such as --environment.args.seed 3, or an unknown setting."""
    given = [words.take()] if forced else words.values()
    for length in range(len(path) - 1, 0, -1):
        above = root.find(path[:length])
        if above and above.kind == "table" and len(given) == 1:
            return (*above.path, *path[length:]), _guess(given[0])
    return path, " ".join(given) if given else True


def _guess(text: str) -> Any:
    """The value of a key without a declared type: parsed as JSON, otherwise text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _lay(
    target: dict[str, Any],
    content: dict[str, Any],
    section: Setting | None,
    file: str,
    sources: dict[tuple[str, ...], str],
    above: tuple[str, ...] = (),
) -> None:
    """Merge a file's content into the values of earlier files."""
    above = section.path if section else above
    if section and _is_another_type(section, target, content.get("type")):
        target.clear()
    if section:
        for key in content:
            _leave_arguments(section, target, key, content[key])
    for key, value in content.items():
        child = section.children.get(key) if section else None
        path = child.path if child else (*above, key)
        if child and child.kind == "section" and isinstance(value, dict):
            below = target.get(path[-1])
            target[path[-1]] = below = below if isinstance(below, dict) else {}
            _lay(below, value, child, file, sources)
        else:
            target[path[-1]] = value
            sources[path] = file


def _assign(tree: dict[str, Any], root: Setting, path: tuple[str, ...], value: Any) -> None:
    """Set a flag's value; a section that is turned on keeps its values from files."""
    for depth, key in enumerate(path[:-1]):
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
        section = root.find(path[: depth + 1])
        if section and path[-1] == "type" and _is_another_type(section, tree, value):
            tree.clear()
    if section := root.find(path[:-1]):
        _leave_arguments(section, tree, path[-1], value)
    if value == {} and isinstance(tree.get(path[-1]), dict) and _is_section(root, path):
        return
    tree[path[-1]] = value


def _arguments_of(root: Setting, path: tuple[str, ...]) -> str | None:
    """The key of the arguments that belong to the setting at `path`, if it has any."""
    section = root.find(path[:-1])
    return (
        getattr(section.models[0], "arguments_of", {}).get(path[-1]) if section and section.models else None
    )


def _chooses(root: Setting, path: tuple[str, ...]) -> bool:
    """Whether this setting decides which others its section has."""
    section = root.find(path[:-1])
    is_type = section is not None and len(section.models) > 1 and path[-1] == "type"
    return is_type or _arguments_of(root, path) is not None


def _leave_arguments(section: Setting, before: dict[str, Any], key: str, wanted: Any) -> None:
    """Drop the arguments of `key`'s old value if it gets another value."""
    arguments = _arguments_of(section, (key,))
    if arguments and wanted != before.get(key, section.children[key].default):
        before.pop(arguments, None)


def _is_another_type(section: Setting, before: dict[str, Any], wanted: Any) -> bool:
    """Whether a section gets another type, so that its old values no longer apply."""
    now = before.get("type", getattr(section.default, "type", None))
    return len(section.models) > 1 and wanted not in (None, now)


def _is_section(root: Setting, path: tuple[str, ...]) -> bool:
    setting = root.find(path)
    return setting is not None and setting.kind == "section"
