"""The display of a running command: a progress bar, or plain lines without a terminal."""

import functools
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cairn.launch.exit_report import shorter
from cairn.run.diagnosis import RULES, Diagnosis, Finding, RuleInput
from cairn.run.directory import RunDirectory
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import Row
from cairn.run.metrics import number
from cairn.run.signals import say
from cairn.run.view import RunView

ROLES = (("inference",), ("trainer_rank0", "trainer"), ("orchestrator",), ("exporter",), ("uploader",))
"""Roles whose heartbeats are shown; the exporter's only while it has something to do. For the trainer: rank
0's, or its driver's before there are ranks."""
QUIET_SECONDS = 10.0
"""Without a new step for this long, the display says what each role is doing."""
WAITING = 0.1
"""Share of a step above which its wait for the batch is shown."""
LINE_SECONDS = 10.0
"""Seconds between two such lines without a terminal."""


class StepDisplay:
    """Follows metrics.jsonl, history.jsonl and the roles' heartbeats; call `update` regularly."""

    def __init__(self, run: RunDirectory, start_step: int, max_steps: int, console: Console | None = None):
        self._view = RunView(run.path)
        self._events_seen = len(self._view.history())  # those of earlier attempts
        self._row: Row | None = None
        self.max_steps = max_steps
        self.step = start_step
        """The newest step that was shown."""
        self.start_step = start_step
        self.console = console or Console()
        self._began = time.time()
        self._moved_at = self._printed_at = self._looked_at = time.monotonic()
        self._unprinted: Row | None = None
        self._diagnosis = Diagnosis(RULES)
        self._unsaid: list[str] = []
        self._live = False
        self._bar = _Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=max_steps, completed=start_step)

    def __enter__(self) -> "StepDisplay":
        self._bar.start()
        self._live = True
        return self

    def __exit__(self, *_: object) -> None:
        self._live = False  # what is said from now on comes after the bar
        self.update(final=True)
        self._bar.stop()

    def say(self, line: str) -> None:
        """Have a line printed above the bar, which it would tear otherwise; signal handlers may call this."""
        if self._live:
            self._unsaid.append(line)
        else:
            say(line)

    def update(self, *, final: bool = False) -> None:
        """Show the newest step or what is waited for, restarts, and what keeps the run from learning."""
        while self._unsaid:
            self.console.print(self._unsaid.pop(0), markup=False, soft_wrap=True)
        events = self._view.history()
        for event in events[self._events_seen :]:
            if event["event"] == "restart":
                self.console.print(
                    f"{event['role']} {event['reason']} and {event['how']}", markup=False, soft_wrap=True
                )
            elif event["event"] == "saved_in_time":
                self.console.print(event["reason"], markup=False, soft_wrap=True)
            elif event["event"] in ("not_saved", "not_exported", "not_uploaded"):
                what = event["event"].removeprefix("not_")
                text = f"warning: step {event['step']} is not {what}: {event['reason']}"
                self.console.print(text, markup=False, soft_wrap=True)
        self._events_seen = len(events)
        now = time.monotonic()
        rows = self._view.metrics()
        row = rows[-1] if rows else None
        if row is not None and row is not self._row and row["step"] > self.start_step:
            self._row = self._unprinted = row
            self.step = row["step"]
            self._moved_at = now
            self._bar.note = _values(row)
            self._bar.update(self._task, description="training", completed=row["step"])
            for finding in self._diagnosis.news(self._seen(rows)):
                self.console.print(f"note: {finding}", markup=False, highlight=False, soft_wrap=True)
        elif not final:
            self._show_wait(now)
        row = self._unprinted
        if row and not self.console.is_terminal and (final or now - self._printed_at > 2):
            self._print(f"step {row['step']}/{self.max_steps}  {_values(row)}", now)
            self._unprinted = None

    def _show_wait(self, now: float) -> None:
        """Say what the roles are doing, before the first step and when no step has come for a while."""
        quiet = now - self._moved_at
        if now - self._looked_at < 1 or (self.step > self.start_step and quiet < QUIET_SECONDS):
            return
        self._looked_at = now
        doing = list(self._doing()) or ["roles are being started"]
        starting = self.step == self.start_step
        still = f"{'starting' if starting else 'no step'} for {quiet:.0f} s"
        self._bar.note = "\n".join(doing if starting else [still, *doing])
        if not self.console.is_terminal and not self._unprinted and now - self._printed_at > LINE_SECONDS:
            self._print(f"{still}: {'; '.join(doing)}", now)

    def _print(self, line: str, now: float) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()
        self._printed_at = now

    def _doing(self) -> Iterable[str]:
        """What each role of this attempt reports that it is doing, and for how long."""
        for names in ROLES:
            for name in names:
                beat = self._view.beat(name)
                idle = name in ("exporter", "uploader") and beat is not None and beat.waiting
                if beat is not None and beat.since >= self._began and not idle:
                    seconds = time.time() - beat.since
                    lasting = f" ({seconds:.0f} s)" if seconds >= 2 else ""
                    yield f"{names[-1]}: {beat.doing}{lasting}"
                    break

    def _seen(self, rows: Sequence[Row]) -> RuleInput:
        """What is known of the steps of this attempt."""
        own = rows[bisect_right(rows, self.start_step, key=lambda row: row["step"]) :]
        return RuleInput(own, self._config, shorter(self._view.run.path))

    @functools.cached_property
    def _config(self) -> Mapping[str, Any]:
        """The attempt's configuration, which is written before its roles start; empty if it is damaged."""
        try:
            return self._view.config() or {}
        except DamagedFile:
            return {}

    def outcome(self) -> list[Finding]:
        """What kept this attempt from learning, with the numbers of all its steps."""
        return self._diagnosis.outcome(self._seen(self._view.metrics()))

    def account(self) -> str | None:
        """One line about what restarts have cost; None if there were none.

        The goodput of a short run is low even without problems, because starting takes most of its time.
        """
        costs = self._view.costs()
        restarts = sum(costs.restarts.values())
        if not restarts and not costs.recomputed_steps:
            return None
        recomputed = _count(costs.recomputed_steps, "step")
        return f"{_count(restarts, 'restart')}, {recomputed} recomputed, goodput {costs.goodput:.2f}"


class _Bar(Progress):
    """The progress bar, with lines below it, which go on in the next line where the terminal ends."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for line in self.note.splitlines() or [""]:
            yield Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _values(row: Row) -> str:
    names = {"reward/mean": "reward", "loss": "loss", "lr": "lr"}
    values = {label: number(row, key) for key, label in names.items()}
    shown = [f"{label} {value:.4g}" for label, value in values.items() if value is not None]
    if (seconds := number(row, "time/step")) is not None:
        wait = number(row, "time/wait") or 0.0
        waiting = f", {wait:.2f} of it waiting" if wait > WAITING * (wait + seconds) else ""
        shown.append(f"{seconds + wait:.2f} s/step{waiting}")
    for what in ("failed", "retried"):
        if count := number(row, f"rollouts/{what}"):
            shown.append(f"{what} {count:.0f}")
    return "  ".join(shown)
