"""Several environments in one run: configuration, batches, metrics, failures and what a resume compares."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_pipeline import (
    ATTEMPT,
    PROMPTS,
    Servers,
    Trainer,
    assert_audit_clean,
    begin,
    configuration,
    go_on,
    in_folder,
    places,
    see_through,
)

from cairn.checkpoint.store import CheckpointStore
from cairn.config.environment import EnvironmentConfig, MixedEnvironmentConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environment_identity import orchestrator_recipe, same_environment
from cairn.orchestrator.environments import BadEnvironment, EnvironmentFailed, ReverseText, check_environments
from cairn.orchestrator.ledger import read_ledger
from cairn.orchestrator.loop import Orchestrator
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.run.batches import RLBatch
from cairn.run.changes import short_identity

__all__ = ["configuration"]  # a fixture

STEPS = 7


class Moody(ReverseText):
    """Some of its problems, or all, can't be rewarded."""

    def __init__(self, problems: int = 5, fails: int = 5):
        super().__init__(problems)
        self.fails = fails

    def reward(self, problem: int, answer: str) -> float:
        if problem < self.fails:
            raise RuntimeError("the judge is out")
        return float(len(answer) % 7)


class Even(ReverseText):
    """All answers to half of its problems have the same reward."""

    def reward(self, problem: int, answer: str) -> float:
        return 0.5 if problem % 2 else float(len(answer) % 7)


WORDS = MixedEnvironmentConfig(args={"problems": 9}, label="words", weight=2.0)
ERRANDS = MixedEnvironmentConfig(
    name="errands:Errands",
    args={"turns": 3, "problems": 4},
    label="errands",
    samples_per_prompt=3,
    sampling={"max_tokens": 5},
)


def mixed(
    config: OrchestratorConfig, *environments: MixedEnvironmentConfig, **settings: Any
) -> OrchestratorConfig:
    """The configuration with these environments."""
    update = {"environment": EnvironmentConfig(), "environments": list(environments), **settings}
    return config.model_copy(update=update)


def run_through(config: OrchestratorConfig, folder: Path, seed: int, deaths: int = 0) -> list[RLBatch]:
    """The batches of a whole run."""
    draw = random.Random(seed)
    config = config.model_copy(update={"output_dir": str(folder)})
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, config.max_steps, draw)
    times = [draw.uniform(0.01, 0.1) for _ in range(deaths)]
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(draw), times))
    return trainer.trained


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_each_environment_is_trained_on_by_its_weight_whoever_dies(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """Single turns and programs, with settings of their own; each walks through its own problems."""
    config = mixed(in_folder(configuration, tmp_path, STEPS, seed % 2), WORDS, ERRANDS)
    batches = run_through(config, tmp_path / "run", seed, deaths=seed)
    assert sorted(places(batches)) == list(range(PROMPTS * STEPS))
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    order = read_ledger(run.ledger).order
    asked: dict[str, list[int]] = {"words": [], "errands": []}
    kept = KeptRollouts(run.rollouts)
    for batch in batches:
        found = dict(zip(places([batch]), batch.header.problems, strict=True))
        of = {place: order.at(place).environment for place in found}
        rows = kept.read(batch.header.step)
        labels = {row["place"]: row["environment"] for row in rows}
        assert labels == {place: ("words", "errands")[number] for place, number in of.items()}
        samples = Counter(row["place"] for row in rows)
        assert samples == {place: (2, 3)[number] for place, number in of.items()}
        errands = [row for row in rows if row["environment"] == "errands"]
        assert all(len(turn["token_ids"]) <= 5 for row in errands for turn in row["turns"])
        counts = Counter(labels.values())
        for label in asked:
            assert batch.metrics[f"env/{label}/groups"] == counts[label]
            if counts[label]:
                rewards = [row["reward"] for row in rows if row["environment"] == label]
                mean = batch.metrics[f"env/{label}/reward/mean"]
                assert mean == pytest.approx(sum(rewards) / len(rewards))
                assert batch.metrics[f"env/{label}/rollouts/failed"] == 0
    for place in sorted(places(batches)):
        at = order.at(place)
        asked[order.portions[at.environment].label].append(at.problem)
    assert len(asked["words"]) > 9
    for label, problems in (("words", 9), ("errands", 4)):
        for start in range(0, len(asked[label]), problems):
            epoch = asked[label][start : start + problems]
            assert len(set(epoch)) == len(epoch)
    assert_audit_clean(run, ATTEMPT, batches)
    if seed % 2 == 0:
        calm = run_through(config, tmp_path / "calm", seed + 100)
        assert [batch.digest() for batch in calm] == [batch.digest() for batch in batches]


def test_a_list_of_one_environment_is_that_environment(configuration: OrchestratorConfig, tmp_path: Path):
    """Bit for bit, with the same names in its metrics."""
    single = in_folder(configuration, tmp_path, 4, 0)
    only = MixedEnvironmentConfig(name=single.environment.name, args=single.environment.args)
    one, other = (
        run_through(config, tmp_path / name, 1)
        for name, config in (("single", single), ("list", mixed(single, only)))
    )
    assert [batch.digest() for batch in one] == [batch.digest() for batch in other]
    assert [batch.metrics.keys() for batch in one] == [batch.metrics.keys() for batch in other]


def test_an_environment_that_always_fails_ends_the_run_and_is_named(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """Though the other one is trained on meanwhile; its prompts are asked again once it is mended."""
    moody = MixedEnvironmentConfig(name=f"{__name__}:Moody", label="moody")
    settings = {"max_failed_prompts": 5, "reward_retries": 0, "max_steps": 40}
    config = mixed(in_folder(configuration, tmp_path / "run", 40, 0), WORDS, moody, **settings)
    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 40, random.Random(1))
    with pytest.raises(EnvironmentFailed) as error:
        asyncio.run(see_through(config, ATTEMPT, trainer, Servers(random.Random(1)), []))
    message = str(error.value)
    assert message.startswith(
        "environment 'moody' fails: nothing can be learned from 5 of its prompts in a row "
        "(--orchestrator.max-failed-prompts allows more). The last one, problem "
    )
    assert "the judge is out" in message
    assert message.endswith("resume with --ckpt.resume auto")
    assert len(trainer.trained) >= 2, "the other one was trained on"
    ledger = read_ledger(run.ledger)
    assert ledger.failed == []
    held = {group["place"] for group in ledger.groups if group["environment"] == 1}
    assert len(held) >= 5
    step = max(CheckpointStore(run.checkpoints).steps())
    mended = MixedEnvironmentConfig(name=f"{__name__}:Moody", label="moody", args={"fails": 0})
    config = mixed(config, WORDS, mended, max_steps=step + 4)
    attempt = go_on(config, step, branch="branch_1")
    second = Trainer(begin(config, attempt), attempt, step + 4, random.Random(2))
    asyncio.run(see_through(config, attempt, second, Servers(random.Random(2)), []))
    assert held <= set(places(second.trained))
    shipped = places(trainer.trained[:step] + second.trained)
    assert len(shipped) == len(set(shipped))


def test_failures_and_redrawn_prompts_are_counted_by_environment(
    configuration: OrchestratorConfig, tmp_path: Path
):
    moody = MixedEnvironmentConfig(name=f"{__name__}:Moody", label="moody", args={"problems": 10, "fails": 3})
    even = MixedEnvironmentConfig(name=f"{__name__}:Even", label="even", args={"problems": 10})
    settings = {"reward_retries": 1, "reward_retry_seconds": 0, "redraw": 4}
    config = mixed(in_folder(configuration, tmp_path, 12, 0), moody, even, **settings)
    batches = run_through(config, tmp_path / "run", 3)
    totals = Counter[str]()
    for batch in batches:
        for name in ("groups/failed", "groups/redrawn", "groups/dropped", "rollouts/retried"):
            each = [batch.metrics[f"env/{label}/{name}"] for label in ("moody", "even")]
            assert sum(each) == batch.metrics[name]
            totals.update({f"{label}/{name}": n for label, n in zip(("moody", "even"), each, strict=True)})
    assert totals["moody/groups/failed"] > 0 == totals["even/groups/failed"]
    assert totals["moody/rollouts/retried"] >= 2 * totals["moody/groups/failed"]
    assert totals["even/rollouts/retried"] == 0
    assert totals["even/groups/redrawn"] > 0
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    for row in read_ledger(run.ledger).failed:
        assert (row["environment"] == 1) or row["problem"] < 3 or "same reward" in row["reason"]
    assert_audit_clean(run, ATTEMPT, batches)


def test_what_stops_a_run_from_going_on_is_said_meanwhile(configuration: OrchestratorConfig, tmp_path: Path):
    """The first step waits for rewards that are asked for again and again."""
    moody = MixedEnvironmentConfig(name=f"{__name__}:Moody", label="moody", samples_per_prompt=2)
    config = mixed(in_folder(configuration, tmp_path, 2, 0), moody, reward_retry_seconds=60.0)
    trainer, servers = (
        Trainer(begin(config, ATTEMPT), ATTEMPT, 2, random.Random(1)),
        Servers(random.Random(1)),
    )
    orchestrator = Orchestrator(config, ATTEMPT, servers)
    assert orchestrator.doing == "serving requests, rewards and batches"

    async def until_it_waits() -> str:
        tasks = [asyncio.create_task(one) for one in (trainer.train(), orchestrator.run())]
        async with asyncio.timeout(60):
            while f"{2 * PROMPTS} of" not in orchestrator.doing:
                await asyncio.sleep(0.01)
        said = orchestrator.doing
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return said

    said = asyncio.run(until_it_waits())
    assert said.startswith(
        "serving requests, rewards and batches; rollouts that have failed are tried again: 6 of environment "
        "'moody'; the latest reason: environment 'moody': reward of problem "
    )
    assert "RuntimeError: the judge is out" in said


# Configuration and recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environments": [{}, {"args": {"problems": 3}}]}, "two environments are called 'reverse_text'"),
        (
            {"environments": [{}], "environment": {"name": "dataset"}},
            r"\[environment\], or \[\[environments\]\]",
        ),
        ({"environments": [{"weight": 0}]}, "greater than 0"),
        ({"environments": [{"label": "a/b"}]}, "pattern"),
        ({"environments": [{"sampling": {"temperature": 0.5}}]}, "set sampling.temperature of the run"),
        (
            {"environments": [{"samples_per_prompt": 1}]},
            "samples_per_prompt = 1, and advantage.type = 'grpo'",
        ),
    ],
)
def test_what_environments_can_not_be(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        OrchestratorConfig(**settings)


def test_a_configuration_survives_being_written():
    config = OrchestratorConfig(environments=[WORDS, ERRANDS])
    assert OrchestratorConfig.model_validate_json(config.model_dump_json()) == config
    words, errands = config.of_environments()
    assert (words.environment.called, words.samples_per_prompt) == ("words", config.samples_per_prompt)
    assert (errands.samples_per_prompt, errands.sampling.max_tokens) == (3, 5)
    assert words.of_environments() == [words]


def test_a_wrong_environment_is_named():
    wrong = MixedEnvironmentConfig(name="no_such:Thing", label="second")
    with pytest.raises(BadEnvironment, match=r"environments, 'second': orchestrator\.environment\.name"):
        check_environments(OrchestratorConfig(environments=[WORDS, wrong]))


def recipe(*environments: MixedEnvironmentConfig, **settings: Any) -> dict[str, Any]:
    config = OrchestratorConfig(environments=list(environments), **settings)
    return orchestrator_recipe(config, *check_environments(config))


def test_a_recipe_tells_another_mixture():
    """Weights, order, labels and contents are promises; a resume compares them."""
    first = recipe(WORDS, ERRANDS)["environment"]
    assert same_environment(first, recipe(WORDS, ERRANDS)["environment"])
    alone = OrchestratorConfig(environment=EnvironmentConfig(args={"problems": 9}))
    others = [
        recipe(ERRANDS, WORDS)["environment"],
        recipe(WORDS)["environment"],
        recipe(WORDS.model_copy(update={"weight": 1.0}), ERRANDS)["environment"],
        recipe(WORDS.model_copy(update={"args": {"problems": 9, "seed": 5}}), ERRANDS)["environment"],
        recipe(WORDS.model_copy(update={"label": "other"}), ERRANDS)["environment"],
        orchestrator_recipe(alone, *check_environments(alone))["environment"],
    ]
    assert not any(same_environment(first, other) or same_environment(other, first) for other in others)
    assert short_identity(first).startswith("words x 2: 9 problems (")
    settings = recipe(WORDS, ERRANDS)
    assert settings["environments"]["errands"]["sampling.max_tokens"] == 5
    assert settings["environments"]["errands"]["samples_per_prompt"] == 3
    assert not any(name.startswith("environment") for name in settings["settings"])
