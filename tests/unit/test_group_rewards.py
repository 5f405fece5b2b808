"""Rewards that compare the answers to a prompt: one call for a group, whoever dies, whatever it returns."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import REPOSITORY
from test_evaluation import evaluated
from test_evaluation import rows as evaluations
from test_pipeline import (
    ATTEMPT,
    PROMPTS,
    SAMPLES,
    Servers,
    Trainer,
    begin,
    configuration,
    in_folder,
    see_through,
)

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    GroupRewarded,
    Rewards,
    ask,
    make_environment,
)
from cairn.orchestrator.environments.protocol import UNSCORED
from cairn.orchestrator.rollout_log import KeptRollouts

__all__ = ["configuration"]
STEPS = 6
WORDS = ["hill", "path", "stone", "tree", "rock", "leaf", "moss", "fern", "rain", "wind"]


class Ranked:
    """The longer of two answers is the better one. Notes each call in a file."""

    identity = "ranked-1"

    def __init__(self, log: str = ""):
        self.log = log

    def __len__(self) -> int:
        return 10

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": WORDS[problem]}]

    def rewards(self, problem: int, answers: Sequence[str]) -> list[Any]:
        with open(self.log, "a") as file:
            file.write(json.dumps([problem, list(answers)]) + "\n")
        return ranks(answers)


class Slowly(Ranked):
    """The same as a coroutine, with named parts."""

    async def rewards(self, problem: int, answers: Sequence[str]) -> list[Any]:
        await asyncio.sleep(0)
        found = super().rewards(problem, answers)
        return [
            Rewards({"rank": rank, "length": len(answer)}, {"length": 0.0})
            for rank, answer in zip(found, answers, strict=True)
        ]


class Picky(Ranked):
    """Has nothing to say of empty answers, and of all answers to problem 0."""

    def rewards(self, problem: int, answers: Sequence[str]) -> list[Any]:
        return [None if problem == 0 else one for one in super().rewards(problem, answers)]


class Says:
    """Returns what it is told to."""

    found: Any = None

    def __len__(self) -> int:
        return 1

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def rewards(self, problem: int, answers: Sequence[str]) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def ranks(answers: Sequence[str]) -> list[float]:
    """By length, then by text, from 0 to 1."""
    order = sorted(range(len(answers)), key=lambda i: (len(answers[i]), answers[i]))
    return [order.index(i) / max(1, len(answers) - 1) for i in range(len(answers))]


def calls(log: Path) -> list[tuple[int, list[str]]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def config_of(
    config: OrchestratorConfig, folder: Path, environment: str, **changed: Any
) -> OrchestratorConfig:
    settings = EnvironmentConfig(name=f"{__name__}:{environment}", args={"log": str(folder / "log")})
    config = in_folder(config, folder / "run", STEPS, changed.pop("behind", 0))
    return config.model_copy(update={"environment": settings, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["Ranked", "Slowly"])
@pytest.mark.parametrize("seed", range(4))
def test_a_group_is_rewarded_by_one_call_whoever_dies(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int, environment: str
):
    """Its answers are compared with each other, and asked about again only if a death came in between."""
    draw = random.Random(seed)
    config = config_of(configuration, tmp_path, environment, behind=seed % 2)
    run = begin(config, ATTEMPT)
    trainer, servers = Trainer(run, ATTEMPT, STEPS, draw), Servers(draw)
    deaths = [draw.uniform(0.01, 0.08) for _ in range(seed)]
    asyncio.run(see_through(config, ATTEMPT, trainer, servers, deaths))
    kept = KeptRollouts(run.rollouts)
    trained = [row for step in range(1, STEPS + 1) for row in kept.read(step)]
    assert len(trained) == STEPS * PROMPTS * SAMPLES
    for place in {row["place"] for row in trained}:
        group = sorted((row for row in trained if row["place"] == place), key=lambda row: row["sample"])
        assert [row["reward"] for row in group] == ranks([row["text"] for row in group])
        if environment == "Slowly":
            assert [row["parts"]["rank"] for row in group] == [row["reward"] for row in group]
            assert [row["parts"]["length"] for row in group] == [len(row["text"]) for row in group]
    asked = calls(tmp_path / "log")
    assert all(len(answers) == SAMPLES for _, answers in asked)
    twice = sum(count - 1 for count in Counter((p, tuple(a)) for p, a in asked).values())
    in_flight = (2 + seed % 2) * PROMPTS
    assert twice <= len(deaths) * in_flight
    if not deaths:
        assert [batch.metrics["time/reward"] >= 0 for batch in trainer.trained]
        assert twice == 0


def test_the_same_batches_with_and_without_a_death(configuration: OrchestratorConfig, tmp_path: Path):
    """Taking turns, nothing depends on when the call was made."""
    digests: list[list[str]] = []
    for name, deaths in {"calm": [], "killed": [0.02, 0.05, 0.05]}.items():
        (tmp_path / name).mkdir()
        config = config_of(configuration, tmp_path / name, "Ranked")
        run = begin(config, ATTEMPT)
        trainer = Trainer(run, ATTEMPT, STEPS, random.Random(1))
        asyncio.run(see_through(config, ATTEMPT, trainer, Servers(random.Random(1)), deaths))
        digests.append([batch.digest() for batch in trainer.trained])
    assert digests[0] == digests[1]


def test_answers_that_it_has_nothing_to_say_of_are_left_out(
    configuration: OrchestratorConfig, tmp_path: Path
):
    config = config_of(configuration, tmp_path, "Picky", reward_retries=0)
    run = begin(config, ATTEMPT)
    trainer, draw = Trainer(run, ATTEMPT, STEPS, random.Random(5)), random.Random(5)
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(draw), []))
    assert all(0 not in batch.header.problems for batch in trainer.trained)
    kept = KeptRollouts(run.rollouts)
    rows = [row for step in range(1, STEPS + 1) for row in kept.read(step)]
    unscored = [row["failed"] for row in rows if row["problem"] == 0]
    assert unscored
    assert all(reason.startswith(UNSCORED) for reason in unscored)


def test_evaluations_compare_as_well(configuration: OrchestratorConfig, tmp_path: Path):
    """Ranks from 0 to 1 have the mean 1/2, however good the answers are."""
    (tmp_path / "run").mkdir()
    environment = {"name": f"{__name__}:Ranked", "args": {"log": str(tmp_path / "log")}}
    config = evaluated(configuration, tmp_path / "run", 0, {"name": "ranked", "environment": environment})
    run = begin(config, ATTEMPT)
    draw = random.Random(2)
    asyncio.run(
        see_through(config, ATTEMPT, Trainer(run, ATTEMPT, config.max_steps, draw), Servers(draw), [])
    )
    found = evaluations(run.path)
    assert found
    assert all(row["reward"] == 0.5 for row in found)
    assert all(row["failed"] == 0 for row in found)


def asked(environment: Any, answers: Sequence[str], problem: int = 0) -> list[Any]:
    """As the orchestrator asks."""

    async def run() -> list[Any]:
        with ask(environment, OrchestratorConfig(reward_timeout=60)) as one:
            assert isinstance(one, GroupRewarded)
            return await one.rewards(problem, answers)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "must be a list with one reward for each of the 2 answers, and is None"),
        (1.0, "and is 1.0"),
        ([1.0], "and is 1 of them"),
        ([1.0, 2.0, 3.0], "and is 3 of them"),
        (
            [1.0, float("nan")],
            "Of answer 1 it is nan, of type float: it is not one finite number; the answer was 'b'",
        ),
        (["good", 1.0], "Of answer 0 it is 'good'"),
        ([{}, 1.0], "it has no parts"),
        ({"a": 1.0, "b": 2.0}, "and is {'a'"),
        (RuntimeError("out of service"), "rewards of problem 0 raised RuntimeError: out of service"),
    ],
)
def test_what_is_no_list_of_rewards_fails_the_group(found: Any, message: str):
    environment = Says()
    environment.found = found
    with pytest.raises(EnvironmentFailed) as failed:
        asked(environment, ["a", "b"])
    assert message in str(failed.value)


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.floats(-10, 10),
            st.dictionaries(st.text("abc", min_size=1), st.floats(-1, 1), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_each_answer_gets_what_was_returned_for_it(found: list[Any]):
    """Numbers, named parts and None, in any mixture."""
    environment = Says()
    environment.found = found
    got = asked(environment, [str(i) for i in range(len(found))])
    assert len(got) == len(found)
    for one, reward in zip(found, got, strict=True):
        if one is None:
            assert reward is None
        elif isinstance(one, dict):
            assert reward == (pytest.approx(sum(one.values())), one)
        else:
            assert reward == (one, {})


FUNCTIONS = """
def ranked(completions, **kwargs):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [order.index(i) / max(1, len(completions) - 1) for i in range(len(completions))]

async def longest(prompts, completions, answer, **kwargs):
    assert len(prompts) == len(completions) == len(answer)
    return [len(one) / max(1, max(map(len, completions))) for one in completions]

def alone(completions, **kwargs):
    assert len(completions) == 1
    return [0.25 if completions[0] else None]

def short(completions, **kwargs):
    return [1.0]

def silent(completions, **kwargs):
    return [None] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "2+3", "answer": "5"}\n{"prompt": "1+1", "answer": "2"}\n'
    )
    (tmp_path / "compared_of_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "compared_of_test", raising=False)
    return tmp_path


def data_set(folder: Path, *rewards: Any, **args: Any) -> Any:
    return make_environment(
        EnvironmentConfig(
            name="dataset", args={"data": str(folder / "sums.jsonl"), "rewards": list(rewards), **args}
        )
    )


def compared(name: str, **further: Any) -> dict[str, Any]:
    return {"function": f"compared_of_test:{name}", "group": True, **further}


def test_functions_of_trl_that_compare_get_all_completions(folder: Path):
    """The trial: called with one answer they gave every answer the same."""
    environment = data_set(
        folder, compared("ranked"), compared("longest", weight=0.5), "compared_of_test:alone"
    )
    found = asked(environment, ["a", "abcd", "ab"])
    assert [reward for reward, _ in found] == pytest.approx(
        [0 + 0.125 + 0.25, 1 + 0.5 + 0.25, 0.5 + 0.25 + 0.25]
    )
    assert found[1][1] == {"ranked": 1.0, "longest": 1.0, "alone": 0.25}
    assert asked(environment, ["a", ""])[1] == (0.0, {"ranked": 0.0, "longest": 0.0}), "alone does not apply"
    assert asked(data_set(folder, compared("silent")), ["a", "b"]) == [None, None]


def test_a_data_set_without_such_functions_is_asked_as_before(folder: Path):
    plain = data_set(folder, "compared_of_test:ranked")
    assert plain.rewards is None
    with ask(plain, OrchestratorConfig()) as one:
        assert not isinstance(one, GroupRewarded)
    assert plain.identity != data_set(folder, compared("ranked")).identity


@pytest.mark.parametrize(
    ("reward", "args", "message"),
    [
        (compared("ranked", group="yes"), {}, "group of reward 'compared_of_test:ranked' is 'yes'"),
        (compared("ranked", many=True), {}, "a table with function, weight, args and group"),
        (
            compared("ranked"),
            {"environment_factory": f"{__name__}:Factory"},
            "environment_factory rewards each",
        ),
    ],
)
def test_wrong_settings_are_told_at_once(folder: Path, reward: Any, args: dict[str, Any], message: str):
    with pytest.raises(BadEnvironment) as error:
        data_set(folder, reward, **args)
    assert message in str(error.value)


class Factory:
    """An environment as TRL's factories make them."""

    def reset(self, **_: Any) -> str:
        """Begin."""
        return ""

    def look(self) -> str:
        """Look around.

        Returns:
            What there is.
        """
        return "a hill"


def test_a_function_that_returns_too_few_fails_the_group(folder: Path):
    with pytest.raises(EnvironmentFailed, match=r"short must return a list with 2 rewards, one an answer"):
        asked(data_set(folder, compared("short")), ["a", "b"])


def test_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Rewards with parts and None come back as they were; a wrong number of them is told."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    environment = make_environment(EnvironmentConfig(name="process", args={"environment": "lonely:Ranking"}))
    assert asked(environment, ["ab", "", "abc"]) == [
        (0.5, {"rank": 0.5, "length": 2}),
        None,
        (1.0, {"rank": 1.0, "length": 3}),
    ]
    with pytest.raises(EnvironmentFailed, match="and is 1 of them"):
        asked(environment, ["few", "b"])
    with pytest.raises(EnvironmentFailed, match="and is 7"):
        asked(environment, ["number", "b"])


def test_a_list_called_rewards_makes_no_such_environment():
    """An attribute of that name, of an environment that has reward."""

    class Old(Says):
        rewards = (0.0, 1.0)

        def reward(self, problem: int, answer: str) -> float:
            return 1.0

    with ask(Old(), OrchestratorConfig()) as one:
        assert not isinstance(one, GroupRewarded)


def test_the_example_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (REPOSITORY / "docs" / "how-to" / "rewards.md").read_text()
    section = page.partition("\n## Rewards that compare answers\n")[2]
    (tmp_path / "my_ranks.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_environment(EnvironmentConfig(name="my_ranks:Shortest"))
    assert asked(environment, ["htap", "the htap", "path"]) == [(1.0, {}), (0.5, {}), (0.0, {})]
