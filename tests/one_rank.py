"""A group of one rank in the test's own process."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from cairn.trainer.group import RankGroup


@contextlib.contextmanager
def joined() -> Iterator[RankGroup]:
    """The group, while the context lasts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**place, "GLOO_SOCKET_IFNAME": "lo"}.items():
            patch.setenv(key, value)
        group = RankGroup.join(threads=1, deterministic=False)
        try:
            yield group
        finally:
            group.leave()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankGroup]:
    """The group, for the tests of a module."""
    with joined() as group:
        yield group
