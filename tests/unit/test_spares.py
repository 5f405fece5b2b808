"""Spare workers: where they are kept, and which one replaces a rank.

Real ones replace killed workers in `tests/faults/test_restart.py`.
"""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from cairn.config.trainer import SFTConfig
from cairn.launch.ray.worker import RayProcess
from cairn.launch.supervise import spares
from cairn.launch.supervise.ranks import Ranks, _RanksDied
from cairn.launch.supervise.spares import Spares
from cairn.run.directory import RunDirectory
from cairn.run.processes import kill_process

A, B = "a" * 56, "b" * 56
"""Nodes, as Ray names them."""


class Worker:
    """A worker whose preparation has ended, or fails."""

    made: list["Worker"] = []
    fails = False

    def __init__(self, log: Path, environment: dict[str, str], **placement: Any):
        strategy = placement.get("scheduling_strategy")
        self.node = strategy.node_id if strategy else "anywhere"
        assert placement in ({}, {"num_cpus": 0, "scheduling_strategy": strategy}), (
            "it takes nothing from ranks"
        )
        self.about: RayProcess | None = None
        self.events: list[str] = []
        self.made.append(self)

    def prepare(self, config: SFTConfig) -> "Worker":
        return self

    def wait_started(self, seconds: float | None = None) -> RayProcess:
        self.about = RayProcess(1000 + self.made.index(self), self.node, self.node, None)
        return self.about

    def answers(self) -> bool:
        return True

    def kill(self) -> None:
        self.events.append("killed")

    def wait_ended(self) -> None:
        assert all(one.events for one in self.made), "all are killed before one is waited for"
        self.events.append("ended")


@pytest.fixture(autouse=True)
def _workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(worker: Worker) -> None:
        if worker.fails:
            raise RayError

    monkeypatch.setattr(Worker, "made", [])
    monkeypatch.setattr(spares, "RankProcess", Worker)
    monkeypatch.setattr(spares, "ray", SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=get))


def ranks_on(tmp_path: Path, nodes: list[str], *, gpus: int, spare_workers: int = 1) -> Ranks:
    """The ranks of a run, one on each of these nodes."""
    config = SFTConfig(workers=len(nodes), spare_workers=spare_workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.launch.supervise.ranks.start_ray", lambda _: None)
        ranks = Ranks(config, RunDirectory(tmp_path)).__enter__()
    ranks._reserved = SimpleNamespace(gpus=gpus)  # pyright: ignore[reportAttributeAccessIssue] # a stand-in
    for rank, node in zip(ranks._ranks, nodes, strict=True):
        rank.node, rank.gpu = node, str(rank.number) if gpus else None
    return ranks


def test_on_gpus_each_rank_has_a_spare_on_its_node(tmp_path: Path):
    """And once they have taken the ranks' places, each has one again."""
    ranks = ranks_on(tmp_path, [A, A, B, B], gpus=1)
    for _ in range(2):
        ranks.spares.tend(ranks._places_of_spares())
    assert [one.node for one in Worker.made] == [A, A, B, B]
    taken = [ranks._spare_for(rank) for rank in ranks._ranks]
    assert [one.about.node for one in taken if one and one.about] == [A, A, B, B]
    assert len({one.about.pid for one in taken if one and one.about}) == 4
    assert ranks._spare_for(ranks._ranks[0]) is None
    ranks.spares.tend(ranks._places_of_spares())
    assert [one.node for one in Worker.made[4:]] == [A, A, B, B]


def test_on_cpus_there_are_as_many_as_asked_for(tmp_path: Path):
    ranks = ranks_on(tmp_path, [A, B], gpus=0, spare_workers=3)
    ranks.spares.tend(ranks._places_of_spares())
    assert [one.node for one in Worker.made] == ["anywhere"] * 3


def test_a_spare_that_fails_is_not_started_again(tmp_path: Path):
    """There; on another node there may be one."""
    ranks = Spares(SFTConfig(), RunDirectory(tmp_path))
    Worker.fails = True
    try:
        ranks.tend([A])
    finally:
        Worker.fails = False
    ranks.tend([A, B])
    assert [one.node for one in Worker.made] == [A, B]


@pytest.mark.parametrize(("gpus", "events"), [(1, ["killed", "ended"]), (0, ["killed"])])
def test_the_memory_of_gpus_is_free_before_spares_take_them(tmp_path: Path, gpus: int, events: list[str]):
    ranks = ranks_on(tmp_path, [A, A], gpus=gpus)
    for rank in ranks._ranks:
        worker: Any = Worker(tmp_path, {})
        rank.fill(worker, "")
    ranks._vacate(_RanksDied({1: "died"}, [0, 1]))
    assert [one.events for one in Worker.made] == [events, events]
    assert all(rank.is_empty for rank in ranks._ranks)


def test_a_killed_process_is_waited_for():
    with subprocess.Popen(["sleep", "600"]) as process:
        began = time.monotonic()
        kill_process(process.pid, 60)
        assert time.monotonic() - began < 30
        assert process.wait(0.1) == -9
        kill_process(process.pid, 60)  # it is gone
