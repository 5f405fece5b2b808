"""Parity: the same model, data, seed and settings in Cairn and in TRL's trainers, step by step.

    uv run --group bench python benchmarks/parity.py --out docs/results
    uv run --group bench python benchmarks/parity.py --experiments sft --steps 10

- sft: records of configs/reverse_text in the order in which Cairn takes them, in Cairn's `sft` and TRL's
  `SFTTrainer`; each tokenizes for itself
- dpo: pairs, likewise, in `dpo` and `DPOTrainer`
- grpo: Cairn's `rl` samples answers, and TRL's `GRPOTrainer` is given the same ones; each computes rewards,
  advantages and loss for itself. "unscaled" leaves the division by the group's standard deviation out, and
  "4 updates" trains four times on each batch
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import algorithms
import common
import recipe
import trl_runs
from parity_page import draw, page, relative

REPOSITORY = Path(__file__).resolve().parents[1]
TASK = "configs/reverse_text"
PROBLEMS = {"problems": 4096, "min_length": 3, "max_length": 8, "seed": 1}
PROMPTS, ANSWERS, MAX_TOKENS = 16, 8, 12
"""Of each step with rewards: prompts, answers to each, tokens of an answer at most."""
SHOWN = (1, 2, 5, 10, 20, 40)
"""Steps whose differences are in the report, beside the last."""


@dataclass(frozen=True)
class Experiment:
    """What is trained, and which metrics are compared: Cairn's name, and TRL's.

    flags: of Cairn's command. settings: of TRL's trainer. updates: of the optimiser for each step of Cairn's.
    """

    kind: str
    steps: int
    metrics: Mapping[str, str]
    flags: tuple[object, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1


LOSS = {"loss": "loss", "grad_norm": "grad_norm"}
REWARDED = {**LOSS, "reward/mean": "reward"}
EXPERIMENTS = {
    "sft": Experiment("sft", 40, LOSS),
    "dpo": Experiment("dpo", 30, {**LOSS, "rewards/margins": "rewards/margins"}),
    "grpo": Experiment("grpo", 20, REWARDED, settings={"scale_rewards": "group"}),
    "grpo, unscaled": Experiment(
        "grpo",
        20,
        REWARDED,
        ("--orchestrator.advantage.type", "dr_grpo"),
        {"scale_rewards": "none"},
    ),
    "grpo, 4 updates": Experiment(
        "grpo",
        8,
        REWARDED,
        (
            "--orchestrator.advantage.type",
            "dr_grpo",
            "--trainer.updates-per-batch",
            4,
            "--trainer.mini-batches",
            1,
        ),
        {"scale_rewards": "none", "num_iterations": 4},
        updates=4,
    ),
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
        }
        if mismatch := [row["mismatch/logprob_max"] for row in self.rows if "mismatch/logprob_max" in row]:
            report["mismatch"] = max(mismatch)
        if self.answers and self.jobs["trl"].settings["scale_rewards"] == "group":
            with_epsilon, without = (self.answers.losses(epsilon) for epsilon in (TRL_EPSILON, 0.0))
            report["loss with TRL's epsilon"] = largest(with_epsilon, curves["loss"]["trl"])
            report["loss without"] = largest(without, curves["loss"]["cairn"])
        return report


# Cairn


def cairn_rows(one: Experiment, run: Path, start: Path, steps: int, url: str | None) -> list[dict[str, Any]]:
    """The rows of metrics of Cairn's command; its last step is saved."""
    flags = ("--model.name", start, "--output-dir", run, "--max-steps", steps, "--ckpt", *one.flags)
    if one.kind == "grpo":
        flags += ("--trainer.scheduler.warmup-steps", 0, "--trainer.threads", 1)
        flags += ("--orchestrator.inference-url", url)
        name, flags = "rl", ("@", f"{TASK}/rl.toml", *flags)
    else:
        flags += ("--scheduler.type", "constant", "--scheduler.warmup-steps", 0, "--threads", 1)
        name, flags = one.kind, ("@", f"{TASK}/{one.kind}.toml", *flags)
    with common.followed(common.command(name, flags), run, threads=1) as rows:
        return [row for _, row in rows]


def write_records(kind: str, path: Path, steps: int) -> int:
    """Write the records that Cairn takes in these steps, in its order; returns how many a step takes."""
    import tomllib

    from cairn.config.data import SFTDataConfig
    from cairn.config.preferences import PreferenceDataConfig
    from cairn.trainer.data.opening import RecordOrder
    from cairn.trainer.data.preference_forms import FORMS
    from cairn.trainer.data.sources import SFT

    settings = tomllib.loads((REPOSITORY / TASK / f"{kind}.toml").read_text())["data"]
    config, use = (
        (SFTDataConfig(**settings), SFT)
        if kind == "sft"
        else (PreferenceDataConfig(**settings), FORMS["pairs"])
    )
    order = RecordOrder(config, use, 0, 0)
    with path.open("w") as out:
        for label, number in order.take(steps * config.batch_size):
            (record,) = order.sources[label].read([number])
            if kind == "sft":
                *prompt, answer = record["messages"]
                record = {"prompt": prompt, "completion": [answer]}
            out.write(json.dumps(record) + "\n")
    return config.batch_size


def write_prompts(path: Path, seed: int, steps: int) -> None:
    """Write prompts for so many steps of TRL's GRPO, in an order of the seed's."""
    from cairn.run.seeds import permutation

    environment = trl_runs.environment_of(PROBLEMS)
    numbers = permutation(len(environment), seed, "prompts for TRL")[: steps * PROMPTS]
    prompts = [{"prompt": environment.messages(i), "problem": i} for i in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))


TRL_EPSILON = 1e-4
"""What TRL's GRPO adds to a group's standard deviation before it divides by it; Cairn adds nothing."""


@dataclass(frozen=True)
class Answers:
    """The answers that a run was trained on: of each step, rows of `Run.rollouts`, group by group."""

    steps: list[list[dict[str, Any]]]

    @classmethod
    def of(cls, run: Path) -> "Answers":
        """Those that are kept in the run's directory."""
        import cairn

        frame = cairn.Run(run).rollouts(turns=True).sort_values(["step", "place", "sample"])
        return cls([rows.to_dict("records") for _, rows in frame.groupby("step")])

    def write(self, data: Path, answers: Path) -> None:
        """Write the prompts in their order, and the answers for `trl_runs.Recorded`."""
        environment = trl_runs.environment_of(PROBLEMS)
        with data.open("w") as prompts, answers.open("w") as out:
            for rows in self.steps:
                for row in rows[::ANSWERS]:
                    problem = int(row["problem"])
                    prompts.write(
                        json.dumps({"prompt": environment.messages(problem), "problem": problem}) + "\n"
                    )
                turns = [row["turns"][0] for row in rows]
                line = {
                    name: [list(map(float if name == "logprobs" else int, turn[name])) for turn in turns]
                    for name in ("prompt_ids", "token_ids", "logprobs")
                }
                out.write(json.dumps(line) + "\n")

    def losses(self, epsilon: float) -> list[float]:
        """The loss of each step by the formula, at a ratio of 1: minus the mean advantage of its tokens.

        Args:
            epsilon: what is added to a group's standard deviation.
        """
        found = []
        for rows in self.steps:
            total = tokens = 0.0
            for first in range(0, len(rows), ANSWERS):
                group = rows[first : first + ANSWERS]
                rewards = [float(row["reward"]) for row in group]
                mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
                for reward, row in zip(rewards, group, strict=True):
                    length = len(row["turns"][0]["token_ids"])
                    total += length * (reward - mean) / (spread + epsilon) if spread > 1e-6 else 0.0
                    tokens += length
            found.append(-total / tokens)
        return found


# TRL


def trl_settings(one: Experiment, size: int, parts: int) -> dict[str, Any]:
    """Settings of TRL's trainer that are those of the task's file, for batches of `size` in so many parts."""
    import tomllib

    of = "rl" if one.kind == "grpo" else one.kind
    read = tomllib.loads((REPOSITORY / TASK / f"{of}.toml").read_text())
    optimizer = (read["trainer"] if of == "rl" else read)["optimizer"]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": size // parts,
        "gradient_accumulation_steps": parts,
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
    }
    if one.kind == "grpo":
        settings |= {"num_generations": ANSWERS, "max_completion_length": MAX_TOKENS}
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


def rows_of(job: trl_runs.Job, updates: int) -> list[dict[str, Any]]:
    """The rows of metrics of a job, one for each step of Cairn's: means over its updates."""
    rows = [json.loads(line) for line in (Path(job.out) / trl_runs.METRICS).read_text().splitlines()]
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
                print(f"{name:18}{system:10}{', '.join(ends)}")
            continue
        for metric, pairs in found["differences"].items():
            for pair, values in pairs.items():
                steps = "  ".join(f"{step}: {value:.1e}" for step, value in values.items())
                print(f"{name:18}{metric:18}{pair:12}{steps}")
        print(f"{name:18}{'weights':18}" + "  ".join(f"{k}: {v:.1e}" for k, v in found["weights"].items()))


if __name__ == "__main__":
    main()
