"""A model proves itself before it is trained, and what finds out how its samples must lie in rows."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import make
from one_rank import one_rank
from torch import nn
from transformers import PreTrainedModel

from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import SFTConfig
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import ALONE, BY_POSITIONS, Rows
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, tensors_in_memory, weights_in
from cairn.trainer.scoring import self_check
from cairn.trainer.scoring.tokens import Scorer

group = one_rank


@pytest.fixture
def scorer(tmp_path: Path, group: RankGroup) -> Callable[..., Scorer]:
    """`scorer(family, **config)`: of a tiny model with its weights."""

    def build(family: str, **config: object) -> Scorer:
        folder = make(family, tmp_path / family)
        model = build_model(folder, SFTConfig(**config), group)
        read_tensors(folder, weights_in(model, folder), "model")
        return Scorer(model, group.device)

    return build


def find_rows(scorer: Scorer, group: RankGroup, **options: object) -> Rows:
    return self_check.find_rows(scorer, group, **{"rounding": "float32", **options})


@pytest.mark.parametrize(
    ("compute", "family", "name"),
    [
        ("bfloat16", "qwen3", "packed"),
        ("bfloat16", "qwen3_moe", "packed"),
        ("bfloat16", "gpt_oss", "packed, with masks"),
        ("bfloat16", "bloom", "one sample a row"),
        ("bfloat16", "mamba", "one sample a row"),
    ],
)
def test_sharded_models_in_bfloat16_get_their_rows(scorer, group: RankGroup, compute, family: str, name: str):
    """A step comes after it, though forward passes with masks may have failed; float32 is in the table."""
    made = scorer(family, precision={"compute": compute})
    assert find_rows(made, group, rounding=compute).name == name
    ids = torch.randint(6, 90, (2, 12))
    made.model(input_ids=ids, use_cache=False).logits.float().sum().backward()
    assert all(p.grad is not None for p in made.model.parameters() if p.requires_grad)


def test_a_leak_too_small_for_bfloat16_to_show_is_found(scorer, group: RankGroup):
    """What flows from sample to sample is found by changing the first, not by how far logprobs are off."""
    made = scorer("lfm2", precision={"compute": "bfloat16"})
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if name.endswith("conv.out_proj.weight"):
                parameter.mul_(0.01)
    assert find_rows(made, group, rounding="bfloat16") == ALONE


def test_nothing_is_changed(scorer, group: RankGroup):
    """Neither random state, weights, gradients, nor whether the model trains; GPT-2 has dropout."""
    made = scorer("gpt2")
    before = {name: tensor.clone() for name, tensor in tensors_in_memory(made.model).items()}
    state = torch.get_rng_state()
    assert find_rows(made, group) == BY_POSITIONS
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_in_memory(made.model).items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(module.training for module in made.model.modules())
    assert made.rows == BY_POSITIONS


def test_compiled_layers_are_not_compiled_for_it(scorer, group: RankGroup, monkeypatch: pytest.MonkeyPatch):
    """Compiling for these few tokens would take longer than training's first step."""
    made = scorer("qwen3")
    for layer in made.model.model.layers:
        layer.compile(backend=pytest.fail)
    assert find_rows(made, group) == BY_POSITIONS


class AcrossRow(nn.Module):
    """Adds to each token what the whole row holds, padding and what comes later included."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        hidden = self.inner(*args, **kwargs)
        return hidden + hidden.mean(1, keepdim=True)


class AcrossMicroBatch(nn.Module):
    """Adds to each token a trace of all others, as if rounding depended on how many go to an expert."""

    def __init__(self, inner: nn.Module, trace: float):
        super().__init__()
        self.inner = inner
        self.trace = trace

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        hidden = self.inner(*args, **kwargs)
        return hidden + self.trace * hidden.mean()


@pytest.mark.parametrize(
    ("family", "trace", "name"),
    [
        pytest.param("llama", 1e-2, "packed", id="rounding"),
        pytest.param("mamba", 1e-3, "one sample a row", id="rounding and more"),
    ],
)
def test_rounding_is_not_taken_for_a_leak(scorer, group: RankGroup, family: str, trace: float, name: str):
    """It changes other rows as much as the next sample in the same row."""
    made = scorer(family)
    layer = made.model.base_model.layers[0]
    inner = "mlp" if family == "llama" else "mixer"
    setattr(layer, inner, AcrossMicroBatch(getattr(layer, inner), trace))
    assert find_rows(made, group).name == name


def looking_ahead(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = AcrossRow(model.model.layers[0].mlp)


def without_finite_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (looking_ahead, r"alone: logprobs of the second sample differ by .* attention that is not causal"),
        (without_finite_weights, r"logprobs are not finite: the weights are not"),
    ],
)
def test_a_model_that_nothing_makes_right_is_refused(scorer, group: RankGroup, spoil, reason: str, caplog):
    """With what is wrong and how to train it nevertheless, which takes the safest rows and says so."""
    made = scorer("llama")
    spoil(made.model)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM does not score .*--no-self-check") as refused:
        find_rows(made, group)
    assert re.search(reason, str(refused.value))
    assert find_rows(made, group, must_pass=False) == ALONE
    assert "--no-self-check" in caplog.text


def test_a_run_keeps_the_rows_that_it_has(scorer, group: RankGroup):
    """Those of its checkpoint are tried first, and are taken if they are right."""
    made = scorer("qwen3")
    assert find_rows(made, group, first="one sample a row") == ALONE
    assert find_rows(made, group, first="packed") == BY_POSITIONS
    assert find_rows(scorer("mamba"), group, first="packed") == ALONE
