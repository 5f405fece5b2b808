"""Environments with `start` and `step`: whatever interrupts them, each world is gone on with as it was."""

import asyncio
import gc
import itertools
import math
import random
import threading
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import draws
import pytest
from clocks import LoopClock
from errands import Servers
from runs import DEADLINE, REPOSITORY
from test_programs import CHAT, RUN, VERSION, Interrupted, Power, complete, digest

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.advantages import to_samples
from cairn.orchestrator.completion.completers import COMPLETERS, ProgramRunner, make_completer
from cairn.orchestrator.environments import (
    LARGEST_SNAPSHOT,
    BadEnvironment,
    Model,
    Programs,
    Rewards,
    WorldPrograms,
    ask,
    check_environment,
)
from cairn.orchestrator.environments.registry import KINDS
from cairn.orchestrator.ledger import Ledger
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.orchestrator.rollouts import Call
from cairn.run.seeds import derive

TURNS = 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Walk:
    """A walk whose every step depends on the seed and on all answers so far. Each is noted."""

    identity = "walk-1"

    def __init__(self, turns: int = TURNS, problems: int = 3):
        self.turns, self.problems, self.max_turns = turns, problems, turns + 1
        self.power = lambda: True
        self.worlds: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self.problems

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "walk"}]

    def start(self, problem: int, seed: int) -> tuple[Any, str]:
        self.check()
        world = {"seed": seed, "path": [str(problem)], "closed": 0}
        self.worlds.append(world)
        return world, self.seen(world)

    def step(self, world: Any, answer: str) -> tuple[Any, Any, bool]:
        self.check()
        world["path"].append(answer)
        early = float(answer < "m")
        return (
            self.seen(world),
            {"early": early, "letters": 0.125 * len(answer)},
            len(world["path"]) > self.turns,
        )

    def close(self, world: Any) -> None:
        world["closed"] += 1

    def check(self) -> None:
        if not self.power():
            raise EOFError("a process that is dead takes no steps")

    def seen(self, world: Any) -> str:
        draw = random.Random(derive(world["seed"], "walk", *world["path"]))
        return "".join(draw.choices(LETTERS, k=2))


class AsyncWalk(Walk):
    """The same with coroutines."""

    async def start(self, problem: int, seed: int) -> tuple[Any, str]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().start(problem, seed)

    async def step(self, world: Any, answer: str) -> tuple[Any, Any, bool]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(world, answer)

    async def close(self, world: Any) -> None:  # type: ignore[override]
        super().close(world)


class SavedWalk(Walk):
    """It can't be walked again: what is seen depends on what the whole process has done before."""

    def __init__(self, turns: int = TURNS, problems: int = 3, binary: bool = False):
        super().__init__(turns, problems)
        self.binary, self.restored = binary, 0

    def seen(self, world: Any) -> str:
        return super().seen(world) + LETTERS[sum(len(one["path"]) for one in self.worlds) % 26]

    def snapshot(self, world: Any) -> Any:
        return "\n".join([str(world["seed"]), *world["path"]]).encode() if self.binary else world

    def restore(self, problem: int, seed: int, snapshot: Any) -> Any:
        self.restored += 1
        if self.binary:
            found, *path = snapshot.decode().split("\n")
            snapshot = {"seed": int(found), "path": path, "closed": 0}
        assert snapshot["seed"] == seed
        (known,) = (world for world in self.worlds if world["seed"] == seed)
        assert known["path"][: len(snapshot["path"])] == snapshot["path"]
        known.update(snapshot)
        return known


class OneByOne(WorldPrograms):
    """Who is killed while it records one rollout's step does not kill another's on its way."""

    async def rollout(self, problem: int, model: Model) -> Any:
        async with self.__dict__.setdefault("alone", asyncio.Lock()):
            return await super().rollout(problem, model)


def runner(
    folder: Path, environment: Any, servers: Servers, kind: type[Programs] = OneByOne, **settings: Any
) -> ProgramRunner:
    """One that samples answers of up to six tokens in pieces of two."""
    servers.version = VERSION
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="my_walk:Walk"),
        sampling=SamplingConfig(max_tokens=6, chunk_tokens=2),
        **{"samples_per_prompt": 2, "reward_retries": 1, "reward_retry_seconds": 0.0, **settings},
    )
    folder.mkdir(exist_ok=True)
    ledger = Interrupted(folder / "ledger.sqlite", RUN, None, 0)
    return ProgramRunner(config, kind(environment, config), CHAT, servers, ledger, {VERSION})


def interrupted(folder: Path, environment: Any, servers: Servers, **settings: Any) -> tuple[Any, int]:
    """What comes out of being killed after each recorded call, and the number of deaths."""
    for deaths in itertools.count():
        one = runner(folder, environment, servers, **settings)
        one.ledger.left = 0
        environment.power = lambda ledger=one.ledger: ledger.left >= 0
        try:
            return complete(one), deaths
        except Power:
            pass
    raise AssertionError


@draws.seldom
@pytest.mark.parametrize("kind", [Walk, AsyncWalk])
def test_a_world_is_interrupted_at_every_call(kind: type[Walk], tmp_path: Path):
    """Each token is sampled once, and each new world is led through the very steps that are recorded."""
    calm, calm_servers = Walk(), Servers()
    group = complete(runner(tmp_path / "calm", calm, calm_servers))
    assert [len(rollout.turns) for rollout in group.rollouts] == [TURNS, TURNS]
    environment, servers = kind(), Servers()
    found, deaths = interrupted(tmp_path / "run", environment, servers)
    assert deaths > 2 * 2 * TURNS
    assert found == group
    assert digest(found) == digest(group)
    assert Counter(seed for seed, _ in servers.asked) == Counter(seed for seed, _ in calm_servers.asked)
    assert [rollout.diverged for rollout in found.rollouts] == [0, 0]
    paths = {world["seed"]: world["path"] for world in calm.worlds}
    for world in environment.worlds:
        assert world["path"] == paths[world["seed"]][: len(world["path"])]
    assert all(world["closed"] == 1 for world in calm.worlds)
    worlds = Counter(world["seed"] for world in environment.worlds)
    assert sorted(worlds.values()) == [TURNS + 1] * 2  # at the start, and for each step after a death
    for seed, path in paths.items():  # a step's effect is in one more world with each death after it
        lengths = sorted(len(world["path"]) for world in environment.worlds if world["seed"] == seed)
        assert lengths == [*range(1, len(path)), len(path)]


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True])
def test_a_world_that_can_not_be_walked_again_is_restored(binary: bool, tmp_path: Path):
    """Each step is taken once, however often everything is killed; nothing of the snapshots stays."""
    environment, servers = SavedWalk(binary=binary), Servers()
    found, deaths = interrupted(tmp_path / "run", environment, servers)
    assert deaths > 2 * 2 * TURNS
    assert environment.restored == 2 * TURNS
    assert [len(world["path"]) for world in environment.worlds] == [TURNS + 1] * 2
    group = complete(runner(tmp_path / "calm", SavedWalk(), Servers()))
    assert found == group
    assert digest(found) == digest(group)
    assert snapshots(tmp_path / "run") == []


def snapshots(folder: Path) -> list[tuple]:
    ledger = Ledger(folder / "ledger.sqlite", RUN, None, 0)
    try:
        return ledger._database.execute("SELECT sample, number, snapshot FROM snapshots").fetchall()
    finally:
        ledger.close()


def test_only_the_newest_snapshot_of_a_rollout_is_kept(tmp_path: Path):
    """With the step it was taken after, in one transaction."""
    one = runner(tmp_path, SavedWalk(binary=True), Servers(longest=2), reward_retries=0)
    one.ledger.left = 5
    with pytest.raises(Power):
        complete(one)
    (snapshot,) = snapshots(tmp_path)
    calls = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0).calls(0, snapshot[0])
    assert [type(call).__name__ for call in calls] == ["Call", "Call", "Turn", "Call", "Turn", "Call"]
    assert (snapshot[1], len(snapshot[2].split(b"\n"))) == (5, 4)


class Fickle(Walk):
    """Its world is another one after a restart, in whatever a test wants."""

    lives = 0
    different: tuple[str, int] = ("", 0)

    def step(self, world: Any, answer: str) -> tuple[Any, Any, bool]:
        observation, reward, done = super().step(world, answer)
        what, number = self.different
        if self.lives and len(world["path"]) == number + 1:
            observation = "zz" if what == "observation" else observation
            reward = {"early": 2.0} if what == "reward" else reward
            done = True if what == "done" else done
        return observation, reward, done

    def start(self, problem: int, seed: int) -> tuple[Any, str]:
        world, observation = super().start(problem, seed)
        return world, "zz" if self.lives and self.different[0] == "start" else observation


@pytest.mark.parametrize(
    ("different", "message"),
    [
        (("start", 0), r"start, taken again after a restart, leads to something else than before: observ"
         r"ation was .*, and is .*'zz'"),
        (("observation", 2), r"step 2, taken again .* observation was .*, and is \[.*'zz'"),
        (("reward", 1), r"step 1, taken again .* reward was .*'letters'.*, and is \{'parts': \{'early': 2"),
        (("done", 3), r"step 3, taken again .* before: done was False, and is True"),
    ],
)  # fmt: skip
def test_a_world_that_is_another_one_after_a_restart_has_failed(
    different: tuple[str, int], message: str, tmp_path: Path
):
    """It is never gone on with; the reason names the step and what to do."""
    environment, servers = Fickle(), Servers(longest=2)
    environment.different = different
    one = runner(tmp_path, environment, servers)
    one.ledger.left = 2 + 2 * 4
    with pytest.raises(Power):
        complete(one)
    asked, worlds = len(servers.asked), len(environment.worlds)
    environment.lives += 1
    group = complete(runner(tmp_path, environment, servers))
    (failed, well) = sorted(group.rollouts, key=lambda rollout: rollout.failed is None)
    assert failed.failed is not None
    found = f"environment 'my_walk:Walk': rollout {group.rollouts.index(failed)} of problem 2: "
    assert failed.failed.startswith(found)
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(failed.failed))
    assert failed.failed.endswith("give the environment snapshot(world) and restore(problem, seed, snapshot)")
    assert well.failed is None  # it began after the restart
    assert {world["closed"] for world in environment.worlds[worlds:]} == {1}
    recorded = {seed for seed, _ in servers.asked[:asked]}
    assert recorded.isdisjoint(seed for seed, _ in servers.asked[asked + 1 :])


# What a rollout is


class Given(Walk):
    """Its start and each step return what a test wants; a function is called."""

    max_turns = 3

    def __init__(self, step: Any = ("ab", 0.5, False), start: Any = None):
        super().__init__()
        self.given, self.first, self.max_turns = step, start, 3
        self.answers: list[str] = []

    def start(self, problem: int, seed: int) -> Any:
        world = super().start(problem, seed)
        return world if self.first is None else self.first

    def step(self, world: Any, answer: str) -> Any:
        self.answers.append(answer)
        return self.given() if callable(self.given) else self.given


def test_a_rollout_ends_after_max_turns_with_the_sum_of_its_rewards(tmp_path: Path):
    environment = Given()
    group = complete(runner(tmp_path, environment, Servers()))
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]
    assert [rollout.parts for rollout in group.rollouts] == [{"step": 1.5}] * 2
    assert group.rewards == [1.5, 1.5]
    assert [world["closed"] for world in environment.worlds] == [1, 1]
    conversation = CHAT.tokenizer.decode(to_samples(group, lambda group: group.rewards)[0].token_ids)
    seen = environment.seen(environment.worlds[0])
    assert conversation.startswith(f"<system>walk<user>{seen}<assistant>{environment.answers[0]}")
    assert conversation.count("<user>ab") == 2


def test_observations_may_be_messages_and_rewards_weighted_parts(tmp_path: Path):
    environment = Given(
        step=([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
              Rewards({"right": 1.0, "length": 8.0}, {"length": 0.0}), False),
        start=({}, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]),
    )  # fmt: skip
    group = complete(runner(tmp_path, environment, Servers()))
    assert group.rewards == [3.0, 3.0]
    assert group.rollouts[0].parts == {"right": 3.0, "length": 24.0}
    conversation = CHAT.tokenizer.decode(to_samples(group, lambda group: group.rewards)[0].token_ids)
    assert conversation.startswith("<system>walk<system>s<user>u<assistant>")
    assert conversation.count("<user>x<user>y") == 2


def test_a_full_context_ends_the_rollout(tmp_path: Path):
    """With the rewards so far: an answer for which there was no room is no step."""
    environment = Given()
    environment.max_turns = 50
    group = complete(runner(tmp_path, environment, Servers(max_model_len=40)))
    for rollout in group.rollouts:
        assert rollout.turns[-1].finish_reason == "length"
        steps = sum(bool(turn.token_ids) for turn in rollout.turns)
        assert 0 < steps < 50
        assert rollout.reward == 0.5 * steps


def raises() -> None:
    raise ZeroDivisionError("division by zero")


def leaves() -> None:
    raise SystemExit(3)


FAILURES = {
    "raises": (raises, "rollout 0 of problem 2: step 1 raised ZeroDivisionError: division by zero"),
    "leaves": (leaves, "step 1 raised SystemExit: 3"),
    "no triple": (("a", 1.0), r"step 1: it must return \(observation, reward, done\), and has returned"),
    "no reward": (("a", None, False), "step 1: it must return a finite reward, but it is not one finite num"),
    "NaN": (("a", math.nan, False), "step 1: it must return a finite reward"),
    "not done": (("a", 1.0, None), "step 1: done must be True or False, and is None"),
    "no text": ((None, 1.0, False), "step 1: an observation must be text or a list of messages, and it ret"),
    "no message": (([{"role": "user"}], 1.0, False), "message 0 has no content that is text"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_step_that_fails_is_tried_again_on_a_new_world_and_then_has_failed(case: str, tmp_path: Path):
    step, message = FAILURES[case]
    environment, servers = Given(step), Servers(longest=2)
    group = complete(runner(tmp_path, environment, servers))
    reason = group.failure.replace("rollout 1", "rollout 0")
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(reason)), reason
    assert len({seed for seed, _ in servers.asked}) == len(servers.asked)
    assert [world["closed"] for world in environment.worlds] == [1] * len(environment.worlds)
    assert len(environment.worlds) == 2 + 2  # the first, and one to try again in


def test_weights_that_change_have_no_sum(tmp_path: Path):
    weights = itertools.count()
    environment = Given(lambda: ("a", Rewards({"right": 1.0}, {"right": float(next(weights))}), False))
    failure = complete(runner(tmp_path, environment, Servers())).failure
    assert "step must give part 'right' of the reward the same weight each time, and has given it" in failure


class Slow:
    """A world whose step takes a while, on a thread, once the step before it is recorded."""

    def __init__(self, clock: LoopClock):
        self.clock, self.recorded = clock, threading.Semaphore(1)

    def __len__(self) -> int:
        return 3

    def start(self, problem: int, seed: int) -> tuple[int, str]:
        return seed, "go"

    def step(self, world: int, answer: str) -> tuple[None, float, bool]:
        assert self.recorded.acquire(timeout=DEADLINE)
        self.clock.add(0.15)
        return None, 1.0, True


def test_a_world_that_waits_for_a_thread_has_time(
    tmp_path: Path, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
):
    """Together the steps take longer than one may."""
    settings = {"samples_per_prompt": 16, "reward_threads": 1, "reward_timeout": 2.0, "reward_retries": 0}
    environment = Slow(loop_clock)
    one = runner(tmp_path, environment, Servers(), kind=WorldPrograms, **settings)
    record = one.ledger.record_call

    def then_go_on(place: int, sample: int, call: Call, snapshot: Any = None) -> None:
        record(place, sample, call, snapshot)
        if call.name.startswith("step"):
            environment.recorded.release()

    monkeypatch.setattr(one.ledger, "record_call", then_go_on)
    assert complete(one).rewards == [1.0] * 16


def test_a_start_that_is_none_has_failed(tmp_path: Path):
    group = complete(runner(tmp_path, Given(start="abc"), Servers()))
    assert "start: it must return a pair (world, observation), and has returned 'abc'" in group.failure


def test_a_step_that_fails_once_is_taken_again_after_those_before_it(tmp_path: Path):
    """What came of it is as if it had not failed."""
    calm = complete(runner(tmp_path / "calm", Walk(4), Servers()))

    class Once(Walk):
        failed: set[int] = set()

        def step(self, world: Any, answer: str) -> Any:
            if len(world["path"]) == 3 and world["seed"] not in self.failed:
                self.failed.add(world["seed"])
                raise ConnectionError("it was away")
            return super().step(world, answer)

    environment = Once(4)
    group = complete(runner(tmp_path / "run", environment, Servers()))
    assert len(environment.failed) == 2
    assert group == calm
    assert sorted(len(world["path"]) for world in environment.worlds) == [3, 3, 5, 5]


def test_a_world_is_closed_once_the_step_that_took_too_long_has_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Whoever closed it before would pull it from under the step; the next world need not wait for that."""
    free = threading.Event()
    running: list[bool] = []

    class Hanging(Walk):
        def step(self, world: Any, answer: str) -> Any:
            if len(self.worlds) == 1:
                free.wait(DEADLINE)
                running.append(bool(world["closed"]))
            return super().step(world, answer)

        def close(self, world: Any) -> None:
            super().close(world)
            if world is self.worlds[0]:
                closed.set()

    closed = threading.Event()
    environment = Hanging(2)
    times = {"reward_timeout": 2, "reward_retries": 20}  # the next world's steps may take too long as well
    one = runner(tmp_path, environment, Servers(), reward_threads=2, **times)

    async def both() -> Any:
        found = await one.complete(Prompts(one.ledger).issue(0))
        first = environment.worlds[0]
        assert first["closed"] == 0
        free.set()
        assert await asyncio.to_thread(closed.wait, DEADLINE)
        assert first["closed"] == 1
        one.environment.close()
        return found

    group = asyncio.run(both())
    one.ledger.close()
    assert group.failure is None
    assert running == [False]
    assert "Exception in callback" not in caplog.text


def test_nothing_is_left_of_a_world_in_which_a_step_runs_when_the_loop_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The step ends while the loop does: nobody begins to close the world then."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow(Walk):
        def step(self, world: Any, answer: str) -> tuple[Any, Any, bool]:
            begun.set()
            assert go_on.wait(DEADLINE)
            return super().step(world, answer)

    before = threading.enumerate()
    environment = Slow()
    one = runner(tmp_path, environment, Servers())
    calls = one.environment.calls

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            go_on.set()
            calls.submit(ended.set)  # on the thread of the step, after it
            assert ended.wait(DEADLINE)
            raise

    async def test() -> None:
        other = asyncio.ensure_future(calls.on_own_loop(last))
        work = asyncio.ensure_future(one.complete(Prompts(one.ledger).issue(0)))
        assert await asyncio.to_thread(begun.wait, DEADLINE)
        work.cancel()
        await asyncio.wait({work})
        loop, threads = calls._loop, set(threading.enumerate()) - set(before)  # pyright: ignore[reportPrivateUsage]
        assert loop is not None
        one.environment.close()
        (own,) = (thread for thread in threads if thread.name == "environment loop")
        await asyncio.to_thread(own.join, DEADLINE)
        assert loop.is_closed()
        assert asyncio.all_tasks(loop) == set()
        other.cancel()

    gc.collect()  # what other tests have left
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(test())
        gc.collect()
    one.ledger.close()
    assert [world["closed"] for world in environment.worlds] == [0]
    assert "destroyed" not in caplog.text


@pytest.mark.filterwarnings("error")
def test_nothing_is_left_of_a_world_that_waits_for_a_thread_when_the_loop_ends(tmp_path: Path):
    """Its time stands still, and nobody lets it go on: that is no error when it is collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests have left
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Walk):
        def step(self, world: Any, answer: str) -> tuple[Any, Any, bool]:
            begun.set()
            assert go_on.wait(60)
            return super().step(world, answer)

    one = runner(tmp_path, Slow(), Servers(), WorldPrograms, reward_threads=1)

    async def test() -> None:
        work = asyncio.ensure_future(one.complete(Prompts(one.ledger).issue(0)))
        assert await asyncio.to_thread(begun.wait, 60)
        jobs = one.environment.calls._jobs  # pyright: ignore[reportPrivateUsage]
        async with asyncio.timeout(60):
            while not jobs.qsize():
                await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait({work})

    asyncio.run(test())
    one.environment.close()
    go_on.set()
    one.ledger.close()
    gc.collect()


def test_a_world_that_does_not_close_costs_no_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Stuck(Given):
        def close(self, world: Any) -> None:
            raise OSError("it is stuck")

    assert complete(runner(tmp_path, Stuck(), Servers())).rewards == [1.5, 1.5]
    assert (
        "environment 'my_walk:Walk': a world of problem 2: close raised OSError: it is stuck" in caplog.text
    )


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        (
            bytes(LARGEST_SNAPSHOT + 1),
            f"the snapshot after 'start' has {LARGEST_SNAPSHOT + 1} bytes, and may",
        ),
        ({1, 2}, "the snapshot after 'start' must be JSON"),
    ],
)
def test_a_snapshot_that_can_not_be_kept_is_a_failure(snapshot: Any, message: str, tmp_path: Path):
    class Large(SavedWalk):
        def snapshot(self, world: Any) -> Any:
            return snapshot

    assert message in complete(runner(tmp_path, Large(), Servers(), reward_retries=0)).failure


def test_the_orchestrator_completes_groups_of_every_kind():
    """Worlds are programs to it, as tools are."""
    for kind in KINDS.values():
        assert any(base in COMPLETERS for base in kind.__mro__), kind
    with ask(Walk(), config := OrchestratorConfig()) as asked:
        made = make_completer(config, asked, CHAT, Servers(), Ledger.__new__(Ledger), frozenset())
    assert (type(asked), type(made)) == (WorldPrograms, ProgramRunner)


# What is no such environment


class Wrong(Walk):
    def __init__(self, **what: Any):
        super().__init__()
        self.__dict__ |= what


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"start": None}, "it has no method start(problem, seed)"),
        ({"step": lambda world: None}, "its step can't be called as step(world, answer)"),
        ({"close": lambda: None}, "its close can't be called as close(world)"),
        ({"snapshot": lambda world: 1}, "it has one of snapshot(world) and restore(problem, seed, snapshot)"),
        ({"max_turns": 0}, "its max_turns is 0"),
        ({"problems": 0}, "it has no problems"),
        ({"messages": lambda problem: "walk"}, "messages(0) must return a list of messages"),
    ],
)
def test_what_is_no_world_is_refused_before_anything_starts(what: Any, message: str):
    config = EnvironmentConfig(name=f"{__name__}:Wrong", args=what)
    with pytest.raises(BadEnvironment) as raised:
        check_environment(OrchestratorConfig(environment=config))
    assert message in str(raised.value)


# Snapshots of programs


class Counters:
    """Programs that add to a counter of their own, which is opened as it was left."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.opened: list[tuple[str, int]] = []
        self.power = lambda: True
        self.alone: dict[Any, asyncio.Lock] = {}

    def __len__(self) -> int:
        return 3

    def open(self, kept: Any) -> list[int]:
        if not self.power():
            raise EOFError("a process that is dead opens nothing")
        self.opened.append((kept.after, kept.value) if kept else ("", 0))
        return [kept.value if kept else 0]

    async def rollout(self, problem: int, model: Any) -> float:
        async with self.alone.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            counter: list[int] = []
            messages: list[Any] = [{"role": "user", "content": "a"}]

            async def add(number: int) -> int:
                if not counter:
                    kept = await model.snapshot()
                    counter.extend(await model.each_time(partial(self.open, kept)))
                assert self.power()
                counter[0] += number
                self.made.append(counter[0])
                return counter[0]

            found = 0
            for number in range(1, 4):
                messages.append((await model.generate(messages)).message)
                call = partial(add, number)
                found = await model.once(f"add {number}", call, snapshot=lambda: counter[0])
                messages.append({"role": "user", "content": LETTERS[found]})
            return float(found)


def test_a_program_may_keep_a_snapshot_of_its_world(tmp_path: Path):
    """And goes on with it: what is not recorded is made each time that the program is started."""
    environment, servers = Counters(), Servers(longest=2)
    group, _ = interrupted(tmp_path, environment, servers, kind=Programs)
    assert group.rewards == [6.0, 6.0]
    assert environment.made == [1, 3, 6] * 2
    assert environment.opened == [("", 0), ("add 1", 1), ("add 2", 3)] * 2
    assert snapshots(tmp_path) == []


def test_the_example_in_the_docs_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (REPOSITORY / "docs" / "how-to" / "worlds.md").read_text()
    example = next(block for block in page.split("```python\n") if block.startswith("# my_world.py"))
    (tmp_path / "my_world.py").write_text(example.partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(name="my_world:Corridor", args={"problems": 3})
    environment = check_environment(OrchestratorConfig(environment=config))
    group, deaths = interrupted(tmp_path / "run", environment, Servers())
    assert deaths > 8
    for rollout in group.rollouts:
        steps, found = len(rollout.turns), rollout.reward > 0
        assert rollout.parts == {"step": rollout.reward}
        assert rollout.reward == pytest.approx(1.0 - 0.1 * (steps - 1) if found else -0.1 * 8)
