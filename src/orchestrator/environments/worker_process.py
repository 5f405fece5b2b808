"""The processes of an environment that runs in an interpreter of its own, as the orchestrator sees them."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.orchestrator.environments.protocol import EnvironmentFailed
from cairn.run.processes import keeper_command, kill_descent

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).parent / "worker" / "worker.py"
SECONDS_TO_CANCEL = 10.0
"""How long a process may work on after a request was cancelled, until it is killed."""
Asks = Callable[[dict[str, Any]], None]
"""What is done with a message that a rollout sends while it runs."""


@dataclass(frozen=True)
class Request:
    """What a process was asked and has not answered yet.

    loop, asks: what is called with a rollout's messages, and on which event loop.
    """

    result: Future[Any] = field(default_factory=Future[Any])
    loop: asyncio.AbstractEventLoop | None = None
    asks: Asks | None = None


class WorkerProcess:
    """One process; it ends with this one, whatever happens, and all that it has started ends with it.

    Args:
        command: what starts `worker.py`.
        first: the line that says which environment to make.

    Raises:
        OSError: the command can't be started.
    """

    def __init__(self, command: Sequence[str], first: Mapping[str, Any]):
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        kept, self._held = os.pipe()
        """`_held`: its keeper kills what there is when it closes; -1 once it is closed."""
        try:
            self._process = subprocess.Popen(
                keeper_command(kept, [*command, str(SCRIPT)], on_term="kill"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=[kept],
                start_new_session=True,
            )
        except OSError:
            os.close(self._held)
            raise
        finally:
            os.close(kept)
        self.hello: Future[dict[str, Any]] = Future()
        """What the environment is."""
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._number = 0
        self._ended = False
        self._died: str | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.send(first)
        for work in (self._read, self._write):
            threading.Thread(target=work, name="environment's process", daemon=True).start()

    @property
    def dead(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._ended or self._process.poll() is not None

    @property
    def at_work(self) -> int:
        """Number of requests that it has not answered."""
        return len(self._requests)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line, without waiting for the process to read it."""
        self._lines.put(json.dumps(message, default=str))

    async def ask(self, message: Mapping[str, Any], asks: Asks | None = None) -> Any:
        """The answer to a request.

        If the caller is cancelled, so is the work; a process that does not stop working is killed.

        Raises:
            EnvironmentFailed: the process died, or the environment raised.
        """
        request = Request(loop=asyncio.get_running_loop(), asks=asks)
        with self._lock:
            number, self._number = self._number, self._number + 1
            if self._died is not None:
                raise EnvironmentFailed(self._died)
            self._requests[number] = request
        self.send({**message, "number": number})
        answer = asyncio.wrap_future(request.result)
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.send({"type": "cancel", "number": number})
            timer = threading.Timer(SECONDS_TO_CANCEL, self._kill_if_at, [number])
            timer.daemon = True
            timer.start()
            request.result.add_done_callback(lambda _: timer.cancel())
            raise

    def _kill_if_at(self, number: int) -> None:
        if number in self._requests:
            logger.warning("an environment's process does not stop what it is at: it is killed")
            self.kill()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError), self._process.stdin as pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line.encode() + b"\n")
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                try:
                    self._take(json.loads(line))
                except Exception:
                    logger.exception("an environment's process wrote what is no answer: it is killed")
                    self.kill()
                    break
        self._ended = True  # while a thread waits for a process, Popen.poll knows nothing of its end
        code = self._process.wait()
        self._let_go()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with self._lock:
            self._died = f"the environment's process {how}"
            requests, self._requests = self._requests, {}
        if not self.hello.done():
            self.hello.set_exception(EnvironmentFailed(f"{self._died} before it had made the environment"))
        for request in requests.values():
            request.result.set_exception(EnvironmentFailed(self._died))
        self._lines.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "hello":
            if "error" in message:
                self.hello.set_exception(EnvironmentFailed(message["error"]))
            else:
                self.hello.set_result(message)
            return
        number = message["number"]
        if message["type"] != "result":
            request = self._requests.get(number)
            if request and request.loop and request.asks and not request.loop.is_closed():
                request.loop.call_soon_threadsafe(request.asks, message)
            return
        with self._lock:
            request = self._requests.pop(number)
        if "error" in message:
            request.result.set_exception(EnvironmentFailed(message["error"]))
        else:
            request.result.set_result(message["result"])

    def kill(self) -> None:
        """Kill the process and what it has started. It is `dead` at once, though its threads end later."""
        self._ended = True
        self._let_go()
        if self._process.poll() is not None:  # if its keeper was killed itself, something may be left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif _is_stopped(self._process.pid):  # it can't kill anybody
            kill_descent(self._process.pid)

    def _let_go(self) -> None:
        """Have the keeper kill all processes, if it still runs."""
        with self._lock:
            held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def close(self) -> None:
        """End the process."""
        self._lines.put(None)  # its standard input ends, and it with it
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self.kill()  # what it has left


def _is_stopped(process: int) -> bool:
    """Whether a process is stopped by a signal (SIGSTOP), or by a debugger."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


class Workers:
    """The processes of one environment; one that has died is started again by the next request.

    Args:
        command, first: as in `WorkerProcess`.
        count: number of processes.
        start_timeout: seconds until a process must have made the environment.

    Raises:
        EnvironmentFailed: the environment can't be made.
    """

    def __init__(self, command: Sequence[str], first: Mapping[str, Any], count: int, start_timeout: float):
        self._command, self._first = command, first
        self._timeout = start_timeout
        self._turn = 0
        self._processes: list[WorkerProcess] = []
        self._lock = threading.Lock()
        try:
            self._processes.append(WorkerProcess(command, first))
            self.about = self._processes[0].hello.result(start_timeout)
            """What the environment is: its kind, number of problems and identity."""
            self._processes += [WorkerProcess(command, first) for _ in range(count - 1)]
        except TimeoutError:
            self.close()
            raise EnvironmentFailed(
                f"the environment was not made within {start_timeout:g} s (start_timeout allows more)"
            ) from None
        except OSError as error:
            raise EnvironmentFailed(f"{command[0]} can't be started: {error}") from error

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    async def any(self) -> WorkerProcess:
        """A process with the least work, which has made the environment.

        Raises:
            EnvironmentFailed: it can't be made, or is another one than at first.
        """
        with self._lock:
            count, self._turn = len(self._processes), self._turn + 1
            order = [(self._turn + i) % count for i in range(count)]  # of equals, another one each time
            place = min(order, key=lambda i: self._processes[i].at_work)
            if self._processes[place].dead:
                logger.warning("an environment's process is started again")
                self._processes[place].kill()  # what it has left
                try:
                    self._processes[place] = WorkerProcess(self._command, self._first)
                except OSError as error:
                    raise EnvironmentFailed(f"{self._command[0]} can't be started again: {error}") from error
            process = self._processes[place]
        try:
            async with asyncio.timeout(self._timeout):
                about = await asyncio.shield(asyncio.wrap_future(process.hello))
        except TimeoutError:
            process.kill()
            raise EnvironmentFailed(
                f"the environment was not made within {self._timeout:g} s (start_timeout allows more)"
            ) from None
        if about != self.about:
            raise EnvironmentFailed(
                f"its process was started again and makes another environment: {about}, not {self.about}"
            )
        return process
