"""Run a training command that is killed five times, at moments that a seed draws, and resumed each time.

usage: python killed.py SEED FOLDER COMMAND...

After a step that the seed draws, and up to half a second later, SIGKILL ends the command and all its
processes. `--ckpt.resume auto` in COMMAND goes on from the last checkpoint.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

KILLS, STEPS = 5, 200


def steps_of(metrics: Path) -> int:
    """The last step that the run has noted."""
    rows = metrics.read_bytes().splitlines() if metrics.exists() else []
    try:
        return json.loads(rows[-1])["step"] if rows else 0
    except ValueError:  # the last line is being written
        return 0


def processes_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The command and everything that it has started, Ray's processes included, which leave its session."""
    try:
        return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def main() -> int:
    draws, folder, words = random.Random(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:]
    words[0] = str(Path(sys.executable).with_name(words[0]))
    for at in sorted(draws.sample(range(5, STEPS - 5), KILLS)):
        process = subprocess.Popen(words, start_new_session=True)
        while process.poll() is None and steps_of(folder / "metrics.jsonl") < at:
            time.sleep(0.05)
        if process.poll() is not None:
            return process.returncode
        time.sleep(draws.random() * 0.5)
        step = steps_of(folder / "metrics.jsonl")
        for one in processes_of(process):
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        print(f"killed after step {step}", flush=True)
    return subprocess.run(words, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
