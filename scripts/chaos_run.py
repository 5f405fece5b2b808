"""One run that disasters strike, and the promises that it has to keep all the same."""

import asyncio
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_plan import Disaster, Setting
from chaos_processes import Family, Process, send
from chaos_proxy import MOODS, Proxy

from cairn.checkpoint.manifest import FILE_NAME, CheckpointError, load_manifest
from cairn.checkpoint.store import CheckpointStore, verify
from cairn.inference.client import TOKEN_VARIABLE, InferenceClient
from cairn.launch.audit import audit
from cairn.run.directory import RunDirectory
from cairn.run.errors import UsageError
from cairn.run.files import read_json
from cairn.run.metrics import MetricsLog

DEADLINE = 600.0
"""Seconds that a run may take before it counts as hanging."""
PATIENCE = 60.0
"""Seconds that what is left of a run has for ending by itself."""
ROLE_PATIENCE = 5.0
"""Seconds that a disaster waits for its victim to be there."""
STARTS = 8
"""Most starts of one run."""
EXIT_USAGE, EXIT_STOPPED = 2, 75
MEASURED = ("time/", "run/", "servers/", "weights/")
"""Metrics that tell of times and of what had to be done again: these differ from run to run."""
RAY_AGENT = ("Agent", "dashboard", "runtime_env")
"""Processes of Ray that outlive a killed driver for a minute."""


class Server:
    """The long-lived server that the harness starts for its runs, and the user who starts it again."""

    def __init__(self, folder: Path, command: list[str], url: str, token: str):
        self.url = url
        self.log = folder / "server.log"
        self.command = command
        self.family = Family({TOKEN_VARIABLE: token})
        self._process: subprocess.Popen | None = None

    def launch(self) -> None:
        """Start it, if it is not there; returns at once. It ends with the thread that calls this."""
        if self._process is None or self._process.poll() is not None:
            self._process = self.family.start(self.log, self.command)

    def start(self) -> None:
        """Start it, if it is not there; returns when it is healthy."""
        self.launch()
        end = time.monotonic() + DEADLINE
        while not asyncio.run(self._healthy()):
            if self._process.poll() is not None or time.monotonic() > end:
                sys.exit(f"error: the inference server does not start; see {self.log}")
            time.sleep(0.2)

    async def _healthy(self) -> bool:
        async with InferenceClient(self.url) as client:
            return await client.health()

    def kill(self) -> None:
        """SIGKILL, all its processes."""
        self.family.kill()
        if self._process:
            self._process.wait()


@dataclass
class Task:
    """A configuration to run again and again.

    proxy: between the run and its server, if that is not the run's own. server: that, if it is the harness's.
    """

    command: list[str]
    setting: Setting
    token: str = ""
    proxy: Proxy | None = None
    server: Server | None = None
    calm: "Result | None" = None
    """How it went undisturbed."""


@dataclass
class Result:
    """What came of a run."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    """Checksums of the last step's weights and optimiser state, by file."""
    seconds: float = 0.0
    """From the first step to the last."""
    struck: list[Disaster] = field(default_factory=list)
    missed: list[Disaster] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    recomputed: list[int] = field(default_factory=list)
    """Steps that had to be done again, for each time that the run fell back."""


class Watch:
    """Follows a run's steps and checkpoints, and notes what must never be seen."""

    def __init__(self, run: RunDirectory, result: Result):
        self.metrics = MetricsLog(run.metrics.path)
        self.store = CheckpointStore(run.checkpoints)
        self.result = result
        self.step = 0
        self.seen_at: dict[int, float] = {}
        """When each step stood in metrics.jsonl first."""
        self.latest = 0
        self.damaged: set[int] = set()
        """Checkpoints that the harness itself has damaged, as long as they are there."""
        self.fell_back = False
        """Whether the run had to go on from an older checkpoint than the newest."""

    def look(self) -> None:
        """To be called as often as can be."""
        rows = self.metrics.rows()
        step = rows[-1]["step"] if rows else 0
        if step < self.step:
            self.result.recomputed.append(self.step - step)
            if step < self.latest and self.latest not in self.damaged:
                what = f"went back from step {self.step} to {step}, although step {self.latest} was saved"
                self.result.violations.append(what)
        for number in range(1, step + 1):
            self.seen_at.setdefault(number, time.monotonic())
        self.step = step
        latest = self.store.latest() or 0
        if latest < self.latest and self.latest not in self.damaged:
            self.result.violations.append(f"latest went back from step {self.latest} to {latest}")
        if latest and latest not in self.damaged:
            self._check(latest, content=latest != self.latest)
        self.latest = latest
        self.damaged = {step for step in self.damaged if self.store.exists(step)}

    def _check(self, step: int, *, content: bool) -> None:
        try:
            verify(self.store.folder(step), content=content)
        except CheckpointError as error:
            if self.store.latest() == step:  # and was not deleted in favour of a newer one meanwhile
                self.result.violations.append(f"latest is not valid: {error}")


class ChaosRun:
    """A task's command from its start to its end, whatever happens."""

    def __init__(self, task: Task, plan: list[Disaster], folder: Path, chance: random.Random):
        self.task = task
        self.pending = [disaster for disaster in plan if disaster.kind != "fault"]
        self.faults = [disaster for disaster in plan if disaster.kind == "fault"]
        self.chance = chance
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.path = folder / "run"
        self.run = RunDirectory(self.path)
        self.log = folder / "command.log"
        self.result = Result(folder)
        self.watch = Watch(self.run, self.result)
        self.once = folder / "faults"
        self.once.mkdir()
        for fault in self.faults:
            (self.once / fault.target).touch()
        self.family = Family(self._environment())
        self.process: subprocess.Popen | None = None
        self.starts = 0
        self._struck_at = 0.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._down = False  # the whole command was killed, or asked to stop
        self._damage = False

    def _environment(self) -> dict[str, str]:
        environment = {"CAIRN_FAULT_ONCE": str(self.once)}
        if self.task.proxy:
            environment[TOKEN_VARIABLE] = self.task.token
        if self.faults:
            environment["CAIRN_FAULT"] = ",".join(fault.target for fault in self.faults)
        return environment

    def go(self) -> Result:
        """Run to the end, then check every promise."""
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
        return self.result

    # From start to end

    def _start(self) -> None:
        resume = ["--ckpt.resume", "auto"] if self.starts else []
        command = [*self.task.command, "--output-dir", str(self.path), *resume]
        if self.task.proxy:
            command += ["--orchestrator.inference-url", self.task.proxy.url]
        self.process = self.family.start(self.log, command)
        self.starts += 1
        self._down = False

    def _see_through(self) -> None:
        end = time.monotonic() + DEADLINE
        while True:
            self.watch.look()
            if self.process.poll() is not None:
                if self._is_over():
                    return
                self._start()
            elif self.pending and self._is_due(self.pending[0]):
                disaster = self.pending.pop(0)
                struck = self._strike(disaster)
                (self.result.struck if struck else self.result.missed).append(disaster)
                self._struck_at = time.monotonic()
            self._do_what_is_due()
            if time.monotonic() > end:
                self.result.violations.append(
                    f"still running after {DEADLINE:g} s, at step {self.watch.step}"
                )
                return
            time.sleep(0.03)

    def _is_over(self) -> bool:
        """Whether the command's end is the run's; if not, a user would start it again."""
        code = self.process.returncode
        fired = [fault for fault in self.faults if not (self.once / fault.target).exists()]
        for fault in fired:
            self.faults.remove(fault)
            self.result.struck.append(fault)
        disk_failed = any("kill" not in fault.target for fault in fired)
        if code == 0:
            return True
        last = self.task.setting.last_step
        if code == EXIT_USAGE and self.starts > 1 and self.watch.store.exists(last):
            return True  # there was nothing left to do
        if not (self._down or (code == 1 and disk_failed)) or self.starts == STARTS:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            self.result.violations.append(f"the command ended with exit code {code}; it printed:\n{tail}")
            return True
        if self._damage:
            self._damage = False
            self._corrupt_newest()
        return False

    def _do_what_is_due(self) -> None:
        due = [job for when, job in self._later if time.monotonic() >= when]
        self._later = [(when, job) for when, job in self._later if time.monotonic() < when]
        for job in due:
            job()

    def _end_everything(self) -> None:
        for _, job in self._later:
            job()
        self._later.clear()
        self.family.kill()
        self.process.wait()

    def _check_processes(self) -> None:
        """Nothing of the run is left."""
        end = time.monotonic() + PATIENCE
        while left := [p for p in self.family.processes() if not _is_ray_agent(p)]:
            if time.monotonic() > end:
                self.result.violations.append(f"processes are left: {[p.command for p in left]}")
                return
            time.sleep(0.1)

    # Disasters

    def _is_due(self, disaster: Disaster) -> bool:
        if disaster.step is None:
            return time.monotonic() >= self._struck_at + disaster.after
        seen = self.watch.seen_at.get(disaster.step)
        return seen is not None and time.monotonic() >= seen + disaster.after

    def _strike(self, disaster: Disaster) -> bool:
        """Have it happen; whether it did: its victim may not be there any more."""
        kind = disaster.kind
        if kind in MOODS:
            return self._set_mood(disaster)
        if kind == "wrong_weights":
            return self._push_wrong_weights()
        if kind in ("power_cut", "corrupt"):
            self._down, self._damage = True, kind == "corrupt"
            send(signal.SIGKILL, self.family.processes())
            return True
        if kind == "kill" and disaster.target == "server":
            self.task.server.kill()
            self.task.server.launch()
            return True
        victims = self._wait_for_victims("worker" if kind == "rot" else disaster.target)
        if not victims:
            return False
        if kind == "rot":
            send(signal.SIGSTOP, victims)  # or it saves another in between
            self._corrupt_newest()
        if kind == "pause":
            send(signal.SIGSTOP, victims)
            again = time.monotonic() + disaster.seconds
            self._later.append((again, lambda: send(signal.SIGCONT, victims)))
            return True
        self._down = self._down or disaster.target == "launcher" or kind == "stop"
        send(signal.SIGTERM if kind == "stop" else signal.SIGKILL, victims)
        return True

    def _wait_for_victims(self, target: str) -> list[Process]:
        end = time.monotonic() + ROLE_PATIENCE
        while not (victims := self._victims(target)):
            if self.process.poll() is not None or time.monotonic() > end:
                return []
            time.sleep(0.02)
            self.watch.look()
        return victims

    def _victims(self, target: str) -> list[Process]:
        """The processes of a role, as far as they are of this run's family."""
        if target == "server":
            return self.task.server.family.processes()
        if target == "writer":
            return self.family.named("cairn.checkpoint.writer")[:1]
        pid = self.process.pid
        target = "trainer_rank0" if target == "worker" else target
        if target != "launcher":
            with contextlib.suppress(ValueError):
                entry = (read_json(self.run.roles) or {}).get("roles", {}).get(target, {})
                pid = entry.get("pid") if entry.get("state") == "running" else None
        return [process for process in self.family.processes() if process.pid == pid]

    def _set_mood(self, disaster: Disaster) -> bool:
        proxy = self.task.proxy
        proxy.mood = disaster.kind

        def recover() -> None:
            proxy.mood = None

        self._later.append((time.monotonic() + disaster.seconds, recover))
        return True

    def _push_wrong_weights(self) -> bool:
        """Another run's weights, behind this one's back."""
        proxy = self.task.proxy
        model = Path(self.task.calm.folder) / "run" / "checkpoints"
        model = CheckpointStore(model).folder(self.task.setting.last_step) / "model"

        async def push() -> None:
            async with InferenceClient(proxy.target, self.task.token) as client:
                await client.update_weights(model, "somebody:else:0")

        with contextlib.suppress(Exception):  # the server may be dead just now
            asyncio.run(push())
            return True
        return False

    def _corrupt_newest(self) -> None:
        """Change a byte of the newest checkpoint, unless it is the only one."""
        store = self.watch.store
        if len(store.steps()) < 2:
            return
        folder = store.folder(store.latest())
        files = [name for name, entry in load_manifest(folder).files.items() if entry.size]
        path = folder / self.chance.choice([FILE_NAME, *sorted(files)])
        content = bytearray(path.read_bytes())
        content[self.chance.randrange(len(content))] ^= 0xFF
        path.write_bytes(content)
        self.watch.damaged.add(store.latest())
        self.watch.fell_back = True

    # Promises

    def _conclude(self) -> None:
        result, setting = self.result, self.task.setting
        result.missed += [*self.pending, *self.faults]
        result.rows = MetricsLog(self.run.metrics.path).rows()
        times = [self.watch.seen_at.get(step) for step in (1, setting.last_step)]
        if None not in times:
            result.seconds = times[1] - times[0]
        self._check_audit()
        self._check_checkpoints()
        self._check_against_calm()
        self._check_recomputed()
        self._check_generations()

    def _check_audit(self) -> None:
        try:
            report = audit(self.path)
        except (CheckpointError, UsageError) as error:
            self.result.violations.append(f"audit: {error}")
            return
        self.result.violations += [f"audit: {v.kind}: {v.what}: {v.rows}" for v in report.violations]
        if sum(epoch.waiting for epoch in report.epochs):
            self.result.violations.append("audit: at the end there are prompts that wait")

    def _check_checkpoints(self) -> None:
        store = self.watch.store
        for step in store.steps():
            try:
                verify(store.folder(step))
            except CheckpointError as error:
                if step not in self.watch.damaged:
                    self.result.violations.append(f"verify: {error}")
        if store.latest() != self.task.setting.last_step:
            self.result.violations.append(f"the newest checkpoint is step {store.latest()}")
        else:
            files = load_manifest(store.folder(store.latest())).files
            self.result.tensors = {
                name: entry.model_dump() for name, entry in files.items() if name.endswith(".safetensors")
            }

    def _check_against_calm(self) -> None:
        """The same metrics and the same weights, to the bit, as if nothing had happened."""
        calm = self.task.calm
        if calm is None:
            return
        ours, theirs = _unmeasured(self.result.rows), _unmeasured(calm.rows)
        if [row["step"] for row in ours] != [row["step"] for row in theirs]:
            self.result.violations.append(f"metrics have the steps {[row['step'] for row in ours]}")
        for row, other in zip(ours, theirs, strict=False):
            if different := {k for k in row.keys() | other.keys() if row.get(k) != other.get(k)}:
                shown = {key: [row.get(key), other.get(key)] for key in sorted(different)}
                self.result.violations.append(f"metrics of step {row['step']} differ: {shown}")
                break
        if self.result.tensors != calm.tensors:
            names = [n for n, entry in calm.tensors.items() if self.result.tensors.get(n) != entry]
            self.result.violations.append(f"the last step's tensors differ in {names}")

    def _check_recomputed(self) -> None:
        """From the newest checkpoint on, of which one at most is being written: an interval and its steps."""
        interval = self.task.setting.interval
        most = interval * (3 if self.watch.fell_back else 2)
        self.result.violations += [
            f"{steps} steps were done again, and saves fall due every {interval} steps"
            for steps in self.result.recomputed
            if steps > most
        ]

    def _check_generations(self) -> None:
        """A death of the trainer costs no finished generation: no request was answered twice."""
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


def _is_ray_agent(process: Process) -> bool:
    return any(name in process.command for name in RAY_AGENT) and "ray" in process.command


def _unmeasured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]


def scratch(prefix: str) -> Path:
    """A new temporary folder."""
    return Path(tempfile.mkdtemp(prefix=prefix))


def remove(folder: Path) -> None:
    """Remove a run that kept its promises."""
    shutil.rmtree(folder, ignore_errors=True)
