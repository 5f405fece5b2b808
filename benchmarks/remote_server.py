"""A fast S3 server for benchmarks/remote.py: it discards what it receives, and sends local files.

So neither a disk nor checksums of its own limit it. Objects of up to KEPT bytes are kept in memory. Of larger
ones only the size is known; their content is that of the file with the same name below SOURCE/step_N. It
knows the requests that Cairn makes, multipart uploads and the condition If-None-Match included.

Usage: python benchmarks/remote_server.py PORT SOURCE
"""

import os
import sys
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEPT = 1 << 20
BLOCK = 1 << 20


class Server(ThreadingHTTPServer):
    """The objects by their names, which begin with the bucket: small contents, or sizes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, source: Path):
        super().__init__(("127.0.0.1", port), Handler)
        self.source = source
        self.objects: dict[str, bytes | int] = {}
        self.parts: dict[str, int] = {}
        self.changing = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        super().setup()
        self.block = memoryview(bytearray(BLOCK))

    def log_message(self, *_: object) -> None:
        pass

    def _name(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).strip("/"), parse_qs(parts.query, keep_blank_values=True)

    def _body(self) -> bytes | int:
        """The body if it is small, else its size."""
        left = size = int(self.headers.get("Content-Length", "0"))
        if size <= KEPT:
            return self.rfile.read(size)
        while left:
            count = self.rfile.readinto(self.block[: min(left, BLOCK)])
            if not count:
                raise ConnectionError("the client is gone")
            left -= count
        return size

    def _answer(self, code: int, body: bytes = b"", **headers: object) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(headers.pop("length", len(body))))
        self.send_header("Last-Modified", formatdate(usegmt=True))
        self.send_header("ETag", '"etag"')
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        name, query = self._name()
        body = self._body()
        if "uploadId" in query:
            with self.server.changing:
                self.server.parts[query["uploadId"][0]] += body if isinstance(body, int) else len(body)
        elif "x-amz-copy-source" in self.headers:
            source = unquote(self.headers["x-amz-copy-source"]).strip("/")
            self.server.objects[name] = self.server.objects[source]
            return self._answer(
                200,
                b"<CopyObjectResult><LastModified>2026-01-01T00:00:00Z</LastModified>"
                b"<ETag>etag</ETag></CopyObjectResult>",
            )
        else:
            with self.server.changing:
                if "If-None-Match" in self.headers and name in self.server.objects:
                    return self._answer(412)
                self.server.objects[name] = body
        return self._answer(200)

    def do_POST(self) -> None:
        name, query = self._name()
        self._body()
        if "uploads" in query:
            with self.server.changing:
                upload = str(len(self.server.parts))
                self.server.parts[upload] = 0
            text = f"<Bucket/><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            self._answer(
                200,
                f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode(),
            )
        else:
            self.server.objects[name] = self.server.parts[query["uploadId"][0]]
            text = f"<Bucket/><Key>{escape(name)}</Key><ETag>etag</ETag>"
            self._answer(
                200, f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode()
            )

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._name()[0], None)
        self._answer(204)

    def do_HEAD(self) -> None:
        found = self.server.objects.get(self._name()[0])
        if found is None:
            return self._answer(404)
        return self._answer(200, length=found if isinstance(found, int) else len(found))

    def do_GET(self) -> None:
        name, query = self._name()
        if "list-type" in query:
            return self._list(name, query.get("prefix", [""])[0])
        found = self.server.objects.get(name)
        if found is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        size = found if isinstance(found, int) else len(found)
        first, last, code, headers = 0, size - 1, 200, {}
        if wanted := self.headers.get("Range", "").removeprefix("bytes="):
            start, _, end = wanted.partition("-")
            first, last, code = int(start), min(int(end or last), last), 206
            headers = {"Content_Range": f"bytes {first}-{last}/{size}"}
        if isinstance(found, bytes):
            return self._answer(code, found[first : last + 1], **headers)
        self._answer(code, length=last + 1 - first, **headers)
        at = name.index("step_")
        with open(self.server.source / name[at:], "rb") as file:
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last + 1 - first)
        return None

    def _list(self, bucket: str, prefix: str) -> None:
        begin = f"{bucket}/"
        rows = "".join(
            f"<Contents><Key>{escape(name.removeprefix(begin))}</Key>"
            f"<Size>{found if isinstance(found, int) else len(found)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>etag</ETag></Contents>"
            for name, found in sorted(self.server.objects.items())
            if name.startswith(begin + prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._answer(200, text.encode())


if __name__ == "__main__":
    Server(int(sys.argv[1]), Path(sys.argv[2])).serve_forever()
