"""Models whose weights vLLM's reload would not replace are refused when the server starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.moonep_experts import MoonEPExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import (
    Fp8PerTensorOnlineLinearMethod,
    Fp8PerTensorOnlineMoEMethod,
)

from cairn.inference.plugin.vllm_internals import check_updatable
from cairn.inference.server import reason


def bare(kind: type, **attributes: Any) -> Any:
    """An object of vLLM's that was not initialised, which for many takes a GPU."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def model(method: Any, device: str = "meta") -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.w13_weight = Parameter(torch.zeros(4, 2, 2, device=device))
    layer.w13_weight_scale = Parameter(torch.zeros(4))
    layer.quant_method = method
    return torch.nn.Sequential(layer)


def config(*, quantised: bool = True, eager: bool = False, offloaded: float = 0) -> Any:
    return SimpleNamespace(
        quant_config=object() if quantised else None,
        model_config=SimpleNamespace(enforce_eager=eager),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=offloaded), prefetch=SimpleNamespace(offload_group_size=0)
        ),
    )


def experts(kind: type) -> Any:
    kernel = SimpleNamespace(fused_experts=bare(kind))
    return bare(UnquantizedFusedMoEMethod, moe_kernel=kernel, _modules={}, _parameters={}, _buffers={})


def fp8_moe(scale: torch.Tensor) -> Any:
    scales = FusedMoEQuantConfig.make(torch.float8_e4m3fn, w1_scale=scale, w2_scale=scale)
    attributes = {"_modules": {}, "_parameters": {}, "_buffers": {}}
    return bare(Fp8PerTensorOnlineMoEMethod, moe_quant_config=scales, moe_kernel=None, **attributes)


@pytest.mark.parametrize(
    "method",
    [
        bare(UnquantizedLinearMethod),
        bare(Fp8PerTensorOnlineLinearMethod, requantization_source=None),
        experts(TritonExperts),
    ],
)
def test_plain_layers_experts_and_those_quantised_on_loading_are_served(method: Any):
    check_updatable(model(method), config())


def test_weights_quantised_in_the_files_are_refused():
    with pytest.raises(ValueError, match=r"quantised in its files \(AutoAWQLinearMethod\)") as error:
        check_updatable(model(bare(AutoAWQLinearMethod)), config())
    # The command ends with this reason, and does not try again.
    why = reason(f"(Worker_TP1 pid=7) ValueError: {error.value}\n")
    assert why is not None
    assert why.is_final
    assert "fp8_per_tensor into vllm_args" in why.text
    requantised = bare(Fp8PerTensorOnlineLinearMethod, requantization_source=object())
    with pytest.raises(ValueError, match="quantised in its files"):
        check_updatable(model(requantised), config())


def test_experts_whose_weights_lie_elsewhere_are_refused():
    with pytest.raises(ValueError, match=r"MoonEPExperts keeps .* --moe-backend triton"):
        check_updatable(model(experts(MoonEPExperts)), config(quantised=False))
    check_updatable(model(experts(MoonEPExperts), device="cpu"), config(quantised=False))


def test_scales_that_only_a_cuda_graph_would_know_are_refused():
    served = model(None)
    layer = served[0]
    layer.quant_method = fp8_moe(layer.w13_weight_scale)
    check_updatable(served, config())
    layer.quant_method = fp8_moe(layer.w13_weight_scale * 2)
    with pytest.raises(ValueError, match=r"old Fp8PerTensorOnlineMoEMethod\.moe_quant_config\..*scale"):
        check_updatable(served, config())
    check_updatable(served, config(eager=True))


def test_weights_on_the_host_are_refused():
    with pytest.raises(ValueError, match="offloaded to the host"):
        check_updatable(model(None), config(offloaded=4))
