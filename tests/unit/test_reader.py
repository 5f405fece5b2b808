"""Cairn's own reader of data files: each record is what its line says, or the file and line are refused.

Also the trials of issue 27 that are about reading (T01, T02, T03, T14, T19, T22, T26, T27, T29, T30).
"""

import bz2
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets.config
import draws
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cairn
from cairn.config.data import SFTDataConfig
from cairn.run.data_sets import (
    BadRecord,
    content_digest,
    every,
    examine,
    load_records,
    load_stream,
    what_is_read,
)
from cairn.run.records import cache, splitting, tables
from cairn.run.records.numbers import dumps
from cairn.trainer.data.opening import open_sources
from cairn.trainer.data.records import problem_of


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches that are not the user's; returns their folder."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def chat(*answers: Any, **more: Any) -> dict[str, Any]:
    """A record of a question and answers."""
    turns = [{"role": "user", "content": "?"}, *({"role": "assistant", "content": one} for one in answers)]
    return {"messages": turns, **more}


def calling(arguments: str) -> str:
    """The line of a record with a tool call that has these arguments, as JSON."""
    call = '{"type": "function", "function": {"name": "f", "arguments": ' + arguments + "}}"
    return '{"messages": [{"role": "assistant", "content": null, "tool_calls": [' + call + "]}]}"


def written(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def source(path: Path, **more: Any) -> SFTDataConfig:
    """Where the data is."""
    return SFTDataConfig(name=str(path), **more)


def texts(path: Path, **more: Any) -> list[str]:
    """The records of a file as JSON, which is how they are written here."""
    return [dumps(record, ensure_ascii=False) for record in every(load_records(source(path, **more)))]


# The trials: what was changed comes back as it is written

KEPT = {
    "T01 floats": [
        calling('{"zoom": 0.7, "tiny": 1e-12, "pi": 3.141592653589793, "big": 12345678901234567}')
    ],
    "T01 as written": [
        calling('{"a": 1.10, "b": 1E5, "c": 1e400, "d": -0, "e": 123456789012345678901234567890}')
    ],
    "T01 dates and kinds": [
        calling('{"count": 1, "day": "2024-05-01"}'),
        calling('{"count": 2.5, "day": "x"}'),
    ],
    "T01 nulls and order": [calling('{"b": 1, "a": "x", "opt": null}'), calling('{"a": "y", "b": 2}')],
    "T02 text that is JSON": [
        json.dumps(chat([{"type": "text", "text": "How many?"}])),
        *(json.dumps(chat(one)) for one in ("4", '{"x": 1}', '["a", "b"]', '"Hello"', "null", '{"y": 1.50}')),
    ],
    "T03 dates": [
        json.dumps({"prompt": "When? ", "completion": day}) for day in ("2024-05-01", "2023-12-24")
    ],
    "T03 times": [
        json.dumps(chat("x", created=day)) for day in ("2024-05-01T10:00:00", "2023-12-24 18:30:00")
    ],
    "T14 a late field": [
        json.dumps(chat("x")),
        json.dumps(chat("x", source="b")),
        calling('{"zone": "UTC"}'),
    ],
    "T19 odd text": [
        json.dumps(chat("\U0001f600", "a\0b")),
        json.dumps(chat("a\u2028b\x85c"), ensure_ascii=False),
    ],
    "T19 odd numbers": [
        '{"prompt": "a", "completion": "b", "score": ' + one + "}" for one in ("NaN", "-Infinity")
    ],
    "T27 an agent's columns": [
        json.dumps(chat("x", id="1", source="web", model="teacher-7b", system_prompt="Be kind.")),
        json.dumps({"type": "chat", "payload": {"a": 1}, **chat("x")}),
    ],
}


def plain(lines: list[str]) -> list[str]:
    """Lines without their escapes."""
    return [dumps(splitting.parse(line), ensure_ascii=False) for line in lines]


@pytest.mark.parametrize("name", KEPT)
def test_records_are_what_their_lines_say(tmp_path: Path, name: str):
    """And all can be trained on."""
    path = written(tmp_path / "a.jsonl", *KEPT[name])
    assert texts(path) == plain(KEPT[name])
    assert [one.replace(" ", "") for one in texts(path)] == [
        one.replace(" ", "") for one in plain(KEPT[name])
    ]
    assert examine(source(path), load_records(source(path)), problem_of)["records"] == len(KEPT[name])


REFUSED: dict[str, tuple[bytes, str]] = {
    "lone.jsonl": (b'{"a": 1}\n{"a": "cut \\ud83d"}\n', r", line 2: \\ud83d is half of a surrogate pair"),
    "twice.jsonl": (
        b'{"a": 1}\n\n{"b": {"a": 1, "a": 2}}\n',
        ", line 3: the key 'a' is there twice in one object",
    ),
    "list.jsonl": (b'{"a": 1}\n[1]\n', ", line 2: it is a list and no record, which is an object in braces"),
    "utf16.jsonl": ('{"a": 1}\n'.encode("utf-16"), ", line 1: it is not UTF-8 but UTF-16"),
    "utf16be.json": ('{"a": 1}\n'.encode("utf-16-be"), ", line 1: it is not UTF-8 but UTF-16"),
    "cut.jsonl": (b'{"a": 1}\n{"a": [1, {"b"', ", line 2: it is no JSON: Expecting ':' delimiter"),
    "deep.jsonl": (b'{"a": ' * 50000 + b"1" + b"}" * 50000, ", line 1: it is nested too deeply"),
    "deep.json": (b'[{"a": ' + b"[" * 50000 + b"]" * 50000 + b"}]", ", line 1: it is nested too deeply"),
    "digits.jsonl": (b'{"a": ' + b"9" * 5000 + b"}", ", line 1: Exceeds the limit"),
    "bytes.json": (b'[{"a": "x"},\n {"a": "\xe9"}]', ", line 2: byte 0xe9 at 8 is not UTF-8"),
    "half.json": (b'[{"a": "x"},\n {"a": "\xe2\x82', ", line 2: byte 0xe2 at 8 is not UTF-8"),
    "two.jsonl": (b'{"a": 1} {"a": 2}\n', ", line 1: it is no JSON: Extra data"),
    "open.json": (b'[{"a": 1},\n{"a": 2}\n', ", line 3: it is no JSON: the list does not end"),
    "comma.json": (b'[{"a": 1},\n]', ", line 2: it is no JSON: Expecting value"),
    "behind.json": (b'[{"a": 1}]\n{"a": 2}', ", line 2: it is no JSON: Extra data behind the list"),
    "number.json": (b'[{"a": 1},\n 5]', ", line 2: it is the number 5 and no record"),
    "empty.json": (b"[ ]", ": it holds no records"),
    "blank.json": (b" \n ", ": it holds no records"),
    "word.json": (b"hello", ", line 1: it is no JSON: Expecting value"),
    "twice.csv": (b"a,a\n1,2\n", ", line 1: two columns are named 'a'"),
    "ragged.csv": (b'a,b\n"x\ny",2\n1,2,3\n', ", line 4: it has 3 fields, and the header names 2 columns"),
    "quote.csv": (b'a,b\n1,"2\n', ", line 2: it is no CSV: unexpected end of data"),
    "latin.csv": (b"a,b\n1,2\n\xe9,4\n", ", line 3: byte 0xe9 at 0 is not UTF-8"),
    "header.csv": (b"a,b\n", ": it holds no records"),
}


def read_stream(path: Path) -> None:
    """Read a stream as training begins to."""
    config = source(path, read="stream")
    open_sources(config, 0)[""].identity()


READERS: dict[str, Callable[[Path], object]] = {
    "indexed": lambda path: load_records(source(path)),
    "stream": read_stream,
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("read", READERS)
def test_what_can_not_be_kept_is_refused_with_its_line(tmp_path: Path, name: str, read: str):
    """By both readers, in the same words; and compressed."""
    content, what = REFUSED[name]
    for path, data in ((tmp_path / name, content), (tmp_path / f"{name}.gz", gzip.compress(content))):
        path.write_bytes(data)
        with pytest.raises(BadRecord) as error:
            READERS[read](path)
        assert str(error.value).startswith(f"{path}{what}".replace("\\\\", "\\")), error.value


# Any value, in all forms of files

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["2024-05-01", "null", "[1]", '{"a": 1}', "1.10", "\u2028", "\ufeff", "\x85", "\r\n", "\\ud83d", ""]
)
numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
atoms = (
    st.sampled_from(["true", "false", "null", "NaN", "-Infinity"])
    | numbers
    | words.map(lambda text: json.dumps(text, ensure_ascii=False))
    | words.map(json.dumps)
)


def _object(items: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in dict(items).items()) + "}"


values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.lists(st.tuples(words, inner), max_size=3).map(_object)
    ),
    max_leaves=8,
)
records = st.lists(
    values.map(calling) | st.lists(st.tuples(words, values)).map(_object), min_size=1, max_size=5
)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def forms(lines: list[str]) -> Iterator[tuple[str, bytes]]:
    """Files that hold these records, by name."""
    yield "lf.jsonl", "".join(line + "\n" for line in lines).encode()
    yield "crlf.ndjson", ("\r\n".join(lines)).encode()
    yield "bom.jsonl", b"\xef\xbb\xbf" + "\n\n \t\n".join(lines).encode()
    yield "lines.json", "\n".join(lines).encode()
    yield "list.json", ("[" + ", ".join(lines) + "]").encode()
    yield "pretty.json", b"\xef\xbb\xbf" + ("\r\n[\n  " + "\n,\n  ".join(lines) + "\n]\n").encode()


@draws.seldom
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=records, ending=st.sampled_from([*COMPRESS]), window=st.integers(1, 40))
def test_any_records_come_back_from_any_form(
    tmp_path: Path, lines: list[str], ending: str, window: int, monkeypatch: pytest.MonkeyPatch
):
    """Indexed, again from the cache, one by one, as a stream, and as a stream that goes on at each record."""
    monkeypatch.setattr(splitting, "WINDOW", window)
    expected = plain(lines)
    contents = set[str]()
    for name, data in forms(lines):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(COMPRESS[ending](data))
        assert texts(path) == expected, name
        found = load_records(source(path))
        assert [dumps(one, ensure_ascii=False) for one in every(found)] == expected, name
        for i in reversed(range(len(lines))):
            assert dumps(found.read([i])[0], ensure_ascii=False) == expected[i]
        contents.add(found.identity()["content"])
        stream = load_stream(source(path))
        state = json.loads(json.dumps(stream.state()))
        for i, one in enumerate(expected):
            ((where, record),) = stream.next(1)
            assert dumps(record, ensure_ascii=False) == one
            assert where == found.where(i)
            again = load_stream(source(path))
            again.seek(state, i)
            assert [dumps(record, ensure_ascii=False) for _, record in again.next(9)] == expected[i:]
            state = json.loads(json.dumps(stream.state()))
        assert stream.next(1) == []
    assert len(contents) == 1, "the identity is that of the records' bytes"


def test_a_large_list_is_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No more of it is read than one record and a window, and a record larger than a window is read."""
    monkeypatch.setattr(splitting, "WINDOW", 1000)
    largest = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal largest
            largest = max(largest, size or 0)
            return super().read(size)

    lines = [
        json.dumps({"prompt": str(i), "completion": "x" * (5000 if i == 70 else 50)}) for i in range(500)
    ]
    data = ("[" + ",\n".join(lines) + "]").encode()
    found = list(splitting.split(Counted(data), "a.json", "values"))
    assert [piece.raw.decode() for piece in found] == lines
    assert [piece.line for piece in found] == list(range(1, 501))
    assert largest < 10_000 < len(data)


# What the source's bytes decide


def test_a_changed_file_of_the_same_time_and_size_is_read_anew(tmp_path: Path):
    """T22; also Parquet, which is read through the cache of `datasets`."""
    for name in ("a.jsonl", "a.parquet"):
        path, seen = tmp_path / name, []
        for answer in ("old answer", "new answer"):
            if name.endswith("parquet"):
                pq.write_table(pa.table({"prompt": ["a"], "completion": [answer]}), path)
            else:
                written(path, json.dumps({"prompt": "a", "completion": answer}))
            os.utime(path, (0, 0))
            seen.append((path.stat().st_size, next(every(load_records(source(path))))["completion"]))
        assert seen[0][0] == seen[1][0]
        assert [one for _, one in seen] == ["old answer", "new answer"]


def test_a_file_that_changes_during_the_run_is_noticed(tmp_path: Path):
    """Never is a record trained on that is not the one that was checked."""
    path = written(tmp_path / "a.jsonl", *(json.dumps(chat(str(i))) for i in range(3)))
    found = load_records(source(path))
    with open(path, "r+b") as file:
        file.seek(int(path.stat().st_size) - 8)
        file.write(b"9")
    assert found.read([1]) == [chat("1")]
    with pytest.raises(BadRecord, match=r"a\.jsonl, line 3: .*a\.jsonl has changed since the run began"):
        found.read([2])
    os.truncate(path, 20)
    with pytest.raises(BadRecord, match=r"line 2: .* has changed since"):
        found.read([1])


@pytest.mark.parametrize("ending", [one for one in COMPRESS if one])
def test_compressed_files(tmp_path: Path, ending: str):
    """Of several streams in a row, as `cat` makes them; one that is cut is refused."""
    lines = [json.dumps(chat(str(i) * 40)) for i in range(3)]
    whole = b"".join(COMPRESS[ending](line.encode() + b"\n") for line in lines)
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(whole)
    assert texts(path) == plain(lines)
    assert [record for _, record in load_stream(source(path)).next(9)] == [json.loads(line) for line in lines]
    for cut in (whole[:-5], whole[: len(whole) // 2], b"nothing of the kind"):
        path.write_bytes(cut)
        for read in READERS.values():
            with pytest.raises(BadRecord, match=rf"a\.jsonl\{ending}: can't be read: "):
                read(path)


# Folders


def put(folder: Path, *names: str) -> None:
    """Files of one record that says the file's name."""
    for name in names:
        written(folder / name, json.dumps({"prompt": name, "completion": "x"}))


FOLDERS = {
    "plain": ["a.jsonl", "b.jsonl"],
    "words": ["chat_train.jsonl", "code.jsonl", "math.jsonl"],
    "dev": ["dev-tools.jsonl", "math.jsonl"],
    "test": ["code.jsonl", "math.jsonl", "unit-test-writing.jsonl"],
    "sub": ["extra/b.jsonl", "train/a.jsonl"],
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("read", ["indexed", "stream"])
def test_all_files_of_a_folder_are_read(tmp_path: Path, name: str, read: Any):
    """T26: whatever words are in their names."""
    put(tmp_path / name, *FOLDERS[name])
    config = source(tmp_path / name, read=read, shuffle=False)
    (opened,) = open_sources(config, 0).values()
    assert [one["prompt"] for one in opened.read(opened.take(len(FOLDERS[name])))] == FOLDERS[name]
    assert what_is_read(config) == f"{tmp_path / name}: reads {', '.join(FOLDERS[name])}"


def test_what_is_not_read_of_a_folder_is_said(tmp_path: Path):
    """Hidden files, and what Spark leaves, are no files of the folder; compressed ones and lists are."""
    put(
        tmp_path,
        "a.jsonl",
        "z/part-00000.ndjson",
        "z/_SUCCESS",
        "z/.part.jsonl.crc",
        ".hidden/b.jsonl",
        "notes.txt",
    )
    put(tmp_path, "test.jsonl", "validation/c.jsonl", "Test-00000-of-00002.jsonl", "latest.jsonl")
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "b.json", "completion": "x"}] * 2))
    (tmp_path / "c.csv").write_text("prompt,completion\nc.csv,x\n")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "d", "completion": "x"}\n'))
    found = load_records(source(tmp_path))
    prompts = ["a.jsonl", "b.json", "b.json", "c.csv", "d", "latest.jsonl", "z/part-00000.ndjson"]
    assert [one["prompt"] for one in every(found)] == prompts
    assert found.where(2) == f"{tmp_path / 'b.json'}, line 1"
    said = what_is_read(source(tmp_path))
    assert said is not None
    assert (
        "not read, since they are of other splits than train: Test-00000-of-00002.jsonl, test.jsonl, val"
        in said
    )
    assert "not read, since they are no data files: notes.txt" in said
    tests = [one["prompt"] for one in every(load_records(source(tmp_path, split="test")))]
    assert tests == ["Test-00000-of-00002.jsonl", "test.jsonl"]
    assert len(load_records(source(tmp_path, split="test[1:]"))) == 1
    for split, message in (
        ("other", "has files of the split test, train, validation; --data.split is other"),
        ("train+test", "it must be a split, or parts of one"),
        ("train[5", "it must be a split, or parts of one"),
    ):
        with pytest.raises(BadRecord, match=message):
            load_records(source(tmp_path, split=split))
    pq.write_table(pa.table({"prompt": ["p"], "completion": ["x"]}), tmp_path / "z.parquet")
    with pytest.raises(BadRecord, match=r"has Parquet files \(z\.parquet\) beside others"):
        load_records(source(tmp_path))
    (tmp_path / "nothing").mkdir()
    put(tmp_path / "nothing", "notes.txt")
    with pytest.raises(BadRecord, match=r"the folder has no data files \(\.jsonl, .*; it has notes\.txt"):
        load_records(source(tmp_path / "nothing"))


def test_slices(tmp_path: Path):
    """As `datasets` has them, also of several files."""
    put(tmp_path, *(f"{i}.jsonl" for i in range(10)))
    for split, numbers in (
        ("train[:3]", [0, 1, 2]),
        ("train[-20%:]", [8, 9]),
        ("train[:1]+train[4:6]", [0, 4, 5]),
    ):
        found = load_records(source(tmp_path, split=split))
        assert [one["prompt"] for one in every(found)] == [f"{i}.jsonl" for i in numbers]
        assert found.where(len(numbers) - 1) == f"{tmp_path / f'{numbers[-1]}.jsonl'}, line 1"
        assert found.identity()["records"] == len(numbers)
    with pytest.raises(BadRecord, match=r"--data\.split is 'train\[x\]'"):
        load_records(source(tmp_path, split="train[x]"))


# The cache


def test_without_room_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """T29: an index is made again; where a copy is needed, the error names the cache and the variable."""
    path = written(tmp_path / "a.jsonl", json.dumps(chat("x")))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    assert texts(path) == texts(path)
    assert (
        "its index is made again at every start, since the cache /proc/nothing/cairn/records" in caplog.text
    )
    with pytest.raises(
        BadRecord, match=r"b\.jsonl\.gz: there is no room for its decompressed copy in the cache /proc"
    ):
        load_records(source(packed))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/proc/hf")
    pq.write_table(pa.table({"prompt": ["p"], "completion": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(
        BadRecord, match=r"can't write its copy of the data to its cache /proc/hf: .*HF_DATASETS_CACHE"
    ):
        load_records(source(tmp_path / "c.parquet"))


def test_a_damaged_cache_is_made_anew(tmp_path: Path):
    path = tmp_path / "b.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(chat("x")).encode()))
    expected = texts(path)
    for kept in cache.folder().iterdir():
        data = kept.read_bytes()
        for damaged in (b"", data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
            kept.write_bytes(damaged)
            if kept.suffix == ".plain" and len(damaged) == len(data):
                with pytest.raises(BadRecord, match="has changed since"):
                    texts(path)
                kept.unlink()
            assert texts(path) == expected


# CSV


def test_csv_is_text_unless_a_column_is_declared_a_number(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer,day\n"007, ""x""\nnext",1.10,2024-05-01\r\nNA,-5,\n', newline="")
    first, second = every(load_records(source(path)))
    assert first == {"prompt": '007, "x"\nnext', "answer": "1.10", "day": "2024-05-01"}
    assert second == {"prompt": "NA", "answer": "-5", "day": None}
    assert [where for where, _ in load_stream(source(path)).next(5)] == [f"{path}, line 2", f"{path}, line 4"]
    numbers = [one["answer"] for one in every(load_records(source(path, csv_numbers=["answer"])))]
    assert numbers == [1.1, -5]
    assert dumps(numbers) == "[1.10, -5]"
    assert [one["answer"] for _, one in load_stream(source(path, csv_numbers=["answer"])).next(5)] == numbers
    both = [load_records(source(path, csv_numbers=one)).identity() for one in ([], ["answer"])]
    assert both[0]["content"] != both[1]["content"]
    (tmp_path / "b.csv").write_text("prompt,completion,label\na,b,True\na,c,false\n")
    labels = [one["label"] for one in every(load_records(source(tmp_path / "b.csv", csv_numbers=["label"])))]
    assert labels == [True, False]
    with pytest.raises(BadRecord, match=r"a\.csv, line 2: day is '2024-05-01' and no number, nor true or"):
        list(every(load_records(source(path, csv_numbers=["day"]))))
    with pytest.raises(BadRecord, match="csv_numbers names other; its columns are prompt, answer, day"):
        load_records(source(path, csv_numbers=["other"]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(words, words), min_size=1, max_size=5))
def test_any_text_comes_back_from_csv(tmp_path: Path, rows: list[tuple[str, str]]):
    """As Python's own writer quotes it; an empty one is None."""
    import csv

    out = io.StringIO(newline="")
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path / "a.csv"
    path.write_bytes(out.getvalue().encode())
    expected = [{"a": a or None, "b": b or None} for a, b in rows]
    assert list(every(load_records(source(path)))) == expected
    assert [one for _, one in load_stream(source(path)).next(9)] == expected


# Tables


def test_tables_with_conversations_as_json_text(tmp_path: Path):
    """T30: Parquet and CSV."""
    text = json.dumps(chat("x", "y")["messages"])
    pq.write_table(pa.table({"messages": [text]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('messages\n"' + text.replace('"', '""') + '"\n')
    for name in ("a.parquet", "a.csv"):
        config = source(tmp_path / name)
        assert list(every(load_records(config))) == [chat("x", "y")]
        assert examine(config, load_records(config), problem_of)["records"] == 1
        assert [one for _, one in load_stream(config).next(2)] == [chat("x", "y")]


def test_columns_that_datasets_can_not_keep_are_named(tmp_path: Path):
    entries = pa.array([[[("role", "user")]]], pa.list_(pa.map_(pa.string(), pa.string())))
    pq.write_table(pa.table({"messages": entries}), tmp_path / "map.parquet")
    with pytest.raises(BadRecord, match=r"map\.parquet: column messages is a map, .* JSON Lines"):
        load_records(source(tmp_path / "map.parquet"))
    for name, value in (("a", {"x": 1}), ("b", {"x": "text"})):
        (tmp_path / "two").mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": ["a"], "extra": [value]}), tmp_path / "two" / f"{name}.parquet")
    with pytest.raises(
        BadRecord, match=r"b\.parquet: column extra is struct<x: string>, and in .*a\.parquet it is"
    ):
        load_records(source(tmp_path / "two"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(BadRecord, match=r"bad\.parquet: can't be read"):
        load_records(source(tmp_path / "bad.parquet"))


# The API


def test_read_records(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", *(json.dumps({"n": i}) for i in range(5)))
    found = cairn.read_records(path, split="train[1:]")
    assert (len(found), found[0], found[-1], found[1:3]) == (4, {"n": 1}, {"n": 4}, [{"n": 2}, {"n": 3}])
    assert list(found) == [{"n": i} for i in range(1, 5)]
    assert found.where(0) == f"{path}, line 2"
    with pytest.raises(IndexError):
        found[4]
    with pytest.raises(cairn.CairnError, match="there is no such file"):
        cairn.read_records(tmp_path / "b.jsonl")


def test_digests_of_environments_are_those_of_older_checkpoints(tmp_path: Path):
    """The digest of all records' values is what it was when `datasets` read the file."""
    lines = [{"prompt": f"p{i}", "answer": i, "share": i / 7, "level": None} for i in range(5)]
    lines[3]["messages"] = [{"role": "user", "content": "a"}]
    path = written(tmp_path / "a.jsonl", *map(json.dumps, lines))
    before = datasets.Dataset.from_list([{**dict.fromkeys([*lines[0], "messages"]), **one} for one in lines])
    digest = hashlib.blake2b(digest_size=16)
    for record in before:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode())
    assert content_digest(load_records(source(path))) == digest.hexdigest()
    assert content_digest(load_records(source(path))) == digest.hexdigest(), "from the cache"


def test_hub_data_that_is_taken_for_logs_of_agents(tmp_path: Path):
    """T27: the message of `datasets` is not the last word."""
    put(tmp_path, "data.jsonl")
    written(
        tmp_path / "data.jsonl", json.dumps(chat("x", id="1", source="web", model="m", system_prompt="s"))
    )
    if importlib.util.find_spec("teich"):
        pytest.skip("the package is installed")
    with pytest.raises(BadRecord, match=r"takes its records for logs of agents .* and give the folder"):
        tables.load(source(tmp_path), None, "train")
    assert len(load_records(source(tmp_path))) == 1
