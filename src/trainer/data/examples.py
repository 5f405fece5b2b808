"""Records of single answers, each of which is desirable or undesirable."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.config.data import DataSetConfig
from cairn.run.data_sets import BadRecord, Records, every, kind_of, remembered
from cairn.run.seeds import permutation
from cairn.trainer.data import pairs, records


def problem_of_example(record: Mapping[str, Any]) -> str | None:
    """Why a record can't be learned from as one answer with a label, or as a pair of answers, or None."""
    if record.get("chosen") is not None or record.get("rejected") is not None:
        return pairs.problem_of_pair(record)
    prompt, completion, label = (record.get(name) for name in ("prompt", "completion", "label"))
    if prompt is None or completion is None:
        there = sorted(key for key in record if record[key] is not None)
        return f"it has the fields {there}; it needs prompt, completion and label, or chosen and rejected"
    if not isinstance(label, bool):
        what = repr(label) if isinstance(label, str) else kind_of(label)
        return (
            f"its label is {what}; it must be true for a desirable answer, and false for an undesirable one"
        )
    (answer,) = answers_of(record)
    if not answer["completion"]:
        return "its completion is empty"
    return records.problem_of(answer)


def answers_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The record's answer, or both of a pair, as records of prompt and completion.

    Args:
        record: one that `problem_of_example` finds no fault with.
    """
    if record.get("chosen") is not None:
        return pairs.answers_of(record)
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, list) and isinstance(completion, str):
        completion = pairs.as_messages(completion)
    return [{"prompt": prompt, "completion": completion, **pairs.beside(record)}]


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
    counted = remembered(data_set, f"{__name__}.kinds", lambda: _kinds(data_set))
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
    """What tells a prompt from others."""
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
