"""A plan as text, and as a chart of goodput by interval, simulated and by formula."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cairn.run.errors import UsageError
from cairn.run.output import pyplot
from cairn.run.tables import print_table
from cairn.tools.ckpt_output import say
from cairn.tools.planning.choice import FleetPlan, PlanOutcome, size


def print_plan(constants: Sequence[tuple[str, str, str]], plan: FleetPlan, *, every: bool) -> None:
    """Print a plan.

    Args:
        constants: name, value and source of each.
        every: print every option, not only those that differ from the best one in one thing.
    """
    print_table(["constant", "value", "from"], constants)
    say("")
    best = plan.best
    shown = plan.options if every else [one for one in plan.options if _is_near(one, best)]
    print_table(COLUMNS, (_cells(one, plan) for one in shown))
    if plan.servers:
        say("")
        print_table(COLUMNS, (_cells(one, plan) for one in plan.servers))
    if plan.now is not None:
        say(f"\nas the run is set up: interval {plan.now.option.interval}, goodput {plan.now.goodput:.3f}")
    say("\nset:")
    for line in plan.settings():
        say(f"  {line}")
    say("\nbecause:")
    for reason in plan.reasons():
        say(f"- {reason}")


COLUMNS = (
    *("interval", "tier", "spares", "servers", "goodput", "worst", "by formula", "steps per GPU"),
    *("taken again", "saves", "restarts", "no machine", "no server", "disk", ""),
)


def _is_near(one: PlanOutcome, best: PlanOutcome) -> bool:
    """Whether it has the best option's spares, or its interval and tier."""
    option, other = one.option, best.option
    return option.spares == other.spares or replace(option, spares=0) == replace(other, spares=0)


def _cells(one: PlanOutcome, plan: FleetPlan) -> Iterator[str]:
    option = one.option
    tier = option.tier if option.tier != "remote" else f"remote, every {option.interval * option.uploaded}"
    tier += ", memory" if option.memory else ""
    yield from (
        str(option.interval),
        tier,
        str(option.spares),
        str(option.servers) if option.servers else "-",
    )
    yield from (
        f"{one.goodput:.4f}",
        f"{one.worst:.4f}",
        "-" if one.formula is None else f"{one.formula:.4f}",
        f"{one.worth:.4f}",
    )
    for cause in ("taken again", "saves", "restarts", "machines", "servers"):
        yield f"{one.lost[cause]:,.1f}"
    yield size(one.disk)
    yield "<- best" if option == plan.best.option else ""


TIERS = {"disk": "ckpt.dir", "remote": "ckpt.dir and ckpt.remote"}


def draw(plan: FleetPlan, path: Path) -> None:
    """Draw a plan into a PNG file: a curve for each place of steps, with the best option's number of spares.

    Raises:
        UsageError: the package that draws is not installed, or the file can't be written.
    """
    plot = pyplot()
    best, step = plan.best.option, plan.best.option.step_seconds(plan.fleet)
    figure, axes = plot.subplots(figsize=(7.2, 4.2))
    for tier, curve in curves(plan).items():
        steps = [one.option.interval for one in curve]
        lines = axes.plot(steps, [one.goodput for one in curve], "o-", label=f"simulated, {tier}")
        low, high = [one.worst for one in curve], [one.best for one in curve]
        axes.fill_between(steps, low, high, alpha=0.15, color=lines[0].get_color())
        formula = [math.nan if one.formula is None else one.formula for one in curve]
        axes.plot(steps, formula, ":", color=lines[0].get_color(), label=f"by formula, {tier}")
    axes.axvline(best.interval, color="0.7", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel(f"steps between saves (a step takes {step:.3g} s)")
    axes.set_ylabel("goodput (ETTR)")
    axes.set_title(
        f"{best.gpus(plan.fleet):,} GPUs, {best.spares} spare machines; interval = {best.interval}"
    )
    axes.legend(fontsize=8)
    _save(figure, path)
    plot.close(figure)


def curves(plan: FleetPlan) -> dict[str, list[PlanOutcome]]:
    """By where steps are, the options with the best one's number of spares, in the order of intervals."""
    found: dict[str, list[PlanOutcome]] = {}
    for one in plan.options:
        if one.option.spares == plan.best.option.spares:
            name = TIERS[one.option.tier] + (", and memory" if one.option.memory else "")
            found.setdefault(name, []).append(one)
    return {tier: sorted(curve, key=lambda one: one.option.interval) for tier, curve in found.items()}


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, bbox_inches="tight", format="png")
    except OSError as error:
        raise UsageError(f"--png {path}: {error.strerror}; give a file that can be written") from None
