"""From a prompt to rewarded answers, with a server and environments that are played here."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from runs import CONFIGS, REPOSITORY

from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig, SamplingConfig
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.sampling import Sampler
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.orchestrator.rollouts import AnswerGroup
from cairn.policy.errors import RequestRefused
from cairn.policy.generation import Generation, SamplingParams, VersionSpan

MODEL = REPOSITORY / CONFIGS / "model"
VERSION = "run:branch_1:0"
RUN = LedgerRun("run", "branch_1", FORMAT, 0, 3, 1, 2, 0)
PROMPT = 6  # tokens: <user> and <assistant> around four letters


class Hills:
    """The answers that were to be rewarded; `reward` is a test's."""

    def __init__(self, reward: Callable[[], Any] = lambda: 0.5):
        self._reward = reward
        self.answers: list[str] = []
        self.role = "user"
        self.text = "hill"

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": self.role, "content": self.text}]

    def reward(self, problem: int, answer: str) -> Any:
        self.answers.append(answer)
        return self._reward()


@dataclass
class Server:
    """Answers like vLLM: no longer than its context, where the answer's own end does not come before."""

    context: int
    answer: int = 1000
    tells: bool = True
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Tokens given and asked for, of each request."""
    began: list[str | None] = field(default_factory=list)
    """The policy that each is said to go on from."""

    @property
    def max_model_len(self) -> int | None:
        return self.context if self.tells else None

    async def generate(
        self, token_ids: list[int], params: SamplingParams, *, began: str | None = None, **_: Any
    ) -> list[Generation]:
        max_tokens = params.max_tokens
        self.began.append(began)
        self.asked.append((len(token_ids), max_tokens))
        if len(token_ids) >= self.context or max_tokens < 1:
            raise ValueError(f"400: The decoder prompt (length {len(token_ids)}) plus ... {max_tokens}")
        left = self.answer - (len(token_ids) - PROMPT)
        count = min(max_tokens, left, self.context - len(token_ids))
        end = "stop" if count == left else "length"
        return [Generation([30] * count, [-0.5] * count, [VersionSpan(VERSION, 0, count)], end)] * params.n


def sampler(folder: Path, server: Server, environment: Hills, **sampling: int) -> Sampler:
    """One with pieces of 4 tokens and answers of 20, unless told otherwise."""
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="hills:Hills"),
        samples_per_prompt=2,
        reward_retries=2,
        reward_retry_seconds=0.0,
        sampling=SamplingConfig(**{"chunk_tokens": 4, "max_tokens": 20, **sampling}),
    )
    asked = SingleTurn(environment, config)
    ledger = Ledger(folder / "ledger.sqlite", RUN, None, 0)
    return Sampler(config, asked, ChatFormat(MODEL), server, ledger, {VERSION})


def begin(one: Sampler) -> AnswerGroup:
    """Issue the prompt at place 0."""
    return Prompts(one.ledger).issue(0)


def complete(one: Sampler, group: AnswerGroup | None = None) -> AnswerGroup:
    """The prompt at place 0 with its answers, from the beginning or as far as it has come."""

    async def run() -> AnswerGroup:
        try:
            return await one.complete(group or begin(one))
        finally:
            one.environment.close()

    return asyncio.run(run())


@pytest.mark.parametrize("context", [7, 9, 10, 11, 14, 25, 26, 27, 100])
@pytest.mark.parametrize("tells", [True, False])
def test_an_answer_ends_where_the_servers_context_does(tmp_path: Path, context: int, tells: bool):
    """It is whole then, cut off, and nobody asks for more of it."""
    if not tells and context in (10, 14):
        pytest.skip("a whole piece fills the context: only a server that tells its limit can be known full")
    server = Server(context, tells=tells)
    group = complete(sampler(tmp_path, server, Hills()))
    longest = min(20, context - PROMPT)
    for rollout in group.rollouts:
        assert (len(rollout.token_ids), rollout.finish_reason, rollout.reward) == (longest, "length", 0.5)
        assert rollout.versions[-1][-1] == len(rollout.logprobs) == longest
    assert max(given for given, _ in server.asked) < PROMPT + longest
    if tells:
        assert all(given + asked <= context for given, asked in server.asked)


def test_pieces_say_which_policy_their_answer_began_with(tmp_path: Path):
    """Whichever has sampled the piece before, and whoever goes on with it."""
    server, generate = Server(100), Server.generate

    async def updated(*what: Any, **how: Any) -> list[Generation]:
        found = await generate(server, *what, **how)
        spans = [VersionSpan(f"run:branch_1:{len(server.began)}", 0, len(found[0].token_ids))]
        return [replace(one, weight_versions=spans) for one in found]

    server.generate = updated
    complete(sampler(tmp_path, server, Hills()))
    assert server.began == [None, *["run:branch_1:1"] * 8]  # the first piece of two answers, and four of each


def test_an_answer_that_ends_by_itself_has_the_context_to_itself(tmp_path: Path):
    """Even if it ends right there."""
    (first, second) = complete(sampler(tmp_path, Server(PROMPT + 7, answer=7), Hills())).rollouts
    assert (len(first.token_ids), first.finish_reason) == (7, "stop")
    assert second.finish_reason == "stop"


def test_a_server_with_a_smaller_context_that_joins_ends_answers_that_are_beyond_it(tmp_path: Path):
    """They are as long as they are."""
    server = Server(100)

    one = sampler(tmp_path, server, Hills())
    generate = server.generate

    async def then_shrink(*arguments: Any, **sampling: Any) -> list[Generation]:
        found = await generate(*arguments, **sampling)
        server.context = PROMPT + 3
        return found

    server.generate = then_shrink
    group = complete(one)
    assert [(len(r.token_ids), r.finish_reason, r.reward) for r in group.rollouts] == [(4, "length", 0.5)] * 2
    assert len(server.asked) == 1


@pytest.mark.parametrize("context", [1, PROMPT - 1, PROMPT])
def test_a_prompt_that_is_too_long_is_named(tmp_path: Path, context: int):
    """With its length, what the servers take, and what to do; they are not asked."""
    server = Server(context)
    one = sampler(tmp_path, server, Hills())
    problem = begin(one).problem
    what = rf"hills:Hills', problem {problem}: its prompt has {PROMPT} tokens, but .* at most {context} on"
    group = complete(one, one.ledger.waiting()[0])
    assert (group.whole, group.usable, len(group.rollouts)) == (True, False, 2)
    assert re.search(rf"{what}.*--max-model-len", group.failure or "")
    assert server.asked == []


def test_messages_that_the_chat_template_refuses_are_named(tmp_path: Path):
    one = sampler(tmp_path, Server(100), Hills())
    one.chat.tokenizer.chat_template = "{{ raise_exception('no system turns, please') }}"
    assert re.search(r"hills:Hills', problem \d: .* no system turns, please", complete(one).failure or "")
    one = sampler(tmp_path / "empty", Server(100), Hills())
    one.chat.tokenizer.chat_template = "{# nothing #}"
    assert "the chat template renders its messages to nothing" in (complete(one).failure or "")
    assert one.retrying.take() == 0  # it would be the same again


def test_a_prompt_that_the_servers_refuse_fails_alone(tmp_path: Path):
    """A 4xx is about this request: its answers have failed, and the next prompt is answered."""
    server = Server(100, answer=6)
    one = sampler(tmp_path, server, Hills())
    answers = server.generate

    async def refuse(*_: Any, **__: Any) -> Any:
        raise RequestRefused("http://server answered 400: this prompt is no good")

    server.generate = refuse
    group = complete(one)
    assert (group.whole, group.usable) == (True, False)
    assert re.search(r"hills:Hills', problem \d: http.* 400: this prompt is no good", group.failure or "")
    server.generate = answers
    assert complete(sampler(tmp_path, server, Hills())).usable


def test_half_a_surrogate_pair_in_messages_is_named(tmp_path: Path):
    one = sampler(tmp_path, Server(100), Hills())
    one.environment.environment.text = "caf\ud83d"
    failure = complete(one).failure or ""
    assert "message 0 (role 'user') has the character U+D83D, half of a surrogate pair" in failure


@pytest.mark.parametrize("returned", ["0.5", float("nan")])
def test_a_reward_that_is_none_fails_and_the_answer_waits_for_another(tmp_path: Path, returned: Any):
    """It is asked for again a few times, and never taken for 0. The ledger has the answer, whole, with why it
    failed; and who takes over with a mended environment has it rewarded without asking a server.
    """
    environment, server = Hills(lambda: returned), Server(100, answer=6)
    group = complete(sampler(tmp_path, server, environment))
    assert len(environment.answers) == 2 * 3  # two answers, each asked for and twice again
    assert (group.whole, group.usable, group.learned.rollouts) == (True, False, [])
    assert re.search(r"hills:Hills.*reward of problem \d must be one finite number", group.failure)
    assert [asked for _, asked in server.asked][:3] == [4, 4, 4]
    asked = len(server.asked)

    after = sampler(tmp_path, server, Hills())
    (waiting,) = after.ledger.waiting()
    assert waiting == group
    assert {(rollout.finish_reason, rollout.reward) for rollout in waiting.rollouts} == {("stop", None)}
    again = complete(after, waiting)
    assert [rollout.reward for rollout in again.rollouts] == [0.5, 0.5]
    assert again.usable
    assert len(server.asked) == asked
    after.ledger.close()
    assert sampler(tmp_path, server, Hills()).ledger.waiting() == [again]


def test_a_reward_that_fails_now_and_then_is_asked_for_again(tmp_path: Path):
    """Nothing shows in what is learned."""
    rewards = iter(["no", float("nan"), 0.25, 0.75])
    group = complete(sampler(tmp_path, Server(100, answer=6), Hills(lambda: next(rewards))))
    assert sorted(group.rewards) == [0.25, 0.75]
    assert group.failure is None


def test_messages_that_fail_fail_all_answers_to_the_prompt(tmp_path: Path):
    """Nothing is sampled for it, and the ledger has the prompt as issued."""
    environment, server = Hills(), Server(100)
    environment.role = None
    group = complete(sampler(tmp_path, server, environment))
    assert (server.asked, group.usable) == ([], False)
    assert "messages" in group.failure
    after = sampler(tmp_path, server, Hills())
    assert complete(after, after.ledger.waiting()[0]).usable


def test_a_prompt_whose_messages_were_not_there_yet_is_asked_for_them_again(tmp_path: Path):
    """It was issued, so its place is nobody else's."""
    one = sampler(tmp_path, Server(100), Hills())
    begin(one)
    after = sampler(tmp_path, Server(100), Hills())
    (waiting,) = after.ledger.waiting()
    assert (waiting.prompt_ids, after.ledger.never_issued()) == ([], ([], 1))
    assert len(complete(after, waiting).prompt_ids) == PROMPT
    assert after.ledger.waiting() == [waiting]
