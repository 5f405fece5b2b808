"""The orchestrator's parts: environments, rewards, advantages, and what is told of a batch."""

import itertools
import statistics
import string
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cairn.config.orchestrator import AdvantageConfig, EnvironmentConfig
from cairn.orchestrator.advantages import AdvantageFailed, Grpo, make_advantage, to_samples
from cairn.orchestrator.environments import (
    BadEnvironment,
    ReverseText,
    longest_common_subsequence,
    make_environment,
)
from cairn.orchestrator.metrics import batch_metrics
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.policy.generation import Generation, VersionSpan
from cairn.run.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]

# Environments

WORDS = st.text("abc", max_size=6)


@given(WORDS, WORDS)
def test_the_longest_common_subsequence_is_the_longest_there_is(a: str, b: str):
    """Against all subsequences of both."""

    def subsequences(text: str) -> set[str]:
        return {"".join(letters) for n in range(len(text) + 1) for letters in itertools.combinations(text, n)}

    common = subsequences(a) & subsequences(b)
    assert longest_common_subsequence(a, b) == max(map(len, common))


@given(st.integers(0, 99), st.text(string.ascii_lowercase + " <", max_size=12))
def test_only_the_exact_answer_has_the_full_reward(problem: int, answer: str):
    """Rewards are between 0 and 1, and no answer is too strange for one."""
    task = ReverseText(problems=100, seed=1)
    (question,) = task.messages(problem)
    wanted = question["content"][::-1]
    assert question["role"] == "user"
    assert task.reward(problem, wanted) == 1.0
    assert 0.0 <= task.reward(problem, answer) <= 1.0
    assert (task.reward(problem, answer) == 1.0) == (answer == wanted)
    assert task.reward(problem, "") == 0.0


def test_more_of_the_answer_has_more_of_the_reward():
    """So that there is a way up."""
    task = ReverseText(problems=10, min_length=6, max_length=6)
    wanted = task.messages(3)[0]["content"][::-1]
    rewards = [task.reward(3, wanted[:n]) for n in range(7)]
    assert rewards == sorted(rewards)
    assert len(set(rewards)) == 7
    assert task.reward(3, wanted + "a") < 1.0


def test_problems_are_the_same_in_every_process():
    """They depend on their number and the seed alone, not on how many there are."""
    tasks = [ReverseText(problems=n, seed=seed) for n, seed in ((50, 1), (99, 1), (50, 2))]
    texts = [[task.messages(i)[0]["content"] for i in range(50)] for task in tasks]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][:3] == ["lcxid", "fwmrm", "ykvwkzzo"]
    lengths = {len(text) for text in texts[0]}
    assert (min(lengths), max(lengths)) == (3, 8)
    assert len(ReverseText(problems=50)) == 50


class Own:
    """An environment of a user's own."""

    def __init__(self, size: int = 3):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(problem)}]

    def reward(self, problem: int, answer: str) -> float:
        return float(len(answer))


def test_a_built_in_environment_or_one_of_your_own():
    assert len(make_environment(EnvironmentConfig(args={"problems": 5}))) == 5
    own = make_environment(EnvironmentConfig(name=f"{__name__}:Own", args={"size": 4}))
    assert (type(own).__name__, own.size) == ("Own", 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "reverse"},
            r"environment\.name = 'reverse': not one of calculator, reverse_text, .*nor module:Class",
        ),
        ({"name": "builtins:object"}, r"It has none of the methods that .* a kind: reward \(a single turn"),
        ({"name": "no_such_module:Own"}, r"environment\.name .*no_such_module"),
        ({"name": f"{__name__}:Other"}, r"environment\.name .*Other"),
        ({"args": {"size": 4}}, r"environment\.args = \{'size': 4\}: .*size"),
        ({"args": {"min_length": 0}}, r"environment\.args .*min_length"),
        ({"args": {"problems": "many"}}, r"environment\.args .*many"),
    ],
)
def test_an_environment_that_can_not_be_made(config: dict, message: str):
    """The message has the key and its value."""
    with pytest.raises(BadEnvironment, match=message):
        make_environment(EnvironmentConfig(**config))


# Advantages


def rollout(tokens: list[int], reward: float, *versions: tuple[str, int, int], end: str = "stop") -> Rollout:
    """A whole answer; token t has logprob -t / 10."""
    logprobs = [-token / 10 for token in tokens]
    return Rollout(0, tokens, logprobs, list(versions), end, "", reward)


REWARDS = st.lists(st.integers(0, 100).map(lambda n: n / 100), min_size=2, max_size=16)


def advantages(rewards: list[float], **arguments: bool) -> list[float]:
    """Of GRPO, for answers with these rewards."""
    answers = [rollout([1], reward, ("r:b:5", 0, 1)) for reward in rewards]
    return Grpo(**arguments)(AnswerGroup(0, 7, 5, [50], answers))


@given(REWARDS)
def test_advantages_are_relative_to_the_group(rewards: list[float]):
    """They add up to nothing and keep the order of rewards; normalised, their spread is 1."""
    plain = advantages(rewards, normalize=False)
    normal = advantages(rewards, normalize=True)
    assert sum(plain) == pytest.approx(0, abs=1e-9)
    for (a, x, y), (b, v, w) in itertools.combinations(zip(rewards, plain, normal, strict=True), 2):
        assert (a < b) == (x < v) == (y < w)
        assert x - v == pytest.approx(a - b)
    if len(set(rewards)) > 1:
        assert statistics.stdev(normal) == pytest.approx(1)


@given(st.floats(0, 1), st.integers(2, 16), st.booleans())
def test_a_group_without_spread_teaches_exactly_nothing(reward: float, size: int, normalize: bool):
    """Not even a rounding error that normalising would blow up."""
    assert advantages([reward] * size, normalize=normalize) == [0.0] * size


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3],  # 5.6e-17 apart
        [-(0.1 + 0.2), -0.3, -0.3],
        [1e6 / 3, 1e6 / 3 * (1 + 1e-15)],
        [float(np.float32(0.7)), 0.7],  # a judge that computes in float32
        [0.0, 0.0, -0.0],
    ],
)
def test_rounding_is_no_spread(rewards: list[float]):
    """Neither is it blown up to advantages of +-1.4, nor does the group count as one that teaches."""
    for normalize in (False, True):
        assert advantages(rewards, normalize=normalize) == [0.0] * len(rewards)
    answers = [rollout([1], reward, ("r:b:5", 0, 1)) for reward in rewards]
    assert batch_metrics([AnswerGroup(0, 7, 5, [50], answers)], 6)["groups/zero_spread"] == 1


@pytest.mark.parametrize("rewards", [[0.0, 1e-12], [0.5, 0.5 + 1e-5], [1e9, 1e9 + 1e5]])
def test_a_small_spread_is_one(rewards: list[float]):
    """Its size does not matter, and next to nothing is not nothing."""
    assert advantages(rewards, normalize=True) == pytest.approx([-(0.5**0.5), 0.5**0.5])


@given(REWARDS, st.integers(1, 9))
def test_normalised_advantages_do_not_depend_on_the_scale_of_rewards(rewards: list[float], scale: int):
    """Nor on where they begin."""
    assume(len(set(rewards)) > 1)
    moved = advantages([scale * reward + 5 for reward in rewards], normalize=True)
    assert moved == pytest.approx(advantages(rewards, normalize=True), abs=1e-6)


class Ranks:
    """An advantage of a user's own: answers by their place in the order of rewards."""

    def __init__(self, worst: float = 0.0):
        self.worst = worst

    def __call__(self, group: AnswerGroup) -> list[float]:
        return [self.worst + sum(other < reward for other in group.rewards) for reward in group.rewards]


class Early:
    """One number for each token: what comes first counts most."""

    def __call__(self, group: AnswerGroup) -> list[list[float]]:
        return [[reward / (place + 1) for place in range(len(rollout.token_ids))]
                for rollout, reward in zip(group.rollouts, group.rewards, strict=True)]  # fmt: skip


class Returns:
    """Whatever it is told to."""

    def __init__(self, value: object):
        self.value = value

    def __call__(self, group: AnswerGroup) -> object:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_a_built_in_advantage_or_one_of_your_own():
    assert vars(make_advantage(AdvantageConfig())) == {"normalize": True}
    assert vars(make_advantage(AdvantageConfig(args={"normalize": False}))) == {"normalize": False}
    own = make_advantage(AdvantageConfig(type=f"{__name__}:Ranks", args={"worst": -1.0}))
    first, second = to_samples(GROUPS[0], own)
    np.testing.assert_array_equal(first.columns["advantages"], [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(second.columns["advantages"], [0, 0, -1])


def test_an_advantage_may_be_one_for_each_token():
    first, second = to_samples(GROUPS[0], make_advantage(AdvantageConfig(type=f"{__name__}:Early")))
    np.testing.assert_allclose(first.columns["advantages"], [0, 0, 1, 1 / 2, 1 / 3])
    np.testing.assert_array_equal(second.columns["advantages"], [0, 0, 0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"type": "ppo"},
            r"orchestrator\.advantage\.type = 'ppo': not one of grpo, dr_grpo, .*, nor module:Class",
        ),
        ({"type": f"{__name__}:Own"}, r"advantage\.type .* can't be called with a group of answers"),
        (
            {"args": {"normalise": False}},
            r"orchestrator\.advantage\.args = \{'normalise': False\}: .*normalise",
        ),
        ({"args": {"normalize": "no"}}, "normalize is true or false, not 'no'"),
    ],
)
def test_an_advantage_that_can_not_be_made(config: dict, message: str):
    with pytest.raises(UsageError, match=message):
        make_advantage(AdvantageConfig(**config))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([0.5], "returned 1 values for 2 answers"),
        ([0.5, None], "for answer 1, which is not finite"),
        ([0.5, float("nan")], "returned nan for answer 1, which is not finite"),
        ([1e38, 0.5], "for answer 0, which is not finite"),
        ([[0.5] * 3, [0.5] * 2], "has 1 tokens; return one number, or one for each token"),
        ([0.5, {"a": 1}], "for answer 1: expected a number or a list"),
        (ZeroDivisionError("division by zero"), "raised ZeroDivisionError: division by zero"),
        (None, "raised TypeError"),
    ],
)
def test_what_is_no_advantage_is_never_learned(value: object, message: str):
    with pytest.raises(AdvantageFailed, match=f"the advantage Returns, for problem 7, .*{message}"):
        to_samples(GROUPS[0], Returns(value))


def test_the_example_in_the_docs_is_an_advantage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """RLOO, as the section says, with arguments of its own."""
    section = (REPOSITORY / "docs" / "how-to" / "advantages.md").read_text()
    example = section.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_rewards.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    advantage = make_advantage(AdvantageConfig(type="my_rewards:LeaveOneOut", args={"cut_off": 0.5}))
    answers = [rollout([1, 2], 1.0), rollout([3], 0.0), rollout([4, 5], 0.5, end="length")]
    samples = to_samples(AnswerGroup(0, 7, 5, [50], answers), advantage)
    wanted = [[0, 0.75, 0.75], [0, -0.75], [0, 0, 0]]
    assert [sample.columns["advantages"].tolist() for sample in samples] == wanted
    answers[2].reward = 2.0
    (*_, cut) = to_samples(AnswerGroup(0, 7, 5, [50], answers), advantage)
    assert cut.columns["advantages"].tolist() == [0, 0.75, 0.75]


# Batches


GROUPS = [
    AnswerGroup(
        0, 7, 4, [50, 51], [rollout([1, 2, 3], 1.0, ("r:b:4", 0, 3)), rollout([4], 0.0, ("r:b:5", 0, 1))]
    ),
    AnswerGroup(
        1,
        3,
        3,
        [60],
        [
            rollout([5, 6], 0.5, ("r:b:3", 0, 1), ("r:b:5", 1, 2)),
            rollout([7, 8], 0.5, ("r:b:5", 0, 2), end="length"),
        ],
    ),
]


def test_samples_are_what_the_server_saw_and_sampled():
    """Prompt and answer as token ids; what is learned, and its logprobs and advantages, is the answer."""
    first, second = to_samples(GROUPS[0], Grpo(normalize=False))
    np.testing.assert_array_equal(first.token_ids, [50, 51, 1, 2, 3])
    np.testing.assert_array_equal(first.loss_mask, [False, False, True, True, True])
    np.testing.assert_allclose(first.columns["logprobs"], [0, 0, -0.1, -0.2, -0.3])
    np.testing.assert_allclose(first.columns["advantages"], [0, 0, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(second.token_ids, [50, 51, 4])
    np.testing.assert_allclose(second.columns["advantages"], [0, 0, -0.5])
    for sample in to_samples(GROUPS[1], Grpo()):
        assert not sample.columns["advantages"].any()
        assert sample.loss_mask.sum() == 2


def test_what_is_told_of_a_batch():
    """Means are over rollouts, whatever their group."""
    assert batch_metrics(GROUPS, 6) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": statistics.pstdev([1.0, 0.0, 0.5, 0.5]),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "groups/zero_spread": 1,
            "groups/unlearned": 1,
            "groups/all_best": 0,
            "groups/all_worst": 0,
            "rollout/tokens": 8,
            "rollout/length": 2.0,
            "rollout/length_min": min(len(one.token_ids) for group in GROUPS for one in group.rollouts),
            "rollout/length_max": max(len(one.token_ids) for group in GROUPS for one in group.rollouts),
            "rollout/cut_off": 0.25,
            "staleness/mean": (3 * 1 + 2) / 8,
            "staleness/max": 2,
        }
    )


def test_a_group_is_as_old_as_its_oldest_token():
    """Whatever was served when it was issued."""
    assert [group.oldest_step for group in GROUPS] == [4, 3]
    assert AnswerGroup(0, 7, 9, [50], []).oldest_step == 9


def piece(token_ids: list[int], finish_reason: str, version: str = "r:b:1") -> Generation:
    """What a server sampled; all of it from one version."""
    spans = [VersionSpan(version, 0, len(token_ids))]
    return Generation(token_ids, [-token / 10 for token in token_ids], spans, finish_reason)


def test_an_answer_grows_piece_by_piece():
    """It is whole when it ended by itself or is as long as allowed; each token keeps its version."""
    answer = Rollout(seed=3)
    answer.extend(piece([1, 2], "length"), asked=2, longest=6)
    assert answer.finish_reason is None
    answer.extend(piece([3, 4], "length", "r:b:2"), asked=2, longest=6)
    assert answer.versions == [("r:b:1", 0, 2), ("r:b:2", 2, 4)]
    assert answer.finish_reason is None
    ended, cut = deepcopy(answer), deepcopy(answer)
    ended.extend(piece([5], "stop"), asked=2, longest=6)
    cut.extend(piece([5, 6], "length"), asked=2, longest=6)
    assert (ended.finish_reason, cut.finish_reason) == ("stop", "length")
    assert cut.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert cut.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6])
