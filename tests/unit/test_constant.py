"""Tensors that no step changes: later steps share their files, and no accident of one harms the others."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import draws
import pytest
import torch
from runs import ABOUT, CONFIGS, REPOSITORY, flip
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cairn.checkpoint.fork import fork
from cairn.checkpoint.manifest import Damaged
from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.saving.arena import SaveFailed
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import load_step
from cairn.config.ckpt import CkptConfig
from cairn.launch import main
from cairn.run import faults
from cairn.run.errors import UsageError
from cairn.trainer.models.model import freeze, frozen_weights

MODEL = "model/model"
BASE = {"base.a", "base.b", "base.empty"}
FILES = {"model/config.json": b"{}\n"}
SHARED = "model/model-00001-of-00002.safetensors"
Tensors = dict[str, dict[str, torch.Tensor]]


def state(step: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(99)
    return {
        MODEL: {
            "head": torch.full((1000,), float(step)),
            "base.a": torch.randn(5_000_003, generator=generator),
            "base.b": torch.randn(33, 5, generator=generator).bfloat16().t(),
            "base.empty": torch.zeros(0, 4),
        },
        "trainer/optimizer": {"head.exp_avg": torch.full((1000,), float(-step))},
    }


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def make_saver(store: CheckpointStore) -> Iterator[Callable[..., Saver]]:
    made: list[Saver] = []

    def make(store: CheckpointStore = store, **how: object) -> Saver:
        options = SaveOptions(**{"part_timeout": 60.0, "constant": {MODEL: BASE}, **how})
        made.append(Saver(store, SavingRank(0, 1, f"run:{len(made)}"), how=options))
        return made[-1]

    yield make
    for saver in made:
        saver.close()


def save(saver: Saver, step: int, tensors: Tensors | None = None) -> Path:
    saver.save(step, tensors or state(step), FILES, ABOUT)
    saver.finish()
    verify(saver.store.folder(step))
    return saver.store.folder(step)


def assert_holds(folder: Path, step: int) -> None:
    """Read by our loader, after a check of every byte."""
    verify(folder)
    loaded = {
        stem: {n: torch.zeros_like(t, memory_format=torch.contiguous_format) for n, t in named.items()}
        for stem, named in state().items()
    }
    load_step(folder, loaded)
    for stem, named in state(step).items():
        assert all(torch.equal(loaded[stem][name], tensor) for name, tensor in named.items())


def same_file(*folders: Path) -> bool:
    return len({(folder / SHARED).stat().st_ino for folder in folders}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"read_back": True}, {"packed": ("trainer",)}])
def test_later_steps_share_the_files(make_saver, store, how: dict):
    """In files of their own, which the index names; all else is each step's own."""
    saver = make_saver(**how)
    folders = [save(saver, step) for step in (1, 2, 3)]
    assert same_file(*folders)
    assert load_file(folders[0] / SHARED).keys() == BASE
    for step, folder in enumerate(folders, start=1):
        assert_holds(folder, step)
        assert load_file(folder / "model/model-00002-of-00002.safetensors").keys() == {"head"}
        assert {p.stat().st_nlink for p in folder.rglob("*") if p.is_file()} == {1, 3}


def test_without_it_nothing_is_shared_and_the_files_are_as_ever(make_saver):
    saver = make_saver(constant={})
    folders = [save(saver, step) for step in (1, 2)]
    assert (folders[0] / "model/model.safetensors").stat().st_nlink == 1


def test_retention_never_takes_what_a_kept_step_needs(make_saver, store):
    saver = make_saver()
    for step in (1, 2, 3):
        save(saver, step)
    assert apply_retention(store, CkptConfig(keep_last=1)) == [1, 2]
    assert (store.folder(3) / SHARED).stat().st_nlink == 1
    assert_holds(store.folder(3), 3)


def test_a_resumed_run_links_to_what_it_loaded(make_saver, store):
    first = save(make_saver(), 1)
    assert same_file(first, save(make_saver(parent=first), 2))


def _gone(folder: Path) -> None:
    CheckpointStore(folder.parent).delete(1)


def _cut(folder: Path) -> None:
    with open(folder / SHARED, "r+b") as file:
        file.truncate(10_000)


def _other_header(folder: Path) -> None:
    flip(folder / SHARED, 60)


def _bad_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.slow
@pytest.mark.parametrize("what", [_gone, _cut, _other_header, _bad_manifest])
def test_what_cannot_be_linked_is_written(make_saver, store, what: Callable[[Path], None]):
    """The parent was deleted or damaged since: the step is whole all the same."""
    saver = make_saver()
    first = save(saver, 1)
    what(first)
    save(saver, 2)
    assert (store.folder(2) / SHARED).stat().st_nlink == 1
    assert_holds(store.folder(2), 2)
    assert same_file(store.folder(2), save(saver, 3))


def test_damage_in_values_is_found_when_saves_are_read_back(make_saver, store):
    """Then they are written anew; else `verify` finds it in every step that shares the file."""
    saver = make_saver(read_back=True)
    first = save(saver, 1)
    flip(first / SHARED, 1_000_000)
    save(saver, 2)
    assert_holds(store.folder(2), 2)
    with pytest.raises(Damaged):
        verify(first)
    trusting = make_saver(parent=first)
    trusting.save(3, state(3), FILES, ABOUT)
    trusting.finish()
    with pytest.raises(Damaged, match=r"00001-of-00002.*changed"):
        verify(store.folder(3))
    assert store.newest_good()[0] == store.folder(2)


def test_another_file_system_cannot_be_linked_to(make_saver, store):
    """A real one; the run goes on from a step there, and writes its own file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(store.root.parent.parent).st_dev:
            pytest.skip("/dev/shm is not another file system here")
        first = save(make_saver(CheckpointStore(folder)), 1)
        save(make_saver(parent=first), 2)
    assert_holds(store.folder(2), 2)


def test_other_tensors_are_not_linked(make_saver, store):
    """A run that freezes something else writes files of its own."""
    first = save(make_saver(), 1)
    second = save(make_saver(constant={MODEL: {"base.a"}}, parent=first), 2)
    assert not same_file(first, second)
    assert_holds(second, 2)


def test_values_that_changed_fail_the_save(make_saver, store):
    """What was said not to change did: nothing is committed, and the parent stays as it was."""
    saver = make_saver()
    save(saver, 1)
    changed = state(2)
    changed[MODEL]["base.a"][7] += 1
    with pytest.raises(SaveFailed, match="link to a file of other values"):
        save(saver, 2, changed)
    assert store.steps() == [1]
    assert_holds(store.folder(1), 1)
    save(saver, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["save.before_part:kill", "save.before_fsync:EIO", "commit.before_manifest:EIO"]
)
def test_a_save_that_failed_never_writes_into_what_it_had_linked(make_saver, store, monkeypatch, point: str):
    """Debris with links to the parent's files is removed, not written over."""
    saver = make_saver()
    save(saver, 1)
    saver.close()
    monkeypatch.setattr(faults, "_reached", {})
    monkeypatch.setenv("CAIRN_FAULT", point)
    failing = make_saver(parent=store.folder(1))
    with pytest.raises(SaveFailed):
        save(failing, 2)
    monkeypatch.delenv("CAIRN_FAULT")
    assert store.steps() == [1]
    changed = state(2)
    changed[MODEL]["base.a"] += 1
    save(make_saver(), 2, changed)  # which has nothing to link to, and so writes the files
    assert_holds(store.folder(1), 1)
    assert not same_file(store.folder(1), store.folder(2))


def test_a_fork_can_share_tensor_files(make_saver, store, tmp_path: Path):
    """Small files are copies, since a run may have its own; without --link all are."""
    source = save(make_saver(), 3)
    linked, _ = fork(source, tmp_path / "linked", link=True)
    copied, _ = fork(source, tmp_path / "copied")
    assert_holds(linked, 3)
    assert same_file(source, linked)
    assert not same_file(source, copied)
    assert not os.path.samefile(source / "model/config.json", linked / "model/config.json")
    store.delete(3)
    assert_holds(linked, 3)


# freeze


def llama() -> LlamaForCausalLM:
    about = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=3, **about))


def test_patterns_freeze_weights():
    model = llama()
    freeze(model, ["model.embed_tokens.*", "model.layers.[01].mlp.*"])
    frozen = frozen_weights(model)
    assert "model.embed_tokens.weight" in frozen
    assert {name.split(".mlp.")[0] for name in frozen if ".mlp." in name} == {
        "model.layers.0",
        "model.layers.1",
    }
    assert len(frozen) == 1 + 2 * 3
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "match"), [(["model.layer.*"], "matches no weight"), (["*"], "leaves no weight")]
)
def test_patterns_that_can_not_be_meant_are_refused(patterns: list[str], match: str):
    with pytest.raises(UsageError, match=match):
        freeze(llama(), patterns)


@draws.seldom
@pytest.mark.parametrize("command", draws.cases(["sft", "reward"], "patterns", 1))
def test_patterns_are_refused_before_anything_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By a dry run as well; a reward model's own weights have names, too. So is sharing rows, or matrices,
    unequally, or experts that the model does not have."""
    monkeypatch.chdir(REPOSITORY)
    argv = [command, "@", f"{CONFIGS}/{command}.toml", "--output-dir", str(tmp_path / "run"), "--freeze"]
    for flags in (("nonsense.*",), ("nonsense.*", "--dry-run")):
        monkeypatch.setattr("sys.argv", [*argv, *flags])
        assert getattr(main, command)() == 2
        error = "error: --freeze = 'nonsense.*' matches no weight of"
        assert error in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    monkeypatch.setattr("sys.argv", [*argv, "model.embed_tokens.*", "--dry-run"])
    assert getattr(main, command)() == 0
    for axis, ranks, code in (("context", 3, 2), ("context", 2, 0), ("tensor", 3, 2), ("tensor", 2, 0)):
        sharing = ("--workers", "6", f"--parallel.{axis}", str(ranks), "--dry-run")
        monkeypatch.setattr("sys.argv", [*argv[:-1], *sharing])
        assert getattr(main, command)() == code
        error = f"error: --parallel.{axis} = 3 can't serve Qwen3ForCausalLM: its 4 attention heads can't be"
        assert (error in capsys.readouterr().err) == (code == 2)
    monkeypatch.setattr("sys.argv", [*argv[:-1], "--workers", "6", "--parallel.expert", "2", "--dry-run"])
    assert getattr(main, command)() == 2
    error = "error: --parallel.expert = 2 can't serve Qwen3ForCausalLM: its layers have no experts"
    printed = capsys.readouterr().err
    assert error in printed
    assert printed.count("error: ") == 1, "one step after the other finds it"


def test_transformers_opens_what_is_split(make_saver, store):
    """Files of frozen weights and others are a sharded model like any other."""
    model = llama()
    freeze(model, ["model.layers.*"])
    tensors = {MODEL: {name: p.detach() for name, p in model.named_parameters()}}
    saver = make_saver(constant={MODEL: frozen_weights(model)})
    for step in (1, 2):
        saver.save(step, tensors, {"model/config.json": model.config.to_json_string().encode()}, ABOUT)
        saver.finish()
    opened = AutoModelForCausalLM.from_pretrained(store.folder(2) / "model")
    assert all(torch.equal(p, tensors[MODEL][name]) for name, p in opened.named_parameters())


def test_a_model_that_exists_has_the_names_of_the_documentation():
    """docs/how-to/optimisers.md shows patterns; those match a real model's names."""
    config = REPOSITORY / CONFIGS / "model"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    freeze(model, ["model.embed_tokens.*", "model.layers.0.*"])
    assert frozen_weights(model)
