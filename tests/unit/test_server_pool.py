"""A pool of inference servers: routing, retries, weights; and clients of servers that misbehave.

The servers here speak the same routes as the real ones, and can be told to fail.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import DEADLINE
from safetensors.torch import save_file

from cairn.config.model import LoraConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.inference.client import ASLEEP, InferenceClient, StaleServer
from cairn.inference.pool.membership import PoolSettings, parse_urls
from cairn.inference.pool.server_pool import ServerPool
from cairn.inference.vllm_command import samples_of
from cairn.launch.plan.external_servers import check_bases, gpus_of_servers, with_servers
from cairn.orchestrator.policy_sync.following import explained
from cairn.policy.errors import ServerDisagrees, ServerUnavailable, WeightsAltered, WeightsRefused
from cairn.policy.generation import SamplingParams, VersionSpan
from cairn.policy.receiver import Source
from cairn.run.errors import UsageError
from cairn.run.files import write_json
from cairn.run.machine import Machine
from cairn.run.messages import Probe

Answer = tuple[int, Any]


class FakeServer:
    """Answers as the real server does, at once or when told to; `fault` may answer in its stead.

    A fault gets the path and body of a request and gives status and content, None to go on as usual, or
    raises ConnectionResetError to hang up.
    """

    def __init__(self) -> None:
        self.version, self.lives = "default", 0
        self.pushed: list[str] = []
        self.paths: list[str] = []
        self.routes: list[dict] = []
        self.kept_cache: list[bool] = []
        self.salts: list[str] = []
        self.asked: list[int] = []
        self.fault: Callable[[str, dict], Coroutine[Any, Any, Answer | None]] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.port = 0
        self.disagrees = self.scores = 0
        self.more_status: dict[str, Any] = {}
        self.more_came: dict[str, Any] = {}
        self.looks = 0
        self.asleep = False
        self.adapters: list[str] | None = None
        """The names of the adapters that requests may ask for; None: it replaces its weights."""
        self.did: list[str] = []
        """Pushes, sleeps and wakes, in order."""
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Begin to listen, as a new server that has lost its weights."""
        self.version, self.asleep = "default", False
        if self.adapters is not None:
            self.adapters = []
        self.lives += 1
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Cut all connections and listen no more."""
        self._server.close()
        for writer in set(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():  # it died right after it had taken the connection
            writer.transport.abort()
            return
        self._connections.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = json.loads(await reader.readexactly(size) or b"{}")
                status, content = await self._answer(head.split()[1], body)
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        self._connections.discard(writer)
        writer.close()

    async def _answer(self, path: str, body: dict) -> Answer:
        if self.fault and (answer := await self.fault(path, body)):
            return answer
        self.looks += path == "/cairn/status"
        if path in ("/cairn/sleep", "/cairn/wake"):
            self.asleep = path == "/cairn/sleep"
            self.did.append(path.removeprefix("/cairn/"))
        elif self.asleep and path != "/cairn/status" and path != "/health":
            return 503, {"error": {"message": f"{ASLEEP}; wake it"}}
        elif path == "/cairn/update_weights":
            self.routes.append(route := body.get("route") or {})
            self.came = {
                "relay": {"host": route["host"], "port": self.port} if route.get("children") else None,
                "relayed": bool(route.get("parent")),
            }
            self.did.append(body["version"])
            self.version = body["version"]
            self.pushed.append(self.version)
            self.paths.append(body["path"])
            self.kept_cache.append(body["keep_cache"])
            if self.adapters is not None:
                self.adapters.append(f"{self.version}@{len(self.adapters)}")
        elif path == "/inference/v1/generate":
            if self.adapters is not None and body.get("model") not in self.adapters:
                return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist."}}
            if "prompt_logprobs" in body["sampling_params"]:
                return 200, self.scored(body)
            self.asked.append(body["token_ids"][0])
            self.salts.append(body["cache_salt"])
            await self.gate.wait()
            return 200, {"choices": self.choices(body), "model": body.get("model")}
        return 200, {
            "weight_version": self.version,
            "epoch": str(self.lives),
            "model": "model",
            "paused": False,
            "max_num_seqs": 8,
            "asleep": self.asleep,
            "adapter": self.adapters[-1] if self.adapters else None,
            **(self.came | self.more_came if path == "/cairn/update_weights" else {}),
            **self.more_status,
            "vllm_version": "0",
        }

    def scored(self, body: dict) -> dict:
        """Logprobs of a prompt: -1 for each token, or something else `disagrees` times."""
        wrong = self.disagrees > 0
        self.disagrees -= wrong
        self.scores += 1
        tokens = [{str(token): {"logprob": -1.0 - wrong}} for token in body["token_ids"]]
        span = {"version": self.version, "start": 0, "end": 1}
        choice = {"index": 0, "weight_versions": [span], "token_ids": [0], "finish_reason": "length"}
        return {"choices": [choice], "prompt_logprobs": [None, *tokens[1:]], "model": body.get("model")}

    def choices(self, body: dict) -> list[dict]:
        """What the real server answers: here the tokens are the prompt's first and the seed."""
        sampling = body["sampling_params"]
        return [
            {
                "index": i,
                "token_ids": [body["token_ids"][0], sampling["seed"] + i],
                "logprobs": {"content": [{"logprob": -1.0}] * 2},
                "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
                "finish_reason": "length",
            }
            for i in range(sampling["n"])
        ]


@contextlib.asynccontextmanager
async def servers(
    count: int, servers_file: Path | None = None, **options: Any
) -> AsyncIterator[tuple[ServerPool, list[FakeServer]]]:
    """A pool that looks often at its servers, which run."""
    started = [FakeServer() for _ in range(count)]
    for server in started:
        await server.start()
    urls = [server.url for server in started]
    settings = PoolSettings(**{"retry_for": DEADLINE, "look_every": 0.02, **options})
    async with ServerPool(urls, settings, servers_file=servers_file, token="t") as pool:
        await until(
            lambda: (
                len(pool._membership.members) == count
                and all(m.ready for m in pool._membership.members.values())
            )
        )
        yield pool, started
    for server in started:
        await server.die()


async def until(condition: Callable[[], Any]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.005)


def ask(
    pool: ServerPool, group: int, versions: tuple[str, ...] = ("v1",), n: int = 1, began: str | None = None
) -> asyncio.Task:
    params = SamplingParams(max_tokens=4, n=n, seed=3)
    asking = pool.generate([group], params, affinity=group, versions=versions, began=began)
    return asyncio.create_task(asking)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), DEADLINE))

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    run.__signature__ = __import__("inspect").signature(test)
    return run


# Routing


@in_loop
async def test_the_smallest_context_of_all_servers_is_known():
    """Also while a server is gone; one of an earlier version says nothing of it."""
    async with servers(3) as (pool, fakes):
        assert pool.max_model_len is None
        for fake, limit in zip(fakes, (100, 80, None), strict=True):
            await fake.die()
            await until(lambda url=fake.url: not pool._membership.members[url].ready)
            fake.more_status = {} if limit is None else {"max_model_len": limit}
            await fake.start()
        await until(lambda: pool.max_model_len == 80)
        await fakes[1].die()
        assert pool.max_model_len == 80


@in_loop
async def test_the_client_sets_no_bound_on_requests_at_once():
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        fake.gate.clear()
        requests = [ask(pool, group) for group in range(150)]
        await until(lambda: len(fake.asked) == len(requests))
        fake.gate.set()
        await asyncio.gather(*requests)


@in_loop
async def test_more_answers_than_a_server_samples_at_a_time_are_asked_for_in_parts():
    """With the seeds of one request, and so with its answers, in its order."""
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        for n in (8, 9, 20):
            fake.asked.clear()
            generations = await ask(pool, 5, n=n)
            assert [found.token_ids for found in generations] == [[5, 3 + i] for i in range(n)]
            assert len(fake.asked) == -(-n // 8)


@in_loop
async def test_a_group_stays_on_one_server_and_groups_spread():
    async with servers(3) as (pool, fakes):
        await pool.serve("/w", "v1")
        for fake in fakes:
            fake.gate.clear()
        first = [ask(pool, group, n=2) for group in range(6)]
        await until(lambda: sum(len(fake.asked) for fake in fakes) == 6)
        assert sorted(len(fake.asked) for fake in fakes) == [2, 2, 2]
        again = [ask(pool, group) for group in range(6)]
        await until(lambda: sum(len(fake.asked) for fake in fakes) == 12)
        for fake in fakes:
            assert sorted(fake.asked[:2]) == sorted(fake.asked[2:])
            fake.gate.set()
        answers = [await answer for answer in first + again]
        assert [a[0].token_ids for a in answers] == [[group, 3] for group in range(6)] * 2
        assert [g.token_ids for g in answers[0]] == [[0, 3], [0, 4]]


@in_loop
async def test_a_group_leaves_a_server_that_is_full():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        for fake in fakes:
            fake.gate.clear()
        full = ask(pool, 0, n=8)  # as many as it runs at once
        await until(lambda: fakes[0].asked + fakes[1].asked)
        other = fakes[0] if fakes[1].asked else fakes[1]
        more = ask(pool, 0)
        await until(lambda: other.asked == [0])
        for fake in fakes:
            fake.gate.set()
        await full
        await more


# Failure


@in_loop
async def test_requests_of_a_server_that_dies_are_answered_by_another():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        for fake in fakes:
            fake.gate.clear()
        asked = [ask(pool, group) for group in range(8)]
        await until(lambda: all(len(fake.asked) == 4 for fake in fakes))
        await fakes[0].die()
        fakes[1].gate.set()
        assert [(await answer)[0].token_ids[0] for answer in asked] == list(range(8))
        metrics = pool.take_metrics()
        assert (metrics["servers/requests"], metrics["servers/retries"]) == (8, 4)
        assert metrics["servers/healthy"] == 1
        # Back again it has lost its weights; it gets them before it generates.
        await fakes[0].start()
        fakes[0].gate.set()
        await until(lambda: pool.take_metrics()["servers/healthy"] == 2)
        assert fakes[0].pushed == ["v1", "v1"]


@in_loop
async def test_the_only_server_is_waited_for():
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        await fake.die()
        asked = [ask(pool, group) for group in range(3)]
        await asyncio.sleep(0.1)
        await fake.start()
        assert [(await answer)[0].weight_versions[0].version for answer in asked] == ["v1"] * 3


@in_loop
async def test_servers_that_stay_away_are_named_with_the_setting():
    async with servers(2, retry_for=0.2) as (pool, fakes):
        await pool.serve("/w", "v1")
        for fake in fakes:
            await fake.die()
        await until(lambda: pool.take_metrics()["servers/healthy"] == 0)
        with pytest.raises(ServerUnavailable, match="request-timeout") as caught:
            await ask(pool, 0)
        assert all(fake.url in str(caught.value) for fake in fakes)
        with pytest.raises(ServerUnavailable, match="taken weights v2") as caught:
            await pool.serve("/w", "v2")
        assert all(fake.url in str(caught.value) for fake in fakes)


@in_loop
async def test_a_server_that_hangs_loses_its_requests_to_another():
    async with servers(2, hangs_after=0.1) as (pool, fakes):
        await pool.serve("/w", "v1")

        async def hang(path: str, body: dict) -> None:
            raise ConnectionResetError

        fakes[0].gate.clear()
        asked = [ask(pool, group) for group in range(4)]
        await until(lambda: len(fakes[0].asked) == 2)
        fakes[0].fault = hang  # new connections get nothing, the requests that are there hang
        assert [(await answer)[0].token_ids[0] for answer in asked] == list(range(4))
        assert len(fakes[1].asked) == 4


async def error(path: str, body: dict) -> Answer | None:
    return (500, {"error": {"message": "broken"}}) if path.endswith("generate") else None


async def garbage(path: str, body: dict) -> Answer | None:
    return (200, "<html>not JSON</html>") if path.endswith("generate") else None


async def other_json(path: str, body: dict) -> Answer | None:
    return (200, {"choices": [{"index": 0, "token_ids": [1]}]}) if path.endswith("generate") else None


async def too_few(path: str, body: dict) -> Answer | None:
    return (200, {"choices": []}) if path.endswith("generate") else None


async def abort(path: str, body: dict) -> Answer | None:
    if not path.endswith("generate"):
        return None
    choice = {"index": 0, "token_ids": [], "logprobs": None, "weight_versions": [], "finish_reason": "abort"}
    return 200, {"choices": [choice]}


async def lost_logprob(path: str, body: dict) -> Answer | None:
    if not path.endswith("generate"):
        return None
    spans = [{"version": "v1", "start": 0, "end": 2}]
    logprobs = {"content": [{"logprob": -1.0}]}
    choice = {"index": 0, "token_ids": [1, 2], "logprobs": logprobs, "weight_versions": spans}
    return 200, {"choices": [{**choice, "finish_reason": "stop"}]}


async def hang_up(path: str, body: dict) -> Answer | None:
    if path.endswith("generate"):
        raise ConnectionResetError
    return None


async def silence(path: str, body: dict) -> Answer | None:
    if path.endswith("generate"):
        await asyncio.sleep(3600)
    return None


FAULTS = {
    "error": (error, "answered 500: broken"),
    "garbage": (garbage, "something else than 1 choices.*not JSON"),
    "other JSON": (other_json, "something else than 1 choices"),
    "too few": (too_few, "something else than 1 choices.*0 choices"),
    "lost logprob": (lost_logprob, "1 logprobs of 2 tokens"),
    "hang up": (hang_up, "no inference server at"),
    "silence": (silence, "no answer within 0.3 s .--orchestrator.request-timeout"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_client_names_the_server_that_misbehaves(name: str):
    fault, message = FAULTS[name]

    async def main() -> None:
        fake = FakeServer()
        await fake.start()
        fake.fault = fault
        seconds = 0.3 if fault is silence else DEADLINE
        async with InferenceClient(fake.url, "t", timeout=seconds, retry_for=0) as client:
            with pytest.raises(ServerUnavailable, match=message) as caught:
                await client.generate([1], SamplingParams(max_tokens=4, seed=1))
        assert fake.url in str(caught.value)
        await fake.die()

    asyncio.run(main())


@pytest.mark.parametrize("fault", [fault for fault, _ in FAULTS.values()] + [abort])
def test_another_server_answers_for_one_that_misbehaves(fault: Any):
    async def main() -> None:
        async with servers(2, timeout=0.3) as (pool, fakes):
            await pool.serve("/w", "v1")
            await until(lambda: pool.take_metrics()["servers/healthy"] == 2)  # none was late
            fakes[0].fault = fault
            answers = await asyncio.gather(*(ask(pool, group) for group in range(4)))
            assert [answer[0].token_ids for answer in answers] == [[group, 3] for group in range(4)]
            assert pool.take_metrics()["servers/retries"] >= 2

    asyncio.run(main())


@in_loop
async def test_a_server_that_recovers_is_used_again():
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        fake.fault = error
        answer = ask(pool, 0)
        await until(lambda: pool.take_metrics()["servers/retries"])
        fake.fault = None
        assert (await answer)[0].token_ids == [0, 3]


@in_loop
async def test_a_bad_request_is_raised_at_once():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")

        async def refuse(path: str, body: dict) -> Answer | None:
            return (400, {"error": {"message": "too long"}}) if path.endswith("generate") else None

        for fake in fakes:
            fake.fault = refuse
        with pytest.raises(ValueError, match="too long"):
            await ask(pool, 0)
        assert pool.take_metrics()["servers/retries"] == 0


# Weights


@in_loop
async def test_wrong_weights_are_noticed_and_mended():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        fakes[0].version = "another run's"
        answers = await asyncio.gather(*(ask(pool, group) for group in range(4)))
        assert {answer[0].weight_versions[0].version for answer in answers} == {"v1"}
        await until(lambda: fakes[0].version == "v1")  # the other server may have answered all of it before
        assert fakes[0].pushed == ["v1", "v1"]
        assert fakes[1].pushed == ["v1"]


@in_loop
async def test_a_server_that_stays_wrong_is_named():
    async with servers(1) as (pool, (fake,)):

        async def lie(path: str, body: dict) -> Answer | None:
            if not path.endswith("generate"):
                return None
            choices = fake.choices(body)
            choices[0]["weight_versions"][0]["version"] = "v7"
            return 200, {"choices": choices}

        await pool.serve("/w", "v1")
        fake.fault = lie
        with pytest.raises(StaleServer, match="'v7'") as caught:
            await ask(pool, 0)
        assert fake.url in str(caught.value)


@in_loop
async def test_refused_weights_are_raised():
    async with servers(2) as (pool, fakes):

        async def refuse(path: str, body: dict) -> Answer | None:
            return (422, {"error": {"message": "NaN"}}) if path.endswith("update_weights") else None

        fakes[1].fault = refuse
        with pytest.raises(WeightsRefused, match="NaN"):
            await pool.serve("/w", "v1")


@in_loop
async def test_a_server_that_fails_the_push_gets_it_again_before_it_generates():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        failures = 2

        async def fail(path: str, body: dict) -> Answer | None:
            nonlocal failures
            if path.endswith("update_weights") and failures:
                failures -= 1
                return 500, {"error": {"message": "half-way"}}
            return None

        fakes[0].fault = fail
        await pool.serve("/w", "v2")
        assert fakes[1].version == "v2"
        await until(lambda: fakes[0].version == "v2")
        answers = await asyncio.gather(*(ask(pool, group, ("v2",)) for group in range(4)))
        assert {answer[0].weight_versions[0].version for answer in answers} == {"v2"}


@dataclass
class Altered:
    """The answer of a server to which other weights came than were published, so many times."""

    times: int
    count: int = 0

    async def __call__(self, path: str, body: dict) -> Answer | None:
        if path != "/cairn/update_weights" or self.count >= self.times:
            return None
        self.count += 1
        return 412, {"error": {"message": "tensor w is another"}}


PROBE = Probe([5, 6, 7], [-1.0, -1.0], "float32")


@in_loop
async def test_a_server_that_disagrees_once_is_given_the_weights_again():
    async with servers(1) as (pool, (fake,)):
        fake.disagrees = 1
        await pool.serve("/w", "v1", probe=PROBE)
        assert fake.pushed == ["v1", "v1"]
        assert fake.scores == 2
        await ask(pool, 0)
        metrics = pool.take_metrics()
        assert (metrics["servers/quarantined"], metrics["servers/healthy"]) == (0, 1)


@in_loop
async def test_a_server_that_goes_on_disagreeing_is_left_out_until_there_are_other_weights():
    async with servers(2) as (pool, fakes):
        bad, good = fakes
        bad.disagrees = 10**6
        await pool.serve("/w", "v1", probe=PROBE)
        await until(lambda: bad.pushed == ["v1"] * 3)
        await asyncio.gather(*(ask(pool, group) for group in range(6)))
        assert (len(bad.asked), len(good.asked)) == (0, 6)
        metrics = pool.take_metrics()
        assert (metrics["servers/quarantined"], metrics["servers/healthy"]) == (1, 1)
        bad.disagrees = 0
        await pool.serve("/w", "v2", probe=PROBE)
        await until(lambda: bad.pushed[-1] == "v2" and pool.take_metrics()["servers/healthy"] == 2)
        assert bad.pushed == ["v1"] * 3 + ["v2"]
        assert pool.take_metrics()["servers/quarantined"] == 0


@in_loop
async def test_a_run_without_a_server_that_agrees_ends():
    async with servers(2) as (pool, fakes):
        for fake in fakes:
            fake.disagrees = 10**6
        with pytest.raises(
            ServerDisagrees, match=r"weights v1, .* 3 tokens differ .* by 1 on average"
        ) as error:
            await pool.serve("/w", "v1", probe=PROBE)
        assert all(fake.url in str(error.value) for fake in fakes)
        assert [fake.pushed for fake in fakes] == [["v1"] * 3] * 2


@in_loop
async def test_a_server_whose_weights_were_altered_on_the_way_is_given_them_again():
    async with servers(2) as (pool, (bad, good)):
        altered = Altered(times=1)
        bad.fault = altered
        await pool.serve("/w", "v1", probe=PROBE)
        await until(lambda: pool.take_metrics()["servers/healthy"] == 2)
        assert (altered.count, bad.pushed, good.pushed) == (1, ["v1"], ["v1"])
        altered.times = 10**6
        await pool.serve("/w", "v2", probe=PROBE)
        await until(lambda: altered.count == 4)
        await asyncio.gather(*(ask(pool, group, ("v2",)) for group in range(4)))
        assert bad.asked == []
        metrics = pool.take_metrics()
        assert metrics["servers/quarantined"] == 1
        assert metrics[f"servers/disagreed/127.0.0.1:{bad.port}"] == 3
        assert f"servers/disagreed/127.0.0.1:{good.port}" not in metrics


@in_loop
async def test_weights_that_no_server_gets_as_they_were_end_the_run():
    """It is not said to be the model's fault, as with servers that compute otherwise."""
    async with servers(1) as (pool, (fake,)):
        fake.fault = Altered(times=10**6)
        with (
            pytest.raises(WeightsAltered, match=rf"{fake.url}: tensor w is another"),
            explained(Path("/model")),
        ):
            await pool.serve("/w", "v1", probe=PROBE)


@in_loop
async def test_what_a_server_was_asked_under_weights_that_it_does_not_have_is_asked_again():
    """Whether the answer was there before the server was found wrong, or not yet."""
    async with servers(2) as (pool, (bad, good)):
        await pool.serve("/w", "v1", probe_follows=True)
        asked = [ask(pool, group) for group in range(4)]
        await until(lambda: len(bad.asked) == len(good.asked) == 2)
        bad.gate.clear()
        asked += [ask(pool, group) for group in range(4, 8)]
        await until(lambda: len(bad.asked) == len(good.asked) == 4)
        await asyncio.sleep(0.05)
        assert not any(answer.done() for answer in asked), "no answer counts before the proof"
        bad.disagrees = 10**6
        await pool.prove(PROBE)
        answers = await asyncio.gather(*asked)
        assert [answer[0].token_ids[0] for answer in answers] == list(range(8))
        assert sorted(good.asked) == list(range(8))


@in_loop
async def test_the_proof_is_asked_of_servers_that_join_as_well():
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1", probe=PROBE)
        await fake.die()
        await until(lambda: pool.take_metrics()["servers/healthy"] == 0)
        await fake.start()
        await ask(pool, 0)
        assert (fake.pushed, fake.scores) == (["v1", "v1"], 2)


@in_loop
async def test_a_short_context_takes_the_first_tokens_of_the_probe():
    async with servers(1) as (pool, (fake,)):
        fake.more_status = {"max_model_len": 3}
        await fake.die()
        await until(lambda: pool.take_metrics()["servers/healthy"] == 0)
        await fake.start()
        await pool.serve("/w", "v1", probe=PROBE)
        assert fake.scores == 1


@pytest.mark.parametrize("logprob", [-1.01, float("nan"), float("-inf")])
def test_a_probe_takes_rounding_and_nothing_else(logprob: float):
    assert PROBE.difference([-1.0001, -1.0], "float32") is None
    assert PROBE.difference([logprob, -1.0], "float32") is not None
    assert PROBE.difference([-1.02, -1.0], "bfloat16") is None
    assert PROBE.difference([-1.3, -1.0], "bfloat16") is not None


@in_loop
async def test_a_cache_is_kept_only_where_the_run_s_own_weights_have_made_it():
    async with servers(1, keep_cache=True) as (pool, (fake,)):
        for version in ("v1", "v2"):
            await pool.serve("/w", version)
            await ask(pool, 1, (version,))
        assert fake.kept_cache == [False, True]
        fake.version = "another:1"  # somebody else's weights
        await ask(pool, 1, ("v2",))
        assert fake.pushed == ["v1", "v2", "v2"]
        assert fake.kept_cache == [False, True, False]
        assert set(fake.salts) == {"v1", "v2"}


@in_loop
async def test_answers_that_go_on_find_what_they_left_in_a_cache_that_is_kept():
    """And in no other; new ones never find what earlier weights have left."""
    for keep, salts in ((True, ["v1", "v1", "v2"]), (False, ["v1", "v2", "v2"])):
        async with servers(1, keep_cache=keep) as (pool, (fake,)):
            await pool.serve("/w", "v1")
            await ask(pool, 1)
            await pool.serve("/w", "v2")
            await ask(pool, 1, ("v1", "v2"), began="v1")
            await ask(pool, 2, ("v1", "v2"))
            assert fake.kept_cache == [False, keep]
            assert fake.salts == salts


@in_loop
async def test_a_long_answer_has_longer_to_arrive():
    """As many times the timeout as it may have 512 tokens; a short one has it once."""
    fake = FakeServer()
    await fake.start()

    async def late(path: str, body: dict) -> Answer | None:
        if path.endswith("generate"):
            await asyncio.sleep(0.2)
        return None

    fake.fault = late
    async with InferenceClient(fake.url, token="t", timeout=0.1, retry_for=0) as client:
        with pytest.raises(ServerUnavailable, match=r"no answer within 0.1 s"):
            await client.generate([1], SamplingParams(max_tokens=512, seed=1))
        (answer,) = await client.generate([1], SamplingParams(max_tokens=512 * 100, seed=1))
        assert answer.token_ids == [1, 1]
    await fake.die()


@in_loop
async def test_caches_are_not_kept_unless_asked_for():
    async with servers(1) as (pool, (fake,)):
        for version in ("v1", "v2"):
            await pool.serve("/w", version)
        assert fake.kept_cache == [False, False]


@in_loop
async def test_a_straggler_gets_no_request_for_weights_that_it_lacks():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        arrived = asyncio.Event()

        async def slow(path: str, body: dict) -> Answer | None:
            if path.endswith("update_weights"):
                await arrived.wait()
            return None

        fakes[0].fault = slow
        await pool.serve("/w", "v2")
        await asyncio.gather(*(ask(pool, group, ("v2",)) for group in range(4)))
        assert (len(fakes[0].asked), len(fakes[1].asked)) == (0, 4)
        await asyncio.gather(*(ask(pool, group, ("v1", "v2")) for group in range(10, 14)))
        assert fakes[0].asked
        arrived.set()
        await until(lambda: fakes[0].version == "v2")


@in_loop
async def test_metrics_count_bytes_seconds_and_idleness(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """And what a server's start has loaded otherwise than its first update, which ends nothing."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    async with servers(2) as (pool, fakes):
        fakes[0].more_came, fakes[1].more_came = {"start_differs": ["tp0:a", "tp1:a"]}, {"start_differs": []}
        await pool.serve(tmp_path, "v1")
        metrics = pool.take_metrics()
        assert metrics["weights/bytes"] == 2000
        assert metrics["servers/start_differed"] == 2
        assert f"{fakes[0].url} had loaded other values into 2 parameters at its start" in caplog.text
        assert "tp0:a, tp1:a" in caplog.text
        assert fakes[1].url not in caplog.text
        assert "servers/start_differed" not in pool.take_metrics()
        assert metrics["time/push"] > 0
        for fake in fakes:
            fake.gate.clear()
        asked = ask(pool, 0)
        await until(lambda: fakes[0].asked or fakes[1].asked)
        assert pool.take_metrics()["time/server_idle"] > 0
        await asyncio.sleep(0.05)
        assert pool.take_metrics()["time/server_idle"] == 0
        for fake in fakes:
            fake.gate.set()
        await asked
        assert pool.take_metrics()["weights/bytes"] == 0


@in_loop
async def test_a_policy_in_the_trainers_memory_goes_from_server_to_server(tmp_path: Path):
    """One in files does not; and who joins later gets it from the trainer."""
    Source(step=1, bytes=1000, shapes={}, dtypes={}, ranks=[]).write(tmp_path)
    async with servers(5, fan_out=2) as (pool, fakes):
        await pool.serve(tmp_path, "v1")
        assert all(fake.version == "v1" for fake in fakes)
        parents = [(fake.routes[0].get("parent") or {}).get("port") for fake in fakes]
        assert parents == [None, None, fakes[0].port, fakes[0].port, fakes[1].port]
        assert [fake.routes[0].get("children", 0) for fake in fakes] == [2, 1, 0, 0, 0]
        metrics = pool.take_metrics()
        assert (metrics["weights/bytes"], metrics["weights/relayed_bytes"]) == (5000, 3000)
        await fakes[4].die()
        await until(lambda: not pool._membership.members[fakes[4].url].ready)
        await fakes[4].start()
        await until(lambda: fakes[4].version == "v1")
        assert fakes[4].routes[1:] == [{}]
        await pool.serve("/w", "v2")
        assert all(fake.routes[-1] == {} for fake in fakes)
        assert pool.take_metrics()["weights/relayed_bytes"] == 0


# Joining and leaving


@in_loop
async def test_servers_join_and_leave_through_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR)
    file = tmp_path / "servers.json"
    async with servers(1, servers_file=file) as (pool, (first,)):
        await pool.serve("/w", "v1")
        second = FakeServer()
        await second.start()
        first.gate.clear()
        held = ask(pool, 0)
        await until(lambda: first.asked)
        file.write_text(json.dumps({"urls": [second.url]}))
        await until(lambda: pool.urls == [second.url])
        await ask(pool, 0)
        assert (second.pushed, second.asked, first.asked) == (["v1"], [0], [0])
        first.gate.set()
        assert (await held)[0].token_ids == [0, 3]
        await pool.serve("/w", "v2")
        assert (first.version, second.version) == ("v1", "v2")

        file.write_text("[1]")
        await until(lambda: "1 is not a URL" in caplog.text)
        await asyncio.sleep(0.1)
        assert caplog.text.count("1 is not a URL") == 1
        assert pool.urls == [second.url]

        file.unlink()
        await until(lambda: pool.urls == [first.url])
        await ask(pool, 0, ("v2",))
        assert first.version == "v2"
        await second.die()


@in_loop
async def test_a_server_that_joins_and_refuses_the_weights_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "servers.json"
    async with servers(1, servers_file=file) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        other = FakeServer()
        await other.start()

        async def refuse(path: str, body: dict) -> Answer | None:
            return (422, {"error": {"message": "wrong shape"}}) if path.endswith("update_weights") else None

        other.fault = refuse
        file.write_text(json.dumps([fake.url, other.url]))
        await until(lambda: "wrong shape" in caplog.text)
        for version in ("v2", "v3"):
            await pool.serve("/w", version)
            assert (await ask(pool, 0, (version,)))[0].weight_versions[0].version == version
            await asyncio.sleep(0.1)
        assert not other.asked
        assert caplog.text.count("can't join") == 1
        await other.die()


@in_loop
async def test_servers_are_told_where_an_object_store_has_a_version_now(tmp_path: Path):
    """A trainer that was restarted has put it elsewhere, and a server that was restarted asks for it."""
    async with servers(1) as (pool, (fake,)):
        await pool.serve(tmp_path, "v1")
        assert fake.paths == [str(tmp_path)]
        for url in ("s3://bucket/run/policies/a/v2", "s3://bucket/run/policies/b/v2"):
            write_json(tmp_path / "stored.json", {"url": url})
            if url.endswith("a/v2"):
                await pool.serve(tmp_path, "v2")
            else:
                await fake.die()
                (member,) = pool._membership.members.values()
                await until(lambda member=member: not member.ready)
                await fake.start()
            await until(lambda url=url: fake.paths[-1] == url)


@in_loop
async def test_a_server_that_tells_no_experts_joins_no_run_that_replays_them(
    caplog: pytest.LogCaptureFixture,
):
    """It is said once what to do; started again with --return-experts, it joins."""
    told, silent = FakeServer(), FakeServer()
    told.more_status = {"experts": True}
    for server in (told, silent):
        await server.start()
    settings = PoolSettings(look_every=0.02, needs_experts=True)
    async with ServerPool([told.url, silent.url], settings, token="t") as pool:
        await pool.wait_ready(DEADLINE)
        await pool.serve("/w", "v1")
        looks = silent.looks
        await until(lambda: silent.looks > looks + 2)
        assert f"{silent.url} can't join: it does not tell the experts" in caplog.text
        assert "start it with --return-experts" in caplog.text
        assert caplog.text.count("can't join") == 1
        assert (told.version, silent.version) == ("v1", "default")
        silent.more_status = {"experts": True}
        await until(lambda: silent.version == "v1")
    for server in (told, silent):
        await server.die()


@in_loop
async def test_a_server_that_is_down_at_the_start_joins_later(caplog: pytest.LogCaptureFixture):
    fake, late = FakeServer(), FakeServer()
    for server in (fake, late):
        await server.start()
    await late.die()
    async with ServerPool([fake.url, late.url], PoolSettings(look_every=0.02), token="t") as pool:
        await pool.wait_ready(10)
        assert late.url in caplog.text
        await pool.serve("/w", "v1")
        await late.start()
        await until(lambda: late.version == "v1")
        await fake.die()
        assert (await ask(pool, 0))[0].token_ids == [0, 3]
    await late.die()


@in_loop
async def test_no_server_at_the_start_is_an_error_with_the_setting():
    fake = FakeServer()
    await fake.start()
    await fake.die()
    async with ServerPool([fake.url], token="t") as pool:
        with pytest.raises(ServerUnavailable, match="server-timeout") as caught:
            await pool.wait_ready(0.1)
    assert fake.url in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Expecting"),
        ("{}", "a JSON list of URLs"),
        ("[]", "one at least"),
        ('["127.0.0.1:8000"]', "'127.0.0.1:8000' is not a URL"),
        ('["http://127.0.0.1:port"]', "not a URL"),
    ],
)
def test_a_servers_file_that_makes_no_sense_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_urls(text)


def test_a_servers_file_may_be_a_list_or_an_object():
    assert parse_urls('["http://a:1/", "http://b:2", "http://a:1"]') == ["http://a:1", "http://b:2"]
    assert parse_urls('{"urls": ["https://a"]}') == ["https://a"]


@in_loop
async def test_given_servers_tell_which_gpus_they_use():
    """Before a run divides the machine's; one of an earlier version tells nothing."""
    told, silent = FakeServer(), FakeServer()
    told.more_status = {"gpus": ["GPU-a", "GPU-b"]}
    for server in (told, silent):
        await server.start()
    config = RLConfig(orchestrator=OrchestratorConfig(inference_url=[silent.url, told.url]))
    found = await asyncio.to_thread(gpus_of_servers, config, Machine())
    assert found == {"GPU-a": told.url, "GPU-b": told.url}
    await told.die()
    with pytest.raises(ServerUnavailable):
        await asyncio.to_thread(gpus_of_servers, config, Machine())
    await silent.die()


# Adapters that servers compute beside their weights


@in_loop
async def test_given_servers_must_take_what_the_trainer_publishes():
    """Adapters, up to some rank, or whole models; and tell the experts of tokens if these are replayed."""
    server = FakeServer()
    await server.start()

    async def start(*, replayed: bool = False, **lora: Any) -> None:
        trainer = TrainerConfig(lora=LoraConfig(**lora) if lora else None, router_replay=replayed)
        config = RLConfig(trainer=trainer, orchestrator=OrchestratorConfig(inference_url=[server.url]))
        await asyncio.to_thread(with_servers, config, ["trainer", "inference"])

    await start()
    await start(serve="adapter")
    with pytest.raises(UsageError, match=r'it merges adapters, and lora.serve = "unmerged" needs'):
        await start(serve="unmerged")
    server.more_status = {"max_lora_rank": 16}
    await start(serve="unmerged", rank=16)
    with pytest.raises(UsageError, match=r"up to rank 16, and .* needs --max-lora-rank 17 there"):
        await start(serve="unmerged", rank=17)
    for lora in ({}, {"serve": "adapter"}):
        with pytest.raises(UsageError, match="takes nothing but adapters: start it without"):
            await start(**lora)
    server.more_status = {"max_lora_rank": 16, "max_loras": 2}
    with pytest.raises(UsageError, match="max_off_policy_steps = 1: start it with --max-loras 3"):
        await start(serve="unmerged", rank=16)
    server.more_status["max_loras"] = 3
    await start(serve="unmerged", rank=16)
    server.more_status = {}
    with pytest.raises(UsageError, match=r"does not tell the experts .* start it with --return-experts"):
        await start(replayed=True)
    server.more_status = {"experts": True}
    await start(replayed=True)
    await server.die()


@in_loop
async def test_given_servers_must_hold_the_base_of_adapters(tmp_path: Path):
    """A copy of it, anywhere; a model of the same shapes and other values is refused, and both are named."""
    for name, value in (("base", 1.0), ("copy", 1.0), ("tuned", 2.0)):
        (tmp_path / name).mkdir()
        weights = {"a": torch.zeros(2000, 2000), "b": torch.full((2000, 100), value)}
        save_file(weights, tmp_path / name / "model.safetensors")
    server = FakeServer()
    await server.start()
    base = str(tmp_path / "base")

    async def start(serve: str, holds: str | None) -> None:
        server.more_status = {"model": f"/there/{holds}", "base": holds and samples_of(tmp_path / holds)}
        trainer = TrainerConfig(lora=LoraConfig.model_validate({"serve": serve}))
        config = RLConfig(trainer=trainer, orchestrator=OrchestratorConfig(inference_url=[server.url]))
        await asyncio.to_thread(check_bases, config, base)

    await start("unmerged", "base")
    await start("unmerged", "copy")
    await start("unmerged", None)  # of an earlier version, which does not say
    await start("adapter", "tuned")
    with pytest.raises(UsageError, match=rf"with /there/tuned, .* model is {base}: they differ in model"):
        await start("unmerged", "tuned")
    (tmp_path / "copy" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"they differ in model\.safetensors"):
        await start("unmerged", "copy")
    await server.die()


@in_loop
async def test_answers_end_under_the_adapter_that_they_began_with():
    """Each names its own policy, also once the server has a newer one, and the probe is scored under it."""
    async with servers(1) as (pool, (fake,)):
        fake.adapters = []
        await pool.serve("/w", "v1", probe=PROBE)
        fake.gate.clear()
        early = ask(pool, 0, ("v1", "v2"))
        await until(lambda: fake.asked == [0])
        await pool.serve("/w", "v2", probe=PROBE)
        late = ask(pool, 1, ("v1", "v2"))
        await until(lambda: fake.asked == [0, 1])
        fake.gate.set()
        versions = [(await answer)[0].weight_versions for answer in (early, late)]
        assert versions == [[VersionSpan("v1", 0, 2)], [VersionSpan("v2", 0, 2)]]
        assert (fake.scores, fake.salts) == (2, ["v1", "v2"])


@in_loop
async def test_a_server_that_lost_an_adapter_is_given_it_or_asked_for_its_name():
    """After a restart, and when it does not know the name any more; nothing is answered from its weights."""
    async with servers(1) as (pool, (fake,)):
        fake.adapters = []
        await pool.serve("/w", "v1")
        await fake.die()
        await fake.start()
        assert (await ask(pool, 0))[0].weight_versions == [VersionSpan("v1", 0, 2)]
        assert fake.pushed == ["v1", "v1"]
        fake.adapters = ["another@0"]  # given by somebody else; the name of before is unknown
        assert (await ask(pool, 1))[0].weight_versions == [VersionSpan("v1", 0, 2)]
        assert pool.take_metrics()["servers/retries"] > 0


@in_loop
async def test_an_answer_from_another_adapter_is_not_taken():
    """Whatever version the server says it has."""
    async with servers(1) as (pool, (fake,)):
        fake.adapters = []
        await pool.serve("/w", "v1")
        lies = 2

        async def lie(path: str, body: dict) -> Answer | None:
            nonlocal lies
            if not path.endswith("generate") or not lies:
                return None
            lies -= 1
            return 200, {"choices": fake.choices(body), "model": "model"}

        fake.fault = lie
        assert (await ask(pool, 0))[0].weight_versions == [VersionSpan("v1", 0, 2)]
        assert not lies
