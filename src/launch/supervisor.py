"""Runs the roles of an attempt, each in a process and a session of its own, and sees them through."""

import subprocess
import threading
import time
from pathlib import Path

from cairn.checkpoint.store import CheckpointStore
from cairn.config.rl import RLConfig
from cairn.launch.attempt import RunConfig, StartDamaged
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED, EXIT_USAGE
from cairn.launch.process import RoleFailed, kill_session, log_end, start_role, stop_on_signals
from cairn.launch.ray_folder import remove_private_folders
from cairn.launch.restarts import RestartRule
from cairn.launch.roles import END_SERVER, EXIT_CRASHED, EXIT_DAMAGED, EXIT_LOST, STANDBY, WORKING
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import read_note
from cairn.run.heartbeat import Beat, Watch
from cairn.run.terminal import outlive_terminal

STOP_SECONDS = 20
OWN_WORKERS = ("trainer_rank", "trainer_spare")
"""How the workers in roles.json are named that die with the trainer's driver."""
RANK_DIED = "a rank of the trainer died"
LOOK_SECONDS = 0.5
"""Between two looks at a role's heartbeat."""


def run_roles(run: RunDirectory, attempt: Attempt, roles: list[str], config: RunConfig) -> int:
    """Start the roles, start those again that die, and stop what is left at the end; returns the exit code.

    Once the run was asked to stop, nothing is started any more: what is in no checkpoint yet is saved as far
    as the living roles can.

    Raises:
        RoleFailed: a role failed for good.
        StartDamaged: what the trainer has to go on from is damaged.
        KeyboardInterrupt: the user asked a second time to stop.
    """
    outlive_terminal()
    at_once = threading.Event()
    cut_short: str | None = None
    with (
        stop_on_signals(run, at_once.set),
        StepDisplay(run, attempt.start_step, config.max_steps) as display,
    ):
        watched = {name: _Role(name, run, config) for name in roles}
        try:
            while any(not role.ended for role in watched.values() if role.name in WORKING):
                stopping = run.stop_requested() is not None
                for role in watched.values():
                    role.look_after(display.step, stopping=stopping)
                if at_once.is_set():
                    raise KeyboardInterrupt
                if stopping and (cut_short := _hopeless(run, watched)):
                    break
                display.update()
                time.sleep(0.05)
        finally:
            for role in reversed(watched.values()):
                role.stop()
            run.end_roles("stopped", "")
            remove_private_folders()
    if cut_short:
        code = _conclude_early(run, attempt, display.step, config, cut_short)
    else:
        code = _conclude(run, attempt, watched["trainer"].process.returncode, display.step, config)
    if account := display.account():
        print(account, flush=True)
    return code


def _hopeless(run: RunDirectory, roles: "dict[str, _Role]") -> str | None:
    """Why a run that was asked to stop has nothing to wait for: there is nothing to save, or nobody to do it.

    A trainer that has ended by itself has said how it went.
    """
    trainer = roles["trainer"]
    if trainer.lost:
        return trainer.lost
    if trainer.ended:
        return RANK_DIED if trainer.process.returncode == EXIT_LOST else None
    entries = run.current_roles()
    rank = entries and entries.get("trainer_rank0")
    if entries is None or (rank and rank.state in ("done", "stopped")):
        return None
    if rank and rank.state == "failed":  # its driver is about to end, or was about to replace it
        return RANK_DIED
    beat = read_note(run.heartbeat("trainer_rank0"), Beat)
    if not (rank and beat and rank.state == "running" and beat.pid == rank.pid and beat.unsaved):
        return "no step was under way"
    if beat.waiting:  # for a role that does not come back
        return next((role.lost for role in roles.values() if role.lost), None)
    return None


class _Role:
    """One role's process: the current one, if it was started again; and its standby, if it has one."""

    def __init__(self, name: str, run: RunDirectory, config: RunConfig):
        self.name = name
        self.run = run
        self.log = run.logs / f"{name}.log"
        self.config = config
        self.ended = False
        self.lost: str | None = None
        """How it died, if that was when nothing is started again any more."""
        self._rule = RestartRule(config.max_restarts)
        self._start_at: float | None = None
        self._replaced = False
        self._standby: subprocess.Popen | None = None
        self._begin(0)

    def look_after(self, step: int, *, stopping: bool) -> None:
        """Notice its end, or that it hangs, and start it again, unless the run is stopping.

        `step` is the run's newest.

        Raises:
            RoleFailed: it reported an error that would only come again, or died too often.
            UsageError: it refused what the user asked for; a server, at its first start.
            StartDamaged: see `run_roles`.
        """
        if self.ended or self.lost:
            return
        if self._start_at is not None:
            if stopping:
                self._lose("died")
            elif time.monotonic() >= self._start_at:
                self._start_at = None
                self._begin(step)
            return
        code = self.process.poll()
        if code is None:
            hang = self._hang()
            if hang is None:
                if not stopping:
                    self._keep_standby(step)
                return
            kill_session(self.process.pid)
            self.process.wait()
            self._replace(f"hung ({hang})", step, stopping=stopping)
        elif self.name in WORKING and code in (0, EXIT_STOPPED, EXIT_LOST):
            self.ended = True
        elif code == EXIT_USAGE and (self.name in WORKING or not self._replaced):
            raise UsageError(log_end(self.log).removeprefix("error: "))
        elif self.name == "trainer" and code == EXIT_DAMAGED and (damaged := StartDamaged.reported(self.run)):
            raise damaged
        else:
            kill_session(self.process.pid)  # or its workers go on for a while, beside the new ones
            crashed = code < 0 or code == EXIT_CRASHED or self.name not in WORKING
            reason = f"died (exit code {code})"
            if code == EXIT_CRASHED:
                reason = f"failed ({log_end(self.log).removeprefix('error: ')})"
            self._replace(reason, step, for_good=not crashed, stopping=stopping)

    def _hang(self) -> str | None:
        """What is wrong with the living process, if anything is."""
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def _lose(self, how: str) -> None:
        """Leave it dead: the run is stopping."""
        self._start_at = None
        self.ended = self.name in WORKING
        self.lost = f"{self.name} {how}"

    def _replace(self, reason: str, step: int, *, for_good: bool = False, stopping: bool) -> None:
        """Have a successor started at the time that the rule says, unless the run is stopping.

        Raises:
            RoleFailed: there is none.
        """
        self.run.set_role(self.name, "failed", self.process.pid)
        if self.name == "trainer":
            self.run.end_roles("failed", *OWN_WORKERS)
        if stopping and not (for_good and self.name == "trainer"):
            self._lose(reason)
            return
        wait = None if for_good else self._rule.wait_after_death(step)
        if wait is None:
            raise RoleFailed(f"{self.name} {reason}; the end of {self.log}:\n{log_end(self.log)}")
        how = "is replaced by its standby" if self._standby_lives() else "is started again"
        self.run.history.restart(self.name, step=step, reason=reason, how=how)
        self._start_at = time.monotonic() + wait
        self._replaced = True

    def _begin(self, step: int) -> None:
        """Have a process take the role: the standby, or a new one."""
        if self._standby_lives():
            self.process = self._standby
            self.process.stdin.write(b"begin\n")
            self.process.stdin.close()
        else:
            self.process = self._start()
        self._standby = None
        self._had_standby = not (self.config.standby and self.name in STANDBY)
        self._begun_at_step = step
        self._look_at = 0.0
        limits = {"silence": self.config.heartbeat_timeout, "standstill": self.config.hang_timeout}
        if self.name not in WORKING:  # a server that does not answer is as good as a stopped one
            limits |= {"standstill": self.config.heartbeat_timeout, "setting": "--heartbeat-timeout"}
        self._watch = Watch(self.run.heartbeat(self.name), self.process.pid, **limits)

    def _standby_lives(self) -> bool:
        return self._standby is not None and self._standby.poll() is None

    def _keep_standby(self, step: int) -> None:
        """Start a standby once the role's process has come so far that it does not disturb; one each."""
        if not self._had_standby and step > self._begun_at_step:
            self._had_standby = True
            self._standby = self._start(standby=True)

    def _start(self, *, standby: bool = False) -> subprocess.Popen:
        trainer = self.config.trainer if isinstance(self.config, RLConfig) else self.config
        local = trainer.ray.address is None
        return start_role(self.name, self.run.path, self.log, local_ray=local, standby=standby)

    def stop(self) -> None:
        """End its process: a server gets its signal first; then, with its whole session, it is killed."""
        if self._standby is not None:
            kill_session(self._standby.pid)
            self._standby.wait()
        if self.process.poll() is not None:
            kill_session(self.process.pid)
            return
        if self.name in WORKING:
            kill_session(self.process.pid)
        else:
            self.process.send_signal(END_SERVER)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.process.wait()
        state = "stopped" if self.process.returncode == 0 else "failed"
        self.run.set_role(self.name, state, self.process.pid)


def _conclude(run: RunDirectory, attempt: Attempt, code: int, step: int, config: RunConfig) -> int:
    """Say how the run ended; returns the launcher's exit code.

    Raises:
        RoleFailed: it did not end as it should have.
    """
    store = CheckpointStore(run.checkpoints)
    folder = store.folder(step)
    if code == EXIT_STOPPED:
        print(_saved(step, folder), flush=True)
        return EXIT_STOPPED
    if code == EXIT_LOST:
        return _conclude_early(run, attempt, step, config, RANK_DIED)
    missing = None
    if step < config.max_steps:
        missing = f"metrics.jsonl ends with step {step} of {config.max_steps}"
    elif config.ckpt and not store.exists(step):
        missing = f"{folder} is not there"
    if missing:
        raise RoleFailed(f"the trainer reported no error, but {missing}; see {run.logs / 'trainer.log'}")
    saved = f", saved in {folder}" if config.ckpt else ""
    print(f"done: step {step}{saved}", flush=True)
    return 0


def _saved(step: int, folder: Path) -> str:
    return f"stopped at step {step}, saved in {folder}; --ckpt.resume auto goes on"


def _conclude_early(run: RunDirectory, attempt: Attempt, step: int, config: RunConfig, why: str) -> int:
    """Say what became of a run that was asked to stop and could not save its newest step; see `_conclude`."""
    store = CheckpointStore(run.checkpoints)
    newest = store.latest() or 0
    if newest == step > attempt.start_step:  # it died after that
        print(_saved(step, store.folder(step)), flush=True)
        return EXIT_STOPPED
    if step <= max(newest, attempt.start_step):
        saved = f" Step {newest}, saved in {store.folder(newest)}, is the newest." if newest else ""
        print(
            f"stopped before step {step + 1}: nothing is lost.{saved} "
            f"{'--ckpt.resume auto goes on from there' if newest else 'The same command starts again'}",
            flush=True,
        )
        return EXIT_STOPPED
    if not config.ckpt:
        raise RoleFailed(f"stopped at step {step}, which is lost: --ckpt would have saved it")
    start = f"from step {newest}" if newest else "from the start"
    print(
        f"stopped, but step {step} could not be saved ({why}): --ckpt.resume auto goes on {start}, and does "
        f"the steps after it again",
        flush=True,
    )
    return EXIT_STOPPED
