"""Filtering, sorting and searching a run's kept rollouts, however many there are.

The narrow columns of each file (numbers, and codes for the few texts that repeat) are read once and kept in
memory, about 50 bytes a rollout; texts are read of what is shown, and for a search. Nothing takes longer than
the time that it is given: what is not done by then is said (`left`), and the next call goes on from there.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.orchestrator.rollout_log import KeptRollouts, Row
from cairn.run.files import DamagedFile

NUMBERS: Mapping[str, str] = {
    "step": "i4",
    "place": "i8",
    "sample": "i4",
    "problem": "i8",
    "trained": "i1",
    "policy_step": "i4",
    "reward": "f8",
    "tokens": "i4",
    "seconds": "f4",
}
"""The columns that are kept as numbers, and their types in memory."""
CODED = ("environment", "failed", "finish_reason")
"""The columns that are kept as codes of texts; -1 is null."""
TURNS = "turns.list.element.branch"
"""One value for each turn, so that turns are counted without reading their texts."""
TEXTS = ("prompt", "text", "failed", "turns.list.element.prompt", "turns.list.element.text")
"""Where a search looks; in turns only if there are several."""
CACHE_BYTES = 512 << 20
"""Texts that are kept in memory for further searches, in bytes."""
SECONDS = 0.4
"""What a call may take for reading files, unless it says otherwise."""
TOGETHER = 8
"""Files that a search reads before it looks at the clock."""
BINS = 24
"""Bars of a histogram, at most."""
SORTS = ("newest", "oldest", "best", "worst", "longest", "shortest", "slowest")
"""Orders in which rollouts are listed."""


@dataclass(frozen=True)
class RolloutQuery:
    """Which rollouts, in which order. None selects all.

    first_step, last_step: both included. reward_from, reward_to: both included. failed: True only those that
    failed, False only the others. trained: likewise. end: how it ended, `stop` or `length`. text: in the
    prompt, the answer or the reason of a failure, in whatever case. sort: of `SORTS`.
    """

    first_step: int | None = None
    last_step: int | None = None
    environment: str | None = None
    problem: int | None = None
    place: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    failed: bool | None = None
    trained: bool | None = None
    end: str | None = None
    text: str = ""
    sort: str = "newest"


@dataclass(frozen=True)
class Histogram:
    """How often values are how large: `counts[i]` lie in `edges[i]` to `edges[i + 1]`; the last bar includes
    its end."""

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class FoundRollouts:
    """One page of what a query selects.

    keys: step, place and sample of each. total: how many are selected in all, as far as files were read.
    left: files that were not read in the time that there was; ask again. searched: for a text, the files that
    were looked through. damaged: what could not be read. rewards: of all that is selected.
    """

    keys: Sequence[tuple[int, int, int]]
    total: int
    left: int
    searched: int
    damaged: Sequence[str]
    rewards: Histogram


@dataclass(frozen=True)
class _Narrow:
    """The narrow columns of one file."""

    stamp: tuple[int, int]
    columns: Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class _Texts:
    """Texts of one file in lower case, one after the other: text i is of row `rows[i]`, or of all rows with
    that code, and ends before `ends[i]`."""

    content: bytes
    starts: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    codes: np.ndarray[Any, Any] | None

    def mark(self, needle: bytes, hits: np.ndarray[Any, Any]) -> None:
        """Set `hits` of the rows in whose text the needle is."""
        places = list[int]()
        at = self.content.find(needle)
        while at >= 0:
            places.append(at)
            at = self.content.find(needle, at + len(needle))
        if not places:
            return
        found = np.array(places, "i8")
        texts = np.searchsorted(self.starts, found, side="right") - 1
        inside = found + len(needle) <= self.starts[texts + 1]
        chosen = set(texts[inside].tolist())
        for at in found[~inside]:  # over the end of a text, perhaps in front of a place that is in one
            last = np.searchsorted(self.starts, at + 2 * len(needle), side="right")
            for text in range(
                int(np.searchsorted(self.starts, at, side="right")) - 1, min(last, len(self.starts) - 1)
            ):
                if self.content.find(needle, int(self.starts[text]), int(self.starts[text + 1])) >= 0:
                    chosen.add(text)
        if self.codes is not None:
            hits |= np.isin(self.codes, np.array(sorted(chosen), "i4"))
        else:
            hits[self.rows[sorted(chosen)]] = True


@dataclass
class _Search:
    """How far a search for one text has come: the rows with hits, by step, and the file's stamp."""

    hits: dict[int, tuple[tuple[int, int], np.ndarray[Any, Any]]] = field(
        default_factory=dict[int, tuple[tuple[int, int], np.ndarray[Any, Any]]]
    )


class RolloutIndex:
    """The kept rollouts of a run, as it grows. For one thread."""

    def __init__(self, kept: KeptRollouts):
        self.kept = kept
        self._files: dict[int, _Narrow] = {}
        self._damaged: dict[int, tuple[tuple[int, int], str]] = {}
        self._words: dict[str, dict[str, int]] = {name: {} for name in CODED}
        self._all: dict[str, np.ndarray[Any, Any]] | None = None
        self._texts: OrderedDict[int, tuple[tuple[int, int], list[_Texts]]] = OrderedDict()
        self._cached = 0
        self._searches: OrderedDict[str, _Search] = OrderedDict()
        self._pool = ThreadPoolExecutor(2, "rollouts")

    def steps(self) -> list[int]:
        """The steps that have a file, oldest first."""
        return self.kept.steps()

    def environments(self) -> list[str]:
        """The environments of the files that were read."""
        return sorted(self._words["environment"])

    def refresh(self, seconds: float = SECONDS) -> int:
        """Read what is new, the newest files first, for so many seconds; returns how many files are left."""
        until = time.monotonic() + seconds
        stamps = {step: stamp for step in self.steps() if (stamp := self._stamp(step))}
        gone = self._files.keys() - stamps.keys()
        for step in gone:
            del self._files[step]
        todo = [step for step, stamp in stamps.items() if not self._is_known(step, stamp)]
        changed, left = bool(gone), len(todo)
        for step in reversed(todo):
            if time.monotonic() > until and changed:
                break
            changed, left = True, left - 1
            self._files.pop(step, None)
            try:
                self._files[step] = _Narrow(stamps[step], self._read(step))
                self._damaged.pop(step, None)
            except (DamagedFile, KeyError, ValueError, TypeError, pa.ArrowException) as error:
                name = "" if isinstance(error, DamagedFile) else f"{self.kept.path(step)}: can't be read: "
                self._damaged[step] = stamps[step], f"{name}{error}"
        if changed:
            self._all = None
        return left

    def _is_known(self, step: int, stamp: tuple[int, int]) -> bool:
        narrow, damaged = self._files.get(step), self._damaged.get(step)
        return (narrow is not None and narrow.stamp == stamp) or (damaged is not None and damaged[0] == stamp)

    def _stamp(self, step: int) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self.kept.path(step).stat()
            return status.st_mtime_ns, status.st_size
        return None

    def _read(self, step: int) -> dict[str, np.ndarray[Any, Any]]:
        table = self.kept.table(step, [*NUMBERS, *CODED, TURNS])
        count, found = table.num_rows, dict[str, np.ndarray[Any, Any]]()
        for name, kind in NUMBERS.items():
            if name not in table.column_names:
                found[name] = np.full(count, np.nan if kind[0] == "f" else -1, kind)
                continue
            column = table[name].cast(pa.float64() if kind[0] == "f" else pa.int64())
            fill = float("nan") if kind[0] == "f" else -1
            found[name] = pc.fill_null(column, fill).to_numpy().astype(kind)
        for name in CODED:
            found[name] = self._coded(name, table[name]) if name in table.column_names else _none(count)
        has_turns = "turns" in table.column_names
        lengths = _called("list_value_length", table["turns"]).fill_null(0).to_numpy() if has_turns else None
        found["turns"] = np.zeros(count, "i4") if lengths is None else lengths.astype("i4")
        return found

    def _coded(self, name: str, column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
        words = self._words[name]
        encoded = column.combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = [words.setdefault(str(word), len(words)) for word in encoded.dictionary.to_pylist()]
        own = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return np.array([*codes, -1], "i4")[own]

    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The narrow columns of all files that were read, in the order of steps and of rows in a file."""
        if self._all is None:
            names = [*NUMBERS, *CODED, "turns"]
            files = [self._files[step].columns for step in sorted(self._files)]
            self._all = {
                name: np.concatenate([one[name] for one in files]) if files else np.empty(0) for name in names
            }
        return self._all

    def words(self, name: str) -> list[str]:
        """The texts of a coded column, by code."""
        return list(self._words[name])

    def find(
        self, query: RolloutQuery, begin: int = 0, count: int = 50, *, seconds: float = SECONDS
    ) -> FoundRollouts:
        """The rollouts that a query selects, from number `begin` on, at most `count`.

        Raises:
            ValueError: it asks for an order that there is not.
        """
        until = time.monotonic() + seconds
        left = self.refresh(seconds)
        columns = self.columns()
        chosen = self._selected(query, columns)
        searched = 0
        if query.text:
            hits, searched, unsearched = self._search(query, max(until - time.monotonic(), seconds / 4))
            chosen, left = chosen & hits, left + unsearched
        rows = np.flatnonzero(chosen)
        order = _sorted(rows, columns, query.sort, begin + count)[begin : begin + count]
        keys = [tuple(int(columns[name][row]) for name in ("step", "place", "sample")) for row in order]
        return FoundRollouts(
            keys=[(step, place, sample) for step, place, sample in keys],
            total=len(rows),
            left=left,
            searched=searched,
            damaged=[why for _, why in self._damaged.values()],
            rewards=histogram(columns["reward"][rows]),
        )

    def _selected(
        self, query: RolloutQuery, columns: Mapping[str, np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any]:
        chosen = np.ones(len(columns["step"]), bool)
        bounds = [("step", query.first_step, query.last_step), ("problem", query.problem, query.problem)]
        bounds += [("place", query.place, query.place)]
        for name, first, last in [*bounds, ("reward", query.reward_from, query.reward_to)]:
            if first is not None:
                chosen &= columns[name] >= first
            if last is not None:
                chosen &= columns[name] <= last
        for name, word in (("environment", query.environment), ("finish_reason", query.end)):
            if word is not None:
                chosen &= columns[name] == self._words[name].get(word, -2)
        if query.failed is not None:
            chosen &= (columns["failed"] >= 0) == query.failed
        if query.trained is not None:
            chosen &= (columns["trained"] == 1) == query.trained
        return chosen

    def _search(self, query: RolloutQuery, seconds: float) -> tuple[np.ndarray[Any, Any], int, int]:
        """Which rows have the text, how many files were looked through, and how many of those asked for were
        not."""
        until, needle = time.monotonic() + seconds, query.text.lower()
        search = self._searches.setdefault(needle, _Search())
        self._searches.move_to_end(needle)
        while len(self._searches) > 8:
            self._searches.popitem(last=False)
        wanted = [step for step in sorted(self._files) if _within(step, query)]
        todo = [step for step in reversed(wanted) if not self._is_searched(search, step)]
        for begin in range(0, len(todo), TOGETHER):
            if time.monotonic() > until and begin:
                break
            steps = todo[begin : begin + TOGETHER]
            for step, texts in zip(steps, self._pool.map(self._texts_of, steps), strict=True):
                hits = np.zeros(len(self._files[step].columns["step"]), bool)
                for one in texts:
                    one.mark(needle.encode(errors="replace"), hits)
                search.hits[step] = self._files[step].stamp, hits
                self._remember(step, texts)
        done = {step for step in wanted if step in search.hits}
        parts = [
            search.hits[step][1] if step in done else np.zeros(len(self._files[step].columns["step"]), bool)
            for step in sorted(self._files)
        ]
        return np.concatenate(parts) if parts else np.empty(0, bool), len(done), len(wanted) - len(done)

    def _is_searched(self, search: _Search, step: int) -> bool:
        return step in search.hits and search.hits[step][0] == self._files[step].stamp

    def _texts_of(self, step: int) -> list[_Texts]:
        """The texts of a file; changes nothing, since several threads do it at once."""
        known = self._texts.get(step)
        if known is not None and known[0] == self._files[step].stamp:
            return known[1]
        several = bool((self._files[step].columns["turns"] > 1).any())
        try:
            table = self.kept.table(step, TEXTS if several else TEXTS[:3])
            return list(_lowered(table, len(self._files[step].columns["step"])))
        except (DamagedFile, pa.ArrowException):
            return []

    def _remember(self, step: int, texts: list[_Texts]) -> None:
        """Keep the texts of a file for the next search, and no more than `CACHE_BYTES` in all."""
        _, earlier = self._texts.pop(step, (None, list[_Texts]()))
        self._texts[step] = self._files[step].stamp, texts
        self._cached += sum(len(one.content) for one in texts) - sum(len(one.content) for one in earlier)
        while self._cached > CACHE_BYTES and len(self._texts) > 1:
            _, (_, oldest) = self._texts.popitem(last=False)
            self._cached -= sum(len(one.content) for one in oldest)


def _none(count: int) -> np.ndarray[Any, Any]:
    return np.full(count, -1, "i4")


def _within(step: int, query: RolloutQuery) -> bool:
    return (query.first_step is None or step >= query.first_step) and (
        query.last_step is None or step <= query.last_step
    )


def _lowered(table: pa.Table, count: int) -> Iterator[_Texts]:
    """The texts of a file; of a prompt that several rows have, one."""
    for name in ("prompt", "text", "failed"):
        if name not in table.column_names or table.num_rows != count:
            continue
        encoded = table[name].combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        content, starts = _joined(encoded.dictionary)
        yield _Texts(content, starts, codes, codes)
    if "turns" in table.column_names and table.num_rows == count:
        turns = table["turns"].combine_chunks()
        flat, parents = turns.flatten(), turns.value_parent_indices().to_numpy()
        for name in ("prompt", "text"):
            content, starts = _joined(pc.fill_null(flat.field(name), ""))
            yield _Texts(content, starts, parents, None)


def _called(function: str, values: Any) -> Any:
    """A function of `pyarrow.compute` that exists only once it runs, so that type checkers don't know it."""
    return pc.call_function(function, [values])


def _joined(texts: pa.Array) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Texts in lower case, one after the other, and where each begins; the end comes last."""
    lowered = _called("utf8_lower", texts.cast(pa.large_string()))
    _, places, content = lowered.buffers()
    starts = np.frombuffer(places, "i8")[: len(lowered) + 1] if len(lowered) else np.zeros(1, "i8")
    return (content.to_pybytes()[: starts[-1]] if content else b""), starts


def _sorted(
    rows: np.ndarray[Any, Any], columns: Mapping[str, np.ndarray[Any, Any]], sort: str, count: int
) -> np.ndarray[Any, Any]:
    """The first `count` of these rows in that order; of equal ones the newest first."""
    if sort not in SORTS:
        raise ValueError(f"sort = {sort!r}: there are {', '.join(SORTS)}")
    if sort == "oldest":
        return rows[:count]
    if sort == "newest":  # steps backwards, in a step by place and sample as in its file
        return _by(-columns["step"][rows].astype("i8"), rows, count)
    name = {"best": "reward", "worst": "reward", "slowest": "seconds"}.get(sort, "tokens")
    values = columns[name][rows].astype("f8")
    known = ~np.isnan(values)
    rows, values = rows[known][::-1], values[known][::-1]
    return _by(values if sort in ("worst", "shortest") else -values, rows, count)


def _by(values: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """The `count` rows with the smallest values, stably."""
    if count < len(rows):
        bound = np.partition(values, count - 1)[count - 1]
        below = np.flatnonzero(values <= bound)
        values, rows = values[below], rows[below]
    return rows[np.argsort(values, kind="stable")][:count]


def histogram(values: np.ndarray[Any, Any]) -> Histogram:
    """How often rewards are how large; a bar for each value if there are few."""
    values = values[np.isfinite(values)]
    if not len(values):
        return Histogram([], [])
    low, high = float(values.min()), float(values.max())
    if low == high or not np.isfinite((high - low) * BINS):
        return Histogram([low, high], [len(values)])
    counts, edges = np.histogram(values, BINS, (low, high))
    return Histogram([float(edge) for edge in edges], [int(one) for one in counts])


def whole_rows(kept: KeptRollouts, keys: Sequence[tuple[int, int, int]], columns: Sequence[str]) -> list[Row]:
    """These rollouts with these columns, in this order; those that are gone are left out.

    Raises:
        DamagedFile: a file can't be read.
    """
    found: dict[tuple[int, int, int], Row] = {}
    for step in {step for step, _, _ in keys}:
        table = kept.table(step, columns)
        wanted = {(place, sample) for own, place, sample in keys if own == step}
        places = [place for place, _ in wanted]
        try:
            chosen = pa.array(np.isin(table["place"].to_numpy(), places))
            rows = table.filter(chosen).to_pylist(maps_as_pydicts="strict")
        except (pa.ArrowException, ValueError) as error:
            raise DamagedFile(f"{kept.path(step)}: can't be read: {error}") from None
        for row in rows:
            if (row["place"], row["sample"]) in wanted:
                found[row["step"], row["place"], row["sample"]] = row
    return [found[key] for key in keys if key in found]
