"""What a trainer is for, as the training loop sees it.

A task says where batches come from, what is minimised, and what goes on around a step. `cairn.trainer.tasks`
lists all tasks; the loop, saving and the ranks' spares know only this class.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cairn.run.batches import Batch
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import Loss, LossInputs
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.trained import Trained
from cairn.trainer.packing import RankBatch
from cairn.trainer.state import Context
from cairn.trainer.step.train_step import Learner


class Earlier(NamedTuple):
    """What was decided for a step before this process began.

    A trainer that died goes through the steps after its checkpoint a second time. What the first pass told
    other roles about such a step still holds.

    done: the step was finished and announced. save: as a checkpoint. last: as the run's last step.
    """

    done: bool = False
    save: bool = False
    last: bool = False


@dataclass(frozen=True)
class Decision:
    """What the ranks agreed on for the step that they have just finished.

    save: the step becomes a checkpoint. last: the run ends here. again: an earlier process of this attempt
    had finished this step before.
    """

    save: bool
    last: bool
    again: bool


class Task(ABC):
    """One kind of training. What has a default below may be left as it is: most tasks need little of it.

    All ranks call every method, in the same order, apart from `next_batch` if `prefetch` is set.
    """

    prefetch: bool = False
    """Whether the batches of the next steps may be asked for, in a thread of their own, while a step runs."""
    parts: tuple[str, ...] = ()
    """What other roles add to each checkpoint."""
    recipe: Mapping[str, Any] = {}
    """What the task adds to the recipe that checkpoints keep."""
    loss: Loss
    """What the policy minimises."""
    learners: Sequence[Learner] = ()
    """Models that learn from each batch beside the policy; each trains one that `models` has made."""
    mini_batches: int = 1
    """The number of parts that a batch is divided into."""
    updates: int = 1
    """The number of updates of the weights in each step, which go through the batch's parts in turn."""

    @abstractmethod
    def __init__(self, config: Any, context: Context):
        """Prepare the first step; `config` is an instance of the configuration class that names the task."""

    @classmethod
    def policy(cls, config: Any, folder: Path, group: RankGroup) -> Trained:
        """The model that learns the task, its weights not yet loaded; all ranks call it."""
        return make_policy(folder, config, group)

    @classmethod
    def models(
        cls, config: Any, folder: Path, group: RankGroup, resume_from: Path | None
    ) -> dict[str, Trained]:
        """The models that are trained beside the policy, by name; all ranks call it.

        Their weights are not yet loaded: that is done from the checkpoint that the run goes on from, or, at
        the start of a run, by `Trained.begin`.

        Args:
            folder: the Hugging Face directory of the policy.
            resume_from: the checkpoint that the run goes on from.
        """
        return {}

    @classmethod  # noqa: B027
    def preload(cls, folder: Path) -> None:
        """In a spare worker: import what the task imports late; `folder` is the model's."""

    @abstractmethod
    def next_batch(self, step: int) -> Batch | None:
        """The batch of optimiser step `step`, the same on every rank; asked for in the order of steps.

        None if the run is asked to stop before the batch is there.
        """

    def earlier(self, step: int) -> Earlier:
        """What was decided for `step` before this process began, as far as this rank knows."""
        return Earlier()

    def prepare(self, batch: RankBatch) -> Mapping[str, float]:
        """Before the first update of a step: add columns that are computed from models.

        Returns:
            Further metrics of the step, the same on all ranks.
        """
        return {}

    def seen(self, inputs: LossInputs) -> None:  # noqa: B027
        """Of each micro-batch, what the policy's loss is about to be computed from; don't change it."""

    def trains_policy(self, step: int) -> bool:
        """Whether the policy is updated in this step; if not, `learners` are, and all else goes on."""
        return True

    def validate(self, step: int) -> Mapping[str, float]:
        """Measure the weights of `step`, or those that the run starts from, on what is never trained on.

        Returns:
            Further metrics of the step, the same on all ranks.
        """
        return {}

    def finished(self) -> str | None:
        """Why the run ends after the present step although more are left; the same on all ranks."""
        return None

    def before_update(self) -> None:  # noqa: B027
        """Return once nobody reads the weights any more: the optimiser is about to change them."""

    def after_step(self, step: int, decision: Decision) -> None:  # noqa: B027
        """The weights are those of `step`, before they are saved."""

    def committed(self, step: int) -> None:  # noqa: B027
        """The checkpoint of `step` is there; in any thread of rank 0."""

    def end(self, step: int, *, save: bool) -> None:  # noqa: B027
        """The run ends at `step` although `after_step` was told otherwise: no batch came before a stop.

        Args:
            save: whether the step is a checkpoint.
        """

    def close(self) -> None:  # noqa: B027
        """Training is over, or has failed."""
