"""What people see of recipes' results: the figure of each, and the page that has all of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe_file import Recipe, Stage

COLORS = ("#2a6f97", "#c1440e", "#2a9d8f", "#8a5a9e")
ENDS = 5
"""So many of the first and last values of a curve are averaged."""


def draw(recipe: Recipe, results: Mapping[str, Any], path: Path) -> None:
    """The mean over seeds of each stage that has a curve, in a band from the lowest to the highest."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [stage for stage in recipe.stages if stage.drawn]
    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.subplots()
    lasts: dict[str, int] = {}
    for number, stage in enumerate(shown):
        curves = [result["curve"] for result in results["stages"][stage.name].values()]
        first = lasts.get(stage.after or "", 0) + 1
        columns = [[v for v in column if v is not None] for column in zip(*curves, strict=False)]
        lasts[stage.name] = first - 1 + len(columns)
        steps = [first + i for i, column in enumerate(columns) if column]
        columns = [column for column in columns if column]
        means = [sum(column) / len(column) for column in columns]
        color, low, high = COLORS[number % len(COLORS)], list(map(min, columns)), list(map(max, columns))
        axes.fill_between(steps, low, high, color=color, alpha=0.18, lw=0)
        # Curves that lie on one another are seen both if the later ones are thin and broken.
        on_another = any(stage.name in pair[1:] for pair in (*recipe.equal, *recipe.beside))
        style = {"lw": 1.4, "ls": (0, (4, 3))} if on_another else {"lw": 2.4 if len(shown) > 1 else 1.8}
        axes.plot(steps, means, color=color, label=stage.label or stage.name, **style)
    axes.set_title(recipe.title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(recipe.axis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    drawn.savefig(path, dpi=130, metadata={"Software": None})


def table(recipes: Mapping[Path, Recipe]) -> Iterator[str]:
    """The lines of docs/results/recipes.md: a section for each recipe, by its folder."""
    yield "# Recipes and what came out"
    yield ""
    yield (
        "This page is written by `uv run scripts/recipe.py --table` from the `results.json` of each recipe, "
        "which the recipe's own command writes from its run directories. The same command gives the same "
        f"numbers, to the bit on the same kind of processor. Values are means over {ENDS} steps, for each "
        "seed, and ± is half the width of a 95 % interval. Seconds are wall time from command to end, added "
        "up over the parts of a command that was ended and started again. *Load* is the number of processes "
        "that wanted a core: more than there are cores means that the machine was busy with other work."
    )
    for folder, recipe in recipes.items():
        yield ""
        yield f"## {recipe.title}"
        yield ""
        path = folder / "results.json"
        if path.exists():
            yield from _section(folder.name, recipe, json.loads(path.read_text()))
        else:
            yield (
                f"*Open: {recipe.open}.* By `uv run scripts/recipe.py recipes/{folder.name}`. Model: "
                f"{recipe.model}."
            )


def _section(name: str, recipe: Recipe, results: Mapping[str, Any]) -> Iterator[str]:
    where = results["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    stages = results["stages"]
    commits = dict.fromkeys(one["commit"] for by_seed in stages.values() for one in by_seed.values())
    yield (
        f"Model: {results['model']}. `{results['command']}`, at commit {', '.join(commits)}, on "
        f"{where['processor']} ({where['instructions']}); {packages}."
    )
    yield ""
    yield "| stage | seeds | steps | first → last | seconds | load |"
    yield "|---|---|---|---|---|---|"
    for stage in recipe.stages:
        yield _row(stage, stages[stage.name])
    if recipe.note:
        yield ""
        yield recipe.note
    if missing := _missing(recipe, stages):
        yield ""
        yield f"*Open: {missing}.* The same command runs what is missing."
    for one in results["equal"]:
        said = "the same bits" if one["same_bits"] else "**different** bits"
        yield ""
        yield f"The last weights of *{'* and *'.join(one['stages'])}* are {said}, for each seed."
    for one in results["beside"]:
        a, b = (_label(recipe, stage) for stage in one["stages"])
        yield ""
        yield (
            f"The curves of *{a}* and *{b}* differ by {one['first_step']:.1g} of their value in the first "
            f"step, and by up to {one['any_step']:.1g} later, whatever the seed."
        )
    yield ""
    yield f"![{recipe.axis} by step: mean and range of the seeds](../../recipes/{name}/results.png)"


def _missing(recipe: Recipe, stages: Mapping[str, Mapping[str, Any]]) -> str:
    """The recipe's seeds that there are no results of."""
    there = {seed for stage in recipe.stages if not stage.once for seed in stages[stage.name]}
    missing = [str(seed) for seed in recipe.seeds if str(seed) not in there]
    return f"seed{'s' * (len(missing) > 1)} {' and '.join(missing)} not run yet" if missing else ""


def _label(recipe: Recipe, name: str) -> str:
    return next(stage.label or name for stage in recipe.stages if stage.name == name)


def _row(stage: Stage, by_seed: Mapping[str, Mapping[str, Any]]) -> str:
    found = list(by_seed.values())
    seeds = ", ".join(by_seed) if not stage.once else ""
    seconds = ", ".join(f"{result['seconds']:.0f}" for result in found)
    load = ", ".join(f"{result['load']:.0f}" for result in found)
    steps, changes = "", list[str]()
    if stage.curve:
        steps = str(found[0]["steps"])
        changes.append(f"{stage.curve}: " + ", ".join(ends(result["curve"]) for result in found))
        changes += [
            f"{name}: " + ", ".join("{:.3g} → {:.3g}".format(*result["also"][name]) for result in found)
            for name in stage.also
            if all(name in result["also"] for result in found)
        ]
        if all("held_out" in result for result in found):
            changes.append("held-out loss: " + ", ".join(held_out(result["held_out"]) for result in found))
    if stage.evaluation:
        changes += [f"{seed}: {evaluated(one['evaluated'])}" for seed, one in by_seed.items()]
    cells = (stage.label or stage.name, seeds, steps, "<br>".join(changes), seconds, load)
    return f"| {' | '.join(cells)} |"


def ends(curve: Sequence[float | None]) -> str:
    """The means over the first and over the last few values."""
    values = [value for value in curve if value is not None]
    few = min(ENDS, len(values))
    return f"{sum(values[:few]) / few:.3g} → {sum(values[-few:]) / few:.3g}"


def held_out(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last loss of held-out records, or only one."""
    losses = [row["loss"] for row in sorted(rows, key=lambda row: row["step"]) if "loss" in row]
    return " → ".join(f"{loss:.4g}" for loss in dict.fromkeys((losses[0], losses[-1])))


def evaluated(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rewards and shares of `eval`, with half the width of their 95 % intervals."""
    said: list[str] = []
    for row in rows:
        keys = [key for key in row if key == "reward" or (key.startswith("pass@") and "_" not in key)]
        scores: list[str] = []
        for key in keys:
            interval = row.get(f"{key}_ci95")
            scores.append(f"{key} {row[key]:.3g}" + (f" ± {interval:.2g}" if interval is not None else ""))
        said.append(f"{row['model']}: {', '.join(scores)}")
    return "; ".join(said)
