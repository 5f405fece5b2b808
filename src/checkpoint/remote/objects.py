"""Objects below a URL (s3://, gs://, az://, file://), through the package obstore."""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from cairn.checkpoint.remote.credentials import s3_credentials
from cairn.run.addresses import SCHEMES
from cairn.run.errors import CairnError, UsageError
from cairn.run.files import sync

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

PART_BYTES = 16 << 20
"""Size of a part of a multipart upload; 10,000 parts, which S3 allows, are 160 GB."""
CONCURRENT_PARTS = 8
REQUEST_SECONDS = 120
"""Longest time of a request, its body included: a part at 140 kB/s."""
RETRY_SECONDS = 120
"""How long a failing request is repeated before its error counts; obstore allows up to 300."""

PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a request is made again that obstore has given up."""
T = TypeVar("T")


class RemoteError(CairnError):
    """An object store refused or failed; the message names the object and what to do."""


class Unsure(RemoteError):
    """A request failed in a way that may pass."""


class Exists(RemoteError):
    """An object that should be new exists already."""


class Objects:
    """The objects below a URL, by names relative to it.

    Every method raises RemoteError, except where a missing object is an answer.

    Args:
        retry_seconds: how long a failing request is repeated.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS):
        self.url = url.rstrip("/")
        self._store = _open(self.url, retry_seconds)
        self._retry_seconds = retry_seconds

    def put(self, name: str, content: bytes) -> None:
        """Put a small object; one of that name is replaced."""
        import obstore

        self._try(name, lambda: obstore.put(self._store, name, content, use_multipart=False))

    def put_new(self, name: str, content: bytes) -> None:
        """Put a small object unless one of that name exists, in one atomic request.

        Raises:
            Exists: there is one, with another content.
        """
        import obstore

        try:
            self._try(name, lambda: obstore.put(self._store, name, content, mode="create"))
        except Exists:
            if self.get(name) != content:  # else the answer to an earlier request was lost
                raise

    def put_parts(self, name: str, parts: Callable[[], Iterator[bytes]]) -> None:
        """Put an object of any size, which appears when its last part has arrived.

        Args:
            parts: gives its content, in pieces of PART_BYTES; called once more if an upload fails. Errors
                that it raises are raised as they are.
        """
        import obstore

        failed: list[BaseException] = []

        def watched() -> Iterator[bytes]:
            try:
                yield from parts()
            except BaseException as error:
                failed.append(error)
                raise

        def put() -> None:
            try:
                obstore.put(
                    self._store, name, watched(), chunk_size=PART_BYTES, max_concurrency=CONCURRENT_PARTS
                )
            except BaseException:
                if failed:
                    raise _Local(failed[0]) from None
                raise

        try:
            self._try(name, put)
        except _Local as error:
            raise error.cause from None

    def get(self, name: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        import obstore

        def get() -> bytes | None:
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

        return self._try(name, get)

    def read(self, name: str, first: int, count: int) -> memoryview:
        """The bytes `first` to `first + count` of an object."""
        import obstore

        return self._try(
            name, lambda: memoryview(obstore.get_range(self._store, name, start=first, length=count))
        )

    def modified(self, name: str) -> datetime:
        """When an object was put, by the clock of the object store."""
        import obstore

        return self._try(name, lambda: obstore.head(self._store, name)["last_modified"])

    def list(self, prefix: str = "") -> Sequence[tuple[str, int]]:
        """Names and sizes in bytes of the objects whose names begin with the folder `prefix`."""
        import obstore

        def pages() -> Sequence[tuple[str, int]]:
            found: Iterable[Sequence[ObjectMeta]] = obstore.list(self._store, prefix or None)  # pyright: ignore[reportUnknownMemberType]
            return [(entry["path"], entry["size"]) for page in found for entry in page]

        return self._try(prefix, pages)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store, without reading it here."""
        import obstore

        self._try(source, lambda: obstore.copy(self._store, source, target))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that does not exist is no error."""
        import obstore

        def delete(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        for name in names:
            self._try(name, partial(delete, name))

    def make_durable(self, prefix: str) -> None:
        """Return when the objects in the folder `prefix` survive a power cut; real stores see to that."""
        if urlsplit(self.url).scheme != "file":
            return
        folder = Path(unquote(urlsplit(self.url).path)) / prefix
        with self._errors(prefix):
            for path in (*folder.rglob("*"), folder, folder.parent):
                sync(path)

    def _try(self, name: str, request: Callable[[], T]) -> T:
        """Make a request, again if it fails in a way that obstore does not repeat, such as a lost answer."""
        end = time.monotonic() + self._retry_seconds
        for pause in (*PAUSES, None):
            try:
                with self._errors(name):
                    return request()
            except Unsure:
                if pause is None or time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
        raise AssertionError

    @contextlib.contextmanager
    def _errors(self, name: str) -> Generator[None]:
        """Say errors of obstore by the object's URL and what to do about them."""
        from obstore import exceptions

        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError:
            raise RemoteError(f"{where}: there is no such object, or no such bucket") from None
        except exceptions.AlreadyExistsError:
            raise Exists(f"{where}: exists already") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise RemoteError(
                f"{where}: access was denied; check the credentials ({_first(error)})"
            ) from None
        except (exceptions.BaseError, OSError) as error:
            raise Unsure(f"{where}: {_first(error)}") from None


class _Local(Exception):
    """Reading what should be uploaded has failed."""

    def __init__(self, cause: BaseException):
        super().__init__()
        self.cause = cause


def _first(error: Exception) -> str:
    """The beginning of an error of obstore, which goes on with a debugging form of the same."""
    text = str(error).split("\n\nDebug source:")[0].strip()
    return text[:600]


def _open(url: str, retry_seconds: float) -> "ObjectStore":
    """The store behind a URL.

    Raises:
        UsageError: the URL can't be used.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise UsageError(
            f"{url}: is no URL of an object store; known are {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if parts.scheme == "file" and parts.netloc:
        raise UsageError(f"{url}: a file URL needs three slashes, as in file:///mnt/checkpoints")
    if parts.scheme != "file" and not parts.netloc:
        raise UsageError(f"{url}: names no bucket, as in {parts.scheme}://bucket/prefix")
    options: dict[str, Any] = {}
    if parts.scheme != "file":
        retry = {
            "max_retries": 20,
            "retry_timeout": timedelta(seconds=retry_seconds),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=15),
                "base": 2,
            },
        }
        client = {"timeout": f"{REQUEST_SECONDS}s", "connect_timeout": "10s", "allow_http": _plain_http()}
        options = {"retry_config": retry, "client_options": client}
    else:
        options = {"mkdir": True}
    if parts.scheme == "s3":
        # S3 verifies the CRC-64 of each part, so its SHA-256, which takes much longer, need not be signed.
        options |= {"checksum_algorithm": "CRC64NVME", "unsigned_payload": True}
        # Some servers don't know DeleteObjects, and a step has few objects.
        options |= {"disable_bulk_delete": True, **s3_credentials()}
    try:
        return from_url(url, **options)
    except BaseError as error:
        raise UsageError(f"{url}: {_first(error)}") from None


def _plain_http() -> bool:
    """Whether the environment names an endpoint without TLS, such as one on this machine."""
    names = (
        "AWS_ENDPOINT_URL_S3",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT",
        "AZURE_STORAGE_ENDPOINT",
        "GOOGLE_BASE_URL",
    )
    return any(os.environ.get(name, "").startswith("http://") for name in names)
