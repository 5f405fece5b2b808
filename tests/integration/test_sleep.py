"""Sleep of vLLM's server, on a CPU, where the engine does all but free memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cairn.inference.client import InferenceClient
from cairn.inference.server import Server
from cairn.policy.errors import ServerAsleep
from cairn.policy.generation import SamplingParams

pytestmark = pytest.mark.timeout(600)

PROMPT = [5, 9, 20]


def test_a_sleeping_server_refuses_to_generate_and_keeps_its_weights(
    inference_server: Server, tiny_model: Callable[..., Path]
):
    """Requests in flight wait, and go on once it is woken; updates are refused until then."""
    model, params = tiny_model(seed=1), SamplingParams(max_tokens=600, n=8, seed=5)

    async def job(client: InferenceClient) -> None:
        await client.update_weights(model, "run:1")
        before, checksums = await client.status(), await client.weight_checksums()
        assert not before.asleep

        client.retry_for = 0
        in_flight = asyncio.create_task(client.generate(PROMPT, params))
        await asyncio.sleep(0.3)
        asleep = await client.sleep()
        assert (asleep.asleep, asleep.weight_version, asleep.epoch) == (True, "run:1", before.epoch)
        assert await client.sleep() == await client.status() == asleep
        assert await client.health(), "its supervisor must not take it for dead"
        for refused in (
            client.generate(PROMPT, params),
            client.update_weights(model, "run:2"),
            client.weight_checksums(),
        ):
            with pytest.raises(ServerAsleep):
                await refused
        async with httpx.AsyncClient(base_url=client.url, timeout=60) as http:
            for route in ("/cairn/sleep", "/cairn/wake", "/resume"):
                assert (await http.post(route)).status_code == 401, "without the token"
            headers = {"Authorization": f"Bearer {inference_server.token}"}
            assert (await http.post("/resume", headers=headers)).status_code == 503
        assert not in_flight.done()

        assert await client.wake() == before
        assert await client.wake() == before
        answers = await in_flight
        assert len(answers) == 8
        assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
        assert {span.version for answer in answers for span in answer.weight_versions} == {"run:1"}
        assert await client.weight_checksums() == checksums
        await client.sleep()
        await client.wake()
        await client.update_weights(tiny_model(seed=2), "run:2")
        assert await client.weight_checksums() != checksums
        (answer,) = await client.generate(PROMPT, SamplingParams(max_tokens=4, seed=1))
        assert {span.version for span in answer.weight_versions} == {"run:2"}

    async def main() -> None:
        async with InferenceClient(inference_server.url, inference_server.token) as client:
            await job(client)

    asyncio.run(main())
