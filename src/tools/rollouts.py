"""The `rollouts` command: the answers that an RL run was trained on, in the terminal."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cairn.orchestrator.rollout_log import KEY, SCHEMA, KeptRollouts
from cairn.run.directory import RunDirectory
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

MARKUP = re.compile(
    r"<\|[^|<>]*\|>|\[/?INST\]|</?(?:s|bos|eos|think|system|user|assistant)>|<(?:start|end)_of_turn>"
)
"""What separates messages in a rendered prompt, in the usual templates."""


def run() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rollouts",
        description="Show the answers that an RL run was trained on; the run may be going on. Without "
        "options: the newest ones. The key in the first column shows one whole conversation.",
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="the run's --output-dir")
    parser.add_argument(
        "key", nargs="?", type=_key, metavar="STEP/PLACE/SAMPLE", help="show this conversation in full"
    )
    parser.add_argument("--step", type=_steps, metavar="N or A-B", help="only these optimiser steps")
    parser.add_argument("--environment", metavar="NAME", help="only those of this environment")
    parser.add_argument("--problem", type=int, metavar="N", help="only answers to this problem")
    parser.add_argument("--min-reward", type=_number, metavar="X", help="only rewards of at least X")
    parser.add_argument("--max-reward", type=_number, metavar="X", help="only rewards of at most X")
    parser.add_argument("--failed", action="store_true", help="only those that failed: how many, by reason")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", type=_count, metavar="N", help="the N with the highest rewards")
    order.add_argument("--worst", type=_count, metavar="N", help="the N with the lowest rewards")
    order.add_argument(
        "--limit", type=_count, metavar="N", help=f"the N newest (default: {SHOWN}; with --json: all)"
    )
    parser.add_argument("--full", action="store_true", help="show every conversation in full")
    parser.add_argument("--json", action="store_true", help="print JSON, with tokens and logprobs")
    arguments = parser.parse_args(sys.argv[1:])
    kept = _kept(arguments.run)
    if arguments.failed and not (arguments.key or arguments.full or arguments.json):
        _print_reasons(_found(kept, arguments), arguments)
        return 0
    chosen = [arguments.key] if arguments.key else _choose(kept, arguments)
    rows = _whole(kept, chosen)
    if arguments.key and not rows:
        steps = kept.steps()
        raise UsageError(
            f"{arguments.run}: there is no rollout {'/'.join(map(str, arguments.key))} "
            f"(STEP/PLACE/SAMPLE); steps {steps[0]} to {steps[-1]} are kept"
        )
    if arguments.json:
        print_json([_finite(row) for row in rows])
    elif arguments.key or arguments.full:
        for row in rows:
            _print_conversation(row)
    else:
        _print_rows(rows)
    return 0


def _kept(path: Path) -> KeptRollouts:
    """The run's rollouts.

    Raises:
        UsageError: it is no run, or has none.
    """
    run = RunDirectory(path)
    kept = KeptRollouts(run.rollouts)
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder; give the run's --output-dir")
    if kept.steps():
        return kept
    if not any(file.exists() for file in (run.roles, run.config, run.metrics.path)):
        raise UsageError(
            f"{path}: is not a run directory: it has no roles.json, config.json or metrics.jsonl"
        )
    if not run.ledger.exists():
        raise UsageError(f"{path}: has no rollouts; only RL runs have them")
    beat = RunView(path).beat("orchestrator")
    doing = "" if beat is None else f". The orchestrator's last sign of life: {beat.doing}"
    raise UsageError(
        f"{path}: no rollouts are kept yet: they are written when the batch of a step is complete "
        f"(unless --orchestrator.keep-rollouts-gb is 0){doing}"
    )


def _choose(kept: KeptRollouts, arguments: argparse.Namespace) -> list[tuple[int, int, int]]:
    """The keys of the rollouts that the options select, in the order in which they are to be shown."""
    ranked = arguments.best or arguments.worst
    limit = arguments.limit or (None if arguments.json else SHOWN)
    found = _found(kept, arguments, None if ranked else limit)
    if ranked:
        found = [row for row in found if row["reward"] is not None]
        found.sort(key=lambda row: row["reward"], reverse=bool(arguments.best))
        found = found[:ranked]
    elif limit:
        found = found[-limit:]
    return [_key_of(row) for row in found]


def _found(kept: KeptRollouts, arguments: argparse.Namespace, enough: int | None = None) -> list[Row]:
    """The rollouts that the options select, the oldest first; earlier steps only until there are `enough`."""
    steps = kept.steps()
    if arguments.step:
        first, last = arguments.step
        if not (wanted := [step for step in steps if first <= step <= last]):
            raise UsageError(
                f"{arguments.run}: no rollouts of step {first} to {last} are kept; those of steps {steps[0]} "
                f"to {steps[-1]} are"
            )
        steps = wanted
    found: list[Row] = []
    for step in reversed(steps):
        found = [row for row in _read(kept, step, FEW) if _selected(row, arguments)] + found
        if enough and len(found) >= enough:
            break
    return found


def _selected(row: Row, arguments: argparse.Namespace) -> bool:
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
        Cut("question"): lambda row: _short(_question(row["prompt"])),
        Cut("answer"): lambda row: _short(row["text"]),
        **(
            {Cut("failed"): lambda row: _short(row["failed"] or "")} if any(r["failed"] for r in rows) else {}
        ),
    }
    print_table(columns, [[show(row) for show in columns.values()] for row in rows])


def _print_reasons(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Why rollouts failed, the most frequent reason first; reasons that differ in numbers alone are one."""
    if not rows:
        say("no rollout is selected")
        return
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["environment"], _kind(row["failed"])), []).append(row)
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
    say(f"each answer: --failed --full; one conversation: rollouts {arguments.run} {newest}")


def _kind(reason: str) -> str:
    """The reason without the numbers in it, but for the lines of a file."""
    return re.sub(r"(?<!\.py:)(?<!\d)\d+", "#", reason)


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


def _question(prompt: str) -> str:
    """The last message in a prompt with the markup of a chat template; the whole prompt if there is none."""
    parts = [
        re.sub(r"^\s*(system|user|assistant|model|tool)\b\s*", "", part) for part in MARKUP.split(prompt)
    ]
    said = [part for part in parts if part.strip()]
    return said[-1] if said else prompt


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


# Arguments


def _key(text: str) -> tuple[int, int, int]:
    try:
        step, place, sample = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a key such as 12/190/3: step, place and sample, as in the table"
        ) from None
    return step, place, sample


def _steps(text: str) -> tuple[int, int]:
    try:
        first, _, last = text.partition("-")
        return int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a step such as 12 nor steps such as 10-20"
        ) from None


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
