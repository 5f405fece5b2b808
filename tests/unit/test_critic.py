"""PPO's critic: its advantages, its loss, its model, and its place in steps and checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import make
from one_rank import one_rank
from test_saver import ABOUT, bits, make_saver, save, saver, store
from tiny import EXAMPLE, VOCABULARY, random_model, write, write_example
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from cairn.checkpoint.saving.saver import Saver
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import write_tensors
from cairn.config.kinds import KINDS
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.formats.transfer.diff import compare
from cairn.formats.transfer.export_step import left_out_of
from cairn.launch.memory import training_needs
from cairn.launch.plan.other_models import check_auxiliary_models, with_auxiliary_models
from cairn.launch.plan.recipe import join_recipe
from cairn.launch.start import Start
from cairn.run.batches import Batch, Sample, Sampling
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import write_json
from cairn.run.machine import Machine
from cairn.run.messages import Attempt
from cairn.trainer.group import RankGroup
from cairn.trainer.losses.likelihood import Likelihood
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.models.value_model import make_critic
from cairn.trainer.packing import RankBatch, make_rank_batch
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.critic import CriticLearner, estimate, moments
from cairn.trainer.step.train_step import train_step

__all__ = ["make_saver", "saver", "store"]  # fixtures
group = one_rank
CONFIG = TrainerConfig(
    optimizer={"lr": 0.01, "eps": 1e-3},
    seq_len=24,
    critic={"optimizer": {"lr": 0.02, "eps": 1e-3}, "gamma": 0.9, "gae_lambda": 0.8},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


def make_samples(count: int = 7) -> list[Sample]:
    """Answers with a tool's turn in the middle, which is not learned, and rewards within and at the end."""
    draw = np.random.default_rng(0)
    samples: list[Sample] = []
    for number in range(count):
        length = 5 + number
        mask = np.ones(length, bool)
        mask[[0, 1, 3]] = False
        rewards = np.zeros(length, np.float32)
        rewards[[2, -1]] = draw.normal(size=2)
        columns = {"rewards": rewards, "logprobs": draw.normal(size=length).astype(np.float32)}
        samples.append(Sample(draw.integers(5, 60, length).astype(np.int32), mask, columns))
    return samples


def begin(group: RankGroup, folder: Path, config: TrainerConfig = CONFIG) -> TrainerState:
    models = {
        POLICY: make_policy(folder, config, group),
        "critic": make_critic(folder, config, group, None),
    }
    state = TrainerState(config, group, models, TrainerProgress())
    state.begin(folder)
    state.check_model()
    return state


def make_work(samples: list[Sample], config: TrainerConfig = CONFIG, **how: int) -> RankBatch:
    batch = Batch(samples, sampling=Sampling(1.0))
    return make_rank_batch(batch, config, rank=0, world_size=1, **how)


def shake(state: TrainerState, scale: float = 0.2) -> None:
    """Give the head weights, so that values are not all 0."""
    head = state.models["critic"].module.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(0, scale, generator=torch.Generator().manual_seed(1))
        head.bias.fill_(0.25)


def gae_by_sums(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Equation 16 as it stands: the sum of (gamma lambda)^l delta_{t+l}, over one episode."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return np.array([sum((gamma * lam) ** k * deltas[t + k] for k in range(n - t)) for t in range(n)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0), (0.97, 0.7)])
def test_gae_is_the_sum_of_its_definition(gamma: float, lam: float):
    draw = np.random.default_rng(3)
    lengths = [4, 1, 9, 2]
    episodes = [(draw.normal(size=n), draw.normal(size=n)) for n in lengths]
    wanted = np.concatenate([gae_by_sums(*episode, gamma, lam) for episode in episodes])
    rewards, values = (np.concatenate(some) for some in zip(*episodes, strict=True))
    starts = np.zeros(sum(lengths), bool)
    starts[np.cumsum([0, *lengths[:-1]])] = True
    found = estimate(rewards, values, starts, gamma=gamma, gae_lambda=lam)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    if gamma == lam == 1.0:
        returns = np.concatenate([np.cumsum(r[::-1])[::-1] for r, _ in episodes])
        np.testing.assert_allclose(found + values, returns)


def test_gae_of_nothing_is_nothing():
    assert estimate(np.zeros(0), np.zeros(0), np.zeros(0, bool), gamma=1, gae_lambda=1).shape == (0,)


def test_moments_do_not_depend_on_micro_batches(group: RankGroup):
    values = np.random.default_rng(4).normal(3, 2, 101)
    whole = moments({"some": [values]}, group)["some"]
    parts = moments({"some": [values[:7], values[7:7], values[7:]]}, group)["some"]
    assert (whole.mean, whole.variance) == pytest.approx((values.mean(), values.var(ddof=1)), rel=1e-14)
    assert (parts.mean, parts.variance) == pytest.approx((whole.mean, whole.variance), rel=1e-15)
    assert moments({"some": [values[:1]]}, group)["some"].variance == 0


def columns_of(work: RankBatch, samples: list[Sample], name: str) -> list[np.ndarray]:
    """A column's values of the learned tokens of each sample, found by the samples' tokens."""
    found = []
    for sample in samples:
        for micro in work.micros:
            ids = micro.input_ids.flatten().numpy()
            for start in micro.bounds.numpy()[:-1]:
                if np.array_equal(ids[start : start + len(sample.token_ids)], sample.token_ids):
                    found.append(micro.columns[name].flatten().numpy()[start:][: len(sample.token_ids)])
    assert len(found) == len(samples)
    return [one[sample.loss_mask] for one, sample in zip(found, samples, strict=True)]


def test_columns_are_those_of_each_sample_alone(group: RankGroup, folder: Path):
    """Values are of the state before a token; tokens that are not learned are passed over."""
    state, samples = begin(group, folder), make_samples()
    shake(state)
    learner = CriticLearner(CONFIG, state)
    work = make_work(samples)
    row = learner.prepare(work)
    values, wanted = columns_of(work, samples, "values"), []
    for sample, found in zip(samples, values, strict=True):
        alone = make_work([sample])
        learner.prepare(alone)
        np.testing.assert_allclose(found, columns_of(alone, [sample], "values")[0], atol=1e-4)
        rewards = sample.columns["rewards"][sample.loss_mask].astype(np.float64)
        wanted.append(gae_by_sums(rewards, found.astype(np.float64), 0.9, 0.8))
    advantages, of_values = np.concatenate(wanted), np.concatenate(values).astype(np.float64)
    returns = np.concatenate(columns_of(work, samples, "returns"))
    np.testing.assert_allclose(returns, advantages + of_values, atol=1e-5)
    white = (advantages - advantages.mean()) / np.sqrt(advantages.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(columns_of(work, samples, "advantages")), white, atol=1e-5)
    explained = 1 - np.var(returns - of_values) / np.var(returns)
    assert row == pytest.approx(
        {
            "values/mean": of_values.mean(),
            "returns/mean": returns.mean(),
            "advantage/mean": advantages.mean(),
            "advantage/std": advantages.std(ddof=1),
            "critic/explained_variance": explained,
        },
        abs=1e-5,
    )


def test_rewards_that_the_trainer_has_found_are_added(group: RankGroup, folder: Path):
    """Such as a penalty on KL, in a column that is computed on the model's device."""
    state, samples = begin(group, folder), make_samples()
    learner = CriticLearner(CONFIG, state)
    plain, more = make_work(samples), make_work(samples)
    for micro in more.micros:
        micro.add_column("token_rewards", -micro.columns["rewards"][:, 1:])
    assert learner.prepare(plain)["advantage/std"] > 0.1
    assert learner.prepare(more)["advantage/std"] == 0


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_loss_is_ppos(group: RankGroup, folder: Path, clip: float):
    """Against PPO's value loss in float64, at weights that have changed since the begin of the step."""
    config = CONFIG.model_copy(update={"critic": CONFIG.critic.model_copy(update={"clip": clip})})
    state, samples = begin(group, folder, config), make_samples()
    learner = CriticLearner(config, state)
    work = make_work(samples)
    learner.prepare(work)
    before = np.concatenate(columns_of(work, samples, "values")).astype(np.float64)
    returns = np.concatenate(columns_of(work, samples, "returns")).astype(np.float64)
    shake(state, 0.05)
    again = make_work(samples)
    learner.prepare(again)
    now = np.concatenate(columns_of(again, samples, "values")).astype(np.float64)
    losses = (now - returns) ** 2
    clipped = (np.clip(now, before - clip, before + clip) - returns) ** 2 if clip else losses
    row = train_step(state, work, 1, Likelihood(), further_learners=[learner], with_policy=False)
    assert row["critic/loss"] == pytest.approx(0.5 * np.maximum(losses, clipped).mean(), rel=1e-4)
    assert row["critic/clipped"] == pytest.approx((clipped > losses).mean())
    assert (row["critic/clipped"] > 0) == bool(clip)


def values_of(state: TrainerState, name: str) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in state.models[name].module.state_dict().items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some.keys() | others.keys())


def test_the_critic_learns_alone_in_its_warm_up(group: RankGroup, folder: Path):
    """With its own learning rate; it predicts rewards better and better."""
    state, samples = begin(group, folder), make_samples()
    learner = CriticLearner(CONFIG, state)
    policy = values_of(state, POLICY)
    rows = []
    for step in range(1, 6):
        work = make_work(samples)
        row = dict(learner.prepare(work))
        rows.append(
            row | train_step(state, work, step, Likelihood(), further_learners=[learner], with_policy=False)
        )
    assert same(policy, values_of(state, POLICY))
    assert not state.models[POLICY].optimizer.state
    losses = [row["critic/loss"] for row in rows]
    assert losses[-1] < 0.7 * losses[0], losses
    assert rows[-1]["critic/explained_variance"] > rows[0]["critic/explained_variance"] == 0
    assert rows[0].keys().isdisjoint({"loss", "lr", "grad_norm"})
    assert rows[0]["critic/lr"] == 0.02
    assert state.progress.step == 5
    work = make_work(samples)
    learner.prepare(work)
    row = train_step(state, work, 6, Likelihood(), further_learners=[learner])
    assert not same(policy, values_of(state, POLICY))
    assert (row["lr"], row["critic/lr"]) == (0.01, 0.02)


def test_batches_without_rewards_are_refused(group: RankGroup, folder: Path):
    state = begin(group, folder)
    samples = [Sample(one.token_ids, one.loss_mask, {}) for one in make_samples()]
    with pytest.raises(UsageError, match="the orchestrator ships advantages: give it advantage"):
        CriticLearner(CONFIG, state).prepare(make_work(samples))


def test_tokens_that_the_critic_has_no_row_for_are_refused(group: RankGroup, tmp_path: Path):
    """A policy may sample a padding row of its own embeddings; a critic of the family may have fewer."""

    def written(name: str, rows: int) -> Path:
        config = AutoConfig.from_pretrained(EXAMPLE, vocab_size=rows)
        return write(random_model(config), tmp_path / name)

    own = written("own", VOCABULARY)
    config = TrainerConfig(seq_len=24, critic={"model": str(own)})
    learner = CriticLearner(config, begin(group, written("policy", VOCABULARY + 10), config))
    learner.prepare(make_work(make_samples(), config))
    samples = make_samples()
    samples[2].token_ids[-1] = VOCABULARY + 3
    words = rf"critic\.model = .*/own: its embeddings have {VOCABULARY} rows.* sampled token {VOCABULARY + 3}"
    with pytest.raises(UsageError, match=words):
        learner.prepare(make_work(samples, config))


def test_values_are_float32_where_layers_are_not(group: RankGroup, folder: Path):
    """And sharded weights learn as plain ones do."""
    precision = {"compute": "bfloat16"}
    config = TrainerConfig(**{**CONFIG.model_dump(exclude_unset=True), "precision": precision})
    state, plain = begin(group, folder, config), begin(group, folder)
    losses = []
    for one in (state, plain):
        learner = CriticLearner(one.config, one)
        rows = []
        for step in (1, 2, 3):
            work = make_work(make_samples())
            learner.prepare(work)
            row = train_step(one, work, step, Likelihood(), further_learners=[learner], with_policy=False)
            rows.append(row["critic/loss"])
        losses.append(rows)
        if one is state:
            values = np.concatenate(columns_of(work, make_samples(), "values"))
            rounded = torch.from_numpy(values).bfloat16().float().numpy()
            assert np.mean(values != rounded) > 0.8
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


def learn(state: TrainerState, step: int, *, with_policy: bool = True) -> dict[str, float]:
    """A step of a run; returns its metrics."""
    learner = CriticLearner(CONFIG, state)
    work = make_work(make_samples())
    row = dict(learner.prepare(work))
    return row | train_step(
        state, work, step, Likelihood(), further_learners=[learner], with_policy=with_policy
    )


def keep(saver: Saver, store: CheckpointStore, step: int, state: TrainerState) -> Path:
    """The state as a checkpoint."""
    critic = state.models["critic"]
    files = {f"trainer/critic/{name}": content for name, content in critic.beside().items()}
    saver.save(step, state.tensors(), files, ABOUT)
    saver.finish()
    folder = store.folder(step)
    write_json(folder / "trainer" / "state.json", {"progress": {"step": step}})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("trained_before", [False, True], ids=["in the warm-up", "behind it"])
def test_a_resumed_run_goes_on_bit_by_bit(
    group: RankGroup, folder: Path, saver: Saver, store: CheckpointStore, trained_before: bool
):
    """In the critic's warm-up the policy has no optimiser state yet. The critic's folder is all it needs."""
    straight = begin(group, folder)
    learn(straight, 1, with_policy=False)
    learn(straight, 2, with_policy=trained_before)
    saved = keep(saver, store, 2, straight)
    models = {
        POLICY: make_policy(folder, CONFIG, group),
        "critic": make_critic(Path("nowhere"), CONFIG, group, saved),
    }
    resumed = TrainerState(CONFIG, group, models, TrainerProgress())
    resumed.load(saved)
    resumed.check_model()
    assert learn(resumed, 3) == learn(straight, 3)
    assert bits(resumed.tensors()) == bits(straight.tensors())


def test_its_folder_opens_in_transformers(
    group: RankGroup, folder: Path, saver: Saver, store: CheckpointStore
):
    """With the same values."""
    state, samples = begin(group, folder), make_samples()
    shake(state)
    work = make_work(samples)
    CriticLearner(CONFIG, state).prepare(work)
    saved = keep(saver, store, 1, state) / "trainer" / "critic"
    model, info = AutoModelForTokenClassification.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    assert [line[:12] for line in left_out_of(saved.parents[1], "hf")] == ["the critic ("]
    for sample, values in zip(samples, columns_of(work, samples, "values"), strict=True):
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, :, 0]
        wanted = logits[np.flatnonzero(sample.loss_mask) - 1]
        torch.testing.assert_close(torch.from_numpy(values), wanted, atol=1e-4, rtol=1e-4)


def test_another_run_can_begin_with_a_critic(group: RankGroup, folder: Path, tmp_path: Path):
    """Its head included; the policy's own weights come from elsewhere."""
    state = begin(group, folder)
    shake(state)
    critic = state.models["critic"]
    write_tensors(tmp_path, critic.saved(), "model")
    (tmp_path / "config.json").write_bytes(critic.beside()["config.json"])
    config = CONFIG.beginning_as({"critic": str(tmp_path)})
    other = make_critic(folder, config, group, None)
    other.begin(Path("nowhere"))
    assert bits({"all": other.saved()}) == bits({"all": critic.saved()})


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "opt", "falcon_alibi", "llama4"])
def test_models_of_all_kinds_learn_values(group: RankGroup, tmp_path: Path, family: str):
    """Capped logits, experts in files of their own, masks, one sample a row, another place of the layers."""
    state = begin(group, make(family, tmp_path))
    learner = CriticLearner(CONFIG, state)
    batch = Batch(make_samples(), sampling=Sampling(1.0))
    losses = []
    for step in (1, 2):
        arrange = state.scorer.rows.arrange
        work = make_rank_batch(batch, CONFIG, rank=0, world_size=1, arrange=arrange)
        learner.prepare(work)
        row = train_step(state, work, step, Likelihood(), further_learners=[learner], with_policy=False)
        losses.append(row["critic/loss"])
    assert losses[1] < losses[0]
    assert "lm_head.weight" not in state.models["critic"].saved()


def test_steps_are_compared_with_their_critics(
    group: RankGroup, folder: Path, saver: Saver, store: CheckpointStore
):
    state = begin(group, folder)
    one = keep(saver, store, 1, state)
    learn(state, 2)
    two = keep(saver, store, 2, state)
    learn(state, 3, with_policy=False)
    three = keep(saver, store, 3, state)
    report = compare(two, three)
    changed = {row["name"]: row["changed"] for row in report["critic"]["tensors"]}
    assert changed["score.weight"] > 0
    assert all(row["changed"] == 0 for row in report["tensors"])
    assert report["critic_optimizer"]["tensors"]
    assert compare(one, two)["critic_optimizer"] is None, "the first has no state yet"


# What the launcher checks

RL = KINDS["rl"]


def config_of(folder: Path, **critic: str) -> RLConfig:
    """A run with the policy in a folder."""
    trainer = {"critic": critic} if critic else {}
    advantage = {"advantage": {"type": "gae"}} if critic else {}
    return RLConfig(model={"name": str(folder)}, trainer=trainer, orchestrator=advantage)


def test_a_run_gets_no_critic_on_its_way_and_loses_none(
    group: RankGroup, folder: Path, saver: Saver, store: CheckpointStore
):
    state = begin(group, folder)
    with_critic = keep(saver, store, 1, state)
    save(saver, 2, {"model/model": state.tensors()["model/model"]})
    yes, no = (RL.trainer(config_of(folder, **critic)) for critic in ({"model": "policy"}, {}))
    check_auxiliary_models(yes, Start(store, with_critic), "--trainer.")
    check_auxiliary_models(no, Start(store, store.folder(2)), "--trainer.")
    with pytest.raises(UsageError, match=r"step_1 has a critic, and this run is without: .* --model.name"):
        check_auxiliary_models(no, Start(store, with_critic), "--trainer.")
    with pytest.raises(UsageError, match=r"step_2 has no critic, .* Leave out --trainer.critic"):
        check_auxiliary_models(yes, Start(store, store.folder(2)), "--trainer.")


def test_where_a_critic_begins(folder: Path, tmp_path: Path, store: CheckpointStore):
    """A folder with the policy's tokens, of any architecture; or the policy itself."""
    fresh, config = Start(store), config_of(folder, model="policy")
    assert with_auxiliary_models(RL, config, fresh, tmp_path) == config
    own = write_example(tmp_path / "own")
    found = with_auxiliary_models(RL, config_of(folder, model=str(own)), fresh, tmp_path)
    assert RL.trainer(found).auxiliary_models["critic"].model == str(own)
    resumed = replace(fresh, folder=store.folder(1))
    assert (
        with_auxiliary_models(RL, config_of(folder, model="gone"), resumed, tmp_path).trainer.critic.model
        == "gone"
    )
    with pytest.raises(UsageError, match=r"--trainer.critic.model nowhere: there is no such folder"):
        with_auxiliary_models(RL, config_of(folder, model="nowhere"), fresh, tmp_path)
    settings = (own / "config.json").read_text()
    for rows in (VOCABULARY - 1, VOCABULARY, VOCABULARY + 26):  # the policy has as many as it has tokens
        (own / "config.json").write_text(json.dumps(json.loads(settings) | {"vocab_size": rows}))
        if rows < VOCABULARY:
            words = rf"critic.model .*its embeddings have {rows} rows, .* tokens need {VOCABULARY}"
            with pytest.raises(UsageError, match=words):
                with_auxiliary_models(RL, config_of(folder, model=str(own)), fresh, tmp_path)
        else:
            with_auxiliary_models(RL, config_of(folder, model=str(own)), fresh, tmp_path)
    about = (own / "tokenizer.json").read_text()
    (own / "tokenizer.json").write_text(about.replace('"a":', '"aaaa":'))
    with pytest.raises(UsageError, match=r"vocabulary is another than the policy's: 'a' is token"):
        with_auxiliary_models(RL, config_of(folder, model=str(own)), fresh, tmp_path)


def test_an_orchestrator_that_joins_must_have_the_trainers_kind_of_advantages(tmp_path: Path):
    """Of several environments, each counts."""
    run, attempt = RunDirectory(tmp_path), Attempt("run", 1, "trainer", 0, None, "branch_1")
    rewards = {"settings": {"advantage.type": "gae"}}
    compared = {"settings": {}, "environments": {"a": {"advantage.type": "grpo"}}}
    for trainer, mine, other, message in (
        ({}, compared, rewards, "'gae' without trainer.critic"),
        ({"critic.clip": 0.2}, rewards, compared, "trainer.critic with orchestrator.advantage.type = 'grpo'"),
    ):
        write_json(run.recipe, {"trainer": {"settings": trainer}})
        join_recipe(mine, attempt, run, [])
        with pytest.raises(UsageError, match=message):
            join_recipe(other, attempt, run, [])


@pytest.mark.parametrize("tied", [True, False])
def test_its_memory_is_counted(folder: Path, tmp_path: Path, tied: bool):
    """Four values of float32 for each weight; there are no output embeddings."""
    own = write_example(tmp_path / "own", tied=tied)
    trainer = RL.trainer(config_of(folder, model=str(own))).settled(gpu=False)
    plain = trainer.model_copy(update={"critic": None})
    found, without = (training_needs(str(folder), one, Machine()) for one in (trainer, plain))
    about = AutoConfig.from_pretrained(own)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(about).base_model
    elements = sum(parameter.numel() for parameter in layers.parameters())
    assert found.rank.counted - without.rank.counted == 16 * elements
    assert found.host.total - without.host.total == (16 + 12 * bool(trainer.ckpt)) * elements
