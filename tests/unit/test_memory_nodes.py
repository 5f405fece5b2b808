"""Steps in the memory of several nodes, each with its part of the step and with that of another node."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import PLACED, FakeRank, tensors_of
from runs import ABOUT
from test_memory_steps import START, flip

from cairn.checkpoint.manifest import Damaged, load_manifest
from cairn.checkpoint.memory.memory_owners import (
    LAUNCHER,
    MemoryOwner,
    RankHost,
    free,
    hold,
    holder,
    owner_of,
)
from cairn.checkpoint.memory.memory_slots import MemoryRecord, forget, start_in_memory
from cairn.checkpoint.memory.memory_steps import MemorySteps
from cairn.checkpoint.memory.owner import connect, receive, send
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.tensors.remote_ranges import away_in_step, check_away
from cairn.checkpoint.tensors.sharded_files import write_tensors
from cairn.run import faults

HERE = "127.0.0.1"
FILE = "model/model.safetensors"


def held_by_ranks(name: str, add: int) -> list[Tensors]:
    """What each rank of a group holds, with values that `add` makes others."""
    shape, placements = PLACED[name]
    held: list[Tensors] = []
    for number in range(torch.Size(shape).numel()):
        with FakeRank(number, *shape) as mesh:
            tensors = tensors_of(mesh, placements)
            for tensor in {id(one): one for one in map(_whole, tensors.values())}.values():
                tensor.add_(add)
            held.append({"model/model": tensors})
    return held


def _whole(tensor: Any) -> torch.Tensor:
    whole = getattr(tensor, "tensor", tensor)
    return whole.to_local() if hasattr(whole, "to_local") else whole


def file_of_one_process(name: str, add: int, folder: Path) -> bytes:
    """The file that one process with the whole tensors writes."""
    with FakeRank(0, 1) as mesh:
        tensors = tensors_of(mesh, PLACED[name][1][:1])
        for tensor in {id(one): one for one in map(_whole, tensors.values())}.values():
            tensor.add_(add)
        write_tensors(folder, tensors, "model")
    return (folder / "model.safetensors").read_bytes()


class RanksOnNodes:
    """Ranks, each a thread, and the nodes that they are on.

    Args:
        nodes: the node of each rank.
        raylets: by node, the process that stands for it; this one, unless it is given.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], start: int = 0, room: int = 1 << 40, **raylets: int):
        self.folder, self.nodes = folder, nodes
        self._said: list[Any] = [None] * len(nodes)
        self._barrier = threading.Barrier(len(nodes), timeout=60)
        self.steps = [
            MemorySteps(
                folder,
                SavingRank(rank, len(nodes), f"from {start} on {' '.join(nodes)}"),
                RankHost(raylets.get(node, os.getpid()), node, HERE),
                self._gather_of(rank),
                lambda: room,
                {"model/config.json": b"{}\n"},
                start,
            )
            for rank, node in enumerate(nodes)
        ]

    def _gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._said[rank] = mine
            self._barrier.wait()
            found = list(self._said)
            self._barrier.wait()
            return found

        return gather

    def together(self, do: Callable[[int], None]) -> None:
        """Have all ranks do something."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            for future in [pool.submit(do, rank) for rank in range(len(self.nodes))]:
                future.result()

    def keep(self, step: int, held: Sequence[Tensors], *, sent: bool = True) -> None:
        """Keep a step on all ranks; `sent`: wait until other nodes have it, too."""

        def on(rank: int) -> None:
            steps, about = self.steps[rank], {**ABOUT, "parent": None, "world_size": len(self.nodes)}
            record = MemoryRecord(START.id, steps.rank.session, step, 0, about, {"trainer/state.json": "e30K"})
            steps.keep(step, held[rank], None if rank else record)
            steps.before_update()
            steps.wait()
            if sent and steps._sender is not None:
                steps._sender.join()

        self.together(on)

    def abandon(self) -> None:
        """As ranks do that end before the run."""
        self.together(lambda rank: self.steps[rank].abandon())

    def owner(self, node: str) -> MemoryOwner:
        """Who owns a node's memory."""
        owner = owner_of(self.folder / node)
        assert owner
        return owner

    def lose(self, node: str) -> None:
        """End what is on a node."""
        end(self.owner(node))


def end(owner: MemoryOwner) -> None:
    """Kill a process that owns memory, and wait until it is gone."""
    os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not owner.lives)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the memory, with what ends with this process."""
    hold(tmp_path / "memory", os.getpid(), HERE)
    yield tmp_path / "memory"
    free(tmp_path / "memory")


def newest(folder: Path) -> int:
    """The step from which ranks go on."""
    return start_in_memory(folder, START, lambda record: True).start_step


def content(step: Path) -> bytes:
    """The tensor file of a step, in pieces that end anywhere; checked by the manifest."""
    away, manifest = away_in_step(step), load_manifest(step)
    check_away(away, manifest.tensor_files)
    chance, data = random.Random(0), b""
    while len(data) < away[FILE].size:
        data += bytes(away[FILE].read(len(data), min(chance.randint(1, 1 << 18), away[FILE].size - len(data))))
    return data


@pytest.mark.parametrize("name", PLACED)
def test_any_node_may_be_lost(name: str, folder: Path, tmp_path: Path):
    """Wherever the ranks are, the others have the bytes of one process's file; ranks that are placed anew go
    on from there, and spare what they came from until the next step is whole."""
    chance = random.Random(name)
    count = torch.Size(PLACED[name][0]).numel()
    nodes = [f"n{chance.randrange(3)}" for _ in range(count)]
    nodes[:2] = ["n0", "n1"]
    ranks = RanksOnNodes(folder, nodes)
    for step in (1, 2):
        ranks.keep(step, held_by_ranks(name, step))
    ranks.abandon()
    assert newest(folder) == 2
    assert content(folder / "step_2") == file_of_one_process(name, 2, tmp_path)
    lost = chance.choice(sorted(set(nodes)))
    ranks.lose(lost)
    assert newest(folder) == 2
    assert content(folder / "step_2") == file_of_one_process(name, 2, tmp_path)
    assert start_in_memory(folder, START, lambda record: record.step < 2).start_step == 1
    assert content(folder / "step_1") == file_of_one_process(name, 1, tmp_path)

    left = sorted({*nodes, "new"} - {lost})
    anew = held_by_ranks(name, 5)
    again = RanksOnNodes(folder, [chance.choice(left) for _ in nodes], start=1)
    again.together(lambda rank: again.steps[rank].prepare(anew[rank]))
    assert newest(folder) == 2, "ranks may die again before they have kept a step"
    assert start_in_memory(folder, START, lambda record: record.step < 2).start_step == 1
    again.keep(2, anew)
    assert newest(folder) == 2
    assert content(folder / "step_2") == file_of_one_process(name, 5, tmp_path)
    assert start_in_memory(folder, START, lambda record: record.step < 2).start_step == 1
    again.together(lambda rank: again.steps[rank].close())
