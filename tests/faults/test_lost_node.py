"""A node of a Ray cluster is lost with all that runs on it: the others have its part of the newest step."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import draws
import psutil
import pytest
from ray_nodes import RayNodes
from runs import (
    CONFIGS,
    Command,
    Shell,
    assert_same_bits,
    read,
    rows,
    step_folder,
    steps,
    tensors,
    untimed,
    whole_rows,
)

pytestmark = pytest.mark.timeout(900)

LAST = 26
OTHER_NAME = ("/usr/bin/unshare", "--uts", "sh", "-c", 'hostname another; exec "$@"', "sh")
"""Begins the command of a process that takes its machine for another one than the driver's."""


def start_other(nodes: RayNodes) -> None:
    """Start one more node, on what it takes for another machine if the user may rename one."""
    nodes.start(*(OTHER_NAME if os.geteuid() == 0 else ()))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    """Two."""
    found = RayNodes(tmp_path)
    try:
        found.start()
        start_other(found)
        yield found
    finally:
        found.close()


@draws.in_turn("a lost node", 0, 3)
def test_the_part_of_a_lost_node_comes_from_another_ones_memory(
    shell: Shell, nodes: RayNodes, tmp_path: Path
):
    """A rank on each of two nodes; a third one takes the lost one's place."""

    def lose_one(run: Path) -> None:
        _kill(nodes.nodes[1], run)
        start_other(nodes)

    _goes_on_from_memory(shell, nodes, tmp_path, lose_one)


@draws.in_turn("a lost node", 1, 3)
def test_a_driver_that_dies_takes_ranks_along_and_asks_for_no_stop(
    shell: Shell, nodes: RayNodes, tmp_path: Path
):
    """Ray ends them by the signal of schedulers."""

    def kill_driver(run: Path) -> None:
        os.kill(read(run / "roles.json")["roles"]["trainer"]["pid"], signal.SIGKILL)

    _goes_on_from_memory(shell, nodes, tmp_path, kill_driver)


def _goes_on_from_memory(shell: Shell, nodes: RayNodes, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """No checkpoint is read, and the run has the bits of one that nothing has disturbed."""
    run, straight = tmp_path / "run", tmp_path / "straight"
    command = ("sft", "@", f"{CONFIGS}/sft.toml", "--workers", 2, "--max-steps", LAST)
    memory = ("--ckpt.interval", 1000, "--ckpt.memory-interval", 1, "--ray.address", nodes.address)
    with shell.start(*command, *memory, "--output-dir", run, environment=nodes.environment) as running:
        running.wait_until(lambda: len(rows(run)) >= 8)
        harm(run)
        reached = rows(run)[-1]["step"]
        finished = running.finish()
    assert finished.code == 0, finished.output
    log = (run / "logs" / "trainer.log").read_text()
    came = {int(step) for step in re.findall(r"the ranks go on from step (\d+), which is in memory", log)}
    assert len(came) == 1
    # One step, or two if the machine was so busy that a step was not taken into memory.
    assert reached - 2 <= max(came), log
    assert rows(run)[-1]["run/recomputed_steps"] <= 2
    assert steps(run) == [LAST]
    assert not (run / "memory").exists()
    assert all("time/memory_peer" in row for row in rows(run)[-10:])
    shell.succeed(*command, "--ckpt", "--output-dir", straight)
    assert untimed(whole_rows(run, LAST)) == untimed(whole_rows(straight, LAST))
    assert_same_bits(tensors(step_folder(run, LAST)), tensors(step_folder(straight, LAST)))


def _kill(node: Command, run: Path) -> None:
    """Kill all processes of a node at once, as if its machine had lost its power."""
    pids = {node.process.pid, *(pid for pid, _ in node.family())}
    roles = read(run / "roles.json")["roles"]
    (rank,) = [name for name in ("trainer_rank0", "trainer_rank1") if roles[name]["pid"] in pids]
    receipts = (run / "memory").glob(f"*/?/{rank.removeprefix('trainer_')}.json")
    steps = {path: int(found[1]) for path in receipts if (found := re.search(r":(\d+)\"", path.read_text()))}
    owner = read(max(steps, key=lambda path: steps[path]).parents[1] / "owner.json")["pid"]
    pids = {owner, *pids.intersection(psutil.pids())}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
