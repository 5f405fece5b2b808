"""What all tests share: see runs.py, groups.py and clocks.py."""

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["runs", "groups", "clocks"]

# A second thread of torch's spins while it waits for work. Where several processes of pytest's share the
# processors it costs far more than it computes: tiny models take up to ten times as much processor time.
torch.set_num_threads(1)

# How long a test takes says more about the machine than about us. Each run draws other examples.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.load_profile("unhurried")

UNIT = Path(__file__).parent / "unit"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Neither while modules are imported nor afterwards does the garbage collector look at what they leave.

    That is half a million objects, which stay.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests by their folder."""
    for item in items:
        if UNIT in item.path.parents:
            item.add_marker(pytest.mark.unit)


@pytest.fixture(scope="module", autouse=True)
def freed_memory() -> Iterator[None]:
    """What a module's tests have freed goes back to the system, where glibc keeps it by itself."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
