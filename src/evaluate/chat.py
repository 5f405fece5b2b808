"""`cairn chat`: talks to a checkpoint, or to whatever a running server serves, in the terminal."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import Field

from cairn.config.cli import load
from cairn.config.inference import InferenceConfig
from cairn.config.settings import BaseConfig
from cairn.evaluate.policies import Policy
from cairn.inference.server import AddressUnusable, Server, ServerFailed
from cairn.inference.servers import port_for_server
from cairn.policy.errors import ServerUnavailable
from cairn.run.errors import CairnError, UsageError, one_of
from cairn.run.exits import RoleFailed
from cairn.run.output import printable

CONNECT_SECONDS = 10.0
"""Seconds that a server has to take a connection."""
ANSWER_SECONDS = 300.0
"""Seconds that a server has for the next piece of an answer."""
COMMANDS = {"/reset": "begin the conversation anew", "/help": "these lines"}
"""What a line may be that is no message."""

OF_SERVER = ("dtype", "max_model_len", "kv_cache_memory", "tensor_parallel", "port")
"""Settings of the server that is started."""
Find = Callable[[str], tuple[Policy, InferenceConfig]]
"""Finds the policy of that name, and the settings of its run's server; raises UsageError if there is none."""


class Chat(BaseConfig):
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D ends, /reset begins the conversation anew.

    A server is started for the model on this machine's own address, and ends with the command.
    """

    command: ClassVar[str] = "cairn chat"
    positional: ClassVar[tuple[str, ...]] = ("model",)
    model: str | None = None
    """A step's folder, a run directory (its newest step), a Hugging Face folder, or a name on the hub."""
    server: str | None = None
    """Instead of MODEL: the address of a server that runs, such as http://127.0.0.1:8000, as it is."""
    served: str | None = None
    """With --server: which of the models that it serves (default: the first)."""
    system: str | None = None
    """A system prompt."""
    temperature: float = Field(default=0.7, ge=0, le=2, allow_inf_nan=False)
    """Softmax temperature; 0 takes the likeliest token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer (default: what the model's context has room for)."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sampling."""
    dtype: str | None = None
    """auto, float32, bfloat16 or float16 (default: as in the run of the step, else auto)."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of a conversation (default: as in the run of the step, else the model's limit)."""
    kv_cache_memory: str | None = None
    """Memory for the KV cache, such as 64M or 4G (default: 1G on CPU, vLLM's choice on GPU)."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """Number of GPUs to split the model over (default: as in the run of the step, else 1)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the server (default: a free one)."""

    def converse(self, find: Find) -> int:
        """Start what is needed, and talk until the input ends; returns the exit code.

        Raises:
            UsageError: there is no such model or server, or the settings don't go together.
            RoleFailed: the server does not start, or dies.
        """
        if (self.model is None) == (self.server is None):
            raise UsageError("cairn chat: give a model, or the address of a server as --server, one of them")
        if self.served is not None and self.server is None:
            raise UsageError("--served: it chooses among the models of a given --server")
        if self.server is not None and (
            given := [name for name in OF_SERVER if getattr(self, name) is not None]
        ):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{flags}: of a server that is started, and --server {self.server} runs already")
        with contextlib.ExitStack() as stack:
            url = self.server or stack.enter_context(_own_server(self, find))
            conversation = stack.enter_context(Conversing(url, self))
            print(
                printable(f"talking to {conversation.name}; /help lists what else can be typed"), flush=True
            )
            for line in _lines():
                if line.startswith("/"):
                    _obey(line, conversation)
                elif line.strip():
                    conversation.say(line)
        return 0


def _obey(line: str, conversation: "Conversing") -> None:
    name = line.strip()
    if name == "/reset":
        conversation.reset()
        print("the conversation begins anew", flush=True)
        return
    if name != "/help":
        print(printable(f"{name}: there is no such command{one_of(name, COMMANDS)}"), flush=True)
    for command, what in COMMANDS.items():
        print(f"{command:<8}{what}")
    print("Ctrl-C  stop the answer\nCtrl-D  end", flush=True)


def _lines() -> Iterator[str]:
    """What is typed, line by line; on a terminal with a prompt, and with the editing of readline."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() uses it once it is imported
    while True:
        try:
            line = input("> ") if terminal else sys.stdin.readline()
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends", flush=True)
            continue
        if not terminal and not line:
            return
        yield line.rstrip("\n")


@contextlib.contextmanager
def _own_server(chat: Chat, find: Find) -> Generator[str]:
    """The address of a server with the model, as long as the context lasts."""
    assert chat.model is not None, "it is checked"
    policy, as_in_run = find(chat.model)
    given = {name: getattr(chat, name) for name in OF_SERVER if getattr(chat, name) is not None}
    try:
        checked = InferenceConfig.model_validate({"port": port_for_server(as_in_run.host), **given})
    except ValueError as error:
        first = getattr(error, "errors", list)()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None
    config = as_in_run.model_copy(update={name: getattr(checked, name) for name in ("port", *given)})
    with tempfile.TemporaryDirectory(prefix="cairn_chat_") as near, policy.local(Path(near)) as folder:
        server = Server(config, str(folder), deaf=True)
        print(
            printable(f"starting an inference server for {policy.given}; its log: {server.log}"), flush=True
        )
        try:
            with server:
                server.wait_ready()
                yield server.url
        except (AddressUnusable, ServerFailed) as error:
            raise RoleFailed(str(error)) from None


class AnswerRefused(CairnError):
    """The server does not answer the conversation; the message says why."""


class Conversing:
    """A conversation with a model on a server. Use as a context manager.

    Raises:
        ServerUnavailable: nothing answers at the address.
        UsageError: it serves no such model, or is no server with OpenAI's API.
    """

    def __init__(self, url: str, chat: Chat):
        self._chat = chat
        self._url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self._url,
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
        )
        self._messages: list[dict[str, str]] = []
        self.name = ""
        """Of the model, as the server calls it."""
        self.reset()

    def __enter__(self) -> "Conversing":
        names = self._names()
        wanted = self._chat.served or names[0]
        if wanted not in names:
            raise UsageError(
                f"--served {wanted}: {self._url} serves {', '.join(names)}{one_of(wanted, names)}"
            )
        self.name = wanted
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def _names(self) -> list[str]:
        try:
            answer = self._http.get("/v1/models")
            names = [str(one["id"]) for one in answer.json()["data"]]
        except httpx.InvalidURL as error:
            raise UsageError(f"--server {self._url}: {error}") from None
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"no server answers at {self._url} ({type(error).__name__}: {error}); start one with "
                "`cairn inference`, or give a model in place of --server"
            ) from None
        except (ValueError, KeyError, TypeError):
            names = []
        if not names:
            raise UsageError(
                f"--server {self._url}: it is no server with OpenAI's API (no models at /v1/models)"
            )
        return names

    def reset(self) -> None:
        """Forget what was said."""
        system = self._chat.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> None:
        """Say something, and print the answer as it comes. What Ctrl-C leaves of it stays said."""
        self._messages.append({"role": "user", "content": text})
        answer, stopped = "", False
        try:
            for piece in self._pieces():
                answer += piece
                print(printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        except AnswerRefused as error:
            self._messages.pop()
            print(printable(f"{error}; the line is not part of the conversation, and /reset begins it anew"))
            return
        print(" [stopped]" if stopped else "", flush=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _pieces(self) -> Iterator[str]:
        """The answer, piece by piece.

        Raises:
            AnswerRefused: the server refuses the conversation, as when it is too long.
            ServerUnavailable: the server has gone.
        """
        chat = self._chat
        body: dict[str, Any] = {"model": self.name, "messages": self._messages, "stream": True}
        body |= {"temperature": chat.temperature, "seed": chat.seed}
        body |= {} if chat.max_tokens is None else {"max_tokens": chat.max_tokens}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise AnswerRefused(
                        f"the server refuses it ({answer.status_code}): {_reason(answer.read())}"
                    )
                for line in answer.iter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise AnswerRefused(f"the server fails: {_reason(data.encode())}")
                    for choice in event.get("choices", ()):
                        yield choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"{self._url} has gone: {type(error).__name__}: {error}") from None


def _reason(body: bytes) -> str:
    """The message in an error of OpenAI's API."""
    try:
        found = json.loads(body)
        return str(found.get("error", found).get("message", found))
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace")


def run(find: Find) -> int:
    """Run the command; returns the exit code."""
    return load(Chat, sys.argv[1:]).converse(find)
