"""What a plan is made from: the constants of a run and of its machines, and one way to set the run up.

Times are in seconds, sizes in bytes, rates in events a second. Nothing here draws or simulates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Death = Literal["rank", "driver", "launcher", "orchestrator", "server", "machine"]
"""What dies: a rank's process, the trainer's driver, the whole command, the orchestrator, a server's process,
or a machine with all that runs on it."""
LOSING: tuple[Death, ...] = ("rank", "driver", "launcher", "machine")
"""Deaths after which the trainer goes back to a saved step. After the others it keeps what it has."""
Tier = Literal["disk", "remote"]
"""Where steps are: `ckpt.dir` alone; an object store behind it (`ckpt.remote`)."""
HOUR = 3600.0


@dataclass(frozen=True)
class NearCopies:
    """Copies of each step outside the ranks, nearer than a disk.

    cost: by which each delays its step. seconds: until one is whole. survives: the deaths after which a run
    goes on from them.
    """

    cost: float
    seconds: float
    survives: tuple[Death, ...]


@dataclass(frozen=True)
class FleetConstants:
    """Constants of a run on its machines.

    step: of the trainer alone, without waiting for answers. generate: for which the servers generate a
    step's answers; 0 without servers. ahead: whether they do so while the trainer trains
    (`max_off_policy_steps` above 0). servers: how many servers the time `generate` is of; each has a machine.

    save_cost: by which a save delays training: the time that training stands still, and by which it is
    slower meanwhile. save_seconds: until a save is durable. upload_seconds: until a durable step is in the
    object store. memory: copies in memory outside the ranks (`ckpt.memory_interval`), with several
    machines also in that of another one.

    restarts: from a death until the trainer takes a step again, or until a server answers again; without the
    steps that are taken again. repair: until a machine that died can be used again.

    rates: of a single process or machine: `rank` and `server` per machine, `machine` per machine, and the
    others per run. outages: of the object store, each of which lasts `outage_seconds`.

    shared: whether `ckpt.dir` outlives a machine, as a network file system does. horizon: the length of the
    run.
    """

    step: float
    state: float
    machines: int = 1
    gpus: int = 8
    generate: float = 0.0
    ahead: bool = True
    servers: int = 0
    save_cost: float = 0.0
    save_seconds: float = 0.0
    upload_seconds: float | None = None
    memory: NearCopies | None = None
    restarts: Mapping[Death, float] = field(default_factory=dict[Death, float])
    repair: float = 24 * HOUR
    rates: Mapping[Death, float] = field(default_factory=dict[Death, float])
    outages: float = 0.0
    outage_seconds: float = HOUR
    shared: bool = True
    horizon: float = 30 * 24 * HOUR

    def step_seconds(self, serving: int) -> float:
        """Seconds of an undisturbed step with so many servers; infinite if answers are needed and none serve.

        Servers share the answers of a step, so fewer take longer in proportion.
        """
        if not self.generate:
            return self.step
        if not serving:
            return math.inf
        generate = self.generate * max(self.servers, 1) / serving
        return max(self.step, generate) if self.ahead else self.step + generate

    def restart(self, death: Death) -> float:
        """Seconds that a death costs without the steps that are taken again."""
        return self.restarts.get(death, 0.0)

    def rate(self, death: Death, servers: int) -> float:
        """Deaths of a kind in a second of the whole run, with so many servers."""
        count = {"rank": self.machines, "server": servers, "machine": self.machines + servers}
        return self.rates.get(death, 0.0) * count.get(death, 1)

    def losing_rate(self, spared: Sequence[Death] = ()) -> float:
        """Deaths in a second after which the trainer goes back; `spared`: kinds that do not count."""
        return sum(self.rate(death, 0) for death in LOSING if death not in spared)


@dataclass(frozen=True)
class PlanOption:
    """One way to set a run up. interval: steps between two saves. uploaded: every so many saves one is
    uploaded. spares: machines beyond those that are needed. servers: machines that serve. memory: whether
    steps are kept in memory."""

    interval: int
    tier: Tier = "disk"
    uploaded: int = 1
    spares: int = 0
    servers: int = 0
    memory: bool = False

    def near(self, fleet: FleetConstants) -> NearCopies | None:
        """The copies of each step outside the ranks, if there are any."""
        return fleet.memory if self.memory else None

    def step_seconds(self, fleet: FleetConstants, serving: int | None = None) -> float:
        """Seconds of a step, with its copy outside the ranks if there is one."""
        near = self.near(fleet)
        seconds = fleet.step_seconds(self.servers if serving is None else serving)
        return seconds + near.cost if near else seconds

    def period(self, fleet: FleetConstants) -> float:
        """Seconds between two saves of an undisturbed run: a save that falls due while another one is still
        being written waits for it."""
        step = self.step_seconds(fleet)
        return max(self.interval * step + fleet.save_cost, fleet.save_seconds)

    def gpus(self, fleet: FleetConstants) -> int:
        """GPUs that are paid for, those of spare machines included."""
        return (fleet.machines + self.servers + self.spares) * fleet.gpus


def uploads_every(fleet: FleetConstants, option: PlanOption) -> int:
    """Every so many saves one can be uploaded, so that uploads keep up with saves."""
    if fleet.upload_seconds is None:
        return 1
    return max(1, math.ceil(fleet.upload_seconds / option.period(fleet) - 1e-9))


def disk_bytes(fleet: FleetConstants, option: PlanOption, keep: int, waiting: int) -> float:
    """Bytes that `ckpt.dir` needs.

    keep: `ckpt.keep_last`. waiting: `ckpt.remote_max_waiting`, steps that stay until they are uploaded. One
    more is being written.
    """
    return (keep + 1 + (waiting if option.tier == "remote" else 0)) * fleet.state
