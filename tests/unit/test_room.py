"""Room for ranks in a given Ray cluster, some of whose nodes are still starting."""

import pytest

from cairn.config.trainer import SFTConfig
from cairn.launch.ray import cluster, placement
from cairn.run.exits import RoleFailed
from cairn.run.machine import Gpu, Machine

ONE_OF_TWO_PODS, BOTH_PODS = {"CPU": 32.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 16.0}
HEAD, CPUS = {}, {"CPU": 32.0}
SOON, NOW = 600.0, 1e-6
"""Values of ray.start_timeout."""


class Growing:
    """A Ray cluster that has more at each look; the last stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, float]):
        self.told: list[str] = []
        self._looks = list(looks)
        monkeypatch.setattr(cluster, "POLL_SECONDS", 0)
        monkeypatch.setattr(cluster, "resources", self._look)
        monkeypatch.setattr(cluster, "this_machine", lambda: Machine(()))

    def _look(self) -> dict[str, float]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def wait(self, seconds: float, on_gpus: bool | None = None, workers: int | None = 16) -> int:
        ray = {"address": "head:6379", "start_timeout": seconds}
        config = SFTConfig.model_validate({"workers": workers, "ray": ray})
        return cluster.wait_for_room(config, self.told.append, on_gpus=on_gpus)


@pytest.mark.parametrize("on_gpus", [None, True])
def test_nodes_that_join_later_are_waited_for(monkeypatch: pytest.MonkeyPatch, on_gpus: bool | None):
    """What is missing is said once, until it is something else."""
    growing = Growing(monkeypatch, HEAD, HEAD, ONE_OF_TWO_PODS, ONE_OF_TWO_PODS, BOTH_PODS)
    assert growing.wait(SOON, on_gpus) == 1
    assert len(growing.told) == 2
    assert "at head:6379 has 32 CPUs and 8 GPUs, and workers 16 take a CPU and a GPU each" in growing.told[1]
    assert "for up to 600 s (ray.start_timeout)" in growing.told[1]


def test_nodes_that_do_not_come_are_no_bad_usage(monkeypatch: pytest.MonkeyPatch):
    """A lost pod's place may be filled later, so whatever started the command may try again."""
    with pytest.raises(
        RoleFailed, match=r"add nodes, raise ray.start_timeout, or lower workers to 8"
    ) as failed:
        Growing(monkeypatch, ONE_OF_TWO_PODS).wait(NOW)
    assert failed.value.exit_code == 1


@pytest.mark.parametrize(
    ("there", "on_gpus", "each"), [(CPUS, None, 0), (BOTH_PODS, False, 0), (BOTH_PODS, True, 1)]
)
def test_what_ranks_compute_on(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, float], on_gpus: bool | None, each: int
):
    assert Growing(monkeypatch, there).wait(NOW, on_gpus) == each


def test_settings_for_gpus_are_never_used_on_cpus(monkeypatch: pytest.MonkeyPatch):
    """Nor are ranks counted before there is a GPU for the first."""
    with pytest.raises(RoleFailed, match="has 32 CPUs and 0 GPUs, and workers 1 take a CPU and a GPU each"):
        Growing(monkeypatch, CPUS).wait(NOW, True, None)


def test_a_cluster_without_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    """Its node may have been started without them, or has still to start."""
    growing = Growing(monkeypatch, CPUS, BOTH_PODS)
    monkeypatch.setattr(cluster, "this_machine", lambda: Machine((Gpu(0, "GPU-0", "one", 1),)))
    assert growing.wait(SOON) == 1
    assert "though this machine has GPUs" in growing.told[0]
    growing._looks[:] = [CPUS]
    with pytest.raises(RoleFailed, match="`ray start --num-gpus`, or train on CPUs with gpus 0"):
        growing.wait(NOW)


@pytest.mark.parametrize(
    ("address", "gpus", "on_gpus"),
    [("head:6379", None, True), ("head:6379", "0", False), (None, None, False), (None, "0,", True)],
)
def test_the_driver_goes_by_what_the_settings_are_settled_for(
    address: str | None, gpus: str | None, on_gpus: bool
):
    """And not by what a cluster has when it looks: the launcher has written `gpus`."""
    config = SFTConfig.model_validate({"gpus": gpus, "ray": {"address": address}})
    assert cluster.computes_on_gpus(config) == on_gpus


@pytest.mark.parametrize(
    ("ranks", "nodes", "size"),
    [
        (8, [8], 8),
        (4, [8, 8], 4),
        (16, [8, 8], 8),
        (32, [0, 8, 8, 8, 8, 8], 8),  # the head has none, and one is spare
        (12, [8, 8], 6),
        (24, [16, 8], 8),
        (12, [8, 4], 4),
        (7, [4, 4], 1),
        (8, [5, 4], 4),
        (16, [8], 1),  # another node is to come
        (2, [], 1),
    ],
)
def test_as_many_ranks_as_possible_are_placed_together(ranks: int, nodes: list[int], size: int):
    assert placement.group_size(ranks, nodes) == size


def test_ranks_of_a_node_are_neighbours():
    """Ray gives bundles to nodes in any order."""
    assert placement.side_by_side(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert placement.side_by_side(["a"] * 3) == [0, 1, 2]


def test_ranks_that_are_spread_unevenly_are_told_of():
    assert placement.uneven([8, 8]) is placement.uneven([5]) is None
    assert "unevenly over 2 nodes: 5, 3" in str(placement.uneven([5, 3]))


@pytest.mark.parametrize(
    ("counts", "parallel", "told"),
    [
        ([8, 8], {"context": 2, "tensor": 8}, []),
        ([16], {"context": 1, "tensor": 16}, []),
        ([6, 6], {"context": 4, "tensor": 2}, ["parallel.context = 4, and the nodes have 6, 6 ranks"]),
        ([5, 3], {"context": 1, "tensor": 2}, ["parallel.tensor = 2, and the nodes have 5, 3 ranks"]),
        ([8, 8], {"context": 1, "tensor": 16}, ["a multiple of 16"]),
    ],
)
def test_ranks_that_share_layers_across_nodes_are_told_of(
    counts: list[int], parallel: dict[str, int], told: list[str]
):
    warnings = placement.divided(counts, parallel)
    assert len(warnings) == len(told)
    assert all(words in warning for words, warning in zip(told, warnings, strict=True))


class Groups:
    """Ray's placement groups in a cluster whose free nodes have room for so many ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: dict[str, int]):
        self.free, self.bundles = free, list[dict[str, int]]()
        self.removed = 0
        monkeypatch.setattr(placement, "wait_for_room", lambda *_, **__: 1)
        monkeypatch.setattr(placement, "computes_on_gpus", lambda _: True)
        monkeypatch.setattr(placement, "room_of_nodes", lambda gpus: [8] * len(free))
        monkeypatch.setattr(placement, "placement_group", self._make)
        monkeypatch.setattr(placement, "placement_group_table", lambda _: {"bundles_to_node_id": self.nodes})
        monkeypatch.setattr(placement, "remove_placement_group", self._remove)
        monkeypatch.setattr(placement.ray, "cluster_resources", dict)

    def _make(self, bundles: list[dict[str, int]], strategy: str) -> "Groups":
        self.bundles = bundles
        return self

    def wait(self, seconds: float) -> bool:
        left, self.nodes = dict(self.free), {}
        for number, bundle in enumerate(self.bundles):
            fitting = [name for name, room in left.items() if room >= bundle["GPU"]]
            if not fitting:
                return False
            self.nodes[number] = fitting[number % len(fitting)]  # not in the order of nodes
            left[self.nodes[number]] -= bundle["GPU"]
        return True

    def _remove(self, _: object) -> None:
        self.removed += 1

    def place(self, workers: int) -> placement.ClusterPlacement:
        settings = {"workers": workers, "parallel": {"tensor": 2}}
        return placement.ClusterPlacement(SFTConfig.model_validate(settings))

    def nodes_of_ranks(self, placed: placement.ClusterPlacement, ranks: int) -> str:
        each = ranks // len(self.bundles)
        return "".join(self.nodes[placed._bundles[rank // each]] for rank in range(ranks))


def test_whole_nodes_are_taken(monkeypatch: pytest.MonkeyPatch):
    groups = Groups(monkeypatch, {"a": 8, "b": 8})
    placed = groups.place(16)
    assert groups.bundles == [{"CPU": 8, "GPU": 8}] * 2
    assert groups.nodes_of_ranks(placed, 16) == "a" * 8 + "b" * 8


def test_without_free_nodes_ranks_are_placed_one_by_one(monkeypatch: pytest.MonkeyPatch, caplog):
    """Neighbours all the same; and it is said that others use a part of the nodes."""
    groups = Groups(monkeypatch, {"a": 5, "b": 3})
    placed = groups.place(8)
    assert groups.bundles == [{"CPU": 1, "GPU": 1}] * 8
    assert groups.removed == 1
    assert groups.nodes_of_ranks(placed, 8) in ("aaaaabbb", "bbbaaaaa")
    assert "did not find 1 free nodes for 8 ranks each" in caplog.text
    assert "spread unevenly over 2 nodes" in caplog.text
    assert "parallel.tensor = 2, and the nodes have " in caplog.text
    with pytest.raises(RoleFailed, match="Ray has no room for 8 workers"):
        Groups(monkeypatch, {"a": 4}).place(8)
