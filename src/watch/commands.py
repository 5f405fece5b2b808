"""The commands `runs`, `watch` and `diagnose`: they only read, also a run that is going on."""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, write_atomic
from cairn.run.output import duration, printable
from cairn.run.spans import chrome_trace, phases_of, read
from cairn.run.tables import print_table
from cairn.run.view import RunView
from cairn.watch.goodput import MEANING, ORDER, TimeAccount, sentence, time_account
from cairn.watch.overview import Overview, overview

DEPTH = 4
"""Folders below the given one in which runs are looked for."""
INTERVAL = 1.0
"""Seconds between two looks of `watch`."""
PHASES = 5
"""Kinds of work of a role that `diagnose` shows, those that took longest."""
SHARE = 20
"""As many times as long as a look itself takes is the wait for the next one, at least."""
WRONG = 1
"""Exit code of `diagnose` if something is wrong with the run."""


def runs() -> int:
    """`runs [FOLDER]`: all runs below a folder."""
    parser = argparse.ArgumentParser(
        prog="runs",
        description="List the runs below a folder: state, step, newest metric, age, and how each goes on.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), metavar="FOLDER",
                        help="where to look (default: outputs)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(sys.argv[1:])
    if not arguments.folder.is_dir():
        raise UsageError(
            f"{arguments.folder}: there is no such folder; give one that holds output directories"
        )
    found = [(path, _look(path)) for path in find_runs(arguments.folder)]
    found.sort(
        key=lambda one: one[1].age if isinstance(one[1], Overview) and one[1].age is not None else 1e12
    )
    if arguments.json:
        print(json.dumps([_as_json(path, shown) for path, shown in found], indent=2))
        return 0
    if not found:
        print(f"there is no run in {printable(arguments.folder)} or the folders below it")
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


def find_runs(folder: Path) -> list[Path]:
    """The run directories in a folder, itself included, down to `DEPTH` folders below it, in order of names.

    Links are not followed, and what lies in a run is not looked at.
    """
    found: list[Path] = []

    def search(here: Path, depth: int) -> None:
        if is_run(here):
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


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    run = RunDirectory(path)
    names = (run.roles, run.metrics.path, run.history.path)
    return any(name.is_file() for name in names)


def _look(path: Path) -> Overview | DamagedFile:
    try:
        return overview(RunView(path), here=str(path))
    except DamagedFile as error:
        return error


def _cells(path: Path, shown: Overview | DamagedFile) -> list[object]:
    if isinstance(shown, DamagedFile):
        return [path, "", "damaged", "", "", "", shown]
    step = f"{shown.step}/{shown.max_steps}" if shown.max_steps else shown.step
    newest = "  ".join(f"{curve.label} {curve.newest:.4g}" for curve in shown.curves[:1])
    seen = "" if shown.age is None else f"{duration(shown.age)} ago"
    wrong = ", ".join(dict.fromkeys(finding.rule for finding in shown.findings))
    return [path, shown.command or "", shown.state, step, newest, seen, wrong]


def _as_json(path: Path, shown: Overview | DamagedFile) -> dict[str, Any]:
    if isinstance(shown, DamagedFile):
        return {"path": str(path), "damaged": str(shown)}
    content = dataclasses.asdict(shown)
    for curve in content["curves"]:
        curve["newest"] = curve["points"][-1][1]
        del curve["points"]
    return {**content, "path": str(path)}


def diagnose() -> int:
    """`diagnose RUN`: what keeps a run from learning, and where its time goes."""
    parser = argparse.ArgumentParser(
        prog="diagnose",
        description="Say what keeps a run from learning and where its time goes, each with its numbers and "
        f"what to do. Exit code {WRONG} if something is found.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's --output-dir")
    parser.add_argument("--json", action="store_true", help="print JSON")
    trace = "also write what each role did when, for Perfetto or chrome://tracing"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    price = "price of an hour of the run's machines, in any unit: the account is in money, too"
    parser.add_argument("--price", type=_price, metavar="X", help=price)
    arguments = parser.parse_args(sys.argv[1:])
    view = _view(arguments.run)
    shown = overview(view, here=str(arguments.run))
    account = time_account(view.metrics(), view.history(), view.costs())
    if arguments.trace is not None:
        write_atomic(arguments.trace, json.dumps(chrome_trace(read(view.run.spans))).encode())
    if arguments.json:
        found = [dataclasses.asdict(finding) for finding in shown.findings]
        money = {} if arguments.price is None else {"price": account.price(arguments.price)}
        times = {"seconds": account.seconds, "idle": account.idle, "ettr": account.ettr, **money}
        print(json.dumps({"findings": found, "time": times}, indent=2))
        return WRONG if shown.findings else 0
    of = f" of {shown.max_steps}" if shown.max_steps else ""
    print(f"{printable(arguments.run)}: {shown.command or 'run'}, {shown.state}, step {shown.step}{of}")
    for number, finding in enumerate(shown.findings, start=1):
        print(f"\n{number}. {printable(finding.what)}.\n   {printable(finding.advice)}.")
    if not shown.findings:
        from cairn.run.diagnosis import RULES

        print(f"nothing is wrong by any of the {len(RULES)} rules (docs/watching.md lists them)")
    print()
    if shown.pace is not None:
        wait = shown.shares["wait"]
        print(f"a step takes {shown.pace:.3g} s: the trainer computes {1 - wait:.0%} of it, waits {wait:.0%}")
    print(f"{sentence(account)}; {shown.restarts} restarts, {shown.recomputed} steps recomputed\n")
    print_account(account, arguments.price)
    print_phases(view.run)
    return WRONG if shown.findings else 0


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price: a number from 0 on")
    return value


def print_account(account: TimeAccount, price: float | None) -> None:
    """What became of the run's time, and what that has cost at `price` an hour."""
    money = account.price(price) if price is not None else {}
    rows = [
        [kind, duration(account.seconds[kind]), f"{account.seconds[kind] / account.wall:.0%}",
         *([f"{money[kind]:,.2f}"] if money else []), MEANING[kind]]
        for kind in ORDER
        if account.wall > 0
    ]  # fmt: skip
    print_table(["time", "how long", "share", *(["price"] if money else []), "what it is"], rows)
    if account.idle >= 1:
        print(f"and for {duration(account.idle)} between attempts nobody was at work on it")


def print_phases(run: RunDirectory) -> None:
    """Where the time of each role's main thread went, by its spans; nothing if there are none."""
    rows: list[list[object]] = []
    for role, phases in phases_of(read(run.spans)).items():
        whole = max(sum(phases.values()), 1e-9)
        for name, seconds in sorted(phases.items(), key=lambda item: -item[1])[:PHASES]:
            rows.append([role, name, duration(seconds), f"{seconds / whole:.0%}"])
    if rows:
        print()
        print_table(["role", "what it did", "time", "share"], rows)


def _view(path: Path) -> RunView:
    """The view of a run.

    Raises:
        UsageError: there is none at `path`.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder; give the run's --output-dir")
    if not is_run(path):
        below = find_runs(path)
        hint = f"; `runs {path}` lists the {len(below)} below it" if below else ""
        raise UsageError(
            f"{path}: is not a run directory: it has no roles.json, metrics.jsonl or history.jsonl{hint}"
        )
    return RunView(path)


def watch() -> int:
    """`watch RUN`: a live view of a run, until it ends or Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="watch",
        description="Watch a run: how far it is, its curves, what each role does, its checkpoints and what "
        "is wrong. Ctrl-C leaves the run alone. Without a terminal it prints a line for each new step.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's --output-dir")
    parser.add_argument("--once", action="store_true", help="print the state of this moment, and end")
    arguments = parser.parse_args(sys.argv[1:])
    view, name = _view(arguments.run), str(arguments.run)

    from rich.console import Console
    from rich.live import Live

    from cairn.watch.terminal import RunPanel

    console = Console(highlight=False)
    first = overview(view, here=name)
    if arguments.once or _is_over(first):
        console.print(RunPanel(first, name))
        return 0
    if not console.is_terminal:
        return _follow(view, name)
    try:
        with Live(
            RunPanel(first, name), console=console, auto_refresh=False, vertical_overflow="visible"
        ) as live:
            while not _is_over(shown := overview(view, here=name)):
                live.update(RunPanel(shown, name), refresh=True)
                _wait(shown)
            live.update(RunPanel(shown, name), refresh=True)
    except KeyboardInterrupt:
        print("the run goes on; `watch` only looked", flush=True)
    return 0


def _wait(shown: Overview) -> None:
    """Until the next look; looking takes no more than a twentieth of a core, however long the run is."""
    time.sleep(max(INTERVAL, SHARE * shown.seconds))


def _is_over(shown: Overview) -> bool:
    return shown.state not in ("running", "stopping")


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
        if _is_over(shown):
            print(f"{name}: {shown.state} at step {shown.step}", flush=True)
            return 0
        _wait(shown)


def report() -> int:
    """`report RUN`: a run as one HTML file, and its curves as PNG files."""
    parser = argparse.ArgumentParser(
        prog="report",
        description="Write a run as one HTML file that needs nothing else: what is wrong, curves, time, "
        "checkpoints, evaluations and answers.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's --output-dir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file (default: NAME.html, here)")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also each curve as a PNG file, there")
    arguments = parser.parse_args(sys.argv[1:])
    view, name = _view(arguments.run), str(arguments.run)
    target = arguments.out or Path(f"{view.run.path.name}.html")
    from cairn.watch import report as pages

    write_atomic(target, pages.report(view, name).encode())
    print(target)
    if arguments.png is not None:
        for path in pages.draw_pngs(overview(view, here=name, rules=()).curves, arguments.png):
            print(path)
    return 0
