"""Logs of a run are bounded, whatever its processes print."""

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.launch import supervisor as logs
from cairn.launch.supervisor import BoundedLogs
from cairn.run.processes import log_end


def test_a_log_that_grows_is_begun_anew_and_its_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While a role, and what it has started, go on writing to it."""
    monkeypatch.setattr(logs, "LARGEST", 200_000)
    monkeypatch.setattr(logs, "HEAD", 1000)
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0)
    path = tmp_path / "orchestrator.log"
    script = (
        "import subprocess, sys\n"
        "print('first words', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print('x' * int(line), flush=True)\n"
        "    subprocess.run(['echo', 'a child of', line.strip()])\n"
        "    print('end of', line.strip(), file=sys.stderr, flush=True)\n"
        "    sys.__stdout__.write(''); open(sys.argv[1], 'a').write('.')\n"
    )
    told = tmp_path / "told"
    told.touch()
    with open(path, "ab") as out:
        role = subprocess.Popen(
            [sys.executable, "-c", script, str(told)], stdin=subprocess.PIPE, stdout=out, stderr=out
        )
    bounded, largest = BoundedLogs(tmp_path), 0
    for number, size in enumerate([10, 150_000, 100_000, 700_000, 10, 20]):
        role.stdin.write(f"{size}\n".encode())
        role.stdin.flush()
        while len(told.read_text()) <= number:
            pass
        bounded.look_after()
        total = sum(one.stat().st_size for one in tmp_path.iterdir())
        largest = max(largest, total)
        if size == 100_000:
            assert "first words" in (tmp_path / "orchestrator.log.1").read_text()
            assert (
                (tmp_path / "orchestrator.log.1").read_text().endswith("a child of 100000\nend of 100000\n")
            )
    role.stdin.close()
    role.wait()
    assert path.read_text() == (
        "[the log goes on here; what was before is in orchestrator.log.1]\n"
        f"{'x' * 10}\na child of 10\nend of 10\n{'x' * 20}\na child of 20\nend of 20\n"
    )
    copy = (tmp_path / "orchestrator.log.1").read_text()
    assert "bytes left out]" in copy
    assert copy.endswith("a child of 700000\nend of 700000\n")
    assert largest < 2 * 200_000
    assert log_end(path, 1) == "end of 20"
