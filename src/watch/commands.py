"""The commands `runs`, `watch`, `diagnose` and `report`: they only read, also a run that is going on."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pydantic import Field

from cairn.config.shared import Place, ToolCommand
from cairn.run.diagnosis import RULES
from cairn.run.directory import NO_RUN
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, write_atomic
from cairn.run.output import counted, duration, printable
from cairn.run.spans import chrome_trace
from cairn.run.tables import print_table
from cairn.run.view import RunView
from cairn.watch.goodput import (
    TimeAccount,
    TokenAccount,
    account_rows,
    phase_rows,
    sentence,
    time_account,
    token_rows,
    token_sentence,
    tokens_of,
)
from cairn.watch.overview import Overview, overview

DEPTH = 4
"""Folders below the given one in which runs are looked for."""
INTERVAL = 1.0
"""Seconds between two looks of `watch`."""
WRONG = 1
"""Exit code of `diagnose` if something is wrong with the run."""


class ListRuns(ToolCommand):
    """List the runs below a folder: state, step, newest metric, age, what is wrong, and how each goes on."""

    command = "runs"
    positional = ("folder",)
    folder: Place = Path("outputs")
    """Where to look; of a URL, itself and the folders directly below it."""

    def execute(self) -> int:
        with runs_in(self.folder) as runs:
            found = [(name, _look(view, name)) for name, view in runs.items()]
        found.sort(key=lambda one: _age(one[1]))
        if self.as_json:
            print(json.dumps([_as_json(path, shown) for path, shown in found], indent=2))
            return 0
        if not found:
            print(f"there is no run in {printable(self.folder)} or the folders below it")
            return 0
        print_table(
            ["run", "command", "state", "step", "newest", "seen", "wrong"],
            [_cells(path, shown) for path, shown in found],
        )
        going_on = [shown.resume for _, shown in found if isinstance(shown, Overview) and shown.resume]
        if going_on:
            print("\nto go on with those that have not reached their last step:")
            for command in going_on:
                print(f"  {printable(command)}")
        return 0


def _age(shown: Overview | DamagedFile) -> float:
    """How long ago a run was last seen; those of which it is not known come last."""
    return shown.age if isinstance(shown, Overview) and shown.age is not None else math.inf


def find_runs(folder: Path) -> list[Path]:
    """The run directories in a folder, itself included, down to `DEPTH` folders below it, in order of names.

    Links are not followed, and what lies in a run is not looked at.
    """
    found: list[Path] = []

    def search(here: Path, depth: int) -> None:
        if RunView(here).run.exists():
            found.append(here)
            return
        if depth == DEPTH:
            return
        try:
            with os.scandir(here) as entries:
                below = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for name in below:
            search(here / name, depth + 1)

    search(folder, 0)
    return found


@contextlib.contextmanager
def runs_in(place: Path | str) -> Generator[dict[str, RunView]]:
    """The runs in a folder, or at a URL, by their names.

    Raises:
        UsageError: there is no such folder, or the URL can't be used.
        RemoteError: the object store refuses or fails.
    """
    if isinstance(place, str):
        from cairn.remote.remote_runs import mirrored  # takes a while to import

        with mirrored(place) as there:
            yield {str(one): one.view() for one in there.runs.values()}
        return
    if not place.is_dir():
        raise UsageError(f"{place}: there is no such folder; give one that holds output directories")
    yield {str(path): RunView(path) for path in find_runs(place)}


def _look(view: RunView, name: str) -> Overview | DamagedFile:
    try:
        return overview(view, here=name)
    except DamagedFile as error:
        return error


def _cells(path: str, shown: Overview | DamagedFile) -> list[object]:
    if isinstance(shown, DamagedFile):
        return [path, "", "damaged", "", "", "", shown]
    step = f"{shown.step}/{shown.max_steps}" if shown.max_steps else shown.step
    newest = "  ".join(f"{curve.label} {curve.newest:.4g}" for curve in shown.curves[:1])
    seen = "" if shown.age is None else f"{duration(shown.age)} ago"
    wrong = ", ".join(dict.fromkeys(finding.rule for finding in shown.findings))
    return [path, shown.command or "", shown.state, step, newest, seen, wrong]


def _as_json(path: str, shown: Overview | DamagedFile) -> dict[str, Any]:
    if isinstance(shown, DamagedFile):
        return {"path": path, "damaged": str(shown)}
    content = dataclasses.asdict(shown)
    for curve in content["curves"]:
        curve["newest"] = curve["points"][-1][1]
        del curve["points"]
    return {**content, "path": path}


class LooksAtRun(ToolCommand):
    """A command that looks at one run."""

    positional = ("run",)
    run: Place
    """The run's --output-dir; or the URL that it has as --ckpt.remote, for what was uploaded last."""

    def execute(self) -> int:
        if isinstance(self.run, Path):
            return self.look(_view(self.run), str(self.run))
        from cairn.remote.remote_runs import remote_view  # takes a while to import

        with remote_view(self.run) as view:
            return self.look(view, self.run)

    def look(self, view: RunView, name: str) -> int:
        """Look at the run, which the user calls `name`; returns the exit code."""
        raise NotImplementedError


class DiagnoseRun(LooksAtRun):
    """Say what keeps a run from learning and where its time goes, each with its numbers and what to do.

    The exit code is 1 if something is found.
    """

    command = "diagnose"
    trace: Path | None = None
    """Also write what each role did when to this file, for Perfetto or chrome://tracing."""
    price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The price of an hour of the run's machines, in any unit: the account is in money, too."""

    def look(self, view: RunView, name: str) -> int:
        shown = overview(view, here=name)
        account = time_account(view.metrics(), view.history(), view.costs())
        tokens = tokens_of(view)
        if self.trace is not None:
            write_atomic(self.trace, json.dumps(chrome_trace(view.spans())).encode())
        if self.as_json:
            found = [dataclasses.asdict(finding) for finding in shown.findings]
            money = {} if self.price is None else {"price": account.price(self.price)}
            times = {"seconds": account.seconds, "idle": account.idle, "ettr": account.ettr, **money}
            of_tokens = {"tokens": tokens.tokens, "total": tokens.total}
            of_tokens |= {} if self.price is None else {"price": tokens.price(account.cost(self.price))}
            print(json.dumps({"findings": found, "time": times, "tokens": of_tokens}, indent=2))
            return WRONG if shown.findings else 0
        of = f" of {shown.max_steps}" if shown.max_steps else ""
        print(f"{printable(name)}: {shown.command or 'run'}, {shown.state}, step {shown.step}{of}")
        for number, finding in enumerate(shown.findings, start=1):
            print(f"\n{number}. {printable(finding.what)}.\n   {printable(finding.advice)}.")
        if not shown.findings:
            print(f"nothing is wrong by any of the {len(RULES)} rules (docs/how-to/watching.md lists them)")
        print()
        if shown.pace is not None:
            wait = shown.shares["wait"]
            computes = f"the trainer computes {1 - wait:.0%} of it, waits {wait:.0%}"
            print(f"a step takes {shown.pace:.3g} s: {computes}")
        restarts = f"{counted(shown.restarts, 'restart')}, {counted(shown.recomputed, 'step')} recomputed"
        print(f"{sentence(account)}; {restarts}\n")
        print_account(account, self.price)
        whole = None if self.price is None else account.cost(self.price)
        print(f"\n{token_sentence(tokens, whole)}\n")
        print_tokens(tokens, whole)
        if rows := phase_rows(view.spans()):
            print()
            print_table(["role", "what it did", "time", "share"], rows)
        return WRONG if shown.findings else 0


def print_account(account: TimeAccount, price: float | None) -> None:
    """What became of the run's time, and what that has cost at `price` an hour."""
    rows = account_rows(account)
    if price is not None:
        money = account.price(price)
        rows = [[kind, time, share, f"{money[kind]:,.2f}", what] for kind, time, share, what in rows]
    print_table(["time", "how long", "share", *(["price"] if price is not None else []), "what it is"], rows)
    if account.idle >= 1:
        print(f"and for {duration(account.idle)} between attempts nobody was at work on it")


def print_tokens(account: TokenAccount, whole: float | None) -> None:
    """What became of the run's tokens, and what they have cost if the whole run has cost so much."""
    rows, money = token_rows(account), account.price(whole or 0.0)
    if whole is not None:
        rows = [[fate, count, share, f"{money[fate]:,.2f}", what] for fate, count, share, what in rows]
    if rows:
        columns = ["tokens", "how many", "share", *(["price"] if whole is not None else []), "what it is"]
        print_table(columns, rows)


def _view(path: Path) -> RunView:
    """The view of a run.

    Raises:
        UsageError: there is none at `path`.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder; give the run's --output-dir")
    view = RunView(path)
    if not view.run.exists():
        below = find_runs(path)
        hint = f"; `runs {path}` lists the {len(below)} below it" if below else ""
        raise UsageError(f"{path}: {NO_RUN}{hint}")
    return view


class WatchRun(LooksAtRun):
    """Watch a run: how far it is, its curves, what each role does, its checkpoints and what is wrong.

    Ctrl-C leaves the run alone. Without a terminal, a line is printed for each new step.
    """

    command = "watch"
    once: bool = False
    """Print the state of this moment, and end."""

    def look(self, view: RunView, name: str) -> int:
        first = overview(view, here=name)
        if self.as_json:
            print(json.dumps(_as_json(name, first), indent=2))
            return 0

        from rich.console import Console  # takes a while to import
        from rich.live import Live

        from cairn.watch.terminal import RunPanel

        console = Console(highlight=False)
        if self.once or not first.is_going_on:
            console.print(RunPanel(first, name))
            return 0
        if not console.is_terminal:
            return _follow(view, name)
        try:
            with Live(
                RunPanel(first, name), console=console, auto_refresh=False, vertical_overflow="visible"
            ) as live:
                while (shown := overview(view, here=name)).is_going_on:
                    live.update(RunPanel(shown, name), refresh=True)
                    time.sleep(shown.pause(INTERVAL))
                live.update(RunPanel(shown, name), refresh=True)
        except KeyboardInterrupt:
            print("the run goes on; `watch` only looked", flush=True)
        return 0


def _follow(view: RunView, name: str) -> int:
    """Print a line for each new step and finding, until the run is over."""
    step, told = -1, set[tuple[str, int]]()
    while True:
        shown = overview(view, here=name)
        if shown.step != step:
            step = shown.step
            values = "  ".join(f"{curve.label} {curve.newest:.4g}" for curve in shown.curves)
            print(f"step {step}{f'/{shown.max_steps}' if shown.max_steps else ''}  {values}", flush=True)
        for finding in shown.findings:
            if (finding.rule, finding.level) not in told:
                told.add((finding.rule, finding.level))
                print(f"note: {printable(finding)}", flush=True)
        if not shown.is_going_on:
            print(f"{name}: {shown.state} at step {shown.step}", flush=True)
            return 0
        time.sleep(shown.pause(INTERVAL))


class WriteReport(LooksAtRun):
    """Write a run as one HTML file that needs nothing else: what is wrong, curves, time, steps, answers."""

    command = "report"
    out: Path | None = None
    """The file (default: NAME.html, here)."""
    png: Path | None = None
    """Also write each curve as a PNG file into this folder."""

    def look(self, view: RunView, name: str) -> int:
        from cairn.watch.report import draw_pngs, report

        written = [self.out or Path(f"{Path(name).name or view.run.path.name}.html")]
        write_atomic(written[0], report(view, name).encode())
        if self.png is not None:
            written += draw_pngs(overview(view, here=name, rules=()).curves, self.png)
        print(json.dumps([str(path) for path in written]) if self.as_json else "\n".join(map(str, written)))
        return 0


COMMANDS: dict[str, type[ToolCommand]] = {
    each.command: each for each in (ListRuns, WatchRun, DiagnoseRun, WriteReport)
}
