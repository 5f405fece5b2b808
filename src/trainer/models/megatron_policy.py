"""A policy or reward model that megatron-core trains: its scores, and its state by transformers' names.

A checkpoint of it is one that any other layout can go on from, and the other way round. Each rank has the
logits of a part of the vocabulary, and the logprobs of whole samples.
"""

# megatron-core is an optional dependency, without types.
# pyright: reportMissingImports=false

import contextlib
import itertools
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch.utils.checkpoint import checkpoint

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.tensors.placement import Scattered, Stored, at_places
from cairn.config.preferences import RewardConfig
from cairn.config.trainer import TrainerBase
from cairn.formats.common.value_head import WEIGHT, value_layout
from cairn.model.hub_layout import Layout, layout_of
from cairn.run.batches import EXPERTS
from cairn.trainer.attention.choice import APART, BY_POSITIONS, Attention, Device, Rows
from cairn.trainer.backends.megatron.gpt import MegatronModel, make_distributed
from cairn.trainer.backends.megatron.parts import Shard, scattered
from cairn.trainer.backends.megatron.without_gpu import without_gpu
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, places_in
from cairn.trainer.models.trained import Trained
from cairn.trainer.models.value_model import (
    ValueModel,
    about_rewards,
    kind_of_reward_model,
    numbers_of,
    read_values,
)
from cairn.trainer.packing import MicroBatch
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.head import CHUNK_LOGITS, both_of_logits

KINDS = ("exp_avg", "exp_avg_sq")
"""The moments of AdamW; each is as large as the weights."""
STEP = "step"


class MegatronPolicy(Trained):
    """A `MegatronModel`; what is loaded and saved of it is what this rank's optimiser has."""

    def __init__(self, module: Any, config: TrainerBase, layout: Layout | None = None):
        """Give the module an optimiser.

        Args:
            layout: of the tensors in files; default: that of transformers' causal language model.
        """
        assert isinstance(module, MegatronModel)
        self._model = module
        inner = make_distributed(module, config.optimizer)
        super().__init__(module, inner)  # pyright: ignore[reportArgumentType] (what is asked of it, it has)
        self._layout = layout or layout_of(self.module)
        self._steps: dict[str, torch.Tensor] = {}
        """How often each tensor of transformers' model has been changed, as checkpoints hold it."""
        self._begun: Path | None = None
        """The folder whose weights a run has begun with; None: it has gone on from a checkpoint."""
        self._parts: dict[str, dict[str, Scattered]] = {}
        """Where the values of weights and moments are, once that has been found out."""

    @property
    def kind(self) -> type[torch.nn.Module]:
        return self._model.kind

    def begin(self, folder: Path) -> None:
        super().begin(folder)
        self.taken()
        self._begun = folder.absolute()

    def as_begun(self, folder: Path) -> contextlib.AbstractContextManager[None] | None:
        """Before the first step: as it is."""
        is_new = self._begun == folder.absolute() and not self.optimizer.state
        return contextlib.nullcontext() if is_new else None

    def taken(self) -> None:
        """The shards of the weights have been read: all ranks that compute with them get them.

        Raises:
            CheckpointError: the weights have been changed different numbers of times.
        """
        distributed, device = self._model.distributed, self._model.device
        with torch.no_grad(), without_gpu(device):
            distributed._copy_main_params_to_model_params()
            self._model.__dict__["ddp"].start_param_sync(force_sync=True)
        if self._steps:
            counts = sorted({int(step.item()) for step in self._steps.values()})
            if len(counts) > 1:
                raise CheckpointError(
                    f"the checkpoint's weights have been changed {counts[0]} to {counts[-1]} times, and "
                    "megatron-core counts one number for all; go on without backend = 'megatron'"
                )
            for state in self.optimizer.state.values():
                state[STEP].fill_(counts[0])

    def loaded(self, folder: Path) -> Mapping[str, Stored]:
        return at_places(self._of("weights"), places_in(self.module, folder))

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """This rank's shards, by megatron-core's names."""
        return {shard.name: shard.values for shard in self._shards()}  # pyright: ignore[reportReturnType]

    def saved(self) -> Mapping[str, Stored]:
        return at_places(self._of("weights"), self._layout.places)

    def served(self) -> Mapping[str, Stored]:
        return self.saved()

    def constant(self) -> Collection[str]:
        return ()

    def scorer(self, config: TrainerBase, device: torch.device) -> Any:
        return MegatronScorer(self._model)

    def tensors(self) -> Tensors:
        found: Tensors = {self.weights_stem: self.saved()}
        if not self.optimizer.state:
            return found
        self._steps = self._steps or {
            name: torch.zeros((), dtype=torch.float32) for name in self._layout.shapes
        }
        steps = {float(state[STEP]) for state in self.optimizer.state.values()}
        for step in self._steps.values():
            step.fill_(max(steps, default=0.0))
        state: dict[str, Stored] = {}
        for name in self._layout.shapes:
            state |= {f"{name}.{kind}": self._of(kind)[name] for kind in KINDS}
            state[f"{name}.{STEP}"] = self._steps[name]
        return {**found, self.optimizer_stem: state}

    def create_optimizer_state(self, saved: Collection[str]) -> None:
        """Make the state of all shards, if a checkpoint has any.

        Raises:
            CheckpointError: it has the state of some weights alone, or another optimiser's.
        """
        if not saved:
            return
        wanted = {f"{name}.{kind}" for name in self._layout.shapes for kind in (*KINDS, STEP)}
        if apart := sorted(wanted ^ set(saved)):
            which = "has no" if apart[0] in wanted else "has"
            raise CheckpointError(
                f"the checkpoint {which} state {apart[0]!r} ({len(apart)} such tensors in all), and "
                "backend = 'megatron' goes on with AdamW's of all weights; go on without it"
            )
        self._parts = {"weights": self._of("weights")}
        for group in self.optimizer.param_groups:
            for shard in group["params"]:
                self.optimizer.state[shard] = {
                    **{kind: torch.zeros_like(shard) for kind in KINDS},
                    STEP: torch.zeros((), dtype=torch.float32, device=shard.device),
                }

    def _of(self, kind: str) -> dict[str, Scattered]:
        """What this rank's optimiser has of all tensors of transformers' model: weights, or a moment."""
        if kind not in self._parts:
            shards: list[Shard] = []
            for shard in self._shards():
                values = shard.values if kind == "weights" else self.optimizer.state[shard.values][kind]
                shards.append(shard._replace(values=values.detach().view(-1)))
            like = torch.empty(0, dtype=torch.float32, device=self._model.device)
            about = self._model.config
            self._parts[kind] = scattered(shards, about, self._layout, self._model.tensor, like)
        return self._parts[kind]

    def _shards(self) -> list[Shard]:
        """Of each parameter of which this rank's optimiser has a part."""
        of = self._model.distributed
        both = (
            (of.model_float16_groups, of.shard_fp32_from_float16_groups),
            (of.model_fp32_groups, of.shard_fp32_groups),
        )
        found: list[Shard] = []
        for parameters, shards in both:
            flat = zip(itertools.chain(*parameters), itertools.chain(*shards), strict=True)
            for parameter, shard in flat:
                begin = of._get_model_param_range_map(parameter)["param"].start
                found.append(Shard(self._model.names[parameter], parameter, begin, shard))
        return found


class MegatronScorer:
    """Scores micro-batches as `Scorer` does; ranks that share matrices call it, and get the same numbers."""

    rows: Rows = BY_POSITIONS
    attention: Attention = APART
    replay: RouterReplay | None = None
    """What has tokens pass through the experts that servers chose for them; None: the model chooses."""

    def __init__(self, model: MegatronModel):
        """Score with `model`, whose weights may change in between."""
        self.model: Any = model
        self.chunk_logits = CHUNK_LOGITS[model.device.type]

    @property
    def checked(self) -> Any:
        """What the self-check compares (`self_check.Scores`)."""
        return self

    def kernel(self, config: TrainerBase, device: Device) -> tuple[Attention | None, str]:
        """The kernel that should compute the model's attention; None: one sample after the other. And why."""
        return self.model.kernel

    def attend(self, attention: Attention) -> None:
        """Let the model's layers compute with this attention from now on."""
        self.attention = attention

    def logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """Logprobs of tokens 1 to T - 1, float32 [R, T - 1], and 0 for those that are not learned."""
        return self.scores(micro, temperature, entropies=False)[0]

    def scores(
        self, micro: MicroBatch, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`logprobs`, and, if asked for, the entropies of the distributions of these tokens, likewise.

        For entropies, each rank has all logits of a chunk of the learned tokens.
        """
        return self.model.stages.once(
            self.model.gpt, lambda: self._here(micro, temperature, entropies=entropies)
        )

    def _here(
        self, micro: MicroBatch, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, of this rank's stage of the model."""
        with without_gpu(micro.input_ids.device):
            if self.replay:
                experts = micro.columns.get(EXPERTS) if micro.tokens else None
                # megatron-core's layers have the first tokens of all rows before the second ones.
                self.replay.use(None if experts is None else experts.transpose(0, 1))
            hidden = self.model(micro, self.attention).hidden
            if hidden is None:  # those of the last stage come later
                blank = torch.zeros(micro.input_ids[:, 1:].shape, device=micro.input_ids.device)
                return blank, blank.clone() if entropies else None
            tokens = micro.input_ids.flatten()[micro.learned]
            values, others = self._values(hidden, tokens, temperature, entropies=entropies)
            return _everywhere(values, micro), None if others is None else _everywhere(others, micro)

    def _values(
        self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What is wanted of the learned tokens, float32 [L], of the hidden states before them, [L, H].

        A larger number of logits than `chunk_logits` is computed in chunks, and again in the backward pass.
        """
        weight = self.model.head_weight()  # whose gradient is the sum over all chunks, before it is rounded
        gathered = self.model.tensor.size if entropies else 1
        rows = max(self.chunk_logits // (len(weight) * gathered), 1)
        score = partial(self._chunk, weight=weight, temperature=temperature, entropies=entropies)
        if len(hidden) > rows and torch.is_grad_enabled():
            score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
        pieces = zip(hidden.split(rows), tokens.split(rows), strict=True)
        found: torch.Tensor = torch.cat([score(*piece) for piece in pieces], 1)
        return found[0], found[1] if entropies else None

    def _chunk(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        temperature: float,
        entropies: bool,
    ) -> torch.Tensor:
        """Logprobs of some of the tokens, and entropies if they are wanted: float32 [1 or 2, l]."""
        logits = self.model.head(hidden, weight)
        if entropies:
            return both_of_logits(gather_from_tensor_model_parallel_region(logits), tokens, temperature)
        # A copy of the logits, which the function changes in place.
        return -vocab_parallel_cross_entropy(logits.float() / temperature, tokens)[None]


def _everywhere(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """[R, T - 1] of the learned tokens' values, [L]."""
    shape = micro.input_ids.shape
    flat = values.new_zeros(shape.numel()).index_copy(0, micro.learned, values)
    return flat.view(shape)[:, 1:]


# A reward model: the same layers, with a head of one output on the last stage, which is whole on each of the
# ranks that share matrices.


class MegatronRewards(MegatronPolicy):
    """A reward model; what is saved of it is what `RewardModel` saves. Its head is 0 at first, unless the
    weights have one."""

    def __init__(self, folder: Path, config: RewardConfig, group: RankGroup):
        """Make the model that `folder` describes, its weights not yet loaded.

        Raises:
            UsageError: transformers has no model for sequence classification of its family.
        """
        module: Any = build_model(folder, config, group, partial(ValueModel, bias=False))
        self._class = kind_of_reward_model(module.config, folder)
        super().__init__(module, config, value_layout(module.config, bias=False))

    def begin(self, folder: Path) -> None:
        tensors = self._of("weights")
        for piece in tensors[WEIGHT].pieces:
            piece.values.zero_()
        read_values(folder, tensors, self._layout)
        self.taken()

    def loaded(self, folder: Path) -> Mapping[str, Any]:
        return self.saved()

    def beside(self) -> Mapping[str, bytes]:
        """The config.json of a model for sequence classification with one label."""
        return about_rewards(self.module, self._class)

    def scorer(self, config: TrainerBase, device: torch.device) -> Any:
        """What gives each learned token the head's output at the token before."""
        return MegatronRewarder(self._model)


class MegatronRewarder(MegatronScorer):
    """Gives learned tokens rewards in the place of logprobs."""

    @property
    def checked(self) -> Any:
        return HiddenNumbers(self)

    def _values(
        self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, None]:
        return self.model.head(hidden, self.model.head_weight())[:, 0], None


class HiddenNumbers(MegatronScorer):
    """Numbers of the hidden states, for the self-check: a head of 0 would prove nothing."""

    def __init__(self, rewarder: MegatronRewarder):
        """Of the model of `rewarder`, which gets the attention that is found."""
        super().__init__(rewarder.model)
        self._rewarder = rewarder

    def attend(self, attention: Attention) -> None:
        super().attend(attention)
        self._rewarder.attend(attention)

    def _values(
        self, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float, *, entropies: bool
    ) -> tuple[torch.Tensor, None]:
        return numbers_of(hidden), None
