"""Policy versions, from the trainer to the servers."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from cairn.config.rl_trainer import TrainerConfig
from cairn.policy.checksums import remove_checksums, write_checksums
from cairn.run import heartbeat
from cairn.run.batches import Sample
from cairn.run.directory import RunDirectory
from cairn.run.faults import fault_point
from cairn.run.messages import ROUNDING, STORED, Attempt, Probe, write_probe
from cairn.run.seeds import derive
from cairn.trainer.backends.backend import Backend
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import fill_rows
from cairn.trainer.publishing.delta_transports import DeltaFileTransport, DeltaNetworkTransport
from cairn.trainer.publishing.policy_store import PolicyStore
from cairn.trainer.publishing.transports import (
    FileTransport,
    Filling,
    NetworkTransport,
    Transport,
    Written,
)
from cairn.trainer.scoring.self_check import ordinary_tokens, uncompiled
from cairn.trainer.scoring.tokens import Scorer

TRANSPORTS: dict[tuple[str, str], type[Transport]] = {
    ("files", "full"): FileTransport,
    ("files", "delta"): DeltaFileTransport,
    ("network", "full"): NetworkTransport,
    ("network", "delta"): DeltaNetworkTransport,
    # With a `PolicyStore`, which gets the same files.
    ("store", "full"): FileTransport,
    ("store", "delta"): DeltaFileTransport,
}
"""By what the settings `weight_transport` and `weight_encoding` have for each."""
CLOSE_SECONDS = 30.0
"""Seconds that `close` waits for a thread that writes."""


class VersionPublisher:
    """Announces each policy version to the orchestrator, with its weights or the address to get them from.

    The weights are written by a thread, while the next step's forward and backward passes run; the next
    update waits until they are written. Versions are written and announced one after the other.

    Args:
        transport: how servers get the weights.
        step: the number of optimiser steps that the weights have seen so far.
        make_probe: scores the probe that servers are checked by, on all ranks; None: they are not checked.
        before_announcing: called on all ranks before the orchestrator may have servers load the policy.
        store: where versions are put for servers that do not see their folders.
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
        store: PolicyStore | None = None,
    ):
        self.run = run
        self.attempt = attempt
        self.group = group
        self._transport = transport
        self._make_probe = make_probe
        self._before_announcing = before_announcing
        self._store = store
        self._ranks = group.rendezvous("publish")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written = threading.Event()
        self._written.set()
        self._given_up = threading.Event()
        self._ending = threading.Lock()
        if step == attempt.start_step:
            self._begin(step)
        before_announcing()
        self.publish_again(step)

    def _begin(self, step: int) -> None:
        """Have servers get the policy that the attempt starts from, which they may not know yet.

        That of a new run is in its model's folder, and is published only to servers that take nothing but
        adapters. That of a checkpoint is in its folder, but is published anew if that holds an adapter, or if
        policies are published in another data type: what servers compute from is then the same whether the
        run was interrupted or not. Through an object store both are published, as servers see no folder.
        """
        began = self.run.versions.beginning(self.attempt) is not None
        if self.group.any_of(began)[0]:  # by an earlier process of this attempt; servers may be reading it
            return
        served = self._transport.served
        resumes = self.attempt.resume_from is not None
        differs = not served.saved or served.rounds or self._store is not None
        publishes = differs if resumes else self.attempt.publishes_first
        probe = self._make_probe and self._make_probe()
        folder = self.run.versions.folder(step)
        if publishes:
            self._fill(folder, self._transport.take(step, last=True), probe)
            if self.group.rank == 0:
                os.rename(_unfinished(folder), folder)
        elif self.group.rank == 0 and probe:
            folder.mkdir(parents=True, exist_ok=True)
            write_probe(folder, probe)
        if self.group.rank == 0:
            self.run.versions.path.mkdir(parents=True, exist_ok=True)
            self.run.versions.begin(self.attempt, published=publishes)

    def before_update(self) -> None:
        """Wait until the weights are written, and no server reads them from memory: they are about to change.

        Raises:
            Exception: whatever has kept the thread from writing them.
        """
        self.check()
        if not self._written.is_set():
            heartbeat.doing("waiting until the newest policy is written")
            self._written.wait()
        self.check()
        self._transport.withdraw()

    def publish_again(self, step: int) -> None:
        """Offer the policy of `step` again, which the orchestrator may know already; all ranks call it."""
        self._transport.offer_again(step, self.run.versions.folder(step))

    def publish(self, step: int, *, save: bool, last: bool) -> None:
        """Begin to write the weights after `step` optimiser steps, to announce them; all ranks call it.

        A version is written once, under a path of its own, and never changed, because servers map its files
        into memory. When all servers have a newer version the orchestrator frees the folder for the trainer
        to write over. The run's last version must outlive this process, so this waits for it.
        """
        fault_point("publish.begin")
        self.finish()
        self._transport.offer(step)
        probe = self._make_probe and self._make_probe()
        filling = self._transport.take(step, last=last)
        self._written.clear()
        self._thread = threading.Thread(
            target=self._run, args=(step, filling, probe, save, last), name="publish", daemon=True
        )
        self._thread.start()
        if last:
            self.finish()

    def check(self) -> None:
        """Raise what has kept a version from being published."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until the newest version is announced; raises as `check`."""
        if self._thread is not None:
            if self._thread.is_alive():
                what = "waiting until the newest policy is announced"
                heartbeat.doing(what, waiting=self._store is not None)  # which may be away
            self._thread.join()
            self._thread = None
        self.check()

    def announce_end(self, step: int, *, save: bool) -> None:
        """Announce the version of `step`, which the orchestrator may know already, as the run's last."""
        self.finish()
        if self.group.rank == 0:
            self.run.versions.path.mkdir(parents=True, exist_ok=True)
            self.run.versions.announce(self.attempt, step, save=save, last=True)

    def close(self) -> None:
        """Servers get nothing from this process any more, and nothing is announced once this returns."""
        with self._ending:
            self._given_up.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._transport.close()

    def _run(self, step: int, filling: Filling, probe: Probe | None, save: bool, last: bool) -> None:
        """The part of publishing that runs in a thread."""
        try:
            if self.group.device.type == "cuda":
                torch.cuda.set_device(self.group.device)
            folder = self.run.versions.folder(step)
            self._fill(folder, filling, probe)
            with self._ending:
                self._check_wanted()
                if self.group.rank == 0:
                    os.rename(_unfinished(folder), folder)
                    fault_point("publish.before_announce")
                    self.run.versions.announce(self.attempt, step, save=save, last=last)
                    fault_point("publish.announced")
        except BaseException as error:
            self._error = error
        finally:
            self._written.set()

    def _fill(self, folder: Path, filling: Filling, probe: Probe | None) -> None:
        """Write everything into the unfinished folder; once rank 0 returns, so have all ranks."""
        unfinished = _unfinished(folder)
        if self.group.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                os.rename(self.run.versions.spare, unfinished)
            except OSError:
                unfinished.mkdir(parents=True)
            remove_checksums(unfinished)  # of what was here before
            (unfinished / STORED).unlink(missing_ok=True)
            filling.begin(unfinished)
        self._ranks.gather("", self._check_wanted)
        written = filling.write(unfinished, self._check_wanted)
        self._written.set()
        self._before_announcing()
        ranks = self._ranks.gather(json.dumps(asdict(written)), self._check_wanted)
        written = Written.by_all([Written(**json.loads(part)) for part in ranks])
        if self.group.rank == 0:
            if written.sums:
                write_checksums(unfinished, written.sums)
            if probe:
                write_probe(unfinished, probe)
        filling.finish(unfinished, written)
        if self._store is not None and self.group.rank == 0:
            self._store.put(unfinished, folder.name, self._check_wanted)

    def _check_wanted(self) -> None:
        if self._given_up.is_set():
            raise InterruptedError("the trainer ends, so the policy is not published")


def _unfinished(folder: Path) -> Path:
    """Where a version is written before it gets its place."""
    return folder.with_name(f".{folder.name}.tmp")


TOKENS = 32


@torch.no_grad()
def make_probe(scorer: Scorer, device: torch.device, config: TrainerConfig) -> Probe:
    """Score the run's probe under the current weights; all ranks call it. Changes no random state."""
    model = scorer.model
    draw = np.random.default_rng(derive(config.seed, "probe"))
    token_ids = draw.choice(np.array(ordinary_tokens(model.config), np.int32), TOKENS)
    micro = fill_rows([[Sample(token_ids, np.ones(TOKENS, bool))]]).to(device)
    was_training = model.training
    try:
        model.eval()
        with uncompiled(model):
            logprobs = scorer.logprobs(micro, 1.0)[0, : TOKENS - 1]
    finally:
        model.train(was_training)
        reshard(model)
    gpu = device.type == "cuda"
    # A server computes from the weights as they were published.
    kinds = (config.precision.settled(gpu=gpu).rounding, config.published_as(gpu=gpu))
    return Probe(token_ids.tolist(), logprobs.tolist(), max(kinds, key=lambda kind: ROUNDING[kind]))


class GpuTurns:
    """When the trainer may use the GPU's memory; by default always, since no server computes on its GPU."""

    def may_train(self, step: int) -> bool:
        """Whether `step` may be trained now, if its batch is there."""
        return True

    def begin(self) -> None:
        """The trainer's turn has begun, and a step is about to be trained."""

    def make_room(self) -> None:
        """Servers may be awake from now on: give back the memory that they may use."""


class SharedGpu(GpuTurns):
    """Servers on the same GPU sleep while a step is trained, and the trainer's backend rests otherwise."""

    def __init__(self, run: RunDirectory, attempt: Attempt, backend: Backend):
        self.run = run
        self.attempt = attempt
        self._backend = backend

    def may_train(self, step: int) -> bool:
        """Once the orchestrator has said that all servers sleep."""
        return self.run.versions.may_train(self.attempt, step)

    def begin(self) -> None:
        """See `Backend.wake`."""
        self._backend.wake()

    def make_room(self) -> None:
        """See `Backend.rest`."""
        self._backend.rest()


def make_sharing(config: TrainerConfig, run: RunDirectory, attempt: Attempt, backend: Backend) -> GpuTurns:
    """As the configuration says."""
    return SharedGpu(run, attempt, backend) if config.colocated else GpuTurns()
