"""Settings of sinks: where a run's metrics and events go beside its own files (docs/how-to/sinks.md)."""

import os
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from cairn.config.settings import BaseConfig, refuse_twins

RunEvent = Literal["ended", "failed", "restarted", "diagnosed"]
"""What is told: a run is done or stopped, has failed, a role was started again, something keeps it from
learning."""
FROM_ENVIRONMENT = "env:"
"""Begins a URL that is the value of an environment variable, as secrets are."""


class TensorBoardConfig(BaseConfig):
    """Event files for TensorBoard."""

    dir: str | None = None
    """Folder of the event files (default: tensorboard in the output folder)."""

    @field_validator("dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return _absolute(value)


class CsvConfig(BaseConfig):
    """A table of all metrics: one row per step, one column per metric."""

    file: str | None = None
    """The file (default: metrics.csv in the output folder)."""

    @field_validator("file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return _absolute(value)


class PrometheusConfig(BaseConfig):
    """How the run is, for Prometheus: http://127.0.0.1:PORT/metrics, reached from this machine alone."""

    port: int = Field(default=9470, ge=1, le=65535)
    """Port of the address; each run on a machine needs one of its own."""
    file: str | None = None
    """Also write the same text to this file, such as run.prom in the folder of node_exporter's textfiles."""

    @field_validator("file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return _absolute(value)


class TrackioConfig(BaseConfig):
    """Trackio, a local tracker with W&B's interface; the package trackio must be installed."""

    project: str = "cairn"
    """Trackio's project."""
    name: str | None = None
    """Name of the run in Trackio (default: the name of the output folder, and the run's id)."""


class WebhookConfig(BaseConfig):
    """JSON that is posted to a URL when the run ends, fails, restarts a role, or something is wrong."""

    url: str = ""
    """The URL, or env:NAME for that in an environment variable: config.json holds what is written here."""
    events: list[RunEvent] = ["ended", "failed", "restarted", "diagnosed"]
    """What is told: ended, failed, restarted, diagnosed."""
    timeout: float = Field(default=10, gt=0)
    """Seconds that a request may take; the run never waits for one."""

    @field_validator("url")
    @classmethod
    def _a_url(cls, value: str) -> str:
        if value and not value.startswith(FROM_ENVIRONMENT) and (problem := problem_of_url(value)):
            raise ValueError(problem)
        return value


class NotifyCommandConfig(BaseConfig):
    """A shell command that gets JSON on standard input when the run ends, fails, and so on."""

    run: str = ""
    """The command, such as "jq -r .text | mail -s run me@example.org"."""
    events: list[RunEvent] = ["ended", "failed", "restarted", "diagnosed"]
    """What is told: ended, failed, restarted, diagnosed."""
    timeout: float = Field(default=60, gt=0)
    """Seconds after which the command is killed; the run never waits for it."""


class OwnSinkConfig(BaseConfig):
    """A sink of the user's own."""

    name: str
    """Its class: module:Class, or the name of an installed plug-in."""
    args: dict[str, Any] = {}
    """Arguments of the class's constructor."""


class SinksConfig(BaseConfig):
    """Where metrics and events go beside the run's own files; no sink stops or slows the run."""

    tensorboard: TensorBoardConfig | None = None
    csv: CsvConfig | None = None
    prometheus: PrometheusConfig | None = None
    trackio: TrackioConfig | None = None
    webhook: WebhookConfig | None = None
    command: NotifyCommandConfig | None = None
    own: list[OwnSinkConfig] = []
    """Sinks of your own, as [[sinks.own]] tables with name and args; see docs/how-to/extending.md."""
    grace: float = Field(default=10, ge=0)
    """Seconds that the command waits, once the run is over, for what sinks have not sent yet."""

    @field_validator("own")
    @classmethod
    def _names_of_their_own(cls, value: list[OwnSinkConfig]) -> list[OwnSinkConfig]:
        refuse_twins("sinks", "name", [one.name for one in value])
        if taken := {one.name for one in value} & cls.model_fields.keys():
            raise ValueError(
                f"{min(taken)!r} is a sink of Cairn's own: it is switched on as [sinks.{min(taken)}]"
            )
        return value

    @property
    def are_on(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, name) for name in type(self).model_fields if name != "grace")


def problem_of_url(url: str) -> str | None:
    """Why nothing can be posted to a URL; None if it can. The URL itself may be a secret and is not shown."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "it is no URL"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "it is no URL such as https://example.org/hook"
    if parts.username is not None or parts.password is not None:
        return (
            "it holds credentials, and settings are printed and stored: give env:NAME, and the URL in the "
            "environment variable NAME"
        )
    return None


def _absolute(value: str | None) -> str | None:
    return os.path.abspath(value) if value else value
