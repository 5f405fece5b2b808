"""A URL (s3://, gs://, az://, file://) as a store of the package obstore."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cairn.checkpoint.remote.credentials import s3_credentials
from cairn.checkpoint.remote.errors import said
from cairn.run.addresses import NO_CREDENTIALS, SCHEMES, holds_credentials
from cairn.run.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


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
