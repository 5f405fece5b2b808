"""A client of the service that speaks its API as JSON, and keeps on asking as the public one does."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

PATIENCE = 120.0
"""Seconds for which a service that does not answer, or asks to wait, is asked again."""
AGAIN = (408, 409, 429, 500, 502, 503)


class ServiceRefusal(Exception):
    """The service says no; `status` is that of HTTP, or 0 if a call was taken and failed."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass
class LightClient:
    """One session of a tenant. again: status codes after which a request is sent again."""

    url: str
    key: str
    again: Sequence[int] = AGAIN
    session: str = ""
    models: Any = field(default_factory=itertools.count)
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    wait: Callable[[], None] = lambda: None
    """Called each time that the service does not answer."""

    def __post_init__(self) -> None:
        if not self.session:
            self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")[
                "session_id"
            ]

    def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        """The answer to a request, which is sent until there is one."""
        return self.ask("POST", route, body)

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                answer = httpx.request(
                    method,
                    f"{self.url}/api/v1/{path}",
                    json=body,
                    headers={"X-API-Key": self.key},
                    timeout=60,
                    trust_env=False,
                )
            except httpx.TransportError:  # it was killed, and is started again
                assert time.monotonic() < end, f"{self.url} does not answer"
                self.wait()
                time.sleep(0.05)
                continue
            if answer.status_code in self.again and time.monotonic() < end:
                continue
            if answer.status_code != 200:
                raise ServiceRefusal(answer.status_code, answer.json()["error"])
            return answer.json()

    def result(self, future: dict[str, Any]) -> dict[str, Any]:
        """What came of a call."""
        found = self.post("retrieve_future", request_id=future["request_id"])
        if "error" in found:
            raise ServiceRefusal(0, found["error"])
        return found

    def create(self, rank: int = 4, seed: int | None = 0, **lora: Any) -> str:
        """A new model."""
        lora_config = {"rank": rank, "seed": seed, **lora}
        asked = {"session_id": self.session, "model_seq_id": next(self.models), "base_model": "tiny"}
        model = self.result(self.post("create_model", **asked, lora_config=lora_config))["model_id"]
        self.numbers[model] = itertools.count(1)
        return model

    def from_state(self, path: str, optimizer: bool = True) -> str:
        """A new model that goes on from a checkpoint."""
        asked = {"session_id": self.session, "model_seq_id": next(self.models), "path": path}
        model = self.result(self.post("load_weights", **asked, optimizer=optimizer))["model_id"]
        self.numbers[model] = itertools.count(1)
        return model

    def call(self, kind: str, model: str, seq: int | None = None, **body: Any) -> dict[str, Any]:
        """A call of a model, not waited for."""
        number = next(self.numbers[model]) if seq is None else seq
        return self.post(kind, model_id=model, seq_id=number, **body)

    def passes(
        self, model: str, data: Sequence[Any], loss: str = "cross_entropy", **more: Any
    ) -> dict[str, Any]:
        """A forward and a backward pass, not waited for."""
        config, seq = more.pop("config", None), more.pop("seq", None)
        asked = {"data": list(data), "loss_fn": loss, "loss_fn_config": config}
        return self.call("forward_backward", model, seq, forward_backward_input=asked)

    def step(self, model: str, rate: float = 1e-2, **how: Any) -> dict[str, Any]:
        """An update, not waited for."""
        return self.call("optim_step", model, adam_params={"learning_rate": rate, **how})

    def train(self, model: str, steps: Sequence[int]) -> list[dict[str, Any]]:
        """Steps on made-up samples: the answers to all calls."""
        found: list[dict[str, Any]] = []
        for number in steps:
            futures = [
                self.passes(model, texts(number)),
                self.passes(model, texts(number + 1000)),
                self.step(model),
            ]
            found += [self.result(future) for future in futures]
        return found


def tensor(values: Sequence[float], dtype: str = "float32") -> dict[str, Any]:
    """A tensor as the API has it."""
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> dict[str, Any]:
    """The sample of these tokens, of which each but the last is followed by the next."""
    targets = inputs.pop("targets", tokens[1:])
    chunks = [{"type": "encoded_text", "tokens": list(tokens[:-1])}]
    values = {name: tensor(given) for name, given in inputs.items()}
    return {
        "model_input": {"chunks": chunks},
        "loss_fn_inputs": {"target_tokens": tensor(targets, "int64"), **values},
    }


def texts(number: int, lengths: Sequence[int] = (5, 9, 13)) -> list[dict[str, Any]]:
    """Samples of a step, which depend on its number alone."""
    draw = np.random.default_rng(number)
    return [
        datum(draw.integers(5, 98, n + 1).tolist(), weights=draw.random(n).astype(np.float32).tolist())
        for n in lengths
    ]
