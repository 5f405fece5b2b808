"""What all tests share: see runs.py, groups.py and clocks.py."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["runs", "groups", "clocks"]

# How long a test takes says more about the machine than about us.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests by their folder."""
    for item in items:
        if UNIT in item.path.parents:
            item.add_marker(pytest.mark.unit)
