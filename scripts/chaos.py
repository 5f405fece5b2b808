#!/usr/bin/env python3
"""Run a configuration repeatedly through seeded disasters, and check Cairn's promises.

usage: scripts/chaos.py --seed S --runs N [--first I] [--jobs J] [--faults F] [--folder DIR]
       [--json] [-- COMMAND]

COMMAND is `sft`, `rl`, `dpo` or `reward` with any flags; it needs --ckpt.interval and should take about a
minute. Without COMMAND, short runs of configs/reverse_text alternate: SFT on one and two ranks, LoRA, RL with
and without a critic, preferences. Each run is struck by one to three disasters:
SIGKILL of any process at any time or at a named fault point, SIGSTOP, stop signals to one process, to the
process group or to all processes, a full or read-only disk, a power cut, a damaged checkpoint, a torn file,
a server that is slow, silent, failing, has other weights, or is used by two runs or, if the run uploads its
steps, the loss of the machine with its run directory. If COMMAND has --ckpt.remote URL, each run has its own
prefix below that URL, which is deleted if the run kept its promises. Its result must be the
same as without disasters; docs/how-to/chaos.md says what is checked. Run I of seed S always meets the
same disasters (except that only root can fill a disk); repeat it with --first I --runs 1. With --faults, such
as save.copy:kill@2#1,commit.done:kill, each run meets these instead, each once, as in CAIRN_FAULT
(docs/reference/faults.md).

Prints each run and, at the end, violations and goodput (the undisturbed run's time from first to last step,
divided by the disturbed run's). Exit code 1 if there is a violation; the folders of such runs are kept.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from cairn.run.errors import CairnError, UsageError
from cairn.tools.chaos.campaign import Campaign, Options

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command; returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores SIGINT
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], usage=__doc__.split("usage: ")[1].partition("\n\n")[0]
    )
    parser.add_argument("--seed", type=int, required=True, help="seed of the disasters")
    parser.add_argument("--runs", type=int, required=True, help="number of runs")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs (default: 1)")
    parser.add_argument("--faults", help="faults that strike each run, instead of drawn disasters")
    parser.add_argument("--folder", help="folder for the runs (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on the last line")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="sft, rl, dpo or reward, after --")
    options = parser.parse_args()
    if options.command and options.jobs > 1 and "inference-url" in " ".join(options.command):
        parser.error("--jobs: a server serves only one run at a time")
    if options.runs < 1 or options.jobs < 1 or options.first < 0:
        parser.error("--runs and --jobs must be at least 1, --first at least 0")
    as_json = options.json
    chosen = {name: value for name, value in vars(options).items() if name != "json"}
    try:
        faults = tuple(options.faults.split(",")) if options.faults else ()
        campaign = Campaign(Options(**chosen | {"command": tuple(options.command), "faults": faults}))
        if not options.command:
            os.chdir(REPOSITORY)  # the paths in its configurations are relative to it
        summary = campaign.run()
    except CairnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    if as_json:
        print(json.dumps(summary), flush=True)
    else:
        print(
            f"{summary['runs']} runs, {len(summary['violations'])} violations, goodput {summary['goodput']}, "
            f"{sum(summary['kills'].values())} disasters ({summary['missed']} came too late)"
        )
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
