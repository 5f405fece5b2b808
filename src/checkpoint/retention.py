"""Which steps to keep: a function of what is on disk, so that it is not affected by restarts."""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from cairn.checkpoint.eval_metrics import Ratings
from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import newest_good, step_of
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import Removable, SavedStep, Tier, read_steps
from cairn.config.ckpt import CkptConfig
from cairn.run.object_store import RemoteError

logger = logging.getLogger(__name__)

WAITING = "waiting for an export or upload"
"""Why a step is kept that no rule keeps."""
OF_SPIKES = "a spike would go back to it"
"""Likewise (`spike.on_spike`)."""
PENDING = "waiting for its evaluation"
"""Why a step is kept that may turn out to be one of the best."""
MOST_PENDING = 4
"""So many of the newest steps are kept until they are evaluated."""
EARLIER_BEST = "best by an earlier measure"
"""Why a step is kept that was among the best when other records or problems gave its metric."""
Spare = Callable[[Collection[int]], Collection[int]]
"""Which of the steps that no rule keeps must stay for now, because somebody still needs them."""


def spare_none(unkept: Collection[int]) -> Collection[int]:
    """A `Spare` for a run whose steps nobody else needs."""
    return ()


def reasons_to_keep(steps: Sequence[SavedStep], rules: CkptConfig, pinned: set[int]) -> dict[int, list[str]]:
    """Why each step is kept; a step without a reason may be deleted.

    Only `keep_last` and `keep_best` limit the number of steps: without either, all are kept. The newest step
    is always kept. Of equally good steps the newer counts as better; a step without the metric, or with a
    value that is not a number, is never among the best. Steps whose numbers can't be compared, as a
    validation's records were exchanged between them, compete only with those of the same measure. If the
    metric is an evaluation's, the newest steps whose evaluation is due and not done stay, at most
    `MOST_PENDING`.
    """
    numbers = sorted(step.step for step in steps)
    reasons: dict[int, list[str]] = {number: [] for number in numbers}
    if not numbers:
        return reasons
    reasons[numbers[-1]].append("newest")
    if rules.keep_last is None and rules.keep_best is None:
        for number in numbers:
            reasons[number].append("all")
    if rules.keep_last is not None:
        for number in numbers[-rules.keep_last :]:
            reasons[number].append("last")
    if rules.keep_best is not None:
        assert rules.metric is not None  # the configuration checks this
        sign = 1 if rules.mode == "max" else -1
        rated: dict[int, list[tuple[float, int]]] = {}
        for step in steps:
            if _is_number(step.metrics, rules.metric):
                measure = step.ratings.measure(rules.metric, step.step)
                rated.setdefault(measure, []).append((sign * step.metrics[rules.metric], step.step))
        for measure, of_measure in rated.items():
            for _, number in sorted(of_measure, reverse=True)[: rules.keep_best]:
                reasons[number].append("best" if measure == max(rated) else EARLIER_BEST)
        for number in _pending(steps, rules)[-MOST_PENDING:]:
            reasons[number].append(PENDING)
    for number in numbers:
        if rules.keep_every is not None and number % rules.keep_every == 0:
            reasons[number].append("every")
        if number in rules.milestones:
            reasons[number].append("milestone")
        if number in pinned:
            reasons[number].append("pin")
    return reasons


def _pending(steps: Sequence[SavedStep], rules: CkptConfig) -> list[int]:
    """The steps that will be evaluated, oldest first: evaluations are done in the order of steps."""
    evaluation, interval = rules.rated_by, rules.metric_interval
    if evaluation is None or interval is None:
        return []
    rated = [step.step for step in steps if any(name.startswith(evaluation) for name in step.metrics)]
    newest = max(rated, default=0)
    return sorted(step.step for step in steps if step.step > newest and step.step % interval == 0)


def _is_number(metrics: Mapping[str, Any], name: str) -> bool:
    value = metrics.get(name)
    return isinstance(value, int | float) and value == value


def apply_retention(store: CheckpointStore, rules: CkptConfig, spare: Spare = spare_none) -> list[int]:
    """Delete the steps that neither the rules nor `spare` keep, and the debris of earlier saves; returns the
    deleted steps.

    Call it after a commit, so that a step is deleted only when a newer one exists. A step that can't be
    deleted is logged and left.
    """
    newest = store.latest()
    if newest is None:
        return []
    for folder in store.debris():
        if step_of(folder) < newest:
            logger.warning("removing %s, a save that was never completed", folder)
            shutil.rmtree(folder, ignore_errors=True)
    if rules.keep_last is None and rules.keep_best is None:
        return []
    try:
        pinned, ratings = store.pins(), store.ratings()
    except CheckpointError as error:
        logger.warning("no checkpoint is deleted: %s", error)
        return []
    return delete_unkept(store, rules, pinned, ratings, spare)


def delete_unkept(
    tier: Tier, rules: CkptConfig, pinned: set[int], ratings: Ratings, spare: Spare = spare_none
) -> list[int]:
    """Delete the steps of a tier that neither the rules nor `spare` keep, and return them.

    A step that can't be deleted is logged and left, and so are all after one that an object store refuses to
    delete, or fails to.

    Raises:
        RemoteError: the tier is an object store that refuses to tell its steps, or fails.
    """
    # Read manifests only if a rule needs their metrics.
    steps = (
        read_steps(tier, ratings) if rules.keep_best else [SavedStep(number, {}) for number in tier.steps()]
    )
    deleted: list[int] = []
    unkept = [number for number, reasons in reasons_to_keep(steps, rules, pinned).items() if not reasons]
    spared = spare(unkept)
    unrated = _pending(steps, rules)
    for number in unkept:
        if number in spared:
            continue
        try:
            tier.delete(number)
            deleted.append(number)
            if number in unrated:
                logger.warning(
                    "step %d is deleted before it is evaluated: %d newer ones wait as well",
                    number,
                    MOST_PENDING,
                )
        except OSError as error:
            logger.warning("could not delete checkpoint %d: %s", number, error)
        except RemoteError as error:  # the next one would take as long to fail
            logger.warning("could not delete remote checkpoint %d: %s", number, error)
            break
    return deleted


def prune(
    tier: Tier,
    rules: CkptConfig,
    pinned: set[int] | None = None,
    *,
    spares: Mapping[str, Spare] | None = None,
    abandoned: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Delete the steps that no rule keeps, what nobody will complete and, if asked, abandoned branches.

    The newest good step always stays. Returns the content of `ckpt prune --json`; `failed` lists what could
    not be deleted, and why.

    Args:
        pinned: the steps that count as pinned; None: those that are.
        spares: what else keeps steps, by the reason that the report gives.

    Raises:
        CheckpointError: pins or ratings can't be read.
        RemoteError: the tier is an object store that refuses or fails.
    """
    pinned = tier.pins() if pinned is None else pinned
    kept = reasons_to_keep(tier.measured(rules.metric if rules.keep_best else None), rules, pinned)
    good, damaged = newest_good(kept, tier.check)
    for step in kept if good is None else [good]:
        kept[step] = kept[step] or ["none is good" if good is None else "newest good"]
    add_spared(kept, spares or {})
    groups = {
        "deleted": [
            Removable(tier.name_of(step), partial(tier.delete, step))
            for step, reasons in kept.items()
            if not reasons
        ],
        "debris": tier.useless_debris(),
        "abandoned": tier.abandoned_branches() if abandoned else [],
    }
    failed: list[str] = []
    for found in groups.values():
        for one in [] if dry_run else list(found):
            try:
                one.delete()
            except OSError as error:
                failed.append(f"{one.name}: {error.strerror}")
                found.remove(one)
    return {
        **{group: [one.name for one in found] for group, found in groups.items()},
        "kept": {str(step): reasons for step, reasons in kept.items() if reasons},
        "damaged": damaged,
        "failed": failed,
        "dry_run": dry_run,
    }


def add_spared(kept: dict[int, list[str]], spares: Mapping[str, Spare]) -> None:
    """Give a reason to the steps that no rule keeps and that somebody still needs."""
    unkept = [step for step, reasons in kept.items() if not reasons]
    for reason, spare in spares.items():
        for step in spare(unkept):
            kept[step].append(reason)
