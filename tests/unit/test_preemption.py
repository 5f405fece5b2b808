"""Notices that a machine will be taken away, from services that answer like those of the clouds."""

import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cairn.config.preemption import PreemptionConfig
from cairn.launch.preemption import Notice, asking, watching
from cairn.run.errors import UsageError

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


def test_a_service_that_fails_ends_nothing(service: Service, caplog: pytest.LogCaptureFixture):
    """It is asked again, and one line says so."""
    told: list[Notice] = []
    service.answers = {GCP: (500, "")}
    config = PreemptionConfig(watch="gcp", url=service.url, interval=0.01, seconds=7)
    with watching(config, told.append):
        while not caplog.records:
            time.sleep(0.01)
        assert told == []
        service.answers = {GCP: (200, "TRUE")}
        while not told:
            time.sleep(0.01)
    assert told == [Notice("Google preempts this machine", 7)]
    assert [record.message for record in caplog.records if "does not answer" in record.message] != []


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
        ("hetzner", "expected aws, gcp, azure, or module:function"),
        ("nowhere:ask", "No module named 'nowhere'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:GCP", "is not a function"),
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
