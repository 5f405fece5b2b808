"""Going back to a checkpoint when an update spikes: what is left of the batches since, and after a crash."""

import dataclasses
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from one_rank import one_rank  # noqa: F401
from pydantic import ValidationError
from runs import assert_same_bits, rows, step_folder, steps, tensors
from safetensors.torch import load_file
from tiny import write_example

from cairn.checkpoint.step_folder import StepFolder
from cairn.checkpoint.store import CheckpointStore
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTConfig
from cairn.launch import main
from cairn.launch.attempt import _same_recipe, newest_start
from cairn.run.batches import Batch, RLBatch, Sample, Sampling, batch_path, write_batch
from cairn.run.directory import RunDirectory
from cairn.run.files import write_json
from cairn.run.history import Rewind, rewind_target
from cairn.run.messages import Attempt, BatchHeader, ShippedBatch
from cairn.tools.audit.report import Report
from cairn.tools.audit.steps import note_rewinds, note_skipped, recorded_rewinds
from cairn.trainer.group import RankGroup
from cairn.trainer.loop import train
from cairn.trainer.spikes import SpikeGuard, TrainingDiverged

GUARD = {"on_spike": "rewind", "warmup": 2, "max_in_a_row": 3}
ATTEMPT = Attempt("0badcafe", 1, "sft", 0, None, "")


@pytest.fixture
def example(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small run."""
    words = [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ]
    records = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1] * 2}]}
        for word in words
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {
        "model": {"name": str(write_example(tmp_path / "model"))},
        "data": {"name": str(data), "batch_size": 2},
        "seq_len": 32,
        "max_steps": 10,
        "optimizer": {"lr": 1e-2},
        "spike": GUARD,
    }


@pytest.fixture
def spiking(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The steps whose gradients seem to spike; those of others are all of one norm."""
    found: set[int] = set()
    judge = SpikeGuard.spike_in

    def spike_in(
        guard: SpikeGuard, metrics: Mapping[str, float], what: str, known: str | None = None
    ) -> str | None:
        norm = 9.0 if what in {f"step {step}" for step in found} else 1.0
        return judge(guard, {**metrics, "grad_norm": norm}, what, known)

    monkeypatch.setattr(SpikeGuard, "spike_in", spike_in)
    return found


def run(settings: dict[str, Any], folder: Path, group: RankGroup, **ckpt: Any) -> Path:
    """Train in this process, from the newest checkpoint in the folder."""
    config = SFTConfig(**settings, output_dir=str(folder), ckpt={"interval": 3, **ckpt})
    directory = config.run_directory()
    attempt = newest_start(ATTEMPT, CheckpointStore(directory.checkpoints), pass_over=False)
    folder.mkdir(exist_ok=True)
    directory.config.write_text(config.model_dump_json())
    directory.begin(attempt)
    directory.metrics.keep_through(attempt.start_step)
    train(config, attempt, group)
    return folder


def test_the_weights_of_a_rewound_step_are_those_of_the_checkpoint(
    example: dict[str, Any],
    spiking: set[int],
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
):
    """And so is the optimiser's state; steps, samples and the position in the data go on."""
    spiking |= {5, 6}
    example["max_steps"] = 7
    folder = run(example, tmp_path / "run", one_rank)
    assert_same_bits(tensors(step_folder(folder, 6)), tensors(step_folder(folder, 3)))
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, 8))
    assert [row.get("rewound_to") for row in found] == [None] * 4 + [3, 3, None]
    assert found[-1]["total_records"] == 14
    assert len({row["batch/digest"] for row in found}) > 5

    # What is trained in the one step after it is what is trained from a copy of the checkpoint.
    record = StepFolder(step_folder(folder, 7)).trainer_state()
    assert record
    assert record.rewinds
    assert [(one["step"], one["to"]) for one in record.rewinds] == [(5, 3), (6, 3)]
    assert record.spikes
    assert (record.spikes["skipped"], record.spikes["in_a_row"], record.spikes["applied"]) == (2, 0, 5)
    before, after = (tensors(step_folder(folder, step)) for step in (3, 7))
    names = [name for name in before if name.endswith(".step")]
    assert names
    assert all(after[name] == before[name] + 1 for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("seen_again", [True, False])
def test_a_crash_on_the_way_back_changes_nothing(
    example: dict[str, Any],
    spiking: set[int],
    seen_again: bool,
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where arithmetic that varies does not show the spike again: that it was seen is on record."""
    spiking |= {5}
    straight = run(example, tmp_path / "straight", one_rank)
    crashed = tmp_path / "crashed"
    with monkeypatch.context() as patch:
        patch.setenv("CAIRN_FAULT", "trainer.rewind:EIO")
        patch.setattr("cairn.run.faults._reached", {})
        with pytest.raises(OSError, match="CAIRN_FAULT"):
            run(example, crashed, one_rank)
    assert steps(crashed)[-1] == 3
    if not seen_again:
        spiking.clear()
    run(example, crashed, one_rank)
    same = {"grad_norm", "loss", "batch/digest", "rewound_to", "total_records"}
    of_both = [[{k: row.get(k) for k in same} for row in rows(folder)] for folder in (straight, crashed)]
    assert of_both[0] == of_both[1]
    assert of_both[0][4]["rewound_to"] == 3
    assert_same_bits(tensors(step_folder(crashed, 10)), tensors(step_folder(straight, 10)))
    states = [(step_folder(folder, 10) / "trainer/state.json").read_bytes() for folder in (straight, crashed)]
    assert states[0] == states[1]


@pytest.mark.slow
def test_retention_leaves_the_step_to_go_back_to(
    example: dict[str, Any],
    spiking: set[int],
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Beside a newer one, which a run has that was stopped there; and going back does not depend on that."""
    spiking |= {5}
    straight = run({**example, "max_steps": 6}, tmp_path / "straight", one_rank, keep_last=1)

    def ckpt(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        assert main.ckpt() == 0
        return capsys.readouterr().out

    folder = run({**example, "max_steps": 4}, tmp_path / "stopped", one_rank, keep_last=1)
    assert steps(folder) == [3, 4]
    file = folder / "config.json"
    of_sft = file.read_text()
    for content in (RLConfig(trainer={"spike": GUARD}, ckpt={"interval": 3}).model_dump_json(), of_sft):
        file.write_text(content)
        kept = json.loads(ckpt("prune", folder, "--keep-last", 1, "--json"))["kept"]
        assert kept == {"3": ["a spike would go back to it"], "4": ["newest", "last"]}
    assert "a spike would go back to it" in ckpt("list", folder)
    run({**example, "max_steps": 6}, folder, one_rank, keep_last=1)
    assert steps(folder) == [6]
    assert_same_bits(tensors(step_folder(folder, 6)), tensors(step_folder(straight, 6)))


def test_where_no_step_is_saved_yet_the_update_is_skipped(
    example: dict[str, Any],
    spiking: set[int],
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
):
    """It is all that can be done."""
    spiking |= {3}
    folder = run({**example, "max_steps": 4}, tmp_path / "run", one_rank)
    assert [(row.get("rewound_to"), row.get("skipped_updates")) for row in rows(folder)] == [
        (None, None),
        (None, None),
        (None, 1),
        (None, None),
    ]


class Orchestrator(threading.Thread):
    """Ships batches that do not depend on the policy, and writes its part of each checkpoint."""

    def __init__(self, directory: RunDirectory, attempt: Attempt, last: int):
        super().__init__(daemon=True)
        self.directory, self.attempt, self.last = directory, attempt, last
        self.ended = threading.Event()
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        for step in range(1, last + 1):
            self.ship(step)

    def ship(self, step: int) -> None:
        draw, samples = np.random.default_rng(step), list[Sample]()
        for _ in range(3):
            rewards = np.zeros(10, np.float32)
            rewards[-1] = draw.normal()
            columns = {"rewards": rewards, "logprobs": (-draw.random(10) - 3).astype(np.float32)}
            samples.append(Sample(draw.integers(5, 60, 10).astype(np.int32), np.arange(10) > 3, columns))
        batch = Batch(samples, sampling=Sampling(1.0))
        shipped = ShippedBatch(step, [[step, step]], 3, 30, batch.digest(), step - 1)
        attempt = self.attempt
        version = attempt.version(step - 1)
        header = BatchHeader(attempt.run_id, attempt.branch, attempt.id, step, version, [step], shipped)
        path = batch_path(self.directory.batches, step)
        write_batch(path, RLBatch(samples, sampling=batch.sampling, header=header))

    def run(self) -> None:
        store, versions = CheckpointStore(self.directory.checkpoints), self.directory.versions
        saved = set(store.steps())
        while not self.ended.wait(0.005):
            for step in versions.all_announced(self.attempt):
                if step not in self.weights:
                    files = sorted(versions.folder(step).glob("*.safetensors"))
                    self.weights[step] = {name: t for file in files for name, t in load_file(file).items()}
                message = versions.announced(self.attempt, step)
                if message and message.save and step not in saved:
                    saved.add(step)
                    store.begin(step, ["orchestrator"])
                    files = {"orchestrator/state.json": b"{}"}
                    store.write_part(step, "orchestrator", files, self.attempt.id)


def critics(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of the critic."""
    files = sorted((step_folder(folder, step) / "trainer/critic").glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def reinforce(
    settings: dict[str, Any], folder: Path, group: RankGroup, last: int
) -> dict[int, dict[str, torch.Tensor]]:
    """As `run`, with a critic; returns the policies by version that this process has announced."""
    about = {name: settings[name] for name in ("model", "seq_len", "optimizer", "spike")}
    config = TrainerConfig(
        **about,
        max_steps=last,
        critic={"clip": 0.2},
        ckpt={"interval": 3, "part_timeout": 60},
        output_dir=str(folder),
        updates_per_batch=2,
    )
    directory = config.run_directory()
    attempt = newest_start(ATTEMPT, CheckpointStore(directory.checkpoints), pass_over=False)
    folder.mkdir(exist_ok=True)
    directory.begin(ATTEMPT)
    directory.metrics.keep_through(attempt.start_step)
    orchestrator = Orchestrator(directory, ATTEMPT, last)
    orchestrator.start()
    try:
        train(config, attempt, group)
    finally:
        orchestrator.ended.set()
        orchestrator.join()
    return orchestrator.weights


@draws.seldom
def test_in_rl_versions_and_batches_go_on(
    example: dict[str, Any],
    spiking: set[int],
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The version of a rewound step has the checkpoint's weights; so has the critic; also after a crash."""
    spiking |= {5, 6}
    straight = tmp_path / "straight"
    policies = reinforce(example, straight, one_rank, 8)
    assert policies.keys() == set(range(1, 9))
    for step in (5, 6):
        assert_same_bits(policies[step], policies[3])
    assert not torch.equal(policies[4]["model.norm.weight"], policies[3]["model.norm.weight"])
    for what in (critics, lambda run, step: tensors(step_folder(run, step))):
        assert_same_bits(what(straight, 6), what(straight, 3))
        changed = [not torch.equal(what(straight, 3)[name], one) for name, one in what(straight, 8).items()]
        assert sum(changed) > 5
    crashed = tmp_path / "crashed"
    with monkeypatch.context() as patch:
        patch.setenv("CAIRN_FAULT", "trainer.rewind:EIO@2")
        patch.setattr("cairn.run.faults._reached", {})
        with pytest.raises(OSError, match="CAIRN_FAULT"):
            reinforce(example, crashed, one_rank, 8)
    reinforce(example, crashed, one_rank, 8)
    for name in ("rewound_to", "loss", "critic/loss", "batch/digest"):
        assert [row.get(name) for row in rows(crashed)] == [row.get(name) for row in rows(straight)]
    assert [row.get("rewound_to") for row in rows(straight)] == [None] * 4 + [3, 3, None, None]
    assert_same_bits(tensors(step_folder(crashed, 8)), tensors(step_folder(straight, 8)))
    assert_same_bits(critics(crashed, 8), critics(straight, 8))


@pytest.mark.slow
def test_a_run_that_goes_back_again_and_again_ends(
    example: dict[str, Any],
    spiking: set[int],
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
):
    """To one step, or after no update that was applied."""
    spiking |= {7, 9, 11, 12}
    with pytest.raises(TrainingDiverged, match=r"step 12: .* went back to step 6 3 times in a row"):
        run({**example, "max_steps": 13}, tmp_path / "often", one_rank, interval=6)
    spiking |= {8, 10}
    with pytest.raises(TrainingDiverged, match=r"step 10: .* 3 updates in a row that were left out"):
        run({**example, "max_steps": 13}, tmp_path / "in a row", one_rank, interval=6)


def test_another_recipe_or_branch_forgets(tmp_path: Path):
    """What a trainer with other settings would see is not known; what is in checkpoints stays."""
    log, attempt = RunDirectory(tmp_path).rewinds, dataclasses.replace(ATTEMPT, start_step=6)
    both = [Rewind(5, 0, 3, "why"), Rewind(8, 1, 6, "why")]
    log.write(attempt, both)
    assert log.of(attempt) == both
    assert log.of(dataclasses.replace(attempt, branch="branch_2")) == []
    log.forget_after(attempt)
    assert log.of(attempt) == both[:1]
    log.path.write_text("{")
    assert log.of(attempt) == []


def test_a_resume_is_no_other_recipe(tmp_path: Path):
    """It says where its data begins, and which changes were made, which the first start does not."""
    directory, first = RunDirectory(tmp_path), {"trainer": {"seed": 0, "data": {"records": 200}}}
    write_json(directory.recipe, first)
    resumed = {"trainer": {"seed": 0, "data": {"records": 200, "begins_at": 0}, "changes": []}}
    assert _same_recipe(directory, first)
    assert _same_recipe(directory, resumed)
    resumed["trainer"]["data"]["begins_at"] = 12
    assert not _same_recipe(directory, resumed)
    assert not _same_recipe(directory, {"trainer": {**first["trainer"], "seed": 1}})


def test_an_audit_says_what_was_passed_over(tmp_path: Path):
    """With the reason, from the run's record or its newest checkpoint."""
    report, directory = Report("run", "sft"), RunDirectory(tmp_path)
    store = CheckpointStore(directory.checkpoints)
    directory.rewinds.write(ATTEMPT, [Rewind(5, 0, 3, "the gradient's norm is 9"), Rewind(7, 0, 6, "nan")])
    table = [{"step": 5, "skipped_updates": 1, "rewound_to": 3}, {"step": 7, "rewound_to": 6}, {"step": 8}]
    note_skipped(table, report)
    assert report.notes == []
    note_rewinds(table, recorded_rewinds(directory, ATTEMPT, store, report), report)
    assert report.notes == [
        "step 5 went back to the weights of step 3 (spike.on_spike): the gradient's norm is 9; the batches "
        "of steps 4 to 5 changed no weights",
        "step 7 went back to the weights of step 6 (spike.on_spike): nan; the batch of step 7 changed no "
        "weights",
    ]


@pytest.mark.parametrize("config", [SFTConfig, TrainerConfig])
@pytest.mark.parametrize("ckpt", [None, {}, {"interval": 3, "training_state": False}])
def test_it_needs_steps_to_go_back_to(config: Any, ckpt: dict[str, Any] | None):
    with pytest.raises(ValidationError, match=r"goes back to a step that .* give ckpt\.interval"):
        config(spike={"on_spike": "rewind"}, ckpt=ckpt)
    config(spike={"on_spike": "rewind"}, ckpt={"interval": 3})


def test_the_target_is_before_the_spike():
    assert [rewind_target(step, 3) for step in (1, 3, 4, 6, 7)] == [0, 0, 3, 3, 6]
