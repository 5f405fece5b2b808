"""RL: checks what the ledger says about each prompt, answer, turn and batch."""

import bisect
import contextlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

import numpy as np

from cairn.checkpoint.manifest import CheckpointError, Manifest
from cairn.checkpoint.step_folder import LEDGER, StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.orchestrator.ledger import RESTS, LedgerContent, read_ledger, read_sampled
from cairn.orchestrator.rollouts import LEAST, mirrored
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile
from cairn.run.messages import Attempt, PolicyName, ShippedBatch
from cairn.run.output import counted
from cairn.run.view import RunView
from cairn.tools.audit.report import Epoch, Report, Row


def read_whole_ledger(
    run: RunDirectory, store: CheckpointStore, manifests: dict[int, Manifest], report: Report
) -> LedgerContent:
    """The run's ledger; if it was damaged or lost its last rows, the newest checkpoint's copy, with a note.

    A resumed run replaces such a ledger by that copy. A run that is complete doesn't, since it isn't resumed.

    Raises:
        CheckpointError: the ledger can't be read, and no checkpoint has a copy.
    """
    copies = [step for step, manifest in manifests.items() if LEDGER in manifest.files]
    if not copies:
        return read_ledger(run.ledger)
    path = StepFolder(store.folder(max(copies))).ledger
    try:
        ledger = read_ledger(run.ledger)
    except CheckpointError as error:
        with contextlib.suppress(CheckpointError):
            copy = read_ledger(path, immutable=True)
            report.notes.append(f"{error}; {_COPY.format(max(copies))}")
            return copy
        raise
    try:
        copy = read_ledger(path, immutable=True)
    except CheckpointError:
        return ledger  # check_snapshots reports the copy
    end = max(ledger.batches, default=0)
    lost = [step for step in copy.batches if step > end]
    if lost and ledger.batches == {step: batch for step, batch in copy.batches.items() if step <= end}:
        what = f"{run.ledger}: has lost the rows after batch {end}, as a power cut may do"
        report.notes.append(f"{what}; {_COPY.format(max(copies))}")
        return copy
    return ledger


_COPY = "the copy in checkpoint {} was audited instead, and a resumed run goes on from a checkpoint's copy"


def add_unnoted(ledger: LedgerContent, run: RunDirectory, attempt: Attempt) -> None:
    """Add a batch whose file exists but whose row is missing: the orchestrator writes the row right after."""
    step = max(ledger.batches, default=0) + 1
    batch = run.batch(attempt, step)
    if batch is None:
        return
    ledger.batches[step] = batch.header.ledger
    for group in ledger.groups:
        if any(first <= group["place"] <= last for first, last in batch.header.ledger.places):
            group["batch"] = step


def check_ledger(
    ledger: LedgerContent, rows: list[Row], manifests: dict[int, Manifest], attempt: Attempt, report: Report
) -> None:
    own = (ledger.run["run_id"], ledger.run["branch"])
    if own != (attempt.run_id, attempt.branch):
        what = f"the ledger is of {own}, the run is {(attempt.run_id, attempt.branch)}"
        report.broken("ledger", what, ledger.run)
    report.max_off_policy_steps = ledger.run["max_off_policy_steps"]
    for branch, count in sorted(Counter(one.branch for one in ledger.shared.values()).items()):
        report.notes.append(f"{counted(count, 'prompt')} took the answers that branch {branch} had sampled")
    _check_batches(ledger, rows, report)
    _check_places(ledger, max([report.last_step or 0, *manifests]), report)
    _check_groups(ledger, report)
    check_turns(ledger, report)
    _check_staleness(ledger, report)


def _check_batches(ledger: LedgerContent, rows: list[Row], report: Report) -> None:
    """Check that the trainer trained on exactly the batches that the ledger says were shipped."""
    before: Row | None = {"step": 0, "total_samples": 0, "total_tokens": 0}
    for row in rows:
        batch = ledger.batches.get(row["step"])
        if batch is None:
            report.broken("batch", f"step {row['step']} was trained, but no batch was shipped for it", row)
        else:
            if row.get("batch/digest") != batch.digest:
                what = f"step {row['step']} was trained on another batch than the shipped one"
                report.broken("batch", what, {"digest": row.get("batch/digest")}, asdict(batch))
            if before is not None and row["step"] == before["step"] + 1:
                samples = row["total_samples"] - before["total_samples"]
                tokens = row["total_tokens"] - before["total_tokens"]
                cut = row.get("cut_samples", 0) > 0 and tokens < batch.tokens
                if samples != batch.samples or (tokens != batch.tokens and not cut):
                    what = f"step {row['step']} counts {samples} samples with {tokens} tokens"
                    report.broken("batch", f"{what}, but its batch has other numbers", asdict(batch))
        before = row


def _check_places(ledger: LedgerContent, trained_through: int, report: Report) -> None:
    """Check that every place in the prompt order, up to the newest issued, is in one batch or waits."""
    order, portions = ledger.order, ledger.portions
    epochs: dict[tuple[int, int], Epoch] = {}

    def entry(environment: int, number: int) -> Epoch:
        portion = portions[environment]
        label = portion.label if len(portions) > 1 else None
        new = Epoch(number, portion.problems, environment=label)
        return epochs.setdefault((environment, number), new)

    def count(what: str, first: int, last: int) -> None:
        for environment, epoch, number in order.epochs(first, last):
            one = entry(environment, epoch)
            setattr(one, what, getattr(one, what) + number)

    spans = [
        (first, last, f"batch {batch.step}", batch.step <= trained_through)
        for batch in ledger.batches.values()
        for first, last in batch.places
    ]
    waiting = {group["place"] for group in ledger.groups if group["batch"] is None}
    spans += [(place, place, "waiting", False) for place in waiting]
    resting = {row["place"] for row in ledger.failed if row["reason"] == RESTS}
    given_up = {row["place"] for row in ledger.failed} - resting
    spans += [(place, place, "given up", False) for place in given_up]
    spans += [(place, place, "resting", False) for place in resting]
    shipped = sorted((first, last) for first, last, _, _ in spans)
    again = {row["place"] for row in ledger.dropped} - waiting  # to be issued again
    spans += [(place, place, "dropped", False) for place in again if not _in_ranges(place, shipped)]
    end, owner = -1, ""
    for first, last, name, trained in sorted(spans):
        if first <= end:
            repeated = (first, min(last, end))
            count("repeated", *repeated)
            what = f"prompts {repeated[0]} to {repeated[1]} are in {owner} and again in {name}"
            report.broken("repeated", what, list(repeated))
        elif first > end + 1:
            count("missing", end + 1, first - 1)
            what = f"prompts {end + 1} to {first - 1} were issued and are neither trained nor waiting"
            report.broken("missing", what, [end + 1, first - 1])
        if last > end:
            new = max(first, end + 1)
            count("issued", new, last)
            what = {"given up": "failed", "resting": "resting"}.get(name, "trained" if trained else "waiting")
            count(what, new, last)
            end, owner = last, name
    for row in ledger.dropped:
        found = order.at(row["place"])
        dropped = entry(found.environment, found.epoch).dropped
        dropped[row["reason"]] = dropped.get(row["reason"], 0) + 1
    report.epochs = [epochs[number] for number in sorted(epochs)]


def _in_ranges(place: int, ranges: list[tuple[int, int]]) -> bool:
    """Whether `place` is in one of the sorted ranges."""
    i = bisect.bisect_right(ranges, (place, math.inf))
    return i > 0 and ranges[i - 1][1] >= place


def _check_groups(ledger: LedgerContent, report: Report) -> None:
    """Check prompts that no checkpoint covers yet: the right problem, and complete if shipped."""
    answers: dict[int, list[Row]] = {}
    for sample in ledger.samples:
        answers.setdefault(sample["place"], []).append(sample)
    for group in ledger.groups:
        place, step = group["place"], group["batch"]
        wanted = ledger.order.at(place)
        if (group["environment"], group["problem"]) != (wanted.environment, wanted.problem):
            what = f"prompt {place} is problem {group['problem']}, the run's order says {wanted.problem}"
            if group["environment"] != wanted.environment:
                what += f" of environment {wanted.environment}, not {group['environment']}"
            report.broken("order", what, group)
        if step is None:
            continue
        batch = ledger.batches.get(step)
        if batch is None or not any(first <= place <= last for first, last in batch.places):
            report.broken("batch", f"prompt {place} was shipped in batch {step}, which lacks it", group)
        if group["prompt_ids"] is None:  # only the batch is left
            continue
        samples = ledger.portions[wanted.environment].samples_per_prompt
        failed = [sample for sample in answers.get(place, []) if sample["failed"] is not None]
        whole = [sample for sample in answers.get(place, []) if _is_whole(sample)]
        report.failed_answers += len(failed)
        if len(whole) + len(failed) < samples or len(whole) < min(LEAST, samples):
            what = f"prompt {place} was shipped with {len(whole)} whole answers of {samples}"
            report.broken("sample", what, *answers.get(place, []))


def _is_whole(sample: Row) -> bool:
    """Whether an answer was finished, rewarded, and has a logprob and a version for each token."""
    covered = sum(end - start for _, start, end in sample["versions"])
    return (
        sample["failed"] is None
        and sample["finish_reason"] is not None
        and sample["reward"] is not None
        and sample["tokens"] == sample["logprobs"] == covered
        and sample["noted"] in (None, covered)
    )


def _check_staleness(ledger: LedgerContent, report: Report) -> None:
    """Check that no token's policy is older than allowed, or newer than possible."""
    allowed = ledger.run["max_off_policy_steps"]
    for batch in ledger.batches.values():
        lag = batch.step - 1 - batch.oldest_step
        report.staleness = max(lag, report.staleness or 0)
        if lag > allowed or lag < 0 or (batch.oldest_step < 0 and not _has_shared(batch, ledger)):
            what = f"batch {batch.step} has tokens of policy {batch.oldest_step}, {lag} steps behind"
            report.broken("stale", f"{what}; {allowed} are allowed", asdict(batch))
    steps = {group["place"]: group["batch"] for group in ledger.groups}
    newest = max(ledger.batches, default=0)
    for sample in ledger.samples:
        step = steps.get(sample["place"])
        try:
            policies = [PolicyName.parse(version).step for version, _, _ in sample["versions"]]
            if (shared := ledger.shared.get(sample["place"])) is not None:
                policies = [mirrored(policy, shared.since) for policy in policies]
        except ValueError:
            report.broken("version", f"prompt {sample['place']}: tokens of unknown weights", sample)
            continue
        # A policy exists only after the batch that it was trained on was shipped.
        oldest = -allowed if shared else 0
        first, last = (oldest, newest) if step is None else (step - 1 - allowed, step - 1)
        if any(not first <= policy <= last for policy in policies):
            what = f"prompt {sample['place']}, answer {sample['sample']}: tokens of policies {policies}"
            report.broken("version", f"{what}; allowed are {max(first, 0)} to {last}", sample)


def _has_shared(batch: ShippedBatch, ledger: LedgerContent) -> bool:
    """Whether a batch has answers of another branch, whose policies may count as before the first one."""
    return any(first <= place <= last for place in ledger.shared for first, last in batch.places)


def check_snapshots(
    store: CheckpointStore, manifests: dict[int, Manifest], ledger: LedgerContent, report: Report
) -> None:
    """Check that each checkpoint's copy of the ledger agrees with the ledger on batches up to its step."""
    for step, manifest in manifests.items():
        if LEDGER not in manifest.files:
            continue
        try:
            snapshot = read_ledger(StepFolder(store.folder(step)).ledger, immutable=True)
        except CheckpointError as error:
            if store.exists(step):  # and was not deleted just now
                report.broken("snapshot", str(error), step)
            continue
        for number in _steps_through(step, snapshot.batches, ledger.batches):
            one, two = snapshot.batches.get(number), ledger.batches.get(number)
            if one != two:
                what = f"batch {number} differs in the ledger of checkpoint {step}"
                report.broken("snapshot", what, one and asdict(one), two and asdict(two))


def _steps_through(step: int, *batches: dict[int, ShippedBatch]) -> Iterable[int]:
    return sorted({number for rows in batches for number in rows if number <= step})


# The turns of rollouts that are programs.


def check_turns(ledger: LedgerContent, report: Report) -> None:
    """Check that each branch grows turn by turn, and that each token has a logprob and a version."""
    lengths: dict[tuple[int, int, int], int] = {}
    answers = {(sample["place"], sample["sample"]): sample for sample in ledger.samples}
    for turn in ledger.turns:
        which = f"prompt {turn['place']}, answer {turn['sample']}, call {turn['number']}"
        sample = answers.get((turn["place"], turn["sample"]))
        if sample is None:
            report.broken("turn", f"{which}: there is no such answer", turn)
            continue
        covered = sum(end - start for _, start, end in turn["versions"])
        if not turn["tokens"] == turn["logprobs"] == covered:
            report.broken("turn", f"{which}: tokens without a logprob or a policy version", turn)
        if turn["noted"] not in (None, turn["tokens"]):
            report.broken("turn", f"{which}: has {turn['tokens']} tokens, and had {turn['noted']}", turn)
        branch = turn["place"], turn["sample"], turn["branch"]
        before = lengths.get(branch, 0)
        if turn["kept"] != before:
            what = f"{which}: continues {turn['kept']} tokens of branch {turn['branch']}, which has {before}"
            report.broken("turn", what, turn)
        lengths[branch] = turn["kept"] + turn["prompt"] + turn["tokens"]
        if sample["calls"] is not None and turn["finish_reason"] is None:
            report.broken("turn", f"{which}: is partial, but its rollout has ended", turn)
    counts: dict[tuple[int, int], int] = {}
    for call in [*ledger.turns, *ledger.calls]:
        key = call["place"], call["sample"]
        counts[key] = counts.get(key, 0) + 1
    for key, sample in answers.items():
        if sample["calls"] is not None and sample["calls"] != counts.get(key, 0):
            what = f"prompt {key[0]}, answer {key[1]} ended after {sample['calls']} calls"
            report.broken("turn", f"{what}, of which {counts.get(key, 0)} are recorded", sample)


def check_learned(view: RunView, attempt: Attempt, ledger: LedgerContent, report: Report) -> None:
    """Check that batches whose files are there teach exactly the tokens that the ledger has as sampled."""
    run = view.run
    waiting = {group["place"] for group in ledger.groups if group["prompt_ids"] is not None}
    masks = _masks(view)
    ends = {(row["place"], row["sample"]): row["finish_reason"] for row in ledger.samples}
    with contextlib.suppress(CheckpointError):  # the newest checkpoint's copy is audited instead
        for step, sampled in read_sampled(run.ledger).items():
            batch = ledger.batches.get(step)
            spans = batch.places if batch else []
            places = [place for first, last in spans for place in range(first, last + 1)]
            try:
                shipped = run.batch(attempt, step)
            except (DamagedFile, UsageError):
                continue  # who resumes the run makes it again
            if shipped is None or not waiting.issuperset(places):
                continue
            if len(shipped.samples) != len(sampled):
                what = f"batch {step} has {len(shipped.samples)} samples"
                report.broken("turn", f"{what}, and {len(sampled)} were sampled", step)
                continue
            for found, (place, sample, tokens) in zip(shipped.samples, sampled, strict=True):
                taught = found.token_ids[found.loss_mask]
                is_masked = masks and not len(taught) and ends.get((place, sample)) == "length"
                if not is_masked and not np.array_equal(taught, np.asarray(tokens, np.int32)):
                    what = f"batch {step}, prompt {place}, answer {sample}: teaches {len(taught)} tokens"
                    report.broken("turn", f"{what}, which are not the {len(tokens)} sampled ones", step)


def _masks(view: RunView) -> bool:
    """Whether answers that are cut off may be masked in this run."""
    recipe = (view.recipe() or {}).get("orchestrator", {})
    settings = [recipe.get("settings", {}), *recipe.get("environments", {}).values()]
    return any(one.get("overlong.type") == "mask" for one in settings)
