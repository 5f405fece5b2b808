"""How a run is watched over, and what is kept ready for a death."""

from pydantic import Field
from pydantic_config import BaseConfig


class SupervisionConfig(BaseConfig):
    """What every command has that watches over other processes."""

    max_restarts: int = Field(3, ge=0)
    """How often a role that dies is started again without a step finished in between."""
    heartbeat_timeout: float = Field(60, gt=5)
    """Seconds without any sign of life, as of a stopped process, after which a role is replaced."""
    hang_timeout: float = Field(600, gt=5)
    """Seconds that a role may spend on one thing, such as a micro-batch, before it is replaced."""
    standby: bool = False
    """Keep a second trainer driver and orchestrator started, to take over within a second or two."""
