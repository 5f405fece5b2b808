"""Prompts and lengths before a run starts: what can't be asked, and what would never be learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import CONFIGS, REPOSITORY

from cairn.config.kinds import KINDS
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.config.rl import RLConfig
from cairn.config.rl_trainer import TrainerConfig
from cairn.launch.plan.environments import PROBLEMS, check_orchestrator, facts_of
from cairn.launch.plan.preflight import Subject, look
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.prompts.prompt_lengths import context_by, look_at_prompts
from cairn.run.errors import UsageError

MODEL = REPOSITORY / CONFIGS / "model"
WORD = "hill"


class Questions:
    """One question, one answer. `lengths`: words in the question of each problem."""

    def __init__(self, lengths: list[int] | None = None, problems: int = 3, role: str = "user"):
        self.lengths = lengths or [2] * problems
        self.role = role

    def __len__(self) -> int:
        return len(self.lengths)

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": self.role, "content": WORD * self.lengths[problem]}]

    def reward(self, problem: int, answer: str) -> float:
        return 1.0


class Walks:
    """A world."""

    def __len__(self) -> int:
        return 3

    def start(self, problem: int, seed: int) -> tuple[dict, str]:
        return {}, WORD

    def step(self, world: dict, answer: str) -> tuple[str, float, bool]:
        return WORD, 0.0, False


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(MODEL)


def asked(name: str, max_tokens: int = 12, **args: Any) -> dict[str, Any]:
    environment = EnvironmentConfig(name=f"{__name__}:{name}", args=args)
    config = OrchestratorConfig(environment=environment, sampling={"max_tokens": max_tokens})
    return check_orchestrator(config)


def looked(chat: ChatFormat, name: str, *, context: int | None, seq_len: int, **how: Any) -> list[str]:
    cut, tokens = how.pop("cut_rollouts", False), how.pop("max_tokens", 12)
    facts = facts_of(asked(name, tokens, **how), context, own_server=True)
    return list(look_at_prompts(facts, chat, seq_len=seq_len, cut_rollouts=cut, flags="--trainer."))


def test_a_world_whose_rollouts_may_be_longer_than_a_row_is_refused(chat: ChatFormat):
    """The trial: context 128, rows of 48 tokens; only asked for it trains."""
    with pytest.raises(UsageError) as refused:
        looked(chat, "Walks", context=128, seq_len=48)
    for words in (
        "--trainer.seq-len 48: a rollout of environment 'test_lengths:Walks' may fill the servers'",
        "context, 128 tokens",
        "Give --trainer.seq-len 128",
        "--inference.max-model-len",
        "--trainer.cut-rollouts allows it",
    ):
        assert words in str(refused.value)
    assert looked(chat, "Walks", context=128, seq_len=48, cut_rollouts=True) == []
    assert looked(chat, "Walks", context=48, seq_len=48) == []
    assert looked(chat, "Walks", context=None, seq_len=48) == []


def test_single_answers_are_bounded_by_prompt_and_max_tokens(chat: ChatFormat):
    """A context that is larger than a row is healthy there: the default one of a model always is."""
    longest = len(chat.prompt(Questions([2]).messages(0))) + 12
    assert looked(chat, "Questions", context=4096, seq_len=longest) == []
    with pytest.raises(
        UsageError, match=rf"problem 0 of .* Give --trainer.seq-len {longest}, or shorter answers"
    ):
        looked(chat, "Questions", context=4096, seq_len=longest - 1)
    assert looked(chat, "Questions", context=longest - 1, seq_len=longest - 1) == [], "answers end there"
    assert looked(chat, "Questions", context=None, seq_len=longest) == []


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 120), st.one_of(st.none(), st.integers(2, 120)))
def test_what_is_accepted_can_lose_nothing(words: int, max_tokens: int, seq_len: int, context: int | None):
    """And what is refused can lose something: for every combination of the four lengths."""
    prompt = 3 + words
    longest = min(prompt + max_tokens, context or prompt + max_tokens)
    one = {"whose": "it", "trained": True, "one_answer": True, "max_tokens": max_tokens}
    facts = {
        "asked": [{**one, "prompts": [{"problem": 0, "messages": prompt, "tools": None}]}],
        "context": context,
        "smaller_context": "",
    }
    refused = False
    try:
        list(look_at_prompts(facts, Counting(), seq_len=seq_len, cut_rollouts=False, flags="--"))
    except UsageError:
        refused = True
    assert refused == (longest > seq_len or (context is not None and prompt >= context))


class Counting:
    """A chat format whose messages are the number of their tokens."""

    def prompt(self, messages: int, tools: None) -> list[int]:
        return [0] * messages


def test_one_prompt_that_is_too_long_is_told_and_all_are_refused(chat: ChatFormat):
    (told,) = looked(chat, "Questions", context=64, seq_len=64, lengths=[2, 300, 2])
    assert told.startswith("warning: 1 of 3 problems that were looked at can't be asked: environment")
    assert "problem 1: its prompt has" in told
    with pytest.raises(
        UsageError, match=r"problem 0: its prompt has \d+ tokens, .* at most 64 on the servers"
    ):
        looked(chat, "Questions", context=64, seq_len=64, lengths=[300, 300])


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system prompt here') }}"
    "{% endif %}{{ m['content'] }}{% endfor %}"
)


def test_a_template_that_refuses_every_problem_refuses_the_run():
    """Before anything is started, for the environment and for those of evaluations."""
    chat = ChatFormat(MODEL)
    chat.tokenizer.chat_template = STRICT
    with pytest.raises(
        UsageError, match=r"environment '.*', problem 0: the chat template fails .* no system prompt"
    ):
        looked(chat, "Questions", context=64, seq_len=64, role="system")
    environment = {"name": f"{__name__}:Questions", "args": {"role": "system"}}
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name=f"{__name__}:Questions"),
        eval=[{"name": "held", "environment": environment}],
    )
    facts = facts_of(check_orchestrator(config), 600, own_server=True)
    with pytest.raises(UsageError, match=r"^evaluation 'held', problem 0: the chat template fails"):
        list(look_at_prompts(facts, chat, seq_len=600, cut_rollouts=False, flags="--"))


def test_of_large_environments_some_problems_are_drawn():
    problems = [one["problem"] for one in asked("Questions", problems=5000).asked[0]["prompts"]]
    assert problems[0] == 0
    assert 1 < len(problems) <= PROBLEMS
    again = [one["problem"] for one in asked("Questions", problems=5000).asked[0]["prompts"]]
    assert problems[: len(again)] == again[: len(problems)]


def test_a_server_of_its_own_has_the_models_context(tmp_path: Path):
    """Unless it is told another one."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert context_by(tmp_path) == 77
    assert context_by(tmp_path / "nowhere") is None
    limit = context_by(MODEL)
    config = RLConfig(orchestrator={"environment": {"name": f"{__name__}:Walks"}}, trainer={"seq_len": 48})
    checked = check_orchestrator(config.orchestrator)
    of_model = look(Subject(KINDS["rl"], config, MODEL, facts_of(checked, None, own_server=True)))
    assert f"context, {limit} tokens" in of_model.errors[0]
    told = look(Subject(KINDS["rl"], config, MODEL, facts_of(checked, 48, own_server=True)))
    assert not told.errors


def test_the_trainer_alone_knows_no_prompts():
    config = TrainerConfig(seq_len=48)
    assert look(Subject(KINDS["trainer"], config, MODEL)).errors == []
