"""What identifies data sets, and whether two of them hold the same records."""

from collections.abc import Mapping, Sequence
from typing import Any

OF_RECORDS = ("records", "content", "digest", "first_and_last", "stream", "stream_of")
"""What may stand in an identity. `content` is of the bytes of each record; `digest` of the values in tables,
and in older checkpoints of JSON's, in place of which the oldest have `first_and_last`."""
STREAMS = {"stream", "stream_of"}


def identity_of(parts: Sequence[tuple[str, float, Mapping[str, Any]]]) -> dict[str, Any]:
    """What identifies several data sets: of each its label, its weight, and what identifies it."""
    return {"sets": [{"label": label, "weight": weight, **each} for label, weight, each in parts]}


def same_records(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are of the same records, as far as both say; also of several data sets."""
    pairs = _pairs(one, other)
    return pairs is not None and all(_same(*pair) for pair in pairs)


def mended(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities are of equally many records of which most are the same, in their places.

    That is told by the digests of blocks of records: at most half of them may differ in each data set.
    """
    pairs = _pairs(one, other)
    return pairs is not None and all(_same(*pair) or _mostly(*pair) for pair in pairs)


def _pairs(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] | None:
    """The identities of single data sets that are to be compared; None if the data sets are others."""
    parts, others = one.get("sets"), other.get("sets")
    if parts is None and others is None:
        return [(one, other)]
    if parts is None or others is None or len(parts) != len(others):
        return None
    pairs = list(zip(parts, others, strict=True))
    return pairs if all((a["label"], a["weight"]) == (b["label"], b["weight"]) for a, b in pairs) else None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if bool(STREAMS & one.keys()) != bool(STREAMS & other.keys()):
        return False
    return all(one[key] == other[key] for key in OF_RECORDS if key in one and key in other)


def _mostly(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    blocks, others = one.get("blocks", []), other.get("blocks", [])
    if not blocks or one["records"] != other["records"] or len(blocks) != len(others):
        return False
    return 2 * sum(a != b for a, b in zip(blocks, others, strict=True)) <= len(blocks)
