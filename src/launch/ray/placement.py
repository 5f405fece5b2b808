# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Where in a Ray cluster the trainer's ranks run: in whole nodes as far as possible, neighbours side by side.

Ranks gather each layer from each other, so what counts is how many of them share a node's links, and that the
ranks of a node have consecutive numbers: NCCL's rings and the replicas of HSDP follow the numbers.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cairn.config.trainer import TrainerBase
from cairn.launch.ray.cluster import computes_on_gpus, wait_for_room
from cairn.launch.ray.environment import environment_for_workers
from cairn.launch.ray.worker import RankProcess
from cairn.run import heartbeat
from cairn.run.exits import RoleFailed

logger = logging.getLogger(__name__)

WHOLE_SECONDS = 30.0
"""Seconds that Ray has to find whole nodes, before ranks are placed one by one."""


class ClusterPlacement:
    """Room in the Ray cluster for `config.workers` ranks: one CPU each and, if there are any, one GPU."""

    def __init__(self, config: TrainerBase):
        """Reserve the room.

        Raises:
            RoleFailed: the cluster is too small, or others use it.
        """
        self.gpus = wait_for_room(
            config, lambda missing: heartbeat.doing(missing, waiting=True), on_gpus=computes_on_gpus(config)
        )
        self._environment = environment_for_workers(config)
        self._size = group_size(config.ranks, room_of_nodes(self.gpus))
        seconds = config.ray.start_timeout
        reserved = self._reserve(config.ranks, seconds if self._size == 1 else min(seconds, WHOLE_SECONDS))
        if reserved is None and self._size > 1:
            logger.warning(
                "Ray did not find %d free nodes for %d ranks each within %g s, as others use a part of them: "
                "each rank is placed by itself",
                *(config.ranks // self._size, self._size, min(seconds, WHOLE_SECONDS)),
            )
            self._size = 1
            reserved = self._reserve(config.ranks, seconds)
        if reserved is None:
            raise RoleFailed(
                f"Ray has no room for {config.ranks} workers with 1 CPU and {self.gpus} GPU each "
                f"({ray.cluster_resources()}); lower the number of workers, or raise ray.start_timeout"
            )
        self._group = reserved
        table: dict[str, Any] = placement_group_table(reserved)
        nodes: dict[int, str] = table["bundles_to_node_id"]
        self._bundles = side_by_side([nodes[number] for number in range(len(nodes))])
        counts = Counter(nodes[bundle] for bundle in self._bundles for _ in range(self._size))
        ranks = list(counts.values())
        if warning := uneven(ranks):
            logger.warning(warning)
        for warning in divided(ranks, config.parallel.neighbours):
            logger.warning(warning)

    def _reserve(self, ranks: int, seconds: float) -> Any:
        """A placement group of bundles for `self._size` ranks each; None if there is no room in time."""
        bundle: dict[str, float] = {"CPU": self._size, "GPU": self.gpus * self._size}
        group = placement_group([bundle] * (ranks // self._size), strategy="PACK")
        if group.wait(seconds):
            return group
        remove_placement_group(group)
        return None

    def start(self, rank: int, log: Path) -> RankProcess:
        """Start a worker in the room reserved for `rank`."""
        bundle = self._bundles[rank // self._size]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return RankProcess(
            log, self._environment, num_cpus=1, num_gpus=self.gpus, scheduling_strategy=strategy
        )


def room_of_nodes(gpus: int) -> list[int]:
    """How many ranks with so many GPUs (1 or 0) and a CPU each living node could take, if it is free."""
    found: list[int] = []
    for node in ray.nodes():
        there: dict[str, float] = node["Resources"] if node["Alive"] else {}
        room = int(there.get("CPU", 0))
        found.append(min(room, int(there.get("GPU", 0))) if gpus else room)
    return found


def group_size(ranks: int, nodes: Sequence[int]) -> int:
    """How many ranks to place together on a node: as many as possible, and as many in each group.

    Args:
        nodes: how many ranks each node could take. If all together can't take them, more nodes are to come,
            and ranks are placed one by one.
    """
    sizes = (size for size in range(ranks, 0, -1) if ranks % size == 0)
    return next((size for size in sizes if sum(room // size for room in nodes) * size >= ranks), 1)


def side_by_side(nodes: Sequence[str]) -> list[int]:
    """The numbers of bundles in an order in which those of a node follow each other.

    Args:
        nodes: by bundle.
    """
    return sorted(range(len(nodes)), key=lambda bundle: (nodes.index(nodes[bundle]), bundle))


def uneven(counts: Sequence[int]) -> str | None:
    """What to tell somebody whose ranks are spread unevenly over nodes; None if each has as many.

    Args:
        counts: of ranks, by node.
    """
    if len(set(counts)) <= 1:
        return None
    return (
        f"the ranks are spread unevenly over {len(counts)} nodes: {', '.join(map(str, counts))}. What they "
        "gather from each other crosses the network more often than it has to: choose a number of workers "
        "that whole nodes hold, on nodes that nobody else uses"
    )


def divided(counts: Sequence[int], parallel: Mapping[str, int]) -> list[str]:
    """What to tell somebody of whose ranks some share a layer's work across nodes.

    Args:
        counts: of ranks, by node.
        parallel: how many neighbouring ranks share it, by the setting in `parallel`.
    """
    firsts = list(itertools.accumulate(counts))[:-1]
    return [
        f"parallel.{name} = {size}, and the nodes have {', '.join(map(str, counts))} ranks: ranks that share "
        "each layer's work are on different nodes, and exchange activations over the network between them in "
        f"every layer. Choose a number of workers with which each node has a multiple of {size}"
        for name, size in parallel.items()
        if any(first % size for first in firsts)
    ]
