"""The chaos harness itself: plans are repeatable, the proxy misbehaves as told, and violations are found."""

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from runs import DEADLINE
from stores import make_step

from cairn.checkpoint.store import CheckpointStore
from cairn.remote.client.upload_body import Sent
from cairn.run.branches import BranchChoice, Branches, BranchStates
from cairn.run.faults import POINTS
from cairn.tools.chaos.bench import with_branches
from cairn.tools.chaos.branched import BranchedRun
from cairn.tools.chaos.disasters import Disasters, mount_small_disk, tear, unmount
from cairn.tools.chaos.plan import OF_BRANCHES, OF_LARGE_FILES, SMALL_FILES, ChaosSettings, Disaster, draw
from cairn.tools.chaos.processes import Family
from cairn.tools.chaos.proxy import GENERATE, Proxy
from cairn.tools.chaos.run import ChaosRun
from cairn.tools.chaos.task import ChaosTask, Result

SFT = ChaosSettings(last_step=10, interval=3, rl=False, own_disk=True)
PAIR = replace(SFT, ranks=2, own_disk=False)
RL = replace(SFT, rl=True, groups=16, proxied=True, server="server")
IN_MEMORY = replace(RL, in_memory=1)
REMOTE = replace(IN_MEMORY, remote=True)
PREFERENCES = replace(SFT, reference=True, validated=True)


def plans(setting: ChaosSettings) -> list[list[Disaster]]:
    """Checked for the plans of many seeds."""
    return [draw(random.Random(seed), setting) for seed in range(500)]


def test_a_seed_gives_the_same_disasters_again():
    """Another seed gives another plan."""
    assert plans(RL) == plans(RL)
    assert len({tuple(plan) for plan in plans(RL)}) > 450
    assert {len(plan) for plan in plans(RL)} == {1, 2, 3}


def test_every_fault_point_and_every_role_has_its_turn():
    """Only roles that the run has: an SFT run never loses an orchestrator."""
    of_sft = {disaster for plan in plans(SFT) for disaster in plan}
    of_rl = {disaster for plan in plans(RL) for disaster in plan}
    points = {d.target.partition(":")[0] for d in of_rl if d.kind == "fault"}
    elsewhere = ("export.", "import.", "adopt.", "policy.", "service.", "branches.", "peer.")
    of_preferences = {disaster for plan in plans(PREFERENCES) for disaster in plan}
    assert any(d.target.startswith("reference.written:") for d in of_preferences)
    torn = {d.target for d in of_preferences if d.kind == "torn"}
    assert torn == SMALL_FILES.keys() - {"uploads", "versions", "batches", "ledger"}
    of_runs = {point for point in POINTS if not point.startswith((*elsewhere, "reference."))}
    of_runs -= {*OF_LARGE_FILES}
    in_memory = {d.target.partition(":")[0] for plan in plans(IN_MEMORY) for d in plan if d.kind == "fault"}
    assert in_memory == {point for point in of_runs if not point.startswith("remote.")}
    assert points == {point for point in in_memory if not point.startswith("memory.")}
    assert {d.target.partition(".")[0] for d in of_sft if d.kind == "fault"} == {
        "save",
        "commit",
        "retention",
    }
    of_pair = {disaster for plan in plans(PAIR) for disaster in plan}
    roles = {"launcher", "trainer", "worker", "writer"}
    assert {d.target for d in of_sft if d.kind == "kill"} == roles
    assert {d.target for d in of_pair if d.kind == "kill"} == roles | {"worker1"}
    assert {d.target for d in of_rl if d.kind == "kill"} == roles | {"orchestrator", "server"}
    common = {"kill", "fault", "pause", "stop", "power_cut", "corrupt", "torn", "rot", "read_only"}
    assert {d.kind for d in of_pair} == common
    assert {d.kind for d in of_sft} == common | {"full"}
    moods = {"slow", "errors", "drops", "silent"}
    assert {d.kind for d in of_rl} == common | moods | {"full", "wrong_weights", "rival"}
    asked = {(d.target, d.signal) for d in of_pair if d.kind == "stop"}
    everybody = {"launcher", "group", "everyone", "trainer", "worker", "worker1"}
    assert asked == {(target, signal) for target in everybody for signal in ("TERM", "INT", "HUP")}
    of_all = SMALL_FILES.keys() - {"evals", "reference"}
    assert {d.target for d in of_rl if d.kind == "torn"} == of_all - {"uploads"}
    of_remote = {disaster for plan in plans(REMOTE) for disaster in plan}
    assert {d.target.partition(":")[0] for d in of_remote if d.kind == "fault"} == of_runs
    assert {d.kind for d in of_remote} == {d.kind for d in of_rl} | {"machine_lost"}
    assert {d.target for d in of_remote if d.kind == "machine_lost"} == {"power", "disk"}
    assert {d.target for d in of_remote if d.kind == "torn"} == of_all
    assert "uploader" in {d.target for d in of_remote if d.kind == "kill"}


def test_torn_lines_come_after_the_whole_ones(tmp_path: Path):
    """As a row that was being written; other files may hold anything."""
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1}\n{"step": 2}\n'
    for seed in range(20):
        path.write_text(whole)
        tear(path, "metrics", random.Random(seed))
        torn = path.read_text().removeprefix(whole)
        assert 0 < len(torn) < len('{"step": 2}')
        assert '{"step": 2}'.startswith(torn)
    left = set()
    for seed in range(20):
        path.write_text("{}")
        tear(path, "roles", random.Random(seed))
        left.add(path.read_bytes())
    assert {b"", b"{", b"{}"} <= left
    assert len(left) > 3


@pytest.mark.slow
@pytest.mark.parametrize("signal", ["TERM", "INT", "HUP"])
@pytest.mark.parametrize(("target", "reached"), [("launcher", 1), ("group", 2), ("everyone", 3)])
def test_a_stop_reaches_whom_it_should(run: "ChaosRun", signal: str, target: str, reached: int):
    """To the launcher alone, to its process group, or to all processes of the run."""
    sleep = "import subprocess, time; p = subprocess.Popen(['sleep', '600']{}); p.wait(); time.sleep(600)"
    own = sleep.format(", start_new_session=True")
    group = f"import subprocess; subprocess.Popen(['sleep', '600']); exec({own!r})"
    run.start_command(["python", "-c", group])
    try:
        end = time.monotonic() + DEADLINE
        while len(run.family.named("sleep 600")) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(run.family.processes()) == 3
        assert Disasters(run).strike(Disaster("stop", target, signal=signal))
        assert run.asked_to_stop
        while len(run.family.processes()) > 3 - reached and time.monotonic() < end:
            time.sleep(0.02)
        assert len(run.family.processes()) == 3 - reached
    finally:
        run.family.kill()
        run.process.wait()


def test_a_locked_folder_takes_no_file_until_it_is_repaired(run: "ChaosRun"):
    """Neither in the run's folder nor in that of its checkpoints."""
    run.run.checkpoints.mkdir(parents=True)
    disasters = Disasters(run)
    if not disasters.strike(Disaster("read_only", seconds=60.0)):
        pytest.skip("this file system has no folders that even root can't change")
    for folder in (run.path, run.run.checkpoints):
        with pytest.raises(PermissionError):
            (folder / "new").touch()
    disasters.repair()
    (run.run.checkpoints / "new").touch()
    assert run.excused


def test_a_full_disk_takes_no_byte_until_it_is_repaired(run: "ChaosRun"):
    """The run's folder is a file system of its own."""
    if not mount_small_disk(run.path):
        pytest.skip("only root may mount file systems")
    try:
        disasters = Disasters(run)
        assert disasters.strike(Disaster("full", seconds=60.0))
        with pytest.raises(OSError, match="No space left"):
            (run.path / "new").write_bytes(b"1")
        disasters.end_all()
        (run.path / "new").write_bytes(b"1")
    finally:
        unmount(run.path)


@pytest.mark.parametrize("first", ["power", "disk"])
def test_a_lost_machine_leaves_the_remote_steps_only(tmp_path: Path, first: str):
    """No process, no file; the run goes on in another folder, from the newest remote step or a later one."""
    (tmp_path / "here").mkdir()
    run = ChaosRun(ChaosTask(["sft"], replace(SFT, remote=True)), [], tmp_path / "it is", random.Random(0))
    assert run.remote
    remote, before = run.remote, run.path
    checkpoints = run.run.checkpoints
    folder, manifest = make_step(checkpoints, 3, {"a": b"1"})
    remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    for step in (1, 2, 3, 4, 5):
        run.run.metrics.append({"step": step})
    run.watch.look()
    again = f"pathlib.Path({str(before)!r}).mkdir(exist_ok=True)"
    writes = f"import pathlib, time\nwhile time.sleep(0.01) is None: {again}"
    run.start_command(["python", "-c", writes])
    while not run.family.named("pathlib"):
        time.sleep(0.02)
    assert Disasters(run).strike(Disaster("machine_lost", first, seconds=0.1))
    assert run.family.processes() == []
    run.process.wait()
    assert not before.exists()
    assert not run.path.exists()
    assert run.path != before
    assert run.watch.store.root == run.path / "checkpoints"
    assert run.result.lost == [2], "step 3 was remote"
    assert not run._is_over(), "it has to be started again, whatever its exit code was"
    run.run.metrics.path.parent.mkdir(parents=True)
    run.run.metrics.append({"step": 1})
    run.watch.look()
    (violation,) = run.result.violations
    assert violation == "went on after step 1 elsewhere, although the remote store had step 3"
    assert run.result.recomputed == []


@pytest.mark.parametrize("damage", ["flipped", "absent"])
def test_remote_steps_are_checked(tmp_path: Path, damage: str):
    """Each byte of all; and the last step must be there at the end."""
    run = ChaosRun(ChaosTask(["sft"], replace(SFT, remote=True)), [], tmp_path / "here", random.Random(0))
    assert run.remote
    last = SFT.last_step if damage == "flipped" else SFT.last_step - 1
    folder, manifest = make_step(run.run.checkpoints, last, {"a": b"1"})
    run.remote.put(folder, manifest, Sent(tmp_path / "sent", manifest))
    if damage == "flipped":
        run._check_remote()
        assert run.result.violations == []
        run.remote.objects.put(f"step_{last}/a", b"2")
    run._check_remote()
    (violation,) = run.result.violations
    assert (
        "changed between" if damage == "flipped" else "the newest remote checkpoint is step 9"
    ) in violation


# The proxy


class Echo(BaseHTTPRequestHandler):
    """A server that echoes requests."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Say it back."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing else."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of the echo server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()


def post(proxy: Proxy, content: object, path: str = GENERATE) -> httpx.Response:
    """Send JSON through the proxy."""
    return httpx.post(proxy.url + path, json=content, trust_env=False, timeout=DEADLINE)


def test_the_proxy_passes_on_and_counts(proxy: Proxy):
    """Only complete generations count, by their requests."""
    for content in ({"seed": 1}, {"seed": 2}, {"seed": 1}):
        assert post(proxy, content).json() == content
    post(proxy, {"seed": 1}, "/elsewhere")
    post(proxy, {"finish_reason": "abort"})
    assert sorted(proxy.finished.values()) == [1, 2]


def test_the_proxy_misbehaves_as_long_as_it_is_told_to(proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    """Errors, cut answers, delays, silence; none counts as a complete generation."""
    proxy.mood = "errors"
    assert {post(proxy, {"seed": i}).status_code for i in range(20)} == {500, 503}
    proxy.mood = "drops"
    with pytest.raises(httpx.TransportError):
        post(proxy, {"seed": 1})
    proxy.mood = "silent"
    moods = iter(["silent", "silent", None])
    passing = SimpleNamespace(sleep=lambda _: setattr(proxy, "mood", next(moods)))
    monkeypatch.setattr("cairn.tools.chaos.proxy.time", passing)
    with pytest.raises(httpx.TransportError):
        post(proxy, {"seed": 1})
    assert list(moods) == [], "it waited"
    assert not proxy.finished
    assert post(proxy, {"seed": 1}).status_code == 200


# Processes


def test_a_family_is_whoever_it_started(tmp_path: Path):
    """Including a grandchild in another session whose parent has ended, and no other process."""
    family, other = Family({}), Family({})
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    family.start(tmp_path / "log", ["python", "-c", script]).wait()
    end = time.monotonic() + DEADLINE
    while not (found := family.processes()) and time.monotonic() < end:  # it may be in its execve
        time.sleep(0.01)
    (process,) = found
    assert process.command == "sleep 600"
    assert other.processes() == []
    other.kill()
    assert family.processes() == [process]
    family.kill()
    assert family.processes() == []


# The promises


@pytest.fixture
def run(tmp_path: Path) -> ChaosRun:
    """A finished run of two steps, identical to the undisturbed one."""
    row = {"step": 1, "loss": 0.5, "time/step": 1.0}
    calm = Result(tmp_path, rows=[row, row | {"step": 2, "time/step": 2.0}], tensors={"model": "crc"})
    task = ChaosTask(["sft"], SFT, proxy=None, calm=calm)
    run = ChaosRun(task, [], tmp_path / "run", random.Random(0))
    run.result.rows = [row, row | {"step": 2}]
    run.result.tensors = {"model": "crc"}
    return run


def test_a_run_like_the_undisturbed_one_is_in_order(run: ChaosRun):
    """Metrics that measure time may differ."""
    run.promises()._check_against_calm()
    assert run.result.violations == []


@pytest.mark.parametrize(
    ("doctor", "message"),
    [
        (lambda result: result.rows[1].update(loss=0.4), "metrics of step 2 differ: {'loss': [0.4, 0.5]}"),
        (lambda result: result.rows[1].update(more=1), "metrics of step 2 differ: {'more': [1, None]}"),
        (lambda result: result.rows.pop(), "metrics have the steps [1]"),
        (lambda result: result.rows.append(result.rows[1]), "metrics have the steps [1, 2, 2]"),
        (lambda result: result.tensors.update(model="other"), "the last step's tensors differ in ['model']"),
    ],
)
def test_a_difference_is_a_violation(run: ChaosRun, doctor, message: str):
    """A difference in metrics, steps or weights."""
    doctor(run.result)
    run.promises()._check_against_calm()
    assert run.result.violations == [message]


def test_too_many_steps_done_again(run: ChaosRun):
    """An interval, and the steps during one save; more if a checkpoint was damaged."""
    run.result.recomputed = [4, 7, 1]
    run.promises()._check_recomputed()
    assert run.result.violations == ["7 steps were recomputed, but saves are due every 3 steps"]
    run.result.violations.clear()
    run.watch.fell_back = True
    run.promises()._check_recomputed()
    assert run.result.violations == []


def test_a_generation_made_twice(run: ChaosRun, proxy: Proxy):
    """One repetition is too many if only the trainer died; an orchestrator may lose unrecorded answers."""
    run.task.proxy = proxy
    post(proxy, {"seed": 1})
    post(proxy, {"seed": 1})
    run.result.struck = [Disaster("kill", "orchestrator")]
    run._check_generations()
    assert run.result.violations == []
    run.result.struck = [Disaster("kill", "worker"), Disaster("fault", "publish.begin:kill@2")]
    run._check_generations()
    (violation,) = run.result.violations
    assert violation.startswith("1 generations were made twice although only the trainer died")


def test_what_is_seen_on_the_way(run: ChaosRun):
    """Recomputed steps, an invalid latest checkpoint, and a latest that goes back."""
    run.path.mkdir()
    metrics = run.run.metrics
    for step in (1, 2, 3):
        metrics.append({"step": step})
    run.watch.look()
    metrics.keep_through(1)
    run.watch.look()
    assert run.result.recomputed == [2]
    folder = CheckpointStore(run.run.checkpoints).folder(3)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"format": 1}))
    run.watch.look()
    assert "latest is not valid" in run.result.violations[0]
    (folder / "manifest.json").unlink()
    run.watch.look()
    assert run.result.violations[-1] == "latest went back from step 3 to 0"


def test_what_a_run_leaves_is_audited(run: ChaosRun):
    """A folder without a run fails the promises."""
    run.path.mkdir()
    run._conclude()
    assert any("is not a run directory" in violation for violation in run.result.violations)
    assert "the newest checkpoint is step None" in run.result.violations


# Branches


def test_steps_of_branches_are_those_of_all_together():
    """Until the rule ends one; and processes see those of a turn."""
    rule = {"keep": ["5:2", "10:1"], "turn_steps": 4}
    setting = with_branches(replace(RL, last_step=20, own_disk=True), rule, 3)
    assert (setting.last_step, setting.turn_steps, setting.records) == (3 * 5 + 2 * 5 + 10, 4, 3)
    assert not setting.own_disk
    struck = {disaster for plan in plans(setting) for disaster in plan}
    assert {one.kind for one in struck} == {*OF_BRANCHES}
    assert max(one.step or 0 for one in struck) > 20
    counts = {
        point: {int(one.target.partition("@")[2]) for one in struck if one.target.startswith(point)}
        for point in ("branches.recorded", "trainer.batch_read")
    }
    assert counts == {"branches.recorded": {1, 2, 3}, "trainer.batch_read": {1, 2, 3}}


def test_each_branch_keeps_the_promises_and_the_same_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Up to the step at which it has ended; what each has broken says whose it is."""
    states = BranchStates(["a", "b"], "reward/mean", "max", 5, 8)
    choice = BranchChoice(4, {"a": 0.25, "b": 0.5}, ["b"])
    calm = Result(tmp_path, branches={"a": Result(tmp_path), "b": Result(tmp_path)})
    calm.choices = [{"step": 4, "scores": {"a": 0.25, "b": 0.5}, "kept": ["b"]}]
    task = ChaosTask(["rl"], replace(RL, interval=2), branches=("a", "b"), calm=calm)
    asked: list[tuple] = []

    class Kept:
        def __init__(self, path: Path, watch, last_step: int, interval: int, calm: Result, ended_early: bool):
            asked.append((path.name, last_step, interval, calm, ended_early))
            self.watch = watch

        def check(self) -> None:
            self.watch.result.violations += ["it is broken"] * (self.watch is run._each.each["a"])
            self.watch.result.recomputed = [2]

    monkeypatch.setattr("cairn.tools.chaos.branched.Promises", Kept)
    for kept in ("b", "a"):
        asked.clear()
        run = BranchedRun(task, [], tmp_path / kept, random.Random(0))
        Branches(run.path).begin(states.choosing(replace(choice, kept=[kept])))
        run._conclude()
        ended = ["a", "b"][kept == "a"]
        assert asked == [
            (name, 4 if name == ended else 8, 2, calm.branches[name], name == ended) for name in "ab"
        ]
        others = [] if kept == "b" else ["kept were {4: ['a']} instead of {4: ['b']}"]
        assert run.result.violations == ["branch a: it is broken", *others]
        assert run.result.recomputed == [2, 2]
    run = BranchedRun(task, [], tmp_path / "none", random.Random(0))
    run._conclude()
    assert run.result.violations[0].startswith("branches: ")
