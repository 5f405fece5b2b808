"""The guard against spikes: which updates of the weights are left out.

What it goes by is in each checkpoint, so a resumed run decides as the run would have without the stop.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from cairn.config.optimizer import SpikeConfig
from cairn.run.errors import CairnError

logger = logging.getLogger(__name__)


class TrainingDiverged(CairnError):
    """The gradient is not finite, or spikes again and again; the weights are as before the step."""


@dataclass
class SpikeStatistics:
    """What the guard knows: running means of applied updates, how many these are, and what was skipped.

    skipped: since the run's start. in_a_row: skipped ones since the last applied one.
    """

    grad_norm: float = 0.0
    loss: float = 0.0
    applied: int = 0
    skipped: int = 0
    in_a_row: int = 0


class SpikeGuard:
    """Judges each update by its metrics, which are the same on all ranks."""

    def __init__(self, config: SpikeConfig):
        """Begin without knowledge."""
        self._config = config
        self._seen = SpikeStatistics()

    def saved(self) -> dict[str, float] | None:
        """What a checkpoint holds; None if the guard is off."""
        return None if self._config.on_spike == "off" else asdict(self._seen)

    def restore(self, saved: Mapping[str, float] | None) -> None:
        """Go on from what a checkpoint holds; from nothing if its run had no guard."""
        numbers = dict(saved or {})
        whole = {name: int(numbers[name]) for name in ("applied", "skipped", "in_a_row") if name in numbers}
        self._seen = SpikeStatistics(**{**numbers, **whole})

    def spike_in(self, metrics: Mapping[str, float], what: str, known: str | None = None) -> str | None:
        """Why an update is to be left out; None if it is not.

        Args:
            metrics: `loss` and `grad_norm` of the policy, if it is trained, and NAME/grad_norm of others.
            what: names the update in messages.
            known: why the update was left out when it was made before; then it is again.

        Raises:
            TrainingDiverged: a gradient is not finite and must not be left out, or too many in a row spike.
        """
        reason = self._reason(metrics) or known
        seen, config = self._seen, self._config
        if reason is None:
            if config.on_spike != "off" and "grad_norm" in metrics:
                self._learn(metrics)
            return None
        if config.on_spike == "off" or (seen.applied < config.warmup and known is None):
            raise TrainingDiverged(f"{what}: {reason}; lower optimizer.lr, or look at the batch")
        if seen.in_a_row == config.max_in_a_row:
            raise TrainingDiverged(
                f"{what}: {reason}, after {seen.in_a_row} updates in a row that were left out "
                "(spike.max_in_a_row); lower optimizer.lr, or raise spike.grad_norm"
            )
        seen.skipped += 1
        seen.in_a_row += 1
        logger.warning("%s: %s; the update is left out, as %d before it", what, reason, seen.skipped - 1)
        return reason

    def _reason(self, metrics: Mapping[str, float]) -> str | None:
        for name, norm in metrics.items():
            whose, _, last = name.rpartition("/")
            if last == "grad_norm" and not math.isfinite(norm):
                return f"the gradient's norm{f' of the {whose}' if whose else ''} is {norm}"
        if self._config.on_spike == "off" or self._seen.applied < self._config.warmup:
            return None
        limits = {"grad_norm": self._config.grad_norm, "loss": self._config.loss}
        for name, limit in limits.items():
            mean = getattr(self._seen, name)
            if limit is not None and name in metrics and not metrics[name] <= limit * mean:
                words = name.replace("grad_norm", "gradient's norm")
                return f"the {words} is {metrics[name]:.4g}, and {mean:.4g} in the running mean"
        return None

    def _learn(self, metrics: Mapping[str, float]) -> None:
        seen, decay = self._seen, self._config.decay if self._seen.applied else 0.0
        for name in ("grad_norm", "loss"):
            setattr(seen, name, decay * getattr(seen, name) + (1 - decay) * metrics[name])
        seen.applied += 1
        seen.in_a_row = 0
