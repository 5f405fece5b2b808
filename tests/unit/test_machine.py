"""What a machine has, and machines given in words."""

import os
from pathlib import Path

import pynvml
import pytest

from cairn.run import machine
from cairn.run.errors import UsageError
from cairn.run.machine import (
    Gpu,
    Machine,
    available_memory,
    keep_near,
    lack_of_cpus,
    machine_of,
    this_machine,
    visible,
)

GB = 1 << 30
FOUR = [Gpu(i, f"GPU-{letter}{i}", "some", 80 * GB) for i, letter in enumerate("aabc")]


@pytest.mark.parametrize(
    ("names", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-b2, 3", [2, 3]),
        ("GPU-c", [3]),  # the beginning of a UUID, as CUDA allows
        ("GPU-a", []),  # of two
        ("1,7,0", [1]),  # CUDA stops at the first that is not there
        ("1,1,0", [1]),
        ("-1", []),
    ],
)
def test_gpus_are_visible_as_cuda_sees_them(names: str | None, indices: list[int]):
    assert [gpu.index for gpu in visible(FOUR, names)] == indices


def test_this_machine_is_described_with_or_without_a_driver():
    found = this_machine()
    assert 1 << 28 < found.memory < 1 << 50
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert (found.gpus, found.driver, found.has_gpus) == ((), None, False)
    else:
        assert found.driver


@pytest.mark.parametrize(
    "names",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_a_control_group_bounds_the_memory(tmp_path, monkeypatch, names):
    """Of cgroup v2 and v1. What is cached of files can be dropped."""
    unbounded = this_machine().memory
    monkeypatch.setattr(machine, "CGROUPS", str(tmp_path))
    limit, usage = (tmp_path / name for name in names)
    limit.parent.mkdir(exist_ok=True)
    (limit.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GB // 4}\n")
    usage.write_text(str(GB // 2))
    limit.write_text(f"{GB}\n")
    assert this_machine().memory == GB
    assert available_memory() == 3 * GB // 4
    limit.write_text("max\n")
    assert this_machine().memory == unbounded
    assert available_memory() > 3 * GB // 4


def test_a_control_group_bounds_the_cpus(tmp_path, monkeypatch):
    """Of cgroup v2 and v1; shares of a CPU count as one."""
    unbounded = this_machine().cpus
    assert unbounded == len(os.sched_getaffinity(0)) or Path("/sys/fs/cgroup/cpu.max").exists()
    monkeypatch.setattr(machine, "CGROUPS", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    limit = tmp_path / "cpu.max"
    for text, cpus in (("max 100000\n", 16), ("250000 100000\n", 3), ("9900000 100000", 16)):
        limit.write_text(text)
        assert this_machine().cpus == cpus
    limit.unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cpus in (("-1", 16), ("200000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert this_machine().cpus == cpus


@pytest.mark.parametrize(
    ("cpus", "ranks", "told"), [(1, 1, "1 CPU for 1 rank on"), (15, 8, "15 CPUs for 8 ranks on")]
)
def test_whoever_has_fewer_than_two_cpus_a_rank_is_told(cpus: int, ranks: int, told: str):
    gpus = machine_of(f"{ranks}x80G").gpus
    assert told in str(lack_of_cpus(Machine(gpus, cpus=cpus), ranks))
    assert lack_of_cpus(Machine(gpus, cpus=2 * ranks), ranks) is None
    assert lack_of_cpus(Machine(gpus), ranks) is None, "of a machine that is planned for"
    assert lack_of_cpus(Machine(cpus=cpus), ranks) is None, "ranks on CPUs share them"


@pytest.mark.parametrize(
    ("words", "gpus", "memory"),
    [
        ("8x80G,1T", [80 * GB] * 8, 1024 * GB),
        ("1x24G", [24 * GB], 96 * GB),
        ("2 x 0.5T, 64G", [512 * GB] * 2, 64 * GB),
        ("64G", [], 64 * GB),
    ],
)
def test_a_machine_in_words(words: str, gpus: list[int], memory: int):
    found = machine_of(words)
    assert [gpu.memory for gpu in found.gpus] == gpus
    assert found.memory == memory


@pytest.mark.parametrize(
    "words", ["", "eight", "8x80G,8x80G", "80G,1T", "8x80GB", "0x80G,1T", "8x", "8x1.2.3G", "8x80G,1T,2T"]
)
def test_words_that_describe_no_machine_are_refused(words: str):
    with pytest.raises(UsageError, match=r"--machine .*such as 8x80G,1T"):
        machine_of(words)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """A machine with CPUs 0 to 15 on two NUMA nodes; gives the affinities that threads were set to."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    set_to: list[set[int]] = []
    monkeypatch.setattr(machine, "NODES", str(tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: set_to.append(cpus))
    return set_to


def attached(*nodes: int | None) -> Machine:
    return Machine(tuple(Gpu(i, f"GPU-{i}", "some", GB, node=node) for i, node in enumerate(nodes)))


def test_a_rank_runs_near_its_gpu(sockets: list[set[int]]):
    said = keep_near(attached(0, 1), "1", 2)
    assert said == "runs on 8 of 16 CPUs, those of NUMA node 1, as GPU 1 does"
    assert len(sockets) == len(os.listdir("/proc/self/task"))
    assert all(cpus == {4, 5, 6, 7, 12, 13, 14, 15} for cpus in sockets)
    assert keep_near(attached(0, 1), "GPU-0", 4)


@pytest.mark.parametrize(
    ("nodes", "name", "neighbours"),
    [((0, 1), None, 1), ((None, None), "0", 1), ((0, 1), "7", 1), ((5,), "0", 1), ((0, 0), "0", 5)],
    ids=["no GPU", "unknown", "not seen", "no such node", "too few"],
)
def test_a_rank_whose_node_is_not_known_or_too_small_runs_anywhere(
    sockets: list[set[int]], nodes: tuple[int | None, ...], name: str | None, neighbours: int
):
    assert keep_near(attached(*nodes), name, neighbours) is None
    assert sockets == []


def test_what_a_scheduler_allows_stays_allowed(sockets: list[set[int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7})
    assert keep_near(attached(0, 1), "0", 1) is None, "none of them is near"
    assert keep_near(attached(0, 1), "1", 1) is None, "all of them are near"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 4, 5, 6})
    assert keep_near(attached(0, 1), "1", 1) == "runs on 3 of 4 CPUs, those of NUMA node 1, as GPU 1 does"
    assert sockets[-1] == {4, 5, 6}


@pytest.mark.parametrize(
    ("address", "content", "node"),
    [
        (b"00000000:3B:00.0", "1\n", 1),
        ("00010000:AF:00.0", "0\n", 0),
        (b"00000000:3B:00.0", "-1\n", None),
        (b"00000000:3B:00.0", None, None),
    ],
)
def test_the_kernel_says_to_which_node_a_gpu_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: object, content: str | None, node: int | None
):
    monkeypatch.setattr(machine, "PCI", str(tmp_path))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", lambda _: type("Info", (), {"busId": address}))
    folder = tmp_path / ("0000:3b:00.0" if isinstance(address, bytes) else "10000:af:00.0")
    folder.mkdir()
    if content is not None:
        (folder / "numa_node").write_text(content)
    assert machine._node_of(None) == node
