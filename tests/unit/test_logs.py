"""Logs of a run are bounded, whatever its processes print."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.launch import supervisor as logs
from cairn.launch.supervisor import BoundedLogs
from cairn.orchestrator.environments import worker
from cairn.run.output import OnlyOnce, message_of
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


def test_the_note_in_a_log_of_json_is_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "LARGEST", 1000)
    monkeypatch.setattr(logs, "HEAD", 100)
    path = tmp_path / "trainer.log"
    path.write_text('{"message": "x"}\n' * 100)
    logs.begin_anew(path)
    note = json.loads(path.read_text())
    assert (note["role"], note["message"][:21]) == ("trainer", "the log goes on here;")
    left_out = [line for line in (tmp_path / "trainer.log.1").read_text().splitlines() if "left out" in line]
    assert json.loads(left_out[0])["message"].endswith("bytes left out")


PROGRAM = """
import logging, sys
from cairn.run.output import start_logging
start_logging(sys.argv[1], "orchestrator")
logger = logging.getLogger("mine")

def fails(number):
    raise KeyError(f"answer {number}")

for number in range(25):
    try:
        fails(number)
    except KeyError:
        logger.exception("prompt %d could not be rewarded", number % 3)
for number in range(120):
    logger.warning("the disk is full: %d %% of it", 100)
    logger.info("said each time")
print("half a ", end="")
print("line\\nand another")
print("to stderr \\ud800 \\x1b[31m", file=sys.stderr)
fails("of the program")
"""


def logged(tmp_path: Path, form: str) -> list[str]:
    log = tmp_path / f"{form}.log"
    with open(log, "wb") as out:
        done = subprocess.run([sys.executable, "-c", PROGRAM, form], stdout=out, stderr=out, check=False)
    assert done.returncode == 1
    return log.read_text().splitlines()


def test_each_warning_and_each_traceback_is_said_once(tmp_path: Path):
    """And later how often it came; a traceback that leads to the same place is the same, whatever is said."""
    lines = logged(tmp_path, "text")
    assert sum("Traceback" in line for line in lines) == 2
    short = [line.partition(": ")[2] for line in lines if "its traceback is above" in line]
    assert short[0] == "prompt 1 could not be rewarded: KeyError: 'answer 1' (its traceback is above)"
    assert len(short) == 24
    full = [line.partition("mine: ")[2] for line in lines if "disk" in line]
    text = "the disk is full: 100 % of it"
    assert full == [text, f"{text} (for the 10th time)", f"{text} (for the 100th time)"]
    assert sum("said each time" in line for line in lines) == 120
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "no number: %d", ("x",), None)
    assert OnlyOnce().filter(record), "the handler tells of arguments that don't fit"


def test_each_line_is_an_object_if_that_is_wanted(tmp_path: Path):
    """Also of what is printed, and of a traceback at the end."""
    lines = [json.loads(line) for line in logged(tmp_path, "json")]
    assert all({"time", "level", "role", "message"} == line.keys() for line in lines)
    assert {line["role"] for line in lines} == {"orchestrator"}
    assert {line["level"] for line in lines} == {"INFO", "WARNING", "ERROR", "OUTPUT"}
    first = next(line for line in lines if line["level"] == "ERROR")
    assert first["message"].startswith("mine: prompt 0 could not be rewarded\nTraceback")
    printed = [line["message"] for line in lines if line["level"] == "OUTPUT"]
    assert printed[:3] == ["half a line", "and another", "to stderr \ud800 \x1b[31m"]
    assert printed[-1] == "KeyError: 'answer of the program'"
    log = tmp_path / "json.log"
    assert log_end(log, 1) == "KeyError: 'answer of the program'"
    log.write_text(
        '{"level": 1}\n{not json\n{"level": "INFO", "role": "x", "message": "error: full"}\nlast\n'
    )
    assert log_end(log) == "error: full\nlast"
    assert [message_of(line) for line in ('{"level": 1}', "{not", "[]")] == ['{"level": 1}', "{not", "[]"]


def test_an_environment_in_a_process_of_its_own_says_it_once_too(tmp_path: Path):
    """Its interpreter may lack Cairn, and its output is the orchestrator's log."""
    (tmp_path / "failing.py").write_text(
        "class Failing:\n    def messages(self, problem):\n        return []\n"
        "    def reward(self, problem, answer):\n        return {}[answer]\n"
        "    def __len__(self):\n        return 9\n"
    )
    make = {"name": "failing:Failing", "args": {}, "threads": 1}
    calls = [
        {"type": "call", "number": n, "method": "reward", "arguments": [n, f"answer {n}"]} for n in range(20)
    ]
    process = subprocess.Popen(
        [sys.executable, Path(worker.__path__[0]) / "worker.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    for message in (make, *calls):
        process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(21)]
    process.kill()
    assert sorted(answer["error"] for answer in answers[1:])[0] == "KeyError: 'answer 0'"
    assert process.stderr.read().count("Traceback") == 1
    process.communicate()
