"""Requests to stop, as people, terminals and schedulers send them: none costs a step that was finished."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import draws
import psutil
import pytest
from runs import CONFIGS, Command, Finished, Shell, read, rows, steps, whole_rows

from cairn.run.connections import free_port
from cairn.run.directory import RunDirectory
from cairn.run.signals import REPEAT_SECONDS

pytestmark = pytest.mark.timeout(900)

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
QUICK = ("--seq-len", 32, "--micro-batch-size", 2, "--data.batch-size", 8)
SFT = ("sft", "@", f"{CONFIGS}/sft.toml", *QUICK)
FOREVER = 100_000

# A command in a terminal of its own: SIGUSR1 presses Ctrl-C, SIGUSR2 closes the terminal.
IN_A_TERMINAL = """
import os, pty, signal, sys
child, terminal = pty.fork()
if child == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda *_: os.write(terminal, b"\\x03"))
signal.signal(signal.SIGUSR2, lambda *_: os.close(terminal))
while True:
    try:
        sys.stdout.buffer.write(os.read(terminal, 4096))
        sys.stdout.flush()
    except OSError:
        break
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
WRAPPERS = {
    "": (),
    "uv run": ("uv", "run", "--no-sync"),
    "timeout": ("timeout", "600"),
    "terminal": (sys.executable, "-c", IN_A_TERMINAL),
    "uv run in a terminal": (sys.executable, "-c", IN_A_TERMINAL, "uv", "run", "--no-sync"),
    "batch script": ("bash", "-c", '"$@"; exit $?', "batch"),
    "nohup": ("nohup",),
}


@dataclass(frozen=True)
class Case:
    """How a run is started, and how it is asked to stop."""

    signal: signal.Signals
    to: str
    """launcher, group, all, "all but the script", or key: what a person does at the terminal."""
    through: str = ""
    run: str = "sft"
    """sft, sft on 2 ranks, or rl."""
    then: signal.Signals | None = None
    """Sent right after it to the same."""
    goes_on: bool = False
    """Whether the run is gone on with afterwards."""

    @property
    def name(self) -> str:
        """For the test's id and the run's folder."""
        then = f"+{self.then.name}" if self.then else ""
        words = f"{self.run} {self.signal.name}{then} to {self.to} {self.through}".split()
        return "_".join(words).lower()


SOAK = pytest.mark.soak
TO_A_BATCH_SCRIPT = Case(TERM, "all but the script", "batch script", "sft on 2 ranks", goes_on=True)
"""What Slurm does, to ranks; the run goes on."""
CASES = [
    *draws.cases(
        [
            Case(TERM, "group", "uv run"),
            Case(TERM, "launcher", "timeout"),
            Case(TERM, "all", then=HUP),
            TO_A_BATCH_SCRIPT,
            Case(HUP, "key", "terminal"),
            Case(INT, "key", "uv run in a terminal"),
            Case(HUP, "all", run="sft on 2 ranks"),
        ],
        __name__,
        1,
        always=[TO_A_BATCH_SCRIPT],
    ),
    *(  # tests/integration/test_rl.py has one of rl
        pytest.param(replace(case, goes_on=True), marks=SOAK)
        for case in [
            Case(INT, "launcher", "timeout"),
            Case(INT, "group", "uv run", "sft on 2 ranks"),
            Case(INT, "all"),
            Case(HUP, "group", "uv run"),
            Case(HUP, "launcher", run="sft on 2 ranks"),
            Case(HUP, "key", "uv run in a terminal"),
            Case(TERM, "all", "nohup"),
            Case(TERM, "all but the script", "batch script"),
            Case(INT, "key", "terminal", "rl"),
            Case(TERM, "all", run="rl"),
            Case(HUP, "all", run="rl", then=TERM),
            Case(TERM, "all but the script", "batch script", "rl"),
            Case(TERM, "group", "uv run", "rl"),
        ]
    ),
]


@dataclass
class Played:
    """What became of a case."""

    run: Path
    stopped: Finished
    steps_before: int
    stopped_at: int
    steps_then: list[int]
    resumed: Finished | None
    """None if it was not gone on with."""
    audit: str


def command_of(case: Case, run: Path, folder: Path) -> tuple[object, ...]:
    """The command line, but for how far it goes."""
    if case.run != "rl":
        workers = ("--workers", 2) if case.run == "sft on 2 ranks" else ()
        return (*SFT, *workers, "--output-dir", run)
    lines = (Path(CONFIGS) / "orch.toml").read_text().splitlines(keepends=True)
    orchestrator = folder / "orch.toml"
    orchestrator.write_text("".join(line for line in lines if not line.startswith("inference_url")))
    roles = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{orchestrator}")
    server = ("--inference", f"@{CONFIGS}/infer.toml", "--inference.port", free_port())
    return ("rl", *roles, *server, *draws.environment(case.name), "--output-dir", run)


def send(case: Case, command: Command) -> None:
    """Ask the run to stop."""
    family = [pid for pid, _ in command.family()]
    if case.to == "key":
        command.process.send_signal(signal.SIGUSR1 if case.signal == INT else signal.SIGUSR2)
        return
    numbers = [number for number in (case.signal, case.then) if number]
    if case.to == "launcher":
        for number in numbers:
            command.process.send_signal(number)
    elif case.to == "group":
        for number in numbers:
            os.killpg(command.process.pid, number)
    else:
        script = case.to == "all but the script"
        for pid in family if script else [command.process.pid, *family]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                for number in numbers:  # each process at once: later it would be a second request
                    os.kill(pid, number)


def play(case: Case, shell: Shell, folder: Path) -> Played:
    """Start a run, ask it to stop, and go on with it if the case says so."""
    folder.mkdir()
    run = folder / "run"
    arguments = command_of(case, run, folder)
    name, *wrapped = [*WRAPPERS[case.through], *map(str, arguments)]
    with shell.start(shutil.which(name) or name, *wrapped, "--max-steps", FOREVER, "--ckpt") as command:
        command.wait_until(lambda: len(rows(run)) >= 3)
        before = len(rows(run))
        send(case, command)
        stopped = command.finish(120)
        command.assert_nothing_survives()
    stopped_at, then = len(rows(run)), steps(run)
    resumed = None
    if case.goes_on:
        resumed = shell.run(*arguments, "--max-steps", stopped_at + 3, "--ckpt.resume", "auto")
    audit = shell.run("ckpt", "audit", run, "--json").output
    return Played(run, stopped, before, stopped_at, then, resumed, audit)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """With the virtual environment's commands on its path, as `timeout` and `uv run` need them."""
    shell = Shell(tmp_path_factory.mktemp("signals"))
    commands = str(Path(sys.executable).parent)
    shell.environment["PATH"] = os.pathsep.join([commands, os.environ["PATH"]])
    shell.environment["UV_OFFLINE"] = "1"
    return shell


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, shell: Shell, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future]]:
    """How each selected case went; two runs at a time, which must not get into each other's way."""
    folder = tmp_path_factory.mktemp("played")
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    cases = dict.fromkeys(param["case"] for param in params if "case" in param)
    with ThreadPoolExecutor(2) as pool:
        futures = {case: pool.submit(play, case, shell, folder / case.name) for case in cases}
        yield futures


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_to_stop_costs_nothing(case: Case, played: dict[Case, Future]):
    """Exit code 75, the last finished step is saved, nobody is left; a run that goes on has each step."""
    if "uv" in WRAPPERS[case.through] and not shutil.which("uv"):
        pytest.skip("needs uv")
    after: Played = played[case].result()
    assert after.stopped.code == 75, after.stopped.output
    assert after.stopped_at >= after.steps_before
    assert after.steps_then == [after.stopped_at], "every finished step is saved"
    if case.to != "key" or case.signal != HUP:  # then there is nobody to tell
        assert f"stopped at step {after.stopped_at}, saved in" in after.stopped.output
        after_request = after.stopped.output.partition("stopping at the next step boundary")[2]
        assert "started again" not in after_request
    if after.resumed:
        assert after.resumed.code == 0, after.resumed.output
    whole_rows(after.run, after.stopped_at + (3 if after.resumed else 0))
    assert '"ok": true' in after.audit


# Before the first step, in the last save, with a dead rank


def role_runs(run: Path, role: str) -> bool:
    """Whether roles.json says so."""
    path = run / "roles.json"
    return path.exists() and read(path)["roles"].get(role, {}).get("state") == "running"


@pytest.mark.parametrize("role", draws.cases(["trainer", "trainer_rank0"], "stopped before a step", 1))
def test_a_stop_before_the_first_step(shell: Shell, tmp_path: Path, role: str):
    """While Ray starts, or the worker imports torch: at once, and the same command starts again."""
    run = tmp_path / "run"
    arguments = (*SFT, "--ckpt", "--max-steps", 3, "--output-dir", run)
    with shell.start(*arguments) as command:
        command.wait_until(lambda: role_runs(run, role))
        if role == "trainer_rank0":  # else it may be in step 1 before the launcher hears of it
            os.kill(read(run / "roles.json")["roles"][role]["pid"], signal.SIGSTOP)
        command.process.send_signal(TERM)
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 75, finished.output
    assert "stopped before step 1: nothing is lost. The same command starts again" in finished.output
    assert (steps(run), rows(run)) == ([], []), "it stopped at once"
    if role == "trainer_rank0":
        assert "done: step 3" in shell.succeed(*arguments)


def test_a_stop_while_the_server_loads(shell: Shell, tmp_path: Path):
    """An RL run that nothing was generated for yet ends at once, with its server."""
    run = tmp_path / "run"
    arguments = command_of(Case(TERM, "launcher", run="rl"), run, tmp_path)
    with shell.start(*arguments, "--max-steps", 3, "--ckpt") as command:
        command.wait_until((run / "logs" / "vllm.log").exists)
        command.process.send_signal(HUP)
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 75, finished.output
    assert "stopped before step 1: nothing is lost" in finished.output
    assert "startup complete" not in (run / "logs" / "vllm.log").read_text(), "it waited for the server"


def writers(command: Command) -> list[int]:
    """The processes that write checkpoints."""
    found = []
    for pid, _ in command.family():
        with contextlib.suppress(psutil.Error):
            if "cairn.checkpoint.saving.writer" in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


def test_a_stop_during_the_final_save(shell: Shell, tmp_path: Path):
    """All steps are done: the run ends as if nobody had asked."""
    run = tmp_path / "run"
    once = ("--ckpt.interval", 1000)  # with an interval the writer is there from the first step on
    with shell.start(*SFT, *once, "--max-steps", 40, "--output-dir", run) as command:
        (writer,) = command.wait_until(lambda: writers(command))
        os.kill(writer, signal.SIGSTOP)
        command.wait_until(lambda: len(rows(run)) == 40)
        time.sleep(0.2)
        for number in (INT, TERM, HUP):  # one request, however often it is made
            command.process.send_signal(number)
        time.sleep(0.5)
        assert command.process.poll() is None
        os.kill(writer, signal.SIGCONT)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "done: step 40" in finished.output
    assert steps(run) == [40]


def test_nothing_is_started_again_once_a_stop_is_asked_for(shell: Shell, tmp_path: Path):
    """A worker dies before it can save: the run says what is lost, and does it again when it goes on."""
    run = tmp_path / "run"
    arguments = (*SFT, "--ckpt.interval", 5, "--output-dir", run)
    with shell.start(*arguments, "--max-steps", FOREVER) as command:
        command.wait_until(lambda: steps(run))
        (worker,) = command.workers()
        os.kill(worker, signal.SIGSTOP)
        command.process.send_signal(TERM)
        command.wait_until(RunDirectory(run).stop_requested)
        os.kill(worker, signal.SIGKILL)
        finished = command.finish()
        command.assert_nothing_survives()
    newest, last = steps(run)[-1], len(rows(run))
    assert finished.code == 75, finished.output
    assert "started again" not in finished.output
    if last > newest:
        assert f"step {last} could not be saved" in finished.output
        assert f"--ckpt.resume auto resumes from step {newest}" in finished.output
    shell.succeed(*arguments, "--max-steps", last + 1, "--ckpt.resume", "auto")
    whole_rows(run, last + 1)


def test_a_second_request_ends_at_once_but_not_before_two_seconds(shell: Shell, tmp_path: Path):
    """Also where a step does not come to its end."""
    run = tmp_path / "run"
    with shell.start(*SFT, "--ckpt", "--max-steps", FOREVER, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 3)
        (worker,) = command.workers()
        os.kill(worker, signal.SIGSTOP)
        command.process.send_signal(INT)
        command.wait_until(RunDirectory(run).stop_requested)
        for number in (TERM, HUP, INT):
            command.process.send_signal(number)
        time.sleep(REPEAT_SECONDS)  # after the first request was heeded
        assert command.process.poll() is None
        command.process.send_signal(INT)
        finished = command.finish()
        command.assert_nothing_survives()
    assert finished.code == 1, finished.output
    assert "interrupted" in finished.output
    assert not steps(run)


def test_time_in_which_a_run_is_stopped_does_not_count(shell: Shell, tmp_path: Path):
    """All its processes are, and then its launcher alone (Ctrl-Z), for longer than a hang may last."""
    run = tmp_path / "run"
    limits = ("--heartbeat-timeout", 15, "--max-restarts", 0)
    with shell.start(*SFT, "--ckpt", "--max-steps", 60, *limits, "--output-dir", run) as command:
        command.wait_until(lambda: len(rows(run)) >= 3)
        # Parents first, and last when they go on: they watch those that they have started.
        everybody = [command.process.pid, *sorted(pid for pid, _ in command.family())]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everybody if number == signal.SIGSTOP else reversed(everybody):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(16.5 if number == signal.SIGSTOP else 0)
        command.process.send_signal(signal.SIGSTOP)
        (rank,) = command.workers()
        for _ in range(33):  # as slow as a larger model's: else it computes for all of the time
            for number, seconds in ((signal.SIGSTOP, 0.45), (signal.SIGCONT, 0.05)):
                os.kill(rank, number)
                time.sleep(seconds)
        command.process.send_signal(signal.SIGCONT)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "restart" not in finished.output
    whole_rows(run, 60)


# Ray


def test_ray_is_private_and_needs_no_home(shell: Shell, tmp_path: Path):
    """No token file, nothing that others may enter or read, and nothing left behind."""
    run = tmp_path / "run"
    place = Path("/tmp") / f"cairn-test-{os.getpid()}"
    place.mkdir()
    try:
        environment = {"HOME": "/dev/null/home", "RAY_TMPDIR": str(place), "RAY_AUTH_MODE": "disabled"}
        arguments = (*SFT, "--ckpt", "--max-steps", FOREVER, "--output-dir", run)
        with shell.start(*arguments, environment=environment, executed=True) as command:
            command.wait_until(lambda: len(rows(run)) >= 1)
            (folder,) = place.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
            assert list(folder.glob("r/session_*/sockets/raylet"))
            (worker,) = command.workers()
            variables = psutil.Process(worker).environ()
            assert (variables["RAY_AUTH_MODE"], len(variables["RAY_AUTH_TOKEN"])) == ("token", 64)
            driver = psutil.Process(read(run / "roles.json")["roles"]["trainer"]["pid"])
            assert driver.cmdline()[-1] == "early"  # it was started before the data was looked at
            command.process.send_signal(TERM)
            finished = command.finish()
        assert finished.code == 75, finished.output
        assert not list(place.iterdir())
    finally:
        shutil.rmtree(place)


@pytest.mark.soak
def test_a_ray_that_does_not_start_is_tried_again(shell: Shell, tmp_path: Path):
    """Its raylet is stopped as soon as it is there, for longer than Ray waits; the next one is left alone."""
    run = tmp_path / "run"
    with shell.start(*SFT, "--ckpt", "--max-steps", 3, "--output-dir", run) as command:

        def raylet() -> int | None:
            for pid, _ in command.family():
                with contextlib.suppress(psutil.Error):
                    if Path(psutil.Process(pid).exe()).name == "raylet":
                        return pid
            return None

        os.kill(command.wait_until(raylet), signal.SIGSTOP)
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert "trainer failed (Ray did not start on this machine: " in finished.output
    assert ") and is started again" in finished.output
    assert "Traceback" not in (run / "logs" / "trainer.log").read_text()
