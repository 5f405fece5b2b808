"""Supervised fine-tuning from the outside: a run that is stopped and gone on with is as if it never was."""

import csv
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import families
import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForCausalLM
from runs import (
    CONFIGS,
    REPOSITORY,
    Finished,
    Shell,
    assert_same_bits,
    printed,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.api.reading import load_checkpoint
from cairn.checkpoint.manifest import FileEntry
from cairn.config.trainer import SFTDataConfig
from cairn.run.directory import RunDirectory
from cairn.run.signals import REPEAT_SECONDS
from cairn.trainer.data.batches import SFTData

pytestmark = pytest.mark.timeout(900)

RECORDS, BATCH = 200, 12  # so step 17 spans two epochs, and the 20 steps of a half end within one


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set, of which 40 steps see more than two epochs."""
    records = (REPOSITORY / CONFIGS / "sft.jsonl").read_text().splitlines()[:RECORDS]
    path = tmp_path_factory.mktemp("data") / "small.jsonl"
    path.write_text("\n".join(records) + "\n")
    return path


@pytest.fixture(scope="module")
def sft(data: Path) -> tuple:
    """The command line of all runs here: several micro-batches a step, over shuffled epochs."""
    short = ("--seq-len", 32, "--micro-batch-size", 2, "--data.name", data, "--data.batch-size", BATCH)
    return ("sft", "@", f"{CONFIGS}/sft.toml", *short)


@pytest.fixture(scope="module")
def straight(shell: Shell, sft: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 steps on one rank without a stop; through `uv run`, as users start it."""
    run = tmp_path_factory.mktemp("straight") / "run"
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "there is no uv: scripts/test fetches it"
    saving = ("--ckpt.interval", 20, "--ckpt.export.dtype", "bfloat16")
    shell.succeed(uv, "run", "--no-sync", *sft, "--max-steps", 40, *saving, "--output-dir", run)
    return run


@dataclass(frozen=True)
class Parts:
    """A run of 40 steps in three parts: to an interrupt, from there to 20, from there to 40."""

    run: Path
    interrupted: Finished
    stopped_at: int
    roles_then: dict


@pytest.fixture(scope="module")
def parts(shell: Shell, sft: tuple, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """On one rank, and validated every third step, which the run without a stop is not."""
    run = tmp_path_factory.mktemp("parts") / "run"
    held = run.parent / "validation.toml"
    held.write_text(
        f'[[validation]]\nname = "held"\ninterval = 3\nat_start = true\n'
        f'data = {{ name = "{REPOSITORY / CONFIGS / "sft.jsonl"}", split = "train[200:240]" }}\n'
    )
    sft = (*sft, "@", held)
    with shell.start(*sft, "--max-steps", 100_000, "--ckpt", "--output-dir", run) as command:
        command.wait_until((run / "heartbeats" / "trainer_rank0.json").exists)
        (worker,) = command.workers()  # while it imports torch: looking for it takes as long as some steps
        command.wait_until(lambda: rows(run))
        os.kill(worker, signal.SIGSTOP)  # or it may come past 20 on a busy machine before it hears of it
        command.process.send_signal(signal.SIGINT)
        command.wait_until(RunDirectory(run).stop_requested)
        os.kill(worker, signal.SIGCONT)
        interrupted = command.finish()
        command.assert_nothing_survives()
    parts = Parts(run, interrupted, len(rows(run)), read(run / "roles.json"))
    assert parts.stopped_at < 20, "too late to go on from there to 20"
    sinks = ("--sinks.csv", "--sinks.tensorboard", "--log-format", "json")
    tracked = (*sft, "--wandb.mode", "offline", *sinks, "--output-dir", run)
    shell.succeed(*tracked, "--max-steps", 20, "--ckpt.resume", "auto")
    shell.succeed(*tracked, "--max-steps", 40, "--ckpt.resume-step", 20)
    return parts


def test_an_interrupt_saves_at_the_next_step_boundary(parts: Parts):
    """One Ctrl-C: exit code 75, the step that was done last is saved, and the message says how to go on."""
    assert parts.interrupted.code == 75, parts.interrupted.output
    folder = step_folder(parts.run, parts.stopped_at)
    assert f"stopped at step {parts.stopped_at}, saved in {folder}" in parts.interrupted.output
    assert "--ckpt.resume auto" in parts.interrupted.output
    assert steps(parts.run) == [parts.stopped_at, 20, 40]
    assert parts.roles_then["roles"]["trainer"]["state"] == "stopped"
    assert read(parts.run / "roles.json")["roles"]["trainer"]["state"] == "done"


def test_parts_have_the_metrics_of_a_run_that_never_stopped(straight: Path, parts: Parts):
    """Losses, gradient norms and counts of all steps, each step once, bit for bit, across epochs."""
    expected, found = whole_rows(straight, 40), whole_rows(parts.run, 40)
    validated = [{key: row.pop(key) for key in list(row) if key.startswith("validation/")} for row in found]
    assert untimed(found) == untimed(expected)
    results = {row["step"]: row["loss"] for row in RunDirectory(parts.run).evals.rows()}
    assert sorted(results) == sorted({*range(0, 40, 3), 20, 40}), "20 and 40 ended a part"
    assert len(results) == len(RunDirectory(parts.run).evals.rows())
    of_rows = {
        row["step"]: one["validation/held/loss"] for row, one in zip(found, validated, strict=True) if one
    }
    assert results == {0: results[0], **of_rows}
    assert results[40] < results[20] < results[0]
    assert len({row["loss"] for row in expected}) == 40
    assert expected[19]["epoch"] > 1
    assert expected[39]["epoch"] > 2
    assert expected[39]["total_samples"] == 40 * BATCH


@pytest.mark.parametrize("step", [20, 40])
def test_saved_steps_are_exported_meanwhile(straight: Path, step: int):
    """By a process beside the trainer, in the data type asked for; transformers opens them."""
    exported = AutoModelForCausalLM.from_pretrained(straight / "exports" / f"step_{step}")
    assert exported.dtype == torch.bfloat16
    saved = AutoModelForCausalLM.from_pretrained(step_folder(straight, step) / "model", dtype=torch.bfloat16)
    assert_same_bits(
        {name: tensor.view(torch.int16) for name, tensor in exported.state_dict().items()},
        {name: tensor.view(torch.int16) for name, tensor in saved.state_dict().items()},
    )
    assert read(straight / "roles.json")["roles"]["exporter"]["state"] == "done"
    assert all(row["run/exports_waiting"] <= 2 for row in rows(straight))


@pytest.mark.parametrize("step", [20, 40])
def test_parts_have_the_weights_of_a_run_that_never_stopped(straight: Path, parts: Parts, step: int):
    """Weights and optimiser state, bit for bit."""
    expected = tensors(step_folder(straight, step))
    assert any(name.startswith("model/") for name in expected)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    assert_same_bits(tensors(step_folder(parts.run, step)), expected)


def test_each_checkpoint_names_the_one_before_it(parts: Parts):
    """The lineage is whole, over all parts of the run."""
    manifests = [read(step_folder(parts.run, step) / "manifest.json") for step in steps(parts.run)]
    (run_id,) = {manifest["run_id"] for manifest in manifests}
    parents = [manifest["parent"] for manifest in manifests]
    assert parents[0] is None
    assert [(parent["run_id"], parent["step"]) for parent in parents[1:]] == [
        (run_id, step) for step in steps(parts.run)[:-1]
    ]
    assert [manifest["attempt"] for manifest in manifests] == [1, 2, 3]
    assert [manifest["world_size"] for manifest in manifests] == [1, 1, 1]


def test_parts_never_part(shell: Shell, straight: Path, parts: Parts):
    """`ckpt bisect` finds no difference between them and a run that went straight."""
    assert "the same through step 40" in shell.succeed("ckpt", "bisect", straight, parts.run)


def test_a_plan_knows_a_run(shell: Shell, straight: Path):
    """Its steps, saves and start are measured, and what it is told to set is near what formulas give."""
    found = json.loads(shell.succeed("ckpt", "plan", straight, "--json", "--failures.process", "2"))
    sources = {row["name"]: row["from"] for row in found["constants"]}
    for name in ("step", "state", "a save is durable after"):
        assert sources[name] == "measured"
    assert sources["restart, rank"] == sources["restart, launcher"] == "measured: the run's own start"
    assert found["now"]["interval"] == read(straight / "config.json")["ckpt"]["interval"]
    assert 0 < found["best"]["goodput"] < 1


def test_an_audit_finds_nothing(shell: Shell, straight: Path, parts: Parts, rewound: "Rewound"):
    """Neither in a run that went straight, nor in one of several parts, nor in one that went back."""
    for run in (straight, parts.run, rewound.run):
        report = json.loads(shell.succeed("ckpt", "audit", run, "--json"))
        assert report["ok"]
        assert (report["first_step"], report["last_step"]) == (1, 30 if run == rewound.run else 40)
        assert sum(epoch["trained"] for epoch in report["epochs"]) == report["last_step"] * BATCH
        assert {epoch["problems"] for epoch in report["epochs"]} == {RECORDS}


def test_parts_are_one_run_to_weights_and_biases_and_in_a_table(parts: Parts):
    """Those that were tracked carry the run's own id, so the second goes on with the first one's curves."""
    with open(parts.run / "metrics.csv", newline="") as file:
        table = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert table == [(row["step"], row["loss"]) for row in rows(parts.run)]
    run_id = read(step_folder(parts.run, 40) / "manifest.json")["run_id"]
    tracked = list((parts.run / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in tracked] == [run_id] * 2


def test_a_checkpoint_opens_in_transformers(straight: Path, data: Path):
    """`model/` is a plain Hugging Face directory: it has the loss that the next step began with."""
    folder = step_folder(straight, 20) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    records = SFTData(SFTDataConfig(name=str(data), batch_size=BATCH), tokenizer, 0, position=20 * BATCH)
    total, count = 0.0, 0
    for sample in records.next_batch(21).samples:
        tokens = torch.from_numpy(sample.token_ids).long()
        labels = tokens[1:].masked_fill(~torch.from_numpy(sample.loss_mask)[1:], -100)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
        count += int((labels != -100).sum())
    row = rows(straight)[20]
    assert row["learned_tokens"] == count
    assert total / count == pytest.approx(row["loss"], rel=1e-5)
    assert read(folder / "generation_config.json")["eos_token_id"] == tokenizer.eos_token_id


def test_what_a_finished_run_leaves(shell: Shell, straight: Path):
    """The run directory has what docs/reference/run-directory.md lists, and `ckpt` reads its checkpoints."""
    config = read(straight / "config.json")
    assert (config["max_steps"], config["ckpt"]["interval"]) == (40, 20)
    assert (straight / "logs" / "trainer.log").exists()
    left = [path for path in straight.rglob("*.tmp") if path.parent.name != "heartbeats"]
    assert left == [], "but for what a process that ended was writing about its being alive"
    listed = json.loads(shell.succeed("ckpt", "list", straight, "--json"))
    assert [entry["step"] for entry in listed] == [20, 40]
    verified = json.loads(shell.succeed("ckpt", "verify", straight, "--json"))
    assert [entry["ok"] for entry in verified] == [True, True]


# Steps taken again


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def flipped(straight: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, as if a bit of a weight had been flipped in memory before step 40 was saved."""
    run = tmp_path_factory.mktemp("flipped") / "run"
    shutil.copytree(straight, run)
    folder = step_folder(run, 40)
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + header])[WEIGHT]["data_offsets"][0]
    content[8 + header + begin + 4 * 5 + 2] ^= 1 << 3  # of the sixth value, in float32
    path.write_bytes(content)
    manifest = read(folder / "manifest.json")
    manifest["files"]["model/model.safetensors"] = FileEntry.read(path).model_dump()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return run


def test_a_run_is_proved_by_taking_its_steps_again(shell: Shell, straight: Path, data: Path):
    """Two stretches, drawn; each gives the rows, weights and moments that the run has, and the run stays."""
    before = {path: path.stat().st_mtime_ns for path in straight.rglob("*") if path.is_file()}
    proof = printed(shell.succeed("ckpt", "prove", straight, "--sample", 5, "--json"))
    assert proof["ok"]
    assert [(one["start"], one["last"], one["verdict"]) for one in proof["replayed"]] == [
        (0, 20, "same"),
        (20, 40, "same"),
    ]
    assert all(one["tensors"] == len(tensors(step_folder(straight, 40))) for one in proof["replayed"])
    assert read(straight / "proof.json") == proof
    assert "2 of 2 stretches (40 steps)" in (straight / "proof.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(straight.parent.glob(".cairn-*"))


def test_a_flipped_bit_is_found_and_named(shell: Shell, straight: Path, flipped: Path):
    """Although every checksum is right: by taking the steps again, and by comparing it with another run."""
    shell.succeed("ckpt", "verify", flipped)
    ended = shell.run("ckpt", "replay", flipped, "--step", 20, "--through", 40)
    assert ended.code == 1
    assert f"{WEIGHT}: 1 of" in ended.output
    assert "(bit 19 flipped)" in ended.output
    assert "a single bit of model/model: " in ended.output
    parted = shell.run("ckpt", "bisect", straight, flipped, "--json")
    assert parted.code == 1
    found = printed(parted.output)
    assert (found["step"], found["same_through"], found["role"]) == (40, 39, "trainer")
    assert [tensor["name"] for tensor in found["tensors"]] == [f"model/model: {WEIGHT}"]
    assert found["differences"] == []


# Two ranks, and going back


@dataclass(frozen=True)
class Rewound:
    """A run of 40 steps on two ranks, then again from 20 on two ranks, then from 20 to 30 on one."""

    run: Path
    first: list[dict]
    first_tensors: dict[str, torch.Tensor]
    second: list[dict]
    second_tensors: dict[str, torch.Tensor]
    parent_of_40: dict
    aside: list[str]


@pytest.fixture(scope="module")
def rewound(shell: Shell, sft: tuple, tmp_path_factory: pytest.TempPathFactory) -> Rewound:
    """See `Rewound`."""
    run = tmp_path_factory.mktemp("rewound") / "run"
    two, to_40 = ("--workers", 2), ("--max-steps", 40, "--output-dir", run)
    shell.succeed(*sft, *two, *to_40, "--ckpt.interval", 20)
    first, first_tensors = whole_rows(run, 40), tensors(step_folder(run, 40))
    output = shell.succeed(*sft, *two, *to_40, "--ckpt.resume-step", 20)
    assert "abandoned" in output, "the user is told where the later steps went"
    second, second_tensors = whole_rows(run, 40), tensors(step_folder(run, 40))
    parent_of_40 = read(step_folder(run, 40) / "manifest.json")["parent"]
    shell.succeed(*sft, "--max-steps", 30, "--output-dir", run, "--ckpt.resume-step", 20)
    aside = sorted(path.parent.name for path in (run / "checkpoints" / "abandoned").rglob("manifest.json"))
    return Rewound(run, first, first_tensors, second, second_tensors, parent_of_40, aside)


def test_two_ranks_go_on_as_if_never_stopped(rewound: Rewound):
    """Losses, gradient norms, weights and optimiser state of 20 to 40 are the same again, bit for bit."""
    assert untimed(rewound.second) == untimed(rewound.first)
    assert_same_bits(rewound.second_tensors, rewound.first_tensors)
    assert rewound.parent_of_40["step"] == 20


def test_two_ranks_learn_what_one_learns(straight: Path, rewound: Rewound):
    """The number of ranks changes neither data nor loss, apart from rounding."""
    one, two = rows(straight), rewound.first
    for key in ("learned_tokens", "total_tokens", "total_samples", "epoch", "lr"):
        assert [row[key] for row in two] == [row[key] for row in one]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-3)
    assert [row["loss"] for row in two[:3]] == pytest.approx([row["loss"] for row in one[:3]], rel=1e-6)


def test_a_checkpoint_of_two_ranks_goes_on_on_one(rewound: Rewound):
    """The number of ranks may change between a save and a resume."""
    found = whole_rows(rewound.run, 30)
    assert untimed(found[:20]) == untimed(rewound.first[:20])
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in rewound.first[:30]]
        assert [row[key] for row in found] == pytest.approx(expected, rel=1e-3), key
    # The first step after the resume differs by the order of a sum alone.
    assert found[20]["loss"] == pytest.approx(rewound.first[20]["loss"], rel=1e-6)
    worlds = [read(step_folder(rewound.run, step) / "manifest.json")["world_size"] for step in (20, 30)]
    assert worlds == [2, 1]


@pytest.mark.parametrize("which", ["latest", "auto"])
def test_steps_set_aside_are_never_gone_on_with(shell: Shell, sft: tuple, rewound: Rewound, which: str):
    """After going back to 20 and on to 30, the newest step is 30, although there once were two steps 40."""
    assert steps(rewound.run) == [20, 30]
    assert rewound.aside == ["step_40", "step_40"]
    end = ("--max-steps", 30, "--output-dir", rewound.run)
    ended = shell.run(*sft, *end, "--ckpt.resume", which)
    assert ended.code == {"latest": 2, "auto": 0}[which]
    assert {"latest": "the run resumes from step 30", "auto": "is step 30 of --max-steps 30"}[
        which
    ] in ended.output
    assert steps(rewound.run) == [20, 30]
    whole_rows(rewound.run, 30)


# Ends that are not good


def test_a_stop_without_checkpoints_says_what_is_lost(shell: Shell, sft: tuple, tmp_path: Path):
    """SIGTERM without --ckpt: exit code 1, and the message names the flag that would have saved the work."""
    run = tmp_path / "run"
    with shell.start(*sft, "--max-steps", 100_000, "--output-dir", run) as command:
        command.wait_until(lambda: rows(run))
        command.process.send_signal(signal.SIGTERM)
        finished = command.finish()
        assert finished.code == 1
        assert f"stopped at step {len(rows(run))}, which is lost" in finished.output
        assert f"\nnext: watch {run}, diagnose {run}, dash {run}\n" in finished.output
        assert "--ckpt" in finished.output
        assert not (run / "checkpoints").exists()
        command.assert_nothing_survives()


def test_weights_alone_after_each_step(shell: Shell, sft: tuple, straight: Path, tmp_path: Path):
    """A run that goes on from another one's step, saves by time, and is stopped by a second request."""
    run, source = tmp_path / "run", step_folder(straight, 20)
    often = ("--ckpt.interval-minutes", 1e-6, "--ckpt.save-async", "false", "--ckpt.training-state", "false")
    flags = (*often, "--ckpt.resume", source, "--output-dir", run)
    with shell.start(*sft, *flags, "--max-steps", 100_000) as command:
        command.wait_until(lambda: len(steps(run)) >= 3)
        (worker,) = command.workers()
        os.kill(worker, signal.SIGSTOP)  # or the first request would do
        command.process.send_signal(signal.SIGINT)
        command.wait_until(RunDirectory(run).stop_requested)
        time.sleep(REPEAT_SECONDS)  # what comes sooner is taken for the same request
        command.process.send_signal(signal.SIGTERM)
        finished = command.finish()
        command.assert_nothing_survives()
    assert (finished.code, "interrupted" in finished.output) == (1, True), finished.output
    assert steps(run)[:3] == [21, 22, 23]
    manifest = read(step_folder(run, 21) / "manifest.json")
    origin = read(source / "manifest.json")["run_id"]
    assert manifest["parent"] == {"run_id": origin, "step": 20}
    assert manifest["run_id"] != origin
    assert manifest["parts"] == ["model"]
    assert {Path(name).parts[0] for name in manifest["files"]} == {"model"}
    refused = shell.run(*sft, "--ckpt.resume-step", 22, "--max-steps", 40, "--output-dir", run)
    assert refused.code == 2
    assert "holds weights only, so this run can't resume from it" in refused.output
    assert f"--model.name {step_folder(run, 22)}" in refused.output


def test_a_killed_run_goes_on_in_each_of_its_data_sets(shell: Shell, data: Path, tmp_path: Path):
    """One of them a stream: SIGKILL of the whole run, and on bit for bit from the newest step."""
    one, two, mix = tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "mix.toml"
    records = data.read_text().splitlines(keepends=True)
    one.write_text("".join(records[:60]))
    two.write_text("".join(records[60:]))
    mix.write_text(
        f'seq_len = 32\n[data]\nname = ""\nbatch_size = {BATCH}\nshuffle_block = 16\n[ckpt]\ninterval = 4\n'
        f'[[data.sets]]\nname = "{one}"\n[[data.sets]]\nname = "{two}"\nweight = 2\nread = "stream"\n'
    )
    sft = ("sft", "@", f"{CONFIGS}/sft.toml", "@", mix)
    run, straight = tmp_path / "killed", tmp_path / "straight"
    with shell.start(*sft, "--max-steps", 100_000, "--output-dir", run) as command:
        command.wait_until(lambda: steps(run))
        command.family()  # afterwards its processes have another parent
        command.process.kill()
        command.process.wait()
        command.assert_nothing_survives()
    first, last = steps(run)[-1], steps(run)[-1] + 12
    for folder, how in ((run, ("--ckpt.resume", "auto")), (straight, ())):
        shell.succeed(*sft, "--max-steps", last, "--output-dir", folder, *how)
    found, expected = whole_rows(run, last), whole_rows(straight, last)
    assert untimed(found) == untimed(expected)
    assert sum(row["data/two/records"] for row in found[first:]) > 0
    assert found[-1]["total_records"] == last * BATCH
    assert_same_bits(tensors(step_folder(run, last)), tensors(step_folder(straight, last)))


def test_an_adapter_goes_on_on_any_number_of_ranks(shell: Shell, sft: tuple, tmp_path: Path):
    """On as many ranks bit for bit, dropout and all; on others apart from rounding. PEFT opens the step.

    It is killed in its second commit, and the base is gone when it is resumed: its steps hold it.
    """
    run, model, away = tmp_path / "run", tmp_path / "model", tmp_path / "away"
    families.make("qwen3_tied", model)
    lora = ("--lora.rank", 4, "--lora.dropout", 0.1, "--optimizer.lr", 1e-2, "--ckpt.interval", 3)
    command = (*sft, "--model.name", model, *lora, "--max-steps", 6, "--output-dir")
    shell.succeed(*command, tmp_path / "straight")
    straight, expected = whole_rows(tmp_path / "straight", 6), tensors(step_folder(tmp_path / "straight", 6))
    command = (*command, run, "--lora.save-base")
    killing = {"CAIRN_FAULT": "commit.before_manifest:kill@2"}
    with shell.start(*command, "--max-restarts", 0, environment=killing) as killed:
        assert killed.finish().code == 1
    assert steps(run) == [3]
    model.rename(away)
    shell.succeed(*command, "--ckpt.resume", "auto")
    assert untimed(whole_rows(run, 6)) == untimed(straight)
    assert_same_bits(tensors(step_folder(run, 6)), expected)
    base = [step_folder(run, step) / "base" / "model.safetensors" for step in (3, 6)]
    assert base[0].samefile(base[1])
    away.rename(model)
    shell.succeed(*command, "--ckpt.resume-step", 3, "--workers", 2)
    losses = [row["loss"] for row in whole_rows(run, 6)]
    assert losses == pytest.approx([row["loss"] for row in straight], rel=1e-4)
    assert losses[-1] < losses[0]

    model = AutoPeftModelForCausalLM.from_pretrained(step_folder(run, 6) / "model")
    merged = load_checkpoint(step_folder(run, 6)).tensors
    opened = load_checkpoint(step_folder(run, 6)).model().state_dict()
    assert all(torch.allclose(opened[name], tensor, rtol=1e-5, atol=1e-6) for name, tensor in merged.items())
    for name, tensor in model.merge_and_unload().state_dict().items():
        if name in merged:
            torch.testing.assert_close(tensor, merged[name], rtol=1e-5, atol=1e-6)
    refused = shell.run(*command, "--ckpt.resume-step", 3, "--lora.rank", 8)
    assert refused.code == 2
    assert "--lora.rank 8: the adapter in" in refused.output
    assert "has --lora.rank 4" in refused.output
