#!/usr/bin/env python3
"""Run a configuration again and again through seeded disasters, and check what Cairn promises.

usage: scripts/chaos.py --seed S --runs N [--first I] [--jobs J] [--folder DIR] [--json] [-- COMMAND...]

COMMAND is `sft ...` or `rl ...` with flags of your own; it needs --ckpt.interval and should end in a minute
or so. Without one, short runs of configs/reverse_text take turns. Each is disturbed one to three times:
SIGKILL of any process at any time or at a named fault point, SIGSTOP, stop signals to one process, to the
group or to all, a disk that is full or read-only, a power cut, a damaged checkpoint, a torn file, a server
that is slow, silent, failing, has other weights, or is used by two runs. It then has to be as if nothing had
happened: docs/recovery.md says what is checked. Run I of seed S meets the same disasters every time (except
that only root can fill a disk): --first I --runs 1.

Prints each run, and at the end violations and goodput (the undisturbed run's time from its first step to its
last, over the disturbed one's). Exit code 1 if there is a violation; the folders of such runs are kept.
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
    """The command; returns the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], usage=__doc__.split("usage: ")[1].splitlines()[0]
    )
    parser.add_argument("--seed", type=int, required=True, help="of the disasters")
    parser.add_argument("--runs", type=int, required=True, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first run (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--folder", help="where runs lie (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on the last line")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="sft or rl, after --")
    options = parser.parse_args()
    if options.command and options.jobs > 1 and "inference-url" in " ".join(options.command):
        parser.error("--jobs: a server takes one run at a time")
    if options.runs < 1 or options.jobs < 1 or options.first < 0:
        parser.error("--runs and --jobs take 1 or more, --first 0 or more")
    as_json = options.json
    chosen = {name: value for name, value in vars(options).items() if name != "json"}
    try:
        campaign = Campaign(Options(**chosen | {"command": tuple(options.command)}))
        if not options.command:
            os.chdir(REPOSITORY)  # where the paths in its configurations begin
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
