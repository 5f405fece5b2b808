"""Reward curves of the losses and advantages of RL: the same model, task, seed and number of steps for each.

Every loss runs with the advantage `grpo`, and every advantage with the loss `ppo_clip`. The model has learned
the task from examples for a while; each run starts from its weights, against one server that stays up. The
curves show that an algorithm learns, not which is best: settings are the defaults, the learning rate is the
same for all, and there is one seed. With one update for each batch all ratios are 1, and losses of single
tokens have the same gradient; more `--updates` tell them apart, and so losses run with each number of them.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import common
import rl

TASK = tomllib.loads((common.CONFIGS / "rl.toml").read_text())
LOSSES = {
    **{
        name: ("--trainer.loss.type", name) for name in ("ppo_clip", "cispo", "icepop", "dppo", "sapo", "gpg")
    },
    # Its own bounds are for answers of thousands of tokens, whose mean ratios hardly vary.
    "gspo": (
        "--trainer.loss.type",
        "gspo",
        "--trainer.loss.clip-low",
        0.05,
        "--trainer.loss.clip-high",
        0.05,
    ),
    "ppo_clip, sequence_mask": ("--trainer.loss.importance", "sequence_mask"),
}
ADVANTAGES: dict[str, tuple[str, ...]] = {
    name: ("--orchestrator.advantage.type", name)
    for name in ("dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
}
ADVANTAGES["gdpo"] = (
    *("--orchestrator.environment.name", "two_rewards:TwoRewards"),
    *("--orchestrator.environment.args", json.dumps(TASK["orchestrator"]["environment"]["args"])),
    *("--orchestrator.advantage.type", "gdpo"),
    *("--orchestrator.advantage.args", json.dumps({"weights": {"letters": 1.0, "length": 0.5}})),
)
SERVED = rl.RLTask(16, 8, 12, 128, 8, {})


def main() -> None:
    """Run all, or those that are asked for, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=[*LOSSES, *ADVANTAGES], choices=[*LOSSES, *ADVANTAGES])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--examples", type=int, default=150, help="steps on examples before them")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument(
        "--updates", type=int, nargs="+", default=[1, 4], help="optimiser updates for each batch"
    )
    parser.add_argument("--quick", action="store_true", help="two runs of a few steps")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, help="a folder for algorithms.json and algorithms.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.steps, arguments.examples = ["gpg", "gdpo"], 2, 2
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(arguments, Path(folder))
    report = {
        "benchmark": "algorithms",
        **{name: getattr(arguments, name) for name in ("steps", "examples", "lr", "updates")},
        "runs": runs,
    }
    if not arguments.json:
        show(runs)
    if arguments.out:
        (arguments.out / "algorithms.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(report, arguments.out / "algorithms.png")
    print(json.dumps(report))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """The mean reward of each step of each run; of more updates, by a name such as `gspo, 4 updates`."""
    model = taught(folder, arguments.examples)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # for the environment of two rewards
    found: dict[str, list[float]] = {}
    with served(model, folder) as url:
        for updates in arguments.updates:
            for name in arguments.runs:
                if name in ADVANTAGES and updates != arguments.updates[0]:
                    continue
                flags = (
                    *("--max-steps", arguments.steps, "--trainer.optimizer.lr", arguments.lr),
                    *("--trainer.updates-per-batch", updates),
                    *LOSSES.get(name, ()),
                    *ADVANTAGES.get(name, ()),
                )
                named = title(name, updates)
                rows = rows_of(url, model, folder / f"run_{len(found)}", *flags)
                found[named] = [round(row["reward/mean"], 4) for row in rows]
                print(f"{named}: {summary(found[named])}", file=sys.stderr, flush=True)
    return found


def title(name: str, updates: int) -> str:
    """What a run is called in the report."""
    return name if updates == 1 else f"{name}, {updates} updates"


def taught(folder: Path, examples: int) -> Path:
    """The checkpoint of the task's model after so many steps on examples."""
    run, log = folder / "taught", folder / "taught.log"
    flags = ("@", common.CONFIGS / "sft.toml", "--output-dir", run, "--ckpt", "--max-steps", examples)
    with open(log, "wb") as out:
        done = subprocess.run(
            common.command("sft", flags),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=common.environment(1),
            preexec_fn=common.bound_to_us(),
            cwd=common.CONFIGS.parents[1],
        )
    if done.returncode:
        raise RuntimeError(log.read_text()[-3000:])
    return run / "checkpoints" / f"step_{examples}"


@contextlib.contextmanager
def served(model: Path, folder: Path) -> Iterator[str]:
    """A server for all runs; yields its address."""
    plain = argparse.Namespace(dtype="float32", quick=True)  # nothing is compiled
    with rl.server(SERVED, model / "model", plain, folder / "server.log") as url:
        yield url


def rows_of(url: str, model: Path, run: Path, *flags: object) -> list[dict]:
    """The rows of metrics of an RL run that starts from the checkpoint `model`."""
    whole = (
        *("@", common.CONFIGS / "rl.toml", "--model.name", model, "--output-dir", run),
        *("--trainer.scheduler.warmup-steps", 0, "--orchestrator.inference-url", url, *flags),
    )
    with common.followed(common.command("rl", whole), run, threads=1) as rows:
        return [row for _, row in rows]


def summary(rewards: list[float]) -> str:
    """The mean of the first and of the last three steps."""
    return f"{statistics.fmean(rewards[:3]):.3f} -> {statistics.fmean(rewards[-3:]):.3f}"


def show(runs: dict[str, list[float]]) -> None:
    """Print a table."""
    for name, rewards in runs.items():
        print(f"{name:32}{summary(rewards)}")


def draw(report: dict, path: Path) -> None:
    """Losses by number of updates, beside advantages; each curve is a mean over three steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = report["updates"][0]
    panels = {
        f"losses, {updates} update{'s' * (updates > 1)} for each batch": {
            name: title(name, updates) for name in LOSSES
        }
        for updates in report["updates"]
    }
    panels["advantages, with the loss ppo_clip"] = {
        "grpo": title("ppo_clip", first),
        **{name: title(name, first) for name in ADVANTAGES},
    }
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (about, names) in zip(axes[0], panels.items(), strict=True):
        for number, (label, name) in enumerate(names.items()):
            if name in report["runs"]:
                axis.plot(*smooth(report["runs"][name]), label=label, color=f"C{number}", linewidth=1.5)
        axis.set_title(about, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    axes[0, 0].set_ylabel("mean reward")
    figure.savefig(path, dpi=110)


def smooth(values: list[float], around: int = 1) -> tuple[range, list[float]]:
    """Steps, and the mean of each step's value and of those of as many steps before and after it."""
    means = [statistics.fmean(values[max(i - around, 0) : i + around + 1]) for i in range(len(values))]
    return range(1, len(means) + 1), means


if __name__ == "__main__":
    main()
