"""The place of the exporter, and what is said of exports at the end of a run."""

from collections.abc import Collection

from cairn.config.kinds import RunConfig
from cairn.formats.transfer.export_folder import RunExports
from cairn.launch.jobs.export import what_is_missing
from cairn.launch.jobs.job import BackgroundPlace
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_STOPPED, RoleFailed

NAME = "exporter"


class ExporterPlace(BackgroundPlace):
    """Keeps a process at work that exports steps (`exporting.run_exporter`)."""

    def __init__(self, run: RunDirectory, config: RunConfig, made: RunExports):
        super().__init__(NAME, run, config)
        self.made = made

    def newest_done(self) -> int:
        """The newest step that is exported."""
        done = set(self.made.due(self.store.steps())) - set(self.made.missing(self.store))
        return max(done, default=0)

    def give_up(self, reason: str) -> None:
        """Export nothing more in this attempt."""
        self.made.exports.give_up(self.made.attempt, reason)
        waiting = self.made.missing(self.store)
        self.run.history.not_exported(min(waiting, default=self.made.last), reason)

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that wait to be exported."""
        return self.made.hold(self.store, unkept).kept

    def behind(self) -> bool:
        """Whether as many steps wait as retention spares."""
        return len(self.made.waiting(self.store)) >= max(1, self.made.max_waiting)

    def conclude(self, code: int) -> int:
        """Say what is exported, what is not, and what never will be."""
        exports = self.made.exports
        if gone := self._gone():
            print(
                f"warning: never exported, since retention deleted it first: {_steps(gone)}; a larger "
                "--ckpt.export.max-waiting keeps more of what waits",
                flush=True,
            )
        if code == EXIT_STOPPED:
            if waiting := self.made.waiting(self.store):
                print(f"not exported yet: {_steps(waiting)}; a resumed run goes on with that", flush=True)
            return code
        missing = what_is_missing(self.made, self.store)
        if missing and self.interrupted:
            print(
                f"stopped before all was exported to {exports.folder}: {missing}; --ckpt.resume auto goes on",
                flush=True,
            )
            return EXIT_STOPPED
        if missing:
            raise RoleFailed(
                f"the run is complete, but {exports.folder} is not: {missing}; --ckpt.resume auto tries again"
            )
        print(f"exported to {exports.folder}", flush=True)
        return code

    def _gone(self) -> list[int]:
        """The steps that failed in this attempt, by history.jsonl, and can't be exported any more."""
        failed: set[int] = set()
        for event in self.run.history.rows():
            if event["event"] == "attempt":
                failed = set()
            elif event["event"] == "not_exported":
                failed.add(event["step"])
        there = {step for step in failed if self.made.exports.folder_of(step).exists()}
        newest = self.store.latest() or 0
        return sorted(step for step in failed - there - set(self.store.steps()) if step < newest)


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
