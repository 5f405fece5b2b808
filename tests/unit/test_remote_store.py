"""Steps in an object store, against a real S3 server on loopback, and in a folder."""

import contextlib
import dataclasses
import http.server
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
from stores import BadNetwork, make_step, process_of_client, s3_bucket

from cairn.checkpoint.checksums import CHUNK_BYTES
from cairn.checkpoint.manifest import CheckpointError, Damaged, Manifest
from cairn.checkpoint.retention import prune
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.step_jobs import Hold
from cairn.checkpoint.store import PINS, CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.attempt import begin, claim
from cairn.launch.plan.remote_start import with_remote
from cairn.launch.start import Start, choose_start
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.remote.client import objects
from cairn.remote.client.objects import Listed, probe
from cairn.remote.client.upload_body import Sent
from cairn.remote.prefix_lease import Taken
from cairn.remote.uploads import Limit, RunUploads, Uploaded, Uploader
from cairn.run.connections import free_port
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt
from cairn.run.object_store import TransientError, is_url


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bucket of a real S3 server; the environment leads to it."""
    with s3_bucket(tmp_path_factory.mktemp("s3")) as bucket:
        yield bucket


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, s3: Path, tmp_path: Path) -> tuple[str, Path]:
    """An empty prefix, and the folder that its objects lie in."""
    if request.param == "file":
        return f"file://{tmp_path}/remote", tmp_path / "remote"
    return f"s3://bucket/{tmp_path.name}", s3 / tmp_path.name


@pytest.fixture
def remote(url: tuple[str, Path]) -> RemoteStore:
    """A remote store without steps."""
    return RemoteStore(Objects(url[0], retry_seconds=5))


LARGE = np.random.default_rng(1).bytes(2 * CHUNK_BYTES + 12345)
FILES = {"model/model.safetensors": LARGE, "trainer/state.json": b"{}", "model/empty": b""}


def put(remote: RemoteStore, folder: Path, manifest: Manifest, **how: Any) -> None:
    """Upload a step with a note beside it."""
    remote.put(folder, manifest, Sent(folder.parent / "notes" / folder.name, manifest), **how)


def die_at(point: str) -> Callable[[str], None]:
    """A `fault_point` that ends a process there, as far as a test can have it."""

    def fault_point(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    return fault_point


def test_a_step_goes_there_and_comes_back(remote: RemoteStore, url: tuple[str, Path], tmp_path: Path):
    """Byte for byte, and its folder in the object store is a checkpoint for whoever copies it."""
    folder, manifest = make_step(tmp_path / "here", 4, FILES)
    counted: list[int] = []
    put(remote, folder, manifest, on_bytes=counted.append)
    assert sum(counted) == manifest.nbytes
    assert remote.steps() == [4]
    assert remote.manifest(4) == remote.verify(4) == manifest == verify(url[1] / "step_4")
    store = CheckpointStore(tmp_path / "elsewhere")
    back = remote.fetch(4, store)
    assert verify(back) == manifest
    assert {name: (back / name).read_bytes() for name in FILES} == FILES
    with pytest.raises(CheckpointError, match="exists already"):
        remote.fetch(4, store)


def test_many_steps_are_in_order(remote: RemoteStore, tmp_path: Path):
    """By number, and one that is deleted is gone with its objects; names of steps may begin alike."""
    for step in (2, 10, 1):
        put(remote, *make_step(tmp_path, step, {"a/b": b"1"}))
    assert remote.steps() == [1, 2, 10]
    remote.delete(1)
    assert remote.steps() == [2, 10]
    names = [name for name, _ in remote.objects.list() if name != "catalog.json"]
    assert sorted(names) == sorted(
        [name for step in (2, 10) for name in (f"committed/step_{step}.json", f"step_{step}/a/b")]
        + [f"step_{step}/manifest.json" for step in (2, 10)]
    )


def test_the_manifest_that_commits_is_last(remote: RemoteStore, tmp_path: Path):
    """Whatever ends an upload, there is no step; the next process sends only what is missing."""
    folder, manifest = make_step(tmp_path, 4, FILES)

    def end() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(remote, folder, manifest, check=end)
    assert remote.steps() == []
    (folder / "model/model.safetensors").rename(tmp_path / "away")  # so it can't be read again
    put(remote, folder, manifest)
    assert remote.verify(4) == manifest


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_files_that_were_sent_and_are_gone_are_sent_again(
    remote: RemoteStore, url: tuple[str, Path], tmp_path: Path, damage: str
):
    """The note proves nothing alone; and a file that is lost while others are sent fails this upload only."""
    folder, manifest = make_step(tmp_path, 4, FILES)
    there = url[1] / "step_4/model/model.safetensors"

    def lose() -> None:
        there.unlink() if damage == "missing" else there.write_bytes(b"1")

    def end() -> None:
        lose()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(remote, folder, manifest, check=end)
    check_sizes = remote.check_sizes

    def lose_first(manifest: Manifest) -> None:
        lose()
        check_sizes(manifest)

    remote.check_sizes = lose_first
    with pytest.raises(RemoteError, match=r"step_4/model/model.safetensors: (is missing|has 1 bytes)"):
        put(remote, folder, manifest)
    assert remote.steps() == []
    remote.check_sizes = check_sizes
    put(remote, folder, manifest)
    assert remote.verify(4) == manifest


def test_a_note_of_another_attempts_step_does_not_count(remote: RemoteStore, tmp_path: Path):
    """Its files of the same names may lie in the object store by now."""
    _, manifest = make_step(tmp_path, 4, FILES)
    note = tmp_path / "note"
    sent = Sent(note, manifest)
    sent.add("trainer/state.json", "an ETag")
    assert Sent(note, manifest).etag("trainer/state.json") == "an ETag"
    other = manifest.model_copy(update={"attempt": 2})
    assert Sent(note, other).etag("trainer/state.json") is None
    assert Sent(note, manifest).etag("trainer/state.json") is None


def test_what_was_sent_and_replaced_since_is_sent_again(remote: RemoteStore, tmp_path: Path):
    """Another attempt sent a step of the same sizes, and did not commit it; its bytes become no step."""
    larger = random.Random(3).randbytes(len(LARGE))
    folder, manifest = make_step(tmp_path / "one", 4, FILES)
    others = make_step(tmp_path / "two", 4, {"model/model.safetensors": larger, "trainer/state.json": b"[]"})

    def end() -> None:
        raise KeyboardInterrupt

    for cut in ((folder, manifest), others):
        with pytest.raises(KeyboardInterrupt):
            put(remote, *cut, check=end)
    put(remote, folder, manifest)
    assert remote.verify(4) == manifest


def test_what_is_replaced_before_the_commit_is_found(remote: RemoteStore, tmp_path: Path):
    """By its ETag; what is the same in spite of another ETag counts, and so does no note without one."""
    folder, manifest = make_step(tmp_path, 4, FILES)
    look, state = remote.objects.look, "step_4/trainer/state.json"
    for content, error in ((b"[]", "state.json: changed between"), (b"{}", None)):

        def replaced(prefix: str, content: bytes = content) -> Mapping[str, Listed]:
            if state in (found := dict(look(prefix))):
                remote.objects.put(state, content)
                found[state] = replace(found[state], etag="another")
            return found

        remote.objects.look = replaced
        with pytest.raises(RemoteError, match=error) if error else contextlib.nullcontext():
            put(remote, folder, manifest)
        assert remote.steps() == ([] if error else [4])
    assert remote.verify(4) == manifest


def test_notes_of_an_older_version_prove_nothing(tmp_path: Path):
    """They name files without ETags."""
    _, manifest = make_step(tmp_path, 4, FILES)
    note, entry = tmp_path / "note", manifest.files["trainer/state.json"]
    Sent(note, manifest)
    with open(note, "a") as file:
        file.write(json.dumps(["trainer/state.json", entry.size, *entry.crc64nvme]) + "\n")
    assert Sent(note, manifest).etag("trainer/state.json") is None


def test_what_the_newest_step_has_is_copied_there(remote: RemoteStore, url: tuple[str, Path], tmp_path: Path):
    """Frozen weights are sent once, but to a server of S3's protocol that tells no checksums of copies."""
    put(remote, *make_step(tmp_path, 1, FILES))
    folder, manifest = make_step(tmp_path, 2, {**FILES, "trainer/state.json": b"[]"})
    read: list[str] = []
    put_parts = remote.objects.put_parts
    remote.objects.put_parts = lambda name, *rest: read.append(name) or put_parts(name, *rest)
    put(remote, folder, manifest)
    assert read == (["step_2/model/model.safetensors"] if url[0].startswith("s3") else [])
    assert remote.verify(2) == manifest


def test_local_damage_does_not_travel(remote: RemoteStore, tmp_path: Path):
    """A file that changed after it was saved is found before the step is committed."""
    folder, manifest = make_step(tmp_path, 4, FILES)
    with open(folder / "model/model.safetensors", "r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        file.write(b"rot")
    with pytest.raises(Damaged, match=f"changed between bytes {CHUNK_BYTES} and"):
        put(remote, folder, manifest)
    assert remote.steps() == []


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_damage_there_is_found(remote: RemoteStore, url: tuple[str, Path], tmp_path: Path, damage: str):
    """And a step that fails leaves nothing in the local store."""
    put(remote, *make_step(tmp_path / "here", 4, FILES))
    path = url[1] / "step_4/model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[CHUNK_BYTES + 5] ^= 1
    path.unlink()
    if damage != "missing":
        path.write_bytes(content if damage == "flipped" else content[:-1])
    store = CheckpointStore(tmp_path / "elsewhere")
    for check in (lambda: remote.verify(4), lambda: remote.fetch(4, store)):
        with pytest.raises(Damaged, match=r"step_4/model/model.safetensors: "):
            check()
    assert list(store.root.iterdir()) == []


def test_another_step_of_the_same_number_is_never_replaced(remote: RemoteStore, tmp_path: Path):
    """The same one again is done at once."""
    folder, manifest = make_step(tmp_path / "one", 4, FILES)
    put(remote, folder, manifest)
    put(remote, folder, manifest)
    with pytest.raises(CheckpointError, match="has another step 4"):
        put(remote, *make_step(tmp_path / "two", 4, FILES, branch="branch_2"))
    assert remote.manifest(4).branch == "branch_1"


def test_steps_of_a_branch_that_was_left_make_room(remote: RemoteStore, tmp_path: Path):
    """They are not listed any more, and a step of the new branch takes their place."""
    for step in (2, 4):
        put(remote, *make_step(tmp_path / "one", step, FILES))
    assert remote.set_aside_after(2, "branch_1") == [4]
    assert remote.steps() == [2]
    folder, manifest = make_step(tmp_path / "two", 4, {"trainer/state.json": b"new"}, branch="branch_2")
    put(remote, folder, manifest)
    assert remote.verify(4) == manifest
    left = json.loads(remote.objects.get("abandoned/branch_1/step_4.json") or b"")
    assert left["branch"] == "branch_1"


def test_a_committed_step_has_its_own_files_only(remote: RemoteStore, url: tuple[str, Path], tmp_path: Path):
    """Those of an earlier step of its number are gone, unless another attempt has the prefix by now."""
    shards = {f"model/model-0000{n}-of-00002.safetensors": b"1" for n in (1, 2)}
    put(remote, *make_step(tmp_path / "one", 8, shards))
    remote.set_aside_after(4, "branch_1")
    newer = make_step(tmp_path / "two", 8, {"model/model.safetensors": b"1"}, branch="branch_2")
    remote.claim("run", "run:1")
    remote.objects.put("step_8/model/model.safetensors", b"1")
    Sent(tmp_path / "two/notes/step_8", newer[1]).add(
        "model/model.safetensors", remote.look(8)["model/model.safetensors"].etag
    )
    with pytest.raises(Taken):
        put(remote, *newer, guard=lambda: remote.check_owner("run:0"))
    assert shards.keys() <= remote.look(8).keys()
    put(remote, *newer)
    shutil.copytree(url[1] / "step_8", tmp_path / "copied/step_8")
    assert verify(tmp_path / "copied/step_8") == newer[1]


def test_two_runs_can_not_have_one_prefix(remote: RemoteStore):
    """The second is refused; a newer attempt of the same run takes it over from the older one."""
    remote.claim("run", "attempt 1")
    remote.check_owner("attempt 1")
    with pytest.raises(Taken, match="belongs to run run, and this is run other"):
        remote.claim("other", "attempt 1")
    remote.claim("run", "attempt 2")
    remote.check_owner("attempt 2")
    with pytest.raises(Taken, match="another attempt has taken it over"):
        remote.check_owner("attempt 1")
    remote.objects.put("run.json", b"{")
    with pytest.raises(RemoteError, match=r"run.json: is damaged"):
        remote.claim("run", "attempt 3")


class Machine:
    """A machine with a disk of its own that is told to go on with the run at `url`."""

    def __init__(self, folder: Path, url: str, resume: str | None = "auto"):
        self.url = url
        ckpt = CkptConfig(remote=url, resume=resume)
        self.config = SFTConfig(output_dir=str(folder), ckpt=ckpt, max_steps=99)
        self.run = self.config.run_directory()
        self.store = CheckpointStore(self.run.checkpoints)

    def look(self) -> Start:
        """Choose where to start from."""
        config, away = with_remote(self.config, ["trainer"])
        return choose_start(config, needs=["trainer"], away=away)

    def begin(self, start: Start | None = None) -> Attempt:
        """Begin an attempt, and end it at once."""
        try:
            return begin(self.run, self.config, start or self.look(), {"trainer": {}}, command="sft")
        finally:
            self.run.unlock()

    def save(self, attempt: Attempt, step: int) -> None:
        """Save a step and upload it."""
        about = {"run_id": attempt.run_id, "attempt": attempt.number, "branch": attempt.branch}
        files = {"trainer/state.json": b'{"seed": 0, "progress": {"step": 1}}'}
        make_step(self.store.root, step, files, **about)
        self.run.metrics.append({"step": step, "attempt": attempt.number})
        uploads = RunUploads(self.store, self.config.ckpt or CkptConfig(), 99)
        files = [self.run.metrics.path]
        Uploader(uploads, RemoteStore(Objects(self.url)), attempt.owner, run_files=files).upload(step)


def test_attempts_on_two_machines_differ(tmp_path: Path):
    """Also if the older machine comes back with its disk, and if two with empty disks start at once."""
    url = f"file://{tmp_path}/remote"
    remote = RemoteStore(Objects(url))
    one, two = Machine(tmp_path / "one", url), Machine(tmp_path / "two", url)
    one.save(one.begin(), 4)
    second = two.begin()
    two.save(second, 8)
    third = one.begin()
    with pytest.raises(Taken, match="another attempt has taken it over"):
        two.save(second, 12)
    assert [second.number, third.number, third.start_step] == [2, 3, 8]

    machines = [Machine(tmp_path / name, url) for name in ("three", "four")]
    starts = [machine.look() for machine in machines]
    fourth, fifth = (machine.begin(start) for machine, start in zip(machines, starts, strict=True))
    assert [fourth.number, fifth.number] == [4, 5]
    remote.check_owner(fifth.owner)
    with pytest.raises(Taken, match="attempt 5 of this run has begun elsewhere"):
        claim(machines[0].config, fourth, 8)
    assert remote.steps() == [4, 8]


def test_a_disk_that_is_behind_catches_up(tmp_path: Path):
    """It gets the rows of the remote step that it goes on from; what it had is kept, and pins are united.

    Nothing is replaced where the local step is the newest.
    """
    url = f"file://{tmp_path}/remote"
    remote = RemoteStore(Objects(url))
    one, two = Machine(tmp_path / "one", url), Machine(tmp_path / "two", url)
    one.save(one.begin(), 4)
    second = two.begin()
    for step in (5, 6, 7):
        one.run.metrics.append({"step": step, "attempt": 1})
        two.run.metrics.append({"step": step, "attempt": 2})
    two.store.set_pin(8, True)
    one.store.set_pin(4, True)
    one.run.evals.append({"step": 5})
    one.run.ledger.write_text("of steps 5 to 7")
    remote.objects.put(f"run/{PINS}", b"[8]")
    make_step(one.store.root, 7, {"trainer/state.json": b'{"seed": 0}'}, run_id=second.run_id)
    assert (one.look().step, len(one.run.metrics.rows())) == (7, 4), "the local step counts, and its rows"
    two.save(second, 8)
    third = one.begin()
    assert [(row["step"], row["attempt"]) for row in one.run.metrics.rows()] == [
        (4, 1),
        *((step, 2) for step in (5, 6, 7, 8)),
    ]
    assert one.store.pins() == {4, 8}
    (aside,) = one.store.abandoned.glob("overtaken_attempt_1_*")
    assert {path.name for path in aside.iterdir()} == {"metrics.jsonl", "ledger.sqlite"}
    assert not one.run.ledger.exists()
    one.save(third, 12)
    rows = (remote.objects.get("run/metrics.jsonl") or b"").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [4, 5, 6, 7, 8, 12]
    assert one.look().step == 12, "and it is not behind any more"
    assert len(list(one.store.abandoned.glob("overtaken_*"))) == 1


def test_numbers_of_attempts_survive_the_loss_of_all_notes(tmp_path: Path):
    """Of run.json, of the register, and of the local disk; the same number never means the same owner."""
    url = f"file://{tmp_path}/remote"
    first = Machine(tmp_path / "one", url)
    first.save(first.begin(), 4)
    second = first.begin()
    first.save(second, 8)
    RemoteStore(Objects(url)).objects.delete(["run.json", "attempts/1.json", "attempts/2.json"])
    assert Machine(tmp_path / "two", url).begin().number == 3
    first.run.roles.unlink()
    assert first.begin().number == 4
    assert second.owner != dataclasses.replace(second, token="another").owner


def test_a_run_that_is_refused_sets_nothing_aside(tmp_path: Path):
    """It had looked at the prefix when that was empty."""
    url = f"file://{tmp_path}/remote"
    late, other = Machine(tmp_path / "late", url, resume=None), Machine(tmp_path / "other", url)
    start = late.look()
    other.save(other.begin(), 4)
    with pytest.raises(Taken, match="belongs to run"):
        late.begin(start)
    assert RemoteStore(Objects(url)).steps() == [4]
    assert late.run.attempt() is None


def test_a_machine_that_is_lost_before_its_first_upload(tmp_path: Path):
    """The next one, with an empty disk, goes on as the same run, with the next number."""
    url = f"file://{tmp_path}/remote"
    remote = RemoteStore(Objects(url))
    first = Attempt("run", 3, "sft", start_step=0, resume_from=None, branch="branch_2")
    configs = [
        SFTConfig(output_dir=str(tmp_path / name), ckpt=CkptConfig(remote=url, resume=resume))
        for name, resume in (("one", None), ("two", None), ("three", "auto"))
    ]
    claim(configs[0], first, 0)
    with pytest.raises(UsageError, match="belongs to run run already; go on with it"):
        with_remote(configs[1], ["trainer"])
    config, _ = with_remote(configs[2], ["trainer"])
    start = choose_start(config, needs=["trainer"])
    attempt = begin(config.run_directory(), config, start, {"trainer": {}}, command="sft")
    config.run_directory().unlock()
    assert (attempt.run_id, attempt.number, attempt.branch) == ("run", 4, "branch_2")
    put(
        remote, *make_step(tmp_path / "one", 3, {"a": b"1"})
    )  # by the older attempt, which lives on somewhere
    claim(config, attempt, 0)
    assert remote.steps() == [], "this attempt goes on in another way"
    remote.check_owner(attempt.owner)
    remote.claim("run", "run:done")
    assert remote.newest_attempt() == {"number": 4, "branch": "branch_2", "command": "sft"}


def test_a_probe_leaves_nothing(remote: RemoteStore):
    """A store that can do all that is needed."""
    probe(remote.objects, "me")
    assert list(remote.objects.list()) == []


def test_a_step_that_is_not_there(remote: RemoteStore):
    """Is named with its store."""
    with pytest.raises(CheckpointError, match=r"remote|bucket.*: there is no step 3"):
        remote.manifest(3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3:///prefix", "names no bucket"),
        ("file://relative/path", "needs three slashes"),
        ("file:///proc/nowhere", "the folder can't be made: No such file"),
        ("ftp://host/path", "is no URL of an object store"),
    ],
)
def test_urls_that_can_not_be_used(url: str, message: str):
    """Exit code 2, and why."""
    with pytest.raises(UsageError, match=message):
        Objects(url)


def test_what_is_a_url():
    """A path with a colon is a path."""
    assert all(map(is_url, ("s3://b/p", "gs://b", "az://c/p", "file:///x")))
    assert not any(map(is_url, ("runs/s3", "a:b", "s3:b", "/s3://x", "http://x")))


def test_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error names the object, within the time that was given."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(RemoteError, match=r"s3://bucket/run/committed: ") as error:
        RemoteStore(Objects("s3://bucket/run", retry_seconds=1)).steps()
    assert "secret" not in str(error.value)


def test_a_bucket_that_is_not_there(s3: Path):
    """Is an error, rather than an empty list."""
    with pytest.raises(RemoteError, match="s3://nowhere/run"):
        probe(Objects("s3://nowhere/run", retry_seconds=1), "me")


def test_a_clock_that_is_off_by_more_than_requests_may(
    s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Is named, whether obstore makes the request or not; the credentials are not to blame."""
    network = BadNetwork(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.url)
    network.mood = "skewed"
    there = Objects("s3://bucket/skewed", retry_seconds=5)
    message = r"s3:.*: this machine's clock is wrong, .*; set the clock \(.*RequestTimeTooSkewed"
    try:
        for request in (
            lambda: probe(there, "me"),
            lambda: there.put_new("a", b""),
            lambda: list(there.pieces("a", 0, 1)),
        ):
            with pytest.raises(RemoteError, match=message) as error:
                request()
            assert not isinstance(error.value, TransientError), "may not pass by itself"
    finally:
        network.close()


def test_many_steps_are_listed_with_few_requests(remote: RemoteStore, tmp_path: Path):
    """What a list shows of each comes from one object; a step that it lacks is read by itself."""
    for step in (1, 2, 3):
        put(remote, *make_step(tmp_path, step, {"a": b"1"}, metrics={"loss": step / 2, "lr": 1.0}))
    asked: list[str] = []
    get = remote.objects.tagged
    remote.objects.tagged = lambda name: asked.append(name) or get(name)
    rows = remote.summaries()
    assert [(row["step"], row["bytes"], row["metrics"]) for row in rows] == [
        (1, 1, {"loss": 0.5}),
        (2, 1, {"loss": 1.0}),
        (3, 1, {"loss": 1.5}),
    ]
    assert asked == ["catalog.json"]
    for damage in (b"[", b"{}", b"[1]", None):
        remote.objects.delete(["catalog.json"])
        if damage is not None:
            remote.objects.put("catalog.json", damage)
        assert remote.summaries() == rows


@pytest.mark.parametrize("unsigned", [False, True])
def test_ranges_of_objects(remote: RemoteStore, unsigned: bool, monkeypatch: pytest.MonkeyPatch):
    """As they arrive; where no signature is wanted, obstore asks."""
    if unsigned:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    content = LARGE[: 3 * objects.PIECE_BYTES]
    remote.objects.put("a b/c+d", content)

    def arrived(first: int, count: int) -> bytes:
        return b"".join(map(bytes, remote.objects.pieces("a b/c+d", first, count)))

    assert arrived(0, len(content)) == content
    assert arrived(7, objects.PIECE_BYTES + 1) == content[7 : objects.PIECE_BYTES + 8]
    if not remote.objects.url.startswith("file:"):
        assert arrived(5, 10 * len(content)) == content[5:], "ends where the object does"
    with pytest.raises(RemoteError, match="nothing"):
        list(remote.objects.pieces("nothing", 0, 1))


def test_a_store_that_ignores_ranges(monkeypatch: pytest.MonkeyPatch):
    """Its bytes are those of another place, so they are not taken."""

    class Whole(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"abcd")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Whole) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(RemoteError, match="s3://bucket/run/a: the object store ignores"):
            list(Objects("s3://bucket/run", retry_seconds=1).pieces("a", 2, 2))
        server.shutdown()


@pytest.mark.parametrize("old", [False, True])
def test_the_catalog_is_believed_only_of_the_manifest_that_is_there(
    remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
):
    """A step took the place of one that was set aside, and its uploader was killed right after the commit."""
    for step, loss in ((4, 0.1), (8, 0.5)):
        put(remote, *make_step(tmp_path / "one", step, {"a": b"1"}, metrics={"loss": loss}))
    remote.set_aside_after(2, "branch_1")
    if old:  # rows of older versions don't tell what they were made of
        rows = json.loads(remote.objects.get("catalog.json") or b"")
        rows = [{name: row[name] for name in row if name != "etag"} for row in rows]
        remote.objects.put("catalog.json", json.dumps(rows).encode())
    newer = make_step(tmp_path / "two", 4, {"a": b"2"}, metrics={"loss": 9.0}, branch="branch_2")
    with monkeypatch.context() as patch:
        patch.setattr("cairn.remote.step_store.fault_point", die_at("remote.done"))
        with pytest.raises(KeyboardInterrupt):
            put(remote, *newer)
    assert [(row["step"], row["metrics"]["loss"]) for row in remote.summaries()] == [(4, 9.0)]
    put(remote, *make_step(tmp_path / "two", 6, {"a": b"3"}, metrics={"loss": 2.0}, branch="branch_2"))
    written = json.loads(remote.objects.get("catalog.json") or b"")
    assert [(row["step"], row["metrics"]["loss"]) for row in written] == [(4, 9.0), (6, 2.0)]
    best = prune(remote, CkptConfig(keep_best=1, metric="loss", mode="min"), dry_run=True)
    assert best["kept"] == {"6": ["newest", "best"]}


def test_a_step_is_there_without_the_catalog(remote: RemoteStore, tmp_path: Path):
    """Whether another manifest is damaged or the store fails: the upload has succeeded."""
    put(remote, *make_step(tmp_path, 1, {"a": b"1"}))
    remote.objects.put("committed/step_1.json", b"{")
    put(remote, *make_step(tmp_path, 2, {"a": b"1"}))
    assert [row["step"] for row in json.loads(remote.objects.get("catalog.json") or b"")] == [2]
    store_put = remote.objects.put

    def refuse(name: str, content: bytes) -> str | None:
        if name == "catalog.json":
            raise RemoteError("access was denied")
        return store_put(name, content)

    remote.objects.put = refuse
    put(remote, *make_step(tmp_path, 3, {"a": b"1"}))
    assert remote.steps() == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("mood", ["storm", "drops", "damage", "slow"])
def test_bad_networks(s3: Path, mood: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests are made again, also where the answer to one that took effect was lost."""
    network = BadNetwork(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.url)
    network.mood = mood
    remote = RemoteStore(Objects(f"s3://bucket/bad_{mood}", retry_seconds=20))
    try:
        remote.claim("run", "run:1")
        for step in (1, 2):
            put(remote, *make_step(tmp_path / "here", step, {**FILES, "a": bytes([step])}))
        assert remote.steps() == [1, 2]
        back = remote.fetch(2, CheckpointStore(tmp_path / "there"))
    finally:
        network.close()
    assert (back / "model/model.safetensors").read_bytes() == LARGE
    assert network.refused == []


@pytest.mark.slow
def test_a_download_that_takes_longer_than_a_request_may(
    s3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It goes on where the request ended: no request alone gets a whole chunk."""
    folder, manifest = make_step(tmp_path / "here", 2, FILES)
    put(RemoteStore(Objects("s3://bucket/slow")), folder, manifest)
    network = BadNetwork(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.url)
    monkeypatch.setattr(objects, "REQUEST_SECONDS", 2)
    remote = RemoteStore(Objects("s3://bucket/slow", retry_seconds=20))
    network.mood, network.rate = "slow", CHUNK_BYTES // 5
    try:
        began = time.monotonic()
        back = remote.fetch(2, CheckpointStore(tmp_path / "there"))
        assert time.monotonic() - began > 4
    finally:
        network.close()
    assert (back / "model/model.safetensors").read_bytes() == LARGE


class TestUploads:
    """What is uploaded, in which order, and what retention spares for it."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> CheckpointStore:
        return CheckpointStore(tmp_path / "checkpoints")

    def uploader(self, store: CheckpointStore, remote: RemoteStore, **ckpt: Any) -> Uploader:
        """The uploader of an attempt that has claimed the prefix."""
        remote.claim("run", "run:1")
        uploads = RunUploads(store, CkptConfig(remote="file:///unused", **ckpt), last=9)
        files = {"run_files": [store.root / "metrics.jsonl"], "settings": store.root / "config.json"}
        uploader = Uploader(uploads, remote, "run:1", **files)
        uploader.begin()
        return uploader

    def test_the_newest_goes_first(self, store: CheckpointStore, remote: RemoteStore):
        """Steps that are no multiples of the interval stay here, but for the last one of the run."""
        for step in (2, 3, 4, 9):
            make_step(store.root, step, {"a": b"1"})
        (store.root / "metrics.jsonl").write_text("rows")
        uploader = self.uploader(store, remote, remote_interval=2)
        order: list[int] = []
        while (step := uploader.next_step()) is not None:
            uploader.upload(step)
            order.append(step)
        assert order == [9, 4, 2]
        assert remote.steps() == [2, 4, 9]
        assert remote.objects.get("run/metrics.jsonl") == b"rows"
        assert self.uploader(store, remote).next_step() == 3

    def test_settings_are_there_before_the_first_step(self, store: CheckpointStore, remote: RemoteStore):
        """Those of each attempt, in place of the ones before."""
        store.root.mkdir()
        for text in ("first", "second"):
            (store.root / "config.json").write_text(text)
            self.uploader(store, remote)
            assert remote.objects.get("run/config.json") == text.encode()
        assert (remote.steps(), remote.objects.get("run/metrics.jsonl")) == ([], None)

    def test_no_step_is_committed_without_the_metrics_that_were_there(
        self, store: CheckpointStore, remote: RemoteStore
    ):
        """As when the run directory is deleted under a running upload."""
        make_step(store.root, 1, {"a": b"1"})
        metrics = store.root / "metrics.jsonl"
        metrics.write_text("rows")
        uploader = self.uploader(store, remote)
        assert uploader.next_step() == 1
        metrics.unlink()
        with pytest.raises(FileNotFoundError):
            uploader.upload(1)
        assert remote.steps() == []
        metrics.write_text("rows")
        uploader.upload(1)
        assert remote.steps() == [1]

    def test_retention_spares_what_waits(self, store: CheckpointStore, remote: RemoteStore):
        """The step that is being uploaded and the newest others, as many as the settings allow."""
        for step in (1, 2, 3, 4):
            make_step(store.root, step, {"a": b"1"})
        uploads = self.uploader(store, remote).uploads
        assert uploads.hold([1, 2, 3]) == Hold(frozenset({2, 3}), frozenset({1}))
        uploads.write(Uploaded(uploading=1))
        assert uploads.hold([1, 2, 3]) == Hold(frozenset({1, 3}), frozenset({2}))
        uploads.write(Uploaded((1, 2)))
        assert uploads.hold([1, 2, 3]) == Hold(frozenset({3}), frozenset())
        uploads.write(Uploaded(given_up="the key was revoked"))
        assert uploads.hold([1, 2, 3]) == Hold(frozenset(), frozenset())

    def test_remote_steps_have_rules_of_their_own(self, store: CheckpointStore, remote: RemoteStore):
        """Pinned steps stay there as here."""
        for step in (1, 2, 3, 4):
            make_step(store.root, step, {"a": b"1"})
        store.set_pin(1, True)
        uploader = self.uploader(store, remote, remote_keep_last=1, remote_keep_every=2)
        for step in (1, 2, 3, 4):
            uploader.upload(step)
        assert remote.steps() == [1, 2, 4]
        assert uploader.uploads.read() == Uploaded((1, 2, 4), dropped=(3,))
        assert uploader.next_step() is None
        uploader.begin()
        assert uploader.next_step() is None, "its rules would delete step 3 again"

    def test_what_somebody_has_deleted_is_found_at_the_end(self, store: CheckpointStore, remote: RemoteStore):
        """By a look at the store, not by notes; steps that are still here go there again."""
        for step in (1, 2, 3):
            make_step(store.root, step, {"a": b"1"})
        uploader = self.uploader(store, remote)
        for step in (1, 2, 3):
            uploader.upload(step)
        assert uploader.gone() == []
        for step in (1, 2):
            remote.objects.delete([f"committed/step_{step}.json"])
        store.delete(1)
        assert uploader.gone() == [1, 2]
        assert uploader.next_step() == 2
        uploader.upload(2)
        assert (remote.steps(), uploader.next_step(), uploader.gone()) == ([2, 3], None, [])

    def test_a_step_that_can_not_be_deleted_is_no_failed_upload(
        self, store: CheckpointStore, remote: RemoteStore, caplog: pytest.LogCaptureFixture
    ):
        """It is logged, and tried again after the next upload."""
        for step in (1, 2, 3, 4):
            make_step(store.root, step, {"a": b"1"})
        uploader = self.uploader(store, remote, remote_keep_last=1)
        uploader.upload(1)
        delete = remote.objects.delete

        def refuse(names: Sequence[str]) -> None:
            raise RemoteError(f"{names[0]}: access was denied")

        remote.objects.delete = refuse
        uploader.upload(2)
        assert "could not delete remote checkpoint 1: committed/step_1.json: access was denied" in caplog.text
        assert uploader.uploads.read() == Uploaded((1, 2))
        steps = remote.steps

        def fail_once_committed() -> list[int]:
            if 3 in (found := steps()):
                raise RemoteError("503 SlowDown")
            return found

        remote.steps = fail_once_committed
        uploader.upload(3)
        assert "no remote checkpoint is deleted: 503 SlowDown" in caplog.text
        remote.objects.delete, remote.steps = delete, steps
        uploader.upload(4)
        assert uploader.uploads.read() == Uploaded((4,), dropped=(1, 2, 3))
        assert remote.steps() == [4]

    def left(self, remote: RemoteStore) -> list[int]:
        """The numbers of the steps that have objects."""
        names = (name for name, _ in remote.objects.list() if name.startswith("step_"))
        return sorted({int(name.partition("/")[0].removeprefix("step_")) for name in names})

    @pytest.mark.slow
    def test_what_nobody_will_go_on_with_is_removed(
        self,
        store: CheckpointStore,
        remote: RemoteStore,
        url: tuple[str, Path],
        monkeypatch: pytest.MonkeyPatch,
    ):
        """Objects of cut uploads and deletions: after a day, and at the run's end at once."""
        for step in (1, 2, 3, 4, 5, 9):
            make_step(store.root, step, {"a": bytes([step])})
        uploader = self.uploader(store, remote, remote_keep_last=2, remote_interval=1)
        for step, cut in ((1, None), (2, None), (3, "remote.uncommitted"), (4, "remote.before_manifest")):
            with monkeypatch.context() as patch:
                patch.setattr("cairn.remote.step_store.fault_point", die_at(cut or "nowhere"))
                with pytest.raises(KeyboardInterrupt) if cut else contextlib.nullcontext():
                    uploader.upload(step)
        store.delete(4)  # given up
        put(remote, *make_step(store.root.parent / "aside", 7, {"a": b"1"}))
        assert remote.set_aside_after(3, "branch_1") == [7]
        below = RemoteStore(Objects(f"{remote}/step_6"))
        put(below, *make_step(store.root.parent / "below", 1, {"a": b"1"}))
        assert (remote.steps(), self.left(remote)) == ([2, 3], [1, 2, 3, 4, 6, 7])
        uploader.begin()
        assert self.left(remote) == [1, 2, 3, 4, 6, 7], "somebody may go on with it"
        for path in url[1].glob("step_*/**/*"):
            os.utime(path, (time.time() - 90_000,) * 2)
        remote.objects.put("step_4/b", b"not so old")
        remote.objects.put("step_5/a", b"it waits")
        os.utime(url[1] / "step_5/a", (time.time() - 90_000,) * 2)
        uploader.begin()
        assert self.left(remote) == [2, 3, 4, 5, 6, 7]
        uploader.upload(5)
        uploader.upload(9)
        remote.claim("run", "run:2")
        uploader.end()
        assert self.left(remote) == [4, 5, 6, 7, 9], "it is another attempt's by now"
        remote.claim("run", "run:1")
        uploader.end()
        assert self.left(remote) == [5, 6, 7, 9]
        assert below.steps() == [1]

    def test_an_object_that_can_not_be_deleted_is_no_reason_to_upload_nothing(
        self, store: CheckpointStore, remote: RemoteStore, caplog: pytest.LogCaptureFixture
    ):
        """It is logged."""
        make_step(store.root, 9, {"a": b"1"})
        uploader = self.uploader(store, remote)
        remote.objects.put("step_1/a", b"1")

        def refuse(names: Sequence[str]) -> None:
            raise RemoteError(f"{names[0]}: access was denied")

        remote.objects.delete = refuse
        uploader.begin()
        assert not caplog.text
        uploader.upload(9)
        uploader.end()
        assert "may be left: step_1/a: access was denied" in caplog.text

    def test_the_best_are_uploaded_once(self, store: CheckpointStore, remote: RemoteStore):
        """Also where a step on the local disk is better than the others here, but not than those there."""
        rules = {"remote_keep_best": 1, "metric": "loss", "mode": "min"}
        for step, loss in ((1, 0.5), (2, 0.7), (3, 0.9)):
            make_step(store.root, step, {"a": b"1"}, metrics={"loss": loss})
        uploader = self.uploader(store, remote, **rules)
        order: list[int] = []
        while (step := uploader.next_step()) is not None and len(order) < 9:
            uploader.upload(step)
            order.append(step)
        assert order == [3, 1]
        store.delete(1)
        assert uploader.next_step() == 2, "it is the best step here"
        uploader.upload(2)
        assert remote.steps() == [1, 3]
        assert uploader.next_step() is None

    def test_an_older_attempt_stops(self, store: CheckpointStore, remote: RemoteStore):
        """Even if the newer one, on another machine, claims the prefix while a step is being uploaded."""
        make_step(store.root, 1, {"a": b"1"})
        uploader = self.uploader(store, remote)
        with pytest.raises(Taken, match="another attempt has taken it over"):
            uploader.upload(1, on_bytes=lambda count: remote.claim("run", "run:2"))
        assert remote.steps() == []
        assert uploader.uploads.read() == Uploaded()

    @pytest.mark.parametrize("size", [len(LARGE), 5])
    def test_an_older_attempt_spoils_no_step(
        self,
        store: CheckpointStore,
        remote: RemoteStore,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        size: int,
    ):
        """The newer one has committed its step of this number while the older one was uploading its own."""
        if size > CHUNK_BYTES and remote.objects.url.startswith("file:"):
            pytest.skip("obstore asks for the bytes of a large file, and can't be called meanwhile")
        monkeypatch.setattr("cairn.remote.step_store.UPLOADS", 1)
        names = [f"file_{n}" for n in range(3)]
        make_step(store.root, 1, {name: LARGE[:size] for name in names})
        newer, manifest = make_step(tmp_path, 1, {name: b"newer" for name in names}, attempt=2)
        turns = [1]

        def overtake(count: int) -> None:
            with contextlib.suppress(IndexError):
                turns.pop()
                remote.claim("run", "run:2")
                put(remote, newer, manifest)

        uploader = self.uploader(store, remote)
        with pytest.raises(Taken, match="another attempt has taken it over"):
            uploader.upload(1, on_bytes=overtake)
        assert remote.verify(1) == manifest

    def overtaken(
        self, remote: RemoteStore, folder: Path, start: int, steps: tuple[int, ...]
    ) -> tuple[Uploader, Uploader]:
        """The uploaders of an attempt with step 4, which has claimed the prefix, and of a newer one."""
        made: list[Uploader] = []
        for number, of in ((1, (4,)), (2, steps)):
            store = CheckpointStore(folder / str(number))
            for step in of:
                files = {"a": random.Random(number).randbytes(100), "b": b"same"}
                make_step(store.root, step, files, attempt=number)
            uploads = RunUploads(store, CkptConfig(remote="file:///unused", remote_keep_last=9), last=9)
            attempt = Attempt("run", number, "sft", start if number == 2 else 0, None, "branch_1")
            other = RemoteStore(Objects(remote.objects.url, retry_seconds=5))
            made.append(Uploader(uploads, other, attempt.owner, attempt=attempt))
        remote.claim("run", "run:1")
        return made[0], made[1]

    def test_a_commit_that_arrives_late_is_replaced(
        self, remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """The newer attempt has sent its files of this number when the older one's request gets through."""
        older, newer = self.overtaken(remote, tmp_path, 0, (4,))
        put_new = older.remote.objects.put_new

        def hang(name: str, content: bytes) -> None:
            remote.claim("run", "run:2")
            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(newer.remote.objects, "put_new", interrupt)
                newer.upload(4)
            put_new(name, content)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(older.remote.objects, "put_new", hang)
        with pytest.raises(Taken, match="another attempt has taken it over"):
            older.upload(4)
        assert remote.manifest(4).attempt == 1, "its files are the newer attempt's"
        newer.upload(4)
        assert (remote.steps(), remote.verify(4).attempt) == ([4], 2)
        assert newer.uploads.read() == Uploaded((4,))
        assert [name for name, _ in remote.objects.list("abandoned") if name.endswith("/step_4.json")]

    def test_a_commit_that_arrives_right_before_ones_own(
        self, remote: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """It is set aside, and all files are sent again, since any of them may have been replaced too."""
        older, newer = self.overtaken(remote, tmp_path, 0, (4,))
        remote.claim("run", "run:2")
        put_new, late = newer.remote.objects.put_new, [1]

        def overtake(name: str, content: bytes) -> None:
            if late:
                late.pop()
                folder = older.uploads.store.folder(4)
                remote.objects.put("step_4/a", (folder / "a").read_bytes())
                remote.objects.put_new(name, (folder / "manifest.json").read_bytes())
            put_new(name, content)

        monkeypatch.setattr(newer.remote.objects, "put_new", overtake)
        newer.upload(4)
        assert remote.verify(4).attempt == 2
        with pytest.raises(Taken):
            older.upload(4)
        assert remote.verify(4).attempt == 2

    @staticmethod
    def note(uploader: Uploader) -> tuple[Manifest, Sent]:
        manifest = uploader.uploads.store.manifest(4)
        return manifest, Sent(uploader.uploads.sent_file(4), manifest)

    def test_a_late_step_that_the_newer_attempt_does_not_have(self, remote: RemoteStore, tmp_path: Path):
        """It is set aside with the next upload: the attempt started before it, and goes on in another way."""
        older, newer = self.overtaken(remote, tmp_path, 2, (8, 9))
        remote.claim("run", "run:2")
        put(remote, *make_step(tmp_path / "own", 2, {"a": b"1"}))
        older.remote.put(older.uploads.store.folder(4), *self.note(older))
        newer.begin()
        newer.upload(8)
        assert remote.steps() == [2, 8]
        older.remote.put(older.uploads.store.folder(4), *self.note(older))
        newer.end()
        assert (remote.steps(), newer.uploads.read().steps) == ([2, 8], (2, 8))

    @draws.seldom
    def test_the_rate_is_limited(self):
        """By the bytes that were read so far."""
        began = time.monotonic()
        limit = Limit(1_000_000)
        for _ in range(5):
            limit(20_000)
        assert time.monotonic() - began >= 0.1


CONNECTS = """
import socket, sys
own, server = map(int, sys.argv[1:])
with socket.socket() as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind(("127.0.0.1", own))
    connection.connect(("127.0.0.1", server))
    sys.stdin.read()
"""


def test_two_processes_ask_from_one_port():
    """As happens by chance where a host has hundreds of connections: each is told from the other."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        asked_by: dict[int, int] = {}
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            command = [sys.executable, "-c", CONNECTS, str(port), str(server.getsockname()[1])]
            client = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            connection = stack.enter_context(server.accept()[0])
            assert connection.getpeername()[1] == port
            asked_by[client.pid] = process_of_client(connection)
        assert len(asked_by) == 2
        assert all(found == pid for pid, found in asked_by.items())
