"""The cost of bringing checkpoints in and out: Cairn, the programs whose formats they are, and the disk.

A model of about 1 GB in float32 with AdamW's state. For each operation, in a process of its own and with an
empty page cache:

- seconds: without imports, until everything is fsynced; cpu_seconds: of all threads
- raw_seconds: reading the same files and writing as many bytes, fsynced, with nothing in between: blocks of 8
  MiB, on one, two or three threads, through the page cache or with O_DIRECT. The first round tries all ways,
  the others the best two. Where an operation reads its result back, so does this, after the fsync: it
  reads the source, writes the result, and reads the result. The source is read once, as the operations do.
- of_raw: the disk's share, raw_seconds / seconds of the same round; 1 is as fast as the disk
- beyond_bytes: peak of resident memory beyond that of the process with its imports
- allowed_bytes: 1.2 times the largest tensor, and 300 MB

Operations: `import` is `ckpt import` of a DCP with the optimiser's state; `export` is `ckpt export --format
hf --dtype bfloat16` of the step that this makes; each also without verifying what was written
(`_unverified`). transformers_bf16 is `from_pretrained` and `save_pretrained` of the same weights;
dcp_load_save is `dcp.load` and `dcp.save` of the same DCP, into a state that is in memory already.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint_limits import BLOCK
from checkpoint_state import drop_cache
from common import make_model, result_of, scratch

SIZES = {
    "1 GB": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 98304,
        "tie_word_embeddings": True,
    },
    "tiny": {},
}
VERIFIED = ("import", "export")
Way = tuple[int, int]
"""Flags for `open`, and the number of threads that read, and of those that write."""
WAYS = [(flags, threads) for flags in sorted({0, getattr(os, "O_DIRECT", 0)}) for threads in (1, 2, 3)]


def main() -> None:
    """Measure all operations in turn, in several rounds, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds; medians are reported")
    parser.add_argument("--dir", type=Path, default=Path("outputs/benchmark"), help="on the disk to measure")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of each process")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, root = arguments.measure
        print(json.dumps({"prepare": prepare, **OPERATIONS}[name](Path(root))))
        return
    if arguments.quick:
        arguments.repeats = 1
    with scratch(arguments.dir) as root:
        report = measure(root, arguments)
    if not arguments.json:
        _show(report)
    print(json.dumps(report))


def measure(root: Path, arguments: argparse.Namespace) -> dict:
    """All operations on one model."""
    (root / "size").write_text("tiny" if arguments.quick else "1 GB")

    def run(name: str) -> dict:
        return result_of(__file__, ["--measure", name, root], arguments.threads)

    about = run("prepare")
    rounds: dict[str, list[dict]] = {name: [] for name in arguments.operations}
    ways = dict.fromkeys(arguments.operations, WAYS)
    for number in range(arguments.repeats):
        for name in arguments.operations:
            drop_cache(root)
            done = run(name)
            source, result = Path(done["source"]), Path(done["result"])
            found = raw_rounds(source, result, root / "raw", ways[name], back=name in VERIFIED)
            ways[name] = sorted(found, key=found.__getitem__)[:2]
            raw = min(found.values())
            rounds[name].append({**done, "raw_seconds": raw, "of_raw": raw / done["seconds"]})
            if not arguments.json:
                print(f"round {number + 1}, {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    medians = {
        name: {
            key: statistics.median(row[key] for row in rows)
            for key in ("seconds", "cpu_seconds", "raw_seconds", "of_raw", "before_bytes", "beyond_bytes")
        }
        | {"bytes": rows[0]["bytes"], "rounds": [row["of_raw"] for row in rows]}
        for name, rows in rounds.items()
    }
    return {**about, "operations": medians}


def _show(report: dict) -> None:
    print(f"weights {report['weights_bytes'] / 1e9:.2f} GB, state {report['state_bytes'] / 1e9:.2f} GB")
    print(
        f"{'':22}{'seconds':>10}{'CPU s':>10}{'raw':>10}{'of raw':>10}{'MB/s':>10}"
        f"{'memory MB':>12}{'allowed':>10}"
    )
    for name, row in report["operations"].items():
        rate = row["bytes"] / row["seconds"] / 1e6
        print(
            f"{name:22}{row['seconds']:>10.2f}{row['cpu_seconds']:>10.2f}{row['raw_seconds']:>10.2f}{row['of_raw']:>10.2f}{rate:>10.0f}"
            f"{row['beyond_bytes'] / 1e6:>12.0f}{report['allowed_bytes'] / 1e6:>10.0f}"
        )


# The disk


def raw_rounds(source: Path, result: Path, scratch: Path, ways: list[Way], *, back: bool) -> dict[Way, float]:
    """Seconds for reading `source` and writing as many bytes as `result` has, in each way.

    Args:
        back: read the result afterwards, as for a comparison.
    """
    reads, size = _files(source), sum(path.stat().st_size for path in _files(result))
    found: dict[Way, float] = {}
    memory = [
        mmap.mmap(-1, BLOCK) for _ in range(8)
    ]  # enough for three threads that read and three that write
    for block in memory:
        block.write(os.urandom(BLOCK))
    for way in ways:
        scratch.unlink(missing_ok=True)
        for path in (source, result):
            drop_cache(path)
        began = time.perf_counter()
        _copy(reads, scratch, size, way, memory)
        if back:
            _copy(_files(result), None, 0, way, memory)
        found[way] = time.perf_counter() - began
    scratch.unlink(missing_ok=True)
    return found


def _files(folder: Path) -> list[Path]:
    """The files of tensors in a folder, or below it."""
    return sorted(p for p in folder.rglob("*") if p.suffix in (".safetensors", ".distcp") and p.is_file())


def _copy(sources: list[Path], target: Path | None, size: int, way: Way, memory: list[mmap.mmap]) -> None:
    """Read all of the sources, and write `size` bytes to `target`, at the same time."""
    flags, threads = way
    reads = [(path, at) for path in sources for at in range(0, path.stat().st_size, BLOCK)]
    writes = list(range(0, size, BLOCK))
    fds = {path: os.open(path, os.O_RDONLY | flags) for path in sources}
    out = os.open(target, os.O_WRONLY | os.O_CREAT | flags, 0o644) if target else -1
    if target:
        os.posix_fallocate(out, 0, max(size, 1))
    free = list(memory)

    def read(place: tuple[Path, int]) -> None:
        block = free.pop()
        os.preadv(fds[place[0]], [block], place[1])
        free.append(block)

    def write(at: int) -> None:
        block = free.pop()
        count = BLOCK if flags else min(BLOCK, size - at)  # with O_DIRECT, whole blocks
        os.pwrite(out, memoryview(block)[:count], at)
        free.append(block)

    with ThreadPoolExecutor(threads) as reading, ThreadPoolExecutor(threads) as writing:
        jobs = [reading.submit(read, place) for place in reads] + [writing.submit(write, at) for at in writes]
        for job in jobs:
            job.result()
    if target:
        os.fsync(out)
        os.close(out)
    for fd in fds.values():
        os.close(fd)


# What runs in a process of its own


def prepare(root: Path) -> dict:
    """Make the model, and a DCP with AdamW's state as a program saves it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoModelForCausalLM

    size = SIZES[(root / "size").read_text()]
    folder = make_model(root / "hf", size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 1}, checkpoint_id=root / "dcp", no_dist=True)
    _import(root, check=False)
    (root / "import").rename(root / "run")
    largest = max(p.nbytes for p in model.parameters())
    return {
        "weights_bytes": sum(p.nbytes for p in model.parameters()),
        "state_bytes": 2 * sum(p.nbytes for p in model.parameters()),
        "largest_bytes": largest,
        "allowed_bytes": 1.2 * largest + 300e6,
    }


def timed(source: Path, result: Path, act: Callable[[], object]) -> dict:
    """Run an operation that makes `result`; its time, and its memory."""
    shutil.rmtree(result, ignore_errors=True)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began, spent = time.perf_counter(), time.process_time()
    act()
    for path in (*result.rglob("*"), result):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    seconds, spent = time.perf_counter() - began, time.process_time() - spent
    return {
        "seconds": seconds,
        "cpu_seconds": spent,
        "before_bytes": before,
        "beyond_bytes": _memory("VmHWM") - before,
        "bytes": sum(path.stat().st_size for path in _files(source)),
        "source": str(source),
        "result": str(result),
    }


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _import(root: Path, *, check: bool) -> dict:
    from transformers import AutoConfig

    from cairn.formats.transfer.import_step import import_checkpoint
    from cairn.model.hub_layout import hub_layout

    model = root / "hf" / "model"
    hub_layout(AutoConfig.from_pretrained(model))  # imports the model's module
    return timed(
        root / "dcp",
        root / "import",
        lambda: import_checkpoint(root / "dcp", root / "import", "dcp", model=model, check=check),
    )


def _export(root: Path, *, check: bool) -> dict:
    from transformers import AutoConfig

    from cairn.formats import WriteOptions
    from cairn.formats.transfer.export_step import export
    from cairn.model.hub_layout import hub_layout

    step = root / "run" / "checkpoints" / "step_1"
    hub_layout(AutoConfig.from_pretrained(step / "model"))  # imports the model's module
    return timed(
        step / "model",
        root / "export",
        lambda: export(step, root / "export", "hf", WriteOptions("BF16"), check=check),
    )


def _transformers(root: Path) -> dict:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models import qwen3  # noqa: F401 # its module is imported before the clock starts

    step = root / "run" / "checkpoints" / "step_1"

    def act() -> None:
        model = AutoModelForCausalLM.from_pretrained(step / "model", dtype=torch.bfloat16)
        model.save_pretrained(root / "transformers")

    return timed(step / "model", root / "transformers", act)


def _dcp(root: Path) -> dict:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root / "hf" / "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    def act() -> None:
        weights, state = get_state_dict(model, optimizer)
        found = {"model": weights, "optim": state, "step": 0}
        dcp.load(found, checkpoint_id=root / "dcp", no_dist=True)
        dcp.save(found, checkpoint_id=root / "dcp_again", no_dist=True)

    return timed(root / "dcp", root / "dcp_again", act)


OPERATIONS: dict[str, Callable[[Path], dict]] = {
    "import": lambda root: _import(root, check=True),
    "import_unverified": lambda root: _import(root, check=False),
    "export": lambda root: _export(root, check=True),
    "export_unverified": lambda root: _export(root, check=False),
    "transformers_bf16": _transformers,
    "dcp_load_save": _dcp,
}


if __name__ == "__main__":
    main()
