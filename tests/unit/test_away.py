"""Steps whose tensors stay in an object store, where each rank reads its own ranges."""

from collections.abc import Iterator
from pathlib import Path

import draws
import pytest
import torch
from runs import flip
from safetensors.torch import load_file, save
from stores import BadNetwork, make_step, s3_server

from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest
from cairn.checkpoint.step_folder import StepFolder, verify
from cairn.checkpoint.tensors.remote_ranges import away_in_step
from cairn.checkpoint.tensors.sharded_files import load_step, read_tensors
from cairn.remote import Objects, RemoteStore
from cairn.remote.client.upload_body import Sent
from cairn.remote.header_download import bring_beginnings

FILES = {
    "model/model.safetensors": "model/model",
    "trainer/optimizer.safetensors": "trainer/optimizer",
    "trainer/critic/model.safetensors": "trainer/critic/model",
}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Values of several data types: one larger than a chunk, small ones, and an empty one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "large": draw(1200, 4096),
        "half": draw(300, 1000, dtype=torch.bfloat16),
        "small": draw(3),
        "empty": draw(0, 4),
        "odd": draw(601, 513),
    }


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BadNetwork]:
    """The way to a real S3 server, which counts; the environment leads there."""
    with s3_server(tmp_path_factory.mktemp("s3")) as environment, pytest.MonkeyPatch.context() as patch:
        made = BadNetwork(environment["AWS_ENDPOINT_URL"])
        for name, value in (environment | {"AWS_ENDPOINT_URL": made.url}).items():
            patch.setenv(name, value)
        yield made
        made.close()


@pytest.fixture
def step(network: BadNetwork, tmp_path: Path) -> Iterator[tuple[RemoteStore, Path, Manifest]]:
    """A step there and here, and its manifest."""
    files = {name: save(tensors(seed), {"format": "pt"}) for seed, name in enumerate(FILES)}
    folder, manifest = make_step(tmp_path / "here", 7, {**files, "trainer/state.json": b'{"seed": 3}'})
    remote = RemoteStore(Objects(f"s3://bucket/{tmp_path.name}", retry_seconds=1))
    remote.put(folder, manifest, Sent(tmp_path / "note", manifest))
    yield remote, folder, manifest
    network.mood = None


def blank() -> dict[str, dict[str, torch.Tensor]]:
    return {
        stem: {n: torch.full_like(t, -1, dtype=torch.float32) for n, t in tensors(0).items()}
        for stem in FILES.values()
    }


@pytest.mark.slow
def test_a_rank_loads_from_there(step: tuple[RemoteStore, Path, Manifest], tmp_path: Path):
    """The same values as from the local folder; nothing but small files and headers is on the disk."""
    remote, folder, manifest = step
    away = bring_beginnings(remote, manifest, tmp_path / "away")
    loaded, wanted = blank(), blank()
    assert load_step(away, loaded) == load_step(folder, wanted) == manifest
    for stem, named in wanted.items():
        assert all(torch.equal(loaded[stem][name], value) for name, value in named.items())
    assert sum(path.stat().st_size for path in away.rglob("*") if path.is_file()) < 100_000
    assert StepFolder(away).trainer_state() == StepFolder(folder).trainer_state()


def test_only_what_is_asked_for_is_read(
    step: tuple[RemoteStore, Path, Manifest], network: BadNetwork, tmp_path: Path
):
    """Half of a tensor costs half of its bytes, and files that are brought whole cost no more there."""
    remote, folder, manifest = step
    network.bytes_down.clear()
    away = bring_beginnings(remote, manifest, tmp_path / "away", whole=lambda name: name.startswith("model/"))
    path = f"/bucket/{tmp_path.name}/step_7/"
    size = manifest.files["model/model.safetensors"].size
    assert network.bytes_down[f"{path}model/model.safetensors"] == size
    assert network.bytes_down[f"{path}trainer/optimizer.safetensors"] <= 64 << 10
    network.bytes_down.clear()
    half = torch.empty(600 * 4096)
    StepFolder(away).tensors("trainer/optimizer")["large"].fill(600 * 4096, half)
    there = load_file(folder / "trainer/optimizer.safetensors")["large"]
    assert torch.equal(half, there[600:].flatten())
    assert network.bytes_down == {f"{path}trainer/optimizer.safetensors": half.nbytes}
    targets = {name: torch.empty_like(value) for name, value in tensors(0).items()}
    read_tensors(away / "model", targets, "model")
    assert sum(network.bytes_down.values()) == half.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("where", ["value", "header"])
def test_damage_there_is_found(step: tuple[RemoteStore, Path, Manifest], tmp_path: Path, where: str):
    """By the manifest's checksums, like damage on a disk."""
    remote, _, manifest = step
    name = "step_7/trainer/optimizer.safetensors"
    content = bytearray(remote.objects.get(name) or b"")
    if where == "header":
        content[content.index(b"odd") + 1] ^= 1
    else:
        content[-3] ^= 1
    remote.objects.put(name, bytes(content))
    away = bring_beginnings(remote, manifest, tmp_path / "away")
    with pytest.raises(Damaged, match=r"optimizer.safetensors: changed between bytes"):
        load_step(away, blank())


@pytest.mark.slow
def test_a_store_that_fails_is_no_wrong_value(
    step: tuple[RemoteStore, Path, Manifest], network: BadNetwork, tmp_path: Path
):
    """The error names the object."""
    remote, _, manifest = step
    away = bring_beginnings(remote, manifest, tmp_path / "away")
    remote.objects.delete(["step_7/trainer/optimizer.safetensors"])
    with pytest.raises(Damaged, match=rf"{remote}/step_7/trainer/optimizer.safetensors: there is no such"):
        load_step(away, blank())


@pytest.mark.slow
def test_who_does_not_know_sees_damage(step: tuple[RemoteStore, Path, Manifest], tmp_path: Path):
    """A folder of beginnings never passes for a whole step, and damaged local headers are found."""
    remote, _, manifest = step
    away = bring_beginnings(remote, manifest, tmp_path / "away")
    with pytest.raises(Damaged, match=r"has \d+ bytes, but should have"):
        verify(away)
    header = away / "trainer/optimizer.safetensors"
    assert away_in_step(away)["trainer/optimizer.safetensors"].size > header.stat().st_size
    flip(header, header.read_bytes().index(b"small"))
    with pytest.raises(CheckpointError):
        load_step(away, blank())


@draws.seldom
def test_packed_steps_have_no_ranges(step: tuple[RemoteStore, Path, Manifest], tmp_path: Path):
    """They are refused, so that they are downloaded whole."""
    remote, _, manifest = step
    packed = manifest.model_copy(
        update={"contents": {"trainer/x.safetensors": manifest.files[next(iter(FILES))]}}
    )
    with pytest.raises(CheckpointError, match="must be downloaded whole"):
        bring_beginnings(remote, packed, tmp_path / "away")
