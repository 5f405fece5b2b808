"""vLLM plugin: which parts of an adapter a worker computes with.

vLLM leaves out without a word what it has no layer for, so each worker is asked.

Runs inside vLLM's workers only.
"""

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class AdapterModules:
    """vLLM's worker gets the methods of this class (`--worker-extension-cls`)."""

    model_runner: "GPUModelRunner"

    def cairn_adapter_parts(self, number: int) -> list[str]:
        """The pairs of matrices of an adapter, by vLLM's `number` of it, that layers here compute with.

        A pair is named by its layer, and by its place in that if vLLM has made one layer of several.
        """
        manager = cast("LoRAModelManager", cast(Any, self.model_runner.get_model()).lora_manager)
        adapter = manager.get_adapter(number)
        if adapter is None:
            return []
        found: list[str] = []
        for name, pair in adapter.loras.items():
            if name not in manager.modules:
                continue
            pairs = zip(pair.lora_a, pair.lora_b, strict=True) if isinstance(pair.lora_a, list) else [(1, 1)]
            found += [f"{name}[{i}]" for i, (a, b) in enumerate(pairs) if a is not None and b is not None]
        return found
