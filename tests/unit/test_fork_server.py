"""A process that is forked in a test is as it would be, had it been executed."""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import runs
from fork_server import ForkServer

TESTS = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "process_facts", "a", "--b=c d"]


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return fork_server.launch(runs.environment_of_commands(), runs.REPOSITORY)


@pytest.fixture(autouse=True)
def default_signals() -> Iterator[None]:
    """nohup, or a shell's background, has these ignored, which an executed process takes over."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def facts(tmp_path: Path, server: ForkServer | None, **how: Any) -> dict[str, Any]:
    """What a process that is started so prints of itself."""
    (tmp_path / "in").write_text("some input")
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        with (
            open(tmp_path / "in") as stdin,
            open(tmp_path / "out", "wb") as out,
            open(tmp_path / "err", "wb") as err,
            fork_server.forking(server),
        ):
            process = subprocess.Popen(
                PROGRAM,
                cwd=TESTS,
                env={**runs.environment_of_commands(), "CAIRN_SOMETHING": "1"},
                stdin=stdin,
                stdout=out,
                stderr=err,
                pass_fds=[writing],
                **how,
            )
        assert process.wait(60) == 7
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
        os.close(writing)
    assert (tmp_path / "err").read_text() == "an error\n"
    found = json.loads((tmp_path / "out").read_text())
    found["files"] = [0, 1, 2, writing] == [
        file for file in (0, 1, 2, reading, writing) if file in found["files"]
    ]
    return found


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_forked_process_is_as_an_executed_one(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_session: bool, dies: bool
):
    monkeypatch.setattr(fork_server, "FORKED", ("process_facts",))
    how: dict[str, Any] = {"start_new_session": new_session}
    if dies:
        how["preexec_fn"] = functools.partial(fork_server.begin, os.getpid())
    asked: list[list[str]] = []
    monkeypatch.setattr(server, "start", lambda *args: asked.append(args[0]["program"]) or start(*args))
    start = ForkServer.start.__get__(server)
    executed, forked = facts(tmp_path, None, **how), facts(tmp_path, server, **how)
    assert asked == [PROGRAM]
    if (
        dies
    ):  # a function between fork and exec has Python run the hooks for forks that this process has by now
        executed["blocked"] = forked["blocked"]
    assert forked == executed
    assert forked["parent"] == os.getpid()
    assert forked["files"]
    assert forked["leads its session"] == new_session
    assert forked["blocked"] == [signal.SIGHUP]


def test_what_is_forked(server: ForkServer, monkeypatch: pytest.MonkeyPatch):
    """Our commands and their processes, unless a variable differs that is read at import."""
    bin = Path(sys.executable).parent
    environment = dict(server.environment)

    def takes(*program: str, **variables: str) -> bool:
        return server.takes([str(bin / program[0]), *program[1:]], environment | variables, [])

    (role, *_) = (f"cairn.{name}" for name in fork_server.FORKED)
    assert takes("sft", "@", "x.toml")
    assert takes("python", "-m", role, CAIRN_FAULT="x", RAY_AUTH_MODE="token")
    assert not takes("python", "-m", "cairn.checkpoint.saving.writer")
    assert not takes("python", "scripts/chaos.py")
    assert not takes("pytest")
    assert not takes("sft", OMP_NUM_THREADS="7")
    assert not takes("sft", HOME="/nowhere")
    del environment["PATH"]
    assert not takes("sft")
    environment = dict(server.environment)
    monkeypatch.setenv("CAIRN_TESTS_EXEC", "1")
    assert not takes("sft")


def test_all_that_is_forked_is_there():
    """And is started somewhere as `python -m`."""
    sources = "\n".join(file.read_text() for file in (runs.REPOSITORY / "src").rglob("*.py"))
    for name in fork_server.FORKED:
        assert importlib.util.find_spec(f"cairn.{name}"), name
        assert re.search(rf'"-m", "cairn\.{re.escape(name)}"', sources), name
