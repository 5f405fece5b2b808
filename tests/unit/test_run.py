"""What all roles share: seeds, batches, metrics, the run directory, waiting."""

import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import re
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cairn.launch.supervisor import check_in_place
from cairn.run import files, locked_folder
from cairn.run.batches import (
    COLUMNS,
    FROM_TEXT,
    BadBatch,
    Batch,
    RLBatch,
    Sample,
    SamplesInFile,
    Sampling,
    batch_path,
    columns_of,
    digest_of,
    open_batch,
    read_batch,
    read_origin,
    write_batch,
)
from cairn.run.directory import RunDirectory
from cairn.run.exits import RoleFailed
from cairn.run.faults import POINTS
from cairn.run.files import DamagedFile, read_json, read_note, write_atomic, write_json
from cairn.run.history import Account, History
from cairn.run.messages import (
    Announcement,
    Attempt,
    BatchHeader,
    Message,
    PolicyName,
    Probe,
    ShippedBatch,
    StopRequest,
    read_probe,
    write_probe,
)
from cairn.run.metrics import MetricsLog
from cairn.run.seeds import derive, permutation
from cairn.run.waiting import DeadlinePassed, wait_for

# Seeds

PURPOSES = st.lists(st.one_of(st.integers(0, 10_000), st.text("abc ", min_size=1, max_size=8)), max_size=4)


@given(st.integers(0, 2**63), PURPOSES, PURPOSES)
def test_seeds_of_different_purposes_differ(seed: int, a: list, b: list):
    """And are small enough for vLLM to add a sample's index; 1 and "1" name the same purpose."""
    assert 0 <= derive(seed, *a) < 2**48
    assert (derive(seed, *a) == derive(seed, *b)) == (list(map(str, a)) == list(map(str, b)))
    assert derive(seed, *a) != derive(seed + 1, *a)
    assert derive(seed, *a, "x") != derive(seed, *a)


def test_seeds_of_neighbours_have_nothing_in_common():
    """Seeds of neighbouring steps differ in half of their bits, so that streams do not run in parallel."""
    seeds = [derive(0, "sample", place) for place in range(2000)]
    assert len(set(seeds)) == 2000
    differing = [(a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert 23 < np.mean(differing) < 25


def test_seeds_are_the_same_in_every_version():
    """Runs that were saved yesterday have to draw the same today."""
    assert derive(0, "sft order", 0) == 68866459469506
    assert permutation(8, 0, "sft order", 0) == [3, 5, 2, 1, 7, 0, 4, 6]


@given(st.integers(0, 300), st.integers(0, 2**32), st.integers(0, 5))
def test_a_permutation_has_every_number_once(n: int, seed: int, epoch: int):
    """And is the same each time it is asked for."""
    order = permutation(n, seed, "order", epoch)
    assert sorted(order) == list(range(n))
    assert order == permutation(n, seed, "order", epoch)
    if n > 20:
        assert order != permutation(n, seed, "order", epoch + 1)


# Batches

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw) -> Sample:
    """A sample of an RL batch."""
    n = draw(st.integers(1, 12))

    def column(element: st.SearchStrategy, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(element, min_size=n, max_size=n)), dtype)

    tokens, mask = column(st.integers(0, 2**31 - 1), np.int32), column(st.booleans(), np.bool_)

    def values(dtype: type) -> np.ndarray:
        if np.issubdtype(dtype, np.integer):
            return column(st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max), dtype)
        return column(FLOATS, dtype)

    columns = {name: values(about.dtype) for name, about in COLUMNS.items()}
    return Sample(tokens, mask, columns)


def make_header(step: int, run_id: str = "run", branch: str = "branch_1") -> BatchHeader:
    """Of a batch of two prompts."""
    row = ShippedBatch(step, [[1, 1], [4, 4]], 2, 6, "digest", step - 2)
    version = str(PolicyName(run_id, branch, step - 1))
    return BatchHeader(run_id, branch, f"{run_id}:1", step, version, [7, 3], row)


@given(st.lists(samples(), min_size=1, max_size=6), st.integers(1, 10**6))
def test_a_batch_comes_back_from_its_file_as_it_was(tmp_path_factory, batch: list[Sample], step: int):
    """Every sample with its own tokens, and all that was said about the batch."""
    path = batch_path(tmp_path_factory.mktemp("run") / "batches", step)
    metrics, header = {"reward/mean": 0.1}, make_header(step)
    write_batch(path, RLBatch(batch, metrics, sampling=Sampling(0.7), header=header))
    found = read_batch(path)
    assert (found.metrics, found.header, found.sampling) == (metrics, header, Sampling(0.7))
    assert read_origin(path) == ("run", "branch_1")
    assert len(found.samples) == len(batch)
    for a, b in zip(found.samples, batch, strict=True):
        pairs = [(a.token_ids, b.token_ids), (a.loss_mask, b.loss_mask)]
        pairs += [(a.columns[name], b.columns[name]) for name in a.columns.keys() | b.columns.keys()]
        for written, found in pairs:
            assert written.dtype == found.dtype
            np.testing.assert_array_equal(written, found)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    opened = open_batch(path)
    assert (opened.metrics, opened.header, opened.sampling) == (metrics, header, Sampling(0.7))
    assert opened.digest() == Batch(batch, sampling=FROM_TEXT).digest()
    assert [digest_of([one]) for one in opened.samples] == [digest_of([one]) for one in batch]


def test_a_batch_of_an_earlier_version_is_read_as_a_whole(tmp_path: Path):
    """It has no index, by which single samples could be compared with what was written."""
    path = batch_path(tmp_path, 1)
    made = [Sample.of_answer([5] * n, [7] * n, logprobs=0.5, advantages=1.0) for n in range(1, 9)]
    write_batch(path, RLBatch(made, sampling=FROM_TEXT, header=make_header(1)))
    assert isinstance(open_batch(path).samples, SamplesInFile)
    with safe_open(path, "numpy") as file:
        metadata = {k: v for k, v in file.metadata().items() if k not in ("index", "content", "samples")}
    save_file(load_file(path), path, metadata)
    assert type(open_batch(path)) is RLBatch
    assert open_batch(path).digest() == digest_of(made)


def test_a_batch_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_batch(batch_path(tmp_path, 1))


def test_digests_of_batches_never_change():
    """Ledgers and rows of metrics keep them. These are of samples with all columns, and without any."""
    samples = [
        Sample.of_answer([0, 1], [2, 3, 4], logprobs=[0.0, -1 / 7, -2 / 7], advantages=0.3),
        Sample.of_answer([1, 2], [3], logprobs=[-1.0], advantages=0.6),
    ]
    assert Batch(samples, sampling=FROM_TEXT).digest() == "85130dbc9c4f9639"
    bare = [Sample(sample.token_ids, sample.loss_mask) for sample in samples]
    assert Batch(bare, sampling=FROM_TEXT).digest() == "bd7dd39ae8d4629c"


def test_columns_of_a_batch():
    """A name that nobody declared is refused, and so are samples of which only some have a column."""
    with pytest.raises(ValueError, match="'colour' is no column of samples; there are logprobs, advantages"):
        Sample(np.zeros(1, np.int32), np.ones(1, bool), {"colour": np.zeros(1)})
    full, bare = Sample.of_answer([1], [2], logprobs=0.0, advantages=1.0), Sample.of_answer([1], [2])
    assert columns_of([full, full]) == ["logprobs", "advantages"]
    assert columns_of([bare]) == columns_of([]) == []
    with pytest.raises(ValueError, match=r"have the same columns, and here are some with .* and none"):
        columns_of([full, bare])


@pytest.mark.parametrize(
    "metadata",
    [
        {},  # as before it was told
        {"sampling": "{}"},
        {"sampling": '{"temperature": null}'},
        {"sampling": '{"temperature": NaN}'},
        {"sampling": '{"temperature": 0}'},
        {"sampling": '{"temperature": 1.0, "top_p": 0.9}'},  # the loss knows nothing of it
        {"sampling": "[]"},
    ],
)
def test_a_batch_that_does_not_say_how_it_was_sampled_is_refused(tmp_path: Path, metadata: dict[str, str]):
    """The loss would be wrong without a word. A batch of another run is nobody's concern."""
    run = RunDirectory(tmp_path)
    attempt = Attempt("run", 1, "rl", 0, None, "branch_1")
    one = np.ones(1, np.float32)
    tensors = {"lengths": one.astype(np.int32), "token_ids": one.astype(np.int32), "advantages": one}
    tensors |= {"loss_mask": one.astype(np.bool_), "logprobs": one}
    info = json.dumps({"run_id": "run", "branch": "branch_1", "temperature": 0.7})
    run.batches.mkdir()
    save_file(tensors, batch_path(run.batches, 1), {"metrics": "{}", "info": info, **metadata})
    with pytest.raises(BadBatch, match=r"step_1\.safetensors must say at which temperature .* Remove "):
        run.batch(attempt, 1)
    assert run.batch(dataclasses.replace(attempt, run_id="another"), 1) is None


def test_a_damaged_batch_is_noticed(tmp_path: Path):
    """Wherever it is cut or changed: the trainer never learns from it."""
    path = batch_path(tmp_path, 1)
    values = [0, 1, 2]
    sample = Sample.of_answer([5], values, logprobs=values, advantages=values)
    write_batch(path, RLBatch([sample], {"reward/mean": 0.5}, sampling=FROM_TEXT, header=make_header(1)))
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place])
        for read in (read_batch, open_batch):
            with pytest.raises(DamagedFile, match=str(path)):
                read(path)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with contextlib.suppress(DamagedFile):
            found = open_batch(path)
            assert (found.metrics, found.header) == ({"reward/mean": 0.5}, make_header(1))
            assert found.digest() == digest_of(found.samples) == digest_of([sample])
        with contextlib.suppress(DamagedFile):  # a space more or less in the header changes nothing
            found = read_batch(path)
            assert (found.metrics, found.header) == ({"reward/mean": 0.5}, make_header(1))
            np.testing.assert_array_equal(
                found.samples[0].columns["advantages"], sample.columns["advantages"]
            )
            assert found.digest() == Batch([sample], sampling=FROM_TEXT).digest()
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedFile, match=str(path)):
        read_batch(path)


def test_a_batch_whose_header_lacks_something_is_damaged(tmp_path: Path):
    """Another version of Cairn wrote it, perhaps; it is made again from the ledger."""
    path = batch_path(tmp_path, 1)
    sample = Sample.of_answer([], [0, 0], logprobs=0.0, advantages=0.0)
    columns = {"token_ids": sample.token_ids, "loss_mask": sample.loss_mask, **sample.columns}
    columns["lengths"] = np.array([2], np.int32)
    info = make_header(1).to_json()
    for missing in info:
        partial = json.dumps({name: value for name, value in info.items() if name != missing})
        save_file(columns, path, {"metrics": "{}", "info": partial, "sampling": '{"temperature": 1.0}'})
        with pytest.raises(DamagedFile, match=missing):
            read_batch(path)


@given(samples(), st.integers(1, 20))
def test_cutting_a_sample_cuts_all_of_it(sample: Sample, length: int):
    """What is given to the last learned token for the whole sample goes to the last one that is left."""
    cut = sample.cut(length)
    for name in ("token_ids", "loss_mask"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(sample, name)[:length])
    assert cut.columns.keys() == COLUMNS.keys()
    learned = np.flatnonzero(cut.loss_mask)
    for name, values in cut.columns.items():
        expected = sample.columns[name][:length].copy()
        if COLUMNS[name].summed and len(learned):
            expected[learned[-1]] += sample.columns[name][length:].sum()
        np.testing.assert_array_equal(values, expected)
    assert Sample(sample.token_ids, sample.loss_mask).cut(length).columns == {}


# metrics.jsonl


@given(st.lists(st.integers(1, 50), unique=True), st.integers(0, 60))
def test_keeping_metrics_through_a_step(tmp_path_factory, numbers: list[int], last: int):
    """Later rows go, earlier ones stay as they were."""
    log = MetricsLog(tmp_path_factory.mktemp("run") / "metrics.jsonl")
    written = [{"step": step, "loss": step / 3} for step in sorted(numbers)]
    for row in written:
        log.append(row)
    assert log.rows() == written
    log.keep_through(last)
    assert log.rows() == [row for row in written if row["step"] <= last]
    log.append({"step": 99})
    assert log.rows()[-1] == {"step": 99}


def test_a_row_that_a_crash_cut_short_is_dropped(tmp_path: Path):
    """And what is written after the resume stands on a line of its own."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    with open(log.path, "a") as file:
        file.write('{"step": 2, "lo')
    assert log.rows() == [{"step": 1}]
    log.keep_through(1)
    log.append({"step": 2})
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


DAMAGED_LINES = [
    b'{"step": 2, "lo',
    b'{"loss": 1.0}',
    b'{"step": "2"}',
    b"\xff\xfe",
    b"[2]",
    b"\0" * 20,
    b"[" * 10**5,
]


@pytest.mark.parametrize("damaged", DAMAGED_LINES, ids=lambda line: repr(line[:12]))
def test_a_damaged_row_costs_no_other(tmp_path: Path, caplog, damaged: bytes):
    """Readers skip it; when the run goes on it is taken out, kept beside the file, and reported once."""
    log, follower = (MetricsLog(tmp_path / "metrics.jsonl") for _ in range(2))
    rows = [{"step": 1}, {"step": 3}, {"step": 4}]
    lines = [json.dumps(row).encode() for row in rows]
    log.path.write_bytes(b"\n".join([lines[0], damaged, *lines[1:], b""]))
    assert log.rows() == follower.new_rows() == rows
    assert log.keep_through(3).steps == 1
    assert log.path.read_bytes() == b"\n".join([*lines[:2], b""])
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == damaged + b"\n"
    log.append({"step": 4})
    assert log.keep_through(4).steps == 0
    assert log.rows() == rows
    assert caplog.text.count("took out 1 damaged line, now in metrics.jsonl.damaged-1") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_an_event_stands_on_a_line_of_its_own(tmp_path: Path):
    """Also after one that was cut short, wherever that was: no other event is lost with it."""
    history = History(tmp_path / "history.jsonl")
    history.begin_attempt(1, None)
    first = history.path.read_bytes()
    history.recompute(5, 2000)
    whole = history.path.read_bytes()
    for end in range(len(whole) + 1):
        history.path.write_bytes(whole[:end])
        history.begin_attempt(2, None)
        events = [(row["event"], row.get("number")) for row in history.rows()]
        expected = [("attempt", 1)] * (end >= len(first) - 1) + [("recompute", None)] * (
            end >= len(whole) - 1
        )
        assert events == [*expected, ("attempt", 2)]
        assert history.new_rows() == history.rows()
        history._read = 0


@pytest.mark.parametrize("event", [
    {"event": "restart", "role": "trainer"}, {"event": "recompute", "steps": "5"}, {"event": 5}, {},
    {"event": "attempt", "time": True, "number": 1, "idle": 0},
], ids=str)  # fmt: skip
def test_events_that_lack_something_count_as_damaged(tmp_path: Path, event: dict):
    history = History(tmp_path / "history.jsonl")
    history.append(event)
    history.recompute(2, 800)
    assert [row["event"] for row in history.rows()] == ["recompute"]
    assert Account(history.path, {"run/useful_seconds": "x"}).metrics()["run/recomputed_steps"] == 2


def test_metrics_of_a_run_that_has_not_begun(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.keep_through(0)
    assert (log.rows(), log.new_rows()) == ([], [])
    assert not log.path.exists()


def test_new_rows_come_once_and_whole(tmp_path: Path):
    """Whoever follows the file sees a row when its line has ended."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1})
    log.append({"step": 2})
    assert log.new_rows() == [{"step": 1}, {"step": 2}]
    assert log.new_rows() == []
    with open(log.path, "a") as file:
        file.write('{"step"')
        file.flush()
        assert log.new_rows() == []
        file.write(': 3}\n{"st')
    assert log.new_rows() == [{"step": 3}]


# Files


def test_a_reader_never_sees_half_a_file(tmp_path: Path):
    """While two threads, as a signal's and a watcher's, write it again and again."""
    path = tmp_path / "file"
    write_atomic(path, b"0" * 100_000)

    def write() -> None:
        for i in range(60):
            write_atomic(path, str(i % 10).encode() * 100_000)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            content = path.read_bytes()
            assert len(content) == content.count(content[:1]) == 100_000
    assert [writer.exception() for writer in writers] == [None, None]
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_durable_in_those_above_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each that is new is an entry of the one above it, which is fsynced."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path))
    files.make_folders(tmp_path / "a" / "b" / "c")
    assert {*synced} == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    files.make_folders(tmp_path / "a" / "b")
    assert synced == []


DAMAGE = [b"", b"{", b"\xff", b"\0\0", b"[" * 10**5, b"null", b"5", b'["2"]', b"{}"]


@pytest.mark.parametrize("content", DAMAGE, ids=lambda content: repr(content[:12]))
def test_damaged_json_is_an_error_that_names_the_file(tmp_path: Path, content: bytes):
    """Or counts as not there, for messages that are written again; a folder or a missing file likewise."""
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=f"^{path}: is "):
        read_json(path, list[int])
    assert read_note(path, list[int]) is None


def test_what_is_no_file_is_damaged_and_what_is_missing_is_not(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(DamagedFile, match="folder: can't be read: Is a directory"):
        read_json(tmp_path / "folder")
    assert read_json(tmp_path / "missing", list[int]) is None


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path):
    """A full disk says nothing of what was to be written; the half of it that was written goes again."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        with pytest.raises(OSError, match=r"File too large: '.*a\.json'"):
            write_json(tmp_path / "a.json", "x" * 1000)
        with pytest.raises(OSError, match=r"File too large: '.*metrics\.jsonl'"):
            MetricsLog(tmp_path / "metrics.jsonl").append({"step": 1, "x": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_json_comes_back(tmp_path: Path):
    write_json(tmp_path / "a.json", {"a": [1, None, "ä"]}, durable=True)
    assert read_json(tmp_path / "a.json") == {"a": [1, None, "ä"]}
    assert read_json(tmp_path / "b.json") is None


# The run directory


ATTEMPT = Attempt(
    run_id="abc",
    number=2,
    command="rl",
    start_step=10,
    resume_from="/somewhere/step_10",
    branch="branch_1",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """An attempt's run directory."""
    run = RunDirectory(tmp_path)
    run.begin(ATTEMPT)
    return run


def test_roles_read_the_attempt_that_the_launcher_began(run: RunDirectory):
    attempt = RunDirectory(run.path).attempt()
    assert attempt == ATTEMPT
    assert attempt.version(11) == "abc:branch_1:11"
    assert RunDirectory(run.path / "nowhere").attempt() is None


def _set_role(path: Path, role: str) -> None:
    run = RunDirectory(path)
    for i in range(30):
        run.set_role(role, f"state {i}")
        assert read_json(run.roles)["roles"][role]["state"] == f"state {i}"


def test_roles_do_not_overwrite_each_other(run: RunDirectory):
    """roles.json holds all of them, although each process writes it."""
    context = multiprocessing.get_context("fork")
    names = [f"role{i}" for i in range(4)]
    processes = [context.Process(target=_set_role, args=(run.path, name)) for name in names]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    roles = read_json(run.roles)["roles"]
    assert {name: roles[name]["state"] for name in names} == dict.fromkeys(names, "state 29")
    assert {role["pid"] for role in roles.values()} == {process.pid for process in processes}
    assert {role["attempt"] for role in roles.values()} == {2}


def test_one_launcher_at_a_time(run: RunDirectory):
    """The lock is there before roles are, and a live attempt is one whose trainer runs under it."""
    assert run.live_attempt() is None
    assert run.lock()
    assert not RunDirectory(run.path).lock()
    attempt = run.attempt()
    assert attempt
    run.begin(attempt)
    assert run.live_attempt() is None
    run.set_role("trainer", "running")
    assert RunDirectory(run.path).live_attempt() == attempt
    run.set_role("trainer", "done")
    assert run.live_attempt() is None


def test_a_lock_is_of_the_folder_at_a_path(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    """One that is moved and copied back is another: its launcher notices, and writes nothing there."""
    run.begin(ATTEMPT)
    assert run.lock()
    assert not run.has_moved()
    run.set_role("trainer", "running")
    moved = run.path.rename(run.path.with_name("moved"))
    assert run.has_moved()
    shutil.copytree(moved, run.path)
    assert run.has_moved()
    second = RunDirectory(run.path)
    assert second.lock()
    second.set_role("trainer", "running", pid=7)
    run.set_role("trainer", "failed")
    run.end_roles("stopped", "trainer")
    assert (second.current_roles() or {})["trainer"].state == "running"
    with pytest.raises(RoleFailed, match="was moved, removed or replaced"):
        check_in_place(run)
    check_in_place(second)
    shutil.rmtree(run.path)
    assert second.has_moved()
    run.unlock()
    second.unlock()
    assert not run.has_moved()

    third = RunDirectory(run.path.with_name("third"))
    third.path.mkdir()
    real, replaced = locked_folder.open_lock, []

    def replaced_meanwhile(path: Path) -> int:
        fd = real(path)
        if not replaced:
            replaced.append(path.unlink())
        return fd

    monkeypatch.setattr(locked_folder, "open_lock", replaced_meanwhile)
    assert third.lock()
    assert replaced
    assert not third.has_moved()
    third.unlock()


def test_what_a_killed_attempt_left_is_no_live_attempt(run: RunDirectory):
    """The next launcher has the lock some time before roles.json has its own attempt."""
    killed, following = RunDirectory(run.path), RunDirectory(run.path)
    attempt = run.attempt()
    assert attempt
    assert killed.lock()
    killed.begin(attempt)
    killed.set_role("trainer", "running")
    killed.unlock()
    assert run.live_attempt() is None
    assert following.lock()
    assert run.live_attempt() is None
    following.begin(dataclasses.replace(attempt, number=attempt.number + 1))
    assert run.live_attempt() is None
    following.set_role("trainer", "running")
    live = run.live_attempt()
    assert live
    assert live.number == attempt.number + 1


def test_a_stop_is_asked_of_one_attempt_only(run: RunDirectory):
    assert run.stop_requested() is None
    run.request_stop("SIGINT")
    assert RunDirectory(run.path).stop_requested() == "SIGINT"
    run.begin(dataclasses.replace(ATTEMPT, number=3))
    assert run.stop_requested() is None


def test_an_earlier_attempts_versions_are_not_taken(run: RunDirectory):
    """Nor is one that is still in transit when an attempt begins."""
    run.weights.mkdir()
    run.versions.announce(run.attempt(), 11, save=True, last=False)
    announced = run.versions.announced(run.attempt(), 11)
    assert (announced.save, announced.last) == (True, False)
    assert run.versions.announced(run.attempt(), 12) is None
    assert run.versions.announced(dataclasses.replace(ATTEMPT, number=3), 11) is None
    run.versions.clear()
    assert run.versions.announced(run.attempt(), 11) is None


def test_versions_that_nobody_needs_go_and_one_folder_is_kept_for_the_next(run: RunDirectory):
    for step in (10, 11, 12):
        run.versions.folder(step).mkdir(parents=True)
        (run.versions.folder(step) / "model.safetensors").write_text(f"version {step}")
        run.versions.announce(run.attempt(), step, save=False, last=False)
    run.versions.forget_before(12)
    run.versions.forget_before(12)
    assert run.versions.all_announced(run.attempt()) == [12]
    assert (run.versions.folder(12) / "model.safetensors").read_text() == "version 12"
    assert not run.versions.folder(10).exists()
    assert not run.versions.folder(11).exists()
    assert [file.name for file in run.versions.spare.iterdir()] == ["model.safetensors"]
    run.versions.clear()
    assert not run.versions.spare.exists()


def ship(run: RunDirectory, steps: range, *, run_id: str = "abc", branch: str = "branch_1") -> None:
    """Batches as the orchestrator of some branch ships them."""
    sample = Sample.of_answer([], [0, 0], logprobs=0.0, advantages=0.0)
    for step in steps:
        batch = RLBatch([sample], {}, sampling=FROM_TEXT, header=make_header(step, run_id, branch))
        write_batch(batch_path(run.batches, step), batch)


def test_batches_go_when_a_checkpoint_has_made_them_needless(run: RunDirectory):
    ship(run, range(8, 13))
    run.forget_batches(10)
    assert sorted(run.batches.iterdir()) == sorted(batch_path(run.batches, step) for step in (11, 12))


def test_only_batches_of_the_same_branch_are_trained_on(run: RunDirectory):
    """Those that another branch, or another run, has left are not seen."""
    ship(run, range(11, 12))
    ship(run, range(12, 13), branch="branch_2")
    ship(run, range(13, 14), run_id="xyz")
    found = [step for step in range(10, 15) if run.batch(ATTEMPT, step)]
    assert found == [11]


@pytest.mark.parametrize(("steps", "branch", "goes_on"), [
    (range(11, 13), "branch_1", True),
    (range(12, 13), "branch_1", False),
    (range(11, 13), "branch_2", False),
])  # fmt: skip
def test_batches_that_can_be_trained_on_stay_and_others_are_set_aside(
    run: RunDirectory, steps: range, branch: str, goes_on: bool
):
    """They stay if they begin where the attempt does, on its branch; what is set aside is all there."""
    ship(run, steps, branch=branch)
    names = sorted(path.name for path in run.batches.iterdir())
    aside = run.path / "abandoned"
    run.set_batches_aside(aside, ATTEMPT)
    assert run.batches.exists() == goes_on
    assert sorted(path.name for path in (run.batches if goes_on else aside / "batches").iterdir()) == names


# Messages

MESSAGES = [
    Announcement("run:1", 3, save=True, last=False),
    StopRequest("SIGTERM"),
    Probe([5, 6, 7], [-1.0, -0.25], "float32"),
    make_header(3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_from_its_json_and_lacks_nothing(message: Message):
    fields = message.to_json()
    assert type(message).from_json(json.dumps(fields | {"unknown": 1})) == message
    for name in fields:
        with pytest.raises(ValueError, match=name):
            type(message).from_json(json.dumps({key: value for key, value in fields.items() if key != name}))
        with pytest.raises(ValueError, match=name):
            type(message).from_json(json.dumps(fields | {name: {"no": "such"}}))


def test_messages_lie_in_their_files_as_in_earlier_versions(run: RunDirectory):
    """Byte by byte: a run may go on with another version of Cairn than it began with."""
    run.weights.mkdir()
    run.versions.announce(ATTEMPT, 11, save=True, last=False)
    announcement = '{\n  "attempt": "abc:2",\n  "version": 11,\n  "save": true,\n  "last": false\n}\n'
    assert (run.weights / "v11.json").read_text() == announcement
    run.request_stop("SIGTERM")
    assert (run.path / "stop.json").read_text() == '{\n  "reason": "SIGTERM"\n}\n'
    assert json.dumps(make_header(3).to_json()) == (
        '{"run_id": "run", "branch": "branch_1", "attempt": "run:1", "step": 3, "version": "run:branch_1:2", '
        '"problems": [7, 3], "ledger": {"step": 3, "places": [[1, 1], [4, 4]], "samples": 2, "tokens": 6, '
        '"digest": "digest", "oldest_step": 1}}'
    )


def test_a_probe_comes_back_from_its_folder(tmp_path: Path):
    """Whatever its logprobs are; and a folder need not have one."""
    assert read_probe(tmp_path) is None
    write_probe(tmp_path, Probe([1, 2, 3], [-math.inf, 1 / 3], "bfloat16"))
    assert read_probe(tmp_path) == Probe([1, 2, 3], [-math.inf, 1 / 3], "bfloat16")


def test_a_policys_name_is_taken_apart_as_it_was_put_together():
    name = PolicyName("0badcafe", "branch_12", 345)
    assert str(name) == "0badcafe:branch_12:345"
    assert PolicyName.parse(str(name)) == name
    for text in ("", "345", "branch_12:345", "0badcafe:branch_12:", "0badcafe:branch_12:newest"):
        with pytest.raises(ValueError, match="is no policy's name"):
            PolicyName.parse(text)


# Waiting


def test_waiting_ends_with_what_came():
    answers = iter([None, None, 0])
    assert wait_for(lambda: next(answers), seconds=60, whom="it", setting="--x", poll=0) == 0


def test_a_deadline_names_whom_and_what_allows_more():
    begun = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"waited 0\.05 s for the trainer; --ckpt\.part-timeout allows"):
        wait_for(lambda: None, seconds=0.05, whom="the trainer", setting="--ckpt.part-timeout")
    assert time.monotonic() - begun >= 0.05


# Faults


def test_the_table_of_fault_points_is_the_one_in_the_docs():
    """Both say where in the code a fault strikes, in the same words."""
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "faults.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \| (.*) \|$", docs, re.MULTILINE))
    assert {point: rows.get(point) for point in POINTS} == POINTS
