"""Models that real megatron-core trains on several ranks, beside the same models on one rank without it."""

import itertools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import make
from runs import CONFIGS, join, rows, start_ranks
from safetensors.torch import load_file
from tensors_made import LargestTensor
from test_step_ranks import write
from tiny import EXAMPLE, random_model
from tiny import write as write_model
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.cli import load
from cairn.config.preferences import DPOConfig, RewardConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.needs import rank_need
from cairn.run.batches import EXPERTS, FROM_TEXT, UNKNOWN_EXPERT, Batch, Sample, Sampling
from cairn.run.connections import free_port
from cairn.run.messages import Attempt
from cairn.trainer.frozen.model import TeacherModels
from cairn.trainer.group import RankGroup
from cairn.trainer.loop import train
from cairn.trainer.losses import Likelihood, make_loss
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.footprint import footprint_of
from cairn.trainer.models.value_model import make_critic
from cairn.trainer.packing import MicroBatch, fill_rows, make_rank_batch
from cairn.trainer.router_replay import RouterReplay
from cairn.trainer.scoring.tokens import scoring
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.critic import NAME as CRITIC
from cairn.trainer.step.critic import CriticLearner
from cairn.trainer.step.train_step import train_step

pytest.importorskip("megatron.core", reason="install the dependency group megatron")

pytestmark = pytest.mark.timeout(600)
SIZE = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64},
    **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Two heads for each key, and two keys, so that their order matters."""
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE, rope_theta=5e5),
    "qwen2": Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZE),
}
MIXTURE = Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40)
DENSE = tuple(MODELS)
MODELS |= {"qwen3_moe": MIXTURE, "balanced": MIXTURE}
"""The last one is trained with the load-balancing loss."""


@dataclass(frozen=True)
class Layout:
    """Ranks, what lays the model out over them, and the data type that is computed in."""

    ranks: int
    backend: str = "megatron"
    how: dict[str, int] = field(default_factory=dict)
    compute: str = "float32"
    models: tuple[str, ...] = DENSE
    replicas: int = 1
    rows: int = 1
    """Of a micro-batch."""
    again: bool = False
    """Whether layers, and logits chunk by chunk, are computed once more in the backward pass."""


LAYOUTS = {
    "one": Layout(1, "fsdp2", models=tuple(MODELS)),
    "data": Layout(2, models=(*DENSE, "qwen3_moe")),
    "tensor": Layout(2, how={"tensor": 2}),
    "both": Layout(4, how={"tensor": 2}),
    "stages": Layout(2, how={"pipeline": 2}, models=("qwen2", "qwen3")),
    "stages and tensor": Layout(4, how={"pipeline": 2, "tensor": 2}, rows=2),
    "stages and data": Layout(4, how={"pipeline": 2}, models=("qwen2",)),
    "stages and experts": Layout(4, how={"pipeline": 2, "expert": 2}, models=("qwen3_moe",)),
    "experts": Layout(2, how={"expert": 2}, models=("qwen3_moe", "balanced")),
    "experts and data": Layout(4, how={"expert": 2}, models=("qwen3_moe",)),
    "experts, fsdp2": Layout(2, "fsdp2", {"expert": 2}, models=("qwen3_moe",)),
    "tensor, fsdp2": Layout(2, "fsdp2", {"tensor": 2}, models=("qwen3",)),
    "tensor, again": Layout(2, how={"tensor": 2}, models=("qwen3",), again=True),
    "stages and data, again": Layout(4, how={"pipeline": 2}, models=("qwen2",), again=True),
    "experts, again": Layout(2, how={"expert": 2}, models=("qwen3_moe",), again=True),
    "replicas, fsdp2": Layout(4, "fsdp2", models=("qwen3", "qwen3_moe"), replicas=2),
    "one, rounded": Layout(1, "fsdp2", compute="bfloat16"),
    "tensor, rounded": Layout(2, how={"tensor": 2}, compute="bfloat16"),
}
EXACT = [
    (name, model)
    for name, one in LAYOUTS.items()
    if one.backend == "megatron" and one.compute == "float32"
    for model in one.models
]
GOES_ON = [
    *[("tensor", "one"), ("one", "tensor"), ("both", "data"), ("data", "both")],
    *[("experts", "one"), ("one", "experts"), ("experts, fsdp2", "experts and data")],
    *[("experts", "experts, fsdp2"), ("stages and tensor", "data"), ("one", "stages and tensor")],
    *[("tensor", "stages and data"), ("experts, fsdp2", "stages and experts")],
    *[("stages and tensor", "tensor, fsdp2"), ("tensor, fsdp2", "stages and tensor")],
    *[("stages and tensor", "replicas, fsdp2"), ("replicas, fsdp2", "stages and tensor")],
    *[("experts", "replicas, fsdp2"), ("replicas, fsdp2", "experts")],
]
"""Layouts, and those whose steps they go on from."""


def both_have(layout: str, source: str) -> list[str]:
    """The models that two layouts train."""
    return [model for model in LAYOUTS[layout].models if model in LAYOUTS[source].models]


LENGTHS = (20, 14, 9, 24, 5)


def make_batch(number: int) -> Batch:
    """Three micro-batches of one row, of which the second of two ranks has one that holds nothing.

    Among its tokens is the one that pads, as a policy may sample it.
    """
    draw = np.random.default_rng(number)
    samples = [Sample(draw.integers(3, 96, n).astype(np.int32), draw.random(n) < 0.6) for n in LENGTHS]
    for sample in samples:
        sample.token_ids[1] = SIZE["pad_token_id"]
    return Batch(samples, sampling=FROM_TEXT)


def start(layout: Layout, group, folder: Path) -> TrainerState:
    """A trainer's state before its first step, checked as a run's."""
    config = SFTConfig(
        backend=layout.backend,
        parallel=layout.how,
        workers=layout.ranks,
        replicas=layout.replicas,
        micro_batch_size=layout.rows,
        activation_checkpointing=layout.again,
        precision={"compute": layout.compute},
        optimizer={"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
        seq_len=24,
        router_aux_coef=0.05 if folder.name == "balanced" else None,
    )
    policy = make_policy(folder, config, group)
    state = TrainerState(config, group, {POLICY: policy}, TrainerProgress())
    state.begin(folder)
    state.check_model()
    if layout.again:
        state.scorer.chunk_logits = 3 * SIZE["vocab_size"]
    return state


def step(state: TrainerState, number: int) -> dict[str, float]:
    data = state.group.layout.data
    batch = make_rank_batch(make_batch(number), state.config, rank=data.rank, world_size=data.size)
    with scoring(state.scorer):
        logprobs = [state.scorer.logprobs(micro, 1.0).double().sum() for micro in batch.micros]
    row = train_step(state, batch, number, Likelihood())
    table = state.group.gather_micros(torch.stack(logprobs)[:, None])
    return {**row, "logprobs": table.sum().item()}


LONG = (512, 1024)
"""Tokens of a row of two samples, of which attention may take no memory for each pair."""


def passes(state: TrainerState, tokens: int) -> tuple[int, int]:
    """A pass over a row of so many tokens, forward and backward, whose gradients are discarded.

    Returns:
        How many numbers the largest tensor has, and how many are kept for the backward pass.
    """
    draw = np.random.default_rng(tokens)
    lengths = (tokens - 40, 40)
    row = [Sample(draw.integers(3, 96, n).astype(np.int32), np.ones(n, bool)) for n in lengths]
    kept: dict[int, torch.Tensor] = {}

    def forward(micro: MicroBatch) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            return state.scorer.logprobs(micro, 1.0)

    def keep(one: torch.Tensor) -> torch.Tensor:
        if not isinstance(one, torch.nn.Parameter):
            kept[one.untyped_storage().data_ptr()] = one
        return one

    def loss(_: MicroBatch, logprobs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logprobs.sum(), None

    with LargestTensor() as made:
        state.backend.forward_backward(state.policy, [fill_rows([row])], forward, loss)
    return made.numbers, sum(one.numel() for one in kept.values())


def note_memory(state: TrainerState, layout: Layout, source: Path, path: Path) -> None:
    """Write the bytes of weights that this rank has, and those that are estimated of the fullest one."""
    if layout.backend != "megatron":
        return
    how = {"compute": layout.compute, "activation_checkpointing": False}
    shared = {name: size for name, size in layout.how.items() if name != "pipeline"}
    needs = rank_need(
        footprint_of(str(source), **how, **shared),
        state.config,
        ranks=layout.ranks,
        gpu=False,
        chunk_logits=1,
    )
    path.with_name(f"{path.name} in passes").write_text(json.dumps([passes(state, n) for n in LONG]))
    moments = sum(shard.numel() * 8 for shard in state.policy.trained().values())
    weights = sum(one.nbytes for one in state.policy.module.parameters())
    found = {"weights": weights, "moments": moments}
    estimated = {
        what: next(part.bytes for part in needs.parts if part.what.startswith(begin))
        for what, begin in (("weights", f"weights, {layout.compute}"), ("moments", "AdamW"))
    }
    path.write_text(json.dumps([found, estimated]))


REWARDED = ("one", "data", "both", "stages and tensor")
"""Layouts that also train a policy and a critic from rewards, beside a reference and a teacher.

The teacher is of a family that megatron-core does not have, and scores each sample in a row of its own.
"""


def learn_from_rewards(name: str, group: RankGroup, folder: Path) -> None:
    """Two steps, what they leave, and the second one once more from what one rank has saved of the first."""
    layout, start = LAYOUTS[name], folder / "qwen3"
    config = TrainerConfig(
        backend=layout.backend,
        parallel=layout.how,
        workers=layout.ranks,
        optimizer={"lr": 0.01, "eps": 1e-3},
        seq_len=24,
        kl={"reference": str(start), "coef": 0.2},
        distill={"teacher": str(folder / "teacher"), "coef": 0.1},
        critic={"optimizer": {"lr": 0.02, "eps": 1e-3}},
    )
    states: list[TrainerState] = []
    for _ in range(2):
        models = {POLICY: make_policy(start, config, group), CRITIC: make_critic(start, config, group, None)}
        state = TrainerState(config, group, models, TrainerProgress())
        state.begin(start)
        state.check_model()
        states.append(state)

    def step(state: TrainerState, number: int, out: Path) -> None:
        critic, loss = CriticLearner(config, state), make_loss(config.loss, config.kl_in_loss)
        teachers = TeacherModels(config, group, state.scorer, {})
        data = group.layout.data
        samples = make_batch(number).samples
        for place, sample in enumerate(samples):
            rewards = np.zeros(len(sample.token_ids), np.float32)
            rewards[-1] = sample.loss_mask[-1] = place % 2
            sample.columns["rewards"], sample.columns["logprobs"] = rewards, np.full_like(rewards, -4)
        work = make_rank_batch(
            Batch(samples, sampling=Sampling(0.8)), config, rank=data.rank, world_size=data.size
        )
        row = dict(teachers.score(work)) | dict(critic.prepare(work))
        row |= train_step(state, work, number, loss, further_learners=[critic])
        for stem, tensors in state.tensors().items():
            write_tensors(out, tensors, stem.replace("/", "_"), rank=group.rank, barrier=group.barrier)
        if group.rank == 0:
            (out / "row.json").write_text(json.dumps(row))
        group.barrier()

    out = folder / f"rewarded {name} after"
    for number in (1, 2):
        (out / str(number)).mkdir(parents=True, exist_ok=True)
        step(states[0], number, out / str(number))
    saved, again = folder / "rewarded one after/1", states[1]
    for model in again.models.values():
        of_model = load_file(saved / f"{model.optimizer_stem.replace('/', '_')}.safetensors")
        model.create_optimizer_state(of_model.keys())
        for stem, tensors in model.tensors().items():
            read_tensors(saved, tensors, stem.replace("/", "_"), rank=group.rank)
        model.taken()
    (out / "one").mkdir(exist_ok=True)
    step(again, 2, out / "one")


REPLAYED = ("one", "data", "experts", "stages and experts", "experts, again")
"""Layouts that also train a mixture of experts with those that a server has chosen."""


def replay_experts(name: str, group: RankGroup, folder: Path) -> None:
    """Two steps, in which most tokens pass through experts that the routers would not choose."""
    layout, start = LAYOUTS[name], folder / "qwen3_moe"
    config = TrainerConfig(
        backend=layout.backend,
        parallel=layout.how,
        workers=layout.ranks,
        optimizer={"lr": 0.01, "eps": 1e-3},
        seq_len=24,
        micro_batch_size=2,
        activation_checkpointing=layout.again,
        router_replay=True,
    )
    state = TrainerState(config, group, {POLICY: make_policy(start, config, group)}, TrainerProgress())
    state.begin(start)
    state.check_model()
    state.scorer.replay = RouterReplay(state.policy.module)
    data = group.layout.data
    for number in (1, 2):
        draw, samples = np.random.default_rng(number), make_batch(number).samples
        for place, sample in enumerate(samples):
            size = len(sample.token_ids)
            chosen = np.argsort(draw.random((size, SIZE["num_hidden_layers"], 4)), -1)[..., :2]
            known = chosen if place % 3 else np.full_like(chosen, UNKNOWN_EXPERT)
            sample.columns[EXPERTS] = known.astype(np.int16)
            sample.columns["logprobs"] = np.full(size, -4, np.float32)
            sample.columns["advantages"] = draw.normal(size=size).astype(np.float32)
        work = make_rank_batch(
            Batch(samples, sampling=Sampling(1.0)), config, rank=data.rank, world_size=data.size
        )
        state.scorer.replay.check(work.micros)
        row = train_step(state, work, number, make_loss(config.loss, None))
        write(state, folder / f"replayed {name} after {number}", row)


def run_rank(rank: int, ports: list[int], folder: Path) -> None:
    """What each process does, in one layout after the other; rank 0 takes part in all of them."""
    stages = [(name, None) for name in LAYOUTS] + GOES_ON
    for (name, source), port in zip(stages, ports, strict=True):
        layout = LAYOUTS[name]
        if rank >= layout.ranks:
            continue
        how = {**layout.how, "replicas": layout.replicas}
        group = join(rank, layout.ranks, port, backend=layout.backend, **how)
        if source is None and name in REWARDED:
            learn_from_rewards(name, group, folder)
        if source is None and name in REPLAYED:
            replay_experts(name, group, folder)
        for model in both_have(name, source or name):
            state = start(layout, group, folder / model)
            if source is None:
                note_memory(state, layout, folder / model, folder / f"{model} {name} on {rank}")
                for number in (1, 2):
                    write(state, folder / f"{model} {name} after {number}", step(state, number))
            else:
                saved = folder / f"{model} {source} after 1"
                state.policy.create_optimizer_state(load_file(saved / "optimizer.safetensors").keys())
                for stem, tensors in state.tensors().items():
                    read_tensors(saved, tensors, Path(stem).name, rank=rank)
                state.policy.taken()
                write(state, folder / f"{model} {name} has loaded {source}", {})
                write(state, folder / f"{model} {name} after {source}", step(state, 2))
        dist.barrier()
        group.leave()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each layout has made."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, config in MODELS.items():
        random_model(config).save_pretrained(folder / name)
    make("mamba2", folder / "teacher")
    ports = [free_port() for _ in (*LAYOUTS, *GOES_ON)]
    ranks = max(layout.ranks for layout in LAYOUTS.values())
    started = start_ranks(run_rank, ports, folder, world_size=ranks)
    while not started.join():
        pass
    return folder


def row_of(folder: Path) -> dict[str, float]:
    return json.loads((folder / "row.json").read_text())


def assert_same_metrics(ours: Path, right: Path, *layouts: str) -> None:
    """Of a step in two layouts. The share of padding depends on how many rows a micro-batch has."""
    found, expected = row_of(ours), row_of(right)
    if len({LAYOUTS[layout].rows for layout in layouts}) > 1:
        del found["packing_efficiency"], expected["packing_efficiency"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("layout", "model"), EXACT)
def test_any_ranks_make_the_steps_of_one(found: Path, layout: str, model: str):
    """Their logprobs, losses, norms, weights and moments, up to rounding in another order; of experts, the
    loss of their balance as well."""
    for number in (1, 2):
        ours, right = (found / f"{model} {which} after {number}" for which in (layout, "one"))
        assert_same_metrics(ours, right, layout, "one")
        assert ("router_balance" in row_of(ours)) == (model == "balanced")
        for stem in ("model", "optimizer"):
            tensors, expected = (load_file(where / f"{stem}.safetensors") for where in (ours, right))
            assert list(tensors) == list(expected)
            for name, values in expected.items():
                torch.testing.assert_close(tensors[name], values, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("layout", "model"), EXACT)
def test_the_fullest_rank_has_what_is_estimated(found: Path, layout: str, model: str):
    """Of weights, and of AdamW's moments; but for vectors, which ranks that share matrices all have."""
    noted = [json.loads(path.read_text()) for path in found.glob(f"{model} {layout} on ?")]
    assert len(noted) == LAYOUTS[layout].ranks
    estimated = noted[0][1]
    for what, nbytes in estimated.items():
        assert max(held[what] for held, _ in noted) == pytest.approx(nbytes, rel=0.02), what


@pytest.mark.parametrize(("layout", "model"), EXACT)
def test_no_tensor_grows_with_pairs_of_tokens(found: Path, layout: str, model: str):
    """None of a pass, forward and backward. What is kept grows with the tokens, of which a rank with popular
    experts gets some more."""
    for path in found.glob(f"{model} {layout} on ? in passes"):
        (once, kept), (twice, kept_twice) = json.loads(path.read_text())
        assert 0 < once < LONG[0] ** 2
        assert 0 < twice < LONG[1] ** 2 / 2
        assert 0 < kept_twice < 2.5 * kept


@pytest.mark.parametrize("layout", [name for name, one in LAYOUTS.items() if one.again])
def test_layers_that_are_computed_again_keep_their_inputs(found: Path, layout: str):
    """And little more; without that, a rank keeps several times as much."""
    (model,) = LAYOUTS[layout].models
    plain = layout.removesuffix(", again")
    for rank in range(LAYOUTS[layout].ranks):
        paths = (found / f"{model} {name} on {rank} in passes" for name in (layout, plain))
        again, whole = (json.loads(path.read_text())[0][1] for path in paths)
        assert 0 < 2 * again < whole


@pytest.mark.parametrize(
    ("layout", "source", "model"), [(*pair, model) for pair in GOES_ON for model in both_have(*pair)]
)
def test_a_step_of_one_layout_is_gone_on_from_in_another(found: Path, layout: str, source: str, model: str):
    """What was saved is loaded byte for byte, and the next step is that of a run that was never stopped."""
    saved, loaded = found / f"{model} {source} after 1", found / f"{model} {layout} has loaded {source}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (loaded / name).read_bytes() == (saved / name).read_bytes()
    after, expected = found / f"{model} {layout} after {source}", found / f"{model} {source} after 2"
    assert_same_metrics(after, expected, layout, source)


@pytest.mark.parametrize("model", DENSE)
def test_weights_in_bfloat16_have_masters_in_float32(found: Path, model: str):
    """They change by steps that bfloat16 could not hold, and as FSDP2's do, up to its rounding."""
    ours, right = (found / f"{model} {which} after 2" for which in ("tensor, rounded", "one, rounded"))
    assert row_of(ours)["loss"] == pytest.approx(row_of(right)["loss"], rel=0.01)
    assert row_of(ours)["grad_norm"] == pytest.approx(row_of(right)["grad_norm"], rel=0.1)
    tensors = load_file(ours / "model.safetensors")
    assert {values.dtype for values in tensors.values()} == {torch.float32}
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(tensors[name], tensors[name].bfloat16().float())


@pytest.mark.parametrize("layout", [name for name in REWARDED if name != "one"])
def test_a_critic_a_reference_and_a_teacher_stand_beside_any_policy(found: Path, layout: str):
    """FSDP2 has them: values, advantages, losses and both models are those of one rank, also where the ranks
    go on from what one has saved. Each sample's logprobs come from the rank that has scored it."""
    one, ours = (found / f"rewarded {name} after" for name in ("one", layout))
    for step, right in (("1", "1"), ("2", "2"), ("one", "2")):
        row, expected = row_of(ours / step), row_of(one / right)
        assert {"kl/reference", "kl/teacher", "critic/loss", "critic/explained_variance"} <= row.keys()
        assert row == pytest.approx(expected, rel=2e-4, abs=1e-6)
        stems = {path.name for path in (one / right).glob("*.safetensors")}
        assert "trainer_critic_model.safetensors" in stems
        assert len(stems) == 4
        for stem in stems:
            tensors, wanted = load_file(ours / step / stem), load_file(one / right / stem)
            for name, values in wanted.items():
                torch.testing.assert_close(tensors[name], values, atol=3e-5, rtol=1e-3, msg=f"{stem} {name}")
    assert row_of(ours / "1")["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert abs(row_of(ours / "2")["kl/reference"]) > 1e-4


@pytest.mark.parametrize("layout", [name for name in REPLAYED if name != "one"])
def test_experts_that_a_server_chose_are_replayed_as_on_one_rank(found: Path, layout: str):
    """In every layer of every stage, for the tokens that they were chosen for."""
    for number in (1, 2):
        ours, right = (found / f"replayed {which} after {number}" for which in (layout, "one"))
        assert row_of(ours) == pytest.approx(row_of(right), rel=1e-4, abs=1e-6)
        for stem in ("model", "optimizer"):
            tensors, expected = (load_file(where / f"{stem}.safetensors") for where in (ours, right))
            for name, values in expected.items():
                torch.testing.assert_close(tensors[name], values, atol=3e-5, rtol=1e-3, msg=name)


PREFERENCES = {
    "one": (1, ()),
    "stages": (2, ("--backend", "megatron", "--parallel.pipeline", 2)),
    "tensor": (2, ("--backend", "megatron", "--parallel.tensor", 2)),
}
"""Ranks, and flags, of runs that learn from preferences."""
LOSSES = ("dpo", "kto", "orpo", "reward")
"""The first two need a reference, and one of them a mean over a batch; the last is a reward model's."""


GOING_ON = ("dpo", "reward")
"""Those whose runs go on: a reward model's from what one rank has saved."""


def prefer(rank: int, ports: list[int], folder: Path) -> None:
    """What each process does: whole runs, without the commands around them."""
    for (name, loss), port in zip(itertools.product(PREFERENCES, LOSSES), ports, strict=True):
        ranks, flags = PREFERENCES[name]
        if rank >= ranks:
            continue
        out = folder / f"{name} {loss}"
        out.mkdir(exist_ok=True)
        kind, task = (RewardConfig, "reward") if loss == "reward" else (DPOConfig, "dpo")
        how = ("--model.name", folder / "model", "--output-dir", out, "--workers", ranks, *flags)
        what = () if loss == "reward" else ("--loss.type", loss)
        command = ("@", f"{CONFIGS}/{task}.toml", *how, *what, "--ckpt", "--scheduler.steps", 4)
        config = load(kind, [str(word) for word in (*command, "--max-steps", 3)])
        group = join(rank, ranks, port, backend=config.backend, **config.parallel.model_dump())
        train(config, Attempt("run", 1, task, 0, None, "main"), group)
        group.barrier()
        if loss == "dpo" and rank == 0:  # the policy can't compute the numbers any more
            shutil.rmtree(out / "reference")
        if loss in GOING_ON:
            source = folder / ("one reward" if loss == "reward" else out) / "checkpoints" / "step_3"
            group.barrier()
            again = Attempt("run", 2, task, 3, str(source), "main")
            train(config.model_copy(update={"max_steps": 4}), again, group)
        group.leave()


def test_preferences_are_learned_as_on_one_rank(tmp_path: Path):
    """What the reference says comes from the policy, before its first step; later, from a copy. Saved reward
    models are the same, whatever has trained them."""
    changed = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "initializer_range": 0.1}
    write_model(random_model(AutoConfig.from_pretrained(EXAMPLE, **changed)), tmp_path / "model")
    started = start_ranks(
        prefer, [free_port() for _ in itertools.product(PREFERENCES, LOSSES)], tmp_path, world_size=2
    )
    while not started.join():
        pass
    for loss in LOSSES:
        right = rows(tmp_path / f"one {loss}")
        assert len({row["loss"] for row in right}) == len(right) == (4 if loss in GOING_ON else 3)
        for name in ("stages", "tensor"):
            for ours, row in zip(rows(tmp_path / f"{name} {loss}"), right, strict=True):
                for key in ("loss", "grad_norm"):
                    assert ours[key] == pytest.approx(row[key], rel=1e-4), (name, loss, key)
    saved = [tmp_path / f"{name} reward" / "checkpoints" / "step_4" / "model" for name in PREFERENCES]
    one, *others = (load_file(folder / "model.safetensors") for folder in saved)
    assert one["score.weight"].any()
    for other in others:
        assert list(other) == list(one)
        for name, values in one.items():
            torch.testing.assert_close(other[name], values, atol=2e-5, rtol=1e-3, msg=name)
    assert len({(folder / "config.json").read_text() for folder in saved}) == 1
