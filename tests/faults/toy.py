"""A run in miniature, in processes that can be killed: training, saving, retention and resuming.

Everything that saves is Cairn's own; the model is a toy, and there is neither Ray nor a launcher. Processes
are forked from one that has imported torch, so that a run takes a fraction of a second.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from runs import forked

from cairn.checkpoint.retention import apply_retention
from cairn.checkpoint.saving.arena import SaveFailed
from cairn.checkpoint.saving.rank_shares import Tensors
from cairn.checkpoint.saving.saver import SaveOptions, Saver, SavingRank
from cairn.checkpoint.step_folder import verify
from cairn.checkpoint.store import CheckpointStore
from cairn.checkpoint.tensors.sharded_files import load_step
from cairn.config.ckpt import CkptConfig
from cairn.run.faults import fault_point
from cairn.run.files import read_json
from cairn.run.waiting import wait_for
from cairn.trainer.models.trained import Trained

LAST, INTERVAL = 6, 2
SAVE_FAILED = 3
"""Exit code of a trainer that heard of a failed save."""
KILLED = -signal.SIGKILL
PATIENCE = 120.0
"""Seconds that anything may take before a test gives up on it."""


@dataclass(frozen=True)
class Toy:
    """What differs between runs: the folder, the fault, and the size and seed of the model."""

    root: Path
    attempt: int = 1
    fault: str = ""
    width: int = 1100
    seed: int = 0
    orchestrator: bool = False
    keep_last: int | None = 1
    dies_at: int = 0
    packed: tuple[str, ...] = ()

    @property
    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        return CheckpointStore(self.root / "checkpoints")

    @property
    def id(self) -> str:
        """Names the attempt in part files."""
        return f"toy:{self.attempt}"

    def announcement(self, step: int) -> Path:
        """How the trainer tells the orchestrator that a step is a checkpoint."""
        return self.root / f"announced_{self.attempt}_{step}"


class Plain(Trained):
    """A model that is no Hugging Face one: its tensors have one name."""

    def saved(self) -> dict[str, torch.Tensor]:
        """By the model's own names."""
        return self.module.state_dict()


class Training:
    """A model with dropout, AdamW, and everything random seeded by the step."""

    def __init__(self, toy: Toy):
        torch.manual_seed(toy.seed)
        layers = (
            torch.nn.Linear(61, toy.width),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(toy.width, 7, bias=False),
        )
        self.toy = toy
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, step: int, before_update: Callable[[], None]) -> None:
        """One optimiser step."""
        torch.manual_seed(1000 * self.toy.seed + step)
        self.model(torch.randn(4, 61)).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Tensors:
        """Weights and optimiser state."""
        return Plain(self.model, self.optimizer).tensors()

    def load(self, folder: Path) -> int:
        """Go on from a checkpoint; returns its step."""
        self.step(0, lambda: None)
        load_step(folder, self.tensors())
        return read_json(folder / "trainer" / "state.json")["step"]


def train(toy: Toy, before_save: Callable[[Saver, int, dict], None] | None = None) -> None:
    """The trainer's process: from the newest good step to the last."""
    _be(toy, "trainer")
    store, training = toy.store, Training(toy)
    folder, _ = store.newest_good()
    start = training.load(folder) if folder else 0
    store.set_aside_after(start, f"before_attempt_{toy.attempt}")
    rules = CkptConfig(keep_last=toy.keep_last)
    saver = Saver(
        store,
        SavingRank(0, 1, f"{toy.id} {os.getpid()}"),
        roles={"orchestrator": toy.id} if toy.orchestrator else None,
        how=SaveOptions(part_timeout=PATIENCE, packed=toy.packed),
        after_commit=lambda step: apply_retention(store, rules),
    )
    try:
        for step in range(start + 1, LAST + 1):
            training.step(step, saver.before_update)
            if step % INTERVAL == 0:
                tensors = training.tensors()
                if before_save:
                    before_save(saver, step, tensors)
                saver.save(step, tensors, {"trainer/state.json": b'{"step": %d}' % step}, _about(toy, step))
                toy.announcement(step).touch()  # by now the save before this one is over
            saver.check()
        saver.finish()
    except SaveFailed as error:
        print(error, flush=True)
        sys.exit(SAVE_FAILED)
    saver.close()


def orchestrate(toy: Toy) -> None:
    """The orchestrator's process: its part of each checkpoint, as cairn.orchestrator.loop writes it."""
    _be(toy, "orchestrator")
    start = toy.store.latest() or 0  # which stands until this process has done its part of the next
    for step in range(start + INTERVAL, LAST + 1, INTERVAL):
        wait_for(
            lambda step=step: toy.announcement(step).exists() or None,
            seconds=PATIENCE,
            whom="the trainer",
            setting="PATIENCE",
        )
        toy.store.begin(step, ["orchestrator"])
        fault_point("orchestrator.before_part")
        content = {"orchestrator/state.json": b'{"step": %d}' % step}
        toy.store.write_part(step, "orchestrator", content, toy.id)


def die_while_the_writer_sleeps(toy: Toy) -> None:
    """A trainer that is killed when its state has been copied and not a byte was written.

    Its writer is put to sleep while it starts if it is to save `toy.dies_at` first, else when it is ready.
    """

    def put_to_sleep(saver: Saver, step: int, tensors: dict) -> None:
        if step < toy.dies_at:
            return
        saver.finish()
        saver.prepare(tensors)
        writer = wait_for(  # the kernel shows its command line a moment after its execve
            lambda: next(iter(children(os.getpid(), "cairn.checkpoint.saving.writer")), None),
            seconds=PATIENCE,
            whom="the writer",
            setting="PATIENCE",
        )
        os.kill(writer, signal.SIGSTOP)
        (toy.root / "writer.pid").write_text(str(writer))
        saver.save(step, tensors, {}, _about(toy, step))
        saver.before_update()
        os.kill(os.getpid(), signal.SIGKILL)

    train(toy, put_to_sleep)


def _be(toy: Toy, role: str) -> None:
    """Make this process a role: its log, its fault."""
    log = os.open(toy.root / f"{role}_{toy.attempt}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["CAIRN_FAULT"] = toy.fault
    torch.set_num_threads(1)


def _about(toy: Toy, step: int) -> dict:
    return {
        "run_id": "toy",
        "attempt": toy.attempt,
        "branch": "branch_1",
        "parent": None,
        "parts": ["trainer", *(["orchestrator"] if toy.orchestrator else [])],
        "world_size": 1,
        "dtypes": {},
        "metrics": {"step": step},
        "versions": {},
        "config_digest": "",
    }


# From the outside


@contextlib.contextmanager
def started(function: Callable[[Toy], None], toy: Toy) -> Iterator:
    """A role's process, which does not outlive the block."""
    toy.root.mkdir(parents=True, exist_ok=True)
    with forked(function, toy) as process:
        yield process


def run(toy: Toy) -> int:
    """A run to its end, as a launcher would: when the orchestrator fails, the trainer is killed.

    Returns the trainer's exit code.
    """
    with started(train, toy) as trainer:
        if toy.orchestrator:
            with started(orchestrate, toy) as orchestrator:
                orchestrator.join(PATIENCE)
                if orchestrator.exitcode != 0:
                    trainer.kill()
        trainer.join(PATIENCE)
        assert trainer.exitcode is not None, f"still running after {PATIENCE} s"
        return trainer.exitcode


def children(parent: int, command: str) -> list[int]:
    """The children of a process whose command line has `command` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            own = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if own == parent and command.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until_gone(pid: int) -> None:
    """Until there is no such process, or only its corpse."""
    end = time.monotonic() + PATIENCE
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, f"process {pid} lives on"
            time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a step but its manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def assert_sound(toy: Toy) -> None:
    """Every step that exists is as it was written."""
    for step in toy.store.steps():
        verify(toy.store.folder(step))
        assert read_json(toy.store.folder(step) / "trainer" / "state.json") == {"step": step}
    newest = toy.store.latest()
    assert toy.store.newest_good() == (newest and toy.store.folder(newest), [])


def both_cores(function: Callable, arguments: list) -> None:
    """Call `function` with each of `arguments`, two at a time; raises what the first failure raised."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(function, argument) for argument in arguments]:
            future.result()
