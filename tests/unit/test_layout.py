"""Where tensors lie in files: the same on any number of ranks, and readable by everybody's libraries."""

import json
import re
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fake_ranks import FakeRank, as_rank, rows_of
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import AutoModelForCausalLM

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.tensors.layout import (
    ALIGNMENT,
    DIRECT_BYTES,
    ITEM_BYTES,
    TensorSpec,
    find_tensors,
    plan,
    plan_rank,
    read_header,
)
from cairn.checkpoint.tensors.reader import DTYPE_NAMES
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """All that tells tensors apart."""
    return {
        name: (t.dtype, tuple(t.shape), t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bytes at all as a tensor (of zeros and ones if it is boolean)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
MIXED = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NAMES, key=str)), SHAPES), max_size=8)


def named(kinds: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.ä": random_tensor(dtype, shape, i) for i, (dtype, shape) in enumerate(kinds)}


# The format


@settings(max_examples=40, deadline=None)
@given(MIXED)
def test_files_are_what_the_safetensors_library_reads_and_writes(tmp_path_factory, kinds):
    """Any mix of data types and shapes, with scalars and empty tensors; the same values as in its own."""
    folder = tmp_path_factory.mktemp("files")
    tensors = named(kinds)
    write_tensors(folder, tensors, "model")
    content = (folder / "model.safetensors").read_bytes()
    reference = safetensors.torch.load(safetensors.torch.save(tensors))
    for loaded in (
        safetensors.torch.load(content),
        safetensors.torch.load_file(folder / "model.safetensors"),
    ):
        assert bits(loaded) == bits(reference) == bits(tensors)
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    assert header["__metadata__"] == {"format": "pt"}, "transformers refuses files without it"


@given(MIXED, st.integers(1, 400))
def test_files_are_bounded_and_start_on_a_page(kinds, limit):
    """Tensor data starts on a page; a file is over the limit only where a single tensor is."""
    specs = [TensorSpec(str(i), DTYPE_NAMES[dtype], shape) for i, (dtype, shape) in enumerate(kinds)]
    files, index = plan(specs, "model", max_file_bytes=limit)
    assert [name for file in files for name in file.offsets] == [spec.name for spec in specs]
    sizes = {spec.name: spec.nbytes for spec in specs}
    for file in files:
        length = struct.unpack("<Q", file.header[:8])[0]
        assert len(file.header) == 8 + length
        assert len(file.header) % ALIGNMENT == 0
        text = file.header[8:]
        assert text == text.rstrip(b" ").ljust(length)
        assert file.size == len(file.header) + sum(sizes[name] for name in file.offsets)
        held = [sizes[name] for name in file.offsets]
        assert sum(held) <= limit or sum(size > 0 for size in held) == 1
    if index is None:
        assert [file.name for file in files] == ["model.safetensors"]
        return
    count = len(files)
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    content = json.loads(index)
    assert content["metadata"]["total_size"] == sum(sizes.values())
    assert content["weight_map"] == {name: file.name for file in files for name in file.offsets}


def test_transformers_reads_a_split_model(tmp_path: Path):
    """A directory of many files with an index is a Hugging Face model, and one whole file is, too."""
    model = make_model("llama")
    for limit, count in ((2000, None), (1 << 30, 1)):
        folder = tmp_path / str(limit)
        folder.mkdir()
        model.config.save_pretrained(folder)
        write_tensors(folder, model.state_dict(), "model", max_file_bytes=limit)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) == count if count else len(files) > 5
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert bits(loaded.state_dict()) == bits(model.state_dict())
        assert {name: t.spec.shape for name, t in find_tensors(folder, "model").items()} == {
            name: tuple(t.shape) for name, t in model.state_dict().items()
        }


# Ranks

LAID_OUT = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)),
    min_size=1,
    max_size=12,
)
LARGE = st.tuples(st.just("F32"), st.tuples(st.integers(1, 9), st.sampled_from([1, 7001, 40_000, 65_536])))


def held_by(rank: int, world_size: int, specs: list[TensorSpec]) -> dict[str, list[tuple[int, int]]]:
    """What a rank holds: shards on dimension 0, and on rank 0 what can't be cut."""
    held = {}
    for spec in specs:
        if not spec.shape:
            if rank == 0:
                held[spec.name] = [(0, spec.nbytes)]
            continue
        begin, end = rows_of(rank, world_size, spec.shape[0])
        row = spec.nbytes // spec.shape[0] if spec.shape[0] else 0
        if end > begin:
            held[spec.name] = [(begin * row, (end - begin) * row)]
    return held


@given(st.integers(1, 9), st.integers(0, 9))
def test_rows_are_cut_as_torch_cuts_them(world_size, count):
    """What the tests below stand on."""
    chunks = torch.arange(count).chunk(world_size) if count else []
    for rank in range(world_size):
        begin, end = rows_of(rank, world_size, count)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(begin, end)) == expected


@settings(deadline=None)
@given(
    st.lists(st.one_of(LAID_OUT.map(lambda kinds: kinds[0]), LARGE), min_size=1, max_size=12),
    st.integers(1, 9),
    st.sampled_from([300, 1 << 20, 1 << 40]),
)
def test_ranks_write_every_byte_once(kinds, world_size, limit):
    """The extents of all ranks cover each file from its first byte to its last, without an overlap."""
    specs = [TensorSpec(str(i), dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    files, _ = plan(specs, "model", max_file_bytes=limit)
    written: list[list[tuple[int, int]]] = [[] for _ in files]
    for rank in range(world_size):
        held = held_by(rank, world_size, specs)
        own = plan_rank(files, held, with_headers=rank == 0)
        used = 0
        for extent in own.extents:
            assert extent.nbytes > 0
            assert extent.arena >= used, "the arena's order is that of writing, and nothing overlaps"
            used = extent.arena + extent.nbytes
            if extent.nbytes >= DIRECT_BYTES:
                assert extent.arena % ALIGNMENT == extent.offset % ALIGNMENT
            written[extent.file].append((extent.offset, extent.offset + extent.nbytes))
        assert used <= own.arena_bytes <= used + 2 * ALIGNMENT * len(own.extents) + 1
        assert own.extents == sorted(own.extents, key=lambda e: (e.file, e.offset))
        # A tensor's bytes come from where the plan says that they are in the arena.
        for number, file in enumerate(files):
            places = [
                *((file.offsets[name] + first, start) for name in file.offsets.keys() & own.starts.keys()
                  for (first, _), start in zip(held[name], own.starts[name], strict=True)),
                *((0, position) for position, which in own.headers if which == number),
            ]  # fmt: skip
            for offset, position in places:
                extents = [e for e in own.extents if e.file == number and e.arena <= position]
                assert position - extents[-1].arena == offset - extents[-1].offset
        assert len(own.headers) == (len(files) if rank == 0 else 0)
    for number, file in enumerate(files):
        position = 0
        for begin, end in sorted(written[number]):
            assert begin == position
            position = end
        assert position == file.size


@settings(max_examples=15, deadline=None)
@given(MIXED, st.sampled_from([(8, 3), (3, 8), (1, 8), (8, 1), (5, 2)]), st.sampled_from([100, 1 << 30]))
def test_a_model_of_some_ranks_is_read_by_others(tmp_path_factory, kinds, ranks, limit):
    """Written by 8 and read by 3, and so on: files as of one rank, and each byte read and checked once."""
    writers, readers = ranks
    folder, alone = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("alone")
    tensors = named(kinds)
    write_tensors(alone, tensors, "model", max_file_bytes=limit)
    for rank in range(writers):
        with FakeRank(rank, writers) as mesh:
            write_tensors(folder, as_rank(tensors, mesh), "model", rank=rank, max_file_bytes=limit)
    names = sorted(path.name for path in alone.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        assert (folder / name).read_bytes() == (alone / name).read_bytes()

    seen: dict[str, FileChecksum] = {}
    for rank in range(readers):
        with FakeRank(rank, readers) as mesh:
            expected = as_rank(tensors, mesh)
            targets = {name: torch.zeros_like(t) for name, t in expected.items()}
            for path, checksum in read_tensors(folder, targets, "model", rank=rank).items():
                seen.setdefault(path.name, FileChecksum(checksum.size)).merge(checksum)
            for name, target in targets.items():
                ours, theirs = (
                    t.to_local() if isinstance(t, DTensor) else t for t in (target, expected[name])
                )
                assert bits({name: ours}) == bits({name: theirs})
    for name, checksum in seen.items():
        whole = FileChecksum(checksum.size)
        whole.add(0, (folder / name).read_bytes())
        assert (checksum.nbytes, checksum.chunks()) == (whole.nbytes, whole.chunks())


def test_what_every_rank_has_is_written_once(tmp_path: Path):
    """Of a replicated DTensor one rank writes each piece, and all read it; unknown placements are refused."""
    whole = torch.arange(12.0).view(4, 3)
    for rank in range(3):
        with FakeRank(rank, 3) as mesh:
            tensor = DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
            write_tensors(tmp_path, {"a": tensor}, "model", rank=rank)
    counted = 0
    for rank in range(3):
        with FakeRank(rank, 3) as mesh:
            target = DTensor.from_local(torch.zeros(4, 3), mesh, [Replicate()], run_check=False)
            (seen,) = read_tensors(tmp_path, {"a": target}, "model", rank=rank).values()
            assert torch.equal(target.to_local(), whole)
            counted += seen.nbytes
            partial = DTensor.from_local(whole.clone(), mesh, [Partial()], run_check=False)
            with pytest.raises(NotImplementedError, match="only Shard and Replicate"):
                write_tensors(tmp_path, {"a": partial}, "other", rank=rank)
    assert counted == seen.size


def test_values_are_converted_to_the_type_of_the_target(tmp_path: Path):
    """bfloat16 on disk fills float32 weights and the other way round, also where memory is not contiguous."""
    values = torch.randn(6, 4).bfloat16()
    write_tensors(tmp_path, {"a": values}, "model")
    wide, across = torch.zeros(6, 4), torch.zeros(4, 6).t()
    read_tensors(tmp_path, {"a": wide}, "model")
    read_tensors(tmp_path, {"a": across}, "model")
    assert torch.equal(wide, values.float())
    assert torch.equal(across, values.float())


@pytest.mark.parametrize("name", ["missing", "shape"])
def test_other_tensors_than_expected_are_named(tmp_path: Path, name: str):
    """A tensor that is missing, or has another shape, is an error that names it and the folder."""
    write_tensors(tmp_path, {"shape": torch.zeros(2, 3)}, "model")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(tmp_path))}.*{name}"):
        read_tensors(tmp_path, {name: torch.zeros(3, 2)}, "model")


# Headers that somebody has tampered with


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DEEP = "[" * 200_000
HOSTILE = {
    "not an object": "[]",
    "a string": '"x"',
    "a number": "5",
    "no JSON": "{",
    "nothing": "",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "deep": DEEP,
    "an entry that is a list": {"a": []},
    "an entry that is nothing": {"a": None},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "one offset": {"a": entry(offsets=[0])},
    "three offsets": {"a": entry(offsets=[0, 8, 16])},
    "offsets beyond the end": {"a": entry(offsets=[8, 16 + 8], shape=[4])},
    "offsets far beyond the end": {"a": entry(shape=[1 << 60], offsets=[0, 1 << 62])},
    "an offset before the start": {"a": entry(offsets=[-8, 0])},
    "offsets the wrong way round": {"a": entry(shape=[-2], offsets=[8, 0])},
    "offsets with a fraction": {"a": entry(shape=[2], offsets=[0.0, 8.0])},
    "offsets that are text": {"a": entry(offsets=["0", "8"])},
    "offsets that are null": {"a": entry(offsets=[None, None])},
    "offsets that are truths": {"a": entry("I8", [1], [False, True])},
    "a shape of another size": {"a": entry(shape=[3])},
    "a shape below zero": {"a": entry(shape=[-1, -2])},
    "a shape with a fraction": {"a": entry(shape=[2.0])},
    "a shape that is text": {"a": entry(shape="22")},
    "a shape that is a number": {"a": entry(shape=2)},
    "a shape that is infinite": '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}',
    "an unknown data type": {"a": entry("F6")},
    "a data type that is a list": {"a": entry(["F32"])},
    "overlapping tensors": {"a": entry(), "b": entry(offsets=[4, 12]), "c": entry("F16", offsets=[12, 16])},
    "a tensor inside another": {"a": entry(shape=[4], offsets=[0, 16]), "b": entry(offsets=[4, 12])},
    "a gap between tensors": {"a": entry(), "b": entry(shape=[1], offsets=[12, 16])},
    "bytes behind the last tensor": {"a": entry()},
    "a name that stands twice": (
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        ' "a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}'
    ),
}  # fmt: skip


def file_with(path: Path, header: object, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes | str) else json.dumps(header)
    text = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, header: object):
    """Whatever a header says, it is taken or refused with an error that names the file; never another error.

    All of these the safetensors library refuses, too.
    """
    path = file_with(tmp_path / "model.safetensors", header)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(path.read_bytes())
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        read_header(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_tensors(tmp_path, {"a": torch.zeros(2)}, "model")


@pytest.mark.parametrize("length", [17, 1 << 20, 99_999_999, 100_000_001, (1 << 63) - 1, (1 << 64) - 1])
def test_header_lengths_beyond_the_file_are_refused(tmp_path: Path, length: int):
    """And nothing of that size is allocated."""
    path = file_with(tmp_path / "model.safetensors", b"{}", bytes(8), length)
    with pytest.raises(Damaged, match=r"model\.safetensors.*header"):
        read_header(path)


@pytest.mark.parametrize("size", range(10))
def test_stumps_of_files_are_refused(tmp_path: Path, size: int):
    """Files that were cut short within the header."""
    whole = file_with(tmp_path / "whole", {"a": entry(shape=[4], offsets=[0, 16])}).read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole[:size])
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        read_header(path)


def test_a_data_type_that_torch_has_not_is_refused_with_its_name(tmp_path: Path):
    """The layout knows more types than tensors are read in; to read such a tensor is a clear error."""
    file_with(tmp_path / "model.safetensors", {"a": entry("F8_E4M3", [16], [0, 16])})
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        read_tensors(tmp_path, {"a": torch.zeros(16)}, "model")


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "5",
        "{}",
        DEEP,
        b"\xff",
        '{"weight_map": []}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": ["x"]}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/hostname"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "."}}',
        '{"weight_map": {"a": "x\\u0000y"}}',
        '{"weight_map": {"a": "absent.safetensors"}}',
        '{"weight_map": {}}',
    ],
    ids=lambda index: repr(index[:40]),
)
def test_hostile_indexes_are_refused(tmp_path: Path, index: str | bytes):
    """An index that is none, or points out of its folder or to nothing, is an error that names the folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    file_with(tmp_path / "model.safetensors", {"a": entry(shape=[4], offsets=[0, 16])})
    content = index if isinstance(index, bytes) else index.encode()
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        read_tensors(folder, {"a": torch.zeros(4)}, "model")
