"""Room for ranks in a given Ray cluster, some of whose nodes are still starting."""

import pytest

from cairn.config.trainer import SFTConfig
from cairn.launch.ray import cluster
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
    assert cluster._on_gpus(config) == on_gpus
