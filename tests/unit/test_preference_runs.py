"""Training on preferences: the reference's logprobs, KTO's reference point, the task, several data sets."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import one_rank
from preference_records import EXAMPLES, PAIRS, pair_of, write
from pydantic import ValidationError
from tiny import write_example

from cairn.config.preferences import DPOConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt
from cairn.trainer.data.opening import identity_of_records
from cairn.trainer.frozen import reference
from cairn.trainer.frozen.reference import add_reference_point
from cairn.trainer.group import RankGroup
from cairn.trainer.losses import REFERENCE
from cairn.trainer.losses.dpo import DPO as OwnPairs
from cairn.trainer.losses.kto import KTO
from cairn.trainer.losses.preferences import POINT
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, Context, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step
from cairn.trainer.tasks.dpo import DPOTask

group = one_rank


# The reference, and the task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path) -> DPOConfig:
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    return DPOConfig(seq_len=24, data=data, output_dir=str(tmp_path / "run"), optimizer={"lr": 0.01})


def begin(group: RankGroup, folder: Path, config: DPOConfig) -> tuple[TrainerState, Context]:
    state = TrainerState(config, group, {POLICY: make_policy(folder, config, group)}, TrainerProgress())
    state.begin(folder)
    run = RunDirectory(config.output_dir)
    run.path.mkdir(exist_ok=True)
    attempt = Attempt("r", 1, "dpo", start_step=0, resume_from=None, branch="main")
    return state, Context(run, attempt, state, folder, {})


def take(state: TrainerState, task: DPOTask, step: int) -> dict[str, float]:
    work = make_rank_batch(
        task.next_batch(step), state.config, rank=0, world_size=1, arrange=state.scorer.rows.arrange
    )
    task.prepare(work)
    return train_step(state, work, step, task.loss)


def files_of(config: DPOConfig) -> list[Path]:
    return sorted((Path(config.output_dir) / "reference").glob("*/*.safetensors"))


def test_at_the_first_step_the_policy_is_the_reference(group: RankGroup, folder: Path, config: DPOConfig):
    """And after it chosen answers are ahead; epochs count pairs."""
    state, context = begin(group, folder, config)
    task = DPOTask(config, context)
    first, second = take(state, task, 1), take(state, task, 2)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert second["rewards/margins"] > 0.01
    assert state.progress.total_samples == 8
    assert task.next_batch(3).metrics["epoch"] == 1.2


def test_what_was_computed_before_a_death_is_kept(
    group: RankGroup, folder: Path, config: DPOConfig, monkeypatch: pytest.MonkeyPatch
):
    """The missing files are computed, and no others; the weights that are trained now have no influence."""
    monkeypatch.setattr(reference, "CHUNK", 3)
    state, context = begin(group, folder, config)
    first = DPOTask(config, context).next_batch(1)
    paths = files_of(config)
    assert [path.name for path in paths] == [f"records_{i}.safetensors" for i in (0, 3, 6, 9)]
    before = {path: path.read_bytes() for path in paths}
    paths[1].unlink()
    paths[2].write_bytes(before[paths[2]][:-3])
    untouched = paths[0].stat().st_mtime_ns
    for weight in state.policy.module.parameters():
        weight.data.mul_(1.5)
    again = DPOTask(config, replace(context, recipe={})).next_batch(1)
    assert again.digest() == first.digest()
    assert {path: path.read_bytes() for path in paths} == before
    assert paths[0].stat().st_mtime_ns == untouched


def test_a_resumed_run_reads_them_and_needs_no_reference(
    group: RankGroup, folder: Path, config: DPOConfig, monkeypatch: pytest.MonkeyPatch
):
    _, context = begin(group, folder, config)
    DPOTask(config, context)
    monkeypatch.setattr(reference, "Frozen", None)  # nothing is loaded
    DPOTask(config, context)


def test_other_weights_settings_or_records_have_logprobs_of_their_own(
    group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path
):
    _, context = begin(group, folder, config)
    DPOTask(config, context)
    longer = config.model_copy(update={"seq_len": 32})
    DPOTask(longer, begin(group, folder, longer)[1])
    other = write_example(tmp_path / "other", seed=1)
    DPOTask(config, begin(group, other, config)[1])
    assert len(files_of(config)) == 3


@pytest.mark.parametrize("in_full", [[], ["model.norm"]])
def test_with_an_adapter_the_reference_is_the_base(
    group: RankGroup,
    folder: Path,
    config: DPOConfig,
    monkeypatch: pytest.MonkeyPatch,
    in_full: list[str],
):
    """Whatever the adapter has learned when the reference has to score again.

    A copy of the base is loaded only if more than an adapter is trained.
    """
    plain = DPOTask(config, begin(group, folder, config)[1]).next_batch(1)
    for path in files_of(config):
        path.unlink()
    loaded = []
    copy = reference.Frozen
    monkeypatch.setattr(reference, "Frozen", lambda *a, **k: loaded.append(a[0]) or copy(*a, **k))
    lora = {"rank": 2, "dropout": 0.5, "modules_to_save": in_full}
    adapted = DPOConfig(**{**config.model_dump(), "lora": lora})
    state, context = begin(group, folder, adapted)
    for name, weight in state.policy.trained().items():
        if "lora_B" in name or in_full:
            weight.data.fill_(0.3)
    again = DPOTask(adapted, context).next_batch(1)
    for one, other in zip(plain.samples, again.samples, strict=True):
        np.testing.assert_array_equal(one.columns[REFERENCE], other.columns[REFERENCE])
    assert bool(loaded) == bool(in_full)
    assert state.policy.module.training
    assert not any(getattr(module, "_disable_adapters", False) for module in state.policy.module.modules())


def test_an_adapter_of_a_run_without_a_reference_is_refused(
    group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path
):
    (tmp_path / "model").mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    context = replace(begin(group, folder, config)[1], model_folder=tmp_path / "model")
    with pytest.raises(UsageError, match=r"its run had no reference.* Begin a new run with the merged"):
        DPOTask(config, context)


def test_weights_that_are_gone_are_named(group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path):
    origin = reference.ReferenceWeights.of(folder, group)
    origin.check(group)
    with pytest.raises(UsageError, match="holds others now"):
        replace(origin, digest="0").check(group)
    with pytest.raises(UsageError, match="is gone"):
        replace(origin, folder=str(tmp_path / "none")).check(group)


def test_losses_without_a_reference_compute_none(group: RankGroup, folder: Path, config: DPOConfig):
    config = DPOConfig(**{**config.model_dump(), "loss": {"type": "simpo"}})
    state, context = begin(group, folder, config)
    task = DPOTask(config, context)
    assert "rewards/margins" in take(state, task, 1)
    assert not files_of(config)


def test_a_stop_while_the_reference_scores(group: RankGroup, folder: Path, config: DPOConfig):
    _, context = begin(group, folder, config)
    context.run.request_stop("a test")
    assert DPOTask(config, context).next_batch(1) is None


def test_records_that_have_changed_are_refused(
    group: RankGroup, folder: Path, config: DPOConfig, tmp_path: Path
):
    _, context = begin(group, folder, config)
    kept = {"data": {"records": 3, "digest": "x"}}
    words = "holds other records than when the run was started"
    with pytest.raises(BadRecord, match=rf"--data\.name .*/pairs\.jsonl {words}"):
        DPOTask(config, replace(context, recipe=kept))
    mixed = DPOConfig(**{**config.model_dump(), "data": several(tmp_path)})
    with pytest.raises(BadRecord, match=rf"data\.sets: .*/first\.jsonl, .*/second\.jsonl {words}"):
        DPOTask(mixed, replace(context, recipe=kept))


# Single answers: the reference point, and the task


@pytest.fixture
def kto(tmp_path: Path) -> DPOConfig:
    data = write(tmp_path / "answers.jsonl", EXAMPLES)
    return DPOConfig(
        seq_len=32, data=data, output_dir=str(tmp_path / "run"), optimizer={"lr": 0.01}, loss={"type": "kto"}
    )


def test_training_on_single_answers(group: RankGroup, folder: Path, kto: DPOConfig):
    """At first the policy is the reference; then desirable answers are ahead. A resumed run goes on with the
    same batches, and neither scores the reference's logprobs again nor loads it."""
    state, context = begin(group, folder, kto)
    task = DPOTask(kto, context)
    rows = [take(state, task, step) for step in range(1, 7)]
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert all(row["kl"] >= 0 for row in rows)
    assert max(row["kl"] for row in rows) > 0
    assert rows[-1]["rewards/chosen"] > rows[-1]["rewards/rejected"]
    assert state.progress.total_samples == 24
    (path,) = files_of(kto)
    assert reference._read(path).shape == (12, 2)
    seventh = task.next_batch(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "Frozen", None)
        assert DPOTask(kto, context).next_batch(7).digest() == seventh.digest()
    assert len(seventh.samples) == len(seventh.scored) == 4


def test_the_point_does_not_depend_on_micro_batches_and_ranks(group: RankGroup, folder: Path, kto: DPOConfig):
    """It is the mean log-ratio of all answers to other prompts; a mean below 0 counts as 0."""
    state, context = begin(group, folder, kto)
    task = DPOTask(kto, context)
    for step in range(1, 5):
        take(state, task, step)
    batch = task.next_batch(5)

    def ratio_of(sample: Sample) -> float:
        ids = torch.tensor(sample.token_ids)[None].long()
        with torch.no_grad():
            logits = state.policy.module(input_ids=ids).logits.double()
        found = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return found[torch.tensor(sample.loss_mask[1:])].sum().item() - float(sample.columns[REFERENCE][0])

    mean = np.mean([ratio_of(sample) for sample in batch.scored])

    def point_of(rank: int, ranks: int, gather: Any, **settings: Any) -> float:
        config = kto.model_copy(update=settings)
        work = make_rank_batch(batch, config, rank=rank, world_size=ranks)
        add_reference_point(work, state.scorer, SimpleNamespace(device=group.device, gather_micros=gather))
        (point,) = {value for micro in work.micros for value in micro.columns[POINT].unique().tolist()}
        return point

    sums: list[torch.Tensor] = []
    for sign in (1, -1):
        for sample in batch.scored:
            sample.columns[REFERENCE] += np.float32(0 if sign > 0 else 2 * abs(mean) + 1)
        expected = max(mean, 0.0) if sign > 0 else 0.0
        for tokens in (1, 8):
            point = point_of(0, 1, group.gather_micros, micro_batch_size=tokens)
            assert point == pytest.approx(expected, rel=1e-4, abs=1e-6)
        sums.clear()
        point_of(1, 2, lambda rows: sums.append(rows) or rows)
        both = point_of(0, 2, lambda rows: torch.stack([rows, *sums], 1).flatten(0, 1))
        assert both == point_of(0, 1, group.gather_micros)
    assert mean > 0, "otherwise nothing but the bound was tested"


class MyLoss(KTO):
    """A loss of single answers."""


def test_a_loss_of_ones_own_over_single_answers(group: RankGroup, folder: Path, kto: DPOConfig):
    """It says what it learns from, and pairs are not that."""
    own = {"type": f"{__name__}:MyLoss", "args": {"beta": 0.2}}
    wrong = DPOConfig(**{**kto.model_dump(), "loss": own})
    with pytest.raises(UsageError, match=r"it learns from examples, and gets pairs: set loss.records"):
        DPOTask(wrong, begin(group, folder, wrong)[1])
    right = DPOConfig(**{**kto.model_dump(), "loss": {**own, "records": "examples"}})
    state, context = begin(group, folder, right)
    assert take(state, DPOTask(right, context), 1)["loss"] == pytest.approx(0.5, abs=1e-6)
    assert (right.together, wrong.together) == (1, 2)


# Several data sets, and streams


def several(tmp_path: Path, **of_second: Any) -> dict[str, Any]:
    """Ten pairs, and five others that weigh twice as much."""
    write(tmp_path / "first.jsonl", PAIRS)
    write(tmp_path / "second.jsonl", [pair_of("hgfe"[i % 3 :] + str(i)) for i in range(5)])
    first, second = ({"name": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second"))
    return {"sets": [first, {**second, "weight": 2.0, **of_second}], "batch_size": 4, "shuffle_block": 3}


@pytest.mark.parametrize(
    ("loss", "of_second"),
    [({"type": "dpo"}, {}), ({"type": "kto"}, {}), ({"type": "simpo"}, {"read": "stream"})],
)
def test_a_run_goes_on_with_the_very_next_unit_of_each_data_set(
    group: RankGroup, folder: Path, tmp_path: Path, loss: dict, of_second: dict
):
    """Shares are the weights, and the reference's logprobs are those of each unit."""
    data = several(tmp_path, **of_second)
    config = DPOConfig(seq_len=24, data=data, output_dir=str(tmp_path / "run"), loss=loss)
    state, context = begin(group, folder, config)
    task = DPOTask(config, context)
    batches = [task.next_batch(step) for step in range(1, 16)]
    counted = [sum(b.metrics[f"data/{label}/records"] for b in batches) for label in ("first", "second")]
    assert sum(counted) == 60
    assert 1.2 < counted[1] / counted[0] < 3
    assert batches[-1].metrics["data/second/epoch"] >= 2
    for step in (3, 7):
        state.position = json.loads(json.dumps(batches[step - 1].position))
        again = DPOTask(config, replace(context, recipe={"data": task.recipe["data"]}))
        rest = [again.next_batch(later).digest() for later in range(step + 1, 16)]
        assert rest == [batch.digest() for batch in batches[step:]]
    if task.loss.needs_reference:
        scores: dict[bytes, float] = {}
        for sample in itertools.chain.from_iterable((*b.samples, *b.scored) for b in batches):
            seen = scores.setdefault(sample.token_ids.tobytes(), sample.columns[REFERENCE][0])
            assert seen == pytest.approx(sample.columns[REFERENCE][0], abs=1e-5)
        lengths = {len(key): value for key, value in scores.items()}
        assert len(set(lengths.values())) > 3
        first = take(state, DPOTask(config, context), 1)
        assert first["loss"] == pytest.approx(math.log(2) if loss["type"] == "dpo" else 0.5, abs=1e-4)


@pytest.mark.parametrize("loss", [{"type": "dpo"}, {"type": "kto"}, {"type": "a:B", "records": "examples"}])
def test_a_stream_is_not_scored_as_a_whole(tmp_path: Path, loss: dict):
    with pytest.raises(ValidationError, match=r"second.jsonl.*before the first step the reference scores"):
        DPOConfig(data=several(tmp_path, read="stream"), loss=loss)


class MyPairs(OwnPairs):
    """A loss of pairs."""


def test_a_loss_of_ones_own_with_a_reference_refuses_streams(group: RankGroup, folder: Path, tmp_path: Path):
    """Its settings do not tell that it needs one."""
    data = several(tmp_path, read="stream")
    config = DPOConfig(data=data, loss={"type": f"{__name__}:MyPairs"}, output_dir=str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"second.jsonl is read as a stream"):
        DPOTask(config, begin(group, folder, config)[1])


def test_labels_are_needed_in_all_data_sets_together(tmp_path: Path):
    """One may have desirable answers, and another undesirable ones."""
    by_label = {kind: [one for one in EXAMPLES if one["label"] is kind] for kind in (True, False)}
    for kind, records in by_label.items():
        write(tmp_path / f"{kind}.jsonl", records)
    sets = [{"name": str(tmp_path / f"{kind}.jsonl")} for kind in by_label]
    identity = identity_of_records(DPOConfig(data={"sets": sets}, loss={"type": "kto"}))
    assert [one["records"] for one in identity["sets"]] == [8, 4]
    twice = [sets[0], {**sets[0], "label": "again"}]
    with pytest.raises(BadRecord, match=r"data.sets: .*all of its 16 answers are desirable"):
        identity_of_records(DPOConfig(data={"sets": twice}, loss={"type": "kto"}))
