"""The estimate of memory: what it counts is there in a real model, and what does not fit is refused."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from one_rank import joined
from test_recipe import write_records
from tiny import random_model, write
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cairn.checkpoint.saving.arena import Arena
from cairn.config.ckpt import CkptConfig
from cairn.config.inference import InferenceConfig
from cairn.config.optimizer import AdamWConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch import commands, main, memory
from cairn.launch.memory import (
    check_rank,
    check_serving,
    check_training,
    count_models,
    counted_if_possible,
    might_not_fit,
    refuse_rank_that_does_not_fit,
    refuse_what_can_not_be_served,
    refuse_what_does_not_fit,
    suggestion_of_replicas,
    training_needs,
)
from cairn.launch.needs import (
    GIB,
    MemoryPart,
    Need,
    TrainedModel,
    cache_left,
    gib,
    host_need,
    rank_need,
    server_need,
    with_cache,
)
from cairn.launch.plan import hardware
from cairn.run.errors import UsageError
from cairn.run.machine import machine_of
from cairn.trainer.models.footprint import Footprint, Growth, footprint_of
from cairn.trainer.models.model import build_model
from cairn.trainer.models.trained import Trained
from cairn.trainer.optimizers import make_optimizer

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder("qwen3", ...)`: a model's folder."""
    kinds = {
        "qwen3": Qwen3Config,
        "llama": LlamaConfig,
        "gemma2": Gemma2Config,
        "moe": lambda **all_: Qwen3MoeConfig(
            **all_, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
        ),
    }

    def make(kind: str, **changed: Any) -> Path:
        target = tmp_path_factory.mktemp(kind)
        return write(random_model(kinds[kind](**{**SMALL, "tie_word_embeddings": False, **changed})), target)

    return make


def config_of(**settings: Any) -> SFTConfig:
    return SFTConfig.model_validate(settings).settled(gpu=False)


def settled_for_gpus(**settings: Any) -> SFTConfig:
    return SFTConfig.model_validate(settings).settled(gpu=True)


def part(need: Need, words: str) -> int:
    """The bytes of the parts whose description has these words."""
    return sum(each.bytes for each in need.parts if words in each.what)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "moe"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_is_counted_is_what_a_sharded_model_holds(kind: str, compute: str, folder: Callable[..., Path]):
    """Weights, gradients, both moments, and the arena's bytes, after a step of a really built model."""
    config = config_of(precision={"compute": compute}, ckpt=CkptConfig())
    path = folder(kind)
    footprint = footprint_of(str(path), compute=compute, activation_checkpointing=False)
    need = rank_need(footprint, config, ranks=1, gpu=False, chunk_logits=1 << 26)
    with joined() as group:
        model = build_model(path, config, group)
        for parameter in model.parameters():
            torch.nn.init.normal_(local(parameter.detach()), std=0.02)
        trained = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
        places = torch.arange(16)[None]
        model(input_ids=places, position_ids=places, use_cache=False).logits.float().sum().backward()
        for parameter in model.parameters():  # experts that no token was routed to
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        trained.optimizer.step()
        weights = sum(local(p).nbytes for p in model.parameters())
        gradients = sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None)
        moments = sum(
            local(value).nbytes
            for state in trained.optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        )
        assert part(need, "weights, float32") == weights
        assert part(need, "gradients, float32") == gradients
        assert part(need, "moments") == moments
        arena = Arena(trained.tensors(), 0, 1 << 30)
        try:
            host = host_need(footprint, need, config, ranks=1, gpu=False)
            assert part(host, "copy of the state") == pytest.approx(arena.plan.arena_bytes, rel=0.1)
        finally:
            arena.close()


def test_shards_are_counted_as_fsdp_cuts_them():
    """Along the first dimension, so that the first rank has the most: three rows of seven on three ranks."""
    footprint = Footprint(
        shapes=((7, 10), (3,), ()),
        layers=(70,),
        embeddings=0,
        head=0,
        vocabulary=1,
        kept=Growth(0, 0),
        layer=Growth(0, 0),
        width=2,
    )
    assert footprint.shard(1) == footprint.elements == 74
    assert footprint.shard(3) == 3 * 10 + 1 + 1
    assert footprint.shard(100) == 10 + 1 + 1


def kept_by(model: PreTrainedModel, rows: int, tokens: int) -> int:
    """Bytes that torch really keeps for the backward pass, on the CPU, of all but weights and the head."""
    known = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(rows * tokens).view(rows, tokens) % 300
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(
            input_ids=ids, position_ids=torch.arange(tokens)[None].expand(rows, -1), use_cache=False
        )
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("kind", "checkpointing", "compute"),
    [
        *itertools.product(["qwen3", "llama"], [False, True], ["float32", "bfloat16"]),
        ("moe", False, "bfloat16"),
    ],
)
def test_activations_are_those_that_torch_keeps(
    kind: str, checkpointing: bool, compute: str, folder: Callable[..., Path]
):
    """A single sample in each row, so without a mask: the CPU's fused attention keeps what a GPU's does."""
    path = folder(kind)
    footprint = footprint_of(str(path), compute=compute, activation_checkpointing=checkpointing)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, compute)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for rows, tokens in ((1, 200), (2, 96)):
        assert footprint.kept.bytes(rows, tokens) == pytest.approx(kept_by(model, rows, tokens), rel=0.1)


def test_attention_that_is_not_fused_grows_with_pairs_of_tokens(folder: Callable[..., Path]):
    """Gemma 2 caps its scores: on CPUs by the plain implementation, on GPUs by FlexAttention."""

    def kept(kind: str, **where: Any) -> Growth:
        return footprint_of(str(folder(kind)), activation_checkpointing=False, **where).kept

    capped = kept("gemma2", compute="float32")
    assert kept("qwen3", compute="float32").pair == 0
    assert kept("gemma2", compute="bfloat16", capability=(9, 0)).pair == 0
    assert kept("gemma2", compute="bfloat16", capability=(9, 0), attention="dense").pair > 0
    with pytest.raises(UsageError, match=r"attention = 'varlen' can't serve Gemma2ForCausalLM"):
        kept("gemma2", compute="bfloat16", capability=(9, 0), attention="varlen")
    assert capped.pair >= SMALL["num_hidden_layers"] * SMALL["num_attention_heads"] * 4
    assert capped.bytes(1, 2000) > 3 * capped.bytes(1, 1000)


# What fits


def test_eight_billion_parameters_on_eight_gpus_and_not_on_one(tmp_path: Path):
    """16 bytes a parameter: 131 GB on one GPU, 16 GB on each of eight."""
    shape = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    shape.save_pretrained(tmp_path)
    few = footprint_of(str(tmp_path), compute="bfloat16", activation_checkpointing=False)
    # Its 36 layers, of which four were counted, are all alike.
    layer = few.shapes[1 : 1 + (len(few.shapes) - 3) // 4]
    footprint = Footprint(
        shapes=few.shapes[:1] + layer * 36 + few.shapes[-2:],
        layers=few.layers[:1] * 36,
        embeddings=few.embeddings,
        head=few.head,
        vocabulary=few.vocabulary,
        kept=Growth(few.kept.each * 9, 0),
        layer=few.layer,
        width=2,
    )
    assert footprint.elements == pytest.approx(8.19e9, rel=0.001)
    config = settled_for_gpus()

    def needs(ranks: int) -> tuple[Need, Need]:
        rank = rank_need(footprint, config, ranks=ranks, gpu=True, chunk_logits=1 << 29)
        return rank, host_need(footprint, rank, config, ranks=ranks, gpu=True)

    with pytest.raises(UsageError, match=r"^training needs 12\d.\d GiB a GPU, has 80.0 GiB: 30.5 GiB for w"):
        check_training(*needs(1), config, machine_of("1x80G,1T"))
    assert check_training(*needs(8), config, machine_of("8x80G,1T")) == []


ROOMY = machine_of("2x80G,1T")


def test_layers_stay_gathered_where_gpus_have_room_for_all(folder: Callable[..., Path]):
    """By estimate; not where that is given, on CPUs, beside a server or other models, or in host memory."""
    model = str(folder("qwen3"))
    config = settled_for_gpus(workers=2, micro_batch_size=1)
    counted = count_models(model, config, ROOMY)
    kept = counted.with_room_used(config, ROOMY)
    assert kept.keep_gathered
    apart, together = (counted.needs(one, ROOMY).rank for one in (config, kept))
    layers = footprint_of(model, compute="bfloat16", activation_checkpointing=False).layers
    more = part(together, "weights gathered") - part(apart, "weights gathered")
    assert more == 2 * (sum(layers) - max(layers)) > 0
    between = replace(ROOMY.gpus[0], memory=together.total - 1)
    full = replace(ROOMY, gpus=(between, between))
    for other, machine in [
        (config, full),
        (config, machine_of("1T")),
        (settled_for_gpus(workers=2, state_on="host"), ROOMY),
        (settled_for_gpus(workers=2, micro_batch_size=1, keep_gathered=False), ROOMY),
    ]:
        assert counted.with_room_used(other, machine) == other
    compared = TrainerConfig(kl={"reference": "start", "coef": 0.1}, micro_batch_size=1).settled(gpu=True)
    assert compared.teachers
    assert count_models(model, compared, ROOMY).with_room_used(compared, ROOMY) == compared


def test_passes_have_as_many_rows_as_gpus_have_room_for(folder: Callable[..., Path]):
    """Up to 16,384 tokens, in four fifths of the memory by estimate; never where the size is given."""
    config = settled_for_gpus(workers=2, keep_gathered=False)
    counted = count_models(str(folder("qwen3")), config, ROOMY)

    def rows(memory: float, **settings: Any) -> int:
        gpu = replace(ROOMY.gpus[0], memory=int(memory))
        chosen = counted.with_room_used(
            config.model_copy(update=settings), replace(ROOMY, gpus=(ROOMY.gpus[0], gpu))
        )
        assert chosen.pass_tokens == (chosen.micro_batch_tokens or chosen.rows * chosen.seq_len)
        return chosen.rows

    assert (rows(1 << 40), rows(1 << 40, seq_len=4096), rows(1 << 40, seq_len=10_000)) == (8, 4, 1)
    for fitting in (2, 4, 8):
        total = counted.needs(config.model_copy(update={"micro_batch_size": fitting}), ROOMY).rank.total
        assert rows(total / 0.8 + 1) == fitting
        assert rows(total / 0.8 - 1) == fitting // 2
    assert rows(1 << 40, micro_batch_size=3) == 3
    assert rows(1 << 40, micro_batch_tokens=4096) == 1
    assert rows(1 << 40, state_on="host") == 1
    assert SFTConfig().settled(gpu=False).rows == 1, "as runs on CPUs have always had"


def need_of(counted: float, estimated: float, share: str = "a GPU") -> Need:
    return Need(
        share, (MemoryPart("x", int(counted * GIB)), MemoryPart("y", int(estimated * GIB), counted=False))
    )


def test_only_what_can_be_counted_is_refused():
    config = settled_for_gpus(micro_batch_size=2)
    host = need_of(0, 1, "of the machine's memory")
    assert check_training(need_of(70, 5), host, config, ROOMY) == []
    (warning,) = check_training(need_of(70, 20), host, config, ROOMY, "--trainer.")
    assert warning.startswith("training needs about 90.0 GiB a GPU, has 80.0 GiB, as estimated")
    for setting in (
        "a lower --trainer.micro-batch-size",
        "--trainer.activation-checkpointing",
        "--trainer.wo",
    ):
        assert setting in warning
    with pytest.raises(
        UsageError, match=r"^training needs 90.0 GiB a GPU, has 80.0 GiB: 90.0 GiB for x; and"
    ):
        check_training(need_of(90, 0), host, config, ROOMY)
    with pytest.raises(UsageError, match=r"needs 2000.0 GiB of the machine's memory, has 1024.0 GiB"):
        check_training(need_of(1, 0), need_of(2000, 0, "of the machine's memory"), config, ROOMY)


def test_what_would_help_is_what_is_not_done_yet():
    """Where weights and the optimiser's state are can be changed as well."""
    plain = settled_for_gpus()
    with pytest.raises(UsageError, match=r"more --workers, larger GPUs, --state-on host, which is slow\."):
        check_rank(need_of(90, 0), plain, ROOMY)
    copies = settled_for_gpus(replicas=2, workers=2, state_on="host")
    with pytest.raises(UsageError, match=r"What helps: fewer --replicas, more --workers, larger GPUs\."):
        check_rank(need_of(90, 0), copies, ROOMY)


def test_the_smallest_gpu_decides():
    machine = machine_of("2x80G,1T")
    small = machine_of("1x24G,1T").gpus
    mixed = type(machine)(machine.gpus + small, machine.memory)
    with pytest.raises(UsageError, match=r"has 24.0 GiB"):
        check_serving(need_of(50, 0), mixed)


def test_a_save_that_does_not_fit_is_no_reason_to_refuse(folder: Callable[..., Path]):
    """It goes in pieces."""
    config = config_of(ckpt=CkptConfig())
    footprint = footprint_of(str(folder("qwen3")), compute="float32", activation_checkpointing=False)
    rank = rank_need(footprint, config, ranks=2, gpu=True, chunk_logits=1)
    assert host_need(footprint, rank, config, ranks=2, gpu=True).counted == 0
    saved = host_need(footprint, rank, config, ranks=2, gpu=True)
    assert part(saved, "copy of the state") == 12 * footprint.elements
    weights = config_of(ckpt=CkptConfig(training_state=False))
    assert part(host_need(footprint, rank, weights, ranks=2, gpu=True), "copy") == 4 * footprint.elements


def test_deltas_are_found_by_a_copy_of_the_policy(folder: Callable[..., Path]):
    """In the data type that servers get, once for all ranks."""
    footprint = footprint_of(str(folder("qwen3")), compute="float32", activation_checkpointing=False)

    def host(encoding: str, *, gpu: bool) -> Need:
        config = TrainerConfig(weight_encoding=encoding).settled(gpu=gpu)
        rank = rank_need(footprint, config, ranks=2, gpu=gpu, chunk_logits=1)
        return host_need(footprint, rank, config, ranks=2, gpu=gpu)

    for gpu, width in ((False, 4), (True, 2)):
        kept = host("delta", gpu=gpu)
        assert part(kept, "the newest policy") == width * footprint.elements
        assert kept.counted - host("full", gpu=gpu).counted == width * footprint.elements


def test_replicas_hold_copies_and_a_state_on_the_host_is_counted_there(folder: Callable[..., Path]):
    footprint = footprint_of(str(folder("qwen3")), compute="bfloat16", activation_checkpointing=False)

    def needs(**changed: Any) -> tuple[Need, Need]:
        config = config_of(workers=4, **changed)
        rank = rank_need(footprint, config, ranks=4, gpu=True, chunk_logits=1)
        return rank, host_need(footprint, rank, config, ranks=4, gpu=True)

    for replicas, shards in ((1, 4), (2, 2)):
        rank, host = needs(replicas=replicas)
        assert part(rank, "moments") == 8 * footprint.shard(shards)
        assert host.counted == 0
        rank, host = needs(replicas=replicas, state_on="host")
        assert not any("moments" in part.what for part in rank.parts)
        assert host.counted == 4 * 16 * footprint.shard(shards)


def test_ranks_that_share_rows_have_their_part_of_activations_and_logits(folder: Callable[..., Path]):
    """And their shards of the weights as before. The model's heads are looked at."""
    path = str(folder("qwen3"))
    how = {"compute": "bfloat16", "activation_checkpointing": False}
    alone, shared = (
        rank_need(
            footprint_of(path, **how, context=context),
            config_of(workers=4, seq_len=4096, parallel={"context": context}),
            ranks=4,
            gpu=True,
            chunk_logits=1 << 40,
        )
        for context in (1, 2)
    )
    for what in ("weights, float32", "moments", "weights gathered"):
        assert part(shared, what) == part(alone, what)
    assert part(shared, "activations of 1 x 4096 tokens on 2 ranks") == part(alone, "activations of") // 2
    assert part(shared, "chunk of logits") < part(alone, "chunk of logits")
    with pytest.raises(UsageError, match=r"parallel.context = 3 .* its \d+ attention heads can't be shared"):
        footprint_of(path, **how, context=3)


def test_ranks_that_share_matrices_gather_and_keep_their_part_of_a_layer(folder: Callable[..., Path]):
    """Hidden states, which are all that recomputed layers keep, are on each rank."""
    path = str(folder("qwen3"))

    def needs(tensor: int, again: bool) -> Need:
        how = {"compute": "bfloat16", "activation_checkpointing": again}
        config = config_of(
            workers=4, seq_len=4096, parallel={"tensor": tensor}, activation_checkpointing=again
        )
        footprint = footprint_of(path, **how, tensor=tensor)
        return rank_need(footprint, config, ranks=4, gpu=True, chunk_logits=1 << 40)

    alone, shared = (needs(tensor, again=False) for tensor in (1, 2))
    for what in ("weights, float32", "moments"):
        assert part(shared, what) == part(alone, what)
    footprint = footprint_of(path, compute="bfloat16", activation_checkpointing=False)
    on_the_way = "gradients of a layer on their way"
    assert part(alone, "weights gathered") - part(shared, "weights gathered") == max(footprint.layers)
    assert part(shared, on_the_way) == part(alone, on_the_way) // 2
    assert part(alone, "activations of") // 2 < part(shared, "activations of") < part(alone, "activations of")
    assert part(shared, "chunk of logits") < part(alone, "chunk of logits")
    recomputed = [part(needs(tensor, again=True), "activations of") for tensor in (1, 2)]
    assert recomputed[1] == pytest.approx(recomputed[0], rel=0.01)
    with pytest.raises(UsageError, match=r"parallel.tensor = 3 .* its \d+ attention heads can't be shared"):
        footprint_of(path, compute="bfloat16", activation_checkpointing=False, tensor=3)


def test_models_beside_the_policy_are_shared_by_all_ranks_whatever_trains_it(folder: Callable[..., Path]):
    """A critic and a reference are FSDP2's; activations of the policy that are computed again count less."""
    path = str(folder("qwen3"))
    whole, again = (
        footprint_of(path, compute="bfloat16", activation_checkpointing=one) for one in (False, True)
    )
    others: dict[str, Any] = {
        "beside": [TrainedModel("critic", whole, AdamWConfig())],
        "frozen": [whole],
        **{"ranks": 4, "gpu": True, "chunk_logits": 1 << 20},
    }
    of_fsdp2 = rank_need(whole, config_of(workers=4), **others)
    how = {"workers": 4, "backend": "megatron", "parallel": {"pipeline": 2, "tensor": 2}}
    kept, recomputed = (
        rank_need(one, config_of(**how, activation_checkpointing=one is again), **others)
        for one in (whole, again)
    )
    for what in ("weights of another model, by kl", "critic's weights and state", "critic's gradients"):
        assert part(kept, what) == part(of_fsdp2, what) > 0
    assert part(kept, "gathered for a layer of another model") == 2 * (max(whole.layers) + whole.head)
    assert 0 < 2 * part(recomputed, "activations of") < part(kept, "activations of")


def test_ranks_that_share_experts_gather_their_own(folder: Callable[..., Path]):
    """They hold as many weights, and equal parts where FSDP2 leaves some without experts."""
    path = str(folder("moe"))
    how = {"compute": "bfloat16", "activation_checkpointing": False}

    def need(expert: int, ranks: int) -> Need:
        config = config_of(workers=ranks, parallel={"expert": expert})
        footprint = footprint_of(path, **how, expert=expert)
        return rank_need(footprint, config, ranks=ranks, gpu=True, chunk_logits=1 << 40)

    alone, shared = need(1, 4), need(2, 4)
    for what in ("weights, float32", "gradients, float32", "moments", "activations of"):
        assert part(shared, what) == part(alone, what)
    one = footprint_of(path, **how)
    of_layer = one.experts // len(one.layers)
    assert of_layer == 4 * 3 * 64 * SMALL["hidden_size"]
    assert part(alone, "weights gathered") - part(shared, "weights gathered") == 2 * of_layer // 2
    both = config_of(workers=4, parallel={"expert": 2, "tensor": 2})
    halved = footprint_of(path, **how, expert=2, tensor=2)
    cut = rank_need(halved, both, ranks=4, gpu=True, chunk_logits=1 << 40)
    rest = one.layers[0] - of_layer  # of which each rank has a half; experts are as without `tensor`
    assert part(shared, "weights gathered") - part(cut, "weights gathered") == 2 * (rest - rest // 2)
    back = "what experts on other ranks send back"
    assert part(cut, back) == part(shared, back) // 2
    assert (part(alone, back), part(shared, back)) == (
        0,
        len(one.layers) * 2 * 2048 * SMALL["hidden_size"] * 2,
    )
    copies = [
        part(
            host_need(found, alone, config_of(workers=4, ckpt={}), ranks=4, gpu=False), "a copy of the state"
        )
        for found in (one, footprint_of(path, **how, expert=2))
    ]
    assert copies[0] == copies[1] >= 3 * 4 * one.elements
    # With 8 ranks, FSDP2 would give four of them an expert of each layer.
    of_rank = [part(need(expert, 8), "weights, float32") for expert in (1, 4)]
    assert of_rank[0] - of_rank[1] == 4 * one.experts * (1 / 4 - 1 / 8)
    for kind, expert, reason in (
        ("moe", 3, "its 4 experts can't be shared"),
        ("qwen3", 2, "have no experts"),
    ):
        with pytest.raises(UsageError, match=rf"parallel.expert = {expert} can't serve Qwen3\w+: .*{reason}"):
            footprint_of(str(folder(kind)), **how, expert=expert)
    assert footprint_of(str(folder("qwen3")), **how, expert=2, is_policy=False).dealt_to == 1


def test_a_model_too_large_for_a_cpu_is_refused_and_others_are_not_even_counted(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    path = str(folder("qwen3"))
    config = config_of(workers=2)
    needs = training_needs(path, config, machine_of("64G"))
    tight = type(ROOMY)((), needs.rank.counted * 2 - 1)
    with pytest.raises(UsageError, match=r"^training needs .* MiB of the machine's memory, has .* MiB: "):
        refuse_what_does_not_fit(count_models(path, config, tight), config, tight, "--")
    assert might_not_fit(path, config, tight)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "count", lambda *_, **__: pytest.fail("counting imports torch"))
        assert not might_not_fit(path, config, machine_of("64G"))


def noting_counts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that are counted from now on."""
    counted: list[str] = []

    def counting(of: str, **how: Any) -> Footprint:
        counted.append(of)
        return footprint_of(of, **how)

    monkeypatch.setattr("cairn.trainer.models.footprint.footprint_of", counting)
    return counted


def test_a_run_that_does_not_fit_ends_before_it_begins(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = write_records(tmp_path / "a.jsonl", 50)
    settings: dict[str, Any] = {
        "model": {"name": str(folder("qwen3"))},
        "data": {"name": str(data)},
        "output_dir": str(tmp_path / "run"),
    }
    monkeypatch.setattr(hardware, "this_machine", lambda: machine_of("2x0.001G,1T"))
    monkeypatch.setattr(hardware, "torch_without_cuda", lambda: None)
    monkeypatch.setattr(commands, "begin", lambda *_, **__: pytest.fail("it began"))
    counted = noting_counts(monkeypatch)
    with pytest.raises(UsageError, match=r"^training needs .* MiB a GPU, has 1.0 MiB: .* more --workers"):
        commands.start("sft", SFTConfig.model_validate(settings))
    assert counted == [settings["model"]["name"]], "once for both steps that need it"
    assert not (tmp_path / "run" / "roles.json").exists()


def test_a_rank_in_a_given_cluster_checks_its_own_gpu(
    folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
):
    """And not the machine, whose other ranks are not known."""
    config = settled_for_gpus(workers=2)
    counted = count_models(str(folder("qwen3")), config, ROOMY)
    with pytest.raises(UsageError, match=r"^training needs .* a GPU, has 1.0 MiB"):
        refuse_rank_that_does_not_fit(counted, config, machine_of("1x0.001G,1T"))
    refuse_rank_that_does_not_fit(counted, config, type(ROOMY)(ROOMY.gpus, 1))
    assert caplog.text == ""
    refuse_rank_that_does_not_fit(counted, config, machine_of("1x1G,1T"))
    assert "What helps" in caplog.text


@pytest.mark.parametrize(
    ("settings", "machine", "neighbours", "replicas"),
    [
        ({"workers": 16}, "8x80G,1T", 8, 2),
        ({"workers": 8}, "8x80G,1T", 8, None),
        ({"workers": 12}, "8x80G,1T", 8, None),
        ({"workers": 16, "replicas": 2}, "8x80G,1T", 8, None),
        ({"workers": 16}, "8x0.01G,1T", 8, None),
        ({"workers": 16}, "64G", 8, None),
    ],
    ids=["fits", "one node", "unequal nodes", "given", "does not fit", "CPUs"],
)
def test_replicas_are_suggested_where_each_node_can_hold_the_model(
    folder: Callable[..., Path], settings: dict[str, Any], machine: str, neighbours: int, replicas: int | None
):
    config = settled_for_gpus(**settings)
    has = machine_of(machine)
    hint = suggestion_of_replicas(count_models(str(folder("qwen3")), config, has), config, has, neighbours)
    assert (hint is None) == (replicas is None)
    if hint:
        assert hint.startswith(f"--replicas {replicas} would have each of the 2 nodes gather layers")


def test_a_gpu_that_somebody_else_uses_is_named(
    folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    """Before its ranks find it full."""
    path, config = str(folder("qwen3")), settled_for_gpus()
    one, two = machine_of("2x80G").gpus
    counted = count_models(path, config, ROOMY)
    refuse_what_does_not_fit(counted, config, type(ROOMY)((one, two), 1 << 40), "--")
    assert capsys.readouterr().out == ""
    refuse_what_does_not_fit(counted, config, type(ROOMY)((one, replace(two, used=79 * GIB)), 1 << 40), "--")
    told = capsys.readouterr().out
    assert told.startswith(
        "warning: of GPU 1 79.0 GiB are in use, which leaves 1.0 GiB for a rank that needs"
    )
    assert "with --gpus" in told


def test_a_server_whose_weights_do_not_fit_is_refused(folder: Callable[..., Path]):
    assert server_need(8 * 10**9, "bfloat16", tensor_parallel=2).counted == 8 * 10**9
    path = str(folder("qwen3"))
    config = InferenceConfig()
    refuse_what_can_not_be_served(path, config, machine_of("64G"), "--")
    refuse_what_can_not_be_served(path, config, ROOMY, "--")
    tiny = type(ROOMY)((type(ROOMY.gpus[0])(0, "GPU-0", "tiny", 1000),), 1 << 40)
    with pytest.raises(UsageError, match=r"^the server needs .* a GPU, has .*: .* for weights, .*tensor-par"):
        refuse_what_can_not_be_served(path, config, tiny, "--")


def test_a_cache_of_a_given_size_counts(folder: Callable[..., Path]):
    """Without one, vLLM takes what is left."""
    weights = server_need(8 * 10**9, "bfloat16", tensor_parallel=1)
    assert with_cache(weights, None) == weights
    assert with_cache(weights, "64G").counted == weights.counted + 64 * GIB
    assert cache_left(weights, 80 * GIB) == pytest.approx(0.92 * 80 * GIB - 16e9 - 2.5 * GIB, rel=0.01)
    assert cache_left(weights, GIB) == 0
    full = server_need(8 * 10**9, "bfloat16", tensor_parallel=1, logits=1024 * 151_936)
    assert full.counted == weights.counted
    assert full.total - weights.total == pytest.approx(1.74 * GIB, rel=0.01)
    path = str(folder("qwen3"))
    with pytest.raises(UsageError, match=r"80.0 GiB.* 90.0 GiB for keys and .*a lower --kv-cache-memory"):
        refuse_what_can_not_be_served(path, InferenceConfig(kv_cache_memory="90G"), ROOMY, "--")


def test_a_model_whose_code_can_not_be_counted_starts_anyway(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no values on the meta device")

    monkeypatch.setattr("cairn.trainer.models.footprint.footprint_of", fail)
    counted = counted_if_possible(str(folder("qwen3")), settled_for_gpus(), ROOMY)
    refuse_what_does_not_fit(counted, settled_for_gpus(), ROOMY, "--")
    assert "memory is not estimated" in caplog.text


@draws.seldom
def test_a_dry_run_prints_the_estimate(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Of the machine that is asked about, with the words that the command would refuse it with.

    Each model is counted once, and the ranks of a given Ray cluster gather layers one by one.
    """
    counted = noting_counts(monkeypatch)

    def printed(command: str, *argv: str, code: int = 0) -> str:
        arguments = [command, "--dry-run", "--model.name", str(folder("qwen3")), *argv]
        monkeypatch.setattr("sys.argv", arguments)
        assert getattr(main, command)() == code
        return capsys.readouterr().err

    text = printed("rl", "--machine", "4x80G,1T")
    for line in (
        "training needs about .* a GPU, has 80.0 GiB:",
        "of the machine's memory, has 1024.0 GiB:",
        r"[GM]iB +activations of 8 x 2048 tokens \(estimated\)",
        "  trainer.micro_batch_size = 8: by estimate, each GPU has room for so many rows, up to 16384 t",
        "the server needs about .* a GPU, has 80.0 GiB:",
        "weights, bfloat16",
    ):
        assert re.search(line, text), (line, text)
    assert "error" not in text
    counted.clear()
    text = printed("sft", "--machine", "1x0.001G,1T", code=2)
    assert "error: training needs " in text
    assert len(counted) == 1
    assert "keep_gathered = True" not in text
    text = printed("sft", "--machine", "2x80G,1T", "--workers", "2")
    assert "weights gathered for all layers" in text
    assert "  keep_gathered = True: by estimate, each GPU has room for all layers at once" in text
    text = printed("sft", "--machine", "2x80G,1T", "--workers", "2", "--ray.address", "127.0.0.1:1")
    assert "weights gathered for a layer and the head" in text
    assert "keep_gathered = True" not in text
    text = printed("inference", "--machine", "1x0.0001G,1T", code=2)
    assert "error: the server needs " in text
    assert "the server" not in printed("sft", "--machine", "64G")
    text = printed("rl", "--machine", "4x80G,1T")
    assert "recorded experts" not in text
    assert "router_replay records" not in text
    moe = ("--model.name", str(folder("moe")), "--trainer.router-replay", "true")
    text = printed("rl", "--machine", "4x80G,1T", *moe)
    each = footprint_of(str(folder("moe")), compute="bfloat16", activation_checkpointing=False).recorded
    assert each == SMALL["num_hidden_layers"] * 2
    assert re.search(r"[GM]iB +recorded experts, by router_replay \(estimated\)", text), text
    assert (
        "router_replay records the experts of 128 answers of at most 2048 tokens for each batch: up to "
        f"{gib(128 * 2048 * each)} in the ledger and its copies in checkpoints ({each} bytes a token), and "
        f"{gib(128 * 2048 * 2 * each)} in the batch's file and the memory of its readers ({2 * each} bytes"
    ) in text
    text = printed("sft", "--machine", "64G", "--model.name", "/nowhere", code=2)
    assert "no estimate" not in text, "the error says all"
    assert "error: --model.name /nowhere: there is no such folder" in text
