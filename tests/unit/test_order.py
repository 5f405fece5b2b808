"""The order of a run's prompts over its environments."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.orchestrator.prompt_order import Order, Portion, Position
from cairn.run import seeds
from cairn.run.seeds import BLOCK, permutation, permuted

PORTIONS = [Portion("sums", 7, 1.0, 2), Portion("words", 40, 2.5, 4), Portion("games", 1, 0.5, 2)]


def test_one_environment_is_in_the_order_of_its_epochs():
    """Which is that of runs from before there could be several."""
    for weight in (1.0, 0.3):
        order = Order(3, [Portion("only", 10, weight, 2)])
        found = [order.at(place) for place in range(35)]
        wanted = [problem for epoch in range(4) for problem in permutation(10, 3, "prompt order", epoch)]
        assert [one.problem for one in found] == wanted[:35]
        assert [one.epoch for one in found] == [place // 10 for place in range(35)]


def test_each_environment_goes_through_its_own_problems():
    """In each of its epochs each problem once, in another order each time."""
    order = Order(3, PORTIONS)
    walks: list[list[Position]] = [[] for _ in PORTIONS]
    for place in range(2 * BLOCK + 5):
        found = order.at(place)
        assert found.environment == order.environment(place)
        walks[found.environment].append(found)
    orders: set[tuple[int, ...]] = set()
    for walk, portion in zip(walks, PORTIONS, strict=True):
        for start in range(0, len(walk) - portion.problems + 1, portion.problems):
            epoch = walk[start : start + portion.problems]
            assert {one.epoch for one in epoch} == {start // portion.problems}
            assert sorted(one.problem for one in epoch) == list(range(portion.problems))
            orders.add(tuple(one.problem for one in epoch))
    assert len(orders) > 90
    shares = [len(walk) / (2 * BLOCK + 5) for walk in walks]
    assert shares == pytest.approx([1 / 4, 2.5 / 4, 0.5 / 4], abs=0.03)


def test_a_place_means_the_same_in_every_process_and_version():
    """Whatever was asked for before; another seed gives another order."""
    found = [Order(3, PORTIONS).at(place) for place in (BLOCK + 70, 3, 2, 1, 0)]
    assert [(one.environment, one.epoch, one.problem) for one in found] == AT
    drawn = {seed: [Order(seed, PORTIONS).environment(place) for place in range(50)] for seed in (3, 4)}
    assert drawn[3] != drawn[4]


AT = [(1, 17, 30), (1, 0, 36), (0, 0, 0), (1, 0, 6), (0, 0, 4)]


@given(st.integers(1, 300), st.integers(0, 5))
def test_an_order_that_is_computed_at_a_place_has_each_number_once(n: int, seed: int):
    """As an order that is drawn; it needs no memory, so there may be any number of problems."""
    assert [permuted(n, seed, "a")(place) for place in range(n)] == permutation(n, seed, "a")
    drawn = seeds.LARGEST_DRAWN
    try:
        seeds.LARGEST_DRAWN = 0
        at, other = permuted(n, seed, "a"), permuted(n, seed, "b")
        found = [at(place) for place in range(n)]
        assert sorted(found) == list(range(n))
        assert n < 20 or found != [other(place) for place in range(n)]
        assert n < 20 or found != list(range(n))
        with pytest.raises(IndexError):
            at(n)
    finally:
        seeds.LARGEST_DRAWN = drawn


def test_there_may_be_a_trillion_problems():
    """Which are asked in an order that is the same in every process and version."""
    order = Order(3, [Portion("sums", 10**12, 1.0, 2), Portion("words", 40, 1.0, 2)])
    found = [order.at(place) for place in range(400)]
    sums = [one.problem for one in found if one.environment == 0]
    assert sums[:3] == FIRST_OF_A_TRILLION
    assert len(set(sums)) == len(sums)
    assert max(sums) > 9 * 10**11


FIRST_OF_A_TRILLION = [367224204337, 8048086568, 929164254983]


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_epochs_of_a_range_are_those_of_its_places(first: int, last: int):
    order = Order(5, PORTIONS)
    counted = {(environment, epoch): count for environment, epoch, count in order.epochs(first, last)}
    places = (order.at(place) for place in range(first, last + 1))
    assert counted == Counter((one.environment, one.epoch) for one in places)
