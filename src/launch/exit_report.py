"""How a run ends: the final message, which answers failed, and the launcher's exit code."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cairn.checkpoint.store import CheckpointStore
from cairn.config.kinds import KINDS, RunConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.launch.start import Start, ended_early
from cairn.orchestrator.environments.protocol import kind_of, unscored
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.diagnosis import Finding
from cairn.run.diagnosis.rule import percent
from cairn.run.directory import RunDirectory
from cairn.run.exits import EXIT_LOST, EXIT_STOPPED, RoleFailed
from cairn.run.files import DamagedFile
from cairn.run.jsonlines import Row
from cairn.run.messages import Attempt
from cairn.run.metrics import number
from cairn.run.output import counted

RANK_DIED = "a rank of the trainer died"
REPORTED_IN_FULL = ("given up", "failed answers")
"""Findings that `say_what_failed` reports with their reasons."""


def conclude(run: RunDirectory, attempt: Attempt, code: int | None, step: int, config: RunConfig) -> int:
    """Print how the run ended; returns the launcher's exit code.

    Raises:
        RoleFailed: the run did not end properly.
    """
    store = CheckpointStore(run.checkpoints)
    folder = store.folder(step)
    if code == EXIT_STOPPED:
        print(_saved(run, step, folder), flush=True)
        return EXIT_STOPPED
    if code == EXIT_LOST:
        return conclude_early(run, attempt, step, config, why_unsaved(run))
    missing = None
    early = step < config.max_steps and store.exists(step)
    ended = ended_early(config, Start(store, folder, store.manifest(step))) if early else None
    if step < config.max_steps and not ended:
        missing = f"metrics.jsonl ends with step {step} of {config.max_steps}"
    elif config.ckpt and not store.exists(step):
        missing = f"{folder} does not exist"
    if missing:
        raise RoleFailed(f"the trainer reported no error, but {missing}; see {run.logs / 'trainer.log'}")
    saved = f", saved in {folder}" if config.ckpt else ""
    print(f"done: step {step}{saved}", flush=True)
    if ended:
        print(ended, flush=True)
    print(f"next: {what_next(run, attempt.command, folder if config.ckpt else None)}", flush=True)
    return 0


def what_next(run: RunDirectory, command: str, step: Path | None) -> str:
    """Commands for a run that is done: look at it, serve its last step, export it.

    Args:
        step: the folder of the last step, if it was saved.
    """
    here = shorter(run.path)
    commands = [f"rollouts {here}"] if "orchestrator" in KINDS[command].parts else []
    commands += [f"diagnose {here}", f"dash {here}", f"scripts/plot_run.py {here} --png run.png"]
    if step is not None:
        served = [] if command == "reward" else [f"inference --model.name {shorter(step)}"]
        commands = [f"ckpt list {here}", *commands, *served, f"ckpt export {shorter(step)} FOLDER"]
    return ", ".join(commands)


def after_failure(run: RunDirectory) -> str:
    """Commands that show why a run has failed: where each role was, and what kept it from learning."""
    here = shorter(run.path)
    return f"watch {here}, diagnose {here}, dash {here}"


def shorter(path: Path) -> str:
    """The path as a shell takes it, from the current folder on if it lies in it."""
    inside = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if inside else path))


def say_findings(findings: Sequence[Finding]) -> None:
    """Print once more what kept a run from learning, with the numbers of all its steps."""
    for finding in findings:
        if not finding.rule.startswith(REPORTED_IN_FULL):
            print(f"note: {finding}", flush=True)


def say_what_failed(run: RunDirectory, command: str, config: RunConfig, place: str) -> Callable[[], None]:
    """Print which answers failed and why, at the end of a run that has rollouts.

    Args:
        command: that has started the run.
        place: the run's directory, as a command would name it.

    Returns:
        What raises RoleFailed if too many prompts were given up for the run to count as done.
    """
    kind = KINDS[command]
    if "orchestrator" not in kind.roles:
        return lambda: None

    orchestrator: OrchestratorConfig = kind.of("orchestrator", config)
    failures = tell(run, run.metrics.rows(), orchestrator, place)
    return partial(refuse_too_many, failures, orchestrator)


def why_unsaved(run: RunDirectory) -> str:
    """Why the trainer's ranks have ended in this attempt without a save."""
    for event in reversed(run.history.rows()):
        if event["event"] == "not_saved":
            return event["reason"]
        if event["event"] == "attempt":
            break
    return RANK_DIED


def _saved(run: RunDirectory, step: int, folder: Path) -> str:
    return f"stopped at step {step}, saved in {folder}; --ckpt.resume auto resumes{_reason(run)}"


def _reason(run: RunDirectory) -> str:
    """Why the run was asked to stop, as a sentence of its own; nobody knows whom a signal comes from."""
    reason = run.stop_requested()
    return "" if reason is None else f". The reason of the stop: {reason}"


def conclude_early(run: RunDirectory, attempt: Attempt, step: int, config: RunConfig, why: str) -> int:
    """Print how a run ended that was asked to stop but could not save its newest step; see `conclude`."""
    store = CheckpointStore(run.checkpoints)
    newest = store.latest() or 0
    if newest == step > attempt.start_step:  # killed after its save
        print(_saved(run, step, store.folder(step)), flush=True)
        return EXIT_STOPPED
    if step <= max(newest, attempt.start_step):
        saved = f" Step {newest}, saved in {store.folder(newest)}, is the newest." if newest else ""
        print(
            f"stopped before step {step + 1}: nothing is lost.{saved} "
            f"{'--ckpt.resume auto resumes from there' if newest else 'The same command starts again'}"
            f"{_reason(run)}",
            flush=True,
        )
        return EXIT_STOPPED
    if not config.ckpt:
        raise RoleFailed(
            f"stopped at step {step}, which is lost; with --ckpt it would have been saved{_reason(run)}"
        )
    start = f"from step {newest}" if newest else "from the start"
    print(
        f"stopped, but step {step} could not be saved ({why}): --ckpt.resume auto resumes {start} and "
        f"recomputes the steps after it{_reason(run)}",
        flush=True,
    )
    return EXIT_STOPPED


SHOWN = 8
"""Reasons that are named; the most frequent."""
READ = 256
"""Steps with failures whose rollouts are read, the newest."""
COLUMNS = ("step", "place", "sample", "problem", "environment", "failed")


@dataclass
class Reason:
    """Failures of one kind in one environment."""

    kind: str
    answers: int = 0
    problems: set[int] = field(default_factory=set[int])

    def __str__(self) -> str:
        return f"{self.kind}: {counted(self.answers, 'answer')}, {counted(len(self.problems), 'problem')}"


@dataclass(frozen=True)
class Failures:
    """What failed in a run.

    given_up, prompts: prompts that were given up because answers failed, and all, with these. answers: that
    failed, of prompts that were trained on. unscored: prompts that were left out because the environment has
    nothing to say of their answers. reasons: the most frequent first, of the answers in kept rollouts.
    """

    given_up: int
    prompts: int
    answers: int
    unscored: int
    reasons: Sequence[Reason]

    @property
    def share(self) -> float:
        """Of the prompts that were given up."""
        return self.given_up / self.prompts if self.prompts else 0.0

    def lines(self, place: str) -> list[str]:
        """For the end of a run; `place` is its directory, as a command names it."""
        said: list[str] = []
        if self.given_up:
            said.append(
                f"{self.given_up} of {self.prompts} prompts ({percent(self.share)}) were given up: their "
                "answers failed"
            )
        if self.answers:
            said.append(f"{counted(self.answers, 'failed answer')} left out of other prompts")
        said += [f"  {reason}" for reason in self.reasons[:SHOWN]]
        if more := self.reasons[SHOWN:]:
            said.append(
                f"  and {counted(sum(one.answers for one in more), 'answer')} for {len(more)} more reasons"
            )
        if self.unscored:
            said.append(
                f"{counted(self.unscored, 'prompt')} left out: the environment returned no reward (None)"
            )
        if said:
            said.append(f"`rollouts {place} --failed` lists them")
        return said


def failures_of(run: RunDirectory, rows: Sequence[Row], prompts_per_step: int) -> Failures:
    """What failed in the steps of `rows`, which are all of a run.

    Args:
        prompts_per_step: of steps whose rows do not say how many prompts they have, as those of earlier
            versions.
    """

    def total(name: str) -> int:
        return round(sum(number(row, name) or 0 for row in rows))

    given_up = total("groups/failed") - total("groups/unscored")
    trained = sum(
        number(row, "groups") or prompts_per_step for row in rows if number(row, "reward/mean") is not None
    )
    failing = [row["step"] for row in rows if number(row, "groups/failed") or number(row, "rollouts/failed")]
    return Failures(
        given_up,
        given_up + round(trained),
        total("rollouts/failed") - total("rollouts/unscored"),
        total("groups/unscored"),
        _reasons(KeptRollouts(run.rollouts), failing[-READ:]),
    )


def _reasons(kept: KeptRollouts, steps: Sequence[int]) -> list[Reason]:
    found: dict[tuple[str, str], Reason] = {}
    labels = set[str]()
    for step in steps:
        try:
            rows = kept.read(step, COLUMNS)
        except DamagedFile:
            continue
        for row in rows:
            label, failed = row["environment"] or "", row["failed"]
            labels.add(label)
            if failed is not None and not unscored(failed):
                reason = found.setdefault((label, kind := kind_of(failed)), Reason(kind))
                reason.answers += 1
                reason.problems.add(row["problem"])
    return sorted(found.values(), key=lambda one: (-one.answers, one.kind))


def tell(run: RunDirectory, rows: Sequence[Row], config: OrchestratorConfig, place: str) -> Failures:
    """Print what failed, if anything did; returns that."""
    failures = failures_of(run, rows, config.prompts_per_step)
    for line in failures.lines(place):
        print(line, flush=True)
    return failures


def refuse_too_many(failures: Failures, config: OrchestratorConfig) -> None:
    """Check that few enough prompts were given up for the run to count as done.

    Raises:
        RoleFailed: more than `max_failed_share` of them were.
    """
    if failures.share > config.max_failed_share:
        raise RoleFailed(
            f"the run is complete, but {percent(failures.share)} of its prompts were "
            f"given up, more than orchestrator.max_failed_share ({config.max_failed_share:g}): mend the "
            "environment, or allow more"
        )
