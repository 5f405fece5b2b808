"""What each kind of disaster does to a run."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cairn.checkpoint.manifest import FILE_NAME, load_manifest
from cairn.checkpoint.store import CheckpointStore
from cairn.inference.client import InferenceClient
from cairn.run.directory import RunDirectory
from cairn.tools.chaos.plan import SMALL_FILES, Disaster
from cairn.tools.chaos.processes import Family, Process, send
from cairn.tools.chaos.proxy import MOODS, Proxy
from cairn.tools.chaos.task import ChaosTask, RunWatch, SharedServer

ROLE_PATIENCE = 5.0
"""Seconds that a disaster waits for its victim to start."""
DISK_BYTES = 512 << 20
"""Size of the file system for a run whose disk will be filled."""
RANKS = {"worker": "trainer_rank0", "worker1": "trainer_rank1"}
"""Names in roles.json of the processes that plans call differently."""


class Victim(Protocol):
    """What a disaster needs to know about the run that it strikes."""

    task: ChaosTask
    family: Family
    watch: RunWatch
    path: Path
    chance: random.Random
    down: bool
    """Whether the whole command was killed."""
    asked_to_stop: bool
    excused: bool
    """Whether disk or server had a problem that the command may have died of."""

    @property
    def at_work(self) -> RunDirectory:
        """The run directory whose roles are struck."""
        ...

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The command's newest process."""
        ...

    def move(self) -> None:
        """Lose the run directory; the run goes on in another, empty folder."""
        ...


class Disasters:
    """Strikes one run. Actions that end a disaster wait in `later`, with their time."""

    def __init__(self, run: Victim):
        self.run = run
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.repairs: list[Callable[[], None]] = []
        """Actions that make the run's folder writable again."""
        self.before_restart: list[Callable[[], None]] = []
        """Damage of a power cut, applied before the command is started again."""
        self._kinds: dict[str, Callable[[Disaster], bool]] = {
            "kill": self._kill,
            "stop": self._stop,
            "pause": self._pause,
            "power_cut": self._power_cut,
            "corrupt": self._power_cut,
            "torn": self._power_cut,
            "rot": self._rot,
            "machine_lost": self._lose_machine,
            "wrong_weights": self._push_wrong_weights,
            "rival": self._rival,
            "full": self._fill_disk,
            "read_only": self._lock_folder,
            **dict.fromkeys(MOODS, self._set_mood),
        }

    def strike(self, disaster: Disaster) -> bool:
        """Carry out a disaster; False if its victim does not exist (any more)."""
        return self._kinds[disaster.kind](disaster)

    def do_what_is_due(self) -> None:
        """End the disasters whose time has come."""
        due = [job for when, job in self.later if time.monotonic() >= when]
        self.later = [(when, job) for when, job in self.later if time.monotonic() < when]
        for job in due:
            job()

    def end_all(self) -> None:
        """End all disasters now."""
        for _, job in self.later:
            job()
        self.later.clear()
        self.repair()

    def repair(self) -> None:
        """Make the run's folder writable again."""
        while self.repairs:
            self.repairs.pop()()

    # Processes

    def _kill(self, disaster: Disaster) -> bool:
        if disaster.target == "server":
            server = self._server()
            server.kill()
            server.launch()
            return True
        victims = self._wait_for_victims(disaster.target)
        self.run.down = self.run.down or (bool(victims) and disaster.target == "launcher")
        send(signal.SIGKILL, victims)
        return bool(victims)

    def _stop(self, disaster: Disaster) -> bool:
        """A stop signal: to one process, to the launcher's process group, or to all processes."""
        number = signal.Signals[f"SIG{disaster.signal}"]
        if disaster.target == "everyone":
            victims = self.run.family.processes()
        elif disaster.target == "group":
            victims = [p for p in self.run.family.processes() if _group(p.pid) == self.run.process.pid]
        else:
            victims = self._wait_for_victims(disaster.target)
        self.run.asked_to_stop = self.run.asked_to_stop or bool(victims)
        send(number, victims)
        return bool(victims)

    def _pause(self, disaster: Disaster) -> bool:
        victims = self._wait_for_victims(disaster.target)
        send(signal.SIGSTOP, victims)
        self._after(disaster.seconds, lambda: send(signal.SIGCONT, victims))
        return bool(victims)

    def _power_cut(self, disaster: Disaster) -> bool:
        """Kill all processes; `corrupt` also damages the newest checkpoint, `torn` a small file."""
        self.run.down = True
        if disaster.kind == "corrupt":
            self.before_restart.append(self._corrupt_newest)
        if disaster.kind == "torn":
            self.before_restart.append(lambda: self._tear(disaster.target))
        send(signal.SIGKILL, self.run.family.processes())
        return True

    def _rot(self, disaster: Disaster) -> bool:
        victims = self._wait_for_victims("worker")
        if victims:
            send(signal.SIGSTOP, victims)  # so that no newer checkpoint is saved meanwhile
            self._corrupt_newest()
            send(signal.SIGKILL, victims)
        return bool(victims)

    def _lose_machine(self, disaster: Disaster) -> bool:
        """Kill all processes and delete the run directory; `disk`: in the other order, a while apart."""
        self.run.down = True
        self.repair()  # else the folder could not be deleted
        if disaster.target == "disk":
            remove_folder(self.run.path)
            time.sleep(disaster.seconds)
        self.run.family.kill()
        self.run.move()
        return True

    def _wait_for_victims(self, target: str) -> list[Process]:
        end = time.monotonic() + ROLE_PATIENCE
        while not (victims := self._victims(target)):
            if self.run.process.poll() is not None or time.monotonic() > end:
                return []
            time.sleep(0.02)
            self.run.watch.look()
        return victims

    def _victims(self, target: str) -> list[Process]:
        """The processes of a role that belong to this run."""
        if target == "server":
            return self._server().family.processes()
        if target == "writer":
            return self.run.family.named("cairn.checkpoint.saving.writer")[:1]
        pid: int | None = self.run.process.pid
        if target != "launcher":
            entry = (self.run.at_work.current_roles() or {}).get(RANKS.get(target, target))
            if entry is None and target == "inference":  # branches have none of their own
                return self.run.family.named("cairn.inference.supervised")[:1]
            pid = entry.pid if entry and entry.state == "running" else None
        return [process for process in self.run.family.processes() if process.pid == pid]

    def _after(self, seconds: float, job: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, job))

    # The server

    def _server(self) -> SharedServer:
        server = self.run.task.server
        assert server, "plans for runs without a server of the harness have no such disaster"
        return server

    def _proxy(self) -> Proxy:
        proxy = self.run.task.proxy
        assert proxy, "plans for runs without a proxy have no such disaster"
        return proxy

    def _set_mood(self, disaster: Disaster) -> bool:
        proxy = self._proxy()
        proxy.mood = disaster.kind

        def recover() -> None:
            proxy.mood = None

        self._after(disaster.seconds, recover)
        return True

    def _push_wrong_weights(self, disaster: Disaster) -> bool:
        """Load another run's weights into the server without telling this run."""
        task = self.run.task
        target = self._proxy().target
        assert task.calm, "the undisturbed run comes first"
        store = CheckpointStore(task.calm.folder / "run" / "checkpoints")
        model = store.folder(task.setting.last_step) / "model"

        async def push() -> None:
            async with InferenceClient(target, task.token) as client:
                await client.update_weights(model, "somebody:else:0")

        with contextlib.suppress(Exception):  # the server may be down
            asyncio.run(push())
            return True
        return False

    def _rival(self, disaster: Disaster) -> bool:
        """Another run that uses the same server, and keeps loading its own weights for a while."""
        self.run.excused = True  # the run may end with an error that names the other run
        end = time.monotonic() + disaster.seconds

        def push_again() -> None:
            self._push_wrong_weights(disaster)
            if time.monotonic() < end:
                self._after(0.2, push_again)

        push_again()
        return True

    # The disk

    def _fill_disk(self, disaster: Disaster) -> bool:
        """Fill the disk completely for a while."""
        ballast = self.run.path / ".ballast"
        self.run.excused = True

        def make_room() -> None:
            ballast.unlink(missing_ok=True)

        with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        self._until_repaired(disaster, make_room)
        return True

    def _lock_folder(self, disaster: Disaster) -> bool:
        """Make the folders of the run and of its checkpoints read-only."""
        self.run.excused = True
        folders = [path for path in (self.run.path, self.run.at_work.checkpoints) if path.is_dir()]
        locked = [folder for folder in folders if _set_writable(folder, False)]
        self._until_repaired(disaster, lambda: [_set_writable(folder, True) for folder in locked])
        return bool(locked)

    def _until_repaired(self, disaster: Disaster, repair: Callable[[], object]) -> None:
        def once() -> None:
            if once in self.repairs:
                self.repairs.remove(once)
            repair()

        self.repairs.append(once)
        self._after(disaster.seconds, once)

    def _tear(self, name: str) -> None:
        """Damage a small file as a power cut or a full disk may: cut, emptied, or overwritten."""
        files = sorted(path for path in self.run.path.glob(SMALL_FILES[name]) if path.is_file())
        if files:
            tear(self.run.chance.choice(files), name, self.run.chance)

    def _corrupt_newest(self) -> None:
        """Flip a byte of the newest checkpoint, unless it is the only one."""
        watch = self.run.watch
        store = watch.store
        latest = store.latest()
        if latest is None or len(store.steps()) < 2:
            return
        folder = store.folder(latest)
        files = [name for name, entry in load_manifest(folder).files.items() if entry.size]
        path = folder / self.run.chance.choice([FILE_NAME, *sorted(files)])
        content = bytearray(path.read_bytes())
        content[self.run.chance.randrange(len(content))] ^= 0xFF
        path.write_bytes(content)
        watch.damaged.add(latest)
        watch.fell_back = True


def tear(path: Path, name: str, chance: random.Random) -> None:
    """Damage one small file; a file of lines gets the beginning of another line."""
    content = path.read_bytes()
    if name in ("metrics", "history", "evals"):
        last = content.rstrip(b"\n").rpartition(b"\n")[2]
        path.write_bytes(content + last[: chance.randint(1, max(len(last) - 1, 1))])
        return
    damage = chance.choice(("cut", "empty", "garbage"))
    if damage == "cut":
        path.write_bytes(content[: chance.randrange(len(content) + 1)])
    else:
        path.write_bytes(b"" if damage == "empty" else chance.randbytes(len(content) or 1))


def mount_small_disk(path: Path) -> bool:
    """Mount a small file system at the future run folder; returns whether that was allowed."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # the command mount is missing
        return False


def unmount(path: Path) -> None:
    """Unmount it, if there is one."""
    if os.path.ismount(path):
        subprocess.run(["umount", "--lazy", str(path)], check=False)


def remove_folder(path: Path) -> None:
    """Remove a run directory, also while processes still write to it."""
    unmount(path)
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _set_writable(folder: Path, writable: bool) -> bool:
    """Set or remove write permission; returns whether that worked."""
    if not folder.exists():
        return False
    if os.geteuid() != 0:
        folder.chmod(0o755 if writable else 0o555)
        return True
    # root ignores modes, so use the immutable attribute.
    command = ["chattr", "-i" if writable else "+i", str(folder)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
