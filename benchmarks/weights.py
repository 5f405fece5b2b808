"""From the trainer's step to the servers' next token: how long it takes until a new policy is served.

For each model size, side by side in one run (medians, in seconds):

- memcpy: one copy of the same bytes, from and to warm memory
- stall: how long the trainer stands still to publish
- write: until the version is announced: all tensors are in its folder; with `--transport network`, only the
  address at which servers get them
- push: the pool's part: until every server has loaded and confirmed the version
- publish: both together, the time from publishing to serving
- empty: vLLM's own cost of an update that changes nothing: pause, start, finish, resume, status
- disk (transport "files" only): a push whose files are not in the page cache, as when a server restarts
- ratio: (publish - empty) / memcpy; push_ratio: (push - empty) / memcpy

Runs as `python benchmarks/weights.py`, on the CPU or on GPUs, where servers have CUDA graphs, as is their
default; starts the servers itself. With several GPUs the first one trains, and each server has
`--tensor-parallel` of the others; that all of them hold what was published is what a push checks.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cairn.config.inference import InferenceConfig
from cairn.inference.client import token_for
from cairn.inference.pool.server_pool import ServerPool
from cairn.inference.server import Server
from cairn.run.directory import RunDirectory
from cairn.run.files import sync
from cairn.run.messages import Attempt, Probe
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import weights
from cairn.trainer.publishing.publisher import VersionPublisher
from cairn.trainer.publishing.transports import TRANSPORTS, Served

WARM_UP = 3
"""Updates before the measured ones."""
SIZES = {
    "10M": {"hidden_size": 384, "num_hidden_layers": 5, "intermediate_size": 1152},
    "60M": {"hidden_size": 768, "num_hidden_layers": 8, "intermediate_size": 2304},
    "200M": {"hidden_size": 1280, "num_hidden_layers": 10, "intermediate_size": 3840},
    "1.5B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144},
}


def main() -> None:
    """Measure the requested sizes and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["10M", "60M"], choices=SIZES, help="model sizes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--servers", type=int, default=1, help="number of servers to update")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server")
    parser.add_argument(
        "--transport", default="files", choices=["files", "network"], help="how the weights are transferred"
    )
    parser.add_argument("--repeats", type=int, default=7, help="updates; medians are reported")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each server")
    parser.add_argument("--dir", type=Path, default=None, help="run directory (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="one small size, under a minute")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.repeats = ["10M"], 3
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(common.free_port()),
    }
    group = RankGroup.join(threads=1, deterministic=False)
    runs = []
    try:
        for size in arguments.sizes:
            with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
                runs.append(asyncio.run(measure(arguments, size, group, Path(folder))))
            if not arguments.json:
                print(json.dumps(runs[-1], indent=2), file=sys.stderr)
    finally:
        group.leave()
    print(json.dumps({"benchmark": "weights", "runs": runs}))


async def measure(arguments: argparse.Namespace, name: str, group: RankGroup, folder: Path) -> dict:
    """All times for the model size of this name."""
    model = make_model(name, getattr(torch, arguments.dtype), folder / "model").to(group.device)
    run = RunDirectory(folder / "run")
    attempt = Attempt("benchmark", 1, "rl", 0, None, "main")
    # With the self-check, publishing includes checksums; scoring the probe is not measured here.
    transport = TRANSPORTS[arguments.transport](group, Served(partial(weights, model)))
    publisher = VersionPublisher(
        run, attempt, group, transport, 0, make_probe=lambda: Probe([1, 2], [0.0], "float32")
    )
    with contextlib.ExitStack() as stack:
        size = arguments.tensor_parallel
        servers = []
        for number in range(arguments.servers):
            if torch.cuda.device_count() > 1:  # of this process CUDA has read the variable before
                gpus = range(1 + number * size, 1 + (number + 1) * size)
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            config = InferenceConfig(
                port=common.free_port(),
                kv_cache_memory="64M",
                threads=arguments.threads,
                max_model_len=256,
                tensor_parallel=size,
            )
            server = Server(config, str(folder / "model"), folder / f"{config.port}.log")
            servers.append(stack.enter_context(server))
        for server in servers:
            await asyncio.to_thread(server.wait_ready)
        async with ServerPool([server.url for server in servers]) as pool:
            await pool.wait_ready(30)
            while pool.take_metrics()["servers/healthy"] < len(servers):
                await asyncio.sleep(0.1)
            times = await rounds(arguments, model, run, attempt, publisher, pool)
    medians = {f"{name}_s": statistics.median(values) for name, values in times.items() if values}
    size_bytes = sum(p.nbytes for p in model.parameters())
    return {
        "size": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size_bytes,
        "dtype": arguments.dtype,
        "transport": arguments.transport,
        "device": group.device.type,
        "servers": arguments.servers,
        "tensor_parallel": arguments.tensor_parallel,
        "threads": arguments.threads,
        "repeats": arguments.repeats,
        **medians,
        "ratio": (medians["publish_s"] - medians["empty_s"]) / medians["memcpy_s"],
        "push_ratio": (medians["push_s"] - medians["empty_s"]) / medians["memcpy_s"],
        "all": times,
    }


async def rounds(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    run: RunDirectory,
    attempt: Attempt,
    publisher: VersionPublisher,
    pool: ServerPool,
) -> dict[str, list[float]]:
    """The times of each repeat, by name, without the warm-up updates."""
    names = ("memcpy", "stall", "write", "push", "publish", "empty", "disk")
    times: dict[str, list[float]] = {name: [] for name in names}
    copy = make_copy(model)

    async def push(step: int) -> float:
        started = time.perf_counter()
        await pool.serve(run.versions.folder(step), attempt.version(step))
        return time.perf_counter() - started

    for step in range(1, arguments.repeats + WARM_UP + 1):
        publisher.before_update()
        train(model)
        copy()
        copied = timed(copy)
        publish = partial(publisher.publish, step, save=False, last=False)
        stood_still = timed(publish)
        written = stood_still + timed(publisher.finish)
        pushed = await push(step)
        empty = max([await empty_update(url) for url in pool.urls])
        if step > WARM_UP:
            for name, value in zip(
                names, (copied, stood_still, written, pushed, written + pushed, empty), strict=False
            ):
                times[name].append(value)
        run.versions.forget_before(step)  # as the orchestrator does
    for _ in range(arguments.repeats if arguments.transport == "files" else 0):
        drop_from_page_cache(run.versions.folder(step))
        times["disk"].append(await push(step))
    return times


def make_model(size: str, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A Qwen3 with random weights, saved to `folder`."""
    config = Qwen3Config(
        vocab_size=4096,
        num_attention_heads=SIZES[size]["hidden_size"] // 64,
        num_key_value_heads=SIZES[size]["hidden_size"] // 128,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        dtype=dtype,
        **SIZES[size],
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


def train(model: torch.nn.Module) -> None:
    """Change every weight a little, as an optimiser step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)


def make_copy(model: torch.nn.Module) -> Callable[[], None]:
    """One copy of all of the weights' bytes, from and to warm memory."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    source, target = torch.ones(size // 4), torch.ones(size // 4)
    return lambda: target.copy_(source)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


async def empty_update(url: str) -> float:
    """Seconds for vLLM's own sequence of calls for an update, without any weights."""
    headers = {"Authorization": f"Bearer {token_for(url)}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        await http.get("/cairn/status")
        version = (await http.get("/weight_info")).json()["weight_version"]
        started = time.perf_counter()
        for path, body in (
            ("/pause?mode=keep", None),
            ("/start_weight_update", None),
            ("/finish_weight_update", {"weight_version": version}),
            ("/resume", None),
        ):
            (await http.post(path, json=body)).raise_for_status()
        (await http.get("/cairn/status")).raise_for_status()
        return time.perf_counter() - started


def drop_from_page_cache(folder: Path) -> None:
    """Remove a folder's tensor files from the page cache, so that the next reader reads the disk."""
    for file in folder.glob("*.safetensors"):
        sync(file)
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
