"""Evaluations: on the policy of their step, each answer asked for once, and right numbers."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import draws
import numpy as np
import pytest
from pydantic import ValidationError
from test_pipeline import ATTEMPT, Servers, Trainer, begin, configuration, in_folder, see_through

import cairn
from cairn.checkpoint.eval_metrics import ratings_in, ratings_of
from cairn.config.environment import EvalConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.evaluation import results
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.policy.generation import SamplingParams
from cairn.run.batches import RLBatch
from cairn.run.messages import PolicyName
from cairn.watch.evaluations import answers_of, evaluations_of

__all__ = ["configuration"]
LAST = 7
WORDS = {"environment": {"args": {"problems": 6, "seed": 5}}, "samples": 4, "interval": 3}


@dataclass
class Noting(Servers):
    """Note the policies that sampled answers to more problems than training has, by temperature."""

    sampled: list[tuple[float, int]] = field(default_factory=list)
    """Temperature of a request, and the step of the policy that each of its tokens came from."""
    evaluated: list[int] = field(default_factory=list)
    """Seeds of the evaluations' first pieces."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions: Any,
        began=None,
        sessions=(),
    ):
        answers = await super().generate(prompt_ids, params, affinity=affinity, versions=versions)
        steps = {PolicyName.parse(span.version).step for one in answers for span in one.weight_versions}
        self.sampled += [(params.temperature, step) for step in steps]
        if params.temperature != 1.0:
            self.evaluated += [params.seed + i for i in range(params.n)]
        return answers


def evaluated(config: OrchestratorConfig, folder: Path, behind: int, *tables: dict) -> OrchestratorConfig:
    """With evaluations at a temperature that tells their requests from those of training."""
    evaluations = [EvalConfig(**WORDS | {"sampling": {"temperature": 0.5}} | table) for table in tables]
    return in_folder(config, folder, LAST, behind).model_copy(update={"eval": evaluations})


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", draws.cases(range(8), "evaluations", 3))
def test_each_policy_that_is_due_is_evaluated_once_whoever_dies(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """The orchestrator is killed at random times; no answer is asked for twice."""
    draw = random.Random(seed)
    config = evaluated(configuration, tmp_path / "run", seed % 3, {"name": "words"})
    run = begin(config, ATTEMPT)
    trainer, servers = Trainer(run, ATTEMPT, LAST, draw), Noting(draw)
    deaths = [draw.uniform(0.02, 0.1) for _ in range(seed % 4)]
    asyncio.run(see_through(config, ATTEMPT, trainer, servers, deaths))
    found = rows(run.path)
    assert [row["step"] for row in found] == [0, 3, 6, 7]
    assert ratings_in(run.checkpoints) == ratings_of(found)
    assert ratings_in(run.checkpoints).by_policy["run:branch_1:6"]["eval/words/reward"] == found[2]["reward"]
    assert cairn.Run(run.path).evals["pass@4"].tolist() == [row["pass@4"] for row in found]
    assert {row["name"] for row in found} == {"words"}
    assert all((row["problems"], row["samples"], row["failed"]) == (6, 24, 0) for row in found)
    assert {step for temperature, step in servers.sampled if temperature == 0.5} == {0, 3, 6, 7}
    lost = sum(count - 1 for count in Counter(servers.evaluated).values())
    assert lost <= 12 * len(deaths)  # what was being generated when the orchestrator died
    assert [path.name for path in (run.path / "evals").iterdir()] == ["words"], "no ledger is left"
    for row in found:
        answers = [one["reward"] for one in answers_of(run, "words").read(row["step"])]
        assert (len(answers), fmean(answers)) == (24, pytest.approx(row["reward"]))
    kept = next(one for one in evaluations_of(run, found) if one.name == "words")
    assert kept.steps == [0, 3, 6, 7]
    flips = cairn.Run(run.path).flips("words", 0, 7)
    assert flips.both + flips.neither + len(flips.gained) + len(flips.lost) == 6
    in_batches = [batch for batch in trainer.trained if "eval/words/reward" in batch.metrics]
    assert {batch.metrics["eval/words/step"] for batch in in_batches} <= {0.0, 3.0, 6.0}
    if not deaths:
        assert in_batches[0].metrics["eval/words/reward"] == found[0]["reward"]


def test_evaluations_change_nothing_of_what_is_trained(configuration: OrchestratorConfig, tmp_path: Path):
    """With and without them, the same batches."""

    def trained(folder: Path, *tables: dict) -> list[RLBatch]:
        config = evaluated(configuration, folder, 0, *tables)
        run = begin(config, ATTEMPT)
        draw = random.Random(1)
        trainer = Trainer(run, ATTEMPT, LAST, draw)
        asyncio.run(see_through(config, ATTEMPT, trainer, Noting(draw), []))
        return trainer.trained

    plain = trained(tmp_path / "plain")
    checked = trained(tmp_path / "checked", {"name": "a"}, {"name": "b", "problems": 2, "interval": 1})
    assert [batch.digest() for batch in plain] == [batch.digest() for batch in checked]
    found = rows(tmp_path / "checked")
    assert [row["step"] for row in found if row["name"] == "b"] == list(range(LAST + 1))
    assert {row["problems"] for row in found if row["name"] == "b"} == {2}


class Fails:
    """An environment that can't reward."""

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem: int, answer: str) -> float:
        raise RuntimeError("out of service")


def test_an_environment_that_fails_costs_its_evaluation_and_not_the_run(
    configuration: OrchestratorConfig, tmp_path: Path
):
    fails = {"name": "fails", "environment": {"name": f"{__name__}:Fails"}}
    config = evaluated(configuration, tmp_path / "run", 0, fails, {"name": "words"})
    config = config.model_copy(update={"reward_retries": 1, "reward_retry_seconds": 0.0})
    run = begin(config, ATTEMPT)
    draw = random.Random(2)
    trainer = Trainer(run, ATTEMPT, LAST, draw)
    asyncio.run(see_through(config, ATTEMPT, trainer, Noting(draw), []))
    found = rows(run.path)
    assert len(trainer.trained) == LAST
    assert all("out of service" in str(row.get("error")) for row in found if row["name"] == "fails")
    assert [row["step"] for row in found if row["name"] == "words"] == [0, 3, 6, 7]


# Numbers


def group(rewards: list[float | None]) -> AnswerGroup:
    answers = [
        Rollout(i, [1] * (i + 1), [-1.0] * (i + 1), [], "length" if i == 0 else "stop", "", reward)
        for i, reward in enumerate(rewards)
    ]
    return AnswerGroup(0, 0, 0, [1], answers)


def test_pass_at_k_is_the_share_of_all_draws_with_a_right_answer():
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.0] * 4, [0.2] * 4]
    found = results([group(list(one)) for one in rewards], EvalConfig(name="a", samples=4))
    for k in (1, 2, 4):
        shares = [np.mean([max(draw) >= 1.0 for draw in itertools.combinations(one, k)]) for one in rewards]
        assert np.isclose(found[f"pass@{k}"], np.mean(shares))
        assert np.isclose(found[f"pass@{k}_ci95"], 1.96 * np.std(shares, ddof=1) / 2)
    assert "pass@8" not in found
    assert np.isclose(found["reward"], np.mean(rewards))
    assert (found["problems"], found["samples"], found["failed"]) == (4, 16, 0)
    assert (found["tokens"], found["truncated"]) == (2.5, 0.25)


def test_answers_without_a_reward_count_nowhere():
    found = results([group([1.0, None]), group([None, None])], EvalConfig(name="a", samples=2))
    assert (found["problems"], found["samples"], found["failed"]) == (1, 1, 3)
    assert (found["reward"], found["pass@1"]) == (1.0, 1.0)
    assert "pass@2" not in found
    assert "reward" not in results([group([None])], EvalConfig(name="a"))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"name": "a"}, {"name": "a"}], "two evaluations are called 'a'"),
        ([{"name": "a/b"}], "name"),
        ([{"name": "a", "samples": 2, "sampling": {"temperature": 0}}], "would all be the same"),
    ],
)
def test_wrong_settings(tables: list[dict], message: str):
    with pytest.raises(ValidationError, match=message):
        OrchestratorConfig(eval=tables)
