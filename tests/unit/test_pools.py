"""Difficulty pools: which problems rest, whoever dies, and that a resumed run decides the same."""

import asyncio
import contextlib
import itertools
import logging
import random
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import pytest
from pydantic import ValidationError
from test_pipeline import (
    ATTEMPT,
    PROBLEMS,
    PROMPTS,
    Servers,
    Trainer,
    assert_audit_clean,
    begin,
    configuration,
    go_on,
    in_folder,
    places,
    see_through,
)

from cairn.checkpoint.store import CheckpointStore
from cairn.config.environment import EnvironmentConfig, MixedEnvironmentConfig, PoolsConfig
from cairn.config.orchestrator import OrchestratorConfig
from cairn.orchestrator.environments import ReverseText
from cairn.orchestrator.ledger import FORMAT, RESTS, Ledger, LedgerRun, read_ledger
from cairn.orchestrator.prompt_order import Order, Portion
from cairn.orchestrator.prompts.prompts import DifficultyFilter
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.run.batches import RLBatch
from cairn.run.messages import ShippedBatch
from cairn.tools.audit import Report
from cairn.tools.audit.resting import check_given_up
from cairn.tools.ckpt_output import print_audit

__all__ = ["configuration"]  # a fixture

STEPS = 14
BOTH = PoolsConfig(easy=1.0, hard=0.0)


class Graded(ReverseText):
    """A third of its problems is always solved, a third never, and the others half."""

    def reward(self, problem: int, answer: str) -> float:
        return (1.0, 0.0, 0.5)[problem % 3]


class Solved(ReverseText):
    """All answers to all problems are right."""

    def reward(self, problem: int, answer: str) -> float:
        return 1.0


def pooled(config: OrchestratorConfig, environment: str = "Graded", **settings: Any) -> OrchestratorConfig:
    """The configuration with an environment of this module, and pools."""
    own = EnvironmentConfig(name=f"{__name__}:{environment}", args={"problems": PROBLEMS})
    return config.model_copy(update={"environment": own, "pools": BOTH, **settings})


def run_through(config: OrchestratorConfig, folder: Path, seed: int, deaths: int = 0) -> list[RLBatch]:
    """The batches of a whole run."""
    draw = random.Random(seed)
    config = config.model_copy(update={"output_dir": str(folder)})
    trainer = Trainer(begin(config, ATTEMPT), ATTEMPT, config.max_steps, draw)
    times = [draw.uniform(0.01, 0.1) for _ in range(deaths)]
    asyncio.run(see_through(config, ATTEMPT, trainer, Servers(draw), times))
    return trainer.trained


def proved(config: OrchestratorConfig, ledger: Path) -> set[str]:
    """The kinds of violations that `ckpt audit` finds in what the ledger says of prompts without a batch."""
    report = Report(str(ledger), "rl")
    check_given_up(read_ledger(ledger), [], config.model_dump(), ATTEMPT, report)
    assert report.notes == []
    return {violation.kind for violation in report.violations}


async def until(config: OrchestratorConfig, trainer: Trainer, step: int, draw: random.Random) -> None:
    """Run both until `step` is trained, and a little longer; then both die."""
    running = asyncio.create_task(see_through(config, ATTEMPT, trainer, Servers(draw), []))
    while len(trainer.trained) < step and not running.done():
        await asyncio.sleep(0.001)
    await asyncio.sleep(draw.choice((0, 0.002, 0.005, 0.01)))
    running.cancel()
    await asyncio.wait([running])


def expected(seed: int, rest: int) -> list[list[int]]:
    """The places of each batch of `Graded`, in a run that takes turns: the rule, written down once more."""
    order, asked, following = Order(seed, [Portion("", PROBLEMS, 1.0, 2)]), dict[int, int](), 0
    batches: list[list[int]] = []
    for _ in range(STEPS):
        batch: list[int] = []
        while len(batch) < PROMPTS:
            at = order.at(following)
            last = asked.get(at.problem)
            if last is None or at.problem % 3 == 2 or at.epoch - last > rest:
                batch.append(following)
            following += 1
        asked |= {order.at(place).problem: order.at(place).epoch for place in batch}
        batches.append(batch)
    return batches


def untimed(batch: RLBatch) -> dict[str, Any]:
    """A batch's metrics but for what took how long."""
    return {name: value for name, value in batch.metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("seed", draws.cases(range(6), "resting", 2))
def test_easy_and_hard_problems_rest_whoever_dies(
    configuration: OrchestratorConfig,
    tmp_path: Path,
    seed: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """For as many epochs as is said; each place that is passed over is accounted for."""
    monkeypatch.setenv("COLUMNS", "200")
    behind, rest = seed % 2, 1 + seed // 2
    pools = BOTH.model_copy(update={"rest": rest})
    config = pooled(in_folder(configuration, tmp_path, STEPS, behind), pools=pools)
    batches = run_through(config, tmp_path / "run", seed, deaths=seed)
    if behind == 0:
        assert [places([batch]) for batch in batches] == expected(config.seed, rest)
        calm = run_through(config, tmp_path / "calm", seed + 100)
        assert [batch.digest() for batch in calm] == [batch.digest() for batch in batches]
        assert [untimed(batch) for batch in calm] == [untimed(batch) for batch in batches]
    shipped = places(batches)
    assert len(shipped) == len(set(shipped)) == PROMPTS * STEPS
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    content = read_ledger(run.ledger)
    resting = Counter(row["step"] for row in content.failed)
    assert {row["reason"] for row in content.failed} == {RESTS}
    assert all(row["problem"] % 3 != 2 for row in content.failed)
    report = assert_audit_clean(run, ATTEMPT, batches)
    assert proved(config, run.ledger) == set()
    assert sum(epoch.resting for epoch in report.epochs) == resting.total() > 0
    assert all(epoch.failed == 0 for epoch in report.epochs)
    print_audit(report)
    assert "  given up  resting  repeated  " in capsys.readouterr().out
    assert [batch.metrics["groups/resting"] for batch in batches] == [resting[1 + i] for i in range(STEPS)]
    last = batches[-1].metrics
    assert (last["pool/easy"], last["pool/hard"]) == (4, 3)  # of 0, 3, 6, 9 and of 1, 4, 7
    with contextlib.closing(sqlite3.connect(run.ledger)) as ledger:
        ledger.executescript("UPDATE outcomes SET mean = 0.5")
    assert proved(config, run.ledger) == {"resting"}, "somebody has altered what they rested for"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nothing", "rewind", "ledger"])
@pytest.mark.parametrize("seed", draws.cases(range(3), "pools", 1))
def test_the_pools_are_in_the_checkpoint(
    configuration: OrchestratorConfig, tmp_path: Path, seed: int, loss: str
):
    """An attempt that goes on from one makes the batches of an undisturbed run.

    Unless the ledger is lost: then all that is promised is that each prompt is trained on once.
    """
    draw = random.Random(f"{seed} {loss}")
    config = pooled(in_folder(configuration, tmp_path / "run", STEPS, 0), redraw=2)
    run = begin(config, ATTEMPT)
    first = Trainer(run, ATTEMPT, STEPS, draw)
    asyncio.run(until(config, first, draw.randrange(7, STEPS), draw))
    steps = CheckpointStore(run.checkpoints).steps()
    start = (steps[:-1] if loss == "rewind" else steps)[-1:]
    start_step = start[0]
    assert first.trained[start_step - 1].metrics["pool/easy"] > 0
    attempt = go_on(config, start_step, branch="branch_2" if loss == "rewind" else "branch_1")
    if loss == "rewind":
        CheckpointStore(run.checkpoints).set_aside_after(start_step, "aside")
    run.set_batches_aside(tmp_path / "aside", attempt)
    if loss == "ledger":
        for file in run.path.glob("ledger.sqlite*"):
            file.unlink()
    begin(config, attempt)
    second = Trainer(run, attempt, STEPS, draw)
    if start_step < STEPS:
        asyncio.run(see_through(config, attempt, second, Servers(draw), []))
    whole = first.trained[:start_step] + second.trained
    shipped = places(whole)
    assert len(shipped) == len(set(shipped)) == PROMPTS * STEPS
    assert_audit_clean(run, attempt, whole)
    if loss != "ledger":
        calm = run_through(config, tmp_path / "calm", seed + 100)
        assert [places([batch]) for batch in calm] == [places([batch]) for batch in whole]
        if loss == "nothing":
            assert [batch.digest() for batch in calm] == [batch.digest() for batch in whole]


def test_prompts_that_are_left_out_say_how_hard_their_problems_are(
    configuration: OrchestratorConfig, tmp_path: Path
):
    """No batch has them, but their answers were rewarded."""
    config = pooled(in_folder(configuration, tmp_path, STEPS, 0), redraw=100)
    config = config.model_copy(update={"pools": PoolsConfig(easy=0.5, rest=2)})
    settings = {"environment": EnvironmentConfig(name=f"{__name__}:Half", args={"problems": PROBLEMS})}
    config = config.model_copy(update=settings)
    batches = run_through(config, tmp_path / "run", 1)
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    failed = read_ledger(run.ledger).failed
    redrawn = {row["problem"] for row in failed if row["reason"] != RESTS}
    resting = {row["problem"] for row in failed if row["reason"] == RESTS}
    assert redrawn == resting == {problem for problem in range(PROBLEMS) if problem % 2}
    shipped = {problem for batch in batches for problem in batch.header.problems}
    assert shipped == {problem for problem in range(PROBLEMS) if problem % 2 == 0}
    assert_audit_clean(run, ATTEMPT, batches)


class Half(ReverseText):
    """Answers to half of its problems are all right; to the others, some are a little worse than others."""

    def __init__(self, problems: int):
        super().__init__(problems)
        self.asked = Counter[int]()

    def reward(self, problem: int, answer: str) -> float:
        self.asked[problem] += 1
        return 0.5 if problem % 2 else 0.1 * (self.asked[problem] % 2)


def test_where_all_problems_rest_some_are_asked_nonetheless(
    configuration: OrchestratorConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """No more places are passed over than there are problems, and the log says so."""
    pools = PoolsConfig(easy=1.0, rest=1_000_000)
    config = pooled(in_folder(configuration, tmp_path, STEPS, 0), "Solved", pools=pools)
    with caplog.at_level(logging.WARNING):
        batches = run_through(config, tmp_path / "run", 1, deaths=1)
    asked = places(batches)
    assert max(after - place for place, after in itertools.pairwise(asked)) == PROBLEMS + 1
    assert "the problems of 10 prompts in a row rest (orchestrator.pools), so the next one is" in caplog.text
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    assert_audit_clean(run, ATTEMPT, batches)


def test_each_of_several_environments_has_pools_of_its_own(configuration: OrchestratorConfig, tmp_path: Path):
    graded = MixedEnvironmentConfig(
        name=f"{__name__}:Graded", args={"problems": 6}, label="graded", pools=PoolsConfig(hard=0.0)
    )
    solved = MixedEnvironmentConfig(name=f"{__name__}:Solved", args={"problems": 6}, label="solved")
    update = {"environment": EnvironmentConfig(), "environments": [graded, solved]}
    config = in_folder(configuration, tmp_path, STEPS, 0).model_copy(update=update)
    batches = run_through(config, tmp_path / "run", 1, deaths=2)
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    content = read_ledger(run.ledger)
    assert {(row["environment"], row["problem"] % 3) for row in content.failed} == {(0, 1)}
    for batch in batches:
        own = batch.metrics["env/graded/groups/resting"]
        assert own == batch.metrics["groups/resting"]
        assert not any(
            name.startswith(("env/solved/pool", "env/solved/groups/r"))
            for name in batch.metrics
            if name != "env/solved/groups/redrawn"
        )
    assert sum(batch.metrics["groups/resting"] for batch in batches) == len(content.failed) > 0
    assert batches[-1].metrics["env/graded/pool/hard"] == 2
    assert batches[-1].metrics["env/graded/pool/easy"] == 0
    with contextlib.closing(sqlite3.connect(run.ledger)) as database:
        assert database.execute("SELECT DISTINCT environment FROM outcomes").fetchall() == [(0,)]
    assert_audit_clean(run, ATTEMPT, batches)


def test_without_pools_nothing_of_them_is_written(configuration: OrchestratorConfig, tmp_path: Path):
    config = pooled(in_folder(configuration, tmp_path, 4, 0), pools=PoolsConfig())
    batches = run_through(config, tmp_path / "run", 1)
    assert places(batches) == list(range(4 * PROMPTS))
    assert not any("pool" in name or "resting" in name for batch in batches for name in batch.metrics)
    run = config.model_copy(update={"output_dir": str(tmp_path / "run")}).run_directory()
    with contextlib.closing(sqlite3.connect(run.ledger)) as database:
        assert database.execute("SELECT * FROM outcomes").fetchall() == []


# The ledger

RUN = LedgerRun("run", "branch_1", FORMAT, 0, 4, 1, 2, 1, remembered=(2,))


def answered(place: int, *rewards: float, run: LedgerRun = RUN) -> AnswerGroup:
    """A prompt with whole answers of these rewards."""
    versions = [(f"run:branch_1:{place}", 0, 1)]
    rollouts = [Rollout(i, [7], [-0.5], versions, "stop", "g", reward) for i, reward in enumerate(rewards)]
    return AnswerGroup(place, run.order.at(place).problem, place, [1, 2], rollouts)


def fill(ledger: Ledger, *groups: AnswerGroup) -> None:
    for one in groups:
        ledger.issue(one)
        ledger.record(one.place, dict(enumerate(one.rollouts)))


def ship(ledger: Ledger, step: int, place: int) -> None:
    """Ship one place."""
    batch = ShippedBatch(step, [[place, place]], 2, 10, f"digest {step}", step - 1)
    ledger.ship(batch, {place: ledger.run.order.at(place).problem})


def outcomes(ledger: Ledger) -> list[tuple[int, int, float]]:
    """Place, step and mean of all outcomes."""
    with contextlib.closing(sqlite3.connect(ledger.path)) as database:
        return database.execute("SELECT place, step, mean FROM outcomes ORDER BY place").fetchall()


def test_a_batch_that_was_not_noted_before_a_kill_has_its_outcomes(tmp_path: Path):
    """The next process finds its file, and the answers in the ledger."""
    fill(Ledger(tmp_path / "ledger.sqlite", RUN, None, 0), answered(0, 1.0, 0.5))
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    ship(ledger, 1, 0)
    assert outcomes(ledger) == [(0, 1, 0.75)]
    ledger.unship_after(0)
    assert outcomes(ledger) == []


def test_outcomes_whose_answers_are_lost_are_missing_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    ship(ledger, 1, 0)
    assert outcomes(ledger) == []
    assert "the ledger has lost the answers to 1 prompts of batch 1" in caplog.text


def test_only_outcomes_that_count_are_kept_and_a_rewound_copy_forgets_later_ones(tmp_path: Path):
    """As many of a problem as are averaged, and those that a policy still being served may not see yet."""
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    order = RUN.order
    problem = order.at(0).problem
    own = [place for place in range(24) if order.at(place).problem == problem]
    assert len(own) == 6
    other = next(place for place in range(100, 104) if order.at(place).problem != problem)
    for step, place in enumerate(own, start=1):
        fill(ledger, answered(place, 1.0, step / 10))
        if step == 4:
            ledger.fail(answered(place, 1.0, 0.4), "all answers have the same reward", 4)
            fill(ledger, answered(other, 1.0, 0.4))
            ship(ledger, 4, other)
        else:
            ship(ledger, step, place)
    everything = {step: ledger.recent_outcomes(0, problem, step, 2) for step in range(7)}
    assert (everything[0], everything[1]) == (None, None)
    assert everything[2] == (pytest.approx((0.55 + 0.6) / 2), 1)
    snapshot = tmp_path / "snapshot.sqlite"
    snapshot.write_bytes(ledger.snapshot())
    ledger.fold(6)  # a policy of step 4 may still be served
    assert [place for place, _, _ in outcomes(ledger) if place < 100] == own[2:]
    assert all(ledger.recent_outcomes(0, problem, step, 2) == everything[step] for step in (4, 5, 6))
    for step in range(3, 6):
        back = Ledger(tmp_path / f"back_{step}.sqlite", replace(RUN, branch="branch_2"), snapshot, step)
        assert max(found for _, found, _ in outcomes(back)) == step
        assert back.recent_outcomes(0, problem, 100, 2) == everything[step]


def test_a_problem_is_judged_once_it_was_asked_often_enough(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    pools = DifficultyFilter(ledger, [PoolsConfig(easy=0.9, window=2, rest=3)])
    order, problem = RUN.order, RUN.order.at(0).problem
    own = [place for place in range(40) if order.at(place).problem == problem]

    def rests(epoch: int, policy: int) -> bool:
        return pools.skips(AnswerGroup(own[epoch], problem, policy, [], []))

    fill(ledger, answered(own[0], 1.0, 1.0), answered(own[1], 0.5, 1.0), answered(own[2], 1.0, 1.0))
    ship(ledger, 1, own[0])
    assert not rests(1, 1)
    ship(ledger, 2, own[1])
    assert not rests(2, 2)
    assert pools.sizes(0, 2) == {"easy": 0, "hard": 0}
    fill(ledger, answered(own[3], 1.0, 1.0))
    ship(ledger, 3, own[2])
    assert pools.sizes(0, 3) == {"easy": 0, "hard": 0}, "0.75 and 1.0 are 0.875"
    ship(ledger, 4, own[3])
    assert pools.sizes(0, 4) == {"easy": 1, "hard": 0}
    assert not rests(4, 3), "an earlier policy does not know of later batches"
    assert [rests(epoch, 4) for epoch in range(4, 8)] == [True, True, True, False]


# Configuration


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"easy": 0.5, "hard": 0.5}, r"pools\.hard = 0\.5 is not below pools\.easy = 0\.5"),
        ({"rest": 0}, "greater than or equal to 1"),
        ({"window": 0}, "greater than or equal to 1"),
        ({"easy": float("nan")}, "finite"),
    ],
)
def test_what_pools_can_not_be(pools: dict[str, Any], message: str):
    for settings in ({"pools": pools}, {"environments": [{"pools": pools}]}):
        with pytest.raises(ValidationError, match=message):
            OrchestratorConfig.model_validate(settings)


def test_pools_of_an_environment_take_the_place_of_the_runs():
    environments = [{"label": "own", "pools": {"easy": 0.8}}, {"label": "as_the_run"}]
    config = OrchestratorConfig.model_validate({"pools": BOTH, "environments": environments})
    assert [one.pools for one in config.of_environments()] == [PoolsConfig(easy=0.8), BOTH]
    assert [one.pools.remembered for one in config.of_environments()] == [1, 1]
    assert OrchestratorConfig().pools.remembered == 0
