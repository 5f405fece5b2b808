"""Connections between the processes of a run, over a network on which there are strangers.

Both sides prove that they know a token, with an HMAC of numbers that the other one has drawn, before anything
else is said. Nothing is encrypted, and who can change what is on its way can change what is said afterwards.

Then both send messages, which are JSON, and whatever bytes these announce. Imports no torch.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

HANDSHAKE_SECONDS = 10.0
STRANGERS = 64
"""Connections at a time that have proven nothing yet: they take threads and descriptors."""
RETRY_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
"""So long nothing may arrive in the middle of a transfer."""
LARGEST_MESSAGE = 256 << 20
NONCE = 32
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A machine that is gone is noticed after 90 seconds without traffic."""


LOWEST_PORT = 20_000
"""Of those that `free_port` chooses: Ray's own processes have ports up to 19,999."""
CONNECTIONS_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
"""Where Linux says which ports it gives to connections, the lowest first."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine on which nothing listens, for a process that will listen on it later.

    It is none of those that the system gives to connections: until the process listens, for which it may have
    to import for half a minute, a connection of any program would get such a port.

    Raises:
        OSError: the host is not one of this machine.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    try:
        room = int(Path(CONNECTIONS_PORTS).read_text().split()[0]) - LOWEST_PORT
    except OSError:
        room = 0
    for _ in range(100 if room > 0 else 0):
        port = LOWEST_PORT + secrets.randbelow(room)  # not by `random`, whose seed may be set
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
            return port
    with socket.create_server((host, 0), family=family) as any_port:
        return any_port.getsockname()[1]


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    text = json.dumps(message).encode()
    link.sendall(struct.pack(">Q", len(text)) + text)


def receive(link: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        OSError: the connection has ended, or nothing comes, or the other side says that it failed.
        ValueError: it is no message.
    """
    (length,) = struct.unpack(">Q", take(link, 8))
    if length > LARGEST_MESSAGE:
        raise ValueError(f"a message of {length} bytes")
    said = json.loads(take(link, length))
    if not isinstance(said, dict):
        raise ValueError("a message without names")
    message = cast(dict[str, Any], said)
    if "error" in message:
        raise OSError(message["error"])
    return message


def take(link: socket.socket, count: int, until: float | None = None) -> bytearray:
    """The next `count` bytes.

    Args:
        until: the time of `time.monotonic` by which they have to be there; default: as long as the connection
            waits.

    Raises:
        OSError: the connection has ended, or they don't come.
    """
    data = bytearray(count)
    fill(link, memoryview(data), until)
    return data


def fill(link: socket.socket, view: memoryview, until: float | None = None) -> None:
    """Put the next bytes into `view`; see `take`."""
    while view:
        if until is not None:
            link.settimeout(max(until - time.monotonic(), 0.0))
        try:
            count = link.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("nothing arrives") from None
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]


def connect(at: tuple[str, int], token: str, seconds: float = HANDSHAKE_SECONDS) -> socket.socket:
    """A connection to a `Listener` that knows `token`; it waits PATIENCE_SECONDS whenever it waits.

    Args:
        at: its address and port.
        seconds: for connecting and for the proofs, together.

    Raises:
        OSError: nobody answers there in time, or it is somebody else.
    """
    until = time.monotonic() + seconds
    link = socket.create_connection(at, timeout=seconds)
    try:
        _set_up(link)
        mine = os.urandom(NONCE)
        link.sendall(mine)
        theirs = bytes(take(link, NONCE, until))
        if not hmac.compare_digest(take(link, NONCE, until), _proof(token, b"listener", mine, theirs)):
            raise PermissionError(f"{at[0]}:{at[1]} does not know the run's token")
        link.sendall(_proof(token, b"client", mine, theirs))
        receive(link)
        link.settimeout(PATIENCE_SECONDS)
    except BaseException:
        link.close()
        raise
    return link


class Listener:
    """Listens on a free port, and answers each connection in a thread, until it is closed.

    Strangers delay nobody: each has HANDSHAKE_SECONDS in all to prove that it knows the token, and of more
    than STRANGERS at a time the one that came first is sent away.

    Args:
        address: of this machine.
        token: what others have to know.
        answer: gets each connection whose other side does. The connection is closed afterwards, also after an
            OSError or ValueError.

    Raises:
        OSError: this machine can't listen at that address.
    """

    def __init__(self, address: str, token: str, answer: Callable[[socket.socket], object]):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self._token = token
        self._answer = answer
        self._changing = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        """Those that have proven nothing yet, in the order in which they came."""
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self, seconds: float = 0.0) -> None:
        """Listen no more, end all connections, and wait at most `seconds` for the thread of each to end."""
        with self._changing:
            self._is_closed = True
            threads = list(self._threads.values())
            for one in (self._socket, *self._threads):
                _end(one)
        for thread in threads:
            thread.join(seconds)

    def _accept(self) -> None:
        with self._socket:
            while not self._is_closed:
                try:
                    link, _ = self._socket.accept()
                except OSError:  # of no more descriptors it would be told at once again
                    time.sleep(RETRY_SECONDS)
                    continue
                thread = threading.Thread(target=self._meet, args=(link,), daemon=True)
                with self._changing:
                    if len(self._strangers) >= STRANGERS:
                        first = next(iter(self._strangers))
                        del self._strangers[first]
                        _end(first)
                    self._strangers[link] = None
                    self._threads[link] = thread
                    thread.start()

    def _meet(self, link: socket.socket) -> None:
        try:
            with link, contextlib.suppress(OSError, ValueError):
                if _admits(link, self._token):
                    with self._changing:
                        self._strangers.pop(link, None)
                    if not self._is_closed:
                        self._answer(link)
        finally:
            with self._changing:
                self._strangers.pop(link, None)
                del self._threads[link]


def _end(link: socket.socket) -> None:
    """End a connection, or listening, that another thread waits for."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _admits(link: socket.socket, token: str) -> bool:
    """Whether the client at the other end of a new connection knows the token."""
    until = time.monotonic() + HANDSHAKE_SECONDS
    theirs, mine = bytes(take(link, NONCE, until)), os.urandom(NONCE)
    link.sendall(mine + _proof(token, b"listener", theirs, mine))
    if not hmac.compare_digest(take(link, NONCE, until), _proof(token, b"client", theirs, mine)):
        return False
    send(link, {})
    _set_up(link)
    link.settimeout(None)
    return True


def _proof(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), side + first + second, "sha256")


def _set_up(link: socket.socket) -> None:
    """Have messages sent at once, and a machine that is gone noticed."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
