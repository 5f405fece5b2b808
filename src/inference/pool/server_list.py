"""Which servers a pool should have: a list of URLs that a user may change at any time."""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)


class ServerList:
    """Which servers there should be: those of the file while it is there, else the configured ones."""

    def __init__(self, urls: Iterable[str], file: str | Path | None):
        self._configured = [url.rstrip("/") for url in urls]
        self._file = Path(file) if file else None
        self._listed: list[str] | None = None
        self._seen: str | None = None
        self._reported: str | None = None

    def read(self) -> list[str]:
        """The servers' URLs; a file that makes no sense is reported once, and the list stays as it was."""
        if self._file is None:
            return self._configured
        try:
            text = self._file.read_text()
            if text != self._seen:
                self._listed, self._reported = parse_urls(text), None
                self._seen = text
        except FileNotFoundError:
            self._listed = self._seen = self._reported = None
        except (OSError, ValueError, RecursionError) as error:
            if str(error) != self._reported:
                logger.error("%s is ignored: %s", self._file, error)
            self._reported = str(error)
        return self._listed or self._configured


def parse_urls(text: str) -> list[str]:
    """The servers that the content of a servers file names.

    Raises:
        ValueError: it is neither a JSON list of URLs nor `{"urls": [...]}`, or names none.
    """
    content = json.loads(text)
    urls = content.get("urls") if isinstance(content, dict) else content
    if not isinstance(urls, list) or not urls:
        raise ValueError('it has to hold a JSON list of URLs, or {"urls": [...]}, with one at least')
    for url in urls:
        if not _is_url(url):
            raise ValueError(f"{url!r} is not a URL; write it like http://127.0.0.1:8000")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def _is_url(value: Any) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (ValueError, TypeError, AttributeError):
        return False


@dataclass(frozen=True)
class PoolSettings:
    """Durations are in seconds."""

    timeout: float = 600.0
    """Longest wait for one answer of one server."""
    retry_for: float = 600.0
    """How long after its first failure a request goes on to be tried, and how long `serve` waits for any
    server."""
    look_every: float = 1.0
    """Between two looks at a healthy server, and at the servers file."""
    hangs_after: float = 30.0
    """Without a sign of life, until a server's requests go to another one, if there is any."""
    keep_cache: bool = False
    """Whether answers in flight go on from the keys and values that earlier weights have made; otherwise a
    server recomputes them with every update, as it would a prompt of that length."""
