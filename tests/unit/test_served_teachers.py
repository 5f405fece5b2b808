"""Teachers that are served: what is asked of a vLLM server, and what a batch gets of its answers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from runs import DEADLINE
from tiny import EXAMPLE, tokenizer

from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.teachers import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from cairn.inference import prompt_scores
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.teachers import ServedTeachers
from cairn.policy.errors import ServerUnavailable
from cairn.run.batches import Batch, RLBatch, Sample, Sampling, read_batch, write_batch
from cairn.run.errors import UsageError
from cairn.run.messages import BatchHeader, ShippedBatch

Fault = Callable[[str, Any], web.Response | None]


class Server:
    """Answers as vLLM does; a token's logprob is -1/64 of its number. `fault` may answer in its stead."""

    def __init__(self, fault: Fault = lambda path, body: None, models: tuple[str, ...] = ("big",)):
        self.fault, self.models = fault, models
        self.asked: list[tuple[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else None
        self.asked.append((request.path, body))
        if (response := self.fault(request.path, body)) is not None:
            return response
        match request.path:
            case "/v1/models":
                return web.json_response({"data": [{"id": name} for name in self.models]})
            case "/tokenize":
                tokens = tokenizer().encode(body["prompt"], add_special_tokens=False)
                return web.json_response({"tokens": tokens})
            case _:
                found = [None, *({str(t): {"logprob": -t / 64, "rank": 1}} for t in body["prompt"][1:])]
                return web.json_response({"choices": [{"prompt_logprobs": found}]})


def made() -> list[Sample]:
    samples = [
        Sample.of_answer([5, 6], list(range(7, 9 + n)), logprobs=-1.0, advantages=0.5) for n in range(3)
    ]
    return [*samples, samples[0].unlearned()]


def score(server: Server, *, name: str = "", columns: tuple[str, ...] = (TEACHER_LOGPROBS,)):
    """Samples that the server has scored."""

    async def run() -> list[Sample]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        samples = made()
        async with TestServer(app) as running:
            url = str(running.make_url("")).rstrip("/") + name
            config = OrchestratorConfig(
                teachers=dict.fromkeys(columns, url), request_timeout=DEADLINE, inference_url=[]
            )
            async with prompt_scores.scores_of(config.teachers, config.request_timeout) as scores:
                teachers = ServedTeachers(config, ChatFormat(EXAMPLE), scores)
                await teachers.score(samples[:2])
                await teachers.score(samples[2:])
        return samples

    return asyncio.run(run())


def test_learned_tokens_get_the_servers_logprobs_and_others_0(tmp_path: Path):
    server = Server()
    samples = score(server, columns=(TEACHER_LOGPROBS, REFERENCE_LOGPROBS))
    for sample in samples:
        wanted = np.where(sample.loss_mask, -sample.token_ids / 64, 0).astype(np.float32)
        assert np.array_equal(sample.columns[TEACHER_LOGPROBS], wanted)
        assert np.array_equal(sample.columns[REFERENCE_LOGPROBS], wanted)
    bodies = [body for path, body in server.asked if path == "/v1/completions"]
    assert len(bodies) == 6, "3 samples from which something is learned, for 2 columns"
    assert all(body["model"] == "big" and body["temperature"] == 1 for body in bodies)
    assert [path for path, _ in server.asked].count("/tokenize") == 2, "each is checked once"
    row = ShippedBatch(step=1, places=[(0, 0)], samples=4, tokens=1, digest="", oldest_step=0)
    header = BatchHeader("r", "main", "a", 1, "r:main:0", [0], row)
    write_batch(tmp_path / "batch", RLBatch(samples, sampling=Sampling(1.0), header=header))
    again = read_batch(tmp_path / "batch")
    assert again.digest() == Batch(samples, sampling=Sampling(1.0)).digest()
    assert np.array_equal(again.samples[1].columns[TEACHER_LOGPROBS], samples[1].columns[TEACHER_LOGPROBS])


def test_a_server_that_fails_for_a_while_is_asked_again():
    failures = iter([500, 503, 429])

    def fault(path: str, body: Any) -> web.Response | None:
        status = next(failures, None) if path == "/v1/completions" else None
        return web.json_response({"error": {"message": "busy"}}, status=status) if status else None

    assert all(TEACHER_LOGPROBS in sample.columns for sample in score(Server(fault)))


def fails_with(status: int, content: Any, on: str = "/v1/completions") -> Fault:
    return lambda path, body: web.json_response(content, status=status) if path == on else None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (fails_with(400, {"error": {"message": "too long"}}),
         r"distill\.teacher = .*refuses this \(400: too long\)"),
        (fails_with(200, {"choices": [{"text": ""}]}), r"gives no logprobs .*prompt_logprobs"),
        (fails_with(200, {"tokens": [1, 2, 3]}, on="/tokenize"), "another vocabulary"),
        (fails_with(404, {"error": {"message": "no"}}, on="/tokenize"), "/tokenize: the server refuses"),
    ],
)  # fmt: skip
def test_what_the_server_can_not_do_is_said(fault: Fault, said: str):
    with pytest.raises(UsageError, match=said):
        score(Server(fault))


class LateBackoff:
    """Two more tries at once; the one after them would come too late."""

    def __init__(self) -> None:
        self.pauses = iter((0.0, 0.0, DEADLINE))

    def grow(self) -> None:
        self.seconds = next(self.pauses)


def test_a_server_that_goes_on_failing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_scores, "Backoff", LateBackoff)
    server = Server(fails_with(503, {"error": {"message": "loading"}}))
    said = rf"distill\.teacher = http.*completions: 503: loading, for {DEADLINE:g} s \(--orchestrator\."
    with pytest.raises(ServerUnavailable, match=said):
        score(server)
    assert [path for path, _ in server.asked].count("/v1/completions") >= 3


def test_logits_are_no_logprobs():
    def fault(path: str, body: Any) -> web.Response | None:
        if path != "/v1/completions":
            return None
        found = [None, *({str(t): {"logprob": 3.5}} for t in body["prompt"][1:])]
        return web.json_response({"choices": [{"prompt_logprobs": found}]})

    with pytest.raises(UsageError, match=r"3\.5 is no logprob"):
        score(Server(fault))


def test_one_of_several_models_is_named_behind_the_address():
    with pytest.raises(UsageError, match=r"has the models big, lora; name one .*#big"):
        score(Server(models=("big", "lora")))
    server = Server(models=("big", "lora"))
    score(server, name="#lora")
    assert {body["model"] for path, body in server.asked if body} == {"lora"}


def test_a_key_is_sent_and_another_temperature_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(prompt_scores.KEY_VARIABLE, "secret")

    async def key_of(**settings: Any) -> str:
        config = OrchestratorConfig(teachers={TEACHER_LOGPROBS: "http://h"}, **settings)
        async with prompt_scores.scores_of(config.teachers, 1) as scores:
            ServedTeachers(config, ChatFormat(EXAMPLE), scores)
            return scores[TEACHER_LOGPROBS]._http.headers["Authorization"]

    assert asyncio.run(key_of()) == "Bearer secret"
    with pytest.raises(UsageError, match=r"sampling\.temperature = 0\.7: sample at 1"):
        asyncio.run(key_of(sampling={"temperature": 0.7}))
