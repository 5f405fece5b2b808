"""Records of preferences: the conversations, or texts, of their chosen and rejected answers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cairn.run.data_sets import kind_of
from cairn.trainer.data import records

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


def answers_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
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
