"""Publishing policies: in which data type, by which thread, and what waits for it."""

import dataclasses
import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from one_rank import one_rank
from runs import DEADLINE
from safetensors.torch import load_file
from tiny import random_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from cairn.checkpoint.tensors.host_staging import HostCopies
from cairn.checkpoint.tensors.sharded_files import write_tensors
from cairn.config.rl_trainer import TrainerConfig
from cairn.policy.checksums import checksum, read_checksums
from cairn.policy.network import host_store
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt, Probe, read_probe
from cairn.trainer.group import RankGroup, ThreadRendezvous
from cairn.trainer.models.model import config_of, published_dtypes, weights
from cairn.trainer.publishing.publisher import TRANSPORTS, VersionPublisher
from cairn.trainer.publishing.transports import FileTransport, Served
from cairn.trainer.tasks.orchestrator_link import ShippedBatches

ATTEMPT = Attempt("abc", 1, "rl", 0, None, "main")
RESUMED = Attempt("abc", 2, "rl", 3, "/checkpoints/step_3", "main")
SIZE = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64},
}
PROBE = Probe([1, 2], [-1.0], "float32")

group = one_rank


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return random_model(Qwen3Config(**SIZE, tie_word_embeddings=True))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def served(model: torch.nn.Module, dtype: torch.dtype) -> Served:
    return Served(partial(weights, model), published_dtypes(model, dtype), config_of(model, dtype))


def train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The data type


def test_policies_have_the_data_type_of_the_computation_unless_one_is_given():
    def dtype(gpu: bool, **settings: object) -> str:
        return TrainerConfig(**settings).published_as(gpu=gpu)

    assert dtype(gpu=False) == "float32"
    assert dtype(gpu=True) == "bfloat16"
    assert dtype(gpu=False, precision={"compute": "bfloat16"}) == "bfloat16"
    assert dtype(gpu=True, publish_dtype="float32") == "float32"
    assert dtype(gpu=False, publish_dtype="bfloat16") == "bfloat16"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_published_folder_is_a_model_of_the_data_type_that_it_says(
    group: RankGroup, model: Qwen3ForCausalLM, run: RunDirectory, transport: tuple[str, str]
):
    """With checksums of the values as they are published; the last one, so that it is in files."""
    publishing = TRANSPORTS[transport](group, served(model, torch.bfloat16))
    publisher = VersionPublisher(run, ATTEMPT, group, publishing, 0)
    publisher.publish(1, save=False, last=True)
    folder = run.versions.folder(1)
    published = load_file(folder / "model.safetensors")
    assert published.keys() == weights(model).keys()
    for name, weight in weights(model).items():
        assert published[name].dtype == torch.bfloat16
        assert torch.equal(published[name], weight.bfloat16()), name
    assert read_checksums(folder) == {name: checksum(tensor) for name, tensor in published.items()}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert opened.dtype == torch.bfloat16
    assert torch.equal(opened.lm_head.weight, published["model.embed_tokens.weight"])
    assert model.config.dtype == torch.float32, "the trainer's own stays as it is"
    publisher.close()


def test_float32_is_published_as_it_is(
    group: RankGroup, model: Qwen3ForCausalLM, run: RunDirectory, tmp_path: Path
):
    publisher = VersionPublisher(run, ATTEMPT, group, FileTransport(group, served(model, torch.float32)), 0)
    publisher.publish(1, save=False, last=True)
    plain = tmp_path / "plain"
    plain.mkdir()
    write_tensors(plain, weights(model), "model")
    published = contents(run.versions.folder(1))
    assert published["model.safetensors"] == (plain / "model.safetensors").read_bytes()
    assert json.loads(published["config.json"])["dtype"] == "float32"


def test_buffers_are_published_as_they_are():
    """As the forward pass takes them: rounded, they could choose other experts than in training."""
    config = AutoConfig.for_model("deepseek_v3", **FAMILIES["deepseek_v3"].settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dtypes = published_dtypes(model, torch.bfloat16)
    buffers = {name for name in weights(model) if name.endswith("e_score_correction_bias")}
    assert buffers
    assert dtypes.keys() == weights(model).keys() - buffers


# Resuming


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_servers_get_the_same_policy_after_a_resume_as_before(
    group: RankGroup,
    model: Qwen3ForCausalLM,
    run: RunDirectory,
    transport: tuple[str, str],
    dtype: torch.dtype,
):
    """A checkpoint's model is float32: where policies are rounded, it is published anew, once an attempt."""

    def publisher(attempt: Attempt, step: int) -> VersionPublisher:
        publishing = TRANSPORTS[transport](group, served(model, dtype))
        return VersionPublisher(run, attempt, group, publishing, step, lambda: PROBE)

    first = publisher(ATTEMPT, 0)
    assert not run.versions.beginning(ATTEMPT).published
    first.publish(3, save=True, last=True)
    first.close()
    before = contents(run.versions.folder(3))
    run.versions.clear()
    assert run.versions.beginning(ATTEMPT) is None
    second = publisher(RESUMED, 3)
    folder = run.versions.folder(3)
    assert read_probe(folder) == PROBE
    rounds = dtype != torch.float32
    assert run.versions.beginning(RESUMED).published == rounds
    if rounds:
        assert contents(folder) == before
        inode = (folder / "model.safetensors").stat()
        second.close()
        second = publisher(RESUMED, 3)  # another process of the same attempt: servers may be reading
        assert (folder / "model.safetensors").stat() == inode
    second.publish(4, save=False, last=True)
    run.versions.forget_before(4)
    assert folder.exists() != rounds, "it takes no room any more"
    second.close()


def test_a_new_runs_first_policy_is_published_where_servers_take_only_that(
    group: RankGroup, model: Qwen3ForCausalLM, run: RunDirectory
):
    """Whole, in a folder, as all that follow."""
    attempt = dataclasses.replace(ATTEMPT, publishes_first=True)
    publishing = TRANSPORTS["files", "full"](group, served(model, torch.float32))
    publisher = VersionPublisher(run, attempt, group, publishing, 0, lambda: PROBE)
    assert run.versions.beginning(attempt).published
    assert {"model.safetensors", "probe.json"} <= contents(run.versions.folder(0)).keys()
    publisher.close()


# The thread


class SlowDevice(HostCopies):
    """Stands for a GPU whose copies arrive when they are let through."""

    piece_bytes = 1024

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.followed = 0
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def follow(self) -> None:
        self.followed += 1

    def bring(self, values: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        assert values.nbytes <= len(memory) == self.piece_bytes
        there = memory[: values.nbytes].view(values.dtype)
        self.queued.append((there, values))
        return there

    def wait(self) -> None:
        self.gate.wait(DEADLINE)
        for there, values in self.queued:
            there.copy_(values)
        self.queued.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDevice]:
    device = SlowDevice()
    monkeypatch.setattr("cairn.trainer.publishing.transports.copies_from", lambda devices: device)
    yield device
    device.gate.set()


@pytest.fixture
def publisher(
    group: RankGroup, model: Qwen3ForCausalLM, run: RunDirectory, device: SlowDevice
) -> Iterator[VersionPublisher]:
    publishing = FileTransport(group, served(model, torch.bfloat16))
    publisher = VersionPublisher(run, ATTEMPT, group, publishing, 0, lambda: PROBE)
    yield publisher
    device.gate.set()
    publisher.close()


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_training_goes_on_while_a_policy_is_written_and_the_update_waits_for_it(
    publisher: VersionPublisher, model: Qwen3ForCausalLM, run: RunDirectory, device: SlowDevice
):
    """What is announced is the policy of its step, whole, although the weights change next."""
    publisher.publish(1, save=True, last=False)
    assert device.followed == 1, "copies are queued behind the update"
    before = {name: weight.bfloat16() for name, weight in weights(model).items()}

    def update() -> None:
        publisher.before_update()
        train(model)

    updating = in_thread(update)
    time.sleep(0.1)
    assert updating.is_alive()
    assert run.versions.announced(ATTEMPT, 1) is None
    assert not run.versions.folder(1).exists()
    device.gate.set()
    updating.join(DEADLINE)
    assert not updating.is_alive()
    publisher.finish()
    assert run.versions.announced(ATTEMPT, 1).save
    published = load_file(run.versions.folder(1) / "model.safetensors")
    assert all(torch.equal(published[name], weight) for name, weight in before.items())
    assert not torch.equal(published["model.norm.weight"], weights(model)["model.norm.weight"].bfloat16())


def test_versions_are_announced_in_their_order_and_the_end_comes_last(
    publisher: VersionPublisher, run: RunDirectory, device: SlowDevice
):
    publisher.publish(1, save=False, last=False)
    ending = in_thread(lambda: publisher.announce_end(1, save=True))
    time.sleep(0.1)
    assert run.versions.announced(ATTEMPT, 1) is None, "or the thread would take the end back"
    device.gate.set()
    ending.join(DEADLINE)
    assert run.versions.announced(ATTEMPT, 1).last
    device.gate.clear()
    publisher.publish(2, save=False, last=False)
    third = in_thread(lambda: publisher.publish(3, save=False, last=True))
    time.sleep(0.1)
    assert run.versions.all_announced(ATTEMPT) == [1]
    device.gate.set()
    third.join(DEADLINE)
    assert run.versions.all_announced(ATTEMPT) == [1, 2, 3]


def test_nothing_is_announced_by_a_trainer_that_has_ended(
    publisher: VersionPublisher, run: RunDirectory, device: SlowDevice
):
    """As when a rank died, and the others begin anew in the same processes."""
    publisher.publish(1, save=False, last=False)
    closing = in_thread(publisher.close)
    assert publisher._given_up.wait(DEADLINE)
    device.gate.set()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert run.versions.announced(ATTEMPT, 1) is None
    assert not run.versions.folder(1).exists()


def test_a_disk_that_is_full_ends_the_wait_for_the_next_batch(
    publisher: VersionPublisher, run: RunDirectory, device: SlowDevice, monkeypatch: pytest.MonkeyPatch
):
    """No batch of a policy comes that nobody was told of."""
    monkeypatch.setenv("CAIRN_FAULT", "publish.before_announce:ENOSPC")
    device.gate.set()
    publisher.publish(1, save=False, last=False)
    with pytest.raises(OSError, match="CAIRN_FAULT") as raised:
        ShippedBatches(run, ATTEMPT, 60, check=publisher.check).next_batch(2)
    assert raised.value.errno == errno.ENOSPC
    for call in (publisher.before_update, publisher.finish, lambda: publisher.announce_end(1, save=False)):
        with pytest.raises(OSError, match="CAIRN_FAULT"):
            call()
    assert run.versions.all_announced(ATTEMPT) == []


# Threads of several ranks


def test_threads_of_all_ranks_tell_each_other_what_they_have_to_say():
    """Round after round; of earlier rounds nothing is left, and a rank that is missing is waited for."""
    store = host_store("127.0.0.1")
    exchanges = [ThreadRendezvous(rank, 3, dist.PrefixStore("here", store.clone())) for rank in range(3)]
    heard: list[list[list[str]]] = [[] for _ in exchanges]

    def attend(rank: int) -> None:
        for number in range(20):
            time.sleep(0.001 * ((rank + number) % 3))
            heard[rank].append(exchanges[rank].gather(f"{number} from {rank}", lambda: None))

    threads = [in_thread(partial(attend, rank)) for rank in range(3)]
    for thread in threads:
        thread.join(DEADLINE)
    assert heard == [[[f"{number} from {rank}" for rank in range(3)] for number in range(20)]] * 3
    assert store.num_keys() <= 3, "the newest round's, and the store's own"

    class GivenUp(Exception):
        pass

    def give_up() -> None:
        if time.monotonic() > deadline:
            raise GivenUp

    deadline = time.monotonic() + 0.1
    with pytest.raises(GivenUp):
        exchanges[0].gather("alone", give_up)


class Asked:
    """A store that notes how many keys it is asked for at a time."""

    def __init__(self):
        self._store = dist.HashStore()
        self.keys: set[int] = set()

    def check(self, keys: list[str]) -> bool:
        self.keys.add(len(keys))
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_rank_that_waits_asks_for_one_key_however_many_ranks_there_are():
    """512 ranks that each asked for 512 would ask rank 0's store for 131 million keys a second."""
    store: Any = Asked()
    ranks = [ThreadRendezvous(rank, 512, store) for rank in range(512)]
    heard: list[list[str]] = []
    threads = [
        in_thread(partial(lambda one, rank: heard.append(one.gather(str(rank), lambda: None)), one, rank))
        for rank, one in enumerate(ranks)
    ]
    for thread in threads:
        thread.join(DEADLINE)
    assert heard == [[str(rank) for rank in range(512)]] * 512
    assert store.keys == {1}
