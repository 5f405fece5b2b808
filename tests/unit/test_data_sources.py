"""Several data sets and streams: what each batch is made of, and going on exactly where a run was killed."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cairn.config.data import SFTDataConfig
from cairn.run.data_sets import BadRecord, same_records
from cairn.run.errors import UsageError
from cairn.run.records import streams
from cairn.run.records.collection import as_written
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.opening import identity_of_all, open_sources

MODEL = Path(__file__).resolve().parents[2] / "configs" / "reverse_text" / "model"
BATCH = 6


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are not the user's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character."""
    return AutoTokenizer.from_pretrained(MODEL)


def letters(letter: str, count: int) -> list[dict[str, str]]:
    """Records whose prompts are a letter and a number."""
    return [{"prompt": f"{letter}{i}", "completion": "x"} for i in range(count)]


def write(path: Path, letter: str, count: int) -> Path:
    """A file of such records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in letters(letter, count)))
    return path


def write_several(folder: Path) -> Path:
    """Four files of 6 records."""
    for i in range(4):
        write(folder / f"s{i}.jsonl", f"s{i}", 6)
    return folder


def stream(path: Path, **settings: Any) -> SFTDataConfig:
    """A file that is read as a stream."""
    return SFTDataConfig(
        **{"name": str(path), "read": "stream", "batch_size": BATCH, "shuffle_block": 5} | settings
    )


def mixed(tmp_path: Path) -> SFTDataConfig:
    """Two files of 10 and 7 records, of which the second is a stream and weighs three times as much."""
    one, two = write(tmp_path / "one.jsonl", "a", 10), write(tmp_path / "two.jsonl", "b", 7)
    sets = [{"name": str(one)}, {"name": str(two), "weight": 3, "read": "stream", "label": "second"}]
    return SFTDataConfig(sets=sets, batch_size=BATCH, shuffle_block=4)


def taken(data: SFTData, steps: int) -> list[str]:
    """The prompts of the next batches, in order."""
    decode = data.tokenizer.convert_ids_to_tokens
    samples = [sample for step in range(steps) for sample in data.next_batch(step).samples]
    return ["".join(decode(sample.token_ids[~sample.loss_mask].tolist())) for sample in samples]


CONFIGS = {
    "mixed": mixed,
    "a stream": lambda path: stream(write(path / "s.jsonl", "s", 13)),
    "a stream in order": lambda path: stream(write(path / "s.jsonl", "s", 13), shuffle=False),
    "a block of everything": lambda path: stream(write(path / "s.jsonl", "s", 13), shuffle_block=100),
    "a stream of several files": lambda path: stream(write_several(path)),
    "a stream of a saved one": lambda path: (
        datasets.Dataset.from_list(letters("s", 13)).save_to_disk(path / "saved"),
        stream(path / "saved"),
    )[1],
}


@pytest.mark.parametrize("which", CONFIGS)
def test_a_killed_run_goes_on_with_the_very_next_record(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, which: str
):
    """From every step, also one at which an epoch or a block ends, by what lies in the checkpoint as JSON."""
    config, steps = CONFIGS[which](tmp_path), 8
    data = SFTData(config, tokenizer, 3, 0)
    positions, batches = [(0, "{}")], []
    for _ in range(steps):
        batches.append(taken(data, 1))
        positions.append((data.position, json.dumps(data.state())))
    for done, (position, state) in enumerate(positions[:-1]):
        again = SFTData(config, tokenizer, 3, position, state=json.loads(state))
        again.check_start()
        assert taken(again, steps - done) == [prompt for batch in batches[done:] for prompt in batch], done
        by_count = SFTData(config, tokenizer, 3, position)
        assert taken(by_count, 1) == batches[done], "an older checkpoint has the count alone"
    assert taken(SFTData(config, tokenizer, 3, 0), steps) == [prompt for batch in batches for prompt in batch]


@pytest.mark.parametrize("which", CONFIGS)
def test_every_epoch_of_a_data_set_has_each_record_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, which: str
):
    """Whatever else is in the batches; in another order each time, by the seed, unless told otherwise."""
    config = CONFIGS[which](tmp_path)
    prompts = taken(SFTData(config, tokenizer, 3, 0), 40)
    for letter in {prompt[0] for prompt in prompts}:
        own = [prompt for prompt in prompts if prompt[0] == letter]
        size = len(set(own))
        epochs = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert len(epochs) >= 2
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert (epochs[0] != epochs[1]) == config.shuffle
    assert (taken(SFTData(config, tokenizer, 4, 0), 40) != prompts) == config.shuffle


def test_weights_are_shares_of_the_records(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    """And each data set counts its own records, learned tokens and epochs."""
    data = SFTData(mixed(tmp_path), tokenizer, 3, 0)
    batches = [data.next_batch(step) for step in range(100)]
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update({key: int(v) for key, v in batch.metrics.items() if not key.endswith("epoch")})
    assert counts["data/one/records"] + counts["data/second/records"] == 100 * BATCH
    assert counts["data/second/records"] / (100 * BATCH) == pytest.approx(0.75, abs=0.05)
    assert counts["data/one/learned_tokens"] == 2 * counts["data/one/records"]  # x and the end of the text
    assert batches[-1].metrics["data/one/epoch"] == counts["data/one/records"] / 10
    assert batches[-1].metrics["data/second/epoch"] == (counts["data/second/records"] - 1) // 7
    assert "epoch" not in batches[-1].metrics


def test_resuming_a_stream_reads_on_where_its_block_began(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    """Files that lie before are not read once more."""
    config = stream(write_several(tmp_path))
    data = SFTData(config, tokenizer, 3, 0)
    taken(data, 3)
    position, state = data.position, data.state()
    expected = taken(data, 1)
    read: list[str] = []
    split = streams.split

    def counted(file: Any, name: str, *rest: Any) -> Any:
        for piece in split(file, name, *rest):
            read.append(piece.value["prompt"])
            yield piece

    monkeypatch.setattr(streams, "split", counted)
    again = SFTData(config, tokenizer, 3, position, state=state)
    assert taken(again, 1) == expected
    assert read == ["s23", "s24", "s25", *[f"s3{i}" for i in range(6)]], "from the first of the block on"


def test_another_size_of_blocks_begins_with_the_next_block(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
):
    """No record is lost or taken twice."""
    path = write(tmp_path / "s.jsonl", "s", 40)
    data = SFTData(stream(path), tokenizer, 3, 0)
    before = taken(data, 2)
    again = SFTData(stream(path, shuffle_block=9), tokenizer, 3, data.position, state=data.state())
    after = taken(again, 4)
    assert len(set(before + after)) == 6 * BATCH


def test_identities(tmp_path: Path):
    """Other records, weights, or another way of reading are other data; a copy of the files is the same."""

    def of(config: SFTDataConfig) -> dict[str, Any]:
        return identity_of_all(config, open_sources(config, 0))

    config = mixed(tmp_path)
    (tmp_path / "copy").mkdir()
    found = of(config)
    assert json.loads(json.dumps(found)) == found
    assert same_records(found, of(mixed(tmp_path / "copy")))
    heavier = [one.model_copy(update={"weight": 2.0}) for one in config.sets]
    assert not same_records(found, of(config.model_copy(update={"sets": heavier})))
    write(tmp_path / "two.jsonl", "b", 8)
    assert not same_records(found, of(config))
    one = SFTDataConfig(name=str(tmp_path / "one.jsonl"))
    assert not same_records(of(one), of(stream(tmp_path / "one.jsonl")))
    assert not same_records(of(one), found)


@pytest.mark.parametrize("too_long", ["cut", "drop", "error"])
def test_what_becomes_of_records_that_are_too_long(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture, too_long: Any
):
    """They are counted and named; in place of dropped ones others are taken."""
    path = tmp_path / "a.jsonl"
    lengths = [3, 30, 4, 5, 50]
    path.write_text("".join(json.dumps({"prompt": "ab", "completion": "x" * n}) + "\n" for n in lengths))
    config = SFTDataConfig(name=str(path), batch_size=4, shuffle=False, too_long=too_long)
    data = SFTData(config, tokenizer, 3, 0, row_length=16)
    if too_long == "error":
        with pytest.raises(BadRecord, match=r"a\.jsonl, line 2: it has 33 tokens, more than --seq-len 16"):
            data.next_batch(1)
        with pytest.raises(UsageError, match="line 2: it has 33 tokens"):
            data.check_start()
        return
    with caplog.at_level(logging.INFO):
        batch = data.next_batch(1)
        data.log_fates()
    found = [len(sample.token_ids) for sample in batch.samples]
    assert found == {"cut": [6, 33, 7, 8], "drop": [6, 7, 8, 6]}[too_long]
    assert data.position == {"cut": 4, "drop": 6}[too_long]
    assert batch.metrics.get("dropped_records", 0) == {"cut": 0, "drop": 2}[too_long]
    word = {"cut": "cut", "drop": "dropped"}[too_long]
    assert f"{path}, line 2: {word}: it has 33 tokens, more than --seq-len 16" in caplog.text
    said = {
        "cut": "of the 4 records taken since this process began: 1 cut",
        "drop": "6 records taken since this process began: 2 dropped as too long",
    }
    assert said[too_long] in caplog.text


def test_records_all_of_which_are_dropped_end_the_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cairn.trainer.data.batches.DROPPED_AT_MOST", 20)
    config = SFTDataConfig(name=str(write(tmp_path / "a.jsonl", "a", 5)), batch_size=4, too_long="drop")
    with pytest.raises(
        BadRecord, match=r"were dropped: all of them as longer than --seq-len 3 \(data\.too_long\)"
    ):
        SFTData(config, tokenizer, 3, 0, row_length=3).next_batch(1)


def test_a_bad_record_of_a_stream_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    """At the start if it is among the first, and else when it is reached."""
    path = write(tmp_path / "s.jsonl", "s", 1200)
    lines = path.read_text().splitlines()
    lines[1100] = '{"prompt": "a", "completion": null}'
    path.write_text("\n".join(lines) + "\n")
    config = stream(path)
    assert identity_of_all(config, open_sources(config, 0))
    data = SFTData(config, tokenizer, 3, 1098)
    with pytest.raises(BadRecord, match=r"s\.jsonl, line 1101: it has the fields"):
        data.next_batch(1)
    lines[3] = '{"chosen": "a", "rejected": "b"}'
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadRecord, match=r"s\.jsonl, line 4: it is a pair .* `uv run dpo`"):
        identity_of_all(config, open_sources(config, 0))


def test_fields_that_only_other_records_have_are_left_out(tmp_path: Path):
    """`datasets` gives all objects of a column the same fields; a template would show what nobody wrote."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"x": 1}, {"y": "b"})]
    records = [{"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]} for call in calls]
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    config = SFTDataConfig(name=str(tmp_path / "a.parquet"), shuffle=False)
    (source,) = open_sources(config, 0).values()
    found = [record["messages"][0]["tool_calls"][0]["function"] for record in source.read([0, 1])]
    assert [one["arguments"] for one in found] == [{"x": 1}, {"y": "b"}]
    assert as_written({"a": None, "b": [{"c": None}]}, None) == {"b": [{}]}
