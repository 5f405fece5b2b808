# torch.distributed exports neither stores nor the types of process groups.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""How policies get from the trainer's memory straight into the servers': NCCL between GPUs, else gloo.

Every trainer rank hosts a store, at which any server may ask at any time for the policy that the rank holds.
The rank sends its shards while training goes on: weights change in the optimiser's step only, which waits
until no server reads them any more. So policies are neither copied nor written to disk for servers, and a
server that joins late gets the current policy too.

Each pair of a server and a rank is a process group. The two agree over the store, with these keys after the
pair's number:
`hello` (in which order and data type the server wants the tensors), then for each policy i `ask/i` (its
step), `answer/i` (`yes`, `gone` or `early`) and `go/i` (`yes` once all ranks said yes, else `no`). Then come
the tensors, and under `sums/i` the checksums of what the rank has sent. The rank's half is in `sender.py`,
the server's in `receiver.py`.
"""

from datetime import timedelta
from typing import Union

import torch
import torch.distributed as dist

from cairn.policy.rendezvous import address_towards

PATIENCE = timedelta(seconds=60)
"""Timeout of each operation between the two."""
ANSWER = timedelta(seconds=10)
"""Timeout of a server's wait for a rank's answer; the server generates nothing meanwhile."""

PairGroup = Union["dist.ProcessGroupGloo", "dist.ProcessGroupNCCL"]
"""The process group of one rank and one server."""


def join_pair(store: dist.Store, pair: int, rank: int, host: str, device: torch.device) -> PairGroup:
    """The group of a rank, which is 0 in it, and a server; `host` is the rank's address."""
    prefixed = dist.PrefixStore(f"{pair}/group", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(prefixed, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(prefixed, rank, 2, options)
