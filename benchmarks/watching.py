"""What it costs a run that it is watched: `watch` at a terminal, the page with a run open, and all sinks.

One run of `sft` goes through windows of time, in which those who watch are in turn at work and stopped
(SIGSTOP), in the order off on on off: so each pair of neighbours differs in that alone, and a machine that
becomes slower bears on both. Those who watch are the run's own process of sinks (TensorBoard, CSV,
Prometheus, a webhook, a command), `watch` at a pseudo-terminal, `dash`, and what asks it as often as the page
in a browser does, and scrapes /metrics.

- step: seconds of a step by the clock; on a busy machine it says little
- processor: seconds of a processor that the trainer's rank used for a step; other processes count only where
  they take caches from it, so it is less noisy
- spans: what a step's spans cost the process that records them, counted and timed on their own

Ratios are on / off, by pairs. The interval holds their median with a confidence of 95 % or more, by order
statistics; with fewer than six pairs there is none, and it is the range.
"""

import argparse
import contextlib
import http.server
import json
import math
import os
import pty
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import common

from cairn.run import spans
from cairn.run.connections import free_port
from cairn.run.jsonlines import JsonLines
from cairn.run.view import RunView

QUESTIONS = (
    "pulse?run={run}",
    "overview?run={run}",
    "points?run={run}&keys=loss,lr,grad_norm,learned_tokens&axis=step",
    "runs",
)
"""What the page asks while a run is open."""
PULSE = 2.0
"""Seconds between two times, as in main.js."""
SETTLE = 0.5
"""Seconds at the begin of a window that do not count."""
STEPS = 1_000_000
"""More than there is time for."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Watchers:
    """Those who watch, as processes that can be stopped; `asking` is set while the page is asked."""

    pids: list[int] = field(default_factory=list[int])
    asking: threading.Event = field(default_factory=threading.Event)
    answers: int = 0

    def work(self, on: bool) -> None:
        """Let them work, or stop them."""
        (self.asking.set if on else self.asking.clear)()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)

    def seconds(self) -> float:
        """Of a processor that they have used so far."""
        return sum(map(used, self.pids))


@dataclass(frozen=True)
class Window:
    """Those who watch were at work (`on`) or stopped.

    Seconds of a step, and of a processor for a step; and the share of a core that those who watch have used.
    """

    on: bool
    step: float
    processor: float
    watchers: float


def main() -> None:
    """Run the comparison and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="pairs of windows")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window; the page is asked every 2")
    parser.add_argument("--warmup", type=int, default=30, help="steps before the first one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two pairs of short windows")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.seconds, arguments.warmup = 2, 3.0, 4
    with tempfile.TemporaryDirectory() as folder:
        report = measure(arguments, Path(folder))
    if not arguments.json:
        for name in ("step", "processor"):
            found = report[name]
            low, high = found["interval"]
            ratio = f"{found['ratio']:.4f} [{low:.4f}, {high:.4f}]"
            print(f"{name:10} {1000 * found['off_s']:8.2f} ms, on / off {ratio}")
        print(f"{'spans':10} {report['spans']['share']:.5%} of a step")
        print(f"{'watchers':10} {report['watchers_cores']:.3f} of a core")
    print(json.dumps(report))


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    """One run, which goes on for as long as there are windows."""
    task = common.Task(folder / "task", 64, 128, arguments.threads)
    task.prepare()
    run = folder / "runs" / "watched"
    run.parent.mkdir()
    with noticed() as hook, contextlib.ExitStack() as closing:
        command = task.cairn(run, STEPS, *sinks(hook, port := free_port()))
        closing.enter_context(going_on(command, run, task.threads))
        watchers = closing.enter_context(watched(run, port))
        rows = JsonLines(run / "metrics.jsonl")
        wait_until(lambda: len(rows.rows()) >= arguments.warmup, "the first steps")
        watchers.pids.append(process_of_sinks(run))
        windows = [window(rows, run, watchers, number, arguments) for number in range(2 * arguments.pairs)]
        answers = watchers.answers
        spans_found = spans_of(run, statistics.median(one.step for one in windows if not one.on))
    return {
        "threads": task.threads,
        "pairs": arguments.pairs,
        "seconds": arguments.seconds,
        "page_answers": answers,
        "step": compared([(one.on, one.step) for one in windows]),
        "processor": compared([(one.on, one.processor) for one in windows]),
        "watchers_cores": statistics.median(one.watchers for one in windows if one.on),
        "spans": spans_found,
    }


def window(
    rows: JsonLines, run: Path, watchers: Watchers, number: int, arguments: argparse.Namespace
) -> Window:
    """One window: off on on off, and so on."""
    on = number % 4 in (1, 2)
    watchers.work(on)
    time.sleep(SETTLE)
    pid, first = trainer(run), len(rows.rows())
    began, own, others = time.monotonic(), used(pid), watchers.seconds()
    time.sleep(arguments.seconds)
    took, own, others = time.monotonic() - began, used(pid) - own, watchers.seconds() - others
    inside = rows.rows()[first + 1 :]  # the first one began before
    step = statistics.fmean(row["time/step"] + row["time/wait"] for row in inside)
    return Window(on, step, own / took * step, others / took)


def compared(values: list[tuple[bool, float]]) -> dict:
    """Ratios of pairs of neighbours, their median, and an interval that holds it with at least 95 %."""
    pairs = [(values[place], values[place + 1]) for place in range(0, len(values), 2)]
    ratios = [dict(pair)[True] / dict(pair)[False] for pair in pairs]
    ordered, count = sorted(ratios), len(ratios)
    # The median is between the k-th smallest and the k-th largest unless fewer than k are on one side of it.
    tails = [sum(math.comb(count, i) for i in range(k)) / 2**count for k in range(count // 2 + 1)]
    k = max(k for k, tail in enumerate(tails) if tail <= 0.025)
    interval = (ordered[k - 1], ordered[-k]) if k else (ordered[0], ordered[-1])
    return {
        "off_s": statistics.median(value for on, value in values if not on),
        "on_s": statistics.median(value for on, value in values if on),
        "ratio": statistics.median(ratios),
        "interval": interval,
        "ratios": ratios,
    }


def sinks(hook: str, port: int) -> tuple[object, ...]:
    """Flags that turn all sinks on that need nothing else installed."""
    on = ("--sinks.tensorboard", "--sinks.csv", "--sinks.prometheus.port", port)
    return (*on, "--sinks.webhook.url", hook, "--sinks.command.run", "true")


def trainer(run: Path) -> int:
    """The process that trains."""
    entry = RunView(run).snapshot().roles["trainer_rank0"].beat
    assert entry is not None
    return entry.pid


def process_of_sinks(run: Path) -> int:
    """The run's own process of sinks."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"cairn.watch.sinks.main" in words and str(run).encode() in words:
                return int(path.parent.name)
    raise RuntimeError("no process of sinks is there")


def used(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def going_on(command: list[str], run: Path, threads: int) -> Iterator[None]:
    """A command at work on a run; at the end it is stopped."""
    with open(run.with_suffix(".log"), "wb") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=out, env=common.environment(threads), preexec_fn=common.bound_to_us()
        )
    try:
        wait_until(lambda: (run / "config.json").exists() or child.poll() is not None, "the run")
        if child.poll() is not None:
            raise RuntimeError(
                f"exited with {child.returncode}:\n{run.with_suffix('.log').read_text()[-3000:]}"
            )
        yield
    finally:
        child.terminate()
        child.wait()


@contextlib.contextmanager
def noticed() -> Iterator[str]:
    """The address of a server that takes notices."""

    class Taker(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@contextlib.contextmanager
def watched(run: Path, port: int) -> Iterator[Watchers]:
    """`watch` and the page of a run, and what asks them."""
    watchers = Watchers()
    terminal, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    view = subprocess.Popen(
        common.command("watch", (run,)), stdin=inner, stdout=inner, stderr=inner, env=environment
    )
    os.close(inner)
    page = subprocess.Popen(
        common.command("dash", (run.parent, "--port", 0)), stdout=subprocess.PIPE, text=True
    )
    assert page.stdout is not None
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()
    try:
        page.stdout.readline()
        address = page.stdout.readline().strip()
        watchers.pids += [view.pid, page.pid]
        threading.Thread(target=ask, args=(watchers, address, run.name, port), daemon=True).start()
        yield watchers
    finally:
        watchers.work(True)
        for process in (view, page):
            process.terminate()
            process.wait()
        os.close(terminal)


def ask(watchers: Watchers, address: str, run: str, port: int) -> None:
    """Ask what the page asks, and scrape, as long as the process lives."""
    places = [f"{address}api/{question.format(run=run)}" for question in QUESTIONS]
    places.append(f"http://127.0.0.1:{port}/metrics")
    while True:
        watchers.asking.wait()
        for place in places:
            # The run has ended, or they were stopped in the middle of an answer.
            with contextlib.suppress(OSError), urllib.request.urlopen(place, timeout=60) as answer:
                answer.read()
                watchers.answers += 1
        time.sleep(PULSE)


def drain(terminal: int) -> None:
    """Read what is shown, as a terminal does."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def wait_until(there: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait until something is there."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.1)


def spans_of(run: Path, step_s: float) -> dict:
    """What the spans of a step cost the trainer: how many they are, and what noting and writing one takes."""
    rows = RunView(run).metrics()
    found = [span for span in RunView(run).spans() if span.role == "trainer_rank0"]
    each = len(found) / len(rows)
    with tempfile.TemporaryDirectory() as folder:
        recorder, count = spans.Recorder(Path(folder) / "spans.jsonl"), 20_000
        began = time.process_time()
        for number in range(count):
            recorder.add(spans.MAIN, "training", 1e9 + number, 1e9 + number + 1, step=number)
            if number % 100 == 99:  # what gathers in a second or two
                recorder.write()
        cost = (time.process_time() - began) / count
    return {"a_step": each, "seconds_each": cost, "share": each * cost / step_s}


if __name__ == "__main__":
    main()
