"""A model proves itself before it is trained: samples in a micro-batch are scored as if each were alone.

The scorer that trains scores a few tokens. The first of the ways to lay samples in rows that
is right is the one that is used, so no list of model families is needed. A way is right if what one sample
holds changes nothing for the next in its row, and if logprobs are those of the samples alone, up to rounding.
"""

import contextlib
import logging
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig

from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.run.seeds import derive
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import fill_rows
from cairn.trainer.rows import ALONE, ROWS, Rows
from cairn.trainer.scoring import Scorer

logger = logging.getLogger(__name__)

LENGTHS = (17, 11)
"""Tokens of the samples; longer than the kernels of convolutions, and not multiples of anything."""
ROUNDING = {"float32": 5e-4, "bfloat16": 0.1}
"""How far logprobs may be from those of a sample alone, on average, by the data type of the computation."""
LEAK = 1e-5
"""How much a sample may change the next one's logprobs, on average. Rounding does not depend on the values of
others, whatever the data type, but where experts get more or fewer tokens."""
ABOVE_ROUNDING = 4.0
"""There a sample may change the next one's logprobs so many times as much as those of one in another row."""
MANY_TOKENS = 4096
"""Tokens are drawn from so many at most."""


@dataclass(frozen=True)
class _Verdict:
    """What is wrong with one way of laying samples in rows; None if nothing is."""

    rows: Rows
    problem: str | None


def find_rows(
    scorer: Scorer, group: RankGroup, *, compute: str, must_pass: bool = True, first: str | None = None
) -> Rows:
    """How samples must lie in rows for this model; all ranks call it, once the weights are loaded.

    No random state and no weight is changed.

    Args:
        compute: data type of the computation.
        must_pass: False takes the safest way if none is right.
        first: the name of the way to try first, such as that of the run so far.

    Raises:
        UsageError: none is right.
    """
    model = scorer.model
    ways = sorted(ROWS, key=lambda rows: rows.name != first)
    samples = _make_samples(model.config)
    before, was_training = scorer.rows, model.training
    devices = [group.device] if group.device.type == "cuda" else []
    verdicts = []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices), uncompiled(model):
            check = _Check(scorer, group, samples, ROUNDING[compute])
            for rows in ways:
                verdicts.append(_Verdict(rows, check.problem(rows)))
                if verdicts[-1].problem is None:
                    break
    finally:
        scorer.rows = before
        model.train(was_training)
        if isinstance(model, FSDPModule):
            model.reshard()  # or the next forward would compute with what was gathered here
    for verdict in verdicts:
        if verdict.problem is None:
            logger.info("rows of micro-batches: %s", verdict.rows.name)
            return verdict.rows
        logger.info("rows can't be %s: %s", verdict.rows.name, verdict.problem)
    safest = next(verdict for verdict in verdicts if verdict.rows == ALONE)
    reason = f"{type(model).__name__} does not score samples of a micro-batch as if alone: {safest.problem}"
    if must_pass:
        raise UsageError(
            f"{reason}. So it would learn something else than the data, and is refused; --no-self-check "
            f"trains it all the same, {ALONE.name}"
        )
    logger.warning("%s; it is trained all the same (--no-self-check)", reason)
    return ALONE


def uncompiled(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """Compiled layers run as they are: these few tokens are not worth a compilation of their own."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


class _Check:
    """The samples, and what they score when each is alone."""

    def __init__(
        self, scorer: Scorer, group: RankGroup, samples: tuple[Sample, Sample, Sample], rounding: float
    ):
        self.scorer = scorer
        self.group = group
        self.first, self.other, self.second = samples
        self.rounding = rounding

    @cached_property
    def alone(self) -> torch.Tensor:
        """What each scores with nothing beside it, one after the other."""
        rows, self.scorer.rows = self.scorer.rows, ALONE
        alone = torch.cat([self._score([[sample]]) for sample in (self.first, self.second)])
        self.scorer.rows = rows
        return alone

    def problem(self, rows: Rows) -> str | None:
        """What is wrong with scoring samples in such rows; all ranks come to the same answer."""
        try:
            problem = self._problem(rows)
        except Exception as error:  # a model may refuse masks in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            problem = f"the model's forward pass fails ({reason[:200]})"
        elsewhere = [found for found in self.group.gather_objects(problem) if found]
        return elsewhere[0] if elsewhere else None

    def _problem(self, rows: Rows) -> str | None:
        self.scorer.rows = rows
        together = self._score(self._arranged(self.first, rows))
        apart = (together - self.alone).abs()
        leak = self._leak(together)
        if not math.isfinite(self._agreed(apart.mean() + leak)):
            return "logprobs are not finite: the weights are not, or they are too large"
        if leak > LEAK and leak > min(ABOVE_ROUNDING * self._leak_of_rounding, self.rounding):
            return f"a sample changes the logprobs of the next one by {leak:.1e} on average"
        if apart.mean() <= self.rounding:
            return None
        of_first = apart[: len(self.first.token_ids) - 1].mean()
        which = "samples" if of_first > self.rounding else "the second sample"
        return (
            f"logprobs of {which} differ by {apart.mean().item():.1e} on average from those alone, and "
            f"rounding makes no more than {self.rounding:g}: attention that is not causal, positions that "
            "count from the row's start, or experts that take a limited number of tokens do that"
        )

    def _leak(self, together: torch.Tensor) -> float:
        """How much the second sample's logprobs change, on average, if the first is another."""
        changed = self._score(self._arranged(self.other, self.scorer.rows))
        return self._agreed((together - changed)[1 - len(self.second.token_ids) :].abs().mean())

    def _agreed(self, value: torch.Tensor) -> float:
        """The largest on any rank, NaN above all: ranks must go through the same forward passes."""
        return self.group.gather_rows(value.double().view(1, 1)).max().item()

    @cached_property
    def _leak_of_rounding(self) -> float:
        """The same where nothing flows from one to the other, since each has a row of its own."""
        rows, self.scorer.rows = self.scorer.rows, ALONE
        leak = self._leak(self._score(self._arranged(self.first, ALONE)))
        self.scorer.rows = rows
        return leak

    def _arranged(self, first: Sample, rows: Rows) -> list[list[Sample]]:
        samples = [first, self.second]
        return [[samples[i] for i in row] for row in rows.arrange(list(LENGTHS), sum(LENGTHS))]

    def _score(self, rows: list[list[Sample]]) -> torch.Tensor:
        """Logprobs of all tokens but each sample's first, sample by sample: float32 [n]."""
        micro = fill_rows(rows).to(self.group.device)
        return self.scorer.logprobs(micro, 1.0)[micro.loss_mask[:, 1:]]


def ordinary_tokens(config: PreTrainedConfig) -> list[int]:
    """Tokens of a model's vocabulary that mean nothing special to it; some thousands at most."""
    special = {
        number
        for about in (config, config.get_text_config())
        for key, value in about.to_dict().items()
        if key.endswith(("_token_id", "_token_index"))
        for number in (value if isinstance(value, list) else [value])
    }
    vocabulary = range(min(config.get_text_config().vocab_size, MANY_TOKENS))
    return [token for token in vocabulary if token not in special]


def _make_samples(config: PreTrainedConfig) -> tuple[Sample, Sample, Sample]:
    """A sample, another of the same length, and a second one; without tokens that mean something special."""
    ordinary = ordinary_tokens(config)
    draw = np.random.default_rng(derive(0, "self check"))

    def sample(length: int) -> Sample:
        return Sample(draw.choice(np.array(ordinary, np.int32), length), np.ones(length, bool))

    return sample(LENGTHS[0]), sample(LENGTHS[0]), sample(LENGTHS[1])
