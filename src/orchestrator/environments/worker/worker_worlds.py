"""The worlds that are open in the process of an environment."""

import contextlib

from worker_values import plain, result_of, state_of, value_of

OPTIONAL = ("messages", "snapshot", "restore")
"""Methods that an environment with `start` and `step` need not have; `close` is asked in any case."""


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
        self._open[number] = await self._awaited(self._environment.restore, problem, seed, value_of(state))

    async def _step(self, number, answer):
        found = await self._awaited(self._environment.step, self._open[number], answer)
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise ValueError(f"step must return (observation, reward, done), and has returned {found!r:.300}")
        observation, reward, done = found
        return [None if done else plain(observation), result_of(reward), plain(done)]

    async def _snapshot(self, number):
        return state_of(await self._awaited(self._environment.snapshot, self._open[number]))

    async def _close(self, number):
        with contextlib.suppress(KeyError):
            world = self._open.pop(number)
            if close := getattr(self._environment, "close", None):
                await self._awaited(close, world)


def described_world(environment):
    """What the orchestrator has to know of an environment with worlds."""
    found = {"methods": [name for name in OPTIONAL if callable(getattr(environment, name, None))]}
    return found | ({"max_turns": environment.max_turns} if hasattr(environment, "max_turns") else {})
