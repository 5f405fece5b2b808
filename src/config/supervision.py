"""Settings of supervision: detecting hung processes, and restarting them."""

from pydantic import Field

from cairn.config.base import BaseConfig
from cairn.config.preemption import PreemptionConfig


class SupervisionConfig(BaseConfig):
    """How processes are watched and restarted."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a role without a new finished step before the run fails."""
    heartbeat_timeout: float = Field(default=60, gt=5)
    """Seconds without a heartbeat after which a role is restarted, for example after SIGSTOP."""
    hang_timeout: float = Field(default=600, gt=5)
    """Seconds in one activity, such as a micro-batch, after which a role is restarted."""
    standby: bool = False
    """Keep a second trainer driver and orchestrator ready, to take over within two seconds."""
    preemption: PreemptionConfig | None = None
