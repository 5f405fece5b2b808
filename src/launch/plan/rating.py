"""Steps that are kept by what an evaluation says of them: `ckpt.metric = "eval/NAME/..."`."""

import math

from cairn.config.kinds import RunConfig
from cairn.config.rl import RLConfig
from cairn.run.errors import UsageError


def with_ratings(config: RunConfig) -> RunConfig:
    """The configuration with the interval of the evaluation that rates steps, if one does.

    Raises:
        UsageError: there is no such evaluation, or it evaluates no step that is saved.
    """
    ckpt = config.ckpt
    if ckpt is not None and ckpt.metric is not None and ckpt.metric.startswith("validation/"):
        _check_validation(config, ckpt.metric, ckpt.interval)
    if ckpt is None or ckpt.rated_by is None:
        return config
    flag = f"--ckpt.metric {ckpt.metric}"
    name = ckpt.rated_by.split("/")[1]
    if isinstance(config, RLConfig):
        asked = {one.name: one for one in config.orchestrator.eval}
        if name not in asked:
            known = f"the run has {', '.join(sorted(asked))}" if asked else "there are no [[eval]] tables"
            raise UsageError(f"{flag}: there is no evaluation {name!r}; {known}")
        interval = asked[name].interval
        if ckpt.metric_interval not in (None, interval):
            raise UsageError(
                f"--ckpt.metric-interval {ckpt.metric_interval}: the evaluation {name!r} has interval = "
                f"{interval}; leave it out"
            )
        key = (ckpt.metric or "").rpartition("/")[2]
        samples = asked[name].samples
        if key.startswith("pass@") and key not in {f"pass@{2**n}" for n in range(samples.bit_length())}:
            raise UsageError(
                f"{flag}: with samples = {samples}, the evaluation gives pass@1, pass@2, ... pass@"
                f"{2 ** (samples.bit_length() - 1)}"
            )
    elif config.task == "rl" and ckpt.metric_interval is not None:
        interval = ckpt.metric_interval
    elif config.task == "rl":
        raise UsageError(
            f"{flag}: the trainer does not know the orchestrator's evaluations: give the interval of "
            f"{name!r}, --ckpt.metric-interval"
        )
    else:
        raise UsageError(f"{flag}: only RL runs evaluate; sft has metrics of training, such as loss")
    _check_both(config, flag, ckpt.interval, interval, "evaluated")
    return config.sharing(ckpt=ckpt.model_copy(update={"metric_interval": interval}))


def _check_both(config: RunConfig, flag: str, saved: int | None, measured: int, how: str) -> None:
    """Check that some step is saved and measured.

    Raises:
        UsageError: none is.
    """
    both = math.lcm(measured, saved or config.max_steps)
    if both > config.max_steps:
        raise UsageError(
            f"{flag}: steps are saved at multiples of {saved or config.max_steps}, and {how} at "
            f"multiples of {measured}, so no step before {both} is both; make one interval a multiple of the "
            "other"
        )


def _check_validation(config: RunConfig, metric: str, saved: int | None) -> None:
    """Check that a metric such as validation/NAME/loss is there for steps that are saved.

    Raises:
        UsageError: there is no such validation or number, or no step that is saved is validated.
    """
    flag, intervals = f"--ckpt.metric {metric}", config.validated_at
    if metric.count("/") != 2 or metric.rpartition("/")[2] not in ("loss", "perplexity"):
        raise UsageError(f"{flag}: it must be validation/NAME/loss or validation/NAME/perplexity")
    name = metric.split("/")[1]
    if name not in intervals:
        known = f"the run has {', '.join(sorted(intervals))}" if intervals else "the run has none"
        raise UsageError(f"{flag}: there is no validation {name!r}; {known}")
    _check_both(config, flag, saved, intervals[name], "validated")
