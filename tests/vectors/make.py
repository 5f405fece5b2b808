"""Writes the test vectors of docs/format.md: small checkpoints, good and hostile, and what a reader must say.

usage: python tests/vectors/make.py

It uses nothing of Cairn, so the vectors are those of a second implementation of the page. `verdicts.json`
lists each folder: what is wrong with it (null: it must be read), and the values of its tensors.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from awscrt.checksums import crc64nvme

HERE = Path(__file__).parent
CHUNK = 16 << 20
MODEL, OPTIMIZER = "model/model.safetensors", "trainer/optimizer.safetensors"
WEIGHTS = {
    "a": np.arange(6, dtype="<f4").reshape(2, 3),
    "b": np.full(4, 0.5, "<f4"),
    "none": np.zeros((0, 4), "<f4"),
}
STATE = {"a.exp_avg": np.arange(6, dtype="<f4").reshape(2, 3) / 64, "a.step": np.array(3, "<f4")}
Step = dict[str, bytes]


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """A file, its data at a multiple of 4096 bytes."""
    entries: dict = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096 - 8
    return struct.pack("<Q", length) + text.ljust(length) + data


def entry(content: bytes) -> dict:
    """What a manifest says of a file."""
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    return {"size": len(content), "crc64nvme": [f"{crc64nvme(chunk):016x}" for chunk in chunks]}


def manifest(stored: Step, contents: dict[str, dict] | None = None, **changes: object) -> bytes:
    """A manifest of these files."""
    fields = {
        **{
            "format": 2 if contents else 1,
            "step": 1,
            "run_id": "0badcafe",
            "attempt": 1,
            "branch": "branch_1",
        },
        **{"parent": None, "created": "2026-11-23T00:00:00+00:00", "parts": ["trainer"], "world_size": 1},
        **{"dtypes": {"model/model": "F32"}, "metrics": {"loss": None}, "versions": {}, "config_digest": ""},
        **{"chunk_bytes": CHUNK, "files": {name: entry(content) for name, content in sorted(stored.items())}},
        **({"contents": contents} if contents else {}),
        **changes,
    }
    return (json.dumps(fields, indent=1) + "\n").encode()


def plain() -> Step:
    """A step whose files are all as they are."""
    return {
        "model/config.json": b"{}\n",
        MODEL: safetensors(WEIGHTS),
        OPTIMIZER: safetensors(STATE),
        "trainer/state.json": b'{"progress": {"step": 1, "total_tokens": 9, "total_samples": 3}}\n',
    }


def sharded() -> Step:
    """Two files of weights with an index."""
    names = {name: f"model-0000{1 + (name != 'a')}-of-00002.safetensors" for name in WEIGHTS}
    shards = {
        f"model/{file}": safetensors({n: WEIGHTS[n] for n in names if names[n] == file})
        for file in names.values()
    }
    index = {"metadata": {"total_size": 40}, "weight_map": names}
    rest = {name: content for name, content in plain().items() if name != MODEL}
    return {**rest, **shards, "model/model.safetensors.index.json": json.dumps(index).encode()}


def grouped(data: bytes, width: int) -> bytes:
    """Byte k of every value, for each k, and then the rest."""
    count = len(data) // width
    planes = np.frombuffer(data, np.uint8)[: count * width].reshape(count, width).T.tobytes()
    return planes + data[count * width :]


def packed(change: Callable[[dict, dict], None] = lambda tables, data: None) -> tuple[Step, dict]:
    """A step with packed state of two ranks, and the contents; `change` spoils tables and data."""
    whole = plain()
    content = whole.pop(OPTIMIZER)
    cut = len(content) - 12
    frame = zstandard.ZstdCompressor(level=1).compress(grouped(content[:cut], 4))
    tables = {
        0: {"files": {"optimizer.safetensors": [[0, cut, 0, len(frame), 4]]}},
        1: {"files": {"optimizer.safetensors": [[cut, 12, 0, 12, 0]]}},
    }
    data = {0: frame, 1: content[cut:]}
    change(tables, data)
    for rank in (0, 1):
        whole[f"trainer/packed-{rank}.json"] = json.dumps(tables[rank]).encode()
        whole[f"trainer/packed-{rank}.bin"] = data[rank]
    return whole, {OPTIMIZER: entry(content)}


def _bomb(tables: dict, data: dict) -> None:
    data[0] = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    tables[0]["files"]["optimizer.safetensors"][0][3] = len(data[0])


def _gap(tables: dict, data: dict) -> None:
    tables[1]["files"]["optimizer.safetensors"][0][0] += 4


def _outside(tables: dict, data: dict) -> None:
    tables[1]["files"] = {"../../../optimizer.safetensors": tables[1]["files"]["optimizer.safetensors"]}


def _unused(tables: dict, data: dict) -> None:
    data[1] += b"unused"


def main() -> None:
    """Write all of them."""
    verdicts: dict[str, dict] = {}

    def write(name: str, files: Step, about: bytes | None, wrong: str | None, folder: str = "step_1") -> None:
        shutil.rmtree(HERE / name, ignore_errors=True)
        for path, content in files.items():
            target = HERE / name / folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if about is not None:
            (HERE / name / folder / "manifest.json").write_bytes(about)
        verdicts[name] = {"step": folder, "wrong": wrong}

    good = plain()
    text = manifest(good).decode()
    write("plain", good, manifest(good), None)
    write("sharded", sharded(), manifest(sharded()), None)
    files, contents = packed()
    write("packed", files, manifest(files, contents), None)
    write(
        "left-over-notes", {**good, ".begun.json": b"{}", ".trainer0.part.json": b"{"}, manifest(good), None
    )

    def refuse(name: str, wrong: str, files: Step = good, about: bytes | None = manifest(good)) -> None:
        write(name, files, about, wrong)

    changed = {**good, MODEL: good[MODEL][:-1] + b"\x01"}
    refuse("changed-value", "a byte of a tensor differs from its checksum", changed)
    refuse("short-file", "a file is shorter than the manifest says", {**good, MODEL: good[MODEL][:-1]})
    refuse("missing-file", "a file is missing", {n: c for n, c in good.items() if n != "trainer/state.json"})
    refuse("unknown-file", "a file is not in the manifest", {**good, "model/extra.bin": b"x"})
    refuse("no-manifest", "the save was never completed", about=None)
    refuse("format-3", "a format that is not known", about=manifest(good, format=3))
    refuse("unknown-field", "a field that is not known", about=manifest(good, pickle="x"))
    refuse("field-missing", "a field is missing", about=text.replace(' "branch": "branch_1",\n', "").encode())
    refuse(
        "repeated-key",
        "a key is repeated",
        about=text.replace('"step": 1', '"step": 2,\n "step": 1').encode(),
    )
    refuse("other-step", "the manifest is that of another step", about=manifest(good, step=2))
    outside = {**json.loads(text)["files"], "../plain/step_1/model/config.json": entry(b"{}\n")}
    refuse("path-outside", "a path leads out of the step", about=manifest(good, files=outside))
    hole = safetensors(WEIGHTS).replace(b'"data_offsets":[24,40]', b'"data_offsets":[20,36]')
    bad = {**good, MODEL: hole}
    refuse("overlapping-tensors", "a tensor begins before the one before it ends", bad, manifest(bad))
    long = {**good, MODEL: struct.pack("<Q", 1 << 40) + good[MODEL][8:]}
    refuse("long-header", "a header is longer than its file", long, manifest(long))
    refuse("contents-in-format-1", "packed files in format 1", files, manifest(files, contents, format=1))
    for name, wrong, change in (
        ("packed-bomb", "a frame unpacks to more than its table says", _bomb),
        ("packed-gap", "the tables lack bytes of a file", _gap),
        ("packed-outside", "a table names a file elsewhere", _outside),
        ("packed-unused-bytes", "a data file has bytes that no table describes", _unused),
    ):
        files, contents = packed(change)
        refuse(name, wrong, files, manifest(files, contents))
    files, contents = packed()
    contents[OPTIMIZER]["crc64nvme"] = ["0" * 16]
    refuse(
        "packed-other-contents",
        "what is unpacked differs from its checksum",
        files,
        manifest(files, contents),
    )
    values = {
        "model/model": {name: tensor.tolist() for name, tensor in WEIGHTS.items()},
        "trainer/optimizer": {name: tensor.tolist() for name, tensor in STATE.items()},
    }
    report = {"tensors": values, "checkpoints": verdicts}
    (HERE / "verdicts.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
