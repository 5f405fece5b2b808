"""What every format does with hostile files and folders: an error that says why, at once, and nothing else.

The table is made of a genuine checkpoint of each of TABLE, with one of its files replaced. Other formats have
tests of their own, and so has what is particular to one format.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from families import make, make_model
from runs import ABOUT, Finished
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes

from cairn.checkpoint.store import CheckpointStore
from cairn.launch import main

SECONDS = 60
"""In which a refusal must have come: none of these files holds more than a megabyte."""
GROWTH = 400 << 20
"""Bytes of memory that a refusal may take, imports included."""


@pytest.fixture
def ckpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Run the `ckpt` command in this process."""

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        capsys.readouterr()  # what making models has printed
        code = main.ckpt()
        captured = capsys.readouterr()
        return Finished(code, captured.out + captured.err)

    return run


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Fail if what is done within takes long, as a read from a pipe does, or much memory."""

    def hangs(*_: object) -> None:
        raise TimeoutError("hangs")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    earlier = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < GROWTH


def step_of(folder: Path) -> Path:
    """A step with weights and AdamW's state."""
    model = make("qwen3_tied", folder / "hf")
    make_model("qwen3_tied", seed=1).save_pretrained(model)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        state |= {f"{name}.exp_avg": tensor / 2, f"{name}.exp_avg_sq": tensor.square()}
        state[f"{name}.step"] = torch.tensor(2.0)
    settings = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}
    record = {
        "progress": {"step": 2},
        "optimizer": "AdamW",
        "recipe": {"settings": {f"optimizer.{key}": value for key, value in settings.items()}},
    }
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir()}
    files["trainer/optimizer.safetensors"] = as_bytes(state, {"format": "pt"})
    files["trainer/state.json"] = json.dumps(record).encode()
    store = CheckpointStore(folder / "run" / "checkpoints")
    store.begin(2, ["model", "trainer"])
    store.write_part(2, "files", files, "run:1")
    store.commit(2, {"files": "run:1"}, timeout=0.0, about=ABOUT)
    return store.folder(2)


def pipe(path: Path) -> None:
    """A pipe that nobody writes to: opening it waits for ever."""
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    """A link to a file that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    """A folder with the file's name."""
    path.unlink()
    path.mkdir()


def nothing(path: Path) -> None:
    """An empty file."""
    path.write_bytes(b"")


def half(path: Path) -> None:
    """The first half of the file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def garbage(path: Path) -> None:
    """No format's bytes."""
    path.write_bytes(bytes(range(256)) * 16)


def huge_numbers(path: Path) -> None:
    """Whatever begins with a length has the largest one."""
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def deep(path: Path) -> None:
    """JSON of a hundred thousand brackets."""
    path.write_text("[" * 100_000)


def bomb(path: Path) -> None:
    """A gigabyte of zeros in an archive of a megabyte, under the names that torch's archives have."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(256):
                entry.write(bytes(4 << 20))
        archive.writestr("archive/version", "3\n")


ATTACKS = [pipe, device, folder, nothing, half, garbage, huge_numbers, deep, bomb]
TABLE = ("dcp", "hf", "pt")
"""Formats that other formats' files are made of: DCP folders, safetensors and files of torch.save."""
BESIDE = (".json", ".jinja", ".txt", ".model", ".md")
"""Suffixes of files beside the weights."""
READ = ("config.json", "trainer_state.json")
"""Those of which the content matters."""
REFUSED = (1, 2)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step, and the model's folder."""
    place = tmp_path_factory.mktemp("hostile")
    step_of(place)
    return place


@pytest.mark.parametrize("name", TABLE)
def test_a_file_is_not_what_it_should_be(ckpt, genuine: Path, tmp_path: Path, name: str):
    """Each file, replaced in each way: the import fails and leaves nothing, or is as without that."""
    out = tmp_path / "out"
    done = ckpt("export", genuine / "run", out, "--format", name)
    if done.code:
        pytest.skip(done.output.strip())
    bring = ("--format", name, "--model", genuine / "hf", "--no-verify")
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    step = genuine / "run" / "checkpoints" / "step_2"
    truth = load_file(step / "model" / "model.safetensors")
    weights = {path for path in files if path.suffix not in BESIDE}
    read = weights | {path for path in files if path.name in READ or path.name.endswith(".index.json")}
    store = CheckpointStore(tmp_path / "new" / "checkpoints")
    for file in sorted(read):
        content = (out / file).read_bytes()
        for attack in ATTACKS:
            attack(out / file)
            with at_once():
                done = ckpt("import", out, tmp_path / "new", *bring)
            where = f"{name}, {file}, {attack.__name__}: {done.output}"
            assert done.code in (0, *REFUSED), where
            assert done.code == 0 or (store.steps(), store.debris()) == ([], []), where
            for made in store.steps():  # what was replaced is not needed
                found = load_file(store.folder(made) / "model" / "model.safetensors")
                assert found.keys() == truth.keys(), where
                assert all(torch.equal(found[key], truth[key]) for key in truth), where
                store.delete(made)
            (out / file).rmdir() if (out / file).is_dir() else (out / file).unlink()
            (out / file).write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 10**15}, "hidden_size is"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "no configuration of a model"),
        ({"hidden_size": "wide"}, "no configuration of a model"),
    ],
)
def test_a_configuration_is_not_believed(ckpt, genuine: Path, tmp_path: Path, changes: dict, said: str):
    """Nothing is built of absurd numbers, and no code that it names is run."""
    folder = tmp_path / "hf"
    shutil.copytree(genuine / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with at_once():
        done = ckpt("import", folder, tmp_path / "new")
    assert (done.code, said in done.output) == (1, True), done.output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../../out", "/etc/passwd", "a/../../b", ".."])
def test_names_are_not_paths(ckpt, genuine: Path, tmp_path: Path, name: str):
    """A tensor's name is only a name: nothing is written under it."""
    folder = tmp_path / "deep" / "hf"
    shutil.copytree(genuine / "hf", folder)
    weights = load_file(folder / "model.safetensors")
    torch.save({**weights, name: torch.ones(3)}, folder / "w.pt")
    before = sorted(tmp_path.rglob("*"))
    done = ckpt("import", folder / "w.pt", tmp_path / "new")
    assert (done.code, "have no place in the model" in done.output) == (1, True), done.output
    assert sorted(tmp_path.rglob("*")) == before
