"""The cost of a run's steps in an object store: Cairn, the library that it uses, and the limits.

For each server, in turn and in several rounds, with a step of about 1 GB in the page cache:

- put_s, fetch_s: Cairn's upload and download of the step, every chunk compared with the manifest, the
  download fsynced and committed
- raw_put_s: the library (obstore) sends the same files, with the same size and number of parts at a time
- raw_get_s: it reads the same ranges, as many at a time, into memory; raw_get_disk_s
  also writes and fsyncs them
- resume_s: what the launcher does on an empty disk (probe, search, small files), and then the trainer's load,
  which reads the tensors in the object store
- raw_resume_s: raw_get_disk_s, and the trainer's load of the local step
- put_of_raw, fetch_of_raw, fetch_of_raw_disk: Cairn's rate divided by the library's; 1 is as fast
- resume_of_raw: resume_s / raw_resume_s
- X_cpu_s: processor time that this process, not the server, spent on X_s

Servers: `null` discards and sends as fast as a process in Python can (remote_server.py); `localbucket` is a
complete S3 server, slow, on the same disk; `file` is a folder. Limits: the same bytes over a connection
within the machine, and to the disk with fsync. `sft` is the median time of steps of the README's task that
saves again and again, with and without a remote store. Servers and clients share the machine's processors.
`asked` repeats what the remote tier has to reach, with the server that discards: medians, and each round.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

from cairn.run.connections import free_port

SERVERS = ["null", "localbucket", "file"]
STEP = 1
BLOCK = 8 << 20


def main() -> None:
    """Measure everything, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", nargs="*", default=SERVERS, choices=SERVERS)
    parser.add_argument("--repeats", type=int, default=5, help="rounds; medians are reported")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the step")
    parser.add_argument("--dir", type=Path, default=Path("outputs/benchmark"), help="on the disk to measure")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each process")
    parser.add_argument("--sft-rounds", type=int, default=3, help="runs with and without a remote store")
    parser.add_argument("--sft-steps", type=int, default=120, help="measured steps of each run")
    parser.add_argument("--quick", action="store_true", help="a small step, one round")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.megabytes = 1, 48
        arguments.sft_rounds, arguments.sft_steps = min(arguments.sft_rounds, 1), 10
    with common.scratch(arguments.dir) as root:
        report = measure(root, arguments)
    if not arguments.json:
        _show(report)
    print(json.dumps(report))


def measure(root: Path, arguments: argparse.Namespace) -> dict:
    """All servers, the limits, and training."""
    transfers = Transfers(root, arguments.megabytes)
    with contextlib.ExitStack() as running:
        places = {name: running.enter_context(PLACES[name](root)) for name in arguments.servers}
        rounds: dict[str, list[dict]] = {name: [] for name in ("limits", *places)}
        for number in range(arguments.repeats + (not arguments.quick)):  # the first warms up
            row = {"loopback_s": loopback(transfers.nbytes), "disk_s": disk(root / "raw", transfers.nbytes)}
            rounds["limits"].append(row)
            for name, (url, settings) in places.items():
                with _environment(settings):
                    rounds[name].append(transfers.round(f"{url}/{number}", reverse=number % 2 == 1))
                if not arguments.json:
                    print(f"round {number}, {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in rows[-arguments.repeats :]) for key in rows[0]}
        for name, rows in rounds.items()
    }
    report = {
        "step_bytes": transfers.nbytes,
        "files": len(transfers.manifest.files),
        "repeats": arguments.repeats,
        "limits": medians.pop("limits"),
        "servers": medians,
    }
    if arguments.sft_rounds:
        report["sft"] = measure_sft(root, arguments)
    report["asked"] = _asked(report, rounds.get("null", [])[-arguments.repeats :])
    return report


def _asked(report: dict, rounds: list[dict]) -> dict:
    """What has to be reached, and what was."""
    found: dict[str, dict] = {}
    for name, key, limit in (
        ("upload, share of the library's rate", "put_of_raw", "at least 0.9"),
        ("download, share of the library's rate", "fetch_of_raw_disk", "at least 0.9"),
        ("resume, times download and load", "resume_of_raw", "at most 1.2"),
    ):
        if rounds:
            each = [round(row[key], 3) for row in rounds]
            found[name] = {"asked": limit, "median": statistics.median(each), "rounds": each}
    if "sft" in report:
        ratios = report["sft"]["ratios"]
        found["training, time of a step with uploads / without"] = {"asked": "about 1", **ratios}
    return found


def _show(report: dict) -> None:
    nbytes = report["step_bytes"]
    for name, row in {"limits": report["limits"], **report["servers"]}.items():
        print(f"{name}, {nbytes / 1e9:.2f} GB")
        for key, value in row.items():
            rate = f"{nbytes / value / 1e6:8.0f} MB/s" if key.endswith("_s") else ""
            print(f"    {key:20}{value:8.3f}{rate}")
    if "sft" in report:
        print(json.dumps(report["sft"], indent=1))
    print(json.dumps(report["asked"], indent=1))


# Uploads and downloads


class Transfers:
    """A committed step with `megabytes` of tensors, and the ways to send and read it."""

    def __init__(self, root: Path, megabytes: int):
        import torch

        from cairn.checkpoint.saving.saver import Saver, SavingRank
        from cairn.checkpoint.store import CheckpointStore

        torch.manual_seed(0)
        rows = max(1, round(megabytes * 1e6 / 3 / 8 / 4 / 1024))
        self.tensors = {
            stem: {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(8)}
            for stem in ("model/model", "trainer/exp_avg", "trainer/exp_avg_sq")
        }
        self.root = root
        self.store = CheckpointStore(root / "source")
        saver = Saver(self.store, SavingRank(0, 1, "benchmark"))
        about = {
            **{"run_id": "benchmark", "attempt": 1, "branch": "main", "parent": None, "parts": ["trainer"]},
            **{"world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""},
        }
        saver.save(STEP, self.tensors, {"trainer/state.json": b"{}"}, about)
        saver.finish()
        saver.close()
        self.manifest = self.store.manifest(STEP)
        self.nbytes = self.manifest.nbytes
        self.sizes = {name: entry.size for name, entry in self.manifest.files.items() if entry.size}

    def round(self, url: str, *, reverse: bool) -> dict[str, float]:
        """Seconds of everything once, below an empty prefix; the order alternates, since it matters."""
        ways: dict[str, Callable[[str], None]] = {
            "put_s": self.put,
            "raw_put_s": self.raw_put,
            "fetch_s": self.fetch,
            "raw_get_s": self.raw_get,
            "raw_get_disk_s": self.raw_get_disk,
            "resume_fetch_s": self.resume_fetch,
        }
        reading = [name for name in ways if not name.endswith("put_s")]
        order = ["raw_put_s", "put_s", *reversed(reading)] if reverse else ["put_s", "raw_put_s", *reading]
        seconds: dict[str, float] = {}
        for name in order:
            disk(self.root / "settle", self.nbytes)  # each finds the same page cache: in a virtual machine
            os.sync()  # whoever needs more memory than before pays for it, and nothing is left to write
            began, busy = time.perf_counter(), time.process_time()
            ways[name](url)
            seconds[name] = time.perf_counter() - began
            seconds[name.removesuffix("_s") + "_cpu_s"] = time.process_time() - busy
            if name == "resume_fetch_s":
                seconds["resume_load_s"] = self.load(self.resumed)
            for made in ("fetched", "raw", "run"):
                shutil.rmtree(self.root / made, ignore_errors=True)
        seconds["load_s"] = self.load(self.store.folder(STEP))
        if url.startswith("file://"):
            shutil.rmtree(url.removeprefix("file://"))
        seconds["resume_s"] = seconds["resume_fetch_s"] + seconds["resume_load_s"]
        seconds["raw_resume_s"] = seconds["raw_get_disk_s"] + seconds["load_s"]
        return {
            **seconds,
            "put_of_raw": seconds["raw_put_s"] / seconds["put_s"],
            "fetch_of_raw": seconds["raw_get_s"] / seconds["fetch_s"],
            "fetch_of_raw_disk": seconds["raw_get_disk_s"] / seconds["fetch_s"],
            "resume_of_raw": seconds["resume_s"] / seconds["raw_resume_s"],
        }

    def put(self, url: str) -> None:
        """Cairn's upload."""
        from cairn.remote import Objects, RemoteStore
        from cairn.remote.client.upload_body import Sent

        note = self.root / "note"
        note.unlink(missing_ok=True)
        remote = RemoteStore(Objects(f"{url}/cairn"))
        remote.put(self.store.folder(STEP), self.manifest, Sent(note, self.manifest))
        remote.claim("benchmark", "benchmark")  # for the resume

    def fetch(self, url: str) -> None:
        """Cairn's download."""
        from cairn.checkpoint.store import CheckpointStore
        from cairn.remote import Objects, RemoteStore

        RemoteStore(Objects(f"{url}/cairn")).fetch(STEP, CheckpointStore(self.root / "fetched"))

    def resume_fetch(self, url: str) -> None:
        """What the launcher does before any role starts."""
        from cairn.config.ckpt import CkptConfig
        from cairn.config.trainer import SFTConfig
        from cairn.launch.plan.remote_start import with_remote

        ckpt = CkptConfig(remote=f"{url}/cairn", resume="auto")
        config = SFTConfig.model_construct(output_dir=str(self.root / "run"), ckpt=ckpt, max_steps=STEP + 1)
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(open(os.devnull, "w")):
            _, away = with_remote(config, ["trainer"])
        self.resumed = away or self.root / "run" / "checkpoints" / f"step_{STEP}"

    def load(self, folder: Path) -> float:
        """Seconds of the trainer's load of a step; all tensors are checked."""
        from cairn.checkpoint.tensors.sharded_files import load_step

        began = time.perf_counter()
        load_step(folder, self.tensors)
        return time.perf_counter() - began

    def raw_put(self, url: str) -> None:
        """The library's upload of the same files, as many at a time."""
        import obstore

        from cairn.checkpoint.checksums import CHUNK_BYTES
        from cairn.remote.client.objects import CONCURRENT_PARTS
        from cairn.remote.step_store import UPLOADS

        store, folder = _library(f"{url}/raw"), self.store.folder(STEP)

        def send(name: str) -> None:
            path = f"step_{STEP}/{name}"
            obstore.put(store, path, folder / name, chunk_size=CHUNK_BYTES, max_concurrency=CONCURRENT_PARTS)

        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(send, sorted(self.sizes, key=lambda name: -self.sizes[name])))

    def raw_get(self, url: str) -> None:
        """The library's download into memory."""
        self._raw_get(url, lambda name, first, data: None)

    def raw_get_disk(self, url: str) -> None:
        """The library's download, written and fsynced."""
        folder = self.root / "raw"
        folder.mkdir()
        with contextlib.ExitStack() as closing:
            files = {
                name: closing.enter_context(open(folder / name.replace("/", "_"), "wb", buffering=0))
                for name in self.sizes
            }

            def write(name: str, first: int, data: Any) -> None:
                fd = files[name].fileno()
                os.pwrite(fd, data, first)
                os.posix_fadvise(fd, first, len(data), os.POSIX_FADV_DONTNEED)  # begins to write, as in Cairn

            self._raw_get(url, write)
            for file in files.values():
                os.fsync(file.fileno())

    def _raw_get(self, url: str, take: Callable[[str, int, Any], object]) -> None:
        import obstore

        from cairn.checkpoint.checksums import CHUNK_BYTES
        from cairn.remote.step_store import FETCHES

        store = _library(f"{url}/raw")
        ranges = [(name, first) for name, size in self.sizes.items() for first in range(0, size, CHUNK_BYTES)]

        def read(place: tuple[str, int]) -> None:
            name, first = place
            count = min(CHUNK_BYTES, self.sizes[name] - first)
            data = obstore.get_range(store, f"step_{STEP}/{name}", start=first, length=count)
            take(name, first, memoryview(data))

        with ThreadPoolExecutor(FETCHES) as pool:
            list(pool.map(read, ranges))


def _library(url: str) -> Any:
    """The library's store, with Cairn's settings."""
    from obstore.store import from_url

    if url.startswith("file://"):
        return from_url(url, mkdir=True)
    client = {"timeout": "120s", "allow_http": True}
    return from_url(url, client_options=client, checksum_algorithm="CRC64NVME", unsigned_payload=True)


# Servers


@contextlib.contextmanager
def null_server(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """See remote_server.py."""
    script = str(Path(__file__).with_name("remote_server.py"))
    with _serving(lambda port: [script, str(port), str(root / "source")]) as settings:
        yield "s3://bucket", settings


@contextlib.contextmanager
def localbucket(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A complete S3 server with folders as buckets."""
    folder = root / "localbucket"
    (folder / "bucket").mkdir(parents=True)
    with _serving(lambda port: ["-m", "localbucket", "--port", str(port), str(folder)]) as settings:
        yield "s3://bucket", settings


@contextlib.contextmanager
def plain_folder(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """No server at all."""
    yield f"file://{root}/file", {}


PLACES = {"null": null_server, "localbucket": localbucket, "file": plain_folder}


@contextlib.contextmanager
def _serving(command: Callable[[int], list[str]]) -> Iterator[dict[str, str]]:
    """Run a server; yields the environment of its clients."""
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, *command(port)], preexec_fn=common.bound_to_us(), **quiet)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            if server.poll() is not None:
                raise RuntimeError(f"the server exited with {server.returncode}: {command(port)}")
            time.sleep(0.05)
        secret = {"AWS_ACCESS_KEY_ID": "user", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **secret}
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# Limits


def loopback(nbytes: int) -> float:
    """Seconds for so many bytes over one connection, from memory to memory."""
    block = bytes(BLOCK)

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for first in range(0, nbytes, BLOCK):
                connection.sendall(block[: nbytes - first])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        began = time.perf_counter()
        sender = threading.Thread(target=send, args=(listening.getsockname()[1],))
        sender.start()
        connection, _ = listening.accept()
        with connection:
            into = memoryview(bytearray(1 << 20))
            while connection.recv_into(into):
                pass
        sender.join()
    return time.perf_counter() - began


def disk(path: Path, nbytes: int) -> float:
    """Seconds for writing so many bytes to a new file, and fsync."""
    block = os.urandom(BLOCK)
    os.sync()
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for first in range(0, nbytes, BLOCK):
            file.write(block[: nbytes - first])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


# Training


def measure_sft(root: Path, arguments: argparse.Namespace) -> dict:
    """Steps of runs that save every few steps, with and without a remote store, in turn."""
    task = common.Task(root / "task", 64, 128, arguments.threads)
    task.prepare()
    warmup = 2 if arguments.quick else 20
    every = 2 if arguments.quick else 5
    found: dict[str, list[dict[str, float]]] = {"local": [], "remote": []}
    with null_server(root) as (url, settings), _environment(settings):
        for number in range(arguments.sft_rounds):
            for name in list(found) if number % 2 == 0 else reversed(found):
                run = root / f"{name}_{number}"
                flags = ["--ckpt.interval", every, "--ckpt.keep-last", 2]
                if name == "remote":
                    flags += ["--ckpt.remote", f"{url}/run_{number}", "--ckpt.remote-keep-last", 2]
                command = task.cairn(run, warmup + arguments.sft_steps, *flags)
                with common.followed(command, run, task.threads) as rows:
                    times = [when for when, row in rows if row["step"] >= warmup]
                steps = [after - before for before, after in itertools.pairwise(times)]
                row = {
                    "step_ms": 1e3 * statistics.median(steps),
                    "mean_ms": 1e3 * (times[-1] - times[0]) / len(steps),
                }
                if name == "remote":
                    row["uploaded"] = _uploaded(run)
                found[name].append(row)
                shutil.rmtree(run)
                if not arguments.json:
                    print(f"round {number}, sft {name}: {row}", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    return {
        **medians,
        "saved_every": every,
        "ratios": {
            f"remote / local, {key}": medians["remote"][key] / medians["local"][key]
            for key in ("step_ms", "mean_ms")
        },
        "rounds": found,
    }


def _uploaded(run: Path) -> int:
    """How many steps the run's uploader has sent."""
    log = (run / "logs" / "uploader.log").read_text()
    return log.count("was uploaded in")


if __name__ == "__main__":
    main()
