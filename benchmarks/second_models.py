"""Models beside the policy: distillation reaches its teacher's reward, and a critic's value loss falls.

The model of configs/reverse_text learns the task from examples for a while, as in algorithms.py.

- distillation: that model trained further with rewards (grpo) is the teacher, and the model itself the
  student, which gets no rewards: `advantage.type = "none"`. Its reward is compared with the teacher's for the
  same prompts. The learning rate falls to 0, since single samples of log(teacher / policy) are noisy.
- critic: PPO's critic learns the rewards of a policy that does not change (`warmup_steps`), with
  `gae_lambda = 1`, so that what it has to predict never changes; several seeds. Half the variance of returns
  is the loss of the best constant.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import algorithms


def main() -> None:
    """Run both, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=150, help="steps on examples before all")
    parser.add_argument("--teacher-steps", type=int, default=60, help="steps that make the teacher")
    parser.add_argument("--steps", type=int, default=250, help="steps of distillation")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate of distillation, at first")
    parser.add_argument("--critic-steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the critics")
    parser.add_argument("--quick", action="store_true", help="a few steps of each")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--out", type=Path, help="a folder for second_models.json and second_models.png")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.examples = arguments.teacher_steps = arguments.steps = arguments.critic_steps = 2
        arguments.seeds = [0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    named = ("examples", "teacher_steps", "steps", "lr", "critic_steps", "seeds")
    report = {"benchmark": "second_models", **{name: getattr(arguments, name) for name in named}, **found}
    if not arguments.json:
        show(report)
    if arguments.out:
        (arguments.out / "second_models.json").write_text(json.dumps(report, indent=1) + "\n")
        draw(report, arguments.out / "second_models.png")
    print(json.dumps(report))


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    """Curves of the student, its teacher, and the critics."""
    model = algorithms.taught(folder, arguments.examples)
    found: dict = {"critics": {}}
    with algorithms.served(model, folder) as url:
        for seed in arguments.seeds:
            rows = algorithms.rows_of(
                url, model, folder / f"critic_{seed}", *critic_flags(arguments), "--seed", seed
            )
            found["critics"][str(seed)] = of_critic(rows)
            print(f"critic, seed {seed}: {summary(found['critics'][str(seed)]['loss'])}", file=sys.stderr)
        rewarded = folder / "rewarded"
        more = ("--max-steps", arguments.teacher_steps, "--trainer.optimizer.lr", 4e-4, "--ckpt")
        algorithms.rows_of(url, model, rewarded, *more)
        teacher = rewarded / "checkpoints" / f"step_{arguments.teacher_steps}"
        still = ("--max-steps", arguments.steps, "--trainer.optimizer.lr", 1e-12)
        found["teacher"] = of_rewards(algorithms.rows_of(url, teacher, folder / "still", *still))
        rows = algorithms.rows_of(url, model, folder / "student", *student_flags(arguments, teacher))
        found["student"] = of_rewards(rows)
        found["kl/teacher"] = [round(row["kl/teacher"], 4) for row in rows]
    return found


def critic_flags(arguments: argparse.Namespace) -> tuple[object, ...]:
    """A critic that learns for `--critic-steps` steps, in which the policy does not change."""
    return (
        *("--max-steps", arguments.critic_steps + 1, "--trainer.critic.warmup-steps", arguments.critic_steps),
        *("--orchestrator.advantage.type", "gae", "--trainer.critic.gae-lambda", 1),
        *("--trainer.critic.optimizer.lr", 1e-3, "--trainer.optimizer.lr", 4e-4),
    )


def student_flags(arguments: argparse.Namespace, teacher: Path) -> tuple[object, ...]:
    """Distillation without rewards."""
    return (
        *("--trainer.distill.teacher", teacher, "--orchestrator.advantage.type", "none"),
        *("--max-steps", arguments.steps, "--trainer.optimizer.lr", arguments.lr),
        *("--trainer.scheduler.type", "cosine", "--trainer.scheduler.steps", arguments.steps),
        *("--trainer.scheduler.min-lr-ratio", 0),
    )


def of_rewards(rows: list[dict]) -> list[float]:
    """The mean reward of each step."""
    return [round(row["reward/mean"], 4) for row in rows]


def of_critic(rows: list[dict]) -> dict[str, list[float]]:
    """Of each step: its loss, what it explains of the variance of returns, and half that variance."""
    explained = [row["critic/explained_variance"] for row in rows]
    # With gae_lambda = 1, an advantage is the difference of return and value.
    halves = [row["advantage/std"] ** 2 / (1 - e) / 2 for row, e in zip(rows, explained, strict=True)]
    return {
        "loss": [round(row["critic/loss"], 5) for row in rows],
        "explained_variance": [round(one, 4) for one in explained],
        "half_variance": [round(one, 5) for one in halves],
    }


def summary(values: list[float]) -> str:
    """Means over the first ten, the second ten, and the last twenty steps."""
    parts = (values[:10], values[10:20], values[-20:])
    return " -> ".join(f"{statistics.fmean(part):.4f}" for part in parts if part)


def show(report: dict) -> None:
    """Print a table."""
    for name in ("student", "teacher", "kl/teacher"):
        print(f"{name:40}{summary(report[name])}")
    for seed, critic in report["critics"].items():
        for name, values in critic.items():
            print(f"{f'critic, seed {seed}: {name}':40}{summary(values)}")


def draw(report: dict, path: Path) -> None:
    """Rewards of student and teacher, losses of critics, and what they explain."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rewards, losses, explained) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, colour in (("teacher", "C7"), ("student", "C0")):
        rewards.plot(*algorithms.smooth(report[name], 7), label=name, color=colour, linewidth=1.5)
    rewards.set_ylabel("mean reward")
    rewards.set_title("distillation without rewards", fontsize=11)
    for number, (seed, critic) in enumerate(report["critics"].items()):
        how = {"label": f"seed {seed}", "color": f"C{number}", "linewidth": 1.5}
        losses.plot(*algorithms.smooth(critic["loss"], 2), **how)
        losses.plot(*algorithms.smooth(critic["half_variance"], 2), color=f"C{number}", linestyle=":")
        explained.plot(*algorithms.smooth(critic["explained_variance"], 2), **how)
    losses.set_yscale("log")
    losses.set_title("a critic's loss (dotted: half the variance of returns)", fontsize=11)
    explained.set_title("share of the variance that it explains", fontsize=11)
    for axis in (rewards, losses, explained):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
