"""What an address says of where it leads."""

from ipaddress import ip_address
from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "az", "file")
"""Of the URLs of object stores."""


def is_url(text: str) -> bool:
    """Whether `text` is the URL of an object store rather than a path."""
    return urlsplit(text).scheme in SCHEMES and "://" in text


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine for its own processes only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("127.")  # 127.1 is 127.0.0.1, too
