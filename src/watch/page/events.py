"""What happened in a run, and when: steps, restarts and saves on one time line, and the logs of its roles."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cairn.orchestrator.rollout_log import kind_of
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, entries
from cairn.run.history import WorkClock
from cairn.run.jsonlines import Row
from cairn.run.metrics import number
from cairn.run.output import COLORS
from cairn.run.spans import MAIN, TimeSpan

TAIL = 64 << 10
"""Bytes of a log that are sent at once."""
LINE = 4000
"""Characters of a line of a log that are shown."""
SCANNED = 4 << 20
"""Bytes at the end of a log in which errors are looked for."""
MOST_ERRORS = 100
WRONG = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|Traceback \(most recent call last\))|^(?:\w+\.)*\w*(?:Error|Exception)\b"
)
WARNING = re.compile(r"\bWARN(?:ING)?\b")
STAMP = re.compile(r"^\s*(?:\(\w+ pid=\d+\)\s*)?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[,.]?\d*\s*")
PHASES = ("time/wait", "time/step", "time/validation", "time/save_stall", "time/generate",
          "time/server_idle", "time/push", "time/reward")  # fmt: skip
"""Times in a row of metrics.jsonl that tell where a step's time went."""


LANES: Mapping[tuple[str, str], str] = {
    ("trainer_rank0", MAIN): "trainer",
    ("trainer_rank0", "saves"): "saves",
    ("orchestrator", "servers"): "servers",
    ("orchestrator", "weights"): "servers",
    ("orchestrator", "environments"): "rewards",
    ("exporter", MAIN): "exports",
    ("uploader", MAIN): "uploads",
}
"""The lanes of the time line, in their order, by role and lane of the spans that they show."""
OF_STEP = re.compile(r"(?:step|batch) (\d+)")
COMPUTING = ("step ", "validation ", "computing ")
"""How the names of the trainer's spans begin that are no other work."""
TOGETHER = 0.1
"""Seconds between two bars of one kind and step that are drawn as one, such as those of micro-batches."""


@dataclass(frozen=True)
class StepSpan:
    """A step of the trainer on the clock, in seconds since 1970: it waited from `begin` to `work`, and
    computed until `end`."""

    step: int
    begin: float
    work: float
    end: float


@dataclass(frozen=True)
class Bar:
    """What was done in a lane of the time line, from `begin` to `end`, in seconds since 1970.

    kind: computing, waiting, or the name of its lane; `other` of what the trainer does beside its steps.
    step: the step that it belongs to, if it does.
    """

    begin: float
    end: float
    kind: str
    text: str
    step: int | None


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment. kind: the event of history.jsonl, or `saved`."""

    time: float
    kind: str
    role: str
    text: str


def step_spans(rows: Sequence[Row], history: Sequence[Row]) -> list[StepSpan]:
    """When each step was. Rows hold how long somebody was at work on the run; history.jsonl, when that was.

    Steps of rows that do not say so come one after the other.
    """
    work = WorkClock(history)
    clock = work.moment(0.0)
    found: list[StepSpan] = []
    for row in rows:
        wait, step = number(row, "time/wait") or 0.0, number(row, "time/step") or 0.0
        wall = number(row, "run/wall_seconds")
        end = work.moment(wall) if wall is not None and work.has_begun else clock + wait + step
        clock = max(end, clock)
        found.append(StepSpan(row["step"], clock - step - wait, clock - step, clock))
    return found


def lanes(spans: Iterable[TimeSpan], steps: Sequence[StepSpan]) -> dict[str, list[Bar]]:
    """What was done when, by lane, from the first of these steps on.

    The trainer's steps that no span tells of lie where their rows put them: those of a run whose spans are
    elsewhere, or of a time before the oldest span that is kept.
    """
    first = steps[0].begin if steps else -math.inf
    known: dict[str, list[Bar]] = {name: [] for name in LANES.values()}
    for one in spans:
        lane, end = LANES.get((one.role, one.lane)), one.begin + one.seconds
        idle = one.about.get("waiting") and lane != "trainer"
        if lane is not None and end > first and not idle:
            known[lane].append(_bar(one, lane))
    recorded = min((bar.begin for bar in known["trainer"]), default=math.inf)
    for step in steps:
        if step.end <= recorded:
            waits = f"waits for the batch of step {step.step}"
            known["trainer"].append(Bar(step.begin, step.work, "waiting", waits, step.step))
            known["trainer"].append(Bar(step.work, step.end, "computing", f"step {step.step}", step.step))
    return {name: _joined(bars) for name, bars in known.items() if bars}


def _bar(span: TimeSpan, lane: str) -> Bar:
    found, about = OF_STEP.search(span.name), span.about.get("step")
    step = int(found[1]) if found else about if isinstance(about, int) else None
    kind, text = lane, span.name if found or step is None else f"{span.name} step {step}"
    if span.lane == "weights":
        kind = "weights"
    elif lane == "trainer" and (span.about.get("waiting") or span.name.startswith("getting the batch")):
        kind = "waiting"
    elif lane == "trainer":
        kind = "computing" if span.name.startswith(COMPUTING) else "other"
        text = text.partition(", micro-batch")[0]
    return Bar(span.begin, span.begin + span.seconds, kind, text, step)


def _joined(bars: list[Bar]) -> list[Bar]:
    """The bars of a lane in order; those of one kind and step that follow each other at once are one."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.begin):
        last = found[-1] if found else None
        if last and (last.kind, last.step, last.text) == (bar.kind, bar.step, bar.text) \
                and bar.begin - last.end < TOGETHER:  # fmt: skip
            found[-1] = replace(last, end=max(last.end, bar.end))
        else:
            found.append(bar)
    return found


def marks(history: Sequence[Row]) -> list[Mark]:
    """The events of a run, oldest first, each with a sentence."""
    return [Mark(event["time"], event["event"], _role(event), _say(event)) for event in history
            if isinstance(event.get("time"), int | float)]  # fmt: skip


def _role(event: Row) -> str:
    return str(event.get("role") or "")


def _say(event: Row) -> str:
    match event["event"]:
        case "attempt":
            idle = f" after {event['idle']:.0f} s in which nobody was at work" if event["idle"] else ""
            return f"attempt {event['number']} begins{idle}"
        case "restart":
            return f"{event['role']} {event['reason']} at step {event['step']}; {event['how']}"
        case "recompute":
            return f"{event['steps']} finished steps are done again"
        case "change":
            now, was = event.get("now"), event.get("was")
            return f"from step {event['step']} on {event['name']} is {now!r}, no longer {was!r}"
        case other:
            step = f"step {event['step']}: " if "step" in event else ""
            return f"{step}{other.replace('_', ' ')}: {event.get('reason', '')}"


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """Where the time of these steps went: the sum of each of `PHASES`, in seconds."""
    return {
        key: sum(values)
        for key in PHASES
        if (values := [value for row in rows if (value := number(row, key)) is not None])
    }


# Logs


@dataclass(frozen=True)
class LogFile:
    """A log: its name, its size in bytes, and when it was written to last, in seconds since 1970."""

    name: str
    nbytes: int
    written: float


@dataclass(frozen=True)
class LogPage:
    """A piece of a log, from byte `begin` to byte `end`; `size` is that of the file."""

    name: str
    begin: int
    end: int
    size: int
    lines: Sequence[str]


@dataclass(frozen=True)
class LogError:
    """Lines that report the same, but for numbers: how many, and the newest, with what is around it.

    level: error or warning. at: the byte of the log at which the newest begins.
    """

    log: str
    level: str
    text: str
    details: Sequence[str]
    count: int
    at: int


def log_files(folder: Path) -> list[LogFile]:
    """The logs of a run, by name."""
    found: list[LogFile] = []
    for path in sorted(entries(folder, "")):
        if ".log" in path.name and not path.is_symlink() and path.is_file():
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append(LogFile(path.name, status.st_size, status.st_mtime))
    return found


def log_page(folder: Path, name: str, before: int | None = None) -> LogPage:
    """The end of a log, or what ends at byte `before`.

    Raises:
        DamagedFile: it can't be read.
        UsageError: there is no such log.
    """
    if name not in {log.name for log in log_files(folder)}:
        raise UsageError(f"name = {name!r}: there is no such log")
    try:
        with open(folder / name, "rb") as file:
            size = file.seek(0, 2)
            end = size if before is None else max(min(before, size), 0)
            begin = max(end - TAIL, 0)
            file.seek(begin)
            content = file.read(end - begin)
    except OSError as error:
        raise DamagedFile(f"{folder / name}: can't be read: {error.strerror}") from None
    if begin and (cut := content.find(b"\n")) >= 0 and cut + 1 < len(content):
        begin, content = begin + cut + 1, content[cut + 1 :]
    return LogPage(name, begin, end, size, [_shown(line) for line in content.split(b"\n")])


def _shown(line: bytes) -> str:
    text = COLORS.sub("", line.decode(errors="replace"))
    return text if len(text) <= LINE else f"{text[:LINE]} [... {len(text) - LINE} characters left out ...]"


def log_errors(folder: Path) -> list[LogError]:
    """What the logs report as wrong, each thing once, errors before warnings and the most frequent first."""
    found: dict[tuple[str, str, str], LogError] = {}
    for log in log_files(folder):
        with contextlib.suppress(OSError):
            for level, text, details, at in _reports(folder / log.name):
                key = (log.name, level, kind_of(text))
                count = found[key].count + 1 if key in found else 1
                found[key] = LogError(log.name, level, text, details, count, at)
    ordered = sorted(found.values(), key=lambda one: (one.level != "error", -one.count))
    return ordered[:MOST_ERRORS]


def _reports(path: Path) -> Iterator[tuple[str, str, list[str], int]]:
    """Level, text, further lines and place of each report at the end of a log."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        at = max(size - SCANNED, 0)
        file.seek(at)
        lines = file.read(SCANNED).split(b"\n")
    place = 0
    while place < len(lines):
        text = _shown(lines[place])
        begin, details = at, [text]
        at += len(lines[place]) + 1
        place += 1
        level = "error" if WRONG.search(text) else "warning" if WARNING.search(text) else None
        if level is None:
            continue
        told = STAMP.sub("", text)
        if "Traceback (most recent" in text or (place < len(lines) and lines[place].startswith(b"Traceback")):
            while place < len(lines) and len(details) < 60:
                line = _shown(lines[place])
                details.append(line)
                at += len(lines[place]) + 1
                place += 1
                if line and not line[0].isspace() and not line.startswith("Traceback"):
                    told = line
                    break
        yield level, told[:LINE], details, begin


def timeline(
    rows: Sequence[Row],
    history: Sequence[Row],
    spans: Iterable[TimeSpan],
    saves: Sequence[Mapping[str, Any]],
    last: int,
) -> dict[str, Any]:
    """What was done when in the newest `last` steps, and all events and saves on the clock.

    Args:
        saves: the steps that exist: `step` and `time`, in seconds since 1970.
    """
    steps = step_spans(rows, history)[-last:]
    found = [
        *marks(history),
        *(Mark(one["time"], "saved", "trainer", f"step {one['step']} saved") for one in saves),
    ]
    return {
        "steps": len(steps),
        "lanes": lanes(spans, steps),
        "marks": sorted(found, key=lambda mark: mark.time),
        "shares": shares(rows),
    }
