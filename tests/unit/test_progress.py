"""How far long conversions say that they are."""

import os
import pty
import subprocess
import sys

import pytest

from cairn.run import output
from cairn.run.output import lines

BARS = """
from cairn.run.output import progress_bars
with progress_bars() as stage:
    advance = stage("writing [hf]", 4_000_000)
    for _ in range(4):
        advance(1_000_000)
"""


def test_plain_lines_name_stage_bytes_and_rate(monkeypatch: pytest.MonkeyPatch):
    """At first after a while, then now and then, and at the end; what is quick says nothing."""
    clock = [50.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    stage = lines(said.append, first=2, every=10)
    advance = stage("writing\x1b hf", 5_000_000_000)
    for seconds in (1, 2, 3, 9, 10):
        clock[0] += seconds
        advance(1_000_000_000)
    assert said == [
        "writing\\x1b hf: 2.0 of 5.0 GB, 667 MB/s",
        "writing\\x1b hf: 4.0 of 5.0 GB, 267 MB/s",
        "writing\\x1b hf: 5.0 of 5.0 GB, 200 MB/s",
    ]
    advance(0)
    stage("quick", 2_000)(2_000)
    assert len(said) == 3, "the end is said once"


def test_a_terminal_gets_bars():
    """With name, bytes and rate; elsewhere nothing steers a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", BARS], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
    assert process.returncode == 0
    text = shown.decode()
    assert "writing [hf]" in text
    assert "4.0/4.0 MB" in text
    assert "MB/s" in text or "?" in text
    plain = subprocess.run([sys.executable, "-c", BARS], stderr=subprocess.PIPE, check=True)
    assert plain.stderr == b""
