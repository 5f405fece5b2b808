"""Executes the calls of models: those of one model in their order, those of different models by turns.

One thread does it. What a call has changed is in memory only, until a state is saved; the ledger has each
call that came since. So a model that is not in memory, whether this process was killed or another model
needed the room, is taken up from its newest good state, and the calls since are computed again.
"""

import contextlib
import json
import logging
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.checkpoint.manifest import CheckpointError
from cairn.checkpoint.step_folder import StepFolder, verify
from cairn.checkpoint.store import CheckpointStore
from cairn.config.service import ServiceConfig, TenantConfig
from cairn.run.errors import CairnError, UsageError
from cairn.run.faults import fault_point
from cairn.run.machine import bytes_of
from cairn.service.ledger import ServiceLedger
from cairn.service.schema import (
    CREATE,
    DONE,
    FAILED,
    FORWARD,
    LOAD,
    PASS,
    SAMPLE,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    UNLOAD,
    WAITING,
    SavedWeights,
    ServiceCall,
)
from cairn.service.trainees import AdamStep, AdapterBase, ClientModel
from cairn.service.wire import CallRefused, read_pass

logger = logging.getLogger(__name__)

MODELS = "models"
"""Folder of the models' states and checkpoints, within the service's."""
CHANGING = (CREATE, LOAD, PASS, STEP)
"""Kinds of calls that change a model, or what its next update does."""
PROTO_BODY, JSON_BODY = b"P", b"J"
"""What the body of a pass begins with in the ledger: how the rest is encoded."""


class ModelLost(CairnError):
    """A model can't be taken up again; the message says why."""


@dataclass
class _Resident:
    """A model in memory. updated: the number of the call that last changed its weights."""

    model: ClientModel
    updated: int


class CallWorker:
    """The thread that executes calls of models, and what it works with."""

    def __init__(
        self,
        config: ServiceConfig,
        tenants: dict[str, TenantConfig],
        base: AdapterBase,
        ledger: ServiceLedger,
        tell: Callable[[str], None],
    ):
        """Take up the calls that wait in the ledger.

        Args:
            tell: called with the id of each call that is finished, from the thread.
        """
        self._config, self._tenants, self._base, self._ledger = config, tenants, base, ledger
        self._tell = tell
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        """The models in memory; the one that was used last is at the end."""
        self._waiting: OrderedDict[str, deque[ServiceCall]] = OrderedDict()
        """The calls of each model, in their order; the model whose turn is next comes first."""
        self._leaving = set[str]()
        """Models that are to leave the memory."""
        self._changed = threading.Condition()
        self._over = False
        for call in ledger.calls("state = ? AND kind != ?", WAITING, SAMPLE):
            self.submit(call)
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)

    def start(self) -> None:
        """Begin to execute."""
        self._thread.start()

    def submit(self, call: ServiceCall) -> None:
        """Have a call executed that the ledger has; any thread may call it."""
        with self._changed:
            self._waiting.setdefault(call.owner, deque()).append(call)
            self._changed.notify()

    def set_aside(self, owner: str) -> None:
        """Have a model saved and taken out of memory, unless it has a call by then; from any thread."""
        with self._changed:
            self._leaving.add(owner)
            self._changed.notify()

    def close(self) -> None:
        """End after the call that is being executed; those that wait stay in the ledger."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._leaving or self._over):
                    self._changed.wait()
                if self._over:
                    return
                leaving = self._leaving - self._waiting.keys()
                self._leaving.clear()
            for owner in sorted(leaving):
                self._leave(owner)
            with self._changed:
                if not self._waiting:
                    continue
                owner, calls = self._waiting.popitem(last=False)
                call = calls.popleft()
                if calls:
                    self._waiting[owner] = calls  # behind the other models
            self._execute(call)
            self._tell(call.id)

    def _execute(self, call: ServiceCall) -> None:
        """Execute a call, and record what came of it."""
        more: dict[str, Any] = {}
        try:
            answer, more = self._answer(call)
            state = DONE
        except (CallRefused, CheckpointError, ModelLost, UsageError) as error:
            state, answer = FAILED, failure(str(error), "user")
        except Exception as error:  # the client is told; what is in memory may be half done
            logger.exception("call %s failed", call.id)
            self._resident.pop(call.owner, None)
            state, answer = FAILED, failure(f"the service failed: {type(error).__name__}: {error}", "server")
        fault_point("service.executed")
        self._ledger.finish(call, state, answer, **more)
        fault_point("service.answered")
        try:
            if state == DONE and call.kind in (STEP, LOAD):
                self._keep_state(call)
            elif call.kind == UNLOAD:
                self._clear(call.owner)
        except Exception:  # the call is answered, and the ledger can do without the state
            logger.exception("after call %s of %s", call.id, call.kind)

    def _answer(self, call: ServiceCall) -> tuple[bytes, dict[str, Any]]:
        """Execute a call; returns its answer, and what else the ledger is to know."""
        if call.kind == UNLOAD:
            self._resident.pop(call.owner, None)
            self._ledger.forget_model(call.owner)
            return _json(model_id=call.owner, type=UNLOAD), {}
        if self._ledger.model(call.owner).gone:
            raise CallRefused(f"model_id: model {call.owner} is unloaded, or its session is finished")
        resident = self._taken(call.owner, call.seq)
        if call.kind in (*CHANGING, FORWARD):
            return self._change(resident, call), {}
        return self._save(resident, call)

    def _change(self, resident: _Resident, call: ServiceCall) -> bytes:
        """Do what a call changes; the same call gives the same answer each time."""
        model = resident.model
        assert call.body is not None, "calls that may be computed again are kept"
        if call.kind in (PASS, FORWARD):
            asked = read_pass(
                call.body[1:], proto=call.body[:1] == PROTO_BODY, forward_only=call.kind == FORWARD
            )
            return model.compute(asked, call.seq)
        asked = json.loads(call.body)
        if call.kind == STEP:
            try:
                metrics = model.update(AdamStep.of(asked))
            except CallRefused:
                model.drop_gradients()  # as when the call is computed again
                raise
            resident.updated = call.seq
            return _json(metrics=metrics, type=STEP)
        if call.kind == LOAD:
            saved = self._ledger.checkpoint(asked["path"], call.tenant)
            training = bool(asked["optimizer"])
            if training and saved.kind != "training":
                raise CallRefused(
                    f"path: {saved.path} has weights for samplers, without the optimiser's state"
                )
            model.read(self._folder(saved), training=training)
            resident.updated = call.seq
            return _json(path=saved.path, model_id=call.owner, type=LOAD)
        resident.updated = call.seq
        return _json(model_id=call.owner, type=CREATE)

    # Taking a model up

    def _taken(self, owner: str, before: int) -> _Resident:
        """The model in memory, as it was before its call of a number.

        Raises:
            ModelLost: it can't be taken up again.
        """
        if owner not in self._resident:
            while len(self._resident) >= self._config.resident_models:
                self._resident.popitem(last=False)
            self._resident[owner] = self._taken_up(owner, before)
        self._resident.move_to_end(owner)
        return self._resident[owner]

    def _taken_up(self, owner: str, before: int) -> _Resident:
        model = self._base.make(self._ledger.model(owner).lora)
        resident, at = _Resident(model, -1), -1
        for step, folder in self._states(owner):
            try:
                position = model.read(folder)
            except CheckpointError as error:
                logger.warning("model %s: state %d is passed over: %s", owner, step, error)
                model = resident.model = self._base.make(self._ledger.model(owner).lora)
                continue
            at, resident.updated = int(position["call"]), int(position["updated"])
            break
        again = 0
        for call in self._ledger.calls(
            "owner = ? AND seq > ? AND seq < ? AND state != ?", owner, resident.updated, before, WAITING
        ):
            if call.kind in CHANGING and (call.seq > at or call.kind == PASS):
                self._again(resident, call)
                again += 1
        if again or at >= 0:
            logger.info("model %s is taken up from call %d; %d calls were computed again", owner, at, again)
        return resident

    def _again(self, resident: _Resident, call: ServiceCall) -> None:
        """Compute a finished call again; of those that failed, an update has dropped the gradients."""
        if call.state == FAILED:
            if call.kind == STEP:
                resident.model.drop_gradients()
            return
        if call.body is None:
            raise ModelLost(
                f"model {call.owner} can't be taken up: the states that its call {call.seq} is part of are "
                "damaged; create a model from a checkpoint that you have saved"
            )
        answer = self._change(resident, call)
        if call.answer is not None and answer != call.answer:
            logger.warning("call %s, computed again, has another result than before", call.id)

    def _states(self, owner: str) -> list[tuple[int, Path]]:
        """A model's states, the newest first."""
        store = self._store(owner)
        found = [(step, store.folder(step)) for step in reversed(store.steps())]
        return [(step, folder) for step, folder in found if (folder / "trainer").is_dir()]

    # Saving

    def _store(self, owner: str) -> CheckpointStore:
        """The steps of a model, numbered by the calls that have saved them."""
        return CheckpointStore(Path(self._config.output_dir) / MODELS / owner.replace(":", "_"))

    def _folder(self, saved: SavedWeights) -> Path:
        return Path(self._config.output_dir) / saved.folder

    def _write(self, resident: _Resident, call: ServiceCall, *, training: bool) -> Path:
        """Save a model as the step of a call, unless that was done before this process was killed."""
        store, step = self._store(call.owner), call.seq + 1  # steps count from 1, and calls from 0
        if store.exists(step):
            with contextlib.suppress(CheckpointError):
                verify(store.folder(step))
                return store.folder(step)
            store.delete(step)
        position = {"call": call.seq, "updated": resident.updated}
        return resident.model.write(store, step, position, training=training)

    def _save(self, resident: _Resident, call: ServiceCall) -> tuple[bytes, dict[str, Any]]:
        """Save a checkpoint under the name that a client gives.

        Raises:
            CallRefused: the name is taken, or there is no room for it in the tenant's quota.
        """
        assert call.body is not None, "it has not been executed"
        asked, training = json.loads(call.body), call.kind == SAVE
        kind = "training" if training else "sampler"
        name = asked.get("path") or f"sampler-{call.seq:06d}"
        path = f"tinker://{call.owner}/{'weights' if training else 'sampler_weights'}/{name}"
        earlier = self._ledger.checkpoints("path = ?", path)
        if earlier and training and not asked.get("overwrite"):
            raise CallRefused(f"path: {path} is there already; give another name, or overwrite=True")
        self._remove_expired(call.tenant)
        quota = bytes_of(self._tenants[call.tenant].stored) if call.tenant in self._tenants else 0
        there = self._ledger.stored(call.tenant) - sum(one.bytes for one in earlier)
        if there + resident.model.nbytes(training=training) > quota:
            raise CallRefused(
                f"path: {path} would take {resident.model.nbytes(training=training)} bytes beside the "
                f"{there} that are stored, and the tenant's quota (stored) is {quota}; delete checkpoints"
            )
        folder = self._write(resident, call, training=training)
        fault_point("service.saved")
        ttl = asked.get("ttl_seconds")
        now = time.time()
        saved = SavedWeights(
            path=path,
            tenant=call.tenant,
            model=call.owner,
            kind=kind,
            name=name,
            folder=folder.relative_to(self._config.output_dir).as_posix(),
            bytes=sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()),
            call=call.id,
            created=now,
            expires=None if ttl is None else now + ttl,
            metadata=asked.get("user_metadata") or {},
        )
        if training:
            return _json(path=path, type=SAVE), {"saved": saved}
        if (number := asked.get("sampling_session_seq_id")) is None:
            return _json(path=path, type=SAVE_SAMPLER), {"saved": saved}
        session = self._ledger.model(call.owner).session
        sampler = f"{session}:sample:{number}"
        answer = _json(path=path, sampling_session_id=sampler, type=SAVE_SAMPLER)
        return answer, {"saved": saved, "sampler": (sampler, session, path)}

    def _keep_state(self, call: ServiceCall) -> None:
        """Save the state after a call if it is time, and forget what is older than the states that are kept.

        A disk that is full costs nothing but time after a crash: the ledger has the calls.
        """
        resident = self._resident[call.owner]
        if call.kind == STEP and resident.model.steps % self._config.state_interval:
            return
        try:
            self._write(resident, call, training=True)
            self._prune(call.owner)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "the state of model %s can't be saved, and is tried again later: %s", call.owner, error
            )

    def _leave(self, owner: str) -> None:
        """Take a model out of memory once its newest update is saved; gradients are computed again."""
        resident = self._resident.pop(owner, None)
        if resident is None or any(step > resident.updated for step, _ in self._states(owner)[:1]):
            return
        position = {"call": resident.updated, "updated": resident.updated}
        try:
            resident.model.write(self._store(owner), resident.updated + 1, position, training=True)
            self._prune(owner)
        except (OSError, CheckpointError) as error:
            logger.warning("model %s stays in memory, since it can't be saved: %s", owner, error)
            self._resident[owner] = resident

    def _prune(self, owner: str) -> None:
        """Delete states beyond the number that is kept, and the calls that none of these needs."""
        store, states = self._store(owner), self._states(owner)
        kept = states[: self._config.states]
        used = {Path(folder).name for folder in self._ledger.folders_in_use(owner)}
        used |= {folder.name for _, folder in kept}
        for step in store.steps():
            if store.folder(step).name not in used:
                store.delete(step)
        for folder in store.debris():
            shutil.rmtree(folder, ignore_errors=True)
        record = StepFolder(kept[-1][1]).trainer_state() if len(kept) == self._config.states else None
        if record is not None and record.position:
            through = int(record.position["updated"])
            self._ledger.forget(owner, through, self._config.answer_hours)

    def _clear(self, owner: str) -> None:
        """Delete what nobody needs of a model that is gone."""
        store = self._store(owner)
        used = {Path(folder).name for folder in self._ledger.folders_in_use(owner)}
        for step in store.steps():
            if store.folder(step).name not in used:
                store.delete(step)
        self._ledger.forget(owner, self._ledger.next_seq(owner), self._config.answer_hours)

    def _remove_expired(self, tenant: str) -> None:
        for saved in self._ledger.checkpoints("tenant = ? AND expires < ?", tenant, time.time()):
            self.remove(saved)

    def remove(self, saved: SavedWeights) -> None:
        """Delete a checkpoint; if it is among the newest states of its model, its files stay for that."""
        self._ledger.remove_checkpoint(saved.path)
        store, step = self._store(saved.model), int(saved.folder.rpartition("_")[2])
        states = [number for number, _ in self._states(saved.model)[: self._config.states]]
        alive = not self._ledger.model(saved.model).gone
        if store.exists(step) and not (alive and step in states):
            store.delete(step)


def failure(reason: str, category: str) -> bytes:
    """What a client gets of a call that failed. category: `user` if the call was wrong, else `server`."""
    return _json(error=reason, category=category)


def _json(**values: Any) -> bytes:
    return json.dumps(values).encode()
