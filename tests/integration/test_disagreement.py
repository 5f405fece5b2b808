"""A server that is given other weights than the trainer published, for once or for good: what a run does."""

import contextlib
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import draws
import httpx
import pytest
from runs import CONFIGS, Command, Server, Shell, flip, rows, whole_rows
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.timeout(600)

FILES = ("--trainer", f"@{CONFIGS}/train.toml", "--orchestrator", f"@{CONFIGS}/orch.toml")
Way = Callable[[int, Path], Path]
"""Gives the folder that the server is to load for the push of that number (from 0) of a folder."""


@contextlib.contextmanager
def on_the_way_to(server: Server, way: Way) -> Iterator[str]:
    """An address at which `server` answers, but loads what `way` says; all else it gets as it is."""
    numbers = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/cairn/update_weights":
                update = json.loads(content)
                update["path"] = str(way(next(numbers), Path(update["path"])))
                content = json.dumps(update).encode()
            headers = {
                name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]
            }
            answer = http.request(self.command, self.path, content=content, headers=headers)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = forward

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with (
        # A connection for each call: a server closes idle ones, and a push that meets this is made again.
        httpx.Client(
            base_url=server.url,
            timeout=120,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        ) as http,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as front,
    ):
        thread = threading.Thread(target=front.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{front.server_address[1]}"
        front.shutdown()
        thread.join()


def altered(folder: Path, copies: Path) -> Path:
    """A copy in which one value is another by its last bit: too near to be seen in logprobs."""
    copy = Path(shutil.copytree(folder, copies / folder.name))
    file = copy / "model.safetensors"
    flip(file, file.stat().st_size - 4, mask=1)
    return copy


def other(folder: Path, copies: Path) -> Path:
    """Weights that give every token another logprob, and no checksums beside them."""
    copy = copies / f"other-{folder.name}"
    copy.mkdir(exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= -1
    save_file(tensors, copy / "model.safetensors")
    return copy


def start(shell: Shell, server: Server, url: str, run: Path, *more: object) -> Command:
    where = ("--output-dir", run, "--orchestrator.inference-url", url)
    few = ("--orchestrator.prompts-per-step", 4)
    arguments = ("rl", *FILES, *where, *few, *draws.environment("disagreement"), *more)
    return shell.start(*arguments, environment={"CAIRN_INFERENCE_TOKEN": server.token})


def test_weights_that_go_wrong_on_their_way_are_given_again(shell: Shell, server: Server, tmp_path: Path):
    """By their checksums, and if they have none by the probe; nothing is trained on that came from them."""
    given: list[str] = []

    def way(number: int, folder: Path) -> Path:
        first, given[:] = folder.name not in given, [*given, folder.name]
        if first and folder.name == "v2":
            return altered(folder, tmp_path)
        return other(folder, tmp_path) if first and folder.name == "v4" else folder

    run = tmp_path / "run"
    with on_the_way_to(server, way) as url, start(shell, server, url, run, "--max-steps", 6) as command:
        finished = command.finish()
    assert finished.code == 0, finished.output
    assert given[1:] == ["v1", "v2", "v2", "v3", "v4", "v4", "v5", "v6"]
    found = whole_rows(run, 6)
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in found), "the proof came before the tokens"
    disagreed = f"servers/disagreed/{url.removeprefix('http://')}"
    assert {row["step"]: row[disagreed] for row in found if disagreed in row} == {3: 1, 5: 1}
    assert [row["servers/quarantined"] for row in found] == [0] * 6
    log = (run / "logs" / "orchestrator.log").read_text()
    assert "is not the one that the trainer wrote (other checksum)" in log
    assert "differ from the trainer's by" in log
    assert json.loads(shell.succeed("ckpt", "audit", run, "--json"))["ok"]


@pytest.mark.parametrize(
    ("since", "code", "sentence"),
    [
        (0, 2, "the servers and the trainer do not compute the same model"),
        (3, 1, "differ from the trainer's by"),
    ],
)
def test_a_run_whose_only_server_goes_on_disagreeing_ends(
    shell: Shell, server: Server, tmp_path: Path, since: int, code: int, sentence: str
):
    """With the first policies it is the model that is to blame, and the user; later the server."""

    def way(number: int, folder: Path) -> Path:
        return other(folder, tmp_path) if number >= since else folder

    run = tmp_path / "run"
    with on_the_way_to(server, way) as url, start(shell, server, url, run, "--max-steps", 8) as command:
        finished = command.finish()
    assert finished.code == code, finished.output
    assert sentence in finished.output
    assert len(rows(run)) == since
