"""Optimiser steps of real models on one rank, on two that share it with FSDP2, on two replicas of two, on two
pairs whose ranks share the tokens of each row, on pairs that share the matrices of each layer, and on ranks
that have its experts together."""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, NOT_BOTH, UNDEALT, UNDIVIDED, UNSHARED, make, make_model
from runs import ABOUT, join, start_ranks
from safetensors.torch import load_file, save_file
from tiny import random_model
from tiny import write as write_model
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cairn.checkpoint.saving.saver import Saver, SavingRank
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.optimizer import SGDConfig
from cairn.config.preferences import RewardConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.model.hub_layout import tensors_in_memory
from cairn.run.batches import EXPERTS, FROM_TEXT, UNKNOWN_EXPERT, Batch, Sample, Sampling
from cairn.run.connections import free_port
from cairn.run.errors import UsageError
from cairn.trainer.backends.backend import make_backend
from cairn.trainer.backends.experts import check_experts
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import LossInputs, LossSums
from cairn.trainer.losses.bradley_terry import BradleyTerry
from cairn.trainer.losses.ppo_clip import PPOClip
from cairn.trainer.models.model import build_model, layers_of, weights, weights_in
from cairn.trainer.models.trained import Trained
from cairn.trainer.models.value_model import with_reward_token
from cairn.trainer.optimizers import adamw_8bit, make_optimizer
from cairn.trainer.packing import MicroBatch, RankBatch, fill_rows, make_rank_batch
from cairn.trainer.publishing.transports import FileTransport, Served
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.self_check import find_rows
from cairn.trainer.scoring.tokens import Scorer, scoring
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step
from cairn.trainer.tasks.dpo import Reward
from cairn.trainer.tasks.rl import RL

SIZE = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MODELS: dict[str, PreTrainedConfig] = {
    "tied": Qwen3Config(**SIZE, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "capped": Gemma2Config(**SIZE, final_logit_softcapping=2.0),
    "experts": Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
WORLDS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {"two": {}, "tensor of two": {"tensor": 2}},
    4: {
        "replicas": {"replicas": 2},
        "context": {"context": 2},
        "tensor": {"tensor": 2},
        "tensor and replicas": {"tensor": 2, "replicas": 2},
        "tensor and context": {"tensor": 2, "context": 2},
        "expert": {"expert": 2},
        "expert of four": {"expert": 4},
        "expert and replicas": {"expert": 2, "replicas": 2},
        "expert and context": {"expert": 2, "context": 2},
        "expert and tensor": {"expert": 2, "tensor": 2},
        "expert of four and tensor": {"expert": 4, "tensor": 2},
    },
}
"""How the ranks of so many processes are laid out, one time after the other."""
NAMES = [world for worlds in WORLDS.values() for world in worlds]
CHOSEN = draws.cases(NAMES, "layouts of a step", 3, always=["one", "two"])


def models_in(world: str) -> list[str]:
    """The models that can be laid out so; those without experts are not laid out otherwise with them."""
    if "expert" in world:
        return ["experts"]
    return [name for name in MODELS if name != "experts" or "tensor" not in world]


def rewarded_in(world: str) -> list[str]:
    """The models with the layers of which reward models are trained."""
    return ["experts"] if "expert" in world else ["untied", "experts"] if world == "one" else ["untied"]


ADAPTED = {"untied": ("one", "tensor"), "experts": ("one", "expert", "expert and tensor")}
"""Of what, and where, an adapter is trained."""
DIVIDED = {"tensor": {"tensor": 2}, "expert": {"expert": 2}, "both": {"tensor": 2, "expert": 2}}
"""How two ranks share the layers of each family."""
IN_BFLOAT16 = "mixtral"
"""A family whose router weights experts in float32, also where the layers compute in bfloat16."""
WAYS = {"at once": 1 << 26, "in chunks": 3 * 97}


def make_batch() -> Batch:
    """Three micro-batches of one row, so that the second of two ranks has one that holds nothing.

    Of the tokens of some samples, servers have told the experts.
    """
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            token_ids=draw.integers(3, 97, n).astype(np.int32),
            loss_mask=draw.random(n) < 0.6,
            columns={
                "logprobs": -draw.random(n).astype(np.float32) * 6,
                "advantages": draw.normal(size=n).astype(np.float32),
            },
        )
        for n in (20, 14, 9, 24, 5)
    ]
    for number, sample in enumerate(samples):
        chosen = np.argsort(draw.random((len(sample.token_ids), 2, 4)), -1)[..., :2].astype(np.int16)
        sample.columns[EXPERTS] = chosen if number % 2 else np.full_like(chosen, UNKNOWN_EXPERT)
    return Batch(samples, sampling=Sampling(0.8))


class Watching(PPOClip):
    """The loss, noting how many values of gradients a rank holds when a micro-batch begins."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self.held: list[int] = []

    def __call__(self, inputs: LossInputs) -> LossSums:
        self.held.append(sum(values.numel() for values in self._gradients()))
        return super().__call__(inputs)

    def _gradients(self) -> Iterator[torch.Tensor]:
        if not isinstance(self.model, FSDPModule):
            yield from (p.grad for p in self.model.parameters() if p.grad is not None)
            return
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for group in itertools.chain.from_iterable(u._get_fsdp_state()._fsdp_param_groups for u in units):
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad is not None:
                    yield parameter.sharded_param.grad.to_local()
                if parameter.unsharded_accumulated_grad is not None:
                    yield parameter.unsharded_accumulated_grad


def divide(rank: int, axis: str, *families_port_and_folder: Any) -> None:
    """What two ranks do to find whether they can share the rows or the layers of families."""
    *families, port, folder = families_port_and_folder
    if axis == "context":
        group = join(rank, 2, port, context=2)
        found = {family: problem_of_sharing(family, folder / family, group) for family in families}
    else:
        group = join(rank, 2, port, **DIVIDED[axis])
        found = {
            family: problem_of_dividing(family, folder / f"{family} by {axis}", group)
            for family in dict.fromkeys([*families, IN_BFLOAT16])
            if axis != "both" or family not in UNDEALT
        }
    group.leave()
    if rank == 0:
        (folder / f"families by {axis}.json").write_text(json.dumps(found))


def problem_of_sharing(family: str, folder: Path, group: RankGroup) -> str | None:
    """Why the ranks can't share rows of a family's model, as it is told; None if they can."""
    if group.rank == 0:
        make(family, folder)
    group.barrier()
    model = build_model(folder, TrainerConfig(), group)
    read_tensors(folder, weights_in(model, folder), "model", rank=group.rank)
    try:
        find_rows(Scorer(model, group.device), group, rounding="float32")
    except UsageError as error:
        return str(error)
    return None


def problem_of_dividing(family: str, folder: Path, group: RankGroup, **other: object) -> str | None:
    """Why the ranks can't share the matrices or the experts of a family's layers; None if they can, and if
    logprobs, the norm of the gradient and each parameter's gradient are those of a process that has the
    model. What is read is written byte by byte."""
    changed = {"num_key_value_heads": 2} if "num_key_value_heads" in FAMILIES[family].settings else {}
    plain = make_model(family, **changed, **other).train()
    if group.rank == 0:
        write_model(plain, folder)
    group.barrier()
    try:
        check_experts(plain, layers_of(plain), group.expert.size)
        model = build_model(folder, TrainerConfig(), group)
    except UsageError as error:
        return str(error)
    read_tensors(folder, weights_in(model, folder), "model", rank=group.rank)
    plain.set_attn_implementation(model.config._attn_implementation)
    plain.eval(), model.eval()  # some routers add noise in training
    (folder / "again").mkdir(exist_ok=True)
    write_tensors(folder / "again", weights(model), "model", rank=group.rank, barrier=group.barrier)
    again, written = (load_file(one / "model.safetensors") for one in (folder / "again", folder))
    assert again.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in again.items())
    samples, data = make_batch().samples, group.layout.data
    micros = [fill_rows([[samples[n]], [samples[n + 1]]]) for n in range(data.size)]
    if group.expert.size > 1 and group.tensor.size == 1 and family == IN_BFLOAT16:
        assert_same_bits_in_bfloat16(folder, plain, micros[data.rank], group)
    logprobs = Scorer(model, group.device).logprobs(micros[data.rank], 0.8)
    (logprobs.sum() * group.world_size).backward()  # as `averaged_over`
    expected = [Scorer(plain, group.device).logprobs(micro, 0.8) for micro in micros]
    sum(one.sum() for one in expected).backward()
    torch.testing.assert_close(logprobs, expected[data.rank], atol=1e-4, rtol=1e-5)
    trained = Trained(model, make_optimizer(model.named_parameters(), SGDConfig()))
    norm = make_backend(group).norm_and_clip(trained, 1e9)
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, expected, atol=0, rtol=1e-4)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:  # such as the biases by which some routers choose
            assert ours.grad is None, name
            continue
        gradient, right = ours.grad.full_tensor(), theirs.grad
        bound = 1e-3 * right.abs().max().item() + 1e-6
        torch.testing.assert_close(gradient, right, atol=bound, rtol=0, msg=f"{family}: {name}")
    return None


def assert_same_bits_in_bfloat16(
    folder: Path, plain: PreTrainedModel, micro: MicroBatch, group: RankGroup
) -> None:
    """Routers that compute in float32 weight the results of experts in it, on whatever rank these are."""
    model = build_model(folder, TrainerConfig(precision={"compute": "bfloat16"}), group).eval()
    read_tensors(folder, weights_in(model, folder), "model", rank=group.rank)
    plain = copy.deepcopy(plain)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        found, expected = (Scorer(one, group.device).logprobs(micro, 0.8) for one in (model, plain))
    assert torch.equal(found, expected)


def run_in(rank: int, ranks: int, world: str, port: int, folder: Path) -> None:
    """What every rank does in a layout; the first writes down what came out."""
    group = join(rank, ranks, port, **WORLDS[ranks][world])
    ranks_agree(group)
    if ranks > 1:
        kind = "experts" if "expert" in world else "untied"
        gathered_layers_are_never_stale(group, folder / kind, folder / f"gathered on {world}")
    for name in models_in(world):
        for way, chunk_logits in WAYS.items():
            row, after = one_step(group, folder / name, chunk_logits)
            if rank == 0:
                result = folder / f"{name} {way} {world}"
                result.with_suffix(".json").write_text(json.dumps(row))
                save_file(after, result.with_suffix(".safetensors"))
    for name in rewarded_in(world):
        row, after = reward_steps(group, folder / name)
        if rank == 0:
            result = folder / f"reward of {name} at once {world}"
            result.with_suffix(".json").write_text(json.dumps(row))
            save_file(after, result.with_suffix(".safetensors"))
    if world == "expert":  # of three experts, each of the two ranks that have them has a half
        assert problem_of_dividing("qwen3_moe", folder / "six experts", group, num_experts=6) is None
    for name in (name for name, worlds in ADAPTED.items() if world in worlds):
        row, after = adapter_steps(group, folder / name, folder / f"adapter of {name} in {world}")
        if rank == 0:
            result = folder / f"adapter of {name} at once {world}"
            result.with_suffix(".json").write_text(json.dumps(row))
            save_file(after, result.with_suffix(".safetensors"))
    dist.barrier()
    group.leave()


def ranks_agree(group: RankGroup) -> None:
    """On flags; and in a thread on bytes, of which each rank gives another number."""
    rank, last = group.rank, group.world_size - 1
    assert group.any_of(rank == 0, False, rank == last) == [True, False, True]
    exchange = group.exchange()
    with ThreadPoolExecutor(1) as pool:
        rounds = [pool.submit(exchange.gather, bytes([rank]) * rank * count) for count in (1, 1000, 0)]
        assert group.any_of(True) == [True], "beside what the thread does"
        for count, gathered in zip((1, 1000, 0), rounds, strict=True):
            assert gathered.result() == [bytes([one]) * one * count for one in range(group.world_size)]


def gathered_layers_are_never_stale(group: RankGroup, model_folder: Path, folder: Path) -> None:
    """Steps and passes without a gradient are those of layers that are gathered anew, bit by bit; so they are
    after a pass that leaves layers gathered, and weights of an earlier step."""
    anew, kept = (start(group, model_folder, keep_gathered=keep) for keep in (False, True))
    rank, size = group.rank, group.world_size
    micro = work_of(kept).micros[0]
    rows, scores = [], []
    for number in (1, 2):
        rows.append(step_of(kept, number))
        assert rows[-1] == step_of(anew, number)
        for state in (kept, anew):
            with scoring(state.scorer):
                scores.append(state.scorer.logprobs(micro, 0.8))
        assert torch.equal(scores[-1], scores[-2])
        if number == 1:
            saver = Saver(CheckpointStore(folder), SavingRank(rank, size, "run:1"))
            saver.save(1, kept.tensors(), {}, {**ABOUT, "world_size": size})
            saver.finish()
            saver.close()
    assert not torch.equal(scores[0], scores[-1])
    with torch.no_grad():
        kept.scorer.logprobs(micro, 0.8)
    layer = kept.policy.module.model.layers[0]
    left = [p.device_mesh.mesh_dim_names for p in layer.parameters() if isinstance(p, DTensor)]
    assert all(names in (("tensor",), ("expert",)) for names in left), "gathered, but for what is cut"
    kept.go_back(folder / "step_1")
    with scoring(kept.scorer):
        assert torch.equal(kept.scorer.logprobs(micro, 0.8), scores[0])
    assert step_of(kept, 2) == rows[1]


def reward_steps(group: RankGroup, model_folder: Path) -> tuple[dict, dict]:
    """A reward model's metrics and weights after two steps: the head is 0 at first, and holds up the others'
    gradients."""
    config = RewardConfig(seq_len=24, optimizer={"lr": 0.01, "eps": 1e-3})
    state = TrainerState(
        config, group, {POLICY: Reward.policy(config, model_folder, group)}, TrainerProgress()
    )
    state.begin(model_folder)
    state.check_model()
    samples = [*make_batch().samples, make_batch().samples[1]]
    pairs = [
        Sample(one.token_ids, one.loss_mask, {"side": np.full(len(one.token_ids), (1, -1)[i % 2], np.int8)})
        for i, one in enumerate(samples)
    ]
    batch = Batch([with_reward_token(one, 24) for one in pairs], sampling=FROM_TEXT, together=2)
    for step in (1, 2):
        work = make_rank_batch(
            batch,
            config,
            rank=group.layout.data.rank,
            world_size=group.layout.data.size,
            arrange=state.scorer.rows.arrange,
        )
        row = train_step(state, work, step, BradleyTerry())
    after = tensors_in_memory(state.policy.module).items()
    return row, {name: w.full_tensor() if isinstance(w, DTensor) else w.detach().clone() for name, w in after}


def adapter_steps(group: RankGroup, model_folder: Path, folder: Path) -> tuple[dict, dict]:
    """Metrics and weights of an adapter after two steps, and what servers get; those of its base are frozen,
    experts among them."""
    config = TrainerConfig(lora={"rank": 4}, seq_len=24, optimizer={"lr": 0.01, "eps": 1e-3})
    state = TrainerState(config, group, {POLICY: RL.policy(config, model_folder, group)}, TrainerProgress())
    state.begin(model_folder)
    step_of(state, 1)
    row = step_of(state, 2)
    trained = state.policy.trained().items()
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w.detach() for name, w in trained}
    write(state, folder, row)
    saved = load_file(folder / "adapter_model.safetensors")
    by_name = {f"base_model.model.{name.replace('.default.', '.')}": one for name, one in whole.items()}
    assert saved.keys() == by_name.keys()
    assert all(torch.equal(saved[name], one) for name, one in by_name.items())
    publish(state, folder / "served")
    return row, whole | load_file(folder / "served" / "model.safetensors")


def start(group: RankGroup, model_folder: Path, **changed: object) -> TrainerState:
    """A trainer's state before its first step."""
    optimizer = {"lr": 0.01, "eps": 1e-3, "max_grad_norm": 1e9}
    config = TrainerConfig(**{"optimizer": optimizer, "seq_len": 24, **changed})
    model = build_model(model_folder, config, group)
    read_tensors(model_folder, weights(model), "model")
    policy = Trained(model, make_optimizer(model.named_parameters(), config.optimizer))
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    if model_folder.name == "experts":
        state.scorer.replay = RouterReplay(model)
    if group.context.size > 1:
        state.check_model()
        assert state.scorer.attention.context == group.context
    return state


def one_step(group: RankGroup, model_folder: Path, chunk_logits: int) -> tuple[dict, dict]:
    """Metrics, and the weights after the step."""
    how: dict[str, object] = {"router_aux_coef": 0.1} if model_folder.name == "experts" else {}
    if group.layout.model.size > 1 and chunk_logits == WAYS["in chunks"]:
        how["activation_checkpointing"] = True  # the ranks exchange again what is recomputed
    state = start(group, model_folder, **how)
    model = state.policy.module
    assert isinstance(model, FSDPModule) == (group.world_size > 1)
    state.scorer.method = replace(state.scorer.method, chunk_logits=chunk_logits)
    assert state.scorer.is_plain == (model_folder.name != "capped")
    if group.world_size > 1:
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) for p in parameters), "what the scorer has tried is let go of"
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        own_units = [isinstance(module, FSDPModule) for module in (embeddings, head)]
        assert own_units == [head.weight is not embeddings.weight] * 2
    work = work_of(state)
    with scoring(state.scorer):
        logprobs = state.scorer.logprobs(work.micros[0], 0.8)
    loss = Watching(model)
    row = train_step(state, work, 1, loss)
    shards = [w.to_local() if isinstance(w, DTensor) else w for w in model.parameters()]
    assert loss.held == [0] + [sum(shard.numel() for shard in shards)] * (len(work.micros) - 1)
    after = tensors_in_memory(model).items()
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w.clone() for name, w in after}
    return row, whole | {"logprobs": logprobs}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the ranks found in each layout that a test asks for, and handed on to others.

    The same processes go through all of it: most of what a rank costs is what PyTorch does for the first time
    in its process.
    """
    folder = tmp_path_factory.mktemp("step")
    for name, config in MODELS.items():
        random_model(config).save_pretrained(folder / name)
    plan = [*stages_of_steps(request), *stages_of_changes(request)]
    ports = [free_port() for _ in plan]
    started = start_ranks(take_part, plan, ports, folder, world_size=max(ranks for ranks, _, _ in plan))
    while not started.join():
        pass
    return folder


Stage = tuple[int, Callable[..., None], tuple[Any, ...]]
"""How many ranks call a function, and what it is given after the rank."""


def stages_of_steps(request: pytest.FixtureRequest) -> list[Stage]:
    """Steps in each layout, and what two ranks can share."""
    families = draws.asked(
        request, test_two_ranks_can_share_rows_matrices_and_experts_or_say_why_not, "family"
    )
    names = {"one"}
    for test in (
        test_any_ranks_make_the_step_of_one,
        test_any_ranks_train_the_same_reward_model,
        test_any_ranks_train_the_same_adapter,
    ):
        names.update(world for (world,) in draws.asked(request, test, "world"))
    stages: list[Stage] = [
        (ranks, run_in, (ranks, world))
        for ranks, worlds in WORLDS.items()
        for world in worlds
        if world in names
    ]
    if families:
        stages += [(2, divide, (axis, *(family for (family,) in families))) for axis in ("context", *DIVIDED)]
    return stages


def stages_of_changes(request: pytest.FixtureRequest) -> list[Stage]:
    """Steps that are saved, and what other layouts make of these."""
    changes = [change for (change,) in draws.asked(request, test_a_run_goes_on_in_another_layout, "change")]
    on_host = [ranks for (ranks,) in draws.asked(request, test_a_state_on_the_host_is_trained_alike, "ranks")]
    saving = {*itertools.chain.from_iterable(changes), *on_host, *(f"{ranks} on host" for ranks in on_host)}
    return [
        *((ranks, save_after_a_step, (name,)) for name, (ranks, _, _) in LAYOUTS.items() if name in saving),
        *((LAYOUTS[change[0]][0], go_on, change) for change in changes),
    ]


def take_part(rank: int, plan: list[Stage], ports: list[int], folder: Path) -> None:
    """What one process does of it; rank 0 takes part in all stages, so they come one after the other."""
    for (ranks, function, names), port in zip(plan, ports, strict=True):
        if rank < ranks:
            function(rank, *names, port, folder)


def result(folder: Path, name: str, way: str, world: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Metrics and weights as the ranks wrote them down."""
    stem = folder / f"{name} {way} {world}"
    return json.loads(stem.with_suffix(".json").read_text()), load_file(stem.with_suffix(".safetensors"))


@pytest.mark.parametrize("world", CHOSEN)
def test_any_ranks_make_the_step_of_one(found: Path, world: str):
    """Its loss, gradient and weights, with logits at once and in chunks; and with experts of servers."""
    for name in models_in(world):
        reference_row, reference = result(found, name, "at once", "one")
        for way in WAYS:
            row, after = result(found, name, way, world)
            assert row == pytest.approx(reference_row, rel=1e-4), (name, way)
            assert after.keys() == reference.keys()
            for key, weight in after.items():
                torch.testing.assert_close(weight, reference[key], atol=1e-5, rtol=0, msg=f"{name} {key}")


@pytest.mark.parametrize("family", draws.cases(list(FAMILIES), __name__, 3))
def test_two_ranks_can_share_rows_matrices_and_experts_or_say_why_not(found: Path, family: str):
    """And docs/reference/models.md says so."""
    refusals = {"context": UNSHARED, "tensor": UNDIVIDED, "expert": UNDEALT, "both": NOT_BOTH}
    for axis, refused in refusals.items():
        if axis == "both" and family in UNDEALT:
            continue
        problem = json.loads((found / f"families by {axis}.json").read_text())[family]
        if family not in refused:
            assert problem is None
            continue
        setting = "tensor" if axis == "both" else axis
        assert re.match(rf"parallel.{setting} = 2 can't serve \w+: .*({refused[family][1]})", problem)


@pytest.mark.parametrize("world", CHOSEN)
def test_any_ranks_train_the_same_reward_model(found: Path, world: str):
    """Its head and all layers."""
    for name in rewarded_in(world):
        reference_row, reference = result(found, f"reward of {name}", "at once", "one")
        assert reference["score.weight"].abs().min() > 0
        row, after = result(found, f"reward of {name}", "at once", world)
        assert row == pytest.approx(reference_row, rel=1e-4, abs=1e-6)
        assert after.keys() == reference.keys()
        for key, weight in after.items():
            torch.testing.assert_close(weight, reference[key], atol=1e-5, rtol=0, msg=key)


@pytest.mark.parametrize(
    ("name", "world"),
    draws.cases(
        [(name, world) for name, worlds in ADAPTED.items() for world in worlds[1:]],
        "adapters on ranks",
        1,
    ),
)
def test_any_ranks_train_the_same_adapter(found: Path, name: str, world: str):
    """And serve the same weights, where layers are cut and where experts are on several ranks."""
    (reference_row, reference), (row, after) = (
        result(found, f"adapter of {name}", "at once", one) for one in ("one", world)
    )
    assert row == pytest.approx(reference_row, rel=1e-4, abs=1e-6)
    assert after.keys() == reference.keys()
    for key, weight in after.items():
        torch.testing.assert_close(weight, reference[key], atol=1e-5, rtol=0, msg=key)


LAYOUTS = {
    "one": (1, {}, "device"),
    "one on host": (1, {}, "host"),
    "two": (2, {}, "device"),
    "two on host": (2, {}, "host"),
    "context": (4, {"context": 2}, "device"),
    "replicas": (4, {"replicas": 2}, "device"),
    "tensor": (4, {"tensor": 2}, "device"),
    "tensor on host": (4, {"tensor": 2}, "host"),
    "tensor and replicas": (4, {"tensor": 2, "replicas": 2}, "device"),
    "tensor and context": (4, {"tensor": 2, "context": 2}, "device"),
    "expert": (4, {"expert": 2}, "device"),
    "expert on host": (4, {"expert": 4}, "host"),
    "expert and tensor": (4, {"expert": 2, "tensor": 2}, "device"),
}
"""Ranks, how they are laid out, and where the state is."""
OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"eps": 1e-3},
    "adamw_8bit": {"type": "adamw_8bit", "eps": 1e-3},
    "muon": {"type": "muon", "eps": 1e-3, "weight_decay": 0.1},
    "lion": {"type": "lion"},
    "sgd": {"type": "sgd", "nesterov": True, "weight_decay": 0.1},
}
TRAINED = [*(("untied", name) for name in OPTIMIZERS), ("experts", "muon")]
"""Models and optimisers."""
TRAINED_EXPERTS = [("experts", name) for name in ("adamw", "adamw_8bit", "muon")]
"""The same where ranks have experts together, or take such a run over."""


def trained_in(*layouts: str) -> list[tuple[str, str]]:
    """Those of them that can be trained in all of these layouts."""
    whole = any("tensor" in layout for layout in layouts)
    if any("expert" in layout for layout in layouts):
        return [one for one in TRAINED_EXPERTS if not whole or one[1] == "adamw"]
    if layouts == ("two",) or layouts == ("replicas",):
        return list(dict.fromkeys([*TRAINED, *TRAINED_EXPERTS]))
    return [one for one in TRAINED if not whole or one[1] not in ("muon", "adamw_8bit")]


def save_after_a_step(rank: int, layout: str, port: int, folder: Path) -> None:
    """Steps once and writes model and optimiser state as a checkpoint has them."""
    adamw_8bit.FEWEST = 64
    ranks, how, state_on = LAYOUTS[layout]
    group = join(rank, ranks, port, **how)
    for model, name in trained_in(layout):
        optimizer = {**OPTIMIZERS[name], "lr": 0.01, "max_grad_norm": 1e9}
        state = start(group, folder / model, state_on=state_on, optimizer=optimizer)
        for number in (1, 2):
            row = step_of(state, number)
            write(state, saved := folder / f"{model} {name} {layout} after {number}", row)
        publish(state, served := folder / f"{model} {name} {layout} served")
        files = [(one / "model.safetensors").read_bytes() for one in (saved, served)]
        assert files[0] == files[1], "servers get what the step holds"
    dist.barrier()
    group.leave()


def go_on(rank: int, layout: str, source: str, port: int, folder: Path) -> None:
    """Loads what another layout has saved, writes it again, and steps."""
    adamw_8bit.FEWEST = 64
    ranks, how, state_on = LAYOUTS[layout]
    group = join(rank, ranks, port, **how)
    for model, name in trained_in(layout, source):
        optimizer = {**OPTIMIZERS[name], "lr": 0.01, "max_grad_norm": 1e9}
        state = start(group, folder / model, state_on=state_on, optimizer=optimizer)
        saved = folder / f"{model} {name} {source} after 1"
        state.policy.create_optimizer_state(load_file(saved / "optimizer.safetensors").keys())
        for stem, tensors in state.tensors().items():
            read_tensors(saved, tensors, Path(stem).name, rank=rank)
        write(state, folder / f"{model} {name} {layout} has loaded {source}", {})
        write(state, folder / f"{model} {name} {layout} after {source}", step_of(state, 2))
    dist.barrier()
    group.leave()


def step_of(state: TrainerState, number: int) -> dict[str, float]:
    return train_step(state, work_of(state), number, PPOClip())


def work_of(state: TrainerState) -> RankBatch:
    """This rank's part of the batch."""
    data = state.group.layout.data
    return make_rank_batch(make_batch(), state.config, rank=data.rank, world_size=data.size)


def write(state: TrainerState, folder: Path, row: dict[str, float]) -> None:
    """What a checkpoint holds of the state, in files, and the metrics of its step; all is there then."""
    group = state.group
    folder.mkdir(exist_ok=True)
    for stem, tensors in state.tensors().items():
        write_tensors(folder, tensors, Path(stem).name, rank=group.rank, barrier=group.barrier)
    if group.rank == 0:
        (folder / "row.json").write_text(json.dumps(row))
    group.barrier()


def publish(state: TrainerState, folder: Path) -> None:
    """Write what servers get in files, each rank its part."""
    folder.mkdir(exist_ok=True)
    transport = FileTransport(state.group, Served(state.policy.served))
    filling = transport.take(state.progress.step, last=False)
    if state.group.rank == 0:
        filling.begin(folder)
    state.group.barrier()
    filling.write(folder, lambda: None)
    state.group.barrier()
    transport.close()


def content(folder: Path) -> dict[str, bytes]:
    """All files in it."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


GOES_ON = [
    ("one", "replicas"),
    ("two", "context"),
    ("context", "replicas"),
    ("replicas", "replicas"),
    ("replicas", "two"),
    ("two", "two on host"),
    ("two on host", "two"),
    ("tensor", "replicas"),
    ("two", "tensor"),
    ("tensor", "tensor on host"),
    ("tensor on host", "tensor"),
    ("two", "tensor and replicas"),
    ("tensor and replicas", "tensor and context"),
    ("tensor and context", "tensor and context"),
    ("expert", "replicas"),
    ("two", "expert"),
    ("expert", "expert"),
    ("expert on host", "expert"),
    ("two", "expert and tensor"),
    ("expert and tensor", "expert"),
]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(case.values, marks=case.marks, id="-".join(case.values))
        for case in draws.cases(GOES_ON, "changes of layouts", 4)
    ],
)
def test_a_run_goes_on_in_another_layout(found: Path, change: tuple[str, str]):
    """What was saved is loaded byte for byte; the next step is that of a run that was never stopped."""
    layout, source = change
    for model, optimizer in trained_in(*change):
        what = f"{model} {optimizer}"
        saved, loaded = (
            found / f"{what} {name}" for name in (f"{source} after 1", f"{layout} has loaded {source}")
        )
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (loaded / name).read_bytes() == (saved / name).read_bytes(), what
        after, expected = (found / f"{what} {layout} after {which}" for which in (source, "2"))
        if LAYOUTS[layout][:2] == LAYOUTS[source][:2]:
            assert content(after) == content(expected), what
        rows = [json.loads((folder / "row.json").read_text()) for folder in (after, expected)]
        # Muon makes all singular values of a gradient the same size, small ones with their rounding, too.
        assert rows[0] == pytest.approx(rows[1], rel=1e-3 if optimizer == "muon" else 1e-4), what


@pytest.mark.parametrize(("model", "optimizer"), TRAINED)
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_state_on_the_host_is_trained_alike(found: Path, ranks: str, model: str, optimizer: str):
    """Bit by bit."""
    for step in (1, 2):
        on_host, on_device = (
            found / f"{model} {optimizer} {layout} after {step}" for layout in (f"{ranks} on host", ranks)
        )
        assert content(on_host) == content(on_device)
