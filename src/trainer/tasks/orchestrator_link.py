"""The other side of RL training: where batches come from, and where policies go."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.rl_trainer import TrainerConfig
from cairn.run.batches import Batch, batch_path, open_batch
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.faults import fault_point
from cairn.run.messages import Attempt
from cairn.run.waiting import wait_for
from cairn.trainer.publishing.policy_store import PolicyStore
from cairn.trainer.publishing.publisher import (
    TRANSPORTS,
    GpuTurns,
    VersionPublisher,
    make_probe,
    make_sharing,
)
from cairn.trainer.publishing.transports import Served
from cairn.trainer.state import Context
from cairn.trainer.tasks.task import Decision, Earlier


class OrchestratorLink(ABC):
    """What the RL task exchanges with an orchestrator, or with what stands for one.

    All ranks call every method, in the same order.
    """

    parts: tuple[str, ...] = ()
    """What other roles add to each checkpoint."""

    @abstractmethod
    def next_batch(self, step: int) -> Batch | None:
        """The batch of optimiser step `step`; None if the run is asked to stop before it is there."""

    def earlier(self, step: int) -> Earlier:
        """What a process that this one replaces has announced of `step`."""
        return Earlier()

    def before_update(self) -> None:  # noqa: B027
        """Return once nobody reads the weights any more: the optimiser is about to change them."""

    def after_step(self, step: int, decision: Decision) -> None:  # noqa: B027
        """The weights are those of `step`, before they are saved."""

    def committed(self, step: int) -> None:  # noqa: B027
        """The checkpoint of `step` is there; in any thread of rank 0."""

    def end(self, step: int, *, save: bool) -> None:  # noqa: B027
        """The run ends at `step`, although `after_step` was told otherwise."""

    def close(self) -> None:  # noqa: B027
        """Training is over, or has failed."""


class LiveOrchestrator(OrchestratorLink):
    """An orchestrator ships batches, and has servers load each policy that is published."""

    parts = ("orchestrator",)

    def __init__(self, config: TrainerConfig, context: Context):
        """Publish the policy that training starts from."""
        run, attempt, state = context.run, context.attempt, context.state
        self._run = run
        self._keep_bytes = config.keep_batches_gb * 1e9
        self._training_state = config.ckpt is not None and config.ckpt.training_state
        sharing = make_sharing(config, run, attempt, state.backend)
        self._replay = Replay(run, attempt)
        make_transport = TRANSPORTS[config.weight_transport, config.weight_encoding]
        dtype = DTYPES_IN_SETTINGS[config.published_as(gpu=state.group.device.type == "cuda")]
        policy = state.policy
        served = Served(
            policy.served,
            dtypes=policy.served_as(dtype),
            beside=policy.served_with(dtype),
            checked=config.self_check,
            saved=policy.saves_served,
            stem=policy.served_stem,
        )
        self._publisher = VersionPublisher(
            run,
            attempt,
            state.group,
            make_transport(state.group, served, host=config.weight_host),
            state.progress.step,
            partial(make_probe, state.scorer, state.group.device, config) if config.self_check else None,
            before_announcing=sharing.make_room,
            store=None if config.policies_url is None else PolicyStore(config.policies_url, run.versions),
        )
        self._batches = ShippedBatches(
            run, attempt, config.batch_timeout, sharing, check=self._publisher.check
        )

    def next_batch(self, step: int) -> Batch | None:
        return self._batches.next_batch(step)

    def earlier(self, step: int) -> Earlier:
        return self._replay.earlier(step)

    def before_update(self) -> None:
        self._publisher.before_update()

    def after_step(self, step: int, decision: Decision) -> None:
        """Publish the policy of `step`; if the orchestrator knows it already, offer it again."""
        if decision.again:
            self._publisher.publish_again(step)
        else:
            save = decision.save and self._training_state
            self._publisher.publish(step, save=save, last=decision.last)

    def committed(self, step: int) -> None:
        """Batches through `step` are needless, or kept for replays."""
        self._run.forget_batches(step, keep_bytes=self._keep_bytes)

    def end(self, step: int, *, save: bool) -> None:
        """Announce the policy of `step` once more, as the run's last."""
        self._publisher.announce_end(step, save=save and self._training_state)

    def close(self) -> None:
        self._publisher.close()


class Replay:
    """The steps whose policies an earlier process of this attempt had announced to the orchestrator."""

    def __init__(self, run: RunDirectory, attempt: Attempt):
        """Look which these are; nothing has been announced by this process yet."""
        self.run = run
        self.attempt = attempt
        self._newest = max(run.versions.all_announced(attempt), default=attempt.start_step)

    def earlier(self, step: int) -> Earlier:
        """What was decided for `step`: a later version's announcement may be all that is left of it."""
        if step > self._newest:
            return Earlier()
        message = self.run.versions.announced(self.attempt, step)
        return Earlier(True, message.save, message.last) if message else Earlier(done=True)


class ShippedBatches:
    """The orchestrator's batch files, in the order of steps."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        timeout: float,
        sharing: GpuTurns | None = None,
        check: Callable[[], object] = lambda: None,
    ):
        """Wait `timeout` seconds for each batch, or until `check`, which is called often, raises."""
        self.run = run
        self.attempt = attempt
        self.timeout = timeout
        self.sharing = sharing or GpuTurns()
        self.check = check

    def next_batch(self, step: int) -> Batch | None:
        """Wait until the batch of optimiser step `step` is there and may be trained on.

        None if the run is asked to stop first.

        Raises:
            DeadlinePassed: the orchestrator did not ship it in time.
        """

        def look() -> Batch | Literal["stop"] | None:
            self.check()
            may_train = self.sharing.may_train(step)
            batch = self.run.open_batch(self.attempt, step) if may_train else None
            return "stop" if batch is None and self.run.stop_requested() else batch

        batch = wait_for(
            look,
            seconds=self.timeout,
            whom=f"the orchestrator's batch {step}",
            setting="--trainer.batch-timeout",
        )
        if batch == "stop":
            return None
        self.sharing.begin()
        fault_point("trainer.batch_read")
        return batch


class RecordedBatches(OrchestratorLink):
    """Batches that another run has kept, one a step; policies go nowhere."""

    def __init__(self, config: TrainerConfig, context: Context):
        self._folder = Path(config.recorded_batches or "")
        self._run = context.run

    def next_batch(self, step: int) -> Batch | None:
        """That of the step, whichever run it is of.

        Raises:
            UsageError: it is not there.
            BadBatch: it can't be trained on.
        """
        if self._run.stop_requested():
            return None
        path = batch_path(self._folder, step)
        try:
            return open_batch(path)
        except FileNotFoundError:
            raise UsageError(
                f"--recorded-batches {self._folder}: has no {path.name}; a run keeps its batches with "
                "--trainer.keep-batches-gb"
            ) from None


def make_link(config: TrainerConfig, context: Context) -> OrchestratorLink:
    """As the configuration says; all ranks call it."""
    kind = LiveOrchestrator if config.recorded_batches is None else RecordedBatches
    return kind(config, context)
