"""Reward curves of the losses and advantages of RL: the same model, task, seed and number of steps for each.

Every loss runs with the advantage `grpo`, and every advantage with the loss `ppo_clip`. The model has learned
the task from examples for a while; each run starts from its weights, against one server that stays up. The
curves show that an algorithm learns, not which is best: settings are the defaults, the learning rate is the
same for all, and there is one seed. With one update for each batch all ratios are 1, and losses of single
tokens have the same gradient; more `--updates` tell them apart.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import rl

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
ADVANTAGES = {
    name: ("--orchestrator.advantage.type", name)
    for name in ("dr_grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
}
SERVED = rl.RLTask(16, 8, 12, 128, 8, {})


def main() -> None:
    """Run all, or those that are asked for, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=[*LOSSES, *ADVANTAGES], choices=[*LOSSES, *ADVANTAGES])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--examples", type=int, default=150, help="steps on examples before them")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--updates", type=int, default=1, help="optimiser updates for each batch")
    parser.add_argument("--quick", action="store_true", help="two runs of a few steps")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, help="a folder for algorithms.json and algorithms.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.steps, arguments.examples = ["gpg", "rloo"], 2, 2
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
    """The mean reward of each step of each run."""
    taught = folder / "taught"
    flags = ("@", common.CONFIGS / "sft.toml", "--output-dir", taught, "--ckpt")
    flags += ("--max-steps", arguments.examples)
    log = folder / "taught.log"
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
    model = taught / "checkpoints" / f"step_{arguments.examples}"
    found: dict[str, list[float]] = {}
    of_server = argparse.Namespace(dtype="float32", quick=True)  # nothing is compiled
    with rl.server(SERVED, model / "model", of_server, folder / "server.log") as url:
        for name in arguments.runs:
            run = folder / f"run_{len(found)}"
            flags = (
                *("@", common.CONFIGS / "rl.toml", "--model.name", model, "--output-dir", run),
                *("--max-steps", arguments.steps, "--trainer.optimizer.lr", arguments.lr),
                *("--trainer.scheduler.warmup-steps", 0, "--trainer.updates-per-batch", arguments.updates),
                *("--orchestrator.inference-url", url),
                *LOSSES.get(name, ()),
                *ADVANTAGES.get(name, ()),
            )
            with common.followed(common.command("rl", flags), run, threads=1) as rows:
                found[name] = [round(row["reward/mean"], 4) for _, row in rows]
            print(f"{name}: {summary(found[name])}", file=sys.stderr, flush=True)
    return found


def summary(rewards: list[float]) -> str:
    """The mean of the first and of the last three steps."""
    return f"{statistics.fmean(rewards[:3]):.3f} -> {statistics.fmean(rewards[-3:]):.3f}"


def show(runs: dict[str, list[float]]) -> None:
    """Print a table."""
    for name, rewards in runs.items():
        print(f"{name:32}{summary(rewards)}")


def draw(report: dict, path: Path) -> None:
    """Losses beside advantages; each curve is a mean over three steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    panels = {"losses, with the advantage grpo": LOSSES, "advantages, with the loss ppo_clip": ADVANTAGES}
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        shown = [name for name in report["runs"] if name in names]
        if names is ADVANTAGES and "ppo_clip" in report["runs"]:
            shown = ["ppo_clip", *shown]
        for number, name in enumerate(shown):
            rewards = report["runs"][name]
            smooth = [statistics.fmean(rewards[max(i - 1, 0) : i + 2]) for i in range(len(rewards))]
            label = "grpo" if names is ADVANTAGES and name == "ppo_clip" else name
            axis.plot(range(1, len(smooth) + 1), smooth, label=label, color=f"C{number}", linewidth=1.5)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("mean reward")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
