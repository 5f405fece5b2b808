"""What roles did when: recorded cheaply, read in any state of the files, and opened by other programs."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.run import spans
from cairn.run.directory import RunDirectory
from cairn.run.spans import MAIN, Recorder, SpanFiles, TimeSpan, chrome_trace, phases_of


def test_a_process_leaves_what_it_did_behind(tmp_path: Path):
    """Each thing that its main thread began, and what it noted itself, up to its end."""
    run = RunDirectory(tmp_path)
    code = f"""
from pathlib import Path
from cairn.run import heartbeat, spans
heartbeat.start(Path({str(run.heartbeat("trainer"))!r}), Path({str(run.spans_of("trainer"))!r}))
heartbeat.doing("step 1")
with spans.span("saves", "saving", step=1):
    heartbeat.doing("step 2")
with heartbeat.waiting_for("the batch"):
    pass
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    found = SpanFiles(run.spans).current()
    assert {one.role for one in found} == {"trainer"}
    main = [(one.name, one.about.get("waiting")) for one in found if one.lane == MAIN]
    names = ["starting", "step 1", "step 2", "waiting for the batch", "step 2"]
    assert main == [(name, name.startswith("waiting")) for name in names]
    (save,) = [one for one in found if one.lane == "saves"]
    assert (save.name, save.about) == ("saving", {"step": 1})
    ordered = [one for one in found if one.lane == MAIN]
    for one, following in pairwise(ordered):
        assert one.begin + one.seconds == pytest.approx(following.begin, abs=1e-3)


def test_a_process_without_a_recorder_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "_recorder", None)
    with spans.span("saves", "saving"):
        spans.add(MAIN, "step 1", 1.0)
    assert SpanFiles(tmp_path).current() == []


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The newest spans are there, and at most two files a role."""
    monkeypatch.setattr(spans, "LARGEST", 2000)
    recorder = Recorder(tmp_path / "trainer.jsonl")
    for number in range(300):
        recorder.add(MAIN, f"step {number}", float(number), number + 1.0)
        recorder.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trainer.1.jsonl", "trainer.jsonl"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2000 + 200
    names = [one.name for one in SpanFiles(tmp_path).current()]
    assert names == [f"step {number}" for number in range(300 - len(names), 300)]


def test_what_is_added_is_read_and_what_was_read_is_not_read_again(tmp_path: Path):
    files, recorder = SpanFiles(tmp_path), Recorder(tmp_path / "trainer.jsonl")
    assert files.current() == []
    for number in range(3):
        recorder.add(MAIN, f"step {number}", float(number), number + 1.0)
        recorder.write()
        assert [one.name for one in files.current()] == [f"step {place}" for place in range(number + 1)]
    recorder.path.rename(tmp_path / "trainer.1.jsonl")
    recorder.add(MAIN, "step 3", 3.0, 4.0)
    recorder.write()
    assert [one.name for one in files.current()] == [f"step {place}" for place in range(4)]


def test_a_disk_that_takes_nothing_costs_spans_only(tmp_path: Path):
    (tmp_path / "file").touch()
    recorder = Recorder(tmp_path / "file" / "trainer.jsonl")
    recorder.add(MAIN, "step 1", 1.0, 2.0)
    recorder.write()


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_damaged_files_are_read_as_far_as_they_go(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
):
    folder = tmp_path_factory.mktemp("spans")
    good = json.dumps({"lane": MAIN, "name": "step 1", "begin": 1.0, "seconds": 2.0}).encode()
    (folder / "trainer.jsonl").write_bytes(b"\n".join([*lines, b'{"lane": 1, "name": "x"}', good, good[:9]]))
    assert TimeSpan("trainer", MAIN, "step 1", 1.0, 2.0, {}) in SpanFiles(folder).current()


def test_the_trace_is_what_perfetto_opens():
    """Complete events in microseconds, with names of processes and threads."""
    found = [
        TimeSpan("trainer", MAIN, "step 1", 10.0, 0.5, {"waiting": False}),
        TimeSpan("orchestrator", "servers", "generating", 9.0, 2.0, {}),
    ]
    trace = chrome_trace(found)
    names = {(e["name"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {("process_name", "trainer"), ("thread_name", "servers")} <= names
    (step,) = [e for e in trace["traceEvents"] if e["name"] == "step 1"]
    assert (step["ph"], step["ts"], step["dur"]) == ("X", 10_000_000, 500_000)
    assert json.loads(json.dumps(trace)) == trace


def test_kinds_of_work_are_counted_without_their_numbers():
    found = [TimeSpan("trainer", MAIN, f"step {n}, micro-batch {n}", n, 2.0, {}) for n in range(5)]
    found.append(TimeSpan("trainer", "saves", "saving", 0, 9.0, {}))
    assert phases_of(found) == {"trainer": {"step N, micro-batch N": 10.0}}
