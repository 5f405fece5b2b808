"""Model FLOPs utilisation: what is counted of which model, and what a step's row says of it."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cairn.config.model import PrecisionConfig
from cairn.trainer.packing import BatchCounts, RankBatch, UpdateBatch
from cairn.trainer.step.utilisation import ModelFlops, Utilisation, make_utilisation, model_flops, peak_of

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 128,
}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DENSE = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96)
"""Elements of the matrices of SMALL's layers."""
HEAD = 64 * 128


def built(kind: str, **changes: Any) -> PreTrainedModel:
    """A model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes))


def flops(model: PreTrainedModel) -> ModelFlops:
    found = model_flops(model)
    assert found is not None
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_with_grouped_queries(tied: bool):
    """Input embeddings are looked up, a tied head is a product all the same, and each query head attends."""
    found = flops(built("qwen3", tie_word_embeddings=tied))
    assert found.token == 6 * (DENSE + HEAD)
    assert found.pair == {None: 12 * 2 * 4 * 32}
    assert found.of([3, 5]) == found.of([5, 3]) == 8 * found.token + (6 + 15) * 12 * 2 * 4 * 32


def test_it_is_what_torch_counts_of_a_forward_and_a_backward_pass():
    """Attention of torch's counter is not causal, so it is told all pairs of a sample."""
    length = 16
    config = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(length)[None]
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    found = flops(model)
    assert counter.get_total_flops() == pytest.approx(
        length * found.token + length**2 * sum(found.pair.values()), rel=0.02
    )


def test_a_token_uses_its_experts_alone():
    dense, mixed = flops(built("qwen3")), flops(built("qwen3_moe", **EXPERTS))
    router, expert = 64 * 8, 3 * 64 * 48
    assert mixed.token == 6 * (DENSE - 2 * 3 * 64 * 96 + HEAD + 2 * (router + 2 * expert))
    assert mixed.pair == dense.pair


def test_frozen_matrices_have_no_gradients_of_their_own():
    model = built("qwen3", tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    assert flops(model).token == 4 * (DENSE + HEAD) + 2 * 2 * 64 * 128


def test_a_window_bounds_what_a_token_attends_to():
    kinds = ["sliding_attention", "full_attention"]
    found = flops(built("gemma2", sliding_window=4, layer_types=kinds))
    assert found.pair == {4: 12 * 4 * 32, None: 12 * 4 * 32}
    assert found.of([6]) == 6 * found.token + ((10 + 2 * 4) + 21) * 12 * 4 * 32
    assert flops(built("mistral", sliding_window=4)).pair == {4: 12 * 2 * 4 * 32}


def test_latent_attention_has_heads_of_two_sizes():
    found = flops(built("deepseek_v3", **LATENT, first_k_dense_replace=2))
    assert found.pair == {None: 6 * 2 * 4 * (24 + 12)}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mamba", {}), ("qwen3_next", {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]})],
)
def test_other_kinds_of_layers_are_not_counted(kind: str, changes: Mapping[str, Any]):
    assert model_flops(built(kind, **changes)) is None


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A1000", None),
    ],
)
def test_peaks_by_names_of_devices(name: str, tera: float | None):
    assert peak_of(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_where_peak_and_name_come_from(monkeypatch: pytest.MonkeyPatch):
    """The device's name and the type of the computation decide; a CPU has none."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def metrics(device: str, **precision: Any) -> dict[str, float]:
        group: Any = SimpleNamespace(device=torch.device(device), world_size=1)
        state: Any = SimpleNamespace(group=group, models={"policy": SimpleNamespace(module=built("qwen3"))})
        config: Any = SimpleNamespace(precision=PrecisionConfig(**precision))
        return make_utilisation(config, state).of_step(step_of([8]), 1.0)

    used = metrics("cuda")
    assert used["mfu"] == pytest.approx(used["tflops_per_gpu"] / 989)
    assert used["tflops_per_gpu"] == flops(built("qwen3")).of([8]) / 1e12
    assert metrics("cuda", compute="float32").keys() == {"tflops_per_gpu"}
    assert metrics("cpu") == {}


def step_of(*lengths: list[int], updates: int = 1) -> RankBatch:
    """A step's batch in parts with samples of these lengths."""
    counts = BatchCounts(samples=1, tokens=1, learned=1, cut=0, unlearned=0)
    parts = [UpdateBatch([], counts, one) for one in lengths]
    return RankBatch(parts, updates, 1.0, counts, "", {})


def test_what_a_row_says():
    """Per GPU, over all updates, and of the models that the step trains."""
    models = {"policy": ModelFlops(100.0, {}), "critic": ModelFlops(10.0, {})}
    used = Utilisation(models, "NVIDIA H100", ranks=2, peak=1e6)
    batch = step_of([10, 20], [30], updates=4)
    whole = 110 * 120 / 2.0 / 2
    assert used.of_step(batch, 2.0) == {"tflops_per_gpu": whole / 1e12, "mfu": whole / 1e6}
    assert used.of_step(batch, 2.0, untrained=["policy"])["mfu"] == pytest.approx(whole / 11 / 1e6)


@pytest.mark.parametrize(
    ("models", "device", "peak", "said"),
    [
        ({"policy": ModelFlops(1.0, {})}, "", None, set()),
        ({"policy": ModelFlops(1.0, {})}, "NVIDIA Unheard Of", None, {"tflops_per_gpu"}),
        ({"policy": ModelFlops(1.0, {}), "critic": None}, "NVIDIA H100", 1e12, set()),
    ],
)
def test_what_is_not_known_is_not_said(
    models: Mapping[str, ModelFlops | None], device: str, peak: float | None, said: set[str]
):
    assert Utilisation(models, device, 1, peak).of_step(step_of([8]), 1.0).keys() == said
