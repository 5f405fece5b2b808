"""Checks of each model before it is trained: samples that share a micro-batch must be scored as if alone.

The scorer of the training loop scores a few tokens in each of the ways to lay samples in rows (`ROWS`);
the first way that is right is used, so that no list of model families is needed. A way is right if the
content of one sample has no influence on the next in its row, and if logprobs are those of each sample alone,
up to rounding.
"""

import contextlib
import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedConfig

from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.config.trainer import TrainerBase
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.run.seeds import derive
from cairn.trainer.attention.choice import (
    ALONE,
    BY_POSITIONS,
    ROWS,
    Attention,
    Device,
    Rows,
    kernel_problem,
    over_ranks,
)
from cairn.trainer.attention.kernels import KernelCall, noted
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.group import RankGroup
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows
from cairn.trainer.scoring.tokens import Scorer

logger = logging.getLogger(__name__)

LENGTHS = (17, 11)
"""Tokens of the samples; longer than the kernels of convolutions, and not multiples of anything."""
ROUNDING = {"float32": 5e-4, "float16": 0.0125, "bfloat16": 0.1}
"""Largest mean difference of logprobs from those of a sample alone, by the data type of the computation."""
LEAK = 1e-5
"""Largest mean change of a sample's logprobs when the sample before it in the row is replaced. Rounding of
one sample does not depend on the values of another in any data type, except where experts get other numbers
of tokens."""
ABOVE_ROUNDING = 4.0
"""In models with such experts: largest ratio of that change to the change for a sample in another row."""
SLOW = {
    "dense": "%s (%s): dense attention takes time and memory for all pairs of tokens in a row",
    "apart": "%s (%s): attention of one sample after the other is slow where samples are short",
}
"""Warnings, by the kind of the model's own attention: why there is no kernel."""
MANY_TOKENS = 4096
"""Tokens of the samples are drawn from the first so many of the vocabulary."""


@dataclass(frozen=True)
class _Way:
    """One way to train on samples that share micro-batches."""

    attention: Attention
    rows: Rows

    def __str__(self) -> str:
        return f"{self.rows.name}, with attention {self.attention}"


@dataclass(frozen=True)
class _Verdict:
    """One way, and what is wrong with it; None if nothing is."""

    way: _Way
    problem: str | None


class Scores(Protocol):
    """What is checked: a `Scorer`, or something else that gives each learned token a number."""

    rows: Rows
    attention: Attention

    @property
    def model(self) -> Any:
        """The model; it has the methods of transformers' models that are used here."""
        ...

    def attend(self, attention: Attention) -> None:
        """Let the model's layers compute with this attention from now on."""
        ...

    def logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """As `Scorer.logprobs`."""
        ...


def find_rows(
    scorer: Scores,
    group: RankGroup,
    *,
    rounding: str,
    must_pass: bool = True,
    first: str | None = None,
    kernel: Attention | None = None,
    must_be_kernel: bool = False,
) -> Rows:
    """How samples must lie in rows for this model; all ranks call it, once the weights are loaded.

    No random state and no weight is changed. From then on the scorer computes with `kernel` if that is right,
    else with the model's own attention.

    Args:
        rounding: data type as whose the computation rounds.
        must_pass: False takes the safest way if none is right.
        first: the name of the rows to try first, such as the run's rows so far.
        kernel: attention to prefer to the model's own. must_be_kernel: whether nothing else will do.

    Raises:
        UsageError: none is right.
    """
    model = scorer.model
    own = scorer.attention
    # What keeps samples apart in a kernel is where they begin, and no mask.
    shared = group.context.size > 1
    tried = over_ranks(kernel, model, group.context) if shared else [kernel] if kernel else []
    tried = tried[:1] if must_be_kernel else tried
    ways = [_Way(attention, rows) for attention in tried for rows in (BY_POSITIONS, ALONE)]
    if not must_be_kernel and not shared:
        ways += [_Way(own, rows) for rows in ROWS]
    order = [*tried, own]
    ways.sort(key=lambda way: (order.index(way.attention), way.rows.name != first))
    samples = _make_samples(model.config)
    before, was_training = scorer.rows, model.training
    devices = [group.device] if group.device.type == "cuda" else []
    verdicts: list[_Verdict] = []
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices), uncompiled(model):
            check = _Check(scorer, group, samples, ROUNDING[rounding])
            for way in ways:
                problem = check.problem(way)
                attention = replace(way.attention, calls=frozenset(check.calls))
                verdicts.append(_Verdict(replace(way, attention=attention), problem))
                if problem is None:
                    break
    finally:
        scorer.rows = before
        scorer.attend(own)
        model.train(was_training)
        reshard(model)
    for verdict in verdicts:
        if verdict.problem is None:
            logger.info("micro-batches: %s", verdict.way)
            if kernel is not None and verdict.way.attention.kind == own.kind:
                logger.warning(SLOW[own.kind], f"{kernel.kind} attention can't be used", verdicts[0].problem)
            scorer.attend(verdict.way.attention)
            return verdict.way.rows
        logger.info("micro-batches can't be %s: %s", verdict.way, verdict.problem)
    safest = next(verdict for verdict in reversed(verdicts) if verdict.way.rows == ALONE)
    reason = f"{type(model).__name__} does not score samples of a micro-batch as if alone: {safest.problem}"
    if shared:
        size, name = group.context.size, type(model).__name__.removeprefix("FSDP")
        raise UsageError(f"parallel.context = {size} can't serve {name}: {safest.problem}; leave it out")
    if must_pass:
        another = f"; attention = {kernel.kind!r} is asked for, and others are not tried" if kernel else ""
        raise UsageError(
            f"{reason}. So it would learn something else than the data, and is refused; --no-self-check "
            f"trains it all the same, {ALONE.name}{another if must_be_kernel else ''}"
        )
    logger.warning("%s; it is trained all the same (--no-self-check)", reason)
    scorer.attend(safest.way.attention)
    return ALONE


def uncompiled(model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """Compiled layers run uncompiled: a compilation for these few tokens would cost more than it saves."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


class _Check:
    """Compares the scores of samples that share a row with the scores of each sample alone."""

    def __init__(
        self, scorer: Scores, group: RankGroup, samples: tuple[Sample, Sample, Sample], rounding: float
    ):
        self.scorer = scorer
        self.own = scorer.attention
        self.group = group
        self.first, self.other, self.second = samples
        self.rounding = rounding
        self.calls: set[KernelCall] = set()
        """What the layers have asked of a kernel, the last way that was tried."""

    @cached_property
    def alone(self) -> torch.Tensor:
        """Logprobs of the two samples, each scored alone by the model's own attention, in their order."""
        rows, self.scorer.rows = self.scorer.rows, ALONE
        attention = self.scorer.attention
        self.scorer.attend(self.own)
        alone = torch.cat([self._score([[sample]]) for sample in (self.first, self.second)])
        self.scorer.attend(attention)
        self.scorer.rows = rows
        return alone

    def problem(self, way: _Way) -> str | None:
        """What is wrong with scoring samples this way; all ranks come to the same answer."""
        self.calls = set()
        try:
            self.scorer.attend(way.attention)
            with noted() as self.calls:
                problem = self._problem(way.rows)
            for call in () if problem else self.calls:
                problem = problem or kernel_problem(way.attention.alone, call, self.group.device)
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
        """The largest value of all ranks, or NaN: ranks must decide alike, to run the same forward passes."""
        return self.group.gather_rows(value.double().view(1, 1)).max().item()

    @cached_property
    def _leak_of_rounding(self) -> float:
        """`_leak` with a row for each sample, where only rounding can differ."""
        rows, self.scorer.rows = self.scorer.rows, ALONE
        leak = self._leak(self._score(self._arranged(self.first, ALONE)))
        self.scorer.rows = rows
        return leak

    def _arranged(self, first: Sample, rows: Rows) -> list[list[Sample]]:
        samples = [first, self.second]
        blocks = rows.arrange([[length] for length in LENGTHS], sum(LENGTHS))
        return [[samples[i] for i in row] for block in blocks for row in block]

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


class VocabularyRows:
    """The rows of a model's embeddings, beside the policy's.

    Models of one family often differ in the rows that pad their embeddings. These stand for no token, but a
    policy may sample one of its own, and a model without that row would fail in the middle of a step.
    """

    def __init__(self, model: PreTrainedConfig, policy: PreTrainedConfig, group: RankGroup, *, about: str):
        """Compare the configurations of two models.

        Args:
            about: the setting and the model's name, for messages.
        """
        self.count, of_policy = (one.get_text_config().vocab_size for one in (model, policy))
        self._has_fewer = self.count < of_policy
        self._group, self._about = group, about

    def check(self, batch: RankBatch) -> None:
        """See that the model has a row for every token of the batch; all ranks call it.

        Raises:
            UsageError: on all ranks, if one of them has a token without a row.
        """
        if not self._has_fewer:
            return
        highest = max((int(micro.input_ids.max()) for micro in batch.micros), default=0)
        token = max(self._group.gather_objects(highest))
        if token >= self.count:
            raise UsageError(
                f"{self._about}: its embeddings have {self.count} rows, and the policy has sampled token "
                f"{token}, which stands for no text (a padding row of its own embeddings); take a model with "
                "as many rows as the policy, or pad this one's (resize_token_embeddings)"
            )


def check_scorer(scorer: Scorer, config: TrainerBase, group: RankGroup, *, first: str | None = None) -> None:
    """Find out how samples must lie in rows, once the model's weights are loaded; all ranks call it.

    Args:
        first: the name of the rows to try first, such as the run's rows so far.

    Raises:
        UsageError: the model does not score samples that share a micro-batch rightly.
    """
    precision = config.precision.settled(gpu=group.device.type == "cuda")
    device = Device.of(group.device, DTYPES_IN_SETTINGS[precision.compute])
    kernel, why = scorer.kernel(config, device)
    own = scorer.attention.kind
    logger.info("attention to try first: %s (%s)", kernel.kind if kernel else own, why)
    if kernel is None and device.capability is not None and config.attention == "auto":
        logger.warning(SLOW[own], "no other attention serves the model", why)
    scorer.rows = find_rows(
        scorer.checked,
        group,
        rounding=precision.rounding,
        must_pass=config.self_check,
        first=first,
        kernel=kernel,
        must_be_kernel=kernel is not None and config.attention != "auto",
    )
