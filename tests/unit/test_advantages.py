"""Built-in advantages against float64 references of a few lines, within a group and over a batch."""

import statistics
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from test_mixed_environments import Even, run_through
from test_pipeline import configuration, in_folder

from cairn.config.environment import COMPARING, AdvantageConfig, EnvironmentConfig, MixedEnvironmentConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import (
    BUILT_IN,
    AdvantageFailed,
    batch_samples,
    make_advantage,
    teaches,
    to_samples,
)
from cairn.orchestrator.metrics import advantage_metrics
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.extensions import BadExtension

__all__ = ["Even", "configuration"]  # an environment, and a fixture
REWARDS = ([1.0, 0.0, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25], [3.0, 1.0, 0.0, 0.0])
LENGTHS = ((3, 1, 4, 1), (5, 9, 2, 6), (5, 3, 5, 8))
PARTS = ([0.0, 5.0, 5.0, 10.0], [1.0, 2.0, 1.0, 1.0], [7.0, 7.0, 7.0, 7.0])


def groups() -> list[AnswerGroup]:
    made = []
    for place, (rewards, lengths, parts) in enumerate(zip(REWARDS, LENGTHS, PARTS, strict=True)):
        rollouts = [
            Rollout(
                i, [7] * n, [-0.5] * n, reward=reward, parts={"right": reward, "short": part, "tools": 3.0}
            )
            for i, (reward, n, part) in enumerate(zip(rewards, lengths, parts, strict=True))
        ]
        made.append(AnswerGroup(place, place, 0, prompt_ids=[5, 6], rollouts=rollouts))
    return made


def learned(advantage: Any, these: list[AnswerGroup]) -> list[list[float]]:
    """The advantage of each answer, by group, as it is in samples; the same for all of its tokens."""
    found = []
    for samples in batch_samples(these, advantage):
        of_answers = [sample.columns["advantages"][sample.loss_mask] for sample in samples]
        assert all((one == one[0]).all() for one in of_answers)
        found.append([float(one[0]) for one in of_answers])
    return found


def made(kind: str, **args: Any) -> Any:
    return make_advantage(AdvantageConfig(type=kind, args=args))


def centred(rewards: list[float]) -> np.ndarray:
    return np.array(rewards) - np.mean(rewards)


def over_tokens(values: np.ndarray) -> list[list[float]]:
    """Normalised by mean and deviation of the batch's tokens: an answer counts as often as it has tokens."""
    tokens = np.repeat(values.ravel(), np.array(LENGTHS).ravel())
    return ((values - tokens.mean()) / tokens.std()).tolist()


def over_answers(values: np.ndarray) -> list[list[float]]:
    return ((values - values.mean()) / values.std(ddof=1)).tolist()


def decoupled() -> np.ndarray:
    """Of GDPO before the batch: the parts normalised one by one, `short` counting twice."""
    total = np.zeros((3, 4))
    for rewards, weight in ((REWARDS, 1.0), (PARTS, 2.0)):
        for g, one in enumerate(rewards):
            if len(set(one)) > 1:
                total[g] += weight * centred(one) / np.std(one, ddof=1)
    return total


WANTED = {
    "grpo": [
        (centred(one) / np.std(one, ddof=1)).tolist() if len(set(one)) > 1 else [0.0] * 4 for one in REWARDS
    ],
    "dr_grpo": [centred(one).tolist() for one in REWARDS],
    "rloo": [[r - statistics.fmean([*one[:i], *one[i + 1 :]]) for i, r in enumerate(one)] for one in REWARDS],
    "maxrl": [(centred(one) / np.mean(one)).tolist() for one in REWARDS],
    "reinforce_plus_plus": over_tokens(np.array(REWARDS)),
    "reinforce_plus_plus_baseline": over_tokens(np.array([centred(one) for one in REWARDS])),
    "gdpo": over_answers(decoupled()),
}
ARGS: dict[str, dict[str, Any]] = {"gdpo": {"weights": {"right": 1, "short": 2.0}}}


@pytest.mark.parametrize("kind", WANTED)
def test_each_advantage_is_its_formula(kind: str):
    found = learned(made(kind, **ARGS.get(kind, {})), groups())
    np.testing.assert_allclose(found, WANTED[kind], rtol=1e-6, atol=1e-7)


TRL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": ("grpo", "GRPOTrainer", {"scale_rewards": "group"}),
    "dr_grpo": ("grpo", "GRPOTrainer", {"scale_rewards": "none"}),
    "gdpo": ("grpo", "GRPOTrainer", {"multi_objective_aggregation": "normalize_then_sum"}),
    "rloo": ("rloo", "RLOOTrainer", {}),
}
"""The advantages that TRL has: module and trainer, and its settings."""


@pytest.mark.parametrize("kind", TRL)
def test_advantages_are_those_of_trl(kind: str):
    """Of the trainer's own function, for answers that are already sampled and rewarded."""
    module, trainer, settings = TRL[kind]
    theirs = getattr(pytest.importorskip(f"trl.trainer.{module}_trainer"), trainer)
    named = [REWARDS, PARTS] if kind == "gdpo" else [REWARDS]
    count = sum(map(len, REWARDS))
    rewards = torch.tensor(named).reshape(len(named), count).T.contiguous()  # as TRL has them, float32
    answers = [[7] * n for lengths in LENGTHS for n in lengths]
    prompts = [[5, 6]] * count
    nothing = [None] * count
    generated = {
        "grpo": (prompts, answers, None, answers, None, {}, None, nothing),
        "rloo": (prompts, answers, answers),
    }[module]
    themselves = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", process_index=0, gather=lambda one: one),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=count,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        _generate=lambda *_: generated,
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.zeros(count, 9), None, None),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        environment_factories=None,
        environments=None,
        tools=None,
        num_iterations=1,
        use_vllm=False,
        beta=0.0,
        num_generations=len(REWARDS[0]),
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        normalize_advantages=False,
        reward_clip_range=None,
        reward_funcs=named,
        reward_func_names=[str(number) for number in range(len(named))],
        reward_weights=torch.tensor([1.0, 2.0][: len(named)]),
        log_multimodal=False,
        _pending_extra_logs={},
        _pending_metrics={},
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list) | {"rewards": defaultdict(list)},
    )
    for name, value in settings.items():
        setattr(themselves, name, value)
    inputs = [{"prompt": "x"} for _ in range(count)]
    found = theirs._generate_and_score_completions(themselves, inputs)["advantages"].view(len(REWARDS), -1)
    ours = learned(made(kind, **ARGS.get(kind, {})), groups())
    # TRL adds 0.0001 to a deviation, which is 0.5 or more here.
    off = 5e-4 if kind in ("grpo", "gdpo") else 1e-6
    np.testing.assert_allclose(ours, found.numpy(), rtol=off, atol=off / 5)


def test_every_built_in_advantage_is_known_to_the_configuration():
    assert set(WANTED) | {"gae", "none"} == BUILT_IN.keys()
    assert BUILT_IN.keys() - {"reinforce_plus_plus", "gae", "none"} == COMPARING


@pytest.mark.parametrize("kind", WANTED)
def test_a_batch_is_the_same_when_it_is_built_again(kind: str):
    """Bit by bit, and one without spread teaches nothing."""
    one, again = (batch_samples(groups(), made(kind, **ARGS.get(kind, {}))) for _ in range(2))
    for samples, others in zip(one, again, strict=True):
        for sample, other in zip(samples, others, strict=True):
            assert sample.columns["advantages"].tobytes() == other.columns["advantages"].tobytes()
    equal = [group for group in groups() if group.place == 1]
    equal[0].rollouts = [Rollout(0, [1], [-0.5], reward=0.3, parts={"right": 0.3, "short": 0.3})] * 3
    assert learned(made(kind, **ARGS.get(kind, {})), equal) == [[0.0] * 3]


def test_leave_one_out_of_one_is_nothing():
    """As when all other answers of a group have failed."""
    alone = AnswerGroup(0, 0, 0, [5], [Rollout(0, [7], [-0.5], reward=1.0)])
    (sample,) = to_samples(alone, made("rloo"))
    assert sample.columns["advantages"].tolist() == [0, 0]


def test_what_teaches():
    """Answers that differ in a part of the reward do, where parts are compared."""
    first, second, third = groups()
    assert [teaches(made("grpo"), one) for one in (first, second, third)] == [True, False, True]
    assert teaches(made("reinforce_plus_plus"), second)
    assert teaches(made("gdpo", weights={"short": 1}), second)
    assert not teaches(made("gdpo", weights={"short": 1}), third)


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("gdpo", {}, "weights must name the parts"),
        ("gdpo", {"weights": {"right": "much"}}, "weights.right = 'much' is not a finite number"),
        ("dr_grpo", {"normalize": True}, "normalize"),
        ("rloo", {"baseline": 1}, "baseline"),
    ],
)
def test_arguments_that_are_refused(kind: str, args: dict[str, Any], message: str):
    with pytest.raises(BadExtension, match=message):
        made(kind, **args)


def test_rewards_that_an_advantage_can_not_use():
    these = groups()
    these[0].rollouts[0].reward = -1.0
    with pytest.raises(AdvantageFailed, match=r"problem 0, raised ValueError: maxrl divides by the mean"):
        batch_samples(these, made("maxrl"))
    with pytest.raises(AdvantageFailed, match="gdpo needs the reward 'fast'; the answers have right"):
        batch_samples(these, made("gdpo", weights={"fast": 1}))
    with pytest.raises(AdvantageFailed, match="teaches of the advantage Gdpo, for problem 0, raised"):
        teaches(made("gdpo", weights={"fast": 1}), these[0])


def test_a_reward_that_does_not_apply_to_an_answer_is_normalised_over_the_others():
    """As TRL and ms-swift do: the others get 0 for it, and nothing ends the run."""
    (one, *_) = groups()
    for rollout, right in zip(one.rollouts, [1.0, 0.0, None, None], strict=False):
        rollout.parts = {"short": 0.5} | ({} if right is None else {"right": right})
    advantage = made("gdpo", weights={"right": 1.0, "short": 1.0})
    there = [rollout.parts.get("right") for rollout in one.rollouts]
    values = advantage(one)
    assert [value == 0.0 for value in values] == [right is None for right in there]
    assert sum(values) == pytest.approx(0.0)
    assert teaches(advantage, one)
    for rollout in one.rollouts[1:]:
        rollout.parts.pop("right", None)
    assert advantage(one) == [0.0] * len(one.rollouts)
    assert not teaches(advantage, one)


class Whole:
    """An advantage of a user's own that returns what it is made with for the whole batch."""

    def __init__(self, values: Any):
        self.values = values

    def __call__(self, group: AnswerGroup) -> list[float]:
        return group.rewards

    def over_batch(self, groups: Any, values: Any) -> Any:
        assert len(groups) == len(values) == 3
        if isinstance(self.values, Exception):
            raise self.values
        return self.values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (KeyError("x"), "over_batch of the advantage Whole raised KeyError"),
        ([], "returned values of 0 groups, and was called with 3"),
        ([[0.0] * 4, [0.0] * 4, [0.0] * 3], "for problem 2, returned 3 values for 4 answers"),
        ([[0.0] * 4, [0.0, 0.0, 0.0, float("nan")], [0.0] * 4], "for problem 1, returned nan for answer 3"),
    ],
)
def test_what_over_batch_must_return(values: Any, message: str):
    with pytest.raises(AdvantageFailed, match=message):
        batch_samples(groups(), Whole(values))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"samples_per_prompt": 1},
            "samples_per_prompt = 1, and advantage.type = 'grpo' compares the answers",
        ),
        (
            {"samples_per_prompt": 1, "advantage": {"type": "rloo"}},
            "of which environment 'reverse_text' would have one: give 2 or more",
        ),
        (
            {"advantage": {"type": "maxrl"}, "overlong": {"type": "shape"}},
            "overlong.type = 'shape' and advantage.type = 'maxrl'",
        ),
        (
            {"advantage": {"type": "gdpo"}, "overlong": {"type": "shape"}},
            "it compares the named parts of rewards",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as raised:
        OrchestratorConfig(**settings)
    assert message in str(raised.value)
    assert OrchestratorConfig(samples_per_prompt=1, advantage={"type": "reinforce_plus_plus"})


def test_how_far_advantages_are_spread():
    """Over learned tokens."""
    samples = [sample for found in batch_samples(groups()[:1], made("dr_grpo")) for sample in found]
    samples[-1] = samples[-1].unlearned()
    tokens = np.repeat(centred(REWARDS[0])[:3], LENGTHS[0][:3])
    assert advantage_metrics(samples) == pytest.approx(
        {
            "advantage/mean": tokens.mean(),
            "advantage/std": tokens.std(),
            "advantage/min": tokens.min(),
            "advantage/max": tokens.max(),
        },
        abs=1e-7,
    )
    assert advantage_metrics([one.unlearned() for one in samples]) == {}


def test_a_run_with_one_answer_to_each_prompt(configuration: OrchestratorConfig, tmp_path: Path):
    """Its batches are normalised as a whole, each environment's part by itself; metrics say so."""
    own = {"name": f"{__name__}:Even", "samples_per_prompt": 1, "advantage": {"type": "reinforce_plus_plus"}}
    mixed = [MixedEnvironmentConfig(**own, label="a"), MixedEnvironmentConfig(**own, label="b")]
    update = {"environments": mixed, "environment": EnvironmentConfig(), "prompts_per_step": 8}
    config = in_folder(configuration, tmp_path, 4, 0).model_copy(update=update)
    for batch in run_through(config, tmp_path / "run", 2):
        assert len(batch.samples) == 8
        for label in "ab":
            assert batch.metrics[f"env/{label}/advantage/mean"] == pytest.approx(0, abs=1e-6)
            assert batch.metrics[f"env/{label}/advantage/std"] in (pytest.approx(1, abs=1e-5), 0.0)
        assert 0 < batch.metrics["advantage/std"] <= 1 + 1e-5
        assert batch.metrics["rollout/length_min"] <= batch.metrics["rollout/length_max"]
