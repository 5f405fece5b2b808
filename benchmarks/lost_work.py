"""What kills cost: the same schedule of SIGKILLs in runs of Cairn and of TRL, each with its own way to go on.

    uv run --group bench python benchmarks/lost_work.py --out docs/results

A schedule is drawn from a seed: some kills come at a moment of a step, the others while a checkpoint is being
written. How far into the step or the save is a share of what that takes the system undisturbed, so that all
are hit at the same place. After a kill the same command starts again, with `--ckpt.resume auto` in Cairn and
with `resume_from_checkpoint=True` in TRL. If it ends with an error twice without a new step, somebody
has to help: the newest checkpoint is removed, and that is counted.

- cairn: SIGKILL to all processes of the run, its server included
- cairn, worker: SIGKILL to the trainer's worker alone; the run goes on by itself
- cairn, worker, memory: the same, with each step in memory (`--ckpt.memory-interval 1`)
- trl: SIGKILL to its one process

Beside each disturbed run there is an undisturbed one. Of both, the trained samples, the losses and the last
weights are compared. `--out` writes faults.json and faults.md; TRL is in the dependency group `bench`.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import algorithms
import common
import noted_rewards
import parity
import recipe
import recipe_facts
import trl_runs
from lost_work_page import page

from cairn.run.connections import free_port
from cairn.run.jsonlines import JsonLines
from cairn.tools.chaos.processes import Family, Process, send

REPOSITORY = Path(__file__).resolve().parents[1]
SYSTEMS = ("cairn", "cairn, worker", "cairn, worker, memory", "trl")
TRIES = 2
"""Starts that end with an error, one after the other, before somebody helps."""
WORK_EVERY = 0.3
"""Seconds after which processes are asked for their processor time; a process's last ones are missed."""
TICKS = os.sysconf("SC_CLK_TCK")
DEADLINE = 300.0
"""Seconds without a new step after which the benchmark gives up."""


@dataclass(frozen=True)
class Kill:
    """When a run is killed: after the step `step` has been seen for the first time, or, if `saving`, when the
    folder of its checkpoint has appeared; and then after this share of a step's, or a save's, time."""

    step: int
    saving: bool
    share: float


def schedule(seed: int, steps: int, interval: int, anywhere: int, saving: int) -> list[Kill]:
    """The kills of a run of so many steps that saves every `interval` steps, in their order.

    Args:
        anywhere, saving: how many come at a moment of a step, and how many while a checkpoint is written.
            No two are at the same step; none is in the first step or the last.
    """
    draws = random.Random(f"{seed}/kills")
    saves = range(interval, steps, interval)
    if saving > len(saves):
        raise ValueError(f"{saving} kills in {len(saves)} saves: save more often, or kill less")
    at_saves = draws.sample(saves, saving)
    others = [step for step in range(2, steps - 1) if step not in at_saves]
    drawn = [(step, True) for step in at_saves] + [(step, False) for step in draws.sample(others, anywhere)]
    return [Kill(step, while_saving, draws.random()) for step, while_saving in sorted(drawn)]


@dataclass(frozen=True)
class Task:
    """What is trained, and how often it is killed. interval: of saves, in steps."""

    kind: str
    steps: int
    interval: int
    anywhere: int
    saving: int


TASKS = {"sft": Task("sft", 30, 6, 1, 2), "rl": Task("rl", 12, 3, 1, 1)}


@dataclass
class Seen:
    """What was seen of a run. newest: its newest step. first, last: when its first and its newest step were
    seen, on the monotonic clock. saves: seconds that each save took, from its folder to its last file.
    """

    newest: int = 0
    first: float = 0.0
    last: float = 0.0
    saves: dict[int, float] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the end of the first step to the end of the newest."""
        return self.last - self.first


class System:
    """How a run of a task is started, watched and read; its folder is `out`.

    Args:
        start: weights of RL's first step.
    """

    worker = False
    """Whether only the trainer's worker is killed."""

    def __init__(self, task: Task, out: Path, start: Path):
        self.task, self.out, self.start = task, out, start
        self.notes = out.with_suffix(".rewards")
        self.metrics = JsonLines(out / "metrics.jsonl")

    def command(self) -> list[str]:
        """Begins the run, or goes on with it."""
        raise NotImplementedError

    def saved(self, step: int) -> tuple[Path, Path]:
        """A checkpoint's folder, and what is written last in it."""
        raise NotImplementedError

    def model(self) -> Path:
        """The folder of the last weights."""
        raise NotImplementedError

    def again(self) -> int:
        """Steps that were computed more than once, counted as often as they were repeated."""
        raise NotImplementedError

    def problems(self) -> list[int]:
        """The problems of the answers that the last weights have been trained on (RL)."""
        raise NotImplementedError

    def losses(self) -> dict[int, float]:
        """The loss of each step that the last weights come from."""
        return {row["step"]: row["loss"] for row in self.metrics.rows()}

    def family(self) -> Family:
        """Its processes."""
        path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        noted = {noted_rewards.NOTED: str(self.notes)} if self.task.kind == "rl" else {}
        return Family({**common.environment(1), "PYTHONPATH": path, **noted})

    def kill(self, family: Family) -> None:
        """SIGKILL to all processes."""
        family.kill()


class Cairn(System):
    """All of Cairn's processes are killed."""

    def __init__(self, task: Task, out: Path, start: Path):
        super().__init__(task, out, start)
        self.port = free_port()

    def command(self) -> list[str]:
        task = self.task
        flags: tuple[object, ...] = ("@", common.CONFIGS / f"{task.kind}.toml", "--max-steps", task.steps)
        flags += ("--output-dir", self.out, "--ckpt.interval", task.interval, "--ckpt.keep-last", 2)
        flags += ("--ckpt.resume", "auto")
        if task.kind == "sft":
            flags += ("--data.batch-size", BATCH, "--threads", 1, "--scheduler.type", "constant")
        else:
            flags += ("--model.name", self.start, "--trainer.threads", 1, "--inference.port", self.port)
            flags += ("--orchestrator.environment.name", "noted_rewards:NotedRewards")
            flags += ("--orchestrator.environment.args", json.dumps(parity.PROBLEMS))
        return common.command(task.kind, flags)

    def saved(self, step: int) -> tuple[Path, Path]:
        folder = self.out / "checkpoints" / f"step_{step}"
        return folder, folder / "manifest.json"

    def model(self) -> Path:
        return self.saved(self.task.steps)[0] / "model"

    def again(self) -> int:
        return int(self.metrics.rows()[-1].get("run/recomputed_steps", 0))

    def problems(self) -> list[int]:
        import cairn

        frame = cairn.Run(self.out).rollouts()
        return [int(problem) for problem in frame[frame["step"].notna()]["problem"]]


class CairnWorker(Cairn):
    """Of Cairn's processes, the trainer's worker is killed."""

    worker = True

    def kill(self, family: Family) -> None:
        pid = json.loads((self.out / "roles.json").read_text())["roles"]["trainer_rank0"]["pid"]
        send(signal.SIGKILL, [Process(pid, 0, 0, "")])


class CairnMemory(CairnWorker):
    """The same, where steps are in memory."""

    def command(self) -> list[str]:
        return [*super().command(), "--ckpt.memory-interval", "1"]


class TRL(System):
    """TRL's trainers have one process."""

    def job(self) -> trl_runs.Job:
        """The run, as trl_runs.py reads it."""
        task, data = self.task, self.out.with_suffix(".data.jsonl")
        one = parity.EXPERIMENTS["sft" if task.kind == "sft" else "grpo"]
        size = BATCH if task.kind == "sft" else parity.PROMPTS * parity.ANSWERS
        return trl_runs.Job(
            kind=one.kind,
            model=str(self.start / "model" if task.kind == "rl" else self.start),
            data=str(data),
            out=str(self.out),
            steps=task.steps,
            settings={
                **parity.trl_settings(one, size, 1),
                **{"save_strategy": "steps", "save_steps": task.interval, "save_total_limit": 2},
            },
            environment=parity.PROBLEMS if task.kind == "rl" else {},
            goes_on=True,
        )

    def command(self) -> list[str]:
        job = self.job()
        if not Path(job.data).exists():
            if self.task.kind == "sft":
                parity.write_records("sft", Path(job.data), self.task.steps * BATCH // SFT_BATCH)
            else:
                parity.write_prompts(Path(job.data), 0, self.task.steps)
        return trl_runs.command(job.write(self.out.with_suffix(".job.json")))

    def saved(self, step: int) -> tuple[Path, Path]:
        folder = self.out / f"checkpoint-{step}"
        return folder, folder / "trainer_state.json"

    def model(self) -> Path:
        return self.job().model_at_end

    def again(self) -> int:
        rows = self.metrics.rows()
        return len(rows) - len({row["step"] for row in rows})

    def problems(self) -> list[int]:
        by_step = {row["step"]: row["problems"] for row in JsonLines(self.out / trl_runs.PROBLEMS).rows()}
        return [problem for step in sorted(by_step) for problem in by_step[step]]


MAKE: dict[str, type[System]] = {
    "cairn": Cairn,
    "cairn, worker": CairnWorker,
    "cairn, worker, memory": CairnMemory,
    "trl": TRL,
}
SFT_BATCH, BATCH = 64, 256
"""Records in a step: of configs/reverse_text/sft.toml, and here, where steps shall take a while."""


class Disturbed:
    """A run that is killed at the moments of a schedule.

    Args:
        calm: what was seen of the same run undisturbed; None: this is that run.
    """

    def __init__(self, system: System, kills: Sequence[Kill] = (), calm: Seen | None = None):
        self.system, self.left, self.calm = system, list(kills), calm
        self.family, self.seen = system.family(), Seen()
        self.killed = self.failed = self.by_hand = 0
        self.worked, self.asked = dict[tuple[int, int], float](), 0.0
        """Processor time of each process, by its id and start; and when it was asked for last."""
        self.moved = time.monotonic()
        self.read: tuple[int, int, int] | None = None
        """What the file of metrics was when it was read."""

    def run(self) -> Seen:
        """Run it to its end."""
        log = self.system.out.with_suffix(".log")
        failed = 0
        try:
            while True:
                before = self.seen.newest
                process = self.family.start(log, self.system.command())
                self._follow(lambda process=process: process.poll() is not None)
                self.family.kill()
                process.wait()
                if process.returncode == 0:
                    return self.seen
                if process.returncode == -signal.SIGKILL:
                    continue
                self.failed += 1
                failed = failed + 1 if self.seen.newest == before else 1
                if self.calm is None or self.by_hand > 5:
                    raise RuntimeError(f"exited with {process.returncode}:\n{log.read_text()[-3000:]}")
                if failed == TRIES:
                    failed = 0
                    self._help()
        finally:
            self.family.kill()

    def _follow(self, ended: Callable[[], bool]) -> None:
        """Watch until the command has ended, by itself or by a kill."""
        kill = self.left[0] if self.left else None
        while not ended():
            now = self._look()
            if now - self.moved > DEADLINE:
                raise TimeoutError(f"no new step for {DEADLINE:g} s after step {self.seen.newest}")
            if kill is not None and self.calm is not None:
                if kill.saving and kill.step in self.seen.began:
                    time.sleep(kill.share * statistics.median(self.calm.saves.values()))
                elif not kill.saving and self.seen.newest >= kill.step:
                    time.sleep(kill.share * self.calm.seconds / (self.system.task.steps - 1))
                else:
                    time.sleep(0.002)
                    continue
                self._note_work()
                self.system.kill(self.family)
                self.killed += 1
                self.left.pop(0)
                kill = self.left[0] if self.left and self.system.worker else None
                self.moved = time.monotonic()
            time.sleep(0.002)
        self._look()

    def _look(self) -> float:
        """Read what the run has written; returns the time."""
        seen, now = self.seen, time.monotonic()
        if now - self.asked > WORK_EVERY:
            self._note_work()
        newest = 0
        if (file := self.system.metrics.path).exists():
            about = file.stat()
            if self.read != (now_is := (about.st_ino, about.st_size, about.st_mtime_ns)):
                self.read = now_is
                newest = max((row["step"] for row in self.system.metrics.rows()), default=0)
        if newest > seen.newest:
            seen.first = seen.first if seen.newest else now
            seen.newest, seen.last, self.moved = newest, now, now
        step = seen.newest // self.system.task.interval * self.system.task.interval
        if step and step not in seen.saves:
            folder, last = self.system.saved(step)
            if step not in seen.began and folder.exists():
                seen.began[step] = now
            if last.exists():
                seen.saves[step] = now - seen.began.setdefault(step, now)
        return now

    @property
    def processor(self) -> float:
        """Seconds that processors have worked for the run, in all of its processes."""
        return sum(self.worked.values())

    def _note_work(self) -> None:
        """Ask all processes for their processor time."""
        for one in self.family.processes():
            with contextlib.suppress(OSError):
                user, system = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                self.worked[one.pid, one.started] = (int(user) + int(system)) / TICKS
        self.asked = time.monotonic()

    def _help(self) -> None:
        """What somebody would do: remove the newest checkpoint."""
        steps = range(self.system.task.steps, 0, -1)
        newest = next(folder for step in steps if (folder := self.system.saved(step)[0]).exists())
        shutil.rmtree(newest)
        self.by_hand += 1
        self.moved = time.monotonic()


def outcome(calm: Disturbed, disturbed: Disturbed) -> dict[str, Any]:
    """What the kills cost."""
    ours, theirs = disturbed.system, calm.system
    task, seen = ours.task, disturbed.seen
    found: dict[str, Any] = {
        "kills": disturbed.killed,
        "steps_again": ours.again(),
        "failed_starts": disturbed.failed,
        "by_hand": disturbed.by_hand,
        "other_losses": sum(theirs.losses().get(step) != loss for step, loss in ours.losses().items()),
        "same_weights": recipe_facts.weights_of(ours.model()) == recipe_facts.weights_of(theirs.model()),
        "seconds_calm": round(calm.seen.seconds, 2),
        "seconds": round(seen.seconds, 2),
        "seconds_lost_a_kill": round((seen.seconds - calm.seen.seconds) / max(disturbed.killed, 1), 2),
        "processor_calm": round(calm.processor, 1),
        "processor": round(disturbed.processor, 1),
        "processor_a_kill": round((disturbed.processor - calm.processor) / max(disturbed.killed, 1), 2),
        "ettr": round(calm.seen.seconds / seen.seconds, 3),
        "save_seconds": round(statistics.median(calm.seen.saves.values()), 4),
    }
    if task.kind == "rl":
        once, now = Counter(theirs.problems()), Counter(ours.problems())
        found |= {"lost": (once - now).total(), "twice": (now - once).total(), "answers": once.total()}
        made = [len(one.notes.read_text().splitlines()) for one in (theirs, ours)]
        found["answers_again"] = made[1] - made[0]
    return found


def measure(task: Task, systems: Sequence[str], seed: int, folder: Path) -> dict[str, Any]:
    """Each system's outcome."""
    kills = schedule(seed, task.steps, task.interval, task.anywhere, task.saving)
    start = Path(common.with_random_weights(common.CONFIGS / "model"))
    if task.kind == "rl":
        start = algorithms.taught(folder, EXAMPLES)
    found: dict[str, Any] = {}
    calm: dict[str, Disturbed] = {}
    for name in systems:
        make = MAKE[name]
        own = name.partition(",")[0]
        if own not in calm:
            calm[own] = Disturbed(make(task, folder / f"{task.kind}_{own}_calm", start))
            calm[own].run()
        out = folder / f"{task.kind}_{name.replace(', ', '_')}"
        disturbed = Disturbed(make(task, out, start), kills, calm[own].seen)
        disturbed.run()
        found[name] = outcome(calm[own], disturbed)
        print(f"{task.kind}, {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return {**asdict(task), "schedule": [asdict(kill) for kill in kills], "systems": found}


EXAMPLES = 60
"""Steps of SFT before RL."""


def main() -> None:
    """Run what is asked for, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="NAME", help=", ".join(SYSTEMS))
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--quick", action="store_true", help="SFT of 12 steps, two kills")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there")
    parser.add_argument("--out", type=Path, help="a folder for faults.json and faults.md")
    arguments = parser.parse_args()
    tasks = {name: TASKS[name] for name in arguments.tasks}
    if arguments.quick:
        tasks = {"sft": Task("sft", 12, 3, 1, 1)}
    systems = arguments.systems or [name for name in SYSTEMS if common.has_trl() or name != "trl"]
    os.chdir(REPOSITORY)  # the paths in the task's settings are relative to it
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        found = {name: measure(task, systems, arguments.seed, folder) for name, task in tasks.items()}
    report: dict[str, Any] = {
        "benchmark": "lost_work",
        "seed": arguments.seed,
        **common.made_with(),
        "load": round((began + os.getloadavg()[0]) / 2, 1),
        "tasks": found,
    }
    if arguments.out:
        report = with_earlier(report, arguments.out / "faults.json")
        (arguments.out / "faults.json").write_text(recipe.written(report))
        (arguments.out / "faults.md").write_text(page(report))
    if not arguments.json:
        print(page(report))
    print(json.dumps(report))


def with_earlier(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """A report with the tasks of an earlier one that it has not, if that was made with the same."""
    earlier: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if any(earlier.get(name) != report[name] for name in ("seed", "commit", "machine", "versions")):
        return report
    both = {**earlier["tasks"], **report["tasks"]}
    return {**report, "tasks": {name: both[name] for name in TASKS if name in both}}


if __name__ == "__main__":
    main()
