"""The service: calls are taken once, models taken up again, and tenants see nothing of each other."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from aiohttp import web
from light_client import LightClient, ServiceRefusal, datum, texts
from one_rank import one_rank
from safetensors.torch import load_file
from tiny import write_example
from transformers import AutoModelForCausalLM

from cairn.checkpoint.step_folder import StepFolder
from cairn.config.cli import load
from cairn.config.service import ServiceConfig, TenantConfig
from cairn.run.errors import UsageError
from cairn.service.api import ServiceApi
from cairn.service.command import keys_of
from cairn.service.helpers import PassHelper, PassHelpers
from cairn.service.ledger import ServiceLedger
from cairn.service.losses import LOSSES
from cairn.service.sampler import SampleServer
from cairn.service.schema import ServiceCall
from cairn.service.trainees import AdamStep, AdapterBase, ClientModel
from cairn.service.wire import MESSAGES, CallRefused, Datum, Pass, passed_json, read_pass
from cairn.service.worker import CallWorker
from cairn.trainer.group import RankGroup

group = one_rank
ALICE, BOB = "tml-alice-0123456789abcdef", "tml-bob-0123456789abcdef"


def settings(folder: Path, **given: Any) -> ServiceConfig:
    tenants = [
        TenantConfig(name="alice", key_file="a"),
        TenantConfig(name="bob", key_file="b", models=1, calls=2, stored="1000K"),
    ]
    return ServiceConfig.model_validate(
        {"output_dir": str(folder), "seq_len": 64, "tenants": tenants, **given}
    )


@pytest.fixture(scope="module")
def base(group: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> AdapterBase:
    folder = write_example(tmp_path_factory.mktemp("base"))
    return AdapterBase(settings(folder), folder, group, PassHelpers(settings(folder), folder))


class Serving:
    """The service in this process, on a thread of its own. Its end saves nothing, as that of a kill."""

    def __init__(self, config: ServiceConfig, base: AdapterBase):
        self._loop, self._timeout = asyncio.new_event_loop(), config.session_timeout
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.ledger = ServiceLedger(Path(config.output_dir) / "service.sqlite", base.digest)
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, BOB)]
        keys = dict(zip(digests, config.tenants, strict=True))
        self._api = ServiceApi(config, ["tiny"], base.folder, keys, self.ledger, (1,))
        tenants = {one.name: one for one in config.tenants}
        self.worker = CallWorker(config, tenants, base, self.ledger, self._api.finished)
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    async def _serve(self) -> None:
        runner = web.AppRunner(self._api.app(), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._api.begin(self.worker, None)
        await web.SockSite(runner, self._listener).start()
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()
        await self._api.end()

    def leave_silent(self, since: float) -> None:
        """What happens once those have been silent for long enough that gave their last sign before then."""
        look = self._api.sessions.leave_silent(since + self._timeout)
        asyncio.run_coroutine_threadsafe(look, self._loop).result(60)

    def __enter__(self) -> "Serving":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self.ledger.close()
        self._loop.close()


@contextlib.contextmanager
def refused(status: int, reason: str) -> Iterator[None]:
    with pytest.raises(ServiceRefusal, match=reason) as caught:
        yield
    assert caught.value.status == status


def newest(folder: Path, model: str) -> Path:
    """A model's newest state."""
    steps = (folder / "models" / model.replace(":", "_")).glob("step_*")
    return max(steps, key=lambda path: int(path.name.removeprefix("step_")))


def weights(folder: Path, model: str) -> dict[str, torch.Tensor]:
    """Those of the newest state."""
    return load_file(newest(folder, model) / "model" / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# What is computed


def model_of(base: AdapterBase, seed: int = 0) -> ClientModel:
    """A model whose adapter is not zero any more."""
    model = base.make({"rank": 3, "seed": seed})
    for number in range(2):
        model.compute(asked(number), number)
        model.update(AdamStep(1e-2))
    return model


def asked(number: int, loss: str = "cross_entropy", config: Any = None, **inputs: Any) -> Pass:
    draw = np.random.default_rng(number)
    data = []
    for place, length in enumerate((6, 11, 4, 17)):
        tokens = draw.integers(5, 98, length + 1)
        own: dict[str, Any] = {"weights": draw.random(length)}
        own = {name: values[place] for name, values in inputs.items()} or own
        data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], **own}))
    return Pass("m", 1, data, loss, config or {})


def test_logprobs_are_the_models_own_of_any_targets(base: AdapterBase):
    """Samples share rows, and a target need not be the token that follows."""
    data = [
        Datum(np.arange(10, 19), {"target_tokens": np.arange(11, 20)}),
        Datum(np.arange(30, 35), {"target_tokens": np.full(5, 7)}),
    ]
    found = passed_json(base.plain.compute(Pass("m", 1, data, "cross_entropy", forward_only=True), 0))
    model = AutoModelForCausalLM.from_pretrained(base.folder)
    total = 0.0
    for one, output in zip(data, found["loss_fn_outputs"], strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(one.tokens)[None]).logits[0].log_softmax(-1)
        expected = expected[range(len(one.tokens)), one.inputs["target_tokens"]]
        torch.testing.assert_close(torch.tensor(output["logprobs"]["data"]), expected, atol=1e-5, rtol=1e-5)
        total -= expected.sum().item()
    assert found["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert all(parameter.grad is None for parameter in base.plain.state.policy.trained().values())


SIDES = (("low", 0.8), ("high", 1.2))


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        *(("importance_sampling", None), ("ppo", None), ("ppo", {"clip_high_threshold": 1.05})),
        *(("cispo", None), ("dro", {"beta": 0.3})),
        ("gspo", {"clip_low_threshold": 0.98, "clip_high_threshold": 1.02}),
    ],
)
def test_losses_of_policies_have_the_gradient_of_their_definition(base: AdapterBase, loss: str, config: Any):
    """That of cross_entropy with weights -dL/dlogp, where L is written down here once more."""
    assert {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"} == LOSSES.keys()
    draw = np.random.default_rng(7)
    model = model_of(base)
    given: dict[str, Any] = {"advantages": [draw.normal(size=n) * (np.arange(n) > 1) for n in (6, 11, 4, 17)]}
    now = passed_json(model.compute(Pass("m", 1, asked(5).data, "cross_entropy", forward_only=True), 0))
    logprobs = [torch.tensor(one["logprobs"]["data"], requires_grad=True) for one in now["loss_fn_outputs"]]
    given["logprobs"] = [
        (p.detach() + 0.4 * torch.from_numpy(draw.normal(size=len(p)))).numpy() for p in logprobs
    ]
    if loss == "gspo":
        given["sequence_ratio_mask"] = [np.arange(len(p)) > 2 for p in logprobs]
    low, high = ((config or {}).get(f"clip_{side}_threshold", usual) for side, usual in SIDES)
    total = torch.zeros(())
    for p, old, advantages in zip(logprobs, given["logprobs"], given["advantages"], strict=True):
        ratio, a = (
            (p - torch.tensor(old, dtype=torch.float32)).exp(),
            torch.tensor(advantages, dtype=torch.float32),
        )
        of_sample = ratio.detach()[3:].log().mean().exp() * (p - p.detach()).exp()
        terms = {
            "importance_sampling": ratio * a,
            "ppo": torch.minimum(ratio * a, ratio.clamp(low, high) * a),
            "cispo": ratio.detach().clamp(max=high) * a * p,
            "dro": p * a - 0.3 / 2 * ratio.log().square(),
            "gspo": torch.minimum(of_sample * a, of_sample.clamp(low, high) * a),
        }
        total = total - terms[loss].sum()
    total.backward()
    found = passed_json(model.compute(asked(5, loss=loss, config=config, **given), 1))
    assert found["metrics"]["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-4)
    gradients = [p.grad.clone() for p in model.state.policy.trained().values() if p.grad is not None]
    model.drop_gradients()
    surrogate: dict[str, Any] = {"weights": [(-p.grad).numpy() for p in logprobs if p.grad is not None]}
    model.compute(asked(5, **surrogate), 1)
    expected = [p.grad for p in model.state.policy.trained().values()]
    assert max(float(one.abs().max()) for one in gradients) > 1e-3
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_an_update_is_torchs_adamw_with_the_settings_of_the_call(base: AdapterBase):
    model = base.make({"rank": 2, "seed": 1})
    ours = {name: p.detach().clone().requires_grad_() for name, p in model.state.policy.trained().items()}
    steps = [
        AdamStep(1e-2, grad_clip_norm=1.0),
        AdamStep(3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1),
    ]
    adam = torch.optim.AdamW(ours.values())
    for number, how in enumerate(steps):
        model.compute(asked(number), number)
        for name, parameter in model.state.policy.trained().items():
            assert parameter.grad is not None
            ours[name].grad = parameter.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(ours.values(), how.grad_clip_norm or 1e30)
        adam.param_groups[0] |= {"lr": how.learning_rate, "betas": (how.beta1, how.beta2), "eps": how.eps}
        adam.param_groups[0]["weight_decay"] = how.weight_decay
        adam.step()
        assert model.update(how) == {"grad_norm:mean": pytest.approx(norm.item()), "step:max": number + 1}
    for name, parameter in model.state.policy.trained().items():
        torch.testing.assert_close(parameter, ours[name], atol=1e-7, rtol=1e-5)
    assert not any(
        p.requires_grad for n, p in model.state.policy.module.named_parameters() if ".lora_" not in n
    )


def test_models_share_the_base_in_memory(base: AdapterBase):
    one, other = (base.make({"rank": rank, "seed": 0}).state.policy.module for rank in (2, 5))
    held = {p.data_ptr() for n, p in one.named_parameters() if ".lora_" not in n}
    assert held == {p.data_ptr() for n, p in other.named_parameters() if ".lora_" not in n}
    only = base.make({"rank": 2, "seed": 0, "train_mlp": False}).state.policy.trained()
    assert only
    assert all("self_attn" in name for name in only)


def test_both_encodings_of_a_request_are_the_same_request():
    body = MESSAGES["ForwardBackwardRequest"](model_id="m", seq_id=3, loss_fn="ppo")
    body.loss_fn_config_v2.add(key="clip_low_threshold").value.number = 0.9
    one = body.data.add()
    one.model_input.add().encoded_text.tokens = np.array([4, 5], np.int32).tobytes()
    one.model_input.add().encoded_text.tokens = np.array([6], np.int32).tobytes()
    given = {"target_tokens": np.array([5, 6, 7]), "logprobs": np.array([-1, -2, -3.5], np.float32)}
    for name, values in given.items():
        tensor = one.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = values.tobytes(), 2 if values.dtype == np.int64 else 1
        tensor.shape.append(3)
    as_json = datum([4, 5, 6, 7], logprobs=[-1, -2, -3.5])
    asked_in_json = {"data": [as_json], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.9}}
    text = json.dumps({"forward_backward_input": asked_in_json, "model_id": "m", "seq_id": 3})
    read = [read_pass(body.SerializeToString(), proto=True), read_pass(text.encode(), proto=False)]
    assert read[0].digest() == read[1].digest()
    assert (read[0].model_id, read[0].seq_id, read[0].config) == ("m", 3, {"clip_low_threshold": 0.9})
    as_json["loss_fn_inputs"]["logprobs"]["data"][2] = -3.25
    text = json.dumps({"forward_backward_input": asked_in_json, "model_id": "m", "seq_id": 3})
    assert read_pass(text.encode(), proto=False).digest() != read[0].digest()


@draws.seldom
def test_workers_share_passes_and_one_that_dies_changes_no_bit(
    base: AdapterBase, group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It dies over a share, which is computed here then; and so are shares until there is another worker."""
    once = tmp_path / "once"
    once.mkdir()
    (once / "service.share:kill@2").touch()
    monkeypatch.setenv("CAIRN_FAULT", "service.share:kill@2")
    monkeypatch.setenv("CAIRN_FAULT_ONCE", str(once))
    config = settings(tmp_path, workers=2, micro_batch_tokens=16)

    def computed(of: AdapterBase) -> tuple[Any, dict[str, torch.Tensor]]:
        model = model_of(of)
        answer = model.compute(asked(5), 7)
        model.compute(asked(6), 8)
        return passed_json(answer), {
            name: one.grad for name, one in model.state.policy.trained().items() if one.grad is not None
        }

    def ready(helper: PassHelper, digest: str) -> None:
        end = time.monotonic() + 120
        while not helper.is_ready(digest):
            assert time.monotonic() < end, helper.log.read_text()
            time.sleep(0.05)

    with PassHelpers(config, base.folder) as helpers:
        shared, (helper,) = AdapterBase(config, base.folder, group, helpers), helpers.each
        alone = computed(shared)
        ready(helper, shared.digest)
        first = helper.pid
        found = [computed(shared)]  # over whose second pass it dies
        ready(helper, shared.digest)
        assert helper.pid != first
        assert helper.done == 1
        found.append(computed(shared))
        assert helper.done == 5
        os.kill(helper.pid, signal.SIGKILL)
        found.append(computed(shared))
    for answer, gradients in found:
        assert answer == alone[0]
        assert same(gradients, alone[1])
    expected, gradients = computed(base)
    assert alone[0]["metrics"]["loss:sum"] == pytest.approx(expected["metrics"]["loss:sum"], rel=1e-5)
    for name, one in gradients.items():
        torch.testing.assert_close(alone[1][name], one, atol=1e-4, rtol=1e-3)
    assert not list(once.iterdir())


# What is lasting


@draws.seldom
def test_a_service_that_is_ended_at_any_call_goes_on_to_the_bit(base: AdapterBase, tmp_path: Path):
    """Also with states saved rarely, with gradients on the way to an update, and the newest state damaged."""
    whole = settings(tmp_path / "whole")
    with Serving(whole, base) as service:
        client = LightClient(service.url, ALICE)
        model = client.create(seed=3)
        expected = client.train(model, range(5))
    reference = weights(tmp_path / "whole", model)

    broken = settings(tmp_path / "broken", state_interval=2)
    session, found = "", []
    number = 0
    for end in (2, 3, 7, 12, 15):  # calls after which it is ended
        with Serving(broken, base) as service:
            client = LightClient(service.url, ALICE, session=session)
            if not session:
                session, model = client.session, client.create(seed=3)
            while number < end:
                step, kind = divmod(number, 3)
                more = {"adam_params": {"learning_rate": 1e-2}}
                if kind < 2:
                    future = client.passes(model, texts(step + 1000 * kind), seq=number + 1)
                else:
                    future = client.call("optim_step", model, number + 1, **more)
                found.append(client.result(future))
                number += 1
        if end == 12:  # the newest state, of the fourth update
            steps = tmp_path / "broken" / "models" / model.replace(":", "_")
            file = steps / "step_13" / "model" / "adapter_model.safetensors"
            content = bytearray(file.read_bytes())
            content[-5] ^= 4
            file.write_bytes(content)
    assert found == expected
    with Serving(settings(tmp_path / "broken", state_interval=1), base) as service:
        client = LightClient(service.url, ALICE, session=session)
        client.result(client.passes(model, texts(9), seq=16))
        client.result(client.call("optim_step", model, 17, adam_params={"learning_rate": 0.0}))
    assert same(weights(tmp_path / "broken", model), reference)


@draws.seldom
def test_a_client_that_went_away_makes_room_and_comes_back_to_the_bit(base: AdapterBase, tmp_path: Path):
    """Gradients on their way to an update are there again. Heartbeats and calls that wait keep clients."""

    def begun(client: LightClient, model: str) -> list[dict[str, Any]]:
        return [*client.train(model, range(3)), client.result(client.passes(model, texts(3)))]

    with Serving(settings(tmp_path / "whole"), base) as service:
        client = LightClient(service.url, BOB)
        model = client.create(seed=3)
        expected = [*begun(client, model), client.result(client.step(model))]
    reference, steps = weights(tmp_path / "whole", model), tmp_path / "left" / "models"
    samples = [StepFolder(newest(tmp_path / "whole", model)).trainer_state()]

    with Serving(settings(tmp_path / "left", state_interval=2), base) as service:
        alice, beating, bob = (LightClient(service.url, key) for key in (ALICE, ALICE, BOB))
        others = alice.create()
        model = bob.create(seed=3)
        found = begun(bob, model)
        with refused(400, r"1 models are there already, which is the tenant's quota \(models\)"):
            LightClient(service.url, BOB).create()
        now = time.monotonic()
        beating.post("session_heartbeat", session_id=beating.session)
        service.ledger.add(ServiceCall("w", others, 99, "alice", "sample", b"", b""), most=9)
        service.leave_silent(now)
        assert set(service.ledger.present_sessions()) == {alice.session, beating.session}
        second = LightClient(service.url, BOB)
        second.create()
        assert sorted(path.name for path in (steps / model.replace(":", "_")).iterdir()) == [
            "step_10",
            "step_7",
        ]
        assert not (steps / others.replace(":", "_")).exists()
    with Serving(settings(tmp_path / "left", session_timeout=0.01), base) as service:
        bob.url = second.url = service.url
        assert [*found, bob.result(bob.step(model))] == expected
        end = time.monotonic() + 60
        while service.ledger.present_sessions():
            assert time.monotonic() < end
            time.sleep(0.01)
        bob.post("session_heartbeat", session_id=bob.session)
        assert bob.session in service.ledger.sessions("bob")
        second.ask("POST", f"sessions/{second.session}/finish", {})
        with refused(410, "is finished"):
            bob.post("session_heartbeat", session_id=second.session)
    assert same(weights(tmp_path / "left", model), reference)
    samples.append(StepFolder(newest(tmp_path / "left", model)).trainer_state())
    assert [one and one.progress["total_samples"] for one in samples] == [21, 21]


def test_a_call_that_is_sent_again_is_done_once(base: AdapterBase, tmp_path: Path):
    with Serving(settings(tmp_path), base) as service:
        client = LightClient(service.url, ALICE, again=(408,))
        model = client.create()
        first = client.result(client.passes(model, texts(1), seq=1))
        assert client.result(client.passes(model, texts(1), seq=1)) == first
        with refused(400, "seq_id 1 of .* was another call"):
            client.passes(model, texts(2), seq=1)
        with refused(409, "seq_id 3 of .* came before 2"):
            client.call("optim_step", model, 3, adam_params={"learning_rate": 0.1})
        for _ in range(3):
            done = client.result(client.call("optim_step", model, 2, adam_params={"learning_rate": 0.1}))
            assert done["metrics"]["step:max"] == 1
        again = client.result(client.passes(model, texts(1), seq=3))
        assert again["metrics"]["loss:sum"] != first["metrics"]["loss:sum"]


@draws.seldom
def test_clients_side_by_side_get_what_each_gets_alone(base: AdapterBase, tmp_path: Path):
    """Also when there is room for one model in memory, so that each call takes its model up again."""
    found: dict[str, list[Any]] = {}
    for name, clients, resident in (("alone", 1, 16), ("beside", 3, 16), ("no room", 2, 1)):
        config = settings(tmp_path / name, resident_models=resident)
        with Serving(config, base) as service, ThreadPoolExecutor(clients) as pool:

            def run(number: int) -> list[Any]:
                client = LightClient(service.url, ALICE)
                return client.train(client.create(rank=3 + number, seed=number), range(number, number + 2))

            found[name] = list(pool.map(run, range(clients)))
    assert found["beside"][0] == found["no room"][0] == found["alone"][0]
    assert found["beside"][1] == found["no room"][1]
    assert found["beside"][1] != found["beside"][0]


@pytest.mark.slow
def test_a_state_saved_between_a_pass_and_its_update_is_gone_on_from(base: AdapterBase, tmp_path: Path):
    """The gradients are in no file: a model that has made room for another one computes them again."""
    found: list[Any] = []
    for resident in (16, 1):
        with Serving(settings(tmp_path / str(resident), resident_models=resident), base) as service:
            client = LightClient(service.url, ALICE)
            model = client.create(seed=6)
            client.train(model, range(1))
            client.result(client.passes(model, texts(5)))
            client.result(client.call("save_weights", model, path="between"))
            client.create(seed=7)
            client.result(client.step(model))
            found.append(client.result(client.passes(model, texts(6))))
    assert found[0] == found[1]


@draws.seldom
def test_checkpoints_are_saved_loaded_replaced_and_deleted(base: AdapterBase, tmp_path: Path):
    with Serving(settings(tmp_path), base) as service:
        client = LightClient(service.url, ALICE)
        model = client.create(seed=5)
        client.train(model, range(2))
        saved = client.result(client.call("save_weights", model, path="two"))["path"]
        assert saved == f"tinker://{model}/weights/two"
        expected = client.train(model, range(2, 4))
        other = client.from_state(saved)
        assert client.train(other, range(2, 4)) == expected
        fresh = client.from_state(saved, optimizer=False)
        answers = client.train(fresh, range(2, 4))
        assert answers[0] == expected[0]
        assert answers[3] != expected[3]  # after an update without the moments
        with refused(0, "is there already; give another name, or overwrite=True"):
            client.result(client.call("save_weights", model, path="two"))
        client.result(client.call("save_weights", model, path="two", overwrite=True))
        client.result(client.call("save_weights_for_sampler", model, path="s"))
        with refused(0, "without the optimiser's state"):
            client.from_state(f"tinker://{model}/sampler_weights/s")
        there = client.ask("GET", f"training_runs/{model}/checkpoints")["checkpoints"]
        assert {one["checkpoint_id"] for one in there} == {"weights/two", "sampler_weights/s"}
        client.ask("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/s")
        with refused(404, "there is no checkpoint"):
            client.ask("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/s")
        client.result(client.post("unload_model", model_id=model))
        with refused(0, "is unloaded"):
            client.result(client.post("optim_step", model_id=model, adam_params={}))
        assert client.from_state(saved)
    steps = sorted(path.name for path in (tmp_path / "models" / model.replace(":", "_")).iterdir())
    assert len(steps) == 1  # the checkpoint that still has a name


# Who may do what


@pytest.mark.slow
def test_tenants_see_nothing_of_each_other(base: AdapterBase, tmp_path: Path):
    """Another tenant's models, futures, checkpoints and sessions look as if they were not there."""
    with Serving(settings(tmp_path), base) as service:
        alice = LightClient(service.url, ALICE)
        model = alice.create()
        future = alice.passes(model, texts(1))
        alice.result(future)
        path = alice.result(alice.call("save_weights", model, path="mine"))["path"]
        sampler = {"session_id": alice.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = alice.post("create_sampling_session", **sampler)["sampling_session_id"]
        bob = LightClient(service.url, BOB)
        bob.numbers[model] = alice.numbers[model]
        tries = [
            lambda: bob.post("retrieve_future", **{"request_id": future["request_id"]}),
            lambda: bob.passes(model, texts(1)),
            lambda: bob.step(model),
            lambda: bob.call("save_weights", model, path="x"),
            lambda: bob.post("unload_model", model_id=model),
            lambda: bob.post("get_info", model_id=model),
            lambda: bob.post("weights_info", tinker_path=path),
            lambda: bob.from_state(path),
            lambda: bob.post("session_heartbeat", session_id=alice.session),
            lambda: bob.post(
                "create_model",
                session_id=alice.session,
                model_seq_id=7,
                base_model="tiny",
                lora_config={"rank": 2},
            ),
            lambda: bob.post("join_sampling_session", sampling_session_id=sampler),
            lambda: bob.ask("GET", f"samplers/{sampler}"),
            lambda: bob.ask("GET", f"sessions/{alice.session}"),
            lambda: bob.ask("POST", f"sessions/{alice.session}/finish", {}),
            lambda: bob.ask("GET", f"training_runs/{model}"),
            lambda: bob.ask("GET", f"training_runs/{model}/checkpoints"),
            lambda: bob.ask("DELETE", f"training_runs/{model}/checkpoints/weights/mine"),
        ]
        for number, attempt in enumerate(tries):
            with pytest.raises(ServiceRefusal) as caught:
                attempt()
            assert caught.value.status == 404, number
        for listing in ("training_runs", "checkpoints", "sessions"):
            own = [bob.session] if listing == "sessions" else []
            assert next(iter(bob.ask("GET", listing).values())) == own
            assert len(next(iter(alice.ask("GET", listing).values()))) == 1
        with refused(401, "no tenant of this service has this key"):
            LightClient(service.url, "tml-nobody-0123456789")


@pytest.mark.slow
def test_quotas_bound_models_calls_and_room(base: AdapterBase, tmp_path: Path):
    with Serving(settings(tmp_path), base) as service:
        bob = LightClient(service.url, BOB, again=(408,))
        model = bob.create(rank=8)
        with refused(400, r"1 models are there already, which is the tenant's quota \(models\)"):
            bob.create()
        with refused(400, "rank = 33 is not from 1 to 32"):
            bob.create(rank=33)
        with refused(0, r"the tenant's quota \(stored\) is 1024000; delete checkpoints"):
            for number in range(9):
                bob.result(bob.call("save_weights", model, path=f"b{number}"))
        bob.ask("POST", f"sessions/{bob.session}/finish", {})
        assert LightClient(service.url, BOB).create()
        waiting = [ServiceCall(f"x:{n}", "x", n, "bob", "forward", b"", b"") for n in range(3)]
        for call in waiting[:2]:
            service.ledger.add(call, most=2)
        with pytest.raises(
            CallRefused, match=r"2 calls wait already, which is the tenant's quota \(calls\)"
        ) as caught:
            service.ledger.add(waiting[2], most=2)
        assert caught.value.status == 429  # which clients send again


@pytest.mark.slow
def test_what_nobody_needs_of_calls_is_forgotten(base: AdapterBase, tmp_path: Path):
    """The requests of samples that are drawn, those before the oldest state, and answers after some hours."""
    with Serving(settings(tmp_path, answer_hours=1e-6), base) as service:
        client = LightClient(service.url, ALICE)
        sample = ServiceCall("s:0", "s", 0, "alice", "sample", b"", b"{}")
        service.ledger.add(sample, most=9)
        service.ledger.finish(sample, "done", b"{}")
        model = client.create()
        client.train(model, range(4))
        client.result(
            client.call("forward", model, forward_input={"data": texts(0), "loss_fn": "cross_entropy"})
        )
        kept = {call.id: call.body is not None for call in service.ledger.calls("tenant = 'alice'")}
        assert not kept["s:0"]
        assert [kept[f"{model}:{n}"] for n in range(14)] == [False] * 10 + [True] * 4
        with refused(410, "was kept for answer_hours, and is gone"):
            client.result({"request_id": f"{model}:1"})


REFUSED = [
    (
        {"data": [datum([1, 2, 3])], "loss_fn": "stable_reinforce"},
        "loss_fn 'stable_reinforce': this service has cross_entropy, ",
    ),
    ({"data": [datum([1, 2, 3])], "loss_fn": "dro"}, "loss_fn_config: dro needs beta, which has no default"),
    (
        {"data": [datum([1, 2, 3])], "loss_fn": "ppo"},
        r"data\[0\]: logprobs is missing, and model_input has 2",
    ),
    (
        {"data": [datum([1, 2, 500])], "loss_fn": "cross_entropy"},
        r"target_tokens has the token 500, and the model has tokens 0 to 101",
    ),
    (
        {"data": [datum([1] * 65)], "loss_fn": "cross_entropy"},
        r"64 tokens and the last target are more than the 64",
    ),
    ({"data": [datum([1, 2, 3], targets=[2])], "loss_fn": "cross_entropy"}, "target_tokens has 1 values"),
    (
        {"data": [datum([1, 2], weights=[1e39])], "loss_fn": "cross_entropy"},
        "weights holds NaN or infinity",
    ),
    ({"data": [], "loss_fn": "cross_entropy"}, "data: there is none"),
    (
        {"data": [datum([1, 2])], "loss_fn": "cross_entropy", "loss_fn_config": {"x": 1.0}},
        "takes no settings",
    ),
]


@pytest.mark.slow
def test_what_can_not_be_computed_is_refused_and_changes_nothing(base: AdapterBase, tmp_path: Path):
    with Serving(settings(tmp_path), base) as service:
        client = LightClient(service.url, ALICE)
        model = client.create()
        for what, reason in REFUSED:
            text = client.call("forward_backward", model, forward_backward_input=what)
            with refused(0, reason):
                client.result(text)
        with refused(404, "POST /api/v1/create_custom_loss: this service does not have this part"):
            client.post("create_custom_loss")
        client.result(client.passes(model, texts(3)))  # whose gradients go with the update that fails
        with refused(0, "beta1 = 2 is not a number from 0 to below 1"):
            client.result(client.step(model, beta1=2))
        answers = client.train(model, range(2))
        other = client.create()
        assert client.train(other, range(2)) == answers


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="sampling = 'given' with inference_url = None"):
        settings(tmp_path, sampling="given")
    with pytest.raises(ValueError, match=r"inference\.gpus = '2': a number of GPUs is given"):
        settings(tmp_path, inference={"gpus": "2"})
    assert settings(tmp_path, inference={"gpus": "2,"}).inference.gpus == "2,"
    with pytest.raises(ValueError, match="give key_variable or key_file, one of them"):
        TenantConfig(name="x")
    assert load(ServiceConfig, ["--names", "tiny,Qwen/Qwen3-8B"]).names == ["tiny", "Qwen/Qwen3-8B"]
    made = ServiceConfig(output_dir=str(tmp_path))
    (key,) = keys_of(made)
    assert keys_of(made).keys() == {key}
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    both = [TenantConfig(name=name, key_variable="SERVICE_KEY") for name in ("x", "y")]
    config = made.model_copy(update={"tenants": both})
    with pytest.raises(
        UsageError, match="key_variable = SERVICE_KEY: holds no key; it has to begin with tml-"
    ):
        keys_of(config)
    monkeypatch.setenv("SERVICE_KEY", ALICE)
    with pytest.raises(UsageError, match="is also the key of 'x'; each tenant needs its own"):
        keys_of(config)


def test_a_server_for_samples_that_can_not_start_is_refused(tmp_path: Path):
    """Its process says why, and it is not tried again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sampler = SampleServer(settings(tmp_path, inference={"port": port}), tmp_path, tmp_path)

        async def start() -> None:
            try:
                await sampler.start()
            finally:
                await sampler.close()

        why = rf"'own' \(--inference\.NAME .*: the inference server died .*\n.* on 127\.0\.0\.1 port {port}"
        with pytest.raises(UsageError, match=why):
            asyncio.run(start())


def test_a_ledger_of_another_base_is_refused(base: AdapterBase, tmp_path: Path):
    ServiceLedger(tmp_path / "service.sqlite", base.digest).close()
    with pytest.raises(UsageError, match=r"adapters of another base model than --model\.name"):
        ServiceLedger(tmp_path / "service.sqlite", "other")


def test_a_ledger_of_an_earlier_format_is_taken_up(tmp_path: Path):
    """And one of a later format is refused."""
    path = tmp_path / "service.sqlite"
    with contextlib.closing(ServiceLedger(path, "base")) as ledger:
        ledger.add_session("s", "alice", {})
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE sessions DROP COLUMN away")
        database.execute("UPDATE service SET format = 1")
    with contextlib.closing(ServiceLedger(path, "base")) as ledger:
        assert ledger.present_sessions() == ["s"]
        assert ledger.leave_session("s") == []
    with contextlib.closing(ServiceLedger(path, "base")) as ledger:
        assert ledger.present_sessions() == []
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE service SET format = 99")
    with pytest.raises(UsageError, match="its format is 99, and this version reads"):
        ServiceLedger(path, "base")
