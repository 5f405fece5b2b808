"""Records of which each rank makes a share are those that one rank makes of all."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from preference_records import PAIRS
from preference_records import write as write_pairs
from test_data_sources import caches  # noqa: F401
from test_rendering import CHATML, chat, tokenizer_of
from test_unreadable import NO, STRICT, write
from tiny import tokenizer

from cairn.config.data import SFTDataConfig
from cairn.run.batches import Batch
from cairn.run.errors import UsageError
from cairn.trainer.data.batches import SFTData
from cairn.trainer.data.preferences import open_preferences
from cairn.trainer.data.rendering import RecordRefused
from cairn.trainer.data.shares import EncodedRecords, RecordShares


class Thread:
    """The exchange of one of several ranks that are threads."""

    def __init__(self, rank: int, world_size: int, said: list[bytes], barrier: threading.Barrier):
        self.rank, self.world_size = rank, world_size
        self._said, self._barrier = said, barrier

    def gather(self, mine: bytes) -> list[bytes]:
        self._said[self.rank] = mine
        self._barrier.wait(30)
        said = list(self._said)
        self._barrier.wait(30)
        return said


def on_ranks(count: int, act: Callable[[RecordShares], Any]) -> list[Any]:
    """What `act` returns on each of so many ranks."""
    said, barrier = [b""] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        ranks = [RecordShares(Thread(rank, count, said, barrier)) for rank in range(count)]
        return [future.result() for future in [pool.submit(act, rank) for rank in ranks]]


RECORDS = [chat("a" * n, str(n % 7) * (n % 5 + 1)) for n in (1, 9, 4, 30, 2, 7, 5, 3)]


def settings_of(folder: Path, name: str) -> SFTDataConfig:
    """Of the data sets below."""
    path = write(folder / "data.jsonl", [*RECORDS, NO] if name == "unreadable" else RECORDS)
    plain: dict[str, Any] = {"name": path, "batch_size": 5}
    if name == "stream":
        return SFTDataConfig(**plain, read="stream", shuffle_block=3)
    if name == "mixed":
        other = write(folder / "other.jsonl", [chat("x" * n, "y") for n in range(1, 5)])
        sets = [{"name": path, "weight": 2.0}, {"name": other, "label": "other"}]
        return SFTDataConfig(batch_size=5, sets=sets)
    return SFTDataConfig(**plain, unreadable="drop", too_long="drop")


def about(batches: Sequence[Batch], data: SFTData) -> list[Any]:
    """What the batches are, and where the data go on."""
    return [*((one.digest(), one.metrics) for one in batches), data.position, data.state()]


@pytest.mark.parametrize("name", ["unreadable", "stream", "mixed"])
def test_batches_do_not_depend_on_the_number_of_ranks(tmp_path: Path, name: str):
    """Nor do their metrics and the position behind them; also where records are left out, through epochs."""
    config = settings_of(tmp_path, name)

    def read(shares: RecordShares | None) -> list[Any]:
        data = SFTData(config, tokenizer_of(STRICT + CHATML), 3, 0, row_length=32, shares=shares)
        data.check_start()
        return about([data.next_batch(step) for step in range(1, 5)], data)

    alone = read(None)
    if name == "unreadable":
        assert sum(metrics.get("dropped_records", 0) for _, metrics in alone[:4]) > 1
    for count in (2, 3, 7):
        assert on_ranks(count, read) == [alone] * count


@pytest.mark.parametrize("form", ["pairs", "examples"])
def test_units_of_preferences_do_not_depend_on_the_number_of_ranks(tmp_path: Path, form: str):
    config = write_pairs(tmp_path / "pairs.jsonl", PAIRS)

    def read(shares: RecordShares | None) -> list[Any]:
        data = open_preferences(config, form, tokenizer(), 0, row_length=24, shares=shares)
        taken, units, metrics = data.next_units(2 * len(PAIRS))
        fields = [
            (s.token_ids.tolist(), s.loss_mask.tolist(), s.columns["side"].tolist()) for u in units for s in u
        ]
        return [taken, fields, metrics]

    assert on_ranks(3, read) == [read(None)] * 3


def test_a_rank_makes_its_share():
    """Every so many-th record, and no other; all get all."""

    def act(shares: RecordShares) -> list[int]:
        made: list[int] = []

        def make(numbers: Sequence[int]) -> EncodedRecords:
            made.extend(numbers)
            return EncodedRecords([[] for _ in numbers], {number: "odd" for number in numbers if number % 2})

        found = shares.make(list(range(10, 20)), make)
        assert found == EncodedRecords([[]] * 10, dict.fromkeys(range(11, 20, 2), "odd"))
        return made

    assert on_ranks(4, act) == [[10, 14, 18], [11, 15, 19], [12, 16], [13, 17]]
    assert on_ranks(12, lambda shares: len(act(shares))) == [1] * 10 + [0] * 2


def test_what_ends_the_run_is_the_same_on_all_ranks(tmp_path: Path):
    """A record that is refused, whichever rank's share it is in."""
    config = SFTDataConfig(
        name=write(tmp_path / "data.jsonl", [*RECORDS[:3], NO]), batch_size=4, shuffle=False
    )

    def read(shares: RecordShares) -> str:
        data = SFTData(config, tokenizer_of(STRICT + CHATML), 3, 0, row_length=32, shares=shares)
        with pytest.raises(UsageError, match="the chat template refuses it: not that"):
            data.check_start()
        with pytest.raises(RecordRefused) as refused:
            data.next_batch(1)
        return str(refused.value)

    assert len(set(on_ranks(3, read))) == 1


def test_ranks_with_different_records_are_told():
    def act(shares: RecordShares, numbers: Sequence[int]) -> None:
        shares.make(numbers, lambda own: EncodedRecords([[] for _ in own], {}))

    begun = iter(([0, 1, 2, 3], [1, 2, 3, 4]))
    with pytest.raises(RuntimeError, match="different records"):
        on_ranks(2, lambda shares: act(shares, next(begun)))
