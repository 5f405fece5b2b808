"""Low-rank adapters in models of many families: what they compute, and what can't have one."""

import logging
from pathlib import Path

import pytest
import torch
from families import make
from one_rank import one_rank
from peft import PeftModel
from transformers import AutoModelForCausalLM

from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.model import LoraConfig
from cairn.config.trainer import SFTConfig
from cairn.run.errors import UsageError
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import Adapter, make_policy
from cairn.trainer.models.model import build_model, weights
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState

group = one_rank
TOKENS = torch.randint(5, 98, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = SFTConfig(lora=LoraConfig(rank=4))
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LAYERS = {
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "granitemoehybrid": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    | {"input_linear", "output_linear"},
    "qwen2_moe": ATTENTION | {"gate_proj", "up_proj", "down_proj", "shared_expert_gate"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "glm4_moe": ATTENTION,
    "llama4": ATTENTION | {"gate_proj", "up_proj", "down_proj"},
    "gemma3": ATTENTION | {"gate_proj", "up_proj", "down_proj"},
}
"""By family, the last parts of the names of all layers that get an adapter."""


def begun(family: str, group: RankGroup, folder: Path, **lora: object) -> tuple[Path, Adapter]:
    """The base, and an adapter of it in which no value is 0."""
    base = make(family, folder)
    config = SFTConfig(lora=LoraConfig.model_validate({"rank": 4, **lora}))
    policy = make_policy(base, config, group)
    assert isinstance(policy, Adapter)
    policy.begin(base)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.trained().items():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return base, policy


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_three_ways_to_the_same_logits(family: str, group: RankGroup, tmp_path: Path):
    """The model in training, PEFT with what is saved of it, and a whole model of what servers get."""
    base, policy = begun(family, group, tmp_path / "base")
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in policy.trained()}
    assert adapted == LAYERS[family]
    assert not any("vision" in name for name in policy.trained())
    with torch.no_grad():
        logits = policy.module.eval()(TOKENS, use_cache=False).logits

        adapter, whole = tmp_path / "adapter", tmp_path / "whole"
        for folder, tensors, stem in (
            (adapter, policy.saved(), "adapter_model"),
            (whole, policy.served(), "model"),
        ):
            folder.mkdir()
            write_tensors(folder, tensors, stem)
        for name, content in policy.beside().items():
            (adapter / name).write_bytes(content)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        before = plain(TOKENS, use_cache=False).logits
        opened = PeftModel.from_pretrained(plain, adapter).eval()
        torch.testing.assert_close(opened(TOKENS, use_cache=False).logits, logits, rtol=1e-5, atol=1e-5)

        dense = build_model(base, SFTConfig(), group).eval()
        assert weights(dense).keys() == policy.served().keys()
        read_tensors(whole, weights(dense), "model")
        merged = dense(TOKENS, use_cache=False).logits
        torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)
        assert (logits - before).abs().max() > 0.1


def test_layers_that_are_left_out_are_named(
    group: RankGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """By all-linear in the log, by a target's own name in the error."""
    caplog.set_level(logging.INFO)
    for family, name, why in (
        ("deepseek_v3", "gate_proj", "PEFT takes gate_proj for the experts' layers of that name"),
        ("llama4", "router", r"router \(Llama4Router\) computes more than a linear layer does"),
        ("gemma3", "fc1", "fc1 is in a part of the model that text does not go through"),
    ):
        base = make(family, tmp_path / family)
        caplog.clear()
        make_policy(base, CONFIG, group)
        assert f"all-linear leaves out layers: {why}".replace("\\", "") in caplog.text
        with pytest.raises(UsageError, match=f"'{name}' matches no linear layer .* an adapter; {why}"):
            make_policy(base, SFTConfig(lora=LoraConfig(targets=[name])), group)


def test_layers_whose_weights_are_read_without_a_call_are_refused(group: RankGroup, tmp_path: Path):
    """Once the model has run; other layers of it can be adapted."""
    _, policy = begun("jamba", group, tmp_path / "all")
    state = TrainerState(CONFIG, group, {POLICY: policy}, TrainerProgress())
    with pytest.raises(UsageError, match=r"dt_proj without calling the layer.* lora.targets = down_proj,"):
        state.check_model()
    _, policy = begun("jamba", group, tmp_path / "some", targets=["in_proj", "q_proj"])
    TrainerState(CONFIG, group, {POLICY: policy}, TrainerProgress()).check_model()
