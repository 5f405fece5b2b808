# torch.distributed exports neither stores nor the types of process groups.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""Transfers policies from the trainer's memory into the servers': over NCCL between GPUs, else over gloo.

Every trainer rank hosts a store, at which a server may ask at any time for the policy that the rank holds.
The rank sends its shards while training continues: weights change only in `optimizer.step()`, which waits
until no server is reading them. So policies are neither copied nor written to disk for servers, and a server
that joins late gets the current policy too.

Each pair of a server and a rank is a process group. The two communicate through the store, with these keys
after the pair's number: `hello` (the server's order of tensors and data type), then for each policy i `ask/i`
(its step), `answer/i` (`yes`, `gone` or `early`) and `go/i` (`yes` if all ranks said yes, else `no`). Then
the tensors are sent, and `sums/i` holds the checksums of what the rank has sent. The rank's half is in
`sender.py`, the server's in `receiver.py`.
"""

from datetime import timedelta
from typing import Union

import torch
import torch.distributed as dist

from cairn.policy.rendezvous import address_towards

PATIENCE = timedelta(seconds=60)
"""Timeout of each transfer operation between rank and server."""
ANSWER = timedelta(seconds=10)
"""Timeout of a server's wait for a rank's answer; the server generates nothing while it waits."""

PairGroup = Union["dist.ProcessGroupGloo", "dist.ProcessGroupNCCL"]
"""The process group of one rank and one server."""


def join_pair(store: dist.Store, pair: int, rank: int, host: str, device: torch.device) -> PairGroup:
    """The process group of a rank (rank 0 in the group) and a server; `host` is the rank's address."""
    prefixed = dist.PrefixStore(f"{pair}/group", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        return dist.ProcessGroupNCCL(prefixed, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(prefixed, rank, 2, options)
