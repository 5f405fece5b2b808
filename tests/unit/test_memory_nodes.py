"""Steps in the memory of several nodes, each with its part of the step and with that of another node."""

import json
import logging
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from fake_ranks import PLACED, FakeRank, tensors_of
from runs import ABOUT
from test_memory_steps import START

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
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.tensors.remote_ranges import away_in_step, check_away
from cairn.checkpoint.tensors.sharded_files import write_tensors
from cairn.run import faults
from cairn.run.connections import connect, receive, send

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

    def __init__(
        self, folder: Path, nodes: Sequence[str], start: int = 0, room: int = 1 << 40, **raylets: int
    ):
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
            record = MemoryRecord(
                START.id, steps.rank.session, step, 0, about, {"trainer/state.json": "e30K"}
            )
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
        data += bytes(
            away[FILE].read(len(data), min(chance.randint(1, 1 << 18), away[FILE].size - len(data)))
        )
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", draws.cases(list(PLACED), "a lost node", 3))
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


@pytest.mark.slow
def test_two_nodes_in_a_row_are_too_many(folder: Path):
    """A node's part is in its own memory and in the next one's. Others are not enough for a step."""
    ranks = RanksOnNodes(folder, ["n0", "n1", "n2"])
    for step in (1, 2):
        ranks.keep(step, held_by_ranks("columns", step))
    ranks.lose("n1")
    assert newest(folder) == 2
    ranks.lose("n2")
    assert newest(folder) == 0


def files_of(owner: MemoryOwner, size: int) -> list[Path]:
    """The tensor files of such a size in the memory of a node: of slots a and b, and of the other node's."""
    opened = sorted(Path(f"/proc/{owner.pid}/fd").iterdir(), key=lambda fd: -int(fd.name))
    owned = {fd.stat().st_ino: fd for fd in opened if _is_memory(fd) and fd.stat().st_size == size}
    return sorted(owned.values(), key=lambda fd: int(fd.name))


def size_of(step: Path) -> int:
    """Of the one tensor file of a step."""
    (entry,) = load_manifest(step).tensor_files.values()
    return entry.size


def test_ranks_that_change_places_leave_no_memory_behind(folder: Path):
    """A node has half of each of four files, also after the ranks have changed places."""
    for turn, nodes in enumerate((["n0", "n1"], ["n1", "n0"], ["n0", "n1"])):
        first = 2 * turn + 1
        ranks = RanksOnNodes(folder, nodes, start=first - 1)
        assert newest(folder) == first - 1
        for step in (first, first + 1):
            ranks.keep(step, held_by_ranks("two ranks", step))
        ranks.abandon()
        assert newest(folder) == first + 1
        size = size_of(folder / f"step_{first + 1}")
        for node in nodes:
            files = files_of(ranks.owner(node), size)
            assert len(files) == 4
            half_of_each = sum(512 * file.stat().st_blocks for file in files)
            assert half_of_each < 3 * size


def test_a_flipped_bit_is_noticed_when_ranks_load(folder: Path):
    """In the memory of the node, or of the one that has a copy: the step before is whole."""
    ranks = RanksOnNodes(folder, ["n0", "n1"])
    for step in (1, 2):
        ranks.keep(step, held_by_ranks("two ranks", step))
    ranks.lose("n1")
    start = start_in_memory(folder, START, lambda record: True)
    assert start == replace(START, start_step=2, resume_from=str(folder / "step_2"))
    content(folder / "step_2")
    _, own_2, copy_1, copy_2 = files_of(ranks.owner("n0"), size_of(folder / "step_2"))
    of_ranks = [_written(own_2), _written(copy_2)]
    for file, places in zip((own_2, copy_2), of_ranks, strict=True):
        _flip(file, places[-1])
        with pytest.raises(Damaged, match="changed between bytes"):
            content(folder / "step_2")
        _flip(file, places[-1])
    _flip(copy_2, of_ranks[1][0])
    forget(folder / "step_2")
    assert newest(folder) == 1
    content(folder / "step_1")
    _flip(copy_1, _written(copy_1)[0])
    with pytest.raises(Damaged, match="changed between bytes"):
        content(folder / "step_1")
    forget(folder / "step_1")
    assert newest(folder) == 0


def _is_memory(fd: Path) -> bool:
    return "cairn-step" in os.readlink(fd)


def _written(file: Path) -> list[int]:
    """Where bytes are in a file that are not zero."""
    return [place for place, byte in enumerate(file.read_bytes()) if byte]


def _flip(file: Path, place: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def test_a_slow_transfer_is_not_overtaken(folder: Path):
    """Until a step is on its way no longer, no other one takes the place of the step before it."""
    held = held_by_ranks("two ranks", 0)
    ranks = RanksOnNodes(folder, ["n0", "n1"])
    ranks.keep(1, held)
    slow = ranks.owner("n1")
    os.kill(slow.pid, signal.SIGSTOP)
    ranks.keep(2, held, sent=False)
    ranks.keep(3, held, sent=False)
    os.kill(slow.pid, signal.SIGCONT)
    assert newest(folder) == 2
    wait_until(lambda: not any(one._sender and one._sender.is_alive() for one in ranks.steps))
    ranks.keep(4, held)
    assert newest(folder) == 4
    assert ranks.steps[0].metrics().keys() == {"time/memory", "time/memory_peer"}


@pytest.mark.slow
@pytest.mark.parametrize(("point", "left"), [("peer.sending", 1), ("peer.sent", 2)])
def test_a_copy_that_fails_is_said_and_training_goes_on(
    point: str, left: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The node whose part has no copy is lost afterwards."""
    monkeypatch.setattr(faults, "_reached", {})
    ranks = RanksOnNodes(folder, ["n0", "n1"])
    ranks.keep(1, held_by_ranks("two ranks", 1))
    monkeypatch.setenv("CAIRN_FAULT", f"{point}:EIO@1,{point}:EIO@2")
    ranks.keep(2, held_by_ranks("two ranks", 2))
    assert len(re.findall(r"step 2 is not in the memory of another node: .*EIO@", caplog.text)) == 2
    assert newest(folder) == 2
    lost = ranks.owner("n1")
    end(lost)
    assert newest(folder) == left
    content(folder / f"step_{left}")
    caplog.clear()
    monkeypatch.delenv("CAIRN_FAULT")
    ranks.keep(3, held_by_ranks("two ranks", 3))
    ranks.keep(4, held_by_ranks("two ranks", 4))
    assert not caplog.text, "it is said once"


def test_who_does_not_know_the_token_is_refused(folder: Path, tmp_path: Path):
    """On either side; only the user may read it, and nodes' notes don't have it."""
    ranks = RanksOnNodes(folder, ["n0", "n1"])
    ranks.keep(1, held_by_ranks("two ranks", 1))
    owner, token = ranks.owner("n0"), holder(folder).token
    note = folder / LAUNCHER / "owner.json"
    assert note.stat().st_mode & 0o777 == 0o600
    assert token not in (folder / "n0" / "owner.json").read_text()
    with connect(owner.at, token) as link:
        send(link, {"do": "notes"})
        assert receive(link)["slots"].keys() == {"a", "b", "peer/a", "peer/b"}
    with pytest.raises(PermissionError, match="does not know the run's token"):
        connect(owner.at, token[:-1])
    with socket.create_connection(owner.at) as link:  # and does not check what it is told
        link.sendall(bytes(64))
        link.settimeout(30)
        answered = b""
        while data := link.recv(1 << 16):
            answered += data
        assert len(answered) == 64, "a number and a proof, and then nothing"
    content_before = json.loads(note.read_text())
    note.write_text(json.dumps({**content_before, "token": secrets.token_hex(32)}))
    assert newest(folder) == 0
    note.write_text(json.dumps(content_before))
    assert newest(folder) == 1


NONSENSE: list[dict[str, Any]] = [
    {"do": "read", "ranges": [["a/model/model.safetensors", -1, 4]]},
    {"do": "read", "ranges": [["a/model/model.safetensors", 0, 1 << 40]]},
    {"do": "read", "ranges": [["a/../owner.json", 0, 1]]},
    {"do": "take", "slot": "a", "spans": {"model/model.safetensors": [[1 << 40, 8]]}},
    {"do": "take", "slot": "../a", "spans": {}},
    {"do": "run"},
    {},
]


def test_requests_that_make_no_sense_are_answered_with_an_error(folder: Path):
    """And change nothing."""
    ranks = RanksOnNodes(folder, ["n0", "n1"])
    ranks.keep(1, held_by_ranks("two ranks", 1))
    for asked in NONSENSE:
        with connect(ranks.owner("n0").at, holder(folder).token) as link:
            send(link, asked)
            with pytest.raises(OSError, match=r"bytes|a/|\.\./a|run|do"):
                receive(link)
    ranks.lose("n1")
    assert newest(folder) == 1
    content(folder / "step_1")


def test_the_memory_goes_with_the_launcher_and_with_the_node(tmp_path: Path):
    """And, on its node, when the run ends."""
    folder = tmp_path / "memory"
    launcher, raylet = (
        subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    )
    hold(folder, launcher.pid, HERE)
    held_by = holder(folder)
    hold(folder, launcher.pid, HERE)
    assert holder(folder) == held_by, "a driver that is started again finds it"
    ranks = RanksOnNodes(folder, ["n0", "n1"], n1=raylet.pid)
    ranks.keep(1, held_by_ranks("two ranks", 1))
    owners = [ranks.owner("n0"), ranks.owner("n1")]
    raylet.kill()
    raylet.wait()
    wait_until(lambda: not owners[1].lives)
    assert owners[0].lives
    assert newest(folder) == 1
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not owners[0].lives and not held_by.lives)
    assert newest(folder) == 0


def test_too_little_memory_is_said(folder: Path, caplog: pytest.LogCaptureFixture):
    """A node needs room for its part and for another node's, of both steps."""
    ranks = RanksOnNodes(folder, ["n0", "n1", "n2"], room=1 << 20)
    with caplog.at_level(logging.WARNING):
        ranks.keep(1, held_by_ranks("columns", 1))
    (said,) = caplog.messages
    assert f"{HERE}: two copies of this node's part of the state, and of another node's, take 0.0 GB" in said
    assert newest(folder) == 0


def test_without_what_ends_with_the_launcher_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Memory would outlive the run."""
    ranks = RanksOnNodes(tmp_path / "memory", ["n0", "n1"])
    ranks.keep(1, held_by_ranks("two ranks", 1))
    assert "owner.json is missing" in caplog.text
    assert newest(tmp_path / "memory") == 0
