#!/usr/bin/env python3
"""Stages of `gpu_trial.py`, each in a process of its own: gpu_stages.py STAGE SHAPE [STEP] prints results."""

import copy
import gc
import itertools
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_trial import RESULT, SHAPES, STEPS, Work
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from cairn.checkpoint.saving.saver import Saver, SavingRank
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.host_staging import copies_from
from cairn.checkpoint.tensors.placement import local_values
from cairn.config.trainer import SFTConfig
from cairn.launch.memory import training_needs
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.machine import available_memory, this_machine
from cairn.trainer.attention.choice import kernel_problem, make_attention
from cairn.trainer.attention.kernels import KernelCall
from cairn.trainer.device import device_for, out_of_memory
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import make_loss
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.model import published_dtypes
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.publishing.transports import FileTransport, Served
from cairn.trainer.scoring.passes import IN_PLACE, compiled, tried
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step

DENSE_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""The vendors' dense bfloat16 FLOP/s, by parts of device names."""


def tell(**results: Any) -> None:
    """Print results."""
    print(RESULT + json.dumps(results), flush=True)


def main() -> None:
    """Run the stage that the command line names."""
    stage, shape, *steps = sys.argv[1:]
    stages = {"device": try_device, "resume": try_resume, "save": try_save, "memory": try_memory}
    tell(gpu=" ".join(gpu.name for gpu in this_machine().gpus))
    with tempfile.TemporaryDirectory() as folder:
        if stage == "step":
            try_step(Path(folder), shape, STEPS[steps[0]])
        else:
            stages[stage](Path(folder), shape)


class Trial:
    """A model of a shape with random weights, and what trains it on one rank."""

    def __init__(self, folder: Path, shape: str, work: Work):
        gpu = torch.cuda.is_available()
        tokens = work.tokens if gpu else 64
        layers = ["full_attention"] * SHAPES[shape]["num_hidden_layers"]
        about = {**SHAPES[shape], "max_position_embeddings": 8192, "layer_types": layers}
        self.model = folder / "model"
        Qwen3Config(**about, tie_word_embeddings=True).save_pretrained(self.model)
        settings = {"seq_len": tokens, "output_dir": str(folder / "run"), "max_steps": 1000, **work.settings}
        self.config = SFTConfig.model_validate(settings).settled(gpu=gpu)
        self.group = joined(self.config)
        self.state = self.new_state()
        self.state.check_model()
        self.loss = make_loss(self.config.loss)
        batch, lengths = drawn(SHAPES[shape]["vocab_size"], tokens, work)
        arrange = self.state.scorer.rows.arrange
        self.batch = make_rank_batch(batch, self.config, rank=0, world_size=1, arrange=arrange)
        self.tokens, self.step = sum(lengths), 0
        self.parameters = sum(p.numel() for p in self.state.policy.module.parameters())
        features = SHAPES[shape]["num_attention_heads"] * SHAPES[shape]["head_dim"] * len(layers)
        squares = sum(length * length for length in lengths)
        self.flops = 6 * self.parameters * self.tokens + 6 * features * squares

    def new_state(self) -> Any:
        """A trainer's state at step 0."""
        models = {POLICY: make_policy(self.model, self.config, self.group)}
        state = TrainerState(self.config, self.group, models, TrainerProgress())
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in state.policy.module.parameters():
                values = local_values(parameter)
                values.normal_(0, 0.02) if parameter.ndim > 1 else values.fill_(1)
        return state

    def train(self, steps: int, before_update: Callable[[], None] = lambda: None) -> float:
        """Train; returns the seconds of a step."""
        wait_for_device()
        began = time.perf_counter()
        for _ in range(steps):
            self.step += 1
            train_step(self.state, self.batch, self.step, self.loss, before_update)
        wait_for_device()
        return (time.perf_counter() - began) / steps

    def values(self) -> dict[str, Any]:
        """Copies of all that a checkpoint holds."""
        named = self.state.tensors().items()
        return {f"{stem}:{name}": local_values(t).clone() for stem, of in named for name, t in of.items()}


def drawn(vocabulary: int, tokens: int, work: Work) -> tuple[Any, list[int]]:
    """A batch of random tokens, and the lengths of its samples."""
    draw = np.random.default_rng(0)
    lengths = [tokens] * work.rows
    if work.short:
        cuts = [*range(0, tokens, 400 if tokens > 400 else 20), tokens]
        lengths = [end - start for start, end in itertools.pairwise(cuts)] * work.rows
    samples = [Sample(draw.integers(0, vocabulary, n, np.int32), np.ones(n, bool)) for n in lengths]
    return Batch(samples, sampling=FROM_TEXT), lengths


def joined(config: Any) -> Any:
    """The group of this one rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    gpu = torch.cuda.is_available()
    return RankGroup.join(
        threads=1,
        deterministic=config.deterministic,
        float32_matmul=config.precision.float32_matmul,
        device=device_for("0" if gpu else None, 0, on_cpu=not gpu),
    )


def wait_for_device() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def try_device(folder: Path, shape: str) -> None:
    """The machine, its rates, and what kernels and copies do there."""
    machine = this_machine()
    tell(torch=torch.__version__, python=sys.version.split()[0], driver=machine.driver)
    tell(processors=len(os.sched_getaffinity(0)))
    tell(**{"GiB of the host": available_memory() / 2**30})
    if torch.cuda.is_available():
        try_rates()
        try_kernels(shape)
        try_pinning()
    tell(**{"late copies read their own memory": late_copies_are_right(folder)})


def try_rates() -> None:
    """GB/s from the GPU to memory that is pinned and not, and FLOP/s of a large product."""
    count = 4 << 30
    source = torch.ones(count, dtype=torch.uint8, device="cuda")
    memory = torch.zeros(count, dtype=torch.uint8)

    def rate() -> float:
        wait_for_device()
        began = time.perf_counter()
        for at in range(0, count, 128 << 20):
            memory[at : at + (128 << 20)].copy_(source[at : at + (128 << 20)], non_blocking=True)
            wait_for_device()
        return count / (time.perf_counter() - began) / 1e9

    tell(**{"unpinned GB/s": rate()})
    copies, began = copies_from([source.device]), time.perf_counter()
    copies.pin(memory)
    tell(**{"seconds to pin a GiB": (time.perf_counter() - began) / 4, "pinned GB/s": rate()})
    copies.unpin(memory)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(15):
        wait_for_device()
        began = time.perf_counter()
        square @ square
        wait_for_device()
        times.append(time.perf_counter() - began)
    tell(**{"matrix product TFLOP/s": 2 * 8192**3 / statistics.median(times[5:]) / 1e12})


def try_kernels(shape: str) -> None:
    """The check of each attention kernel for what layers may ask, and whether the head is fused."""
    about, device = SHAPES[shape], torch.device("cuda")
    layers = ["full_attention"] * about["num_hidden_layers"]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**about, layer_types=layers))
    heads = about["num_attention_heads"], about["num_key_value_heads"], *[about["head_dim"]] * 2
    asked = {
        "": (None, None, False),
        ", window": (64, None, False),
        ", soft cap": (None, 30.0, False),
        ", sinks": (None, None, True),
    }
    for kind in ("varlen", "flex"):
        for name, more in list(asked.items())[: 2 if kind == "varlen" else None]:
            call = KernelCall(*heads, torch.bfloat16, None, *more)
            tell(**{f"kernel {kind}{name}": kernel_problem(make_attention(kind, model), call, device)})
    tell(**{"head is fused": tried(compiled(), device, about["vocab_size"]) is not IN_PLACE})


def try_pinning() -> None:
    """Pin memory that is pinned already, which fails; then use the GPU from the same thread."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    first, second = (copies_from([torch.device("cuda", 0)]) for _ in range(2))
    first.pin(memory)
    second.pin(memory)
    said = None
    try:
        torch.ones(8, device="cuda").add_(1)
        wait_for_device()
    except RuntimeError as error:
        said = str(error)
    first.unpin(memory)
    tell(**{"after memory that can't be pinned": said})


def late_copies_are_right(folder: Path) -> bool:
    """Save strided values, whose contiguous copies are temporary, while others ask for such memory.

    On a GPU the copies begin a second late.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = {name: torch.randn(2048, 4096, device=device).t() for name in ("first", "second", "third")}
    store = CheckpointStore(folder / "late")
    saver = Saver(store, SavingRank(0, 1, "trial"))
    saver.prepare({"model/model": values})
    if device.type == "cuda":
        assert saver._arena is not None
        with saver._arena._copier.running():
            torch.cuda._sleep(2_000_000_000)
    saver.save(1, {"model/model": values}, {}, about())
    taken = []
    for _ in range(60 if device.type == "cuda" else 4):
        taken.append(torch.full((2048, 4096), 7.0, device=device))
        time.sleep(0.02)
    saver.finish()
    saver.close()
    saved = load_file(store.folder(1) / "model" / "model.safetensors")
    return all(torch.equal(saved[name], of.cpu()) for name, of in values.items())


def try_step(folder: Path, shape: str, work: Work) -> None:
    """Train; read the speed, then memory, waits and the GPU's busy share."""
    gpu = torch.cuda.is_available()
    if work.on_gpu and not gpu:
        return
    trial = Trial(folder, shape, work)
    trial.train(3)
    scorer = trial.state.scorer
    tell(attention=scorer.attention.kind, rows=scorer.rows.name, parameters=trial.parameters)
    seconds = trial.train(6)
    tell(step_s=seconds, **{"micro-batches": len(trial.batch.micros), "tokens/s": trial.tokens / seconds})
    need = training_needs(str(trial.model), trial.config, this_machine()).rank
    tell(**{"estimate, GiB": need.total / 2**30})
    if not gpu:
        return
    peak = torch.cuda.max_memory_allocated()
    tell(**{"peak, GiB": peak / 2**30, "reserved, GiB": torch.cuda.max_memory_reserved() / 2**30})
    tell(**{"peak over estimate": peak / need.total})
    name = torch.cuda.get_device_name()
    if vendor := next((rate for part, rate in DENSE_BF16.items() if part in name), None):
        tell(mfu=trial.flops / seconds / vendor)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trial.train(1)
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    tell(waits=len(places), **{"where it waits": sorted(set(places))})
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = trial.train(1)
    times = [(event.self_device_time_total / 1e6, event.key) for event in profiler.key_averages()]
    longest = sorted(times, reverse=True)[:12]
    tell(busy=sum(spent for spent, _ in times) / wall)
    tell(kernels=[f"{1000 * spent:.1f} ms {key[:60]}" for spent, key in longest])


def try_resume(folder: Path, shape: str) -> None:
    """Save while training goes on; the checkpoint is the step's state, and what follows has the same bits."""
    trial = Trial(folder, shape, Work({"deterministic": True}, 1024, 4))
    store = CheckpointStore(folder / "checkpoints")
    saver = Saver(store, SavingRank(0, 1, "trial"))
    trial.train(2)
    before = trial.values()
    progress = {"progress": {"step": 2}, "rows": trial.state.scorer.rows.name}
    files = {"model/config.json": b"{}\n", "trainer/state.json": json.dumps(progress).encode()}
    saver.save(2, trial.state.tensors(), files, about())
    trial.train(2, saver.before_update)
    saver.finish()
    saver.close()
    after = trial.values()
    again = copy.copy(trial)
    scorer, trial.state = trial.state.scorer, None
    gc.collect()
    again.state, again.step = again.new_state(), 2
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    again.state.load(store.folder(2))
    if gpu:
        largest = max(p.nbytes for p in again.state.policy.module.parameters())
        more = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        tell(**{"loading takes, GiB": more / 2**30, "loading takes, largest weights": more / largest})
    again.state.scorer.rows = scorer.rows
    again.state.scorer.attend(scorer.attention)
    tell(attention=scorer.attention.kind, **{"the step is as it was saved": same(again.values(), before)})
    del before
    again.train(2)
    tell(**{"the bits are the same": same(again.values(), after)})


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether tensors are the same, bit by bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def try_save(folder: Path, shape: str) -> None:
    """Steps with and without a save under way, and publishing in the data type of the computation."""
    trial = Trial(folder, shape, Work())
    trial.train(4)
    store = CheckpointStore(folder / "checkpoints")
    saver = Saver(
        store, SavingRank(0, 1, "trial"), after_commit=lambda step: shutil.rmtree(store.folder(step))
    )
    began = time.perf_counter()
    saver.prepare(trial.state.tensors())
    assert saver._arena is not None
    saver._arena._ready.join()
    nbytes = saver._arena.plan.arena_bytes
    tell(**{"GiB": nbytes / 2**30, "seconds to make the arena": time.perf_counter() - began})
    free, busy, begins = list[float](), list[float](), list[float]()
    for _ in range(3):
        free.append(trial.train(1))
        began = time.perf_counter()
        saver.save(trial.step, trial.state.tensors(), {}, about())
        begins.append(time.perf_counter() - began)
        busy.append(begins[-1] + trial.train(1, saver.before_update))
        saver.finish()
        (saved,) = saver.check()
        tell(stall_s=saved.stall_seconds, durable_s=saved.durable_seconds)
    saver.close()
    tell(**{"seconds to begin": statistics.median(begins), "step_s": statistics.median(free)})
    tell(**{"steps without a save, s": free, "steps with one, s": busy})
    tell(**{"a step takes longer": statistics.median(busy) / statistics.median(free) - 1})
    try_publishing(trial, torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def try_publishing(trial: Trial, dtype: Any) -> None:
    """Seconds that training waits for a policy to be taken, and until its files are written, in memory."""
    policy = trial.state.policy
    dtypes = published_dtypes(policy.module, dtype)
    served = Served(policy.served, dtypes=dtypes, beside=policy.served_with(dtype))
    transport = FileTransport(trial.group, served)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for time_of in ("first", "next"):
            began = time.perf_counter()
            filling = transport.take(1, last=False)
            taken = time.perf_counter() - began
            filling.begin(Path(folder))
            filling.write(Path(folder), lambda: None)
            written = time.perf_counter() - began
            tell(**{f"{time_of} policy taken, s": taken, f"{time_of} policy written, s": written})


def try_memory(folder: Path, shape: str) -> None:
    """Ask for much more memory than any GPU has."""
    trial = Trial(folder, shape, Work({"micro_batch_size": 128}, rows=128))
    try:
        trial.train(1)
        tell(says="it fits")
    except Exception as error:
        if (said := out_of_memory(error, trial.config)) is None:
            raise
        tell(says=str(said)[:13], message=str(said))


def about() -> dict[str, Any]:
    """What a manifest says of the run."""
    empty = {"dtypes": {}, "metrics": {}, "versions": {}}
    return {
        **{"run_id": "trial", "attempt": 1, "branch": "trial", "parts": ["trainer"], "parent": None},
        **{"world_size": 1, "config_digest": "", **empty},
    }


if __name__ == "__main__":
    main()
