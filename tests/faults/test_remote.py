"""Runs with an S3 server behind their disks: lost machines, killed uploaders, bad networks."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import draws
import pytest
from runs import (
    CONFIGS,
    Command,
    Shell,
    assert_same_bits,
    printed,
    priority_of,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    whole_rows,
)
from stores import BadNetwork, reachable, s3_server

from cairn.checkpoint.step_folder import verify
from cairn.remote import Objects, RemoteStore
from cairn.run.connections import free_port
from cairn.run.waiting import wait_for

pytestmark = pytest.mark.timeout(600)
SOAK = pytest.mark.soak

END = 60
SHORT = ("--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 32)
SFT = ("sft", "@", f"{CONFIGS}/sft.toml", *SHORT, "--ckpt.interval", 4, "--ckpt.keep-last", 2)
PATIENT = ("--heartbeat-timeout", 600)
"""For runs whose worker is stopped until the uploader has come so far."""
POINTS = (
    "remote.sent_file:kill@2",
    "remote.before_manifest:kill",
    "remote.before_commit:kill",
    "remote.done:kill",
    "remote.uncommitted:kill",
)
AFTER_A_COMMIT = POINTS[3:]
"""Points that an uploader reaches when a step is committed, or one is deleted for that."""


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
    assert f"resuming from step {there[-1]} in {url}" in resumed.output
    assert "downloading" not in resumed.output
    assert f"{url} has step {END}" in resumed.output
    whole_rows(second, END)
    assert_same_bits(tensors(step_folder(straight, END)), tensors(step_folder(second, END)))
    found = store.steps("lost")
    assert found[-1] == END
    assert len(found) <= 4
    assert store.shell.run("ckpt", "audit", second).code == 0


def test_each_rank_reads_its_own_half(store: Store, tmp_path: Path):
    """Of a step that no disk here has: no byte comes twice, and the run goes on bit for bit."""
    url, pair = "s3://bucket/halves", ("--workers", 2)
    run, here, there = tmp_path / "run", tmp_path / "here", tmp_path / "there"
    store.shell.succeed(*SFT, *pair, "--ckpt.remote", url, "--max-steps", 8, "--output-dir", run)
    shutil.copytree(run, here)
    store.shell.succeed(
        *(*SFT, *pair, "--max-steps", 12, "--output-dir", here, "--ckpt.resume", "auto"),
    )
    store.network.bytes_down.clear()
    store.network.readers = Counter()
    store.shell.succeed(
        *(*SFT, *pair, "--ckpt.remote", url, "--max-steps", 12, "--output-dir", there),
        *("--ckpt.resume", "auto"),
    )
    for name in ("trainer/optimizer.safetensors", "model/model.safetensors"):
        path, size = f"/bucket/halves/step_8/{name}", (run / "checkpoints/step_8" / name).stat().st_size
        assert size <= store.network.bytes_down[path] <= 1.1 * size
        shares = sorted(n / size for (of, _), n in store.network.readers.items() if of == path)
        *headers, one, other = shares  # the launcher reads the header, as may others
        assert sum(headers) < 0.05
        assert 0.4 < one <= other < 0.6
    store.network.readers = None
    assert_same_bits(tensors(step_folder(here, 12)), tensors(step_folder(there, 12)))
    assert [row["loss"] for row in whole_rows(here, 12)] == [row["loss"] for row in whole_rows(there, 12)]
    assert not (there / "checkpoints/step_8").exists()


def test_the_store_as_folder_makes_the_disk_a_cache(store: Store, straight: Path, tmp_path: Path):
    """Of two steps and those that wait; without it the run goes on bit for bit. Rules are of the store."""
    url, run = "s3://bucket/folder", tmp_path / "run"
    command = (*SFT, "--ckpt.dir", url, "--output-dir", run)
    store.shell.succeed(*command, "--max-steps", 12)
    assert steps(run) == store.steps("folder") == [8, 12], "keep-last = 2 holds there, too"
    shutil.rmtree(run / "checkpoints")
    held: list[int] = []
    with store.shell.start(*command, "--max-steps", END, "--ckpt.resume", "latest") as running:
        running.wait_until(lambda: held.append(len(steps(run))) or len(rows(run)) == END)
        finished = running.finish(300)
    assert finished.code == 0, finished.output
    assert f"resuming from step 12 in {url}" in finished.output
    assert max(held) <= 2 + 2 + 1, "two, two that wait to be uploaded, and one that was just saved"
    assert steps(run) == [END - 4, END]
    assert store.steps("folder")[-1] == END
    whole_rows(run, END)
    assert_same_bits(tensors(step_folder(straight, END)), tensors(step_folder(run, END)))
    assert store.shell.run("ckpt", "audit", run).code == 0
    replayed = printed(store.shell.succeed("ckpt", "replay", url, "--json"))
    assert (replayed["start"], replayed["last"], replayed["verdict"]) == (END - 4, END, "same")
    parted = printed(store.shell.succeed("ckpt", "bisect", straight, url, "--json"))
    assert (parted["step"], parted["same_through"]) == (None, END)


@draws.in_turn("killed uploaders", 0, 2)
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


@draws.in_turn("killed uploaders", 1, 2)
@pytest.mark.parametrize("before", [*draws.cases(POINTS[:3], __name__, 1), pytest.param("", marks=SOAK)])
def test_machines_that_are_lost_at_points_of_an_upload(
    store: Store, straight: Path, tmp_path: Path, before: str
):
    """The uploader is killed there, then the others, and every other time the disk is gone as well.

    No step is there that is not whole; the one that the uploader had begun is completed by
    the next machine; and the last one's run is the same bit for bit.

    before: the point before a commit, which the commit draws; empty: all of them in one run.
    """
    prefix = f"points-{before}".replace(":", "-")
    url, once, run = f"s3://bucket/{prefix}", tmp_path / "once", tmp_path / "run_0"
    points = (before, *AFTER_A_COMMIT) if before else POINTS
    once.mkdir()

    def struck(running: Command, run: Path, seen: int) -> bool:
        """Whether the fault has; as soon as a step waits to be uploaded, training stands still for that."""
        if max(steps(run), default=0) > seen:
            for worker in running.workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGSTOP)
        time.sleep(0.05)
        return not list(once.iterdir())

    remote = ("--ckpt.remote", url, "--ckpt.remote-keep-last", 1, "--max-steps", END, "--ckpt.resume", "auto")
    alone = ("--max-restarts", 0, *PATIENT)  # no other uploader goes on before the machine is lost
    seen = 0
    for number, fault in enumerate(points):
        store.network.mood = ("storm", "drops", None)[number % 3]
        (once / fault).touch()
        faults = {"CAIRN_FAULT": fault, "CAIRN_FAULT_ONCE": str(once)}
        with store.shell.start(*SFT, *remote, *alone, "--output-dir", run, environment=faults) as running:
            running.wait_until(partial(struck, running, run, seen))
        running.assert_nothing_survives()
        newest = max(store.steps(prefix), default=0)
        assert seen <= newest < END
        assert (newest > seen) == ("done" in fault or "uncommitted" in fault), fault
        seen = newest
        if number % 2:
            shutil.rmtree(run)
            run = tmp_path / f"run_{number}"
    store.network.mood = None
    finished = store.shell.succeed(*SFT, *remote, "--output-dir", run)
    assert store.steps(prefix) == [END], finished
    whole_rows(run, END)
    assert_same_bits(tensors(step_folder(straight, END)), tensors(step_folder(run, END)))
    assert store.shell.run("ckpt", "audit", run).code == 0


@draws.in_turn("a store in trouble", 0, 3)
def test_a_store_that_dies_and_comes_back(store: Store, straight: Path, tmp_path: Path):
    """Training goes on without it, and the uploader goes on with it."""
    own, run, port = tmp_path / "own", tmp_path / "run", free_port()
    (own / "bucket").mkdir(parents=True)
    command = [sys.executable, "-m", "localbucket", "--port", str(port), str(own)]
    endpoint = {**store.direct, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: reachable(port) or None, seconds=60, whom="the S3 server", setting="none")
        options = ("--ckpt.remote", "s3://bucket/back", "--max-steps", END, "--output-dir", run, *PATIENT)
        with store.shell.start(*SFT, *options, environment=endpoint) as running:
            running.wait_until(lambda: steps(run))
            (worker,) = running.workers()
            os.kill(worker, signal.SIGSTOP)  # or all is trained before the first upload is complete
            running.wait_until(lambda: list((own / "bucket/back/committed").glob("*.json")))
            server.kill()
            server.wait()
            died_at = len(rows(run))
            os.kill(worker, signal.SIGCONT)
            running.wait_until(lambda: len(rows(run)) > died_at + 8)
            server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            finished = running.finish(300)
        assert finished.code == 0, finished.output
        assert "uploader died" not in finished.output
    finally:
        server.kill()
        server.wait()
    manifests = sorted((own / "bucket/back/committed").glob("*.json"))
    assert f"step_{END}.json" in [path.name for path in manifests]
    assert_same_bits(tensors(step_folder(straight, END)), tensors(own / f"bucket/back/step_{END}"))
    for path in manifests:
        verify(own / "bucket/back" / path.stem)


@draws.in_turn("a store in trouble", 1, 3)
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


@draws.in_turn("a store in trouble", 2, 3)
def test_a_slow_network_stops_no_training(store: Store, tmp_path: Path):
    """Training is over while a step is on its way; the run waits for its last one, however long it takes.

    The uploader has normal priority then, whether or not it was up in time to leave processors to training.
    """
    url, run = "s3://bucket/crawling", tmp_path / "run"
    store.network.mood, store.network.rate = "slow", 64 << 10
    command = (*SFT, "--ckpt.remote", url, "--ckpt.remote-timeout", 1, "--output-dir", run)
    command = (*command, "--ckpt.remote-keep-last", 1)  # only the newest waits, so it never is behind
    with store.shell.start(*command, "--max-steps", END) as running:
        uploader = lambda: read(run / "roles.json")["roles"]["uploader"]["pid"]  # noqa: E731
        running.wait_until(lambda: (run / "heartbeats" / "uploader.json").exists())
        running.wait_until(lambda: len(rows(run)) == END)
        running.wait_until(lambda: {share for _, _, share in priority_of(uploader())} == {0})
        assert not (store.bucket / f"crawling/committed/step_{END}.json").exists()
        store.network.rate = 1 << 20
        finished = running.finish(300)
    assert finished.code == 0, finished.output
    assert f"{url} has step {END}" in finished.output
    assert "uploader died" not in finished.output
    assert store.steps("crawling")[-1] == END


def test_downloads_that_arrive_damaged_are_asked_for_again(store: Store, straight: Path, tmp_path: Path):
    """And a step that is damaged in the store itself is passed over, once all of it was asked for again."""
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
    assert "reading step 8 in the object store failed" in resumed.output
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
        (("--preemption.watch", "nowhere"), "not one of aws, gcp, azure, nor module:function"),
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
    """A machine that will be taken away stops with exit code 75, and its newest step is in the store.

    If saves take too long for that, none is begun, and the one before is in the store.
    """

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
            running.wait_until((run / "rates" / "save.json").exists)
            Google.taken = True
            finished = running.finish(120)
        newest = steps(run)[-1]
        assert store.steps("spot")[-1] == newest
        Google.taken = False
        again = (*command, "--ckpt.interval", 100_000, "--ckpt.resume", "auto", "--output-dir", run)
        with store.shell.start(*again) as running:
            running.wait_until(lambda: len(rows(run)) > newest + 3)
            (run / "rates" / "save.json").write_text("[[1e12, 1000.0]]")
            Google.taken = True
            unsaved = running.finish(120)
    finally:
        server.shutdown()
        server.server_close()
    assert finished.code == 75, finished.output
    told = re.search(r"Google preempts this machine in (\d+) s", finished.output)
    left = re.search(rf"(\d+) s are left, and a save takes .* s: step {newest} is saved", finished.output)
    assert told, finished.output
    assert left, finished.output
    assert int(left[1]) + 2 <= int(told[1]) <= 30, "two seconds are for the end of the run"
    assert unsaved.code == 75, unsaved.output
    end = rows(run)[-1]["step"]
    reason = rf"\d+ s are left, and a save takes 1000 s; step {newest} is saved and uploaded"
    assert re.search(rf"warning: step {end} is not saved: {reason}", unsaved.output)
    assert re.search(rf"stopped, but step {end} could not be saved \({reason}\)", unsaved.output)
    assert (steps(run)[-1], store.steps("spot")[-1]) == (newest, newest)
