"""Policy versions, from the trainer to the servers."""

import os
import shutil
from collections.abc import Callable

from cairn.policy.checksums import remove_checksums
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.faults import fault_point
from cairn.run.messages import Probe, write_probe
from cairn.trainer.group import RankGroup
from cairn.trainer.transports import Transport


class VersionPublisher:
    """Announces each policy version to the orchestrator, with its weights or the address to get them from.

    Args:
        transport: how servers get the weights.
        step: the number of optimiser steps that the weights have seen so far.
        make_probe: scores the probe that servers are checked by, on all ranks; None: they are not checked.
        before_announcing: called on all ranks before the orchestrator may have servers load the policy.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        group: RankGroup,
        transport: Transport,
        step: int,
        make_probe: Callable[[], Probe] | None = None,
        before_announcing: Callable[[], None] = lambda: None,
    ):
        self.run = run
        self.attempt = attempt
        self.group = group
        self._transport = transport
        self._make_probe = make_probe
        self._before_announcing = before_announcing
        if make_probe and step == attempt.start_step:  # servers take this policy from elsewhere
            probe = make_probe()
            if group.rank == 0:
                run.versions.folder(step).mkdir(parents=True, exist_ok=True)
                write_probe(run.versions.folder(step), probe)
        before_announcing()
        self.publish_again(step)

    def before_update(self) -> None:
        """Wait for servers that are reading the weights from memory, which are about to change."""
        self._transport.withdraw()

    def publish_again(self, step: int) -> None:
        """Offer the policy of `step` again, which the orchestrator may know already; all ranks call it."""
        self._transport.offer_again(step, self.run.versions.folder(step))

    def publish(self, step: int, *, save: bool, last: bool) -> None:
        """Write the weights after `step` optimiser steps, then announce them; all ranks call it.

        A version is written once, under a path of its own, and never changed, because servers map its files
        into memory. When all servers have a newer version the orchestrator frees the folder for the trainer
        to write over. The run's last version must outlive this process.
        """
        fault_point("publish.begin")
        folder = self.run.versions.folder(step)
        self._transport.offer(step)
        unfinished = folder.with_name(f".{folder.name}.tmp")
        probe = self._make_probe and self._make_probe()
        if self.group.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(self.run.versions.spare, unfinished)
            except OSError:
                unfinished.mkdir(parents=True)
            remove_checksums(unfinished)  # of what was here before
        self.group.barrier()
        self._transport.fill(unfinished, step, last=last)
        self._before_announcing()
        if self.group.rank == 0:
            if probe:
                write_probe(unfinished, probe)
            os.rename(unfinished, folder)
            fault_point("publish.before_announce")
            self.run.versions.announce(self.attempt, step, save=save, last=last)
            fault_point("publish.announced")

    def announce_end(self, step: int, *, save: bool) -> None:
        """Announce the version of `step`, which the orchestrator may know already, as the run's last."""
        if self.group.rank == 0:
            self.run.versions.path.mkdir(parents=True, exist_ok=True)
            self.run.versions.announce(self.attempt, step, save=save, last=True)

    def close(self) -> None:
        """Servers get nothing from this process any more."""
        self._transport.close()
