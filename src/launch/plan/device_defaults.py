"""Settles the settings whose right value depends on the device, and says what was chosen and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from cairn.config.shared import CommandConfig
from cairn.run.machine import Machine

Config = TypeVar("Config", bound=CommandConfig)

OPEN = (None, "auto")
"""The values that leave a setting open."""
REASONS: Mapping[str, Mapping[Any, str]] = {
    "precision.compute": {
        "float32": "the ranks compute on CPUs, few of which are faster in bfloat16",
        "bfloat16": "GPUs multiply bfloat16 several times as fast; master weights stay float32",
    },
    "precision.float32_matmul": {
        "highest": "float32 is computed as float32",
        "high": "what stays float32 beside bfloat16 may use TF32, which rounds less than bfloat16",
    },
    "precision.head": {
        "compute": "that of the computation",
        "float32": "bfloat16 would round logprobs by some 0.01, which ratios of policies inherit",
    },
    "head": {"model": "for servers on CPUs", "float32": "logits as the trainer computes them"},
    "compile": {
        False: "CPU servers start faster without",
        True: "without CUDA graphs, generation on GPUs waits for kernel launches",
    },
    "max_num_seqs": {64: "for servers on CPUs", None: "vLLM chooses by the GPU"},
    "startup_timeout": {300.0: "for servers on CPUs", 1800.0: "compiling and large models take minutes"},
    "server_timeout": {300.0: "for servers on CPUs", 1800.0: "servers on GPUs may take minutes to start"},
    "max_in_flight": {256: "for servers on CPUs", 1024: "servers on GPUs generate many answers at a time"},
}
"""Why a value is chosen, by the setting's name in its role."""


@dataclass(frozen=True)
class Choice:
    """A setting that was left open, by its dotted name. value: None leaves it to vLLM."""

    setting: str
    value: Any
    why: str


def settle(config: Config, machine: Machine, *, gpu_servers: bool) -> tuple[Config, list[Choice]]:
    """The configuration with a value for every setting that was left open, and those choices.

    Depends on nothing but its arguments, and changes no setting that was given.

    Args:
        machine: where the trainer's ranks will run.
        gpu_servers: whether vLLM serves on GPUs, which depends on the build of it that is installed.
    """
    settled = config.settled(gpu=machine.has_gpus, gpu_servers=gpu_servers)
    return settled, list(_choices(config.model_dump(), settled.model_dump()))


def _choices(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Choice]:
    for key, value in before.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _choices(cast(Mapping[str, Any], value), after[key], f"{name}.")
        elif value in OPEN:
            reasons = next((REASONS[own] for own in REASONS if f".{name}".endswith(f".{own}")), None)
            if reasons:
                yield Choice(name, after[key], reasons[after[key]])
