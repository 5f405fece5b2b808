"""How tests are handed out to pytest's processes."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import draws
import groups

TESTS = Path(groups.__file__).parent


@draws.seldom
def test_groups_stay_together_and_the_longest_begins_first(tmp_path: Path):
    """By a real pytest with four processes: pytest-xdist's own grouping fails without a word.

    The fourth has nothing but unit tests.
    """
    body = (
        "import os, pytest\n"
        "@pytest.mark.parametrize('n', range(8))\n"
        "def test_it(n):\n"
        f"    with open({str(tmp_path / 'order')!r}, 'a') as file:\n"
        "        print(os.environ['PYTEST_XDIST_WORKER'], os.path.basename(__file__), file=file)\n"
    )
    names = ["test_alone", "test_another", "test_restart", "test_chaos"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(body)
    (tmp_path / "unit").mkdir()
    units = [f"test_unit_{number}" for number in range(4)]
    for name in units:
        (tmp_path / "unit" / f"{name}.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "groups", "-p", "no:cacheprovider", "-n", "4"]
    done = subprocess.run(
        [*command, "--dist", "loadgroup", "--no-loadscope-reorder", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
            "PYTHONPATH": str(TESTS),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "order").read_text().splitlines()
    assert len(lines) == 64
    workers = defaultdict(set)
    for worker, file in map(str.split, lines):
        workers[file.removesuffix(".py")].add(worker)
    assert [len(workers[name]) for name in names + units] == [1] * 8, workers
    assert workers["test_restart"] == workers["test_chaos"]
    assert set.union(*(workers[name] for name in names)) == {"gw0", "gw1", "gw2"}
    assert {"gw3"} in [workers[name] for name in units]


def test_every_file_that_shares_exists():
    there = {path.stem for path in TESTS.rglob("test_*.py")}
    assert groups.GROUPS.keys() <= there
