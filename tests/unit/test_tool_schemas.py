"""What the model is told of a tool is what the check of its calls obeys."""

import asyncio
import enum
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from transformers.utils.chat_template_utils import get_json_schema

import cairn
from cairn.orchestrator.environments.tools import Tool


class Unit(enum.Enum):
    C = "celsius"
    F = "fahrenheit"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    x: int
    y: int = 0


class Way(BaseModel):
    title: str = Field(description="What it is called.")
    points: list[Point]
    unit: Unit | None = None


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


def tool(hint: Any, default: Any = inspect.Parameter.empty, doc: str = "The value.") -> Callable[..., Any]:
    """A function with one argument of this type."""

    def look(value: Any) -> str:
        return repr(value)

    look.__annotations__ = {"value": hint, "return": str}
    parameter = inspect.Parameter(
        "value", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint
    )
    look.__signature__ = inspect.Signature([parameter], return_annotation=str)  # type: ignore[attr-defined]
    look.__doc__ = f"Look.\n\nArgs:\n    value: {doc}\n\nReturns:\n    The text."
    return look


def told(hint: Any, **how: Any) -> dict[str, Any]:
    """What the model is told of an argument of this type."""
    return cairn.tool_schema(tool(hint, **how))["function"]["parameters"]["properties"]["value"]


def called(hint: Any, value: Any) -> dict[str, str]:
    outcome = Tool(tool(hint)).with_arguments({"value": value})()
    return asyncio.run(outcome) if inspect.isawaitable(outcome) else outcome


# What the trial of signatures has found


def test_an_enum_is_told_by_its_values():
    assert told(Unit) == {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The value."}
    assert told(Level)["enum"] == [1, 2]
    assert "content" in called(Unit, "celsius")
    assert "error" in called(Unit, {"celsius": 1})


def test_a_model_is_told_with_its_fields():
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
        "required": ["x"],
    }
    assert told(Point) == {**point, "description": "The value."}
    way = told(Way)
    assert way["properties"]["title"] == {"type": "string", "description": "What it is called."}
    assert way["properties"]["points"] == {"type": "array", "items": point}
    assert way["required"] == ["title", "points"]
    assert called(Point, {"x": 1}) == {"content": "Point(x=1, y=0)"}
    assert "error" in called(Point, {"y": 1})


def test_a_model_that_contains_itself_keeps_its_definition():
    parameters = cairn.tool_schema(tool(Tree))["function"]["parameters"]
    assert parameters["properties"]["value"]["$ref"] == "#/$defs/Tree"
    assert parameters["$defs"]["Tree"]["required"] == ["name"]
    jsonschema.Draft202012Validator(parameters).validate(
        {"value": {"name": "a", "children": [{"name": "b"}]}}
    )


def test_bounds_are_told():
    assert told(Annotated[int, Field(ge=1, le=9)]) == {
        "type": "integer", "maximum": 9, "minimum": 1, "description": "The value.",
    }  # fmt: skip
    assert told(Annotated[str, Field(max_length=3)])["maxLength"] == 3
    assert told(tuple[int, str])["minItems"] == 2
    assert "error" in called(Annotated[int, Field(ge=1)], 0)


def test_choices_of_a_docstring_are_told_and_checked():
    doc = 'The value. (choices: ["a", "b"])'
    assert told(str, doc=doc) == {"type": "string", "enum": ["a", "b"], "description": "The value."}
    one = Tool(tool(str, doc=doc))
    assert one.with_arguments({"value": "a"})() == {"content": "'a'"}
    assert one.with_arguments({"value": "c"})() == {
        "error": "Error: wrong arguments: value: Input should be one of 'a', 'b'"
    }
    assert told(Optional[str], doc=doc, default=None) == {  # noqa: UP045
        "type": "string", "nullable": True, "enum": ["a", "b"], "description": "The value.",
    }  # fmt: skip
    with pytest.raises(ValueError, match="must be a JSON list of texts"):
        told(str, doc="The value. (choices: a, b)")


def several(*names: str) -> str:
    """Names.

    Args:
        names: all
    """
    return ""


def any_names(**names: str) -> str:
    """Names.

    Args:
        names: all
    """
    return ""


def by_place(a: int, /) -> str:
    """Add.

    Args:
        a: one
    """
    return ""


def bare(q) -> str:  # type: ignore[no-untyped-def]
    """Bare.

    Args:
        q: a question
    """
    return ""


def undescribed(q: str) -> str:
    """Look it up.

    :param q: the question
    """
    return ""


def nodoc(q: str) -> str:
    return ""


class Handle:
    """Nothing that JSON has."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (several, r"several takes \*names.*take a list or a dict"),
        (any_names, r"any_names takes \*\*names"),
        (by_place, "by_place takes a by its place only"),
        (bare, "argument q of bare has no type hint"),
        (undescribed, "undescribed does not describe its argument q"),
        (nodoc, "nodoc has no docstring"),
        (tool(Handle), "an argument of look has a type that JSON can't give"),
        (tool("Missing"), "the type hints of look can't be read"),
        (Point(x=1), "is no function"),
    ],
)
def test_functions_that_can_be_no_tools_are_refused_with_the_reason(function: Any, why: str):
    with pytest.raises(ValueError, match=why):
        cairn.tool_schema(function)


# All types


PLAIN = st.recursive(
    st.sampled_from(
        [str, int, float, bool, Any, list, dict, Literal["a"], Literal["a", "b"], Literal[1, "a"]]
    ),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),
        inner.map(lambda one: dict[str, one]),
        inner.map(lambda one: Optional[one]),  # noqa: UP045
        st.tuples(inner, inner).map(lambda two: Union[two[0], two[1]]),  # noqa: UP007
    ),
    max_leaves=4,
)
"""The types that transformers describes rightly."""


@given(hint=PLAIN, optional=st.booleans())
@settings(max_examples=200, deadline=None)
def test_types_that_were_told_rightly_are_told_in_the_same_words(hint: Any, optional: bool):
    """So that a run goes on with the same prompts, and data sets that were written with transformers fit."""
    function = tool(hint, default=None) if optional else tool(hint)
    assert json.dumps(cairn.tool_schema(function)) == json.dumps(get_json_schema(function))


BOUNDED = st.sampled_from(
    [
        *(Unit, Level, Point, Way, Tree, Annotated[int, Field(ge=1)], Annotated[str, Field(min_length=2)]),
        *(tuple[int, str], tuple[int, ...], set[str], Annotated[list[int], Field(max_length=2)]),
    ]
)
ANY = st.one_of(
    PLAIN,
    BOUNDED,
    BOUNDED.map(lambda one: list[one]),
    BOUNDED.map(lambda one: Optional[one]),  # noqa: UP045
    BOUNDED.map(lambda one: dict[str, one]),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 9),
        st.sampled_from(
            [0.5, -1.25, "a", "b", "celsius", "", "abc", {"x": 1}, {"name": "n"}, {"title": "t"}]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["a", "x", "y", "name", "children", "points", "title"]), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


def standard(schema: Any) -> Any:
    """With `nullable`, a word of OpenAPI's, as JSON schema says it."""
    if isinstance(schema, list):
        return [standard(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {key: standard(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [whole, {"type": "null"}]} if schema.get("nullable") is True else whole


@pytest.mark.slow
@given(hint=ANY, value=VALUES)
@settings(max_examples=300, deadline=None)
def test_a_call_that_fits_what_is_told_is_accepted(hint: Any, value: Any):
    """Whatever JSON value: what the schema allows reaches the function."""
    function = tool(hint)
    parameters = standard(cairn.tool_schema(function)["function"]["parameters"])
    if jsonschema.Draft202012Validator(parameters).is_valid({"value": value}):
        assert "content" in called(hint, value)


def test_values_of_each_type_fit_what_is_told_of_it():
    """The other way round, for one value of each."""
    for hint, value in (
        (Unit, "celsius"),
        (Level, 2),
        (Point, {"x": 3}),
        (Way, {"title": "a", "points": [{"x": 1}], "unit": "celsius"}),
        (Tree, {"name": "a", "children": [{"name": "b"}]}),
        (tuple[int, str], [1, "a"]),
        (set[str], ["a"]),
        (list[Unit | None], ["celsius", None]),
        (dict[str, Point], {"a": {"x": 1, "y": 2}}),
    ):
        parameters = standard(cairn.tool_schema(tool(hint))["function"]["parameters"])
        jsonschema.Draft202012Validator(parameters).validate({"value": value})
        assert "content" in called(hint, value)
