"""Mutants, small faults in the code, can be applied; with -m soak, tests find each."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, NotFound, files_of, place
from runs import REPOSITORY

SOURCES = REPOSITORY / "src"


@pytest.mark.slow
def test_each_mutant_is_there_with_its_tests():
    """If code was rewritten on purpose, give the mutant the new text, or another way to break the same."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    for mutant in MUTANTS:
        file, text = place(mutant, SOURCES)
        assert text != file.read_text()
        assert files_of(mutant, REPOSITORY), f"{mutant.name}: no file of {mutant.tests} is there"


def test_a_mutant_is_found_wherever_it_is(tmp_path: Path):
    (tmp_path / "room").mkdir()
    code = "class A:\n    def f(self):\n        return 1 + 1\n\n"
    code += code.replace("A", "B")
    (tmp_path / "room" / "file.py").write_text(code)
    (tmp_path / "other.py").write_text("def g():\n    return 2 + 2\n")
    file, text = place(Mutant("a", "B.f", "1 + 1", "0", ""), tmp_path)
    assert (file.name, text) == ("file.py", code.replace("1 + 1", "0").replace("0", "1 + 1", 1))
    assert place(Mutant("renamed", "h", "2 + 2", "0", ""), tmp_path)[1] == "def g():\n    return 0\n"
    for function, old in [("f", "1 + 1"), ("f", "3 + 3")]:
        with pytest.raises(NotFound):
            place(Mutant("b", function, old, "0", ""), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_the_tests_find_each_mutant():
    script = REPOSITORY / "tests" / "mutants.py"
    done = subprocess.run([sys.executable, script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
