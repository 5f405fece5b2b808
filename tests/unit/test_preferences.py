"""Learning from preferences: records, losses against float64, the reference's logprobs, the task."""

import importlib
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import one_rank
from pydantic import TypeAdapter, ValidationError
from tiny import tokenizer, write_example

from cairn.config.pair_loss import AnyPairLossConfig
from cairn.config.preferences import DPOConfig, PreferenceDataConfig
from cairn.run.attempt import Attempt
from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.seeds import permutation
from cairn.trainer import reference
from cairn.trainer.data.examples import mismatched, name_of, problem_of_example
from cairn.trainer.data.identities import identity_of_records
from cairn.trainer.data.pairs import answers_of, problem_of_pair
from cairn.trainer.data.preferences import PreferenceData, open_preferences
from cairn.trainer.data.records import problem_of
from cairn.trainer.dpo import DPO
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import REFERENCE, SIDE, LossInputs, LossSums, make_loss
from cairn.trainer.losses.dpo import DPO as OwnPairs
from cairn.trainer.losses.examples import POINT
from cairn.trainer.losses.kto import KTO
from cairn.trainer.packing import BatchCounts, fill_rows, make_rank_batch
from cairn.trainer.policy import make_policy
from cairn.trainer.reference_point import add_reference_point
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step import train_step
from cairn.trainer.task import Context

group = one_rank
ASKED = {"role": "user", "content": "abc"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("cba", "c"))


# Records


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": "abc", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": [ASKED], "chosen": "cba", "rejected": "c"}, [ASKED], [GOOD], [BAD]),
        ({"prompt": "abc=", "chosen": "cba", "rejected": "c"}, "abc=", "cba", "c"),
        ({"chosen": "Q: a A: yes it is", "rejected": "Q: a A: yet"}, "Q: a A:", " yes it is", " yet"),
        ({"chosen": "yes", "rejected": "no"}, "", "yes", "no"),
    ],
)
def test_forms_of_pairs(record: dict, prompt: Any, chosen: Any, rejected: Any):
    """With a prompt, with whole conversations beside it, or with a prompt that is what both begin with."""
    assert problem_of_pair(record) is None
    assert answers_of(record) == [
        {"prompt": prompt, "completion": chosen},
        {"prompt": prompt, "completion": rejected},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ASKED, GOOD]}, r"\['messages'\]; it needs chosen and rejected.*are for sft"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "needs chosen and rejected"),
        ({"chosen": [ASKED, GOOD], "rejected": "c"}, "both be text, or both lists of messages"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "no first message in common"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "rejected ends where the prompt ends"),
        ({"prompt": "xyz", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "none of the messages"),
        (
            {"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [BAD]},
            "with chosen as the comp",
        ),
    ],
)
def test_records_that_are_no_pairs(record: dict, message: str):
    problem = problem_of_pair(record)
    assert problem
    assert re.search(message, problem)


def write(path: Path, records: list[dict]) -> PreferenceDataConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return PreferenceDataConfig(name=str(path), batch_size=4)


def pair_of(text: str, end: int = 1) -> dict:
    answers = {"chosen": text[::-1], "rejected": text[::-1][:end]}
    return {
        "prompt": [{"role": "user", "content": text}],
        **{name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()},
    }


PAIRS = [pair_of("abcdefgh"[: 2 + i % 7] + str(i)) for i in range(10)]


def read(config: PreferenceDataConfig, row_length: int = 32) -> PreferenceData:
    return PreferenceData(config, "pairs", tokenizer(), 0, row_length=row_length)


def units_of(data: PreferenceData, numbers: Iterable[int]) -> list[list[Sample]]:
    """Of the only data set."""
    return data.samples([("", number) for number in numbers])


def test_both_answers_are_learned_from_behind_the_prompt(tmp_path: Path):
    ((chosen, rejected),) = units_of(read(write(tmp_path / "pairs.jsonl", PAIRS[:1])), [0])
    texts = [tokenizer().decode(one.token_ids[one.loss_mask]) for one in (chosen, rejected)]
    assert texts == ["0ba<eos>", "0<eos>"]
    assert [set(one.columns[SIDE]) for one in (chosen, rejected)] == [{1}, {-1}]


@pytest.mark.parametrize(("too_long", "left"), [("cut", 2), ("drop", 0)])
def test_answers_that_are_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, too_long: str, left: int
):
    """Nothing is learned from a pair of which an answer has nothing left, or, if so asked, less than all."""
    config = write(tmp_path / "pairs.jsonl", [pair_of("abc"), pair_of("a" * 9), pair_of("a" * 20)])
    config = config.model_copy(update={"too_long": too_long})
    units = units_of(read(config, row_length=16), range(3))
    learned = [[int(s.cut(16).loss_mask[1:].sum()) for s in unit] for unit in units]
    assert learned == [[4, 2], [5, 2] if left else [0, 0], [0, 0]]
    assert [unit[0].columns[SIDE][0] for unit in units] == [1, 1 if left else 0, 0]
    assert "nothing is learned from" in caplog.text
    assert "line 3: 22 tokens come before the first of the chosen answer that is learned" in caplog.text


def test_data_from_which_nothing_can_be_learned(tmp_path: Path):
    config = write(tmp_path / "pairs.jsonl", [pair_of("a" * 20), pair_of("b" * 20)])
    with pytest.raises(UsageError, match=r"nothing can be learned from the first 2 of its records.*seq-len"):
        read(config, row_length=16).check_start()


# Single answers


def labelled(text: str, answer: str, label: object) -> dict:
    return {"prompt": [{"role": "user", "content": text}], "completion": answer, "label": label}


EXAMPLES = [labelled("abcdefgh"[: 2 + i % 5] + str(i), "cba"[: 1 + i % 3], i % 3 > 0) for i in range(12)]


def read_examples(config: PreferenceDataConfig, row_length: int = 32) -> PreferenceData:
    return open_preferences(config, "examples", tokenizer(), 0, row_length=row_length)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "its label is missing; it must be true for a desirable answer"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label is the number 1; it must be true"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label is 'yes'; it must be true"),
        ({"prompt": "a", "completion": "", "label": True}, "its completion is empty"),
        ({"messages": [ASKED, GOOD]}, r"\['messages'\]; it needs prompt, completion and label, or chosen"),
        ({"prompt": "a", "completion": [GOOD], "label": True}, "must both be text"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "no first message in common"),
    ],
)
def test_records_that_are_no_single_answers(record: dict, message: str):
    problem = problem_of_example(record)
    assert problem
    assert re.search(message, problem)


def test_other_runs_refuse_single_answers():
    """Pairs are asked for by other losses; and SFT would learn undesirable answers."""
    assert "loss.type = 'kto'" in str(problem_of_pair(EXAMPLES[0]))
    assert "undesirable" in str(problem_of(EXAMPLES[0] | {"completion": [BAD]}))
    assert problem_of(EXAMPLES[1] | {"completion": [BAD]}) is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([one for one in EXAMPLES if one["label"]], "all of its 8 answers are desirable"),
        ([one for one in EXAMPLES if not one["label"]], "all of its 4 answers are undesirable"),
        ([*EXAMPLES, *PAIRS], "12 of its records are no pairs, and the others are; put them in two files"),
    ],
)
def test_data_sets_that_are_not_to_be_learned_from(tmp_path: Path, records: list[dict], message: str):
    config = write(tmp_path / "answers.jsonl", records)
    config = DPOConfig(data=config, loss={"type": "kto"})
    with pytest.raises(BadRecord, match=rf"--data.name .*answers.jsonl: {message}"):
        identity_of_records(config)


def test_answers_to_one_prompt_only(tmp_path: Path):
    """There is no other prompt's answer."""
    with pytest.raises(BadRecord, match="all answers are to the same prompt"):
        read_examples(write(tmp_path / "a.jsonl", [labelled("a", "b", True), labelled("a", "c", False)]))


def test_the_answer_to_another_prompt():
    """Each is the next of another prompt, around the circle; where prompts differ, each is used once."""
    prompts = [name_of(i % 7 and i) for i in range(40)]  # 0, 7, 14, ... are equal
    found = mismatched(prompts, 3)
    assert found == mismatched(prompts, 3) != mismatched(prompts, 4)
    assert all(prompts[i] != prompts[other] for i, other in enumerate(found))
    order = permutation(40, 3, "mismatched answers")
    for place, number in enumerate(order):
        behind = [order[(place + 1 + i) % 40] for i in range(39)]
        assert found[number] == next(other for other in behind if prompts[other] != prompts[number])
    assert sorted(mismatched([name_of(i) for i in range(9)], 0)) == list(range(9))


def test_pairs_are_two_single_answers(tmp_path: Path):
    """In units of their own, each with another record's answer, which is not one of the pair."""
    data = read_examples(write(tmp_path / "pairs.jsonl", PAIRS))
    assert data.identity()["records"] == 20
    pairs = units_of(read(data.config), range(10))
    for number, (own, other) in enumerate(units_of(data, range(20))):
        answer = pairs[number // 2][number % 2]
        np.testing.assert_array_equal(own.token_ids, answer.token_ids)
        assert set(own.columns[SIDE]) == {(1, -1)[number % 2]}
        prompt = answer.token_ids[~answer.loss_mask]
        np.testing.assert_array_equal(other.token_ids[~other.loss_mask], prompt)
        elsewhere = [
            a.token_ids[a.loss_mask].tolist() for i, u in enumerate(pairs) for a in u if i != number // 2
        ]
        assert other.token_ids[other.loss_mask].tolist() in elsewhere
    for _ in range(2):
        assert sorted(number for _, number in data.order.take(20)) == list(range(20))


def test_single_answers_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Only a unit's own answer decides; what a dropped one is compared with counts nothing either."""
    records = [labelled("a", "b" * 30, True), labelled("b", "c", False), labelled("c" * 40, "d", True)]
    config = write(tmp_path / "a.jsonl", records).model_copy(update={"too_long": "drop"})
    units = units_of(read_examples(config, row_length=24), range(3))
    assert [own.columns[SIDE][0] for own, _ in units] == [0, -1, 0]
    assert [bool(other.loss_mask.any()) for _, other in units] == [False, True, False]
    assert "the desirable answer ends after" in caplog.text
    assert "line 3: " in caplog.text


# Losses


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
    counts = BatchCounts(samples=6, tokens=42, learned=24, cut=0, unlearned=2 * len(left_out), records=3)
    return sums, loss.normaliser(counts), [given.grad[places[i]] for i in range(len(LENGTHS))]


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


# The reference, and the task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path) -> DPOConfig:
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    return DPOConfig(seq_len=24, data=data, output_dir=str(tmp_path / "run"), optimizer={"lr": 0.01})


def begin(group: RankGroup, folder: Path, config: DPOConfig) -> tuple[TrainerState, Context]:
    state = TrainerState(config, group, {POLICY: make_policy(folder, config, group)}, TrainerProgress())
    state.begin(folder)
    run = RunDirectory(config.output_dir)
    run.path.mkdir(exist_ok=True)
    attempt = Attempt("r", 1, "dpo", start_step=0, resume_from=None, branch="main")
    return state, Context(run, attempt, state, folder, {})


def take(state: TrainerState, task: DPO, step: int) -> dict[str, float]:
    work = make_rank_batch(
        task.next_batch(step), state.config, rank=0, world_size=1, arrange=state.scorer.rows.arrange
    )
    task.prepare(work)
    return train_step(state, work, step, task.loss)


def files_of(config: DPOConfig) -> list[Path]:
    return sorted((Path(config.output_dir) / "reference").glob("*/*.safetensors"))


def test_at_the_first_step_the_policy_is_the_reference(group: RankGroup, folder: Path, config: DPOConfig):
    """And after it chosen answers are ahead; epochs count pairs."""
    state, context = begin(group, folder, config)
    task = DPO(config, context)
    first, second = take(state, task, 1), take(state, task, 2)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert second["rewards/margins"] > 0.01
    assert state.progress.total_samples == 8
    assert task.next_batch(3).metrics["epoch"] == 1.2


def test_what_was_computed_before_a_death_is_kept(
    group: RankGroup, folder: Path, config: DPOConfig, monkeypatch: pytest.MonkeyPatch
):
    """The missing files are computed, and no others; the weights that are trained now have no influence."""
    monkeypatch.setattr(reference, "CHUNK", 3)
    state, context = begin(group, folder, config)
    first = DPO(config, context).next_batch(1)
    paths = files_of(config)
    assert [path.name for path in paths] == [f"records_{i}.safetensors" for i in (0, 3, 6, 9)]
    before = {path: path.read_bytes() for path in paths}
    paths[1].unlink()
    paths[2].write_bytes(before[paths[2]][:-3])
    untouched = paths[0].stat().st_mtime_ns
    for weight in state.policy.module.parameters():
        weight.data.mul_(1.5)
    again = DPO(config, replace(context, recipe={})).next_batch(1)
    assert again.digest() == first.digest()
    assert {path: path.read_bytes() for path in paths} == before
    assert paths[0].stat().st_mtime_ns == untouched


def test_a_resumed_run_reads_them_and_needs_no_reference(
    group: RankGroup, folder: Path, config: DPOConfig, monkeypatch: pytest.MonkeyPatch
):
    _, context = begin(group, folder, config)
    DPO(config, context)
    monkeypatch.setattr(reference, "Frozen", None)  # nothing is loaded
    DPO(config, context)


def test_other_weights_settings_or_records_have_logprobs_of_their_own(
    group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path
):
    _, context = begin(group, folder, config)
    DPO(config, context)
    longer = config.model_copy(update={"seq_len": 32})
    DPO(longer, begin(group, folder, longer)[1])
    other = write_example(tmp_path / "other", seed=1)
    DPO(config, begin(group, other, config)[1])
    assert len(files_of(config)) == 3


@pytest.mark.parametrize("in_full", [[], ["model.norm"]])
def test_with_an_adapter_the_reference_is_the_base(
    group: RankGroup,
    folder: Path,
    config: DPOConfig,
    monkeypatch: pytest.MonkeyPatch,
    in_full: list[str],
):
    """Whatever the adapter has learned when the reference has to score again.

    A copy of the base is loaded only if more than an adapter is trained.
    """
    plain = DPO(config, begin(group, folder, config)[1]).next_batch(1)
    for path in files_of(config):
        path.unlink()
    loaded = []
    copy = reference.Frozen
    monkeypatch.setattr(reference, "Frozen", lambda *a, **k: loaded.append(a[0]) or copy(*a, **k))
    lora = {"rank": 2, "dropout": 0.5, "modules_to_save": in_full}
    adapted = DPOConfig(**{**config.model_dump(), "lora": lora})
    state, context = begin(group, folder, adapted)
    for name, weight in state.policy.trained().items():
        if "lora_B" in name or in_full:
            weight.data.fill_(0.3)
    again = DPO(adapted, context).next_batch(1)
    for one, other in zip(plain.samples, again.samples, strict=True):
        np.testing.assert_array_equal(one.columns[REFERENCE], other.columns[REFERENCE])
    assert bool(loaded) == bool(in_full)
    assert state.policy.module.training
    assert not any(getattr(module, "_disable_adapters", False) for module in state.policy.module.modules())


def test_an_adapter_of_a_run_without_a_reference_is_refused(
    group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path
):
    (tmp_path / "model").mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    context = replace(begin(group, folder, config)[1], model_folder=tmp_path / "model")
    with pytest.raises(UsageError, match=r"its run had no reference.* Begin a new run with the merged"):
        DPO(config, context)


def test_weights_that_are_gone_are_named(group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path):
    origin = reference.Origin.of(folder, group)
    origin.check(group)
    with pytest.raises(UsageError, match="holds others now"):
        replace(origin, digest="0").check(group)
    with pytest.raises(UsageError, match="is gone"):
        replace(origin, folder=str(tmp_path / "none")).check(group)


def test_losses_without_a_reference_compute_none(group: RankGroup, folder: Path, config: DPOConfig):
    config = DPOConfig(**{**config.model_dump(), "loss": {"type": "simpo"}})
    state, context = begin(group, folder, config)
    task = DPO(config, context)
    assert "rewards/margins" in take(state, task, 1)
    assert not files_of(config)


def test_a_stop_while_the_reference_scores(group: RankGroup, folder: Path, config: DPOConfig):
    _, context = begin(group, folder, config)
    context.run.request_stop("a test")
    assert DPO(config, context).next_batch(1) is None


def test_records_that_have_changed_are_refused(group: RankGroup, folder: Path, config: DPOConfig):
    _, context = begin(group, folder, config)
    kept = {"data": {"records": 3, "digest": "x"}}
    with pytest.raises(BadRecord, match="other records than when the run was started"):
        DPO(config, replace(context, recipe=kept))


# Single answers: the reference point, and the task


@pytest.fixture
def kto(tmp_path: Path) -> DPOConfig:
    data = write(tmp_path / "answers.jsonl", EXAMPLES)
    return DPOConfig(
        seq_len=32, data=data, output_dir=str(tmp_path / "run"), optimizer={"lr": 0.01}, loss={"type": "kto"}
    )


def test_training_on_single_answers(group: RankGroup, folder: Path, kto: DPOConfig):
    """At first the policy is the reference; then desirable answers are ahead. A resumed run goes on with the
    same batches, and neither scores the reference's logprobs again nor loads it."""
    state, context = begin(group, folder, kto)
    task = DPO(kto, context)
    rows = [take(state, task, step) for step in range(1, 7)]
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert all(row["kl"] >= 0 for row in rows)
    assert max(row["kl"] for row in rows) > 0
    assert rows[-1]["rewards/chosen"] > rows[-1]["rewards/rejected"]
    assert state.progress.total_samples == 24
    (path,) = files_of(kto)
    assert reference._read(path).shape == (12, 2)
    seventh = task.next_batch(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "Frozen", None)
        assert DPO(kto, context).next_batch(7).digest() == seventh.digest()
    assert len(seventh.samples) == len(seventh.scored) == 4


def test_the_point_does_not_depend_on_micro_batches_and_ranks(group: RankGroup, folder: Path, kto: DPOConfig):
    """It is the mean log-ratio of all answers to other prompts; a mean below 0 counts as 0."""
    state, context = begin(group, folder, kto)
    task = DPO(kto, context)
    for step in range(1, 5):
        take(state, task, step)
    batch = task.next_batch(5)

    def ratio_of(sample: Sample) -> float:
        ids = torch.tensor(sample.token_ids)[None].long()
        with torch.no_grad():
            logits = state.policy.module(input_ids=ids).logits.double()
        found = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return found[torch.tensor(sample.loss_mask[1:])].sum().item() - float(sample.columns[REFERENCE][0])

    mean = np.mean([ratio_of(sample) for sample in batch.scored])

    def point_of(rank: int, ranks: int, gather: Any, **settings: Any) -> float:
        config = kto.model_copy(update=settings)
        work = make_rank_batch(batch, config, rank=rank, world_size=ranks)
        add_reference_point(work, state.scorer, SimpleNamespace(device=group.device, gather_rows=gather))
        (point,) = {value for micro in work.micros for value in micro.columns[POINT].unique().tolist()}
        return point

    sums: list[torch.Tensor] = []
    for sign in (1, -1):
        for sample in batch.scored:
            sample.columns[REFERENCE] += np.float32(0 if sign > 0 else 2 * abs(mean) + 1)
        expected = max(mean, 0.0) if sign > 0 else 0.0
        for tokens in (1, 8):
            point = point_of(0, 1, group.gather_rows, micro_batch_size=tokens)
            assert point == pytest.approx(expected, rel=1e-4, abs=1e-6)
        sums.clear()
        point_of(1, 2, lambda rows: sums.append(rows) or torch.stack([rows, rows]))
        both = point_of(0, 2, lambda rows: torch.stack([rows, *sums]))
        assert both == point_of(0, 1, group.gather_rows)
    assert mean > 0, "otherwise nothing but the bound was tested"


class MyLoss(KTO):
    """A loss of single answers."""


def test_a_loss_of_ones_own_over_single_answers(group: RankGroup, folder: Path, kto: DPOConfig):
    """It says what it learns from, and pairs are not that."""
    own = {"type": f"{__name__}:MyLoss", "args": {"beta": 0.2}}
    wrong = DPOConfig(**{**kto.model_dump(), "loss": own})
    with pytest.raises(UsageError, match=r"it learns from examples, and gets pairs: set loss.records"):
        DPO(wrong, begin(group, folder, wrong)[1])
    right = DPOConfig(**{**kto.model_dump(), "loss": {**own, "records": "examples"}})
    state, context = begin(group, folder, right)
    assert take(state, DPO(right, context), 1)["loss"] == pytest.approx(0.5, abs=1e-6)
    assert (right.together, wrong.together) == (1, 2)


# Several data sets, and streams


def several(tmp_path: Path, **of_second: Any) -> dict[str, Any]:
    """Ten pairs, and five others that weigh twice as much."""
    write(tmp_path / "first.jsonl", PAIRS)
    write(tmp_path / "second.jsonl", [pair_of("hgfe"[i % 3 :] + str(i)) for i in range(5)])
    first, second = ({"name": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second"))
    return {"sets": [first, {**second, "weight": 2.0, **of_second}], "batch_size": 4, "shuffle_block": 3}


@pytest.mark.parametrize(
    ("loss", "of_second"),
    [({"type": "dpo"}, {}), ({"type": "kto"}, {}), ({"type": "simpo"}, {"read": "stream"})],
)
def test_a_run_goes_on_with_the_very_next_unit_of_each_data_set(
    group: RankGroup, folder: Path, tmp_path: Path, loss: dict, of_second: dict
):
    """Shares are the weights, and the reference's logprobs are those of each unit."""
    data = several(tmp_path, **of_second)
    config = DPOConfig(seq_len=24, data=data, output_dir=str(tmp_path / "run"), loss=loss)
    state, context = begin(group, folder, config)
    task = DPO(config, context)
    batches = [task.next_batch(step) for step in range(1, 16)]
    counted = [sum(b.metrics[f"data/{label}/records"] for b in batches) for label in ("first", "second")]
    assert sum(counted) == 60
    assert 1.2 < counted[1] / counted[0] < 3
    assert batches[-1].metrics["data/second/epoch"] >= 2
    for step in (3, 7):
        state.position = json.loads(json.dumps(batches[step - 1].position))
        again = DPO(config, replace(context, recipe={"data": task.recipe["data"]}))
        rest = [again.next_batch(later).digest() for later in range(step + 1, 16)]
        assert rest == [batch.digest() for batch in batches[step:]]
    if task.loss.needs_reference:
        scores: dict[bytes, float] = {}
        for sample in itertools.chain.from_iterable((*b.samples, *b.scored) for b in batches):
            seen = scores.setdefault(sample.token_ids.tobytes(), sample.columns[REFERENCE][0])
            assert seen == pytest.approx(sample.columns[REFERENCE][0], abs=1e-5)
        lengths = {len(key): value for key, value in scores.items()}
        assert len(set(lengths.values())) > 3
        first = take(state, DPO(config, context), 1)
        assert first["loss"] == pytest.approx(math.log(2) if loss["type"] == "dpo" else 0.5, abs=1e-4)


@pytest.mark.parametrize("loss", [{"type": "dpo"}, {"type": "kto"}, {"type": "a:B", "records": "examples"}])
def test_a_stream_is_not_scored_as_a_whole(tmp_path: Path, loss: dict):
    with pytest.raises(ValidationError, match=r"second.jsonl.*before the first step the reference scores"):
        DPOConfig(data=several(tmp_path, read="stream"), loss=loss)


class MyPairs(OwnPairs):
    """A loss of pairs."""


def test_a_loss_of_ones_own_with_a_reference_refuses_streams(group: RankGroup, folder: Path, tmp_path: Path):
    """Its settings do not tell that it needs one."""
    data = several(tmp_path, read="stream")
    config = DPOConfig(data=data, loss={"type": f"{__name__}:MyPairs"}, output_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"second.jsonl is read as a stream"):
        DPO(config, begin(group, folder, config)[1])


def test_labels_are_needed_in_all_data_sets_together(tmp_path: Path):
    """One may have desirable answers, and another undesirable ones."""
    by_label = {kind: [one for one in EXAMPLES if one["label"] is kind] for kind in (True, False)}
    for kind, records in by_label.items():
        write(tmp_path / f"{kind}.jsonl", records)
    sets = [{"name": str(tmp_path / f"{kind}.jsonl")} for kind in by_label]
    identity = identity_of_records(DPOConfig(data={"sets": sets}, loss={"type": "kto"}))
    assert [one["records"] for one in identity["sets"]] == [8, 4]
    twice = [sets[0], {**sets[0], "label": "again"}]
    with pytest.raises(BadRecord, match=r"data.sets: .*all of its 16 answers are desirable"):
        identity_of_records(DPOConfig(data={"sets": twice}, loss={"type": "kto"}))
