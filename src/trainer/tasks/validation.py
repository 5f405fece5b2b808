"""Validation: the loss of held-out records under the present weights.

It changes nothing that training computes with: it runs without dropout, gradients or random draws. Results
are metrics of their step and rows of evals.jsonl; the best ones so far are part of each checkpoint.
"""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cairn.config.data import ValidationConfig
from cairn.config.trainer import SFTConfig
from cairn.run import heartbeat
from cairn.run.batches import FROM_TEXT, Batch, Sample
from cairn.run.changes import measured_anew
from cairn.run.data_sets import load_records
from cairn.run.errors import UsageError
from cairn.run.metrics import better, why_exhausted
from cairn.run.recipe import template_arguments
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.data.batches import SFTData
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import Context

logger = logging.getLogger(__name__)


class Validations:
    """All validations of a run."""

    def __init__(self, config: SFTConfig, context: Context, tokenizer: PreTrainedTokenizerBase):
        """Read and tokenise the records.

        Raises:
            BadRecord: a record can't be used.
            UsageError: nothing in a data set is learned.
        """
        self._config, self._context = config, context
        forget_outdated(context.state.validation, context.recipe)
        self._all = [HeldOut(one, config, context, tokenizer) for one in config.validation]

    def run(self, step: int) -> Mapping[str, float]:
        """Validate where that is due after `step`; all ranks call it, and get the same metrics."""
        due = [one for one in self._all if _is_due(one.config, step, self._config.max_steps)]
        begun, metrics = time.monotonic(), dict[str, float]()
        for one in due:
            found = one.measure(f"validation {one.config.name} after step {step}")
            self._note(one.config, step, found)
            metrics |= {f"validation/{one.config.name}/{key}": found[key] for key in ("loss", "perplexity")}
        return {**metrics, "time/validation": time.monotonic() - begun} if due else {}

    def _note(self, config: ValidationConfig, step: int, found: Mapping[str, float]) -> None:
        """Write the result down, once for each step, and see whether it is the best."""
        if step % config.interval == 0:
            best = self._context.state.validation
            best[config.name] = better(best.get(config.name), step, found["loss"])
        attempt, group = self._context.attempt, self._context.state.group
        if group.rank != 0:
            return
        about = {"step": step, "name": config.name, "run_id": attempt.run_id, "branch": attempt.branch}
        log = self._context.run.evals
        # A process that was killed may have noted this step before.
        log.drop(lambda row: not about.items() <= row.items())
        log.append({**about, **found})
        log.make_durable()
        logger.info("validation %s after step %d: loss %.5g", config.name, step, found["loss"])

    def exhausted(self) -> str | None:
        """Why the run ends early, if it does."""
        return why_exhausted(self._context.state.validation, self._config.patiences)


class HeldOut:
    """The records of one validation, in the micro-batches of this rank."""

    def __init__(
        self,
        validation: ValidationConfig,
        config: SFTConfig,
        context: Context,
        tokenizer: PreTrainedTokenizerBase,
    ):
        """Read and tokenise them; see `Validations`."""
        self.config = validation
        self._state = state = context.state
        arguments = template_arguments(context.recipe)
        samples, self._records = _samples(validation, tokenizer, config, arguments)
        self._batch = make_rank_batch(
            Batch(samples, sampling=FROM_TEXT),
            config,
            rank=state.group.layout.data.rank,
            world_size=state.group.layout.data.size,
            arrange=state.scorer.rows.arrange,
        )
        if not self._batch.counts.learned:
            raise UsageError(
                f"validation {validation.name!r}: no token of its records is learned within the "
                f"first {config.seq_len} of a record, so there is no loss to measure"
            )

    @torch.no_grad()
    def measure(self, doing: str) -> dict[str, float]:
        """The mean of -log p over all learned tokens, and what goes with it; all ranks call it.

        Sums run over micro-batches in their order, whatever rank they are on.
        """
        state, counts = self._state, self._batch.counts
        model, group = state.policy.module, state.group
        was_training = model.training
        sums: list[torch.Tensor] = []
        try:
            model.eval()
            for micro in self._batch.micros:
                heartbeat.doing(f"{doing}, micro-batch {micro.index}")
                logprobs = state.scorer.logprobs(micro.to(group.device), self._batch.temperature)
                sums.append(-logprobs.double().sum())
        finally:
            model.train(was_training)
            reshard(model)
        table = group.gather_micros(torch.stack(sums)[:, None]).flatten()
        loss = float(table.cumsum(0)[-1]) / counts.learned
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "records": self._records,
            "learned_tokens": counts.learned,
            **({"cut_samples": counts.cut} if counts.cut else {}),
        }


def forget_outdated(best: dict[str, dict[str, float]], recipe: Mapping[str, Any] | None) -> None:
    """Remove best results on other records than the present ones: later results can't be compared with them.

    Args:
        best: by validation, as checkpoints hold it.
        recipe: the trainer's; its changes say since which step a validation is another.
    """
    for prefix, steps in measured_anew((recipe or {}).get("changes", [])).items():
        name = prefix.removeprefix("validation/").removesuffix("/")
        if name in best and best[name]["step"] <= steps[-1]:
            del best[name]


def _samples(
    validation: ValidationConfig,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    arguments: Mapping[str, Any],
) -> tuple[list[Sample], int]:
    """The samples of all records in their order, as training would make them, and the number of records."""
    source = config.held_out_data[validation.name]
    count = len(load_records(source))
    wanted = min(count, validation.records or count)
    data = SFTData(source, tokenizer, 0, 0, row_length=config.seq_len, template_arguments=arguments)
    samples: list[Sample] = []
    while data.position < wanted:
        taken = data.next_batch(0)
        if data.position <= wanted:  # else the last records were dropped, and this is one of another epoch
            samples += taken.samples
    return samples, wanted


def _is_due(config: ValidationConfig, step: int, last: int) -> bool:
    if step == 0:
        return config.at_start
    return step % config.interval == 0 or (config.at_end and step == last)
