"""How many GPUs each server of a job needs: python -m ... SETTINGS MOST; prints the number."""

import sys

from cairn.config.cli import load
from cairn.config.inference import InferenceConfig
from cairn.launch.plan.division import described_folder, size_by_memory
from cairn.run.machine import this_machine


def main(settings: str, most: int) -> None:
    """Decide it from the GPUs of this node, to which those of the servers' nodes are taken to be equal.

    Args:
        settings: the file from which the servers read theirs.
        most: number of GPUs that a server may have.
    """
    config = load(InferenceConfig, ["@", settings])
    size, why = size_by_memory(lambda: described_folder(config.model), config, this_machine(), most)
    print(f"--inference.tensor-parallel {size}: {why}", file=sys.stderr, flush=True)
    print(size)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
