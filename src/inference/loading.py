"""Put weights into vLLM's model: at its start, and in place of those that it has.

Runs inside vLLM's processes only.
"""

import collections
import copy
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from cairn.inference.weight_files import WORKERS


class RepackableLoader(DefaultModelLoader):
    """Loads as vLLM does by default, but keeps linear layers' weights beside the packed copies (CPU only).

    vLLM's CPU build computes from packed copies and drops the weights, which hides them from checksums; and
    after an update it does not repack a `lm_head` that is tied to the embeddings. So `pack_linear_weights`
    does all the packing, here and after every update.
    """

    def __init__(self, load_config: LoadConfig):
        load_config = copy.copy(load_config)
        load_config.load_format = "auto"
        super().__init__(load_config)

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        for module in model.modules():
            if isinstance(module, LinearBase):
                # vLLM's own switch for layers that are not to be packed.
                module._cpu_skip_gemm_dispatch = True

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> torch.nn.Module:
        model = super().load_model(vllm_config, model_config, prefix)
        pack_linear_weights(model.modules())
        return model


def pack_linear_weights(modules: Iterable[torch.nn.Module]) -> None:
    """Make the packed copies from which the CPU's linear layers compute anew; elsewhere there are none."""
    for module in modules:
        if hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def load_and_pack(model: torch.nn.Module, parts: Iterable[dict[str, torch.Tensor]]) -> set[str]:
    """Copy weights straight into the parameters, and pack each layer while it is in the processor's cache.

    Layers are taken by several threads while this one goes on through the `parts`; none is in two of them.
    Returns vLLM's names of the parameters that were loaded.
    """
    parameters = dict(model.named_parameters())
    users = collections.defaultdict(list)  # several modules where weights are tied
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            users[id(module.weight)].append(module)

    def load(layer: list[tuple[str, torch.Tensor]]) -> set[str]:
        with torch.no_grad():
            loaded = set(model.load_weights(layer))
            pack_linear_weights(module for name in loaded for module in users[id(parameters[name])])
        return loaded

    layers = (
        [(name, part[name]) for name in names] for part in parts for names in layerwise_groups(list(part))
    )
    with ThreadPoolExecutor(WORKERS) as workers:
        return set().union(*workers.map(load, layers))
