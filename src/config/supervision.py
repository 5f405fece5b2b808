"""How a run is watched over, and what is kept ready for a death."""

from pydantic import Field

from cairn.config.base import BaseConfig


class SupervisionConfig(BaseConfig):
    """How processes are watched, and when they are restarted."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a role, without a step finished in between, before the run fails."""
    heartbeat_timeout: float = Field(default=60, gt=5)
    """Seconds without a heartbeat after which a role is replaced; a stopped process sends none."""
    hang_timeout: float = Field(default=600, gt=5)
    """Seconds in one activity, such as a micro-batch, after which a role is replaced."""
    standby: bool = False
    """Keep a second trainer driver and orchestrator running, to take over within a second or two."""
