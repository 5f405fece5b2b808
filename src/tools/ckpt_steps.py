"""The commands `ckpt list`, `ckpt prune` and `ckpt copy`: the steps of a run, and what keeps each of them."""

import sys
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.retention import Spare, add_spared, prune, reasons_to_keep
from cairn.checkpoint.step_jobs import StepJob, spares_of
from cairn.checkpoint.store import CheckpointStore, OneStep
from cairn.checkpoint.tiers import Tier
from cairn.config.ckpt import CkptConfig
from cairn.config.shared import Place, ToolCommand
from cairn.formats.transfer.export_folder import run_exports
from cairn.remote.uploads import RunUploads
from cairn.run.errors import CairnError, UsageError
from cairn.run.output import progress_bars
from cairn.tools.ckpt_output import print_json, print_list, print_prune, say
from cairn.tools.ckpt_places import (
    attempt_id,
    local,
    name_of,
    receive,
    refuse_empty,
    run_at,
    run_config,
    step_in,
    tier_at,
    tier_for_copies,
)


class ListSteps(ToolCommand):
    """List the steps of a run."""

    command = "ckpt list"
    positional = ("path",)
    path: Place
    """An output folder, its checkpoints folder, or a step_N folder, or the URL of one in an object store."""
    metric: str | None = None
    """Show this metric as well, such as eval/NAME/reward."""

    def execute(self) -> int:
        tier, step = tier_at(self.path)
        rows = tier.rows(self.metric, _kept_by(self.path, tier))
        refuse_empty(tier, rows)
        if step is not None:
            rows = [row for row in rows if row["step"] == step]
            if not rows:
                raise CheckpointError(f"{tier}: there is no step {step}")
        known = sorted({name for row in rows for name in row.get("metrics", {})})
        if self.metric and self.metric not in known:
            raise UsageError(
                f"--metric {self.metric}: no step has it; there are {', '.join(known) or 'none'}"
            )
        if self.as_json:
            print_json(rows)
            return 0
        print_list(rows, self.metric)
        return 0


def _kept_by(given: Path | str, tier: Tier) -> dict[int, list[str]]:
    """Why the run's rules keep each step, as far as rules and pins can be read; nothing if there are none."""
    if not isinstance(given, Path) or not isinstance(tier, CheckpointStore) or isinstance(tier, OneStep):
        return {}  # the rules lie in the run directory
    rules, pinned = CkptConfig(), set[int]()
    try:
        rules = _rules(given)
        pinned = tier.pins()
    except CairnError as error:
        say(f"warning: the retention rules or pins can't be read: {error}", file=sys.stderr)
    _check_metric(tier, rules)
    kept = reasons_to_keep(tier.measured(rules.metric if rules.keep_best else None), rules, pinned)
    add_spared(kept, _spares(given, tier, rules))
    return kept


class Prune(ToolCommand):
    """Delete steps that no retention rule keeps, and unfinished saves."""

    command = "ckpt prune"
    positional = ("path",)
    path: Place
    """An output folder, its checkpoints folder, or the URL of a run."""
    dry_run: bool = False
    """Only print what would be deleted."""
    pin: list[int] = []
    """First pin these steps, to keep them for ever."""
    unpin: list[int] = []
    """First remove the pins of these steps."""
    abandoned: bool = False
    """Also delete steps that were set aside when the run went back."""
    keep_last: int | None = None
    """As in [ckpt] (default: the run's)."""
    keep_every: int | None = None
    """As in [ckpt] (default: the run's)."""
    keep_best: int | None = None
    """As in [ckpt] (default: the run's)."""
    metric: str | None = None
    """As in [ckpt] (default: the run's)."""
    mode: Literal["min", "max"] | None = None
    """As in [ckpt] (default: the run's)."""

    def execute(self) -> int:
        tier = run_at(self.path)
        refuse_empty(tier, tier.steps())
        if isinstance(self.path, Path) and isinstance(tier, CheckpointStore):
            rules, spares = _of_run(self, self.path, tier)
        else:
            rules, spares = _of_arguments(self), {}
        pinned = (tier.pins() | set(self.pin)) - set(self.unpin)
        with tier.alone():
            report = prune(tier, rules, pinned, spares=spares, abandoned=self.abandoned, dry_run=self.dry_run)
        if self.as_json:
            print_json(report)
        else:
            print_prune(report)
        return 1 if report["failed"] else 0


def _of_run(arguments: Prune, path: Path, store: CheckpointStore) -> tuple[CkptConfig, dict[str, Spare]]:
    """The rules of the run around local steps, and what else it needs; pins are changed as the arguments say.

    Raises:
        UsageError: a step to pin does not exist, or the rules contradict each other.
    """
    for step in [*arguments.pin, *arguments.unpin]:
        if step not in store.steps():
            raise UsageError(f"--pin/--unpin {step}: no such step in {store.root}")
    if not arguments.dry_run:
        for step in arguments.pin:
            store.set_pin(step, True)
        for step in arguments.unpin:
            store.set_pin(step, False)
    rules = _rules_by(arguments, _rules(path))
    _check_metric(store, rules)
    return rules, _spares(path, store, rules)


def _of_arguments(arguments: Prune) -> CkptConfig:
    """The rules for steps below a URL: those in the arguments alone.

    Raises:
        UsageError: an argument makes sense for local steps only, or there is no rule.
    """
    for name in ("pin", "unpin"):
        if getattr(arguments, name):
            raise UsageError(
                f"--{name}: is for a run directory, and {arguments.path} is a URL; a run's pins go there "
                "with the next step that it uploads"
            )
    rules = _rules_by(arguments, CkptConfig())
    if rules.keep_last is None and rules.keep_best is None and not arguments.abandoned:
        raise UsageError(
            f"{arguments.path}: the run's rules are not there, so give --keep-last or --keep-best; without "
            "either, all steps are kept"
        )
    return rules


def _rules_by(arguments: Prune, rules: CkptConfig) -> CkptConfig:
    """These rules, with what the arguments say in place of theirs.

    Raises:
        UsageError: they contradict each other.
    """
    given = {
        key: value
        for key in ("keep_last", "keep_every", "keep_best", "metric", "mode")
        if (value := getattr(arguments, key)) is not None
    }
    if given.get("metric") not in (None, rules.metric):
        given["metric_interval"] = None
    try:
        return CkptConfig(**{**rules.model_dump(), **given})
    except ValidationError as error:
        raise UsageError(str(error.errors()[0]["msg"])) from None


def _rules(path: Path) -> CkptConfig:
    """The run's retention rules; no rules if there is no run around the checkpoints.

    Raises:
        CheckpointError: the rules can't be read.
    """
    fields = run_config(path).get("ckpt") or {}
    try:
        return CkptConfig(**{key: value for key, value in fields.items() if key in CkptConfig.model_fields})
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path}: config.json has no valid section ckpt (the retention rules); repair or remove it"
        ) from None


def _spares(path: Path, store: CheckpointStore, rules: CkptConfig) -> dict[str, Spare]:
    """Which steps that no rule keeps the run around the checkpoints still needs, by the reason."""
    if rules.export is None and rules.remote is None and not rules.interval:
        return {}
    config = run_config(path)
    last, jobs = config.get("max_steps", 0), list[StepJob]()
    if rules.export is not None and rules.export.folder is not None:
        jobs.append(run_exports(rules.export, store, last=last, attempt=attempt_id(path)))
    if rules.remote is not None:
        jobs.append(RunUploads(store, rules, last))
    return spares_of(config, store, jobs, rules.interval)


def _check_metric(store: CheckpointStore, rules: CkptConfig) -> None:
    """Check that there are results of the evaluation that the rules go by, if they do.

    Raises:
        CheckpointError: they can't be read.
        UsageError: there are none.
    """
    ratings = store.ratings()
    if (
        rules.keep_best
        and rules.rated_by
        and rules.metric not in ratings.names
        and rules.metric_interval is None
    ):
        known = ", ".join(name for name in ratings.names if not name.endswith("_ci95")) or "none"
        raise UsageError(f"--metric {rules.metric}: no step has it; metrics of evaluations here: {known}")


class Copy(ToolCommand):
    """Copy a whole checkpoint, as it is, into another folder's checkpoints."""

    command = "ckpt copy"
    positional = ("step", "dest")
    step: Place
    """A step_N folder, or an output folder (its newest good step), or the URL of one."""
    dest: Place
    """An output folder, in whose checkpoints folder the copy is then, or the URL of a run."""
    link: bool = False
    """Hard links instead of copies: no space, but damage is shared."""

    def execute(self) -> int:
        """Run `ckpt copy`.

        Raises:
            UsageError: links are wanted from or to an object store.
        """
        given, dest = self.step, self.dest
        if self.link and (remote := [place for place in (given, dest) if isinstance(place, str)]):
            raise UsageError(f"--link: {remote[0]} is a URL, where no hard links can be; leave out --link")
        tier = tier_for_copies(dest)
        if isinstance(given, str) and isinstance(tier, CheckpointStore):
            with progress_bars() as stage:  # straight into its place, rather than through a temporary folder
                copied = receive(given, tier, stage)
            folder, name = str(copied), name_of(given, copied)
        else:
            with local(given, newest=True) as found:
                step = step_in(found)
                name = name_of(given, step)
                with progress_bars() as stage:
                    folder = tier.take(step, str(dest), link=self.link, stage=stage)
        if self.as_json:
            print_json({"step": name, "folder": folder, "linked": self.link})
        else:
            say(f"{folder} is a copy of {name}, and verified")
        return 0
