"""Accounts of a run: where each prompt that was issued is, what was thrown away, and its checkpoints."""

import bisect
import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from cairn.checkpoint.manifest import CheckpointError, age_of
from cairn.checkpoint.retention import add_spared, reasons_to_keep
from cairn.checkpoint.step_jobs import StepJob, spares_of
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import Tier
from cairn.config.ckpt import CkptConfig
from cairn.orchestrator.ledger import RESTS, LedgerSummary
from cairn.orchestrator.rollout_log import Row, kind_of
from cairn.run.errors import CairnError, UsageError
from cairn.run.jsonlines import as_object
from cairn.run.view import RunView
from cairn.watch.goodput import (
    FATES,
    MEANING,
    sentence,
    time_account,
    token_sentence,
    tokens_of,
)
from cairn.watch.overview import resume_command
from cairn.watch.page.rollout_index import RolloutIndex

GIVEN_UP = "given up"


@dataclass(frozen=True)
class EnvironmentAccount:
    """Where the prompts of one environment are; each is in one of the columns that follow `issued`.

    trained: in a batch that the trainer has done. shipped: in a later batch. waiting: issued, in no batch
    yet. discarded: in no batch ever, by reason. again: dropped, and issued again later. missing: in none of
    these, which must not be.
    """

    label: str
    issued: int
    trained: int
    shipped: int
    waiting: int
    discarded: Mapping[str, int]
    again: int
    missing: int


@dataclass(frozen=True)
class LedgerAccount:
    """The ledger's account of a run.

    whole: whether issued = trained + shipped + waiting + discarded, for each environment, and no prompt is in
    two batches. repeated: prompts that are in two. trained_through: the newest step that the trainer has
    done. tries: how many tries were dropped, by reason; their prompts were issued again. waiting_answers:
    whole answers that wait.
    """

    environments: Sequence[EnvironmentAccount]
    whole: bool
    repeated: int
    batches: int
    samples: int
    tokens: int
    trained_through: int
    tries: Mapping[str, int]
    waiting_answers: int


@dataclass(frozen=True)
class Discarded:
    """Answers that nothing was learned from, of one environment and for one reason; reasons that differ in
    numbers alone are one.

    tokens, seconds: what sampling them has cost, as far as it is known. newest: step, place and sample.
    """

    reason: str
    environment: str
    failed: bool
    answers: int
    problems: int
    first_step: int
    last_step: int
    tokens: int
    seconds: float
    newest: tuple[int, int, int]


def ledger_account(summary: LedgerSummary, step: int) -> LedgerAccount:
    """The account of all prompts up to the newest issued. step: the newest that the trainer has done."""
    order, portions = summary.order, summary.order.portions
    found = [Counter[str]() for _ in portions]
    discarded = [Counter[str]() for _ in portions]
    spans = [
        (first, last, "trained" if batch.step <= step else "shipped")
        for batch in summary.batches.values()
        for first, last in batch.places
    ]
    spans += [(place, place, "waiting") for place in summary.waiting]
    spans += [(row["place"], row["place"], f"{GIVEN_UP}:{kind_of(row['reason'])}") for row in summary.failed]
    known = {place for place in summary.waiting} | {row["place"] for row in summary.failed}
    taken = sorted((first, last) for first, last, _ in spans)
    again = {row["place"] for row in summary.dropped} - known
    spans += [(place, place, "again") for place in sorted(again) if not _is_in(place, taken)]
    end, repeated = -1, 0
    for first, last, name in sorted(spans):
        if first <= end:
            repeated += min(last, end) - first + 1
        elif first > end + 1:
            _count(found, order.epochs(end + 1, first - 1), "missing")
        if last > end:
            new = max(first, end + 1)
            where, _, reason = name.partition(":")
            _count(discarded if reason else found, order.epochs(new, last), reason or where)
            _count(found, order.epochs(new, last), "issued")
            end = last
    environments = [
        EnvironmentAccount(
            label=portion.label,
            issued=counts["issued"] + counts["missing"],
            trained=counts["trained"],
            shipped=counts["shipped"],
            waiting=counts["waiting"],
            discarded=_named(reasons),
            again=counts["again"],
            missing=counts["missing"],
        )
        for portion, counts, reasons in zip(portions, found, discarded, strict=True)
    ]
    done = [batch for batch in summary.batches.values() if batch.step <= step]
    return LedgerAccount(
        environments=environments,
        whole=not repeated and not any(one.missing for one in environments),
        repeated=repeated,
        batches=len(summary.batches),
        samples=sum(batch.samples for batch in done),
        tokens=sum(batch.tokens for batch in done),
        trained_through=step,
        tries=dict(Counter(str(row["reason"]) for row in summary.dropped)),
        waiting_answers=summary.answers,
    )


def goodput(view: RunView, price: float | None) -> dict[str, Any]:
    """What became of a run's time and tokens: a sentence, values by kind, what the kinds are, and money.

    Args:
        price: of an hour of the run's machines.

    Raises:
        DamagedFile: metrics.jsonl or history.jsonl as a whole can't be read.
    """
    times = time_account(view.metrics(), view.history(), view.costs())
    tokens = tokens_of(view)
    whole = None if price is None else times.cost(price)
    return {
        "time": {
            "sentence": sentence(times),
            "values": times.seconds,
            "meaning": MEANING,
            "price": None if price is None else times.price(price),
            "idle": times.idle,
        },
        "tokens": {
            "sentence": token_sentence(tokens, whole),
            "values": tokens.tokens,
            "meaning": FATES,
            "price": None if whole is None else tokens.price(whole),
        },
    }


def _count(counts: Sequence[Counter[str]], spans: Iterable[tuple[int, int, int]], name: str) -> None:
    for environment, _, number in spans:
        counts[environment][name] += number


def _named(reasons: Counter[str]) -> dict[str, int]:
    """The reasons as people read them, the most frequent first."""
    return {
        "their problem rests (a pool)" if reason == RESTS else reason: count
        for reason, count in reasons.most_common()
    }


def _is_in(place: int, ranges: Sequence[tuple[int, int]]) -> bool:
    before = bisect.bisect_right(ranges, place, key=lambda one: one[0])
    return before > 0 and ranges[before - 1][1] >= place


def discarded(index: RolloutIndex, reasons: Mapping[int, str]) -> tuple[list[Discarded], dict[str, float]]:
    """What was sampled and not learned from, the most expensive first, and totals of all that is kept.

    Args:
        reasons: why prompts are in no batch, by place, as the ledger has it.
    """
    columns = index.columns()
    totals = {
        "answers": float(len(columns["step"])),
        "tokens": float(np.nansum(columns["tokens"])),
        "seconds": float(np.nansum(columns["seconds"])),
    }
    words, environments = index.words("failed"), index.words("environment")
    found: dict[tuple[str, str, bool], list[int]] = {}
    for row in np.flatnonzero((columns["trained"] != 1) | (columns["failed"] >= 0)):
        code, environment = int(columns["failed"][row]), int(columns["environment"][row])
        reason = words[code] if code >= 0 else reasons.get(int(columns["place"][row]), "not trained on")
        label = environments[environment] if environment >= 0 else ""
        found.setdefault((kind_of(reason), label, code >= 0), []).append(int(row))
    groups = [
        Discarded(
            reason=reason,
            environment=label,
            failed=failed,
            answers=len(rows),
            problems=len(np.unique(columns["problem"][rows])),
            first_step=int(columns["step"][rows].min()),
            last_step=int(columns["step"][rows].max()),
            tokens=int(columns["tokens"][rows].clip(0).sum()),
            seconds=float(np.nansum(columns["seconds"][rows])),
            newest=_key(columns, rows[-1]),
        )
        for (reason, label, failed), rows in found.items()
    ]
    return sorted(groups, key=lambda one: (-one.tokens, -one.answers)), totals


def _key(columns: Mapping[str, np.ndarray[Any, Any]], row: int) -> tuple[int, int, int]:
    step, place, sample = (int(columns[name][row]) for name in ("step", "place", "sample"))
    return step, place, sample


# Checkpoints


def checkpoints(
    store: Tier, where: str, config: Mapping[str, Any] | None, attempt: str, history: Sequence[Row]
) -> dict[str, Any]:
    """The steps of a run as `ckpt list` has them, with their parents, ages and the commands that resume.

    Args:
        store: where they are, which people call `where`.
        attempt: the id of the newest attempt, if it is known.
        history: the events of history.jsonl.

    Raises:
        UsageError: a folder is a broken link.
        RemoteError: an object store refuses or fails.
    """
    warnings: list[str] = []
    kept = _kept_by(store, config, attempt, warnings)
    try:
        rows = store.rows(None, kept)
    except CheckpointError as error:  # of the ratings; the steps are there all the same
        warnings.append(str(error))
        rows = [{"folder": store.name_of(step), "step": step, "state": "?"} for step in store.steps()]
    for row in rows:
        metrics = as_object(row.pop("metrics", None))
        row["metrics"] = {key: metrics[key] for key in ("loss", "reward/mean") if key in metrics}
        row["name"] = Path(row["folder"]).name
        row["age"] = age_of(str(row.get("created")))
        row["resume"] = _resume(history, row)
    return {"folder": where, "rows": rows, "warnings": warnings, "total_bytes": _total(rows)}


def _total(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(row.get("bytes") or 0) for row in rows)


def _kept_by(
    store: Tier, config: Mapping[str, Any] | None, attempt: str, warnings: list[str]
) -> dict[int, list[str]]:
    if not isinstance(store, CheckpointStore):
        warnings.append("which rule keeps a step is known on the run's disk only")
        return {}
    if config is None:
        warnings.append("which rule keeps a step can't be said: the run's settings are not here")
        return {}
    settings = as_object(config.get("ckpt"))
    try:
        known = {key: value for key, value in settings.items() if key in CkptConfig.model_fields}
        rules = CkptConfig(**known)
        measured = store.measured(rules.metric if rules.keep_best else None)
        kept = reasons_to_keep(measured, rules, store.pins())
        add_spared(kept, spares_of(config, store, _jobs(store, rules, config, attempt), rules.interval))
        return kept
    except (CairnError, ValidationError, ValueError, TypeError) as error:
        if not isinstance(error, UsageError):
            warnings.append(f"which rule keeps a step can't be said: {str(error).splitlines()[0]}")
    return {}


def _jobs(
    store: CheckpointStore, rules: CkptConfig, config: Mapping[str, Any], attempt: str
) -> list[StepJob]:
    """The exports and uploads of a run."""
    last, found = int(config.get("max_steps") or 0), list[StepJob]()
    if rules.export is not None and rules.export.folder is not None:
        from cairn.formats.transfer.export_folder import run_exports  # takes a while to import

        found.append(run_exports(rules.export, store, last=last, attempt=attempt))
    if rules.remote is not None:
        from cairn.remote.uploads import RunUploads  # likewise

        found.append(RunUploads(store, rules, last))
    return found


def _resume(history: Sequence[Row], row: Mapping[str, Any]) -> str | None:
    """The command that goes on from a step; None if the run's history does not have it."""
    step = row.get("step")
    if step is None or row.get("state") != "complete":
        return None
    with contextlib.suppress(OSError):
        return resume_command(history, step)
    return None


def branches(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The branches of a run: which steps each has, and which step of which branch it goes on from.

    A branch begins when the run goes back to an earlier step, so it goes on from the newest step of another
    branch that is older than its own oldest one.
    """
    known = [row for row in rows if row.get("branch") is not None]
    ordered = sorted(known, key=lambda row: (str(row.get("created")), row["step"]))
    names = list(dict.fromkeys(str(row["branch"]) for row in ordered))
    found: list[dict[str, Any]] = []
    for name in names:
        own = sorted((row for row in known if row["branch"] == name), key=lambda row: row["step"])
        oldest = own[0]["step"]
        earlier = found
        before = [(step, other["branch"]) for other in earlier for step in other["steps"] if step < oldest]
        parent = max(before, default=None)
        origin = own[0].get("parent")
        found.append(
            {
                "branch": name,
                "steps": [row["step"] for row in own],
                "abandoned": all(str(row["state"]).startswith("abandoned") for row in own),
                "from": {"step": parent[0], "branch": parent[1]} if parent else None,
                "origin": origin,
            }
        )
    return found
