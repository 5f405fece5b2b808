"""Checkpoints of verl and SkyRL, whose layout a program of two ranks with FSDP2 writes."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dcp_program import STEPS, WIDTH, tokens
from families import make
from foreign import values
from one_rank import one_rank
from runs import start_ranks
from test_dcp import Runs, assert_goes_on
from torch.distributed.tensor import Partial
from transformers import AutoModelForTokenClassification
from verl_program import COUNTED, rewards, train_all

from cairn.checkpoint.manifest import CheckpointError, Damaged
from cairn.checkpoint.step_folder import CRITIC, MODEL, OPTIMIZER, StepFolder, verify
from cairn.config.rl_trainer import TrainerConfig
from cairn.formats import format_of
from cairn.formats.torch_file.safe_pickle import ForbiddenPickle
from cairn.formats.transfer.diff import compare
from cairn.formats.transfer.import_step import import_checkpoint
from cairn.formats.verl import Verl
from cairn.run.batches import Batch, Sample, Sampling
from cairn.run.connections import free_port
from cairn.trainer.group import RankGroup
from cairn.trainer.losses.likelihood import Likelihood
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.value_model import make_critic
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.critic import CriticLearner
from cairn.trainer.step.train_step import train_step

group = one_rank

MODELS = ("llama", "qwen3_tied", "qwen3_moe")
"""Written as by verl, by SkyRL with a copy on each rank, and by verl with shards of columns and names."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, with the program's run and the truth."""
    out = tmp_path_factory.mktemp("verl")
    for family in MODELS:
        make(family, out / family / "model")
    ranks = start_ranks(train_all, free_port(), out, world_size=2)
    while not ranks.join():
        pass
    return out


@pytest.fixture
def actor(written: Path, tmp_path: Path) -> Path:
    """A copy of the Llama's shards."""
    shutil.copytree(written / "llama" / "run", tmp_path / "run")
    return tmp_path / "run" / f"global_step_{COUNTED}" / "actor"


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_every_bit_is_read(written: Path, family: str):
    """Weights, moments and the step, from shards of rows and columns, and from copies."""
    truth = torch.load(written / family / "truth.pt", weights_only=True)
    assert format_of(written / family / "run") == "verl"
    content = Verl().read(written / family / "run")
    assert content.step == STEPS
    assert content.optimizer == "AdamW"
    assert content.settings["optimizer.lr"] == 1e-3
    assert content.settings["optimizer.betas"] == (0.9, 0.95)
    for stem, expected in ((MODEL, truth["weights"]), (OPTIMIZER, truth["state"])):
        assert content.tensors[stem].keys() == expected.keys()
        for name, tensor in expected.items():
            for piece in (1 << 20, 37):
                found = values(content.tensors[stem][name], piece)
                assert found.dtype == tensor.dtype, name
                assert torch.equal(found, tensor), name


def test_what_is_left_out_is_said(written: Path):
    """Each with what to do about it."""
    said = "\n".join(Verl().read(written / "qwen3_tied" / "run").left_out)
    for what in (
        "data.pt:",
        r"lr_scheduler: .* \(at step 2\)",
        "rng:",
        "client_state:",
        r"critic/: lr_scheduler: .*set `\[trainer\.critic\.scheduler\]`",
        "the critic's optimiser has made 3 steps, and the policy's 2",
    ):
        assert re.search(what, said), what
    assert f"global_step_{COUNTED} is the program's own count" in said


def test_the_places_of_a_checkpoint(actor: Path):
    """A run, a step and the policy's folder are the same; a critic is no policy."""
    for source in (actor.parent.parent, actor.parent, actor):
        assert format_of(source) == "verl"
        content = Verl().read(source)
        assert content.model == actor / "huggingface"
        assert (content.critic is None) == (source == actor)
        assert (CRITIC in content.tensors) == (source != actor)
        said = [line for line in content.left_out if line.startswith("critic: is taken over if you give")]
        assert len(said) == (source == actor)
    with pytest.raises(CheckpointError, match="is a critic"):
        Verl().read(actor.parent / "critic")
    for path in (actor.parent / "critic").glob("model_*"):
        path.unlink()
    assert "critic: holds no model_world_size_W_rank_R.pt, and is not taken over" in (
        Verl().read(actor.parent).left_out
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_cairn_goes_on_with_the_programs_next_step(
    group: RankGroup, written: Path, tmp_path: Path, family: str
):
    """The losses and the weights."""
    step, _, _ = import_checkpoint(written / family / "run", tmp_path / "run", "verl")
    assert_goes_on(step, group, written / family)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_the_critic_goes_on_too(group: RankGroup, written: Path, tmp_path: Path, family: str):
    """Every bit of it; a head that the program calls otherwise; and its own next losses."""
    source = written / family / "run"
    step, manifest, content = import_checkpoint(source, tmp_path / "run", "verl")
    assert content.settings["critic.optimizer.lr"] == 1e-3
    truth = torch.load(written / family / "critic.pt", weights_only=True)
    saved = {n: values(t) for n, t in content.tensors[CRITIC].items()}
    heads = {"score.weight", *(() if family == "qwen3_tied" else ("score.bias",))}
    assert {name for name in saved if name.startswith("score")} == heads
    named = {re.sub(r"^pretrained_model\.|", "", name): tensor for name, tensor in truth.items()}
    named = {re.sub(r"^(value_head|v_head\.summary)", "score", n): t for n, t in named.items()}
    unused = "critic/: pretrained_model.lm_head.weight: no value depends on it"
    assert (unused in content.left_out) == (family == "qwen3_moe")
    named.pop("lm_head.weight", None)
    assert saved.keys() == named.keys()
    assert all(torch.equal(saved[name], named[name]) for name in named)
    optimizer = {"lr": 1e-3, "betas": (0.9, 0.95)}
    critic = {"optimizer": optimizer, "gae_lambda": 1.0, "clip": 0.0}
    settings = {"optimizer": optimizer, "seq_len": WIDTH, "critic": critic}
    config = TrainerConfig.model_validate(settings)
    models = {
        POLICY: make_policy(step / "model", config, group),
        "critic": make_critic(step / "model", config, group, step),
    }
    state = TrainerState(config, group, models, TrainerProgress())
    state.load(step)
    state.check_model()
    learner = CriticLearner(config, state)
    losses = []
    for number in (STEPS + 2, STEPS + 3):
        rows = tokens(number, state.policy.module.config.vocab_size).to(torch.int32).numpy()
        samples = []
        for row, reward in zip(rows, rewards(number).tolist(), strict=True):
            column = np.zeros(WIDTH, np.float32)
            column[-1] = reward
            samples.append(Sample(row, np.arange(WIDTH) >= 1, {"rewards": column}))
        work = make_rank_batch(Batch(samples, sampling=Sampling(1.0)), config, rank=0, world_size=1)
        learner.prepare(work)
        row = train_step(state, work, number, Likelihood(), further_learners=[learner], with_policy=False)
        losses.append(row["critic/loss"])
    assert losses == pytest.approx(
        json.loads((written / family / "critic_losses.json").read_text()), rel=1e-5
    )
    assert manifest.parts == ["trainer"]
    again = compare(step, source)
    for stem in ("critic", "critic_optimizer"):
        assert again[stem]["only_in_a"] == again[stem]["only_in_b"] == []
        assert {row["changed"] for row in again[stem]["tensors"]} == {0}


def test_weights_alone_bring_the_critics(actor: Path, tmp_path: Path):
    """Which another run's can begin with."""
    step, manifest, _ = import_checkpoint(actor.parent, tmp_path / "new", "verl", weights_only=True)
    assert manifest.parts == ["model"]
    assert {path.name for path in StepFolder(step).critic.iterdir()} == {"config.json", "model.safetensors"}
    verify(step)
    model = AutoModelForTokenClassification.from_pretrained(StepFolder(step).critic)
    assert model.config.num_labels == 1


def two_heads(critic: Path) -> None:
    """Another weight of the same shape."""
    for rank in (0, 1):
        path = critic / f"model_world_size_2_rank_{rank}.pt"
        resaved(path, lambda found: found.update({"other.weight": found["score.weight"]}))


def no_head(critic: Path) -> None:
    """Layers alone."""
    for rank in (0, 1):
        path = critic / f"model_world_size_2_rank_{rank}.pt"
        resaved(path, lambda found: found.pop("score.weight"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (two_heads, r"its head, and this one has several: other\.weight, score\.weight"),
        (no_head, r"has none; its tensors beside the layers are score\.bias"),
    ],
)
def test_a_critic_without_counterpart_is_refused(actor: Path, change: Callable[[Path], None], said: str):
    """The policy alone can be imported."""
    change(actor.parent / "critic")
    with pytest.raises(CheckpointError, match=said):
        Verl().read(actor.parent)
    assert Verl().read(actor).critic is None


def test_weights_alone(actor: Path):
    """Where the optimiser was not saved; the step is that in the folder's name."""
    for path in actor.glob("optim_*"):
        path.unlink()
    content = Verl().read(actor)
    assert OPTIMIZER not in content.tensors
    assert content.step == COUNTED
    assert "actor/ has no optimiser state: weights only" in content.left_out


def resaved(path: Path, change: Callable[[dict], object]) -> None:
    """Change what a file holds."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def fsdp1(actor: Path) -> None:
    """As fsdp_config.json says it."""
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 1, "world_size": 2}))


def adapter(actor: Path) -> None:
    """Weights of an adapter."""
    for rank in (0, 1):
        path = actor / f"model_world_size_2_rank_{rank}.pt"
        resaved(path, lambda found: found.update({"model.q_proj.lora_A.weight": torch.ones(2)}))


def momentum(actor: Path) -> None:
    """The state of another optimiser."""
    for rank in (0, 1):
        path = actor / f"optim_world_size_2_rank_{rank}.pt"
        resaved(path, lambda found: found["state"][0].update({"momentum_buffer": torch.ones(2)}))


def frozen(actor: Path) -> None:
    """No state of one weight."""
    for rank in (0, 1):
        resaved(actor / f"optim_world_size_2_rank_{rank}.pt", lambda found: found["state"].pop(3))


def flat(actor: Path) -> None:
    """FSDP1's optimiser, where no file tells it."""
    for rank in (0, 1):
        path = actor / f"optim_world_size_2_rank_{rank}.pt"
        resaved(path, lambda found: found["state"][0].update(exp_avg=torch.ones(7)))


def two_groups(actor: Path) -> None:
    """Weights with decay, and others."""

    def change(found: dict) -> None:
        (whole,) = found["param_groups"]
        found["param_groups"] = [
            {**whole, "params": whole["params"][:5]},
            {**whole, "params": whole["params"][5:]},
        ]

    for rank in (0, 1):
        resaved(actor / f"optim_world_size_2_rank_{rank}.pt", change)


def other_size(actor: Path) -> None:
    """Files of a run with another number of ranks."""
    shutil.copy(actor / "model_world_size_2_rank_0.pt", actor / "model_world_size_4_rank_0.pt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (fsdp1, r"is of FSDP1, .* `python -m verl\.model_merger merge --backend fsdp --local_dir .*/actor"),
        (flat, r"is of FSDP1, .* verl\.model_merger"),
        (adapter, r"was trained with LoRA \(model\.q_proj\.lora_A\.weight\)"),
        (momentum, "momentum_buffer, step, not the state of AdamW"),
        (frozen, r"has the state of 20 of 21 weights, .* all of them must have been trained"),
        (two_groups, "2 groups of weights, which it numbers anew"),
        (other_size, "files of 2 and of 4 ranks"),
    ],
)
def test_what_has_no_counterpart_is_refused(actor: Path, change: Callable[[Path], None], said: str):
    """With the reason, and what to do."""
    change(actor)
    with pytest.raises(CheckpointError, match=said):
        Verl().read(actor)


def test_a_missing_rank(actor: Path):
    """Its file is named."""
    path = actor / "model_world_size_2_rank_1.pt"
    path.unlink()
    with pytest.raises(FileNotFoundError, match="rank_1"):
        Verl().read(actor)


def test_shards_of_one_rank_twice(actor: Path):
    """They do not make a whole tensor where a rank's part is shorter."""
    weights = torch.load(actor / "model_world_size_2_rank_0.pt", weights_only=False)
    name = "model.norm.weight"
    shard = weights[name]
    weights[name]._local_tensor = shard._local_tensor[:-1].clone()
    torch.save(weights, actor / "model_world_size_2_rank_0.pt")
    with pytest.raises(Damaged, match=r"model\.norm\.weight: rank 0 holds \[31\], and \[32\] belongs to it"):
        Verl().read(actor)


def test_another_placement(actor: Path):
    """Sums that ranks hold in part are no values yet."""
    weights = torch.load(actor / "model_world_size_2_rank_0.pt", weights_only=False)
    weights["model.norm.weight"]._spec.placements = (Partial(),)
    torch.save(weights, actor / "model_world_size_2_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"norm\.weight is placed as Partial"):
        Verl().read(actor)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_code_in_a_shard_does_not_run(actor: Path, kind: str):
    """It is refused by the name of what it calls."""
    marker = actor / "marker"
    path = actor / f"{kind}_world_size_2_rank_1.pt"
    resaved(path, lambda found: found.update({"more": Runs(os.system, f"touch {marker}")}))
    with pytest.raises(ForbiddenPickle, match=r"rank_1\.pt.*names posix\.system, which is not allowed"):
        Verl().read(actor)
    assert not marker.exists()


def test_code_in_the_extra_state_does_not_run(actor: Path):
    """What it holds is not needed."""
    marker = actor / "marker"
    path = actor / "extra_state_world_size_2_rank_0.pt"
    torch.save({"rng": Runs(os.system, f"touch {marker}")}, path)
    assert any("names posix.system" in line for line in Verl().read(actor).left_out)
    assert not marker.exists()
