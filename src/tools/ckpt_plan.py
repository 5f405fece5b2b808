"""The `ckpt plan` command: how often to save, where, and with how many spare machines and servers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cairn.config.settings import BaseConfig, Size
from cairn.config.shared import LocalRun, ToolCommand
from cairn.run.errors import UsageError
from cairn.run.machine import bytes_of
from cairn.tools.ckpt_output import print_json, say
from cairn.tools.planning.fleet import HOUR, Death, FleetConstants, NearCopies

if TYPE_CHECKING:
    from cairn.tools.planning.measured import MeasuredRun

MEMORY, DISK = 20e9, 2e9
"""Assumed bytes a second at which a machine copies its state into host memory, and writes it."""
COPY = 1.85
"""A save delays training by so many times the time of one copy of the state: 0.118 s where one takes 0.064 s
(docs/results/checkpoints.md)."""
RESTARTS: dict[Death, float] = {
    "rank": 60,
    "driver": 90,
    "launcher": 180,
    "orchestrator": 30,
    "server": 180,
}
"""Assumed seconds of a restart without loading, where the run says nothing; `machine` is as `launcher`."""
PROCESS, MACHINE = 4e-5, 1.2e-4
"""Assumed deaths in an hour of a machine with eight GPUs: together the 419 unexpected interruptions of Llama
3 405B in 54 days on 16,384 GPUs, of which a quarter is taken for a process's, the rest for a machine's."""


class PlannedWork(BaseConfig):
    """What the run computes; a run that is given tells most of it."""

    step_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds of a step of the trainer, without waiting for answers."""
    generate_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds in which all servers together generate a step's answers; 0: there are no servers."""
    ahead: bool | None = None
    """Whether servers generate while the trainer trains (max_off_policy_steps above 0; default: they do)."""
    state: Size | None = None
    """Bytes of a checkpoint, such as 96G: 12 for each parameter in float32 with AdamW."""
    days: float = Field(default=30, gt=0, le=3650)
    """Length of the run that is simulated."""


class PlannedFleet(BaseConfig):
    """The machines of the run."""

    machines: int | None = Field(default=None, ge=1, le=1_000_000)
    """Machines that train."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each machine (default: as many as the run has ranks there, or 8)."""
    servers: int | None = Field(default=None, ge=0, le=1_000_000)
    """Machines that serve, each with one server; generate_seconds is of so many."""
    spares: list[int] | None = None
    """Numbers of spare machines to try (default: none, one, and around how many are away at a time)."""
    repair_hours: float = Field(default=24, ge=0, allow_inf_nan=False)
    """Hours until a machine that died, or one instead of it, can be used."""
    shared_disk: bool | None = None
    """Whether ckpt.dir outlives a machine, as a network file system (default: with several machines)."""


class PlannedFailures(BaseConfig):
    """How often what dies."""

    process: float = Field(default=PROCESS, ge=0, allow_inf_nan=False)
    """Deaths of a rank or a server, on each machine in an hour."""
    machine: float = Field(default=MACHINE, ge=0, allow_inf_nan=False)
    """Deaths of each machine in an hour."""
    driver: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Deaths of the trainer's driver in an hour."""
    launcher: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Deaths of the whole command in an hour, after which somebody starts it again."""
    orchestrator: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Deaths of the orchestrator in an hour."""
    store: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Outages of the object store in an hour."""
    store_hours: float = Field(default=1, ge=0, allow_inf_nan=False)
    """Hours of such an outage."""


class PlannedRestarts(BaseConfig):
    """Seconds from a death until the next step begins, without steps that are taken again."""

    rank: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of a rank's process."""
    driver: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of the trainer's driver."""
    launcher: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of the whole command."""
    orchestrator: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of the orchestrator: how much longer than usual the trainer waits for it."""
    server: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of a server, until it answers with the current weights."""
    machine: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Of a machine, from when another one is there (default: as launcher)."""


class PlannedSaves(BaseConfig):
    """What a save takes; overrides both what a run tells and what bandwidths give."""

    cost: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds by which a save delays training."""
    seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds until a save is durable."""
    upload_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds from then until it is in the object store."""


class PlannedBandwidths(BaseConfig):
    """Bytes a second; each overrides what a run tells."""

    memory: Size | None = None
    """Of each machine's copy from its GPUs to its memory, such as 20G."""
    disk: Size | None = None
    """Of each machine to ckpt.dir."""
    disk_total: Size | None = None
    """Of all machines together to ckpt.dir, where they share a file system."""
    remote: Size | None = None
    """From the one machine that uploads to the object store; without it no uploads are simulated."""
    peer: Size | None = None
    """Of each machine to another one's memory, such as 5G; else only a run with such copies tells it."""


class MakePlan(ToolCommand):
    """Say how often to save, where, and with how many spares and servers, from a run or given constants."""

    command = "ckpt plan"
    positional = ("run",)
    run: LocalRun | None = None
    """An output folder whose constants are measured; the run may be going on (default: all are given)."""
    intervals: list[int] | None = None
    """Intervals in steps to try (default: seven around that of Daly's formula)."""
    all_options: bool = False
    """Print every option, not only those that differ from the best one in one thing."""
    png: Path | None = None
    """Also draw goodput by interval into this file (needs the extra cairn[dash])."""
    seed: int = 0
    """Seed of the deaths that are drawn."""
    samples: int = Field(default=16, ge=1, le=1000)
    """Simulated runs of each option."""
    work: PlannedWork = PlannedWork()
    fleet: PlannedFleet = PlannedFleet()
    failures: PlannedFailures = PlannedFailures()
    restart: PlannedRestarts = PlannedRestarts()
    save: PlannedSaves = PlannedSaves()
    bandwidth: PlannedBandwidths = PlannedBandwidths()

    def execute(self) -> int:
        from cairn.run.view import RunView
        from cairn.tools.planning.choice import make_plan  # imports numpy, which would slow down --help
        from cairn.tools.planning.measured import measure
        from cairn.tools.planning.shown import draw, print_plan

        measured = None
        if self.run is not None:
            view = RunView(self.run)
            if not view.run.exists():
                raise UsageError(
                    f"{self.run}: there is no run here; give an output folder, or --work.step-seconds"
                )
            measured = measure(view)
        found = resolve(self, measured)
        _refuse("--fleet.spares", self.fleet.spares, 0)
        _refuse("--intervals", self.intervals, 1)
        try:
            plan = make_plan(
                found.fleet,
                seed=self.seed,
                samples=self.samples,
                spares=self.fleet.spares,
                intervals=sorted(set(self.intervals or ())),
                interval_now=measured.interval if measured else None,
                remote_now=bool(measured and measured.remote),
            )
        except ValueError as error:
            raise UsageError(f"--failures: {error}; lower them, or --work.days {self.work.days:g}") from None
        if self.png is not None:
            draw(plan, self.png)
        if self.as_json:
            constants = [
                {"name": one.name, "value": one.value, "unit": one.unit, "from": one.source}
                for one in found.rows
            ]
            print_json({"constants": constants, **plan.to_json()})
        else:
            print_plan(
                [(one.name, one.in_words, one.source) for one in found.rows], plan, every=self.all_options
            )
            if self.png is not None:
                say(f"\ndrawn in {self.png}")
        return 0


def _refuse(flag: str, values: list[int] | None, least: int) -> None:
    if values is not None and (not values or min(values) < least):
        raise UsageError(f"{flag} {','.join(map(str, values))}: give one or more numbers of at least {least}")


@dataclass(frozen=True)
class PlanConstant:
    """A constant of a plan. unit: of `value`. source: where it is from."""

    name: str
    value: float
    unit: str
    source: str

    @property
    def in_words(self) -> str:
        """The value for people."""
        if isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:,.4g} {self.unit}".strip()


@dataclass(frozen=True)
class ResolvedConstants:
    """The constants of a plan. rows: all of them, as they are shown."""

    fleet: FleetConstants
    rows: list[PlanConstant]


class _Sources:
    """Chooses each constant from what is given, measured, computed and assumed, and notes which it was."""

    def __init__(self) -> None:
        self.rows: list[PlanConstant] = []

    def take(self, name: str, unit: str, *values: tuple[float | None, str]) -> float:
        """The first value that there is, of (value, source) pairs."""
        value, source = next((value, source) for value, source in values if value is not None)
        self.rows.append(PlanConstant(name, value, unit, source))
        return value


def resolve(plan: MakePlan, run: "MeasuredRun | None") -> ResolvedConstants:
    """The constants: what is given, else what the run tells, else what bandwidths give, else an assumption.

    Raises:
        UsageError: something is missing that can't be assumed.
    """
    work, fleet, save = plan.work, plan.fleet, plan.save
    sources, given, measured = _Sources(), "given", "measured"
    if run is None and work.step_seconds is None:
        raise UsageError("ckpt plan needs --work.step-seconds, or a run that tells how long a step takes")
    if work.state is None and (run is None or run.state is None):
        raise UsageError(
            "--work.state: how large a checkpoint is can't be told"
            + (f", because {plan.run} has none" if run else "")
            + "; give it, such as --work.state 96G: 12 bytes for each parameter in float32 with AdamW"
        )
    step = sources.take("step", "s", (work.step_seconds, given), (run and run.step, measured))
    state = sources.take(
        "state",
        "GB",
        (bytes_of(work.state) / 1e9 if work.state else None, given),
        (run and run.state and run.state / 1e9, measured),
    )
    state *= 1e9
    machines = int(
        sources.take(
            "machines", "", (fleet.machines, given), (run and run.machines, measured), (1, "assumed")
        )
    )
    ranks = run and -(-run.ranks // run.machines)
    gpus = int(
        sources.take("GPUs a machine", "", (fleet.gpus, given), (ranks, "ranks of the run"), (8, "assumed"))
    )
    generate = sources.take(
        "generating",
        "s",
        (work.generate_seconds, given),
        (run and run.generate, measured),
        (0.0, "no servers"),
    )
    servers = 0
    if generate:
        servers = int(
            sources.take(
                "servers", "", (fleet.servers, given), (run and run.servers, measured), (1, "assumed")
            )
        )
        if not servers:
            raise UsageError(
                f"--fleet.servers 0: somebody must generate for --work.generate-seconds {generate:g}"
            )
    elif fleet.servers:
        raise UsageError(
            f"--fleet.servers {fleet.servers}: give --work.generate-seconds, in which they generate a step's "
            "answers"
        )
    ahead = work.ahead if work.ahead is not None else (run.ahead if run else True)
    width = plan.bandwidth
    memory, disk, total, remote, peer = (
        bytes_of(text) if text is not None else None
        for text in (width.memory, width.disk, width.disk_total, width.remote, width.peer)
    )
    for name, value in (
        ("memory", memory),
        ("disk", disk),
        ("disk-total", total),
        ("remote", remote),
        ("peer", peer),
    ):
        if value == 0:
            raise UsageError(f"--bandwidth.{name} 0: give bytes a second above 0, or leave it out")
    share = state / machines
    from_run = run if memory is None else None
    cost = sources.take(
        "a save delays training by",
        "s",
        (save.cost, given),
        (from_run and from_run.save_cost, measured),
        (COPY * share / (memory or MEMORY), "bandwidth.memory" if memory else "assumed: 20 GB/s to memory"),
    )
    from_run = run if disk is None and total is None else None
    written = max(share / (disk or DISK), state / total if total else 0.0)
    seconds = sources.take(
        "a save is durable after",
        "s",
        (save.seconds, given),
        (from_run and from_run.save_seconds, measured),
        (written, "bandwidth.disk" if disk or total else "assumed: 2 GB/s a machine"),
    )
    upload = None
    if save.upload_seconds is not None or remote is not None or (run and run.upload_seconds is not None):
        upload = sources.take(
            "an upload takes",
            "s",
            (save.upload_seconds, given),
            (state / remote if remote else None, "bandwidth.remote"),
            (run and run.upload_seconds, measured),
        )
    copy = (run and run.memory_seconds) or share / (memory or MEMORY)
    near = NearCopies(max(copy - step, 0.0), copy, ("rank", "driver"))
    if machines > 1 and (peer or (run and run.peer_seconds)):
        copied = sources.take(
            "a step is on another machine after",
            "s",
            (copy + share / peer if peer else None, "bandwidth.peer"),
            (run and run.peer_seconds, measured),
        )
        # Until a slow copy is there, no other is made: on average half of its time has passed since the last.
        near = NearCopies(near.cost, copied * (1.0 if copied <= step else 1.5), ("rank", "driver", "machine"))
    restarts = _restarts(plan, run, sources, written, bool(generate))
    rates = _rates(plan.failures, sources, bool(generate))
    shared = fleet.shared_disk if fleet.shared_disk is not None else machines > 1
    where = given if fleet.shared_disk is not None else "assumed"
    sources.rows.append(PlanConstant("ckpt.dir outlives a machine", shared, "", where))
    constants = FleetConstants(
        step=step,
        state=state,
        machines=machines,
        gpus=gpus,
        generate=generate,
        ahead=ahead,
        servers=servers,
        save_cost=cost,
        save_seconds=seconds,
        upload_seconds=upload,
        memory=near if machines == 1 or "machine" in near.survives else None,
        restarts=restarts,
        repair=fleet.repair_hours * HOUR,
        rates=rates,
        outages=plan.failures.store / HOUR,
        outage_seconds=plan.failures.store_hours * HOUR,
        shared=shared,
        horizon=work.days * 24 * HOUR,
    )
    return ResolvedConstants(constants, sources.rows)


def _restarts(
    plan: MakePlan, run: "MeasuredRun | None", sources: _Sources, loading: float, serves: bool
) -> dict[Death, float]:
    found: dict[Death, float] = {}
    kinds: list[Death] = [kind for kind in RESTARTS if serves or kind not in ("orchestrator", "server")]
    for kind in kinds:
        count = run.counts.get(kind, 0) if run else 0
        loads = loading if kind != "orchestrator" else 0.0
        found[kind] = sources.take(
            f"restart, {kind}",
            "s",
            (getattr(plan.restart, kind), "given"),
            (run and run.restarts.get(kind), f"measured: median of {count}"),
            (run and run.starts.get(kind), "measured: the run's own start"),
            (RESTARTS[kind] + loads, "assumed, with loading"),
        )
    found["machine"] = sources.take(
        "restart, machine", "s", (plan.restart.machine, "given"), (found["launcher"], "as launcher")
    )
    return found


def _rates(failures: PlannedFailures, sources: _Sources, serves: bool) -> dict[Death, float]:
    rates: dict[Death, float] = {}
    of_process: tuple[Death, ...] = ("rank", "server") if serves else ("rank",)
    kinds_of: tuple[tuple[str, tuple[Death, ...]], ...] = (
        ("process", of_process),
        ("machine", ("machine",)),
        ("driver", ("driver",)),
        ("launcher", ("launcher",)),
        ("orchestrator", ("orchestrator",) if serves else ()),
    )
    for name, kinds in kinds_of:
        value = getattr(failures, name)
        if kinds and value:
            where = "given" if name in failures.model_fields_set else "assumed: as Llama 3 405B"
            each = "an hour and machine" if name in ("process", "machine") else "an hour"
            sources.take(f"deaths, {name}", each, (value, where))
        for kind in kinds:
            rates[kind] = value / HOUR
    return rates
