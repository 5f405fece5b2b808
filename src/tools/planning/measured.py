"""The constants of a plan that a run has recorded: its steps, saves, uploads, starts and restarts."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import StepFolders
from cairn.run.errors import UsageError
from cairn.run.history import WorkClock
from cairn.run.jsonlines import Row
from cairn.run.metrics import number
from cairn.run.output import counted
from cairn.run.spans import MAIN, TimeSpan
from cairn.run.view import RunView
from cairn.tools.planning.fleet import Death

WARMING = 3
"""Rows after each start of the trainer that are no measure of a step: kernels and caches are still cold."""
FEWEST = 5
"""Steps without a save that are measured, at least."""
WAITS = 0.05
"""Share of a step from which on the trainer waits for answers."""
ROLES: Mapping[str, Death] = {"trainer": "driver", "orchestrator": "orchestrator", "inference": "server"}
WORKERS = "starting workers"
"""The span of the trainer's driver in which its ranks are started."""
NOTICED = "waiting before workers are started again"
"""Its span that begins when a rank has died; the event in history.jsonl follows when another one runs."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run has recorded. A value that it says nothing about is None, or left out.

    restarts: seconds from each death until the next step, without that step and without steps taken again.
    starts: the same of the first start, which is what a restart took if there was none. counts: how often
    each was measured.
    """

    step: float
    generate: float
    ahead: bool
    servers: int
    machines: int
    ranks: int
    save_cost: float | None
    save_seconds: float | None
    memory_seconds: float | None
    peer_seconds: float | None
    upload_seconds: float | None
    state: int | None
    interval: int | None
    remote: bool
    restarts: dict[Death, float] = field(default_factory=dict[Death, float])
    starts: dict[Death, float] = field(default_factory=dict[Death, float])
    counts: dict[Death, int] = field(default_factory=dict[Death, int])


def measure(view: RunView) -> MeasuredRun:
    """Read the constants of a run.

    Raises:
        UsageError: it has too few steps to measure one.
        DamagedFile: a file as a whole can't be read.
    """
    rows, history = view.metrics(), view.history()
    clock = WorkClock(history)
    saves = {int(row["step"]): seconds for row in rows if (seconds := number(row, "time/save")) is not None}
    config = view.known_config() or {}
    ckpt: Mapping[str, Any] = config.get("ckpt") or {}
    spans = view.spans()
    died = deaths(history, spans, clock)
    seconds = _undisturbed(rows, sorted([0.0, *(moment for moment, _ in died)]))
    step, cost = _steps_and_saves(view.run.path, seconds, list(saves), ckpt.get("interval"))
    usual = [row for row in rows if row["step"] in seconds]
    waits = [number(row, "time/wait") or 0.0 for row in usual]
    generates = [value for row in usual if (value := number(row, "time/generate")) is not None]
    rl = bool(generates)
    wait = statistics.fmean(waits) if rl and waits else 0.0
    ahead = bool((config.get("orchestrator") or {}).get("max_off_policy_steps"))
    generate = 0.0
    if rl and not ahead:
        generate = wait  # trainer and servers take turns
    elif rl:
        # Where the trainer waits, the servers set the pace; else their time is shorter than its own.
        generate = step if wait > WAITS * step else statistics.fmean(generates)
    copies, far = (
        [value for row in usual if (value := number(row, name)) is not None]
        for name in ("time/memory", "time/memory_peer")
    )
    state = _state(view)
    upload = view.run.rates.expected("upload", state) if state else None
    starts = _starts(rows, clock, spans, step)
    restarts, counts = _restarts(rows, died, step)
    hosts, ranks = _places(view)
    healthy = [value for row in rows if (value := number(row, "servers/healthy")) is not None]
    return MeasuredRun(
        step=step - wait,
        generate=generate,
        ahead=ahead,
        servers=round(max(healthy, default=1)) if rl else 0,
        machines=max(hosts, 1),
        ranks=max(ranks, 1),
        save_cost=cost,
        save_seconds=statistics.median(saves.values()) if saves else None,
        memory_seconds=statistics.median(copies) if copies else None,
        peer_seconds=statistics.median(far) if far else None,
        upload_seconds=upload.most if upload else None,
        state=state,
        interval=ckpt.get("interval"),
        remote=bool(ckpt.get("remote")),
        restarts=restarts,
        starts=starts,
        counts=counts,
    )


def deaths(history: Sequence[Row], spans: Sequence[TimeSpan], clock: WorkClock) -> list[tuple[float, Death]]:
    """When what died, in seconds on the run's clock, in order.

    Of the whole command, that is when its ranks were last seen at work: within a second, which is how often
    spans are written.
    """
    noticed = [clock.at(span.begin) for span in spans if span.role == "trainer" and span.name == NOTICED]
    worked = sorted(
        clock.at(span.begin + span.seconds) for span in spans if span.role.startswith("trainer_rank")
    )
    found: list[tuple[float, Death]] = []
    for event in history:
        if event["event"] != "restart":
            continue
        moment, death = clock.at(event["time"]), death_of(event["role"])
        if death == "rank":
            moment = max((one for one in noticed if one <= moment), default=moment)
        found.append((moment, death))
    for moment in clock.later:
        before = bisect_left(worked, moment)
        found.append((worked[before - 1] if before else moment, "launcher"))
    return sorted(found)


def _undisturbed(rows: Sequence[Row], disturbed: Sequence[float]) -> dict[int, float]:
    """By step, the seconds since the step before, everything included; without those after a start."""
    found: dict[int, float] = {}
    before, since = 0.0, 0
    for row in rows:
        end = number(row, "run/wall_seconds")
        if end is None:
            continue
        place = bisect_left(disturbed, before)
        since = 0 if place < len(disturbed) and disturbed[place] < end else since + 1
        if since >= WARMING and end > before:
            found[int(row["step"])] = end - before
        before = end
    return found


def _steps_and_saves(
    run: Path, seconds: Mapping[int, float], reported: Sequence[int], interval: int | None
) -> tuple[float, float | None]:
    """Seconds of a step without a save, and by which a save delays the steps that it overlaps.

    seconds: of undisturbed steps. reported: the steps whose rows report a save, each the first one after the
    save was complete.
    """
    if len(seconds) < FEWEST:
        raise UsageError(
            f"{run}: only {counted(len(seconds), 'step')} of it can be measured, because the first {WARMING} "
            f"after each start do not count, and {FEWEST} are needed; give --work.step-seconds, or plan from "
            "a longer run"
        )
    overlapped: set[int] = set()
    for step in reported:
        begun = (step - 1) // interval * interval if interval else step - 1
        overlapped |= set(range(begun + 1, step + 1))
    alone = [time for step, time in seconds.items() if step not in overlapped]
    if len(alone) < FEWEST:  # there is always a save: the faster half is least delayed
        alone = sorted(seconds.values())[: max(len(seconds) // 2, FEWEST)]
    usual = statistics.fmean(alone)
    during = [time - usual for step, time in seconds.items() if step in overlapped]
    count = sum(step in seconds for step in reported)
    return usual, max(sum(during) / count, 0.0) if count else None


def _restarts(
    rows: Sequence[Row], begins: Sequence[tuple[float, Death]], step: float
) -> tuple[dict[Death, float], dict[Death, int]]:
    """By what died, the median seconds from its death to the next step, and how many were measured."""
    found: dict[Death, list[float]] = {}
    ends = [end for row in rows if (end := number(row, "run/wall_seconds")) is not None]
    waits = [number(row, "time/wait") or 0.0 for row in rows if number(row, "run/wall_seconds") is not None]
    usual = statistics.median(waits) if waits else 0.0
    for place, (moment, death) in enumerate(begins):
        after = bisect_left(ends, moment)
        if after == len(ends) or (place + 1 < len(begins) and begins[place + 1][0] < ends[after]):
            continue  # the restart was disturbed by the next one, or never came to a step
        if death in ("orchestrator", "server"):
            # Training goes on with what it has, so only what it waits longer than usual counts.
            seconds = max(waits[after : after + 3]) - usual
        else:
            seconds = ends[after] - moment - step
        found.setdefault(death, []).append(max(seconds, 0.0))
    return (
        {death: statistics.median(values) for death, values in found.items()},
        {death: len(values) for death, values in found.items()},
    )


def death_of(role: str) -> Death:
    """The kind of death that a restart of this role was."""
    return ROLES.get(role.partition("_")[0] if role.startswith("inference") else role, "rank")


def _starts(
    rows: Sequence[Row], clock: WorkClock, spans: Sequence[TimeSpan], step: float
) -> dict[Death, float]:
    """The first start's seconds until the first step, from where a restart of each kind would begin."""
    first = next((end for row in rows if (end := number(row, "run/wall_seconds")) is not None), None)
    if first is None or not clock.has_begun or clock.later:
        return {}
    main = [span for span in spans if span.lane == MAIN]
    found: dict[Death, float] = {"launcher": max(first - step, 0.0)}
    driver = [span for span in main if span.role == "trainer"]
    begins: dict[Death, float] = {"driver": min((span.begin for span in driver), default=math.inf)}
    begins["rank"] = min((span.begin for span in driver if span.name == WORKERS), default=math.inf)
    asked = [span.begin for span in main if span.role == "orchestrator"]
    begins["orchestrator"] = min(asked, default=math.inf)
    for death, begin in begins.items():
        if not math.isinf(begin):
            found[death] = max(first - clock.at(begin) - step, 0.0)
    return found


def _state(view: RunView) -> int | None:
    """Bytes of the newest checkpoint; None if there is none."""
    folders = StepFolders(view.checkpoints())
    try:
        steps = folders.steps()
        return folders.manifest(steps[-1]).nbytes if steps else None
    except (CheckpointError, UsageError, OSError):
        return None


def _places(view: RunView) -> tuple[int, int]:
    """How many machines have ranks, and how many ranks there are."""
    roles = view.run.current_roles() or {}
    ranks = {name: entry for name, entry in roles.items() if name.startswith("trainer_rank")}
    return len({entry.host for entry in ranks.values()}), len(ranks)
