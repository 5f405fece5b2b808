"""Environments on OpenEnv servers: a rollout is an episode in a session of the server's."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cairn.orchestrator.environments.open_env_session import (
    TOLD,
    Full,
    Observation,
    OpenEnvServer,
    OpenEnvSession,
    ServerRefused,
    begin,
)
from cairn.orchestrator.environments.protocol import EnvironmentFailed
from cairn.orchestrator.environments.rewards import Rewards
from cairn.run.seeds import derive

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
MISSING = "the package websockets is missing; install it with: uv sync --inexact --group openenv"
PLACE = re.compile(r"\{answer(?::(int|float|json))?\}")


class OpenEnv:
    """Episodes on an OpenEnv server.

    Problem i is the episode that the server begins with a seed derived from i. The server must take seeds:
    after a crash an episode is begun again with its seed, and given the recorded actions.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        action: what a step sends: a table with the model's answer in place of "{answer}". A value that is
            exactly "{answer:int}", "{answer:float}" or "{answer:json}" is the answer read as such.
        observation: what the model is told: text with fields of the observation in braces, such as "{board}".
            Without it, the whole observation as JSON.
        problems: number of problems.
        seed: from which the problems' seeds are derived.
        max_turns: maximum number of steps.
        system: a system prompt.
        tag: of an answer, take what is between <tag> and </tag>, the last such pair.
        reset: further data of each reset.
        tell_errors: tell the model of an error that its action leads to (VALIDATION_ERROR, EXECUTION_ERROR);
            otherwise that fails the rollout. Of answers that can't be read it is always told.
        connect_timeout: seconds for one try to connect.
        message_timeout: seconds for a reset or a step.
        wait: seconds to try again while the server has no free session, or does not answer.
        token_variable: name of the environment variable that has a token for the server ("Authorization:
            Bearer").

    Raises:
        ValueError: an argument is wrong, or the package websockets is missing.
    """

    def __init__(
        self,
        url: str,
        action: Mapping[str, Any],
        *,
        observation: str | None = None,
        problems: int = 4096,
        seed: int = 0,
        max_turns: int = 10,
        system: str | None = None,
        tag: str | None = None,
        reset: Mapping[str, Any] | None = None,
        tell_errors: bool = False,
        connect_timeout: float = 10.0,
        message_timeout: float = 60.0,
        wait: float = 300.0,
        token_variable: str | None = None,
    ):
        try:
            import websockets  # noqa: F401
        except ImportError as error:
            raise ValueError(MISSING) from error
        if problems < 1:
            raise ValueError(f"problems = {problems}: there must be at least one problem")
        for name, value in {"connect_timeout": connect_timeout, "message_timeout": message_timeout}.items():
            if value <= 0:
                raise ValueError(f"{name} = {value}: it must be above 0")
        if not isinstance(action, Mapping) or not any(map(PLACE.search, _texts(action))):
            raise ValueError(
                f"action = {action!r}: it must be a table with the model's answer in it, such as "
                '{ message = "{answer}" }'
            )
        headers: dict[str, str] = {}
        if token_variable is not None:
            if not (token := os.environ.get(token_variable)):
                raise ValueError(f"token_variable = {token_variable!r}: no such environment variable is set")
            headers["Authorization"] = f"Bearer {token}"
        self._server = OpenEnvServer(_address(url), headers, connect_timeout, message_timeout, wait)
        self._action, self._observation = dict(action), observation
        self._problems, self._seed = problems, seed
        self._reset = dict(reset or {})
        self._tell_errors = tell_errors
        tagged = "" if tag is None else re.escape(tag)
        self._tag = re.compile(f"<{tagged}>(.*?)</{tagged}>", re.DOTALL) if tagged else None
        self.max_turns = max_turns
        self.messages = None if system is None else lambda problem: [{"role": "system", "content": system}]

    def __len__(self) -> int:
        return self._problems

    async def lacks(self) -> str | None:
        """What keeps a rollout from beginning, in words: no server, or one that takes no seeds."""
        server = OpenEnvServer(**{**vars(self._server), "wait": self._server.connect_timeout})
        try:
            first = await self._first(server)
            again = await self._first(server)
        except Full:
            return None
        except EnvironmentFailed as failed:
            return str(failed)
        if first != again:
            return (
                f"{server.url}: two resets with the same seed lead to different observations, {first!r} and "
                f"{again!r}. So answers to one problem can't be compared, and after a crash no episode can "
                "go on. Have the server use the seed, or leave what changes out of observation"
            )
        return None

    async def _first(self, server: OpenEnvServer) -> str:
        session, seen = await begin(server, self._reset_data(0, 0))
        await session.close()
        return self._shown(seen)

    async def start(self, problem: int, seed: int) -> tuple[OpenEnvSession, str]:
        """A session in which the problem's episode has begun."""
        session, seen = await begin(self._server, self._reset_data(problem, seed))
        try:
            if seen.done:
                raise EnvironmentFailed("the episode is done before its first step")
            return session, self._shown(seen)
        except BaseException:
            await session.close()
            raise

    async def step(self, world: OpenEnvSession, answer: str) -> tuple[str, Rewards, bool]:
        """Send an answer as an action."""
        try:
            action = self._acted(answer)
        except ValueError as error:
            return f"Error: {error}", _rewards(None, invalid=True), False
        try:
            seen = await world.step(action)
        except ServerRefused as refused:
            if self._tell_errors and refused.code in TOLD:
                return f"Error: {refused.message}", _rewards(None, invalid=True), False
            hint = " (tell_errors = true tells the model of it instead)" if refused.code in TOLD else ""
            raise EnvironmentFailed(f"{refused}; the action was {json.dumps(action)}{hint}") from refused
        if seen.done and not world.rewarded:
            raise EnvironmentFailed("the episode has ended, and no step of it had a reward")
        return "" if seen.done else self._shown(seen), _rewards(seen.reward, invalid=False), seen.done

    async def close(self, world: OpenEnvSession) -> None:
        """End the session."""
        await world.close()

    def _reset_data(self, problem: int, seed: int) -> dict[str, Any]:
        derived = derive(self._seed, "openenv", problem) % 2**31
        return {**self._reset, "seed": derived, "episode_id": f"{problem}-{seed}"}

    def _shown(self, seen: Observation) -> str:
        """An observation as text."""
        if self._observation is None:
            return json.dumps(seen.observation, ensure_ascii=False, sort_keys=True)
        try:
            return self._observation.format_map(seen.observation)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
            raise EnvironmentFailed(
                f"observation = {self._observation!r} fails: {error!r}; the server's observation has "
                f"{', '.join(seen.observation) or 'no fields'}"
            ) from None

    def _acted(self, answer: str) -> dict[str, Any]:
        """The action of an answer.

        Raises:
            ValueError: it can't be read; the message is for the model.
        """
        if self._tag is not None:
            marked = self._tag.findall(answer)
            if not marked:
                raise ValueError(f"there is no {self._tag.pattern.replace('(.*?)', '...')} in the answer")
            answer = marked[-1]
        return {name: _filled(value, answer.strip()) for name, value in self._action.items()}


def _rewards(reward: float | None, *, invalid: bool) -> Rewards:
    return Rewards({"reward": reward or 0.0, "invalid": float(invalid)}, {"invalid": 0.0})


def _address(url: str) -> str:
    """The WebSocket of a server.

    Raises:
        ValueError: it is no URL of a server.
    """
    parts, port = urlsplit(url), None
    with contextlib.suppress(ValueError):
        port = parts.port or True
    if parts.scheme not in SCHEMES or not parts.hostname or not port or parts.query or parts.fragment:
        raise ValueError(f"url = {url!r}: it must be the address of a server, such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, f"{path}/ws", "", ""))


def _texts(value: Any) -> Iterator[str]:
    """The texts in an action."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _filled(value: Any, answer: str) -> Any:
    """A part of an action, with the answer in its place."""
    if isinstance(value, Mapping):
        return {name: _filled(one, answer) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, answer) for one in value]
    if not isinstance(value, str):
        return value
    if (place := PLACE.fullmatch(value)) and place[1]:
        try:
            return {"int": int, "float": float, "json": json.loads}[place[1]](answer)
        except ValueError:
            named = {"int": "a whole number", "float": "a number", "json": "JSON"}[place[1]]
            raise ValueError(f"the answer must be {named}") from None
    return value.replace("{answer}", answer)
