"""What is found out before anything is started, by the start of a run and by --dry-run alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from test_rendering import CHATML, chat, tokenizer_of
from test_shown import KNOWN_ROLES
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from cairn.config.kinds import KINDS
from cairn.launch import main
from cairn.launch.plan.preflight import Found, Subject, look

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
    "all": (
        "reward",
        [GOOD] * 20,
        "--data.name DATA, line 1: it has the fields ['messages']; it needs chosen",
    ),
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


# What model and template make of the data. Subjects are looked at in this process, as tests have torch.


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """The folder of a model without weights: a configuration and a tokenizer."""

    def write(template: str = CHATML, config: PretrainedConfig | None = None, **tokenizer: Any) -> Path:
        folder = tmp_path / "model"
        found = tokenizer_of(template)
        for name, value in tokenizer.items():
            setattr(found, name, value)
        found.save_pretrained(folder)
        ends = found.eos_token_id
        (config or LlamaConfig(vocab_size=len(found), eos_token_id=ends)).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def looked(tmp_path: Path) -> Callable[..., Found]:
    """What is found of records, with names of files left out."""

    def run(command: str, records: list[Any], folder: Path, **settings: Any) -> Found:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        kind = KINDS[command]
        data = {"name": str(path), **settings.pop("data", {})}
        config = kind.config.model_validate({"model": {"name": str(folder)}, "data": data, **settings})
        found = look(Subject(kind, config, folder))
        return Found(
            *([line.replace(str(path), "DATA") for line in lines] for lines in (found.notices, found.errors))
        )

    return run


Model, Looked = Callable[..., Path], Callable[..., Found]


def test_what_is_learned_is_told_in_a_line(model: Model, looked: Looked):
    found = looked("sft", [chat("Hi", "Hello")] * 3 + [chat("Hi", "\nHello " * 9)], model(), seq_len=24)
    assert found.errors == []
    (line,) = found.notices
    assert line.startswith("DATA: of 4 records looked at, ")
    assert " of their tokens are learned; 25 % are longer than --seq-len 24 and are cut; " in line
    assert line.endswith("25 % of the answers begin with a line end")


def test_of_many_records_some_are_looked_at(model: Model, looked: Looked, monkeypatch: pytest.MonkeyPatch):
    """Those that are rendered are fewer than those whose kinds of messages are compared with the template."""
    monkeypatch.setattr("cairn.trainer.data.looking.ENCODED", 20)
    records = [chat("Hi", "Hello")] * 99 + [{"messages": [{"role": "developer", "content": "a"}, ASSISTANT]}]
    (error,) = looked("sft", records, model(KNOWN_ROLES)).errors
    assert error.startswith(
        "--data.name DATA, line 100: the chat template does not show the content of message 0"
    )
    assert error.endswith("; --data.unreadable drop leaves such records out")
    found = looked("sft", records, model(KNOWN_ROLES), data={"unreadable": "drop"})
    assert found.errors == []
    left_out, line = found.notices
    assert left_out.startswith(
        "DATA: 1 of 100 records looked at can't be trained on and are left out, such as DATA"
    )
    assert line.startswith("DATA: of 20 records looked at (of 100), ") or line.startswith("DATA: of 19 ")
    most = [*records[-1:] * 9, *records[:1]]
    (error,) = looked("sft", most, model(KNOWN_ROLES), data={"unreadable": "drop"}).errors
    assert error.endswith("; 9 of 10 records looked at can't be trained on")


def test_a_run_that_would_learn_nothing_is_refused(model: Model, looked: Looked):
    (error,) = looked("sft", [chat("Hi " * 50, "Hello")] * 40, model(), seq_len=16).errors
    assert "100 % teach nothing. Next to nothing would be learned: see whether --seq-len 16 is too" in error
    found = looked("sft", [chat("Hi " * 50, "Hello")] * 4 + [chat("Hi", "Hello")], model(), seq_len=16)
    assert found.errors == []
    assert found.notices[0].startswith("warning: DATA: of 5 records")


def test_a_model_without_a_template_and_one_whose_tokenizer_is_broken(model: Model, looked: Looked):
    folder = model()
    (folder / "chat_template.jinja").unlink()
    (error,) = looked("sft", [GOOD], folder).errors
    assert error.endswith("it has messages, and the tokenizer has no chat template to render them")
    assert looked("sft", [{"prompt": "a", "completion": "b"}], folder).errors == []
    (folder / "tokenizer.json").write_text("{}")
    assert "its tokenizer can't be loaded" in looked("sft", [GOOD], folder).errors[0]


@pytest.mark.parametrize("command", ["sft", "dpo", "reward"])
def test_tokens_without_a_row(model: Model, looked: Looked, command: str):
    """Those that appear are refused, with the record and what to do; others are told."""
    rows = len(tokenizer_of(CHATML)) - 1
    folder = model(config=LlamaConfig(vocab_size=rows))
    right = chat("Hi", "Hello") if command == "sft" else {"prompt": "Hi ", "chosen": "Yes", "rejected": "No"}
    if command == "sft":
        right["messages"][1]["content"] = "Yes"
    wrong = json.loads(json.dumps(right).replace("Yes", "Yes <|Assistant|>"))
    found = looked(command, [right] * 3, folder)
    assert found.errors == []
    assert (
        f"(of {rows} rows), such as '<|Assistant|>' ({rows}); what has one of them is refused"
        in found.notices[0]
    )
    (error,) = looked(command, [right, wrong], folder).errors
    assert (
        f"DATA, line 2: it has the token '<|Assistant|>' ({rows}), and the model's embeddings have" in error
    )
    assert "resize_token_embeddings" in error
    padded = model(config=LlamaConfig(vocab_size=rows + 65))
    assert looked(command, [right, wrong], padded).errors == []


@pytest.mark.parametrize("command", ["sft", "dpo", "reward"])
def test_more_tokens_than_learned_positions(model: Model, looked: Looked, command: str):
    records = [GOOD] if command == "sft" else [PAIR]
    folder = model(config=GPT2Config(vocab_size=500, n_positions=64))
    (error,) = looked(command, records, folder, seq_len=256).errors
    assert error.startswith("--seq-len 256: the model (")
    assert error.endswith("give --seq-len 64 or less")
    assert looked(command, records, folder, seq_len=64).errors == []
    rotary = model(config=LlamaConfig(vocab_size=500, max_position_embeddings=64))
    assert looked(command, records, rotary, seq_len=256).errors == []


def test_turns_that_end_with_a_token_that_ends_no_answer(model: Model, looked: Looked):
    """What follows the token, such as a line end, is not taken for it."""
    folder = model(config=LlamaConfig(vocab_size=500, eos_token_id=None), eos_token="<|endoftext|>")
    (_, warning) = looked("sft", [chat("Hi", "Hello")], folder).notices
    end, turn = (tokenizer_of(CHATML).convert_tokens_to_ids(one) for one in ("<|endoftext|>", "<|im_end|>"))
    assert f"end with '<|im_end|>' ({turn}), which ends no answer" in warning
    assert f'Put "eos_token_id": [{end}, {turn}] into generation_config.json' in warning
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn]}))
    assert len(looked("sft", [chat("Hi", "Hello")], folder).notices) == 1


def test_calls_without_schemas_are_told(model: Model, looked: Looked):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{{ (tools or []) | tojson }}" + KNOWN_ROLES
    called = {"messages": [USER, call]}
    found = looked("sft", [GOOD, called, called | {"tools": [tool]}, GOOD], model(template))
    assert found.errors == []
    asked = {"role": "user", "tool_calls": call["tool_calls"], "train": True}  # no content, and learned
    shows_all = CHATML.replace("m.content", "(m.content or '') + (m.tool_calls | default('') | tojson)")
    shown = looked("sft", [{"messages": [asked, ASSISTANT]}], model(shows_all))
    assert shown.errors == []
    assert shown.notices[0].startswith("DATA: of 1 records looked at")
    assert found.notices[0].endswith("; 25 % call tools without showing their schemas (tools)")


def test_held_out_records_are_looked_at_too(model: Model, looked: Looked, tmp_path: Path):
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"messages": [{"role": "developer", "content": "a"}, ASSISTANT]}) + "\n")
    validation = [{"name": "held", "data": {"name": str(held)}, "interval": 1}]
    (error,) = looked("sft", [GOOD], model(KNOWN_ROLES), validation=validation).errors
    assert error.startswith(f"validation 'held': --data.name {held}, line 1: the chat template does not show")


def test_preferences_are_looked_at_as_their_answers(model: Model, looked: Looked):
    developer = {"role": "developer", "content": "Be kind."}
    pair = {"prompt": [developer, USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT | {"content": "no"}]}
    (error,) = looked("dpo", [PAIR, pair], model(KNOWN_ROLES)).errors
    assert error.startswith(
        "--data.name DATA, line 2: the chat template does not show the content of message 0"
    )
    found = looked("dpo", [PAIR] * 3 + [PAIR | {"chosen": "ab"}], model(), data={"unreadable": "drop"})
    assert found.errors == []
    assert "line 4: chosen and rejected are the same" in found.notices[0]
