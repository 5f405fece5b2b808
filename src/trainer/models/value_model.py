"""A model of values: a causal language model's layers with one number per token in the place of logits.

A checkpoint holds it as transformers' models for token classification with one label are stored
(`score.weight`, `score.bias`), which opens them where transformers has such a model of the family.
"""

import json
import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig, PreTrainedModel

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import CRITIC, CRITIC_OPTIMIZER, MODEL, StepFolder
from cairn.checkpoint.tensors.placement import Stored, at_places
from cairn.checkpoint.tensors.reader import DTYPES_IN_SETTINGS
from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.preferences import RewardConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import TrainerBase
from cairn.formats import FORMATS
from cairn.formats.common.value_head import BIAS, HEAD, WEIGHT, decoder_in, value_config, value_layout
from cairn.model.hub_layout import Layout
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import BY_POSITIONS, Attention, Device, Rows, choose, dense
from cairn.trainer.attention.context import part_of_rows
from cairn.trainer.backends.tensor import tensor_axis
from cairn.trainer.group import RankGroup
from cairn.trainer.models.model import build_model, config_of
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer
from cairn.trainer.packing import MicroBatch
from cairn.trainer.scoring.self_check import find_rows
from cairn.trainer.scoring.tokens import Scorer


class ValueHead(nn.Linear):
    """A number of each hidden state, in float32: bfloat16 would round a value of 1 by up to 0.004."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [L, 1] of hidden states [L, H] of any floating-point type."""
        bias: torch.Tensor | None = self.bias
        return F.linear(input.float(), self.weight.float(), None if bias is None else bias.float())


class ValueModel(nn.Module):
    """The layers of a causal language model, and a linear head of one output.

    It answers to what `build_model` and the self-check ask of transformers' models.
    """

    def __init__(self, causal: PreTrainedModel, *, bias: bool = True):
        """Take the layers of `causal`, which is on the meta device; its own head is left out.

        Raises:
            UsageError: it has no part without the head.
        """
        super().__init__()
        found = decoder_in(causal)
        if found is None:
            raise UsageError(
                f"{type(causal).__name__} can't be a critic or reward model: transformers keeps its layers "
                "and its head in one module. Give another one (critic.model, model.name)"
            )
        self._prefix, decoder = found
        self._no_split_modules = causal._no_split_modules
        self.add_module(self._prefix, decoder)
        head = causal.get_output_embeddings()
        width = getattr(head, "in_features", None) or causal.config.get_text_config().hidden_size
        self.add_module(HEAD, ValueHead(width, 1, bias=bias, device="meta", dtype=torch.float32))

    @property
    def decoder(self) -> PreTrainedModel:
        """The layers."""
        return cast(PreTrainedModel, getattr(self, self._prefix))

    def forward(self, places: torch.Tensor, *, probe: bool = False, **inputs: Any) -> torch.Tensor:
        """The values at some places of the flattened rows: float32 [L].

        Args:
            places: int64 [L].
            probe: give a number that depends on the hidden state alone, and not on the head.
            inputs: of the layers.
        """
        hidden = self.decoder(use_cache=False, **inputs).last_hidden_state.flatten(0, -2)[places]
        if probe:
            return numbers_of(hidden)
        return self.get_output_embeddings()(hidden)[:, 0].clone()  # FSDP2 puts hooks on it, and not on views

    @property
    def has_bias(self) -> bool:
        """Whether the head has one."""
        return self.get_output_embeddings().bias is not None

    @property
    def config(self) -> Any:
        """The layers' configuration."""
        return self.decoder.config

    def get_input_embeddings(self) -> nn.Module:
        """What turns tokens into vectors."""
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return cast(nn.Linear, getattr(self, HEAD))

    def set_attn_implementation(self, name: str) -> None:
        """Let the layers compute attention by this name."""
        self.decoder.set_attn_implementation(name)

    @property
    def _supports_flash_attn(self) -> bool:
        return self.decoder._supports_flash_attn

    def _can_set_attn_implementation(self) -> bool:
        return self.decoder._can_set_attn_implementation()

    def gradient_checkpointing_enable(self, how: dict[str, Any]) -> None:
        """Recompute activations in the backward pass."""
        self.decoder.gradient_checkpointing_enable(how)


def numbers_of(hidden: torch.Tensor) -> torch.Tensor:
    """Of hidden states [L, H], a number of each, float32 [L]: for checks, when no head has learned yet."""
    hidden = F.layer_norm(hidden.float(), hidden.shape[-1:])
    return hidden[:, ::2].sum(-1) / hidden.shape[-1] ** 0.5


class ValuedModel(Trained):
    """A model of values that is trained."""

    values: ValueModel
    _layout: Layout
    _begins_as: Path | None = None
    """The folder of the weights with which a run begins; None: the policy's."""

    def begin(self, folder: Path) -> None:
        """Take the layers, and the head if there is one; otherwise all values are 0 at first."""
        with torch.no_grad():
            for parameter in self.values.get_output_embeddings().parameters():
                parameter.zero_()
        read_values(self._begins_as or folder, self._tensors(), self._layout)

    def loaded(self, folder: Path) -> Mapping[str, Stored]:
        return self.saved()

    def saved(self) -> Mapping[str, Stored]:
        return at_places(self._tensors(), self._layout.places)

    def constant(self) -> Collection[str]:
        return ()

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = self.values.state_dict()
        return {place.name: state[place.name] for place in self._layout.places.values()}


def read_values(folder: Path, tensors: Mapping[str, Any], layout: Layout) -> None:
    """Read the weights of layers, and of the head if `folder` has any; all ranks call it.

    Args:
        tensors: by transformers' names.

    Raises:
        UsageError: they are not those of such a model.
    """
    stored = FORMATS["hf"].read(folder).tensors[MODEL].keys()
    wanted = {
        name: tensor
        for name, tensor in at_places(tensors, layout.find(stored)).items()
        if name in stored or name not in (WEIGHT, BIAS)
    }
    try:
        read_tensors(folder, wanted, "model")
    except CheckpointError as error:
        raise UsageError(f"the model can't begin as {folder}: {error}") from None


class Critic(ValuedModel):
    """PPO's, beside the policy."""

    def __init__(
        self,
        folder: Path,
        begins_as: Path | None,
        config: TrainerConfig,
        group: RankGroup,
        *,
        bias: bool = True,
    ):
        """Make the model that `folder` describes, its weights not yet loaded.

        Args:
            begins_as: the folder of the weights with which a run begins; None: the policy's.
            bias: whether the head has one.
        """
        assert config.critic is not None
        whole = config.model_copy(update={"freeze": [], "lora": None})
        module = build_model(folder, whole, group.beside, partial(ValueModel, bias=bias))
        self.values = cast(ValueModel, module)
        optimizer = make_optimizer(module.named_parameters(), config.critic.optimizer)
        super().__init__(module, optimizer, weights_stem=CRITIC, optimizer_stem=CRITIC_OPTIMIZER)
        self._begins_as = begins_as
        self._layout = layout_of_values(self.values)

    def beside(self) -> Mapping[str, bytes]:
        """Its config.json, with which transformers opens the folder if it has such a model."""
        return _about(self.values)


def layout_of_values(values: ValueModel) -> Layout:
    """The hub's names of the layers, and the head's."""
    return value_layout(values.config, bias=values.has_bias)


def _about(values: ValueModel) -> dict[str, bytes]:
    """The config.json of a model for token classification with one label."""
    return {"config.json": value_config(values.config, bias=values.has_bias)}


class Valuer:
    """Values of micro-batches' learned tokens under a model whose weights may change in between."""

    rows: Rows
    """How samples lie in the rows of micro-batches."""

    attention: Attention
    """The attention of the layers."""

    def __init__(self, model: ValueModel):
        """Take the layers' own attention, and rows as most models need them; `prove` finds out."""
        self.model = model
        self.rows = BY_POSITIONS
        self.attention = dense(cast(PreTrainedModel, model))

    def attend(self, attention: Attention) -> None:
        """Let the layers compute with this attention from now on."""
        attention.use(cast(PreTrainedModel, self.model))
        self.attention = attention

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Of the states that the learned tokens were sampled in: float32 [L].

        Args:
            micro: on the model's device.
        """
        return self._run(micro, probe=False)

    def logprobs(self, micro: MicroBatch, temperature: float) -> torch.Tensor:
        """What the self-check compares, in the form of `Scorer.logprobs`: numbers of the hidden states.

        Values themselves would not do, since a head that has learned nothing gives 0 everywhere.
        """
        numbers = self._run(micro, probe=True)
        everywhere = numbers.new_zeros(micro.input_ids.numel()).index_copy(0, micro.learned, numbers)
        return everywhere.view_as(micro.input_ids)[:, 1:]

    def _run(self, micro: MicroBatch, *, probe: bool) -> torch.Tensor:
        part = part_of_rows(micro, self.attention.context, tensor_axis(self.model))
        ids, positions = part.input_ids, part.position_ids
        more = self.rows.arguments(self.model.config, positions) | self.attention.arguments(micro)
        return part.together(
            self.model(part.places, probe=probe, input_ids=ids, position_ids=positions, **more)
        )

    def prove(self, config: TrainerConfig, group: RankGroup, first: Rows) -> None:
        """Find out how samples must lie in rows, once the weights are loaded; all ranks call it.

        Args:
            first: to try first.

        Raises:
            UsageError: the model can't be trained rightly.
        """
        precision = config.precision.settled(gpu=group.device.type == "cuda")
        device = Device.of(group.device, DTYPES_IN_SETTINGS[precision.compute])
        kernel, _ = choose(config.attention, self.model.decoder, device)
        self.rows = find_rows(
            self,
            group,
            rounding=precision.rounding,
            must_pass=config.self_check,
            first=first.name,
            kernel=kernel,
            must_be_kernel=kernel is not None and config.attention != "auto",
        )


def make_critic(folder: Path, config: TrainerConfig, group: RankGroup, resume_from: Path | None) -> Critic:
    """The critic that the configuration asks for, or the checkpoint's; its weights not yet loaded.

    Args:
        folder: the policy's.
    """
    assert config.critic is not None
    own = None if config.critic.model == "policy" else Path(config.critic.model)
    if resume_from is None:
        return Critic(own or folder, own, config, group)
    step = StepFolder(resume_from)
    # Those of some programs have none, and one that begins to learn would be another critic.
    bias = BIAS in step.tensors(CRITIC)
    return Critic(step.critic, step.critic, config, group, bias=bias)


# A reward model: a causal language model's layers with one number for a whole conversation.


logger = logging.getLogger(__name__)


class RewardModel(ValuedModel):
    """A reward model that is trained. Its head is 0 at first, unless the weights have one."""

    def __init__(self, folder: Path, config: RewardConfig, group: RankGroup):
        """Make the model that `folder` describes, its weights not yet loaded.

        Raises:
            UsageError: transformers has no model for sequence classification of its family.
        """
        module = build_model(folder, config, group, partial(ValueModel, bias=False))
        self.values = cast(ValueModel, module)
        self._kind = kind_of_reward_model(self.values.config, folder)
        super().__init__(module, make_optimizer(module.named_parameters(), config.optimizer))
        self._layout = layout_of_values(self.values)

    def beside(self) -> Mapping[str, bytes]:
        """The config.json of a model for sequence classification with one label."""
        return about_rewards(self.module, self._kind)

    def scorer(self, config: TrainerBase, device: torch.device) -> Scorer:
        """What gives each learned token the number of the token before it."""
        return Rewarder(self.values)


def kind_of_reward_model(about: PreTrainedConfig, folder: Path) -> str:
    """The name of transformers' class of reward models of a family; a warning says if it would read others.

    Args:
        folder: of the model, for messages.

    Raises:
        UsageError: transformers has no model for sequence classification of the family.
    """
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(about), None)
    if kind is None:
        raise UsageError(
            f"--model.name {folder}: transformers has no model for sequence classification of the family "
            f"{about.model_type}, so nothing could open the reward model"
        )
    pad, ends = about.pad_token_id, about.eos_token_id
    if pad is not None and pad in (ends if isinstance(ends, list) else [ends]):
        logger.warning(
            "the model's padding is its end of text (token %d): transformers' reward model would not "
            "look at the end of a conversation, where this one gives its reward",
            pad,
        )
    return kind.__name__


def about_rewards(model: PreTrainedModel, kind: str) -> dict[str, bytes]:
    """The config.json of a reward model of the class `kind`: for sequence classification with one label."""
    about = json.loads(config_of(model, torch.float32)["config.json"])
    about |= {"architectures": [kind], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return {"config.json": (json.dumps(about, indent=2) + "\n").encode()}


class Rewarder(Scorer):
    """Gives learned tokens the head's output at the token before, in the place of logprobs."""

    def __init__(self, values: ValueModel):
        """Score with `values`, whose weights may change in between."""
        self.model = cast(PreTrainedModel, values)
        self.rows = BY_POSITIONS
        self.attention = dense(self.model)
        self._valuer = Valuer(values)

    @property
    def checked(self) -> Any:
        """Numbers of the hidden states: with a head of 0 the comparison would prove nothing."""
        return self._valuer

    def scores(
        self, micro: MicroBatch, temperature: float, *, entropies: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rewards, float32 [R, T - 1], in the place of logprobs, and 0 elsewhere."""
        self._valuer.rows = self.rows
        rewards = self._valuer.values(micro)
        everywhere = rewards.new_zeros(micro.input_ids.numel()).index_copy(0, micro.learned, rewards)
        return everywhere.view_as(micro.input_ids)[:, 1:], None


def with_reward_token(sample: Sample, row_length: int) -> Sample:
    """The sample with a token behind it, the only one that is learned; at most `row_length` tokens."""
    cut = sample.cut(row_length - 1)
    token_ids = np.append(cut.token_ids, np.int32(0)).astype(np.int32)
    loss_mask = np.zeros(len(token_ids), np.bool_)
    loss_mask[-1] = bool(sample.loss_mask.any())
    columns = {name: np.concatenate([values, values[-1:]]) for name, values in cut.columns.items()}
    return Sample(token_ids, loss_mask, columns)
