"""Through every fault point, with SIGKILL and with I/O errors, and what a run makes of it."""

import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import draws
import pytest
import toy
from toy import INTERVAL, KILLED, LAST, SAVE_FAILED, Toy

from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.tensors.compression import packed_files
from cairn.run import faults
from cairn.run.faults import POINTS, fault_point

ERRORS = ("ENOSPC", "EIO", "EACCES")

# For the second save of three, at step 4: how often the point was reached by then; which step is the latest
# afterwards, and what debris there is.
STRIKES = {
    "save.begin": (2, 2, []),
    "save.copy": (2, 2, [4]),
    "save.write": (6, 2, [4]),  # four blocks a save
    "save.before_fsync": (2, 2, [4]),
    "save.before_part": (2, 2, [4]),
    "orchestrator.before_part": (2, 2, [4]),
    "commit.before_manifest": (2, 2, [4]),
    "commit.manifest_written": (2, 2, [4]),
    "commit.done": (2, 4, []),
    "retention.before_delete": (1, 4, []),
    "retention.manifest_deleted": (1, 4, [2]),
}
WRITERS = ("save.write", "save.before_fsync", "save.before_part")


# Points that only a whole RL run reaches: cairn chaos draws its faults from all points.
OF_RL_RUNS = ("trainer.", "publish.", "orchestrator.")
OF_COMMANDS = ("export.", "import.", "adopt.")
"""Points that only `ckpt` reaches: test_killed_conversions.py."""
OF_UPLOADS = ("remote.",)
"""Points that only a run with --ckpt.remote reaches: test_remote.py."""


OF_STORED_POLICIES = ("policy.",)
"""Points that only a run whose policies go through an object store reaches: test_remote.py."""
OF_PREFERENCES = ("reference.",)
"""Points that only a `dpo` run reaches: tests/integration/test_dpo.py."""
OF_SERVICE = ("service.",)
"""Points that only the command `service` reaches: test_killed_service.py."""
OF_BRANCHES = ("branches.",)
"""Points that only `rl --branch` reaches: tests/unit/test_branches.py."""
OF_MEMORY = ("memory.", "peer.")
"""Points that only a run with --ckpt.memory-interval reaches: test_chaos.py, and on several nodes
tests/unit/test_memory_nodes.py."""


def test_every_fault_point_is_covered():
    """A point that is added must be added here, unless only another kind of run reaches it, or `ckpt`."""
    assert STRIKES.keys() <= POINTS.keys()
    elsewhere = OF_RL_RUNS + OF_COMMANDS + OF_UPLOADS + OF_STORED_POLICIES + OF_PREFERENCES + OF_SERVICE
    elsewhere += OF_MEMORY + OF_BRANCHES
    assert all(point.startswith(elsewhere) for point in POINTS.keys() - STRIKES.keys())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The last step of a run that nothing disturbed."""
    run = Toy(tmp_path_factory.mktemp("straight"))
    assert toy.run(run) == 0
    assert os.listdir(run.store.root) == [f"step_{LAST}"], "retention works"
    return toy.contents(run.store.folder(LAST))


def goes_on(run: Toy, straight: dict[str, bytes]) -> None:
    """The run goes on from the newest good step, cleans up, and arrives where an undisturbed one does.

    One that was at its end has nothing to do, and so leaves what it had no time to delete.
    """
    at_the_end = run.store.latest() == LAST
    run = replace(run, attempt=run.attempt + 1, fault="")
    assert toy.run(run) == 0
    toy.assert_sound(run)
    left = set(os.listdir(run.store.root)) - {f"step_{LAST}"}
    assert left <= ({f"step_{LAST - INTERVAL}"} if at_the_end else set()), "nothing else is left"
    expected = straight | ({"orchestrator/state.json": b'{"step": %d}' % LAST} if run.orchestrator else {})
    found = toy.contents(run.store.folder(LAST))
    if at_the_end:  # it may have died after the commit, before the notes of the parts were taken away
        found = {name: content for name, content in found.items() if not name.startswith(".")}
    assert found == expected


@pytest.mark.parametrize("errors", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("point", STRIKES)
def test_a_fault_costs_no_step(point: str, errors: int, straight: dict[str, bytes], tmp_path: Path):
    """Afterwards the latest step is whole, no earlier one was harmed, debris is reported and cleaned away,
    and the run goes on to the same weights, bit for bit.

    A process is killed there; then it meets an error, which one the commit decides.
    """
    count, latest, debris = STRIKES[point]
    actions = ["kill", *random.Random(draws.seed(point)).sample(ERRORS, errors)]

    def strike(action: str) -> None:
        run = Toy(tmp_path / action, fault=f"{point}:{action}@{count}", orchestrator=point.startswith("orch"))
        code = toy.run(run)
        store = run.store
        if point.startswith("retention") and action != "kill":
            assert code == 0, "a failed delete is not fatal"
            assert "could not delete checkpoint 2" in (run.root / "trainer_1.log").read_text()
            assert os.listdir(store.root) == [f"step_{LAST}"]
            assert toy.contents(store.folder(LAST)) == straight
            return
        trainer_dies = (action == "kill" and point not in WRITERS) or run.orchestrator
        assert code == (KILLED if trainer_dies else SAVE_FAILED), (run.root / "trainer_1.log").read_text()
        assert store.latest() == latest
        toy.assert_sound(run)
        assert store.debris() == [store.folder(step) for step in debris]
        # While step 2 is all there is, it stays, although only one is to be kept.
        earlier = point == "commit.done" or point == "retention.before_delete"
        assert store.steps() == ([2, 4] if earlier else [latest])
        goes_on(run, straight)

    toy.both_cores(strike, actions)


@pytest.mark.parametrize(
    ("save", "point", "latest"),
    [
        (1, "save.write", None),
        (1, "commit.before_manifest", None),
        (1, "commit.done", 2),
        (3, "save.write", 4),
        (3, "commit.before_manifest", 4),
    ],
)
def test_the_first_and_the_last_save_are_no_different(
    save: int, point: str, latest: int | None, straight: dict[str, bytes], tmp_path: Path
):
    """A run that was killed before it had a checkpoint starts afresh; one killed at its end goes on."""
    blocks = 4 if point == "save.write" else 1
    run = Toy(tmp_path, fault=f"{point}:kill@{blocks * (save - 1) + 1}")
    assert toy.run(run) == (SAVE_FAILED if point == "save.write" else KILLED)
    assert run.store.latest() == latest
    toy.assert_sound(run)
    goes_on(run, straight)


@pytest.mark.parametrize("point", ["save.write:kill@6", "save.before_fsync:kill@2", "save.write:ENOSPC@6"])
def test_packed_saves_are_no_different(point: str, straight: dict[str, bytes], tmp_path: Path):
    """A writer that dies between blocks leaves debris, and the run arrives at the same state."""
    run = Toy(tmp_path, fault=point, packed=("trainer",))
    assert toy.run(run) == SAVE_FAILED
    assert run.store.latest() == 2
    toy.assert_sound(run)
    assert run.store.debris() == [run.store.folder(4)]
    assert toy.run(replace(run, attempt=2, fault="")) == 0
    toy.assert_sound(run)
    last = run.store.folder(LAST)
    assert run.store.steps() == [LAST]
    for name, content in straight.items():
        file = packed_files(last / Path(name).parent).get(Path(name).name)
        assert (file.read(0, file.size) if file else (last / name).read_bytes()) == content, name


def test_two_accidents_in_a_row(straight: dict[str, bytes], tmp_path: Path):
    """The resumed run is struck at the same step, elsewhere, and then at the next."""
    run = Toy(tmp_path, fault="save.before_part:kill@2")
    assert toy.run(run) == SAVE_FAILED
    run = replace(run, attempt=2, fault="commit.manifest_written:kill@1")
    assert toy.run(run) == KILLED
    toy.assert_sound(run)
    run = replace(run, attempt=3, fault="save.copy:EIO@2")
    assert toy.run(run) == SAVE_FAILED
    assert run.store.steps() == [4]
    goes_on(run, straight)


# At any time

WIDTH = 30_000  # about 25 MB a save: long enough to be hit in the middle


@pytest.fixture(scope="module")
def straight_and_wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """As `straight`, of a larger model."""
    run = Toy(tmp_path_factory.mktemp("wide"), width=WIDTH)
    assert toy.run(run) == 0
    return toy.contents(run.store.folder(LAST))


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("victim", ["trainer", "writer"])
def test_a_kill_at_any_time_costs_no_step(
    victim: str, runs: int, straight_and_wide: dict[str, bytes], tmp_path: Path
):
    """SIGKILL at random moments around a save, of the trainer or of its writer alone."""
    chance = random.Random(f"kill the {victim}")
    plan = [(i, chance.choice([2, 4, 6]), chance.random() ** 2 * 0.3) for i in range(runs)]
    ends: list[int] = []

    def strike(choice: tuple[int, int, float]) -> None:
        number, step, delay = choice
        run = Toy(tmp_path / str(number), width=WIDTH)
        with toy.started(toy.train, run) as trainer:
            while not run.announcement(step).exists() and trainer.is_alive():
                time.sleep(0.001)
            time.sleep(delay)
            if victim == "trainer":
                trainer.kill()
            else:
                for pid in toy.children(trainer.pid, "cairn.checkpoint.saving.writer"):
                    os.kill(pid, signal.SIGKILL)
            trainer.join(toy.PATIENCE)
            ends.append(trainer.exitcode)
            assert trainer.exitcode in (0, KILLED if victim == "trainer" else SAVE_FAILED)
        toy.assert_sound(run)
        assert (run.store.latest() or 0) >= step - 2, "the save before this one was over"
        goes_on(run, straight_and_wide)

    toy.both_cores(strike, plan)
    assert any(ends), "not all came too late"


@pytest.mark.parametrize("step", [2, 4], ids=["starting", "ready"])
def test_a_writer_never_outlives_its_trainer(step: int, tmp_path: Path):
    """A writer that was left behind would write into the steps of the attempt that comes next.

    Here it sleeps while its trainer is killed, wakes when the next attempt has saved the same step, and is
    dead, or leaves that alone.
    """
    run = Toy(tmp_path, keep_last=None, dies_at=step)
    with toy.started(toy.die_while_the_writer_sleeps, run) as trainer:
        trainer.join(toy.PATIENCE)
        assert trainer.exitcode == KILLED
    assert run.store.latest() == (None if step == 2 else 2)
    writer = int((tmp_path / "writer.pid").read_text())
    again = replace(run, attempt=2, seed=1)
    assert toy.run(again) == 0
    before = toy.contents(again.store.folder(step))
    with contextlib.suppress(ProcessLookupError):
        os.kill(writer, signal.SIGCONT)
    toy.wait_until_gone(writer)
    assert toy.contents(again.store.folder(step)) == before
    for number in (2, 4, 6):
        verify(again.store.folder(number))


# The switch itself


@pytest.mark.parametrize(
    "value",
    [
        *("save.write", "save.wirte:kill", "save.write:EWHAT", ":kill", "save.write:", "save.write:kill@0"),
        *("save.write:kill@1#", "save.write:kill#one", "commit.done:kill#1"),
    ],
)
def test_a_fault_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str):
    """A mistyped CAIRN_FAULT must not pass for a run without faults."""
    monkeypatch.setenv("CAIRN_FAULT", value)
    with pytest.raises(ValueError, match="CAIRN_FAULT"):
        fault_point("commit.done")


def test_a_fault_strikes_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Over all processes that inherit the setting, if a folder says which are still to strike."""
    monkeypatch.setenv("CAIRN_FAULT", "commit.done:EIO,save.begin:ENOSPC")
    monkeypatch.setenv("CAIRN_FAULT_ONCE", str(tmp_path))
    (tmp_path / "commit.done:EIO").touch()
    monkeypatch.setattr(faults, "_reached", {})
    with pytest.raises(OSError, match=r"commit\.done:EIO"):
        fault_point("commit.done")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(faults, "_reached", {})  # as in the next process
    fault_point("commit.done")
    fault_point("save.begin")


def test_a_fault_of_a_rank_strikes_no_other(monkeypatch: pytest.MonkeyPatch):
    """Each rank counts how often it reaches a point, whatever strikes there."""
    monkeypatch.delenv("CAIRN_FAULT_ONCE", raising=False)
    monkeypatch.setenv("CAIRN_FAULT", "save.copy:EIO#1,save.copy:ENOSPC@2,save.copy:EACCES@3#0")
    for rank, errors in {"0": [None, "ENOSPC", "EACCES"], "1": ["EIO", "ENOSPC", None]}.items():
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(faults, "_reached", {})
        for error in errors:
            with pytest.raises(OSError, match=error) if error else contextlib.nullcontext():
                fault_point("save.copy")


def test_without_the_switch_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    """Nor with a fault elsewhere."""
    monkeypatch.delenv("CAIRN_FAULT", raising=False)
    fault_point("commit.done")
    monkeypatch.setenv("CAIRN_FAULT", "save.write:kill,save.copy:EIO@2")
    fault_point("commit.done")
