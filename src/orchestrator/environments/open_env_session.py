"""Sessions of an OpenEnv server, over its WebSocket."""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import EnvironmentFailed

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

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
    end, pause = loop.time() + server.wait, FIRST_PAUSE
    while True:
        try:
            return await _try_to_begin(server, reset)
        except _Later as later:
            left = end - loop.time()
            if left <= 0:
                raise later.failure(f"{later}, for {server.wait:g} s (wait allows more)") from later.__cause__
            logger.debug("%s; again in %g s", later, pause)
        await asyncio.sleep(min(pause * random.uniform(0.5, 1), left))
        pause = min(2 * pause, LONGEST_PAUSE)


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
