"""The manifest: whatever stands in it, it is taken or refused with an error that names it and the field."""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cairn.checkpoint.checksums import CHUNK_BYTES, chunk_crc
from cairn.checkpoint.manifest import (
    CheckpointError,
    Damaged,
    FileEntry,
    Manifest,
    Origin,
    age_of,
    check_files,
    load_manifest,
    parse,
)
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore


def manifest(**changes) -> Manifest:
    fields = {
        "step": 20,
        "run_id": "0badcafe",
        "attempt": 1,
        "branch": "branch_1",
        "parent": Origin(run_id="0badcafe", step=10),
        "created": "2026-11-20T12:00:00+00:00",
        "parts": ["trainer"],
        "world_size": 2,
        "dtypes": {"model/model": "F32"},
        "metrics": {"loss": 0.5},
        "versions": {"torch": "2.13.0"},
        "config_digest": "00" * 16,
        "files": {"model/a": FileEntry.of(3, [7])},
    }
    return Manifest(**{**fields, **changes})


def content(**changes) -> dict:
    """As it stands in the file, with some fields changed; a field that becomes `...` is left out."""
    whole = {**json.loads(manifest().to_json()), **changes}
    return {key: value for key, value in whole.items() if value is not ...}


def files(**entries) -> dict:
    return content(files=entries)


def test_it_comes_back_as_it_was():
    """JSON that a person can read, one field a line, in the order of docs/reference/checkpoint-files.md."""
    text = manifest().to_json()
    assert parse(text, "here") == manifest()
    assert list(json.loads(text)) == [
        *("format", "step", "run_id", "attempt", "branch", "parent", "created", "parts", "world_size"),
        *("dtypes", "metrics", "versions", "config_digest", "chunk_bytes", "files"),
    ]
    assert len(text.splitlines()) > 20
    assert json.loads(text)["chunk_bytes"] == CHUNK_BYTES


def test_the_age_of_a_step_is_no_less_than_nothing():
    """Its clock may have been ahead, and a manifest may say anything."""
    now = datetime.datetime.now(datetime.UTC)
    assert age_of((now - datetime.timedelta(hours=2)).isoformat()) == pytest.approx(7200, abs=60)
    assert age_of((now + datetime.timedelta(hours=2)).isoformat()) == 0.0
    assert [age_of(text) for text in ("yesterday", "", "9999-12-31T23:59:59-23:59")] == [None, None, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_has_not_can_be_metrics(value: float):
    """A loss that is not finite does not make a checkpoint unreadable, for us or for others."""
    text = manifest(metrics={"loss": value, "grad_norm": 1.0}).to_json()
    strict = json.loads(text, parse_constant=pytest.fail)
    assert strict["metrics"] == {"loss": None, "grad_norm": 1.0}
    assert parse(text, "here").metrics == strict["metrics"]


DEEP = "[" * 200_000
ENTRY = {"size": 3, "crc64nvme": ["0" * 16]}

# What stands in the file, and what the message must name beside the file.
HOSTILE = {
    "nothing": ("", ""),
    "blanks": ("  \n", ""),
    "not UTF-8": (b'{"format": 1, "run_id": "\xff\xfe"}', ""),
    "UTF-16": (json.dumps(content()).encode("utf-16"), ""),
    "zeros": (bytes(10_000), ""),
    "cut short": (json.dumps(content())[:-20], ""),
    "something behind it": (json.dumps(content()) + "{}", ""),
    "deep": (DEEP, ""),
    "deep within a field": (json.dumps(content(metrics=0)).replace('"metrics": 0', '"metrics": ' + DEEP), ""),
    "deep and whole": (
        json.dumps(content(metrics=0)).replace(
            '"metrics": 0', '"metrics": ' + "[" * 100_000 + "]" * 100_000
        ),
        "",
    ),
    "a list": ([], ""),
    "null": (None, ""),
    "a string": ("x", ""),
    "a long number": ("1" * 10_000, ""),
    "a field too many": (content(pickle="x"), "pickle"),
    "no format": (content(format=...), ""),
    "an old format": (content(format=0), "format 0"),
    "a new format": (content(format=3), "format 3"),
    "packed files in format 1": (content(contents={"a.safetensors": ENTRY}), "format 1 with contents"),
    "no packed files in format 2": (content(format=2), "format 2 without contents"),
    "a packed file without checksums": (
        content(format=2, contents={"a.safetensors": {"size": 3, "crc64nvme": []}}),
        "a.safetensors",
    ),
    "a packed file that is no tensor file": (content(format=2, contents={"a": ENTRY}), "contents"),
    "a packed file out of the step": (content(format=2, contents={"../a.safetensors": ENTRY}), "../a"),
    "a file packed and as it is": (
        content(format=2, files={"a.safetensors": ENTRY}, contents={"a.safetensors": ENTRY}),
        "a.safetensors",
    ),
    "a new format with other fields": ({"format": 7, "tensors": {}}, "format 7"),
    "a format that is text": (content(format="1"), "format"),
    "a format that is a truth": (content(format=True), "format"),
    "a format that is a list": (content(format=[1]), "format"),
    "no step": (content(step=...), "step"),
    "step zero": (content(step=0), "step"),
    "a step below zero": (content(step=-1), "step"),
    "a step with a fraction": (content(step=20.5), "step"),
    "a step that is text": (content(step="20"), "step"),
    "a step that is a truth": (content(step=True), "step"),
    "a step that is not a number": (content(step=float("nan")), "step"),
    "an infinite step": (content(step=float("inf")), "step"),
    "another step": (content(step=21), "21"),
    "a run id that is a number": (content(run_id=5), "run_id"),
    "a run id with half a character": (content(run_id="\ud800"), ""),
    "a parent that is text": (content(parent="step_10"), "parent"),
    "a parent without a step": (content(parent={"run_id": "x"}), "parent.step"),
    "a parent with more": (content(parent={"run_id": "x", "step": 1, "path": "/"}), "parent.path"),
    "parts that are text": (content(parts="trainer"), "parts"),
    "no ranks": (content(world_size=0), "world_size"),
    "dtypes that are a list": (content(dtypes=[]), "dtypes"),
    "metrics that are a list": (content(metrics=[]), "metrics"),
    "versions that are numbers": (content(versions={"torch": 2}), "versions.torch"),
    "other chunks": (content(chunk_bytes=1), "chunk_bytes"),
    "files that are a list": (content(files=[]), "files"),
    "a file that is null": (files(a=None), "files.a"),
    "a file without a size": (files(a={"crc64nvme": []}), "files.a.size"),
    "a file without checksums": (files(a={"size": 3}), "files.a.crc64nvme"),
    "a file with more": (files(a={**ENTRY, "url": "x"}), "files.a.url"),
    "a size below zero": (files(a={**ENTRY, "size": -1}), "files.a.size"),
    "a huge size": (files(a={**ENTRY, "size": 1 << 62}), "files.a.size"),
    "a size beyond 64 bits": (files(a={**ENTRY, "size": 1 << 90}), "files.a.size"),
    "an infinite size": (files(a={**ENTRY, "size": float("inf")}), "files.a.size"),
    "a size that is not a number": (files(a={**ENTRY, "size": float("nan")}), "files.a.size"),
    "a size with a fraction": (files(a={**ENTRY, "size": 3.5}), "files.a.size"),
    "a size that is text": (files(a={**ENTRY, "size": "3"}), "files.a.size"),
    "a checksum that is a number": (files(a={**ENTRY, "crc64nvme": [7]}), "files.a.crc64nvme.0"),
    "a short checksum": (files(a={**ENTRY, "crc64nvme": ["0" * 15]}), "files.a.crc64nvme.0"),
    "a long checksum": (files(a={**ENTRY, "crc64nvme": ["0" * 17]}), "files.a.crc64nvme.0"),
    "a checksum and a line end": (files(a={**ENTRY, "crc64nvme": ["0" * 16 + "\n"]}), "files.a.crc64nvme.0"),
    "a checksum in capitals": (files(a={**ENTRY, "crc64nvme": ["A" * 16]}), "files.a.crc64nvme.0"),
    "a path out of the step": (files(**{"../../x": ENTRY}), "../../x"),
    "a path out and in": (files(**{"model/../../x": ENTRY}), "model/../../x"),
    "a path within, with dots": (files(**{"model/../model/x": ENTRY}), "model/../model/x"),
    "an absolute path": (files(**{"/etc/hostname": ENTRY}), "/etc/hostname"),
    "an absolute path, doubled": (files(**{"//etc/hostname": ENTRY}), "//etc/hostname"),
    "a path with backslashes": (files(**{"..\\x": ENTRY}), "x"),
    "a Windows path": (files(**{"C:\\x": ENTRY}), "C:"),
    "a path with a dot": (files(**{"./model/x": ENTRY}), "./model/x"),
    "the step itself": (files(**{".": ENTRY}), "files"),
    "no path": (files(**{"": ENTRY}), "files"),
    "a path with two slashes": (files(**{"model//x": ENTRY}), "model//x"),
    "a path that ends in a slash": (files(**{"model/": ENTRY}), "model/"),
    "a path with a zero byte": (files(**{"model/a\0b": ENTRY}), "files"),
    "a path with half a character": (files(**{"model/\ud800": ENTRY}), ""),
    "the manifest itself": (files(**{"manifest.json": ENTRY}), "manifest.json"),
    "a key that stands twice": (json.dumps(content()).replace('"step": 20', '"step": 10, "step": 20'), ""),
    "a file that stands twice": (
        json.dumps(files(a=ENTRY)).replace('"a": ', '"a": {"size": 4, "crc64nvme": []}, "a": '),
        "",
    ),
}  # fmt: skip


def written(folder: Path, what: object) -> Path:
    """A step with that manifest."""
    folder.mkdir(parents=True)
    text = what if isinstance(what, str | bytes) else json.dumps(what)
    path = folder / "manifest.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(("what", "field"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_manifests_are_refused(tmp_path: Path, what: object, field: str):
    """By all readers in the same way: the error names the manifest and the field; never another error."""
    store = CheckpointStore(tmp_path)
    path = written(store.folder(20), what)
    (path.parent / "a").write_bytes(b"abc")
    readers = (load_manifest, verify, lambda folder: verify(folder, content=False))
    for read in readers:
        with pytest.raises(CheckpointError) as caught:
            read(path.parent)
        assert str(path) in str(caught.value)
        assert field in str(caught.value)
        assert len(str(caught.value)) < 2000
    folder, passed_over = store.newest_good()
    assert folder is None
    assert len(passed_over) == 1
    assert str(path.parent) in passed_over[0]


def test_other_formats_are_not_called_damaged(tmp_path: Path):
    """A checkpoint of a newer version is whole; the way out is another version, not an older step."""
    path = written(tmp_path / "step_20", content(format=3))
    with pytest.raises(CheckpointError, match="newer") as caught:
        load_manifest(path.parent)
    assert not isinstance(caught.value, Damaged)


GARBAGE = {
    "zeros": "bytes(SIZE)",
    "brackets": "b'[' * SIZE",
    "a long string": """b'{"format": 1, "run_id": "' + b'x' * SIZE + b'"}'""",
    "a long name": """b'{"files": {"' + b'x' * SIZE + b'": 5}}'""",
    "many objects": """b'{"metrics": [' + b'{},' * (SIZE // 3) + b'{}]}'""",
}
READ_GARBAGE = """
import resource, sys
from pathlib import Path
from cairn.checkpoint.manifest import CheckpointError, load_manifest
SIZE = 100 << 20
path = Path(sys.argv[1]) / "manifest.json"
path.write_bytes(eval(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
try:
    load_manifest(path.parent)
except CheckpointError as error:
    assert str(path) in str(error), error
    assert len(str(error)) < 2000, len(str(error))
else:
    sys.exit("it was taken")
"""


@pytest.mark.slow
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_hundred_megabytes_are_refused_in_little_memory(tmp_path: Path, garbage: str):
    """With a short message, before anything is made of it: 2 GiB of address space are enough."""
    folder = tmp_path / "step_20"
    folder.mkdir()
    command = [sys.executable, "-c", READ_GARBAGE, str(folder), garbage]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(content())), JSON)
def test_no_value_of_a_field_makes_another_error(tmp_path_factory, field: str, value: object):
    """Any JSON in any field: a manifest, or a CheckpointError."""
    assume((field, value) != ("files", {}))  # nothing is missing then
    folder = tmp_path_factory.mktemp("any") / "step_20"
    written(folder, content(**{field: value}))
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):  # there is no such file as it says
        verify(folder)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=12))
def test_no_name_of_a_file_leads_outside(tmp_path_factory, name: str):
    """Whatever the name, only files within the step are looked at."""
    root = tmp_path_factory.mktemp("names")
    (root / "secret").write_bytes(b"abc")
    folder = root / "step_20"
    written(folder, files(**{name: ENTRY}))
    with pytest.raises(CheckpointError):
        verify(folder)


@pytest.mark.parametrize(("size", "count"), [(3, 0), (3, 2), (0, 1), (CHUNK_BYTES, 2), (CHUNK_BYTES + 1, 1)])
def test_a_checksum_too_few_or_too_many_is_refused(tmp_path: Path, size: int, count: int):
    """Also where only sizes are checked: a file without a checksum must not pass for a good one."""
    folder = tmp_path / "step_20"
    written(folder, files(a={"size": size, "crc64nvme": ["0" * 16] * count}))
    with open(folder / "a", "wb") as file:
        file.truncate(size)
    for whole in (True, False):
        with pytest.raises(Damaged, match=f"{count} checksums") as caught:
            verify(folder, content=whole)
        assert "step_20/a" in str(caught.value)


def test_steps_are_where_they_belong(tmp_path: Path):
    """A step that was copied to another number is refused; under any other name it is welcome."""
    whole = manifest(step=3, files={})
    for name in ("step_3", "best", "step_03"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(whole.to_json())
        assert load_manifest(tmp_path / name).step == 3
    (tmp_path / "step_3").rename(tmp_path / "step_4")
    with pytest.raises(Damaged, match=r"step_4.*step 3"):
        load_manifest(tmp_path / "step_4")


@pytest.mark.parametrize("kind", ["absent", "debris", "a file", "a folder for a manifest", "a loop"])
def test_what_is_no_checkpoint_is_called_that(tmp_path: Path, kind: str):
    """A folder that is none, a save that was never completed, a manifest that can't be read."""
    folder = tmp_path / "step_3"
    if kind == "a file":
        folder.write_text("x")
    elif kind != "absent":
        folder.mkdir()
    if kind == "a folder for a manifest":
        (folder / "manifest.json").mkdir()
    if kind == "a loop":
        (folder / "manifest.json").symlink_to("manifest.json")
    with pytest.raises(CheckpointError, match="step_3"):
        load_manifest(folder)
    store = CheckpointStore(tmp_path)
    found, passed_over = store.newest_good()
    assert found is None
    assert len(passed_over) == (kind == "a folder for a manifest")


def test_progress_is_told_in_bytes(tmp_path: Path):
    """What a progress bar adds up to is the size of all files."""
    folder = tmp_path / "step_20"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(CHUNK_BYTES + 5))
    crcs = [0, 0]
    told: list[int] = []
    with pytest.raises(Damaged, match=r"a: changed between bytes 0 and 16777216"):
        check_files(folder, manifest(files={"a": FileEntry.of(CHUNK_BYTES + 5, crcs)}))
    crcs = [chunk_crc(folder / "a", 0), chunk_crc(folder / "a", 1)]
    check_files(folder, manifest(files={"a": FileEntry.of(CHUNK_BYTES + 5, crcs)}), on_bytes=told.append)
    assert sum(told) == CHUNK_BYTES + 5
