"""What rollouts that are programs cost the orchestrator: processor time for each turn, memory, and replays.

    uv run benchmarks/programs.py --rollouts 2000 --turns 20

Servers and tools are played in this process and answer after `--pause` seconds, so that all rollouts are in
flight at once. Their own cost is measured apart, with the same requests and nothing around them. Then a
rollout of `--replayed` turns raises an exception at its end, and is replayed from the ledger.
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.chat import ChatFormat
from cairn.orchestrator.environments import Programs
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.programs import ProgramRunner
from cairn.orchestrator.prompts import Prompts
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
    """Each answer has `tokens` tokens."""

    max_model_len: int | None = None

    def __init__(self, tokens: int, pause: float):
        self.tokens, self.pause = tokens, pause
        self.in_flight = self.most = self.requests = 0

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, affinity: int, versions: Collection[str]
    ) -> list[Generation]:
        """After about the same time each."""
        self.requests += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        draw = random.Random(params.seed)
        await asyncio.sleep(self.pause * draw.uniform(0.5, 1.5))
        self.in_flight -= 1
        tokens = [*draw.choices(range(6, 32), k=self.tokens - 1), params.stop_token_ids[0]]
        return [Generation(tokens, [-0.5] * len(tokens), [VersionSpan(VERSION, 0, len(tokens))], "stop")]


async def late(longest: list[float]) -> None:
    """Keep how much later than asked the event loop comes back, at most."""
    while True:
        begun = time.monotonic()
        await asyncio.sleep(0.05)
        longest[0] = max(longest[0], time.monotonic() - begun - 0.05)


def complete(folder: Path, errands: Errands, servers: Servers, rollouts: int, each: int = EACH) -> float:
    """Run all rollouts at once; returns how late the event loop came back, at most."""
    folder.mkdir()
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

    async def work() -> float:
        longest = [0.0]
        watch = asyncio.create_task(late(longest))
        prompts = Prompts(ledger)
        groups = prompts.partial or [prompts.issue(0) for _ in range(rollouts // each)]
        await asyncio.gather(*map(runner.complete, groups))
        watch.cancel()
        return longest[0]

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


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64, help="in each answer")
    parser.add_argument("--letters", type=int, default=64, help="in what each tool says: a token each")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds that a server takes")
    parser.add_argument("--replayed", type=int, default=150, help="turns of the rollout that is replayed")
    options = parser.parse_args()
    errands = Errands(options.turns, options.letters)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        complete(path / "warm", errands, Servers(options.tokens, 0), EACH)
        gc.collect()
        gc.freeze()  # modules, as the orchestrator does
        before, servers = megabytes(), Servers(options.tokens, options.pause)
        begun, cpu = time.monotonic(), time.process_time()
        latest = complete(path / "all", errands, servers, options.rollouts)
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
        begun = time.process_time()
        asyncio.run(alone(Servers(options.tokens, 0), servers.requests, 64))
        servers_cpu = time.process_time() - begun
        replays = [
            replay(path / f"replay {i}", Errands(options.replayed, options.letters), options.tokens)
            for i in range(3)
        ]
        tokens = options.rollouts * options.turns * (options.tokens + options.letters)
        print(
            json.dumps(
                {
                    "rollouts": options.rollouts,
                    "turns": servers.requests,
                    "in_flight_at_once": servers.most,
                    "tokens": tokens,
                    "seconds": round(seconds, 1),
                    "cpu_ms_per_turn": round(1000 * (cpu - servers_cpu) / servers.requests, 3),
                    "cpu_ms_per_turn_of_played_servers": round(1000 * servers_cpu / servers.requests, 3),
                    "event_loop_late_s": round(latest, 3),
                    "replayed_turns": options.replayed,
                    "replay_s": round(min(seconds for seconds, _ in replays), 3),
                    "replay_cpu_s": round(min(cpu for _, cpu in replays), 3),
                    "memory_mb": round(megabytes() - before),
                    "memory_bytes_per_token": round((megabytes() - before) * 2**20 / tokens, 1),
                }
            )
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
