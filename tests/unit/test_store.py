"""The store: which steps exist, how one comes to exist, and that no damage to one goes unseen."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import torch
from runs import flip, run_python

from cairn.checkpoint import checksums, manifest
from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import reader
from cairn.checkpoint.tensors.reader import BLOCK_BYTES
from cairn.checkpoint.tensors.sharded_files import load_step, write_tensors
from cairn.run.waiting import DeadlinePassed

ABOUT = {**runs.ABOUT, "dtypes": {"model/model": "F32"}, "metrics": {"loss": 1.0}}
SIZES = {"model/model": (130, 70, 70, 75, 1, 0), "trainer/optimizer": (130, 70, 5_000_000)}


def tensors(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Small weights, and an optimiser state that takes more than one chunk."""
    generator = torch.Generator().manual_seed(seed)
    return {
        stem: {f"t{i}": torch.randn(size, generator=generator) for i, size in enumerate(sizes)}
        for stem, sizes in SIZES.items()
    }


def save(store: CheckpointStore, step: int, *, attempt: str = "run:1", **about) -> Path:
    """A whole step: a model in several files, an optimiser in one, and small files."""
    store.begin(step, ["model", "trainer"])
    folder = store.folder(step)
    files = {"model/config.json": b"{}\n", "model/empty.txt": b"", "trainer/state.json": b'{"step": 1}\n'}
    scratch = folder.with_name(f"scratch_{step}")
    for stem, named in tensors(step).items():
        (scratch / stem).parent.mkdir(parents=True)
        where, _, name = stem.rpartition("/")
        write_tensors(scratch / where, named, name, max_file_bytes=300 if where == "model" else 1 << 30)
    files |= {str(p.relative_to(scratch)): p.read_bytes() for p in scratch.rglob("*") if p.is_file()}
    shutil.rmtree(scratch)
    store.write_part(step, "files", files, attempt)
    store.commit(step, dict.fromkeys(["files"], attempt), timeout=0.0, about={**ABOUT, **about})
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the steps 9 and 10. Leave it as it is."""
    store = CheckpointStore(tmp_path_factory.mktemp("original") / "checkpoints")
    save(store, 9)
    save(store, 10)
    return store.root


@pytest.fixture
def store(original: Path, tmp_path: Path) -> CheckpointStore:
    """A copy of it."""
    shutil.copytree(original, tmp_path / "checkpoints")
    return CheckpointStore(tmp_path / "checkpoints")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def load(folder: Path) -> None:
    load_step(
        folder, {stem: {n: torch.zeros_like(t) for n, t in ts.items()} for stem, ts in tensors(0).items()}
    )


# Which steps exist


def test_a_step_exists_if_its_manifest_does(store: CheckpointStore, tmp_path: Path):
    """Numbers are compared as numbers; nothing but step_N counts, and a folder without manifest is debris."""
    assert (store.steps(), store.latest(), store.debris()) == ([9, 10], 10, [])
    for name in (
        "step_011",
        "step_0",
        "step_",
        "step_-3",
        "step_12 ",
        "Step_12",
        "step_12.tmp",
        "best",
        "12",
    ):
        shutil.copytree(store.folder(9), store.root / name)
    shutil.copytree(store.folder(10), store.folder(11))
    (store.folder(11) / "manifest.json").unlink()
    store.folder(100).mkdir()
    assert (store.steps(), store.latest()) == ([9, 10], 10)
    assert store.debris() == [store.folder(11), store.folder(100)]
    assert store.newest_good() == (store.folder(10), [])
    nothing = CheckpointStore(tmp_path / "nothing")
    assert (nothing.steps(), nothing.latest(), nothing.debris()) == ([], None, [])
    assert nothing.newest_good() == (None, [])


def test_manifests_name_every_file(store: CheckpointStore):
    """All files of the step and no others, with their sizes; part files are gone."""
    folder = store.folder(10)
    manifest = verify(folder)
    names = [path.relative_to(folder).as_posix() for path in files_of(folder)]
    assert [*manifest.files, "manifest.json"] == [*sorted(manifest.files), "manifest.json"]
    assert sorted([*manifest.files, "manifest.json"]) == names
    for name, entry in manifest.files.items():
        assert entry.size == (folder / name).stat().st_size
        assert len(entry.crc64nvme) == -(-entry.size // CHUNK_BYTES)
    assert any(len(entry.crc64nvme) > 1 for entry in manifest.files.values())
    assert any(entry.size == 0 for entry in manifest.files.values())
    load(folder)


# How a step comes to exist


def test_a_step_is_committed_when_all_parts_are_there(tmp_path: Path):
    """A part that is missing, or that an earlier start wrote, is waited for and then named."""
    store = CheckpointStore(tmp_path)
    store.begin(3, ["model", "trainer"])
    store.write_part(3, "trainer0", {"model/a": b"x"}, "run:2")
    store.write_part(3, "orchestrator", {"trainer/b": b"y"}, "run:1")
    for missing, parts in (("orchestrator", ["trainer0", "orchestrator"]), ("trainer1", ["trainer1"])):
        with pytest.raises(DeadlinePassed, match=rf"{missing}.*checkpoint 3"):
            store.commit(3, dict.fromkeys(parts, "run:2"), timeout=0.0, about=ABOUT)
        assert store.steps() == []
        assert store.debris() == [store.folder(3)]
    store.write_part(3, "orchestrator", {"trainer/b": b"y"}, "run:2")
    store.commit(3, dict.fromkeys(["trainer0", "orchestrator"], "run:2"), timeout=0.0, about=ABOUT)
    assert store.steps() == [3]
    assert sorted(verify(store.folder(3)).files) == ["model/a", "trainer/b"]


def test_a_step_is_never_overwritten(store: CheckpointStore):
    """Not even by the run that wrote it: whoever wants it again sets it aside first."""
    before = {path: path.read_bytes() for path in files_of(store.root)}
    with pytest.raises(CheckpointError, match=r"step_10 exists already"):
        store.begin(10, ["model", "trainer"])
    assert {path: path.read_bytes() for path in files_of(store.root)} == before


@pytest.mark.parametrize("leftover", ["trainer/old.safetensors", "old.txt", ".trainer7.part.json", ".x.tmp"])
def test_what_an_unfinished_save_left_does_not_get_into_the_step(tmp_path: Path, leftover: str):
    """The save of the same step that comes next, perhaps of fewer parts, is good."""
    store = CheckpointStore(tmp_path)
    store.begin(3, ["model", "trainer"])
    (store.folder(3) / leftover).write_bytes(b"left over")
    store.begin(3, ["model"])
    store.write_part(3, "files", {"model/a": b"x"}, "run:2")
    store.commit(3, dict.fromkeys(["files"], "run:2"), timeout=0.0, about=ABOUT)
    assert list(verify(store.folder(3)).files) == ["model/a"]


def test_two_parts_begin_without_harm_to_each_other(tmp_path: Path):
    """Trainer and orchestrator come in any order; each begins its own folders only."""
    store = CheckpointStore(tmp_path)
    store.begin(3, ["orchestrator"])
    store.write_part(3, "orchestrator", {"orchestrator/state.json": b"{}"}, "run:1")
    store.begin(3, ["model"])
    store.write_part(3, "trainer0", {"model/a": b"x"}, "session")
    store.commit(3, {"trainer0": "session", "orchestrator": "run:1"}, timeout=0.0, about=ABOUT)
    assert sorted(verify(store.folder(3)).files) == ["model/a", "orchestrator/state.json"]


def test_steps_beyond_are_set_aside(store: CheckpointStore):
    """Whole ones stay as they are, under abandoned/, where no reader looks; debris is not kept."""
    save(store, 12)
    store.folder(11).mkdir()
    before = {path.relative_to(store.root): path.read_bytes() for path in files_of(store.root)}
    aside = store.set_aside_after(9, "before_attempt_2")
    assert aside == store.root / "abandoned" / "before_attempt_2"
    assert (store.steps(), store.latest(), store.debris()) == ([9], 9, [])
    assert sorted(os.listdir(aside)) == ["step_10", "step_12"]
    for step in (10, 12):
        assert verify(aside / f"step_{step}").step == step
    for name, content in before.items():
        now = store.root / name if name.parts[0] == "step_9" else aside / name
        assert now.read_bytes() == content
    assert store.set_aside_after(9, "before_attempt_3") is None
    save(store, 10)
    assert store.set_aside_after(9, "before_attempt_3") == store.root / "abandoned" / "before_attempt_3"
    verify(aside / "step_10")


def test_a_deleted_step_is_gone(store: CheckpointStore):
    """And the others are as they were."""
    store.delete(9)
    assert (store.steps(), store.debris()) == ([10], [])
    assert not store.folder(9).exists()
    verify(store.folder(10))


# Damage


def test_a_copy_that_went_wrong_is_not_adopted(store: CheckpointStore, tmp_path: Path):
    """Nothing of it is left, and the same step can be adopted afterwards."""
    step = store.folder(store.steps()[0])
    wanted = manifest.load_manifest(step)
    other = CheckpointStore(tmp_path / "other")

    def copy_wrongly(source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        if target.suffix == ".safetensors":
            flip(target, -3 % target.stat().st_size)

    with pytest.raises(Damaged, match="changed between bytes"):
        other.adopt(step, wanted, copy_wrongly)
    assert list(other.root.iterdir()) == []
    assert verify(other.adopt(step, wanted)) == wanted


def is_tensor_file(name: str) -> bool:
    return name.endswith(".safetensors")


SMALL_CHUNK = BLOCK_BYTES
"""The smallest that the reader allows."""


@pytest.fixture
def many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    """A store with step 10, whose optimiser's file has a checksum for each of six small chunks."""
    for module in (checksums, manifest, reader):
        monkeypatch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK)
    monkeypatch.setitem(SIZES, "trainer/optimizer", (130, 70, int(5.5 * SMALL_CHUNK) // 4))
    store = CheckpointStore(tmp_path / "many_chunks")
    save(store, 10)
    return store


def offsets_in(size: int, chance: random.Random) -> list[int]:
    """First and last byte, the header's length and text, the seams of chunks, and some at random."""
    fixed = {0, 7, 8, 30, 4095, 4096, size // 2, size - 1}
    fixed |= {seam + n for seam in range(SMALL_CHUNK, size, SMALL_CHUNK) for n in (-1, 0)}
    return sorted({n for n in fixed if 0 <= n < size} | {chance.randrange(size) for _ in range(4)})


def test_a_flipped_byte_behind_the_first_chunk_is_found(store: CheckpointStore):
    """With chunks as they are in real checkpoints."""
    path = store.folder(10) / "trainer" / "optimizer.safetensors"
    size = path.stat().st_size
    for offset in (CHUNK_BYTES, size - 1):
        flip(path, offset)
        for check in (verify, load):
            with pytest.raises(Damaged, match=f"changed between bytes {CHUNK_BYTES} and {size}"):
                check(store.folder(10))
        flip(path, offset)


def test_every_flipped_byte_is_found_and_named(many_chunks: CheckpointStore):
    """In any file of the step, with its place, by verify and, in tensor files, by loading."""
    folder = many_chunks.folder(10)
    assert max(len(entry.crc64nvme) for entry in verify(folder).files.values()) == 6
    chance = random.Random(7)
    tried = 0
    for path in files_of(folder):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        if name == "manifest.json" or not size:
            continue
        for offset in offsets_in(size, chance):
            mask = 1 << chance.randrange(8)
            flip(path, offset, mask)
            begin = offset // SMALL_CHUNK * SMALL_CHUNK
            place = f"{path}: changed between bytes {begin} and {min(begin + SMALL_CHUNK, size)}"
            with pytest.raises(Damaged, match=re.escape(place)):
                verify(folder)
            verify(folder, content=False)  # what `verify = "off"` does not see
            if is_tensor_file(name):
                with pytest.raises(CheckpointError, match=re.escape(str(folder))):
                    load(folder)
            flip(path, offset, mask)
            tried += 1
    assert tried > 60
    verify(folder)
    load(folder)


def test_a_changed_manifest_does_not_pass(store: CheckpointStore):
    """Of its checksums, sizes, names and structure no byte can change unseen."""
    path = store.folder(10) / "manifest.json"
    text = path.read_bytes()
    start = text.index(b'"chunk_bytes"')
    chance = random.Random(8)
    for offset in [*range(start, start + 40), *(chance.randrange(start, len(text)) for _ in range(200))]:
        if text[offset : offset + 1].isspace():
            continue
        flip(path, offset, 1 << chance.randrange(8))
        with pytest.raises(CheckpointError, match="step_10"):
            verify(store.folder(10))
        path.write_bytes(text)
    verify(store.folder(10))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\0")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, extend, empty, Path.unlink, make_folder, dangle])
def test_every_cut_or_missing_file_is_found_and_named(
    store: CheckpointStore, original: Path, damage: Callable[[Path], None]
):
    """Whatever its kind, also where only sizes are checked; in tensor files also by loading."""
    good = store.folder(9)
    for path in files_of(store.folder(10)):
        folder = store.folder(10)
        name = path.relative_to(folder).as_posix()
        if name == "manifest.json" or (not path.stat().st_size and damage in (truncate, empty)):
            continue
        damage(path)
        for content in (True, False):
            with pytest.raises(Damaged, match=re.escape(f"{path}: ")):
                verify(folder, content=content)
        if is_tensor_file(name):
            with pytest.raises(CheckpointError, match=re.escape(str(folder))):
                load(folder)
        found, (problem,) = store.newest_good(content=False)
        assert (found, str(path) in problem) == (good, True)
        shutil.rmtree(folder)
        shutil.copytree(original / "step_10", folder)


@pytest.mark.parametrize("name", ["extra", "model/extra.safetensors", ".hidden", "new/deep/extra"])
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a folder"])
def test_a_file_too_many_is_found_and_named(store: CheckpointStore, name: str, kind: str):
    """A hidden one, too, and a link to something outside."""
    path = store.folder(10) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_bytes(b"")
    else:
        path.symlink_to(store.root.parent if kind == "link to a folder" else Path(__file__))
    for content in (True, False):
        with pytest.raises(Damaged, match=re.escape(f"{path}: does not belong")):
            verify(store.folder(10), content=content)


def test_swapped_files_are_found(store: CheckpointStore):
    """Two files of equal size that changed places, within a step and between steps."""
    a, b = (store.folder(step) / "model" for step in (9, 10))
    sizes: dict[int, list[Path]] = {}
    for path in files_of(b):
        if is_tensor_file(path.name):
            sizes.setdefault(path.stat().st_size, []).append(path)
    first, second = next(paths for paths in sizes.values() if len(paths) > 1)[:2]
    for x, y, named in ((first, second, first), (a / first.name, first, first)):
        swap(x, y)
        with pytest.raises(Damaged, match=re.escape(f"{named}: changed")):
            verify(store.folder(10))
        with pytest.raises(CheckpointError, match="step_10"):
            load(store.folder(10))
        swap(x, y)
    verify(store.folder(10))


def swap(x: Path, y: Path) -> None:
    x.rename(x.with_suffix(".tmp"))
    y.rename(x)
    x.with_suffix(".tmp").rename(y)


def test_damaged_steps_are_passed_over(store: CheckpointStore):
    """The newest good one is taken, and what is wrong with each newer one is said; damage is not deleted."""
    save(store, 12)
    flip(store.folder(12) / "trainer" / "state.json", 3)
    truncate(store.folder(10) / "model" / "config.json")
    found, problems = store.newest_good()
    assert found == store.folder(9)
    assert [str(store.folder(step)) in problem for step, problem in zip((12, 10), problems, strict=True)] == [
        True,
        True,
    ]
    assert store.newest_good(content=False)[0] == store.folder(12), "sizes alone do not tell"
    flip(store.folder(9) / "model" / "config.json", 0)
    found, problems = store.newest_good()
    assert (found, len(problems)) == (None, 3)
    assert store.steps() == [9, 10, 12]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_manifest_with_too_few_checksums_is_refused_by_loading(store: CheckpointStore, count: int):
    """A checksum that is not there can't be compared; that is no good reason to take the file."""
    path = store.folder(10) / "manifest.json"
    content = json.loads(path.read_text())
    content["files"]["trainer/optimizer.safetensors"]["crc64nvme"] = ["0" * 16] * count
    path.write_text(json.dumps(content))
    with pytest.raises(Damaged, match=r"trainer/optimizer\.safetensors"):
        load(store.folder(10))


def test_tensors_that_nobody_asked_for_are_an_error(store: CheckpointStore):
    """A checkpoint with a tensor more than the run has, or of another shape, is not loaded in part."""
    wanted = {stem: {n: torch.zeros_like(t) for n, t in ts.items()} for stem, ts in tensors(0).items()}
    fewer = {stem: dict(list(named.items())[1:]) for stem, named in wanted.items()}
    with pytest.raises(CheckpointError, match="does not have"):
        load_step(store.folder(10), fewer)
    with pytest.raises(CheckpointError, match=r"no tensor 'more'"):
        load_step(
            store.folder(10), {**wanted, "model/model": {**wanted["model/model"], "more": torch.zeros(1)}}
        )
    with pytest.raises(CheckpointError, match=r"t0 has shape \[130\], expected \[131\]"):
        load_step(
            store.folder(10), {**wanted, "model/model": {**wanted["model/model"], "t0": torch.zeros(131)}}
        )


@pytest.mark.slow
def test_the_command_finds_damage(store: CheckpointStore):
    """`ckpt verify` ends with 1 and names the file if a step is damaged, else with 0."""
    assert ckpt("verify", store.root)[0] == 0
    path = store.folder(9) / "model" / "config.json"
    flip(path, 0)
    for target in (store.root, store.root.parent, store.folder(9)):
        code, output = ckpt("verify", target)
        assert code == 1
        assert str(path) in output.replace("\n", "")
        code, output = ckpt("verify", target, "--json")
        assert code == 1
        assert [entry["ok"] for entry in json.loads(output)] == (
            [False, True] if target != path.parents[1] else [False]
        )
    assert ckpt("verify", store.folder(10))[0] == 0


def ckpt(*arguments: object) -> tuple[int, str]:
    """The command as a process of its own."""
    code = "import sys; from cairn.launch.main import ckpt; sys.exit(ckpt())"
    result = run_python("-c", code, *arguments)
    return result.returncode, result.stdout
