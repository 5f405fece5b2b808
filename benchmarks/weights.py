"""From the trainer's step to the servers' next token: how long it takes until a new policy is served.

For each model size, side by side in one run (medians, in seconds):

- memcpy: one copy of the same bytes, from and to warm memory
- stall: how long the trainer stands still to publish
- write: until the version is announced: all tensors are in its folder; with `--transport network`, only the
  address at which servers get them
- push: the pool's part: until every server has loaded and confirmed the version
- publish: both together, the time from publishing to serving
- empty: vLLM's own cost of an update that changes nothing: pause, start, finish, resume, status
- disk (whole versions in files only): a push whose files are not in the page cache, as when a server restarts
- pushed_bytes: that the servers have read or received of a version, in all
- ratio: (publish - empty) / memcpy; push_ratio: (push - empty) / memcpy

Weights change as by AdamW at `--lr`. With `--encodings full delta` each size is measured with whole versions
and with deltas, which are small for `--dtype bfloat16` and a low learning rate.

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

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cairn.config.inference import InferenceConfig
from cairn.inference.client import token_for
from cairn.inference.pool.server_pool import ServerPool
from cairn.inference.server import Server
from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.files import sync
from cairn.run.messages import Attempt, Probe
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import published_dtypes, weights
from cairn.trainer.publishing.policy_store import PolicyStore
from cairn.trainer.publishing.publisher import TRANSPORTS, VersionPublisher
from cairn.trainer.publishing.transports import Served

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
        "--transport",
        default="files",
        choices=["files", "network", "store"],
        help="how the weights are transferred; store: through a folder as object store",
    )
    parser.add_argument(
        "--encodings", nargs="+", default=["full"], choices=["full", "delta"], help="what is transferred"
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="by how much each weight changes, at most")
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
        "MASTER_PORT": str(free_port()),
    }
    group = RankGroup.join(threads=1, deterministic=False)
    runs = []
    try:
        for size in arguments.sizes:
            for encoding in arguments.encodings:
                with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
                    runs.append(asyncio.run(measure(arguments, size, encoding, group, Path(folder))))
                if not arguments.json:
                    print(json.dumps(runs[-1], indent=2), file=sys.stderr)
    finally:
        group.leave()
    print(json.dumps({"benchmark": "weights", "runs": runs}))


async def measure(
    arguments: argparse.Namespace, name: str, encoding: str, group: RankGroup, folder: Path
) -> dict:
    """All times for the model size of this name."""
    dtype = getattr(torch, arguments.dtype)
    model = make_model(name, dtype, folder / "model").float().to(group.device)
    run = RunDirectory(folder / "run")
    attempt = Attempt("benchmark", 1, "rl", 0, None, "main")
    # With the self-check, publishing includes checksums; scoring the probe is not measured here.
    served = Served(partial(weights, model), published_dtypes(model, dtype))
    transport = TRANSPORTS[arguments.transport, encoding](group, served)
    store = PolicyStore(f"file://{folder}/store", run.versions) if arguments.transport == "store" else None
    publisher = VersionPublisher(
        run, attempt, group, transport, 0, make_probe=lambda: Probe([1, 2], [0.0], "float32"), store=store
    )
    with contextlib.ExitStack() as stack:
        size = arguments.tensor_parallel
        servers = []
        for number in range(arguments.servers):
            if torch.cuda.device_count() > 1:  # of this process CUDA has read the variable before
                gpus = range(1 + number * size, 1 + (number + 1) * size)
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            config = InferenceConfig(
                port=free_port(),
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
            times, pushed = await rounds(arguments, encoding, model, run, attempt, publisher, pool)
    medians = {f"{name}_s": statistics.median(values) for name, values in times.items() if values}
    size_bytes = served.nbytes
    return {
        "size": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": size_bytes,
        "dtype": arguments.dtype,
        "transport": arguments.transport,
        "encoding": encoding,
        "lr": arguments.lr,
        "pushed_bytes": statistics.median(pushed),
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
    encoding: str,
    model: torch.nn.Module,
    run: RunDirectory,
    attempt: Attempt,
    publisher: VersionPublisher,
    pool: ServerPool,
) -> tuple[dict[str, list[float]], list[int]]:
    """The times of each repeat, by name, and the bytes of each push, without the warm-up updates."""
    names = ("memcpy", "stall", "write", "push", "publish", "empty", "disk")
    times: dict[str, list[float]] = {name: [] for name in names}
    sizes: list[int] = []
    copy = make_copy(model, getattr(torch, arguments.dtype))

    async def push(step: int) -> float:
        pool.take_metrics()
        started = time.perf_counter()
        await pool.serve(run.versions.folder(step), attempt.version(step))
        seconds = time.perf_counter() - started
        sizes.append(int(pool.take_metrics()["weights/bytes"]))
        return seconds

    for step in range(1, arguments.repeats + WARM_UP + 1):
        publisher.before_update()
        train(model, arguments.lr)
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
    measured = sizes[WARM_UP:]
    for _ in range(arguments.repeats if (arguments.transport, encoding) == ("files", "full") else 0):
        drop_from_page_cache(run.versions.folder(step))
        times["disk"].append(await push(step))
    return times, measured


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


def train(model: torch.nn.Module, lr: float) -> None:
    """Change every weight a little, as an optimiser step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).uniform_(-lr, lr))


def make_copy(model: torch.nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """One copy of all of the weights' bytes as servers get them, from and to warm memory."""
    size = sum(parameter.numel() * dtype.itemsize for parameter in model.parameters())
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
