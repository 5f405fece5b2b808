"""How a run is, as Prometheus reads it: over HTTP at a loopback address, and in a file."""

import contextlib
import http.server
import ipaddress
import math
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from cairn.config.sinks import PrometheusConfig
from cairn.run.diagnosis import RULES, Finding
from cairn.run.files import DamagedFile, make_folders, write_atomic
from cairn.run.view import RunView
from cairn.watch.overview import Overview, overview
from cairn.watch.sinks.sink import Sink, SinkRun, numbers, problem_of_folder

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LEAST_SECONDS = 1.0
"""An answer is as old as this at most, or as `SHARE` times what it took to make."""
SHARE = 20
JUDGED_SECONDS = 30.0
"""Between two looks at what keeps the run from learning, or `JUDGED_SHARE` times as long as a look takes."""
JUDGED_SHARE = 1000
FILE_SECONDS = 15.0
"""Between two writes of the file."""
PATIENCE_SECONDS = 5.0
"""How long a client may take for its request."""
STATES = ("empty", "unknown", "running", "stopping", "done", "stopped", "failed", "killed")
ROLE_STATES = ("running", "waiting", "done", "stopped", "failed")

Labels = Mapping[str, str]


class Prometheus(Sink):
    """Serves `GET /metrics` while the run goes on; the text is made when it is asked for."""

    def __init__(self, config: PrometheusConfig):
        self.config = config
        self._server: _Server | None = None
        self._writer: _Writer | None = None

    def problems(self, run: Path) -> Iterator[str]:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((HOST, self.config.port))
                probe.listen()  # two may bind to a port with that option, and one listen
        except OSError as error:
            yield (
                f"--sinks.prometheus.port {self.config.port}: {HOST}:{self.config.port} can't be used: "
                f"{error.strerror}; give each run a port of its own"
            )
        if self.config.file:
            problem = problem_of_folder(Path(self.config.file).parent, "--sinks.prometheus.file: the folder")
            yield from [problem] if problem else []

    def begin(self, run: SinkRun, after: int) -> None:
        text = RunText(run)
        self._server = _Server((HOST, self.config.port), text)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        if self.config.file:
            self._writer = _Writer(text, Path(self.config.file))
            self._writer.start()

    def end(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._writer is not None:
            self._writer.end()
            self._writer = None


class _Writer(threading.Thread):
    """Keeps a file up to date; what can't be written now is written later."""

    def __init__(self, text: "RunText", path: Path):
        super().__init__(name="textfile", daemon=True)
        self._text, self._path = text, path
        self._over = threading.Event()
        make_folders(path.parent)
        write_atomic(path, text.now())

    def run(self) -> None:
        while not self._over.wait(FILE_SECONDS):
            with contextlib.suppress(OSError):
                write_atomic(self._path, self._text.now())

    def end(self) -> None:
        """Write how it ended."""
        self._over.set()
        self.join()
        write_atomic(self._path, self._text.now(fresh=True))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: "RunText"):
        super().__init__(address, _Handler)
        self.text = text

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = PATIENCE_SECONDS

    def do_GET(self) -> None:
        if not _is_local(self.headers.get("Host")):  # a page in a browser whose name was made ours
            self.send_error(403, "ask for localhost or 127.0.0.1")
            return
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, "see /metrics")
            return
        assert isinstance(self.server, _Server)
        content = self.server.text.now()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: each scrape would be a line."""


def _is_local(host: str | None) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname if host else None
        return name is None or name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class RunText:
    """The text about one run, made anew when it is too old; for several threads."""

    def __init__(self, run: SinkRun):
        self._run = run
        self._view = RunView(run.path)
        self._lock = threading.Lock()
        self._text = b""
        self._made_at = -math.inf
        self._lasts = 0.0
        self._findings: Sequence[Finding] = ()
        self._judge_at = -math.inf

    def now(self, *, fresh: bool = False) -> bytes:
        """The text; `fresh`: made now."""
        with self._lock:
            if fresh or time.monotonic() - self._made_at > self._lasts:
                began = time.monotonic()
                self._text = "".join(self._lines()).encode(errors="replace")
                self._made_at = time.monotonic()
                self._lasts = max(LEAST_SECONDS, SHARE * (self._made_at - began))
            return self._text

    def _lines(self) -> Iterator[str]:
        run = {"run": self._run.name, "run_id": self._run.run_id}
        try:
            judges = time.monotonic() >= self._judge_at
            shown = overview(self._view, rules=RULES if judges else ())
            if judges:
                self._findings = shown.findings
                self._judge_at = time.monotonic() + max(JUDGED_SECONDS, JUDGED_SHARE * shown.seconds)
        except DamagedFile:
            yield from _family("cairn_readable", "whether the run's files can be read", [(run, 0.0)])
            return
        yield from _family("cairn_readable", "whether the run's files can be read", [(run, 1.0)])
        about = {**run, "command": shown.command or "", "path": str(self._run.path), "host": self._run.host}
        yield from _family("cairn_run_info", "the run, in its labels", [(about, 1.0)])
        now = self._ended() or shown.state
        states = [({**run, "state": state}, float(now == state)) for state in STATES]
        yield from _family("cairn_run_state", "1 for the state that the run is in", states)
        yield from self._progress(shown, run)
        yield from self._roles(shown, run)
        findings = [({**run, "rule": one.rule}, float(one.level)) for one in self._findings]
        yield from _family("cairn_finding", "how bad it is what keeps the run from learning", findings)
        rows = self._view.metrics()
        values = [({**run, "name": name}, value) for name, value in numbers(rows[-1])] if rows else []
        yield from _family("cairn_metric", "the metrics of the newest step, by name", values)

    def _ended(self) -> str | None:
        """How the attempt has ended; its launcher is still there while it waits for its sinks."""
        for event in self._view.history():
            if event["event"] == "ended" and event["number"] == self._run.attempt:
                return event["state"]
        return None

    def _progress(self, shown: Overview, run: Labels) -> Iterator[str]:
        facts: list[tuple[str, str, float | None]] = [
            ("cairn_step", "the newest finished optimiser step", shown.step),
            ("cairn_max_steps", "the step at which the run ends", shown.max_steps),
            ("cairn_seconds_since_step", "seconds without a new step, while the run goes on", shown.quiet),
            ("cairn_step_seconds", "seconds of a step, mean of the newest ones", shown.pace),
            ("cairn_goodput", "share of the time that went into steps that count", shown.goodput),
            ("cairn_restarts_total", "restarts of roles", shown.restarts),
            ("cairn_recomputed_steps_total", "steps that were computed again", shown.recomputed),
            ("cairn_checkpoint_step", "step of the newest checkpoint", shown.saved and shown.saved.step),
            ("cairn_checkpoint_age_seconds", "its age in seconds", shown.saved and shown.saved.age),
            ("cairn_checkpoint_bytes", "its size", shown.saved and shown.saved.nbytes),
        ]
        for name, meaning, value in facts:
            yield from _family(name, meaning, [(run, float(value))] if value is not None else [])
        free: list[tuple[Labels, float]] = []
        for what, folder in (("run", self._run.path), ("checkpoints", self._view.checkpoints())):
            try:
                free.append(({**run, "of": what}, float(shutil.disk_usage(folder).free)))
            except OSError:
                continue
        yield from _family("cairn_disk_free_bytes", "free bytes of the disk of run or checkpoints", free)

    def _roles(self, shown: Overview, run: Labels) -> Iterator[str]:
        states = [
            ({**run, "role": role.name, "state": state}, float(role.state == state))
            for role in shown.roles
            for state in ROLE_STATES
        ]
        yield from _family("cairn_role_state", "1 for the state that the role is in", states)
        ages: list[tuple[Labels, float]] = []
        for role in shown.roles:
            beat = self._view.run.heartbeat(role.name)
            try:
                ages.append(({**run, "role": role.name}, max(time.time() - beat.stat().st_mtime, 0.0)))
            except OSError:
                continue
        yield from _family("cairn_role_silent_seconds", "seconds since the role's last sign of life", ages)


def _family(name: str, meaning: str, values: Sequence[tuple[Labels, float]]) -> Iterator[str]:
    """The lines of one name; none if it has no value."""
    if not values:
        return
    yield f"# HELP {name} {meaning}\n"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n"
    for labels, value in values:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inside}}} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
