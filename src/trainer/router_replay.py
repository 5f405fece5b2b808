"""Router replay: in training, tokens pass through the experts that the server chose when it sampled.

The trainer's router sees other roundings than the server's, and now and then chooses other experts, whose
outputs differ by far more than rounding does. With the server's choice, both compute the same function of the
weights (Rollout Routing Replay, Ma et al. 2025, arXiv:2510.11370). Only the choice is replayed: how much each
expert counts comes from the trainer's own router, as the family computes it from the router's logits, so that
the gradient reaches the router.

In transformers' mixtures of experts, the block around a layer's experts chooses them by one `torch.topk` over
[tokens, experts]. While such a block computes, that call returns the recorded experts, with the values that
it was given for them. Whether a family works like that is tried at the start, with other experts than its
router would choose (`check_replay`); what fails the trial is refused.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from cairn.run.batches import EXPERTS
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import name_of
from cairn.trainer.packing import MicroBatch

TOPK = (torch.topk, torch.Tensor.topk)
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configurations call the number of a layer's experts."""
TRIAL_TOKENS = 16


@dataclass(frozen=True)
class Routed:
    """A block of a model that sends tokens to experts.

    layer: number of its decoder layer, by which servers tell the experts, too. experts: how many there are.
    chosen: how many of them each token passes through.
    """

    block: torch.nn.Module
    layer: int
    experts: int
    chosen: int


class RouterReplay:
    """Replays the experts of micro-batches in a model's passes, and where these are computed again."""

    def __init__(self, model: PreTrainedModel):
        """Take part in the model's passes from now on.

        Raises:
            UsageError: the model has no experts, or not equally many in all layers.
        """
        self._routed = routed_blocks(model)
        self._layers: int = model.config.get_text_config().num_hidden_layers
        self._experts: torch.Tensor | None = None
        for routed in self._routed:
            _Choice(routed, self._of).join()

    def use(self, experts: torch.Tensor | None) -> None:
        """Replay these experts in the next forward pass, and until the one after it: the backward pass in
        between may compute activations again.

        Args:
            experts: int16 [R, S, layers, chosen], of the tokens that are computed here; `UNKNOWN_EXPERT`
                where nobody knows them, and the router chooses. None: it chooses for all tokens.
        """
        self._experts = experts

    def _of(self, layer: int) -> torch.Tensor | None:
        """Of the tokens of this pass in a layer, int64 [R * S, chosen]; None: unknown."""
        return None if self._experts is None else self._experts[:, :, layer].flatten(0, 1).long()

    def check(self, micros: Sequence[MicroBatch]) -> None:
        """Check what servers have told of a batch's tokens; the micro-batches are on the CPU.

        Raises:
            UsageError: they have not chosen among the experts of this model.
        """
        first = self._routed[0]
        for micro in micros:
            experts = micro.columns.get(EXPERTS)
            if experts is None or not micro.tokens:
                continue
            told, own = list(experts.shape[2:]), [self._layers, first.chosen]
            if told != own:
                raise UsageError(
                    f"router_replay: the servers tell {told} experts of each token (layers, experts in "
                    f"each), and the model that is trained has {own}: they serve another one"
                )
            if (most := int(experts.max())) >= first.experts:
                raise UsageError(
                    f"router_replay: the servers tell of expert {most} of a layer (counted from 0), and the "
                    f"model that is trained has {first.experts} there: they serve another one"
                )


class _Choice(TorchFunctionMode):
    """While a block computes, its choice of experts is the recorded one, if there is one."""

    def __init__(self, routed: Routed, recorded: Callable[[int], torch.Tensor | None]):
        """Replay what `recorded` tells of the block's layer, int64 [tokens, chosen]."""
        super().__init__()
        self._routed = routed
        self._recorded_of = recorded
        self._recorded: torch.Tensor | None = None
        self._made = 0

    def join(self) -> None:
        """Take part in the block's passes from now on."""
        self._routed.block.register_forward_pre_hook(self._begin)
        # Also behind exceptions: a checkpoint's recomputation ends with one.
        self._routed.block.register_forward_hook(self._end, always_call=True)

    def _begin(self, block: torch.nn.Module, inputs: Any) -> None:
        self._recorded, self._made = self._recorded_of(self._routed.layer), 0
        if self._recorded is not None:
            self.__enter__()

    def _end(self, block: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self._recorded is None:
            return
        self._recorded = None
        self.__exit__(None, None, None)
        if output is not None and self._made != 1:
            raise RuntimeError(
                f"layer {self._routed.layer} has chosen experts {self._made} times in one pass"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK or not self._is_choice(args[0], found[1]):
            return found
        recorded, own = self._recorded, found[1]
        if recorded is None or own.shape != recorded.shape:
            told = "none" if recorded is None else len(recorded)
            raise RuntimeError(
                f"layer {self._routed.layer} chooses experts of {len(own)} tokens; recorded: {told}"
            )
        self._made += 1
        chosen = torch.where(recorded >= 0, recorded, own)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))

    def _is_choice(self, scores: torch.Tensor, chosen: torch.Tensor) -> bool:
        """Whether this is the choice of experts; where groups of them are chosen before, shapes differ."""
        sizes = (self._routed.experts, self._routed.chosen)
        return scores.dim() == 2 and (scores.shape[-1], chosen.shape[-1]) == sizes


def routed_blocks(model: PreTrainedModel) -> list[Routed]:
    """The blocks of a model that send tokens to experts, in the order of its decoder layers.

    Whether it is laid out over ranks makes no difference. The attribute `first_layer` of a stage says which
    layer its first one is.

    Raises:
        UsageError: there are none, or they differ in their numbers of experts.
    """
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = next((number for name in COUNTS if (number := getattr(config, name, None))), None)
    found: list[Routed] = []
    first: int = getattr(model, "first_layer", 0)
    for name, _ in model.named_modules():
        before, _, last = name.rpartition(".")
        numbers = [part for part in before.split(".") if part.isdecimal()]
        if last == "experts" and numbers:
            if not isinstance(chosen, int) or not isinstance(experts, int):
                raise _refused(
                    model, "its config.json does not say how many experts a layer and a token have"
                )
            found.append(Routed(model.get_submodule(before), first + int(numbers[-1]), experts, chosen))
    if not found:
        raise _refused(model, "its layers have no experts; leave it out")
    if len({routed.layer for routed in found}) < len(found):
        raise _refused(model, "a layer has several mixtures of experts, and servers tell one choice for each")
    return found


# The trial


class _ExpertsReached(Exception):
    """What experts were given is known; they need not compute."""


def check_replay(model: PreTrainedModel) -> None:
    """Check that recorded experts can be replayed in a model, by a trial of each kind of its blocks.

    Args:
        model: on the meta device, but for its buffers; laid out over no ranks yet.

    Raises:
        UsageError: they can't.
    """
    kinds = {type(routed.block): routed for routed in reversed(routed_blocks(model))}
    for routed in kinds.values():
        if problem := _problem(routed, model.config.get_text_config().hidden_size):
            raise _refused(model, problem)


def _refused(model: PreTrainedModel, problem: str) -> UsageError:
    return UsageError(f"router_replay can't serve {name_of(model)}: {problem}")


def _problem(routed: Routed, hidden_size: int) -> str | None:
    """What keeps a block from replaying; it is tried as a copy with random weights, without its experts."""
    counts = {len(parameter) for parameter in routed.block.get_submodule("experts").parameters()}
    if counts != {routed.experts}:
        return f"its experts are not {routed.experts} in one module"
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TRIAL_TOKENS, hidden_size, generator=random)
    block = copy.deepcopy(routed.block)
    for name, parameter in block.named_parameters():
        if not name.startswith("experts."):
            values = torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.5
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(values))
    replayed: list[torch.Tensor | None] = [None]
    _Choice(Routed(block, routed.layer, routed.experts, routed.chosen), lambda _: replayed[0]).join()

    def given(recorded: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and how much each counts."""
        replayed[0] = recorded
        reached: list[Any] = []

        def reach(_: torch.nn.Module, inputs: Any) -> None:
            reached.extend(inputs)
            raise _ExpertsReached

        hook = block.get_submodule("experts").register_forward_pre_hook(reach)
        try:
            block(hidden)
        except _ExpertsReached:
            pass
        finally:
            hook.remove()
        shape = (TRIAL_TOKENS, routed.chosen)
        of_shape = [one for one in reached if isinstance(one, torch.Tensor) and one.shape == shape]
        (chosen, weights) = sorted(of_shape, key=torch.is_floating_point)
        return chosen, weights

    other = torch.rand(TRIAL_TOKENS, routed.experts, generator=random).topk(routed.chosen).indices
    try:
        own, weights = given(None)
        same, same_weights = given(own)
        others, other_weights = given(other)
    except Exception as error:
        return (
            f"transformers' code for it chooses experts in a way of its own ({type(error).__name__}: {error})"
        )
    if not torch.equal(same, own) or not torch.equal(same_weights, weights):
        return "replaying its own choice of experts changes how much they count"
    if not torch.equal(others, other):
        return "its experts are not those that are replayed"
    if not (other_weights > 0).all() or not other_weights.requires_grad:
        return "experts that its router would not have chosen count nothing"
    return None
