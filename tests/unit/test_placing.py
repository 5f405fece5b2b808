"""Which GPUs each role of a run gets, as a function of the settings and the machine."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cairn.config.cli import load
from cairn.config.inference import InferenceConfig
from cairn.config.kinds import KINDS
from cairn.config.rl import RLConfig
from cairn.config.trainer import SFTConfig
from cairn.launch.plan.gpu_assignment import (
    Placing,
    check_torch,
    gpus_of_server,
    place,
    placed,
    placed_server,
    torch_without_cuda,
)
from cairn.launch.ray.worker import RankProcess, RayProcess
from cairn.launch.supervise.ranks import Ranks, RankSlot
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.machine import Gpu, Machine, use_gpus, visible

GPUS = [Gpu(i, f"GPU-{i:08x}-5ab1", "H100", 80 << 30) for i in range(8)]
URL = ["--orchestrator.inference-url", "http://elsewhere:8000"]


def machine(count: int = 8, names: str | None = None) -> Machine:
    """With `count` GPUs, of which CUDA_VISIBLE_DEVICES shows `names`."""
    return Machine(visible(GPUS[:count], names), 1 << 40, "580.65" if count else None)


def indices(placing: Placing) -> tuple[list[int], list[int], int | None, bool]:
    """The GPUs of the trainer and of the server, the number of workers, and whether they take turns."""
    of_trainer, of_server = ([gpu.index for gpu in gpus] for gpus in (placing.trainer, placing.server))
    return of_trainer, of_server, placing.workers, placing.colocate


def in_short(value: Any) -> str | None:
    """For the name of a test."""
    return f"{len(value.gpus)} GPUs" if isinstance(value, Machine) else None


def rl(argv: list[str], on: Machine, **of_build: Any) -> Placing:
    return place(KINDS["rl"], load(RLConfig, argv), on, **of_build)


def sft(argv: list[str], on: Machine) -> Placing:
    return place(KINDS["sft"], load(SFTConfig, argv), on)


T, I = "--trainer.gpus", "--inference.gpus"  # noqa: E741
WORKERS, TP, N = "--trainer.workers", "--inference.tensor-parallel", "--inference.servers"
ALL = list(range(8))


@pytest.mark.parametrize(
    ("argv", "on", "expected"),
    [
        ([], machine(0), ([], [], 1, False)),
        ([WORKERS, "3"], machine(0), ([], [], 3, False)),
        ([T, "0", I, "0"], machine(0), ([], [], 1, False)),
        ([], machine(1), ([0], [0], 1, True)),
        ([T, "1"], machine(1), ([0], [0], 1, True)),
        ([T, "0,", I, "0,"], machine(1), ([0], [0], 1, True)),
        ([T, "0"], machine(1), ([], [0], 1, False)),
        (["--colocate"], machine(0), ([], [], 1, True)),
        (["--colocate"], machine(1), ([0], [0], 1, True)),
        (["--colocate", T, "5,"], machine(), ([5], [5], 1, True)),
        (["--colocate", I, "GPU-00000002"], machine(), ([2], [2], 1, True)),
        (["--colocate", T, "1"], machine(), ([0], [0], 1, True)),
        ([], machine(2), ([0], [1], 1, False)),
        ([], machine(3), ([0, 1], [2], 2, False)),
        ([], machine(4), ([0, 1], [2, 3], 2, False)),
        ([], machine(8), (ALL[:4], ALL[4:], 4, False)),
        ([N, "1"], machine(8), (ALL[:7], [7], 7, False)),
        ([N, "2", TP, "3"], machine(8), ([0, 1], ALL[2:], 2, False)),
        ([TP, "3"], machine(8), (ALL[:5], [5, 6, 7], 5, False)),
        ([TP, "4"], machine(8), ([0, 1, 2, 3], [4, 5, 6, 7], 4, False)),
        ([WORKERS, "2"], machine(8), ([0, 1], ALL[2:], 2, False)),
        ([T, "2"], machine(8), ([0, 1], ALL[2:], 2, False)),
        ([T, "6,7"], machine(8), ([6, 7], ALL[:6], 2, False)),
        ([T, "6,7", TP, "4"], machine(8), ([6, 7], [2, 3, 4, 5], 2, False)),
        ([T, "GPU-00000003-5ab1"], machine(4), ([3], [0, 1, 2], 1, False)),
        ([I, "0,"], machine(4), ([1, 2, 3], [0], 3, False)),
        ([I, "2", TP, "2"], machine(4), ([0, 1], [2, 3], 2, False)),
        ([T, "1,0", I, "3,2", TP, "2"], machine(4), ([1, 0], [3, 2], 2, False)),
        ([T, "0", WORKERS, "2"], machine(4), ([], [0, 1, 2, 3], 2, False)),
        ([I, "2"], machine(4), ([0, 1], [2, 3], 2, False)),
        ([I, "2", N, "2"], machine(4), ([0, 1], [2, 3], 2, False)),
        ([I, "0"], machine(4), ([0, 1, 2, 3], [], 4, False)),
        (["--inference.vllm-args=--pipeline-parallel-size=2"], machine(4), ([0, 1], [2, 3], 2, False)),
        (["--inference.vllm-args", '["-dp", "3"]'], machine(4), ([0], [1, 2, 3], 1, False)),
        ([], machine(8, "6,2,4"), ([6, 2], [4], 2, False)),
        ([T, "4,"], machine(8, "6,2,4"), ([4], [6, 2], 1, False)),
        ([], machine(8, "GPU-00000005,GPU-00000001"), ([5], [1], 1, False)),
        ([], machine(8, ""), ([], [], 1, False)),
        (URL, machine(4), ([0, 1, 2, 3], [], 4, False)),
        ([*URL, T, "2"], machine(4), ([0, 1], [], 2, False)),
        (URL, machine(1), ([0], [], 1, False)),
        (["--trainer.ray.address", "auto"], machine(4), ([], [3], None, False)),
        (["--trainer.ray.address", "auto", WORKERS, "16"], machine(1), ([], [0], 16, False)),
        (["--trainer.ray.address", "auto", *URL], machine(4), ([], [], None, False)),
    ],
    ids=in_short,
)
def test_gpus_are_divided_between_trainer_and_server(argv: list[str], on: Machine, expected: Any):
    """By default the server gets the last ones, and the trainer one worker on each of the others."""
    assert indices(rl(argv, on)) == expected


@pytest.mark.parametrize(
    ("argv", "on", "expected"),
    [
        ([], machine(0), ([], 1)),
        (["--workers", "2"], machine(0), ([], 2)),
        ([], machine(1), ([0], 1)),
        ([], machine(8), (ALL, 8)),
        (["--workers", "2"], machine(8), ([0, 1], 2)),
        (["--gpus", "4"], machine(8), ([0, 1, 2, 3], 4)),
        (["--gpus", "4,5,6", "--workers", "2"], machine(8), ([4, 5], 2)),
        (["--gpus", "0"], machine(8), ([], 1)),
        (["--gpus", "0", "--workers", "16"], machine(8), ([], 16)),
        (["--ray.address", "auto", "--workers", "16"], machine(1), ([], 16)),
        (["--ray.address", "auto"], machine(1), ([], None)),
        (["--ray.address", "auto", "--gpus", "0"], machine(1), ([], 1)),
    ],
    ids=in_short,
)
def test_a_trainer_alone_gets_all_gpus(argv: list[str], on: Machine, expected: Any):
    assert indices(sft(argv, on))[::2] == expected


@pytest.mark.parametrize(
    ("argv", "on", "message"),
    [
        ([T, "1"], machine(0), r"--trainer.gpus 1: this machine has no GPU"),
        ([T, "0,"], machine(0), r"--trainer.gpus 0,: there is no GPU 0; this machine has no GPU"),
        (
            [I, "1"],
            machine(8, ""),
            r"--inference.gpus 1: this machine has no GPU \(or its driver or CUDA_VIS",
        ),
        (["--no-colocate"], machine(1), r"takes GPU 0, all .* none for the trainer; .* leave out --no-col"),
        ([TP, "2"], machine(2), r"--inference.tensor-parallel 2: the server takes GPUs 0, 1, all that"),
        (
            [TP, "4"],
            machine(2),
            r"--inference.tensor-parallel 4: the server needs 4 GPUs, but this machine has",
        ),
        (
            [TP, "2", T, "3"],
            machine(4),
            r"--trainer.gpus 3: .*GPUs 0, 1, 2, 3; 2 left beside the server's; low",
        ),
        (
            [T, "0,1,2", TP, "2"],
            machine(4),
            r"needs 2 GPUs, but this machine has GPUs 0, 1, 2, 3, of which 1 le",
        ),
        (
            [WORKERS, "4"],
            machine(4),
            r"--trainer.workers 4: .*own, and 3 GPUs are left beside the server's; ",
        ),
        ([WORKERS, "3", T, "0,1"], machine(4), r"workers 3: .* --trainer.gpus 0,1 chooses 2; lower it to 2"),
        ([T, "0,1", I, "1,"], machine(4), r"both name GPU 1; give each .*--colocate"),
        ([T, "0,", I, "GPU-00000000"], machine(2), r"both name GPU 0"),
        ([T, "0,GPU-00000000"], machine(2), r"--trainer.gpus 0,GPU-00000000: names GPU 0 twice"),
        ([T, "0,9"], machine(4), r"--trainer.gpus 0,9: there is no GPU 9; this machine has GPUs 0, 1, 2, 3"),
        ([T, "3,"], machine(8, "1,2"), r"there is no GPU 3; this machine has GPUs 1, 2"),
        ([T, "GPU-0"], machine(8), r"there is no GPU GPU-0; "),  # eight begin like this
        (
            [I, "3", TP, "2"],
            machine(4),
            r"--inference.gpus 3: that is 3 GPUs, but a server uses 2 .*mult",
        ),
        ([I, "2", N, "3"], machine(4), r"--inference.gpus 2: that is 2 GPUs, but 3 servers use 3 .*equal"),
        ([N, "5"], machine(4), r"--inference.servers 5: the servers need 5 GPUs, but this machine has GPUs"),
        ([N, "4"], machine(4), r"--inference.servers 4: the servers take GPUs 0, 1, 2, 3, all .* none for"),
        ([N, "2", "--colocate"], machine(1), r"--inference.servers 2: with --colocate, .* one server"),
        (
            [N, "2"],
            machine(1),
            r"--inference.servers 2: the servers need 2 GPUs, but this machine has GPU",
        ),
        ([I, "9"], machine(4), r"--inference.gpus 9: this machine has GPUs 0, 1, 2, 3; lower it"),
        (
            ["--colocate"],
            machine(2),
            r"single GPU, but this would be GPUs 0, 1 with 2 .*--trainer.gpus 0, with",
        ),
        (["--colocate", TP, "2"], machine(1), r"--colocate: .* a server on 2 GPUs"),
        (["--colocate", WORKERS, "2"], machine(1), r"--colocate: .* with 2 workers"),
        (
            ["--colocate", T, "0,", I, "1,"],
            machine(2),
            r"one and the same GPU, .* 0, and --inference.gpus 1,",
        ),
        (["--colocate", T, "0"], machine(1), r"one and the same GPU"),
        (["--colocate", *URL], machine(1), r"--colocate: the run's servers are given"),
        (
            ["--colocate", "--trainer.ray.address", "auto"],
            machine(1),
            r"--colocate: the trainer runs in the Ray",
        ),
        (
            ["--trainer.ray.address", "a:1", T, "2"],
            machine(4),
            r"--trainer.gpus 2: the Ray cluster at a:1 decid",
        ),
    ],
    ids=in_short,
)
def test_what_does_not_fit_is_refused(argv: list[str], on: Machine, message: str):
    """With the setting, its value, and what to do."""
    with pytest.raises(UsageError, match=message):
        rl(argv, on)


def test_more_workers_than_gpus_are_refused_for_sft():
    with pytest.raises(UsageError, match=r"--workers 9: each .* this machine has GPUs 0, .*; lower it to 8"):
        sft(["--workers", "9"], machine())
    with pytest.raises(UsageError, match=r"--gpus 9: this machine has GPUs 0, .* 7; lower it"):
        sft(["--gpus", "9"], machine())


def test_ranks_are_divided_among_replicas():
    """However many ranks there come to be."""
    config, _ = placed(KINDS["sft"], load(SFTConfig, ["--replicas", "2"]), machine(4))
    assert (config.workers, config.replicas) == (4, 2)
    with pytest.raises(UsageError, match=r"replicas = 3 does not divide the ranks .*: workers = 4"):
        placed(KINDS["sft"], load(SFTConfig, ["--replicas", "3"]), machine(4))
    with pytest.raises(UsageError, match=r"replicas = 2 does not divide the ranks .*: workers = 3"):
        load(SFTConfig, ["--replicas", "2", "--workers", "3"])
    with pytest.raises(UsageError, match=r"workers = 1"):
        placed(KINDS["sft"], load(SFTConfig, ["--replicas", "2"]), machine(0))
    with pytest.raises(UsageError, match=r"parallel.context = 3 does not divide the ranks .*: workers = 4"):
        placed(KINDS["sft"], load(SFTConfig, ["--parallel.context", "3"]), machine(4))
    with pytest.raises(UsageError, match=r"lora.dropout = 0.1 beside parallel.context = 2: .* leave one out"):
        load(SFTConfig, ["--parallel.context", "2", "--lora.dropout", "0.1"])
    with pytest.raises(UsageError, match=r"compile beside parallel.context = 2: .* leave one out"):
        load(SFTConfig, ["--parallel.context", "2", "--compile"])
    with pytest.raises(UsageError, match=r"parallel.tensor = 3 does not divide the ranks .*: workers = 4"):
        placed(KINDS["sft"], load(SFTConfig, ["--parallel.tensor", "3"]), machine(4))
    megatron = ("--backend", "megatron", "--parallel.pipeline")
    with pytest.raises(UsageError, match=r"parallel.pipeline = 3 does not divide the ranks .*: workers = 4"):
        placed(KINDS["sft"], load(SFTConfig, [*megatron, "3"]), machine(4))
    with pytest.raises(
        UsageError, match=r"parallel.tensor = 2 does not .*: workers = 6, parallel.pipeline = 2"
    ):
        load(SFTConfig, [*megatron, "2", "--parallel.tensor", "2", "--workers", "6"])
    with pytest.raises(
        UsageError, match=r"parallel.pipeline = 2 goes with backend = 'megatron' alone: FSDP2"
    ):
        load(SFTConfig, ["--parallel.pipeline", "2"])
    with pytest.raises(UsageError, match=r"parallel.expert = 3 does not divide the ranks .*: workers = 4$"):
        placed(KINDS["sft"], load(SFTConfig, ["--parallel.expert", "3"]), machine(4))
    with pytest.raises(UsageError, match=r"parallel.expert = 4 does not .*: workers = 4, replicas = 2"):
        load(SFTConfig, ["--parallel.expert", "4", "--replicas", "2", "--workers", "4"])
    with pytest.raises(UsageError, match=r"compile beside parallel.expert = 2: .* leave one out"):
        load(SFTConfig, ["--parallel.expert", "2", "--compile"])
    everything = ["--parallel.expert", "2", "--parallel.context", "2", "--replicas", "2"]
    load(SFTConfig, [*everything, "--workers", "4"])
    everything += ["--parallel.tensor", "2", "--lora"]
    load(SFTConfig, [*everything, "--workers", "8"])
    with pytest.raises(UsageError, match=r"tensor = 4 does not .* each copy .*: workers = 4, replicas = 2"):
        load(SFTConfig, ["--parallel.tensor", "4", "--replicas", "2", "--workers", "4"])
    with pytest.raises(UsageError, match=r"share each row among 8 ranks, .* workers = 4 into equal parts"):
        load(SFTConfig, ["--parallel.tensor", "4", "--parallel.context", "2", "--workers", "4"])


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--lora.dropout", "0.1"), r"lora.dropout = 0.1"),
        (("--compile",), r"compile"),
        (("--optimizer.type", "muon"), r"optimizer.type = 'muon', which needs matrices"),
        (("--optimizer.type", "adamw_8bit"), r"optimizer.type = 'adamw_8bit', which needs"),
    ],
)
def test_what_does_not_go_with_shared_matrices_is_refused(flags: tuple[str, ...], what: str):
    load(SFTConfig, list(flags))
    with pytest.raises(UsageError, match=rf"{what}.* beside parallel.tensor = 2.*; leave one out"):
        load(SFTConfig, ["--parallel.tensor", "2", *flags])


@pytest.mark.parametrize("value", ["", "-1", ",", "1,1", "true"])
def test_values_of_gpus_are_checked(value: str):
    if value == "true":
        with pytest.raises(UsageError, match=r"there is no GPU true"):
            sft(["--gpus", value], machine())
        return
    with pytest.raises(UsageError, match=r"--gpus: .*(neither a number of GPUs .* nor a list|GPU 1 twice)"):
        load(SFTConfig, [f"--gpus={value}"])


def test_files_may_hold_numbers_and_lists():
    assert SFTConfig(gpus=2).gpus == "2"  # type: ignore[arg-type]
    assert SFTConfig(gpus=[2]).gpus == "2,"  # type: ignore[arg-type]
    assert SFTConfig(gpus=[2, "GPU-5"]).gpus == "2,GPU-5"  # type: ignore[arg-type]


def test_a_server_on_the_cpu_leaves_the_gpus_to_the_trainer():
    """With vLLM's CPU build, even where there is a single GPU."""
    assert indices(rl([], machine(1), vllm="cpu")) == ([0], [], 1, False)
    assert indices(rl([], machine(4), vllm="cpu")) == ([0, 1, 2, 3], [], 4, False)
    with pytest.raises(UsageError, match=r"--inference.gpus 1: vLLM's CPU build is installed"):
        rl([I, "1"], machine(4), vllm="cpu")


@pytest.mark.parametrize(
    ("argv", "on", "expected"),
    [
        ([], machine(0), None),
        ([], machine(4), None),
        (["--gpus", "1"], machine(4), "3,"),
        (["--gpus", "0,1", "--tensor-parallel", "2"], machine(4), "0,1"),
        (["--gpus", "0"], machine(4), "0"),
    ],
    ids=in_short,
)
def test_a_server_of_its_own_uses_its_gpus(argv: list[str], on: Machine, expected: str | None):
    assert placed_server(load(InferenceConfig, argv), on, "gpu").gpus == expected


def test_a_server_of_its_own_needs_as_many_gpus_as_it_splits_the_model_over():
    with pytest.raises(
        UsageError, match=r"--tensor-parallel 8: the server needs 8 GPUs, but this machine has"
    ):
        placed_server(InferenceConfig(tensor_parallel=8), machine(4), "gpu")
    with pytest.raises(UsageError, match=r"--gpus 2: that is 2 GPUs, but the server uses 1 \(--tensor-par"):
        placed_server(InferenceConfig(gpus="2"), machine(4), "gpu")


def test_the_division_is_written_into_the_settings():
    """From which restarted roles learn it; without GPUs, nothing but the number of workers is."""
    config, _ = placed(KINDS["rl"], load(RLConfig, [TP, "2"]), machine(4))
    assert (config.trainer.gpus, config.inference.gpus, config.trainer.workers) == ("0,1", "2,3", 2)
    again = RLConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert placed(KINDS["rl"], again, machine(4))[0] == config
    config, _ = placed(KINDS["rl"], load(RLConfig, []), machine(0))
    assert (config.trainer.gpus, config.inference.gpus, config.trainer.workers) == (None, None, 1)
    assert config.colocate is False
    alone, _ = placed(KINDS["sft"], load(SFTConfig, ["--gpus", "1"]), machine(4))
    assert (alone.gpus, alone.workers, alone.ranks) == ("0,", 1, 1)
    far, _ = placed(KINDS["sft"], load(SFTConfig, ["--ray.address", "auto"]), machine(4))
    assert (far.gpus, far.workers, far.ranks) == (None, None, 1)


def test_gpus_of_given_servers_are_left_to_them():
    """As they tell by their UUIDs, if they are on this machine; naming them overrides it."""
    taken = {GPUS[0].uuid: "http://here:8000", "GPU-of-another-machine": "http://there:8000"}
    for on, argv, expected in (
        (machine(4), [], ([1, 2, 3], 3)),
        (machine(4), [WORKERS, "2"], ([1, 2], 2)),
        (machine(4), [T, "1"], ([1], 1)),
        (machine(4), [T, "0,1"], ([0, 1], 2)),
        (machine(1), [T, "0,"], ([0], 1)),
        (machine(1), [T, "0"], ([], 1)),
    ):
        assert indices(rl([*URL, *argv], on, taken=taken))[::2] == expected
    with pytest.raises(
        UsageError, match=r"server at http://here:8000 uses GPU 0, and this machine has GPU 0"
    ):
        rl(URL, machine(1), taken=taken)
    with pytest.raises(UsageError, match=r"--trainer.gpus 4: .* 3 left beside the servers'; lower it"):
        rl([*URL, T, "4"], machine(4), taken=taken)
    with pytest.raises(UsageError, match=r"workers 4: .* 3 GPUs are left beside the servers'; lower it to 3"):
        rl([*URL, WORKERS, "4"], machine(4), taken=taken)


def test_slices_of_gpus_are_named_by_their_uuid():
    """They have no number in CUDA_VISIBLE_DEVICES."""
    on = Machine((Gpu(8, "MIG-3f", "slice", 10 << 30), Gpu(9, "MIG-7a", "slice", 10 << 30)))
    config, _ = placed(KINDS["rl"], load(RLConfig, []), on)
    assert (config.trainer.gpus, config.inference.gpus) == ("MIG-3f", "MIG-7a")


@pytest.mark.parametrize(("gpus", "expected"), [("0,1", "0,1"), ("3,", "3"), ("0", ""), ("MIG-3f", "MIG-3f")])
def test_a_process_sees_its_own_gpus_only(gpus: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    use_gpus(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    use_gpus(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # as NVML counts


def test_the_division_in_words():
    assert rl([], machine(0)).in_words() == ""
    assert rl([], machine(1)).in_words() == "GPU 0 trains and serves in turns"
    assert rl([N, "1"], machine(4)).in_words() == "GPUs 0, 1, 2 train; GPU 3 serves"
    assert rl([], machine(4)).in_words() == "GPUs 0, 1 train; GPUs 2, 3 serve (2 servers)"


def test_each_server_has_its_port_and_its_part_of_the_gpus():
    """In the order of their roles' names, the first of which is that of a single server."""
    argv = [TP, "2", "--inference.port", "9000", "--trainer.workers", "2"]
    config, placing = placed(KINDS["rl"], load(RLConfig, argv), machine(6))
    assert placing.servers == config.inference.servers == 2
    each = KINDS["rl"].servers(config)
    assert {name: (one.port, one.gpus) for name, one in each.items()} == {
        "inference": (9000, "2,3"),
        "inference_1": (9001, "4,5"),
    }
    assert KINDS["rl"].started(config) == ("inference", "inference_1", "trainer", "orchestrator")
    single, _ = placed(KINDS["rl"], load(RLConfig, [N, "3"]), machine(4))
    assert [one.gpus for one in single.inference.each.values()] == ["1,", "2,", "3,"]
    on_cpu, _ = placed(KINDS["rl"], load(RLConfig, [N, "2"]), machine(0))
    assert [(one.port, one.gpus) for one in on_cpu.inference.each.values()] == [(8000, None), (8001, None)]
    assert KINDS["sft"].servers(SFTConfig()) == {}
    with pytest.raises(UsageError, match=r"port = 65535 and servers = 2: .* listen on port 65536"):
        load(RLConfig, [N, "2", "--inference.port", "65535"])


def test_ranks_compute_on_the_trainers_gpus():
    """On the CPU if it has none; a Ray cluster is expected to have what this machine has."""
    on = machine(4)
    for argv, gpus in (([], 4), (["--gpus", "2"], 2), (["--gpus", "0"], 0)):
        assert len(sft(argv, on).of_ranks(on).gpus) == gpus
        expected = 4 if gpus else 0
        if gpus != 2:
            assert len(sft([*argv, "--ray.address", "auto"], on).of_ranks(on).gpus) == expected
    assert sft([], on).of_ranks(on).memory == on.memory


def test_a_torch_without_cuda_does_not_train_on_the_cpu_in_silence(tmp_path, monkeypatch):
    """Where there are GPUs; and torch is not imported to find out."""
    check_torch(sft([], machine(0)), "2.13.0+cpu")
    check_torch(sft(["--gpus", "0"], machine(1)), "2.13.0+cpu")
    check_torch(sft([], machine(1)), None)
    with pytest.raises(UsageError, match=r"GPU 0 would train, but torch 2.13.0\+cpu is built without CUDA"):
        check_torch(sft([], machine(1)), "2.13.0+cpu")
    for cuda, expected in (("None", "2.13.0+cpu"), ("'13.0'", None)):
        folder = tmp_path / str(expected) / "torch"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        (folder / "version.py").write_text(f"__version__ = '2.13.0+cpu'\ncuda = {cuda}\n")
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch", raising=False)
            patch.syspath_prepend(str(folder.parent))
            assert torch_without_cuda() == expected


def test_a_cluster_must_not_give_away_the_servers_gpus(tmp_path: Path):
    """A Ray cluster that was started on this machine counts all of its GPUs, unless told otherwise."""
    config = load(RLConfig, ["--trainer.ray.address", "a:1", "--output-dir", str(tmp_path)])
    settled, _ = placed(KINDS["rl"], config, machine(2))
    taken = gpus_of_server(settled)
    assert taken == ("1",)
    ranks = Ranks(settled.trainer, RunDirectory(tmp_path), taken)

    def check(gpu: str, host: str) -> None:
        place = RankSlot(0, ranks.run)
        about = RayProcess(1, "node", host, gpu)
        place.fill(cast(RankProcess, SimpleNamespace(about=about, wait_started=lambda _: about)), "")
        place.wait_started(1)
        ranks._check_gpu(place)

    here = socket.gethostname()
    check("0", here)
    check("1", "elsewhere")
    with pytest.raises(UsageError, match=r"cluster at a:1 gave trainer rank 0 GPU 1, which the run's server"):
        check("1", here)
    assert gpus_of_server(load(SFTConfig, ["--gpus", "1,"])) == ()
