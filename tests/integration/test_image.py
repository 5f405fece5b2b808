"""The image, where there is a builder: a run in it is stopped and goes on in the next container."""

import shutil
import subprocess
from pathlib import Path

import pytest
from runs import CONFIGS, REPOSITORY, rows, steps

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

BUILDERS = ("podman", "docker")
TAG = "cairn-test:cpu"
SFT = ("sft", "@", f"{CONFIGS}/sft.toml", "--output-dir", "/runs/sft", "--ckpt.interval", "5")


@pytest.fixture(scope="module")
def builder() -> str:
    """A program that builds and runs images here."""
    for name in BUILDERS:
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    pytest.skip(f"none of {', '.join(BUILDERS)} works here")


@pytest.fixture(scope="module")
def image(builder: str) -> str:
    """The name of the image with vLLM's CPU build."""
    command = [builder, "build", "-f", "deploy/Dockerfile", "-t", TAG, "."]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return TAG


def test_a_run_in_a_container_goes_on_in_the_next(builder: str, image: str, tmp_path: Path):
    """As an ordinary user; what it leaves on the volume is all that the next container needs."""
    tmp_path.chmod(0o777)
    for last in (5, 10):
        command = [builder, "run", "--rm", "--shm-size", "1g", "-v", f"{tmp_path}:/runs", image, *SFT]
        command += ["--max-steps", str(last), "--ckpt.resume", "auto"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert steps(tmp_path / "sft") == [5, 10]
    assert [row["step"] for row in rows(tmp_path / "sft")] == [*range(1, 11)]
