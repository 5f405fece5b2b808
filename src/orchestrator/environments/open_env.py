"""Environments on OpenEnv servers: a rollout is an episode in a session of the server's."""

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import EnvironmentFailed, Rewards
from cairn.run.seeds import derive
from cairn.run.waiting import Backoff

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

# Sessions of an OpenEnv server, over its WebSocket.


logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 100 * 2**20
"""Bytes of a message from the server."""
SECONDS_TO_CLOSE = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds between two tries to get a session."""
BUSY = 502, 503, 504
"""HTTP answers of a server that is starting, or of a proxy in front of it."""
TOLD = "VALIDATION_ERROR", "EXECUTION_ERROR"
"""Codes of errors that an action may be to blame for."""


class ServerRefused(EnvironmentFailed):
    """The server answers with an error; `code` is the one that it gives."""

    def __init__(self, code: str, message: str):
        super().__init__(f"the server answers {code}: {message}")
        self.code = code
        self.message = message


class Full(EnvironmentFailed):
    """The server has had no free session for as long as was waited."""


@dataclass(frozen=True)
class OpenEnvServer:
    """Where sessions are, and how long is waited for them.

    url: of the WebSocket. headers: sent when a connection is opened. connect_timeout: seconds for one try to
    connect. message_timeout: seconds for the answer to a message. wait: seconds to try again while the server
    has no free session, or does not answer.
    """

    url: str
    headers: Mapping[str, str]
    connect_timeout: float
    message_timeout: float
    wait: float


@dataclass(frozen=True)
class Observation:
    """What the server shows. reward: None if it gives none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvSession:
    """An episode on a server; it ends with its connection."""

    def __init__(self, connection: "ClientConnection", server: OpenEnvServer):
        self._connection, self._server = connection, server
        self.rewarded = False
        """Whether any step has had a reward."""

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Act.

        Raises:
            Refused: with an error of the server's.
            EnvironmentFailed: the connection is broken, or there is no answer in time.
        """
        found = await self._ask("step", action)
        self.rewarded = self.rewarded or found.reward is not None
        return found

    async def reset(self, data: Mapping[str, Any]) -> Observation:
        """Begin the episode; raises what `step` does."""
        return await self._ask("reset", data)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observation:
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._server.message_timeout):
                with contextlib.suppress(ConnectionClosed):  # what it said before it closed is to be read yet
                    await self._connection.send(json.dumps({"type": kind, "data": data}))
                answer = await self._connection.recv()
        except TimeoutError:
            raise EnvironmentFailed(
                f"{self._server.url} has not answered {kind} within {self._server.message_timeout:g} s "
                "(message_timeout allows more)"
            ) from None
        except (ConnectionClosed, OSError) as error:
            raise EnvironmentFailed(
                f"the connection to {self._server.url} broke at {kind}: {error}"
            ) from error
        return _seen(answer, kind)

    async def close(self) -> None:
        """End the episode."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
            async with asyncio.timeout(SECONDS_TO_CLOSE):
                await self._connection.send('{"type": "close"}')
                await self._connection.close()


async def begin(server: OpenEnvServer, reset: Mapping[str, Any]) -> tuple[OpenEnvSession, Observation]:
    """A session whose episode has begun; waits, with growing pauses, until the server has one to give.

    Raises:
        Refused: the server answers with another error.
        Full: there is no free session within `server.wait` seconds.
        EnvironmentFailed: there is no answer within that time, or no such server.
    """
    loop = asyncio.get_running_loop()
    end, backoff = loop.time() + server.wait, Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    while True:
        backoff.grow()
        try:
            return await _try_to_begin(server, reset)
        except _Later as later:
            left = end - loop.time()
            if left <= 0:
                raise later.failure(f"{later}, for {server.wait:g} s (wait allows more)") from later.__cause__
            logger.debug("%s; again in %g s", later, backoff.seconds)
        await asyncio.sleep(min(backoff.spread(), left))


class _Later(Exception):
    """There is no session now; the message says why. failure: what it is if there is none later either."""

    def __init__(self, why: str, failure: type[EnvironmentFailed] = EnvironmentFailed):
        super().__init__(why)
        self.failure = failure


async def _try_to_begin(
    server: OpenEnvServer, reset: Mapping[str, Any]
) -> tuple[OpenEnvSession, Observation]:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

    try:
        connection = await connect(
            server.url,
            open_timeout=server.connect_timeout,
            ping_timeout=server.message_timeout,
            max_size=LARGEST_MESSAGE,
            additional_headers=dict(server.headers),
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in BUSY:
            raise _Later(f"{server.url} answers HTTP {status}") from error
        raise EnvironmentFailed(
            f"{server.url} answers HTTP {status} to a WebSocket: is url that of an OpenEnv server?"
        ) from error
    except InvalidHandshake as error:
        if isinstance(error.__cause__, EOFError | OSError):  # a server that died while it answered
            raise _Later(f"{server.url} has ended the connection") from error
        raise EnvironmentFailed(f"{server.url} is no OpenEnv server: {error}") from error
    except (OSError, TimeoutError, ConnectionClosed, EOFError) as error:
        what = (
            f": {error}"
            if str(error)
            else f" within {server.connect_timeout:g} s (connect_timeout allows more)"
        )
        raise _Later(f"{server.url} can't be connected to{what}") from error
    session = OpenEnvSession(connection, server)
    try:
        return session, await session.reset(reset)
    except BaseException as error:
        await session.close()
        if isinstance(error, ServerRefused) and error.code == "CAPACITY_REACHED":
            raise _Later(f"{server.url} has no free session: {error.message}", Full) from error
        raise


def _seen(answer: str | bytes, kind: str) -> Observation:
    """A message of the server's.

    Raises:
        Refused: it is an error.
        EnvironmentFailed: it is no observation.
    """
    try:
        message = json.loads(answer)
        data = message["data"]
        if message["type"] == "error":
            raise ServerRefused(str(data.get("code", "an error")), str(data.get("message", data)))
        observation, reward = data["observation"], data.get("reward")
        if message["type"] == "observation" and isinstance(observation, dict):
            return Observation(observation, None if reward is None else float(reward), bool(data.get("done")))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise EnvironmentFailed(f"the server's answer to {kind} is no observation: {shortened(answer)}")


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
        observation: what the model reads: text with fields of the observation in braces, such as "{board}".
            Without it, the whole observation as JSON.
        problems: number of problems.
        seed: from which the problems' seeds are derived.
        max_turns: maximum number of steps.
        system: a system prompt.
        tag: of an answer, take what is between <tag> and </tag>, the last such pair.
        reset: further data of each reset.
        tell_errors: show the model an error that its action leads to (VALIDATION_ERROR, EXECUTION_ERROR);
            otherwise that fails the rollout. An answer that can't be read is always answered with the error.
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
