"""Rollouts that are programs: whatever interrupts them, nothing is asked or done twice."""

import asyncio
import contextlib
import json
import math
import re
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import LoopClock
from errands import Errands, Servers
from runs import CONFIGS, DEADLINE, REPOSITORY

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.advantages import to_samples
from cairn.orchestrator.completion import program_run
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.environments import BadEnvironment, Programs, Rewards, check_environment
from cairn.orchestrator.environments.protocol import in_parts
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.ledger.opening import oddity
from cairn.orchestrator.metrics import batch_metrics
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.orchestrator.rollout_log import rows_of
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.policy.generation import Generation
from cairn.run.errors import UsageError

MODEL = REPOSITORY / CONFIGS / "model"
CHAT = ChatFormat(MODEL)
VERSION = "run:branch_1:0"
RUN = LedgerRun("run", "branch_1", FORMAT, 0, 3, 1, 2, 0)


class Power(BaseException):
    """It went out."""


class Interrupted(Ledger):
    """Kills whoever records call number `last`, right after it is recorded."""

    left = math.inf
    dead = False

    def _count(self) -> None:
        self.left -= 1
        if self.dead:
            raise asyncio.CancelledError
        if self.left < 0:
            self.dead = True  # a second death would end the event loop before all of its tasks have ended
            raise Power

    def record_turn(self, *what: Any) -> None:
        super().record_turn(*what)
        self._count()

    def finish(self, *what: Any) -> None:
        if self.dead:
            raise asyncio.CancelledError
        super().finish(*what)

    def record_call(self, *what: Any) -> None:
        super().record_call(*what)
        self._count()


def runner(folder: Path, environment: Any, servers: Servers, **settings: Any) -> ProgramRunner:
    """One that samples answers of up to six tokens in pieces of two."""
    servers.version = VERSION
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="errands:Errands"),
        sampling=SamplingConfig(max_tokens=6, chunk_tokens=2),
        **{"samples_per_prompt": 2, "reward_retries": 1, "reward_retry_seconds": 0.0, **settings},
    )
    folder.mkdir(exist_ok=True)
    ledger = Interrupted(folder / "ledger.sqlite", RUN, None, 0)
    return ProgramRunner(config, Programs(environment, config), CHAT, servers, ledger, {VERSION})


def complete(one: ProgramRunner) -> AnswerGroup:
    """The first prompt, from its beginning, or as far as it has come."""

    async def run() -> AnswerGroup:
        waiting = one.ledger.waiting()
        try:
            return await one.complete(waiting[0] if waiting else Prompts(one.ledger).issue(0))
        finally:
            one.environment.close()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:  # of a call after the death, which has come here before it
        raise Power from None
    finally:
        one.ledger.close()


def digest(group: AnswerGroup) -> list[tuple]:
    """What is learned from a group, where its rewards are the advantages."""
    samples = to_samples(group, lambda group: group.rewards)
    columns = [(sample.token_ids, sample.loss_mask, *sample.columns.values()) for sample in samples]
    return [tuple(array.tobytes() for array in arrays) for arrays in columns]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[AnswerGroup, Servers]:
    """A group of two rollouts of four turns that nothing interrupted."""
    servers = Servers()
    return complete(runner(tmp_path_factory.mktemp("calm"), Errands(4), servers)), servers


def test_a_program_is_interrupted_at_every_call(calm: tuple[AnswerGroup, Servers], tmp_path: Path):
    """Again and again: each token is sampled once, each tool called once, and what is learned is the same."""
    group, undisturbed = calm
    servers = Servers()
    deaths = 0
    while True:
        environment = Errands(4, log=str(tmp_path / "visits"))
        one = runner(tmp_path / "run", environment, servers)
        one.ledger.left = 1
        environment.power = lambda ledger=one.ledger: ledger.left >= 0
        try:
            found = complete(one)
            break
        except Power:
            deaths += 1
    assert deaths > 8
    assert digest(found) == digest(group)
    assert found == group
    assert Counter(seed for seed, _ in servers.asked) == Counter(seed for seed, _ in undisturbed.asked)
    visits = [line.split()[:2] for line in (tmp_path / "visits").read_text().splitlines()]
    assert Counter(map(tuple, visits)).most_common(1)[0][1] == 1
    assert len(visits) == 2 * 4
    assert [rollout.diverged for rollout in found.rollouts] == [0, 0]


class Updated(Servers):
    """Has another policy with each request."""

    async def generate(self, *what: Any, **how: Any) -> list[Generation]:
        self.version = f"run:branch_1:{len(self.asked)}"
        return await super().generate(*what, **how)


def test_requests_say_which_policy_the_conversation_began_with(tmp_path: Path):
    """For the servers' caches; also those of a process that has found the first turns in the ledger."""
    servers = Updated()
    one = runner(tmp_path / "run", Errands(4), servers)
    one.ledger.left = 5
    with pytest.raises(Power):
        complete(one)
    before = len(servers.began)
    group = complete(runner(tmp_path / "run", Errands(4), servers))
    first = [rollout.turns[0].versions[0][0] for rollout in group.rollouts]
    lengths = [len(context) for _, context in servers.asked]
    assert [began is None for began in servers.began] == [length == min(lengths) for length in lengths]
    assert {*servers.began} - {None} == {*first}
    assert {*servers.began[before:]} & {*first}


def test_samples_are_the_very_tokens_that_were_seen_and_sampled(calm: tuple[AnswerGroup, Servers]):
    """One branch: the last context and answer. Learned is what was sampled, with its logprobs."""
    group, servers = calm
    first, _ = to_samples(group, lambda group: [0.5, -0.5])
    longest = max((context for _, context in servers.asked), key=len)
    samples = [sample.token_ids.tolist() for sample in to_samples(group, lambda group: [0.5, -0.5])]
    assert any(sample[: len(longest)] == longest for sample in samples)
    learned = first.token_ids[first.loss_mask]
    assert learned.tolist() == list(group.rollouts[0].token_ids)
    np.testing.assert_array_equal(first.columns["logprobs"][first.loss_mask], -(1 + learned) / 64)
    assert set(first.columns["advantages"][first.loss_mask]) == {0.5}
    assert not first.columns["advantages"][~first.loss_mask].any()
    switches = np.flatnonzero(np.diff(first.loss_mask.astype(int)))
    assert len(switches) == 2 * 4 - 1  # four spans, of which the last reaches the end


def test_a_conversation_that_begins_anew_is_a_branch(tmp_path: Path):
    """With one sample for each; an advantage for each token goes where the token is."""
    group = complete(runner(tmp_path, Errands(4, forgets_at=3), Servers()))
    tokens = [len(rollout.token_ids) for rollout in group.rollouts]
    samples = to_samples(group, lambda group: [list(range(1, n + 1)) for n in tokens])
    assert len(samples) == 4
    for rollout, one, two in zip(group.rollouts, samples[::2], samples[1::2], strict=True):
        found = [*one.columns["advantages"][one.loss_mask], *two.columns["advantages"][two.loss_mask]]
        assert found == list(range(1, len(rollout.token_ids) + 1))
        both = [*one.token_ids[one.loss_mask], *two.token_ids[two.loss_mask]]
        assert both == list(rollout.token_ids)
        assert CHAT.tokenizer.decode(two.token_ids).startswith(f"<user>{group.problem} again<assistant>")
    metrics = batch_metrics([group], 1)
    assert (metrics["rollout/turns"], metrics["rollout/branches"]) == (4, 2)
    assert metrics["reward/early/mean"] == np.mean([rollout.parts["early"] for rollout in group.rollouts])


class Mood:
    """Its second question is whatever `question` is when it is asked."""

    def __init__(self, question: str = "b", calls: int = 1):
        self.question, self.calls = question, calls
        self.made: list[str] = []

    def __len__(self) -> int:
        return 3

    async def rollout(self, problem: int, model: Any) -> float:
        messages = [{"role": "user", "content": "a"}]
        messages.append((await model.generate(messages)).message)
        messages.append({"role": "user", "content": self.question})
        messages.append((await model.generate(messages)).message)
        for number in range(self.calls):
            await model.once(f"call {number}", partial(self.made.append, f"{self.question}{number}"))
        return float(len((await model.generate(messages)).token_ids))


@pytest.mark.parametrize("interrupted_after", range(1, 4))  # with more, one may have ended
def test_a_program_that_asks_something_else_than_before_goes_on_from_there(
    tmp_path: Path, interrupted_after: int
):
    """What was recorded after that is gone, and it counts."""
    servers = Servers(longest=2)  # one piece an answer
    one = runner(tmp_path, Mood(), servers, samples_per_prompt=1 + 1)
    one.ledger.left = interrupted_after
    with pytest.raises(Power):
        complete(one)
    recorded = [len(one_calls) for one_calls in _calls(tmp_path)]
    other = Mood("c")
    group = complete(runner(tmp_path, other, servers))
    assert [rollout.diverged for rollout in group.rollouts] == [int(count > 1) for count in recorded]
    assert sorted(other.made) == ["c0", "c0"]
    fresh = complete(runner(tmp_path / "fresh", Mood("c"), Servers(longest=2)))
    assert digest(fresh) == digest(group)


def _calls(folder: Path) -> list[list]:
    ledger = Ledger(folder / "ledger.sqlite", RUN, None, 0)
    try:
        return [ledger.calls(0, sample) for sample in range(2)]
    finally:
        ledger.close()


def test_a_program_that_makes_fewer_calls_than_before(tmp_path: Path):
    """The rest is forgotten, so that the ledger holds what is learned from."""
    one = runner(tmp_path, Mood(calls=3), Servers(longest=2))
    one.ledger.left = 9
    with pytest.raises(Power):
        complete(one)
    group = complete(runner(tmp_path, Mood(calls=1), Servers(longest=2)))
    assert max(rollout.diverged for rollout in group.rollouts) == 1
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    assert ledger.waiting() == [group]
    ledger.close()


class Together(Errands):
    """Asks twice at once."""

    async def rollout(self, problem: int, model: Any) -> float:
        asked = [model.generate([{"role": "user", "content": text}]) for text in ("a", "b")]
        replies = await asyncio.gather(*asked)
        visits = [model.once(f"visit {n}", partial(self.visit, model.seed, n, "x")) for n in range(3)]
        await asyncio.gather(*visits)
        return float(len(replies[0].text) + len(replies[1].text))


def test_calls_at_the_same_time_are_known_by_the_order_in_which_they_begin(tmp_path: Path):
    calm = complete(runner(tmp_path / "calm", Together(), Servers()))
    servers, environment = Servers(), Together(log=str(tmp_path / "visits"))
    for _ in range(100):
        one = runner(tmp_path / "run", environment, servers)
        one.ledger.left = 0
        try:
            group = complete(one)
            break
        except Power:
            pass
    assert digest(group) == digest(calm)
    assert [rollout.diverged for rollout in group.rollouts] == [0, 0]


# Failures


class Failing:
    """Its end is whatever a test wants, `times` times in each rollout, and then 1."""

    def __init__(self, end: Any, times: float = math.inf):
        self.end, self.times = end, times
        self.starts: Counter[int] = Counter()
        self.tools = 0

    def __len__(self) -> int:
        return 3

    def tool(self) -> None:
        self.tools += 1

    async def rollout(self, problem: int, model: Any) -> Any:
        await model.generate([{"role": "user", "content": "a"}])
        await model.once("tool", self.tool)
        self.starts[model.seed] += 1
        if self.starts[model.seed] > self.times:
            return 1.0
        return await self.end() if callable(self.end) else self.end


async def raises() -> None:
    raise ZeroDivisionError("division by zero")


async def hangs(clock: LoopClock, hanging: list[int]) -> None:
    hanging.append(1)
    if len(hanging) % 2 == 0:  # time passes for both rollouts: not before the other one has come here, too
        clock.add(3)
    await asyncio.Event().wait()


async def leaves() -> None:
    raise SystemExit(3)


ENDS = {
    "NaN": (math.nan, "it is not one finite number: nan"),
    "a part is NaN": ({"right": math.nan}, "its part 'right' or the weight of that part is not one finite"),
    "no parts": ({}, "it has no parts"),
    "raises": (raises, "rollout 0 of problem 2 raised ZeroDivisionError: division by zero"),
    "leaves": (leaves, "raised SystemExit: 3"),
    "hangs": (hangs, "has not gone on within 2 s .--orchestrator.reward-timeout allows more"),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_fails_is_tried_again_from_the_ledger_and_then_has_failed(
    tmp_path: Path, end: str, loop_clock: LoopClock
):
    """It is never taken for 0, nothing is sampled or called again for it, and the reason is kept."""
    value, message = ENDS[end]
    value = partial(hangs, loop_clock, []) if value is hangs else value
    environment, servers = Failing(value), Servers(longest=2)
    group = complete(runner(tmp_path, environment, servers, reward_timeout=2))
    assert (group.whole, group.usable, set(environment.starts.values())) == (True, False, {2})
    assert message.replace(".--", "(--") in (group.rollouts[0].failed or "").replace("rollout 1", "rollout 0")
    assert (len(servers.asked), environment.tools) == (2, 2)
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    (waiting,) = ledger.waiting()
    ledger.close()
    assert [rollout.failed for rollout in waiting.rollouts] == [rollout.failed for rollout in group.rollouts]
    for kept in (group, waiting):  # also by a process that is started later
        rows = rows_of(1, [kept], [""], CHAT)
        assert [(len(row["turns"]), row["tokens"] > 0) for row in rows] == [(1, True)] * 2
    mended = complete(runner(tmp_path, Failing(value, times=0), servers))
    assert (mended.rewards, len(servers.asked), environment.tools) == ([1.0, 1.0], 2, 2)


class Hasty:
    """Asks twice at the same time, and has enough with the first answer. The other one is not called off.

    Args:
        fails: it raises then, once for each rollout.
    """

    def __init__(self, fails: bool = False):
        self.fails, self.left = fails, set[asyncio.Task[Any]]()
        self.failed = set[int]()

    def __len__(self) -> int:
        return 3

    async def rollout(self, problem: int, model: Any) -> float:
        await model.generate([{"role": "user", "content": "a"}])
        self.left.add(asyncio.create_task(model.generate([{"role": "user", "content": "b"}])))
        await model.once("seen", lambda: None)
        if self.fails and model.seed not in self.failed:
            self.failed.add(model.seed)
            raise ZeroDivisionError("division by zero")
        return 1.0


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_that_comes_after_a_rollouts_end_is_nothing_of_its(tmp_path: Path, fails: bool):
    """It would contradict what the ledger says of the rollout, and a resume would set the ledger aside."""
    servers, environment = Servers(longest=2), Hasty(fails)
    one = runner(tmp_path, environment, servers)
    generate, free = servers.generate, asyncio.Event()

    async def slow(prompt_ids: Any, *what: Any, **how: Any) -> Any:
        if "b" in CHAT.text(list(prompt_ids)):
            await free.wait()
        return await generate(prompt_ids, *what, **how)

    servers.generate = slow

    async def run() -> AnswerGroup:
        group = await one.complete(Prompts(one.ledger).issue(0))
        free.set()
        async with asyncio.timeout(DEADLINE):
            while not all(task.done() for task in environment.left):
                await asyncio.sleep(0.01)
        one.environment.close()
        return group

    try:
        group = asyncio.run(run())
        assert (group.rewards, len(environment.left)) == ([1.0, 1.0], 4 if fails else 2)
        assert oddity(one.ledger._database) is None
        assert [turn.number for turn in one.ledger.turns(0, 0)] == [0]
    finally:
        one.ledger.close()


def test_a_wait_for_a_free_thread_is_not_the_programs_time(tmp_path: Path, loop_clock: LoopClock):
    """The tools on one thread take longer than a program has; each of them alone does not."""
    environment, gone_on = Failing(1.0), threading.Semaphore(1)

    def slow() -> None:
        assert gone_on.acquire(timeout=DEADLINE)  # what was called before is not under way any more
        loop_clock.add(0.3)

    async def rollout(problem: int, model: Any) -> float:
        await model.generate([{"role": "user", "content": "a"}])
        await model.once("slow", slow)
        gone_on.release()
        return 1.0

    environment.rollout = rollout
    settings = {"samples_per_prompt": 12, "reward_retries": 0, "reward_threads": 1}
    group = complete(runner(tmp_path, environment, Servers(), reward_timeout=3, **settings))
    assert [rollout.failed for rollout in group.rollouts] == [None] * 12


def test_a_program_that_fails_once_is_as_if_it_had_not(tmp_path: Path):
    group = complete(runner(tmp_path, Failing(raises, times=1), Servers()))
    assert group.rewards == [1.0, 1.0]
    assert group.failure is None


def test_a_program_that_blocks_all_others_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
):
    monkeypatch.setattr(program_run, "LAST_SECONDS", 0.1)
    environment, free, waiting = Failing(1.0), threading.Event(), list[int]()

    async def blocks(problem: int, model: Any) -> float:
        await model.generate([{"role": "user", "content": "a"}])
        while not free.wait(0.01):
            loop_clock.add(0.3)
        return 1.0

    async def waits(problem: int, model: Any) -> float:
        await model.generate([{"role": "user", "content": "a"}])
        waiting.append(problem)
        if len(waiting) == 2:
            loop_clock.add(0.3)
        await asyncio.Event().wait()
        return 1.0

    environment.rollout = blocks
    settings = {"reward_retries": 0, "reward_timeout": 0.2}
    try:
        group = complete(runner(tmp_path / "blocked", environment, Servers(), **settings))
    finally:
        free.set()
    assert "event loop that all its rollouts share is blocked" in str(group.rollouts[0].failed)
    environment.rollout = waits
    group = complete(runner(tmp_path / "waits", environment, Servers(), **settings))
    assert str(group.rollouts[0].failed).endswith("(--orchestrator.reward-timeout allows more)")


@pytest.mark.parametrize("asked", ["hello", {"role": "user", "content": "hello"}])
def test_what_is_no_conversation_is_named(tmp_path: Path, asked: Any):
    environment = Failing(1.0)

    async def rollout(problem: int, model: Any) -> float:
        await model.generate(asked)
        return 1.0

    environment.rollout = rollout
    group = complete(runner(tmp_path, environment, Servers(), reward_retries=0))
    failed = str(group.rollouts[0].failed)
    assert "raised TypeError: messages must be a list of messages such as" in failed
    assert failed.endswith(f"and is {asked!r}")


def test_a_tool_that_raises_is_the_programs_to_handle(tmp_path: Path):
    """What is raised is not recorded."""

    class Careful(Failing):
        async def rollout(self, problem: int, model: Any) -> float:
            await model.generate([{"role": "user", "content": "a"}])
            with pytest.raises(ZeroDivisionError):
                await model.once("tool", raises)
            with pytest.raises(TypeError, match="the result of 'set' must be JSON"):
                await model.once("set", lambda: {1, 2})
            with pytest.raises(ValueError, match="max_tokens is 0"):
                await model.generate([{"role": "user", "content": "a"}], max_tokens=0)
            return 0.5

    assert complete(runner(tmp_path, Careful(0), Servers())).rewards == [0.5, 0.5]


def test_servers_that_give_up_end_the_run_whatever_the_program_makes_of_it(tmp_path: Path):
    class Stubborn(Failing):
        async def rollout(self, problem: int, model: Any) -> float:
            while True:
                try:
                    await model.generate([{"role": "user", "content": "a"}])
                except Exception:
                    await asyncio.sleep(0.001)

    class Down(Servers):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise ConnectionError("no server")

    with pytest.raises(ConnectionError, match="no server"):
        complete(runner(tmp_path, Stubborn(0), Down()))


def test_tools_that_nothing_reads_the_calls_of_end_the_run(tmp_path: Path):
    """Whatever the program makes of it; the message names the setting."""

    class Tools(Failing):
        async def rollout(self, problem: int, model: Any) -> float:
            with contextlib.suppress(Exception):
                await model.generate([{"role": "user", "content": "a"}], tools=[{"type": "function"}])
            return 1.0

    servers = Servers()
    with pytest.raises(UsageError, match=r"nothing reads its calls: set orchestrator\.tool_parser"):
        complete(runner(tmp_path, Tools(0), servers))
    assert not servers.asked


def test_a_program_that_asks_nothing_has_failed(tmp_path: Path):
    class Silent(Failing):
        async def rollout(self, problem: int, model: Any) -> float:
            return 1.0

    group = complete(runner(tmp_path, Silent(0), Servers()))
    assert "never asked the model" in group.failure


def test_a_full_context_ends_the_answer_and_one_that_is_full_at_once_fails_the_rollout(tmp_path: Path):
    """The program hears that there was no room."""
    said: list[tuple[int, str]] = []

    class Long(Failing):
        async def rollout(self, problem: int, model: Any) -> float:
            messages = [{"role": "user", "content": "abc"}]
            for _ in range(4):
                reply = await model.generate(messages)
                said.append((len(reply.token_ids), reply.finish_reason))
                messages += [reply.message, {"role": "user", "content": "abcdef"}]
            return 1.0

    group = complete(runner(tmp_path, Long(0), Servers(max_model_len=12)))
    assert said[-1] == (0, "length")
    assert group.usable
    assert all(len(sample.token_ids) <= 12 for sample in to_samples(group, lambda _: [1.0, 0.0]))
    said.clear()
    group = complete(runner(tmp_path / "short", Long(0), Servers(max_model_len=5)))
    assert set(said) == {(0, "length")}
    assert re.search(
        r"problem \d was never answered, so .* its first conversation has 5 tokens, .* at most 5 ",
        group.failure or "",
    )


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (lambda self, problem: 1.0, "can't be called as rollout(problem, model)"),
        (lambda self, problem, model: 1.0, "its rollout is not a coroutine"),
    ],
)
def test_what_is_no_program_is_refused_before_anything_starts(rollout: Any, message: str):
    global Wrong
    Wrong = type("Wrong", (Failing,), {"rollout": rollout, "__init__": lambda self: None})
    with pytest.raises(BadEnvironment) as raised:
        check_environment(OrchestratorConfig(environment=EnvironmentConfig(name=f"{__name__}:Wrong")))
    assert message in str(raised.value)


def test_rewards_in_parts():
    assert in_parts(0.5) == (0.5, {})
    assert in_parts({"right": True, "short": np.float32(0.25)}) == (1.25, {"right": 1.0, "short": 0.25})
    weighted = Rewards({"right": 1.0, "length": 120.0}, {"right": 2.0, "length": 0.0})
    assert in_parts(weighted) == (2.0, {"right": 1.0, "length": 120.0})
    assert in_parts(Rewards({"a": 1e37}, {"a": 10.0})) == "its parts add up to no finite number"
    assert in_parts(Rewards({"a": 1.0}, {"b": 1.0})) == "it has a weight for 'b', which is no part of it"


def test_a_long_rollout_is_replayed_in_less_than_a_second(tmp_path: Path):
    """150 turns, with a tool call after each."""
    environment, servers = Errands(150), Servers()
    one = runner(tmp_path, environment, servers)
    one.ledger.left = 10**6
    first = complete(one)
    with Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)._database as database:
        database.execute("UPDATE samples SET reward = NULL, calls = NULL, finish_reason = NULL")
    asked, begun = len(servers.asked), time.process_time()
    again = complete(runner(tmp_path, environment, servers))
    seconds = time.process_time() - begun
    assert len(servers.asked) == asked
    assert digest(again) == digest(first)
    print(json.dumps({"seconds for two": seconds}))
    assert seconds < 2 * 1.0


def test_the_example_in_the_docs_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (REPOSITORY / "docs" / "how-to" / "programs.md").read_text()
    (tmp_path / "my_game.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(name="my_game:HigherLower", args={"guesses": 6, "problems": 3})
    environment = check_environment(OrchestratorConfig(environment=config))
    group = complete(runner(tmp_path / "run", environment, Servers()))
    for rollout in group.rollouts:
        assert rollout.parts["guesses"] == len(rollout.turns) <= 6
        assert rollout.reward == rollout.parts["found"] + 0.1 * rollout.parts["short"]
