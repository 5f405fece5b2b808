"""Object stores for tests: a real S3 server on loopback, and steps to put there."""

import contextlib
import socket
import subprocess
import sys
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
