"""Settings that depend on the device: what they become on CPUs and GPUs, and what resumes say of it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import joined
from test_inference_command import option
from test_recipe import FRESH, SFT_RUN, sft, start_at, write_records

from cairn.config.cli import COMMANDS, load
from cairn.config.inference import InferenceConfig
from cairn.config.model import PrecisionConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import RayConfig, SFTConfig
from cairn.inference import vllm_command
from cairn.launch import commands, main
from cairn.launch.plan import hardware, steps
from cairn.launch.plan.recipe import plan_recipe
from cairn.launch.plan.settings import OPEN, REASONS, settle
from cairn.launch.ray import gpus as ray_gpus
from cairn.run.errors import UsageError
from cairn.run.exits import RoleFailed
from cairn.run.machine import Machine, machine_of
from cairn.trainer.group import RankGroup

CPU = machine_of("64G")
GPUS = machine_of("8x80G,1T")


def chosen(config: Any, machine: Machine, *, gpu_servers: bool) -> dict[str, Any]:
    """What `settle` chooses, by setting."""
    return {choice.setting: choice.value for choice in settle(config, machine, gpu_servers=gpu_servers)[1]}


def test_on_a_cpu_everything_is_as_it_was_before_settings_could_be_left_open():
    assert chosen(RLConfig(), CPU, gpu_servers=False) == {
        "trainer.precision.compute": "float32",
        "trainer.precision.float32_matmul": "highest",
        "trainer.precision.head": "compute",
        "orchestrator.sampling.chunk_tokens": 512,
        "orchestrator.max_in_flight": 256,
        "orchestrator.server_timeout": 300,
        "inference.head": "model",
        "inference.max_num_seqs": 64,
        "inference.compile": False,
        "inference.startup_timeout": 300,
        "inference.tensor_parallel": 1,
        "inference.servers": 1,
    }


def test_on_gpus():
    assert chosen(RLConfig(), GPUS, gpu_servers=True) == {
        "trainer.precision.compute": "bfloat16",
        "trainer.precision.float32_matmul": "high",
        "trainer.precision.head": "float32",
        "orchestrator.sampling.chunk_tokens": 8192,
        "orchestrator.max_in_flight": 256,
        "orchestrator.server_timeout": 1800,
        "inference.head": "float32",
        "inference.max_num_seqs": None,
        "inference.compile": True,
        "inference.startup_timeout": 1800,
        "inference.tensor_parallel": 1,
        "inference.servers": 1,
    }


def test_the_machine_decides_for_the_trainer_and_the_build_of_vllm_for_servers():
    config, _ = settle(RLConfig(), CPU, gpu_servers=True)
    assert (config.trainer.precision.compute, config.inference.compile) == ("float32", True)
    config, _ = settle(RLConfig(), GPUS, gpu_servers=False)
    assert (config.trainer.precision.compute, config.inference.compile) == ("bfloat16", False)


@pytest.mark.parametrize("machine", [CPU, GPUS], ids=["cpu", "gpus"])
def test_what_was_given_stays(machine: Machine):
    argv = ["--trainer.precision.compute", "float32", "--inference.no-compile", "--inference.max-num-seqs=3"]
    config = load(RLConfig, [*argv, "--orchestrator.max-in-flight", "5"])
    settled, _ = settle(config, machine, gpu_servers=machine.has_gpus)
    precision = settled.trainer.precision
    # Whoever asks for float32 does not get TF32.
    assert (precision.compute, precision.float32_matmul) == ("float32", "highest")
    assert (settled.inference.compile, settled.inference.max_num_seqs) == (False, 3)
    assert settled.orchestrator.max_in_flight == 5
    several = [[f"--inference.servers={n}"] for n in (1, 3)]
    urls = [f"http://a:{n}" for n in range(3)]
    several += [["--orchestrator.inference-url", *urls[:number]] for number in (1, 3)]
    configs = [settle(load(RLConfig, argv), machine, gpu_servers=True)[0] for argv in several]
    assert [one.orchestrator.max_in_flight for one in configs] == [256, 768, 256, 768]
    assert (
        not {"inference.compile", "trainer.precision.compute"}
        & chosen(config, machine, gpu_servers=machine.has_gpus).keys()
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("machine", [CPU, GPUS], ids=["cpu", "gpus"])
def test_every_open_setting_is_settled_with_a_reason_and_once(command: str, machine: Machine):
    """Whoever adds one that depends on the device gives a reason for each of its values."""

    def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    config = COMMANDS[command]()
    settled, choices = settle(config, machine, gpu_servers=machine.has_gpus)
    before, after = dict(leaves(config.model_dump())), dict(leaves(settled.model_dump()))
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {choice.setting for choice in choices}
    assert all(choice.why for choice in choices)
    assert all(before[choice.setting] in OPEN for choice in choices)
    assert settle(settled, machine, gpu_servers=machine.has_gpus)[0] == settled


def test_no_reason_is_for_a_setting_that_does_not_exist():
    found = {choice.setting for choice in settle(RLConfig(), CPU, gpu_servers=False)[1]}
    assert {name.split(".", 1)[1] for name in found} == set(REASONS)


def test_tf32_rounds_as_float16_does():
    """So checks of logprobs must allow for it."""
    roundings = {
        ("float32", "highest"): "float32",
        ("float32", "high"): "float16",
        ("bfloat16", "high"): "bfloat16",
    }
    for (compute, matmul), rounding in roundings.items():
        precision = PrecisionConfig.model_validate({"compute": compute, "float32_matmul": matmul})
        assert precision.settled(gpu=True).rounding == rounding


def test_a_rank_computes_with_the_precision_that_was_chosen(monkeypatch: pytest.MonkeyPatch):
    with joined():
        assert torch.get_float32_matmul_precision() == "highest"
    join = RankGroup.join
    monkeypatch.setattr(RankGroup, "join", lambda **options: join(**options, float32_matmul="high"))
    try:
        with joined():
            assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# The server


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM's build for GPUs were installed."""
    monkeypatch.setattr(vllm_command, "installed_build", lambda: "gpu")


@pytest.mark.usefixtures("gpu_build")
def test_the_command_of_a_server_on_gpus(tmp_path: Path):
    argv, _ = vllm_command.command(InferenceConfig(tensor_parallel=2), str(tmp_path))
    assert not {"--enforce-eager", "--max-num-seqs", "--load-format"} & set(argv)
    assert option(argv, "--tensor-parallel-size") == "2"
    argv, _ = vllm_command.command(InferenceConfig(compile=False, max_num_seqs=5), str(tmp_path))
    assert "--enforce-eager" in argv
    assert option(argv, "--max-num-seqs") == "5"


def test_the_command_of_a_server_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    argv, env = vllm_command.command(InferenceConfig(), str(tmp_path))
    assert env["MALLOC_ARENA_MAX"] == "3", "the user's own"
    assert env["MALLOC_TRIM_THRESHOLD_"] == env["MALLOC_MMAP_THRESHOLD_"] == "1073741824"
    assert "--enforce-eager" in argv
    assert env["TORCHDYNAMO_DISABLE"] == "1"
    assert option(argv, "--max-num-seqs") == "64"


@pytest.mark.usefixtures("gpu_build")
def test_servers_on_gpus_make_logits_in_float32_as_the_trainer_does(tmp_path: Path):
    """By vLLM's own setting, beside what else it has to read otherwise."""
    argv, _ = vllm_command.command(InferenceConfig(), str(tmp_path))
    assert json.loads(option(argv, "--hf-overrides")) == {"head_dtype": "float32"}
    assert "--hf-overrides" not in vllm_command.command(InferenceConfig(head="model"), str(tmp_path))[0]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere2", "sliding_window": 9}))
    argv, _ = vllm_command.command(InferenceConfig(), str(tmp_path))
    assert json.loads(option(argv, "--hf-overrides")) == {"sliding_window": 8, "head_dtype": "float32"}


@pytest.mark.usefixtures("gpu_build")
def test_float32_checkpoints_are_served_in_bfloat16_on_gpus(tmp_path: Path):
    """Unless asked: vLLM's Triton attention takes float32."""
    for saved, expected in [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")]:
        (tmp_path / "config.json").write_text(json.dumps({"dtype": saved}))
        argv, _ = vllm_command.command(InferenceConfig(), str(tmp_path))
        assert option(argv, "--dtype") == expected
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    argv, _ = vllm_command.command(InferenceConfig(dtype="float32"), str(tmp_path))
    assert option(argv, "--dtype") == "float32"


# Recipes and commands


def test_a_run_of_a_cpu_goes_on_on_gpus_and_says_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The precision breaks no promise, so nothing has to be accepted; later checkpoints name the change."""
    data = write_records(tmp_path / "a.jsonl", 50)

    def planned(machine: Machine, start: Any, **settings: Any) -> dict[str, Any]:
        config, _ = settle(sft(tmp_path, data, **settings), machine, gpu_servers=machine.has_gpus)
        return plan_recipe(SFT_RUN, config, start)["trainer"]

    start = start_at(tmp_path, {"trainer": planned(CPU, FRESH)})
    assert planned(CPU, start)["changes"] == []
    assert capsys.readouterr().out == ""
    changes = planned(GPUS, start)["changes"]
    assert [(change["name"], change["was"], change["now"]) for change in changes] == [
        ("precision.compute", "float32", "bfloat16"),
        ("precision.float32_matmul", "highest", "high"),
        ("precision.head", "compute", "float32"),
    ]
    printed = capsys.readouterr().out
    assert '  --precision.compute: "float32" -> "bfloat16"\n' in printed
    # To compute as before, it is enough to say so.
    assert planned(GPUS, start, precision={"compute": "float32"})["changes"] == []


def test_a_run_from_before_there_was_auto_goes_on_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = write_records(tmp_path / "a.jsonl", 50)
    config, _ = settle(sft(tmp_path, data), CPU, gpu_servers=False)
    recipe = plan_recipe(SFT_RUN, config, FRESH)
    del recipe["trainer"]["settings"]["precision.float32_matmul"], recipe["trainer"]["free"]
    assert plan_recipe(SFT_RUN, config, start_at(tmp_path, recipe))["trainer"]["changes"] == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["sft", "rl", "trainer", "inference"])
def test_a_dry_run_says_what_it_chose_and_why(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The configuration goes to standard output, so that it can become a file, and the rest beside it."""
    monkeypatch.setattr("sys.argv", [command, "--dry-run", "--machine", "8x80G,1T"])
    assert getattr(main, command)() == 0
    printed = capsys.readouterr()
    config = COMMANDS[command].model_validate_json(printed.out)
    assert settle(config, GPUS, gpu_servers=True)[0] == config
    assert printed.err.startswith("planned for 8 GPUs with 80 GiB (planned), 1024 GiB of memory\n")
    _, choices = settle(COMMANDS[command](), GPUS, gpu_servers=True)
    assert choices
    for choice in choices:
        assert f"  {choice.setting} = " in printed.err
        if choice.setting not in ("inference.servers", "inference.tensor_parallel"):  # chosen by the machine
            assert choice.why in printed.err


def test_a_machine_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.argv", ["sft", "--dry-run", "--machine", "8xMany"])
    assert main.sft() == 2
    assert "--machine 8xMany" in capsys.readouterr().err


def test_commands_settle_before_they_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With what the machine has: the recipe, which goes into every checkpoint, names what is used."""
    data = write_records(tmp_path / "a.jsonl", 50)
    start_at(tmp_path, None)
    config = SFTConfig.model_validate(
        {"model": {"name": str(tmp_path / "model")}, "data": {"name": str(data)}, "output_dir": str(tmp_path)}
    )
    seen: list[SFTConfig] = []

    class Enough(Exception):
        pass

    def plan(kind: Any, config: SFTConfig, *_: Any) -> None:
        seen.append(config)
        raise Enough

    monkeypatch.setattr(steps, "plan_recipe", plan)
    for machine in (CPU, GPUS):
        monkeypatch.setattr(hardware, "this_machine", lambda machine=machine: machine)
        with pytest.raises(Enough):
            commands.start("sft", config)
    assert [each.precision.compute for each in seen] == ["float32", "bfloat16"]


def test_roles_that_get_an_open_configuration_take_their_own_device():
    """As scripts do that use a role's classes directly."""
    for config in (TrainerConfig(), OrchestratorConfig(), InferenceConfig()):
        assert config.settled(gpu=False, gpu_servers=False) == settle(config, CPU, gpu_servers=False)[0]


# Given Ray clusters, whose machines may be others than the launcher's


class Answer:
    """What a program that is asked would print."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, printed: str):
        self.asked: list[list[str]] = []

        def lines_of(command: list[str], seconds: float) -> list[str]:
            self.asked.append(command)
            return printed.splitlines()

        monkeypatch.setattr(ray_gpus, "_lines_of", lines_of)


def test_a_given_cluster_decides_and_not_the_launchers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A login node without a GPU starts a run on GPUs; a node with GPUs starts one on CPUs."""
    data = write_records(tmp_path / "a.jsonl", 50)
    start_at(tmp_path, None)
    config = SFTConfig.model_validate(
        {
            "model": {"name": str(tmp_path / "model")},
            "data": {"name": str(data)},
            "output_dir": str(tmp_path),
            "ray": {"address": "10.0.0.1:6379"},
        }
    )

    class Enough(Exception):
        pass

    def plan(kind: Any, config: SFTConfig, *_: Any) -> None:
        raise Enough(f"{config.precision.compute} {config.gpus}")

    monkeypatch.setattr(steps, "plan_recipe", plan)
    # The driver holds ranks to CPUs that are settled for them, also if a node with GPUs joins meanwhile.
    for machine, gpus, compute in ((CPU, 8, "bfloat16 None"), (GPUS, 0, "float32 0")):
        monkeypatch.setattr(hardware, "this_machine", lambda machine=machine: machine)
        answer = Answer(monkeypatch, f'something of Ray\n{{"gpus": {gpus}}}\n')
        with pytest.raises(Enough, match=compute):
            commands.start("sft", config)
        assert "10.0.0.1:6379" in answer.asked[0][-2]


@pytest.mark.parametrize(
    ("printed", "error", "message"),
    [
        ('{"failed": "no Ray cluster at --ray.address h:1: refused"}', RoleFailed, "^no Ray cluster at"),
        ('{"refused": "--ray.address h:1: a token"}', UsageError, "^--ray.address h:1: a token"),
        ("", RoleFailed, "--ray.address h:1: the Ray cluster does not say"),
    ],
)
def test_a_cluster_that_does_not_answer(
    printed: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    Answer(monkeypatch, printed)
    with pytest.raises(error, match=message):
        ray_gpus.cluster_of(SFTConfig(ray=RayConfig(address="h:1")))


def test_what_a_cluster_lacks_is_said_while_the_command_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A dry run asks for no more than is there."""
    answer = Answer(monkeypatch, '{"waiting": "8 of 16 GPUs"}\n7\n[1]\n{"gpus": 16}')
    config = SFTConfig(workers=16, ray=RayConfig(address="h:1"))
    assert len(ray_gpus.cluster_of(config).gpus) == 16
    assert capsys.readouterr().out == "8 of 16 GPUs\n"
    ray_gpus.cluster_of(config, waits=False)
    assert [SFTConfig.model_validate_json(asked[-2]).workers for asked in answer.asked] == [16, None]


@pytest.mark.slow
def test_an_address_where_nothing_listens_is_said_before_a_run_begins():
    """With a real program that asks."""
    with pytest.raises(RoleFailed, match=r"no Ray cluster at --ray.address 127.0.0.1:1: .*refused"):
        ray_gpus.cluster_of(SFTConfig(ray=RayConfig(address="127.0.0.1:1")))
