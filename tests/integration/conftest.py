"""Tiny models, and one long-lived inference server that the tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cairn.config.inference import InferenceConfig
from cairn.inference.server import Server

CHARACTERS = ["\n", *map(chr, range(32, 127))]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<assistant>"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def write_model(directory: Path, seed: int, tied: bool) -> Path:
    """A float32 Qwen3 of 0.6M parameters with random weights, and a tokenizer of one token per character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        # Wide enough for the logits to tell one set of weights from another.
        initializer_range=0.1,
        pad_token_id=vocabulary["<pad>"],
        eos_token_id=vocabulary["<eos>"],
        bos_token_id=vocabulary["<bos>"],
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(tied=True, seed=0)`: the directory of a tiny model; equal arguments give the same one."""
    made: dict[tuple[bool, int], Path] = {}

    def model(*, tied: bool = True, seed: int = 0) -> Path:
        if (tied, seed) not in made:
            name = f"{'tied' if tied else 'untied'}-{seed}"
            made[tied, seed] = write_model(tmp_path_factory.mktemp(name), seed, tied)
        return made[tied, seed]

    return model


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Finds a TCP port of loopback on which nothing listens."""
    return runs.free_port


@pytest.fixture(scope="session")
def inference_server(
    tiny_model: Callable[..., Path], free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a tied tiny model. Tests leave it with any weights: push what you need first."""
    config = InferenceConfig(port=free_port(), kv_cache_memory="64M")
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with Server(config, str(tiny_model(tied=True, seed=0)), log) as server:
        server.wait_ready()
        yield server
