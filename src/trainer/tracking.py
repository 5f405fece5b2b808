"""Where a step's metrics go: metrics.jsonl always, Weights & Biases if asked."""

from typing import Any

from cairn.config.trainer import TrainerBase
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.history import Account


class Tracker:
    """Writes each step's row; only rank 0 has one."""

    def __init__(self, config: TrainerBase, run: RunDirectory, attempt: Attempt):
        self.log_file = run.metrics
        rows = run.metrics.rows()
        self.account = Account(run.history.path, rows[-1] if rows else None)
        self.wandb = None
        if config.wandb:
            import wandb

            self.wandb = wandb.init(
                project=config.wandb.project,
                name=config.wandb.name or run.path.name,
                mode=config.wandb.mode,
                dir=run.path,
                id=attempt.run_id,
                resume="allow",
                config=config.model_dump(),
            )

    def log(self, row: dict[str, Any]) -> None:
        """Record the metrics of one step, which the row names, and how the run fares."""
        row = {**row, **self.account.after_step(row["time/wait"], row["time/step"])}
        self.log_file.append(row)
        if self.wandb:
            self.wandb.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])

    def close(self) -> None:
        """Finish what is still on its way."""
        if self.wandb:
            self.wandb.finish()
            self.wandb = None
