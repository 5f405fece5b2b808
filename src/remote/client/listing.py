"""What an object store tells of its objects in lists."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from cairn.run.object_store import tag

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore


@dataclass(frozen=True)
class Listed:
    """An object: its size in bytes, its ETag, and when it was put, by the clock of the object store.

    The ETag is another one once the object is replaced by one with another content.
    """

    size: int
    etag: str | None
    modified: datetime


def listed(store: "ObjectStore", prefix: str) -> dict[str, Listed]:
    """The objects whose names begin with the folder `prefix`, by name; one request for every thousand."""
    import obstore

    pages: Iterable[Sequence[ObjectMeta]] = obstore.list(store, prefix or None)  # pyright: ignore[reportUnknownMemberType]
    return {
        entry["path"]: Listed(entry["size"], tag(entry["e_tag"]), entry["last_modified"])
        for page in pages
        for entry in page
    }


def folders(store: "ObjectStore") -> list[str]:
    """The names of the folders at the top; one request for every thousand."""
    import obstore

    found = obstore.list_with_delimiter(store)  # pyright: ignore[reportUnknownMemberType]
    return [path.rstrip("/") for path in found["common_prefixes"]]
