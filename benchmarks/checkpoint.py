"""How much saving and loading cost: Cairn, PyTorch's own ways, and the raw limits, side by side in one run.

A transformer-sized stack of linear layers trains with AdamW under FSDP2 while it is saved. For each system:

- stall_s: how long the training loop stands still for a save
- lost_s: stall and slowdown of the steps that overlap the save, against undisturbed steps
- durable_s: from the call until everything is fsynced (Cairn: and committed)
- load_cold_s, load_warm_s: until the state is back, page cache dropped or full; Cairn verifies every byte
- extra_bytes: how much more memory the process and its helpers take

Runs as `python benchmarks/checkpoint.py`, or under torchrun for one size only. Needs neither Ray nor vLLM.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.run.files import sync

BLOCK = 8 << 20
SYSTEMS = [
    "cairn",
    "dcp_save",
    "dcp_thread",
    "dcp_process",
    "torch_checkpointing",
    "torch_save",
    "safetensors",
]


def main() -> None:
    """Run the sizes and ranks that were asked for, each in processes of its own, and print one object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, nargs="+", default=[100e6, 500e6], help="model sizes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument(
        "--repeats", type=int, default=5, help="saves and loads per system; medians are reported"
    )
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--dir", type=Path, default=Path("outputs/benchmark"), help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="one small size, under a minute")
    parser.add_argument("--json", action="store_true", help="print nothing but one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.params, arguments.ranks, arguments.repeats = [10e6], [1], 3
        arguments.systems = [name for name in arguments.systems if name != "dcp_process"]
    if "RANK" in os.environ:
        result = measure(arguments, int(arguments.params[0]))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)
        return
    runs = []
    for params in arguments.params:
        for ranks in arguments.ranks:
            runs.append(_in_processes(arguments, params, ranks))
            if not arguments.json:
                _show(runs[-1])
    report = {**runs[0], "runs": runs, "scale": measure_scale(100 if arguments.quick else 10_000)}
    if not arguments.json:
        print(json.dumps(report["scale"], indent=2))
    print(json.dumps(report))


def _in_processes(arguments: argparse.Namespace, params: float, ranks: int) -> dict:
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            __file__,
        ),
        *("--params", str(params), "--repeats", str(arguments.repeats), "--dir", str(arguments.dir)),
        *("--systems", *arguments.systems),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _show(run: dict) -> None:
    limits = run["limits"]
    print(f"\n{run['params'] / 1e6:.0f}M parameters, {run['ranks']} ranks, {run['state_bytes'] / 1e9:.2f} GB")
    print("limits: " + "  ".join(f"{key} {value:.3f}" for key, value in limits.items()))
    print(f"{'':20}" + "".join(f"{key:>14}" for key in next(iter(run["systems"].values()))))
    for name, values in run["systems"].items():
        print(f"{name:20}" + "".join(f"{'-' if v is None else f'{v:.3f}':>14}" for v in values.values()))


# One size, on the ranks that torchrun started


def measure(arguments: argparse.Namespace, params: int) -> dict:
    """All systems on the same state; every rank calls it."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    training = Training(params, "cuda" if cuda else "cpu")
    rank = dist.get_rank()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    paths = [tempfile.mkdtemp(dir=arguments.dir) if rank == 0 else None]
    dist.broadcast_object_list(paths)
    root = Path(paths[0])
    try:
        limits = measure_limits(training, root, arguments.repeats)
        if rank == 0:  # as for each system below: a run of an hour that is cut short has not been for nothing
            print(json.dumps({"params": params, "limits": limits}), file=sys.stderr, flush=True)
        systems = {}
        for name in arguments.systems:
            with contextlib.suppress(ImportError):
                systems[name] = measure_system(name, training, root / name, arguments.repeats)
                if rank == 0:
                    print(json.dumps({"params": params, name: systems[name]}), file=sys.stderr, flush=True)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(root / name, ignore_errors=True)
            dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    report = {
        "params": params,
        "ranks": dist.get_world_size(),
        "state_bytes": training.total_bytes,
        "step_s": training.step_seconds,
        "limits": limits,
        "systems": systems,
        "ratios": ratios(limits, systems),
    }
    dist.destroy_process_group()
    return report


def ratios(limits: dict, systems: dict) -> dict:
    """What Cairn reaches of the limits and of its peers."""
    if "cairn" not in systems:
        return {}
    cairn = systems["cairn"]
    found = {
        "stall / memcpy": cairn["stall_s"] / limits["memcpy_s"],
        "durable / write_fsync": cairn["durable_s"] / limits["write_fsync_s"],
        "load_cold / read_cold": cairn["load_cold_s"] / limits["read_cold_s"],
        "load_warm / read_warm": cairn["load_warm_s"] / limits["read_warm_s"],
    }
    peers = {name: values for name, values in systems.items() if name.startswith("dcp")}
    if "dcp_thread" in peers:
        found["stall / dcp_thread stall"] = cairn["stall_s"] / peers["dcp_thread"]["stall_s"]
    if peers:
        found["lost / best dcp lost"] = cairn["lost_s"] / min(values["lost_s"] for values in peers.values())
    return found


class Training:
    """A model that trains, with about as much compute per parameter as a language model on short rows."""

    def __init__(self, params: int, device: str):
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        width = 1024 if params >= 50e6 else 512
        layers = max(1, round(params / (8 * width * width + 5 * width)))
        self.model = torch.nn.Sequential(
            *(
                torch.nn.Sequential(
                    torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
                )
                for _ in range(layers)
            )
        ).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = torch.randn(16, width, device=device)
        self.device = device
        for _ in range(2):
            self.step()
        self.step_seconds = statistics.median(self.timed_step() for _ in range(7))
        state = self.tensors()
        self.total_bytes = sum(
            t.numel() * t.element_size() for named in state.values() for t in named.values()
        )

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        """One step: forward, backward, update."""
        self.model(self.batch).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def timed_step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def tensors(self) -> dict:
        """The state as Cairn takes it."""
        optimizer = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        return {"model/model": dict(self.model.state_dict()), "trainer/optimizer": optimizer}

    def flat(self) -> dict:
        """The state as PyTorch's ways take it."""
        return {f"{stem}.{name}": t for stem, named in self.tensors().items() for name, t in named.items()}

    def local_buffers(self) -> list:
        """This rank's bytes, as memory that raw reads and writes can use."""
        from torch.distributed.tensor import DTensor

        flat = (t.detach() for t in self.flat().values())
        local = (t.to_local() if isinstance(t, DTensor) else t for t in flat)
        return [t.cpu().contiguous() for t in local if t.numel()]


def measure_limits(training: Training, root: Path, repeats: int) -> dict[str, float]:
    """What the hardware does with the same bytes and nothing else."""
    import mmap

    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    buffers = training.local_buffers()
    nbytes = sum(b.nbytes for b in buffers) // 4096 * 4096
    arena = mmap.mmap(-1, nbytes + 4096)
    target = torch.frombuffer(arena, dtype=torch.uint8)
    path = root / f"raw{rank}"

    def memcpy() -> None:
        position = 0
        for buffer in buffers:
            flat = buffer.view(-1).view(torch.uint8)
            count = min(len(flat), len(target) - position)
            target[position : position + count].copy_(flat[:count])
            position += count

    def write(flags: int, threads: int) -> None:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
        os.ftruncate(fd, nbytes)
        view = memoryview(arena)
        with ThreadPoolExecutor(threads) as pool:
            list(
                pool.map(
                    lambda at: os.pwrite(fd, view[at : min(at + BLOCK, nbytes)], at), range(0, nbytes, BLOCK)
                )
            )
        os.fsync(fd)
        os.close(fd)
        view.release()

    def read(flags: int, threads: int, run: int = BLOCK, block: int = BLOCK) -> None:
        """Each thread takes the next `run` bytes and reads them in blocks."""
        fd = os.open(path, os.O_RDONLY | flags)
        view = memoryview(arena)

        def read_run(at: int) -> None:
            end = min(at + run, nbytes)
            while at < end:
                at += os.preadv(fd, [view[at : min(at + block, end)]], at)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_run, range(0, nbytes, run)))
        os.close(fd)
        view.release()

    def best(ways: list[Callable[[], None]], before: Callable[[], None] = lambda: None) -> float:
        """The median of the fastest way; which ways are worth repeating is seen from trying each once."""
        tried = [[_together(way, before) for way in ways]]
        dist.broadcast_object_list(tried)  # the ranks do the same
        chosen = sorted(range(len(ways)), key=tried[0].__getitem__)[:3]
        return min(statistics.median(_together(ways[i], before) for _ in range(repeats)) for i in chosen)

    memcpy()
    direct = getattr(os, "O_DIRECT", 0)
    limits = {
        "memcpy_s": best([memcpy]),
        "write_fsync_s": best([lambda f=f, t=t: write(f, t) for f in {0, direct} for t in (1, 2)]),
    }
    streams = [lambda t=t: read(0, t, run=64 << 20, block=512 << 10) for t in (2, 3)]
    cold = [lambda f=f, t=t: read(f, t) for f in {0, direct} for t in (1, 2)]
    limits["read_cold_s"] = best([*cold, *streams], lambda: drop_cache(root))
    read(0, 1)
    limits["read_warm_s"] = best([*(lambda t=t: read(0, t) for t in (1, 2)), *streams])
    path.unlink()
    return limits


def _together(action: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Seconds until all ranks have done it."""
    import torch.distributed as dist

    before()
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def drop_cache(folder: Path) -> None:
    """Have the kernel forget the files' pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure_system(name: str, training: Training, root: Path, repeats: int) -> dict[str, float | None]:
    """Save and load repeatedly with one system, after one save and one load that are not counted."""
    import torch.distributed as dist

    root.mkdir(parents=True, exist_ok=True)
    with Memory(0) as undisturbed:
        for _ in range(3):
            training.step()
    memory = Memory(undisturbed.peak)
    system = {
        "cairn": CairnSystem,
        "dcp_save": DcpSystem,
        "dcp_thread": DcpSystem,
        "dcp_process": DcpSystem,
        "torch_checkpointing": MetaSystem,
        "torch_save": WholeFileSystem,
        "safetensors": WholeFileSystem,
    }[name](name, training, root)
    stalls, losses, durables = [], [], []
    with memory:
        for repeat in range(repeats + 1):
            stall, lost, durable = _one_save(system, training, repeat + 1)
            if repeat:
                stalls.append(stall)
                losses.append(lost)
                durables.append(durable)
            if dist.get_rank() == 0 and name != "cairn":  # which does that itself
                for path in root.glob("step_*"):
                    if path != root / f"step_{repeat + 1}":
                        shutil.rmtree(path)
            dist.barrier()
    system.load()
    dist.barrier()
    cold = [_together(system.load, lambda: drop_cache(root)) for _ in range(repeats)]
    system.load()  # the kernel treats pages that were read once otherwise than those that are in use
    warm = [_together(system.load) for _ in range(repeats)]
    system.close()
    return {
        "stall_s": statistics.median(stalls),
        "lost_s": max(statistics.median(losses), 0.0),
        "durable_s": statistics.median(durables),
        "load_cold_s": statistics.median(cold),
        "load_warm_s": statistics.median(warm),
        "extra_bytes": memory.peak,
    }


def _one_save(system, training: Training, number: int) -> tuple[float, float, float]:
    """Save once while training goes on: stall, time lost in all, and time to durable, in seconds."""
    import torch.distributed as dist

    step = statistics.median(training.timed_step() for _ in range(5))  # undisturbed, at the moment
    dist.barrier()
    began = time.perf_counter()
    system.save(number)
    stall = time.perf_counter() - began
    waited = [0.0]

    def before_update() -> None:
        started = time.perf_counter()
        system.before_update()
        waited[0] += time.perf_counter() - started

    steps = 0
    durable = None
    while durable is None or steps < 2:
        training.step(before_update)
        steps += 1
        if durable is None:
            durable = system.durable_seconds()
    lost = time.perf_counter() - began - steps * step
    return stall + waited[0], lost, durable


class Memory:
    """The most memory that this process and its children take meanwhile, in bytes beyond `base`."""

    def __init__(self, base: int):
        self.base = base
        self.peak = 0
        self._stop = threading.Event()

    def __enter__(self) -> "Memory":
        def watch() -> None:
            while True:
                self.peak = max(self.peak, _memory() - self.base)
                if self._stop.wait(0.1):
                    return

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _memory() -> int:
    """Proportional memory of this process and its children, in bytes; shared pages are counted once."""
    total = 0
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    for pid in [str(os.getpid()), *children.read_text().split()]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


class CairnSystem:
    """What a Cairn trainer does."""

    def __init__(self, name: str, training: Training, root: Path):
        import torch.distributed as dist

        from cairn.checkpoint.saver import Saver, SavingRank
        from cairn.checkpoint.store import CheckpointStore

        self.training = training
        self.rank = dist.get_rank()
        self.store = CheckpointStore(root)
        self.saver = Saver(
            self.store,
            SavingRank(self.rank, dist.get_world_size(), "benchmark"),
            after_commit=lambda step: self.store.delete(step - 1) if step > 1 else None,
        )
        self.before_update = self.saver.before_update
        self.about = {
            **{"run_id": "benchmark", "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]},
            **{"world_size": dist.get_world_size(), "dtypes": {}, "metrics": {}, "versions": {}},
            "config_digest": "",
        }

    def save(self, number: int) -> None:
        self.step = number
        self.saver.save(number, self.training.tensors(), {"trainer/state.json": b"{}"}, self.about)

    def durable_seconds(self) -> float | None:
        saved = self.saver.check()
        return saved[0].durable_seconds if saved else None

    def load(self) -> None:
        import torch.distributed as dist

        from cairn.checkpoint.tensors import load_step

        def gather(mine):
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, mine)
            return gathered

        self.saver.finish()
        load_step(self.store.folder(self.step), self.training.tensors(), rank=self.rank, gather=gather)

    def close(self) -> None:
        self.saver.finish()
        self.saver.close()


class DcpSystem:
    """torch.distributed.checkpoint: `save`, or `async_save` with a thread or a process."""

    def __init__(self, name: str, training: Training, root: Path):
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.dcp = dcp
        self.training = training
        self.root = root
        self.future = None
        self.kind = {
            "dcp_thread": AsyncCheckpointerType.THREAD,
            "dcp_process": AsyncCheckpointerType.PROCESS,
        }.get(name)
        self.group = dist.new_group(backend="gloo") if self.kind else None

    def save(self, number: int) -> None:
        self.path = self.root / f"step_{number}"
        self.began = time.perf_counter()
        if self.kind is None:
            self.dcp.save(self.training.flat(), checkpoint_id=self.path)
            self.ended = time.perf_counter()
            return
        self.ended = None
        self.future = self.dcp.async_save(
            self.training.flat(),
            checkpoint_id=self.path,
            process_group=self.group,
            async_checkpointer_type=self.kind,
        )
        future = getattr(self.future, "upload_completion", self.future)
        future.add_done_callback(lambda _: setattr(self, "ended", time.perf_counter()))

    def before_update(self) -> None:
        pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began if self.ended else None

    def load(self) -> None:
        self.dcp.load(self.training.flat(), checkpoint_id=self.path)

    def close(self) -> None:
        pass


class MetaSystem:
    """Meta's torch_checkpointing, saving asynchronously, where it is installed (group `bench`).

    Its direct writes fail here with EINVAL, so they are off; and it fsyncs nothing, so that is done for it.
    """

    def __init__(self, name: str, training: Training, root: Path):
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        items = {"state": ItemSpec(resharder=DefaultResharder())}
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(items=items, storage_config=storage))
        self.training = training
        self.root = root

    def save(self, number: int) -> None:
        self.path = str(self.root / f"step_{number}")
        self.began = time.perf_counter()
        self.ended = None
        self.future = self.manager.save(self.path, {"state": self.training.flat()})
        threading.Thread(target=self._make_durable, daemon=True).start()

    def _make_durable(self) -> None:
        self.future.result()
        for path in Path(self.path).rglob("*"):
            sync(path)
        self.ended = time.perf_counter()

    def before_update(self) -> None:
        with self.manager.lock():
            pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began if self.ended else None

    def load(self) -> None:
        self.manager.load(self.path, into={"state": self.training.flat()})

    def close(self) -> None:
        self.manager.close()


class WholeFileSystem:
    """`torch.save` and `safetensors.save_file` of each rank's state, fsynced."""

    def __init__(self, name: str, training: Training, root: Path):
        import torch.distributed as dist

        self.name = name
        self.training = training
        self.root = root
        self.path = root / f"rank{dist.get_rank()}"

    def _local(self) -> dict:
        from torch.distributed.tensor import DTensor

        flat = self.training.flat()
        return {k: (t.to_local() if isinstance(t, DTensor) else t).detach() for k, t in flat.items()}

    def save(self, number: int) -> None:
        import torch
        from safetensors.torch import save_file

        self.began = time.perf_counter()
        state = self._local()
        if self.name == "torch_save":
            torch.save(state, self.path)
        else:
            save_file(state, self.path)
        sync(self.path)
        self.ended = time.perf_counter()

    def before_update(self) -> None:
        pass

    def durable_seconds(self) -> float | None:
        return self.ended - self.began

    def load(self) -> None:
        import torch
        from safetensors.torch import load_file

        if self.name == "torch_save":
            loaded = torch.load(self.path, weights_only=True, mmap=True)
        else:
            loaded = load_file(self.path)
        for name, tensor in self._local().items():
            tensor.copy_(loaded[name])

    def close(self) -> None:
        pass


# How the rules scale, with neither tensors nor ranks


def measure_scale(steps: int) -> dict[str, float]:
    """Seconds that listing, resolving and retention take among many steps, and planning for many tensors."""
    from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum
    from cairn.checkpoint.layout import TensorSpec, plan, plan_rank
    from cairn.checkpoint.manifest import FileEntry, Manifest, parse
    from cairn.checkpoint.receipts import make_receipt, read_receipt
    from cairn.checkpoint.retention import Step, read_steps, reasons_to_keep
    from cairn.checkpoint.store import CheckpointStore
    from cairn.config.ckpt import CkptConfig

    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(what: str):
        started = time.perf_counter()
        yield
        seconds[what] = time.perf_counter() - started

    about = {
        **{
            "run_id": "scale",
            "attempt": 1,
            "branch": "main",
            "parent": None,
            "created": "",
            "parts": ["trainer"],
        },
        **{"world_size": 4096, "dtypes": {}, "metrics": {"loss": 1.0}, "versions": {}, "config_digest": ""},
    }
    with tempfile.TemporaryDirectory() as temporary:
        store = CheckpointStore(temporary)
        for step in range(1, steps + 1):
            store.folder(step).mkdir()
            (store.folder(step) / "manifest.json").write_bytes(
                Manifest(step=step, files={}, **about).to_json()
            )
        with timed(f"latest of {steps} steps"):
            assert store.latest() == steps
        with timed(f"list {steps} steps"):
            assert len(store.steps()) == steps
        with timed(f"read {steps} manifests"):
            read_steps(store)
    rules = CkptConfig(keep_last=3, keep_every=1000, keep_best=5, metric="loss", mode="min")
    with timed(f"retention over {steps} steps"):
        reasons_to_keep([Step(step, {"loss": 1 / step}) for step in range(1, steps + 1)], rules, set())

    tensors, ranks = 10 * steps, 4096
    specs = [TensorSpec(f"layers.{i}.weight", "BF16", (4096, 128)) for i in range(tensors)]
    with timed(f"plan {tensors} tensors"):
        files, _ = plan(specs, "model")
    shard = specs[0].nbytes // ranks
    held = {spec.name: [(7 * shard, shard)] for spec in specs}
    with timed(f"plan one of {ranks} ranks"):
        plan_rank(files, held, with_headers=False)
    own = {
        file.name: FileChecksum(file.size, dict.fromkeys(range(file.size // CHUNK_BYTES), 1))
        for file in files
    }
    part = json.dumps(make_receipt("scale", own))
    merged = {file.name: FileChecksum(file.size) for file in files}
    with timed("add up the parts of 64 ranks"):
        for _ in range(64):
            for name, checksum in read_receipt(json.loads(part)).items():
                merged[name].merge(checksum)
    with timed(f"write a manifest of {tensors} tensors"):
        entries = {file.name: FileEntry.of(file.size, [0] * -(-file.size // CHUNK_BYTES)) for file in files}
        text = Manifest(step=1, files=entries, **about).to_json()
    with timed(f"read a manifest of {tensors} tensors"):
        parse(text, "manifest")
    return seconds


if __name__ == "__main__":
    main()
