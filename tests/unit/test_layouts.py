"""Gradients of RL's losses do not depend on how samples lie in rows, micro-batches and ranks.

Each token has an id of its own, so that a table of parameters can stand for the model, in float64. A batch
has what real ones have: tokens in between that were not sampled, samples that are cut, one of which has
nothing left to learn, and one whose answer was masked as too long.
"""

from collections.abc import Sequence
from typing import Any

import draws
import numpy as np
import pytest
import torch

from cairn.config.rl_trainer import TrainerConfig
from cairn.config.teachers import REFERENCE_LOGPROBS, KLConfig
from cairn.run.batches import Batch, Sample, Sampling
from cairn.trainer.losses import OLD_LOGPROBS, LossInputs, make_loss
from cairn.trainer.losses.policy import PolicyLoss
from cairn.trainer.packing import Arrange, UpdateBatch, make_rank_batch, one_a_row, shared_rows

SEQ_LEN = 24
LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"type": "ppo_clip"},
    "dual_clip": {"type": "ppo_clip", "dual_clip": 1.5},
    "cispo": {"type": "cispo", "ratio_max": 1.3},
    "icepop": {"type": "icepop", "ratio_min": 0.8, "ratio_max": 1.3},
    "gspo": {"type": "gspo", "clip_low": 0.15, "clip_high": 0.25},
    "dppo": {"type": "dppo", "delta_low": 0.03, "delta_high": 0.05},
    "sapo": {"type": "sapo"},
    "gpg": {"type": "gpg"},
    "decoupled by tokens": {"type": "ppo_clip", "importance": "token_truncate"},
    "decoupled by samples": {"type": "ppo_clip", "importance": "sequence_mask", "importance_max": 1.5},
    "left out by geometric mean": {"type": "cispo", "geometric_min": 0.9, "geometric_max": 1.1},
}
TERMS: dict[str, dict[str, Any]] = {
    "alone": {},
    "with KL": {"kl": {"reference": "start", "coef": 0.2}},
    "with both, unbiased": {"entropy_coef": 0.1, "kl": {"reference": "start", "coef": 0.2, "unbiased": True}},
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token": {"aggregation": "token"},
    "sequence": {"aggregation": "sequence"},
    "constant": {"aggregation": "constant", "aggregation_tokens": 10},
}
LAYOUTS: dict[str, tuple[Arrange, int, int, int]] = {
    "packed, two ranks": (shared_rows, 1, 2, 1),
    "packed, larger": (shared_rows, 3, 1, 2),
    "one a row, larger, three ranks": (one_a_row, 2, 3, 2),
}
"""How samples are arranged, rows of a micro-batch, ranks, and parts that the batch is divided into."""


def samples() -> list[Sample]:
    """Prompt and answer lengths; in pieces, what is learned of a rollout with a tool's output in it."""
    draw, made, first = np.random.default_rng(0), list[Sample](), 1
    for prompt, answer in ((3, 5), (2, 1), (4, 12), (1, 20), (20, 12), (26, 4), (5, 9), (5, 7), (3, 3)):
        ids = np.arange(first, first + prompt + answer, dtype=np.int32)
        first += len(ids)
        mask = np.arange(len(ids)) >= prompt
        if answer == 12:
            mask[prompt + 4 : prompt + 7] = False
        columns = {
            "logprobs": (-draw.random(len(ids)) * 3).astype(np.float32),
            "advantages": np.full(len(ids), draw.normal(), np.float32),
        }
        made.append(Sample(ids, mask, columns))
    made[-2] = made[-2].unlearned()  # an answer that was masked as too long
    return made


SAMPLES = samples()
TOKENS = 1 + sum(len(sample.token_ids) for sample in SAMPLES)


def table(seed: int, spread: float) -> torch.Tensor:
    """Values of all tokens, float64: the sampler's logprobs, and something that differs with the seed."""
    draw = torch.Generator().manual_seed(seed)
    found = torch.zeros(TOKENS).double()
    for sample in SAMPLES:
        found[torch.from_numpy(sample.token_ids).long()] = torch.from_numpy(
            sample.columns["logprobs"]
        ).double()
    return found + spread * torch.randn(TOKENS, generator=draw).double()


def loss_of(section: dict[str, Any]) -> PolicyLoss:
    section = dict(section)
    kl = section.pop("kl", None)
    loss = make_loss(TrainerConfig(loss=section).loss, KLConfig(**kl) if kl else None)
    assert isinstance(loss, PolicyLoss)
    return loss


def gradients(
    loss: PolicyLoss, arrange: Arrange = one_a_row, rows: int = 1, ranks: int = 1, mini_batches: int = 1
) -> list[tuple[float, torch.Tensor]]:
    """Of each part of the batch: the loss, and its gradient by logprobs and entropies, over all ranks."""
    config = TrainerConfig(seq_len=SEQ_LEN, micro_batch_size=rows)
    batch = Batch(SAMPLES, sampling=Sampling(0.7))
    of_ranks = [
        make_rank_batch(
            batch, config, rank=rank, world_size=ranks, arrange=arrange, mini_batches=mini_batches
        )
        for rank in range(ranks)
    ]
    assert {one.temperature for one in of_ranks} == {0.7}
    return [_gradient(loss, [one.parts[number] for one in of_ranks]) for number in range(mini_batches)]


def _gradient(loss: PolicyLoss, parts: Sequence[UpdateBatch]) -> tuple[float, torch.Tensor]:
    now, entropies = table(1, 0.2).requires_grad_(), table(2, 0.5).abs().detach().requires_grad_()
    old, reference = table(3, 0.1), table(4, 0.3)
    assert len({len(part.micros) for part in parts}) == 1, "ranks run in lockstep"
    assert len({part.counts for part in parts}) == 1
    total = torch.zeros(()).double()
    for micro in (micro for part in parts for micro in part.micros):
        ids, mask = micro.input_ids[:, 1:], micro.loss_mask[:, 1:]
        inputs = LossInputs.of(
            torch.where(mask, now[ids], 0.0), micro, torch.where(mask, entropies[ids], 0.0)
        )
        added = {OLD_LOGPROBS: old[ids], REFERENCE_LOGPROBS: reference[ids]}
        columns = {name: values.double() for name, values in inputs.columns.items()} | added
        inputs = LossInputs(inputs.logprobs, inputs.mask, columns, micro, inputs.all_entropies)
        total = total + loss(inputs).loss / loss.normaliser(parts[0].counts)
    found = torch.autograd.grad(total, [now, entropies], allow_unused=True)
    return total.item(), torch.stack([torch.zeros(TOKENS).double() if one is None else one for one in found])


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", draws.cases(list(LOSSES), "losses", len(LOSSES) // 2))
def test_gradients_do_not_depend_on_the_layout(kind: str, aggregation: str, terms: str):
    """Of the whole batch, and of each of two parts."""
    loss = loss_of(LOSSES[kind] | AGGREGATIONS[aggregation] | TERMS[terms])
    ((_, (by_logprobs, by_entropies)),) = gradients(loss)
    assert by_logprobs.count_nonzero() > 10
    assert (by_entropies.count_nonzero() > 10) == ("entropy_coef" in TERMS[terms])
    alone = {parts: gradients(loss, mini_batches=parts) for parts in (1, 2)}
    for name, layout in LAYOUTS.items():
        wanted, found = alone[layout[-1]], gradients(loss, *layout)
        for one, other in zip(found, wanted, strict=True):
            assert one[0] == pytest.approx(other[0], rel=1e-12), name
            torch.testing.assert_close(one[1], other[1], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_what_counts_is_what_is_learned(aggregation: str):
    """The mean of each aggregation, from what is left of the samples once they are cut."""
    loss = loss_of({"type": "cispo", "ratio_max": 1e9} | AGGREGATIONS[aggregation])
    ((value, found),) = gradients(loss, *LAYOUTS["packed, two ranks"])
    kept = [sample.token_ids[:SEQ_LEN][sample.loss_mask[:SEQ_LEN]] for sample in SAMPLES]
    assert [len(ids) for ids in kept] == [5, 1, 9, 20, 4, 0, 9, 0, 3]
    now, wanted, expected = table(1, 0.2), torch.zeros(TOKENS).double(), 0.0
    tokens, answers = sum(map(len, kept)), sum(len(ids) > 0 for ids in kept)
    for ids, sample in zip(kept, SAMPLES, strict=True):
        share = {"token": 1 / tokens, "sequence": 1 / max(len(ids), 1) / answers, "constant": 1 / 90}
        advantage = float(sample.columns["advantages"][0])
        at = torch.from_numpy(ids).long()
        wanted[at] = -advantage * share[aggregation] * (now - table(0, 0.0))[at].exp()
        expected += float(wanted[at] @ now[at])
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-15)
    assert value == pytest.approx(expected, rel=1e-12)
