"""RL: checks what the ledger says about the turns of rollouts that are programs."""

import contextlib
from typing import Any

import numpy as np

from cairn.checkpoint.manifest import CheckpointError
from cairn.orchestrator.ledger import LedgerContent, read_sampled
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import DamagedFile, read_json
from cairn.run.messages import Attempt
from cairn.tools.audit.report import Report


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


def check_learned(run: RunDirectory, attempt: Attempt, ledger: LedgerContent, report: Report) -> None:
    """Check that batches whose files are there teach exactly the tokens that the ledger has as sampled."""
    waiting = {group["place"] for group in ledger.groups if group["prompt_ids"] is not None}
    masks = _masks(run)
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


def _masks(run: RunDirectory) -> bool:
    """Whether answers that are cut off may be masked in this run."""
    recipe = (read_json(run.recipe, dict[str, Any]) or {}).get("orchestrator", {})
    settings = [recipe.get("settings", {}), *recipe.get("environments", {}).values()]
    return any(one.get("overlong.type") == "mask" for one in settings)
