"""The place of the uploader, and what is said of uploads at the end of a run."""

from collections.abc import Collection

from cairn.config.kinds import RunConfig
from cairn.launch.jobs.job import BackgroundPlace
from cairn.remote.uploads import RunUploads
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_STOPPED, RoleFailed

NAME = "uploader"


class UploaderPlace(BackgroundPlace):
    """Keeps a process at work that uploads steps (`uploading.run_uploader`)."""

    def __init__(self, run: RunDirectory, config: RunConfig, uploads: RunUploads):
        super().__init__(NAME, run, config)
        self.uploads = uploads

    def newest_done(self) -> int:
        """The newest step that was uploaded."""
        return max(self.uploads.read().steps, default=0)

    def give_up(self, reason: str) -> None:
        """Upload nothing more in this attempt."""
        self.uploads.give_up(reason)
        self.run.history.not_uploaded(self.store.latest() or 0, reason)

    def spare(self, unkept: Collection[int]) -> Collection[int]:
        """The steps that wait to be uploaded."""
        return self.uploads.hold(unkept).kept

    def behind(self) -> bool:
        """Whether as many steps wait as retention spares."""
        return len(self.uploads.waiting()) >= max(1, self.uploads.ckpt.remote_max_waiting)

    def still_wanted(self) -> bool:
        """Whether the newest saved step is not uploaded yet: it alone is worth a stopped run's time."""
        newest = self.store.latest()
        return newest in self.uploads.waiting()

    def conclude(self, code: int) -> int:
        """Say what is uploaded and what is not."""
        remote, missing, noted = self.uploads.ckpt.remote, self.uploads.missing(), self.uploads.read()
        newest = max(noted.steps, default=None)
        there = f"{remote} has step {newest}" if newest else f"{remote} has no step"
        if not missing:
            print(there, flush=True)
            return code
        steps = ", ".join(map(str, missing))
        reason = f" ({noted.given_up})" if noted.given_up else ""
        if code == EXIT_STOPPED or self.interrupted:
            print(f"{there}; not uploaded yet: {steps}{reason}; a resumed run goes on with that", flush=True)
            return EXIT_STOPPED
        raise RoleFailed(
            f"the run is complete, but {there}; not uploaded: {steps}{reason}, see {self.log}; "
            "--ckpt.resume auto tries again"
        )
