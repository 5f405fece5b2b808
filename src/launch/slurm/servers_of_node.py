"""How the nodes of a job are divided, and how many GPUs each server needs.

python -m ... SETTINGS GPUS NODES SERVER_NODES prints the GPUs of a server and the number of nodes that serve.
SERVER_NODES 0 leaves that open.
"""

import sys

from cairn.config.cli import load
from cairn.config.rl import RLConfig
from cairn.launch.plan.division import UNKNOWN, described_folder, fastest_division, size_by_memory
from cairn.run.machine import this_machine


def main(settings: str, gpus: int, nodes: int, server_nodes: int) -> None:
    """Decide it from the GPUs of this node, to which those of the other nodes are taken to be equal.

    Args:
        settings: the file from which the run reads its own.
        gpus: of each node.
        server_nodes: how many serve, if that is given; else 0.
    """
    config, machine = load(RLConfig, ["@", settings]), this_machine()
    inference = config.inference
    if inference.tensor_parallel is None and inference.size == 1 and gpus > 1:
        most = gpus // (inference.servers or 1)
        size, why = size_by_memory(lambda: described_folder(config.model), inference, machine, most)
        tell("inference.tensor-parallel", size, why)
        inference = inference.model_copy(update={"tensor_parallel": size})
    if not server_nodes:
        try:
            folder = described_folder(config.model)
            own = config.model_copy(update={"inference": inference})
            found = fastest_division(own, folder, machine, gpus * nodes, node=gpus) if machine.gpus else None
        except UNKNOWN:
            found = None
        serving = (gpus * nodes - found[0].split.ranks) // gpus if found else nodes // 2
        server_nodes = tell("slurm.server-nodes", serving, found[1] if found else "half of the nodes")
    print(inference.size, server_nodes)


def tell(flag: str, value: int, why: str) -> int:
    """Say in the job's log what was decided; returns it."""
    print(f"--{flag} {value}: {why}", file=sys.stderr, flush=True)
    return value


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
