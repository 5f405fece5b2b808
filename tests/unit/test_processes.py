"""The priority of work beside a run: as low as it gets while nobody waits for it, and normal again."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import draws
import pytest
from runs import DEADLINE, priority_of

from cairn.run.processes import (
    WINDOW_SECONDS,
    ProcessorUse,
    bring_forward,
    keeper_command,
    processor_times,
    put_in_background,
)
from cairn.run.waiting import wait_for

PR_CAPBSET_DROP = 24
CAP_SYS_ADMIN, CAP_SYS_NICE = 21, 23
NORMAL, LOW = (os.getpriority(os.PRIO_PROCESS, 0), os.SCHED_OTHER, 0), (19, os.SCHED_BATCH, 19)

SLEEPS = """
import itertools, sys, threading, time
for line in itertools.chain(["ready"], sys.stdin):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    print("one more", flush=True)
"""
SPINS = "while True: pass"


@contextlib.contextmanager
def process(code: str, *, session: bool = True) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=session, **pipes)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def give_up_privileges() -> None:
    """In a new process: from exec on it can't lower a niceness, whoever runs the tests."""
    libc = ctypes.CDLL(None)
    for capability in (CAP_SYS_ADMIN, CAP_SYS_NICE):
        libc.prctl(PR_CAPBSET_DROP, capability)  # who hasn't got it can't drop it


def run_without_privileges(code: str, *arguments: object) -> dict:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, preexec_fn=give_up_privileges, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_threads_and_the_session_go_to_the_background_and_back():
    with process(SLEEPS) as sleeper:
        sleeper.stdout.readline()
        assert priority_of(sleeper.pid) == {NORMAL}
        put_in_background(sleeper.pid)
        sleeper.stdin.write("another\n")
        sleeper.stdin.flush()
        sleeper.stdout.readline()
        assert len(processor_times(sleeper.pid)) == 3
        assert priority_of(sleeper.pid) == {LOW}
        undone = bring_forward(sleeper.pid)
        assert priority_of(sleeper.pid) == {NORMAL if undone else (19, os.SCHED_OTHER, 0)}
    assert bring_forward(sleeper.pid), "it has ended"
    put_in_background(sleeper.pid)


def test_whoever_shares_a_session_is_left_its_share():
    """Or the session's other processes would go to the background as well: the terminal's, for one."""
    with process(SLEEPS, session=False) as sleeper:
        sleeper.stdout.readline()
        before = {share for _, _, share in priority_of(os.getpid())}
        put_in_background(sleeper.pid)
        assert {share for _, _, share in priority_of(os.getpid())} == before


@draws.seldom
def test_without_privileges_the_session_gets_its_share_back():
    """The niceness stays; so close together the kernel refuses the second change of a share, for a moment."""
    code = f"""
import json, subprocess, sys
from pathlib import Path
from typing import Literal

import pytest
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from runs import priority_of
from cairn.run.processes import bring_forward, put_in_background
pair = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
try:
    for sleeper in pair:
        put_in_background(sleeper.pid)
    low = [sorted(priority_of(sleeper.pid)) for sleeper in pair]
    undone = [bring_forward(sleeper.pid) for sleeper in pair]
    print(json.dumps(dict(low=low, undone=undone, then=[sorted(priority_of(s.pid)) for s in pair])))
finally:
    for sleeper in pair:
        sleeper.kill()
"""
    assert run_without_privileges(code) == {
        "low": [[list(LOW)]] * 2,
        "undone": [False] * 2,
        "then": [[[19, os.SCHED_OTHER, 0]]] * 2,
    }


@pytest.mark.slow
def test_who_gets_no_processor_starves():
    """And who wants none does not."""
    with process(SPINS, session=False) as hog, process(SPINS, session=False) as victim:
        one = min(os.sched_getaffinity(0))
        for spinning in (hog, victim):
            os.sched_setaffinity(spinning.pid, {one})
        os.setpriority(os.PRIO_PROCESS, victim.pid, 19)
        use, own = ProcessorUse(victim.pid), ProcessorUse(os.getpid())
        wait_for(lambda: use.starves() or None, seconds=DEADLINE, whom="the victim", setting="none")
        assert own.longest_wait() >= 0
    with process(SLEEPS) as sleeper:
        sleeper.stdout.readline()
        use = ProcessorUse(sleeper.pid)
        use._since -= WINDOW_SECONDS
        assert not use.starves()


PLACE = f"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
from typing import Literal

import pytest
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from runs import priority_of
from cairn.config.trainer import SFTConfig
from cairn.launch.jobs import job as background_place
from cairn.run.directory import RunDirectory

WORK = '''
import os, sys
from pathlib import Path
from typing import Literal

import pytest
from cairn.run import heartbeat
from cairn.run.processes import die_with
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
parent = os.getpid()
if os.fork() == 0:  # a competitor with the same processor in the same session, at normal priority
    die_with(parent)
    while True: pass
heartbeat.start(Path(sys.argv[1]))
heartbeat.doing("work")
while True: pass
'''

class Process:
    def __init__(self, role, run, log, *, local_ray):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORK, run / "heartbeats" / (role + ".json")], start_new_session=True
        )
        self.pid = self.process.pid

    @property
    def exit_code(self):
        return self.process.poll()

    def kill(self):
        os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

class Job:
    late = False
    newest_done = lambda self: 0
    give_up = lambda self, reason: None
    is_behind = lambda self: self.late

class Work(background_place.JobSlot):
    first_missing = lambda self: 0
    conclude = lambda self, code: None

background_place.RoleProcess = Process
run = RunDirectory(sys.argv[1])
config = SFTConfig.model_construct(max_restarts=3, hang_timeout=600.0)
place = Work("exporter", run, config, Job())
seen = []

def look_until(condition):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, seen
        place.look_after(1, stopping=False)
        time.sleep(0.05)
    seen.append([place._process.pid == first, *max(priority_of(place._process.pid))])

try:
    first = place._process.pid
    share = lambda: max(priority_of(place._process.pid))[2]
    low = lambda: place._low
    look_until(low)
    place.job.late = True
    look_until(lambda: not low())
    place.job.late = False
    look_until(low)
    place.await_it()
    look_until(lambda: place._process.pid != first)
    print(json.dumps(dict(seen=seen, restarts=len(list(run.history.rows())))))
finally:
    place.stop()
"""


@draws.seldom
def test_work_that_starves_is_done_by_another_process_once_somebody_waits(tmp_path: Path):
    """Where its priority can't be raised. Before, retention that might give up steps gets it its share."""
    low, brought_forward = [True, *LOW], [True, 19, os.SCHED_OTHER, 0]
    (tmp_path / "heartbeats").mkdir()
    assert run_without_privileges(PLACE, tmp_path) == {
        "seen": [low, brought_forward, low, [False, *NORMAL]],
        "restarts": 0,
    }


def test_a_process_may_have_as_many_open_files_as_the_system_allows():
    code = """
import resource
from cairn.run.processes import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "4096 4096\n"


@pytest.mark.parametrize(("on_term", "code"), [("pass", 7), ("kill", -signal.SIGKILL)])
def test_what_a_keeper_does_with_sigterm(on_term: Literal["pass", "kill"], code: int):
    """Handed on, the command may end in its own way; what it has started ends with it."""
    command = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()"
    )
    argv = keeper_command(0, [sys.executable, "-c", command], on_term=on_term)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as kept:
        assert kept.stdout is not None
        child = int(kept.stdout.readline())
        kept.terminate()
        assert kept.wait(60) == code
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
