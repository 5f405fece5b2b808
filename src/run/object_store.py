"""Reading objects below a URL (s3://, gs://, az://, file://) through the package obstore, and its errors.

The object-store tier writes them (`remote/objects.py`). Reading lies here, so that a checkpoint's reader can
fetch ranges of a step's files without the tier.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from cairn.run.errors import CairnError, UsageError
from cairn.run.file_system import look_anew

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Credential

# What an address says of where it leads.


SCHEMES = ("s3", "gs", "az", "file")
"""Of the URLs of object stores."""


def is_url(text: str) -> bool:
    """Whether `text` is the URL of an object store rather than a path."""
    return urlsplit(text).scheme in SCHEMES and "://" in text


NO_CREDENTIALS = "a URL must hold no credentials; give them in the environment (docs/how-to/remote.md)"
"""The error for one that does. It does not repeat the URL, as what it holds may be a secret."""


def holds_credentials(text: str) -> bool:
    """Whether `text` is a URL with a user name, a password or a query, which may be a signature or a key."""
    parts = urlsplit(text)
    return "://" in text and ("@" in parts.netloc or bool(parts.query))


def shown(value: object) -> str:
    """A value for an error message; of a URL with credentials only the scheme."""
    if isinstance(value, str) and holds_credentials(value):
        return f"'{value.partition('://')[0]}://...'"
    return repr(value)


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine for its own processes only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("127.")  # 127.1 is 127.0.0.1, too


REQUEST_SECONDS = 120
"""Longest time of a request, its body included: a part at 140 kB/s."""
RETRY_SECONDS = 120
"""How long a failing request is repeated before its error counts; obstore allows up to 300."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before a request is made again that obstore has given up."""
METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal")
"""Hosts that give credentials to a cloud's machines; obstore asks them last."""
OF_WRONG_CLOCKS = (
    "RequestTimeTooSkewed",
    "Request date header too old",
    "Token must be a short-lived token (60 minutes) and in a reasonable timeframe",
)
"""What S3, Azure and Google say if the time in a request is not theirs."""
DENIALS = ("401 Unauthorized", "403 Forbidden", *OF_WRONG_CLOCKS)
T = TypeVar("T")


class RemoteError(CairnError):
    """An object store refused or failed; the message names the object and what to do."""


class TransientError(RemoteError):
    """A request failed in a way that may pass."""


class NoCredentials(TransientError):
    """The environment has no credentials, and no service of the machine's gave any."""


class Exists(RemoteError):
    """An object that should be new exists already."""


class Refused(RemoteError):
    """S3 refused a request for a reason that has a name.

    Attributes:
        code: S3's name for it, such as NoSuchUpload.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


def denial(text: str) -> str:
    """What to do about a request that was denied with this text: stores deny those of a wrong clock, too."""
    if any(words in text for words in OF_WRONG_CLOCKS):
        return f"this machine's clock is wrong, so requests are denied; set the clock ({text})"
    return f"access was denied; check the credentials ({text})"


def said(error: Exception) -> str:
    """The beginning of an error of obstore, which goes on with a debugging form of the same."""
    return str(error).split("\n\nDebug source:")[0].strip()[:600]


class ObjectReader:
    """The objects below a URL, by names relative to it; reading only.

    Every method raises RemoteError, except where a missing object is an answer.

    Args:
        retry_seconds: how long a failing request is repeated.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS):
        self.url = url.rstrip("/")
        self._store = open_store(self.url, retry_seconds, REQUEST_SECONDS)
        parts = urlsplit(self.url)
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
        self._retry_seconds = retry_seconds

    def get(self, name: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        found = self.tagged(name)
        return None if found is None else found[0]

    def tagged(self, name: str) -> tuple[bytes, str | None] | None:
        """The content of a small object, and the ETag that lists show for it; None if there is no object."""
        import obstore

        def get() -> tuple[bytes, str | None] | None:
            try:
                answer = obstore.get(self._store, name)
                return bytes(answer.bytes()), tag(answer.meta["e_tag"])
            except FileNotFoundError:
                return None

        self._look_anew(str(Path(name).parent))
        return self._try(name, get)

    def read(self, name: str, first: int, count: int) -> memoryview:
        """The bytes `first` to `first + count` of an object."""
        import obstore

        return self._try(
            name, lambda: memoryview(obstore.get_range(self._store, name, start=first, length=count))
        )

    def size(self, name: str) -> int | None:
        """The size of an object in bytes; None if there is none."""
        import obstore

        def head() -> int | None:
            try:
                return obstore.head(self._store, name)["size"]
            except FileNotFoundError:
                return None

        return self._try(name, head)

    def _look_anew(self, prefix: str) -> None:
        """Have the server of a network file system say what is in the folder `prefix`; real stores do so."""
        if self._folder is not None:
            look_anew(self._folder / prefix)

    def _try(self, name: str, request: Callable[[], T]) -> T:
        """Make a request, again if it fails in a way that obstore does not repeat, such as a lost answer."""
        end = time.monotonic() + self._retry_seconds
        for pause in (*PAUSES, None):
            try:
                with self._errors(name):
                    return request()
            except TransientError:
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
            raise RemoteError(f"{where}: {denial(said(error))}") from None
        except (exceptions.BaseError, OSError) as error:
            text = said(error)
            if any(service in text for service in METADATA_SERVICES):
                raise NoCredentials(
                    f"{where}: the environment has no credentials, and the machine gives none ({text})"
                ) from None
            if any(words in text for words in DENIALS):  # in errors that obstore does not tell apart
                raise RemoteError(f"{where}: {denial(text)}") from None
            raise TransientError(f"{where}: {text}") from None


def open_store(url: str, retry_seconds: float, request_seconds: float) -> "ObjectStore":
    """The store behind a URL.

    Args:
        retry_seconds: how long a failing request is repeated.
        request_seconds: the longest time of one request, its body included.

    Raises:
        UsageError: the URL can't be used.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    parts = urlsplit(url)
    if holds_credentials(url):
        raise UsageError(f"{parts.scheme}://: {NO_CREDENTIALS}")
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
        client = {"timeout": f"{request_seconds}s", "connect_timeout": "10s", "allow_http": _plain_http()}
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
        whose = "; AZURE_STORAGE_ACCOUNT_NAME must be set" if parts.scheme == "az" else ""
        raise UsageError(f"{url}: {said(error)}{whose}") from None
    except OSError as error:  # of a file URL
        raise UsageError(f"{url}: the folder can't be made: {error}") from None


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


def s3_credentials() -> dict[str, Any]:
    """Options for obstore's S3 store: region, and who signs.

    obstore itself reads keys in the environment, web identities, and the services of ECS and EC2. Profiles of
    ~/.aws come from awscrt's default chain.
    """
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    options: dict[str, Any] = {"region": region}
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    by_profile = "AWS_PROFILE" in environment or any(os.path.exists(os.path.expanduser(f)) for f in files)
    if "AWS_ACCESS_KEY_ID" not in environment and by_profile:
        options["credential_provider"] = _by_default_chain
    return options


def _by_default_chain() -> "S3Credential":
    auth: Any = importlib.import_module("awscrt.auth")  # it has no types
    found = auth.AwsCredentialsProvider.new_default_chain().get_credentials().result(30)
    return {
        "access_key_id": found.access_key_id,
        "secret_access_key": found.secret_access_key,
        "token": found.session_token,
        "expires_at": found.expiration,
    }


def tag(text: str | None) -> str | None:
    """An ETag without its quotes, which Azure leaves out in lists."""
    return text.strip('"') if text else None
