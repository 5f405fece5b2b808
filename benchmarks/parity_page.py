"""Picture and page of what benchmarks/parity.py has measured."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS, THEIRS, ROUNDING = "#2a6f97", "#c1440e", "#888888"
OWN = "own answers"
NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "rewards/margins": "margin of rewards",
    "reward/mean": "mean reward",
}
ABOUT = {
    "sft": "SFT",
    "dpo": "DPO",
    "grpo": "GRPO",
    "grpo, unscaled": "GRPO, advantages not divided by the group's deviation",
    "grpo, 4 updates": "the same, with four updates for each batch",
    "grpo, 4 updates, stored": "the same, with the ratio to the weights at the start of the batch",
    "grpo, 4 updates, unclipped": "the same, with the ratio's bounds out of reach",
    "grpo, 2 mini-batches": "with the bounds again: two updates for each of two mini-batches",
    "grpo, 2 mini-batches, own tokens": "the same, with Cairn's divisor in TRL",
    OWN: "GRPO, each samples for itself",
}
SETTINGS = (
    ("algorithm", "`sft`", "`SFTTrainer`, `completion_only_loss=True`"),
    ("", "`dpo`, `loss.beta = 0.1`", "`DPOTrainer`, `beta=0.1`, `loss_type=['sigmoid']`"),
    (
        "",
        "`rl`, `loss.type = 'ppo_clip'`, `max_off_policy_steps = 0`",
        "`GRPOTrainer`, `loss_type='dapo'`, `epsilon=0.2`, `beta=0.0`",
    ),
    ("advantage", "`advantage.type = 'grpo'`; `'dr_grpo'`", "`scale_rewards='group'`; `'none'`"),
    ("updates for each batch", "`updates_per_batch = 4`, `mini_batches = 1`", "`num_iterations=4`"),
    (
        "the ratio to the weights at the start of the batch",
        "`loss.importance = 'token_truncate'`, `importance_min = 1`, `importance_max = 1`",
        "always, where a batch has several updates",
    ),
    ("the ratio's bounds", "`loss.clip_low`, `loss.clip_high`", "`epsilon`, `epsilon_high`"),
    (
        "two updates for each of two mini-batches",
        "`updates_per_batch = 4`, `mini_batches = 2`",
        "`num_iterations=2`, `steps_per_generation` = 2 x `gradient_accumulation_steps`",
    ),
    (
        "records in a step",
        "`data.batch_size`",
        "`per_device_train_batch_size` x `gradient_accumulation_steps`",
    ),
    (
        "answers in a step",
        "`prompts_per_step` x `samples_per_prompt`",
        "the same product, `num_generations` for each prompt",
    ),
    ("learning rate", "`scheduler.type = 'constant'`, no warm-up", "`lr_scheduler_type='constant'`"),
    ("AdamW", "`optimizer.betas`, `eps = 1e-8`, `weight_decay = 0`", "`adam_beta1`, `adam_beta2`, the same"),
    ("clipping", "`optimizer.max_grad_norm = 1.0`", "`max_grad_norm=1.0`"),
    ("numbers", "float32", "`bf16=False`, `dtype=torch.float32`"),
    (
        "order",
        "as `--seed 0` has it",
        "Cairn's: `train_sampling_strategy='sequential'`, `shuffle_dataset=False`",
    ),
)
"""What is set, in Cairn and in TRL."""


SMALL = 1e-3
"""Differences of numbers below it are relative to it: the first margin of DPO is 0 up to rounding."""


def relative(one: float, other: float) -> float:
    """The difference of two numbers, relative to the larger of them."""
    return abs(one - other) / max(abs(one), abs(other), SMALL)


def page(report: Mapping[str, Any]) -> str:
    """docs/results/parity.md."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["experiments"]
    yield "# Parity with TRL"
    yield ""
    yield (
        "The same model, data, seed and settings in Cairn and in TRL's trainers. Where the algorithms are "
        "the same, losses and gradients are the same to rounding. This page is written by "
        "`benchmarks/parity.py` from [parity.json](parity.json)."
    )
    yield ""
    where, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield (
        f"Commit {report['commit']}, {where['cores']} cores of {where['processor']} "
        f"({where['instructions']}), one thread; {packages}. The model is that of `configs/reverse_text` "
        "(0.6M parameters, float32): random weights for SFT, and for the others the same after "
        f"{report['examples']} steps of SFT."
    )
    yield ""
    yield "![Curves of Cairn and TRL over each other, and their relative differences](parity.png)"
    yield ""
    yield "## How near"
    yield ""
    yield (
        f"Relative differences (of numbers below {SMALL:g}, relative to that) between Cairn and TRL in step "
        "1, in step 5 and in the last one. The columns behind them are of TRL beside itself, with each "
        "batch in two parts (`gradient_accumulation_steps=2`): the same arithmetic in another order. That "
        "is how far rounding alone leads, because AdamW divides each gradient by its own size, and so "
        "makes the rounding of small gradients as large as steps."
    )
    yield ""
    yield "| | | steps | step 1 | step 5 | last | TRL itself, step 1 | step 5 | last |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, one in found.items():
        if name == OWN:
            continue
        first = ABOUT[name]
        for metric, pairs in one["differences"].items():
            cells = [_cell(pairs[pair], one["steps"], at) for pair in pairs for at in ("1", "5", "last")]
            yield f"| {first} | {NAMES[metric]} | {one['steps'] if first else ''} | {' | '.join(cells)} |"
            first = ""
        ends = [f"{one['weights'][pair]:.1e}" for pair in ("cairn, trl", "trl, trl")]
        yield f"| | weights | | | | {ends[0]} | | | {ends[1]} |"
    yield ""
    yield (
        "*Weights*: the L2 norm of the difference after the last step, divided by that of how far TRL's "
        "weights have moved. With four updates for each batch, losses and gradient norms are means over "
        "the four, since Cairn writes one row for each batch."
    )
    yield ""
    if OWN in found:
        yield from _own(found[OWN])
    yield from _why(found)
    yield "## What was set"
    yield ""
    yield "| | Cairn | TRL |"
    yield "|---|---|---|"
    for row in SETTINGS:
        yield f"| {' | '.join(row)} |"
    yield ""
    yield (
        "The files are those of `configs/reverse_text`. SFT and DPO get the records of the data set, in "
        "the order in which Cairn takes them, and each program tokenizes them for itself. Of GRPO, Cairn's "
        "server samples the answers; TRL gets their token ids through `rollout_func` and computes rewards, "
        "advantages and loss for itself."
    )
    yield ""
    yield "## Repeat it"
    yield ""
    yield "```"
    yield "uv run --group bench python benchmarks/parity.py --out docs/results"
    yield "uv run --group bench python benchmarks/parity.py --experiments sft --steps 10"
    yield "scripts/test --peers tests/integration/test_parity.py"
    yield "```"
    yield ""
    yield (
        "The first command writes this page and takes some minutes. The last one compares the first steps, "
        "and fails if they differ by more than rounding."
    )


def _cell(values: Mapping[str, float], steps: int, at: str) -> str:
    step = str(steps) if at == "last" else at
    return f"{values[step]:.1e}" if step in values else ""


def _own(one: Mapping[str, Any]) -> Iterator[str]:
    yield "## With answers of their own"
    yield ""
    ends = {
        system: [(statistics.fmean(c[:3]), statistics.fmean(c[-3:])) for c in curves]
        for system, curves in one["rewards"].items()
    }
    said = [
        f"{ {'cairn': 'Cairn', 'trl': 'TRL'}[system] }'s from {_range([a for a, _ in both])} to "
        f"{_range([b for _, b in both])}"
        for system, both in ends.items()
    ]
    yield (
        "Where each program samples for itself, with random numbers of its own, only the curves can be "
        f"compared. Over {len(one['seeds'])} seeds and {one['steps']} steps, the mean reward of three steps "
        f"rises in both: {', and '.join(said)}."
    )
    yield ""


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"


def _why(found: Mapping[str, Any]) -> Iterator[str]:
    """Each difference that is left, with its place in TRL 1.16.0 and transformers 5.19.0."""
    yield "## What differs, and why"
    yield ""
    if "grpo" in found and "loss with TRL's epsilon" in found["grpo"]:
        theirs, ours = found["grpo"]["loss with TRL's epsilon"], found["grpo"]["loss without"]
        yield (
            "- **The divisor of GRPO's advantages.** TRL adds 1e-4 to a group's standard deviation "
            "(`GRPOTrainer._generate_and_score_completions`), and Cairn adds nothing: it gives a group "
            "whose rewards do not differ no advantage at all. By the formula with 1e-4, from the recorded "
            f"rewards and in float32, TRL's losses come out to {theirs:.0e}, and by the formula without it "
            f"Cairn's to {ours:.0e}. Unscaled, the difference is gone."
        )
    yield (
        "- **The order of sums.** TRL pads each sample to a row of its own; Cairn packs several into a "
        "row, without attention between them, and sums the loss over rows. Everything that is said to be "
        "equal to rounding differs by this alone."
    )
    yield from _ratio(found)
    yield from _divisor(found)
    yield (
        "- **Warm-up.** transformers' schedules start at a rate of 0 (`optimization.py`, `current_step / "
        "num_warmup_steps`), so the first optimiser step changes nothing. Cairn's step k of W has k / W of "
        "the rate. The comparison has no warm-up."
    )
    yield (
        "- **The order of records.** transformers shuffles with a generator of PyTorch's "
        "(`Trainer._get_train_sampler`), GRPO with `RepeatSampler`; Cairn's order is drawn from the run's "
        "seed and the record's place, whatever the number of ranks. TRL is given Cairn's order here."
    )
    yield (
        "- **Defaults.** Without being asked, TRL computes in bfloat16 (`_BaseConfig.__post_init__`), "
        "checkpoints gradients, lets the rate fall linearly to 0, and has betas of 0.9 and 0.999; Cairn "
        "computes in float32 on CPUs, keeps the rate, and has 0.9 and 0.95."
    )
    yield ""


def _ratio(found: Mapping[str, Any]) -> Iterator[str]:
    """What the ratio is relative to, and what that changes."""
    said = (
        "- **The denominator of the ratio.** TRL takes the trainer's own logprobs as the old ones: at one "
        "update for each batch those of the same forward pass, so that the ratio is exactly 1 "
        "(`GRPOTrainer._compute_loss`, where `old_per_token_logps` is None), and at several those that are "
        "stored before the first update. Cairn divides by what the server has sampled with, which in float32 "
        "on one machine is nearly the same."
    )
    names = ("grpo, unscaled", "grpo, 4 updates", "grpo, 4 updates, stored", "grpo, 4 updates, unclipped")
    if not set(names) <= found.keys():
        yield said
        return
    once, as_sampled, stored, unclipped = (found[name] for name in names)
    yield (
        f"{said} Here the two differ by {once['mismatch']:.0e} at most. With `loss.importance = "
        "'token_truncate'` and both of its bounds at 1, Cairn stores the trainer's own as TRL does. That "
        "does not stand out from rounding: the weights at the end differ from TRL's by "
        f"{stored['weights']['cairn, trl']:.0e}, and by {as_sampled['weights']['cairn, trl']:.0e} without it."
    )
    both = [
        [one["differences"]["grad_norm"][pair][str(one["steps"])] for one in (unclipped, stored)]
        for pair in ("cairn, trl", "trl, trl")
    ]
    yield (
        "- **The bounds of the ratio.** A token whose ratio is within rounding of a bound has a gradient on "
        "the one side of it and none on the other, so that rounding grows faster with several updates for "
        "each batch, in TRL beside itself as well. With the bounds out of reach, the gradient norms of the "
        "last step differ by {:.0e} instead of {:.0e}, and those of TRL beside itself by {:.0e} instead of "
        "{:.0e}.".format(*both[0], *both[1])
    )


def _divisor(found: Mapping[str, Any]) -> Iterator[str]:
    """What an update on a mini-batch is divided by."""
    said = (
        "- **The divisor of mini-batches.** With `steps_per_generation` above `gradient_accumulation_steps`, "
        "TRL divides the loss of each update by the mean number of tokens of a generation's mini-batches "
        "(`num_items_in_batch` in `_compute_loss`), and Cairn by the number of the mini-batch's own tokens."
    )
    names = ("grpo, 2 mini-batches", "grpo, 2 mini-batches, own tokens")
    if not set(names) <= found.keys():
        yield said
        return
    theirs, own = (found[name] for name in names)
    yield (
        f"{said} Here the two numbers differ by up to {theirs['unevenness']:.1%}. By the formula with the "
        "mean, from the recorded rewards and lengths, the losses of TRL's first updates come out to "
        f"{theirs['first loss by mean tokens']:.0e}; with TRL's `num_items_in_batch` set to the own tokens, "
        f"by the formula with these to {own['first loss by own tokens']:.0e}, and the curves are those of "
        "Cairn. TRL also draws at random which answers are in a mini-batch (`shuffle_sequence_dict`); Cairn "
        "takes every so many-th answer, so that each prompt has as many in each. Here TRL does so, too."
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Above, the curves over each other; below, their relative differences."""
    from matplotlib.figure import Figure

    found = report["experiments"]
    shown = [
        (name, metric)
        for name, metric in (
            ("sft", "loss"),
            ("dpo", "rewards/margins"),
            ("grpo, unscaled", "grad_norm"),
            ("grpo, 4 updates", "grad_norm"),
            (OWN, ""),
        )
        if name in found
    ]
    figure = Figure(figsize=(4.4 * len(shown), 6.4), layout="constrained")
    axes = figure.subplots(2, len(shown), squeeze=False, height_ratios=(3, 2))
    for column, (name, metric) in enumerate(shown):
        above, below = axes[0, column], axes[1, column]
        above.set_title(f"{name}: {NAMES.get(metric, 'mean reward')}", loc="left", fontsize=11)
        if name == OWN:
            _bands(above, found[name]["rewards"])
            below.set_axis_off()
        else:
            curves = found[name]["curves"][metric]
            steps = range(1, len(curves["trl"]) + 1)
            above.plot(steps, curves["trl"], color=THEIRS, lw=4, alpha=0.45, label="TRL")
            above.plot(steps, curves["cairn"], color=OURS, lw=1.4, label="Cairn")
            for other, color, label in (
                ("trl, in two parts", ROUNDING, "TRL with micro-batches, TRL"),
                ("cairn", OURS, "Cairn, TRL"),
            ):
                apart = [relative(a, b) for a, b in zip(curves["trl"], curves[other], strict=True)]
                below.semilogy(steps, [max(one, 1e-9) for one in apart], color=color, lw=1.3, label=label)
            below.set_ylabel("relative difference")
            below.set_ylim(5e-10, 1)
            below.legend(frameon=False, fontsize=8)
            below.set_xlabel("step")
        above.legend(frameon=False, fontsize=9)
        for one in (above, below):
            one.grid(alpha=0.2)
            one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _bands(axis: Any, rewards: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """The mean over seeds, in a band from the lowest to the highest."""
    for system, color, label in (("trl", THEIRS, "TRL"), ("cairn", OURS, "Cairn")):
        columns = list(zip(*rewards[system], strict=True))
        steps = range(1, len(columns) + 1)
        axis.fill_between(
            steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2, lw=0
        )
        axis.plot(steps, [statistics.fmean(c) for c in columns], color=color, lw=1.6, label=label)
