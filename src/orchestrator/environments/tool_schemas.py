"""The JSON schema of a function that the model may call; its calls are checked by the same schema.

The types are pydantic's reading of the signature, by which the arguments of a call are checked as well, so
both know the same enums, models and bounds. The docstring gives the descriptions only. Where transformers'
`get_json_schema`, with which most data sets of tool calls are written, says the same of an argument, it is
said in those words.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import ConfigDict, PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

CONFIG = ConfigDict(arbitrary_types_allowed=True)
"""Of the check of calls as well."""
REFERENCE = "#/$defs/"
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
"""What may end an argument's description: a JSON list of the values that it can have."""

Schema = dict[str, Any]


class _Quiet(GenerateJsonSchema):
    """Says nothing of defaults that JSON has not, which the model does not see."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}


class BadTool(ValueError):
    """A function that can't be a tool; the message says why."""


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The schema of a function that the model may call, as environments with `tools` show it to the model.

    Put it into the `tools` of records for SFT, so that the model learns from what it will see.

    Args:
        function: with type hints, and a docstring in Google's style that describes every argument.

    Returns:
        As in the `tools` of OpenAI's API: `type` "function" and `function`, with name, description,
        parameters, and `return` where the hint of the result is of JSON's types.

    Raises:
        ValueError: it can't be a tool: an argument has no type hint or no description, its type is nothing
            that JSON has, or it can't be given by name.
    """
    from transformers.utils.chat_template_utils import parse_google_format_docstring  # slow to import

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise BadTool(f"{function!r} is no function: it has no __name__ by which it could be called")
    doc = (inspect.getdoc(function) or "").strip()
    if not doc:
        raise BadTool(f"{name} has no docstring, which would tell the model what it is for")
    description, described, about_result = parse_google_format_docstring(doc)
    parameters = _parameters(function, name)
    ours, definitions = _properties(function, name)
    known = _as_transformers_says(function)
    properties: Schema = {}
    for one in parameters:
        if one.name not in (described or {}):
            raise BadTool(
                f"{name} does not describe its argument {one.name}: the docstring needs, under Args:, a line "
                f"'{one.name}: what it is'"
            )
        text, choices = _without_choices(cast(Mapping[str, str], described)[one.name], one.name)
        there: Schema = known.get(one.name, {"type": "nothing"})
        left_out = {"description", "enum"} if choices else {"description"}
        there = {key: value for key, value in there.items() if key not in left_out}
        schema = there if _same(there, ours[one.name]) else ours[one.name]
        properties[one.name] = {**schema, **choices, "description": text}
    accepted: Schema = {"type": "object", "properties": properties}
    if needed := [one.name for one in parameters if one.default is one.empty]:
        accepted["required"] = needed
    if definitions:
        accepted["$defs"] = definitions
    whole: Schema = {"name": name, "description": description, "parameters": accepted}
    result = _result(function, known.get("return"))
    if result is not None:
        whole["return"] = result | ({} if about_result is None else {"description": about_result})
    return {"type": "function", "function": whole}


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The arguments, each of which a call can give by its name."""
    parameters = list(inspect.signature(function).parameters.values())
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise BadTool(
                f"{name} takes {one}, and the model gives each argument by its name: take a list or a dict"
            )
        if one.kind is one.POSITIONAL_ONLY:
            raise BadTool(f"{name} takes {one.name} by its place only (/), and the model gives it by name")
        if one.annotation is one.empty:
            raise BadTool(f"argument {one.name} of {name} has no type hint")
    return parameters


def _properties(function: Callable[..., Any], name: str) -> tuple[Schema, Schema]:
    """Pydantic's schemas of the arguments, and of what they refer to that refers to itself."""
    try:
        whole = TypeAdapter(cast(Any, function), config=CONFIG).json_schema(
            mode="validation", schema_generator=_Quiet
        )
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError) as error:
        raise BadTool(
            f"an argument of {name} has a type that JSON can't give: {str(error).splitlines()[0]}; take str, "
            "int, float, bool, list, dict, an enum or a pydantic model"
        ) from None
    except (PydanticUndefinedAnnotation, NameError) as error:
        raise BadTool(f"the type hints of {name} can't be read: {error}") from None
    definitions: Schema = whole.get("$defs", {})
    again = {one for one in definitions if _reaches(one, one, definitions)}
    properties = {
        argument: _without_titles(_resolved(schema, definitions, again))
        for argument, schema in whole.get("properties", {}).items()
    }
    for schema in properties.values():
        schema.pop("default", None)
    kept = {one: _without_titles(_resolved(definitions[one], definitions, again)) for one in sorted(again)}
    return properties, kept


def _references(schema: Any) -> set[str]:
    """The names of all definitions that a schema refers to."""
    if isinstance(schema, list):
        return set[str]().union(*map(_references, cast("list[Any]", schema)))
    if not isinstance(schema, dict):
        return set()
    inside = cast(Schema, schema)
    own = {str(inside["$ref"]).removeprefix(REFERENCE)} if isinstance(inside.get("$ref"), str) else set[str]()
    return own.union(*map(_references, inside.values()))


def _reaches(start: str, end: str, definitions: Schema) -> bool:
    """Whether a definition refers to another one, over whichever others."""
    seen, left = set[str](), [start]
    while left:
        for one in _references(definitions.get(left.pop())) - seen:
            if one == end:
                return True
            seen.add(one)
            left.append(one)
    return False


def _resolved(schema: Any, definitions: Schema, kept: set[str]) -> Any:
    """The schema with definitions in the place of references to them, but for those in `kept`."""
    if isinstance(schema, list):
        return [_resolved(one, definitions, kept) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    inside = cast(Schema, schema)
    name = str(inside.get("$ref", "")).removeprefix(REFERENCE)
    if name in definitions and name not in kept:
        beside = {key: value for key, value in inside.items() if key != "$ref"}
        return _resolved({**definitions[name], **beside}, definitions, kept)
    return {key: _resolved(value, definitions, kept) for key, value in inside.items()}


def _without_titles(schema: Any) -> Any:
    """Without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found: Schema = {}
    for key, value in cast(Schema, schema).items():
        if key in ("properties", "patternProperties"):  # whose keys are names
            found[key] = {name: _in_order(_without_titles(one)) for name, one in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            found[key] = value
        elif key != "title":
            found[key] = _without_titles(value)
    return _in_order(found)


def _in_order(schema: Any) -> Any:
    """With the type first, as people write it."""
    if not isinstance(schema, dict) or "type" not in schema:
        return schema
    inside = cast(Schema, schema)
    return {"type": inside["type"], **inside}


def _as_transformers_says(function: Callable[..., Any]) -> Schema:
    """The properties in transformers' schema of the function, with the result's schema as `return`."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        found = get_json_schema(function)["function"]
    except Exception:  # it knows fewer types, and whatever else is wrong is reported here
        return {}
    return {**found["parameters"]["properties"], **({"return": found["return"]} if "return" in found else {})}


def _result(function: Callable[..., Any], known: Schema | None) -> Schema | None:
    """What is said of the result; None unless it is of a type that both readers know."""
    if known is None:
        return None
    known = {key: value for key, value in known.items() if key != "description"}
    try:
        hint = typing.get_type_hints(function, include_extras=True)["return"]
        ours: Schema = TypeAdapter(hint).json_schema(mode="serialization")
    except Exception:
        return None
    return known if _same(known, ours) else None


def _without_choices(text: str, name: str) -> tuple[str, Schema]:
    """An argument's description, and the values that it ends with, as a part of a schema."""
    found = CHOICES.search(text)
    if found is None:
        return text, {}
    try:
        values = [one.strip() for one in json.loads(found[1])]
    except (ValueError, AttributeError, TypeError):
        raise BadTool(f"argument {name}: (choices: {found[1]}) must be a JSON list of texts") from None
    return text[: found.start()].strip(), {"enum": values}


def choices_of(function: Callable[..., Any]) -> dict[str, list[str]]:
    """The values that the docstring of a tool lists, by argument; types know nothing of these."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    _, described, _ = parse_google_format_docstring((inspect.getdoc(function) or "").strip())
    texts = cast("Mapping[str, str]", described or {})
    found = {name: _without_choices(text, name)[1] for name, text in texts.items()}
    return {name: schema["enum"] for name, schema in found.items() if schema}


# Whether two schemas say the same


def _same(one: Schema, other: Schema) -> bool:
    """Whether both schemas are of the same values, as far as these forms go."""
    return _alternatives(one) == _alternatives(other)


def _alternatives(schema: Schema) -> frozenset[str]:
    """The values and types that a schema allows, each in one form."""
    found: set[str] = {"null"} if schema.get("nullable") else set()
    if "anyOf" in schema:
        return frozenset(found.union(*map(_alternatives, schema["anyOf"])))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        return frozenset(found | {json.dumps(value) for value in values})
    kinds = schema.get("type")
    about = {key: _plain(key, value) for key, value in schema.items() if key not in _NOT_OF_VALUES}
    about = {key: value for key, value in about.items() if value != _ANYTHING and value is not True}
    for kind in cast("list[Any]", kinds if isinstance(kinds, list) else [kinds]):
        found.add("null" if kind == "null" else json.dumps([kind, about], sort_keys=True))
    return frozenset(found)


_NOT_OF_VALUES = {"type", "title", "default", "description", "nullable"}
_ANYTHING = [json.dumps([None, {}])]


def _plain(key: str, value: Any) -> Any:
    """What a keyword of a schema says, in one form."""
    if key in ("items", "additionalProperties") and isinstance(value, dict):
        return sorted(_alternatives(cast(Schema, value)))
    if key == "prefixItems":
        return [sorted(_alternatives(one)) for one in value]
    return value
