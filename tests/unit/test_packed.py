"""Packed files: what is compressed comes back, whatever a table says, and steps of both formats are read."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from runs import ABOUT, flip

from cairn.api.reading import load_checkpoint
from cairn.checkpoint.fork import fork
from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest, load_manifest
from cairn.checkpoint.saving.arena import LEAST_BYTES, SaveFailed
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import OPTIMIZER, StepFolder, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.compression import BLOCK_BYTES, Block, pack, pack_blocks, packed_files
from cairn.checkpoint.tensors.sharded_files import load_step, read_tensor
from cairn.run import faults

LONG = 3_000_001
FILES = {"model/config.json": b"{}\n"}
Tensors = dict[str, dict[str, torch.Tensor]]


def state(seed: int = 0, length: int = LONG) -> Tensors:
    """Tensors that shrink, one that does not, one of a value, none, and other sizes of values."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(1 << 31), 1 << 31, (length,), generator=generator, dtype=torch.int64)
    return {
        "model/model": {"w": torch.randn(100, generator=generator)},
        "trainer/optimizer": {
            "w.exp_avg": torch.randn(length, generator=generator) * 1e-3,
            "w.exp_avg_sq": torch.zeros(length),
            "noise": noise.to(torch.int32).view(torch.float32),
            "w.step": torch.tensor(7.0),
            "half": torch.randn(10_001, generator=generator).bfloat16(),
            "empty": torch.zeros(0, 4),
        },
    }


def equal(a: Tensors, b: Tensors) -> bool:
    def bits(tensors: Tensors) -> list[bytes]:
        return [
            t.reshape(-1).view(torch.uint8).numpy().tobytes() for n in tensors.values() for t in n.values()
        ]

    return bits(a) == bits(b)


def blank(tensors: Tensors) -> Tensors:
    return {stem: {name: torch.zeros_like(t) for name, t in n.items()} for stem, n in tensors.items()}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def saver_of(store: CheckpointStore, **how: object) -> Saver:
    options = SaveOptions(**{"part_timeout": 60.0, "packed": ("trainer",), **how})
    return Saver(store, SavingRank(0, 1, "run:1"), how=options)


@pytest.fixture
def make_saver(store: CheckpointStore) -> Iterator[Callable[..., Saver]]:
    made: list[Saver] = []

    def make(**how: object) -> Saver:
        made.append(saver_of(store, **how))
        return made[-1]

    yield make
    for saver in made:
        saver.close()


def save(saver: Saver, step: int, tensors: Tensors) -> Manifest:
    saver.save(step, tensors, FILES, ABOUT)
    saver.finish()
    return verify(saver.store.folder(step))


@given(data=st.binary(max_size=200), width=st.integers(1, 16), repeats=st.integers(1, 50))
def test_a_block_comes_back(tmp_path_factory, data: bytes, width: int, repeats: int):
    """Any bytes, any size of values, also where no whole number of values fits."""
    data = data * repeats
    packed, used = pack(data, width)
    assert len(packed) <= len(data)
    assert used == (width if len(packed) < len(data) else 0)
    if not data:
        return
    path = tmp_path_factory.getbasetemp() / "block"
    path.write_bytes(b"before" + packed)
    assert bytes(Block(0, len(data), path, 6, len(packed), used).read()) == data


def test_noise_is_stored_as_it_is():
    noise = os.urandom(100_000)
    assert pack(noise, 4) == (noise, 0)


@given(offset=st.integers(0, 3 * BLOCK_BYTES), nbytes=st.integers(1, 3 * BLOCK_BYTES))
def test_blocks_cover_a_range_and_never_span_a_boundary(offset: int, nbytes: int):
    blocks = pack_blocks(offset, nbytes)
    assert [first for first, _ in blocks] == [offset, *(a + n for a, n in blocks[:-1])]
    assert sum(n for _, n in blocks) == nbytes
    assert all(n > 0 and a // BLOCK_BYTES == (a + n - 1) // BLOCK_BYTES for a, n in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("read_back", [False, True])
def test_a_packed_save_comes_back_bit_by_bit(make_saver, store, read_back: bool):
    """By loading, by the Python API and tensor by tensor; the model's files are as ever."""
    tensors = state()
    manifest = save(make_saver(read_back=read_back), 3, tensors)
    assert manifest.format == 2
    assert manifest.files.keys() == {
        "model/config.json",
        "model/model.safetensors",
        "trainer/packed-0.bin",
        "trainer/packed-0.json",
    }
    assert manifest.contents.keys() == {"trainer/optimizer.safetensors"}
    # One of three tensors is noise, and the zeros take nothing.
    assert (
        manifest.files["trainer/packed-0.bin"].size
        < 0.65 * manifest.contents[f"{OPTIMIZER}.safetensors"].size
    )
    loaded = blank(tensors)
    assert load_step(store.folder(3), loaded) == manifest
    assert equal(loaded, tensors)
    found = StepFolder(store.folder(3)).tensors(OPTIMIZER)
    assert equal(
        {OPTIMIZER: {n: read_tensor(found[n]) for n in tensors[OPTIMIZER]}}, {OPTIMIZER: tensors[OPTIMIZER]}
    )
    by_api = load_checkpoint(store.folder(3)).optimizer
    assert torch.equal(by_api["w"]["exp_avg"], tensors[OPTIMIZER]["w.exp_avg"])


@pytest.mark.slow
def test_contents_are_those_of_plain_files(make_saver, store):
    """The same checksums, also of several files with an index."""
    packed = save(make_saver(max_file_bytes=LONG), 1, state())
    plain = save(make_saver(max_file_bytes=LONG, packed=()), 2, state())
    assert plain.format == 1
    assert plain.contents == {}
    assert len(packed.contents) > 2
    assert packed.contents == {name: plain.files[name] for name in packed.contents}
    assert "trainer/optimizer.safetensors.index.json" in packed.files
    loaded = blank(state())
    load_step(store.folder(1), loaded)
    assert equal(loaded, state())


@pytest.mark.slow
def test_a_state_that_does_not_fit_into_memory_is_packed_in_pieces(make_saver, store):
    """Of the smallest arena, whose end some blocks lie across; the files are the same."""
    tensors = state(length=8_000_001)
    assert sum(t.nbytes for t in tensors[OPTIMIZER].values()) > LEAST_BYTES
    pieces, whole = make_saver(room=lambda nbytes: 1), make_saver()
    for step, saver in ((1, pieces), (2, pieces), (3, whole)):
        save(saver, step, tensors)
    one, _, three = (load_manifest(store.folder(step)) for step in (1, 2, 3))
    assert one.files == three.files
    loaded = blank(tensors)
    load_step(store.folder(2), loaded)
    assert equal(loaded, tensors)


def test_equal_states_are_packed_into_equal_files(make_saver, store):
    assert save(make_saver(), 1, state()).files == save(make_saver(), 2, state()).files


def test_a_fork_is_packed_too(make_saver, store, tmp_path: Path):
    save(make_saver(), 3, state())
    folder, forked = fork(store.folder(3), tmp_path / "fork")
    assert (forked.format, verify(folder)) == (2, forked)
    loaded = blank(state())
    load_step(folder, loaded)
    assert equal(loaded, state())


@pytest.mark.slow
@pytest.mark.parametrize("point", ["save.write:ENOSPC@2", "save.write:kill@3", "save.before_fsync:EIO"])
def test_a_failed_save_leaves_no_step_and_the_next_is_good(make_saver, store, monkeypatch, point: str):
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", point)
    saver = make_saver()
    with pytest.raises(SaveFailed):
        save(saver, 1, state())
    assert store.steps() == []
    monkeypatch.delenv("CAIRN_FAULT")
    save(saver, 1, state())


# Damage


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """With a step whose optimiser's state is packed. Leave it as it is."""
    store = CheckpointStore(tmp_path_factory.mktemp("packed") / "checkpoints")
    with closing(saver_of(store)) as saver:
        save(saver, 3, state())
    return store


@pytest.fixture
def saved(packed: CheckpointStore, store: CheckpointStore) -> Path:
    """A copy of that step."""
    shutil.copytree(packed.root, store.root)
    return store.folder(3)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
def test_a_byte_that_changed_is_found(saved: Path, place: float):
    """By `verify` and while loading, wherever it lies, and newest_good passes the step over."""
    data = saved / "trainer" / "packed-0.bin"
    flip(data, int(place * data.stat().st_size))
    with pytest.raises(Damaged, match=r"packed-0\.bin: changed between"):
        verify(saved)
    with pytest.raises(Damaged, match=r"packed-0\.bin|optimizer\.safetensors"):
        load_step(saved, blank(state()))
    folder, passed_over = CheckpointStore(saved.parent).newest_good()
    assert folder is None
    assert len(passed_over) == 1


def rewrite(step: Path, change: Callable[[dict, bytearray], None]) -> None:
    """Change table and data of a packed file, and have the manifest agree, as an attacker would."""
    table, data = step / "trainer" / "packed-0.json", step / "trainer" / "packed-0.bin"
    content, stored = json.loads(table.read_text()), bytearray(data.read_bytes())
    change(content["files"], stored)
    manifest = json.loads((step / "manifest.json").read_text())
    for path, written in ((table, json.dumps(content).encode()), (data, bytes(stored))):
        path.write_bytes(written)
        manifest["files"][f"trainer/{path.name}"] = entry_of(written)
    (step / "manifest.json").write_text(json.dumps(manifest))


def entry_of(content: bytes) -> dict:
    from cairn.checkpoint.checksums import CHUNK_BYTES, crc64

    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    return {"size": len(content), "crc64nvme": [f"{crc64(chunk):016x}" for chunk in chunks]}


NAME = "optimizer.safetensors"


def _swap(files: dict, data: bytearray) -> None:
    files[NAME][0][0], files[NAME][1][0] = files[NAME][1][0], files[NAME][0][0]


def _bomb(files: dict, data: bytearray) -> None:
    """A frame that grows to a gigabyte in place of the last block."""
    last = files[NAME][-1]
    del data[last[2] :]
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    files[NAME][-1] = [last[0], last[1], last[2], len(frame), 4]
    data += frame


def _bomb_without_size(files: dict, data: bytearray) -> None:
    last = files[NAME][-1]
    del data[last[2] :]
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 30))
    files[NAME][-1] = [last[0], last[1], last[2], len(frame), 4]
    data += frame


def _trailing(files: dict, data: bytearray) -> None:
    last = files[NAME][-1]
    frame = zstandard.ZstdCompressor().compress(bytes(last[1])) + b"more"
    del data[last[2] :]
    files[NAME][-1] = [last[0], last[1], last[2], len(frame), 4]
    data += frame


HOSTILE: dict[str, Callable[[dict, bytearray], object]] = {
    "a block twice": lambda files, data: files[NAME].append(files[NAME][-1]),
    "a block too few": lambda files, data: files[NAME].pop(),
    "blocks swapped": _swap,
    "a gap in the data": lambda files, data: data.extend(b"x"),
    "another file": lambda files, data: files.__setitem__("other.safetensors", files.pop(NAME)),
    "a file elsewhere": lambda files, data: files.__setitem__("../model.safetensors", files.pop(NAME)),
    "no blocks": lambda files, data: files.__setitem__(NAME, []),
    "a huge block": lambda files, data: files[NAME][0].__setitem__(1, 1 << 40),
    "a block of nothing": lambda files, data: files[NAME][0].__setitem__(1, 0),
    "a place below zero": lambda files, data: files[NAME][0].__setitem__(2, -1),
    "a width of none": lambda files, data: files[NAME][1].__setitem__(4, 0),
    "a huge width": lambda files, data: files[NAME][1].__setitem__(4, 1 << 20),
    "a width that is a truth": lambda files, data: files[NAME][1].__setitem__(4, True),
    "half a block": lambda files, data: files[NAME][0].pop(),
    "a bomb": _bomb,
    "a bomb of unknown size": _bomb_without_size,
    "more behind a frame": _trailing,
    "garbage": lambda files, data: data.__setitem__(slice(0, 8), b"\0" * 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_tables_and_data_are_refused(saved: Path, how: str):
    """With an error that names the file, whatever the manifest says, and no more memory than a block."""
    rewrite(saved, HOSTILE[how])
    with pytest.raises(Damaged, match=r"packed-0|safetensors"):
        load_step(saved, blank(state()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": []}',
        '{"files": {}, "more": 1}',
        '{"files": {"a": 1}}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_what_is_no_table_is_refused(saved: Path, text: str):
    (saved / "trainer" / "packed-0.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=r"packed-0"):
        packed_files(saved / "trainer")


def test_a_missing_data_file_is_named(saved: Path):
    (saved / "trainer" / "packed-0.bin").unlink()
    with pytest.raises(Damaged, match=r"packed-0\.bin"):
        verify(saved)
    with pytest.raises(Damaged, match=r"packed-0\.bin"):
        packed_files(saved / "trainer")


def test_a_file_packed_and_as_it_is_is_refused(saved: Path):
    (saved / "trainer" / NAME).write_bytes(b"")
    with pytest.raises(CheckpointError, match=NAME):
        load_step(saved, blank(state()))


def test_tables_that_the_manifest_does_not_know_are_refused(saved: Path):
    """A step of format 1 with a table in it, which readers of format 1 would not look at."""
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["contents"]
    manifest["format"] = 1
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=NAME):
        load_step(saved, blank(state()))


def test_values_regroup_as_the_format_says():
    """Byte k of every value, for each k: what docs/format.md promises to other implementations."""
    values = np.arange(4096, dtype="<u4")
    packed, width = pack(values.tobytes(), 4)
    assert width == 4
    grouped = zstandard.ZstdDecompressor().decompress(packed)
    assert grouped == values.view(np.uint8).reshape(-1, 4).T.tobytes()
