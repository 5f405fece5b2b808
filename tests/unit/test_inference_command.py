"""The inference server's command line, tokens and imports; nothing is started."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_example

from cairn.config.inference import InferenceConfig
from cairn.inference import vllm_command
from cairn.inference.client import Unauthorized, token_file, token_for
from cairn.inference.vllm_command import command
from cairn.run.errors import UsageError


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_neither_server_nor_client_imports_torch_or_vllm():
    code = (
        "import sys, cairn.inference.client, cairn.inference.server;"
        "sys.exit(str(sorted({'torch', 'vllm', 'ray', 'transformers'} & sys.modules.keys())))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "[]"


def test_command_carries_the_configuration_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CAIRN_INFERENCE_TOKEN", "a secret")
    config = InferenceConfig(
        host="127.0.0.2",
        port=8123,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=7,
        kv_cache_memory="64M",
        vllm_args=["--seed", "3"],
    )
    argv, env = command(config, "some/model")
    assert option(argv, "--model") == "some/model"
    assert (option(argv, "--host"), option(argv, "--port")) == ("127.0.0.2", "8123")
    assert option(argv, "--dtype") == "bfloat16"
    assert (option(argv, "--max-model-len"), option(argv, "--max-num-seqs")) == ("256", "7")
    assert option(argv, "--kv-cache-memory-bytes") == "64M"
    assert argv[-2:] == ["--seed", "3"]
    # The development mode would open the RL routes to everybody.
    assert (env["VLLM_SERVER_DEV_MODE"], env["VLLM_PLUGINS"]) == ("0", "cairn")
    # Its processes meet on this machine, whatever address the machine's name stands for.
    assert (env["VLLM_HOST_IP"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert "a secret" not in [*argv, *env.values()]
    assert "HF_HUB_OFFLINE" not in env  # not a directory, so a hub name


def test_a_server_of_adapters_has_them_on_all_layers_but_embeddings_and_heads(tmp_path: Path):
    """Of a rank that vLLM knows, and takes no other weights; the model's files say what layers there are."""
    write_example(tmp_path, tied=False)
    argv, _ = command(InferenceConfig(max_lora_rank=9, max_loras=3), str(tmp_path))
    assert "--weight-transfer-config" not in argv
    assert option(argv, "--max-lora-rank") == "16"
    assert (option(argv, "--max-loras"), option(argv, "--max-cpu-loras")) == ("3", "6")
    first = argv.index("--lora-target-modules") + 1
    layers = [*itertools.takewhile(lambda word: not word.startswith("--"), argv[first:])]
    attention, mlp = ("k_proj", "o_proj", "q_proj", "v_proj"), ("down_proj", "gate_proj", "up_proj")
    assert sorted(layers) == sorted((*attention, *mlp))
    assert "--enable-lora" not in command(InferenceConfig(), str(tmp_path))[0]
    with pytest.raises(UsageError, match="--max-lora-rank 9: the names of the model's layers can't be read"):
        command(InferenceConfig(max_lora_rank=9), "some/model")


def test_a_server_tells_experts_as_its_build_can(monkeypatch: pytest.MonkeyPatch):
    """vLLM's own way is refused by its CPU build."""
    assert "--scheduler-cls" not in command(InferenceConfig(), "some/model")[0]
    argv, _ = command(InferenceConfig(return_experts=True), "some/model")
    assert option(argv, "--scheduler-cls") == vllm_command.EXPERTS_SCHEDULER
    assert "--no-async-scheduling" in argv
    monkeypatch.setattr(vllm_command, "installed_build", lambda: "gpu")
    argv, _ = command(InferenceConfig(return_experts=True), "some/model")
    assert "--enable-return-routed-experts" in argv
    assert "--scheduler-cls" not in argv
    with pytest.raises(ValueError, match="set it with --return-experts"):
        InferenceConfig(vllm_args=["--enable-return-routed-experts"])


def test_auto_dtype_is_the_one_that_the_model_was_saved_with(tmp_path: Path):
    for saved, expected in [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, "auto"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(saved))
        argv, env = command(InferenceConfig(), str(tmp_path))
        assert option(argv, "--dtype") == expected
        assert env["HF_HUB_OFFLINE"] == "1"


def test_token_comes_from_the_environment_else_from_the_servers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CAIRN_INFERENCE_TOKEN", raising=False)
    url = "http://127.0.0.1:8000"
    with pytest.raises(Unauthorized, match="CAIRN_INFERENCE_TOKEN") as caught:
        token_for(url)
    assert url in str(caught.value)
    token_file(url).parent.mkdir(parents=True)
    token_file(url).write_text(json.dumps({"token": "from the file"}))
    for same in (url, url + "/", "http://localhost:8000", "http://0.0.0.0:8000", "http://[::1]:8000"):
        assert token_for(same) == "from the file"
    for other in ("http://127.0.0.1:8001", "http://10.0.0.1:8000"):
        with pytest.raises(Unauthorized):
            token_for(other)
    monkeypatch.setenv("CAIRN_INFERENCE_TOKEN", "from the environment")
    assert token_for(url) == "from the environment"


def test_the_window_of_cohere2_is_the_one_that_transformers_has(tmp_path: Path):
    """vLLM adds a token to it."""
    model = {"model_type": "cohere2", "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(model))
    argv, _ = command(InferenceConfig(), str(tmp_path))
    assert json.loads(argv[argv.index("--hf-overrides") + 1]) == {"sliding_window": 4095}
    (tmp_path / "config.json").write_text(json.dumps({**model, "model_type": "mistral"}))
    assert "--hf-overrides" not in command(InferenceConfig(), str(tmp_path))[0]


def test_a_reward_model_answers_nothing(tmp_path: Path):
    """And vLLM's own server, which could serve it, is named."""
    about = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"a reward model gives conversations a number.*--runner pooling"):
        command(InferenceConfig(), str(tmp_path))
