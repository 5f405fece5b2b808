"""The page of parity is what its program writes; differences are what they say."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import parity_page

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def test_the_page_is_what_its_program_writes():
    """Nobody has changed a number by hand; `--page` writes the page again."""
    report = json.loads((RESULTS / "parity.json").read_text())
    assert (RESULTS / "parity.md").read_text() == parity_page.page(report)


def test_differences_are_relative_but_for_numbers_near_zero():
    assert parity_page.relative(2.0, 1.0) == parity_page.relative(-1.0, -2.0) == 0.5
    assert parity_page.relative(0.0, 1e-9) == pytest.approx(1e-6)
