"""The process of an environment that has an interpreter and packages of its own.

    python worker.py

Speaks JSON, one object a line: requests on the standard input, answers on what was the standard output. What
the environment prints goes to the standard error, which is the orchestrator's log. The first line says which
environment to make: `name` (module:Class), `args`, `threads`. It is answered by what the environment is, or
by `error`. The process ends when its standard input does: with the process that started it.

Only the standard library and the files beside this one are imported here. The interpreter's packages are the
environment's.
"""

import asyncio
import functools
import hashlib
import importlib
import inspect
import json
import os
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from worker_tools import described_tools
from worker_values import plain, result_of, results_of, state_of, value_of
from worker_worlds import Worlds, described_world


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

    def handle(self, message):
        """Act on a line of the orchestrator's."""
        kind, number = message["type"], message["number"]
        if kind == "call":
            work = self.answer(number, self.call(message["method"], message["arguments"]))
            self.tasks[number] = asyncio.ensure_future(work)
        elif kind == "tool":
            work = self.answer(number, self.tool(message["name"], message["arguments"]))
            self.tasks[number] = asyncio.ensure_future(work)
        elif kind == "world":
            work = self.answer(number, self.worlds.do(message["do"], message["world"], message["arguments"]))
            self.tasks[number] = asyncio.ensure_future(work)
        elif kind == "rollout":
            work = self.answer(number, self.rollout(number, message["problem"], message["seed"]))
            self.tasks[number] = asyncio.ensure_future(work)
        elif kind == "cancel":
            if task := self.tasks.get(number):
                task.cancel()
        elif kind == "answer" and (future := self.waiting.pop(message["call"], None)) and not future.done():
            if "error" in message:
                future.set_exception(_error(message))
            else:
                future.set_result(message["result"])

    async def answer(self, number, work):
        """Send what the work comes to."""
        try:
            found = {"result": await work}
            json.dumps(found)
        except asyncio.CancelledError:
            found = {"error": "it was cancelled"}
        except BaseException as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        self.tasks.pop(number, None)
        self.send({"type": "result", "number": number, **found})

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
            if not job.cancel():  # a thread can't be stopped: who cancelled hears of it once it has ended
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
    """What a rollout asks; see `WorkerModel` in `cairn.orchestrator.environments`."""

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
            state = None if snapshot is None else state_of(await self._worker.awaited(snapshot))
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
        return SimpleNamespace(after=found["after"], value=value_of(found["value"]))


def _outcome(call, *arguments):
    """What a function returns or raises: asyncio would act on a bare SystemExit or StopIteration."""
    try:
        return {"value": call(*arguments)}
    except Exception as error:
        return {"error": error}
    except BaseException as error:
        return {"error": RuntimeError(f"{type(error).__name__}: {error}")}


def _error(message):
    """The exception of a call of the model's, as far as programs tell exceptions apart."""
    known = {"TypeError": TypeError, "ValueError": ValueError}
    return known.get(message.get("kind"), RuntimeError)(message["error"])


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
