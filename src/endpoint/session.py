"""The requests of one rollout's agent: each is one turn, however often its client sends it."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cairn.endpoint.asked import Asked, Rules, UnanswerableRequest
from cairn.run.conversations import NoPrompt

KEPT = 16
"""Answers that reached their clients and are kept for another try of the same request."""


@dataclass(frozen=True)
class Reply:
    """An answer of the model.

    text: without special tokens. token_ids: with the end token, if the model ended the answer. finish_reason:
    "stop", or "length" at `max_tokens` or the end of the servers' context; with no tokens at all if the
    context was full already. message: the answer as a message, to be appended to the conversation.
    prompt_tokens: number of tokens that the model had read when it answered. stop: the stop string that ended
    the answer, if one did; text and message end before it, token_ids with the token that completes it.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    message: dict[str, Any]
    prompt_tokens: int
    stop: str | None = None


class ChatModel(Protocol):
    """A model that answers conversations."""

    seed: int
    """For draws of the rollout's own: the same whenever the rollout is started again."""

    async def generate(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Have the model answer the conversation.

        Args:
            messages: all of it. A conversation that begins with the messages of an earlier call and the
                `message` of its answer goes on from the very tokens that were sampled.
            tools: JSON schemas of the functions that the model may call.
            max_tokens: maximum length of the answer, below `sampling.max_tokens`.
            stop_token_ids: further tokens that end the answer.
            stop: one text or several that end the answer, beside the stop strings in `sampling.stop`.
        """
        ...

    async def count_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Number of tokens of a conversation, as the chat template renders it anew.

        Nothing is asked or recorded. A conversation that goes on in its branch may have a few more or less.

        Raises:
            NoPrompt: the chat template fails on the messages.
        """
        ...


@dataclass
class Exchange:
    """A request and its answer.

    number: among the session's requests, from 0. delivered: whether a client has got the answer.
    """

    number: int
    answer: asyncio.Task[Reply]
    delivered: bool = False
    waiting: list[Callable[[], bool]] = field(default_factory=list[Callable[[], bool]])
    """For each connection that asked, whether it is open."""

    def deliver(self) -> None:
        """Note that the whole answer was written to a connection that was open."""
        self.delivered = True
        self.waiting.clear()

    @property
    def abandoned(self) -> bool:
        """Whether the answer has reached nobody, and nobody is there to take it."""
        return not self.delivered and not any(is_open() for is_open in self.waiting)


class Session:
    """What an agent may ask, by its key, as long as its rollout lasts.

    A request is another try of an earlier one, and gets that one's answer, if it has the same bytes and
    either says so (the header x-stainless-retry-count of OpenAI's clients), or the earlier one's connection
    was closed before its answer was written. Otherwise it is a turn of its own, in the order of arrival.
    """

    def __init__(self, model: ChatModel, rules: Rules):
        self.rules = rules
        self.conversation: list[dict[str, Any]] = []
        """The messages of the latest request that was answered, and the answer."""
        self.misfits: list[str] = []
        """Of each answer without the form that was asked for, why."""
        self._model = model
        self._exchanges: dict[bytes, Exchange] = {}
        """The latest of each different request, oldest first."""
        self._answering: set[asyncio.Task[Reply]] = set()
        """All that is being answered: of equal requests at the same time, the above has only one."""
        self._number = 0
        self._busy = 0
        self._since = self._waited = 0.0

    @property
    def requests(self) -> int:
        """Number of different requests so far."""
        return self._number

    @property
    def waited(self) -> float:
        """Seconds during which the agent has waited for answers."""
        return self._waited + (time.monotonic() - self._since if self._busy else 0.0)

    def close(self) -> None:
        """Give up the requests that are not answered yet."""
        for answer in self._answering:
            answer.cancel()

    def ask(self, asked: Asked, content: bytes, *, retry: bool, is_open: Callable[[], bool]) -> Exchange:
        """The exchange that answers a request: a new one, or an earlier one if this is another try of it.

        Args:
            content: the bytes by which it is recognised.
            retry: whether the client says that it has sent it before.
            is_open: whether the client's connection is open.
        """
        digest = hashlib.blake2b(content, digest_size=16).digest()
        known = self._exchanges.get(digest)
        if known is None or not (retry or known.abandoned):
            answer = asyncio.create_task(self._answer(asked))
            self._answering.add(answer)
            answer.add_done_callback(self._answering.discard)
            known = Exchange(self._number, answer)
            self._number += 1
            self._exchanges.pop(digest, None)
            self._exchanges[digest] = known
            self._forget()
        known.waiting = [connection for connection in known.waiting if connection()]
        known.waiting.append(is_open)
        return known

    def _forget(self) -> None:
        """Forget the oldest of the answers that have arrived."""
        arrived = [digest for digest, exchange in self._exchanges.items() if exchange.delivered]
        for digest in arrived[:-KEPT]:
            del self._exchanges[digest]

    async def _answer(self, asked: Asked) -> Reply:
        """The model's answer.

        Raises:
            UnanswerableRequest: the chat template fails on the messages, or the context is full.
        """
        if not self._busy:
            self._since = time.monotonic()
        self._busy += 1
        try:
            reply = await self._model.generate(
                asked.messages,
                tools=asked.tools,
                max_tokens=asked.max_tokens,
                stop_token_ids=asked.stop_token_ids,
                stop=asked.stop,
            )
        except NoPrompt as error:
            raise UnanswerableRequest(str(error), param="messages") from error
        finally:
            self._busy -= 1
            if not self._busy:
                self._waited += time.monotonic() - self._since
        if not reply.token_ids:
            raise UnanswerableRequest(
                "the conversation leaves no room for an answer in the model's context; shorten it",
                code="context_length_exceeded",
            )
        self.conversation = [*map(dict, asked.messages), dict(reply.message)]
        if (misfit := asked.form.misfit(reply.message)) is not None:
            self.misfits.append(misfit)
        return reply

    async def count(self, asked: Asked) -> int:
        """Number of tokens of the conversation of a request, which is not answered.

        Raises:
            UnanswerableRequest: the chat template fails on the messages.
        """
        try:
            return await self._model.count_tokens(asked.messages, tools=asked.tools)
        except NoPrompt as error:
            raise UnanswerableRequest(str(error), param="messages") from error
