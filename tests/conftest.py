"""What all tests share: see runs.py."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["runs"]

# How long a test takes says more about the machine than about us.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

UNIT = Path(__file__).parent / "unit"
TOGETHER = {
    "remote": ["test_remote"],
    "restart": ["test_restart", "test_chaos"],
    "rl": ["test_rl", "test_served_adapters", "test_tools_run", "test_disagreement", "test_api_runs"],
    "inference": ["test_inference", "test_pool", "test_sleep"],
}
"""Files of which one of pytest's processes runs all tests, since they share a server; those that take longest
come first. A server takes as much processor time to start as a short run."""
GROUPS = {file: group for group, files in TOGETHER.items() for file in files}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests by their folder, and group tests for pytest-xdist: as in `TOGETHER`, else by file."""
    for item in items:
        if UNIT in item.path.parents:
            item.add_marker(pytest.mark.unit)
        item.add_marker(pytest.mark.xdist_group(GROUPS.get(item.path.stem, item.path.stem)))
    order = list(TOGETHER)
    items.sort(
        key=lambda item: order.index(GROUPS[item.path.stem]) if item.path.stem in GROUPS else len(order)
    )
