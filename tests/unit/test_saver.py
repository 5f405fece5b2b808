"""Saving with the real writer process: what comes back, what a failure leaves, and that memory is reused."""

import contextlib
import filecmp
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import draws
import pytest
import torch
import torch.distributed as dist
from runs import ABOUT
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.saving.arena import LEAST_BYTES, SaveFailed, WriterDied
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.saving.writer import ArenaWriter
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import Extent
from cairn.checkpoint.tensors.sharded_files import load_step, write_tensors
from cairn.config.ckpt import CkptConfig
from cairn.config.trainer import SFTConfig
from cairn.run import faults
from cairn.run.files import write_json
from cairn.trainer.group import RankGroup
from cairn.trainer.models.trained import Trained
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState

ONE_RANK = {"rank": 0, "world_size": 1, "session": "run:1"}
FILES = {"model/config.json": b"{}\n", "trainer/state.json": b"{}\n"}
LONG = 5_000_003
"""Items of a tensor that is written past the page cache where that can be, in several blocks."""

Tensors = dict[str, dict[str, torch.Tensor]]


def state(seed: int = 0) -> Tensors:
    """All kinds of tensors: data types, shapes, memory that is not contiguous, one that takes many blocks."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tied = random(9, 4)
    return {
        "model/model": {
            "long": random(LONG),
            "bf16": random(33, 5).bfloat16(),
            "odd": random(3).half(),
            "empty": random(0, 4),
            "scalar": random(),
            "across": random(7, 11).t(),
            "view": tied[2:5],
            "expanded": random(1, 5).expand(3, 5),
            "flags": torch.tensor([True, False, True]),
            "counts": torch.arange(-5, 6),
            "parameter": torch.nn.Parameter(random(4, 4)),
        },
        "trainer/optimizer": {
            "step": torch.tensor(7.0),
            "long.exp_avg": random(LONG // 3),
            "bytes": torch.arange(256, dtype=torch.uint8),
        },
    }


def small(value: float = 0.0) -> Tensors:
    value = float(value)
    return {
        "model/model": {"w": torch.full((100,), value)},
        "trainer/optimizer": {"m": torch.full((9,), value)},
    }


def bits(tensors: Tensors) -> dict[str, tuple]:
    return {
        f"{stem}:{name}": (
            t.dtype,
            tuple(t.shape),
            t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for stem, named in tensors.items()
        for name, t in named.items()
    }


def on_disk(folder: Path, stems: Tensors) -> dict[str, tuple]:
    """What the safetensors library reads."""
    return bits({stem: load_file(folder / f"{stem}.safetensors") for stem in stems})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def make_saver(store: CheckpointStore) -> Iterator[Callable[..., Saver]]:
    """Savers of one rank; none of their writers outlives the test."""
    made: list[Saver] = []

    def make(**options) -> Saver:
        rank = SavingRank(*(options.pop(key, default) for key, default in ONE_RANK.items()))
        how = {
            key: options.pop(key)
            for key in ("read_back", "max_file_bytes", "part_timeout", "room")
            if key in options
        }
        made.append(Saver(store, rank, how=SaveOptions(**{"part_timeout": 60.0, **how}), **options))
        return made[-1]

    yield make
    for pid in writers():
        os.kill(pid, signal.SIGCONT)
    for saver in made:
        saver.close()
    assert writers() == []


@pytest.fixture
def saver(make_saver: Callable[..., Saver]) -> Saver:
    return make_saver()


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets CAIRN_FAULT, and has points counted anew."""
    monkeypatch.setattr(faults, "_reached", {})
    return lambda value: monkeypatch.setenv("CAIRN_FAULT", value)


def writers() -> list[int]:
    """The writer processes of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, command = int(entry.name), b""
            while not command:  # the kernel shows none for a moment, when a process is in its execve
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "Z" or int(parent) != os.getpid():
                    break
                command = (entry / "cmdline").read_bytes()
            if b"cairn.checkpoint.saving.writer" in command:
                found.append(pid)
    return found


def arenas() -> list[str]:
    """Where in this process' memory arenas are."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if "cairn-arena" in line]


def save(saver: Saver, step: int, tensors: Tensors) -> None:
    saver.save(step, tensors, FILES, ABOUT)
    saver.finish()


# What comes back


@pytest.mark.parametrize("read_back", [False, True])
def test_a_save_comes_back_bit_by_bit(make_saver, store, tmp_path, read_back):
    """All data types and shapes; by our loader and the safetensors library; files as of one process alone."""
    saver, tensors = make_saver(read_back=read_back), state()
    saver.save(3, tensors, FILES, ABOUT)
    saver.before_update()
    saver.finish()
    assert [saved.step for saved in saver.check()] == [3]
    assert saver.check() == []
    folder = store.folder(3)
    manifest = verify(folder)
    names = {"model/model.safetensors", "trainer/optimizer.safetensors", *FILES}
    assert manifest.files.keys() == names
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(
        {*names, "manifest.json"}
    )
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content
    assert on_disk(folder, tensors) == bits(tensors)
    blank = {
        stem: {n: torch.zeros_like(t, memory_format=torch.contiguous_format) for n, t in named.items()}
        for stem, named in tensors.items()
    }
    assert load_step(folder, blank) == manifest
    assert bits(blank) == bits(tensors)
    for stem, named in tensors.items():
        where, _, name = stem.rpartition("/")
        (tmp_path / where).mkdir()
        write_tensors(tmp_path / where, named, name)
        file = f"{stem}.safetensors"
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes()


def large(seed: int) -> Tensors:
    """More than twice what the smallest arena holds, in tensors short and long."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, LONG, 17, 25_000_001, 1_000_001, 5, 4 << 20, 33]
    tensors = {f"t{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}
    return {"model/model": tensors, "trainer/optimizer": {"m": torch.randn(LONG, generator=generator)}}


@draws.seldom
@pytest.mark.parametrize("read_back", [False, True])
def test_a_state_that_does_not_fit_into_memory_is_saved_in_pieces(make_saver, store, read_back):
    """Twice, since the second save finds the first one's bytes in the arena."""
    asked: list[int] = []
    whole = sum(t.nbytes for named in large(0).values() for t in named.values())
    small_arena = make_saver(room=lambda nbytes: asked.append(nbytes) or 1, read_back=read_back)
    for step in (1, 2):
        save(small_arena, step, large(step))
    assert asked[0] >= whole > 2 * LEAST_BYTES
    assert small_arena._arena is not None
    assert len(small_arena._arena._map) == LEAST_BYTES
    for step in (1, 2):
        verify(store.folder(step))
        assert on_disk(store.folder(step), large(0)) == bits(large(step))


@pytest.mark.slow
def test_pieces_give_the_same_files(make_saver, store):
    plain, in_pieces = make_saver(), make_saver(room=lambda nbytes: 0)
    save(plain, 1, large(7))
    save(in_pieces, 2, large(7))
    for name in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        assert filecmp.cmp(store.folder(1) / name, store.folder(2) / name, shallow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "error"), [("save.write:ENOSPC@2", SaveFailed), ("save.write:kill@5", WriterDied)]
)
def test_a_copy_that_waits_for_the_writer_notices_its_end(make_saver, store, fault, wanted, error):
    fault(wanted)
    saver = make_saver(room=lambda nbytes: 0)
    saver.save(1, large(1), FILES, ABOUT)
    saver.before_update()
    with pytest.raises(error):
        saver.finish()
    fault("")
    goes_on(saver, 1)


def test_large_states_are_split(make_saver, store):
    """Files of bounded size with an index, which belongs to the checkpoint like any other file."""
    saver, tensors = make_saver(max_file_bytes=1000), state()
    save(saver, 3, tensors)
    folder = store.folder(3)
    files = verify(folder).files
    assert "model/model.safetensors.index.json" in files
    assert sum(name.startswith("model/model-0000") for name in files) > 1
    blank = {stem: {n: torch.zeros_like(t) for n, t in named.items()} for stem, named in tensors.items()}
    load_step(folder, blank)
    assert bits(blank) == bits(tensors)


def test_the_copy_is_a_snapshot(saver, store):
    """What changes after before_update has returned does not get into the checkpoint."""
    tensors = state()
    before = bits(tensors)
    saver.prepare(tensors)
    saver.save(3, tensors, FILES, ABOUT)
    saver.before_update()
    with torch.no_grad():
        for named in reversed(tensors.values()):  # what is copied last changes first
            for name, tensor in reversed(named.items()):
                if name != "expanded":
                    tensor.fill_(1)
    saver.finish()
    assert bits(tensors) != before
    assert on_disk(store.folder(3), tensors) == before
    verify(store.folder(3))


def test_before_update_waits_only_for_a_copy(saver, store):
    """It returns at once when nothing is being saved, and while the writer is still at work."""
    saver.before_update()
    saver.prepare(small())
    (writer,) = writers()
    os.kill(writer, signal.SIGSTOP)
    saver.save(3, small(), FILES, ABOUT)
    saver.before_update()
    saver.before_update()
    assert (saver.check(), store.steps()) == ([], [])
    os.kill(writer, signal.SIGCONT)
    saver.finish()
    assert store.steps() == [3]


def test_arena_and_writer_are_reused(saver, store):
    """Memory is allocated once, however often is saved; only a state of another shape gets a new arena."""
    saver.prepare(state())
    there, pids = arenas(), writers()
    assert (len(there), len(pids)) == (1, 1)
    for step in (1, 2, 3):
        tensors = state(step)
        save(saver, step, tensors)
        assert (arenas(), writers()) == (there, pids)
        assert on_disk(store.folder(step), tensors) == bits(tensors)
    save(saver, 4, small())
    assert writers() != pids
    assert (len(arenas()), len(writers())) == (1, 1)
    for step in (1, 2, 3, 4):
        verify(store.folder(step))
    saver.close()
    assert writers() == []


def test_equal_states_give_equal_files(make_saver, store):
    """Nothing but the manifest tells two saves of the same state apart."""
    for step in (1, 2):
        save(make_saver(session=f"run:{step}"), step, state())
    a, b = ({p.name: p.read_bytes() for p in store.folder(s).rglob("*") if p.is_file()} for s in (1, 2))
    assert {name for name in a if a[name] != b[name]} == {"manifest.json"}
    assert verify(store.folder(1)).files == verify(store.folder(2)).files


def test_a_save_that_falls_due_meanwhile_waits(saver, store, caplog):
    """It is reported, not dropped; both are committed, each with its own values."""
    caplog.set_level(logging.WARNING)
    saver.prepare(small())
    (writer,) = writers()
    os.kill(writer, signal.SIGSTOP)
    saver.save(1, small(1.0), FILES, ABOUT)
    saver.before_update()
    second = threading.Thread(target=saver.save, args=(2, small(2.0), FILES, ABOUT))
    second.start()
    while "step 2 waits" not in caplog.text:
        assert second.is_alive()
    assert store.steps() == []
    os.kill(writer, signal.SIGCONT)
    second.join()
    assert store.steps() in ([1], [1, 2])
    saver.finish()
    assert [saved.step for saved in saver.check()] == [1, 2]
    for step in (1, 2):
        assert on_disk(store.folder(step), small()) == bits(small(step))


def test_other_roles_parts_belong_to_the_step(make_saver, store):
    """What the orchestrator wrote is committed with the trainer's part."""
    saver = make_saver(roles={"orchestrator": "run:1"})
    store.begin(3, ["orchestrator"])
    store.write_part(3, "orchestrator", {"orchestrator/state.json": b"{}"}, "run:1")
    save(saver, 3, small())
    assert "orchestrator/state.json" in verify(store.folder(3)).files


def test_a_part_that_will_not_come_ends_the_wait_for_it(make_saver, store):
    """Of the save, and of a loop that wants to save the next step."""
    died = threading.Event()

    def look(part: str) -> None:
        if died.is_set():
            raise SaveFailed("trainer_rank1 has died")

    saver = make_saver(world_size=2, while_waiting=look)
    saver.save(1, small(), FILES, ABOUT)
    threading.Timer(0.2, died.set).start()
    with pytest.raises(SaveFailed, match="saving failed: trainer_rank1 has died"):
        saver.save(2, small(), FILES, ABOUT)
    assert store.steps() == []


def test_what_comes_before_and_after_a_commit(make_saver, store):
    """The metrics' rows are made durable while the step is not there, and retention runs when it is.

    When a step was committed is known, whenever the loop asks.
    """
    before: list[list[int]] = []
    after: list[tuple[int, list[int]]] = []
    moments: list[float] = []

    def after_commit(step: int) -> None:
        moments.append(time.time())
        after.append((step, store.steps()))

    saver = make_saver(
        before_commit=lambda: (moments.append(time.time()), before.append(store.steps())),
        after_commit=after_commit,
    )
    for step in (1, 2):
        save(saver, step, small())
    assert before == [[], [1]]
    assert after == [(1, [1]), (2, [1, 2])]
    saves = saver.check()
    assert [saved.step for saved in saves] == [1, 2]
    committed = [saved.committed for saved in saves]
    assert moments[0] <= committed[0] <= moments[1] <= moments[2] <= committed[1] <= moments[3]


def test_the_reader_in_the_documentation_reads_it(make_saver, store):
    """The one in docs/reference/checkpoint-files.md, which knows nothing of ours; it finds damage, too."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-files.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    tensors = state()
    for named in tensors.values():
        for name in [name for name, tensor in named.items() if tensor.dtype == torch.bfloat16]:
            del named[name]
    save(make_saver(max_file_bytes=1000), 3, tensors)
    manifest, found = namespace["read"](store.folder(3))
    assert manifest["step"] == 3
    expected = {
        f"{stem.split('/')[0]}/{name}": t for stem, named in tensors.items() for name, t in named.items()
    }
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.shape == tuple(expected[name].shape)
        assert torch.equal(torch.from_numpy(values), expected[name].detach())
    with open(store.folder(3) / "trainer" / "state.json", "r+b") as file:
        file.write(b"[")
    with pytest.raises(ValueError, match="damaged"):
        namespace["read"](store.folder(3))


def test_the_documentation_names_every_field_point_and_setting():
    """What is added to the code is added to the pages about the files, fault points and settings."""
    pages = {
        "reference/checkpoint-files": Manifest.model_fields,
        "reference/faults": faults.POINTS,
        "how-to/checkpoints": CkptConfig.model_fields,
    }
    for page, names in pages.items():
        text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
        assert sorted(name for name in names if f"`{name}`" not in text) == [], page


# Failures


def fails(saver: Saver, step: int, match: str) -> None:
    """Save `step`, which must surface as SaveFailed, with nothing committed."""
    try:
        with pytest.raises(SaveFailed, match=match):
            save(saver, step, small(step))
    finally:
        saver.before_update()  # does not hang
    assert step not in saver.store.steps()
    assert saver.check() == []


def goes_on(saver: Saver, step: int) -> None:
    """The next save of the same saver is good, and the steps before it are, too."""
    save(saver, step, small(step))
    assert [saved.step for saved in saver.check()][-1:] == [step]
    for number in saver.store.steps():
        verify(saver.store.folder(number))
        assert on_disk(saver.store.folder(number), small()) == bits(small(number))


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ("save.begin", "EACCES"),
        ("save.copy", "EIO"),
        ("save.write", "ENOSPC"),
        ("save.before_fsync", "EIO"),
        ("save.before_part", "ENOSPC"),
        ("commit.before_manifest", "EACCES"),
        ("commit.manifest_written", "ENOSPC"),
    ],
)
def test_errors_surface_and_harm_nothing(make_saver, store, monkeypatch, fault, point, error):
    """As SaveFailed with the system's reason; the step before stays, the next save of this saver works.

    (tests/faults has every point with every error, and what follows in new processes.)
    """
    fault(f"{point}:{error}@2" if point != "save.write" else f"{point}:{error}@3")
    saver = make_saver()
    save(saver, 1, small(1))
    saver.check()
    fails(saver, 2, f"saving failed:.*{point}:{error}")
    assert (store.steps(), store.debris()) == ([1], [store.folder(2)] if point != "save.begin" else [])
    monkeypatch.delenv("CAIRN_FAULT")
    goes_on(saver, 2)
    assert (store.steps(), store.debris()) == ([1, 2], [])


def test_errors_surface_at_the_next_step(saver, store, fault):
    """A loop that calls check once a step hears of it without waiting for anything."""
    fault("save.write:EIO")
    saver.save(1, small(), FILES, ABOUT)

    def loop() -> None:
        while True:
            saver.before_update()
            saver.check()

    with pytest.raises(SaveFailed, match="saving failed"):
        loop()
    assert store.steps() == []


def test_a_file_that_the_system_refuses_is_named(saver, store):
    """A real limit, on the size of files: the error names the file and says what the system said."""
    tensors = state()
    save(saver, 1, tensors)
    (writer,) = writers()
    resource.prlimit(writer, resource.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(SaveFailed, match="File too large"):
        save(saver, 2, tensors)
    assert store.steps() == [1]
    verify(store.folder(1))
    save(saver, 2, tensors)
    verify(store.folder(2))


def test_a_part_that_does_not_come_is_named(make_saver, store):
    """With the setting that allows more time; the step does not exist."""
    saver = make_saver(roles={"orchestrator": "run:1"}, part_timeout=0.0)
    fails(saver, 1, r"orchestrator.*--ckpt\.part-timeout")
    assert store.debris() == [store.folder(1)]


def test_a_step_that_exists_is_never_saved_again(saver, store):
    """That is an error, and the step stays as it was."""
    save(saver, 1, small(1))
    before = {path: path.read_bytes() for path in store.folder(1).rglob("*") if path.is_file()}
    with pytest.raises(SaveFailed, match="exists already"):
        save(saver, 1, small(5))
    assert {path: path.read_bytes() for path in store.folder(1).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("when", ["at rest", "in the middle of a save"])
def test_a_killed_writer_is_an_error_and_then_replaced(saver, store, when):
    """SIGKILL: the save fails, the loop does not hang, the step before stays, the next save works again."""
    save(saver, 1, small(1))
    saver.check()
    (writer,) = writers()
    if when == "at rest":
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
        fails(saver, 2, "writer died")
    else:
        os.kill(writer, signal.SIGSTOP)
        saver.save(2, small(2), FILES, ABOUT)
        saver.before_update()
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(SaveFailed, match="writer died"):
            saver.finish()
    assert store.steps() == [1]
    goes_on(saver, 2)
    assert len(writers()) == 1


@pytest.mark.parametrize("waits_for", ["its writer", "another rank's part", "rank 0"])
def test_a_save_that_is_given_up_leaves_nothing_at_work(make_saver, store, waits_for):
    """Ranks that outlive another one give up their saves, and soon others save the same step."""
    rank = 1 if waits_for == "rank 0" else 0
    saver = make_saver(rank=rank, world_size=2 if waits_for != "its writer" else 1, part_timeout=240.0)
    saver.prepare(small())
    (writer,) = writers()
    if waits_for == "its writer":
        os.kill(writer, signal.SIGSTOP)
    saver.save(1, small(1), FILES, ABOUT)
    if waits_for == "another rank's part":
        while not store.receipt_file(1, "trainer0").exists():
            time.sleep(0.01)
    begun = time.monotonic()
    saver.abandon()
    assert time.monotonic() - begun < 120
    assert not writers()
    assert store.steps() == []
    goes_on(make_saver(), 1)


def test_a_writer_that_dies_is_no_reason_for_a_bad_end(make_saver, store):
    """Closing after its death, with a save that failed or without one, raises nothing."""
    for begun in (False, True):
        saver = make_saver()
        saver.prepare(small())
        (writer,) = writers()
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
        if begun:
            fails(saver, 1, "writer died")
        saver.close()
        saver.close()


class Scribbler:
    """Writes one wrong byte into a file again and again, as soon as the file is there."""

    def __init__(self, path: Path, offset: int, byte: bytes):
        self.path, self.offset, self.byte = path, offset, byte
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def run(self):
        while not self.over.is_set():
            try:
                fd = os.open(self.path, os.O_WRONLY)
            except FileNotFoundError:
                continue
            while not self.over.is_set():
                if os.fstat(fd).st_size > self.offset:
                    os.pwrite(fd, self.byte, self.offset)
            os.close(fd)


@pytest.mark.parametrize("read_back", [True, False])
def test_reading_back_finds_what_changed_on_the_way(make_saver, store, read_back):
    """A byte that is another on the disk than was written: found before the step exists, if asked for."""
    saver, tensors = make_saver(read_back=read_back), state()
    saver.prepare(tensors)
    path = store.folder(1) / "model" / "model.safetensors"
    wrong = 1 + 3 * 4096  # long.  Byte 1 of some item.
    value = tensors["model/model"]["long"].numpy().tobytes()[wrong - 4096]
    with Scribbler(path, wrong, bytes([value ^ 0xFF])):
        saver.save(1, tensors, FILES, ABOUT)
        if read_back:
            with pytest.raises(SaveFailed, match=r"model\.safetensors.*other bytes"):
                saver.finish()
        else:
            saver.finish()
    if read_back:
        assert store.steps() == []
    else:
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            verify(store.folder(1))


def test_reading_back_finds_what_changed_in_small_files(make_saver, store):
    """Those that are not tensors are read back, too, when all of them are written."""
    saver = make_saver(read_back=True)
    name, content = next(iter(FILES.items()))
    files = {**FILES, **{f"trainer/{i}.json": b"{}" for i in range(100)}}
    with Scribbler(store.folder(1) / name, 0, bytes([content[0] ^ 0xFF])):
        saver.save(1, state(), files, ABOUT)
        with pytest.raises(SaveFailed, match=f"other bytes.*{name}"):
            saver.finish()
    assert store.steps() == []


ON_RAMFS = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
root = Path(sys.argv[1])
(root / "probe").touch()
try:
    os.open(root / "probe", os.O_WRONLY | os.O_DIRECT)
    sys.exit("this file system has O_DIRECT")
except OSError as error:
    print(error.strerror)
store = CheckpointStore(root / "checkpoints")
saver = Saver(store, SavingRank(0, 1, "run:1"), how=SaveOptions(read_back=True))
tensors = {"odd": torch.randn(1000003), "long": torch.randn(3000001), "scalar": torch.tensor(1.0)}
about = dict(run_id="x", attempt=1, branch="x", parent=None, parts=["model"], world_size=1, dtypes={},
             metrics={}, versions={}, config_digest="")
for step in (1, 2):
    saver.save(step, {"model/model": tensors}, {"model/config.json": b"{}"}, about)
    saver.finish()
    verify(store.folder(step))
    found = load_file(store.folder(step) / "model/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
saver.close()
print("good")
"""


@draws.seldom
def test_file_systems_without_direct_writes(tmp_path: Path):
    """ramfs refuses O_DIRECT: saving falls back by itself. (It is mounted in a namespace of its own.)"""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t ramfs none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system without O_DIRECT is not permitted here")
    arguments = [sys.executable, "-c", ON_RAMFS, str(tmp_path)]
    result = subprocess.run([*mount, *arguments], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["Invalid argument", "good"], result.stdout + result.stderr


def test_a_file_system_that_refuses_a_direct_write(tmp_path: Path):
    """Where opening for direct writes is allowed and writing is not, as from memory that is not aligned."""
    data = os.urandom(1 << 20)
    arena = memoryview(mmap.mmap(-1, 1 + len(data)))
    arena[1:] = data
    writer = ArenaWriter(arena, [("refused", len(data))], [Extent(0, 0, len(data), 1)])
    writer.save(tmp_path, tmp_path / "part.json", "run:1", lambda position, before: None)
    assert (tmp_path / "refused").read_bytes() == data


# Models and optimisers


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """One rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankGroup(0, 1, torch.device("cpu"), None)
    dist.destroy_process_group()


class Scaled(torch.optim.Optimizer):
    """An optimiser with states of all kinds: a number, flags, bf16, a scalar, and none for vectors."""

    def __init__(self, parameters, lr: float):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for parameters in self.param_groups:
            for p in parameters["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                if not own and p.ndim > 1:
                    own["rows"] = torch.zeros(p.shape[0], dtype=torch.bfloat16)
                    own["count"] = torch.zeros((), dtype=torch.int64)
                    own["signs"] = torch.zeros(p.shape, dtype=torch.int8)
                    own["nothing"] = torch.zeros(0)
                scale = 1.0
                if p.ndim > 1:
                    own["rows"].add_(p.grad.pow(2).mean(1).bfloat16())
                    own["count"] += 1
                    own["signs"].copy_(p.grad.sign())
                    scale = (own["rows"].float().rsqrt() / own["count"]).clamp(max=9)[:, None] + own[
                        "signs"
                    ] / 9
                p.sub_(parameters["lr"] * scale * p.grad)


OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1e-2),
    "states of all kinds": lambda p: Scaled(p, 1e-2),
}


def toy(optimizer: str, seed: int, group: RankGroup, kind: str) -> TrainerState:
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=kind == "tied",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
    if kind == "unused":
        model.vision = torch.nn.Linear(3, 2)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    policy = Trained(model, OPTIMIZERS[optimizer](trained))
    return TrainerState(SFTConfig(), group, {POLICY: policy}, TrainerProgress())


def train(state: TrainerState, steps: int) -> None:
    for _ in range(steps):
        state.progress.step += 1
        torch.manual_seed(state.progress.step)
        ids = torch.randint(0, 31, (2, 7))
        for model in state.models.values():
            model.module(input_ids=ids, labels=ids).loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd, momentum", "adafactor", "muon"])
def test_state_is_made_with_one_gradient_at_a_time(group, optimizer: str):
    """A trainer that shares its GPU with a server has no memory for gradients of all weights."""
    policy, alive = toy(optimizer, 1, group, "untied").policy, list[int]()
    groups = policy.optimizer.param_groups
    before = {name: values.clone() for name, values in policy.module.state_dict().items()}
    settings = [(of["lr"], list(map(id, of["params"]))) for of in groups]
    owned = {
        name: p for name, p in policy.trained().items() if any(p is q for of in groups for q in of["params"])
    }
    policy.optimizer.register_step_pre_hook(
        lambda *_: alive.append(sum(p.grad.nbytes for p in policy.module.parameters() if p.grad is not None))
    )
    policy.create_optimizer_state([f"{name}.moment" for name in owned])
    assert sorted(alive) == sorted(p.nbytes for p in owned.values())
    assert {name.rpartition(".")[0] for name in policy.tensors()["trainer/optimizer"]} == set(owned)
    assert all(p.grad is None for p in policy.module.parameters())
    assert all(torch.equal(values, before[name]) for name, values in policy.module.state_dict().items())
    assert [(of["lr"], list(map(id, of["params"]))) for of in groups] == settings


@pytest.mark.parametrize("kind", ["tied", "frozen", "unused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(saver, store, group, optimizer, kind):
    """With any optimiser, tied or frozen weights, and weights that no gradient reaches; bit by bit."""
    straight = toy(optimizer, 1, group, kind)
    train(straight, 2)
    tensors = straight.tensors()
    names = list(tensors["model/model"])
    assert ("lm_head.weight" in names) == (kind != "tied")
    assert "model.embed_tokens.weight" in names
    assert ("trainer/optimizer" in tensors) == (optimizer != "sgd")
    trained = {
        name for name, parameter in straight.policy.module.named_parameters() if parameter.requires_grad
    }
    for name in tensors.get("trainer/optimizer", {}):
        assert name.rpartition(".")[0] in trained
    progress = {"step": 2, "total_tokens": 0, "total_samples": 0}
    saver.save(2, tensors, FILES, ABOUT)
    saver.before_update()
    train(straight, 2)
    saver.finish()
    folder = store.folder(2)
    write_json(folder / "trainer" / "state.json", {"progress": progress})

    resumed = toy(optimizer, 2, group, kind)
    origin = resumed.load(folder)
    assert (origin.run_id, origin.step, resumed.progress.step) == ("0badcafe", 2, 2)
    train(resumed, 2)
    assert bits(resumed.tensors()) == bits(straight.tensors())


def test_freezing_what_was_trained_is_refused(saver, store, group):
    """Its optimiser state has no place; what was frozen may be trained from now on."""
    trained, frozen = toy("adamw", 1, group, "untied"), toy("adamw", 1, group, "frozen")
    progress = {"progress": {"step": 1, "total_tokens": 0, "total_samples": 0}}
    for step, state in ((1, trained), (2, frozen)):
        train(state, 1)
        save(saver, step, state.tensors())
        write_json(store.folder(step) / "trainer" / "state.json", progress)
    with pytest.raises(CheckpointError, match="frozen here, and were trained before"):
        toy("adamw", 2, group, "frozen").load(store.folder(1))
    resumed = toy("adamw", 2, group, "untied")
    resumed.load(store.folder(2))
    train(resumed, 1)


def test_several_models_are_saved_each_under_its_own_stems(saver, store, group):
    """A critic, say, beside the policy: each with its weights and its optimiser, bit by bit."""

    def pair(seed: int) -> TrainerState:
        state, other = (
            toy("adamw", seed, group, "tied"),
            toy("adamw, amsgrad", seed + 10, group, "untied").policy,
        )
        stems = {"weights_stem": "trainer/critic/model", "optimizer_stem": "trainer/critic/optimizer"}
        state.models["critic"] = Trained(other.module, other.optimizer, **stems)
        return state

    straight = pair(1)
    train(straight, 2)
    save(saver, 2, straight.tensors())
    folder = store.folder(2)
    write_json(folder / "trainer" / "state.json", {"progress": {"step": 2}})
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}
    assert files == {
        "model/model.safetensors",
        "trainer/optimizer.safetensors",
        "trainer/critic/model.safetensors",
        "trainer/critic/optimizer.safetensors",
    }
    assert list(straight.tensors(weights_only=True)) == ["model/model"]
    resumed = pair(2)
    resumed.load(folder)
    back = pair(3)
    train(back, 3)
    back.go_back(folder)
    assert back.progress.step == 3
    assert bits(back.tensors()) == bits(resumed.tensors())
    back.progress.step = 2
    for state in (straight, resumed, back):
        train(state, 1)
    assert bits(resumed.tensors()) == bits(straight.tensors()) == bits(back.tensors())


def test_a_state_with_more_than_the_run_is_refused(saver, store, group):
    """Weights that were trained then and are frozen now: an error, not a silent start with a new state."""
    before = toy("adamw", 1, group, "untied")
    train(before, 1)
    save(saver, 1, before.tensors())
    write_json(store.folder(1) / "trainer" / "state.json", {"progress": {"step": 1}})
    with pytest.raises(CheckpointError, match="frozen here"):
        toy("adamw", 1, group, "frozen").load(store.folder(1))
    fewer = before.tensors()
    del fewer["trainer/optimizer"]["model.norm.weight.exp_avg"]
    with pytest.raises(CheckpointError, match="does not have"):
        load_step(store.folder(1), fewer)


def test_the_state_of_another_optimizer_is_refused(saver, store, group):
    """With the names of both."""
    before = toy("adamw", 1, group, "untied")
    train(before, 1)
    save(saver, 1, before.tensors())
    saved = {"progress": {"step": 1}, "optimizer": type(before.policy.optimizer).__name__}
    write_json(store.folder(1) / "trainer" / "state.json", saved)
    with pytest.raises(CheckpointError, match="state of AdamW, and this run uses SGD"):
        toy("sgd, momentum", 1, group, "untied").load(store.folder(1))
