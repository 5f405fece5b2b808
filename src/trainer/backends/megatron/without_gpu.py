"""What megatron-core asks of CUDA, answered on a machine without a GPU.

Its layers, buffers and optimisers name the current CUDA device, and its distributed optimiser compares the
names of tensors' types with those on a GPU; where layers are computed once more, it puts back the state of a
GPU's random numbers, although none are drawn. No setting of megatron-core changes that. While it builds or
computes on a CPU, `without_gpu` gives these few questions the CPU's answers, and takes them back afterwards.
On a GPU nothing is changed.
"""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode


def _nothing(*arguments: Any, **named: Any) -> None:
    pass


def _stream(*_: Any, **__: Any) -> SimpleNamespace:
    """Work that is done when it is asked for has nothing to wait for."""
    event = SimpleNamespace(synchronize=_nothing)
    return SimpleNamespace(wait_stream=_nothing, wait_event=_nothing, record_event=lambda *_: event)


ANSWERS: dict[tuple[Any, str], Any] = {
    (torch.cuda, "current_device"): lambda: torch.device("cpu"),
    (torch.cuda, "synchronize"): _nothing,
    (torch.cuda, "current_stream"): _stream,
    (torch.cuda, "Stream"): _stream,
    (torch.cuda, "stream"): lambda _: contextlib.nullcontext(),
    (torch.cuda, "FloatTensor"): torch.FloatTensor,
    (random, "_get_cuda_rng_state"): _nothing,
    (random, "_set_cuda_rng_state"): _nothing,
}
"""By module and name of the function."""


class _OnCpu(TorchFunctionMode):
    """Tensors for "cuda" are made on the CPU, and say that they are CUDA's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_gpu(device: torch.device) -> Generator[None]:
    """The context in which megatron-core works on `device`, and in which nothing else should run."""
    if device.type == "cuda":
        yield
        return
    before = {(module, name): getattr(module, name) for module, name in ANSWERS}
    try:
        for (module, name), answer in ANSWERS.items():
            setattr(module, name, answer)
        with _OnCpu():
            yield
    finally:
        for (module, name), own in before.items():
            setattr(module, name, own)
