# torch.distributed exports neither stores nor the types of process groups.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false
"""Transfers policies from the trainer's memory into the servers', through host memory and over TCP.

Every trainer rank listens, and a server may ask at any time for the policy that the rank holds. The rank
sends its shards while training continues: weights change only in `optimizer.step()`, which waits until no
server is reading them. So policies are not written to disk for servers, and a server that joins late gets the
current policy too.

Devices take no part in a transfer: a rank copies values from its GPU into a small piece of host memory as it
sends them, and a server copies what it has received to its own. So a rank and a server may share a GPU, or
have devices of different kinds; and a peer that dies or stops is an error of this transfer alone. (NCCL is no
substitute: its watchdog ends the process of the survivor, and it can't run beside the training's own NCCL
operations on another communicator of the same GPU.)

A server has one connection to each rank (`connections.py`), for all policies. Both know the token of the
rank, which is in the policy's folder, where only the user may read it. The server sends `names`, its order of
tensors; then for each policy `step`, and `base`, the digest of the policy that it has, if the source offers
deltas. The rank sends `answer`, and the server `go`: whether all ranks send. What a rank answers, each by
itself, is WHOLE, DELTA (`delta.py`; only to whom has the policy that its delta is relative to), SAME (the
server has that policy), or that it sends nothing: `gone` or `early`. Then come the bytes of the rank's share
of the tensors; or what they have changed by, after `sizes`, the number of bytes for each tensor. After them
come `sums`, the checksums of the rank's share. The rank's half is in `sender.py`, the server's in
`receiver.py`.

Every wait for the other side has a limit, within which something must arrive: ANSWER seconds for an answer,
PATIENCE seconds for values.
"""

import socket
import struct
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
"""Limit of each wait between rank and server for values."""
ANSWER = timedelta(seconds=10)
"""Limit of a server's wait for a rank's answer; the server generates nothing while it waits."""
WHOLE, DELTA, SAME = "yes", "delta", "same"
"""Answers of a rank that sends what the server lacks."""
MESSAGE_BYTES = 32 << 20
"""Most that is sent at a time; it takes a tenth of a second over a slow network."""


def limit_waits(link: socket.socket, limit: timedelta | None) -> None:
    """Have what waits on a connection in which nothing moves for so long raise an OSError.

    It is the kernel that waits. With a socket's own timeout each few bytes would be a call, after which the
    interpreter's lock has to be taken again, from a server that is busy with requests.
    """
    link.settimeout(None)
    seconds = limit.total_seconds() if limit else 0.0
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        link.setsockopt(
            socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        )


def messages(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat values, cut into what is sent at a time."""
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
