"""Gymnasium environments, and what has their methods, as worlds."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from errands import Servers
from test_worlds import complete, digest, interrupted, runner
from text_games import WAYS, Meadow

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import BadEnvironment, check_environment
from cairn.orchestrator.environments.gymnasium_worlds import GymnasiumWorlds


def made(id: str, **args: Any) -> GymnasiumWorlds:
    config = EnvironmentConfig(name="gymnasium", args={"id": id, **args})
    environment: Any = check_environment(OrchestratorConfig(environment=config))
    return environment


def test_a_game_whose_actions_are_words():
    environment = made("text_games:Meadow", actions=WAYS, args={"size": 2}, invalid=-0.5, system="walk")
    assert environment.messages(3) == [{"role": "system", "content": "walk"}]
    world, seen = environment.start(3, seed=5)
    assert isinstance(world, Meadow)
    assert world.size == 2
    assert seen.startswith("start. you 0 0 flower ")
    assert environment.start(3, seed=6)[1] == seen  # the problem's seed decides, not the rollout's
    seen, reward, done = environment.step(world, "Northeast? Not south, I go EAST.")
    assert (seen.partition(".")[0], reward, done) == ("east", 0.0, False)
    for answer in ("up", "northeast", ""):
        at = list(world.at)
        said = "Error: the answer is no action, which is one of: north, east, south, west."
        assert environment.step(world, answer) == (said, -0.5, False)
        assert world.at == at
    world.at, world.flower = [0, 0], [1, 0]
    world.draw.random = lambda: 1.0
    assert environment.step(world, "east") == ("east. you 1 0 flower 1 0", 1.0, True)
    world.at = [9, 0]
    assert environment.step(world, "east")[1:] == (0.0, True)  # truncated
    environment.close(world)
    assert world.closed == 1


def test_a_game_whose_actions_are_texts():
    environment = made("text_games:Echo", problems=20)
    world, _ = environment.start(0, 1)
    assert environment.step(world, " ab \n") == ("ab", 0.25, False)
    assert environment.step(world, "a b") == ("Error: the answer is no action.", 0.0, False)
    assert environment.step(world, "end") == ("end", 0.0, True)
    environment.close(world)
    assert len({environment.start(problem, 1)[1] for problem in range(20)}) > 5


def test_a_game_that_draws_itself():
    environment = made("text_games:Drawn", actions=WAYS, render=True)
    world, seen = environment.start(0, 1)
    assert seen == "F[0]F"
    world.draw.random = lambda: 1.0
    assert environment.step(world, "east") == ("F[1]F", 0.0, False)


def test_a_game_is_interrupted_at_every_call(tmp_path: Path):
    """Its dice are thrown again as they were."""

    def wandering(**args: Any) -> GymnasiumWorlds:
        class Wandering(GymnasiumWorlds):
            def step(self, world: Any, answer: str) -> Any:
                return super().step(world, WAYS[len(answer) % 2 + 1])

        return Wandering("text_games:Meadow", actions=WAYS, args={"size": 9}, problems=3)

    calm = complete(runner(tmp_path / "calm", wandering(), Servers()))
    group, deaths = interrupted(tmp_path / "run", wandering(), Servers())
    assert deaths > 20
    assert group == calm
    assert digest(group) == digest(calm)
    assert [rollout.failed for rollout in group.rollouts] == [None, None]


def discrete(n: int) -> SimpleNamespace:
    return SimpleNamespace(n=n, start=0)


WRONG = {
    "nothing": ({"id": "text_games:Nothing"}, "has no attribute 'Nothing'"),
    "arguments": ({"id": "text_games:Echo", "args": {"size": 3}}, "takes no arguments"),
    "no words": (
        {"id": "text_games:Meadow", "args": {"action_space": discrete(4)}},
        "name them with actions = [...], a word for each in the order of their numbers",
    ),
    "other count": (
        {"id": "text_games:Meadow", "args": {"action_space": discrete(5)}, "actions": WAYS},
        "actions names 4 actions; those of text_games:Meadow are",
    ),
    "no numbers": (
        {"id": "text_games:Meadow", "args": {"action_space": SimpleNamespace()}},
        "and neither text nor numbers of a list",
    ),
    "twice": ({"id": "text_games:Meadow", "actions": ["a", "A"]}, "actions names one action twice: a, A"),
    "one word": ({"id": "text_games:Meadow", "actions": "north"}, "actions must be a list of words"),
    "no text": ({"id": "text_games:Drawn", "actions": WAYS}, "its observation is 7, and must be text: set"),
    "no drawing": (
        {"id": "text_games:Drawn", "actions": WAYS, "render": True, "args": {"render_mode": "human"}},
        "what it renders is None, and must be text",
    ),
    "turns": ({"id": "text_games:Echo", "max_turns": 0}, "its max_turns is 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_starts(case: str):
    args, message = WRONG[case]
    with pytest.raises(BadEnvironment) as raised:
        made(**args)
    assert message in str(raised.value)


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(BadEnvironment, match="uv sync --inexact --group gymnasium"):
        made("FrozenLake-v1")


class TestWithThePackage:
    """Needs the dependency group gymnasium."""

    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("gymnasium", reason="needs the dependency group gymnasium")

    WAYS = ("left", "down", "right", "up")

    def test_a_lake_that_draws_itself(self):
        settings = {"actions": self.WAYS, "render": True, "args": {"is_slippery": False}}
        environment = made("FrozenLake-v1", **settings)
        world, seen = environment.start(0, 1)
        assert seen.splitlines() == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
        seen, reward, done = environment.step(world, "I go right")
        assert (seen.splitlines()[-4], reward, done) == ("S[F]FF", 0, False)
        assert environment.step(world, "down")[1:] == (0, True)  # a hole
        environment.close(world)

    def test_ids_and_spaces_that_do_not_fit(self):
        for args, message in (
            ({"id": "NoSuchLake-v1"}, "NoSuchLake"),
            ({"id": "FrozenLake-v1", "render": True}, "Discrete.4., and no text: name them"),
            (
                {"id": "FrozenLake-v1", "actions": ["up", "down"], "render": True},
                "those of FrozenLake-v1 are",
            ),
            ({"id": "FrozenLake-v1", "actions": self.WAYS}, "its observation is 0, and must be text"),
        ):
            with pytest.raises(BadEnvironment, match=message):
                made(**args)

    def test_a_slippery_lake_is_interrupted_at_every_call(self, tmp_path: Path):
        def lake() -> GymnasiumWorlds:
            class Lake(GymnasiumWorlds):
                def step(self, world: Any, answer: str) -> Any:
                    seen, reward, done = super().step(world, ("left", "up")[len(answer) % 2])
                    return "abcdefgh"[len(seen) % 8], reward, done  # in the letters of the small tokenizer

            environment = Lake("FrozenLake-v1", actions=self.WAYS, render=True, problems=3)
            environment._seen = lambda world, observation: str(int(world.unwrapped.s))  # type: ignore
            return environment

        calm = complete(runner(tmp_path / "calm", lake(), Servers()))
        group, deaths = interrupted(tmp_path / "run", lake(), Servers())
        assert deaths > 20
        assert group == calm

    def test_spaces_of_text(self):
        from gymnasium.spaces import Text

        sys.modules["text_games"].TextEcho = lambda: _with_space(Text(4))  # type: ignore[attr-defined]
        environment = made("text_games:TextEcho")
        world, _ = environment.start(0, 0)
        assert environment.step(world, "abcd")[0] == "abcd"
        assert environment.step(world, "abcde")[0] == "Error: the answer is no action."


def _with_space(space: Any) -> Any:
    from text_games import Echo

    game = Echo()
    game.action_space = space
    return game
