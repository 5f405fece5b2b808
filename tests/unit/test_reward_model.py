"""Training a reward model, and rewards by it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from one_rank import one_rank
from pydantic import ValidationError
from safetensors.torch import save_file
from tiny import tokenizer, write_example
from transformers import AutoModelForSequenceClassification

from cairn.config.cli import load
from cairn.config.preferences import RewardConfig
from cairn.orchestrator.environments.reward_functions import make_reward_functions
from cairn.run.batches import Sample
from cairn.run.directory import RunDirectory
from cairn.run.messages import Attempt
from cairn.trainer.data.opening import identity_of_records
from cairn.trainer.group import RankGroup
from cairn.trainer.models.value_model import with_reward_token
from cairn.trainer.packing import make_rank_batch
from cairn.trainer.state import POLICY, Context, TrainerProgress, TrainerState
from cairn.trainer.step.train_step import train_step
from cairn.trainer.tasks.dpo import Reward

group = one_rank


def talk(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


TEXTS = ["abcdefgh"[: 2 + i % 7] + str(i) for i in range(12)]
PAIRS = [{"chosen": talk(text, text[::-1]), "rejected": talk(text, text[-1])} for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("model"))


def begin(group: RankGroup, folder: Path, to: Path, **settings: object) -> tuple[TrainerState, Reward]:
    data = to / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    config = RewardConfig(
        seq_len=32,
        data={"name": str(data), "batch_size": 6},
        optimizer={"lr": 0.003},
        output_dir=str(to / "run"),
        **settings,
    )
    state = TrainerState(config, group, {POLICY: Reward.policy(config, folder, group)}, TrainerProgress())
    state.begin(folder)
    state.check_model()
    attempt = Attempt("r", 1, "reward", start_step=0, resume_from=None, branch="main")
    return state, Reward(config, Context(RunDirectory(config.output_dir), attempt, state, folder, {}))


def take(state: TrainerState, task: Reward, step: int) -> dict[str, float]:
    rows = state.scorer.rows.arrange
    work = make_rank_batch(task.next_batch(step), state.config, rank=0, world_size=1, arrange=rows)
    return train_step(state, work, step, task.loss)


@pytest.mark.parametrize(("length", "kept"), [(5, 5), (8, 7), (20, 7)])
def test_one_token_behind_the_answer_stands_for_its_reward(length: int, kept: int):
    mask = np.arange(length) >= 2
    sample = Sample(np.arange(1, 1 + length, dtype=np.int32), mask, {"side": np.full(length, -1, np.int8)})
    made = with_reward_token(sample, 8)
    assert made.token_ids[:-1].tolist() == list(range(1, 1 + kept))
    assert made.loss_mask.tolist() == [False] * kept + [True]
    assert made.columns["side"].tolist() == [-1] * (kept + 1)
    assert not with_reward_token(sample.unlearned(), 8).loss_mask.any()


@pytest.mark.slow
def test_chosen_answers_get_greater_rewards(group: RankGroup, folder: Path, tmp_path: Path):
    """And transformers and the reward function give the rewards that the trainer gives."""
    state, task = begin(group, folder, tmp_path)
    first = take(state, task, 1)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)  # a head of 0
    for step in range(2, 21):
        last = take(state, task, step)
    assert last["rewards/accuracies"] == 1.0
    assert last["loss"] < 0.3
    assert "logps/chosen" not in last

    saved = tmp_path / "saved"
    saved.mkdir()
    save_file({k: v.detach().clone() for k, v in state.policy.saved().items()}, saved / "model.safetensors")
    for name, content in state.policy.beside().items():
        (saved / name).write_bytes(content)
    tokenizer().save_pretrained(saved)
    (function,) = make_reward_functions(
        [{"function": "reward_model", "args": {"model": str(saved)}}], ["prompts", "completions"]
    )
    opened = AutoModelForSequenceClassification.from_pretrained(saved, dtype="float32").eval()
    assert type(opened).__name__ == "Qwen3ForSequenceClassification"
    for text in TEXTS[:4]:
        rewards = []
        for answer in (text[::-1], text[-1]):
            ids = tokenizer().apply_chat_template(talk(text, answer), return_dict=True)["input_ids"]
            sample = Sample(np.array(ids, np.int32), np.ones(len(ids), bool))
            (micro,) = make_rank_batch(
                task_batch([with_reward_token(sample, 32)]), state.config, rank=0, world_size=1
            ).micros
            with torch.no_grad():
                ours = state.scorer.scores(micro, 1.0)[0].sum().item()
                theirs = opened(torch.tensor([ids])).logits.item()
            given = function.value_of(
                function({"prompts": [talk(text, "")[:1]], "completions": [talk(text, answer)[1:]]})
            )
            assert ours == pytest.approx(theirs, abs=1e-4)
            assert given == pytest.approx(theirs, abs=1e-4)
            rewards.append(ours)
        assert rewards[0] > rewards[1]


def task_batch(samples: list[Sample]):
    from cairn.run.batches import FROM_TEXT, Batch

    return Batch(samples, sampling=FROM_TEXT)


def test_a_model_without_the_head_is_no_reward_model(folder: Path, tmp_path: Path):
    """transformers would give it random weights, and so random rewards."""
    offered = ["prompts", "completions"]
    call = {"prompts": ["a"], "completions": ["b"]}
    for where, message in ((folder, "holds no reward model: it lacks score.weight"), (tmp_path, "no config")):
        (function,) = make_reward_functions(
            [{"function": "reward_model", "args": {"model": str(where)}}], offered
        )
        with pytest.raises(ValueError, match=message):
            function(call)


def test_the_example(monkeypatch: pytest.MonkeyPatch):
    """Its settings fit the command, and its records are pairs."""
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load(RewardConfig, ["@", "configs/reverse_text/reward.toml"])
    assert identity_of_records(config)["records"] == 512


@pytest.mark.parametrize("settings", [{"lora": {}}, {"router_aux_coef": 0.1}])
def test_what_reward_models_are_not_trained_with(settings: dict):
    with pytest.raises(ValidationError, match=next(iter(settings))):
        RewardConfig(**settings)
