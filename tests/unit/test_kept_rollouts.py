"""Shipped rollouts in files, and the command that shows them."""

import json
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from runs import CONFIGS, REPOSITORY

import cairn
from cairn.launch.main import rollouts as command
from cairn.orchestrator.completion.chat import ChatFormat
from cairn.orchestrator.ledger import FORMAT, Ledger, LedgerRun
from cairn.orchestrator.rollout_log import KeptRollouts, RolloutOrigin, installed_vllm, rows_of
from cairn.orchestrator.rollout_log import question as question_in
from cairn.orchestrator.rollouts import AnswerGroup, Rollout, Turn
from cairn.run.directory import RunDirectory
from cairn.run.files import DamagedFile, write_json
from cairn.run.messages import Attempt

CHAT = ChatFormat(REPOSITORY / CONFIGS / "model")
ATTEMPT = Attempt("run", 1, "rl", 0, None, "branch_1")
VERSION = "run:branch_1:0"


def rollout(text: str, reward: float | None, **others: Any) -> Rollout:
    """An answer of one turn."""
    ids = CHAT.tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = [(VERSION, 0, len(ids))]
    return Rollout(5, ids, [-0.5] * len(ids), spans, "stop", text, reward, **others)


def group(place: int, *rollouts: Rollout) -> AnswerGroup:
    """The answers to a problem whose number is 100 more than its place."""
    prompt = CHAT.prompt([{"role": "user", "content": f"p{place}"}])
    return AnswerGroup(place, 100 + place, 0, prompt, list(rollouts))


def in_turns() -> Rollout:
    """An answer of two turns in one branch."""
    first = Turn(
        0, "a", 0, 0, array("i", [4, 70]), array("i", [7, 8]), array("f", [-1, -2]), [(VERSION, 0, 2)]
    )
    second = Turn(
        2, "b", 0, 4, array("i", [71, 5]), array("i", [9]), array("f", [-3]), [(VERSION, 0, 1)], "stop"
    )
    whole = Rollout(5, finish_reason="stop", text="i", reward=1.0, parts={"right": 1.0, "short": 0.25})
    whole.take([first, second])
    return whole


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three steps: place 0 to 2, the last of which has a failed answer."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.history.begin_attempt(1, None)
    run.config.write_text("{}")
    kept = KeptRollouts(run.rollouts)
    failed = rollout("z", None, failed="the judge returned None")
    steps = {1: [rollout("ab", 0.25), rollout("ba", 0.75)], 2: [in_turns()], 3: [rollout("c", 0.5), failed]}
    for step, answers in steps.items():
        rows = rows_of(step, [group(step - 1, *answers)], ["letters" if step < 3 else "judged"], CHAT)
        kept.write(step, rows, ATTEMPT, 1.0)
    return run


@pytest.fixture
def shown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What `rollouts RUN_DIR ...` prints, and on failure its message."""

    def show(*arguments: str, path: Path = run.path, code: int = 0, width: int = 200) -> str:
        monkeypatch.setattr(sys, "argv", ["rollouts", str(path), *arguments])
        monkeypatch.setenv("COLUMNS", str(width))
        found = command()
        output = capsys.readouterr()
        assert found == code, output.err
        return output.err if code else output.out + output.err

    return show


def test_a_step_has_all_that_was_sampled(run: RunDirectory):
    kept = KeptRollouts(run.rollouts)
    assert kept.steps() == [1, 2, 3]
    [row] = kept.read(2)
    assert {name: row[name] for name in ("step", "place", "sample", "problem", "trained", "tokens")} == {
        **{"step": 2, "place": 1, "sample": 0, "problem": 101, "trained": True, "tokens": 3}
    }
    assert (row["reward"], row["parts"], row["text"]) == (1.0, {"right": 1.0, "short": 0.25}, "i")
    first, second = row["turns"]
    assert (first["prompt_ids"], first["token_ids"], first["logprobs"]) == ([4, 70], [7, 8], [-1, -2])
    assert (second["kept"], second["prompt_ids"], second["token_ids"]) == (4, [71, 5], [9])
    assert second["versions"] == [{"version": VERSION, "start": 0, "end": 1}]
    single = kept.read(1)[0]
    assert single["turns"][0]["prompt_ids"] == group(0).prompt_ids
    assert single["prompt"] == CHAT.full_text(group(0).prompt_ids)
    failed = kept.read(3)[1]
    assert (failed["reward"], failed["failed"], failed["trained"]) == (None, "the judge returned None", False)
    metadata = pq.read_schema(kept.path(1)).metadata
    assert (metadata[b"run_id"], metadata[b"branch"], metadata[b"attempt"]) == (b"run", b"branch_1", b"run:1")
    assert kept.origin(1) == RolloutOrigin("run", "branch_1", "run:1", installed_vllm())
    assert kept.origin(9) is None


def test_a_step_that_is_taken_again_replaces_its_file(run: RunDirectory):
    kept = KeptRollouts(run.rollouts)
    kept.write(2, rows_of(2, [group(7, rollout("new", 0.0))], ["letters"], CHAT), ATTEMPT, 1.0)
    assert [(row["place"], row["text"]) for row in kept.read(2)] == [(7, "new")]
    kept.forget_after(1)
    assert kept.steps() == [1]


def test_the_oldest_files_go_first(run: RunDirectory):
    kept = KeptRollouts(run.rollouts)
    sizes = [kept.path(step).stat().st_size for step in (1, 2, 3)]
    rows = rows_of(4, [group(3, rollout("d", 0.0))], ["letters"], CHAT)
    kept.write(4, rows, ATTEMPT, (sizes[2] + 2 * max(sizes) - 1) / 1e9)
    assert kept.steps()[-1] == 4
    assert 1 not in kept.steps()
    kept.write(5, rows, ATTEMPT, 1e-9)
    assert kept.steps() == [5]  # the newest stays
    kept.write(6, rows, ATTEMPT, 0)
    assert kept.steps() == [5]


def test_a_rewound_run_sets_later_steps_aside(run: RunDirectory, tmp_path: Path):
    run.set_batches_aside(tmp_path / "aside", Attempt("run", 2, "rl", 1, None, "branch_2"))
    assert KeptRollouts(run.rollouts).steps() == [1]
    assert KeptRollouts(tmp_path / "aside" / "rollouts").steps() == [2, 3]


def test_a_damaged_file_is_named_and_left_out(run: RunDirectory, shown: Callable[..., str]):
    kept = KeptRollouts(run.rollouts)
    kept.path(2).write_bytes(b"PAR1 nonsense")
    with pytest.raises(DamagedFile, match=r"step_2\.parquet: can't be read"):
        kept.read(2)
    text = shown("--json")
    assert "step_2.parquet: can't be read" in text
    assert kept.read(9) == []


def test_the_newest_are_shown_without_options(shown: Callable[..., str]):
    lines = shown().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1/0/0", "1/0/1", "2/1/0", "3/2/0", "3/2/1"]
    assert "the judge returned None" in lines[-1]
    assert [word in lines[1] for word in ("letters", " p0 ", "ab")] == [True, True, True]
    first, _, *others = shown("--limit", "2").splitlines()
    assert first == "environment judged"
    assert [line.split()[0] for line in others] == ["3/2/0", "3/2/1"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_list_and_the_reasons_at_any_width(run: RunDirectory, shown: Callable[..., str], width: int):
    answers = [rollout("a long answer of several words " * 5, 0.123456, failed=None) for _ in range(2)]
    answers += [rollout("z", None, failed=f"KeyError: 'anser{n}' (my_env.py:23)") for n in range(3)]
    answers += [rollout("z", None, failed="KeyError: 'anser7' (my_env.py:57)")]
    rows = rows_of(400, [group(1000 + n, *answers) for n in range(2)], ["letters"], CHAT)
    KeptRollouts(run.rollouts).write(400, rows, ATTEMPT, 1.0)
    listed = shown("--step", "400", width=width).splitlines()
    assert max(map(len, listed)) <= width
    assert "400/1001/5" in listed[-1] or width == 60
    assert sum("0.1235" in line for line in listed) == 4
    reasons = shown("--failed", width=width).splitlines()
    assert max(map(len, reasons[:-1])) <= width
    flat = " ".join(reasons)
    assert "my_env.py:23" in flat
    assert "my_env.py:57" in flat
    if width > 60:
        assert [line.split()[:3] for line in reasons if "letters" in line] == [
            ["6", "2", "400"],
            ["2", "2", "400"],
        ]
    assert "--failed --full" in reasons[-1]
    assert "and 2 reasons more; --limit 3 shows all" in shown("--failed", "--limit", "1", width=width)


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        (
            "<|im_start|>system\nHi<|im_end|>\n<|im_start|>user\nAdd 1 and 2<|im_end|>\n<|im_start|>model\n",
            "Add 1 and 2",
        ),
        ("<s>[INST] Add 1 and 2 [/INST]", "Add 1 and 2"),
        ("<|user|>\nAdd 1\n\nand 2</s>\n<|assistant|>\n<think>", "Add 1 and 2"),
        ("Add 1 and 2", "Add 1 and 2"),
        ("<user>Add 1 and 2<assistant>", "Add 1 and 2"),
        ("user", "user"),
        ("", ""),
    ],
)
def test_the_question_in_a_rendered_prompt(prompt: str, question: str):
    assert " ".join(question_in(prompt).split()) == question


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--step 1", ["1/0/0", "1/0/1"]),
        ("--step 2-3", ["2/1/0", "3/2/0", "3/2/1"]),
        ("--environment judged", ["3/2/0", "3/2/1"]),
        ("--problem 100", ["1/0/0", "1/0/1"]),
        ("--min-reward 0.5", ["1/0/1", "2/1/0", "3/2/0"]),
        ("--max-reward 0.5", ["1/0/0", "3/2/0"]),
        ("--failed", ["3/2/1"]),
        ("--best 2", ["2/1/0", "1/0/1"]),
        ("--worst 2", ["1/0/0", "3/2/0"]),
        ("--best 1 --problem 100", ["1/0/1"]),
        ("--problem 999", []),
    ],
)
def test_options_select(options: str, keys: list[str], shown: Callable[..., str]):
    rows = json.loads(shown(*options.split(), "--json"))
    assert ["/".join(str(row[name]) for name in ("step", "place", "sample")) for row in rows] == keys
    text = shown(*options.split())
    assert ("no rollout is selected" in text) == (not keys)


def test_one_conversation_in_full(shown: Callable[..., str]):
    text = shown("2/1/0")
    assert "problem 101, letters, reward 1, right 1, short 0.25, 3 tokens" in text
    assert text.count("--- shown to the model") == 2
    assert f"--- answer (1 tokens, stop, by {VERSION})" in text
    [row] = json.loads(shown("2/1/0", "--json"))
    assert row["turns"][1]["token_ids"] == [9]
    assert shown("--full", "--step", "1").count("=== 1/0/") == 2


def test_wrong_usage_is_named(run: RunDirectory, shown: Callable[..., str], tmp_path: Path):
    assert "no such folder" in shown(path=tmp_path / "nowhere", code=2)
    (tmp_path / "config.json").write_text("{}")  # as in the folder of a model
    assert "is not a run directory" in shown(path=tmp_path, code=2)
    assert "there is no rollout 2/1/7" in shown("2/1/7", code=2)
    assert "no rollouts of step 8 to 9 are kept; those of steps 1 to 3 are" in shown("--step", "8-9", code=2)
    assert "is not a key such as 12/190/3" in shown("2/1", code=2)
    assert "is neither a step such as 12" in shown("--step", "x", code=2)
    for path in run.rollouts.iterdir():
        path.unlink()
    assert "only RL runs have them" in shown(code=2)
    Ledger(run.ledger, LedgerRun("run", "branch_1", FORMAT, 0, 100, 1, 2, 1), None, 0).close()
    assert "no rollouts are kept yet" in shown(code=2)
    beat = {"pid": 1, "beats": 1, "marks": 1, "doing": "trying again", "waiting": False, "since": 0.0}
    run.heartbeats.mkdir(exist_ok=True)
    write_json(run.heartbeat("orchestrator"), beat)
    assert "The orchestrator's last sign of life: trying again" in shown(code=2)


def test_the_api_has_shipped_and_waiting_ones_once(run: RunDirectory):
    ledger = Ledger(run.ledger, LedgerRun("run", "branch_1", FORMAT, 0, 100, 1, 2, 1), None, 0)
    for place, answer in ((2, rollout("c", 0.5)), (3, rollout("w", 0.5))):
        waiting = group(place, answer)
        ledger.issue(waiting)
        ledger.record(place, {0: answer})
    rows = cairn.Run(run.path).rollouts()
    assert rows["text"].tolist() == ["ab", "ba", "i", "c", "z", "w"]
    assert rows["step"].isna().tolist() == [False] * 5 + [True]
    assert rows["failed"].notna().tolist() == [False] * 4 + [True, False]
    turns = cairn.Run(run.path).rollouts(turns=True)["turns"][0]
    assert np.asarray(turns[0]["logprobs"]).tolist() == [-0.5, -0.5]


def test_the_command_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", "from cairn.launch.main import rollouts; rollouts()", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--best INT" in done.stdout
