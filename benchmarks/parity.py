"""Parity: the same model, data, seed and settings in Cairn and in TRL's trainers, step by step.

    uv run --group bench python benchmarks/parity.py --out docs/results
    uv run --group bench python benchmarks/parity.py --experiments sft --steps 10

- sft: records of configs/reverse_text in the order in which Cairn takes them, in Cairn's `sft` and TRL's
  `SFTTrainer`; each tokenizes for itself
- dpo: pairs, likewise, in `dpo` and `DPOTrainer`
- grpo: Cairn's `rl` samples answers, and TRL's `GRPOTrainer` is given the same ones; each computes rewards,
  advantages and loss for itself. "unscaled" leaves the division by the group's standard deviation out.
  "4 updates" trains four times on each batch; "stored" takes the ratio to the weights at the batch's start,
  as TRL does, and "unclipped" puts the ratio's bounds out of reach. "2 mini-batches" trains twice on each
  half of the batch, and "own tokens" gives TRL Cairn's divisor
- own answers: each samples for itself, so that only the curves can be compared, over several seeds

How far rounding alone leads is measured as well: TRL's trainer beside itself, with each batch in two parts
(`gradient_accumulation_steps=2`), which is the same arithmetic in another order. `--out` writes parity.json,
parity.png and parity.md, in which experiments stay that are not run again; `--page` makes them again from the
curves in parity.json. TRL is in the dependency group `bench`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import algorithms
import common
import recipe
import trl_runs
from parity_data import (
    ANSWERS,
    MAX_TOKENS,
    PROBLEMS,
    PROMPTS,
    REPOSITORY,
    TASK,
    Answers,
    centred,
    scaled,
    scaled_by_trl,
    write_prompts,
    write_records,
)
from parity_page import draw, page, relative

SHOWN = (1, 2, 5, 10, 20, 40)
"""Steps whose differences are in the report, beside the last."""


@dataclass(frozen=True)
class Experiment:
    """What is trained, and which metrics are compared: Cairn's name, and TRL's.

    flags: of Cairn's command. settings: of TRL's trainer. updates: of the optimiser for each step of Cairn's,
    which take turns with so many mini-batches. own_tokens: see `trl_runs.Job`.
    """

    kind: str
    steps: int
    metrics: Mapping[str, str]
    flags: tuple[object, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    mini_batches: int = 1
    own_tokens: bool = False


LOSS = {"loss": "loss", "grad_norm": "grad_norm"}
REWARDED = {**LOSS, "reward/mean": "reward"}
UNSCALED = Experiment(
    "grpo", 20, REWARDED, ("--orchestrator.advantage.type", "dr_grpo"), {"scale_rewards": "none"}
)
OFTEN = replace(UNSCALED, steps=8, updates=4)
STORED = replace(
    OFTEN,
    flags=(
        *OFTEN.flags,
        *("--trainer.loss.importance", "token_truncate"),  # the ratio is to the weights at the batch's start,
        *("--trainer.loss.importance-min", 1, "--trainer.loss.importance-max", 1),  # and no weight is added
    ),
)
UNCLIPPED = replace(
    STORED,
    flags=(*STORED.flags, "--trainer.loss.clip-low", 0.99, "--trainer.loss.clip-high", 1000),
    settings={**STORED.settings, "epsilon": 0.99, "epsilon_high": 1000.0},
)
EXPERIMENTS = {
    "sft": Experiment("sft", 40, LOSS),
    "dpo": Experiment("dpo", 30, {**LOSS, "rewards/margins": "rewards/margins"}),
    "grpo": Experiment("grpo", 20, REWARDED, settings={"scale_rewards": "group"}),
    "grpo, unscaled": UNSCALED,
    "grpo, 4 updates": OFTEN,
    "grpo, 4 updates, stored": STORED,
    "grpo, 4 updates, unclipped": UNCLIPPED,
    "grpo, 2 mini-batches": replace(STORED, mini_batches=2),
    "grpo, 2 mini-batches, own tokens": replace(STORED, mini_batches=2, own_tokens=True),
}
OWN = "own answers"


def main() -> None:
    """Run the experiments that are asked for, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--experiments", nargs="+", default=[*EXPERIMENTS, OWN], choices=[*EXPERIMENTS, OWN], metavar="NAME"
    )
    parser.add_argument("--steps", type=int, help="steps of each, if not its own number")
    parser.add_argument(
        "--examples", type=int, default=150, help="steps of SFT before those with pairs, rewards"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of runs with own answers")
    parser.add_argument("--quick", action="store_true", help="four steps, without own answers")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, help="a folder for parity.json, parity.png and parity.md")
    parser.add_argument(
        "--page", action="store_true", help="make all in --out again from the curves in parity.json"
    )
    arguments = parser.parse_args()
    if arguments.page:
        if arguments.out is None:
            parser.error("--page: --out says where parity.json is")
        report = json.loads((arguments.out / "parity.json").read_text())
        for one in report["experiments"].values():
            if curves := one.get("curves"):
                one["differences"] = {metric: differences(curve) for metric, curve in curves.items()}
        write(report, arguments.out)
        return
    if not common.has_trl():
        sys.exit("error: TRL is not installed: uv run --group bench python benchmarks/parity.py")
    if arguments.quick:
        arguments.steps, arguments.examples = 4, 4
        arguments.experiments = [name for name in arguments.experiments if name != OWN]
    os.chdir(REPOSITORY)  # the paths in the task's settings are relative to it
    with tempfile.TemporaryDirectory() as folder:
        report = measure(arguments, Path(folder))
    if not arguments.json:
        show(report)
    if arguments.out:
        write(with_earlier(report, arguments.out / "parity.json"), arguments.out)
    print(json.dumps(report))


def with_earlier(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """A report with the experiments of an earlier one that it has not, if that was made with the same."""
    if not path.exists():
        return report
    earlier = json.loads(path.read_text())
    if any(earlier[name] != report[name] for name in ("examples", "commit", "machine", "versions")):
        return report
    both = {**earlier["experiments"], **report["experiments"]}
    return {**report, "experiments": {name: both[name] for name in [*EXPERIMENTS, OWN] if name in both}}


def write(report: dict[str, Any], folder: Path) -> None:
    """A report, its picture and its page."""
    (folder / "parity.json").write_text(recipe.written(report))
    draw(report, folder / "parity.png")
    (folder / "parity.md").write_text(page(report))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report: of each experiment the curves, their differences and the weights at the end.

    Cairn's runs come first, and TRL's after them, all in one process.
    """
    began = os.getloadavg()[0]
    model, taught = Path(common.with_random_weights(common.CONFIGS / "model")), Path()
    chosen = {name: EXPERIMENTS[name] for name in arguments.experiments if name != OWN}
    own = OwnAnswers(folder, arguments.steps or 25, arguments.seeds if OWN in arguments.experiments else [])
    if own.seeds or any(one.kind != "sft" for one in chosen.values()):
        taught = algorithms.taught(folder, arguments.examples) / "model"
    pairs = {
        name: Pair(
            one,
            folder / name.replace(", ", "_").replace(" ", "_"),
            model if one.kind == "sft" else taught,
            arguments.steps or one.steps,
        )
        for name, one in chosen.items()
    }
    for pair in pairs.values():
        if pair.one.kind != "grpo":
            pair.run_cairn()
    if own.seeds or any(one.kind == "grpo" for one in chosen.values()):
        with algorithms.served(taught.parent, folder) as url:
            for pair in pairs.values():
                if pair.one.kind == "grpo":
                    pair.run_cairn(url)
            own.run_cairn(taught, url)
    run_trl([job for pair in pairs.values() for job in pair.jobs.values()] + own.jobs, folder)
    found = {name: pair.report() for name, pair in pairs.items()}
    return {
        "benchmark": "parity",
        "examples": arguments.examples,
        **common.made_with(),
        "load": round((began + os.getloadavg()[0]) / 2, 1),
        "experiments": {**found, **({OWN: own.report()} if own.seeds else {})},
    }


class Pair:
    """One experiment in Cairn, in TRL, and in TRL with other micro-batches.

    Args:
        start: the weights to begin with.
    """

    def __init__(self, one: Experiment, home: Path, start: Path, steps: int):
        self.one, self.home, self.start, self.steps = one, home, start, steps
        self.rows: list[dict[str, Any]] = []
        """Cairn's."""
        self.jobs: dict[str, trl_runs.Job] = {}
        """TRL's, by system."""
        self.answers: Answers | None = None

    def run_cairn(self, url: str | None = None) -> None:
        """Run Cairn's command, and make TRL's jobs of what it has been trained on.

        Args:
            url: of the server that samples answers.
        """
        one, home = self.one, self.home
        home.mkdir()
        print(f"Cairn: {home.name}, {self.steps} steps", file=sys.stderr, flush=True)
        self.rows = cairn_rows(one, home / "cairn", self.start, self.steps, url)
        data, recorded = home / "data.jsonl", None
        if one.kind == "grpo":
            recorded, size = home / "answers.jsonl", PROMPTS * ANSWERS
            self.answers = Answers.of(home / "cairn")
            self.answers.write(data, recorded)
        else:
            size = write_records(one.kind, data, self.steps)
        for parts, system in ((1, "trl"), (2, "trl, in two parts")):
            self.jobs[system] = trl_runs.Job(
                kind=one.kind,
                model=str(self.start),
                data=str(data),
                out=str(home / system.replace(", ", "_").replace(" ", "_")),
                steps=self.steps * one.updates,
                settings=trl_settings(one, size, parts),
                environment=PROBLEMS if one.kind == "grpo" else {},
                answers=str(recorded) if recorded else None,
                mini_batches=one.mini_batches,
                own_tokens=one.own_tokens,
            )

    def report(self) -> dict[str, Any]:
        """What came out, once TRL's jobs are done."""
        theirs = {system: rows_of(job, self.one.updates) for system, job in self.jobs.items()}
        curves = {
            ours: {
                "cairn": [row[ours] for row in self.rows],
                **{system: [row[name] for row in rows] for system, rows in theirs.items()},
            }
            for ours, name in self.one.metrics.items()
        }
        weights = {"cairn": self.home / "cairn" / "checkpoints" / f"step_{self.steps}" / "model"}
        weights |= {system: job.model_at_end for system, job in self.jobs.items()}
        report: dict[str, Any] = {
            "steps": self.steps,
            "settings": self.jobs["trl"].settings,
            "curves": curves,
            "differences": {metric: differences(curve) for metric, curve in curves.items()},
            "weights": apart(self.start, weights),
            **self._mismatch(),
        }
        return report | (self._by_formula(curves["loss"]) if self.answers else {})

    def _mismatch(self) -> dict[str, float]:
        """How far the trainer's and the server's logprobs are apart at most, if no update is between them."""
        if self.one.kind != "grpo" or self.one.updates > 1:
            return {}
        return {"mismatch": max(row["mismatch/logprob_max"] for row in self.rows)}

    def _by_formula(self, losses: Mapping[str, list[float]]) -> dict[str, float]:
        """How far first updates are from the losses that formulas make of the recorded rewards, at most.

        Args:
            losses: of each system.
        """
        one, answers = self.one, self.answers
        assert answers is not None
        if one.settings["scale_rewards"] == "group":
            return {
                "loss with TRL's epsilon": largest(answers.losses(scaled_by_trl), losses["trl"]),
                "loss without": largest(answers.losses(scaled), losses["cairn"]),
            }
        if one.mini_batches == 1:
            return {}
        first = [row["loss"] for row in logged(self.jobs["trl"])[:: one.updates]]
        return {
            "unevenness": answers.unevenness(one.mini_batches),
            "first loss by mean tokens": largest(
                answers.losses(centred, one.mini_batches, by_mean=True), first
            ),
            "first loss by own tokens": largest(answers.losses(centred, one.mini_batches), first),
        }


# Cairn


def cairn_rows(one: Experiment, run: Path, start: Path, steps: int, url: str | None) -> list[dict[str, Any]]:
    """The rows of metrics of Cairn's command; its last step is saved."""
    flags = ("--model.name", start, "--output-dir", run, "--max-steps", steps, "--ckpt", *one.flags)
    if one.kind == "grpo":
        flags += ("--trainer.scheduler.warmup-steps", 0, "--trainer.threads", 1)
        flags += ("--orchestrator.inference-url", url)
        flags += ("--trainer.updates-per-batch", one.updates, "--trainer.mini-batches", one.mini_batches)
        name, flags = "rl", ("@", f"{TASK}/rl.toml", *flags)
    else:
        flags += ("--scheduler.type", "constant", "--scheduler.warmup-steps", 0, "--threads", 1)
        name, flags = one.kind, ("@", f"{TASK}/{one.kind}.toml", *flags)
    with common.followed(common.command(name, flags), run, threads=1) as rows:
        return [row for _, row in rows]


# TRL


def trl_settings(one: Experiment, size: int, parts: int) -> dict[str, Any]:
    """Settings of TRL's trainer that are those of the task's file, for batches of `size` in so many parts."""
    import tomllib

    of = "rl" if one.kind == "grpo" else one.kind
    read = tomllib.loads((REPOSITORY / TASK / f"{of}.toml").read_text())
    optimizer = (read["trainer"] if of == "rl" else read)["optimizer"]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": size // (parts * one.mini_batches),
        "gradient_accumulation_steps": parts,
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
    }
    if one.kind == "grpo":
        settings |= {"num_generations": ANSWERS, "max_completion_length": MAX_TOKENS}
    if one.updates > 1:
        settings |= {
            "num_iterations": one.updates // one.mini_batches,
            "steps_per_generation": parts * one.mini_batches,
        }
    return {**settings, **one.settings}


def run_trl(jobs: Sequence[trl_runs.Job], folder: Path) -> None:
    """Run all jobs, one after the other in a process."""
    print(f"TRL: {len(jobs)} runs", file=sys.stderr, flush=True)
    files = [job.write(folder / f"job_{number}.json") for number, job in enumerate(jobs)]
    done = subprocess.run(
        trl_runs.command(*files),
        capture_output=True,
        text=True,
        env=common.environment(1),
        preexec_fn=common.bound_to_us(),
    )
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-3000:]}")


def logged(job: trl_runs.Job) -> list[dict[str, Any]]:
    """The rows of metrics of a job, one for each update of its optimiser."""
    return [json.loads(line) for line in (Path(job.out) / trl_runs.METRICS).read_text().splitlines()]


def rows_of(job: trl_runs.Job, updates: int) -> list[dict[str, Any]]:
    """The rows of metrics of a job, one for each step of Cairn's: means over its updates."""
    rows = logged(job)
    return [mean_row(rows[first : first + updates]) for first in range(0, len(rows), updates)]


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each number, over the rows that have it."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    return {name: statistics.fmean(row[name] for row in rows if name in row) for name in names}


# What differs


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest absolute difference of two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def differences(curve: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By pair of systems, the relative difference in some steps, and the largest of all steps."""
    found: dict[str, dict[str, float]] = {}
    last = len(curve["trl"])
    for name, other in (("cairn, trl", "cairn"), ("trl, trl", "trl, in two parts")):
        each = [relative(a, b) for a, b in zip(curve["trl"], curve[other], strict=True)]
        shown = {str(step): each[step - 1] for step in sorted({*SHOWN, last}) if step <= last}
        found[name] = {**shown, "largest": max(each)}
    return found


def apart(start: Path, models: Mapping[str, Path]) -> dict[str, float]:
    """How far weights are from each other at the end, relative to how far TRL's have moved (L2 norms)."""
    from safetensors.torch import load_file

    def weights(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            found |= load_file(path)
        return found

    def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
        squares = [
            (one[name].double() - other[name].double()).square().sum().item()
            for name in one.keys() & other.keys()
        ]
        return math.sqrt(sum(squares))

    there = {name: weights(folder) for name, folder in models.items()}
    moved = distance(weights(start), there["trl"])
    return {
        "cairn, trl": distance(there["cairn"], there["trl"]) / moved,
        "trl, trl": distance(there["trl"], there["trl, in two parts"]) / moved,
    }


# Each with answers of its own


class OwnAnswers:
    """The mean reward of each step of both programs, for each seed, where each samples for itself."""

    def __init__(self, folder: Path, steps: int, seeds: Sequence[int]):
        self.folder, self.steps, self.seeds = folder, steps, list(seeds)
        self.ours: list[list[float]] = []
        self.jobs: list[trl_runs.Job] = []

    def run_cairn(self, taught: Path, url: str) -> None:
        """Run Cairn's command with each seed, and make TRL's jobs."""
        for seed in self.seeds:
            print(f"Cairn: {OWN}, seed {seed}", file=sys.stderr, flush=True)
            flags = ("--seed", seed, "--max-steps", self.steps, "--trainer.threads", 1)
            rows = algorithms.rows_of(url, taught, self.folder / f"own_{seed}", *flags)
            self.ours.append([row["reward/mean"] for row in rows])
            data = self.folder / f"own_{seed}.jsonl"
            write_prompts(data, seed, self.steps)
            job = trl_runs.Job(
                kind="grpo",
                model=str(taught),
                data=str(data),
                out=str(self.folder / f"own_trl_{seed}"),
                steps=self.steps,
                seed=seed,
                settings=trl_settings(EXPERIMENTS["grpo"], PROMPTS * ANSWERS, 1),
                environment=PROBLEMS,
            )
            self.jobs.append(job)

    def report(self) -> dict[str, Any]:
        """What came out, once TRL's jobs are done."""
        theirs = [[row["reward"] for row in rows_of(job, 1)] for job in self.jobs]
        return {"steps": self.steps, "seeds": self.seeds, "rewards": {"cairn": self.ours, "trl": theirs}}


def show(report: Mapping[str, Any]) -> None:
    """Print what differs."""
    for name, found in report["experiments"].items():
        if name == OWN:
            for system, curves in found["rewards"].items():
                ends = [f"{statistics.fmean(c[:3]):.3f} -> {statistics.fmean(c[-3:]):.3f}" for c in curves]
                print(f"{name:34}{system:10}{', '.join(ends)}")
            continue
        for metric, pairs in found["differences"].items():
            for pair, values in pairs.items():
                steps = "  ".join(f"{step}: {value:.1e}" for step, value in values.items())
                print(f"{name:34}{metric:18}{pair:12}{steps}")
        print(f"{name:34}{'weights':18}" + "  ".join(f"{k}: {v:.1e}" for k, v in found["weights"].items()))


if __name__ == "__main__":
    main()
