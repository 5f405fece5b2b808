"""What each rank of any mesh holds of a tensor: every value written once, and each rank reads its own."""

import itertools
import math
from pathlib import Path

import draws
import pytest
import torch
from fake_ranks import COLUMNS, COPIES, PLACED, ROWS, FakeRank, local_of, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.tensors import placement as shares
from cairn.checkpoint.tensors.placement import Section, Stored, ranges_of, share_of
from cairn.checkpoint.tensors.rows import RowTargets, in_rows
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors


@st.composite
def placed(draw: st.DrawFn):
    """Any tensor on any mesh of up to three dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.tuples(dims, st.integers(1, 3)).map(lambda d: _StridedShard(d[0], split_factor=d[1])),
    )
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


@settings(deadline=None)
@given(placed())
def test_ranges_are_what_torch_gives_to_each_rank(case):
    """In ascending order; over the ranks that own them every value is there once."""
    shape, mesh, placements = case
    whole = torch.arange(math.prod(shape)).view(shape)
    owned: list[int] = []
    for at in itertools.product(*map(range, mesh)):
        expected = local_of(whole, placements, mesh, at).flatten().tolist()
        ranges = ranges_of(shape, placements, mesh, at)
        assert all(count > 0 for _, count in ranges)
        found = [item for first, count in ranges for item in range(first, first + count)]
        assert found == expected == sorted(expected)
        if not any(n for n, placement in zip(at, placements, strict=True) if placement.is_replicate()):
            owned += found
    assert sorted(owned) == list(range(math.prod(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1 << 20, 64])
@pytest.mark.parametrize("source", draws.cases(list(PLACED), "shares", 4))
def test_any_mesh_reads_what_any_mesh_wrote(
    tmp_path: Path, source: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """The file's bytes are those of one process alone; each byte is read and counted once."""
    monkeypatch.setattr(shares, "PIECE_BYTES", piece_bytes)
    alone, folder = tmp_path / "alone", tmp_path / "ranks"
    alone.mkdir(), folder.mkdir()
    with FakeRank(0, 1) as mesh:
        write_tensors(alone, tensors_of(mesh, (COPIES,), blank=False), "model")
    shape, placements = PLACED[source]
    for rank in range(math.prod(shape)):
        with FakeRank(rank, *shape) as mesh:
            write_tensors(folder, tensors_of(mesh, placements, blank=False), "model", rank=rank)
    assert (folder / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    whole = FileChecksum((alone / "model.safetensors").stat().st_size)
    whole.add(0, (alone / "model.safetensors").read_bytes())
    for shape, placements in PLACED.values():
        seen = FileChecksum(whole.size)
        for rank in range(math.prod(shape)):
            with FakeRank(rank, *shape) as mesh:
                targets = tensors_of(mesh, placements, blank=True)
                (checksum,) = read_tensors(folder, targets, "model", rank=rank).values()
                seen.merge(checksum)
                for name, expected in tensors_of(mesh, placements, blank=False).items():
                    read, wanted = (share_of(name, t, rank).local for t in (targets[name], expected))
                    assert torch.equal(read, wanted), name
        assert (seen.nbytes, seen.chunks()) == (whole.nbytes, whole.chunks())


def test_copies_of_a_shard_are_written_in_equal_parts():
    """By HSDP's replicas, which hold the same shards."""
    rows, columns = 1024, 3 << 10  # shards of 6 MiB
    written: dict[tuple[int, int], int] = {}
    for rank in range(4):
        with FakeRank(rank, 2, 2) as mesh:
            local = torch.zeros(rows // 2, columns)
            tensor = DTensor.from_local(local, mesh, (COPIES, ROWS), run_check=False)
            share = share_of("a", tensor, rank)
            (part,) = share.owned().ranges
            assert share.owned().local.numel() == part[1] == local.numel() // 2
            written[part] = rank
    assert sorted(written) == [(n * rows * columns // 4, rows * columns // 4) for n in range(4)]


def test_slices_of_a_mesh_hold_copies():
    """Of a tensor on one dimension of a mesh the first slice's ranks write."""
    whole = torch.arange(12.0).view(4, 3)
    owners = []
    for rank in range(6):
        with FakeRank(rank, 3, 2) as mesh:
            slices = mesh["b"]
            local = local_of(whole, (ROWS,), (2,), (slices.get_local_rank(),))
            tensor = DTensor.from_local(local, slices, (ROWS,), run_check=False)
            share = share_of("a", tensor, rank)
            assert share.ranges == ((6 * (rank % 2), 6),)
            owners += [rank] if share.owned().ranges else []
    assert owners == [0, 1]


@pytest.mark.parametrize(
    ("shape", "sharding", "exchanged"),
    [
        ((2000, 12), COLUMNS, True),
        ((2000, 12), ROWS, False),
        ((2000, 12), COPIES, False),
        ((1000, 12), COLUMNS, False),
        ((2000, 9000), COLUMNS, False),
        ((40, 50, 6), Shard(2), True),
    ],
)
def test_only_many_short_ranges_are_exchanged_for_rows(
    shape: tuple[int, ...], sharding: Placement, exchanged
):
    """The same on every rank, for the tensor itself as for sections of it, which stay sections of one."""
    for rank in range(2):
        with FakeRank(rank, 2) as mesh:
            local = local_of(torch.empty(shape, device="meta"), (sharding,), (2,), (rank,))
            tensor = DTensor.from_local(
                torch.zeros(local.shape), mesh, (sharding,), run_check=False, shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )  # fmt: skip
            sections: dict[str, Stored] = {
                name: Section(tensor, 12 * i, (12,)) for i, name in enumerate("ab")
            }
            for found in (
                in_rows({"whole": tensor, **sections}),
                RowTargets({"whole": tensor, **sections}).tensors,
            ):
                whole, a, b = found.values()
                assert (whole is not tensor) == exchanged
                assert whole.placements == ((ROWS,) if exchanged else (sharding,))
                assert a.tensor is b.tensor is whole
                assert len(share_of("whole", whole, rank).ranges) <= max(shape[0], 1)
