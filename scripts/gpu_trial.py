#!/usr/bin/env python3
"""Try this machine's GPU in some minutes: does what Cairn takes for granted hold here, and how fast is it?

usage: scripts/gpu_trial.py [--shapes 0.6b 1.7b] [--stages step save] [--seconds 540] [--out FILE]

Needs torch and transformers, but neither Ray, vLLM, data nor a network: models have the shapes of Qwen3 and
random weights. One GPU, or the CPU with `--shapes tiny`, trains as one rank. Stages:

- device: rates of copies and matrix products; the attention kernels' own check; whether copies of a save read
  memory that was handed on; whether memory that can't be pinned harms what follows
- step: tokens/s, model FLOPs, peak memory beside the estimate of `--dry-run`, waits for the GPU and its busy
  share, for several settings
- resume: a step saved while training goes on, loaded into a new trainer, goes on with the same bits; memory
  that loading takes beyond what it leaves
- save: how long training stands still, seconds until durable, and publishing to files
- memory: what a run that needs too much memory says

Each stage, and each of the settings of step, has a process of its own, so one that fails does not end the
others. Prints a line for each result and what is not as expected (`EXPECTED`), and writes all as JSON. Exit
code 1 if something is not as expected.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("device", "step", "resume", "save", "memory")
RESULT = "RESULT "
"""What lines of results begin with."""
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
SHAPES = {
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    },
    "0.6b": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@dataclass(frozen=True)
class Work:
    """What a trainer does in a step: `rows` samples of `tokens`, or as many tokens in short samples."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokens: int = 4096
    rows: int = 8
    short: bool = False
    on_gpu: bool = False
    """Whether to leave it out on CPUs."""


STEPS = {
    "one row": Work(),
    "four rows": Work({"micro_batch_size": 4}),
    "checkpointed": Work({"micro_batch_size": 4, "activation_checkpointing": True}),
    "short samples": Work({"micro_batch_size": 4}, short=True),
    "compiled": Work({"micro_batch_size": 4, "compile": True}, on_gpu=True),
    "8-bit": Work({"optimizer": {"type": "adamw_8bit"}}),
    "dense": Work({"attention": "dense"}, on_gpu=True),
}


@dataclass(frozen=True)
class Expected:
    """What results of this name (a pattern) should be: equal to `value`, or within `low` and `high`."""

    name: str
    value: Any = None
    low: float | None = None
    high: float | None = None
    gpus: str = ""
    """The GPUs that it is for: parts of their names, separated by |."""

    def problem(self, name: str, found: Any) -> str | None:
        """What is not as expected of a result; None if it is, or another one is meant."""
        if not fnmatch.fnmatchcase(name, self.name):
            return None
        if self.low is None and self.high is None:
            return None if found == self.value else f"{name} is {found!r}, expected {self.value!r}"
        if (self.low is None or found >= self.low) and (self.high is None or found <= self.high):
            return None
        return f"{name} is {found:.4g}, expected {self.low or 0:g} to {self.high or float('inf'):g}"


HOPPER = "H100|H200"
EXPECTED = (
    Expected("*/failed"),
    Expected("*: device/kernel *"),
    Expected("*: device/head is fused", True),
    Expected("*: device/late copies read their own memory", True),
    Expected("*: device/after memory that can't be pinned"),
    Expected("*: device/pinned GB/s", low=20, gpus=HOPPER),
    Expected("*: device/matrix product TFLOP/s", low=600, gpus=HOPPER),
    Expected("*: step/dense/attention", "dense"),
    Expected("*: step/[!d]*/attention", "varlen", gpus=HOPPER),
    Expected("*: step/[!d]*/waits", high=3),
    Expected("*: step/*/peak over estimate", low=0.6, high=1.1, gpus=HOPPER),
    Expected("0.6b: step/one row/tokens/s", low=17e3, gpus=HOPPER),
    Expected("0.6b: step/four rows/tokens/s", low=36e3, gpus=HOPPER),
    Expected("0.6b: step/compiled/tokens/s", low=55e3, gpus=HOPPER),
    Expected("1.7b: step/one row/tokens/s", low=18e3, gpus=HOPPER),
    Expected("1.7b: step/four rows/tokens/s", low=23e3, gpus=HOPPER),
    Expected("*: resume/the step is as it was saved", True),
    Expected("*: resume/the bits are the same", True),
    Expected("*: resume/loading takes, largest weights", high=1.5),
    Expected("*: save/stall_s", high=0.1, gpus=HOPPER),
    Expected("*: save/a step takes longer", high=0.1, gpus=HOPPER),
    Expected("*: memory/says", "out of memory", gpus=HOPPER),
)
"""What was measured on an H200, less a margin: docs/gpu.md has the numbers beside what had been predicted."""


def main() -> int:
    """Run the stages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b"])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="of the stage step")
    parser.add_argument("--seconds", type=float, default=540.0, help="limit of all stages together")
    parser.add_argument("--out", type=Path, default=Path("gpu_trial.json"))
    arguments = parser.parse_args()
    end, found = time.monotonic() + arguments.seconds, dict[str, Any]()
    for shape in arguments.shapes:
        for stage in arguments.stages:
            for step in arguments.steps if stage == "step" else [""]:
                name = f"{shape}: {stage}" + (f"/{step}" if step else "")
                for key, value in results_of([stage, shape, *filter(None, [step])], end - time.monotonic()):
                    found[f"{name}/{key}"] = value
                    print(f"{name}/{key}: {shown(value)}", flush=True)
                arguments.out.write_text(json.dumps(found, indent=1))
    problems = problems_in(found)
    for problem in problems:
        print(f"NOT AS EXPECTED: {problem}")
    return 1 if problems else 0


def results_of(stage: list[str], seconds: float) -> Iterator[tuple[str, Any]]:
    """Names and values of a stage's results, from a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_stages.py")), *stage]
    began, problem = time.monotonic(), None
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        try:
            code = subprocess.run(command, stdout=out, stderr=log, timeout=max(seconds, 1)).returncode
            problem = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = "no time left"
        out.seek(0)
        log.seek(0)
        for line in out:
            if line.startswith(RESULT):
                yield from json.loads(line.removeprefix(RESULT)).items()
        if problem:
            yield "failed", f"{problem}: {log.read()[-1500:]}"
    yield "seconds", time.monotonic() - began


def problems_in(found: Mapping[str, Any]) -> list[str]:
    """What is not as expected of results, by their names."""
    gpu = next((str(value) for name, value in found.items() if name.endswith("/gpu")), "")
    return [
        problem
        for expected in EXPECTED
        if any(part in gpu for part in expected.gpus.split("|"))
        for name, value in found.items()
        if (problem := expected.problem(name, value))
    ]


def shown(value: Any) -> str:
    """A value, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:600]


if __name__ == "__main__":
    sys.exit(main())
