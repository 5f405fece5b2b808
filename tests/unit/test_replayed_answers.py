"""Answers that are asked for again: what is recorded of them, whose weights are there, and what differs."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import recorded_runs
from recorded_runs import ATTEMPT, begin, keep
from test_replay import step

from cairn.config.inference import InferenceConfig
from cairn.config.shared import RolloutKey
from cairn.inference.client import ServerStatus
from cairn.inference.servers import refuse_in_use
from cairn.launch.main import ckpt
from cairn.orchestrator.rollout_log import installed_vllm
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.messages import Attempt, PolicyName
from cairn.run.seeds import derive
from cairn.tools.replay.answers import MIXED, RolloutReplayed, SpanReplayed
from cairn.tools.replay.asking import RolloutReplay, drawn_rollouts
from cairn.tools.replay.policies import KeptPolicies
from cairn.tools.replay.recorded import RecordedRun
from cairn.tools.replay.sampled import SampledSpan, SamplingThen, is_same_policy, spans_of

RUN, BRANCH = ATTEMPT.run_id, ATTEMPT.branch


def then(**given: Any) -> SamplingThen:
    """Settings of a run with seed 7, pieces of 4 tokens, and its own server."""
    about = {"seed": 7, "temperature": 1.0, "chunk": 4, "keeps_cache": False, "own": True}
    return SamplingThen(**{**about, "server": InferenceConfig(), **given})


def turn(tokens: list[int], versions: list[tuple[int, int, int]], **given: Any) -> dict[str, Any]:
    """A kept turn with these tokens, each with its place in tenths as its logprob."""
    return {
        **{"branch": 0, "kept": 0, "call": None, "prompt_ids": [1, 2], "token_ids": tokens},
        "logprobs": [-place / 10 for place in range(len(tokens))],
        "versions": [
            {"version": f"{RUN}:{BRANCH}:{policy}", "start": start, "end": end}
            for policy, start, end in versions
        ],
        **given,
    }


def rollout(*turns: dict[str, Any]) -> dict[str, Any]:
    """A kept rollout, the third answer to the prompt at place 5, begun under policy 2."""
    return {"step": 3, "place": 5, "sample": 2, "policy_step": 2, "turns": list(turns)}


def test_an_answer_is_its_requests_and_policies():
    """Each with its context, and with its seed if the request began with it."""
    tokens = [10, 11, 12, 13, 14, 15]
    found = spans_of(rollout(turn(tokens, [(2, 0, 3), (3, 3, 4), (3, 4, 6)])), then())
    assert [(one.policy.step, one.start, one.token_ids) for one in found] == [
        (2, 0, [10, 11, 12]),
        (3, 3, [13]),
        (3, 4, [14, 15]),
    ]
    assert [one.context for one in found] == [[1, 2], [1, 2, 10, 11, 12], [1, 2, 10, 11, 12, 13]]
    assert [one.seed for one in found] == [
        derive(7, "sample", 5, 2) + 2,
        None,
        derive(7, "sample", 5, 2, 1) + 2,
    ]
    assert "began under an earlier policy" in found[1].not_drawn
    assert [one.first for one in found] == [True, False, False]
    assert not any(one.mixed for one in found)
    found = spans_of(rollout(turn(tokens, [(2, 0, 4), (3, 4, 6)])), then(keeps_cache=True))
    assert [one.mixed for one in found] == [False, True]


def test_a_programs_turns_go_on_in_their_branches():
    """The seed derives from the number of the call, and nothing of a version that has not kept it."""
    first = turn([10, 11], [(2, 0, 2)], call=0)
    other = turn([20], [(2, 0, 1)], call=1, branch=1, prompt_ids=[9])
    second = turn([30], [(3, 0, 1)], call=4, kept=4, prompt_ids=[3])
    found = spans_of(rollout(first, other, second), then(keeps_cache=True))
    assert [one.context for one in found] == [[1, 2], [9], [1, 2, 10, 11, 3]]
    assert [one.seed for one in found] == [derive(7, "sample", 5, 2, 2, call, 0) for call in (0, 1, 4)]
    assert [one.mixed for one in found] == [False, False, True]
    del first["call"]
    (old,) = spans_of(rollout(first), then())
    assert old.seed is None
    assert "earlier version of Cairn" in old.not_drawn


@pytest.mark.parametrize(
    ("branch", "made_by", "same"),
    [
        ("branch_1", "branch_1", True),
        ("branch_3", "branch_1", True),
        ("branch_1", "branch_3", False),
        ("b", "branch_1", False),
    ],
)
def test_a_checkpoint_has_the_policies_of_later_branches(branch: str, made_by: str, same: bool):
    """An earlier branch has taken its step otherwise: what it had saved was set aside."""
    assert is_same_policy(branch, made_by) is same


def span(logprobs: list[float], tokens: list[int] | None = None, **given: Any) -> SampledSpan:
    """A span that was sampled at the beginning of an answer."""
    ids = tokens or list(range(len(logprobs)))
    recorded = [float(np.float32(one)) for one in logprobs]
    about = {"seed": 1, "policy": PolicyName(RUN, BRANCH, 2)}
    return SampledSpan(turn=0, start=0, context=[1], token_ids=ids, logprobs=recorded, **{**about, **given})


def answered(
    exact: bool, logprobs: list[float], drawn: list[int] | None = None, **given: Any
) -> RolloutReplayed:
    """What came of three tokens whose logprobs were -1, -2 and -3."""
    ids = [0, 1, 2] if drawn is None else drawn
    one = SpanReplayed(span([-1, -2, -3]), exact, ("float32",), drawn=ids, logprobs=logprobs, **given)
    return RolloutReplayed(RolloutKey(3, 5, 2), "a server", [one])


@pytest.mark.parametrize(
    ("exact", "logprobs", "drawn", "verdict", "ok", "words"),
    [
        (True, [-1, -2, -3], None, "same", True, "proved: the run's policies have sampled this answer"),
        (True, [-1, -2, -3 - 2**-22], None, "close", False, "a low bit of a weight"),
        (False, [-1, -2, -3 - 2**-22], None, "close", True, "within rounding"),
        (False, [-1, -2, -3.1], None, "other", False, "had other weights"),
        (False, [-1, -2, float("nan")], None, "other", False, "had other weights"),
        (True, [-1, -2, -3], [0, 7, 2], "close", False, "sampled with another seed"),
        (False, [-1, -2, -3], [0, 7, 2], "close", True, "within rounding"),
        (False, [], [7, 1, 2], "other", False, "sampled with another seed"),
        (False, [-1, -2, -3], [0, 1], "close", True, "within rounding"),
    ],
)
def test_how_an_answer_agrees(
    exact: bool, logprobs: list[float], drawn: list[int] | None, verdict: str, ok: bool, words: str
):
    """Bits where they must be the same, else within rounding; and what a difference says."""
    found = answered(exact, logprobs, drawn)
    assert (found.verdict, found.ok) == (verdict, ok)
    assert words in found.lines(10)[-1]
    json.dumps(found.to_json())


def test_a_difference_is_shown_at_its_token():
    """The token that is drawn otherwise, and the largest difference of a logprob."""
    found = answered(False, [-1, -2.5, -3], [0, 1, 9], given=True).lines(10)
    assert "  turn 0, token 2: was 2, and the run's seed draws 9" in found
    (line,) = [one for one in found if "at most" in one]
    assert "0.5 at most (turn 0, token 1: -2.0 -> -2.5)" in line


def test_altered_memory_of_a_server_fails_whatever_it_answers():
    """With the names of the parameters."""
    found = answered(True, [-1, -2, -3])
    found.altered = ["model.norm.weight"]
    assert not found.ok
    assert "  the server held other values: model.norm.weight" in found.lines(10)
    assert found.lines(10)[-1].startswith("  NOT what the server held")


def test_what_is_not_compared_is_said():
    """Also as JSON: tokens behind a policy that is lost."""
    one = SpanReplayed(span([-1, -2], mixed=True), False, (), not_compared=MIXED)
    found = answered(True, [-1, -2, -3])
    found.spans.append(one)
    said = json.loads(json.dumps(found.to_json()))["spans"][1]
    assert (said["verdict"], said["not_compared"], said["by_transformers"]) == (None, MIXED, False)
    assert f"  2 tokens are not compared: {MIXED}" in found.lines(10)
    assert found.lines(10)[-1].endswith("have sampled 3 of these 5 tokens")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An RL run with checkpoint 2, and the rollouts of steps 1 to 4, each of the policy before."""
    run = begin(tmp_path / "run", "rl", trainer={}, orchestrator={}, inference={"threads": 1})
    for number in range(1, 5):
        run.metrics.append({"step": number, "loss": 1.0})
        kept = recorded_runs.rollout(number, 8 * number, 0)
        kept["turns"][0]["versions"] = [{"version": f"{RUN}:{BRANCH}:{number - 1}", "start": 0, "end": 3}]
        keep(run, number, [kept])
    import torch

    about = {"run_id": RUN, "branch": BRANCH, "parts": ["trainer", "orchestrator"]}
    step(run.path / "checkpoints" / "step_2", 2, {"a": torch.zeros(3)}, **about)
    return run.path


def test_answers_of_lost_policies_are_refused(run: Path):
    """With the policies that are there; `prove` draws from the others."""
    recorded = RecordedRun.local(run)
    assert KeptPolicies(recorded).steps() == [2]
    RolloutReplay(recorded, [RolloutKey(3, 24, 0)])
    with pytest.raises(UsageError, match=r"step 3 \(branch_1\).*are gone; those of step 2 are there"):
        RolloutReplay(recorded, [RolloutKey(4, 32, 0)])
    with pytest.raises(UsageError, match=r"--rollout 3/1/0: there is no such rollout.*steps 1 to 4 are kept"):
        RolloutReplay(recorded, [RolloutKey(3, 1, 0)])
    assert drawn_rollouts(recorded, 5, 0) == [(3, 24, 0)]


def test_what_is_other_than_then_is_named(run: Path):
    """The version of vLLM, if the run started its servers; of others nobody knows it."""
    path, key = run / "rollouts" / "step_3.parquet", RolloutKey(3, 24, 0)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"vllm": b"0.1"}), path)
    assert (
        "whose settings it has not recorded" in RolloutReplay(RecordedRun.local(run), [key]).changes(key)[-1]
    )
    RunDirectory(run).set_role("inference", "done")
    (changed,) = RolloutReplay(RecordedRun.local(run), [key]).changes(key)
    assert changed == f"vllm 0.1 -> {installed_vllm()}"


def test_weights_are_a_checkpoints_of_the_same_run_and_branch(run: Path):
    """Of an earlier branch they are not, and neither are another run's."""
    policies = KeptPolicies(RecordedRun.local(run))
    found = policies.find(PolicyName(RUN, BRANCH, 2))
    assert found == run / "checkpoints" / "step_2" / "model"
    assert policies.find(PolicyName(RUN, "branch_2", 2)) == found
    assert policies.find(PolicyName("other", BRANCH, 2)) is None
    assert policies.find(PolicyName(RUN, "branch_0", 2)) is None
    assert policies.find(PolicyName(RUN, BRANCH, 3)) is None


def test_arguments_that_do_not_go_together(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Exit code 2, and what to do."""

    def refused(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["ckpt", *map(str, arguments)])
        assert ckpt() == 2
        return capsys.readouterr().err

    assert "--rollout and --step exclude each other" in refused(
        "replay", run, "--rollout", "3/24/0", "--step", 1
    )
    assert "'3/24' is not a key such as 12/190/3" in refused("replay", run, "--rollout", "3/24")
    assert "steps need none; give --rollout" in refused("replay", run, "--server", "http://127.0.0.1:1")
    assert "--sample 0: leaves nothing to prove" in refused("prove", run, "--sample", 0)
    assert "a URL, where no rollouts are kept" in refused("replay", "s3://b/run", "--rollout", "3/24/0")
    sft = begin(tmp_path / "sft", "sft")
    assert "only RL runs have them" in refused("replay", sft.path, "--rollout", "3/24/0")


def test_a_server_that_a_run_may_use_is_refused():
    """Not one that has the policies of an ended run, or of `eval` or `ckpt replay`."""

    def status(version: str) -> ServerStatus:
        return ServerStatus(version, "e", "m", False, 1, "v")

    used = status(Attempt("r", 1, "rl", 0, None, "branch_1").version(3))
    with pytest.raises(UsageError, match="--server URL: it serves step 3 of run r, which may be going on"):
        refuse_in_use("URL", used, set(), "--server")
    refuse_in_use("URL", used, {"r"}, "--server")
    refuse_in_use("URL", status("replay-r:branch_1:3"), set(), "--server")
    refuse_in_use("URL", status("default"), set(), "--server")
