"""Configuration: light to import, said in help, and the same whichever way it is given."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

import draws
import pytest
from pydantic import BaseModel, Discriminator, Tag, ValidationError
from tiny import EXAMPLE

import cairn
from cairn.config import hints, other_names
from cairn.config.ckpt import CkptConfig
from cairn.config.cli import COMMANDS, hidden_settings, load, require, shared_settings
from cairn.config.inference import InferenceConfig
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.preferences import DPOConfig
from cairn.config.rl import SHARED, RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.settings import BaseConfig, settings_of
from cairn.config.trainer import SFTConfig
from cairn.launch import main
from cairn.launch.plan.model import resolve_model
from cairn.run.errors import UsageError
from cairn.run.extensions import syntax_tree

HEAVY = {"torch", "ray", "vllm", "transformers", "datasets", "numpy", "wandb", "fastapi", "yaml"}


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


@pytest.mark.slow
def test_a_launcher_imports_neither_torch_nor_ray(tmp_path: Path):
    """Its roles do, in processes of their own: `rl` has checked all but the server when it is refused."""
    arguments = ["@", "configs/reverse_text/rl.toml", "--output-dir", str(tmp_path / "run")]
    server = ["--orchestrator.inference-url", "http://127.0.0.1:9"]
    code = (
        f"import sys; sys.argv = ['rl', *{arguments + server}]\n"
        "from cairn.launch import main\n"
        "assert main.rl() == 1\n"
    )
    assert not imported_by(code) & {"torch", "transformers", "ray", "vllm", "datasets"}


@pytest.mark.slow
@pytest.mark.parametrize("command", draws.cases([*COMMANDS, "ckpt"], "help", 4))
def test_help_of_the_installed_command(command: str):
    """Each command is there; its help has a usage line, ends with code 0, and imports nothing heavy."""
    path = Path(sys.executable).parent / command
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # names what is imported on stderr
    done = subprocess.run([path, "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"usage: {command}" in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "cairn" in imported
    assert not imported & HEAVY


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
        (definition,) = syntax_tree(textwrap.dedent(inspect.getsource(cls))).body
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


PATHS = ("output-dir", "ckpt.dir", "ckpt.resume")
"""Which are absolute once they are read."""


@pytest.mark.parametrize(("command", "flag"), list(documented_flags()))
def test_documented_flags_exist(command: str, flag: str):
    """And set the key that they are named after."""
    value = VALUES.get(flag, "x")
    text = value[0] if isinstance(value, list) else str(value)
    config = load(COMMANDS[command], [f"--{flag}", text])
    for key in flag.split("."):
        config = getattr(config, key.replace("-", "_"))
    is_path = flag in PATHS
    assert config == (os.path.abspath(value) if is_path else value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--logprobs-mode=raw_logprobs", "runs depend on its value"),
        ("--override-generation-config.top_k=5", "runs depend on its value"),
        ("--logits_processors=a:B", "runs depend on its value"),
        ("--generation_config", "runs depend on its value"),
        ('--hf-overrides={"rope_theta": 1}', "runs depend on its value"),  # the trainer would not follow
        ("--port=1", "set it with --port"),
        ("--tensor-parallel-size", "set it with --tensor-parallel"),
    ],
)
def test_arguments_of_vllm_that_are_cairns_are_refused(argument: str, message: str):
    """Raw logprobs, for one, would make every ratio wrong at another temperature than 1."""
    with pytest.raises(UsageError, match=f"{argument} is an argument that Cairn sets itself; {message}"):
        load(InferenceConfig, ["--model.name", "m/m", f"--vllm-args={argument}"])


def test_a_mistake_in_a_section_with_types_names_the_section():
    with pytest.raises(UsageError, match=r"^--trainer\.loss: aggregation = 'constant' needs"):
        load(RLConfig, ["--model.name", "m/m", "--trainer.loss.aggregation", "constant"])


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("top-p", "0.9", "answers from the whole distribution .* lower sampling.temperature"),
        ("temperature", "0.001", "at least 0.01"),
        ("temperature", "2.5", "2"),
        ("temperature", "inf", "."),
        ("temperature", "nan", "."),
    ],
)
def test_sampling_that_the_loss_can_not_account_for_is_refused(flag: str, value: str, reason: str):
    """Ratios of logprobs would be wrong in silence. vLLM takes temperatures below 0.01 for 0.01."""
    with pytest.raises(UsageError, match=rf"(?s)--sampling\.{flag}: .*{reason}"):
        load(OrchestratorConfig, [f"--sampling.{flag}", value])
    assert load(OrchestratorConfig, ["--sampling.top-p", "1.0"]).sampling.top_p == 1.0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ("reverse_text", {"problems": 4, "seed": 1})),
        (["--environment.name", "reverse_text"], ("reverse_text", {"problems": 4, "seed": 1})),
        (["--environment.args.seed", "2"], ("reverse_text", {"problems": 4, "seed": 2})),
        (["--environment.args", "{}"], ("reverse_text", {})),
        (["--environment.name", "hills:Hills"], ("hills:Hills", {})),
        (["--environment.name=hills:Hills", "--environment.args.size", "2"], ("hills:Hills", {"size": 2})),
        (["--environment.args.size", "2", "--environment.name", "hills:Hills"], ("hills:Hills", {"size": 2})),
        (["--environment.args", '{"size": 2}', "--environment.name=a:A"], ("a:A", {"size": 2})),
        (["@", "{hills}"], ("hills:Hills", {"size": 3})),
        (["@", "{hills}", "--environment.args.steep", "true"], ("hills:Hills", {"size": 3, "steep": True})),
        (["@", "{hills}", "--environment.name", "reverse_text"], ("reverse_text", {})),
        (["--environment", "@{section}"], ("hills:Hills", {"size": 5})),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_another_environment_does_not_get_the_arguments_of_the_first(
    tmp_path: Path, flags: list[str], expected: tuple[str, dict], named: bool
):
    """Be it named by a flag, in whatever order, or by a later file. Without a name it is the default's."""
    first, hills, section = (tmp_path / f"{name}.toml" for name in ("first", "hills", "section"))
    name = 'name = "reverse_text"\n' if named else ""
    first.write_text(f"[environment]\n{name}args = {{ problems = 4, seed = 1 }}\n")
    hills.write_text('[environment]\nargs = { size = 3 }\nname = "hills:Hills"\n')
    section.write_text('name = "hills:Hills"\nargs = { size = 5 }\n')
    flags = [flag.replace("{hills}", str(hills)).replace("{section}", str(section)) for flag in flags]
    environment = load(OrchestratorConfig, ["@", str(first), *flags]).environment
    assert (environment.name, environment.args) == expected
    of_role = [f"--orchestrator.{flag[2:]}" if flag.startswith("--") else flag for flag in flags]
    if "@" not in flags:
        assert (
            load(RLConfig, ["--orchestrator", f"@{first}", *of_role]).orchestrator.environment == environment
        )


@pytest.mark.parametrize("command", ["sft", "rl", "trainer", "orchestrator"])
def test_the_bare_flag_turns_checkpoints_on(command: str):
    """With their defaults; without it there are none."""
    assert load(COMMANDS[command], []).ckpt is None
    assert load(COMMANDS[command], ["--ckpt"]).ckpt == CkptConfig()


def test_ranks_listen_towards_the_first_server_that_is_elsewhere():
    """Unless they are told where to listen; with servers on this machine only they stay on loopback."""

    def host(*urls: str, **trainer: str) -> str | None:
        config = RLConfig(trainer=trainer, orchestrator={"inference_url": list(urls)})
        return config.towards_servers().trainer.weight_host

    assert host("http://127.0.0.1:8000", "http://localhost:8001", "http://[::1]:8002") is None
    assert host("http://127.0.0.1:8000", "http://gpu7:8000", "http://10.0.0.9:8000") == "gpu7"
    assert host("http://10.0.0.9:8000", weight_host="10.1.0.1") == "10.1.0.1"
    for nowhere in ("0.0.0.0", "::"):
        with pytest.raises(UsageError, match=r"--weight-host: .* no address that servers can connect to"):
            load(TrainerConfig, ["--weight-host", nowhere])


def test_servers_of_a_run_compute_adapters_if_they_are_to():
    """Up to the run's rank or a larger one; they would take nothing else."""
    unmerged = {"lora": {"rank": 24, "serve": "unmerged"}}
    assert RLConfig(trainer=unmerged).inference.max_lora_rank == 24
    assert RLConfig(trainer=unmerged, inference={"max_lora_rank": 64}).inference.max_lora_rank == 64
    assert RLConfig(trainer={"lora": {"serve": "adapter"}}).inference.max_lora_rank is None
    for steps, found in ((1, 4), (8, 10)):  # so that no answer waits for those of older policies
        config = RLConfig(trainer=unmerged, orchestrator={"max_off_policy_steps": steps})
        assert config.inference.max_loras == found
    with pytest.raises(ValueError, match=r"max_lora_rank = 8 is less than trainer.lora.rank = 24"):
        RLConfig(trainer=unmerged, inference={"max_lora_rank": 8})
    for trainer in ({}, {"lora": {"serve": "adapter"}}):
        with pytest.raises(ValueError, match="such a server takes nothing but adapters"):
            RLConfig(trainer=trainer, inference={"max_lora_rank": 8})
    with pytest.raises(ValueError, match="--enable-lora is an argument that Cairn sets itself"):
        InferenceConfig(vllm_args=["--enable-lora"])


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


CKPT_50 = ["--ckpt.interval", "50"]


@pytest.mark.parametrize(
    ("command", "argv", "path", "value"),
    [
        ("sft", ["--ckpt.interval=5"], "ckpt.interval", 5),
        ("sft", ["--wandb.mode=offline"], "wandb.mode", "offline"),
        ("sft", ["--max-steps=7"], "max_steps", 7),
        ("sft", ["--max_steps", "7"], "max_steps", 7),
        ("sft", ["--optimizer.betas", "0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        ("sft", ["--optimizer.betas", "[0.8, 0.9]"], "optimizer.betas", (0.8, 0.9)),
        ("sft", ["--optimizer.betas=0.8,0.9"], "optimizer.betas", (0.8, 0.9)),
        ("rl", ["--trainer.optimizer.betas", "0.8", "0.9"], "trainer.optimizer.betas", (0.8, 0.9)),
        ("sft", ["--ckpt.milestones", "5", "10"], "ckpt.milestones", [5, 10]),
        ("sft", ["--ckpt.milestones", "5", "--seed", "1"], "ckpt.milestones", [5]),
        ("sft", ["--no-data.shuffle"], "data.shuffle", False),
        ("sft", ["--data.no-shuffle"], "data.shuffle", False),
        ("sft", ["--data.shuffle", "false"], "data.shuffle", False),
        ("sft", ["--data.shuffle=false"], "data.shuffle", False),
        ("sft", ["--compile"], "compile", True),
        ("sft", ["--no-ckpt.save-async"], "ckpt.save_async", False),
        ("sft", ["--ckpt.save-async", "False"], "ckpt.save_async", False),
        ("sft", [*CKPT_50, "--ckpt"], "ckpt.interval", 50),
        ("sft", [*CKPT_50, "--no-ckpt"], "ckpt", None),
        ("sft", [*CKPT_50, "--ckpt", "None"], "ckpt", None),
        ("sft", ["--ckpt.keep", "3"], "ckpt.keep_last", 3),
        ("sft", ["--ckpt.interval", "None"], "ckpt.interval", None),
        ("sft", ["--ckpt.resume-step", "-1"], "ckpt.resume", "latest"),
        ("sft", ["--ckpt.resume-step", "-1"], "ckpt.resume_step", None),
        ("inference", ["--vllm-args", "a", "b"], "vllm_args", ["a", "b"]),
        ("inference", ["--vllm-args=--enforce-eager"], "vllm_args", ["--enforce-eager"]),
        (
            "orchestrator",
            ["--inference-url", "http://a", "http://b"],
            "inference_url",
            ["http://a", "http://b"],
        ),
        ("orchestrator", ["--environment.args", '{"a": [1]}'], "environment.args", {"a": [1]}),
        ("orchestrator", ["--environment.args.min-length", "3"], "environment.args", {"min_length": 3}),
    ],
)
def test_how_flags_are_written(command: str, argv: list[str], path: str, value: object):
    """With a space or =, lists as words, JSON or numbers with commas, switches with and without a value."""
    config = load(COMMANDS[command], argv)
    for key in path.split("."):
        config = getattr(config, key)
    assert config == value


def test_a_flag_replaces_a_files_table(tmp_path: Path):
    """As a whole, so that a flag can choose another environment; a single key is added to it."""
    path = tmp_path / "o.toml"
    path.write_text("[environment]\nargs = { problems = 3, seed = 1 }\n")
    args = load(OrchestratorConfig, ["@", str(path), "--environment.args", "{}"]).environment.args
    assert args == {}
    args = load(OrchestratorConfig, ["@", str(path), "--environment.args.seed", "2"]).environment.args
    assert args == {"problems": 3, "seed": 2}


def test_a_section_of_several_kinds_in_files_and_flags(tmp_path: Path):
    """Another `type` drops what was said of the first one; else settings are added."""

    class Round(BaseConfig):
        type: Literal["round"] = "round"
        radius: float = 1.0

    class Square(BaseConfig):
        type: Literal["square"] = "square"
        side: float = 1.0

    class Shape(BaseConfig):
        dry_run: bool = False
        machine: str | None = None
        shape: Annotated[
            Annotated[Round, Tag("round")] | Annotated[Square, Tag("square")],
            Discriminator(lambda given: given["type"] if isinstance(given, dict) else given.type),
        ] = Round()

    path = tmp_path / "shape.toml"
    path.write_text("[shape]\nradius = 3.0\n")
    assert load(Shape, ["@", str(path)]).shape == Round(radius=3)
    assert load(Shape, ["@", str(path), "--shape.type", "square"]).shape == Square()
    assert load(Shape, ["@", str(path), "--shape.type", "round"]).shape == Round(radius=3)
    assert load(Shape, ["--shape.type", "square", "--shape.side", "2"]).shape == Square(side=2)
    with pytest.raises(
        UsageError, match=r"--shape\.sid: there is no such setting; did you mean --shape\.side"
    ):
        load(Shape, ["--shape.type", "square", "--shape.sid", "2"])


FILE = "sft.toml"


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        ("sft", [FILE], "sft.toml: a configuration file is given as `@ sft.toml`"),
        ("sft", ["--config", FILE], "--config: .* a configuration file is given as `@ sft.toml`"),
        ("sft", ["-c", FILE], "-c: a configuration file is given as `@ sft.toml`"),
        ("sft", ["@"], "@ must be followed by a configuration file"),
        ("sft", ["-max-steps", "5"], "-max-steps: did you mean --max-steps"),
        ("sft", ["max_steps=5"], "max_steps=5: did you mean --max_steps=5"),
        ("sft", ["--seed", "1", "2"], "unexpected argument '2': --seed takes one value"),
        ("sft", ["--seed"], "--seed needs a value"),
        ("sft", ["--seed", "--compile"], "--seed needs a value"),
        ("sft", ["--ckpt", "true"], "--ckpt takes no 'true': --ckpt alone turns it on"),
        ("sft", ["--ckpt=false"], "--ckpt takes no 'false': --no-ckpt turns it off"),
        ("sft", ["--ckpt", "50"], r"--ckpt takes no value; did you mean --ckpt\.interval 50\?"),
        ("sft", ["--model", "m"], r"--model takes no value; did you mean --model\.name m\?"),
        ("sft", ["--optimizer"], r"--optimizer is a section; give .* such as --optimizer\.type"),
        ("rl", ["--trainer", "t.toml"], "--trainer takes a configuration file: --trainer @t.toml"),
        ("sft", ["--lr", "1"], r"--lr: there is no such setting; did you mean --optimizer\.lr\?"),
        ("rl", ["--lr", "1"], r"--lr: there is no such setting; did you mean --trainer\.optimizer\.lr or "),
        ("sft", ["--learning-rate", "1"], r"did you mean --optimizer\.lr\?"),
        ("sft", ["--optimizer.learning-rate", "1"], r"did you mean --optimizer\.lr\?"),
        (
            "sft",
            ["--optim.lr", "1"],
            r"--optim\.lr: .* did you mean --optimizer\.lr\?",
        ),
        ("sft", ["--epochs", "3"], r"did you mean --data\.epochs\?"),
        ("rl", ["--epochs", "3"], r"did you mean --max-steps\?"),
        ("sft", ["--batch-size", "3"], r"did you mean --data\.batch-size\? \(records in one optimiser step"),
        ("rl", ["--batch-size", "3"], r"did you mean --orchestrator\.prompts-per-step\?"),
        ("rl", ["--group-size", "3"], r"did you mean --orchestrator\.samples-per-prompt\?"),
        ("rl", ["--num-generations", "3"], r"did you mean --orchestrator\.samples-per-prompt\?"),
        ("rl", ["--wandb.mode", "offline"], r"did you mean --trainer\.wandb\.mode\?"),
        ("rl", ["--inference.model.max-model-len", "5"], r"did you mean --inference\.max-model-len\?"),
        ("rl", ["--trainer.model.lora.rank", "5"], r"did you mean --trainer\.lora\.rank\?"),
        ("rl", ["--trainer.model.galore.projection", "5"], "no such setting; --help lists all settings$"),
        ("sft", ["--trainer.optimizer.lr", "5"], r"did you mean --optimizer\.lr\?"),
        ("sft", ["--optimizer.foo", "5"], r"\[optimizer\] has type, lr, weight-decay"),
        ("sft", ["--packing"], "samples are always packed"),
        ("sft", ["--resume.step", "5"], r"did you mean --ckpt\.resume-step\?"),
        ("sft", ["--resume"], r"did you mean --ckpt\.resume\? \(latest, auto"),
        ("sft", ["--max-steps", "1e3"], "^--max-steps: '1e3' is not a whole number$"),
        ("sft", ["--optimizer.lr", "fast"], r"^--optimizer\.lr: 'fast' is not a number$"),
        ("sft", ["--data.shuffle=maybe"], r"^--data\.shuffle: 'maybe' is not true or false$"),
        ("sft", ["--max-steps", "0"], "^--max-steps: it is 0, but must be at least 1$"),
        (
            "sft",
            ["--scheduler.type", "cosin"],
            "'cosin' is not one of constant, .*; did you mean cosine",
        ),
        ("sft", ["--optimizer.betas", "0.9"], r"^--optimizer\.betas: it takes 2 values$"),
        (
            "sft",
            ["--optimizer.betas", "0.9", "1.5"],
            r"^--optimizer\.betas: it is 1\.5, but must be less than 1$",
        ),
        ("sft", ["--validation", '[{"interval": 3}]'], "^--validation: table 1 lacks name: Names the "),
        (
            "sft",
            ["--validation", '[{"name": "a"}, {"name": "b", "interval": 0}]'],
            "^--validation: table 2, interval: it is 0, but must be at least 1$",
        ),
        (
            "sft",
            ["--validation", '[{"name": "a", "data": {}}]'],
            r"^--validation: table 1 lacks data\.name: ",
        ),
        (
            "sft",
            ["--validation", '[{"name": "a", "data": 3}]'],
            "^--validation: table 1, data: 3 is one value, but this is a table$",
        ),
        ("sft", ["--validation", '[{"name": "a/b"}]'], "^--validation: table 1, name: 'a/b' is not what"),
        ("sft", ["--validation", "[3]"], "^--validation: table 1: 3 is no table$"),
        (
            "sft",
            ["--data.sets", '[{"name": "a", "weight": 1}, {"weight": 1}]'],
            r"^--data\.sets: table 2: each of data\.sets needs a name",
        ),
        (
            "rl",
            ["--orchestrator.eval", '[{"name": "a", "environment": {"args": []}}]'],
            r"^--orchestrator\.eval: table 1, environment\.args: \[\] is not a table$",
        ),
        (
            "inference",
            ["--kv-cache-memory", "lots"],
            "^--kv-cache-memory: 'lots' is no size; give ",
        ),
        ("inference", ["--kv-cache-memory", "1.5G"], "^--kv-cache-memory: '1.5G' is no size"),
        (
            "inference",
            ["--vllm-args=--port,9"],
            "^--vllm-args: '--port,9' is no option of vLLM: ",
        ),
        ("orchestrator", ["--environment.args", "{a}"], r"--environment\.args: '\{a\}' is not valid JSON"),
    ],
)
def test_what_is_wrong_and_what_was_meant(command: str, argv: list[str], message: str):
    """One line in plain words, with the setting that was meant; never one that the command does not have."""
    with pytest.raises(UsageError, match=message) as refused:
        load(COMMANDS[command], argv)
    text = str(refused.value)
    assert len(text.splitlines()) == 1
    assert not re.search(r"[Ii]nput|permitted|pydantic|validation error", text)


@pytest.mark.parametrize("line", ["optimizer = 3", 'loss = "simpo"', "ckpt = 3", "optimizer = [1]"])
def test_a_value_in_the_place_of_a_section(tmp_path: Path, line: str):
    """Also of one that has several types."""
    file = tmp_path / "dpo.toml"
    file.write_text(line)
    name = line.split()[0]
    words = rf"^--{name}\S* \(in {file}\): .* is one value, but this is a section; did you mean --{name}\."
    with pytest.raises(UsageError, match=words):
        load(DPOConfig, ["@", str(file)])


@pytest.mark.slow
@pytest.mark.parametrize("command", draws.cases(list(COMMANDS), "hints", 3))
def test_hints_name_settings_that_exist(command: str):
    """Of every foreign name: what is suggested is not refused in its turn, and some command has it."""
    root = settings_of(COMMANDS[command])
    shared = shared_settings(root)
    allowed = {leaf.flag for leaf in root.leaves() if leaf.path not in shared}
    for name in [*other_names.RENAMED, *other_names.MISSING, *other_names.BATCH_SIZES]:
        path = tuple(name.split("."))
        if root.find(path):
            continue
        said = hints.unknown_setting(path, root, shared, "x")
        suggested = re.findall(r"did you mean (.*?)\?", said)
        for flag in " or ".join(suggested).split(" or ") if suggested else ():
            assert flag in allowed, (name, said)


def test_checkpoint_settings_of_other_frameworks_are_known():
    """All that the table in docs/reference/checkpoint-names.md names."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoint-names.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) >= 10
    root = settings_of(SFTConfig)
    for row in rows:
        ours, *theirs = row.strip("| ").split(" | ")
        for name in re.findall(r"`([a-z]+_[a-z_]+|interval|weights)\b[^`]*`", " ".join(theirs)):
            if name in ("output_dir", "weights", "hf_save_interval", "export_path", "enable_jit_checkpoint"):
                continue  # the same here, or not needed
            path = ("ckpt", name) if f"`{name}`" in ours else (name,)
            if not root.find(path) and not root.find(("ckpt", name)):
                said = hints.unknown_setting(path, root, set(), "x")
                assert re.search(r"did you mean --ckpt\.", said), (name, said)


def test_every_foreign_name_has_an_answer():
    """Its setting is one of some command."""
    ends = {leaf.name for cls in COMMANDS.values() for leaf in settings_of(cls).leaves()}
    for name, here in ((name, one) for name, all_ in other_names.RENAMED.items() for one in all_.split("|")):
        assert any(f".{end}".endswith(f".{here.replace('_', '-')}") for end in ends), name
    assert set(hints.NOTES) <= set(other_names.RENAMED)


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        ("sft", ["@rl.toml"], "rl.toml holds settings of rl, not of sft"),
        ("sft", ["@orch.toml"], "orch.toml holds settings of orchestrator, not of sft"),
        ("trainer", ["@infer.toml"], "infer.toml holds settings of inference, not of trainer"),
        ("rl", ["@train.toml"], "train.toml holds settings of trainer: give it as --trainer @train.toml"),
        ("rl", ["--trainer", "@orch.toml"], "orch.toml holds .*: give it as --orchestrator @orch.toml"),
        ("rl", ["--orchestrator", "@train.toml"], "train.toml holds .*: give it as --trainer @train.toml"),
        ("rl", ["--trainer", "@sft.toml"], "sft.toml holds settings of sft or dpo or reward, not of rl"),
    ],
)
def test_a_file_for_another_role_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, argv: list[str], message: str
):
    """Not a line for each of its settings."""
    monkeypatch.chdir(tmp_path)
    Path("sft.toml").write_text("seed = 1\n[data]\nbatch_size = 3\nshuffle = false\n")
    Path("train.toml").write_text("seq_len = 9\nweight_transport = 'files'\n[loss]\nclip_low = 0.1\n")
    Path("orch.toml").write_text("prompts_per_step = 2\n[sampling]\nmax_tokens = 3\n")
    Path("infer.toml").write_text("port = 2\nmax_num_seqs = 3\n")
    Path("rl.toml").write_text("[trainer]\nseq_len = 9\n[orchestrator]\nprompts_per_step = 2\n")
    with pytest.raises(UsageError, match=f"^{message}$"):
        load(COMMANDS[command], argv)


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path):
    """A flag that overrides the value does not."""
    path = tmp_path / "t.toml"
    path.write_text("max_steps = 0\nmax_step = 3\n[optimizer]\nlrr = 1\n")
    with pytest.raises(UsageError) as refused:
        load(SFTConfig, ["@", str(path)])
    assert sorted(str(refused.value).splitlines()) == [
        f"--max-step (in {path}): there is no such setting; did you mean --max-steps?",
        f"--max-steps (in {path}): it is 0, but must be at least 1",
        f"--optimizer.lrr (in {path}): there is no such setting; did you mean --optimizer.lr?",
    ]
    path.write_text("max_steps = 0\n")
    with pytest.raises(UsageError, match=r"^--max-steps: it is -1, but must be at least 1$"):
        load(SFTConfig, ["@", str(path), "--max-steps", "-1"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"x = = 1", "a.toml is not valid TOML: "),
        ("a.json", b"{x: 1}", "a.json is not valid JSON: "),
        ("a.json", b"[1]", "a.json contains a list, not settings"),
        ("a.toml", b"name = '\xe9'", r"a.toml is not UTF-8 text \(byte 8\)"),
        ("a.ini", b"", r"a.ini: the name of a configuration file must end in \.toml"),
    ],
)
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str, content: bytes, message: str):
    """It is named, with what is wrong."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load(SFTConfig, ["@", str(tmp_path / name)])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_what_can_be_set_and_nothing_else(command: str, capsys: pytest.CaptureFixture[str]):
    """Every flag that is shown is accepted: in `rl`, shared values are shown once, and not for each role."""
    with pytest.raises(SystemExit):
        load(COMMANDS[command], ["--help"])
    shown = re.findall(r"^  (--[a-z][\w.-]*)", capsys.readouterr().out, flags=re.MULTILINE)
    root = settings_of(COMMANDS[command])
    expected = {leaf.flag for leaf in root.leaves() if leaf.path not in hidden_settings(root)}
    assert len(shown) == len(set(shown))
    assert set(shown) == expected | {"--version"}
    for flag in expected:
        refused = ""
        try:
            load(COMMANDS[command], [f"{flag}=1"])
        except UsageError as error:
            refused = str(error)
        assert not re.search("no such setting|all roles share", refused), flag


def test_help_begins_with_what_people_set_first(capsys: pytest.CaptureFixture[str]):
    """And ends with what few ever do."""
    for command, order in {
        "sft": ["model", "data", "general", "optimizer", "scheduler", "ckpt", "ray", "supervision"],
        "rl": [
            "model",
            "orchestrator.environment",
            "general",
            "ckpt",
            "trainer.optimizer",
            "inference",
            "supervision",
        ],
    }.items():
        with pytest.raises(SystemExit):
            load(COMMANDS[command], ["--help"])
        titles = re.findall(r"^([a-z][\w.-]*)$", capsys.readouterr().out, flags=re.MULTILINE)
        assert [title for title in titles if title in order] == order
        assert titles[-1] == "supervision"


def test_help_leaves_out_what_has_one_value_or_a_newer_name():
    hidden = hidden_settings(settings_of(RLConfig)) - shared_settings(settings_of(RLConfig))
    by_colocate = {(role, "colocated") for role in ("trainer", "orchestrator", "inference")}
    one_value = {("orchestrator", "sampling", "top_p")}
    by_trainer = {("orchestrator", "teachers"), ("orchestrator", "router_replay")}
    by_branch = {("orchestrator", "siblings"), ("orchestrator", "branched_at")}
    assert hidden == one_value | by_colocate | by_trainer | by_branch | {("trainer", "recorded_batches")}
    assert load(RLConfig, ["--orchestrator.sampling.top-p", "1"]).orchestrator.sampling.top_p == 1


def test_help_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    for config in COMMANDS.values():
        with pytest.raises(SystemExit):
            load(config, ["--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_settings_without_a_default_are_asked_for():
    """All of them at once."""
    require(load(SFTConfig, ["--model.name", "m", "--data.name", "d"]), "model.name", "data.name")
    with pytest.raises(UsageError, match=r"^sft needs --model\.name and --data\.name, as a flag"):
        require(load(SFTConfig, []), "model.name", "data.name")
    with pytest.raises(UsageError, match=r"^rl needs --model\.name, "):
        require(load(RLConfig, []), "model.name")


def test_the_version_is_the_packages():
    """In pyproject.toml and on `import cairn`."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert cairn.__version__ == project["version"]


@pytest.mark.parametrize("command", [*COMMANDS, "ckpt"])
def test_every_command_tells_its_version(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", [command, "--version"])
    assert getattr(main, command)() == 0
    assert capsys.readouterr().out == f"cairn {cairn.__version__}\n"


def test_help_ends_the_process(capsys: pytest.CaptureFixture[str]):
    """With code 0."""
    with pytest.raises(SystemExit) as ended:
        load(SFTConfig, ["--help"])
    assert ended.value.code == 0
    assert "--optimizer.lr" in capsys.readouterr().out


def test_another_machine_is_only_planned_for():
    """No flag that seems to do something does nothing."""
    with pytest.raises(UsageError, match=r"^--machine 8x80G: it plans .* --dry-run$"):
        load(SFTConfig, ["--machine", "8x80G"])
    assert load(SFTConfig, ["--machine", "8x80G", "--dry-run"]).machine == "8x80G"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_configuration_never_changes(command: str):
    config = COMMANDS[command]()
    with pytest.raises(ValidationError, match="frozen"):
        config.model = ModelConfig(name="other")
    with pytest.raises(ValidationError, match="frozen"):
        config.model.name = "other"


@pytest.mark.parametrize("section", ["", "[trainer]\nseq_len = 64\n", "[orchestrator.ckpt]\nincrement = 3\n"])
def test_an_unknown_shared_setting_is_named_once(tmp_path: Path, section: str):
    """It is handed to each role, whether or not the role has a section of its own in a file."""
    path = tmp_path / "rl.toml"
    path.write_text(section)
    with pytest.raises(UsageError) as refused:
        load(RLConfig, ["@", str(path), *([] if "ckpt" in section else ["--ckpt.increment", "3"])])
    [line] = str(refused.value).splitlines()
    assert line.startswith("--ckpt.increment")
    assert line.endswith(": there is no such setting; did you mean --ckpt.incremental?")


def test_a_shared_value_is_shared_by_whoever_has_it():
    """Also where it is set once the command line has been read, as the resolved model is."""
    config = RLConfig(max_steps=7, output_dir="here")
    assert {config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps} == {7}
    assert config.run_directory().path == Path("here").absolute()
    other = config.sharing(model=ModelConfig(name="m"), hang_timeout=90.0)
    models = [owner.model.name for owner in (other, other.trainer, other.orchestrator, other.inference)]
    assert models == ["m"] * 4
    assert other.trainer.hang_timeout == 90
    assert not hasattr(other.orchestrator, "hang_timeout")
    assert config.model.name == config.inference.model.name == ""


def test_every_path_that_a_worker_gets_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers of a running Ray cluster have the current directory of whoever started that cluster."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").touch()
    Path("owner/folder").mkdir(parents=True)
    argv = ["--output-dir", "run", "--ckpt.dir", "steps", "--ckpt.resume", "other/step_3"]
    config = load(SFTConfig, [*argv, "--data.name", "train.jsonl"])
    assert config.ckpt
    found = [config.output_dir, config.ckpt.dir, config.ckpt.resume, config.data.name]
    assert found == [str(tmp_path / name) for name in ("run", "steps", "other/step_3", "train.jsonl")]
    names = {name: load(SFTConfig, ["--data.name", name]).data.name for name in ("owner/folder", "owner/hub")}
    assert names == {"owner/folder": str(tmp_path / "owner/folder"), "owner/hub": "owner/hub"}


def test_the_model_that_a_worker_gets_is_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one that Cairn makes itself, in a cache folder that is named by a relative path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    shutil.copytree(EXAMPLE, "bare")
    made = resolve_model(ModelConfig(name="bare", init_seed=0))
    assert made.startswith(str(tmp_path / "cache"))
    shutil.copytree(made, "whole")
    assert resolve_model(ModelConfig(name="whole")) == str(tmp_path / "whole")


SECRET = "hidden"
SECRET_URL = f"s3://key:{SECRET}@bucket/run"


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("sft", "--ckpt.remote", SECRET_URL),
        ("sft", "--ckpt.remote", f"az://container/run?sig={SECRET}"),
        ("sft", "--ckpt.dir", SECRET_URL),
        ("rl", "--ckpt.resume", f"{SECRET_URL}/step_20"),
        ("sft", "--model.name", SECRET_URL),
        ("sft", "--data.name", SECRET_URL),
        ("eval", "--all", SECRET_URL),
        ("eval", "--models", SECRET_URL),
    ],
)
def test_urls_with_credentials_are_refused(command: str, flag: str, value: str, tmp_path: Path):
    """By the flag or the file's key, before they are printed or stored; the message doesn't repeat them."""
    with pytest.raises(UsageError, match=f"^{flag}: a URL must hold no credentials") as error:
        load(COMMANDS[command], [flag, value])
    assert SECRET not in str(error.value)
    *sections, key = flag.removeprefix("--").split(".")
    given = f'["{value}"]' if key == "models" else f'"{value}"'
    lines = [f"[{section}]" for section in sections] + [f"{key} = {given}"]
    (tmp_path / "file.toml").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"file\.toml\): a URL must hold no credentials") as error:
        load(COMMANDS[command], ["@", str(tmp_path / "file.toml")])
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ckpt.remote", f"https://key:{SECRET}@minio/run"], "'https://...' is not a URL such as s3://"),
        (["--ckpt.dir", f"https://key:{SECRET}@minio/run"], "'https://...' is not a URL such as s3://"),
        (["--ckpt", SECRET_URL], "--ckpt takes no value; did you mean --ckpt.interval?"),
        (["--ckpt.remot", SECRET_URL], "did you mean --ckpt.remote?"),
        (["--ckpt.dir", SECRET_URL, "--ckpt.remote", "file:///x"], "a URL must hold no credentials"),
        (["--ckpt.interval", SECRET_URL], "a URL must hold no credentials"),
    ],
)
def test_no_other_message_repeats_credentials(arguments: list[str], message: str):
    """Of values that are wrong in another way as well."""
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        load(SFTConfig, arguments)
    assert SECRET not in str(error.value)


def test_files_that_disagree_on_a_url_keep_its_credentials(tmp_path: Path):
    """The message says which files they are."""
    for name, url in (("one", SECRET_URL), ("two", "s3://bucket/run")):
        (tmp_path / f"{name}.toml").write_text(f'[ckpt]\nremote = "{url}"\n')
    with pytest.raises(
        UsageError, match=r"'s3://\.\.\.', .* says 's3://bucket/run'; make them agree"
    ) as error:
        load(RLConfig, ["--trainer", f"@{tmp_path}/one.toml", "--orchestrator", f"@{tmp_path}/two.toml"])
    assert SECRET not in str(error.value)


def test_pydantics_own_text_repeats_no_credentials():
    """Of settings that are made in Python."""
    for given in ({"remote": SECRET_URL}, {"dir": SECRET_URL}, {"resume": SECRET_URL, "keep_last": -1}):
        with pytest.raises(ValidationError, match="a URL must hold no credentials") as error:
            SFTConfig.model_validate({"ckpt": given})
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        (
            "sft",
            '[[data.sets]]\nname = "a.jsonl"\n[[data.sets]]\nname = "b.jsonl"\nshuffle_block = 9\n',
            "--data.sets .*: table 2 has 'shuffle_block', and there is no such setting in a .*"
            "; did you mean --data.shuffle-block",
        ),
        (
            "sft",
            '[[validation]]\nname = "held"\nintervall = 5\n',
            "table 1 has 'intervall', .* did you mean interval",
        ),
        ("sft", '[[validation]]\nname = "held"\ndata = { name = "a", splits = "b" }\n', "'data.splits'"),
        ("rl", '[[orchestrator.eval]]\nname = "e"\nzzz = 5\n', "has 'zzz', .*; it has name, environment"),
        ("rl", '[[orchestrator.environments]]\nname = "e"\nzzz = 5\n', "table 1 has 'zzz'"),
    ],
)
def test_an_unknown_setting_in_one_of_a_list_of_tables(tmp_path: Path, command: str, text: str, message: str):
    """The table is named by its number, and what was meant is suggested."""
    path = tmp_path / "file.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load(COMMANDS[command], ["@", str(path)])
