"""The inference server with a real vLLM: weights, refusals, access, determinism, start and stop."""

import asyncio
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import draws
import families
import httpx
import pytest
import torch
from runs import DEADLINE, Shell, forking_servers, run_python
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from cairn.config.inference import InferenceConfig
from cairn.inference.client import InferenceClient, ServerStatus, Unauthorized, token_file
from cairn.inference.plugin.middleware import MAX_BODY
from cairn.inference.server import Server, ServerProgress
from cairn.launch.main import main
from cairn.orchestrator.completion.chat import ChatFormat, StopWatch
from cairn.policy.checksums import checksum, write_checksums
from cairn.policy.errors import ServerUnavailable, WeightsAltered, WeightsGone, WeightsRefused
from cairn.policy.generation import Generation, SamplingParams, VersionSpan
from cairn.policy.network import PATIENCE
from cairn.policy.receiver import Rank, Source
from cairn.policy.sender import WeightSender
from cairn.run import heartbeat
from cairn.run.files import read_note
from cairn.run.heartbeat import Beat, Watch

PROMPT = list(range(40, 60))
GREEDY = 48
"""Tokens of a greedy answer."""
COMPILED = draws.has_turn("compiled kernels", 1, 2)
"""Whether the server with the untied model is compiled, which takes 40 s of processor time. The other commits
compile the trainer's passes over logits (test_compiled_head.py)."""
Model = Callable[..., Path]


@dataclass(frozen=True)
class Address:
    """What a client needs of a server."""

    url: str
    token: str


@dataclass(frozen=True)
class Opened(Address):
    """A server that started with a model's folder; `answer` is greedy, of these first weights."""

    model: Path
    answer: Generation


@functools.cache
def reference_model(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def reference_logprobs(model: Path, answer: list[int]) -> torch.Tensor:
    """Logprobs of `answer` after PROMPT in a Hugging Face float32 forward pass; shape (len(answer),)."""
    with torch.no_grad():
        logits = reference_model(model)(torch.tensor([PROMPT + answer])).logits[0]
    of_answer = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    return of_answer.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def assert_matches(model: Path, generated: Generation, start: int = 0, end: int | None = None) -> None:
    """The server's logprobs of tokens `[start, end)` are those of `model`."""
    expected = reference_logprobs(model, generated.token_ids)[start:end]
    torch.testing.assert_close(torch.tensor(generated.logprobs)[start:end], expected, atol=1e-4, rtol=0)


def with_client(server: Server | Address, job: Callable[[InferenceClient], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        async with InferenceClient(server.url, server.token) as client:
            return await job(client)

    return asyncio.run(main())


def authorised(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.token}"}


# Weights


async def push_and_compare(client: InferenceClient, tiny_model: Model, tied: bool) -> None:
    checksums = []
    for push, seed in enumerate([1, 2, 1]):
        model = tiny_model(tied=tied, seed=seed)
        await client.update_weights(model, f"run:{push}")
        status = await client.status()
        assert (status.weight_version, status.paused) == (f"run:{push}", False)
        for generated in await client.generate(PROMPT, SamplingParams(max_tokens=48, n=4, seed=push)):
            assert_matches(model, generated)
            assert [(s.version, s.start, s.end) for s in generated.weight_versions] == [
                (f"run:{push}", 0, len(generated.token_ids))
            ]
        checksums.append(await client.weight_checksums())
    assert checksums[0] == checksums[2]
    assert checksums[0].keys() == checksums[1].keys()
    unchanged = {name for name in checksums[0] if checksums[0][name] == checksums[1][name]}
    assert all("norm" in name for name in unchanged), "norms are ones in all tiny models"
    assert any("lm_head" in name for name in checksums[0]) != tied


def test_pushed_weights_are_those_that_generate_tied(inference_server: Server, tiny_model: Model):
    with_client(inference_server, lambda client: push_and_compare(client, tiny_model, tied=True))


def test_pushed_weights_are_those_that_generate_untied(untied_server: Address, tiny_model: Model):
    with_client(untied_server, lambda client: push_and_compare(client, tiny_model, tied=False))


def test_an_exported_folder_in_shards_opens(untied_server: Opened):
    """`ckpt export --format hf` in another data type: the greedy tokens are those of transformers."""
    files = list(untied_server.model.glob("*.safetensors"))
    assert len(files) > 1
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.bfloat16}
    expected = reference_model(untied_server.model).generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        max_new_tokens=GREEDY,
        do_sample=False,
    )
    assert untied_server.answer.token_ids == expected[0, len(PROMPT) :].tolist()
    assert_matches(untied_server.model, untied_server.answer)


def test_shards_other_types_and_a_copy_of_the_tied_head_load(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    weights = load_file(tiny_model(seed=1) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    names = sorted(weights)
    weights[names[0]] = weights[names[0]].double()
    index = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(index.values()):
        save_file({name: weights[name] for name in names if index[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "whole")
        whole = await client.weight_checksums()
        await client.update_weights(tiny_model(seed=2), "other")
        await client.update_weights(tmp_path, "shards")
        assert await client.weight_checksums() == whole

    with_client(inference_server, job)


def test_stop_strings_end_an_answer_with_the_token_that_completes_one(
    inference_server: Server, tiny_model: Model
):
    """The server's end is where the orchestrator finds it, whose watch on the whole answer agrees."""
    model = tiny_model(tied=True, seed=1)
    chat = ChatFormat(model)

    async def job(client: InferenceClient) -> None:
        await client.update_weights(model, "run:stop")
        params = SamplingParams(max_tokens=60, seed=5, stop_token_ids=chat.stop_token_ids)
        (whole,) = await client.generate(PROMPT, params)
        text = chat.full_text(whole.token_ids)
        for at in range(3, len(text) - 3, 7):
            stop = text[at : at + 3]
            stopped = StopWatch(chat, [stop]).feed(whole.token_ids)
            if "\ufffd" in stop:
                continue
            assert stopped is not None
            (cut,) = await client.generate(PROMPT, replace(params, stop=("nowhere to be seen", stop)))
            assert (cut.finish_reason, cut.stop) == ("stop", stop)
            assert cut.token_ids == whole.token_ids[: stopped.tokens]
            assert cut.logprobs == whole.logprobs[: stopped.tokens]
            assert cut.weight_versions[-1].end == stopped.tokens
        (same,) = await client.generate(PROMPT, replace(params, stop=("nowhere to be seen",)))
        assert same == whole

    with_client(inference_server, job)


def test_an_answer_ends_where_the_context_does_which_the_server_tells(
    inference_server: Server, tiny_model: Model
):
    """Both are what the orchestrator goes by."""

    async def job(client: InferenceClient) -> None:
        limit = (await client.status()).max_model_len
        config = json.loads((tiny_model(tied=True, seed=0) / "config.json").read_text())
        assert limit == config["max_position_embeddings"]
        full = [40 + i % 20 for i in range(limit)]
        (cut,) = await client.generate(full[:-3], SamplingParams(max_tokens=10, seed=1))
        assert (len(cut.token_ids), cut.finish_reason) == (3, "length")
        with pytest.raises(ValueError, match=f"length {limit}"):
            await client.generate(full, SamplingParams(max_tokens=1, seed=1))

    with_client(inference_server, job)


def test_a_chat_with_a_running_server_and_with_one_of_its_own(
    inference_server: Server,
    tiny_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Both say the same of the same weights. The server that `cairn chat` starts is gone afterwards."""
    model = tiny_model(tied=True, seed=0)

    def chat(*arguments: object) -> list[str]:
        """What is printed but for the lines about servers; `#` separates answers."""
        fixed = ("--temperature", 0, "--max-tokens", 8)
        monkeypatch.setattr(sys, "argv", ["cairn", "chat", *map(str, (*arguments, *fixed))])
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n/reset\nabc\nxyz\n/reset\n" + 1100 * "a" + "\n"))
        assert main() == 0
        printed = capsys.readouterr().out.partition("talking to ")[2].partition("\n")[2]
        return printed.split("the conversation begins anew\n")

    with_client(inference_server, lambda client: client.update_weights(model, "chat"))
    first, goes_on, too_long = chat("--server", inference_server.url)
    assert first.strip()
    assert goes_on.startswith(first)
    assert len(goes_on) > len(first)
    assert "the server refuses it (400): " in too_long
    logs = {*token_file(inference_server.url).parent.glob("*.json")}
    with forking_servers():
        assert chat(model, "--kv-cache-memory", "64M") == [first, goes_on, too_long]
        assert {*token_file(inference_server.url).parent.glob("*.json")} <= logs, "no server is left"


def test_weights_come_from_a_trainers_memory_or_stay_as_they_are(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    tensors = load_file(tiny_model(seed=1) / "model.safetensors")
    sender = WeightSender(tensors, rank=0, host="127.0.0.1")
    sender.offer(3)
    source = sender.source(3, [sender.here])

    async def job(client: InferenceClient) -> None:
        impatient = InferenceClient(client.url, inference_server.token, retry_for=0)

        async def push(changed: Source) -> None:
            changed.write(tmp_path)
            await impatient.update_weights(tmp_path, "sent")

        await client.update_weights(tiny_model(seed=1), "file")
        expected = await client.weight_checksums()
        await client.update_weights(tiny_model(seed=2), "other")
        others = await client.weight_checksums()

        shapes = dict(source.shapes)
        shapes.pop("model.norm.weight")
        wrong = {**source.shapes, "model.norm.weight": [7]}
        for changed, error, message in (
            (replace(source, shapes=shapes), WeightsRefused, "model.norm.weight is missing"),
            (replace(source, shapes=wrong), WeightsRefused, "model.norm.weight has shape"),
            (replace(source, step=2), WeightsGone, "a newer policy than that of step 2"),
            (replace(source, step=4), ServerUnavailable, "has not recomputed step 4 yet"),
        ):
            with pytest.raises(error, match=message):
                await push(changed)
            status = await client.status()
            assert (status.weight_version, status.paused) == ("other", False)
            assert await client.weight_checksums() == others

        await push(source)
        assert await client.weight_checksums() == expected
        (generated,) = await client.generate(PROMPT, SamplingParams(max_tokens=20, seed=1))
        assert_matches(tiny_model(seed=1), generated)
        assert {span.version for span in generated.weight_versions} == {"sent"}
        sender.close()
        with pytest.raises(ServerUnavailable, match="the trainer does not answer"):
            await push(source)
        assert await client.weight_checksums() == expected
        assert await client.generate(PROMPT, SamplingParams(max_tokens=20, seed=1)) == [generated]
        await impatient.close()

    try:
        with_client(inference_server, job)
    finally:
        sender.close()


async def answers_under_changing_weights(
    client: InferenceClient, models: dict[str, Path], *, keep_cache: bool
) -> list[Generation]:
    """Eight answers, while which the server gets one of `models` after the other."""
    first, *later = models
    await client.update_weights(models[first], first)
    sampling = {"max_tokens": 800, "n": 8, "seed": 5, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling, "cache_salt": first}
    async with httpx.AsyncClient(base_url=client.url, timeout=120) as http:
        request = asyncio.create_task(http.post("/inference/v1/generate", json=body))
        for version in later:
            await asyncio.sleep(0.3)
            await client.update_weights(models[version], version, keep_cache=keep_cache)
        choices = (await request).json()["choices"]
    answers = []
    for choice in choices:
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        spans = [VersionSpan(**span) for span in choice["weight_versions"]]
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert len(choice["token_ids"]) == spans[-1].end == 800
        answers.append(Generation(choice["token_ids"], logprobs, spans, choice["finish_reason"]))
    assert len(answers) == 8
    assert len({span.version for answer in answers for span in answer.weight_versions}) > 1
    return answers


def test_weights_can_change_under_running_requests(inference_server: Server, tiny_model: Model):
    """Every token was sampled from the version that its span names."""
    models = {f"run:{i}": tiny_model(seed=i) for i in range(3)}
    answers = with_client(
        inference_server, lambda client: answers_under_changing_weights(client, models, keep_cache=False)
    )
    for generated in answers:
        for span in generated.weight_versions:
            assert_matches(models[span.version], generated, span.start, span.end)


def test_running_requests_may_go_on_from_old_keys_and_values(inference_server: Server, tiny_model: Model):
    """Each token's logprob is what it was sampled with; later requests see nothing of the old weights."""
    models = {f"run:{i}": tiny_model(seed=i) for i in range(3)}

    async def job(client: InferenceClient) -> list[Generation]:
        answers = await answers_under_changing_weights(client, models, keep_cache=True)
        for generated in await client.generate(
            PROMPT, SamplingParams(max_tokens=48, n=4, seed=1), cache_salt="run:2"
        ):
            assert_matches(models["run:2"], generated)
        return answers

    for generated in with_client(inference_server, job):
        tokens = torch.tensor([PROMPT + generated.token_ids])
        cache, begin, found = DynamicCache(), 0, []
        for span in generated.weight_versions:  # the last token of a span is put in by the next weights
            end = len(PROMPT) + span.end - 1
            with torch.no_grad():
                model = reference_model(models[span.version])
                logits = model(tokens[:, begin:end], past_key_values=cache, use_cache=True).logits[0]
            found.append(logits.log_softmax(-1).gather(-1, tokens[0, begin + 1 : end + 1, None])[:, 0])
            begin = end
        expected = torch.cat(found)[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(generated.logprobs), expected, atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_tokens_in_any_company(inference_server: Server, tiny_model: Model):
    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=0), "run:0")
        alone = [
            await client.generate(PROMPT, SamplingParams(max_tokens=32, seed=seed))
            for seed in range(0, 40, 10)
        ]
        company = [
            client.generate([i + 10] * (i + 1), SamplingParams(max_tokens=32, seed=i)) for i in range(40)
        ]
        crowd = await asyncio.gather(
            *company,
            *(client.generate(PROMPT, SamplingParams(max_tokens=32, seed=seed)) for seed in range(0, 40, 10)),
        )
        assert crowd[len(company) :] == alone
        first, *_ = await client.generate(PROMPT, SamplingParams(max_tokens=32, seed=0, n=4))
        assert first == alone[0][0]
        assert len({tuple(generated.token_ids) for (generated,) in alone}) > 1

    with_client(inference_server, job)


# Refusals


def change(name: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """A fault: tensor `name` replaced by what `edit` makes of it, or left out if that is None."""

    def fault(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        new = edit(weights.pop(name))
        save_file(weights if new is None else {**weights, name: new}, model / "model.safetensors")

    return fault


def add(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def fault(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        save_file({**weights, name: tensor}, model / "model.safetensors")

    return fault


def spoil(value: float, dtype: torch.dtype = torch.float32) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(dtype)
        tensor.view(-1)[-1] = value
        return tensor

    return edit


def truncate(model: Path) -> None:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1000)


def not_safetensors(model: Path) -> None:
    (model / "model.safetensors").write_text("these are not the weights " * 100)


def empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def no_file(model: Path) -> None:
    (model / "model.safetensors").unlink()


def no_directory(model: Path) -> None:
    shutil.rmtree(model)


def lost_shard(model: Path) -> None:
    no_file(model)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def file_elsewhere(model: Path) -> None:
    no_file(model)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_source(model: Path) -> None:
    (model / "source.json").write_text('{"step": "soon"')


def other_source(model: Path) -> None:
    (model / "source.json").write_text('{"step": 1, "ranks": {}}')


def broken_index(model: Path) -> None:
    no_file(model)
    (model / "model.safetensors.index.json").write_text("{}")


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"
FAULTS = {
    "truncated": (truncate, "model.safetensors"),
    "not safetensors": (not_safetensors, "model.safetensors"),
    "empty": (empty, "model.safetensors"),
    "missing tensor": (change(DOWN, lambda tensor: None), f"{DOWN} is missing"),
    "extra tensor": (add("model.layers.3.extra", torch.zeros(3)), "unexpected tensor model.layers.3.extra"),
    "another head in a tied model": (add("lm_head.weight", torch.zeros(102, 128)), "lm_head.weight differs"),
    "wrong shape": (change(DOWN, lambda tensor: tensor.T.contiguous()), rf"{DOWN} has shape \[384, 128\]"),
    "integers": (change(NORM, lambda tensor: tensor.to(torch.int32)), f"{NORM} has type I32"),
    "NaN": (change(DOWN, spoil(float("nan"))), f"{DOWN} holds NaN"),
    "infinity": (change(NORM, spoil(float("inf"))), f"{NORM} holds NaN or infinity"),
    "too large for the server's type": (change(NORM, spoil(1e300, torch.float64)), NORM),
    "no file": (no_file, "holds neither model.safetensors nor"),
    "not a directory": (no_directory, "not a directory"),
    "lost shard": (lost_shard, "model-00001-of-00001.safetensors"),
    "file elsewhere": (file_elsewhere, "outside"),
    "broken source": (broken_source, "does not say where its tensors are"),
    "other source": (other_source, "does not say where its tensors are"),
    "broken index": (broken_index, "model.safetensors.index.json"),
}


def test_bad_weights_are_refused_and_the_old_ones_serve_on(
    inference_server: Server, tiny_model: Model, tmp_path: Path, subtests: pytest.Subtests
):
    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        before = (
            await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)),
            await client.weight_checksums(),
        )
        for name, (fault, message) in FAULTS.items():
            bad = shutil.copytree(tiny_model(seed=2), tmp_path / name)
            fault(bad)
            with subtests.test(name):
                with pytest.raises(WeightsRefused, match=message):
                    await client.update_weights(bad, "bad")
                status = await client.status()
                assert (status.weight_version, status.paused) == ("good", False)
        for path in ("/no/such/folder", "a\0b", "x" * 5000):
            with subtests.test(path[:20]):
                with pytest.raises(WeightsRefused, match="is not a directory"):
                    await client.update_weights(path, "bad")
                status = await client.status()
                assert (status.weight_version, status.paused) == ("good", False)
        # Once for all: a change by any of them would have stayed.
        assert before == (
            await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)),
            await client.weight_checksums(),
        )
        both = shutil.copytree(tiny_model(seed=2), tmp_path / "both")
        index = {"weight_map": {"model.norm.weight": "elsewhere.safetensors"}}
        (both / "model.safetensors.index.json").write_text(json.dumps(index))
        await client.update_weights(both, "the single file counts, as in transformers".replace(" ", "-"))
        await client.update_weights(tiny_model(seed=2), "next")

    with_client(inference_server, job)


def one_step_older(model: Path) -> None:
    """A tensor as it was a small step of the optimiser ago, far too near to be noticed in logprobs."""
    change(DOWN, lambda tensor: tensor * (1 + 2**-20))(model)


def test_weights_that_are_not_those_that_the_trainer_wrote_are_not_taken(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    """By their checksums; the old weights serve on."""
    pushed = shutil.copytree(tiny_model(seed=2), tmp_path / "pushed")
    tensors = load_file(pushed / "model.safetensors")
    write_checksums(pushed, {name: checksum(tensor) for name, tensor in tensors.items()})
    bad = shutil.copytree(pushed, tmp_path / "bad")
    one_step_older(bad)

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        before = (
            await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)),
            await client.weight_checksums(),
        )
        with pytest.raises(WeightsAltered, match=f"{DOWN} is not the one that the trainer wrote"):
            await client.update_weights(bad, "bad")
        status = await client.status()
        assert (status.weight_version, status.paused) == ("good", False)
        assert before == (
            await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)),
            await client.weight_checksums(),
        )
        truncate(bad)
        with pytest.raises(WeightsAltered, match="not a whole safetensors file"):
            await client.update_weights(bad, "bad")
        (bad / "checksums.json").write_text("[1]")
        with pytest.raises(WeightsAltered, match="checksums"):
            await client.update_weights(bad, "bad")
        await client.update_weights(pushed, "next")
        for generated in await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)):
            assert_matches(tiny_model(seed=2), generated)

    with_client(inference_server, job)


def test_every_layer_of_a_plain_model_is_compared_with_what_came(inference_server: Server, tiny_model: Model):
    """The server says of how many that could be done: of all, or of a share after the first updates."""

    async def job(client: InferenceClient) -> None:
        for push in range(2):
            await client.update_weights(tiny_model(seed=push), f"run:{push}")

    with_client(inference_server, job)
    found = re.findall(r"(\d+) of (\d+) layers compared", inference_server.log.read_text())
    assert int(found[0][0]) >= 4, "three layers, the embeddings and the last norm"
    assert all(compared == due for compared, due in found)


class Garbling(WeightSender):
    """What it says of the tensors is not what comes; once."""

    garbles = True

    def _send(self, *arguments: Any) -> dict[str, int]:
        sums = super()._send(*arguments)
        garbled, self.garbles = self.garbles, False
        return {**sums, DOWN: sums[DOWN] ^ 1} if garbled else sums


def test_weights_that_change_on_the_network_are_sent_again(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    tensors = load_file(tiny_model(seed=2) / "model.safetensors")
    sender = Garbling(tensors, rank=0, host="127.0.0.1")
    sender.offer(7)
    sender.source(7, [sender.here]).write(tmp_path)

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        with pytest.raises(WeightsAltered, match=f"{DOWN} as it came"):
            await client.update_weights(tmp_path, "run:7")
        status = await client.status()
        assert (status.weight_version, status.paused) == ("good", False)
        await client.update_weights(tmp_path, "run:7")
        for generated in await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)):
            assert_matches(tiny_model(seed=2), generated)

    with_client(inference_server, job)
    sender.close()


def test_a_server_that_quantises_as_it_loads_takes_weights(
    tiny_model: Model, free_port: Callable[[], int], tmp_path: Path
):
    """It then holds what it held when it started with the same weights, to the bit."""
    arguments = ["--quantization", "fp8_per_channel"]  # the kind of FP8 that vLLM's CPU build can do
    config = InferenceConfig(port=free_port(), kv_cache_memory="64M", dtype="bfloat16", vllm_args=arguments)

    async def job(client: InferenceClient) -> None:
        sampling = SamplingParams(max_tokens=16, seed=1)
        expected, generated = await client.weight_checksums(), await client.generate(PROMPT, sampling)
        assert any("weight_scale" in name for name in expected)
        assert (await client.update_weights(tiny_model(seed=1), "own")).start_differs == []
        assert (await client.update_weights(tiny_model(seed=2), "other")).start_differs is None
        assert await client.weight_checksums() != expected
        assert await client.generate(PROMPT, sampling) != generated
        await client.update_weights(tiny_model(seed=1), "first")
        assert await client.weight_checksums() == expected
        (again,) = await client.generate(PROMPT, sampling)
        assert (again.token_ids, again.logprobs) == (generated[0].token_ids, generated[0].logprobs)

    with contextlib.ExitStack() as started:
        with forking_servers():
            server = started.enter_context(Server(config, str(tiny_model(seed=1)), tmp_path / "vllm.log"))
        server.wait_ready()
        with_client(server, job)


def test_a_server_generates_while_it_reads_weights(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    """A pipe is a file that is not read before somebody writes into it."""
    folder = shutil.copytree(tiny_model(seed=2), tmp_path / "slow")
    os.mkfifo(folder / "checksums.json")

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        update = asyncio.create_task(client.update_weights(folder, "slow"))
        while not (status := await client.status()).updating:
            await asyncio.sleep(0.01)
        assert (status.weight_version, status.paused) == ("good", False)
        (generated,) = await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1))
        assert_matches(tiny_model(seed=1), generated)
        assert (await client.status()).updating["version"] == "slow"
        assert not update.done()
        (folder / "checksums.json").write_text("{}")
        status = await update
        assert (status.weight_version, status.updating) == ("slow", None)
        assert (await client.status()).updating is None
        (generated,) = await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1))
        assert_matches(tiny_model(seed=2), generated)

    with_client(inference_server, job)


class Slow(WeightSender):
    """Sends once it is told to; says that it has too much for the server's memory."""

    def __init__(self, *arguments: Any, **named: Any):
        self.go = threading.Event()
        super().__init__(*arguments, **named)

    def source(self, step: int, ranks: list[Rank]) -> Source:
        return replace(super().source(step, ranks), bytes=1 << 60)

    def _send(self, *arguments: Any) -> dict[str, int]:
        self.go.wait(PATIENCE.total_seconds() / 2)
        return super()._send(*arguments)


def test_a_long_update_is_no_hang(
    inference_server: Server, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server tells its status while it is paused, and its process that it is alive."""
    tensors = load_file(tiny_model(seed=2) / "model.safetensors")
    sender = Slow(tensors, rank=0, host="127.0.0.1")
    sender.offer(7)
    sender.source(7, [sender.here]).write(tmp_path)
    monkeypatch.setattr(heartbeat, "_heart", None)  # of this process, as if it had started the server
    heartbeat.start(tmp_path / "heartbeat.json")
    signs = ServerProgress()
    supervisors = {
        lengthy: Watch(tmp_path / "heartbeat.json", os.getpid(), silence=60, standstill=3.5, lengthy=lengthy)
        for lengthy in (600.0, None)
    }
    problems: dict[float | None, str] = {}

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        update = asyncio.create_task(client.update_weights(tmp_path, "slow"))
        seen: list[ServerStatus] = []
        while not update.done():
            signs.note(await asyncio.to_thread(inference_server.status, 2.0))
            beat = read_note(tmp_path / "heartbeat.json", Beat)
            # Before that file tells of the update, a late sign of life is a problem to both.
            for lengthy, supervisor in supervisors.items() if beat and beat.lengthy else ():
                if problem := supervisor.problem():
                    problems[lengthy] = problem
            seen.append(await client.status())
            paused = [status for status in seen if status.paused]
            if problems and len(paused) >= 10 and paused[-1].updating["seconds"] > 4:
                sender.go.set()
            await asyncio.sleep(0.2)
        await update
        assert len(paused) >= 10
        assert {status.weight_version for status in paused} == {"good"}
        assert max(status.updating["seconds"] for status in paused) > 4
        # The update was long enough for a supervisor that does not know of updates.
        assert problems.keys() == {None}
        assert "(taking the weights slow)" in problems[None]
        for generated in await client.generate(PROMPT, SamplingParams(max_tokens=16, seed=1)):
            assert_matches(tiny_model(seed=2), generated)

    try:
        with_client(inference_server, job)
    finally:
        sender.go.set()
        sender.close()


def test_a_refused_update_does_not_disturb_running_requests(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    bad = shutil.copytree(tiny_model(seed=2), tmp_path / "bad")
    truncate(bad)

    async def job(client: InferenceClient) -> None:
        await client.update_weights(tiny_model(seed=1), "good")
        alone = await client.generate(PROMPT, SamplingParams(max_tokens=200, seed=1, n=8))
        running = asyncio.create_task(client.generate(PROMPT, SamplingParams(max_tokens=200, seed=1, n=8)))
        for _ in range(3):
            with pytest.raises(WeightsRefused):
                await client.update_weights(bad, "bad")
        assert await running == alone

    with_client(inference_server, job)


def test_native_sequence_of_vllm_works_and_refuses_as_well(
    inference_server: Server, tiny_model: Model, tmp_path: Path
):
    bad = shutil.copytree(tiny_model(seed=1), tmp_path / "bad")
    truncate(bad)
    # A connection per request: vLLM closes it after a failed update.
    headers = {**authorised(inference_server), "Connection": "close"}
    with httpx.Client(base_url=inference_server.url, headers=headers, timeout=60) as http:

        def post(path: str, body: dict[str, Any] | None = None) -> int:
            return http.post(path, json=body).status_code

        assert post("/init_weight_transfer_engine", {"init_info": {}}) == 200
        assert post("/pause?mode=keep") == 200
        assert post("/start_weight_update") == 200
        # While somebody's update is open, another one does not get in between.
        busy = http.post("/cairn/update_weights", json={"path": str(tiny_model(seed=2)), "version": "x"})
        assert busy.status_code == 409
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert post("/update_weights", {"update_info": {"path": str(bad)}}) >= 400
        assert post("/start_weight_update") == 200
        assert post("/update_weights", {"update_info": {"path": str(tiny_model(seed=1))}}) == 200
        assert post("/finish_weight_update", {"weight_version": "native"}) == 200
        assert post("/resume") == 200
        assert http.get("/weight_info").json() == {"weight_version": "native"}

    async def job(client: InferenceClient) -> None:
        (generated,) = await client.generate(PROMPT, SamplingParams(max_tokens=32, seed=1))
        assert_matches(tiny_model(seed=1), generated)

    with_client(inference_server, job)


# Access


def test_routes_that_change_the_server_need_the_token(inference_server: Server):
    listing = run_python(
        "-c",
        "import cairn, json; from vllm.entrypoints.rl.online.api_router import router;"
        "print(json.dumps([[m, route.path] for route in router.routes for m in route.methods]))",
        vllm=True,
    )
    assert listing.returncode == 0, listing.stderr
    routes = [tuple(route) for route in json.loads(listing.stdout.splitlines()[-1])]
    assert ("POST", "/update_weights") in routes
    token = authorised(inference_server)
    with httpx.Client(base_url=inference_server.url, timeout=30) as http:
        served = {
            (method.upper(), path)
            for path, methods in http.get("/openapi.json", headers=token).json()["paths"].items()
            for method in methods
        }
        assert set(routes) <= served
        others = [("POST", "/cairn/update_weights"), ("POST", "/scale_elastic_ep"), ("GET", "/openapi.json")]
        for method, path in [*routes, *others]:
            for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": inference_server.token}):
                answer = http.request(method, path, headers=wrong)
                assert answer.status_code == 401, (method, path)
                assert "CAIRN_INFERENCE_TOKEN" in answer.json()["error"]["message"]
        answer = http.get("/weight_info", headers=token)
        assert answer.status_code == 200
        # What vLLM opens in its development mode only.
        assert http.post("/collective_rpc", json={}, headers=token).status_code == 404
        large = http.post("/inference/v1/generate", content=b" " * (MAX_BODY + 1))
        assert large.status_code == 413
        assert http.get("/cairn/status").json()["paused"] is False

    async def job(client: InferenceClient) -> None:
        stranger = InferenceClient(client.url, "wrong")
        with pytest.raises(Unauthorized, match="CAIRN_INFERENCE_TOKEN"):
            await stranger.update_weights("/nowhere", "x")
        await stranger.close()

    with_client(inference_server, job)


def test_listens_on_loopback_only(inference_server: Server):
    port = httpx.URL(inference_server.url).port
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.split(":")[1], 16) == port:
                listening.add(local.split(":")[0])
    assert listening == {"0100007F"}


# Start and stop


class Foreground:
    """`run` in a process of its own, as the `inference` command calls it."""

    def __init__(self, model: Path, port: int, cache: Path, *, compiled: bool = False):
        self.url = f"http://127.0.0.1:{port}"
        self.token_file = cache / "cairn" / "servers" / token_file(self.url).name
        code = (
            "import sys; from cairn.config.inference import InferenceConfig;"
            "from cairn.inference.server import run;"
            "from cairn.run.exits import answer;"
            f"config = InferenceConfig(port={port}, kv_cache_memory='64M', dtype='float32',"
            f" compile={compiled});"
            f"sys.exit(answer(lambda: run(config, {str(model)!r}), stopped=0))"
        )
        with forking_servers() as environment:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment, "XDG_CACHE_HOME": str(cache)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.session: int | None = None

    def read_until_ready(self) -> str:
        assert self.process.stdout is not None
        printed = ""
        for line in self.process.stdout:
            printed += line
            if line.startswith("inference ready at"):
                return printed
        raise AssertionError(f"ended before it was ready: {printed}")

    def wait_for_engine(self) -> int:
        """Wait until vLLM has started its engine process; the id of that."""

        def engine() -> int | None:
            assert self.process.poll() is None, self.process.communicate()[0]
            for pid, name in self.members():
                if "spawn_main" in name or "EngineCore" in name:  # renames itself while it starts
                    return pid
            return None

        return wait_for(engine)

    def members(self) -> list[tuple[int, str]]:
        """Process id and name of what lives in the server's session."""
        processes = list(living_processes())
        if self.session is None:
            for pid, parent, _, name in processes:
                if parent == self.process.pid and "keeper.py" in name:
                    self.session = pid
        return [(pid, name) for pid, _, session, name in processes if session == self.session]

    def clean_up(self) -> None:
        self.members()
        self.process.kill()
        self.process.wait()
        if self.session is not None and self.members():
            os.killpg(self.session, signal.SIGKILL)


def living_processes() -> Iterator[tuple[int, int, int, str]]:
    """Process id, parent, session and command line of all processes but zombies."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if stat[0] != "Z":
            yield int(entry.name), int(stat[1]), int(stat[3]), name


def wait_for(condition: Callable[[], Any], deadline: float = DEADLINE) -> Any:
    end = time.monotonic() + deadline
    while not (result := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return result


@pytest.fixture
def foreground(
    tmp_path: Path, tiny_model: Model, free_port: Callable[[], int]
) -> Iterator[Callable[..., Foreground]]:
    """Starts `run` in the foreground; whatever a failing test leaves behind is killed."""
    started = []

    def start(port: int | None = None, model: Path | None = None) -> Foreground:
        started.append(Foreground(model or tiny_model(), port or free_port(), tmp_path / "cache"))
        return started[-1]

    yield start
    for process in started:
        process.clean_up()


@pytest.fixture(scope="module")
def exported(shell: Shell, tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with the untied model that `ckpt export` wrote in bfloat16 and in shards."""
    folder = tmp_path_factory.mktemp("exported")
    shell.succeed("ckpt", "import", tiny_model(tied=False), folder / "run")
    (step,) = (folder / "run" / "checkpoints").glob("step_*")
    how = ("--format", "hf", "--dtype", "bfloat16", "--shard-size", "500K")
    shell.succeed("ckpt", "export", step, folder / "model", *how)
    return folder / "model"


@pytest.fixture(scope="module")
def untied_run(
    exported: Path, free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Foreground]:
    run = Foreground(exported, free_port(), tmp_path_factory.mktemp("cache"), compiled=COMPILED)
    yield run
    run.clean_up()


@pytest.fixture(scope="module")
def untied_server(untied_run: Foreground, exported: Path) -> Opened:
    """A server with an untied model; the test of stopping stops it."""
    printed = untied_run.read_until_ready()
    assert f"inference ready at {untied_run.url}" in printed
    assert str(exported) in printed
    left = untied_run.token_file
    assert (left.stat().st_mode & 0o777, left.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    written = json.loads(left.read_text())
    assert (written["url"], written["pid"]) == (untied_run.url, untied_run.process.pid)
    for pid, command_line in untied_run.members():
        assert written["token"] not in command_line, pid
    greedy = SamplingParams(max_tokens=GREEDY, temperature=0.0)
    address = Address(untied_run.url, written["token"])
    (answer,) = with_client(address, lambda client: client.generate(PROMPT, greedy))
    return Opened(address.url, address.token, exported, answer)


async def in_flight(url: str, then: Callable[[], Any]) -> None:
    """Run `then` in a thread while the server is busy with long requests."""
    sampling = {"max_tokens": 900, "n": 16, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        requests = [asyncio.create_task(http.post("/inference/v1/generate", json=body)) for _ in range(4)]
        await asyncio.sleep(0.3)
        assert not any(request.done() for request in requests)
        await asyncio.to_thread(then)
        await asyncio.gather(*requests, return_exceptions=True)


def test_interrupt_stops_cleanly_with_requests_in_flight(untied_run: Foreground, untied_server: Address):
    def interrupt() -> None:
        assert untied_run.members()
        untied_run.process.send_signal(signal.SIGINT)
        assert untied_run.process.wait(DEADLINE) == 0

    asyncio.run(in_flight(untied_server.url, interrupt))
    wait_for(lambda: not untied_run.members())
    assert not untied_run.token_file.exists()


def test_nothing_outlives_a_killed_parent(foreground: Callable[..., Foreground]):
    run = foreground()
    run.wait_for_engine()
    assert len(run.members()) >= 3
    run.process.kill()
    wait_for(lambda: not run.members())


def test_a_dead_engine_is_a_failure_with_the_end_of_the_log(
    foreground: Callable[..., Foreground], tiny_model: Model
):
    """Also with requests in flight, when vLLM itself hangs. Before it died it had loaded other weights at its
    start than in its first update from the same files, which the update says."""
    run = foreground()
    run.read_until_ready()
    address = Address(run.url, json.loads(run.token_file.read_text())["token"])

    async def job(client: InferenceClient) -> None:
        whole = await client.weight_checksums()
        headers = {"Authorization": f"Bearer {address.token}"}
        async with httpx.AsyncClient(base_url=run.url, headers=headers, timeout=60) as http:
            (await http.post("/weight_checker", json={"action": "reset"})).raise_for_status()  # zeros
        assert (await client.update_weights(tiny_model(), "own")).start_differs == sorted(whole)
        assert await client.weight_checksums() == whole
        assert (await client.update_weights(tiny_model(), "again")).start_differs is None

    with_client(address, job)
    printed = ""

    def kill_engine() -> None:
        nonlocal printed
        os.kill(run.wait_for_engine(), signal.SIGKILL)
        printed, _ = run.process.communicate(timeout=DEADLINE)

    asyncio.run(in_flight(run.url, kill_engine))
    assert run.process.returncode == 1
    assert "the inference server died" in printed
    assert "the end of " in printed
    assert "Engine" in printed
    wait_for(lambda: not run.members())
    assert not run.token_file.exists()


def test_a_model_that_the_server_can_only_die_of_ends_with_the_reason(
    foreground: Callable[..., Foreground], tmp_path: Path
):
    """vLLM takes Jamba only with a setting that its CPU build can't be run with, and says so in its log."""
    run = foreground(model=families.make("jamba", tmp_path / "jamba"))
    printed, _ = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 2
    assert "inference ready" not in printed
    assert "can't serve" in printed
    assert "Chunked prefill is required" in printed
    wait_for(lambda: not run.members())


def test_terminating_a_starting_server_is_a_clean_stop(foreground: Callable[..., Foreground]):
    run = foreground()
    wait_for(run.members)
    run.process.terminate()
    assert run.process.wait(DEADLINE) == 0
    wait_for(lambda: not run.members())


def test_a_taken_port_is_said_before_anything_starts(
    foreground: Callable[..., Foreground], inference_server: Server
):
    port = httpx.URL(inference_server.url).port
    run = foreground(port)
    printed, _ = run.process.communicate(timeout=DEADLINE)
    assert run.process.returncode == 2
    assert f"port {port}" in printed
    assert "--port" in printed


def test_no_server_names_the_address_and_the_command_that_starts_one(free_port: Callable[[], int]):
    url = f"http://127.0.0.1:{free_port()}"

    async def main() -> None:
        async with InferenceClient(url, "token", retry_for=0.3) as client:
            assert not await client.health()
            with pytest.raises(ServerUnavailable, match=r"uv run inference @ infer\.toml") as caught:
                await client.status()
            assert url in str(caught.value)
            with pytest.raises(ServerUnavailable, match="not healthy after"):
                await client.wait_ready(0.3)

    asyncio.run(main())
