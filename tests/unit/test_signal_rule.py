"""The rule for signals that ask to stop, and what processes inherit of it."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import environment_of

from cairn.launch.ray import cluster as ray_cluster
from cairn.launch.ray import environment as ray_folder
from cairn.launch.ray.environment import LONGEST_FOLDER, make_private_folder, remove_private_folders
from cairn.launch.supervise.slot import RoleProcess
from cairn.run.exits import RayFailed
from cairn.run.signals import STOP_SIGNALS, on_stop_signals, stop_signals_blocked
from cairn.run.waiting import DeadlinePassed, Patience, wait_for

INT, TERM, HUP = STOP_SIGNALS


# The rule


def test_what_comes_within_two_seconds_is_one_request(monkeypatch: pytest.MonkeyPatch):
    """Whatever the signals are; a later one is a second request, and there is no third."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heard = []
    with on_stop_signals(heard.append, lambda: heard.append("again")):
        for later, number in [(0, TERM), (0, TERM), (0.5, HUP), (1.4, INT)]:
            clock[0] += later
            signal.raise_signal(number)
        assert heard == ["SIGTERM"]
        clock[0] += 0.1
        signal.raise_signal(INT)
        assert heard == ["SIGTERM", "again"]
        clock[0] += 60
        signal.raise_signal(TERM)
    assert heard == ["SIGTERM", "again"]


def test_a_role_leaves_the_second_request_to_its_launcher(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    heard = []
    with on_stop_signals(heard.append):
        signal.raise_signal(INT)
        clock[0] += 10
        signal.raise_signal(TERM)
    assert heard == ["SIGINT"]


def test_handlers_and_mask_are_as_before_afterwards():
    """And inside the signals are heard, even by who was started deaf."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    heard = []
    with stop_signals_blocked():
        with on_stop_signals(heard.append):
            os.kill(os.getpid(), TERM)
            assert heard == ["SIGTERM"]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_nohup_is_respected():
    """SIGHUP stays ignored where it was; the others do not."""
    before = signal.signal(HUP, signal.SIG_IGN)
    heard = []
    try:
        with on_stop_signals(heard.append):
            signal.raise_signal(HUP)
            assert heard == []
            signal.raise_signal(INT)
        assert signal.getsignal(HUP) is signal.SIG_IGN
    finally:
        signal.signal(HUP, before)
    assert heard == ["SIGINT"]


# What processes inherit


def test_no_handler_of_its_own_undoes_the_deafness_of_a_process():
    """As of Ray's daemons and vLLM, which install some; so do the processes that they start in turn."""
    grandchild = "import signal, sys; [signal.signal(n, lambda *_: sys.exit(3)) for n in (1, 2, 15)]; input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with stop_signals_blocked():
        process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, process_group=0)
    time.sleep(0.3)
    for number in STOP_SIGNALS:
        os.killpg(process.pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.communicate(b"\n")
    assert process.returncode == 0


def test_a_role_starts_deaf_and_with_a_ray_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever the user's own token or mode is; it is for clusters that others have started."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "users")
    tokens = []
    for local in (True, True, False):
        role = RoleProcess("trainer", tmp_path, tmp_path / "log", local_ray=local)
        try:
            status = Path(f"/proc/{role.pid}/status").read_text()
            environment = dict(entry.partition(b"=")[::2] for entry in environment_of(role.pid))
        finally:
            role.kill()
        (blocked,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
        assert all(blocked >> (number - 1) & 1 for number in STOP_SIGNALS)
        tokens.append((environment[b"RAY_AUTH_MODE"], environment[b"RAY_AUTH_TOKEN"]))
    assert tokens[2] == (b"disabled", b"users")
    assert tokens[0][0] == tokens[1][0] == b"token"
    assert len({tokens[0][1], tokens[1][1], b"users"}) == 3


# A terminal that is gone


OUTLIVES = """
import sys
from cairn.run.output import outlive_terminal
outlive_terminal()
print("before", flush=True)
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr):
    print("nobody reads this", file=stream, flush=True)
"""


def test_printing_goes_on_without_a_terminal():
    """Closed under a process that does not get SIGHUP, as one in the background."""
    terminal, of_process = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OUTLIVES],
        stdin=subprocess.PIPE,
        stdout=of_process,
        stderr=of_process,
        start_new_session=True,
    )
    os.close(of_process)
    printed = b""
    while not printed.endswith(b"\n"):  # a terminal may hand over the end of a line after the rest of it
        printed += os.read(terminal, 100)
    assert printed == b"before\r\n"
    os.close(terminal)
    process.communicate(b"\n")
    assert process.returncode == 0


# Deadlines


def test_a_deadline_does_not_run_while_the_process_is_stopped(monkeypatch: pytest.MonkeyPatch):
    """An hour between two looks counts for two seconds."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    patience = Patience(5)
    clock[0] += 3600
    assert not patience.over
    clock[0] += 1.5
    assert not patience.over
    clock[0] += 1.6
    assert patience.over


def test_a_wait_goes_on_after_a_stop(monkeypatch: pytest.MonkeyPatch):
    """And ends when the rest of its time has passed."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 1))
    looks = []

    def check() -> str | None:
        looks.append(clock[0])
        if len(looks) == 3:
            clock[0] += 86_400
        return "there" if len(looks) == 6 else None

    assert wait_for(check, seconds=10, whom="batch 1", setting="--x") == "there"
    with pytest.raises(DeadlinePassed, match="waited 10 s for batch 2; --x allows more"):
        wait_for(lambda: None, seconds=10, whom="batch 2", setting="--x")


# Ray's folder, and a Ray that does not start


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for private folders."""
    monkeypatch.setattr(ray_folder, "_places", lambda: [tmp_path])
    return tmp_path


MAKE = """
import sys
from pathlib import Path
from cairn.launch.ray import environment as ray_folder
ray_folder._places = lambda: [Path(sys.argv[1])]
print(ray_folder.make_private_folder(), flush=True)
sys.stdin.readline()
"""


def test_a_private_folder_lives_as_long_as_its_process(places: Path):
    """However that ends; until then nobody removes it, and what is not ours stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(places)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    folder = Path(process.stdout.readline().strip())
    (folder / "r").mkdir()
    others = places / "other"
    others.mkdir()
    (places / "cairn-ray-link").symlink_to(others)
    assert folder.stat().st_mode & 0o777 == 0o700
    own = make_private_folder()
    assert own.is_dir()
    assert folder.is_dir()
    process.kill()
    process.communicate()
    remove_private_folders()
    assert (folder.exists(), own.exists(), others.exists()) == (False, True, True)


def test_the_folder_leaves_room_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A long TMPDIR, as schedulers give it, is passed over."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.setenv(name, str(long))
    monkeypatch.setattr(ray_folder.tempfile, "tempdir", None)
    folder = make_private_folder()
    assert len(str(folder / "r")) <= LONGEST_FOLDER
    assert long not in folder.parents


def test_no_place_for_the_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_folder, "_places", lambda: [Path("/dev/null/x")])
    with pytest.raises(OSError, match="no folder for temporary files is writable; tried /dev/null/x"):
        make_private_folder()


def test_a_ray_that_does_not_start_may_start_the_next_time(places: Path, monkeypatch: pytest.MonkeyPatch):
    """Its control server finds no token, and ends."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(RayFailed, match="Ray did not start on this machine: gcs_server exited with 1: "):
        ray_cluster._start_local(1, gpus=0, seconds=60)


# Commands


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number", "code", "message"),
    [
        (["sft", "@"], TERM, 75, "SIGTERM: stopped before anything was started; run the same command"),
        (["rl", "@"], INT, 75, "SIGINT: stopped before anything was started"),
        (["inference", "@"], HUP, 0, "SIGHUP: stopped before anything was started"),
        (["ckpt", "show"], INT, 1, "error: interrupted"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_command_that_is_still_reading(
    command: list[str], number: int, code: int, message: str, tmp_path: Path
):
    """A plain message, no traceback; it reads from a pipe, so that it is known where it is."""
    target = tmp_path / "pipe.toml"
    pipe = target
    if command[0] == "ckpt":
        target = tmp_path / "step_1"
        target.mkdir()
        pipe = target / "manifest.json"
    os.mkfifo(pipe)
    program = Path(sys.executable).with_name(command[0])
    process = subprocess.Popen(
        [program, *command[1:], target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whoever has started us may ignore it
    )
    writing = os.open(pipe, os.O_WRONLY)  # returns when somebody reads
    time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    os.close(writing)
    assert message in output
    assert "Traceback" not in output
    assert process.returncode == code


# What is forked


FORKS = """
import multiprocessing, os, signal, sys, threading, time
from cairn.run.signals import on_stop_signals

def sleeps():
    time.sleep(600)

def double(x):
    return 2 * x

def reward(method, found):
    context = multiprocessing.get_context(method)
    child = context.Process(target=sleeps)
    child.start()
    child.terminate()
    child.join(60)
    child.kill()
    with context.Pool(2) as pool:
        doubled = pool.map(double, [1, 2])
    found += [child.exitcode, doubled, heard]

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked(number, handler=None):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        if handler:
            signal.signal(number, handler)
        os.write(writer, b"x")
        time.sleep(600)
    os.read(reader, 1)
    os.kill(pid, number)
    return ended(pid)

heard = []
if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):  # nohup, or a shell's background, has them ignored
        signal.signal(number, signal.SIG_DFL)
    with on_stop_signals(heard.append), on_stop_signals(heard.append):
        for method in ("fork", "forkserver", "spawn"):
            thread = threading.Thread(target=reward, args=[method, found := []])
            thread.start()
            thread.join()
            assert found == [-signal.SIGTERM, [2, 4], []], (method, found)
        reward("fork", found := [])
        assert found == [-signal.SIGTERM, [2, 4], []], found
        assert [forked(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == [-2, -1, -15]
        assert forked(signal.SIGTERM, lambda *_: os._exit(7)) == 7, "its own handler"
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["SIGTERM"], heard
    print("right")
"""


def test_signals_that_end_a_forked_child_are_not_the_runs(tmp_path: Path):
    """Rewards for code end workers that they have forked; that must end these, and the run must not stop."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "right\n", done.stdout + done.stderr
