"""Compares the goodput that `ckpt plan` predicts with that of real runs under kills (docs/results/plan.md).

Runs are killed at moments that a seed draws. The simulation is given the moments of a run's kills, and
constants that the command's own code has measured: saves in a run without kills, restarts in the other runs,
and steps in the run's own stretches that no kill disturbed, since a machine that is shared is not always as
fast. It says what share of the time is useful. All have spares, and nobody is killed before these are ready:
other restarts are imports, whose time depends on who else uses the machine.

`--write` puts the result into docs/results/plan.json, and the table of it into docs/results/plan.md.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common

from cairn.run.history import WorkClock
from cairn.run.metrics import number
from cairn.run.seeds import derive
from cairn.run.view import RunView
from cairn.tools.chaos.bench import make_task
from cairn.tools.chaos.plan import Disaster
from cairn.tools.chaos.run import ChaosRun
from cairn.tools.planning.fleet import Death, FleetConstants, PlanOption
from cairn.tools.planning.measured import MeasuredRun, deaths, measure
from cairn.tools.planning.simulation import RunEvent, SimulatedRun

PACED = """
import time

from cairn.trainer.losses.likelihood import Likelihood


class Paced(Likelihood):
    def __call__(self, inputs):
        time.sleep({pace})
        return super().__call__(inputs)
"""
PACE = 0.5
"""Seconds for which each step waits, as for a GPU: its length does not depend on who else uses the CPUs."""
TASK = (
    *("sft", "@", "configs/reverse_text/sft.toml", "--ckpt.keep-last", "2"),
    *("--loss.type", "paced_loss:Paced"),
)
SPARES = ("--spare-workers", "1", "--standby")
SETTLED = 10.0
"""Seconds after a kill in which roles.json may still call a spare ready that has taken over."""
POINTS = 0.03
"""By which prediction and measurement may differ."""
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
BEGIN, END = "<!-- plan.json: begin -->", "<!-- plan.json: end -->"


@dataclass(frozen=True)
class Scenario:
    """A run that is killed. victims: who is, drawn each time. gap: mean seconds between kills."""

    name: str
    interval: int
    victims: tuple[str, ...]
    gap: float


SCENARIOS = (
    Scenario("the driver, with a standby; saves every 10 steps", 10, ("trainer",), 35),
    Scenario(
        "a rank with a spare worker, or the driver; saves every 40 steps", 40, ("worker", "trainer"), 35
    ),
    Scenario("a rank with a spare worker; saves every 20 steps", 20, ("worker",), 30),
)


def main() -> None:
    """Measure constants, kill runs, and print one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="of each run that is killed")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of kills")
    parser.add_argument("--scenarios", type=int, nargs="*", default=list(range(len(SCENARIOS))))
    parser.add_argument(
        "--folder", type=Path, help="for the runs, of which those that are whole are not made again"
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--write", action="store_true", help="write docs/results/plan.json and its table")
    arguments = parser.parse_args()
    say = (lambda *_: None) if arguments.json else (lambda *text: print(*text, flush=True))
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="plan_"))
    try:
        result = compare(folder, arguments.steps, arguments.seed, arguments.scenarios, say)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if arguments.write:
        write(result)
    print(json.dumps(result))


def compare(folder: Path, steps: int, seed: int, scenarios: list[int], say: Any) -> dict[str, Any]:
    """All runs, and what is predicted of those that are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paced_loss.py").write_text(PACED.format(pace=PACE))
    os.environ["PYTHONPATH"] = str(folder.absolute())
    calm = measure(run(folder / "calm_before", 45, 10, [], ()))
    say(f"without kills: a step takes {calm.step:.3f} s, a save delays by {calm.save_cost:.3f} s")
    views = dict[int, RunView]()
    for place in scenarios:
        scenario = SCENARIOS[place]
        draw = random.Random(derive(seed, "plan benchmark", place))
        count = int(3 * steps / scenario.gap)  # more than there is time for
        plan = [
            Disaster(
                "kill",
                draw.choice(scenario.victims),
                1 if not n else None,
                draw.uniform(0.7, 1.3) * scenario.gap,
            )
            for n in range(count)
        ]
        views[place] = run(folder / f"killed_{place}", steps, scenario.interval, plan, SPARES)
    measured = {place: measure(view) for place, view in views.items()}
    rows = []
    for place, view in views.items():
        scenario = SCENARIOS[place]
        rows.append(row(scenario, view, calm, elsewhere(place, measured)))
        say(json.dumps(rows[-1]))
    return {
        "made_with": common.made_with(),
        "seed": seed,
        "steps": steps,
        "constants": {
            "step": calm.step,
            "save_cost": calm.save_cost,
            "save_seconds": calm.save_seconds,
            "restarts": [[of.restarts, of.counts] for of in measured.values()],
        },
        "within": POINTS,
        "runs": rows,
        "all_within": all(abs(one["predicted"] - one["measured"]) <= POINTS for one in rows),
    }


class ReadyRun(ChaosRun):
    """Kills nobody before the spares that were asked for are ready, so that each restart is of one kind."""

    def _is_due(self, disaster: Disaster) -> bool:
        if not super()._is_due(disaster):
            return False
        roles = self.run.current_roles() or {}
        waiting = [name for name, role in roles.items() if role.state == "waiting"]
        wanted = ("trainer_spare", "trainer_standby") if "--standby" in self.task.command else ()
        ready = all(any(name.startswith(want) for name in waiting) for want in wanted)
        return ready and time.monotonic() > self._struck_at + SETTLED


def elsewhere(place: int, measured: Mapping[int, MeasuredRun]) -> dict[Death, float]:
    """Restarts as they were measured in the other runs, medians."""
    found: dict[Death, list[float]] = {}
    for other, of in measured.items():
        if other != place:
            for death, seconds in of.restarts.items():
                found.setdefault(death, []).append(seconds)
    return {death: statistics.median(seconds) for death, seconds in found.items()}


def run(folder: Path, steps: int, interval: int, plan: list[Disaster], flags: tuple[str, ...]) -> RunView:
    """A run of the chaos harness, with these disasters, or the one that is there if it is whole.

    Raises:
        RuntimeError: it broke a promise.
    """
    view = RunView(folder / "run")
    if folder.exists():
        if (rows := view.metrics()) and rows[-1]["step"] == steps:
            return view
        shutil.rmtree(folder)
    command = [*TASK, "--max-steps", str(steps), "--ckpt.interval", str(interval), *flags]
    result = ReadyRun(make_task(command), plan, folder, random.Random(0)).go()
    if result.violations:
        raise RuntimeError(f"{folder}: {result.violations}")
    return RunView(folder / "run")


def row(
    scenario: Scenario, view: RunView, calm: MeasuredRun, restarts: Mapping[Death, float]
) -> dict[str, Any]:
    """What was measured and predicted of a run that was killed, from its first step to its last."""
    rows, history = view.metrics(), view.history()
    clock = WorkClock(history)
    begin, end = (number(one, "run/wall_seconds") or 0.0 for one in (rows[0], rows[-1]))
    kills = deaths(history, view.spans(), clock)
    events = [RunEvent(moment - begin, death) for moment, death in kills if begin < moment < end]
    own = measure(view).step
    fleet = FleetConstants(
        step=own,
        state=0.0,
        save_cost=calm.save_cost or 0.0,
        save_seconds=calm.save_seconds or 0.0,
        restarts=restarts,
        horizon=end - begin,
    )
    option, begun = PlanOption(scenario.interval), float(rows[0]["step"])
    simulated = SimulatedRun(fleet, option, steps=begun).go(events)
    with_calm_steps = SimulatedRun(replace(fleet, step=calm.step), option, steps=begun).go(events)
    taken = int(rows[-1]["step"]) - begun
    again = (number(rows[-1], "run/recomputed_steps") or 0.0) - (
        number(rows[0], "run/recomputed_steps") or 0.0
    )
    return {
        "name": scenario.name,
        "interval": scenario.interval,
        "kills": len(events),
        "seconds": end - begin,
        "step": own,
        "measured": taken * own / (end - begin),
        "restarts": restarts,
        "predicted": (simulated.steps - begun) * own / (end - begin),
        "measured_by_calm_steps": taken * calm.step / (end - begin),
        "predicted_by_calm_steps": (with_calm_steps.steps - begun) * calm.step / (end - begin),
        "taken_again": again,
        "predicted_taken_again": simulated.lost["taken again"] / own,
        "events": [[event.time, event.kind] for event in events],
        "replaced_by": [event["how"] for event in history if event["event"] == "restart"],
    }


def table(result: dict[str, Any]) -> list[str]:
    """The runs as a table of the page."""
    lines = [
        "| what was killed | kills | seconds between them | measured | predicted | difference, points "
        "| steps taken again | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in result["runs"]:
        gap = one["seconds"] / max(one["kills"], 1)
        points = 100 * (one["predicted"] - one["measured"])
        lines.append(
            f"| {one['name']} | {one['kills']} | {gap:.0f} | {one['measured']:.3f} | {one['predicted']:.3f} "
            f"| {points:+.1f} | {one['taken_again']:.0f} | {one['predicted_taken_again']:.0f} |"
        )
    return lines


def write(result: dict[str, Any]) -> None:
    """Write the result, and its table into the page between the two marks."""
    (RESULTS / "plan.json").write_text(json.dumps(result, indent=1) + "\n")
    page = RESULTS / "plan.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + BEGIN, "", *table(result), "", END + after]))


if __name__ == "__main__":
    main()
