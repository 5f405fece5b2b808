"""Connections between the processes of a run, over a network on which there are strangers.

Both sides prove that they know a token, with an HMAC of numbers that the other one has drawn, before anything
else is said. Nothing is encrypted, and who can change what is on its way can change what is said afterwards.

Then both send messages, which are JSON, and whatever bytes these announce. Imports no torch.
"""

import contextlib
import hmac
import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from typing import Any

HANDSHAKE_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""So long nothing may arrive in the middle of a transfer."""
LARGEST_MESSAGE = 256 << 20
NONCE = 32
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A machine that is gone is noticed after 90 seconds without traffic."""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a message."""
    text = json.dumps(message).encode()
    link.sendall(struct.pack(">Q", len(text)) + text)


def receive(link: socket.socket) -> dict[str, Any]:
    """The next message.

    Raises:
        OSError: the connection has ended, or the other side says that it failed.
    """
    (length,) = struct.unpack(">Q", take(link, 8))
    if length > LARGEST_MESSAGE:
        raise OSError(f"a message of {length} bytes")
    message = json.loads(take(link, length))
    if "error" in message:
        raise OSError(message["error"])
    return message


def take(link: socket.socket, count: int) -> bytearray:
    """The next `count` bytes.

    Raises:
        OSError: the connection has ended.
    """
    data = bytearray(count)
    fill(link, memoryview(data))
    return data


def fill(link: socket.socket, view: memoryview) -> None:
    """Put the next bytes into `view`.

    Raises:
        OSError: the connection has ended.
    """
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]


def connect(at: tuple[str, int], token: str, seconds: float = HANDSHAKE_SECONDS) -> socket.socket:
    """A connection to an owner that knows `token`.

    Args:
        at: its address and port.

    Raises:
        OSError: nobody answers there in time, or it is somebody else.
    """
    link = socket.create_connection(at, timeout=seconds)
    try:
        _keep_alive(link)
        mine = os.urandom(NONCE)
        link.sendall(mine)
        theirs = bytes(take(link, NONCE))
        if not hmac.compare_digest(take(link, NONCE), _proof(token, b"owner", mine, theirs)):
            raise PermissionError(f"{at[0]}:{at[1]} does not know the run's token")
        link.sendall(_proof(token, b"client", mine, theirs))
        receive(link)
        link.settimeout(PATIENCE_SECONDS)
    except OSError:
        link.close()
        raise
    return link


class Listener:
    """Listens on a free port, and answers each connection in a thread.

    Args:
        address: of this machine.
        token: what others have to know.
        answer: gets each connection whose other side does; it is closed afterwards, also after an OSError or
            ValueError.
    """

    def __init__(self, address: str, token: str, answer: Callable[[socket.socket], object]):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                link: socket.socket = self.request
                with contextlib.suppress(OSError, ValueError, struct.error):
                    if _admits(link, token):
                        answer(link)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

            def handle_error(self, request: object, client_address: object) -> None:
                """Whoever has asked is told."""

        server = Server((address, 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.port: int = server.server_address[1]


def _admits(link: socket.socket, token: str) -> bool:
    """Whether the client at the other end of a new connection knows the token."""
    link.settimeout(HANDSHAKE_SECONDS)
    theirs, mine = bytes(take(link, NONCE)), os.urandom(NONCE)
    link.sendall(mine + _proof(token, b"owner", theirs, mine))
    if not hmac.compare_digest(take(link, NONCE), _proof(token, b"client", theirs, mine)):
        return False
    send(link, {})
    _keep_alive(link)
    return True


def _proof(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(token.encode(), side + first + second, "sha256")


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
