"""Notices that a machine will be taken away, from services that answer like those of the clouds."""

import datetime
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from stores import make_step

from cairn.checkpoint.saving.saver import Newest, Saved, decide
from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.shared import PreemptionConfig
from cairn.launch.preemption import Notice, asking, watching
from cairn.launch.supervisor import out_of_time
from cairn.remote import Objects, RemoteStore
from cairn.remote.uploads import RunUploads, Uploader
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt
from cairn.run.processes import stop_on_signals
from cairn.run.waiting import Rates, Span
from cairn.trainer.checkpoints import SaveTimes

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, str]]


class Service:
    """A metadata service: answers by path, and the headers that it wants."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.wanted: dict[str, str] = {}
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                refused = any(self.headers.get(name) != value for name, value in service.wanted.items())
                default = (404, "")
                code, text = (401, "") if refused else service.answers.get(self.path, default)
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_PUT(self) -> None:
                text = "a token" if self.path == "/latest/api/token" else ""
                self.send_response(200 if text else 404)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()


def in_seconds(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time.time() + seconds, datetime.UTC)


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {
    "aws": {"X-aws-ec2-metadata-token": "a token"},
    "gcp": {"Metadata-Flavor": "Google"},
    "azure": {"Metadata": "true"},
}
CALM = {
    "aws": {},
    "gcp": {GCP: "FALSE"},
    "azure": {AZURE: json.dumps({"Events": [{"EventType": "Reboot"}]})},
}


def noticing(cloud: str) -> dict[str, str]:
    """Answers that hold a notice."""
    action = {"action": "terminate", "time": f"{in_seconds(110):%Y-%m-%dT%H:%M:%SZ}"}
    event = {"EventType": "Preempt", "NotBefore": format_datetime(in_seconds(40))}
    return {
        "aws": {AWS: json.dumps(action)},
        "gcp": {GCP: "TRUE"},
        "azure": {AZURE: json.dumps({"Events": [event]})},
    }[cloud]


@pytest.mark.parametrize("cloud", HEADERS)
def test_a_cloud_is_asked_as_it_wants(service: Service, cloud: str):
    """None without a notice, and the seconds that are left with one."""
    service.wanted = HEADERS[cloud]
    ask = asking(PreemptionConfig(watch=cloud, url=service.url))
    assert ask is not None
    service.answers = {path: (200, text) for path, text in CALM[cloud].items()}
    assert ask() is None
    service.answers = {path: (200, text) for path, text in noticing(cloud).items()}
    found = ask()
    assert found is not None
    assert found.seconds is not None
    assert 0 < found.seconds <= 120


@pytest.mark.parametrize(
    ("machines", "name", "told"),
    [
        (["nodes_1", "nodes_12"], "nodes_2", False),
        (["nodes_1", "Nodes_2"], "nodes_2", True),
        ([], "nodes_2", True),
        (["nodes_1"], None, True),
    ],
)
def test_azures_events_of_other_machines_do_not_count(
    service: Service, machines: list[str], name: str | None, told: bool
):
    """Azure tells all machines of a set; one that does not know its name takes each event for its own."""
    service.wanted = HEADERS["azure"]
    other = {"EventType": "Preempt", "Resources": ["nodes_7"], "NotBefore": format_datetime(in_seconds(40))}
    event = {"EventType": "Terminate", "Resources": machines, "NotBefore": format_datetime(in_seconds(40))}
    events = [other, event] if name else [event]
    service.answers = {AZURE: (200, json.dumps({"Events": events})), AZURE_NAME: (200, name or "")}
    if name is None:
        service.answers[AZURE_NAME] = (500, "")
    ask = asking(PreemptionConfig(watch="azure", url=service.url))
    assert ask is not None
    found = [ask(), ask()]
    assert [one.reason if one else None for one in found] == [("Azure: Terminate" if told else None)] * 2
    if name is None:
        service.answers[AZURE_NAME] = (200, "nodes_2")
        assert ask() is None


def test_a_service_that_fails_ends_nothing(service: Service, caplog: pytest.LogCaptureFixture):
    """It is asked again, and one line says so."""
    told: list[Notice] = []
    service.answers = {GCP: (500, "")}
    config = PreemptionConfig(watch="gcp", url=service.url, interval=0.01, seconds=7)
    with watching(config, told.append):
        while "does not answer" not in caplog.text:
            time.sleep(0.01)
        assert told == []
        service.answers = {GCP: (200, "TRUE")}
        while not told:
            time.sleep(0.01)
    assert told == [Notice("Google preempts this machine", 7)]
    assert caplog.text.count("does not answer") == 1


@pytest.mark.parametrize(("allowed", "within"), [(None, False), (600, False), (0.5, True)])
def test_a_setting_never_prolongs_what_the_cloud_says(service: Service, allowed: float | None, within: bool):
    """Google says for how long the machine stays, but not since when: since the look before, at worst."""
    told: list[Notice] = []
    service.answers = {GCP: (200, "TRUE")}
    config = PreemptionConfig(watch="gcp", url=service.url, interval=0.01, seconds=allowed)
    with watching(config, told.append):
        while not told:
            time.sleep(0.01)
    assert told[0].seconds is not None
    assert told[0].seconds < 30
    assert told[0].seconds == allowed or not within


answers: list[object] = []


def of_mine() -> object:
    """What a user's own watcher may be."""
    return answers.pop(0) if answers else None


def test_a_function_of_the_users(caplog: pytest.LogCaptureFixture):
    """It returns nothing, a reason, or a reason and the seconds left."""
    ask = asking(PreemptionConfig(watch=f"{__name__}:of_mine"))
    assert ask is not None
    answers[:] = [None, False, "maintenance", ("maintenance", 60)]
    assert [ask(), ask(), ask(), ask()] == [None, None, Notice("maintenance"), Notice("maintenance", 60.0)]
    answers[:] = [5]
    with pytest.raises(TypeError, match="expected None, a reason"):
        ask()


@pytest.mark.parametrize(
    ("watch", "message"),
    [
        ("hetzner", "not one of aws, gcp, azure, nor module:function"),
        ("nowhere:ask", "No module named 'nowhere'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:GCP", "is no function"),
    ],
)
def test_watchers_that_there_are_not(watch: str, message: str):
    """Exit code 2, before anything starts."""
    with pytest.raises(UsageError, match=message):
        asking(PreemptionConfig(watch=watch))


def test_without_a_watcher_nobody_is_asked():
    """Only signals tell."""
    assert asking(PreemptionConfig()) is None
    with watching(None, lambda notice: None):
        pass


# What is still saved and uploaded: by the times that earlier saves and uploads took

SAVE, SLOW_SAVE = Span(3, 5), Span(30, 40)
UPLOAD = Span(20, 25)
WAITING = Newest(8, waits=True, upload=UPLOAD)


@pytest.mark.parametrize(
    ("left", "save", "upload", "newest", "saves", "reason"),
    [
        (
            110,
            SAVE,
            UPLOAD,
            Newest(8),
            True,
            "3 to 5 s: step 9 is saved and uploaded, which takes 20 to 25 s",
        ),
        (
            28,
            SAVE,
            UPLOAD,
            Newest(8),
            True,
            "step 9 is saved on this disk; its upload, which takes 20 to 25 s",
        ),
        (28, SAVE, UPLOAD, WAITING, True, "may not end, so step 8 is uploaded first, which takes 20 to 25 s"),
        (28, SLOW_SAVE, UPLOAD, WAITING, False, "a save takes 30 to 40 s; step 8 is saved"),
        (28, SLOW_SAVE, UPLOAD, WAITING, False, "the time goes to its upload, which takes 20 to 25 s"),
        (10, SLOW_SAVE, UPLOAD, WAITING, False, "which takes 20 to 25 s and may not end"),
        (28, SLOW_SAVE, UPLOAD, Newest(8), False, "step 8 is saved and uploaded"),
        (28, SLOW_SAVE, UPLOAD, None, False, "no earlier step is saved"),
        (35, SLOW_SAVE, UPLOAD, Newest(8), True, "so it may not end: step 9 is saved"),  # nothing else to do
        (35, SLOW_SAVE, UPLOAD, WAITING, False, "35 s are left, and a save takes 30 to 40 s"),
        (35, None, None, None, True, "no save was measured yet: step 9 is saved all the same"),
        (35, SAVE, None, None, True, "no upload was measured yet: it is uploaded as far as time allows"),
        (-1, SAVE, UPLOAD, Newest(8), False, "0 s are left"),
    ],
)
def test_a_save_is_begun_only_if_it_can_end(
    left: float, save: Span | None, upload: Span | None, newest: Newest | None, saves: bool, reason: str
):
    """And the newest saved step is uploaded with the time that a hopeless one would take."""
    found = decide(9, left, save, upload, newest, remote=True)
    assert (found.saves, reason in found.reason) == (saves, True), found.reason


@pytest.mark.parametrize(("left", "saves"), [(60, True), (35, True), (20, False)])
def test_without_a_remote_store_the_disk_is_all_there_is(left: float, saves: bool):
    found = decide(9, left, SLOW_SAVE, None, Newest(8), remote=False)
    assert found.saves == saves
    assert "upload" not in found.reason


def test_what_a_save_may_take(tmp_path: Path):
    """The newest five measurements count, the slowest and the quickest; more bytes take longer."""
    rates = Rates(tmp_path / "rates")
    assert rates.expected("save", 100) is None
    for seconds in (90.0, 2.0, 4.0, 3.0, 3.0, 2.5):
        rates.note("save", 100, seconds)
    assert Rates(tmp_path / "rates").expected("save", 100) == Span(2.0, 4.0)
    assert rates.expected("save", 300) == Span(6.0, 12.0)
    assert rates.expected("save", 10) == Span(2.0, 4.0)
    assert rates.expected("upload", 100) is None
    (tmp_path / "rates" / "save.json").write_text("[[1")
    assert rates.expected("save", 100) is None


def test_the_earliest_deadline_counts(tmp_path: Path):
    """Roles that get the same signal know of none, and leave it as it is."""
    run = RunDirectory(tmp_path)
    assert run.seconds_left() is None
    run.request_stop("SIGTERM")
    assert run.seconds_left() is None
    run.request_stop("EC2 will terminate this instance", 100)
    run.request_stop("SIGTERM", 500)
    run.request_stop("SIGTERM")
    left = run.seconds_left()
    assert left is not None
    assert 0 < left < 100
    run.begin(Attempt("run", 1, "sft", 0, None, "branch_1"))
    assert (run.seconds_left(), run.stop_requested()) == (None, None)


def test_the_deadline_of_all_branches_is_that_of_each(tmp_path: Path):
    """Or an earlier one of its own; the next attempt knows of neither."""
    branches, run = RunDirectory(tmp_path / "all"), RunDirectory(tmp_path / "all/branches/one")
    run.path.mkdir(parents=True)
    run.end_with(branches)
    assert run.seconds_left() is None
    branches.request_stop("SIGTERM", 100)
    run.end_with(branches)
    left = run.seconds_left()
    assert left is not None
    assert 0 < left < 100
    run.request_stop("EC2 will terminate this instance", 50)
    run.end_with(branches)
    left = run.seconds_left()
    assert left is not None
    assert 0 < left < 50
    branches.forget_stop()
    assert (branches.seconds_left(), branches.stop_requested()) == (None, None)


@pytest.mark.parametrize(("seconds", "over"), [(None, False), (1000.0, False), (1.0, True)])
def test_the_launcher_ends_the_run_before_its_deadline(tmp_path: Path, seconds: float | None, over: bool):
    """Some time is kept for the end itself, and for a scheduler's commands after it."""
    run = RunDirectory(tmp_path)
    run.request_stop("SIGTERM", seconds)
    assert (out_of_time(run) is not None) == over


def test_an_upload_that_ends_in_time_goes_first(tmp_path: Path):
    """Of the steps that wait; else the newest does."""
    store = CheckpointStore(tmp_path)
    uploads = RunUploads(store, CkptConfig(remote="file:///nowhere"), last=99)
    for step in (4, 8, 12):
        make_step(tmp_path, step, {"model/a": b"x" * step})
    uploader = Uploader(uploads, RemoteStore(Objects(f"file://{tmp_path}/there")), "run:1")
    assert uploader.next_step() == 12
    assert uploader.next_step(ends=lambda step: step < 12) == 8
    assert uploader.next_step([8], ends=lambda step: step < 12) == 4
    assert uploader.next_step(ends=lambda step: False) == 12


def test_the_newest_step_of_a_stopped_run_is_uploaded_whatever_the_interval(tmp_path: Path):
    """Once its trainer has ended, so that no newer one comes."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.begin(Attempt("run", 1, "sft", 0, None, "branch_1"))
    ckpt = CkptConfig(remote="file:///nowhere", remote_interval=8)
    uploads = RunUploads(CheckpointStore(run.checkpoints), ckpt, 99, run.has_stopped)
    for step in (4, 8, 12):
        make_step(run.checkpoints, step, {"model/a": b"x"})
    run.set_role("trainer", "running")
    run.request_stop("SIGTERM")
    assert uploads.waiting() == [8]
    run.set_role("trainer", "stopped")
    assert uploads.waiting() == [8, 12]
    run.begin(Attempt("run", 2, "sft", 12, None, "branch_1"))
    assert uploads.waiting() == [8]


@pytest.mark.parametrize(("name", "left"), [("SIGTERM", True), ("SIGINT", False)])
def test_a_schedulers_signal_leaves_so_much_time(tmp_path: Path, name: str, left: bool):
    """A person's leaves as much as it takes."""
    run = RunDirectory(tmp_path)
    with stop_on_signals(run, lambda: None, 60):
        signal.raise_signal(signal.Signals[name])
    assert run.stop_requested() == name
    assert (run.seconds_left() is not None) == left


def test_a_rank_that_is_killed_right_after_a_signal_has_asked_for_nothing(tmp_path: Path):
    """Ray ends the ranks of a dead driver so. One that lives on has asked, also if it trains no more."""
    code = (
        "import signal, sys; from cairn.run.directory import RunDirectory; from pathlib import Path\n"
        "from cairn.run.processes import stop_on_signals\n"
        "with stop_on_signals(RunDirectory(Path(sys.argv[1])), later=1.0):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('asks', flush=True)\n"
    )
    for name in ("killed", "lives"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
            assert rank.stdout
            assert rank.stdout.readline() == b"asks\n"
            if name == "killed":
                rank.kill()
    assert RunDirectory(tmp_path / "killed").stop_requested() is None
    assert RunDirectory(tmp_path / "lives").stop_requested() == "SIGTERM"


@pytest.mark.parametrize(("seconds", "allowed"), [(None, True), (1000.0, True), (10.0, False)])
def test_rank_0_compares_with_the_runs_own_saves(
    tmp_path: Path, seconds: float | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
):
    """What it decided, and why, is in the run's history."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    run = RunDirectory(tmp_path)
    times = SaveTimes(run, CheckpointStore(run.checkpoints), CkptConfig(), last=99)
    make_step(run.checkpoints, 4, {"model/a": b"x" * 100})
    times.note([Saved(4, 0.1, 30.0, 0.0)])
    run.request_stop("SIGTERM", seconds)
    assert times.allow(6, saving=False) == allowed
    events = [(event["event"], event["step"]) for event in run.history.rows()]
    assert events == ([] if seconds is None else [("saved_in_time" if allowed else "not_saved", 6)])
    if not allowed:
        assert "8 s are left, and a save takes 30 s; step 4 is saved" in run.history.rows()[0]["reason"]
