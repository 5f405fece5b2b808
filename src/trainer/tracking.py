"""Where a step's metrics go: metrics.jsonl always, Weights & Biases if asked."""

from collections.abc import Mapping
from typing import Any

from cairn.config.trainer import TrainerBase
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.history import Account, starting
from cairn.run.messages import Attempt
from cairn.run.metrics import CHAIN, chained
from cairn.run.signals import stop_signals_blocked


def check_login(config: TrainerBase) -> None:
    """See that W&B can be logged in to, by the means that it uses itself: environment, netrc, its settings.

    Workers of a running Ray cluster may have credentials that this machine does not, so they are not checked.

    Raises:
        UsageError: there is no key, or it is malformed.
    """
    if config.wandb is None or config.wandb.mode == "offline" or config.ray.address:
        return
    import wandb
    from wandb.errors import AuthenticationError
    from wandb.sdk.lib import wbauth

    settings = wandb.setup().settings
    host = wbauth.HostUrl(settings.base_url, app_url=settings.app_url)
    try:
        login = wbauth.authenticate_session(host=host, source="cairn", prompt=False, update_session=False)
        problem = None if login else f"there is no API key for {host}"
    except AuthenticationError as error:
        problem = str(error).rstrip(".")
    if problem:
        raise UsageError(
            f"[wandb]: {problem}; set WANDB_API_KEY, run `uv run wandb login`, or give --wandb.mode offline "
            "(in rl --trainer.wandb.mode offline)"
        )


class Tracker:
    """Takes each step's row; this class itself forgets it, on ranks whose rows are those of rank 0."""

    def chain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The column by which the row hangs together with the one before it."""
        return {}

    def log(self, row: dict[str, Any]) -> None:
        """Record the metrics of one step, which the row names."""

    def close(self) -> None:
        """Finish what is still on its way."""


def make_tracker(config: TrainerBase, run: RunDirectory, attempt: Attempt, rank: int) -> Tracker:
    """What writes the run's metrics down on rank 0; the other ranks' rows are the same, and go nowhere."""
    return RunTracker(config, run, attempt) if rank == 0 else Tracker()


class RunTracker(Tracker):
    """Writes each row to metrics.jsonl, and to W&B if the run is to."""

    def __init__(self, config: TrainerBase, run: RunDirectory, attempt: Attempt):
        self.log_file = run.metrics
        rows = run.metrics.rows()
        self._last: Mapping[str, Any] | None = rows[-1] if rows else None
        self._is_first = True
        """Whether no step of this process is logged yet."""
        self.account = Account(run.history.path, rows[-1] if rows else None)
        self.wandb = None
        if config.wandb:
            import wandb

            with stop_signals_blocked():  # its service is still needed after them
                self.wandb = wandb.init(
                    project=config.wandb.project,
                    name=config.wandb.name or run.path.name,
                    mode=config.wandb.mode,
                    dir=run.path,
                    id=attempt.run_id,
                    resume="allow",
                    config=config.model_dump(),
                )

    def chain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        follows = self._last is not None and self._last["step"] == row["step"] - 1
        return {CHAIN: chained(row, self._last if follows else None)}

    def log(self, row: dict[str, Any]) -> None:
        """Record the metrics of one step, which the row names, and how the run fares."""
        self._last = row
        start = starting(row) if self._is_first else 0.0
        self._is_first = False
        costs = self.account.after_step(row["time/wait"] - start, row["time/step"])
        row = {**row, **({"time/start": start} if start else {}), **costs}
        self.log_file.append(row)
        if self.wandb:
            self.wandb.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()
            self.wandb = None
