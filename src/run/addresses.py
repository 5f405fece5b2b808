"""What an address says of where it leads."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine for its own processes only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("127.")  # 127.1 is 127.0.0.1, too
