"""How many sampled tokens a second the orchestrator takes on one core, by the length of the answers.

    uv run benchmarks/orchestrator.py
    uv run benchmarks/orchestrator.py --before ../earlier-checkout

The servers are played by another process, which answers as vLLM does, with texts rendered in advance. The
trainer is played, too: it announces a policy as soon as it has a batch. All of the orchestrator is real:
requests, ledger, rewards, rollouts/, batches. Prints one JSON object, for each length and `chunk_tokens`:
- tokens_per_cpu_s: sampled tokens for each second of processor time of the orchestrator's process
- tokens_per_s: the same for each second of the clock, on a machine that is quiet
- chunk_ms: processor time for a request's answer
- ledger_bytes_per_token: size of the ledger at its largest
With --before, the orchestrator of another checkout of Cairn is measured with the same requests, in turns.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import CONFIGS, bound_to_us, environment

from cairn.run.connections import free_port

HERE = Path(__file__).parents[1]
ATTEMPT = {"run_id": "run", "number": 1, "command": "rl", "start_step": 0, "resume_from": None}
BRANCH = "branch_1"
SAMPLES = 8  # of each prompt
STEP = 1 << 18  # tokens of a step
TIMEOUT = 600  # seconds of one measurement


# The played servers


def choice(index: int, length: int, version: str) -> dict[str, Any]:
    """A choice of an answer, as vLLM 0.32 gives it where the sampled tokens' logprobs are asked for."""
    tokens = [6 + (place * 7919 + index) % 90 for place in range(length)]
    logprobs = [-((place * 104729 + index) % 100003) / 65536.0 for place in range(length)]
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [one]}
        for token, logprob in zip(tokens, logprobs, strict=True)
        for one in [{"token_id": token, "logprob": logprob, "rank": 1}]
    ]
    nothing = dict.fromkeys(("stop_reason", "routed_experts", "sampling_mask"))
    return {
        "index": index,
        "finish_reason": "length",
        **nothing,
        "token_ids": tokens,
        "weight_versions": [{"version": version, "start": 0, "end": length}],
        "logprobs": {"content": content},
    }


async def serve(port: int) -> None:
    """Answer requests until killed; each kind of answer is rendered once, apart from the policy's version."""
    from aiohttp import web

    state = {"version": "default"}
    rendered: dict[tuple[int, int], list[bytes]] = {}
    mark = "the policy's version"

    async def status(_: web.Request) -> web.Response:
        return web.json_response(
            {
                **{"weight_version": state["version"], "epoch": "1", "model": "played", "paused": False},
                **{"max_num_seqs": 1024, "vllm_version": "0", "max_model_len": 1 << 20, "dtype": "float32"},
            }
        )

    async def update(request: web.Request) -> web.Response:
        state["version"] = (await request.json())["version"]
        return await status(request)

    async def generate(request: web.Request) -> web.Response:
        sampling = json.loads(
            b"{" + (await request.read()).rpartition(b'"sampling_params":{')[2].split(b"}")[0] + b"}"
        )
        length, n = sampling["max_tokens"], sampling["n"]
        if (length, n) not in rendered:
            answer = {
                **{
                    "request_id": "1",
                    "model": "played",
                    "created": 0,
                    "usage": None,
                    "prompt_logprobs": None,
                },
                "choices": [choice(index, length, mark) for index in range(n)],
            }
            text = json.dumps(answer, separators=(",", ":")).encode()
            rendered[length, n] = text.split(mark.encode())
        return web.Response(
            body=state["version"].encode().join(rendered[length, n]), content_type="application/json"
        )

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/health", health)
    app.router.add_get("/cairn/status", status)
    app.router.add_post("/cairn/update_weights", update)
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of a played server, in a process of its own."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port)]
    server = subprocess.Popen(command, env=environment(1), preexec_fn=bound_to_us())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


# The measured process


class Fixed:
    """Problems whose answers are rewarded by nothing but their order."""

    def __init__(self) -> None:
        self._given = 0

    def __len__(self) -> int:
        return 1 << 20

    def messages(self, problem: int) -> list[dict[str, str]]:
        """A short question."""
        return [{"role": "user", "content": f"{problem}"}]

    def reward(self, problem: int, answer: str) -> float:
        """0, 1, 0, 1, ..."""
        self._given += 1
        return float(self._given % 2)


def prompts_of(length: int) -> int:
    """Prompts of a step whose answers have so many tokens."""
    return max(1, STEP // (SAMPLES * length))


async def measure(url: str, length: int, chunk: int, steps: int, folder: Path) -> dict[str, float]:
    """What the batches behind the first take."""
    from cairn.config.model import ModelConfig
    from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
    from cairn.inference.pool.membership import PoolSettings
    from cairn.inference.pool.server_pool import ServerPool
    from cairn.orchestrator.loop import Orchestrator
    from cairn.run.directory import RunDirectory
    from cairn.run.messages import Attempt

    prompts = prompts_of(length)
    config = OrchestratorConfig(
        model=ModelConfig(name=str(CONFIGS / "model")),
        environment=EnvironmentConfig(name=f"{Path(__file__).stem}:Fixed"),
        sampling=SamplingConfig(max_tokens=length, chunk_tokens=chunk),
        prompts_per_step=prompts,
        samples_per_prompt=SAMPLES,
        max_in_flight=1024,
        max_steps=steps,
        output_dir=str(folder),
        self_check=False,
    )
    folder.mkdir()
    run, attempt = RunDirectory(folder), Attempt(**ATTEMPT, branch=BRANCH)
    run.begin(attempt)
    seconds, cpu, largest = 0.0, 0.0, 0

    async def train() -> None:
        nonlocal seconds, cpu, largest
        run.versions.path.mkdir()
        run.versions.begin(attempt, published=False)
        for step in range(1, steps + 1):
            while not (run.batches / f"step_{step}.safetensors").exists():
                await asyncio.sleep(0.002)
            largest = max(largest, sum(file.stat().st_size for file in folder.glob("ledger.sqlite*")))
            if step == 1:
                seconds, cpu = time.perf_counter(), time.process_time()
            run.versions.folder(step).mkdir(parents=True)
            run.versions.announce(attempt, step, save=False, last=step == steps)

    os.environ["CAIRN_INFERENCE_TOKEN"] = "played"
    async with ServerPool([url], PoolSettings(keep_cache=True)) as servers:
        await servers.wait_ready(60)
        async with asyncio.timeout(TIMEOUT), asyncio.TaskGroup() as group:
            group.create_task(train())
            group.create_task(Orchestrator(config, attempt, servers).run())
    seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    tokens = (steps - 1) * prompts * SAMPLES * length
    requests = (steps - 1) * prompts * (1 + SAMPLES * (-(-length // chunk) - 1))
    return {
        "tokens_per_cpu_s": round(tokens / cpu),
        "tokens_per_s": round(tokens / seconds),
        "chunk_ms": round(1000 * cpu / requests, 2),
        "ledger_bytes_per_token": round(largest / (prompts * SAMPLES * length), 1),
    }


def measured(checkout: Path, *arguments: object) -> dict[str, float]:
    """The same in a process of its own, with the Cairn of a checkout."""
    paths = os.pathsep.join(map(str, (checkout, Path(__file__).parent)))
    with tempfile.TemporaryDirectory() as folder, served() as url:
        command = [sys.executable, __file__, "--measure", url, *map(str, arguments), str(Path(folder, "run"))]
        known = {**environment(1), "PYTHONPATH": paths, "HOME": folder}
        done = subprocess.run(command, capture_output=True, env=known, text=True, preexec_fn=bound_to_us())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of an answer"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 8192], help="sampling.chunk_tokens")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="to measure in each run, about")
    parser.add_argument("--before", type=Path, help="another checkout of Cairn to compare with")
    parser.add_argument("--quick", action="store_true", help="few tokens")
    parser.add_argument("--json", action="store_true", help="all on one line")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return asyncio.run(serve(options.serve))
    if options.measure:
        url, length, chunk, steps, folder = options.measure
        return print(json.dumps(asyncio.run(measure(url, int(length), int(chunk), int(steps), Path(folder)))))
    if options.quick:
        options.lengths, options.tokens = [2048], 1
        options.chunks = [512]
    checkouts = {"before": options.before} if options.before else {}
    checkouts["cairn"] = HERE
    found: dict[str, Any] = {"samples": SAMPLES, "lengths": {}}
    for length in options.lengths:
        steps = 1 + max(1, round(options.tokens / (prompts_of(length) * SAMPLES * length)))
        by_chunk = found["lengths"][str(length)] = {}
        for chunk in sorted({min(chunk, length) for chunk in options.chunks}):
            own = {name: measured(path, length, chunk, steps) for name, path in checkouts.items()}
            by_chunk[str(chunk)] = own
            print(length, chunk, own, file=sys.stderr)
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
