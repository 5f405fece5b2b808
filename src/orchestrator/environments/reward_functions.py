"""Reward functions as TRL's users write them: lists in, a list of numbers out.

TRL calls `function(prompts=[...], completions=[...], **columns)` with a list for every column of the data
set, and a function may be a coroutine. Here each list has one element, the answer that is to be rewarded, or,
of a function with `group`, one for each of the answers to a prompt.
"""

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.orchestrator.environments.calls import shortened
from cairn.orchestrator.environments.protocol import to_reward
from cairn.run.extensions import code_of, load

SETTING = "orchestrator.environment.args.rewards"


def exact_match(completions: Sequence[Any], *, answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the answer, without white space around it, is what the column `answer` holds; else 0.0."""
    return [
        float(_text(completion).strip() == str(wanted).strip())
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def _text(completion: Any) -> str:
    """The text of a completion, which for conversational data is a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


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
        return [_score(prompt, answer, model) for prompt, answer in zip(prompts, completions, strict=True)]


def _score(prompt: Any, answer: Any, folder: str) -> float:
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


BUILT_IN: dict[str, Callable[..., Any]] = {"exact_match": exact_match, "reward_model": reward_model}


@dataclass(frozen=True)
class RewardFunction:
    """One of the functions whose weighted sum is the reward.

    name: as in the settings, without the module; several functions of a run may not share it.
    """

    name: str
    call: Callable[..., Any]
    weight: float
    identity: str
    """Changes with the function's settings and code."""
    group: bool = False
    """Whether it compares the answers to a prompt, and is given all of them at once."""

    def __call__(self, offered: Mapping[str, Sequence[Any]]) -> Any:
        """What the function returns, or an awaitable of that.

        Args:
            offered: the lists that it may ask for, by name, each with one element.
        """
        names = self._names
        return self.call(**{name: found for name, found in offered.items() if names is None or name in names})

    @functools.cached_property
    def _names(self) -> frozenset[str] | None:
        """The names of its parameters; None if it takes any."""
        parameters = inspect.signature(self.call).parameters.values()
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            return None
        return frozenset(one.name for one in parameters)

    def values_of(self, found: Any, count: int) -> list[float | None]:
        """The numbers in what it returned for so many answers; None where it says that it does not apply.

        Raises:
            ValueError: it is no list of so many numbers or None.
        """
        if callable(as_list := getattr(found, "tolist", None)):  # numpy, torch
            found = as_list()
        if not isinstance(found, list | tuple) or len(found) != count:
            there = len(found) if isinstance(found, list | tuple) else shortened(found)
            raise ValueError(
                f"{self.name} must return a list with {count} rewards, one an answer, and not {there}"
            )
        return [None if one is None else self.value_of(one) for one in found]

    def value_of(self, found: Any) -> float | None:
        """The number in what the function returned; None where it says that it does not apply.

        Raises:
            ValueError: it is neither one number, nor a list of one number or None.
        """
        if callable(getattr(found, "tolist", None)):  # numpy, torch
            found = found.tolist()
        if isinstance(found, list | tuple):
            if len(found) != 1:
                raise ValueError(f"{self.name} returned {len(found)} rewards for one answer")
            (found,) = found
            if found is None:
                return None
        if (value := to_reward(found)) is None:
            raise ValueError(
                f"{self.name} must return a list with one finite number, or None where it does not apply, "
                f"and returned {shortened(found)}"
            )
        return value


def make_reward_functions(
    given: Sequence[str | Mapping[str, Any]], offered: Sequence[str]
) -> list[RewardFunction]:
    """The functions that the settings name.

    Args:
        given: for each its name (exact_match, or module:function), or a table with `function`, `weight`
            (1.0), `args`, further keyword arguments, and `group` (false).
        offered: what functions may ask for by name.

    Raises:
        ValueError: a table has other keys, a weight is no number, two functions have the same name, or one
            asks for what there is not.
        BadExtension: a function can't be imported.
    """
    if isinstance(given, str | Mapping):
        given = [given]
    functions = [_make(one, offered) for one in given]
    if not functions:
        raise ValueError("rewards is empty: name functions, such as exact_match or module:function")
    names = [one.name for one in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two reward functions are called {twice[0]!r}: rename one of them")
    return functions


def _make(given: str | Mapping[str, Any], offered: Sequence[str]) -> RewardFunction:
    table = {"function": given} if isinstance(given, str) else dict(given)
    path, weight, args = table.pop("function", None), table.pop("weight", 1.0), table.pop("args", {})
    group = table.pop("group", False)
    if table or not isinstance(path, str) or not isinstance(args, Mapping):
        raise ValueError(
            f"a reward is a name, or a table with function, weight, args and group, and not {given!r}"
        )
    if not isinstance(group, bool):
        raise ValueError(f"group of reward {path!r} is {group!r}; it must be true or false")
    if isinstance(weight, bool) or to_reward(weight) is None:
        raise ValueError(f"the weight of reward {path!r} is {weight!r}; it must be a finite number")
    call: Callable[..., Any] = load(path, BUILT_IN, SETTING, "function")
    if args:
        call = functools.partial(call, **args)
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reward {path!r} has no signature: {error}") from None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty
        and (one.kind in named or one.kind is inspect.Parameter.POSITIONAL_ONLY)
        and (one.name not in offered or one.kind is inspect.Parameter.POSITIONAL_ONLY)
    ]
    if needed:
        raise ValueError(
            f"the reward {path!r} needs {', '.join(needed)}; functions are given, by name, "
            f"{', '.join(offered)}, and what args holds"
        )
    identity = f"{path} {weight} {sorted(args.items())!r} {code_of(path)}"
    identity += " group" if group else ""
    return RewardFunction(path.rpartition(":")[2], call, float(weight), identity, group)


async def awaited(found: Sequence[Any]) -> list[Any]:
    """The values, those that are awaitables awaited, one after the other."""
    return [await one if isinstance(one, Awaitable) else one for one in found]
