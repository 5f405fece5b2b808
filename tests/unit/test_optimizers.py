"""Optimisers against their papers' formulas in float64, what is saved of them, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import FakeRank, rows_of
from pydantic import TypeAdapter, ValidationError
from tiny import random_model
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen3Config, Qwen3MoeConfig

from cairn.checkpoint.manifest import CheckpointError
from cairn.config.optimizer import OPTIMIZERS as CONFIGS
from cairn.config.optimizer import AdamWConfig, BaseOptimizerConfig, OptimizerConfig
from cairn.config.trainer import SFTConfig
from cairn.formats.base import Content, WriteOptions
from cairn.formats.transfer.export_step import write_content
from cairn.run.errors import UsageError
from cairn.run.extensions import BadExtension
from cairn.run.output import no_progress
from cairn.trainer.models.trained import state_of
from cairn.trainer.optimizers import OPTIMIZERS, check_optimizer, make_optimizer
from cairn.trainer.optimizers.adamw_8bit import _numbers, dequantised, quantised
from cairn.trainer.optimizers.muon import orthogonal

PARSE = TypeAdapter(OptimizerConfig).validate_python
SHAPES = {
    **{"embed.weight": (11, 6), "layers.0.up.weight": (8, 6), "layers.0.down.weight": (6, 8)},
    **{"layers.0.norm.weight": (6,), "layers.1.experts.up": (3, 4, 6), "layers.1.conv.weight": (4, 1, 3)},
}
HIDDEN = {"layers.0.up.weight", "layers.0.down.weight", "layers.1.experts.up"}
VECTORS = {"layers.0.norm.weight"}


def parameters() -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def gradients(steps: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()} for _ in range(steps)
    ]


def stepped(config: BaseOptimizerConfig, steps: int = 3) -> dict[str, torch.nn.Parameter]:
    changed = parameters()
    optimizer = make_optimizer(changed.items(), config)
    for of_step in gradients(steps):
        for name, parameter in changed.items():
            parameter.grad = of_step[name].clone()
        optimizer.step()
        optimizer.zero_grad()
    return changed


class Adam:
    """Kingma and Ba 2015 with decoupled decay, of one weight."""

    def __init__(self, config: Any):
        self.config, self.step, self.mean, self.square = config, 0, 0.0, 0.0

    def __call__(self, gradient: torch.Tensor) -> Any:
        self.step += 1
        first, second = self.config.betas
        self.mean = first * self.mean + (1 - first) * gradient
        self.square = second * self.square + (1 - second) * gradient**2
        mean, square = self.mean / (1 - first**self.step), self.square / (1 - second**self.step)
        return mean / (square**0.5 + self.config.eps)


def reference(config: Any, update: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    """`update(name)(gradient)`: what is subtracted, times the rate; decay is decoupled."""
    weights = {name: p.detach().double() for name, p in parameters().items()}
    rules = {name: update(name) for name in weights}
    for of_step in gradients(steps):
        for name, gradient in of_step.items():
            decay = 0.0 if name in VECTORS else config.weight_decay
            weights[name] = weights[name] * (1 - config.lr * decay) - config.lr * rules[name](
                gradient.double()
            )
    return weights


def assert_equal(found: dict[str, torch.nn.Parameter], wanted: dict[str, torch.Tensor], rtol: float = 1e-5):
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.detach().double(), wanted[name], rtol=rtol, atol=rtol, msg=name)


def test_adamw_is_that_of_the_paper_and_of_torch():
    config = AdamWConfig(lr=0.1, weight_decay=0.3)
    found = stepped(config)
    assert_equal(found, reference(config, lambda name: Adam(config)))
    alone = parameters()  # in the two groups of earlier versions, bit by bit
    groups = [
        {"params": [p for p in alone.values() if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in alone.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch_adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for of_step in gradients(3):
        for name, parameter in alone.items():
            parameter.grad = of_step[name].clone()
        torch_adamw.step()
    assert all(torch.equal(found[name], alone[name]) for name in SHAPES)


def test_eight_bits_are_for_large_matrices_only():
    """All others are AdamW's."""
    config = PARSE({"type": "adamw_8bit", "lr": 0.1, "weight_decay": 0.3})
    assert_equal(stepped(config), reference(config, lambda name: Adam(config)), rtol=1e-4)


def nearest(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """What is left of `values` in eight bits, number by number."""
    numbers = _numbers(signed, torch.device("cpu")).double()
    assert len(numbers.unique()) == 256
    assert numbers.max() == 1
    assert numbers.abs().min() == 0
    left = values.double().clone()
    for row in left:
        for block in row.split(256):
            scale = block.abs().max()
            if scale:
                shares = block / scale
                codes = (shares[:, None] - numbers).abs().argmin(1)
                block.copy_(numbers[codes if signed else codes.maximum((block > 0).long())] * scale)
    return left


def test_eight_bits_are_the_nearest_numbers():
    """In blocks that end with the row; and a second moment above 0 stays above 0."""
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(5, 600, generator=draw) * 10 ** torch.randn(5, 600, generator=draw)
    values[0, :256], values[1, 3] = 0, 1e-30
    for signed, of in ((True, values), (False, values.square())):
        codes, scales = quantised(of, signed=signed)
        assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (5, 600), (5, 3))
        left = dequantised(codes, scales, signed=signed)
        torch.testing.assert_close(left.double(), nearest(of, signed=signed), rtol=1e-5, atol=0)
        assert (left[0, :256] == 0).all()
        if not signed:
            assert ((left > 0) == (of > 0)).all()


def large(steps: int, rows: slice = slice(None)) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """Some rows of a weight, and the optimiser that has changed it."""
    draw = torch.Generator().manual_seed(4)
    weight = torch.nn.Parameter(torch.randn(48, 300, generator=draw)[rows].clone())
    optimizer = make_optimizer([("w", weight)], PARSE({"type": "adamw_8bit", "lr": 0.1, "weight_decay": 0.3}))
    for _ in range(steps):
        weight.grad = torch.randn(48, 300, generator=draw)[rows].clone()
        optimizer.step()
    return weight, optimizer


def test_eight_bit_moments_are_rounded_after_each_update():
    draw, config = torch.Generator().manual_seed(4), AdamWConfig()
    weight = torch.randn(48, 300, generator=draw).double()
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in (1, 2, 3):
        gradient = torch.randn(48, 300, generator=draw).double()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        update = mean / (1 - 0.9**step) / ((square / (1 - 0.95**step)).sqrt() + config.eps)
        weight = weight * (1 - 0.1 * 0.3) - 0.1 * update
        mean, square = nearest(mean.float(), signed=True), nearest(square.float(), signed=False)
    found, optimizer = large(3)
    # Values in the middle of two numbers may be rounded either way.
    far = (found.detach().double() - weight).abs() > 1e-4
    assert far.float().mean() < 1e-3
    state = state_of(optimizer, {"w": found})
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items()} == {
        "w.step": (torch.float32, ()),
        "w.exp_avg": (torch.uint8, (48, 300)),
        "w.exp_avg_scale": (torch.float32, (48, 2)),
        "w.exp_avg_sq": (torch.uint8, (48, 300)),
        "w.exp_avg_sq_scale": (torch.float32, (48, 2)),
    }


def test_rows_of_a_weight_are_changed_alike_wherever_they_are(monkeypatch: pytest.MonkeyPatch):
    """On a rank that holds some of them, and a few at a time: bit by bit, state and all."""
    whole, of_whole = large(3)
    state = state_of(of_whole, {"w": whole})
    for rows, piece in ((slice(0, 20), 1 << 24), (slice(20, 48), 1 << 24), (slice(None), 700)):
        monkeypatch.setattr("cairn.trainer.optimizers.adamw_8bit.PIECE", piece)
        part, of_part = large(3, rows)
        assert torch.equal(part, whole[rows])
        for name, value in state_of(of_part, {"w": part}).items():
            assert torch.equal(value, state[name][rows] if value.ndim else state[name])


def test_eight_bit_state_lies_in_shards_as_the_weight_does():
    """Also where a rank has no row of it."""
    whole = torch.randn(100, 300)
    for rank in (0, 49, 63):
        with FakeRank(rank, 64) as mesh:
            local = whole[slice(*rows_of(rank, 64, 100))].clone()
            weight = torch.nn.Parameter(
                DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                )
            )
            optimizer = make_optimizer([("w", weight)], PARSE({"type": "adamw_8bit"}))
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            state = state_of(optimizer, {"w": weight})
            scales = state["w.exp_avg_scale"]
            assert isinstance(scales, DTensor)
            assert (scales.shape, scales.placements) == ((100, 2), weight.placements)
            assert scales.to_local().shape == (len(local), 2)
            assert isinstance(state["w.exp_avg"], DTensor)


def test_lion_is_that_of_the_paper():
    config = CONFIGS["lion"](lr=0.1, weight_decay=0.3)

    def update(name: str) -> Any:
        mean: Any = 0.0

        def rule(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal mean
            sign = (0.9 * mean + 0.1 * gradient).sign()
            mean = 0.99 * mean + 0.01 * gradient
            return sign

        return rule

    assert_equal(stepped(config), reference(config, update))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_adds_up_gradients(momentum: float):
    config = PARSE({"type": "sgd", "lr": 0.1, "momentum": momentum})

    def update(name: str) -> Any:
        total: Any = 0.0

        def rule(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total = momentum * total + gradient
            return total

        return rule

    assert_equal(stepped(config), reference(config, update))


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_makes_the_momentum_of_hidden_matrices_orthogonal(nesterov: bool):
    """In bfloat16, hence the tolerance; every expert's matrix is one. What is none is AdamW's, exactly."""
    config = PARSE({"type": "muon", "lr": 0.1, "weight_decay": 0.3, "nesterov": nesterov})

    def update(name: str) -> Any:
        if name not in HIDDEN:
            return Adam(config)
        mean: Any = 0.0

        def rule(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal mean
            mean = 0.95 * mean + 0.05 * gradient
            chosen = 0.05 * gradient + 0.95 * mean if nesterov else mean
            matrices = chosen if chosen.ndim == 3 else chosen[None]
            done = torch.stack([orthogonal(matrix, 5) for matrix in matrices]).reshape(chosen.shape)
            return 0.2 * math.sqrt(max(gradient.shape[-2:])) * done

        return rule

    found, wanted = stepped(config), reference(config, update)
    assert_equal({n: p for n, p in found.items() if n not in HIDDEN}, wanted)
    assert_equal({n: p for n, p in found.items() if n in HIDDEN}, wanted, rtol=3e-2)


def test_muon_is_torchs_own():
    name = "layers.0.up.weight"
    ours, theirs = parameters()[name], parameters()[name]
    about: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    first = make_optimizer([(name, ours)], PARSE({"type": "muon", **about}))
    second = torch.optim.Muon([theirs], **about, adjust_lr_fn="match_rms_adamw")
    for of_step in gradients(3):
        ours.grad, theirs.grad = of_step[name].clone(), of_step[name].clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (5, 24, 40)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, ...]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonal(matrix, 5))
    assert 0.5 < values.min() < values.max() < 1.3


def test_hidden_matrices_are_those_of_numbered_layers():
    """In real models: neither embeddings nor head; the experts' stacks are."""
    size = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    for config in (Qwen3Config(**size, **heads), Qwen3MoeConfig(**size, **heads, num_experts=4)):
        named = dict(random_model(config).named_parameters())
        named[
            "model.layers.0.mlp.gate.weight" if "moe" in config.model_type else "lm_head.weight"
        ].requires_grad_(False)
        groups = make_optimizer(named.items(), PARSE({"type": "muon"})).param_groups
        kinds = {id(p): group["kind"] for group in groups for p in group["params"]}
        for name, parameter in named.items():
            wanted = "hidden" if ".layers." in name else "matrices"
            wanted = "vectors" if parameter.ndim < 2 else wanted
            assert kinds.get(id(parameter)) == (wanted if parameter.requires_grad else None), name


def test_weight_decay_is_for_matrices_only():
    for kind in CONFIGS:
        config = PARSE({"type": kind, "weight_decay": 0.5})
        for group in make_optimizer(parameters().items(), config).param_groups:
            assert group["weight_decay"] == (0.0 if group["kind"] == "vectors" else 0.5)


# Settings


def test_every_type_has_its_settings():
    assert CONFIGS.keys() == OPTIMIZERS.keys()
    assert SFTConfig().optimizer == SFTConfig(optimizer={}).optimizer == AdamWConfig()
    for kind, config in CONFIGS.items():
        assert PARSE({"type": kind}) == config()
        assert SFTConfig.model_validate(SFTConfig(optimizer=config()).model_dump()).optimizer == config()
        state = config().state(1000, 100)
        held = stepped(config(), steps=1)
        optimizer = make_optimizer(held.items(), config())
        for name, parameter in held.items():
            parameter.grad = gradients(1)[0][name]
        optimizer.step()
        sizes = {"adamw_8bit": 2234, "adamw": 8800, "muon": 4800, "sgd": 4400, "lion": 4400}
        assert (state.bytes, state.counted) == (sizes[kind], True)
        if kind == "adamw_8bit":
            continue
        kept = state_of(optimizer, held)
        counted = sum(4 * value.numel() for name, value in kept.items() if not name.endswith(".step"))
        hidden = sum(held[name].numel() for name in HIDDEN)
        assert counted == config().state(hidden, sum(p.numel() for p in held.values()) - hidden).bytes


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "sgd", "betas": (0.9, 0.9)}, "betas"),
        ({"type": "sgd", "momentum": 0, "nesterov": True}, "nesterov = true needs a momentum above 0"),
        ({"type": "lion", "eps": 1e-8}, "eps"),
        ({"nesterov": True}, "nesterov"),
        ({"type": "paged_adamw_8bit"}, "is called adamw_8bit here"),
        ({"type": "mun"}, "did you mean muon"),
    ],
)
def test_settings_of_another_type_are_refused(section: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        PARSE(section)


# Optimisers of the user's own


class Counting(torch.optim.SGD):
    """Keeps a number of its own that is no tensor."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["steps"] = 1


class NoOptimizer:
    def __init__(self, params: Any, lr: float):
        pass


def test_own_optimisers_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with pytest.raises(BadExtension, match=r"optimizer\.args = \{'lr': 1e-05, 'wrong': 1\}"):
        check_optimizer(PARSE({"type": "test_optimizers:Counting", "args": {"wrong": 1}}))
    with pytest.raises(BadExtension, match=r"does not extend torch\.optim\.Optimizer"):
        check_optimizer(PARSE({"type": "test_optimizers:NoOptimizer"}))
    own = PARSE({"type": "test_optimizers:Counting"})
    named = parameters()
    optimizer = make_optimizer(named.items(), own)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with pytest.raises(UsageError, match=r"its state 'steps' of .* is of type int, not a tensor"):
        state_of(optimizer, named)


def test_other_programs_get_the_state_of_adamw_only(tmp_path: Path):
    content = Content({"model/model": {}}, optimizer="Muon")
    for name in ("hf-trainer", "dcp", "deepspeed"):
        with pytest.raises(CheckpointError, match=f"the state of Muon, and what {name} stores is AdamW's"):
            write_content(content, tmp_path, name, WriteOptions(), no_progress)
