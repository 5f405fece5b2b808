# ruff: noqa: F401 # imported for the other modules of this folder
"""What the plugin takes from inside vLLM, beyond its interfaces for plugins, and which models it serves.

This file is to be checked with each release of vLLM. vLLM promises a plugin the base classes of transfer
engines, the registries of engines and loaders, and its configuration. All other names of the engine's
processes are imported here and nowhere else, with the reason.

What only the API process needs is imported where it is used: the router of the RL routes (`routes.py`), the
update request (`updates.py`), the models of the OpenAI server and their requests for adapters
(`adapters.py`). `adapter_modules.py` reads the LoRA manager of a worker's model.

Runs inside vLLM's processes only.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig

# Which tensors vLLM's layer-by-layer reload takes together.
from vllm.distributed.weight_transfer.base import layerwise_groups

# Which tokens a pass computes, by their slots in the cache.
from vllm.forward_context import get_forward_context

# Head sizes that kernels refuse too late; weights that are products of others.
from vllm.model_executor.layers.attention import Attention, MLAAttention

# Which weights a reload reaches: the methods in `quant_method`, with their `moe_kernel`, `fused_experts` and
# `requantization_source`.
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

# Has a model's routers show what they choose. Of its second argument it calls `capture` alone.
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

# The CPU's kernel rotates only some heads of queries with three dimensions.
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

# Makes the packed copies that the CPU's linear layers compute from (`cpu_linear`, `_cpu_skip_gemm_dispatch`,
# `_cpu_unpacked_conv_weight`), and tells which of them oneDNN does not make.
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel, dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

# Which files of a folder are read, and what is done with the model then.
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

# The reload and its parts, because it is wrong on CPUs, and leaves layers open when it breaks off. Of a
# layer's info: `restore_metadata`, `can_load`, `load_numel` and `loaded_weights`.
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading

# Gives answers the experts of their tokens on CPUs (`aux_output_connector`, `block_size`, `kv_cache_config`,
# `kv_cache_manager.get_block_ids`).
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from cairn.inference.server import MODEL_REFUSED

# Whether the weights of a model can be replaced in a running server.
#
# vLLM's layer-by-layer reload (`model_loader/reload`) replaces what is registered in a layer: parameters
# and buffers. It processes new weights as at the start and copies the result over what was there before,
# from which captured CUDA graphs compute. So it serves for dense layers, for experts in the layouts of the
# Triton, FlashInfer and Marlin kernels, for MLA, and for weights that vLLM quantises as it loads them. What
# it would leave as it was is refused here, when the server starts.


UNQUANTISED = (
    UnquantizedLinearMethod,
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    BaseKVCacheMethod,
)
QUANTISED_ON_LOADING = (OnlineLinearBase, OnlineMoEMethodBase)
ONLY_FOR_NVFP4 = {"FlashInferExperts"}
"""Experts whose own processing of weights does nothing to unquantised ones."""
DEPTH = 6
"""How deep a kernel's objects are searched for tensors."""


def check_updatable(model: torch.nn.Module, config: VllmConfig) -> None:
    """Refuse a model whose weights an update would not replace, or not all.

    Raises:
        ValueError: with the reason, which ends the server's start.
    """
    for module in model.modules():
        if reason := _reason(module, config):
            raise ValueError(f"{MODEL_REFUSED}its weights can't be updated in a running server: {reason}")
    offload = config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        raise ValueError(
            f"{MODEL_REFUSED}its weights can't be updated in a running server: vLLM's reload does not take "
            "weights that are offloaded to the host; remove the offloading from vllm_args"
        )


def _reason(module: torch.nn.Module, config: VllmConfig) -> str | None:
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return None
    if isinstance(method, UNQUANTISED):
        experts = _experts(method)
        process = experts and type(experts).process_weights_after_loading
        on_gpu = any(
            parameter.device.type != "cpu" for parameter in module.parameters()
        )  # else see loading.py
        if not on_gpu or process in (None, FusedMoEExperts.process_weights_after_loading):
            return None
        if type(experts).__name__ in ONLY_FOR_NVFP4:
            return None
        return (
            f"{type(experts).__name__} keeps its experts' weights where vLLM's reload does not reach them; "
            "choose another kernel with vllm_args, such as --moe-backend triton"
        )
    if not isinstance(method, QUANTISED_ON_LOADING) or getattr(method, "requantization_source", None):
        if config.quant_config is None:  # none of vLLM's quantisations, whatever it is
            return None
        return (
            f"they are quantised in its files ({type(method).__name__}), and policies are not; serve the "
            "model that they were quantised from, which vLLM can quantise as it loads: put --quantization "
            "fp8_per_tensor into vllm_args"
        )
    if config.model_config.enforce_eager:  # kernels are made anew by every update
        return None
    known = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    for where, tensor in _tensors(method, type(method).__name__):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in known:
            return f"CUDA graphs would go on with the old {where}; --no-compile does without them"
    return None


def _experts(method: QuantizeMethodBase) -> FusedMoEExperts | None:
    kernel = getattr(method, "moe_kernel", None)
    return kernel and kernel.fused_experts


def _tensors(
    thing: Any, name: str, depth: int = DEPTH, seen: set[int] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an object keeps in its attributes, and in theirs, but not in modules; and where."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield name, thing
        return
    if depth == 0 or isinstance(thing, (torch.nn.Module, type)):
        return
    if isinstance(thing, dict):
        parts = {f"{name}[{key!r}]": value for key, value in thing.items()}
    elif isinstance(thing, (list, tuple)):
        parts = {f"{name}[{number}]": value for number, value in enumerate(thing)}
    elif type(thing).__module__.startswith("vllm."):
        parts = {f"{name}.{key}": value for key, value in vars(thing).items()} if _has_vars(thing) else {}
    else:
        return
    for where, part in parts.items():
        yield from _tensors(part, where, depth - 1, seen)


def _has_vars(thing: Any) -> bool:
    return hasattr(thing, "__dict__")
