"""How patient a pool of servers is, and how it gives them weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolSettings:
    """Durations are in seconds."""

    timeout: float = 600.0
    """Longest wait for one answer of one server."""
    retry_for: float = 600.0
    """How long after its first failure a request goes on to be tried, and how long `serve` waits for any
    server."""
    look_every: float = 1.0
    """Between two looks at a healthy server, and at the servers file."""
    hangs_after: float = 30.0
    """Without a sign of life, until a server's requests go to another one, if there is any."""
    keep_cache: bool = False
    """Whether answers in flight go on from the keys and values that earlier weights have made; otherwise a
    server recomputes them with every update, as it would a prompt of that length."""
