"""What the API process prepares of a policy, and its workers map."""

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import make, make_model
from peft import LoraConfig
from runs import DEADLINE
from safetensors.torch import load_file, save_file
from tiny import write_adapter
from transformers import AutoConfig

from cairn.inference.plugin.staging import Staged, Staging
from cairn.inference.plugin.weight_files import PIECE, Look, UnusableWeights, look_at
from cairn.inference.plugin.weights import PLAN, _begun, _prepared
from cairn.inference.vllm_command import copies_folder
from cairn.model.hub_layout import tensors_in_memory
from cairn.policy.checksums import checksum, write_checksums
from cairn.policy.errors import Altered, NotThere
from cairn.policy.generation import Route
from cairn.policy.sender import WeightSender

Tensors = dict[str, torch.Tensor]
LARGE = 500


def staging(folder: Path, dtype: torch.dtype = torch.float32, available: int = 1 << 30) -> Staging:
    """As in a server of the model in `folder`, of which tensors of 500 values count as large."""
    config: Any = SimpleNamespace(
        hf_config=AutoConfig.from_pretrained(folder),
        dtype=dtype,
        head_dtype=dtype,
        model=str(folder),
        word_embeddings_untied_by_checkpoint=False,
    )
    # Of which nothing is made unless a policy is downloaded.
    return Staging(config, copies_folder(secrets.token_hex(4)), lambda: available, LARGE)


def mapped(staged: Staged) -> Tensors:
    """What a worker gets, to which vLLM sends the plan as a message."""
    info = json.loads(json.dumps(staged.update_info))
    return _prepared(info["path"], PLAN.validate_python(info["plan"]))


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("model"))


def test_files_are_mapped_as_they_are(model: Path):
    expected = load_file(model / "model.safetensors")
    with staging(model, available=0).prepare(str(model)) as staged:
        assert_same(mapped(staged), expected)
        sums = staged.update_info["plan"]["sums"]
        assert sums == {name: checksum(tensor) for name, tensor in expected.items()}
        assert staged.update_info["plan"]["files"] == [str(model / "model.safetensors")]


def test_a_folder_in_transformers_layout_is_mapped_in_the_hubs(tmp_path: Path):
    published = make("qwen3_moe", tmp_path / "hub")
    own = {name: tensor.clone() for name, tensor in tensors_in_memory(make_model("qwen3_moe")).items()}
    save_file(own, published / "own.safetensors")
    expected = load_file(published / "model.safetensors")
    (published / "own.safetensors").rename(published / "model.safetensors")
    assert own.keys() != expected.keys()
    with staging(published).prepare(str(published)) as staged:
        assert_same(mapped(staged), expected)


def test_large_tensors_of_another_type_are_cast_where_that_fits(model: Path):
    """Small ones stay exact: vLLM keeps some of them in a wider type than the model's."""
    files = load_file(model / "model.safetensors")
    large = {name for name, tensor in files.items() if tensor.numel() >= LARGE}
    assert 0 < len(large) < len(files)
    with staging(model, torch.bfloat16).prepare(str(model)) as staged:
        expected = {n: t.to(torch.bfloat16) if n in large else t for n, t in files.items()}
        assert_same(mapped(staged), expected)
        # Checksums of cast tensors are not the published ones.
        assert staged.update_info["plan"]["sums"].keys() == files.keys() - large
        memory = Path(staged.update_info["plan"]["files"][-1])
        assert memory.exists()
    assert not memory.exists()
    size = 2 * sum(files[name].numel() for name in large)
    with staging(model, torch.bfloat16, available=2 * size - 2).prepare(str(model)) as staged:
        assert_same(mapped(staged), files)


def test_a_folder_that_changed_meanwhile_is_refused(model: Path, tmp_path: Path):
    folder = make("qwen3", tmp_path / "model")
    with staging(folder).prepare(str(folder)) as staged:
        (folder / "model.safetensors").unlink()
        with pytest.raises(UnusableWeights, match="was removed or changed while its weights were read"):
            mapped(staged)


# From a trainer's memory


class Sender(WeightSender):
    """Sends; or does not, or garbles the checksums."""

    def __init__(self, tensors: Tensors, how: str = "well"):
        super().__init__(tensors, rank=0, host="127.0.0.1")
        self.how = how
        self.offer(3)

    def _send(self, *arguments: Any) -> dict[str, int]:
        if self.how == "breaks off":
            raise RuntimeError("the trainer dies")
        sums = super()._send(*arguments)
        return {name: value + (self.how == "garbles") for name, value in sums.items()}


def offered(tensors: Tensors, folder: Path, how: str = "well") -> Sender:
    sender = Sender(tensors, how)
    folder.mkdir()
    sender.source(3, [sender.here]).write(folder)
    return sender


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_trainer_sends_is_received_beforehand(model: Path, tmp_path: Path, dtype: torch.dtype):
    tensors = load_file(model / "model.safetensors")
    sender = offered(tensors, tmp_path / "v1")
    with staging(model, dtype).prepare(str(tmp_path / "v1")) as staged:
        sender.close()  # the trainer may go on
        expected = {n: t.to(dtype) if t.numel() >= LARGE else t for n, t in tensors.items()}
        assert_same(mapped(staged), expected)


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [("breaks off", NotThere, "broke off"), ("garbles", Altered, "as it came from the trainer")],
)
def test_a_failed_transfer_changes_nothing(
    model: Path, tmp_path: Path, how: str, error: type[Exception], reason: str
):
    sender = offered(load_file(model / "model.safetensors"), tmp_path / "v1", how)
    with pytest.raises(error, match=reason):
        staging(model).prepare(str(tmp_path / "v1"))
    sender.close()


# From another server that has it from the trainer's memory


class Counting(WeightSender):
    """The trainer's; counts to how many servers it has sent the policy."""

    def __init__(self, tensors: Tensors):
        super().__init__(tensors, rank=0, host="127.0.0.1")
        self.sends = 0
        self.offer(3)

    def _send(self, *arguments: Any) -> dict[str, int]:
        self.sends += 1
        return super()._send(*arguments)


@pytest.fixture
def trainer(model: Path, tmp_path: Path) -> Iterator[Counting]:
    sender = Counting(load_file(model / "model.safetensors"))
    (tmp_path / "v1").mkdir()
    sender.source(3, [sender.here]).write(tmp_path / "v1")
    yield sender
    sender.close()


HERE = Route(children=1, host="127.0.0.1")


def below(parent: Staged, children: int = 0) -> Route:
    """From a server that has the policy, to so many others."""
    assert parent.relay is not None
    return Route(parent.relay, seconds=DEADLINE, children=children, host="127.0.0.1")


def test_a_policy_goes_from_server_to_server(model: Path, trainer: Counting, tmp_path: Path):
    """The trainer has sent it once, and is gone; the memory is free once the last one has it."""
    folder, expected = str(tmp_path / "v1"), load_file(model / "model.safetensors")
    servers = [staging(model) for _ in range(3)]
    first = servers[0].prepare(folder, HERE)
    trainer.close()
    second = servers[1].prepare(folder, below(first, children=1))
    third = servers[2].prepare(folder, below(second))
    assert [one.relayed for one in (first, second, third)] == [False, True, True]
    assert third.relay is None
    assert trainer.sends == 1
    for one in (first, second, third):
        with one as staged:
            assert_same(mapped(staged), expected)
            sums = staged.update_info["plan"]["sums"]
            assert sums == {name: checksum(tensor) for name, tensor in expected.items()}
    for server in servers[:2]:
        sender: Any = server._relay._sender
        sender.withdraw()  # waits until the last one has it
        deadline = time.monotonic() + DEADLINE
        while sender._shares and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not sender._shares
        server._relay.end()


GO = threading.Event()


def broken(how: str, server: Staging) -> None:
    """Something happens to the server from which another one is about to get a policy."""
    sender: Any = server._relay._sender
    if how == "it ends":
        server._relay.end()
    elif how == "a word changes in its memory":
        next(iter(sender._shares.values())).local.view(-1)[:1].add_(1)
    elif how == "it has another policy":
        sender.offer(4)
    elif how == "it dies while it sends":
        sender._send = lambda *_: (_ for _ in ()).throw(RuntimeError("it dies"))
    elif how == "it stops":
        sender._send = lambda *_: GO.wait(DEADLINE)
    elif how == "it gets the next policy while it sends":
        send = sender._send
        sender._send = lambda *arguments: (sender.let_go(0.0), send(*arguments))[1]


@pytest.mark.parametrize(
    "how",
    [
        "it ends",
        "a word changes in its memory",
        "it has another policy",
        "it dies while it sends",
        "it stops",
        "it gets the next policy while it sends",
    ],
)
def test_what_another_server_does_not_hand_on_comes_from_the_trainer(
    model: Path, trainer: Counting, tmp_path: Path, how: str
):
    folder, server = str(tmp_path / "v1"), staging(model)
    with server.prepare(folder, HERE) as first:
        broken(how, server)
        route = replace(below(first), seconds=0.5)
        with staging(model).prepare(folder, route) as second:
            assert not second.relayed
            assert_same(mapped(second), load_file(model / "model.safetensors"))
    assert trainer.sends == 2
    GO.set()
    server._relay.end()
    GO.clear()


def test_only_words_that_are_the_trainers_are_handed_on(model: Path, trainer: Counting, tmp_path: Path):
    """And only from an address that this machine has."""
    with staging(model, torch.bfloat16).prepare(str(tmp_path / "v1"), HERE) as staged:
        assert staged.relay is None
    elsewhere = replace(HERE, host="192.0.2.1")
    with staging(model).prepare(str(tmp_path / "v1"), elsewhere) as staged:
        assert staged.relay is None
    with staging(model).prepare(str(tmp_path / "v1")) as staged:
        assert staged.relay is None


def test_values_that_are_not_finite_are_refused_beforehand(model: Path, tmp_path: Path):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    sender = offered(tensors, tmp_path / "v1")
    with pytest.raises(UnusableWeights, match=r"model\.norm\.weight holds NaN or infinity"):
        staging(model).prepare(str(tmp_path / "v1"))
    sender.close()


def test_what_does_not_fit_is_left_to_the_workers(model: Path, tmp_path: Path):
    tensors = load_file(model / "model.safetensors")
    sender = offered(tensors, tmp_path / "v1")
    size = 4 * sum(tensor.numel() for tensor in tensors.values())
    with staging(model, available=2 * size - 2).prepare(str(tmp_path / "v1")) as staged:
        assert not staged.is_prepared
    sender.close()


def test_a_source_that_sends_nothing_is_found_out_before_layers_are_taken_apart():
    """By workers that receive tensors themselves."""

    def parts(*, sent: int) -> Iterator[Tensors]:
        for i in range(sent):
            yield {"w": torch.tensor(float(i))}
        raise RuntimeError("two ranks on one device")

    with pytest.raises(NotThere, match="two ranks on one device"):
        _begun(parts(sent=0))
    begun = _begun(parts(sent=2))
    assert [next(begun)["w"].item() for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="two ranks") as error:
        next(begun)
    assert not isinstance(error.value, NotThere)


def adapter_of(base: Path, folder: Path) -> tuple[Path, Tensors]:
    """A policy that is an adapter, and the weights that PEFT makes of it."""
    about = LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = write_adapter(base, folder, 1, about)
    sums = {
        name: checksum(values) for name, values in load_file(folder / "adapter_model.safetensors").items()
    }
    write_checksums(folder, sums)
    merged = model.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    return folder, load_file(folder / "merged" / "model.safetensors")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_into_the_base(kind: str, dtype: torch.dtype, tmp_path: Path):
    """Those that are cast beforehand are, and the checksums are those of what the workers get as it came."""
    base = make(kind, tmp_path / "base")
    policy, expected = adapter_of(base, tmp_path / "policy")
    with staging(base, dtype).prepare(str(policy)) as staged:
        found, sums = mapped(staged), staged.update_info["plan"]["sums"]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == (dtype if tensor.numel() >= LARGE else torch.float32)
        near = (
            {"rtol": 1e-2, "atol": 1e-3} if tensor.dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
        )
        torch.testing.assert_close(tensor, expected[name].to(tensor.dtype), **near)
        if tensor.dtype == torch.float32:
            assert sums[name] == checksum(tensor)


def test_an_adapter_that_is_not_the_trainers_or_of_another_base_is_refused(tmp_path: Path):
    """The old weights serve on."""
    base = make("qwen3", tmp_path / "base")
    policy, expected = adapter_of(base, tmp_path / "policy")
    other = make("qwen3", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    server = staging(other)  # the base is where the trainer has it
    for _ in range(2):
        with server.prepare(str(policy)) as staged:
            found = mapped(staged)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    tensors = load_file(policy / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    save_file(tensors, policy / "adapter_model.safetensors")
    with pytest.raises(Altered, match=f"tensor {re.escape(name)} is not the one that the trainer wrote"):
        server.prepare(str(policy))

    policy, _ = adapter_of(base, tmp_path / "again")
    weights = load_file(base / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusableWeights, match="base is not the base of the adapter"):
        server.prepare(str(policy))


# The one pass through each tensor.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, PIECE + 6])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, place: int):
    values = torch.linspace(-1, 1, PIECE + 7).to(dtype)
    assert look_at(values, dtype) == Look(checksum(values), True)
    for odd in (math.nan, math.inf, -math.inf):
        values[place] = odd
        assert look_at(values, dtype) == Look(checksum(values), False)
    values[PIECE // 2] = math.inf  # the two may cancel out
    assert not look_at(values, dtype).is_finite


@pytest.mark.parametrize(
    ("value", "held", "served", "is_finite"),
    [
        (3e38, torch.float32, torch.float32, True),
        (-6e4, torch.float16, torch.float16, True),
        (3e38, torch.bfloat16, torch.bfloat16, True),
        (3.4e38, torch.float32, torch.bfloat16, False),
        (7e4, torch.float32, torch.float16, False),
        (6e4, torch.float32, torch.float16, True),
        (1e300, torch.float64, torch.float32, False),
    ],
)
def test_large_values_are_finite_unless_the_servers_type_rounds_them_to_infinity(
    value: float, held: torch.dtype, served: torch.dtype, is_finite: bool
):
    """Also those whose sum is too large for their type."""
    values = torch.full((100,), value, dtype=held)
    assert look_at(values, served) == Look(checksum(values), is_finite)
