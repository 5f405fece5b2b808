"""Logprobs of the learned tokens under the current weights, without the logits of all tokens at once.

Only places whose next token is learned go through the output embeddings. If the model returns the logits of
its output embeddings unchanged, logprobs are computed from hidden states, chunk by chunk. A model that scales
or caps its logits (Cohere, Granite, Gemma 2) computes the logits of these places itself.
"""

import contextlib
import re
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import BY_POSITIONS, Attention, Device, Rows, choose, dense, name_of
from cairn.trainer.attention.context import RowsPart, part_of_rows
from cairn.trainer.backends.fsdp2 import reshard
from cairn.trainer.backends.tensor import tensor_axis
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.head import CHUNK_LOGITS, Head, both_of_logits, of_logits

TWO_TYPES = re.compile(r"expected scalar type|(same|different) dtype")
"""What torch says of a product of matrices of two data types."""
ON_CPU = Head(CHUNK_LOGITS["cpu"], in_float32=False)


class Scorer:
    """Scores micro-batches with `model`, whose weights may change in between."""

    rows: Rows
    """How samples lie in the rows of micro-batches; `self_check.find_rows` finds out which way is right."""

    attention: Attention
    """The attention of the model's layers: the model's own until `attend` is called."""

    replay: RouterReplay | None = None
    """What has tokens pass through the experts that servers chose for them; None: the model chooses."""

    def __init__(self, model: PreTrainedModel, device: torch.device, method: Head = ON_CPU):
        """Find out whether the model changes its logits; all ranks call it.

        Args:
            method: how logprobs are computed from hidden states.
        """
        self.model = model
        self.rows = BY_POSITIONS
        self.attention = dense(model)
        self.method = method
        self.head = head = model.get_output_embeddings()
        self.is_plain = (
            isinstance(head, nn.Linear)
            and type(head).forward is nn.Linear.forward  # also of the subclass that FSDP2 makes
            and self._returns_them_as_they_are(head, device)
        )

    @property
    def checked(self) -> Any:
        """What the self-check compares (`self_check.Scores`)."""
        return self

    def kernel(self, config: TrainerBase, device: Device) -> tuple[Attention | None, str]:
        """The kernel that should compute the model's attention; None: its own. And why."""
        return choose(config.attention, self.model, device)

    def attend(self, attention: Attention) -> None:
        """Let the model's layers compute with this attention from now on."""
        attention.use(self.model)
        self.attention = attention

    def logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Logprobs of tokens 1 to T - 1, float32 [R, T - 1], and 0 for those that are not learned.

        Args:
            micro: on the model's device.
            temperature: logits are divided by it.
        """
        return self._values(micro, temperature, self.method.logprobs, of_logits)

    def scores(
        self, micro: MicroBatch, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`logprobs`, and, if asked for, the entropies of the distributions of these tokens, likewise."""
        if not entropies:
            return self.logprobs(micro, temperature), None
        both = self._values(micro, temperature, self.method.logprobs_and_entropies, both_of_logits)
        return both[0], both[1]

    def _values(
        self,
        micro: MicroBatch,
        temperature: float,
        of_hidden: Callable[..., torch.Tensor],
        of_all_logits: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """What is computed of each learned token, [..., R, T - 1], and 0 for other tokens.

        Args:
            of_hidden: computes [..., L] from hidden states, as `Head.logprobs` does.
            of_all_logits: the same from logits.
        """
        learned = micro.learned
        part = part_of_rows(
            micro, self.attention.context, tensor_axis(self.model), replays=self.replay is not None
        )
        tokens = part.of_own(micro.scored_ids.flatten()[learned].long())
        found: list[torch.Tensor] = []

        def select(head: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            found.append(inputs[0].flatten(0, -2)[part.places])
            return inputs[0][:, :0] if self.is_plain else found[0][None]

        def score(head: nn.Linear, inputs: tuple[torch.Tensor], none: torch.Tensor) -> torch.Tensor:
            return of_hidden(found[0], head.weight, head.bias, tokens, temperature)

        hooks: list[RemovableHandle] = []
        if self.head is not None:
            hooks.append(self.head.register_forward_pre_hook(select))
            if self.is_plain:
                # Before FSDP2's hook, which takes the result for the begin of the backward pass.
                hooks.append(self.head.register_forward_hook(score, prepend=True))
        try:
            result = self._run(micro, part)
        finally:
            for hook in hooks:
                hook.remove()
        if self.is_plain:
            values = result
        else:
            logits = result[0] if self.head is not None else result.flatten(0, 1)[part.places]
            values = of_all_logits(logits, tokens, temperature)
        values = part.together(values)
        before, shape = values.shape[:-1], micro.input_ids.shape
        everywhere = values.new_zeros(*before, shape.numel()).index_copy(-1, learned, values)
        return everywhere.view(*before, *shape)[..., 1:]

    def _run(self, micro: MicroBatch, part: RowsPart) -> torch.Tensor:
        # Models tell samples apart by their positions only if they keep no cache.
        ids, positions = part.input_ids, part.position_ids
        if self.replay:
            self.replay.use(part.experts)
        more = self.rows.arguments(self.model.config, positions) | self.attention.arguments(micro)
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits

    @torch.no_grad()
    def _returns_them_as_they_are(self, head: nn.Linear, device: torch.device) -> bool:
        """Whether the model returns its output embeddings' logits unchanged; tried with made-up logits."""
        ours = torch.linspace(-100, 100, 2 * head.out_features, device=device).view(1, 2, -1)
        hook = head.register_forward_hook(lambda *_: ours)
        try:
            two_tokens = Sample(np.arange(2, dtype=np.int32), np.ones(2, bool))
            micro = fill_rows([[two_tokens]]).to(device)
            logits = self._run(micro, part_of_rows(micro, self.attention.context))
        finally:
            hook.remove()
            reshard(self.model)
        return logits.shape == ours.shape and torch.equal(logits, ours)


@contextlib.contextmanager
def scoring(scorer: Scorer) -> Generator[None]:
    """While the context lasts, the model computes without gradient and dropout, and changes no random state.

    All ranks enter it.
    """
    model = scorer.model
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        reshard(model)


def add_logprobs(batch: RankBatch, name: str, scorer: Scorer, device: torch.device) -> None:
    """Add the logprobs of the learned tokens under a model's present weights to `batch`, as column `name`.

    All ranks call it.
    """
    with scoring(scorer):
        for micro in batch.micros:
            micro.add_column(name, scorer.logprobs(micro.to(device), batch.temperature))


def make_scorer(module: PreTrainedModel, config: TrainerBase, device: torch.device) -> Scorer:
    """What turns micro-batches into logprobs; all ranks call it.

    Raises:
        UsageError: the model's code can't compute in the data type that the settings ask for.
    """
    vocabulary = module.config.get_text_config().vocab_size
    precision = config.precision.settled(gpu=device.type == "cuda")
    method = Head.on(device, vocabulary, in_float32=precision.head == "float32")
    try:
        return Scorer(module, device, method)
    except RuntimeError as error:
        if precision.compute == "float32" or not TWO_TYPES.search(str(error)):
            raise
        raise UsageError(
            f"precision.compute = {precision.compute!r} can't serve {name_of(module)}: its code multiplies "
            f"numbers of two data types, since buffers stay in float32 ({error}); take float32"
        ) from error
