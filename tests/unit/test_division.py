"""How many GPUs each server of a run gets, by the memory that a copy of the model needs."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from cairn.config.inference import InferenceConfig
from cairn.config.rl import RLConfig
from cairn.launch import main
from cairn.launch.plan.division import described_folder, size_by_memory
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
    answers = ("--orchestrator.sampling.max-tokens", "2048", "--trainer.activation-checkpointing")
    config, said = planned("--machine", "8x80G,1T", *answers)
    assert config.inference.servers == 8 - config.trainer.workers
    assert f"  inference.servers = {config.inference.servers}: the fastest of " in said
    assert re.search(
        r"7 divisions in a simulation with answers of 1024 tokens .*: about [0-9,]+ tokens/s of answers, "
        r"ranks busy [0-9]+% of the time",
        said,
    )
    config, said = planned("--machine", "8x24G", "--trainer.workers", "2", "--inference.tensor-parallel", "1")
    assert (config.inference.servers, config.inference.gpus) == (6, "2,3,4,5,6,7")
    assert "inference.tensor_parallel = " not in said
    assert "  inference.servers = 6: those that the trainer's settings leave\n" in said


def test_a_node_of_a_job_decides_for_its_servers(
    eight_billion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """From the settings that they read; the number is all that it prints to the job's script."""
    (tmp_path / "inference.json").write_text(json.dumps({"model": {"name": str(eight_billion)}}))
    monkeypatch.setattr(servers_of_node, "this_machine", lambda: machine_of("8x24G"))
    servers_of_node.main(str(tmp_path / "inference.json"), 8)
    printed = capsys.readouterr()
    assert printed.out == "2\n"
    assert printed.err.startswith("--inference.tensor-parallel 2: of 24.0 GiB a GPU, ")
