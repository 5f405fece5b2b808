"""Validation: the loss of held-out records, when it is measured, and when it ends a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import one_rank  # noqa: F401
from pydantic import ValidationError
from test_recipe import FRESH, SFT_RUN
from tiny import tokenizer, write_example
from transformers import AutoModelForCausalLM

from cairn.checkpoint.manifest import Manifest
from cairn.checkpoint.step_folder import TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.config.trainer import SFTConfig
from cairn.launch.plan.recipe import plan_recipe
from cairn.launch.plan.settings import with_ratings
from cairn.launch.start import Start, ended_early, is_complete
from cairn.run.data_sets import BadRecord, every, examine, load_records
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import write_atomic
from cairn.run.messages import Attempt
from cairn.run.metrics import better, why_exhausted
from cairn.trainer.data.records import problem_of
from cairn.trainer.group import RankGroup
from cairn.trainer.models.adapter import make_policy
from cairn.trainer.state import POLICY, Context, TrainerProgress, TrainerState
from cairn.trainer.tasks.validation import Validations

RECORDS = [
    ("abc", "cba"),
    ("hello", "olleh"),
    ("longer than others", "srehto naht regnol"),
    ("x", "x"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


@pytest.fixture
def held(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in RECORDS))
    return path


def validations(group: RankGroup, model: Path, run: Path, *, seq_len: int = 64, **about: Any) -> Validations:
    run.mkdir(exist_ok=True)
    config = SFTConfig(seq_len=seq_len, max_steps=10, ckpt={}, output_dir=str(run), validation=[about])
    state = TrainerState(config, group, {POLICY: make_policy(model, config, group)}, TrainerProgress())
    state.begin(model)
    state.check_model()
    attempt = Attempt("run", 1, "sft", 0, None, "branch_1")
    return Validations(config, Context(RunDirectory(run), attempt, state, model, {}), tokenizer())


def test_the_loss_is_that_of_transformers(one_rank: RankGroup, model: Path, held: Path, tmp_path: Path):  # noqa: F811
    """The mean over the learned tokens of all records; each alone, without packing."""
    found = validations(one_rank, model, tmp_path, name="held", data={"name": str(held)})
    before = torch.random.get_rng_state()
    metrics = found.run(10)
    assert torch.equal(torch.random.get_rng_state(), before)
    reference, total, learned = AutoModelForCausalLM.from_pretrained(model).double(), 0.0, 0
    for prompt, completion in RECORDS:
        ids = tokenizer()(prompt + completion, add_special_tokens=False)["input_ids"]
        ids += [tokenizer().eos_token_id]
        count = len(completion) + 1
        labels = torch.tensor([[-100] * (len(ids) - count) + ids[-count:]])
        with torch.no_grad():
            total += float(reference(torch.tensor([ids]), labels=labels).loss) * count
        learned += count
    assert metrics["validation/held/loss"] == pytest.approx(total / learned, rel=1e-5)
    assert metrics["validation/held/perplexity"] == pytest.approx(np.exp(total / learned), rel=1e-4)
    found.run(10)  # as a process that was killed behind it does again
    (row,) = RunDirectory(tmp_path).evals.rows()
    assert (row["step"], row["name"], row["records"], row["learned_tokens"]) == (10, "held", 4, learned)
    assert row["loss"] == metrics["validation/held/loss"]


def test_it_is_measured_where_it_is_asked_for(one_rank: RankGroup, model: Path, held: Path, tmp_path: Path):  # noqa: F811
    for about, wanted in (
        ({"interval": 4}, [4, 8, 10]),
        ({"interval": 4, "at_start": True, "at_end": False}, [0, 4, 8]),
        ({"interval": 5, "records": 2}, [5, 10]),
    ):
        run = tmp_path / str(wanted)
        found = validations(one_rank, model, run, name="held", data={"name": str(held)}, **about)
        assert [step for step in range(11) if found.run(step)] == wanted
        assert [row["step"] for row in RunDirectory(run).evals.rows()] == wanted
        assert {row["records"] for row in RunDirectory(run).evals.rows()} == {about.get("records", 4)}


def test_long_records_are_cut_as_in_training(one_rank: RankGroup, model: Path, held: Path, tmp_path: Path):  # noqa: F811
    found = validations(one_rank, model, tmp_path, name="held", data={"name": str(held)}, seq_len=25)
    found.run(10)
    (row,) = RunDirectory(tmp_path).evals.rows()
    assert row["cut_samples"] == 1
    with pytest.raises(UsageError, match="no token of its records is learned within the first 2"):
        validations(one_rank, model, tmp_path, name="held", data={"name": str(held)}, seq_len=2, records=2)


def test_held_out_records_are_never_trained_on(tmp_path: Path):
    """A share of the data set, the same in every run; both parts have identities of their own."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i), "completion": str(i)}) + "\n" for i in range(40)))

    def parts(seed: int) -> list[Any]:
        data = {"name": str(path), "held_out": 0.5}
        config = SFTConfig(seed=seed, data=data, validation=[{"name": "own"}])
        return [config.data, config.held_out_data["own"]]

    def prompts(seed: int) -> list[list[str]]:
        return [[record["prompt"] for record in every(load_records(one))] for one in parts(seed)]

    trained, held = prompts(0)
    assert (len(trained), len(held)) == (20, 20)
    assert {*trained, *held} == {str(i) for i in range(40)}
    assert held not in (trained[:20], [str(i) for i in range(20)], [str(i) for i in range(20, 40)])
    assert prompts(7) == [trained, held]
    one, other = (examine(source, load_records(source), problem_of) for source in parts(0))
    assert one["content"] != other["content"]
    assert examine(parts(0)[0], load_records(parts(0)[0]), problem_of) == one
    where = load_records(parts(0)[1]).where(3)
    assert where == f"{path}, line {int(held[3]) + 1} (held out)"
    tiny = SFTConfig(data={"name": str(path), "held_out": 0.999}, validation=[{"name": "own"}])
    with pytest.raises(BadRecord, match="holds no records"):
        load_records(tiny.data)


# Early stopping


def test_patience_counts_from_the_best():
    best: dict[str, dict[str, float]] = {}
    ended = []
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.0, 1.9, float("nan"), 2.0, 1.95)):
        best["held"] = better(best.get("held"), step, loss)
        ended.append(why_exhausted(best, {"held": 3}))
    assert ended[:-1] == [None] * 7
    assert ended[-1] is not None
    assert "its lowest loss, 1.9, after step 4, and none lower in the 3 since" in ended[-1]
    assert why_exhausted(best, {"held": 4}) is None
    assert why_exhausted(best, {}) is None


def test_a_run_that_ended_early_says_so(held: Path, tmp_path: Path):
    """Until its patience is raised."""
    store = CheckpointStore(tmp_path / "checkpoints")
    best = {"held": {"loss": 1.0, "step": 2, "since": 3}}
    record = TrainerRecord(progress={"step": 8}, validation=best)
    (store.folder(8) / "trainer").mkdir(parents=True)
    write_atomic(store.folder(8) / "trainer" / "state.json", record.to_json())
    about = {"run_id": "a", "attempt": 1, "branch": "b", "parent": None, "parts": ["trainer"]}
    more = {"world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}, "config_digest": ""}
    start = Start(store, store.folder(8), Manifest(**about, **more, step=8, created="", files={}))

    def config(patience: int | None) -> SFTConfig:
        one = {"name": "held", "data": {"name": str(held)}, "patience": patience}
        return SFTConfig(max_steps=20, ckpt={}, validation=[one])

    assert is_complete(config(3), start)
    assert "the run ended early with " in (ended_early(config(3), start) or "")
    for patience in (4, None):
        assert not is_complete(config(patience), start)
    assert b'"validation"' not in TrainerRecord().to_json()


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"validation": [{"name": "a"}]}, "validation 'a' needs data, or data.held_out"),
        ({"data": {"held_out": 0.1}}, "is for a .* table without data, and there is none"),
        ({"data": {"held_out": 0.1, "read": "stream"}}, "a share of a single data set"),
        ({"validation": [{"name": "a", "data": {"name": "x"}}] * 2}, "two validations are called 'a'"),
        ({"validation": [{"name": "a", "data": {"name": "x"}, "patience": 1}]}, "needs --ckpt"),
        (
            {
                "validation": [{"name": "a", "data": {"name": "x"}, "patience": 1}],
                "ckpt": {"remote": "file:///x"},
            },
            "can't be together with",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        SFTConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("metric", "saved", "words"),
    [
        ("validation/held/loss", 4, None),
        ("validation/held/loss", 3, "no step before 12 is both"),
        ("validation/other/loss", 4, "there is no validation 'other'; the run has held"),
        ("validation/held/accuracy", 4, "validation/NAME/perplexity"),
    ],
)
def test_steps_are_kept_by_a_validation_that_there_is(metric: str, saved: int, words: str | None):
    config = SFTConfig(
        max_steps=10,
        ckpt={"interval": saved, "keep_best": 1, "metric": metric, "mode": "min"},
        validation=[{"name": "held", "data": {"name": "x"}, "interval": 4}],
    )
    if words is None:
        assert with_ratings(config) == config
        return
    with pytest.raises(UsageError, match=words):
        with_ratings(config)


def test_bad_records_are_found_before_anything_starts(held: Path, tmp_path: Path):
    held.write_text(held.read_text() + '{"prompt": "a"}\n')
    config = SFTConfig(
        data={"name": "configs/reverse_text/sft.jsonl"},
        validation=[{"name": "held", "data": {"name": str(held)}}],
    )
    with pytest.raises(UsageError, match=r"validation 'held': .*held\.jsonl, line 5: it has the fields"):
        plan_recipe(SFT_RUN, config, FRESH)
