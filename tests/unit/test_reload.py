"""Weights in layouts that vLLM makes after loading, updated by vLLM's own reload."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from cairn.inference.plugin.loading import load_weights

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


def test_a_layer_whose_processing_fails_is_as_it_was(monkeypatch: pytest.MonkeyPatch):
    model = Model()
    with monkeypatch.context() as patch:
        patch.setattr(model.second.quant_method, "process_weights_after_loading", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load_weights(model, [tensors(50.0)], CONFIG, {})
    assert rows(model.second) == [22, 24, 26]
    load_weights(model, [tensors(100.0)], CONFIG, {})
    assert rows(model.second) == [220, 222, 224]
