"""Sinks: what each writes or sends, that all of it arrives once, and that none stops or slows a run."""

import csv
import http.client
import http.server
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from prometheus_client.parser import text_string_to_metric_families

from cairn.config.sinks import SinksConfig
from cairn.launch.jobs import sinks as beside
from cairn.launch.jobs.sinks import SinksProcess, sinks_beside
from cairn.launch.start import StartDamaged
from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.exits import EXIT_STOPPED, RoleFailed
from cairn.run.files import write_json
from cairn.run.locked_folder import lock
from cairn.run.messages import Attempt
from cairn.watch.sinks import SINKS, Sink, SinkRun, make_sink, problems_of_sinks, sinks_of
from cairn.watch.sinks import main as process
from cairn.watch.sinks.follow import Follower, TakenRows
from cairn.watch.sinks.notify import NotTold

DEADLINE = 30.0
SINKS_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sinks.md"
ATTEMPT = Attempt("5eed", 1, "sft", 0, None, "branch_1")


def until(found: Callable[[], Any], what: str = "it") -> Any:
    """What `found` gives once it is true."""
    end = time.monotonic() + DEADLINE
    while not (value := found()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "time/step": 0.5, "rows/digest": f"d{step}", **values}


def begun(path: Path, attempt: int = 1, **sinks: Any) -> RunDirectory:
    """A run directory in which an attempt has begun, with these sinks."""
    run = RunDirectory(path)
    run.logs.mkdir(parents=True, exist_ok=True)
    write_json(run.config, {"max_steps": 20, "sinks": sinks, "output_dir": str(path)})
    run.begin(Attempt("5eed", attempt, "sft", 0, None, "branch_1"))
    run.history.begin_attempt(attempt, None)
    run.set_role("trainer", "running")
    return run


def told_of(run: RunDirectory) -> SinkRun:
    return SinkRun(run.path, "5eed", 1, "sft", "host", {})


def follower(run: RunDirectory, name: str, settings: dict[str, Any]) -> Follower:
    config = SinksConfig.model_validate({name: settings})
    return Follower(name, partial(make_sink, name, config), told_of(run))


def never(reason: str) -> None:
    raise AssertionError(reason)


def config_of(run: RunDirectory) -> Any:
    """As much of a run's configuration as its sinks need."""

    class Config:
        sinks = SinksConfig.model_validate(json.loads(run.config.read_text())["sinks"])

    return Config()


def test_the_table_names_every_section():
    config = SinksConfig()
    assert list(SINKS) == [name for name in SinksConfig.model_fields if name not in ("own", "grace")]
    assert not config.are_on
    assert sinks_of(config) == []
    assert all(SinksConfig.model_validate({name: {}}).are_on for name in SINKS)


# TensorBoard, read by protobuf's own library


def crc32c(data: bytes) -> int:
    """Bit by bit, as its definition says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def event_class() -> Any:
    """The message `Event`, from a description of its fields."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="tf", syntax="proto3")
    fields = {
        "Value": [("tag", 1, kinds.TYPE_STRING), ("simple_value", 2, kinds.TYPE_FLOAT)],
        "Summary": [("value", 1, "Value")],
        "SessionLog": [("status", 1, kinds.TYPE_INT32)],
        "Event": [
            *(("wall_time", 1, kinds.TYPE_DOUBLE), ("step", 2, kinds.TYPE_INT64)),
            *(("file_version", 3, kinds.TYPE_STRING), ("summary", 5, "Summary")),
            ("session_log", 7, "SessionLog"),
        ],
    }
    for name, of in fields.items():
        message = file.message_type.add(name=name)
        for field, number, kind in of:
            label = kinds.LABEL_REPEATED if (name, field) == ("Summary", "value") else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".tf.{kind}"
            else:
                made.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Event"))


EVENT = event_class()


def events_in(path: Path) -> Iterator[Any]:
    """The events of a file, each checksum compared."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == masked(data[:8])
        content = data[12 : 12 + length]
        assert data[12 + length : 16 + length] == masked(content)
        yield EVENT.FromString(content)
        data = data[16 + length :]


def curves_in(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars of a folder as TensorBoard shows them: a START makes later steps of earlier files void."""
    curves: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for number, event in enumerate(events_in(path)):
            assert (event.file_version == "brain.Event:2") == (number == 0)
            if event.session_log.status == 1:
                for curve in curves.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def test_tensorboard_files_hold_every_number_of_every_step(tmp_path: Path):
    run = begun(tmp_path / "run")
    run.metrics.append(row(1, huge=1e300, tiny=-1e300, nan=float("nan"), flag=True, text="x", none=None))
    run.metrics.append({**row(300, **{"validation/größe/loss": -2}), "big": 10**400})
    sink = follower(run, "tensorboard", {})
    sink.look(never)
    curves = curves_in(run.path / "tensorboard")
    assert curves["loss"] == {1: 1.0, 300: pytest.approx(1 / 300)}
    assert curves["huge"] == {1: float("inf")}
    assert curves["tiny"] == {1: float("-inf")}
    assert str(curves.pop("nan")) == "{1: nan}"
    assert curves["validation/größe/loss"] == {300: -2.0}
    assert curves.keys() == {"loss", "time/step", "huge", "tiny", "validation/größe/loss"}
    assert crc32c(b"123456789") == 0xE3069283


def test_rows_that_are_taken_back_are_replaced(tmp_path: Path):
    """In the middle of an attempt, as after a restart of the trainer, and between two processes."""
    run = begun(tmp_path / "run")
    sinks = {name: follower(run, name, {}) for name in ("tensorboard", "csv")}

    def look() -> list[tuple[int, float]]:
        for sink in sinks.values():
            sink.look(never)
        curve = curves_in(run.path / "tensorboard")["loss"]
        with open(run.path / "metrics.csv", newline="") as file:
            table = [(int(one["step"]), float(one["loss"])) for one in csv.DictReader(file)]
        assert [(step, pytest.approx(loss)) for step, loss in curve.items()] == table
        return table

    for step in range(1, 8):
        run.metrics.append(row(step))
    assert [step for step, _ in look()] == [1, 2, 3, 4, 5, 6, 7]
    run.metrics.keep_through(4)
    run.metrics.append(row(5, loss=50.0))
    assert look()[3:] == [(4, 0.25), (5, 50.0)]
    for sink in sinks.values():
        sink.end()
    run.metrics.keep_through(2)
    for step in range(3, 10):
        run.metrics.append(row(step, loss=100.0 + step))
    sinks = {name: follower(run, name, {}) for name in sinks}
    assert look()[1:4] == [(2, 0.5), (3, 103.0), (4, 104.0)]
    assert len(look()) == 9


def test_nothing_is_sent_twice_and_nothing_is_left_out(tmp_path: Path):
    """Whenever a process is killed: before a call, after it, or after it was remembered."""
    run = begun(tmp_path / "run")
    for step in range(1, 251):
        run.metrics.append(row(step))
    got: list[int] = []
    deaths = {100, 200}

    class Counting(Sink):
        def begin(self, run: SinkRun, after: int) -> None:
            del got[after:]

        def rows(self, rows: Any) -> None:
            got.extend(one["step"] for one in rows)
            if len(got) in deaths:
                deaths.remove(len(got))
                got.append(-1)  # half a row more
                raise RuntimeError("killed")

    for died in (True, True, False, False):
        sink = Follower("counting", Counting, told_of(run))
        if died:
            with pytest.raises(RuntimeError):
                sink.look(never)
        else:
            sink.look(never)
    assert got == list(range(1, 251))
    torn = run.path / "sinks" / "counting.rows.jsonl"
    torn.write_bytes(torn.read_bytes()[:-10])
    Follower("counting", Counting, told_of(run)).look(never)
    assert got == list(range(1, 251))


def test_what_was_taken_is_compared_with_what_is_there(tmp_path: Path):
    taken = TakenRows(tmp_path / "sinks" / "x.jsonl")
    rows = [row(step) for step in range(1, 6)]
    taken.add(rows)
    assert TakenRows(tmp_path / "sinks" / "x.jsonl").kept(rows) == 5
    assert taken.kept([*rows, row(6)]) == 5
    assert taken.kept(rows[:3]) == 3
    assert taken.kept([*rows[:2], row(3, loss=7), *rows[3:4], row(5, loss=7), row(6)]) == 2
    assert taken.kept([]) == 0
    taken.cut(2)
    assert len(TakenRows(tmp_path / "sinks" / "x.jsonl")) == 2


# CSV


def test_a_csv_file_grows_columns_and_computes_nothing(tmp_path: Path):
    run = begun(tmp_path / "run")
    path = tmp_path / "deep" / "table.csv"
    sink = follower(run, "csv", {"file": str(path)})
    run.metrics.append(row(1))
    sink.look(never)
    first = path.stat().st_ino
    run.metrics.append(row(2, text='=HYPERLINK("http://x")', quoted='a "b",\nc'))
    sink.look(never)
    grown = path.stat().st_ino
    run.metrics.append(row(3))
    sink.look(never)
    assert first != grown == path.stat().st_ino, "only new columns make it write the file anew"
    with open(path, newline="") as file:
        table = list(csv.DictReader(file))
    assert [one["step"] for one in table] == ["1", "2", "3"]
    assert table[1]["text"] == '\'=HYPERLINK("http://x")'
    assert table[1]["quoted"] == 'a "b",\nc'
    assert table[0]["text"] == table[2]["text"] == ""
    assert float(table[2]["loss"]) == 1 / 3
    path.unlink()
    run.metrics.append(row(4))
    sink.look(never)
    assert len(path.read_text().splitlines()) == 1 + 4 + 1


# Prometheus


def scraped(port: int, path: str = "/metrics", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def values(text: str) -> dict[tuple[str, str], float]:
    """By name and label, as Prometheus's own parser reads the text."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next(
                (sample.labels[key] for key in ("state", "name", "rule") if key in sample.labels), ""
            )
            found[sample.name, sample.labels.get("role", "") + label] = sample.value
    return found


def documented() -> dict[str, set[str]]:
    """The labels of each name in the table of docs/how-to/sinks.md; those that all have are in each."""
    found: dict[str, set[str]] = {}
    for line in re.findall(r"^\| `cairn_.*$", SINKS_PAGE.read_text(), re.M):
        _, names, labels, *_ = line.split("|")
        own = set(re.findall(r"`(\w+)`", labels.partition(":")[0]))
        found |= {name: {"run", "run_id", *own} for name in re.findall("`(.*?)`", names)}
    return found


def test_the_alert_rules_of_the_docs():
    """They are PromQL of names and labels that a run has, in the form of a file of rules."""
    names = {"up": {"job", "instance"}} | documented()
    assert {name for name in names if name != "up"} == set(
        re.findall(r'"(cairn_\w+)"', (SINKS_PAGE.parents[2] / "src/watch/sinks/prometheus.py").read_text())
    )
    blocks = re.findall(r"^```yaml\n(.*?)^```", SINKS_PAGE.read_text(), re.M | re.S)
    config, rules = map(yaml.safe_load, blocks)
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9470"]
    ((group,),) = rules.values()
    assert group.keys() == {"name", "rules"}
    for rule in group["rules"]:
        assert {"alert", "expr", "annotations"} <= rule.keys() <= {"alert", "expr", "annotations", "for"}
        assert promql_parser.parse_duration(rule.get("for", "1m")).total_seconds() > 0
        seen: list[promql_parser.VectorSelector] = []
        promql_parser.walk(promql_parser.parse(rule["expr"]), partial(_selectors, seen))
        assert seen, rule
        for selector in seen:
            used = {matcher.name for matcher in selector.matchers.matchers}
            used |= set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            used |= set(re.findall(r"\bon \((\w+)\)", rule["expr"]))
            assert used <= names[selector.name or ""], rule


def _selectors(seen: list[promql_parser.VectorSelector], part: promql_parser.Expr) -> None:
    if isinstance(part, promql_parser.VectorSelector):
        seen.append(part)


def test_prometheus_reads_how_a_run_is(tmp_path: Path):
    port, file = free_port(), tmp_path / "textfiles" / "run.prom"
    run = begun(tmp_path / 'run "1"\\')
    lock(run)
    sink = follower(run, "prometheus", {"port": port, "file": str(file)})
    try:
        sink.look(never)
        run.history.restart("trainer", step=1, reason="died", how="is started again")
        hostile = 'a"b\\c\nd{}'
        run.metrics.append(row(1, **{"time/wait": 0.5, hostile: 7, "nan": float("nan"), "inf": float("inf")}))
        found = until(lambda: (now := values(scraped(port)[1])).get(("cairn_step", "")) == 1.0 and now)
        assert found["cairn_run_state", "running"] == 1
        assert found["cairn_run_state", "failed"] == 0
        for family in text_string_to_metric_families(scraped(port)[1]):
            for sample in family.samples:
                assert sample.labels.keys() == documented()[sample.name], sample
        assert found["cairn_max_steps", ""] == 20
        assert found["cairn_restarts_total", ""] == 1
        assert found["cairn_metric", "loss"] == 1.0
        assert found["cairn_metric", hostile] == 7
        assert str(found["cairn_metric", "nan"]) == "nan"
        assert found["cairn_metric", "inf"] == float("inf")
        assert found["cairn_role_state", "trainerrunning"] == 1
        assert found["cairn_disk_free_bytes", ""] > 0
        assert 0 <= found["cairn_seconds_since_step", ""] < DEADLINE
        assert scraped(port, "/")[0] == 404
        assert scraped(port, host=f"localhost:{port}")[0] == 200
        assert scraped(port, host="evil.example")[0] == 403
        with socket.create_connection(("127.0.0.1", port)):  # says nothing, and holds up nobody
            assert scraped(port)[0] == 200
        run.history.ended(1, "failed", step=1, reason="x")
        sink.end()
    finally:
        run.unlock()
    assert values(file.read_text())["cairn_run_state", "failed"] == 1
    with pytest.raises(ConnectionRefusedError):
        scraped(port)


def test_a_port_in_use_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is a warning before the start, is noted once, and the sink serves when the port is free."""
    monkeypatch.setattr(process, "FIRST_PAUSE", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = SinksConfig.model_validate({"prometheus": {"port": port}})
        (warning,), errors = problems_of_sinks(config, tmp_path)
        assert errors == []
        assert f"--sinks.prometheus.port {port}" in warning
        run = begun(tmp_path / "run")
        make = partial(make_sink, "prometheus", config)
        thread = process.SinkThread("prometheus", make, told_of(run), run.history)
        thread.start()
        events = until(lambda: [e for e in run.history.rows() if e["event"] == "not_sent"])
        time.sleep(0.3)
    assert problems_of_sinks(config, tmp_path) == ([], [])
    until(lambda: not _raises(ConnectionError, partial(scraped, port)))
    assert process.finish([thread], DEADLINE) == []
    assert len([e for e in run.history.rows() if e["event"] == "not_sent"]) == len(events) == 1
    assert events[0]["sink"] == "prometheus"


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


# Notices


class Hook(http.server.ThreadingHTTPServer):
    """Answers with the statuses that it is given, in turn, the last one for ever; `hang` answers nothing."""

    daemon_threads = True

    def __init__(self, *statuses: int, hang: bool = False, drip: bool = False):
        self.statuses, self.got = list(statuses), list[dict[str, Any]]()
        self.hang, self.drip, self.over = hang, drip, threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.drip:
                    while not outer.over.wait(0.05):
                        self.wfile.write(b"H")
                if outer.hang:
                    outer.over.wait(DEADLINE)
                    return
                status = outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0]
                outer.got.append({**content, "answered": status, "path": self.path})
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?secret=abc"

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


@pytest.fixture
def hooks() -> Generator[Callable[..., Hook]]:
    made: list[Hook] = []

    def make(*statuses: int, **kind: bool) -> Hook:
        made.append(Hook(*(statuses or (200,)), **kind))
        return made[-1]

    yield make
    for hook in made:
        hook.close()


def test_a_webhook_gets_what_happens_as_json(tmp_path: Path, hooks: Callable[..., Hook]):
    hook, run = hooks(), begun(tmp_path / "run")
    run.history.restart("trainer", step=3, reason="died (exit code -9)", how="is started again")
    run.history.diagnosed(4, "no spread", 2, "81 % of the prompts teach nothing", "Give harder problems")
    run.history.not_uploaded(4, "no network")
    run.history.ended(1, "stopped", step=5, reason="SIGTERM")
    run.history.ended(1, "killed", step=5, reason="its command was killed")
    sink = follower(run, "webhook", {"url": hook.url})
    sink.look(never)
    assert [one["event"] for one in hook.got] == ["restarted", "diagnosed", "ended", "failed"]
    assert hook.got[0]["text"] == "run: trainer died (exit code -9) and is started again"
    assert hook.got[1]["text"] == "run: 81 % of the prompts teach nothing. Give harder problems"
    assert hook.got[2]["text"] == "run: stopped at step 5: SIGTERM"
    assert hook.got[3]["state"] == "killed"
    assert all(one["run"] == str(run.path) and one["path"] == "/hook?secret=abc" for one in hook.got)
    only = follower(run, "webhook", {"url": hook.url, "events": ["failed"]})
    run.history.ended(1, "done", step=6, reason="")
    run.history.ended(1, "failed", step=6, reason="no memory")
    only.look(never)
    assert [one["text"] for one in hook.got[4:]] == ["run: failed at step 6: no memory"]


def test_a_new_sink_is_told_of_no_earlier_attempt(tmp_path: Path, hooks: Callable[..., Hook]):
    """One that was there is told what it had missed."""
    old, new = hooks(), hooks()
    run = begun(tmp_path / "run")
    before = follower(run, "webhook", {"url": old.url})
    before.look(never)
    run.history.ended(1, "failed", step=1, reason="one")
    begun(run.path, 2)
    follower(run, "webhook", {"url": old.url}).look(never)
    assert [one["reason"] for one in old.got] == ["one"]
    config = SinksConfig.model_validate({"command": {"run": f"cat >> {tmp_path / 'told'}"}})
    sink = Follower("command", partial(make_sink, "command", config), told_of(run))
    sink.look(never)
    run.history.ended(2, "failed", step=1, reason="two")
    sink.look(never)
    assert [json.loads(line)["reason"] for line in (tmp_path / "told").read_text().splitlines()] == ["two"]
    assert new.got == []


def test_notices_are_sent_until_they_arrive(tmp_path: Path, hooks: Callable[..., Hook]):
    """What is never taken is left out, so that others are not held up; errors do not show the URL."""
    hook, run, left_out = hooks(500, 429, 200, 404, 200), begun(tmp_path / "run"), list[str]()
    for step in (1, 2, 3):
        run.history.ended(1, "failed", step=step, reason="")
    sink = follower(run, "webhook", {"url": hook.url})
    for _ in range(2):
        with pytest.raises(NotTold, match=r"^127.0.0.1:\d+ answers HTTP (500|429)$"):
            sink.look(never)
        sink.let_go()
    sink.look(left_out.append)
    found = [(one["step"], one["answered"]) for one in hook.got]
    assert found == [(1, 500), (1, 429), (1, 200), (2, 404), (3, 200)]
    assert "HTTP 404" in left_out[0]
    hook.close()
    run.history.ended(1, "failed", step=4, reason="")
    with pytest.raises(NotTold, match="Connection refused") as error:
        sink.look(never)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("kind", ["hang", "drip"])
def test_a_webhook_has_a_deadline(tmp_path: Path, hooks: Callable[..., Hook], kind: str):
    """For a request as a whole, not for each byte."""
    hook, run = hooks(**{kind: True}), begun(tmp_path / "run")
    run.history.ended(1, "failed", step=1, reason="")
    sink = follower(run, "webhook", {"url": hook.url, "timeout": 0.5})
    began = time.monotonic()
    with pytest.raises(NotTold, match=r"has not answered within 0\.5 s"):
        sink.look(never)
    assert time.monotonic() - began < DEADLINE


def test_a_command_is_run_once_for_each_notice(tmp_path: Path):
    run, told, left_out = begun(tmp_path / "run"), tmp_path / "told", list[str]()
    run.history.ended(1, "failed", step=1, reason="$(touch bad) `x`")
    slow = f"cat >> {told}; sleep 100 & sleep 100"
    follower(run, "command", {"run": slow, "timeout": 1}).look(left_out.append)
    assert json.loads(told.read_text())["reason"] == "$(touch bad) `x`"
    assert "has not ended within 1 s" in left_out[0]
    run.history.ended(1, "failed", step=2, reason="")
    follower(run, "command", {"run": f"echo >> {told}; exit 3"}).look(left_out.append)
    assert "exit code 3" in left_out[1]
    follower(run, "command", {"run": "exit 4"}).look(never)
    assert len(told.read_text().splitlines()) == 2


def test_settings_that_can_not_work_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    wrong = {
        "tensorboard": {"dir": str(tmp_path / "file" / "tb")},
        "csv": {"file": str(tmp_path / "file" / "x.csv")},
        "webhook": {},
        "command": {"run": "if then"},
        "trackio": {},
        "own": [{"name": "no_such_module:Sink"}],
    }
    warnings, errors = problems_of_sinks(SinksConfig.model_validate(wrong), tmp_path / "run")
    assert [warning.split()[1].rstrip(":") for warning in warnings] == [
        "--sinks.tensorboard.dir",
        "--sinks.csv.file",
    ]
    assert [error.split()[0].rstrip(":") for error in errors] == [
        *("--sinks.trackio", "--sinks.webhook.url", "--sinks.command.run", "sinks.own.name"),
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is left behind"
    for url in ("ftp://x", "https://", "http://u:p@x/", "https://x:99999/"):
        with pytest.raises(ValueError, match=r"webhook\.url") as error:
            SinksConfig.model_validate({"webhook": {"url": url}})
        assert "u:p" not in str(error.value)
    config = SinksConfig.model_validate({"webhook": {"url": "env:MY_HOOK"}})
    assert "it is not set" in problems_of_sinks(config, tmp_path)[1][0]
    monkeypatch.setenv("MY_HOOK", "https://example.org/x")
    assert problems_of_sinks(config, tmp_path) == ([], [])


def test_trackio_takes_rows_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run = begun(tmp_path / "run")
    run.metrics.append(row(1))
    sink = follower(run, "trackio", {"project": "p"})
    sink.look(never)
    sink.end()
    assert list((tmp_path / "trackio").glob("p*.db"))


# The process, and its launcher's side


BROKEN = """
import time
from cairn.watch.sinks import Sink

class Broken(Sink):
    def __init__(self, kind):
        self.kind = kind

    def rows(self, rows):
        if self.kind == "hangs":
            time.sleep(1000)
        raise KeyError(self.kind)
"""


def kept(run: RunDirectory) -> list[int]:
    return [*curves_in(run.path / "tensorboard").get("loss", {})] if run.path.exists() else []


@pytest.fixture
def own_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module, for processes."""
    (tmp_path / "broken_sinks.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("own_sinks")
def test_sinks_that_hang_or_raise_hold_up_nobody(tmp_path: Path, hooks: Callable[..., Hook]):
    """Neither other sinks, nor the end of the run, for longer than sinks.grace."""
    hook = hooks(hang=True)
    sinks = {
        "own": [{"name": "broken_sinks:Broken", "args": {"kind": "hangs"}}],
        "webhook": {"url": hook.url},
        "tensorboard": {},
        "grace": 2.0,
    }
    run = begun(tmp_path / "run", **sinks)
    began = ended = time.monotonic()
    with sinks_beside(run, config_of(run), ATTEMPT) as take:
        run.metrics.append(row(1))
        assert time.monotonic() - began < 1, "starting a process is all that is waited for"
        until(lambda: kept(run) == [1])
        run.metrics.append(row(2))
        assert take(EXIT_STOPPED) == EXIT_STOPPED
        ended = time.monotonic()
    assert time.monotonic() - ended < 2 + beside.MARGIN_SECONDS + 5
    assert kept(run) == [1, 2]
    assert [e["state"] for e in run.history.rows() if e["event"] == "ended"] == ["stopped"]


@pytest.mark.usefixtures("own_sinks")
def test_what_is_wrong_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    sinks = {"own": [{"name": "broken_sinks:Broken", "args": {"kind": "raises"}}], "grace": 1.0}
    run = begun(tmp_path / "run", **sinks)
    run.metrics.append(row(1))
    with sinks_beside(run, config_of(run), ATTEMPT) as take:
        until(lambda: any(e["event"] == "not_sent" for e in run.history.rows()))
        take(0)
    (event,) = [e for e in run.history.rows() if e["event"] == "not_sent"]
    assert (event["sink"], event["reason"]) == ("broken_sinks:Broken", "KeyError: 'raises'")
    assert "warning: not everything was sent to broken_sinks:Broken" in capfd.readouterr().out


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_sends_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = begun(tmp_path / "run", tensorboard={})
    run.metrics.append(row(1))
    sinks = SinksProcess(run)
    until(lambda: kept(run) == [1])
    for number in (2, 3):
        assert sinks._process is not None
        pid = sinks._process.pid
        os.kill(pid, signal.SIGKILL)
        monkeypatch.setattr(beside, "PAUSES", (0.0,) * 5)
        run.metrics.append(row(number))
        if number == 2:
            until(lambda pid=pid: sinks._process is not None and sinks._process.pid != pid, "another process")
            until(lambda: kept(run) == [1, 2])
    assert sinks.end(0.0) in ([], ["all sinks"])
    SinksProcess(run).end(10.0)  # as the next attempt does
    assert kept(run) == [1, 2, 3]
    told = [json.loads(line)["step"] for line in (run.path / "sinks/tensorboard.rows.jsonl").open()]
    assert told == [1, 2, 3]


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_told_of(tmp_path: Path):
    """By its sinks, which live on for a moment; those of the next attempt send what they have not."""
    told = tmp_path / "told"
    run = begun(tmp_path / "run", command={"run": f"cat >> {told}"}, csv={})
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom cairn.run.directory import RunDirectory\n"
        "from cairn.launch.jobs.sinks import SinksProcess\n"
        "SinksProcess(RunDirectory(sys.argv[1]))\nprint('started', flush=True)\ntime.sleep(1000)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script, run.path], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"started\n"
    run.metrics.append(row(1))
    until(lambda: (run.path / "metrics.csv").exists() and "\n1," in (run.path / "metrics.csv").read_text())
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    notice = json.loads(until(lambda: told.exists() and told.read_text().endswith("\n") and told.read_text()))
    assert (notice["event"], notice["state"], notice["step"]) == ("failed", "killed", 1)
    begun(run.path, 2, command={"run": f"cat >> {told}"}, csv={})
    assert SinksProcess(run).end(10.0) == []
    assert len(told.read_text().splitlines()) == 1


def test_every_end_of_a_run_is_noted(tmp_path: Path):
    """An attempt whose checkpoint is damaged goes on as another one, so that is no end."""
    run, attempt = begun(tmp_path / "run"), Attempt("5eed", 1, "sft", 7, None, "branch_1")
    config = config_of(run)

    def last() -> tuple[str, int, str] | None:
        event = run.history.rows()[-1]
        return (event["state"], event["step"], event["reason"]) if event["event"] == "ended" else None

    damaged = StartDamaged(tmp_path / "step_1", "it is")
    with pytest.raises(StartDamaged), sinks_beside(run, config, attempt):
        raise damaged
    assert last() is None
    with sinks_beside(run, config, attempt) as take:
        take(0)
    assert last() == ("done", 7, "")
    run.request_stop("SIGTERM")
    run.metrics.append(row(8))
    with sinks_beside(run, config, attempt) as take:
        take(EXIT_STOPPED)
    assert last() == ("stopped", 8, "SIGTERM")
    with pytest.raises(RoleFailed), sinks_beside(run, config, attempt):
        raise RoleFailed("trainer died; the end of its log:\nmany lines\nKeyError: 'x'")
    assert last() == ("failed", 8, "trainer died; the end of its log: KeyError: 'x'")
    with pytest.raises(KeyboardInterrupt), sinks_beside(run, config, attempt):
        raise KeyboardInterrupt
    assert last() == ("failed", 8, "interrupted")


def test_a_full_disk_or_a_file_in_the_way_is_noted_and_gone_on_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(process, "LONGEST_PAUSE", 0.05)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a disk")
    try:
        run = begun(tmp_path / "run")
        (tmp_path / "in_the_way").touch()
        settings = {
            "tensorboard": {"dir": str(disk / "tb")},
            "csv": {"file": str(tmp_path / "in_the_way" / "x.csv")},
        }
        config = SinksConfig.model_validate(settings)
        threads = [
            process.SinkThread(name, partial(make_sink, name, config), told_of(run), run.history)
            for name in settings
        ]
        for thread in threads:
            thread.start()
        for step in range(1, 400):
            run.metrics.append(row(step, **{f"metric/{n}": n for n in range(5)}))

        def noted() -> dict[str, str]:
            return {e["sink"]: e["reason"] for e in run.history.rows() if e["event"] == "not_sent"}

        until(lambda: len(noted()) == 2)
        assert "No space left on device" in noted()["tensorboard"]
        assert "in_the_way" in noted()["csv"]
        (tmp_path / "in_the_way").unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert process.finish(threads, DEADLINE) == []
        assert [*curves_whole(disk / "tb")["loss"]] == list(range(1, 400))
        assert len((tmp_path / "in_the_way" / "x.csv").read_text().splitlines()) == 400
        assert len([e for e in run.history.rows() if e["event"] == "not_sent"]) == 2
    finally:
        subprocess.run(["umount", disk], check=True)


def curves_whole(folder: Path) -> dict[str, dict[int, float]]:
    """As `curves_in`, of files that may end in the middle of a record."""
    for path in folder.iterdir():
        data, end = path.read_bytes(), 0
        while len(data) >= end + 12 and len(data) >= (
            after := end + 16 + struct.unpack("<Q", data[end : end + 8])[0]
        ):
            end = after
        path.write_bytes(data[:end])
        if end == 0:
            path.unlink()
    return curves_in(folder)


def test_the_launcher_refuses_nothing_but_settings(tmp_path: Path):
    config = SinksConfig.model_validate({"own": [{"name": "builtins:dict", "args": {}}]})
    assert "it is no cairn.watch.sinks.Sink" in problems_of_sinks(config, tmp_path)[1][0]
    with pytest.raises(UsageError):
        make_sink("builtins:dict", config)
