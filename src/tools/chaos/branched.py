"""A run with branches, struck by disasters: each branch has to keep the promises of a run."""

import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cairn.run.branches import Branches
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError
from cairn.run.view import RunView
from cairn.tools.chaos.plan import Disaster
from cairn.tools.chaos.promises import Promises
from cairn.tools.chaos.run import ChaosRun
from cairn.tools.chaos.task import ChaosTask, Result, RunWatch


class BranchesWatch(RunWatch):
    """Follows all branches as one run, whose steps are those of all of them together.

    each: follows each of them, with a result of its own, by their names.
    """

    def __init__(self, branches: Branches, names: tuple[str, ...], result: Result):
        super().__init__(RunView(branches.path).run, result)
        runs = {name: RunView(branches.run(name)).run for name in names}
        self.each = {name: RunWatch(run, Result(result.folder)) for name, run in runs.items()}

    def look(self) -> None:
        """Check each branch once."""
        for watch in self.each.values():
            watch.look()
        self.step = sum(watch.step for watch in self.each.values())
        for number in range(1, self.step + 1):
            self.seen_at.setdefault(number, time.monotonic())


class BranchedRun(ChaosRun):
    """The command `rl --branch` from its first start to its end. Disasters strike the branch at work."""

    def __init__(
        self,
        task: ChaosTask,
        plan: list[Disaster],
        folder: Path,
        chance: random.Random,
        *,
        prove: bool = False,
    ):
        super().__init__(task, plan, folder, chance, prove=prove)
        self.branches = Branches(self.path)
        self.watch = self._each = BranchesWatch(self.branches, task.branches, self.result)

    @property
    def at_work(self) -> RunDirectory:
        """Of the branch whose roles were written down last."""
        runs = [RunView(self.branches.run(name)).run for name in self.task.branches]
        begun = [run for run in runs if run.roles.exists()]
        return max(begun, key=lambda run: run.roles.stat().st_mtime, default=runs[0])

    def _conclude(self) -> None:
        result, calm, seen = self.result, self.task.calm, self.watch.seen_at
        result.missed += [*self.pending, *self.faults]
        try:
            states = self.branches.states()
        except CairnError as error:
            result.violations.append(f"branches: {error}")
            return
        for name, watch in self._each.each.items():
            end = states.ended.get(name)
            promises = Promises(
                self.branches.run(name),
                watch,
                end.step if end else states.max_steps,
                self.task.setting.interval,
                calm and calm.branches.get(name),
                ended_early=end is not None,
            )
            promises.check()
            if self.prove and end is None and not watch.result.violations:
                promises.check_by_replay()
            result.branches[name] = watch.result
            result.violations += [f"branch {name}: {what}" for what in watch.result.violations]
            result.recomputed += watch.result.recomputed
            result.proved += watch.result.proved
        result.seconds = max(seen.values()) - seen[1] if seen else 0.0
        result.choices = [asdict(choice) for choice in states.choices]
        if calm is not None and result.choices != calm.choices:
            result.violations.append(f"kept were {_kept(result)} instead of {_kept(calm)}")


def _kept(result: Result) -> dict[int, Any]:
    """The branches that were kept, by the step of the choice."""
    return {choice["step"]: choice["kept"] for choice in result.choices}
