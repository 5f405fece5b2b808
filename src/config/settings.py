"""The tree of settings that a command has, read from its configuration classes."""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

Kind = Literal["section", "flag", "value", "list", "table"]


@dataclass
class Setting:
    """One setting, or a section of them.

    A flag is a boolean; a table is a dictionary with keys of the user's choice.
    """

    path: tuple[str, ...]
    """Its keys from the top of a configuration file."""
    kind: Kind
    optional: bool
    """Whether it can be None; an optional section is off unless it is asked for."""
    annotation: Any
    default: Any
    doc: str
    owner: type[BaseModel] | None
    """The class that declares it."""
    models: tuple[type[BaseModel], ...] = ()
    """Of a section: its class, or the classes that its `type` chooses from."""
    children: dict[str, "Setting"] = field(default_factory=dict)
    """Of a section, by every name that is accepted for each."""

    @property
    def name(self) -> str:
        """The setting as a flag names it, without the dashes: optimizer.weight-decay."""
        return ".".join(self.path).replace("_", "-")

    @property
    def flag(self) -> str:
        """The setting as a flag."""
        return f"--{self.name}"

    def find(self, keys: tuple[str, ...]) -> "Setting | None":
        """The setting at `keys` below this one."""
        here: Setting | None = self
        for key in keys:
            here = here.children.get(key) if here else None
        return here

    def leaves(self) -> "Iterator[Setting]":
        """Every setting below this section that is no section itself, in the order of declaration."""
        for key, child in self.children.items():
            if key != child.path[-1]:
                continue  # another name for the same setting
            if child.kind == "section":
                yield from child.leaves()
            else:
                yield child


@functools.cache
def settings_of(cls: type[BaseModel]) -> Setting:
    """The root of a configuration class's tree."""
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
    """Have the setting of one type of a section stand for one of the same name that another type has."""
    setting.annotation = Union[setting.annotation, other.annotation]  # noqa: UP007
    if other.doc != setting.doc:
        setting.doc = f"{setting.doc.rstrip('.')}; {other.doc}"


def _without_none(annotation: Any) -> tuple[Any, bool]:
    while hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    if not _is_union(annotation):
        return annotation, False
    rest = tuple(part for part in get_args(annotation) if part is not NoneType)
    return (rest[0] if len(rest) == 1 else Union[rest]), len(rest) < len(get_args(annotation))  # noqa: UP007


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _names(name: str, info: FieldInfo) -> list[str]:
    """Every name that a field is accepted under; the first is the one that is kept."""
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        return [choice for choice in alias.choices if isinstance(choice, str)]
    return [alias] if isinstance(alias, str) else [name]


def _field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a class and of those that it extends."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _docs_in_module(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _docs_in_module(module: str) -> dict[str, dict[str, str]]:
    """By class, the docstrings below its fields; reads the module's file once."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module.partition(".")[0] in ("builtins", "pydantic", "pydantic_config") or file is None:
        return {}
    docs: dict[str, dict[str, str]] = {}
    for definition in ast.parse(Path(file).read_text()).body:
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
