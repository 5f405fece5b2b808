"""How a policy spreads over many servers: by whom each gets it, and what happens when one fails."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from clocks import LoopClock

from cairn.inference.pool.spreading import LEAST_SECONDS, Spreading
from cairn.policy.generation import Relay, Route

MANY = [f"http://10.0.0.{i}:8000" for i in range(64)]
TRAINER = None
SPINS = 100_000


@dataclass
class Simulated:
    """Servers that take a policy. fails: at which moment each does, by its place.

    sends: to how many servers each one, and the trainer (None), has sent it. order: in which they got it.
    """

    urls: list[str]
    fails: Mapping[int, str] = field(default_factory=dict)
    sends: dict[int | None, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    routes: dict[int, Route] = field(default_factory=dict)
    clock: LoopClock | None = None

    async def take(self, place: int, route: Route) -> Relay | None:
        self.routes[place] = route
        how = self.fails.get(place, "")
        by = route.parent.port if route.parent else TRAINER
        if by is not TRAINER and self.fails.get(by) == "dies once it has it":
            by = TRAINER  # to which the server turns by itself
        if how == "fails":
            return None
        self.sends[by] = self.sends.get(by, 0) + 1
        await (asyncio.Event().wait() if how == "is late" else asyncio.sleep(0))
        self.order.append(place)
        return Relay(f"10.0.0.{place}", place)

    async def spread(self, fan_out: int) -> Spreading:
        tree = Spreading(self.urls, fan_out)

        async def one(place: int) -> None:
            tree.done(place, await self.take(place, await tree.route(place)))

        tasks = [asyncio.create_task(one(place)) for place in range(len(self.urls))]
        for turn in range(1, SPINS):
            if all(task.done() for place, task in enumerate(tasks) if place not in self.fails):
                break
            await asyncio.sleep(0)
            if self.clock and not turn % 1000:  # nothing goes on any more but the time
                self.clock.add(2 * LEAST_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return tree


@pytest.mark.parametrize(
    ("servers", "fan_out", "levels", "by_trainer"),
    [(64, 4, 3, 4), (20, 4, 2, 4), (4, 4, 1, 4), (5, 4, 2, 4), (64, 0, 1, 64), (6, 1, 6, 1), (1, 4, 1, 1)],
)
def test_the_trainer_sends_a_policy_to_a_few_servers_and_they_to_the_others(
    servers: int, fan_out: int, levels: int, by_trainer: int
):
    """None to more than the others, or before it has it; a few servers all get it from the trainer."""
    simulated = Simulated(MANY[:servers])
    tree = asyncio.run(simulated.spread(fan_out))
    assert tree.levels == levels
    assert simulated.sends[TRAINER] == by_trainer
    assert max(simulated.sends.values()) <= (fan_out or servers)
    assert sorted(simulated.order) == list(range(servers))
    for place, route in simulated.routes.items():
        parent = tree.parent(place)
        assert (route.parent and route.parent.port) == parent
        assert route.children == len(tree.children(place))
        assert route.host == (f"10.0.0.{place}" if route.children else "")
        assert parent is None or simulated.order.index(parent) < simulated.order.index(place)
    assert sum(len(tree.children(place)) for place in range(servers)) == servers - by_trainer


@pytest.mark.parametrize("how", ["fails", "is late", "dies once it has it"])
@pytest.mark.parametrize("place", [0, 3, 4, 19, 63])
def test_a_server_whose_parent_fails_gets_the_policy_from_the_trainer(
    loop_clock: LoopClock, how: str, place: int
):
    """And those that come after it from it, as if nothing had happened."""
    simulated = Simulated(MANY, {place: how}, clock=loop_clock)
    tree = asyncio.run(simulated.spread(4))
    others = set(range(64)) - {place}
    assert others <= set(simulated.order)
    first = 4 - (place < 4 and how == "fails")
    assert simulated.sends[TRAINER] == first + len(tree.children(place))
    for child in tree.children(place):
        assert (simulated.routes[child].parent is None) == (how != "dies once it has it")
        for below in tree.children(child):
            assert simulated.routes[below].parent == Relay(f"10.0.0.{child}", child)


def test_an_address_of_one_machine_is_given_to_nobody_else():
    """A server that the pool knows by a loopback address can be reached by others like it alone."""
    simulated = Simulated(["http://127.0.0.1:8000", *MANY[:2], "http://localhost:8001"])
    asyncio.run(simulated.spread(1))
    assert [simulated.routes[place].children for place in range(4)] == [0, 1, 1, 0]
    assert [simulated.routes[place].parent is None for place in range(4)] == [True, True, False, False]
    together = Simulated(["http://127.0.0.1:8000", "http://127.0.0.1:8001"])
    asyncio.run(together.spread(1))
    assert together.routes[1].parent is not None
