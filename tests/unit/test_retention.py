"""Which steps are kept, as a rule over what is on disk, and what happens when that rule is applied."""

import itertools
import json
import logging
import math
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from runs import ABOUT

from cairn.checkpoint.eval_metrics import RATINGS, Ratings, note, ratings_in, ratings_of
from cairn.checkpoint.manifest import load_manifest
from cairn.checkpoint.retention import apply_retention, reasons_to_keep
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tiers import SavedStep, read_steps
from cairn.config.ckpt import CkptConfig
from cairn.run import faults

# The rule

VALUES = st.one_of(st.integers(-3, 3), st.floats(), st.none(), st.text(max_size=2), st.booleans())
METRICS = st.one_of(st.just({}), st.dictionaries(st.sampled_from(["loss", "reward/mean"]), VALUES))
STEPS = st.dictionaries(st.integers(1, 40), METRICS, max_size=15).map(
    lambda found: [SavedStep(number, metrics) for number, metrics in found.items()]
)
COUNT = st.none() | st.integers(1, 6)
BEST = st.none() | st.tuples(
    st.integers(1, 4), st.sampled_from(["loss", "reward/mean", "nowhere"]), st.sampled_from(["min", "max"])
)


@st.composite
def rules(draw) -> CkptConfig:
    best = draw(BEST)
    best = {} if best is None else dict(zip(("keep_best", "metric", "mode"), best, strict=True))
    milestones = draw(st.lists(st.integers(1, 40), max_size=3))
    return CkptConfig(keep_last=draw(COUNT), keep_every=draw(COUNT), milestones=milestones, **best)


PINNED = st.sets(st.integers(1, 40), max_size=3)


def kept(steps: list[SavedStep], config: CkptConfig, pinned: set[int]) -> set[int]:
    return {number for number, why in reasons_to_keep(steps, config, pinned).items() if why}


def best_of(steps: list[SavedStep], config: CkptConfig) -> set[int]:
    """The best steps, by looking for the best one again and again."""
    values = {step.step: step.metrics.get(config.metric) for step in steps}
    rated = {n: v for n, v in values.items() if isinstance(v, int | float) and not math.isnan(v)}
    found: set[int] = set()
    while rated and len(found) < config.keep_best:
        top = min(rated.values()) if config.mode == "min" else max(rated.values())
        newest = max(number for number, value in rated.items() if value == top)
        found.add(newest)
        del rated[newest]
    return found


@given(STEPS, rules(), PINNED)
def test_it_is_the_union_of_its_rules(steps, config, pinned):
    """Each rule says by itself what it keeps; what none keeps may go; with no bound, nothing goes."""
    numbers = sorted(step.step for step in steps)
    expected = set(numbers[-1:])
    if config.keep_last is None and config.keep_best is None:
        expected |= set(numbers)
    if config.keep_last is not None:
        expected |= set(numbers[-config.keep_last :])
    if config.keep_best is not None:
        expected |= best_of(steps, config)
    if config.keep_every is not None:
        expected |= {number for number in numbers if number % config.keep_every == 0}
    expected |= (set(config.milestones) | pinned) & set(numbers)
    assert kept(steps, config, pinned) == expected
    assert reasons_to_keep(steps, config, pinned).keys() == set(numbers)


@given(STEPS, rules(), PINNED, st.randoms(use_true_random=False))
def test_the_newest_is_always_kept_and_the_order_does_not_matter(steps, config, pinned, chance):
    """Whatever the rules are, and however the steps come."""
    found = reasons_to_keep(steps, config, pinned)
    if steps:
        assert found[max(step.step for step in steps)]
    chance.shuffle(steps)
    assert reasons_to_keep(steps, config, pinned) == found


@given(STEPS, rules(), PINNED)
def test_applied_twice_is_applied_once(steps, config, pinned):
    """What is kept once is kept again, for the same reasons, after any number of restarts."""
    first = reasons_to_keep(steps, config, pinned)
    left = [step for step in steps if first[step.step]]
    assert reasons_to_keep(left, config, pinned) == {number: why for number, why in first.items() if why}


@given(STEPS, rules(), PINNED, st.integers(1, 6))
def test_to_keep_more_keeps_more(steps, config, pinned, more):
    """A larger keep_last never deletes what a smaller one keeps; neither does a milestone or pin more."""
    small = config.model_copy(update={"keep_last": more})
    large = config.model_copy(update={"keep_last": more + 1})
    assert kept(steps, small, pinned) <= kept(steps, large, pinned)
    wide = small.model_copy(update={"milestones": [*small.milestones, more]})
    assert kept(steps, small, pinned) <= kept(steps, wide, pinned)
    assert kept(steps, small, pinned) <= kept(steps, small, pinned | {more})


@given(STEPS, rules(), PINNED, METRICS)
def test_what_was_deleted_is_never_wanted_again(steps, config, pinned, metrics):
    """With a newer step, nothing is kept that was to go before: deleting early loses nothing."""
    before = kept(steps, config, pinned)
    newer = SavedStep(max((step.step for step in steps), default=0) + 1, metrics)
    assert kept([*steps, newer], config, pinned) <= before | {newer.step}


def test_reasons_are_named():
    """For `ckpt list`; of equally good steps the newer is the better one."""
    steps = [
        SavedStep(n, {"loss": value}) for n, value in [(10, 1.0), (20, 1.0), (25, None), (30, 2.0), (40, 3.0)]
    ]
    config = CkptConfig(
        keep_last=1, keep_every=20, keep_best=1, metric="loss", mode="min", milestones=[30, 99]
    )
    assert reasons_to_keep(steps, config, {10, 98}) == {
        10: ["pin"],
        20: ["best", "every"],
        25: [],
        30: ["milestone"],
        40: ["newest", "last", "every"],
    }


@pytest.mark.parametrize("value", [math.nan, None, "1", [1], {}])
def test_what_is_not_a_number_is_never_best(value):
    """Nor does it push out what is; a run that has diverged keeps its best step."""
    for mode, number in itertools.product(("min", "max"), (1, 2)):
        config = CkptConfig(keep_best=1, metric="loss", mode=mode)
        steps = [
            SavedStep(number, {"loss": 1.0}),
            SavedStep(3 - number, {"loss": value}),
            SavedStep(3, {}),
            SavedStep(4, {"other": 0.0}),
        ]
        assert kept(sorted(steps, key=lambda step: step.step), config, set()) == {number, 4}


@pytest.mark.parametrize(
    "bad",
    [
        *({key: value} for key in ("keep_last", "keep_every", "keep_best") for value in (0, -1, 1.5)),
        {"keep_best": 1},
        {"keep_best": 1, "metric": "loss"},
        {"keep_best": 1, "metric": "loss", "mode": "median"},
    ],
    ids=str,
)
def test_rules_that_make_no_sense_are_refused(bad):
    """When the configuration is read, not when the first step is deleted."""
    with pytest.raises(ValidationError):
        CkptConfig(**bad)


def test_keep_is_an_alias():
    """Of keep_last, as the README says."""
    assert CkptConfig(keep=3).keep_last == 3


# Applied to what is on disk


def commit(store: CheckpointStore, step: int, loss: float = 0.0) -> Path:
    store.begin(step, ["model"])
    store.write_part(step, "files", {"model/config.json": b"{}", "model/data": bytes(100)}, "run:1")
    store.commit(
        step, dict.fromkeys(["files"], "run:1"), timeout=0.0, about={**ABOUT, "metrics": {"loss": loss}}
    )
    return store.folder(step)


def debris(store: CheckpointStore, step: int) -> Path:
    store.begin(step, ["model"])
    (store.folder(step) / "model" / "data").write_bytes(b"half")
    return store.folder(step)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def no_faults(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """For tests that set CAIRN_FAULT: its count of how often a point was reached starts anew."""
    monkeypatch.setattr(faults, "_reached", {})
    return monkeypatch


def test_rules_outlive_restarts(store: CheckpointStore):
    """They look at the disk alone: what one process forgot the next one finds, the best step too."""
    config = CkptConfig(keep_last=1, keep_best=1, metric="loss", mode="min")
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: 2.5}
    for step, loss in losses.items():
        commit(store, step, loss)
        apply_retention(CheckpointStore(store.root), config)
    assert store.steps() == [2, 5]
    for step in (2, 5):
        verify(store.folder(step))
    assert apply_retention(CheckpointStore(store.root), config) == []
    assert [s.metrics for s in read_steps(store, Ratings())] == [{"loss": 1.0}, {"loss": 2.5}]


def test_without_a_bound_nothing_is_deleted(store: CheckpointStore):
    """Also with rules that only keep."""
    for step in range(1, 6):
        commit(store, step)
    assert apply_retention(store, CkptConfig(keep_every=2, milestones=[3])) == []
    assert store.steps() == [1, 2, 3, 4, 5]
    assert apply_retention(store, CkptConfig(keep_last=1, keep_every=2, milestones=[3])) == [1]
    assert store.steps() == [2, 3, 4, 5]


def test_a_step_with_a_damaged_manifest_counts_as_one_without_metrics(store: CheckpointStore):
    """It does not stop the rules."""
    config = CkptConfig(keep_best=1, metric="loss", mode="min")
    for step in (1, 2, 3):
        commit(store, step, loss=step)
    (store.folder(1) / "manifest.json").write_bytes(b"{")
    assert apply_retention(store, config) == [1]
    assert store.steps() == [2, 3]


# What an evaluation says of a step arrives after the step was saved

RATED = CkptConfig(keep_best=1, metric="eval/held_out/reward", mode="max", metric_interval=2)
ROW = {"name": "held_out", "run_id": ABOUT["run_id"], "branch": ABOUT["branch"], "reward_ci95": 0.1}


def rate(store: CheckpointStore, rewards: dict[int, float | None]) -> None:
    """As the orchestrator does; None: the evaluation failed."""
    rows = [ROW | {"step": step} | ({} if r is None else {"reward": r}) for step, r in rewards.items()]
    note(store.root, ratings_of(rows))


def test_steps_stay_until_they_are_evaluated_and_then_the_best(store: CheckpointStore):
    """Those that won't be evaluated go at once, and those whose evaluation failed after it."""
    for step in range(1, 6):
        commit(store, step)
        apply_retention(CheckpointStore(store.root), RATED)
    assert store.steps() == [2, 4, 5]
    rate(store, {2: 0.5})
    assert apply_retention(CheckpointStore(store.root), RATED) == []
    rate(store, {2: 0.5, 4: 0.4})
    assert apply_retention(CheckpointStore(store.root), RATED) == [4]
    commit(store, 6)
    rate(store, {2: 0.5, 4: 0.4, 6: None})
    commit(store, 7)
    assert apply_retention(CheckpointStore(store.root), RATED) == [5, 6]
    assert store.steps() == [2, 7]
    assert reasons_to_keep(read_steps(store, ratings_in(store.root)), RATED, set())[2] == ["best"]


def test_at_most_four_steps_wait_for_their_evaluation(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
):
    for step in range(2, 14, 2):
        commit(store, step)
        apply_retention(store, RATED)
    assert store.steps() == [6, 8, 10, 12]
    assert "step 4 is deleted before it is evaluated: 4 newer ones wait as well" in caplog.text


def test_results_of_other_policies_do_not_count(store: CheckpointStore):
    """A step's row of metrics holds those of the policy that was evaluated while it was trained."""
    for step in (2, 4, 6):
        commit(store, step)
        file = store.folder(step) / "manifest.json"
        content = json.loads(file.read_text())
        content["metrics"] |= {"eval/held_out/reward": float(step), "eval/held_out/step": step - 2}
        file.write_text(json.dumps(content))
    other = [ROW | {"step": 4, "reward": 9.0, "branch": "another"}]
    mine = [ROW | {"step": step, "reward": 1.0 / step} for step in (2, 4, 6)]
    note(store.root, ratings_of([*mine, *other]))
    assert apply_retention(store, RATED) == [4]
    assert store.steps() == [2, 6]


def test_nothing_is_deleted_if_the_ratings_can_not_be_read(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
):
    for step in (2, 4, 6):
        commit(store, step)
    (store.root / RATINGS).write_text("[")
    assert apply_retention(store, RATED) == []
    assert "no checkpoint is deleted" in caplog.text
    rate(store, {2: 1.0, 4: 2.0, 6: 3.0})  # the orchestrator writes it anew
    assert apply_retention(store, RATED) == [2, 4]


def test_pins_are_kept_until_they_are_taken_away(store: CheckpointStore):
    """Across processes, and whatever was pinned before."""
    config = CkptConfig(keep_last=1)
    for step in range(1, 6):
        commit(store, step)
    for step in (2, 4, 3):
        store.set_pin(step, True)
    store.set_pin(3, False)
    store.set_pin(5, False)
    assert CheckpointStore(store.root).pins() == {2, 4}
    assert apply_retention(CheckpointStore(store.root), config) == [1, 3]
    store.set_pin(2, False)
    assert apply_retention(store, config) == [2]
    assert store.steps() == [4, 5]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"5", b'{"a": 1}', b'[["x"]]', b'["2"]', b""], ids=repr)
def test_pins_that_cannot_be_read_delete_nothing(store: CheckpointStore, caplog, content: bytes):
    """Perhaps they are what keeps a step: that they are damaged is reported, and all steps stay."""
    for step in range(1, 4):
        commit(store, step)
    (store.root / "pins.json").write_bytes(content)
    assert apply_retention(store, CkptConfig(keep_last=1)) == []
    assert store.steps() == [1, 2, 3]
    assert "pins.json" in caplog.text


@pytest.mark.parametrize("point", ["retention.before_delete", "retention.manifest_deleted"])
@pytest.mark.parametrize("error", ["EACCES", "EIO", "ENOSPC"])
def test_a_failed_delete_is_reported_and_not_fatal(store, caplog, no_faults, point: str, error: str):
    """The other steps go all the same; what is left over goes the next time."""
    for step in range(1, 5):
        commit(store, step)
    no_faults.setenv("CAIRN_FAULT", f"{point}:{error}@2")
    assert apply_retention(store, CkptConfig(keep_last=1)) == [1, 3]
    assert "could not delete checkpoint 2" in caplog.text
    no_faults.delenv("CAIRN_FAULT")
    assert store.steps() == ([2, 4] if point.endswith("before_delete") else [4])
    apply_retention(store, CkptConfig(keep_last=1))
    assert (store.steps(), store.debris()) == ([4], [])
    assert os.listdir(store.root) == ["step_4"]


@pytest.fixture
def immutable():
    """Makes folders such that not even root can delete what is in them; skips where that can't be done."""
    done: list[Path] = []

    def make(folder: Path) -> None:
        result = subprocess.run(["chattr", "+i", folder], capture_output=True, check=False)
        if result.returncode:
            pytest.skip(f"chattr +i: {result.stderr.decode().strip()}")
        done.append(folder)

    yield make
    for folder in done:
        subprocess.run(["chattr", "-i", folder], check=True)


def test_what_the_system_refuses_to_delete_is_reported(store: CheckpointStore, caplog, immutable):
    """A real refusal, halfway through a step: it has ceased to exist, the rest of it is debris, others go."""
    for step in range(1, 4):
        commit(store, step)
    stubborn = store.folder(1)
    immutable(stubborn / "model")
    assert apply_retention(store, CkptConfig(keep_last=1)) == [2]
    assert "could not delete checkpoint 1" in caplog.text
    assert (store.steps(), store.debris()) == ([3], [stubborn])
    caplog.clear()
    commit(store, 4)
    assert apply_retention(store, CkptConfig(keep_last=1)) == [3]
    assert (store.steps(), store.debris()) == ([4], [stubborn])
    assert str(stubborn) in caplog.text, "debris that can't be removed is reported again"
    verify(store.folder(4))


def test_debris_goes_but_never_that_of_a_save_in_flight(store: CheckpointStore, caplog):
    """What lies behind the newest step was never completed; what lies beyond it may be under way."""
    caplog.set_level(logging.WARNING)
    old, newest = debris(store, 3), commit(store, 5)
    flying = debris(store, 7)
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    for config in (CkptConfig(), CkptConfig(keep_last=1)):
        assert apply_retention(store, config) == []
        assert (store.steps(), store.debris()) == ([5], [flying])
    assert str(old) in caplog.text
    assert str(flying) not in caplog.text
    after = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    assert after == {path: data for path, data in before.items() if old not in path.parents}
    assert load_manifest(newest).step == 5


def test_debris_alone_is_left_alone(store: CheckpointStore):
    """Before the first commit there is no saying which is in flight."""
    folders = [debris(store, 3), debris(store, 5)]
    assert apply_retention(store, CkptConfig(keep_last=1)) == []
    assert store.debris() == folders


def test_what_else_lies_there_is_left_alone(store: CheckpointStore):
    """Abandoned steps, pins and a user's own files are not ours to delete."""
    for step in (1, 2):
        commit(store, step)
    aside = store.set_aside_after(1, "before_attempt_2")
    commit(store, 3)
    (store.root / "step_1_backup").mkdir()
    (store.root / "notes.txt").write_text("mine")
    store.set_pin(9, True)
    assert apply_retention(store, CkptConfig(keep_last=1)) == [1]
    assert verify(aside / "step_2").step == 2
    assert sorted(os.listdir(store.root)) == [
        "abandoned",
        "notes.txt",
        "pins.json",
        "step_1_backup",
        "step_3",
    ]
    assert json.loads((store.root / "pins.json").read_text()) == [9]
