"""The `rollouts` command: the answers that an RL run was trained on, in the terminal."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from cairn.config.shared import GivenRollout, LocalRun, ToolCommand
from cairn.orchestrator.rollout_log import KEY, SCHEMA, KeptRollouts, kind_of, question
from cairn.run.directory import NO_RUN
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.tables import Cut, print_table
from cairn.run.view import RunView
from cairn.tools.ckpt_output import print_json, say

Row = dict[str, Any]

SHOWN = 20
"""Rows of a table, unless --limit says otherwise."""
WIDTH = 70
"""Characters of a question or an answer in a table."""
FEW = ("step", "place", "sample", "problem", "environment", "reward", "failed", "finish_reason", "tokens")
"""What is read of every rollout; the texts are read of those to show."""


class Steps(NamedTuple):
    """Steps from the first to the last, both included."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str) -> "Steps":
        """The steps in N, or A-B.

        Raises:
            ValueError: it names none.
        """
        try:
            first, _, last = text.partition("-")
            return cls(int(first), int(last or first))
        except ValueError:
            raise ValueError(f"{text!r} is neither a step such as 12 nor steps such as 10-20") from None


class Rollouts(ToolCommand):
    """Show the answers that an RL run was trained on; the run may be going on. Without options: the newest.

    The key in the first column shows one whole conversation.
    """

    command = "rollouts"
    positional = ("run_dir", "key")
    exclusive = ("best", "worst", "limit")
    run_dir: LocalRun
    """The run's --output-dir."""
    key: GivenRollout | None = None
    """Show the conversation STEP/PLACE/SAMPLE in full."""
    step: Annotated[Steps, BeforeValidator(Steps.of)] | None = None
    """Only these optimiser steps: N, or A-B."""
    environment: str | None = None
    """Only answers in this environment."""
    problem: int | None = None
    """Only answers to this problem."""
    min_reward: float | None = None
    """Only rewards of at least so much."""
    max_reward: float | None = None
    """Only rewards of at most so much."""
    failed: bool = False
    """Only answers that failed: how many, by reason."""
    best: int | None = Field(default=None, gt=0)
    """The N with the highest rewards."""
    worst: int | None = Field(default=None, gt=0)
    """The N with the lowest rewards."""
    limit: int | None = Field(default=None, gt=0)
    """The N newest (default: 20; with --json: all)."""
    full: bool = False
    """Show every conversation in full."""

    def execute(self) -> int:
        kept = kept_rollouts(self.run_dir)
        if self.failed and not (self.key or self.full or self.as_json):
            _print_reasons(_found(kept, self), self)
            return 0
        chosen = [self.key] if self.key else _choose(kept, self)
        rows = _whole(kept, chosen)
        if self.key and not rows:
            steps = kept.steps()
            raise UsageError(
                f"{self.run_dir}: there is no rollout {'/'.join(map(str, self.key))} "
                f"(STEP/PLACE/SAMPLE); steps {steps[0]} to {steps[-1]} are kept"
            )
        if self.as_json:
            print_json([_finite(row) for row in rows])
        elif self.key or self.full:
            for row in rows:
                _print_conversation(row)
        else:
            _print_rows(rows)
        return 0


def kept_rollouts(path: Path) -> KeptRollouts:
    """The run's rollouts.

    Raises:
        UsageError: it is no run, or has none.
    """
    view = RunView(path)
    run, kept = view.run, KeptRollouts(view.run.rollouts)
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder; give the run's --output-dir")
    if kept.steps():
        return kept
    if not run.exists():
        raise UsageError(f"{path}: {NO_RUN}")
    if not run.ledger.exists():
        raise UsageError(f"{path}: has no rollouts; only RL runs have them")
    beat = view.beat("orchestrator")
    doing = "" if beat is None else f". The orchestrator's last sign of life: {beat.doing}"
    raise UsageError(
        f"{path}: no rollouts are kept yet: they are written when the batch of a step is complete "
        f"(unless --orchestrator.keep-rollouts-gb is 0){doing}"
    )


def _choose(kept: KeptRollouts, arguments: Rollouts) -> list[tuple[int, int, int]]:
    """The keys of the rollouts that the options select, in the order in which they are to be shown."""
    ranked = arguments.best or arguments.worst
    limit = arguments.limit or (None if arguments.as_json else SHOWN)
    found = _found(kept, arguments, None if ranked else limit)
    if ranked:
        found = [row for row in found if row["reward"] is not None]
        found.sort(key=lambda row: row["reward"], reverse=bool(arguments.best))
        found = found[:ranked]
    elif limit:
        found = found[-limit:]
    return [_key_of(row) for row in found]


def _found(kept: KeptRollouts, arguments: Rollouts, enough: int | None = None) -> list[Row]:
    """The rollouts that the options select, the oldest first; earlier steps only until there are `enough`."""
    steps = kept.steps()
    if arguments.step:
        first, last = arguments.step
        if not (wanted := [step for step in steps if first <= step <= last]):
            raise UsageError(
                f"{arguments.run_dir}: no rollouts of step {first} to {last} are kept; those of steps "
                f"{steps[0]} to {steps[-1]} are"
            )
        steps = wanted
    found: list[Row] = []
    for step in reversed(steps):
        found = [row for row in _read(kept, step, FEW) if _selected(row, arguments)] + found
        if enough and len(found) >= enough:
            break
    return found


def _selected(row: Row, arguments: Rollouts) -> bool:
    reward = row["reward"]
    at_least, at_most = arguments.min_reward, arguments.max_reward
    return (
        (arguments.environment is None or row["environment"] == arguments.environment)
        and (arguments.problem is None or row["problem"] == arguments.problem)
        and (not arguments.failed or row["failed"] is not None)
        and (at_least is None or (reward is not None and reward >= at_least))
        and (at_most is None or (reward is not None and reward <= at_most))
    )


def _whole(kept: KeptRollouts, keys: Sequence[tuple[int, int, int]]) -> list[Row]:
    """The rollouts with these keys, in their order."""
    found: dict[tuple[int, int, int], Row] = {}
    for step in {step for step, _, _ in keys}:
        found |= {_key_of(row): row for row in _read(kept, step, SCHEMA.names)}
    return [found[key] for key in keys if key in found]


def _read(kept: KeptRollouts, step: int, columns: Iterable[str]) -> list[Row]:
    """The rollouts of a step; a damaged file is reported and left out."""
    try:
        return kept.read(step, list(columns))
    except DamagedFile as error:
        say(f"rollouts: {error}", sys.stderr)
        return []


def _key_of(row: Row) -> tuple[int, int, int]:
    step, place, sample = (row[name] for name in KEY)
    return step, place, sample


# Output


def _print_rows(rows: list[Row]) -> None:
    if not rows:
        say("no rollout is selected")
        return
    environments = {row["environment"] for row in rows}
    if len(environments) == 1:
        say(f"environment {next(iter(environments))}")
    columns: dict[str, Callable[[Row], object]] = {
        "key": lambda row: "/".join(map(str, _key_of(row))),
        "problem": lambda row: row["problem"],
        **({"environment": lambda row: row["environment"]} if len(environments) > 1 else {}),
        "reward": lambda row: _reward(row),
        "end": lambda row: row["finish_reason"] or "",
        **({"turns": lambda row: len(row["turns"])} if any(len(row["turns"]) > 1 for row in rows) else {}),
        "tokens": lambda row: row["tokens"],
        Cut("question"): lambda row: _short(question(row["prompt"])),
        Cut("answer"): lambda row: _short(row["text"]),
        **(
            {Cut("failed"): lambda row: _short(row["failed"] or "")} if any(r["failed"] for r in rows) else {}
        ),
    }
    print_table(columns, [[show(row) for show in columns.values()] for row in rows])


def _print_reasons(rows: list[Row], arguments: Rollouts) -> None:
    """Why rollouts failed, the most frequent reason first; reasons that differ in numbers alone are one."""
    if not rows:
        say("no rollout is selected")
        return
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["environment"], kind_of(row["failed"])), []).append(row)
    kinds = sorted(found.items(), key=lambda item: -len(item[1]))
    limit = arguments.limit or SHOWN
    print_table(
        ["answers", "problems", "steps", "environment", "newest", "reason"],
        [
            [
                len(answers),
                len({row["problem"] for row in answers}),
                _between([row["step"] for row in answers]),
                environment,
                "/".join(map(str, _key_of(answers[-1]))),
                answers[-1]["failed"],
            ]
            for (environment, _), answers in kinds[:limit]
        ],
    )
    if (more := len(kinds) - limit) > 0:
        say(f"and {more} reasons more; --limit {len(kinds)} shows all")
    newest = "/".join(map(str, _key_of(rows[-1])))
    say(f"each answer: --failed --full; one conversation: rollouts {arguments.run_dir} {newest}")


def _between(steps: list[int]) -> str:
    first, last = min(steps), max(steps)
    return str(first) if first == last else f"{first} to {last}"


def _print_conversation(row: Row) -> None:
    """The whole conversation: for each turn what the model was shown since the last one, and its answer."""
    about = [f"problem {row['problem']}", row["environment"], f"reward {_reward(row)}"]
    about += [f"{name} {value:.4g}" for name, value in row["parts"].items()]
    about += [f"{row['tokens']} tokens"] + ([f"{row['seconds']:.1f} s"] if row["seconds"] is not None else [])
    say(f"=== {'/'.join(map(str, _key_of(row)))}: {', '.join(about)}")
    if row["failed"] is not None:
        say(f"failed: {row['failed']}")
    several = len({turn["branch"] for turn in row["turns"]}) > 1
    for turn in row["turns"]:
        versions = ", ".join(dict.fromkeys(span["version"] for span in turn["versions"]))
        branch = f", branch {turn['branch']}" if several else ""
        say(f"--- shown to the model{branch}")
        say(turn["prompt"])
        say(f"--- answer ({len(turn['token_ids'])} tokens, {turn['finish_reason']}, by {versions})")
        say(turn["text"])
    say("")


def _reward(row: Row) -> str:
    return "" if row["reward"] is None else f"{row['reward']:.4g}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _finite(value: Any) -> Any:
    """The value with null instead of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
