"""What all tests share: see runs.py, groups.py and clocks.py."""

import contextlib
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["runs", "groups", "clocks"]

# A second thread of torch's spins while it waits for work. Where several processes of pytest's share the
# processors it costs far more than it computes: tiny models take up to ten times as much processor time.
torch.set_num_threads(1)

# How long a test takes says more about the machine than about us. Each run draws other examples, and
# `scripts/test` fewer.
for profile, examples in (("unhurried", 20), ("short", 8)):
    settings.register_profile(
        profile, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples
    )
settings.load_profile("unhurried")

HERE = Path(__file__).parent
LARGE = 3 << 30
"""Bytes of a process of pytest's, which has half of that when it has imported all tests."""
UNIT = HERE / "unit"


def import_share() -> None:
    """Of all test files, import first those that no other of pytest's processes begins with.

    pytest rewrites the assertions of a file that is imported for the first time, for as much processor time
    as all other work of collecting tests takes, and keeps the result for the next process that imports it.
    """
    of = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if of == 1:
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    for path in sorted(HERE.glob("*/test_*.py"))[number::of]:
        sys.path.insert(0, str(path.parent))
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest will tell
            importlib.import_module(path.stem)
        sys.path.pop(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Neither while modules are imported nor afterwards does the garbage collector look at what they leave.

    That is half a million objects, which stay.
    """
    gc.disable()
    try:
        import_share()
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
    """What a module's tests have freed goes back to the system, if it is much: glibc keeps it by itself."""
    yield
    if psutil.Process().memory_info().rss > LARGE:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
