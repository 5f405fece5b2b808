"""Files whose ranges lie in the memory of several nodes, as `cairn.run.memory_owner` serves it."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cairn.run.connections import connect, fill, receive, send
from cairn.run.files import read_json, write_atomic

SCHEME = "memory://"


@dataclass(frozen=True)
class NodeRange:
    """A range of a file, and who has it: the owner's address and port, and the file's name there."""

    first: int
    count: int
    address: str
    port: int
    place: str


@dataclass(frozen=True)
class _Parts:
    """The content of the file that a URL of `note_ranges` names. token_in: the note that has the token of the
    nodes' owners. files: the ranges of each file, by name.
    """

    token_in: str
    files: dict[str, list[NodeRange]]


def note_ranges(path: Path, files: Mapping[str, Sequence[NodeRange]], token_in: Path) -> str:
    """Write down where the ranges of files lie; returns the URL for `NodeReader`.

    Args:
        path: a new file.
        files: all bytes of each file, by name.
        token_in: the note of an owner that has the token of all of them.
    """
    ordered = {name: sorted(parts, key=lambda part: part.first) for name, parts in files.items()}
    write_atomic(path, json.dumps(asdict(_Parts(str(token_in), ordered))).encode())
    return f"{SCHEME}{path}"


class NodeReader:
    """Reads files whose ranges lie in the memory of nodes.

    Args:
        url: what `note_ranges` has returned.
    """

    def __init__(self, url: str):
        path = Path(url.removeprefix(SCHEME))
        parts = read_json(path, _Parts)
        token = read_json(Path(parts.token_in), dict[str, Any]) if parts else None
        if parts is None or token is None:
            raise OSError(f"{parts.token_in if parts else path} is missing")
        self._files = parts.files
        self._firsts = {name: [part.first for part in ranges] for name, ranges in self._files.items()}
        self._token: str = token["token"]

    def read(self, name: str, first: int, count: int) -> memoryview:
        """The bytes `first` to `first + count` of a file; fewer if it ends earlier.

        Raises:
            OSError: a node does not answer.
        """
        data = bytearray()
        asked: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        into: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for part in self._files[name][max(bisect_right(self._firsts[name], first) - 1, 0) :]:
            begin, end = first + len(data), min(first + count, part.first + part.count)
            if end <= begin or begin < part.first:
                break
            at = part.address, part.port
            asked.setdefault(at, []).append((part.place, begin, end - begin))
            into.setdefault(at, []).append((len(data), end - begin))
            data += bytes(end - begin)
        view = memoryview(data)
        for at, ranges in asked.items():
            with connect(at, self._token) as link:
                send(link, {"do": "read", "ranges": ranges})
                receive(link)
                for offset, nbytes in into[at]:
                    fill(link, view[offset : offset + nbytes])
        return view
