"""Policies from server to server: one that has received a policy from the trainer's memory hands it on.

The trainer's ranks then send a policy to a few servers, whatever the number of all. A server hands on the
words that it has received, from host memory, by the protocol of `network.py`, in which it is one rank that
has all tensors; with them go the checksums that the trainer's ranks have sent, so each server compares what
it has got with what the trainer had. Whoever does not get the policy from another server gets it from the
trainer.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from cairn.policy.generation import Relay, Route
from cairn.policy.receiver import Rank, Source
from cairn.policy.sender import WITHDRAW_SECONDS, WeightSender

logger = logging.getLogger(__name__)

KEEP_SECONDS = 600.0
"""Longest time for which a server keeps a policy for others; none of them is waited for any longer."""


def handed_on(source: Source, relay: Relay) -> Source:
    """The same policy from a server in place of the trainer: one rank that has all of each tensor, and the
    token of the trainer's first one."""
    ranges = {name: [(0, size)] if (size := prod(shape)) else [] for name, shape in source.shapes.items()}
    return replace(source, ranks=[Rank(relay.host, relay.port, ranges, source.ranks[0].token)])


class PolicyRelay:
    """Hands on the newest policy that a server has received.

    Args:
        keep_seconds: for which a policy is kept at most.
    """

    def __init__(self, keep_seconds: float = KEEP_SECONDS):
        self._keep_seconds = keep_seconds
        self._sender: _Relaying | None = None

    def offer(
        self, source: Source, tensors: Mapping[str, torch.Tensor], sums: Mapping[str, int], route: Route
    ) -> Relay | None:
        """Hand on a policy to `route.children` servers, or until the next one is offered.

        Args:
            tensors: in host memory; they must not change, and are let go when all have got them.
            sums: their checksums, as the trainer has sent them.

        Returns:
            None if there is nobody to hand it on to, or this machine has no such address as the route says.
        """
        self.end()
        if not route.children:
            return None
        try:
            self._sender = _Relaying(tensors, sums, route, source.ranks[0].token, self._keep_seconds)
        except (OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("others can't get the policy from here, at %s: %s", route.host, reason)
            return None
        self._sender.offer(source.step)
        return Relay(route.host, self._sender.here.port)

    def end(self) -> None:
        """Hand nothing on any more; a server that is getting the policy turns to the trainer."""
        if self._sender is not None:
            self._sender.let_go(0.0)
            self._sender.close()
            self._sender = None


class _Relaying(WeightSender):
    """Sends one policy to some servers, each of which it tells the trainer's checksums."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        sums: Mapping[str, int],
        route: Route,
        token: str,
        seconds: float,
    ):
        self._sums = dict(sums)
        self._left = route.children
        super().__init__(tensors, rank=0, host=route.host, token=token)
        self._timer = threading.Timer(seconds, self.let_go, [0.0])
        self._timer.daemon = True
        self._timer.start()

    def _sent(self, names: list[str], contributions: dict[str, int]) -> dict[str, int]:
        """What the trainer has sent: a word that has changed here since is noticed there."""
        with self._state:
            self._left -= 1
        if self._left <= 0:
            threading.Thread(target=self.let_go, daemon=True).start()
        return {name: self._sums[name] for name in names}

    def let_go(self, seconds: float = WITHDRAW_SECONDS) -> None:
        """Answer nobody from now on, give up transfers that go on after `seconds`, and free the memory."""
        self._timer.cancel()
        self.withdraw(seconds)
        self._shares = {}
