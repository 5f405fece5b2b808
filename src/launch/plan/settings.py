"""Settings that the user may leave open: a run's length, the interval of ratings, the device's defaults.

A run that is given in epochs gets its steps; `ckpt.metric = "eval/NAME/..."` gets the interval of that
evaluation; and what depends on the device gets its value, with the reason.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from cairn.config.kinds import RunConfig, RunKind
from cairn.config.orchestrator import IN_FLIGHT
from cairn.config.rl import RLConfig
from cairn.config.shared import CommandConfig
from cairn.run.errors import UsageError
from cairn.run.machine import Machine

Config = TypeVar("Config", bound=CommandConfig)

OPEN = (None, "auto")
"""The values that leave a setting open."""
REASONS: Mapping[str, Mapping[Any, str] | str] = {
    "precision.compute": {
        "float32": "the ranks compute on CPUs, few of which are faster in bfloat16",
        "bfloat16": "GPUs multiply bfloat16 several times as fast; master weights stay float32",
    },
    "precision.float32_matmul": {
        "highest": "float32 is computed as float32",
        "high": "what stays float32 beside bfloat16 may use TF32, which rounds less than bfloat16",
    },
    "precision.head": {
        "compute": "that of the computation",
        "float32": "bfloat16 would round logprobs by some 0.01, which ratios of policies inherit",
    },
    "head": {"model": "for servers on CPUs", "float32": "logits as the trainer computes them"},
    "compile": {
        False: "CPU servers start faster without",
        True: "without CUDA graphs, generation on GPUs waits for kernel launches",
    },
    "max_num_seqs": {
        64: "for servers on CPUs",
        256: "beside a trainer, vLLM does not look whether a full batch fits",
        None: "vLLM chooses by the GPU",
    },
    "startup_timeout": {300.0: "for servers on CPUs", 1800.0: "compiling and large models take minutes"},
    "server_timeout": {300.0: "for servers on CPUs", 1800.0: "servers on GPUs may take minutes to start"},
    "sampling.chunk_tokens": {
        512: "a server on CPUs takes a while for more, which a crash would lose",
        8192: "servers on GPUs need few requests to keep busy, and each piece is prefilled anew",
    },
    "max_in_flight": f"{IN_FLIGHT} for each server, whose cache of keys and values holds about as many",
    "tensor_parallel": {1: "a copy of the model on each GPU, or on the CPU"},
    "servers": {1: "one is enough on CPUs, and for trainer and server that take turns"},
}
"""Why a value is chosen, by the setting's name in its role; by its value, where that makes a difference."""


@dataclass(frozen=True)
class Choice:
    """A setting that was left open, by its dotted name. value: None leaves it to vLLM."""

    setting: str
    value: Any
    why: str


def settle(config: Config, machine: Machine, *, gpu_servers: bool) -> tuple[Config, list[Choice]]:
    """The configuration with a value for every setting that was left open, and those choices.

    Depends on nothing but its arguments, and changes no setting that was given.

    Args:
        machine: where the trainer's ranks will run.
        gpu_servers: whether vLLM serves on GPUs, which depends on the build of it that is installed.
    """
    settled = config.settled(gpu=machine.has_gpus, gpu_servers=gpu_servers)
    return settled, list(_choices(config.model_dump(), settled.model_dump()))


def _choices(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Choice]:
    for key, value in before.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _choices(cast(Mapping[str, Any], value), after[key], f"{name}.")
        elif value in OPEN:
            reasons = next((REASONS[own] for own in REASONS if f".{name}".endswith(f".{own}")), None)
            if reasons:
                why = reasons if isinstance(reasons, str) else reasons[after[key]]
                yield Choice(name, after[key], why)


def with_steps(kind: RunKind, config: RunConfig, say: Callable[[str], object]) -> RunConfig:
    """The same with `max_steps` in place of `data.epochs`; the data is opened if that is set.

    Args:
        say: takes sentences for the user about that, and about the end of the learning rate's schedule.

    Raises:
        UsageError: the data can't be read, or is too small for the schedule.
    """
    config = _counted(kind, config, say)
    trainer = kind.trainer(config)
    if words := trainer.scheduler.end_in_words(
        trainer.max_steps, kind.flags("trainer").strip("-") + "scheduler"
    ):
        say(words)
    return config


def _counted(kind: RunKind, config: RunConfig, say: Callable[[str], object]) -> RunConfig:
    records = kind.trainer(config).counted_records
    if records is None or records.epochs is None:
        return config
    from cairn.run.data_sets import BadRecord, load_records

    try:
        count = len(load_records(records))
    except BadRecord as error:
        raise UsageError(f"{records.setting} {error}") from None
    steps = max(math.ceil(records.epochs * count / records.batch_size), 1)
    say(
        f"data.epochs = {records.epochs:g}: max_steps = {steps}, for {count} records and a batch of "
        f"{records.batch_size}"
    )
    config = config.model_copy(
        update={"max_steps": steps, "data": records.model_copy(update={"epochs": None})}
    )
    if problem := kind.trainer(config).scheduler.problem(steps, "scheduler"):
        raise UsageError(problem)
    return config


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
