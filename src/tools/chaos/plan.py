"""Plans: which disasters strike a run, and when; drawn from a seed, so that they can be repeated."""

import random
from dataclasses import dataclass

from cairn.run.faults import ON_EACH_RANK, POINTS

DISK = ("ENOSPC", "EIO")
PAUSE_SECONDS = (0.3, 2.5)
MOOD_SECONDS = (0.5, 4.0)
DISK_SECONDS = (0.5, 6.0)
SIGNALS = ("TERM", "TERM", "INT", "HUP")
SMALL_FILES = {
    "metrics": "metrics.jsonl",
    "history": "history.jsonl",
    "roles": "roles.json",
    "config": "config.json",
    "heartbeats": "heartbeats/*.json",
    "stop": "stop.json",
    "uploads": "checkpoints/.remote/*",
    "versions": "weights/v*.json",
    "batches": "batches/*.safetensors",
    "ledger": "ledger.sqlite*",
    "evals": "evals.jsonl",
    "reference": "reference/*/*",
}
"""Files of a run that a power cut may damage, by their names in plans."""
OF_RL = ("versions", "batches", "ledger")
OF_REMOTE = ("uploads",)
OF_VALIDATION = ("evals",)
OF_REFERENCE = ("reference",)
OF_BRANCHES = ("kill", "fault", "pause", "stop", "power_cut", "slow", "errors", "drops", "silent")
"""Kinds of disasters that strike a run with branches: those that damage no file of a single one."""
OF_LARGE_FILES = ("remote.sent_part",)
"""Fault points that the small models of these runs never reach."""


@dataclass(frozen=True)
class Disaster:
    """One disaster.

    kind: kill, pause, fault, stop (`signal` to a role, to the launcher's process group or to all processes),
    power_cut (kills all processes), corrupt (a power cut that damages the newest checkpoint), torn (one that
    damages a small file), rot (a worker's death that damages the newest checkpoint), machine_lost (the run
    directory is deleted, and the run goes on in an empty folder), full (disk), read_only (folder),
    wrong_weights, rival (another run on the same server), or a mood of the proxy. `target`: the role, the
    file, the fault, or how a machine is lost: `power` kills all processes, then the directory is deleted;
    `disk` deletes the directory `seconds` before it kills the processes. A fault strikes when its point is
    reached; other disasters strike `after` seconds after `step` appears in metrics.jsonl or, without a step,
    after the previous disaster.
    """

    kind: str
    target: str = ""
    step: int | None = None
    after: float = 0.0
    seconds: float = 0.0
    signal: str = ""

    def __str__(self) -> str:
        if self.kind == "fault":
            return f"fault {self.target}"
        when = "after the one before" if self.step is None else f"after step {self.step}"
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        what = " ".join(filter(None, (self.kind, self.signal and f"SIG{self.signal}", self.target)))
        return f"{what}{lasting}, {self.after:.2f} s {when}"


@dataclass(frozen=True)
class ChaosSettings:
    """What a plan depends on: the last step, whether the run is RL, and what may happen to its server."""

    last_step: int
    interval: int
    rl: bool
    groups: int = 1
    """Groups of answers in a step (RL)."""
    proxied: bool = False
    """Whether there is a proxy between the run and its server."""
    server: str | None = None
    """The server that may be killed: `server` (the harness's), `inference` (the run's own), or None."""
    ranks: int = 1
    """Ranks of the trainer."""
    own_disk: bool = False
    """Whether the run's folder may be on a small file system, which can be filled."""
    remote: bool = False
    """Whether steps are also uploaded, so that the machine may be lost."""
    validated: bool = False
    """Whether held-out records are evaluated."""
    reference: bool = False
    """Whether the logprobs of a reference are computed once and kept in the run's folder."""
    in_memory: int | None = None
    """Steps from one that is kept in memory to the next; None: none is kept."""
    turn_steps: int | None = None
    """Steps of a branch that its processes take in a turn; None: there are no branches."""
    records: int = 0
    """How often it is recorded which branches go on."""


def draw(chance: random.Random, setting: ChaosSettings) -> list[Disaster]:
    """One to three disasters, in the order in which they strike."""
    steps = sorted(chance.randint(1, setting.last_step - 1) for _ in range(chance.randint(1, 3)))
    plan: list[Disaster] = []
    for step in steps:
        follows = bool(plan) and chance.random() < 0.3  # strikes while the run is recovering
        when = {"step": None if follows else step, "after": chance.uniform(0, 8.0 if follows else 0.5)}
        plan.append(_draw_one(chance, setting, when))
    # The order does not matter for a fault: it strikes when its point is reached.
    return plan


def _draw_one(chance: random.Random, setting: ChaosSettings, when: dict) -> Disaster:
    kinds = (
        ["kill"] * 4
        + ["fault"] * 4
        + ["pause", "stop", "stop", "power_cut", "corrupt", "torn", "torn", "rot"]
    )
    kinds += ["read_only", *(["full"] if setting.own_disk else [])]
    if setting.rl:
        kinds += ["kill", "fault"]
    if setting.proxied:
        kinds += ["slow", "errors", "drops", "silent", "wrong_weights", "rival"]
    if setting.remote:
        kinds += ["machine_lost"] * 5 + ["kill", "fault"]
    if setting.turn_steps:
        kinds = [kind for kind in kinds if kind in OF_BRANCHES]
    kind = chance.choice(kinds)
    trainers = ["trainer", "worker", *(["worker1"] if setting.ranks > 1 else [])]
    orchestrator = ["orchestrator"] if setting.rl else []
    if kind == "fault":
        return Disaster("fault", _draw_fault(chance, setting))
    if kind == "kill":
        server = [setting.server] if setting.server and setting.rl else []
        uploader = ["uploader"] if setting.remote else []
        roles = ["launcher", "writer", *trainers, *orchestrator * 2, *server, *uploader]
        return Disaster("kill", chance.choice(roles), **when)
    if kind == "pause":
        roles = [*trainers, *orchestrator, "launcher", setting.server or "worker"]
        return Disaster(kind, chance.choice(roles), **when, seconds=chance.uniform(*PAUSE_SECONDS))
    if kind == "stop":
        roles = ["launcher", "group", "everyone", *trainers, *orchestrator]
        return Disaster(kind, chance.choice(roles), **when, signal=chance.choice(SIGNALS))
    if kind == "torn":
        there = {
            **dict.fromkeys(OF_RL, setting.rl),
            **dict.fromkeys(OF_REMOTE, setting.remote),
            **dict.fromkeys(OF_VALIDATION, setting.validated),
            **dict.fromkeys(OF_REFERENCE, setting.reference),
        }
        files = [name for name in SMALL_FILES if there.get(name, True)]
        return Disaster(kind, chance.choice(files), **when)
    if kind == "machine_lost":
        first = chance.choice(("power", "disk"))
        seconds = chance.uniform(*PAUSE_SECONDS) if first == "disk" else 0.0
        return Disaster(kind, first, **when, seconds=seconds)
    if kind in ("slow", "errors", "drops", "silent", "rival"):
        return Disaster(kind, **when, seconds=chance.uniform(*MOOD_SECONDS))
    if kind in ("full", "read_only"):
        return Disaster(kind, **when, seconds=chance.uniform(*DISK_SECONDS))
    return Disaster(kind, **when)


def _draw_fault(chance: random.Random, setting: ChaosSettings) -> str:
    """A fault point that such a run reaches, and on which pass it strikes."""
    last_step = setting.turn_steps or setting.last_step  # of a process
    saves = max(last_step // setting.interval, 1)
    times = {"save": saves, "commit": saves, "retention": max(saves - 2, 1)}
    if setting.rl:
        times |= dict.fromkeys(("trainer", "publish", "orchestrator"), max(last_step - 1, 1))
    if setting.records:
        times["branches"] = setting.records
    if setting.remote:
        times["remote"] = saves
    if setting.reference:
        times["reference"] = 1
    if setting.in_memory:
        times["memory"] = max((setting.last_step - 1) // setting.in_memory, 1)
    points = [point for point in POINTS if point.partition(".")[0] in times and point not in OF_LARGE_FILES]
    point = chance.choice(points)
    most = times[point.partition(".")[0]]
    if point == "save.write":
        most *= 4  # blocks
    elif point == "remote.sent_file":
        most *= 5  # files
    elif point == "orchestrator.finished_group":
        most *= setting.groups
    elif point == "orchestrator.before_part":
        most = saves
    on_disk = not point.startswith(("trainer.", "publish.", "remote.", "memory.")) and point not in (
        "save.begin",
        "save.copy",
    )
    action = chance.choice(DISK) if on_disk and chance.random() < 0.3 else "kill"
    count = chance.randint(1, most)
    rank = f"#{chance.randrange(setting.ranks)}" if setting.ranks > 1 and point in ON_EACH_RANK else ""
    return f"{point}:{action}@{count}{rank}"
