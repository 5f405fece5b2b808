"""Answers that a request wants in a form: with any call, with a call of one function, or as JSON of a schema.

Servers keep to such a form by masking what would leave it, in which case the samples come from another
distribution than the loss computes. Here the model answers freely, and its answer is checked afterwards.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FREE = (None, "auto", {"type": "auto"}, "none", {"type": "none"})
"""Values of `tool_choice` that restrict no answer; with "none", the model is shown no tools."""
ANY_CALL = ("required", "any", {"type": "required"}, {"type": "any"})
"""Those that want a call."""
MESSAGE = 200
"""Characters of what a schema says about an answer that an error quotes."""


class BadForm(ValueError):
    """A field says nothing that can be checked; `field` is the one."""

    def __init__(self, field: str, why: str):
        super().__init__(why)
        self.field = field


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer shall be.

    call: it has a call. function: the only one that it calls. parallel: it may have several calls. is_json:
    its content, if it has no call, is JSON: of `schema`, or an object.
    """

    call: bool = False
    function: str | None = None
    parallel: bool = True
    is_json: bool = False
    schema: Any = None

    @property
    def restricted(self) -> str | None:
        """What restricts the answer: tool_choice, parallel_tool_calls or text; None if nothing does."""
        if self.call:
            return "tool_choice"
        return "text" if self.is_json else None if self.parallel else "parallel_tool_calls"

    def misfit(self, message: Mapping[str, Any]) -> str | None:
        """Why an answer does not have the form; None if it has."""
        calls = message.get("tool_calls") or []
        names = [call["function"]["name"] for call in calls]
        if self.call and not calls:
            return "it was to call a tool and calls none"
        if self.function is not None and (other := [name for name in names if name != self.function]):
            return f"it was to call {self.function} and calls {other[0]}"
        if not self.parallel and len(calls) > 1:
            return f"it was to make one call at a time and makes {len(calls)}"
        if self.is_json and not calls:
            return self._no_json(message.get("content") or "")
        return None

    def _no_json(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return "its content was to be JSON and is not"
        if self.schema is None:
            return (
                None
                if isinstance(value, dict)
                else "its content was to be a JSON object and is another value"
            )
        try:
            error = next(_validator(self.schema).iter_errors(value), None)
        except Exception as error:  # whatever a schema leads to, such as references in a circle or elsewhere
            return f"its schema can't be followed: {str(error)[:MESSAGE]}"
        return None if error is None else f"its content does not fit the schema: {error.message[:MESSAGE]}"


ANY_FORM = AnswerFormat()


def form_of(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, parallel: Any, text: Any, name: str
) -> AnswerFormat:
    """The form that a request wants its answer in.

    Args:
        tools: what the model may call.
        choice: as `tool_choice` of OpenAI's APIs, or of Anthropic's.
        parallel: as `parallel_tool_calls`.
        text: as `response_format`, or the format of responses or messages; the field is called `name`.

    Raises:
        BadForm: a value is malformed, or there is nothing that it could mean.
    """
    if parallel not in (None, True, False) or (isinstance(parallel, int) and not isinstance(parallel, bool)):
        raise BadForm("parallel_tool_calls", "it must be true or false")
    if isinstance(choice, dict) and "disable_parallel_tool_use" in choice:  # of Anthropic's
        choice = dict(choice)
        parallel = not choice.pop("disable_parallel_tool_use")
    call, function = _called(choice)
    names = [tool["function"]["name"] for tool in tools or ()]
    if call and not names:
        raise BadForm("tool_choice", "the request has no tools that could be called")
    if function is not None and function not in names:
        raise BadForm("tool_choice", f"the request has no such tool, only {', '.join(names)}")
    is_json, schema = _json_wanted(text, name)
    return AnswerFormat(call, function, parallel is not False, is_json, schema)


def _called(choice: Any) -> tuple[bool, str | None]:
    """Whether an answer must have a call, and of which function."""
    if choice in FREE:
        return False, None
    if choice in ANY_CALL:
        return True, None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        raise BadForm("tool_choice", "send only the tools that may be called, and tool_choice = 'auto'")
    if kind in ("function", "tool"):
        inner = choice.get("function", choice)
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            return True, inner["name"]
    raise BadForm("tool_choice", "it must be auto, none, required, or name a function")


def _json_wanted(text: Any, name: str) -> tuple[bool, Any]:
    """Whether the answer is to be JSON, and of which schema."""
    kind = text.get("type") if isinstance(text, dict) else None
    if text is None or text == {} or kind == "text":
        return False, None
    if kind == "json_object":
        return True, None
    if kind != "json_schema":
        raise BadForm(name, "its type must be text, json_object or json_schema")
    inner = text.get("json_schema", text)
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise BadForm(name, "it has no schema, which must be a JSON object")
    try:
        _validator(schema)
    except Exception as error:
        raise BadForm(
            name, f"its schema is none: {getattr(error, 'message', str(error))[:MESSAGE]}"
        ) from None
    return True, schema


def _validator(schema: Any) -> Any:
    """What checks values against a schema; nothing that it refers to is fetched from anywhere.

    Raises:
        jsonschema.SchemaError: it is none.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())
