"""Object stores for tests: a real S3 server on loopback, and steps to put there."""

import contextlib
import http.client
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import free_port

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum
from cairn.checkpoint.manifest import FileEntry, Manifest
from cairn.checkpoint.store import verify
from cairn.run.waiting import wait_for


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server that keeps buckets, such as `bucket`, as folders in `folder`; the environment of clients."""
    port = free_port()
    (folder / "bucket").mkdir(parents=True)
    command = [sys.executable, "-m", "localbucket", "--port", str(port), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: _reachable(port) or None, seconds=60, whom="the S3 server", setting="none")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "a secret",
        }
    finally:
        process.kill()
        process.wait()


class BadNetwork:
    """A proxy between a client and an S3 server that misbehaves on a share of the requests.

    mood: None passes everything on; storm answers 503 and 500 to every second request; drops cuts every third
    answer in its middle; damage flips a byte in every third body of an answer; away refuses everything.
    """

    def __init__(self, target: str):
        self.mood: str | None = None
        self.requests = 0
        self.bytes_up = 0
        host, port = target.removeprefix("http://").split(":")
        network = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                network.requests += 1
                mood, number = network.mood, network.requests
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                network.bytes_up += len(body)
                if mood == "away" or (mood == "storm" and number % 2):
                    self.answer(503 if number % 4 else 500, [], b"<Error><Code>SlowDown</Code></Error>")
                    return
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    content = answer.read()
                finally:
                    connection.close()
                skipped = ("connection", "transfer-encoding", "content-length", "date", "server")
                headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in skipped]
                if self.command == "HEAD":
                    headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
                if mood == "damage" and number % 3 == 0 and len(content) > 4096:
                    content = content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]
                if mood == "drops" and number % 3 == 0:
                    self.answer(answer.status, headers, content, cut=True)
                    return
                self.answer(answer.status, headers, content)

            def answer(
                self, code: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
            ) -> None:
                self.send_response(code)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _reachable(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def make_step(root: Path, step: int, files: dict[str, bytes], **about: Any) -> tuple[Path, Manifest]:
    """A committed local step."""
    folder = root / f"step_{step}"
    entries: dict[str, FileEntry] = {}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        checksum = FileChecksum(len(content))
        for first in range(0, len(content), CHUNK_BYTES):
            checksum.add(first, content[first : first + CHUNK_BYTES])
        entries[name] = FileEntry.of(len(content), checksum.chunks())
    manifest = Manifest(
        **{
            "step": step,
            "run_id": "run",
            "attempt": 1,
            "branch": "branch_1",
            "parent": None,
            "created": "now",
        }
        | {"parts": ["trainer"], "world_size": 1, "dtypes": {}, "metrics": {}, "versions": {}}
        | {"config_digest": "", "files": entries}
        | about
    )
    (folder / "manifest.json").write_bytes(manifest.to_json())
    verify(folder)
    return folder, manifest
