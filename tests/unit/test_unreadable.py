"""Records that can't be learned from are left out, or end a run that has saved what it did."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_preference_data import PAIRS, read, units_of
from test_rendering import CHATML, chat, tokenizer_of
from test_rewinds import example, one_rank, rows, run, step_folder  # noqa: F401

from cairn.config.data import SFTDataConfig
from cairn.config.preferences import PreferenceDataConfig
from cairn.config.trainer import SFTConfig
from cairn.run.data_sets import BadRecord
from cairn.run.errors import UsageError
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.opening import identity_of_records, open_sources
from cairn.trainer.data.rendering import RecordRefused
from cairn.trainer.group import RankGroup

STRICT = (
    "{% for m in messages %}{% if m.content == 'NO' %}{{ raise_exception('not that') }}{% endif %}"
    "{% endfor %}"
)
NO = chat("NO", "Hello")


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def data_of(path: Path, records: list[Any], **settings: Any) -> SFTData:
    config = SFTDataConfig(name=write(path, records), batch_size=3, shuffle=False, **settings)
    return SFTData(config, tokenizer_of(STRICT + CHATML), 0, 0, row_length=32)


def test_records_that_the_template_refuses_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Others take their places; so do records without a right form."""
    records = [chat("a", "0"), NO, chat("b", "1"), {"text": "x"}, chat("c", "2"), chat("d", "3")]
    data = data_of(tmp_path / "data.jsonl", records, unreadable="drop")
    data.check_start()
    with caplog.at_level(logging.INFO):
        batches = [data.next_batch(step) for step in (1, 2)]
        data.log_fates()
    texts = [data.tokenizer.decode(s.token_ids[s.loss_mask])[0] for batch in batches for s in batch.samples]
    assert "".join(texts) == "012301"
    assert [batch.metrics.get("unreadable_records") for batch in batches] == [2, 1]
    assert [batch.metrics.get("dropped_records") for batch in batches] == [2, 1]
    assert "data.jsonl, line 2: dropped: the chat template refuses it: not that" in caplog.text
    assert "data.jsonl, line 4: dropped: it has the fields ['text']" in caplog.text
    assert "3 dropped as unreadable" in caplog.text
    kept = [one for one in records if one is not NO and "text" not in one]
    others = data_of(tmp_path / "kept.jsonl", kept)
    assert others.next_batch(1).digest() == batches[0].digest()


def test_records_of_another_form_are_refused_before_the_start_unless_they_are_left_out(tmp_path: Path):
    name = write(tmp_path / "data.jsonl", [chat("a", "b"), {"text": "x"}])
    with pytest.raises(BadRecord, match=r"line 2: it has the fields"):
        identity_of_records(SFTConfig(data={"name": name}))
    identity = identity_of_records(SFTConfig(data={"name": name, "unreadable": "drop"}))
    assert identity
    assert identity["records"] == 2


def test_a_record_that_is_reached_later_ends_the_data_by_default(tmp_path: Path):
    data = data_of(tmp_path / "data.jsonl", [chat("a", "0")] * 3 + [NO])
    data.next_batch(1)
    with pytest.raises(RecordRefused, match=r"line 4: the chat template refuses it: not that"):
        data.next_batch(2)


def test_data_of_which_nothing_can_be_read_is_refused(tmp_path: Path):
    data = data_of(tmp_path / "data.jsonl", [NO], unreadable="drop")
    with pytest.raises(UsageError, match=r"nothing can be learned .*the chat template refuses it: not that"):
        data.check_start()


def test_pairs_with_equal_answers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """They stay units, from which nothing is learned; the others are what they are without them."""
    equal = {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}
    strange = {**PAIRS[0], "prompt": [{"role": "user", "content": "a", "thought": "b"}]}
    name = write(tmp_path / "pairs.jsonl", [PAIRS[0], equal, {"text": "x"}, strange, PAIRS[1]])
    config = PreferenceDataConfig(name=name, unreadable="drop", shuffle=False)
    data = read(config)
    assert [source.identity()["records"] for source in open_sources(config, 0, data.form).values()] == [5]
    units = units_of(data, range(5))
    assert [unit[0].columns["side"][0] for unit in units] == [1, 0, 0, 0, 1]
    assert [[len(sample.token_ids) for sample in unit] for unit in units[1:4]] == [[1, 1]] * 3
    alone = units_of(read(PreferenceDataConfig(name=write(tmp_path / "two.jsonl", PAIRS[:2]))), range(2))
    for unit, other in zip([units[0], units[4]], alone, strict=True):
        assert [one.token_ids.tolist() for one in unit] == [one.token_ids.tolist() for one in other]
    assert "line 2: chosen and rejected are the same" in caplog.text
    *_, metrics = read(config).next_units(5)
    assert metrics["unreadable_records"] == 3


def test_a_run_that_meets_such_a_record_saves_its_newest_step(
    example: dict[str, Any],  # noqa: F811
    one_rank: RankGroup,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The same command ends at the same place; without such records the run goes on from there."""
    monkeypatch.setattr("cairn.trainer.data.batches.FIRST_RECORDS", 2)
    path = Path(example["data"]["name"])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[10] = {"messages": [{"role": "user", "content": "a", "thought": "b"}]}
    write(path, records)
    example["data"]["shuffle"] = False
    folder = tmp_path / "run"
    with pytest.raises(
        RecordRefused, match=r"data.jsonl, line 11: message 0 .*\(step 5 is saved, and --ckpt"
    ):
        run(example, folder, one_rank)
    assert step_folder(folder, 5).is_dir()
    with pytest.raises(RecordRefused, match=r"line 11: .*\(step 5 is saved"):
        run(example, folder, one_rank)
    example["data"]["unreadable"] = "drop"
    run(example, folder, one_rank)
    found = rows(folder)
    assert [row["step"] for row in found] == list(range(1, 11))
    assert [row.get("unreadable_records") for row in found][5:7] == [1, None]
    assert step_folder(folder, 10).is_dir()
