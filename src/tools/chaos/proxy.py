"""A proxy in front of an inference server that misbehaves on command and counts complete generations."""

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

GENERATE = "/inference/v1/generate"
MOODS = ("slow", "errors", "drops", "silent")


class Proxy:
    """Serves `target` on a loopback port until it is closed.

    mood: None passes everything on; slow delays answers, errors answers 503 and 500, drops cuts connections
    in the middle of answers, silent accepts requests but does not answer while the mood lasts.
    """

    def __init__(self, target: str):
        self.target = target
        self.mood: str | None = None
        self.finished: Counter[str] = Counter()
        """How often each generation request, by its body, was answered in full."""
        self._http = httpx.Client(base_url=target, timeout=600, trust_env=False)
        self._http.timeout = httpx.Timeout(600, connect=2, pool=None)
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._http.close()

    def open(self, method: str, path: str, headers: dict[str, str], body: bytes):
        """The target's answer, as a stream."""
        return self._http.stream(method, path, headers=headers, content=body)


class _Server(ThreadingHTTPServer):
    """One thread per connection; killed clients leave their connections open."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing but errors of this module."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handles one request: passes it on, or misbehaves."""

    protocol_version = "HTTP/1.1"
    owner: Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        mood = self.owner.mood
        if mood == "slow":
            time.sleep(1.0)
        elif mood == "errors":
            return self._refuse(503 if hash(body) % 2 else 500)
        elif mood == "silent":
            while self.owner.mood == "silent":
                time.sleep(0.05)
            self.close_connection = True
            return None
        try:
            self._relay(body, cut=mood == "drops")
        except (httpx.TransportError, OSError):
            self.close_connection = True  # as if there were no server
        return None

    do_GET = do_POST = _pass

    def _refuse(self, code: int) -> None:
        message = json.dumps({"error": {"message": "out of sorts", "code": code}}).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(message)))
        self.end_headers()
        self.wfile.write(message)

    def _relay(self, body: bytes, *, cut: bool) -> None:
        names = ("authorization", "content-type", "accept")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        with self.owner.open(self.command, self.path, headers, body) as answer:
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            content = b""
            for piece in answer.iter_bytes():
                content += piece
                piece = piece[: len(piece) // 2] if cut else piece
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b"")
                if cut:
                    self.close_connection = True
                    return
            if self.path == GENERATE and answer.status_code == 200 and b'"abort"' not in content:
                with contextlib.suppress(ValueError):
                    self.owner.finished[json.dumps(json.loads(body), sort_keys=True)] += 1
            self.wfile.write(b"0\r\n\r\n")
