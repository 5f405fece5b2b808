"""The tree of a command's settings, derived from its configuration classes."""

import ast
import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, field_validator, model_validator
from pydantic.fields import FieldInfo

from cairn.run.extensions import syntax_tree
from cairn.run.machine import bytes_of
from cairn.run.object_store import NO_CREDENTIALS, holds_credentials, is_url

Kind = Literal["section", "flag", "value", "list", "table"]


@dataclass
class Setting:
    """One setting, or a section of settings.

    kind flag: a boolean. kind table: a dictionary whose keys the user chooses.
    """

    path: tuple[str, ...]
    """Its keys, from the top of a configuration file."""
    kind: Kind
    optional: bool
    """Whether it can be None; an optional section is off by default."""
    annotation: Any
    default: Any
    doc: str
    owner: type[BaseModel] | None
    """The class that declares it."""
    models: tuple[type[BaseModel], ...] = ()
    """For a section: its class, or the classes that its `type` chooses from."""
    children: dict[str, "Setting"] = field(default_factory=dict)
    """For a section: its settings by name, including aliases."""

    @property
    def name(self) -> str:
        """Its name as a flag without the dashes, such as optimizer.weight-decay."""
        return ".".join(self.path).replace("_", "-")

    @property
    def is_positional(self) -> bool:
        """Whether its value is given without a flag."""
        return bool(self.path) and self.path[-1] in getattr(self.owner, "positional", ())

    @property
    def is_repeated(self) -> bool:
        """Whether it is a list to which each of its flags adds, rather than beginning it anew."""
        return bool(self.path) and self.path[-1] in getattr(self.owner, "repeated", ())

    @property
    def flag(self) -> str:
        """The setting as it is given: as a flag; in capitals, if it is given without one."""
        return self.path[-1].upper() if self.is_positional else f"--{self.name}"

    @property
    def positional(self) -> "list[Setting]":
        """The settings of a command that are given without a flag, in their order."""
        return [self.children[name] for name in getattr(self.models[0], "positional", ())]

    def find(self, keys: tuple[str, ...]) -> "Setting | None":
        """The setting at `keys` below this one."""
        here: Setting | None = self
        for key in keys:
            here = here.children.get(key) if here else None
        return here

    def leaves(self) -> "Iterator[Setting]":
        """Every setting in this section that is not itself a section, in the order of declaration."""
        for key, child in self.children.items():
            if key != child.path[-1]:
                continue  # an alias
            if child.kind == "section":
                yield from child.leaves()
            else:
                yield child


@functools.cache
def settings_of(cls: type[BaseModel]) -> Setting:
    """The root of the tree of a configuration class."""
    return _section((), (cls,), optional=False, default=None, doc=cls.__doc__ or "", owner=None)


def _section(
    path: tuple[str, ...],
    models: tuple[type[BaseModel], ...],
    *,
    optional: bool,
    default: Any,
    doc: str,
    owner: type[BaseModel] | None,
) -> Setting:
    section = Setting(path, "section", optional, None, default, doc, owner, models)
    for model in models:
        docs = _field_docs(model)
        for name, info in model.model_fields.items():
            names = _names(name, info)
            child = _setting((*path, names[0]), info, docs.get(name, ""), model)
            known = child
            for accepted in names:
                known = section.children.setdefault(accepted, child)
            if known is not child:
                _add_another_types(known, child)
    return section


def _setting(path: tuple[str, ...], info: FieldInfo, doc: str, owner: type[BaseModel]) -> Setting:
    annotation, optional = _without_none(info.annotation)
    choices = get_args(annotation) if _is_union(annotation) else (annotation,)
    choices = tuple(_without_none(choice)[0] for choice in choices)
    default = info.get_default(call_default_factory=True)
    if all(isinstance(choice, type) and issubclass(choice, BaseModel) for choice in choices):
        doc = doc or (choices[0].__doc__ or "").strip().partition("\n")[0]
        return _section(path, choices, optional=optional, default=default, doc=doc, owner=owner)
    kind: Kind = "value"
    if annotation is bool:
        kind = "flag"
    elif get_origin(annotation) in (list, tuple, set) or annotation in (list, tuple, set):
        kind = "list"
    elif get_origin(annotation) is dict or annotation is dict:
        kind = "table"
    return Setting(path, kind, optional, annotation, default, doc, owner)


def _add_another_types(setting: Setting, other: Setting) -> None:
    """Merge the same setting of another type of the section: annotations and docstrings are joined."""
    setting.annotation = Union[setting.annotation, other.annotation]  # noqa: UP007
    if other.doc != setting.doc:
        setting.doc = f"{setting.doc.rstrip('.')}; {other.doc}"


def _without_none(annotation: Any) -> tuple[Any, bool]:
    while hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if not _is_union(annotation):
        return annotation, False
    rest = tuple(part for part in get_args(annotation) if part is not NoneType)
    inner = _without_none(rest[0])[0] if len(rest) == 1 else Union[rest]  # noqa: UP007
    return inner, len(rest) < len(get_args(annotation))


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _names(name: str, info: FieldInfo) -> list[str]:
    """Every name that a field accepts; the first is the canonical one."""
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else [name]


def _field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a class and its base classes."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _docs_in_module(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _docs_in_module(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of each class in a module; its source is parsed once."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] in ("builtins", "pydantic") or file is None:
        return {}
    docs: dict[str, dict[str, str]] = {}
    for definition in syntax_tree(Path(file).read_text()).body:
        if not isinstance(definition, ast.ClassDef):
            continue
        found = docs.setdefault(definition.name, {})
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str() as text)),
                ):
                    found[name] = " ".join(text.split())
                case _:
                    pass
    return docs


# The base class of all sections of settings.


class BaseConfig(BaseModel):
    """Settings with known names and checked values. Immutable: changed values are a new object."""

    # pydantic repeats what was given in its errors' own text, and that may hold a secret.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
    positional: ClassVar[tuple[str, ...]] = ()
    """Of a command: fields that are given in this order, without a flag. One may be a list, which takes all
    words that the others leave."""
    repeated: ClassVar[frozenset[str]] = frozenset()
    """Lists whose flag may be given several times, and adds to the list each time."""
    unlisted: ClassVar[frozenset[str]] = frozenset()
    """Fields that --help and hints leave out: they allow a single value, have a newer name, or are set by
    another setting."""

    def left_to(self, **values: Any) -> Self:
        """With these values where none is set."""
        return self.model_copy(update={key: values[key] for key in values if getattr(self, key) is None})

    def deriving(self, **values: Any) -> Self:
        """With values that follow from other settings, which do not count as given."""
        made = self.model_copy(update=values)
        object.__setattr__(made, "__pydantic_fields_set__", set(self.model_fields_set))
        return made

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, data: Any) -> Any:
        """Read what TOML and flags can't say otherwise.

        "None" is None. A section without a `type` has that of its default. In a table all of whose values are
        text, numbers and booleans are read as such, unless its values are declared as text.
        """
        if not isinstance(data, dict):
            return data
        values = {k: None if v == "None" else v for k, v in cast("dict[str, Any]", data).items()}
        for name, info in cls.model_fields.items():
            value = values.get(name)
            if not isinstance(value, dict):
                continue
            inner, of = cast("dict[str, Any]", value), info.annotation
            if (get_origin(of) or of) is dict and get_args(of)[1:] != (str,):
                if all(isinstance(one, str) for one in inner.values()):
                    values[name] = {key: _number_or_bool(text) for key, text in inner.items()}
            elif "type" not in inner and hasattr(info.default, "type"):
                values[name] = {**inner, "type": info.default.type}
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _without_credentials(cls, value: object) -> object:
        """Refuse the URL of an object store that holds credentials: settings are printed and stored."""
        texts = cast("list[object]", value) if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and is_url(text) and holds_credentials(text):
                raise ValueError(NO_CREDENTIALS)
        return cast("object", value)


def _absolute_if_there(value: str) -> str:
    return os.path.abspath(value) if value and os.path.exists(value) else value


AbsolutePath = Annotated[str, AfterValidator(os.path.abspath)]
ExistingPath = Annotated[str, AfterValidator(_absolute_if_there)]
"""A path, made absolute if there is something, as Ray's workers have another current directory; or a name."""


def separate(names: list[str]) -> list[str]:
    """Names that are given one by one, or several with commas between them."""
    return [name.strip() for part in names for name in part.split(",") if name.strip()]


def _size(text: str) -> str:
    bytes_of(text)
    return text


Size = Annotated[str, AfterValidator(_size)]
"""A number of bytes, such as 64M; `cairn.run.machine.bytes_of` tells how many."""


def _number_or_bool(text: str) -> bool | int | float | str:
    """The number or boolean that `text` is, else the text; 007, inf and nan are text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with contextlib.suppress(ValueError):
        if str(int(text)) == text:
            return int(text)
    with contextlib.suppress(ValueError):
        number = float(text)
        is_plain = not text[:1].isdigit() or text == str(number) or any(c in text for c in "eE.")
        if is_plain and not math.isnan(number) and text not in ("inf", "-inf", "+inf"):
            return number
    return text


def refuse_twins(what: str, key: str, names: Sequence[str]) -> None:
    """Check that no two of a list of sections have the same name.

    Args:
        what: the sections are, in the plural. key: the setting that names one.

    Raises:
        ValueError: two have the same.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are called {twice[0]!r}: give each a {key} of its own")
