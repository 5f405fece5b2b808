"""Policies that a server computes as adapters beside its model: what it takes, keeps and drops."""

import asyncio
import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import DEADLINE
from safetensors.torch import load_file, save_file
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

from cairn.checkpoint.checksums import FileChecksum
from cairn.checkpoint.step_folder import BASE_RECORD
from cairn.config.inference import InferenceConfig
from cairn.inference.plugin.adapter_modules import AdapterModules
from cairn.inference.plugin.adapters import AdapterCopies, Unmerged
from cairn.inference.plugin.middleware import CountingRequests, NamedOnly, OpenRequests
from cairn.inference.plugin.updates import NotTaken, PolicyUpdate, WeightUpdate
from cairn.inference.plugin.weight_files import UnusableWeights
from cairn.inference.server import Server
from cairn.inference.vllm_command import HELD, copies_folder
from cairn.model.adapters import PREFIX, Base
from cairn.policy.checksums import checksum, write_checksums
from cairn.policy.errors import Altered

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
SHAPE = {"rank": 2, "alpha": 4, "rslora": False}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the server was started with."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({f"{name}.weight": torch.ones(4, 4) for name in LAYERS}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The adapter's, with their checksums."""
    save_file(tensors, folder / "adapter_model.safetensors")
    write_checksums(folder, {name: checksum(tensor) for name, tensor in tensors.items()})


def adapter(folder: Path, base: Path, scale: float = 1.0, **about: Any) -> Path:
    """An adapter of rank 2, as a trainer publishes it."""
    folder.mkdir(exist_ok=True)
    files = {file.name: FileChecksum(file.stat().st_size) for file in base.glob("*.safetensors")}
    record = Base.of("base", base, files)
    record.lora.update(SHAPE)
    (folder / BASE_RECORD).write_bytes(record.to_json())
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, **about}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    pairs = {f"{PREFIX}{name}.lora_A.weight": torch.full((2, 4), scale) for name in LAYERS}
    pairs |= {f"{PREFIX}{name}.lora_B.weight": torch.full((4, 2), scale) for name in LAYERS}
    write_tensors(folder, pairs)
    return folder


def copies_of(model: Path, root: Path) -> AdapterCopies:
    return AdapterCopies(str(model), torch.float32, 8, copies_folder(secrets.token_hex(4), root))


def test_a_copy_outlives_what_the_trainer_writes_over(model: Path, tmp_path: Path):
    """Each is under a path of its own, also of the same folder."""
    copies = copies_of(model, tmp_path)
    folder = adapter(tmp_path / "v1", model)
    first = copies.add(str(folder))
    adapter(folder, model, scale=2.0)
    second = copies.add(str(folder))
    assert first.modules == second.modules == set(LAYERS)
    for copy, scale in ((first, 1.0), (second, 2.0)):
        found = load_file(copy.folder / "adapter_model.safetensors")
        assert {tensor.unique().item() for tensor in found.values()} == {scale}
    copies.remove(first)
    assert not first.folder.exists()


def test_copies_of_killed_servers_are_deleted_and_of_others_kept(model: Path, tmp_path: Path):
    """A running server has its folder locked."""
    running = copies_of(model, tmp_path).add(str(adapter(tmp_path / "v1", model)))
    left = tmp_path / "cairn-policies-left"
    starting = tmp_path / "cairn-policies-starting"
    for folder in (left, starting):
        folder.mkdir()
    (left / HELD).touch()
    copies_of(model, tmp_path)
    assert not left.exists()
    assert starting.exists()
    assert running.folder.exists()


def test_copies_go_with_the_server_that_is_killed_to_stop_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As `rl` stops the one that it has started, which has no time to delete them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = Server(InferenceConfig(), str(model), tmp_path / "log", deaf=True)
    server._epoch = "e"
    server._process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    copy = AdapterCopies(str(model), torch.float32, 8, copies_folder("e")).add(
        str(adapter(tmp_path / "v1", model))
    )
    assert copy.folder.is_relative_to(tmp_path)
    server.stop()
    assert not copy.folder.parent.exists()


def damaged(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, folder / "adapter_model.safetensors")


def without_a_counterpart(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"{PREFIX}{LAYERS[0]}.lora_B.weight"]
    write_tensors(folder, tensors)


def trained_in_full(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    write_tensors(folder, tensors | {f"{PREFIX}lm_head.weight": torch.ones(4, 4)})


def not_finite(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = torch.nan
    write_tensors(folder, tensors)


def configured(**about: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **about}))

    return change


def whole(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def of_no_run(folder: Path) -> None:
    (folder / BASE_RECORD).unlink()


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (damaged, Altered, "is not the one that the trainer wrote"),
        (without_a_counterpart, UnusableWeights, "has no counterpart"),
        (
            trained_in_full,
            UnusableWeights,
            r'lm_head.weight, which is trained in full.*lora.serve = "merged"',
        ),
        (not_finite, UnusableWeights, "holds NaN or infinity"),
        (configured(lora_alpha=8), UnusableWeights, "has alpha 8, its run 4"),
        (configured(use_rslora=True), UnusableWeights, "has rslora True, its run False"),
        (configured(use_dora=True), UnusableWeights, "use_dora = True"),
        (configured(r=4), UnusableWeights, "matrices of rank 2, and adapter_config.json has r = 4"),
        (whole, UnusableWeights, "holds no adapter, and this server computes adapters beside the model"),
        (of_no_run, UnusableWeights, "does not say which base"),
    ],
)
def test_what_would_be_computed_otherwise_than_trained_is_refused(
    change: Callable[[Path], None], kind: type[Exception], reason: str, model: Path, tmp_path: Path
):
    """Before vLLM sees it."""
    folder = adapter(tmp_path / "v1", model)
    copies = copies_of(model, tmp_path)
    change(folder)
    with pytest.raises(kind, match=reason):
        copies.add(str(folder))


def test_an_adapter_is_refused_beside_another_model_or_one_of_a_larger_rank(model: Path, tmp_path: Path):
    """Of which vLLM notices only the rank."""
    folder = adapter(tmp_path / "v1", model)
    other = tmp_path / "other"
    other.mkdir()
    save_file({f"{name}.weight": torch.zeros(4, 4) for name in LAYERS}, other / "model.safetensors")
    (other / "config.json").write_text("{}")
    with pytest.raises(
        UnusableWeights, match=r"is not the base of the adapter.*start it with the base, inference"
    ):
        copies_of(other, tmp_path).add(str(folder))
    with pytest.raises(UnusableWeights, match="rank 2, and the server was started with --max-lora-rank 1"):
        AdapterCopies(str(model), torch.float32, 1, tmp_path / "copies").add(str(folder))
    copies = copies_of(model, tmp_path)
    save_file({f"{name}.weight": torch.ones(4, 4) for name in LAYERS}, model / "model.safetensors.new")
    (model / "model.safetensors.new").rename(model / "model.safetensors")
    with pytest.raises(UnusableWeights, match="was changed since the server was started with it"):
        copies.add(str(folder))


class Engine:
    """vLLM's, as far as adapters are concerned. leaves_out: pairs that it has no layers for."""

    model_config = renderer = input_processor = None

    def __init__(self, leaves_out: int = 0):
        self.errored = False
        lora = SimpleNamespace(max_loras=4)
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"), lora_config=lora)
        self.refusal: Exception | None = None
        self.leaves_out = leaves_out
        self.paths: dict[int, str] = {}

    async def get_weight_version(self) -> str:
        return "default"

    async def add_lora(self, request: Any) -> bool:
        if self.refusal:
            raise self.refusal
        assert not request.load_inplace
        assert request.lora_path not in self.paths.values()
        self.paths[request.lora_int_id] = request.lora_path
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.paths.pop(number, None) is not None

    async def collective_rpc(self, method: str, args: tuple[int]) -> list[list[str]]:
        assert hasattr(AdapterModules, method)
        assert args[0] in self.paths
        return [[f"{name}[0]" for name in LAYERS[self.leaves_out :]]]


def unmerged(model: Path, root: Path, engine: Engine, requests: OpenRequests) -> Unmerged:
    names = [BaseModelPath(name="base", model_path=str(model))]
    models = OpenAIServingModels(engine, names)  # pyright: ignore[reportArgumentType]
    return Unmerged(engine, models, requests, copies_of(model, root))  # pyright: ignore[reportArgumentType]


async def take(updates: Unmerged, folder: Path, version: str) -> str:
    """The name under which requests get the version."""
    update = WeightUpdate(path=str(folder), version=version)
    assert await updates.take(update, PolicyUpdate(version, "")) == await updates.version() == version
    assert updates.adapter
    return updates.adapter


def test_a_version_is_dropped_when_no_request_can_need_it(model: Path, tmp_path: Path):
    """The one before the newest may still be named; older ones live on in what has named them."""

    async def main() -> None:
        engine, requests = Engine(), OpenRequests()
        updates = unmerged(model, tmp_path, engine, requests)
        assert await updates.version() == "default"
        assert updates.adapter is updates.must_name is None
        folder = adapter(tmp_path / "v", model)
        first = await take(updates, folder, "v1")
        in_flight = requests.begin()
        names = [first] + [await take(updates, folder, version) for version in ("v2", "v2", "v3")]
        assert len(set(names)) == 4, "one name for each time"
        named = updates._models.lora_requests
        assert list(named) == updates.must_name == names[-2:]
        await asyncio.sleep(0.05)
        assert len(engine.paths) == 4, "a request in flight may need any of them"
        assert all(Path(path).exists() for path in engine.paths.values())
        gone = [path for path in engine.paths.values() if path not in {n.lora_path for n in named.values()}]
        later = requests.begin()
        requests.end(in_flight)
        async with asyncio.timeout(DEADLINE):
            while updates._dropping:
                await asyncio.sleep(0.01)
        assert set(engine.paths.values()) == {request.lora_path for request in named.values()}
        assert not any(Path(path).exists() for path in gone)
        requests.end(later)

    asyncio.run(main())


def test_runs_that_share_a_server_keep_each_others_policies(model: Path, tmp_path: Path):
    """Two of each run; of more runs than the server has room for, the oldest go."""

    async def main() -> None:
        updates = unmerged(model, tmp_path, Engine(), OpenRequests())
        folder = adapter(tmp_path / "v", model)
        order = ("a::1", "b::1", "a::2", "a::3", "b::2", "c::1", "c::2")
        names = {version: await take(updates, folder, version) for version in order[:5]}
        assert updates.must_name == [names[version] for version in ("b::1", "a::2", "a::3", "b::2")]
        names |= {version: await take(updates, folder, version) for version in order[5:]}
        assert updates.must_name == [names[version] for version in ("a::3", "b::2", "c::1", "c::2")]

    asyncio.run(main())


def test_what_vllm_refuses_or_leaves_out_is_not_served(model: Path, tmp_path: Path):
    """The version before serves on; a dead engine is no refusal, since a new one may take the adapter."""

    async def main() -> None:
        engine = Engine()
        updates = unmerged(model, tmp_path, engine, OpenRequests())
        folder = adapter(tmp_path / "v", model)
        name = await take(updates, folder, "v1")
        engine.leaves_out = 1
        with pytest.raises(NotTaken, match="computes with 1 of the 2 pairs") as caught:
            await take(updates, folder, "v2")
        assert caught.value.code == 422
        engine.refusal = ValueError("no such target module")
        with pytest.raises(NotTaken, match=r'no such target module; lora\.serve = "merged"') as caught:
            await take(updates, folder, "v2")
        assert caught.value.code == 422
        engine.errored = True
        with pytest.raises(NotTaken, match="the engine failed") as caught:
            await take(updates, folder, "v2")
        assert caught.value.code == 500
        assert (await updates.version(), updates.adapter) == ("v1", name)
        assert len(engine.paths) == len(list(updates._copies._folder.glob("[0-9]*"))) == 1

    asyncio.run(main())


def test_a_worker_names_the_pairs_that_it_has_layers_for():
    """Also those of layers that vLLM has made of several, some of which may have no adapter."""
    one = torch.ones(2, 2)
    found = {
        "a.o_proj": LoRALayerWeights("a.o_proj", 2, 4, one, one),
        "a.qkv_proj": PackedLoRALayerWeights(
            "a.qkv_proj", 2, [4, 4, 4], [one, None, one], [one, None, one], [2.0, 2.0, 2.0]
        ),
        "b.o_proj": LoRALayerWeights("b.o_proj", 2, 4, one, one),
    }
    manager = SimpleNamespace(
        modules=dict.fromkeys(("a.o_proj", "a.qkv_proj")),
        get_adapter={3: SimpleNamespace(loras=found)}.get,
    )
    worker = AdapterModules()
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(lora_manager=manager))  # pyright: ignore
    assert worker.cairn_adapter_parts(3) == ["a.o_proj[0]", "a.qkv_proj[0]", "a.qkv_proj[2]"]
    assert worker.cairn_adapter_parts(4) == []


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        ("/inference/v1/generate", {"model": "v2@a"}, 200),
        ("/v1/chat/completions", {"model": "v3@b"}, 200),
        ("/inference/v1/generate", {}, 400),
        ("/v1/completions", {"model": None}, 400),
        ("/v1/completions", {"model": "/models/base"}, 404),
        ("/inference/v1/generate", {"model": "v1@0"}, 404),
        ("/v1/completions", ["not", "an object"], 400),
        ("/tokenize", {}, 200),
    ],
)
def test_on_cpus_a_request_has_to_name_an_adapter(path: str, asked: Any, expected: int):
    """Once there is one, whose kernels would answer it otherwise; the app gets the body as it came."""
    names: list[str] | None = ["v2@a", "v3@b"]
    got: list[Any] = []
    body = json.dumps(asked).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    async def ask() -> int:
        sent: list[Any] = []
        scope = {"type": "http", "method": "POST", "path": path}

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await NamedOnly(app, lambda: names)(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(ask()) == expected
    assert got == ([body] if expected == 200 else [])
    names = None
    assert asyncio.run(ask()) == 200


def test_requests_that_may_generate_are_counted_until_they_end():
    """Those that fail, too."""

    async def main() -> None:
        requests, gate = OpenRequests(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()
            raise ConnectionError

        counting = CountingRequests(app, requests)

        def ask(method: str, path: str) -> asyncio.Task[None]:
            scope = {"type": "http", "method": method, "path": path}
            return asyncio.create_task(counting(scope, None, None))  # pyright: ignore[reportArgumentType]

        tasks = [ask("GET", "/health"), ask("POST", "/cairn/update_weights")]
        await asyncio.sleep(0)
        await requests.ended()
        tasks.append(ask("POST", "/inference/v1/generate"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(requests.ended())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(DEADLINE):
            await waiting

    asyncio.run(main())
