"""The losses of RL against float64 references of a few lines, and against TRL's where it is installed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Sample
from cairn.trainer.losses import OLD_LOGPROBS, LossInputs, make_loss
from cairn.trainer.losses.policy import PolicyLoss
from cairn.trainer.packing import BatchCounts, fill_rows

PACKINGS = ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[2, 0, 3, 1]])
LENGTHS = ((3, 5), (2, 2), (4, 7), (1, 3))
"""Tokens of each sample's prompt and answer."""
WEIGHTED = 6
"""A seed whose answers lie within and without the bounds of the tests below."""


@dataclass
class Answer:
    """One answer's tokens: float64 [length] each; `now` has a gradient."""

    now: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    advantage: float
    entropy: torch.Tensor


def answers(seed: int, spread: float = 0.4) -> list[Answer]:
    draw = torch.Generator().manual_seed(seed)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=draw).double()

    made = []
    for i, (_, n) in enumerate(LENGTHS):
        sampler = -normal(n).abs() - 0.1
        old = sampler + spread * normal(n)
        sign = 1 if i % 2 else -1
        now = (old + spread * normal(n)).clamp(max=-1e-3).requires_grad_()
        made.append(Answer(now, old, sampler, sign * (0.3 + abs(normal(1).item())), normal(n).abs()))
    return made


def of_cairn(section: dict[str, Any], these: list[Answer], packing: Any = PACKINGS[0]) -> SimpleNamespace:
    """Loss, gradients by answer and metrics of Cairn's loss, divided by its normaliser."""
    loss = make_loss(TrainerConfig(loss=section).loss)
    samples = [
        Sample.of_answer([1] * prompt, [2] * n, logprobs=one.sampler.tolist(), advantages=one.advantage)
        for (prompt, n), one in zip(LENGTHS, these, strict=True)
    ]
    micro = fill_rows([[samples[i] for i in row] for row in packing], 0, ["logprobs", "advantages"])

    def spread(of: Callable[[Answer], torch.Tensor]) -> torch.Tensor:
        whole = torch.zeros(micro.input_ids.shape)
        for r, row in enumerate(packing):
            start = 0
            for i in row:
                prompt, n = LENGTHS[i]
                whole[r, start + prompt : start + prompt + n] = of(these[i]).detach().float()
                start += prompt + n
        return whole[:, 1:]

    logprobs = spread(lambda one: one.now).requires_grad_()
    entropies = spread(lambda one: one.entropy).requires_grad_()
    inputs = LossInputs.of(logprobs, micro, entropies if loss.needs_entropies else None)
    if loss.needs_old:
        inputs = replace(inputs, columns={**inputs.columns, OLD_LOGPROBS: spread(lambda one: one.old)})
    sums = loss(inputs)
    counts = BatchCounts(
        samples=4, tokens=sum(map(sum, LENGTHS)), learned=sum(n for _, n in LENGTHS), cut=0, unlearned=0
    )
    value = sums.loss / loss.normaliser(counts)
    value.backward()
    by_answer: dict[int, torch.Tensor] = {}
    for r, row in enumerate(packing):
        start = 0
        for i in row:
            prompt, n = LENGTHS[i]
            by_answer[i] = logprobs.grad[r, start + prompt - 1 : start + prompt - 1 + n]
            start += prompt + n
    gradients = [by_answer[i] for i in range(4)]
    assert logprobs.grad.count_nonzero() == sum(one.count_nonzero() for one in gradients)
    means = {name: value.item() for name, value in sums.means.items()}
    return SimpleNamespace(value=value.item(), gradients=gradients, means=means, of_entropies=entropies.grad)


def reference(
    objective: Callable[[Answer, torch.Tensor], torch.Tensor],
    these: list[Answer],
    aggregation: str,
    before: Callable[[Answer], torch.Tensor] = lambda one: one.sampler,
) -> SimpleNamespace:
    """The same in float64: `objective` of an answer and the ratios of its tokens."""
    of_answers = [objective(one, (one.now - before(one)).exp()) for one in these]
    match aggregation:
        case "token":
            value = -sum(one.sum() for one in of_answers) / sum(len(one) for one in of_answers)
        case "sequence":
            value = -sum(one.mean() for one in of_answers) / len(of_answers)
        case _:
            value = -sum(one.sum() for one in of_answers) / (len(of_answers) * 20)
    gradients = torch.autograd.grad(value, [one.now for one in these])
    return SimpleNamespace(value=value.item(), gradients=gradients)


def assert_same(found: SimpleNamespace, wanted: SimpleNamespace, rel: float = 2e-5) -> None:
    assert found.value == pytest.approx(wanted.value, rel=rel, abs=1e-6)
    assert any(one.abs().max() > 0 for one in wanted.gradients)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=rel, atol=1e-6)


# Objectives


def clipped(one: Answer, r: torch.Tensor, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    return torch.minimum(r * one.advantage, r.clamp(1 - low, 1 + high) * one.advantage)


def dual(one: Answer, r: torch.Tensor) -> torch.Tensor:
    return clipped(one, r) if one.advantage > 0 else clipped(one, r).clamp(min=1.5 * one.advantage)


def cispo(one: Answer, r: torch.Tensor) -> torch.Tensor:
    return r.detach().clamp(max=1.3) * one.advantage * one.now


def icepop(one: Answer, r: torch.Tensor) -> torch.Tensor:
    inside = (r >= 0.8) & (r <= 1.3)
    return inside * r.detach() * one.advantage * one.now


def gspo(one: Answer, r: torch.Tensor) -> torch.Tensor:
    s = (one.now - one.sampler).mean().exp()
    return torch.ones(len(one.now)).double() * clipped(one, s, 0.15, 0.25)


def dppo_tv(one: Answer, r: torch.Tensor) -> torch.Tensor:
    moved = one.now.exp() - one.sampler.exp()
    keep = moved <= 0.05 if one.advantage > 0 else moved >= -0.03
    return keep * r * one.advantage


def dppo_kl(one: Answer, r: torch.Tensor) -> torch.Tensor:
    p, q = one.sampler.exp(), one.now.exp().detach()
    kl = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    towards = q <= p if one.advantage > 0 else q >= p
    return (towards | (kl <= (0.02 if one.advantage > 0 else 0.01))) * r * one.advantage


def sapo(one: Answer, r: torch.Tensor) -> torch.Tensor:
    tau = 1.0 if one.advantage > 0 else 1.05
    return 4 / tau / (1 + (-tau * (r - 1)).exp()) * one.advantage


def gpg(one: Answer, r: torch.Tensor) -> torch.Tensor:
    return r.detach().clamp(max=1.2) * one.advantage * one.now


KINDS: dict[str, tuple[dict[str, Any], Callable[..., torch.Tensor], str]] = {
    "ppo_clip": ({"type": "ppo_clip"}, clipped, "token"),
    "clip_higher": (
        {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3},
        lambda one, r: clipped(one, r, 0.1, 0.3),
        "token",
    ),
    "dual_clip": ({"type": "ppo_clip", "dual_clip": 1.5}, dual, "token"),
    "cispo": ({"type": "cispo", "ratio_max": 1.3}, cispo, "token"),
    "icepop": ({"type": "icepop", "ratio_min": 0.8, "ratio_max": 1.3}, icepop, "token"),
    "gspo": ({"type": "gspo", "clip_low": 0.15, "clip_high": 0.25}, gspo, "sequence"),
    "dppo_tv": ({"type": "dppo", "delta_low": 0.03, "delta_high": 0.05}, dppo_tv, "token"),
    "dppo_kl": (
        {"type": "dppo", "divergence": "kl", "delta_low": 0.01, "delta_high": 0.02},
        dppo_kl,
        "token",
    ),
    "sapo": ({"type": "sapo"}, sapo, "sequence"),
    "gpg": ({"type": "gpg", "importance_max": 1.2}, gpg, "token"),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_is_its_formula(kind: str, packing: Any):
    """However answers are packed, with the aggregation that its paper has."""
    section, objective, aggregation = KINDS[kind]
    for seed in range(3):
        these = answers(seed)
        assert_same(of_cairn(section, these, packing), reference(objective, these, aggregation))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kind", ["ppo_clip", "sapo", "gpg"])
def test_each_aggregation_is_its_formula(kind: str, aggregation: str):
    section, objective, _ = KINDS[kind]
    section = {**section, "aggregation": aggregation}
    if aggregation == "constant":
        section["aggregation_tokens"] = 20
    these = answers(0)
    for packing in PACKINGS:
        assert_same(of_cairn(section, these, packing), reference(objective, these, aggregation))


def weight_of(one: Answer, kind: str, most: float) -> torch.Tensor:
    difference = one.old - one.sampler
    ratio = difference.sum().exp() if kind.startswith("sequence") else difference.exp()
    if kind.endswith("truncate"):
        return ratio.clamp(max=most)
    return torch.where(ratio > most, 0.0, ratio)


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_account_for_what_lies_between_sampler_and_the_batch(kind: str):
    """Ratios are then to the weights at the batch's start."""
    these = answers(WEIGHTED)
    section = {"type": "ppo_clip", "importance": kind, "importance_max": 1.4}
    wanted = reference(
        lambda one, r: weight_of(one, kind, 1.4) * clipped(one, r), these, "token", lambda one: one.old
    )
    for packing in PACKINGS:
        found = of_cairn(section, these, packing)
        assert_same(found, wanted)
    weights = [weight_of(one, kind, 1.4).expand(len(one.now)) for one in these]
    assert found.means["importance/mean"] == pytest.approx(sum(w.sum().item() for w in weights), rel=1e-5)
    bounded = sum(((w == 0) | (w == 1.4)).sum().item() for w in weights)
    assert found.means["importance/bounded"] == bounded
    assert 0 < bounded < sum(map(len, weights))
    ratios = [(one.now - one.old).exp().sum().item() for one in these]
    gaps = [(one.now - one.sampler).abs().sum().item() for one in these]
    assert found.means["ratio/mean"] == pytest.approx(sum(ratios), rel=1e-5)
    assert found.means["mismatch/logprob"] == pytest.approx(sum(gaps), rel=1e-5)


@pytest.mark.parametrize("bounds", [{"geometric_min": 0.9}, {"geometric_max": 1.1}])
def test_answers_are_left_out_by_their_geometric_mean(bounds: dict[str, float]):
    these = answers(WEIGHTED)
    means = [(one.old - one.sampler).mean().exp().item() for one in these]
    kept = [
        bounds.get("geometric_min", 0) <= one <= bounds.get("geometric_max", float("inf")) for one in means
    ]
    assert 0 < sum(kept) < 4, means

    def objective(one: Answer, r: torch.Tensor) -> torch.Tensor:
        return clipped(one, r) * kept[next(i for i, other in enumerate(these) if other is one)]

    found = of_cairn({"type": "ppo_clip", **bounds}, these, PACKINGS[1])
    assert_same(found, reference(objective, these, "token"))
    left_out = sum(len(one.now) for one, keep in zip(these, kept, strict=True) if not keep)
    assert found.means["importance/bounded"] == left_out


def test_the_entropy_bonus_is_added_to_each_token():
    these = answers(0)
    found = of_cairn({"type": "ppo_clip", "entropy_coef": 0.1}, these)
    total = sum(one.entropy.sum().item() for one in these)
    tokens = sum(len(one.now) for one in these)
    plain = of_cairn({"type": "ppo_clip"}, these)
    assert found.value == pytest.approx(plain.value - 0.1 * total / tokens, rel=1e-5)
    assert found.means["entropy"] == pytest.approx(total, rel=1e-5)
    assert found.of_entropies.sum().item() == pytest.approx(-0.1, rel=1e-5)
    reported = of_cairn({"type": "ppo_clip", "entropy_coef": 0}, these)
    assert (reported.value, reported.means["entropy"]) == (plain.value, found.means["entropy"])
    assert reported.of_entropies is None
    assert "entropy" not in plain.means


def test_clipped_tokens_are_counted_by_side():
    these = answers(2)
    found = of_cairn({"type": "ppo_clip"}, these)
    low = high = 0
    for one in these:
        r = (one.now - one.sampler).exp()
        low += int((r < 0.8).sum()) if one.advantage < 0 else 0
        high += int((r > 1.2).sum()) if one.advantage > 0 else 0
    assert (found.means["ratio/clipped_low"], found.means["ratio/clipped_high"]) == (low, high)
    assert found.means["ratio/clipped"] == low + high
    assert low
    assert high


def test_a_loss_asks_for_what_it_needs():
    def made(**section: Any) -> PolicyLoss:
        loss = make_loss(TrainerConfig(loss=section).loss)
        assert isinstance(loss, PolicyLoss)
        return loss

    assert not made().needs_old
    assert not made().needs_entropies
    assert not made(type="gpg").needs_old, "its weights are those of the current policy"
    assert made(importance="sequence_mask").needs_old
    assert made(geometric_max=1.1).needs_old
    assert made(entropy_coef=0).needs_entropies


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"aggregation": "constant"}, "aggregation = 'constant' needs aggregation_tokens"),
        ({"aggregation_tokens": 5}, "aggregation_tokens = 5 is for aggregation = 'constant'"),
        ({"importance_max": 2.0}, "importance_max bounds the weights of importance, which is off"),
        ({"dual_clip": 1.1}, "dual_clip = 1.1 must be above 1 + clip_high = 1.2"),
        ({"type": "gpg", "importance": "off"}, "gpg has no ratio of its own"),
    ],
)
def test_settings_that_do_not_go_together(section: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as raised:
        TrainerConfig(loss=section)
    assert message in str(raised.value)


# TRL


TRL = {
    "ppo_clip": ({"type": "ppo_clip", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "sequence": ({"type": "ppo_clip", "aggregation": "sequence"}, {"loss_type": "grpo"}),
    "constant": (
        {"type": "ppo_clip", "aggregation": "constant", "aggregation_tokens": 20},
        {"loss_type": "dr_grpo"},
    ),
    "dual_clip": ({"type": "ppo_clip", "dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "cispo": ({"type": "cispo", "ratio_max": 1.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": ({"type": "sapo"}, {"loss_type": "sapo"}),
    "gspo": (
        {"type": "gspo", "clip_low": 0.15, "clip_high": 0.25},
        {"loss_type": "grpo", "epsilon": 0.15, "epsilon_high": 0.25, "importance_sampling_level": "sequence"},
    ),
    "sequence_mask": (
        {"type": "ppo_clip", "importance": "sequence_mask", "importance_max": 1.4},
        {"loss_type": "dapo", "mode": "sequence_mask", "clip_max": 1.4},
    ),
    "token_truncate": (
        {"type": "ppo_clip", "importance": "token_truncate", "importance_max": 1.4},
        {"loss_type": "dapo", "mode": "token_truncate", "clip_max": 1.4},
    ),
    "entropy": ({"type": "ppo_clip", "entropy_coef": 0.1}, {"loss_type": "dapo", "entropy_coef": 0.1}),
}


@pytest.mark.parametrize("kind", TRL)
def test_the_loss_is_that_of_trl(kind: str):
    """Value and gradient of GRPOTrainer's own function, which gets the tensors that it would compute."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    section, settings = TRL[kind]
    decoupled = "mode" in settings
    these = answers(5)
    count, width = len(these), max(n for _, n in LENGTHS)
    mask = torch.tensor([[float(t < n) for t in range(width)] for _, n in LENGTHS])

    def padded(of: Callable[[Answer], torch.Tensor]) -> torch.Tensor:
        rows = [of(one).detach().float() for one in these]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    logprobs = padded(lambda one: one.now).requires_grad_()
    entropies = padded(lambda one: one.entropy)
    metrics: Any = {"train": {}}
    for name in ("entropy", "policy_loss", "entropy_coef", "cispo_clip_ratio"):
        metrics["train"][name] = []
    for end in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"):
        metrics["train"][f"clip_ratio/{end}"] = []
    inputs = {
        "prompt_ids": torch.zeros(count, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(count, 1),
        "completion_ids": torch.zeros(count, width, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor([one.advantage for one in these]),
        "old_per_token_logps": padded(lambda one: one.old if decoupled else one.sampler),
        "num_items_in_batch": mask.sum(),
    }
    if decoupled:
        difference = (padded(lambda one: one.old) - padded(lambda one: one.sampler)) * mask
        if settings["mode"] == "sequence_mask":
            ratio = difference.sum(-1, keepdim=True).exp()
            inputs["importance_sampling_ratio"] = ratio.masked_fill(ratio > settings["clip_max"], 0.0)
        else:
            inputs["importance_sampling_ratio"] = difference.exp().clamp(max=settings["clip_max"])
    themselves = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=0.0,
        loss_type=settings["loss_type"],
        epsilon_low=settings.get("epsilon", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.2),
        args=SimpleNamespace(
            delta=settings.get("delta"),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        use_vllm=decoupled,
        vllm_importance_sampling_correction=decoupled,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=20,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda one: one,
            reduce=lambda one, reduction: one,
        ),
        aux_loss_enabled=False,
        _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
        _metrics=metrics,
    )
    value = trainer._compute_loss(themselves, themselves.model, inputs)
    value.backward()
    gradients = [logprobs.grad[i, :n].double() for i, (_, n) in enumerate(LENGTHS)]
    found = of_cairn(section, these)
    assert_same(found, SimpleNamespace(value=value.item(), gradients=gradients))
    tokens = mask.sum().item()
    print(f"{kind}: loss {found.value:.7f}, of TRL {value.item():.7f}")
    if kind == "ppo_clip":
        theirs = metrics["train"]
        for side in ("low", "high"):
            assert found.means[f"ratio/clipped_{side}"] / tokens == pytest.approx(
                theirs[f"clip_ratio/{side}_mean"][0]
            )
