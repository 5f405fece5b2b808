"""What is written is noted on its way, and what is read back from the disk is compared with that."""

import itertools
import math
import random
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import make
from safetensors.torch import load_file, save_file

from cairn.checkpoint.checksums import CRC64, ZIP_CRC32, Crc, SpanSum, crc64
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors import stream_writer
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.stream_writer import write_sources
from cairn.checkpoint.tensors.verified_copy import check_noted, noted
from cairn.formats import WriteOptions
from cairn.formats.transfer.export_step import UNFINISHED, export
from cairn.formats.transfer.import_step import convert, import_checkpoint
from cairn.run.output import Stage

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model in a Hugging Face directory."""
    return make("qwen3_tied", tmp_path / "hf")


@pytest.fixture
def step(model: Path, tmp_path: Path) -> Path:
    """A step with the model's weights."""
    return import_checkpoint(model, tmp_path / "run", "hf")[0]


def when_comparing(do: Callable[[], object]) -> Stage:
    """Calls `do` when all is written and durable, before it is compared."""

    def stage(doing: str, total: int) -> Callable[[int], None]:
        if doing.startswith("comparing"):
            do()
        return lambda count: None

    return stage


def flip_a_value(folder: Path, tensor: torch.Tensor) -> None:
    """Change a bit in the middle of a tensor in whatever file of a folder holds it."""
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for path in folder.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if values in data:
            data[data.index(values) + len(values) // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"no file in {folder} holds the tensor")


# Checksums of spans


@pytest.mark.parametrize(("kind", "of"), [(CRC64, crc64), (ZIP_CRC32, zlib.crc32)])
def test_parts_may_come_in_any_order_and_twice(kind: Crc, of: Callable[[bytes], int]):
    data = random.Random(0).randbytes(10_007)
    draw = random.Random(1)
    for _ in range(20):
        cuts = sorted({0, len(data), *(draw.randrange(len(data)) for _ in range(30))})
        parts = [(low, data[low:high]) for low, high in itertools.pairwise(cuts)]
        parts += [(low, data[low : low + 700]) for low in range(0, len(data) - 700, 1999)]
        draw.shuffle(parts)
        found = SpanSum(len(data), kind)
        with ThreadPoolExecutor(3) as pool:
            ends = list(pool.map(lambda part, found=found: found.add(part[0], memoryview(part[1])), parts))
        assert [end for end in ends if end is not None] == [of(data)]
        assert (found.value(), found.gaps()) == (of(data), [])


def test_bytes_that_are_missing():
    found = SpanSum(100)
    assert (found.value(), found.gaps()) == (None, [(0, 100)])
    for low, high in [(20, 30), (50, 60), (25, 55), (70, 70), (90, 100)]:
        assert found.add(low, memoryview(bytes(high - low))) is None
    assert found.gaps() == [(0, 20), (60, 90)]
    assert SpanSum(0).value() == crc64(b"")


def test_the_first_bytes_count():
    """So a source that gives other bytes the second time, which are then written, is found."""
    found = SpanSum(4)
    found.add(0, memoryview(b"abcd"))
    found.add(0, memoryview(b"xxxx"))
    assert found.value() == crc64(b"abcd")


# Notes


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(300, 70, generator=generator),
        "b": torch.randn(300, 70, generator=generator),
        "odd": torch.randint(0, 2, (4099,), generator=generator).bool(),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("block", [4096, 3 * 4096, 1 << 20])
def test_what_is_written_is_equal_to_its_notes(
    tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
):
    monkeypatch.setattr(stream_writer, "BLOCK_BYTES", block)
    monkeypatch.setattr("cairn.checkpoint.tensors.verified_copy.STEP_BYTES", block // 2)
    save_file(tensors, tmp_path / "in.safetensors")
    sources = noted(find_tensors(tmp_path, "in"), {"b": torch.bfloat16})
    write_sources(tmp_path, sources, "out")
    assert {name: source.note.value() for name, source in sources.items()} == {
        name: crc64(tensor.view(-1).view(torch.uint8).numpy().data)
        for name, tensor in {**tensors, "b": tensors["b"].bfloat16()}.items()
    }
    told: list[int] = []
    check_noted(find_tensors(tmp_path, "out"), sources, tmp_path, on_bytes=told.append)
    assert sum(told) == sum(source.spec.nbytes for source in sources.values())
    good = (tmp_path / "out.safetensors").read_bytes()
    for tensor in find_tensors(tmp_path, "out").values():
        for at in {0, tensor.spec.nbytes // 2, tensor.spec.nbytes - 1} if tensor.spec.nbytes else ():
            bad = bytearray(good)
            bad[tensor.offset + at] ^= 0x10
            (tmp_path / "out.safetensors").write_bytes(bad)
            with pytest.raises(Damaged, match=f": {tensor.spec.name} differs from what was written"):
                check_noted(find_tensors(tmp_path, "out"), sources, tmp_path)


def test_tensors_under_wrong_names_are_found(tensors: dict[str, torch.Tensor], tmp_path: Path):
    save_file(tensors, tmp_path / "in.safetensors")
    sources = noted(find_tensors(tmp_path, "in"))
    write_sources(tmp_path, sources, "out")
    back = find_tensors(tmp_path, "out")
    for wrong, what in (
        ({**back, "a": back["b"], "b": back["a"]}, "a differs"),
        ({**back, "a": back["odd"]}, "a has another shape or data type"),
        ({name: source for name, source in back.items() if name != "none"}, "found no none"),
    ):
        with pytest.raises(Damaged, match=what):
            check_noted(wrong, sources, tmp_path)


def test_what_a_writer_did_not_ask_for_is_read_to_compare_it(
    tensors: dict[str, torch.Tensor], tmp_path: Path
):
    """A part, or nothing of it."""
    save_file(tensors, tmp_path / "in.safetensors")
    sources = noted(find_tensors(tmp_path, "in"))
    sources["a"].fill(1000, torch.empty(5000))
    check_noted(find_tensors(tmp_path, "in"), sources, tmp_path)
    count = math.prod(tensors["a"].shape)
    assert sources["a"].note.nbytes == 4 * count
    assert sources["a"].note.gaps() == []


# Conversions


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "BF16"])
@pytest.mark.parametrize("name", ["hf", "dcp", "pt"])
def test_damage_between_writing_and_comparing_an_export(
    step: Path, tmp_path: Path, name: str, dtype: str | None
):
    """One bit of what is durable already: the export fails, and leaves nothing."""
    out = tmp_path / "out"
    weight = load_file(step / "model" / "model.safetensors")[NAME]
    weight = weight.bfloat16() if dtype else weight
    damage = when_comparing(lambda: flip_a_value(out.with_name(out.name + UNFINISHED), weight))
    with pytest.raises(Damaged, match="differs"):
        export(step, out, name, WriteOptions(dtype), stage=damage)
    assert not out.exists()
    assert not out.with_name(out.name + UNFINISHED).exists()
    assert "equal" in export(step, out, name, WriteOptions(dtype))


def test_damage_between_writing_and_comparing_an_import(model: Path, step: Path, tmp_path: Path):
    """There is no step then."""
    export(step, tmp_path / "dcp", "dcp", WriteOptions())
    weight = load_file(model / "model.safetensors")[NAME]
    store = CheckpointStore(tmp_path / "new" / "checkpoints")
    damage = when_comparing(lambda: flip_a_value(store.root, weight))
    for name, source in (("dcp", tmp_path / "dcp"), ("hf", model)):
        with pytest.raises(Damaged, match=f"{NAME} differs from what was written"):
            import_checkpoint(source, tmp_path / "new", name, model=model, stage=damage)
        assert store.latest() is None


def test_damage_between_writing_and_comparing_a_conversion(model: Path, tmp_path: Path):
    weight, out = load_file(model / "model.safetensors")[NAME], tmp_path / "cache" / "out"
    damage = when_comparing(lambda: flip_a_value(out.parent, weight))
    with pytest.raises(Damaged, match=f"{NAME} differs from what was written"):
        convert(model, out, "hf", stage=damage)
    assert not out.exists()


def test_a_source_is_read_once(model: Path, step: Path, tmp_path: Path):
    """It may be gone when the result is compared."""
    weights = load_file(model / "model.safetensors")
    for name in ("hf", "dcp", "pt"):
        source = tmp_path / f"as_{name}"
        export(step, source, name, WriteOptions())
        gone = when_comparing(lambda source=source: shutil.rmtree(source, ignore_errors=True))
        made, _, _ = import_checkpoint(source, tmp_path / f"from_{name}", name, model=model, stage=gone)
        assert not source.exists()
        ours = load_file(made / "model" / "model.safetensors")
        assert all(torch.equal(ours[key], tensor) for key, tensor in weights.items())
