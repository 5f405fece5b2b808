"""What the orchestrator has to know of an environment's tools, which are functions of another process."""

import inspect
import typing
from types import NoneType, UnionType

KINDS = {str: "str", int: "int", float: "float", bool: "bool", NoneType: "None", typing.Any: "Any"}
"""Types without arguments, and what they are called."""
CONTAINERS = {list: "list", dict: "dict", tuple: "tuple", set: "set"}


def described_tools(environment):
    """The tools' names, docstrings and arguments, and whether the reward wants the conversation.

    Raises:
        ValueError: a tool can't be described; the message says why.
    """
    tools = environment.tools
    if not isinstance(tools, list | tuple) or not tools:
        raise ValueError(f"its tools must be a list of functions, and are {tools!r:.300}")
    found = {
        "tools": [described(tool) for tool in tools],
        "rewards_messages": "messages" in inspect.signature(environment.reward).parameters,
    }
    return found | ({"max_turns": environment.max_turns} if hasattr(environment, "max_turns") else {})


def described(tool):
    """One tool.

    Raises:
        ValueError: it can't be described.
    """
    name = getattr(tool, "__name__", repr(tool))
    try:
        hints = typing.get_type_hints(tool)
        parameters = inspect.signature(tool).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise ValueError(f"its tool {name} can't be described: {error}") from error
    arguments = []
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise ValueError(f"its tool {name} can't be described: {one} can't be given by name")
        if one.name not in hints:
            raise ValueError(f"its tool {name} can't be described: argument {one.name} has no type hint")
        try:
            hint = type_of(hints[one.name])
        except ValueError as error:
            raise ValueError(f"its tool {name} can't be described: argument {one.name}: {error}") from None
        arguments.append({"name": one.name, "type": hint, "needed": one.default is one.empty})
    return {"name": name, "doc": inspect.getdoc(tool) or "", "arguments": arguments}


def type_of(hint):
    """A type as JSON: a name, or a name followed by the arguments.

    Raises:
        ValueError: it is of no kind that a model's JSON has.
    """
    if hint in CONTAINERS:
        return [CONTAINERS[hint]]
    with_arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return ["Literal", *with_arguments]
    if origin in (typing.Union, UnionType):
        return ["Union", *map(type_of, with_arguments)]
    if origin in CONTAINERS and Ellipsis not in with_arguments:
        return [CONTAINERS[origin], *map(type_of, with_arguments)]
    try:
        return KINDS[hint]
    except (KeyError, TypeError):
        raise ValueError(
            f"{hint} is no str, int, float, bool, None, list, dict, tuple, set, Literal or a union of them"
        ) from None
