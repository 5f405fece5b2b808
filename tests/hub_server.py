"""A server on loopback that speaks as the Hugging Face hub does, as far as a push of a model needs it.

Branches, commits and large files are kept in memory. A large file has to have the digest that was announced.
"""

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_SecretOfTheTests"


class Hub:
    """What the server has. Each branch is a list of commits, each with all files by their paths."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, list[dict[str, bytes]]]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.fails: dict[str, list[int]] = {}
        """By what a request is: the status codes that the next ones are answered with."""
        self.url = ""

    def files(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """What the newest commit of a branch shows."""
        return self.repositories[repository][branch][-1]


def _commit_id(number: int) -> str:
    return f"{number:040x}"


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        _, _, _, *name, _, branch = self.path.split("/")  # /api/models/NAME/revision/BRANCH
        branches = self.hub.repositories.get("/".join(name), {})
        if self._may("look"):
            found = branches.get(branch)
            about = {"id": "/".join(name), "sha": _commit_id(len(found or ())), "siblings": [], "tags": []}
            self._answer(about, 200 if found else 404)

    def do_PUT(self) -> None:
        oid, content = self.path.rpartition("/")[2], self._content()
        if self._may("put", token=False):
            self.hub.large[oid] = content
            self._answer({}, 200 if hashlib.sha256(content).hexdigest() == oid else 400)

    def do_POST(self) -> None:
        content = self._content()
        kind = next(
            (one for one in ("create", "validate-yaml", "preupload", "batch", "commit", "branch")
             if f"/{one}" in self.path), "",
        )  # fmt: skip
        if self._may(kind):
            self._answer(*getattr(self, f"_{kind.replace('-', '_')}")(content))

    def _create(self, content: bytes) -> tuple[Any, int]:
        asked = json.loads(content)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        there = name in self.hub.repositories
        self.hub.repositories.setdefault(name, {"main": [{}]})
        self.hub.private.setdefault(name, asked.get("visibility") == "private")
        return {"url": f"{self.hub.url}/{name}"}, 409 if there else 200

    def _validate_yaml(self, content: bytes) -> tuple[Any, int]:
        head = json.loads(content)["content"].splitlines()[0]
        return {"errors": [{"message": "no header"}], "warnings": []}, 200 if head == "---" else 400

    def _preupload(self, content: bytes) -> tuple[Any, int]:
        large = (".safetensors", "tokenizer.json")
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(large) else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(content)["files"]
            ]
        }, 200

    def _batch(self, content: bytes) -> tuple[Any, int]:
        objects = json.loads(content)["objects"]
        for one in objects:
            if one["oid"] not in self.hub.large:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/large/{one['oid']}"}}
        return {"transfer": "basic", "objects": objects}, 200

    def _branch(self, _: bytes) -> tuple[Any, int]:
        _, _, _, *name, _, branch = self.path.split("/")
        branches = self.hub.repositories["/".join(name)]
        there = branch in branches
        branches.setdefault(branch, branches["main"][:1])
        return {}, 409 if there else 200

    def _commit(self, content: bytes) -> tuple[Any, int]:
        _, _, _, *name, _, branch = self.path.split("/")
        commits = self.hub.repositories["/".join(name)][branch]
        files = dict(commits[-1])
        for line in map(json.loads, content.splitlines()):
            about = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(about["summary"])
            elif line["key"] == "lfsFile":
                files[about["path"]] = self.hub.large[about["oid"]]
            else:
                files[about["path"]] = base64.b64decode(about["content"])
        commits.append(files)
        return {"commitUrl": self.path, "commitOid": _commit_id(len(commits))}, 200

    def _may(self, kind: str, *, token: bool = True) -> bool:
        self.hub.requests[kind] += 1
        failing = self.hub.fails.get(kind, [])
        if failing:
            self._answer({"error": "not now"}, failing.pop(0))
        elif token and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._answer({"error": f"wrong token: {self.headers['Authorization']}"}, 401)
        else:
            return True
        return False

    def _content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def hub_on_loopback() -> Iterator[Hub]:
    """A hub at `Hub.url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
