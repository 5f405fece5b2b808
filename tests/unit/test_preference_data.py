"""Preferences: which records are read, and what is learned from them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preference_records import ASKED, BAD, EXAMPLES, GOOD, PAIRS, labelled, pair_of, write
from tiny import tokenizer

from cairn.config.preferences import DPOConfig, PreferenceDataConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.run.errors import UsageError
from cairn.run.seeds import permutation
from cairn.trainer.data.opening import identity_of_records
from cairn.trainer.data.preference_forms import (
    answers_of_pair,
    mismatched,
    name_of,
    problem_of_example,
    problem_of_pair,
)
from cairn.trainer.data.preferences import PreferenceData, open_preferences
from cairn.trainer.data.records import problem_of
from cairn.trainer.losses import SIDE

# Records


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": "abc", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, [ASKED], [GOOD], [BAD]),
        ({"prompt": [ASKED], "chosen": "cba", "rejected": "c"}, [ASKED], [GOOD], [BAD]),
        ({"prompt": "abc=", "chosen": "cba", "rejected": "c"}, "abc=", "cba", "c"),
        ({"chosen": "Q: a A: yes it is", "rejected": "Q: a A: yet"}, "Q: a A:", " yes it is", " yet"),
        ({"chosen": "yes", "rejected": "no"}, "", "yes", "no"),
    ],
)
def test_forms_of_pairs(record: dict, prompt: Any, chosen: Any, rejected: Any):
    """With a prompt, with whole conversations beside it, or with a prompt that is what both begin with."""
    assert problem_of_pair(record) is None
    assert answers_of_pair(record) == [
        {"prompt": prompt, "completion": chosen},
        {"prompt": prompt, "completion": rejected},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [ASKED, GOOD]}, r"\['messages'\]; it needs chosen and rejected.*are for sft"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "needs chosen and rejected"),
        ({"chosen": [ASKED, GOOD], "rejected": "c"}, "both be text, or both lists of messages"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, "are the same"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "no first message in common"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "rejected ends where the prompt ends"),
        ({"prompt": "xyz", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "none of the messages"),
        (
            {"prompt": [ASKED], "chosen": [{"role": "assistant"}], "rejected": [BAD]},
            "with chosen as the comp",
        ),
    ],
)
def test_records_that_are_no_pairs(record: dict, message: str):
    problem = problem_of_pair(record)
    assert problem
    assert re.search(message, problem)


def read(config: PreferenceDataConfig, row_length: int = 32) -> PreferenceData:
    return PreferenceData(config, "pairs", tokenizer(), 0, row_length=row_length)


def units_of(data: PreferenceData, numbers: Iterable[int]) -> list[list[Sample]]:
    """Of the only data set."""
    return data.samples([("", number) for number in numbers])


def test_both_answers_are_learned_from_behind_the_prompt(tmp_path: Path):
    ((chosen, rejected),) = units_of(read(write(tmp_path / "pairs.jsonl", PAIRS[:1])), [0])
    texts = [tokenizer().decode(one.token_ids[one.loss_mask]) for one in (chosen, rejected)]
    assert texts == ["0ba<eos>", "0<eos>"]
    assert [set(one.columns[SIDE]) for one in (chosen, rejected)] == [{1}, {-1}]


@pytest.mark.parametrize(("too_long", "left"), [("cut", 2), ("drop", 0)])
def test_answers_that_are_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, too_long: str, left: int
):
    """Nothing is learned from a pair of which an answer has nothing left, or, if so asked, less than all."""
    config = write(tmp_path / "pairs.jsonl", [pair_of("abc"), pair_of("a" * 9), pair_of("a" * 20)])
    config = config.model_copy(update={"too_long": too_long})
    units = units_of(read(config, row_length=16), range(3))
    learned = [[int(s.cut(16).loss_mask[1:].sum()) for s in unit] for unit in units]
    assert learned == [[4, 2], [5, 2] if left else [0, 0], [0, 0]]
    assert [unit[0].columns[SIDE][0] for unit in units] == [1, 1 if left else 0, 0]
    assert "nothing is learned from" in caplog.text
    assert "line 3: 22 tokens come before the first of the chosen answer that is learned" in caplog.text


def test_data_from_which_nothing_can_be_learned(tmp_path: Path):
    config = write(tmp_path / "pairs.jsonl", [pair_of("a" * 20), pair_of("b" * 20)])
    with pytest.raises(UsageError, match=r"nothing can be learned from the first 2 of its records.*seq-len"):
        read(config, row_length=16).check_start()


# Single answers


def read_examples(config: PreferenceDataConfig, row_length: int = 32) -> PreferenceData:
    return open_preferences(config, "examples", tokenizer(), 0, row_length=row_length)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "its label is missing; it must be true for a desirable answer"),
        ({"prompt": "a", "completion": "b", "label": 1}, "label is the number 1; it must be true"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label is 'yes'; it must be true"),
        ({"prompt": "a", "completion": "", "label": True}, "its completion is empty"),
        ({"messages": [ASKED, GOOD]}, r"\['messages'\]; it needs prompt, completion and label, or chosen"),
        ({"prompt": "a", "completion": [GOOD], "label": True}, "must both be text"),
        ({"chosen": [ASKED, GOOD], "rejected": [BAD]}, "no first message in common"),
    ],
)
def test_records_that_are_no_single_answers(record: dict, message: str):
    problem = problem_of_example(record)
    assert problem
    assert re.search(message, problem)


def test_other_runs_refuse_single_answers():
    """Pairs are asked for by other losses; and SFT would learn undesirable answers."""
    assert "loss.type = 'kto'" in str(problem_of_pair(EXAMPLES[0]))
    assert "undesirable" in str(problem_of(EXAMPLES[0] | {"completion": [BAD]}))
    assert problem_of(EXAMPLES[1] | {"completion": [BAD]}) is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([one for one in EXAMPLES if one["label"]], "all of its 8 answers are desirable"),
        ([one for one in EXAMPLES if not one["label"]], "all of its 4 answers are undesirable"),
        ([*EXAMPLES, *PAIRS], "12 of its records are no pairs, and the others are; put them in two files"),
    ],
)
def test_data_sets_that_are_not_to_be_learned_from(tmp_path: Path, records: list[dict], message: str):
    config = write(tmp_path / "answers.jsonl", records)
    config = DPOConfig(data=config, loss={"type": "kto"})
    with pytest.raises(BadRecord, match=rf"--data.name .*answers.jsonl: {message}"):
        identity_of_records(config)


def test_answers_to_one_prompt_only(tmp_path: Path):
    """There is no other prompt's answer."""
    with pytest.raises(BadRecord, match="all answers are to the same prompt"):
        read_examples(write(tmp_path / "a.jsonl", [labelled("a", "b", True), labelled("a", "c", False)]))


def test_the_answer_to_another_prompt():
    """Each is the next of another prompt, around the circle; where prompts differ, each is used once."""
    prompts = [name_of(i % 7 and i) for i in range(40)]  # 0, 7, 14, ... are equal
    found = mismatched(prompts, 3)
    assert found == mismatched(prompts, 3) != mismatched(prompts, 4)
    assert all(prompts[i] != prompts[other] for i, other in enumerate(found))
    order = permutation(40, 3, "mismatched answers")
    for place, number in enumerate(order):
        behind = [order[(place + 1 + i) % 40] for i in range(39)]
        assert found[number] == next(other for other in behind if prompts[other] != prompts[number])
    assert sorted(mismatched([name_of(i) for i in range(9)], 0)) == list(range(9))


def test_pairs_are_two_single_answers(tmp_path: Path):
    """In units of their own, each with another record's answer, which is not one of the pair."""
    data = read_examples(write(tmp_path / "pairs.jsonl", PAIRS))
    assert data.identity()["records"] == 20
    pairs = units_of(read(data.config), range(10))
    for number, (own, other) in enumerate(units_of(data, range(20))):
        answer = pairs[number // 2][number % 2]
        np.testing.assert_array_equal(own.token_ids, answer.token_ids)
        assert set(own.columns[SIDE]) == {(1, -1)[number % 2]}
        prompt = answer.token_ids[~answer.loss_mask]
        np.testing.assert_array_equal(other.token_ids[~other.loss_mask], prompt)
        elsewhere = [
            a.token_ids[a.loss_mask].tolist() for i, u in enumerate(pairs) for a in u if i != number // 2
        ]
        assert other.token_ids[other.loss_mask].tolist() in elsewhere
    for _ in range(2):
        assert sorted(number for _, number in data.order.take(20)) == list(range(20))


def test_single_answers_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Only a unit's own answer decides; what a dropped one is compared with counts nothing either."""
    records = [labelled("a", "b" * 30, True), labelled("b", "c", False), labelled("c" * 40, "d", True)]
    config = write(tmp_path / "a.jsonl", records).model_copy(update={"too_long": "drop"})
    units = units_of(read_examples(config, row_length=24), range(3))
    assert [own.columns[SIDE][0] for own, _ in units] == [0, -1, 0]
    assert [bool(other.loss_mask.any()) for _, other in units] == [False, True, False]
    assert "the desirable answer ends after" in caplog.text
    assert "line 3: " in caplog.text
