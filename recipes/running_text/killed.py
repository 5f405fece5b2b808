"""Run a training command that is killed five times, at moments that a seed draws, and resumed each time.

usage: python killed.py SEED FOLDER COMMAND...

After a step that the seed draws, and up to half a second later, SIGKILL ends the command and all its
processes. `--ckpt.resume auto` in COMMAND goes on from the last checkpoint.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

from cairn.run.directory import RunDirectory
from cairn.tools.chaos.processes import Family

KILLS, STEPS = 5, 120


def main() -> int:
    draws, folder, command = random.Random(int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:]
    metrics = RunDirectory(folder).metrics

    def step() -> int:
        return max((row["step"] for row in metrics.rows()), default=0)

    for at in sorted(draws.sample(range(5, STEPS - 5), KILLS)):
        family = Family({})
        process = family.start(folder.with_name(f"{folder.name}.log"), command)
        while process.poll() is None and step() < at:
            time.sleep(0.05)
        if process.returncode is not None:
            return process.returncode
        time.sleep(draws.random() * 0.5)
        family.kill()
        process.wait()
        print(f"killed after step {step()}", flush=True)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
