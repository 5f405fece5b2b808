"""A campaign: a number of runs, each struck by the disasters that its seed draws, and the results."""

import contextlib
import queue
import random
import shlex
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cairn.run.errors import CairnError, UsageError
from cairn.run.faults import parts_of
from cairn.run.seeds import derive
from cairn.tools.chaos.bench import Bench
from cairn.tools.chaos.branched import BranchedRun
from cairn.tools.chaos.plan import Disaster, draw
from cairn.tools.chaos.run import ChaosRun, remove, scratch
from cairn.tools.chaos.task import ChaosTask, Result


@dataclass(frozen=True)
class Options:
    """The options of a campaign; see `cairn chaos --help`."""

    seed: int
    runs: int
    first: int = 0
    jobs: int = 1
    folder: str | None = None
    command: tuple[str, ...] = ()
    """Empty: short runs of configs/reverse_text alternate."""
    faults: tuple[str, ...] = ()
    """What strikes each run instead of drawn disasters, as in CAIRN_FAULT."""
    prove: bool = False
    """Whether the last steps of each run are taken again."""


class Campaign:
    """All runs of one invocation.

    Raises:
        UsageError: the command can't be disturbed, or the folder is not empty.
        CairnError: the command fails even undisturbed.
    """

    def __init__(self, options: Options):
        self.options = options
        self.folder = Path(options.folder).absolute() if options.folder else scratch("chaos_")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for fault in options.faults:
                parts_of(fault)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from None
        if any(self.folder.iterdir()):
            raise UsageError(f"--folder {options.folder}: must be empty or not exist")
        self.violations: list[dict[str, Any]] = []
        self.goodputs: list[float] = []
        self.kills: Counter[str] = Counter()
        self.missed = 0
        self.recomputed: list[int] = []
        self.lost: list[int] = []
        self.proved = 0
        self.each: list[dict[str, Any]] = []
        self._benches: queue.Queue[Bench] = queue.Queue()
        for job in range(options.jobs):
            (self.folder / f"job_{job}").mkdir(exist_ok=True)
            self._benches.put(
                Bench(self.folder / f"job_{job}", list(options.command), {}, proves=options.prove)
            )

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
            with contextlib.suppress(OSError):  # fails if a run was kept
                self.folder.rmdir()
        return {
            "runs": options.runs,
            "seed": options.seed,
            "violations": self.violations,
            "goodput": round(statistics.fmean(self.goodputs), 3) if self.goodputs else None,
            "kills": dict(sorted(self.kills.items())),
            "missed": self.missed,
            "proved": self.proved,
            "each": sorted(self.each, key=lambda run: run["run"]),
            "recomputed": _mean_and_most(self.recomputed),
            "lost": _mean_and_most(self.lost),
            "seconds": round(time.monotonic() - started, 1),
        }

    def _one(self, run: int) -> None:
        bench = self._benches.get()
        try:
            task = bench.task(run)
            calm = task.calm or self._calm(bench, task)
            chance = random.Random(derive(self.options.seed, "chaos", run))
            given = [Disaster("fault", fault) for fault in self.options.faults]
            plan = given or draw(chance, task.setting)
            folder = self.folder / f"run_{run}"
            result = run_of(task)(task, plan, folder, chance, prove=self.options.prove).go()
        finally:
            self._benches.put(bench)
        for disaster in result.struck:
            self.kills[f"{disaster.kind} {disaster.target.partition(':')[0]}".strip()] += 1
        self.missed += len(result.missed)
        self.recomputed += result.recomputed
        self.lost += result.lost
        self.proved += result.proved
        goodput = calm.seconds / result.seconds if calm.seconds and result.seconds else None
        if goodput:
            self.goodputs.append(goodput)
        about = {"run": run, "command": task.command[0], "goodput": goodput, "recomputed": result.recomputed}
        struck = [str(disaster) for disaster in plan if disaster not in result.missed]
        self.each.append({**about, "disasters": struck, "violations": result.violations})
        self._report(run, task, plan, result, goodput)

    def _calm(self, bench: Bench, task: ChaosTask) -> Result:
        folder = bench.folder / f"calm_{len(list(bench.folder.glob('calm_*')))}"
        result = run_of(task)(task, [], folder, random.Random(0)).go()
        if result.violations:
            found = "\n".join(result.violations)
            raise CairnError(f"the command fails even undisturbed:\n{found}")
        print(f"undisturbed: {shlex.join(task.command)}: {result.seconds:.1f} s", flush=True)
        task.calm = result
        return result

    def _report(
        self, run: int, task: ChaosTask, plan: list[Disaster], result: Result, goodput: float | None
    ) -> None:
        verdict = "VIOLATED" if result.violations else "kept its promises"
        score = f", goodput {goodput:.2f}" if goodput else ""
        lines = [f"run {run} ({task.command[0]}) {verdict}{score}"]
        for disaster in plan:
            lines.append(f"  {disaster}" + (" (missed)" if disaster in result.missed else ""))
        lines += [f"  VIOLATION: {violation}" for violation in result.violations]
        if result.violations:
            own = [f"--faults {','.join(self.options.faults)}"] if self.options.faults else []
            own += [f"-- {shlex.join(self.options.command)}"] if self.options.command else []
            again = [
                "cairn chaos",
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


def run_of(task: ChaosTask) -> type[ChaosRun]:
    """What sees a task's command through."""
    return BranchedRun if task.branches else ChaosRun


def _mean_and_most(steps: list[int]) -> dict[str, float]:
    return {"mean": statistics.fmean(steps or [0]), "max": max(steps or [0])}
