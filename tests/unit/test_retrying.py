"""What is tried again, and what is said of it meanwhile."""

import asyncio

import pytest

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.completion.completion import Retrying, tried_again
from cairn.orchestrator.environments import EnvironmentFailed, SingleTurn
from cairn.orchestrator.environments.calls import Calls


def make(name: str, retries: int = 1) -> Retrying:
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name=name), reward_retries=retries, reward_retry_seconds=0
    )
    return Retrying(config)


def test_what_is_tried_again_is_counted_and_said_until_it_is_over():
    words, tools = make("words", 3), make("tools")

    async def run() -> None:
        go_on, tries = asyncio.Event(), 0

        async def judge() -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise EnvironmentFailed(f"the judge is out {tries}")
            await go_on.wait()

        async def broken() -> None:
            raise EnvironmentFailed("a line\n" + "x" * 1000)

        assert tried_again([words, tools]) is None
        both = [asyncio.create_task(words.failure(judge)), asyncio.create_task(words.failure(go_on.wait))]
        while tries < 3:
            await asyncio.sleep(0)
        assert (words.now, words.take(), words.take()) == (1, 2, 0)
        assert tried_again([words, tools]) == (
            "rollouts that have failed are tried again: 1 of environment 'words'; "
            "the latest reason: the judge is out 2"
        )
        tools.now, tools.reason, tools.failed_at = 2, "a line\nand more", words.failed_at + 1
        assert str(tried_again([words, tools])).endswith(
            "1 of environment 'words' and 2 of environment 'tools'; the latest reason: a line..."
        )
        tools.now = 0
        go_on.set()
        assert await asyncio.gather(*both) == [None, None]
        assert tried_again([words, tools]) is None
        assert await tools.failure(broken) == "a line\n" + "x" * 1000
        assert (tools.now, tools.take()) == (0, 1)

    asyncio.run(run())


def test_who_is_called_off_is_not_tried_again_any_more():
    words = make("words")

    async def run() -> None:
        calls = 0

        async def hangs() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise EnvironmentFailed("once")
            await asyncio.Event().wait()

        task = asyncio.create_task(words.failure(hangs))
        while calls < 2:
            await asyncio.sleep(0)
        assert words.now == 1
        task.cancel()
        await asyncio.wait({task})
        assert words.now == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "tries", "said"),
    [
        (ValueError("signal only works in main thread of the main interpreter"), 1, "reward_threads = 0"),
        (ValueError("Math-Verify can't be used in a threaded environment"), 1, 'name = "process"'),
        (NameError("name 'sympy' is not defined"), 1, "NameError"),
        (ImportError("No module named 'sympy'"), 1, "ImportError"),
        (NotImplementedError(), 1, "NotImplementedError"),
        (
            TypeError("'NoneType' object is not subscriptable"),
            4,
            "TypeError",
        ),  # of an overloaded judge, perhaps
        (KeyError("choices"), 4, "KeyError: 'choices'"),
        (ConnectionError("refused"), 4, "ConnectionError: refused"),
    ],
)
def test_what_can_not_pass_is_not_tried_again(
    error: Exception, tries: int, said: str, caplog: pytest.LogCaptureFixture
):
    """And the log has one traceback for a kind of exception, however often it comes."""
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="words"), reward_retries=3, reward_retry_seconds=0
    )
    calls = 0

    class Words:
        def __len__(self) -> int:
            return 3

        def reward(self, problem: int, answer: str) -> float:
            nonlocal calls
            calls += 1
            raise error

    async def run() -> str | None:
        with SingleTurn(Words(), config) as asked:
            retrying = Retrying(config)
            return [await retrying.failure(lambda: asked.reward(1, "an answer")) for _ in range(20)][-1]

    reason = asyncio.run(run()) or ""
    assert calls == 20 * tries
    assert said in reason
    assert reason.endswith("; the answer was 'an answer'")
    assert caplog.text.count("Traceback") == 1
    assert len(caplog.text.splitlines()) < 60


def test_a_function_that_does_not_take_what_it_is_given_is_not_tried_again():
    words, calls = make("words", 3), Calls("environment 'words'", 1, 60)

    async def run() -> str | None:
        return await words.failure(
            lambda: calls.call(lambda problem: 1.0, "reward of problem 1", 1, "answer")
        )

    assert "TypeError" in (asyncio.run(run()) or "")
    assert words.take() == 0
    calls.close()
