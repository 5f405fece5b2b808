"""Object stores for tests: a real S3 server on loopback, and steps to put there."""

import base64
import contextlib
import hashlib
import hmac
import http.client
import http.server
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

import psutil
import pytest
from awscrt import checksums

from cairn.checkpoint.checksums import CHUNK_BYTES, FileChecksum
from cairn.checkpoint.manifest import FileEntry, Manifest
from cairn.checkpoint.step_folder import verify
from cairn.run.connections import free_port
from cairn.run.waiting import wait_for


@contextlib.contextmanager
def s3_bucket(folder: Path) -> Iterator[Path]:
    """The bucket `bucket` of a real S3 server, as a folder; the environment of this process leads to it."""
    with s3_server(folder) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield folder / "bucket"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server that keeps buckets, such as `bucket`, as folders in `folder`; the environment of clients."""
    port = free_port()
    (folder / "bucket").mkdir(parents=True)
    command = [sys.executable, "-m", "localbucket", "--port", str(port), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: reachable(port) or None, seconds=60, whom="the S3 server", setting="none")
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
    finally:
        process.kill()
        process.wait()


SECRET = "a secret"
BLOCK = 256 << 10
"""Bytes that a slow network passes on at a time."""


class BadNetwork:
    """A proxy between a client and an S3 server that misbehaves on a share of the requests.

    It also does what localbucket leaves out: it checks signatures and CRC-64/NVMEs, lists the uploads that
    were not completed and their parts, and counts.

    mood: None passes everything on; storm answers 503 and 500 to every second request; drops cuts every third
    answer in its middle; damage flips a byte in the first answer to each question, and in every fourth body
    that is sent; reorder holds every second answer back; slow only passes bodies on, both ways, at `rate`
    bytes a second each; away refuses everything; skewed refuses everything as S3 does if the clock is wrong.

    arrived: how often each part has, by key and number.
    """

    def __init__(self, target: str):
        self.mood: str | None = None
        self.rate = 16 << 20
        self.requests = 0
        self.bytes_up = 0
        self.working = 0
        """Requests that are being answered."""
        self.counting = threading.Lock()
        self.arrived: Counter[tuple[str, int]] = Counter()
        self.copied: Counter[tuple[str, int]] = Counter()
        """The same of parts that were copied within the store; whole objects have the number 0."""
        self.tells = True
        """Whether the checksums of copies are told."""
        self.uploads: dict[str, Upload] = {}
        """By their ids."""
        self.denied: set[str] = set()
        """Methods that are not permitted."""
        self.lists = True
        """Whether uploads and parts are listed."""
        self.refused: list[str] = []
        """Requests whose signature or checksum was wrong."""
        self.bytes_down: Counter[str] = Counter()
        """Bytes of the bodies of answers to GET, by the path that was asked for."""
        self.answered: set[tuple[str, str | None]] = set()
        """Paths and ranges that were answered with damage."""
        self.readers: Counter[tuple[str, int]] | None = None
        """If a test wants to know: the same by path and the id of the process that asked."""
        host, port = target.removeprefix("http://").split(":")
        network = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def work(self) -> None:
                with network.counting:
                    network.working += 1
                try:
                    self.pass_on()
                finally:
                    with network.counting:
                        network.working -= 1

            def pass_on(self) -> None:
                body = self.body(size := int(self.headers.get("Content-Length") or 0))
                if len(body) < size:  # the client was killed
                    self.close_connection = True
                    return
                network.requests += 1
                mood, number = network.mood, network.requests
                network.bytes_up += len(body)
                if mood == "away" or (mood == "storm" and number % 2):
                    self.fail(503 if number % 4 else 500, "SlowDown")
                    return
                if mood == "skewed":
                    self.fail(403, "RequestTimeTooSkewed")
                    return
                if not signed(self.command, self.path, self.headers):
                    network.refused.append(f"{self.command} {self.path}: signature")
                    self.fail(403, "SignatureDoesNotMatch")
                    return
                if mood == "damage" and number % 4 == 0 and len(body) > 4096:
                    body = body[:2000] + bytes([body[2000] ^ 1]) + body[2001:]
                method = "COPY" if "x-amz-copy-source" in self.headers else self.command
                if method in network.denied:
                    self.fail(403, "AccessDenied")
                    return
                if problem := self.problem(body):
                    if mood != "damage":
                        network.refused.append(f"{self.command} {self.path}: {problem}")
                    self.fail(400, problem)
                    return
                if listed := self.listed():
                    self.answer(200, [], listed.encode())
                    return
                if self.command == "DELETE" and "uploadId" in self.path:
                    network.uploads.pop(self.place()[1]["uploadId"], None)
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    answer = connection.getresponse()
                    content = answer.read()
                finally:
                    connection.close()
                self.take_note(body, answer, content)
                if "x-amz-copy-source" in self.headers and network.tells:
                    crc = f"<ChecksumCRC64NVME>{_crc(self.source())}</ChecksumCRC64NVME></Copy"
                    content = content.replace(b"</Copy", crc.encode())
                if self.command == "GET":
                    path = self.path.partition("?")[0]
                    network.bytes_down[path] += len(content)
                    if network.readers is not None:
                        asked_by = process_of_client(self.connection)
                        network.readers[path, asked_by] += len(content)
                skipped = ("connection", "transfer-encoding", "content-length", "date", "server")
                headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in skipped]
                if self.command == "HEAD":
                    headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
                if mood == "reorder" and number % 2 == 0:
                    time.sleep(0.3)
                asked = (self.path, self.headers.get("Range"))
                if mood == "damage" and asked not in network.answered and len(content) > 4096:
                    network.answered.add(asked)
                    content = content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]
                if mood == "drops" and number % 3 == 0:
                    self.answer(answer.status, headers, content, cut=True)
                    return
                self.answer(answer.status, headers, content)

            def body(self, size: int) -> bytes:
                """The body of the request; less than `size` bytes if the client is gone."""
                if network.mood != "slow":
                    return self.rfile.read(size)
                body = b""
                while len(body) < size and (block := self.rfile.read(min(BLOCK, size - len(body)))):
                    time.sleep(len(block) / network.rate)
                    body += block
                return body

            def send(self, content: bytes) -> None:
                """Send the body of an answer."""
                if network.mood != "slow":
                    self.wfile.write(content)
                    return
                for first in range(0, len(content), BLOCK):
                    self.wfile.write(block := content[first : first + BLOCK])
                    time.sleep(len(block) / network.rate)

            def place(self) -> tuple[str, dict[str, str]]:
                """The key, and what follows the question mark."""
                parts = urlsplit(self.path)
                return unquote(parts.path).lstrip("/").partition("/")[2], dict(
                    parse_qsl(parts.query, keep_blank_values=True)
                )

            def problem(self, body: bytes) -> str | None:
                """The name of the error if a checksum of the request is wrong."""
                _, query = self.place()
                wanted = self.headers.get("x-amz-checksum-crc64nvme")
                if self.command == "POST" and "uploadId" in query and query["uploadId"] in network.uploads:
                    parts = network.uploads[query["uploadId"]].parts
                    body = b"".join(parts[number] for number in sorted(parts))
                elif self.command != "PUT":
                    return None
                if wanted is None:
                    return "InvalidRequest" if body and "x-amz-copy-source" not in self.headers else None
                return None if wanted == _crc(body) else "BadDigest"

            def listed(self) -> str | None:
                """The answer to a request for unfinished uploads or their parts."""
                _, query = self.place()
                if self.command != "GET" or not network.lists:
                    return None
                if "uploads" in query:
                    rows = "".join(
                        f"<Upload><Key>{escape(found.key)}</Key><UploadId>{upload}</UploadId>"
                        f"<Initiated>{found.begun}</Initiated></Upload>"
                        for upload, found in network.uploads.items()
                        if found.key.startswith(query["prefix"])
                    )
                    return f'<ListMultipartUploadsResult xmlns="x">{rows}</ListMultipartUploadsResult>'
                if found := network.uploads.get(query.get("uploadId", "")):
                    first = int(query.get("part-number-marker", "0"))
                    numbers = [number for number in sorted(found.parts) if number > first]
                    rows = "".join(  # a page has two parts
                        f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;{md5(found.parts[n])}&quot;</ETag>"
                        f"<ChecksumCRC64NVME>{_crc(found.parts[n])}</ChecksumCRC64NVME></Part>"
                        for n in numbers[:2]
                    )
                    more = f"<IsTruncated>{str(len(numbers) > 2).lower()}</IsTruncated>"
                    if len(numbers) > 2:
                        more += f"<NextPartNumberMarker>{numbers[1]}</NextPartNumberMarker>"
                    return f'<ListPartsResult xmlns="x">{more}{rows}</ListPartsResult>'
                return None

            def take_note(self, body: bytes, answer: http.client.HTTPResponse, content: bytes) -> None:
                """Remember uploads and parts."""
                key, query = self.place()
                if answer.status >= 300:
                    return
                if "uploads" in query:
                    upload = content.decode().partition("<UploadId>")[2].partition("<")[0]
                    network.uploads[upload] = Upload(key)
                elif "partNumber" in query:
                    copied = "x-amz-copy-source" in self.headers
                    number = int(query["partNumber"])
                    network.uploads[query["uploadId"]].parts[number] = self.source() if copied else body
                    (network.copied if copied else network.arrived)[key, number] += 1
                elif "uploadId" in query:
                    network.uploads.pop(query["uploadId"], None)
                elif "x-amz-copy-source" in self.headers:
                    network.copied[key, 0] += 1

            def source(self) -> bytes:
                """The bytes that the request copies."""
                connection = http.client.HTTPConnection(host, int(port), timeout=60)
                try:
                    place = f"/{self.headers['x-amz-copy-source']}"
                    asked = self.headers["x-amz-copy-source-range"]
                    connection.request("GET", place, headers={"Range": asked} if asked else {})
                    return connection.getresponse().read()
                finally:
                    connection.close()

            def fail(self, code: int, name: str) -> None:
                self.answer(code, [], f"<Error><Code>{name}</Code></Error>".encode())

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
                    self.send(content[: len(content) // 2] if cut else content)
                if cut:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = work

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Clients that are killed are expected."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class Upload:
    """An upload in parts that was not completed."""

    def __init__(self, key: str):
        self.key = key
        self.begun = datetime.now(UTC).isoformat()
        self.parts: dict[int, bytes] = {}


def signed(method: str, path: str, headers: Message) -> bool:
    """Whether a request is signed with the secret, by Amazon's description of version 4."""
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=user/(\d+)/([^/]+)/s3/aws4_request, ?"
        r"SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})",
        headers.get("Authorization", ""),
    )
    if match is None:
        return False
    day, region, names, signature = match.groups()
    parts = urlsplit(path)
    query = sorted(parse_qsl(parts.query, keep_blank_values=True))
    lines = [
        *(method, quote(unquote(parts.path), safe="/-_.~")),
        "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query),
        *(f"{name}:{' '.join(headers[name].split())}" for name in names.split(";")),
        *("", names, headers["x-amz-content-sha256"]),
    ]
    request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{day}/{region}/s3/aws4_request\n{request}"
    key = f"AWS4{SECRET}".encode()
    for step in (day, region, "s3", "aws4_request", text):
        key = hmac.digest(key, step.encode(), "sha256")
    return key.hex() == signature


def md5(data: bytes) -> str:
    """What S3 calls the ETag of a part."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _crc(data: bytes) -> str:
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def reachable(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def process_of_client(connection: socket.socket) -> int:
    """The process at the other end of a connection within this machine.

    Both ends' addresses are compared: connections to other servers may leave from the same port.

    Raises LookupError if no process has it.
    """
    ends = (connection.getpeername(), connection.getsockname())
    for _ in range(50):  # the kernel's table may leave out a connection while others come and go
        for found in psutil.net_connections("tcp"):
            if found.pid and (found.laddr, found.raddr) == ends:
                return found.pid
        time.sleep(0.02)
    raise LookupError(f"no process has the connection from {ends[0]} to {ends[1]}")


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
