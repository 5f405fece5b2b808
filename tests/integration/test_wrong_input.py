"""Whatever is wrong with a command line is said in one message, before anything is started or written."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import wandb
from runs import CONFIGS, REPOSITORY, Finished, Shell, flip, read, step_folder

from cairn.config.trainer import SFTConfig
from cairn.launch import main
from cairn.launch.supervise.slot import RoleProcess
from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.extensions import syntax_tree
from cairn.trainer.tracking import check_login

SFT = ("@", f"{CONFIGS}/sft.toml")
RL = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
MODEL = f"{CONFIGS}/model"

Refused = Callable[..., str]


def everything_in(*folders: Path) -> dict[str, int]:
    """All files and folders with the times of their last change, but for the user's cache."""
    return {
        str(path): path.stat().st_mtime_ns
        for folder in folders
        if folder.exists()
        for path in [folder, *folder.rglob("*")]
        if "cache" not in path.relative_to(folder).parts
    }


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Finished]:
    """Runs a command in this process, with a cache folder of its own and without network."""
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("CAIRN_INFERENCE_TOKEN", raising=False)

    def run(name: str, *arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        try:
            code = getattr(main, name)()
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


def resolved(finished: Finished) -> dict[str, Any]:
    """The configuration that a dry run printed, before what it says of the machine."""
    return json.JSONDecoder().raw_decode(finished.output)[0]


def without_progress(output: str) -> str:
    """Without the lines that a command prints where it takes long, as on a busy machine."""
    return re.sub(r"^(?:importing|reading) .* \.\.\.\n", "", output, flags=re.MULTILINE)


@pytest.fixture
def refused(call: Callable[..., Finished], tmp_path: Path) -> Refused:
    """`refused("sft", ...)`: the message of a command that must end with code 2 and leave no trace."""

    def run(name: str, *arguments: object, code: int = 2) -> str:
        folders = (tmp_path, REPOSITORY / "outputs")
        before = everything_in(*folders)
        finished = call(name, *arguments)
        assert finished.code == code, finished.output
        assert everything_in(*folders) == before
        assert "Traceback" not in finished.output
        message = without_progress(finished.output)
        assert message.startswith("error: ")
        return message

    return run


def test_what_was_started_early_ends_with_a_refusal(
    call: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The trainer's driver is there while the tokenizer is looked at."""
    started: list[psutil.Process] = []

    class Noted(RoleProcess):
        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords)
            started.append(psutil.Process(self.pid))

    monkeypatch.setattr("cairn.launch.supervise.slot.RoleProcess", Noted)
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "tokenizer.json").write_text("{}")
    finished = call("sft", *SFT, "--model.name", model, "--output-dir", tmp_path / "run")
    assert finished.code == 2
    assert "its tokenizer can't be loaded" in finished.output
    (driver,) = started
    assert not driver.is_running()
    assert not (tmp_path / "run").exists()


# Files and flags


def write(path: Path, text: str) -> Path:
    """A config file."""
    path.write_text(text)
    return path


def test_an_unknown_key_in_a_file(refused: Refused, tmp_path: Path):
    file = write(tmp_path / "typo.toml", "[optimizer]\nlearning_rate = 1.0\n")
    message = refused("sft", *SFT, "@", file, "--output-dir", tmp_path / "run")
    assert "--optimizer.learning-rate" in message


def test_an_unknown_key_is_answered_with_the_one_that_was_meant(refused: Refused, tmp_path: Path):
    file = write(tmp_path / "typo.toml", "max_step = 3\n")
    message = refused("sft", *SFT, "@", file, "--output-dir", tmp_path / "run")
    assert f"--max-step (in {file}):" in message
    assert "did you mean --max-steps?" in message


def test_an_unknown_flag(refused: Refused, tmp_path: Path):
    message = refused("sft", *SFT, "--max-stepss", 3, "--output-dir", tmp_path / "run")
    assert "--max-stepss" in message
    assert "did you mean --max-steps?" in message


def test_a_missing_config_file(refused: Refused, tmp_path: Path):
    message = refused("sft", "@", tmp_path / "nowhere.toml", "--output-dir", tmp_path / "run")
    assert str(tmp_path / "nowhere.toml") in message
    assert "not found" in message


@pytest.mark.parametrize(
    ("name", "text"), [("bad.toml", "max_steps = = 3\n"), ("bad.json", "{max_steps: 3}")]
)
def test_a_config_file_that_is_none(refused: Refused, tmp_path: Path, name: str, text: str):
    file = write(tmp_path / name, text)
    for arguments in (("sft", "@", file), ("rl", "--trainer", f"@{file}")):
        assert str(file) in refused(*arguments, "--output-dir", tmp_path / "run")


def test_a_config_file_of_another_kind(refused: Refused, tmp_path: Path):
    file = write(tmp_path / "config.ini", "max_steps = 3\n")
    message = refused("sft", "@", file, "--output-dir", tmp_path / "run")
    assert str(file) in message
    assert ".toml" in message


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--ckpt.interval", 0), "--ckpt.interval"),
        (("--ckpt.interval", -5), "--ckpt.interval"),
        (("--ckpt.resume-step", 0), "--ckpt.resume-step"),
        (("--ckpt.interval-minutes", 0), "--ckpt.interval-minutes"),
        (("--ckpt.keep-last", 0), "--ckpt.keep-last"),
        (("--ckpt.keep-best", 2), "keep_best = 2 needs metric and mode"),
        (("--ckpt.verify", "never"), "--ckpt.verify"),
        (("--max-steps", 0), "--max-steps"),
        (("--max-steps", "ten"), "--max-steps"),
        (("--workers", 0), "--workers"),
        (("--seed", -1), "--seed"),
        (("--seq-len", 1), "--seq-len"),
        (("--micro-batch-size", 0), "--micro-batch-size"),
        (("--data.batch-size", 0), "--data.batch-size"),
        (("--optimizer.lr", 0), "--optimizer.lr"),
        (("--optimizer.weight-decay", -0.1), "--optimizer.weight-decay"),
        (("--scheduler.type", "exponential"), "--scheduler.type"),
        (("--scheduler.steps", 20), "scheduler.steps"),  # the warm-up alone has 20
        (("--precision.compute", "float8"), "--precision.compute"),
        (("--wandb.mode", "sometimes"), "--wandb.mode"),
    ],
)
def test_an_impossible_value(refused: Refused, tmp_path: Path, flags: tuple, flag: str):
    assert flag in refused("sft", *SFT, *flags, "--output-dir", tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--port", 0), "--port"),
        (("--port", 70_000), "--port"),
        (("--max-model-len", 0), "--max-model-len"),
        (("--model.name", "no/such/folder"), "--model.name no/such/folder"),
    ],
)
def test_an_impossible_value_for_the_server(refused: Refused, flags: tuple, flag: str):
    assert flag in refused("inference", "@", f"{CONFIGS}/infer.toml", *flags)


@pytest.mark.parametrize("command", ["sft", "rl"])
@pytest.mark.parametrize(
    ("key", "problem"), [(None, "there is no API key"), ("short", "WANDB_API_KEY invalid")]
)
def test_tracking_without_a_login(
    refused: Refused,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    key: str | None,
    problem: str,
):
    """Found at once, and not when the trainer has started."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # wandb makes a folder there
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    arguments, flag = (SFT, "--wandb") if command == "sft" else (RL, "--trainer.wandb")
    message = refused(command, *arguments, flag, "--output-dir", tmp_path / "run")
    for what in (problem, "WANDB_API_KEY", f"{flag}.mode offline"):
        assert what in message


def test_a_login_is_found_where_wandb_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the environment or in netrc; none is needed offline or for a cluster's workers."""
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    online = SFTConfig(wandb={})
    with pytest.raises(UsageError):
        check_login(online)
    check_login(SFTConfig())
    check_login(SFTConfig(wandb={"mode": "offline"}))
    check_login(SFTConfig(wandb={}, ray={"address": "10.0.0.1:6379"}))
    host = urlsplit(wandb.setup().settings.base_url).netloc
    netrc.write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    check_login(online)
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_login(online)


def test_two_files_that_disagree(refused: Refused, tmp_path: Path):
    trainer = write(tmp_path / "train.toml", 'max_steps = 20\n[model]\nname = "a"\n')
    orchestrator = write(tmp_path / "orch.toml", "max_steps = 30\n")
    files = ("--trainer", f"@{trainer}", "--orchestrator", f"@{orchestrator}")
    message = refused("rl", *files, "--output-dir", tmp_path / "run")
    for what in ("max_steps", str(trainer), "20", str(orchestrator), "30", "--max-steps"):
        assert what in message
    orchestrator.write_text('[model]\nname = "b"\n')
    message = refused("rl", *files, "--output-dir", tmp_path / "run")
    for what in (f"{trainer} says 'a'", f"{orchestrator} says 'b'"):
        assert what in message


def test_two_sections_of_a_file_that_disagree(refused: Refused, tmp_path: Path):
    file = write(tmp_path / "rl.toml", "[trainer]\nseed = 1\n[orchestrator]\nseed = 2\n")
    message = refused("rl", "@", file, "--output-dir", tmp_path / "run")
    for what in ("seed", f"{file} [trainer] says 1", f"{file} [orchestrator] says 2"):
        assert what in message


@pytest.mark.parametrize(
    "flag",
    [
        "--trainer.max-steps",
        "--orchestrator.seed",
        "--trainer.ckpt.interval",
        "--inference.model.name",
        "--orchestrator.output-dir",
    ],
)
def test_a_shared_value_for_one_role_alone(refused: Refused, tmp_path: Path, flag: str):
    message = refused("rl", *RL, flag, 5, "--output-dir", tmp_path / "run")
    assert f"{flag}: all roles share this value" in message
    assert "--" + flag.partition(".")[2] in message


# Models, data, environments, servers


def without_weights(folder: Path) -> Path:
    """A model directory with a configuration and a tokenizer only."""
    return shutil.copytree(REPOSITORY / MODEL, folder)


@pytest.mark.parametrize("command", ["sft", "rl"])
@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "owner/model-that-is-not-there"])
def test_a_model_that_is_not_there(refused: Refused, tmp_path: Path, command: str, name: str):
    arguments = SFT if command == "sft" else ("@", f"{CONFIGS}/rl.toml")
    message = refused(command, *arguments, "--model.name", name, "--output-dir", tmp_path / "run")
    assert f"--model.name {name}: there is no such folder" in message


@pytest.mark.parametrize(
    ("command", "needs"),
    [("sft", "--model.name and --data.name"), ("rl", "--model.name"), ("trainer", "--model.name")],
)
def test_a_command_that_is_told_nothing(refused: Refused, command: str, needs: str):
    """It says what it needs, and takes no model or data of its own choice."""
    assert refused(command).startswith(f"error: {command} needs {needs}, as a flag or in a file")


def test_a_model_without_weights(refused: Refused, tmp_path: Path):
    model = without_weights(tmp_path / "model")
    data = f'[data]\nname = "{CONFIGS}/sft.jsonl"\n'
    file = write(tmp_path / "sft.toml", f'[model]\nname = "{model}"\n{data}')
    message = refused("sft", "@", file, "--output-dir", tmp_path / "run")
    assert f"--model.name {model}: it has no safetensors weights" in message
    assert "--model.init-seed" in message


def test_a_folder_that_is_no_model(refused: Refused, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    model = ("--model.name", tmp_path / "empty")
    message = refused("sft", *SFT, *model, "--output-dir", tmp_path / "run")
    assert "config.json" in message


def test_data_that_is_not_there(refused: Refused, tmp_path: Path):
    data = ("--data.name", tmp_path / "nowhere.jsonl")
    message = refused("sft", *SFT, *data, "--output-dir", tmp_path / "run")
    assert f"--data.name {tmp_path / 'nowhere.jsonl'}: there is no such file" in message


def test_data_that_the_hub_has_not(refused: Refused, tmp_path: Path):
    """Neither a file nor a folder, and not to be fetched."""
    data = ("--data.name", "nowhere/data-that-is-not-there")
    message = refused("sft", *SFT, *data, "--output-dir", tmp_path / "run")
    assert "--data.name nowhere/data-that-is-not-there: " in message
    assert "--data.split (now train)" in message


def test_an_empty_data_file(refused: Refused, tmp_path: Path):
    """Found before Ray is started."""
    data = write(tmp_path / "empty.jsonl", "")
    message = refused("sft", *SFT, "--output-dir", tmp_path / "run", "--data.name", data)
    assert message == f"error: --data.name {data}: the file is empty\n"


def test_a_folder_instead_of_a_config_file(refused: Refused, tmp_path: Path):
    """It is named."""
    assert refused("sft", "@", tmp_path) == f"error: {tmp_path}: Is a directory\n"


@pytest.mark.parametrize("flag", ["--output-dir", "--ckpt.dir"])
def test_a_folder_that_can_not_be_written_to(call: Callable[..., Finished], tmp_path: Path, flag: str):
    """Found at once, and not when the first checkpoint is due."""
    file = write(tmp_path / "file", "")
    flags = {"--output-dir": tmp_path / "run", flag: file / "below"}
    finished = call("sft", *SFT, "--ckpt", *(part for pair in flags.items() for part in pair))
    assert finished.code == 2, finished.output
    assert f"{flag} {file / 'below'}" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("name", "reverse_txt"), "'reverse_txt': not one of calculator, reverse_text"),
        (("name", "no_such_module:Class"), "No module named 'no_such_module'"),
        (("name", "cairn.orchestrator.environments:Nothing"), "Nothing"),
        (("name", "builtins:list"), "it has no method messages(problem)"),
        (("name", "wrong_environments:Texts"), "messages(0) must return a list of messages"),
        (("name", "wrong_environments:Empty"), "it has no problems: len() of it is 0"),
        (("args", '{"problem": 4}'), "problem"),
        (("args", '{"min_length": 5, "max_length": 4}'), "min_length <= max_length"),
        (("args", '{"problems": 0}'), "problems must be >= 1"),
    ],
)
def test_an_environment_that_can_not_be_made(refused: Refused, tmp_path: Path, flags: tuple, what: str):
    flag = f"--orchestrator.environment.{flags[0]}"
    message = refused("rl", *RL, flag, flags[1], "--output-dir", tmp_path / "run")
    assert "orchestrator.environment" in message
    assert what in message


def test_an_environment_that_can_not_be_made_for_the_orchestrator_alone(refused: Refused, tmp_path: Path):
    arguments = ("--environment.name", "reverse_txt", "--output-dir", tmp_path / "run")
    message = refused("orchestrator", "@", f"{CONFIGS}/orch.toml", *arguments)
    assert "'reverse_txt': not one of calculator, reverse_text" in message


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://127.0.0.1:8000"])
def test_a_server_address_that_is_none(refused: Refused, tmp_path: Path, url: str):
    arguments = ("--orchestrator.inference-url", url, "--output-dir", tmp_path / "run")
    message = refused("rl", *RL, *arguments)
    assert "--orchestrator.inference-url" in message
    assert repr(url) in message
    assert "http://" in message


def test_an_orchestrator_without_a_server(refused: Refused, tmp_path: Path):
    message = refused("orchestrator", "--output-dir", tmp_path / "run")
    assert "--inference-url" in message


def test_a_server_that_does_not_run(refused: Refused, tmp_path: Path):
    """Exit code 1: the command line is right. The message has the address and the command to start one."""
    url = f"http://127.0.0.1:{free_port()}"
    arguments = ("--orchestrator.inference-url", url, "--output-dir", tmp_path / "run")
    message = refused("rl", *RL, *arguments, code=1)
    assert url in message
    assert "uv run inference" in message


def test_a_server_that_does_not_come_back(call: Callable[..., Finished], tmp_path: Path):
    """A run that goes on gives it time, and says so: whatever ended the run may have ended both."""
    url = f"http://127.0.0.1:{free_port()}"
    arguments = ("--orchestrator.inference-url", url, "--output-dir", tmp_path / "run")
    patience = ("--ckpt.resume", "auto", "--orchestrator.server-timeout", 1)
    finished = call("rl", *RL, *arguments, *patience)
    assert finished.code == 1, finished.output
    waiting, error = finished.output.splitlines()
    assert waiting.startswith("waiting for the inference server, at most 1 s (--orchestrator.server-timeout)")
    assert error.startswith("error: ")
    assert "uv run inference" in error


# Checkpoints to go on from


def copy(trained: Path, folder: Path) -> Path:
    """A copy of a run with the steps 100 and 200, to be spoiled."""
    return shutil.copytree(trained, folder)


def test_nothing_is_left_to_do(refused: Refused, trained: Path, tmp_path: Path):
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--ckpt.resume", "latest")
    for steps in (200, 150):
        message = refused("sft", *SFT, *run, "--max-steps", steps)
        assert f"--max-steps {steps}" in message
        assert "the run resumes from step 200" in message


def test_a_run_that_is_complete(call: Callable[..., Finished], trained: Path, tmp_path: Path):
    """Whoever runs the command again until it ends with 0 is told so, and nothing is touched."""
    run = copy(trained, tmp_path / "run")
    before = everything_in(run)
    for steps in (200, 150):
        finished = call("sft", *SFT, "--output-dir", run, "--ckpt.resume", "auto", "--max-steps", steps)
        assert finished.code == 0, finished.output
        assert (
            f"the run is complete: {step_folder(run, 200)} is step 200 of --max-steps {steps}"
            in finished.output
        )
    assert everything_in(run) == before


def test_no_more_steps_than_are_done(refused: Refused, trained: Path, tmp_path: Path):
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--ckpt.resume-step", 100)
    message = refused("sft", *SFT, *run, "--max-steps", 100)
    assert "--max-steps 100" in message
    assert "the run resumes from step 100" in message


def test_a_step_that_is_not_there(refused: Refused, trained: Path, tmp_path: Path):
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--max-steps", 300)
    message = refused("sft", *SFT, *run, "--ckpt.resume-step", 150)
    assert "--ckpt.resume-step 150" in message
    assert "100, 200" in message


def test_a_step_of_a_run_that_has_none(refused: Refused, tmp_path: Path):
    message = refused("sft", *SFT, "--output-dir", tmp_path / "run", "--ckpt.resume-step", 20)
    assert "--ckpt.resume-step 20" in message
    assert "there are none" in message


def test_latest_of_a_run_that_has_none(refused: Refused, tmp_path: Path):
    message = refused("sft", *SFT, "--output-dir", tmp_path / "run", "--ckpt.resume", "latest")
    assert "--ckpt.resume latest" in message
    assert str(tmp_path / "run" / "checkpoints") in message


def test_two_ways_to_go_on(refused: Refused, tmp_path: Path):
    both = ("--ckpt.resume-step", 20, "--ckpt.resume", "latest")
    message = refused("sft", *SFT, *both, "--output-dir", tmp_path / "run")
    assert "resume_step = 20" in message
    assert "resume = 'latest'" in message


@pytest.mark.parametrize("flags", [(), ("--ckpt",), ("--ckpt.interval", 10)])
def test_a_run_with_checkpoints_is_not_started_anew(
    refused: Refused, trained: Path, tmp_path: Path, flags: tuple
):
    run = copy(trained, tmp_path / "run")
    message = refused("sft", *SFT, "--output-dir", run, "--max-steps", 300, *flags)
    for what in (str(run), "up to step 200", "--ckpt.resume-step 200", "--ckpt.resume auto", "--output-dir"):
        assert what in message


def test_a_path_that_is_no_checkpoint(refused: Refused, trained: Path, tmp_path: Path):
    end = ("--output-dir", tmp_path / "run", "--max-steps", 300)
    message = refused("sft", *SFT, *end, "--ckpt.resume", tmp_path / "step_5")
    assert str(tmp_path / "step_5") in message
    half = shutil.copytree(step_folder(trained, 100), tmp_path / "step_100")
    (half / "manifest.json").unlink()
    message = refused("sft", *SFT, *end, "--ckpt.resume", half)
    assert f"{half} is not a checkpoint" in message
    assert "never completed" in message


def test_a_step_that_was_never_committed_is_not_there(refused: Refused, trained: Path, tmp_path: Path):
    run = copy(trained, tmp_path / "run")
    (step_folder(run, 200) / "manifest.json").unlink()
    end = ("--output-dir", run, "--max-steps", 100)
    message = refused("sft", *SFT, *end, "--ckpt.resume-step", 200)
    assert "there are the steps 100" in message
    assert "the run resumes from step 100" in refused("sft", *SFT, *end, "--ckpt.resume", "latest")


def test_a_damaged_step(refused: Refused, trained: Path, tmp_path: Path):
    """Asked for by number it is an error that names the file."""
    run = copy(trained, tmp_path / "run")
    end = ("--output-dir", run, "--max-steps", 300)
    file = step_folder(run, 200) / "trainer" / "state.json"
    flip(file, file.stat().st_size // 2)
    assert str(file) in refused("sft", *SFT, *end, "--ckpt.resume-step", 200)
    file = step_folder(run, 100) / "model" / "model.safetensors"
    flip(file, file.stat().st_size // 2)
    assert str(file) in refused("sft", *SFT, *end, "--ckpt.resume-step", 100)


@pytest.mark.parametrize("which", ["latest", "auto"])
def test_a_damaged_step_is_passed_over(
    call: Callable[..., Finished], trained: Path, tmp_path: Path, which: str
):
    run = copy(trained, tmp_path / "run")
    file = step_folder(run, 200) / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    before = everything_in(tmp_path)
    finished = call("sft", *SFT, "--output-dir", run, "--max-steps", 100, "--ckpt.resume", which)
    assert finished.code == (2 if which == "latest" else 0)
    assert str(file) in finished.output
    assert ("the run resumes from step 100" if which == "latest" else "is step 100 of") in finished.output
    assert everything_in(tmp_path) == before


def test_a_checkpoint_without_the_other_roles_part(refused: Refused, trained: Path, tmp_path: Path):
    """RL can't go on from an SFT checkpoint; the message says how to start from its weights."""
    step = step_folder(trained, 200)
    arguments = ("--output-dir", tmp_path / "run", "--max-steps", 300, "--ckpt.resume", step)
    message = refused("rl", "@", f"{CONFIGS}/rl.toml", *arguments)
    assert "no orchestrator part" in message
    assert f"--model.name {step}" in message


def test_another_seed_than_before(refused: Refused, trained: Path, tmp_path: Path):
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--max-steps", 300, "--ckpt.resume-step", 100)
    message = refused("sft", *SFT, *run, "--seed", 5)
    assert "--seed 5" in message
    assert "--seed 0" in message


def test_another_model_than_before(refused: Refused, trained: Path, tmp_path: Path):
    model = without_weights(tmp_path / "model")
    config = read(model / "config.json")
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--max-steps", 300, "--ckpt.resume-step", 100)
    message = refused("sft", *SFT, *run, "--model.name", model)
    assert f"--model.name {model}" in message
    assert "num_hidden_layers 3 there, 5 here" in message


def test_another_data_set_than_before(refused: Refused, trained: Path, tmp_path: Path):
    """A position in one means nothing in another."""
    records = (REPOSITORY / CONFIGS / "sft.jsonl").read_text().splitlines()
    data = write(tmp_path / "other.jsonl", "\n".join(records[:-1]) + "\n")
    run = ("--output-dir", copy(trained, tmp_path / "run"), "--max-steps", 300, "--ckpt.resume-step", 100)
    message = refused("sft", *SFT, *run, "--data.name", data)
    assert f"--data.name: {len(records)} records" in message
    assert f"-> {len(records) - 1} records" in message
    assert "--ckpt.accept-changes data" in message


def test_other_versions_of_packages_are_a_warning(
    call: Callable[..., Finished], trained: Path, tmp_path: Path
):
    """It names both."""
    run = copy(trained, tmp_path / "run")
    path = step_folder(run, 200) / "manifest.json"
    manifest = read(path)
    versions = {**manifest["versions"], "torch": "1.2.3"}
    path.write_text(json.dumps({**manifest, "versions": versions}))
    finished = call("sft", *SFT, "--output-dir", run, "--max-steps", 200, "--ckpt.resume", "latest")
    assert (
        f"warning: torch is {manifest['versions']['torch']} now and was 1.2.3 at step 200" in finished.output
    )


def test_a_model_of_a_step_that_was_never_committed(refused: Refused, trained: Path, tmp_path: Path):
    run = copy(trained, tmp_path / "run")
    (step_folder(run, 200) / "manifest.json").unlink()
    model = ("--model.name", step_folder(run, 200))
    message = refused("sft", *SFT, *model, "--output-dir", tmp_path / "next")
    assert "never completed" in message


def test_a_folder_without_checkpoints(refused: Refused, tmp_path: Path):
    for command in ("list", "verify"):
        assert str(tmp_path) in refused("ckpt", command, tmp_path)


def test_a_folder_that_another_run_is_at_work_in(shell: Shell, tmp_path: Path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert run.lock()
    before = everything_in(tmp_path)
    finished = shell.run("sft", *SFT, "--output-dir", run.path)
    assert finished.code == 2
    assert f"--output-dir {run.path}: another process is running in it" in finished.output
    assert everything_in(tmp_path) == before


# The commands themselves


def test_exit_codes_of_the_commands(shell: Shell, tmp_path: Path):
    """What the cases above check within a process, once with real ones."""
    end = ("--output-dir", tmp_path / "run")
    wrong = shell.run("sft", *SFT, "--max-stepss", 3, *end)
    assert (wrong.code, wrong.output.count("\n")) == (2, 1)
    url = ("--orchestrator.inference-url", f"http://127.0.0.1:{free_port()}")
    assert shell.run("rl", *RL, *url, *end).code == 1
    assert list(everything_in(tmp_path)) == [str(tmp_path)]


def test_output_that_nobody_reads():
    """As with `| head`: no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    sft = Path(sys.executable).with_name("sft")
    done = subprocess.run(
        [sft, *SFT, "--dry-run"], cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, without_progress(done.stderr)) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sft", SFT),
        ("rl", RL),
        ("rl", ("@", f"{CONFIGS}/rl.toml")),
        ("trainer", ("@", f"{CONFIGS}/train.toml")),
        ("orchestrator", ("@", f"{CONFIGS}/orch.toml")),
        ("inference", ("@", f"{CONFIGS}/infer.toml")),
    ],
)
def test_a_dry_run_prints_what_can_be_given_back(
    call: Callable[..., Finished], tmp_path: Path, name: str, arguments: tuple
):
    """The resolved configuration as JSON; nothing starts, nothing is written."""
    changed = ("--port", 8123) if name == "inference" else ("--max-steps", 7, "--ckpt")
    finished = call(name, *arguments, *changed, "--dry-run")
    assert finished.code == 0
    config = resolved(finished)
    if name == "inference":
        assert config["port"] == 8123
    else:
        assert config["max_steps"] == 7
        assert config["ckpt"] is not None
        assert config["output_dir"].startswith(str(Path("outputs/reverse_text_").absolute()))
    assert list(everything_in(tmp_path)) == [str(tmp_path)]
    file = write(tmp_path / "resolved.json", json.dumps(config))
    again = call(name, "@", file)
    assert again.code == 0
    assert resolved(again) == config
    assert sorted(everything_in(tmp_path)) == sorted([str(tmp_path), str(file)])


def test_a_dry_run_of_rl_hands_shared_values_to_every_role(call: Callable[..., Finished]):
    shared = ("--max-steps", 7, "--seed", 3, "--ckpt.interval", 2, "--model.name", "m", "--output-dir", "o")
    config = resolved(call("rl", *RL, *shared, "--dry-run"))
    for part in (config, config["trainer"], config["orchestrator"]):
        assert (part["max_steps"], part["seed"]) == (7, 3)
        assert part["output_dir"] == str(Path("o").absolute())
        assert part["ckpt"]["interval"] == 2
        assert part["model"]["name"] == "m"
    assert config["inference"]["model"]["name"] == "m"
    assert config["trainer"]["optimizer"]["lr"] == 4e-4
    assert config["orchestrator"]["inference_url"] == ["http://127.0.0.1:8000"]


def test_rl_in_one_file_is_rl_in_two(call: Callable[..., Finished]):
    """rl.toml says what train.toml and orch.toml say, apart from the server."""
    one = resolved(call("rl", "@", f"{CONFIGS}/rl.toml", "--dry-run"))
    two = resolved(call("rl", *RL, "--dry-run"))
    server = resolved(call("inference", "@", f"{CONFIGS}/infer.toml", "--dry-run"))
    assert one["orchestrator"].pop("inference_url") == []
    two["orchestrator"].pop("inference_url")
    for part in ("trainer", "orchestrator", "model", "max_steps", "seed", "output_dir"):
        assert one[part] == two[part]
    for config in (one["inference"], server):
        del config["port"]
        del config["dry_run"]
    assert one["inference"].pop("servers") == 1, "one server, as the command starts it"
    assert one["inference"] == server


def test_every_example_is_used_by_a_test():
    """Of configs/reverse_text: a TOML file by a string in a test's code, data and model by a TOML file."""
    tests = [*Path(__file__).parent.glob("test_*.py"), REPOSITORY / "tests" / "runs.py"]
    used = {string for path in tests for string in strings_of(path)}
    named = set()
    for path in (REPOSITORY / CONFIGS).glob("*.toml"):
        assert any(string.endswith(f"/{path.name}") for string in used), path
        named |= {Path(value).name for value in values_of(tomllib.loads(path.read_text()))}
    others = {path.name for path in (REPOSITORY / CONFIGS).iterdir() if path.suffix != ".toml"}
    assert others <= named


def strings_of(path: Path) -> Iterator[str]:
    """The strings in a file's code, of which docstrings and comments are none."""
    tree = syntax_tree(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def values_of(content: Any) -> Iterator[str]:
    """The strings of a configuration."""
    for value in content.values() if isinstance(content, dict) else content:
        if isinstance(value, dict | list):
            yield from values_of(value)
        elif isinstance(value, str):
            yield value
