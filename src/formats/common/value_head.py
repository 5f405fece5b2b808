"""Models of values in checkpoints: a causal language model's layers, and a linear head of one output.

Cairn stores one as transformers' models for token classification with one label are (`score.weight`,
`score.bias`). Other programs call the head by names of their own.
"""

# transformers is typed in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import CRITIC, CRITIC_OPTIMIZER
from cairn.checkpoint.tensors.placement import Place
from cairn.checkpoint.tensors.source import TensorSource, listed
from cairn.formats.base import Content
from cairn.formats.common.match_layout import state_of, weights_of
from cairn.model.described import carried_over
from cairn.model.hub_layout import Layout, hub_layout
from cairn.model.untrusted_config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HEAD = "score"
"""The name of the head's module, as in transformers."""
WEIGHT, BIAS = f"{HEAD}.weight", f"{HEAD}.bias"
_WRAPPER = re.compile(r"^pretrained_model\.")
"""What TRL's AutoModelForCausalLMWithValueHead puts before the names of the model that it wraps."""


def decoder_in(causal: "PreTrainedModel") -> "tuple[str, PreTrainedModel] | None":
    """The part of a causal language model without its head, by its name; None if it has none."""
    from transformers import PreTrainedModel

    parts = ((name, part) for name, part in causal.named_children() if isinstance(part, PreTrainedModel))
    return next(parts, None)


def value_layout(config: "PreTrainedConfig", *, bias: bool) -> Layout:
    """The tensors of a model of values with the layers that `config` describes.

    Raises:
        CheckpointError: transformers keeps the layers and the head of such models in one module.
        LayoutUnknown: see `hub_layout`.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config)
    found = decoder_in(causal)
    if found is None:
        raise CheckpointError(f"{type(causal).__name__} keeps its layers and its head in one module")
    prefix, decoder = found[0] + ".", found[1]
    output = causal.get_output_embeddings()
    width: int = getattr(output, "in_features", None) or decoder.config.get_text_config().hidden_size
    heads: dict[str, tuple[int, ...]] = {WEIGHT: (1, width)} | ({BIAS: (1,)} if bias else {})
    whole = hub_layout(config)
    kept = {name: place for name, place in whole.places.items() if place.name.startswith(prefix)}
    return dataclasses.replace(
        whole,
        places=kept | {name: Place(name, 0, shape) for name, shape in heads.items()},
        shapes={name: shape for name, shape in whole.shapes.items() if name.startswith(prefix)} | heads,
        tied={name: of for name, of in whole.tied.items() if of in kept},
    )


def value_config(config: "PreTrainedConfig", *, bias: bool) -> bytes:
    """The config.json of a model for token classification with one label, whose weights are float32."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    from transformers.modeling_layers import GenericForTokenClassification

    about = json.loads(carried_over(None, config, torch.float32))
    kind: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), object)
    about["architectures"] = [kind.__name__] if issubclass(kind, GenericForTokenClassification) else None
    about |= {"id2label": {"0": "value"}, "label2id": {"value": 0}, "classifier_dropout": 0.0}
    if not bias:
        about["token_classification_bias"] = False
    return (json.dumps(about, indent=2) + "\n").encode()


@dataclasses.dataclass(frozen=True)
class ValueNames:
    """What the tensors of another program's model of values are called here.

    names: by the program's names, those that `layout` finds. unused: names of the program's tensors on which
    no value depends, such as the causal language model's own head.
    """

    layout: Layout
    names: Mapping[str, str]
    unused: frozenset[str]

    @property
    def bias(self) -> bool:
        return BIAS in self.layout.places


def value_names(found: Mapping[str, TensorSource], config: "PreTrainedConfig", where: Path) -> ValueNames:
    """The names of a model of values that has a head of any name.

    The head is the one weight beside the layers whose shape is that of a single output.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    layout = value_layout(config, bias=False)
    own = {name: _WRAPPER.sub("", name) for name in found}
    causal = hub_layout(config)
    known = layout.find(own.values()).keys() | layout.tied.keys() | layout.tied_in_memory.keys()
    others = [name for name, short in own.items() if short not in known or short in (WEIGHT, BIAS)]
    unused = {name for name in others if own[name] in causal.places.keys() | causal.shapes.keys()}
    shape = layout.shapes[WEIGHT]
    heads = [name for name in others if name not in unused and found[name].spec.shape == shape]
    heads = [name for name in heads if name.endswith(".weight")]
    if len(heads) != 1:
        found_heads = f"has several: {listed(heads)}" if heads else "has none"
        raise CheckpointError(
            f"{where}: a critic has one weight of shape {list(shape)}, its head, and this one {found_heads}; "
            f"its tensors beside the layers are {listed(set(others) - unused) or 'none'}"
        )
    (head,) = heads
    bias = head.removesuffix("weight") + "bias"
    names = {name: short for name, short in own.items() if name not in unused}
    names[head] = WEIGHT
    if bias in found:
        names[bias] = BIAS
    return ValueNames(value_layout(config, bias=bias in found), names, frozenset(unused))


def critic_of(content: Content, about: Path, where: Path) -> tuple[dict[str, dict[str, TensorSource]], bytes]:
    """A critic's tensors by stem, as a step of Cairn holds them, and its config.json.

    Args:
        about: `content.critic`.
        where: the source, for messages.

    Raises:
        CheckpointError: a tensor is missing, or has no place in it; the message lists all of them.
    """
    config = load_config(about)
    found = content.tensors[CRITIC]
    bias = BIAS in found
    layout = value_layout(config, bias=bias)
    tensors = {CRITIC: weights_of(found, layout, where)}
    if state := content.tensors.get(CRITIC_OPTIMIZER):
        tensors[CRITIC_OPTIMIZER] = state_of(state, layout, where)
    return tensors, value_config(config, bias=bias)
