"""Steps in memory outside the ranks: what comes back of them, and when none does."""

import logging
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import PLACED, FakeRank, tensors_of
from runs import ABOUT
from test_saver import bits, state

from cairn.checkpoint.manifest import Damaged, check_size, load_manifest
from cairn.checkpoint.memory.memory_owners import RankHost, free, owner_of
from cairn.checkpoint.memory.memory_slots import MemoryRecord, record_of, start_in_memory
from cairn.checkpoint.memory.memory_steps import MemorySteps
from cairn.checkpoint.saving.saver import SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.tensors.sharded_files import load_step, write_tensors
from cairn.config.ckpt import CkptConfig
from cairn.run import faults
from cairn.run.messages import Attempt

START = Attempt("0badcafe", 1, "sft", 0, None, "branch_1")
Tensors = dict[str, dict[str, Any]]


class Gathered:
    """What ranks exchange, if they come one after the other, each with what the first one says."""

    def __init__(self, count: int):
        self.count = count
        self._said: list[Any] = []

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        """For one rank."""
        said = iter(list(self._said))

        def gather(mine: Any) -> list[Any]:
            if rank == 0:
                self._said.append(mine)
                return [mine] * self.count
            return [next(said)] * self.count

        return gather


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the links to the memory are; the process that owns it is ended."""
    yield tmp_path / "memory"
    free(tmp_path / "memory")


def memory(folder: Path, start: int = 0, launcher: int = os.getpid(), room: int = 1 << 40) -> MemorySteps:
    """Of one rank that is alone."""
    rank, files = SavingRank(0, 1, secrets.token_hex(4)), {"model/config.json": b"{}\n"}
    return MemorySteps(folder, rank, RankHost(launcher), lambda mine: [mine], lambda: room, files, start)


def keep(steps: MemorySteps, step: int, tensors: Tensors, saves: int = 0) -> None:
    """Keep a step, change the tensors as soon as they may be, and wait for it."""
    about = {**ABOUT, "parent": {"run_id": "0badcafe", "step": 3}, "world_size": steps.rank.world_size}
    about["metrics"] = {"loss": "9" * (20 - step)}  # a record may be shorter than the one before it
    files = {"trainer/state.json": "e30K"}
    record = MemoryRecord(START.id, steps.rank.session, step, saves, about, files)
    steps.keep(step, tensors, record if steps.rank.rank == 0 else None)
    steps.before_update()
    for tensor in tensors.get("trainer/optimizer", {}).values():
        tensor.zero_()
    steps.wait()


def newest(folder: Path) -> int:
    """The step from which ranks go on."""
    return start_in_memory(folder, START, lambda record: True).start_step


def flip(file: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    with open(file, "r+b") as opened:
        place = chance.randrange(file.stat().st_size)
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << chance.randrange(8)]))


def test_a_step_comes_back_to_the_bit(folder: Path):
    """All kinds of tensors, from a folder that is a whole step with its checksums."""
    steps = memory(folder)
    for number in range(1, 4):
        keep(steps, number, state(number))
    steps.abandon()
    start = start_in_memory(folder, START, lambda record: True)
    assert start == replace(START, start_step=3, resume_from=str(folder / "step_3"))
    step = folder / "step_3"
    verify(step)
    assert (step / "model/config.json").read_bytes() == b"{}\n"
    assert (step / "trainer/state.json").read_bytes() == b"{}\n"
    assert load_manifest(step).parts == ABOUT["parts"]
    record = record_of(step)
    assert record
    assert record.parent == load_manifest(step).parent
    found = {stem: {n: torch.zeros_like(t) for n, t in ts.items()} for stem, ts in state(3).items()}
    load_step(step, found)
    assert bits(found) == bits(state(3))
    assert start_in_memory(folder, START, lambda record: record.step < 3).start_step == 2
    assert not step.exists()
    assert start_in_memory(folder, START, lambda record: record.step < 2) == START, "there are two slots"


@pytest.mark.parametrize("name", PLACED)
def test_ranks_make_the_files_of_one_process(name: str, folder: Path, tmp_path: Path):
    """Each writes its ranges; a rank whose part is missing makes the step before the newest."""
    shape, placements = PLACED[name]
    count = torch.Size(shape).numel()
    for step in (1, 2):
        assert newest(folder) == step - 1
        gathered, host = Gathered(count), RankHost(os.getpid())
        for number in range(count):
            with FakeRank(number, *shape) as mesh:
                rank, gather = SavingRank(number, count, f"start {step}"), gathered.of(number)
                steps = MemorySteps(folder, rank, host, gather, lambda: 1 << 40, {}, step - 1)
                if (step, number) != (2, count - 1):
                    keep(steps, step, {"model/model": tensors_of(mesh, placements)})
                steps.abandon()
    with FakeRank(0, 1) as mesh:
        write_tensors(tmp_path, tensors_of(mesh, placements[:1]), "model")
    assert newest(folder) == 1
    made = folder / "step_1/model/model.safetensors"
    assert made.read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_is_noticed_and_passed_over(seed: int, folder: Path, caplog: pytest.LogCaptureFixture):
    """Wherever it is in the tensor files; the step before is whole."""
    chance = random.Random(seed)
    steps = memory(folder)
    for number in (1, 2):
        keep(steps, number, state(number))
    files = ("model/model.safetensors", "trainer/optimizer.safetensors")
    flip(folder / "b" / chance.choice(files), chance)
    assert newest(folder) == 1
    assert "step 2 in memory is passed over" in caplog.text
    assert "is not what the ranks have copied" in caplog.text
    flip(folder / "a" / chance.choice(files), chance)
    assert newest(folder) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("point", "left"), [("begin", 2), ("copied", 2), ("sealed", 3)])
def test_a_copy_that_does_not_end_leaves_the_step_before(
    point: str, left: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And training goes on, with the next step in memory."""
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", f"memory.{point}:EIO@3")
    steps = memory(folder)
    for number in (1, 2, 3):
        keep(steps, number, state(number))
    assert newest(folder) == left
    assert "step 3 is not kept in memory" in caplog.text
    keep(steps, 4, state(4))
    keep(steps, 5, state(5))
    assert newest(folder) == 5


def test_a_step_that_was_to_be_saved_is_gone_on_from_if_no_other_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As long as it is there, the step before leads to the same checkpoint."""
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", "memory.copied:EIO@3")
    steps = memory(folder)
    keep(steps, 9, state(9), saves=8)
    keep(steps, 10, state(10), saves=10)
    assert newest(folder) == 9
    keep(steps, 11, state(11), saves=10)  # does not end, in the memory that step 9 had
    assert newest(folder) == 10
    after_9 = replace(START, start_step=9)
    assert start_in_memory(folder, after_9, lambda record: True) == after_9, "a checkpoint"
    keep(steps, 12, state(12), saves=12)
    keep(steps, 13, state(13), saves=12)
    assert newest(folder) == 13


def test_ranks_that_take_over_spare_what_they_came_from(folder: Path):
    """The next step goes into the other slot; the memory stays with the same process, if the layout is the
    same; parts that two starts of the ranks have left are no step."""
    steps = memory(folder)
    for number in (1, 2, 3):
        keep(steps, number, state(number))
    steps.abandon()
    owner = owner_of(folder)
    assert start_in_memory(folder, START, lambda record: record.step < 3).start_step == 2
    again = memory(folder, start=2, room=0)
    again.prepare(state(0))
    assert owner_of(folder) == owner
    assert newest(folder) == 3, "ranks may die again before they have kept a step"
    keep(again, 3, state(3))
    assert newest(folder) == 3
    mixed = MemoryRecord(START.id, steps.rank.session, 3, 0, {**ABOUT, "parent": None}, {})
    (folder / "a/record.json").write_bytes(mixed.to_json())
    assert newest(folder) == 2
    other = memory(folder, start=2)
    other.prepare({"model/model": {"w": torch.zeros(3)}})
    assert owner_of(folder) not in (owner, None)
    assert newest(folder) == 0
    other.close()
    assert not folder.exists()


def test_tensors_that_come_later_are_kept_too(folder: Path):
    """A critic is trained before its policy, whose optimiser has no state until then."""
    steps, whole = memory(folder), state(2)
    keep(steps, 1, {"model/model": state(1)["model/model"]})
    assert newest(folder) == 1
    keep(steps, 2, state(2))
    assert newest(folder) == 2
    found = {stem: {n: torch.zeros_like(t) for n, t in ts.items()} for stem, ts in whole.items()}
    load_step(folder / "step_2", found)
    assert bits(found) == bits(whole)


def test_the_memory_goes_with_the_launcher(folder: Path):
    """However it ends; and ranks of another attempt find nothing that is theirs."""
    launcher = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    steps = memory(folder, launcher=launcher.pid)
    keep(steps, 1, state())
    assert start_in_memory(folder, replace(START, number=2), lambda record: True).start_step == 0
    assert start_in_memory(folder, replace(START, start_step=1), lambda record: True).start_step == 1
    assert newest(folder) == 1
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while owner_of(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owner_of(folder) is None
    assert newest(folder) == 0


def test_the_owner_ends_with_nothing_else(folder: Path):
    """Stop signals are for those who train."""
    steps = memory(folder)
    keep(steps, 1, state())
    owner = owner_of(folder)
    assert owner
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(owner.pid, number)
    keep(steps, 2, state())
    assert newest(folder) == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"room": 1 << 20}, r"two copies of the state take 0\.1 GB, and there is room for 0\.0"),
    ],
)
def test_why_no_step_is_kept_is_said_once(
    settings: dict, why: str, folder: Path, caplog: pytest.LogCaptureFixture
):
    """And training goes on."""
    steps = memory(folder, **settings)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            keep(steps, number, state())
    (said,) = caplog.messages
    assert "no step is kept in memory (ckpt.memory_interval)" in said
    assert re.search(why, said)
    assert newest(folder) == 0
    steps.close()


def test_a_link_to_anything_else_is_no_file_of_a_step(folder: Path, tmp_path: Path):
    """As before there were steps in memory."""
    steps = memory(folder)
    keep(steps, 1, state())
    assert newest(folder) == 1
    step = folder / "step_1"
    name, entry = next(iter(load_manifest(step).tensor_files.items()))
    check_size(step / name, entry)
    copy = tmp_path / "elsewhere"
    copy.write_bytes((step / name).read_bytes())
    (step / name).unlink()
    (step / name).symlink_to(copy)
    with pytest.raises(Damaged, match="is not a file"):
        check_size(step / name, entry)


def test_settings_that_leave_something_out_are_refused():
    """What is in memory must be enough to go on from."""
    for wrong in ({"incremental": True}, {"training_state": False}):
        with pytest.raises(ValueError, match=r"memory_interval = 1 keeps the whole training state"):
            CkptConfig.model_validate({"memory_interval": 1, **wrong})
    assert CkptConfig(memory_interval=1).memory_interval == 1
