"""What an address says of where it leads."""

from ipaddress import ip_address
from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "az", "file")
"""Of the URLs of object stores."""


def is_url(text: str) -> bool:
    """Whether `text` is the URL of an object store rather than a path."""
    return urlsplit(text).scheme in SCHEMES and "://" in text


NO_CREDENTIALS = "a URL must hold no credentials; give them in the environment (docs/remote.md)"
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
