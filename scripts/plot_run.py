"""A table and a plot of runs: uv run python scripts/plot_run.py RUN_DIR... [--png FILE]

Reads metrics.jsonl and the checkpoints' manifests. A run that was stopped and resumed has one row for each
part, and a line in the plot where it was resumed.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

import cairn

LABELS = {"reward/mean": "mean reward", "loss": "loss"}
INK, LINE, MARK = "#333333", "#2a6f97", "#c1440e"


class Curve:
    """The data of a run's panel: rows of metrics, steps with a checkpoint, and steps where it was resumed."""

    def __init__(self, path: Path):
        run = cairn.Run(path)
        self.name = path.name
        self.rows = run.snapshot().metrics
        manifests = {step.number: step.manifest for step in run.steps}
        attempts = {step: manifest.attempt for step, manifest in manifests.items()}
        parents = {step: m.parent.step if m.parent else 0 for step, m in manifests.items()}
        self.saved = sorted(attempts)
        self.resumed = sorted({p for s, p in parents.items() if p in attempts and attempts[p] < attempts[s]})

    def parts(self) -> list[list[dict]]:
        """The rows, split where the run was resumed."""
        edges = pairwise([0, *self.resumed, self.rows[-1]["step"]])
        return [[row for row in self.rows if low < row["step"] <= high] for low, high in edges]

    @property
    def key(self) -> str:
        """The metric to show: reward for RL, loss for SFT."""
        return next(key for key in LABELS if key in self.rows[-1])


def ends(rows: Sequence[dict], key: str) -> tuple[float, float]:
    """The means over the first and the last three rows."""
    values = [row[key] for row in rows]
    few = min(3, len(values))
    return sum(values[:few]) / few, sum(values[-few:]) / few


def table(runs: list[Curve], seconds: list[int]) -> Table:
    answer = Table(title="first → last: means over three steps", title_justify="left", title_style="dim")
    answer.add_column("run")
    for name in ("steps", "loss", "mean reward", "saved", "seconds"):
        answer.add_column(name, justify="right")
    walls = iter(seconds)
    for run in runs:
        for i, rows in enumerate(run.parts()):
            cells = {key: "{:.3f} → {:.3f}".format(*ends(rows, key)) for key in LABELS if key in rows[0]}
            if run.key != "loss":
                cells["loss"] = ""  # the mean of a policy loss is near 0 whatever is learned
            first, last = rows[0]["step"], rows[-1]["step"]
            saved = ", ".join(f"step_{step}" for step in run.saved if first <= step <= last)
            wall = next(walls, None)
            answer.add_row(
                f"{run.name}, resumed" if i else run.name,
                f"{first}-{last}",
                cells["loss"],
                cells.get("reward/mean", ""),
                saved,
                f"{sum(row['time/step'] for row in rows):.0f}" if wall is None else str(wall),
            )
    return answer


def draw(axes: Axes, run: Curve) -> None:
    """Draw one run: each step, a running mean, and where the run was resumed."""
    steps, values = [row["step"] for row in run.rows], [row[run.key] for row in run.rows]
    reach = max(1, len(values) // 40)
    around = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    means = [sum(some) / len(some) for some in around]
    axes.plot(steps, values, "o", ms=4 if len(steps) < 50 else 2, color=LINE, alpha=0.4, label="each step")
    axes.plot(steps, means, color=LINE, lw=2, label=f"mean of {2 * reach + 1}")
    for i, step in enumerate(run.resumed):
        axes.axvline(step + 0.5, color=MARK, ls="--", lw=1.2, label=None if i else "stopped, resumed")
    first, last = ends(run.rows, run.key)
    title = f"{run.name}: {LABELS[run.key]} {first:.2f} → {last:.2f}"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    if run.key == "loss":
        axes.set_ylim(bottom=0)
    else:
        axes.set_ylim(top=max(1.0, *values))


def figure(runs: list[Curve]) -> Figure:
    """One panel per run, with the legend below so that it covers no curve."""
    size = (5.2 * len(runs), 3.8)
    drawn, panels = pyplot.subplots(1, len(runs), figsize=size, squeeze=False, layout="constrained")
    for axes, run in zip(panels[0], runs, strict=True):
        draw(axes, run)
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--png", type=Path, help="file for the plot; without it, only the table is printed")
    parser.add_argument(
        "--seconds", nargs="*", type=int, default=[], help="wall time of each row, in seconds"
    )
    options = parser.parse_args()
    for path in options.runs:
        if not (path / "metrics.jsonl").exists():
            parser.error(f"{path}: there is no metrics.jsonl in it")
    runs = [Curve(path) for path in options.runs]
    Console().print(table(runs, options.seconds))
    if options.png:
        drawn = figure(runs)
        options.png.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(options.png, dpi=150)
        print(f"plot: {options.png}")


if __name__ == "__main__":
    main()
