"""`ckpt average`, `ckpt copy`, and `ckpt diff` across formats, on small models."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from families import make, make_model
from runs import ABOUT, Finished
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cairn.checkpoint.checksums import chunk_crc
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.layout import find_tensors
from cairn.checkpoint.tensors.sharded_files import read_tensor
from cairn.checkpoint.tensors.stream_writer import write_sources
from cairn.checkpoint.tensors.verified_copy import noted
from cairn.formats.transfer.average import ema_weights
from cairn.launch import main


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


def commit(store: CheckpointStore, step: int, model: Path, run_id: str = "0badcafe") -> Path:
    """A step with the weights of a Hugging Face folder, and some state."""
    store.begin(step, ["model", "trainer"])
    files = {f"model/{path.name}": path.read_bytes() for path in model.iterdir()}
    files["trainer/state.json"] = json.dumps({"progress": {"step": step}, "optimizer": "AdamW"}).encode()
    moments = {"model.norm.weight.exp_avg": np.full(64, step, np.float32)}
    files["trainer/optimizer.safetensors"] = save(moments, {"format": "pt"})
    store.write_part(step, "files", files, "run:1")
    store.commit(step, {"files": "run:1"}, timeout=0.0, about={**ABOUT, "run_id": run_id})
    return store.folder(step)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """The store of a run with three steps of the same model, and other weights in each."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = make("qwen3_tied", tmp_path / "hf")
    for step in (1, 2, 3):
        make_model("qwen3_tied", seed=step).save_pretrained(folder)
        commit(store, step, folder)
    return store


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Averages


@pytest.mark.parametrize(
    ("arguments", "shares"),
    [
        ((), (1 / 3, 1 / 3, 1 / 3)),
        (("--weights", "1,0,3"), (0.25, 0.0, 0.75)),
        (("--ema", "0.5"), (0.25, 0.25, 0.5)),
    ],
)
def test_an_average_of_steps(ckpt, store, tmp_path: Path, arguments: tuple[str, ...], shares):
    """Each value is the mean that float64 gives, and transformers opens the folder."""
    steps = [store.folder(step) for step in (1, 2, 3)]
    finished = ckpt("average", *steps, tmp_path / "out", *arguments)
    assert finished.code == 0, finished.output
    assert "read back and equal" in finished.output
    assert "weights only" in finished.output
    found, each = weights(tmp_path / "out"), [weights(step / "model") for step in steps]
    assert found.keys() == each[0].keys()
    for name, tensor in found.items():
        mean = sum(share * named[name].double() for share, named in zip(shares, each, strict=True))
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.get_parameter("model.norm.weight"), found["model.norm.weight"])


def test_an_average_in_another_data_type(ckpt, store, tmp_path: Path):
    """The mean of float32 values is rounded once; what happens is in the JSON, too."""
    steps = [store.folder(step) for step in (1, 3)]
    finished = ckpt(
        "average", *steps, tmp_path / "out", "--dtype", "bfloat16", "--shard-size", "64K", "--json"
    )
    assert json.loads(finished.output)["weights"] == [0.5, 0.5]
    found, (one, three) = weights(tmp_path / "out"), (weights(step / "model") for step in steps)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for name, tensor in found.items():
        assert torch.equal(tensor, (one[name] * 0.5 + three[name] * 0.5).bfloat16()), name


def test_weights_of_a_moving_average():
    """As the recursion gives them."""
    average = [1.0, 0.0, 0.0, 0.0]
    for number in range(1, 4):
        average = [0.9 * value + 0.1 * (place == number) for place, value in enumerate(average)]
    assert ema_weights(4, 0.9) == pytest.approx(average)
    assert sum(ema_weights(4, 0.9)) == pytest.approx(1)


def test_what_has_no_mean_is_refused(ckpt, store, tmp_path: Path):
    """Other models, by what differs; damage; the same step twice; and nothing is left behind."""
    out = tmp_path / "out"
    folder = make("llama", tmp_path / "llama")
    other = commit(CheckpointStore(tmp_path / "other"), 5, folder)
    finished = ckpt("average", store.folder(1), other, out)
    assert finished.code == 1
    for said in (
        "are of different models",
        "lm_head.weight is only in",
        "model.layers.0.self_attn.q_norm.weight is only in",
        'config.json: architectures is ["Qwen3ForCausalLM"] and ["LlamaForCausalLM"]',
    ):
        assert said in finished.output
    shapes = tmp_path / "shapes"
    shutil.copytree(tmp_path / "hf", shapes)
    tensors = load_file(shapes / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(32)}, shapes / "model.safetensors")
    other = commit(CheckpointStore(tmp_path / "third"), 6, shapes)
    finished = ckpt("average", store.folder(1), other, out)
    assert (finished.code, "model.norm.weight is [64] and [32]" in finished.output) == (1, True)
    twice = ckpt("average", store.folder(1), store.folder(1), out)
    assert (twice.code, "each given once" in twice.output) == (2, True)
    for wrong in (("--weights", "1,2"), ("--weights", "1,x,1"), ("--weights", "0,0,0"), ("--ema", "1")):
        assert ckpt("average", *map(store.folder, (1, 2, 3)), out, *wrong).code == 2, wrong
    flip(store.folder(2) / "model" / "model.safetensors")
    damaged = ckpt("average", *map(store.folder, (1, 2, 3)), out)
    assert (damaged.code, "step_2/model/model.safetensors: changed between" in damaged.output) == (1, True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_whole_numbers_must_be_the_same(ckpt, tmp_path: Path):
    """They are counters and indices, and stay as they are."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    folder = make("qwen3_tied", tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    for step, number in ((1, 7), (2, 7), (3, 8)):
        save_file({**tensors, "counter": torch.tensor([number])}, folder / "model.safetensors")
        commit(store, step, folder)
    finished = ckpt("average", store.folder(1), store.folder(2), tmp_path / "out")
    assert finished.code == 0, finished.output
    assert weights(tmp_path / "out")["counter"].tolist() == [7]
    refused = ckpt("average", store.folder(1), store.folder(3), tmp_path / "no")
    assert (refused.code, "counter: holds whole numbers, which differ" in refused.output) == (1, True)


# Copies


def test_a_copy_is_the_step(ckpt, store, tmp_path: Path):
    """With its number and its run, verified; a run's newest good step, if a run is given; once."""
    finished = ckpt("copy", tmp_path / "run", tmp_path / "backup")
    assert finished.code == 0, finished.output
    there = CheckpointStore(tmp_path / "backup" / "checkpoints")
    assert there.steps() == [3]
    assert verify(there.folder(3)) == verify(store.folder(3))
    assert weights(there.folder(3) / "model").keys() == weights(store.folder(3) / "model").keys()
    again = ckpt("copy", store.folder(3), tmp_path / "backup")
    assert (again.code, "exists already" in again.output) == (1, True)
    assert ckpt("copy", store.folder(1), there.root).code == 0, "the checkpoints folder itself"
    assert there.steps() == [1, 3]
    shutil.rmtree(store.folder(1))
    assert ckpt("copy", there.folder(1), tmp_path / "run").code == 0, "back to its run"
    assert store.steps() == [1, 2, 3]


def test_a_copy_of_links_takes_no_space(ckpt, store, tmp_path: Path):
    """Its files are the step's own, and stay when the step is deleted."""
    assert ckpt("copy", store.folder(2), tmp_path / "backup", "--link").code == 0
    there = CheckpointStore(tmp_path / "backup" / "checkpoints")
    for name in ("model/model.safetensors", "trainer/optimizer.safetensors"):
        assert os.path.samefile(there.folder(2) / name, store.folder(2) / name)
    store.delete(2)
    verify(there.folder(2))


def test_copies_that_are_refused(ckpt, store, tmp_path: Path):
    """Damaged ones, those into the folder of another run, and into themselves; nothing is left behind."""
    flip(store.folder(2) / "trainer" / "optimizer.safetensors")
    damaged = ckpt("copy", store.folder(2), tmp_path / "backup")
    assert (damaged.code, "changed between" in damaged.output) == (1, True)
    assert not (tmp_path / "backup").exists()
    other = CheckpointStore(tmp_path / "other" / "checkpoints")
    commit(other, 5, tmp_path / "hf", run_id="feedbeef")
    refused = ckpt("copy", store.folder(3), tmp_path / "other")
    assert (refused.code, "holds the run feedbeef" in refused.output) == (2, True)
    assert other.steps() == [5]
    assert other.debris() == []
    inside = ckpt("copy", store.folder(3), store.folder(3))
    assert (inside.code, "inside the checkpoint itself" in inside.output) == (2, True)
    verify(store.folder(3))


# Differences across formats


def test_a_step_and_its_export_differ_in_nothing(ckpt, store, tmp_path: Path):
    """As DCP, with the optimiser's state; in another data type, the rounding is what differs."""
    step = store.folder(2)
    shutil.rmtree(step)
    folder = tmp_path / "hf"
    moments = {
        f"{name}.{kind}": torch.full_like(tensor, 0.5)
        for name, tensor in load_file(folder / "model.safetensors").items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    store.begin(2, ["model", "trainer"])
    save_file(moments, tmp_path / "moments", {"format": "pt"})
    files = {f"model/{path.name}": path.read_bytes() for path in folder.iterdir()}
    files |= {
        "trainer/optimizer.safetensors": (tmp_path / "moments").read_bytes(),
        "trainer/state.json": json.dumps({"progress": {"step": 2}, "optimizer": "AdamW"}).encode(),
    }
    store.write_part(2, "files", files, "run:1")
    store.commit(2, {"files": "run:1"}, timeout=0.0, about=ABOUT)
    assert ckpt("export", step, tmp_path / "dcp", "--format", "dcp").code == 0
    report = json.loads(ckpt("diff", step, tmp_path / "dcp", "--json").output)
    assert (report["a"]["format"], report["b"]["format"], report["b"]["step"]) == ("cairn", "dcp", 2)
    for part in (report, report["optimizer"]):
        assert part["only_in_a"] == part["only_in_b"] == part["other_shape"] == part["other_dtype"] == []
        assert part["tensors"]
        assert all(row["changed"] == row["max_change"] == 0 for row in part["tensors"])
    assert len(report["optimizer"]["tensors"]) == len(moments)

    assert ckpt("export", step, tmp_path / "half", "--dtype", "bfloat16").code == 0
    report = json.loads(ckpt("diff", tmp_path / "half", step, "--json").output)
    assert report["optimizer"] is None
    assert set(report["other_dtype"]) == {row["name"] for row in report["tensors"]}
    exact = weights(step / "model")
    for row in report["tensors"]:
        error = (exact[row["name"]] - exact[row["name"]].bfloat16().float()).abs()
        assert row["max_change"] == pytest.approx(error.max().item())
        assert row["changed"] == int((error > 0).sum())
    printed = ckpt("diff", tmp_path / "half", tmp_path / "dcp").output
    assert "values that differ" in printed
    assert "half, no step, hf" in printed


def test_experts_are_compared_by_the_hubs_names(ckpt, tmp_path: Path):
    """transformers has the experts of a layer in one tensor, the hub each by itself."""
    folder = make("qwen3_moe", tmp_path / "hf")
    model = make_model("qwen3_moe")
    state = model.state_dict()
    state["model.norm.weight"][3] += 0.25
    state["model.layers.1.mlp.experts.down_proj"][2, 0, 0] = float("inf")
    torch.save(state, folder / "w.pt")
    report = json.loads(ckpt("diff", folder, folder / "w.pt", "--json").output)
    assert report["only_in_a"] == report["only_in_b"] == []
    changed = {row["name"]: row for row in report["tensors"] if row["changed"]}
    assert set(changed) == {"model.norm.weight", "model.layers.1.mlp.experts.2.down_proj.weight"}
    assert changed["model.norm.weight"]["max_change"] == pytest.approx(0.25)
    infinite = changed["model.layers.1.mlp.experts.2.down_proj.weight"]
    assert (infinite["changed"], infinite["not_finite"], infinite["max_change"]) == (1, 1, 0)


def test_what_is_no_checkpoint_has_no_difference(ckpt, store, tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    finished = ckpt("diff", store.folder(1), tmp_path / "nothing")
    assert (finished.code, str(tmp_path / "nothing") in finished.output) == (2, True)


# Writing in blocks


@pytest.mark.parametrize("block", [4096, 3 * 4096, 1 << 20])
def test_blocks_cut_tensors_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    """Between tensors, within values behind an odd number of bytes, and where data types change."""
    monkeypatch.setattr("cairn.checkpoint.tensors.stream_writer.BLOCK_BYTES", block)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3000, generator=generator),
        "odd": torch.randint(0, 2, (4099,), generator=generator).bool(),
        "behind": torch.randn(5000, generator=generator),
        "converted": torch.randn(70_001, generator=generator),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.5, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    sources = find_tensors(tmp_path, "in")
    dtypes = {"converted": torch.bfloat16, "behind": torch.float64}
    counted: list[int] = []
    sums = write_sources(tmp_path, noted(sources, dtypes), "out", on_bytes=counted.append)
    path = tmp_path / "out.safetensors"
    back = load_file(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.to(dtypes.get(name, tensor.dtype))), name
        assert torch.equal(read_tensor(find_tensors(tmp_path, "out")[name]), back[name])
    assert sum(counted) == path.stat().st_size
    assert sums["out.safetensors"].chunks() == [chunk_crc(path, 0)]
