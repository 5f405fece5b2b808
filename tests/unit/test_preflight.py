"""What is found out before anything is started, by the start of a run and by --dry-run alike."""

import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from cairn.launch import main

MODEL = Path(__file__).resolve().parents[2] / "configs" / "reverse_text" / "model"
USER, ASSISTANT = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
PAIR = {"prompt": "ab", "chosen": "ba", "rejected": "ab"}

Planned = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are not the user's."""
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planned:
    """What a dry run on these records, or this text of a file, says beside the plan; nothing is written."""

    def plan(command: str, data: object, *flags: str, model: Path = MODEL) -> list[str]:
        path = tmp_path / "data.jsonl"
        records = data if isinstance(data, list) else []
        text = data if isinstance(data, str) else "".join(json.dumps(one) + "\n" for one in records)
        path.write_text(text)
        where = ["--data.name", str(path), "--model.name", str(model), "--model.init-seed", "0"]
        argv = [command, "--dry-run", *where, "--output-dir", str(tmp_path / "run"), *flags]
        monkeypatch.setattr("sys.argv", argv)
        code = getattr(main, command)()
        assert not (tmp_path / "run").exists()
        lines = capsys.readouterr().err.splitlines()
        assert code == (2 if any(line.startswith("error: ") for line in lines) else 0)
        return [line.replace(str(path), "DATA") for line in lines]

    return plan


def errors(lines: list[str]) -> list[str]:
    """Those lines that refuse the run."""
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


GOOD = {"messages": [USER, ASSISTANT]}
REFUSED = {
    "broken": ("sft", json.dumps(GOOD) + '\n{"messages": [\n', "--data.name DATA, line 2: it is no JSON"),
    "role": ("sft", [{"messages": [{"from": "human", "value": "a"}]}], "--data.name DATA, line 1: message 0"),
    "text": ("sft", [{"text": "ab"}], "--data.name DATA, line 1: it has the fields ['text']"),
    "pairs": ("sft", [PAIR], "--data.name DATA, line 1: it is a pair (chosen and rejected), from which"),
    "no_pairs": ("dpo", [GOOD], "--data.name DATA, line 1: it has the fields ['messages']; it needs chosen"),
    "equal": ("reward", [PAIR | {"chosen": "ab"}], "--data.name DATA, line 1: chosen and rejected are"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_refuses_records_as_the_start_does(planned: Planned, name: str):
    command, data, start = REFUSED[name]
    (error,) = errors(planned(command, data))
    assert error.startswith(start)


def test_a_dry_run_finds_no_fault_with_right_records(planned: Planned):
    assert errors(planned("sft", [GOOD])) == []
    assert errors(planned("dpo", [PAIR])) == []


def test_a_dry_run_refuses_a_model_or_data_that_is_not_there(planned: Planned, tmp_path: Path):
    (error,) = errors(planned("sft", [GOOD], model=tmp_path / "nowhere"))
    assert "nowhere: there is no such folder" in error
    (error,) = errors(planned("sft", [GOOD], "--data.name", str(tmp_path / "none.jsonl")))
    assert error.endswith("none.jsonl: there is no such file")


def test_the_files_of_a_folder_are_said(planned: Planned, tmp_path: Path):
    """Those that are read, and those that are not."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b.jsonl", "a.jsonl", "test.jsonl"):
        (folder / name).write_text(json.dumps(GOOD) + "\n")
    (folder / "notes.txt").write_text("x")
    said = planned("sft", [GOOD], "--data.name", str(folder))
    assert any(
        line.endswith(
            f"data: {folder}: reads a.jsonl, b.jsonl; not read, since they are of other splits than train: "
            "test.jsonl; not read, since they are no data files: notes.txt"
        )
        for line in said
    ), said
    assert not any("reads" in line for line in planned("sft", [GOOD]))
