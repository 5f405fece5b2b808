"""The tables that tests draw from: what is drawn is sound, and the same every time."""

import asyncio
import math

import draws
import pytest

from cairn.config.cli import load
from cairn.config.rl import RLConfig
from cairn.orchestrator.environments import SingleTurn, check_environment
from cairn.run.signals import STOP_SIGNALS

ORCHESTRATOR = ["--orchestrator", "@configs/reverse_text/orch.toml"]


@pytest.mark.parametrize("kind", draws.ENVIRONMENTS)
def test_an_environment_of_each_kind_can_be_used(kind: str):
    """Over the file whose run gets it; its rewards are those of one problem, however they are called."""
    config = load(RLConfig, [*ORCHESTRATOR, *draws.environment_flags(kind)]).orchestrator
    assert config.environment.model_dump(exclude={"label"}) == draws.ENVIRONMENTS[kind]
    environment = check_environment(config)

    async def ask() -> list[float]:
        with SingleTurn(environment, config) as asked:
            text = (await asked.messages(3))[-1]["content"]
            answers = [text[::-1], text[:1], "?"]
            found = await asyncio.gather(*(asked.reward(3, answer) for answer in answers))
            return [reward for reward, _ in found]

    best, some, none = asyncio.run(ask())
    assert best == 1.0 > some > none == 0.0
    assert asyncio.run(ask()) == [best, some, none]
    assert math.isfinite(best)


def test_a_name_draws_the_same_every_time():
    """And names together draw everything that there is."""
    names = [f"test_{i}" for i in range(200)]
    assert [draws.environment(name) for name in names] == [draws.environment(name) for name in names]
    flags = {draws.environment(name) for name in names}
    assert flags == {draws.environment_flags(kind) for kind in draws.ENVIRONMENTS}
    assert {draws.family(name) for name in names} == set(draws.FAMILIES)
    assert {draws.stop_signal(name) for name in names} == set(STOP_SIGNALS)
    assert draws.drawn("abc", "x") == "a"


def test_a_seed_is_of_the_commit_and_the_name(monkeypatch: pytest.MonkeyPatch):
    found = {}
    for commit in ("a", "b", "a"):
        draws.commit.cache_clear()
        monkeypatch.setenv("CAIRN_TESTS_COMMIT", commit)
        found.setdefault(commit, set()).update({draws.seed("one"), draws.seed("two")})
    draws.commit.cache_clear()
    assert len(found["a"]) == len(found["b"]) == 2
    assert found["a"].isdisjoint(found["b"])


def test_some_cases_run_in_each_commit_and_all_sooner_or_later(monkeypatch: pytest.MonkeyPatch):
    """Those that do not run are in the soak tier."""
    table, now = [("a", 1), "b", "c", "d"], []
    for commit in range(60):
        draws.commit.cache_clear()
        monkeypatch.setenv("CAIRN_TESTS_COMMIT", str(commit))
        found = draws.cases(table, "test", 1, always=["d"])
        assert [case.values for case in found] == [("a", 1), ("b",), ("c",), ("d",)]
        now.append([case.values for case in found if not case.marks])
        assert all([mark.name for mark in case.marks] == ["soak"] for case in found if case.marks)
    draws.commit.cache_clear()
    assert all(len(run) == 2 and run[-1] == ("d",) for run in now)
    assert {run[0] for run in now} == {("a", 1), ("b",), ("c",)}


def test_one_of_the_tests_of_a_promise_runs_in_each_commit(monkeypatch: pytest.MonkeyPatch):
    """Sooner or later each of them, and the others are in the soak tier."""

    found = set()
    for commit in map(str, range(30)):
        draws.commit.cache_clear()
        monkeypatch.setenv("CAIRN_TESTS_COMMIT", commit)
        marks = []
        for number in range(3):

            def test() -> None: ...

            marks.append(getattr(draws.in_turn("x", number, 3)(test), "pytestmark", []))
        (there,) = (number for number, mark in enumerate(marks) if not mark)
        assert [mark.name for one in marks for mark in one] == ["soak", "soak"]
        found.add(there)
    draws.commit.cache_clear()
    assert found == {0, 1, 2}
