"""What every format does with hostile files and folders: an error that says why, at once, and nothing else.

Each test begins with a genuine checkpoint of each of SOURCES, which are all formats that are imported, and
replaces one of its files. What is particular to one format has tests beside the format's own.
"""

import contextlib
import copy
import functools
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from dcp_program import Program
from deepspeed_folders import named_as_deepspeeds, zero_folder
from families import make, make_model
from peft import LoraConfig, get_peft_model
from runs import ABOUT, Finished, join
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from test_formats import begun, update
from transformers import AutoModelForCausalLM

from cairn.checkpoint.store import CheckpointStore
from cairn.formats import EXPORTERS, FORMATS
from cairn.launch import main
from cairn.run.connections import free_port

SECONDS = 60
"""In which a refusal must have come: none of these files holds more than a megabyte."""
GROWTH = 400 << 20
"""Bytes of memory that a refusal may take, imports included."""


def in_this_process(*arguments: object) -> Finished:
    """Run the `ckpt` command."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ckpt", *map(str, arguments)])
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main.ckpt()
    return Finished(code, said.getvalue())


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
    path.write_bytes(of_zeros())


@functools.cache
def of_zeros() -> bytes:
    """The archive, which takes seconds to make."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(256):
                entry.write(bytes(4 << 20))
        archive.writestr("archive/version", "3\n")
    return whole.getvalue()


class Command:
    """A pickle of it runs a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def code(path: Path) -> None:
    """A pickle that runs a command, which makes EXECUTED beside the file."""
    path.write_bytes(pickle.dumps(Command(f"touch {path.parent / EXECUTED}"), protocol=2))


def code_in_archive(path: Path) -> None:
    """The same in a file of torch.save."""
    with open(path, "wb") as file:  # torch takes no path that begins with a dot
        torch.save({"model": Command(f"touch {path.parent / EXECUTED}"), "w": torch.ones(1)}, file)


def loop(path: Path) -> None:
    """A link to itself."""
    path.unlink()
    path.symlink_to(path)


def outside(path: Path) -> None:
    """A link to a file of the system."""
    path.unlink()
    path.symlink_to("/etc/passwd")


def many(path: Path) -> None:
    """An archive of ten thousand entries that are all the same bytes."""
    directory = b"".join(
        struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 1 << 20, 1 << 20, 20, 0, 0, 0, 0, 0, 0)
        + f"archive/data/{number:07}".encode()
        for number in range(10_000)
    )
    body = b"PK\3\4" + bytes(1 << 20)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 10_000, 10_000, len(directory), len(body), 0)
    path.write_bytes(body + directory + end)


EXECUTED = "executed"
ATTACKS = [
    *(pipe, device, folder, loop, outside, nothing, half, garbage, huge_numbers, deep, bomb, many),
    *(code, code_in_archive),
]
BESIDE = (".jinja", ".txt", ".model", ".md")
"""Suffixes of files beside the weights that are only copied."""
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
REFUSED = (1, 2)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step, and the model's folder."""
    place = tmp_path_factory.mktemp("hostile")
    step_of(place)
    return place


@dataclass(frozen=True)
class Made:
    """A genuine checkpoint, how it is imported, and what the import makes."""

    folder: Path
    arguments: tuple[object, ...]
    truth: dict[str, torch.Tensor]


def exported(name: str, *more: object) -> Callable[..., str]:
    """Makes a checkpoint by exporting the step; returns the name of its format."""

    def make(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
        done = run("export", genuine / "run", out, "--format", name, *more)
        if done.code == 2 and "needs" in done.output:
            pytest.skip(done.output.strip())
        assert done.code == 0, done.output
        return name

    return make


def old_shards(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
    """Weights as Hugging Face's folders had them: two files of torch.save, and an index."""
    shutil.copytree(genuine / "hf", out)
    weights = list(load_file(out / "model.safetensors").items())
    (out / "model.safetensors").unlink()
    files = {f"pytorch_model-0000{n + 1}-of-00002.bin": dict(weights[n::2]) for n in range(2)}
    for file, part in files.items():
        torch.save(part, out / file)
    places = {name: file for file, part in files.items() for name in part}
    (out / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return "hf"


def older_file(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
    """One file of torch.save before 1.6, which is no archive."""
    shutil.copytree(genuine / "hf", out)
    weights = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    torch.save(weights, out / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return "hf"


def partitions(stage: int) -> Callable[..., str]:
    """Makes a folder of two ranks with DeepSpeed's ZeRO."""

    def make(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
        trained = begun("qwen3_tied")
        for _ in range(2):
            update(trained)
        zero_folder(trained, stage, 2).write(out)
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(genuine / "hf" / file, out / file)
        return "deepspeed"

    return make


def shards(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
    """Makes a folder of verl's."""
    policy = out / "global_step_2" / "actor"
    policy.mkdir(parents=True)
    group = join(0, 1, free_port())
    try:
        program = Program(group, genuine / "hf")
        for number in (1, 2):
            program.step(number)
        for kind, part in (("model", program.model), ("optim", program.optimizer)):
            torch.save(part.state_dict(), policy / f"{kind}_world_size_1_rank_0.pt")
    finally:
        group.leave()
    shutil.copytree(genuine / "hf", policy / "huggingface")
    (policy / "huggingface" / "model.safetensors").unlink()
    (policy / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (out / "latest_checkpointed_iteration.txt").write_text("2")
    return "verl"


def adapter(run: Callable[..., Finished], genuine: Path, out: Path) -> str:
    """An adapter that PEFT itself has written."""
    base = AutoModelForCausalLM.from_pretrained(genuine / "hf")
    about = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, about).save_pretrained(out)
    return "peft"


SOURCES: dict[str, Callable[..., str]] = {
    **{name: exported(name) for name in sorted(FORMATS.keys() & EXPORTERS.keys() - {"peft"})},
    "peft": adapter,
    "hf of several files": exported("hf", "--shard-size", "100K"),
    "hf of several .bin files": old_shards,
    "hf before torch 1.6": older_file,
    "deepspeed zero 1": partitions(1),
    "deepspeed zero 3": partitions(3),
    "verl": shards,
}


@pytest.fixture(scope="module", params=draws.cases(list(SOURCES), "hostile sources", 6))
def made(request: pytest.FixtureRequest, genuine: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A genuine checkpoint of each kind."""
    out = tmp_path_factory.mktemp("made") / "out"
    name = SOURCES[request.param](in_this_process, genuine, out)
    own = list(out.rglob("config.json"))
    bring = ("--format", name, "--no-verify", *(() if own else ("--model", genuine / "hf")))
    done = in_this_process("import", out, out.parent / "run", *bring)
    assert done.code == 0, done.output
    (step,) = (out.parent / "run" / "checkpoints").glob("step_*")
    return Made(out, bring, tensors_of(step))


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    """Weights, and the optimiser's state."""
    files = step.glob("*/*.safetensors")
    return {
        f"{path.parent.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()
    }


def read_files(folder: Path) -> list[Path]:
    """The files of which the content matters: of those that differ in a number only, the first."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kinds = {re.sub(r"[0-9]+", "#", path.name): path for path in reversed(files)}
    return sorted(path for path in kinds.values() if path.suffix not in BESIDE and path.name not in COPIED)


def try_it(made: Made, new: Path, what: str) -> None:
    """Import: it fails and leaves nothing, or makes what it does of the genuine checkpoint."""
    store = CheckpointStore(new / "checkpoints")
    with at_once():
        done = in_this_process("import", made.folder, new, *made.arguments)
    what = f"{what}: {done.output}"
    assert done.code in (0, *REFUSED), what
    assert done.code == 0 or (store.steps(), store.debris()) == ([], []), what
    assert not list(made.folder.rglob(EXECUTED)), what
    for step in store.steps():  # what was replaced is not needed
        found = tensors_of(store.folder(step))
        wrong = {
            name for name in found if name not in made.truth or not torch.equal(found[name], made.truth[name])
        }
        assert not wrong, what
        assert found.keys() >= {name for name in made.truth if name.startswith("model/")}, what
        store.delete(step)


@pytest.mark.slow
def test_a_file_is_not_what_it_should_be(made: Made, tmp_path: Path):
    """Each file, replaced in each way."""
    for file in read_files(made.folder):
        content = file.read_bytes()
        for attack in ATTACKS:
            attack(file)
            try_it(made, tmp_path / "new", f"{file}, {attack.__name__}")
            file.rmdir() if file.is_dir() else file.unlink()
            file.write_bytes(content)


WRONG = [math.nan, math.inf, -1, 10**30, "../../x", None, [], {}, True]
MOST_PLACES = 12
"""Values that are replaced in one file."""


def places_in(value: object, depth: int = 6) -> Iterator[tuple[object, ...]]:
    """The places of values in nested dictionaries and lists: of those in inner ones, the first three."""
    if depth and isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if depth == 6 else keys[:3]:
            yield (key,)
            yield from ((key, *inner) for inner in places_in(value[key], depth - 1))


def with_value(value: Any, place: tuple[Any, ...], wrong: object) -> Any:
    """A copy in which another value is in a place."""
    if not place:
        return wrong
    copied = copy.copy(value)
    copied[place[0]] = with_value(value[place[0]], place[1:], wrong)
    return copied


@pytest.mark.slow
def test_a_value_is_not_what_it_should_be(made: Made, tmp_path: Path):
    """Values in files of JSON and of torch.save, replaced by numbers that are none, paths, and so on."""
    for file in read_files(made.folder):
        whole = file.read_bytes()
        is_json = file.suffix == ".json"
        if file.suffix == ".distcp" or not (is_json or zipfile.is_zipfile(file)):
            continue
        with named_as_deepspeeds():
            value = json.loads(whole) if is_json else torch.load(file, weights_only=False)
        places = list(places_in(value))
        chosen = places[:: math.ceil(len(places) / MOST_PLACES)] if places else []
        for number, place in enumerate(chosen):
            wrong = WRONG[number % len(WRONG)]
            changed = with_value(value, place, wrong)
            if is_json:
                file.write_text(json.dumps(changed))
            else:
                with named_as_deepspeeds():
                    torch.save(changed, file)
            try_it(made, tmp_path / "new", f"{file}, {place} is {wrong}")
        file.write_bytes(whole)


@pytest.mark.parametrize("path", ["../../../etc/passwd", "/etc/passwd", "..", "a/../b", "", "\0"])
@pytest.mark.parametrize(
    ("name", "index", "content"),
    [
        ("hf", "model.safetensors.index.json", {"weight_map": {"w": "PATH"}}),
        ("hf", "pytorch_model.bin.index.json", {"weight_map": {"w": "PATH"}}),
        ("deepspeed", "latest", "PATH"),
        ("megatron", "latest_checkpointed_iteration.txt", "PATH"),
        ("verl", "latest_checkpointed_iteration.txt", "PATH"),
    ],
)
def test_an_index_names_a_file_elsewhere(
    genuine: Path, tmp_path: Path, name: str, index: str, content: Any, path: str
):
    """It is refused, and nothing of what lies there is shown."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(genuine / "hf" / "config.json", source)
    whole = content if isinstance(content, str) else json.dumps(content)
    (source / index).write_text(whole.replace("PATH", path if content == "PATH" else json.dumps(path)[1:-1]))
    with at_once():
        done = in_this_process("import", source, tmp_path / "new", "--format", name)
    assert done.code in REFUSED, done.output
    assert not (tmp_path / "new").exists()
    assert "root:" not in done.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 10**15}, "hidden_size is"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "no configuration of a model"),
        ({"hidden_size": "wide"}, "no configuration of a model"),
    ],
)
def test_a_configuration_is_not_believed(genuine: Path, tmp_path: Path, changes: dict, said: str):
    """Nothing is built of absurd numbers, and no code that it names is run."""
    folder = tmp_path / "hf"
    shutil.copytree(genuine / "hf", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with at_once():
        done = in_this_process("import", folder, tmp_path / "new")
    assert (done.code, said in done.output) == (1, True), done.output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../../out", "/etc/passwd", "a/../../b", ".."])
def test_names_are_not_paths(genuine: Path, tmp_path: Path, name: str):
    """A tensor's name is only a name: nothing is written under it."""
    folder = tmp_path / "deep" / "hf"
    shutil.copytree(genuine / "hf", folder)
    weights = load_file(folder / "model.safetensors")
    torch.save({**weights, name: torch.ones(3)}, folder / "w.pt")
    before = sorted(tmp_path.rglob("*"))
    done = in_this_process("import", folder / "w.pt", tmp_path / "new")
    assert (done.code, "have no place in the model" in done.output) == (1, True), done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_does_not_copy_other_files_into_a_run(genuine: Path, tmp_path: Path):
    """A model's folder may link to its files in Hugging Face's cache, but to none elsewhere."""
    cache = tmp_path / "models--a--b"
    folder = cache / "snapshots" / "0"
    shutil.copytree(genuine / "hf", folder)
    (cache / "blobs").mkdir()
    (folder / "config.json").rename(cache / "blobs" / "1")
    (folder / "config.json").symlink_to("../../blobs/1")
    assert in_this_process("import", folder, tmp_path / "good").code == 0
    (tmp_path / "secret").write_text("mine")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    done = in_this_process("import", folder, tmp_path / "bad")
    assert (done.code, "notes.txt: is a link to" in done.output) == (1, True), done.output
    assert not (tmp_path / "bad").exists()
