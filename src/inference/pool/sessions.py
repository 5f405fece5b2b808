"""Which server of a pool a request goes to: the one that has the keys and values of what comes before it.

A session is one answer in the making, with all its turns and pieces: its server has its tokens. The answers
to a prompt begin together on the server that has the prompt. Sessions stay where they are while servers join,
and, by a file, when the orchestrator is restarted; they leave a server that is gone, or that has much more to
do than another one, so that no server's queue grows without bound for their sake.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from cairn.run.files import DamagedFile, read_json, write_atomic
from cairn.run.jsonlines import Row

logger = logging.getLogger(__name__)

MOST = 50_000
"""Sessions and prompts whose servers are remembered, at most."""
FULL = 1.0
"""Load from which new answers to a prompt go to a server with a lower one."""
CROWDED = 2.0
"""Load from which a session leaves its server for one with less than half of it: then as many requests wait
there as are computed, which takes longer than to compute the session's keys and values anew."""
SAVE_SHARE = 0.005
"""Largest part of the time that saving takes, but at the end: the event loop waits for some of it."""
PROMPT = -1
"""In the place of an answer's number: what its prompt's first request has."""

Key = tuple[int, int]


class Candidate(Protocol):
    """A server that can answer a request. load: requests, as a share of those that it computes at once."""

    url: str

    @property
    def load(self) -> float: ...


Server = TypeVar("Server", bound=Candidate)


class Sessions:
    """Remembers the server of each prompt and of each session.

    Args:
        file: where `save` keeps that for a later process; None: nowhere.
    """

    def __init__(self, file: str | Path | None = None):
        self._file = Path(file) if file else None
        self._homes: OrderedDict[Key, str] = OrderedDict()
        self._saved = True
        self._next_save = 0.0
        self.moved = 0
        """Sessions that have gone on on another server since this was last set."""
        if self._file is not None:
            self._read(self._file)

    def choose(self, servers: Sequence[Server], affinity: int, numbers: Sequence[int] = ()) -> Server:
        """The server for a request; it is remembered for the prompt or the session.

        Args:
            servers: that can answer it; one at least.
            affinity: the prompt's number.
            numbers: of the answers that the request is for. If it is one, and it has been asked for before,
                the request goes on with its session.
        """
        least = min(servers, key=lambda server: server.load)
        by_url = {server.url: server for server in servers}
        session = (affinity, numbers[0]) if len(numbers) == 1 else None
        if session and (url := self._homes.get(session)):
            home = by_url.get(url)
            if home is None or (home.load >= CROWDED and least.load < home.load / 2):
                home = least
            chosen = home
            self.moved += chosen.url != url
        else:
            home = by_url.get(self._homes.get((affinity, PROMPT), ""), least)
            chosen = least if home.load >= FULL and least.load < home.load else home
            self._remember((affinity, PROMPT), chosen.url)
        for number in numbers:
            self._remember((affinity, number), chosen.url)
        return chosen

    def take_moved(self) -> int:
        """How many sessions have left their servers since the last call."""
        moved, self.moved = self.moved, 0
        return moved

    def _remember(self, key: Key, url: str) -> None:
        self._saved = self._saved and self._homes.get(key) == url
        self._homes[key] = url
        self._homes.move_to_end(key)
        if len(self._homes) > MOST:
            self._homes.popitem(last=False)

    # The file: {"urls": [...], "homes": [[prompt, answer, place in urls], ...]}, in the order of their use

    async def save(self, *, at_once: bool = True) -> None:
        """Write the file, if anything has changed; a disk that can't take it is reported.

        Args:
            at_once: whether it is written even if that takes more than `SAVE_SHARE` of the time.
        """
        began = time.monotonic()
        if self._file is None or self._saved or (began < self._next_save and not at_once):
            return
        self._saved = True
        places = {url: place for place, url in enumerate(dict.fromkeys(self._homes.values()))}
        rows = ",".join(f"[{prompt},{number},{places[url]}]" for (prompt, number), url in self._homes.items())
        content = f'{{"urls":{json.dumps(list(places))},"homes":[{rows}]}}\n'.encode()
        try:
            await asyncio.to_thread(write_atomic, self._file, content)
        except OSError as error:
            logger.warning("%s can't be written: %s", self._file, error)
        ended = time.monotonic()
        self._next_save = ended + (ended - began) / SAVE_SHARE

    def _read(self, file: Path) -> None:
        try:
            content = read_json(file, Row) or {"urls": [], "homes": []}
            urls = list(map(str, content["urls"]))
            for prompt, number, place in content["homes"][-MOST:]:
                self._homes[int(prompt), int(number)] = urls[place]
        except (DamagedFile, KeyError, ValueError, TypeError, IndexError) as error:
            self._homes.clear()
            logger.warning("%s is ignored, so answers may go on on other servers: %s", file, error)
