"""Answers in the making stay on the server that has their tokens, and no server has to do too much for it."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.inference.pool.sessions import CROWDED, FULL, SAVE_SHARE, Sessions

ONE, TWO = "http://one:1", "http://two:1"


@dataclass
class Computer:
    """A server that computes so many requests at once."""

    url: str
    requests: int = 0
    at_once: int = 4

    @property
    def load(self) -> float:
        return self.requests / self.at_once


SERVERS = st.integers(0, 4)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("begin"), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("answer"), SERVERS, st.integers(1, 8)),
        st.tuples(st.just("join"), SERVERS, st.just(0)),
        st.tuples(st.just("leave"), SERVERS, st.just(0)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(events=EVENTS)
def test_sessions_stay_and_queues_are_bounded(events: list[tuple[str, int, int]], tmp_path_factory):
    """Whatever servers join, leave and are asked, and whenever the orchestrator is started again."""
    file = tmp_path_factory.getbasetemp() / "sessions.json"
    file.unlink(missing_ok=True)
    sessions, at = Sessions(file), {}
    pool = {0: Computer("http://server:0")}
    moved = 0
    for what, which, count in events:
        servers = list(pool.values())
        least = min(server.load for server in servers)
        if what == "join":
            pool.setdefault(which, Computer(f"http://server:{which}"))
        elif what == "leave" and len(pool) > 1:
            pool.pop(which, None)
        elif what == "answer" and which in pool:
            pool[which].requests = max(0, pool[which].requests - count)
        elif what == "restart":
            asyncio.run(sessions.save())
            moved += sessions.take_moved()
            sessions = Sessions(file)
        elif what in ("ask", "begin"):
            numbers = [count] if what == "ask" else list(range(count))
            chosen = sessions.choose(servers, which, numbers)
            before = at.get((which, count)) if len(numbers) == 1 and what == "ask" else None
            if before is not None and before != chosen.url:
                home = next((one for one in servers if one.url == before), None)
                assert home is None or home.load >= CROWDED, "it stays, whoever has joined"
                assert home is None or least < home.load / 2
            if before is not None:
                assert chosen.load < CROWDED or chosen.load <= 2 * least
            elif not any((which, number) in at for number in numbers):
                assert chosen.load < FULL or chosen.load == least
            chosen.requests += len(numbers)
            at |= {(which, number): chosen.url for number in numbers}


def test_later_turns_go_where_the_earlier_ones_were():
    """Also when other answers to the same prompt have begun elsewhere, since its server was full."""
    one, two, sessions = Computer(ONE, at_once=2), Computer(TWO, at_once=2), Sessions()
    assert sessions.choose([one, two], 7, [0, 1]) is one
    one.requests = 2
    assert sessions.choose([one, two], 7, [2]) is two
    for load in (0, 2, 3):
        one.requests = load
        assert [sessions.choose([one, two], 7, [number]) for number in (0, 1, 2)] == [one, one, two]
    one.requests = 4
    assert sessions.choose([one, two], 7, [0]) is two, "half of its requests would wait"
    assert sessions.take_moved() == 1
    assert sessions.choose([one], 7, [0]) is one, "the other one is gone"
    assert sessions.take_moved() == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"urls":[],"homes":[[1,2,0]]}', '{"urls":["a"],"homes":[1]}']
)
def test_a_damaged_file_costs_the_caches_alone(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "sessions.json").write_text(content)
    sessions = Sessions(tmp_path / "sessions.json")
    assert "is ignored" in caplog.text
    assert sessions.choose([Computer(ONE)], 1, [2]).url == ONE


def test_a_disk_that_is_full_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sessions = Sessions(tmp_path / "nowhere" / "sessions.json")
    sessions.choose([Computer(ONE)], 1, [2])
    asyncio.run(sessions.save())
    assert "can't be written" in caplog.text


def test_saving_takes_a_small_part_of_the_time_but_is_done_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]

    def clock() -> float:
        now[0] += 0.1  # so a save takes 0.1 s
        return now[0]

    monkeypatch.setattr("cairn.inference.pool.sessions.time", SimpleNamespace(monotonic=clock))
    file = tmp_path / "sessions.json"
    sessions = Sessions(file)

    def saved(prompt: int, *, at_once: bool) -> bool:
        sessions.choose([Computer(ONE)], prompt, [0])
        file.unlink(missing_ok=True)
        asyncio.run(sessions.save(at_once=at_once))
        return file.exists()

    assert saved(1, at_once=False)
    assert not saved(2, at_once=False)
    assert saved(2, at_once=True)
    now[0] += 0.1 / SAVE_SHARE - 1
    assert not saved(3, at_once=False)
    now[0] += 1
    assert saved(3, at_once=False)
