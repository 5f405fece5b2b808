"""Keeps a rollout's conversation as the tokens that the server saw and sampled ("token in, token out").

The text of an answer may have other tokens than those that were sampled. A conversation that is rendered
and tokenised anew would therefore show the model, and the trainer, answers that were never sampled. Here,
the next turn's context is the previous context, the sampled tokens, and the tokens of what the chat template
puts behind the answer. Only the last part is tokenised.

That is right only where the template renders the longer conversation as the shorter one and something behind
it. Some templates rewrite what came before: they drop the reasoning of earlier turns, or move the list of
tools to the last question. So each step is proven by renderings, and what is not proven begins a new branch
with the tokens of the whole rendering:

1. The rendering for the answer's prompt must be a prefix of the new rendering.
2. If that rendering and the text of the sampled tokens are a prefix too, the rest is what comes behind.
3. Otherwise (templates strip white space and write tool calls in their own way), the conversation is rendered
   again with marks instead of the answer's texts and arguments. What comes behind begins after the end token
   that follows the last mark. A mark that is missing, or a text that is rendered otherwise than its mark,
   shows that the template drops or changes part of the answer.
4. The tokens of what comes behind must be certain: it begins behind or with an added token, where every
   tokenizer splits the text.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cairn.orchestrator.completion.answers import Answer, AnswerParser, PlainText
from cairn.orchestrator.completion.chat import ChatFormat, Stopped, unreadable
from cairn.run.conversations import REASONING, Message, NoPrompt, arguments_of, flat, is_plain

# Digests of conversations, by which a conversation that goes on is recognised.


_quoted = json.encoder.encode_basestring_ascii


class Histories:
    """The digests of a conversation's leading messages. Where it goes on, only new messages are digested."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        """Copies of the messages of the last conversation."""
        self._digests = [b""]

    def of(self, messages: Sequence[Message]) -> Sequence[bytes]:
        """For each number of leading messages from 0 on, their digest; valid until the next call."""
        pairs = zip(self._messages, messages, strict=False)
        least = min(len(self._messages), len(messages))
        same = next((i for i, (old, new) in enumerate(pairs) if old != new), least)
        del self._messages[same:], self._digests[same + 1 :]
        for message in messages[same:]:
            self._digests.append(with_message(self._digests[-1], message))
            self._messages.append(_copied(message))
        return self._digests


def _copied(value: Any) -> Any:
    """A copy that only equals what has the same digest: 1 equals True, so a number's copy equals nothing."""
    if value is None or type(value) is str:
        return value
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    if type(value) is list:
        return [_copied(one) for one in value]
    return object()


def with_message(history: bytes, message: Message) -> bytes:
    """The digest of messages and one further message, whatever way clients write it."""
    if is_plain(message) and message["content"] and type(message["role"]) is str:  # the usual case, faster
        text = f'{{"content": {_quoted(message["content"])}, "role": {_quoted(message["role"])}}}'
        return _digest(history + text.encode())
    same = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    if "content" in same:
        same["content"] = flat(same["content"])
    if message.get("role") == "assistant":
        reasoning = [same.pop(name) for name in REASONING if name in same]
        same |= {"reasoning_content": reasoning[0]} if reasoning else {}
        if calls := same.get("tool_calls"):
            same["tool_calls"] = [
                [call.get("id"), call["function"]["name"], arguments_of(call)] for call in calls
            ]
    text = json.dumps(same, sort_keys=True, default=repr)
    return _digest(history + text.encode())


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


Tokens = npt.NDArray[np.int32]
LARGEST_NUMBER_OF_BRANCHES = 32
"""Branches of a rollout that can go on at any time; the least recently used one is forgotten first."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The first `size` bytes of renderings, in UTF-8, known by their digest."""

    size: int
    digest: bytes

    def begins(self, text: bytes) -> bool:
        """Whether the text begins so."""
        return len(text) >= self.size and _hash(text[: self.size]).digest() == self.digest


@dataclass(frozen=True)
class TokenContext:
    """The tokens that the server shall continue.

    branch: number of the branch, counted from 0 in the order of `Conversation.next`. kept: number of leading
    tokens that the branch has already; 0 for a new branch. appended: int32, the tokens behind them.
    token_ids: int32, both together.
    """

    branch: int
    kept: int
    token_ids: Tokens
    tools: Sequence[Message] | None = field(repr=False, compare=False)
    history: bytes = field(repr=False, compare=False)
    """Digest of the messages."""
    rendered: "hashlib.blake2b" = field(repr=False, compare=False)
    """Hash of the rendering."""
    size: int = field(repr=False, compare=False)
    """Bytes of the rendering."""

    @property
    def appended(self) -> Tokens:
        """The tokens that the branch does not have yet."""
        return self.token_ids[self.kept :]


@dataclass(slots=True)
class _Turn:
    """A sampled answer, where a longer conversation may go on.

    end: number of the branch's tokens up to the end of the answer. prompt: the rendering for its prompt;
    whole: prompt and the answer's text. stop: the end token that was sampled, or None. stopped: whether a
    stop string has ended the answer, which its message does not have. free: no context has taken the branch
    further yet.
    """

    branch: int
    end: int
    prompt: _Prefix
    whole: _Prefix
    stop: int | None
    stopped: bool = False
    free: bool = True


class Conversation:
    """The branches of one rollout.

    Call `next` with all messages of the next call to the model, sample from its tokens, and give the
    answer's tokens to `sampled`, whose message the program appends to its messages. The same calls with the
    same tokens give the same contexts and messages: a replay rebuilds the state from recorded tokens.

    A conversation goes on in a branch if its messages are those of a sampled answer's prompt, the answer's
    message as `sampled` returned it, and any further ones. Fields that are None or empty may be missing, and
    arguments of tool calls may be written with other white space; reasoning must be handed back. If a second
    conversation goes on at the same answer, it gets a branch of its own that begins with the same tokens.

    Only the tokens of the last context are kept in memory. The ledger is asked for other branches' tokens.

    Args:
        recorded: the tokens of a branch, given its number: each context that was taken further, and its
            answer, one after the other; more may follow.
        parse: reads the answers; the default takes every answer as plain text.
    """

    def __init__(
        self, chat: ChatFormat, recorded: Callable[[int], Tokens], parse: AnswerParser | None = None
    ):
        self._chat = chat
        self._recorded = recorded
        self._parse = parse or PlainText(chat)
        self._histories = Histories()
        self._turns: dict[bytes, _Turn] = {}
        """By the digest of the messages up to the answer."""
        self._branches: dict[int, int] = {}
        """Each branch that can go on, and its number of tokens; the least recently used one first."""
        self._last: tuple[int, Tokens] = (-1, np.empty(0, np.int32))
        """A branch and its tokens, which are at hand."""
        self._next_branch = 0
        self.malformed_calls: int | None = None
        """Answers in which a call begins that can't be read; None if the model never had tools to call."""

    def next(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> TokenContext:
        """The context of the next call to the model.

        Args:
            messages: all messages of the conversation so far.
            tools: JSON schemas of the functions that the model may call.

        Raises:
            NoPrompt: the chat template fails on the messages, or renders nothing.
        """
        text = _bytes(self._chat.rendering(messages, tools))
        if wrong := None if _is_utf8(text) else unreadable(messages):
            raise NoPrompt(wrong)
        histories = self._histories.of(messages)
        branch, kept, token_ids = self._longer(messages, tools, text, histories)
        if branch is None:
            branch, self._next_branch = self._next_branch, self._next_branch + 1
        if token_ids is None:
            token_ids = np.asarray(self._chat.prompt(messages, tools), np.int32)
        self._last = branch, token_ids
        return TokenContext(branch, kept, token_ids, tools, histories[-1], _hash(text), len(text))

    def _longer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        text: bytes,
        histories: Sequence[bytes],
    ) -> tuple[int | None, int, Tokens | None]:
        """Branch, number of kept tokens and context of a conversation that goes on at a sampled answer.

        The branch is None if it needs a new one, and the context is None if it must be rendered anew.
        """
        count = next((n for n in range(len(messages), 0, -1) if histories[n] in self._turns), 0)
        if not count:
            return None, 0, None
        turn = self._turns[histories[count]]
        behind = self._behind(turn, messages, count - 1, tools, text)
        if behind is None:
            if turn.free:  # the conversation leaves the branch for good
                self._forget(turn.branch)
            return None, 0, None
        self._branches[turn.branch] = self._branches.pop(turn.branch)  # now the most recently used
        last, tokens = self._last
        tokens = tokens if last == turn.branch else self._recorded(turn.branch)
        context = np.concatenate([tokens[: turn.end], np.asarray(behind, np.int32)])
        if not turn.free:
            return None, 0, context
        turn.free = False
        return turn.branch, turn.end, context

    def sampled(
        self, context: TokenContext, token_ids: Sequence[int], stopped: Stopped | None = None
    ) -> dict[str, Any]:
        """The assistant's message that a whole answer says; the branch can go on behind it from now on.

        Args:
            token_ids: all tokens that were sampled, with the end token if the model ended the answer.
            stopped: the stop string that has ended the answer, before which the message ends; the branch goes
                on behind all of the tokens.

        Returns:
            role, content, and where the answer has them reasoning_content and tool_calls, whose arguments
            are JSON texts.

        Raises:
            ValueError: the context has an answer already; another one needs another `next`.
        """
        if self._branches.get(context.branch, 0) > context.kept:
            raise ValueError("a context has one answer; for another one, ask for the context again")
        answer = self._parse(token_ids, context.tools, stopped)
        if context.tools:
            self.malformed_calls = (self.malformed_calls or 0) + answer.malformed
        message = _message(answer, context, token_ids)
        tokens = np.concatenate([context.token_ids, np.asarray(token_ids, np.int32)])
        written = _bytes(self._chat.full_text(token_ids))
        whole = context.rendered.copy()
        whole.update(written)
        turn = _Turn(
            branch=context.branch,
            end=len(tokens),
            prompt=_Prefix(context.size, context.rendered.digest()),
            whole=_Prefix(context.size + len(written), whole.digest()),
            stop=token_ids[-1] if len(token_ids) and token_ids[-1] in self._chat.stop_token_ids else None,
            stopped=stopped is not None,
        )
        self._branches.pop(turn.branch, None)
        self._branches[turn.branch] = len(tokens)
        self._last = turn.branch, tokens
        key = with_message(context.history, message)
        if (same := self._turns.get(key)) is None or same.branch >= turn.branch:
            self._turns[key] = turn  # of equal conversations, the first branch goes on
        while len(self._branches) > LARGEST_NUMBER_OF_BRANCHES:
            self._forget(next(iter(self._branches)))
        return message

    def _forget(self, branch: int) -> None:
        self._turns = {key: turn for key, turn in self._turns.items() if turn.branch != branch}
        del self._branches[branch]

    def _behind(
        self,
        turn: _Turn,
        messages: Sequence[Message],
        answer: int,
        tools: Sequence[Message] | None,
        text: bytes,
    ) -> list[int] | None:
        """The tokens that the template puts behind the turn's answer, message number `answer`.

        Returns:
            None if it is not proven that they belong behind the turn's tokens.
        """
        if turn.whole.begins(text):  # and so does the prompt, which it begins with
            behind = text[turn.whole.size :]
        elif turn.prompt.begins(text):
            behind = self._behind_marks(turn, messages, answer, tools, text)
        else:
            return None
        return None if behind is None else self._chat.tokens_in_place(behind.decode(), turn.stop)

    def _behind_marks(
        self,
        turn: _Turn,
        messages: Sequence[Message],
        answer: int,
        tools: Sequence[Message] | None,
        text: bytes,
    ) -> bytes | None:
        """What the template puts behind an answer that it writes otherwise than the model did."""
        marks = _Marks(messages[answer], text)
        if turn.stop is None and not (marks.ends_in_content if turn.stopped else marks.only_content):
            return None  # the template closes what the answer left open; how much of it, nobody knows

        def marked(*, arguments: bool) -> bytes | None:
            shown = [*messages[:answer], marks.message(arguments=arguments), *messages[answer + 1 :]]
            try:
                found = _bytes(self._chat.rendering(shown, tools))
            except NoPrompt:
                return None
            return found if turn.prompt.begins(found) and marks.found_in(found[turn.prompt.size :]) else None

        if (found := marked(arguments=True)) is None or (end := marks.end(found)) is None:
            return None
        if turn.stop is None and not marks.ends_with_content(found):
            return None
        if turn.stop is not None:
            token = _bytes(self._chat.added_tokens.get(turn.stop, ""))
            stops = [_bytes(self._chat.added_tokens.get(i, "")) for i in self._chat.stop_token_ids]
            at = min((at for stop in stops if stop and (at := found.find(stop, end)) >= 0), default=-1)
            if not token or at < 0 or not found.startswith(token, at):
                return None
            end = at + len(token)
        behind = found[end:]
        same_texts = found if not marks.arguments else marked(arguments=False)
        if same_texts is None or not text.endswith(behind) or not same_texts.endswith(behind):
            return None
        wanted = text[turn.prompt.size : len(text) - len(behind)]
        filled = marks.fill(same_texts[turn.prompt.size : len(same_texts) - len(behind)])
        return behind if b"".join(filled.split()) == b"".join(wanted.split()) else None


class _Marks:
    """Unique words that stand for the texts of an assistant's message and for the arguments of its calls."""

    def __init__(self, message: Message, text: bytes):
        self._message = message
        unique = hashlib.blake2b(text, digest_size=10).hexdigest()
        self._texts = {
            name: f"m{int(name in REASONING)}{unique}"
            for name in ("content", *REASONING)
            if isinstance(value := flat(message.get(name)), str) and value.strip()
        }
        self._argument = f"m9{unique}"
        self.arguments = bool(message.get("tool_calls"))
        """Whether the message has arguments to mark."""

    @property
    def only_content(self) -> bool:
        """Whether the message is content and nothing else."""
        return list(self._texts) == ["content"] and not self.arguments

    @property
    def ends_in_content(self) -> bool:
        """Whether the message has content, and no calls behind it."""
        return "content" in self._texts and not self.arguments

    def ends_with_content(self, text: bytes) -> bool:
        """Whether the text has the content behind the message's other texts."""
        return self.end(text) == text.rfind(mark := self._texts["content"].encode()) + len(mark)

    def message(self, *, arguments: bool) -> Message:
        """The message with marks."""
        marked = {**self._message, **self._texts}
        if arguments and self.arguments:
            marked["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": self._marked(call)}}
                for call in self._message["tool_calls"]
            ]
        return marked

    def _marked(self, call: Message) -> dict[str, str]:
        arguments = arguments_of(call)
        names = arguments if isinstance(arguments, Mapping) and arguments else [self._argument]
        return dict.fromkeys(names, self._argument)

    def found_in(self, text: bytes) -> bool:
        """Whether the text has each of the message's texts exactly once."""
        return all(text.count(mark.encode()) == 1 for mark in set(self._texts.values()))

    def end(self, text: bytes) -> int | None:
        """Where the last mark ends; None if the arguments are marked and their marks are missing."""
        words = [self._argument if self.arguments else "", *self._texts.values()]
        places = {word: text.rfind(word.encode()) for word in words if word}
        if not places or min(places.values()) < 0:
            return None
        return max(at + len(word) for word, at in places.items())

    def fill(self, text: bytes) -> bytes:
        """The text with the message's own texts instead of the marks."""
        for name, mark in self._texts.items():
            text = text.replace(mark.encode(), _bytes(flat(self._message[name])))
        return text


def _message(answer: Answer, context: TokenContext, token_ids: Sequence[int]) -> dict[str, Any]:
    """The message of an answer; ids of its calls that the model did not write are derived from its tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        seen = json.dumps([context.branch, len(context.token_ids), *map(int, token_ids)])
        message["tool_calls"] = [
            {
                "id": call.id or hashlib.blake2b(f"{number} {seen}".encode()).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.tool_calls)
        ]
    return message


def _hash(text: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(text, digest_size=16)


def _is_utf8(text: bytes) -> bool:
    """Whether the text has no half of a surrogate pair."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
