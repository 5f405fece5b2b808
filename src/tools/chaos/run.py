"""One run, struck by disasters, and the promises that it must keep nevertheless."""

import json
import random
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from cairn.checkpoint.manifest import CheckpointError
from cairn.inference.client import TOKEN_VARIABLE
from cairn.remote import Objects, RemoteError, RemoteStore
from cairn.run.directory import RunDirectory
from cairn.tools.chaos.disasters import Disasters, mount_small_disk, remove_folder, unmount
from cairn.tools.chaos.plan import Disaster
from cairn.tools.chaos.processes import Family
from cairn.tools.chaos.promises import Promises
from cairn.tools.chaos.task import DEADLINE, ChaosTask, Result, RunWatch

PATIENCE = 60.0
"""Seconds that remaining processes have to exit by themselves."""
EARLY = 5.0
"""Seconds after a start during which the command may not have installed its signal handlers yet."""
OF_COMMAND = ("branches.",)
"""How the fault points begin that the whole command dies at."""
STARTS = 8
"""Maximum number of starts of one run."""
EXIT_USAGE, EXIT_STOPPED = 2, 75


class ChaosRun:
    """A task's command from its first start to its end, through all disasters."""

    def __init__(
        self,
        task: ChaosTask,
        plan: list[Disaster],
        folder: Path,
        chance: random.Random,
        *,
        prove: bool = False,
    ):
        self.task = task
        self.prove = prove
        self.pending = [disaster for disaster in plan if disaster.kind != "fault"]
        self.faults = [disaster for disaster in plan if disaster.kind == "fault"]
        self.chance = chance
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.path = folder / "run"
        self.small_disk = any(disaster.kind == "full" for disaster in plan)
        if self.small_disk:
            mount_small_disk(self.path)
        self.remote = remote_of(task, folder)
        self.run = RunDirectory(self.path)
        self.log = folder / "command.log"
        self.result = Result(folder)
        self.watch = RunWatch(self.run, self.result)
        self.once = folder / "faults"
        self.once.mkdir()
        for fault in self.faults:
            (self.once / fault.target).touch()
        self.family = Family(self._environment())
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.disasters = Disasters(self)
        self.down = False
        """Whether the whole command was killed."""
        self.asked_to_stop = False
        self.excused = False
        """Whether disk or server had a problem that the command may have died of."""
        self.machines = 1
        self._moved = False  # to another machine, where it has not been started yet
        self._disturbed = False  # by more than a request to stop
        self._struck_at = self._started_at = 0.0

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        """The command's newest process."""
        assert self._process, "it has not been started"
        return self._process

    @property
    def at_work(self) -> RunDirectory:
        """The run directory whose roles are struck."""
        return self.run

    def start_command(self, command: list[str]) -> None:
        """Start the command that the disasters strike."""
        self._process = self.family.start(self.log, command)

    def move(self) -> None:
        """Lose the run directory with all that it holds; the run goes on in another, empty folder."""
        assert self.remote, "plans for runs without remote steps have no such disaster"
        remove_folder(self.path)
        self.machines += 1
        self.path = self.folder / f"run_{self.machines}"
        if self.small_disk:
            mount_small_disk(self.path)
        self.run = RunDirectory(self.path)
        self.watch.move(self.run, max(self.remote_steps(), default=0))
        self._moved = True

    def remote_steps(self) -> list[int]:
        """The steps in the remote store, each read in full; one that is not whole is a violation."""
        assert self.remote
        steps = self.remote.steps()
        for step in steps:
            try:
                self.remote.verify(step)
            except CheckpointError as error:
                self.result.violations.append(f"remote: {error}")
        return steps

    def _environment(self) -> dict[str, str]:
        environment = {"CAIRN_FAULT_ONCE": str(self.once)}
        if self.task.proxy:
            environment[TOKEN_VARIABLE] = self.task.token
        if self.faults:
            environment["CAIRN_FAULT"] = ",".join(fault.target for fault in self.faults)
        return environment

    def go(self) -> Result:
        """Run the command to its end, then check every promise."""
        if self.task.server:
            self.task.server.start()
        if self.task.proxy:
            self.task.proxy.finished.clear()
        try:
            self._start()
            self._see_through()
            self._check_processes()
        finally:
            self._end_everything()
        self._conclude()
        if self.remote and self.result.violations:
            self.result.violations[-1] += f" (its remote steps: {self.remote})"
        elif self.remote:
            self.remote.objects.delete([name for name, _ in self.remote.objects.list()])
        return self.result

    # From start to end

    def _start(self) -> None:
        resume = ["--ckpt.resume", "auto"] if self.starts else []
        command = [*self.task.command, "--output-dir", str(self.path), *resume]
        if self.remote:
            command += ["--ckpt.remote", str(self.remote)]
        if self.task.proxy:
            command += ["--orchestrator.inference-url", self.task.proxy.url]
        self.start_command(command)
        self.starts += 1
        self._started_at = time.monotonic()
        self.down = self.asked_to_stop = self._disturbed = self._moved = False

    def _see_through(self) -> None:
        end, furthest = 0.0, (-1, 0, 0)
        while True:
            self.watch.look()
            progress = (
                max(self.watch.step, furthest[0]),
                len(self.result.struck) + len(self.result.missed),
                sum((self.once / fault.target).exists() for fault in self.faults),
            )
            if progress != furthest:
                end, furthest = time.monotonic() + DEADLINE, progress
            if self.process.poll() is not None:
                if self._is_over():
                    return
                self._start()
            elif self.pending and self._is_due(self.pending[0]):
                disaster = self.pending.pop(0)
                struck = self.disasters.strike(disaster)
                (self.result.struck if struck else self.result.missed).append(disaster)
                self._disturbed = self._disturbed or disaster.kind != "stop"
                self._struck_at = time.monotonic()
            self.disasters.do_what_is_due()
            if time.monotonic() > end:
                self.result.violations.append(
                    f"{DEADLINE:g} s without a new step or disaster, at step {self.watch.step}"
                )
                return
            time.sleep(0.03)

    def _is_over(self) -> bool:
        """Whether the run ended with the command; if not, a user would start it again."""
        code = self.process.returncode
        fired = [fault for fault in self.faults if not (self.once / fault.target).exists()]
        self.down = self.down or any(fault.target.startswith(OF_COMMAND) for fault in fired)
        for fault in fired:
            self.faults.remove(fault)
            self.result.struck.append(fault)
        disk_failed = self.excused or any("kill" not in fault.target for fault in fired)
        if code == 0 and not self._moved:
            return True
        early = code < 0 and self._struck_at < self._started_at + EARLY
        stopped = code == EXIT_STOPPED or early
        allowed = stopped if self.asked_to_stop else code in (1, EXIT_USAGE) and disk_failed
        # A stop signal during a restart may find nothing to save.
        allowed = allowed or self.down or (self.asked_to_stop and bool(self._disturbed or fired))
        if not allowed or self.starts == STARTS:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            self.result.violations.append(f"the command ended with exit code {code}; it printed:\n{tail}")
            return True
        if self.starts > 1:
            self.disasters.repair()  # one start failed because of it
        for job in self.disasters.before_restart:
            job()
        self.disasters.before_restart.clear()
        self.excused = bool(self.disasters.repairs)
        return False

    def _end_everything(self) -> None:
        self.disasters.end_all()
        self.family.kill()
        if self._process:
            self._process.wait()

    def _check_processes(self) -> None:
        """Check that no process of the run is left."""
        end = time.monotonic() + PATIENCE
        while left := self.family.processes():
            if time.monotonic() > end:
                self.result.violations.append(f"processes are left: {[p.command for p in left]}")
                return
            time.sleep(0.1)

    def _is_due(self, disaster: Disaster) -> bool:
        if disaster.step is None:
            return time.monotonic() >= self._struck_at + disaster.after
        seen = self.watch.seen_at.get(disaster.step)
        return seen is not None and time.monotonic() >= seen + disaster.after

    # Promises

    def _conclude(self) -> None:
        result = self.result
        result.missed += [*self.pending, *self.faults]
        promises = self.promises()
        promises.check()
        self._check_remote()
        self._check_generations()
        if self.prove and not result.violations:
            promises.check_by_replay()

    def promises(self) -> Promises:
        """What the run has to keep."""
        setting, calm = self.task.setting, self.task.calm
        here = self.machines == 1  # results of validations are not uploaded
        return Promises(self.path, self.watch, setting.last_step, setting.interval, calm, evaluated=here)

    def _check_remote(self) -> None:
        """Check that the remote store has the last step, and no step that is not whole."""
        if not self.remote:
            return
        try:
            newest = max(self.remote_steps(), default=None)
        except RemoteError as error:
            self.result.violations.append(f"remote: {error}")
            return
        if newest != self.task.setting.last_step:
            self.result.violations.append(f"the newest remote checkpoint is step {newest}")

    def _check_generations(self) -> None:
        """Check that a death of the trainer caused no complete generation to be requested again."""
        spared = {"trainer", "worker", "writer"}
        for disaster in self.result.struck:
            of_trainer = disaster.target in spared and disaster.kind in ("kill", "pause")
            if not of_trainer and not disaster.target.startswith(("trainer.", "publish.")):
                return
        if self.task.proxy is None:
            return
        twice = [body for body, count in self.task.proxy.finished.items() if count > 1]
        if twice:
            shown = json.loads(twice[0])
            what = f"{len(twice)} generations were made twice although only the trainer died"
            self.result.violations.append(f"{what}, such as {shown}")


def scratch(prefix: str) -> Path:
    """A new temporary folder."""
    return Path(tempfile.mkdtemp(prefix=prefix))


def remote_of(task: ChaosTask, folder: Path) -> RemoteStore | None:
    """A prefix of its own for the remote steps of a run that has some."""
    if not task.setting.remote:
        return None
    own = f"chaos_{secrets.token_hex(8)}"
    base = task.remote.rstrip("/") if task.remote else f"file://{quote(str(folder))}"
    return RemoteStore(Objects(f"{base}/{own}"))


def remove(folder: Path) -> None:
    """Remove the folder of a run that kept its promises."""
    for path in folder.glob("run*"):
        unmount(path)
    shutil.rmtree(folder, ignore_errors=True)
