"""What a person sees while a run goes on: a progress bar, or lines where there is no terminal."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cairn.run.directory import RunDirectory
from cairn.run.history import PREFIX, Account, History
from cairn.run.metrics import number


class StepDisplay:
    """Follows metrics.jsonl and history.jsonl; call `update` now and then."""

    def __init__(self, run: RunDirectory, start_step: int, max_steps: int):
        self.metrics = run.metrics
        self._history = History(run.history.path)
        self._history.new_rows()  # those of earlier attempts
        self.max_steps = max_steps
        self.step = start_step
        """The newest step that was shown."""
        self.start_step = start_step
        self.console = Console()
        self._printed_at = 0.0
        self._unprinted: dict | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=max_steps, completed=start_step, values="")

    def __enter__(self) -> "StepDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update(final=True)
        self._progress.stop()

    def update(self, *, final: bool = False) -> None:
        """Show the newest step, if there is a new one, and who was started again."""
        for event in self._history.new_rows():
            if event["event"] == "restart":
                self.console.print(
                    f"{event['role']} {event['reason']} and {event['how']}", markup=False, soft_wrap=True
                )
        rows = [row for row in self.metrics.new_rows() if row["step"] > self.start_step]
        if rows:
            row = self._unprinted = rows[-1]
            self.step = row["step"]
            self._progress.update(
                self._task, description="training", completed=row["step"], values=_values(row)
            )
        row = self._unprinted
        if row and not self.console.is_terminal and (final or time.monotonic() - self._printed_at > 2):
            print(f"step {row['step']}/{self.max_steps}  {_values(row)}", flush=True)
            self._printed_at = time.monotonic()
            self._unprinted = None

    def account(self) -> str:
        """What the run's restarts have cost, in a line."""
        rows = self.metrics.rows()
        account = Account(self._history.path, rows[-1] if rows else None).metrics()
        goodput, restarts, recomputed = (
            account[PREFIX + name] for name in ("goodput", "restarts", "recomputed_steps")
        )
        return f"goodput {goodput:.2f}, {restarts} restarts, {recomputed} steps recomputed"


def _values(row: dict) -> str:
    names = {"loss": "loss", "reward/mean": "reward", "lr": "lr"}
    values = {label: number(row, key) for key, label in names.items()}
    shown = [f"{label} {value:.4g}" for label, value in values.items() if value is not None]
    seconds = number(row, "time/step")
    return "  ".join([*shown, *([] if seconds is None else [f"{seconds:.2f} s/step"])])
