"""`cairn chat` with a server of this test's, which speaks OpenAI's API and says what it was asked.

What it does with vLLM is for a test with a server.
"""

import contextlib
import http.server
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cairn.config.inference import InferenceConfig
from cairn.evaluate.chat import run
from cairn.evaluate.policies import Policy
from cairn.run.exits import answer

Chat = Callable[..., tuple[int, str, str]]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the number of messages; `asked` are the requests."""

    asked: list[Any] = []
    interrupts = False

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "tiny"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["messages"][-1]["content"] == "too long":
            return self._reply(400, {"error": {"message": "the context has 64 tokens"}})
        self.send_response(200)
        self.end_headers()
        for piece in (f"{len(body['messages'])} ", "\x1b[31mred"):
            event = {"choices": [{"delta": {"content": piece}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        if self.interrupts and body["messages"][-1]["content"] == "stop me":
            os.kill(os.getpid(), signal.SIGINT)
            with contextlib.suppress(ConnectionError):
                self.connection.recv(1)  # until the client has closed the connection
            return None
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def _reply(self, code: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    Handler.asked, Handler.interrupts = [], False
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """`chat("--server", url, typed="hello\\n")`: exit code, output and errors."""

    def nothing(name: str) -> tuple[Policy, InferenceConfig]:
        raise AssertionError(f"{name} is not looked for")

    def chat(*arguments: object, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cairn chat", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = answer(lambda: run(nothing))
        return (code, *capsys.readouterr())

    return chat


def test_a_conversation_goes_on_and_begins_anew(chat: Chat, url: str):
    """What a model says can't steer the terminal."""
    code, out, _ = chat(
        *("--server", f"{url}/v1", "--system", "be short", "--temperature", 0, "--max-tokens", 7),
        typed="hello\n\nagain\n/reset\nnew\n/rest\n",
    )
    assert code == 0
    assert out.splitlines()[:5] == [
        "talking to tiny; /help lists what else can be typed",
        "2 red",
        "4 red",
        "the conversation begins anew",
        "2 red",
    ]
    assert "/rest: there is no such command; did you mean /reset?" in out
    first, second, third = Handler.asked
    assert first == {
        **{"model": "tiny", "stream": True, "temperature": 0.0, "seed": 0, "max_tokens": 7},
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}],
    }
    assert [one["content"] for one in second["messages"]] == ["be short", "hello", "2 \x1b[31mred", "again"]
    assert [one["content"] for one in third["messages"]] == ["be short", "new"]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(chat: Chat, url: str):
    Handler.interrupts = True
    code, out, _ = chat("--server", url, typed="stop me\ngo on\n")
    assert code == 0
    assert "[stopped]" in out
    assert [one["role"] for one in Handler.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert "1 \x1b[31mred".startswith(Handler.asked[1]["messages"][1]["content"]), "what came before"


def test_what_the_server_refuses_is_not_part_of_the_conversation(chat: Chat, url: str):
    code, out, _ = chat("--server", url, "--served", "other", typed="too long\nshort\n")
    assert code == 0
    assert "the server refuses it (400): the context has 64 tokens; the line is not part of" in out
    assert [one["content"] for one in Handler.asked[1]["messages"]] == ["short"]
    assert Handler.asked[1]["model"] == "other"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give a model, or the address of a server as --server, one of them"),
        (["step_4", "--server", "URL"], 2, "one of them"),
        (["step_4", "--served", "x"], 2, "--served: it chooses among the models of a given --server"),
        (["--server", "URL", "--dtype", "float32"], 2, "--dtype: of a server that is started, and --server"),
        (["--server", "URL", "--served", "othr"], 2, "serves tiny, other; did you mean other?"),
        (["--server", "http://127.0.0.1:1"], 1, "no server answers at http://127.0.0.1:1"),
    ],
)
def test_what_does_not_go_together_is_refused(
    chat: Chat, url: str, arguments: list[str], code: int, message: str
):
    found, _, errors = chat(*(one.replace("URL", url) for one in arguments))
    assert found == code
    assert message in errors
    assert Handler.asked == []
