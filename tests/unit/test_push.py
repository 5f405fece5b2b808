"""Pushes of a step's model to a hub: a real server on loopback, which fails now and then."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from families import make
from hub_server import TOKEN, Hub, hub_on_loopback
from runs import ABOUT, flip

from cairn.checkpoint.step_folder import TrainerRecord
from cairn.checkpoint.store import CheckpointStore
from cairn.launch import main
from cairn.remote import hub as pushing

RECORD = TrainerRecord(
    progress={"step": 4, "total_tokens": 900, "total_samples": 32},
    optimizer="AdamW",
    recipe={
        **{"base": "org/base-model", "settings": {"optimizer.lr": 0.002}, "tokenizer": "5eed"},
        "data": {"records": 7, "content": "d1ge57"},
    },
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a Hugging Face directory."""
    return make("qwen3_tied", tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def step(tmp_path: Path, model: Path) -> Path:
    """A step of a run, with all that it says of itself."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.begin(4, ["model", "trainer"])
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir()}
    files["trainer/state.json"] = RECORD.to_json()
    store.write_part(4, "files", files, "run:1")
    store.commit(4, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "parts": ["model", "trainer"]})
    return store.folder(4)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, to which commands find, with a token."""
    with hub_on_loopback() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # the server has none
        monkeypatch.setattr(pushing, "WAIT", 0.0)
        yield found


def push(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command; returns its exit code."""
    monkeypatch.setattr("sys.argv", ["ckpt", "push", *map(str, arguments)])
    return main.ckpt()


def test_a_push_is_one_commit_with_the_model_as_it_is(
    hub: Hub, step: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Files that the hub has are not uploaded again, such as those of another branch."""
    assert push(monkeypatch, step.parents[1], "me/tiny", "--private") == 0
    assert f"{step} is now in me/tiny, branch main" in capsys.readouterr().out
    files = hub.files("me/tiny")
    card = files["README.md"].decode()
    assert files == {path.name: path.read_bytes() for path in model.iterdir()} | {"README.md": card.encode()}
    assert hub.private == {"me/tiny": True}
    assert hub.messages == [f"Step 4 of run {ABOUT['run_id']}"]
    for said in ("base_model: org/base-model", f"Run: {ABOUT['run_id']}", "step 4", "d1ge57", "float32"):
        assert said in card
    uploads = hub.requests["put"]
    assert push(monkeypatch, step, "me/tiny", "--branch", "best", "--message", "The best one", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["branch"] == "best"
    assert said["new"]
    assert hub.files("me/tiny", "best") == files
    assert hub.messages[-1] == "The best one"
    assert hub.requests["put"] == uploads > 0


def test_what_a_failed_push_has_uploaded_is_not_uploaded_again(
    hub: Hub, step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The hub shows nothing of it; a failure that passes is no end of it."""
    hub.fails["commit"] = [503] * pushing.TRIES
    assert push(monkeypatch, step, "me/tiny") == 1
    error = capsys.readouterr().err
    assert f"{pushing.TRIES} times; the same command goes on with the rest" in error
    assert hub.files("me/tiny") == {}
    uploads = hub.requests["put"]
    hub.fails["commit"], hub.fails["create"] = [500], [429]
    assert push(monkeypatch, step, "me/tiny") == 0
    assert "trying again in" in capsys.readouterr().out
    assert hub.requests["put"] == uploads > 0
    assert "config.json" in hub.files("me/tiny")


@pytest.mark.parametrize("code", [401, 403])
def test_a_refusal_is_an_error_at_once_without_the_token(
    hub: Hub, step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
):
    monkeypatch.setenv("HF_TOKEN", "hf_AnotherSecret" if code == 401 else TOKEN)
    hub.fails["commit"] = [code]
    assert push(monkeypatch, step, "me/tiny") == 1
    printed = "".join(capsys.readouterr())
    assert "the token" in printed
    assert "hf_" not in printed
    assert hub.requests["commit"] == (0 if code == 401 else 1)
    assert ("me/tiny" in hub.repositories) == (code == 403)


def test_nothing_is_sent_of_a_damaged_step_or_without_a_token(
    hub: Hub, step: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert push(monkeypatch, step, "two words") == 2
    assert push(monkeypatch, step, "me/tiny", "--card", "nowhere.md") == 2
    with monkeypatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        assert push(offline, step, "me/tiny") == 2
    with monkeypatch.context() as nobody:
        nobody.setattr("huggingface_hub.get_token", lambda: None)
        assert push(nobody, step, "me/tiny") == 2
    assert "set HF_TOKEN, or run `hf auth login`" in capsys.readouterr().err
    weights = next((step / "model").glob("*.safetensors"))
    flip(weights, weights.stat().st_size - 1)
    assert push(monkeypatch, step, "me/tiny") == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert not hub.requests
