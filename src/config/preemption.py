"""Settings for machines that are taken away at short notice."""

from pydantic import Field

from cairn.config.base import BaseConfig


class PreemptionConfig(BaseConfig):
    """Machines that are taken away at short notice, such as spot instances."""

    watch: str | None = None
    """Who tells: aws, gcp, azure, or module:function, called every few seconds (default: only signals)."""
    url: str | None = None
    """Address of the cloud's metadata service, if it is not the usual one."""
    interval: float = Field(default=5, gt=0)
    """Seconds between two questions."""
    seconds: float | None = Field(default=None, gt=0)
    """Time left after SIGTERM or a notice, and at most after one that says less (default: no limit)."""
