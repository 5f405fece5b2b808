"""Gymnasium environments as worlds: the model reads what they show, and its answer is the action.

Nothing is imported for that: any object with Gymnasium's `reset`, `step` and `close` will do.
"""

# The package is in a dependency group of its own, and need not be there.
# pyright: reportMissingImports=false

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cairn.orchestrator.environments.calls import shortened
from cairn.run.extensions import code_of, load
from cairn.run.seeds import derive

SETTING = "orchestrator.environment.args.id"
MISSING = (
    "the package gymnasium is missing: it is in a dependency group of its own, "
    "`uv sync --inexact --group gymnasium`; environments of your own need it not: id = module:Class"
)
HIGHLIGHTED = re.compile(r"\x1b\[[0-9;]*m(.+?)\x1b\[0m")
"""What a text is coloured with; Gymnasium's toy_text marks the player's place in that way."""


class GymnasiumWorlds:
    """Problem number i is the environment after `reset(seed=...)` with the seed of problem i.

    Args:
        id: an id that Gymnasium knows, such as FrozenLake-v1, or module:Class (or module:function) of what
            makes the environment.
        args: keyword arguments of `gymnasium.make`, or of the class or function.
        problems: their number.
        seed: seed of the problems.
        actions: a word for each of the environment's actions, which are numbers, in their order. The last of
            these words in an answer, in whatever case, is the action. Without it, the answer is the action,
            less the white space around it.
        render: show the model what `render` returns instead of the observation, for environments that draw
            themselves as text (`render_mode="ansi"`); what is coloured is put in brackets.
        system: a system prompt.
        max_turns: maximum number of answers of a rollout.
        invalid: reward of an answer that is no action; the model reads so, and the environment stays as it
            is.

    Raises:
        ValueError: an argument is wrong, the environment's actions or observations are no text, or the
            package is missing.
        BadExtension: the class can't be imported.
    """

    def __init__(
        self,
        id: str,
        *,
        args: Mapping[str, Any] | None = None,
        problems: int = 1000,
        seed: int = 0,
        actions: Sequence[str] | None = None,
        render: bool = False,
        system: str | None = None,
        max_turns: int = 10,
        invalid: float = 0.0,
    ):
        self._id, self._problems, self._seed = id, problems, seed
        self._args = {**({"render_mode": "ansi"} if render else {}), **(args or {})}
        self._maker = _maker(id)
        self._render, self._system, self._invalid = render, system, float(invalid)
        self.max_turns = max_turns
        self._words = None if actions is None else _Words(actions)
        self._offset = 0
        self._check()
        about = [self._args, problems, seed, actions, render, system, invalid, max_turns]
        self.identity = f"{id} {json.dumps(about, default=repr)} {code_of(id) or _version(id)}"
        """Changes with the settings, and with the code of the environment or the version of Gymnasium."""

    def __len__(self) -> int:
        return self._problems

    def messages(self, problem: int) -> list[dict[str, str]]:
        """The system prompt, and nothing if there is none."""
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def start(self, problem: int, seed: int) -> tuple[Any, str]:
        """A new environment, reset with the problem's seed; the rollout's seed is not used."""
        world = self._maker(**self._args)
        found = world.reset(seed=derive(self._seed, "gymnasium", problem) % 2**31)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(f"reset must return (observation, info), and has returned {shortened(found)}")
        return world, self._seen(world, found[0])

    def step(self, world: Any, answer: str) -> tuple[str, float, bool]:
        """Give the environment the action that the answer names."""
        action = self._action(world, answer)
        if action is None:
            known = f", which is one of: {', '.join(self._words.words)}" if self._words else ""
            return f"Error: the answer is no action{known}.", self._invalid, False
        found = world.step(action)
        if not isinstance(found, tuple) or len(found) != 5:
            raise ValueError(
                "step must return (observation, reward, terminated, truncated, info), and has returned "
                f"{shortened(found)}"
            )
        observation, reward, terminated, truncated, _ = found
        return self._seen(world, observation), reward, bool(terminated or truncated)

    def close(self, world: Any) -> None:
        """Close the environment, if it can be closed."""
        if callable(close := getattr(world, "close", None)):
            close()

    def _action(self, world: Any, answer: str) -> Any:
        if self._words:
            number = self._words.last_in(answer)
            return None if number is None else self._offset + number
        action = answer.strip()
        space = getattr(world, "action_space", None)
        return action if space is None or space.contains(action) else None

    def _seen(self, world: Any, observation: Any) -> str:
        if self._render:
            observation = world.render()
            if isinstance(observation, str):
                return HIGHLIGHTED.sub(r"[\1]", observation).strip("\n")
        if not isinstance(observation, str):
            what = "what it renders" if self._render else "its observation"
            raise ValueError(
                f"{what} is {shortened(observation)}, and must be text: set render = true if it draws itself "
                'as text (render_mode = "ansi"), or wrap it in a class that tells in words what is to be seen'
            )
        return observation

    def _check(self) -> None:
        """Make one environment, and look at its spaces, if it has any, and at its first observation.

        Raises:
            ValueError: the model can't read what it shows, or say what to do.
        """
        world, _ = self.start(0, 0)
        try:
            space = getattr(world, "action_space", None)
            count = getattr(space, "n", None)
            if self._words is None and space is not None and type(space).__name__ != "Text":
                raise ValueError(
                    f"the actions of {self._id} are {space}, and no text: name them with actions = [...], a "
                    "word for each in the order of their numbers"
                    if count is not None
                    else f"the actions of {self._id} are {space}, and neither text nor numbers of a list"
                )
            if self._words is not None and space is not None:
                if count is None or int(count) != len(self._words.words):
                    raise ValueError(
                        f"actions names {len(self._words.words)} actions; those of {self._id} are {space}"
                    )
                self._offset = int(getattr(space, "start", 0))
        finally:
            self.close(world)


class _Words:
    """Words that name actions."""

    def __init__(self, words: Sequence[str]):
        if isinstance(words, str) or not words or not all(isinstance(w, str) and w.strip() for w in words):
            raise ValueError(f"actions must be a list of words, and is {words!r}")
        self.words = [word.strip() for word in words]
        lower = [word.lower() for word in self.words]
        if len(set(lower)) < len(lower):
            raise ValueError(f"actions names one action twice: {', '.join(self.words)}")
        self._numbers = {word: number for number, word in enumerate(lower)}
        longest_first = sorted(map(re.escape, lower), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")

    def last_in(self, text: str) -> int | None:
        """The number of the word that comes last in a text; None if it has none."""
        found = self._pattern.findall(text.lower())
        return self._numbers[found[-1]] if found else None


def _maker(id: str) -> Callable[..., Any]:
    """What makes the environment. `module:Name-v0` is an id of Gymnasium's, and no name in a module."""
    if ":" in id and id.rpartition(":")[2].isidentifier():
        return load(id, {}, SETTING)
    try:
        import gymnasium
    except ImportError as error:
        raise ValueError(MISSING) from error
    try:
        gymnasium.spec(id)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"id = {id!r}: {error}") from error
    return lambda **args: gymnasium.make(id, **args)


def _version(id: str) -> str:
    """The version of Gymnasium, where the id is one of its ids; nothing where the code has no file."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"gymnasium {version('gymnasium')}"
    except PackageNotFoundError:
        return ""
