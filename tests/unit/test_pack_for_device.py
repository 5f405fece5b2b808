"""What is carried to a machine without a network. Its packages are fetched by hand only."""

import os
import shlex
import tarfile
from pathlib import Path

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
    for line in pack.commands("3.12", with_ray=True):
        words = shlex.split(line, comments=True)
        if words[0] == "$python" and words[1] != "-c":
            script = (REPOSITORY / words[1]).read_text()
            assert all(f'"{word}"' in script for word in words if word.startswith("--")), line
        for word in words:
            assert not word.endswith(".toml") or (REPOSITORY / word).exists()
