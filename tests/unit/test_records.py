"""What is wrong with data is said before training, by file and line; what text teaches is told exactly."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cairn import read_records
from cairn.config.rl_trainer import TrainerConfig
from cairn.config.trainer import SFTDataConfig
from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord, examine, load_records, mended, same_records
from cairn.run.errors import UsageError
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.records import problem_of
from cairn.trainer.data.rendering import Encoder
from cairn.trainer.packing import make_rank_batch

MODEL = Path(__file__).resolve().parents[2] / "configs" / "reverse_text" / "model"
USER, ASSISTANT = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
GOOD = {"messages": [USER, ASSISTANT]}


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches that are not the user's; returns Cairn's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "cairn"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """One token a character; `<user>question<assistant>answer<eos>`."""
    return AutoTokenizer.from_pretrained(MODEL)


def lines(*records: object) -> str:
    """JSON Lines."""
    return "".join(json.dumps(record) + "\n" for record in records)


def messages(*found: object) -> dict:
    """A record of these messages."""
    return {"messages": list(found)}


def look_at(path: Path, split: str = "train") -> dict:
    """What the command that starts a run does with a data set."""
    config = SFTDataConfig(name=str(path), split=split)
    return examine(config, load_records(config), problem_of)


# Each file that can't be trained on, and what is said of it behind its name

WRONG: dict[str, tuple[str | bytes, str]] = {
    "malformed.jsonl": (lines(GOOD) + '{"messages": [\n' + lines(GOOD), ", line 2: it is no JSON: Expecting"),
    "malformed.json": (
        '[{"prompt": "a",\n "completion" "b"}]',
        ", line 2: it is no JSON: Expecting ':' delimiter",
    ),
    "cut.jsonl.gz": (gzip.compress(lines(GOOD).encode())[:-9], ": can't be read: "),
    "empty.jsonl": ("", ": the file is empty"),
    "blank.jsonl": ("\n\n", ": it holds no records"),
    "lists.jsonl": ("[1, 2]\n3\n", ", line 1: it is a list and no record"),
    "latin.jsonl": (
        lines(GOOD).encode() + '{"prompt": "é", "completion": "b"}\n'.encode("latin-1"),
        ", line 2: byte 0xe9 at 12 is not UTF-8",
    ),
    "null.jsonl": (
        "\n" + lines(GOOD, messages(USER, {"role": "assistant", "content": None})),
        ", line 3: message 1 of messages (assistant) has no content",
    ),
    "number.jsonl": (
        lines(GOOD, messages(USER, {"role": "assistant", "content": 5})),
        ", line 2: the content of message 1 of messages (assistant) is the number 5; it must be text",
    ),
    "no_role.jsonl": (
        lines(GOOD, messages(USER, {"content": "b"})),
        ", line 2: message 1 of messages has no role; its fields are ['content']",
    ),
    "no_content.jsonl": (
        lines(GOOD, messages(USER, {"role": "assistant"})),
        ", line 2: message 1 of messages (assistant) has no content",
    ),
    "sharegpt.jsonl": (
        lines(messages({"from": "human", "value": "a"})),
        ", line 1: message 0 of messages has no role; its fields are ['from', 'value']",
    ),
    "text.jsonl": (lines({"messages": "hello"}), ", line 1: messages is text; it must be a list of messages"),
    "strings.jsonl": (lines(messages("hello")), ", line 1: message 0 of messages is text, with neither role"),
    "mixed.jsonl": (
        lines({"prompt": "a", "completion": [ASSISTANT]}),
        ", line 1: prompt and completion must both be text, or both lists of messages",
    ),
    "other.jsonl": (lines({"text": "ab"}), ", line 1: it has the fields ['text']; it needs messages, or"),
    "null.csv": ("prompt,completion\na,b\n,c\n", ", line 3: it has the fields"),
    "notes.txt": ("hello\n", ": a .txt file has no records that Cairn could tell; it reads .jsonl, "),
    "nowhere.jsonl": (b"", ": the file is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, name: str):
    """Of every record, not only of those that training comes to first."""
    content, what = WRONG[name]
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadRecord) as error:
        look_at(path)
    assert str(error.value).startswith(f"{path}{what}"), error.value


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.jsonl.gz", "a.json", "a.csv", "saved", "splits"])
def test_kinds_of_files(tmp_path: Path, name: str):
    """All give the same records; those that have the same bytes, by the same identity."""
    records, path = (
        [{"prompt": "ab", "completion": "ba"}, {"prompt": "c", "completion": "c"}],
        tmp_path / name,
    )
    if name == "a.json":
        path.write_text(json.dumps(records))
    elif name == "a.csv":
        path.write_text("prompt,completion\nab,ba\nc,c\n")
    elif name == "saved":
        datasets.Dataset.from_list(records).save_to_disk(path)
    elif name == "splits":
        one = datasets.Dataset.from_list(records)
        datasets.DatasetDict(train=one, test=one.select([0])).save_to_disk(path)
    else:
        (gzip.open if name.endswith("gz") else open)(path, "wt").write(lines(*records))
    (tmp_path / "expected.jsonl").write_text(lines(*records))
    assert list(read_records(path)) == list(read_records(tmp_path / "expected.jsonl"))
    assert same_records(look_at(path), look_at(tmp_path / "expected.jsonl")) == (name != "a.csv")
    if name in ("a.jsonl", "a.JSONL", "a.jsonl.gz", "a.json"):
        assert look_at(path) == look_at(tmp_path / "expected.jsonl")
    if name == "splits":
        assert look_at(path, "test")["records"] == 1
    with pytest.raises(BadRecord, match=r"split"):
        look_at(path, "validation")


def test_a_part_of_a_file(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines(*[GOOD] * 10))
    assert look_at(tmp_path / "a.jsonl", "train[:3]")["records"] == 3


# Identity


def test_identity_is_of_all_records_and_kept(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch):
    """One that differs in the middle is another; an unchanged file is not read through again."""
    records = [{"prompt": str(i), "completion": "x"} for i in range(50)]
    for name, changed in (("a", {}), ("b", {}), ("c", {25: {"prompt": "25", "completion": "y"}})):
        text = lines(*[changed.get(i, record) for i, record in enumerate(records)])
        (tmp_path / f"{name}.jsonl").write_text(text)
    a, b, c = (look_at(tmp_path / f"{name}.jsonl") for name in "abc")
    assert a == b
    assert a["records"] == c["records"]
    assert not same_records(a, c)
    of_a_table = {"records": 50, "digest": "y"}
    assert same_records(of_a_table, c)
    assert not same_records(of_a_table | {"records": 51}, a)
    assert mended(a, c), "one of 50 records"
    assert not mended(a, {**c, "records": 51})
    assert not mended({**a, "blocks": ["x"] * len(a["blocks"])}, c)

    monkeypatch.setattr("cairn.run.records.index.split", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr("cairn.run.records.checks.every", lambda *_: pytest.fail("checked again"))
    assert look_at(tmp_path / "a.jsonl") == a
    kept = list((caches / "records").iterdir())
    assert {path.suffix for path in kept} == {".index", ".json"}
    for path in kept:
        path.write_text("{")
    with pytest.raises(pytest.fail.Exception, match="read again"):
        look_at(tmp_path / "a.jsonl")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches.parent))
    assert look_at(tmp_path / "a.jsonl") == a, "damaged notes are made anew"


# Nothing to learn

SILENT: dict[str, tuple[dict, str]] = {
    "no assistant": (messages(USER), r"no turn of the assistant \(roles: user\)"),
    "a capital": (
        messages(USER, {**ASSISTANT, "role": "Assistant"}),
        r"roles: user, Assistant\), .* written \"assistant\"",
    ),
    "too long": (
        messages({"role": "user", "content": "a" * 40}, ASSISTANT),
        r"42 tokens come before the first that is learned, and --seq-len 32 cuts",
    ),
}


@pytest.mark.parametrize("what", SILENT)
def test_data_that_teaches_nothing_is_refused_at_the_start(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, what: str
):
    """With record and reason. A single good record among the first is enough, the others are counted."""
    record, why = SILENT[what]
    path = tmp_path / "silent.jsonl"
    path.write_text(lines(*[record] * 8))

    def data(position: int = 0) -> SFTData:
        config = SFTDataConfig(name=str(path), batch_size=4, shuffle=False)
        return SFTData(config, tokenizer, 0, position, row_length=32)

    with pytest.raises(UsageError, match=rf"silent.jsonl, line 1: .*{why}"):
        data().check_start()
    path.write_text(lines(*[record] * 7, GOOD))
    data().check_start()
    data(4).check_start()
    works = [
        make_rank_batch(data(at).next_batch(1), TrainerConfig(seq_len=32), rank=0, world_size=1)
        for at in (0, 4)
    ]
    assert [(work.counts.learned, work.counts.unlearned) for work in works] == [(0, 4), (3, 3)]


def test_a_record_that_teaches_nothing_is_named_in_the_log(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "some.jsonl"
    path.write_text(lines(GOOD, messages(USER), GOOD))
    SFTData(SFTDataConfig(name=str(path), batch_size=3), tokenizer, 0, 0, row_length=32).next_batch(1)
    assert f"{path}, line 2: nothing is learned: it has no turn of the assistant" in caplog.text


def test_a_template_that_refuses_a_record(tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    """As some refuse a system turn."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    path = tmp_path / "system.jsonl"
    path.write_text(lines(GOOD, messages({"role": "system", "content": "x"}, USER, ASSISTANT)))
    data = SFTData(SFTDataConfig(name=str(path)), tokenizer, 0, 0)
    with pytest.raises(
        UsageError, match=r"system.jsonl, line 2: the chat template refuses it: no system turn"
    ):
        data.check_start()


def test_a_single_turn_is_not_told_to_split_itself(tokenizer: PreTrainedTokenizerBase):
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>!{% endif %}"
    )
    with pytest.raises(
        BadRecord, match=r"record 3: the chat template opens message 1 otherwise when it asks"
    ):
        Encoder(tokenizer).whole([GOOD], [3])


def test_a_template_gets_the_date_that_it_is_given(tokenizer: PreTrainedTokenizerBase):
    """And not today's."""
    tokenizer.chat_template = (
        "{{ strftime_now('%Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    arguments = {"strftime_now": lambda form: "1999" if form == "%Y" else "?"}
    (sample,) = Encoder(tokenizer, template_arguments=arguments).whole([GOOD], [0])
    assert tokenizer.decode(sample.token_ids).startswith("1999")


# Text


def words(*, eos: bool) -> PreTrainedTokenizerBase:
    """Like sentencepiece: a space is a mark before its word, and one is put before the first word."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", "▁hello", "▁world", "▁", "!"])}
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate("helowrd")}
    merges = []
    for word in ("hello", "world"):
        vocabulary |= {piece: len(vocabulary) + i for i, piece in enumerate(_prefixes("▁" + word))}
        merges += [(("▁" + word)[:i], word[i - 1]) for i in range(1, len(word) + 1)]
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if eos else "<s> $A", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _prefixes(word: str) -> list[str]:
    return [word[:i] for i in range(2, len(word))]


def tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """All tokens, and the learned ones."""
    found = np.array(tokenizer.convert_ids_to_tokens(sample.token_ids.tolist()))
    return found.tolist(), found[sample.loss_mask].tolist()


@pytest.mark.parametrize("eos", [False, True], ids=["as it is", "appends its end token"])
@pytest.mark.parametrize(
    ("prompt", "completion", "learned"),
    [
        ("hello", " world", ["▁world", "</s>"]),
        ("hello ", "world", ["▁world", "</s>"]),
        ("hello world", "!", ["!", "</s>"]),
        ("hello", " world</s>", ["▁world", "</s>"]),
        ("", "hello world", ["▁hello", "▁world", "</s>"]),
        ("hello world", "", ["</s>"]),
    ],
)
def test_text_is_tokenised_as_the_one_text_that_it_is(
    eos: bool, prompt: str, completion: str, learned: list[str]
):
    """Without a second space between prompt and completion, and with one end token, at the end."""
    tokenizer = words(eos=eos)
    (sample,) = Encoder(tokenizer).whole([{"prompt": prompt, "completion": completion}], [0])
    whole = words(eos=False)(prompt + completion)["input_ids"]
    expected = tokenizer.convert_ids_to_tokens(whole if whole[-1] == 2 else [*whole, 2])
    assert tokens(sample, tokenizer) == (expected, learned)


def test_a_slow_tokenizer_that_splits_where_the_prompt_ends():
    """It appends its end token: to the whole, not to the prompt."""
    (sample,) = Encoder(ByT5Tokenizer()).whole([{"prompt": "ab", "completion": "c"}], [0])
    assert tokens(sample, ByT5Tokenizer()) == (["a", "b", "c", "</s>"], ["c", "</s>"])


def test_a_slow_tokenizer_that_does_not(monkeypatch: pytest.MonkeyPatch):
    """Is refused: which tokens are the completion's can't be told."""
    tokenizer: Callable = ByT5Tokenizer()
    monkeypatch.setattr(
        tokenizer, "_tokenize", lambda text: [text[i : i + 2] for i in range(0, len(text), 2)]
    )
    monkeypatch.setattr(tokenizer, "_convert_token_to_id", lambda token: hash(token) % 1000)
    with pytest.raises(BadRecord, match=r"record 7: the tokenizer \(ByT5Tokenizer\) does not say where"):
        Encoder(tokenizer).whole([{"prompt": "abc", "completion": "d"}], [7])
