"""A run in the terminal: what `watch` shows, and the lines of a command that has started the run.

Nothing is cut off: what is wider than the terminal goes on in the next line. Text from files is printed
literally.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cairn.run.output import counted, duration, printable
from cairn.watch.overview import Curve, Overview, scaled

BLOCKS = "▁▂▃▄▅▆▇█"
SPARKS = 24
"""Characters of a curve, at most."""
COLORS = {
    "running": "green",
    "stopping": "yellow",
    "done": "green",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
}
OTHER_LINES = 8
"""Lines of a run that are no curves and no roles, about."""
QUIET = 10.0
"""Seconds without a new step, and no more than three times a step's, that are not worth a word."""
WAITING = 0.1
"""Share of a step from which its wait for the batch is shown."""
WIDE = 100
"""Columns from which curves are twice as long."""


def spark(curve: Curve, width: int, *, plain: bool = False) -> str:
    """A curve as `width` characters or fewer: each the mean of as many steps, from the lowest to the highest.

    plain: for terminals without Unicode, the first and the newest value instead.
    """
    values = [value for _, value in curve.points if math.isfinite(value)]
    if len(values) < 2:
        return ""
    if plain:
        return f"{values[0]:.4g} -> {values[-1]:.4g}"
    count = min(width, len(values))
    bounds = [len(values) * place // count for place in range(count + 1)]
    # Halves, so that neither sums nor differences of very large values overflow.
    means = [
        sum(value / 2 / (last - first) for value in values[first:last]) for first, last in pairwise(bounds)
    ]
    low, high = scaled(means)
    if low < min(means):  # it is flat
        return BLOCKS[3] * count
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / (high - low) * top)] for value in means)


class RunPanel:
    """One run as rich shows it, in the width that there is.

    Args:
        name: the run's directory as the user knows it.
        notes: whether to show what is wrong.
    """

    def __init__(self, shown: Overview, name: str, *, notes: bool = True):
        self.shown = shown
        self.name = name
        self.notes = notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.shown
        plain = not options.encoding.lower().startswith("utf")
        yield _text(self._headline(), "bold")
        if shown.max_steps:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            done = min(shown.step, shown.max_steps)
            bar = ProgressBar(total=shown.max_steps, completed=done, width=min(30, options.max_width // 3))
            grid.add_row(bar, _text("  ".join(self._progress())))
            yield grid
        # A live view that is higher than the terminal can't be drawn again in its place.
        most = max(console.height - len(shown.roles) - OTHER_LINES, 3) if console.is_terminal else 1000
        for table in (self._curves(options.max_width, most, plain), self._roles()):
            if table.row_count:
                yield Padding(table, (0, 0, 0, 2), expand=False)
        for line in self._lines():
            yield Padding(_text(line), (0, 0, 0, 2), expand=False)
        if self.notes:
            for finding in shown.findings:
                yield _text(f"note: {finding}", "yellow")
        if shown.resume:
            yield _text(f"go on with: {shown.resume}")

    def _headline(self) -> str:
        shown = self.shown
        about = [shown.command] if shown.command else []
        state = shown.state
        if not shown.is_going_on and shown.age is not None:
            state = f"{state} {duration(shown.age)} ago"
        return "  ".join([self.name, *about, state])

    def _progress(self) -> Iterator[str]:
        shown = self.shown
        yield f"step {shown.step} of {shown.max_steps}"
        if shown.quiet is not None and shown.quiet > max(QUIET, 3 * (shown.pace or 0.0)):
            yield f"{'no step' if shown.pace else 'starting'} for {duration(shown.quiet)}"
        if shown.left is not None:
            yield f"{duration(shown.left)} left"
        if shown.pace is not None:
            wait = shown.shares.get("wait", 0.0)
            yield f"{shown.pace:.2f} s/step" + (f", {wait:.0%} of it waiting" if wait >= WAITING else "")
        if shown.tokens_per_second is not None:
            yield f"{shown.tokens_per_second:,.0f} learned tokens/s"
        if shown.mfu is not None:
            yield f"MFU {shown.mfu:.1%}" + (f", attention {shown.attention}" if shown.attention else "")

    def _curves(self, width: int, most: int, plain: bool) -> Table:
        table = Table.grid(padding=(0, 2))
        labels = max((len(curve.label) for curve in self.shown.curves), default=0)
        table.add_column(overflow="fold", min_width=min(labels, width // 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for curve in self.shown.curves[:most]:
            sparks = spark(curve, SPARKS * (2 if width >= WIDE else 1), plain=plain)
            table.add_row(_text(curve.label), f"{curve.newest:.4g}", sparks)
        if (more := len(self.shown.curves) - most) > 0:
            table.add_row(f"and {more} more", "", "")
        return table

    def _roles(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for role in self.shown.roles:
            table.add_row(_text(role.name), _text(role.says))
        return table

    def _lines(self) -> Iterator[str]:
        shown, saved = self.shown, self.shown.saved
        if saved is not None:
            age = "" if saved.age is None else f", {duration(saved.age)} ago"
            yield f"checkpoint  step {saved.step}{age}, {saved.nbytes / 1e6:,.1f} MB"
        if shown.restarts or shown.recomputed:
            yield (
                f"restarts    {shown.restarts}, {counted(shown.recomputed, 'step')} recomputed, goodput "
                f"{shown.goodput:.2f}"
            )


def _text(text: str, style: str = "") -> Text:
    """Literal text that goes on in the next line where the terminal ends."""
    return Text(printable(text), style=style, overflow="fold")


def print_panels(console: Console, panels: Sequence[RunPanel]) -> None:
    """Print runs one below the other."""
    for place, panel in enumerate(panels):
        if place:
            console.print()
        console.print(panel)
