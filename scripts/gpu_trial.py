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
others. Prints a line for each result and each claim about it (`CLAIMS`): what was predicted, expected and
measured, and whether it passes. Writes both as JSON. Exit code 1 if a claim fails.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
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
class Claim:
    """What results of this name (a pattern) are held to: equal to `value`, or within `low` and `high`."""

    name: str
    value: Any = None
    low: float | None = None
    high: float | None = None
    gpus: str = ""
    """The GPUs that it is for: parts of their names, separated by |."""
    predicted: str = ""
    """What reading and arithmetic had said before anything was measured."""

    @property
    def expected(self) -> str:
        """What it holds results to, in words."""
        if self.low is None and self.high is None:
            return repr(self.value)
        low, high = (None if bound is None else f"{bound:g}" for bound in (self.low, self.high))
        return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"

    def holds(self, found: Any) -> bool:
        """Whether a result is as claimed."""
        if self.low is None and self.high is None:
            return found == self.value
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        return (self.low is None or found >= self.low) and (self.high is None or found <= self.high)


HOPPER = "H100|H200"
CLAIMS = (
    Claim("*/failed"),
    Claim("*: device/kernel *"),
    Claim("*: device/head is fused", True),
    Claim("*: device/late copies read their own memory", True),
    Claim("*: device/after memory that can't be pinned"),
    Claim("*: device/pinned GB/s", low=20, gpus=HOPPER, predicted="50"),
    Claim("*: device/matrix product TFLOP/s", low=600, gpus=HOPPER),
    Claim("*: step/dense/attention", "dense"),
    Claim("*: step/[!d]*/attention", "varlen", gpus=HOPPER),
    Claim("*: step/[!d]*/waits", high=3, predicted="1, and one in the loop"),
    Claim("*: step/*/peak over estimate", low=0.6, high=1.1, gpus=HOPPER),
    Claim("0.6b: step/one row/tokens/s", low=17e3, gpus=HOPPER, predicted="30,000 to 43,000"),
    Claim("0.6b: step/one row/mfu", low=0.08, gpus=HOPPER, predicted="0.15 to 0.22"),
    Claim("0.6b: step/four rows/tokens/s", low=36e3, gpus=HOPPER, predicted="45,000"),
    Claim("0.6b: step/compiled/tokens/s", low=55e3, gpus=HOPPER),
    Claim("1.7b: step/one row/tokens/s", low=18e3, gpus=HOPPER, predicted="18,000 to 20,000"),
    Claim("1.7b: step/one row/mfu", low=0.2, gpus=HOPPER, predicted="0.24"),
    Claim("1.7b: step/four rows/tokens/s", low=23e3, gpus=HOPPER),
    Claim("*: resume/the step is as it was saved", True),
    Claim("*: resume/the bits are the same", True),
    Claim("*: resume/loading takes, largest weights", high=1.5, predicted="1"),
    Claim("*: save/stall_s", high=0.1, gpus=HOPPER, predicted="0.04 to 0.1 with 8B on 8 GPUs"),
    Claim("*: save/seconds to make the arena", high=10, gpus=HOPPER, predicted="1 to 3"),
    Claim("*: save/a step takes longer", high=0.1, gpus=HOPPER, predicted="0"),
    Claim("*: memory/says", "out of memory", gpus=HOPPER),
)
"""Bounds are what was measured on an H200, less a margin: docs/results/gpu.md has the numbers."""


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
                checked = checked_claims(CLAIMS, found)
                arguments.out.write_text(json.dumps({"results": found, "claims": checked}, indent=1))
    return told(checked_claims(CLAIMS, found))


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


def checked_claims(claims: Iterable[Claim], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was predicted, expected and measured, by claim, of results by their names.

    Claims about other GPUs, and about what was not measured, are left out.
    """
    gpu = next((str(value) for name, value in found.items() if name.endswith("/gpu")), "")
    return [
        {
            **{"claim": name, "predicted": claim.predicted or None, "expected": claim.expected},
            **{"measured": value, "passes": claim.holds(value)},
        }
        for claim in claims
        if any(part in gpu for part in claim.gpus.split("|"))
        for name, value in found.items()
        if fnmatch.fnmatchcase(name, claim.name)
    ]


def told(checked: Iterable[Mapping[str, Any]]) -> int:
    """Print claims, the failed ones last; returns the exit code, 1 if there are any."""
    failed = 0
    for claim in sorted(checked, key=lambda claim: not claim["passes"]):
        failed += not claim["passes"]
        predicted = f"; predicted {claim['predicted']}" if claim["predicted"] else ""
        print(
            f"{'pass' if claim['passes'] else 'FAIL'}: {claim['claim']} is {shown(claim['measured'])}, "
            f"expected {claim['expected']}{predicted}"
        )
    return 1 if failed else 0


def shown(value: Any) -> str:
    """A value, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:600]


if __name__ == "__main__":
    sys.exit(main())
