# torch.distributed exports neither stores nor the types of process groups.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""Transfers policies from the trainer's memory into the servers', through host memory and over gloo.

Every trainer rank hosts a store, at which a server may ask at any time for the policy that the rank holds.
The rank sends its shards while training continues: weights change only in `optimizer.step()`, which waits
until no server is reading them. So policies are not written to disk for servers, and a server that joins late
gets the current policy too.

Devices take no part in a transfer: a rank copies values from its GPU into a small piece of host memory as it
sends them, and a server copies what it has received to its own. So a rank and a server may share a GPU, or
have devices of different kinds; and a peer that dies or stops is an error of this transfer alone. (NCCL is no
substitute: its watchdog ends the process of the survivor, and it can't run beside the training's own NCCL
operations on another communicator of the same GPU.)

Each pair of a server and a rank is a process group. The two communicate through the store, with these keys
after the pair's number: `hello` (the server's order of tensors), then for each policy i `ask/i` (its step,
and the digest of the policy that the server has, if the source offers deltas), `answer/i` and `go/i` (`yes`
if all ranks send, else `no`). What a rank answers, each by itself, is WHOLE, DELTA (`delta.py`; only to whom
has the policy that its delta is relative to), SAME (the server has that policy), or that it sends nothing:
`gone` or `early`. Then the tensors are sent, in messages of at most MESSAGE_BYTES; or what they have changed
by, after `sizes/i`, the number of bytes for each tensor. `sums/i` holds the checksums of the rank's share.
The rank's half is in `sender.py`, the server's in `receiver.py`.

Every wait for the other side has a limit, within which something must arrive: ANSWER seconds for an answer,
PATIENCE seconds for a message.
"""

import socket
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
"""Timeout of each message between rank and server, and of making their connection."""
ANSWER = timedelta(seconds=10)
"""Timeout of a server's wait for a rank's answer; the server generates nothing while it waits."""
WHOLE, DELTA, SAME = "yes", "delta", "same"
"""Answers of a rank that sends what the server lacks."""
MESSAGE_BYTES = 32 << 20
"""Largest message; it takes a tenth of a second over a slow network."""


def join_pair(
    store: dist.Store, pair: int, rank: int, host: str, patience: timedelta = PATIENCE
) -> "dist.ProcessGroupGloo":
    """The process group of a rank (rank 0 in the group) and a server; `host` is the rank's address.

    Its operations raise RuntimeError if nothing arrives for `patience`.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(dist.PrefixStore(f"{pair}/group", store), rank, 2, options)


def messages(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat values, cut into messages; both sides must cut alike."""
    return iter(flat.split(MESSAGE_BYTES // flat.element_size()))


def host_store(host: str, port: int = 0, world_size: int | None = None) -> dist.TCPStore:
    """Host a store on `host`, on a free port unless one is given; PyTorch's own would listen on every
    network.

    With `world_size`, it waits for that many clients.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    port = listening.getsockname()[1]
    wait = world_size is not None
    return dist.TCPStore(
        host, port, world_size, is_master=True, wait_for_workers=wait, master_listen_fd=listening.detach()
    )


def address_towards(host: str) -> str:
    """This machine's address on the network towards `host`, which is `host` itself if it is this machine's.

    Sends nothing.

    Raises:
        OSError: the name is unknown, or there is no way towards it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            probe.connect((host, 9))
        return probe.getsockname()[0]
