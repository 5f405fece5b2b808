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

from cairn.config.inference import InferenceConfig
from cairn.inference.vllm_command import command
from cairn.run.processes import keeper_command

TESTS = Path(__file__).parents[1]
PROGRAM = [sys.executable, "-m", "process_facts", "a", "--b=c d"]


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return fork_server.launch(runs.environment_of_commands(), runs.REPOSITORY)


@pytest.fixture(scope="module")
def with_vllm(server: ForkServer) -> ForkServer:
    """The asking side of one that has imported vLLM, by what it says."""
    return ForkServer(server._connection, server.name, server.environment, has_vllm=True)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_forked(server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Our commands and their processes, unless what differs is a module, or a variable read at import."""
    bin = Path(sys.executable).parent
    environment = dict(server.environment)

    def takes(*program: str, **variables: str) -> bool:
        return server.takes([str(bin / program[0]), *program[1:]], environment | variables, [])

    (role, *_) = (f"cairn.{name}" for name in fork_server.FORKED)
    assert takes("sft", "@", "x.toml")
    assert takes("python", "-m", role, CAIRN_FAULT="x", RAY_AUTH_MODE="token")
    assert takes("python", "-m", "cairn.checkpoint.saving.writer", "7")
    assert not takes("python", "-m", "cairn.launch.slurm.wait_for_nodes")
    assert takes("cairn", "chaos", "--seed", "1")
    assert not takes("python", "scripts/gpu_all.py")
    assert takes("python", "-c", "from cairn.launch import main")
    assert not takes("python", "-c", "import torch")
    assert takes("python", *fork_server.OF_PYTEST, TORCH_X="1")
    assert not takes("pytest")
    assert not takes("sft", OMP_NUM_THREADS="7")
    assert not takes("sft", HF_HOME="/nowhere")
    assert takes("sft", PATH=f"{bin}:/usr/bin", UV_OFFLINE="1")
    assert takes("sft", HOME="/nowhere", PYTHONPATH="/nowhere")
    assert not takes("sft", LD_LIBRARY_PATH="/nowhere")
    (tmp_path / "nothing_of_this_name.py").touch()
    assert takes("sft", PYTHONPATH=str(tmp_path))
    (tmp_path / "pynvml.py").touch()
    assert not takes("sft", PYTHONPATH=str(tmp_path))
    del environment["HF_HUB_OFFLINE"]
    assert not takes("sft")
    environment = dict(server.environment)
    monkeypatch.setenv("CAIRN_TESTS_EXEC", "1")
    assert not takes("sft")


SERVER = (*command(InferenceConfig(), "configs/reverse_text/model")[0][1:3], "--model", "x")
KEPT = keeper_command(0, [sys.executable, *SERVER], on_term="pass")[1:]
ENGINE = (
    "-B",
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(1, 2)",
    "--multiprocessing-fork",
)


REGISTRY = ("-m", fork_server.VLLM_REGISTRY)


@pytest.mark.parametrize(
    "program", [SERVER, KEPT, ENGINE, REGISTRY], ids=["server", "kept", "engine", "registry"]
)
def test_what_is_forked_of_a_server(server: ForkServer, with_vllm: ForkServer, program: tuple[str, ...]):
    """All processes of a server, of one that has vLLM, unless torch would read more when it is imported."""
    command = [sys.executable, *program]
    variables = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "cairn"}
    environment = server.environment | variables
    assert with_vllm.takes(command, environment, [])
    assert not server.takes(command, environment, [])
    assert not with_vllm.takes(command, environment | {"TORCHDYNAMO_DISABLE": "0"}, [])
    assert with_vllm.takes(command, environment | {"TRITON_X": "1"}, []) == (program in (ENGINE, REGISTRY))


def ask_python(server: ForkServer | None, code: str, tmp_path: Path, **variables: str) -> Any:
    """What code prints as JSON in one of vLLM's processes, a fork if there is a server."""
    with open(tmp_path / "out", "wb") as out, fork_server.forking(server):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}\n'spawn_main'", "--multiprocessing-fork"],
            env={**runs.environment_of_commands(), "TORCHDYNAMO_DISABLE": "1", **variables},
            cwd=runs.REPOSITORY,
            stdout=out,
        )
    assert process.wait(60) == 0
    return json.loads((tmp_path / "out").read_text())


EXECUTES = """
from cairn.run import files
import os, sys

os.environ["CAIRN_FIRST"] = str(os.getpid())
program = (
    "from cairn.run import files; import json, os, sys;"
    "found = os.environ['CAIRN_FIRST'] == str(os.getpid());"
    "print(json.dumps([found, sys.argv[1:], os.path.exists('/proc/self/fd/0'), 'torch' in sys.modules]))"
)
os.execv(sys.executable, [sys.executable, "-c", program, "a b", "c"])
"""


def test_what_a_fork_executes_it_becomes(server: ForkServer, tmp_path: Path):
    """It stays the same process, and needs no imports of its own."""
    found = []
    for one in (server, None):
        with open(tmp_path / "out", "wb") as out, fork_server.forking(one):
            process = subprocess.Popen(
                [sys.executable, "-c", EXECUTES],
                env=runs.environment_of_commands(),
                cwd=runs.REPOSITORY,
                stdout=out,
            )
        assert process.wait(60) == 0
        found.append(json.loads((tmp_path / "out").read_text()))
    assert found[0] == [True, ["a b", "c"], True, True]
    assert found[1] == [True, ["a b", "c"], True, False]


def test_variables_that_torch_reads_when_it_is_imported(with_vllm: ForkServer, tmp_path: Path):
    """A fork of it has their effect."""
    code = (
        "import json, torch, torch._dynamo;"
        "print(json.dumps([torch.get_num_threads(), torch._dynamo.config.disable]))"
    )
    assert ask_python(with_vllm, code, tmp_path, OMP_NUM_THREADS="3") == [3, True]


WITH_THE_PATH_BEFORE = """
import os, subprocess, sys
program = [sys.executable, "-c", "import cairn, json, sys; print(json.dumps(sys.path[1:]))"]
subprocess.run(program, env={**os.environ, "PYTHONPATH": os.environ["CAIRN_BEFORE"]}, check=True)
"""


def test_modules_of_another_folder(with_vllm: ForkServer, tmp_path: Path):
    """PYTHONPATH is read when Python starts; a fork finds modules where an executed process does.

    And so does a fork of that one, with the folders that there were before.
    """
    before, other = runs.environment_of_commands()["PYTHONPATH"], f"{tmp_path}:tests"
    found = []
    for server in (with_vllm, None):
        code = "import json, sys; print(json.dumps(sys.path[1:]))"
        found.append(ask_python(server, code, tmp_path, PYTHONPATH=other))
        again = ask_python(server, WITH_THE_PATH_BEFORE, tmp_path, PYTHONPATH=other, CAIRN_BEFORE=before)
        found.append(again)
    assert found[:2] == found[2:]
    assert found[0][:2] == [str(tmp_path), str(runs.REPOSITORY / "tests")]
    assert found[1][: len(before.split(":"))] == before.split(":")


FORGETFUL = """
import json, sys
sys.modules["__main__"]._forget_torch()
found = "torch" in sys.modules
sys.modules["torch"] = None
import transformers
print(json.dumps([found, transformers.utils.is_torch_available()]))
"""


def test_preflight_has_no_torch(with_vllm: ForkServer, tmp_path: Path):
    """Nor the transformers that knows of torch."""
    assert ask_python(with_vllm, FORGETFUL, tmp_path) == [False, False]


@pytest.mark.parametrize(("end", "code"), [("5", 5), ("None", 0), ("'why'", 1)])
def test_how_a_fork_ends(with_vllm: ForkServer, tmp_path: Path, end: str, code: int):
    """As Python ends: after its threads, and what it has registered."""
    program = (
        "import atexit, sys, threading, time; 'spawn_main';"
        "atexit.register(lambda: print('last'));"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start();"
        f"sys.exit({end})"
    )
    environment = {**with_vllm.environment, "TORCHDYNAMO_DISABLE": "1"}
    found = []
    for server in (with_vllm, None):
        with fork_server.forking(server):
            process = subprocess.Popen(
                [sys.executable, "-c", program, "--multiprocessing-fork"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        printed, _ = process.communicate(timeout=60)
        found.append((process.returncode, printed.split()))
    assert found[0] == found[1]
    assert found[0][0] == code
    assert found[0][1][-2:] == ["thread", "last"]


def test_all_that_is_forked_is_there():
    """And is started somewhere as `python -m`."""
    files = (runs.REPOSITORY / "src").rglob("*.py")
    sources = re.sub(r"\s+", " ", " ".join(file.read_text() for file in files))
    for name in fork_server.FORKED:
        assert importlib.util.find_spec(f"cairn.{name}"), name
        assert re.search(rf'"-m", "cairn\.{re.escape(name)}"', sources), name


def test_processes_of_pytest_are_forks(request: pytest.FixtureRequest):
    """Those that pytest-xdist starts, and what they start is forked of the server that each has."""
    if not hasattr(request.config, "workerinput") or "CAIRN_TESTS_EXEC" in os.environ:
        pytest.skip("of pytest-xdist, as scripts/test starts it")
    assert fork_server.own is runs._fork_server()
    sft = [str(Path(sys.executable).parent / "sft")]
    assert fork_server.own.takes(sft, runs.environment_of_commands(), [])


def test_commands_and_helpers_are_forked_whatever_test_files_have_imported(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """vLLM sets variables when it is imported, and some test file imports it in each process of pytest's."""
    monkeypatch.setenv("SET_BY_AN_IMPORT", "1")
    command = [str(Path(sys.executable).parent / "sft"), "@", "sft.toml"]
    assert server.takes(command, runs.Shell(tmp_path).environment, [])
    helper = [sys.executable, "-m", "cairn.launch.plan.preflight", "1"]
    at_first, by_imports = dict(runs.AT_FIRST), {**runs.BY_IMPORTS, "SET_BY_AN_IMPORT": "1"}
    helpers = fork_server.HelperServer(lambda: server, at_first, by_imports)
    assert helpers.takes(helper, dict(os.environ), [])
    assert not helpers.takes(helper, {**os.environ, "SET_BY_A_TEST": "1"}, [])
