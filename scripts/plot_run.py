"""A table and a plot of runs: uv run python scripts/plot_run.py RUN_DIR... [--metric NAME...] [--png FILE]

Reads metrics.jsonl, evals.jsonl and the checkpoints' manifests. A run that was stopped and resumed has a row
for each part, and a line in the plot where it was resumed. The losses of validations are drawn beside the
training loss, and the rewards of evaluations beside the mean reward.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import cairn
from cairn.run.metrics import number
from cairn.run.tables import print_table

MAIN = ("reward/mean", "loss")
"""What is shown of a run unless --metric says otherwise: the first that it has."""
LABELS = {"reward/mean": "mean reward"}
INK, LINE, MARK = "#333333", "#2a6f97", "#c1440e"
OTHERS = ("#2a9d8f", "#8a5a9e", "#b08900", "#555555")
"""Colours of validations and evaluations."""


class Curve:
    """The data of a run: rows of metrics, steps with a checkpoint, and steps where it was resumed."""

    def __init__(self, path: Path):
        run = cairn.Run(path)
        self.name = path.name
        self.rows = run.snapshot().metrics
        self.evals: list[Mapping[str, Any]] = run.evals.to_dict("records")
        manifests = {step.number: step.manifest for step in run.steps}
        attempts = {step: manifest.attempt for step, manifest in manifests.items()}
        parents = {step: m.parent.step if m.parent else 0 for step, m in manifests.items()}
        self.saved = sorted(attempts)
        self.resumed = sorted({p for s, p in parents.items() if p in attempts and attempts[p] < attempts[s]})

    def parts(self) -> list[list[dict]]:
        """The rows, split where the run was resumed."""
        edges = pairwise([0, *self.resumed, self.rows[-1]["step"]])
        return [[row for row in self.rows if low < row["step"] <= high] for low, high in edges]

    def seconds(self, part: int) -> float | None:
        """From the start of the command to the last step of this part; waits in between are not in it."""
        ends = [number(rows[-1], "run/wall_seconds") for rows in self.parts()[: part + 1]]
        now, before = ends[-1], ends[-2] if part else 0.0
        return None if now is None or before is None else now - before

    def metrics(self) -> list[str]:
        """Every metric of the run that is a number in some step, by name."""
        names = {key for row in self.rows for key in row if number(row, key) is not None}
        return sorted(names - {"step"}) + sorted(self._scored())

    def points(self, metric: str) -> list[tuple[int, float]]:
        """Steps and values of a metric; steps in which it is no finite number are left out."""
        if metric in self._scored():
            name, _, key = metric.partition("/")[2].rpartition("/")
            rows = [row for row in self.evals if row["name"] == name]
        else:
            rows, key = self.rows, metric
        found = ((row["step"], number(dict(row), key)) for row in rows)
        return [(step, value) for step, value in found if value is not None and math.isfinite(value)]

    def beside(self, metric: str) -> list[str]:
        """Validations and evaluations that measure the same as a metric of training."""
        if metric == "loss":
            return [name for name in self._scored() if name.endswith("/loss")]
        if metric == "reward/mean":
            return [name for name in self._scored() if name.endswith("/reward")]
        return []

    def main(self) -> str:
        """The metric to show: reward for RL, loss for SFT."""
        return next((key for key in MAIN if self.points(key)), "loss")

    def _scored(self) -> dict[str, None]:
        """The names of validations' losses and evaluations' rewards."""
        found: dict[str, None] = {}
        for row in self.evals:
            for key, what in (("loss", "validation"), ("reward", "eval")):
                if number(dict(row), key) is not None:
                    found[f"{what}/{row['name']}/{key}"] = None
        return found


def ends(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The means over the first and the last three values."""
    values = [value for _, value in points]
    few = min(3, len(values))
    return sum(values[:few]) / few, sum(values[-few:]) / few


def table(runs: list[Curve], metrics: Sequence[str]) -> None:
    """Print a row for each part of each run, with the metrics that were asked for, or each run's own."""
    shown = list(metrics or dict.fromkeys(run.main() for run in runs))
    rows = []
    for run in runs:
        for i, part in enumerate(run.parts()):
            first, last = part[0]["step"], part[-1]["step"]
            cells = []
            for metric in shown:
                here = [(step, value) for step, value in run.points(metric) if first <= step <= last]
                mine = here and (metrics or metric == run.main())
                cells.append("{:.3f} → {:.3f}".format(*ends(here)) if mine else "")
            saved = ", ".join(f"step_{step}" for step in run.saved if first <= step <= last)
            seconds = run.seconds(i)
            rows.append(
                [
                    f"{run.name}, resumed" if i else run.name,
                    f"{first}-{last}",
                    *cells,
                    saved,
                    "" if seconds is None else f"{seconds:.0f}",
                ]
            )
    print("first → last: means over three steps; seconds: from the command's start to the last step")
    print_table(["run", "steps", *(LABELS.get(name, name) for name in shown), "saved", "seconds"], rows)


def draw(axes: Axes, run: Curve, metric: str) -> None:
    """Draw a metric of a run: each step, a running mean, validations, and where the run was resumed."""
    points = run.points(metric)
    steps, values = [step for step, _ in points], [value for _, value in points]
    reach = max(1, len(values) // 40)
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    means = [sum(some) / len(some) for some in around]
    axes.plot(steps, values, "o", ms=4 if len(steps) < 50 else 2, color=LINE, alpha=0.4, label="each step")
    axes.plot(steps, means, color=LINE, lw=2, label=f"mean of {2 * reach + 1}")
    for i, name in enumerate(run.beside(metric)):
        there = run.points(name)
        color = OTHERS[i % len(OTHERS)]
        axes.plot(*zip(*there, strict=True), "o-", ms=4, lw=1.5, color=color, label=name.rpartition("/")[0])
    for i, step in enumerate(run.resumed):
        axes.axvline(step + 0.5, color=MARK, ls="--", lw=1.2, label=None if i else "stopped, resumed")
    title = f"{run.name}: {LABELS.get(metric, metric)}"
    if points:
        first, last = ends(points)
        title += f" {first:.3g} → {last:.3g}"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02, y=0.08)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def figure(runs: list[Curve], metrics: Sequence[str] = ()) -> Figure:
    """A column of panels per run, one for each metric, with the legends below so that they cover no curve."""
    lines = max(1, len(metrics))
    size = (5.2 * len(runs), 3.8 * lines)
    drawn, panels = pyplot.subplots(lines, len(runs), figsize=size, squeeze=False, layout="constrained")
    for column, run in enumerate(runs):
        for line, metric in enumerate(metrics or [run.main()]):
            axes = panels[line][column]
            draw(axes, run, metric)
            axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--png", type=Path, help="file for the plot; without it, only the table is printed")
    parser.add_argument(
        "--metric",
        nargs="+",
        default=[],
        metavar="NAME",
        help="metrics to show (default: the mean reward of RL, else the loss); `list` prints their names",
    )
    options = parser.parse_args()
    for path in options.runs:
        if not (path / "metrics.jsonl").exists():
            parser.error(f"{path}: there is no metrics.jsonl in it")
    runs = [Curve(path) for path in options.runs]
    for run in runs:
        if not run.rows:
            parser.error(f"{run.name}: no step has been taken yet")
    known = sorted({name for run in runs for name in run.metrics()})
    if options.metric == ["list"]:
        print(*known, sep="\n")
        return
    for name in options.metric:
        if name not in known:
            parser.error(f"--metric {name}: no run has it; --metric list prints those that there are")
    table(runs, options.metric)
    if options.png:
        drawn = figure(runs, options.metric)
        options.png.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(options.png, dpi=150)
        print(f"plot: {options.png}")


if __name__ == "__main__":
    main()
