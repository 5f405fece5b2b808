"""Tasks of the library verifiers (v1) as an environment; runs in a process that has the library."""

# The library is in the process's own environment.
# pyright: reportMissingImports=false

import functools
import hashlib
import inspect
import itertools
import sys
from importlib.metadata import version
from types import SimpleNamespace

import verifiers.v1 as vf
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import ModelCall
from verifiers.v1.types import Usage

NOT_HERE = (
    "only tasks of one question and one answer whose score needs no runtime can be used so. "
    "Run the others as an agent of its own"
)


class Tasks:
    """A taskset's tasks: one question, one answer, and the task's own score.

    Args:
        taskset: its id.
        config: its settings.
        problems: number of tasks; None takes all.

    Raises:
        ValueError: there is no such taskset, or its tasks need more than a question and an answer.
    """

    def __init__(self, taskset, config, problems):
        try:
            settings = vf.taskset_config_type(taskset).model_validate({**config, "id": taskset})
            tasks = vf.load_taskset(settings)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"taskset = {taskset!r}: {error} Name its package in packages, or set PYTHONPATH"
            ) from error
        if not tasks.bounded and problems is None:
            raise ValueError(f"taskset = {taskset!r} never ends: say with problems how many tasks to use")
        if type(tasks).toolsets(settings):
            raise ValueError(f"taskset = {taskset!r} has tools; {NOT_HERE}")
        self.tasks = list(itertools.islice(tasks, problems))
        if problems is not None and len(self.tasks) < problems:
            raise ValueError(f"problems = {problems}: the taskset {taskset!r} has {len(self.tasks)} tasks")
        digest = hashlib.blake2b(_source(type(tasks)), digest_size=16)
        for task in self.tasks:
            if wrong := wrong_with(task):
                raise ValueError(f"taskset = {taskset!r}, task {task.data.idx}: {wrong}; {NOT_HERE}")
            digest.update(f"{task.key} {task.hash} ".encode())
        digest.update(settings.model_dump_json().encode())
        self.identity = f"verifiers {version('verifiers')} {taskset} {digest.hexdigest()}"

    def __len__(self):
        return len(self.tasks)

    async def rollout(self, problem, model):
        """Ask, and have the task score the answer, once."""
        task = self.tasks[problem]
        prompt = messages_of(task)
        reply = await model.generate([message.model_dump(exclude_none=True) for message in prompt])
        score = await model.once("score", functools.partial(self.score, task, prompt, reply))
        return SimpleNamespace(**score)

    async def score(self, task, prompt, reply):
        """The task's rewards and metrics as parts, and their weights.

        Raises:
            ValueError: a reward or metric has the name of another, or gave nothing.
        """
        agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=about, agent=agent)
        message = vf.AssistantMessage(
            content=reply.message["content"], reasoning_content=reply.message.get("reasoning_content")
        )
        usage = Usage(prompt_tokens=reply.prompt_tokens, completion_tokens=len(reply.token_ids))
        response = vf.Response(
            id="", created=0, model="policy", message=message, finish_reason=reply.finish_reason, usage=usage
        )
        node = prepare_turn(trace, prompt).commit(response)
        trace.calls.append(
            ModelCall(node=node, model="policy", finish_reason=reply.finish_reason, usage=usage)
        )
        await task.score(trace)
        if trace.errors:
            raise ValueError(f"the task could not be scored: {trace.last_error}")
        if missing := [name for name, one in trace.rewards.items() if one is None]:
            raise ValueError(f"the reward {missing[0]} gave nothing")
        if both := sorted(trace.rewards.keys() & trace.metrics.keys()):
            raise ValueError(f"a reward and a metric have the same name, {both[0]}")
        parts = {name: one.score for name, one in trace.rewards.items()}
        weights = {name: one.weight for name, one in trace.rewards.items()}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"parts": parts | metrics, "weights": weights | dict.fromkeys(metrics, 0.0)}


def messages_of(task):
    """The conversation that a task begins with."""
    prompt = task.data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
    system = task.data.system_prompt
    return [vf.SystemMessage(content=system), *messages] if system is not None else messages


def wrong_with(task):
    """Why a task can't be worked on with a question and an answer, in words; None if it can."""
    kind = type(task)
    if task.data.prompt is None:
        return "it has no prompt: a simulated user begins the conversation"
    if kind.NEEDS_CONTAINER or task.data.image is not None:
        return "it needs a container"
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            return f"its {hook} needs a runtime"
    if kind.toolsets(task.config):
        return "it has tools"
    judges = task.plugged_judges()
    scores = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in judges)]
    if not task.hooks("reward") and not judges:
        return "it has no reward"
    for score in scores:
        runtime = inspect.signature(score).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            return f"its {getattr(score, '__name__', 'judge')} needs a runtime"
    return None


def _source(cls):
    """The code of the module that has a class."""
    try:
        return inspect.getsource(sys.modules[cls.__module__]).encode()
    except (OSError, TypeError):
        return b""
