"""What --dry-run prints: the configuration, and what it means on the machine."""

import sys
from typing import cast

from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS, RunConfig
from cairn.config.shared import CommandConfig
from cairn.inference.build import serves_on_gpus
from cairn.launch.placing import placed, placed_server
from cairn.launch.settling import settle
from cairn.run.machine import Machine, machine_of, this_machine


def show(command: str, config: CommandConfig) -> None:
    """Print the resolved configuration as JSON, and for people, on standard error, what was chosen and why.

    Raises:
        UsageError: `--machine` is no description of a machine.
    """
    machine = machine_of(config.machine) if config.machine else this_machine()
    gpu_servers = machine.has_gpus if config.machine else serves_on_gpus()
    vllm = "gpu" if gpu_servers else "cpu"
    lines = [f"planned for {in_words(machine)}"]
    ranks = machine
    if command in KINDS:
        kind = KINDS[command]
        config, placing = placed(kind, cast(RunConfig, config), machine, vllm)
        ranks = placing.of_ranks(machine)
        lines += [f"  {words}" for words in [placing.in_words()] if words]
    elif command == "inference":
        config = placed_server(cast(InferenceConfig, config), machine, vllm)
    settled, choices = settle(config, ranks, gpu_servers=gpu_servers)
    print(settled.model_dump_json(indent=2), flush=True)
    for choice in choices:
        value = "vLLM's choice" if choice.value is None else choice.value
        lines.append(f"  {choice.setting} = {value}: {choice.why}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def in_words(machine: Machine) -> str:
    """A machine for people: its GPUs and its memory."""
    kinds = [f"{gpu.memory / 2**30:.0f} GiB ({gpu.name})" for gpu in machine.gpus]
    gpus = ", ".join(f"{kinds.count(kind)} GPUs with {kind}" for kind in dict.fromkeys(kinds))
    return f"{gpus or 'no GPU'}, {machine.memory / 2**30:.0f} GiB of memory"
