"""Thousands of rollouts on one event loop leave it to others in between."""

import asyncio
from pathlib import Path

import pytest
from errands import Errands, Servers
from test_programs import complete, runner

from cairn.orchestrator.completion import completion
from cairn.orchestrator.completion.completion import Pacing


@pytest.mark.parametrize("longest", [0.0, 1e9])
def test_others_have_the_loop_between_pieces_of_work(monkeypatch: pytest.MonkeyPatch, longest: float):
    """If the pieces have taken long enough; in the order in which they are asked for."""
    monkeypatch.setattr(completion, "LONGEST", longest)
    now = 2e9
    monkeypatch.setattr(completion.time, "monotonic", lambda: now)
    seen: list[str] = []

    async def run() -> None:
        nonlocal now
        paced = Pacing()
        await paced.turn()  # the first one lets others have the loop in any case
        now += 1

        async def work(name: str) -> None:
            await paced.turn()
            seen.append(name)

        async def other() -> None:
            while len([name for name in seen if name != "-"]) < 4:
                seen.append("-")
                await asyncio.sleep(0)

        await asyncio.gather(*map(work, "abcd"), other())

    asyncio.run(run())
    assert [name for name in seen if name != "-"] == list("abcd")
    found = "".join(seen)
    if longest:
        assert "abcd" in found
    else:
        assert not any(pair in found for pair in ("ab", "bc", "cd"))


def test_whoever_waits_may_be_called_off():
    async def run() -> None:
        paced = Pacing()
        tasks = [asyncio.create_task(paced.turn()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found] == [type(None), asyncio.CancelledError, type(None)]

    asyncio.run(run())


def test_start_requests_answers_and_end_of_a_program_are_paced(tmp_path: Path):
    one, turns = runner(tmp_path, Errands(4), Servers()), 0

    class Counting(Pacing):
        async def turn(self) -> None:
            nonlocal turns
            turns += 1
            await super().turn()

    one.pacing = Counting()
    group = complete(one)
    assert turns == sum(2 + 2 * len(rollout.turns) for rollout in group.rollouts)
