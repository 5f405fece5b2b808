"""The parts of a pass that several processes compute side by side, and how they are sent from one to another.

Whoever computes a part needs the adapter's weights and the part's samples, and gives logprobs, losses and
gradients. Nothing of it stays there: so a process that dies takes nothing along, and its part may be computed
again by any other, with the same bits.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load, save

from cairn.service.wire import Datum

HEAD = struct.Struct("<QQ")
"""What a message begins with: the lengths of its JSON object and of its tensors, in bytes."""
LARGEST_READ = 1 << 24
DATA, LOGPROBS, GRADIENTS, WEIGHTS_OF = "data", "logprobs", "gradients", "weights"
"""What the names of tensors in messages begin with."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class PassShare:
    """Micro-batches of a pass.

    number: of the call. data: by their place in the request. groups: for each micro-batch, by its number in
    the whole pass, its rows: places of the samples that share one.
    """

    loss_fn: str
    config: Mapping[str, Any]
    forward_only: bool
    number: int
    data: Mapping[int, Datum]
    groups: Mapping[int, Sequence[Sequence[int]]]

    def message(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """It as a JSON object and tensors."""
        about = {
            **{"loss_fn": self.loss_fn, "config": dict(self.config), "forward_only": self.forward_only},
            **{"number": self.number, "groups": list(self.groups.items())},
        }
        tensors: dict[str, torch.Tensor] = {}
        for place, datum in self.data.items():
            for name, values in {"": datum.tokens, **datum.inputs}.items():
                tensors[f"{DATA}/{place}/{name}"] = torch.from_numpy(np.ascontiguousarray(values).copy())
        return about, tensors

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Tensors) -> "PassShare":
        """Of what `message` gives."""
        found: dict[int, dict[str, npt.NDArray[Any]]] = {}
        for name, values in named(tensors, DATA).items():
            place, _, what = name.partition("/")
            found.setdefault(int(place), {})[what] = values.numpy()
        data = {place: Datum(values.pop(""), values) for place, values in found.items()}
        groups = {int(index): rows for index, rows in about["groups"]}
        return cls(about["loss_fn"], about["config"], about["forward_only"], about["number"], data, groups)


@dataclass(frozen=True)
class ShareAnswer:
    """What has come of a share.

    logprobs: float32 [N] of each sample's targets, by place. losses: of each micro-batch, by its number, in
    float32. gradients: of the sum of these losses, by the names of parameters; none of a forward pass.
    """

    logprobs: Mapping[int, npt.NDArray[np.float32]]
    losses: Mapping[int, float]
    gradients: Tensors

    def message(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """It as a JSON object and tensors."""
        tensors = {f"{LOGPROBS}/{place}": torch.from_numpy(one) for place, one in self.logprobs.items()}
        tensors |= {f"{GRADIENTS}/{name}": one.contiguous() for name, one in self.gradients.items()}
        return {"losses": list(self.losses.items())}, tensors

    @classmethod
    def of(cls, about: Mapping[str, Any], tensors: Tensors) -> "ShareAnswer":
        """Of what `message` gives."""
        logprobs = {int(place): one.numpy() for place, one in named(tensors, LOGPROBS).items()}
        losses = {int(index): float(loss) for index, loss in about["losses"]}
        return cls(logprobs, losses, named(tensors, GRADIENTS))


def named(tensors: Tensors, kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind, without it in their names."""
    begin = f"{kind}/"
    return {name.removeprefix(begin): one for name, one in tensors.items() if name.startswith(begin)}


def send(to: socket.socket, about: Mapping[str, Any], tensors: Tensors) -> None:
    """Send a message.

    Raises:
        OSError: nobody takes it.
    """
    head, body = json.dumps(about).encode(), save(dict(tensors))
    to.sendall(HEAD.pack(len(head), len(body)) + head)
    to.sendall(body)


def receive(
    by: socket.socket, alive: Callable[[], bool] = lambda: True
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """The next message; None if there comes no more, or the sender is not `alive` when it keeps one waiting.

    `alive` is asked each time that the socket's timeout is over.
    """
    begin = _exactly(by, HEAD.size, alive)
    if begin is None:
        return None
    sizes: tuple[int, int] = HEAD.unpack(begin)
    head, body = (_exactly(by, size, alive) for size in sizes)
    if head is None or body is None:
        return None
    return json.loads(head), load(bytes(body))


def _exactly(by: socket.socket, size: int, alive: Callable[[], bool]) -> bytearray | None:
    found = bytearray()
    while len(found) < size:
        try:
            piece = by.recv(min(size - len(found), LARGEST_READ))
        except TimeoutError:
            if not alive():
                return None
            continue
        except OSError:
            return None
        if not piece:
            return None
        found += piece
    return found
