"""The plan of a run: what each way to set it up comes to, the best of them, and why."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cairn.run.output import counted, duration
from cairn.tools.planning.closed_form import best_interval, daly, expected, young
from cairn.tools.planning.fleet import (
    HOUR,
    FleetConstants,
    PlanOption,
    Tier,
    disk_bytes,
    uploads_every,
)
from cairn.tools.planning.simulation import CAUSES, SimulatedRun, drawn_events

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Intervals that are simulated, as multiples of the one by the formula."""
EQUAL = 0.001
"""Share of the steps by which two options may differ and be as good: simulations do not tell them apart."""
KEEP, WAITING = 2, 2
"""`ckpt.keep_last` of the plan, and the default of `ckpt.remote_max_waiting`."""


@dataclass(frozen=True)
class PlanOutcome:
    """What an option comes to, on average over simulated runs.

    goodput: ETTR. worst, best: of the runs. lost: GPU-hours of the
    machines that train and serve, by cause. by_death: the same by what had died. idle: GPU-hours of spares.
    formula: the goodput by formulas. worth: steps per GPU that is paid for, as a share of what they would be
    without any disturbance and without spares.
    """

    option: PlanOption
    goodput: float
    worst: float
    best: float
    lost: dict[str, float]
    by_death: dict[str, float]
    idle: float
    formula: float | None
    worth: float
    disk: float

    def to_json(self) -> dict[str, Any]:
        """For programs; sizes in bytes."""
        option = self.option
        return {
            "interval": option.interval,
            "tier": option.tier,
            "memory": option.memory,
            "remote_interval": option.interval * option.uploaded if option.tier == "remote" else None,
            "spares": option.spares,
            "servers": option.servers,
            "goodput": self.goodput,
            "worst": self.worst,
            "best": self.best,
            "goodput_by_formula": self.formula,
            "worth": self.worth,
            "lost_gpu_hours": self.lost,
            "lost_gpu_hours_by_death": self.by_death,
            "idle_gpu_hours": self.idle,
            "disk_bytes": self.disk,
        }


def outcome_of(fleet: FleetConstants, option: PlanOption, seed: int, samples: int) -> PlanOutcome:
    """Simulate an option so many times.

    Raises:
        ValueError: more deaths than can be simulated.
    """
    runs = [
        SimulatedRun(fleet, option).go(drawn_events(fleet, option.servers, seed, sample))
        for sample in range(samples)
    ]
    goodputs = [run.goodput for run in runs]
    goodput = statistics.fmean(goodputs)
    working = (fleet.machines + option.servers) * fleet.gpus
    hours = working / HOUR / samples
    deaths = sorted({death for run in runs for death in run.by_death})
    faster = fleet.step_seconds(fleet.servers) / fleet.step_seconds(option.servers)
    needed = (fleet.machines + fleet.servers) * fleet.gpus
    return PlanOutcome(
        option,
        goodput,
        min(goodputs),
        max(goodputs),
        {cause: sum(run.lost[cause] for run in runs) * hours for cause in CAUSES},
        {death: sum(run.by_death.get(death, 0.0) for run in runs) * hours for death in deaths},
        option.spares * fleet.gpus * fleet.horizon / HOUR,
        expected(fleet, option),
        goodput * faster * needed / option.gpus(fleet),
        disk_bytes(fleet, option, KEEP, WAITING),
    )


@dataclass(frozen=True)
class FleetPlan:
    """What to set. options: all that were simulated, of one number of servers. servers: the best option with
    other numbers of servers. now: the run as it is set up."""

    fleet: FleetConstants
    options: list[PlanOutcome]
    servers: list[PlanOutcome]
    best: PlanOutcome
    now: PlanOutcome | None = None

    def equal_intervals(self) -> tuple[int, int]:
        """The shortest and the longest interval that are as good as the best option's."""
        best = self.best
        equal = [
            one.option.interval
            for one in self.options
            if replace(one.option, interval=1, uploaded=1, servers=0)
            == replace(best.option, interval=1, uploaded=1, servers=0)
            and one.goodput >= best.goodput - EQUAL
        ]
        return min(equal, default=best.option.interval), max(equal, default=best.option.interval)

    def settings(self) -> list[str]:
        """Lines of TOML to copy."""
        option = self.best.option
        lines = ["[ckpt]", f"interval = {option.interval}", f"keep_last = {KEEP}"]
        if option.memory:
            lines.append("memory_interval = 1")
        if option.tier == "remote":
            lines += [
                'remote = "s3://BUCKET/PREFIX"',
                f"remote_interval = {option.interval * option.uploaded}",
            ]
            lines += [f"remote_keep_last = {KEEP}"]
        return lines

    def reasons(self) -> Iterator[str]:
        """Why, a sentence each."""
        fleet, best, option = self.fleet, self.best, self.best.option
        near = option.near(fleet)
        step, rate = option.step_seconds(fleet), fleet.losing_rate(near.survives if near else ())
        low, high = self.equal_intervals()
        seconds = option.interval * step
        if rate:
            cost, between = fleet.save_cost, 1 / rate
            yield (
                f"interval = {option.interval} ({span(seconds)}): the trainer goes back to a save every "
                f"{span(between)}, and a save delays it by {cost:.3g} s, for which Young's formula gives "
                f"{span(young(cost, between))} and Daly's {span(daly(cost, between))}; in the simulation "
                f"{low} to {high} steps are equally good (within {EQUAL:.1%})"
            )
            if best_interval(fleet, option) * step <= fleet.save_seconds + step:
                yield (
                    f"a save takes {span(fleet.save_seconds)} until it is durable, and one is written at a "
                    "time, so saves can't be closer: a faster disk would shorten what is taken again"
                )
        else:
            yield f"interval = {option.interval} ({span(seconds)}): no death is expected, so hardly any save"
        yield (
            f"keep_last = {KEEP}: if the newest step is damaged there is another; with the step that is "
            f"being written that takes {size(best.disk)}"
        )
        if near and option.memory:
            copies = 2 if fleet.machines == 1 else 4
            yield (
                f"memory_interval = 1: if {' or '.join(near.survives)} dies, the step before is in memory: "
                f"saves are for other deaths; it takes {size(copies * fleet.state)} of host memory"
                f"{'' if fleet.machines == 1 else ' in all'}"
            )
        yield self._about_remote()
        if fleet.rate("machine", 0):
            died = fleet.rate("machine", option.servers) * fleet.horizon
            away = fleet.rate("machine", option.servers) * fleet.repair
            waited = self._waited(0)
            without = (
                f"; without spares it would wait for machines {waited:.1%} of the time" if waited else ""
            )
            yield (
                f"{counted(option.spares, 'spare machine')}: about {died:.3g} machines die in "
                f"{span(fleet.horizon)} and each is away for {span(fleet.repair)}, so {away:.2g} are away at "
                f"a time{without}"
            )
        if option.servers:
            yield self._about_servers()
        cause = max(CAUSES, key=lambda one: best.lost[one])
        if best.lost[cause] > 0:
            yield f"most is lost to {WORDS[cause]} ({best.lost[cause]:,.0f} GPU-hours): {ADVICE[cause]}"

    def _about_remote(self) -> str:
        fleet, option = self.fleet, self.best.option
        if option.tier == "remote":
            every = option.interval * option.uploaded
            return (
                f"remote_interval = {every}: an upload takes {span(fleet.upload_seconds or 0)}, so one is "
                "there before the next one is due; the death of a machine with ckpt.dir costs the steps "
                "since then"
            )
        if fleet.shared:
            return (
                "no remote: ckpt.dir is on a file system that outlives every machine, so an object store "
                "saves no time here; it is a second copy, should that file system be lost"
            )
        if fleet.upload_seconds is None:
            return (
                "no remote: nothing says how fast the object store is (--bandwidth.remote); without one the "
                "run begins again from step 0 if its machine dies"
            )
        return (
            "no remote: the machine dies so rarely that uploads save no time; but if it dies, the run begins "
            "again from step 0"
        )

    def _waited(self, spares: int) -> float | None:
        """Share of the time that is spent waiting for machines, with so many spares; None: not simulated."""
        servers = self.options[0].option.servers
        same = replace(self.best.option, spares=spares, servers=servers, uploaded=1)
        found = next((one for one in self.options if replace(one.option, uploaded=1) == same), None)
        if found is None:
            return None
        fleet = self.fleet
        working = (fleet.machines + same.servers) * fleet.gpus
        return found.lost["machines"] / (working * fleet.horizon / HOUR)

    def _about_servers(self) -> str:
        others = [
            f"{one.option.servers} would give {one.worth / self.best.worth:.2f} times the steps per GPU"
            for one in self.servers
            if one.option.servers != self.best.option.servers
        ]
        down = self.fleet.restart("server")
        what = f"{counted(self.best.option.servers, 'server')}: one that dies is missing for {span(down)}, "
        what += "and costs speed and no steps"
        return what + (f"; {', '.join(others)}" if others else "")

    def to_json(self) -> dict[str, Any]:
        """For programs. Times are in seconds, sizes in bytes."""
        fleet, rate = self.fleet, self.fleet.losing_rate()
        return {
            "best": self.best.to_json(),
            "now": self.now.to_json() if self.now else None,
            "young_seconds": young(fleet.save_cost, 1 / rate) if rate else None,
            "daly_seconds": daly(fleet.save_cost, 1 / rate) if rate else None,
            "settings": self.settings(),
            "reasons": list(self.reasons()),
            "options": [one.to_json() for one in self.options],
            "servers": [one.to_json() for one in self.servers],
        }


WORDS = {
    "saves": "saves",
    "taken again": "steps that are taken again",
    "restarts": "restarts",
    "machines": "waiting for machines",
    "servers": "servers that are missing",
    "copies": "copies of each step in memory",
}
ADVICE = {
    "saves": "a longer interval, or a faster disk, would lower it",
    "taken again": "saves that are durable sooner, and so closer together, would lower it",
    "restarts": "spare_workers and standby shorten restarts of processes, and spare machines with everything "
    "installed those of machines",
    "machines": "more spares would lower it, at the price of GPUs that wait",
    "servers": "more servers would lower it",
    "copies": "each step waits for the copy of the one before; longer steps hide it",
}


def span(seconds: float) -> str:
    """A length of time in words, also a short one."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def size(number: float) -> str:
    """Bytes in words."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:,.1f} {unit}"
    return f"{number:,.0f} bytes"


def make_plan(
    fleet: FleetConstants,
    *,
    seed: int,
    samples: int,
    spares: Sequence[int] | None = None,
    intervals: Sequence[int] = (),
    interval_now: int | None = None,
    remote_now: bool = False,
) -> FleetPlan:
    """Simulate all options and choose one.

    Args:
        spares: numbers of spare machines to try; None: 0, and those around how many are away at a time.
        intervals: to try; none: those around the formula's.
        interval_now: of the run as it is set up, which is simulated as well. remote_now: whether it uploads.

    Raises:
        ValueError: more deaths than can be simulated.
    """
    kinds = [PlanOption(1, "disk", servers=fleet.servers)]
    if fleet.upload_seconds is not None:
        kinds.append(replace(kinds[0], tier="remote"))
    if fleet.memory is not None:
        kinds += [replace(kind, memory=True) for kind in kinds]
    spares = spares_to_try(fleet) if spares is None else sorted(set(spares))
    if not fleet.rates.get("machine"):
        spares = spares[:1]
    outcomes: list[PlanOutcome] = []
    for kind in kinds:
        most, formula = max(1, int(fleet.horizon / kind.step_seconds(fleet))), best_interval(fleet, kind)
        wanted = intervals or sorted({min(max(1, round(formula * factor)), most) for factor in FACTORS})
        for interval in wanted:
            for count in spares:
                option = _uploading(fleet, replace(kind, interval=interval, spares=count))
                outcomes.append(outcome_of(fleet, option, seed, samples))
    best = _best(fleet, outcomes)
    others: list[PlanOutcome] = []
    if fleet.generate and fleet.servers:
        for servers in sorted(
            {max(fleet.servers - 1, 1), fleet.servers, fleet.servers + 1, fleet.servers + 2}
        ):
            option = _uploading(fleet, replace(best.option, servers=servers))
            others.append(outcome_of(fleet, option, seed, samples))
        best = max(others, key=lambda one: (round(one.worth / EQUAL), -one.option.servers))
    now = None
    if interval_now is not None:
        tier: Tier = "remote" if remote_now and fleet.upload_seconds is not None else "disk"
        option = _uploading(fleet, PlanOption(interval_now, tier, 1, min(spares), fleet.servers))
        now = outcome_of(fleet, option, seed, samples)
    return FleetPlan(fleet, outcomes, others, best, now)


def spares_to_try(fleet: FleetConstants) -> list[int]:
    """Numbers of spare machines: none, one, and up to three standard deviations above those that are away."""
    away = fleet.rate("machine", fleet.servers) * fleet.repair
    return sorted({0, 1, *(math.ceil(away + times * math.sqrt(away)) for times in range(4))})


def _uploading(fleet: FleetConstants, option: PlanOption) -> PlanOption:
    """The option with as many uploads as keep up."""
    return replace(option, uploaded=uploads_every(fleet, option)) if option.tier == "remote" else option


def _best(fleet: FleetConstants, outcomes: Sequence[PlanOutcome]) -> PlanOutcome:
    """The option with the most steps per GPU; of equal ones that with less to pay for, near the formula."""
    most = max(one.worth for one in outcomes)

    def order(one: PlanOutcome) -> tuple[int, bool, bool, float]:
        option = one.option
        away = abs(math.log(option.interval / best_interval(fleet, option)))
        return option.spares, option.tier != "disk", option.memory, away

    return min((one for one in outcomes if one.worth >= most - EQUAL), key=order)
