"""TensorFlow checkpoints: read, written, and refused where they are damaged or hostile."""

import base64
import struct
from pathlib import Path

import pytest
import torch
from families import make
from safetensors.torch import load_file

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.tensors.sharded_files import dtype_of
from cairn.formats import FORMATS, WriteOptions, format_of
from cairn.formats.tensorflow import HEADER, crc32c, field, masked, read_index, table, varint
from cairn.formats.transfer.export_step import export
from cairn.formats.transfer.import_step import import_checkpoint

WRITTEN_BY_TENSORFLOW = {
    "raw.index": (
        "000IE0U81b0RR#cZEs{{Y%XPOVr675cV%g3Xmkhx5(p9k2m%rU2m>e>HNe|F7X}d(Y+-q2a&s;)E@3WrWoc(<bO;U-2o"
        "eGa0TKcT0w5SD1T`*7R`L%B5n?WPWoc(<bO;F&1QG%W10WnI7&YPYiYfpG4Rd2*Y+-T;0TKWpG$;f$@799D00I$udI%E"
        "|1`+@g0tf^kG&R`jf}#Kb000310002dQXJ?20000100000!1AH6009Gg0IC510000100000|34$?uK@_W0S^EG000000"
        "0000000000000000000000000000000000SNnjABy~sI"
    ),
    "raw.data-00000-of-00001": ("00000004kL0000$002Nh004kM005vsz&`-M0RR91000000ssI2000000{{R300000002Nh"),
    "obj.index": (
        "000IE0U81b0RS8gUqeVmLrYLkNlsKjLQF+pPeMvXLsVZ!QbABi2nP}XAP6W@HIuX`2>=`ucP}nMR8&$)LRC~nQ!iFQQb"
        "|EVOhsQ-K}=Oe2mulZ5&{ST5&{SUC<rxKJmob200001000007F*4~000000RR910KoF0umAx9cmQtz0000100000EbVJ"
        "JbO?a~4gdfE0000000000000000000000000000000000000000SNnjABy~sI"
    ),
    "obj.data-00000-of-00001": (
        "004kL0000$O`TGndkPB*1qcBW0e30_2muN{5;zJDRzXrpK|)MLUsgd(RYejAR$+2!VPb4$8XR{oE<sdOQb|HpR7F!SRz"
        "XrpK|)MLUsgd(RYfWS2mt"
    ),
}
"""What `tf.raw_ops.SaveV2` and `tf.train.Checkpoint(w=tf.Variable([[1.0, 2.0]])).write` of 2.21 wrote."""


def theirs(folder: Path, name: str) -> Path:
    """The files of TensorFlow's; returns the index."""
    for file, text in WRITTEN_BY_TENSORFLOW.items():
        if file.startswith(name):
            (folder / file).write_bytes(base64.b85decode(text))
    return folder / f"{name}.index"


def values(source: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in FORMATS["tf"].read(source).tensors[MODEL].items():
        found[name] = torch.empty(tensor.spec.shape, dtype=dtype_of(tensor))
        tensor.fill(0, found[name].view(-1))
    return found


def test_files_of_tensorflow_are_read(tmp_path: Path):
    """Every type and shape; variables have their names without what `tf.train.Checkpoint` adds."""
    found = values(theirs(tmp_path, "raw"))
    expected = {
        "model.embed.weight": torch.arange(6.0).view(2, 3),
        "model.layers.0.a.weight": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "model.layers.0.b.weight": torch.tensor([1, 2, 3]),
        "zz": torch.zeros(0, 4, dtype=torch.float16),
        "scalar": torch.tensor(3.0),
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    content = FORMATS["tf"].read(theirs(tmp_path, "obj"))
    assert list(content.tensors[MODEL]) == ["w"]
    assert content.left_out == ("_CHECKPOINTABLE_OBJECT_GRAPH: it is not a weight",)


@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_a_step_goes_out_and_comes_back(tmp_path: Path, dtype: str | None):
    """Names and values are those of the step; the folder has all that a run needs."""
    step = import_checkpoint(make("qwen3_moe", tmp_path / "hf"), tmp_path / "run", "hf")[0]
    assert export(step, tmp_path / "out", "tf", WriteOptions(dtype=dtype)) == "read back and equal"
    assert format_of(tmp_path / "out") == "tf"
    again = import_checkpoint(tmp_path / "out", tmp_path / "again", "tf")[0]
    ours, back = (load_file(folder / "model" / "model.safetensors") for folder in (step, again))
    assert ours.keys() == back.keys()
    for name, tensor in ours.items():
        assert torch.equal(back[name], tensor if dtype is None else tensor.bfloat16())


def test_large_numbers_in_an_index(tmp_path: Path):
    """Of several blocks; keys share beginnings in TensorFlow's files, and not in Cairn's."""
    names = sorted(f"model.layers.{n}.weight" for n in range(300))
    entry = field(1, 1) + field(2, b"") + field(5, 4) + varint(6 << 3 | 5) + struct.pack("<I", 0)
    (tmp_path / "m.index").write_bytes(table({b"": HEADER, **{name.encode(): entry for name in names}}))
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(4))
    assert list(read_index(tmp_path / "m")[0]) == names


def test_what_is_damaged_is_found(tmp_path: Path):
    """One bit of any byte of the index, or of the values, and an end that is missing."""
    index = theirs(tmp_path, "raw")
    whole = index.read_bytes()
    for position in [*range(0, len(whole) - 48, 3), *range(len(whole) - 8, len(whole))]:
        data = bytearray(whole)
        data[position] ^= 4
        index.write_bytes(data)
        with pytest.raises(Damaged):
            values(index)
    for length in (0, 20, len(whole) - 1):
        index.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            values(index)
    index.write_bytes(whole)
    file = tmp_path / "raw.data-00000-of-00001"
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=r"model\.embed\.weight does not have the checksum"):
        values(index)
    file.write_bytes(data[:-1])
    with pytest.raises(Damaged, match="ends after the end"):
        values(index)


def shape_of(*sizes: int) -> bytes:
    return b"".join(field(2, field(1, size)) for size in sizes)


CRC = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(bytes(4))))
HOSTILE = {
    "a tensor larger than the file": field(1, 1) + field(2, shape_of(1 << 40)) + field(5, 1 << 42) + CRC,
    "a size that is not that of the shape": field(1, 1) + field(2, shape_of(2)) + field(5, 4) + CRC,
    "an offset beyond the file": field(1, 1) + field(4, 1 << 60) + field(5, 4) + CRC,
    "negative sizes": field(1, 1) + field(2, shape_of((1 << 64) - 1)) + field(5, 4) + CRC,
    "another file": field(1, 1) + field(3, 7) + field(5, 4) + CRC,
    "a number for a shape": field(1, 1) + field(2, 3) + field(5, 4) + CRC,
    "half a message": field(1, 1) + field(2, b"123")[:-1],
    "no message": b"\xff" * 12,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_index_is_refused(what: str, tmp_path: Path):
    (tmp_path / "m.index").write_bytes(table({b"": HEADER, b"w": HOSTILE[what]}))
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(4))
    with pytest.raises(Damaged, match="not the index"):
        values(tmp_path / "m.index")


@pytest.mark.parametrize("entry", [field(1, 7), field(1, 1) + field(7, b"slice")])
def test_tensors_without_a_counterpart_are_listed(entry: bytes, tmp_path: Path):
    """Strings, and variables in parts."""
    (tmp_path / "m.index").write_bytes(table({b"": HEADER, b"w": entry}))
    (tmp_path / "m.data-00000-of-00001").write_bytes(bytes(4))
    with pytest.raises(CheckpointError, match="no counterpart: w"):
        values(tmp_path / "m.index")
