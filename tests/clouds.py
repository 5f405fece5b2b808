"""Object stores for tests, on loopback: Azure's emulator, and a small server that answers like Google's."""

import base64
import contextlib
import datetime
import email.utils
import hashlib
import hmac
import http.client
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from stores import reachable

from cairn.run.connections import free_port
from cairn.run.waiting import wait_for

AZURITE = "azurite@3.35.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of Azurite that its documentation publishes."""


@contextlib.contextmanager
def azure_server(folder: Path) -> Iterator[dict[str, str]]:
    """Azurite, Microsoft's emulator of Azure's store, with a container `box`; the environment of clients.

    It skips the test where Azurite is missing: npm installs 190 MB for it.
    """
    command = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if command is None:
        pytest.skip(f"azurite-blob is missing: npm install -g {AZURITE}, or give its path in AZURITE_BLOB")
    port = free_port()
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry")
    process = subprocess.Popen(
        [command, "--blobPort", str(port), *options],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: reachable(port) or None, seconds=60, whom="Azurite", setting="none")
        _make_container(port, "box")
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        }
    finally:
        process.kill()
        process.wait()


def _make_container(port: int, name: str) -> None:
    """Make a container, which obstore can't do."""
    about = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in about.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers = {**about, "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(
        "PUT", f"/{ACCOUNT}/{name}?restype=container", headers={**headers, "Content-Length": "0"}
    )
    answer = connection.getresponse()
    assert answer.status == http.HTTPStatus.CREATED, answer.read()
    connection.close()


@contextlib.contextmanager
def google_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server with the bucket `box` that answers those requests of Google's XML API that obstore makes.

    It is written after that API's documentation, and proves only that the client's side holds together.
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _google_handler())
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    account = folder / "account.json"
    url = f"http://127.0.0.1:{server.server_port}"
    content = {
        "gcs_base_url": url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    account.write_text(json.dumps(content))
    try:
        yield {"GOOGLE_SERVICE_ACCOUNT": str(account), "GOOGLE_BASE_URL": url}
    finally:
        server.shutdown()
        server.server_close()


def _google_handler() -> type[http.server.BaseHTTPRequestHandler]:
    objects: dict[str, tuple[bytes, datetime.datetime]] = {}
    uploads: dict[str, dict[int, bytes]] = {}
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            content = self.body()
            if "uploadId" in self.query:
                uploads[self.query["uploadId"]][int(self.query["partNumber"])] = content
                return self.answer(200, headers={"ETag": _tag(content)})
            if source := self.headers.get("x-goog-copy-source"):
                found = objects.get(unquote(source).removeprefix("box/"))
                if found is None:
                    return self.error(404, "NoSuchKey")
                content = found[0]
            with lock:
                if self.headers.get("x-goog-if-generation-match") == "0" and self.name in objects:
                    return self.error(412, "PreconditionFailed")
                objects[self.name] = (content, datetime.datetime.now(datetime.UTC))
            self.answer(200, headers={"ETag": _tag(content)})

        def do_POST(self) -> None:
            content = self.body()
            if "uploads" in self.query:
                upload = os.urandom(8).hex()
                uploads[upload] = {}
                return self.xml(
                    f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                )
            parts = uploads.pop(self.query["uploadId"])
            order = [int(n) for n in re.findall(rb"<PartNumber>(\d+)</PartNumber>", content)]
            assert sorted(parts) == order
            whole = b"".join(parts[n] for n in order)
            objects[self.name] = (whole, datetime.datetime.now(datetime.UTC))
            self.xml(
                f"<CompleteMultipartUploadResult><ETag>{_tag(whole)}</ETag></CompleteMultipartUploadResult>"
            )

        def do_DELETE(self) -> None:
            if "uploadId" in self.query:
                uploads.pop(self.query["uploadId"], None)
            elif objects.pop(self.name, None) is None:
                return self.error(404, "NoSuchKey")
            self.answer(204)

        def do_GET(self) -> None:
            if not self.name:
                return self.list()
            if (found := objects.get(self.name)) is None:
                return self.error(404, "NoSuchKey")
            content, put = found
            headers = {"ETag": _tag(content), "Last-Modified": email.utils.format_datetime(put, usegmt=True)}
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                return self.answer(206, content[first : last + 1], headers)
            self.answer(200, content, headers)

        do_HEAD = do_GET

        def list(self) -> None:
            """A page of the list of objects, of three at most; or all folders, if the request wants those."""
            prefix, after = self.query.get("prefix", ""), self.query.get("continuation-token", "")
            names = sorted(name for name in objects if name.startswith(prefix) and name > after)
            if "delimiter" in self.query:
                rest = (name.removeprefix(prefix) for name in names)
                folders = sorted({prefix + text.partition("/")[0] for text in rest if "/" in text})
                rows = "".join(
                    f"<CommonPrefixes><Prefix>{escape(name)}/</Prefix></CommonPrefixes>" for name in folders
                )
                return self.xml(f"<ListBucketResult>{rows}</ListBucketResult>")
            page, more = names[:3], len(names) > 3
            rows = "".join(
                f"<Contents><Key>{escape(name)}</Key><Size>{len(objects[name][0])}</Size>"
                f"<LastModified>{objects[name][1].isoformat()}</LastModified><ETag>{_tag(objects[name][0])}</ETag></Contents>"
                for name in page
            )
            token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
            self.xml(
                f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
            )

        # What the request says

        def parse_request(self) -> bool:
            known = super().parse_request()
            parts = urlsplit(self.path) if known else urlsplit("")
            bucket, _, self.name = unquote(parts.path).removeprefix("/").partition("/")
            self.query = {
                key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()
            }
            if known and bucket != "box":
                self.body()
                self.error(404, "NoSuchBucket")
                return False
            return known

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        # What it gets

        def xml(self, text: str) -> None:
            self.answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())

        def error(self, code: int, name: str) -> None:
            self.answer(code, f"<Error><Code>{name}</Code></Error>".encode())

        def answer(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'
