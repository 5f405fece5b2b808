"""Tasks of the library reasoning-gym: generated problems with exact scores, and no files."""

# The package is in a dependency group of its own, and need not be there.
# pyright: reportMissingImports=false

import re
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = (
    "the package reasoning-gym is missing: it is in a dependency group of its own, "
    "`uv sync --inexact --group reasoning-gym`"
)


class ReasoningGym:
    """Problems of one task of reasoning-gym, or of a weighted mixture of several.

    Args:
        task: the name of a task, such as spell_backward; or several, as tables with `name`, `weight` (1.0)
            and `config`.
        size: number of problems.
        seed: seed of the problems.
        config: settings of the task, as reasoning-gym names them, such as max_word_len; for several tasks
            each has its own.
        system: a system prompt, such as one that says how to mark the answer.
        tag: score only what is between <tag> and </tag>, the last such pair; an answer without one scores 0.
            Without it, the whole answer is scored, less the white space around it.

    Raises:
        ValueError: an argument is wrong, or the package is missing.
    """

    def __init__(
        self,
        task: str | Sequence[Mapping[str, Any]],
        *,
        size: int = 4096,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        system: str | None = None,
        tag: str | None = None,
    ):
        try:
            import reasoning_gym
            from reasoning_gym.composite import DatasetSpec
        except ImportError as error:
            raise ValueError(MISSING) from error
        if size < 1:
            raise ValueError(f"size = {size}: there must be at least one problem")
        settings = dict(config or {})
        if isinstance(task, str):
            known = reasoning_gym.factory.DATASETS
            if task not in known:
                raise ValueError(
                    f"task = {task!r}: reasoning-gym has none of that name; it has "
                    f"{', '.join(sorted(set(known) - {'composite'}))}"
                )
            name = task
        else:
            if settings:
                raise ValueError("config is for a single task; of several, each table has its own config")
            name, settings = "composite", {"datasets": [DatasetSpec(**_spec(one)) for one in task]}
        self._problems = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._tag = (
            None if tag is None else re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)
        )
        self.identity = f"reasoning-gym {_version()}"
        """Changes with the library, whose problems and scores may differ in another version."""

    def __len__(self) -> int:
        return len(self._problems)

    def messages(self, problem: int) -> list[dict[str, str]]:
        """The task's question."""
        return [*self._system, {"role": "user", "content": self._problems[problem]["question"]}]

    def reward(self, problem: int, answer: str) -> float:
        """The task's score, 0 to 1; some tasks give a little for any answer."""
        if self._tag:
            marked = self._tag.findall(answer)
            if not marked:
                return 0.0
            answer = marked[-1]
        return float(self._problems.score_answer(answer.strip(), self._problems[problem]))


def _spec(table: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(table, Mapping) or "name" not in table or table.keys() - {"name", "weight", "config"}:
        raise ValueError(f"a task is a table with name, weight and config, and not {table!r}")
    return {"weight": 1.0, "config": {}, **table}


def _version() -> str:
    from importlib.metadata import version

    return version("reasoning-gym")
