"""The page of the runs in a folder, as the command `dash` serves it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Its address, as the command prints it."""
    code = "import sys; from cairn.launch.main import dash; sys.exit(dash())"
    command = [sys.executable, "-c", code, str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
