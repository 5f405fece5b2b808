"""The simulation of an RL run by which its GPUs are divided."""

from dataclasses import replace

import pytest

from cairn.launch.plan import simulation
from cairn.launch.plan.simulation import (
    EQUAL,
    SEQUENCES,
    STEPS,
    GpuSplit,
    ModelShape,
    SimulatedWork,
    fastest,
    simulate,
    splits_of,
)

EIGHT_BILLION = ModelShape(8_190_000_000, 36, 4096, 2 * 36 * 8 * 128 * 2)
CACHE = 400_000
"""Tokens whose keys and values fit beside the weights of such a model into 80 GiB."""
LONG = SimulatedWork(64, 16, 512, 8192, 16384, behind=1, again=True)
SHORT = SimulatedWork(8, 4, 100, 300, 600, behind=1)


def test_eight_gpus_are_busy_with_answers_of_8192_tokens_where_one_server_left_them_idle():
    """Over 70 % of the time, both those that train and those that serve."""
    best = fastest(EIGHT_BILLION, LONG, splits_of(8, 1, CACHE)[2:5])[0]
    assert best.split == GpuSplit(4, 4, 1, CACHE)
    assert best.training > 0.7
    assert best.serving > 0.7
    one_server = simulate(EIGHT_BILLION, LONG, GpuSplit(7, 1, 1, CACHE))
    assert 0.08 < one_server.training < 0.2
    assert best.tokens > 3 * one_server.tokens


@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("split", [GpuSplit(1, 3, 1, 9000), GpuSplit(2, 1, 2, 500), GpuSplit(3, 1, 1, 10**6)])
def test_each_prompt_is_issued_answered_and_trained_on_once(behind: int, split: GpuSplit):
    work = replace(SHORT, behind=behind)
    run = simulation._Run(EIGHT_BILLION, work, split)
    outcome = run.outcome()
    assert run.issued == STEPS * work.prompts
    assert (run.shipped, run.trained) == (STEPS, STEPS)
    assert not run.left
    assert not run.ready
    assert not run.to_train
    assert all(not server.load and abs(server.context) < 1e-3 for server in run.servers)
    assert 0 < outcome.in_progress <= min(SEQUENCES, run.servers[0].most)
    assert 0 < outcome.training <= 1
    assert 0 < outcome.serving <= 1
    assert outcome == simulate(EIGHT_BILLION, work, split), "it is the same every time"


def test_ranks_and_servers_alternate_if_no_answer_may_be_of_an_earlier_policy():
    outcome = simulate(EIGHT_BILLION, replace(SHORT, behind=0), GpuSplit(4, 4, 1, CACHE))
    assert outcome.training + outcome.serving <= 1
    ahead = simulate(EIGHT_BILLION, SHORT, GpuSplit(4, 4, 1, CACHE))
    assert ahead.tokens > outcome.tokens


def test_no_run_is_faster_than_its_ranks():
    """With servers to spare, the ranks are always busy, at the speed of the constants."""
    outcome = simulate(EIGHT_BILLION, replace(LONG, mean=1024, longest=2048), GpuSplit(1, 7, 1, CACHE))
    assert outcome.training > 0.99
    operations = 4 / 3 * 6 * EIGHT_BILLION.parameters * (1024 + 512) / 1024
    assert outcome.tokens < 1.05 * simulation.PEAK * simulation.MFU / operations


def test_long_answers_want_more_servers():
    """Reading their keys and values takes longer and longer; training takes about the same for each token."""
    medium = replace(LONG, mean=2048, longest=4096)
    assert fastest(EIGHT_BILLION, medium, splits_of(8, 1, CACHE)[1:4])[0].split.servers == 3


def test_divisions_give_servers_whole_copies_and_whole_nodes():
    assert [(one.ranks, one.servers) for one in splits_of(8, 2, CACHE)] == [(6, 1), (4, 2), (2, 3)]
    assert [(one.ranks, one.servers) for one in splits_of(32, 2, CACHE, step=8)] == [
        (24, 4),
        (16, 8),
        (8, 12),
    ]
    assert splits_of(2, 2, CACHE) == []


def test_of_what_is_as_fast_the_most_even_division_is_taken():
    found = fastest(EIGHT_BILLION, SHORT, splits_of(8, 1, CACHE))
    good = [one for one in found if one.tokens >= EQUAL * max(one.tokens for one in found)]
    assert found[: len(good)] == sorted(good, key=lambda one: one.split.imbalance)
    assert [one.tokens for one in found[len(good) :]] == sorted(
        (one.tokens for one in found[len(good) :]), reverse=True
    )


def test_experts_make_servers_faster_and_ranks_slower():
    """Than a dense model with as many parameters: a token uses few of them, but layers are gathered whole."""
    dense = ModelShape(30_500_000_000, 48, 2048, 2 * 48 * 4 * 128 * 2)
    experts = replace(dense, experts=28_900_000_000, chosen=8 / 128)
    assert 3.2e9 < experts.active < 3.5e9
    split = GpuSplit(4, 4, 1, CACHE)
    few = replace(LONG, prompts=4, samples=4, mean=1024, longest=2048)
    run = simulation._Run(experts, few, split)
    assert run.seconds_of([0]) < simulation._Run(dense, few, split).seconds_of([0])
    assert run.seconds_of([0]) > simulation._Run(
        replace(dense, parameters=3_400_000_000), few, split
    ).seconds_of([0])
    assert simulate(experts, few, split).tokens > simulate(dense, few, split).tokens
