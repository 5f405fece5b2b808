"""The forms that records of preferences may have: pairs of answers, and single answers with a label.

A pair is the conversations, or texts, of a chosen and a rejected answer. Single answers are desirable or
undesirable.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cairn.config.data import DataSetConfig
from cairn.run.data_sets import BadRecord, Records, every, kind_of, remembered
from cairn.run.seeds import permutation
from cairn.trainer.data import records
from cairn.trainer.data.sources import Use

BESIDE = ("tools",)
"""Fields that both answers share."""


class _Pair(NamedTuple):
    """A prompt and the two answers to it: lists of messages, or texts."""

    prompt: Any
    chosen: Any
    rejected: Any


def problem_of_pair(record: Mapping[str, Any]) -> str | None:
    """Why a record can't be learned from as a pair of answers, or None."""
    chosen, rejected = record.get("chosen"), record.get("rejected")
    if chosen is None or rejected is None:
        there = sorted(key for key in record if record[key] is not None)
        if {"completion", "label"} <= set(there):
            return "it is one answer with a label, from which loss.type = 'kto' learns; others need pairs"
        others = {"messages", "conversations", "completion", "label"} & set(there)
        hint = "; records of messages, or of prompt and completion, are for sft" if others else ""
        return f"it has the fields {there}; it needs chosen and rejected, and may have a prompt{hint}"
    if not isinstance(chosen, str | list) or not isinstance(rejected, type(chosen)):
        return (
            f"chosen is {kind_of(chosen)}, and rejected is {kind_of(rejected)}; they must both be text, or "
            "both lists of messages"
        )
    if chosen == rejected:
        return "chosen and rejected are the same"
    pair = _pair_of(record)
    if isinstance(pair, str):
        return pair
    for side, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if not answer:
            return f"{side} ends where the prompt ends, so it has no answer"
        if problem := records.problem_of({"prompt": pair.prompt, "completion": answer, **beside(record)}):
            return f"with {side} as the completion: {problem}"
    return None


def answers_of_pair(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chosen answer and the rejected one, each as a record of prompt and completion.

    Args:
        record: one that `problem_of_pair` finds no fault with.
    """
    pair = _pair_of(record)
    assert isinstance(pair, _Pair)
    both = (pair.chosen, pair.rejected)
    return [{"prompt": pair.prompt, "completion": answer, **beside(record)} for answer in both]


def beside(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that all of its answers share."""
    return {name: record[name] for name in BESIDE if record.get(name)}


def _pair_of(record: Mapping[str, Any]) -> _Pair | str:
    """The parts of a record, or why they can't be told.

    Without a prompt, it is what both answers begin with: messages, or text up to the last space before the
    first difference. Answers that are whole conversations may begin with the prompt although it is given.
    """
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if isinstance(chosen, str):
        if prompt is None:
            return _split_texts(chosen, rejected)
        if isinstance(prompt, str):
            return _Pair(prompt, chosen, rejected)
        return _Pair(prompt, as_messages(chosen), as_messages(rejected))
    common = _common(chosen, rejected)
    if prompt is None:
        if not common:
            return "there is no prompt, and chosen and rejected have no first message in common"
        return _Pair(chosen[:common], chosen[common:], rejected[common:])
    if isinstance(prompt, list):
        given = len(prompt)
        if chosen[:given] == prompt == rejected[:given]:
            return _Pair(prompt, chosen[given:], rejected[given:])
        return _Pair(prompt, chosen, rejected)
    asked = [message.get("content") for message in chosen[:common] if isinstance(message, Mapping)]
    if prompt in asked:
        return _Pair(chosen[:common], chosen[common:], rejected[common:])
    return (
        f"its prompt is {kind_of(prompt)}, and none of the messages that both answers begin with; give the "
        "prompt as a list of messages, or no prompt"
    )


def as_messages(answer: str) -> list[dict[str, str]]:
    """A text as an answer of the assistant."""
    return [{"role": "assistant", "content": answer}]


def _common(chosen: list[Any], rejected: list[Any]) -> int:
    """The number of messages that both begin with."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))


def _split_texts(chosen: str, rejected: str) -> _Pair:
    differs = (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    common = next(differs, min(len(chosen), len(rejected)))
    while common and not chosen[common : common + 1].isspace():
        common -= 1
    return _Pair(chosen[:common], chosen[common:], rejected[common:])


def problem_of_example(record: Mapping[str, Any]) -> str | None:
    """Why a record can't be learned from as one answer with a label, or as a pair of answers, or None."""
    if record.get("chosen") is not None or record.get("rejected") is not None:
        return problem_of_pair(record)
    prompt, completion, label = (record.get(name) for name in ("prompt", "completion", "label"))
    if prompt is None or completion is None:
        there = sorted(key for key in record if record[key] is not None)
        return f"it has the fields {there}; it needs prompt, completion and label, or chosen and rejected"
    if not isinstance(label, bool):
        what = repr(label) if isinstance(label, str) else kind_of(label)
        return (
            f"its label is {what}; it must be true for a desirable answer, and false for an undesirable one"
        )
    (answer,) = answers_of_example(record)
    if not answer["completion"]:
        return "its completion is empty"
    return records.problem_of(answer)


def answers_of_example(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record's answer, or both of a pair, as records of prompt and completion.

    Args:
        record: one that `problem_of_example` finds no fault with.
    """
    if record.get("chosen") is not None:
        return answers_of_pair(record)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = as_messages(completion)
    return [{"prompt": prompt, "completion": completion, **beside(record)}]


def sides_of(record: Mapping[str, Any]) -> Sequence[int]:
    """Of each of the record's answers: 1 of a desirable one, -1 of an undesirable one."""
    if record.get("chosen") is not None:
        return (1, -1)
    return (1 if record["label"] else -1,)


def answers_each(data_set: Records) -> int:
    """How many answers each record of a data set has; all have equally many (`facts_of`)."""
    if "chosen" not in data_set.columns:
        return 1
    return 2 if any(record.get("chosen") is not None for record in every(data_set)) else 1


def facts_of(config: DataSetConfig, data_set: Records) -> dict[str, Any]:
    """The labels that there are in a data set of records that are right one by one.

    Raises:
        BadRecord: some are pairs, and others are not.
    """
    counted = remembered(data_set, "preferences.kinds", lambda: _kinds(data_set))
    single = sum(counted["labels"].values())
    if not counted["pairs"]:
        return {"labels": sorted(label == "True" for label in counted["labels"])}
    if single:
        raise BadRecord(
            f"{config.name}: {single} of its records are no pairs, and the others are; put them in two "
            "files, as two of data.sets"
        )
    return {"labels": [False, True]}


def problem_of_all(identities: Sequence[Mapping[str, Any]]) -> str | None:
    """Why nothing can be learned from data sets of these identities, or None."""
    labels = {label for one in identities for label in one["labels"]}
    if len(labels) == 2:
        return None
    kind, other = ("desirable", "false") if True in labels else ("undesirable", "true")
    return (
        f"all of its {sum(one['records'] for one in identities)} answers are {kind}; there must be some of "
        f"label {other}, since what is learned is what makes the difference"
    )


def name_of(prompt: Any) -> bytes:
    """A digest by which a prompt is told from others."""
    content = json.dumps(prompt, sort_keys=True, default=str).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def mismatched(prompts: Sequence[bytes], seed: int) -> list[int] | None:
    """For each answer another one, which was given to another prompt; None if all prompts are the same.

    It is the next such answer in an order drawn from the seed.

    Args:
        prompts: of each answer, what `name_of` says.
    """
    if len(set(prompts)) < 2:
        return None
    order = permutation(len(prompts), seed, "mismatched answers")
    found = [0] * len(prompts)
    # Backwards, twice around: behind the last is the first.
    other, behind = order[0], order[0]
    for number in [*reversed(order), *reversed(order)]:
        if prompts[behind] != prompts[number]:
            other = behind
        found[number], behind = other, number
    return found


def _kinds(data_set: Records) -> dict[str, Any]:
    """How many records are pairs, and how many of the others have each label."""
    pairs, labels = 0, Counter[str]()
    for record in every(data_set):
        if record.get("chosen") is not None:
            pairs += 1
        else:
            labels[str(record.get("label"))] += 1
    return {"pairs": pairs, "labels": dict(labels)}


@dataclass(frozen=True, kw_only=True)
class Form(Use):
    """What records of one form are.

    answers: of a record, each as one of prompt and completion. sides: of these answers: 1 of a chosen or
    desirable one, -1 of one that is not.
    """

    order: str = field(default="preference order")
    answers: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
    sides: Callable[[Mapping[str, Any]], Sequence[int]]


FORMS = {
    "pairs": Form(problem_of=problem_of_pair, answers=answers_of_pair, sides=lambda record: (1, -1)),
    "examples": Form(
        problem_of=problem_of_example,
        answers=answers_of_example,
        sides=sides_of,
        units=answers_each,
        facts=facts_of,
        problem_of_all=problem_of_all,
        drops=False,
    ),
}
"""By name, as in `cairn.config.preferences.TOGETHER`."""
