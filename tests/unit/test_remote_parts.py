"""Large files go to S3 in parts, and those that have arrived are not sent again."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
from runs import DEADLINE
from stores import BadNetwork, Upload, make_step, s3_bucket

from cairn.checkpoint.checksums import CHUNK_BYTES, crc64, join_crcs
from cairn.checkpoint.manifest import Damaged, Manifest
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.trainer import SFTConfig
from cairn.launch import main
from cairn.launch.plan.remote_start import with_remote
from cairn.remote import Objects, RemoteError, RemoteStore, dedup
from cairn.remote.client import multipart, objects, s3
from cairn.remote.client.upload_body import Sent
from cairn.remote.prefix_lease import Taken
from cairn.remote.uploads import RunUploads, Uploader, note_origin
from cairn.run.waiting import wait_for

PARTS = 4
LARGE = np.random.default_rng(2).bytes((PARTS - 1) * CHUNK_BYTES + 12345)
FILE = "model/model.safetensors"
UPLOAD = """
import sys
from pathlib import Path
from cairn.checkpoint.manifest import Manifest
from cairn.remote import Objects, RemoteStore
from cairn.remote.client import objects
from cairn.remote.client.upload_body import Sent

objects.CONCURRENT_PARTS = 2
folder = Path(sys.argv[1])
manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
RemoteStore(Objects(sys.argv[2])).put(folder, manifest, Sent(folder.parent / "note", manifest))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real S3 server: its address, and its bucket."""
    with s3_bucket(tmp_path_factory.mktemp("s3")) as bucket:
        yield os.environ["AWS_ENDPOINT_URL"], bucket


@pytest.fixture
def network(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[BadNetwork]:
    """What lies between the client and the server, and counts."""
    made = BadNetwork(server[0])
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()
    assert made.refused == [], "a signature or a checksum was wrong"


@pytest.fixture
def remote(network: BadNetwork, tmp_path: Path) -> RemoteStore:
    """A remote store without steps."""
    return RemoteStore(Objects(f"s3://bucket/{tmp_path.name}/a run+", retry_seconds=5))


@pytest.fixture
def step(tmp_path: Path) -> tuple[Path, Manifest]:
    """A step with one large file and a small one."""
    return make_step(tmp_path / "here", 4, {FILE: LARGE, "trainer/state.json": b"{}"})


def note_of(step: tuple[Path, Manifest]) -> Sent:
    """The note that the killed process has left, or a new one."""
    return Sent(step[0].parent / "note", step[1])


def put(remote: RemoteStore, step: tuple[Path, Manifest]) -> None:
    """Upload the step with the note beside it."""
    remote.put(*step, note_of(step))


def kill_in_the_middle(remote: RemoteStore, step: tuple[Path, Manifest], network: BadNetwork) -> None:
    """Have another process upload it, and kill it when some parts have arrived."""
    command = [sys.executable, "-c", UPLOAD, str(step[0]), str(remote)]
    faults = {**os.environ, "CAIRN_FAULT": "remote.sent_part:kill@2"}
    assert subprocess.run(command, env=faults, timeout=DEADLINE, check=False).returncode == -signal.SIGKILL
    wait_for(lambda: not network.working or None, seconds=60, whom="the proxy", setting="none")


def numbers(arrived: Counter[tuple[str, int]]) -> Counter[int]:
    """How often each part has arrived."""
    return Counter({number: count for (_, number), count in arrived.items()})


def test_a_killed_uploader_has_not_sent_in_vain(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest]
):
    """The next one sends the parts that are missing, counted by bytes, and the object is whole."""
    kill_in_the_middle(remote, step, network)
    noted = note_of(step).parts(FILE).noted()
    assert 2 <= len(noted.parts) < PARTS
    assert remote.steps() == []
    network.arrived.clear()
    network.bytes_up = 0
    counted: list[int] = []
    paced: list[int] = []
    remote.put(*step, note_of(step), on_bytes=counted.append, pace=paced.append)
    assert numbers(network.arrived) == Counter(set(range(1, PARTS + 1)) - set(noted.parts))
    missing = sum(CHUNK_BYTES if number < PARTS else 12345 for number in numbers(network.arrived))
    assert missing <= network.bytes_up < missing + 20_000
    assert sum(counted) == step[1].nbytes
    assert sum(paced) - missing in (0, 2), "what was sent, perhaps with the small file"
    assert remote.verify(4) == step[1]
    assert network.uploads == {}


def test_parts_that_only_the_store_knows_of(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest]
):
    """Without the local note, as on another machine, the store's list of parts and checksums counts."""
    kill_in_the_middle(remote, step, network)
    (upload,) = network.uploads.values()
    there = set(upload.parts)
    assert there
    upload.parts[min(there)] = b"something else"
    (step[0].parent / "note").unlink()
    network.arrived.clear()
    assert [(number, found.name) for number, found in remote.unfinished()] == [(4, f"step_4/{FILE}")]
    upload.parts[min(there)] = LARGE[:CHUNK_BYTES] if min(there) == 1 else b""
    put(remote, step)
    sent = set(numbers(network.arrived))
    assert sent == set(range(1, PARTS + 1)) - there | ({min(there)} - {1})
    assert remote.verify(4) == step[1]


@pytest.mark.slow
@pytest.mark.parametrize("mood", draws.cases(["storm", "drops", "damage", "reorder", "slow"], "networks", 2))
def test_uploads_go_on_through_bad_networks(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], mood: str
):
    """Of the parts that were noted none is sent again, whatever becomes of the others."""
    network.mood = mood
    kill_in_the_middle(remote, step, network)
    noted = note_of(step).parts(FILE).noted()
    network.arrived.clear()
    put(remote, step)
    assert not set(noted.parts) & set(numbers(network.arrived))
    network.mood = None
    assert remote.verify(4) == step[1]
    assert network.uploads.keys() <= {noted.upload} or mood == "drops"


def test_a_store_that_is_away_for_long(
    remote: RemoteStore,
    network: BadNetwork,
    step: tuple[Path, Manifest],
    monkeypatch: pytest.MonkeyPatch,
):
    """The upload fails, names the part, and goes on when the store is there again."""

    def goes_away(count: int) -> None:
        if count == CHUNK_BYTES:
            network.mood = "away"

    monkeypatch.setattr(objects, "CONCURRENT_PARTS", 2)
    impatient = RemoteStore(Objects(str(remote), retry_seconds=0.5))
    with pytest.raises(RemoteError, match=rf"step_4/{FILE}, part \d: 50[03] SlowDown"):
        impatient.put(*step, note_of(step), on_bytes=goes_away)
    network.mood = None
    noted = note_of(step).parts(FILE).noted()
    assert noted.parts
    network.arrived.clear()
    put(remote, step)
    assert not set(noted.parts) & set(numbers(network.arrived))
    assert remote.verify(4) == step[1]


@pytest.mark.slow
def test_a_network_that_is_too_slow(
    remote: RemoteStore,
    network: BadNetwork,
    step: tuple[Path, Manifest],
    monkeypatch: pytest.MonkeyPatch,
):
    """The upload names the part whose answer did not come in time; the next one goes through."""
    network.mood, network.rate = "slow", 1 << 20
    impatient = RemoteStore(Objects(str(remote), retry_seconds=0.5))
    ask = impatient.objects._s3.request
    with monkeypatch.context() as patch:

        def request(method: str, name: str | None, query: dict[str, str | int], **how: Any) -> s3.S3Response:
            if "partNumber" in query:  # what comes before may take its time
                patch.setattr(s3, "ANSWER_SECONDS", 0.5)
                patch.setattr(s3, "CONNECT_SECONDS", 0.5)
            return ask(method, name, query, **how)

        patch.setattr(impatient.objects._s3, "request", request)
        part = re.escape(f"{remote}/step_4/{FILE}, part ")
        with pytest.raises(RemoteError, match=rf"{part}\d: .*timed out"):
            impatient.put(*step, note_of(step))
    assert remote.steps() == []
    network.rate = 32 << 20
    put(remote, step)
    assert remote.verify(4) == step[1]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["aborted", "replaced", "note"])
def test_an_upload_that_is_not_what_was_noted(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], change: str
):
    """It begins anew: S3 joins only parts whose ETags and checksums are what they were."""
    kill_in_the_middle(remote, step, network)
    note = note_of(step).parts(FILE)
    noted = note.noted()
    number = min(noted.parts)
    if change == "aborted":
        remote.objects.abort(next(found for _, found in remote.unfinished()))
    elif change == "replaced":
        body = b"x" * CHUNK_BYTES
        headers = {s3.CRC_HEADER: s3.crc_text(crc64(body))}
        query = {"partNumber": number, "uploadId": str(noted.upload)}
        remote.objects._s3.request("PUT", f"step_4/{FILE}", query, headers=headers, body=body)
    else:
        note.add(number, '"0123"', noted.parts[number][1])
    network.arrived.clear()
    put(remote, step)
    assert number in numbers(network.arrived)
    if change == "replaced":
        assert [line.rpartition(" ")[2] for line in network.refused] == ["BadDigest"], "of the whole object"
        network.refused.clear()
    assert remote.verify(4) == step[1]
    assert network.uploads == {}


@pytest.mark.slow
def test_an_object_whose_last_answer_was_lost(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], tmp_path: Path
):
    """It is compared with the manifest instead of sent again."""
    kill_in_the_middle(remote, step, network)
    put(remote, step)
    remote.delete(4)
    put(remote, make_step(tmp_path / "as before", 4, {FILE: LARGE, "trainer/state.json": b"{}"}))
    remote.objects.delete(["committed/step_4.json"])
    note = note_of(step).parts(FILE)
    note.begin("0" * 32, CHUNK_BYTES)
    network.arrived.clear()
    put(remote, step)
    assert set(network.arrived) == set()
    assert remote.verify(4) == step[1]


@pytest.mark.parametrize("problem", ["rot", "gone"])
def test_what_can_not_be_read_leaves_no_parts(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], problem: str
):
    """A local file that is damaged, or that retention has deleted meanwhile."""
    path = step[0] / FILE
    if problem == "rot":
        with open(path, "r+b") as file:
            file.seek(3 * CHUNK_BYTES)
            file.write(b"rot")
    else:
        path.unlink()
    error: Callable[..., type[Exception]] = {"rot": Damaged, "gone": FileNotFoundError}[problem]
    with pytest.raises(error, match=FILE):
        put(remote, step)
    assert network.uploads == {}
    assert remote.steps() == []


def test_stores_that_list_no_uploads(remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest]):
    """They have none, as far as that is known."""
    network.lists = False
    kill_in_the_middle(remote, step, network)
    assert list(remote.unfinished()) == []
    put(remote, step)
    assert remote.verify(4) == step[1]


def test_files_with_more_chunks_than_parts_are_allowed(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
):
    """A part then has several chunks."""
    monkeypatch.setattr(multipart, "MOST_PARTS", 3)
    put(remote, step)
    assert numbers(network.arrived) == Counter({1: 1, 2: 1})
    assert remote.verify(4) == step[1]


def changed(step: tuple[Path, Manifest], root: Path, number: int) -> tuple[Path, Manifest]:
    """A step whose large file differs in its second chunk only."""
    content = LARGE[:CHUNK_BYTES] + b"x" + LARGE[CHUNK_BYTES + 1 :]
    return make_step(root, number, {FILE: content, "trainer/state.json": b"[]"})


def unchanged(step: tuple[Path, Manifest], root: Path, number: int) -> tuple[Path, Manifest]:
    """A step with the same large file."""
    return make_step(root, number, {FILE: LARGE, "trainer/state.json": b"[]"})


@pytest.mark.slow
@pytest.mark.parametrize("most", [multipart.MOST_PARTS, 2])
def test_chunks_that_the_newest_step_has_are_copied_there(
    remote: RemoteStore,
    network: BadNetwork,
    step: tuple[Path, Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
):
    """Each with its checksum; also where a part has several, which then lie in a row."""
    monkeypatch.setattr(multipart, "MOST_PARTS", most)
    put(remote, step)
    network.arrived.clear()
    network.bytes_up = 0
    newer = changed(step, tmp_path / "there", 6)
    counted: list[int] = []
    paced: list[int] = []
    remote.put(*newer, note_of(newer), on_bytes=counted.append, pace=paced.append)
    sent = {2} if most > 2 else {1}
    assert set(numbers(network.arrived)) == sent
    assert set(numbers(network.copied)) == set(range(1, min(PARTS, most) + 1)) - sent
    assert sum(counted) == newer[1].nbytes
    assert sum(paced) < 3 * CHUNK_BYTES
    assert remote.verify(6) == newer[1]


def test_files_that_the_newest_step_has_are_copied_there(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], tmp_path: Path
):
    """Whole, by one request; a next process knows that the copy is there."""
    put(remote, step)
    network.arrived.clear()
    newer = unchanged(step, tmp_path / "there", 6)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.put(*newer, note_of(newer), check=die)
    put(remote, newer)
    assert not network.arrived
    assert numbers(network.copied) == Counter({0: 1})
    assert remote.verify(6) == newer[1]


@pytest.mark.slow
@pytest.mark.parametrize("next_step", [changed, unchanged])
@pytest.mark.parametrize("problem", draws.cases(["damaged", "gone", "silent", "refused"], "copies", 2))
def test_copies_that_do_not_succeed_are_sent(
    remote: RemoteStore,
    network: BadNetwork,
    server: tuple[str, Path],
    step: tuple[Path, Manifest],
    tmp_path: Path,
    problem: str,
    next_step: Callable[[tuple[Path, Manifest], Path, int], tuple[Path, Manifest]],
):
    """Nothing that is damaged in one step becomes part of the next."""
    put(remote, step)
    there = server[1] / tmp_path.name / "a run+/step_4" / FILE
    if problem == "damaged":
        there.write_bytes(b"y" + LARGE[1:])
    elif problem == "gone":
        there.unlink()
    elif problem == "silent":
        network.tells = False
    else:
        network.denied.add("COPY")
    network.arrived.clear()
    newer = next_step(step, tmp_path / "there", 6)
    put(remote, newer)
    assert ({1, 2} if next_step is changed else {1}) <= set(numbers(network.arrived))
    assert (4 in numbers(network.arrived)) == (problem != "damaged")
    assert remote.verify(6) == newer[1]
    assert network.uploads == {}


def test_files_that_are_too_large_for_one_copy(
    remote: RemoteStore,
    network: BadNetwork,
    step: tuple[Path, Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """They are copied by chunks."""
    monkeypatch.setattr(dedup, "MOST_COPIED", len(LARGE) - 1)
    put(remote, step)
    network.arrived.clear()
    again = make_step(tmp_path / "there", 6, {FILE: LARGE})
    put(remote, again)
    assert not network.arrived
    assert set(numbers(network.copied)) == set(range(1, PARTS + 1))
    assert remote.verify(6) == again[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ckpt fork", "--ckpt.resume", "deleted", "another bucket"])
def test_a_fork_copies_from_where_it_came(
    remote: RemoteStore, network: BadNetwork, step: tuple[Path, Manifest], tmp_path: Path, way: str
):
    """Its first step has chunks of the step that it began with; the URL of that is noted in its folder."""
    put(remote, step)
    store = CheckpointStore(tmp_path / "fork/checkpoints")
    url = f"s3://bucket/{tmp_path.name}/fork"
    if way == "ckpt fork":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["ckpt", "fork", f"{remote}/step_4", str(tmp_path / "fork")])
            assert main.ckpt() == 0
        newer = store.folder(4), store.manifest(4)
    else:
        resume = CkptConfig(remote=url, resume=f"{remote}/step_4")
        with_remote(SFTConfig(output_dir=str(tmp_path / "fork"), ckpt=resume), ["trainer"])
        newer = changed(step, store.root, 6)
    if way == "deleted":
        remote.delete(4)
    elif way == "another bucket":
        note_origin(store, "s3://elsewhere/run/step_4")
    uploads = RunUploads(store, CkptConfig(remote=url), last=9)
    fork = RemoteStore(Objects(url, retry_seconds=5), origin=uploads.origin())
    network.arrived.clear()
    put(fork, newer)
    sent = {"ckpt fork": set[int](), "--ckpt.resume": {2}}.get(way, set(range(1, PARTS + 1)))
    assert set(numbers(network.arrived)) == sent
    assert set(numbers(network.copied)) == set(range(1, PARTS + 1)) - sent
    assert fork.verify(newer[1].step) == newer[1]


def test_crcs_of_bytes_in_a_row():
    """They make the CRC of the whole."""
    pieces = [b"abc", b"", b"defg" * 1000]
    assert join_crcs((crc64(piece), len(piece)) for piece in pieces) == crc64(b"".join(pieces))


class TestAbandoned:
    """Uploads that nobody will go on with, below the prefix of a run."""

    @pytest.fixture
    def uploader(self, remote: RemoteStore, tmp_path: Path, network: BadNetwork) -> Uploader:
        """Of a run with steps 4, which waits, and 2, which is there."""
        store = CheckpointStore(tmp_path / "checkpoints")
        for number in (2, 4):
            make_step(store.root, number, {"a": b"1"})
        remote.claim("run", "run:1")
        made = Uploader(RunUploads(store, CkptConfig(remote="file:///unused"), 4), remote, "run:1")
        made.upload(2)
        return made

    def begin(self, network: BadNetwork, *keys: str, age: float = 0) -> None:
        """Have some uploads begin, so many days ago."""
        for key in keys:
            upload = Upload(key)
            upload.begun = (datetime.now(UTC) - timedelta(days=age)).isoformat()
            network.uploads[f"{len(network.uploads):032x}"] = upload

    def left(self, network: BadNetwork) -> list[str]:
        """The keys of those that are left; they are known to the proxy only."""
        return sorted(upload.key for upload in network.uploads.values())

    def test_at_the_beginning_and_the_end(self, uploader: Uploader, network: BadNetwork, remote: RemoteStore):
        """By step and age; what another run could have begun is left alone."""
        prefix = str(remote).removeprefix("s3://bucket/")
        others = [f"{prefix}/step_4/step_2/a", f"{prefix}x/step_4/a", "step_4/a", f"{prefix}/step_4x/a"]
        self.begin(network, *others, f"{prefix}/step_2/a", f"{prefix}/step_4/a", f"{prefix}/step_6/a", age=2)
        self.begin(network, f"{prefix}/step_8/a")
        uploader.begin()
        assert self.left(network) == sorted([*others, f"{prefix}/step_4/a", f"{prefix}/step_8/a"])
        uploader.upload(4)
        uploader.end()
        assert self.left(network) == sorted(others)

    def test_without_the_permission(self, uploader: Uploader, network: BadNetwork, remote: RemoteStore):
        """They stay, and uploads go on."""
        self.begin(network, f"{str(remote).removeprefix('s3://bucket/')}/step_2/a")
        network.denied.add("DELETE")
        uploader.begin()
        uploader.upload(4)
        uploader.end()
        assert remote.steps() == [2, 4]
        assert len(network.uploads) == 1

    @draws.seldom
    def test_a_newer_attempt_is_left_alone(
        self, uploader: Uploader, network: BadNetwork, remote: RemoteStore
    ):
        """It may go on with them."""
        self.begin(network, f"{str(remote).removeprefix('s3://bucket/')}/step_4/a", age=2)
        remote.claim("run", "run:2")
        with pytest.raises(Taken):
            uploader.begin()
        uploader.end()
        assert len(network.uploads) == 1
