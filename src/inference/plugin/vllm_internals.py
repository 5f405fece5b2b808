# ruff: noqa: F401 # imported for the other modules of this folder
"""What the plugin takes from inside vLLM, beyond its interfaces for plugins: to be checked with each release.

vLLM promises a plugin the base classes of transfer engines, the registries of engines and loaders, and its
configuration. All other names of the engine's processes are imported here and nowhere else, with the reason.

What only the API process needs is imported where it is used: the router of the RL routes (`routes.py`), the
update request (`updates.py`), the models of the OpenAI server and their requests for adapters
(`adapters.py`). `adapter_modules.py` reads the LoRA manager of a worker's model.
"""

# Which tensors vLLM's layer-by-layer reload takes together.
from vllm.distributed.weight_transfer.base import layerwise_groups

# Head sizes that kernels refuse too late; weights that are products of others.
from vllm.model_executor.layers.attention import Attention, MLAAttention

# Which weights a reload reaches: the methods in `quant_method`, with their `moe_kernel`, `fused_experts` and
# `requantization_source`.
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

# The CPU's kernel rotates only some heads of queries with three dimensions.
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

# Makes the packed copies that the CPU's linear layers compute from (`cpu_linear`, `_cpu_skip_gemm_dispatch`,
# `_cpu_unpacked_conv_weight`).
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
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
