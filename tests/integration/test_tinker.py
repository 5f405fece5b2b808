"""The service with a server for samples: what clients sample is what they have trained.

The loops of tinker-cookbook, with the real client, run where CAIRN_TINKER_PYTHON names a Python that has it.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from light_client import LightClient, ServiceRefusal, datum
from runs import CONFIGS, Command, Shell
from tiny import write_example

from cairn.run.connections import free_port

pytestmark = pytest.mark.timeout(900)

SAMPLES = ([10, 20, 30, 40, 50], [7, 8, 9])
PROMPT, TOKENS, VOCABULARY = [11, 22, 33], 6, 102
COOKBOOK = os.environ.get("CAIRN_TINKER_PYTHON")
MODEL = "Qwen/Qwen3.5-9B-Base"
"""The name by which the cookbook's loops ask for their model."""


class Sampling:
    """The service, with a server of its own."""

    def __init__(self, command: Command, url: str, output: Path):
        self.command, self.url, self.output = command, url, output
        command.wait_until(lambda: "TINKER_BASE_URL" in command.output)
        self.key = (output / "key").read_text().strip()

    def environment(self) -> dict[str, str]:
        """That of the real client, which finds nothing on the network."""
        return {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            **{"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key, "TINKER_TELEMETRY": "0"},
            **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
            "NO_PROXY": "127.0.0.1",
        }


@pytest.fixture(scope="module")
def service(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampling]:
    folder = tmp_path_factory.mktemp("service")
    model, port = write_example(folder / "model"), free_port()
    arguments = ("cairn", "service", "@", f"{CONFIGS}/service.toml", "--model.name", model, "--port", port)
    arguments = (*arguments, "--output-dir", folder / "out", "--names", f"tiny,{MODEL}")
    arguments = (*arguments, "--inference.port", free_port(), "--inference.dtype", "float32")
    with shell.start(*arguments, "--inference.kv-cache-memory", "64M") as command:
        yield Sampling(command, f"http://127.0.0.1:{port}", folder / "out")
        command.process.send_signal(signal.SIGTERM)
        assert command.finish().code == 0, command.output
        command.assert_nothing_survives()


def sampler_of(client: LightClient, number: int, **of: Any) -> str:
    """A sampling session."""
    asked = {"session_id": client.session, "sampling_session_seq_id": number, **of}
    return client.post("create_sampling_session", **asked)["sampling_session_id"]


def sample(client: LightClient, sampler: str, number: int, **more: Any) -> dict[str, Any]:
    """What a sampling session's call of a number gives."""
    how = {"max_tokens": TOKENS, "seed": 3, **more.pop("how", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": more.pop("tokens", PROMPT)}]}
    asked = {"sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "num_samples": 2, **more}
    return client.result(client.post("asample", **asked, sampling_params=how))


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended, though its parent may not know yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def trained(client: LightClient) -> str:
    """A model after three steps on the same samples each time."""
    model = client.create(seed=2)
    data = [datum(tokens, weights=[1.0] * (len(tokens) - 1)) for tokens in SAMPLES]
    for _ in range(3):
        client.result(client.passes(model, data))
        client.result(client.step(model, beta1=0.9, beta2=0.95, eps=1e-12))
    return model


def test_clients_sample_what_they_have_trained(service: Sampling):
    """The base and two adapters by turns, also after the server was killed; logprobs are the trainer's."""
    client = LightClient(service.url, service.key)
    base = sampler_of(client, 0, base_model="tiny")
    plain = sample(client, base, 0, prompt_logprobs=True)
    assert sample(client, base, 1)["sequences"] == plain["sequences"]
    model = trained(client)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        if name == "second":
            data = [datum(tokens, weights=[-1.0] * (len(tokens) - 1)) for tokens in SAMPLES]
            client.result(client.passes(model, data))
            client.result(client.step(model))
        path = client.result(client.call("save_weights_for_sampler", model, path=name))["path"]
        found[name] = sampler_of(client, len(found) + 1, model_path=path)
    answers = {name: sample(client, one, 0) for name, one in found.items()}
    assert answers["first"]["sequences"] != answers["second"]["sequences"] != plain["sequences"]
    tokens = PROMPT + answers["second"]["sequences"][0]["tokens"]
    scored = {"data": [datum(tokens)], "loss_fn": "cross_entropy"}
    trainers = client.result(client.call("forward", model, forward_input=scored))["loss_fn_outputs"][0]
    expected = trainers["logprobs"]["data"]
    assert answers["second"]["sequences"][0]["logprobs"] == pytest.approx(expected[2:], abs=1e-4)
    scores = sample(client, found["second"], 1, tokens=tokens, prompt_logprobs=True)["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected, abs=1e-4)
    wanted = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "topk_prompt_logprobs": 3}
    likely = sample(client, found["second"], 2, tokens=tokens, **wanted)
    assert likely["prompt_logprobs"] == [*[None] * (len(tokens) - 2), *scores[-2:]]
    tops = likely["topk_prompt_logprobs"]
    assert [len(one or ()) for one in tops] == [*[0] * (len(tokens) - 2), 3, 3]
    for place in (-2, -1):
        ids, values = zip(*tops[place], strict=True)
        rows = [datum([*tokens[:place], id]) for id in range(VOCABULARY)]
        of_all = {"data": rows, "loss_fn": "cross_entropy"}
        every = client.result(client.call("forward", model, forward_input=of_all))["loss_fn_outputs"]
        last = [one["logprobs"]["data"][-1] for one in every]
        assert values == pytest.approx(sorted(last, reverse=True)[:3], abs=1e-4)
        assert [last[id] for id in ids] == pytest.approx(values, abs=1e-4)
    alone = sample(client, base, 2, topk_prompt_logprobs=1)
    assert "prompt_logprobs" not in alone
    assert [len(one or ()) for one in alone["topk_prompt_logprobs"]] == [0, 1, 1]

    (supervised,) = (
        process
        for process in psutil.Process(service.command.process.pid).children()
        if "cairn.inference.supervised" in process.cmdline()
    )
    family = supervised.children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.Error):  # it has ended, perhaps with the one before
            if "vllm" in " ".join(process.cmdline()):
                process.kill()
    service.command.wait_until(
        lambda: not any(map(lives, family))
    )  # nor does the engine, which has no such name
    service.command.wait_until(lambda: "the inference server is started again" in service.command.output)
    for name, one in found.items():
        assert sample(client, one, 5)["sequences"] == answers[name]["sequences"]
    assert sample(client, base, 5)["sequences"] == plain["sequences"]
    for reason, more in (
        ("prompt logprobs of 21, which is greater than max allowed: 20", {"topk_prompt_logprobs": 21}),
        ("topk_prompt_logprobs = -1 is not a number", {"topk_prompt_logprobs": -1}),
        ("prompt_logprobs_last_n = 3: it goes with", {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
        ("topk_sample_logprobs = 2: a sample's logprobs are", {"topk_sample_logprobs": 2}),
    ):
        with pytest.raises(ServiceRefusal, match=reason):
            sample(client, base, 9, **more)
    wrong = {"top_k = 3": {"top_k": 3}, "stop = ": {"stop": []}, "max_tokens = 0": {"max_tokens": 0}}
    for reason, how in wrong.items():
        with pytest.raises(ServiceRefusal, match=reason):
            sample(client, base, 9, how=how)


PUBLIC = """
import json
import tinker
from tinker import types
service = tinker.ServiceClient()
client = service.create_lora_training_client("tiny", rank=4, seed=0)
inputs = {"target_tokens": [11, 12, 13], "logprobs": [-1.0, -2.0, -3.0], "advantages": [0.5, 0.0, -0.5]}
found = {}
clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
for loss, config in (("dro", {"beta": 0.1}), ("gspo", clips)):
    more = {"sequence_ratio_mask": [1.0, 1.0, 1.0]} if loss == "gspo" else {}
    data = [types.Datum(types.ModelInput.from_ints([10, 11, 12]), inputs | more)]
    found[loss] = client.forward_backward(data, loss, config).result().metrics["loss:sum"]
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
sampler = client.save_weights_and_get_sampling_client()
prompt, how = types.ModelInput.from_ints([10, 11, 12, 13]), types.SamplingParams(max_tokens=2)
asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 3, "prompt_logprobs_last_n": 2}
answer = sampler.sample(prompt, 1, how, **asked).result()
found |= {"own": answer.prompt_logprobs, "top": answer.topk_prompt_logprobs}
service.close("success").result()
print(json.dumps(found))
"""


@pytest.mark.skipif(COOKBOOK is None, reason="CAIRN_TINKER_PYTHON names no Python that has tinker")
def test_the_public_client_reads_what_it_asks_for(service: Sampling):
    done = subprocess.run(
        [str(COOKBOOK), "-c", PUBLIC],
        env=service.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(math.isfinite(found[loss]) and found[loss] for loss in ("dro", "gspo"))
    assert found["own"][:2] == found["top"][:2] == [None, None]
    for own, top in zip(found["own"][2:], found["top"][2:], strict=True):
        assert len(top) == 3
        assert own <= top[0][1] == max(value for _, value in top)


@pytest.mark.skipif(COOKBOOK is None, reason="CAIRN_TINKER_PYTHON names no Python that has tinker-cookbook")
@pytest.mark.parametrize("loop", ["sl_loop", "rl_loop"])
def test_the_cookbooks_loops_run_unchanged(service: Sampling, tmp_path: Path, loop: str):
    """Their model and data sets are folders of the names that they have on the hub."""
    shutil.copytree(service.output.parent / "model", tmp_path / MODEL)
    talk = [{"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"}]
    row = {"messages": talk} if loop == "sl_loop" else {"question": "1 + 1?", "answer": "#### 2"}
    folder = tmp_path / ("HuggingFaceH4/no_robots" if loop == "sl_loop" else "openai/gsm8k")
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")
    (folder / "train.jsonl").write_text(8 * f"{json.dumps(row)}\n")
    settings = ["batch_size=4", "lora_rank=4", "save_every=1", "log_path=log"]
    settings += ["max_length=256"] if loop == "sl_loop" else ["max_tokens=8", "group_size=2"]
    done = subprocess.run(
        [str(COOKBOOK), "-m", f"tinker_cookbook.recipes.{loop}", *settings],
        cwd=tmp_path,
        env={**service.environment(), "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps] == [0, 1]
    saved = [json.loads(line) for line in (tmp_path / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["state_path"].endswith("/weights/final")
    assert saved[-1]["sampler_path"].endswith("/sampler_weights/final")
