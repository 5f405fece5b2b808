"""What an adapter saves: bytes and seconds of a checkpoint and of a push, beside those of full training.

The same model trains in full, and with an adapter of rank 16 on all linear layers, on one rank. Prints one
JSON object:
- trained: number of trained values
- save_bytes, save_s: the tensor files of a step, and the time until it is committed
- push_bytes, push_s: the tensor files of a policy version, and the time to write them
- merge_s (adapter): the time in which a server makes merged weights of it, before generation is paused
- copy_s (adapter): the time in which a server that computes it unmerged checks and copies it

Runs as `python benchmarks/lora.py [--size 10M|60M|200M|600M] [--repeats N] [--quick] [--json]`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cairn.checkpoint.saving.saver import Saver, SavingRank
from cairn.checkpoint.step_folder import MODEL
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.config.model import LoraConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.formats import FORMATS
from cairn.inference.plugin.adapters import AdapterCopies
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.trained import Trained
from cairn.trainer.publishing.transports import FileTransport, Served

ABOUT = {
    **{"run_id": "benchmark", "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]},
    **{"world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""},
}
SIZES = {
    "10M": {"hidden_size": 384, "num_hidden_layers": 5, "intermediate_size": 1152},
    "60M": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2304},
    "200M": {"hidden_size": 1280, "num_hidden_layers": 10, "intermediate_size": 3840},
    "600M": {"hidden_size": 1536, "num_hidden_layers": 20, "intermediate_size": 4608},
}


def main() -> None:
    """Measure both, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="60M")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    parser.add_argument("--json", action="store_true", help="all on one line")
    options = parser.parse_args()
    if options.quick:
        options.size, options.repeats = "10M", 1
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(free_port())}
    group = RankGroup.join(threads=1, deterministic=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = Qwen3Config(
            vocab_size=8192, num_attention_heads=8, num_key_value_heads=4, **SIZES[options.size]
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / "base")
        kinds = {"full": TrainerConfig(), "adapter": TrainerConfig(lora=LoraConfig(serve="adapter"))}
        report = {
            name: measure(folder / "base", kind, group, folder / name, options.repeats)
            for name, kind in kinds.items()
        }
    print(json.dumps({"size": options.size, **report}, indent=None if options.json else 2))
    group.leave()


def measure(
    base: Path, config: TrainerConfig, group: RankGroup, folder: Path, repeats: int
) -> dict[str, float]:
    """Train one step, then save and push it again and again; medians."""
    policy = make_policy(base, config, group)
    policy.begin(base)
    tokens = torch.randint(0, 8192, (1, 16))
    policy.module(input_ids=tokens, labels=tokens).loss.backward()
    policy.optimizer.step()
    saves, pushes = [], []
    saver = Saver(CheckpointStore(folder), SavingRank(0, 1, "0" * 16), roles={})
    files = {f"model/{name}": content for name, content in policy.beside().items()}
    for step in range(1, repeats + 1):
        started = time.perf_counter()
        saver.save(step, policy.tensors(), files, ABOUT)
        saver.finish()
        saves.append(time.perf_counter() - started)
        pushes.append(push(policy, group, folder / f"v{step}"))
    saver.close()
    version = folder / f"v{repeats}"
    report = {
        "trained": sum(p.numel() for p in policy.trained().values()),
        "save_bytes": tensor_bytes(CheckpointStore(folder).folder(repeats)),
        "save_s": round(statistics.median(saves), 3),
        "push_bytes": tensor_bytes(version),
        "push_s": round(statistics.median(pushes), 3),
    }
    if FORMATS["peft"].detect(version):
        started = time.perf_counter()
        for source in FORMATS["peft"].read(version).tensors[MODEL].values():
            read_tensor(source)
        report["merge_s"] = round(time.perf_counter() - started, 3)
        copies = AdapterCopies(
            str(base), torch.float32, config.lora.rank if config.lora else 0, folder / "copies"
        )
        copies.add(str(version))  # which reads the base once
        started = time.perf_counter()
        copies.add(str(version))
        report["copy_s"] = round(time.perf_counter() - started, 3)
    return report


def push(policy: Trained, group: RankGroup, folder: Path) -> float:
    """Write a version; returns the seconds."""
    dtype = torch.float32
    served = Served(
        policy.served,
        dtypes=policy.served_as(dtype),
        beside=policy.served_with(dtype),
        stem=policy.served_stem,
    )
    transport = FileTransport(group, served)
    folder.mkdir()
    started = time.perf_counter()
    filling = transport.take(1, last=False)
    filling.begin(folder)
    filling.write(folder, lambda: None)
    seconds = time.perf_counter() - started
    transport.close()
    return seconds


def tensor_bytes(folder: Path) -> int:
    """Of all files of tensors in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


if __name__ == "__main__":
    main()
