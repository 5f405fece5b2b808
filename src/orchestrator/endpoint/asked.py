"""What a request asks for, and which requests are refused.

The loss knows one sampling distribution: the run's. A request that wants another one, or an answer in a form
that would need another one, is refused with its reason unless the settings say that the field be ignored.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL_NAME = "policy"
"""What requests call the model."""
HARMLESS = frozenset(
    (
        *("access_programs", "client_metadata", "metadata", "moderation", "safety_identifier", "seed"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier", "store"),
        *("stream_options", "user"),
    )
)
"""Fields that change nothing about how an answer is sampled here; `seed` is the run's."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("disabled",),
    "text": ({}, {"format": {"type": "text"}}),
    "reasoning": ({},),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields that are accepted with these values, which ask for nothing special; None always does."""
REASONS = {
    "n": "each request gets one answer; make several requests",
    "stop": "an answer ends where the model ends it, since what is learned are the very tokens that were "
    "sampled; send stop_token_ids",
    "logprobs": "the endpoint returns no logprobs; they are in the run's ledger",
    "top_logprobs": "the endpoint returns no logprobs; they are in the run's ledger",
    "functions": "it is OpenAI's earlier form; send tools",
    "function_call": "it is OpenAI's earlier form; send tools and tool_choice",
    "tool_choice": "the model is free to call a tool or not: only auto and none are possible",
    "previous_response_id": "the endpoint keeps no conversations; send all items as input",
    "conversation": "the endpoint keeps no conversations; send all items as input",
}
"""Why a field is refused, where it is not about the distribution."""
DISTRIBUTION = "training needs answers from the run's own distribution"


class Refused(Exception):
    """A request that can't be answered; the arguments are those of an error of OpenAI's API.

    status: of HTTP. param: the field that is to blame, if one is. code: for programs.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """What the client is sent."""
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """One request for an answer, in the form that `Model.generate` takes.

    tools: schemas; None if the model shall call none. max_tokens: None if the request sets no maximum.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class Rules:
    """Which requests are answered.

    temperature: the run's. calls_are_read: whether the run has a parser of tool calls. ignore: names of
    fields that are ignored whatever they say.
    """

    temperature: float
    calls_are_read: bool = True
    ignore: Collection[str] = field(default=frozenset[str]())

    def wanted(self, body: Any, known: Collection[str]) -> dict[str, Any]:
        """The request's fields that are to be heeded.

        Args:
            body: the decoded request.
            known: the fields that the caller heeds itself; all others must be neutral.

        Raises:
            Refused: the request asks for what the endpoint does not do; the message names field and value.
        """
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        fields = {
            name: value for name, value in body.items() if value is not None and name not in self.ignore
        }
        for name, value in fields.items():
            if name not in HARMLESS and name not in known:
                self._check(name, value)
        if (model := fields.get("model", MODEL_NAME)) != MODEL_NAME:
            raise self._refusal(
                "model", model, f"the only model here is {MODEL_NAME!r}", 404, "model_not_found"
            )
        return fields

    def _check(self, name: str, value: Any) -> None:
        if name == "model":
            return
        if name == "temperature":
            if _is_number(value) and math.isclose(value, self.temperature, rel_tol=1e-6):
                return
            reason = f"{DISTRIBUTION}: its temperature is {self.temperature:g}"
            raise self._refusal(name, value, reason)
        if name in NEUTRAL and any(value == one and _same_kind(value, one) for one in NEUTRAL[name]):
            return
        default = DISTRIBUTION if name in NEUTRAL else "the endpoint does not know this field"
        raise self._refusal(name, value, REASONS.get(name, default))

    def _refusal(
        self, name: str, value: Any, why: str, status: int = 400, code: str = "unsupported_value"
    ) -> Refused:
        hint = f"leave {name} out, or add {name!r} to ignore (orchestrator.environment.args.ignore)"
        return Refused(f"{name} = {shown(value)}: {why}; {hint}", status, name, code)

    def tools(self, tools: Any, choice: Any) -> list[dict[str, Any]] | None:
        """The schemas that the model is shown.

        Args:
            choice: `tool_choice`; with "none" the model is shown no tools.

        Raises:
            Refused: the schemas are malformed, another choice is wanted, or nothing reads the calls.
        """
        if choice not in (None, "auto", "none"):
            raise self._refusal("tool_choice", choice, REASONS["tool_choice"])
        if not tools:
            return None
        if not isinstance(tools, list) or not all(_is_schema(one) for one in tools):
            raise Refused(
                'tools must be a list of {"type": "function", "function": {"name": ..., ...}}, and is '
                f"{shown(tools)}",
                param="tools",
            )
        if choice == "none":
            return None
        if not self.calls_are_read:
            raise Refused(
                "the model can be given no tools: nothing reads its calls; set orchestrator.tool_parser to "
                "the parser of vLLM that fits the model, such as hermes",
                param="tools",
            )
        return tools


def positive(fields: Mapping[str, Any], *names: str) -> int | None:
    """The smallest of these maxima that the request sets.

    Raises:
        Refused: one is no positive whole number.
    """
    given = {name: fields[name] for name in names if name in fields}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"{name} = {shown(value)}: it must be a whole number from 1 on", param=name)
    return min(given.values(), default=None)


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false if the request does not have it.

    Raises:
        Refused: it is something else.
    """
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name} = {shown(value)}: it must be true or false", param=name)
    return value


def shown(value: Any) -> str:
    """The value as a message quotes it."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:100]}..."


def checked_ignore(names: Any) -> frozenset[str]:
    """The setting `ignore`.

    Raises:
        ValueError: it is no list of names, or names what every request needs.
    """
    if not isinstance(names, list | tuple | set | frozenset) or not all(
        isinstance(one, str) for one in names
    ):
        raise ValueError(f"ignore = {names!r}: it must be a list of fields, such as ['temperature']")
    needed = {"messages", "input", "stream", "tools"} & set(names)
    if needed:
        raise ValueError(f"ignore = {sorted(names)}: {min(needed)!r} can't be ignored")
    return frozenset(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_kind(value: Any, other: Any) -> bool:
    """Tells True from 1."""
    return isinstance(value, bool) == isinstance(other, bool)


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])
