"""Checkpoints of real ranks: FSDP2 over gloo, one to four processes, saving and loading each other's.

On four the mesh has two dimensions: HSDP, which keeps each shard twice, and FSDP2 over tensor parallelism.

The processes are started once and go through all of it; the tests look at what they left.
"""

import datetime
import functools
import json
import os
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

import draws
import pytest
import torch
import torch.distributed as dist
from fake_ranks import local_of
from runs import ABOUT, flip, start_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest
from cairn.checkpoint.saving.arena import SaveFailed
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.placement import Place, Section, Stored, at_places, local_values
from cairn.checkpoint.tensors.sharded_files import load_step
from cairn.model.hub_layout import tensors_in_memory
from cairn.run import faults

WORLDS = {1: (1, False), 2: (2, False), 3: (3, False), "hsdp": (4, False), "tensor parallel": (4, True)}
"""Ways to lay a model out: how many ranks, and whether some of it is cut by tensor parallelism."""
FILE_BYTES = 2_000_000
CUT = ("experts", "joined")
HALVES = ((0, "gate"), (1, "up"))

Tensors = dict[str, dict[str, Stored]]


class Net(torch.nn.Module):
    """Shards of all kinds: uneven, smaller than the world, empty, large, bf16, frozen, tied; and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.large = torch.nn.Linear(701, 1001)  # 2.8 MB, cut in the middle of pages
        self.uneven = torch.nn.Linear(3, 5)
        self.short = torch.nn.Linear(9, 2)
        self.single = torch.nn.Linear(9, 1, bias=False)
        self.brief = torch.nn.Linear(33, 13, dtype=torch.bfloat16)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.wide = torch.nn.Linear(6, 14)
        self.deep = torch.nn.Linear(14, 6)
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.experts = torch.nn.Parameter(torch.zeros(5, 6, 7))
        self.joined = torch.nn.Parameter(torch.zeros(10, 4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.zeros(3, 2, dtype=torch.float64))


PLACES = {
    **{
        f"experts.{i}.{half}": Place("experts", 42 * i + 21 * h, (3, 7))
        for i in range(5)
        for h, half in HALVES
    },
    "joined.first": Place("joined", 0, (7, 4)),
    "joined.second": Place("joined", 28, (3, 4)),
}
"""Tensors in files that are sections of one in memory; those of `joined` lie on several ranks."""


COLUMNS, ROWS, COPIES = Shard(1), Shard(0), Replicate()
PLACED: dict[str, tuple[tuple[int, ...], list[Placement], list[Placement]]] = {
    "columns": ((9, 700), [COLUMNS], [COPIES, COLUMNS]),
    "blocks": ((13, 7), [ROWS], [ROWS, COLUMNS]),
    "narrow": ((2000, 12), [COLUMNS], [COLUMNS, COLUMNS]),
    "both": ((2, 50, 30), [Shard(2)], [COLUMNS, Shard(2)]),
}
"""Tensors of other placements: shape, and placements on a mesh of one dimension and of two.

Those of `narrow` are so many short ranges that ranks exchange them.
"""


def value_of(kind: str, name: str, like: torch.Tensor, step: int) -> torch.Tensor:
    """What the whole tensor of that name is at that step: any bytes that are numbers."""
    return drawn(f"{kind}:{name}:{step}", tuple(like.shape), like.dtype)


@functools.cache
def drawn(seed: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


def share(whole: torch.Tensor, tensor: Stored) -> torch.Tensor:
    """What this rank holds of it, cut as torch cuts tensors that are placed like it."""
    if isinstance(tensor, Section):
        numbers = torch.full(tensor.tensor.shape, -1).flatten()
        numbers[tensor.first : tensor.first + tensor.numel()] = torch.arange(tensor.numel())
        mine = share(numbers.view(tensor.tensor.shape), tensor.tensor).flatten()
        return whole.flatten()[mine[mine >= 0]]
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    return local_of(whole, tensor.placements, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))


def local(tensor: Stored) -> torch.Tensor:
    with torch.no_grad():
        return local_values(tensor).detach()


def build(way: int | str) -> Tensors:
    """The sharded model's weights and an AdamW's state, laid out in one of `WORLDS`."""
    torch.manual_seed(dist.get_rank())
    ranks, tensor_parallel = WORLDS[way]
    shape = (2, 2) if ranks == 4 else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    model = Net()
    if tensor_parallel:
        plan = {"wide": ColwiseParallel(), "deep": RowwiseParallel()}
        parallelize_module(model, mesh["inner"], plan)
    sharded = mesh["outer"] if tensor_parallel else mesh
    for layer in (model.large, model.brief, model.frozen, model.wide, model.deep):
        fully_shard(layer, mesh=sharded)
    fully_shard(model, mesh=sharded)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }
    states["everywhere"] = distribute_tensor(torch.zeros(3, 4), mesh, [Replicate()] * mesh.ndim)
    for name, whole in PLACED.items():
        placements = whole[2 if ranks == 4 else 1]
        states[name] = distribute_tensor(torch.zeros(whole[0]), mesh, placements)
    own = tensors_in_memory(model)
    whole = {name: Place(name, 0, tuple(t.shape)) for name, t in own.items() if name not in CUT}
    return {"model/model": at_places(own, whole | PLACES), "trainer/optimizer": states}


def fill(tensors: Tensors, step: int) -> None:
    for kind, named in tensors.items():
        for name, tensor in named.items():
            local(tensor).copy_(share(value_of(kind, name, tensor, step), tensor))


def assert_filled(tensors: Tensors, step: int) -> None:
    for kind, named in tensors.items():
        for name, tensor in named.items():
            expected = share(value_of(kind, name, tensor, step), tensor)
            assert local(tensor).shape == expected.shape, name
            assert torch.equal(local(tensor), expected), name


def gather(mine: object) -> list:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


# What the ranks do. Each takes the folder of all of it.


def make_saver(root: Path, **options) -> Saver:
    rank = SavingRank(dist.get_rank(), dist.get_world_size(), "run:1")
    how = SaveOptions(**{"part_timeout": 120.0, "max_file_bytes": FILE_BYTES, **options})
    return Saver(CheckpointStore(root), rank, how=how)


def save(way: int | str, packed: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Saves steps 1 and 2, while the state changes."""

    def saving(root: Path) -> None:
        name = f"packed_{way}" if packed else f"world_{way}"
        saver, tensors = make_saver(root / name, packed=packed), build(way)
        for step in (1, 2):
            fill(tensors, step)
            saver.save(
                step, tensors, {"model/config.json": b"{}"}, {**ABOUT, "world_size": dist.get_world_size()}
            )
            saver.before_update()
            fill(tensors, 99)
        saver.finish()
        assert [saved.step for saved in saver.check()] == [1, 2]
        saver.close()

    return saving


def bytes_read() -> int:
    """What this process has read from files so far, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load(way: int | str, source: int | str) -> Callable[[Path], None]:
    """Loads both steps that were saved in the way `source`."""

    def loading(root: Path) -> None:
        tensors = build(way)
        for step in (1, 2):
            fill(tensors, 99)
            folder = root / f"world_{source}" / f"step_{step}"
            before = bytes_read()
            manifest = load_step(folder, tensors, rank=dist.get_rank(), gather=gather)
            together = sum(gather(bytes_read() - before))
            size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
            copies = 2 if WORLDS[way][0] == 4 else 1
            assert size <= together < copies * size + 300_000 * dist.get_world_size(), (
                "as often as it is held"
            )
            assert (manifest.step, manifest.world_size) == (step, WORLDS[source][0])
            assert_filled(tensors, step)

    return loading


def load_packed(way: int | str) -> Callable[[Path], None]:
    """Loads what was saved with the optimiser's state packed, and hears of damage in it."""

    def loading(root: Path) -> None:
        tensors = build(way)
        for source in PACKED_SAVES:
            fill(tensors, 99)
            load_step(root / f"packed_{source}" / "step_2", tensors, rank=dist.get_rank(), gather=gather)
            assert_filled(tensors, 2)
        folder = root / "packed_2" / "step_1"
        data = folder / "trainer" / "packed-1.bin"
        dist.barrier()
        if dist.get_rank() == 0:
            flip(data, data.stat().st_size // 2)
        dist.barrier()
        with pytest.raises(Damaged, match=r"packed-1\.bin|optimizer"):
            load_step(folder, tensors, rank=dist.get_rank(), gather=gather)
        dist.barrier()
        if dist.get_rank() == 0:
            flip(data, data.stat().st_size // 2)

    return loading


def save_constant(way: int | str) -> Callable[[Path], None]:
    """Saves steps 1 to 3, of which only the first writes what does not change."""

    def saving(root: Path) -> None:
        saver, tensors = make_saver(root / f"constant_{way}", constant=CONSTANT), build(way)
        weights = tensors[MODEL]
        changing = {MODEL: {name: weights[name] for name in weights.keys() - CONSTANT[MODEL]}}
        fill(tensors, 1)
        for step in (1, 2, 3):
            fill({**tensors, **changing}, step)
            about = {**ABOUT, "world_size": dist.get_world_size()}
            saver.save(step, tensors, {"model/config.json": b"{}"}, about)
            saver.before_update()
        saver.finish()
        saver.close()

    return saving


def change_constant(root: Path) -> None:
    """A tensor that was said not to change does so on one rank: no rank takes the link for its values."""
    saver, tensors = make_saver(root / "changing", constant=CONSTANT), build(2)
    fill(tensors, 1)
    saver.save(1, tensors, {}, {**ABOUT, "world_size": dist.get_world_size()})
    saver.finish()
    if dist.get_rank() == 1:
        local(tensors[MODEL]["large.weight"])[-1] += 1
    saver.save(2, tensors, {}, {**ABOUT, "world_size": dist.get_world_size()})
    if dist.get_rank() == 0:
        with pytest.raises(SaveFailed, match="link to a file of other values"):
            saver.finish()
    else:
        saver.finish()
    saver.close()


MODEL = "model/model"
CONSTANT = {MODEL: {"frozen.weight", "frozen.bias", "large.weight", "experts.1.up"}}
SAVES = {way: save(way) for way in WORLDS}
CONSTANT_SAVES = {way: save_constant(way) for way in (2, "hsdp", "tensor parallel")}
PACKED_SAVES = {way: save(way, packed=("trainer",)) for way in (2, "tensor parallel")}
PACKED_LOADS = {way: load_packed(way) for way in (1, 2, 3, "hsdp")}
LOADS = {(way, source): load(way, source) for way in WORLDS for source in WORLDS}
IN_EACH_COMMIT = [(1, 2), (2, 3), (3, "hsdp"), ("hsdp", "tensor parallel"), ("tensor parallel", 1)]
"""Each way loads once, and what each has saved is loaded once."""


def load_damaged(root: Path) -> None:
    """Every rank hears of a damaged byte, whichever of them reads it."""
    folder = root / "world_2" / "step_2"
    tensors = build(2)
    for path in sorted(folder.rglob("*.safetensors")):
        for offset in (0, 30, 4096, path.stat().st_size // 2, path.stat().st_size - 1):
            dist.barrier()
            if dist.get_rank() == 0:
                flip(path, offset)
            dist.barrier()
            with pytest.raises(Damaged, match=path.name):
                load_step(folder, tensors, rank=dist.get_rank(), gather=gather)
            dist.barrier()
            if dist.get_rank() == 0:
                flip(path, offset)
    dist.barrier()
    load_step(folder, tensors, rank=dist.get_rank(), gather=gather)


def fail_on_one_rank(root: Path) -> None:
    """A rank whose disk fails: an error there and, after the timeout, on the rank that commits."""
    if dist.get_rank() == 1:
        os.environ["CAIRN_FAULT"] = "save.before_part:EIO"
    # The others only wait for rank 0, which on a busy machine may take its time.
    options = {} if dist.get_rank() else {"part_timeout": 3.0}
    saver, tensors = make_saver(root / "failed", **options), build(3)
    saver.prepare(tensors)  # which starts the writer
    os.environ.pop("CAIRN_FAULT", None)
    saver.save(1, tensors, {}, {**ABOUT, "world_size": dist.get_world_size()})
    if dist.get_rank() == 2:
        saver.finish()
    else:
        with pytest.raises(SaveFailed, match="EIO" if dist.get_rank() else "trainer1.*part-timeout"):
            saver.finish()
    saver.close()


def begin_late(root: Path) -> None:
    """Ranks that are ahead of rank 0 wait until it has made the folders, and keep what they write."""
    saver, tensors = make_saver(root / "late"), build(3)
    tensors["trainer/optimizer"].pop("narrow")  # for which ranks exchange values, so that they have to meet
    fill(tensors, 1)
    for rank in (2, 1, 0):
        if dist.get_rank() == rank:
            saver.save(1, tensors, {}, {**ABOUT, "world_size": dist.get_world_size()})
        dist.barrier()
    saver.finish()
    saver.close()


PLAN: list[tuple[int, Callable[[Path], None]]] = [
    *((WORLDS[way][0], part) for way, part in SAVES.items()),
    *((WORLDS[way][0], part) for (way, _), part in LOADS.items()),
    *((WORLDS[way][0], part) for way, part in PACKED_SAVES.items()),
    *((WORLDS[way][0], part) for way, part in PACKED_LOADS.items()),
    *((WORLDS[way][0], part) for way, part in CONSTANT_SAVES.items()),
    (2, change_constant),
    (2, load_damaged),
    (3, begin_late),
    (3, fail_on_one_rank),
]


def main(rank: int, root: Path, loads: list[tuple[int | str, int | str]]) -> None:
    """One process: goes through the plan where it is among the ranks, and writes down how each part ended.

    Of LOADS, those that are asked for.
    """
    torch.set_num_threads(1)
    left_out = [part for names, part in LOADS.items() if names not in loads]
    for number, (world_size, part) in enumerate(PLAN):
        if rank >= world_size or part in left_out:
            continue
        dist.init_process_group(
            "gloo",
            init_method=f"file://{root}/meet_{number}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=120),
        )
        faults._reached.clear()
        problem = None
        try:
            part(root)
        except BaseException:
            problem = traceback.format_exc()
        (root / f"outcome_{number}_{rank}.json").write_text(json.dumps(problem))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What processes left that went through the plan."""
    root = tmp_path_factory.mktemp("ranks")
    loads = draws.asked(request, test_any_ranks_load_what_any_others_saved, "way", "source")
    ranks = start_ranks(main, root, loads, world_size=max(ranks for ranks, _ in WORLDS.values()))
    while not ranks.join():
        pass
    return root


def outcome_of(left: Path, part: Callable, world_size: int) -> None:
    """Raises what a rank raised there."""
    number = PLAN.index((world_size, part))
    for rank in range(world_size):
        problem = json.loads((left / f"outcome_{number}_{rank}.json").read_text())
        assert problem is None, f"rank {rank}: {problem}"


def manifest_of(left: Path, way: int | str, step: int) -> Manifest:
    return verify(left / f"world_{way}" / f"step_{step}")


@pytest.mark.parametrize("way", WORLDS)
def test_ranks_save_together(left: Path, way: int | str):
    """Both steps are whole, and hold what the state was before the update."""
    outcome_of(left, SAVES[way], WORLDS[way][0])
    for step in (1, 2):
        folder = left / f"world_{way}" / f"step_{step}"
        manifest = manifest_of(left, way, step)
        assert manifest.world_size == WORLDS[way][0]
        assert "model/model.safetensors.index.json" in manifest.files, "it is more than one file"
        for kind in ("model/model", "trainer/optimizer"):
            where, _, stem = kind.rpartition("/")
            found = {}
            for path in sorted((folder / where).glob(f"{stem}*.safetensors")):
                found |= load_file(path)
            assert len(found) > 10
            for name, tensor in found.items():
                assert torch.equal(tensor, value_of(kind, name, tensor, step)), name


@pytest.mark.parametrize("way", list(WORLDS)[1:])
@pytest.mark.parametrize("step", [1, 2])
def test_the_bytes_do_not_depend_on_the_ranks(left: Path, way: int | str, step: int):
    """All files are those of one rank, byte by byte, and so are all checksums in the manifest."""
    one, many = (left / f"world_{n}" / f"step_{step}" for n in (1, way))
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert sorted(path.relative_to(many) for path in many.rglob("*") if path.is_file()) == names
    for name in names:
        if name.name != "manifest.json":
            assert (one / name).read_bytes() == (many / name).read_bytes(), name
    assert manifest_of(left, 1, step).files == manifest_of(left, way, step).files


def test_what_is_tied_or_empty_stands_once(left: Path):
    """A tied weight stands under one name, a frozen one has no optimiser state."""
    folder = left / "world_3" / "step_1"
    found: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "model").glob("*.safetensors")):
        found |= load_file(path)
    assert "embed.weight" in found
    assert "head.weight" not in found
    assert found["brief.weight"].dtype == torch.bfloat16
    assert (found["count"].dtype, found["count"].shape) == (torch.int64, ())
    states = {}
    for path in sorted((folder / "trainer").glob("*.safetensors")):
        states |= load_file(path)
    assert not any(name.startswith(("frozen", "head", "count", "table")) for name in states)
    assert states["short.weight.exp_avg"].shape == (2, 9)


@pytest.mark.parametrize(
    ("way", "source"), draws.cases(list(LOADS), "loads of ranks", 4, always=IN_EACH_COMMIT)
)
def test_any_ranks_load_what_any_others_saved(left: Path, way: int | str, source: int | str):
    """Each rank has its shards, bit by bit, and together they have checked every byte."""
    outcome_of(left, LOADS[way, source], WORLDS[way][0])


@pytest.mark.parametrize("way", PACKED_LOADS)
def test_any_ranks_load_what_others_packed(left: Path, way: int | str):
    """Each rank unpacks the ranges that it holds; damage in a block is heard of on every rank."""
    outcome_of(left, PACKED_LOADS[way], WORLDS[way][0])


@pytest.mark.parametrize("way", PACKED_SAVES)
def test_contents_of_packed_files_do_not_depend_on_the_ranks(left: Path, way: int | str):
    """The checksums of their contents are those of the files of one rank that packs nothing."""
    outcome_of(left, PACKED_SAVES[way], WORLDS[way][0])
    plain, packed = manifest_of(left, 1, 2), verify(left / f"packed_{way}" / "step_2")
    assert (plain.format, packed.format) == (1, 2)
    assert packed.contents
    assert packed.contents == {name: plain.files[name] for name in packed.contents}
    assert not any(name.startswith("trainer/") and name.endswith(".safetensors") for name in packed.files)
    assert packed.nbytes < plain.nbytes


@pytest.mark.parametrize("way", CONSTANT_SAVES)
def test_what_does_not_change_is_written_once(left: Path, way: int | str):
    """The steps share the files of constant tensors, which hold the same whatever the ranks."""
    outcome_of(left, CONSTANT_SAVES[way], WORLDS[way][0])
    folders = [left / f"constant_{way}" / f"step_{step}" for step in (1, 2, 3)]
    shared = {}
    for step, folder in enumerate(folders, start=1):
        verify(folder)
        found = {}
        for path in (folder / "model").glob("*.safetensors"):
            content = load_file(path)
            found |= content
            if not content.keys().isdisjoint(CONSTANT[MODEL]):
                assert content.keys() <= CONSTANT[MODEL]
                shared.setdefault(path.name, set()).add(path.stat().st_ino)
                assert path.stat().st_nlink == 3
        for name, tensor in found.items():
            expected = 1 if name in CONSTANT[MODEL] else step
            assert torch.equal(tensor, value_of(MODEL, name, tensor, expected)), name
    assert len(shared) == 2
    assert all(len(inodes) == 1 for inodes in shared.values())


def test_a_link_never_stands_for_other_values(left: Path):
    outcome_of(left, change_constant, 2)
    assert CheckpointStore(left / "changing").steps() == [1]
    verify(left / "changing" / "step_1")


def test_damage_is_heard_of_on_every_rank(left: Path):
    """Whichever rank reads the damaged byte."""
    outcome_of(left, load_damaged, 2)


def test_ranks_that_are_ahead_wait(left: Path):
    """There is no barrier when a save begins."""
    outcome_of(left, begin_late, 3)
    verify(left / "late" / "step_1")


def test_one_ranks_failure_fails_the_save(left: Path):
    """Nothing is committed, and the rank that commits names the one whose part is missing."""
    outcome_of(left, fail_on_one_rank, 3)
    store = CheckpointStore(left / "failed")
    assert (store.steps(), store.debris()) == ([], [store.folder(1)])
    with pytest.raises(CheckpointError):
        verify(store.folder(1))
