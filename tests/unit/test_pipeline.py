"""The orchestrator between servers and a trainer that are played here, in every order that they may act in.

Whatever happens, each prompt is trained on once, and no token is older than allowed.
"""

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
from asyncio import FIRST_EXCEPTION
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import draws
import pytest
import runs
from runs import CONFIGS, DEADLINE, REPOSITORY
from transformers import AutoTokenizer

from cairn.checkpoint.store import CheckpointStore
from cairn.config.ckpt import CkptConfig
from cairn.config.model import ModelConfig
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.environments import ReverseText
from cairn.orchestrator.ledger import read_ledger
from cairn.orchestrator.loop import Orchestrator
from cairn.orchestrator.rollout_log import KeptRollouts
from cairn.policy.errors import ServerDisagrees, WeightsGone
from cairn.policy.generation import Generation, SamplingParams, VersionSpan
from cairn.run.batches import RLBatch, batch_path
from cairn.run.directory import RunDirectory
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import read_json, write_json
from cairn.run.messages import Attempt, PolicyName, Probe, write_probe
from cairn.run.seeds import permutation
from cairn.tools.audit.ledger import check_ledger
from cairn.tools.audit.report import Report

MODEL = REPOSITORY / CONFIGS / "model"
PROMPTS, SAMPLES, PROBLEMS, LONGEST = 3, 2, 10, 9
ATTEMPT = Attempt("run", 1, "rl", 0, None, "branch_1")
ABOUT = {**runs.ABOUT, "parts": ["trainer", "orchestrator"]}


@dataclass
class Servers:
    """Answers after a random while, in pieces of the policies that are there meanwhile.

    A token's id depends on the request's seed and its place alone, and answer lengths on the seed.
    """

    draw: random.Random
    served: str = ""
    asked: list[tuple[int, int, int]] = field(default_factory=list)
    """Affinity, seed and tokens given, of each request."""
    stuck: bool = False
    max_model_len: int | None = None

    folders: list[str] = field(default_factory=list)
    """Where the policies came from, in order."""
    probes: dict[str, Probe] = field(default_factory=dict)
    """What each version had to be proven by."""
    self_check: bool = True
    disagrees_at: int | None = None
    """The step whose policy they can't reproduce."""
    gone: frozenset[int] = frozenset()
    """Steps whose policies the trainer has no more when they are to be loaded."""

    async def serve(
        self, folder: str, version: str, *, probe: Probe | None = None, probe_follows: bool = False
    ) -> None:
        assert Path(folder).is_dir()
        self.folders.append(folder)
        assert (probe is not None or probe_follows) == self.self_check
        await self._while()
        if PolicyName.parse(version).step in self.gone:
            raise WeightsGone(version)
        self.served = version
        if probe:
            await self.prove(probe)

    async def prove(self, probe: Probe) -> None:
        self.probes[self.served] = probe
        if PolicyName.parse(self.served).step == self.disagrees_at:
            raise ServerDisagrees("the logprobs differ")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions,
        began=None,
        sessions=(),
    ):
        assert self.served, "asked before there was a policy"
        self.asked.append((affinity, params.seed, len(prompt_ids)))
        while self.stuck:
            await asyncio.sleep(0.001)
        answers = [await self._answer(params.seed + i, params.max_tokens) for i in range(params.n)]
        assert {span.version for answer in answers for span in answer.weight_versions} <= set(versions)
        return answers

    async def _answer(self, seed: int, max_tokens: int) -> Generation:
        length = 1 + seed % LONGEST
        tokens = [6 + (seed + place) % 26 for place in range(min(length, max_tokens))]
        spans: list[VersionSpan] = []
        for place in range(len(tokens)):
            await self._while()
            if spans and spans[-1].version == self.served:
                spans[-1] = replace(spans[-1], end=place + 1)
            else:
                spans.append(VersionSpan(self.served, place, place + 1))
        end = "stop" if length <= max_tokens else "length"
        return Generation(tokens, [-0.5] * len(tokens), spans, end)

    async def _while(self) -> None:
        for _ in range(self.draw.choice((0, 0, 0, 1, 5))):
            await asyncio.sleep(0)

    def take_metrics(self) -> dict[str, float]:
        return {}


@dataclass
class Trainer:
    """Trains batches in order, which takes it a random while; `trained` are those of this attempt."""

    run: RunDirectory
    attempt: Attempt
    last: int
    draw: random.Random
    save_every: int = 2
    publishes_start: bool = False
    """Whether servers get the checkpoint's policy from it."""
    trained: list[RLBatch] = field(default_factory=list)

    async def train(self) -> None:
        """Announce the versions that were not announced yet, and commit checkpoints."""
        store = CheckpointStore(self.run.checkpoints)
        newest = max(self.run.versions.all_announced(self.attempt), default=self.attempt.start_step)
        self._write_probe(self.attempt.start_step)
        self.run.versions.begin(self.attempt, published=self.publishes_start)
        for step in range(newest + 1, self.last + 1):
            batch = await self.batch(step)
            await asyncio.sleep(self.draw.choice((0, 0, 0.003, 0.01)))
            self.trained.append(batch)
            save = step % self.save_every == 0 or step == self.last
            self._write_probe(step)
            self.run.versions.announce(self.attempt, step, save=save, last=step == self.last)
            if save:
                await self._commit(store, step)

    async def batch(self, step: int) -> RLBatch:
        """The batch of `step`, once it is there."""
        while (batch := self.run.batch(self.attempt, step)) is None:
            await asyncio.sleep(0.001)
        return batch

    def _write_probe(self, step: int) -> None:
        folder = self.run.versions.folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        write_probe(folder, Probe([1, 2], [float(step)], "float32"))

    async def _commit(self, store: CheckpointStore, step: int) -> None:
        store.begin(step, ["trainer", "model"])
        files = {f"model/{path.name}": path.read_bytes() for path in MODEL.iterdir()}
        store.write_part(step, "trainer", {"trainer/state.json": b"{}", **files}, "t")
        while not store.has_part(step, "orchestrator", self.attempt.id):
            await asyncio.sleep(0.001)
        about = {**ABOUT, "run_id": self.attempt.run_id, "branch": self.attempt.branch}
        store.commit(step, {"trainer": "t", "orchestrator": self.attempt.id}, timeout=0.0, about=about)
        self.run.forget_batches(step)


@pytest.fixture(scope="module")
def configuration() -> OrchestratorConfig:
    """Of small batches over epochs that end in their middle, with answers that take up to three pieces."""
    return OrchestratorConfig(
        model=ModelConfig(name=str(MODEL)),
        seed=3,
        environment=EnvironmentConfig(args={"problems": PROBLEMS}),
        sampling=SamplingConfig(max_tokens=LONGEST, chunk_tokens=4),
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        max_in_flight=12,
        version_timeout=DEADLINE,
        ckpt=CkptConfig(),
    )


def in_folder(config: OrchestratorConfig, folder: Path, steps: int, behind: int) -> OrchestratorConfig:
    return config.model_copy(
        update={"output_dir": str(folder), "max_steps": steps, "max_off_policy_steps": behind}
    )


def begin(config: OrchestratorConfig, attempt: Attempt) -> RunDirectory:
    """The run directory of an attempt that starts now."""
    run = RunDirectory(config.output_dir)
    run.path.mkdir(exist_ok=True)
    run.versions.clear()
    run.begin(attempt)
    return run


async def see_through(
    config: OrchestratorConfig, attempt: Attempt, trainer: Trainer, servers: Servers, deaths: list[float]
) -> None:
    """Run both to the end; the orchestrator dies after each of these seconds and is started again."""
    training = asyncio.create_task(trainer.train())
    try:
        for seconds in [*deaths, DEADLINE]:
            orchestrating = asyncio.create_task(Orchestrator(config, attempt, servers).run())
            await asyncio.wait([orchestrating, training], timeout=seconds, return_when=FIRST_EXCEPTION)
            if training.done():
                training.result()
            if orchestrating.done():
                assert orchestrating.result() == trainer.last
                break
            orchestrating.cancel()
            await asyncio.wait([orchestrating])
        await asyncio.wait_for(training, DEADLINE)
    finally:
        training.cancel()
        orchestrating.cancel()
        await asyncio.wait([orchestrating, training])


def places(batches: list[RLBatch]) -> list[int]:
    """The places in the prompt order that the batches hold."""
    spans = [span for batch in batches for span in batch.header.ledger.places]
    return [place for first, last in spans for place in range(first, last + 1)]


def assert_promises_kept(batches: list[RLBatch], behind: int, seed: int) -> None:
    """Of batches 1, 2, ...: each prompt once, no token too old or from the future, rows as the batch is."""
    assert [batch.header.step for batch in batches] == list(range(1, len(batches) + 1))
    trained = places(batches)
    assert len(trained) == len(set(trained)) == PROMPTS * len(batches)
    for batch in batches:
        row = batch.header.ledger
        staleness = batch.header.step - 1 - row.oldest_step
        assert 0 <= batch.metrics["staleness/mean"] <= batch.metrics["staleness/max"] == staleness <= behind
        assert PolicyName.parse(batch.header.version).step < batch.header.step
        assert row.digest == batch.digest()
        assert (row.samples, len(batch.samples)) == (PROMPTS * SAMPLES, PROMPTS * SAMPLES)
        expected = [
            permutation(PROBLEMS, seed, "prompt order", place // PROBLEMS)[place % PROBLEMS]
            for place in places([batch])
        ]
        assert batch.header.problems == expected


@pytest.mark.parametrize("seed", draws.cases(range(16), "whoever is slow", 5))
def test_each_prompt_is_trained_once_whoever_is_slow_and_whoever_dies(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """The orchestrator is killed at random times."""
    draw = random.Random(seed)
    behind, deaths = seed % 4, [draw.uniform(0.001, 0.05) for _ in range(draw.randrange(4))]
    config = in_folder(configuration, tmp_path / "run", 7, behind)
    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 7, draw)
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(draw), deaths))
    assert_promises_kept(trainer.trained, behind, config.seed)
    assert sorted(places(trainer.trained)) == list(range(7 * PROMPTS))  # none was left out, none put off


async def for_a_while(
    config: OrchestratorConfig, attempt: Attempt, trainer: Trainer, servers: Servers, seconds: float
) -> None:
    """Until both die, like in a power cut."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(see_through(config, attempt, trainer, servers, []), seconds)


def go_on(config: OrchestratorConfig, step: int, *, branch: str) -> Attempt:
    """The next attempt of the run, from a checkpoint."""
    store = CheckpointStore(Path(config.output_dir) / "checkpoints")
    folder = str(store.folder(step)) if step else None
    return replace(ATTEMPT, number=2, start_step=step, resume_from=folder, branch=branch)


@pytest.mark.parametrize("loss", ["nothing", "ledger", "batches", "rewind"])
@pytest.mark.parametrize("seed", draws.cases(range(6), "everything dies", 2))
def test_each_prompt_is_trained_once_when_everything_dies(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int, loss: str
):
    """The next attempt trains the batches after the newest checkpoint again, as they were.

    Though the ledger or the batches are lost; from an older checkpoint it goes another way.
    """
    draw = random.Random(f"{seed} {loss}")
    behind, seconds = seed % 3, draw.uniform(0.02, 0.15)
    config = in_folder(configuration, tmp_path / "run", 8, behind)
    run = begin(config, ATTEMPT)
    first = Trainer(run, ATTEMPT, 8, draw)
    asyncio.run(for_a_while(config, ATTEMPT, first, Servers(draw), seconds))
    steps = CheckpointStore(run.checkpoints).steps()
    start = (steps[:-1] if loss == "rewind" else steps)[-1:]
    start_step = start[0] if start else 0
    attempt = go_on(config, start_step, branch="branch_2" if loss == "rewind" else "branch_1")
    if loss == "rewind":
        CheckpointStore(run.checkpoints).set_aside_after(start_step, "aside")
    run.set_batches_aside(Path(config.output_dir) / "aside", attempt)
    if loss == "ledger":
        for file in run.path.glob("ledger.sqlite*"):
            file.unlink()
    elif loss == "batches":
        shutil.rmtree(run.batches, ignore_errors=True)
    begin(config, attempt)
    second = Trainer(run, attempt, 8, draw)
    if start_step < 8:
        asyncio.run(see_through(config, attempt, second, Servers(draw), []))
    whole = first.trained[:start_step] + second.trained
    assert_promises_kept(whole, behind, config.seed)
    assert sorted(places(whole)) == list(range(8 * PROMPTS))
    if (
        behind == 0
    ):  # taking turns, nothing gets too old, nor is a later policy's prompt asked of an earlier one
        assert {batch.metrics["groups/dropped"] for batch in whole} == {0}
    if loss in ("nothing", "ledger"):
        again = {batch.header.step: batch.digest() for batch in second.trained}
        assert all(again.get(b.header.step, b.digest()) == b.digest() for b in first.trained)


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_servers_get_the_checkpoints_policy_from_the_trainer_if_it_publishes_it(
    configuration: OrchestratorConfig, tmp_path: Path, published: bool, self_check: bool
):
    """Which it does if policies are published in another data type than checkpoints have."""
    config = in_folder(configuration, tmp_path / "run", 2, 0).model_copy(update={"self_check": self_check})
    run, draw = begin(config, ATTEMPT), random.Random(0)
    first = Servers(draw, self_check=self_check)
    asyncio.run(see_through(config, ATTEMPT, Trainer(run, ATTEMPT, 2, draw), first, []))
    assert first.folders[0] == str(MODEL), "a new run does not wait for its trainer"
    config = in_folder(config, tmp_path / "run", 4, 0)
    attempt = go_on(config, 2, branch="main")
    begin(config, attempt)
    servers = Servers(draw, self_check=self_check)
    trainer = Trainer(run, attempt, 4, draw, publishes_start=published)
    asyncio.run(see_through(config, attempt, trainer, servers, []))
    start = run.versions.folder(2) if published else Path(attempt.resume_from) / "model"
    assert servers.folders[0] == str(start)


def test_a_new_run_waits_for_its_trainer_where_servers_take_only_what_it_publishes(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """Such as an adapter, which has no folder before."""
    config = in_folder(configuration, tmp_path / "run", 2, 0)
    attempt, draw = replace(ATTEMPT, publishes_first=True), random.Random(0)
    run, servers = begin(config, attempt), Servers(draw)
    trainer = Trainer(run, attempt, 2, draw, publishes_start=True)
    asyncio.run(see_through(config, attempt, trainer, servers, []))
    assert servers.folders[:2] == [str(run.versions.folder(step)) for step in (0, 1)]


TRAINED = "WHERE step = (SELECT min(step) FROM batches)"
EDITS = {
    "removed": lambda ledger: ledger.unlink(),  # what SQLite keeps beside it stays
    "emptied": lambda ledger: ledger.write_bytes(b""),
    "truncated": lambda ledger: os.truncate(ledger, ledger.stat().st_size // 2),
    "overwritten": lambda ledger: ledger.write_bytes(b"SQLite format 3\0" + bytes(8192)),
    "another file": lambda ledger: (ledger.unlink(), ledger.write_text("[]")),
    "a batch less": f"DELETE FROM batches {TRAINED}",
    "all batches less": "DELETE FROM batches",
    "a batch of other prompts": f"UPDATE batches SET places = '[[90, 92]]' {TRAINED}",
    "a batch waits again": "UPDATE groups SET batch = NULL; DELETE FROM batches",
    "prompts are lost": "DELETE FROM groups; DELETE FROM samples",
    "answers are lost": "DELETE FROM samples WHERE sample = 0",
    "no rewards any more": "UPDATE samples SET reward = NULL",
    "rewards are text": "UPDATE samples SET reward = 'good'",
    "no tables any more": "DROP TABLE batches",
    "of another run": "UPDATE run SET run_id = 'another'",
}


def edit(ledger: Path, how: str) -> None:
    """What a user, or another program, does to a ledger."""
    if callable(change := EDITS[how]):
        change(ledger)
        return
    with contextlib.closing(sqlite3.connect(ledger)) as database:
        database.executescript(change)


@pytest.mark.parametrize("how", draws.cases(list(EDITS), "edited between", 6))
def test_a_ledger_that_was_edited_trains_no_prompt_twice(
    configuration: OrchestratorConfig, tmp_path: Path, how: str
):
    """Between two attempts: the checkpoint and the batches' files say what happened."""
    draw = random.Random(how)
    behind = draw.choice((0, 2))
    config = in_folder(configuration, tmp_path / "run", 8, behind)
    run = begin(config, ATTEMPT)
    first = Trainer(run, ATTEMPT, 8, draw)

    async def until_some_are_trained() -> None:
        running = asyncio.create_task(see_through(config, ATTEMPT, first, Servers(draw), []))
        while len(first.trained) < 5:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(until_some_are_trained())
    edit(run.ledger, how)
    attempt = go_on(config, CheckpointStore(run.checkpoints).latest(), branch="branch_1")
    begin(config, attempt)
    second = Trainer(run, attempt, 8, draw)
    asyncio.run(see_through(config, attempt, second, Servers(draw), []))
    whole = first.trained[: attempt.start_step] + second.trained
    assert_promises_kept(whole, behind, config.seed)
    assert sorted(places(whole)) == list(range(8 * PROMPTS))
    assert_audit_clean(run, attempt, whole)


def assert_audit_clean(run: RunDirectory, attempt: Attempt, trained: list[RLBatch]) -> Report:
    """`ckpt audit`, as far as it goes by the ledger and by what was trained; returns what it found."""
    rows, samples, tokens = [], 0, 0
    for batch in trained:
        samples += len(batch.samples)
        tokens += sum(len(sample.token_ids) for sample in batch.samples)
        rows.append({"step": batch.header.step, "total_samples": samples, "total_tokens": tokens})
        rows[-1]["batch/digest"] = batch.digest()
    report = Report(str(run.path), "rl", last_step=len(trained))
    check_ledger(read_ledger(run.ledger), rows, {}, attempt, report)
    assert report.violations == []
    return report


@pytest.mark.slow
@pytest.mark.parametrize("how", draws.cases(list(EDITS), "edited meanwhile", 6))
def test_a_ledger_that_is_edited_under_the_run_trains_no_prompt_twice(
    configuration: OrchestratorConfig, tmp_path: Path, how: str
):
    """Either the run goes on, or it ends with a message; and what is gone on with after that is right."""
    draw = random.Random(how)
    behind = draw.choice((0, 2))
    config = in_folder(configuration, tmp_path / "run", 8, behind)
    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 8, draw)

    async def with_an_edit() -> None:
        running = asyncio.create_task(see_through(config, ATTEMPT, trainer, Servers(draw), []))
        while len(trainer.trained) < 3:
            await asyncio.sleep(0.001)
        edit(run.ledger, how)
        await asyncio.wait([running])
        if running.exception() is not None:
            assert isinstance(running.exception(), CairnError), running.exception()

    asyncio.run(with_an_edit())
    whole, attempt = trainer.trained, ATTEMPT
    if len(whole) < 8:
        attempt = go_on(config, CheckpointStore(run.checkpoints).latest(), branch="branch_1")
        begin(config, attempt)
        second = Trainer(run, attempt, 8, draw)
        asyncio.run(see_through(config, attempt, second, Servers(draw), []))
        whole = whole[: attempt.start_step] + second.trained
    assert_promises_kept(whole, behind, config.seed)
    assert sorted(places(whole)) == list(range(8 * PROMPTS))
    if how not in ("answers are lost", "no rewards any more", "rewards are text"):  # of shipped prompts
        assert_audit_clean(run, attempt, whole)


@pytest.mark.parametrize("behind", [0, 2])
def test_answers_of_another_temperature_are_not_trained_on(
    configuration: OrchestratorConfig, tmp_path: Path, behind: int
):
    """A batch has one, which its logprobs are compared at; prompts that wait with others are asked again."""
    hot = in_folder(configuration, tmp_path / "run", 8, behind)
    cold = hot.model_copy(update={"sampling": hot.sampling.model_copy(update={"temperature": 0.5})})
    run = begin(hot, ATTEMPT)
    first = Trainer(run, ATTEMPT, 8, random.Random(0))
    servers = Thermometer(random.Random(0))

    async def until_some_are_trained() -> None:
        running = asyncio.create_task(see_through(hot, ATTEMPT, first, servers, []))
        while len(first.trained) < 3:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(until_some_are_trained())
    attempt = go_on(hot, CheckpointStore(run.checkpoints).latest(), branch="branch_1")
    begin(cold, attempt)
    second = Trainer(run, attempt, 8, random.Random(1))
    asyncio.run(see_through(cold, attempt, second, servers, []))
    whole = first.trained[: attempt.start_step] + second.trained
    assert_promises_kept(whole, behind, hot.seed)
    assert_audit_clean(run, attempt, whole)
    assert {batch.sampling.temperature for batch in whole} == {1.0, 0.5}
    for batch in whole:
        sampled = {
            -float(p) for sample in batch.samples for p in sample.columns["logprobs"][sample.loss_mask]
        }
        assert sampled == {batch.sampling.temperature}


class Thermometer(Servers):
    """Its logprobs tell at which temperature it was asked."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **where):
        found = await super().generate(prompt_ids, params, **where)
        return [replace(one, logprobs=[-params.temperature] * len(one.logprobs)) for one in found]


def run_through(config: OrchestratorConfig, randomness: int, deaths: list[float]) -> tuple[Trainer, Servers]:
    draw = random.Random(randomness)
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, config.max_steps, draw)
    servers = Servers(draw)
    asyncio.run(see_through(config, ATTEMPT, trainer, servers, deaths))
    return trainer, servers


def test_every_policy_is_proven_by_the_probe_that_the_trainer_wrote(
    configuration: OrchestratorConfig, tmp_path: Path
):
    config = in_folder(configuration, tmp_path / "run", 4, 0)
    servers = Servers(random.Random(1))
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, 4, random.Random(1))
    asyncio.run(see_through(config, ATTEMPT, trainer, servers, []))
    probes = {PolicyName.parse(version).step: probe.logprobs for version, probe in servers.probes.items()}
    assert probes == {step: [float(step)] for step in range(5)}


@pytest.mark.parametrize(("step", "is_usage"), [(0, True), (1, True), (2, False)])
def test_servers_that_compute_another_model_end_the_run(
    configuration: OrchestratorConfig, tmp_path: Path, step: int, is_usage: bool
):
    """At its start that is a matter of the model and the settings, which the message is about."""
    config = in_folder(configuration, tmp_path / "run", 4, 0)  # in turns: no version is skipped
    servers = Servers(random.Random(1), disagrees_at=step)
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, 4, random.Random(1))
    with pytest.raises(UsageError if is_usage else ServerDisagrees, match="the logprobs differ") as error:
        asyncio.run(see_through(config, ATTEMPT, trainer, servers, []))
    if is_usage:
        assert "(qwen3)" in str(error.value)
        assert "--no-self-check" in str(error.value)
    assert len(trainer.trained) <= step + 1


@pytest.mark.parametrize("gone", [frozenset(), frozenset(range(1, 5))], ids=["skipped", "gone"])
def test_the_first_policy_that_is_pushed_is_the_start_whichever_it_is(
    configuration: OrchestratorConfig, tmp_path: Path, gone: frozenset[int]
):
    """A trainer that is ahead has skipped that of step 1, or has withdrawn it when servers ask for it."""
    config = in_folder(configuration, tmp_path / "run", 7, 4)  # five batches come from the first policy
    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 7, random.Random(1), save_every=7)

    class Slow(Servers):
        async def prove(self, probe: Probe) -> None:
            async with asyncio.timeout(DEADLINE):
                while not gone and not (shipped() >= 5 and run.versions.announced(ATTEMPT, 5)):
                    await asyncio.sleep(0.001)
            await super().prove(probe)

    servers = Slow(random.Random(1), disagrees_at=5, gone=gone)
    orchestrator = Orchestrator(config, ATTEMPT, servers)

    def shipped() -> int:
        """The step of the newest batch that the orchestrator knows; the trainer may have one more."""
        return orchestrator.state.shipped.newest.step

    async def both() -> None:
        training = asyncio.create_task(trainer.train())
        try:
            await orchestrator.run()
        finally:
            training.cancel()

    with pytest.raises(UsageError, match="the logprobs differ") as error:
        asyncio.run(both())
    assert "--no-self-check" in str(error.value)
    assert {PolicyName.parse(version).step for version in servers.probes} == {0, 5}


def test_without_the_self_check_nothing_is_proven(configuration: OrchestratorConfig, tmp_path: Path):
    config = in_folder(configuration, tmp_path / "run", 2, 0).model_copy(update={"self_check": False})
    servers = Servers(random.Random(1), disagrees_at=0, self_check=False)
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, 2, random.Random(1))
    asyncio.run(see_through(config, ATTEMPT, trainer, servers, []))
    assert servers.probes == {}


def test_taking_turns_is_exact(configuration: OrchestratorConfig, tmp_path: Path):
    """In synchronous mode the batches are the same to the bit, whatever the timing and who dies."""
    calm, _ = run_through(in_folder(configuration, tmp_path / "calm", 6, 0), 1, [])
    stormy, _ = run_through(in_folder(configuration, tmp_path / "stormy", 6, 0), 2, [0.02, 0.03, 0.01])
    assert [batch.digest() for batch in stormy.trained] == [batch.digest() for batch in calm.trained]
    assert {batch.metrics["staleness/max"] for batch in calm.trained} == {0}


class Waiting(Trainer):
    """Asked to stop when it has waited for the batch after step 3 a while: ends the run there."""

    async def end(self, servers: Servers) -> None:
        """As `RL.end` does, and the save that follows."""
        while len(self.trained) < 3 or not servers.held:
            await asyncio.sleep(0.001)
        self.run.versions.announce(self.attempt, 3, save=True, last=True)
        await self._commit(CheckpointStore(self.run.checkpoints), 3)


@dataclass
class Held(Servers):
    """Once the policy of step 3 is there, it never loads, or only every other answer to it is finished."""

    loads: bool = True
    held: bool = False

    async def serve(self, folder: str, version: str, **how: Any) -> None:
        if PolicyName.parse(version).step == 3 and not self.loads:
            self.held = True
            await asyncio.Event().wait()
        await super().serve(folder, version, **how)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        affinity: int,
        versions,
        began=None,
        sessions=(),
    ):
        if PolicyName.parse(self.served).step == 3 and affinity % 2:
            self.held = True
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, params, affinity=affinity, versions=versions)


@pytest.mark.parametrize("loads", [True, False])
def test_a_stop_while_the_trainer_waits_for_a_batch_saves_the_step_before(
    configuration: OrchestratorConfig, tmp_path: Path, loads: bool
):
    """Nothing is waited for; answers that are there are kept, and the run goes on as if never stopped."""
    calm, _ = run_through(in_folder(configuration, tmp_path / "calm", 6, 0), 1, [])
    config = in_folder(configuration, tmp_path / "run", 6, 0)
    run = begin(config, ATTEMPT)
    trainer, servers = Waiting(run, ATTEMPT, 6, random.Random(1), 100), Held(random.Random(1), loads=loads)

    async def until_stopped() -> int:
        training = asyncio.create_task(trainer.train())
        ending = asyncio.create_task(trainer.end(servers))
        try:
            async with asyncio.timeout(DEADLINE):
                step = await Orchestrator(config, ATTEMPT, servers).run()
                await ending
        finally:
            training.cancel()
            await asyncio.wait([training])
        return step

    assert asyncio.run(until_stopped()) == 3
    store = CheckpointStore(run.checkpoints)
    assert store.steps() == [3]
    assert bool(waiting_in(store.folder(3))) == loads
    attempt = go_on(config, 3, branch="branch_1")
    second = Trainer(begin(config, attempt), attempt, 6, random.Random(2))
    asyncio.run(see_through(config, attempt, second, Servers(random.Random(2)), []))
    whole = trainer.trained + second.trained
    assert [batch.digest() for batch in whole] == [batch.digest() for batch in calm.trained]


def test_generating_and_training_overlap(configuration: OrchestratorConfig, tmp_path: Path):
    """With one step of staleness allowed, the next batch is there before the trainer is done with this."""
    config = in_folder(configuration, tmp_path / "run", 6, 1)
    run = begin(config, ATTEMPT)

    class Slow(Trainer):
        async def batch(self, step: int) -> RLBatch:
            """It is not done with a batch before the next one is there."""
            batch = await super().batch(step)
            async with asyncio.timeout(DEADLINE):
                while step < self.last and not batch_path(run.batches, step + 1).exists():
                    await asyncio.sleep(0.001)
            return batch

    trainer = Slow(run, ATTEMPT, 6, random.Random(0), save_every=1)
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(random.Random(0)), []))
    assert_promises_kept(trainer.trained, 1, config.seed)


def test_no_finished_answer_and_no_piece_is_asked_for_twice(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """An orchestrator that takes over asks for what is missing only, from the last whole piece on."""
    config = in_folder(configuration, tmp_path / "run", 8, 0)
    trainer, servers = run_through(config, 5, [0.03, 0.03, 0.03, 0.03])
    times = Counter(servers.asked)
    given_up = [request for request, count in times.items() if count > 1]
    # At each death there may be as many requests under way as there are answers in flight.
    assert sum(times[request] - 1 for request in given_up) <= 4 * PROMPTS * SAMPLES
    prompts = {affinity: min(t for a, _, t in times if a == affinity) for affinity, _, _ in times}
    assert any(tokens > prompts[affinity] for affinity, _, tokens in times), "no answer took several pieces"
    assert len(trainer.trained) == 8


def test_a_group_that_gets_too_old_is_dropped_and_asked_for_again(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """It is counted, and its prompt is still trained on once."""
    config = in_folder(configuration, tmp_path / "run", 9, 1)

    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 9, random.Random(0))

    sampled: list[Generation] = []

    class OneIsSlow(Servers):
        async def _answer(self, seed: int, max_tokens: int) -> Generation:
            sampled.append(await self._sample(seed, max_tokens))
            return sampled[-1]

        async def _sample(self, seed: int, max_tokens: int) -> Generation:
            if len(self.asked) == 4:  # until the policy that it is asked of is older than may be trained on
                begun = len(trainer.trained)
                async with asyncio.timeout(DEADLINE):
                    while len(trainer.trained) < begun + 4:
                        await asyncio.sleep(0.01)
            return await super()._answer(seed, max_tokens)

    asyncio.run(see_through(config, ATTEMPT, trainer, OneIsSlow(random.Random(0)), []))
    dropped = sum(batch.metrics["groups/dropped"] for batch in trainer.trained)
    assert dropped >= 1
    noted = sqlite3.connect(run.ledger).execute("SELECT reason FROM dropped").fetchall()
    assert noted == [("stale",)] * dropped
    names = ("rollout/tokens", "tokens/failed", "tokens/redrawn", "tokens/dropped")
    accounted = sum(batch.metrics[name] for batch in trainer.trained for name in names)
    assert accounted == sum(len(one.token_ids) for one in sampled), "every token that was sampled, once"
    assert_promises_kept(trainer.trained, 1, config.seed)
    assert sorted(places(trainer.trained)) == list(range(9 * PROMPTS))


def waiting_in(checkpoint: Path) -> set[int]:
    """The places of prompts that a checkpoint's ledger says are still to be trained on."""
    snapshot = checkpoint / "orchestrator" / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{snapshot}?immutable=1", uri=True)) as database:
        return {place for (place,) in database.execute("SELECT place FROM groups WHERE batch IS NULL")}


def test_another_environment_is_asked_anew_for_what_waits(configuration: OrchestratorConfig, tmp_path: Path):
    """Nothing that the environment of before was asked is trained on once the new one is accepted."""
    draw = random.Random(1)
    config = in_folder(configuration, tmp_path / "run", 8, 2)
    run = begin(config, ATTEMPT)
    asyncio.run(see_through(config, ATTEMPT, Trainer(run, ATTEMPT, 8, draw), Servers(draw), []))
    store = CheckpointStore(run.checkpoints)
    waiting = {step: waiting_in(store.folder(step)) for step in store.steps()}
    step = min(step for step, found in waiting.items() if found)
    store.set_aside_after(step, "aside")
    args = {"problems": PROBLEMS, "seed": 9}
    config = config.model_copy(update={"environment": EnvironmentConfig(args=args)})
    attempt = go_on(config, step, branch="branch_2")
    run.set_batches_aside(Path(config.output_dir) / "aside", attempt)
    write_json(run.recipe, {"trainer": {}, "orchestrator": {"settings": {}}, "prompts_again": True})
    second = Trainer(begin(config, attempt), attempt, 8, draw)
    asyncio.run(see_through(config, attempt, second, Servers(draw), []))
    assert waiting[step] <= set(places(second.trained))
    asked = ReverseText(**args)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for batch in second.trained:
        for i, problem in enumerate(batch.header.problems):
            text = tokenizer.decode(batch.samples[i * SAMPLES].token_ids)
            assert text.startswith(f"<user>{asked.messages(problem)[0]['content']}<assistant>")
    state = read_json(store.folder(8) / "orchestrator" / "state.json")
    assert state["recipe"] == {"settings": {}}


def test_shipped_rollouts_have_neither_gaps_nor_duplicates_whenever_it_dies(
    configuration: OrchestratorConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Killed before a batch, between its rollouts and itself, and before the ledger says so."""
    draw = random.Random(0)
    config = in_folder(configuration, tmp_path / "run", 5, 1)
    run = begin(config, ATTEMPT)
    faults = ("before_ship:EIO@1", "kept_rollouts:EIO@2", "shipped:EIO@3")
    monkeypatch.setenv("CAIRN_FAULT", ",".join(f"orchestrator.{fault}" for fault in faults))
    monkeypatch.setattr("cairn.run.faults._reached", {})
    trainer = Trainer(run, ATTEMPT, 5, draw)

    async def restarted() -> int:
        training, deaths = asyncio.create_task(trainer.train()), 0
        while True:
            try:
                await Orchestrator(config, ATTEMPT, Servers(draw)).run()
            except OSError:
                deaths += 1
            else:
                await asyncio.wait_for(training, DEADLINE)
                return deaths

    assert asyncio.run(asyncio.wait_for(restarted(), DEADLINE)) == 3
    kept = KeptRollouts(run.rollouts)
    assert kept.steps() == [1, 2, 3, 4, 5]
    for batch in trainer.trained:
        rows = kept.read(batch.header.step)
        samples = [row["turns"][0]["prompt_ids"] + row["turns"][0]["token_ids"] for row in rows]
        assert samples == [sample.token_ids.tolist() for sample in batch.samples]
        places = [place for first, last in batch.header.ledger.places for place in range(first, last + 1)]
        assert sorted({row["place"] for row in rows}) == places
        assert len({(row["place"], row["sample"]) for row in rows}) == len(rows)


class Even(ReverseText):
    """Half of its problems have the same reward for every answer."""

    def reward(self, problem: int, answer: str) -> float:
        return 0.5 if problem % 2 else float(len(answer) % 7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", draws.cases(range(6), "redrawn", 3))
def test_prompts_that_teach_nothing_are_replaced(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int
):
    """Up to the bound, by the next prompts; each is accounted for, whoever dies."""
    draw = random.Random(seed)
    behind, bound = seed % 2, (2, 100)[seed // 3]
    config = in_folder(configuration, tmp_path / "run", 6, behind)
    environment = EnvironmentConfig(name=f"{__name__}:Even", args={"problems": PROBLEMS})
    config = config.model_copy(update={"redraw": bound, "environment": environment})
    run = begin(config, ATTEMPT)
    trainer = Trainer(run, ATTEMPT, 6, draw)
    deaths = [draw.uniform(0.02, 0.1) for _ in range(seed % 3)]
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(draw), deaths))
    shipped = places(trainer.trained)
    assert len(shipped) == len(set(shipped)) == PROMPTS * 6
    redrawn = [int(batch.metrics["groups/redrawn"]) for batch in trainer.trained]
    assert max(redrawn) <= bound
    assert sum(redrawn) > 0
    for batch, count in zip(trainer.trained, redrawn, strict=True):
        if count < bound:
            assert all(problem % 2 == 0 for problem in batch.header.problems)
    assert_audit_clean(run, ATTEMPT, trainer.trained)
    if behind == 0:  # the same prompts, in whatever order answers arrive
        undisturbed = config.model_copy(update={"output_dir": str(tmp_path / "again")})
        again = Trainer(begin(undisturbed, ATTEMPT), ATTEMPT, 6, random.Random(seed + 100))
        asyncio.run(see_through(undisturbed, ATTEMPT, again, Servers(random.Random(seed + 100)), []))
        assert [batch.digest() for batch in again.trained] == [batch.digest() for batch in trainer.trained]
        assert places(again.trained) == shipped
