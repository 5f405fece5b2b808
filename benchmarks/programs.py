"""What rollouts that are programs cost the orchestrator: processor time for each turn, memory, and replays.

    uv run benchmarks/programs.py --rollouts 2000 --turns 20
    uv run benchmarks/programs.py --rollouts 2000 --turns 150 --tokens 8 --letters 8 --killed-at 75

Servers and tools are played in the measured process and answer after `--pause` seconds, so that all rollouts
are in flight at once. Their own cost is measured apart, with the same requests and nothing around them. Then
a rollout of `--replayed` turns raises an exception at its end, and is replayed from the ledger.

With `--killed-at`, a second run of as many rollouts is killed (SIGKILL) after so many turns of each, and
another process takes it up: how long it takes until the last rollout is where it was, and to the end of all.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import multiprocessing
import random
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import Programs
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.policy.generation import Generation, SamplingParams, VersionSpan

MODEL = Path(__file__).parents[1] / "configs" / "reverse_text" / "model"
VERSION = "run:branch_1:0"
EACH = 8  # rollouts of a prompt


class Errands:
    """Asks, and has a tool called, in turns."""

    def __init__(self, turns: int, letters: int):
        self.turns, self.letters = turns, letters
        self.fails = False
        """Whether the next rollout that comes to its end fails there."""
        self.failed_at = (0.0, 0.0)
        """`time.monotonic` and `time.process_time` of then."""

    def __len__(self) -> int:
        return 1 << 20

    async def visit(self, turn: int) -> str:
        """The tool."""
        return f"{turn:0{self.letters}}"

    async def rollout(self, problem: int, model: Any) -> float:
        """Ask, visit, tell."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{problem}"}]
        for turn in range(self.turns):
            reply = await model.generate(messages)
            seen = await model.once("visit", partial(self.visit, turn))
            messages += [reply.message, {"role": "user", "content": seen}]
        if self.fails:
            self.fails, self.failed_at = False, (time.monotonic(), time.process_time())
            raise RuntimeError("it is to be replayed")
        return 1.0


class Servers:
    """Each answer has `tokens` tokens.

    Args:
        together: nobody is answered until so many wait for an answer.
    """

    max_model_len: int | None = None

    def __init__(self, tokens: int, pause: float, together: int = 0):
        self.tokens, self.pause, self.together = tokens, pause, together
        self.in_flight = self.most = self.requests = 0
        self.all_wait = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Collection[str],
        began: str | None = None,
        sessions: Sequence[int] = (),
    ) -> list[Generation]:
        """After about the same time each."""
        self.requests += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        if self.most >= self.together:
            self.all_wait.set()
        await self.all_wait.wait()
        draw = random.Random(params.seed)
        await asyncio.sleep(self.pause * draw.uniform(0.5, 1.5))
        self.in_flight -= 1
        tokens = [*draw.choices(range(6, 32), k=self.tokens - 1), params.stop_token_ids[0]]
        return [Generation(tokens, [-0.5] * len(tokens), [VersionSpan(VERSION, 0, len(tokens))], "stop")]


@dataclass
class Watched:
    """What is seen of a run: seconds by which the event loop came back late, at most, and at each mark.

    together_s: seconds from the start of the run until all rollouts waited for the servers at once.
    late_until_then_s: the longest delay of the event loop before. marks: at every eighth of the turns, how
    many turns there were, seconds and seconds of processor time since the start, and resident megabytes.
    """

    turns: int
    late_s: float = 0.0
    together_s: float | None = None
    late_until_then_s: float = 0.0
    opened_s: float = 0.0
    marks: list[dict[str, float]] = field(default_factory=list)

    async def watch(self, servers: Servers) -> None:
        """Watch until cancelled."""
        begun, cpu, opened = time.monotonic(), time.process_time(), self.opened_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.05)
            now = time.monotonic()
            self.late_s = max(self.late_s, now - before - 0.05)
            if self.together_s is None and servers.all_wait.is_set():
                self.together_s, self.late_until_then_s = opened + now - begun, self.late_s
            if servers.requests >= (len(self.marks) + 1) * self.turns // 8:
                spent = {"seconds": round(now - begun, 1), "cpu_s": round(time.process_time() - cpu, 1)}
                self.marks.append({"turns": servers.requests, **spent, "rss_mb": round(resident())})


def complete(folder: Path, errands: Errands, servers: Servers, rollouts: int, each: int = EACH) -> Watched:
    """Run all rollouts at once, those that are recorded in the folder from where they are."""
    begun = time.monotonic()
    folder.mkdir(exist_ok=True)
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="errands:Errands"),
        samples_per_prompt=each,
        sampling=SamplingConfig(max_tokens=servers.tokens),
        reward_timeout=3600,
        reward_retry_seconds=0,
    )
    run = LedgerRun("run", "branch_1", FORMAT, 0, 1 << 20, 1, each, 0)
    ledger = Ledger(folder / "ledger.sqlite", run, None, 0)
    environment = Programs(errands, config)
    runner = ProgramRunner(config, environment, ChatFormat(MODEL), servers, ledger, {VERSION})

    async def work() -> Watched:
        prompts = Prompts(ledger)
        watched = Watched(rollouts * errands.turns, opened_s=time.monotonic() - begun)
        watch = asyncio.create_task(watched.watch(servers))
        await asyncio.sleep(0)
        groups = prompts.partial or [prompts.issue(0) for _ in range(rollouts // each)]
        await asyncio.gather(*map(runner.complete, groups))
        watch.cancel()
        return watched

    try:
        return asyncio.run(work())
    finally:
        environment.close()
        ledger.close()


async def alone(servers: Servers, requests: int, context: int) -> None:
    """As many requests, with nothing around them."""
    params = SamplingParams(max_tokens=servers.tokens, seed=0, stop_token_ids=(1,))
    prompt = [7] * context
    at_once = asyncio.Semaphore(2000)

    async def one() -> None:
        async with at_once:
            await servers.generate(prompt, params, affinity=0, versions={VERSION})

    await asyncio.gather(*(one() for _ in range(requests)))


def replay(folder: Path, errands: Errands, tokens: int) -> tuple[float, float]:
    """Seconds and seconds of processor time that the replay of a whole rollout takes."""
    errands.fails = True
    logging.disable()  # of the failure
    complete(folder, errands, Servers(tokens, 0), 2, 2)
    logging.disable(logging.NOTSET)
    at, cpu_at = errands.failed_at
    return time.monotonic() - at, time.process_time() - cpu_at


def megabytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """The megabytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def take_up(folder: Path, options: argparse.Namespace, pipe: Connection) -> None:
    """Run the rollouts in the folder, or begin them; the body of a process that may be killed."""
    complete(folder / "warm", Errands(1, options.letters), Servers(options.tokens, 0), EACH)
    gc.collect()
    gc.freeze()
    before = megabytes()
    servers = Servers(options.tokens, options.pause, options.rollouts)
    watched = complete(folder / "all", Errands(options.turns, options.letters), servers, options.rollouts)
    pipe.send(
        {
            "asked": servers.requests,
            "opened_s": round(watched.opened_s, 2),
            "all_where_they_were_s": round(watched.together_s or -1, 2),
            "event_loop_late_until_then_s": round(watched.late_until_then_s, 3),
            "event_loop_late_s": round(watched.late_s, 3),
            "memory_mb": round(megabytes() - before),
            "marks": watched.marks,
        }
    )


def killed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a run in its middle, and have another process take it up."""
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    first = spawn.Process(target=take_up, args=(folder, options, send))
    first.start()
    while recorded(folder / "all" / "ledger.sqlite") < options.rollouts * options.killed_at:
        time.sleep(0.2)
        if not first.is_alive():
            raise SystemExit(f"it has ended before turn {options.killed_at}")
    first.kill()
    first.join()
    turns = recorded(folder / "all" / "ledger.sqlite")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder / "warm").rename(folder / "first warm")
    second = spawn.Process(target=take_up, args=(folder, options, send))
    second.start()
    found = receive.recv()
    second.join()
    cpu = usage.ru_utime + usage.ru_stime  # with that of starting, a few seconds
    first_process = {"cpu_ms_per_turn": round(1000 * cpu / turns, 3), "rss_mb": usage.ru_maxrss // 1024}
    return {"turns_when_killed": turns, "first_process": first_process, **found}


def recorded(ledger: Path) -> int:
    """How many turns are in a ledger that another process may be writing."""
    if not ledger.exists():
        return 0
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=60)) as database:
        try:
            return database.execute("SELECT count(*) FROM turns").fetchone()[0]
        except sqlite3.OperationalError:  # it is being made
            return 0


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="in each answer")
    parser.add_argument("--letters", type=int, default=64, help="in what each tool says: a token each")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds that a server takes")
    parser.add_argument("--replayed", type=int, default=150, help="turns of the rollout that is replayed")
    parser.add_argument("--killed-at", type=int, default=0, help="turns of each when a second run is killed")
    parser.add_argument("--only-killed", action="store_true", help="measure that run alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {} if options.only_killed else undisturbed(Path(folder), options)
        if options.killed_at:
            found["killed"] = killed(Path(folder) / "killed", options)
        print(json.dumps(found))
    sys.stdout.flush()


def undisturbed(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a run costs, and the replay of a single rollout."""
    errands = Errands(options.turns, options.letters)
    complete(path / "warm", errands, Servers(options.tokens, 0), EACH)
    gc.collect()
    gc.freeze()  # modules, as the orchestrator does
    before, servers = megabytes(), Servers(options.tokens, options.pause)
    begun, cpu = time.monotonic(), time.process_time()
    watched = complete(path / "all", errands, servers, options.rollouts)
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    memory = megabytes() - before
    begun = time.process_time()
    asyncio.run(alone(Servers(options.tokens, 0), servers.requests, 64))
    servers_cpu = time.process_time() - begun
    replays = [
        replay(path / f"replay {i}", Errands(options.replayed, options.letters), options.tokens)
        for i in range(3)
    ]
    tokens = options.rollouts * options.turns * (options.tokens + options.letters)
    return {
        "rollouts": options.rollouts,
        "turns": servers.requests,
        "in_flight_at_once": servers.most,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "cpu_ms_per_turn": round(1000 * (cpu - servers_cpu) / servers.requests, 3),
        "cpu_ms_per_turn_of_played_servers": round(1000 * servers_cpu / servers.requests, 3),
        "event_loop_late_s": round(watched.late_s, 3),
        "replayed_turns": options.replayed,
        "replay_s": round(min(seconds for seconds, _ in replays), 3),
        "replay_cpu_s": round(min(cpu for _, cpu in replays), 3),
        "memory_mb": round(memory),
        "memory_bytes_per_token": round(memory * 2**20 / tokens, 1),
        "marks": watched.marks,
    }


if __name__ == "__main__":
    main()
