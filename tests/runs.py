"""Runs commands as users run them, and reads what they leave behind; shared by all tests.

A pytest plugin, so that its fixtures are there for all tests.
"""

import asyncio
import contextlib
import fcntl
import functools
import itertools
import json
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar

import fork_server
import psutil
import pytest
import torch
import torch.multiprocessing
from fork_server import ForkServer, HelperServer
from safetensors.torch import load_file

from cairn.inference.client import InferenceClient, token_file
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = "configs/reverse_text"
DEADLINE = 240.0
"""Seconds after which a test gives up waiting."""
AT_FIRST = dict(os.environ)
"""The environment of pytest, before a test changes it, or an import: vLLM sets variables with which a command
would be executed, as what was imported without them can't be forked for it."""
BY_IMPORTS: dict[str, str] = {}
"""Variables that were set when test files were imported."""
LOWEST_PORT = 20_000
"""Of those that `free_port` draws."""


ABOUT = {
    "run_id": "0badcafe",
    "attempt": 1,
    "branch": "branch_1",
    "parent": None,
    "parts": ["trainer"],
    "world_size": 1,
    "dtypes": {},
    "metrics": {},
    "versions": {},
    "config_digest": "",
}
"""Fields of a manifest beside its step and files, for tests in which they do not matter."""


# Commands and processes


@dataclass(frozen=True)
class Finished:
    """How a command ended, and its whole output."""

    code: int
    output: str


def pytest_collection_finish() -> None:
    """All test files are imported."""
    BY_IMPORTS.update((name, value) for name, value in os.environ.items() if AT_FIRST.get(name) != value)


@functools.cache
def _fork_server() -> ForkServer:
    """The one that this process of pytest's starts commands with, and pytest's first process the others."""
    return fork_server.own or fork_server.launch(environment_of_commands(), REPOSITORY)


@functools.cache
def _fork_server_with_vllm() -> ForkServer:
    """The one for commands that start a server."""
    return fork_server.launch(environment_of_commands(), REPOSITORY, of=_fork_server())


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Here pytest-xdist starts its processes, as forks of one that has imported what they need."""
    starts = bool(session.config.getoption("tx", None))
    with fork_server.forking(_fork_server() if starts else None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def forked_helpers() -> Iterator[None]:
    """Writers of checkpoints and preflight are forks, where a process of pytest's has many tests to run."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with fork_server.forking(HelperServer(_fork_server, AT_FIRST, BY_IMPORTS)):
        yield


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What code under test leaves in the environment, such as OMP_NUM_THREADS, is gone after its test.

    Else all later tests of this process would have it, and their commands would be executed. A fixture of a
    module that sets variables is asked for by name: what `getfixturevalue` starts within a test is gone, too.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update((name, value) for name, value in before.items() if os.environ.get(name) != value)


@contextlib.contextmanager
def forking_servers() -> Iterator[dict[str, str]]:
    """Let this thread fork what it starts of vLLM and Cairn; gives the environment of commands."""
    with _as_a_command() as environment, fork_server.forking(_fork_server_with_vllm()):
        yield environment


@contextlib.contextmanager
def _as_a_command() -> Iterator[dict[str, str]]:
    """Give this process the environment of commands meanwhile."""
    environment = environment_of_commands()
    with pytest.MonkeyPatch.context() as patch:
        for name in BY_IMPORTS:
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


def _starts_vllm(name: str, arguments: tuple[object, ...]) -> bool:
    """Whether a command starts a server of vLLM's, by its command line."""
    if name == "cairn":
        return arguments[:1] == ("service",)
    if name == "ckpt":
        return "--rollout" in arguments and "--server" not in arguments
    return name == "inference" or (name == "rl" and not any("inference-url" in str(a) for a in arguments))


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
"""Addresses that no other machine reaches."""


class Command:
    """One of Cairn's commands as a process. As a context manager it leaves no process behind."""

    def __init__(
        self, log: Path, environment: dict[str, str], name: str, *arguments: object, executed: bool = False
    ):
        self.log = log
        server = None
        if not executed:
            server = _fork_server_with_vllm() if _starts_vllm(name, arguments) else _fork_server()
        with open(log, "wb") as out, fork_server.forking(server):
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / name), *map(str, arguments)],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(fork_server.begin, os.getpid()),
            )
        self._family: set[tuple[int, str]] = set()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.family()
        for pid, _ in {(self.process.pid, ""), *self.survivors()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def finish(self, deadline: float = DEADLINE) -> Finished:
        """Wait until it ends by itself."""
        end = time.monotonic() + deadline
        for look in itertools.count():
            if self.process.poll() is not None:
                break
            assert time.monotonic() < end, f"still running after {deadline:g} s; it printed:\n{self.output}"
            if look % 5 == 0:
                self.family()
            time.sleep(0.1)
        return Finished(self.process.returncode, self.output)

    def wait_until(self, condition: Callable[[], T | None], deadline: float = DEADLINE) -> T:
        """Wait until `condition` is true while the command runs; returns its value."""
        end = time.monotonic() + deadline
        while True:
            ended = self.process.poll() is not None  # before the look: then nothing comes after it
            if value := condition():
                return value
            assert not ended, f"ended too early; it printed:\n{self.output}"
            assert time.monotonic() < end, f"waited {deadline:g} s; it printed:\n{self.output}"
            time.sleep(0.01)

    def listening(self) -> set[tuple[str, int]]:
        """The addresses and ports at which its processes are seen to listen."""
        self.family()
        pids = {self.process.pid} | {pid for pid, _ in self.survivors()}
        found = psutil.net_connections("inet")
        return {(c.laddr.ip, c.laddr.port) for c in found if c.pid in pids and c.status == psutil.CONN_LISTEN}

    def family(self) -> set[tuple[int, str]]:
        """All descendants seen so far, as process id and start time; call it regularly.

        An orphan that was not seen before is known by its session, unless it leads that.
        """
        processes = _processes()
        known = {self.process.pid} | {pid for pid, _ in self._alive(processes)}
        while found := {pid for pid, (_, *of) in processes.items() if not known.isdisjoint(of)} - known:
            self._family |= {(pid, processes[pid][0]) for pid in found}
            known |= found
        return set(self._family)

    def survivors(self) -> set[tuple[int, str]]:
        """Descendants that are still alive."""
        return self._alive(_processes())

    def _alive(self, processes: Mapping[int, tuple[str, int, int]]) -> set[tuple[int, str]]:
        return {(pid, started) for pid, started in self._family if processes.get(pid, ("",))[0] == started}

    def workers(self) -> list[int]:
        """Process ids of the trainer's ranks, which are Ray actors."""
        self.family()
        named = {process[0] for process in self.survivors() if "ray::Worker" in _name(process)}
        processes = _processes()
        # A child of a rank has its name until it has become another program.
        return [pid for pid in named if pid in processes and processes[pid][1] not in named]

    def assert_nothing_survives(self, deadline: float = 30.0) -> None:
        """Assert that all descendants end within the deadline."""
        end = time.monotonic() + deadline
        while alive := [_name(process) for process in self.survivors()]:
            assert time.monotonic() < end, alive
            time.sleep(0.1)


def _processes() -> dict[int, tuple[str, int, int]]:
    """Start time, parent and session of every process but zombies.

    Without pathlib, in which a tenth of the suite's processor time was spent.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    state, parent, _, session, *fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if state != b"Z":
                found[int(name)] = (fields[15].decode(), int(parent), int(session))
    return found


def _name(process: tuple[int, str]) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process[0]}/cmdline").read_text().replace("\0", " ").strip()
    return ""


class Shell:
    """Starts commands in one environment: a cache folder of its own but for vLLM, no network, no token."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.cache = folder / "cache"
        self.environment = {**environment_of_commands(), "XDG_CACHE_HOME": str(self.cache)}
        self._started = 0

    def start(
        self,
        name: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        executed: bool = False,
    ) -> Command:
        """Start a command, to be used as a context manager.

        Args:
            environment: goes over the shell's.
            executed: start it, and all that it starts, as users do (see fork_server.py).
        """
        self._started += 1
        log = self.folder / f"{self._started}_{Path(name).name}.log"
        return Command(log, {**self.environment, **(environment or {})}, name, *arguments, executed=executed)

    def run(self, name: str, *arguments: object) -> Finished:
        """Run a command to its end."""
        with self.start(name, *arguments) as command:
            return command.finish()

    def succeed(self, name: str, *arguments: object) -> str:
        """Run a command that must end with code 0; returns its output."""
        finished = self.run(name, *arguments)
        assert finished.code == 0, finished.output
        return finished.output


@contextlib.contextmanager
def forking_commands(*, vllm: bool = False) -> Iterator[dict[str, str]]:
    """Let this thread fork what it starts of Cairn, also `python -c`; gives the environment of commands.

    vllm: what it starts imports vLLM, too.
    """
    with fork_server.forking(_fork_server_with_vllm() if vllm else _fork_server()):
        yield environment_of_commands()


def run_python(
    *arguments: object, environment: Mapping[str, str] | None = None, vllm: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a script or a piece of code in the repository's root, as commands run; it imports `cairn`.

    Args:
        environment: goes over that of commands.
        vllm: it imports vLLM, too.
    """
    with forking_commands(vllm=vllm) as variables:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=REPOSITORY,
            env={**variables, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def environment_of_commands(ours: Mapping[str, str] = AT_FIRST) -> dict[str, str]:
    """What commands have in their environment, but for their cache folder; `ours` is that of pytest."""
    environment = {
        **ours,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(vllm_cache(ours)),
        # For environments that tests bring along.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), ours.get("PYTHONPATH")])),
    }
    environment.pop("CAIRN_INFERENCE_TOKEN", None)
    return environment


def vllm_cache(ours: Mapping[str, str] = os.environ) -> Path:
    """Where vLLM notes what it knows of its model classes: without it, a server takes ten seconds longer.

    It is the user's own also where commands have another cache folder.
    """
    home = Path(ours.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(ours.get("VLLM_CACHE_ROOT") or home / "vllm")


# What a run leaves behind


forkable = multiprocessing.get_context("forkserver")
"""Starts processes as forks of one that has imported torch, transformers and Cairn, which takes seconds."""
forkable.set_forkserver_preload(
    [
        *("toy", "cairn.trainer.models.model", "cairn.tools.ckpt_formats"),
        *("cairn.formats.dcp.dcp_writer", "cairn.formats.huggingface.hf_trainer_writer"),
        *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
        *("cairn.orchestrator.loop", "transformers.models.auto.tokenization_auto"),
    ]
)


_one_thread = threading.Lock()


def ensure_forkserver() -> None:
    """Start that process, where it finds the modules of our tests; it is a fork, too."""
    here = Path(__file__).parent
    with _one_thread, _as_a_command(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", fork_server.spawning(_fork_server()))
        patch.setenv("PYTHONPATH", str(here / "faults"), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(here), prepend=os.pathsep)
        patch.setenv("PYTHONFAULTHANDLER", "1")  # a rank that crashes says where, in what pytest captures
        forkserver.ensure_running()


@contextlib.contextmanager
def forked(
    function: Callable[..., object], *arguments: object
) -> Generator[multiprocessing.process.BaseProcess]:
    """A process of `forkable` that calls a function, and does not outlive the block.

    Whoever starts a process also looks at all others that are listed, with those of other threads. But the
    server tells an exit code once: of two threads that look at the same time, one finds none, and then it is
    255. So none is listed.
    """
    ensure_forkserver()
    started = forkable.Process(target=function, args=arguments)
    with _one_thread:
        started.start()
        multiprocessing.process._children.discard(started)
    try:
        yield started
    finally:
        started.kill()
        started.join()


def start_ranks(
    function: Callable[..., None], *arguments: object, world_size: int
) -> torch.multiprocessing.ProcessContext:
    """Start `function(rank, *arguments)` in a process for each rank."""
    ensure_forkserver()
    return torch.multiprocessing.start_processes(
        function, arguments, nprocs=world_size, join=False, start_method="forkserver"
    )


def join(rank: int, world_size: int, port: int, **how: Any) -> RankGroup:
    """The group, in a process that `start_ranks` has started.

    A process may join several, laid out in other ways: PyTorch must not compute with meshes of those before
    that are equal to parts of this one's, since it finds their process groups by number.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # only where ranks are

    _clear_sharding_prop_cache()
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()} | {"GLOO_SOCKET_IFNAME": "lo"})
    return RankGroup.join(threads=1, **{"deterministic": False, **how})


def priority_of(pid: int) -> set[tuple[int, int, int]]:
    """Niceness and scheduling policy of each thread of a process, with the niceness of its session.

    The session has none where Linux has no autogroups; then it counts as what it would be.
    """
    threads = set()
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            threads.add((os.getpriority(os.PRIO_PROCESS, int(name)), os.sched_getscheduler(int(name))))
    with contextlib.suppress(OSError):
        if words := Path(f"/proc/{pid}/autogroup").read_text().split():
            return {(nice, policy, int(words[-1])) for nice, policy in threads}
    return {(nice, policy, 19 if policy == os.SCHED_BATCH else 0) for nice, policy in threads}


def environment_of(pid: int) -> list[bytes]:
    """What process `pid` was started with, as `NAME=value`; the kernel shows it a moment after its execve."""
    end = time.monotonic() + DEADLINE
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()) and time.monotonic() < end:
        time.sleep(0.01)
    return environment.split(b"\0")


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl so far; a last line that is still being written is left out."""
    path = run / "metrics.jsonl"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return []
    return list(_rows(path, (found.st_ino, found.st_size, found.st_mtime_ns)))


@functools.lru_cache(maxsize=4)
def _rows(path: Path, _: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Read once as long as the file is the same: tests look a hundred times a second."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def whole_rows(run: Path, last: int) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, which must hold every step from 1 to `last` once."""
    found = rows(run)
    assert [row["step"] for row in found] == list(range(1, last + 1))
    return found


def untimed(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without metrics that differ from run to run: times, and recomputed steps."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("time/", "run/", "servers/", "weights/"))
        }
        for row in found
    ]


def printed(output: str) -> Any:
    """The JSON at the end of a command's output, below what it has said of its progress."""
    return json.loads(output[output.index("\n{") if "\n{" in output else 0 :])


def step_folder(run: Path, step: int) -> Path:
    """Where a checkpoint lies."""
    return run / "checkpoints" / f"step_{step}"


def steps(run: Path) -> list[int]:
    """The checkpoints that exist: those with a manifest."""
    found = (run / "checkpoints").glob("step_*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step_")) for path in found)


def as_of(step: int, run: Path, copy: Path) -> Path:
    """A copy of a run as it was when `step`, which it has saved, was its newest step."""
    shutil.copytree(run, copy)
    for later in steps(copy):
        if later > step:
            shutil.rmtree(step_folder(copy, later))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:step]))
    return copy


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Damage a file: flip bits of one byte; a second call restores it."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights by name below model/, optimiser state below trainer/."""
    return {
        f"{part}/{name}": tensor
        for part in ("model", "trainer")
        for file in sorted((step / part).glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_published(recipe: str, stage: str, run: Path) -> None:
    """A run with the settings of a recipe's stage for seed 0 has the losses that the recipe has published.

    To the bit where processor and versions are those of the results; elsewhere the first steps, to rounding.
    """
    sys.path.append(str(REPOSITORY / "scripts"))
    from recipe import RecipeRun

    same, said = RecipeRun(REPOSITORY / recipe, {}).compare(stage, 0, rows(run))
    assert same, said


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """The same tensors by name, type and shape, bit for bit."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape), name
        assert tensor.numpy().tobytes() == b[name].numpy().tobytes(), name


# What tests share


@dataclass(frozen=True)
class Server:
    """The long-lived inference server."""

    url: str
    token: str
    command: Command

    def ask(self, job: Callable[[InferenceClient], Coroutine[Any, Any, T]]) -> T:
        """The result of `job`, called with a client of the server."""

        async def main() -> T:
            async with InferenceClient(self.url, self.token) as client:
                return await job(client)

        return asyncio.run(main())


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """For commands that share a cache folder."""
    return Shell(tmp_path_factory.mktemp("shell"))


@pytest.fixture(scope="session")
def running_server(shell: Shell) -> Iterator[tuple[str, Command]]:
    """The `inference` command, started but not waited for: its address and process."""
    port = free_port()
    with shell.start("inference", "@", f"{CONFIGS}/infer.toml", "--port", port) as command:
        yield f"http://127.0.0.1:{port}", command
        command.process.send_signal(signal.SIGINT)
        assert command.finish(30).code == 0, command.output


@pytest.fixture(scope="session")
def trained(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sft.toml as it is, with checkpoints at 100 and 200. Tests must not change it.

    The first pytest process that needs it makes it for all of them.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run, done = folder / "trained" / "run", folder / "trained" / "done"
    with open(folder / "trained.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not done.exists():
            shutil.rmtree(run, ignore_errors=True)
            arguments = ("@", f"{CONFIGS}/sft.toml", "--ckpt.interval", 100, "--output-dir", run)
            shell.succeed("sft", *arguments)
            done.touch()
    return run


@pytest.fixture(scope="session")
def server(running_server: tuple[str, Command], trained: Path, shell: Shell) -> Server:
    """The server, ready. It starts while the model is trained. Tests may leave any weights in it."""
    url, command = running_server
    command.wait_until(lambda: f"inference ready at {url}" in command.output)
    token = read(shell.cache / "cairn" / "servers" / token_file(url).name)["token"]
    return Server(url, token, command)
