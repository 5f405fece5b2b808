"""What a request asks for, and which requests are refused.

The loss knows one sampling distribution: the run's. A request that wants another one, or an answer in a form
that would need another one, is refused with its reason unless the settings say that the field be ignored, or
that the form be checked afterwards (`structured`). An error names all reasons to refuse a request at once.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from cairn.config.environment import checked_stop
from cairn.endpoint.structured import ANY_FORM, AnswerFormat, BadForm, form_of

T = TypeVar("T")
MODEL_NAME = "policy"
"""What requests call the model."""
STRUCTURED = ("refuse", "check")
"""What becomes of requests that want an answer in a form: they are refused, or it is checked afterwards."""
HARMLESS = frozenset(
    (
        *("access_programs", "client_metadata", "metadata", "moderation", "safety_identifier", "seed"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier", "store"),
        *("stream_options", "user", "cache_control", "inference_geo"),
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
    "modalities": (["text"],),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "thinking": ({"type": "disabled"},),
    "include": ([], ["reasoning.encrypted_content"]),
    "mcp_servers": ([],),
    "container": ({},),
}
"""Fields that are accepted with these values, which ask for nothing special; None always does."""
REASONS = {
    "n": "each request gets one answer; make several requests",
    "logprobs": "the endpoint returns no logprobs; they are in the run's ledger",
    "top_logprobs": "the endpoint returns no logprobs; they are in the run's ledger",
    "functions": "it is OpenAI's earlier form; send tools",
    "function_call": "it is OpenAI's earlier form; send tools and tool_choice",
    "previous_response_id": "the endpoint keeps no conversations; send all items as input",
    "conversation": "the endpoint keeps no conversations; send all items as input",
    "thinking": "whether the model reasons is decided by its chat template and its training",
    "reasoning": "whether the model reasons is decided by its chat template and its training",
    "mcp_servers": "the endpoint calls no servers; give the model tools that the agent calls",
}
"""Why a field is refused, where it is not about the distribution."""
DISTRIBUTION = "training needs answers from the run's own distribution"
NO_GRAMMAR = (
    f"{DISTRIBUTION}, which no grammar has masked; with structured = 'check' "
    "(orchestrator.environment.args.structured) the model answers freely, and answers of another form are "
    "counted"
)
"""Why a field is refused that wants an answer in a form."""


class UnanswerableRequest(Exception):
    """A request that can't be answered; the arguments are the fields of an error of OpenAI's API.

    status: of HTTP. param: the field that is to blame, if one is. code: for programs. ignorable: whether the
    settings may have the field ignored, which the message then says.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        *,
        ignorable: bool = False,
    ):
        super().__init__(f"{message}; {_hint([param])}" if ignorable else message)
        self.reason, self.status, self.param, self.code = message, status, param, code
        self.ignorable = ignorable

    @classmethod
    def together(cls, refusals: "Sequence[UnanswerableRequest]") -> "UnanswerableRequest":
        """One error for all that is wrong with a request."""
        if len(refusals) == 1:
            return refusals[0]
        reasons = [f"({number}) {one.reason}" for number, one in enumerate(refusals, 1)]
        names = [one.param for one in refusals if one.ignorable]
        statuses = {one.status for one in refusals}
        return cls(
            "; ".join((*reasons, *([_hint(names)] if names else []))),
            statuses.pop() if len(statuses) == 1 else 400,
            refusals[0].param,
            refusals[0].code,
        )

    @property
    def body(self) -> dict[str, Any]:
        """What OpenAI's clients are sent."""
        kind = {401: "authentication_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _hint(names: Sequence[str | None]) -> str:
    """What helps against refusals of these fields."""
    listed = ", ".join(map(str, names))
    quoted = ", ".join(map(repr, names))
    return f"leave {listed} out, or add {quoted} to ignore (orchestrator.environment.args.ignore)"


@dataclass(frozen=True)
class Asked:
    """One request for an answer, in the form that `Model.generate` takes.

    tools: schemas; None if the model shall call none. max_tokens: None if the request sets no maximum. stop:
    texts that end the answer. form: that the answer is wanted in, and is checked for.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    form: AnswerFormat = ANY_FORM


class Fields:
    """The fields of one request that are to be heeded, and all reasons so far to refuse it."""

    def __init__(self, values: Mapping[str, Any], refusals: Sequence[UnanswerableRequest]):
        self._values = values
        self._refusals = [*refusals]

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value."""
        return self._values.get(name, default)

    def read(self, what: Callable[[], T], default: T) -> T:
        """What `what()` returns; if it refuses the request, that is noted, and the default returned."""
        try:
            return what()
        except UnanswerableRequest as refused:
            self._refusals.append(refused)
            return default

    def flag(self, name: str) -> bool:
        """The value of a field that is true or false; false if it is missing, or noted as wrong."""
        value = self.get(name, False)
        if isinstance(value, bool):
            return value
        self._refusals.append(
            UnanswerableRequest(f"{name} = {shown(value)}: it must be true or false", param=name)
        )
        return False

    def positive(self, *names: str) -> int | None:
        """The smallest of these maxima that the request sets; one that is no maximum is noted."""
        given = {name: self.get(name) for name in names if self.get(name) is not None}
        right: list[int] = []
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                why = f"{name} = {shown(value)}: it must be a whole number from 1 on"
                self._refusals.append(UnanswerableRequest(why, param=name))
            else:
                right.append(value)
        return min(right, default=None)

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """The texts that end the answer."""
        try:
            return checked_stop(self.get(name) or [], name)
        except ValueError as error:
            self._refusals.append(UnanswerableRequest(str(error), param=name))
            return ()

    def stop_tokens(self) -> tuple[int, ...]:
        """Further tokens that end the answer."""
        ids = self.get("stop_token_ids", [])
        if isinstance(ids, list) and all(type(one) is int and 0 <= one < 2**31 for one in ids):
            return tuple(ids)
        why = f"stop_token_ids = {shown(ids)}: they must be token ids"
        self._refusals.append(UnanswerableRequest(why, param="stop_token_ids"))
        return ()

    def checked(self, asked: Asked) -> Asked:
        """The request, if nothing about it is refused.

        Raises:
            UnanswerableRequest: something is; the message names all of it.
        """
        if self._refusals:
            raise UnanswerableRequest.together(self._refusals)
        return asked


@dataclass(frozen=True)
class Rules:
    """Which requests are answered.

    temperature: the run's. calls_are_read: whether the run has a parser of tool calls. ignore: names of
    fields that are ignored whatever they say. structured: one of `STRUCTURED`.
    """

    temperature: float
    calls_are_read: bool = True
    ignore: Collection[str] = field(default=frozenset[str]())
    structured: str = "refuse"

    def wanted(self, body: Any, known: Collection[str]) -> Fields:
        """The request's fields that are to be heeded.

        Args:
            body: the decoded request.
            known: the fields that the caller heeds itself; all others must be neutral.

        Raises:
            UnanswerableRequest: the body is no object.
        """
        if not isinstance(body, dict):
            raise UnanswerableRequest("the body must be a JSON object")
        values = {
            name: value for name, value in body.items() if value is not None and name not in self.ignore
        }
        found = [self._wrong(name, value, known) for name, value in values.items()]
        return Fields(values, [one for one in found if one is not None])

    def _wrong(self, name: str, value: Any, known: Collection[str]) -> UnanswerableRequest | None:
        """Why a field can't have this value."""
        if name == "model":
            if value == MODEL_NAME:
                return None
            why = f"model = {shown(value)}: the only model here is {MODEL_NAME!r}"
            return UnanswerableRequest(why, 404, name, "model_not_found", ignorable=True)
        if name in HARMLESS or name in known:
            return None
        why = REASONS.get(name, DISTRIBUTION if name in NEUTRAL else "the endpoint does not know this field")
        if name == "temperature":
            if _is_number(value) and math.isclose(value, self.temperature, rel_tol=1e-6):
                return None
            why = f"{DISTRIBUTION}: its temperature is {self.temperature:g}"
        elif name in NEUTRAL and any(value == one and _same_kind(value, one) for one in NEUTRAL[name]):
            return None
        return UnanswerableRequest(
            f"{name} = {shown(value)}: {why}", 400, name, "unsupported_value", ignorable=True
        )

    def form(
        self, tools: Sequence[Mapping[str, Any]] | None, choice: Any, *, parallel: Any, text: Any, name: str
    ) -> AnswerFormat:
        """The form that the answer is wanted in.

        Args:
            tools: those that the model may call.
            choice: `tool_choice`, in the form of any of the APIs.
            parallel: `parallel_tool_calls`.
            text: `response_format`, or what is that in another API, whose field is called `name`.

        Raises:
            UnanswerableRequest: it is malformed, or wants a form, which these rules refuse.
        """
        asked = {"tool_choice": choice, "parallel_tool_calls": parallel, name: text}

        def refuse(field: str, why: str) -> NoReturn:
            message = f"{field} = {shown(asked.get(field))}: {why}"
            raise UnanswerableRequest(message, 400, field, "unsupported_value", ignorable=field in asked)

        try:
            form = form_of(tools, choice, parallel=parallel, text=text, name=name)
        except BadForm as error:
            refuse(error.field, str(error))
        if self.structured == "refuse" and form.restricted is not None:
            refuse(name if form.restricted == "text" else form.restricted, NO_GRAMMAR)
        return form

    def tools(self, tools: Any, choice: Any) -> list[dict[str, Any]] | None:
        """The schemas that the model is shown.

        Args:
            choice: `tool_choice`; with "none" the model is shown no tools.

        Raises:
            UnanswerableRequest: the schemas are malformed, or nothing reads the calls.
        """
        if not tools:
            return None
        if not isinstance(tools, list) or not all(_is_schema(one) for one in tools):
            raise UnanswerableRequest(
                'tools must be a list of {"type": "function", "function": {"name": ..., ...}}, and is '
                f"{shown(tools)}",
                param="tools",
            )
        if choice in ("none", {"type": "none"}):
            return None
        if not self.calls_are_read:
            raise UnanswerableRequest(
                "the model can be given no tools: nothing reads its calls; set orchestrator.tool_parser to "
                "the parser of vLLM that fits the model, such as hermes",
                param="tools",
            )
        return tools


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
    needed = {"messages", "input", "system", "stream", "tools"} & set(names)
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


# Reads a request's body: JSON of a depth and with texts that everything behind it can work with.


DEEPEST = 100
"""Lists and objects in each other: templates, schemas and JSON are walked by functions that recurse."""


def read_body(content: bytes) -> Any:
    """The decoded body.

    Raises:
        UnanswerableRequest: it is no JSON, too deep, or has a number or text that JSON can't carry on.
    """
    try:
        body = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise UnanswerableRequest(f"the body is not JSON: {error}") from None
    check_values(body)
    return body


def check_values(body: Any) -> None:
    """Check a decoded body without calling itself.

    Raises:
        UnanswerableRequest: it is too deep, or has a number that is not finite or half of a surrogate pair.
    """
    left: list[tuple[Any, str, int]] = [(body, "", 0)]
    while left:
        value, where, depth = left.pop()
        if isinstance(value, str):
            _check_text(value, where)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise UnanswerableRequest(
                    f"{where or 'the body'} is a number that is not finite", param=where or None
                )
        elif isinstance(value, dict | list):
            if depth == DEEPEST:
                raise _too_deep()
            if isinstance(value, dict):
                for name in value:
                    _check_text(name, f"a name in {where or 'the body'}")
                left += [
                    (one, f"{where}.{name}" if where else name, depth + 1) for name, one in value.items()
                ]
            else:
                left += [(one, f"{where}[{number}]", depth + 1) for number, one in enumerate(value)]


def _check_text(text: str, where: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{where or 'the body'} has half of a surrogate pair at character {error.start}"
        hint = "it is no text; send whole characters, or leave it out"
        raise UnanswerableRequest(
            f"{what} (\\u{ord(text[error.start]):04x}): {hint}", param=where or None
        ) from None


def _too_deep() -> UnanswerableRequest:
    return UnanswerableRequest(
        f"the body has more than {DEEPEST} lists and objects in each other; send a flatter one"
    )
