"""The process of an environment that has an interpreter and packages of its own.

    python worker.py

Speaks JSON, one object a line: requests on the standard input, answers on what was the standard output. What
the environment prints goes to the standard error, which is the orchestrator's log. The first line says which
environment to make: `name` (module:Class), `args`, `threads`. It is answered by what the environment is, or
by `error`. The process ends when its standard input does: with the process that started it.

Only the standard library is imported here. The interpreter's packages are the
environment's.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import threading
import traceback
import typing
from concurrent.futures import ThreadPoolExecutor
from types import NoneType, SimpleNamespace, UnionType

KINDS = {str: "str", int: "int", float: "float", bool: "bool", NoneType: "None", typing.Any: "Any"}
"""Types of tools' arguments without arguments of their own, and what the orchestrator calls them."""
CONTAINERS = {list: "list", dict: "dict", tuple: "tuple", set: "set"}
OPTIONAL = ("messages", "snapshot", "restore")
"""Methods that an environment with `start` and `step` need not have; `close` is asked in any case."""

MOST_KINDS = 1000
"""Exceptions that are printed; further kinds are only reported."""


class EnvironmentWorker:
    """Answers the orchestrator's requests with the methods of one environment.

    Args:
        environment: it has `messages` and `reward`, also with `tools`; or `messages` and `rewards`; or
            `start` and `step`; or `rollout`.
        threads: functions that run at the same time.
    """

    def __init__(self, environment, threads, send):
        self.environment = environment
        self.threads = ThreadPoolExecutor(threads, "environment")
        self.send = send
        self.tasks = {}
        """The work on each request, by its number."""
        self.waiting = {}
        """For the number of a call that a rollout makes, where its answer goes."""
        self.asked = 0
        self.worlds = Worlds(environment, self.awaited)
        self.raised = set()
        """The exceptions that were printed: each by its kind and the places in the code that led to it."""

    def handle(self, message):
        """Act on a line of the orchestrator's."""
        kind, number = message["type"], message["number"]
        if kind == "cancel":
            if task := self.tasks.get(number):
                task.cancel()
        elif kind == "answer":
            future = self.waiting.pop(message["call"], None)
            if future is None or future.done():
                return
            if "error" in message:
                future.set_exception(_error(message))
            else:
                future.set_result(message["result"])
        else:
            self.tasks[number] = asyncio.ensure_future(self.answer(number, self.work(message)))

    def work(self, message):
        """A coroutine that does what a request asks for."""
        if message["type"] == "call":
            return self.call(message["method"], message["arguments"])
        if message["type"] == "tool":
            return self.tool(message["name"], message["arguments"])
        if message["type"] == "world":
            return self.worlds.do(message["do"], message["world"], message["arguments"])
        return self.rollout(message["number"], message["problem"], message["seed"])

    async def answer(self, number, work):
        """Send what the work comes to."""
        try:
            found = {"result": await work}
            json.dumps(found)
        except asyncio.CancelledError:
            found = {"error": "it was cancelled"}
        except BaseException as error:
            self.told(error)
            found = {"error": f"{type(error).__name__}: {error}"}
        self.tasks.pop(number, None)
        self.send({"type": "result", "number": number, **found})

    def told(self, error):
        """Print an exception with its traceback the first time; the orchestrator counts further ones."""
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        kind = (type(error).__name__, *places)
        if kind not in self.raised and len(self.raised) < MOST_KINDS:
            self.raised.add(kind)
            traceback.print_exception(type(error), error, error.__traceback__)

    async def call(self, method, arguments):
        """The result of one of the environment's methods."""
        found = await self.awaited(getattr(self.environment, method), *arguments)
        return results_of(found) if method == "rewards" else result_of(found)

    async def tool(self, name, arguments):
        """What a tool returns, as the text that the model reads; or the name and text of its exception."""
        (function,) = (tool for tool in self.environment.tools if tool.__name__ == name)
        try:
            found = await self.awaited(functools.partial(function, **arguments))
        except Exception as error:
            if type(error).__name__ == "EnvironmentFailed":  # not the model's fault; whoever's class it is
                raise
            return {"error": str(error), "kind": type(error).__name__}
        found = plain(found)
        return {
            "value": found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        }

    async def awaited(self, function, *arguments):
        """The result of a function, called on a thread, or of the coroutine that it returns."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        job = self.threads.submit(_outcome, function, *arguments)
        ended = asyncio.wrap_future(job)
        try:
            outcome = await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not job.cancel():  # a thread can't be stopped: the cancellation is answered once it has ended
                await asyncio.wait([ended])
            raise
        if "error" in outcome:
            raise outcome["error"]
        found = outcome["value"]
        return await found if inspect.isawaitable(found) else found

    async def rollout(self, number, problem, seed):
        """The reward of a program that works on a problem."""
        return result_of(await self.environment.rollout(problem, WorkerModel(self, number, seed)))

    async def ask(self, number, kind, **what):
        """The orchestrator's answer to a call of a rollout."""
        call, self.asked = self.asked, self.asked + 1
        self.waiting[call] = future = asyncio.get_running_loop().create_future()
        self.send({"type": kind, "number": number, "call": call, **what})
        try:
            return await future
        finally:
            self.waiting.pop(call, None)


class WorkerModel:
    """What a rollout asks: the `Model` of `cairn.orchestrator.environments`, in this process."""

    def __init__(self, worker, number, seed):
        self._worker, self._number, self.seed = worker, number, seed

    async def generate(self, messages, *, tools=None, max_tokens=None, stop_token_ids=(), stop=()):
        """Have the model answer the conversation."""
        found = await self._worker.ask(
            self._number,
            "generate",
            messages=list(messages),
            tools=tools if tools is None else list(tools),
            max_tokens=max_tokens,
            stop_token_ids=list(stop_token_ids),
            stop=stop if isinstance(stop, str) else list(stop),
        )
        return SimpleNamespace(**found)

    async def count_tokens(self, messages, *, tools=None):
        """Number of tokens of a conversation."""
        tools = tools if tools is None else list(tools)
        return await self._worker.ask(self._number, "count_tokens", messages=list(messages), tools=tools)

    async def once(self, name, call, *, snapshot=None):
        """The result of `call()`, which is called once however often the rollout is started again."""
        known = await self._worker.ask(self._number, "once", name=name, snapshot=snapshot is not None)
        if known["known"]:
            return known["result"]
        try:
            found = await self._worker.awaited(call)
            try:
                json.dumps(found, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise TypeError(f"the result of {name!r} must be JSON: {error}") from error
            state = None if snapshot is None else encoded(await self._worker.awaited(snapshot))
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self._worker.send({"type": "failed", "number": self._number, "once": known["once"], "error": why})
            raise
        recorded = await self._worker.ask(
            self._number, "record", once=known["once"], result=found, snapshot=state
        )
        return recorded["result"]

    async def each_time(self, call):
        """The result of `call()`, which is not recorded: it is called whenever the rollout comes there."""
        found = await self._worker.awaited(call)
        await self._worker.ask(self._number, "each_time")  # the rollout has come further
        return found

    async def snapshot(self):
        """The rollout's newest snapshot, with `value` and `after`; None before it has come to that call."""
        found = await self._worker.ask(self._number, "snapshot")
        if found is None:
            return None
        return SimpleNamespace(after=found["after"], value=decoded(found["value"]))


class Worlds:
    """Worlds by the numbers that the orchestrator gives them.

    Args:
        awaited: calls a function on a thread, or awaits a coroutine function.
    """

    def __init__(self, environment, awaited):
        self._environment, self._awaited = environment, awaited
        self._open = {}

    async def do(self, name, number, arguments):
        """Call a method of the environment for a world; returns what it returned, as JSON.

        Raises:
            ValueError: it returned something else than it should.
        """
        return await getattr(self, f"_{name}")(number, *arguments)

    async def _start(self, number, problem, seed):
        found = await self._awaited(self._environment.start, problem, seed)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ValueError(
                f"start must return a pair (world, observation), and has returned {found!r:.300}"
            )
        self._open[number] = found[0]
        return plain(found[1])

    async def _restore(self, number, problem, seed, state):
        self._open[number] = await self._awaited(self._environment.restore, problem, seed, decoded(state))

    async def _step(self, number, answer):
        found = await self._awaited(self._environment.step, self._open[number], answer)
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise ValueError(f"step must return (observation, reward, done), and has returned {found!r:.300}")
        observation, reward, done = found
        return [None if done else plain(observation), result_of(reward), plain(done)]

    async def _snapshot(self, number):
        return encoded(await self._awaited(self._environment.snapshot, self._open[number]))

    async def _close(self, number):
        with contextlib.suppress(KeyError):
            world = self._open.pop(number)
            if close := getattr(self._environment, "close", None):
                await self._awaited(close, world)


def _outcome(call, *arguments):
    """What a function returns or raises: asyncio would act on a bare SystemExit or StopIteration."""
    try:
        return {"value": call(*arguments)}
    except Exception as error:
        return {"error": error}
    except BaseException as error:
        return {"error": RuntimeError(f"{type(error).__name__}: {error}")}


def _error(message):
    """The exception of a call of the model's, as far as programs distinguish exceptions."""
    known = {"TypeError": TypeError, "ValueError": ValueError}
    return known.get(message.get("kind"), RuntimeError)(message["error"])


# Values as lines of JSON carry them.


def plain(value):
    """A value as JSON; numbers of numpy and torch are numbers."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, str | int | float):
        return value
    with contextlib.suppress(Exception):
        return value.item()
    return value


def result_of(value):
    """A method's result; of rewards with weights, the parts as the value."""
    if hasattr(value, "parts") and hasattr(value, "weights"):
        return {"value": plain(dict(value.parts)), "weights": plain(dict(value.weights))}
    return {"value": plain(value), "weights": None}


def results_of(values):
    """The results of a method that returns a list of them; of anything else, that as the value."""
    with contextlib.suppress(Exception):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return {"each": [result_of(one) for one in values]}
    return result_of(values)


def encoded(snapshot):
    """A snapshot, which is JSON or bytes."""
    if isinstance(snapshot, bytes | bytearray):
        return {"bytes": base64.b64encode(snapshot).decode()}
    return {"json": snapshot}


def decoded(state):
    """The snapshot that `encoded` was given."""
    return base64.b64decode(state["bytes"]) if "bytes" in state else state["json"]


# What the orchestrator has to know of the environment.


def make(name, args):
    """An environment, and the module that it is from.

    Raises:
        ValueError: there is none of that name.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"{name!r} is not module:Class")
    found = importlib.import_module(module)
    return getattr(found, attribute)(**args), found


def described(environment, module):
    """What the orchestrator has to know of an environment.

    Raises:
        ValueError: it is none.
    """
    problems, identity = len(environment), getattr(environment, "identity", None)
    further = {}
    if identity is None and getattr(module, "__file__", None):
        with open(module.__file__, "rb") as file:
            identity = "code " + hashlib.blake2b(file.read(), digest_size=16).hexdigest()
    if callable(getattr(environment, "rollout", None)):
        if not inspect.iscoroutinefunction(environment.rollout):
            raise ValueError("its rollout is not a coroutine: write async def rollout(self, problem, model)")
        kind = "program"
    elif getattr(environment, "tools", None) is not None:
        _check_methods(environment, "messages", "reward")
        kind, further = "tools", described_tools(environment)
    elif callable(getattr(environment, "rewards", None)):
        _check_methods(environment, "messages", "rewards")
        kind = "groups"
    elif not hasattr(environment, "reward") and callable(getattr(environment, "step", None)):
        _check_methods(environment, "start", "step")
        kind, further = "world", described_world(environment)
    else:
        _check_methods(environment, "messages", "reward")
        kind = "single_turn"
    own = {"identity": None if identity is None else str(identity)}
    return {"kind": kind, "problems": problems, **own, **further}


def _check_methods(environment, *names):
    for name in names:
        if not callable(getattr(environment, name, None)):
            raise ValueError(
                f"it has no method {name}; in its own process it needs messages and reward, with tools or "
                "without, or messages and rewards, or start and step, or rollout"
            )


def described_tools(environment):
    """The tools' names, docstrings and arguments, and whether the reward wants the conversation.

    Raises:
        ValueError: a tool can't be described; the message says why.
    """
    tools = environment.tools
    if not isinstance(tools, list | tuple) or not tools:
        raise ValueError(f"its tools must be a list of functions, and are {tools!r:.300}")
    found = {
        "tools": [described_tool(tool) for tool in tools],
        "rewards_messages": "messages" in inspect.signature(environment.reward).parameters,
    }
    return found | ({"max_turns": environment.max_turns} if hasattr(environment, "max_turns") else {})


def described_tool(tool):
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


def described_world(environment):
    """What the orchestrator has to know of an environment with worlds."""
    found = {"methods": [name for name in OPTIONAL if callable(getattr(environment, name, None))]}
    return found | ({"max_turns": environment.max_turns} if hasattr(environment, "max_turns") else {})


def main():
    """Serve one environment until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints is no answer
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lock = threading.Lock()

    def send(message):
        line = json.dumps(message)
        with lock:
            answers.write(line + "\n")
            answers.flush()

    first = json.loads(requests.readline() or os._exit(0))
    try:
        environment, module = make(first["name"], first["args"])
        about = described(environment, module)
    except BaseException as error:
        traceback.print_exc()
        send({"type": "hello", "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    send({"type": "hello", **about})
    loop = asyncio.new_event_loop()
    worker = EnvironmentWorker(environment, first["threads"], send)

    def read():
        for line in requests:
            loop.call_soon_threadsafe(worker.handle, json.loads(line))
        os._exit(0)  # the process that asks is gone, whatever the environment is at

    threading.Thread(target=read, name="requests", daemon=True).start()
    loop.run_forever()


if __name__ == "__main__":
    main()
