"""Sinks: where a run's metrics and events go beside its own files. A new one is a module and an entry here.

A process of its own (`main.py`) follows the run directory while the run goes on, and nobody waits for it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cairn.config.sinks import SinksConfig
from cairn.run import extensions
from cairn.run.errors import UsageError
from cairn.watch.sinks.csv_file import CsvFile
from cairn.watch.sinks.notify import NotifyCommand, Webhook
from cairn.watch.sinks.prometheus import Prometheus
from cairn.watch.sinks.sink import Sink, SinkRun
from cairn.watch.sinks.tensorboard import TensorBoard
from cairn.watch.sinks.trackio import Trackio

__all__ = ["SINKS", "Sink", "SinkRun", "make_sink", "problems_of_sinks", "sinks_of"]

SINKS: Mapping[str, Callable[[Any], Sink]] = {
    "tensorboard": TensorBoard,
    "csv": CsvFile,
    "prometheus": Prometheus,
    "trackio": Trackio,
    "webhook": Webhook,
    "command": NotifyCommand,
}
"""By the name of its section below [sinks], whose settings the class is made of."""
OWN = "sinks.own"


def sinks_of(config: SinksConfig) -> list[str]:
    """The names of the sinks that are on: built-in ones, and those of the user's own."""
    on = [name for name in SINKS if getattr(config, name) is not None]
    return [*on, *(one.name for one in config.own)]


def make_sink(name: str, config: SinksConfig) -> Sink:
    """The sink of that name, which has begun nothing yet.

    Raises:
        BadExtension: it is of the user's own, and can't be found or made.
    """
    if name in SINKS:
        return SINKS[name](getattr(config, name))
    args = next(one.args for one in config.own if one.name == name)
    setting = f"{OWN}.name"
    cls = extensions.load(name, {}, setting, group="cairn.sinks")
    sink = extensions.make(cls, args, f"{OWN}.args")
    if not isinstance(sink, Sink):
        raise extensions.BadExtension(f"{setting} = {name!r}: it is no cairn.watch.sinks.Sink")
    return sink


def problems_of_sinks(config: SinksConfig, run: Path) -> tuple[list[str], list[str]]:
    """What is wrong with the sinks, a line each.

    Args:
        run: the run directory, which may not be there yet.

    Returns:
        Warnings about what does not work at the moment: such a sink tries again while the run goes on. And
        errors: settings that can never work.
    """
    warnings: list[str] = []
    errors: list[str] = []
    for name in sinks_of(config):
        try:
            warnings += [f"warning: {problem}" for problem in make_sink(name, config).problems(run)]
        except UsageError as error:
            errors.append(str(error))
    return warnings, errors
