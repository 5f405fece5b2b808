"""Deltas: servers come to the same bits as with whole policies, whatever they had before."""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import one_rank
from safetensors.torch import load_file, save_file
from stores import s3_bucket
from test_staging import Tensors, assert_same, mapped, staging
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.checkpoint.manifest import Damaged
from cairn.config.ckpt import CkptConfig
from cairn.config.model import LoraConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.inference.plugin.staging import Staging
from cairn.inference.plugin.weight_files import UnusableWeights
from cairn.policy.checksums import read_checksums
from cairn.policy.delta import HEADER, apply, digest_of, encode
from cairn.policy.errors import Altered, Gone, NotThere
from cairn.remote import Objects, RemoteError
from cairn.run.directory import RunDirectory
from cairn.run.files import read_json
from cairn.run.messages import Attempt
from cairn.run.object_store import TransientError
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import config_of, published_dtypes, weights
from cairn.trainer.publishing import delta_transports, policy_store
from cairn.trainer.publishing.policy_store import PolicyStore
from cairn.trainer.publishing.publisher import TRANSPORTS, VersionPublisher
from cairn.trainer.publishing.transports import Served

ATTEMPT = Attempt("abc", 1, "rl", 0, None, "main")
group = one_rank


# The blocks


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_delta_makes_any_bits_of_any_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """NaNs and infinities among them; in several blocks, some of which change nothing."""
    monkeypatch.setattr("cairn.policy.delta.BLOCK_BYTES", 4096)
    draw = torch.Generator().manual_seed(3)
    old, new = torch.randint(0, 256, (2, 9 * 4096 + 8), dtype=torch.uint8, generator=draw).view(dtype)
    count = 4096 // dtype.itemsize
    new[2 * count : 5 * count] = old[2 * count : 5 * count]
    new[5 * count] = old[5 * count] + 1
    blocks = encode(old, new, 7)
    firsts = []
    at = 0
    while at < len(blocks):
        first, values, stored, _ = HEADER.unpack_from(blocks, at)
        firsts.append((first, values))
        at += HEADER.size + stored
    assert firsts == [(7 + n * count, min(count, len(new) - n * count)) for n in (0, 1, 5, 6, 7, 8, 9)]
    whole = torch.cat([torch.zeros(7, dtype=dtype), old, torch.zeros(3, dtype=dtype)])
    apply(memoryview(blocks), whole, "w")
    assert torch.equal(bits(whole[7:-3]), bits(new))
    assert not bits(whole[:7]).any()
    assert not bits(whole[-3:]).any()
    assert encode(new, new, 0) == b""


def test_small_changes_make_small_deltas():
    draw = torch.Generator().manual_seed(3)
    old = (torch.randn(1 << 20, generator=draw) * 0.03).bfloat16()
    steps = 1e-6 * torch.randn(1 << 20, generator=draw).sign()
    new = (old.float() + 40 * steps * (torch.rand(1 << 20, generator=draw) < 0.02)).bfloat16()
    assert 0 < len(encode(old, new, 0)) < 0.03 * new.nbytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda blocks: blocks[:-1], "not the header of a block"),
        (lambda blocks: blocks + b"\0", "ends within the header"),
        (
            lambda blocks: HEADER.pack(1 << 40, 400, len(blocks) - HEADER.size, 2) + blocks[HEADER.size :],
            "no block of",
        ),
        (
            lambda blocks: HEADER.pack(0, 400, len(blocks) - HEADER.size, 4) + blocks[HEADER.size :],
            "not the header",
        ),
        (
            lambda blocks: HEADER.pack(0, 399, len(blocks) - HEADER.size, 2) + blocks[HEADER.size :],
            "not a frame of",
        ),
        (lambda blocks: blocks[:-20] + bytes(20), "can't be decompressed"),
        (lambda blocks: HEADER.pack(0, 0, 0, 0), "no block of"),
    ],
)
def test_what_is_no_delta_of_a_tensor_is_found_out(change: Callable[[bytes], bytes], reason: str):
    old = torch.arange(400).bfloat16()
    blocks = encode(old, old * 3, 0)
    with pytest.raises(Damaged, match=reason):
        apply(memoryview(change(blocks)), old.clone(), "w")


# From trainer to server, in one process


class Trainer:
    """A model whose policies are published as bfloat16, and servers of it."""

    def __init__(self, group: RankGroup, model: Path, run: Path, transport: str, url: str = ""):
        self.group, self.folder, self.transport, self.url = group, model, transport, url
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.run = RunDirectory(run)
        self.step = 0
        self.start()

    def start(self) -> None:
        """As a new process of the attempt."""
        served = Served(
            partial(weights, self.model),
            published_dtypes(self.model, torch.bfloat16),
            config_of(self.model, torch.bfloat16),
        )
        transport = TRANSPORTS[self.transport, "delta"](self.group, served)
        store = PolicyStore(self.url, self.run.versions) if self.url else None
        self.publisher = VersionPublisher(self.run, ATTEMPT, self.group, transport, self.step, store=store)

    def publish(self, change: float = 1e-4, *, last: bool = False) -> str:
        """Take a step, and publish the policy; returns its folder."""
        self.publisher.before_update()
        draw = torch.Generator().manual_seed(self.step)
        self.step += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(change * torch.randn(parameter.shape, generator=draw).sign())
        self.publisher.publish(self.step, save=False, last=last)
        self.publisher.finish()
        return self.where

    @property
    def where(self) -> str:
        """What servers are told."""
        folder = self.run.versions.folder(self.step)
        return read_json(folder / "stored.json")["url"] if self.url else str(folder)

    @property
    def is_whole(self) -> bool:
        return (self.run.versions.folder(self.step) / "model.safetensors").exists()

    @property
    def published(self) -> Tensors:
        """The policy as servers have to have it, but for large tensors in the type of a float32 server."""
        return {name: tensor.bfloat16().clone() for name, tensor in weights(self.model).items()}

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.published.values())

    def serve(self, server: Staging) -> int:
        """Give a server the newest policy; returns the bytes that it has read or received."""
        with server.prepare(self.where) as staged:
            assert staged.is_prepared
            assert_same(mapped(staged), self.published)
            sums = staged.update_info["plan"]["sums"]
        assert server._held.digest in (digest_of(sums), "" if self.is_whole else None)
        return staged.came

    def follow(self, server: Staging, policies: int, change: float = 1e-4) -> int:
        """Publish so many policies, and give a server each; returns the bytes of the last one."""
        came = 0
        for _ in range(policies):
            self.publish(change)
            came = self.serve(server)
        return came


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for headers of files to be small in comparison."""
    folder = tmp_path_factory.mktemp("model")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.1}
    config = AutoConfig.for_model("qwen3", **size, **heads, tie_word_embeddings=True, dtype="float32")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def trainer(
    group: RankGroup, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Trainer]:
    with contextlib.ExitStack() as stack:
        url = ""
        if request.param == "store":
            stack.enter_context(s3_bucket(tmp_path / "s3"))
            url = "s3://bucket/run/policies"
        trainer = Trainer(group, model, tmp_path / "run", request.param, url)
        yield trainer
        trainer.publisher.close()


def server(trainer: Trainer, available: int = 1 << 30) -> Staging:
    return staging(trainer.folder, torch.bfloat16, available)


either = pytest.mark.parametrize("trainer", ["files", "network"], indirect=True)
through_store = pytest.mark.parametrize("trainer", ["store"], indirect=True)
in_files = pytest.mark.parametrize("trainer", ["files"], indirect=True)
over_network = pytest.mark.parametrize("trainer", ["network"], indirect=True)


@either
def test_only_what_has_changed_is_sent_and_every_bit_is_there(trainer: Trainer):
    """From the second policy on in files, and over the network: whole ones are read once, to be kept."""
    one = server(trainer)
    for step in range(1, 5):
        trainer.publish()
        came = trainer.serve(one)
        if step > 2:
            assert 0 < came < 0.2 * trainer.size
    assert trainer.serve(one) == 0, "it has that policy"
    trainer.publish(0.0)
    assert trainer.serve(one) < 600, "nothing has changed: headers of files at most"
    assert trainer.serve(server(trainer)) >= trainer.size, "a server that joins"


@either
def test_a_server_that_missed_a_policy_comes_to_the_same_bits(trainer: Trainer):
    """Over the network it is sent all of them; in files it applies what it lacks."""
    one = server(trainer)
    trainer.follow(one, 2)
    trainer.publish()
    trainer.publish()
    came = trainer.serve(one)
    assert came == trainer.size if trainer.transport == "network" else came < 0.4 * trainer.size
    assert trainer.follow(one, 1) < 0.2 * trainer.size


@either
def test_a_new_trainer_process_sends_a_whole_policy_first(trainer: Trainer):
    one = server(trainer)
    trainer.follow(one, 2)
    trainer.publisher.close()
    trainer.start()
    trainer.serve(one)
    assert trainer.follow(one, 1) >= trainer.size
    assert trainer.follow(one, 2) < 0.2 * trainer.size


@either
def test_a_server_that_has_the_policies_of_another_attempt_comes_to_the_right_bits(trainer: Trainer):
    """After a rewind versions have numbers that the server has seen before."""
    one = server(trainer)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.follow(one, 3)
    trainer.publisher.close()
    trainer.run.versions.clear()
    trainer.model.load_state_dict(before)
    trainer.step = 0
    trainer.start()
    for _ in range(3):
        trainer.publish(3e-4)
    trainer.serve(one)
    trainer.follow(one, 1, 3e-4)


@either
def test_a_wrong_word_in_the_server_is_noticed_and_all_is_sent(trainer: Trainer):
    """Whatever the delta is applied to: the checksums are those of the trainer's values."""
    one = server(trainer)
    trainer.follow(one, 3)
    next(iter(one._held.tensors.values())).view(torch.int16).view(-1)[3] ^= 1
    assert trainer.follow(one, 1) >= trainer.size
    assert trainer.follow(one, 1) < 0.2 * trainer.size


@either
def test_a_server_without_room_for_a_copy_leaves_it_to_its_workers(trainer: Trainer):
    """They come to the same bits, layer by layer, and keep nothing."""
    one = server(trainer, available=0)
    for _ in range(3):
        trainer.publish()
        with one.prepare(trainer.where) as staged:
            assert staged.is_prepared == trainer.is_whole
        policy = one._reader.open(trainer.where)
        got = {name: tensor.clone() for part in policy.parts for name, tensor in part.items()}
        assert_same(got, trainer.published)
    assert one._held.nbytes == 0


@either
def test_large_tensors_of_a_server_with_another_type_are_cast(trainer: Trainer):
    one = staging(trainer.folder, torch.float32)
    for step in range(1, 4):
        trainer.publish()
        with one.prepare(trainer.where) as staged:
            got = mapped(staged)
        for name, tensor in trainer.published.items():
            assert torch.equal(got[name].float(), tensor.float()), (step, name)
            assert got[name].dtype == (torch.float32 if tensor.numel() >= 500 else torch.bfloat16)


@either
def test_the_last_policy_is_in_files_and_a_policy_that_is_no_delta_frees_the_copy(trainer: Trainer):
    one = server(trainer)
    trainer.follow(one, 2)
    assert one._held.nbytes == trainer.size
    trainer.publish(last=True)
    assert_same(load_file(Path(trainer.where) / "model.safetensors"), trainer.published)
    with one.prepare(trainer.where) as staged:
        assert_same(mapped(staged), trainer.published)
    assert one._held.nbytes == 0


# The chain in files


@in_files
def test_whole_versions_come_regularly_and_what_they_replace_goes(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
):
    """What the newest one is made of stays, whoever has it; the orchestrator removes the others."""
    monkeypatch.setattr(delta_transports, "WHOLE_EVERY", 4)
    versions, late = trainer.run.versions, []
    for step in range(1, 10):
        trainer.publish()
        versions.forget_before(step)
        whole = 1 + (step - 1) // 4 * 4
        kept = sorted(path.name for path in versions.path.glob("v*") if path.is_dir())
        assert kept == [f"v{n}" for n in range(whole, step + 1)]
        assert versions.all_announced(ATTEMPT) == [step]
        assert ("model.safetensors" in [path.name for path in Path(trainer.where).iterdir()]) == (
            step == whole
        )
        if step != whole:
            late.append(trainer.serve(server(trainer)))
    assert late[0] < late[1] < late[2]


@in_files
def test_deltas_as_large_as_a_policy_are_followed_by_a_whole_one(trainer: Trainer):
    for step in range(1, 8):
        trainer.publish(10.0)
        names = [path.name for path in Path(trainer.where).iterdir()]
        assert ("model.safetensors" in names) == (step in (1, 4, 7)), step
        trainer.serve(server(trainer)) if step not in (1, 4, 7) else None


@in_files
def test_a_damaged_delta_is_never_served(trainer: Trainer):
    """Nor is one after it; the server takes the next policy that is whole."""
    one = server(trainer)
    trainer.publish()
    trainer.publish()
    trainer.serve(one)
    trainer.publish()
    file = Path(trainer.where) / "delta-0.safetensors"
    blocks = load_file(file)
    name = max(blocks, key=lambda name: len(blocks[name]))
    of_another = encode(torch.zeros(8).bfloat16(), torch.ones(8).bfloat16(), 0)
    save_file(blocks | {name: torch.frombuffer(bytearray(of_another), dtype=torch.uint8)}, file)
    with pytest.raises(Altered, match="not the one that the trainer published"):
        one.prepare(trainer.where)
    file.write_bytes(b"torn")
    with pytest.raises(Altered, match="delta-0"):
        one.prepare(trainer.where)
    trainer.publish()
    with pytest.raises(Altered):
        one.prepare(trainer.where)
    trainer.publisher.close()
    trainer.start()
    trainer.publish()
    with one.prepare(trainer.where) as staged:
        assert_same(mapped(staged), trainer.published)


@in_files
def test_a_chain_with_another_or_no_beginning_is_refused(trainer: Trainer):
    trainer.publish()
    trainer.publish()
    first = trainer.run.versions.folder(1)
    sums = read_checksums(first)
    (first / "checksums.json").write_text(json.dumps(sums | {next(iter(sums)): 7}))
    with pytest.raises(Altered, match=r"not what the delta in .*v2 is relative to"):
        server(trainer).prepare(trainer.where)
    first.rename(first.with_name("v77"))
    with pytest.raises(Altered, match="v1: is not there"):
        server(trainer).prepare(trainer.where)
    note = Path(trainer.where) / "delta.json"
    note.write_text(note.read_text().replace('"v1"', '"../../elsewhere"'))
    with pytest.raises(Altered, match="is not the name of a version's folder"):
        server(trainer).prepare(trainer.where)


# Through an object store


SMALL = 1e-6
"""A change whose delta is a small part of a policy."""


def bucket_of(trainer: Trainer) -> Path:
    return trainer.run.path.parent / "s3" / "bucket" / "run" / "policies"


def stored(trainer: Trainer) -> list[str]:
    """The versions of which the object store has anything."""
    return sorted(folder.name for folder in bucket_of(trainer).glob("*/*"))


def file_of(trainer: Trainer, name: str) -> Path:
    """The object of a file of the newest version."""
    return next(bucket_of(trainer).glob(f"*/v{trainer.step}/{name}"))


@pytest.mark.slow
@through_store
def test_a_server_elsewhere_downloads_what_has_changed(trainer: Trainer):
    """To the bit, once; versions whose folders are gone leave the object store, and nothing stays behind."""
    one = server(trainer)
    assert trainer.follow(one, 1) > trainer.size
    assert trainer.follow(one, 1, SMALL) < 0.3 * trainer.size, "the first version is still here"
    assert trainer.follow(one, 4, SMALL) < 0.3 * trainer.size
    one.prepare(trainer.where).__exit__()
    assert trainer.serve(one) < 0.1 * trainer.size, "it has this very policy"
    trainer.publish(SMALL)
    assert trainer.follow(one, 1, SMALL) < 0.6 * trainer.size, "two deltas"
    assert trainer.serve(server(trainer)) > trainer.size, "a new server: the whole one and all deltas"
    assert stored(trainer) == [f"v{step}" for step in range(1, 9)]
    trainer.publisher.close()
    trainer.start()
    trainer.publish()
    trainer.run.versions.forget_before(trainer.step)
    assert trainer.follow(one, 1, SMALL) < 1.1 * trainer.size, "a new process begins with a whole version"
    assert set(stored(trainer)) == {"v9", "v10"}


@through_store
def test_damage_in_the_object_store_is_never_served(trainer: Trainer):
    """What is missing in a server is asked for in full; what the object store lacks, too, is refused."""
    one, other = server(trainer), server(trainer)
    trainer.follow(one, 3)
    trainer.serve(other)
    trainer.publish()
    file = file_of(trainer, "delta-0.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Altered, match=r"delta-0.safetensors: bytes 0 to \d+ are not those that the trainer"):
        one.prepare(trainer.where)
    file.write_bytes(content[:-9])
    with pytest.raises(Altered, match=r"delta-0.safetensors: bytes 0 to \d+ are not those"):
        one.prepare(trainer.where)
    file.unlink()
    with pytest.raises(Altered, match=r"delta-0.safetensors: is not there"):
        one.prepare(trainer.where)
    file.write_bytes(content)
    assert trainer.serve(one) > trainer.size, "it has given up what it had"
    other._held.tensors["model.norm.weight"][0] += 1
    assert trainer.serve(other) > trainer.size, "a wrong word in a server: all of it comes again"
    trainer.publish()
    listed = file_of(trainer, "policy.json")
    for wrong in (b"{", b'{"../v1/model.safetensors": {"size": 0, "crc64nvme": []}}'):
        listed.write_bytes(wrong)
        with pytest.raises(Altered, match=r"policy\.json: "):
            one.prepare(trainer.where)
    listed.unlink()
    with pytest.raises(Altered, match=f"v{trainer.step}: is not there"):
        one.prepare(trainer.where)
    trainer.publisher.close()
    trainer.start()
    assert trainer.follow(one, 1) > trainer.size


@through_store
def test_a_version_that_was_never_announced_leaves_the_object_store(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
):
    """As after a kill of the trainer between its files and their list; and an object store that is away is
    waited for."""
    trainer.publish()
    monkeypatch.setenv("CAIRN_FAULT", "policy.stored_files:EIO@1")
    with pytest.raises(OSError, match="Input/output"):
        trainer.publish()
    assert stored(trainer) == ["v1", "v2"]
    assert not list(bucket_of(trainer).glob("*/v2/policy.json"))
    monkeypatch.delenv("CAIRN_FAULT")
    trainer.start()
    tried, put = [], Objects.put_folder

    def away(*arguments: Any) -> Any:
        tried.append(1)
        if len(tried) < 3:
            raise TransientError("nobody answers")
        return put(*arguments)

    monkeypatch.setattr(Objects, "put_folder", away)
    monkeypatch.setattr(policy_store, "POLL_SECONDS", 0.01)
    trainer.step = 1
    trainer.publish()
    trainer.serve(server(trainer))
    assert len(tried) == 3
    assert stored(trainer) == ["v1", "v2"], "those of the earlier process are gone"


@through_store
def test_a_server_waits_for_an_object_store_that_is_away(trainer: Trainer, monkeypatch: pytest.MonkeyPatch):
    """And refuses for good what it may not read."""
    monkeypatch.setattr("cairn.policy.stored.RETRY_SECONDS", 0.1)
    trainer.publish()
    for error, raised in ((TransientError, NotThere), (RemoteError, UnusableWeights)):

        def fail(self: Any, name: str, error: type[Exception] = error) -> bytes:
            raise error("no")

        with monkeypatch.context() as patch:
            patch.setattr("cairn.run.object_store.ObjectReader.get", fail)
            with pytest.raises(raised, match="no"):
                server(trainer).prepare(trainer.where)
    trainer.serve(server(trainer))


# Over the network


@over_network
def test_a_delta_is_there_for_whoever_asks_late_and_holds_up_no_update(trainer: Trainer):
    """The tensors of the step may change: nothing of the delta is in them."""
    one, other = server(trainer), server(trainer)
    trainer.publish()
    trainer.serve(one)
    trainer.publish()
    expected = trainer.published
    trainer.publisher.before_update()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1)
    with one.prepare(trainer.where) as staged:
        assert_same(mapped(staged), expected)
    with pytest.raises(Gone):
        other.prepare(trainer.where)


# Settings


def test_adapters_are_not_sent_as_deltas():
    for serve in ("adapter", "unmerged"):
        with pytest.raises(ValueError, match=f'"{serve}" needs weight_encoding = "full"'):
            TrainerConfig(lora=LoraConfig(serve=serve), weight_encoding="delta")
    TrainerConfig(lora=LoraConfig(serve="merged"), weight_encoding="delta")


def test_policies_for_servers_elsewhere_need_an_object_store():
    """Below whose URL they lie; the policy that a run begins with goes there as well."""
    with pytest.raises(ValueError, match=r'weight_transport = "store" needs --ckpt.remote, such as'):
        TrainerConfig(weight_transport="store")
    config = TrainerConfig(weight_transport="store", ckpt=CkptConfig(remote="s3://bucket/run/"))
    assert (config.policies_url, config.publishes_first) == ("s3://bucket/run/policies", True)
    assert config.model_copy(update={"weight_transport": "files"}).policies_url is None
