"""Weights in layouts that vLLM makes after loading, updated by vLLM's own reload."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draws
import pytest
import torch
from families import make
from torch.nn import Parameter
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.quantization import _ONLINE_SHORTHANDS
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    record_metadata_for_reloading,
)

from cairn.inference.plugin.loading import (
    CALLS,
    FIRST_UPDATES,
    LINE,
    SHARES,
    held_checksum,
    load_weights,
    spread_rows,
)
from cairn.inference.plugin.vllm_internals import UnquantizedEmbeddingMethod, check_updatable
from cairn.policy.checksums import checksum
from cairn.policy.errors import Unfit

CONFIG: Any = SimpleNamespace(quantization="fp8_per_tensor", dtype=torch.float32)


class Doubling(QuantizeMethodBase):
    """Processes by doubling, which shows how often it was done to which values."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = Parameter(2 * layer.weight.data, requires_grad=False)


class Stacked(torch.nn.Module):
    """A layer that three tensors are loaded into, one after the other, and then processed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(3, 4), requires_grad=False)
        self.weight.weight_loader = self.load_row
        self.quant_method = Doubling()

    def load_row(self, param: Parameter, tensor: torch.Tensor, row: int) -> None:
        param.data[row].copy_(tensor)


class Model(torch.nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stacked(), Stacked()
        record_metadata_for_reloading(self)
        self.load_weights(tensors(1.0).items())
        for layer in (self.first, self.second):
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            layer, _, row = name.partition(".")
            param = getattr(self, layer).weight
            param.weight_loader(param, tensor, "qkv".index(row))
            loaded.add(f"{layer}.weight")
        return loaded


def tensors(first: float) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.{row}": torch.full((4,), first + 10 * number + i)
        for number, layer in enumerate(("first", "second"))
        for i, row in enumerate("qkv")
    }


def rows(layer: Stacked) -> list[float]:
    assert (layer.weight == layer.weight[:, :1]).all()
    return layer.weight[:, 0].tolist()


@pytest.mark.parametrize("arrived", range(7))
def test_an_update_that_broke_off_leaves_nothing_to_the_next_one(arrived: int):
    model = Model()
    places = [layer.weight.data_ptr() for layer in (model.first, model.second)]

    def breaking_off() -> Iterator[dict[str, torch.Tensor]]:
        for name, tensor in list(tensors(50.0).items())[:arrived]:
            yield {name: tensor}
        raise RuntimeError("the trainer has died")

    with pytest.raises(RuntimeError, match="has died"):
        load_weights(model, breaking_off(), CONFIG, {})
    # Each layer is old or new as a whole.
    assert rows(model.first) == ([100, 102, 104] if arrived >= 3 else [2, 4, 6])
    assert rows(model.second) == ([120, 122, 124] if arrived >= 6 else [22, 24, 26])

    load_weights(model, [tensors(100.0)], CONFIG, {})
    assert rows(model.first) == [200, 202, 204]
    assert rows(model.second) == [220, 222, 224]
    assert [layer.weight.data_ptr() for layer in (model.first, model.second)] == places


def test_a_layer_that_shares_the_parameter_of_another_gets_what_that_one_gets():
    """As a head that is tied to the embeddings."""
    model = Model()
    model.head = torch.nn.Module()
    model.head.weight = model.first.weight
    record_metadata_for_reloading(model.head)
    load_weights(model, [tensors(100.0)], CONFIG, {})
    assert rows(model.first) == [200, 202, 204]
    assert model.head.weight is model.first.weight
    model.head.weight = Parameter(torch.zeros(3, 4))
    with pytest.raises(Unfit, match="cannot update the weights of Module"):
        load_weights(model, [tensors(100.0)], CONFIG, {})


def test_a_layer_whose_processing_fails_is_as_it_was(monkeypatch: pytest.MonkeyPatch):
    model = Model()
    with monkeypatch.context() as patch:
        patch.setattr(model.second.quant_method, "process_weights_after_loading", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_weights(model, [tensors(50.0)], CONFIG, {})
    assert rows(model.second) == [22, 24, 26]
    load_weights(model, [tensors(100.0)], CONFIG, {})
    assert rows(model.second) == [220, 222, 224]


# On CPUs: linear layers that compute from packed copies of their weights.


PLAIN: Any = SimpleNamespace(quantization=None, dtype=torch.float32)


class Packed(torch.nn.Module):
    """Linear layers, whose tensors the model's loader copies; counts how often it is called."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.calls = 0
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 96, bias=False) for _ in range(layers))
        for layer in self.layers:
            layer.requires_grad_(False)
            layer.cpu_linear = torch.nn.functional.linear
        spread_rows(self.modules())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.calls += 1
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


def test_layers_are_packed_by_few_calls_however_many_there_are():
    model = Packed(layers=40)
    drawn = torch.Generator().manual_seed(1)
    for update in range(FIRST_UPDATES + 2):
        new = {name: torch.randn(96, 64, generator=drawn) for name, _ in model.named_parameters()}
        model.calls = 0
        load_weights(model, [new], PLAIN, {})
        assert model.calls <= (CALLS + 40 / SHARES if update >= FIRST_UPDATES else 40)
        x = torch.randn(5, 64, generator=drawn)
        for (name, parameter), layer in zip(model.named_parameters(), model.layers, strict=True):
            assert torch.equal(parameter, new[name])
            packed = layer.cpu_linear(x, torch.zeros(96, 64), None)  # computes from what is packed
            torch.testing.assert_close(packed, x @ new[name].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_packed_lie_an_odd_number_of_cache_lines_apart(dtype: torch.dtype):
    """And hold what they did, also for their checksum. Rows that other code reads, or not in pairs of lines,
    stay as they are."""
    layer, head, unpacked = (torch.nn.Linear(128, 6, bias=False, dtype=dtype) for _ in range(3))
    narrow = torch.nn.Linear(24, 6, bias=False, dtype=dtype)
    for module in (layer, head, narrow):
        module.cpu_linear = torch.nn.functional.linear
    head.quant_method = UnquantizedEmbeddingMethod()
    before = layer.weight.detach().clone()
    for _ in range(2):
        spread_rows([layer, head, unpacked, narrow])
        lines, rest = divmod(layer.weight.stride(0) * dtype.itemsize, LINE)
        assert (lines, rest) == (128 * dtype.itemsize // LINE + 1, 0)
    assert lines % 2 == 1
    assert torch.equal(layer.weight, before)
    assert held_checksum(layer.weight) == checksum(before)
    for module in (head, unpacked, narrow):
        assert module.weight.is_contiguous()
        assert held_checksum(module.weight) == checksum(module.weight)


# FP8, which vLLM makes of the weights as it loads them; per channel is the kind that its CPU build can do.


@pytest.fixture
def vllm_config(tmp_path: Path) -> Iterator[VllmConfig]:
    """As in a worker of vLLM's; with its process groups, of one process."""
    model = ModelConfig(model=str(make("qwen3", tmp_path / "model")), dtype="bfloat16")
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield config
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Fp8Model(torch.nn.Module):
    """Two layers quantised on loading."""

    def __init__(self) -> None:
        super().__init__()
        quantisation = OnlineQuantizationConfig(_ONLINE_SHORTHANDS["fp8_per_channel"])
        for name in ("up", "down"):
            layer = ReplicatedLinear(
                64, 64, bias=False, quant_config=quantisation, prefix=name, params_dtype=torch.bfloat16
            )
            setattr(self, name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


def fp8_model(config: VllmConfig, seed: int) -> Fp8Model:
    """As vLLM starts it."""
    model = Fp8Model()
    record_metadata_for_reloading(model)
    model.load_weights(fp8_weights(seed).items())
    finalize_layerwise_processing(model, config.model_config)
    return model


def fp8_weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": torch.randn(64, 64, generator=draw).bfloat16() for name in ("up", "down")}


@draws.seldom
def test_weights_quantised_on_loading_are_those_of_a_server_started_with_them(vllm_config: VllmConfig):
    """Bit for bit, and in the same places; also after an update that broke off."""
    model, expected = fp8_model(vllm_config, seed=1), fp8_model(vllm_config, seed=2)
    check_updatable(model, vllm_config)
    config: Any = SimpleNamespace(quantization="fp8_per_channel", dtype=torch.bfloat16)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert places.keys() == {f"{a}.{b}" for a in ("up", "down") for b in ("weight", "weight_scale")}

    def breaking_off() -> Iterator[dict[str, torch.Tensor]]:
        yield dict(list(fp8_weights(seed=3).items())[:1])
        raise RuntimeError("the trainer has died")

    with pytest.raises(RuntimeError, match="has died"):
        load_weights(model, breaking_off(), config, {})
    load_weights(model, [fp8_weights(seed=2)], config, {})
    for name, parameter in expected.named_parameters():
        got = model.get_parameter(name)
        assert got.dtype == parameter.dtype
        assert torch.equal(got.view(torch.uint8), parameter.view(torch.uint8)), name
        assert got.data_ptr() == places[name]
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(model.up(x)[0], expected.up(x)[0])
    with pytest.raises(Unfit, match="cannot update the weights of ReplicatedLinear"):
        load_weights(model, [dict(list(fp8_weights(seed=3).items())[:1])], config, {})
