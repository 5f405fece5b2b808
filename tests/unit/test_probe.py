"""The trainer's probe: what its weights give a few tokens, for servers to be checked against."""

from pathlib import Path

import pytest
import torch
from one_rank import one_rank
from transformers import GPT2Config, GPT2LMHeadModel

from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.rl_trainer import TrainerConfig
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, weights_in
from cairn.trainer.publishing.publisher import TOKENS, make_probe
from cairn.trainer.scoring.tokens import Scorer

group = one_rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with much dropout, and token 7 with a meaning of its own."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5,
        initializer_range=0.3, bos_token_id=7, eos_token_id=7,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def scorer_of(folder: Path, group: RankGroup, config: TrainerConfig) -> Scorer:
    model = build_model(folder, config, group)
    read_tensors(folder, weights_in(model, folder), "model")
    return Scorer(model, group.device)


def test_a_probe_has_the_logprobs_that_transformers_gives(group: RankGroup, folder: Path):
    """Without dropout and at temperature 1; of tokens that mean nothing special."""
    config = TrainerConfig(seed=3)
    probe = make_probe(scorer_of(folder, group, config), group.device, config)
    assert len(probe.token_ids) == TOKENS
    assert len(probe.logprobs) == TOKENS - 1
    assert probe.dtype == "float32"
    assert 7 not in probe.token_ids
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = torch.tensor(probe.token_ids)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(probe.logprobs), expected, atol=1e-4, rtol=0)


def test_a_probe_follows_the_weights_and_its_tokens_the_seed(group: RankGroup, folder: Path):
    config = TrainerConfig(seed=3)
    scorer = scorer_of(folder, group, config)
    first, again = (make_probe(scorer, group.device, config) for _ in range(2))
    assert first == again
    assert make_probe(scorer, group.device, TrainerConfig(seed=4)).token_ids != first.token_ids
    with torch.no_grad():
        next(scorer.model.parameters()).mul_(1.1)
    other = make_probe(scorer, group.device, config)
    assert other.token_ids == first.token_ids
    assert max(abs(a - b) for a, b in zip(first.logprobs, other.logprobs, strict=True)) > 0.01


def test_a_probe_leaves_training_as_it_is(group: RankGroup, folder: Path):
    """The model stays in training mode, without gradients, and no random number is drawn."""
    config = TrainerConfig()
    scorer = scorer_of(folder, group, config)
    state = torch.get_rng_state()
    make_probe(scorer, group.device, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert scorer.model.training
    assert all(module.training for module in scorer.model.modules())
    assert all(parameter.grad is None for parameter in scorer.model.parameters())
