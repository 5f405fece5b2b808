"""Imports without garbage collection."""

import gc

import pytest

from cairn.run.output import importing


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_afterwards(enabled: bool):
    """Also where an import fails; what was created within is exempt from later collections."""
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), importing():  # noqa: PT012
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() > frozen + len(kept)
    finally:
        gc.unfreeze()
        if frozen:  # by tests/conftest.py
            gc.freeze()
        (gc.enable if was_enabled else gc.disable)()
