"""What is to happen to a run, and when: drawn from a seed, so that it can be had again."""

import random
from dataclasses import dataclass

from cairn.run.faults import POINTS

KILLS = ("launcher", "trainer", "worker", "writer")
DISK = ("ENOSPC", "EIO")
PAUSE_SECONDS = (0.3, 2.5)
MOOD_SECONDS = (0.5, 4.0)


@dataclass(frozen=True)
class Disaster:
    """One accident.

    kind: kill, pause, fault, stop (SIGTERM), power_cut (all processes at once), corrupt (a power cut that
    damages the newest checkpoint), rot (a worker's death that does), wrong_weights, or a mood of the proxy.
    `target`: the role, or the fault, which strikes when its point is reached. Others strike `after` seconds
    after `step` stands in metrics.jsonl; without a step, after the one before.
    """

    kind: str
    target: str = ""
    step: int | None = None
    after: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.kind == "fault":
            return f"fault {self.target}"
        when = "after the one before" if self.step is None else f"after step {self.step}"
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {self.target}".strip() + f"{lasting}, {self.after:.2f} s {when}"


@dataclass(frozen=True)
class Setting:
    """What a plan depends on: the run's last step, whether it is RL, and what may happen to its server."""

    last_step: int
    interval: int
    rl: bool
    groups: int = 1
    """Groups of answers in a step (RL)."""
    proxied: bool = False
    """A proxy is between the run and its server."""
    server: str | None = None
    """How its server may be killed: as `server` (of the harness), as `inference` (of the run), or not."""


def draw(chance: random.Random, setting: Setting) -> list[Disaster]:
    """One to three disasters, in the order in which they strike."""
    steps = sorted(chance.randint(1, setting.last_step - 1) for _ in range(chance.randint(1, 3)))
    plan: list[Disaster] = []
    for step in steps:
        follows = bool(plan) and chance.random() < 0.3  # while the run is still recovering
        when = {"step": None if follows else step, "after": chance.uniform(0, 8.0 if follows else 0.5)}
        plan.append(_draw_one(chance, setting, when))
    # A fault strikes when its point is reached, whatever its place here.
    return plan


def _draw_one(chance: random.Random, setting: Setting, when: dict) -> Disaster:
    kinds = ["kill"] * 4 + ["fault"] * 4 + ["pause", "stop", "power_cut", "corrupt", "rot"]
    if setting.rl:
        kinds += ["kill", "fault"]
    if setting.proxied:
        kinds += ["slow", "errors", "drops", "silent", "wrong_weights"]
    kind = chance.choice(kinds)
    if kind == "fault":
        return Disaster("fault", _draw_fault(chance, setting))
    if kind == "kill":
        server = [setting.server] if setting.server else []
        roles = [*KILLS, *(["orchestrator", "orchestrator", *server] if setting.rl else [])]
        return Disaster("kill", chance.choice(roles), **when)
    if kind in ("pause", "stop"):
        roles = ["trainer", "worker", *(["orchestrator"] if setting.rl else [])]
        extra = [setting.server or "worker"] if kind == "pause" else ["launcher"]
        seconds = chance.uniform(*PAUSE_SECONDS) if kind == "pause" else 0.0
        return Disaster(kind, chance.choice(roles + extra), **when, seconds=seconds)
    if kind in ("slow", "errors", "drops", "silent"):
        return Disaster(kind, **when, seconds=chance.uniform(*MOOD_SECONDS))
    return Disaster(kind, **when)


def _draw_fault(chance: random.Random, setting: Setting) -> str:
    """A fault point that such a run reaches, and the time at which it strikes there."""
    saves = max(setting.last_step // setting.interval, 1)
    times = {"save": saves, "commit": saves, "retention": max(saves - 2, 1)}
    if setting.rl:
        times |= dict.fromkeys(("trainer", "publish", "orchestrator"), setting.last_step - 1)
    point = chance.choice([point for point in POINTS if point.partition(".")[0] in times])
    most = times[point.partition(".")[0]]
    if point == "save.write":
        most *= 4  # blocks
    elif point == "orchestrator.finished_group":
        most *= setting.groups
    elif point == "orchestrator.before_part":
        most = saves
    on_disk = not point.startswith(("trainer.", "publish.")) and point not in ("save.begin", "save.copy")
    action = chance.choice(DISK) if on_disk and chance.random() < 0.3 else "kill"
    return f"{point}:{action}@{chance.randint(1, most)}"
