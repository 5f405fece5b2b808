"""The table of architectures, and tensors made of others, which formats with their own names share."""

import pytest
import torch
from families import make_config
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.tensors.layout import TensorSpec
from cairn.checkpoint.tensors.source import TensorSource
from cairn.formats.common.tensor_views import Joined, RotaryRows, TensorSection, ValueRange
from cairn.formats.torch_file.pickled import HeldTensor
from cairn.model.architectures import ARCHITECTURES, ModelTensor, Names, architecture_of, sizes_of
from cairn.model.hub_layout import hub_layout

FAMILIES = [*ARCHITECTURES, "llama_bias", "qwen3_tied"]


def held(tensor: torch.Tensor) -> HeldTensor:
    return HeldTensor(tensor, TensorSpec("x", "F32", tuple(tensor.shape)))


def values(source: TensorSource, piece: int) -> torch.Tensor:
    """A whole tensor, read in pieces of so many values."""
    whole = torch.full(source.spec.shape, torch.nan)
    flat = whole.view(-1)
    for first in range(0, len(flat), piece):
        source.fill(first, flat[first : first + piece])
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_an_architecture_has_a_role(family: str):
    """Each has its own, from which the name is made again."""
    config = make_config(family)
    layout = hub_layout(config)
    architecture = architecture_of(config)
    parts = architecture.parts(layout.places, family)
    assert len(set(parts.values())) == len(layout.places)
    assert {architecture.name(part) for part in parts.values()} == layout.places.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str):
    """As the shapes of the model's tensors have them."""
    config = make_config(family)
    architecture, places, sizes = architecture_of(config), hub_layout(config).places, sizes_of(config)
    parts = {architecture.part(name): place.shape for name, place in places.items()}
    assert parts[ModelTensor("embedding")] == (sizes.vocabulary, sizes.hidden)
    assert parts[ModelTensor("attention.query", layer=sizes.layers - 1)] == (
        sizes.heads * sizes.head,
        sizes.hidden,
    )
    assert parts[ModelTensor("attention.key", layer=0)] == (sizes.kv_heads * sizes.head, sizes.hidden)
    assert sizes.tied == (ModelTensor("head") not in parts)
    assert (ModelTensor("router", layer=0) in parts) == bool(sizes.experts)
    if sizes.experts:
        assert ModelTensor("expert.up", layer=0, expert=sizes.experts - 1) in parts


def test_what_has_no_role_is_listed():
    """So are models of other types."""
    llama = ARCHITECTURES["llama"]
    names = ["model.norm.weight", "model.layers.01.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight"]
    with pytest.raises(CheckpointError, match=r"known role: model\.layers\.0\.mlp\.gate\.weight, model\.l"):
        llama.parts(names, "folder")
    with pytest.raises(CheckpointError, match=r"type 'phi' has no counterpart.*llama, mistral"):
        architecture_of(AutoConfig.for_model("phi"))
    with pytest.raises(CheckpointError, match=r"type 'gemma'.*these have: llama, qwen3"):
        architecture_of(AutoConfig.for_model("gemma"), ("llama", "qwen3"))
    assert Names({"mlp.up": "blk.{layer}.ffn_up"}).name(ModelTensor("router", layer=0)) is None


@pytest.mark.parametrize("piece", [1, 5, 7, 24, 1000])
def test_runs_of_other_tensors(piece: int):
    """Joined, and cut out of them."""
    one, two = torch.arange(24.0).view(4, 6), torch.arange(100.0, 112.0).view(2, 6)
    joined = Joined.of("y", [held(one), held(two)], (6, 6))
    assert torch.equal(values(joined, piece), torch.cat([one, two]))
    runs = (ValueRange(held(two), 6, 6), ValueRange(held(one), 12, 6))
    assert torch.equal(
        values(Joined(runs, TensorSpec("y", "F32", (2, 6))), piece), torch.stack([two[1], one[2]])
    )
    cut = TensorSection(joined, 12, TensorSpec("y", "F32", (3, 6)))
    assert torch.equal(values(cut, piece), torch.cat([one[2:], two[:1]]))


@pytest.mark.parametrize("piece", [1, 7, 16, 1000])
@pytest.mark.parametrize("width", [3, None])
def test_rotary_rows(piece: int, width: int | None):
    """Rotated in pairs side by side, reordered rows give what the hub's rows give when rotated in halves."""
    heads, head = 3, 8
    hub = torch.randn(heads * head, *([width] if width else []))
    meta = values(RotaryRows(held(hub), heads, to_hub=False), piece)
    assert torch.equal(values(RotaryRows(held(meta), heads, to_hub=True), piece), hub)
    if width:
        return
    angles = torch.randn(head // 2)
    both = torch.cat([angles, angles]).view(1, 1, -1)
    rotated, _ = apply_rotary_pos_emb(
        hub.view(1, heads, 1, head), hub.view(1, heads, 1, head), both.cos(), both.sin()
    )
    turned = torch.view_as_complex(meta.view(heads, head // 2, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(rotated.view(heads, 2, head // 2), torch.view_as_real(turned).transpose(1, 2))
