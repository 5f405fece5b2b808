"""Environments of all kinds behind the orchestrator's calls: slow ones, wrong ones, async ones."""

import asyncio
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clocks import LoopClock
from runs import DEADLINE

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.environments import (
    BadEnvironment,
    EnvironmentFailed,
    Rewards,
    SingleTurn,
    Unscored,
    check_environment,
    make_environment,
)
from cairn.orchestrator.environments.protocol import in_parts, unscored

USER = [{"role": "user", "content": "hill"}]


class Given:
    """Its methods are whatever a test wants them to be."""

    def __init__(self, reward: Callable = lambda problem, answer: 0.0, messages: Callable = lambda _: USER):
        self.reward, self.messages = reward, messages

    def __len__(self) -> int:
        return 3


def ask(environment: Given, job: Callable[[SingleTurn], Coroutine], **settings: Any) -> Any:
    """What `job` comes to with calls of this environment."""
    config = OrchestratorConfig(environment=EnvironmentConfig(name="hills:Given"), **settings)

    async def run() -> Any:
        with SingleTurn(environment, config) as calls:
            return await job(calls)

    return asyncio.run(run())


async def total(calls: SingleTurn, problem: int, answer: str) -> float:
    """The reward, of which these environments tell no parts."""
    reward, parts = await calls.reward(problem, answer)
    assert not parts
    return reward


def rewarded(returned: Any, **settings: Any) -> float:
    return ask(Given(lambda *_: returned), lambda calls: total(calls, 2, "an answer"), **settings)


async def later(value: Any) -> Any:
    await asyncio.sleep(0.001)
    return value


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (0.5, 0.5),
        (0.1 + 0.2, 0.1 + 0.2),
        (-2, -2.0),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([1], dtype=torch.int32), 1.0),
        (torch.tensor(0.25, requires_grad=True), 0.25),
    ],
    ids=repr,
)
def test_numbers_of_all_kinds_are_rewards(returned: Any, reward: float, threads: int):
    """Exactly so, as Python's floats; also from a coroutine."""
    for one in (returned, later(returned)):
        found = rewarded(one, reward_threads=threads)
        assert type(found) is float
        assert found == reward


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (math.nan, "nan, of type float"),
        (math.inf, "inf, of type float"),
        (-math.inf, "-inf, of type float"),
        (10**400, "of type int"),
        (1e300, "1e+300, of type float"),
        (np.float32("nan"), "of type float32"),
        (torch.tensor(math.inf), "tensor(inf), of type Tensor"),
        (torch.tensor([0.1, 0.2]), "of type Tensor"),
        (np.array([]), "of type ndarray"),
        ("0.5", "'0.5', of type str"),
        ((0.5, "good"), "(0.5, 'good'), of type tuple"),
        (
            {"score": "1"},
            "{'score': '1'}, of type dict: its part 'score' or the weight of that part is not one",
        ),
        ([1.0], "[1.0], of type list"),
        (1 + 2j, "of type complex"),
        (Decimal("0.5"), "of type Decimal"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_finite_number_is_refused(returned: Any, shown: str):
    """The message names environment, problem, answer, and what was returned; it is never taken for 0."""
    for one in (returned, later(returned)):
        with pytest.raises(EnvironmentFailed, match=re.escape(shown)) as raised:
            rewarded(one)
        message = str(raised.value)
        assert message.startswith(
            "environment 'hills:Given': reward of problem 2 must be one finite number, or named parts, "
            "and is "
        )
        assert message.endswith("; the answer was 'an answer'")


@pytest.mark.parametrize("returned", [None, {"right": None, "short": None}, Rewards({"right": None})])
def test_none_means_unscored(returned: Any):
    """The environment has nothing to say of the answer: no failure to try again, and never 0."""
    for one in (returned, later(returned)):
        with pytest.raises(Unscored, match=r"^unscored: environment 'hills:Given': reward of") as raised:
            rewarded(one)
        assert unscored(str(raised.value))
        assert not raised.value.passing
    assert in_parts({"right": None, "short": 0.5}) == (0.5, {"short": 0.5})


def raises(error: BaseException) -> Callable[..., Any]:
    def method(*_: object) -> float:
        raise error

    return method


def raises_later(error: BaseException) -> Callable[..., Any]:
    async def method(*_: object) -> float:
        await asyncio.sleep(0)
        raise error

    return method


@pytest.mark.parametrize("how", [raises, raises_later])
@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("division by zero"),
        TimeoutError("judge"),
        StopIteration("x"),
        SystemExit("3"),
        asyncio.CancelledError("x"),
    ],
    ids=repr,
)
def test_a_method_that_raises(how: Callable, error: BaseException, caplog: pytest.LogCaptureFixture):
    """The message says what, for which problem and answer; the log has where. Nothing ends the process."""
    if how is raises_later and isinstance(error, StopIteration):
        pytest.skip("a coroutine can't")
    environment = Given(how(error), how(error))
    what = f"raised {type(error).__name__}: {error}"
    with pytest.raises(EnvironmentFailed, match=rf"hills:Given.* problem 1 {what}; .* '(ab)+a \.\.\. "):
        ask(environment, lambda calls: total(calls, 1, "ab" * 10_000))
    with pytest.raises(EnvironmentFailed, match=rf"messages\(1\) {what}$"):
        ask(environment, lambda calls: calls.messages(1))
    assert "in method" in caplog.text


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slow_reward_holds_up_nothing_else(threads: int):
    """Not the event loop, where the heartbeat is shown. As many are at work at once as there are threads."""
    at_work: set[int] = set()
    counting, turned = threading.Lock(), threading.Event()
    together = threading.Barrier(threads, timeout=DEADLINE)
    most = 0

    def reward(problem: int, answer: str) -> float:
        nonlocal most
        with counting:
            at_work.add(problem)
            most = max(most, len(at_work))
        together.wait()  # for as many as there are threads
        assert turned.wait(DEADLINE)
        with counting:
            at_work.discard(problem)
        return problem

    async def job(calls: SingleTurn) -> tuple[list[float], int]:
        turns = 0
        rewards = asyncio.gather(*(total(calls, problem, "") for problem in range(6)))
        while not rewards.done():
            await asyncio.sleep(0.002)
            turns += 1
            if turns == 6:
                turned.set()
        return await rewards, turns

    rewards, turns = ask(Given(reward), job, reward_threads=threads)
    assert rewards == [0, 1, 2, 3, 4, 5]
    assert most == threads
    assert turns > 5


def test_coroutines_run_together_on_one_loop_that_is_not_the_orchestrators():
    """So one that blocks its loop can't stop ours, and clients that belong to a loop can be kept."""
    loops, together = set(), 0

    async def reward(problem: int, answer: str) -> float:
        nonlocal together
        loops.add(asyncio.get_running_loop())
        together += 1
        while together < 8:
            await asyncio.sleep(0.001)
        return 1.0

    async def job(calls: SingleTurn) -> set:
        await asyncio.gather(*(total(calls, problem, "") for problem in range(8)))
        return loops - {asyncio.get_running_loop()}

    assert len(ask(Given(reward), job)) == len(loops) == 1


def test_no_threads_means_the_callers():
    """Where signal.alarm works."""
    environment = Given(lambda *_: float(threading.current_thread() is threading.main_thread()))
    assert ask(environment, lambda calls: total(calls, 0, ""), reward_threads=0) == 1.0
    assert ask(environment, lambda calls: total(calls, 0, "")) == 0.0


@pytest.mark.parametrize("method", ["reward", "messages"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_deadline_names_the_problem(method: str, asynchronous: bool):
    done = threading.Event()

    async def never(*_: object) -> float:
        await asyncio.sleep(60)

    environment = Given(never, never) if asynchronous else Given(*[lambda *_: done.wait(DEADLINE)] * 2)
    arguments = (1, "x") if method == "reward" else (1,)
    what = r"reward of problem 1" if method == "reward" else r"messages\(1\)"
    try:
        with pytest.raises(EnvironmentFailed, match=f"{what} has not returned within 0.05 s .*timeout"):
            ask(environment, lambda calls: getattr(calls, method)(*arguments), reward_timeout=0.05)
    finally:
        done.set()


def test_a_deadline_begins_with_the_call(loop_clock: LoopClock):
    """Not while others are at work."""

    async def waits_its_turn(calls: SingleTurn) -> list[float]:
        return await asyncio.gather(*(total(calls, 1, "") for _ in range(40)))

    slow = Given(lambda *_: loop_clock.add(1.0) or 1.0)
    assert ask(slow, waits_its_turn, reward_timeout=30, reward_threads=1) == [1.0] * 40


HANGS = """
import asyncio, time
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import EnvironmentFailed, SingleTurn
class Hangs:
    def reward(self, problem, answer): time.sleep(3600)
async def main():
    with SingleTurn(Hangs(), OrchestratorConfig(reward_timeout=0.1)) as calls:
        await calls.reward(0, "")
try:
    asyncio.run(main())
except EnvironmentFailed:
    print("over")
"""


def test_a_process_ends_though_a_reward_hangs():
    """A role that reports its error has to end, or its launcher never hears of it."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stdout) == (0, "over\n"), ended.stderr


# Before anything is started


@pytest.mark.parametrize(
    "conversation",
    [
        USER,
        tuple(USER),
        [{"role": "system", "content": ""}, *USER],
        [{"role": "user", "content": [{"type": "text", "text": "hill"}]}],
        [*USER, {"role": "assistant", "content": None, "tool_calls": [{}]}],
    ],
    ids=repr,
)
def test_conversations(conversation: Any):
    for messages in (lambda _: conversation, lambda _: later(conversation)):
        assert ask(Given(messages=messages), lambda calls: calls.messages(0)) == list(conversation)


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ("Shout: hill", "returned 'Shout: hill', of type str"),
        (None, "returned None, of type NoneType"),
        ([], "returned an empty list"),
        ({"role": "user", "content": "hill"}, "of type dict"),
        (["hill"], "message 0 is 'hill', of type str"),
        ([*USER, {"content": "hill"}], "message 1 has no role"),
        ([{"role": "user"}], "message 0 has no content"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 7}], "message 0 has no content"),
        ((range(1),), "message 0 is range"),
    ],
    ids=repr,
)
def test_what_is_no_conversation_is_refused(conversation: Any, message: str):
    with pytest.raises(EnvironmentFailed, match=rf"hills:Given.*messages\(4\) must return .*{message}"):
        ask(Given(messages=lambda _: conversation), lambda calls: calls.messages(4))


class Whole:
    """An environment with nothing wrong, for others to be made of."""

    def __len__(self) -> int:
        return 2

    def messages(self, problem: int) -> list[dict[str, str]]:
        return USER

    def reward(self, problem: int, answer: str) -> float:
        raise AssertionError("nothing was answered yet")


class Endless(Whole):
    __len__ = None


class Empty(Whole):
    def __len__(self) -> int:
        return 0


class Unrewarding(Whole):
    reward = None


class Silent(Whole):
    messages = "hill"


class Curious(Whole):
    def reward(self, problem: int, answer: str, reference: str) -> float:
        return 0.0


class Texts(Whole):
    def messages(self, problem: int) -> str:
        return "hill"


class Unread(Whole):
    def __init__(self):
        Path("/no/such/file").read_text()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Endless, "len() of it, its number of problems, fails"),
        (Empty, "it has no problems: len() of it is 0"),
        (Unrewarding, "it has no method reward(problem, answer)"),
        (Silent, "it has no method messages(problem)"),
        (Curious, "its reward can't be called as reward(problem, answer): missing a required argument"),
        (Texts, "messages(0) must return a list of messages"),
        (Unread, "No such file or directory"),
    ],
)
def test_an_environment_that_is_none_is_found_before_anything_starts(environment: type, message: str):
    """By its name, which the message has; without a word from its rewards."""
    config = EnvironmentConfig(name=f"{__name__}:{environment.__name__}")
    with pytest.raises(BadEnvironment, match=re.escape(message)) as raised:
        check_environment(OrchestratorConfig(environment=config))
    assert environment.__name__ in str(raised.value) or environment is Unread
    check_environment(OrchestratorConfig(environment=EnvironmentConfig(name=f"{__name__}:Whole")))


def test_what_is_callable_in_another_way_will_do():
    """Methods that are no functions, or take more than is asked for."""
    odd = SimpleNamespace(Odd=lambda: Given(lambda *_, **__: 1.0, min))
    sys.modules["odd_environments"] = odd
    try:
        assert len(make_environment(EnvironmentConfig(name="odd_environments:Odd"))) == 3
    finally:
        del sys.modules["odd_environments"]
