"""Text from outside, whatever its characters, reaches ledger, kept rollouts, logs and files as UTF-8."""

import asyncio
import io
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import CONFIGS, REPOSITORY

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completion import Retrying
from cairn.orchestrator.environments import EnvironmentFailed, SingleTurn
from cairn.orchestrator.environments.agent import _json
from cairn.orchestrator.environments.protocol import in_parts, kind_of
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.rollout_log import KeptRollouts, rows_of
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run import noted_calls
from cairn.run.conversations import NoPrompt
from cairn.run.messages import Attempt
from cairn.run.noted_calls import UserCall
from cairn.run.output import LONGEST_TEXT, quoted

RUN = LedgerRun("run", "branch_1", FORMAT, 0, 3, 1, 2, 0)
ATTEMPT = Attempt("run", 1, "rl", 0, None, "branch_1")
CHAT = ChatFormat(REPOSITORY / CONFIGS / "model")
TEXT = st.text(st.characters() | st.sampled_from("\ud83d\udce9\udc00\0\n\r\x1b\u2028"), max_size=30)
CONFIG = OrchestratorConfig(environment=EnvironmentConfig(name="odd"), reward_retries=0)


class Odd:
    """Its reward is what a test says."""

    def __init__(self, reward: Any):
        self._reward = reward

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem: int, answer: str) -> Any:
        if isinstance(self._reward, BaseException):
            raise self._reward
        return self._reward


class Silent(Exception):
    """Whose text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def failure(error: BaseException, call: UserCall) -> str:
    """Why an answer has no reward whose reward raises `error`."""

    async def job() -> str | None:
        with SingleTurn(Odd(error), CONFIG) as asked:
            return await Retrying(CONFIG).failure(lambda: asked.reward(1, "answer"), call)

    reason = asyncio.run(job())
    assert reason is not None
    return reason


def keep(folder: Path, rollouts: list[Rollout], reason: str) -> AnswerGroup:
    """Record answers everywhere; returns the group as the ledger has it."""
    ledger = Ledger(folder / "ledger.sqlite", RUN, None, 0)
    group = AnswerGroup(0, 1, 0, [], [])
    ledger.issue(group)
    group.rollouts = rollouts
    ledger.record(0, dict(enumerate(rollouts)))
    for number, rollout in enumerate(rollouts):
        ledger.finish(0, number, rollout, None)
    (found,) = ledger.waiting()
    ledger.snapshot()
    kept = KeptRollouts(folder / "rollouts")
    kept.write(1, rows_of(1, [found], ["odd"], CHAT), ATTEMPT, 1.0)
    assert [row["failed"] for row in kept.read(1)] == [rollout.failed for rollout in found.rollouts]
    ledger.fail(group, reason, 1)
    ledger.close()
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    TEXT, TEXT, st.sampled_from([ValueError, KeyError, RuntimeError, OSError, SystemExit, KeyboardInterrupt])
)
def test_whatever_an_exception_says_can_be_written_everywhere(
    text: str, part: str, kind: type[BaseException]
):
    with tempfile.TemporaryDirectory() as folder:
        noted_calls.start(Path(folder) / "calls", text)
        reason = failure(kind(text), UserCall(text, text, text))
        noted_calls.stop(Path(folder) / "calls")
        noted_calls._record = None
        total, parts = in_parts({part: 1.0})  # pyright: ignore[reportAssignmentType]
        rollouts = [
            Rollout(1, [7], [-0.5], finish_reason="stop", failed=reason),
            Rollout(2, [7], [-0.5], finish_reason="stop", text="a", reward=total, parts=parts),
        ]
        found = keep(Path(folder), rollouts, reason)
    assert found.rollouts == rollouts
    for one in (reason, kind_of(reason), *parts):
        one.encode()
        assert "\0" not in one


@pytest.mark.parametrize("error", [Silent(), ValueError("x" * 10_000_000), ValueError("\ud83d" * 10_000)])
def test_a_reason_is_bounded(error: BaseException):
    reason = failure(error, UserCall("a", "a", "a"))
    assert len(reason.encode()) <= 4 * LONGEST_TEXT
    assert len(EnvironmentFailed("x" * 10_000_000).args[0]) < LONGEST_TEXT + 100
    assert quoted("a" * 5000 + "end").endswith("aend")


@given(TEXT)
def test_a_logged_text_and_an_agents_record_can_be_written(text: str):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    log = logging.Logger("odd")
    log.addHandler(logging.StreamHandler(stream))
    log.error("%s", text)
    stream.flush()
    record = {text: [text, {"a": text}]}
    assert json.loads(_json(record).decode()) == record


@given(TEXT)
def test_messages_are_rendered_or_the_character_is_named(text: str):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": text}]
    halves = [c for c in text if "\ud800" <= c <= "\udfff"]
    if not halves:
        assert CHAT.prompt(messages)
        return
    with pytest.raises(NoPrompt) as raised:
        CHAT.prompt(messages)
    assert f"message 1 (role 'user') has the character U+{ord(halves[0]):04X}" in str(raised.value)
