"""What a starting server is known by, and what is said of one that died: without vLLM."""

import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import cairn.inference.server as server_module
from cairn.config.inference import InferenceConfig
from cairn.inference.server import (
    MODEL_REFUSED,
    AddressUnusable,
    ModelUnservable,
    Server,
    ServerFailed,
    reason,
)
from cairn.run import connections
from cairn.run.connections import free_port
from cairn.run.exits import answer

PREFIX = "(EngineCore pid=7) ERROR 11-22 16:22:28 [core.py:1] "


class Impostor(http.server.BaseHTTPRequestHandler):
    """Says that it is well, whatever it is asked, and remembers what it was sent."""

    seen: list[str | None] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        body = json.dumps({"epoch": "made up", "paused": False}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """`started(code)`: a `Server` whose child runs Python code in place of vLLM; and its port."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    servers = []

    def start(code: str, port: int, timeout: float = 60) -> Server:
        monkeypatch.setattr(server_module, "command", lambda *_: ([sys.executable, "-c", code], {}))
        config = InferenceConfig(port=port, startup_timeout=timeout)
        servers.append(Server(config, "some/model", tmp_path / "vllm.log"))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("dies", [True, False])
def test_somebody_elses_server_is_not_ours(started, dies: bool):
    """It comes to the port between our look at the address and our server's own."""
    port = free_port()
    code = "import time; time.sleep(1); " + ("1 / 0" if dies else "time.sleep(60)")
    server = started(code, port, timeout=60 if dies else 2)
    Impostor.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        with pytest.raises(AddressUnusable if dies else ServerFailed) as error:
            server.wait_ready()
        impostor.shutdown()
    assert ("another server answers at" if dies else "is not ready after 2 s") in str(error.value)
    assert Impostor.seen, "it was asked"
    assert set(Impostor.seen) == {None}, "and was not told our token"


def test_a_model_that_cannot_be_served_is_named_with_its_reason(started):
    server = started("raise ValueError('Model architectures [A] are not supported')", free_port())
    with pytest.raises(ModelUnservable, match=r"some/model.*ValueError: Model architectures \[A\]"):
        server.wait_ready()


def test_a_role_whose_model_cannot_be_served_tells_its_launcher_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is the last word of `rl`, which starts the server as a role of its own."""
    code = "raise ValueError('Model architectures [A] are not supported')"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(server_module, "command", lambda *_: ([sys.executable, "-c", code], {}))
    told: list[str] = []
    config = InferenceConfig(port=free_port())
    assert (
        answer(lambda: server_module.run(config, "some/model", tmp_path / "vllm.log"), tell=told.append) == 2
    )
    assert "can't serve some/model" in told[0]
    assert "Model architectures [A]" in told[0]


def test_a_death_for_another_reason_is_no_usage_error(started):
    server = started("raise MemoryError('no more')", free_port())
    with pytest.raises(ServerFailed, match=r"MemoryError: no more; the end of") as error:
        server.wait_ready()
    assert not isinstance(error.value, ModelUnservable)


@pytest.mark.parametrize(
    ("lines", "text", "is_final"),
    [
        (
            [
                "Traceback (most recent call last):",
                f"{PREFIX}RuntimeError: {MODEL_REFUSED}its heads have size 16",
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            f"{MODEL_REFUSED}its heads have size 16",
            True,
        ),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, max_model_len (9) is greater than 8 [type=value_error, input_value=Args()]",
                "    For further information visit https://errors.pydantic.dev/2/v/value_error",
            ],
            "ValidationError: max_model_len (9) is greater than 8",
            True,
        ),
        (
            ["api_server.py: error: unrecognized arguments: --nothing"],
            "unrecognized arguments: --nothing",
            True,
        ),
        (
            [
                f"{PREFIX}ValueError: no kernel for float16",
                f"{PREFIX}RuntimeError: something after it",
                "RuntimeError: Engine core initialization failed. See root cause above. "
                "Failed core proc(s): {}",
            ],
            "ValueError: no kernel for float16",
            True,
        ),
        (
            ["OSError: [Errno 28] No space left on device"],
            "OSError: [Errno 28] No space left on device",
            False,
        ),
    ],
)
def test_the_reason_is_found_in_the_log(lines: list[str], text: str, is_final: bool):
    found = reason("\n".join(["INFO starting", "WARNING ValueError: is only mentioned", *lines, "more"]))
    assert (found.text, found.is_final) == (text, is_final)


def test_a_log_without_an_error_has_no_reason():
    assert reason("INFO starting\nINFO loading\n") is None


def test_no_connection_can_take_the_port_of_a_process_that_is_about_to_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lowest = int(Path(connections.CONNECTIONS_PORTS).read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(connections.LOWEST_PORT <= port < lowest for port in ports)
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")  # of documentations (RFC 5737): no machine's
    (ranges := tmp_path / "range").write_text("1024\t65535\n")  # all are the connections'
    for told in (ranges, tmp_path / "not Linux"):
        monkeypatch.setattr(connections, "CONNECTIONS_PORTS", str(told))
        with socket.create_server(("127.0.0.1", free_port())):
            pass


def test_a_port_on_which_somebody_listens_is_not_chosen(monkeypatch: pytest.MonkeyPatch):
    taken = free_port()
    draws = iter([taken, taken, taken + 1])
    monkeypatch.setattr(connections.secrets, "randbelow", lambda _: next(draws) - connections.LOWEST_PORT)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_port() != taken
