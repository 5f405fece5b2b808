"""Policy versions, from the trainer to the servers."""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cairn.checkpoint.tensors import Stored, write_tensors
from cairn.policy.checksums import checksums, merged, remove_checksums, write_checksums
from cairn.policy.sender import WeightSender
from cairn.run.attempt import Attempt
from cairn.run.directory import RunDirectory
from cairn.run.faults import fault_point
from cairn.run.messages import Probe, write_probe
from cairn.run.versions import WEIGHT_SOURCE
from cairn.trainer.group import RankGroup


class VersionPublisher:
    """Announces each policy version to the orchestrator, with its weights or the address to get them from.

    Args:
        served: the tensors that servers get; with `network`, from this process's memory.
        step: the number of optimiser steps that the weights have seen so far.
        network: whether servers get weights over the network instead of from files.
        make_probe: scores the probe that servers are checked by, on all ranks; None: they are not checked.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        group: RankGroup,
        served: Callable[[], Mapping[str, Stored]],
        step: int,
        *,
        network: bool = False,
        make_probe: Callable[[], Probe] | None = None,
    ):
        self.run = run
        self.attempt = attempt
        self.group = group
        self._served = served
        self._make_probe = make_probe
        if make_probe and step == attempt.start_step:  # servers take this policy from elsewhere
            probe = make_probe()
            if group.rank == 0:
                run.versions.folder(step).mkdir(parents=True, exist_ok=True)
                write_probe(run.versions.folder(step), probe)
        self._sender: WeightSender | None = None
        if network:
            self._sender = WeightSender(served(), rank=group.rank, host=group.address, device=group.device)
            self._ranks = group.gather_objects(self._sender.here)
            self.publish_again(step)

    def before_update(self) -> None:
        """Wait for servers that are reading the weights from memory, which are about to change."""
        if self._sender:
            self._sender.withdraw()

    def publish_again(self, step: int) -> None:
        """Offer the policy of `step` again, which the orchestrator may know already; all ranks call it."""
        if self._sender:
            self._sender.offer(step)
            self.group.barrier()
            folder = self.run.versions.folder(step)
            if self.group.rank == 0 and (folder / WEIGHT_SOURCE).exists():
                with contextlib.suppress(FileNotFoundError):  # nobody needs it any more
                    self._sender.source(step, self._ranks).write(folder)

    def publish(self, step: int, *, save: bool, last: bool) -> None:
        """Write the weights after `step` optimiser steps, then announce them; all ranks call it.

        A version is written once, under a path of its own, and never changed, because servers map its files
        into memory. When all servers have a newer version the orchestrator frees the folder for the trainer
        to write over. With `network` only the address of the weights is written, except for the run's last
        version, which must outlive this process.
        """
        fault_point("publish.begin")
        folder = self.run.versions.folder(step)
        if self._sender:
            self._sender.offer(step)
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
        if self._sender and not last:
            if self.group.rank == 0:
                self._sender.source(step, self._ranks).write(unfinished)
        else:
            (unfinished / WEIGHT_SOURCE).unlink(missing_ok=True)
            self._write(unfinished)
        if self.group.rank == 0:
            if probe:
                write_probe(unfinished, probe)
            os.rename(unfinished, folder)
            fault_point("publish.before_announce")
            self.run.versions.announce(self.attempt, step, save=save, last=last)
            fault_point("publish.announced")

    def _write(self, folder: Path) -> None:
        """Write the weights, and their checksums as they are in memory if servers are checked by them."""
        group, tensors = self.group, self._served()
        with ThreadPoolExecutor(1) as beside:
            sums = beside.submit(checksums, tensors, group.rank) if self._make_probe else None
            write_tensors(folder, tensors, "model", rank=group.rank, barrier=group.barrier)
        if sums is not None:
            mine = sums.result()
            parts = group.gather_objects(mine) if group.world_size > 1 else [mine]
            if group.rank == 0:
                write_checksums(folder, merged(parts))

    def close(self) -> None:
        """Servers get nothing from this process any more."""
        if self._sender:
            self._sender.close()
