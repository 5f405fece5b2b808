"""The display of a running command: a live view of the run, or plain lines without a terminal."""

import functools
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from cairn.launch.exit_report import shorter
from cairn.run.diagnosis import RULES, Diagnosis, DiskRoom, Finding, RuleInput
from cairn.run.directory import RunDirectory
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import Row
from cairn.run.metrics import number
from cairn.run.output import counted, printable
from cairn.run.signals import say
from cairn.run.view import RunView
from cairn.watch.overview import disk_room, newest_save, overview, values_of
from cairn.watch.terminal import WAITING, RunPanel

QUIET_SECONDS = 10.0
"""Without a new step for this long, the display says what each role is doing."""
LINE_SECONDS = 10.0
"""Seconds between two such lines without a terminal."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the whole run, at a terminal."""
DISK_SECONDS = 10.0
"""Seconds between two looks at the disk."""


class StepDisplay:
    """Follows metrics.jsonl, history.jsonl and the roles' heartbeats; call `update` regularly."""

    def __init__(self, run: RunDirectory, start_step: int, max_steps: int, console: Console | None = None):
        self._view = RunView(run.path)
        earlier = self._view.history()
        self._events_seen = len(earlier)
        self._row: Row | None = None
        self.max_steps = max_steps
        self.step = start_step
        """The newest step that was shown."""
        self.start_step = start_step
        self.console = console or Console()
        self._moved_at = self._printed_at = self._looked_at = time.monotonic()
        self._look_after = 0.0
        self._unprinted: Row | None = None
        self._disk_at = 0.0
        self._room: DiskRoom | None = None
        self._diagnosis = Diagnosis(RULES, earlier)
        changes = [event["step"] for event in earlier if event["event"] == "change"]
        self._changed_at = changes[-1] if changes else 0
        """The step after which the run has its present settings."""
        self._unsaid: list[str] = []
        self._live = False
        self._live_view = Live(
            self._panel(), console=self.console, auto_refresh=False, vertical_overflow="visible"
        )

    def __enter__(self) -> "StepDisplay":
        if self.console.is_terminal:
            self._live_view.start()
        self._live = True
        return self

    def __exit__(self, *_: object) -> None:
        self._live = False  # what is said from now on comes after the live view
        self.update(final=True)
        self._live_view.stop()

    def say(self, line: str) -> None:
        """Have a line printed above the live view, which it would tear; signal handlers may call this."""
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
            elif event["event"] == "not_sent":
                text = f"warning: the sink {event['sink']} gets nothing for now: {event['reason']}"
                self.console.print(printable(text), markup=False, soft_wrap=True)
        self._events_seen = len(events)
        now = time.monotonic()
        rows = self._view.metrics()
        row = rows[-1] if rows else None
        if row is not None and row is not self._row and row["step"] > self.start_step:
            self._row = self._unprinted = row
            self.step = row["step"]
            self._moved_at = now
            for finding in self._diagnosis.news(self._seen(rows)):
                self.console.print(f"note: {finding}", markup=False, highlight=False, soft_wrap=True)
                found = finding.rule, finding.level, finding.what, finding.advice
                self._view.run.history.diagnosed(self.step, *found)
        if self.console.is_terminal:
            if final or now - self._looked_at >= self._look_after:
                self._looked_at = now
                self._live_view.update(self._panel(), refresh=self._live_view.is_started)
        elif (row := self._unprinted) and (final or now - self._printed_at > 2):
            values = "  ".join(self._values(row))
            self._print(f"step {row['step']}/{self.max_steps}  {values}", now)
            self._unprinted = None
        elif not final:
            self._print_wait(now)

    def _panel(self) -> RunPanel:
        """The whole run at this moment."""
        shown = overview(self._view, rules=())  # news of what is wrong is printed above
        self._look_after = shown.pause(LOOK_SECONDS)
        return RunPanel(shown, shorter(self._view.run.path))

    def _print_wait(self, now: float) -> None:
        """Say what the roles are doing, before the first step and when no step has come for a while."""
        quiet = now - self._moved_at
        if now - self._looked_at < 1 or (self.step > self.start_step and quiet < QUIET_SECONDS):
            return
        self._looked_at = now
        if now - self._printed_at > LINE_SECONDS:
            roles = overview(self._view, rules=()).roles
            doing = [f"{role.name}: {role.says}" for role in roles if role.doing is not None]
            still = "starting" if self.step == self.start_step else "no step"
            what = "; ".join(doing) or "roles are being started"
            self._print(f"{still} for {quiet:.0f} s: {what}", now)

    def _values(self, row: Row) -> Iterator[str]:
        """The values of a step, as its line shows them."""
        attempt = self._view.run.attempt()
        yield from values_of(attempt.command if attempt else None, row)
        if (rate := number(row, "lr")) is not None:
            yield f"lr {rate:.4g}"
        if (seconds := number(row, "time/step")) is not None:
            wait = number(row, "time/wait") or 0.0
            waiting = f", {wait:.2f} of it waiting" if wait > WAITING * (wait + seconds) else ""
            yield f"{seconds + wait:.2f} s/step{waiting}"
        for what in ("failed", "retried"):
            if count := number(row, f"rollouts/{what}"):
                yield f"{what} {count:.0f}"

    def _print(self, line: str, now: float) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.console.file.flush()
        self._printed_at = now

    def _seen(self, rows: Sequence[Row]) -> RuleInput:
        """What is known of the steps with the present settings."""
        own = rows[bisect_right(rows, self._changed_at, key=lambda row: row["step"]) :]
        return RuleInput(own, self._config, shorter(self._view.run.path), self._disk())

    def _disk(self) -> DiskRoom | None:
        """The disk of the checkpoints, looked at now and then."""
        now = time.monotonic()
        if now - self._disk_at >= DISK_SECONDS:
            self._disk_at, checkpoints = now, self._view.checkpoints()
            self._room = disk_room(checkpoints, newest_save(checkpoints))
        return self._room

    @functools.cached_property
    def _config(self) -> Mapping[str, Any]:
        """The attempt's configuration, which is written before its roles start; empty if it is damaged."""
        try:
            return self._view.config() or {}
        except DamagedFile:
            return {}

    def outcome(self) -> list[Finding]:
        """What kept the run from learning, with the numbers of all steps with the present settings."""
        return self._diagnosis.outcome(self._seen(self._view.metrics()))

    def account(self) -> str | None:
        """One line about what restarts have cost; None if there were none.

        The goodput of a short run is low even without problems, because starting takes most of its time.
        """
        costs = self._view.costs()
        restarts = sum(costs.restarts.values())
        if not restarts and not costs.recomputed_steps:
            return None
        recomputed = counted(costs.recomputed_steps, "step")
        return f"{counted(restarts, 'restart')}, {recomputed} recomputed, goodput {costs.goodput:.2f}"
