"""Processes that compute shares of passes beside the service's own (`helper_process.py`).

Each has the base in its memory, and nothing else that lasts. A helper that dies, or hangs, is started again;
until it is ready, the service's own process computes its shares: they are the same to the bit whoever does.
"""

import contextlib
import logging
import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from cairn.config.service import ServiceConfig
from cairn.config.shared import SupervisionConfig
from cairn.run.supervised import RestartRule, Supervised, SupervisedProcess
from cairn.service.shares import WEIGHTS_OF, PassShare, ShareAnswer, receive, send

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "cairn.service.helper_process")
LOOK_SECONDS = 1.0
"""Between two looks at a helper that is waited for."""
END_SECONDS = 5.0


class SharesPasses(Protocol):
    """A model whose passes are shared."""

    @property
    def lora(self) -> Mapping[str, Any]:
        """What its adapter is made of; see `AdapterBase.make`."""
        ...

    @property
    def values(self) -> object:
        """Another object whenever its weights are others."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of its adapter, on the CPU."""
        ...

    def compute_share(self, share: PassShare) -> ShareAnswer:
        """Compute one; the gradients that the model has stay as they are."""
        ...


class PassHelper(Supervised[SupervisedProcess]):
    """One such process; constructing it starts it.

    Args:
        number: its own, from 1; on GPUs, that of its GPU.
        folder: of the base.
    """

    def __init__(self, number: int, config: ServiceConfig, folder: Path):
        name, logs = f"worker_{number}", Path(config.output_dir) / "logs"
        rule = RestartRule(max_restarts=sys.maxsize)
        super().__init__(name, logs / f"{name}.log", logs / f"{name}.heartbeat.json", rule)
        self._first = {"config": config.model_dump_json(), "folder": str(folder), "number": number}
        self._limits = SupervisionConfig()
        self.done = 0
        """How many shares it has computed, with those before it."""
        self._begin()

    def _start(self) -> SupervisedProcess:
        self._socket, theirs = socket.socketpair()
        with theirs:
            argv = [*PROGRAM, str(theirs.fileno()), str(self._heartbeat), str(os.getpid())]
            process = SupervisedProcess(argv, self.log, pass_fds=[theirs.fileno()])
        self._socket.settimeout(LOOK_SECONDS)
        self._base: str | None = None
        self._has: dict[str, object] = {}
        """The weights that it has, by what adapters are made of."""
        silence, standstill = self._limits.heartbeat_timeout, self._limits.hang_timeout
        self.watch_over(process.pid, silence=silence, standstill=standstill)
        with contextlib.suppress(OSError):  # it has died, which is seen later
            send(self._socket, self._first, {})
        return process

    def is_ready(self, base: str) -> bool:
        """Whether it can take a share; starts it again if that is due.

        Args:
            base: names the base that it should have.
        """
        if how := self._look():
            self._replace(how)
        elif self._restart_at is None and self._base is None and select.select([self._socket], [], [], 0)[0]:
            found = receive(self._socket, self._alive)
            self._base = found and str(found[0]["base"])
            if self._base != base:
                self._replace("has not read the base, or has read another one")
        return self._restart_at is None and self._base == base

    def ask(self, model: SharesPasses, share: PassShare) -> bool:
        """Have it compute a share; returns whether it was there to take it."""
        about, tensors = share.message()
        kind = str(sorted(model.lora.items()))
        about["lora"] = dict(model.lora)
        if self._has.get(kind) is not model.values:
            tensors |= {f"{WEIGHTS_OF}/{name}": one for name, one in model.weights().items()}
        try:
            self._socket.settimeout(self._limits.heartbeat_timeout)
            send(self._socket, about, tensors)
            self._socket.settimeout(LOOK_SECONDS)
        except OSError as error:
            self._replace(f"took no share: {error}")
            return False
        self._has[kind] = model.values
        return True

    def answer(self) -> ShareAnswer | None:
        """What has come of the share that it was asked for; None if it died over it."""
        found = receive(self._socket, self._alive)
        if found is None or "error" in found[0]:
            self._replace(f"gave no answer{': ' + found[0]['error'] if found else ''}")
            return None
        self.done += 1
        return ShareAnswer.of(*found)

    def _alive(self) -> bool:
        return self._look() is None

    def _replace(self, how: str) -> None:
        """End it; it is started again after a while."""
        logger.warning("%s %s, and is started again; see %s", self.name, how, self.log)
        self._process.kill()
        self._socket.close()
        self._plan_restart(self.done)

    def give_up(self) -> None:
        """End it over a share that nobody waits for any more."""
        if self._restart_at is None:
            self._replace("computes what nobody waits for")

    def close(self) -> None:
        """End it for good."""
        self._socket.close()
        if not self._process.wait(END_SECONDS):
            self._process.kill()


class PassHelpers:
    """All of them; as a context manager, none outlives it."""

    def __init__(self, config: ServiceConfig, folder: Path):
        """Start as many as `workers` asks for beside this process."""
        self.each = [PassHelper(number, config, folder) for number in range(1, config.workers)]

    def __enter__(self) -> "PassHelpers":
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self.each:
            helper.close()

    @property
    def processes(self) -> int:
        """How many compute, with this one."""
        return 1 + len(self.each)

    def compute(self, model: SharesPasses, base: str, shares: Sequence[PassShare]) -> list[ShareAnswer]:
        """The answers to shares, in their order; the first one is computed here.

        Args:
            base: names the base of the model.
        """
        asked: list[PassHelper | None] = []
        for helper, share in zip(self.each, shares[1:], strict=False):
            ready = bool(share.groups) and helper.is_ready(base) and helper.ask(model, share)
            asked.append(helper if ready else None)
        try:
            answers = [model.compute_share(shares[0])]
            for share in shares[1:]:
                helper = asked.pop(0)
                answers.append((helper and helper.answer()) or model.compute_share(share))
        finally:
            for helper in filter(None, asked):
                helper.give_up()
        return answers
