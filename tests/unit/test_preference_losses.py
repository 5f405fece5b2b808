"""Losses of preferences, against float64 and against TRL."""

import importlib
import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from cairn.config.preferences import AnyPairLossConfig
from cairn.run.batches import Sample
from cairn.trainer.losses import REFERENCE, SIDE, LossInputs, LossSums, make_loss
from cairn.trainer.losses.preferences import POINT
from cairn.trainer.packing import BatchCounts, MicroBatch, fill_rows


def loss_of(section: dict[str, Any]):
    return make_loss(TypeAdapter(AnyPairLossConfig).validate_python(section))


LENGTHS = [(3, 5), (3, 2), (2, 7), (2, 1), (4, 3), (4, 6)]
"""Tokens of each sample's prompt and answer: three pairs."""
PACKINGS = ([[0, 1, 2, 3, 4, 5]], [[4, 5], [0, 1, 2, 3]], [[0], [1], [4], [5], [2], [3]])


def made(seed: int) -> tuple[list[torch.Tensor], list[float]]:
    """Logprobs of the answers' tokens, float64 with gradient, and the reference's of whole answers."""
    draw = torch.Generator().manual_seed(seed)
    logprobs = [-(torch.randn(n, generator=draw).double() * 0.7).abs() - 0.01 for _, n in LENGTHS]
    references = [float(one.sum()) + float(torch.randn(1, generator=draw)) for one in logprobs]
    return [one.requires_grad_() for one in logprobs], references


def through_rows(
    loss: Any, micro: MicroBatch, rows: Any, logprobs: list[torch.Tensor]
) -> tuple[LossSums, list[torch.Tensor]]:
    """The loss of samples that lie in `rows`, and the gradient of each answer's tokens."""
    values, places = torch.zeros(micro.input_ids.shape), {}
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            prompt, n = LENGTHS[i]
            places[i] = (r, slice(start + prompt - 1, start + prompt + n - 1))
            values[r, start + prompt : start + prompt + n] = logprobs[i].detach().float()
            start += prompt + n
    given = values[:, 1:].clone().requires_grad_()
    sums = loss(LossInputs.of(given, micro))
    sums.loss.backward()
    return sums, [given.grad[places[i]] for i in range(len(LENGTHS))]


def of_cairn(
    loss: Any,
    logprobs: list[torch.Tensor],
    references: list[float],
    rows: Any,
    left_out: tuple[int, ...] = (),
) -> tuple[LossSums, float, list[torch.Tensor]]:
    """Its sums, normaliser, and the gradient of each answer's tokens."""
    samples = []
    for i, (prompt, n) in enumerate(LENGTHS):
        sample = Sample.of_answer([1] * prompt, [2] * n)
        side = 0 if i // 2 in left_out else (1, -1)[i % 2]
        columns = {SIDE: side, REFERENCE: references[i]}
        filled = {k: np.full(prompt + n, v, np.float32) for k, v in columns.items()}
        samples.append(Sample(sample.token_ids, sample.loss_mask & bool(side), filled))
    micro = fill_rows([[samples[i] for i in row] for row in rows], 0, [SIDE, REFERENCE], together=2)
    sums, gradients = through_rows(loss, micro, rows, logprobs)
    counts = BatchCounts(samples=6, tokens=42, learned=24, cut=0, unlearned=2 * len(left_out), records=3)
    return sums, loss.normaliser(counts), gradients


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-x))


def log_odds(p: torch.Tensor) -> torch.Tensor:
    return torch.log(p / (1 - p))


# Of each: chosen and rejected logprob, their references, and their lengths.
PAPERS = {
    "dpo": ({"beta": 0.3}, lambda c, r, rc, rr, n, m: -log_sigmoid(0.3 * ((c - rc) - (r - rr)))),
    "cdpo": (
        {"type": "dpo", "beta": 0.3, "label_smoothing": 0.1},
        lambda c, r, rc, rr, n, m: (
            -0.9 * log_sigmoid(0.3 * (c - rc - r + rr)) - 0.1 * log_sigmoid(-0.3 * (c - rc - r + rr))
        ),
    ),
    "ipo": ({"beta": 0.4}, lambda c, r, rc, rr, n, m: ((c - rc) / n - (r - rr) / m - 1 / 0.8) ** 2),
    "simpo": (
        {"beta": 1.5, "gamma": 0.6},
        lambda c, r, rc, rr, n, m: -log_sigmoid(1.5 * (c / n - r / m) - 0.6),
    ),
    "orpo": (
        {"beta": 0.2},
        lambda c, r, rc, rr, n, m: (
            -c / n - 0.2 * log_sigmoid(log_odds(torch.exp(c / n)) - log_odds(torch.exp(r / m)))
        ),
    ),
}


@pytest.mark.parametrize("rows", PACKINGS)
@pytest.mark.parametrize("name", PAPERS)
def test_losses_are_those_of_the_papers(name: str, rows: list[list[int]]):
    """In float64, with the gradient of every token, however pairs are laid in rows."""
    settings, paper = PAPERS[name]
    logprobs, references = made(3)
    sums, normaliser, gradients = of_cairn(loss_of({"type": name, **settings}), logprobs, references, rows)
    wanted = sum(
        paper(
            *(logprobs[i].sum() for i in (k, k + 1)),
            *(references[i] for i in (k, k + 1)),
            *(LENGTHS[i][1] for i in (k, k + 1)),
        )
        for k in (0, 2, 4)
    )
    wanted.backward()
    assert normaliser == 3
    assert sums.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for gradient, one in zip(gradients, logprobs, strict=True):
        torch.testing.assert_close(gradient.double(), one.grad, rtol=1e-4, atol=1e-6)


def test_metrics_of_pairs():
    logprobs, references = made(3)
    sums, _, _ = of_cairn(loss_of({"type": "dpo", "beta": 0.3}), logprobs, references, PACKINGS[0])
    shown = {name: (value / weight).item() for name, (value, weight) in sums.averages.items()}
    ratios = [0.3 * (one.sum().item() - ref) for one, ref in zip(logprobs, references, strict=True)]
    assert shown["rewards/chosen"] == pytest.approx(np.mean(ratios[::2]), rel=1e-4)
    assert shown["rewards/rejected"] == pytest.approx(np.mean(ratios[1::2]), rel=1e-4)
    assert shown["rewards/margins"] == pytest.approx(np.mean(ratios[::2]) - np.mean(ratios[1::2]), rel=1e-4)
    assert shown["rewards/accuracies"] == pytest.approx(
        np.mean([a > b for a, b in zip(ratios[::2], ratios[1::2], strict=True)])
    )
    assert shown["logps/chosen"] == pytest.approx(np.mean([one.sum().item() for one in logprobs[::2]]))


def test_a_pair_that_is_left_out_counts_nothing():
    """Neither in the loss, its normaliser and its gradient nor in metrics."""
    logprobs, references = made(3)
    loss = loss_of({"type": "dpo"})
    without, normaliser, gradients = of_cairn(loss, logprobs, references, PACKINGS[0], left_out=(1,))
    assert normaliser == 2
    assert not gradients[2].any()
    assert not gradients[3].any()
    assert without.averages["logps/chosen"][1] == 2
    whole, _, _ = of_cairn(loss, logprobs, references, PACKINGS[0])
    assert without.loss < whole.loss


def test_certain_answers_have_finite_odds():
    logprobs = [torch.zeros(n, dtype=torch.float64).requires_grad_() for _, n in LENGTHS]
    sums, _, gradients = of_cairn(loss_of({"type": "orpo"}), logprobs, [0.0] * 6, PACKINGS[0])
    assert math.isfinite(sums.loss.item())
    assert all(torch.isfinite(one).all() for one in gradients)


SIDES = [1, -1, -1, 1, -1, 0]
"""Of the same samples, taken one by one; the last is not learned from."""


def of_cairn_one_by_one(
    loss: Any, logprobs: list[torch.Tensor], references: list[float], rows: Any, point: float
) -> tuple[LossSums, list[torch.Tensor]]:
    """Sums of a loss of single answers, and the gradient of each answer's tokens."""
    samples = []
    for i, (prompt, n) in enumerate(LENGTHS):
        sample = Sample.of_answer([1] * prompt, [2] * n)
        columns = {SIDE: SIDES[i], REFERENCE: references[i]}
        filled = {k: np.full(prompt + n, v, np.float32) for k, v in columns.items()}
        samples.append(Sample(sample.token_ids, sample.loss_mask & bool(SIDES[i]), filled))
    micro = fill_rows([[samples[i] for i in row] for row in rows], 0, [SIDE, REFERENCE])
    micro.columns[POINT] = torch.full(micro.input_ids.shape, point)
    sums, gradients = through_rows(loss, micro, rows, logprobs)
    return sums, gradients


KTO_SETTINGS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}


@pytest.mark.parametrize("rows", PACKINGS)
def test_kto_is_that_of_the_paper(rows: list[list[int]]):
    """Equations 7 and 8 in float64, with the gradient of every token, and the metrics."""
    logprobs, references = made(5)
    loss = loss_of({"type": "kto", **KTO_SETTINGS})
    sums, gradients = of_cairn_one_by_one(loss, logprobs, references, rows, 0.4)
    wanted = torch.zeros((), dtype=torch.float64)
    rewards: dict[int, list[float]] = {1: [], -1: []}
    for one, of_reference, side in zip(logprobs, references, SIDES, strict=True):
        if side:
            ratio, weight = one.sum() - of_reference, 1.5 if side > 0 else 0.5
            wanted = wanted + weight - weight / (1 + torch.exp(-0.3 * side * (ratio - 0.4)))
            rewards[side].append(0.3 * ratio.item())
    wanted.backward()
    assert sums.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for i, one in enumerate(logprobs):
        expected = one.grad if SIDES[i] else torch.zeros_like(one)
        torch.testing.assert_close(gradients[i].double(), expected, rtol=1e-4, atol=1e-6)
    counts = BatchCounts(samples=6, tokens=42, learned=18, cut=0, unlearned=1, records=6)
    assert loss.normaliser(counts) == 5
    shown = {name: (value / weight).item() for name, (value, weight) in sums.averages.items()}
    assert shown["rewards/chosen"] == pytest.approx(np.mean(rewards[1]), rel=1e-4)
    assert shown["rewards/rejected"] == pytest.approx(np.mean(rewards[-1]), rel=1e-4)
    assert shown["kl"] == pytest.approx(0.4)
    assert shown.keys() == {"kl", *(f"{a}/{b}" for a in ("rewards", "logps") for b in ("chosen", "rejected"))}


def trl_trainer(**settings: Any) -> SimpleNamespace:
    """What a trainer's own function for the loss looks at; `model` gives it the logprobs of all answers."""
    device = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)
    counted = {"_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1}
    return SimpleNamespace(
        **counted,
        accelerator=device,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        **settings,
    )


def trl_outputs(logprobs: torch.Tensor) -> SimpleNamespace:
    """What TRL's model returns; beside the logprobs, all is for metrics."""
    other = torch.zeros_like(logprobs)
    return SimpleNamespace(log_probs=logprobs, entropy=other, mean_logits=other, is_top1=other.bool())


def in_rows(order: list[int], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers behind one token of a prompt: logprobs [B, T - 1] with gradient, and their mask [B, T]."""
    those = [logprobs[i].detach().float() for i in order]
    values = torch.nn.utils.rnn.pad_sequence(those, batch_first=True).requires_grad_()
    lengths = torch.tensor([len(one) for one in those])
    return values, (torch.arange(values.shape[1] + 1) > 0) & (
        torch.arange(values.shape[1] + 1) <= lengths[:, None]
    )


def trl_model(values: torch.Tensor) -> Callable[..., SimpleNamespace]:
    """A model of two tokens that gives token 1 these logprobs: [B, T - 1], the first of T having none."""
    values = values.clamp(max=-1e-3)  # where there is only padding
    logits = torch.stack([torch.log(-torch.expm1(values)), values], -1)
    return lambda *_, **__: SimpleNamespace(logits=torch.nn.functional.pad(logits, (0, 0, 0, 1)))


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_losses_without_a_reference_are_those_of_trl(name: str):
    """Value, gradient and metrics of the function that CPOTrainer and ORPOTrainer call for a batch.

    It gets one pair at a time, behind one token of a prompt: what ORPOTrainer learns of the prompt, and its
    mean over the tokens of all chosen answers in the place of each answer's mean, then make no difference.
    """
    pytest.importorskip("trl")
    module, cls, settings = {
        "simpo": ("cpo.cpo_trainer", "CPOTrainer", {"beta": 2.0, "label_smoothing": 0.1}),
        "orpo": ("orpo.orpo_trainer", "ORPOTrainer", {"beta": 0.2}),
    }[name]
    trainer = getattr(importlib.import_module(f"trl.experimental.{module}"), cls)
    only_of = {
        "simpo": {
            "alpha": 0.0,
            "cpo_alpha": 0.0,
            "simpo_gamma": 1.0,
            "loss_type": "simpo",
            "pad_token_id": 0,
        },
        "orpo": {"padding_value": 0},
    }[name]
    themselves = object.__new__(trainer)  # to make one takes a model, and writes files
    vars(themselves).update(vars(trl_trainer(is_encoder_decoder=False, **settings, **only_of)))
    logprobs, references = made(3)
    ours, normaliser, gradients = of_cairn(
        loss_of({"type": name, **settings}), logprobs, references, PACKINGS[0]
    )
    theirs: list[tuple[torch.Tensor, dict[str, float]]] = []
    for pair in ([0, 1], [2, 3], [4, 5]):
        given, mask = in_rows(pair, logprobs)
        batch = {}
        for row, side in enumerate(("chosen", "rejected")):
            length = 1 + LENGTHS[pair[row]][1]
            learned = mask[row : row + 1, :length]
            batch[f"{side}_input_ids"] = batch[f"{side}_attention_mask"] = torch.ones_like(learned).long()
            batch[f"{side}_labels"] = torch.where(learned, 1, -100)
        theirs.append(themselves.get_batch_loss_metrics(trl_model(given), batch))
        theirs[-1][0].backward()
        for row, i in enumerate(pair):
            torch.testing.assert_close(gradients[i], given.grad[row, : LENGTHS[i][1]], rtol=1e-4, atol=1e-6)
    assert normaliser == len(theirs)
    assert ours.loss.item() == pytest.approx(sum(loss.item() for loss, _ in theirs), rel=1e-5)
    shown = {key: (value / weight).item() for key, (value, weight) in ours.averages.items()}
    for k, side in enumerate(("chosen", "rejected")):
        sums = [
            LENGTHS[2 * i + k][1] * metrics.pop(f"logps/{side}") for i, (_, metrics) in enumerate(theirs)
        ]  # theirs are means of an answer's tokens
        assert shown.pop(f"logps/{side}") == pytest.approx(np.mean(sums), rel=1e-4)
    assert shown.keys() == {f"rewards/{what}" for what in ("chosen", "rejected", "margins", "accuracies")}
    for key, value in shown.items():
        assert value == pytest.approx(np.mean([metrics[key] for _, metrics in theirs]), rel=1e-4), key


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_pair_losses_are_those_of_trl(name: str):
    """Value, gradient and metrics of DPOTrainer's own function on equal logprobs, where TRL is installed."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    logprobs, references = made(3)
    order = [0, 2, 4, 1, 3, 5]
    given, mask = in_rows(order, logprobs)
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": torch.ones(mask.shape),
        "completion_mask": mask.long(),
        "ref_chosen_logps": torch.tensor(references[::2]),
        "ref_rejected_logps": torch.tensor(references[1::2]),
    }
    themselves = trl_trainer(
        beta=0.3,
        loss_types=["sigmoid" if name == "dpo" else name],
        loss_weights=[1.0],
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    theirs = trainer._compute_loss(themselves, lambda **_: trl_outputs(given), inputs, False)
    theirs.backward()
    ours, normaliser, gradients = of_cairn(
        loss_of({"type": name, "beta": 0.3}), logprobs, references, PACKINGS[0]
    )
    assert ours.loss.item() / normaliser == pytest.approx(theirs.item(), rel=1e-5)
    for row, i in enumerate(order):
        torch.testing.assert_close(gradients[i] / normaliser, given.grad[row, : LENGTHS[i][1]])
    shown = {key: (value / weight).item() for key, (value, weight) in ours.averages.items()}
    for key, value in shown.items():
        assert value == pytest.approx(themselves._metrics["train"][key][-1], rel=1e-4), key


def test_kto_is_that_of_trl():
    """Likewise, of KTOTrainer, with equal logprobs of the answers to other prompts."""
    trainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    logprobs, references = made(5)
    order = [0, 1, 2, 3, 4]  # the sixth is left out
    given, mask = in_rows(order, logprobs)
    inputs = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": torch.ones(mask.shape),
        "completion_mask": mask.long(),
        "label": torch.tensor([side > 0 for side in SIDES[:5]]),
        "ref_logps": torch.tensor(references[:5]),
        "ref_KL_logps": torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]),
    }
    others = torch.tensor([0.3, -0.2, 0.9, 0.7, 0.3])
    themselves = trl_trainer(loss_type="kto", calculate_KL=True, **KTO_SETTINGS)
    themselves._compute_kl_logps = lambda *_: inputs["ref_KL_logps"] + others
    theirs = trainer._compute_loss(themselves, lambda **_: trl_outputs(given), inputs, False)
    theirs.backward()
    loss = loss_of({"type": "kto", **KTO_SETTINGS})
    ours, gradients = of_cairn_one_by_one(loss, logprobs, references, PACKINGS[0], others.mean().item())
    assert ours.loss.item() / 5 == pytest.approx(theirs.item(), rel=1e-5)
    for i in order:
        torch.testing.assert_close(gradients[i] / 5, given.grad[i, : LENGTHS[i][1]])
    for key, (value, weight) in ours.averages.items():
        assert (value / weight).item() == pytest.approx(themselves._metrics["train"][key][-1], rel=1e-4), key


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "dpo", "gamma": 1.0}, "Extra"),
        ({"type": "ipo", "beta": 0}, "greater"),
        ({"type": "dpoo"}, "dpo"),
        ({"type": "kto", "label_smoothing": 0.1}, "Extra"),
        ({"type": "kto", "desirable_weight": 0, "undesirable_weight": 0}, "nothing would be learned"),
    ],
)
def test_wrong_settings_of_losses(section: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyPairLossConfig).validate_python(section)
