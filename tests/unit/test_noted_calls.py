"""Calls of user code that kill the process or hang it: they fail, and nothing else does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import draws
import pytest
from runs import forking_commands

from cairn.run import noted_calls
from cairn.run.noted_calls import UserCall
from cairn.run.output import STACKS
from cairn.run.processes import processor_times, thread_that_crashed
from cairn.run.supervised import MOST_EXCUSED, RestartRule

PROCESS = """
import asyncio, ctypes, os, re, signal, sys, threading, time
from pathlib import Path
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.completion.completion import Retrying
from cairn.run import noted_calls
from cairn.run.noted_calls import UserCall
from cairn.run.output import log_crashes

def own_thread(poison):
    thread = threading.Thread(target=poison)
    thread.start()
    thread.join()

POISON = {
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "gil": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "own thread": lambda: own_thread(lambda: ctypes.string_at(0)),
    "leaves": lambda: sys.exit(3),
    "interrupts": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "recursion": lambda: (lambda f: f(f))(lambda f: f(f)),
    "memory": lambda: bytearray(1 << 62),
    "child leaves": lambda: os.fork() or sys.exit(0),
}

class Poisonous:
    def __len__(self):
        return 8

    def messages(self, problem):
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem, answer):
        if problem == 3:
            POISON[sys.argv[2]]()
        return 0.5

class Later(Poisonous):
    async def reward(self, problem, answer):
        await asyncio.sleep(0)
        if problem == 3:
            await asyncio.to_thread(POISON[sys.argv[2]])
        return 0.5

async def work():
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="poisonous"), reward_retries=1, reward_retry_seconds=0,
        reward_threads=int(sys.argv[3]),
    )
    asked, retrying = SingleTurn(globals()[sys.argv[4]](), config), Retrying(config)
    async def one(problem):
        async def attempt():
            assert await asked.reward(problem, "an answer") == (0.5, {})
        call = UserCall(f"reward of {problem}", f"about {problem}", f"reward of problem {problem}")
        return await retrying.failure(attempt, call, "; the answer was 'an answer'")
    reasons = await asyncio.gather(*map(one, range(8)))
    for problem, reason in enumerate(reasons):
        print(problem, reason, flush=True)
    sys.stdout.flush()
    os._exit(0)

log_crashes()
noted_calls.start(Path(sys.argv[1]), "run")
print("started", flush=True)
asyncio.run(work())
"""
CASES = [
    ("segfault", "the process was killed by SIGSEGV while it ran, 2 times", 2),
    ("abort", "the process was killed by SIGABRT while it ran, 2 times", 2),
    ("exit", "the process ended with exit code 0 while it ran, 2 times", 2),
    ("kill", "the process was killed by SIGKILL while it ran, 4 times", 4),
    ("gil", "the process hung while it ran, 2 times", 2),
    ("own thread", "the process was killed by SIGSEGV while it ran, 2 times", 2),
    ("leaves", "raised SystemExit: 3", 0),
    ("interrupts", "raised KeyboardInterrupt", 0),
    ("recursion", "raised RecursionError", 0),
    ("memory", "raised MemoryError", 0),
    ("child leaves", "None", 0),
]


def end_of(process: subprocess.Popen, record: Path, log: Path) -> str:
    """Wait for a process's end as its launcher does, and charge who is to blame; returns what it printed."""
    while process.poll() is None:
        calls = noted_calls.read(record)
        if any(time.time() - call.since > 3 and call.threads for call in calls):
            before = processor_times(process.pid)
            process.send_signal(STACKS)
            time.sleep(0.5)
            after = processor_times(process.pid)
            busy = [tid for tid, (had, _) in after.items() if had - before.get(tid, (had, 0))[0] > 1e8]
            process.kill()
            process.wait()
            noted_calls.charge(record, process.pid, "hung", sure=True, suspects=busy)
            return ""
        time.sleep(0.05)
    printed = log.read_text(errors="replace")
    if "7 None" in printed:
        return printed
    if process.returncode >= 0:
        how, sure, suspects = f"ended with exit code {process.returncode}", True, []
    else:
        name = signal.Signals(-process.returncode).name
        sure = name != "SIGKILL"
        how, suspects = f"was killed by {name}", thread_that_crashed(log) if sure else []
    assert noted_calls.charge(record, process.pid, how, sure=sure, suspects=suspects), printed
    return ""


@pytest.mark.parametrize(("threads", "environment"), [(1, "Poisonous"), (0, "Poisonous"), (3, "Later")])
@pytest.mark.parametrize(("poison", "reason", "deaths"), draws.cases(CASES, "poison", 5))
def test_a_poisonous_call_fails_after_its_tries_and_the_others_do_not(
    tmp_path: Path, poison: str, reason: str, deaths: int, threads: int, environment: str
):
    if (threads, environment) != (1, "Poisonous") and poison not in ("segfault", "exit", "child leaves"):
        pytest.skip("one kind of each suffices")
    record, died = tmp_path / "heartbeats" / "orchestrator.calls", 0
    while True:
        log = tmp_path / f"log_{died}"
        with open(log, "wb") as out, forking_commands() as variables:
            command = [sys.executable, "-c", PROCESS, str(record), poison, str(threads), environment]
            process = subprocess.Popen(command, stdout=out, stderr=out, env=variables)
        if printed := end_of(process, record, log):
            break
        died += 1
        assert died < 10, log.read_text()
    assert died == deaths
    found = dict(line.split(" ", 1) for line in printed.splitlines() if line[:1].isdigit())
    assert reason in found.pop("3")
    assert set(found.values()) == {"None"}
    if poison == "segfault":
        assert "string_at" in (tmp_path / "log_0").read_text(), "faulthandler tells the stack"


def note(path: Path, *texts: str, executing: str | None = None) -> int:
    """Note calls in a process that then dies at once; returns its id."""
    script = (
        "import sys, os; from pathlib import Path; from cairn.run import noted_calls as n\n"
        "n.start(Path(sys.argv[1]), 'run'); kept = []\n"
        "for text in sys.argv[3:]:\n"
        "    c = n.in_progress(n.UserCall(text, 'about', text)); c.__enter__(); kept.append(c)\n"
        "    if text == sys.argv[2]: n.executing().__enter__()\n"
        "os.kill(os.getpid(), 9)"
    )
    arguments = [sys.executable, "-c", script, str(path), executing or "", *texts]
    process = subprocess.Popen(arguments)
    process.wait()
    return process.pid


def test_who_is_charged(tmp_path: Path):
    """Whoever is executed; all in progress only if nobody is, and if the process failed by itself."""
    path = tmp_path / "calls"
    pid = note(path, "a", "b", "c", executing="b")
    assert noted_calls.charge(path, pid + 1, "died", sure=True) == []  # of another process
    pid = note(path, "a", "b", "c", executing="b")
    assert [call.text for call in noted_calls.charge(path, pid, "died", sure=False)] == ["b"]
    pid = note(path, "a", "b")
    assert noted_calls.charge(path, pid, "died", sure=False) == []
    pid = note(path, "a", "c")
    assert [call.text for call in noted_calls.charge(path, pid, "died", sure=True)] == ["a", "c"]
    pid = note(path, "a", "d")  # a has been made again, alone
    assert [call.text for call in noted_calls.charge(path, pid, "died", sure=True)] == ["a"]
    noted_calls.start(path, "run")
    charges = {text: noted_calls.charged(UserCall(text, "about", text)) for text in "abcd"}
    assert {text: (one.count, one.sure) for text, one in charges.items()} == {
        "a": (2, 2), "b": (1, 0), "c": (1, 1), "d": (0, 0)
    }  # fmt: skip
    noted_calls.start(path, "run", "attempt_2")
    assert noted_calls.charged(UserCall("a", "about", "a")).sure == 1, "the code may have been mended"
    noted_calls.start(path, "another run")
    assert noted_calls.charged(UserCall("a", "about", "a")).count == 0
    noted_calls.stop(path)
    noted_calls._record = None


def test_restarts_for_a_poisonous_call_do_not_count_but_have_an_end():
    rule = RestartRule(1)
    assert [rule.wait_after_death(3, excused=True) for _ in range(MOST_EXCUSED)] == [0.0] * MOST_EXCUSED
    assert rule.wait_after_death(3, excused=True) == 0.0
    assert rule.wait_after_death(3, excused=True) is None
    assert rule.wait_after_death(4, excused=True) == 0.0


def test_what_a_note_costs(tmp_path: Path):
    """A call is noted in memory, not on the disk: thousands a second are no load. Prints the measurement."""
    noted_calls.start(tmp_path / "calls", "run")
    begun, count = time.perf_counter(), 20_000
    for number in range(count):
        with noted_calls.in_progress(UserCall(f"key {number}", "about", "text")), noted_calls.executing():
            pass
    print(f"{(time.perf_counter() - begun) / count * 1e6:.1f} us a call")
    assert noted_calls.read(tmp_path / "calls", os.getpid()) == []
    noted_calls.stop(tmp_path / "calls")
    noted_calls._record = None
