"""The promises that a run must keep, whatever has struck it, read from its directory when it is over."""

from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError, load_manifest
from cairn.checkpoint.step_folder import verify
from cairn.run.errors import UsageError
from cairn.run.view import RunView
from cairn.tools.audit import audit
from cairn.tools.chaos.task import Result, RunWatch
from cairn.tools.replay.again import ReplayFailed
from cairn.tools.replay.recorded import RecordedRun
from cairn.tools.replay.replay import replay

MEASURED = ("time/", "run/", "servers/", "weights/", "rollouts/shared")
"""Prefixes of metrics that measure time or recomputation, or tell which branch has sampled: these differ."""


class Promises:
    """Checks one run; what is broken goes into the violations of `watch.result`.

    Args:
        path: the run directory.
        watch: has followed it.
        last_step: at which it has to have ended.
        interval: steps between two saves.
        calm: the result of the undisturbed run; None: this one is.
        ended_early: whether `last_step` is not the last one of its settings.
        evaluated: whether it has all results of validations.
    """

    def __init__(
        self,
        path: Path,
        watch: RunWatch,
        last_step: int,
        interval: int,
        calm: Result | None,
        *,
        ended_early: bool = False,
        evaluated: bool = True,
    ):
        self.path = path
        self.watch = watch
        self.result = watch.result
        self.last_step = last_step
        self.interval = interval
        self.calm = calm
        self.ended_early = ended_early
        self.evaluated = evaluated

    def check(self) -> None:
        """Read what the run has come to, and check it."""
        result, view = self.result, RunView(self.path)
        result.rows = list(view.metrics())
        result.evals = [
            {key: value for key, value in row.items() if key not in ("run_id", "branch")}
            for row in view.evals()
        ]
        seen = self.watch.seen_at
        if {1, self.last_step} <= seen.keys():
            result.seconds = seen[self.last_step] - seen[1]
        self._check_audit()
        self._check_checkpoints()
        self._check_against_calm()
        self._check_recomputed()

    def _check_audit(self) -> None:
        try:
            report = audit(self.path)
        except (CheckpointError, UsageError) as error:
            self.result.violations.append(f"audit: {error}")
            return
        self.result.violations += [f"audit: {v.kind}: {v.what}: {v.rows}" for v in report.violations]
        if not self.ended_early and sum(epoch.waiting for epoch in report.epochs):
            self.result.violations.append("audit: prompts are still waiting at the end")

    def _check_checkpoints(self) -> None:
        store = self.watch.store
        for step in store.steps():
            try:
                verify(store.folder(step))
            except CheckpointError as error:
                if step not in self.watch.damaged:
                    self.result.violations.append(f"verify: {error}")
        latest = store.latest()
        if latest != self.last_step:
            self.result.violations.append(f"the newest checkpoint is step {latest}")
        else:
            files = load_manifest(store.folder(self.last_step)).tensor_files
            self.result.tensors = {name: entry.model_dump() for name, entry in files.items()}

    def _check_against_calm(self) -> None:
        """Check that metrics and weights equal those of the undisturbed run, bit for bit."""
        if (calm := self.calm) is None:
            return
        ours, theirs = _unmeasured(self.result.rows), _unmeasured(calm.rows)
        if [row["step"] for row in ours] != [row["step"] for row in theirs]:
            self.result.violations.append(f"metrics have the steps {[row['step'] for row in ours]}")
        for row, other in zip(ours, theirs, strict=False):
            if different := {k for k in row.keys() | other.keys() if row.get(k) != other.get(k)}:
                shown = {key: [row.get(key), other.get(key)] for key in sorted(different)}
                self.result.violations.append(f"metrics of step {row['step']} differ: {shown}")
                break
        if self.evaluated and self.result.evals != calm.evals:
            self.result.violations.append(
                f"results of validations differ: {self.result.evals} instead of {calm.evals}"
            )
        if self.result.tensors != calm.tensors:
            names = [n for n, entry in calm.tensors.items() if self.result.tensors.get(n) != entry]
            self.result.violations.append(f"the last step's tensors differ in {names}")

    def _check_recomputed(self) -> None:
        """Check that restarts recomputed at most the steps since the save before the newest."""
        interval = self.interval
        most = interval * (3 if self.watch.fell_back else 2)
        self.result.violations += [
            f"{steps} steps were recomputed, but saves are due every {interval} steps"
            for steps in self.result.recomputed
            if steps > most
        ]

    def check_by_replay(self) -> None:
        """Check that the steps before the last checkpoint give it, when they are taken again."""
        run = RecordedRun.local(self.path)
        try:
            stretch = run.stretch(None, None)
            found = replay(run, stretch, work_dir=self.result.folder)
        except (CheckpointError, UsageError, ReplayFailed) as error:
            self.result.violations.append(f"replay: {error}")
            return
        if found.ok:
            self.result.proved = len(stretch.steps)
        else:
            self.result.violations.append("replay: " + "\n".join(found.lines(3)))


def _unmeasured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]
