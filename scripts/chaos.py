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
import contextlib
import functools
import json
import os
import queue
import random
import secrets
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos_disasters import mount_small_disk, unmount
from chaos_plan import Setting, draw
from chaos_proxy import Proxy
from chaos_run import ChaosRun, Result, Server, Task, remove, scratch

from cairn.inference.client import Unauthorized, token_for
from cairn.run.seeds import derive

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = "configs/reverse_text"
SHORT = ["--max-steps", "10", "--ckpt.interval", "3", "--ckpt.keep-last", "2"]
SFT = ["sft", "@", f"{CONFIGS}/sft.toml", *SHORT, "--data.batch-size", "192"]
RL = ["rl", "--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml", *SHORT]
RL_ALONE = ["rl", "@", f"{CONFIGS}/rl.toml", *SHORT]
NETWORK = ["--trainer.weight-transport", "network"]
PAIR = [*SFT, "--workers", "2"]
TURNS = ("sft", "rl", "network", "pair", "rl", "alone")
"""Which of these take turns where no command is given. pair: two ranks; alone: with a server of its own."""


@dataclass
class Bench:
    """What one job works with: a server and a proxy of its own, so that runs do not meet."""

    folder: Path
    command: list[str]
    tasks: dict[str, Task]

    def task(self, run: int) -> Task:
        """What run number `run` is to be."""
        return self._task("given" if self.command else TURNS[run % len(TURNS)])

    def _task(self, kind: str) -> Task:
        if kind not in self.tasks:
            self.tasks[kind] = self._make(kind)
        return self.tasks[kind]

    def _make(self, kind: str) -> Task:
        if kind in ("sft", "pair"):
            return make_task(SFT if kind == "sft" else PAIR)
        if kind == "alone":
            return make_task([*RL_ALONE, "--inference.port", str(free_port())])
        if kind == "given":
            return make_task(self.command)
        if kind == "network":
            usual = self._task("rl")  # whose server and proxy serve here too
            return replace(usual, command=[*usual.command, *NETWORK], calm=None)
        token, url = secrets.token_urlsafe(16), f"http://127.0.0.1:{free_port()}"
        command = ["inference", "@", f"{CONFIGS}/infer.toml", "--port", url.rpartition(":")[2]]
        server = Server(self.folder, command, url, token)
        return make_task([*RL, "--orchestrator.inference-url", url], server, token)

    def close(self) -> None:
        """End its server."""
        for task in [task for kind, task in self.tasks.items() if kind != "network"]:
            if task.server:
                task.server.kill()
            if task.proxy:
                task.proxy.close()


def make_task(command: list[str], server: Server | None = None, token: str = "") -> Task:
    """A task from a command line; what depends on its configuration is taken from a dry run.

    Exits with 2 if the command is none that can be disturbed.
    """
    config = dry_run(command)
    interval = (config.get("ckpt") or {}).get("interval")
    if not interval or interval >= config["max_steps"]:
        sys.exit(usage("the command needs --ckpt.interval N, less than --max-steps: runs go on from there"))
    if config["ckpt"].get("resume") or config["ckpt"].get("resume_step"):
        sys.exit(usage("the command must not say --ckpt.resume: the harness does, after a disaster"))
    if config["ckpt"].get("dir") or not config["ckpt"].get("training_state", True):
        sys.exit(usage("the command must save all state, in its own folder: no --ckpt.dir, no weights only"))
    rl = command[0] == "rl"
    ranks = (config["trainer"] if rl else config)["workers"]
    setting = Setting(config["max_steps"], interval, rl, ranks=ranks, own_disk=may_mount())
    task = Task(command, setting, token, server=server)
    if not rl:
        return task
    orchestrator = config["orchestrator"]
    if orchestrator.get("max_off_policy_steps"):
        sys.exit(usage("the command needs --orchestrator.max-off-policy-steps 0 to be the same to the bit"))
    urls = orchestrator["inference_url"]
    if len(urls) > 1:
        sys.exit(usage("the command may have one inference server at most"))
    groups = orchestrator["prompts_per_step"]
    task.setting = replace(task.setting, groups=groups, server=None if urls else "inference")
    if urls:
        task.proxy = Proxy(urls[0])
        task.setting = replace(task.setting, proxied=True, server="server" if server else None)
        try:
            task.token = token or token_for(urls[0])
        except Unauthorized as error:
            sys.exit(usage(str(error)))
    return task


def dry_run(command: list[str]) -> dict[str, Any]:
    """The configuration that the command would run."""
    executable = Path(sys.executable).parent / command[0]
    if command[0] not in ("sft", "rl") or not executable.exists():
        sys.exit(usage(f"{command[0]}: the command has to be sft or rl, with its flags"))
    done = subprocess.run([str(executable), *command[1:], "--dry-run"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(usage(f"{shlex.join(command)}: {done.stderr.strip()}"))
    return json.loads(done.stdout)


@functools.cache
def may_mount() -> bool:
    """Whether runs can be given disks that are soon full."""
    folder = scratch("chaos_disk_")
    try:
        return mount_small_disk(folder)
    finally:
        unmount(folder)
        folder.rmdir()


def usage(message: str) -> int:
    """Complain; returns the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return 2


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class Campaign:
    """All runs of one invocation."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.folder = Path(options.folder).absolute() if options.folder else scratch("chaos_")
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            sys.exit(usage(f"--folder {options.folder}: has to be empty, or not to be there yet"))
        self.violations: list[dict[str, Any]] = []
        self.goodputs: list[float] = []
        self.kills: Counter[str] = Counter()
        self.missed = 0
        self.recomputed: list[int] = []
        self._benches: queue.Queue[Bench] = queue.Queue()
        for job in range(options.jobs):
            (self.folder / f"job_{job}").mkdir(exist_ok=True)
            self._benches.put(Bench(self.folder / f"job_{job}", options.command, {}))

    def run(self) -> dict[str, Any]:
        """All runs; returns the summary."""
        started = time.monotonic()
        options = self.options
        runs = range(options.first, options.first + options.runs)
        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(self._one, runs))
        finally:
            while not self._benches.empty():
                bench = self._benches.get()
                bench.close()
                remove(bench.folder)
            with contextlib.suppress(OSError):  # where a run is kept
                self.folder.rmdir()
        return {
            "runs": options.runs,
            "seed": options.seed,
            "violations": self.violations,
            "goodput": round(statistics.fmean(self.goodputs), 3) if self.goodputs else None,
            "kills": dict(sorted(self.kills.items())),
            "missed": self.missed,
            "recomputed": {
                "mean": statistics.fmean(self.recomputed or [0]),
                "max": max(self.recomputed or [0]),
            },
            "seconds": round(time.monotonic() - started, 1),
        }

    def _one(self, run: int) -> None:
        bench = self._benches.get()
        try:
            task = bench.task(run)
            if task.calm is None:
                self._calm(bench, task)
            chance = random.Random(derive(self.options.seed, "chaos", run))
            plan = draw(chance, task.setting)
            result = ChaosRun(task, plan, self.folder / f"run_{run}", chance).go()
        finally:
            self._benches.put(bench)
        for disaster in result.struck:
            self.kills[f"{disaster.kind} {disaster.target.partition(':')[0]}".strip()] += 1
        self.missed += len(result.missed)
        self.recomputed += result.recomputed
        if result.seconds:
            self.goodputs.append(task.calm.seconds / result.seconds)
        self._report(run, task, plan, result)

    def _calm(self, bench: Bench, task: Task) -> None:
        folder = bench.folder / f"calm_{len(list(bench.folder.glob('calm_*')))}"
        result = ChaosRun(task, [], folder, random.Random(0)).go()
        if result.violations:
            print(*result.violations, sep="\n", file=sys.stderr)
            sys.exit("error: the command fails even undisturbed")
        print(f"undisturbed: {shlex.join(task.command)}: {result.seconds:.1f} s", flush=True)
        task.calm = result

    def _report(self, run: int, task: Task, plan: list, result: Result) -> None:
        verdict = "VIOLATED" if result.violations else "kept its promises"
        goodput = f", goodput {task.calm.seconds / result.seconds:.2f}" if result.seconds else ""
        lines = [f"run {run} ({task.command[0]}) {verdict}{goodput}"]
        for disaster in plan:
            lines.append(f"  {disaster}" + (" (missed)" if disaster in result.missed else ""))
        lines += [f"  VIOLATION: {violation}" for violation in result.violations]
        if result.violations:
            own = [f"-- {shlex.join(self.options.command)}"] if self.options.command else []
            again = [
                "scripts/chaos.py",
                "--seed",
                str(self.options.seed),
                "--first",
                str(run),
                "--runs 1",
                *own,
            ]
            lines += [f"  kept in {result.folder}; to repeat it: {' '.join(again)}"]
            self.violations += [
                {
                    "seed": self.options.seed,
                    "run": run,
                    "what": violation,
                    "plan": [asdict(disaster) for disaster in plan],
                    "command": task.command,
                    "folder": str(result.folder),
                }
                for violation in result.violations
            ]
        else:
            remove(result.folder)
        print("\n".join(lines), flush=True)


def main() -> int:
    """The command; returns the exit code."""
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
        return usage("--jobs: a server takes one run at a time")
    if options.runs < 1 or options.jobs < 1 or options.first < 0:
        return usage("--runs and --jobs take 1 or more, --first 0 or more")
    campaign = Campaign(options)
    if not options.command:
        os.chdir(REPOSITORY)  # where the paths in its configurations begin
    summary = campaign.run()
    if options.json:
        print(json.dumps(summary), flush=True)
    else:
        print(
            f"{summary['runs']} runs, {len(summary['violations'])} violations, goodput {summary['goodput']}, "
            f"{sum(summary['kills'].values())} disasters ({summary['missed']} came too late)"
        )
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
