"""Damage that only those find who load a checkpoint: the run goes on from the one before, or says why not."""

import os
import shutil
from pathlib import Path

import draws
import pytest
from runs import (
    CONFIGS,
    Shell,
    as_of,
    assert_same_bits,
    flip,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)

from cairn.checkpoint.step_folder import verify

pytestmark = pytest.mark.timeout(900)

SFT = ("sft", "@", f"{CONFIGS}/sft.toml", "--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 8)
EVERY = ("--ckpt.interval", 4)


@pytest.fixture(scope="module")
def straight(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of 12 steps. Leave it as it is."""
    run = tmp_path_factory.mktemp("straight") / "run"
    shell.succeed(*SFT, *EVERY, "--max-steps", 12, "--output-dir", run)
    return run


@pytest.fixture
def stopped(straight: Path, tmp_path: Path) -> Path:
    """That run, as it was when step 8 was its newest."""
    return as_of(8, straight, tmp_path / "run")


def assert_as_undisturbed(run: Path, straight: Path) -> None:
    """All rows and steps are those of the undisturbed run, bit for bit."""
    assert steps(run) == [4, 8, 12]
    assert untimed(whole_rows(run, 12)) == untimed(whole_rows(straight, 12))
    for step in steps(run):
        assert_same_bits(tensors(step_folder(run, step)), tensors(step_folder(straight, step)))


def test_the_rank_that_loads_it_finds_it(shell: Shell, straight: Path, stopped: Path):
    """One bit of the optimiser's state; what comes out is what would have come out from the step before."""
    file = step_folder(stopped, 8) / "trainer" / "optimizer.safetensors"
    flip(file, file.stat().st_size - 5)
    output = shell.succeed(
        *SFT, *EVERY, "--max-steps", 12, "--output-dir", stopped, "--ckpt.resume", "latest"
    )
    assert f"the checkpoint of step 8 is damaged: {file}: changed between bytes 0 and" in output
    assert f"passing over a damaged checkpoint: {file}: changed between bytes 0 and" in output
    assert f"the newest good checkpoint is {step_folder(stopped, 4)}" in output
    assert_as_undisturbed(stopped, straight)
    attempt = read(stopped / "roles.json")["number"]
    assert (stopped / "checkpoints" / "abandoned" / f"before_attempt_{attempt}" / "step_8").is_dir()
    assert '"ok": true' in shell.succeed("ckpt", "audit", stopped, "--json")


@pytest.mark.parametrize("place", draws.cases(["a name in the header", "the last byte"], __name__, 1))
def test_all_ranks_go_back_together(shell: Shell, stopped: Path, place: str):
    """Whether each of them stumbles over it, or one of two has read it."""
    file = step_folder(stopped, 8) / "model" / "model.safetensors"
    text = file.read_bytes()
    flip(file, text.index(b"model.norm") + 3 if place == "a name in the header" else len(text) - 1)
    two = ("--workers", 2, "--max-steps", 12, "--output-dir", stopped, "--ckpt.resume", "auto")
    output = shell.succeed(*SFT, *EVERY, *two)
    assert f"passing over a damaged checkpoint: {file}: changed between bytes 0 and" in output
    assert f"the newest good checkpoint is {step_folder(stopped, 4)}" in output
    assert steps(stopped) == [4, 8, 12]
    whole_rows(stopped, 12)
    assert '"ok": true' in shell.succeed("ckpt", "audit", stopped, "--json")


def test_the_object_store_has_the_step_before(shell: Shell, straight: Path, stopped: Path, tmp_path: Path):
    """The local disk has only the damaged one, which no store has: the run goes on from the remote one."""
    url = f"file://{tmp_path / 'remote'}"
    shell.succeed("ckpt", "copy", step_folder(stopped, 4), url)
    shutil.rmtree(step_folder(stopped, 4))
    file = step_folder(stopped, 8) / "trainer" / "optimizer.safetensors"
    flip(file, file.stat().st_size - 5)
    end = ("--ckpt.remote", url, "--max-steps", 12, "--output-dir", stopped)
    output = shell.succeed(*SFT, *EVERY, *end, "--ckpt.resume", "auto")
    assert f"passing over a damaged checkpoint: {file}: changed between bytes 0 and" in output
    assert f"downloading step 4 from {url}" in output
    assert f"{url} has step 12" in output
    assert_as_undisturbed(stopped, straight)
    for step in (4, 8, 12):
        verify(tmp_path / "remote" / f"step_{step}")


def test_a_step_that_was_asked_for_is_replaced_by_itself(
    shell: Shell, straight: Path, stopped: Path, tmp_path: Path
):
    """By the remote step of that number, if there is one."""
    url = f"file://{tmp_path / 'remote'}"
    shell.succeed("ckpt", "copy", step_folder(stopped, 8), url)
    file = step_folder(stopped, 8) / "trainer" / "optimizer.safetensors"
    flip(file, file.stat().st_size - 5)
    end = ("--ckpt.remote", url, "--max-steps", 12, "--output-dir", stopped)
    output = shell.succeed(*SFT, *EVERY, *end, "--ckpt.resume-step", 8)
    assert f"downloading step 8 from {url}" in output
    assert_as_undisturbed(stopped, straight)


def test_a_step_that_was_asked_for_is_an_error(shell: Shell, stopped: Path):
    """Exit code 2, as where it is found before anything is started; all that the run has stays.

    On two ranks; test_restart.py asks for a damaged step on one.
    """
    file = step_folder(stopped, 8) / "model" / "model.safetensors"
    flip(file, file.stat().st_size // 2)
    before = untimed(rows(stopped))
    end = ("--workers", 2, "--max-steps", 12, "--output-dir", stopped)
    finished = shell.run(*SFT, *EVERY, *end, "--ckpt.resume-step", 8)
    assert finished.code == 2, finished.output
    assert f"error: can't resume: {file}: changed between bytes 0 and" in finished.output
    assert "--ckpt.resume latest takes the newest good step" in finished.output
    assert sorted(os.listdir(stopped / "checkpoints")) == ["step_4", "step_8"]
    assert untimed(rows(stopped)) == before
