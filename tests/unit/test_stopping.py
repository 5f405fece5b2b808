"""Stop strings: an answer ends with the token that completes one, whatever pieces it comes in."""

import asyncio
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from runs import CONFIGS, REPOSITORY
from templates import write_chat

from cairn.config.environment import EvalConfig, MixedEnvironmentConfig, SamplingConfig
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.inference.answers import Continuation
from cairn.orchestrator.completion.chat import ChatFormat, Stopped, StopWatch, shown_text, stopped_at_its_end
from cairn.orchestrator.completion.completers import ProgramRunner
from cairn.orchestrator.completion.conversation import Conversation
from cairn.orchestrator.completion.sampling import Sampler
from cairn.orchestrator.environments import Programs, SingleTurn
from cairn.orchestrator.environments.program import Model
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.orchestrator.rollouts import AnswerGroup, Rollout
from cairn.policy.generation import Generation, SamplingParams, VersionSpan

LETTERS = ChatFormat(REPOSITORY / CONFIGS / "model")
VERSION = "run:branch_1:0"
RUN = LedgerRun("run", "branch_1", FORMAT, 0, 3, 1, 2, 0)
WORDS = ["the", " fox", "fox", "\n\n", "\n", "ö", "€", "x", "</", "search", ">", "paris", "a", "b"]


@pytest.fixture(scope="module", params=["bytes", "metaspace"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """A tokenizer whose characters are several tokens, and whose tokens are several characters."""
    return write_chat(tmp_path_factory.mktemp("chat"), "thinking", metaspace=request.param == "metaspace")


def tokens(chat: ChatFormat, text: str) -> list[int]:
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def first_end(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """Where the first stop string ends and begins, character by character."""
    for end in range(1, len(text) + 1):
        if found := [one for one in stops if text[:end].endswith(one)]:
            longest = max(found, key=len)
            return end, end - len(longest), longest
    return None


def sampled(token_ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[Generation, int]]:
    """The tokens in pieces of these sizes, each with its own policy, and the rest."""
    pieces, at = list[tuple[Generation, int]](), 0
    for number, size in enumerate((*sizes, len(token_ids))):
        ids = list(token_ids[at : at + size])
        logprobs = [-0.25 * (at + i) for i in range(len(ids))]
        spans = [VersionSpan(f"run:branch_1:{number}", 0, len(ids))] if ids else []
        pieces.append((Generation(ids, logprobs, spans, "length"), len(ids)))
        at += size
    return pieces


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_split_into_pieces_gives_what_the_whole_answer_gives(chat: ChatFormat, data: st.DataObject):
    """Tokens, logprobs, policies and the text shown; the reference knows neither pieces nor tokens."""
    words = data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=25))
    token_ids = [token for word in words for token in tokens(chat, word)]
    text = chat.full_text(token_ids)
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 9))
    drawn = data.draw(st.lists(cuts, min_size=1, max_size=3))
    stops = [one for at, size in drawn if (one := text[at : at + size])] or ["nowhere"]
    sizes = data.draw(st.lists(st.integers(1, 7), max_size=8))

    answer, watch = Rollout(0), StopWatch(chat, stops)
    for piece, asked in sampled(token_ids, sizes):
        if answer.finish_reason is None and piece.token_ids:
            cut, wanted = watch.cut(piece, asked)
            answer.extend(cut, asked=wanted, longest=10**6)

    expected = first_end(text, stops)
    if expected is None:
        assert answer.finish_reason is None
        assert list(answer.token_ids) == token_ids
        return
    end, begin, string = expected
    count = next(n for n in range(1, len(token_ids) + 1) if chat.full_text(token_ids[:n])[:end] == text[:end])
    assert answer.finish_reason == "stop"
    assert list(answer.token_ids) == token_ids[:count]
    assert list(answer.logprobs) == [-0.25 * i for i in range(count)]
    assert [first for _, first, _ in answer.versions] == [0, *(last for _, _, last in answer.versions[:-1])]
    assert answer.versions[-1][2] == count
    stopped = stopped_at_its_end(chat, stops, answer.token_ids, answer.finish_reason)
    assert stopped == watch.stopped == StopWatch(chat, stops).feed(token_ids)
    assert stopped is not None
    assert stopped.string == string
    # The bytes of one tokenizer are special tokens, which are not shown.
    shown = [letter for letter in text[:begin] if chat.text(tokens(chat, f"x{letter}")) != "x"]
    assert shown_text(chat, answer.token_ids, stopped) == "".join(shown)


def test_a_stop_string_over_an_end_token_and_special_tokens(chat: ChatFormat):
    """Special tokens count as they are written, and are not shown."""
    think = chat.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ids = [*tokens(chat, "the"), think, *tokens(chat, "fox"), *chat.stop_token_ids]
    stopped = StopWatch(chat, ["fox"]).feed(ids)
    assert stopped is not None
    assert "<|im_start|>" not in shown_text(chat, ids[: stopped.tokens], stopped)
    assert shown_text(chat, ids[: stopped.tokens], stopped).strip() == "the"
    stopped = StopWatch(chat, ["<|im_start|>"]).feed(ids)
    assert stopped == Stopped("<|im_start|>", len(tokens(chat, "the")) + 1, len("<|im_start|>"))
    assert stopped_at_its_end(chat, ["the"], ids, "stop") is None  # it did not end the answer
    assert stopped_at_its_end(chat, ["fox"], ids[:-1], "length") is None


def test_ids_that_are_no_tokens_and_broken_bytes_end_nothing(chat: ChatFormat):
    euro = tokens(chat, "€")
    ids = [10**6, *euro[:-1], *euro[:-1], *tokens(chat, "fox"), 10**6]
    watch = StopWatch(chat, ["€", "dog"])
    assert watch.feed(ids) is None
    assert watch.feed(tokens(chat, " dog")) is not None


def test_where_the_server_sees_one_and_the_answer_has_none_it_goes_on(chat: ChatFormat):
    """As where the prompt's end is taken for a part of the answer's text."""
    watch, answer = StopWatch(chat, ["\n\nthe"]), Rollout(0)
    piece = Generation(tokens(chat, "the"), [-1.0] * len(tokens(chat, "the")), [], "stop", stop="\n\nthe")
    cut, asked = watch.cut(piece, 50)
    answer.extend(cut, asked=asked, longest=100)
    assert answer.finish_reason is None
    ended = Generation(list(chat.stop_token_ids), [-1.0], [], "stop")
    answer.extend(*[watch.cut(ended, 47)[0]], asked=47, longest=100)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("given_stop", ["", ["a", ""], 3, [3], {"a": 1}, ["\ufffd"], ["\udc00x"]])
def test_what_is_no_stop_string_is_refused(given_stop: Any):
    for kind in (SamplingConfig, lambda **s: EvalConfig(name="e", sampling=s), MixedEnvironmentConfig):
        settings = (
            {"sampling": {"stop": given_stop}} if kind is MixedEnvironmentConfig else {"stop": given_stop}
        )
        with pytest.raises(ValidationError, match="stop = "):
            kind(**settings)


def test_which_stop_strings_count_where():
    config = OrchestratorConfig(
        sampling={"stop": "a"},
        environments=[
            {"name": "x:X", "label": "x", "sampling": {"stop": ["b", "b"]}},
            {"name": "y:Y", "label": "y"},
        ],
        eval=[{"name": "own", "sampling": {"stop": []}}, {"name": "run"}],
    )
    assert [one.sampling.stop for one in config.of_environments()] == [["b"], ["a"]]
    assert [config.of_evaluation(one).sampling.stop for one in config.eval] == [[], ["a"]]


def test_how_the_server_says_what_ended_an_answer():
    choice = {
        "index": 0, "token_ids": [1], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop",
        "weight_versions": [{"version": "v", "start": 0, "end": 1}],
    }  # fmt: skip

    def stop(**reason: Any) -> str | None:
        return msgspec.convert({**choice, **reason}, Continuation).generation(None).stop

    assert stop() is None
    assert stop(stop_reason=7) is None
    assert stop(stop_reason="</search>") == "</search>"


# In rollouts


@dataclass
class Saying:
    """A server that says a text, one token a letter, whatever it is asked; it looks for no stop strings."""

    text: str
    max_model_len: int | None = 500
    asked: list[SamplingParams] = field(default_factory=list[SamplingParams])
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    said: int = 0

    async def generate(self, token_ids: Any, params: SamplingParams, **_: Any) -> list[Generation]:
        self.asked.append(params)
        self.prompts.append(list(token_ids))
        ids = tokens(LETTERS, self.text)
        so_far = 0
        for size in range(len(ids), 0, -1):
            if list(token_ids[-size:]) == ids[:size]:
                so_far = size
                break
        found = ids[so_far : so_far + params.max_tokens]
        count = len(found)
        end = "length" if count == params.max_tokens else "stop"
        return [Generation(found, [-0.5] * count, [VersionSpan(VERSION, 0, count)], end)] * params.n


class Hills:
    """Notes what it is to reward."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem: int, answer: str) -> float:
        self.answers.append(answer)
        return 0.5


def config_of(**sampling: Any) -> OrchestratorConfig:
    return OrchestratorConfig(
        environment=EnvironmentConfig(name="hills:Hills"),
        samples_per_prompt=2,
        reward_retries=0,
        sampling=SamplingConfig(**{"chunk_tokens": 4, "max_tokens": 20, **sampling}),
    )


def complete(one: Any, group: AnswerGroup | None = None) -> AnswerGroup:
    async def run() -> AnswerGroup:
        try:
            return await one.complete(group or Prompts(one.ledger).issue(0))
        finally:
            one.environment.close()

    return asyncio.run(run())


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 4, 5, 20])
def test_single_answers_end_at_the_runs_stop_string(tmp_path: Path, chunk_tokens: int):
    """Also over the end of a piece; the environment reads what is before it, and the ledger has it all."""
    environment, server = Hills(), Saying("abcdefghijkl")
    config = config_of(stop=["ef"], chunk_tokens=chunk_tokens)
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    group = complete(Sampler(config, SingleTurn(environment, config), LETTERS, server, ledger, {VERSION}))
    assert environment.answers == ["abcd", "abcd"]
    assert {params.stop for params in server.asked} == {("ef",)}
    for rollout in ledger.waiting()[0].rollouts:
        assert LETTERS.text(rollout.token_ids) == "abcdef"
        assert (rollout.finish_reason, len(rollout.logprobs)) == ("stop", 6)
        assert [span[1:] for span in rollout.versions][-1][1] == 6
    assert group.rewards == [0.5, 0.5]


def test_an_answer_that_was_begun_without_the_stop_string_ends_at_it(tmp_path: Path):
    """Its rest is not asked for, and what was sampled behind it is not learned."""
    environment, server = Hills(), Saying("abcdefghijkl")
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    config = config_of(stop=["cd"], chunk_tokens=6)
    sampler = Sampler(config, SingleTurn(environment, config), LETTERS, server, ledger, {VERSION})
    group = Prompts(ledger).issue(0)
    group.prompt_ids = sampler._prompt(0, environment.messages(0))
    ledger.set_prompt(group)
    ids = tokens(LETTERS, "abcdef")
    group.rollouts = [
        Rollout(i, list(ids), [-0.5] * 6, [("a", 0, 3), ("b", 3, 4), ("c", 4, 6)]) for i in range(2)
    ]
    ledger.record(0, dict(enumerate(group.rollouts)))
    complete(sampler, group)
    assert not server.asked
    assert environment.answers == ["ab", "ab"]
    for rollout in ledger.waiting()[0].rollouts:
        assert LETTERS.text(rollout.token_ids) == "abcd"
        assert rollout.versions == [("a", 0, 3), ("b", 3, 4)]


class Asking:
    """Asks twice, with stop strings of its own."""

    def __init__(self, stop: Any = ("ef",)):
        self.stop, self.replies = stop, list[Any]()

    def __len__(self) -> int:
        return 3

    async def rollout(self, problem: int, model: Model) -> float:
        messages: list[Any] = [{"role": "user", "content": "hill"}]
        for _ in range(2):
            reply = await model.generate(messages, stop=self.stop)
            self.replies.append(reply)
            messages += [reply.message, {"role": "user", "content": "on"}]
        return 1.0


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 20])
@pytest.mark.parametrize(("stop", "of_run"), [("ef", []), (["zz", "ef"], []), ([], ["ef"]), (["kl"], ["ef"])])
def test_programs_go_on_behind_the_tokens_of_a_stop_string(
    tmp_path: Path, chunk_tokens: int, stop: Any, of_run: list[str]
):
    """What is said goes on in its branch, whose tokens have the stop string; the message has not."""
    environment, server = Asking(stop), Saying("abcdefghijkl")
    config = config_of(stop=of_run, chunk_tokens=chunk_tokens)
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    runner = ProgramRunner(config, Programs(environment, config), LETTERS, server, ledger, {VERSION})
    group = complete(runner)
    assert [(reply.text, reply.message["content"], reply.stop) for reply in environment.replies] == [
        ("abcd", "abcd", "ef")
    ] * 4
    assert {reply.finish_reason for reply in environment.replies} == {"stop"}
    for rollout in group.rollouts:
        first, second = rollout.turns
        assert (first.branch, second.branch) == (0, 0)
        assert second.kept == first.kept + len(first.prompt_ids) + len(first.token_ids)
        assert LETTERS.text(first.token_ids) == LETTERS.text(second.token_ids) == rollout.text == "abcdef"
    # The same again, from what is recorded: nothing is asked of the server.
    asked = len(server.asked)
    again = Asking(stop)
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    waiting = ledger.waiting()[0]
    for rollout in waiting.rollouts:
        rollout.reward = None
    replayed = complete(
        ProgramRunner(config, Programs(again, config), LETTERS, server, ledger, {VERSION}), waiting
    )
    assert len(server.asked) == asked
    assert sorted(map(repr, again.replies)) == sorted(map(repr, environment.replies))
    assert [rollout.diverged for rollout in replayed.rollouts] == [0, 0]


def test_a_program_that_gives_no_stop_string_is_told(tmp_path: Path):
    config = config_of()
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    environment = Asking([""])
    runner = ProgramRunner(config, Programs(environment, config), LETTERS, Saying("abc"), ledger, {VERSION})
    group = complete(runner)
    assert "an empty text would end every answer" in str(group.rollouts[0].failed)


@pytest.mark.parametrize(("said", "goes_on"), [("sunny", True), ("", False)])
def test_reasoning_before_a_stopped_answer_is_kept(tmp_path: Path, said: str, goes_on: bool):
    """Where the content ends, the template closes the message; where reasoning was cut, nobody knows."""
    chat = write_chat(tmp_path, "thinking")

    def parse(*_: Any) -> Any:
        from cairn.orchestrator.completion.answers import Answer

        return Answer(said, "the fox")

    recorded = dict[int, Any]()
    conversation = Conversation(chat, recorded.__getitem__, parse)
    messages: list[Any] = [{"role": "user", "content": "the weather"}]
    context = conversation.next(messages)
    answered = tokens(chat, f"<think>\nthe fox\n</think>\n\n{said} dog" if said else "<think>\nthe fox dog")
    stopped = StopWatch(chat, [" dog"]).feed(answered)
    message = conversation.sampled(context, answered, stopped)
    longer = conversation.next([*messages, message, {"role": "user", "content": "the dog"}])
    assert bool(longer.kept) == goes_on
    if goes_on:
        assert longer.token_ids[: longer.kept].tolist() == [*context.token_ids.tolist(), *answered]
        assert chat.full_text(longer.appended).startswith("<|im_end|>")


def test_requests_without_stop_strings_are_what_they_were():
    """The server is asked for text only where it is to look for stop strings."""
    from cairn.inference.client import InferenceClient

    bodies = list[dict[str, Any]]()

    async def ask(params: SamplingParams) -> None:
        async with InferenceClient("http://127.0.0.1:9", token="x") as client:

            async def answer(method: str, path: str, content: bytes, **_: Any) -> Any:
                bodies.append(json.loads(content)["sampling_params"])
                return b'{"choices": []}'

            client._request = answer  # type: ignore[method-assign]
            with pytest.raises(Exception, match="0 choices"):
                await client.generate([1], params)

    asyncio.run(ask(SamplingParams(3)))
    asyncio.run(ask(SamplingParams(3, stop=("a",))))
    assert "stop" not in bodies[0]
    assert bodies[0]["detokenize"] is False
    assert bodies[1]["stop"] == ["a"]
    assert bodies[1]["detokenize"] is bodies[1]["include_stop_str_in_output"] is True


def test_cut_keeps_the_first_tokens():
    rollout = Rollout(0, array("i", [1, 2, 3]), array("f", [0, 1, 2]), [("a", 0, 1), ("b", 1, 3)])
    rollout.cut(2)
    assert (list(rollout.token_ids), list(rollout.logprobs)) == ([1, 2], [0, 1])
    assert rollout.versions == [("a", 0, 1), ("b", 1, 2)]
