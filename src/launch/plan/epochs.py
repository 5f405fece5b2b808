"""The length of a run that is given in epochs."""

import math
from collections.abc import Callable

from cairn.config.kinds import RunConfig, RunKind
from cairn.run.errors import UsageError


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
