"""Simulates a run that dies now and then, event by event: how much of its time is useful, and the rest.

Deaths are drawn in advance, from a seed. Between two events the run is a repetition of steps and saves, of
which any number is skipped by arithmetic, so the cost of a simulation grows with the number of deaths and not
with that of steps. What happens at each death is what Cairn does (docs/concepts/recovery.md):

- rank, driver, launcher: the trainer goes back to the newest durable step, after a restart;
- machine: the same, once a spare takes its place or a machine is repaired. If `ckpt.dir` was on it, the run
  goes back to the newest step in the object store, and without one to the beginning;
- orchestrator: the trainer waits for it, and goes on where it was;
- server: the other servers take its share, so steps take longer if the servers are what is waited for.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cairn.run.seeds import derive
from cairn.tools.planning.fleet import LOSING, Death, FleetConstants, PlanOption

MOST_EVENTS = 2_000_000
"""Deaths of a run that are simulated at most; more would take minutes, and such a run does not advance."""
CAUSES: tuple[str, ...] = ("saves", "taken again", "restarts", "machines", "servers", "copies")
"""What takes the time that is not useful: that saves delay training; steps that are taken again; restarts;
waiting for a machine; steps that are slower for lack of servers; copies of each step in memory."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happens to a run. time: in seconds from its beginning. kind: a death, or an outage of
    the object store. place: for a machine, whether it is of the trainer or serves. mark: from 0 to below 1,
    which machine of its place dies; one that is away is spared."""

    time: float
    kind: Death | Literal["outage"]
    place: Literal["trainer", "server"] = "trainer"
    mark: float = 1.0


def drawn_events(fleet: FleetConstants, servers: int, seed: int, sample: int) -> list[RunEvent]:
    """The events of one simulated run, in their order.

    Each kind has draws of its own, so that a plan with other spares or intervals meets the same deaths, and
    one with more deaths of a kind the same ones of the others.

    Raises:
        ValueError: there are more than `MOST_EVENTS`.
    """
    machine = fleet.rates.get("machine", 0.0)
    kinds: list[tuple[Death | Literal["outage"], Literal["trainer", "server"], float]] = [
        *((death, "trainer", fleet.rate(death, servers)) for death in ("rank", "driver", "launcher")),
        ("orchestrator", "trainer", fleet.rate("orchestrator", servers)),
        ("server", "server", fleet.rate("server", servers)),
        ("machine", "trainer", machine * fleet.machines),
        ("machine", "server", machine * servers),
        ("outage", "trainer", fleet.outages),
    ]
    if (total := sum(rate for *_, rate in kinds) * fleet.horizon) > MOST_EVENTS:
        raise ValueError(f"{total:,.0f} deaths in the run are more than can be simulated ({MOST_EVENTS:,})")
    events: list[RunEvent] = []
    for kind, place, rate in kinds:
        if rate <= 0:
            continue
        draw = np.random.Generator(np.random.PCG64(derive(seed, "fleet plan", kind, place, sample)))
        count = int(draw.poisson(rate * fleet.horizon))
        times, marks = draw.random(count) * fleet.horizon, draw.random(count)
        events += [
            RunEvent(time, kind, place, mark)
            for time, mark in zip(times.tolist(), marks.tolist(), strict=True)
        ]
    return sorted(events, key=lambda event: event.time)


@dataclass
class SimulatedRun:
    """The state of one run as it goes on. Steps are counted with fractions; saves have numbers, and save
    number N is of step N * interval."""

    fleet: FleetConstants
    option: PlanOption
    now: float = 0.0
    steps: float = 0.0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Seconds by what took them."""
    by_death: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of restarts, of machines that are waited for and of steps taken again, by what had died."""
    _saved: int = 0
    """Number of the newest save that has begun."""
    _stall: float = 0.0
    _busy: float = 0.0
    """When the save in progress is durable."""
    _captures: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Numbers of saves, and when each began: those that may still be gone back to."""
    _outages: list[float] = field(default_factory=list[float])
    """When each outage of the object store began."""
    _waits_until: float = 0.0
    _down_until: float = 0.0
    _down: str = ""
    _spares: int = 0
    _repaired: list[float] = field(default_factory=list[float])
    """A heap: when each machine that died can be used again."""
    _missing: list[float] = field(default_factory=list[float])
    """A heap: when each server that died serves again."""
    _away: list[float] = field(default_factory=list[float])
    """When another machine is there for each of the trainer's that died."""

    def __post_init__(self) -> None:
        self._spares = self.option.spares
        self._step = self.option.step_seconds(self.fleet)

    def go(self, events: Sequence[RunEvent]) -> "SimulatedRun":
        """Run to the end of the horizon through these events, which are in order."""
        for event in events:
            self._advance(event.time)
            self._strike(event)
        self._advance(self.fleet.horizon)
        return self

    @property
    def goodput(self) -> float:
        """Share of the time in which steps were taken that count, as fast as without disturbance (ETTR)."""
        return self.steps * self.fleet.step_seconds(self.option.servers) / self.fleet.horizon

    # Between events

    def _advance(self, until: float) -> None:
        """Go on to a time, through every server that comes back before."""
        while self._missing and self._missing[0] <= until:
            self._advance_with(self._missing[0], self.option.servers - len(self._missing))
            heapq.heappop(self._missing)
        self._advance_with(until, self.option.servers - len(self._missing))

    def _advance_with(self, until: float, serving: int) -> None:
        if self.now < (wait := min(self._waits_until, until)):
            self._lose("machines", wait - self.now, self._down)
            self.now = wait
        if self.now < (down := min(self._down_until, until)):
            self._lose("restarts", down - self.now, self._down)
            self.now = down
        if self.now < until:
            self._train(until, self.option.step_seconds(self.fleet, serving))

    def _train(self, until: float, step: float) -> None:
        """Take steps of so many seconds, and save, until a time."""
        interval, cost = self.option.interval, self.fleet.save_cost
        if math.isinf(step):
            self.lost["servers"] += until - self.now
            self.now = until
            return
        period = max(interval * step + cost, self.fleet.save_seconds)
        while self.now < until:
            if self._stall > 0:
                stood = min(self._stall, until - self.now)
                self._stall -= stood
                self.lost["saves"] += stood
                self.now += stood
                continue
            work = max((self._saved + 1) * interval - self.steps, 0.0) * step
            if self.now + work > until:
                self._work(until - self.now, step)
                self.now = until
                return
            self._work(work, step)
            self.now += work
            self.steps = float((self._saved + 1) * interval)
            begun = self._begin_save()
            if (whole := int((until - begun) / period)) > 0:
                self._skip(whole, begun, period, step)

    def _work(self, seconds: float, step: float) -> None:
        self.steps += seconds / step
        self._slower(seconds, step)

    def _slower(self, seconds: float, step: float) -> None:
        """Account for steps that take longer than those of the undisturbed run."""
        copies = self.option.step_seconds(self.fleet) - self.fleet.step_seconds(self.option.servers)
        self.lost["servers"] += seconds * (1 - self._step / step)
        self.lost["copies"] += seconds * copies / step

    def _begin_save(self) -> float:
        """Save the step that was just finished; returns when the save began, after one in progress."""
        begun = max(self.now, self._busy)
        self._saved += 1
        self._stall = begun - self.now + self.fleet.save_cost
        self._busy = begun + self.fleet.save_seconds
        self._forget()
        self._captures.append((self._saved, begun))
        return begun

    def _skip(self, whole: int, begun: float, period: float, step: float) -> None:
        """Go on to the beginning of the save that is `whole` saves after the one that has begun."""
        interval, cost = self.option.interval, self.fleet.save_cost
        worked = whole * interval * step
        self.lost["saves"] += begun - self.now + whole * period - worked
        self._slower(worked, step)
        self.steps += whole * interval
        self.now = begun + whole * period
        # Only those may be gone back to that the object store has, or will have soon.
        lag = self.fleet.save_seconds + (self.fleet.upload_seconds or 0.0)
        kept = min(whole, math.ceil(lag / period) + 2 * self.option.uploaded)
        self._captures += [
            (self._saved + number, begun + number * period) for number in range(whole - kept + 1, whole + 1)
        ]
        self._saved += whole
        self._stall, self._busy = cost, self.now + self.fleet.save_seconds
        self._forget()

    # Which saves there are

    def _forget(self) -> None:
        """Forget saves that are never gone back to, because a newer one is in every place."""
        if len(self._captures) > 8 + 4 * self.option.uploaded:
            oldest = self._newest_on_disk()
            if self.option.tier == "remote":
                oldest = min(oldest, self._newest_uploaded())
            self._captures = [one for one in self._captures if one[0] >= oldest]

    def _newest_on_disk(self) -> int:
        durable = self.now - self.fleet.save_seconds
        return max((number for number, begun in self._captures if begun <= durable), default=0)

    def _newest_uploaded(self) -> int:
        if self.option.tier != "remote" or self.fleet.upload_seconds is None:
            return 0
        every = self.option.uploaded
        uploaded = (
            number
            for number, begun in self._captures
            if number % every == 0 and self._in_store(begun) <= self.now
        )
        return max(uploaded, default=0)

    def _in_store(self, begun: float) -> float:
        """When a save that began at a time is in the object store, through its outages."""
        durable, upload = begun + self.fleet.save_seconds, self.fleet.upload_seconds or 0.0
        done = durable + upload
        for outage in self._outages:
            if outage < done and durable < (end := outage + self.fleet.outage_seconds):
                done = end + upload
        return done

    # Events

    def _strike(self, event: RunEvent) -> None:
        fleet = self.fleet
        if event.kind == "outage":
            oldest = min((begun for _, begun in self._captures), default=self.now)
            self._outages = [one for one in self._outages if one + fleet.outage_seconds >= oldest]
            self._outages.append(self.now)
        elif event.kind == "server":
            self._lose_server(self.now + fleet.restart("server"))
        elif event.kind == "machine":
            self._lose_machine(event)
        else:
            if event.kind in LOSING:
                self._fall_back(event.kind)
            self._stand(event.kind, self.now)

    def _lose_machine(self, event: RunEvent) -> None:
        fleet = self.fleet
        self._away = [there for there in self._away if there > self.now]
        serves = event.place == "server"
        away, all_of_them = (
            (len(self._missing), self.option.servers) if serves else (len(self._away), fleet.machines)
        )
        if event.mark < away / all_of_them:
            return
        there = self._other_machine()
        if serves:
            self._lose_server(there + fleet.restart("server"))
            return
        self._away.append(there)
        self._fall_back("machine")
        self._stand("machine", there)

    def _stand(self, death: Death, there: float) -> None:
        """Nothing is trained until a machine is there and all is started again."""
        self._down = death
        self._waits_until = max(self._waits_until, there)
        self._down_until = max(self._down_until, self._waits_until + self.fleet.restart(death))

    def _lose_server(self, until: float) -> None:
        if len(self._missing) < self.option.servers:  # else none is left that could die
            heapq.heappush(self._missing, until)

    def _other_machine(self) -> float:
        """When another machine is there for one that died now."""
        while self._repaired and self._repaired[0] <= self.now:
            heapq.heappop(self._repaired)
            self._spares += 1
        heapq.heappush(self._repaired, self.now + self.fleet.repair)
        if self._spares:
            self._spares -= 1
            return self.now
        return heapq.heappop(self._repaired)

    def _fall_back(self, death: Death) -> None:
        """Go back to the newest step that the death has left."""
        near = self.option.near(self.fleet)
        near = near if near and death in near.survives else None
        gone = death == "machine" and not self.fleet.shared
        number = self._newest_uploaded() if gone else self._newest_on_disk()
        to = float(number * self.option.interval)
        if near:
            behind = near.seconds / self._step
            to = max(to, float(math.floor(max(self.steps - behind, 0.0))))
            number = int(to // self.option.interval)
        if to < self.steps:
            self._lose("taken again", (self.steps - to) * self._step, death)
            self.lost["copies"] -= (self.steps - to) * (
                self._step - self.fleet.step_seconds(self.option.servers)
            )
            self.steps = to
        self._captures = [
            (kept, begun)
            for kept, begun in self._captures
            if kept <= number and begun + self.fleet.save_seconds <= self.now
        ]
        self._saved = number
        self._stall, self._busy = 0.0, self.now

    def _lose(self, cause: str, seconds: float, death: str) -> None:
        self.lost[cause] += seconds
        self.by_death[death] = self.by_death.get(death, 0.0) + seconds
