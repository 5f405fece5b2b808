"""Attention by kernels over packed rows: which is chosen, what it is given, and that samples stay apart.

FlexAttention computes here as it is, on all pairs of tokens. FlashAttention runs on GPUs alone; in its place
stands a kernel that computes each sample by itself from what the real one would be given.
"""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from families import make, make_config, make_model
from one_rank import one_rank
from tensors_made import LargestTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cairn.checkpoint.tensors.sharded_files import read_tensors
from cairn.config.trainer import SFTConfig
from cairn.run.batches import Sample
from cairn.run.errors import UsageError
from cairn.trainer.attention import choice
from cairn.trainer.attention import kernels as kernels_module
from cairn.trainer.attention.choice import (
    ALONE,
    APART,
    BY_POSITIONS,
    Attention,
    Device,
    check_context,
    choose,
    dense,
    make_attention,
)
from cairn.trainer.attention.context import by_masks, masks_of_rows, part_of_rows, widened
from cairn.trainer.attention.kernels import (
    NAMES,
    KernelCall,
    NotServed,
    by_samples,
    make_block_mask,
    one_after_another,
    torch_varlen,
)
from cairn.trainer.group import Axis, RankGroup
from cairn.trainer.losses import Likelihood, LossInputs
from cairn.trainer.models.model import build_model, companions, weights_in
from cairn.trainer.packing import MicroBatch, fill_rows
from cairn.trainer.scoring.head import Head
from cairn.trainer.scoring.self_check import check_scorer, find_rows
from cairn.trainer.scoring.tokens import Scorer

group = one_rank

LENGTHS = ((9, 14, 5), (20,), (12, 3))
"""Tokens of the samples of each row; windows are 8."""
H100 = Device((9, 0), torch.bfloat16)


def reference(query, key, value, bounds, longest, scale, window) -> torch.Tensor:
    """A `Kernel`, sample by sample; strict about its arguments as FlashAttention is."""
    assert (bounds.dtype, bounds.device, bounds[0], bounds[-1]) == (torch.int32, query.device, 0, len(query))
    assert longest == bounds.diff().max()
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
    results = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        k, v = (tensor.repeat_interleave(len(q) // len(k), 0) for tensor in (k, v))
        places = torch.arange(end - start)
        seen = places <= places[:, None]
        if window is not None:
            seen &= places > places[:, None] - window
        results.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(
                0, 1
            )
        )
    return torch.cat(results)


def leaking(query, key, value, bounds, longest, scale, window) -> torch.Tensor:
    """Takes the rows for a single sample."""
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return reference(query, key, value, whole, len(query), scale, window)


def with_wrong_gradients(query, key, value, *more) -> torch.Tensor:
    """Right results, and twice the gradient of keys."""
    return reference(query, 2 * key - key.detach(), value, *more)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """FlashAttention's stand-in, and FlexAttention with the backward pass that torch does not offer on CPUs.

    Call it to put another kernel in FlashAttention's place.
    """

    def put(kernel: Any) -> None:
        functions = ALL_ATTENTION_FUNCTIONS._global_mapping
        monkeypatch.setitem(functions, NAMES["varlen"], by_samples(kernel))

    put(reference)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    return put


def make_micro() -> MicroBatch:
    draw = np.random.default_rng(0)
    rows = [
        [Sample(draw.integers(6, 96, n).astype(np.int32), np.ones(n, bool)) for n in row] for row in LENGTHS
    ]
    return fill_rows(rows)


def score(model: PreTrainedModel, attention: Attention, micros: list[MicroBatch]) -> tuple[torch.Tensor, Any]:
    """Logprobs of all learned tokens, one micro-batch after the other, and gradients of all parameters."""
    scorer = Scorer(model, torch.device("cpu"))
    scorer.attend(attention)
    model.zero_grad()
    logprobs = torch.cat([scorer.logprobs(micro, 1.0)[micro.loss_mask[:, 1:]] for micro in micros])
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


def one_by_one(micro: MicroBatch) -> list[MicroBatch]:
    ids, bounds = micro.input_ids.flatten(), micro.bounds.tolist()
    samples = [ids[start:end].numpy().astype(np.int32) for start, end in itertools.pairwise(bounds)]
    learned = {n for row in LENGTHS for n in row}
    return [fill_rows([[Sample(s, np.ones(len(s), bool))]]) for s in samples if len(s) in learned and s.any()]


VARLEN = [
    *(
        ("varlen", family) for family in ("qwen3", "gpt2", "deepseek_v3", "gemma")
    ),  # GQA, and MLA's head sizes
    *(("varlen", family) for family in ("mistral_sliding", "gemma3_text", "cohere2", "gemma3")),  # windows
]
FLEX = [
    *(("flex", family) for family in ("qwen3", "mistral_sliding")),
    *(("flex", family) for family in ("gemma2", "vaultgemma", "gpt_oss", "deepseek_v3")),  # caps, sinks
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        # One without and one with windows, which are wrong in other ways, and others by the commit.
        *draws.cases(VARLEN, "varlen", 2, always=[("varlen", "qwen3"), ("varlen", "gemma3_text")]),
        *draws.cases(FLEX, "flex", 2),
        ("apart", "qwen3"),
        ("apart", "deepseek_v3"),
    ],
)
def test_packed_samples_are_scored_as_each_alone(kind: str, family: str):
    """Logprobs and every parameter's gradient, against the model's own attention of unpacked samples."""
    model = make_model(family)
    if family in ("gemma2", "vaultgemma"):
        model.set_attn_implementation("eager")
    own, kernel = dense(model), APART if kind == "apart" else make_attention(kind, model)
    micro = make_micro()
    expected, wanted = score(model, own, one_by_one(micro))
    found, gradients = score(model, kernel, [micro])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], atol=2e-4, rtol=2e-4, msg=name)


def test_one_sample_after_the_other_takes_no_pairs_of_tokens():
    """The largest tensor of both passes is as large as the queries, whatever the length of the sample."""
    for tokens in (64, 512):
        states = [torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        bounds = torch.tensor([0, tokens - 5, tokens], dtype=torch.int32)
        with LargestTensor() as largest:
            one_after_another(*states, bounds, tokens - 5, 8**-0.5, None).sum().backward()
        assert largest.numbers == states[0].numel()
    with pytest.raises(NotServed, match="a window of 8"):
        one_after_another(*states, bounds, tokens - 5, 8**-0.5, 8)


def test_layers_are_given_no_mask_and_samples_begin_where_they_do(kernels):
    """What the kernel gets: whole rows end to end, where samples begin, the longest, scale and window."""
    seen: list[tuple[Any, ...]] = []

    def spy(query, key, value, *more) -> torch.Tensor:
        seen.append((tuple(query.shape), tuple(key.shape), more[0].tolist(), *more[1:]))
        return reference(query, key, value, *more)

    model = make_model("gemma3_text")
    kernels(spy)
    score(model, make_attention("varlen", model), [make_micro()])
    begins = [0, 9, 23, 28, 28 + 20, 56, 68, 71, 84]
    shared = ((84, 2, 32), (84, 1, 32), begins, 20, 32**-0.5)
    assert seen == [(*shared, 8), (*shared, None)]


# What kernels are given on a GPU


class Launches(TorchDispatchMode):
    """Arguments of the calls of FlashAttention, transfers to the GPU, and masks of all pairs in a row."""

    def __init__(self):
        super().__init__()
        self.flash: list[tuple[Any, ...]] = []
        self.transfers = 0
        self.masks = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.torch_attn._varlen_attn.default:
            self.flash.append(args)
        if func is torch.ops.aten._to_copy.default:
            self.transfers += args[0].device.type != result.device.type
        if isinstance(result, torch.Tensor):
            self.masks += result.dtype == torch.bool and result.shape[-2:] == (28, 28)
        return result


def test_nothing_is_waited_for_on_a_gpu(kernels):
    """A micro-batch's way through transfer, model, head and loss; tensors there have shapes and no values.

    So `nonzero`, `.item()` and an `if` on a tensor raise. Nor are masks made, before which transformers has
    such an `if` that it leaves out here.
    """
    kernels(torch_varlen)
    scorer = Scorer(make_model("gemma3_text"), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), no_init_weights():
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(make_config("gemma3_text"), dtype=torch.bfloat16)
        scorer.model, scorer.head, scorer.method = model, model.get_output_embeddings(), Head(1 << 29, True)
        scorer.attend(make_attention("varlen", model))
        with Launches() as launches:
            micro = make_micro().to(torch.device("cuda"))
            sums = Likelihood()(LossInputs.of(scorer.logprobs(micro, 1.0), micro))
        assert sums.loss.device.type == "cuda"
        scorer.attend(replace(scorer.attention, kind="dense", name="sdpa"))
        with Launches() as with_masks:
            scorer.logprobs(micro, 1.0)
    assert (launches.masks, with_masks.masks > 0) == (0, True)
    assert launches.transfers == 1
    assert [call[9] for call in launches.flash] == [[7, 0], [-1, 0]]  # windows: tokens before, tokens behind
    assert [call[7] for call in launches.flash] == [False, True]  # whether it is causal with no window
    assert {call[5:7] for call in launches.flash} == {(20, 20)}
    assert {(call[0].shape, call[1].shape, call[10]) for call in launches.flash} == {
        ((84, 2, 32), (84, 1, 32), True)
    }


def test_a_layer_compiles_whole_and_for_any_samples():
    """Forward and backward by the real kernel's shapes: grouped heads, of sizes that it does not take."""
    attend = torch.compile(by_samples(torch_varlen), backend="eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tokens, longest in ((30, 20), (40, 33), (50, 21), (60, 9)):
        states = [
            torch.empty(2, heads, tokens, size, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for heads, size in ((4, 36), (2, 36), (2, 20))
        ]
        where = {"sample_bounds": torch.empty(5, dtype=torch.int32, device="meta"), "longest_sample": longest}
        result, _ = attend(torch.nn.Module(), *states, None, scaling=0.3, sliding_window=8, **where)
        assert result.shape == (2, tokens, 4, 20)
        gradients = torch.autograd.grad(result.sum(), states)
        assert [gradient.shape for gradient in gradients] == [state.shape for state in states]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@pytest.mark.parametrize("window", [None, 1, 50, 128, 300])
@pytest.mark.parametrize("lengths", [(700,), (1, 127, 128, 300, 5), (129, 2, 90)])
def test_masks_of_blocks_are_those_of_all_pairs(window: int | None, lengths: tuple[int, ...]):
    """Block by block, whole ones apart, and within blocks; made without looking at pairs."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    tokens = int(bounds[-1])
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def sees(batch, head, query, key):
        inside = (key <= query) & (sample[query] == sample[key])
        return inside if window is None else inside & (key > query - window)

    found = make_block_mask(bounds, tokens, window)
    expected = create_block_mask(sees, None, None, tokens, tokens, device="cpu")
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert torch.equal(
        *(create_mask(m.mask_mod, 1, 1, tokens, tokens, device="cpu") for m in (found, expected))
    )
    for name in ("kv_num_blocks", "q_num_blocks", "full_kv_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_masks_of_blocks_need_no_answer_from_a_gpu():
    with FakeTensorMode():
        bounds = torch.empty(4, dtype=torch.int32, device="cuda")
        assert make_block_mask(bounds, 1000, 50).kv_indices.shape == (1, 1, 8, 8)


# Which attention is taken


@pytest.mark.parametrize(
    ("family", "device", "kind", "why"),
    [
        ("qwen3", H100, "varlen", "bfloat16 on GPUs"),
        ("qwen3", Device(None, torch.bfloat16), None, "on CPUs"),
        ("qwen3", Device((9, 0), torch.float32), None, "in float32"),
        ("qwen3", Device((7, 5), torch.bfloat16), "flex", "compute capability 8.0"),
        ("gemma2", H100, "flex", "soft-caps"),
        ("gpt_oss", H100, "flex", "sinks"),
        ("llama4", H100, None, "within chunks"),
        ("gpt2", H100, None, "dropout"),
        ("falcon", H100, None, "code of their own"),
        ("bloom", H100, None, "does not let the model use FlashAttention"),
        ("bamba", H100, "varlen", "bfloat16 on GPUs"),
    ],
)
def test_one_decision_by_device_data_type_and_model(family: str, device: Device, kind: str | None, why: str):
    model = make_model(family)
    if family == "gpt2":
        model.config.attn_pdrop = 0.1
    attention, reason = choose("auto", model, device)
    assert (attention.kind if attention else None) == kind
    assert why in reason
    assert choose("dense", model, device) == (None, "asked for")


def test_heads_of_other_sizes_go_elsewhere():
    model = make_model("qwen3")
    for size, kind in ((256, "varlen"), (512, "flex"), (8, "varlen")):
        model.config.head_dim = size
        assert choose("auto", model, H100)[0].kind == kind


@pytest.mark.parametrize(
    ("asked", "family", "device", "why"),
    [
        ("varlen", "qwen3", Device(None, torch.float32), "on GPUs alone"),
        ("flex", "qwen3", Device(None, torch.float32), "no backward pass on CPUs"),
        ("varlen", "qwen3", Device((9, 0), torch.float32), r"16 bits alone \(precision.compute\)"),
        ("varlen", "gemma2", H100, "soft-caps"),
        ("flex", "llama4", H100, "within chunks"),
    ],
)
def test_what_can_not_serve_is_refused_with_the_reason(asked: Any, family: str, device: Device, why: str):
    with pytest.raises(UsageError, match=f"attention = '{asked}' can't serve .*: .*{why}"):
        choose(asked, make_model(family), device)


@pytest.fixture
def scorer(tmp_path: Path, group: RankGroup) -> Callable[..., Scorer]:
    """`scorer(family, **config)`: of a tiny model with its weights."""

    def build(family: str, **config: object) -> Scorer:
        folder = make(family, tmp_path / family)
        model = build_model(folder, SFTConfig(**config), group)
        read_tensors(folder, weights_in(model, folder), "model")
        return Scorer(model, group.device)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family", "compute", "rows", "taken"),
    [
        ("varlen", "qwen3", "float32", BY_POSITIONS, "varlen"),
        ("varlen", "qwen3", "bfloat16", BY_POSITIONS, "varlen"),  # in units of FSDP2
        ("varlen", "mistral_sliding", "float32", BY_POSITIONS, "varlen"),
        ("flex", "gpt_oss", "float32", BY_POSITIONS, "flex"),  # whose own attention needs masks made for it
        ("varlen", "bamba", "float32", ALONE, "varlen"),
        ("varlen", "qwen3_next", "float32", ALONE, "varlen"),
        (
            "varlen",
            "stablelm",
            "float32",
            BY_POSITIONS,
            "dense",
        ),  # its layers are not told where samples begin
        ("varlen", "gemma2", "float32", BY_POSITIONS, "dense"),
    ],
)
def test_a_kernel_is_taken_if_the_model_scores_samples_rightly_with_it(
    scorer, group: RankGroup, kind: Any, family: str, compute: str, rows, taken: str
):
    """Else the model's own attention. A step's backward pass follows."""
    made = scorer(family, precision={"compute": compute})
    own = made.attention
    assert find_rows(made, group, rounding=compute, kernel=make_attention(kind, made.model)) == rows
    assert made.attention.kind == taken
    layers = {
        "qwen3": "varlen (all tokens before)",
        "mistral_sliding": "varlen (window of 8)",
        "gpt_oss": "flex (all tokens before, sinks; window of 8, sinks)",
        "stablelm": "dense (sdpa)",
    }
    assert str(made.attention) == layers.get(family, str(made.attention))
    assert made.model.config._attn_implementation == (own.name if taken == "dense" else NAMES[kind])
    micro = fill_rows([[Sample(np.arange(6, 20, dtype=np.int32), np.ones(14, bool))]])
    made.logprobs(micro, 1.0).sum().backward()
    assert all(p.grad is not None for p in made.model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (leaking, "a sample changes the logprobs of the next"),
        (with_wrong_gradients, r"errs by 1.0e\+00 in the gradient of keys"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_taken(scorer, group: RankGroup, kernels, kernel, said: str, caplog):
    """Neither one whose results are, nor one whose gradients alone are; a warning says why."""
    kernels(kernel)
    caplog.set_level("INFO")
    made = scorer("qwen3")
    varlen = make_attention("varlen", made.model)
    assert find_rows(made, group, rounding="float32", kernel=varlen) == BY_POSITIONS
    assert made.attention.kind == "dense"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("varlen attention can't be used (")
    assert re.search(said, warning)
    with pytest.raises(UsageError, match="attention = 'varlen' is asked for, and others are not tried"):
        find_rows(made, group, rounding="float32", kernel=varlen, must_be_kernel=True)


@pytest.mark.parametrize(("device", "told"), [(H100, True), (Device(None, torch.float32), False)])
def test_dense_attention_on_a_gpu_is_told_with_the_reason(
    scorer, group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog, device: Device, told: bool
):
    monkeypatch.setattr(Device, "of", lambda *_: device)
    made = scorer("llama4")
    check_scorer(made, SFTConfig(), group)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ([warned[0]] if told else [])
    if told:
        assert "flex: it attends within chunks" in warned[0]
        assert "dense attention takes time and memory" in warned[0]


@pytest.mark.parametrize("knows", [True, False])
def test_keys_with_fewer_heads_are_announced_where_the_kernel_wants_it(
    monkeypatch: pytest.MonkeyPatch, knows: bool
):
    """torch 2.11 has no such argument, and groups heads all the same (measured on an H200)."""

    def newer(*states: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Any:
        given.append(enable_gqa)

    def older(*states: Any, scale: float, window_size: tuple[int, int]) -> Any:
        given.append(None)

    given: list[bool | None] = []
    monkeypatch.setattr(kernels_module, "varlen_attn", newer if knows else older)
    monkeypatch.setattr(kernels_module, "GROUPED", kernels_module.grouped_heads(newer if knows else older))
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    for key_heads in (4, 2):
        states = torch.zeros(5, 4, 8), *[torch.zeros(5, key_heads, 8)] * 2
        torch_varlen(*states, bounds, 5, 1.0, None)
    assert given == ([False, True] if knows else [None, None])


def test_activation_checkpoints_hand_on_where_samples_begin(scorer):
    """Layers run again in the backward pass, with the same bounds."""
    results = []
    for checkpointing in (False, True):
        made = scorer("qwen3", activation_checkpointing=checkpointing)
        results.append(score(made.model, make_attention("varlen", made.model), [make_micro()])[1])
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())


@pytest.mark.parametrize(
    "given", [{"softcap": 2.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_what_a_kernel_does_not_compute_is_an_error(given: dict[str, Any]):
    """Never left out."""
    states = torch.zeros(1, 2, 6, 8)
    where = {"sample_bounds": torch.tensor([0, 6], dtype=torch.int32), "longest_sample": 6}
    attend = by_samples(reference)
    attend(torch.nn.Module(), states, states, states, None, **where)
    with pytest.raises(NotServed, match=next(iter(given))):
        attend(torch.nn.Module(), states, states, states, None, **where, **given)


# What users' files say


def test_a_model_that_asks_for_flash_attention_gets_attention_that_is_right(tmp_path: Path, group: RankGroup):
    """transformers' own mixes the samples of a micro-batch of several rows."""
    folder = make("qwen3", tmp_path / "model")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "attn_implementation": "flash_attention_2"}))
    assert build_model(folder, SFTConfig(), group).config._attn_implementation == "sdpa"


def test_saved_models_say_nothing_of_kernels(tmp_path: Path):
    model = make_model("gemma3")
    folder = make("gemma3", tmp_path / "model")
    before = companions(model, folder)["config.json"]
    make_attention("varlen", model).use(model)
    assert companions(model, folder)["config.json"] == before


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])  # the rows have 28 tokens
def test_ranks_share_the_tokens_of_each_row(ranks: int):
    """Each learned token falls to the rank that has the token before it. What makes up a length that the
    ranks can share equally is a sample of its own."""
    micro = make_micro()
    tokens = micro.input_ids.shape[1]
    whole = widened(micro, ranks)
    parts = [part_of_rows(micro, Axis(rank, ranks)) for rank in range(ranks)]
    for name in ("input_ids", "position_ids"):
        together = torch.cat([getattr(part, name) for part in parts], 1)
        assert torch.equal(together, getattr(whole, name))
        assert torch.equal(together[:, :tokens], getattr(micro, name))
    before = micro.input_ids.flatten()[micro.learned - 1]
    own = [torch.arange(len(before)) if part.own is None else part.own for part in parts]
    assert torch.cat(own).sort().values.tolist() == list(range(len(before)))
    for part, numbers in zip(parts, own, strict=True):
        assert torch.equal(part.input_ids.flatten()[part.places], before[numbers])
    begins = (whole.position_ids.flatten() == 0).nonzero()[:, 0].tolist()
    assert whole.bounds.tolist() == [*begins, whole.position_ids.numel()]
    assert (whole.longest, whole.bounds.dtype) == (whole.bounds.diff().max(), torch.int32)
    assert (tokens % ranks == 0) == (whole is micro)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("given", [{}, {"softcap": 5.0}, {"s_aux": torch.linspace(-1, 2, 4)}])
def test_attention_with_masks_of_rows_is_that_of_each_sample(window: int | None, given: dict[str, Any]):
    """The masks that ranks with the tokens of whole rows use where no kernel serves them."""
    micro = make_micro()
    rows, tokens = micro.input_ids.shape
    draw = torch.Generator().manual_seed(0)
    states = {
        name: torch.randn(rows, heads, tokens, 16, generator=draw)
        for name, heads in (("queries", 4), ("keys", 2), ("values", 2))
    }
    masks = masks_of_rows(micro, (None, window))
    found, _ = by_masks(
        torch.nn.Module(), *states.values(), None, sliding_window=window, row_masks=masks, **given
    )
    sinks = {"sinks": given["s_aux"]} if "s_aux" in given else {}
    call = KernelCall(4, 2, 16, 16, torch.float32, None, window, given.get("softcap"), bool(sinks))
    expected = choice._one_by_one(states | sinks, call, window, micro)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "ranks", "why"),
    [
        ("qwen3", 3, "attention heads can't be shared equally"),
        ("qwen3_next", 2, "layers of the kind linear_attention carry state"),
        ("llama4", 2, "chunk"),
        ("falcon_h1", 2, "layers of the kind hybrid"),
    ],
)
def test_a_model_whose_rows_can_not_be_shared_is_refused(family: str, ranks: int, why: str):
    with pytest.raises(UsageError, match=rf"^parallel.context = {ranks} can't serve .*: .*{why}"):
        check_context(make_model(family), ranks)


def test_dropout_may_not_depend_on_the_rank():
    """A model that is not trained has none."""
    model = make_model("qwen3")
    model.add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(UsageError, match="it has dropout"):
        check_context(model, 2)
    check_context(model.requires_grad_(False), 2)
