"""Replays: which steps are taken again, with what settings, and how two passes are compared."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cairn.checkpoint.manifest import FileEntry, Manifest
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.run.batches import batch_path
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt
from cairn.tools.ckpt_places import room_in
from cairn.tools.replay.comparison import Comparison, compare_rows, compare_steps
from cairn.tools.replay.parting import bisect
from cairn.tools.replay.recorded import RecordedRun, StepRange
from cairn.tools.replay.replay import Replayed

ROW = {"loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "learned_tokens": 10, "batch/digest": "ab"}


def step(folder: Path, number: int, tensors: dict[str, torch.Tensor], **about: object) -> Path:
    """A checkpoint with these weights, and the optimiser's state of one of them."""
    (folder / "model").mkdir(parents=True)
    (folder / "trainer").mkdir()
    save_file(tensors, folder / "model" / "model.safetensors")
    save_file({"a.exp_avg": tensors["a"] / 2}, folder / "trainer" / "optimizer.safetensors")
    recipe = {"settings": about.pop("settings", {}), "free": [], "changes": about.pop("changes", [])}
    (folder / "trainer" / "state.json").write_text(json.dumps({"recipe": recipe}))
    files = [path for path in folder.rglob("*") if path.is_file()]
    manifest = Manifest.model_validate(
        {
            **{"step": number, "run_id": "run", "attempt": 1, "branch": "branch_1", "parent": None},
            **{"created": "2026-01-01T00:00:00Z", "parts": ["trainer"], "world_size": 1, "dtypes": {}},
            **{"metrics": {}, "versions": {}, "config_digest": ""},
            "files": {path.relative_to(folder).as_posix(): FileEntry.read(path) for path in files},
            **about,
        }
    )
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return folder


def run_with(folder: Path, rows: int, saved: dict[int, dict], config: SFTConfig | TrainerConfig) -> Path:
    """A run directory with rows of metrics and checkpoints, by number, made with what `step` takes."""
    run = RunDirectory(folder)
    folder.mkdir()
    command = "sft" if isinstance(config, SFTConfig) else "trainer"
    run.begin(Attempt("run", 1, command, 0, None, "branch_1"))
    run.config.write_text(config.model_dump_json())
    run.metrics.path.write_text(
        "".join(json.dumps({"step": number, **ROW}) + "\n" for number in range(1, rows + 1))
    )
    for number, about in saved.items():
        tensors = about.pop("tensors", {"a": torch.full((2, 3), float(number))})
        step(folder / "checkpoints" / f"step_{number}", number, tensors, **about)
    return folder


@settings(max_examples=25)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.data(),
)
def test_any_flipped_bit_is_found_at_its_place(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shape: list[int], data: st.DataObject
):
    """Of any tensor of any data type, also where the value becomes another NaN."""
    folder = tmp_path_factory.mktemp("steps")
    was = {"a": torch.zeros(3), "b": torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(dtype)}
    width = 8 * was["b"].element_size()
    kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    index, bit = data.draw(st.integers(0, was["b"].numel() - 1)), data.draw(st.integers(0, width - 1))
    now = {name: tensor.clone() for name, tensor in was.items()}
    mask = (1 << bit) - (1 << width if bit == width - 1 else 0)
    now["b"].view(-1).view(kind)[index] ^= mask
    count, (found,) = compare_steps(step(folder / "was", 1, was), step(folder / "now", 1, now))
    assert count == 3
    assert (found.name, found.changed) == ("model/model: b", 1)
    (value,) = found.first
    assert value.bits == (bit,)
    assert value.place == tuple(int(one) for one in torch.unravel_index(torch.tensor(index), was["b"].shape))


def test_equal_steps_have_no_difference_and_lost_tensors_have_one(tmp_path: Path):
    """NaNs with the same bits are the same; a tensor of one side alone, or of another shape, differs."""
    tensors = {"a": torch.tensor([math.nan, 1.0])}
    one, other = (step(tmp_path / name, 1, tensors) for name in "xy")
    assert compare_steps(one, other) == (2, [])
    more = step(tmp_path / "z", 1, {"a": torch.zeros(3), "c": torch.zeros(1)})
    _, found = compare_steps(one, more)
    assert {tensor.name: tensor.distance for tensor in found} == {
        "model/model: a": math.inf,
        "model/model: c": math.inf,
        "trainer/optimizer: a.exp_avg": math.inf,
    }


def test_rounding_is_judged_by_what_the_steps_change(tmp_path: Path):
    """The same difference is close where the steps changed a lot, and another result where they did not."""
    start = step(tmp_path / "start", 1, {"a": torch.zeros(100)})
    was = step(tmp_path / "was", 2, {"a": torch.ones(100)})
    now = step(tmp_path / "now", 2, {"a": torch.full((100,), 1.01)})
    near = step(tmp_path / "near", 1, {"a": torch.full((100,), 0.9)})
    for begun, verdict in ((start, "close"), (near, "other")):
        _, differing = compare_steps(was, now, begun)
        assert Comparison(differing=differing).verdict(0.05) == verdict
    assert Comparison(differing=differing).verdict(0.5) == "close"


@pytest.mark.parametrize(
    ("column", "value", "verdict"),
    [
        ("loss", 2.5000001, "close"),
        ("loss", 5.0, "other"),
        ("lr", 0.1000001, "other"),
        ("loss", None, "other"),
    ],
)
def test_rows_may_differ_by_rounding_where_they_are_sums(column: str, value: object, verdict: str):
    """A loss may; what is counted, and the learning rate, may not; neither may a row be missing."""
    rows = compare_rows({1: {"step": 1, **ROW}}, {1: {"step": 1, **ROW, column: value}}, [1])
    assert [row.column for row in rows] == [column]
    assert Comparison(rows).verdict(1e-3) == verdict
    exact = Replayed(StepRange(0, 1), 1, True, 1e-3, [], Comparison(rows), False)
    assert not exact.ok


def test_without_rows_nothing_is_proved():
    """A replay that has written no row differs in everything that the run has."""
    assert {row.column for row in compare_rows({1: {"step": 1, **ROW}}, {}, [1])} == ROW.keys()


@pytest.mark.parametrize(
    ("after", "through", "expected"),
    [
        (None, None, (10, 20)),
        (None, 10, (0, 10)),
        (12, None, (10, 13)),
        (20, None, (20, 21)),
        (3, 10, (0, 10)),
    ],
)
def test_steps_begin_at_the_nearest_checkpoint(
    tmp_path: Path, after: int | None, through: int | None, expected: tuple[int, int]
):
    """Those before the newest checkpoint if none is named."""
    run = RecordedRun.local(run_with(tmp_path / "run", 22, {10: {}, 20: {}}, SFTConfig()))
    stretch = run.stretch(after, through)
    assert (stretch.start, stretch.last) == expected


def test_steps_that_can_not_be_taken_again_are_refused(tmp_path: Path):
    """With what is missing: a row, a setting as it was, a batch, and a run at all."""
    changes = [{"step": 15, "name": "optimizer.lr", "was": 1, "now": 2, "accepted": True}]
    folder = run_with(tmp_path / "run", 22, {10: {}, 20: {"changes": changes}}, SFTConfig())
    run = RecordedRun.local(folder)
    with pytest.raises(UsageError, match=r"has no step 23 to 30.*the newest step is 22"):
        run.stretch(20, 30)
    with pytest.raises(UsageError, match="was changed after step 15, whose checkpoint is gone"):
        run.stretch(None, None)
    with pytest.raises(UsageError, match="--through 5: must be later than step 12"):
        run.stretch(12, 5)
    with pytest.raises(UsageError, match="is not a run directory"):
        RecordedRun.local(tmp_path)
    shipped = RecordedRun.local(run_with(tmp_path / "shipped", 20, {10: {}, 20: {}}, TrainerConfig()))
    (tmp_path / "shipped" / "trained").mkdir()
    for number in (11, 13):
        batch_path(tmp_path / "shipped" / "trained", number).touch()
    with pytest.raises(UsageError, match="the batches of step 12, 14 to 20 are not kept"):
        shipped.batches(shipped.stretch(None, None))


def test_settings_are_those_of_the_time(tmp_path: Path):
    """The recipe's where it says something, the end of a schedule kept, and nothing that others would see."""
    config = SFTConfig.model_validate(
        {
            "max_steps": 100,
            "optimizer": {"lr": 0.5},
            "scheduler": {"type": "linear"},
            "wandb": {"mode": "offline"},
            "ckpt": {"interval": 10, "remote": "s3://bucket/run"},
        }
    )
    then = {"optimizer.lr": 0.25, "scheduler.steps": 80}
    run = RecordedRun.local(run_with(tmp_path / "run", 20, {10: {}, 20: {"settings": then}}, config))
    found = run.settings(run.stretch(None, None))
    assert (found["optimizer"]["lr"], found["scheduler"]["steps"], found["max_steps"]) == (0.25, 80, 20)
    assert (found["wandb"], found["ckpt"]) == (None, {})
    SFTConfig.model_validate(found)


def test_what_killed_commands_have_left_is_removed(tmp_path: Path):
    """Not the folder of one that is at work, or that is only just made."""
    left, new = tmp_path / ".cairn-left", tmp_path / ".cairn-new"
    for folder in (left, new):
        (folder / "run").mkdir(parents=True)
    (left / ".at-work").touch()
    with room_in(tmp_path) as one, room_in(tmp_path) as other:
        assert {path.name for path in tmp_path.iterdir()} == {new.name, one.name, other.name}
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def test_kept_batches_are_the_newest_that_there_is_room_for(tmp_path: Path):
    """A commit moves them; those of steps that are taken again are set aside with the rest."""
    run = RunDirectory(tmp_path)
    run.batches.mkdir()
    for number in range(1, 7):
        batch_path(run.batches, number).write_bytes(bytes(100))
    run.forget_batches(2, keep_bytes=350)
    run.forget_batches(5, keep_bytes=350)
    assert sorted(path.name for path in run.trained.iterdir()) == [f"step_{n}.safetensors" for n in (3, 4, 5)]
    assert run.batch_steps() == [6]
    attempt = Attempt("run", 2, "trainer", 4, None, "branch_2")
    run.set_batches_aside(tmp_path / "aside", attempt)
    assert sorted(path.name for path in run.trained.iterdir()) == [f"step_{n}.safetensors" for n in (3, 4)]
    assert (tmp_path / "aside" / "trained" / "step_5.safetensors").exists()
    run.forget_batches(6)
    assert run.batch_steps() == []


def alter(run: Path, number: int, **columns: object) -> None:
    """Change columns of a row of metrics."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number - 1] |= columns
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("columns", "settings", "role", "what", "explaining"),
    [
        ({"batch/digest": "cd"}, {"seq_len": 8}, "trainer", "another batch", ["--seq-len: 8 -> 16"]),
        ({"lr": 0.2}, {"optimizer.lr": 8}, "trainer", "learning rate", ["--optimizer.lr: 8 -> 16"]),
        ({"lr": 0.2}, {"seq_len": 8}, "trainer", "learning rate", []),
        ({"loss": 1.0}, {"seq_len": 8}, "trainer", "weights after step 11", ["--seq-len: 8 -> 16"]),
    ],
)
def test_where_runs_part(
    tmp_path: Path, columns: dict, settings: dict, role: str, what: str, explaining: list[str]
):
    """At the first row that differs, by the column that does; settings that can explain it are named."""
    runs = []
    for name, factor in (("a", 1), ("b", 2)):
        then = {key: factor * value for key, value in settings.items()}
        saved = {10: {"settings": then}, 20: {"settings": then}}
        if factor == 2:
            saved[20]["tensors"] = {"a": torch.full((2, 3), 7.0)}
        runs.append(run_with(tmp_path / name, 20, saved, SFTConfig()))
    alter(runs[1], 12, **columns)
    found = bisect(RecordedRun.local(runs[0]), RecordedRun.local(runs[1]))
    assert (found.step, found.same_through, found.role, found.checkpoint) == (12, 11, role, 20)
    assert what in found.what
    assert found.explaining == explaining
    assert [tensor.changed for tensor in found.tensors] == [6, 6]


def test_runs_that_never_part(tmp_path: Path):
    """Through the last step that both have; runs without a common step are refused."""
    one, other = (
        RecordedRun.local(run_with(tmp_path / name, rows, {10: {}}, SFTConfig()))
        for name, rows in (("a", 12), ("b", 15))
    )
    found = bisect(one, other)
    assert (found.step, found.same_through) == (None, 12)
    empty = RecordedRun.local(run_with(tmp_path / "c", 0, {}, SFTConfig()))
    with pytest.raises(UsageError, match="have no step in common"):
        bisect(one, empty)
