"""Rewards that the trainer makes advantages of: how they get into batches."""

from array import array
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from test_mixed_environments import Even, run_through
from test_pipeline import configuration, in_folder

from cairn.config.environment import AdvantageConfig, EnvironmentConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.advantages import make_advantage, to_samples
from cairn.orchestrator.rollouts import AnswerGroup, Rollout, Turn
from cairn.run.batches import Sample

__all__ = ["Even", "configuration"]  # an environment, and a fixture
GAE = AdvantageConfig(type="gae")


def rewards_of(*rollouts: Rollout) -> list[list[float]]:
    group = AnswerGroup(0, 0, 0, prompt_ids=[5, 6], rollouts=list(rollouts))
    samples = to_samples(group, make_advantage(GAE))
    assert all(sample.columns.keys() == {"logprobs", "rewards"} for sample in samples)
    return [sample.columns["rewards"].tolist() for sample in samples]


def test_an_answers_last_token_gets_its_reward():
    some = Rollout(0, [7, 8, 9], [-0.5] * 3, reward=0.75)
    none = Rollout(1, [], [], reward=1.0)
    assert rewards_of(some, none) == [[0, 0, 0, 0, 0.75], [0, 0]]


def test_each_branch_of_a_program_ends_with_its_reward():
    """The second branch is sampled between two turns of the first; the last turn of each may be empty."""

    def turn(number: int, branch: int, tokens: int) -> Turn:
        ids, logprobs = array("i", range(tokens)), array("f", [-0.5] * tokens)
        return Turn(number, "", branch, 0, array("i", [1, 2]), ids, logprobs)

    rollout = Rollout(0, reward=0.5)
    rollout.take([turn(0, 0, 2), turn(1, 1, 3), turn(2, 0, 1), turn(3, 1, 0)])
    assert rewards_of(rollout) == [[0] * 6 + [0.5], [0] * 4 + [0.5]]


def test_a_sample_that_is_cut_keeps_its_rewards():
    """At the last learned token that stays; advantages and logprobs are cut as they are."""
    columns = {"rewards": np.array([0, 1, 0, 0, 2], np.float32), "logprobs": np.arange(5, dtype=np.float32)}
    sample = Sample(np.arange(5, dtype=np.int32), np.array([0, 1, 0, 1, 1], bool), columns)
    cut = sample.cut(3)
    assert cut.columns["rewards"].tolist() == [0, 3, 0]
    assert cut.columns["logprobs"].tolist() == [0, 1, 2]
    assert sample.columns["rewards"].tolist() == [0, 1, 0, 0, 2], "the whole sample is left as it is"
    assert sample.cut(1).columns["rewards"].tolist() == [0], "nothing is learned of what stays"


def test_equal_rewards_teach_a_critic(configuration: OrchestratorConfig, tmp_path: Path):
    """`redraw` replaces no prompt because of them."""
    update = {"redraw": 8, "advantage": GAE, "environment": EnvironmentConfig(name=f"{__name__}:Even")}
    config = in_folder(configuration, tmp_path, 4, 0).model_copy(update=update)
    batches = run_through(config, tmp_path / "run", 2)
    assert all(batch.metrics["groups/redrawn"] == 0 for batch in batches)
    assert all("rewards" in sample.columns for batch in batches for sample in batch.samples)
    assert all(batch.metrics["groups/zero_spread"] > 0 for batch in batches), "else this shows nothing"


def test_all_environments_have_a_critic_or_none_does():
    mixed = [{"label": "a", "advantage": {"type": "gae"}}, {"label": "b"}]
    with pytest.raises(ValidationError, match="'gae' of some environments, and grpo of others"):
        OrchestratorConfig(environments=mixed)
    assert OrchestratorConfig(environments=mixed, advantage=GAE).advantage_types == {"gae"}
