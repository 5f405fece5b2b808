"""From servers' answers to a batch's file: each token keeps the experts that it has passed through."""

import asyncio
import base64
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CONFIGS, REPOSITORY

from cairn.config.environment import SamplingConfig
from cairn.config.orchestrator import EnvironmentConfig, OrchestratorConfig
from cairn.inference.answers import read_answer
from cairn.orchestrator.advantages import complete_experts, make_advantage, to_samples
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.completion.sampling import Sampler
from cairn.orchestrator.environments import SingleTurn
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.prompts.prompts import Prompts
from cairn.orchestrator.rollouts import AnswerGroup, Rollout, Turn
from cairn.policy.generation import Generation, RoutedExperts, SamplingParams, VersionSpan
from cairn.run.batches import EXPERTS, FROM_TEXT, UNKNOWN_EXPERT, RLBatch, open_batch, read_batch, write_batch
from cairn.run.messages import BatchHeader, ShippedBatch

VERSION = "run:branch_1:0"
RUN = LedgerRun("run", "branch_1", FORMAT, 0, 3, 1, 2, 0)
LAYERS, CHOSEN = 3, 2


def told(start: int, end: int, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """What the server tells of the tokens at these places of a context: numbers that say which they are."""
    places = np.arange(start, end)[:, None, None]
    return (places * 7 + np.arange(LAYERS)[:, None] * 3 + np.arange(CHOSEN) % 200).astype(dtype)


def expected(length: int, known: int, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """The column of a sample of whose tokens the first ones are known."""
    column = np.full((length, LAYERS, CHOSEN), UNKNOWN_EXPERT, np.int16)
    column[:known] = told(0, known, dtype)
    return column


class Server:
    """Answers with as many tokens as are asked for, up to `longest`, and tells experts if it can."""

    max_model_len = 100

    def __init__(self, longest: int, *, tells: bool = True):
        self.longest, self.tells = longest, tells
        self.asked: list[int | None] = []

    async def generate(self, token_ids: list[int], params: SamplingParams, **_: Any) -> list[Generation]:
        self.asked.append(params.experts_from)
        end = min(len(token_ids) + params.max_tokens, self.longest)
        count, start = end - len(token_ids), params.experts_from
        rows = None if start is None or not self.tells else RoutedExperts(start, told(start, end - 1))
        spans = [VersionSpan(VERSION, 0, count)]
        ended = "stop" if end == self.longest else "length"
        return [Generation([30] * count, [-0.5] * count, spans, ended, experts=rows)] * params.n


class Rhymes:
    """One problem."""

    def __len__(self) -> int:
        return 3

    def messages(self, problem: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "hill"}]

    def reward(self, problem: int, answer: str) -> float:
        return 0.5


def complete(folder: Path, server: Server, chunk: int, group: AnswerGroup | None, **changed: Any) -> Sampler:
    """The prompt at place 0 with its answers, from the beginning or as far as the ledger has come."""
    config = OrchestratorConfig(
        environment=EnvironmentConfig(name="hills:Rhymes"),
        samples_per_prompt=2,
        sampling=SamplingConfig(chunk_tokens=chunk, max_tokens=50),
        **{"router_replay": True, **changed},
    )
    ledger = Ledger(folder / "ledger.sqlite", RUN, None, 0)
    sampler = Sampler(
        config,
        SingleTurn(Rhymes(), config),
        ChatFormat(REPOSITORY / CONFIGS / "model"),
        server,
        ledger,
        {VERSION},
    )

    async def run() -> None:
        try:
            await sampler.complete(group or Prompts(ledger).issue(0))
        finally:
            sampler.environment.close()

    asyncio.run(run())
    return sampler


def columns_of(ledger: Ledger) -> list[np.ndarray | None]:
    """The experts of the samples of the one group that waits."""
    (group,) = ledger.waiting()
    ledger.stay_in_place()
    asyncio.run(asyncio.to_thread(ledger.take_experts, [group]))
    samples = to_samples(group, make_advantage(OrchestratorConfig().advantage))
    return [sample.columns.get(EXPERTS) for sample in samples]


@given(st.integers(9, 40), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_an_answer_in_pieces_keeps_the_experts_of_each_token(longest: int, chunk: int, killed: int):
    """Also if the process is killed in between; of all tokens but the last one of all."""
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), Server(longest)
        stops = iter(range(killed))

        class Killed(Exception):
            """In the middle of an answer."""

        async def generate(*args: Any, **how: Any) -> list[Generation]:
            if next(stops, None) == killed - 1 and server.asked:
                raise Killed
            return await Server.generate(server, *args, **how)

        server.generate = generate
        group = None
        while True:
            try:
                sampler = complete(folder, server, chunk, group)
                break
            except Killed:
                (group,) = Ledger(folder / "ledger.sqlite", RUN, None, 0).waiting()
        for ledger in (sampler.ledger, Ledger(folder / "ledger.sqlite", RUN, None, 0)):
            for column in columns_of(ledger):
                assert column is not None
                assert np.array_equal(column, expected(longest, longest - 1))


def test_tokens_of_servers_that_tell_nothing_are_unknown(tmp_path: Path):
    """In one sample, and in a batch whose other samples are known."""
    complete(tmp_path, Server(20, tells=False), 4, None)
    assert columns_of(Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)) == [None, None]
    silent = Server(20)
    (tmp_path / "b").mkdir()
    complete(tmp_path / "b", silent, 4, None, router_replay=False)
    assert set(silent.asked) == {None}

    group = AnswerGroup(0, 0, 0, [1, 2, 3], [rollout() for _ in range(2)])
    group.rollouts[0].experts = [RoutedExperts(2, told(2, 4)), RoutedExperts(4, told(4, 9))]
    samples = to_samples(group, make_advantage(OrchestratorConfig().advantage))
    assert complete_experts(samples) == pytest.approx(3 / 10)  # 5 tokens each
    assert np.array_equal(samples[0].columns[EXPERTS][2:], expected(5, 5)[2:])
    for unknown in (samples[0].columns[EXPERTS][:2], samples[1].columns[EXPERTS]):
        assert (unknown == UNKNOWN_EXPERT).all()
    (other,) = to_samples(
        replace(group, rollouts=[rollout()]), make_advantage(OrchestratorConfig().advantage)
    )
    assert complete_experts([other]) == 0
    assert EXPERTS not in other.columns


def rollout() -> Rollout:
    """An answer of two tokens."""
    return Rollout(5, [7, 8], [-0.25, -0.5], [(VERSION, 0, 2)], "stop", "gh", 0.5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_each_branch_of_a_program_has_its_own(tmp_path: Path, dtype: type[np.generic]):
    """Of all that its turns have told, in one byte or two; a turn that is forgotten tells none."""
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    ledger.issue(AnswerGroup(0, 0, 0, [], []))
    one = Rollout(5)
    ledger.record(0, {0: one, 1: Rollout(6)})
    # Branch 0: a prompt of 4 tokens, an answer of 3, a question of 2, an answer of 3. Branch 1: 5 and 2.
    for number, branch, kept, prompt, known in ((0, 0, 0, 4, 0), (1, 1, 0, 5, 0), (2, 0, 7, 2, 6)):
        turn = Turn(number, f"request {number}", branch, kept, [1] * prompt)
        count, before = (2 if branch else 3), kept + prompt
        rows = RoutedExperts(known, told(known, before + count - 1, dtype))
        spans = [VersionSpan(VERSION, 0, count)]
        found = Generation([9] * count, [-1.0] * count, spans, "stop", experts=rows)
        turn.extend(found, asked=count, longest=9)
        ledger.record_turn(0, 0, turn)
        assert turn.experts == []
    ledger.record_turn(0, 0, Turn(3, "request 3", 0, 12, [1]))
    ledger.forget_calls(0, 0, [3], one)
    group = AnswerGroup(0, 0, 0, [], [one])
    one.take(ledger.turns(0, 0))
    one.reward = 0.5
    ledger.take_experts([group])
    first, second = to_samples(group, make_advantage(OrchestratorConfig().advantage))
    assert np.array_equal(first.columns[EXPERTS], expected(12, 11, dtype))
    assert np.array_equal(second.columns[EXPERTS], expected(7, 6, dtype))

    header = BatchHeader("run", "branch_1", "run:1", 1, VERSION, [0], ShippedBatch(1, [[0, 0]], 2, 19, "", 0))
    batch = RLBatch([first, second.unlearned()], {}, sampling=FROM_TEXT, header=header)
    write_batch(tmp_path / "batch.safetensors", batch)
    for read in (read_batch, open_batch):
        found = read(tmp_path / "batch.safetensors")
        for ours, theirs in zip(batch.samples, found.take([0, 1]), strict=True):
            assert np.array_equal(ours.columns[EXPERTS], theirs.columns[EXPERTS])
    assert len(first.cut(5).columns[EXPERTS]) == 5
    ledger.drop(0, "stale", 1)
    assert ledger._database.execute("SELECT count(*) FROM experts").fetchone() == (0,)


def test_a_ledger_of_an_earlier_version_is_gone_on_with(tmp_path: Path):
    """It gets the table."""
    ledger = Ledger(tmp_path / "ledger.sqlite", RUN, None, 0)
    ledger._database.execute("DROP TABLE experts")
    snapshot = tmp_path / "snapshot.sqlite"
    snapshot.write_bytes(ledger.snapshot())
    ledger.close()
    for again in (
        Ledger(tmp_path / "ledger.sqlite", RUN, None, 0),
        Ledger(tmp_path / "other.sqlite", RUN, snapshot, 0),
    ):
        group = AnswerGroup(0, 0, 0, [1], [])
        again.issue(group)
        one = rollout()
        one.experts = [RoutedExperts(0, told(0, 2))]
        again.record(0, {0: one})
        group.rollouts = [one]
        again.take_experts([group])
        assert np.array_equal(one.experts[0].rows, told(0, 2))


def answer(rows: np.ndarray | None) -> bytes:
    """A server's answer of three tokens with these experts, as vLLM writes them."""
    buffer = io.BytesIO()
    if rows is not None:
        np.save(buffer, rows, allow_pickle=rows.dtype == object)
    encoded = None if rows is None else base64.b64encode(buffer.getvalue()).decode()
    logprobs = {"content": [{"logprob": -1.0}] * 3}
    spans = [{"version": VERSION, "start": 0, "end": 3}]
    choice = {"index": 0, "token_ids": [1, 2, 3], "finish_reason": "stop", "routed_experts": encoded}
    return json.dumps({"choices": [choice | {"logprobs": logprobs, "weight_versions": spans}]}).encode()


def test_experts_of_other_tokens_are_no_answer():
    """There are those of the prompt's tokens that were asked for, and of all answered ones but the last."""
    (choice,) = read_answer(answer(told(4, 12)), None, 1).choices
    found = choice.experts(4, 10)
    assert found is not None
    assert (found.start, found.rows.tolist()) == (4, told(4, 12).tolist())
    assert choice.experts(None, 10) is None
    (silent,) = read_answer(answer(None), None, 1).choices
    assert silent.experts(4, 10) is None
    wrong = (told(4, 11), told(4, 12).astype(np.float32), told(4, 12)[:, 0], told(4, 12).astype(object))
    for rows in wrong:
        (choice,) = read_answer(answer(rows), None, 1).choices
        with pytest.raises(ValueError, match=r"experts of 8 tokens|allow_pickle"):
            choice.experts(4, 10)
