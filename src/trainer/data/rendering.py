"""Records to tokens, and which of these are learned: conversations with a chat template, and plain texts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cairn.run.batches import Sample
from cairn.run.data_sets import BadRecord
from cairn.run.records.numbers import dumps, show_as_written
from cairn.trainer.data.records import Turns, problem_of, turns_of
from cairn.trainer.data.shown import Shown


class RecordRefused(BadRecord):
    """A record that was read can't be trained on; all ranks find that. why: without the record's name."""

    def __init__(self, where: str, why: str):
        super().__init__(f"{where}: {why}")
        self.why = why


class Encoder:
    """Turns records into samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        roles: Collection[str] = ("assistant",),
        ignored: Collection[str] = (),
        rows: int | None = None,
    ):
        """Args:
        tokenizer: with a chat template, if there are messages.
        template_arguments: what the chat template gets beside messages and tools.
        roles: those whose turns are learned.
        ignored: fields of messages that may be left out.
        rows: tokens that the model knows; None: all.
        """
        self.tokenizer = tokenizer
        self.roles = tuple(roles)
        self._renderer = _Renderer(tokenizer, template_arguments or {}, ignored)
        self._rows = rows

    def whole(
        self,
        records: Sequence[Mapping[str, Any]],
        indices: Sequence[int],
        where: Callable[[int], str] = "record {}".format,
    ) -> list[Sample]:
        """As `turns`, where each record must be one sample.

        Raises:
            RecordRefused: one can't be trained on, or it takes several samples.
        """
        samples = self.turns(records, indices, where)
        for index, own in zip(indices, samples, strict=True):
            if len(own) > 1:
                raise RecordRefused(
                    where(index),
                    "the chat template renders earlier turns differently at the end of a conversation than "
                    f"within it, so that it takes {len(own)} samples to learn all turns; split it into "
                    "single turns",
                )
        return [own[0] for own in samples]

    def turns(
        self,
        records: Sequence[Mapping[str, Any]],
        indices: Sequence[int],
        where: Callable[[int], str] = "record {}".format,
    ) -> list[list[Sample]]:
        """Tokens of each record, and which of them are learned.

        A record has `messages` or `conversations`, or `prompt` and `completion`; see
        `cairn.trainer.data.records`. The last two are lists of messages, of which the completion's are
        learned, or plain texts, which are joined and closed with the end-of-text token.
        All are rendered and tokenised together, since that takes a fraction of the time.

        A record is one sample, unless the chat template renders earlier turns differently once others follow,
        as the templates of reasoning models do. Then it is several samples, each of which ends with a turn,
        and has the tokens before it that a server would see when it is asked for that turn. A sample teaches
        all turns that it has in that form, so that each turn is learned once.

        Args:
            records: at least one.
            indices: the records' places in the data set.
            where: names a record by its place, for messages.

        Returns:
            For each record at least one sample; of the last, all tokens may be unlearned.

        Raises:
            RecordRefused: one can't be trained on, or its learned tokens can't be told from the others.
        """
        texts: dict[int, tuple[str, str]] = {}
        conversations: dict[int, _Conversation] = {}
        for place, (record, index) in enumerate(zip(records, indices, strict=True)):
            if problem := problem_of(record):
                raise RecordRefused(where(index), problem)
            if turns := turns_of(record, self.roles):
                conversations[place] = _Conversation(where, index, turns)
            else:
                texts[place] = (record["prompt"], record["completion"])
        names = [indices[place] for place in texts]
        plain = _encode_texts(list(texts.values()), names, self.tokenizer, where)
        samples = dict(zip(texts, ([sample] for sample in plain), strict=True))
        talks = _encode_conversations(list(conversations.values()), self._renderer)
        samples |= dict(zip(conversations, talks, strict=True))
        found = [samples[place] for place in range(len(records))]
        for index, own in zip(indices, found, strict=True):
            self._check_rows(own, index, where)
        return found

    def check(self, record: Mapping[str, Any], index: int, where: Callable[[int], str]) -> None:
        """Check the form of a record, and that the template shows all of it; few are rendered for that.

        Raises:
            RecordRefused: it can't be trained on.
        """
        if problem := problem_of(record):
            raise RecordRefused(where(index), problem)
        if turns := turns_of(record, self.roles):
            self._renderer.check(_Conversation(where, index, turns))

    def _check_rows(self, samples: list[Sample], index: int, where: Callable[[int], str]) -> None:
        """Check that the model knows every token of a record.

        Raises:
            RecordRefused: it does not.
        """
        highest = max((int(one.token_ids.max()) for one in samples if len(one.token_ids)), default=0)
        if self._rows is not None and highest >= self._rows:
            raise RecordRefused(where(index), without_row(self.tokenizer, highest, self._rows))


def without_row(tokenizer: PreTrainedTokenizerBase, token: int, rows: int) -> str:
    """What is wrong with a token that the model has no row of embeddings for, and what to do about it."""
    return (
        f"it has the token {tokenizer.convert_ids_to_tokens(token)!r} ({token}), and the model's embeddings "
        f"have {rows} rows; widen them with transformers (model.resize_token_embeddings({len(tokenizer)}), "
        "then save_pretrained), or take the tokenizer that the model was made with"
    )


def _encode_texts(
    texts: list[tuple[str, str]],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    where: Callable[[int], str],
) -> list[Sample]:
    """Prompt and completion are tokenised as the one text that they are.

    What is learned begins with the first token that holds something of the completion. One that holds the
    end of the prompt as well, such as a space before a word, is learned too. The text ends with one
    end-of-text token, whether the tokenizer appends it, the completion has it, or neither.
    """
    if not texts:
        return []
    wholes = [prompt + completion for prompt, completion in texts]
    if tokenizer.is_fast:
        encoded = tokenizer(wholes, return_offsets_mapping=True)
        tokens = encoded["input_ids"]
        starts = [
            _first_behind(offsets, len(prompt))
            for (prompt, _), offsets in zip(texts, encoded["offset_mapping"], strict=True)
        ]
    else:
        tokens = tokenizer(wholes)["input_ids"]
        starts = []
        for i, (before, after) in enumerate(
            zip(tokenizer([prompt for prompt, _ in texts])["input_ids"], tokens, strict=True)
        ):
            if before and before[-1] == tokenizer.eos_token_id:
                del before[-1]
            if after[: len(before)] != before:
                raise RecordRefused(
                    where(indices[i]),
                    f"the tokenizer ({type(tokenizer).__name__}) does not say where its tokens stand, and "
                    "makes others of the prompt alone than of prompt and completion, so what is learned "
                    "can't be told; use a fast tokenizer, or messages",
                )
            starts.append(len(before))
    samples = []
    eos = tokenizer.eos_token_id
    for ids, start in zip(tokens, starts, strict=True):
        last = len(ids)
        while eos is not None and last > start and ids[last - 1] == eos:
            last -= 1
        whole = [*ids[:last], *([] if eos is None else [eos])]
        samples.append(_sample(whole, [(start, len(whole))]))
    return samples


def _first_behind(offsets: Sequence[tuple[int, int]], length: int) -> int:
    """The first token that holds a character from place `length` on; else the first that stands for nothing
    behind the last that stands for something."""
    for i, (start, end) in enumerate(offsets):
        if end > max(start, length):
            return i
    return max((i + 1 for i, (start, end) in enumerate(offsets) if end > start), default=0)


@dataclass(frozen=True)
class _Conversation:
    """The turns of record `index`, which `where` names for messages."""

    where: Callable[[int], str]
    index: int
    turns: Turns

    @property
    def name(self) -> str:
        return self.where(self.index)

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return self.turns.messages


class _Renderer:
    """Turns conversations into tokens with the tokenizer's chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], ignored: Collection[str]
    ):
        self.tokenizer = tokenizer
        self.arguments = arguments
        self.ignored = ignored
        self._shown: dict[str, Shown] = {}
        """By template."""

    def check(self, talk: _Conversation) -> None:
        """Check that the chat template shows all that the conversation has.

        Raises:
            RecordRefused: there is no template, or it leaves something out.
        """
        if self.tokenizer.chat_template is None:
            raise BadRecord(
                f"{talk.name}: it has messages, and the tokenizer has no chat template to render them"
            )
        tools = list(talk.turns.tools)
        template = self.tokenizer.get_chat_template(None, tools or None)
        calls = any(message.get("tool_calls") for message in talk.messages)
        for name, is_there in (("tools", bool(tools)), ("tool_calls", calls)):
            if is_there and name not in template:
                raise RecordRefused(
                    talk.name,
                    f"it has {name}, and the chat template takes no notice of them; use a model whose "
                    f"template shows tools, or remove {name} from the data",
                )
        shown = self._shown.setdefault(template, Shown(self._text, template, self.ignored))
        if problem := shown.problem_of(talk.messages, tools):
            raise RecordRefused(talk.name, problem)

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        return self.texts([messages], tools, asking=False)[0]

    def render(self, cuts: Sequence[tuple[_Conversation, int]], *, asking: bool) -> list["_Rendered"]:
        """The first messages of each conversation, all at once; no message is rendered to nothing.

        Args:
            cuts: conversations, and how many messages of each.
            asking: whether the header of the assistant's next turn follows.

        Raises:
            RecordRefused: the template refuses one.
        """
        rendered = [_Rendered("", [])] * len(cuts)
        groups: dict[str, list[int]] = {}
        for place, (talk, count) in enumerate(cuts):
            if count:
                tools = talk.turns.tools
                groups.setdefault(dumps(tools, default=str) if tools else "", []).append(place)
        for places in groups.values():
            own = [cuts[place] for place in places]
            for place, one in zip(places, self._render_alike(own, asking=asking), strict=True):
                rendered[place] = one
        return rendered

    def offsets(self, text: str) -> list[tuple[int, int]] | None:
        """The places of a rendered text that each of its tokens stands for; None if that is not known."""
        if not self.tokenizer.is_fast or not self._renders_text:
            return None
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["offset_mapping"]

    @property
    def _renders_text(self) -> bool:
        """Whether a conversation has the tokens of its text; some tokenizers render it in another way."""
        return type(self.tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template

    def _render_alike(self, cuts: Sequence[tuple[_Conversation, int]], *, asking: bool) -> list["_Rendered"]:
        """Render conversations with the same tools."""
        try:
            return self._render(cuts, asking=asking)
        except Exception as error:  # whatever a template raises, which says nothing of the record
            for cut in cuts:
                try:
                    self._render([cut], asking=asking)
                except Exception as cause:
                    raise RecordRefused(cut[0].name, f"the chat template refuses it: {cause}") from None
            raise BadRecord(f"the chat template fails: {error}") from None

    def _render(self, cuts: Sequence[tuple[_Conversation, int]], *, asking: bool) -> list["_Rendered"]:
        conversations = [list(talk.messages[:count]) for talk, count in cuts]
        tools = list(cuts[0][0].turns.tools)
        if not self._renders_text:
            encoded = self._apply(conversations, tools, asking=asking, tokenize=True, return_dict=True)
            return [_Rendered("", tokens) for tokens in encoded["input_ids"]]
        texts = self.texts(conversations, tools, asking=asking)
        tokens: Any = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [_Rendered(text, own) for text, own in zip(texts, tokens, strict=True)]

    def texts(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], tools: Sequence[Any], *, asking: bool
    ) -> list[str]:
        """What the template makes of conversations with the same tools; numbers as they are written.

        Raises:
            Exception: whatever the template raises.
        """
        return show_as_written(
            lambda value: self._apply(value[0], value[1], asking=asking, tokenize=False),
            (conversations, tools),
        )

    def _apply(self, conversations: Any, tools: Any, *, asking: bool, **how: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            conversations,
            add_generation_prompt=asking,
            **how,
            **({"tools": tools} if tools else {}),
            **self.arguments,
        )


@dataclass(frozen=True)
class _Rendered:
    """A conversation, or its beginning, as text and as tokens; text: "" if the tokenizer gives none."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class _Turn:
    """A turn to learn: message `number`. tokens: those up to its end. start: the first that is learned."""

    number: int
    tokens: list[int]
    start: int

    def lies_in(self, tokens: list[int]) -> bool:
        """Whether these tokens begin with the turn and what is before it."""
        return tokens[: len(self.tokens)] == self.tokens


def _encode_conversations(conversations: list[_Conversation], renderer: _Renderer) -> list[list[Sample]]:
    """What is learned of a turn is what comes after the messages before it; of the assistant's turns, what
    comes after the prompt that asks for it."""
    for talk in conversations:
        renderer.check(talk)
    turns = [(talk, i) for talk in conversations for i in talk.turns.learned]
    asked = [(talk, i) for talk, i in turns if talk.messages[i]["role"] == "assistant"]
    given = [(talk, i) for talk, i in turns if talk.messages[i]["role"] != "assistant"]
    wholes = renderer.render([(talk, len(talk.messages)) for talk in conversations], asking=False)
    prompts = iter(renderer.render(asked, asking=True))
    headers = iter(renderer.render(given, asking=False))
    within = [(talk, i + 1) for talk, i in turns if i + 1 < len(talk.messages)]
    ends = iter(renderer.render(within, asking=False))
    samples = []
    for talk, whole in zip(conversations, wholes, strict=True):
        own = []
        for i in talk.turns.learned:
            before = next(prompts if talk.messages[i]["role"] == "assistant" else headers)
            after = next(ends) if i + 1 < len(talk.messages) else whole
            start = _start_of(before, after, renderer)
            if start is None:
                raise RecordRefused(talk.name, _why_unclear(talk, i, before.text, after.text))
            own.append(_Turn(i, after.tokens, start))
        samples.append(_samples_of(whole.tokens, own))
    return samples


def _start_of(before: _Rendered, after: _Rendered, renderer: _Renderer) -> int | None:
    """The first token of a turn that is behind what is `before` it; None if that can't be told.

    A token that holds the end of what is before it and the beginning of the turn, such as two line ends, is
    the turn's: only the text of the one begins with the text of the other then, and not its tokens.
    """
    if after.tokens[: len(before.tokens)] == before.tokens:
        return len(before.tokens)
    if before.text and after.text.startswith(before.text):
        offsets = renderer.offsets(after.text)
        return None if offsets is None else _first_behind(offsets, len(before.text))
    return None


def _samples_of(whole: list[int], turns: list[_Turn]) -> list[Sample]:
    """The whole conversation, if all turns lie in it; else as few of its beginnings as it takes."""
    samples: list[Sample] = []
    tokens, learned = whole, list[tuple[int, int]]()
    for turn in reversed(turns):
        if not turn.lies_in(tokens):
            if learned:
                samples.append(_sample(tokens, learned))
            tokens, learned = turn.tokens, []
        learned.append((turn.start, len(turn.tokens)))
    samples.append(_sample(tokens, learned))
    return samples[::-1]


def _why_unclear(talk: _Conversation, i: int, before: str, after: str) -> str:
    """Why the tokens of turn `i` can't be told from the others, and what to do about it."""
    if talk.messages[i]["role"] != "assistant":
        return (
            f"the chat template renders what is before message {i} ({talk.messages[i]['role']}) otherwise "
            "once it follows, so its tokens can't be told; leave that role out of --data.learn"
        )
    how = ""
    if before and after:
        pairs = enumerate(zip(before, after, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
        how = f": it asks with {_shown(before[same:])}, and renders {_shown(after[same:])} there"
    return (
        f"the chat template opens message {i} otherwise when it asks for it (add_generation_prompt) than "
        f"when it renders it{how}, so what a server would be asked with is not what would be learned; mend "
        "the template, or give prompt and completion as text"
    )


def _shown(text: str) -> str:
    """The beginning of a text, for messages."""
    return repr(text if len(text) <= 24 else f"{text[:24]}...") if text else "nothing"


def _sample(tokens: list[int], learned: list[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(tokens), np.bool_)
    for start, end in learned:
        mask[start:end] = True
    return Sample(np.array(tokens, np.int32), mask)
