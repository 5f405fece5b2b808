"""A resume reads a step once: small files when it is chosen, tensor files by whoever loads them.

And whatever is damaged is found, wherever it lies and whichever step was asked for, before the run goes on.
"""

import json
import os
import re
import shutil
from pathlib import Path

import draws
import numpy as np
import pytest
import runs
import torch
from runs import flip

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.reader import DIRECT_BYTES, ReadRange, read_pieces
from cairn.checkpoint.tensors.sharded_files import load_step, write_tensors
from cairn.config.ckpt import CkptConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.launch.attempt import newest_start
from cairn.launch.start import Start, StartDamaged, choose_start
from cairn.launch.supervise.slot import LONGEST_MESSAGE, send_error
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_DAMAGED, answer
from cairn.run.messages import Attempt

PARTS = ["trainer", "orchestrator"]
SMALL = {
    "model/config.json": b"{}\n",
    "model/tokenizer.json": b"t" * 2_000_000,
    "trainer/state.json": json.dumps({"seed": 0}).encode(),
    "orchestrator/state.json": b"{}\n",
    "orchestrator/ledger.sqlite": b"l" * 3_000_000,
}
TENSORS = {"model/model": (1000, 300_000, 600_000), "trainer/optimizer": (1_000_000, 1_000_000)}
NEITHER = 100_000
"""Bytes that may be read beside those of the files: manifests, headers, and what Python itself reads."""


def values(step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        stem: {f"t{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}
        for stem, sizes in TENSORS.items()
    }


def blank() -> dict[str, dict[str, torch.Tensor]]:
    return {
        stem: {name: torch.zeros_like(t) for name, t in named.items()} for stem, named in values(0).items()
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 4 and 8; the weights are in several files. Leave it as it is."""
    run = tmp_path_factory.mktemp("original") / "run"
    store = CheckpointStore(run / "checkpoints")
    for step in (4, 8):
        scratch = run / "scratch"
        for stem, named in values(step).items():
            (scratch / stem).parent.mkdir(parents=True)
            where, _, name = stem.rpartition("/")
            write_tensors(scratch / where, named, name, max_file_bytes=2 << 20)
        files = {str(p.relative_to(scratch)): p.read_bytes() for p in scratch.rglob("*") if p.is_file()}
        shutil.rmtree(scratch)
        store.begin(step, ["model", *PARTS])
        store.write_part(step, "files", SMALL | files, "run:1")
        store.commit(step, {"files": "run:1"}, timeout=0.0, about={**runs.ABOUT, "parts": PARTS})
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def configure(run: Path, resume: str | int, **settings: object) -> TrainerConfig:
    """Of a run that goes on from there."""
    ckpt = CkptConfig(resume_step=resume) if isinstance(resume, int) else CkptConfig(resume=resume)
    return TrainerConfig(output_dir=str(run), ckpt=ckpt, **{"max_steps": 20, **settings})


def choose(run: Path, resume: str | int, **settings: object) -> Start:
    return choose_start(configure(run, resume, **settings), needs=PARTS)


def go_on(run: Path, resume: str | int) -> Start:
    """Choose and load a step, as the launcher and the ranks do, and choose again where that fails."""
    config = configure(run, resume)
    start = choose_start(config, needs=PARTS)
    while True:
        tensors = blank()
        try:
            load_step(start.folder, tensors)
        except Damaged as error:
            if start.named:
                raise
            start = choose_start(config, needs=PARTS, damaged=StartDamaged(start.folder, str(error)))
            continue
        for stem, named in values(start.step).items():
            assert all(torch.equal(tensors[stem][name], tensor) for name, tensor in named.items()), stem
        return start


def size_of(step: Path, *, tensors: bool) -> int:
    files = (path for path in step.rglob("*") if path.is_file() and path.name != "manifest.json")
    return sum(path.stat().st_size for path in files if (path.suffix == ".safetensors") == tensors)


class Bytes:
    """Counts what this process reads from files, from the page cache or not."""

    def __enter__(self) -> "Bytes":
        self.read = -self._so_far()
        return self

    def __exit__(self, *_: object) -> None:
        self.read += self._so_far()

    def _so_far(self) -> int:
        return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("resume", ["auto", "latest", 8])
def test_each_file_is_read_once(run: Path, resume: str | int):
    """Small files when the step is chosen, and tensor files when it is loaded."""
    step = run / "checkpoints" / "step_8"
    choose(run, resume)  # imports and caches
    tensors = blank()
    with Bytes() as choosing:
        start = choose(run, resume)
    with Bytes() as loading:
        load_step(start.folder, tensors)
    assert start.step == 8
    assert 0 <= choosing.read - size_of(step, tensors=False) < NEITHER
    assert 0 <= loading.read - size_of(step, tensors=True) < NEITHER


def test_a_worker_that_is_replaced_leaves_tensors_to_those_who_load_them(run: Path):
    step = run / "checkpoints" / "step_8"
    attempt = Attempt(runs.ABOUT["run_id"], 1, "trainer", 4, None, runs.ABOUT["branch"])
    with Bytes() as choosing:
        newest = newest_start(attempt, CheckpointStore(run / "checkpoints"), pass_over=False)
    assert (newest.start_step, newest.resume_from) == (8, str(step))
    assert 0 <= choosing.read - size_of(step, tensors=False) < NEITHER
    flip(step / "orchestrator" / "ledger.sqlite", 5)
    with pytest.raises(StartDamaged, match=r"ledger\.sqlite") as error:
        newest_start(attempt, CheckpointStore(run / "checkpoints"), pass_over=False)
    assert error.value.folder == step
    assert newest_start(attempt, CheckpointStore(run / "checkpoints"), pass_over=True) == attempt


def all_files(original: Path) -> list[str]:
    step = original / "checkpoints" / "step_8"
    return sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())


@draws.seldom
def test_damage_to_any_file_is_found_whichever_step_was_asked_for(
    run: Path, original: Path, capsys: pytest.CaptureFixture[str]
):
    """In every file's first, middle and last byte. An earlier step is taken, unless this one was named."""
    names = all_files(original)
    assert len(names) > 9
    for name in names:
        file = run / "checkpoints" / "step_8" / name
        size = file.stat().st_size
        for place in sorted({0, min(30, size // 3), size // 2, size - 1}):  # 30 is in a header's names
            flip(file, place)
            for resume in ("auto", "latest"):
                assert go_on(run, resume).step == 4
                output = capsys.readouterr().out
                assert f"passing over a damaged checkpoint: {file}" in output, name
                assert f"the newest good checkpoint is {run / 'checkpoints' / 'step_4'}" in output
            with pytest.raises((UsageError, Damaged), match=re.escape(str(file))):
                go_on(run, 8)
            flip(file, place)
    assert go_on(run, "latest").step == 8


def test_damage_is_found_before_later_steps_are_set_aside(run: Path):
    """Going back to a step sets those after it aside: not before all of it was read."""
    file = run / "checkpoints" / "step_4" / "trainer" / "optimizer-00002-of-00002.safetensors"
    assert choose(run, 4).step == 4
    flip(file, file.stat().st_size // 2)
    with pytest.raises(UsageError, match=re.escape(f"can't resume: {file}: changed between")):
        choose(run, 4)
    assert choose(run, "latest").step == 8
    flip(run / "checkpoints" / "step_8" / "model" / "config.json", 0)
    with pytest.raises(UsageError, match="there is no good checkpoint"):
        choose(run, "latest")


def test_a_step_that_nobody_will_load_is_read_when_it_is_chosen(run: Path):
    """A run is not complete that has a damaged last step."""
    assert choose(run, "auto", max_steps=8).step == 8
    file = run / "checkpoints" / "step_8" / "model" / "model-00001-of-00002.safetensors"
    flip(file, file.stat().st_size // 2)
    assert choose(run, "auto", max_steps=8).step == 4


def test_a_run_that_is_to_stop_has_a_step_to_take_before(run: Path):
    """And saves it."""
    assert choose(run, "latest", stop_after=9).step == 8
    assert choose(run, "auto", max_steps=8, stop_after=8).step == 8, "it is complete"
    with pytest.raises(UsageError, match="--stop-after 8: the run resumes from step 8, which is no earlier"):
        choose(run, "auto", stop_after=8)
    unsaved = TrainerConfig(output_dir=str(run.with_name("other")), stop_after=3)
    with pytest.raises(UsageError, match="--stop-after 3: without --ckpt nothing would be saved"):
        choose_start(unsaved, needs=PARTS)


def test_without_the_self_check_nobody_samples_from_weights_that_were_not_read(run: Path):
    """With it, no answer counts before the trainer has loaded them."""
    file = run / "checkpoints" / "step_8" / "model" / "model-00001-of-00002.safetensors"
    flip(file, file.stat().st_size // 2)
    assert choose(run, "auto").step == 8
    assert choose(run, "auto", self_check=False).step == 4


def test_a_tensor_file_that_the_run_does_not_load_is_checked_all_the_same(run: Path):
    """Whoever loads only the weights has read the optimiser's state as well."""
    step = run / "checkpoints" / "step_8"
    weights = {"model/model": blank()["model/model"]}
    with Bytes() as loading:
        load_step(step, weights)
    assert 0 <= loading.read - size_of(step, tensors=True) < NEITHER
    file = step / "trainer" / "optimizer-00001-of-00002.safetensors"
    flip(file, file.stat().st_size - 1)
    with pytest.raises(Damaged, match=file.name):
        load_step(step, weights)


def test_one_ranks_error_is_everybodys(run: Path):
    """A rank that has read its part well hears what another one has found; damage counts before the rest."""
    step = run / "checkpoints" / "step_8"
    for elsewhere in (Damaged("elsewhere"), CheckpointError("elsewhere")):
        with pytest.raises(type(elsewhere), match="elsewhere"):
            load_step(step, blank(), gather=lambda mine, theirs=elsewhere: [mine, ({}, theirs)])
    flip(step / "trainer" / "optimizer-00001-of-00002.safetensors", 3_000_000)
    with pytest.raises(Damaged, match="optimizer-00001"):
        load_step(step, blank(), gather=lambda mine: [mine, ({}, CheckpointError("elsewhere"))])


def test_the_driver_tells_the_launcher_what_is_damaged(capfd: pytest.CaptureFixture[str]):
    """Through the pipe for its last words; people read the problem alone."""
    reading, writing = os.pipe()

    def load() -> int:
        raise StartDamaged(Path("/a\nb/step_8"), "model: changed\nhere")

    assert answer(load, tell=lambda words: send_error(writing, words)) == EXIT_DAMAGED
    assert capfd.readouterr().err == "error: model: changed\nhere\n"
    found = StartDamaged.parse(os.read(reading, LONGEST_MESSAGE).decode())
    assert (found.folder, str(found)) == (Path("/a\nb/step_8"), "model: changed\nhere")
    assert StartDamaged.parse("") is None, "nothing was said"
    os.close(reading), os.close(writing)


# Past the page cache


def forget(path: Path) -> bool:
    """Have the kernel forget a file's pages; whether it has, and can read past the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        os.close(fd)
    return not cached(path, 0)


def cached(path: Path, offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize("how", ["nothing cached", "some cached", "no such reads"])
def test_what_is_not_cached_is_read_past_the_page_cache(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
):
    """Ranges that begin and end anywhere, across the buffer's end and at the file's end, are as they were."""
    path = tmp_path / "file"
    content = np.random.default_rng(0).bytes(3 * DIRECT_BYTES + 12_345)
    path.write_bytes(content)
    able = forget(path)
    if how == "some cached":
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for offset in (0, 5 * DIRECT_BYTES // 4, DIRECT_BYTES * 2 - 4096):
                os.pread(file.fileno(), 4096, offset)
    if how == "no such reads":
        monkeypatch.setattr("cairn.checkpoint.tensors.reader.ALIGNMENT", 1)  # for the disk: EINVAL
    last = 9 * DIRECT_BYTES // 4
    ranges = [(1, 300_000), (300_001, 7), (300_008, DIRECT_BYTES), (last, len(content) - last)]
    targets = [torch.zeros(nbytes, dtype=torch.uint8) for _, nbytes in ranges]
    pieces = [ReadRange(path, first, torch.uint8, t) for (first, _), t in zip(ranges, targets, strict=True)]
    seen = read_pieces(pieces)[path]
    for (first, nbytes), target in zip(ranges, targets, strict=True):
        assert target.numpy().tobytes() == content[first : first + nbytes]
    expected = FileChecksum(len(content))
    for first, nbytes in ranges:
        expected.add(first, content[first : first + nbytes])
    assert (seen.crcs, seen.nbytes) == (expected.crcs, expected.nbytes)
    if able and how == "nothing cached":
        quarter = DIRECT_BYTES // 4
        assert not any(cached(path, offset) for offset in range(quarter, 12 * quarter, 3 * quarter))


def test_a_file_that_ends_too_early_is_damaged_in_the_cache_or_not(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    for _ in range(2):
        with pytest.raises(Damaged, match="ends at byte 1000000, but should be longer"):
            read_pieces([ReadRange(path, 10, torch.uint8, torch.zeros(1_000_000, dtype=torch.uint8))])
        forget(path)
