"""Runs with an S3 server behind their disks: lost machines, killed uploaders, bad networks."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from runs import CONFIGS, Shell, assert_same_bits, rows, step_folder, steps, tensors, whole_rows
from stores import BadNetwork, s3_server

from cairn.checkpoint.remote import Objects, RemoteStore

pytestmark = pytest.mark.timeout(600)

END = 60
SHORT = ("--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 32)
SFT = ("sft", "@", f"{CONFIGS}/sft.toml", *SHORT, "--ckpt.interval", 4, "--ckpt.keep-last", 2)
POINTS = (
    "remote.sent_file:kill@2",
    "remote.before_manifest:kill",
    "remote.done:kill",
    "remote.uncommitted:kill",
)


class Store:
    """A bucket, the way to it, and a shell whose commands go that way."""

    def __init__(self, folder: Path, environment: dict[str, str], bucket: Path):
        self.bucket = bucket
        self.network = BadNetwork(environment["AWS_ENDPOINT_URL"])
        self.shell = Shell(folder)
        self.shell.environment |= environment | {"AWS_ENDPOINT_URL": self.network.url}
        self.direct = environment

    def steps(self, prefix: str) -> list[int]:
        """The steps below a prefix, asked for past the bad network; each is read in full."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.direct.items():
                patch.setenv(name, value)
            remote = RemoteStore(Objects(f"s3://bucket/{prefix}", retry_seconds=5))
            found = remote.steps()
            for step in found:
                remote.verify(step)
            return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder) as environment:
        made = Store(tmp_path_factory.mktemp("shell"), environment, folder / "bucket")
        yield made
        made.network.close()


@pytest.fixture(scope="module")
def straight(store: Store) -> Path:
    """A run that nothing happens to."""
    run = store.shell.folder / "straight"
    store.shell.succeed(*SFT, "--max-steps", END, "--output-dir", run)
    return run


@pytest.fixture(autouse=True)
def calm(store: Store) -> Iterator[None]:
    store.network.mood = None
    yield
    store.network.mood = None


def test_a_lost_machine_loses_nothing(store: Store, straight: Path):
    """Another machine, with an empty disk, goes on bit for bit, although the network cuts answers."""
    url, first, second = "s3://bucket/lost", store.shell.folder / "first", store.shell.folder / "second"
    remote = ("--ckpt.remote", url, "--ckpt.remote-keep-last", 3)
    with store.shell.start(*SFT, *remote, "--max-steps", END, "--output-dir", first) as running:
        running.wait_until(lambda: list((store.bucket / "lost/committed").glob("*.json")))
    running.assert_nothing_survives()
    shutil.rmtree(first)
    there = store.steps("lost")
    assert 0 < there[-1] < END
    store.network.mood = "drops"
    resumed = store.shell.run(
        *SFT, *remote, "--max-steps", END, "--output-dir", second, "--ckpt.resume", "auto"
    )
    assert resumed.code == 0, resumed.output
    assert f"downloading step {there[-1]} from {url}" in resumed.output
    assert f"{url} has step {END}" in resumed.output
    whole_rows(second, END)
    assert_same_bits(tensors(step_folder(straight, END)), tensors(step_folder(second, END)))
    found = store.steps("lost")
    assert found[-1] == END
    assert len(found) <= 4
    assert store.shell.run("ckpt", "audit", second).code == 0


def test_uploaders_that_are_killed_leave_whole_steps_only(store: Store, tmp_path: Path):
    """At every point; the next one goes on, and the run, which does not notice, ends well."""
    url = "s3://bucket/killed"
    (tmp_path / "once").mkdir()
    for fault in POINTS:
        (tmp_path / "once" / fault).touch()
    faults = {"CAIRN_FAULT": ",".join(POINTS), "CAIRN_FAULT_ONCE": str(tmp_path / "once")}
    run = tmp_path / "run"
    remote = ("--ckpt.remote", url, "--ckpt.remote-keep-last", 1, "--max-restarts", 10, "--output-dir", run)
    store.shell.succeed(*SFT, *remote, "--max-steps", 4)  # its step has to be deleted by the next run
    assert store.steps("killed") == [4]
    command = (*SFT, *remote, "--max-steps", END, "--ckpt.resume", "auto")
    with store.shell.start(*command, environment=faults) as running:
        finished = running.finish(300)
    assert finished.code == 0, finished.output
    assert list((tmp_path / "once").iterdir()) == [], "every fault has struck"
    assert store.steps("killed") == [END]
    assert finished.output.count("uploader died") == len(POINTS)
    assert len(rows(run)) == END


def test_a_store_that_is_away_stops_no_training(store: Store, tmp_path: Path):
    """Warnings, then exit code 1 at the end; the same command again uploads what is missing."""
    url, run = "s3://bucket/away", tmp_path / "run"
    command = (*SFT, "--ckpt.remote", url, "--ckpt.remote-timeout", 1, "--output-dir", run)
    store.shell.succeed(*command, "--max-steps", 4)
    assert store.steps("away") == [4]

    with store.shell.start(*command, "--max-steps", END, "--ckpt.resume", "auto") as running:
        running.wait_until(lambda: len(rows(run)) > 5)
        store.network.mood = "away"
        finished = running.finish(300)
    assert finished.code == 1, finished.output
    assert "warning: step" in finished.output
    assert f"the run is complete, but {url} has step" in finished.output
    assert steps(run)[-1] == END
    store.network.mood = None
    again = store.shell.run(*command, "--max-steps", END, "--ckpt.resume", "auto")
    assert again.code == 0, again.output
    assert "the run is complete" in again.output
    assert store.steps("away")[-1] == END


def test_downloads_that_arrive_damaged_are_asked_for_again(store: Store, straight: Path, tmp_path: Path):
    """And a step that is damaged in the store itself is passed over."""
    url = "s3://bucket/damaged"
    store.shell.succeed(*SFT, "--ckpt.remote", url, "--max-steps", 8, "--output-dir", tmp_path / "run")
    store.network.mood = "damage"
    path = store.bucket / "damaged/step_8/trainer/optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    resumed = store.shell.run(
        *(*SFT, "--ckpt.remote", url, "--max-steps", END, "--output-dir", tmp_path / "new"),
        *("--ckpt.resume", "latest"),
    )
    assert resumed.code == 0, resumed.output
    assert "passing over a remote checkpoint: s3://bucket/damaged/step_8/trainer/optimizer" in resumed.output
    assert_same_bits(tensors(step_folder(straight, END)), tensors(step_folder(tmp_path / "new", END)))


def test_wrong_prefixes_and_steps_are_refused(store: Store, tmp_path: Path):
    """Before anything starts: exit code 2, and what to do."""
    url = "s3://bucket/refused"
    store.shell.succeed(*SFT, "--ckpt.remote", url, "--max-steps", 2, "--output-dir", tmp_path / "run")
    for arguments, message in [
        (("--ckpt.remote", url), "belongs to run"),
        (("--ckpt.remote", "s3://no-such-bucket/x"), "s3://no-such-bucket/x"),
        (("--ckpt.remote", "/a/path"), "is not a URL such as"),
        (("--ckpt.remote-keep-last", 2), "needs remote"),
        (("--ckpt.resume", f"{url}/step_7"), "there is no step 7"),
        (("--ckpt.resume", url), "must end with the name of a step"),
        (("--preemption.watch", "nowhere"), "expected aws, gcp, azure"),
    ]:
        finished = store.shell.run(*SFT, *arguments, "--max-steps", 4, "--output-dir", tmp_path / "other")
        assert (finished.code, message in finished.output) == (2, True), finished.output
        assert "secret" not in finished.output
    forked = store.shell.run(
        *(*SFT, "--max-steps", 4, "--output-dir", tmp_path / "fork", "--ckpt.resume", f"{url}/step_2"),
    )
    assert forked.code == 0, forked.output
    listed = json.loads(store.shell.succeed("ckpt", "list", url, "--json"))
    assert [row["step"] for row in listed] == [2]
    assert store.shell.run("ckpt", "verify", f"{url}/step_2").code == 0


def test_a_notice_saves_and_uploads(store: Store, tmp_path: Path):
    """A machine that will be taken away stops with exit code 75, and its newest step is in the store."""

    class Google(BaseHTTPRequestHandler):
        taken = False

        def do_GET(self) -> None:
            text = str(Google.taken).upper().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Google)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    watch = ("--preemption.watch", "gcp", "--preemption.url", f"http://127.0.0.1:{server.server_port}")
    url, run = "s3://bucket/spot", tmp_path / "run"
    command = (*SFT, "--ckpt.remote", url, *watch, "--preemption.interval", 0.1, "--max-steps", 100_000)
    try:
        with store.shell.start(*command, "--output-dir", run) as running:
            running.wait_until(lambda: len(rows(run)) > 3)
            Google.taken = True
            finished = running.finish(120)
    finally:
        server.shutdown()
        server.server_close()
    assert finished.code == 75, finished.output
    assert "Google preempts this machine in 30 s" in finished.output
    assert store.steps("spot")[-1] == steps(run)[-1]
