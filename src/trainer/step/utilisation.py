"""How much of what a GPU can compute the training of a step needs: model FLOPs utilisation (MFU).

The FLOPs are those of the forward and backward passes over the step's tokens, as in PaLM (arXiv:2204.02311,
appendix B), but with attention counted as causal, and by the length of each sample. What is computed again
(activation checkpointing), and scores of a reference or a teacher, are no part of them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.trainer.models.footprint import EXPERTS, active_experts
from cairn.trainer.packing import RankBatch
from cairn.trainer.state import TrainerState

PEAKS: Mapping[str, float] = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense bfloat16 FLOP/s of tensor cores with float32 sums, from NVIDIA's data sheets of these products (half
of what they give `with sparsity`), by a part of the device's name; the longest that fits counts."""
COMPUTED_IN = "bfloat16"
"""The data type that PEAKS is of, as `precision.compute` calls it."""
OTHERS = frozenset({"MIG", "Laptop", "D"})
"""Words in the names of devices that have less than the device whose name theirs begins with."""
FORWARD, BACKWARD_INPUTS, BACKWARD_WEIGHTS = 2, 2, 2
"""FLOPs for each token and each element of a matrix: a multiplication and an addition in each product."""
ELSEWHERE = ("vision_config", "audio_config")
"""Parts of a configuration whose parameters text does not go through."""


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward and a backward pass of one model.

    token: of a token in its matrices. pair: of a token and one that it attends to, in all layers of a window,
    by the window: how many tokens a token attends to at most, itself included; None: all before it.
    """

    token: float
    pair: Mapping[int | None, float]

    def of(self, lengths: Iterable[int]) -> float:
        """FLOPs of samples of these lengths, in tokens."""
        total = 0.0
        for length, samples in Counter(lengths).items():
            pairs = sum(flops * _pairs(length, window) for window, flops in self.pair.items())
            total += samples * (length * self.token + pairs)
        return total


def _pairs(length: int, window: int | None) -> int:
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def model_flops(model: PreTrainedModel) -> ModelFlops | None:
    """Count a model's FLOPs, by its parameters and its configuration; None if it has parts of other kinds.

    Dense and grouped-query attention, sliding windows, latent attention (DeepSeek), experts, tied embeddings,
    and frozen weights, for which no gradient is computed, are counted as they are.
    """
    config = model.config.get_text_config()
    windows = _windows(model, config)
    if windows is None or any(getattr(model.config, name, None) is not None for name in ELSEWHERE):
        return None
    active = active_experts(config)
    looked_up = _looked_up(model)
    token = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name in looked_up:
            continue
        share = 1.0
        if EXPERTS in name:
            if active is None:
                return None
            share = active
        products = FORWARD + BACKWARD_INPUTS + (BACKWARD_WEIGHTS if parameter.requires_grad else 0)
        token += share * products * parameter.numel()
    heads = int(config.num_attention_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    features = (getattr(config, "qk_head_dim", None) or head) + (getattr(config, "v_head_dim", None) or head)
    pair = float((FORWARD + BACKWARD_INPUTS + BACKWARD_WEIGHTS) * heads * features)
    return ModelFlops(token, {window: pair * layers for window, layers in windows.items()})


def _windows(model: PreTrainedModel, config: Any) -> dict[int | None, int] | None:
    """How many layers attend how far back; None if some do otherwise than by softmax attention."""
    layers: int = getattr(config, "num_hidden_layers", 0)
    attending = sum(type(module).__name__.endswith("Attention") for module in model.modules())
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * layers
    known = {"full_attention": None, "sliding_attention": window}
    if attending != layers or not layers or not hasattr(config, "num_attention_heads") or {*kinds} - {*known}:
        return None
    return dict(Counter(cast("int | None", known[kind]) for kind in kinds))


def _looked_up(model: PreTrainedModel) -> set[str]:
    """Names of parameters of which a token takes a row, without a product; a tied one is a head as well."""
    tied = model.config.get_text_config().tie_word_embeddings and model.get_output_embeddings() is not None
    return {
        f"{name}.{own}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not (tied and module is model.get_input_embeddings())
        for own, _ in module.named_parameters(recurse=False)
    }


def peak_of(device_name: str) -> float | None:
    """A GPU's dense bfloat16 FLOP/s by its name; None if PEAKS does not have it."""
    words = device_name.replace("-", " ").split()
    fitting = [name for name in PEAKS if _within(name.split(), words)] if OTHERS.isdisjoint(words) else []
    return PEAKS[max(fitting, key=len)] if fitting else None


def _within(part: list[str], words: list[str]) -> bool:
    return any(words[start : start + len(part)] == part for start in range(len(words)))


class Utilisation:
    """What a step's row says of the FLOPs of its training; nothing on CPUs.

    Args:
        models: FLOPs of each model that is trained, by its name; None of one that can't be counted.
        device_name: of the GPU of each rank; "" on CPUs.
        peak: dense FLOP/s of a GPU in the type that the models compute in, if it is known.
    """

    def __init__(
        self, models: Mapping[str, ModelFlops | None], device_name: str, ranks: int, peak: float | None
    ):
        """See the class."""
        self._models = models
        self._on_gpu, self._ranks, self._peak = bool(device_name), ranks, peak

    def of_step(self, batch: RankBatch, seconds: float, untrained: Collection[str] = ()) -> dict[str, float]:
        """`tflops_per_gpu`, and `mfu` where the GPU's peak is known.

        Args:
            seconds: that the step took, without its wait for the batch.
            untrained: names of models that the step leaves as they are.
        """
        models = [model for name, model in self._models.items() if name not in untrained]
        counted = [model for model in models if model is not None]
        if not self._on_gpu or len(counted) < len(models) or seconds <= 0:
            return {}
        parts = [batch.parts[number % len(batch.parts)].lengths for number in range(batch.updates)]
        rate = sum(model.of(lengths) for model in counted for lengths in parts) / seconds / self._ranks
        return {"tflops_per_gpu": rate / 1e12, **({"mfu": rate / self._peak} if self._peak else {})}


def make_utilisation(config: TrainerBase, state: TrainerState) -> Utilisation:
    """For the models that a run trains on its devices."""
    group = state.group
    if group.device.type != "cuda":
        return Utilisation({}, "", group.world_size, None)
    name = torch.cuda.get_device_name(group.device)
    models = {key: model_flops(trained.module) for key, trained in state.models.items()}
    compute = config.precision.settled(gpu=True).compute
    return Utilisation(models, name, group.world_size, peak_of(name) if compute == COMPUTED_IN else None)
