"""Which tests share one of pytest's processes, and in which order groups of them begin; a pytest plugin.

The scheduler is a subclass of one of pytest-xdist's, since `--dist loadgroup` of 3.8 writes to a field that
pytest 9.2 no longer reads: without a word it spreads the tests of each file over all processes, each of which
then makes the fixtures of all modules (https://github.com/pytest-dev/pytest-xdist/issues/1386).
"""

from pathlib import PurePath
from typing import Any

import pytest

SERVED = 3
"""So many of pytest's processes run tests outside of tests/unit at a time. Most of these start servers, ranks
and clusters, whose memory bounds the number. The other processes have unit tests, which use the processors
while the former wait."""

TOGETHER = {
    "restart": ["test_restart", "test_chaos", "test_poisonous"],
    "rl": [
        "test_rl",
        "test_served_adapters",
        "test_branches",
        "test_tools_run",
        "test_disagreement",
        "test_api_runs",
    ],
    "step ranks": ["test_step_ranks"],
    "remote": ["test_remote"],
    "inference": ["test_inference", "test_pool", "test_sleep"],
    "signals": ["test_signals"],
    "sft": ["test_sft"],
    "checkpoint ranks": ["test_checkpoint_ranks"],
    "benchmarks": ["test_benchmarks"],
}
"""Files of which one of pytest's processes runs all tests, since they share a server, and long ones, each by
itself; those that take longest come first. A server takes as much processor time to start as a short run."""
GROUPS = {file: group for group, files in TOGETHER.items() for file in files}
ORDER = [*TOGETHER, "test_remote_store.py"]
"""That file waits for slow networks: if it came last, nothing would be left to run meanwhile."""


def is_unit(group: str) -> bool:
    """Whether a group is a file of tests/unit."""
    return "unit" in PurePath(group).parts


def group_of(file: str) -> str:
    """The group of a test file, given by its path: as in `TOGETHER`, else the file by itself."""
    return GROUPS.get(PurePath(file).stem, file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of `ORDER` come first."""
    place = {group: number for number, group in enumerate(ORDER)}
    items.sort(key=lambda item: place.get(group_of(item.path.name), len(ORDER)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup`, hand out whole groups."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

        def _assign_work_unit(self, node: Any) -> None:
            """The first group that this process may run, and prefers."""
            in_order = sorted(self.assigned_work, key=lambda each: int(each.gateway.id.removeprefix("gw")))
            prefers_units = in_order.index(node) >= SERVED
            first = next((g for g in self.workqueue if is_unit(g) == prefers_units), None)
            if first is None and prefers_units:
                node.shutdown()
                return
            if first is not None:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ByGroup(config, log)
