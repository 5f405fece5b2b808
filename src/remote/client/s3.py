"""Signed requests to S3, for what obstore has no function for.

Address, region and the objects' names in it are obstore's; the signatures are awscrt's, and the connections
urllib3's.
"""

import base64
import contextlib
import importlib
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree

import urllib3

from cairn.run.object_store import NoCredentials, Refused, RemoteError, TransientError, denial
from cairn.run.waiting import Backoff

if TYPE_CHECKING:
    from obstore.store import S3Store

CONNECTIONS = 32
"""That are kept open."""
CONNECT_SECONDS = 20
"""Longest time until a connection is there, and until a block of a body is sent."""
ANSWER_SECONDS = 120
"""Longest time until an answer begins, and between two receptions of its bytes."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
"""Seconds before a failed request is made again: first, and at most."""
TRANSIENT = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted"}
"""S3's names for errors that may pass."""
CRC_HEADER = "x-amz-checksum-crc64nvme"
Body = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True)
class S3Response:
    """An answer of S3: headers, whose names are in small letters, and the body."""

    headers: Mapping[str, str]
    content: bytes

    def xml(self) -> "Tree":
        """The body as XML.

        Raises:
            Refused: it is none.
        """
        try:
            return Tree(ElementTree.fromstring(self.content))
        except ElementTree.ParseError:
            raise Refused("the object store does not answer as S3 does", "NoXML") from None


class Tree:
    """XML whose name space does not matter."""

    def __init__(self, element: ElementTree.Element):
        self._element = element

    def text(self, name: str) -> str:
        """The text of an element below; empty if there is none."""
        return (self._element.findtext(f"{{*}}{name}") or "").strip()

    def all(self, name: str) -> list["Tree"]:
        """The elements below with this name."""
        return [Tree(found) for found in self._element.findall(f"{{*}}{name}")]


class LocalError(Exception):
    """What should be sent could not be read.

    Attributes:
        cause: the error.
    """

    def __init__(self, cause: Exception):
        super().__init__()
        self.cause = cause


class S3:
    """The bucket and the prefix of a store of obstore.

    Args:
        url: names the store in errors.
        store: obstore's, with a region.
        retry_seconds: how long a failing request is repeated.
    """

    def __init__(self, url: str, store: "S3Store", retry_seconds: float):
        self.url = url
        self._store = store
        self._retry_seconds = retry_seconds
        self._place: _Place | None = None
        self._finding = threading.Lock()

    def key(self, name: str) -> str:
        """The key in the bucket of the object `name` below the URL."""
        return f"{self._store.prefix}/{name}" if self._store.prefix else name

    def source(self, url: str, name: str) -> str:
        """What names the object `name` below the URL of a bucket, as the source of a copy."""
        parts = urlsplit(url)
        return quote("/".join(filter(None, (parts.netloc, unquote(parts.path).strip("/"), name))), safe="/")

    def request(
        self,
        method: str,
        name: str | None,
        query: Mapping[str, str | int],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Body = b"",
        size: int = 0,
    ) -> S3Response:
        """Make a request, again if it fails in a way that may pass.

        Args:
            name: of an object; None for the bucket.
            body: what is sent, or what gives it for each try in `size` bytes.

        Raises:
            Refused: S3 refuses it.
            TransientError: it failed until the time was over.
            LocalError: `body` failed.
        """
        where = f"{self.url}/{name or ''}".rstrip("/")
        if "partNumber" in query:
            where = f"{where}, part {query['partNumber']}"
        end = time.monotonic() + self._retry_seconds
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            backoff.grow()
            try:
                return self._once(where, method, name, query, dict(headers or {}), body, size)
            except TransientError:
                wait = backoff.spread()
                if time.monotonic() + wait > end:
                    raise
            time.sleep(wait)

    def stream(self, name: str, first: int, end: int, *, piece: int, seconds: float) -> Iterator[memoryview]:
        """The bytes from `first` until `end` of an object in turn, while they arrive, by one request.

        They end earlier only if the object does.

        Args:
            piece: bytes that come at a time.
            seconds: the longest time until all have arrived.

        Raises:
            Refused: S3 refuses the request.
            TransientError: it failed, or takes too long; what has come is right as far as the connection can
                tell.
        """
        where, last = f"{self.url}/{name}", time.monotonic() + seconds
        place = self._found()
        with _connecting(where):
            answer = place.send(
                "GET", self._path(place, name), {"Range": f"bytes={first}-{end - 1}"}, b"", whole=False
            )
            with answer:  # closes a connection whose answer was not read to its end
                if answer.status >= 300:
                    raise _error(where, answer.status, answer.read())
                if answer.status != 206:
                    raise Refused(f"{where}: the object store ignores that a part was asked for", "NoRange")
                while data := answer.read(piece):
                    yield memoryview(data)
                    if time.monotonic() > last:
                        raise TransientError(f"{where}: {end - first} bytes took longer than {seconds:.0f} s")

    def _once(
        self,
        where: str,
        method: str,
        name: str | None,
        query: Mapping[str, str | int],
        headers: dict[str, str],
        body: bytes | Body,
        size: int,
    ) -> S3Response:
        place = self._found()
        path = f"{self._path(place, name)}?{urlencode(sorted(query.items()), quote_via=quote, safe='')}"
        headers["Content-Length"] = str(len(body) if isinstance(body, bytes) else size)
        sent = body if isinstance(body, bytes) else _watched(body)
        with _connecting(where):
            answer = place.send(method, path, headers, sent)
            content = answer.data
        if answer.status < 300 and b"<Error>" not in content[:200]:  # an error can follow a hasty 200
            return S3Response({name.lower(): value for name, value in answer.headers.items()}, content)
        raise _error(where, answer.status, content)

    def _path(self, place: "_Place", name: str | None) -> str:
        return f"{place.bucket}/{quote(self.key(name), safe='/')}" if name is not None else f"{place.bucket}/"

    def _found(self) -> "_Place":
        with self._finding:
            if self._place is None:
                self._place = self._find()
            return self._place

    def _find(self) -> "_Place":
        """Ask obstore for a signed URL, of which all but the signature counts."""
        import obstore
        from obstore import exceptions

        try:
            signed = urlsplit(obstore.sign(self._store, "GET", "x", timedelta(seconds=60)))
        except (exceptions.BaseError, OSError) as error:
            raise RemoteError(f"{self.url}: {str(error)[:600]}") from None
        end = f"/{quote(self.key('x'), safe='/')}"
        if not signed.path.endswith(end):
            raise RemoteError(f"{self.url}: {signed.path} is not a path that ends with {end}")
        scope = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")
        address = f"{signed.scheme}://{signed.netloc}"
        return _Place(address, signed.path.removesuffix(end), scope[-3])


class _Place:
    """Where a bucket is, and who signs requests to it.

    Args:
        address: scheme, host and port.
        bucket: the beginning of paths; empty where the host names the bucket.
    """

    def __init__(self, address: str, bucket: str, region: str):
        self.address = address
        self.bucket = bucket
        self._auth: Any = importlib.import_module("awscrt.auth")  # it has no types
        self._http: Any = importlib.import_module("awscrt.http")
        s3: Any = importlib.import_module("awscrt.s3")
        self._how = s3.create_default_s3_signing_config(
            region=region, credential_provider=self._auth.AwsCredentialsProvider.new_default_chain()
        )

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | Iterator[memoryview],
        *,
        whole: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """Sign and send a request; with `whole`, its answer has been read."""
        return _pool(self.address).urlopen(
            method,
            self.address + path,
            headers=self._signed(method, path, headers),
            body=body,
            retries=False,
            redirect=False,
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=ANSWER_SECONDS),
            preload_content=whole,
            decode_content=False,
        )

    def _signed(self, method: str, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers, and those that sign them and the path; the body is not signed."""
        named = self._http.HttpHeaders([("Host", urlsplit(self.address).netloc), *headers.items()])
        request = self._http.HttpRequest(method, path, named)
        try:
            self._auth.aws_sign_request(request, self._how).result(60)
        except Exception as error:  # awscrt's own errors are of one class, whatever has failed
            raise NoCredentials(f"{self.address}: no credentials to sign with: {str(error)[:600]}") from None
        return dict(request.headers)


@contextlib.contextmanager
def _connecting(where: str) -> Generator[None]:
    """Say errors of the connection by the object's URL."""
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise TransientError(f"{where}: {str(error)[:600]}") from None


def _error(where: str, status: int, content: bytes) -> RemoteError:
    """The error that an answer is."""
    code, said = "", ""
    with contextlib.suppress(ElementTree.ParseError):
        tree = Tree(ElementTree.fromstring(content))
        code, said = tree.text("Code"), tree.text("Message")
    text = f"{where}: {' '.join(word for word in (str(status), code, said) if word)}"
    if code in TRANSIENT or status in (408, 429) or (status >= 500 and status != 501):
        return TransientError(text)
    if status in (401, 403):
        return Refused(f"{where}: {denial(f'{status} {code} {said}')}", code)
    return Refused(text, code)


def crc_text(crc: int) -> str:
    """A CRC as S3 writes it."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def crc_number(text: str) -> int:
    """A CRC that S3 has written."""
    return int.from_bytes(base64.b64decode(text), "big")


@cache
def _pool(address: str) -> urllib3.PoolManager:
    """Connections to a host, through the proxy that the environment names, if any."""
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    options: dict[str, Any] = {"maxsize": CONNECTIONS}
    if parts.scheme == "https":
        options["ssl_context"] = ssl.create_default_context()
    if proxy and not urllib.request.proxy_bypass(parts.netloc):
        return urllib3.ProxyManager(proxy, **options)
    return urllib3.PoolManager(**options)


def _watched(body: Body) -> Iterator[memoryview]:
    """The body; its errors are kept apart from those of the connection."""
    try:
        yield from body()
    except Exception as error:
        raise LocalError(error) from error
