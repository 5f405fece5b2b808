"""A pool of real vLLM servers: one hands weights on, one has wrong weights, one is killed."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from runs import forking_servers
from safetensors.torch import load_file

from cairn.config.inference import InferenceConfig
from cairn.inference.client import InferenceClient
from cairn.inference.pool.membership import PoolSettings
from cairn.inference.pool.server_pool import ServerPool
from cairn.inference.server import Server
from cairn.policy.generation import Generation, SamplingParams
from cairn.policy.sender import WeightSender

GROUPS = range(24)


async def answers(pool: ServerPool) -> list[list[Generation]]:
    """What a pool answers to requests that keep its servers busy for a while."""
    return await asyncio.gather(
        *(
            pool.generate(
                list(range(20 + group, 40 + group)),
                SamplingParams(max_tokens=300, n=2, seed=100 * group),
                affinity=group,
                versions={"run:1"},
            )
            for group in GROUPS
        )
    )


async def conversations(pool: ServerPool) -> float:
    """Have some conversations of two turns; returns the share of the second ones that was in a cache."""

    async def ask(talk: int, tokens: list[int]) -> list[int]:
        sampling = SamplingParams(max_tokens=8, seed=talk)
        (answer,) = await pool.generate(tokens, sampling, affinity=talk, versions={"run:1"}, sessions=[1])
        return [*tokens, *answer.token_ids]

    begun = [[20 + (7 * place + talk) % 70 for place in range(140)] for talk in range(900, 906)]
    first = await asyncio.gather(*map(ask, range(900, 906), begun))
    pool.take_metrics()
    await asyncio.gather(*map(ask, range(900, 906), first))
    return pool.take_metrics()["servers/cache_hits"]


def test_answers_do_not_depend_on_which_servers_live(
    inference_server: Server, tiny_model: Callable[..., Path], free_port: Callable[[], int], tmp_path: Path
):
    model = tiny_model(seed=1)
    config = InferenceConfig(port=free_port(), kv_cache_memory="64M")
    second = Server(config, str(tiny_model(seed=0)), tmp_path / "vllm.log")
    sender = WeightSender(load_file(model / "model.safetensors"), rank=0, host="127.0.0.1")

    async def main() -> None:
        async with ServerPool([inference_server.url]) as pool:
            await pool.serve(model, "run:1")
            alone = await answers(pool)
        settings = PoolSettings(retry_for=60, fan_out=1)
        async with ServerPool([inference_server.url, second.url], settings) as pool:
            await pool.wait_ready(60)
            await pool.serve(model, "run:1")
            await asyncio.to_thread(second.wait_ready)
            while pool.take_metrics()["servers/healthy"] < 2:  # it joins, with the weights
                await asyncio.sleep(0.05)

            # The trainer sends the same policy from its memory to one server, and that one to the other.
            sender.offer(1)
            sender.source(1, [sender.here]).write(tmp_path)
            pool.take_metrics()
            await pool.serve(tmp_path, "run:1")
            metrics = pool.take_metrics()
            assert metrics["weights/bytes"] == 2 * metrics["weights/relayed_bytes"] > 0
            assert len(sender._listener._threads) == 1, "the trainer has served one of them"
            assert await answers(pool) == alone
            assert await conversations(pool) > 0.8, "128 of their 148 tokens, a block on CPUs"

            # Another run, say, puts its weights into the first server.
            async with InferenceClient(inference_server.url) as client:
                await client.update_weights(tiny_model(seed=2), "another:1")
            assert await answers(pool) == alone
            assert pool.take_metrics()["servers/retries"] > 0

            asked = asyncio.create_task(answers(pool))
            await asyncio.sleep(0.3)
            second.kill()
            assert await asked == alone
            metrics = pool.take_metrics()
            assert metrics["servers/retries"] > 0
            assert metrics["servers/healthy"] == 1

    with contextlib.ExitStack() as started:
        with forking_servers():
            started.enter_context(second)
        started.callback(sender.close)
        asyncio.run(main())
