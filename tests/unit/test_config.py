"""Configuration: light to import, said in help, and the same whichever way it is given."""

import ast
import inspect
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_config import BaseConfig

from cairn.config.ckpt import CkptConfig
from cairn.config.cli import load
from cairn.config.inference import InferenceConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import SHARED, RLConfig
from cairn.config.trainer import SFTConfig, TrainerConfig
from cairn.run.errors import UsageError

COMMANDS = {
    "sft": SFTConfig,
    "rl": RLConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
}
HEAVY = {"torch", "ray", "vllm", "transformers", "datasets", "numpy", "wandb", "fastapi"}


def imported_by(code: str) -> set[str]:
    """The top-level modules that are imported after `code` has run in a fresh process."""
    code += "\nimport sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_config_models_import_nothing_heavy():
    """So that --help answers at once."""
    modules = sorted(path.stem for path in Path(inspect.getfile(CkptConfig)).parent.glob("*.py"))
    assert {"cli", "trainer", "orchestrator", "inference", "rl"} <= set(modules)
    code = "\n".join(f"import cairn.config.{module}" for module in modules if module != "__init__")
    assert not imported_by(code) & HEAVY


@pytest.mark.parametrize("command", [*COMMANDS, "ckpt"])
def test_help_imports_nothing_heavy(command: str):
    """`--help` of every command, up to where it ends."""
    code = (
        f"import sys; sys.argv = ['{command}', '--help']\n"
        "from cairn.launch import main\n"
        f"try: main.{command}()\n"
        "except SystemExit as exit: assert exit.code == 0\n"
    )
    assert not imported_by(code) & HEAVY


@pytest.mark.parametrize("command", [*COMMANDS, "ckpt"])
def test_help_of_the_installed_command(command: str):
    """Each command is there, and its help has a usage line and ends with code 0."""
    path = Path(sys.executable).parent / command
    done = subprocess.run([path, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: {command}" in done.stdout


def models(annotation: object) -> list[type[BaseModel]]:
    """The configuration models within a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


def nested(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A configuration model with all models below it."""
    below = [inner for field in model.model_fields.values() for inner in models(field.annotation)]
    return {model}.union(*(nested(inner) for inner in below))


def field_docstrings(model: type[BaseModel]) -> set[str]:
    """The fields that a string literal follows, in the class or in one that it extends."""
    documented = set()
    for cls in model.__mro__:
        if cls in (object, BaseModel, BaseConfig):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                documented.add(statement.target.id)
    return documented


ALL = sorted(set().union(*map(nested, COMMANDS.values())), key=lambda model: model.__name__)


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_every_key_has_a_docstring(model: type[BaseModel]):
    """Sections, whose class has one, may do without."""
    assert model.__doc__
    documented = field_docstrings(model)
    for name, field in model.model_fields.items():
        assert name in documented or models(field.annotation), f"{model.__name__}.{name}"


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_unknown_keys_are_errors(model: type[BaseModel]):
    """In every section."""
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        model.model_validate({"no_such_key": 1})


# The flags that every user meets, and for each what it sets.
FLAGS = {
    "sft": ["model.name", "seed", "max-steps", "output-dir", "workers", "scheduler.steps", "ray.address"],
    "rl": ["model.name", "seed", "max-steps", "output-dir", "trainer.workers", "orchestrator.inference-url"],
    "trainer": ["model.name", "seed", "max-steps", "output-dir", "workers", "scheduler.steps", "ray.address"],
    "orchestrator": ["model.name", "seed", "max-steps", "output-dir", "inference-url"],
    "inference": ["model.name", "host", "port"],
}
CKPT_FLAGS = ["ckpt.interval", "ckpt.dir", "ckpt.resume-step", "ckpt.resume"]
VALUES = {
    **{flag: 3 for flag in ("seed", "max-steps", "workers", "trainer.workers", "port", "scheduler.steps")},
    **{"ckpt.interval": 3, "ckpt.resume-step": 3},
    **{"inference-url": ["http://h:1"], "orchestrator.inference-url": ["http://h:1"]},
}


def documented_flags() -> Iterator[tuple[str, str]]:
    for command, flags in FLAGS.items():
        for flag in flags + (CKPT_FLAGS if command != "inference" else []):
            yield command, flag


@pytest.mark.parametrize(("command", "flag"), list(documented_flags()))
def test_documented_flags_exist(command: str, flag: str):
    """And set the key that they are named after."""
    value = VALUES.get(flag, "x")
    text = value[0] if isinstance(value, list) else str(value)
    config = load(COMMANDS[command], [f"--{flag}", text])
    for key in flag.split("."):
        config = getattr(config, key.replace("-", "_"))
    assert config == value


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("top-p", "0.9", "answers from the whole distribution .* lower sampling.temperature"),
        ("temperature", "0.001", "greater than or equal to 0.01"),
        ("temperature", "inf", "finite"),
        ("temperature", "nan", "."),
    ],
)
def test_sampling_that_the_loss_can_not_account_for_is_refused(flag: str, value: str, reason: str):
    """Ratios of logprobs would be wrong in silence. vLLM takes temperatures below 0.01 for 0.01."""
    with pytest.raises(UsageError, match=rf"(?s)--sampling\.{flag}: .*{reason}"):
        load(OrchestratorConfig, [f"--sampling.{flag}", value])
    assert load(OrchestratorConfig, ["--sampling.top-p", "1.0"]).sampling.top_p == 1.0


@pytest.mark.parametrize("command", ["sft", "rl", "trainer", "orchestrator"])
def test_the_bare_flag_turns_checkpoints_on(command: str):
    """With their defaults; without it there are none."""
    assert load(COMMANDS[command], []).ckpt is None
    assert load(COMMANDS[command], ["--ckpt"]).ckpt == CkptConfig()


@pytest.mark.parametrize("at", [["@", "{}"], ["@{}"]])
def test_files_with_and_without_a_space_and_flags_over_them(tmp_path: Path, at: list[str]):
    """`@file` is `@ file`; later files and flags win."""
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("seed = 1\nmax_steps = 10\n[optimizer]\nlr = 0.1\neps = 0.5\n")
    second.write_text("max_steps = 20\n[optimizer]\nlr = 0.2\n")
    argv = [part.format(path) for path in (first, second) for part in at]
    config = load(SFTConfig, [*argv, "--optimizer.lr", "0.3"])
    assert (config.seed, config.max_steps) == (1, 20)
    assert (config.optimizer.lr, config.optimizer.eps) == (0.3, 0.5)


def test_json_is_as_good_as_toml(tmp_path: Path):
    """What --dry-run prints is a config file."""
    config = load(RLConfig, ["--max-steps", "7", "--ckpt", "--trainer.optimizer.lr", "0.5"])
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    assert load(RLConfig, ["@", str(path)]) == config


@pytest.mark.parametrize("role", SHARED)
def test_a_shared_value_from_one_file_reaches_all_roles(tmp_path: Path, role: str):
    """Whichever role's file it stands in."""
    path = tmp_path / "role.toml"
    path.write_text('[model]\nname = "m"\ninit_seed = 4\n')
    config = load(RLConfig, [f"--{role}", f"@{path}"])
    for part in (config, config.trainer, config.orchestrator, config.inference):
        assert (part.model.name, part.model.init_seed) == ("m", 4)


def test_a_flag_over_two_files_that_disagree(tmp_path: Path):
    """It decides for all; for other keys they still have to agree."""
    trainer, orchestrator = tmp_path / "t.toml", tmp_path / "o.toml"
    trainer.write_text("max_steps = 1\n[ckpt]\ninterval = 1\n")
    orchestrator.write_text("max_steps = 2\n[ckpt]\ninterval = 1\n")
    argv = ["--trainer", f"@{trainer}", "--orchestrator", "@", str(orchestrator)]
    with pytest.raises(UsageError, match=r"max_steps: .*t\.toml says 1, .*o\.toml says 2"):
        load(RLConfig, argv)
    config = load(RLConfig, [*argv, "--max-steps", "3"])
    assert {config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps} == {3}
    assert config.ckpt.interval == config.trainer.ckpt.interval == config.orchestrator.ckpt.interval == 1
    orchestrator.write_text("[ckpt]\ninterval = 2\n")
    with pytest.raises(UsageError, match=r"ckpt\.interval: .* says 1, .* says 2; .*--ckpt\.interval"):
        load(RLConfig, [*argv, "--max-steps", "3"])


def test_server_addresses():
    """One or several; a slash at the end does no harm."""
    assert load(OrchestratorConfig, ["--inference-url", "http://a:1/"]).inference_url == ["http://a:1"]
    config = OrchestratorConfig(inference_url=["http://a:1", "https://b"])
    assert config.inference_url == ["http://a:1", "https://b"]
    with pytest.raises(UsageError, match=r"--inference-url: 'a:1' is not a URL"):
        load(OrchestratorConfig, ["--inference-url", "a:1"])


def test_help_and_dry_run_end_the_process(capsys: pytest.CaptureFixture[str]):
    """With code 0, having printed help, or the configuration as JSON."""
    with pytest.raises(SystemExit) as ended:
        load(SFTConfig, ["--help"])
    assert ended.value.code == 0
    assert "--optimizer.lr" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        load(SFTConfig, ["--max-steps", "7", "--dry-run"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["max_steps"] == 7
