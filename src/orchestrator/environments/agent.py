"""The environment `agent`: a program in any language works on each problem, and knows only a URL."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shutil
import stat
import sys
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from cairn.config.orchestrator import OrchestratorConfig
from cairn.endpoint.asked import MODEL_NAME, STRUCTURED, Rules, checked_ignore
from cairn.orchestrator.environments.agent_process import Ended, inherited, log_of_agents, run_agent
from cairn.orchestrator.environments.calls import shortened, wrong_with_methods
from cairn.orchestrator.environments.data_set import ProblemSource
from cairn.orchestrator.environments.program import Model, Programs
from cairn.orchestrator.environments.protocol import (
    EnvironmentFailed,
    Rewards,
    Unscored,
    says_nothing,
    to_json,
)
from cairn.run.data_sets import content_digest, load_records
from cairn.run.extensions import code_of, load

SETTING = "orchestrator.environment.args.reward"
PLACEHOLDERS = ("{problem}", "{folder}", "{base_url}", "{model}", "{python}")
"""What stands in a command for a value of the rollout."""
MISFITS = "misfits"
"""Names the part of the reward that counts answers without the form that was asked for."""
LARGEST_REWARD_FILE = 1 << 20
"""Bytes."""


def exit_code(exit_code: int) -> float:
    """1.0 if the agent ended with exit code 0; else 0.0."""
    return float(exit_code == 0)


def file(folder: Path) -> Any:
    """What the agent wrote to the file CAIRN_REWARD: a number, or several by name, as JSON."""
    try:
        # A pipe that nobody writes to would block the thread for good.
        descriptor = os.open(folder / "reward.json", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise EnvironmentFailed("CAIRN_REWARD, which the agent made, is no regular file")
            return json.loads(opened.read(LARGEST_REWARD_FILE))
    except FileNotFoundError:
        raise EnvironmentFailed("the agent has not written its reward to the file CAIRN_REWARD") from None
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(
            f"the file CAIRN_REWARD that the agent wrote can't be read: {error}"
        ) from None


BUILT_IN: dict[str, Callable[..., Any]] = {"exit_code": exit_code, "file": file}
OFFERED = ("problem", "messages", "exit_code", "folder", "output")
"""What a reward function may ask for by name."""


class Agent:
    """Each record of a data set is a problem, on which an agent works in a process of its own.

    Args:
        command: the agent's program and its arguments, in which {problem}, {folder}, {base_url}, {model} and
            {python} stand for values. Files are looked for in the folder that the run was started in.
        data: as of the environment dataset: a file, a folder, or a name on the hub.
        reward: exit_code; file, which the agent writes; or module:function, which is called with the
            arguments that it has of problem (the record), messages, exit_code, folder and output.
        split: of the data set, or a slice of it such as train[:1000].
        csv_numbers: columns of CSV files that are numbers, or true and false; all others are text.
        exit_codes: with which an agent has done its work; any other end is a failure. Default: 0, and for
            reward = exit_code all.
        time_limit: seconds that an agent may take, without those in which it waits for the model.
        ignore: fields of requests to ignore, such as temperature, which would be refused otherwise.
        structured: what becomes of requests that want an answer in a form (tool_choice, response_format):
            refuse, or check: the model answers freely, and answers of another form are counted.
        env: further environment variables.
        inherit: names of variables to pass on from the run's own environment.

    Raises:
        BadRecord: the data set can't be read.
        ValueError: an argument is wrong.
        BadExtension: the function can't be imported.
    """

    def __init__(
        self,
        command: Sequence[str],
        data: str,
        reward: str = "exit_code",
        *,
        split: str = "train",
        csv_numbers: Sequence[str] = (),
        exit_codes: Sequence[int] | None = None,
        time_limit: float | None = None,
        ignore: Sequence[str] = (),
        structured: str = "refuse",
        env: Mapping[str, str] | None = None,
        inherit: Sequence[str] = (),
    ):
        if (
            not isinstance(command, list | tuple)
            or not command
            or not all(isinstance(c, str) for c in command)
        ):
            raise ValueError(f"command = {command!r}: it must be a list of texts, the first a program's name")
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit = {time_limit}: it must be more than 0 seconds")
        self.agent_command = [
            # unlike Path.is_file, isfile takes a script of any length: it is no file
            str(Path(part).absolute()) if os.path.isfile(part) else part
            for part in command
        ]
        self._records = load_records(ProblemSource(data, split, csv_numbers))
        self._fields: dict[str, None] = dict.fromkeys(self._records.columns)
        self.reward: Callable[..., Any] = load(reward, BUILT_IN, SETTING, "function")
        self.reward_names = _names_wanted(reward, self.reward)
        self.exit_codes = exit_codes if exit_codes is not None else None if reward == "exit_code" else [0]
        self.time_limit = time_limit
        self.ignore = checked_ignore(ignore)
        if structured not in STRUCTURED:
            raise ValueError(f"structured = {structured!r}: it must be one of {', '.join(STRUCTURED)}")
        self.structured = structured
        self.variables = inherited(inherit) | {str(name): str(value) for name, value in (env or {}).items()}
        about = [content_digest(self._records), reward, code_of(reward) or ""]
        self.identity = " ".join(about)
        """Changes with the records and the reward's code."""

    def __len__(self) -> int:
        return len(self._records)

    def record(self, problem: int) -> dict[str, Any]:
        """What the agent is asked; a column that the record lacks is None."""
        return {**self._fields, **self._records.read([problem])[0]}


def _names_wanted(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Which of `OFFERED` a reward function asks for.

    Raises:
        ValueError: it needs something else.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reward {name!r} has no signature: {error}") from None
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in several]
    if missing := [one for one in needed if one not in OFFERED]:
        raise ValueError(f"the reward {name!r} needs {', '.join(missing)}; there are {', '.join(OFFERED)}")
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return OFFERED
    return tuple(one.name for one in parameters if one.name in OFFERED)


class AgentPrograms(Programs):
    """Runs an agent for each rollout, and answers its requests."""

    _cleared: ClassVar[set[Path]] = set()
    """Folders of runs that this process has cleared of what earlier processes left there."""
    _clearing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, environment: Any, config: OrchestratorConfig):
        super().__init__(environment, config)
        from cairn.endpoint.server import Endpoint  # imports aiohttp, which only who trains agents needs

        self._endpoint = Endpoint()
        self._rules = Rules(
            config.sampling.temperature,
            config.tool_parser is not None,
            environment.ignore,
            environment.structured,
        )
        run = config.run_directory()
        self._folder = run.path / "agents"
        self._log_file = run.logs / "agents.log"
        self._ended = set[str]()
        """Names of the folders in which an agent has done its work and whose rollout is not over."""

    @staticmethod
    def wrong_with(environment: Any) -> str | None:
        return wrong_with_methods(environment, {"record": ("problem",)})

    async def lacks(self) -> str | None:
        program, path = self.environment.agent_command[0], self.environment.variables.get("PATH")
        if program in PLACEHOLDERS or shutil.which(program, path=path):
            return None
        if Path(program).is_file():
            return f"args.command begins with {program!r}, which is not executable: chmod +x {program}"
        return f"args.command begins with {program!r}, and there is no such program on the PATH"

    async def shown(self, problem: int) -> Any:
        return await self.calls.call(self.environment.record, f"record({problem})", problem)

    def start(self, problem: int, model: Model) -> Awaitable[Any]:
        return self.calls.on_own_loop(functools.partial(self.rollout, problem, model))

    def close(self) -> None:
        """Take no more requests, and kill the agents."""
        self._endpoint.close_soon()
        super().close()

    async def rollout(self, problem: int, model: Model) -> Rewards:
        """Let an agent work on a problem, and ask for its reward.

        What the reward function is given about the agent's end is recorded. So where only the reward has
        failed, it is asked again without the agent, unless it wants the folder and another process has made
        that.

        Raises:
            EnvironmentFailed: the agent died, took too long, or its reward is none.
        """
        environment, name = self.environment, _name(problem, model.seed)
        end = None
        if "folder" not in environment.reward_names or name in self._ended:
            end = await model.skip_to("end")
        if end is None:
            self._ended.discard(name)
            end = await self._to_end(problem, model, name)
            self._ended.add(name)
        offered = {**end, "problem": environment.record(problem), "folder": self._folder / name}
        found = await model.once("reward", functools.partial(self._reward, offered))
        counts = {MISFITS: float(end[MISFITS])} if MISFITS in end else {}
        return Rewards(found["parts"] | counts, found["weights"] | dict.fromkeys(counts, 0.0))

    async def over(self, problem: int, seed: int) -> None:
        """Remove the rollout's folder."""
        name = _name(problem, seed)
        self._ended.discard(name)
        await asyncio.shield(asyncio.to_thread(_remove, self._folder / name))

    async def _to_end(self, problem: int, model: Model, name: str) -> dict[str, Any]:
        """What the reward function is given about an agent that has done its work, as it is recorded."""
        environment = self.environment
        folder = await asyncio.to_thread(self._make_folder, name, environment.record(problem))
        ended, messages, misfits = await self._work(problem, model, folder)
        codes = environment.exit_codes
        if ended.code < 0 or (codes is not None and ended.code not in codes):
            expected = "" if codes is None or ended.code < 0 else f", and exit_codes are {list(codes)}"
            count = f"{len(misfits)} of its answers, the first" if len(misfits) > 1 else "an answer"
            form = f"; {count} without the form that it asked for: {misfits[0]}" if misfits else ""
            raise EnvironmentFailed(f"the agent {ended.how}{expected}{form}{ended.last_words}")
        if not messages:
            raise EnvironmentFailed(
                f"the agent {ended.how} and was never answered by the model, so nothing can be learned from "
                f"it; it finds the server's URL in OPENAI_BASE_URL{ended.last_words}"
            )
        if environment.reward is file:
            _recorded(await asyncio.to_thread(file, folder))  # without it, the agent has not done its work
        offered = {"exit_code": ended.code, "output": ended.output, "messages": messages}
        checked = {MISFITS: len(misfits)} if environment.structured == "check" else {}

        async def end() -> dict[str, Any]:
            return {
                name: value for name, value in offered.items() if name in environment.reward_names
            } | checked

        return await model.once("end", end)

    async def _work(
        self, problem: int, model: Model, folder: Path
    ) -> tuple[Ended, list[dict[str, Any]], list[str]]:
        """How the agent ended, its latest conversation, and why answers had not the form that it wanted."""
        environment = self.environment
        await self._endpoint.start()
        values = (folder / "problem.json", folder, self._endpoint.url, MODEL_NAME, sys.executable)
        command = list(environment.agent_command)
        for name, value in zip(PLACEHOLDERS, values, strict=True):
            command = [part.replace(name, str(value)) for part in command]
        async with self._endpoint.session(model, self._rules) as (key, session):
            ended = await run_agent(
                command,
                {
                    **environment.variables,
                    "OPENAI_BASE_URL": self._endpoint.url,
                    "OPENAI_API_KEY": key,
                    "OPENAI_MODEL": MODEL_NAME,
                    "ANTHROPIC_BASE_URL": self._endpoint.url.removesuffix("/v1"),
                    "ANTHROPIC_API_KEY": key,
                    "ANTHROPIC_MODEL": MODEL_NAME,
                    "ANTHROPIC_SMALL_FAST_MODEL": MODEL_NAME,
                    "CAIRN_PROBLEM": str(folder / "problem.json"),
                    "CAIRN_REWARD": str(folder / "reward.json"),
                    "CAIRN_SEED": str(model.seed),
                    "NO_PROXY": "127.0.0.1",
                    "no_proxy": "127.0.0.1",
                },
                folder,
                limit=environment.time_limit,
                waited=lambda: session.waited,
                log=functools.partial(self._log, f"problem {problem}, {folder.name}"),
            )
            return ended, session.conversation, session.misfits

    def _log(self, about: str, ended: Ended) -> None:
        log_of_agents(self._log_file).info("%s: the agent %s\n%s", about, ended.how, ended.output.rstrip())

    def _make_folder(self, name: str, record: Mapping[str, Any]) -> Path:
        """The rollout's own folder, with nothing but the problem; of the same name at every start."""
        with self._clearing:  # what is left has the names of folders that are about to be made
            first = self._folder not in self._cleared
            self._cleared.add(self._folder)
            left = [_set_aside(one) for one in self._folder.glob("*")] if first else []
        for one in left:
            shutil.rmtree(one, ignore_errors=True)
        folder = self._folder / name
        _remove(folder)
        folder.mkdir(parents=True)
        (folder / "problem.json").write_bytes(_json(record))
        return folder

    def _reward(self, offered: Mapping[str, Any]) -> Any:
        """The reward, as JSON."""
        found = self.environment.reward(**{name: offered[name] for name in self.environment.reward_names})
        return _later(found) if inspect.isawaitable(found) else _recorded(found)


def _json(record: Mapping[str, Any]) -> bytes:
    """A record in UTF-8; with escapes where it has half a surrogate pair, which UTF-8 can't hold."""
    try:
        return json.dumps(record, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=str).encode()


def _name(problem: int, seed: int) -> str:
    """The name of a rollout's folder."""
    return f"{problem}-{seed:016x}"


async def _later(found: Awaitable[Any]) -> dict[str, dict[str, float]]:
    return _recorded(await found)


def _recorded(found: Any) -> dict[str, dict[str, float]]:
    """The parts and weights of a reward; a number is the part "agent".

    Raises:
        EnvironmentFailed: it is none.
    """
    if says_nothing(found):
        raise Unscored("the reward is None, which means that it has nothing to say of what the agent did")
    reward = to_json(found, "agent")
    if isinstance(reward, str):
        raise EnvironmentFailed(f"the reward must be finite, but {reward}: {shortened(found)}")
    if MISFITS in reward["parts"]:
        raise EnvironmentFailed(
            f"the reward must call no part {MISFITS!r}: answers of another form than asked are counted so"
        )
    return reward


def _remove(folder: Path) -> None:
    """Remove a folder; its name is free at once, whatever another thread does with it."""
    with contextlib.suppress(OSError):  # there is none
        shutil.rmtree(_set_aside(folder), ignore_errors=True)


def _set_aside(folder: Path) -> Path:
    """Give a folder that is to be removed a name that is nobody's; returns its new path."""
    doomed = folder.with_name(f".{uuid.uuid4().hex}")
    folder.rename(doomed)
    return doomed
