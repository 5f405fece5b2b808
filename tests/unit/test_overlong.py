"""Answers that are too long: learned from like others, masked, or with a shaped reward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from test_mixed_environments import run_through
from test_pipeline import configuration, in_folder

from cairn.config.environment import EnvironmentConfig, OverlongConfig
from cairn.config.orchestrator import OrchestratorConfig, SamplingConfig
from cairn.orchestrator.advantages import Grpo
from cairn.orchestrator.environments import ReverseText
from cairn.orchestrator.ledger import read_ledger
from cairn.orchestrator.prompts.sources import make_overlong
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.orchestrator.rollouts import AnswerGroup, Rollout

__all__ = ["configuration"]  # a fixture


def rollout(tokens: int, reward: float, end: str = "stop") -> Rollout:
    return Rollout(0, [1] * tokens, [-0.5] * tokens, [], end, "", reward)


@pytest.mark.parametrize(
    ("tokens", "end", "lost"),
    [
        (1, "stop", 0),
        (60, "stop", 0),
        (70, "stop", 0.5),
        (79, "stop", 0.95),
        (80, "stop", 1),
        (75, "length", 1),
    ],
)
def test_the_reward_falls_over_the_buffer(tokens: int, end: str, lost: float):
    """DAPO's equation 13; an answer that the servers' context cuts off loses all of the penalty."""
    config = OrchestratorConfig(
        sampling=SamplingConfig(max_tokens=80), overlong={"type": "shape", "buffer": 20, "penalty": 3.0}
    )
    group = AnswerGroup(0, 0, 0, [1], [rollout(tokens, 2.0, end), rollout(1, 2.0)])
    shaped = make_overlong(config).compared(group)
    assert shaped.rewards == pytest.approx([2.0 - 3.0 * lost, 2.0])
    assert group.rewards == [2.0, 2.0], "the environment's rewards stay"


def test_a_buffer_longer_than_answers_is_refused():
    shape = {"type": "shape", "buffer": 81}
    with pytest.raises(ValidationError, match=r"overlong.buffer = 81 is more than sampling.max_tokens = 80"):
        OrchestratorConfig(sampling={"max_tokens": 80}, overlong=shape)
    one = {"sampling": {"max_tokens": 80}, "label": "short"}
    with pytest.raises(ValidationError, match="environment 'short'"):
        OrchestratorConfig(environments=[one], overlong=shape)


def short(configuration: OrchestratorConfig, folder: Path, **overlong: Any) -> OrchestratorConfig:
    """A run in which a part of the answers is cut off."""
    sampling = SamplingConfig(max_tokens=6, chunk_tokens=4)
    update = {"sampling": sampling, "overlong": OverlongConfig(**overlong), "samples_per_prompt": 3}
    return in_folder(configuration, folder, 5, 0).model_copy(update=update)


def test_masked_answers_are_not_learned_and_count_for_the_others(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """Their rewards stay in the comparison."""
    plain, masked = (
        run_through(short(configuration, tmp_path, type=kind), tmp_path / kind, 1)
        for kind in ("learn", "mask")
    )
    count = 0
    for one, other in zip(plain, masked, strict=True):
        assert [s.token_ids.tolist() for s in one.samples] == [s.token_ids.tolist() for s in other.samples]
        for a, b in zip(one.samples, other.samples, strict=True):
            np.testing.assert_array_equal(a.columns["advantages"], b.columns["advantages"])
        rows = KeptRollouts(tmp_path / "mask" / "rollouts").read(other.header.step)
        cut = [row for row in rows if row["finish_reason"] == "length"]
        assert other.metrics["rollouts/masked"] == len(cut)
        assert "rollouts/masked" not in one.metrics
        learned = [bool(sample.loss_mask.any()) for sample in other.samples]
        assert learned == [row["finish_reason"] != "length" for row in rows]
        count += len(cut)
    assert 0 < count < sum(len(batch.samples) for batch in masked)


def test_shaped_rewards_are_what_is_compared(configuration: OrchestratorConfig, tmp_path: Path):
    """The rewards in rollouts and metrics are the environment's."""
    config = short(configuration, tmp_path, type="shape", buffer=3, penalty=2.0)
    overlong = make_overlong(config)
    raw_flat = shaped_flat = 0
    for batch in run_through(config, tmp_path / "run", 1):
        rows = KeptRollouts(tmp_path / "run" / "rollouts").read(batch.header.step)
        rewards = [row["reward"] for row in rows]
        assert batch.metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        made = [rollout(row["tokens"], row["reward"], row["finish_reason"]) for row in rows]
        groups = [AnswerGroup(0, 0, 0, [1], made[i : i + 3]) for i in range(0, len(made), 3)]
        shaped = [overlong.compared(group) for group in groups]
        assert batch.metrics["reward/compared/mean"] == pytest.approx(
            sum(sum(group.rewards) for group in shaped) / len(rows)
        )
        flat = sum(len({round(reward, 9) for reward in group.rewards}) == 1 for group in shaped)
        assert batch.metrics["groups/zero_spread"] == flat
        raw_flat += sum(len(set(group.rewards)) == 1 for group in groups)
        shaped_flat += flat
        wanted = [value for group in shaped for value in Grpo()(group)]
        found = [float(sample.columns["advantages"][-1]) for sample in batch.samples]
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert shaped_flat < raw_flat, "else this shows nothing"


class Spread(ReverseText):
    """Hardly any two answers have the same reward."""

    def reward(self, problem: int, answer: str) -> float:
        return float(sum(map(ord, answer)))


def test_a_prompt_whose_answers_are_all_masked_is_replaced(configuration: OrchestratorConfig, tmp_path: Path):
    """Up to the bound, like one whose answers have the same reward."""
    update = {
        "redraw": 100,
        "sampling": SamplingConfig(max_tokens=3, chunk_tokens=4),
        "environment": EnvironmentConfig(name=f"{__name__}:Spread", args={"problems": 10}),
    }
    config = short(configuration, tmp_path, type="mask").model_copy(update=update)
    batches = run_through(config, tmp_path / "run", 1)
    for batch in batches:
        for i in range(0, len(batch.samples), 3):
            assert any(sample.loss_mask.any() for sample in batch.samples[i : i + 3])
    reasons = [row["reason"] for row in read_ledger(tmp_path / "run" / "ledger.sqlite").failed]
    assert "all answers are cut off" in reasons
    assert sum(batch.metrics["groups/redrawn"] for batch in batches) == len(reasons)
