"""References and teachers: KL penalties, rewards of tokens, and frozen copies."""

import itertools
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from families import make
from one_rank import one_rank
from tiny import EXAMPLE, VOCABULARY, random_model, write, write_example
from transformers import AutoConfig

from cairn.checkpoint.tensors.sharded_files import read_tensors, write_tensors
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.teachers import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from cairn.model.described import sums_of, weight_files
from cairn.run.batches import Batch, Sample, Sampling
from cairn.run.errors import UsageError
from cairn.trainer.attention.choice import ALONE, BY_POSITIONS
from cairn.trainer.frozen.model import Frozen, TeacherModels
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import LossInputs, make_loss
from cairn.trainer.losses.loss import ESTIMATORS, KLPenalty
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.packing import MicroBatch, RankBatch, make_micro_batches, make_rank_batch, one_a_row
from cairn.trainer.state import POLICY, TrainerProgress, TrainerState
from cairn.trainer.step.critic import TOKEN_REWARDS
from cairn.trainer.step.train_step import train_step

group = one_rank
CONFIG = TrainerConfig(optimizer={"lr": 0.003, "eps": 1e-6}, seq_len=24)
FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
}


def samples(**columns: float) -> list[Sample]:
    """Answers of several lengths, of which all tokens but the first two are learned."""
    return [
        Sample.of_answer([5, 6], list(range(7, 9 + n)), logprobs=-1.0, advantages=0.5, **columns)
        for n in range(6)
    ]


def configured(folder: Path, **sections: dict) -> TrainerConfig:
    named = {name: {**values} for name, values in sections.items()}
    for section, key in (("kl", "reference"), ("distill", "teacher")):
        if section in named:
            named[section].setdefault(key, str(folder))
    return CONFIG.model_copy(
        update={
            **vars(TrainerConfig(**named)),
            **{key: getattr(CONFIG, key) for key in ("optimizer", "seq_len")},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("other"), seed=1)


def begin(group: RankGroup, folder: Path) -> TrainerState:
    state = TrainerState(CONFIG, group, {POLICY: make_policy(folder, CONFIG, group)}, TrainerProgress())
    state.begin(folder)
    state.check_model()
    return state


def make_work(made: list[Sample], temperature: float = 1.0, **how: Any) -> RankBatch:
    return make_rank_batch(Batch(made, sampling=Sampling(temperature)), CONFIG, rank=0, world_size=1, **how)


def inputs_of(logprobs: torch.Tensor, reference: torch.Tensor, sampled: torch.Tensor) -> LossInputs:
    """One sample of a prompt of one token, and an answer of as many tokens as there are logprobs."""
    n = len(logprobs)
    sample = Sample.of_answer(
        [1],
        list(range(2, 2 + n)),
        logprobs=sampled.tolist(),
        advantages=0.0,
        reference_logprobs=reference.tolist(),
    )
    (micro,) = make_micro_batches([sample], row_length=n + 1, rows_each=1, rank=0, world_size=1)
    return LossInputs.of(logprobs[None], micro)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", FORMULAS)
def test_penalties_and_their_gradients_are_those_of_the_formulas(estimator: str, unbiased: bool):
    draw = torch.Generator().manual_seed(0)
    now, reference, sampled = (-3 * torch.rand(9, generator=draw) for _ in range(3))
    now.requires_grad_()
    means: dict[str, torch.Tensor] = {}
    found = KLPenalty(0.3, estimator, unbiased)(inputs_of(now, reference, sampled), means).sum()
    found.backward()

    wanted_of = now.detach().double().requires_grad_()
    apart = wanted_of - reference.double()
    estimates = FORMULAS[estimator](apart)
    ratio = (wanted_of - sampled.double()).exp() if unbiased else 1.0
    wanted = (0.3 * estimates * ratio).sum()
    wanted.backward()
    torch.testing.assert_close(found, wanted.float())
    torch.testing.assert_close(now.grad, wanted_of.grad.float())
    torch.testing.assert_close(means["kl/reference"], estimates.detach().sum().float())


@pytest.mark.parametrize(
    ("estimator", "unbiased", "gradient_of"),
    [("k2", False, "reverse"), ("k3", False, "forward"), ("k1", True, "reverse"), ("k3", True, "reverse"),
     ("k1", False, "nothing")],
)  # fmt: skip
def test_gradients_over_all_tokens_are_those_of_the_divergence(
    estimator: str, unbiased: bool, gradient_of: str
):
    """In expectation over a small vocabulary, computed exactly; with `unbiased`, for stale samples, too."""
    draw = torch.Generator().manual_seed(1)
    logits, of_reference, of_sampler = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    policy, reference = logits.log_softmax(0), of_reference.log_softmax(0)
    sampler = of_sampler.log_softmax(0) if unbiased else policy.detach()
    estimates = ESTIMATORS[estimator](policy - reference)
    ratio = (policy - sampler).exp() if unbiased else 1.0
    found = torch.autograd.grad((sampler.exp() * estimates * ratio).sum(), logits)[0]

    policy = logits.log_softmax(0)
    divergence = {
        "reverse": (policy.exp() * (policy - reference)).sum(),
        "forward": (reference.exp() * (reference - policy)).sum(),
        "nothing": 0.0 * policy.sum(),
    }[gradient_of]
    torch.testing.assert_close(found, torch.autograd.grad(divergence, logits)[0])


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_divergence_from_the_start_is_0_in_the_first_step_and_then_grows(
    group: RankGroup, folder: Path, estimator: str
):
    config = configured(folder, kl={"coef": 0.1, "estimator": estimator})
    state = begin(group, folder)
    teachers = TeacherModels(config, group, state.scorer, {})
    loss = make_loss(config.loss, config.kl_in_loss)
    found = []
    for step in (1, 2):
        work = make_work(samples(), temperature=0.7)
        assert not teachers.score(work), "the loss reports it"
        found.append(train_step(state, work, step, loss)["kl/reference"])
    assert found[0] == 0
    assert found[1] > 1e-5


def test_a_penalty_in_the_loss_is_added_to_it(group: RankGroup, folder: Path, other: Path):
    """The same step with and without; another micro-batching changes nothing of it."""
    rows = {}
    for coef in (0.0, 0.5):
        config = configured(other, kl={"coef": coef})
        state = begin(group, folder)
        work = make_work(samples())
        TeacherModels(config, group, state.scorer, {}).score(work)
        rows[coef] = train_step(state, work, 1, make_loss(config.loss, config.kl_in_loss))
    assert rows[0.0]["kl/reference"] == rows[0.5]["kl/reference"] > 0.1
    apart = rows[0.5]["loss"] - rows[0.0]["loss"]
    assert apart == pytest.approx(0.5 * rows[0.5]["kl/reference"], rel=1e-4)


def test_a_penalty_of_0_only_measures(group: RankGroup, folder: Path, other: Path):
    def weights_after(coef: float | None) -> dict[str, torch.Tensor]:
        config = CONFIG if coef is None else configured(other, kl={"coef": coef})
        state = begin(group, folder)
        work = make_work(samples())
        TeacherModels(config, group, state.scorer, {}).score(work)
        train_step(state, work, 1, make_loss(config.loss, config.kl_in_loss))
        return {name: weight.clone() for name, weight in state.policy.saved().items()}

    plain, measured, penalised = weights_after(None), weights_after(0.0), weights_after(0.5)
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    assert not all(torch.equal(plain[name], penalised[name]) for name in plain)


@pytest.mark.parametrize("updates", [1, 2])
def test_rewards_of_tokens_are_added_to_their_advantages(
    group: RankGroup, folder: Path, other: Path, updates: int
):
    config = configured(other, kl={"coef": 0.5, "estimator": "k1", "place": "reward"}, distill={"coef": 2.0})
    state = begin(group, folder)
    work = make_work(samples(), updates=updates, mini_batches=updates)
    teachers = TeacherModels(config, group, state.scorer, {})
    assert len(teachers._copies) == 1, "one copy serves both"
    metrics = teachers.score(work)
    with torch.no_grad():
        apart = [
            state.scorer.logprobs(micro, 1.0) - teachers._copies[str(other)].scorer.logprobs(micro, 1.0)
            for micro in work.micros
        ]
    for micro, log_ratio in zip(work.micros, apart, strict=True):
        wanted = -2.5 * log_ratio  # 0.5 for the reference, and 2 for the teacher, which are the same here
        torch.testing.assert_close(micro.columns[TOKEN_REWARDS][:, 1:], wanted)
        learned = micro.loss_mask
        torch.testing.assert_close(
            micro.columns["advantages"][learned], 0.5 + micro.columns[TOKEN_REWARDS][learned]
        )
        assert not micro.columns[TOKEN_REWARDS][~learned].any()
    mean = sum(part.double().sum().item() for part in apart) / work.counts.learned
    assert metrics["kl/reference"] == pytest.approx(mean, rel=1e-5)
    assert metrics["kl/teacher"] == pytest.approx(mean, rel=1e-5)
    assert metrics["teacher/logprob_gap"] >= abs(mean)


@draws.seldom
def test_distillation_alone_reaches_the_teacher(group: RankGroup, folder: Path, other: Path):
    """Without rewards, from tokens that the policy itself samples."""
    config = configured(other, distill={})
    state = begin(group, folder)
    teachers = TeacherModels(config, group, state.scorer, {})
    loss = make_loss(config.loss)
    teacher = of_next_token(teachers._copies[str(other)].scorer.model)
    draw = np.random.default_rng(0)
    divergences = []
    for step in range(1, 41):
        policy = of_next_token(state.policy.module)
        divergences.append((policy.exp() * (policy - teacher)).sum().item())
        probabilities = policy.exp().numpy() / policy.exp().sum().item()
        tokens = draw.choice(len(probabilities), size=64, p=probabilities)
        work = make_work([
            Sample.of_answer(PROMPT, [token], logprobs=policy[token].item(), advantages=0.0)
            for token in tokens.tolist()
        ])  # fmt: skip
        teachers.score(work)
        train_step(state, work, step, loss)
    assert divergences[-1] < 0.1 * divergences[0]


PROMPT = [5, 6]


@torch.no_grad()
def of_next_token(model: torch.nn.Module) -> torch.Tensor:
    """Logprobs of all tokens after the prompt, float64."""
    return model(input_ids=torch.tensor([PROMPT])).logits[0, -1].double().log_softmax(-1)


def test_columns_that_the_orchestrator_did_not_ship_are_asked_for_by_name(group: RankGroup, folder: Path):
    config = configured(folder, distill={"teacher": "http://127.0.0.1:9"})
    state = begin(group, folder)
    teachers = TeacherModels(config, group, state.scorer, {})
    with pytest.raises(UsageError, match=r"distill\.teacher = http://127\.0\.0\.1:9.*teacher_logprobs"):
        teachers.score(make_work(samples()))
    work = make_work(samples(teacher_logprobs=-0.25))
    teachers.score(work)
    for micro in work.micros:
        rewards = micro.columns[TOKEN_REWARDS] + micro.columns["old_logprobs"]
        assert rewards[micro.loss_mask] == pytest.approx(-0.25, abs=1e-6)


def test_a_frozen_copy_has_no_gradients_and_changes_no_random_state(
    group: RankGroup, folder: Path, other: Path
):
    state = begin(group, folder)
    before = torch.get_rng_state()
    frozen = Frozen(other, CONFIG.model_copy(update={"freeze": ["*"]}), group, whose="x", policy=state.scorer)
    assert torch.equal(before, torch.get_rng_state())
    assert not any(parameter.requires_grad for parameter in frozen.scorer.model.parameters())
    work = make_work(samples())
    frozen.add_logprobs(work, TEACHER_LOGPROBS)
    assert not any(micro.columns[TEACHER_LOGPROBS].requires_grad for micro in work.micros)


def test_frozen_copies_hold_weights_as_they_compute(group: RankGroup, folder: Path):
    """Logprobs are those of a policy with master weights in float32, to the bit."""
    config = CONFIG.model_copy(
        update={"precision": CONFIG.precision.model_copy(update={"compute": "bfloat16"})}
    )
    state = TrainerState(config, group, {POLICY: make_policy(folder, config, group)}, TrainerProgress())
    state.begin(folder)
    state.check_model()
    frozen = Frozen(folder, config, group, whose="x", policy=state.scorer)
    assert {parameter.dtype for parameter in frozen.scorer.model.parameters()} == {torch.bfloat16}
    work = make_work(samples())
    frozen.add_logprobs(work, REFERENCE_LOGPROBS)
    for micro in work.micros:
        with torch.no_grad():
            own = state.scorer.logprobs(micro, 1.0)
        assert torch.equal(micro.columns[REFERENCE_LOGPROBS][:, 1:], own)


@torch.no_grad()
def written(folder: Path, seed: int, rows: int) -> Path:
    """The example's model, whose embeddings have so many rows; those behind the tokenizer's are padding."""
    config = AutoConfig.from_pretrained(EXAMPLE, vocab_size=rows, initializer_range=0.1)
    return write(random_model(config, seed), folder)


@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 26])
def test_a_teacher_may_have_other_padding_rows(group: RankGroup, tmp_path: Path, rows: int):
    """Its logprobs are normalised over all rows that it has, and tokens without a row are refused."""
    policy = begin(group, written(tmp_path / "policy", 0, VOCABULARY + 10))
    frozen = Frozen(written(tmp_path / "x", 1, rows), CONFIG, group, whose="x", policy=policy.scorer)
    work = make_work(samples(), temperature=0.7)
    frozen.add_logprobs(work, TEACHER_LOGPROBS)
    seen = 0
    for micro in work.micros:
        ids = micro.input_ids
        positions = micro.position_ids
        logits = frozen.scorer.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        assert logits.shape[-1] == rows
        wanted = (logits[:, :-1].double() / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].float()
        found = micro.columns[TEACHER_LOGPROBS][:, 1:]
        learned = micro.loss_mask[:, 1:]
        torch.testing.assert_close(found[learned], wanted[learned])
        seen += int(learned.sum())
    assert seen == work.counts.learned
    padding = make_work([Sample.of_answer([5, 6], [7, VOCABULARY + 3], logprobs=-1.0, advantages=0.0)])
    if rows == VOCABULARY:
        with pytest.raises(UsageError, match=rf"x = .*/x: its embeddings have {rows} rows.*token {rows + 3}"):
            frozen.add_logprobs(padding, TEACHER_LOGPROBS)
    else:
        frozen.add_logprobs(padding, TEACHER_LOGPROBS)


def test_a_teacher_that_needs_other_rows_than_the_policy(group: RankGroup, folder: Path, tmp_path: Path):
    """One that carries state from token to token, for a policy whose samples share rows."""
    policy = begin(group, folder)
    frozen = Frozen(make("mamba2", tmp_path), CONFIG, group, whose="x", policy=policy.scorer)
    assert (policy.scorer.rows, frozen.scorer.rows) == (BY_POSITIONS, ALONE)
    work = make_work(samples())
    assert any(micro.samples > len(micro.input_ids) for micro in work.micros), "samples share rows"
    frozen.add_logprobs(work, TEACHER_LOGPROBS)
    alone = make_work(samples(), arrange=one_a_row)
    frozen.add_logprobs(alone, TEACHER_LOGPROBS)
    found, wanted = (by_answer(one.micros) for one in (work, alone))
    assert found.keys() == wanted.keys()
    for answer, values in wanted.items():
        torch.testing.assert_close(found[answer], values)
    assert len({tuple(one.tolist()) for one in wanted.values()}) == len(wanted), "they differ"


def by_answer(micros: list[MicroBatch]) -> dict[int, torch.Tensor]:
    """The teacher's logprobs of each of `samples`, by the number of its learned tokens."""
    found = {}
    for micro in micros:
        column = micro.columns[TEACHER_LOGPROBS].flatten()
        assert not column[~micro.loss_mask.flatten()].any()
        for start, end in itertools.pairwise(micro.bounds.tolist()):
            learned = micro.loss_mask.flatten()[start:end]
            if learned.any():
                found[int(learned.sum())] = column[start:end][learned]
    return found


def test_weights_that_changed_are_refused_by_name(group: RankGroup, tmp_path: Path):
    folder = write_example(tmp_path)
    sums = sums_of(weight_files(folder))
    state = begin(group, folder)
    Frozen(folder, CONFIG, group, whose="kl.reference", policy=state.scorer, sums=sums)
    write_example(folder, seed=1)
    with pytest.raises(UsageError, match=r"kl\.reference = .*: model\.safetensors is not what it was"):
        Frozen(folder, CONFIG, group, whose="kl.reference", policy=state.scorer, sums=sums)


def test_a_run_that_goes_on_has_the_reference_of_before_to_the_bit(
    group: RankGroup, folder: Path, other: Path, tmp_path: Path
):
    """The policy's state is handed on, and the reference is read again from where it was."""
    config = configured(other, kl={"coef": 0.5}, distill={"teacher": str(folder), "coef": 0.3})
    loss = make_loss(config.loss, config.kl_in_loss)

    def step(state: TrainerState, teachers: TeacherModels, number: int) -> dict[str, float]:
        work = make_work(samples())
        metrics = dict(teachers.score(work))
        return metrics | train_step(state, work, number, loss)

    whole = begin(group, folder)
    teachers = TeacherModels(config, group, whole.scorer, {})
    step(whole, teachers, 1)
    write_tensors(tmp_path, whole.policy.saved(), "model")
    moments = {
        name: {key: value.clone() for key, value in whole.policy.optimizer.state[parameter].items()}
        for name, parameter in whole.policy.trained().items()
    }
    expected = step(whole, teachers, 2)

    again = begin(group, folder)
    read_tensors(tmp_path, again.policy.saved(), "model")
    for name, parameter in again.policy.trained().items():
        again.policy.optimizer.state[parameter].update(moments[name])
    again.progress.step = 1
    assert step(again, TeacherModels(config, group, again.scorer, {}), 2) == expected
    after, wanted = again.policy.saved(), whole.policy.saved()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
