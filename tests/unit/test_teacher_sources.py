"""Where references and teachers come from: settings, folders, vocabularies, resumed runs, memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import draws
import pytest
from pydantic import ValidationError
from tiny import EXAMPLE, VOCABULARY, write_example

from cairn.config.kinds import KINDS
from cairn.config.model import ModelConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.teachers import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from cairn.launch import main
from cairn.launch.memory import frozen_folders, training_needs
from cairn.launch.plan.other_models import MODELS, Teachers, check_vocabulary
from cairn.launch.start import Start
from cairn.run.errors import UsageError
from cairn.run.machine import Machine
from cairn.trainer.losses import make_loss

KL = {"reference": "start", "coef": 0.1}
SERVED = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"kl": {"coef": 0.1}}, r"kl needs the model .*kl\.reference = start"),
        ({"kl": {"reference": "start"}}, r"without kl\.coef has no use"),
        ({"kl": KL | {"coef": -1}}, r"kl\.coef"),
        ({"kl": KL | {"estimator": "k1"}}, r"its gradient is 0 on average"),
        ({"kl": KL | {"estimator": "k2", "unbiased": True}}, r"kl\.unbiased is for k1 and k3"),
        ({"kl": KL | {"place": "reward", "unbiased": True}}, r"kl\.unbiased is for kl\.place = 'loss'"),
        ({"distill": {}}, r"distill needs a teacher"),
        ({"distill": {"teacher": "start", "coef": 0}}, r"distill\.coef"),
    ],
)
def test_settings_that_do_not_fit_are_refused(sections: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        TrainerConfig(**sections)


@pytest.mark.parametrize(
    ("trainer", "orchestrator", "said"),
    [
        ({"kl": KL | {"reference": SERVED}}, {"sampling": {"temperature": 0.7}}, "at temperature 1 only"),
        ({"kl": KL}, {"advantage": {"type": "none"}}, r"leaves nothing to learn .*trainer\.distill"),
    ],
)
def test_roles_that_do_not_fit_are_refused(trainer: dict[str, Any], orchestrator: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        RLConfig(trainer=trainer, orchestrator=orchestrator)


def test_a_loss_without_a_place_for_the_penalty_is_refused(monkeypatch: pytest.MonkeyPatch):
    config = TrainerConfig(kl=KL, loss={"type": "cairn.trainer.losses.likelihood:Likelihood"})
    with pytest.raises(UsageError, match=r"extend\s+PolicyLoss"):
        make_loss(config.loss, config.kl_in_loss)
    in_reward = TrainerConfig(kl=KL | {"place": "reward"}, loss=config.loss)
    assert make_loss(in_reward.loss, in_reward.kl_in_loss).kl is None


def test_the_orchestrator_learns_the_trainers_teachers():
    config = RLConfig(trainer={"kl": KL, "distill": {"teacher": SERVED}})
    settled = KINDS["rl"].with_sources(config, {REFERENCE_LOGPROBS: "/x", TEACHER_LOGPROBS: SERVED})
    assert settled.trainer.kl.reference == "/x"
    assert settled.trainer.distill.teacher == SERVED
    assert settled.orchestrator.teachers == {REFERENCE_LOGPROBS: "/x", TEACHER_LOGPROBS: SERVED}
    assert RLConfig.model_validate_json(settled.model_dump_json()) == settled, "roles read it from a file"


# Folders


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return write_example(tmp_path / "start")


def settle(
    tmp_path: Path, policy: Path, *, resumes: dict[str, Any] | None = None, name: str = "", **sections: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """The sources of a run, and the trainer's recipe; `resumes` is the recipe of the checkpoint."""
    folder = None
    if resumes is not None:
        folder = tmp_path / "run" / "checkpoints" / "step_1"
        (folder / "trainer").mkdir(parents=True, exist_ok=True)
        (folder / "trainer" / "state.json").write_text(json.dumps({"progress": {}, "recipe": resumes}))
    chosen = Start(store=None, folder=folder)  # pyright: ignore[reportArgumentType]
    teachers = Teachers(ModelConfig(name=name), chosen, "--trainer.", tmp_path / "converted")
    recipe: dict[str, Any] = {"settings": {}}
    return teachers.settle(TrainerConfig(**sections), policy, recipe), recipe


def test_the_start_is_found_again_and_verified(tmp_path: Path, start: Path):
    sources, recipe = settle(tmp_path, start, kl=KL)
    assert sources == {REFERENCE_LOGPROBS: str(start)}
    assert recipe[MODELS]["start"]["files"].keys() == {"config.json", "model.safetensors"}
    checkpoint = write_example(tmp_path / "saved", seed=1)  # whose weights are others by now
    again, kept = settle(tmp_path, checkpoint, resumes=recipe, kl=KL)
    assert (again, kept) == (sources, recipe)
    assert settle(tmp_path, checkpoint, resumes=recipe)[1] == recipe, "also while nothing needs it"

    moved = start.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"--trainer\.kl\.reference start: .*/start is gone"):
        settle(tmp_path, checkpoint, resumes=recipe, kl=KL)
    assert settle(tmp_path, checkpoint, resumes=recipe, name=str(moved), kl=KL)[0] == {
        REFERENCE_LOGPROBS: str(moved)
    }
    write_example(start, seed=2)
    with pytest.raises(UsageError, match=r"model\.safetensors in .*/start is not what it was"):
        settle(tmp_path, checkpoint, resumes=recipe, kl=KL)


def test_a_run_that_did_not_note_its_start_needs_a_folder(tmp_path: Path, start: Path):
    with pytest.raises(UsageError, match=r"does not say which weights .*--trainer\.kl\.reference FOLDER"):
        settle(tmp_path, start, resumes={"settings": {}}, kl=KL)
    assert settle(tmp_path, start, resumes={"settings": {}}, kl=KL | {"reference": str(start)})[0]


def test_a_folder_that_changed_is_refused_by_name(tmp_path: Path, start: Path):
    teacher = write_example(tmp_path / "teacher", seed=1)
    sources, recipe = settle(tmp_path, start, distill={"teacher": str(teacher)})
    assert sources == {TEACHER_LOGPROBS: str(teacher)}
    assert settle(tmp_path, start, resumes=recipe, distill={"teacher": str(teacher)})[1] == recipe
    write_example(teacher, seed=2)
    with pytest.raises(UsageError, match=r"--trainer\.distill\.teacher .*model\.safetensors in .*teacher"):
        settle(tmp_path, start, resumes=recipe, distill={"teacher": str(teacher)})


def test_a_teacher_that_is_not_there_is_refused_by_its_setting(tmp_path: Path, start: Path):
    with pytest.raises(UsageError, match=r"^--trainer\.distill\.teacher .*/nowhere: there is no such folder"):
        settle(tmp_path, start, distill={"teacher": str(tmp_path / "nowhere")})
    assert settle(tmp_path, start, distill={"teacher": SERVED}) == (
        {TEACHER_LOGPROBS: SERVED},
        {"settings": {}},
    )


def test_another_vocabulary_is_refused(tmp_path: Path, start: Path):
    other = tmp_path / "other"
    shutil.copytree(start, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    check_vocabulary(start, other, "x")
    (other / "tokenizer_config.json").write_text("{}")
    check_vocabulary(start, other, "another template is no other vocabulary")
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"x: its vocabulary is another .*is token 6 in .* and 5 in"):
        check_vocabulary(start, other, "x")
    path.unlink()
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        check_vocabulary(start, other, "x")


@draws.seldom
@pytest.mark.parametrize("setting", ["distill.teacher", "kl.reference", "critic.model"])
def test_a_dry_run_says_what_the_start_would_refuse(
    tmp_path: Path,
    start: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
):
    """It reads no weights, and writes nothing."""

    def printed(other: Path, *flags: str) -> list[str]:
        flags = (*flags, f"--trainer.{setting}", str(other))
        if setting == "kl.reference":
            flags += ("--trainer.kl.coef", "0.1")
        if setting == "critic.model":
            flags += ("--orchestrator.advantage", '{"type": "gae"}')
        where = ["--model.name", str(start), "--machine", "64G", "--output-dir", str(tmp_path / "run")]
        monkeypatch.setattr("sys.argv", ["rl", "--dry-run", *where, *flags])
        code = main.rl()
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert code == (2 if errors else 0)
        return errors

    other = shutil.copytree(start, tmp_path / "other")
    weights = other / "model.safetensors"
    weights_size = weights.stat().st_size
    with open(weights, "r+b") as file:  # headers are read, but none of the tensors behind them
        header = 8 + int.from_bytes(file.read(8), "little")
        file.truncate(header)
        file.truncate(weights_size)
    assert printed(other) == []
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"aaaa":'))
    (error,) = printed(other)
    assert error.startswith(f"error: --trainer.{setting} {other}: its ")
    assert "vocabulary is" in error
    (error,) = printed(tmp_path / "nowhere")
    assert error.startswith(f"error: --trainer.{setting} {tmp_path}/nowhere: there is no such folder")
    assert printed(tmp_path / "nowhere", "--ckpt.resume", "auto") == [error]
    assert not (tmp_path / "run").exists()
    step = tmp_path / "run" / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    kept = setting == "critic.model"  # its weights are in the checkpoint; others are read again
    found = printed(tmp_path / "nowhere", "--ckpt.resume", "auto")
    damaged = f"error: --ckpt.resume auto: there is no good checkpoint in {step.parent}"
    assert found == ([damaged] if kept else [error, damaged])


@pytest.mark.parametrize("rows", [VOCABULARY - 1, VOCABULARY, VOCABULARY + 26])
def test_rows_that_stand_for_no_token_may_differ(tmp_path: Path, start: Path, rows: int):
    """As in models of one family, whose embeddings are padded to other multiples."""

    def with_rows(name: str, rows: int) -> Path:
        folder = shutil.copytree(start, tmp_path / name)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": rows}))
        return folder

    policy, other = with_rows("policy", VOCABULARY + 10), with_rows("other", rows)
    if rows >= VOCABULARY:
        check_vocabulary(policy, other, "x")
        return
    with pytest.raises(UsageError, match=rf"x: its embeddings have {rows} rows, .* tokens need {VOCABULARY}"):
        check_vocabulary(policy, other, "x")


def test_frozen_copies_are_in_the_estimate():
    folder = str(EXAMPLE)
    config = TrainerConfig(workers=2).settled(gpu=False)
    both = config.model_copy(update=vars(TrainerConfig(kl=KL, distill={"teacher": folder})) | {"workers": 2})
    both = both.settled(gpu=False)
    assert frozen_folders(both, folder) == [folder], "one copy serves both"
    alone, more = (training_needs(folder, one, Machine(memory=1 << 40)).rank for one in (config, both))
    weights = next(part.bytes for part in alone.parts if part.what.startswith("weights, float32"))
    assert more.counted - alone.counted == weights
    assert frozen_folders(TrainerConfig(distill={"teacher": SERVED}), folder) == []
