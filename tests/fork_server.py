"""Starts our commands, their roles and ranks as forks of a process that has imported what they need.

Importing torch and transformers takes most of the processor time of a short run, in each of its processes.
In tests, commands are forked instead, and so are those of their processes that `FORKED` names. What runs then
is the same code in a process with the same parent, session, files, signal mask and environment. A process is
executed as ever if its environment has another value that is read at import, if it is at a terminal, or with
CAIRN_TESTS_EXEC=1.

A command that starts vLLM is forked of a process that has imported vLLM, too. Then the server is forked with
its keeper, and so is its engine, which vLLM has `multiprocessing` spawn.

A process that starts others has a server of its own, which is its child. It asks the server through a socket;
the server forks twice, and the new process becomes a child of the asking one, a subreaper at that moment. A
raylet starts its workers by a command line, which has the server of its driver fork them (`_ask`).

With pytest-xdist, pytest's processes are such forks themselves, and each has its own server from the start.
"""

import _posixsubprocess
import array
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.util
import io
import multiprocessing.util
import os
import pickle
import pkgutil
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

HERE = Path(__file__).resolve()
PRELOADED = ("torch", "transformers", "pyarrow.parquet", "transformers.models.qwen3.modeling_qwen3")
"""The last is the model of configs/reverse_text."""
NOT_PRELOADED = re.compile(r"^(?:while |[\w.]+\(|import vllm|from vllm)", re.MULTILINE)
"""What the modules of ours have in them that do something when they are imported, or import vLLM."""
IMPORTS_OURS = re.compile(r"(?:from|import) cairn\b")
PREFLIGHT = "launch.plan.preflight"
WITHOUT_TORCH = ("transformers.models.auto.tokenization_auto", "awscrt.checksums")
"""What preflight needs beside our modules. It must not have torch, and then transformers is another one."""
WRITER = "checkpoint.saving.writer"
OF_LAUNCH = ("launch.roles", "launch.branches.process", "launch.ray.worker_process")
FORKED = (*OF_LAUNCH, "inference.supervised", "service.helper_process", PREFLIGHT, WRITER)
"""Modules of ours that are forked if they run as `python -m`."""
AT_ANY_TIME = (
    *("PATH", "UV_", "CAIRN_", "RAY_", "XDG_CACHE_HOME", "PYTEST_", "WANDB_", "AWS_", "TMPDIR", "SLURM_"),
    *("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_", "HF_DATASETS_CACHE", "TORCHINDUCTOR_CACHE_DIR"),
    *("HOME", "PYTHONPATH", "PYTHONFAULTHANDLER", "CUBLAS_"),
)
"""The beginnings of variables that are not read, once and for all, when modules are imported: in HOME
libraries look for caches, which are in XDG_CACHE_HOME here, and LATER sees to Python's own."""
OF_A_RANK = ("SPT_NOENV", "PYTHONBREAKPOINT", "PYTORCH_ALLOC_CONF", "GOMP_", "OMP_NUM_THREADS")
"""What Ray and our worker set for ranks; to the writers that ranks start it is nothing."""
KEEPER = HERE.parents[1] / "src" / "run" / "keeper.py"
OF_PYTEST = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""The arguments with which pytest-xdist starts pytest's processes."""
FORKSERVER = "from multiprocessing.forkserver import main;"
"""How the code begins of the process by which `multiprocessing` forks others."""
VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"
VLLM_REGISTRY = "vllm.model_executor.models.registry"
"""By this a server looks at a model's class, if vLLM has not noted what it found of it."""
SERVES = HERE.with_name("integration") / "serve_families.py"
VLLM_PRELOADED = (VLLM_SERVER, "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TITLE_BYTES = 4096
MOST_FILES = 64

own: "ForkServer | None" = None
"""The server of this process, if it is a process of pytest's and a fork."""

_libc = ctypes.CDLL(None)
_execute: Callable[..., int] = _posixsubprocess.fork_exec
_environment: dict[str, str] = {}
"""What modules have been imported with."""
_taken_over: dict[str, str] = {}
"""Values of LATER's variables that a process further up has taken over, or this one."""
_without_torch: dict[str, ModuleType] = {}
"""All modules as they were before torch was imported."""
_all_modules: dict[str, ModuleType] = {}
"""Modules that `_forget_torch` has put away; without a reference they would be taken apart."""
_set_by_vllm: dict[str, str] = {}
"""What vLLM has set in the environment when it was imported."""


class ForkServer:
    """The asking side. `name` is the address at which a raylet's workers ask."""

    def __init__(
        self, connection: socket.socket, name: str, environment: dict[str, str], *, has_vllm: bool = False
    ):
        self._connection = connection
        self._one_thread = threading.Lock()
        self.name = name
        self.environment = environment
        self.has_vllm = has_vllm

    def takes(self, program: Sequence[str], environment: dict[str, str], files: Sequence[int]) -> bool:
        """Whether to fork a program rather than to execute it."""
        if os.environ.get("CAIRN_TESTS_EXEC") or Path(program[0]).parent != Path(sys.executable).parent:
            return False
        if program[1:] == OF_PYTEST:  # what differs in its environment it adds by itself, and sends on
            return True
        if any(os.isatty(file) for file in files):
            return False
        names = {name for name, value in environment.items() if self.environment.get(name) != value}
        names |= self.environment.keys() - environment.keys()
        if _is_vllm(program):
            # A server that compiles reads more when it imports torch. What a server sets for its engine comes
            # too late for its own torch as well, and vLLM forks engines where it may.
            as_well = (*AT_ANY_TIME, "VLLM_", *LATER)
            within = _spawned(program) or program[1:3] == ["-m", VLLM_REGISTRY]
            in_time = within or all(name.startswith(as_well) for name in names)
            return self.has_vllm and environment.get("TORCHDYNAMO_DISABLE") == "1" and in_time
        is_writer = program[1:3] == ["-m", f"cairn.{WRITER}"]
        if not all(name.startswith((*AT_ANY_TIME, *(OF_A_RANK if is_writer else ()))) for name in names):
            return False
        if "PYTHONPATH" in names and _shadows(environment.get("PYTHONPATH", "")):
            return False
        if program[1:3] == ["-I", "-S"]:
            return _is_command(Path(_kept(program)[0]))
        if program[1:2] == ["-m"] and len(program) > 2:
            return program[2].removeprefix("cairn.") in FORKED
        if program[1:2] == ["-c"]:
            return bool(IMPORTS_OURS.search(program[2])) or _is_forkserver(program)
        return program[1:2] == [str(HERE)] or _is_script(program) or _is_command(Path(program[0]))

    def start(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Have a child of this process forked; returns its process id."""
        before = ctypes.c_int()
        with self._one_thread:
            _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                _send(self._connection, request, files)
                return struct.unpack("i", _receive_exactly(self._connection, 4))[0]
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


class HelperServer:
    """The asking side of a process of pytest's, for the helpers that the code under test starts there.

    start_server: is called for the first of them. environment: that process's; commands have variables beside
    these, which make no difference to helpers. by_imports: what modules have set there when tests imported
    them, as vLLM's do, which helpers do not import.
    """

    name = ""

    def __init__(
        self,
        start_server: Callable[[], ForkServer],
        environment: dict[str, str],
        by_imports: Mapping[str, str],
    ):
        self._start_server = start_server
        self._environment = environment
        self._by_imports = by_imports

    def takes(self, program: Sequence[str], environment: dict[str, str], files: Sequence[int]) -> bool:
        """Only helpers: tests that start another program themselves have their reasons."""
        if program[1:2] != ["-m"] or program[2].removeprefix("cairn.") not in (PREFLIGHT, WRITER):
            return False
        server = self._start_server()
        set_by_imports = {name for name, value in environment.items() if self._by_imports.get(name) == value}
        at_first = {name: self._environment[name] for name in set_by_imports & self._environment.keys()}
        environment = {n: value for n, value in environment.items() if n not in set_by_imports} | at_first
        for name in server.environment.keys() - self._environment.keys():
            environment = {name: server.environment[name], **environment}
        for name, value in self._environment.items():
            if environment.get(name) == value and name in server.environment:
                environment = {**environment, name: server.environment[name]}
        return server.takes(program, environment, files)

    def start(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """As a fork server does, but returns when the process has its name: as after an exec."""
        pid = self._start_server().start(request, files)
        name = os.fsencode(request["program"][2])
        with contextlib.suppress(OSError):  # it has ended
            while (shown := Path(f"/proc/{pid}/cmdline").read_bytes()) and name not in shown:
                time.sleep(0.002)
        return pid


def _shadows(folders: str) -> bool:
    """Whether these have a module in the place of another one, which a server may have imported already."""
    for folder in (Path(name).resolve() for name in folders.split(os.pathsep) if name):
        names = {path.stem for path in folder.glob("*.py")}
        names |= {path.parent.name for path in folder.glob("*/__init__.py")}
        found = [importlib.util.find_spec(name) for name in names - {"__init__", "__main__"}]
        origins = [Path(one.origin).resolve() for one in found if one and one.origin]
        if not all(origin.is_relative_to(folder) for origin in origins):
            return True
    return False


def _is_command(program: Path) -> bool:
    try:
        return program.name != "python" and "from cairn." in program.read_text()
    except (OSError, UnicodeDecodeError):
        return False


def _is_script(program: Sequence[str]) -> bool:
    """A test's own program, or one that a test has written, such as a block of the documentation."""
    if not program[1:] or not program[1].endswith(".py"):
        return False
    path, repository = Path(program[1]), HERE.parents[1]
    return path.is_absolute() and (path.is_relative_to(HERE.parent) or not path.is_relative_to(repository))


def _kept(program: Sequence[str]) -> Sequence[str]:
    """What a keeper keeps, after a descriptor and what becomes of SIGTERM; other programs as they are."""
    if program[1:3] == ["-I", "-S"] and Path(program[3]).resolve() == KEEPER:  # also through the link cairn
        return program[6:]
    return program


def _is_vllm(program: Sequence[str]) -> bool:
    """A server of vLLM's, with or without its keeper, or what that starts: the engine, a look at a class.

    And a test's own program that serves families one after the other.
    """
    program = _kept(program)
    servers = (["-m", VLLM_SERVER], ["-m", VLLM_REGISTRY])
    return program[1:3] in servers or program[1:2] == [str(SERVES)] or _spawned(program)


def _spawned(program: Sequence[str]) -> bool:
    return program[-1] == "--multiprocessing-fork" and "spawn_main" in program[-2]


def _is_forkserver(program: Sequence[str]) -> bool:
    return program[1:2] == ["-c"] and program[2].startswith(FORKSERVER)


def launch(environment: dict[str, str], cwd: Path, of: ForkServer | None = None) -> ForkServer:
    """Start a server for this process, which imports everything; returns when it has.

    of: another server of this process. The new one is its fork, and has imported vLLM as well.
    """
    here, there = socket.socketpair()
    command = [sys.executable, str(HERE), str(there.fileno()), str(os.getpid()), " " * TITLE_BYTES]
    with there, forking(of):
        subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()]
        )
    name = _receive_exactly(here, 64).decode().strip()
    return ForkServer(here, name, environment, has_vllm=of is not None)


def through(server: "ForkServer | HelperServer") -> Callable[..., int]:
    """A function to replace the one with which `subprocess` executes programs."""

    def fork(
        arguments: Sequence[Any],
        executables: Any,
        close_fds: bool,
        keep: Sequence[int],
        cwd: Any,
        variables: Sequence[bytes] | None,
        *rest: Any,
    ) -> int:
        (stdin, _, _, stdout, _, stderr, _, errors, _, new_session, group, *_, preexec, _) = rest
        program = [os.fsdecode(argument) for argument in arguments]
        if variables is None:
            environment = dict(os.environ)
        else:
            decoded = (os.fsdecode(variable).partition("=") for variable in variables)
            environment = {name: value for name, _, value in decoded}
        streams = [default if file == -1 else file for default, file in enumerate((stdin, stdout, stderr))]
        if group != -1 or not server.takes(program, environment, streams):
            if server.name:
                arguments = [
                    re.sub(
                        rb"^(--python_worker_command=\S+) (?=-m )",
                        rb"\1 -I -S " + os.fsencode(HERE) + b" " + server.name.encode() + b" ",
                        os.fsencode(argument),
                    )
                    for argument in arguments
                ]
            return _execute(arguments, executables, close_fds, keep, cwd, variables, *rest)
        kept = [file for file in keep if file != errors]
        request = {
            **{"program": program, "environment": environment, "cwd": os.fsdecode(cwd or os.getcwd())},
            **{"files": [0, 1, 2, *kept], "new_session": new_session, "preexec": pickle.dumps(preexec)},
            **{"main": getattr(sys.modules["__main__"], "__file__", None)},
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        }
        return server.start(request, [*streams, *kept])

    return fork


def spawning(server: ForkServer) -> Callable[[str, Sequence[Any], Sequence[Any]], int]:
    """A function to replace the one with which `multiprocessing` spawns processes."""
    execute = multiprocessing.util.spawnv_passfds

    def spawn(path: Any, arguments: Sequence[Any], keep: Sequence[Any]) -> int:
        program = [os.fsdecode(argument) for argument in arguments]
        kept = sorted(map(int, keep))
        environment = dict(os.environ)
        forked = _spawned(program) or _is_forkserver(program)
        if not forked or not server.takes(program, environment, [0, 1, 2]):
            return execute(path, arguments, keep)
        request = {
            **{"program": program, "environment": environment, "cwd": os.getcwd()},
            **{"files": [0, 1, 2, *kept], "new_session": False, "preexec": pickle.dumps(None)},
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        }
        return server.start(request, [0, 1, 2, *kept])

    return spawn


class _Instead(BaseException):
    """This process is to be another program; unwinds what it was."""

    def __init__(self, program: list[str]):
        self.program = program


def executing(server: ForkServer) -> Callable[[str, Sequence[Any]], NoReturn]:
    """A function to replace `os.execv` in a process that is a fork.

    It has imported what the other program needs, so it becomes that by itself, as what starts with a program
    that sees to its signals, and then executes a command.
    """
    execute = os.execv

    def become_another(path: str, arguments: Sequence[Any]) -> NoReturn:
        program = [path, *map(os.fsdecode, arguments[1:])]
        if threading.current_thread() is threading.main_thread() and server.takes(
            program, dict(os.environ), [0, 1, 2]
        ):
            raise _Instead(program)
        execute(path, arguments)

    return become_another


class _Chosen(threading.local):
    """What the processes that this thread starts are started by."""

    execute: Callable[..., int] = staticmethod(_execute)


_chosen = _Chosen()


@contextlib.contextmanager
def forking(server: "ForkServer | HelperServer | None") -> Generator[None]:
    """While it lasts, `subprocess` forks in this thread what the server takes."""
    subprocess._fork_exec = lambda *arguments: _chosen.execute(*arguments)  # pyright: ignore[reportAttributeAccessIssue]
    before = _chosen.execute
    _chosen.execute = _execute if server is None else through(server)
    try:
        yield
    finally:
        _chosen.execute = before


# Messages


def _send(connection: socket.socket, request: dict[str, Any], files: Sequence[int]) -> None:
    message = pickle.dumps(request)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    connection.sendmsg([struct.pack("i", len(message))], rights)
    connection.sendall(message)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """None if the other side is gone."""
    files = array.array("i")
    room = socket.CMSG_SPACE(MOST_FILES * files.itemsize)
    head, rights, _, _ = connection.recvmsg(4, room)
    if not head:
        return None
    for _, _, content in rights:
        files.frombytes(content[: len(content) - len(content) % files.itemsize])
    length = struct.unpack("i", head + _receive_exactly(connection, 4 - len(head)))[0]
    return pickle.loads(_receive_exactly(connection, length)), list(files)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        more = connection.recv(length - len(content))
        if not more:
            raise EOFError("the process that forks others is gone")
        content += more
    return content


def begin(parent: int) -> None:
    """In a new process: die with the test, and handle signals even under nohup or `&`."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class _Functions(pickle.Unpickler):
    """Reads what names functions, among them those of the program that the sender runs as `__main__`."""

    def __init__(self, content: bytes, main: str | None):
        super().__init__(io.BytesIO(content))
        self._main = main

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "__main__" and self._main is not None:
            return runpy.run_path(self._main)[global_name]
        return super().find_class(module_name, global_name)


def _ask(name: str, program: list[str]) -> None:
    """In the place of a worker of a raylet's: have it forked."""
    request = {
        **{"program": [sys.executable, *program], "environment": dict(os.environ), "cwd": os.getcwd()},
        **{"files": [0, 1, 2], "new_session": False, "preexec": pickle.dumps(None)},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        _send(connection, request, (0, 1, 2))
        _receive_exactly(connection, 4)


# The server


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork as long as the owner lives. In a new process, return what it was asked to be."""
    listener = socket.socket(socket.AF_UNIX)
    name = f"cairn-tests-{os.getpid()}-{os.urandom(4).hex()}"
    listener.bind(f"\0{name}")
    listener.listen(16)
    connection.sendall(name.ljust(64).encode())
    # A stop signal for all is nothing to this process, and waits in a new one until that is what it will be.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        ready, _, _ = select.select([connection, listener], [], [])
        if listener in ready:
            asking, _ = listener.accept()
            with contextlib.suppress(EOFError), asking:
                asked = _receive(asking)
                if asked and _fork(asking, asked, orphan=False):
                    connection.detach()
                    return asked
            continue
        asked = _receive(connection)
        if asked is None:
            os._exit(0)
        if _fork(connection, asked, orphan=True):
            connection.detach()
            return asked


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork(connection: socket.socket, asked: tuple[dict[str, Any], list[int]], *, orphan: bool) -> bool:
    """Fork, and answer with the process id; returns whether this is the new process.

    orphan: it becomes a child of the nearest subreaper above this process.
    """
    go, going = os.pipe()
    found, finding = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    parent = os.fork()
    if parent == 0:
        pid = os.fork() if orphan else 0
        if pid:
            os.write(finding, struct.pack("i", pid))
            os._exit(0)
        os.close(going)
        os.read(go, 1)  # until its parent is the one that it stays with
        return True
    os.close(finding)
    pid = struct.unpack("i", os.read(found, 4))[0] if orphan else parent
    if orphan:
        os.waitpid(parent, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for file in (go, going, found, *asked[1]):
        os.close(file)
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("i", pid))
    return False


def become(request: dict[str, Any], files: list[int]) -> None:
    """Make this process what it would be, had it been executed."""
    high = [_above(file) for file in files]
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number, inheritable=True)
    _close_all_but(request["files"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    for name, take_over in LATER.items():
        before = _taken_over.get(name, _environment.get(name))
        if (value := os.environ.get(name)) != before and value is not None:
            take_over(value)
            _taken_over[name] = value
    if request["new_session"]:
        os.setsid()
    if preexec := _Functions(request["preexec"], request.get("main")).load():
        preexec()
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _show_as(request["program"])


def _use_threads(number: str) -> None:
    import torch

    torch.set_num_threads(int(number))


def _disable_compilation(value: str) -> None:
    import torch._dynamo.config

    torch._dynamo.config.disable = value == "1"


def _show_crashes(_: str) -> None:
    faulthandler.enable()


def _look_in(folders: str) -> None:
    """Modules that are imported already stay what they are."""
    new = [os.path.abspath(folder) for folder in folders.split(os.pathsep) if folder]
    before = _taken_over.get("PYTHONPATH", _environment.get("PYTHONPATH", ""))
    old = {*new, *map(os.path.abspath, filter(None, before.split(os.pathsep)))}
    sys.path[1:] = [*new, *(folder for folder in sys.path[1:] if folder not in old)]


def _set_in_malloc(parameter: int) -> Callable[[str], object]:
    return lambda value: _libc.mallopt(parameter, int(value))


LATER = {
    "MALLOC_ARENA_MAX": _set_in_malloc(-8),
    "MALLOC_TRIM_THRESHOLD_": _set_in_malloc(-1),
    "MALLOC_MMAP_THRESHOLD_": _set_in_malloc(-3),
    "OMP_NUM_THREADS": _use_threads,
    "TORCHDYNAMO_DISABLE": _disable_compilation,
    "PYTHONPATH": _look_in,
    "PYTHONFAULTHANDLER": _show_crashes,
}
"""Variables that are read when Python starts or imports torch, and what has the same effect afterwards."""


def _above(file: int) -> int:
    return fcntl.fcntl(file, fcntl.F_DUPFD, 1000)


def _show_as(program: list[str]) -> None:
    """Let /proc/PID/cmdline show a program, in the memory that `launch` has reserved for that."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, program)) + b"\0"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown[: end - start - 1], min(len(shown), end - start - 1))


def run(request: dict[str, Any]) -> None:
    """Run the program, and whatever it executes in its place."""
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    left = [request["program"]]
    while left:
        try:
            _run(left.pop())
        except _Instead as instead:
            left.append(instead.program)
            _show_as(instead.program)


def _run(program: list[str]) -> None:
    """Run the program, as Python does."""
    if program[1:2] == [str(HERE)]:  # by `launch`, with vLLM
        _serve_after(preload_vllm, int(program[2]), int(program[3]))
        return
    if program[1:3] == ["-m", VLLM_SERVER]:
        os.environ.update(_set_by_vllm)
    if program[1:3] == ["-m", f"cairn.{PREFLIGHT}"]:
        _forget_torch()
    if program[1:2] == ["-m"]:
        sys.argv, sys.path[0] = program[2:], os.getcwd()
        sys.modules.pop(program[2], None)  # of a module that is imported already, runpy warns
        runpy.run_module(program[2], run_name="__main__", alter_sys=True)
    elif program[1:2] == ["-c"] or program[1:] == OF_PYTEST or _spawned(program):
        at = program.index("-c")
        sys.argv, sys.path[0] = program[at : at + 1] + program[at + 2 :], ""
        exec(program[at + 1], {"__name__": "__main__"})
    else:
        if program[0] == sys.executable:
            program = program[3:] if program[1:3] == ["-I", "-S"] else program[1:]
        sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


def _forget_torch() -> None:
    """Let this process have the modules of one that has not imported torch; the others stay in its memory."""
    global _all_modules
    _all_modules = dict(sys.modules)
    for name in _all_modules.keys() - _without_torch.keys():
        del sys.modules[name]
    sys.modules.update(_without_torch)


def own_server(request: dict[str, Any]) -> dict[str, Any]:
    """Give this process, a new one, a server of its own. Returns its request, or in what that forks, theirs.

    A process of pytest's chooses what the server forks; in others it is all that the server takes.
    """
    here, there = socket.socketpair()
    parent = os.getpid()
    if os.fork():
        there.close()
        name = _receive_exactly(here, 64).decode().strip()
        if request["program"][1:] == OF_PYTEST:
            module = importlib.import_module(HERE.stem)  # which tests import; this one is `__main__`
            module.own = module.ForkServer(here, name, _environment)
            return request
        server = ForkServer(here, name, _environment, has_vllm=bool(_set_by_vllm))
        subprocess._fork_exec = through(server)  # pyright: ignore[reportAttributeAccessIssue]
        os.execv = executing(server)
        if server.has_vllm:
            multiprocessing.util.spawnv_passfds = spawning(server)  # pyright: ignore[reportAttributeAccessIssue]
        return request
    here.close()
    _only(there, parent)
    return _new_process(*serve(there))


def _only(connection: socket.socket, owner: int) -> None:
    """In a server: die with the owner, and keep nothing of its open but the connection."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    _close_all_but([0, 1, 2, connection.fileno()])


def _close_all_but(files: Sequence[int]) -> None:
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in files:
            with contextlib.suppress(OSError):  # the one of the listing
                os.close(file)


def _new_process(request: dict[str, Any], files: list[int]) -> dict[str, Any]:
    become(request, files)
    if request["program"][1:2] == [str(HERE)]:  # it closes all files of this process, and is itself a server
        return request
    if request["program"][1:3] == ["-m", f"cairn.{WRITER}"]:  # it starts nothing
        return request
    if _is_forkserver(request["program"]):  # what it forks could not share a server
        return request
    return own_server(request)


@contextlib.contextmanager
def _absent(*names: str) -> Generator[None]:
    """Let imports of these modules fail."""
    sys.modules.update(dict.fromkeys(names))  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def preload() -> None:
    """Import what most processes need, but not Ray, which reads its variables when it is imported."""
    importlib.import_module(HERE.stem)
    with _absent("torch", "transformers", "ray"):
        _import_ours()
    with _absent("torch"):
        for name in WITHOUT_TORCH:
            importlib.import_module(name)
    _without_torch.update(sys.modules)
    del _without_torch[f"cairn.{PREFLIGHT}"]  # it is run as a script
    for name in _without_torch:
        if name.partition(".")[0] == "transformers":
            del sys.modules[name]
    for name in PRELOADED:
        importlib.import_module(name)
    # A table of all families, which each process makes when it first needs it: half of a short run's rank.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
    with _absent("ray"):
        _import_ours()


def _import_ours() -> None:
    import cairn

    for module in pkgutil.walk_packages(cairn.__path__, "cairn."):
        found = importlib.util.find_spec(module.name)
        if found and found.origin and not NOT_PRELOADED.search(Path(found.origin).read_text()):
            with contextlib.suppress(Exception):  # it is imported where it is used, and fails there
                importlib.import_module(module.name)


def preload_vllm() -> None:
    """Import what a server of vLLM's needs, which imports Ray where it can."""
    before = dict(os.environ)
    with _absent("ray"):
        for name in VLLM_PRELOADED:
            importlib.import_module(name)
    _set_by_vllm.update((name, value) for name, value in os.environ.items() if before.get(name) != value)


def main() -> None:
    """As a script: the server of a process of pytest's, or a raylet's worker that is still to be forked."""
    if not sys.argv[1].isdecimal():
        _ask(sys.argv[1], sys.argv[2:])
        return
    _environment.update(os.environ)
    code = 0
    try:
        _serve_after(preload, int(sys.argv[1]), int(sys.argv[2]))
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # Python prints it
        code = end.code or 0
    _end(code)


def _serve_after(import_all: Callable[[], None], connected: int, owner: int) -> None:
    """Be a server. In a new process: run what it was asked to be."""
    connection = socket.socket(fileno=connected)
    _only(connection, owner)
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all that it looks at
    run(_new_process(*serve(connection)))


def _end(code: int) -> NoReturn:
    """End as Python does, but leave all objects where they are: to take them apart copies their memory."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for threads that are none's daemon
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
