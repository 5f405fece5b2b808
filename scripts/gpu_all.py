#!/usr/bin/env python3
"""Try all that Cairn does with GPUs on this machine, part by part.

usage: scripts/gpu_all.py [--out FOLDER] [--parts NAME...] [--tiny] [--dry]

Each part has a limit of its own; `--dry` lists parts and commands. What a part finds is FOLDER/PART.json,
and a part whose file is there is not run again, so the same command goes on after an interruption. A part
that fails, or takes too long, leaves PART.failed.json, and is run again. What this machine can't do is said
with its reason. `--tiny` runs the parts with the smallest models, also on a CPU, to try out the parts.

Prints the claims about what was found (`CLAIMS`, as in gpu_trial.py). Exit code 1 if one of them, or a part,
fails.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_trial import HOPPER, Claim, checked_claims, told

ROOT = Path(__file__).resolve().parents[1]
OUT = "{out}"
"""In a command: the file for its result. Without it, the result is the last line that it prints."""
GPU = "benchmarks/gpu.py --json"


@dataclass(frozen=True)
class Part:
    """Something to be tried by a command, which this Python runs in the root of the repository.

    tiny: the same with the smallest models, without a GPU. gpus: how many it needs. sees: how many it may
    see, if not all. needs: packages without which it can't run.
    """

    what: str
    command: str
    tiny: str
    minutes: float
    gpus: int = 1
    sees: int | None = None
    needs: tuple[str, ...] = ("ray",)


PARTS = {
    "trial": Part(
        "what Cairn takes for granted, on one GPU",
        f"scripts/gpu_trial.py --shapes 0.6b 1.7b --seconds 1500 --out {OUT}",
        f"scripts/gpu_trial.py --shapes tiny --stages step resume save --steps 'one row' --out {OUT}",
        30,
        sees=1,
        needs=(),
    ),
    "gather": Part(
        "what GPUs gather from each other",
        f"{GPU} --parts gather",
        f"{GPU} --quick --parts gather",
        5,
        gpus=2,
        needs=(),
    ),
    "sft": Part(
        "training beside a plain loop, with saves",
        f"{GPU} --parts sft bare --shapes 0.6b 0.6b-4x4096 0.6b-16k 1.7b",
        f"{GPU} --quick --parts sft bare",
        40,
    ),
    "sft_large": Part(
        "training of larger models",
        f"{GPU} --parts sft --shapes 8b 4b-16k",
        f"{GPU} --quick --parts sft",
        60,
        gpus=8,
    ),
    "sft_context": Part(
        "rows of 32,768 tokens that every two GPUs share",
        f"{GPU} --parts sft --shapes 4b-32k-on-2",
        f"{GPU} --quick --parts sft",
        30,
        gpus=2,
    ),
    "sft_experts": Part(
        "a mixture of experts, of which every eight GPUs have the experts together, and without",
        f"{GPU} --parts sft --shapes 8b-a1b 8b-a1b-on-8",
        f"{GPU} --quick --parts sft",
        60,
        gpus=8,
    ),
    "restart": Part(
        "a killed rank, with and without spares",
        "benchmarks/recovery.py --json --repeats 2 --goodput-steps 0 --shape 0.6b "
        "--scenarios 'sft: trainer worker' 'sft: trainer worker, spare'",
        "benchmarks/recovery.py --json --quick",
        20,
    ),
    "turns": Part(
        "trainer and server in turns on one GPU, each role killed in each turn",
        "benchmarks/recovery.py --json --in-turns --repeats 1 --shape 1.7b",
        "benchmarks/recovery.py --json --in-turns --repeats 1",
        60,
        sees=1,
        needs=("ray", "vllm"),
    ),
    "rl": Part(
        "RL with the division of GPUs that is chosen",
        f"{GPU} --parts rl --shapes 0.6b",
        f"{GPU} --quick --parts rl",
        40,
        needs=("ray", "vllm"),
    ),
    "rl_files": Part(
        "RL on 4 GPUs with 4 servers, policies by files",
        f"{GPU} --parts rl --shapes 8b --servers 4 --transport files",
        f"{GPU} --quick --parts rl --transport files",
        60,
        gpus=8,
        needs=("ray", "vllm"),
    ),
    "rl_network": Part(
        "RL on 4 GPUs with 4 servers, policies by network",
        f"{GPU} --parts rl --shapes 8b --servers 4 --transport network",
        f"{GPU} --quick --parts rl --transport network",
        60,
        gpus=8,
        needs=("ray", "vllm"),
    ),
    "push": Part(
        "policies for a server on 2 GPUs with CUDA graphs",
        "benchmarks/weights.py --json --sizes 1.5B --dtype bfloat16 --tensor-parallel 2",
        "benchmarks/weights.py --json --quick",
        20,
        gpus=3,
        needs=("vllm",),
    ),
}
CLAIMS = (
    Claim("gather: gather/bytes_per_s", low=20e9, gpus=HOPPER, predicted="some 300e9 with NVLink"),
    Claim("sft*: shapes/*/sft/stall_s", high=0.2, gpus=HOPPER, predicted="0.04 to 0.1 with 8B on 8 GPUs"),
    Claim("sft_large: shapes/8b/sft/mfu", low=0.15, gpus=HOPPER, predicted="0.24 to 0.28"),
    Claim(
        "sft_large: shapes/4b-16k/sft/mfu", low=0.15, gpus=HOPPER, predicted="5,500 to 6,500 tokens/s a GPU"
    ),
    Claim(
        "sft_context: shapes/4b-32k-on-2/sft/mfu",
        low=0.12,
        gpus=HOPPER,
        predicted="0.18 to 0.25: of 4b-16k what the exchange around attention leaves, which nothing hides",
    ),
    Claim(
        "sft_experts: shapes/8b-a1b-on-8/sft/mfu",
        low=0.06,
        gpus=HOPPER,
        predicted="0.08 to 0.15, twice that of 8b-a1b: a layer exchanges 1 GB of tokens instead of gathering "
        "and reducing 5 GB of weights and gradients",
    ),
    Claim("rl_*: shapes/8b/rl/push_s", high=20, gpus=HOPPER, predicted="7 to 10, paused for 3 to 4"),
    Claim("rl_*: shapes/8b/rl/trainer_idle", high=0.5, gpus=HOPPER, predicted="ranks busy 72 % of the time"),
    Claim("restart: seconds_to_next_step/*worker", high=120, gpus=HOPPER, predicted="40 to 60 with 8B on 8"),
    Claim("turns: seconds_to_next_step/*", high=300, gpus=HOPPER, predicted="it goes on after each kill"),
)
"""Bounds are predictions with room, as no part but `trial` has been measured."""


def main() -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_all"), help="folder for what is found")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="the smallest models, on a CPU")
    parser.add_argument("--dry", action="store_true", help="only list the parts and their commands")
    arguments = parser.parse_args()
    gpus = names_of_gpus()
    code = 0
    for name in arguments.parts:
        part = PARTS[name]
        reason = None if arguments.tiny else lack(part, len(gpus))
        print(f"{name}: {part.what}" + (f": LEFT OUT, {reason}" if reason else ""), flush=True)
        if arguments.dry:
            print(f"    at most {part.minutes:g} min: {part.tiny if arguments.tiny else part.command}")
        elif not reason:
            code |= run(name, part, arguments.out, gpus, tiny=arguments.tiny)
    return code


def names_of_gpus() -> list[str]:
    """The GPUs that this process sees."""
    from cairn.run.machine import this_machine

    return [gpu.name for gpu in this_machine().gpus]


def lack(part: Part, gpus: int) -> str | None:
    """Why a part can't be run on this machine, with so many GPUs; None if it can."""
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    if gpus < part.gpus:
        return f"it needs {part.gpus} GPU{'s' * (part.gpus > 1)}, and this machine has {gpus}"
    return None


def run(name: str, part: Part, out: Path, gpus: Sequence[str], *, tiny: bool) -> int:
    """Run a part unless its result is there, and hold it to claims; returns 1 if it, or a claim, fails."""
    out.mkdir(parents=True, exist_ok=True)
    result, failed = out / f"{name}.json", out / f"{name}.failed.json"
    if result.exists():
        print(f"    {result} is there")
    else:
        command = part.tiny if tiny else part.command
        try:
            found = found_by(command, 60 * part.minutes, out / f"{name}.log", part.sees)
        except (RuntimeError, ValueError, OSError) as error:
            failed.write_text(json.dumps({"command": command, "failed": str(error)}, indent=1))
            print(f"    FAILED: {str(error).splitlines()[0]} ({failed})", flush=True)
            return 1
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(found | {"command": command, "gpus": list(gpus)}, indent=1))
        partial.rename(result)
        failed.unlink(missing_ok=True)
    content = json.loads(result.read_text())
    named = {f"{name}: {key}": value for key, value in flat(content["result"])}
    checked = checked_claims(CLAIMS, named | {"machine/gpu": " ".join(content["gpus"])})
    return told([*content["result"].get("claims", []), *checked])


def found_by(command: str, seconds: float, log: Path, sees: int | None) -> dict[str, Any]:
    """What a command finds within so many seconds, and how many it takes; its output is appended to `log`.

    Raises:
        RuntimeError: it fails, or does not end in time.
        ValueError, OSError: it has no result.
    """
    written = log.with_suffix(".written")
    written.unlink(missing_ok=True)
    words = [word.replace(OUT, str(written.resolve())) for word in shlex.split(command)]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": visible(sees)} if sees else {})}
    began = time.monotonic()
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [sys.executable, *words],
            **{"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": errors, "text": True},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it did not end within {seconds:g} s; its log is {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # what it has started dies with it
                process.wait()
        errors.write(said.encode())
    claims_failed = OUT in command and process.returncode == 1 and written.exists()
    if process.returncode and not claims_failed:
        end = log.read_text(errors="replace")[-1500:]
        raise RuntimeError(f"it ended with exit code {process.returncode}; the end of {log}:\n{end}")
    text = written.read_text() if OUT in command else said.strip().rpartition("\n")[2]
    written.unlink(missing_ok=True)
    return {"seconds": time.monotonic() - began, "result": json.loads(text)}


def visible(count: int) -> str:
    """The first GPUs that this process sees, for CUDA_VISIBLE_DEVICES."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(names.split(",")[:count] if names else map(str, range(count)))


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested objects, by their path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}/{key}" if path else key)
    else:
        yield path, value


if __name__ == "__main__":
    sys.exit(main())
