"""Steps in Azure's store, against Microsoft's emulator Azurite, and in Google's, against a small stand-in."""

import base64
from collections.abc import Iterator

import numpy as np
import pytest
from clouds import azure_server, google_server
from stores import make_step

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.store import CheckpointStore
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.remote.client.objects import Exists, probe
from cairn.remote.client.upload_body import Sent
from cairn.run.errors import CairnError

SERVERS = {"az": azure_server, "gs": google_server}
LARGE = np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 12345)
FILES = {"model/model.safetensors": LARGE, "trainer/state.json": b"{}", "model/empty": b""}


@pytest.fixture(scope="module", params=SERVERS)
def scheme(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with a container `box`; the environment leads to it."""
    folder = tmp_path_factory.mktemp(request.param)
    with SERVERS[request.param](folder) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield request.param


@pytest.fixture
def remote(scheme: str, request: pytest.FixtureRequest) -> RemoteStore:
    """A remote store without steps."""
    return RemoteStore(
        Objects(f"{scheme}://box/{request.node.name.partition('[')[0]}/a run", retry_seconds=5)
    )


@pytest.mark.slow
def test_a_step_goes_there_and_comes_back(remote: RemoteStore, tmp_path):
    """Byte for byte; a file larger than a part is sent in parts, and equal content is copied there."""
    folder, manifest = make_step(tmp_path, 4, FILES)
    remote.put(folder, manifest, Sent(tmp_path / "sent_4", manifest))
    again, newer = make_step(tmp_path, 5, {**FILES, "trainer/state.json": b"[]"})
    (again / "model/model.safetensors").unlink()  # so it can only be copied
    remote.put(again, newer, Sent(tmp_path / "sent_5", newer))
    assert remote.steps() == [4, 5]
    assert remote.verify(4) == manifest
    back = remote.fetch(5, CheckpointStore(tmp_path / "elsewhere"))
    assert {name: (back / name).read_bytes() for name in FILES} == {**FILES, "trainer/state.json": b"[]"}
    assert [row["step"] for row in remote.summaries()] == [4, 5]
    remote.delete(4)
    assert remote.steps() == [5]
    assert not [name for name, _ in remote.objects.list() if name.startswith("step_4/")]
    assert remote.set_aside_after(4, "branch_1") == [5]
    assert remote.steps() == []
    assert remote.objects.get("abandoned/branch_1/step_5.json") == newer.to_json()


def test_an_upload_that_was_cut_goes_on(remote: RemoteStore, tmp_path):
    """There is no step before its manifest; files that were sent are not read again."""
    folder, manifest = make_step(tmp_path, 4, FILES)

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.put(folder, manifest, Sent(tmp_path / "sent", manifest), check=end)
    assert remote.steps() == []
    (folder / "model/model.safetensors").unlink()
    remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    assert remote.verify(4) == manifest


def test_what_nobody_owns_is_found(remote: RemoteStore, tmp_path):
    """What a deletion has left that was cut, and no step that is there."""
    for step in (4, 5):
        folder, manifest = make_step(tmp_path, step, {"a": b"1"})
        remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    remote.objects.delete(["committed/step_4.json"])
    assert [(left.step, left.names) for left in remote.leftovers()] == [
        (4, ("step_4/a", "step_4/manifest.json"))
    ]


def test_nobody_replaces_what_commits_a_step(remote: RemoteStore, tmp_path):
    """The condition is the store's: of two that put it, one is refused; the same content again is right."""
    folder, manifest = make_step(tmp_path / "one", 4, FILES)
    remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    remote.objects.put_new("committed/step_4.json", manifest.to_json())
    with pytest.raises(Exists):
        remote.objects.put_new("committed/step_4.json", b"{}")
    other, its = make_step(tmp_path / "two", 4, {"a": b"1"}, branch="branch_2")
    with pytest.raises(CheckpointError, match="has another step 4"):
        remote.put(other, its, Sent(tmp_path / "its", its))
    assert remote.verify(4) == manifest


def test_damage_there_is_found(remote: RemoteStore, tmp_path):
    """An object of the right size with another content, and one that is missing."""
    folder, manifest = make_step(tmp_path, 4, {"a": b"12345"})
    remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    remote.objects.put("step_4/a", b"12346")
    with pytest.raises(Damaged, match="step_4/a: "):
        remote.verify(4)
    remote.objects.delete(["step_4/a", "step_4/a"])
    with pytest.raises(Damaged, match="step_4/a: is missing"):
        remote.verify(4)


def test_the_probe(remote: RemoteStore, scheme: str, monkeypatch: pytest.MonkeyPatch):
    """It leaves nothing where all is well; else it says what to do, without a secret, and without waiting."""
    probe(remote.objects, "me")
    assert list(remote.objects.list()) == []
    with pytest.raises(RemoteError, match="there is no such object, or no such bucket"):
        probe(Objects(f"{scheme}://nowhere/run", retry_seconds=1), "me")
    if scheme != "az":
        return  # the stand-in lets everybody in
    key = base64.b64encode(b"a wrong secret").decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    with pytest.raises(RemoteError, match="access was denied; check the credentials") as error:
        probe(Objects("az://box/run", retry_seconds=600), "me")  # longer than a test may take
    assert key not in str(error.value)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    with pytest.raises(CairnError, match="the environment has no credentials"):
        probe(Objects("az://box/run", retry_seconds=1), "me")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(CairnError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        Objects("az://box/run")
