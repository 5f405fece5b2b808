"""The load-balancing loss of mixtures of experts (Switch Transformers, Fedus et al. 2021, equations 4 to 6).

transformers computes it from the logits of the routers; Cairn leaves out padding, and weights each
micro-batch by its tokens, so that ranks and the order of micro-batches do not matter.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
from transformers import PreTrainedModel

from cairn.config.trainer import TrainerBase
from cairn.run.errors import UsageError
from cairn.trainer.attention.context import gather_tokens
from cairn.trainer.group import NO_AXIS, Axis
from cairn.trainer.losses import LossSums
from cairn.trainer.packing import BatchCounts, MicroBatch

METRIC = "router_balance"


class Balance:
    """Adds the load-balancing loss to what a step minimises.

    Args:
        coefficient: the loss's weight; with 0 nothing is computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        coefficient: float,
        context: Axis = NO_AXIS,
        tensor: Axis = NO_AXIS,
        kind: type[torch.nn.Module] | None = None,
    ):
        """Find transformers' function for the model.

        Args:
            model: takes `output_router_logits`, and gives `router_logits`, as transformers' models do.
            context: ranks that share the tokens of each row.
            tensor: ranks whose routers have the same logits, and give layers the gradient together.
            kind: transformers' class of it; default: its own.

        Raises:
            UsageError: the model has no routers, or none that transformers computes the loss of.
        """
        self.coefficient = coefficient
        self._model, self._context, self._same = model, context, tensor.size
        self._router_logits: tuple[torch.Tensor, ...] = ()
        if coefficient:
            self._of = _loss_function(kind or type(model))
            config = model.config.get_text_config()
            top = getattr(model, "num_experts_per_tok", None) or getattr(config, "num_experts_per_tok", None)
            if self._of is None or top is None:
                raise UsageError(
                    f"router_aux_coef = {coefficient}: transformers has no load-balancing loss for "
                    f"{config.model_type}; set it to 0"
                )
            self._experts_per_token = int(top)

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Within this context, the model's forward pass is kept in mind by the logits of its routers."""
        if not self.coefficient:
            yield
            return
        hooks = (
            self._model.register_forward_pre_hook(_ask_for_logits, with_kwargs=True),
            self._model.register_forward_hook(self._keep),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def added_to(
        self, loss: torch.Tensor, sums: LossSums, micro: MicroBatch, counts: BatchCounts, ranks: int
    ) -> torch.Tensor:
        """The micro-batch's loss, scaled for the backend's mean over `ranks`, and the balance's share of it.

        The share also becomes one of the `sums`, whose means are over the learned tokens.
        """
        if not self.coefficient:
            return loss
        if micro.tokens:
            of_batch = micro.tokens / counts.tokens
            logits, self._router_logits = self._router_logits, ()
            assert self._of is not None
            if self._context.size > 1:
                logits = self._of_whole_rows(logits, *micro.input_ids.shape)
            balance = self._of(logits, logits[0].shape[-1], self._experts_per_token, micro.is_token)
            loss = loss + balance * (self.coefficient * of_batch * ranks / self._same)
            sums.means[METRIC] = balance.detach() * (of_batch * max(counts.learned, 1))
        else:
            sums.means[METRIC] = torch.zeros_like(loss.detach())
        return loss

    def _of_whole_rows(
        self, logits: tuple[torch.Tensor, ...], rows: int, tokens: int
    ) -> tuple[torch.Tensor, ...]:
        """Each layer's logits of all tokens, [R * T, experts], from those of own tokens, [R * S, experts]."""
        own = torch.stack(logits).unflatten(1, (rows, -1))
        return gather_tokens(own, self._context, tokens).flatten(1, 2).unbind()

    def _keep(self, model: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._router_logits = output.router_logits


def coefficient_of(model: PreTrainedModel, config: TrainerBase) -> float:
    """The weight that the user asked for, or the model's own if its config.json turns the loss on."""
    if config.router_aux_coef is not None:
        return config.router_aux_coef
    own = model.config.get_text_config()
    return (
        float(getattr(own, "router_aux_loss_coef", 0.0)) if getattr(own, "output_router_logits", 0) else 0.0
    )


def _ask_for_logits(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "output_router_logits": True}


def _loss_function(kind: type[torch.nn.Module]) -> Callable[..., torch.Tensor] | None:
    """The function of the model's file in transformers; FSDP2 puts a class of its own before the model's."""
    for one in kind.__mro__:
        if found := getattr(sys.modules[one.__module__], "load_balancing_loss_func", None):
            return found
    return None
