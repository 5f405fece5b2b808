"""A reward function: what a reward model gives a conversation."""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


def reward_model(prompts: Sequence[Any], completions: Sequence[Any], *, model: str) -> list[float]:
    """The rewards of conversations, or of texts, by a reward model that runs on this process's CPU.

    Args:
        model: a checkpoint of `reward`, its `model` folder, or another Hugging Face directory of a model for
            sequence classification with one label.

    Raises:
        ValueError: there is no such model in the folder.
    """
    with _ONE_AT_A_TIME:
        return [_reward(prompt, answer, model) for prompt, answer in zip(prompts, completions, strict=True)]


def _reward(prompt: Any, answer: Any, folder: str) -> float:
    import torch

    tokenizer, opened = _open(folder)
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt + answer)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
    else:
        ids = tokenizer.apply_chat_template([*prompt, *answer], tokenize=True, return_dict=True)["input_ids"]
    with torch.inference_mode():
        hidden = opened.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        return float(opened.score(hidden[:, -1])[0, 0])


@functools.cache
def _open(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from cairn.checkpoint.step_folder import StepFolder

    step = StepFolder(name).model
    folder = step if step.is_dir() else Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"the reward model {name}: there is no config.json in {folder}")
    opened, about = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype="float32", output_loading_info=True
    )
    if missing := sorted(about["missing_keys"]):
        raise ValueError(f"{folder} holds no reward model: it lacks {', '.join(missing[:3])}")
    if opened.config.num_labels != 1:
        raise ValueError(f"{folder} has {opened.config.num_labels} labels; a reward model has one")
    return AutoTokenizer.from_pretrained(folder), opened.eval()
