"""Runs the roles of an attempt, each in a process and a session of its own, and sees them through."""

import subprocess
import time

from cairn.checkpoint.store import CheckpointStore
from cairn.config.rl import RLConfig
from cairn.launch.attempt import NewestDamaged, RunConfig
from cairn.launch.display import StepDisplay
from cairn.launch.main import EXIT_STOPPED, EXIT_USAGE
from cairn.launch.process import RoleFailed, kill_session, log_end, start_role, stop_on_signals
from cairn.launch.restarts import RestartRule
from cairn.launch.roles import EXIT_CRASHED, EXIT_DAMAGED, EXIT_LOST, STANDBY, WORKING
from cairn.run.directory import Attempt, RunDirectory
from cairn.run.errors import UsageError
from cairn.run.heartbeat import Watch

STOP_SECONDS = 20
OWN_WORKERS = ("trainer_rank", "trainer_spare")
"""How the workers in roles.json are named that die with the trainer's driver."""
LOOK_SECONDS = 0.5
"""Between two looks at a role's heartbeat."""


def run_roles(run: RunDirectory, attempt: Attempt, roles: list[str], config: RunConfig) -> int:
    """Start the roles, start those again that die, and stop what is left at the end; returns the exit code.

    Raises:
        RoleFailed: a role failed for good.
        NewestDamaged: the trainer died, and what it has to go on from is damaged.
    """
    with stop_on_signals(run), StepDisplay(run, attempt.start_step, config.max_steps) as display:
        watched = [_Role(name, run, config) for name in roles]
        try:
            working = True
            while working:
                for role in watched:
                    role.look_after(display.step)
                working = any(not role.ended for role in watched if role.name in WORKING)
                display.update()
                time.sleep(0.05)
        finally:
            for role in reversed(watched):
                role.stop()
            run.end_roles("stopped", "")
        codes = {role.name: role.process.returncode for role in watched}
    code = _conclude(run, codes["trainer"], display.step, config)
    if account := display.account():
        print(account, flush=True)
    return code


class _Role:
    """One role's process: the current one, if it was started again; and its standby, if it has one."""

    def __init__(self, name: str, run: RunDirectory, config: RunConfig):
        self.name = name
        self.run = run
        self.log = run.logs / f"{name}.log"
        self.config = config
        self.ended = False
        self._rule = RestartRule(config.max_restarts)
        self._start_at: float | None = None
        self._replaced = False
        self._standby: subprocess.Popen | None = None
        self._begin(0)

    def look_after(self, step: int) -> None:
        """Notice its end, or that it hangs, and start it again; `step` is the run's newest.

        Raises:
            RoleFailed: it reported an error that would only come again, or died too often.
            UsageError: it refused what the user asked for; a server, at its first start.
            NewestDamaged: see `run_roles`.
        """
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start_at = None
                self._begin(step)
            return
        if self.ended:
            return
        code = self.process.poll()
        if code is None:
            hang = self._hang()
            if hang is None:
                self._keep_standby(step)
                return
            kill_session(self.process.pid)
            self.process.wait()
            self._replace(f"hung ({hang})", step)
        elif self.name in WORKING and code in (0, EXIT_STOPPED, EXIT_LOST):
            self.ended = True
        elif code == EXIT_USAGE and (self.name in WORKING or not self._replaced):
            raise UsageError(log_end(self.log).removeprefix("error: "))
        elif self.name == "trainer" and code == EXIT_DAMAGED:
            raise NewestDamaged(log_end(self.log).removeprefix("error: "))
        else:
            kill_session(self.process.pid)  # or its workers go on for a while, beside the new ones
            crashed = code < 0 or code == EXIT_CRASHED or self.name not in WORKING
            self._replace(f"died (exit code {code})", step, for_good=not crashed)

    def _hang(self) -> str | None:
        """What is wrong with the living process, if anything is."""
        if time.monotonic() < self._look_at:
            return None
        self._look_at = time.monotonic() + LOOK_SECONDS
        return self._watch.problem()

    def _replace(self, reason: str, step: int, *, for_good: bool = False) -> None:
        """Have a successor started at the time that the rule says.

        Raises:
            RoleFailed: there is none.
        """
        self.run.set_role(self.name, "failed", self.process.pid)
        if self.name == "trainer":
            self.run.end_roles("failed", *OWN_WORKERS)
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
        """End its process: a server is asked first; then, with its whole session, it is killed."""
        if self._standby is not None:
            kill_session(self._standby.pid)
            self._standby.wait()
        if self.process.poll() is not None:
            kill_session(self.process.pid)
            return
        self.process.terminate() if self.name not in WORKING else kill_session(self.process.pid)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.process.wait()
        state = "stopped" if self.process.returncode == 0 else "failed"
        self.run.set_role(self.name, state, self.process.pid)


def _conclude(run: RunDirectory, code: int, step: int, config: RunConfig) -> int:
    """Say how the run ended; returns the launcher's exit code.

    Raises:
        RoleFailed: it did not end as it should have.
    """
    store = CheckpointStore(run.checkpoints)
    folder = store.folder(step)
    if code == EXIT_STOPPED:
        print(f"stopped at step {step}, saved in {folder}; --ckpt.resume auto goes on", flush=True)
        return EXIT_STOPPED
    if code == EXIT_LOST:
        raise RoleFailed(f"stopped at step {step}, which is lost: --ckpt would have saved it")
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
