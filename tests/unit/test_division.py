"""How many GPUs each server of a run gets, by the memory that a copy of the model needs."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.launch import main
from cairn.launch.memory import SERVED, count
from cairn.launch.plan.division import described_folder, shape_of, size_by_memory
from cairn.launch.plan.simulation import ModelShape
from cairn.launch.slurm import servers_of_node
from cairn.run.machine import machine_of


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model in the shape of Qwen3-8B, with 32 attention heads, and one weight."""
    folder = tmp_path_factory.mktemp("eight_billion")
    Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("machine", "most", "expected"),
    [
        ("8x80G", 7, 1),  # 15.3 GiB of weights in 80 GiB
        ("8x24G", 7, 2),  # they fit, and leave 4 GiB for keys and values
        ("8x12G", 7, 4),  # too large for one, and for two
        ("8x12G", 3, 2),  # there are no four
        ("2x12G", 1, 1),
    ],
)
def test_a_server_gets_as_many_gpus_as_leave_room_for_keys_and_values(
    machine: str, most: int, expected: int, eight_billion: Path
):
    size, why = size_by_memory(lambda: str(eight_billion), InferenceConfig(), machine_of(machine), most)
    assert size == expected
    assert f"the weights take {15.26 / size:.1f} GiB, and about " in why


def test_the_number_divides_the_models_attention_heads(eight_billion: Path, tmp_path: Path):
    """As vLLM demands."""
    settings = json.loads((eight_billion / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"num_attention_heads": 14, "num_key_value_heads": 2})
    )
    assert size_by_memory(lambda: str(tmp_path), InferenceConfig(), machine_of("8x12G"), 7)[0] == 2


def test_a_model_that_can_not_be_counted_is_tried_on_single_gpus(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    size, why = size_by_memory(lambda: str(tmp_path), InferenceConfig(), machine_of("8x80G"), 7)
    assert (size, why.partition(" (")[0]) == (1, "the model can't be counted")
    size, why = size_by_memory(
        lambda: described_folder(InferenceConfig().model), InferenceConfig(), machine_of("8x80G"), 7
    )
    assert (size, why) == (
        1,
        "the model can't be counted (it is not known yet), so a copy of it on each GPU is tried",
    )


@draws.seldom
def test_a_dry_run_says_who_gets_what_and_why(
    eight_billion: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def planned(*argv: str) -> tuple[RLConfig, str]:
        arguments = ["rl", "--dry-run", "--model.name", str(eight_billion), *argv]
        monkeypatch.setattr(sys, "argv", arguments)
        main.rl()
        printed = capsys.readouterr()
        return RLConfig.model_validate_json(printed.out), printed.err

    config, said = planned("--machine", "8x24G")
    assert (config.inference.tensor_parallel, config.inference.servers, config.trainer.workers) == (2, 2, 4)
    assert config.orchestrator.max_in_flight == 512
    assert "  GPUs 0, 1, 2, 3 train; GPUs 4, 5, 6, 7 serve (2 servers)\n" in said
    assert "  inference.tensor_parallel = 2: of 24.0 GiB a GPU, the weights take 7.6 GiB, and" in said
    assert "  inference.servers = 2: half of the GPUs" in said
    answers = ("--orchestrator.sampling.max-tokens", "512", "--trainer.activation-checkpointing")
    config, said = planned("--machine", "8x80G,1T", *answers)
    assert config.inference.servers == 8 - config.trainer.workers
    assert f"  inference.servers = {config.inference.servers}: the fastest of " in said
    assert re.search(
        r"7 divisions in a simulation with answers of 256 tokens .*: about [0-9,]+ tokens/s of answers, "
        r"ranks busy [0-9]+% of the time",
        said,
    )
    config, said = planned("--machine", "8x24G", "--trainer.workers", "2", "--inference.tensor-parallel", "1")
    assert (config.inference.servers, config.inference.gpus) == (6, "2,3,4,5,6,7")
    assert "inference.tensor_parallel = " not in said
    assert "  inference.servers = 6: those that the trainer's settings leave\n" in said


def decided(settings: dict[str, Any], folder: Path, machine: str, *arguments: int) -> None:
    """Let a node of a job with such GPUs decide, from the settings that the run reads."""
    (folder / "rl.json").write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers_of_node, "this_machine", lambda: machine_of(machine))
        servers_of_node.main(str(folder / "rl.json"), *arguments)


def test_a_node_of_a_job_decides_how_nodes_are_divided(
    eight_billion: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Two numbers are all that it prints to the job's script; why is in the job's log."""
    settings: dict[str, Any] = {"model": {"name": str(eight_billion)}}
    decided(settings, tmp_path, "8x24G", 8, 4, 1)
    printed = capsys.readouterr()
    assert printed.out == "2 1\n"
    assert printed.err.startswith("--inference.tensor-parallel 2: of 24.0 GiB a GPU, ")
    assert "server-nodes" not in printed.err

    small = tmp_path / "small"
    of_experts(small)  # it is counted in no time
    settings = {
        "model": {"name": str(small)},
        "trainer": {"activation_checkpointing": True},
        "orchestrator": {
            "prompts_per_step": 16,
            "samples_per_prompt": 16,
            "max_off_policy_steps": 2,
            "sampling": {"max_tokens": 2048},
        },
    }
    decided(settings, tmp_path, "8x80G", 8, 4, 0)
    printed = capsys.readouterr()
    size, nodes = map(int, printed.out.split())
    assert size == 1
    assert 1 <= nodes <= 3
    assert f"--slurm.server-nodes {nodes}: the fastest of 3 divisions in a simulation" in printed.err
    assert "with answers of 1024 tokens" in printed.err

    decided({"inference": {"tensor_parallel": 4}}, tmp_path, "8x80G", 8, 6, 0)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("4 3\n", "--slurm.server-nodes 3: half of the nodes\n")


def of_experts(folder: Path) -> None:
    """Describe a small mixture of experts."""
    Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")


def test_of_experts_only_those_that_are_used_count(tmp_path: Path):
    """For training and for reading; all of them for the memory and the way to the servers."""
    of_experts(tmp_path)
    shape = shape_of(tmp_path, count(str(tmp_path), **SERVED))
    assert (shape.experts, shape.chosen) == (2 * 16 * 3 * 64 * 32, 0.25)
    assert shape.active == shape.parameters - 0.75 * shape.experts
    assert shape.read(1) == shape.active
    assert shape.active < shape.read(4) < shape.read(64) <= shape.parameters
    assert shape.mfu < ModelShape(shape.parameters, 2, 64, shape.key_value_bytes).mfu
