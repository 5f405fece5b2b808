"""What megatron-core asks of CUDA, answered on a machine without a GPU.

Its layers, buffers and optimisers name the current CUDA device, and its distributed optimiser compares the
names of tensors' types with those on a GPU; no setting of megatron-core changes that. While it builds or
computes on a CPU, `without_gpu` gives these few questions the CPU's answers, and takes them back afterwards.
On a GPU nothing is changed.
"""

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _nothing(*arguments: Any, **named: Any) -> None:
    pass


def _stream(*_: Any, **__: Any) -> SimpleNamespace:
    """Work that is done when it is asked for has nothing to wait for."""
    event = SimpleNamespace(synchronize=_nothing)
    return SimpleNamespace(wait_stream=_nothing, wait_event=_nothing, record_event=lambda *_: event)


ANSWERS: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _nothing,
    "current_stream": _stream,
    "Stream": _stream,
    "stream": lambda _: contextlib.nullcontext(),
    "FloatTensor": torch.FloatTensor,
}
"""Of `torch.cuda`, by name."""


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
    before = {name: getattr(torch.cuda, name) for name in ANSWERS}
    try:
        for name, answer in ANSWERS.items():
            setattr(torch.cuda, name, answer)
        with _OnCpu():
            yield
    finally:
        for name, own in before.items():
            setattr(torch.cuda, name, own)
