"""How long a JSON Lines file takes up to the first batch and to be read once, beside `datasets` and a limit.

Each way runs in a process of its own with caches of its own. Prints one JSON object, of each way:
- open_s: until the records can be read and all are checked, the first time, with an empty cache
- again_s: the same with the cache of the first time
- batch_s: to read 64 records in a shuffled order behind that
- pass_s: to read every record once in the order of the file
- peak_mb: memory of the process at its peak
- cache_mb: what it has written to its cache
`datasets` is what Cairn used before: its JSON builder, and a digest of all records. limit: reading the file's
lines and json.loads of each, which checks nothing and can't go to a record.

ranks: processor seconds of one rank for a step's batch of many ranks, from the order of records to packed
micro-batches, if it tokenises all records (whole_s), and with the shares of the others, which are made
before and not counted (share_s). exchanged_mb: what all ranks tell each other. The same tokens as a batch
of RL, with logprobs and advantages, from its file: all of it read (file_whole_s), and the rows of the rank
(file_share_s). The tokenizer is the
example's, and the limit of a row 4096 tokens, of which each rank has 8 rows.

Runs as `python benchmarks/records.py [--mb N] [--folder F] [--ranks N] [--quick] [--json]`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64


def main() -> None:
    """Measure all ways, and print one JSON object."""
    parser = argparse.ArgumentParser(description="measure reading of JSON Lines")
    parser.add_argument("--mb", type=int, default=50, help="size of the file")
    parser.add_argument("--folder", help="where file and caches go (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a file of 1 MB")
    parser.add_argument("--json", action="store_true", help="all on one line")
    parser.add_argument("--ranks", type=int, default=64, help="ranks whose batch is made (4 with --quick)")
    parser.add_argument("--way", choices=[*WAYS, "ranks"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "ranks":
        print(json.dumps(by_ranks(Path(options.folder), options.ranks)))
        return
    if options.way:
        print(json.dumps(WAYS[options.way](Path(options.folder))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        records = write(folder / "data.jsonl", 1 if options.quick else options.mb)
        found: dict[str, Any] = {"mb": (folder / "data.jsonl").stat().st_size / 1e6, "records": records}
        for way in WAYS:
            first, again = (run(way, folder) for _ in range(2))
            found[way] = {**first, "again_s": again["open_s"], "again_batch_s": again["batch_s"]}
            found[way]["cache_mb"] = round(size_of(folder / way) / 1e6, 1)
        found["ranks"] = run("ranks", folder, "--ranks", str(4 if options.quick else options.ranks))
    print(json.dumps(found, indent=None if options.json else 2))


def write(path: Path, megabytes: int) -> int:
    """Write chats, a tenth of them with a tool call, and return their number."""
    draw, count, size = random.Random(0), 0, 0
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]
    with open(path, "w") as out:
        while size < megabytes * 1_000_000:
            turns: list[dict[str, Any]] = []
            for _ in range(draw.randint(1, 3)):
                turns.append({"role": "user", "content": " ".join(draw.choices(words, k=30))})
                turns.append({"role": "assistant", "content": " ".join(draw.choices(words, k=120))})
            if count % 10 == 0:
                call = {"name": "search", "arguments": {"query": draw.choice(words), "zoom": draw.random()}}
                turns[-1]["tool_calls"] = [{"type": "function", "function": call}]
            line = json.dumps({"messages": turns, "id": count}) + "\n"
            out.write(line)
            count, size = count + 1, size + len(line)
    return count


def run(way: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Measure a way in a process of its own."""
    caches = {"XDG_CACHE_HOME": str(folder / way), "HF_HOME": str(folder / way)}
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder), *arguments]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measured(
    opened: Callable[[], tuple[int, Callable[[list[int]], Any], Callable[[], Iterator[Any]]]],
) -> dict[str, Any]:
    """Seconds of a way, whose result is the number of records, and how to read some and all of them."""
    begin = time.perf_counter()
    count, read, every = opened()
    open_s = time.perf_counter() - begin
    chosen = random.Random(1).sample(range(count), min(BATCH, count))
    begin = time.perf_counter()
    read(chosen)
    batch_s = time.perf_counter() - begin
    begin = time.perf_counter()
    assert sum(1 for _ in every()) == count
    pass_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        **{"open_s": round(open_s, 3), "batch_s": round(batch_s, 4), "pass_s": round(pass_s, 3)},
        "peak_mb": round(peak),
    }


def by_cairn(folder: Path) -> dict[str, Any]:
    """As a run opens its data."""

    def opened() -> Any:
        from cairn.config.data import SFTDataConfig
        from cairn.run.data_sets import every, examine, load_records
        from cairn.trainer.data.records import problem_of

        config = SFTDataConfig(name=str(folder / "data.jsonl"))
        records = load_records(config)
        examine(config, records, problem_of)
        return len(records), records.read, lambda: every(records)

    return measured(opened)


def by_datasets(folder: Path) -> dict[str, Any]:
    """As a run did before."""

    def opened() -> Any:
        import datasets

        from cairn.trainer.data.records import problem_of

        datasets.disable_progress_bars()
        records: Any = datasets.load_dataset("json", data_files=str(folder / "data.jsonl"), split="train")
        kept = folder / "datasets" / "identity"
        if not kept.exists():
            digest = hashlib.blake2b(digest_size=16)
            for record in rows(records):
                assert problem_of(record) is None
                digest.update(json.dumps(record, sort_keys=True, default=str).encode())
            kept.write_text(digest.hexdigest())
        return len(records), lambda numbers: records[numbers], lambda: rows(records)

    return measured(opened)


def rows(records: Any) -> Iterator[dict[str, Any]]:
    """The records of a data set of `datasets`."""
    for columns in records.iter(1000):
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))


def by_limit(folder: Path) -> dict[str, Any]:
    """Lines and json.loads; a batch is of its first records."""

    def each() -> Iterator[Any]:
        with open(folder / "data.jsonl", "rb") as file:
            yield from map(json.loads, file)

    def opened() -> Any:
        with open(folder / "data.jsonl", "rb") as file:
            count = sum(1 for _ in file)
        return count, lambda numbers: [next(each()) for _ in numbers[:1]], each

    return measured(opened)


def by_ranks(folder: Path, ranks: int) -> dict[str, Any]:
    """A step's batch, as one of its ranks makes it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processor time of other threads would be counted as well
    import numpy as np
    from transformers import AutoTokenizer

    from cairn.config.trainer import SFTConfig
    from cairn.run.batches import RLBatch, Sample, Sampling, open_batch, read_batch, write_batch
    from cairn.run.messages import BatchHeader, ShippedBatch
    from cairn.trainer.data.batches import SFTData
    from cairn.trainer.data.shares import RecordShares
    from cairn.trainer.packing import make_rank_batch

    model = Path(__file__).parents[1] / "configs" / "reverse_text" / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = folder / "chats.jsonl"  # without tool calls, which the example's template does not show
    with open(folder / "data.jsonl") as file:
        chats.write_text("".join(line for line in file if '"tool_calls"' not in line))
    data = {"name": str(chats), "batch_size": 16 * ranks}
    config = SFTConfig(data=data, seq_len=4096, micro_batch_size=1)

    class Told(Exception):
        """A rank has told its share."""

    class Exchange:
        def __init__(self, rank: int):
            self.rank, self.world_size = rank, ranks

        def gather(self, mine: bytes) -> list[bytes]:
            shares[self.rank] = mine
            if self.rank:
                raise Told
            return shares

    def made(exchange: Exchange | None) -> tuple[float, Any]:
        shared = RecordShares(exchange)
        source = SFTData(config.data, tokenizer, 0, 0, row_length=config.seq_len, shares=shared)
        begin = time.process_time()
        batch = source.next_batch(1)
        rank_batch = make_rank_batch(batch, config, rank=0, world_size=ranks, spread=True)
        return time.process_time() - begin, rank_batch

    shares = [b""] * ranks
    for rank in range(1, ranks):
        with contextlib.suppress(Told):
            made(Exchange(rank))
    made(None)  # what is imported late
    whole, expected = made(None)
    share, found = made(Exchange(0))
    assert found.digest == expected.digest

    def read(open_file: Callable[[Path], Any]) -> float:
        begin = time.process_time()
        make_rank_batch(open_file(path), config, rank=0, world_size=ranks, spread=True)
        return time.process_time() - begin

    path = folder / "batch.safetensors"
    source = SFTData(config.data, tokenizer, 0, 0, row_length=config.seq_len)
    samples = [
        Sample(one.token_ids, one.loss_mask, dict.fromkeys(("logprobs", "advantages"), values))
        for one in source.next_batch(1).samples
        for values in (np.ones(len(one.token_ids), np.float32),)
    ]
    row = ShippedBatch(1, [[0, 0]], len(samples), found.counts.tokens, "", 0)
    header = BatchHeader("run", "branch", "run:1", 1, "run:branch:0", [0], row)
    write_batch(path, RLBatch(samples, sampling=Sampling(1.0), header=header))
    file_whole, file_share = read(read_batch), read(open_batch)
    return {
        "ranks": ranks,
        **{"records": config.data.batch_size, "tokens": found.counts.tokens},
        **{"whole_s": round(whole, 3), "share_s": round(share, 3)},
        **{"file_whole_s": round(file_whole, 3), "file_share_s": round(file_share, 3)},
        "exchanged_mb": round(sum(map(len, shares)) / 1e6, 1),
    }


WAYS = {"cairn": by_cairn, "datasets": by_datasets, "limit": by_limit}


if __name__ == "__main__":
    main()
