# The package `datasets` is typed in part, and records not at all.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
"""Data sets: read from a file, a folder or the hub, and identified by their content.

This needs neither torch nor a tokenizer, so that the launcher can do it before anything is started.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cairn.run.errors import CairnError
from cairn.run.files import write_json
from cairn.run.seeds import permutation

BUILDERS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""The kinds of data files, and the builder of `datasets` that reads each."""
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
ROWS_AT_ONCE = 1000
"""Records that are checked together; more would only take more memory."""


class BadRecord(CairnError):
    """A record, or a whole data set, can't be used; the message says which and why."""


class Part(NamedTuple):
    """One of two parts of a data set: the records that are held out, by a draw of their own, or the others.

    share: of the records that is held out; at least one is. held_out: whether these are the part.
    """

    share: float
    held_out: bool

    def of(self, count: int) -> list[int]:
        """Numbers of the part's records in their order, of a data set of `count`; the same in every run."""
        order = permutation(count, 0, "held out")
        first = max(1, round(self.share * count))
        return sorted(order[:first] if self.held_out else order[first:])


class DataSource(Protocol):
    """Where a data set is.

    name: a .jsonl, .json, .parquet or .csv file, a folder of such files or from `save_to_disk`, or a name on
    the hub. split: of it, or a slice such as train[:1000]. split_setting: what sets the split, as messages
    show it. part: of the split; None: all of it.
    """

    @property
    def name(self) -> str: ...

    @property
    def part(self) -> Part | None: ...

    @property
    def split(self) -> str: ...

    @property
    def split_setting(self) -> str: ...


def load_records(source: DataSource) -> Any:
    """The data set: a file, a folder, one that `save_to_disk` wrote, or a name on the hub.

    Raises:
        BadRecord: it can't be read, naming file and line where one is to blame, or it holds no records.
    """
    import datasets

    records = _load(source, datasets.load_dataset)
    if source.part and len(records):
        records = records.select(source.part.of(len(records)))
    if not len(records):
        raise BadRecord(f"{source.name} holds no records")
    return records


def load_stream(source: DataSource) -> tuple[Any, list[str]]:
    """The same as an `IterableDataset`, of which nothing but its beginning has been read.

    Returns:
        The stream, and what is known of its files: the sizes of those that are here, the addresses of others.

    Raises:
        BadRecord: it can't be read.
    """
    import datasets

    files: list[str] = []

    def load(name: str, *, split: str, data_files: str | None = None) -> Any:
        builder = datasets.load_dataset_builder(name, data_files=data_files)
        found = [str(file) for own in (builder.config.data_files or {}).values() for file in own]
        files.extend(str(Path(file).stat().st_size) if Path(file).is_file() else file for file in found)
        return builder.as_streaming_dataset(split=split)

    stream = _load(source, load)
    return (stream.to_iterable_dataset() if isinstance(stream, datasets.Dataset) else stream), files


def as_written(value: Any, feature: Any) -> Any:
    """A value of a record without the fields that `datasets` has added to it.

    Its objects have all fields that any object of their column has; those that one lacks are None.

    Args:
        feature: the value's type in the data set; None if it is not known.
    """
    if isinstance(value, Mapping):
        if feature is not None and not isinstance(feature, Mapping):
            return value  # JSON, which stays as it is
        fields = feature or {}
        return {key: as_written(v, fields.get(key)) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [as_written(item, getattr(feature, "feature", None)) for item in value]
    return value


def _load(source: DataSource, load: Callable[..., Any]) -> Any:
    """What `load` makes of a file, a folder or a name; what `save_to_disk` wrote is opened."""
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is in our message
    path, builder = Path(source.name), _builder(source.name)
    try:
        if builder:
            if not path.is_file():
                raise BadRecord(f"{path}: there is no such file")
            if not path.stat().st_size:
                raise BadRecord(f"{path}: the file is empty")
            records = load(builder, data_files=str(path), split=source.split)
        elif path.is_file():
            kinds = ", ".join(BUILDERS)
            raise BadRecord(
                f"{path}: a {path.suffix or 'nameless kind of'} file has no records that Cairn could tell; "
                f"it reads {kinds}, also compressed ({', '.join(COMPRESSIONS)})"
            )
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            records = datasets.load_from_disk(str(path))
            if isinstance(records, datasets.DatasetDict):
                if source.split not in records:
                    splits = ", ".join(map(str, records))
                    raise BadRecord(
                        f"{path} has the splits {splits}; {source.split_setting} is {source.split}"
                    )
                records = records[source.split]
            elif source.split != "train":
                raise BadRecord(
                    f"{path} is a single split; {source.split_setting} {source.split} is not in it"
                )
        else:
            records = load(source.name, split=source.split)
    except (*UNREADABLE, ValueError, DatasetsError, ImportError) as error:
        raise BadRecord(_explain(source, builder, error)) from None
    return records


Check = Callable[[Mapping[str, Any]], str | None]
"""Says why a record can't be used; None if it can."""


def examine(source: DataSource, records: Any, problem_of: Check) -> dict[str, Any]:
    """Check every record, and return what identifies the data set.

    It takes a second for 100,000 records, once: the result is kept in the user's cache folder, keyed by the
    size, time and inode of the files that the records were read from.

    Returns:
        `records`, their number; `digest` of all of them in their order; `first_and_last`, which older
        checkpoints have in its place.

    Raises:
        BadRecord: naming the first record that `problem_of` refuses.
    """
    kept = _kept_identity(source, records, problem_of)
    if kept and kept.exists():
        try:
            return json.loads(kept.read_text())
        except ValueError:
            pass
    try:
        digest = _digest_of_checked(source, records, problem_of)
    except UnicodeDecodeError as error:  # the loader lets other bytes than UTF-8 through
        raise BadRecord(_explain(source, _builder(source.name), error)) from None
    ends = b"\n".join(_to_bytes(records[i]) for i in (0, -1))
    identity = {
        "records": len(records),
        "digest": digest,
        "first_and_last": hashlib.blake2b(ends, digest_size=8).hexdigest(),
    }
    if kept:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, identity)
        except OSError:
            pass  # it is only slower the next time
    return identity


def examine_beginning(
    source: DataSource, files: Sequence[str], records: Sequence[Mapping[str, Any]], problem_of: Check
) -> dict[str, Any]:
    """Check the first records of a stream, and return what identifies it: them, and its files.

    Raises:
        BadRecord: naming the first record that `problem_of` refuses; or there is none.
    """
    if not records:
        raise BadRecord(f"{source.name} holds no records")
    digest = hashlib.blake2b(digest_size=16)
    for index, record in enumerate(records):
        if problem := problem_of(record):
            raise BadRecord(f"{locate(source, index)}: {problem}")
        digest.update(_to_bytes(record))
    digest.update(json.dumps(files).encode())
    return {"stream": digest.hexdigest()}


def identity_of(parts: Sequence[tuple[str, float, Mapping[str, Any]]]) -> dict[str, Any]:
    """What identifies several data sets: of each its label, its weight, and what identifies it."""
    return {"sets": [{"label": label, "weight": weight, **each} for label, weight, each in parts]}


def _digest_of_checked(source: DataSource, records: Any, problem_of: Check) -> str:
    digest, index = hashlib.blake2b(digest_size=16), 0
    for columns in records.iter(ROWS_AT_ONCE):
        for row in zip(*columns.values(), strict=True):
            record = dict(zip(columns, row, strict=True))
            if problem := problem_of(record):
                raise BadRecord(f"{locate(source, index)}: {problem}")
            digest.update(_to_bytes(record))
            index += 1
    return digest.hexdigest()


def same_records(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are of the same records, as far as both say; also of several data sets."""
    parts, others = one.get("sets"), other.get("sets")
    if parts is not None or others is not None:
        if parts is None or others is None or len(parts) != len(others):
            return False
        return all(
            (a["label"], a["weight"]) == (b["label"], b["weight"]) and same_records(a, b)
            for a, b in zip(parts, others, strict=True)
        )
    if ("stream" in one) != ("stream" in other):
        return False
    known = (one.keys() & other.keys()) & {"records", "digest", "first_and_last", "stream"}
    return all(one[key] == other[key] for key in known)


def locate(source: DataSource, index: int) -> str:
    """Where a record stands: file and line, or its number, which is 0 for the first."""
    if source.part:
        which = "held out" if source.part.held_out else "not held out"
        return f"{source.name}, record {index} (counted from 0) of those that are {which}"
    if source.split == "train" and Path(_uncompressed(source.name)).suffix in (".jsonl", ".ndjson"):
        filled = -1
        for number, line in _lines(Path(source.name)):
            filled += bool(line.strip())
            if filled == index:
                return f"{source.name}, line {number}"
    return f"{source.name}, record {index} (counted from 0)"


def _to_bytes(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, default=str).encode()


def _kept_identity(source: DataSource, records: Any, problem_of: Check) -> Path | None:
    """Where the identity of records that were read from these very files is kept."""
    files = [Path(file["filename"]) for file in records.cache_files]
    if not files:
        return None
    about = [[str(f), s.st_size, s.st_mtime_ns, s.st_ino] for f in files for s in (f.stat(),)]
    check = f"{problem_of.__module__}.{problem_of.__qualname__}"
    part = [source.part] if source.part else []
    key = json.dumps([check, source.split, len(records), records.column_names, about, *part])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn" / "records"
    return cache / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "missing" if value is None else f"a {type(value).__name__}"


# Files


def _uncompressed(name: str) -> str:
    """The name in lower case, without the ending of a compression."""
    path = Path(name.lower())
    return str(path.with_suffix("")) if path.suffix in COMPRESSIONS else str(path)


def _builder(name: str) -> str | None:
    return BUILDERS.get(Path(_uncompressed(name)).suffix)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, which may be compressed, counted from 1."""
    with COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb") as file:
        yield from enumerate(file, start=1)


def _explain(source: DataSource, builder: str | None, error: Exception) -> str:
    """What is wrong with a data set that can't be read, as a user would see it."""
    path = Path(source.name)
    what = " ".join(str(error.__cause__ or error).split())
    if builder and "nknown split" in what:
        return f"{path}: a file has one split, train (or a part of it, such as train[:1000]); {what}"
    if builder == "json":
        try:
            return f"{path}{_first_bad_line(path) or f': {what}'}"
        except UNREADABLE as unreadable:
            return f"{path}: can't be read: {unreadable}"
    if builder:
        return f"{path}: {what}"
    kinds = ", ".join(BUILDERS)
    return (
        f"{source.name}: {what}; give a file ({kinds}), a folder, or a data set on the hub with "
        f"{source.split_setting} (now {source.split}), which is cached if there is no network"
    )


def _first_bad_line(path: Path) -> str | None:
    """What is wrong with a JSON file, or None; it may be one list, or one object a line."""
    whole = b"".join(line for _, line in _lines(path))
    if Path(_uncompressed(str(path))).suffix == ".json" and whole.lstrip()[:1] == b"[":
        try:
            json.loads(whole)
            return None
        except ValueError as error:
            return f": {_of_json(error)}"
    filled = 0
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line.strip():
            continue
        filled += 1
        try:
            value = json.loads(line)
        except ValueError as error:
            return f", line {number}: {_of_json(error)}"
        if not isinstance(value, dict):
            return f", line {number}: it is {kind_of(value)} and no record, which is an object in braces"
    return None if filled else ": it holds no records"


def _of_json(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"byte {byte:#04x} at {error.start} is not UTF-8; save the file as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error.msg} (column {error.colno})"
    return str(error)
