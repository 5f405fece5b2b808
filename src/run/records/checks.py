"""Every record is checked before training, once for a content."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cairn.run.records import cache
from cairn.run.records.collection import Record, Records, every, to_bytes
from cairn.run.records.kinds import BadRecord
from cairn.run.records.numbers import dumps

Check = Callable[[Mapping[str, Any]], str | None]
"""Says why a record can't be used; None if it can."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def examine(source: _Named, records: Records, problem_of: Check) -> dict[str, Any]:
    """Check every record, and return what identifies the data set.

    That takes a few seconds for 100,000 records, once: that they passed is kept in the user's cache, by their
    content and the code of the check.

    Returns:
        `records`, their number, and what their content is; see `Records.identity`.

    Raises:
        BadRecord: naming the first record that `problem_of` refuses.
    """

    def look() -> dict[str, Any]:
        for number, record in enumerate(every(records)):
            if problem := problem_of(record):
                raise BadRecord(f"{records.where(number)}: {problem}")
        return records.identity()

    check = f"{problem_of.__module__}.{problem_of.__qualname__} {_code_beside(problem_of.__module__)}"
    return remembered(records, check, look)


def examine_beginning(
    source: _Named,
    files: Sequence[str],
    beginning: Sequence[tuple[str, Record]],
    problem_of: Check,
    called: str,
) -> dict[str, Any]:
    """Check the first records of a stream, and return what identifies it: them, and its files.

    Args:
        beginning: the records, each behind what messages call it.
        called: the name of the digest in the identity.

    Raises:
        BadRecord: naming the first record that `problem_of` refuses; or there is none.
    """
    if not beginning:
        raise BadRecord(f"{source.name}: it holds no records")
    digest = hashlib.blake2b(digest_size=16)
    for where, record in beginning:
        if problem := problem_of(record):
            raise BadRecord(f"{where}: {problem}")
        digest.update(dumps(record, sort_keys=True, default=str).encode())
    digest.update(json.dumps(files).encode())
    return {called: digest.hexdigest()}


def content_digest(records: Records) -> str:
    """A digest of the values of all records, each of which has all fields; one that it lacks is None there.

    It does not depend on the kind of file, nor on how numbers are written.
    """

    def make() -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        missing = dict.fromkeys(records.columns)
        for record in every(records):
            digest.update(to_bytes({**missing, **record}))
        return {"digest": digest.hexdigest()}

    return str(remembered(records, "digest", make)["digest"])


def remembered(records: Records, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` finds of the records, as JSON; it is kept in the user's cache by their content."""
    key = records.key()
    if key is None:
        return make()
    name = cache.name_of([what, key])
    kept = cache.read_note(name)
    if kept is not None:
        return dict(kept)
    found = make()
    cache.keep_note(name, found)
    return found


def _code_beside(module: str) -> str:
    """A digest of a module's code and of those beside it: with other checks, records are looked at again."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(file).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
