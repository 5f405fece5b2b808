"""Logprobs of learned tokens: the same as from full logits, however they are made."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import random_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from cairn.config.model import PrecisionConfig
from cairn.run.batches import Sample
from cairn.trainer.packing import MicroBatch, fill_rows, transfer
from cairn.trainer.scoring.head import Head, both_of_logits
from cairn.trainer.scoring.passes import IN_PLACE, PURE, Passes, tried
from cairn.trainer.scoring.tokens import ON_CPU, Scorer

VOCABULARY, ROWS, WIDTH = 97, 3, 20
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MODELS = {
    "tied": (Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=True), True),
    "untied": (LlamaConfig(**SIZE, tie_word_embeddings=False), True),
    "with a bias": (PhiConfig(**{**SIZE, "num_key_value_heads": 2}), True),
    "another name": (GPTNeoXConfig(**SIZE, tie_word_embeddings=False), True),
    "capped": (Gemma2Config(**SIZE, head_dim=16, final_logit_softcapping=2.0, sliding_window=8), False),
    "scaled": (CohereConfig(**SIZE, logit_scale=0.5), False),
    "divided": (GraniteConfig(**SIZE, logits_scaling=3.0), False),
}


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    model = random_model(config)
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    return model


def make_micro(share: float = 0.35) -> MicroBatch:
    """Rows of two samples each; a share of the tokens is learned, and of the last row none."""
    draw = np.random.default_rng(0)
    rows = [
        [
            Sample(
                draw.integers(3, VOCABULARY, n).astype(np.int32),
                draw.random(n) < (share if row < ROWS - 1 else 0),
                {"logprobs": draw.normal(size=n).astype(np.float32)},
            )
            for n in (8, WIDTH - 8)
        ]
        for row in range(ROWS)
    ]
    return fill_rows(rows, columns=["logprobs"])


def expected(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> torch.Tensor:
    """From the model's own logits, all of them."""
    logits = model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False).logits[:, :-1]
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]
    return torch.where(micro.loss_mask[:, 1:], logprobs, 0.0)


def gradients(model: PreTrainedModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum in which every logprob has a weight of its own."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@contextmanager
def largest_tensor() -> Iterator[list[int]]:
    """In the first place of the list: the elements of the largest tensor that any operation made."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made = result if isinstance(result, list | tuple) else [result]
            largest[0] = max(largest[0], *(t.numel() for t in made if isinstance(t, torch.Tensor)), 0)
            return result

    with Watch():
        yield largest


class FakeGpu(TorchDispatchMode):
    """Counts what is sent to a GPU that isn't there; whatever a host must wait for raises.

    Tensors on it have shapes and no values.
    """

    def __init__(self):
        super().__init__()
        self.transfers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device.type != result.device.type:
            self.transfers += 1
        return result

    def moved(self, micro: MicroBatch) -> MicroBatch:
        with FakeTensorMode(allow_non_fake_inputs=True), self:
            return micro.to(torch.device("cuda"))


@pytest.fixture
def fake_gpu() -> FakeGpu:
    return FakeGpu()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1 << 26, 5 * VOCABULARY], ids=["at once", "in chunks"])
@pytest.mark.parametrize("passes", [IN_PLACE, PURE], ids=["in place", "pure"])
@pytest.mark.parametrize(("config", "is_plain"), MODELS.values(), ids=MODELS)
def test_logprobs_and_gradients_are_those_of_full_logits(
    config: PreTrainedConfig, is_plain: bool, passes: Passes, chunk: int, temperature: float
):
    """Of every parameter, for models that return their logits as they are and for those that don't."""
    model, micro = make_model(config), make_micro()
    scorer = Scorer(model, torch.device("cpu"), replace(ON_CPU, chunk_logits=chunk, passes=passes))
    assert scorer.is_plain == is_plain
    wanted = expected(model, micro, temperature)
    found = scorer.logprobs(micro, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    wanted_gradients = gradients(model, wanted)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, wanted_gradients[name], atol=2e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("config", [MODELS["tied"][0], MODELS["capped"][0]], ids=["plain", "capped"])
def test_where_nothing_is_learned_every_parameter_has_a_gradient_of_zero(config: PreTrainedConfig):
    """As ranks need that have no samples left: the others wait for their gradients."""
    model, micro = make_model(config), make_micro(share=0)
    found = Scorer(model, torch.device("cpu")).logprobs(micro, 1.0)
    assert not found.any()
    assert not any(gradient.any() for gradient in gradients(model, found).values())


def test_there_is_never_more_than_a_chunk_of_logits():
    """Neither in the forward nor in the backward pass; with full logits there is."""
    torch.manual_seed(0)
    vocabulary, learned, width = 1000, 200, 8
    hidden = torch.randn(learned, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    tokens = torch.randint(vocabulary, (learned,))
    results = []
    for chunk, most in ((10 * vocabulary, 10 * vocabulary), (1 << 26, learned * vocabulary)):
        with largest_tensor() as largest:
            logprobs = replace(ON_CPU, chunk_logits=chunk).logprobs(hidden, weight, None, tokens, 1.0)
            results.append((logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))))
        assert largest[0] == most
    for few, all_ in zip(*results, strict=True):
        torch.testing.assert_close(few, all_, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1 << 26, 350])
@pytest.mark.parametrize("with_bias", [True, False])
def test_entropies_are_those_of_full_logits(with_bias: bool, chunk: int):
    """With logprobs beside them, and gradients of both, against float64."""
    torch.manual_seed(0)
    vocabulary, learned, width, temperature = 100, 33, 8, 0.7
    hidden, weight, bias = (
        torch.randn(learned, width),
        torch.randn(vocabulary, width),
        torch.randn(vocabulary),
    )
    tokens = torch.randint(vocabulary, (learned,))
    scale = torch.randn(2, learned)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [one.to(dtype).requires_grad_() for one in (hidden, weight, *[bias] * with_bias)]
        if dtype == torch.float32:
            head = replace(ON_CPU, chunk_logits=chunk)
            given = (leaves[0], leaves[1], leaves[2] if with_bias else None)
            both = head.logprobs_and_entropies(*given, tokens, temperature)
        else:
            logits = torch.nn.functional.linear(*leaves) / temperature
            all_ = logits.log_softmax(-1)
            both = torch.stack([all_.gather(1, tokens[:, None])[:, 0], -(all_.exp() * all_).sum(-1)])
        results.append((both, *torch.autograd.grad((both * scale).sum(), leaves)))
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=1e-4)


def test_entropies_of_logits_that_exclude_tokens():
    """Minus infinity is no number's end: the entropy is that of the others."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf, 0.0]], requires_grad=True)
    _, entropies = both_of_logits(logits, torch.tensor([1]), 1.0)
    assert entropies.item() == pytest.approx(np.log(3))
    entropies.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["tied", "with a bias", "capped"])
def test_a_scorer_gives_entropies_where_they_are_asked_for(kind: str):
    """At the places of the logprobs, also of models that change their logits; 0 where nothing is learned."""
    model, micro = make_model(MODELS[kind][0]), make_micro()
    scorer = Scorer(model, torch.device("cpu"))
    plain, none = scorer.scores(micro, 0.7, entropies=False)
    assert none is None
    assert torch.equal(plain, scorer.logprobs(micro, 0.7))
    logprobs, entropies = scorer.scores(micro, 0.7, entropies=True)
    torch.testing.assert_close(logprobs, plain, atol=1e-5, rtol=1e-5)
    logits = model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False).logits
    exact = torch.distributions.Categorical(logits=logits[:, :-1].double() / 0.7).entropy()
    exact = torch.where(micro.loss_mask[:, 1:], exact, 0.0)
    torch.testing.assert_close(entropies.double(), exact, atol=1e-4, rtol=1e-4)
    assert all(one.isfinite().all() for one in gradients(model, entropies).values())


def test_in_bfloat16_the_gradient_of_the_embeddings_is_summed_up_in_float32():
    """Over many chunks its error stays that of one."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(512, 16), torch.randn(50, 16)
    tokens = torch.randint(50, (512,))
    errors = []
    for chunk in (1 << 26, 50):
        rounded = weight.bfloat16().requires_grad_()
        head = replace(ON_CPU, chunk_logits=chunk)
        head.logprobs(hidden.bfloat16(), rounded, None, tokens, 1.0).sum().backward()
        exact = rounded.detach().float().requires_grad_()
        ON_CPU.logprobs(hidden.bfloat16().float(), exact, None, tokens, 1.0).sum().backward()
        errors.append((rounded.grad - exact.grad).norm() / exact.grad.norm())
    assert errors[1] < 2 * errors[0] < 0.05


def test_a_micro_batch_is_one_transfer_to_a_gpu(fake_gpu: FakeGpu):
    """Of all its fields together, whatever their number."""
    micro = fake_gpu.moved(make_micro())
    assert fake_gpu.transfers == 1
    there = [micro.input_ids, micro.position_ids, micro.loss_mask, micro.learned, micro.bounds]
    assert {tensor.device.type for tensor in (*there, *micro.columns.values())} == {"cuda"}


def test_what_is_transferred_arrives_unchanged():
    """Values, data types and shapes; empty tensors among them."""
    micro = make_micro()
    empty = torch.empty(0, dtype=torch.int64)
    tensors = [micro.loss_mask, micro.bounds, empty, micro.columns["logprobs"], micro.input_ids]
    for sent, arrived in zip(tensors, transfer(tensors, torch.device("cpu")), strict=True):
        assert (sent.dtype, sent.shape) == (arrived.dtype, arrived.shape)
        assert torch.equal(sent, arrived)


@pytest.mark.parametrize("in_float32", [True, False])
def test_logits_in_float32_are_not_rounded(in_float32: bool):
    """In bfloat16 logprobs of logits near 20 are off by some 1e-2; what the inputs lost stays lost."""
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(64, 32, generator=draw)).bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, 32, generator=draw)).bfloat16().requires_grad_()
    tokens = torch.randint(VOCABULARY, (64,), generator=draw)
    head = Head.on(torch.device("cpu"), VOCABULARY, in_float32=in_float32)
    found = head.logprobs(hidden, weight, None, tokens, 1.0)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    error = (found - exact).abs().mean()
    assert error < 1e-6 if in_float32 else 1e-3 < error < 1e-1
    for ours, right in zip(
        torch.autograd.grad(found.sum(), (hidden, weight)),
        torch.autograd.grad(exact.sum(), (hidden, weight)),
        strict=True,
    ):
        assert (ours - right).norm() < 0.02 * right.norm()


def test_a_head_is_as_before_on_a_cpu():
    in_float32 = PrecisionConfig().settled(gpu=False).head == "float32"
    assert Head.on(torch.device("cpu"), VOCABULARY, in_float32=in_float32) == ON_CPU == Head(1 << 26, False)


def without_compiler(*_: object) -> torch.Tensor:
    raise RuntimeError("no C compiler")


def wrong(logits: torch.Tensor, wanted: torch.Tensor, temperature: float):
    return logits.sum(-1), logits.sum(-1)


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        (Passes(without_compiler, without_compiler), "no C compiler"),
        (replace(PURE, score=wrong), "not close"),
    ],
)
def test_passes_that_do_not_compile_or_err_are_not_used(passes: Passes, said: str, caplog):
    assert tried(passes, torch.device("cpu"), VOCABULARY) is IN_PLACE
    assert said in caplog.text
    assert tried(PURE, torch.device("cpu"), VOCABULARY) is PURE


def test_a_gpu_makes_logits_in_float32_without_copies_of_its_weights():
    """One product of bfloat16 operands, whose result is the largest tensor that is made."""
    head = Head(1 << 20, in_float32=True)
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, device="cuda") for n in (10, VOCABULARY))
        bias, tokens = (torch.empty(n, device="cuda") for n in (VOCABULARY, 10))
        with largest_tensor() as largest:
            logits = head.logits(hidden, weight, bias)
            found = head.logprobs(hidden, weight, bias, tokens.long(), 1.0)
        assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (10, VOCABULARY), "cuda")
        assert (found.dtype, found.shape, largest[0]) == (torch.float32, (10,), 10 * VOCABULARY)
