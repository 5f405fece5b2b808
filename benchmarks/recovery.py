"""How long a run stands still after a process died, and the cost: restarting one role or restarting
everything.

The benchmark starts a run of the reverse-text task as a user would. Then it kills a process with SIGKILL, and
measures the time from the kill to the next new step in metrics.jsonl, that is, a step that the run had not
reached before. For `whole job` it kills the launcher and immediately runs the same command again with
`--ckpt.resume auto`, the best that a job scheduler could do.

In the scenarios `rl, in turns`, trainer and server share a device (`--colocate`), and the role is killed in
the trainer's turn or in the server's. They are not among the default ones; with `--shape`, such as 1.7b, they
show on a GPU whether a role that comes back finds the memory that it needs.

Goodput is the time that the steps would have taken undisturbed, divided by the time that they took, from the
end of the first step to the end of the last, with a kill at a random moment in one of each ten steps. A kill
costs half a step on average, whatever else it costs: at most 0.952 can be reached. `--goodput-batch` makes
the steps longer.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import gpu

from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.machine import this_machine

REPOSITORY = Path(__file__).resolve().parents[1]
TASK = "configs/reverse_text"
DEADLINE = 300.0
CALM_STEPS = 8
"""Length of the undisturbed runs before and after the disturbed ones; the first three steps do not count."""
POLL = 0.1
"""Seconds between two polls when total time is measured: polling takes CPU time from the run."""

ENDLESS = ("--max-steps", "1000000", "--ckpt.interval", "5", "--ckpt.keep-last", "2")
SFT = ("sft", "@", f"{TASK}/sft.toml", *ENDLESS)
RL = ("rl", "@", f"{TASK}/rl.toml", *ENDLESS)

SCENARIOS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "sft: whole job": (SFT, None),
    "sft: trainer worker": (SFT, "trainer_rank0"),
    "sft: trainer worker, spare": ((*SFT, "--spare-workers", "1"), "trainer_rank0"),
    "sft: trainer driver": (SFT, "trainer"),
    "sft: trainer driver, standby": ((*SFT, "--standby"), "trainer"),
    "rl: whole job": (RL, None),
    "rl: trainer worker": (RL, "trainer_rank0"),
    "rl: trainer worker, spare": ((*RL, "--trainer.spare-workers", "1"), "trainer_rank0"),
    "rl: trainer driver": (RL, "trainer"),
    "rl: orchestrator": (RL, "orchestrator"),
    "rl: orchestrator, standby": ((*RL, "--standby"), "orchestrator"),
    "rl: own server": (RL, "inference"),
}
IN_TURNS = ("rl", "@", f"{TASK}/rl.toml", "--colocate", *ENDLESS)
LARGER_SERVER = ("--inference.dtype", "auto", "--inference.kv-cache-memory", "2G")
TURNS: dict[str, tuple[str, bool]] = {
    f"rl, in turns: {role}, {whose} turn": (role, trainers)
    for trainers, whose in ((True, "trainer's"), (False, "server's"))
    for role in ("trainer_rank0", "trainer", "orchestrator", "inference")
}
"""Scenarios in turns: who is killed, and whether in the trainer's turn."""
QUICK = ("sft: whole job", "sft: trainer worker, spare")
ROLES = ("trainer_rank0", "trainer_rank0", "trainer")
EACH_STEP, IN_MEMORY = ("--ckpt.interval", "1"), ("--ckpt.interval", "50", "--ckpt.memory-interval", "1")
BY_ROLE = ("--spare-workers", "1", "--standby")
DISTURBED: dict[str, tuple[tuple[str, ...], tuple[str | None, ...]]] = {
    "restart by role": ((*EACH_STEP, *BY_ROLE), ROLES),
    "restart by role, from memory": ((*IN_MEMORY, *BY_ROLE), ROLES),
    "restart of the whole job": (EACH_STEP, (None,)),
}
"""Runs whose goodput is measured: their options, and the roles among which the victims are drawn."""


def main() -> None:
    """Measure the requested scenarios and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*SCENARIOS, *TURNS]
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), choices=names, metavar="NAME")
    parser.add_argument("--in-turns", action="store_true", help="the scenarios in turns")
    parser.add_argument(
        "--shape", choices=gpu.SHAPES, help="a model of benchmarks/gpu.py's, not the README's"
    )
    parser.add_argument("--folder", type=Path, help="for models and runs")
    parser.add_argument("--repeats", type=int, default=3, help="kills per scenario; medians are reported")
    parser.add_argument("--goodput-steps", type=int, default=100, help="length of disturbed runs; 0: none")
    parser.add_argument(
        "--goodput-batch", type=int, help="samples in a step of disturbed runs (the task's: 64)"
    )
    parser.add_argument(
        "--goodput-runs", nargs="+", default=list(DISTURBED), choices=DISTURBED, metavar="NAME", help="which"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and victims of the kills")
    parser.add_argument("--quick", action="store_true", help="two scenarios, one kill, no goodput")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.scenarios, arguments.repeats, arguments.goodput_steps = QUICK, 1, 0
    if arguments.in_turns:
        arguments.scenarios, arguments.goodput_steps = list(TURNS), 0
    say = (lambda *_: None) if arguments.json else (lambda *text: print(*text, flush=True))
    result: dict[str, Any] = {"cpus": os.cpu_count(), "repeats": arguments.repeats}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        seconds, model = {}, ()
        if arguments.shape:
            made = common.make_model(Path(folder), gpu.SHAPES[arguments.shape].model)
            model = ("--model.name", str(made))
        for name in arguments.scenarios:
            run = Path(folder) / re.sub(r"\W+", "_", name)
            if name in TURNS:
                victim, trainers = TURNS[name]
                command = (*IN_TURNS, *model, *(LARGER_SERVER if model else ()))
                times = measure(run, command, victim, arguments.repeats, 2, trainers_turn=trainers)
            else:
                command, victim = SCENARIOS[name]
                times = measure(run, (*command, *model), victim, arguments.repeats, 12)
            seconds[name] = statistics.median(times)
            say(f"{name:32} {seconds[name]:6.2f} s  of {', '.join(f'{t:.2f}' for t in times)}")
        result["seconds_to_next_step"] = seconds
        result["times_faster_than_whole_job"] = ratios(seconds)
        if arguments.goodput_steps:
            config = larger_task(Path(folder), arguments.goodput_batch)
            names, steps = arguments.goodput_runs, arguments.goodput_steps
            result["goodput"] = goodput(config, names, steps, arguments.seed, say)
    for name, ratio in result["times_faster_than_whole_job"].items():
        say(f"{name:32} {ratio:6.1f} times faster than restarting the whole job")
    print(json.dumps(result))


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """How many times faster each scenario is than restarting the whole job of its kind."""
    whole = {name.partition(":")[0]: value for name, value in seconds.items() if name.endswith("whole job")}
    return {
        name: whole[name.partition(":")[0]] / value
        for name, value in seconds.items()
        if name.partition(":")[0] in whole and not name.endswith("whole job")
    }


class Job:
    """The command of a run, which can be killed and started again."""

    def __init__(self, run: Path, command: tuple[str, ...]):
        self.run = run
        self.arguments = [*command, "--output-dir", str(run)]
        if command[0] == "rl":
            self.arguments += ["--inference.port", str(free_port())]
        self.log = run.with_suffix(".log")
        self.process = self._start([])

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # the roles die with it
        self.process.wait()
        wait_for_end(role["pid"] for role in self.roles().values())

    def _start(self, more: list[str]) -> subprocess.Popen:
        name, *flags = self.arguments
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                common.command(name, (*flags, *more)),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=common.bound_to_us(),
            )

    def kill(self, role: str | None) -> int:
        """Kill the process that has `role`, or the launcher, which is then started again.

        Returns the newest step that was finished before the kill, or by processes that survive it.
        """
        roles = {name: entry["pid"] for name, entry in self.roles().items() if entry["state"] == "running"}
        if role is None:
            self.process.kill()
            self.process.wait()
            wait_for_end(roles.values())
        else:
            os.kill(roles[role], signal.SIGKILL)
            wait_for_end(pid for name, pid in roles.items() if name.startswith(role))
        batches = (path.stem.rpartition("_")[2] for path in (self.run / "batches").glob("step_*.safetensors"))
        newest = max([self.step(), *map(int, batches)])
        if role is None:
            self.process = self._start(["--ckpt.resume", "auto"])
        return newest

    def roles(self) -> dict[str, dict[str, Any]]:
        """The roles in roles.json."""
        path = self.run / "roles.json"
        return json.loads(path.read_text())["roles"] if path.exists() else {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]

    def step(self) -> int:
        """The newest step that is finished."""
        rows = self.rows()
        return rows[-1]["step"] if rows else 0

    def ready(self) -> bool:
        """Whether the requested spares and standbys are ready."""
        roles = self.roles()
        waiting = [name for name, role in roles.items() if role["state"] == "waiting"]
        wanted = [role for role in ("trainer", "orchestrator") if "--standby" in self.arguments]
        wanted = [f"{role}_standby" for role in wanted if role == "trainer" or self.arguments[0] == "rl"]
        spares = 0
        if "--spare-workers" in self.arguments or "--trainer.spare-workers" in self.arguments:
            ranks = sum(name.startswith("trainer_rank") for name in roles)
            spares = ranks if this_machine().has_gpus else 1  # on GPUs each rank has one
        there = sum(name.startswith("trainer_spare") for name in waiting)
        return there >= spares and all(any(name.startswith(want) for name in waiting) for want in wanted)

    def wait_until(
        self, condition: Callable[[], bool], what: str, poll: float = 0.005, seconds: float = DEADLINE
    ) -> None:
        """Wait at most `seconds` for a condition while the command runs, polling every `poll` seconds."""

        def check() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the command ended:\n{self.log.read_text()[-3000:]}")
            return condition()

        wait_until(check, what, poll, seconds)


def measure(
    run: Path,
    command: tuple[str, ...],
    victim: str | None,
    repeats: int,
    steps: int,
    trainers_turn: bool | None = None,
) -> list[float]:
    """Seconds from each kill to the next new step.

    Args:
        steps: that are finished before a kill.
        trainers_turn: whose turn it is when something is killed; None: there are no turns.
    """
    directory = RunDirectory(run)

    def is_turn() -> bool:
        attempt = directory.attempt()
        return (
            attempt is not None and (directory.versions.trainers_turn(attempt) is not None) == trainers_turn
        )

    times = []
    with Job(run, command) as job:
        for _ in range(repeats):
            before = job.step()
            job.wait_until(lambda before=before: job.step() >= before + steps and job.ready(), "steps")
            if trainers_turn is not None:
                job.wait_until(is_turn, "the turn")
            killed = time.monotonic()
            target = job.kill(victim) + 1
            job.wait_until(lambda target=target: job.step() >= target, f"step {target}")
            times.append(time.monotonic() - killed)
    return times


# Goodput


def goodput(
    config: Path, names: Iterable[str], steps: int, seed: int, say: Callable[..., None]
) -> dict[str, Any]:
    """The goodput of these runs of `DISTURBED`, killed by role or as a whole at random moments."""
    command, folder = ("sft", "@", str(config), "--ckpt.keep-last", "2"), config.parent
    calm = calm_steps(folder / "calm_before", (*command, *EACH_STEP))
    step_seconds = statistics.median(calm)
    say(f"a calm step takes {step_seconds:.2f} s")
    walls = {}
    for name in names:
        options, victims = DISTURBED[name]
        run, whole = folder / re.sub(r"\W+", "_", name), (*command, *options, "--max-steps", str(steps))
        walls[name] = disturbed(run, whole, victims, steps, step_seconds, seed)
        say(f"{name}: {walls[name]}")
    calm += calm_steps(folder / "calm_after", (*command, *EACH_STEP))  # the machine's speed may have changed
    step_seconds = statistics.median(calm)
    say(f"a calm step took {step_seconds:.2f} s, before and after")
    for name, found in walls.items():
        found["goodput"] = found["new_steps"] * step_seconds / found["seconds"]
        say(f"{name}: goodput {found['goodput']:.3f}")
    return {"step_seconds": step_seconds, "steps": steps, **walls}


def calm_steps(run: Path, command: tuple[str, ...]) -> list[float]:
    """Seconds of each step of a short, undisturbed run."""
    with Job(run, (*command, "--max-steps", str(CALM_STEPS))) as job:
        job.process.wait()
        return [row["time/wait"] + row["time/step"] for row in job.rows() if row["step"] > 3]


def disturbed(
    run: Path,
    command: tuple[str, ...],
    victims: tuple[str | None, ...],
    steps: int,
    step_seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Run with a kill at a random moment in one of each ten steps; returns its times and goodput."""
    draw, patience = random.Random(seed), DEADLINE + 20 * step_seconds
    with Job(run, command) as job:
        job.wait_until(lambda: job.step() >= 1, "the first step", POLL)
        began, first = time.monotonic(), job.step()
        kills = 0
        for ten in range(0, steps, 10):
            at, moment, victim = ten + draw.randint(1, 9), draw.random(), draw.choice(victims)
            job.wait_until(lambda at=at: job.step() >= at, f"step {at}", POLL, patience)
            time.sleep(moment * step_seconds)
            job.kill(victim)
            kills += 1
        wait_until(lambda: job.process.poll() is not None, "the end", POLL, patience)
        if job.step() != steps:
            raise RuntimeError(f"the command ended:\n{job.log.read_text()[-3000:]}")
        wall = time.monotonic() - began
        last = job.rows()[-1]
    return {
        "kills": kills,
        "seconds": wall,
        "new_steps": steps - first,
        "recomputed_steps": last["run/recomputed_steps"],
        "goodput_by_own_account": last["run/goodput"],
    }


def larger_task(folder: Path, batch_size: int | None) -> Path:
    """The SFT task with a larger model, for steps of a second or two, or as long as a larger batch takes."""
    source = REPOSITORY / TASK
    model = folder / "model"
    model.mkdir()
    for path in (source / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    shape = json.loads((model / "config.json").read_text())
    shape |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    if "layer_types" in shape:
        shape["layer_types"] = ["full_attention"] * shape["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(shape))
    text = (source / "sft.toml").read_text().replace(f"{TASK}/model", str(model))
    if batch_size is not None:
        text = text.replace("batch_size = 64", f"batch_size = {batch_size}")
    config = folder / "sft.toml"
    config.write_text(text)
    return config


def wait_until(
    condition: Callable[[], bool], what: str, poll: float = 0.005, seconds: float = DEADLINE
) -> None:
    """Wait at most `seconds` for a condition, polling every `poll` seconds.

    Raises:
        TimeoutError: the condition stayed false until then.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(poll)


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of the processes is running."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    pids = list(pids)
    wait_until(lambda: not any(map(runs, pids)), "processes to end")


if __name__ == "__main__":
    main()
