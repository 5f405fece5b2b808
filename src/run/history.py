"""`history.jsonl`: attempts, restarts, rewinds and other events of a run, and what they cost."""

import logging
import os
import shlex
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cairn.run.files import read_note, write_json
from cairn.run.jsonlines import JsonLines, Row, as_object
from cairn.run.messages import Attempt
from cairn.run.metrics import count_of, number
from cairn.run.output import quoted

logger = logging.getLogger(__name__)

FIELDS: dict[str, dict[str, type]] = {
    "attempt": {"time": float, "number": int, "idle": float},
    "restart": {"time": float, "role": str, "step": int, "reason": str, "how": str},
    "recompute": {"steps": int},
    "change": {"step": int, "name": str},
    "saved_in_time": {"step": int, "reason": str},
    "not_saved": {"step": int, "reason": str},
    "not_exported": {"step": int, "reason": str},
    "not_uploaded": {"step": int, "reason": str},
    "not_sent": {"sink": str, "reason": str},
    "diagnosed": {"step": int, "rule": str, "level": int, "what": str, "advice": str},
    "ended": {"number": int, "step": int, "state": str, "reason": str},
}
"""The fields of each event, and their types."""
PREFIX = "run/"
"""Begins the names of metrics about the run itself; like times, they differ between runs of the same seed."""


class History(JsonLines):
    """One event a line; each holds `time` (seconds since 1970) and `event`.

    - attempt: the launcher began attempt `number`; for `idle` seconds before that no process was running.
      `argv` is the command line that started it, in the working directory `folder`.
    - restart: `role` had died or hung (`reason`) when the run was at `step`, and was started again. `how`
      says what took its place.
    - change: from `step` on the recipe has another value of `name`: `now`, no longer `was`.
    - saved_in_time, not_saved: the run must end soon, so `step`, its newest, is the last one to be saved, or
      is not saved any more (`reason`, with the times that decided).
    - not_exported: the checkpoint of `step` could not be exported (`reason`); training goes on.
    - not_uploaded: the same of an upload to the remote store.
    - not_sent: `sink` can't take what it is sent (`reason`); training goes on.
    - diagnosed: something was found to keep the run from learning, by the rules of `run/diagnosis`.
    - ended: attempt `number` is over, and the run is done, stopped, failed or killed (`state`).
    - recompute: `steps` finished steps came after the newest checkpoint, so they are done again, and with
      them the training on `tokens` tokens, which events of earlier versions do not say.
    """

    def is_row(self, value: Any) -> bool:
        """Whether it is an event, and has what belongs to it; those of a newer version count as well."""
        row = as_object(value)
        event = row.get("event")
        if not isinstance(event, str):
            return False
        return all(_is_a(row.get(key), kind) for key, kind in FIELDS.get(event, {}).items())

    def newest_attempt(self) -> int:
        """The number of the newest attempt; 0 if there was none."""
        numbers = (event["number"] for event in self.rows() if event["event"] == "attempt")
        return max(numbers, default=0)

    def begin_attempt(self, number: int, last_active: float | None, argv: Sequence[str] = ()) -> None:
        """A launcher has begun; `last_active` is when the attempt before it was last seen alive.

        argv: the command line that started it, with the command's name; empty if a Python program did.
        """
        now = time.time()
        idle = max(now - last_active, 0.0) if last_active else 0.0
        started = {"argv": list(argv), "folder": os.getcwd()} if argv else {}
        self.append({"time": now, "event": "attempt", "number": number, "idle": idle, **started})

    def restart(self, role: str, *, step: int, reason: str, how: str) -> None:
        """`role` is started again."""
        event = {"time": time.time(), "event": "restart", "role": role, "step": step}
        self._note({**event, "reason": reason, "how": how})

    def change(self, change: dict[str, Any]) -> None:
        """The run goes on with another recipe."""
        self.append({"time": time.time(), "event": "change", **change})

    def recompute(self, steps: int, tokens: int) -> None:
        """Finished steps, which had trained on so many tokens, are done again."""
        if steps:
            self._note({"time": time.time(), "event": "recompute", "steps": steps, "tokens": tokens})

    def last_save(self, step: int, reason: str, *, saves: bool) -> None:
        """The run must end soon: whether its newest step is saved, and why."""
        event = "saved_in_time" if saves else "not_saved"
        self._note({"time": time.time(), "event": event, "step": step, "reason": reason})

    def not_exported(self, step: int, reason: str) -> None:
        """A step could not be exported, at least not at once."""
        self._note({"time": time.time(), "event": "not_exported", "step": step, "reason": reason})

    def not_uploaded(self, step: int, reason: str) -> None:
        """A step could not be uploaded, at least not at once."""
        self._note({"time": time.time(), "event": "not_uploaded", "step": step, "reason": reason})

    def not_sent(self, sink: str, reason: str) -> None:
        """A sink can't take what it is sent, at least not at once."""
        self._note({"time": time.time(), "event": "not_sent", "sink": sink, "reason": reason})

    def diagnosed(self, step: int, rule: str, level: int, what: str, advice: str) -> None:
        """Something is found to keep the run from learning; see `run/diagnosis`."""
        event = {"time": time.time(), "event": "diagnosed", "step": step, "rule": rule, "level": level}
        self._note({**event, "what": what, "advice": advice})

    def ended(self, number: int, state: str, *, step: int, reason: str) -> None:
        """An attempt is over: its state (done, stopped, failed, killed) and, if it is not done, why."""
        event = {"time": time.time(), "event": "ended", "number": number, "state": state}
        self._note({**event, "step": step, "reason": quoted(reason)})

    def _note(self, event: dict[str, Any]) -> None:
        """Add an event; a run that goes on at a full disk does so without it."""
        try:
            self.append(event)
        except OSError as error:
            logger.warning("%s lacks that %s: %s", self.path, event, error.strerror)


def resumed(argv: Sequence[str], folder: str, step: int | None = None) -> str:
    """The command that goes on with a run that `argv` has started in the working directory `folder`.

    step: the checkpoint to go on from; None: the newest.
    """
    words: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        name = word.partition("=")[0]
        if name in ("--ckpt.resume", "--ckpt.resume-step"):
            if "=" not in word and left:
                left.pop(0)
        else:
            words.append(word)
    start = ["--ckpt.resume", "auto"] if step is None else ["--ckpt.resume-step", str(step)]
    command = shlex.join([*words, *start])
    return command if folder in ("", os.getcwd()) else f"cd {shlex.quote(folder)} && {command}"


def latest_attempt(history: Iterable[Row]) -> Row | None:
    """The event of the newest attempt among those of history.jsonl; None if there was none."""
    found: Row | None = None
    for event in history:
        if event["event"] == "attempt":
            found = event
    return found


class WorkClock:
    """The clock of a run: it starts with the first attempt and stands still while nobody is at work on it.

    It shows what the rows of metrics.jsonl have as `run/wall_seconds`.
    """

    SLACK = 1.0
    """Seconds by which the clocks of different processes may disagree."""

    def __init__(self, history: Iterable[Row] = ()):
        self._first: float | None = None
        self._idle: list[float] = []
        """Of each attempt: seconds before it, since the first, in which nobody was at work."""
        self.later: list[float] = []
        """When each attempt but the first began, in seconds on this clock, in ascending order."""
        for event in history:
            self.see(event)

    def see(self, event: Row) -> None:
        """Take the next event of history.jsonl; those that begin no attempt change nothing."""
        if event["event"] != "attempt":
            return
        if self._first is None:
            self._first, self._idle = event["time"], [0.0]
            return
        self._idle.append(self._idle[-1] + event["idle"])
        # No earlier than the attempt before it, also if somebody has set the clock back.
        self.later.append(max(self.at(event["time"]), *self.later[-1:], 0.0))

    @property
    def has_begun(self) -> bool:
        """Whether there was an attempt."""
        return self._first is not None

    @property
    def idle(self) -> float:
        """Seconds until the newest attempt in which nobody was at work."""
        return self._idle[-1] if self._idle else 0.0

    def at(self, time: float) -> float:
        """What the clock shows at `time` of the newest attempt, in seconds since 1970; 0 before the first."""
        return time - self._first - self.idle if self._first is not None else 0.0

    def moment(self, seconds: float) -> float:
        """When the clock showed `seconds`, in seconds since 1970; before any attempt, `seconds`."""
        if self._first is None:
            return seconds
        return self._first + self._idle[bisect_left(self.later, seconds - self.SLACK)] + seconds


@dataclass(frozen=True)
class Costs:
    """What restarts have cost a run. Times are in seconds."""

    restarts: Mapping[str, int]
    """How often each role was started again; roles that never were are left out."""
    recomputed_steps: int
    recomputed_tokens: int
    """Those that the steps had trained on which were done again."""
    useful_seconds: float
    """The time of the steps that count, see `Account`."""
    wall_seconds: float
    """How long somebody was at work on the run."""

    @property
    def goodput(self) -> float:
        """Useful time over wall time; 1.0 before anything has begun."""
        return min(self.useful_seconds / self.wall_seconds, 1.0) if self.wall_seconds > 0 else 1.0

    def metrics(self) -> dict[str, float]:
        """As they stand in a step's row."""
        values = {
            "restarts": sum(self.restarts.values()),
            **{f"restarts/{role}": count for role, count in sorted(self.restarts.items())},
            "recomputed_steps": self.recomputed_steps,
            "recomputed_tokens": self.recomputed_tokens,
            "useful_seconds": self.useful_seconds,
            "wall_seconds": self.wall_seconds,
            "goodput": self.goodput,
        }
        return {PREFIX + name: value for name, value in values.items()}


class Account:
    """What restarts have cost, for one step's row after the other.

    Useful time is that of the steps that count: each step's own, and its wait for the batch unless a role was
    restarted meanwhile. Goodput is useful time over the time in which processes of the run were running.
    """

    def __init__(self, history: Path, last_row: dict[str, Any] | None):
        """Go on after `last_row`, the newest one that is kept."""
        self._history = History(history)
        self._useful = number(last_row or {}, f"{PREFIX}useful_seconds") or 0.0
        self._clock = WorkClock()
        self._restarts: dict[str, int] = {}
        self._recomputed = self._recomputed_tokens = 0
        self._last_restart = 0.0

    def after_step(self, wait: float, step: float) -> dict[str, float]:
        """The metrics for the row of a step that took `step` seconds after waiting for its batch `wait`.

        wait: without what is start-up (`starting`).
        """
        self._catch_up()
        disturbed = self._last_restart > time.time() - wait - step
        self._useful += step + (0.0 if disturbed else wait)
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """How the run fares until now."""
        return self.costs().metrics()

    def costs(self, now: float | None = None) -> Costs:
        """How the run fares until `now`, in seconds since 1970."""
        self._catch_up()
        wall = self._clock.at(time.time() if now is None else now)
        wall = max(wall, self._useful if self._clock.has_begun else 0.0)  # somebody has set the clock back
        again = self._recomputed, self._recomputed_tokens
        return Costs(dict(self._restarts), *again, self._useful, wall)

    def _catch_up(self) -> None:
        for event in self._history.new_rows():
            self._clock.see(event)
            if event["event"] == "restart":
                self._restarts[event["role"]] = self._restarts.get(event["role"], 0) + 1
                self._last_restart = event["time"]
            elif event["event"] == "recompute":
                self._recomputed += event["steps"]
                self._recomputed_tokens += count_of(event, "tokens")


def starting(row: Mapping[str, Any]) -> float:
    """Of the wait for an attempt's first batch, the seconds in which its servers could not answer yet.

    That is what is left of `time/wait` beside requests and calls of the environment; these may have run at
    the same time, so it is rather less than the truth. 0 where nothing is sampled.
    """
    names = ("time/wait", "time/generate", "time/rewards")
    wait, generate, rewards = (number(row, name) for name in names)
    return 0.0 if generate is None else max((wait or 0.0) - generate - (rewards or 0.0), 0.0)


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


# The run's record of when its trainer went back to a checkpoint because of a spike.


@dataclass(frozen=True)
class Rewind:
    """One return: update `update` (from 0) of step `step` spiked, as `reason` says.

    to: the step whose weights and optimiser state are those of `step`, too. No batch in between, and not that
    of `step`, has changed them.
    """

    step: int
    update: int
    to: int
    reason: str


def rewind_target(step: int, interval: int) -> int:
    """The step that a spike in `step` goes back to: the last one before it that `ckpt.interval` saves.

    Saves for other reasons do not count: a run that was stopped has more of them than one that was not.
    """
    return (step - 1) // interval * interval


def spared_for_rewinds(unkept: Collection[int], newest: int, interval: int) -> set[int]:
    """The step that a spike in the one after `newest` would go back to, if it is in `unkept`."""
    return {rewind_target(newest + 1, interval)} & set(unkept)


@dataclass(frozen=True)
class _Content:
    run_id: str
    branch: str
    rewinds: list[Rewind] = field(default_factory=list[Rewind])


class RewindLog:
    """The file, which rank 0 of the trainer writes."""

    def __init__(self, path: Path):
        self.path = path

    def of(self, attempt: Attempt) -> list[Rewind]:
        """Those of the branch that `attempt` goes on with, in order; none if the file is damaged."""
        content = read_note(self.path, _Content)
        same = content is not None and (content.run_id, content.branch) == (attempt.run_id, attempt.branch)
        return sorted(content.rewinds, key=lambda one: one.step) if content and same else []

    def write(self, attempt: Attempt, rewinds: Sequence[Rewind]) -> None:
        """Replace the record; it is durable when this returns."""
        content = _Content(attempt.run_id, attempt.branch, list(rewinds))
        write_json(self.path, asdict(content), durable=True)

    def forget_after(self, attempt: Attempt) -> None:
        """Forget those of steps after the attempt's start, which will be others now."""
        if self.path.exists():
            self.write(attempt, [one for one in self.of(attempt) if one.step <= attempt.start_step])


def to_json(rewinds: Sequence[Rewind]) -> list[dict[str, int | str]]:
    """What a checkpoint holds of them."""
    return [asdict(one) for one in rewinds]
