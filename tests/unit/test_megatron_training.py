"""What megatron-core is asked to train, and where its weights lie in transformers' tensors; without it."""

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cairn.checkpoint.tensors.placement import Scattered, at_places, made_together, share_of
from cairn.checkpoint.tensors.rows import RowTargets, in_rows
from cairn.config.cli import load
from cairn.config.parallel import ParallelConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.model.hub_layout import hub_layout
from cairn.run.errors import UsageError
from cairn.trainer.backends.megatron import families
from cairn.trainer.backends.megatron.families import INSTALL, check_megatron, looked_up, problem_of
from cairn.trainer.backends.megatron.parts import Shard, scattered
from cairn.trainer.group import NO_AXIS, Axis, RankLayout

SIZE: dict[str, Any] = {
    **{"vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
}
DENSE = [LlamaConfig(**SIZE), Qwen2Config(**SIZE, tie_word_embeddings=True), Qwen3Config(**SIZE)]
MOE: dict[str, Any] = {**SIZE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
ONE_EACH: dict[str, Any] = MOE | {"num_experts_per_tok": 1}
MODELS = [*DENSE, Qwen3MoeConfig(**MOE)]


@pytest.mark.parametrize(
    ("about", "parallel", "why"),
    [
        (GemmaConfig(**SIZE), {}, "model_type is 'gemma', and llama, qwen2, qwen3"),
        (LlamaConfig(**SIZE, attention_bias=True), {}, "attention_bias = True .* is not mapped"),
        (LlamaConfig(**SIZE, mlp_bias=True), {}, "mlp_bias = True"),
        (LlamaConfig(**SIZE, hidden_act="gelu"), {}, "hidden_act = 'gelu'"),
        (LlamaConfig(**SIZE, attention_dropout=0.1), {}, "attention_dropout = 0.1"),
        (
            LlamaConfig(**SIZE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            {},
            "rope_parameters = .*linear",
        ),
        (
            Qwen3Config(**SIZE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            {},
            "layer_types = .*sliding_attention",
        ),
        (
            LlamaConfig(**SIZE),
            {"tensor": 4},
            "its 2 key-value heads can't be shared equally by parallel.tensor = 4",
        ),
        (
            LlamaConfig(**SIZE | {"vocab_size": 25}),
            {"tensor": 2},
            "its 25 tokens of the vocabulary can't be shared",
        ),
        (
            Qwen3MoeConfig(**MOE),
            {"tensor": 2},
            "parallel.tensor = 2 cuts experts with sequence parallelism alone",
        ),
        (Qwen3MoeConfig(**MOE, mlp_only_layers=[1]), {}, r"mlp_only_layers = \[1\] .* is not mapped"),
        (Qwen3MoeConfig(**MOE, decoder_sparse_step=2), {}, "decoder_sparse_step = 2"),
        (
            LlamaConfig(**SIZE),
            {"pipeline": 4},
            "its 2 layers can't be shared equally by parallel.pipeline = 4",
        ),
        (
            Qwen3MoeConfig(**MOE),
            {"pipeline": 2},
            "router_aux_coef = 0.1 is the weight of a loss of all layers'",
        ),
        (Qwen3MoeConfig(**ONE_EACH, norm_topk_prob=True), {}, "num_experts_per_tok = 1"),
    ],
)
def test_models_that_are_not_mapped_are_refused(
    about: PreTrainedConfig, parallel: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UsageError, match=rf"backend = 'megatron' can't train the model: {why}"):
        check_megatron(about, ParallelConfig(**parallel), 0.1)


def test_a_loss_of_routers_needs_their_layers_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: name)
    check_megatron(MODELS[-1], ParallelConfig(), 0.1)
    check_megatron(MODELS[-1], ParallelConfig(), 0.0, recomputes=True)
    with pytest.raises(UsageError, match=r"router_aux_coef = 0.1 is .* \(activation_checkpointing\) give"):
        check_megatron(MODELS[-1], ParallelConfig(), 0.1, recomputes=True)


@pytest.mark.parametrize("about", MODELS, ids=lambda about: about.model_type)
def test_models_that_are_mapped_need_the_package(about: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch):
    assert problem_of(about, ParallelConfig(), 0.0) is None
    assert problem_of(about, ParallelConfig(pipeline=2), 0.0) is None
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"megatron-core is not installed; `{INSTALL}` installs it"):
        check_megatron(about, ParallelConfig(), 0.0)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--parallel.context", "2"), r"parallel.context was not tried"),
        (("--replicas", "2"), r"replicas was not tried"),
        (("--lora",), r"lora was not tried"),
        (("--freeze", "*norm*"), r"freeze was not tried"),
        (("--compile",), r"compile was not tried"),
        (("--keep-gathered",), r"keep_gathered was not tried"),
        (("--state-on", "host"), r"state_on was not tried"),
        (("--optimizer.type", "lion"), r"optimizer.type = 'lion' does not go: .* AdamW's state"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(flags: tuple[str, ...], what: str):
    load(SFTConfig, list(flags))
    with pytest.raises(UsageError, match=rf"{what}.* with backend = 'megatron'; leave one out"):
        load(SFTConfig, ["--backend", "megatron", *flags])


def test_what_does_not_go_with_it_in_rl_is_refused():
    load(TrainerConfig, ["--colocated"])
    with pytest.raises(UsageError, match="colocated was not tried with backend = 'megatron'; leave one out"):
        load(TrainerConfig, ["--backend", "megatron", "--colocated"])
    both = ["--backend", "megatron", "--router-replay", "--activation-checkpointing"]
    load(TrainerConfig, both)
    with pytest.raises(UsageError, match=r"router_replay, beside .* and parallel.pipeline = 2, does not go"):
        load(TrainerConfig, [*both, "--parallel.pipeline", "2"])


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 2, 3), (2, 2, 2), (2, 3, 1), (4, 1, 2)])
def test_ranks_of_all_stages_share_samples(tensor: int, pipeline: int, data: int):
    """Each rank has its place on three axes, and the ranks that report come in the order of the samples."""
    ranks = tensor * pipeline * data
    layouts = [
        RankLayout.of(
            rank, ranks, NO_AXIS, Axis(rank % tensor, tensor), Axis(rank // (ranks // pipeline), pipeline)
        )
        for rank in range(ranks)
    ]
    places = {(one.data.rank, one.pipeline.rank, one.tensor.rank) for one in layouts}
    assert places == {(d, p, t) for d in range(data) for p in range(pipeline) for t in range(tensor)}
    shared = {(one.data.rank, one.model.rank) for one in layouts}
    assert shared == {(d, m) for d in range(data) for m in range(pipeline * tensor)}
    assert all((one.data.size, one.model.size) == (data, pipeline * tensor) for one in layouts)
    reporting = list(range(ranks))[layouts[0].reporting]
    assert reporting == [rank for rank, one in enumerate(layouts) if one.reports]
    assert [layouts[rank].data.rank for rank in reporting] == list(range(data))


def test_the_token_that_pads_learns_nothing_where_it_is_looked_up():
    """As torch's Embedding with a padding_idx, which transformers makes."""
    weight = torch.randn(6, 4, requires_grad=True)
    tokens = torch.tensor([[1, 0, 3], [0, 3, 5]])
    for padding in (0, None):
        expected = torch.nn.functional.embedding(tokens, weight, padding_idx=padding)
        (right,) = torch.autograd.grad(expected.square().sum(), weight)
        found = looked_up(torch.nn.functional.embedding(tokens, weight), tokens, padding)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.square().sum(), weight)[0], right)


def parameters_of(about: Any, tensor: int, experts: range) -> dict[str, torch.nn.Parameter]:
    """megatron-core's parameters on one of `tensor` ranks, by its names, with some of the experts."""
    hidden, head = about.hidden_size, about.head_dim
    group = (about.num_attention_heads // about.num_key_value_heads + 2) * head

    def one(*shape: int, cut: int | None = None) -> torch.nn.Parameter:
        sizes = [size // tensor if dim == cut else size for dim, size in enumerate(shape)]
        made: Any = torch.nn.Parameter(torch.zeros(sizes), requires_grad=False)
        made.tensor_model_parallel, made.partition_dim = cut is not None, -1 if cut is None else cut
        return made

    found = {"embedding.word_embeddings.weight": one(about.vocab_size, hidden, cut=0)}
    for layer in range(about.num_hidden_layers):
        at = f"decoder.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": one(hidden),
            f"{at}self_attention.linear_proj.weight": one(hidden, about.num_attention_heads * head, cut=1),
            f"{at}self_attention.linear_qkv.weight": one(about.num_key_value_heads * group, hidden, cut=0),
            f"{at}pre_mlp_layernorm.weight": one(hidden),
        }
        if about.model_type == "qwen3_moe":
            found[f"{at}mlp.router.weight"] = one(about.num_experts, hidden)
            width = about.moe_intermediate_size
            for expert in experts:
                of = f"{at}mlp.experts.experts.{expert}."
                found[f"{of}linear_fc1.weight"] = one(2 * width, hidden)
                found[f"{of}linear_fc2.weight"] = one(hidden, width)
        else:
            found[f"{at}mlp.linear_fc1.weight"] = one(2 * about.intermediate_size, hidden, cut=0)
            found[f"{at}mlp.linear_fc2.weight"] = one(hidden, about.intermediate_size, cut=1)
        if about.model_type == "qwen2":
            found[f"{at}self_attention.linear_qkv.bias"] = one(about.num_key_value_heads * group, cut=0)
        if about.model_type in ("qwen3", "qwen3_moe"):
            found |= {f"{at}self_attention.{which}_layernorm.weight": one(head) for which in "qk"}
    found["decoder.final_layernorm.weight"] = one(hidden)
    if not about.tie_word_embeddings:
        found["output_layer.weight"] = one(about.vocab_size, hidden, cut=0)
    return found


def of_stage(about: Any, parameters: dict[str, torch.nn.Parameter], last: bool) -> dict[str, Any]:
    """Those of the first or the last one of two stages, each with half of the layers."""
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        at = name.split(".")
        layer = int(at[2]) if at[1] == "layers" else None
        of_last = layer * 2 >= about.num_hidden_layers if layer is not None else at[0] != "embedding"
        if of_last == last:
            found[name] = parameter
    if last and about.tie_word_embeddings:
        head: Any = torch.nn.Parameter(
            torch.zeros_like(parameters["embedding.word_embeddings.weight"]), False
        )
        head.tensor_model_parallel, head.partition_dim, head.shared = True, 0, True
        found["output_layer.weight"] = head
    return found


def held_by(
    about: Any, tensor: int, rank: int, data: int, number: int, last: bool | None
) -> dict[str, Scattered]:
    """What a rank's optimiser has of transformers' tensors: the values of flat parameters from one place in
    the buffer to another, which falls within parameters. last: which one of two stages; None: of one."""
    parameters = parameters_of(about, tensor, range(getattr(about, "num_experts", 0)))
    if last is not None:
        parameters = of_stage(about, parameters, last)
    total = sum(one.numel() for one in parameters.values())
    first, last = total * number // data, total * (number + 1) // data
    shards: list[Shard] = []
    position = 0
    for name, parameter in parameters.items():
        begin, end = (min(max(at - position, 0), parameter.numel()) for at in (first, last))
        if begin < end:
            shards.append(Shard(name, parameter, begin, parameter.view(-1)[begin:end]))
        position += parameter.numel()
    return scattered(shards, about, hub_layout(about), Axis(rank, tensor), torch.empty(0))


@pytest.mark.parametrize(
    ("about", "tensor", "data", "stages"),
    [(about, *ranks) for about in DENSE for ranks in [(1, 1, 1), (1, 3, 1), (2, 1, 1), (2, 3, 1), (2, 3, 2)]]
    + [(MODELS[-1], 1, 1, 1), (MODELS[-1], 1, 3, 1), (MODELS[-1], 1, 3, 2)],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_ranks_have_each_value_once(about: PreTrainedConfig, tensor: int, data: int, stages: int):
    """Whatever is read into what they hold is what is written of it, and sent: all values, each by one
    rank."""
    places = hub_layout(about).places
    written, sent, times, sendings = (
        {name: torch.zeros(place.shape) for name, place in places.items()} for _ in range(4)
    )
    numbers = {name: torch.arange(math.prod(place.shape)) + 1.0 for name, place in places.items()}
    which = [False, True] if stages == 2 else [None]
    for rank, number, last in itertools.product(range(tensor), range(data), which):
        held = at_places(held_by(about, tensor, rank, data, number, last), places)
        targets = RowTargets(held)
        for name, target in targets.tensors.items():
            share = share_of(name, target, rank)
            for first, values in share.cut(share.flat()):
                values.copy_(numbers[name][first : first + len(values)])
        targets.finish()
        for name, tensor_here in in_rows(held).items():
            share = share_of(name, tensor_here, rank).owned()
            for first, values in share.cut(share.flat()):
                written[name].view(-1)[first : first + len(values)] = values
                times[name].view(-1)[first : first + len(values)] += 1
        for name, tensor_here in held.items():
            share = share_of(name, made_together(tensor_here), rank).owned()
            for first, values in share.cut(share.flat()):
                sent[name].view(-1)[first : first + len(values)] = values
                sendings[name].view(-1)[first : first + len(values)] += 1
    for name, values in written.items():
        assert torch.equal(values.view(-1), numbers[name]), name
        assert torch.equal(sent[name].view(-1), numbers[name]), name
        assert (times[name] == 1).all(), name
        assert (sendings[name] == 1).all(), name
