"""Taking turns on one GPU: servers sleep while a step is trained, whoever dies in between."""

import asyncio
import contextlib
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from one_rank import one_rank
from ray.exceptions import RayTaskError
from runs import DEADLINE
from test_pipeline import (
    ATTEMPT,
    PROMPTS,
    Servers,
    Trainer,
    assert_promises_kept,
    begin,
    configuration,
    for_a_while,
    go_on,
    in_folder,
    places,
    see_through,
)
from test_server_pool import ask, in_loop, servers, until

from cairn.checkpoint.store import CheckpointStore
from cairn.config.cli import load
from cairn.config.environment import EnvironmentConfig, EvalConfig
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.orchestrator import OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.inference import vllm_command
from cairn.inference.client import InferenceClient
from cairn.launch.plan.gpu_assignment import placed
from cairn.launch.roles import servers_turn
from cairn.launch.supervise.ranks import Ranks, RankSlot, _collect, _Ended
from cairn.orchestrator.loop import Orchestrator
from cairn.policy.errors import ServerAsleep, ServerUnavailable
from cairn.policy.generation import SamplingParams
from cairn.run import faults
from cairn.run.batches import FROM_TEXT, RLBatch, Sample, batch_path, write_batch
from cairn.run.directory import RunDirectory
from cairn.run.errors import OutOfMemory, UsageError
from cairn.run.exits import END_SERVER
from cairn.run.machine import machine_of
from cairn.run.messages import BatchHeader, PolicyVersions, ShippedBatch
from cairn.run.waiting import DeadlinePassed
from cairn.trainer.backends.fsdp2 import FSDP2
from cairn.trainer.group import RankGroup
from cairn.trainer.publishing.publisher import VersionPublisher, make_sharing
from cairn.trainer.publishing.transports import Filling, Served, Transport
from cairn.trainer.tasks.orchestrator_link import ShippedBatches

__all__ = ["configuration", "one_rank"]  # fixtures

# Whose turn it is


def test_the_trainers_turn_is_from_the_note_to_the_announcement(tmp_path: Path):
    versions = PolicyVersions(tmp_path / "weights")
    assert not versions.may_train(ATTEMPT, 1)
    versions.hand_over(ATTEMPT, until=3)
    assert [versions.may_train(ATTEMPT, step) for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert not versions.may_train(replace(ATTEMPT, number=2), 1), "of another attempt"
    versions.announce(ATTEMPT, 2, save=False, last=False)
    assert versions.may_train(ATTEMPT, 3)
    versions.announce(ATTEMPT, 3, save=False, last=False)
    assert not versions.may_train(ATTEMPT, 3), "the servers may be awake by now"
    versions.take_back()
    versions.forget_before(4)
    assert versions.trainers_turn(ATTEMPT) is None
    versions.hand_over(ATTEMPT, until=None)
    assert versions.may_train(ATTEMPT, 3), "the run has ended, but for a trainer that died in its last save"


def test_a_new_attempt_removes_the_note_also_from_linked_memory(tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "of others").touch()
    (tmp_path / "weights").symlink_to(tmp_path / "memory")
    versions = PolicyVersions(tmp_path / "weights")
    versions.hand_over(ATTEMPT, until=1)
    versions.clear()
    assert versions.handed_over(ATTEMPT) is None
    assert (tmp_path / "memory" / "of others").exists()


# The pool


def did(fake: Any) -> list[str]:
    """What a server was told since the last look; sleeping twice is sleeping."""
    told, fake.did = fake.did, []
    return [what for place, what in enumerate(told) if place == 0 or what != told[place - 1]]


@in_loop
async def test_servers_sleep_and_are_woken_before_they_get_the_next_weights():
    async with servers(2) as (pool, fakes):
        await pool.serve("/w", "v1")
        await pool.sleep()
        assert all(fake.asleep for fake in fakes)
        assert pool.take_metrics()["servers/healthy"] == 2, "asleep is not dead"
        await asyncio.sleep(0.1)
        assert all(fake.asleep for fake in fakes), "whoever watches over them lets them sleep"
        await pool.serve("/w", "v2")
        assert [did(fake) for fake in fakes] == [["v1", "sleep", "wake", "v2"]] * 2
        assert (await ask(pool, 0, ("v2",)))[0].weight_versions[0].version == "v2"


@in_loop
async def test_a_server_that_restarts_is_put_to_sleep_before_the_turn_is_handed_over():
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        await fake.die()
        sleeping = asyncio.create_task(pool.sleep())
        await asyncio.sleep(0.1)
        assert not sleeping.done()
        await fake.start()
        await sleeping
        assert fake.asleep
        await pool.serve("/w", "v2")
        assert did(fake) == ["v1", "sleep", "wake", "v2"]


@in_loop
async def test_a_server_that_cannot_sleep_is_an_error_with_its_reason():
    async with servers(1, retry_for=0.3) as (pool, (fake,)):
        await pool.serve("/w", "v1")

        async def fail(path: str, body: dict) -> tuple[int, Any] | None:
            return (500, {"error": {"message": "no host memory"}}) if path == "/cairn/sleep" else None

        fake.fault = fail
        with pytest.raises(ServerUnavailable, match="no host memory"):
            await pool.sleep()


@in_loop
async def test_a_new_pool_lets_a_server_sleep_until_it_has_something_to_serve():
    """As when the orchestrator dies while a step is trained."""
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        fake.asleep = True
        await pool.close()
        async with type(pool)([fake.url], token="t") as second:
            await second.wait_ready(DEADLINE)
            await asyncio.sleep(0.1)
            assert fake.asleep
            await second.serve("/w", "v2")
            assert did(fake) == ["v1", "wake", "v2"]


@in_loop
async def test_a_server_that_somebody_put_to_sleep_is_woken_and_asked_again(caplog: pytest.LogCaptureFixture):
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        async with InferenceClient(fake.url, "t", retry_for=0) as client:
            assert (await client.sleep()).asleep
            with pytest.raises(ServerAsleep):
                await client.generate([1], SamplingParams(max_tokens=1, seed=1))
            assert (await client.status()).weight_version == "v1"
        assert (await ask(pool, 0))[0].weight_versions[0].version == "v1"
        assert "asleep" in caplog.text
        assert did(fake) == ["v1", "sleep", "wake"], "it has its weights"


@in_loop
async def test_weights_that_come_while_a_server_joins_asleep_wake_it():
    """`serve` begins while a restarted server is being put to sleep."""
    async with servers(1) as (pool, (fake,)):
        await pool.serve("/w", "v1")
        await fake.die()
        held = asyncio.Event()

        async def hold(path: str, body: dict) -> None:
            if path == "/cairn/sleep":
                held.set()
                await asyncio.sleep(0.1)

        sleeping = asyncio.create_task(pool.sleep())
        fake.fault = hold
        await fake.start()
        await held.wait()
        await pool.serve("/w", "v2")
        await until(lambda: not fake.asleep and fake.version == "v2")
        sleeping.cancel()


# The orchestrator


@dataclass
class Sleepers(Servers):
    """Servers that can sleep, and outlive orchestrators."""

    asleep: bool = False
    naps: int = 0

    async def sleep(self) -> None:
        await self._while()
        self.naps += not self.asleep
        self.asleep = True

    async def serve(self, folder: str, version: str, **options: Any) -> None:
        await self._while()
        self.asleep = False
        await super().serve(folder, version, **options)

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        assert not self.asleep
        return await super().generate(*arguments, **options)


@dataclass
class Turned(Trainer):
    """A trainer that waits for its turn, and may die with what it has done since its checkpoint."""

    servers: Sleepers | None = None

    async def batch(self, step: int) -> RLBatch:
        while not self.run.versions.may_train(self.attempt, step):
            await asyncio.sleep(0.001)
        batch = await super().batch(step)
        await self.asleep_for_a_while()
        return batch

    async def asleep_for_a_while(self) -> None:
        """The step itself."""
        for _ in range(3):
            assert self.servers is not None
            assert self.servers.asleep, "trained beside a server that is awake"
            await asyncio.sleep(0.001)


def of_turns(configuration: OrchestratorConfig, folder: Path, steps: int) -> OrchestratorConfig:
    return in_folder(configuration, folder, steps, 0).model_copy(update={"colocated": True})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_step_is_trained_beside_a_server_that_is_awake(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """The orchestrator is killed at random times, half of them with the server asleep."""
    draw = random.Random(seed)
    config = of_turns(configuration, tmp_path / "run", 7)
    run = begin(config, ATTEMPT)
    sleepers = Sleepers(draw)
    trainer = Turned(run, ATTEMPT, 7, draw, servers=sleepers)
    deaths = [draw.uniform(0.001, 0.05) for _ in range(draw.randrange(4))]
    asyncio.run(see_through(config, ATTEMPT, trainer, sleepers, deaths))
    assert_promises_kept(trainer.trained, 0, config.seed)
    assert sorted(places(trainer.trained)) == list(range(7 * PROMPTS))
    assert sleepers.naps == 7
    assert sleepers.asleep, "nothing is sampled from the last policy"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_last_policy_is_evaluated_and_the_servers_sleep_again(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """The orchestrator is killed at random times; the trainer takes no step while a policy is evaluated."""
    draw = random.Random(seed)
    words = EvalConfig(
        name="words", environment=EnvironmentConfig(args={"problems": 6, "seed": 5}), samples=2, interval=3
    )
    config = of_turns(configuration, tmp_path / "run", 7).model_copy(update={"eval": [words]})
    run = begin(config, ATTEMPT)
    sleepers = Sleepers(draw)
    trainer = Turned(run, ATTEMPT, 7, draw, servers=sleepers)
    deaths = [draw.uniform(0.02, 0.2) for _ in range(seed % 3)]
    asyncio.run(see_through(config, ATTEMPT, trainer, sleepers, deaths))
    assert [row["step"] for row in run.evals.rows()] == [0, 3, 6, 7]
    assert sleepers.asleep
    assert run.versions.may_train(ATTEMPT, 7), "a trainer that dies in its last save may take steps again"


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3, 6])
def test_an_evaluation_that_a_death_interrupts_goes_on_although_the_next_batch_is_shipped(
    configuration: OrchestratorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    """The trainer gets that batch only when the policy before it is evaluated."""
    draw = random.Random(step)
    words = EvalConfig(
        name="words", environment=EnvironmentConfig(args={"problems": 60, "seed": 5}), samples=2, interval=3
    )
    config = of_turns(configuration, tmp_path / "run", 7).model_copy(update={"eval": [words]})
    run = begin(config, ATTEMPT)
    sleepers = Sleepers(draw)
    trainer = Turned(run, ATTEMPT, 7, draw, servers=sleepers)

    async def both() -> None:
        training = asyncio.create_task(trainer.train())
        first = Orchestrator(config, ATTEMPT, sleepers)
        evaluate, shipped = first.evaluations.run, asyncio.Event()

        async def after_the_batch(of: int, **how: bool) -> None:
            if of == step:
                await shipped.wait()
            await evaluate(of, **how)

        monkeypatch.setattr(first.evaluations, "run", after_the_batch)
        running = asyncio.create_task(first.run())
        while first.state.shipped.newest.step <= step:
            assert not running.done()
            await asyncio.sleep(0.001)
        shipped.set()
        for _ in range(10):  # a few of its answers
            await asyncio.sleep(0)
        assert first.evaluations.due(step)
        running.cancel()
        await asyncio.wait([running])
        assert run.versions.trainers_turn(ATTEMPT) is None
        assert await Orchestrator(config, ATTEMPT, sleepers).run() == 7
        await training

    asyncio.run(asyncio.wait_for(both(), DEADLINE))
    assert [row["step"] for row in run.evals.rows()] == [0, 3, 6, 7]
    assert_promises_kept(trainer.trained, 0, config.seed)


@pytest.mark.parametrize("seed", range(4))
def test_steps_whose_batches_are_there_are_taken_again_in_one_turn(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """Everything dies; the next attempt goes on from a checkpoint some steps before the newest batch."""
    draw = random.Random(seed)
    turns, expected = turns_again(configuration, tmp_path, draw, draw.uniform(0.1, 0.3))
    # If all answers to a batch were in the ledger when everything died, it is ready in that turn, too.
    assert turns in (expected, expected - 1)


@pytest.mark.parametrize("ready", [6, 7, 8])
def test_a_batch_whose_answers_are_in_the_ledger_is_trained_in_the_same_turn(
    configuration: OrchestratorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: int
):
    """Everything dies when they are; the next attempt goes on from step 4."""
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", f"orchestrator.before_ship:EIO@{ready}")
    turns, expected = turns_again(configuration, tmp_path, random.Random(ready), 60)
    assert turns == expected - 1


def test_the_trainer_stops_at_each_policy_that_is_to_be_evaluated(
    configuration: OrchestratorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also if the next batches are there, from which it could go on."""
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", "orchestrator.before_ship:EIO@8")
    words = EvalConfig(name="words", environment=EnvironmentConfig(args={"problems": 2}), interval=3)
    config = configuration.model_copy(update={"eval": [words]})
    turns, together = turns_again(config, tmp_path, random.Random(1), 60)
    assert turns in (together + 1, together)  # 5 and 6, then 7, then 8, which may be in the ledger
    assert [row["step"] for row in RunDirectory(tmp_path / "run").evals.rows()] == [0, 3, 6, 8]


def turns_again(
    configuration: OrchestratorConfig, tmp_path: Path, draw: random.Random, seconds: float
) -> tuple[int, int]:
    """Run until everything dies, and go on from the newest checkpoint.

    Returns:
        The turns of the trainer since then, and how many they are if the batches that are there share one.
    """
    config = of_turns(configuration, tmp_path / "run", 8)
    run = begin(config, ATTEMPT)
    sleepers = Sleepers(draw)
    first = Turned(run, ATTEMPT, 8, draw, save_every=4, servers=sleepers)
    with contextlib.suppress(OSError):
        asyncio.run(for_a_while(config, ATTEMPT, first, sleepers, seconds))
    os.environ.pop("CAIRN_FAULT", None)
    start = max(CheckpointStore(run.checkpoints).steps(), default=0)
    attempt = go_on(config, start, branch="branch_1")
    run.set_batches_aside(tmp_path / "aside", attempt)
    run.forget_evaluations(attempt, start)
    begin(config, attempt)
    sleepers = Sleepers(draw)
    second = Turned(run, attempt, 8, draw, save_every=4, servers=sleepers)
    there = sum(step > start for step in run.batch_steps())
    if start < 8:
        asyncio.run(see_through(config, attempt, second, sleepers, []))
    whole = first.trained[:start] + second.trained
    assert_promises_kept(whole, 0, config.seed)
    return sleepers.naps, 8 - start - max(there - 1, 0)


@dataclass
class SlowSleepers(Sleepers):
    """They take long to load weights, and wake up in the middle of it."""

    serving: int = 0
    overlaps: int = 0

    async def sleep(self) -> None:
        self.overlaps += self.serving
        await super().sleep()

    async def serve(self, folder: str, version: str, **options: Any) -> None:
        self.serving += 1
        await asyncio.sleep(0.05)
        await super().serve(folder, version, **options)
        self.serving -= 1


def test_a_batch_that_is_ready_before_the_servers_are_does_not_overtake_them(
    configuration: OrchestratorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The orchestrator dies when all answers to a batch are in its ledger; the next one ships at once."""
    config = of_turns(configuration, tmp_path / "run", 5)
    run = begin(config, ATTEMPT)
    sleepers = SlowSleepers(random.Random(1))
    trainer = Turned(run, ATTEMPT, 5, random.Random(2), servers=sleepers)
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", "orchestrator.before_ship:EIO@3")

    async def both() -> None:
        training = asyncio.create_task(trainer.train())
        with pytest.raises(OSError, match="before_ship"):
            await Orchestrator(config, ATTEMPT, sleepers).run()
        assert await Orchestrator(config, ATTEMPT, sleepers).run() == 5
        await training

    asyncio.run(asyncio.wait_for(both(), DEADLINE))
    assert sleepers.overlaps == 0
    assert sleepers.naps == 5
    assert_promises_kept(trainer.trained, 0, config.seed)


def test_a_trainer_that_takes_steps_again_waits_for_the_next_batch(tmp_path: Path):
    """It died after it had announced the policy of step 3, so the server generates batch 4 meanwhile."""
    run = RunDirectory(tmp_path)
    run.versions.hand_over(ATTEMPT, until=3)
    for step in (1, 2, 3):
        run.versions.announce(ATTEMPT, step, save=False, last=False)
    assert not run.versions.may_train(ATTEMPT, 2)
    run.versions.hand_over(ATTEMPT, until=4)
    assert [run.versions.may_train(ATTEMPT, step) for step in (2, 3, 4)] == [True] * 3


# The other roles


def test_a_server_starts_when_the_trainer_has_published_what_it_was_to_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that died while a step is trained would find too little memory."""
    run = RunDirectory(tmp_path)
    run.begin(ATTEMPT)
    assert servers_turn(run)
    run.versions.hand_over(ATTEMPT, until=1)
    waits = iter(
        [
            lambda: None,
            lambda: run.versions.announce(ATTEMPT, 1, save=False, last=False),
            lambda: os.kill(os.getpid(), END_SERVER),
        ]
    )
    monkeypatch.setattr("cairn.launch.roles.time", SimpleNamespace(sleep=lambda _: next(waits)()))
    assert servers_turn(run)

    run.versions.hand_over(ATTEMPT, until=None)
    assert not servers_turn(run), "the launcher ends the run"
    assert next(waits, None) is None


def test_a_trainer_waits_for_its_turn_although_the_batch_is_there(
    configuration: OrchestratorConfig, one_rank: RankGroup, tmp_path: Path
):
    class Noted(FSDP2):
        def rest(self) -> None:
            told.append("rest")
            super().rest()

        def wake(self) -> None:
            told.append("wake")
            super().wake()

    told: list[str] = []
    run = RunDirectory(tmp_path)
    sample = Sample.of_answer([1], [2], logprobs=-1.0, advantages=1.0)
    row = ShippedBatch(1, [[0, 0]], 1, 2, "", 0)
    header = BatchHeader("run", "branch_1", ATTEMPT.id, 1, "run:branch_1:0", [0], row)
    write_batch(batch_path(run.batches, 1), RLBatch([sample], sampling=FROM_TEXT, header=header))
    config = TrainerConfig(model=configuration.model, colocated=True)
    sharing = make_sharing(config, run, ATTEMPT, Noted(one_rank))
    sharing.make_room()
    batches = ShippedBatches(run, ATTEMPT, 0.05, sharing)
    with pytest.raises(DeadlinePassed, match="batch 1"):
        batches.next_batch(1)
    assert told == ["rest"], "the servers may be awake"
    run.versions.hand_over(ATTEMPT, until=1)
    assert isinstance(batches.next_batch(1), RLBatch)
    assert told == ["rest", "wake"], "once the servers sleep, and there is something to train on"
    run.versions.take_back()
    run.request_stop("test")
    assert batches.next_batch(1) is None
    assert told == ["rest", "wake"]


class NoWeights(Transport):
    """Publishes folders without weights."""

    def __init__(self) -> None:
        self.served = Served(dict, dtypes={}, beside={})

    def take(self, step: int, *, last: bool) -> Filling:
        return NoTensors()


class NoTensors(Filling):
    """Nothing to write."""

    def begin(self, folder: Path) -> None:
        pass


def test_the_trainer_makes_room_before_servers_may_wake(one_rank: RankGroup, tmp_path: Path):
    """When it has loaded the model, and before each announcement."""
    run = RunDirectory(tmp_path)
    known: list[list[int]] = []
    publisher = VersionPublisher(
        *(run, ATTEMPT, one_rank, NoWeights(), 0),
        before_announcing=lambda: known.append(run.versions.all_announced(ATTEMPT)),
    )
    publisher.publish(1, save=False, last=False)
    publisher.publish(2, save=False, last=False)
    publisher.finish()
    publisher.close()
    assert known == [[], [], [1]]


@pytest.mark.parametrize(("build", "colocated"), [("gpu", True), ("gpu", False), ("cpu", True)])
def test_a_server_on_a_gpu_is_started_so_that_it_can_sleep(
    monkeypatch: pytest.MonkeyPatch, build: str, colocated: bool
):
    monkeypatch.setattr(vllm_command, "installed_build", lambda: build)
    config = InferenceConfig(colocated=colocated, max_num_seqs=8)
    argv, _ = vllm_command.command(config, "some/model")
    assert ("--enable-sleep-mode" in argv) == (build == "gpu" and colocated)


# Settings


def rl(*arguments: str) -> RLConfig:
    return load(RLConfig, ["--model.name", "m", *arguments])


def settled(*arguments: str, machine: str = "1x24G") -> RLConfig:
    return placed(KINDS["rl"], rl(*arguments), machine_of(machine))[0]


def test_colocation_is_synchronous_and_told_to_all_roles():
    config = settled()
    assert config.orchestrator.max_off_policy_steps == 0
    assert all(role.colocated for role in (config.orchestrator, config.trainer, config.inference))
    apart = settled(machine="2x24G")
    assert apart.orchestrator.max_off_policy_steps == 1
    assert not any(role.colocated for role in (apart.orchestrator, apart.trainer, apart.inference))
    assert settled("--colocate", machine="24G").trainer.colocated, "on the CPU if asked for"
    assert not settled(machine="24G").trainer.colocated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--orchestrator.max-off-policy-steps", "2"], r"max-off-policy-steps 2: with --colocate"),
        (["--trainer.weight-transport", "network"], r"weight-transport network: with --colocate"),
    ],
)
def test_what_contradicts_taking_turns_is_refused(arguments: list[str], message: str):
    with pytest.raises(UsageError, match=message):
        settled(*arguments)
    assert settled(*arguments, machine="2x24G").colocate is False


@pytest.mark.parametrize("colocated", [True, False], ids=["in turns", "with a GPU of its own"])
def test_a_rank_without_memory_beside_an_awake_server_is_replaced(
    tmp_path: Path, colocated: bool, monkeypatch: pytest.MonkeyPatch
):
    """It gets that memory in its own turn, in which running out of it is final."""
    run = RunDirectory(tmp_path)
    ranks = Ranks(TrainerConfig(colocated=colocated), run)
    full = RayTaskError("train", "", OutOfMemory("full"))

    def ended() -> _Ended:
        said = _Ended({}, {}, [])
        future: Any = None
        _collect(future, RankSlot(0, run), said, beside_server=ranks._server_may_be_awake(ATTEMPT))
        return said

    def failed(_: Any) -> None:
        raise full

    monkeypatch.setattr("ray.get", failed)
    beside = ended()
    assert bool(beside.dead) == colocated
    assert (beside.final is None) == colocated
    run.versions.hand_over(ATTEMPT, until=1)
    assert ended().final
