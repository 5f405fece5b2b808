"""Data sets that `datasets` reads: Parquet, what `save_to_disk` wrote, and those on the hub."""

# The package `datasets` is typed in part.
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from cairn.run.records import cache
from cairn.run.records.collection import TableRecords
from cairn.run.records.kinds import KINDS, UNREADABLE, BadRecord, is_compressed
from cairn.run.records.streams import TableStream


class _Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def split_setting(self) -> str: ...


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def load(source: _Source, parquet: Sequence[Path] | None, split: str) -> TableRecords:
    """A data set that is read as a whole.

    Args:
        parquet: its files, if it is of local files.
        split: of these files, which are the split train; or of the data set.

    Raises:
        BadRecord: it can't be read, or a column can't be kept as it is.
    """

    def make(name: str, split: str, arguments: dict[str, Any]) -> Any:
        import datasets

        return datasets.load_dataset(name, split=split, **arguments)

    return TableRecords(_load(source, parquet, split, make), source.name, [split])


def stream(source: _Source, parquet: Sequence[Path] | None, split: str) -> TableStream:
    """The same as a stream, of which nothing but its beginning has been read.

    Raises:
        BadRecord: it can't be read.
    """
    import datasets

    files: list[str] = []

    def make(name: str, split: str, arguments: dict[str, Any]) -> Any:
        builder = datasets.load_dataset_builder(name, **arguments)
        found = [str(file) for own in (builder.config.data_files or {}).values() for file in own]
        files.extend(str(Path(file).stat().st_size) if Path(file).is_file() else file for file in found)
        return builder.as_streaming_dataset(split=split)

    opened = _load(source, parquet, split, make)
    if isinstance(opened, datasets.Dataset):
        opened = opened.to_iterable_dataset()
    return TableStream(opened, files, source.name)


def _load(
    source: _Source,
    parquet: Sequence[Path] | None,
    split: str,
    make: Callable[[str, str, dict[str, Any]], Any],
) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is in our message
    path = Path(source.name)
    try:
        if parquet:
            _check_columns(parquet)
            return make(
                "parquet", split, {"data_files": [str(one) for one in parquet], **_by_content(parquet)}
            )
        if is_saved(path):
            return _saved(source, path)
        return make(source.name, split, {})
    except (*UNREADABLE, ValueError, DatasetsError, ImportError) as error:
        raise BadRecord(_explain(source, bool(parquet), error)) from None


def _by_content(files: Sequence[Path]) -> dict[str, Any]:
    """The folder of `datasets` for its copy of these files, which tells only names and times apart."""
    import datasets.config

    name = cache.name_of([cache.content_of(path) for path in files])
    return {"cache_dir": str(Path(datasets.config.HF_DATASETS_CACHE) / "by_content" / name)}


def _saved(source: _Source, path: Path) -> Any:
    import datasets

    records = datasets.load_from_disk(str(path))
    if isinstance(records, datasets.DatasetDict):
        if source.split not in records:
            splits = ", ".join(map(str, records))
            raise BadRecord(f"{path} has the splits {splits}; {source.split_setting} is {source.split}")
        return records[source.split]
    if source.split != "train":
        raise BadRecord(f"{path} is a single split; {source.split_setting} {source.split} is not in it")
    return records


def _check_columns(files: Sequence[Path]) -> None:
    """Check that `datasets` can keep the columns of Parquet files.

    Raises:
        BadRecord: naming a column that it can't, or one that is of two types.
    """
    import pyarrow
    import pyarrow.parquet

    types: dict[str, tuple[Any, Path]] = {}
    for path in files:
        try:
            if is_compressed(path):
                continue
            schema = pyarrow.parquet.read_schema(path)
        except pyarrow.ArrowException as error:
            raise BadRecord(f"{path}: can't be read: {error}") from None
        for column in schema:
            for place, kind in _kinds(column.name, column.type):
                if pyarrow.types.is_map(kind) or pyarrow.types.is_union(kind):
                    what = "map" if pyarrow.types.is_map(kind) else "union"
                    raise BadRecord(
                        f"{path}: column {place} is a {what}, whose entries can't be kept as they are; write "
                        "it as JSON text, or give the data as JSON Lines"
                    )
            known, other = types.setdefault(column.name, (column.type, path))
            nothing = pyarrow.types.is_null(known) or pyarrow.types.is_null(column.type)
            if known != column.type and not nothing and _nests(known, column.type):
                raise BadRecord(
                    f"{path}: column {column.name} is {column.type}, and in {other} it is {known}; write "
                    "both with one type, or give the data as JSON Lines"
                )


def _nests(one: Any, other: Any) -> bool:
    """Whether either has types within it."""
    return bool(one.num_fields or other.num_fields)


def _kinds(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """A type and those within it, each behind its place."""
    import pyarrow

    yield name, kind
    if pyarrow.types.is_map(kind) or pyarrow.types.is_union(kind):
        return
    for i in range(kind.num_fields):
        field = kind.field(i)
        yield from _kinds(f"{name}.{field.name}" if pyarrow.types.is_struct(kind) else name, field.type)


def _explain(source: _Source, is_file: bool, error: Exception) -> str:
    """What is wrong with a data set that can't be read, as a user would see it."""
    import datasets.config

    cause = error.__cause__ or error
    what = " ".join(str(cause).split())
    os_error = next((one for one in (error, cause) if isinstance(one, OSError)), None)
    folder = str(datasets.config.HF_DATASETS_CACHE)
    if os_error is not None and (reason := _not_writable(folder)):
        return (
            f"{source.name}: the package datasets can't write its copy of the data to its cache {folder}: "
            f"{reason}; set HF_DATASETS_CACHE to a folder with room"
        )
    if is_file:
        return f"{source.name}: {what}"
    if "agent traces" in what:
        return (
            f"{source.name}: the package datasets takes its records for logs of agents ({what}); download "
            "its files (hf download --repo-type dataset) and give the folder, which Cairn reads itself"
        )
    kinds = ", ".join(KINDS)
    return (
        f"{source.name}: {what}; give a file ({kinds}), a folder, or a data set on the hub with "
        f"{source.split_setting} (now {source.split}), which is cached if there is no network"
    )


def _not_writable(folder: str) -> str | None:
    """Why a megabyte can't be written there; None if it can."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError as error:
        return error.strerror
    return None
